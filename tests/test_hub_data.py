"""Data sets of the Hub, read by the real `datasets` from a Hub on this machine, each time in a process of its own."""

import json
import os
import subprocess
import sys

import mini
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from conftest import ROOT
from hub_fake import serve

pytest.importorskip("datasets")

OLD, NEW = "a" * 40, "b" * 40
READ = """
import sys, time
from cdlm import data
for value in sys.argv[1:]:
    began = time.monotonic()
    try:
        rows, found = data.load_hub(data.parse_hub(value, "train"))
        print("read", found.commit, len(rows), rows[0]["prompt"])
    except ValueError as error:
        print("error", error)
"""
CLI = """
import contextlib, io, json, sys
from cdlm import cli
for command in json.loads(sys.argv[1]):
    printed, wrong = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(wrong):
        status = cli.main(command)
    print(json.dumps([status, printed.getvalue(), wrong.getvalue()]))
"""


def run(code, folder, endpoint, *arguments, offline=False):
    """Python in a new process, which asks the given Hub."""
    environment = {
        **os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(folder / "hf-home"), "HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": str(int(offline)), "PYTHONPATH": str(ROOT), "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], cwd=folder, env=environment, capture_output=True, text=True, timeout=120,
    )


def commands(folder, endpoint, *lists):
    """Commands one after the other, in one process: status, what it printed, and its error line, of each."""
    done = run(CLI, folder, endpoint, json.dumps([[str(word) for word in words] for words in lists]))
    assert done.returncode == 0, done.stderr
    return [(status, out, "".join(line for line in err.splitlines(True) if line.startswith("cdlm: error")))
            for status, out, err in map(json.loads, done.stdout.splitlines())]  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A teacher and a recipe, and the same questions as a data set with two configurations; test rows have chats."""
    folder = tmp_path_factory.mktemp("hub-data")
    mini.write(folder)
    repository = folder / "repository"
    (repository / "main").mkdir(parents=True)
    (repository / "other").mkdir()
    for split in ("train", "test"):
        rows = [json.loads(line) for line in (folder / f"{split}.jsonl").read_text().splitlines()]
        for row in rows:
            row["chat"] = [{"from": "human", "value": row["prompt"]}, {"from": "gpt", "value": row["answer"]}]
        pq.write_table(pa.Table.from_pylist(rows), repository / "main" / f"{split}.parquet")
    pq.write_table(pa.Table.from_pylist([{"prompt": "another", "answer": "b"}]), repository / "other" / "train.parquet")
    configurations = [
        {"config_name": name, "data_files": [{"split": s, "path": f"{name}/{s}.parquet"} for s in splits], "default": name == "main"}
        for name, splits in (("main", ["train", "test"]), ("other", ["train"]))
    ]
    (repository / "README.md").write_text(f"---\n{yaml.safe_dump({'license': 'mit', 'configs': configurations})}---\n")
    with serve(repository, "someone/questions", {"main": NEW, "v1": OLD}) as (endpoint, asked):
        yield folder, endpoint, asked


def test_a_split_of_a_revision_is_read_with_its_commit(world, tmp_path):
    _, endpoint, asked = world
    first = json.loads((world[0] / "train.jsonl").read_text().splitlines()[0])["prompt"]
    done = run(READ, tmp_path, endpoint, "hub:someone/questions@main", f"hub:someone/questions@{OLD}:train[:2]",
               "hub:someone/questions/other@v1")  # fmt: skip
    assert done.stdout.splitlines() == [f"read {NEW} 6 {first}", f"read {OLD} 2 {first}", f"read {OLD} 1 another"], done.stderr
    assert not [path for path in asked if path.endswith(".py") and path.startswith("GET")]
    offline = run(READ, tmp_path, endpoint, f"hub:someone/questions/other@{OLD}", f"hub:someone/questions/other@{NEW}", offline=True)
    read, refused = offline.stdout.splitlines()
    assert read == f"read {OLD} 1 another"
    assert refused.startswith(f"error data set someone/questions at revision {NEW}: the local cache gives commit {OLD}")


def test_what_is_not_there_is_one_error_that_names_it(world, tmp_path):
    values = ["hub:someone/question@main", "hub:someone/questions@v9", "hub:someone/questions/none@main", "hub:someone/questions@main:dev"]
    done = run(READ, tmp_path, world[1], *values)
    lines = done.stdout.splitlines()
    assert len(lines) == 4, done.stderr
    assert lines[0] == "error the Hub has no data set someone/question at revision main, or it is private and no token is set"
    assert lines[1] == "error the Hub has no revision 'v9' of the data set someone/questions"
    assert lines[2].startswith("error data set someone/questions at revision main, split train, can't be read: ") and "none" in lines[2]
    assert 'split dev, can\'t be read: Unknown split "dev"' in lines[3]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("endpoint", "offline"), [("http://127.0.0.1:9", False), ("http://nowhere.invalid", False), ("http://x", True)])
def test_a_hub_out_of_reach_is_one_error_without_retries(tmp_path, endpoint, offline):
    done = run(READ, tmp_path, endpoint, "hub:someone/questions@main", offline=offline)
    assert len(done.stdout.splitlines()) == 1 and done.stdout.startswith("error "), done.stderr
    assert "data set someone/questions at revision main" in done.stdout and "Retry" not in done.stderr


def test_a_run_from_questions_of_the_hub(world, tmp_path):
    """Collect and train; the commit is in the notes, main is said to move, and another commit is another request."""
    folder, endpoint, _ = world
    values = mini.values()
    values["model"] = str(folder / "teacher")
    values["data"] |= {"prompts": "hub:someone/questions@main", "test": f"hub:someone/questions/main@{NEW}",
                       "prompt_key": "chat", "answer_key": "chat"}  # fmt: skip
    (tmp_path / "hub.yaml").write_text(yaml.safe_dump(values))
    collect = ["collect", "hub.yaml", "--out", "out"]
    plan, done, again, other = commands(
        tmp_path, endpoint, ["distill", "hub.yaml", "--dry-run"], collect, collect,
        [*collect, "--set", "data.prompts=hub:someone/questions@v1"],
    )
    assert plan[0] == 0 and "12 trajectories (6 prompts x 2 temperatures)" in plan[1]
    said = f"data.prompts: hub:someone/questions@main:train is commit {NEW} today; name the commit and the run is repeatable"
    assert done[0] == 0 and done[1].count(said) == 1 and "data.test" not in done[1]
    note = json.loads((tmp_path / "out" / "trajectories" / "collection.json").read_text())
    assert note["prompts"] == f"hub:someone/questions@{NEW}:train"
    assert again[0] == 0 and "collect: done already" in again[1]
    assert other[0] == 2 and other[2].count("\n") == 1
    assert f"prompts: 'hub:someone/questions@{NEW}:train' there, 'hub:someone/questions@{OLD}:train' now" in other[2]


def test_a_wrong_name_in_a_recipe_is_one_line_before_any_work(world, tmp_path):
    values = mini.values() | {"model": str(world[0] / "teacher")}
    values["data"] |= {"prompts": str(world[0] / "train.jsonl"), "test": str(world[0] / "test.jsonl")}
    (tmp_path / "hub.yaml").write_text(yaml.safe_dump(values))
    distill = ["distill", "hub.yaml", "--out", "out", "--set"]
    form, name = commands(
        tmp_path, world[1], [*distill, "data.prompts=hub:someone/questions"], [*distill, "data.test=hub:someone/nothing@main"]
    )
    assert form[0] == name[0] == 2
    assert "'hub:someone/questions' is not of the form hub:USER/NAME" in form[2] and form[2].count("\n") == 1
    assert "the Hub has no data set someone/nothing at revision main" in name[2] and name[2].count("\n") == 1
    assert not list((tmp_path / "out").rglob("*.parquet"))


def test_published_trajectories_are_imported_from_the_hub(world, tmp_path):
    folder = world[0]
    prompt, answer = [9, 10], [5, 6, 2, 2]
    left_to_right = [prompt + answer[:k] + [1] * (4 - k) for k in range(1, 5)]
    good = {"idx": 0, "prompt_ids": prompt, "trajectory": left_to_right, "is_correct": True}
    row = {**good, "trajectory": [[*prompt, 7, 1, 1, 1], *left_to_right[1:]]}
    (tmp_path / "repository").mkdir()
    pq.write_table(pa.Table.from_pylist([good, row, good]), tmp_path / "repository" / "train.parquet")
    with serve(tmp_path / "repository", "someone/trajectories", {"main": OLD}) as (endpoint, _):
        command = ["import", "d3llm", "hub:someone/trajectories@main", "out", "--model", folder / "teacher", "--block-length", "2"]
        ((status, printed, wrong),) = commands(tmp_path, endpoint, command)
    assert status == 0, wrong
    assert "import: 2 of 3 trajectories kept; screened: {'token_changed': 1}" in printed
    note = json.loads((tmp_path / "out" / "collection.json").read_text())
    assert note["source_hash"] == OLD and note["decode"] == {"max_new_tokens": 4, "block_length": 2}
