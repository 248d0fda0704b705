"""Does a drafted token stand? One model drafts blocks of tokens from masks and verifies them as an autoregressive model.

The model is a causal LM that was trained with objective tidar: its row at a token predicts the next one (p, the autoregressive
head), and a block of masks behind a text predicts that block in one forward (q, the diffusion head). A step has K drafts, the
first of which is certain: it was chosen by the step before. What stands is a run of drafts from the left, r of 1 to K, and the
autoregressive row behind the last of them gives the next step's first draft. So a step adds r tokens, and at r = 1 it is what
autoregressive decoding does.

Two layouts, which decide the same:
    parallel  one forward a step: K drafts, and M proposal blocks of K masks for the drafts to come, one for each r up to M. M = K
              is TiDAR (arXiv 2511.08923, figure 3), K (K + 1) query tokens. A longer r takes the last proposal's tail; where that
              ends there is no draft.
    linear    two forwards a step: one drafts from K - 1 masks behind the first draft, a causal one verifies; at most 2K query
              tokens. An adapter may be active in the drafting forward only.
Only rows of standing drafts stay in the cache, which is at every step that of autoregressive decoding. A draft that is missing is
the mask token, which no rule lets stand.

Three rules:
    greedy    the draft is the most probable token of p. The output is the model's own greedy decoding, token for token; so it is in fp32.
              In 16 bits a row is rounded otherwise beside other queries, and where two tokens are as good as equal either may come.
    lossless  accept d with probability min(1, p(d) / q(d)), else draw from max(0, p - q) and stop (Leviathan et al., arXiv
              2211.17192, algorithm 1). The output has the distribution of sampling from p, whatever q is.
    mix       the draft is argmax of beta logits of p + (1 - beta) logits of q (TiDAR, section 3.2; beta 1 is greedy). In the linear
              layout no mask stands behind the last draft, so there p decides alone; with an adapter no mask stands behind the prompt
              either, so there p decides the first token alone too.

Knows drafts, rules and rows; knows no checkpoint family and no text.
Shapes: B rows, A rows still decoding, P prompt tokens, N new tokens, K drafts, Q queries, V vocabulary, D width.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cdlm import masks
from cdlm.cache import BlockCache
from cdlm.families.base import DiffusionLM, NotFinite

RULES = ("greedy", "lossless", "mix")
LAYOUTS = ("parallel", "linear")


@dataclass(frozen=True)
class SpeculateConfig:
    """How to draft and verify.

    max_new_tokens: the budget, honoured exactly. draft_length: K, drafts of a step; 1 is plain autoregressive decoding.
    proposals: M, blocks of masks a step in the parallel layout (None: K, as in the paper).
    layout, rule: see the module. temperature: of the lossless rule, above 0; p and q are softmax(logits / temperature).
    beta: of the rule mix, 0 (trust the diffusion head) to 1 (trust the autoregressive head).
    stop_at_eos: a row stops at its first end-of-sequence token. False decodes the whole budget.
    """

    max_new_tokens: int
    draft_length: int
    proposals: int | None = None
    layout: str = "parallel"
    rule: str = "greedy"
    temperature: float = 0.0
    beta: float = 1.0
    stop_at_eos: bool = True

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "draft_length", "proposals"):
            if not (_is_whole(value := getattr(self, name)) or (value is None and name == "proposals")):
                raise ValueError(f"{name} is {value!r}; it must be a whole number")
        for name in ("temperature", "beta"):
            if isinstance(value := getattr(self, name), bool) or not isinstance(value, int | float):
                raise ValueError(f"{name} is {value!r}; it must be a number")
        for name in ("max_new_tokens", "draft_length"):
            if not 1 <= getattr(self, name) < 2**31:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1 (and below 2**31)")
        for name, value, allowed in (("layout", self.layout, LAYOUTS), ("rule", self.rule, RULES)):
            if value not in allowed:
                raise ValueError(f"{name} is {value!r}; allowed: {', '.join(allowed)}")
        if self.proposals is not None and self.layout == "linear":
            raise ValueError(f"proposals is {self.proposals}; the linear layout has none, it drafts in a forward of its own")
        if self.proposals is not None and not 1 <= self.proposals <= self.draft_length:
            raise ValueError(f"proposals is {self.proposals}; it must be between 1 and draft_length, {self.draft_length}")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}; it must be finite, and 0 or above")
        if (self.temperature > 0) != (self.rule == "lossless"):
            raise ValueError(f"rule is {self.rule!r} and temperature {self.temperature}; lossless samples (above 0), the others do not (0)")
        if not 0 <= self.beta <= 1 or (self.beta != 1 and self.rule != "mix"):
            raise ValueError(f"beta is {self.beta} and rule {self.rule!r}; it is between 0 and 1, and other than 1 only with rule mix")

    @property
    def block_length(self) -> int:
        """Most tokens that a step adds."""
        return self.draft_length

    @property
    def masks_needed(self) -> bool:
        """Whether anything is drafted, or a mask's row is part of the rule."""
        return self.draft_length > 1 or self.rule == "mix"

    @property
    def most_positions(self) -> int:
        """Positions behind the prompt that tokens and masks stand at, at most. The last step's first draft is the budget's last token but
        one; drafts and the last proposal's masks go on behind it. In the linear layout the prompt's own masks may reach further."""
        overhang = self.draft_length - 1 if self.masks_needed else 0
        if self.layout == "parallel" and self.masks_needed:
            overhang += (self.proposals or self.draft_length) - 1
        return self.max_new_tokens + overhang

    def check_room(self, model_config: Any, prompt: int, named: str) -> None:
        """A ValueError where the positions of the model are too few for a prompt of so many tokens, or depend on the length of the text.

        model_config: of transformers. named: the prompt and budget in the words of whom to tell.
        """
        rope = getattr(model_config, "rope_parameters", None) or {}
        kinds = [part.get("rope_type") for part in (rope, *rope.values()) if isinstance(part, dict)]
        if self.masks_needed and (bad := [kind for kind in kinds if kind in ("dynamic", "longrope")]):
            raise ValueError(
                f"the model's rope_type is {bad[0]!r}; draft and verify needs positions that are the same however long the text is, "
                "and masks behind it would change these"
            )
        room, needed = getattr(model_config, "max_position_embeddings", None), prompt + self.most_positions
        if room is not None and needed > room:
            raise ValueError(
                f"{named} are {needed} positions with the masks and drafts behind them (draft_length {self.draft_length}, "
                f"proposals {self.proposals}, layout {self.layout}); the model has {room}"
            )


@dataclass(frozen=True)
class Verified:
    """What a callback sees after every step: `block` counts them, the prefill being 0. new_AK: the tokens that the step added to each
    row, the first count_A of K."""

    block: int
    row_A: Tensor
    new_AK: Tensor
    count_A: Tensor


Callback = Callable[[Verified], None]


@dataclass
class Speculated:
    """Answers of a batch, with what they cost, per row.

    ids_BN: new tokens; what follows a row's first end-of-sequence token is padding.
    steps: verifying forwards. commit_forwards: forwards that only read the prompt: 1, the prefill. forwards: all, drafting ones too.
    queries: query tokens of all forwards behind the prefill. output_tokens: up to and with the first end-of-sequence token.
    accepted: acceptance histogram, accepted[row][r] steps in which r drafts stood (r from 1 to K; 0 never happens), those counted too
        that stood behind the end of the answer. stop: "eos" or "length".
    """

    ids_BN: Tensor
    steps: list[int]
    commit_forwards: list[int]
    forwards: list[int]
    queries: list[int]
    output_tokens: list[int]
    accepted: list[list[int]]
    stop: list[str]

    def answer(self, row: int, eos_token_ids: tuple[int, ...]) -> list[int]:
        """Tokens of a row without its end-of-sequence token."""
        ids = self.ids_BN[row, : self.output_tokens[row]].tolist()
        return ids[:-1] if ids and ids[-1] in eos_token_ids else ids

    @property
    def tokens_per_forward(self) -> list[float]:
        """TPF of each row."""
        return [tokens / forwards for tokens, forwards in zip(self.output_tokens, self.forwards, strict=True)]

    @property
    def queries_per_forward(self) -> list[float | None]:
        """Query tokens a forward of each row, the prefill left out; None where it was the only one."""
        return [
            queries / (forwards - commits) if forwards > commits else None
            for queries, forwards, commits in zip(self.queries, self.forwards, self.commit_forwards, strict=True)
        ]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _rows_at(row_AQD: Tensor, index_AK: Tensor) -> Tensor:
    """Hidden rows by their place, [A, K, D]."""
    return row_AQD.gather(1, index_AK[..., None].expand(-1, -1, row_AQD.shape[-1]))


def _runs(model: DiffusionLM, layout: masks.Packed, clean_AL: Tensor, cache: BlockCache) -> Tensor:
    """Raw rows of a layout that holds the clean tokens first and masks everywhere else."""
    count = layout.position_BQ.shape[1] - clean_AL.shape[1]
    masked = clean_AL.new_full((clean_AL.shape[0], count), model.facts.mask_id)
    return model.packed_hidden(torch.cat([clean_AL, masked], dim=1), layout.position_BQ, layout.sight, layout.before_BQ, cache)


def _read(model: DiffusionLM, cache: BlockCache, prompt_BP: Tensor, valid_BP: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Commits the prompts. Gives the row that predicts the first token, [B, D], and those of `count` masks behind it, [B, count, D]."""
    width = prompt_BP.shape[1]
    layout = masks.tidar_prefill(valid_BP, count, masks_last=True)
    row_BQD = _runs(model, layout, prompt_BP, cache)
    cache.commit(layout.position_BQ[:, :width], valid_BP, row_BQD[:, width - 1])
    return row_BQD[:, width - 1], row_BQD[:, width:]


class _Parallel:
    """One forward a step: drafts and proposals together."""

    def __init__(self, model: DiffusionLM, config: SpeculateConfig, prompt_BP: Tensor, valid_BP: Tensor):
        self.model, self.drafts = model, config.draft_length
        self.proposals = min(config.proposals or self.drafts, self.drafts) if config.masks_needed else 0
        queries = self.drafts * (self.proposals + 1)
        self.cache = model.new_cache(valid_BP.sum(dim=1), prompt_BP.shape[1] + config.max_new_tokens + queries)
        self.row_AQD: Tensor | None = None
        self.forwards, self.queries = 0, 0

    def prefill(self, prompt_BP: Tensor, valid_BP: Tensor) -> tuple[Tensor, Tensor]:
        """Reads the prompts. Gives the row that predicts the first token, [B, D], and those of a block of masks, [B, K or 0, D]."""
        row_BD, self.block_AKD = _read(self.model, self.cache, prompt_BP, valid_BP, self.drafts if self.proposals else 0)
        return row_BD, self.block_AKD

    def guess(self, first_A: Tensor, count_A: Tensor | None) -> tuple[Tensor, Tensor]:
        """Rows of the drafts 2 ... K behind the certain one, [A, K - 1, D], and which of them there are.

        count_A: how many drafts stood in the last step; None behind the prefill.
        """
        ahead = torch.arange(1, self.drafts, device=first_A.device).expand(len(first_A), -1)
        if count_A is None:
            return self.block_AKD[:, 1:], torch.ones_like(ahead, dtype=torch.bool)
        assert self.row_AQD is not None
        number_A1 = count_A.clamp(max=max(self.proposals, 1))[:, None]
        slot = ahead + count_A[:, None] - number_A1
        place = self.drafts * number_A1 + slot.clamp(max=self.drafts - 1)  # proposal n starts at query K n
        return _rows_at(self.row_AQD, place), slot < self.drafts

    def verify(self, draft_AK: Tensor) -> Tensor:
        """Causal rows of the drafts, [A, K, D]: row j predicts what follows draft j."""
        layout = masks.tidar_decoding(self.cache.valid_BK, self.drafts, self.proposals)
        self.row_AQD = _runs(self.model, layout, draft_AK, self.cache)
        self.forwards, self.queries = 1, layout.position_BQ.shape[1]
        return self.row_AQD[:, : self.drafts]

    def marginals(self) -> Tensor:
        """Mask rows that predict what follows each draft, [A, K, D]: of the proposal behind it, or behind the last draft that has one."""
        assert self.row_AQD is not None
        after = torch.arange(1, self.drafts + 1, device=self.row_AQD.device)
        number = after.clamp(max=self.proposals)
        return self.row_AQD[:, self.drafts * number + after - number]

    def keep(self, counts: list[int]) -> None:
        """The drafts that stood go into the cache."""
        self.cache.accept(counts)

    def select(self, still: Tensor) -> None:
        """Rows that are done go away."""
        self.cache.select(still)
        self.block_AKD = self.block_AKD[still]
        if self.row_AQD is not None:
            self.row_AQD = self.row_AQD[still]


class _Linear:
    """Two forwards a step: masks behind the first draft, then the drafts. Without an adapter the drafting forward's causal row of the
    first draft is that of the verifying one, so it is computed once and stays."""

    def __init__(
        self, model: DiffusionLM, config: SpeculateConfig, prompt_BP: Tensor, valid_BP: Tensor,
        adapter: Callable[[], AbstractContextManager[Any]] | None,
    ):
        self.model, self.drafts, self.masked, self.adapter = model, config.draft_length, config.masks_needed, adapter
        self.cache = model.new_cache(valid_BP.sum(dim=1), prompt_BP.shape[1] + config.max_new_tokens + 2 * self.drafts)
        self.drafted_AKD: Tensor | None = None
        self.first_row: Tensor | None = None  # the causal row of the first draft, where the drafting forward gave it
        self.forwards, self.queries = 0, 0

    def prefill(self, prompt_BP: Tensor, valid_BP: Tensor) -> tuple[Tensor, Tensor]:
        count = self.drafts if self.masked and self.adapter is None else 0
        row_BD, self.block_AKD = _read(self.model, self.cache, prompt_BP, valid_BP, count)
        return row_BD, self.block_AKD

    def guess(self, first_A: Tensor, count_A: Tensor | None) -> tuple[Tensor, Tensor]:
        there = torch.ones(len(first_A), self.drafts - 1, dtype=torch.bool, device=first_A.device)
        self.first_row, self.forwards, self.queries = None, 0, 0
        if self.drafts == 1 or (count_A is None and self.adapter is None):
            self.drafted_AKD = self.block_AKD[:, 1:]
            return self.drafted_AKD, there
        layout = masks.tidar_decoding(self.cache.valid_BK, 1, 1, self.drafts - 1)
        with nullcontext() if self.adapter is None else self.adapter():
            row_AKD = _runs(self.model, layout, first_A[:, None], self.cache)
        self.forwards, self.queries = 1, self.drafts
        if self.adapter is None:
            self.cache.accept([1] * len(first_A))
            self.first_row = row_AKD[:, :1]
        self.drafted_AKD = row_AKD[:, 1:]
        return self.drafted_AKD, there

    def verify(self, draft_AK: Tensor) -> Tensor:
        done = 0 if self.first_row is None else 1
        layout = masks.tidar_decoding(self.cache.valid_BK, self.drafts - done, 0)
        row_AKD = _runs(self.model, layout, draft_AK[:, done:], self.cache)
        self.forwards, self.queries = self.forwards + 1, self.queries + self.drafts - done
        return row_AKD if self.first_row is None else torch.cat([self.first_row, row_AKD], dim=1)

    def marginals(self) -> Tensor:
        """Mask rows that predict what follows each draft but the last, [A, K - 1, D]: those that the drafts came from."""
        assert self.drafted_AKD is not None
        return self.drafted_AKD

    def keep(self, counts: list[int]) -> None:
        done = 0 if self.first_row is None else 1
        self.cache.accept([count - done for count in counts])

    def select(self, still: Tensor) -> None:
        self.cache.select(still)
        self.block_AKD = self.block_AKD[still]


def _draw(probability_AKV: Tensor, uniform_AK: Tensor) -> Tensor:
    """A token of each distribution (not necessarily of sum 1) by its inverse distribution function, in fp64, [A, K]."""
    total_AKV = probability_AKV.double().cumsum(dim=-1)
    at_AK1 = (uniform_AK[..., None] * total_AKV[..., -1:])
    token_AK = torch.searchsorted(total_AKV, at_AK1, right=True)[..., 0]
    last_AK = probability_AKV.shape[-1] - 1 - (probability_AKV.flip(-1) > 0).double().argmax(dim=-1)  # last token that has any
    return torch.minimum(token_AK, last_AK)


def stand(target_AK: Tensor, draft_AK: Tensor) -> tuple[Tensor, Tensor]:
    """Drafts that equal their targets, from the left. target_AK[:, j]: the token to follow draft j.

    Gives how many drafts stand, 1 to K, [A], and the token behind the last of them, [A].
    """
    count_A = 1 + (draft_AK[:, 1:] == target_AK[:, :-1]).long().cumprod(dim=1).sum(dim=1)
    return count_A, target_AK.gather(1, count_A[:, None] - 1)[:, 0]


def stand_lossless(p_AKV: Tensor, q_AKV: Tensor, draft_AK: Tensor, uniform_AK: Tensor) -> tuple[Tensor, Tensor]:
    """Speculative sampling: drafts are accepted with probability min(1, p / q), from the left. (arXiv 2211.17192, algorithm 1.)

    p_AKV[:, j]: distribution of the token that follows draft j. q_AKV[:, j]: the one that draft j + 1 was drawn from; zero where there
    was none, and for the last j. uniform_AK: K draws from U(0, 1) a row, the last of them for the token behind the drafts.
    As `stand`, the token behind being drawn from max(0, p - q).
    """
    next_AK = draft_AK[:, 1:, None]
    p_of, q_of = p_AKV[:, :-1].gather(-1, next_AK)[..., 0], q_AKV[:, :-1].gather(-1, next_AK)[..., 0]
    count_A = 1 + (uniform_AK[:, :-1] * q_of < p_of).long().cumprod(dim=1).sum(dim=1)
    place = (count_A - 1)[:, None, None].expand(-1, 1, p_AKV.shape[-1])
    p_AV, q_AV = p_AKV.gather(1, place)[:, 0], q_AKV.gather(1, place)[:, 0]
    rest_AV = (p_AV - q_AV).clamp(min=0)
    rest_AV = torch.where(rest_AV.sum(dim=-1, keepdim=True) > 0, rest_AV, p_AV)  # p = q up to rounding: any draw from p will do
    return count_A, _draw(rest_AV[:, None], uniform_AK[:, -1:])[:, 0]


class _Rule:
    """Logits to drafts and to what stands, for one `speculate` call."""

    def __init__(self, config: SpeculateConfig, mask_token_id: int, generators: list[torch.Generator] | None, device: torch.device):
        self.config, self.mask, self.generators, self.device = config, mask_token_id, generators, device
        self.mask_index = torch.tensor([mask_token_id], device=device)
        self.q_AKV: Tensor | None = None
        self.uniform_AK = torch.empty(0)

    def draw(self, rows: list[int], count: int) -> None:
        """The draws that a step may need, in fp64 from each row's own generator, so that a row's sample depends neither on its batch nor on
        the device. Made before the step's forwards, which they would wait for."""
        if self.generators is not None and self.config.rule == "lossless":
            drawn = [torch.rand(count, generator=self.generators[row], dtype=torch.float64) for row in rows]
            self.uniform_AK = torch.stack(drawn).to(self.device)

    def without_mask(self, logits: Tensor) -> Tensor:
        """The logits in fp32 with the mask token's at -inf: it is never drafted and never stands."""
        return logits.float().index_fill(-1, self.mask_index, -torch.inf)

    def probability(self, logits_AKV: Tensor) -> Tensor:
        logits_AKV = self.without_mask(logits_AKV).double()
        below_AKV = logits_AKV - logits_AKV.amax(dim=-1, keepdim=True)  # 0 at the most probable token, whatever it is divided by
        return (below_AKV / self.config.temperature).softmax(dim=-1)

    def first(self, logits_A1V: Tensor, mask_logits_AKV: Tensor) -> Tensor:
        """The token that the prompt is followed by, [A]."""
        if self.config.rule == "lossless":
            return _draw(self.probability(logits_A1V), self.uniform_AK)[:, 0]
        if self.config.rule == "mix" and mask_logits_AKV.shape[1]:
            return self.mixed(logits_A1V, mask_logits_AKV[:, :1])[:, 0]
        return self.without_mask(logits_A1V).argmax(dim=-1)[:, 0]

    def mixed(self, logits_AKV: Tensor, mask_logits_AKV: Tensor) -> Tensor:
        beta = self.config.beta
        return self.without_mask(beta * logits_AKV.float() + (1 - beta) * mask_logits_AKV.float()).argmax(dim=-1)

    def draft(self, first_A: Tensor, mask_logits_AKV: Tensor, there_AK: Tensor) -> Tensor:
        """The certain token and what the mask rows say of the K - 1 behind it, [A, K]."""
        if self.config.rule == "lossless":
            q_AKV = self.probability(mask_logits_AKV)
            token_AK = _draw(q_AKV, self.uniform_AK[:, : there_AK.shape[1]])
            q_AKV = q_AKV.masked_fill(~there_AK[..., None], 0.0)
            self.q_AKV = torch.cat([q_AKV, q_AKV.new_zeros(len(first_A), 1, q_AKV.shape[-1])], dim=1)
        else:
            token_AK = self.without_mask(mask_logits_AKV).argmax(dim=-1)
        return torch.cat([first_A[:, None], token_AK.masked_fill(~there_AK, self.mask)], dim=1)

    def stand(self, logits_AKV: Tensor, draft_AK: Tensor, marginal_AKV: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.config.rule == "lossless":
            assert self.q_AKV is not None
            return stand_lossless(self.probability(logits_AKV), self.q_AKV, draft_AK, self.uniform_AK[:, draft_AK.shape[1] - 1 :])
        if self.config.rule == "greedy" or marginal_AKV is None:
            return stand(self.without_mask(logits_AKV).argmax(dim=-1), draft_AK)
        count = marginal_AKV.shape[1]
        last = self.without_mask(logits_AKV[:, count:]).argmax(dim=-1)
        return stand(torch.cat([self.mixed(logits_AKV[:, :count], marginal_AKV), last], dim=1), draft_AK)


@torch.no_grad()
def speculate(
    model: DiffusionLM, prompt_BP: Tensor, valid_BP: Tensor, config: SpeculateConfig, *, callback: Callback | None = None,
    seeds: list[int] | None = None, adapter: Callable[[], AbstractContextManager[Any]] | None = None,
) -> Speculated:
    """Answers to a batch of left-padded prompts, by draft and verify.

    prompt_BP, valid_BP: token ids and True for real tokens. callback: called with a `Verified` after the prefill and every step.
    seeds: one a row, for the rule lossless. adapter: makes a context in which an adapter is active: that of the linear layout's
        drafting forward, which keeps nothing then.
    Rows of a batch may accept different numbers of drafts; a row that is done is dropped. One wait for the device a step.
    Raises NotFinite, with rows and step, when a logit is not finite, be it a token's or a mask's.
    """
    if config.rule == "lossless" and (seeds is None or len(seeds) != prompt_BP.shape[0]):
        raise ValueError(f"rule lossless samples: give one seed for each of the {prompt_BP.shape[0]} rows")
    for seed in seeds or ():
        if not _is_whole(seed) or not 0 <= seed < 2**63:
            raise ValueError(f"seed is {seed!r}; it must be a whole number, between 0 and 2**63 - 1")
    if adapter is not None and config.layout != "linear":
        raise ValueError("adapter is for the drafting forward of the linear layout; in the parallel one drafts and proofs share a forward")
    if model.facts.prompt_attention != "causal":
        raise ValueError(f"draft and verify needs a causal model; this one has prompt_attention {model.facts.prompt_attention!r}")
    if valid_BP.dtype != torch.bool:
        raise ValueError(f"the padding mask is of dtype {valid_BP.dtype}; it must be torch.bool, True for real tokens")
    whole = prompt_BP.shape == valid_BP.shape and prompt_BP.ndim == 2 and min(prompt_BP.shape) > 0 and bool(valid_BP[:, -1].all())
    if not whole or bool((valid_BP[:, :-1] & ~valid_BP[:, 1:]).any()):
        raise ValueError(
            f"prompts {tuple(prompt_BP.shape)} and padding mask {tuple(valid_BP.shape)} must have one shape, "
            "hold at least one row and one token a row, and be padded on the left"
        )
    longest, budget = int(valid_BP.sum(dim=1).max()), config.max_new_tokens
    config.check_room(model.hf.config, longest, f"a prompt of {longest} tokens and max_new_tokens {budget}")
    facts, device = model.facts, prompt_BP.device
    batch, drafts = prompt_BP.shape[0], config.draft_length
    eos = torch.tensor(facts.eos_token_ids, device=device)
    generators = None if seeds is None else [torch.Generator().manual_seed(seed) for seed in seeds]
    rule = _Rule(config, facts.mask_id, generators, device)
    source: _Parallel | _Linear = (
        _Linear(model, config, prompt_BP, valid_BP, adapter) if config.layout == "linear" else _Parallel(model, config, prompt_BP, valid_BP)
    )
    out_BM = prompt_BP.new_full((batch, budget + drafts), facts.pad_token_id)
    steps, forwards, queries, known = [0] * batch, [1] * batch, [0] * batch, [0] * batch
    accepted = [[0] * (drafts + 1) for _ in range(batch)]
    rows, row_A = list(range(batch)), torch.arange(batch, device=device)
    count_A: Tensor | None = None

    rule.draw(rows, 1)
    row_BD, block_BKD = source.prefill(prompt_BP, valid_BP)
    logits_A1V, mask_logits_AKV = model.head(row_BD[:, None]), model.head(block_BKD)
    first_A = rule.first(logits_A1V, mask_logits_AKV)
    finite_A = _finite(logits_A1V) & _finite(mask_logits_AKV)
    new_AK, new_count_A = first_A[:, None], torch.ones_like(first_A)
    step = 0
    while True:
        inside = torch.arange(new_AK.shape[1], device=device) < new_count_A[:, None]
        ended_A = (torch.isin(new_AK, eos) & inside).any(dim=1) if config.stop_at_eos else torch.zeros_like(row_A, dtype=torch.bool)
        if callback is not None:
            callback(Verified(step, row_A, new_AK, new_count_A))
        # The one wait for the device in a step: how many drafts stood, is there an end token, and were all logits finite?
        counts, ended, finite = torch.stack([new_count_A, ended_A.long(), finite_A.long()]).tolist()
        if not all(finite):
            raise NotFinite([row for row, sound in zip(rows, finite, strict=True) if not sound], step)
        place_AK = torch.tensor([known[row] for row in rows], device=device)[:, None] + torch.arange(new_AK.shape[1], device=device)
        out_BM[row_A[:, None], place_AK] = new_AK
        for row, count in zip(rows, counts, strict=True):
            known[row] += count
            if step:
                accepted[row][count] += 1
        going = [i for i, row in enumerate(rows) if not ended[i] and known[row] < budget]
        if not going:
            break
        if step:
            source.keep(counts)
        if len(going) < len(rows):
            still = torch.tensor(going, device=device)
            source.select(still)
            rows, row_A, first_A = [rows[i] for i in going], row_A[still], first_A[still]
            count_A = None if count_A is None else count_A[still]
        step += 1
        rule.draw(rows, 2 * drafts - 1)
        hidden_AKD, there_AK = source.guess(first_A, count_A)
        mask_logits_AKV = model.head(hidden_AKD)
        draft_AK = rule.draft(first_A, mask_logits_AKV, there_AK)
        logits_AKV = model.head(source.verify(draft_AK))
        marginal_AKV = None
        if config.rule == "mix":
            marginal_AKD = source.marginals()
            marginal_AKV = mask_logits_AKV if marginal_AKD is hidden_AKD else model.head(marginal_AKD)
        count_A, first_A = rule.stand(logits_AKV, draft_AK, marginal_AKV)
        finite_A = _finite(logits_AKV) & _finite(mask_logits_AKV)
        if marginal_AKV is not None:
            finite_A = finite_A & _finite(marginal_AKV)
        ahead = torch.arange(drafts, device=device)
        new_AK = torch.where(ahead == count_A[:, None] - 1, first_A[:, None], draft_AK.roll(-1, dims=1))
        new_count_A = count_A
        for row in rows:
            steps[row] += 1
            forwards[row] += source.forwards
            queries[row] += source.queries

    return _trim(out_BM, known, steps, forwards, queries, accepted, budget, facts.eos_token_ids, facts.pad_token_id)


def _finite(logits_AKV: Tensor) -> Tensor:
    """Of each row, whether all its logits are finite: [A]."""
    return logits_AKV.isfinite().flatten(1).all(dim=1)


def _trim(
    out_BM: Tensor, known: list[int], steps: list[int], forwards: list[int], queries: list[int], accepted: list[list[int]], budget: int,
    eos_token_ids: tuple[int, ...], pad_token_id: int,
) -> Speculated:
    """Cut to the budget, and drop what follows each row's first end-of-sequence token."""
    ids_BN, output_tokens, stop = out_BM[:, :budget].clone(), [], []
    for row, ids in enumerate(ids_BN.tolist()):
        within = min(known[row], budget)
        end = next((i for i, token in enumerate(ids[:within]) if token in eos_token_ids), None)
        output_tokens.append(within if end is None else end + 1)
        stop.append("length" if end is None else "eos")
        ids_BN[row, output_tokens[-1] :] = pad_token_id
    return Speculated(ids_BN, steps, [1] * len(steps), forwards, queries, output_tokens, accepted, stop)
