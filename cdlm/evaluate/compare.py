"""Two runs side by side: their report.json and samples.jsonl, question by question.

Refuses runs that were not asked the same questions in the same order. Every interval is a paired bootstrap: both runs are judged on the
same drawn questions, so a question that both find hard widens nothing. Knows files of runs; knows no model.
"""

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cdlm import files
from cdlm.evaluate.clock import Interval, bootstrap, speedup
from cdlm.evaluate.report import SUMS, own_rows, titles
from cdlm.evaluate.run import label, mean, ratio

READ = ("report.json", "samples.jsonl")
COLUMNS = (
    "method", "A", "B", "accuracy A", "accuracy B", "B - A, points", "95 %", "steps A", "steps B", "TPF A", "TPF B", "B faster", "95 %",
)  # fmt: skip


@dataclass(frozen=True)
class Side:
    """One run: its folder, report, and the answers of each method by its label."""

    folder: Path
    report: dict[str, Any]
    samples: dict[str, list[dict[str, Any]]]

    def own(self, method: str) -> float | None:
        """The recipe's own value of a method (see `report.own_rows`); the first of a sweep that has none."""
        found = [row for row in self.report["results"] if row["task"] == "all" and row["method"] == method]
        return own_rows(self.report, found)[0]["parameter"]

    def seconds(self, name: str) -> list[list[float]]:
        """Seconds of every question (none where it was not timed) under a method's label."""
        timed = self.report.get("latency", {}).get("seconds", {}).get(name, {})
        return [timed.get(str(number), []) for number in range(len(self.samples[name]))]

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(row["method"] for row in self.report["results"]))


def read(folder: Path) -> Side:
    """A run's folder; a ValueError that names the file that is missing, is not what evaluate writes, or is damaged by its checksums (a
    folder without any is taken)."""
    for name in READ:
        if not (folder / name).is_file():
            raise ValueError(f"{folder} has no {name}: compare takes the folders of two evaluated runs, as runs/tiny")
    if (folder / SUMS).is_file():
        for path, why in files.faults(folder / SUMS).items():
            if Path(path).name in (*READ, SUMS):
                raise ValueError(f"{path} is {why}; evaluate again, or, if you changed it, cdlm verify {folder} --seal takes it for good")
    samples: dict[str, list[dict[str, Any]]] = {}
    try:
        report = json.loads((folder / "report.json").read_text())
        for line in (folder / "samples.jsonl").read_text().splitlines():
            sample = json.loads(line)
            samples.setdefault(sample["method"], []).append(sample)
        if not samples or not report["results"]:
            raise ValueError("it holds no result")
        side = Side(folder, report, samples)
        for key in ("summary", "environment"):
            report[key]
        for row in report["results"]:
            name = label(row["method"], row["parameter"])
            held = len(samples.get(name, []))
            if row["task"] == "all" and held != row.get("n", held or None):
                raise ValueError(f"its report has {row.get('n')} answers of {name}, its samples {held}")
        for rows in samples.values():
            for sample in rows:
                _ = [sample[key] for key in ("group", "prompt", "reference", "correct", "steps", "output_tokens", "forwards")]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder} is not the folder of an evaluated run: {error!r}") from None
    return side


def check_questions(a: Side, b: Side) -> None:
    """A ValueError that names the first question in which two runs differ."""
    asked_a, asked_b = ([_question(sample) for sample in next(iter(side.samples.values()))] for side in (a, b))
    for number, (one, other) in enumerate(zip(asked_a, asked_b, strict=False), start=1):
        if one != other:
            raise ValueError(f"question {number} differs: {a.folder} asks {_shown(one)}, {b.folder} asks {_shown(other)}")
    if len(asked_a) != len(asked_b):
        number = min(len(asked_a), len(asked_b))
        longer, shorter = (a, b) if len(asked_a) > number else (b, a)
        extra = (asked_a if longer is a else asked_b)[number]
        raise ValueError(f"question {number + 1} differs: {longer.folder} asks {_shown(extra)}, {shorter.folder} has {number} questions")


def _question(sample: dict[str, Any]) -> tuple[str, str, str]:
    return sample["group"], sample["prompt"], sample["reference"]


def _shown(question: tuple[str, str, str]) -> str:
    group, prompt, reference = question
    return f"{prompt[:80]!r} ({group}, answer {reference[:40]!r})"


def points_between(a: list[bool], b: list[bool], *, seed: int = 0) -> Interval:
    """Accuracy of b minus that of a in points (percent), on the same questions; at least one."""
    if len(a) != len(b):
        raise ValueError(f"an accuracy difference needs the same questions twice; got {len(a)} and {len(b)}")
    difference = 100.0 * (np.array(b, dtype=float) - np.array(a, dtype=float))
    return bootstrap(lambda index: difference[index].mean(axis=1), len(a), seed=seed)


def faster(a: list[list[float]], b: list[list[float]], *, seed: int = 0) -> Interval | None:
    """How many times faster b is than a, over the questions that both timed; seconds of each question's repeats. None without any."""
    both = [(statistics.median(one), statistics.median(other)) for one, other in zip(a, b, strict=True) if one and other]
    return speedup([one for one, _ in both], [other for _, other in both], seed=seed) if both else None


def compare(a: Side, b: Side) -> list[dict[str, Any]]:
    """One entry for each method that both runs measured, each run at its recipe's own value. Refuses runs of other questions."""
    check_questions(a, b)
    shared = [method for method in a.methods if method in b.methods]
    if not shared:
        raise ValueError(f"no method in common: {a.folder} has {', '.join(a.methods)}; {b.folder} has {', '.join(b.methods)}")
    out = []
    for method in shared:
        entry: dict[str, Any] = {"method": method, "title": titles(a.report["results"])[method]}
        names = [label(method, side.own(method)) for side in (a, b)]
        rows = [side.samples[name] for side, name in zip((a, b), names, strict=True)]
        spent = [side.seconds(name) for side, name in zip((a, b), names, strict=True)]
        for name, side, own in zip("ab", (a, b), rows, strict=True):
            entry[name] = {
                "parameter": side.own(method), "accuracy": mean(row["correct"] for row in own), "steps": mean(row["steps"] for row in own),
                "tpf": ratio(sum(row["output_tokens"] for row in own), sum(row["forwards"] for row in own)),
            }
        entry["points"] = points_between(*([row["correct"] for row in own] for own in rows))
        entry["faster"] = faster(*spent)
        entry["timed"] = sum(bool(one and other) for one, other in zip(*spent, strict=True))
        out.append(entry)
    return out


def table(entries: list[dict[str, Any]]) -> list[list[str]]:
    """Rows of text under COLUMNS; a number that is not there is an empty cell."""
    out = []
    for entry in entries:
        one, other, points, speed = entry["a"], entry["b"], entry["points"], entry["faster"]
        out.append([
            entry["title"],
            *("" if side["parameter"] is None else f"{side['parameter']:g}" for side in (one, other)),
            f"{one['accuracy']:.1%}", f"{other['accuracy']:.1%}", f"{points.value:+.1f}", f"{points.low:+.1f} to {points.high:+.1f}",
            f"{one['steps']:.2f}", f"{other['steps']:.2f}", *("" if side["tpf"] is None else f"{side['tpf']:.2f}" for side in (one, other)),
            f"{speed.value:.2f}x" if speed else "", f"{speed.low:.2f} to {speed.high:.2f}" if speed else "",
        ])  # fmt: skip
    return out


def remarks(a: Side, b: Side, entries: list[dict[str, Any]]) -> list[str]:
    """What a reader must know beside the table."""
    questions = len(next(iter(a.samples.values())))
    lines = [
        f"A is {a.folder}, B is {b.folder}; {questions} questions, the same in both. Each method at its recipe's own value (columns A and "
        "B). Intervals: paired bootstrap over questions."
    ]
    timed = {entry["timed"] for entry in entries}
    if timed == {0}:
        lines.append("Latency is not compared: the two runs have no timed question in common.")
    else:
        lines.append(
            f"Latency at batch 1 over the {' or '.join(str(count) for count in sorted(timed))} questions that both timed. The runs were "
            "timed apart, so what else the machine did stands in the ratio; methods of one run are interleaved, those of two are not."
        )
    env_a, env_b = a.report["environment"], b.report["environment"]
    other = [f"{key} {env_a.get(key)} and {env_b.get(key)}" for key in dict.fromkeys([*env_a, *env_b]) if env_a.get(key) != env_b.get(key)]
    if other:
        lines.append(f"Not the same environment: {', '.join(other)}.")
    return lines
