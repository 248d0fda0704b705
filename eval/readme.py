"""Copies a run's report into eval/results/<name> and writes its table into README.md, between the two comments of that name.

    python eval/readme.py runs/tiny          # what `make results` runs; PLACES has the others
    python eval/readme.py --check            # README.md says what the reports in eval/results say, or exit status 1
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from cdlm import bench, files
from cdlm.evaluate import growth, overhead, report, speculation

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "eval" / "results"
FILES = ("report.json", "report.md", "report.html", "pareto.png")
PLACES = {  # name of a run -> the comments between which its table stands
    "tiny": ("<!-- results -->\n", "<!-- /results -->"),
    "tiny-bench": ("<!-- results of tiny-bench -->\n", "<!-- /results of tiny-bench -->"),
    "tiny-a2d": ("<!-- results of tiny-a2d -->\n", "<!-- /results of tiny-a2d -->"),
    "tiny-tidar": ("<!-- results of tiny-tidar -->\n", "<!-- /results of tiny-tidar -->"),
    "tiny-diffusiongemma": ("<!-- results of tiny-diffusiongemma -->\n", "<!-- /results of tiny-diffusiongemma -->"),
    "tiny-zaya": ("<!-- results of tiny-zaya -->\n", "<!-- /results of tiny-zaya -->"),
}
PER_TASK = {  # the methods of the second table, where they were run
    "teacher": "teacher", "autoregressive": "autoregressive", "teacher_threshold_stop": "teacher, threshold, stops at the end",
    "student_sequential": "student, 1 token a step", "student": "student",
}  # fmt: skip


def block(found: dict[str, Any]) -> str:
    """The sentences of the summary and the table over all tasks, each method at the recipe's own values."""
    if "speculation" in found:
        drafted = found["speculation"]
        table = report.markdown_table(speculation.table(drafted, report.titles(found["results"])), speculation.COLUMNS)
        return "\n".join([*(f"- {line}" for line in speculation.lines(drafted)), "", table, ""])
    own = found["summary"]
    kept = report.own_rows(found, found["results"])
    rows = [row for row in kept if row["task"] == "all"]
    shown = {method: title for method, title in PER_TASK.items() if any(row["method"] == method for row in rows)}
    tasks = [row for row in kept if row["task"] != "all" and row["method"] in shown]
    lines = [f"- {line}" for line in report.summary_lines(own)]
    per_task = [f"| task: accuracy, steps | {' | '.join(shown.values())} |", "|---" + "|---:" * len(shown) + "|"]
    for task in sorted({row["task"] for row in tasks}):
        cells = {row["method"]: f"{row['accuracy']:.1%}, {row['steps']:.1f}" for row in tasks if row["task"] == task}
        per_task.append(f"| {task} | {' | '.join(cells[method] for method in shown)} |")
    return "\n".join([*lines, "", report.markdown_table(report.table(rows)), "", *per_task, ""])


def bench_block(found: dict[str, Any]) -> str:
    """The table of `cdlm bench`, and what it says of growth and of the time around the forwards."""
    lines = [report.markdown_table(bench.table(found), bench.COLUMNS), ""]
    lines += [f"- {line}" for line in growth.lines(found["growth"]) + overhead.lines(found["overhead"])]
    return "\n".join([*lines, ""])


def written(readme: str, name: str, text: str) -> str:
    """README.md with the block of a run in its place."""
    start, end = PLACES[name]
    before, rest = readme.split(start, 1)
    return before + start + text + end + rest.split(end, 1)[1]


def main(arguments: list[str]) -> int:
    readme = ROOT / "README.md"
    if arguments != ["--check"]:
        folder = Path(arguments[0])
        place = f"{folder.parent.name}-bench" if folder.name == "bench" else folder.name
        if place not in PLACES:
            raise SystemExit(f"README.md has no place for {place}; it has for {', '.join(PLACES)}")
        if (folder / report.SUMS).is_file():
            files.require_sound(folder / report.SUMS, str(folder / "report.json"))
        (RESULTS / place).mkdir(parents=True, exist_ok=True)
        for name in FILES:
            shutil.copyfile(folder / name, RESULTS / place / name)
    text = readme.read_text()
    for name in PLACES:
        file = RESULTS / name / "report.json"
        found = json.loads(file.read_text()) if file.is_file() else None  # no run of it yet: an empty place
        text = written(text, name, "" if found is None else bench_block(found) if name.endswith("-bench") else block(found))
    if arguments == ["--check"]:
        return int(readme.read_text() != text)
    readme.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
