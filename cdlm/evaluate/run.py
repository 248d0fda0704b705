"""The methods that are compared, run on the test set in one process with one decoder.

teacher                naive decoding: full attention, one token a step, no cache
teacher_truncated      the same, cut to a number of steps for the whole budget
teacher_threshold      training-free parallel decoding: full attention, confidence threshold
teacher_threshold_stop the same, stopping after the block with the end token as the student does
teacher_fixed          training-free: a fixed number of tokens a step
teacher_factor         training-free: the factor rule (Fast-dLLM)
teacher_entropy_bound  training-free: an entropy bound (EB-Sampler)
teacher_prefix_cache   training-free: confidence threshold with Fast-dLLM's prefix cache (approximate)
teacher_dual_cache     the same with its dual cache
teacher_interval_cache one token a step with dLLM-Cache's refresh of the prompt's and the answer's cache by intervals (approximate)
teacher_block_causal   the teacher's weights under the student's mask and cache, one token a step, untrained
autoregressive         one token after another, greedy: blocks of one token; the model that bd3lm and tidar start from, or the one that ar
                       trained
autoregressive_model   another model, an autoregressive one of evaluate.autoregressive, by transformers' own cached greedy generate
student_sequential     the student, one token a step
student                block-causal, exact block cache, confidence threshold
student_uncached       the student without its cache
student_autoregressive after tidar: the trained model, one token after another
tidar                  draft and verify in one forward, greedy; swept: proposals
tidar_linear           the same in two forwards, one to draft and one to verify
tidar_mix              draft and verify by mixed logits; swept: beta
transformers_greedy    transformers' own greedy generation of the model that tidar starts from
prompt_lookup          the same, assisted by what followed the last tokens earlier in the text
assisted               the same, assisted by a smaller autoregressive model

Of a model that decides every slot at every step (it has no other of these, but autoregressive_model):
teacher                its own adaptive sampler, which stops after the block with the end token
teacher_truncated      the same, cut to a number of steps a block
teacher_entropy_bound  training-free: the teacher by the student's sampler; swept: entropy bound
transformers_generate  transformers' own `generate` of the teacher, with the same values
student                the student, by its own sampler; swept: entropy bound
Random numbers come from a seed of each question, for all methods the same.

A latency's protocol is in clock.py. Shapes: B rows, P prompt tokens.
"""

import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from cdlm import data
from cdlm.decode import DecodeConfig, Decoded, Step, decode
from cdlm.evaluate.assisted import DiffusionGenerateConfig, GenerateConfig, diffusion_generate, generate
from cdlm.evaluate.clock import FEWEST, FirstBlock, Interval, Latency, peak_memory, reset_memory, seconds, speedup
from cdlm.families.base import DiffusionLM, NotFinite
from cdlm.processes import ALONE, Processes
from cdlm.speculate import SpeculateConfig, Speculated, Verified, speculate

BASES = ("teacher", "autoregressive")  # what a latency ratio is against: the first of these that was timed, else the first method


@dataclass(frozen=True)
class Method:
    """A name, its swept parameter (a threshold or a number of steps, None where nothing is swept), and how it decodes.

    weights puts the right weights in place: the adapter off for the teacher where both share one base. title: what tables call it, where
    that is not what they call every method of this name.
    """

    name: str
    parameter: float | None
    config: DecodeConfig | SpeculateConfig | GenerateConfig | DiffusionGenerateConfig
    model: DiffusionLM
    weights: Callable[[], AbstractContextManager[Any]]
    title: str | None = None

    @property
    def label(self) -> str:
        return label(self.name, self.parameter)


def label(name: str, parameter: float | None) -> str:
    """A method and its swept value in one word, as samples.jsonl has it."""
    return name if parameter is None else f"{name}({parameter:g})"


@dataclass
class Row:
    """What one method did with one question. queries: query tokens of the forwards behind the prompt's, and accepted: steps in which so
    many drafts stood, both of draft and verify alone (see speculate.py)."""

    group: str
    correct: bool
    text: str
    steps: int
    commit_forwards: int
    forwards: int
    output_tokens: int
    queries: int | None = None
    accepted: list[int] | None = None


@dataclass(frozen=True)
class Timed:
    """One call of the clock, on one batch.

    group: of the question; None where the batch holds several. output_tokens: of all its rows. places: of its questions among those
    that were timed. first_block: seconds until the first block was done. later_tokens: output tokens that stand behind each row's first
    block. peak: bytes of memory.
    """

    group: str | None
    seconds: float
    output_tokens: int
    places: tuple[int, ...] = (0,)
    first_block: float = 0.0
    later_tokens: int = 0
    peak: int = 0

    @property
    def batch(self) -> int:
        return len(self.places)


@dataclass
class Measured:
    """All rows of a method, and what the clock saw of it."""

    method: Method
    rows: list[Row] = field(default_factory=list)
    times: list[Timed] = field(default_factory=list)


def answers(
    method: Method, prompt_BP: Tensor, valid_BP: Tensor, seeds: list[int], callback: Callable[[Any], None] | None = None
) -> Decoded | Speculated:
    """A method's answers, by the decoder that its config is of. callback: a decoder's own, see there. seeds: one a row, for what draws."""
    if isinstance(method.config, SpeculateConfig):
        return speculate(method.model, prompt_BP, valid_BP, method.config, callback=callback)
    if isinstance(method.config, GenerateConfig):
        return generate(method.model, prompt_BP, valid_BP, method.config, callback)
    if isinstance(method.config, DiffusionGenerateConfig):
        return diffusion_generate(method.model, prompt_BP, valid_BP, method.config, seeds[0], callback)
    return decode(method.model, prompt_BP, valid_BP, method.config, callback=callback, seeds=seeds if method.config.draws else None)


def seeds_of(examples: Iterable[data.Example]) -> list[int]:
    """A seed for each question, which is the same in every run and for every method."""
    return [data.sample_seed(example.index) for example in examples]


def first_tokens(method: Method, prompt_tokens: int) -> int:
    """Output tokens of the first block: the rest of one that begins inside a prompt, a whole one, or the first token of a text that is
    written from left to right."""
    config = method.config.sampler if isinstance(method.config, DiffusionGenerateConfig) else method.config
    if not isinstance(config, DecodeConfig):
        return 1
    block = config.block_length
    return block - (prompt_tokens % block if method.model.facts.block_origin == "zero" else 0)


def _decode(method: Method, examples: list[data.Example]) -> Decoded | Speculated:
    prompt, valid = data.pad_left([example.prompt_ids for example in examples], method.model.facts.pad_token_id)
    device = method.model.device
    with method.weights():
        return answers(method, prompt.to(device), valid.to(device), seeds_of(examples))


def score(method: Method, examples: list[data.Example], tokenizer, batch_size: int, processes: Processes = ALONE) -> list[Row]:
    """Decode all examples, `batch_size` at a time, shortest prompts first; rows come back in the examples' order.

    processes: whole batches are dealt out to them, so a row does not depend on their number; every process gets all rows.
    """
    order = sorted(range(len(examples)), key=lambda i: len(examples[i].prompt_ids))
    rows: dict[int, Row] = {}
    for part in processes.share([order[start : start + batch_size] for start in range(0, len(order), batch_size)]):
        try:
            out = _decode(method, [examples[i] for i in part])
        except NotFinite as error:
            names = ", ".join(str(examples[part[row]].index) for row in error.rows)
            raise FloatingPointError(f"evaluate: {method.label}, question {names}: {error}") from None
        for row, i in enumerate(part):
            text = tokenizer.decode(out.answer(row, method.model.facts.eos_token_ids), skip_special_tokens=False)
            rows[i] = Row(
                examples[i].group, examples[i].is_right(text), text, out.steps[row], out.commit_forwards[row],
                out.forwards[row], out.output_tokens[row],
            )
            if isinstance(out, Speculated):
                rows[i].queries, rows[i].accepted = out.queries[row], out.accepted[row] if out.accepted else None
    gathered = processes.gather(list(rows.items()))
    assert sorted(i for i, _ in gathered) == list(range(len(examples))), "a question was measured twice, or not at all"
    rows = dict(gathered)
    return [rows[i] for i in range(len(examples))]


def time_all(
    measured: Iterable[Measured], examples: list[data.Example], warmup: int, repeats: int, batch_sizes: Iterable[int] = (1,),
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Latencies at each batch size, methods interleaved batch by batch; the first `warmup` batches are run once before the clock.

    Batches take the examples in their order; a last batch that is not full is left out, so that all of a size are alike.
    """
    timed = list(measured)
    for size in batch_sizes:
        batches = [tuple(range(start, start + size)) for start in range(0, len(examples) - size + 1, size)]
        for m in timed:
            for places in batches[:warmup]:
                _decode(m.method, [examples[i] for i in places])
        began = said = time.monotonic()
        for repeat in range(repeats):
            for number, places in enumerate(batches, start=1 + repeat * len(batches)):
                first = (number - 1) % len(timed)  # so that no method always follows the same one
                for m in timed[first:] + timed[:first]:
                    m.times.append(_timed(m.method, examples, places))
                if (now := time.monotonic()) - said > 10:
                    said, left = now, (now - began) / number * (repeats * len(batches) - number)
                    say(f"evaluate: latency at batch {size}: {number} of {repeats * len(batches)}, about {left:.0f} s left")


def _timed(method: Method, examples: list[data.Example], places: tuple[int, ...]) -> Timed:
    """One call with the clock around it."""
    model, batch = method.model, [examples[i] for i in places]
    prompt, valid = data.pad_left([example.prompt_ids for example in batch], model.facts.pad_token_id)
    prompt, valid = prompt.to(model.device), valid.to(model.device)
    reset_memory(model.device)
    notes: list[FirstBlock] = []

    def call() -> Decoded | Speculated:
        notes.append(FirstBlock(model.device))
        return answers(method, prompt, valid, seeds_of(batch), notes[0])

    with method.weights():
        spent, out = seconds(call, model.device)
    firsts = [first_tokens(method, len(example.prompt_ids)) for example in batch]
    later = [max(0, tokens - first) for tokens, first in zip(out.output_tokens, firsts, strict=True)]
    groups = {example.group for example in batch}
    return Timed(
        batch[0].group if len(groups) == 1 else None, spent, sum(out.output_tokens), places,
        notes[0].seconds(), sum(later), peak_memory(model.device),
    )


class _Reveals:
    """Decoding callback for one row: the step that revealed each answer slot, counted from 1; 0 where none has. Where every step decides
    every slot, the last one that gave it another token than it had."""

    def __init__(self, slots: int, redecides: bool = False):
        self.step, self.taken, self.written, self.redecides = [0] * slots, 0, 0, redecides
        self.before: dict[int, int] = {}  # token of each slot after the step before

    def __call__(self, step: Step | Verified) -> None:
        self.taken += 1
        if isinstance(step, Verified):
            count = int(step.count_A[0])
            self.step[self.written : self.written + count] = [self.taken] * len(self.step[self.written : self.written + count])
            self.written += count
            return
        if self.redecides:
            now = {int(step.first_slot_A[0]) + place: token for place, token in enumerate(step.output_AS[0].tolist())}
            for slot in (slot for slot, token in now.items() if self.before.get(slot) != token and slot < len(self.step)):
                self.step[slot] = self.taken
            self.before |= now
            return
        for place in step.reveal_AS[0].nonzero()[:, 0].tolist():
            slot = int(step.first_slot_A[0]) + place
            if 0 <= slot < len(self.step):
                self.step[slot] = self.taken


def reveals(method: Method, example: data.Example, tokenizer) -> dict[str, Any]:
    """One decoding of one question, token by token with the step that revealed each; tokens run up to and with the end
    token, which is shown as ∎."""
    seen = _Reveals(method.config.max_new_tokens, isinstance(method.config, DecodeConfig) and method.config.redecides)
    prompt, valid = data.pad_left([example.prompt_ids], method.model.facts.pad_token_id)
    device = method.model.device
    with method.weights():
        out = answers(method, prompt.to(device), valid.to(device), seeds_of([example]), seen)
    ids, ends = out.ids_BN[0, : out.output_tokens[0]].tolist(), method.model.facts.eos_token_ids
    text = tokenizer.decode(out.answer(0, ends), skip_special_tokens=False)
    return {
        "method": method.name, "parameter": method.parameter, "task": example.group, "prompt": example.prompt, "reference": example.answer,
        "correct": example.is_right(text), "steps": out.steps[0],
        "tokens": ["∎" if token in ends else tokenizer.decode([token]) for token in ids],
        "revealed_at": seen.step[: len(ids)],
    }


def mean(values: Iterable[float]) -> float:
    """Arithmetic mean of at least one value."""
    held = list(values)
    return sum(held) / len(held)


def ratio(above: float | None, below: float | None) -> float | None:
    """above / below; None where one of them is missing or below is 0."""
    return above / below if above is not None and below else None


def result(m: Measured, task: str | None, batch_size: int) -> dict[str, Any]:
    """A line of report.json, over one task or (None) over all. What an empty task has no number for is null."""
    rows = [row for row in m.rows if task in (None, row.group)]
    times = [timed for timed in m.times if timed.batch == 1 and task in (None, timed.group)]
    latency = Latency.of([timed.seconds for timed in times]) if times else None

    queries = [row.queries for row in rows if row.queries is not None]
    behind = sum(row.forwards - row.commit_forwards for row in rows)
    histograms = [row.accepted for row in rows if row.accepted is not None]

    def over_rows(name: str) -> float | None:
        return mean(getattr(row, name) for row in rows) if rows else None

    return {
        "task": task or "all",
        "method": m.method.name,
        "parameter": m.method.parameter,
        "accuracy": over_rows("correct"),
        "steps": over_rows("steps"),
        "commit_forwards": over_rows("commit_forwards"),
        "forwards": over_rows("forwards"),
        "output_tokens": over_rows("output_tokens"),
        "tpf": ratio(sum(row.output_tokens for row in rows), sum(row.forwards for row in rows)),
        "queries_per_forward": ratio(sum(queries), behind) if queries else None,
        "accepted": [sum(counts) for counts in zip(*histograms, strict=True)] if histograms else None,
        "latency_s": {"p10": latency.p10, "median": latency.median, "p90": latency.p90} if latency else None,
        "tps": ratio(sum(timed.output_tokens for timed in times), sum(timed.seconds for timed in times)),
        "batch": batch_size,
        "latency_batch": 1 if times else None,
        "latency_n": len(times),
        "n": len(rows),
        "stop_at_eos": m.method.config.stop_at_eos,
        **_titled(m.method),
    }


def _titled(method: Method) -> dict[str, str]:
    return {} if method.title is None else {"title": method.title}


def latencies(measured: list[Measured], seed: int = 0) -> list[dict[str, Any]]:
    """What the clock saw of every method at every batch size, over all tasks. Seconds are those of a call, that is of a whole batch.

    ratio: how many times faster than the base (see BASES), with `low` and `high` (null over fewer than FEWEST calls). first_block_s: median
    seconds until the first block was done. per_token_s: median, over the calls that wrote tokens behind the first block, of the remaining
    seconds over those tokens (`per_token_n` such calls; null if none). peak_memory_bytes: the most of all calls.
    """
    out = []
    for size in sorted({timed.batch for m in measured for timed in m.times}):
        timed_methods = [(m, [timed for timed in m.times if timed.batch == size]) for m in measured]
        timed_methods = [(m, times) for m, times in timed_methods if times]
        names = [m.method.name for m, _ in timed_methods]
        base = names.index(next((name for name in BASES if name in names), names[0]))
        base_seconds = _by_batch(timed_methods[base][1])
        for m, times in timed_methods:
            own = _by_batch(times)
            faster = speedup([base_seconds[key] for key in own], list(own.values()), seed=seed)
            latency = Latency.of([timed.seconds for timed in times])
            later = [(timed.seconds - timed.first_block) / timed.later_tokens for timed in times if timed.later_tokens]
            out.append({
                "method": m.method.name, "parameter": m.method.parameter, "batch": size, "calls": len(times),
                "p10_s": latency.p10, "median_s": latency.median, "p90_s": latency.p90, "base": timed_methods[base][0].method.name,
                "ratio": _plain(faster, len(own)), "first_block_s": statistics.median(timed.first_block for timed in times),
                "per_token_s": statistics.median(later) if later else None, "per_token_n": len(later),
                "tps": ratio(sum(timed.output_tokens for timed in times), sum(timed.seconds for timed in times)),
                "peak_memory_bytes": max(timed.peak for timed in times), **_titled(m.method),
            })  # fmt: skip
    return out


def question_seconds(m: Measured, asked: list[int]) -> dict[str, list[float]]:
    """Seconds at batch 1 of each question that was timed, its repeats in their order; the key is the question's number in samples.jsonl,
    from 0. asked: that number for each place of `Timed.places`."""
    spent: dict[str, list[float]] = {}
    for timed in m.times:
        if timed.batch == 1:
            spent.setdefault(str(asked[timed.places[0]]), []).append(timed.seconds)
    return spent


def _by_batch(times: list[Timed]) -> dict[tuple[int, ...], float]:
    """Seconds of every batch of questions, the median of its repeats."""
    repeats: dict[tuple[int, ...], list[float]] = {}
    for timed in times:
        repeats.setdefault(timed.places, []).append(timed.seconds)
    return {places: statistics.median(spent) for places, spent in repeats.items()}


def _plain(interval: Interval | None, count: int) -> dict[str, float | None] | None:
    if interval is None:
        return None
    low, high = (interval.low, interval.high) if count >= FEWEST else (None, None)
    return {"value": interval.value, "low": low, "high": high}


def run(
    methods: list[Method], examples: list[data.Example], tokenizer, batch_size: int,
    say: Callable[[str], None] = print, processes: Processes = ALONE,
) -> list[Measured]:
    """Accuracy and steps of every method, with progress."""
    began, out = time.monotonic(), []
    for number, method in enumerate(methods, start=1):
        m = Measured(method, score(method, examples, tokenizer, batch_size, processes))
        out.append(m)
        accuracy, steps = mean(row.correct for row in m.rows), mean(row.steps for row in m.rows)
        spent = time.monotonic() - began
        say(f"evaluate: {number} of {len(methods)}, {method.label}: accuracy {accuracy:.1%}, {steps:.1f} steps ({spent:.0f} s)")
    return out
