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
teacher_block_causal   the teacher's weights under the student's mask and cache, one token a step, untrained
autoregressive         one token after another, greedy: blocks of one token; the model that bd3lm starts from, or the one that ar trained
student_sequential     the student, one token a step
student                block-causal, exact block cache, confidence threshold
student_uncached       the student without its cache

Shapes: B rows, P prompt tokens.
"""

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from cdlm import data
from cdlm.decode import DecodeConfig, Decoded, decode
from cdlm.evaluate.clock import Latency, seconds
from cdlm.families.base import DiffusionLM


@dataclass(frozen=True)
class Method:
    """A name, its swept parameter (a threshold or a number of steps, None where nothing is swept), and how it decodes.

    weights puts the right weights in place: the adapter off for the teacher where both share one base.
    """

    name: str
    parameter: float | None
    config: DecodeConfig
    model: DiffusionLM
    weights: Callable[[], AbstractContextManager[Any]]

    @property
    def label(self) -> str:
        return self.name if self.parameter is None else f"{self.name}({self.parameter:g})"


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


@dataclass
class Measured:
    """All rows of a method, and its latencies at batch 1 with the group and output tokens of each."""

    method: Method
    rows: list[Row] = field(default_factory=list)
    times: list[tuple[str, float, int]] = field(default_factory=list)


def _decode(method: Method, examples: list[data.Example]) -> Decoded:
    prompt, valid = data.pad_left([example.prompt_ids for example in examples], method.model.facts.pad_token_id)
    device = method.model.device
    with method.weights():
        return decode(method.model, prompt.to(device), valid.to(device), method.config)


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


def time_all(measured: Iterable[Measured], examples: list[data.Example], warmup: int, repeats: int) -> None:
    """Latency at batch 1, methods interleaved prompt by prompt; the first `warmup` prompts are run once before the clock."""
    timed = list(measured)
    for m in timed:
        for example in examples[:warmup]:
            _decode(m.method, [example])
    for _ in range(repeats):
        for example in examples:
            for m in timed:
                model = m.method.model
                prompt, valid = data.pad_left([example.prompt_ids], model.facts.pad_token_id)
                prompt, valid = prompt.to(model.device), valid.to(model.device)
                with m.method.weights():
                    spent, out = seconds(partial(decode, model, prompt, valid, m.method.config), model.device)
                m.times.append((example.group, spent, out.output_tokens[0]))


def mean(values: Iterable[float]) -> float:
    """Arithmetic mean of at least one value."""
    held = list(values)
    return sum(held) / len(held)


def result(m: Measured, task: str | None, batch_size: int) -> dict[str, Any]:
    """A line of report.json, over one task or (None) over all."""
    rows = [row for row in m.rows if task in (None, row.group)]
    times = [(spent, tokens) for group, spent, tokens in m.times if task in (None, group)]
    forwards = sum(row.forwards for row in rows)
    latency = Latency.of([spent for spent, _ in times]) if times else None
    return {
        "task": task or "all",
        "method": m.method.name,
        "parameter": m.method.parameter,
        "accuracy": mean(row.correct for row in rows),
        "steps": mean(row.steps for row in rows),
        "commit_forwards": mean(row.commit_forwards for row in rows),
        "forwards": mean(row.forwards for row in rows),
        "output_tokens": mean(row.output_tokens for row in rows),
        "tpf": sum(row.output_tokens for row in rows) / forwards,
        "latency_s": {"median": latency.median, "p90": latency.p90} if latency else None,
        "tps": sum(tokens for _, tokens in times) / sum(spent for spent, _ in times) if times else None,
        "batch": batch_size,
        "latency_batch": 1 if times else None,
        "latency_n": len(times),
        "n": len(rows),
        "stop_at_eos": m.method.config.stop_at_eos,
    }


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
