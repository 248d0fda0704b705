"""How a file gets its place on disk, whether it is still what was put there, and who may write in a folder.

Knows names, bytes, checksums and locks; knows no artifact and what stands in it.

A file is written under another name beside its place, brought to the disk (fsync), and renamed into it: whatever happens, a reader sees
the old file or the new one, whole. Checksums stand in files that `sha256sum -c` reads: SHA256SUMS for a folder, NAME.sha256 for what
belongs together under a name. They are written before the last of the files that they speak of, the one that says that the work is done.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

SUMS = "SHA256SUMS"
LOCK = ".lock"
LINE = re.compile(r"([0-9a-f]{64})  (.+)")
EDITABLE = ("README.md",)  # a model card is its owner's to change


# ---- writing ---------------------------------------------------------------------------------------------------------


def partial_of(path: Path) -> Path:
    """Where a file or folder stands until it is whole."""
    return path.with_name(f".{path.name}.partial")


def _sync(path: Path) -> None:
    """Bring a file's bytes, or a folder's names, to the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def sync_all(folder: Path) -> None:
    """Everything in a folder, the folder itself last."""
    for path in sorted(folder.rglob("*"), reverse=True):
        _sync(path)
    _sync(folder)


def _remove(path: Path) -> None:
    """A file, a link or a whole folder, where there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


class NotWritten(OSError):
    """A file or folder can't be written; the message names it and says why."""


@contextlib.contextmanager
def names_path(path: Path) -> Iterator[None]:
    """An error of writing, from whatever library, is one that names `path` and says why. One that names a file elsewhere stays."""
    try:
        yield
    except NotWritten:
        raise
    except Exception as error:
        if not isinstance(error, OSError | SafetensorError) and type(error) is not Exception:  # what the library tokenizers raises
            raise
        named = getattr(error, "filename", None)
        if isinstance(named, str | os.PathLike) and not Path(named).is_relative_to(path.parent):
            raise
        reason = error.strerror if isinstance(error, OSError) and error.strerror else " ".join(str(error).split())
        raise NotWritten(f"{path} can't be written: {reason}") from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A place to write to; what stands there when the body ends takes the place of `path`. After an error nothing has changed."""
    partial = partial_of(path)
    try:
        with names_path(path):
            partial.unlink(missing_ok=True)  # of a run that was killed, or a link that leads elsewhere
            yield partial
            _sync(partial)
            os.replace(partial, path)
            _sync(path.parent)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """A whole file of text, in UTF-8."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def json_text(value: Any) -> str:
    """JSON as notes and manifests are written: indented, keys in order."""
    return json.dumps(value, indent=2, sort_keys=True) + "\n"


def write_json(path: Path, value: dict[str, Any]) -> None:
    """A whole JSON file."""
    write_text(path, json_text(value))


@contextlib.contextmanager
def replacing_folder(folder: Path, before: Iterable[Path] = ()) -> Iterator[Path]:
    """An empty folder to write to; when the body ends it takes the place of `folder`, with checksums of all that is in it.

    before: files and folders that speak of the old one; they go when the new one is whole, just before it is put in place.
    """
    partial, old = partial_of(folder), folder.with_name(f".{folder.name}.old")
    with names_path(folder):
        _remove(partial)
        partial.mkdir(parents=True)
    try:
        with names_path(folder):
            yield partial
            seal(partial)
            sync_all(partial)
            for stale in (old, *before):
                _remove(stale)
            if folder.exists():
                os.replace(folder, old)
            try:
                os.replace(partial, folder)
            except BaseException:
                if old.exists():
                    os.replace(old, folder)
                raise
            _sync(folder.parent)
            _remove(old)
    finally:
        with contextlib.suppress(OSError):
            _remove(partial)


# ---- checksums -------------------------------------------------------------------------------------------------------


def sha256(content: Path | bytes) -> str:
    """Of a file, read once in pieces, or of bytes."""
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest()
    with content.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def inside(name: str) -> bool:
    """Whether a name stays within the folder that it is read in: relative, without '..'."""
    return bool(name) and not name.startswith(("/", "\\")) and ".." not in re.split(r"[/\\]", name) and "\0" not in name


def write_sums(file: Path, found: Mapping[str, Path | bytes | str]) -> None:
    """Checksums of files under their names relative to the folder of `file`. found: name -> where it stands, its bytes, or its checksum."""
    lines = (f"{one if isinstance(one, str) else sha256(one)}  {name}\n" for name, one in sorted(found.items()))
    write_text(file, "".join(lines))


def read_sums(file: Path) -> dict[str, str]:
    """Name -> checksum; a ValueError that names the line which is none, or which names a file outside the folder."""
    found = {}
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError:
        raise ValueError(f"{file} is damaged: it is not UTF-8") from None
    if len(lines) < 2 or lines[-1] != "":
        raise ValueError(f"{file} is damaged: it is {'empty' if lines == [''] else 'cut off'}")
    for number, line in enumerate(lines[:-1], start=1):
        match = LINE.fullmatch(line)
        if match is None:
            raise ValueError(f"{file} is damaged: line {number} is no checksum of a file")
        if not inside(match[2]):
            raise ValueError(f"{file}, line {number} names {match[2]!r}; it must be a file in {file.parent}")
        found[match[2]] = match[1]
    return found


def faults(file: Path, ending: str = "") -> dict[str, str]:
    """What is wrong with the files that a file of checksums names: path -> why, "missing" or that it is not what was written.

    ending: look only at files of such names. A file of checksums that can't be read is what is wrong then. Everything is read once.
    """
    try:
        stated = read_sums(file)
    except (ValueError, OSError) as error:
        return {str(file): str(error).removeprefix(f"{file} is ")}
    wrong = {}
    for name, digest in stated.items():
        path = file.parent / name
        if not name.endswith(ending):
            continue
        if not path.is_file():
            wrong[str(path)] = "missing"
        elif (now := sha256(path)) != digest:
            wrong[str(path)] = _differs(now, digest, file)
    return wrong


def _differs(now: str, stated: str, file: Path) -> str:
    """Two checksums in words: twelve digits, or as many as tell them apart, for it may be the checksum that is damaged."""
    shown = next(digits for digits in range(12, 65) if now[:digits] != stated[:digits])
    return f"not what was written: its sha256 is {now[:shown]}..., {file.name} says {stated[:shown]}..."


def require_as_written(path: Path, sums: Path) -> None:
    """A ValueError if a file is not what its file of checksums says; where that says nothing of it, nothing is known."""
    stated = {}
    with contextlib.suppress(ValueError, OSError):
        stated = read_sums(sums)
    digest = stated.get(path.name) if path.parent == sums.parent else None
    if digest is not None and digest != (now := sha256(path)):
        raise ValueError(f"{path} is {_differs(now, digest, sums)}")


def seal(folder: Path) -> None:
    """SHA256SUMS of every file in a folder, those that are their owner's to change aside."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    names = {path.relative_to(folder).as_posix(): path for path in paths}
    write_sums(folder / SUMS, {name: path for name, path in names.items() if path.name not in (SUMS, *EDITABLE)})


def require_sound_weights(folder: Path) -> None:
    """A ValueError if a safetensors file of a model's folder is not what its checksums say; a folder may have none, as one from elsewhere.
    Its other files may be changed by their owner."""
    if (folder / SUMS).is_file():
        for path, why in faults(folder / SUMS, ".safetensors").items():
            raise ValueError(f"{path} is {why}; export it again, or, if you changed it, take it for good with cdlm verify {folder} --seal")


def require_sound(file: Path, what: str) -> None:
    """A ValueError that names the first file that is not what was written, or that there are no checksums. what: the folder's content."""
    if not file.is_file():
        raise ValueError(
            f"{what} has no checksums ({file} is missing), so it can't be told from a damaged one: remove it to make it again, or, if you "
            f"trust it, write them with cdlm verify {file.parent} --seal"
        )
    for path, why in faults(file).items():
        raise ValueError(
            f"{path} is {why}. Remove {path if why != 'missing' else what} to make it again, or, if you changed it, take it for good with "
            f"cdlm verify {file.parent} --seal"
        )


# ---- one writer ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Be the only run in a folder, or a ValueError that names the other one. The lock is the kernel's: it ends with the process."""
    path = folder / LOCK
    with names_path(path):
        number = _take(path)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        os.close(number)


def _take(path: Path) -> int:
    """The open file that holds the lock."""
    while True:
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            other = os.read(number, 200).decode("utf-8", "replace").strip() or "another process"
            os.close(number)
            raise ValueError(f"{path.parent} is in use by {other}: wait for it, stop it, or take another --out") from None
        except BaseException:
            os.close(number)
            raise
        if _is(number, path):
            os.truncate(number, 0)
            os.write(number, f"process {os.getpid()} on {socket.gethostname()}".encode())
            return number
        os.close(number)  # the run before removed this file between our open and our lock


def _is(number: int, path: Path) -> bool:
    """Whether an open file is the one that stands at `path`."""
    try:
        return os.path.samestat(os.fstat(number), path.stat())
    except FileNotFoundError:
        return False
