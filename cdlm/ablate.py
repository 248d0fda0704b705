"""The loss ablation of the paper (CDLM, arXiv 2511.19269, table of loss weights): the same student, trained with some losses off."""

import json
from dataclasses import replace
from functools import partial
from typing import Any

from cdlm import files, runs, stages
from cdlm.runs import Run

VARIANTS = {
    "distillation only": ("distill_weight",),
    "consistency only": ("consistency_weight",),
    "distillation and consistency": ("distill_weight", "consistency_weight"),
    "all three": ("distill_weight", "consistency_weight", "dlm_weight"),
}
WEIGHTS = ("distill_weight", "consistency_weight", "dlm_weight")


def variant(run: Run, name: str) -> Run:
    """The run with only the losses of this variant, in its own folder, on the same trajectories. A loss that the recipe has at
    weight 0 is one that the recipe does not use; "all three" then needs a weight for it."""
    train = run.recipe.train
    off: dict[str, Any] = {weight: 0.0 for weight in WEIGHTS if weight not in VARIANTS[name]}
    recipe = replace(run.recipe, train=replace(train, **off), evaluate=replace(run.recipe.evaluate, methods=["student"]))
    out = run.out / "ablation" / name.replace(" ", "-")
    return Run(recipe, out, run.say, shared_trajectories=run.trajectories, processes=run.processes)


def check(base: Run) -> None:
    """A ValueError if the recipe has not all three losses to switch off."""
    if base.recipe.train.objective != "cdlm":
        raise ValueError(f"ablate takes a recipe with train.objective cdlm; this one has {base.recipe.train.objective}")
    missing = [weight for weight in WEIGHTS if not getattr(base.recipe.train, weight)]
    if missing:
        raise ValueError(f"train.{missing[0]} is 0: the ablation has no weight to give it; set one with --set train.{missing[0]}=...")


def run(base: Run) -> str:
    """Train and measure every variant that is not there yet; the table, as markdown, also in <out>/ablation/ablation.md."""
    check(base)
    with base.processes.main_first():
        base.check_inputs()
    for name in VARIANTS:
        for stage in ("train", "evaluate"):
            base.processes.agreed(partial(stages.check_places, variant(base, name), stage))
        base.processes.agreed(partial(stages.check_training, variant(base, name)))
    base.out.mkdir(parents=True, exist_ok=True)
    if base.recipe.trajectories is None:
        _make(base, "collect")
    lines = ["| losses | weights (distill, consistency, dlm) | accuracy | steps | TPF |", "|---|---|---:|---:|---:|"]
    for name in VARIANTS:
        part = variant(base, name)
        part.sound |= base.sound & {"collect"}
        part.out.mkdir(parents=True, exist_ok=True)
        if part.processes.main:
            stages.remove_leftovers(part)
        _make(part, "train", f"ablate: {name}, train")
        if part.processes.main:
            stages.remove_checkpoints(part)
        _make(part, "evaluate", f"ablate: {name}, evaluate")
        found = json.loads((part.out / "report.json").read_text())["summary"]
        weights = ", ".join(f"{getattr(part.recipe.train, w):g}" for w in WEIGHTS)
        numbers = f"{found['student_accuracy']:.1%} | {found['student_steps_at_threshold']:.2f} | {found['tpf']:.2f}"
        lines.append(f"| {name} | {weights} | {numbers} |")
    text = "\n".join(lines)
    if base.processes.main:
        files.write_text(base.out / "ablation" / "ablation.md", text + "\n")
    return text


def _make(run: Run, stage: str, title: str = "") -> None:
    """Run a stage that is not done; all processes have looked before the first of them writes, and do what the main one saw."""
    if run.processes.agreed(partial(runs.is_done, run, stage)):
        return
    if title:
        run.say(title)
    getattr(stages, stage)(run)
