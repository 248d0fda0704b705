"""The clock. One place says what a latency is, and what is made of it.

A latency is the wall time of one `decode` call. The protocol:

- the prompts' tokens are on the device before the clock starts; tokenizer and text are outside;
- every method decodes the first prompts once before any clock runs (warm-up);
- the device is synchronised at both edges of a call and nowhere between them;
- methods are interleaved prompt by prompt, so a machine that gets slower slows all of them; a prompt may be repeated;
- reported are the median, and the 10th and 90th percentile over prompts and repeats;
- the ratio to a base method is the ratio of medians, with a bootstrap interval over prompts, both methods on the same drawn prompts;
- the first block's time and the time of a token behind it are apart. The end of the first block is noted by the decoding callback: a
  time on the CPU, an event in the stream on a GPU, which is read after the call's own edge, so it waits for nothing;
- peak memory is what torch allocated on a GPU, weights included, else the resident set of the whole process.

Knows seconds and devices; knows no method and no question.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from cdlm.decode import Step

T = TypeVar("T")
DRAWS = 2000  # of a bootstrap
COVERAGE = 0.95
FEWEST = 5  # prompts, or batches of them: over fewer a report shows no interval


@dataclass(frozen=True)
class Latency:
    """Seconds over prompts and repeats."""

    p10: float
    median: float
    p90: float

    @classmethod
    def of(cls, seconds: list[float]) -> "Latency":
        """Median, 10th and 90th percentile (nearest rank) of at least one value."""
        ordered = sorted(seconds)
        count = len(ordered)
        return cls(ordered[-(-count // 10) - 1], statistics.median(ordered), ordered[-(-9 * count // 10) - 1])


@dataclass(frozen=True)
class Interval:
    """A statistic of all values, and where the middle 95 % of its bootstrap draws lie."""

    value: float
    low: float
    high: float


class FirstBlock:
    """Decoding callback that notes when the last step of the first block was taken. One decode call an object; made as it starts."""

    def __init__(self, device: torch.device):
        self.cuda, self.device = device.type == "cuda", device
        self.start = self._now()
        self.end = self.start

    def _now(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def __call__(self, step: Step) -> None:
        if step.block == 0:
            self.end = self._now()

    def seconds(self) -> float:
        """From the start to the end of the first block; on a GPU to be asked after the device was synchronised."""
        return self.start.elapsed_time(self.end) / 1000 if self.cuda else self.end - self.start


def waiting(device: torch.device) -> Callable[[], None]:
    """What waits until a device has done all that was asked of it."""
    return partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None


def seconds(run: Callable[[], T], device: torch.device) -> tuple[float, T]:
    """Wall time of one call, and what it returned."""
    wait = waiting(device)
    wait()
    start = time.perf_counter()
    returned = run()
    wait()
    return time.perf_counter() - start, returned


def bootstrap(statistic: Callable[[np.ndarray], np.ndarray], count: int, *, draws: int = DRAWS, seed: int = 0) -> Interval:
    """A statistic over `count` >= 1 values, and its percentile interval from values drawn with replacement.

    statistic: gets indices [D, count] and gives [D] numbers, one a draw; what belongs together (the two methods on a prompt, the
        two runs on a question) is drawn together by using the same indices. Draws whose number is not finite are left out.
    """
    if count < 1:
        raise ValueError("a bootstrap needs at least one value")
    value = float(statistic(np.arange(count)[None])[0])
    draw, found, part = np.random.default_rng(seed), [], max(1, 2_000_000 // count)
    for done in range(0, draws, part):
        found.append(statistic(draw.integers(count, size=(min(part, draws - done), count))))
    drawn = np.concatenate(found)
    drawn = drawn[np.isfinite(drawn)]
    if not len(drawn):
        return Interval(value, value, value)
    low, high = np.quantile(drawn, [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
    return Interval(value, float(low), float(high))


def speedup(base: list[float], other: list[float], *, seed: int = 0) -> Interval | None:
    """median(base) / median(other): how many times faster `other` is, with its interval over prompts.

    base, other: seconds of the same prompts in the same order, one number a prompt (the median of its repeats). None where a
    clock showed nothing at all. An interval over fewer than FEWEST prompts says little; see there.
    """
    if len(base) != len(other) or not base:
        raise ValueError(f"a ratio needs the same prompts twice, at least one; got {len(base)} and {len(other)}")
    above, below = np.array(base), np.array(other)
    if statistics.median(other) <= 0:
        return None

    def ratio(index: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.median(above[index], axis=1) / np.median(below[index], axis=1)

    return bootstrap(ratio, len(base), seed=seed)


def exponent(lengths: list[int], times: list[float]) -> float:
    """k of the least-squares line log(seconds) = k log(length) + c: 1 for time that grows with length, 2 with its square."""
    if len(set(lengths)) < 2 or len(lengths) != len(times) or min(*lengths, *times) <= 0:
        raise ValueError(f"an exponent needs two different lengths and their times, all above 0; got {lengths} and {times}")
    x, y = np.log(lengths), np.log(times)
    x = x - x.mean()
    return float((x * y).sum() / (x * x).sum())


HIGH_WATER, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")  # Linux


def _resets() -> bool:
    return os.access(RESET, os.W_OK)


def memory_kind(device: torch.device) -> str:
    """What `peak_memory` counts on this machine."""
    if device.type == "cuda":
        return "allocated on the GPU"
    return "resident set of the process" if _resets() else "resident set of the process since it started"


def reset_memory(device: torch.device) -> None:
    """Start counting the peak anew, where the system can."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif _resets():
        RESET.write_text("5")


def peak_memory(device: torch.device) -> int:
    """Most bytes since `reset_memory`; see `memory_kind`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if _resets():
        line = next(line for line in HIGH_WATER.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
