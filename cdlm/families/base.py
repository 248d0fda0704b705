"""What every checkpoint family looks like from above: facts, and a model that gives aligned rows.

Row i of `sequence_hidden`, `denoise` and the logits made from them predicts token i, whatever the checkpoint does: the
one-position shift of AR-initialised models is undone here, in `_align`, and nowhere else.
Shapes: B rows, L tokens, C tokens to commit, S slots of a block, D hidden width, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from cdlm import attention, masks, noise
from cdlm.cache import BlockCache, WholeCache

CHOICES = {
    "noise": noise.PROCESSES,
    "block_origin": masks.ORIGINS,
    "prompt_attention": masks.PROMPT_ATTENTION,
    "text_attention": ("block_causal", "causal"),
}


@dataclass(frozen=True)
class Facts:
    """What a checkpoint's weights do not say about how it denoises (design: "What a family must offer").

    mask_token_id: None exactly where the noise is uniform, which has no mask token.
    draft_length: of a causal LM that was trained with objective tidar, the masks of a block that it fills in one forward behind any text.
    text_attention: how the tokens of a finished block look at one another once they are committed; see `DiffusionLM.diffusion_mode`.
    """

    mask_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    block_length: int | None = None
    noise: str = "absorbing"
    block_origin: str = "prompt_end"
    logit_shift: bool = False
    prompt_attention: str = "bidirectional"
    draft_length: int | None = None
    text_attention: str = "block_causal"

    def __post_init__(self) -> None:
        if self.noise == "uniform" and self.mask_token_id is not None:
            raise ValueError(f"mask_token_id is {self.mask_token_id!r}; uniform noise has no mask token, leave it null")
        whole = [("mask_token_id", self.mask_token_id)] if self.noise != "uniform" else []
        whole += [("pad_token_id", self.pad_token_id)]
        whole += [("eos_token_id", end) for end in self.eos_token_ids]
        whole += [(name, getattr(self, name)) for name in ("block_length", "draft_length") if getattr(self, name) is not None]
        for name, value in whole:
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name} is {value!r}; it must be a whole number")
        if not isinstance(self.logit_shift, bool):
            raise ValueError(f"logit_shift is {self.logit_shift!r}; it must be true or false")
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed: {', '.join(allowed)}")
        if not self.eos_token_ids:
            raise ValueError("eos_token_ids is empty; decoding needs at least one end-of-sequence token")
        if self.block_length is not None and self.block_length < 1:
            raise ValueError(f"block_length is {self.block_length}; a block holds at least 1 token")
        if self.draft_length is not None and self.draft_length < 1:
            raise ValueError(f"draft_length is {self.draft_length}; a draft holds at least 1 token")
        if self.noise == "uniform" and self.block_length is None:
            raise ValueError("block_length is None; a model of uniform noise has a canvas of a fixed number of slots")
        if self.mask_token_id == self.pad_token_id or self.mask_token_id in self.eos_token_ids:
            raise ValueError(
                f"mask_token_id {self.mask_token_id} is also the pad or an end-of-sequence token "
                f"(pad {self.pad_token_id}, eos {list(self.eos_token_ids)}); a diffusion model needs a mask token of its own"
            )

    def check_ids(self, rows: int, where: Any) -> None:
        """A ValueError for a token id that the model has no embedding for."""
        for name, number in (("mask_token_id", self.mask_token_id), ("pad_token_id", self.pad_token_id),
                             *(("eos_token_id", end) for end in self.eos_token_ids)):  # fmt: skip
            if number is not None and not 0 <= number < rows:
                raise ValueError(f"{where}: {name} is {number}; the model has embeddings for ids 0 to {rows - 1}")

    @property
    def block_causal(self) -> bool:
        """Whether the checkpoint itself is a block diffusion model, trained under the block-causal mask with blocks of block_length."""
        return self.block_length is not None

    @property
    def mask_id(self) -> int:
        """The mask token, for what can't do without one; a ValueError where the model has none."""
        if self.mask_token_id is None:
            raise ValueError(f"this model has no mask token (its noise is {self.noise}), and what was asked for needs one")
        return self.mask_token_id

    @property
    def whole_blocks(self) -> bool:
        """Whether the last block has all its slots also where the budget ends inside it, as such models were trained."""
        return self.block_origin == "zero" or self.noise == "uniform"

    @property
    def canvases(self) -> bool:
        """Whether blocks are canvases: of one length, which the model has from the start, and decided anew at every step."""
        return self.noise == "uniform"

    @property
    def unfilled_id(self) -> int:
        """What stands in a slot that was never filled: the mask token, or padding where there is none."""
        return self.pad_token_id if self.mask_token_id is None else self.mask_token_id

    def of_diffusion_mode(self) -> "Facts":
        """The facts of `DiffusionLM.diffusion_mode`."""
        if self.draft_length is None:
            raise ValueError("this model states no draft_length: it was not trained with objective tidar")
        return replace(
            self, logit_shift=False, block_length=self.draft_length, block_origin="prompt_end", draft_length=None, text_attention="causal"
        )

    def to_config(self) -> dict[str, Any]:
        """As keys of config.json; token ids that transformers has keys for stay under those."""
        named = asdict(self)
        for known in ("eos_token_ids", "pad_token_id"):
            del named[known]
        for rare in ("draft_length", "text_attention"):  # few checkpoints have them, so the others' files do not speak of them
            if named[rare] == getattr(type(self), rare):
                del named[rare]
        return named


@dataclass(frozen=True)
class Seen:
    """What self-conditioning is told of the step before: its logits behind the temperature, whole or the k largest of each slot.

    logits_BSK: [B, S, V], or [B, S, k] with the token ids beside them; probabilities are a softmax over what is there.
    on_B: rows of False are told nothing, as at the first step of a canvas. None: all are told.
    """

    logits_BSK: Tensor
    ids_BSK: Tensor | None = None
    on_B: Tensor | None = None


FACT_NAMES = tuple(field.name for field in fields(Facts))


class NotFinite(FloatingPointError):
    """A logit that is no number. rows: the rows of the batch that hold one."""

    def __init__(self, rows: list[int], step: int, block: int | None = None):
        self.rows = rows
        some = f"row{'s' if len(rows) > 1 else ''} {', '.join(map(str, rows))}"
        place = f"step {step}" if block is None else f"block {block}, step {step}"
        super().__init__(f"a logit is not finite in {place} of {some}: the model or its input is broken")


class DiffusionLM(nn.Module):
    """A stock transformers decoder with the facts of a diffusion LM. `hf` is the transformers model, LoRA layers included."""

    hf: Any
    objectives: tuple[str, ...] = ("cdlm", "mdlm", "bd3lm", "ar", "tidar")  # what its forwards can be trained for
    redecides = False  # whether a step decides every slot anew, so that what a teacher did is told by its states
    commits_apart = False  # whether committing takes a forward of its own, in place of going along with a block's first step
    left_alone: str | None = None  # a regular expression for the names of modules that no adapter goes on
    own_attention: str | None = None  # transformers' attention that the model must have, where this package's can't say its masks
    masks_suffice = True  # whether positions and a mask say all that a forward must know; not where layers mix neighbouring rows

    def __init__(self, hf: nn.Module, facts: Facts, family: str):
        super().__init__()
        self.hf, self.facts, self.family = hf, facts, family

    @property
    def device(self) -> torch.device:
        return next(self.hf.parameters()).device

    @property
    def text_config(self) -> Any:
        """The transformers config of the text model: sizes of layers and vocabulary."""
        return self.hf.config.get_text_config()

    @property
    def hidden_size(self) -> int:
        """D, numbers in a hidden row."""
        return self.text_config.hidden_size

    @property
    def noise(self) -> noise.Process:
        """What noise is to this model."""
        return noise.process(self.facts.noise, self.facts.mask_token_id, self.text_config.vocab_size)

    @property
    def head(self) -> nn.Module:
        """Final-norm hidden rows -> the model's logits: lm_head, and what the model does behind it."""
        return self.hf.get_output_embeddings()

    @property
    def own_decoding(self) -> dict[str, Any]:
        """Values of `decode.DecodeConfig` by which the checkpoint itself says that it decodes; empty where it says nothing."""
        return {}

    def state_decoding(self, values: dict[str, Any]) -> None:
        """Have the checkpoint say that it decodes so, in what `hf.save_pretrained` writes; values of `decode.DecodeConfig`."""
        if "confidence_threshold" in values:
            self.hf.config.confidence_threshold = values["confidence_threshold"]

    def own_generate(
        self, prompt_BP: Tensor, valid_BP: Tensor, max_new_tokens: int, values: dict[str, Any], *, stop_at_eos: bool = True,
        after_block: Callable[[int], None] | None = None,
    ) -> tuple[Tensor, list[int]]:
        """What transformers' own `generate` of the checkpoint's class gives: tokens [B, N], padding behind a row's end, and steps of each
        row. Random numbers are torch's default generator's.

        values: of `decode.DecodeConfig`, as `own_decoding` has them. after_block: called with each block's number when it is done.
        """
        raise ValueError(f"transformers has no diffusion decoding of its own for a model of type {self.hf.config.model_type}")

    @property
    def vocab(self) -> int:
        """V, the logits of a row."""
        return self.text_config.vocab_size

    @property
    def unmergeable(self) -> str | None:
        """Why an adapter can't be merged into this model's weights; None where it can."""
        return None

    def _rows(
        self, ids_BL: Tensor, mask: Tensor, position_BL: Tensor, cache: BlockCache | WholeCache | None, before_BL: Tensor | None = None
    ) -> Tensor:
        """Raw hidden rows after the final norm, [B, L, D].

        before_BL: number of the row that precedes each row in its own text, -1 for the last committed token or for nothing. None: rows
            stand in the order of their text. Attention asks positions only, and so this class does not read it.
        """
        out = self.hf.get_decoder()(
            input_ids=ids_BL, attention_mask=mask, position_ids=position_BL, cache=cache, use_cache=cache is not None
        )
        return out.last_hidden_state

    @property
    def _packs(self) -> bool:
        """Whether the model's attention is one of this package's."""
        return self.hf.config._attn_implementation.startswith(attention.PREFIX)

    def _mask(self, seen: masks.Sight) -> Tensor:
        """A mask in the form that the model's attention takes."""
        return seen.packed() if self._packs else masks.dense(seen)

    def _no_mask(self, device: torch.device) -> Tensor | None:
        """What lets every query see every key, in the form that the model's attention takes; None where that is a mask like any other."""
        if self._packs:
            return masks.everything(device)
        return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device) if self.hf.config._attn_implementation == "sdpa" else None

    def _align(self, row_BLD: Tensor, before_BD: Tensor | None) -> Tensor:
        """Rows such that row i predicts token i. `before` precedes the first row (None: there is nothing before it)."""
        if not self.facts.logit_shift:
            return row_BLD
        first = torch.zeros_like(row_BLD[:, :1]) if before_BD is None else before_BD[:, None]
        return torch.cat([first, row_BLD[:, :-1]], dim=1)

    def _horizon(self, position_BL: Tensor, prompt_length_B: Tensor, block_length: int) -> Tensor:
        return masks.horizon(
            position_BL, prompt_length_B, block_length,
            origin=self.facts.block_origin, prompt_attention=self.facts.prompt_attention,
        )

    def sequence_hidden(
        self, ids_BL: Tensor, valid_BL: Tensor, prompt_length_B: Tensor | None = None, block_length: int | None = None
    ) -> Tensor:
        """Aligned final-norm hidden rows of whole sequences, [B, L, D].

        valid_BL: True for real tokens; padding may stand on the left.
        block_length: None for full bidirectional attention, a number for the block-causal mask with blocks of that length
            (then prompt_length_B, the real prompt tokens of each row, must be given).
        """
        position_BL = masks.positions(valid_BL)
        if block_length is None:
            horizon_BL = masks.full(position_BL)
        else:
            assert prompt_length_B is not None
            horizon_BL = self._horizon(position_BL, prompt_length_B, block_length)
        mask = self._mask(masks.clean(horizon_BL, position_BL, valid_BL))
        return self._align(self._rows(ids_BL, mask, position_BL, None), None)

    def answer_hidden(
        self, prompt_BP: Tensor, prompt_valid_BP: Tensor, slots_BN: Tensor, block_length: int | None, seen: Seen | None = None
    ) -> Tensor:
        """Aligned final-norm hidden rows of answer slots behind a left-padded prompt, [B, N, D].

        block_length: as in `sequence_hidden`. seen: for models with self-conditioning, what they are told of the step before.
        """
        _no_seen(seen)
        ids_BL = torch.cat([prompt_BP, slots_BN], dim=1)
        valid_BL = torch.cat([prompt_valid_BP, torch.ones_like(slots_BN, dtype=torch.bool)], dim=1)
        return self.sequence_hidden(ids_BL, valid_BL, prompt_valid_BP.sum(dim=1), block_length)[:, prompt_BP.shape[1] :]

    def text_and_canvas(
        self, ids_BL: Tensor, valid_BL: Tensor, start_B: Tensor, canvas_BS: Tensor, told_B: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Rows of clean text and of one canvas a row behind part of it; only models that have canvases can."""
        raise ValueError(f"family {self.family}: this model has no canvases; objective uniform is for models that have")

    def sequence_logits(self, *args, **kwargs) -> Tensor:
        """Aligned logits of whole sequences, [B, L, V]; arguments as in `sequence_hidden`."""
        return self.head(self.sequence_hidden(*args, **kwargs))

    def noisy_clean_hidden(
        self, noisy_BN: Tensor, ids_BL: Tensor, valid_BL: Tensor, prompt_length_B: Tensor, block_length: int
    ) -> Tensor:
        """Aligned hidden rows of noisy answer slots, each block behind the clean text before it, in one forward, [B, N, D].

        For each block these are the rows of `denoise` after `commit` of all clean tokens before the block, so training asks what cached
        decoding asks. With shifted logits the first slot of a block is predicted by the clean row of the token before the block, the
        others by the noisy row before them. Where blocks start at position 0, the tail of the prompt stands in the first noisy block,
        as it does in decoding; the tail of a causal prompt is computed before that block and is clean. (BD3-LM, arXiv 2503.09573,
        section 3.)

        noisy_BN: the answer with some slots masked; its last block may be shorter. ids_BL: prompt and clean answer, N < L, the answer
            real tokens throughout. valid_BL, prompt_length_B, block_length: as in `sequence_hidden`.
        """
        origin, prompt = self.facts.block_origin, ids_BL.shape[1] - noisy_BN.shape[1]
        shared = origin == "zero" and self.facts.prompt_attention != "causal"
        tail = min(block_length - 1, prompt) if shared else 0  # columns of the prompt that may stand in the first noisy block
        position_BL = masks.positions(valid_BL)
        horizon_BL = self._horizon(position_BL, prompt_length_B, block_length)
        if shared:  # the prompt's whole blocks are computed before its tail
            start_B1 = (prompt_length_B // block_length * block_length)[:, None]
            horizon_BL = torch.where(position_BL < start_B1, torch.minimum(horizon_BL, start_B1 - 1), horizon_BL)
        position_BM = position_BL[:, prompt - tail :]
        block_BM = masks.blocks(position_BM, prompt_length_B, block_length, origin=origin)
        seen = masks.noisy_clean(
            position_BM, valid_BL[:, prompt - tail :] & (block_BM >= block_BM[:, tail : tail + 1]),
            masks.Tokens(position_BL, horizon_BL, valid_BL), torch.zeros_like(prompt_length_B) if shared else prompt_length_B,
            block_length, origin=origin,
        )  # fmt: skip
        ids = torch.cat([ids_BL[:, prompt - tail : prompt], noisy_BN, ids_BL], dim=1)
        columns = position_BM.shape[1]
        first_BM = torch.ones_like(block_BM, dtype=torch.bool)
        first_BM[:, 1:] = block_BM[:, 1:] != block_BM[:, :-1]
        row = torch.arange(ids.shape[1], device=ids.device) - 1  # the row before; of a noisy block's first slot the clean one
        before_BM = torch.where(first_BM, row[columns + prompt - tail :], row[:columns]).masked_fill(position_BM == 0, -1)
        before_BL = torch.cat([before_BM, row[columns:].expand_as(position_BL).masked_fill(position_BL == 0, -1)], dim=1)
        row_BLD = self._rows(ids, self._mask(seen), torch.cat([position_BM, position_BL], dim=1), None, before_BL)
        if not self.facts.logit_shift:
            return row_BLD[:, tail:columns]
        clean_BND, noisy_BND = row_BLD[:, columns + prompt - 1 : -1], self._align(row_BLD[:, :columns], None)[:, tail:]
        return torch.where(first_BM[:, tail:, None], clean_BND, noisy_BND)

    def noisy_clean_logits(self, *args, **kwargs) -> Tensor:
        """Aligned logits of noisy answer slots, [B, N, V]; arguments as in `noisy_clean_hidden`."""
        return self.head(self.noisy_clean_hidden(*args, **kwargs))

    def window_hidden(self, ids_BW: Tensor, valid_BL: Tensor, start: int, cache: WholeCache) -> Tensor:
        """Aligned hidden rows of a window's tokens, [B, W, D], under full attention; keys and values of all other positions are those that
        the cache holds, and it keeps those of the window.

        valid_BL: of the whole sequence. start: where the window begins.
        """
        position_BL, width = masks.positions(valid_BL), ids_BW.shape[1]
        position_BW = position_BL[:, start : start + width]
        mask = self._mask(masks.clean(masks.full(position_BW), position_BL, valid_BL))
        cache.write_at(start)
        row_BWD = self._rows(ids_BW, mask, position_BW, cache)
        cache.keep(row_BWD, start)
        assert cache.row_BLD is not None
        return self._align(row_BWD, cache.row_BLD[:, start - 1] if start else None)

    def diffusion_mode(self) -> "DiffusionLM":
        """A model that was trained with objective tidar, as the block diffusion LM that it is too: its mask rows predict their own
        position, and a block of draft_length masks stands behind causal text, so a finished block is committed as causal text.

        Only cached decoding knows which tokens are finished; `sequence_hidden` under a block-causal mask is not this mode.
        """
        return type(self)(self.hf, self.facts.of_diffusion_mode(), self.family)

    def packed_hidden(
        self, ids_BQ: Tensor, position_BQ: Tensor, sight: masks.Sight, before_BQ: Tensor, cache: BlockCache | None = None
    ) -> Tensor:
        """Raw final-norm rows of several runs of one text in one forward, [B, Q, D]. Draft and verify, and its training, ask here.

        Not aligned: facts.logit_shift is ignored. A clean row at token i predicts token i + 1 (the autoregressive head), a mask row
        predicts its own position (the diffusion head); the caller knows which is which.

        position_BQ: absolute positions. sight: who looks at whom, the cache's keys included. before_BQ: the query row that holds the
        token before each row in its own run; -1 for the last committed token of the cache (without a cache: nothing before it).
        Attention alone needs no such thing, so it is not read here; a family whose layers mix neighbouring tokens does.
        cache: the forward sees its keys and writes its own behind them, where `BlockCache.accept` and `commit` may keep some.
        """
        return self._rows(ids_BQ, self._mask(sight), position_BQ, cache, before_BQ)

    def new_cache(self, prompt_length_B: Tensor, capacity: int) -> BlockCache:
        """An empty cache for prompts of these lengths and `capacity` tokens a row, padding included."""
        return BlockCache(layers=self.text_config.num_hidden_layers, capacity=capacity, prompt_length_B=prompt_length_B)

    def new_whole_cache(self, length: int) -> WholeCache:
        """An empty cache for sequences of `length` tokens, padding included."""
        return WholeCache(layers=self.text_config.num_hidden_layers, length=length)

    def denoise(
        self, block_BS: Tensor, cache: BlockCache, block_length: int, commit: tuple[Tensor, Tensor] | None = None,
        seen: Seen | None = None,
    ) -> Tensor:
        """Aligned hidden rows of the active block against the committed prefix, [B, S, D].

        commit: (ids_BC, valid_BC), clean tokens that stand between the prefix and the block: the prompt before the first
            block, the finished block before any other. They go through the same forward, under the block-causal mask, and
            their keys and values stay in the cache; those of the block do not.
        seen: for models with self-conditioning, what they are told of the step before.
        """
        _no_seen(seen)
        fresh_valid_BL = torch.ones_like(block_BS, dtype=torch.bool)
        if commit is None:
            ids_BL, count = block_BS, 0
            position_BL = cache.next_position_B[:, None] + torch.arange(block_BS.shape[1], device=block_BS.device)
        else:
            ids_BL, count = torch.cat([commit[0], block_BS], dim=1), commit[0].shape[1]
            fresh_valid_BL = torch.cat([commit[1], fresh_valid_BL], dim=1)
            position_BL = cache.next_position_B[:, None] + masks.positions(fresh_valid_BL)
        causal_tail = self.facts.block_origin == "zero" and self.facts.prompt_attention == "causal"
        nothing_hidden = self._no_mask(block_BS.device) if commit is None and not cache.padded and not causal_tail else None
        if nothing_hidden is not None:
            mask = nothing_hidden  # a block sees all that is committed, and itself
        else:
            horizon_BL = self._horizon(position_BL, cache.prompt_length_B, block_length)
            if self.facts.text_attention == "causal":
                horizon_BL = torch.cat([position_BL[:, :count], horizon_BL[:, count:]], dim=1)
            mask = self._mask(masks.clean(
                horizon_BL,
                torch.cat([cache.position_BK, position_BL], dim=1),
                torch.cat([cache.valid_BK, fresh_valid_BL], dim=1),
            ))  # fmt: skip
        row_BLD = self._rows(ids_BL, mask, position_BL, cache)
        if commit is not None:
            cache.commit(position_BL[:, :count], commit[1], row_BLD[:, count - 1])
        return self._align(row_BLD[:, count:], cache.boundary_BD)

    def prefill(self, prompt_BP: Tensor, valid_BP: Tensor, max_new_tokens: int, block_length: int) -> BlockCache:
        """A cache that holds the prompt, from a forward of the prompt alone."""
        cache = self.new_cache(valid_BP.sum(dim=1), prompt_BP.shape[1] + max_new_tokens)
        self.commit(prompt_BP, valid_BP, cache, block_length)
        return cache

    def commit(self, ids_BC: Tensor, valid_BC: Tensor, cache: BlockCache, block_length: int) -> None:
        """Append clean tokens to the cache, from a forward of their own (`denoise(commit=...)` saves that forward)."""
        self.denoise(ids_BC[:, :0], cache, block_length, commit=(ids_BC, valid_BC))


def _no_seen(seen: Seen | None) -> None:
    if seen is not None:
        raise ValueError("this model has no self-conditioning; it can't be told what the step before saw")
