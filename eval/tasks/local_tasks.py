"""Tasks of the harness on files of this machine: everything but the data is the harness's own configuration, read where it is installed.

HumanEval is scored here, not by the harness's metric, which is fetched from the Hub: the program, a completion with its tests behind it,
runs in a process of its own, in an empty folder, with a time limit. That is no sandbox.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import datasets
import lm_eval
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks._yaml_loader import load_yaml

from cdlm.data import read_rows

HARNESS = Path(lm_eval.__file__).parent / "tasks"
SECONDS = 10.0


def harness_config(file: str) -> dict[str, Any]:
    """A task's configuration as the harness ships it; functions that it names are not imported."""
    return load_yaml(HARNESS / file, resolve_func=False)


def local_rows(metadata: dict[str, Any], key: str, columns: tuple[str, ...]) -> dict[str, datasets.Dataset]:
    """The test split from the file that `--metadata KEY=FILE` names."""
    if not metadata.get(key):
        raise ValueError(f"--metadata {key}=FILE is missing: a .jsonl or .parquet file with the columns {', '.join(columns)}")
    rows = read_rows(Path(metadata[key]))
    for number, row in enumerate(rows, start=1):
        missing = [name for name in columns if name not in row]
        if missing:
            raise ValueError(f"{metadata[key]}, row {number} has no {', '.join(missing)}; it has {', '.join(row)}")
    return {"test": datasets.Dataset.from_list([{name: row[name] for name in columns} for row in rows])}


def local_config(config: dict[str, Any], file: str, key: str, columns: tuple[str, ...], **changes: Any) -> dict[str, Any]:
    """The harness's configuration with another name and other data."""
    own = harness_config(file)
    for name in ("dataset_path", "dataset_name", "tag"):
        own.pop(name, None)
    metadata = {**own.get("metadata", {}), **config.get("metadata", {})}
    split = local_rows(metadata, key, columns)
    return {**own, **changes, "task": config["task"], "metadata": metadata, "custom_dataset": lambda **ignored: split}


class Gsm8kLocal(ConfigurableTask):
    """gsm8k_cot: eight examples, strict and flexible extraction."""

    def __init__(self, config: dict[str, Any]):
        super().__init__(config=local_config(config, "gsm8k/gsm8k-cot.yaml", "gsm8k_file", ("question", "answer")))


def runs(program: str, seconds: float = SECONDS) -> bool:
    """Whether a Python program ends by itself without an error within the time."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "program.py"
        file.write_text(program, encoding="utf-8")
        try:
            done = subprocess.run(
                [sys.executable, "-I", str(file)], cwd=folder, env={}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, timeout=seconds,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0


def completed(resps: list[list[str]], docs: list[dict[str, Any]]) -> list[list[str]]:
    """The prompt's function with each completion up to the end of its code block."""
    return [[doc["prompt"] + text.partition("```")[0] for text in texts] for texts, doc in zip(resps, docs, strict=True)]


def pass_at_1(doc: dict[str, Any], results: list[list[str]]) -> dict[str, float]:
    """The share of programs that pass the problem's tests."""
    tests = f"\n{doc['test']}\ncheck({doc['entry_point']})\n"
    passed = [runs(program + tests) for program in results[0]]
    return {"pass@1": sum(passed) / len(passed)}


KNOWN = {
    "prompt": "def add(a, b):\n", "entry_point": "add",
    "test": "def check(candidate):\n    assert candidate(2, 3) == 5\n    assert candidate(-1, 1) == 0\n",
}  # fmt: skip
GOOD, BAD = "    return a + b\n```\nThat is all.", "    return a * b\n```"


class HumanEvalLocal(ConfigurableTask):
    """humaneval_instruct. Before a model is asked, a right and a wrong completion must score 1 and 0."""

    def __init__(self, config: dict[str, Any]):
        super().__init__(config=local_config(
            config, "humaneval/humaneval_instruct.yaml", "humaneval_file", ("task_id", "prompt", "entry_point", "test"),
            process_results=pass_at_1, metric_list=[{"metric": "pass@1", "aggregation": "mean", "higher_is_better": True}],
            filter_list=[{"name": "create_test", "filter": [{"function": "custom", "filter_fn": completed}]}],
        ))  # fmt: skip

    def build_all_requests(self, **kwargs: Any) -> None:
        """The requests, once scoring itself has been tried: the harness asks for them after its own check of the confirm flag."""
        for text, wanted in ((GOOD, 1.0), (BAD, 0.0)):
            (program,) = completed([[text]], [KNOWN])
            found = pass_at_1(KNOWN, [program])["pass@1"]
            if found != wanted:
                raise ValueError(f"a completion that must score {wanted:.0f} scored {found:.0f}; programs do not run here as they should")
        super().build_all_requests(**kwargs)
