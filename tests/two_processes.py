"""What tests/test_processes.py has accelerate launch start twice: two_processes.py RECIPE OUT. It leaves runs, and asserts nothing.

OUT/ddp is a whole run. OUT/broken is stopped at step 9 of 20, OUT/resumed goes on from a checkpoint that stands there already. With
weights sharded by FSDP2 on the same trajectories: OUT/fsdp is stopped at step 9 and goes on, OUT/gathered is its copy from between, and
OUT/sharded goes on from a checkpoint of whole weights that stands there already, and so does OUT/lora, of lora.yaml beside the
recipe, which is stopped at its step 4. OUT/canvases.json has the losses of the objectives on canvases under DDP. OUT/ddp-NAME and
OUT/fsdp-NAME are the students of UNDER, of NAME.yaml.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import dgemma
import test_canvases
import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from transformers import TrainerCallback

from cdlm import cli, losses, processes, recipe, runs, stages
from cdlm.trainer import CanvasNoise, CanvasStates

STOP, VOCAB = 9, 58
UNDER = {"ddp": ("mdlm", "checkpointed", "bf16"), "fsdp": ("checkpointed", "bf16")}
# What accelerate launch makes of recipes/accelerate/fsdp2.yaml.
FSDP2 = {
    "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    "FSDP_OFFLOAD_PARAMS": "false", "FSDP_ACTIVATION_CHECKPOINTING": "false",
}  # fmt: skip


class Stopped(Exception):
    """Of a run that is broken off on purpose."""


class Stop(TrainerCallback):
    """Breaks training off after a step, whose checkpoint is then there."""

    def __init__(self, step: int):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise Stopped


def silent(text: str) -> None:
    """In place of print."""


def broken(
    asked: recipe.Recipe, out: Path, trajectories: Path, group: processes.Processes = processes.ALONE, step: int = STOP
) -> None:
    """Train up to a step and leave its checkpoint."""
    run = runs.Run(asked, out, silent, shared_trajectories=trajectories, processes=group)
    try:
        stages.train(run, watch=lambda trainer: Stop(step))
    except Stopped:
        return
    raise AssertionError("training was not broken off")


def on_canvases(out: Path, group: processes.Processes = processes.ALONE) -> dict[str, list[dict]]:
    """Logged losses of three steps of four rows in batches of two: of objective uniform, and of cdlm on the states of random canvases."""
    examples, found = test_canvases.examples(4), {}
    states = [test_canvases.by_hand(dgemma.random_model(), example, top_k=16) for example in examples]
    for objective in ("uniform", "cdlm"):
        model = dgemma.random_model()
        if objective == "uniform":
            rows = CanvasNoise(examples * 2, test_canvases.BUDGET, seed=0)
        else:
            rows = CanvasStates(states * 2, model, test_canvases.BUDGET, test_canvases.CANVAS, 0)
        trainer = test_canvases.trainer(
            out / objective, model, rows, objective=objective, gradient_accumulation_steps=2 // group.count, max_steps=3,
        )  # fmt: skip
        trainer.train()
        found[objective] = [line for line in trainer.state.log_history if "train_loss" not in line]
    return found


def as_on_gpus() -> None:
    """accelerate shards nothing on CPUs; let it take these for GPUs, whose process group is gloo's and whose device is the CPU."""
    os.environ |= FSDP2 | {"ACCELERATE_TORCH_DEVICE": "cpu"}
    PartialState._prepare_backend = lambda *args: ("gloo", DistributedType.MULTI_GPU)


def main() -> None:
    torch.set_num_threads(1)
    file, out = map(Path, sys.argv[1:])

    def students(engine: str) -> None:
        for name in UNDER[engine]:
            other = recipe.load(file.parent / f"{name}.yaml")
            stages.train(runs.Run(other, out / f"{engine}-{name}", silent, shared_trajectories=stored, processes=group))

    code = cli.main(["distill", str(file), "--out", str(out / "ddp")])
    if code:
        sys.exit(code)
    group, asked, stored = processes.start("cpu"), recipe.load(file), out / "ddp" / "trajectories"
    losses.CHUNK_VALUES = 4 * VOCAB  # from here on every loss is taken in several chunks, computed again in the backward
    broken(asked, out / "broken", stored, group)
    stages.train(runs.Run(asked, out / "resumed", silent, shared_trajectories=stored, processes=group))
    students("ddp")
    canvases = on_canvases(out / "canvases", group)
    if group.main:
        (out / "canvases.json").write_text(json.dumps(canvases))
    as_on_gpus()
    broken(asked, out / "fsdp", stored, group)
    if group.main:
        shutil.copytree(out / "fsdp", out / "gathered")
    group.wait()
    for name in ("fsdp", "sharded"):
        stages.train(runs.Run(asked, out / name, silent, shared_trajectories=stored, processes=group))
    broken(recipe.load(file.parent / "lora.yaml"), out / "lora", stored, group, 4)
    students("fsdp")


if __name__ == "__main__":
    main()
