"""torch's FlexAttention. On a CPU it has a forward only, and is slow; on a GPU it is compiled.

A mask function closes over tensors, and a fresh closure may be compiled again. So closures are kept by shape: a mask takes a free
one, writes its four rows of integers into that one's tensors and builds its block mask; when the mask is gone the closure is free
for the next mask of that shape. A mask lives as long as a gradient through it is still to come.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from cdlm.masks import CLEAN, Sight


@dataclass(frozen=True)
class Closure:
    """A mask function and the tensors it reads: horizon and group of the queries, position and group of the keys."""

    rows: tuple[Tensor, Tensor, Tensor, Tensor]
    may_look: Callable[..., Tensor]


_free: defaultdict[Any, list[Closure]] = defaultdict(list)
_block_masks: WeakKeyDictionary[Sight, BlockMask] = WeakKeyDictionary()


def _closure(rows: tuple[Tensor, Tensor, Tensor, Tensor]) -> Closure:
    horizon_BQ, group_BQ, position_BK, group_BK = rows

    def may_look(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        clean = group_BK[b, k] == CLEAN
        return torch.where(clean, position_BK[b, k] <= horizon_BQ[b, q], group_BK[b, k] == group_BQ[b, q])

    return Closure(rows, may_look)


def block_mask(seen: Sight) -> BlockMask:
    """The block mask of a mask, made once."""
    if seen not in _block_masks:
        given = (seen.horizon_BQ, seen.group_BQ, seen.position_BK, seen.group_BK)
        batch, queries = seen.horizon_BQ.shape
        keys, device = seen.position_BK.shape[1], seen.position_BK.device
        if len(_free) > 64:  # decoding against a growing cache asks for ever new shapes
            _free.clear()
        free = _free[batch, queries, keys, device]
        if free:
            held = free.pop()
            for mine, value in zip(held.rows, given, strict=True):
                mine.copy_(value)
        else:
            a, b, c, d = (x.to(torch.int32, copy=True).contiguous() for x in given)
            held = _closure((a, b, c, d))
        _block_masks[seen] = create_block_mask(
            held.may_look, batch, None, queries, keys, device=str(device), _compile=device.type == "cuda"
        )
        weakref.finalize(seen, free.append, held)
    return _block_masks[seen]


@cache
def _compiled() -> Any:
    compiled = torch.compile(flex_attention)

    def run(*args: Any, **kwargs: Any) -> Tensor:
        # Past the limit torch falls back to materialising all scores without a word; better an error.
        with torch._dynamo.config.patch(recompile_limit=256, fail_on_recompile_limit_hit=True):
            return compiled(*args, **kwargs)

    return run


def attend(q_BHQD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor, seen: Sight | None, scale: float) -> Tensor:
    """As the naive backend gives, without log-sum-exp. No gradient on a CPU (torch has none there)."""
    if q_BHQD.device.type == "cpu" and any(x.requires_grad for x in (q_BHQD, k_BGKD, v_BGKD)):
        raise ValueError("backend flex has no backward on a CPU; allowed there: naive, sdpa")
    run = _compiled() if q_BHQD.device.type == "cuda" else flex_attention
    gqa = q_BHQD.shape[1] != k_BGKD.shape[1]
    out = run(q_BHQD, k_BGKD, v_BGKD, block_mask=None if seen is None else block_mask(seen), scale=scale, enable_gqa=gqa)
    if seen is not None and out.requires_grad:
        out.register_hook(lambda grad, seen=seen: None)  # the graph keeps the mask, and so its tensors
    return out
