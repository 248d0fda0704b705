"""What a run would do, without doing it: the plan that --dry-run prints. Reads configs and data, loads no weights."""

import time
from pathlib import Path
from typing import Any

import torch

from cdlm import data, families
from cdlm.recipe import Recipe
from cdlm.stages import STAGES, Run, is_done
from cdlm.trajectories import hidden_bytes


def skeleton(config_path: Path | str) -> Any:
    """A model without weights, on the meta device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if not Path(config_path).is_file():
        families.read_config(config_path)
    config = AutoConfig.from_pretrained(config_path, trust_remote_code=False)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def machine_flops(width: int) -> float:
    """FLOP/s of fp32 matrix products at this width on this machine, measured for a fraction of a second."""
    a, b = torch.randn(2048, width), torch.randn(width, 4 * width)
    a @ b
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < 0.2:
        a @ b
        count += 1
    return count * 2 * 2048 * width * 4 * width / (time.perf_counter() - start)


def text(run: Run) -> str:
    """The resolved plan: models, parameters, steps, bytes, forwards, a rough time. Dense-transformer FLOP (2 a parameter and
    token, 6 with a backward) at half of what a matrix product of that width reaches on this machine."""
    r: Recipe = run.recipe
    source = r.path(r.scratch.config) if r.scratch else r.model_path()
    model = skeleton(source)
    count, config = sum(p.numel() for p in model.parameters()), model.config
    tokenizer = _tokenizer(r)
    budget, block = r.decode.max_new_tokens, r.decode.block_length
    prompts = run.examples(tokenizer, "prompts", r.collect.num_prompts if r.collect else r.train.num_examples)
    tests = run.examples(tokenizer, "test", r.evaluate.num_prompts)
    length = _mean_length(prompts) + budget
    done = {stage: is_done(run, stage) for stage in STAGES if stage != "collect" or r.collect}
    speed = machine_flops(config.hidden_size) / 2
    per_token = 2.0 * count
    lines = [
        f"recipe      {r.name} -> {run.out}",
        f"model       {source}: {getattr(config, 'model_type', '?')}, {count:,} parameters, {r.dtype}, {r.device}",
        f"decoding    {budget} tokens in {budget // block} blocks of {block}, confidence > {r.decode.confidence_threshold:g}",
    ]
    total = 0.0

    def stage(name: str, words: str, flop: float) -> None:
        nonlocal total
        rough = 0.0 if done.get(name) else flop / speed
        total += rough
        lines.append(f"{name:<11} {words}" + (" (done)" if done.get(name) else f", roughly {_clock(rough)}"))

    rows = 0
    if r.collect:
        c = r.collect
        rows = len(prompts) * len(c.temperatures)
        slots = _decoded(prompts, block) if c.stop_at_eos else budget
        size = hidden_bytes(rows, budget, config.hidden_size)
        stage(
            "collect", f"{rows} trajectories ({len(prompts)} prompts x {len(c.temperatures)} temperatures), "
            f"about {slots:.0f} forwards each, {size / 2**30:.3f} GiB ({size:,} bytes) of hidden rows", rows * slots * length * per_token,
        )
    t = r.train
    batch = t.batch_size * t.accumulation
    of = rows or len(prompts)
    steps = t.steps or max(1, round((t.epochs or 0) * of / batch))
    w = t.distill_weight, t.consistency_weight, t.dlm_weight
    views = 1 + t.complementary
    passes = 3.0 * views if t.objective != "cdlm" else 3.0 * bool(w[0] or w[1]) + bool(w[1]) + 3.0 * bool(w[2])
    lora = "all parameters" if t.lora is None else f"LoRA rank {t.lora.rank} on {', '.join(t.lora.targets)}"
    forwards = views if t.objective != "cdlm" else bool(w[0] or w[1]) + bool(w[1]) + bool(w[2])
    stage(
        "train", f"{t.objective}, {lora}: {steps} steps of {batch} rows ({steps * batch / of:.1f} epochs), {forwards} forwards a step",
        steps * batch * (length + budget * (t.objective == "bd3lm")) * per_token * passes,
    )
    e = r.evaluate
    assert e.methods is not None
    thresholds = sorted({*e.thresholds, r.decode.confidence_threshold})
    share = {"teacher": budget if not e.teacher_stops_at_eos else _decoded(tests, block), "teacher_block_causal": _decoded(tests, block)}
    share |= {"autoregressive": _decoded(tests, 1), "student_sequential": _decoded(tests, block)}
    swept = ("teacher_threshold", "teacher_threshold_stop", "student")
    passes = sum(share.get(m, 8.0 * (len(thresholds) if m in swept else 1)) for m in e.methods)
    stage(
        "evaluate", f"{len(tests)} questions, {', '.join(e.methods)}; thresholds {', '.join(f'{x:g}' for x in thresholds)}; "
        f"about {(len(tests) + e.latency_prompts) * passes:.0f} forwards of a row",
        (len(tests) + e.latency_prompts) * passes * length * per_token,
    )
    stage("export", f"{run.exported}, {count * families.DTYPES[r.dtype].itemsize / 2**20:.1f} MiB", 0.0)
    lines.append(f"in all      roughly {_clock(total)} at {speed / 1e9:.0f} GFLOP/s")
    return "\n".join(lines)


def _tokenizer(r: Recipe) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(r.path(r.scratch.tokenizer) if r.scratch else r.model_path(), trust_remote_code=False)


def _mean_length(examples: list[data.Example]) -> float:
    return sum(len(e.prompt_ids) for e in examples) / len(examples)


def _decoded(examples: list[data.Example], block: int) -> float:
    """Mean slots that are filled when a row stops after the block with its end token, if it answers as the reference does."""
    return sum(-(-(len(e.answer_ids) + 1) // block) * block for e in examples) / len(examples)


def _clock(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
