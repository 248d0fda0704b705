"""Family "zaya": ZAYA1 (Zyphra), a mixture of experts with compressed convolutional attention, on transformers' own class.

The attention is not local in positions: queries and keys are mixed with those of the two tokens before them (two causal convolutions
of two taps), and half of each value comes from the token before. (CCA, arXiv 2510.04476.) Where several texts stand in one forward
(clean text and masks, drafts and proposals), "the token before" is not the row before, and no attention mask can say so. So every
forward here names each row's predecessor: `before_BQ` holds its row number, -1 for the last committed token of the cache, or for
nothing at the start of a text. A committed token leaves its projections in the cache's layer, one token deep, beside keys and values.

The router's state goes from layer to layer at the same row, and needs nothing. Its balancing biases are buffers that no gradient moves:
they stay as the checkpoint has them. Published are autoregressive weights only; as with family "causal" the mask token is added where
the tokenizer has none.

Shapes: B rows, Q queries, D hidden width, C channels of queries and keys together, E half the width of all values, H heads.
"""

from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from cdlm.cache import BlockCache, BlockLayer, WholeCache
from cdlm.families import causal
from cdlm.families.base import DiffusionLM, Facts

NAME = "zaya"
MODEL_TYPE = "zaya"
ORIGINS = causal.ORIGINS
TAPS = 2


def matches(config: dict[str, Any]) -> bool:
    """Does this config.json say that it belongs here?"""
    return config.get("model_type") == MODEL_TYPE


def facts(config: dict[str, Any]) -> Facts:
    """The facts, where config.json states all tokens; `facts_of` also asks the tokenizer and generation_config.json."""
    return causal.facts(config)


def facts_of(path_or_id: str | Path, config: dict[str, Any]) -> Facts:
    """The facts of a folder or Hub repository, as family "causal" finds them."""
    return causal.facts_of(path_or_id, config)


def prepare(hf: Any, facts: Facts, path_or_id: str | Path) -> None:
    """Give a loaded model a row for the mask token (in place), as family "causal" does."""
    causal.add_row(hf, facts, path_or_id)


check = causal.check


class CCALayer(BlockLayer):
    """A block layer that also holds what convolutions and value shift need of the last committed token of each row.

    `last` has qk [B, C], the projections of queries and keys; mixed [B, C], the first convolution's output; value [B, E], the value
    that its successor takes over. `fresh` has the same of all rows of the last forward, [B, Q, ...].
    """

    def __init__(self, capacity: int):
        super().__init__(capacity)
        self.last: tuple[Tensor, ...] | None = None
        self.fresh: tuple[Tensor, ...] | None = None

    def accept(self, count_B: Tensor, most: int, end_B: Tensor | None, width: int) -> None:
        super().accept(count_B, most, end_B, width)
        assert self.fresh is not None and self.last is not None, "rows are kept of a forward"
        row_B = torch.arange(len(count_B), device=count_B.device)
        self.last = tuple(
            torch.cat([last[:, None], fresh], dim=1)[row_B, count_B] for last, fresh in zip(self.last, self.fresh, strict=True)
        )

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        if self.last is not None:
            self.last = tuple(state[rows] for state in self.last)


def packed_projection(module: Any, hidden_states: Tensor, cache: Any, conv_mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """ZAYA's projection with each row's predecessor named: queries [B, Q, H, d], keys and values [B, Q, kv heads, d].

    conv_mask: before_BQ as [B, Q, 1]. transformers has a padding mask [B, L] or nothing here; then its own forward is taken.
    (CCA, arXiv 2510.04476, steps and order as transformers has them.)
    """
    if conv_mask is None or conv_mask.ndim != 3:
        return type(module).forward(module, hidden_states, cache, conv_mask)
    layer = cache.layers[module.layer_idx] if cache is not None else None
    shape, groups = (*hidden_states.shape[:-1], -1, module.head_dim), module.num_key_value_groups
    place_BQ1 = conv_mask + 1  # where a row's predecessor is, behind the state of the token before all rows
    query, key = module.q_proj(hidden_states), module.k_proj(hidden_states)
    delayed = module.v_proj_delayed(hidden_states)
    qk = torch.cat([query, key], dim=-1)
    start = _nothing(module, qk, delayed) if layer is None or layer.last is None else layer.last

    taps_CT = module.conv_qk_depthwise.weight[:, 0]
    mixed = _previous(qk, start[0], place_BQ1) * taps_CT[:, 0] + qk * taps_CT[:, 1] + module.conv_qk_depthwise.bias
    pair = torch.cat([_previous(mixed, start[1], place_BQ1).view(shape), mixed.view(shape)], dim=-1)  # [B, Q, all heads, 2 d]
    heads, width = pair.shape[2], module.head_dim
    taps = module.conv_qk_grouped.weight.view(heads, width, width, TAPS).permute(0, 3, 2, 1).reshape(heads, TAPS * width, width)
    convolved = torch.einsum("bqhi,hio->bqho", pair, taps) + module.conv_qk_grouped.bias.view(heads, width)

    query_mean = (query.view(shape) + key.view(shape).repeat_interleave(groups, dim=2)) * 0.5
    key_mean = query_mean.view(*shape[:2], -1, groups, width).mean(dim=-2)
    value = torch.cat([module.v_proj_current(hidden_states), _previous(delayed, start[2], place_BQ1)], dim=-1).view(shape)
    if layer is not None:
        layer.last, layer.fresh = start, (qk, mixed, delayed)
    split = module.num_attention_heads
    return convolved[:, :, :split] + query_mean, convolved[:, :, split:] + key_mean, value


def _nothing(module: Any, qk: Tensor, delayed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What stands before the first token: projections of zeros, and the first convolution over them (its bias)."""
    batch, bias = len(qk), module.v_proj_delayed.bias
    value = delayed.new_zeros(batch, delayed.shape[-1]) if bias is None else bias.expand(batch, -1)
    return qk.new_zeros(batch, qk.shape[-1]), module.conv_qk_depthwise.bias.expand(batch, -1), value


def _previous(row_BQC: Tensor, start_BC: Tensor, place_BQ1: Tensor) -> Tensor:
    """Of each row its predecessor: place 0 is the state before all rows, place i + 1 is row i. [B, Q, C]."""
    return torch.cat([start_BC[:, None], row_BQC], dim=1).gather(1, place_BQ1.expand_as(row_BQC))


def value_weight(attention: Any) -> Tensor:
    """The matrix from hidden rows, a token's own and its predecessor's alike, to the values that each query head reads, [H d, D]."""
    own = torch.cat([attention.qkv_proj.v_proj_current.weight, attention.qkv_proj.v_proj_delayed.weight])
    heads = own.view(-1, attention.head_dim, own.shape[1])
    return heads.repeat_interleave(attention.num_key_value_groups, dim=0).flatten(0, 1)


class ZayaLM(DiffusionLM):
    """A ZAYA decoder whose rows name their predecessors. The transformers model keeps its class and its own forward for everybody else."""

    masks_suffice = False

    def __init__(self, hf: nn.Module, facts: Facts, family: str):
        super().__init__(hf, facts, family)
        _refuse(self.hf.config)
        for module in self.hf.modules():
            if hasattr(module, "conv_qk_grouped"):
                module.forward = MethodType(packed_projection, module)

    def _rows(
        self, ids_BL: Tensor, mask: Tensor, position_BL: Tensor, cache: BlockCache | WholeCache | None, before_BL: Tensor | None = None
    ) -> Tensor:
        if before_BL is None:
            before_BL = _following(position_BL, cache)
        out = self.hf.get_decoder()(
            input_ids=ids_BL, attention_mask={"hybrid": mask, "conv": before_BL[:, :, None]}, position_ids=position_BL,
            cache=cache, use_cache=cache is not None,
        )
        return out.last_hidden_state

    def new_whole_cache(self, length: int) -> WholeCache:
        """Refused: the tokens of a window would need the state before it, which changes with every step."""
        raise ValueError(f"{NAME}: approximate_cache is for models whose attention alone mixes tokens; use the block cache, which is exact")

    def new_cache(self, prompt_length_B: Tensor, capacity: int) -> BlockCache:
        """As any model's, with layers that hold the state of convolutions and value shift."""
        return BlockCache(self.hf.config.num_hidden_layers, capacity, prompt_length_B, layer=CCALayer)


def _following(position_BL: Tensor, cache: BlockCache | None) -> Tensor:
    """Predecessors of rows that stand in the order of their text: the row before; -1 for the first real token (and padding before it)."""
    start_B1 = 0 if cache is None else cache.next_position_B[:, None]
    return torch.where(position_BL > start_B1, torch.arange(-1, position_BL.shape[1] - 1, device=position_BL.device), -1)


def _refuse(config: Any) -> None:
    """A ValueError for what the masks and convolutions here do not follow."""
    if set(config.layer_types) != {"hybrid"}:
        kinds = ", ".join(sorted(set(config.layer_types)))
        raise ValueError(f"{NAME}: layer_types has {kinds}; only hybrid layers, without a window, are allowed")
    for name in ("cca_time0", "cca_time1"):
        if getattr(config, name) != TAPS:
            raise ValueError(f"{NAME}: {name} is {getattr(config, name)}; a convolution here has {TAPS} taps")
