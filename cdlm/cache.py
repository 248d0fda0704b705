"""What is remembered of keys and values between forwards, and how it is taken back. The one file that touches
transformers' Cache.

A block cache has a committed prefix and room behind it. A forward writes its keys and values into the room and sees
prefix and room; nothing of it stays unless it is committed. So a block can be refined any number of times against the
same prefix with no copy and no crop, and the last refinement, whose keys still come from mask tokens, leaves no trace.
Rows may keep different numbers of what a forward wrote (draft and verify): a row's kept tokens stand side by side, the
room begins behind the longest row, and what lies between is marked as no token.
Shapes: B rows, H key-value heads, K keys, D head dimension.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class BlockLayer(CacheLayerMixin):
    """Keys and values of one layer in two buffers [B, H, capacity, D], allocated at the first update."""

    is_sliding = False

    def __init__(self, capacity: int):
        super().__init__()
        self.capacity = capacity
        self.committed = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        batch, heads, _, width = key_states.shape
        self.keys = key_states.new_empty(batch, heads, self.capacity, width)
        self.values = value_states.new_empty(batch, heads, self.capacity, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.committed + key_states.shape[-2]
        assert end <= self.capacity, f"cache of {self.capacity} positions asked to hold {end}"
        self.keys[:, :, self.committed : end] = key_states
        self.values[:, :, self.committed : end] = value_states
        return self.keys[:, :, :end], self.values[:, :, :end]

    def accept(self, count_B: Tensor, most: int, end_B: Tensor | None, width: int) -> None:
        """Keep, of what the last update wrote for row b, the first count_B[b] positions (at most `most`) and nothing else.

        end_B: the slot behind each row's last kept position, to which the new ones move; None where they stand in their place already.
        width: where the next update writes. A layer that remembers more than keys and values keeps the same rows of that.
        """
        if end_B is not None:
            place = (end_B[:, None] + torch.arange(most, device=end_B.device))[:, None, :, None]
            for held in (self.keys, self.values):
                fresh = held[:, :, self.committed : self.committed + most].clone()
                held.scatter_(2, place.expand_as(fresh), fresh)
        self.committed = width

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.committed + query_length, 0

    def get_seq_length(self) -> int:
        return self.committed

    def get_max_length(self) -> int:
        return self.capacity

    def select(self, rows: Tensor) -> None:
        if self.is_initialized:
            self.keys, self.values = self.keys[rows], self.values[rows]


class BlockCache(Cache):
    """Committed keys and values of a batch, and what a mask needs to know of them.

    position_BK, valid_BK: absolute position of each committed key, and whether it is a real token (not left padding).
    prompt_length_B: real prompt tokens of each row.
    next_position_B: absolute position of the next token of each row.
    boundary_BD: last hidden row of the committed part, kept for models whose logits are shifted by one.
    padded: whether some committed key may be padding.
    ends: the slot behind each row's last committed key; None while that is the same for all.
    layer: what a layer keeps; an architecture that is not local in positions keeps more than keys and values.
    """

    def __init__(self, layers: int, capacity: int, prompt_length_B: Tensor, layer: Callable[[int], BlockLayer] = BlockLayer):
        super().__init__(layers=[layer(capacity) for _ in range(layers)])
        batch, device = prompt_length_B.shape[0], prompt_length_B.device
        self.prompt_length_B = prompt_length_B
        self.position_BK = torch.zeros(batch, 0, dtype=torch.long, device=device)
        self.valid_BK = torch.zeros(batch, 0, dtype=torch.bool, device=device)
        self.next_position_B = torch.zeros(batch, dtype=torch.long, device=device)
        self.boundary_BD: Tensor | None = None
        self.padded = False
        self.ends: list[int] | None = None

    def commit(self, position_BC: Tensor, valid_BC: Tensor, boundary_BD: Tensor) -> None:
        """Keep the first C positions that the last forward wrote. Padding may stand in what is committed first, the prompt; of later
        tokens it is not asked, for that would wait for the device."""
        self.padded = self.padded or (self.position_BK.shape[1] == 0 and not bool(valid_BC.all()))
        self.position_BK = torch.cat([self.position_BK, position_BC], dim=1)
        self.valid_BK = torch.cat([self.valid_BK, valid_BC], dim=1)
        self.next_position_B = self.next_position_B + valid_BC.sum(dim=1)
        self.boundary_BD, self.ends = boundary_BD, None
        count, width = position_BC.shape[1], self.position_BK.shape[1]
        column_C = torch.arange(1, count + 1, device=valid_BC.device)
        count_B = F.pad(column_C * valid_BC, (1, 0)).amax(dim=1)  # up to a row's last real token; nothing of one that is all padding
        for layer in self.layers:
            layer.accept(count_B, count, None, width)

    def accept(self, counts: Sequence[int]) -> None:
        """Keep the first counts[b] positions that the last forward wrote for row b, real tokens that follow the row's others.

        A batch of one row, or rows that are equally far, keep them where they are; else each row's are moved behind its last one.
        """
        width, most = self.position_BK.shape[1], max(counts)
        ends = self.ends if self.ends is not None else [width] * len(counts)
        after = [end + count for end, count in zip(ends, counts, strict=True)]
        device = self.position_BK.device
        end_B1, count_B = torch.tensor(ends, device=device)[:, None], torch.tensor(counts, device=device)
        slot_W, more = torch.arange(max(after), device=device), max(after) - width
        fresh_BW = (slot_W >= end_B1) & (slot_W < end_B1 + count_B[:, None])
        position_BW = self.next_position_B[:, None] + slot_W - end_B1
        self.position_BK = torch.where(fresh_BW, position_BW, F.pad(self.position_BK, (0, more)))
        self.valid_BK = fresh_BW | F.pad(self.valid_BK, (0, more))
        self.next_position_B = self.next_position_B + count_B
        moves = min(ends) < width
        for layer in self.layers:
            layer.accept(count_B, most, end_B1[:, 0] if moves else None, max(after))
        ragged = min(after) < max(after)
        self.ends, self.padded = (after if ragged else None), self.padded or ragged

    def select(self, rows: Tensor) -> None:
        """Keep only these rows of the batch."""
        for layer in self.layers:
            layer.select(rows)
        self.prompt_length_B, self.next_position_B = self.prompt_length_B[rows], self.next_position_B[rows]
        self.position_BK, self.valid_BK = self.position_BK[rows], self.valid_BK[rows]
        if self.boundary_BD is not None:
            self.boundary_BD = self.boundary_BD[rows]
        if self.ends is not None:
            ends = [self.ends[row] for row in rows.tolist()]
            self.ends, width = (ends if min(ends) < max(ends) else None), max(ends)
            self.position_BK, self.valid_BK = self.position_BK[:, :width], self.valid_BK[:, :width]
            for layer in self.layers:
                layer.committed = width


class WholeLayer(BlockLayer):
    """Keys and values of all positions of one layer; a forward writes over those of the positions it computes."""

    start = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.start + key_states.shape[-2]
        self.keys[:, :, self.start : end] = key_states
        self.values[:, :, self.start : end] = value_states
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.capacity, 0


class WholeCache(Cache):
    """Keys, values and final hidden rows of whole sequences, as of the last forward that computed each position. Under full attention
    that is an approximation of what a forward over everything would give. The first forward must compute all positions.

    row_BLD: raw hidden rows after the final norm; None before the first forward.
    """

    def __init__(self, layers: int, length: int):
        super().__init__(layers=[WholeLayer(length) for _ in range(layers)])
        self.length = length
        self.row_BLD: Tensor | None = None

    def write_at(self, start: int) -> None:
        """Where the next forward's positions begin."""
        for layer in self.layers:
            layer.start = start

    def keep(self, row_BWD: Tensor, start: int) -> None:
        """The hidden rows that the last forward gave."""
        if self.row_BLD is None:
            assert start == 0 and row_BWD.shape[1] == self.length, "the first forward computes every position"
            self.row_BLD = row_BWD.clone()
        else:
            self.row_BLD[:, start : start + row_BWD.shape[1]] = row_BWD

    def select(self, rows: Tensor) -> None:
        """Keep only these rows of the batch."""
        for layer in self.layers:
            layer.select(rows)
        if self.row_BLD is not None:
            self.row_BLD = self.row_BLD[rows]
