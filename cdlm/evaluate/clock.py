"""The clock. One place says what a latency is.

A latency is the wall time of one `decode` call at batch 1: the prompt's tokens are on the device before it starts, and the
device is synchronised at both edges only. Tokenizer and text are outside. Methods are interleaved prompt by prompt, so a
machine that gets slower slows all of them.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True)
class Latency:
    """Seconds over prompts and repeats."""

    median: float
    p90: float

    @classmethod
    def of(cls, seconds: list[float]) -> "Latency":
        """Median and 90th percentile (nearest rank) of at least one value."""
        ordered = sorted(seconds)
        return cls(statistics.median(ordered), ordered[-(-9 * len(ordered) // 10) - 1])


def seconds(run: Callable[[], T], device: torch.device) -> tuple[float, T]:
    """Wall time of one call, and what it returned."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    returned = run()
    wait()
    return time.perf_counter() - start, returned
