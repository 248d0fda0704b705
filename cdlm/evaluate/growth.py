"""How decoding time grows with the length of the answer: without a cache and with it, on a model of the recipe's shape.

The weights are random and the number of steps is fixed for each block, so a time depends on lengths alone, not on what a model says.
Without a cache a step is a forward over the whole sequence, and there are as many steps as blocks: time grows with the square of the
length (faster where attention itself dominates). With it a step is a forward over a block: time grows with the length, as long as looking
up the cache costs little.
"""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from cdlm.decode import DecodeConfig, decode
from cdlm.evaluate import clock
from cdlm.families.base import DiffusionLM, Facts

COLUMNS = ("answer tokens", "steps", "naive s", "cached s", "times faster", "naive peak MiB", "cached peak MiB")
METHODS = ("naive", "cached")


def check(lengths: list[int], block_length: int, prompt_tokens: int, repeats: int, steps_per_block: int) -> None:
    """One ValueError for what can't be measured."""
    wrong = [length for length in lengths if length < block_length or length % block_length]
    if wrong or len(set(lengths)) < len(lengths) or len(lengths) < 2:
        raise ValueError(f"--lengths is {lengths}; allowed: two or more different multiples of the block length, {block_length}")
    for name, value in (("--prompt-tokens", prompt_tokens), ("--repeats", repeats), ("--steps-per-block", steps_per_block)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    if steps_per_block > block_length:
        raise ValueError(f"--steps-per-block is {steps_per_block}; a block has {block_length} slots to reveal")


def model_of(config: Any, facts: Facts, positions: int, *, dtype: torch.dtype, device: str, seed: int) -> DiffusionLM:
    """A model of a stock config with room for so many positions, and random weights."""
    import copy

    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(config)
    config.max_position_embeddings = max(positions, getattr(config, "max_position_embeddings", 0))
    torch.manual_seed(seed)
    hf = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
    return DiffusionLM(hf, facts, "native").eval().to(device)


def measure(
    model: DiffusionLM, lengths: list[int], block_length: int, *, prompt_tokens: int = 32, repeats: int = 1, steps_per_block: int = 1,
    seed: int = 0, say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Seconds of one answer of each length, naive (full attention, no cache) and cached (block-causal), in turn; median of repeats.

    The whole length is always decoded. Before the clock, each method decodes the shortest length once. Returns the rows, and for both
    methods the exponent of time against length: of a line through all lengths, and between the last two (`tail`).
    """
    check(lengths, block_length, prompt_tokens, repeats, steps_per_block)
    special = {model.facts.mask_token_id, model.facts.pad_token_id, *model.facts.eos_token_ids}
    usable = torch.tensor([token for token in range(model.hf.config.vocab_size) if token not in special])
    draw = torch.Generator().manual_seed(seed)
    prompt = usable[torch.randint(len(usable), (1, prompt_tokens), generator=draw)].to(model.device)
    valid = torch.ones_like(prompt, dtype=torch.bool)

    def call(method: str, length: int) -> Callable[[], Any]:
        cached = method == "cached"
        config = DecodeConfig(
            length, block_length, steps_per_block=steps_per_block, block_causal=cached, use_cache=cached, stop_at_eos=False
        )
        return partial(decode, model, prompt, valid, config)

    for method in METHODS:
        call(method, min(lengths))()
    rows: list[dict[str, Any]] = []
    for length in sorted(lengths):
        spent: dict[str, list[float]] = {method: [] for method in METHODS}
        peak, steps, commits = dict.fromkeys(METHODS, 0), {}, {}
        for _ in range(repeats):
            for method in METHODS:
                clock.reset_memory(model.device)
                seconds, out = clock.seconds(call(method, length), model.device)
                spent[method].append(seconds)
                peak[method] = max(peak[method], clock.peak_memory(model.device))
                steps[method], commits[method] = out.steps[0], out.commit_forwards[0]
        median = {method: statistics.median(values) for method, values in spent.items()}
        rows.append({
            "length": length, "steps": steps, "commit_forwards": commits, "seconds": spent, "median_s": median, "peak_memory_bytes": peak,
        })  # fmt: skip
        say(f"bench: {length} tokens, {steps['cached']} steps: naive {median['naive']:.2f} s, cached {median['cached']:.2f} s")
    tried = [row["length"] for row in rows]
    times = {method: [row["median_s"][method] for row in rows] for method in METHODS}
    return {
        "rows": rows, "block_length": block_length, "prompt_tokens": prompt_tokens, "repeats": repeats, "steps_per_block": steps_per_block,
        "seed": seed, "memory": clock.memory_kind(model.device),
        "exponent": {method: clock.exponent(tried, times[method]) for method in METHODS},
        "exponent_tail": {method: clock.exponent(tried[-2:], times[method][-2:]) for method in METHODS},
    }


def table(found: dict[str, Any]) -> list[list[str]]:
    """Rows of text under COLUMNS."""
    out = []
    for row in found["rows"]:
        naive, cached = row["median_s"]["naive"], row["median_s"]["cached"]
        out.append([
            str(row["length"]), str(row["steps"]["cached"]), f"{naive:.3f}", f"{cached:.3f}", f"{naive / cached:.1f}" if cached else "",
            *(f"{row['peak_memory_bytes'][method] / 2**20:.0f}" for method in METHODS),
        ])  # fmt: skip
    return out


def lines(found: dict[str, Any]) -> list[str]:
    """The finding as sentences."""
    whole, tail = found["exponent"], found["exponent_tail"]
    low, high = found["rows"][-2]["length"], found["rows"][-1]["length"]
    return [
        f"{method}: time grows with length to the power {whole[method]:.2f} over all lengths, {tail[method]:.2f} from {low} to {high}"
        for method in METHODS
    ]
