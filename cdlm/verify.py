"""`cdlm verify`: are the files of a run, of trajectories or of an exported model still what was written? See files.py for the checksums."""

from collections.abc import Iterator
from pathlib import Path

from cdlm import files
from cdlm.evaluate import report

LOG_SUMS = "log.sha256"
NOTE_SUMS = {"export.request.json": "export.sha256", "push.request.json": "push.sha256"}
LAST = {  # the file that says that an artifact is finished -> the file with its checksums
    "manifest.json": files.SUMS, "request.json": files.SUMS, "config.json": files.SUMS, "adapter_config.json": files.SUMS,
    "report.json": report.SUMS, "log.jsonl": LOG_SUMS, "growth.json": "growth.sha256", "overhead.json": "overhead.sha256",
    **NOTE_SUMS,
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


def check(folder: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """Each file of checksums, and what is wrong with the files it names: path -> why. A ValueError for an artifact that has none."""
    for place, sums in artifacts(folder):
        if not sums.is_file():
            if sums.name in NOTE_SUMS.values() or (sums.name == LOG_SUMS and (place / report.SUMS).is_file()):
                continue  # of an older version: a note is compared by its values, and the report's checksums are of the log, too
            raise ValueError(f"{place} has no checksums: {sums} is missing; --seal writes them for what is there now")
        yield sums, files.faults(sums)


def seal(folder: Path) -> Iterator[Path]:
    """Write the checksums of every artifact for what is there now; yields the files written."""
    for place, sums in artifacts(folder):
        for shard in sorted(place.glob("shard-*.parquet")):
            names = [name for name in (f"{shard.stem}.safetensors", shard.name) if (place / name).is_file()]
            files.write_sums(shard.with_suffix(".sha256"), {name: place / name for name in names})
        if sums.name == files.SUMS:
            files.seal(place)
        else:
            named = [last for last, name in LAST.items() if name == sums.name]
            files.write_sums(sums, (report.beside(place) if sums.name == report.SUMS else {}) | {last: place / last for last in named})
        yield sums
