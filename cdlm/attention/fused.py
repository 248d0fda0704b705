"""The Triton backend: checks, tile shapes and launches. Importing this file loads triton.

With TRITON_INTERPRET=1 in the environment before triton is imported, the kernels run on CPU tensors.
"""

import contextlib
import math
import os
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cdlm.attention import HEAD_DIMS, kernels, tiles
from cdlm.masks import CLEAN, NO_GROUP, NO_HORIZON, Sight

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Shape:
    """How a kernel is cut: query rows and keys of a tile, warps of a program, stages of the software pipeline."""

    rows: int
    keys: int
    warps: int
    stages: int


# target -> head dimension -> forward, gradient of q, gradients of k and v, for values of two bytes. Chosen with `cdlm kernels`, which
# compiles every entry in bf16 with four query heads a key-value head, and fails on a spill: on AMD the largest tile that leaves
# room for two waves a SIMD where there is one; on NVIDIA tiles whose M side (rows, or keys in the last kernel) is 64 or more where
# that does not spill, as warp-group matrix instructions need. Head dimension 32 takes the tiles of 64. LOG.md has what was tried.
HALF = {
    "gfx942": {
        64: ((128, 32, 4, 2), (64, 32, 4, 1), (32, 64, 4, 1)),
        128: ((64, 32, 4, 2), (128, 32, 8, 1), (32, 64, 4, 1)),
        256: ((64, 32, 4, 1), (32, 32, 4, 1), (16, 64, 8, 1)),
    },
    "gfx950": {
        64: ((64, 32, 4, 2), (64, 32, 4, 1), (32, 64, 4, 1)),
        128: ((64, 32, 4, 1), (64, 32, 4, 1), (32, 64, 4, 1)),
        256: ((64, 32, 4, 1), (64, 32, 4, 1), (16, 64, 8, 1)),
    },
    "sm_90": {
        64: ((128, 64, 8, 2), (64, 64, 4, 1), (32, 64, 4, 1)),
        128: ((128, 64, 8, 2), (64, 64, 8, 2), (32, 64, 8, 1)),
        256: ((64, 64, 8, 2), (32, 32, 4, 1), (32, 32, 8, 1)),
    },
    "sm_100": {
        64: ((128, 64, 8, 2), (64, 64, 4, 1), (32, 64, 4, 1)),
        128: ((128, 64, 8, 2), (64, 64, 8, 2), (64, 64, 8, 1)),
        256: ((64, 64, 8, 2), (64, 32, 8, 1), (32, 64, 8, 1)),
    },
}
SMALL = (Shape(64, 32, 4, 1), Shape(32, 32, 4, 1), Shape(32, 32, 4, 1))  # GPUs without an entry: little shared memory, no pipeline
SINGLE = (Shape(32, 32, 4, 1),) * 3  # fp32


def shapes_of(target: str, itemsize: int, head_dim: int) -> tuple[Shape, Shape, Shape]:
    """The three kernels' shapes on a target, for values of `itemsize` bytes."""
    if itemsize == 4:
        return SINGLE
    if target not in HALF:
        return SMALL
    forward, for_q, for_kv = HALF[target][max(64, head_dim)]
    return Shape(*forward), Shape(*for_q), Shape(*for_kv)


INTERPRETED = (Shape(64, 64, 4, 1), Shape(64, 32, 4, 1), Shape(32, 64, 4, 1))


def interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter, on a CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def target_of(device: torch.device) -> str:
    """The GPU's architecture, by the name that HALF may know."""
    if torch.version.hip:  # first: a gfx942 calls itself capability (9, 4)
        return str(torch.cuda.get_device_properties(device).gcnArchName.split(":")[0])
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def shapes_for(q: Tensor) -> tuple[Shape, Shape, Shape]:
    if interpreted():
        return INTERPRETED
    return shapes_of(target_of(q.device), q.element_size(), q.shape[-1])


def check(q: Tensor, k: Tensor, v: Tensor) -> None:
    """A ValueError for what the kernel does not have."""
    if q.dtype not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        allowed = ", ".join(map(str, DTYPES))
        raise ValueError(f"the triton backend got dtypes {q.dtype}, {k.dtype}, {v.dtype}; allowed: one of {allowed} for all")
    if interpreted() and q.dtype == torch.bfloat16:
        raise ValueError("Triton's interpreter multiplies the bits of bfloat16 as integers; allowed in it: torch.float16, torch.float32")
    if q.shape[-1] not in HEAD_DIMS or v.shape[-1] != q.shape[-1]:
        allowed = ", ".join(map(str, HEAD_DIMS))
        raise ValueError(f"the triton backend got head dimensions {q.shape[-1]} and {v.shape[-1]}; allowed: {allowed}, the same for both")
    if q.device.type == "cpu" and not interpreted():
        raise ValueError("the triton backend needs a GPU, or TRITON_INTERPRET=1 set before Python starts; on a CPU take naive or sdpa")


_visits: WeakKeyDictionary[Sight, dict[Any, Any]] = WeakKeyDictionary()


def _prepared(seen: Sight, what: str, shape: Shape, group: int) -> Any:
    """Tile lists and the mask's integers as the kernels read them, made once a mask and shape (all layers share a mask)."""
    held = _visits.setdefault(seen, {})
    key = (what, shape.rows, shape.keys, group)
    if key not in held:
        make = tiles.by_rows if what == "rows" else tiles.by_keys
        found = make(seen, shape.rows, shape.keys, group)
        held[key] = (found.order, found.partial, found.full)
    if "integers" not in held:
        held["integers"] = tuple(x.int().contiguous() for x in (seen.horizon_BQ, seen.group_BQ, seen.position_BK, seen.group_BK))
    return (*held["integers"], *held[key])


def everything(batch: int, queries: int, keys: int, device: torch.device) -> Sight:
    """A mask under which every query sees every key."""

    def filled(length: int, value: int) -> Tensor:
        return torch.full((batch, length), value, dtype=torch.int32, device=device)

    return Sight(filled(queries, NO_HORIZON), filled(queries, NO_GROUP), filled(keys, 0), filled(keys, CLEAN))


def _plain(x: Tensor) -> Tensor:
    """With a dense last dimension, and no two values in one place (an expanded tensor's gradient is written through its strides)."""
    return x if x.stride(-1) == 1 and 0 not in x.stride() else x.contiguous()


def _on(device: torch.device) -> Any:
    """Launch on this device, whichever is current."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _strides(*x: Tensor) -> list[int]:
    return [s for t in x for s in t.stride()[:3]]


def _options(shape: Shape) -> dict[str, Any]:
    return {"ROWS": shape.rows, "KEYS": shape.keys, "num_warps": shape.warps, "num_stages": shape.stages, "PRECISION": "ieee"}


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, seen: Sight, scale: float) -> tuple[Tensor, Tensor]:
        q, k, v = (_plain(x) for x in (q, k, v))
        batch, heads, queries, dim = q.shape
        kv_heads, keys = k.shape[1], k.shape[2]
        shape, group = shapes_for(q)[0], heads // kv_heads
        out = torch.empty((batch, queries, heads, dim), dtype=q.dtype, device=q.device).transpose(1, 2)
        lse = torch.empty((batch, heads, queries), dtype=torch.float32, device=q.device)
        grid = (-(-queries * group // shape.rows), batch * kv_heads)
        with _on(q.device):
            kernels.attention_forward[grid](
                q, k, v, out, lse, *_prepared(seen, "rows", shape, group), *_strides(q, k, v, out),
                queries, keys, kv_heads, scale * LOG2E, GROUP=group, D=dim, **_options(shape),
            )  # fmt: skip
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.seen, ctx.scale = seen, scale
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_out, d_lse = grads
        q, k, v, out, lse = ctx.saved_tensors
        batch, heads, queries, dim = q.shape
        kv_heads, keys = k.shape[1], k.shape[2]
        _, for_q, for_kv = shapes_for(q)
        group = heads // kv_heads
        d_out = _plain(d_out)
        # d_score = weight * (d_weight - delta), and the log-sum-exp's own gradient adds weight * d_lse.
        delta = ((d_out.float() * out.float()).sum(-1) - d_lse).contiguous()
        # Laid out as q, k and v: the kernels write through the same strides.
        dq, dk, dv = (torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in (q, k, v))
        strides, common = _strides(q, k, v, d_out), (queries, keys, kv_heads, ctx.scale, ctx.scale * LOG2E)
        with _on(q.device):
            kernels.attention_backward_q[(-(-queries * group // for_q.rows), batch * kv_heads)](
                q, k, v, d_out, dq, lse, delta, *_prepared(ctx.seen, "rows", for_q, group), *strides, *common,
                GROUP=group, D=dim, **_options(for_q),
            )  # fmt: skip
            kernels.attention_backward_kv[(-(-keys // for_kv.keys), batch * kv_heads)](
                q, k, v, d_out, dk, dv, lse, delta, *_prepared(ctx.seen, "keys", for_kv, group), *strides, *common,
                GROUP=group, D=dim, **_options(for_kv),
            )  # fmt: skip
        return dq, dk, dv, None, None


def attend(q_BHQD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor, seen: Sight | None, scale: float) -> tuple[Tensor, Tensor]:
    """As the naive backend gives: outputs and log-sum-exps, with gradients for q, k and v."""
    check(q_BHQD, k_BGKD, v_BGKD)
    if seen is None:
        seen = everything(q_BHQD.shape[0], q_BHQD.shape[2], k_BGKD.shape[2], q_BHQD.device)
    return _Attention.apply(q_BHQD, k_BGKD, v_BGKD, seen, scale)
