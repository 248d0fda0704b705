"""In what order forwards and reveals happen. Knows blocks, rules and rows; knows no checkpoint family.

One loop serves every decoding of a diffusion LM: block after block, refine the active block until it is done. What differs is where the
block's rows come from (`_WholeSequence`: a forward over everything, for the full mask and for checking; `_CachedBlocks`: a forward over
the block against a cache) and what a step does to the block, which a *sampler* says. `_Reveal` is for noise that is marked: open slots
are revealed (`unmask.py`) and stay, and a block is done when none is open. `_Redecide` is for noise that is not: every step decides every
slot, accepts some and makes noise of the others, and a block is done when it has settled, or when its steps are used up.

Counting. A *step* is a forward that refines a block. A *commit forward* is a forward that writes clean tokens, a prompt or a
finished block, into the cache. With the cache both are one forward where the model allows it: the finished block is committed by the
forward that takes the first step in the next block (2B query tokens under the block-causal mask), the prompt by the very first one.
So `forwards` is not steps + commits there; it is where a model commits apart. All three are counted per row and reported apart.

Shapes: B rows, A rows still decoding, P prompt tokens, N new tokens, M filled slots, G tokens of all blocks, S slots of the active block,
V vocabulary, D width.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from cdlm import unmask
from cdlm.families.base import DiffusionLM, Facts, NotFinite, Seen
from cdlm.noise import Draws

ORDERS = ("confidence", "entropy", "margin", "sequential")
SCHEDULES = ("even", "timesteps")
APPROXIMATE = ("prefix", "dual", "interval")
WAYS = ("confidence_threshold", "factor", "entropy_bound", "tokens_per_step", "steps", "steps_per_block")
REDECIDING = ("max_denoising_steps", "t_min", "t_max", "stability_threshold", "entropy_threshold")


@dataclass(frozen=True)
class DecodeConfig:
    """How to decode. One of confidence_threshold, factor, entropy_bound, tokens_per_step, steps and steps_per_block says how many slots a
    step reveals.

    max_new_tokens: the budget; honoured exactly, also when it is no multiple of block_length.
    confidence_threshold: reveal every slot with confidence above it, and always the best one (a probability).
    factor: reveal n slots while (n + 1)(1 - confidence of the n-th) is below it; see `unmask.factor`.
    entropy_bound: reveal slots while their entropies, the largest left out, add up to no more (nats); see `unmask.entropy_bound`.
    tokens_per_step: reveal that many a step.
    steps: spend at most that many steps on the whole budget, spread evenly over its blocks (at least one a block; where blocks start at
        position 0, over one block more, which a row has whose prompt ends inside one).
    steps_per_block: spend that many steps on each block. With confidence_threshold it is the least that a step reveals.
    order: which slots come first: those with the largest probability ("confidence"), the smallest entropy ("entropy"), the largest
        lead of the best token over the second ("margin"), or from left to right ("sequential").
    schedule: how `steps` are spread within a block: "even", or "timesteps", see `unmask.timesteps`.
    block_causal: the student's mask; False is the full bidirectional attention of the teacher.
    use_cache: exact block cache; needs block_causal.
    approximate_cache: for full attention, where no cache is exact: "prefix" keeps keys and values of all before the active block as they
        were at the block's first step, "dual" of all behind it too (Fast-dLLM, arXiv 2505.22618). "interval" keeps them of all outside
        the block across blocks, computes the answer every `response_refresh` steps and all every `prompt_refresh` (dLLM-Cache, arXiv
        2506.06295, section 4; in place of its partial update by similarity between refreshes, the block is computed). It needs
        tokens_per_step or steps, so that all rows of a batch refresh together. None computes everything at every step.
    stop_at_eos: a row stops after the block that holds its first end-of-sequence token. False decodes the whole budget.
    stop_length: a row stops only where a block of this length ends, a multiple of block_length (default: block_length).
    temperature: 0 takes the most probable token; above 0 samples from softmax(logits / temperature). The confidence is
        the probability of the chosen token under softmax(logits) either way.
    top_k, top_p: only the k most probable tokens, or the fewest whose probabilities add up to p, can be chosen; probabilities (and
        with them confidences, also of greedy decoding) are over those.

    For models whose noise is not marked, which decide every slot at every step (with entropy_bound and order "entropy"; all five or none):

    max_denoising_steps: the most steps that a block takes.
    t_min, t_max: the temperature falls from t_max towards t_min; see `unmask.temperature`. It is in place of `temperature`.
    stability_threshold, entropy_threshold: a block is done before its last step when its most probable tokens are those of the last
        stability_threshold steps and the mean entropy of its slots is below entropy_threshold (nats, at the step's temperature); see
        `unmask.Settled`. transformers calls the latter confidence_threshold.
    """

    max_new_tokens: int
    block_length: int
    confidence_threshold: float | None = None
    factor: float | None = None
    entropy_bound: float | None = None
    tokens_per_step: int | None = None
    steps: int | None = None
    steps_per_block: int | None = None
    order: str = "confidence"
    schedule: str = "even"
    block_causal: bool = True
    use_cache: bool = True
    approximate_cache: str | None = None
    prompt_refresh: int | None = None
    response_refresh: int | None = None
    stop_at_eos: bool = True
    stop_length: int | None = None
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    max_denoising_steps: int | None = None
    t_min: float | None = None
    t_max: float | None = None
    stability_threshold: int | None = None
    entropy_threshold: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "block_length"):
            if not 1 <= getattr(self, name) < 2**31:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1 (and below 2**31)")
        given = [n for n in WAYS if getattr(self, n) is not None]
        if len(given) != 1 and given != ["confidence_threshold", "steps_per_block"]:
            raise ValueError(
                f"exactly one of {', '.join(WAYS[:-1])} and {WAYS[-1]} decides what a step reveals (the first and the last may go "
                f"together); given: {', '.join(given) or 'none'}"
            )
        for name, value, allowed in (("order", self.order, ORDERS), ("schedule", self.schedule, SCHEDULES)):
            if value not in allowed:
                raise ValueError(f"{name} is {value!r}; allowed: {', '.join(allowed)}")
        if self.confidence_threshold is not None and self.order != "confidence":
            raise ValueError(f"confidence_threshold is a probability; order {self.order!r} gives none, it needs order 'confidence'")
        if self.factor is not None and self.order != "confidence":
            raise ValueError(f"factor asks for probabilities; order {self.order!r} gives none, it needs order 'confidence'")
        if self.entropy_bound is not None and self.order != "entropy":
            raise ValueError(f"entropy_bound adds up entropies; order {self.order!r} gives none, it needs order 'entropy'")
        if self.schedule == "timesteps" and self.steps is None:
            raise ValueError("schedule 'timesteps' spreads steps; give steps")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}; it must be 0 (greedy) or above, and finite")
        if self.approximate_cache is not None:
            if self.approximate_cache not in APPROXIMATE:
                raise ValueError(f"approximate_cache is {self.approximate_cache!r}; allowed: {', '.join(APPROXIMATE)}, or none")
            if self.block_causal:
                raise ValueError("approximate_cache is for full attention (block_causal False); with block_causal use_cache is exact")
        refresh = {"prompt_refresh": self.prompt_refresh, "response_refresh": self.response_refresh}
        if self.approximate_cache == "interval":
            for name, every in refresh.items():
                if every is None or every < 1:
                    raise ValueError(f"{name} is {every}; with approximate_cache 'interval' it is a number of steps, at least 1")
            if self.tokens_per_step is None and self.steps is None:
                raise ValueError("approximate_cache 'interval' refreshes all rows of a batch together: it needs tokens_per_step or steps")
        elif any(every is not None for every in refresh.values()):
            raise ValueError(f"{' and '.join(n for n, v in refresh.items() if v is not None)}: only approximate_cache 'interval' refreshes")
        if self.stop_length is not None and (self.stop_length < 1 or self.stop_length % self.block_length):
            raise ValueError(f"stop_length is {self.stop_length}; it must be a multiple of block_length, {self.block_length}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; at least 1 token must be left to choose from")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it is a probability above 0 and at most 1")
        if self.use_cache and not self.block_causal:
            raise ValueError("use_cache needs block_causal: under full attention a cached key changes with every token revealed")
        self._check_redeciding()
        self.rule(0, self.block_length)

    def _check_redeciding(self) -> None:
        given = [name for name in REDECIDING if getattr(self, name) is not None]
        if not given:
            return
        if len(given) < len(REDECIDING) or self.entropy_bound is None:
            lacking = [name for name in (*REDECIDING, "entropy_bound") if getattr(self, name) is None]
            raise ValueError(f"{', '.join(given)}: deciding every slot at every step also needs {', '.join(lacking)}")
        assert self.max_denoising_steps is not None and self.t_min is not None and self.t_max is not None
        assert self.stability_threshold is not None and self.entropy_threshold is not None
        if not 1 <= self.max_denoising_steps < 2**31:
            raise ValueError(f"max_denoising_steps is {self.max_denoising_steps}; it must be at least 1 (and below 2**31)")
        if not (0 <= self.t_min <= self.t_max < float("inf") and self.t_max > 0):
            raise ValueError(f"t_min is {self.t_min} and t_max {self.t_max}; 0 <= t_min <= t_max, finite, and t_max above 0")
        if self.stability_threshold < 0:
            raise ValueError(f"stability_threshold is {self.stability_threshold}; it is a number of steps, 0 or more")
        if not 0 < self.entropy_threshold < float("inf"):
            raise ValueError(f"entropy_threshold is {self.entropy_threshold}; it must be above 0 and finite")
        wrong = {"temperature": self.temperature > 0, "top_k": self.top_k is not None, "top_p": self.top_p is not None,
                 "use_cache": not self.use_cache}  # fmt: skip
        for name in (name for name, there in wrong.items() if there):
            raise ValueError(
                f"{name} is {getattr(self, name)}; with max_denoising_steps tokens are drawn at t_max to t_min from all of the vocabulary, "
                "against the cache"
            )

    @property
    def redecides(self) -> bool:
        """Whether every step decides every slot."""
        return self.max_denoising_steps is not None

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn, so that answers depend on seeds."""
        return self.redecides or self.temperature > 0

    @property
    def blocks(self) -> int:
        """Blocks of a budget that starts where a block does."""
        return -(-self.max_new_tokens // self.block_length)

    def rule(self, block: int, count: int, blocks: int | None = None) -> unmask.Rule:
        """What a step reveals in this block, of `count` slots. blocks: how many a row has at most (default: those of the budget alone)."""
        if self.steps_per_block is not None:
            even = unmask.spread(count, self.steps_per_block)
            if self.confidence_threshold is None:
                return even
            above = unmask.threshold(self.confidence_threshold)
            return lambda score_BL, open_BL, step: even(score_BL, open_BL, step) | above(score_BL, open_BL, step)
        if self.confidence_threshold is not None:
            return unmask.threshold(self.confidence_threshold)
        if self.factor is not None:
            return unmask.factor(self.factor)
        if self.entropy_bound is not None:
            return unmask.entropy_bound(self.entropy_bound)
        if self.tokens_per_step is not None:
            return unmask.top_k(self.tokens_per_step)
        assert self.steps is not None
        if self.steps < 1:
            raise ValueError(f"steps is {self.steps}; it must be at least 1")
        share, rest = divmod(self.steps, blocks or self.blocks)
        steps = max(1, share + (block < rest))
        return unmask.timesteps(steps) if self.schedule == "timesteps" else unmask.spread(count, steps)


@dataclass(frozen=True)
class Step:
    """What a callback sees after every step. Rows are those whose block was not done.

    first_slot_A: the answer slot at which the block begins; below 0 where the tail of a prompt shares the block.
    hidden_ASD: aligned final-norm rows that produced the logits. reveal_AS: the slots revealed (or accepted) by this step.
    token_AS, confidence_AS: chosen token and its probability, for every slot. before_AS, ids_AS: the block before and after the step.
    output_AS: the block as it would be if it were done now, which is what its end takes; ids_AS where slots once revealed stay.
    seen: what the next step is told by self-conditioning; None where there is none.
    """

    block: int
    step: int
    first_slot_A: Tensor
    row_A: Tensor
    hidden_ASD: Tensor
    token_AS: Tensor
    confidence_AS: Tensor
    reveal_AS: Tensor
    before_AS: Tensor
    ids_AS: Tensor
    output_AS: Tensor
    seen: Seen | None


Callback = Callable[[Step], None]
Ends = Callable[[int, list[int]], bool]


@dataclass
class Decoded:
    """Answers of a batch, with what they cost, per row.

    ids_BN: new tokens; what follows a row's first end-of-sequence token is padding.
    filled_BM: every slot as it was filled, also those behind the end token; the mask token (or padding, where there is none) where
        decoding had stopped. M: see `slots`; where blocks are whole the last one is filled whole, and ids_BN cut to the budget.
    output_tokens: tokens up to and with the first end-of-sequence token.
    decoded_tokens: slots that were filled, those behind the end-of-sequence token included.
    stop: "eos", "length" (the budget is used up), or "ends" (before that, as the caller's `ends` said).
    """

    ids_BN: Tensor
    filled_BM: Tensor
    steps: list[int]
    commit_forwards: list[int]
    forwards: list[int]
    output_tokens: list[int]
    decoded_tokens: list[int]
    stop: list[str]

    def answer(self, row: int, eos_token_ids: tuple[int, ...]) -> list[int]:
        """Tokens of a row without its end-of-sequence token."""
        ids = self.ids_BN[row, : self.output_tokens[row]].tolist()
        return ids[:-1] if ids and ids[-1] in eos_token_ids else ids

    @property
    def tokens_per_forward(self) -> list[float]:
        """TPF of each row."""
        return [tokens / forwards for tokens, forwards in zip(self.output_tokens, self.forwards, strict=True)]


def slots(facts: Facts, max_new_tokens: int, block_length: int) -> int:
    """M: most answer slots that a decoding fills (see `Decoded.filled_BM`): the budget, or up to the end of the block that it ends in
    where blocks are whole; those that start at position 0 may begin inside a prompt."""
    if facts.block_origin == "zero":
        return max_new_tokens + block_length - 1
    return -(-max_new_tokens // block_length) * block_length if facts.whole_blocks else max_new_tokens


@dataclass
class _Canvas:
    """Prompts and answers of a batch, cut where blocks begin.

    prefix_BP, prefix_valid_BP: the tokens before the first block, padded on the left. ids_BG: the blocks. tail_B: tokens of the prompt
    that stand at the head of the first block (0 where blocks start at the prompt's end). end_B: how far a row's blocks go.
    """

    prefix_BP: Tensor
    prefix_valid_BP: Tensor
    ids_BG: Tensor
    tail_B: Tensor
    end_B: Tensor

    @staticmethod
    def of(prompt_BP: Tensor, valid_BP: Tensor, config: DecodeConfig, facts: Facts) -> "_Canvas":
        batch, width, budget, block = *prompt_BP.shape, config.max_new_tokens, config.block_length
        if facts.block_origin == "prompt_end":
            length = slots(facts, budget, block)
            ids_BG = prompt_BP.new_full((batch, length), facts.unfilled_id)
            nothing = torch.zeros(batch, dtype=torch.long, device=prompt_BP.device)
            return _Canvas(prompt_BP, valid_BP, ids_BG, nothing, nothing + length)
        length_B = valid_BP.sum(dim=1)
        tail_B = length_B % block
        end_B = (tail_B + budget + block - 1) // block * block
        ids_BG = prompt_BP.new_full((batch, int(end_B.max())), facts.unfilled_id)
        keep = int((length_B - tail_B).max())
        prefix_BP, prefix_valid_BP = torch.zeros_like(prompt_BP[:, :keep]), torch.zeros_like(valid_BP[:, :keep])
        for row, (tail, length) in enumerate(zip(tail_B.tolist(), length_B.tolist(), strict=True)):
            head = length - tail
            ids_BG[row, :tail] = prompt_BP[row, width - tail :]
            prefix_BP[row, keep - head :] = prompt_BP[row, width - length : width - tail]
            prefix_valid_BP[row, keep - head :] = True
        return _Canvas(prefix_BP, prefix_valid_BP, ids_BG, tail_B, end_B)


class _Rows(Protocol):
    """Where the hidden rows of the active block come from."""

    def __init__(self, model: DiffusionLM, canvas: _Canvas, prompt_length_B: Tensor, config: DecodeConfig): ...
    def start(self, block_AS: Tensor, first: int, rows: Tensor) -> bool: ...
    def hidden(self, block_AS: Tensor, rows: Tensor, seen: Seen | None) -> Tensor: ...
    def finish(self, block_AS: Tensor, rows: Tensor) -> None: ...


class _WholeSequence:
    """Every step is a forward over prompt and whole budget, later blocks still masked. No cache."""

    def __init__(self, model: DiffusionLM, canvas: _Canvas, prompt_length_B: Tensor, config: DecodeConfig):
        self.model, self.config, self.prefix = model, config, canvas.prefix_BP.shape[1]
        inside = torch.arange(canvas.ids_BG.shape[1], device=canvas.ids_BG.device) < canvas.end_B[:, None]
        self.ids = torch.cat([canvas.prefix_BP, canvas.ids_BG], dim=1)
        self.valid = torch.cat([canvas.prefix_valid_BP, inside], dim=1)
        self.prompt_length = prompt_length_B
        self.first = 0

    def start(self, block_AS: Tensor, first: int, rows: Tensor) -> bool:
        self.first = self.prefix + first
        return False

    def hidden(self, block_AS: Tensor, rows: Tensor, seen: Seen | None) -> Tensor:
        window = slice(self.first, self.first + block_AS.shape[1])
        self.ids[rows, window] = block_AS
        hidden = self.model.sequence_hidden(
            self.ids[rows], self.valid[rows], self.prompt_length[rows],
            self.config.block_length if self.config.block_causal else None,
        )
        return hidden[:, window]

    def finish(self, block_AS: Tensor, rows: Tensor) -> None:
        self.ids[rows, self.first : self.first + block_AS.shape[1]] = block_AS


class _ApproximateCache(_WholeSequence):
    """Full attention; a step computes only a window, against keys and values that are as old as the last forward over their positions.
    See `DecodeConfig.approximate_cache` for which window that is."""

    def __init__(self, model: DiffusionLM, canvas: _Canvas, prompt_length_B: Tensor, config: DecodeConfig):
        super().__init__(model, canvas, prompt_length_B, config)
        self.cache = model.new_whole_cache(self.ids.shape[1])
        self.cached_rows = torch.arange(self.ids.shape[0], device=self.ids.device)
        self.step = 0

    def start(self, block_AS: Tensor, first: int, rows: Tensor) -> bool:
        if self.config.approximate_cache != "interval":
            self.cache, self.cached_rows = self.model.new_whole_cache(self.ids.shape[1]), rows
        return super().start(block_AS, first, rows)

    def _window(self, block: slice) -> slice:
        """The positions that this step computes."""
        length, config = self.ids.shape[1], self.config
        if config.approximate_cache == "interval":
            assert config.prompt_refresh is not None and config.response_refresh is not None
            if self.step % config.prompt_refresh == 0:
                return slice(0, length)
            return slice(self.prefix, length) if self.step % config.response_refresh == 0 else block
        if self.cache.row_BLD is None:
            return slice(0, length)
        return block if config.approximate_cache == "dual" else slice(block.start, length)

    def hidden(self, block_AS: Tensor, rows: Tensor, seen: Seen | None) -> Tensor:
        block = slice(self.first, self.first + block_AS.shape[1])
        self.ids[rows, block] = block_AS
        if rows.shape[0] < self.cached_rows.shape[0]:
            self.cache.select(torch.isin(self.cached_rows, rows).nonzero()[:, 0])
            self.cached_rows = rows
        window = self._window(block)
        hidden = self.model.window_hidden(self.ids[rows, window], self.valid[rows], window.start, self.cache)
        self.step += 1
        return hidden[:, block.start - window.start : block.stop - window.start]


class _CachedBlocks:
    """Every step is a forward over the active block against the cache; the first of a block also commits what precedes it."""

    def __init__(self, model: DiffusionLM, canvas: _Canvas, prompt_length_B: Tensor, config: DecodeConfig):
        self.model, self.config = model, config
        self.cache = model.new_cache(prompt_length_B, canvas.prefix_BP.shape[1] + canvas.ids_BG.shape[1])
        self.cached_rows = torch.arange(prompt_length_B.shape[0], device=prompt_length_B.device)
        self.pending: tuple[Tensor, Tensor] | None = None
        if canvas.prefix_BP.shape[1]:
            self.pending = canvas.prefix_BP, canvas.prefix_valid_BP

    def start(self, block_AS: Tensor, first: int, rows: Tensor) -> bool:
        self._keep(rows)
        return self.pending is not None

    def _keep(self, rows: Tensor) -> None:
        """Forget the rows that stopped in an earlier block."""
        if rows.shape[0] == self.cached_rows.shape[0]:
            return
        kept = torch.isin(self.cached_rows, rows).nonzero()[:, 0]
        self.cache.select(kept)
        assert self.pending is not None
        self.pending = (self.pending[0][kept], self.pending[1][kept])
        self.cached_rows = self.cached_rows[kept]

    def hidden(self, block_AS: Tensor, rows: Tensor, seen: Seen | None) -> Tensor:
        hidden = self.model.denoise(block_AS, self.cache, self.config.block_length, commit=self.pending, seen=seen)
        self.pending = None
        return hidden

    def finish(self, block_AS: Tensor, rows: Tensor) -> None:
        self.pending = (block_AS, torch.ones_like(block_AS, dtype=torch.bool))


def without(logits_ASV: Tensor, token_id: int) -> Tensor:
    """The logits in fp32 with one token's at -inf: it has probability 0."""
    out = logits_ASV.to(torch.float32, copy=True)
    out[..., token_id] = -torch.inf
    return out


def likely(logits_ASV: Tensor, top_k: int | None, top_p: float | None, temperature: float = 1.0) -> Tensor:
    """The logits, -inf where a token is not among the top_k most probable or not among the fewest that add up to top_p at this temperature.

    Of equally probable tokens at the edge of top_k all stay.
    """
    if top_k is not None and top_k < logits_ASV.shape[-1]:
        least = logits_ASV.topk(top_k, dim=-1).values[..., -1:]
        logits_ASV = logits_ASV.masked_fill(logits_ASV < least, -torch.inf)
    if top_p is not None and top_p < 1:
        ordered, place = logits_ASV.sort(dim=-1, descending=True)
        probability = (ordered / temperature).softmax(dim=-1)
        beyond = probability.cumsum(dim=-1) - probability >= top_p  # what comes before already adds up to top_p
        beyond[..., 0] = False  # also where fp32 rounds top_p to 0
        logits_ASV = logits_ASV.masked_fill(torch.zeros_like(beyond).scatter(-1, place, beyond), -torch.inf)
    return logits_ASV


def choose(
    logits_ASV: Tensor, mask_token_id: int, temperature: float, generators: list[torch.Generator | None] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Token of every slot, its probability under softmax(logits), both [A, S], and all probabilities [A, S, V]. The mask token is
    never chosen.

    Probabilities are fp32. Sampling adds Gumbel noise to logits / temperature (Gumbel-max), drawn in fp64 from each row's
    own generator, so a row's sample depends neither on its batch nor on the device. A row without one draws nothing.
    """
    probability_ASV = logits_ASV.float().softmax(dim=-1)
    logits_ASV = without(logits_ASV, mask_token_id)
    if temperature == 0:
        token_AS = logits_ASV.argmax(dim=-1)
    else:
        assert generators is not None
        noise = torch.full(logits_ASV.shape, 0.5, dtype=torch.float64)
        for row, generator in enumerate(generators):
            if generator is not None:
                noise[row] = torch.rand(logits_ASV.shape[1:], generator=generator, dtype=torch.float64)
        gumbel = -torch.log(-torch.log(noise.clamp(min=1e-300))).to(logits_ASV.device)
        behind = logits_ASV.double() - logits_ASV.double().amax(dim=-1, keepdim=True)  # so that no temperature is too small to divide by
        token_AS = torch.where(behind == 0, gumbel, behind / temperature + gumbel).argmax(dim=-1)
    return token_AS, probability_ASV.gather(-1, token_AS[..., None])[..., 0], probability_ASV


def entropies(logits_ASV: Tensor, slots: int = 32) -> Tensor:
    """Entropy of each slot's softmax in nats, [A, S], as transformers computes it; `slots` slots at a time, since it takes three copies."""
    found = []
    for part_AsV in logits_ASV.split(slots, dim=1):
        log_AsV = (part_AsV - part_AsV.logsumexp(dim=-1, keepdim=True)).clamp(min=torch.finfo(part_AsV.dtype).min)
        found.append(-(log_AsV * log_AsV.softmax(dim=-1)).sum(dim=-1))
    return torch.cat(found, dim=1)


def score(order: str, confidence_AS: Tensor, probability_ASV: Tensor) -> Tensor:
    """What decides which slots are revealed first, [A, S]; the larger the earlier. See `DecodeConfig.order`."""
    if order == "confidence":
        return confidence_AS
    if order == "entropy":
        return -torch.special.entr(probability_ASV).sum(dim=-1)
    if order == "margin":
        best = probability_ASV.topk(2, dim=-1).values
        return best[..., 0] - best[..., 1]
    return -torch.arange(confidence_AS.shape[1], device=confidence_AS.device, dtype=torch.float32).expand_as(confidence_AS)


@dataclass
class _Taken:
    """What a step chose, over the rows that it computed."""

    token_AS: Tensor
    confidence_AS: Tensor
    reveal_AS: Tensor


class _Sampler(Protocol):
    """What a step does to the active block. A sampler serves one block, of rows A.

    ids_AS: what the next forward sees. output_AS: what the block is when it is done. seen: what the next forward is told besides.
    left_A: above 0 while a row is not done. together: whether rows draw together, so that those that stopped must go along.
    """

    @property
    def together(self) -> bool: ...
    @property
    def ids_AS(self) -> Tensor: ...
    @property
    def output_AS(self) -> Tensor: ...
    @property
    def left_A(self) -> Tensor: ...
    @property
    def seen(self) -> Seen | None: ...

    def __init__(
        self, model: DiffusionLM, config: DecodeConfig, rule: unmask.Rule, draws: Draws, rows: list[int], block: int, ids_AS: Tensor,
        answer_AS: Tensor,
    ): ...

    def step(self, logits_ASV: Tensor, step: int, place: slice | Tensor, still: list[int]) -> _Taken:
        """place: the rows that the logits are of. still: those of the block that are not done."""


class _Reveal:
    """Open slots are revealed and stay. A block is done when none is open."""

    together = False
    seen: Seen | None = None

    def __init__(
        self, model: DiffusionLM, config: DecodeConfig, rule: unmask.Rule, draws: Draws, rows: list[int], block: int, ids_AS: Tensor,
        answer_AS: Tensor,
    ):
        self.mask_token_id, self.config, self.rule = model.facts.mask_id, config, rule
        self.rows, self.generators = rows, draws.generators
        self.ids_AS, self.answer_AS, self.open_AS = ids_AS, answer_AS, answer_AS.clone()

    @property
    def output_AS(self) -> Tensor:
        return self.ids_AS

    @property
    def left_A(self) -> Tensor:
        return self.open_AS.sum(dim=1)

    def step(self, logits_ASV: Tensor, step: int, place: slice | Tensor, still: list[int]) -> _Taken:
        config, drawing = self.config, None
        if self.generators is not None:
            computed = range(len(self.rows)) if isinstance(place, slice) else still
            drawing = [self.generators[self.rows[i]] if i in still else None for i in computed]
        if config.top_k is not None or config.top_p is not None:
            logits_ASV = likely(without(logits_ASV, self.mask_token_id), config.top_k, config.top_p, config.temperature or 1.0)
        token_AS, confidence_AS, probability_ASV = choose(logits_ASV, self.mask_token_id, config.temperature, drawing)
        reveal_AS = self.rule(score(config.order, confidence_AS, probability_ASV), self.open_AS[place], step) & self.answer_AS[place]
        ids_AS, open_AS = self.ids_AS.clone(), self.open_AS.clone()
        ids_AS[place] = torch.where(reveal_AS, token_AS, ids_AS[place])
        open_AS[place] &= ~reveal_AS
        self.ids_AS, self.open_AS = ids_AS, open_AS
        return _Taken(token_AS, confidence_AS, reveal_AS)


class _Redecide:
    """Every step draws a token for every slot; accepted ones are put in, all others become noise, and the most probable tokens of the
    last step are the block's output. (DiffusionGemma, in the order in which transformers' `generate` draws.)

    Rows that draw together go on drawing when they are done; their block stays as it is.
    """

    def __init__(
        self, model: DiffusionLM, config: DecodeConfig, rule: unmask.Rule, draws: Draws, rows: list[int], block: int, ids_AS: Tensor,
        answer_AS: Tensor,
    ):
        assert config.stability_threshold is not None and config.entropy_threshold is not None
        self.config, self.rule, self.draws, self.rows, self.block, self.together = config, rule, draws, rows, block, draws.together
        self.noise, self.dtype, self.count = model.noise, model.hf.get_input_embeddings().weight.dtype, ids_AS.shape[1]
        self.ids_AS = self.output_AS = self.noise.blank(self.count, draws, rows)
        self.settled = unmask.Settled(config.stability_threshold, config.entropy_threshold)
        self.left_A = torch.ones(len(rows), dtype=torch.long, device=ids_AS.device)
        self.seen: Seen | None = None

    def step(self, logits_ASV: Tensor, step: int, place: slice | Tensor, still: list[int]) -> _Taken:
        steps, t_min, t_max = self.config.max_denoising_steps, self.config.t_min, self.config.t_max
        assert steps is not None and t_min is not None and t_max is not None
        logits_ASV = logits_ASV.float() / unmask.temperature(step, steps, t_min, t_max).to(logits_ASV.device)
        probability_ASV = logits_ASV.softmax(dim=-1)
        if not math.isfinite(float(probability_ASV.sum())):
            broken = (~probability_ASV.isfinite()).flatten(1).any(dim=1).tolist()
            computed = self.rows if isinstance(place, slice) else [self.rows[i] for i in still]
            raise NotFinite([row for row, bad in zip(computed, broken, strict=True) if bad], step, self.block)
        drawing = list(range(len(self.rows))) if self.together else still
        drawn = slice(None) if len(drawing) == len(self.rows) else drawing
        token_AS, noise_AS = self.ids_AS.clone(), self.ids_AS.clone()
        token_AS[drawing] = self.draws.choice(probability_ASV[drawn], [self.rows[i] for i in drawing])
        confidence_AS = probability_ASV.gather(-1, token_AS[..., None])[..., 0]
        del probability_ASV
        best_AS, entropy_AS = logits_ASV.argmax(dim=-1), entropies(logits_ASV)
        accept_AS = self.rule(-entropy_AS, torch.ones_like(token_AS, dtype=torch.bool), step)
        noise_AS[drawing] = self.noise.blank(self.count, self.draws, [self.rows[i] for i in drawing])

        done_A1 = (self.left_A == 0)[:, None]
        self.ids_AS = torch.where(done_A1, self.ids_AS, unmask.renoise(token_AS, accept_AS, noise_AS))
        self.output_AS = torch.where(done_A1, self.output_AS, best_AS)
        self.seen = Seen(logits_ASV.to(self.dtype))
        done_A = done_A1[:, 0] | self.settled(self.output_AS, entropy_AS) | (step + 1 == steps)
        self.left_A = (~done_A).long()
        return _Taken(token_AS, confidence_AS, accept_AS)


def _check_noise(model: DiffusionLM, config: DecodeConfig) -> None:
    """A ValueError where a config is not for a model's noise."""
    if config.redecides and model.noise.marked:
        raise ValueError(
            f"max_denoising_steps is {config.max_denoising_steps}; this model's noise is a mask token, so slots are revealed once: give "
            f"one of {', '.join(WAYS)}"
        )
    if not config.redecides and not model.noise.marked:
        raise ValueError(
            f"this model's noise has no mask token, so every step decides every slot: give entropy_bound, {', '.join(REDECIDING)} and "
            "order 'entropy'"
        )
    if model.facts.whole_blocks and config.block_length != model.facts.block_length and not model.noise.marked:
        raise ValueError(f"block_length is {config.block_length}; this model has blocks of {model.facts.block_length}, whole ones")


@torch.no_grad()
def decode(
    model: DiffusionLM,
    prompt_BP: Tensor,
    valid_BP: Tensor,
    config: DecodeConfig,
    *,
    callback: Callback | None = None,
    seeds: list[int] | None = None,
    rule: unmask.Rule | None = None,
    ends: Ends | None = None,
) -> Decoded:
    """Answers to a batch of left-padded prompts.

    prompt_BP, valid_BP: token ids and True for real tokens. Only positions behind the prompt are ever written, so a mask
        token typed into a prompt stays.
    callback: called with a `Step` after every step.
    seeds: one a row, needed when temperature > 0. A config that decides every slot anew also draws; without seeds all rows do so together
        from torch's default generator, in the order of transformers' `generate`: rows that have stopped go along until all have.
    rule: a reveal rule in place of the config's. It may also name answer slots of the block that are filled already: they are written
        again. It gets the scores of `config.order`.
    ends: called after every block with a row and its answer so far, an end-of-sequence token and what follows it included. Where it says
        True the row stops, at the places where it may stop for an end-of-sequence token; nothing is cut off.
    Raises NotFinite, with rows, block and step, when a logit is not finite.

    Where a family's blocks start at position 0, the tail of a prompt stands at the head of the first block; it is seen by that block
    and never written. The last block is filled whole, as such families were trained, and the answer is cut to the budget.
    """
    facts = model.facts
    if config.use_cache and facts.block_origin == "zero" and facts.prompt_attention == "bidirectional":
        raise ValueError(
            "use_cache: with a bidirectional prompt and blocks from position 0 the keys of the prompt change with the first block; "
            "decode with use_cache=False"
        )
    if config.approximate_cache == "interval" and (rule is not None or facts.block_origin == "zero"):
        raise ValueError(
            "approximate_cache 'interval' refreshes all rows of a batch together: it takes no rule of one's own, and blocks that begin at "
            "the prompt's end"
        )
    if config.temperature > 0 and (seeds is None or len(seeds) != prompt_BP.shape[0]):
        raise ValueError(f"temperature {config.temperature} samples: give one seed for each of the {prompt_BP.shape[0]} rows")
    whole = prompt_BP.shape == valid_BP.shape and prompt_BP.shape[1] > 0 and bool(valid_BP[:, -1].all())
    if not whole or bool((valid_BP[:, :-1] & ~valid_BP[:, 1:]).any()):
        raise ValueError(
            f"prompts {tuple(prompt_BP.shape)} and padding mask {tuple(valid_BP.shape)} must have one shape, "
            "hold at least one token a row, and be padded on the left"
        )
    batch, device = prompt_BP.shape[0], prompt_BP.device
    _check_noise(model, config)
    canvas = _Canvas.of(prompt_BP, valid_BP, config, facts)
    draws = Draws(batch, device, seeds)
    eos = torch.tensor(facts.eos_token_ids, device=device)
    steps, commits, decoded, tails = [0] * batch, [0] * batch, [0] * batch, canvas.tail_B.tolist()
    kind: type[_Rows] = _CachedBlocks if config.use_cache else _ApproximateCache if config.approximate_cache else _WholeSequence
    source: _Rows = kind(model, canvas, valid_BP.sum(dim=1), config)
    sampling: type[_Sampler] = _Redecide if config.redecides else _Reveal
    row_A, length = torch.arange(batch, device=device), canvas.ids_BG.shape[1]
    live = set(range(batch))  # rows that have not stopped; where rows draw together the others go along, and nothing of them is counted
    most_blocks = config.blocks + (facts.block_origin == "zero")
    ended_B = torch.zeros(batch, dtype=torch.bool, device=device)
    # Where a row's blocks begin, counted from where blocks of stop_length do.
    start_B = valid_BP.sum(dim=1) - canvas.tail_B if facts.block_origin == "zero" else torch.zeros_like(canvas.tail_B)

    for block, first in enumerate(range(0, length, config.block_length)):
        end = min(first + config.block_length, length)
        reveal = rule if rule is not None else config.rule(block, end - first, most_blocks)
        answer_AS = torch.arange(first, end, device=device) >= canvas.tail_B[row_A, None]
        rows = row_A.tolist()
        sampler = sampling(model, config, reveal, draws, rows, block, canvas.ids_BG[row_A, first:end], answer_AS)
        commits_now = source.start(sampler.ids_AS, first, row_A)
        still = list(range(len(rows)))  # places in row_A of the rows whose block is not done
        for row in live:
            commits[row] += commits_now
            decoded[row] = end - tails[row]
        step = 0
        while still:
            # The cache holds all rows of the block, so finished ones go along; without it only open rows are computed.
            place = slice(None) if config.use_cache or len(still) == len(rows) else _places(still, device)
            before_AS = sampler.ids_AS
            hidden_ASD = source.hidden(before_AS[place], row_A[place], sampler.seen)
            taken = sampler.step(model.head(hidden_ASD), step, place, still)
            counted = [i for i in still if rows[i] in live]
            for i in counted:
                steps[rows[i]] += 1
            if callback is not None and counted:
                computed = counted if isinstance(place, slice) else [still.index(i) for i in counted]
                seen = slice(None) if len(counted) == hidden_ASD.shape[0] else _places(computed, device)
                where = slice(None) if len(counted) == len(rows) else _places(counted, device)
                callback(Step(
                    block, step, first - canvas.tail_B[row_A[where]], row_A[where], hidden_ASD[seen], taken.token_AS[seen],
                    taken.confidence_AS[seen], taken.reveal_AS[seen], before_AS[where], sampler.ids_AS[where], sampler.output_AS[where],
                    _of(sampler.seen, where),
                ))
            # The one wait for the device in a step: how much is left to do, and is the sum of all probabilities a number?
            *left, total = torch.cat([sampler.left_A, taken.confidence_AS.sum()[None]]).tolist()
            if not math.isfinite(total):
                computed = rows if isinstance(place, slice) else [rows[i] for i in still]
                broken = (~taken.confidence_AS.isfinite()).any(dim=1).tolist()
                raise NotFinite([row for row, bad in zip(computed, broken, strict=True) if bad], step, block)
            still = [i for i, count in enumerate(left) if count]
            step += 1
        block_AS = sampler.output_AS
        canvas.ids_BG[row_A, first:end] = block_AS
        going_A = canvas.end_B[row_A] > end
        if config.stop_at_eos:
            ended_B[row_A] |= (torch.isin(block_AS, eos) & answer_AS).any(dim=1)
        if ends is not None:
            said = [ends(row, canvas.ids_BG[row, tails[row] : end].tolist()) for row in rows]
            ended_B[row_A] |= torch.tensor(said, device=device)
        if config.stop_at_eos or ends is not None:
            going_A &= ~(ended_B[row_A] & ((start_B[row_A] + end) % (config.stop_length or config.block_length) == 0))
        if sampler.together:
            stopped_A1 = torch.tensor([row not in live for row in rows], device=device)[:, None]
            closed_AS = torch.where(going_A[:, None], block_AS, _closed(block_AS, eos, facts.pad_token_id))
            block_AS = torch.where(stopped_A1, facts.pad_token_id, closed_AS)
            live &= {row for row, going in zip(rows, going_A.tolist(), strict=True) if going}
            kept_A = torch.full_like(going_A, bool(live))
        else:
            live, kept_A = {row for row, going in zip(rows, going_A.tolist(), strict=True) if going}, going_A
        source.finish(block_AS, row_A)
        row_A = row_A[kept_A]
        if not live:
            break

    filled_BM = prompt_BP.new_full((batch, slots(facts, config.max_new_tokens, config.block_length)), facts.unfilled_id)
    for row, tail in enumerate(tails):
        filled_BM[row, : decoded[row]] = canvas.ids_BG[row, tail : tail + decoded[row]]
    forwards = [s + c for s, c in zip(steps, commits, strict=True)] if model.commits_apart else list(steps)
    return _trim(filled_BM, steps, commits, forwards, decoded, facts, config.max_new_tokens)


def _of(seen: Seen | None, where: slice | Tensor) -> Seen | None:
    """What some of the rows are told."""
    return None if seen is None else Seen(seen.logits_BSK[where])


def _closed(block_AS: Tensor, eos: Tensor, pad_token_id: int) -> Tensor:
    """Blocks with padding behind their first end-of-sequence token."""
    is_end_AS = torch.isin(block_AS, eos)
    return torch.where(is_end_AS.cumsum(dim=1) > is_end_AS.long(), pad_token_id, block_AS)


def _places(rows: list[int], device: torch.device) -> Tensor:
    """An index on a device, sent without waiting for what the device has yet to do."""
    return torch.tensor(rows).to(device, non_blocking=True)


def _trim(
    filled_BM: Tensor, steps: list[int], commits: list[int], forwards: list[int], decoded: list[int], facts: Facts, budget: int
) -> Decoded:
    """Cut to the budget, and drop what follows each row's first end-of-sequence token."""
    output_tokens, stop, ids_BN = [], [], filled_BM[:, :budget].clone()
    for row, ids in enumerate(ids_BN.tolist()):
        within = min(decoded[row], budget)
        eos = [i for i, token in enumerate(ids[:within]) if token in facts.eos_token_ids]
        output_tokens.append(eos[0] + 1 if eos else within)
        stop.append("eos" if eos else "length" if within == budget else "ends")
        ids_BN[row, output_tokens[-1] :] = facts.pad_token_id
    return Decoded(ids_BN, filled_BM, steps, commits, forwards, output_tokens, decoded, stop)


def changed(config: DecodeConfig, **changes) -> DecodeConfig:
    """The same decoding with some values changed; setting one way of revealing clears the others."""
    if any(way in changes for way in WAYS):
        changes = {**dict.fromkeys(WAYS), **changes}
    return replace(config, **changes)


def resolve(model: DiffusionLM, stated: dict, *, attention: str | None = None, **values) -> DecodeConfig:
    """How to decode a checkpoint where some values are left out (None). `cdlm generate` and `cdlm eval` both ask here.

    stated: the checkpoint's config.json. attention: "block_causal" or "full"; by default block_causal if the checkpoint states a block
    length or reads its prompt causally. values: of `DecodeConfig`. Left out, the budget is the checkpoint's own, else 256; the block
    length its own, else 1 where the prompt is read causally (one token after another) and 32 otherwise; the way of revealing its
    confidence threshold, else 0.9; or, where it says how it decodes (`DiffusionLM.own_decoding`), each value its own.
    """
    if attention not in (None, "block_causal", "full"):
        raise ValueError(f"attention is {attention!r}; allowed: block_causal, full")
    given = {name: value for name, value in values.items() if value is not None}
    causal = model.facts.prompt_attention == "causal"
    block_causal = (model.facts.block_length is not None or causal) if attention is None else attention == "block_causal"
    budget = next(n for n in (given.get("max_new_tokens"), model.hf.generation_config.max_new_tokens, 256) if n is not None)
    length = next(
        n for n in (given.get("block_length"), model.facts.block_length, 1 if causal else min(32, max(budget, 1))) if n is not None
    )
    reveal: dict[str, Any] = model.own_decoding
    if not reveal and not any(way in given for way in WAYS):
        reveal = {"confidence_threshold": stated.get("confidence_threshold", 0.9)}
    return DecodeConfig(**{
        "block_causal": block_causal, "use_cache": block_causal, **reveal, **given, "max_new_tokens": budget, "block_length": length,
    })  # fmt: skip
