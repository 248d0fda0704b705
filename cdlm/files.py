"""How a file gets its place on disk, whether it is still what was put there, and who may write in a folder.

Knows names, bytes, checksums and locks; knows no artifact and what stands in it.

A file is written under another name beside its place, brought to the disk (fsync), and renamed into it: whatever happens, a reader sees
the old file or the new one, whole. Checksums stand in files that `sha256sum -c` reads: SHA256SUMS for a folder, NAME.sha256 for what
belongs together under a name; the last line of each, which `sha256sum -c` takes for a remark, is the checksum of the lines above. They are
written before the last of the files that they speak of, the one that says that the work is done.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

SUMS = "SHA256SUMS"
LOCK = ".lock"
LINE = re.compile(r"([0-9a-f]{64})  (.+)")
END = "# sha256 of the lines above: "  # of a file of checksums: what is cut off or changed in it is found
OLDER = "or of an older version"  # so ends what is said of a file of checksums without that line
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
    except (NotWritten, NotRead):
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


def append_text(path: Path, text: str) -> None:
    """Lines behind those of a file, brought to the disk. A kill may leave a part of them: their reader must tell."""
    new = not path.exists()
    with names_path(path):
        with path.open("a", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        if new:
            _sync(path.parent)


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
    partial, old = partial_of(folder), _old_of(folder)
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
            if os.path.lexists(folder):  # a link that leads nowhere, too
                os.replace(folder, old)
            try:
                os.replace(partial, folder)
            except BaseException:
                if os.path.lexists(old):
                    os.replace(old, folder)
                raise
            _sync(folder.parent)
            _remove(old)
    finally:
        with contextlib.suppress(OSError):
            _remove(partial)


def _old_of(folder: Path) -> Path:
    """Where the folder before stands while a new one takes its place."""
    return folder.with_name(f".{folder.name}.old")


def remove_halves(folder: Path) -> None:
    """What a run that was killed in `replacing_folder` left beside the folder's place."""
    for path in (partial_of(folder), _old_of(folder)):
        with names_path(path):
            _remove(path)


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """`replacing_folder` for a place where nothing may stand yet; a ValueError where something does."""
    if os.path.lexists(folder):
        raise ValueError(f"{folder} is there already; name a folder that does not exist yet")
    with replacing_folder(folder) as partial:
        yield partial


@contextlib.contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """An empty folder that goes again when the body ends; what a run that was killed left of it goes first."""
    with names_path(folder):
        _remove(folder)
        folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):
            _remove(folder)


# ---- checksums -------------------------------------------------------------------------------------------------------


class NotRead(OSError):
    """A file can't be read, which says nothing of what stands in it; the message names it and says why."""


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """An error of reading is one that names `path`. That it is not there stays what it is."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise NotRead(f"{path} can't be read: {error.strerror or error}") from error


def is_there(path: Path) -> bool:
    """Whether a file stands there; a NotRead where that can't be found out (`Path.is_file` may take it for missing)."""
    try:
        with _reading(path):
            return stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def sha256(content: Path | bytes) -> str:
    """Of a file, read once in pieces, or of bytes. A NotRead that names a file which can't be read."""
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest()
    with _reading(content), content.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def inside(name: str) -> bool:
    """Whether a name stays within the folder that it is read in: relative, without '..'."""
    return bool(name) and not name.startswith(("/", "\\")) and ".." not in re.split(r"[/\\]", name) and "\0" not in name


def write_sums(file: Path, found: Mapping[str, Path | bytes | str]) -> None:
    """Checksums of files under their names relative to the folder of `file`, and one of these lines. found: name -> where it stands, its
    bytes, or its checksum. A ValueError for a name that `read_sums` would refuse."""
    for name in found:
        if not _can_be_listed(name):
            raise ValueError(
                f"{file.parent} holds a file of the name {name!r}, which can't stand in a file of checksums (a line break, a part '..', or "
                "no UTF-8): rename it"
            )
    lines = "".join(f"{one if isinstance(one, str) else sha256(one)}  {name}\n" for name, one in sorted(found.items()))
    write_text(file, f"{lines}{END}{sha256(lines.encode())}\n")


def _can_be_listed(name: str) -> bool:
    """Whether a line with this name is read as it was written."""
    return inside(name) and "\n" not in name and "\r" not in name and name == name.encode("utf-8", "replace").decode()


def read_sums(file: Path, *, elsewhere: bool = False) -> dict[str, str]:
    """Name -> checksum; a ValueError that names the line which is none, which names a file outside the folder or names one again, or that
    says that the lines are not those that were written; a NotRead where the file can't be read. elsewhere: it may be of another program,
    without a checksum of its lines."""
    found: dict[str, str] = {}
    try:
        with _reading(file), file.open(encoding="utf-8", newline="") as stream:
            lines = stream.read().split("\n")
    except UnicodeDecodeError:
        raise ValueError(f"{file} is damaged: it is not UTF-8") from None
    if len(lines) < 2 or lines[-1] != "":
        raise ValueError(f"{file} is damaged: it is {'empty' if lines == [''] else 'cut off'}")
    ended = lines[-2].startswith(END)
    stated = lines[: -2 if ended else -1]
    for number, line in enumerate(stated, start=1):
        match = LINE.fullmatch(line)
        if match is None:
            raise ValueError(f"{file} is damaged: line {number} is no checksum of a file")
        if not inside(match[2]):
            raise ValueError(f"{file}, line {number} names {match[2]!r}; it must be a file in {file.parent}")
        if match[2] in found:
            raise ValueError(f"{file} is damaged: line {number} names {match[2]} again")
        found[match[2]] = match[1]
    if not ended and not elsewhere:
        raise ValueError(f"{file} is damaged: it is cut off behind line {len(stated)}, {OLDER}: no checksum of its lines ends it")
    if ended and lines[-2] != END + sha256("".join(f"{line}\n" for line in stated).encode()):
        raise ValueError(f"{file} is damaged: its lines are not those that were written")
    return found


def faults(file: Path, ending: str = "", *, elsewhere: bool = False) -> dict[str, str]:
    """What is wrong with the files that a file of checksums names: path -> why, "missing ..." or that it is not what was written.

    ending: look only at files of such names. A file of checksums that is missing or holds something else is what is wrong then. Everything
    is read once; a NotRead names what can't be read, for that is no proof of damage. elsewhere: see `read_sums`.
    """
    try:
        stated = read_sums(file, elsewhere=elsewhere)
    except FileNotFoundError:
        return {str(file): "missing"}
    except ValueError as error:
        return {str(file): str(error).removeprefix(f"{file} is ")}
    wrong = {}
    for name, digest in stated.items():
        path = file.parent / name
        if not name.endswith(ending):
            continue
        if not is_there(path):
            wrong[str(path)] = f"missing, though {file.name} names it"  # it may be the checksums that are damaged
        elif (now := sha256(path)) != digest:
            wrong[str(path)] = _differs(now, digest, file)
    return wrong


def _differs(now: str, stated: str, file: Path) -> str:
    """Two checksums in words: twelve digits, or as many as tell them apart, for it may be the checksum that is damaged."""
    shown = next(digits for digits in range(12, 65) if now[:digits] != stated[:digits])
    return f"not what was written: its sha256 is {now[:shown]}..., {file.name} says {stated[:shown]}..."


def require_as_written(path: Path, sums: Path, what: str | Path) -> None:
    """A ValueError if a file is not what its file of checksums says; where that says nothing of it, nothing is known. what: that which its
    stage makes again."""
    stated = {}
    with contextlib.suppress(ValueError, FileNotFoundError):
        stated = read_sums(sums)
    digest = stated.get(path.name) if path.parent == sums.parent else None
    if digest is not None and digest != (now := sha256(path)):
        raise ValueError(f"{path} is {_differs(now, digest, sums)}. {remedy(what, sums)}")


def seal(folder: Path) -> None:
    """SHA256SUMS of every file in a folder, the checksums of a folder in it too; those that are their owner's to change aside."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in EDITABLE)
    names = {path.relative_to(folder).as_posix(): path for path in paths}
    write_sums(folder / SUMS, {name: path for name, path in names.items() if name not in (SUMS, LOCK)})


def require_sound_weights(folder: Path) -> None:
    """A ValueError if a safetensors file of a model's folder is not what its checksums say; a folder may have none, as one from elsewhere.
    Its other files may be changed by their owner, and its checksums be of another program, if they name all weights."""
    sums = folder / SUMS
    if sums.is_file():
        wrong = faults(sums, ".safetensors", elsewhere=True)
        if not wrong and not all(path.name in read_sums(sums, elsewhere=True) for path in folder.glob("*.safetensors")):
            wrong = faults(sums, ".safetensors")  # by their last line they may be our own, or are cut off
        for path, why in wrong.items():
            raise ValueError(f"{path} is {why}; export it again, or, if you changed it, take it for good with cdlm verify {folder} --seal")


AGAIN = "to make it again"


def require_sound(file: Path, what: str | Path, then: str = AGAIN) -> None:
    """A ValueError that names the first file that is not what was written, or that there are no checksums. what: the folder's content, or
    what else can be removed; then: what for."""
    if not is_there(file):
        raise ValueError(
            f"{what} has no checksums ({file} is missing), so it can't be told from a damaged one: remove it {then}, or, if you trust it, "
            f"write them with cdlm verify {file.parent} --seal"
        )
    for path, why in faults(file).items():
        raise ValueError(f"{path} is {why}. {remedy(what, file, then)}")


def remedy(what: str | Path, file: Path, then: str = AGAIN) -> str:
    """What can be done about a file that is not what its file of checksums says; arguments as of `require_sound`."""
    return f"Remove {what} {then}, or, if you changed it, take it for good with cdlm verify {file.parent} --seal"


# ---- one writer ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Be the only run in a folder, or a ValueError that names the other one. The lock is the kernel's: it ends with the process."""
    with _held(folder / LOCK, folder):
        yield


def holds_lock(folder: Path) -> bool:
    """Whether there is a lock file of `locked` in a folder: of a run at work, or of one that was killed. A file of another's is none."""
    path = folder / LOCK
    return is_there(path) and path.read_bytes()[:8] in (b"", b"process ")


@contextlib.contextmanager
def locked_place(path: Path) -> Iterator[None]:
    """Be the only one that writes a file or folder, which need not be there yet: the lock stands beside its place. Folders on the way to it
    are made, and go again where nothing was written in them."""
    made = [folder for folder in path.absolute().parents if not folder.exists()]
    with names_path(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with _held(path.with_name(f".{path.name}{LOCK}"), path):
            yield
    finally:
        for folder in made:
            with contextlib.suppress(OSError):
                folder.rmdir()


@contextlib.contextmanager
def _held(path: Path, what: Path) -> Iterator[None]:
    """Hold the lock file at `path`, which stands for `what`."""
    with names_path(path):
        number = _take(path, what)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        os.close(number)


def _take(path: Path, what: Path) -> int:
    """The open file that holds the lock."""
    while True:
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            other = os.read(number, 200).decode("utf-8", "replace").strip() or "another process"
            os.close(number)
            raise ValueError(f"{what} is in use by {other}: wait for it, stop it, or write to another place") from None
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
