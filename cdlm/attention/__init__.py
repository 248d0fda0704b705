"""Attention under the masks of masks.py: one call, four backends.

naive   by definition, in fp32; the judge of the others
sdpa    torch's scaled_dot_product_attention: on a CPU, and wherever every key is seen
flex    torch's FlexAttention: on a GPU; on a CPU forward only
triton  this package's kernel (kernels.py), on AMD and NVIDIA; on a CPU in Triton's interpreter

Shapes: B rows, H query heads, G key-value heads (H is a multiple of G), Q queries, K keys, D head dimension.
"""

import logging
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from cdlm import masks
from cdlm.masks import Sight

BACKENDS = ("naive", "sdpa", "flex", "triton")
HEAD_DIMS = (32, 64, 128, 256)  # what the triton kernel is compiled for
log = logging.getLogger(__name__)


def choose(q_BHQD: Tensor, seen: Sight | None, *, need_lse: bool = False) -> tuple[str, str]:
    """The backend that "auto" takes, and why."""
    if seen is None and not need_lse:
        return "sdpa", "every key is seen, so no mask is needed"
    if q_BHQD.device.type == "cpu":
        return ("naive", "the log-sum-exp is asked for, on a CPU") if need_lse else ("sdpa", "on a CPU")
    fits = q_BHQD.shape[-1] in HEAD_DIMS and q_BHQD.dtype in (torch.bfloat16, torch.float16, torch.float32)
    if find_spec("triton") is not None and fits:
        return "triton", f"a mask on a GPU, head dimension {q_BHQD.shape[-1]}"
    return ("naive", "the log-sum-exp is asked for") if need_lse else ("flex", "a mask on a GPU that the triton kernel has no shape for")


@cache
def _tell(name: str, why: str) -> None:
    log.info("attention: backend %s (%s)", name, why)


def _check(q: Tensor, k: Tensor, v: Tensor, seen: Sight | None, backend: str) -> None:
    if backend not in (*BACKENDS, "auto"):
        raise ValueError(f"attention backend {backend!r}; allowed: {', '.join(BACKENDS)}, auto")
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"attention takes q [B, H, Q, D] and k, v [B, G, K, D]; got {shapes}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads do not divide among {k.shape[1]} key-value heads ({shapes})")
    if seen is not None:
        wanted, found = (q.shape[0], q.shape[2], k.shape[2]), (*seen.horizon_BQ.shape, seen.position_BK.shape[1])
        if wanted != found:
            raise ValueError(f"the mask is for rows, queries, keys {found}; the tensors have {wanted} ({shapes})")


def attend(
    q_BHQD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor, seen: Sight | None = None, *, scale: float | None = None, backend: str = "auto",
    need_lse: bool = False,
) -> Any:
    """softmax(scale q k^T) v over the keys that each query sees, [B, H, Q, D]; with need_lse also its log-sum-exp, [B, H, Q], fp32.

    seen: a mask of masks.py; None where every query sees every key. scale: 1/sqrt(D) by default. A query that sees nothing gives
    zeros. backend: a name, or "auto", whose choice is logged once with its reason.
    """
    _check(q_BHQD, k_BGKD, v_BGKD, seen, backend)
    scale = q_BHQD.shape[-1] ** -0.5 if scale is None else scale
    if backend == "auto":
        backend, why = choose(q_BHQD, seen, need_lse=need_lse)
        _tell(backend, why)
    if backend in ("naive", "triton"):
        if backend == "naive":
            from cdlm.attention.naive import attend as run
        else:
            from cdlm.attention.fused import attend as run
        out, lse = run(q_BHQD, k_BGKD, v_BGKD, seen, scale)
        return (out, lse) if need_lse else out
    if need_lse:
        raise ValueError(f"backend {backend} gives no log-sum-exp; allowed: naive, triton")
    if backend == "sdpa":
        from cdlm.attention import sdpa as single
    else:
        from cdlm.attention import flex as single  # type: ignore[no-redef]
    return single.attend(q_BHQD, k_BGKD, v_BGKD, seen, scale)


# ---- for stock transformers models: attn_implementation="cdlm_triton" ------------------------------------------------

PREFIX = "cdlm_"
_unpacked: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _sight(mask: Tensor, queries: int) -> Sight | None:
    """The mask in a packed tensor; one object for all layers that get the same tensor. None for `masks.everything`."""
    if mask.shape[-1] == 0:
        return None
    found = _unpacked.get(mask)
    if found is None:
        found = _unpacked[mask] = Sight.unpack(mask, queries)
    return found


def _for_transformers(backend: str) -> Callable[..., tuple[Tensor, None]]:
    def forward(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float | None = None,
        dropout: float = 0.0, **kwargs: Any,
    ) -> tuple[Tensor, None]:
        if dropout:
            raise ValueError(f"attention_dropout is {dropout}; the attention of this package has none, set it to 0")
        for name in ("softcap", "s_aux", "sliding_window"):
            if kwargs.get(name) is not None:
                raise ValueError(f"the model asks for {name} {kwargs[name]!r}, which this attention does not have; take 'sdpa' or 'eager'")
        if attention_mask is not None and attention_mask.dtype != torch.int32:
            raise ValueError(
                f"attn_implementation {PREFIX}{backend} takes masks.Sight.packed(), int32 [B, 1, 2, Q + K], not a mask of "
                f"{attention_mask.dtype} {tuple(attention_mask.shape)}; take attn_implementation 'sdpa' for that"
            )
        seen = None if attention_mask is None else _sight(attention_mask, query.shape[2])
        return attend(query, key, value, seen, scale=scaling, backend=backend).transpose(1, 2), None

    return forward


def _mask_for_transformers(
    batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, kv_offset: int = 0, mask_function: Any = None,
    attention_mask: Tensor | None = None, device: Any = "cpu", **kwargs: Any,
) -> Tensor | None:
    """What a stock model's own causal or full mask is in this package's form."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    if mask_function not in (None, causal_mask_function, bidirectional_mask_function):
        raise ValueError("this attention has causal, full and block-causal masks; the model asks for another one (a sliding window?)")
    query = torch.arange(q_offset, q_offset + q_length, device=device).expand(batch_size, -1)
    horizon = masks.full(query) if mask_function is bidirectional_mask_function else query
    key = torch.arange(kv_offset, kv_offset + kv_length, device=device).expand(batch_size, -1)
    valid = torch.ones_like(key, dtype=torch.bool)
    if attention_mask is not None:
        given = attention_mask[:, kv_offset : kv_offset + kv_length].to(torch.bool)
        valid[:, : given.shape[1]] = given
        valid[:, given.shape[1] :] = False
    return masks.clean(horizon, key, valid).packed()


def register() -> tuple[str, ...]:
    """Make the backends known to transformers as attn_implementation "cdlm_naive", "cdlm_sdpa" ... and "cdlm_auto"; gives the names."""
    from transformers import AttentionInterface, AttentionMaskInterface

    names = []
    for backend in (*BACKENDS, "auto"):
        names.append(PREFIX + backend)
        AttentionInterface.register(names[-1], _for_transformers(backend))
        AttentionMaskInterface.register(names[-1], _mask_for_transformers)
    return tuple(names)
