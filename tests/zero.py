"""What tests/test_deepspeed.py has accelerate launch start twice: zero.py RECIPE OUT [RECIPE OUT ...].

It makes the runs OUT, all stages, with training under ZeRO-3; it asserts nothing. accelerate gives DeepSpeed no CPUs, so it is told that
these are GPUs, whose process group is gloo's.
"""

import os
import sys
from pathlib import Path

import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_deepspeed_cmd_env
from two_processes import VOCAB

from cdlm import cli, losses, processes

CONFIG = Path(__file__).parent.parent / "recipes" / "accelerate" / "zero3.yaml"


def as_on_gpus() -> None:
    """What accelerate launch makes of the config, but for the precision: a CPU's bfloat16 is slow, and fp32 is compared here."""
    asked = ["--config_file", str(CONFIG), "--num_processes", "2", "--mixed_precision", "no", "-m", "cdlm.cli"]
    parsed, _, _ = _validate_launch_command(launch_command_parser().parse_args(asked))
    parsed.deepspeed_fields_from_accelerate_config = "zero_stage"  # which its launch_command adds
    _, environment = prepare_deepspeed_cmd_env(parsed)
    os.environ.update({name: value for name, value in environment.items() if name.startswith("ACCELERATE_")})
    os.environ |= {"ACCELERATE_TORCH_DEVICE": "cpu", "ACCELERATE_MIXED_PRECISION": "no", "DS_ACCELERATOR": "cpu"}
    PartialState._prepare_backend = lambda *args: ("gloo", DistributedType.MULTI_GPU)


def main() -> None:
    torch.set_num_threads(1)
    as_on_gpus()
    losses.CHUNK_VALUES = 4 * VOCAB  # processes have different numbers of chunks
    processes.start("cuda")  # with DeepSpeed's process group; commands find it there
    for file, out in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        if code := cli.main(["distill", file, "--out", out]):
            sys.exit(code)


if __name__ == "__main__":
    main()
