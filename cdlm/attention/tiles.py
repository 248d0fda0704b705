"""Which tiles of a mask a kernel visits: those that nobody may see are left out, and those that all may see need no mask.

A tile is `rows` query rows by `keys` keys. The query heads of a key-value head are packed into rows: row r is query r // G, head
r % G of its group. Bounds of a tile decide, never the tile itself: a tile may be taken for partly visible when it is not
(its mask is evaluated, and the result is the same), never the other way round.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cdlm.masks import CLEAN, NEVER, NO_GROUP, Sight

BIG = NEVER


@dataclass(frozen=True)
class Visits:
    """For each tile of one side, the tiles of the other side to visit: `partial` first, then `full`, then the unseen.

    order: [B, T, U] tile numbers. partial, full: how many of each, [B, T]. All int32 and contiguous.
    """

    order: Tensor
    partial: Tensor
    full: Tensor


def _tiled(x_BL: Tensor, size: int, fill: int) -> Tensor:
    """[B, T, size], the last tile filled up."""
    x_BL = F.pad(x_BL, (0, -x_BL.shape[1] % size), value=fill)
    return x_BL.reshape(x_BL.shape[0], -1, size)


def verdicts(seen: Sight, rows: int, keys: int, group: int) -> tuple[Tensor, Tensor]:
    """(partly visible, wholly visible) for every pair of tiles, bool [B, row tiles, key tiles]. `group`: G."""
    horizon, own = (x.repeat_interleave(group, dim=1) for x in (seen.horizon_BQ, seen.group_BQ))
    low_h, high_h = _tiled(horizon, rows, BIG).amin(-1), _tiled(horizon, rows, -1).amax(-1)
    low_g, high_g = _tiled(own, rows, BIG).amin(-1), _tiled(own, rows, NO_GROUP).amax(-1)
    position, other = _tiled(seen.position_BK, keys, NEVER), _tiled(seen.group_BK, keys, CLEAN)
    clean = other == CLEAN
    first, last = position.masked_fill(~clean, NEVER).amin(-1), position.masked_fill(~clean, -1).amax(-1)
    low_o, high_o = other.masked_fill(clean, BIG).amin(-1), other.amax(-1)

    def pair(row_BT: Tensor, key_BU: Tensor) -> tuple[Tensor, Tensor]:
        return row_BT[:, :, None], key_BU[:, None, :]

    h, p = pair(high_h, first)
    lg, ho = pair(low_g, high_o)
    hg, lo = pair(high_g, low_o)
    some = (p <= h) | ((lo <= hg) & (ho >= lg))
    h, p = pair(low_h, last)
    all_clean = clean.all(-1)[:, None, :] & (p <= h)
    one_group = (lo == ho) & (lg == hg) & (lo == lg) & (~clean).all(-1)[:, None, :]
    whole = all_clean | one_group
    return some & ~whole, whole


def _visits(partial_BTU: Tensor, full_BTU: Tensor) -> Visits:
    kind = partial_BTU * 2 + full_BTU.int()
    order = torch.argsort(kind, dim=-1, descending=True, stable=True)
    return Visits(order.int().contiguous(), partial_BTU.sum(-1).int().contiguous(), full_BTU.sum(-1).int().contiguous())


def by_rows(seen: Sight, rows: int, keys: int, group: int) -> Visits:
    """Key tiles that each row tile visits (forward, gradient of the queries)."""
    partial, full = verdicts(seen, rows, keys, group)
    return _visits(partial, full)


def by_keys(seen: Sight, rows: int, keys: int, group: int) -> Visits:
    """Row tiles that each key tile visits (gradients of keys and values)."""
    partial, full = verdicts(seen, rows, keys, group)
    return _visits(partial.mT, full.mT)
