"""A mini recipe that runs in seconds: a random teacher, six questions to train on and six to measure on.

Half of the test questions have the teacher's own answer as their reference, so the naive teacher's accuracy is exactly 1/2.
"""

import contextlib
import io
import json
import os
import random
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml
from conftest import ROOT, TINY, random_model

BUDGET, BLOCK, THRESHOLD = 16, 8, 0.5
KIND = "llama"  # transformers reads every tokenizer beside a qwen2 config as Qwen2Tokenizer, whatever tokenizer_config.json says
ITEMS = "0123456789abcdefghijklmnopqrstuvwxyz"
LORA = {"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj", "up_proj"]}


def save_teacher(folder: Path, seed: int = 2) -> None:
    """A random model as a folder that `families.load` reads, with the small world's tokenizer."""
    from transformers import AutoTokenizer

    from cdlm.families import native

    model = random_model(KIND, seed=seed)
    for key, value in native.config_keys(model.facts).items():
        setattr(model.hf.config, key, value)
    model.hf.save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY / "tokenizer").save_pretrained(folder)


def questions(count: int, seed: int) -> list[dict[str, str]]:
    """Questions of two groups in turn, of unequal length."""
    rng = random.Random(seed)
    rows = []
    for i in range(count):
        task = ("copy", "reverse")[i % 2]
        text = "".join(rng.sample(ITEMS, rng.randint(4, 12)))
        rows.append({"task": task, "prompt": f"{task}:{text}", "answer": text if task == "copy" else text[::-1]})
    return rows


def teacher_answers(folder: Path, rows: list[dict[str, str]]) -> list[str | None]:
    """What the naive teacher says; None where no end token came, or where the text would not be read as the same tokens."""
    from cdlm import data, families
    from cdlm.decode import DecodeConfig, decode

    model = families.load(folder)
    tokenizer = families.load_tokenizer(folder, model.facts)
    prompt, valid = data.pad_left([data.prompt_ids(tokenizer, row["prompt"], chat_template=True) for row in rows], 0)
    out = decode(model, prompt, valid, DecodeConfig(BUDGET, BLOCK, tokens_per_step=1, block_causal=False, use_cache=False))
    answers: list[str | None] = []
    for i in range(len(rows)):
        ids = out.answer(i, model.facts.eos_token_ids)
        text = tokenizer.decode(ids)
        same = text == text.strip() and tokenizer(text, add_special_tokens=False)["input_ids"] == ids
        answers.append(text if ids and out.stop[i] == "eos" and same else None)
    return answers


def measured_questions(folder: Path) -> list[dict[str, str]]:
    """Six questions; the teacher is right on exactly two of the first four, one of each group."""
    rows = questions(96, seed=2)
    said = teacher_answers(folder, rows)
    out = []
    for i in range(6):
        task = ("copy", "reverse")[i % 2]
        place = next(p for p, row in enumerate(rows) if row["task"] == task and said[p] is not None and row not in out)
        out.append(rows[place])
        if i % 4 < 2:
            rows[place]["answer"] = said[place]
        said[place] = None
    return out


def values(*, lora: bool = False) -> dict:
    """The recipe as plain values."""
    return {
        "name": "mini", "seed": 3, "model": "teacher",
        "data": {"prompts": "train.jsonl", "test": "test.jsonl", "group_key": "task", "max_prompt_tokens": 24},
        "decode": {"max_new_tokens": BUDGET, "block_length": BLOCK, "confidence_threshold": THRESHOLD},
        "collect": {"num_prompts": 6, "temperatures": [0.0, 0.5], "batch_size": 4, "shard_size": 5, "screen": {"drop": False}},
        "train": {
            "steps": 6, "batch_size": 2, "accumulation": 2, "learning_rate": 0.01, "dlm_weight": 0.5, "save_steps": 2,
            "logging_steps": 1, "lora": LORA if lora else None,
        },
        "evaluate": {
            "thresholds": [0.3, 0.9], "truncated_steps": [4], "num_prompts": 4, "batch_size": 3, "latency_prompts": 2, "warmup_prompts": 1,
        },
        "export": {"license": "mit", "tags": ["mini"], "base_model": "someone/teacher"},
    }


def write(folder: Path, *, lora: bool = False) -> Path:
    """Everything a run needs, in `folder`; the path of the recipe."""
    folder.mkdir(parents=True, exist_ok=True)
    save_teacher(folder / "teacher")
    for name, rows in (("train", questions(6, seed=1)), ("test", measured_questions(folder / "teacher"))):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "mini.yaml"
    path.write_text(yaml.safe_dump(values(lora=lora), sort_keys=False))
    return path


@dataclass(frozen=True)
class Finished:
    """A recipe, the folder of a finished `cdlm distill`, and what the command printed. For reading only: copy it to change it."""

    recipe: Path
    out: Path
    printed: str

    def copy(self, folder: Path) -> Path:
        shutil.copytree(self.out, folder)
        return folder


_finished: dict[bool, Finished] = {}


def finished(tmp_path_factory, *, lora: bool = False) -> Finished:
    """One finished run for all test files, made at the first call."""
    if lora not in _finished:
        from cdlm import cli

        folder = tmp_path_factory.mktemp("mini-lora" if lora else "mini")
        recipe = write(folder, lora=lora)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            assert cli.main(["distill", str(recipe), "--out", str(folder / "out")]) == 0
        _finished[lora] = Finished(recipe, folder / "out", printed.getvalue())
    return _finished[lora]


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Name, time of change and content of every file."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in sorted(folder.rglob("*")) if path.is_file()
    }


def contents(folder: Path) -> dict[str, bytes]:
    """Name and content of every file."""
    return {name: content for name, (_, content) in snapshot(folder).items()}


def run_python(
    code: str, *arguments: object, folder: Path, package: bool = True, variables: dict[str, str] | None = None
) -> subprocess.CompletedProcess:
    """Python code in a process of its own; package=False makes `import cdlm` fail there. variables: of its environment."""
    head = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n" if package else "import sys; sys.modules['cdlm'] = None\n"
    environment = {
        **os.environ, "HF_HOME": str(folder / "hf-home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": "",
        **(variables or {}),
    }
    return subprocess.run(
        [sys.executable, "-c", head + code, *map(str, arguments)], cwd=folder, env=environment, capture_output=True, text=True, timeout=120,
    )
