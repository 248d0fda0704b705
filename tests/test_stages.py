"""The stages of a run: each hands files to the next, is done once, refuses other values, and ends the same when it was killed."""

import json
import shutil
import signal
from dataclasses import asdict
from types import SimpleNamespace

import mini
import pytest
import torch
import yaml
from conftest import TINY
from mini import contents, finished, snapshot

from cdlm import cli, data, families, methods, recipe, runs, stages, trajectories
from cdlm.decode import DecodeConfig
from cdlm.runs import Run

ROW_KEYS = {
    "task", "method", "parameter", "accuracy", "steps", "commit_forwards", "forwards", "output_tokens", "tpf", "latency_s", "tps", "batch",
    "n",
}
SUMMARY_KEYS = {
    "teacher_accuracy", "student_accuracy", "truncated_accuracy", "threshold_steps", "student_steps", "step_reduction", "latency_speedup",
    "tpf",
}


@pytest.fixture
def full(tmp_path_factory):
    return finished(tmp_path_factory)


@pytest.fixture
def lora(tmp_path_factory):
    return finished(tmp_path_factory, lora=True)


def run_of(done, out, *overrides) -> Run:
    return Run(recipe.load(done.recipe, list(overrides)), out, say=lambda text: None)


# ---- a whole run -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapter", [False, True])
def test_distill_from_nothing_writes_every_result(tmp_path_factory, adapter):
    done = finished(tmp_path_factory, lora=adapter)
    names = set(contents(done.out))
    shards = {f"trajectories/shard-0000{i}.{suffix}" for i in range(3) for suffix in ("parquet", "safetensors")}
    assert shards | {"trajectories/manifest.json", "report.json", "report.md", "pareto.png", "samples.jsonl", "log.jsonl"} <= names
    weights = "adapter_model.safetensors" if adapter else "model.safetensors"
    assert {f"student/{weights}", "student/request.json"} <= names
    assert {"export/model.safetensors", "export/config.json", "export/README.md", "export/custom_generate/generate.py"} <= names
    assert not any("partial" in name for name in names)
    assert not (done.out / "checkpoints").exists()
    assert (done.out / "pareto.png").read_bytes().startswith(b"\x89PNG")
    for stage in runs.STAGES:
        assert f"{stage}: done in" in done.printed


def test_a_second_call_does_nothing(full, tmp_path, capsys):
    out = full.copy(tmp_path / "out")
    before = snapshot(out)
    assert cli.main(["distill", str(full.recipe), "--out", str(out)]) == 0
    assert snapshot(out) == before
    printed = capsys.readouterr().out
    for stage in runs.STAGES:
        assert f"{stage}: done already" in printed


# When stdout is no terminal, rich takes it for 80 columns wide and would end cells in an ellipsis.
def test_the_printed_table_is_not_cut(full):
    assert "…" not in full.printed


@pytest.mark.parametrize(("stage", "missing"), [
    ("train", "collect"), ("evaluate", "collect"), ("evaluate", "train"), ("export", "evaluate"),
])
def test_a_stage_alone_needs_the_one_before_it(full, tmp_path, capsys, stage, missing):
    out = tmp_path / "out"
    out.mkdir()
    for name in {"collect": [], "train": ["trajectories"], "evaluate": ["trajectories", "student"]}[missing]:
        shutil.copytree(full.out / name, out / name)
    before = snapshot(out)
    assert cli.main([stage, str(full.recipe), "--out", str(out)]) == 2
    assert capsys.readouterr().err.startswith(f"cdlm: error: {stage} needs the result of {missing},")
    assert snapshot(out) == before


def test_stages_one_by_one_end_as_distill_does(full, tmp_path):
    out = tmp_path / "out"
    for stage in runs.STAGES:
        assert cli.main([stage, str(full.recipe), "--out", str(out)]) == 0
    one_by_one, at_once = contents(out), contents(full.out)
    assert set(one_by_one) == set(at_once)
    timed = {"report.sha256", "report.json", "report.md", "report.html", "log.jsonl", "log.sha256", "pareto.png", "export/README.md"}
    for name in set(at_once) - timed:
        assert one_by_one[name] == at_once[name], name


@pytest.mark.parametrize(("change", "named"), [
    ("train.steps=7", "train.steps: 6 there, 7 now"),
    ("train.lora.rank=2", "train.lora"),
    ("seed=4", "seed: 3 there, 4 now"),
    ("collect.temperatures=[0.0]", "collect.temperatures"),
    ("decode.block_length=4", "decode.block_length: 8 there, 4 now"),
    ("decode.confidence_threshold=0.6", "decode.confidence_threshold: 0.5 there, 0.6 now"),
    ("evaluate.thresholds=[0.6]", "evaluate.thresholds"),
    ("export.license=apache-2.0", "export.license: 'mit' there, 'apache-2.0' now"),
])
def test_a_changed_value_on_a_finished_folder_is_refused(lora, tmp_path, capsys, change, named):
    out = lora.copy(tmp_path / "out")
    before = snapshot(out)
    assert cli.main(["distill", str(lora.recipe), "--out", str(out), "--set", change]) == 2
    error = capsys.readouterr().err
    assert named in error and str(out) in error
    assert snapshot(out) == before


@pytest.mark.parametrize("file", ["train.jsonl", "test.jsonl", "teacher/config.json"])
def test_changed_files_on_a_finished_folder_are_refused(full, tmp_path, capsys, file):
    shutil.copytree(full.recipe.parent, tmp_path / "mini")
    path = tmp_path / "mini" / file
    text = path.read_text()
    path.write_text(text.replace("}\n", ', "more": 1}\n', 1) if file.endswith("jsonl") else json.dumps({**json.loads(text), "more": 1}))
    before = snapshot(tmp_path / "mini" / "out")
    assert cli.main(["distill", str(tmp_path / "mini" / "mini.yaml"), "--out", str(tmp_path / "mini" / "out")]) == 2
    named = {"train.jsonl": "prompts:", "test.jsonl": "test:", "teacher/config.json": "teacher:"}[file]
    assert named in capsys.readouterr().err
    assert snapshot(tmp_path / "mini" / "out") == before


def test_a_changed_value_on_half_a_collection_is_refused(full, tmp_path):
    out = tmp_path / "out"
    (out / "trajectories").mkdir(parents=True)
    for name in ("collection.json", "shard-00000.parquet", "shard-00000.safetensors"):
        shutil.copy(full.out / "trajectories" / name, out / "trajectories")
    before = snapshot(out)
    with pytest.raises(ValueError, match="seed: 3 there, 4 now"):
        stages.collect(run_of(full, out, "seed=4"))
    assert snapshot(out) == before


# ---- killed and started again (contract 10) --------------------------------------------------------------------------

# Runs one stage and dies with SIGKILL when `when` says so: {"said": text} after the stage said something with this text in it,
# {"write": name, "number": n} in the middle of the n-th write of such a file.
KILLED = """
import json, os, signal
from pathlib import Path
from types import SimpleNamespace
import torch
torch.set_num_threads(1)
torch.manual_seed(0)
from cdlm import recipe, runs, stages

stage, path, out, when = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4])
die = lambda: os.kill(os.getpid(), signal.SIGKILL)

def say(text):
    if when.get("said") and when["said"] in text:
        die()

def dying(write):
    count = 0
    def wrapper(*args, **kwargs):
        nonlocal count
        count += 1
        if count == when["number"]:
            die()
        return write(*args, **kwargs)
    return wrapper

if when.get("write") == "parquet":
    import pyarrow.parquet
    pyarrow.parquet.write_table = dying(pyarrow.parquet.write_table)
if when.get("write") == "trainer_state":
    from transformers.trainer_callback import TrainerState
    TrainerState.save_to_json = dying(TrainerState.save_to_json)

out.mkdir(parents=True, exist_ok=True)
getattr(stages, stage)(runs.Run(recipe.load(path), out, say))
"""


def kill(stage: str, done, out, folder, **when) -> None:
    ended = mini.run_python(KILLED, stage, done.recipe, out, json.dumps(when), folder=folder)
    assert ended.returncode == -signal.SIGKILL, ended.stderr


@pytest.mark.parametrize(("when", "left"), [
    ({"said": "shard 1 of 3"}, ["shard-00000.parquet", "shard-00000.safetensors", "shard-00000.sha256"]),
    ({"write": "parquet", "number": 2},
     ["shard-00000.parquet", "shard-00000.safetensors", "shard-00000.sha256", "shard-00001.safetensors"]),
])
def test_collect_killed_and_started_again_ends_with_the_same_bytes(full, tmp_path, when, left):
    out = tmp_path / "out"
    kill("collect", full, out, tmp_path, **when)
    assert sorted(contents(out / "trajectories")) == ["collection.json", *left]
    assert not runs.is_done(run_of(full, out), "collect")
    first = snapshot(out / "trajectories")["shard-00000.parquet"]
    stages.collect(run_of(full, out))
    assert contents(out / "trajectories") == contents(full.out / "trajectories")
    assert snapshot(out / "trajectories")["shard-00000.parquet"] == first, "a finished shard is not made again"


def losses(out) -> list[dict]:
    names = ("step", "distill_loss", "consistency_loss", "dlm_loss", "learning_rate", "grad_norm")
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [{name: line[name] for name in names} for line in lines if "distill_loss" in line]


def check_train_killed(done, tmp_path, **when) -> None:
    out, unbroken = tmp_path / "out", tmp_path / "unbroken"
    for folder in (out, unbroken):
        shutil.copytree(done.out / "trajectories", folder / "trajectories")
    torch.manual_seed(0)
    stages.train(run_of(done, unbroken))
    kill("train", done, out, tmp_path, **when)
    assert not (out / "student").exists() and list((out / "checkpoints").glob("checkpoint-*"))
    said = []
    stages.train(Run(recipe.load(done.recipe), out, said.append))
    assert any("goes on from checkpoint-" in text for text in said)
    assert contents(out / "student") == contents(unbroken / "student")
    assert losses(out) == losses(unbroken), "the log is whole and the same"
    assert [line["step"] for line in losses(out)] == [1, 2, 3, 4, 5, 6]
    assert not (out / "checkpoints").exists()


@pytest.mark.parametrize("adapter", [False, True])
def test_train_killed_and_started_again_gives_the_same_student(tmp_path_factory, tmp_path, adapter):
    check_train_killed(finished(tmp_path_factory, lora=adapter), tmp_path, said="step 3 of 6")


# An adapter's start is drawn from torch's global generator.
@pytest.mark.parametrize("adapter", [False, True])
def test_the_student_depends_on_the_recipe_alone(tmp_path_factory, tmp_path, adapter):
    done, made = finished(tmp_path_factory, lora=adapter), []
    for process in (1, 2):
        out = tmp_path / str(process)
        shutil.copytree(done.out / "trajectories", out / "trajectories")
        torch.manual_seed(process)
        stages.train(run_of(done, out))
        made.append(contents(out / "student"))
    assert made[0] == made[1]


# The Trainer writes a checkpoint file by file into its place and trainer_state.json last.
def test_train_killed_while_it_writes_a_checkpoint(full, tmp_path):
    check_train_killed(full, tmp_path, write="trainer_state", number=2)


class Killed(BaseException):
    """As good as SIGKILL at a certain line: nothing in the package catches it."""


def die(*args, **kwargs):
    raise Killed


def test_evaluate_killed_before_the_report_is_made_again(full, tmp_path, monkeypatch):
    from cdlm.evaluate import report

    out = tmp_path / "out"
    for name in ("trajectories", "student"):
        shutil.copytree(full.out / name, out / name)
    with monkeypatch.context() as patch:
        patch.setattr(report, "plot", die)
        with pytest.raises(Killed):
            stages.evaluate(run_of(full, out))
    assert not runs.is_done(run_of(full, out), "evaluate")
    stages.evaluate(run_of(full, out))
    assert runs.is_done(run_of(full, out), "evaluate")
    assert (out / "samples.jsonl").read_bytes() == (full.out / "samples.jsonl").read_bytes()
    assert untimed(json.loads((out / "report.json").read_text())) == untimed(json.loads((full.out / "report.json").read_text()))


def untimed(report: dict) -> dict:
    """Without what the clock gave, and without the command, which a stage called from Python has not."""
    report["summary"].pop("latency_speedup")
    report.pop("latency"), report.pop("command")
    for row in report["results"]:
        row.pop("latency_s"), row.pop("tps")
    return report


# report.json says that the stage is done.
def test_evaluate_killed_behind_the_report_still_ends_with_every_file(full, tmp_path, monkeypatch):
    from cdlm.evaluate import report

    out = tmp_path / "out"
    for name in ("trajectories", "student"):
        shutil.copytree(full.out / name, out / name)
    write = report.write
    with monkeypatch.context() as patch:
        patch.setattr(report, "write", lambda *args: (write(*args), die()))
        with pytest.raises(Killed):
            stages.evaluate(run_of(full, out))
    if not runs.is_done(run_of(full, out), "evaluate"):
        stages.evaluate(run_of(full, out))
    assert (out / "samples.jsonl").read_bytes() == (full.out / "samples.jsonl").read_bytes()


# student/ says that the stage is done, so log.jsonl must stand before it.
def test_train_killed_before_its_log_still_ends_with_every_file(full, tmp_path, monkeypatch):
    out = tmp_path / "out"
    shutil.copytree(full.out / "trajectories", out / "trajectories")
    with monkeypatch.context() as patch:
        patch.setattr(stages, "_note_log", die)
        with pytest.raises(Killed):
            stages.train(run_of(full, out))
    if not runs.is_done(run_of(full, out), "train"):
        stages.train(run_of(full, out))
    assert (out / "log.jsonl").is_file()
    assert not (out / "checkpoints").exists()


def test_export_killed_between_removing_the_old_and_placing_the_new_folder(full, tmp_path):
    out = full.copy(tmp_path / "out")
    (out / "export").rename(out / ".export.old")
    shutil.copytree(out / ".export.old", out / ".export.partial")
    (out / ".export.partial" / "half").write_text("of another run")
    assert not runs.is_done(run_of(full, out), "export")
    stages.export(run_of(full, out))
    assert contents(out) == contents(full.out)


# ---- numbers that are none -------------------------------------------------------------------------------------------


def test_a_loss_that_is_no_number_names_step_samples_and_the_last_good_checkpoint(full, tmp_path, monkeypatch):
    from cdlm import trainer

    shutil.copytree(full.out / "trajectories", tmp_path / "trajectories")
    whole, seen = trainer.LOSSES["cdlm"], []

    def broken(t, batch):
        seen.append(batch["index"].tolist())
        parts = whole(t, batch)
        return {name: loss * float("nan") if t.state.global_step == 4 and name == "dlm" else loss for name, loss in parts.items()}

    monkeypatch.setitem(trainer.LOSSES, "cdlm", broken)
    with pytest.raises(FloatingPointError) as caught:
        stages.train(run_of(full, tmp_path))
    ids = [trajectories.Trajectories(tmp_path / "trajectories")[i].id for i in seen[-1]]
    assert f"the dlm loss is nan; lower the learning rate or look at the data of this step: step 5, samples: trajectory {ids[0]}, " in str(
        caught.value
    )
    assert str(caught.value).endswith(f"trajectory {ids[1]}. The last good checkpoint: {tmp_path / 'checkpoints' / 'checkpoint-4'}")
    monkeypatch.undo()
    stages.train(run_of(full, tmp_path))
    assert contents(tmp_path / "student") == contents(full.out / "student")


def test_weights_that_are_no_numbers_are_no_checkpoint(full, tmp_path, monkeypatch):
    from cdlm import trainer

    shutil.copytree(full.out / "trajectories", tmp_path / "trajectories")
    whole = trainer.LOSSES["cdlm"]

    def spoiling(t, batch):
        parts = whole(t, batch)
        if t.state.global_step == 3:
            parts["dlm"].register_hook(lambda gradient: gradient * float("nan"))
        return parts

    monkeypatch.setitem(trainer.LOSSES, "cdlm", spoiling)
    with pytest.raises(FloatingPointError, match=r"is no longer finite: step 4; .* checkpoint: \S+checkpoint-2$"):
        stages.train(run_of(full, tmp_path))


def test_a_logit_that_is_no_number_names_trajectory_and_question(full, tmp_path, monkeypatch):
    calls, decode = [], trajectories.decode

    def broken(model, prompt, valid, config, **values):
        calls.append(prompt)
        if len(calls) == 2:
            model.head.register_forward_hook(lambda module, given, logits: logits.index_fill(0, torch.tensor([1]), float("nan")))
        return decode(model, prompt, valid, config, **values)

    monkeypatch.setattr(trajectories, "decode", broken)
    said = r"^collect: of trajectory \d+ \(question \d\): a logit is not finite in block 0, step 0 of row 1: "
    with pytest.raises(FloatingPointError, match=said):
        stages.collect(run_of(full, tmp_path, "collect.shard_size=6"))


# ---- what is reported ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapter", [False, True])
def test_report_has_the_promised_fields(tmp_path_factory, adapter):
    found = json.loads((finished(tmp_path_factory, lora=adapter).out / "report.json").read_text())
    assert SUMMARY_KEYS <= set(found["summary"])
    assert all(isinstance(found["summary"][key], int | float) for key in SUMMARY_KEYS)
    rows = found["results"]
    for row in rows:
        assert ROW_KEYS <= set(row)
        assert row["batch"] == 3 and row["n"] == (4 if row["task"] == "all" else 2)
        assert row["tpf"] == pytest.approx(row["output_tokens"] / row["forwards"])
        if row["latency_s"] is not None:
            assert 0 < row["latency_s"]["median"] <= row["latency_s"]["p90"] and row["tps"] > 0
    assert {row["task"] for row in rows} == {"all", "copy", "reverse"}
    for task in ("all", "copy", "reverse"):
        assert {row["method"] for row in rows if row["task"] == task} == set(recipe.METHODS)
        assert [row["parameter"] for row in rows if row["task"] == task and row["method"] == "student"] == [0.3, 0.5, 0.9]


def test_training_free_baselines_are_decodings_of_the_teacher(full, tmp_path):
    """Each with its own rule, by itself, against `decode` on the four test questions: steps of every question."""
    from cdlm import data, families
    from cdlm.decode import DecodeConfig, decode

    whole = {"block_causal": False, "use_cache": False, "stop_at_eos": False}
    configs = {
        ("teacher_fixed", 3): {"tokens_per_step": 3}, ("teacher_factor", 0.7): {"factor": 0.7},
        ("teacher_entropy_bound", 1.0): {"entropy_bound": 1.0, "order": "entropy"},
        ("teacher_prefix_cache", 0.3): {"confidence_threshold": 0.3, "approximate_cache": "prefix"},
        ("teacher_dual_cache", 0.3): {"confidence_threshold": 0.3, "approximate_cache": "dual"},
        ("teacher_interval_cache", None): {
            "tokens_per_step": 1, "approximate_cache": "interval", "prompt_refresh": 5, "response_refresh": 2,
        },
    }  # fmt: skip
    out = full.copy(tmp_path / "out")
    for name in ("report.json", "evaluate.request.json"):
        (out / name).unlink()
    changes = ["evaluate.methods=[" + ", ".join(recipe.BASELINES) + "]", "evaluate.fixed=[3]", "evaluate.factors=[0.7]",
               "evaluate.entropy_bounds=[1.0]", "evaluate.thresholds=[0.3]",
               "evaluate.prompt_refresh=5", "evaluate.response_refresh=2"]  # fmt: skip
    run = runs.Run(recipe.load(full.recipe, changes), out, say=lambda text: None)
    run.check_inputs()
    stages.evaluate(run)
    found = json.loads((out / "report.json").read_text())
    assert {row["method"] for row in found["results"]} == set(recipe.BASELINES)
    model = families.load(full.recipe.parent / "teacher")
    examples = run.examples(families.load_tokenizer(full.recipe.parent / "teacher", model.facts), "test", 4)
    prompt, valid = data.pad_left([e.prompt_ids for e in examples], 0)
    for (method, parameter), values in configs.items():
        expected = decode(model, prompt, valid, DecodeConfig(16, 8, **whole, **values)).steps
        assert row_of(found, method, parameter)["steps"] == pytest.approx(sum(expected) / 4), method
    assert len({row_of(found, *key)["steps"] for key in configs}) > 2


def row_of(report: dict, method: str, parameter: float | None = None, task: str = "all") -> dict:
    (row,) = [r for r in report["results"] if (r["task"], r["method"], r["parameter"]) == (task, method, parameter)]
    return row


@pytest.mark.parametrize("adapter", [False, True])
def test_report_numbers_are_what_the_recipe_makes_them(tmp_path_factory, adapter):
    found = json.loads((finished(tmp_path_factory, lora=adapter).out / "report.json").read_text())
    teacher, student, summary = row_of(found, "teacher"), row_of(found, "student", 0.5), found["summary"]
    assert teacher["accuracy"] == 0.5 and teacher["steps"] == teacher["forwards"] == mini.BUDGET and teacher["commit_forwards"] == 0
    for task in ("copy", "reverse"):
        assert row_of(found, "teacher", task=task)["accuracy"] == 0.5
    assert row_of(found, "teacher_truncated", 4)["steps"] == 4
    assert 1 <= student["commit_forwards"] <= 2 and student["forwards"] == student["steps"], "a commit shares a step's forward"
    uncached = row_of(found, "student_uncached", 0.5)
    assert uncached["commit_forwards"] == 0
    for key in ("accuracy", "steps", "output_tokens", "tpf"):
        assert uncached[key] == student[key], "the cache changes no token"
    assert summary["teacher_accuracy"] == 0.5 and summary["student_accuracy"] == student["accuracy"]
    assert summary["step_reduction"] == pytest.approx(teacher["steps"] / student["steps"])
    assert summary["latency_speedup"] == pytest.approx(teacher["latency_s"]["median"] / student["latency_s"]["median"])
    assert summary["tpf"] == student["tpf"]
    cut = max(2, round(student["steps"]))
    assert summary["truncated_accuracy"] == row_of(found, "teacher_truncated", cut)["accuracy"]


def test_report_md_has_a_table_a_task(full):
    found, text = json.loads((full.out / "report.json").read_text()), (full.out / "report.md").read_text()
    for task in ("all", "copy", "reverse"):
        assert f"## {task}\n" in text
    assert text.count("| student, cached |") == 3 * 3 + 3 + 1, "three thresholds in three tables of results and in that of latency; AUP"
    assert f"teacher {found['summary']['teacher_accuracy']:.1%} in {mini.BUDGET:.1f}" in text


def samples(out) -> dict[str, list[dict]]:
    held: dict[str, list[dict]] = {}
    for line in (out / "samples.jsonl").read_text().splitlines():
        row = json.loads(line)
        held.setdefault(row.pop("method"), []).append({key: row[key] for key in ("prompt", "text", "correct", "steps", "output_tokens")})
    return held


def test_the_teachers_rows_are_those_of_the_plain_teacher_and_the_students_are_not(lora):
    """The adapter sits on the teacher's own weights; it must be off when the teacher is measured, and on for the student."""
    import contextlib

    from cdlm.evaluate.run import Method, score

    teacher = families.load(lora.recipe.parent / "teacher")
    tokenizer = families.load_tokenizer(lora.recipe.parent / "teacher", teacher.facts)
    examples = run_of(lora, lora.out).examples(tokenizer, "test", 4)
    whole = {"max_new_tokens": mini.BUDGET, "block_length": mini.BLOCK}
    full_attention = {**whole, "block_causal": False, "use_cache": False}
    plain = {
        "teacher": DecodeConfig(**full_attention, tokens_per_step=1, stop_at_eos=False),
        "teacher_truncated(4)": DecodeConfig(**full_attention, steps=4, stop_at_eos=False),
        "teacher_threshold(0.9)": DecodeConfig(**full_attention, confidence_threshold=0.9, stop_at_eos=False),
        "teacher_threshold_stop(0.9)": DecodeConfig(**full_attention, confidence_threshold=0.9),
        "teacher_block_causal": DecodeConfig(**whole, tokens_per_step=1),
        "student(0.9)": DecodeConfig(**whole, confidence_threshold=0.9),
    }
    said = samples(lora.out)
    for label, config in plain.items():
        rows = score(Method(label, None, config, teacher, contextlib.nullcontext), examples, tokenizer, 3)
        expected = [
            {"prompt": example.prompt, **{key: asdict(row)[key] for key in ("text", "correct", "steps", "output_tokens")}}
            for example, row in zip(examples, rows, strict=True)
        ]
        assert (said[label] == expected) is not label.startswith("student"), label


def test_training_changes_the_weights_it_should(full, lora):
    from safetensors.torch import load_file

    teacher = load_file(full.recipe.parent / "teacher" / "model.safetensors")
    student = load_file(full.out / "student" / "model.safetensors")
    assert set(student) == set(teacher)
    assert all(not torch.equal(student[name], teacher[name]) for name in teacher)
    adapter = load_file(lora.out / "student" / "adapter_model.safetensors")
    assert {name.split(".")[-3] for name in adapter} == set(mini.LORA["targets"])
    assert all(bool(tensor.any()) for name, tensor in adapter.items() if "lora_B" in name)
    merged = load_file(lora.out / "export" / "model.safetensors")
    touched = {name for name in teacher if not torch.equal(merged[name], teacher[name])}
    assert {name.split(".")[-2] for name in touched} == set(mini.LORA["targets"])


def test_an_mdlm_recipe_has_no_collect_stage_and_exports_a_teacher(full, tmp_path, capsys):
    folder = tmp_path / "scratch"
    shutil.copytree(full.recipe.parent, folder, ignore=shutil.ignore_patterns("out"))
    values = mini.values()
    del values["collect"], values["model"], values["train"]["dlm_weight"]
    values["scratch"] = {"config": "teacher/config.json", "tokenizer": "teacher", "init": "fan_in"}
    values["train"] |= {"objective": "mdlm", "steps": 2}
    values["evaluate"] = {"methods": ["teacher", "teacher_threshold"], "thresholds": [0.5], "num_prompts": 2, "latency_prompts": 1}
    (folder / "mini.yaml").write_text(yaml.safe_dump(values))
    out = folder / "out"
    assert cli.main(["distill", str(folder / "mini.yaml"), "--out", str(out)]) == 0
    assert not (out / "trajectories").exists() and not (out / "export" / "custom_generate").exists()
    found = json.loads((out / "report.json").read_text())
    assert found["summary"]["student_accuracy"] is None and found["summary"]["teacher_accuracy"] is not None
    assert families.load(out / "export").facts.mask_token_id == 1
    capsys.readouterr()
    assert cli.main(["collect", str(folder / "mini.yaml"), "--out", str(out)]) == 2
    assert "no collect stage" in capsys.readouterr().err


def test_latency_prompts_are_taken_from_the_groups_in_turn():
    rows = [data.Example(i, group, "", "", [3], [4]) for i, group in enumerate("aaaabbc")]
    assert [e.index for e in methods.spread(rows, 5)] == [0, 4, 6, 1, 5]
    assert [e.index for e in methods.spread(rows, 99)] == [0, 4, 6, 1, 5, 2, 3]


def test_a_student_killed_before_it_was_placed_is_not_trained_one_step_more(full, tmp_path, monkeypatch):
    """Five steps are no multiple of the two of an epoch; the last checkpoint holds all of them."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for out in (whole, broken):
        shutil.copytree(full.out / "trajectories", out / "trajectories")
    values = ("train.steps=5", "train.save_steps=5", "train.batch_size=5", "train.accumulation=1")
    stages.train(run_of(full, whole, *values))
    with monkeypatch.context() as patch:
        patch.setattr(stages, "_save_student", die)
        with pytest.raises(Killed):
            stages.train(run_of(full, broken, *values))
    assert (broken / "checkpoints" / "checkpoint-5").is_dir()
    stages.train(run_of(full, broken, *values))
    assert (whole / "student" / "model.safetensors").read_bytes() == (broken / "student" / "model.safetensors").read_bytes()


def test_a_batch_larger_than_what_there_is_to_train_on_is_refused(full, tmp_path):
    shutil.copytree(full.out / "trajectories", tmp_path / "trajectories")
    with pytest.raises(ValueError, match=r"train\.batch_size 64 x train\.accumulation 2 = 128 rows; there are 12 rows to train on"):
        stages.train(run_of(full, tmp_path, "train.batch_size=64"))
    assert not (tmp_path / "student").exists()


def test_a_conflict_in_a_later_stage_is_found_before_any_work(full, tmp_path, capsys):
    shutil.copytree(full.out, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "student")
    before = snapshot(tmp_path / "run")
    changed = ["distill", str(full.recipe), "--out", str(tmp_path / "run"), "--set", "evaluate.repeats=2"]
    assert cli.main(changed) == 2
    assert "evaluate.repeats" in capsys.readouterr().err
    assert snapshot(tmp_path / "run") == before


def test_a_shard_that_lost_its_hidden_rows_is_made_again(full, tmp_path):
    shutil.copytree(full.out / "trajectories", tmp_path / "trajectories")
    before = contents(tmp_path / "trajectories")
    (tmp_path / "trajectories" / "manifest.json").unlink()
    (tmp_path / "trajectories" / "shard-00000.safetensors").unlink()
    stages.collect(run_of(full, tmp_path))
    assert contents(tmp_path / "trajectories") == before


def test_trajectories_do_not_depend_on_the_test_questions(full, tmp_path):
    run = run_of(full, full.out, f"data.test={full.recipe.parent / 'train.jsonl'}")
    assert runs.is_done(run, "collect") and runs.is_done(run, "train")
    with pytest.raises(ValueError, match="test: "):
        runs.is_done(run, "evaluate")


def test_an_autoregressive_model_becomes_a_block_diffusion_model(full, tmp_path):
    """Two recipes: ar from nothing, whose export stock transformers decodes as measured; then bd3lm on a causal LM without a mask token."""

    folder = tmp_path / "a2d"
    shutil.copytree(full.recipe.parent, folder, ignore=shutil.ignore_patterns("out"))
    values = mini.values()
    del values["collect"], values["model"], values["train"]["dlm_weight"]
    measured = {"thresholds": [0.5], "num_prompts": 2, "latency_prompts": 1}
    values["scratch"] = {"config": "teacher/config.json", "tokenizer": "teacher", "init": "fan_in"}
    values["train"] |= {"objective": "ar", "steps": 2}
    values["evaluate"] = measured
    (folder / "ar.yaml").write_text(yaml.safe_dump(values))
    assert cli.main(["distill", str(folder / "ar.yaml"), "--out", str(folder / "ar")]) == 0
    facts = families.load(folder / "ar" / "export").facts
    assert (facts.block_length, facts.logit_shift, facts.prompt_attention) == (1, True, "causal")
    found = json.loads((folder / "ar" / "report.json").read_text())
    assert {row["method"] for row in found["results"]} == {"autoregressive"}
    assert row_of(found, "autoregressive")["steps"] == row_of(found, "autoregressive")["output_tokens"]

    del values["scratch"]
    values |= {"model": "ar/export", "family": "causal"}
    values["train"] |= {"objective": "bd3lm", "complementary": True}
    (folder / "bd.yaml").write_text(yaml.safe_dump(values))
    assert cli.main(["distill", str(folder / "bd.yaml"), "--out", str(folder / "bd")]) == 0
    facts = families.load(folder / "bd" / "export").facts
    assert (facts.block_length, facts.logit_shift, facts.prompt_attention) == (mini.BLOCK, True, "causal")
    assert (folder / "bd" / "export" / "custom_generate" / "generate.py").is_file()
    assert "BD3-LM" in (folder / "bd" / "export" / "README.md").read_text()
    again = json.loads((folder / "bd" / "report.json").read_text())
    assert {row["method"] for row in again["results"]} == set(recipe.METHODS_OF["bd3lm"])
    assert row_of(again, "autoregressive")["accuracy"] == row_of(found, "autoregressive")["accuracy"]
    assert row_of(again, "student", 0.5)["steps"] == row_of(again, "student_uncached", 0.5)["steps"]


@pytest.mark.parametrize("lora", [False, True])
def test_a_student_of_a_model_without_a_mask_token_carries_its_own(full, tmp_path, lora):
    """A causal LM with the small world's words but no mask; the student folder (or the base with the adapter) has one in a new row."""
    from test_causal import save

    folder = tmp_path / "a2d"
    shutil.copytree(full.recipe.parent, folder, ignore=shutil.ignore_patterns("out"))
    save(folder / "lm", vocab=58, config={"eos_token_id": 2, "pad_token_id": 0})
    for file in (TINY / "tokenizer").iterdir():
        text = file.read_text().replace('"mask_token": "<|mask|>",', "").replace("<|mask|>", "<|spare|>")
        (folder / "lm" / file.name).write_text(text)
    values = mini.values(lora=lora)
    del values["collect"], values["train"]["dlm_weight"]
    values |= {"model": "lm", "family": "causal"}
    values["train"] |= {"objective": "bd3lm", "steps": 2}
    values["evaluate"] = {"methods": ["student"], "thresholds": [], "num_prompts": 2, "latency_prompts": 1}
    (folder / "bd.yaml").write_text(yaml.safe_dump(values))
    assert cli.main(["distill", str(folder / "bd.yaml"), "--out", str(folder / "out")]) == 0
    exported = families.load(folder / "out" / "export")
    assert exported.facts.mask_token_id == 58 == exported.head.weight.shape[0] - 1
    assert families.load_tokenizer(folder / "out" / "export", exported.facts).mask_token == "<|mask|>"


def test_what_needs_a_causal_model_says_so_before_any_work(full, tmp_path, capsys):
    values = mini.values()
    del values["collect"], values["train"]["dlm_weight"]
    for objective, asked_by in (("ar", "objective ar"), ("bd3lm", "evaluate.methods autoregressive")):
        values["train"]["objective"] = objective
        path = full.recipe.parent / f"refused-{objective}.yaml"
        path.write_text(yaml.safe_dump({**values, "evaluate": {}}))
        assert cli.main(["distill", str(path), "--out", str(tmp_path / objective)]) == 2
        assert f"{asked_by} needs a causal model with shifted logits (family causal)" in capsys.readouterr().err
        assert not (tmp_path / objective / "student").exists()
        path.unlink()


def test_rows_are_grouped_by_the_recipes_batch_whatever_a_process_takes_of_it(tmp_path, monkeypatch):
    """As two processes deal them out: forwards of half the rows, in the order of whole ones (see test_trainer)."""
    from transformers import TrainerCallback

    seen = []
    run = Run(recipe.load(mini.write(tmp_path), ["train.batch_size=4", "train.accumulation=1", "train.steps=1"]), tmp_path / "out")
    run.say = seen.append
    run.out.mkdir()
    stages.collect(run)
    monkeypatch.setattr(stages, "deal_rows", lambda batch_size, accumulation, processes: (batch_size // 2, 2 * accumulation))
    groups = []

    def watch(trainer):
        groups.append((trainer.grouped, trainer.args.train_batch_size))
        return TrainerCallback()

    stages.train(run, watch)
    assert groups == [(4, 2)]


def test_what_speaks_of_another_student_goes_when_a_new_one_comes(full, tmp_path):
    """Report, export and the note of a push; the trajectories stay."""
    out = tmp_path / "out"
    shutil.copytree(full.out, out)
    for name in ("push.request.json", "push.sha256"):
        (out / name).write_text("{}")
    shutil.rmtree(out / "student")
    stages.train(run_of(full, out))
    assert sorted(path.name for path in out.iterdir()) == ["log.jsonl", "log.sha256", "student", "trajectories"]


def test_what_is_collected_already_needs_no_room(full, tmp_path, monkeypatch):
    """100 bytes more are asked than the disk has; 200 are there."""
    run = runs.Run(recipe.load(full.recipe), tmp_path / "out", say=lambda text: None)
    run.trajectories.mkdir(parents=True)
    monkeypatch.setattr(stages.shutil, "disk_usage", lambda place: SimpleNamespace(free=2**30))
    with pytest.raises(ValueError, match=r"collect needs 1\.0 GiB for logits; .* has 1\.0 GiB free"):
        stages._require_room(run, 2**30 + 100, "logits")
    (run.trajectories / "shard-00000.safetensors").write_bytes(bytes(200))
    stages._require_room(run, 2**30 + 100, "logits")
