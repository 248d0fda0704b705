"""torch's FlexAttention. On a CPU it has a forward only, and is slow; on a GPU it is compiled.

A block mask is made once for a mask and kept as long as the mask lives. All masks share one mask function's code, which reads
its four rows of integers from tensors, so nothing is compiled again when they change.
"""

from collections.abc import Callable
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from cdlm.masks import CLEAN, Sight

_block_masks: WeakKeyDictionary[Sight, BlockMask] = WeakKeyDictionary()


def _looks(horizon_BQ: Tensor, group_BQ: Tensor, position_BK: Tensor, group_BK: Tensor) -> Callable[..., Tensor]:
    def may_look(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        clean = group_BK[b, k] == CLEAN
        return torch.where(clean, position_BK[b, k] <= horizon_BQ[b, q], group_BK[b, k] == group_BQ[b, q])

    return may_look


def block_mask(seen: Sight) -> BlockMask:
    """The block mask of a mask, made once."""
    if seen not in _block_masks:
        rows = [x.contiguous() for x in (seen.horizon_BQ, seen.group_BQ, seen.position_BK, seen.group_BK)]
        batch, queries = seen.horizon_BQ.shape
        keys = seen.position_BK.shape[1]
        device = seen.position_BK.device
        _block_masks[seen] = create_block_mask(
            _looks(*rows), batch, None, queries, keys, device=str(device), _compile=device.type == "cuda"
        )
    return _block_masks[seen]


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=False)


def attend(q_BHQD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor, seen: Sight | None, scale: float) -> Tensor:
    """As the naive backend gives, without log-sum-exp. No gradient on a CPU (torch has none there)."""
    if q_BHQD.device.type == "cpu" and any(x.requires_grad for x in (q_BHQD, k_BGKD, v_BGKD)):
        raise ValueError("backend flex has no backward on a CPU; allowed there: naive, sdpa")
    run = _compiled() if q_BHQD.device.type == "cuda" else flex_attention
    gqa = q_BHQD.shape[1] != k_BGKD.shape[1]
    return run(q_BHQD, k_BGKD, v_BGKD, block_mask=None if seen is None else block_mask(seen), scale=scale, enable_gqa=gqa)
