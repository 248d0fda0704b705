"""Copies a run's report into eval/results/<name> and writes its table into README.md, between the two `results` comments.

    python eval/readme.py runs/tiny          # what `make results` runs
    python eval/readme.py --check            # README.md says what eval/results/tiny/report.json says, or exit status 1
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from cdlm.evaluate import report

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "eval" / "results" / "tiny"
FILES = ("report.json", "report.md", "pareto.png")
START, END = "<!-- results -->\n", "<!-- /results -->"


def block(found: dict[str, Any]) -> str:
    """The sentences of the summary and the table over all tasks, each method at the recipe's own values."""
    own = found["summary"]
    values = (None, own["confidence_threshold"], own["truncated_steps"])
    rows = [row for row in found["results"] if row["task"] == "all" and row["parameter"] in values]
    shown = {"teacher": "teacher", "teacher_threshold_stop": "teacher, threshold, stops at the end", "student": "student"}
    tasks = [row for row in found["results"] if row["task"] != "all" and row["method"] in shown and row["parameter"] in values[:2]]
    lines = [f"- {line}" for line in report.summary_lines(own)]
    per_task = [f"| task: accuracy, steps | {' | '.join(shown.values())} |", "|---|---:|---:|---:|"]
    for task in sorted({row["task"] for row in tasks}):
        cells = {row["method"]: f"{row['accuracy']:.1%}, {row['steps']:.1f}" for row in tasks if row["task"] == task}
        per_task.append(f"| {task} | {' | '.join(cells[method] for method in shown)} |")
    return "\n".join([*lines, "", report.markdown_table(report.table(rows)), "", *per_task, ""])


def written(readme: str, text: str) -> str:
    """README.md with the block in its place."""
    before, rest = readme.split(START, 1)
    return before + START + text + END + rest.split(END, 1)[1]


def main(arguments: list[str]) -> int:
    readme = ROOT / "README.md"
    if arguments != ["--check"]:
        RESULTS.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            shutil.copyfile(Path(arguments[0]) / name, RESULTS / name)
    expected = written(readme.read_text(), block(json.loads((RESULTS / "report.json").read_text())))
    if arguments == ["--check"]:
        return int(readme.read_text() != expected)
    readme.write_text(expected)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
