"""`cdlm verify`: are the files of a run, of trajectories or of an exported model still what was written? See files.py for the checksums."""

from collections.abc import Iterator
from pathlib import Path

from cdlm import files
from cdlm.evaluate import report

LAST = {  # the file that says that an artifact is finished -> the file with its checksums
    "manifest.json": files.SUMS, "request.json": files.SUMS, "config.json": files.SUMS, "adapter_config.json": files.SUMS,
    "report.json": report.SUMS,
}
PLACES = ("", "trajectories", "student", "export", "bench")  # of a run


def artifacts(folder: Path) -> list[tuple[Path, Path]]:
    """Each finished artifact in a folder: its folder, and the file that has (or would have) its checksums. A ValueError for none."""
    if not folder.is_dir():
        raise ValueError(f"no folder at {folder}")
    found = [
        (folder / place, folder / place / sums) for place in PLACES for last, sums in LAST.items() if (folder / place / last).is_file()
    ]
    if not found:
        raise ValueError(f"{folder} holds nothing that cdlm finished: no {', '.join(LAST)} in it or in its {', '.join(PLACES[1:])}")
    return list(dict.fromkeys(found))


def check(folder: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """Each file of checksums, and what is wrong with the files it names: path -> why. A ValueError for an artifact that has none."""
    for place, sums in artifacts(folder):
        if not sums.is_file():
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
            files.write_sums(sums, report.beside(place) | {"report.json": place / "report.json"})
        yield sums
