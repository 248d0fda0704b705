"""The small world's questions for lm-eval, and when an answer is right."""

from functools import partial
from pathlib import Path
from typing import Any

import datasets

from cdlm.data import Example, read_rows

FILE = Path(__file__).parents[2] / "recipes" / "tiny" / "test.jsonl"


def rows(small_world_file: str | None = None, **other: Any) -> dict[str, datasets.Dataset]:
    """The test split; `--metadata small_world_file=FILE` takes it from another file."""
    found = read_rows(Path(small_world_file) if small_world_file else FILE)
    columns = ("task", "prompt", "answer", "accept")
    return {"test": datasets.Dataset.from_list([{name: row.get(name) for name in columns} for row in found])}


def only(docs: datasets.Dataset, task: str) -> datasets.Dataset:
    """The questions of one task."""
    return docs.filter(lambda row: row["task"] == task)


chain, copy, reverse, sort, translate = (partial(only, task=task) for task in ("chain", "copy", "reverse", "sort", "translate"))


def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """1 where the whole text matches `accept`, or is the answer where there is no `accept`; white space at the ends aside."""
    example = Example(0, doc["task"], doc["prompt"], doc["answer"], [], [], doc["accept"])
    return {"acc": float(example.is_right(results[0]))}
