"""Pushing to a Hub that runs in a thread: what arrives is what was listed and works, nothing else arrives, a failure loses nothing.

The real huggingface_hub against tests/fake_hub.py, in another process: it reads the Hub's address when it is imported.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import mini
import pytest
import torch
import yaml
from conftest import ROOT
from fake_hub import TOKEN, FakeHub, Repository
from mini import contents, finished, snapshot

from cdlm import cli, families, hub, recipe, runs, stages
from cdlm.data import prompt_ids
from cdlm.decode import DecodeConfig
from cdlm.decode import decode as generate
from cdlm.families import adapter as adapters
from cdlm.families.base import DiffusionLM
from cdlm.trainer import add_lora

# Runs commands of cdlm that come as lines of JSON: arguments, and the access token that the environment has meanwhile.
WORKER = """
import contextlib, io, json, os, sys, time, traceback

time.sleep = lambda seconds: None  # the client's waits between its tries
from cdlm import cli

answers = sys.stdout
for line in sys.stdin:
    asked = json.loads(line)
    os.environ["HF_TOKEN"] = asked["token"]
    out, err, code = io.StringIO(), io.StringIO(), 1
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main(asked["arguments"])
        except BaseException:
            traceback.print_exc()
    print(json.dumps({"returncode": code, "stdout": out.getvalue(), "stderr": err.getvalue()}), file=answers, flush=True)
"""
QUESTIONS = ["copy:5naj", "reverse:d2arpvnw", "sort:rxabf705ys"]

# Runs pieces of code as cards have them, each for one question after the other.
CARDS = """
import json
from pathlib import Path

found = []
for code in json.loads(Path("codes.json").read_text()):
    said = []
    for question in json.loads(sys.argv[1]):
        exec(code.replace('"..."', repr(question)).replace("print(", "said.append("))
    found.append(said)
print("FOUND" + json.dumps(found))
"""


def answers_of(tmp_path: Path, *codes: str, **process: object) -> list[list[str]]:
    """What each piece of code says to the questions, in a new process."""
    (tmp_path / "codes.json").write_text(json.dumps(codes))
    ended = mini.run_python(CARDS, json.dumps(QUESTIONS), folder=tmp_path, **process)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.split("FOUND")[1])


@pytest.fixture(scope="module")
def running():
    with FakeHub() as hub_in_a_thread:
        yield hub_in_a_thread


@pytest.fixture
def server(running):
    """An empty Hub."""
    for part in (running.repositories, running.objects, running.faults, running.requests):
        part.clear()
    return running


@pytest.fixture(scope="module")
def cdlm(running, tmp_path_factory):
    """`cdlm(*arguments)` in a process that takes the server for the Hub; what it printed, and its exit status."""
    folder = tmp_path_factory.mktemp("worker")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HOME": str(folder), **online(running)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (folder / "stderr").open("w") as stderr, subprocess.Popen(
        [sys.executable, "-c", WORKER], cwd=folder, env=environment, stderr=stderr, **pipes
    ) as worker:

        def run(*arguments: object, token: str = TOKEN) -> SimpleNamespace:
            worker.stdin.write(json.dumps({"arguments": [str(a) for a in arguments], "token": token}) + "\n")
            worker.stdin.flush()
            return SimpleNamespace(**json.loads(worker.stdout.readline()))

        yield run
        worker.stdin.close()


@pytest.fixture(scope="module")
def push(cdlm):
    return lambda *arguments, **more: cdlm("push", *arguments, **more)


@pytest.fixture
def done(tmp_path_factory):
    return finished(tmp_path_factory, lora=True)


@pytest.fixture
def exported(done, tmp_path):
    """A copy of an exported folder, its adapter in it."""
    shutil.copytree(done.out / "export", tmp_path / "export")
    return tmp_path / "export"


def online(server: FakeHub, **variables: str) -> dict[str, str]:
    """The environment of a process that takes the fake Hub for the Hub."""
    return {"HF_ENDPOINT": server.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": TOKEN, **variables}


def error_line(ended) -> str:
    """The one line that says what went wrong."""
    _, *lines = ended.stderr.split("cdlm: error: ")  # before it: bars of huggingface_hub
    assert ended.returncode == 2 and len(lines) == 1 and "Traceback" not in ended.stderr, ended.stderr
    assert lines[0].count("\n") == 1 and TOKEN not in ended.stderr + ended.stdout
    return lines[0]


def expected(folder: Path, repo_id: str, *left_out: str) -> dict[str, bytes]:
    """What should arrive of a folder: every file as it is but its checksums, the card with the repository's name in it."""
    out = {name: data for name, data in contents(folder).items() if not name.startswith((*left_out, "SHA256SUMS"))}
    out["README.md"] = out["README.md"].replace(b"PATH_OR_REPO", repo_id.encode())
    return out


def received(server: FakeHub, repo_id: str, folder: Path) -> Path:
    """What arrived, as a folder."""
    for name, data in server.repositories[repo_id].files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def serve(server: FakeHub, repo_id: str, folder: Path) -> None:
    server.repositories[repo_id] = Repository(files=contents(folder))


def said_by(folder: Path) -> list[str]:
    """What the merged student answers, decoded by cdlm."""
    model = families.load(folder)
    tokenizer = families.load_tokenizer(folder, model.facts)
    config = DecodeConfig(mini.BUDGET, mini.BLOCK, confidence_threshold=mini.THRESHOLD)
    answers = []
    for question in QUESTIONS:
        ids = torch.tensor([prompt_ids(tokenizer, question, chat_template=True)])
        out = generate(model, ids, torch.ones_like(ids, dtype=torch.bool), config)
        answers.append(tokenizer.decode(out.ids_BN[0], skip_special_tokens=True))
    assert len(set(answers)) == len(answers), "the answers can be told apart"
    return answers


def card_code(card: str) -> str:
    return card.split("```python\n")[1].split("```")[0]


# ---- what arrives ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("private", [True, False])
def test_what_arrives_is_the_folder(push, server, exported, private):
    before = snapshot(exported)
    ended = push(exported, "--repo-id", "me/student", *(["--private"] if private else []))
    assert ended.returncode == 0, ended.stderr
    there = server.repositories["me/student"]
    assert there.files == expected(exported, "me/student", "adapter/")
    assert there.visibility == ("private" if private else "public") and len(there.commits) == 1
    assert snapshot(exported) == before, "the folder here is only read"
    listed = dict(re.findall(r"^  send +([\d,]+)  (.+)$", ended.stdout, re.M))
    assert {name: int(size.replace(",", "")) for size, name in listed.items()} == {name: len(data) for name, data in there.files.items()}
    assert "leave out  adapter/: the adapter; --adapter-only sends it" in ended.stdout
    assert f"{server.url}/me/student/commit/{there.sha}" in ended.stdout


def test_the_list_comes_before_anything_is_sent_and_a_dry_run_sends_nothing(push, server, exported):
    ended = push(exported, "--repo-id", "me/student", "--dry-run", token="")
    assert ended.returncode == 0, ended.stderr
    assert "model.safetensors" in ended.stdout and "leave out  adapter/" in ended.stdout
    assert server.requests == []
    server.faults["POST", "/api/repos/create"] = 500
    assert push(exported, "--repo-id", "me/student").stdout == ended.stdout


def test_a_second_process_decodes_the_same_tokens_from_what_arrived(push, server, exported, tmp_path):
    """Stock transformers, offline, from a folder made of the received files; no cdlm."""
    assert push(exported, "--repo-id", "me/student").returncode == 0
    folder = received(server, "me/student", tmp_path / "received")
    code = card_code((folder / "README.md").read_text()).replace('"me/student"', f'"{folder}"')
    assert answers_of(tmp_path, code, package=False) == [said_by(exported)]


# As a card would load by cdlm.
LOAD = """
import cdlm
from transformers import AutoTokenizer

folder = "NAME"
tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
model = cdlm.load(folder)
assert model.facts.block_length == BLOCK and model.hf.generation_config.max_new_tokens == BUDGET
text = tokenizer.apply_chat_template([{"role": "user", "content": "..."}], tokenize=False, add_generation_prompt=True)
inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
config = cdlm.DecodeConfig(BUDGET, BLOCK, confidence_threshold=THRESHOLD)
out = cdlm.generate(model, inputs["input_ids"], inputs["attention_mask"].bool(), config)
print(tokenizer.decode(out.ids_BN[0], skip_special_tokens=True))
""".replace("BUDGET", str(mini.BUDGET)).replace("BLOCK", str(mini.BLOCK)).replace("THRESHOLD", str(mini.THRESHOLD))


def test_what_was_pushed_is_used_by_its_name(push, server, done, exported, tmp_path):
    """The merged student by its card's code and by cdlm.load; the adapter by its card's code, by PEFT and by cdlm.load, on a base that
    comes from the server too. All answer as the exported folder does."""
    serve(server, "someone/teacher", done.recipe.parent / "teacher")
    before = snapshot(exported)
    for name, arguments in (("me/student", ["--private"]), ("me/adapter", ["--adapter-only"])):
        assert push(exported, "--repo-id", name, *arguments).returncode == 0
    assert snapshot(exported) == before
    there = server.repositories["me/adapter"].files
    assert there == expected(exported / "adapter", "me/adapter")
    assert {adapters.CONFIG, adapters.WEIGHTS, adapters.FACTS, "tokenizer.json", "README.md"} <= set(there)
    assert "config.json" not in there and "model.safetensors" not in there

    student, adapter = (card_code(server.repositories[name].files["README.md"].decode()) for name in ("me/student", "me/adapter"))
    assert 'folder = "me/student"' in student and 'folder = "me/adapter"' in adapter
    by_peft = adapter.replace("from_pretrained(folder)  #", 'from_pretrained("someone/teacher")  #')
    by_peft = by_peft.replace("text =", "from peft import PeftModel\nmodel = PeftModel.from_pretrained(model, folder)\ntext =")
    assert by_peft.count("PeftModel") == 2
    loads = [LOAD.replace("NAME", name) for name in ("me/student", "me/adapter")]
    answers = said_by(exported)
    assert answers != said_by(done.recipe.parent / "teacher"), "the adapter does something"
    assert answers_of(tmp_path, student, adapter, by_peft, *loads, variables=online(server)) == [answers] * 5


def test_no_path_of_this_machine_arrives(push, server, exported, done, tmp_path):
    for name, arguments in (("me/student", []), ("me/adapter", ["--adapter-only"])):
        assert push(exported, "--repo-id", name, *arguments).returncode == 0
        for path, data in server.repositories[name].files.items():
            assert str(done.recipe.parent).encode() not in data and str(tmp_path).encode() not in data, path


def test_the_cards_name_base_and_relation(exported):
    for folder, relation, library in ((exported, "finetune", "transformers"), (exported / "adapter", "adapter", "peft")):
        front = yaml.safe_load((folder / "README.md").read_text().split("---\n")[1])
        assert (front["base_model"], front["base_model_relation"], front["library_name"]) == ("someone/teacher", relation, library)
        assert {"cdlm", "diffusion", "block-diffusion", "custom_generate", "mini"} <= set(front["tags"])
        assert len(front["model-index"][0]["results"]) == 3


def test_results_on_a_benchmark_go_to_eval_results(done, tmp_path):
    out = done.copy(tmp_path / "out")
    shutil.rmtree(out / "export")
    run = runs.Run(recipe.load(done.recipe, ["export.benchmark=someone/questions"]), out, say=lambda text: None)
    stages.export(run)
    report = json.loads((out / "report.json").read_text())
    accuracy = {
        row["task"]: row["accuracy"] for row in report["results"] if (row["method"], row["parameter"]) == ("student", mini.THRESHOLD)
    }
    for folder in (out / "export", out / "export" / "adapter"):
        entries = yaml.safe_load((folder / ".eval_results" / "cdlm.yaml").read_text())
        assert {entry["dataset"]["id"] for entry in entries} == {"someone/questions"}
        assert {entry["dataset"]["task_id"]: entry["value"] for entry in entries} == {
            "default": accuracy["all"], "copy": accuracy["copy"], "reverse": accuracy["reverse"],
        }
        assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", entry["date"]) and "confidence threshold 0.5" in entry["notes"] for entry in entries)
    assert ".eval_results/cdlm.yaml" in hub.pack(out / "export", "me/student").files
    assert not (done.out / "export" / ".eval_results").exists(), "without a benchmark there are none"


# ---- what does not arrive --------------------------------------------------------------------------------------------

FORBIDDEN = {
    "checkpoints/checkpoint-4/optimizer.pt": b"state", "checkpoint-2/model.safetensors": b"state", "optimizer.safetensors": b"state",
    "optimizer.pt": b"state", "scheduler.pt": b"state", "rng_state.pth": b"state", "training_args.bin": b"state",
    "trainer_state.json": b"{}", "pytorch_model.bin": b"pickle", "weights.pkl": b"pickle", "scratch.ckpt": b"pickle",
    "trajectories/shard-00000.safetensors": b"rows", "trajectories/manifest.json": b"{}", "shard-00001.parquet": b"rows",
    "shard-00001.safetensors": b"rows", "hidden.npy": b"rows", "log.jsonl": b"{}", "samples.jsonl": b"{}",
    "request.json": b"{}", "export.request.json": b"{}", "collection.json": b"{}", "manifest.json": b"{}",
    ".env": b"A=b", ".env.local": b"A=b", "prod.env": b"A=b", ".netrc": b"machine", "token": b"x", "hf_token.txt": b"x",
    "credentials.json": b"{}", "my_secret.yaml": b"x", "id_rsa": b"x", "server.pem": b"x", "notes.md": TOKEN.encode(),
    "config.json.partial": b"{", "model.safetensors.partial": b"x", ".git/config": b"x", ".cache/huggingface/x.json": b"{}",
    "cache/config.json": b"{}", "__pycache__/generate.cpython-311.pyc": b"x", "custom_generate/__pycache__/generate.cpython-311.pyc": b"x",
    "wandb/run/config.json": b"{}", ".DS_Store": b"x", "custom_generate/.env": b"A=b", "report.json": b"{}", "unknown.data": b"x",
    "old.safetensors": b"x", "model-00001-of-00002.safetensors": b"x",
}  # fmt: skip


@pytest.mark.parametrize("arguments", [[], ["--adapter-only"]], ids=["merged", "adapter"])
def test_nothing_forbidden_arrives(push, server, exported, tmp_path, arguments):
    source = exported / "adapter" if arguments else exported
    wanted = expected(source, "me/student", "adapter/")
    for name, data in FORBIDDEN.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(data)
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in ("secret.json", "special_tokens_map.json"):
        (outside / name).write_text("{}")
    (source / "added_tokens.json").symlink_to(outside / "special_tokens_map.json")
    (source / "assets").symlink_to(outside, target_is_directory=True)
    (source / "vocab.json").symlink_to(source / ".env")
    (source / "merges.txt").symlink_to(tmp_path / "nowhere")
    (source / "NOTICE").symlink_to("NOTICE")
    os.mkfifo(source / "vocab.txt")
    ended = push(exported, "--repo-id", "me/student", *arguments)
    assert ended.returncode == 0, ended.stderr
    assert server.repositories["me/student"].files == wanted
    left_out = re.findall(r"^  leave out  (.+?): (.+)$", ended.stdout, re.M)
    named = [name for name, _ in left_out]
    for name in [*FORBIDDEN, "added_tokens.json", "assets", "vocab.json", "merges.txt", "vocab.txt", "NOTICE"]:
        assert any(name == known or (known.endswith("/") and name.startswith(known)) for known in named), name
    assert dict(left_out)["added_tokens.json"] == "a link out of the folder" and "hidden" in dict(left_out)["vocab.json"]
    assert set(server.objects.values()) <= set(wanted.values()), "not even as an object that no commit names"


def test_a_link_inside_the_folder_is_sent_as_a_file(exported):
    (exported / "LICENSE").write_text("Apache-2.0")
    (exported / "LICENSE.txt").symlink_to("LICENSE")
    assert {"LICENSE", "LICENSE.txt"} <= set(hub.pack(exported, "me/student").files)


@pytest.mark.parametrize("text", [
    TOKEN, "hf_" + "a" * 34, "ghp_" + "b" * 36, "-----BEGIN OPENSSH PRIVATE KEY-----", "AKIA" + "A1B2C3D4E5F6G7H8", "sk-" + "c" * 40,
    "sk-proj-" + "d_e-" * 10, "glpat-" + "f" * 20,
])  # fmt: skip
@pytest.mark.parametrize("name", ["README.md", "custom_generate/generate.py", "tokenizer_config.json"])
def test_an_access_token_in_a_file_of_the_model_stops_the_push(server, exported, tmp_path, monkeypatch, name, text):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    file = exported / name
    file.write_text(file.read_text().replace("folder", text, 1) if name.endswith(".md") else file.read_text() + f"\n# {text}\n")
    with pytest.raises(ValueError, match=rf"{re.escape(name)} holds what looks like an access token") as refusal:
        hub.pack(exported, "me/student")
    assert text not in str(refusal.value)


@pytest.mark.parametrize("variable", ["HF_TOKEN", "PGPASSWORD", "WANDB_API_KEY"])
def test_secrets_of_the_environment_are_found_whatever_their_form(exported, monkeypatch, variable):
    monkeypatch.setenv(variable, "an-unusual-token")
    (exported / "README.md").write_text("key: an-unusual-token")
    with pytest.raises(ValueError, match=r"README\.md holds"):
        hub.pack(exported, "me/student")


# ---- refused before any request --------------------------------------------------------------------------------------


def no_config(folder):
    (folder / "config.json").unlink()


def pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def truncated(folder):
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])


def missing_shard(folder):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def linked_weights(folder):
    (folder / "model.safetensors").rename(folder.parent / "elsewhere.safetensors")
    (folder / "model.safetensors").symlink_to(folder.parent / "elsewhere.safetensors")


@pytest.mark.parametrize(("break_it", "named"), [
    (no_config, "has no config.json"), (pickled, "is a pickle"), (truncated, "can't be read"),
    (missing_shard, "names model-00002-of-00002.safetensors"), (linked_weights, "a link out of the folder"),
    (shutil.rmtree, "no folder at"),
])  # fmt: skip
def test_what_is_no_model_folder_is_refused(exported, capsys, break_it, named):
    (exported / "SHA256SUMS").unlink()  # as of a folder from elsewhere
    break_it(exported)
    assert cli.main(["push", str(exported), "--repo-id", "me/student"]) == 2
    assert named in capsys.readouterr().err


def test_the_folder_of_a_run_is_refused_and_its_export_named(done, capsys):
    assert cli.main(["push", str(done.out), "--repo-id", "me/student"]) == 2
    assert f"did you mean {done.out / 'export'}?" in capsys.readouterr().err


@pytest.mark.parametrize("repo_id", [
    "student", "me/my/student", "me/stu dent", "me/", "/student", "me/a--b", "me/a..b", "me/.x", "me/x.git", "mé/x",
])
def test_a_bad_repository_name_is_refused(exported, capsys, repo_id):
    assert cli.main(["push", str(exported), "--repo-id", repo_id]) == 2
    assert f"--repo-id is {repo_id!r}; it must have the form user/name" in capsys.readouterr().err


def test_refusals_ask_the_hub_nothing(push, server, exported):
    """No token, no config.json, a bad name, an adapter without a base, a missing --repo-id: not one request."""
    error = error_line(push(exported, "--repo-id", "me/student", token=""))
    assert "HF_TOKEN" in error and "hf auth login" in error and "nothing was sent" in error
    assert "--repo-id is missing" in error_line(push(exported))
    assert "it must have the form user/name" in error_line(push(exported, "--repo-id", "student"))
    (exported / "config.json").unlink()
    assert "has no config.json" in error_line(push(exported, "--repo-id", "me/student"))
    assert server.requests == []


@pytest.mark.parametrize("base", [None, "/models/teacher", "../teacher", "./teacher", "recipes/tiny/teacher"])
def test_an_adapter_on_a_folder_of_this_machine_is_refused(exported, capsys, base):
    file = exported / "adapter" / adapters.CONFIG
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": base}))
    assert cli.main(["push", str(exported), "--repo-id", "me/adapter", "--adapter-only"]) == 2
    error = capsys.readouterr().err
    assert repr(base) in error and ("export.base_model" in error if base else "names no base" in error)


def test_the_adapter_that_training_wrote_is_refused_for_its_base(done, capsys):
    assert cli.main(["push", str(done.out / "student"), "--repo-id", "me/adapter"]) == 2
    assert f"names the base '{done.recipe.parent / 'teacher'}', a folder of this machine" in capsys.readouterr().err


def test_an_export_without_a_base_repository_has_an_adapter_that_is_not_pushed(done, tmp_path, capsys):
    out = done.copy(tmp_path / "out")
    shutil.rmtree(out / "export")
    said = []
    stages.export(runs.Run(recipe.load(done.recipe, ["export.base_model=null"]), out, say=said.append))
    assert any("names no export.base_model, so the adapter's base_model_name_or_path is null" in line for line in said)
    for words in (["push", str(out / "export"), "--repo-id", "me/adapter", "--adapter-only"], ["inspect", str(out / "export" / "adapter")]):
        assert cli.main(words) == 2
        error = capsys.readouterr().err
        assert "names no base" in error and "export.base_model" in error
    assert hub.pack(out / "export", "me/student").weights == ["model.safetensors"], "merged it can go"


def test_the_student_of_a_run_has_no_tokenizer_and_it_is_said_what_has(done, capsys):
    """A LoRA run's student/ is the adapter that training wrote; generate and eval name the export."""
    for words in (["generate", str(done.out / "student"), "--prompt", "copy:ab"],
                  ["eval", str(done.out / "student"), "--tasks", "small_world", "--limit", "1"]):  # fmt: skip
        assert cli.main(words) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert f"{done.out / 'student'} has no tokenizer" in error
        assert f"take {done.out / 'export'}, or {done.out / 'export' / 'adapter'}" in error


def test_a_student_without_lora_has_no_adapter(tmp_path_factory, capsys):
    folder = finished(tmp_path_factory).out / "export"
    assert not (folder / "adapter").exists()
    assert cli.main(["push", str(folder), "--repo-id", "me/adapter", "--adapter-only"]) == 2
    assert "a student without LoRA has no adapter" in capsys.readouterr().err


def test_a_private_push_into_a_public_repository_is_refused(push, server, exported):
    server.repositories["me/student"] = Repository()
    error = error_line(push(exported, "--repo-id", "me/student", "--private"))
    assert "is there already and public" in error
    assert server.repositories["me/student"].files == {} and server.objects == {}


# ---- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "part", "fault", "named"), [
    ("POST", "/api/repos/create", 500, ["500", "no weights arrived"]),
    ("POST", "/api/repos/create", "reset", ["no weights arrived"]),
    ("POST", "/preupload/", 403, ["403", "may not write to me/student", "no weights arrived"]),
    ("POST", "/objects/batch", 500, ["500", "no weights arrived"]),
    ("PUT", "/lfs/", 500, ["500", "no weights arrived"]),
    ("PUT", "/lfs/", "cut", ["no weights arrived"]),
    ("POST", "/api/validate-yaml", 400, ["Invalid metadata in README.md", "model.safetensors arrived and will not be sent again"]),
    ("POST", "/commit/", 500, ["500", "model.safetensors arrived and will not be sent again"]),
    ("POST", "/commit/", "reset", ["model.safetensors arrived"]),
    ("POST", "/commit/", "cut", ["model.safetensors arrived"]),
])  # fmt: skip
def test_a_failed_push_loses_nothing_and_says_how_to_go_on(push, server, exported, method, part, fault, named):
    before = snapshot(exported)
    server.faults[method, part] = fault
    error = error_line(push(exported, "--repo-id", "me/student"))
    assert "the push to me/student failed" in error and "go on with the same command" in error and f"{exported} is as it was" in error
    for text in named:
        assert text in error
    assert snapshot(exported) == before
    assert "me/student" not in server.repositories or server.repositories["me/student"].files == {}, "a commit shows all files or none"

    server.faults.clear()
    server.requests.clear()
    ended = push(exported, "--repo-id", "me/student")
    assert ended.returncode == 0, ended.stderr
    assert server.repositories["me/student"].files == expected(exported, "me/student", "adapter/")
    assert len(server.asked("PUT", "/lfs/")) == (0 if "model.safetensors arrived" in error else 1), "sent again only if it did not arrive"


def test_a_token_that_the_hub_does_not_know(push, server, exported):
    error = error_line(push(exported, "--repo-id", "me/student", token="hf_another"))
    assert "401" in error and "hf auth login" in error and "hf_another" not in error
    assert server.repositories == {}


def test_nobody_listens(server, exported, tmp_path):
    before = snapshot(exported)
    variables = online(server, HF_ENDPOINT="http://127.0.0.1:9")
    command = "from cdlm import cli; sys.exit(cli.main(sys.argv[1:]))"
    ended = mini.run_python(command, "push", exported, "--repo-id", "me/student", folder=tmp_path, variables=variables)
    error = error_line(ended)
    assert "the push to me/student failed" in error and "go on with the same command" in error
    assert snapshot(exported) == before


def test_a_push_that_is_done_changes_nothing_when_done_again(push, server, exported):
    for _ in range(2):
        assert push(exported, "--repo-id", "me/student").returncode == 0
    assert len(server.repositories["me/student"].commits) == 1 and len(server.asked("PUT", "/lfs/")) == 1


def test_a_file_that_the_repository_ignores_is_missed(push, server, exported):
    server.repositories["me/student"] = Repository(ignored={"custom_generate/generate.py"})
    assert "without custom_generate/generate.py" in error_line(push(exported, "--repo-id", "me/student"))


# ---- as a recipe's last stage ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapter_only", [False, True])
def test_the_last_stage_pushes_once(cdlm, server, done, tmp_path, adapter_only):
    out = done.copy(tmp_path / "out")
    section = f"push={{repo_id: me/mini, private: true, adapter_only: {str(adapter_only).lower()}}}"
    arguments = ("distill", done.recipe, "--out", out, "--set", section)
    assert "hf auth login" in error_line(cdlm(*arguments, token=""))
    server.faults["POST", "/commit/"] = 500
    assert "the push to me/mini failed" in error_line(cdlm(*arguments))
    assert not (out / "push.request.json").exists()
    server.faults.clear()
    ended = cdlm(*arguments)
    assert ended.returncode == 0 and "export: done already" in ended.stdout and "push: done in" in ended.stdout, ended.stderr
    source = out / "export" / "adapter" if adapter_only else out / "export"
    assert server.repositories["me/mini"].files == expected(source, "me/mini", "adapter/")
    assert server.repositories["me/mini"].visibility == "private"

    server.requests.clear()
    again = cdlm(*arguments, token="")
    assert again.returncode == 0 and "push: done already" in again.stdout and server.requests == []
    other = cdlm(*arguments, "--set", "push.repo_id=me/other")
    assert "push.repo_id: 'me/mini' there, 'me/other' now" in error_line(other) and server.requests == []


def test_push_takes_a_recipe_or_a_folder(push, server, done, tmp_path):
    out = done.copy(tmp_path / "out")
    arguments = (done.recipe, "--out", out)
    assert "has no push stage" in error_line(push(*arguments))
    listed = push(*arguments, "--repo-id", "me/mini", "--adapter-only", "--dry-run")
    assert listed.returncode == 0 and "adapter_model.safetensors" in listed.stdout and server.requests == []
    assert push(*arguments, "--repo-id", "me/mini", "--private").returncode == 0
    assert server.repositories["me/mini"].files == expected(out / "export", "me/mini", "adapter/")
    assert (out / "push.request.json").is_file()
    assert "--set and --out belong to a recipe" in error_line(push(out / "export", "--out", out))


def test_a_recipe_is_pushed_only_when_its_export_is_there(done, tmp_path, capsys):
    arguments = ["push", str(done.recipe), "--out", str(tmp_path / "nothing"), "--repo-id", "me/mini"]
    assert cli.main(arguments) == 2 and "push needs the result of collect" in capsys.readouterr().err
    assert cli.main([*arguments, "--dry-run"]) == 2


def test_a_new_export_is_pushed_again(done, tmp_path):
    out = done.copy(tmp_path / "out")
    run = runs.Run(recipe.load(done.recipe, ["push.repo_id=me/mini"]), out, say=lambda text: None)
    (out / "push.request.json").write_text(json.dumps(runs.request_of(run, "push")))
    assert runs.is_done(run, "push")
    stages.export(run)
    assert not runs.is_done(run, "push")


@pytest.mark.parametrize(("change", "named"), [
    ("push={}", "missing key push.repo_id"), ("push.repo_id=mini", "push.repo_id is 'mini'"),
    ("push={repo_id: me/mini, hidden: true}", "unknown key push.hidden"), ("push={repo_id: me/mini, private: 1}", "push.private is 1"),
    ("push={repo_id: me/mini, adapter_only: true}", "train.lora null"),
    ("export.base_model=../teacher", "export.base_model is '../teacher'"),
    ("export.benchmark=gsm8k", "export.benchmark is 'gsm8k'"),
])  # fmt: skip
def test_a_bad_push_section(tmp_path_factory, change, named):
    with pytest.raises(ValueError, match=re.escape(named)):
        recipe.load(finished(tmp_path_factory).recipe, [change])


def test_an_adapter_to_push_needs_a_base_repository(done):
    with pytest.raises(ValueError, match="model is 'teacher', a folder of this machine"):
        recipe.load(done.recipe, ["push={repo_id: me/mini, adapter_only: true}", "export.base_model=null"])


def test_a_recipe_without_push_has_four_stages(done):
    assert runs.stages_of(recipe.load(done.recipe)) == ["collect", "train", "evaluate", "export"]
    assert runs.stages_of(recipe.load(done.recipe, ["push.repo_id=me/mini"]))[-1] == "push"


# ---- adapters --------------------------------------------------------------------------------------------------------


def test_an_adapter_on_a_base_in_its_familys_own_format(server, tmp_path, tokenizer):
    """Only cdlm reads such a base: the card says so, and its code runs."""
    base = families.load(ROOT / "tests" / "fixtures" / "llada")
    facts = base.facts
    peft_model = add_lora(base, rank=4, alpha=8, targets=["q_proj", "up_proj"])
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(len(name)))
    peft_model.save_pretrained(tmp_path / "student")
    decode = {"max_new_tokens": 8, "block_length": 4, "confidence_threshold": 0.5}
    card = hub.card(
        "m", report=None, base_model="someone/llada", license="mit", tags=[], datasets=[], decode=decode, table="", lines=[], threshold=0.5,
        adapter=True, stock=False,
    )
    hub.save_adapter(
        tmp_path / "student", tokenizer, tmp_path / "adapter", base_model="someone/llada", family="llada",
        facts=replace(facts, block_length=4),
        max_new_tokens=8, decoding={"confidence_threshold": 0.5}, card=card, with_decoder=False,
    )
    shipment = hub.pack(tmp_path / "adapter", "me/adapter")
    files = {name: data if isinstance(data, bytes) else data.read_bytes() for name, data in shipment.files.items()}
    assert not any(name.startswith("custom_generate") for name in files)
    server.repositories["me/adapter"] = Repository(files=files)
    serve(server, "someone/llada", ROOT / "tests" / "fixtures" / "llada")

    code = card_code(files["README.md"].decode())
    student = DiffusionLM(peft_model.get_base_model(), facts, base.family).eval()
    said = []
    for question in QUESTIONS:
        ids = torch.tensor([prompt_ids(tokenizer, question, chat_template=True)])
        out = generate(student, ids, torch.ones_like(ids, dtype=torch.bool), DecodeConfig(8, 4, confidence_threshold=0.5))
        said.append(tokenizer.decode(out.answer(0, facts.eos_token_ids), skip_special_tokens=True))
    assert answers_of(tmp_path, code, variables=online(server)) == [said] and len(set(said)) > 1


@pytest.mark.parametrize(("name", "change", "named"), [
    (adapters.FACTS, {"mask_token_id": 5}, "mask_token_id 5, its base has 1"),
    (adapters.CONFIG, {"target_modules": ["q_proj"]}, "not the base of this adapter"),
    (adapters.CONFIG, {"r": 3}, "does not fit its base"),
    (adapters.WEIGHTS, None, "adapter_model.safetensors can't be read"),
])  # fmt: skip
def test_an_adapter_that_does_not_fit(exported, done, name, change, named):
    folder = exported / "adapter"
    config = json.loads((folder / adapters.CONFIG).read_text())
    (folder / adapters.CONFIG).write_text(json.dumps(config | {"base_model_name_or_path": str(done.recipe.parent / "teacher")}))
    assert families.load(folder).facts.block_length == mini.BLOCK
    assert families.read_config(folder)["confidence_threshold"] == mini.THRESHOLD, "what `cdlm generate` takes"
    if change is None:
        (folder / name).write_bytes(b"nothing")
        with pytest.raises(ValueError, match=r"adapter_model\.safetensors is not what was written"):
            families.load(folder)
        (folder / "SHA256SUMS").unlink()
    else:
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | change))
    with pytest.raises(ValueError, match=named):
        families.load(folder)


# ---- reading from the Hub --------------------------------------------------------------------------------------------

READ = """
import time
waited = []
time.sleep = waited.append
from cdlm import families

for name in sys.argv[1:]:
    try:
        print(name, families.read_config(name)["model_type"], sep=": ")
    except ValueError as error:
        print(name, error, sep=": ")
assert not waited
"""


def read(tmp_path: Path, variables: dict[str, str], *names: str) -> dict[str, str]:
    """What reading each name ends in, in a process of its own that may not wait."""
    ended = mini.run_python(READ, *names, folder=tmp_path, variables=variables)
    assert ended.returncode == 0 and "Retrying" not in ended.stderr, ended.stderr
    return dict(line.split(": ", 1) for line in ended.stdout.splitlines())


def test_a_name_of_the_hub_is_read_or_is_one_quick_error(server, done, tmp_path):
    """Not found, gated, private, refused, without config.json, server down; then nobody there, and offline."""
    for name in ("teacher", "gated", "private", "down", "refused"):
        serve(server, f"someone/{name}", done.recipe.parent / "teacher")
    server.repositories["someone/gated"].gated = True
    server.repositories["someone/private"].visibility = "private"
    server.repositories["someone/empty"] = Repository()
    server.faults |= {("HEAD", "/someone/down/"): 503, ("HEAD", "/someone/refused/"): 403}
    names = ("techer", "gated", "private", "down", "refused", "empty", "te cher", "teacher")
    said = read(tmp_path, online(server, HF_TOKEN=""), *(f"someone/{name}" for name in names))
    for name, words in {
        "techer": ["no model someone/techer: no folder of that name here, and none on the Hub", server.url],
        "private": ["no model someone/private", "hf auth login"],
        "gated": ["someone/gated is gated", f"{server.url}/someone/gated", "hf auth login"],
        "down": ["model someone/down", f"{server.url} answered 503"],
        "refused": ["model someone/refused", "the Hub refused it (403)"],
        "empty": ["someone/empty has no config.json"],
        "te cher": ["no model at someone/te cher: neither a folder here nor the name of a Hub repository"],
        "teacher": ["llama"],
    }.items():
        for text in words:
            assert text in said[f"someone/{name}"], said
    away = {"nobody there": online(server, HF_ENDPOINT="http://127.0.0.1:9"), "offline": {"HF_HUB_OFFLINE": "1"}}
    for how, variables in away.items():
        said = read(tmp_path, variables, "someone/teacher", "someone/gated")
        assert said["someone/teacher"] == "llama", "what was downloaded before serves"
        assert "model someone/gated: no folder of that name here, nothing kept from earlier downloads, and" in said["someone/gated"]
        assert ("HF_HUB_OFFLINE is set" if how == "offline" else "http://127.0.0.1:9 can't be reached") in said["someone/gated"]
