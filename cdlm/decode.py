"""In what order forwards and reveals happen. Knows blocks, rules and rows; knows no checkpoint family.

One loop serves every decoding of a masked diffusion LM: block after block, refine the active block until it has no open
slot. What differs is where the block's rows come from (`_WholeSequence`: a forward over everything, for the full mask
and for checking; `_CachedBlocks`: a forward over the block against a cache) and which slots are revealed (`unmask.py`).

Counting. A *step* is a forward that refines a block. A *commit forward* is a forward that writes clean tokens, a prompt or a
finished block, into the cache. With the cache both are one forward: the finished block is committed by the forward that
takes the first step in the next block (2B query tokens under the block-causal mask), the prompt by the very first one.
So `forwards` is not steps + commits; all three are counted per row and reported apart.

Shapes: B rows, A rows still decoding, P prompt tokens, N new tokens, S slots of the active block, V vocabulary, D width.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from cdlm import unmask
from cdlm.families.base import DiffusionLM


@dataclass(frozen=True)
class DecodeConfig:
    """How to decode. Exactly one of confidence_threshold, tokens_per_step and steps says how slots are revealed.

    max_new_tokens: the budget; honoured exactly, also when it is no multiple of block_length.
    confidence_threshold: reveal every slot with confidence above it, and always the best one (a probability).
    tokens_per_step: reveal that many a step.
    steps: spend that many steps on the whole budget, spread evenly over its blocks (at least one a block).
    block_causal: the student's mask; False is the full bidirectional attention of the teacher.
    use_cache: exact block cache; needs block_causal.
    stop_at_eos: a row stops after the block that holds its first end-of-sequence token. False decodes the whole budget.
    temperature: 0 takes the most probable token; above 0 samples from softmax(logits / temperature). The confidence is
        the probability of the chosen token under softmax(logits) either way.
    """

    max_new_tokens: int
    block_length: int
    confidence_threshold: float | None = None
    tokens_per_step: int | None = None
    steps: int | None = None
    block_causal: bool = True
    use_cache: bool = True
    stop_at_eos: bool = True
    temperature: float = 0.0

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "block_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        given = [n for n in ("confidence_threshold", "tokens_per_step", "steps") if getattr(self, n) is not None]
        if len(given) != 1:
            raise ValueError(
                "exactly one of confidence_threshold, tokens_per_step and steps decides what a step reveals; "
                f"given: {', '.join(given) or 'none'}"
            )
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}; it must be 0 (greedy) or above, and finite")
        if self.use_cache and not self.block_causal:
            raise ValueError("use_cache needs block_causal: under full attention a cached key changes with every token revealed")
        self.rule(0)

    @property
    def blocks(self) -> int:
        return -(-self.max_new_tokens // self.block_length)

    def slots(self, block: int) -> tuple[int, int]:
        """First slot of a block and one past its last; the last block may be shorter."""
        return block * self.block_length, min((block + 1) * self.block_length, self.max_new_tokens)

    def rule(self, block: int) -> unmask.Rule:
        """What a step in this block reveals."""
        if self.confidence_threshold is not None:
            return unmask.threshold(self.confidence_threshold)
        if self.tokens_per_step is not None:
            return unmask.top_k(self.tokens_per_step)
        assert self.steps is not None
        if self.steps < 1:
            raise ValueError(f"steps is {self.steps}; it must be at least 1")
        share, rest = divmod(self.steps, self.blocks)
        first, end = self.slots(block)
        return unmask.spread(end - first, max(1, share + (block < rest)))


@dataclass(frozen=True)
class Step:
    """What a callback sees after every step. Rows are those that had an open slot.

    hidden_ASD: aligned final-norm rows that produced the logits. reveal_AS: the slots revealed by this step.
    token_AS, confidence_AS: chosen token and its probability, for every slot. ids_AS: the block after the step.
    """

    block: int
    step: int
    first_slot: int
    row_A: Tensor
    hidden_ASD: Tensor
    token_AS: Tensor
    confidence_AS: Tensor
    reveal_AS: Tensor
    ids_AS: Tensor


Callback = Callable[[Step], None]


@dataclass
class Decoded:
    """Answers of a batch, with what they cost, per row.

    ids_BN: new tokens; what follows a row's first end-of-sequence token is padding.
    filled_BN: every slot as it was filled, also those behind the end token; the mask token where decoding had stopped.
    output_tokens: tokens up to and with the first end-of-sequence token.
    decoded_tokens: slots that were filled, those behind the end-of-sequence token included.
    stop: "eos" or "length".
    """

    ids_BN: Tensor
    filled_BN: Tensor
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


class _Rows(Protocol):
    """Where the hidden rows of the active block come from."""

    def start(self, block_AS: Tensor, first: int, rows: Tensor) -> bool: ...
    def hidden(self, block_AS: Tensor, rows: Tensor) -> Tensor: ...


class _WholeSequence:
    """Every step is a forward over prompt and whole budget, later blocks still masked. No cache."""

    def __init__(self, model: DiffusionLM, prompt_BP: Tensor, valid_BP: Tensor, config: DecodeConfig):
        self.model, self.config, self.prompt = model, config, prompt_BP.shape[1]
        budget = (prompt_BP.shape[0], config.max_new_tokens)
        self.ids = torch.cat([prompt_BP, prompt_BP.new_full(budget, model.facts.mask_token_id)], dim=1)
        self.valid = torch.cat([valid_BP, valid_BP.new_ones(budget)], dim=1)
        self.prompt_length = valid_BP.sum(dim=1)
        self.first = 0

    def start(self, block_AS: Tensor, first: int, rows: Tensor) -> bool:
        self.first = self.prompt + first
        return False

    def hidden(self, block_AS: Tensor, rows: Tensor) -> Tensor:
        window = slice(self.first, self.first + block_AS.shape[1])
        self.ids[rows, window] = block_AS
        hidden = self.model.sequence_hidden(
            self.ids[rows], self.valid[rows], self.prompt_length[rows],
            self.config.block_length if self.config.block_causal else None,
        )
        return hidden[:, window]

    def finish(self, block_AS: Tensor, rows: Tensor) -> None:
        self.ids[rows, self.first : self.first + block_AS.shape[1]] = block_AS


class _CachedBlocks:
    """Every step is a forward over the active block against the cache; the first of a block also commits what precedes it."""

    def __init__(self, model: DiffusionLM, prompt_BP: Tensor, valid_BP: Tensor, config: DecodeConfig):
        self.model, self.config = model, config
        self.cache = model.new_cache(valid_BP, config.max_new_tokens)
        self.cached_rows = torch.arange(prompt_BP.shape[0], device=prompt_BP.device)
        self.pending: tuple[Tensor, Tensor] | None = (prompt_BP, valid_BP)

    def start(self, block_AS: Tensor, first: int, rows: Tensor) -> bool:
        self._keep(rows)
        return True

    def _keep(self, rows: Tensor) -> None:
        """Forget the rows that stopped in an earlier block."""
        if rows.shape[0] == self.cached_rows.shape[0]:
            return
        kept = torch.isin(self.cached_rows, rows).nonzero()[:, 0]
        self.cache.select(kept)
        assert self.pending is not None
        self.pending = (self.pending[0][kept], self.pending[1][kept])
        self.cached_rows = self.cached_rows[kept]

    def hidden(self, block_AS: Tensor, rows: Tensor) -> Tensor:
        hidden = self.model.denoise(block_AS, self.cache, self.config.block_length, commit=self.pending)
        self.pending = None
        return hidden

    def finish(self, block_AS: Tensor, rows: Tensor) -> None:
        self.pending = (block_AS, torch.ones_like(block_AS, dtype=torch.bool))


def choose(
    logits_ASV: Tensor, mask_token_id: int, temperature: float, generators: list[torch.Generator | None] | None
) -> tuple[Tensor, Tensor]:
    """Token of every slot and its probability under softmax(logits), both [A, S]. The mask token is never chosen.

    Probabilities are fp32. Sampling adds Gumbel noise to logits / temperature (Gumbel-max), drawn in fp64 from each row's
    own generator, so a row's sample depends neither on its batch nor on the device. A row without one draws nothing.
    """
    logits_ASV = logits_ASV.float()
    logits_ASV[..., mask_token_id] = -torch.inf
    probability_ASV = logits_ASV.softmax(dim=-1)
    if temperature == 0:
        best = probability_ASV.max(dim=-1)
        return best.indices, best.values
    assert generators is not None
    noise = torch.full(logits_ASV.shape, 0.5, dtype=torch.float64)
    for row, generator in enumerate(generators):
        if generator is not None:
            noise[row] = torch.rand(logits_ASV.shape[1:], generator=generator, dtype=torch.float64)
    gumbel = -torch.log(-torch.log(noise.clamp(min=1e-300))).to(logits_ASV.device)
    token_AS = (logits_ASV.double() / temperature + gumbel).argmax(dim=-1)
    return token_AS, probability_ASV.gather(-1, token_AS[..., None])[..., 0]


@torch.no_grad()
def decode(
    model: DiffusionLM,
    prompt_BP: Tensor,
    valid_BP: Tensor,
    config: DecodeConfig,
    *,
    callback: Callback | None = None,
    seeds: list[int] | None = None,
) -> Decoded:
    """Answers to a batch of left-padded prompts.

    prompt_BP, valid_BP: token ids and True for real tokens. Only positions behind the prompt are ever written, so a mask
        token typed into a prompt stays.
    callback: called with a `Step` after every step.
    seeds: one a row, needed when temperature > 0.
    Raises FloatingPointError, with block and step, when a logit is not finite.
    """
    facts = model.facts
    if facts.block_origin != "prompt_end":
        raise ValueError(f"decoding supports blocks that start at the prompt's end; this checkpoint's start at {facts.block_origin}")
    if config.temperature > 0 and (seeds is None or len(seeds) != prompt_BP.shape[0]):
        raise ValueError(f"temperature {config.temperature} samples: give one seed for each of the {prompt_BP.shape[0]} rows")
    if prompt_BP.shape != valid_BP.shape or prompt_BP.shape[1] == 0 or not bool(valid_BP[:, -1].all()):
        raise ValueError(
            f"prompts {tuple(prompt_BP.shape)} and padding mask {tuple(valid_BP.shape)} must have one shape, "
            "hold at least one token a row, and be padded on the left"
        )
    batch, device = prompt_BP.shape[0], prompt_BP.device
    ids_BN = torch.full((batch, config.max_new_tokens), facts.mask_token_id, dtype=torch.long, device=device)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds] if seeds is not None else None
    eos = torch.tensor(facts.eos_token_ids, device=device)
    steps, commits, decoded = [0] * batch, [0] * batch, [0] * batch
    source = (_CachedBlocks if config.use_cache else _WholeSequence)(model, prompt_BP, valid_BP, config)
    row_A = torch.arange(batch, device=device)

    for block in range(config.blocks):
        first, end = config.slots(block)
        rule = config.rule(block)
        block_AS = ids_BN[row_A, first:end]
        open_AS = torch.ones_like(block_AS, dtype=torch.bool)
        commits_now = source.start(block_AS, first, row_A)
        rows = row_A.tolist()
        still = list(range(len(rows)))  # places in row_A of the rows that have an open slot
        for row in rows:
            commits[row] += commits_now
            decoded[row] = end
        step = 0
        while still:
            # The cache holds all rows of the block, so finished ones go along; without it only open rows are computed.
            place = slice(None) if config.use_cache or len(still) == len(rows) else torch.tensor(still, device=device)
            hidden_ASD = source.hidden(block_AS[place], row_A[place])
            logits_ASV = model.head(hidden_ASD)
            drawing = None
            if generators is not None:
                computed = range(len(rows)) if isinstance(place, slice) else still
                drawing = [generators[rows[i]] if i in still else None for i in computed]
            token_AS, confidence_AS = choose(logits_ASV, facts.mask_token_id, config.temperature, drawing)
            reveal_AS = rule(confidence_AS, open_AS[place], step)
            block_AS[place] = torch.where(reveal_AS, token_AS, block_AS[place])
            open_AS[place] &= ~reveal_AS
            for i in still:
                steps[rows[i]] += 1
            if callback is not None:
                seen = slice(None) if len(still) == hidden_ASD.shape[0] else torch.tensor(still, device=device)
                where = place if len(still) == len(rows) else torch.tensor(still, device=device)
                callback(Step(
                    block, step, first, row_A[where], hidden_ASD[seen], token_AS[seen], confidence_AS[seen],
                    reveal_AS[seen], block_AS[where],
                ))
            # The one wait for the device in a step: is a slot open, and were all probabilities finite?
            state = torch.stack([open_AS.any(dim=1), ~confidence_AS.isfinite().all().expand(len(rows))]).tolist()
            if state[1][0]:
                raise FloatingPointError(f"a logit is not finite in block {block}, step {step}: the model or its input is broken")
            still = [i for i, is_open in enumerate(state[0]) if is_open]
            step += 1
        source.finish(block_AS, row_A)
        ids_BN[row_A, first:end] = block_AS
        if config.stop_at_eos:
            row_A = row_A[~torch.isin(block_AS, eos).any(dim=1)]
            if row_A.shape[0] == 0:
                break

    return _trim(ids_BN, steps, commits, decoded, facts.eos_token_ids, facts.pad_token_id, facts.mask_token_id, config)


def _trim(
    ids_BN: Tensor, steps: list[int], commits: list[int], decoded: list[int],
    eos_token_ids: tuple[int, ...], pad_token_id: int, mask_token_id: int, config: DecodeConfig,
) -> Decoded:
    """Drop what follows each row's first end-of-sequence token, and check that no mask token is left."""
    output_tokens, stop, filled_BN = [], [], ids_BN.clone()
    for row, ids in enumerate(ids_BN.tolist()):
        ends = [i for i, token in enumerate(ids[: decoded[row]]) if token in eos_token_ids]
        output_tokens.append(ends[0] + 1 if ends else decoded[row])
        stop.append("eos" if ends else "length")
        ids_BN[row, output_tokens[-1] :] = pad_token_id
        if mask_token_id in ids[: output_tokens[-1]]:
            raise RuntimeError(f"row {row} still holds a mask token after decoding; this is a bug in the decoder")
    return Decoded(ids_BN, filled_BN, steps, commits, list(steps), output_tokens, decoded, stop)


def changed(config: DecodeConfig, **changes) -> DecodeConfig:
    """The same decoding with some values changed; setting one way of revealing clears the other two."""
    ways = ("confidence_threshold", "tokens_per_step", "steps")
    if any(way in changes for way in ways):
        changes = {**dict.fromkeys(ways), **changes}
    return replace(config, **changes)
