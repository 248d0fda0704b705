"""`cdlm verify`: are the files of a run, of trajectories or of an exported model still what was written? See files.py for the checksums."""

from collections.abc import Iterator
from pathlib import Path

from cdlm import files, trajectories
from cdlm.evaluate import report

LOG_SUMS = "log.sha256"
NOTE_SUMS = {"export.request.json": "export.sha256", "push.request.json": "push.sha256"}
LAST = {  # the file that says that an artifact is finished -> the file with its checksums
    "manifest.json": files.SUMS, "request.json": files.SUMS, "config.json": files.SUMS, "adapter_config.json": files.SUMS,
    "report.json": report.SUMS, "log.jsonl": LOG_SUMS, "growth.json": "growth.sha256", "overhead.json": "overhead.sha256",
    **NOTE_SUMS,
}
SPEAKS_OF = {  # a file of a run -> the last one of a result that was there before it, or another that stands for it
    "evaluate.request.json": ("student/request.json",), "export/README.md": ("report.json",),
    "push.request.json": ("export/config.json", "export/adapter_config.json"),
}
PLACES = ("", "trajectories", "student", "export/adapter", "export", "bench", "ablation/*", "ablation/*/student")  # of a run


def places(folder: Path) -> list[Path]:
    """Where in a run's folder artifacts may be; one that stands in another comes first, for the other's checksums are of its too."""
    return [found for place in PLACES for found in (sorted(folder.glob(place)) if place else [folder])]


def artifacts(folder: Path) -> list[tuple[Path, Path]]:
    """Each finished artifact in a folder: its folder, and the file that has (or would have) its checksums. A ValueError for none."""
    if not folder.is_dir():
        raise ValueError(f"no folder at {folder}")
    found = [(place, place / sums) for place in places(folder) for last, sums in LAST.items() if (place / last).is_file()]
    if not found:
        raise ValueError(f"{folder} holds nothing that cdlm finished: no {', '.join(LAST)} in it or in its {', '.join(PLACES[1:])}")
    return list(dict.fromkeys(found))


def to_lock(folder: Path) -> list[Path]:
    """The folders that must have no other writer while a folder is sealed: itself, and the runs at work that it may be a part of."""
    folder = folder.resolve()
    deepest = max(len(Path(place).parts) for place in PLACES)
    return [folder, *(above for above in folder.parents[:deepest] if files.holds_lock(above))]


def check(folder: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """Each file of checksums, and what is wrong with the files it names: path -> why. One that is missing is what is wrong, and so is a
    result without which another can't have been made."""
    for place, sums in artifacts(folder):
        if not sums.is_file():
            if sums.name in NOTE_SUMS.values() or (sums.name == LOG_SUMS and (place / report.SUMS).is_file()):
                continue  # of an older version: a note is compared by its values, and the report's checksums are of the log, too
            yield sums, {str(sums): f"missing: {place} has no checksums; --seal writes them for what is there now"}
            continue
        yield sums, files.faults(sums) or _shards(sums)
    for place in places(folder):
        for last, earlier in SPEAKS_OF.items():
            if (place / last).is_file() and not any((place / name).is_file() for name in earlier):
                yield place / earlier[0], {str(place / earlier[0]): f"missing, though {last} is there, which speaks of it"}


def _shards(sums: Path) -> dict[str, str]:
    """Of sound checksums of trajectories: which shards' own checksums are others. Path -> why."""
    stated, wrong = files.read_sums(sums), {}
    for file in sorted(sums.parent.glob("shard-*.sha256")):
        own = {name: stated.get(name) for name in trajectories.shard_files(sums.parent, file.stem)}
        try:
            if files.read_sums(file) != own:
                wrong[str(file)] = f"damaged: its checksums of {', '.join(sorted(own))} are not those of {sums.name}"
        except ValueError as error:
            wrong[str(file)] = str(error).removeprefix(f"{file} is ")
    return wrong


def seal(folder: Path) -> Iterator[Path]:
    """Write the checksums of every artifact for what is there now; yields the files written."""
    for place, sums in artifacts(folder):
        for shard in sorted(place.glob("shard-*.parquet")):
            files.write_sums(shard.with_suffix(".sha256"), {name: place / name for name in trajectories.shard_files(place, shard.stem)})
        if sums.name == files.SUMS:
            files.seal(place)
        else:
            named = [last for last, name in LAST.items() if name == sums.name]
            files.write_sums(sums, (report.beside(place) if sums.name == report.SUMS else {}) | {last: place / last for last in named})
        yield sums
