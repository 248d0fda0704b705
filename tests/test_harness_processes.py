"""`cdlm eval` in processes of its own: two that share the work, and one that is killed and started again."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT
from mini import questions, save_teacher

from cdlm import cli


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes") / "teacher"
    save_teacher(folder)
    return folder


def start(arguments: list[str], folder: Path, launcher: tuple[str, ...] = ()) -> subprocess.Popen:
    """The command in a process of its own."""
    environment = {
        **os.environ, "HF_HOME": str(folder / "hf-home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
    }
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", "cdlm.cli", "eval", *arguments], cwd=folder, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def flags(file: Path, out: Path, *more: str) -> list[str]:
    return [
        "--tasks", "small_world", "--metadata", f"small_world_file={file}", "--apply_chat_template", "--log_samples",
        "--output_path", str(out), "--model_args", "confidence_threshold=0.5", "block_length=8", *more,
    ]  # fmt: skip


def read(out: Path) -> tuple[dict, list[dict]]:
    """Results and samples, without what differs between any two runs: times, batches, and whether a sample was there before."""
    (path,) = out.rglob("results_*.json")
    (samples,) = [file.read_text().splitlines() for file in out.rglob("samples_*.jsonl")]
    found, rows = json.loads(path.read_text()), [json.loads(line) for line in samples]
    for row in rows:
        for cost in row["costs"]:
            assert cost.pop("seconds") > 0 and cost.pop("batch") > 0
            cost.pop("finished_before")
    assert found["results"]["small_world"].pop("tps,none") > 0
    return found, rows


def test_two_processes_give_the_results_of_one(teacher, tmp_path):
    """Five sampled questions, two of them equal: three for the first process, two for the second; the answers to 0 and 3 are right."""
    rows = questions(5, seed=7)
    rows[3]["prompt"] = rows[0]["prompt"]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = ["--batch_size", "2", "--gen_kwargs", "max_gen_toks=16", "do_sample=true", "temperature=1.0"]
    assert cli.main(["eval", str(teacher), *flags(file, tmp_path / "asked", *more)]) == 0
    texts = [row["resps"][0][0] for row in read(tmp_path / "asked")[1]]
    assert texts[0] != texts[3]  # equal prompts, samples of their own
    for i in (0, 3):
        rows[i]["answer"] = texts[i]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cli.main(["eval", str(teacher), *flags(file, tmp_path / "one", *more)]) == 0
    config = str(ROOT / "recipes" / "accelerate" / "ddp.yaml")
    launcher = ("-m", "accelerate.commands.launch", "--config_file", config, "--num_processes", "2", "--main_process_port", "0")
    out, err = start([str(teacher), *flags(file, tmp_path / "two", *more)], tmp_path, launcher).communicate(timeout=300)
    assert out.count("|small_world|") == 1, err
    (one, samples), (two, shared) = read(tmp_path / "one"), read(tmp_path / "two")
    assert samples == shared and [row["doc_id"] for row in shared] == [0, 1, 2, 3, 4]
    assert [row["acc"] for row in shared] == [1, 0, 0, 1, 0]
    assert two["results"]["small_world"] == pytest.approx(one["results"]["small_world"]) and one["task_hashes"] == two["task_hashes"]
    assert (one["config"]["cdlm"].pop("processes"), two["config"]["cdlm"].pop("processes")) == (1, 2)
    for found in (one, two):
        del found["config"]["cdlm"]["command"]
    assert one["config"] == two["config"]
    counts = {file.name: len(file.read_text().splitlines()) for file in (tmp_path / "two").glob("finished*")}
    assert counts == {"finished.jsonl": 3, "finished.rank1.jsonl": 2}

    # One process goes on from what two have finished: nothing is left to do.
    assert cli.main(["eval", str(teacher), *flags(file, tmp_path / "two", *more)]) == 0
    assert {file.name: len(file.read_text().splitlines()) for file in (tmp_path / "two").glob("finished*")} == counts


def test_a_killed_run_goes_on(teacher, tmp_path, capsys):
    """SIGKILL after the third of fourteen samples; the second run decodes the others only, says the time left, and ends as one that was not
    killed."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in questions(14, seed=8)))
    more = ["--gen_kwargs", "max_gen_toks=96"]
    whole = ["stop_at_eos=false", *more]
    kept = tmp_path / "killed" / "finished.jsonl"
    child = start([str(teacher), *flags(file, tmp_path / "killed", *whole)], tmp_path)
    try:
        deadline = time.monotonic() + 240
        while not (kept.is_file() and kept.read_bytes().count(b"\n") >= 3) and child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()
    assert child.returncode == -signal.SIGKILL
    done = kept.read_bytes().count(b"\n")
    assert 3 <= done < 14
    before = kept.read_bytes()[: kept.read_bytes().rindex(b"\n") + 1]
    assert cli.main(["eval", str(teacher), *flags(file, tmp_path / "killed", *whole)]) == 0
    said = capsys.readouterr().err
    assert f"eval: {done} of 14 samples were finished before" in said and f"eval: {14 - done} of {14 - done} samples in" in said
    assert kept.read_bytes().startswith(before) and len(kept.read_text().splitlines()) == 14
    assert cli.main(["eval", str(teacher), *flags(file, tmp_path / "whole", *whole)]) == 0
    (killed, rows), (not_killed, wanted) = read(tmp_path / "killed"), read(tmp_path / "whole")
    assert rows == wanted and killed["results"] == not_killed["results"]
