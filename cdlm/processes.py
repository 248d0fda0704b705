"""Which of several processes this is, what they share, and what they tell each other. `accelerate launch` (or torchrun) starts them, on one
machine or on several; accelerate's PartialState makes the process group. What the launcher asks for and can't be had is refused here.

Knows no stage: who does what of a stage stands in the stage. All processes must see the same folders.
"""

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

T = TypeVar("T")
PATIENCE = timedelta(days=7)  # a process may wait for one that measures or writes; one that dies is the launcher's to see


class Refused(ValueError):
    """What another process has refused, and says."""


@dataclass(frozen=True)
class Processes:
    """One of `count` processes, the one with number `rank`. The default is a process that is alone."""

    rank: int = 0
    count: int = 1

    @property
    def main(self) -> bool:
        """Whether this is the process that writes what there is one of, and speaks."""
        return self.rank == 0

    def share(self, items: Sequence[T]) -> list[T]:
        """This process's part of the items; the parts of all processes are disjoint and make up all of them."""
        return list(items[self.rank :: self.count])

    def wait(self) -> None:
        """Go on when all processes are here."""
        if self.count > 1:
            import torch.distributed

            torch.distributed.barrier()

    def gather(self, items: list[T]) -> list[T]:
        """The items of all processes, in the processes' order; the same list in every process."""
        if self.count == 1:
            return items
        from accelerate.utils import gather_object

        return gather_object(items)

    @contextlib.contextmanager
    def main_first(self) -> Iterator[None]:
        """The main process does what is inside, then all others do: what it fetches is there for them, and what it refuses is `Refused` in
        them, which would else wait for it for ever."""
        if not self.main and (words := self.gather([""])[0]):
            raise Refused(words)
        try:
            yield
        except Exception as error:
            if self.main:
                self.gather([str(error) or type(error).__name__])
            raise
        if self.main:
            self.gather([""])

    def agreed(self, ask: Callable[[], T]) -> T:
        """What the main process answers, in all of them, when all have asked. What one of them refuses all refuse: the first to do so with
        its error, the others with `Refused`."""
        if self.count == 1:
            return ask()
        answers: list[T] = []
        error = None
        try:
            answers.append(ask())
        except Exception as refused:  # the others are waiting for an answer, whatever it was
            error = refused
        told = self.gather([(answers, "" if error is None else str(error) or type(error).__name__)])
        refused_by = [rank for rank, (_, words) in enumerate(told) if words]
        if refused_by and refused_by[0] != self.rank:
            raise Refused(told[refused_by[0]][1])
        if error is not None:
            raise error
        return told[0][0][0]


def deal_rows(batch_size: int, accumulation: int, processes: int) -> tuple[int, int]:
    """Rows of a forward and forwards of a step for each of some processes, which share the rows of one process' step.

    Forwards are dealt out whole where that is possible: then every process takes some of the very batches of one process. Else each of
    those is split into equal parts, the largest that fit, so that rows that stand together stay so.
    """
    rows = batch_size * accumulation
    if rows % processes:
        raise ValueError(
            f"a step has train.batch_size {batch_size} x train.accumulation {accumulation} = {rows} rows, which {processes} processes "
            f"can't share evenly; numbers that can: {', '.join(str(n) for n in range(1, rows + 1) if rows % n == 0)}"
        )
    each = rows // processes
    size = math.gcd(batch_size, each)
    return size, each // size


ALONE = Processes()


def launched() -> int:
    """How many processes the launcher started, of which this is one; 1 when there is no launcher."""
    return _whole("WORLD_SIZE", "1", 1)


def _whole(variable: str, default: str, least: int) -> int:
    """A number that the launcher puts into the environment; a ValueError where it is none."""
    value = os.environ.get(variable, default)
    if not (value.isascii() and value.isdigit() and least <= int(value[:10]) < 2**31):
        raise ValueError(f"{variable} is {value[:80]!r}; a launcher sets it to a whole number of at least {least}: unset it")
    return int(value)


def check_launcher() -> None:
    """A ValueError where what the launcher says of the processes is no number."""
    for variable, least in {"WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "RANK": 0}.items():
        _whole(variable, str(least), least)


def first() -> bool:
    """Whether this is the first of the processes that were launched, which does what is not shared, and says what all would say."""
    return launched() == 1 or _whole("RANK", "0", 0) == 0


def check_device(name: str) -> None:
    """A device that torch knows and this machine has, for each of the processes that were launched on it, or a ValueError. Nothing is
    allocated on a GPU: every process would hold memory of the first one for it."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        device = torch.device(name)
        if device.type == "cuda":
            if count <= (device.index or 0):
                raise RuntimeError
        elif device.type == "meta":
            raise RuntimeError
        else:
            torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError, AttributeError):  # also of devices whose package is not there
        raise _error(f"device is {name!r}; this machine has no such device, cpu is always there") from None
    here = _whole("LOCAL_WORLD_SIZE", str(launched()), 1)  # processes on this machine
    if device.type == "cuda" and here > 1:
        wrong = ""
        if device.index is not None:
            wrong = f"device is {name!r}, one GPU for the {here} processes of this machine; each takes one of its own: device cuda"
        elif here > count:
            wrong = f"{here} processes were launched on this machine, which has {count} GPUs; each needs one of its own"
        if wrong:
            raise _error(wrong)


def _asks(variable: str) -> bool:
    """Whether the launcher asks for an engine, by its variable."""
    return os.environ.get(variable, "false").lower() == "true"


def check_checkpoints(kind: str | None = None) -> None:
    """A ValueError for FSDP's checkpoints in shares: they come with a pickle, which training does not read. kind: the type of its state
    dicts; None for what the launcher asks, if it asks for FSDP."""
    if kind is None and _asks("ACCELERATE_USE_FSDP"):
        kind = os.environ.get("FSDP_STATE_DICT_TYPE", "SHARDED_STATE_DICT")  # accelerate's default under FSDP2
    if kind not in (None, "FULL_STATE_DICT"):
        raise _error(f"fsdp_state_dict_type is {kind}; it must be FULL_STATE_DICT: others keep a pickle, which is never read")


def check_engine(device: str, *, shares_layers: bool, engine: str | None = None) -> None:
    """A ValueError where the launcher asks for an engine that shards, and can't train: accelerate does not run it on this device, or parts
    of the model share their layers (shares_layers). engine: what accelerate made of it; None before it did, when it is known
    that it has none for CPUs."""
    for name, variable in {"FSDP": "ACCELERATE_USE_FSDP", "DeepSpeed": "ACCELERATE_USE_DEEPSPEED"}.items():
        if not _asks(variable):
            continue
        before = device == "cpu" and "ACCELERATE_TORCH_DEVICE" not in os.environ
        if before if engine is None else engine != name.lower():
            raise ValueError(f"accelerate was asked for {name}, which it does not run on this device ({device}); take DDP")
        if shares_layers:
            raise ValueError(
                f"accelerate was asked for {name}, which shards layers; this model's encoder and decoder share theirs, and a batch decides "
                "how many forwards there are: take DDP"
            )


def _error(words: str) -> ValueError:
    """Of what all processes that were launched refuse alike: the first one says it."""
    return ValueError(words) if first() else Refused(words)


def start(device: str) -> Processes:
    """Join the processes that were launched with this one, if any. device: what the recipe runs on; on GPUs each process of a machine gets
    one of its own, which is "cuda" from then on."""
    if launched() == 1:
        return ALONE
    try:
        from accelerate import PartialState
    except ImportError:
        raise ValueError("WORLD_SIZE is above 1; several processes need accelerate: pip install 'cdlm[train]'") from None
    options: dict[str, Any] = {"timeout": PATIENCE}
    state = PartialState(cpu=device == "cpu", **options)
    if state.num_processes != launched():
        raise ValueError(f"{launched()} processes were launched on device {device!r}, {state.num_processes} found each other")
    return Processes(state.process_index, state.num_processes)
