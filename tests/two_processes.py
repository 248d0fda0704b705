"""What tests/test_processes.py has accelerate launch start twice: two_processes.py RECIPE OUT. It leaves runs, and asserts nothing.

OUT/ddp is a whole run. OUT/broken is stopped at step 10 of 20, OUT/resumed goes on from a checkpoint that stands there already, and
OUT/fsdp is trained on the trajectories of OUT/ddp with weights sharded by FSDP2.
"""

import os
import sys
from pathlib import Path

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from transformers import TrainerCallback

from cdlm import cli, losses, processes, recipe, stages

STOP, VOCAB = 10, 58
# What accelerate launch makes of recipes/accelerate/fsdp2.yaml.
FSDP2 = {
    "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    "FSDP_OFFLOAD_PARAMS": "false", "FSDP_ACTIVATION_CHECKPOINTING": "false",
}  # fmt: skip


class Stopped(Exception):
    """Of a run that is broken off on purpose."""


def stop(trainer):
    """A callback that breaks training off after step STOP, whose checkpoint is then there."""

    class Stop(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == STOP:
                raise Stopped

    return Stop()


def silent(text: str) -> None:
    """In place of print."""


def broken(asked: recipe.Recipe, out: Path, trajectories: Path, group: processes.Processes = processes.ALONE) -> None:
    """Train up to step STOP and leave the checkpoint."""
    try:
        stages.train(stages.Run(asked, out, silent, shared_trajectories=trajectories, processes=group), watch=stop)
    except Stopped:
        return
    raise AssertionError("training was not broken off")


def as_on_gpus() -> None:
    """accelerate shards nothing on CPUs; let it take these for GPUs, whose process group is gloo's and whose device is the CPU."""
    os.environ |= FSDP2 | {"ACCELERATE_TORCH_DEVICE": "cpu"}
    PartialState._prepare_backend = lambda *args: ("gloo", DistributedType.MULTI_GPU)


def main() -> None:
    torch.set_num_threads(1)
    file, out = Path(sys.argv[1]), Path(sys.argv[2])
    code = cli.main(["distill", str(file), "--out", str(out / "ddp")])
    if code:
        sys.exit(code)
    group, asked, stored = processes.start("cpu"), recipe.load(file), out / "ddp" / "trajectories"
    losses.CHUNK_VALUES = 4 * VOCAB  # from here on every loss is taken in several chunks, computed again in the backward
    broken(asked, out / "broken", stored, group)
    stages.train(stages.Run(asked, out / "resumed", silent, shared_trajectories=stored, processes=group))
    as_on_gpus()
    stages.train(stages.Run(asked, out / "fsdp", silent, shared_trajectories=stored, processes=group))


if __name__ == "__main__":
    main()
