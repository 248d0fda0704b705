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
autoregressive         one token after another, greedy: blocks of one token; the model that bd3lm starts from, or the one that ar trained
autoregressive_model   another model, an autoregressive one of evaluate.autoregressive, by transformers' own cached greedy generate
student_sequential     the student, one token a step
student                block-causal, exact block cache, confidence threshold
student_uncached       the student without its cache

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
from cdlm.decode import Callback, DecodeConfig, Decoded, Step, decode
from cdlm.evaluate.clock import FirstBlock, Interval, Latency, peak_memory, reset_memory, seconds, speedup
from cdlm.families.base import DiffusionLM

BASES = ("teacher", "autoregressive")  # what a latency ratio is against: the first of these that was timed, else the first method


@dataclass(frozen=True)
class Method:
    """A name, its swept parameter (a threshold or a number of steps, None where nothing is swept), and how it decodes.

    weights puts the right weights in place: the adapter off for the teacher where both share one base. generate: what decodes, called as
        `cdlm.decode.decode` is. blocks: whether it decodes block by block, so that there is a first one.
    """

    name: str
    parameter: float | None
    config: DecodeConfig
    model: DiffusionLM
    weights: Callable[[], AbstractContextManager[Any]]
    generate: Callable[..., Decoded] = decode
    blocks: bool = True

    def decode(self, prompt_BP: Tensor, valid_BP: Tensor, callback: Callback | None = None) -> Decoded:
        """Answers to a batch that is on the device, with the right weights."""
        with self.weights():
            return self.generate(self.model, prompt_BP, valid_BP, self.config, callback=callback)

    @property
    def label(self) -> str:
        return label(self.name, self.parameter)


def label(name: str, parameter: float | None) -> str:
    """A method and its swept value in one word, as samples.jsonl has it."""
    return name if parameter is None else f"{name}({parameter:g})"


@dataclass
class Row:
    """What one method did with one question."""

    group: str
    correct: bool
    text: str
    steps: int
    commit_forwards: int
    forwards: int
    output_tokens: int


@dataclass(frozen=True)
class Timed:
    """One call of the clock, on one batch.

    group: of the question; None where the batch holds several. output_tokens: of all its rows. places: of its questions among those
    that were timed. first_block: seconds until the first block was done, None for what has no blocks. later_tokens: output tokens that
    stand behind each row's first block. peak: bytes of memory.
    """

    group: str | None
    seconds: float
    output_tokens: int
    places: tuple[int, ...] = (0,)
    first_block: float | None = None
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


def _decode(method: Method, examples: list[data.Example]) -> Decoded:
    prompt, valid = data.pad_left([example.prompt_ids for example in examples], method.model.facts.pad_token_id)
    return method.decode(prompt.to(method.model.device), valid.to(method.model.device))


def score(method: Method, examples: list[data.Example], tokenizer, batch_size: int) -> list[Row]:
    """Decode all examples, `batch_size` at a time, shortest prompts first; rows come back in the examples' order."""
    order = sorted(range(len(examples)), key=lambda i: len(examples[i].prompt_ids))
    rows: dict[int, Row] = {}
    for start in range(0, len(order), batch_size):
        part = order[start : start + batch_size]
        out = _decode(method, [examples[i] for i in part])
        for row, i in enumerate(part):
            text = tokenizer.decode(out.answer(row, method.model.facts.eos_token_ids), skip_special_tokens=False)
            rows[i] = Row(
                examples[i].group, examples[i].is_right(text), text, out.steps[row], out.commit_forwards[row],
                out.forwards[row], out.output_tokens[row],
            )
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
                for m in timed:
                    m.times.append(_timed(m.method, examples, places))
                if (now := time.monotonic()) - said > 10:
                    said, left = now, (now - began) / number * (repeats * len(batches) - number)
                    say(f"evaluate: latency at batch {size}: {number} of {repeats * len(batches)}, about {left:.0f} s left")


def _timed(method: Method, examples: list[data.Example], places: tuple[int, ...]) -> Timed:
    """One call with the clock around it."""
    model, config, batch = method.model, method.config, [examples[i] for i in places]
    prompt, valid = data.pad_left([example.prompt_ids for example in batch], model.facts.pad_token_id)
    prompt, valid = prompt.to(model.device), valid.to(model.device)
    reset_memory(model.device)
    notes: list[FirstBlock] = []

    def call() -> Decoded:
        notes.append(FirstBlock(model.device))
        return method.generate(model, prompt, valid, config, callback=notes[0])

    with method.weights():
        spent, out = seconds(call, model.device)
    tails = [len(example.prompt_ids) % config.block_length if model.facts.block_origin == "zero" else 0 for example in batch]
    later = [max(0, tokens - (config.block_length - tail)) for tokens, tail in zip(out.output_tokens, tails, strict=True)]
    groups = {example.group for example in batch}
    return Timed(
        batch[0].group if len(groups) == 1 else None, spent, sum(out.output_tokens), places,
        notes[0].seconds() if method.blocks else None, sum(later),
        peak_memory(model.device),
    )


class _Reveals:
    """Decoding callback for one row: the step that revealed each answer slot, counted from 1; 0 where none has."""

    def __init__(self, slots: int):
        self.step, self.taken = [0] * slots, 0

    def __call__(self, step: Step) -> None:
        self.taken += 1
        for place in step.reveal_AS[0].nonzero()[:, 0].tolist():
            slot = int(step.first_slot_A[0]) + place
            if 0 <= slot < len(self.step):
                self.step[slot] = self.taken


def reveals(method: Method, example: data.Example, tokenizer) -> dict[str, Any]:
    """One decoding of one question, token by token with the step that revealed each; tokens run up to and with the end
    token, which is shown as ∎."""
    seen = _Reveals(method.config.max_new_tokens)
    prompt, valid = data.pad_left([example.prompt_ids], method.model.facts.pad_token_id)
    device = method.model.device
    out = method.decode(prompt.to(device), valid.to(device), seen)
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
        "latency_s": {"p10": latency.p10, "median": latency.median, "p90": latency.p90} if latency else None,
        "tps": ratio(sum(timed.output_tokens for timed in times), sum(timed.seconds for timed in times)),
        "batch": batch_size,
        "latency_batch": 1 if times else None,
        "latency_n": len(times),
        "n": len(rows),
        "stop_at_eos": m.method.config.stop_at_eos,
    }


def latencies(measured: list[Measured], seed: int = 0) -> list[dict[str, Any]]:
    """What the clock saw of every method at every batch size, over all tasks. Seconds are those of a call, that is of a whole batch.

    ratio: how many times faster than the base (see BASES), with `low` and `high`. first_block_s: median seconds until the first block
    was done (null for what has no blocks). per_token_s: median, over the calls that wrote tokens behind the first block, of the remaining
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
            firsts = [timed.first_block for timed in times if timed.first_block is not None]
            later = [
                (timed.seconds - timed.first_block) / timed.later_tokens
                for timed in times if timed.later_tokens and timed.first_block is not None
            ]  # fmt: skip
            out.append({
                "method": m.method.name, "parameter": m.method.parameter, "batch": size, "calls": len(times),
                "p10_s": latency.p10, "median_s": latency.median, "p90_s": latency.p90, "base": timed_methods[base][0].method.name,
                "ratio": _plain(faster), "first_block_s": statistics.median(firsts) if firsts else None,
                "per_token_s": statistics.median(later) if later else None, "per_token_n": len(later),
                "tps": ratio(sum(timed.output_tokens for timed in times), sum(timed.seconds for timed in times)),
                "peak_memory_bytes": max(timed.peak for timed in times),
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


def _plain(interval: Interval | None) -> dict[str, float] | None:
    return None if interval is None else {"value": interval.value, "low": interval.low, "high": interval.high}


def run(
    methods: list[Method], examples: list[data.Example], tokenizer, batch_size: int,
    say: Callable[[str], None] = print,
) -> list[Measured]:
    """Accuracy and steps of every method, with progress."""
    began, out = time.monotonic(), []
    for number, method in enumerate(methods, start=1):
        m = Measured(method, score(method, examples, tokenizer, batch_size))
        out.append(m)
        accuracy, steps = mean(row.correct for row in m.rows), mean(row.steps for row in m.rows)
        spent = time.monotonic() - began
        say(f"evaluate: {number} of {len(methods)}, {method.label}: accuracy {accuracy:.1%}, {steps:.1f} steps ({spent:.0f} s)")
    return out
