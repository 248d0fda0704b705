"""Weights under a family's own names, and back: safetensors files, key maps, and the native model that they fill.

A key map is a list of entries, one for each group of tensors that belong together: the same tensor under another name, one tensor
cut into several, or many stacked into one. Both directions move values without arithmetic, so a round trip is bit-identical.
Files are memory-mapped; a tensor is in memory when it is asked for, one entry at a time, and what was read is let go of again.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from cdlm import files as disk

Move = Callable[[list[Tensor]], list[Tensor]]
RELEASE = 32 * 2**20  # bytes read after which files are mapped anew, so that pages already copied leave memory


@dataclass(frozen=True)
class Entry:
    """Tensors of the native model and the family's tensors that hold the same values, with the way in both directions."""

    native: tuple[str, ...]
    family: tuple[str, ...]
    to_native: Move
    to_family: Move
    copies: bool = False  # whether to_native gives tensors of its own, so that what was read can be let go


def same(native: str, family: str | None = None) -> Entry:
    """One tensor under two names."""
    return Entry((native,), (family or native,), list, list)


def split(natives: Sequence[str], family: str, sizes: Sequence[int]) -> Entry:
    """One tensor of the family, cut along its first dimension."""
    return Entry(tuple(natives), (family,), lambda x: list(x[0].split(list(sizes))), lambda x: [torch.cat(x)])


def stack(native: str, parts: Sequence[Sequence[str]]) -> Entry:
    """Many tensors of the family as one: parts[e] are joined along their first dimension and become native[e].

    Tensors of one parts[e] have equal first dimensions.
    """
    width = len(parts[0])

    def to_native(x: list[Tensor]) -> list[Tensor]:
        rows = sum(part.shape[0] for part in x[:width])
        whole = x[0].new_empty(len(parts), rows, *x[0].shape[1:])
        for number, one in enumerate(whole):
            torch.cat(x[number * width : (number + 1) * width], out=one)
        return [whole]

    def to_family(x: list[Tensor]) -> list[Tensor]:
        return [part.clone() for one in x[0] for part in one.chunk(width)]

    return Entry((native,), tuple(name for group in parts for name in group), to_native, to_family, copies=True)


class Files:
    """The safetensors files of a folder, as one mapping from key to tensor."""

    def __init__(self, folder: Path):
        """A ValueError for pickle checkpoints, missing shards and files that can't be read."""
        self.folder = folder
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            try:
                where = dict(json.loads(index.read_text())["weight_map"])
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{index} has no weight_map that can be read") from None
            for name in where.values():
                if not isinstance(name, str) or not disk.inside(name):
                    raise ValueError(f"{index} names {name!r}; a shard is a file in {folder}")
            missing = sorted({name for name in where.values() if not (folder / name).is_file()})
            if missing:
                raise ValueError(f"{index} names {missing[0]}, which is not in {folder}; download the missing shard")
            names = sorted(set(where.values()))
        elif (folder / "model.safetensors").is_file():
            where, names = None, ["model.safetensors"]
        else:
            pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
            found = f" ({pickles[0]} is a pickle, which can run code when it is read; convert it to safetensors)" if pickles else ""
            raise ValueError(f"{folder} has no model.safetensors and no model.safetensors.index.json{found}")
        self.names: list[str] = names
        self._open: dict[str, Any] = {}
        self._read = 0
        self._where: dict[str, str] = {}
        for name in names:
            for key in self._file(name).keys():
                self._where[key] = name
        for key, name in (where or {}).items():
            if self._where.get(key) != name:
                raise ValueError(f"{index} says that {name} holds {key}; it does not")

    def _file(self, name: str) -> Any:
        """The open file, memory-mapped."""
        if name not in self._open:
            try:
                self._open[name] = safe_open(self.folder / name, framework="pt")
            except SafetensorError as error:
                raise ValueError(f"{self.folder / name} can't be read: {error}") from None
        return self._open[name]

    def release(self) -> None:
        """Called when the tensors given out so far have been copied: maps the files anew once RELEASE bytes were read."""
        if self._read > RELEASE:
            self._open.clear()
            self._read = 0

    def __contains__(self, key: str) -> bool:
        return key in self._where

    def keys(self) -> set[str]:
        return set(self._where)

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._file(self._where[key]).get_slice(key).get_shape())

    def file(self, key: str) -> Path:
        return self.folder / self._where[key]

    def get(self, key: str) -> Tensor:
        """The tensor, memory-mapped; a ValueError that names file and key if it can't be read or is not finite."""
        if key not in self._where:
            raise ValueError(f"{self.folder} has no tensor {key}")
        try:
            tensor = self._file(self._where[key]).get_tensor(key)
        except SafetensorError as error:
            raise ValueError(f"{self.file(key)}: {key} can't be read: {error}") from None
        self._read += tensor.numel() * tensor.element_size()
        if tensor.is_floating_point() and tensor.numel() and not bool(torch.stack(tensor.aminmax()).isfinite().all()):
            raise ValueError(f"{self.file(key)}: {key} holds NaN or infinity")
        return tensor


def check_keys(entries: Iterable[Entry], files: Files, ignored: Callable[[str], bool]) -> None:
    """Every tensor of the files is wanted and every wanted one is there, or a ValueError that names the first that is not."""
    wanted = {key for entry in entries for key in entry.family}
    missing, extra = sorted(wanted - files.keys()), sorted(key for key in files.keys() - wanted if not ignored(key))
    if missing:
        raise ValueError(f"{files.folder} has no tensor {missing[0]} ({len(missing)} are missing)")
    if extra:
        raise ValueError(f"{files.file(extra[0])}: the native class has no place for {extra[0]} ({len(extra)} such tensors)")


def check_shapes(entries: Iterable[Entry], files: Files, shapes: dict[str, torch.Size]) -> None:
    """Shapes of the tensors that are one tensor in both formats, from the files' headers; as in `native_tensors`, but nothing is read."""
    for entry in entries:
        if len(entry.native) == len(entry.family) == 1 and entry.to_native is list:
            there, wanted = files.shape(entry.family[0]), tuple(shapes[entry.native[0]])
            if there != wanted:
                where = f"{files.file(entry.family[0])}: {entry.family[0]}"
                raise ValueError(f"{where} has shape {there}; config.json says {wanted}")


def native_tensors(
    entries: Iterable[Entry], files: Files, shapes: dict[str, torch.Size], dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    """(native key, tensor), one after the other; a wrong shape is an error that names file, key and both shapes.

    Where some entries copy, all tensors are copies: one that still pointed into a mapped file would keep the whole file in memory.
    """
    held = list(entries)
    copying = any(entry.copies for entry in held)
    for entry in held:
        found = entry.to_native([files.get(key) for key in entry.family])
        for key, tensor in zip(entry.native, found, strict=True):
            if tensor.shape != shapes[key]:
                where = f"{files.file(entry.family[0])}: {entry.family[0]}"
                raise ValueError(f"{where} has shape {tuple(tensor.shape)} as {key}; config.json says {tuple(shapes[key])}")
            moved = tensor.to(dtype) if dtype is not None else tensor
            yield key, moved.clone() if copying and not entry.copies and moved is tensor else moved
        copied = copying or dtype not in (None, tensor.dtype)
        del found, tensor, moved
        if copied:
            files.release()


def write(folder: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int = 4 * 2**30) -> None:
    """Write tensors into model.safetensors, or into shards of about shard_bytes with an index; one shard is in memory at a time."""
    shards: list[dict[str, int]] = []
    held: dict[str, Tensor] = {}

    def flush() -> None:
        save_file({k: v.contiguous() for k, v in held.items()}, folder / f"part-{len(shards)}.partial", {"format": "pt"})
        shards.append({k: v.numel() * v.element_size() for k, v in held.items()})
        held.clear()

    for key, tensor in tensors:
        if held and sum(t.numel() * t.element_size() for t in [*held.values(), tensor]) > shard_bytes:
            flush()
        held[key] = tensor
    flush()
    if len(shards) == 1:
        (folder / "part-0.partial").replace(folder / "model.safetensors")
        return
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for i, name in enumerate(names):
        (folder / f"part-{i}.partial").replace(folder / name)
    index = {
        "metadata": {"total_size": sum(sum(shard.values()) for shard in shards)},
        "weight_map": {key: name for name, shard in zip(names, shards, strict=True) for key in shard},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
