"""Checkpoints: which engine wrote one, which can go on from it, and how it is read. No pickle is run on the way."""

import contextlib
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

# What torch.save's RuntimeError says where a file can't be written (a full disk, no permission): its zip writer, C++ streams, plain writes.
WRITER_FAILED = ("inline_container.cc", "PytorchStreamWriter", "iostream error", "write(): fd")


@contextlib.contextmanager
def plain_state(checkpoint: str | None) -> Iterator[None]:
    """Optimizer, schedule and random state are read by torch's weights_only reader, which makes tensors and plain values and calls
    nothing. What it refuses becomes a ValueError."""
    try:
        yield
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL ([\w.]+)", str(error))  # torch's own words go on to say how to load it all the same
        what = f" (it names {named[1]})" if named else ""
        raise ValueError(
            f"{checkpoint} holds state that is more than tensors and plain values{what}: it could run code, and is not read"
        ) from None


def written_by(checkpoint: Path) -> str:
    """The engine that wrote a checkpoint: plain, fsdp or deepspeed."""
    if any(checkpoint.glob("pytorch_model_fsdp*")):
        return "fsdp"
    return "deepspeed" if any(checkpoint.glob("global_step*")) else "plain"


def check_engine(checkpoint: Path, engine: str) -> None:
    """A ValueError unless this engine can go on from a checkpoint.

    One process, DDP and FSDP go on from each other's, for theirs hold whole weights and the whole state of the optimizer (FSDP's if
    its state dict type is FULL_STATE_DICT). DeepSpeed goes on from none: its own are read by its own reader, which runs pickles.
    """
    written = written_by(checkpoint)
    if written == "deepspeed":
        raise ValueError(
            f"{checkpoint} was written by DeepSpeed, in pickles, which can run code and are not read: remove {checkpoint.parent} to train "
            "from the start, under an engine whose checkpoints are read: one process, DDP or FSDP"
        )
    if engine == "deepspeed":
        raise ValueError(f"{checkpoint} was not written by DeepSpeed, which can't go on from it: start as it was, or remove it")
    if written == "fsdp" and not (checkpoint / "pytorch_model_fsdp.bin").is_file():
        raise ValueError(
            f"{checkpoint} holds FSDP's shares, with a pickle beside them, which can run code and is not read: remove {checkpoint.parent} "
            "to train from the start, with fsdp_state_dict_type FULL_STATE_DICT"
        )


def read_whole(model: Any, checkpoint: Path) -> None:
    """The trained weights of a checkpoint, from safetensors, into a model that no engine has wrapped. A ValueError if any is missing."""
    found: dict[str, Tensor] = {}
    for file in sorted(checkpoint.glob("*model*.safetensors")):
        found |= load_file(file)
    if (checkpoint / "adapter_model.safetensors").is_file():
        from peft import set_peft_model_state_dict

        missing = set_peft_model_state_dict(model, found).missing_keys
    else:
        missing = model.load_state_dict(found, strict=False).missing_keys
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}  # tied ones once, by the name that is saved
    if lost := sorted(trained & {*missing}):
        raise ValueError(f"{checkpoint} has no weights for {len(lost)} parameters that are trained, {lost[0]} among them")


def renamed(state: dict[str, Any], names: dict[Any, Any]) -> dict[str, Any]:
    """An optimizer's state with other keys for the parameters."""
    groups = [{**group, "params": [names[key] for key in group["params"]]} for group in state["param_groups"]]
    return {"state": {names[key]: value for key, value in state["state"].items()}, "param_groups": groups}
