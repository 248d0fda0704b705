"""Two processes do what one does: the same trajectories, losses, student and table, under DDP and FSDP2. One spawn serves all checks."""

import argparse
import concurrent.futures
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import weakref
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import mini
import pytest
import test_trajectories
import torch
import yaml
from accelerate.state import AcceleratorState
from conftest import ROOT, random_model
from safetensors.torch import load_file
from two_processes import STOP, UNDER, broken, on_canvases

from cdlm import ablate, cli, files, recipe, stages, trajectories
from cdlm.processes import Processes, Refused, check_device, deal_rows
from cdlm.processes import check_engine as check_launcher
from cdlm.runs import Run
from cdlm.trainer import AnswerNoise, CDLMConfig, CDLMTrainer, Collator, check_engine

STEPS = 20


def launch(script: Path, *arguments: object, folder: Path) -> subprocess.CompletedProcess:
    """A Python file in two processes, which accelerate starts as on two machines: by a launcher each, at one address."""
    environment = {
        **os.environ, "HF_HOME": str(folder / "hf-home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]),
    }
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(ROOT / "recipes" / "accelerate" / "two_nodes.yaml"),
        "--num_processes", "2", "--main_process_ip", "127.0.0.1", "--main_process_port", str(port),
    ]  # fmt: skip

    def one(rank: int) -> subprocess.CompletedProcess:
        words = [*command, "--machine_rank", str(rank), str(script), *map(str, arguments)]
        return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first, second = pool.map(one, (0, 1))
    status = first.returncode or second.returncode
    return subprocess.CompletedProcess(command, status, first.stdout + second.stdout, first.stderr[-4000:] + second.stderr[-4000:])


OTHERS = {  # what else is trained, from the values of the mini recipe and those of the 20 steps
    "lora": {"steps": 6, "save_steps": 2, "learning_rate": 0.002, "lora": {**mini.LORA, "dropout": 0.2}},
    "mdlm": {"objective": "mdlm", "steps": 5, "batch_size": 2, "accumulation": 1, "num_examples": 5},
    "checkpointed": {
        "steps": 3, "learning_rate": 0.002, "gradient_checkpointing": True,
        "lora": {**mini.LORA, "targets": ["q_proj", "up_proj", "lm_head"]},
    },
    "bf16": {"steps": 3, "bf16": True},
}


def write_others(folder: Path, values: dict) -> dict[str, recipe.Recipe]:
    for name, train in OTHERS.items():
        other = {**values, "train": {**values["train"], **train}}
        if name == "mdlm":
            del other["collect"], other["train"]["dlm_weight"]
            other["evaluate"] = {}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(other, sort_keys=False))
    return {name: recipe.load(folder / f"{name}.yaml") for name in OTHERS}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """OUT/one and OUT/one-NAME by one process, and what two_processes.py leaves. OUT/broken and OUT/gathered go on with one, OUT/resumed
    and OUT/sharded were begun by one, OUT/lora was begun by one and ends with one. Ten rows are two steps and a half: half a step of each
    epoch is left out."""
    folder = tmp_path_factory.mktemp("processes")
    file = mini.write(folder)
    values = mini.values()
    values["collect"] |= {"num_prompts": 5}
    values["train"] |= {"steps": STEPS, "save_steps": STOP, "learning_rate": 0.0005}
    file.write_text(yaml.safe_dump(values, sort_keys=False))
    out, asked, others = folder / "out", recipe.load(file), write_others(folder, values)
    assert cli.main(["distill", str(file), "--out", str(out / "one")]) == 0
    stored = out / "one" / "trajectories"
    broken(asked, out / "resumed", stored)
    shutil.copytree(out / "resumed", out / "sharded")
    for name, other in others.items():
        stages.train(Run(other, out / f"one-{name}", print, shared_trajectories=stored))
    broken(others["lora"], out / "lora", stored, step=2)
    done = launch(ROOT / "tests" / "two_processes.py", file, out, folder=folder)
    assert done.returncode == 0, done.stderr
    for name, one in (("broken", asked), ("gathered", asked), ("lora", others["lora"])):
        stages.train(Run(one, out / name, print, shared_trajectories=stored))
    return out, done.stdout


def log(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines() if "_loss" in line and "train_loss" not in line]


def losses(out: Path) -> torch.Tensor:
    """Steps by losses: the whole and its parts, by name."""
    return torch.tensor([[line[name] for name in sorted(line) if name == "loss" or name.endswith("_loss")] for line in log(out)])


def test_two_processes_collect_the_bytes_of_one(runs):
    out, _ = runs
    one, two = (mini.contents(out / name / "trajectories") for name in ("one", "ddp"))
    assert len([name for name in one if name.endswith(".parquet")]) == 2
    assert one == two


@pytest.mark.parametrize("name", ["ddp", "resumed", "broken", "fsdp", "sharded", "gathered"])
def test_two_processes_train_as_one(runs, name):
    """20 steps of four rows: the same losses (1e-5) and nearly the same weights, which are not the teacher's. "resumed" was begun by one
    process and "broken" by two, under DDP; the others ended them. "fsdp" was broken off and went on under FSDP2; "sharded" was begun by one
    process and "gathered" by two under FSDP2; the others ended them. Two processes took the losses of all but "ddp" in chunks. (What
    rounding does to a random model grows from step to step, and faster at a higher learning rate.)"""
    out, _ = runs
    wanted, found = losses(out / "one"), losses(out / name)
    assert found.shape == (STEPS, 4)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    one, two = (load_file(out / part / "student" / "model.safetensors") for part in ("one", name))
    start = load_file(out.parent / "teacher" / "model.safetensors")
    assert one.keys() == two.keys() == start.keys()
    for key, value in one.items():
        assert float((value - start[key]).abs().max()) > 2e-3, key
        torch.testing.assert_close(two[key], value, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("engine", "name"), [(engine, name) for engine, names in UNDER.items() for name in names])
def test_two_processes_train_what_else_there_is_as_one(runs, engine, name):
    """mdlm: every group of two rows is split, over two ends of epochs of five rows. checkpointed: adapters behind frozen embeddings, whose
    layers are computed again in the backward, and one on the head that losses ask in chunks. bf16: autocast, under DDP the very
    numbers of one process. FSDP2 keeps weights and norms in bfloat16 in its forwards, so its losses round otherwise; both stand for those
    in fp32, and each loss is no further from them than twice what the rounding of one process makes of that loss at its worst."""
    out, _ = runs
    wanted, found = losses(out / f"one-{name}"), losses(out / f"{engine}-{name}")
    steps = OTHERS[name]["steps"]
    assert found.shape == (steps, 2 if name == "mdlm" else 4) and float(found[:, -1].min()) > 0.1
    if (engine, name) == ("fsdp", "bf16"):
        exact = losses(out / "one")[:steps]
        assert bool(((found - exact).abs() <= 2 * (wanted - exact).abs().max(dim=0).values).all())
        assert not torch.equal(found, found.bfloat16().float()), "losses are fp32"
        start, ended = (load_file(place / "model.safetensors") for place in (out.parent / "teacher", out / "fsdp-bf16" / "student"))
        assert all(float((ended[key] - start[key]).abs().max()) > 5e-4 for key in start)
    else:
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


def test_adapters_go_from_one_process_to_fsdp_and_back(runs):
    """Steps 1 and 2 by one process, 3 and 4 by two with shares, 5 and 6 by one, beside all six by one. B of an adapter starts at 0."""
    out, _ = runs
    wanted, found = losses(out / "one-lora"), losses(out / "lora")
    assert found.shape == (6, 4)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    one, two = (load_file(out / part / "student" / "adapter_model.safetensors") for part in ("one-lora", "lora"))
    assert one.keys() == two.keys()
    for key, value in one.items():
        assert "lora_B" not in key or float(value.abs().max()) > 2e-3, key
        torch.testing.assert_close(two[key], value, atol=1e-5, rtol=0)


def test_two_processes_train_on_canvases_as_one(runs, tmp_path):
    """Objectives uniform and cdlm under DDP: a batch decides how many forwards there are, and half of a step's are in each process. The
    losses are of 3 to 34 nats, so six digits of them are asked."""
    out, _ = runs
    wanted, found = on_canvases(tmp_path), json.loads((out / "canvases.json").read_text())
    names = {"uniform": ("diffusion_loss", "ar_loss"), "cdlm": ("distill_loss", "consistency_loss", "dlm_loss")}
    for objective, parts in names.items():
        one, two = (torch.tensor([[line[name] for name in ("loss", *parts)] for line in lines[objective]]) for lines in (wanted, found))
        assert one.shape == (3, 1 + len(parts)) and float(one.min()) > 0.01
        torch.testing.assert_close(two, one, atol=1e-5, rtol=1e-6)


def test_two_processes_write_the_same_table(runs):
    """But for what the clock says. The main process alone speaks and writes."""
    out, printed = runs

    def table(name: str) -> list[dict]:
        rows = json.loads((out / name / "report.json").read_text())["results"]
        return [{key: value for key, value in row.items() if key not in ("latency_s", "tps")} for row in rows]

    assert table("ddp") == table("one") and len(table("one")) > 5
    samples = [(out / name / "samples.jsonl").read_text() for name in ("one", "ddp")]
    assert samples[0] == samples[1]
    assert printed.count("evaluate: done in") == 1 and printed.count("in 2 processes with 1 x 2 of them each") == 1
    assert (out / "ddp" / "export" / "config.json").is_file() and not (out / "ddp" / "checkpoints").exists()


def test_the_teacher_that_collected_is_gone_when_training_begins(tmp_path, monkeypatch):
    """Two models of 26 B parameters do not fit where one does."""
    recipe_file, loaded, alive = mini.write(tmp_path), [], []
    load = Run.load_teacher

    def watched(run):
        model = load(run)
        loaded.append(weakref.ref(model.hf))
        return model

    def train(run):
        alive.extend(reference() for reference in loaded)
        raise ValueError("far enough")

    monkeypatch.setattr(Run, "load_teacher", watched)
    monkeypatch.setattr(stages, "train", train)
    assert cli.main(["distill", str(recipe_file), "--out", str(tmp_path / "out"), "--set", "collect.num_prompts=1"]) == 2
    assert alive == [None]


def commands() -> list[str]:
    (action,) = [action for action in cli._parser()._actions if isinstance(action, argparse._SubParsersAction)]
    return sorted(action.choices)


def test_what_is_no_stage_runs_in_the_first_process_alone(monkeypatch):
    """Of two processes the first does every command; the second comes to those whose work is shared, and ends with status 0 in others."""
    words = {"compare": ["a", "b"], "generate": ["model", "--prompt", "x"], "convert": ["a", "b", "--to", "native"], "kernels": [],
             "import": ["tad", "a", "b", "--model", "c"]}  # fmt: skip
    shared = {"distill", "collect", "train", "evaluate", "export", "ablate", "eval", "push"}
    done = []
    for name in ("generate", "roofline", "kernels", "inspect", "convert", "import", "push", "eval", "bench", "compare", "verify", "stages"):
        monkeypatch.setattr(cli, f"_{name}", lambda args: done.append(args.command) or 0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, wanted in ((0, commands()), (1, sorted(shared))):
        monkeypatch.setenv("RANK", str(rank))
        done.clear()
        for name in commands():
            assert cli.main([name, *words.get(name, ["recipes/tiny.yaml"])]) == 0
        assert sorted(done) == wanted
    done.clear()
    for dry in (["distill", "recipes/tiny.yaml", "--dry-run"], ["push", "recipes/tiny.yaml", "--dry-run"], ["push", "folder"]):
        assert cli.main(dry) == 0
    assert not done, "a plan, and a folder that is no recipe, are the first one's"


def with_gpus(monkeypatch, count, **environment):
    """As on a machine with GPUs; torch.empty on one of them fails here, as on a CPU build."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(("device", "gpus", "processes", "words"), [
    ("cuda", 2, 1, None), ("cuda:1", 2, 1, None), ("cuda", 2, 2, None), ("cpu", 0, 4, None),
    ("cuda:2", 2, 1, "device is 'cuda:2'; this machine has no such device"), ("cuda", 0, 1, "this machine has no such device"),
    ("cuda", 0, 2, "this machine has no such device"), ("meta", 2, 1, "no such device"),
    ("hpu", 0, 1, "device is 'hpu'; this machine has no such device"), ("privateuseone", 0, 1, "this machine has no such device"),
    ("gpu", 2, 1, "device is 'gpu'; this machine has"),
    ("cuda:0", 2, 2, "device is 'cuda:0', one GPU for the 2 processes of this machine; each takes one of its own: device cuda"),
    ("cuda", 2, 4, "4 processes were launched on this machine, which has 2 GPUs; each needs one of its own"),
])  # fmt: skip
def test_a_device_for_each_process(monkeypatch, device, gpus, processes, words):
    """Nothing is allocated to find out: on a GPU that is not there it would fail."""
    with_gpus(monkeypatch, gpus, WORLD_SIZE=str(processes * 2), LOCAL_WORLD_SIZE=str(processes), RANK="0")
    if words is None:
        return check_device(device)
    with pytest.raises(ValueError, match=words):
        check_device(device)


@pytest.mark.parametrize(("variable", "value"), [
    ("WORLD_SIZE", "abc"), ("WORLD_SIZE", ""), ("WORLD_SIZE", "0"), ("WORLD_SIZE", "-3"), ("WORLD_SIZE", "9" * 5000), ("RANK", "x"),
    ("RANK", "-1"), ("LOCAL_WORLD_SIZE", "y"),
])  # fmt: skip
def test_what_a_launcher_says_is_a_number(monkeypatch, capsys, tmp_path, variable, value):
    monkeypatch.setenv(variable, value)
    for words in (["plan", "nowhere.yaml"], ["distill", "nowhere.yaml"], ["generate", "nowhere", "--prompt", "x"]):
        assert cli.main(words) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and f"{variable} is {value[:80]!r}; a launcher sets it to a whole number of at least" in said


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("command", ["distill", "eval"])
def test_one_gpu_for_two_processes_is_refused_once(monkeypatch, capsys, tmp_path, rank, command):
    """Before any work, by the first of them; the other ends with the same status and says nothing."""
    if command == "distill":
        arguments = [str(mini.write(tmp_path)), "--set", "device=cuda:0", "--out", str(tmp_path / "out")]
    else:
        arguments = [str(tmp_path / "model"), "--tasks", "small_world", "--device", "cuda:0"]
    with_gpus(monkeypatch, 2, WORLD_SIZE="2", RANK=str(rank))
    assert cli.main([command, *arguments]) == 2
    said = capsys.readouterr().err
    assert said.count("one GPU for the 2 processes of this machine") == (1 if rank == 0 else 0) and not (tmp_path / "out").exists()


def each(monkeypatch, arguments):
    """The statuses of a command in two processes, which are threads here."""
    local = threading.local()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("cdlm.processes.start", lambda device: local.group)
    monkeypatch.setattr("cdlm.processes.first", lambda: getattr(local, "group", Processes()).rank == 0)
    monkeypatch.setattr("cdlm.cli._alone_in", lambda out: files.locked(out) if local.group.main else contextlib.nullcontext())

    def one(group):
        local.group = group
        return cli.main(arguments)

    return together(monkeypatch, one)


@pytest.mark.parametrize("command", ["eval", "ablate"])
def test_a_place_in_use_is_refused_in_all_processes(monkeypatch, capsys, tmp_path, command):
    """None waits for the one that found the lock; the main one says it."""
    out = tmp_path / "out"
    if command == "eval":
        arguments = ["eval", "nowhere", "--tasks", "small_world", "--output_path", str(out)]
        lock = files.locked_place(out / "finished.jsonl")
    else:
        out.mkdir()
        arguments, lock = ["ablate", str(mini.write(tmp_path)), "--out", str(out)], files.locked(out)
    with lock:
        assert each(monkeypatch, arguments) == [2, 2]
    assert capsys.readouterr().err.count(" is in use by ") == 1


@pytest.mark.parametrize("words", ["[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer", "Connection closed by peer"])
def test_a_process_that_lost_another_ends_in_one_line(monkeypatch, capsys, tmp_path, words):
    def lost(args):
        raise RuntimeError(words)

    monkeypatch.setattr(cli, "_stages", lost)
    with pytest.raises(RuntimeError):
        cli.main(["distill", "x.yaml"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert cli.main(["distill", "x.yaml"]) == 2
    assert capsys.readouterr().err == "cdlm: error: process 1 ends because another one did, whose error says why\n"


def test_fsdp_in_shares_is_refused_before_any_work(monkeypatch, capsys, tmp_path):
    """By the command, and by the Trainer where no command was typed. Without a word accelerate takes SHARDED_STATE_DICT."""
    words = "fsdp_state_dict_type is SHARDED_STATE_DICT; it must be FULL_STATE_DICT: others keep a pickle"
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    file = mini.write(tmp_path)
    for kind in ("SHARDED_STATE_DICT", None):
        monkeypatch.delenv("FSDP_STATE_DICT_TYPE") if kind is None else monkeypatch.setenv("FSDP_STATE_DICT_TYPE", kind)
        assert cli.main(["distill", str(file), "--out", str(tmp_path / "out")]) == 2
        assert words in capsys.readouterr().err and not (tmp_path / "out").exists()
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    monkeypatch.setattr(CDLMTrainer, "engine", "fsdp")
    plugin = SimpleNamespace(state_dict_type=SimpleNamespace(name="SHARDED_STATE_DICT"), activation_checkpointing=False)
    monkeypatch.setattr(AcceleratorState, "fsdp_plugin", plugin, raising=False)
    model = random_model()
    args = CDLMConfig(output_dir=str(tmp_path / "trained"), objective="ar", use_cpu=True)
    with pytest.raises(ValueError, match=words):
        CDLMTrainer(model, args, AnswerNoise([], 8, 0), Collator(model, 8, 1))


def test_bench_is_for_one_process(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["bench", str(ROOT / "recipes" / "tiny.yaml")]) == 2
    assert "bench keeps the clock in one process; 2 were launched" in capsys.readouterr().err


def together(monkeypatch, work, count=2):
    """What `work` gives or raises in each of some processes, which are threads here; they gather as processes do."""
    told, meet = {}, threading.Barrier(count, timeout=20)

    def gather(self, items):
        told[self.rank] = items
        meet.wait()
        found = [item for rank in range(count) for item in told[rank]]
        meet.wait()
        return found

    def run(rank):
        try:
            return work(Processes(rank, count))
        except (ValueError, OSError) as error:
            return error

    monkeypatch.setattr(Processes, "gather", gather)
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


@pytest.mark.parametrize("where", [0, 1])
def test_what_one_process_refuses_all_refuse(monkeypatch, where):
    """Else the others would wait for it for days."""
    def work(processes):
        if processes.rank == where:
            raise OSError("the disk is full")
        return "done"

    found = together(monkeypatch, lambda processes: processes.agreed(lambda: work(processes)))
    assert [str(error) for error in found] == ["the disk is full"] * 2
    assert type(found[where]) is OSError and type(found[1 - where]) is Refused


def test_what_all_processes_refuse_the_first_says(monkeypatch):
    def work(processes):
        raise ValueError(f"of {processes.count} processes")

    found = together(monkeypatch, lambda processes: processes.agreed(lambda: work(processes)), count=3)
    assert [(type(error), str(error)) for error in found] == [(kind, "of 3 processes") for kind in (ValueError, Refused, Refused)]


def test_each_shard_is_written_by_one_process(monkeypatch, tmp_path):
    """Five shards, three processes: two, two and one."""
    written = defaultdict(list)
    write = trajectories.write_shard

    def watched(folder, name, *more, **others):
        written[threading.current_thread().name].append(name)
        write(folder, name, *more, **others)

    monkeypatch.setattr(trajectories, "write_shard", watched)
    monkeypatch.setattr(Processes, "wait", lambda self: self.gather([None]))
    together(monkeypatch, lambda group: test_trajectories.collect(tmp_path, shard_size=2, processes=group), count=3)
    assert sorted(len(names) for names in written.values()) == [1, 2, 2]
    assert sorted(name for names in written.values() for name in names) == [f"shard-{i:05d}" for i in range(5)]


def test_a_step_that_can_not_be_shared_is_refused_before_any_stage(tmp_path):
    """Unless training is done: then nobody has to share it."""
    run = Run(recipe.load(mini.write(tmp_path)), tmp_path / "out", print, processes=Processes(0, 3))
    with pytest.raises(ValueError, match="= 4 rows, which 3 processes can't share evenly"):
        stages.check_training(run)


@pytest.mark.parametrize("engine, name", [("FSDP", "ACCELERATE_USE_FSDP"), ("DeepSpeed", "ACCELERATE_USE_DEEPSPEED")])
def test_an_engine_that_can_not_train_here_is_refused_before_any_stage(tmp_path, monkeypatch, capsys, engine, name):
    monkeypatch.setenv(name, "true")
    monkeypatch.setenv("FSDP_STATE_DICT_TYPE", "FULL_STATE_DICT")
    assert cli.main(["distill", str(mini.write(tmp_path)), "--out", str(tmp_path / "out")]) == 2
    assert f"accelerate was asked for {engine}, which it does not run on this device (cpu); take DDP" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match=f"asked for {engine}, which shards layers; .* take DDP"):
        check_launcher("cuda", shares_layers=True)
    check_launcher("cuda", shares_layers=False)


def test_all_do_what_the_main_process_saw(monkeypatch):
    """A folder of another machine may show a file later."""
    assert together(monkeypatch, lambda processes: processes.agreed(lambda: processes.rank), count=3) == [0, 0, 0]


def test_what_the_main_process_refuses_first_is_refused_in_the_others(monkeypatch):
    entered = []

    def work(processes, fails):
        with processes.main_first():
            entered.append(processes.rank)
            if fails and processes.main:
                raise ValueError("no such recipe")
        return "done"

    refused = together(monkeypatch, lambda processes: work(processes, True))
    assert [str(error) for error in refused] == ["no such recipe"] * 2 and type(refused[1]) is Refused and entered == [0]
    assert together(monkeypatch, lambda processes: work(processes, False)) == ["done", "done"] and entered[1] == 0


def test_all_processes_come_to_every_stage_of_an_ablation(monkeypatch, tmp_path):
    """And have one table, which the main one writes."""
    asked, came = recipe.load(mini.write(tmp_path)), {0: [], 1: []}

    def stage(name):
        def work(run):
            came[run.processes.rank].append((name, run.out.name))
            if name == "evaluate" and run.processes.main:
                summary = {"student_accuracy": 0.5, "student_steps_at_threshold": len(came[0]), "tpf": 2.0}
                (run.out / "report.json").write_text(json.dumps({"summary": summary}))
            run.processes.gather([0])

        return work

    for name in ("collect", "train", "evaluate"):
        monkeypatch.setattr(stages, name, stage(name))
    monkeypatch.setattr("cdlm.runs.is_done", lambda run, stage: run.processes.rank == 1)  # the main one's word counts
    monkeypatch.setattr(Run, "check_inputs", lambda run: None)
    found = together(monkeypatch, lambda group: ablate.run(Run(asked, tmp_path / "out", lambda text: None, processes=group)))
    assert found[0] == found[1] and (tmp_path / "out" / "ablation" / "ablation.md").read_text() == found[0] + "\n"
    assert came[0] == came[1] and [name for name, _ in came[0]] == ["collect", *["train", "evaluate"] * 4]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_shares_are_disjoint_and_make_up_all(count):
    items = list(range(4))
    shares = [Processes(rank, count).share(items) for rank in range(count)]
    assert sorted(x for share in shares for x in share) == items
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize(
    "asked, count, wanted",
    [
        ((2, 32), 1, (2, 32)), ((2, 32), 8, (2, 4)), ((4, 1), 2, (2, 1)), ((6, 1), 2, (3, 1)), ((4, 3), 2, (2, 3)), ((6, 5), 3, (2, 5)),
        ((1, 4), 4, (1, 1)),
    ],
)
def test_rows_of_a_step_are_dealt_out(asked, count, wanted):
    """(4, 3) in two: six rows each, in halves of fours: 3 x 2. (6, 5) in three: ten rows each, in thirds of sixes: 5 x 2."""
    assert deal_rows(*asked, count) == wanted
    assert asked[0] % wanted[0] == 0
    assert wanted[0] * wanted[1] * count == asked[0] * asked[1]


def test_rows_that_can_not_be_shared_are_refused():
    with pytest.raises(ValueError, match=r"2 x train.accumulation 2 = 4 rows, which 3 processes can't share evenly; .*: 1, 2, 4"):
        deal_rows(2, 2, 3)


def test_a_checkpoint_of_another_engine_is_refused(tmp_path):
    """The Trainer would go on from it with a new optimizer and say nothing; DeepSpeed would unpickle."""
    whole, shares, zero = (tmp_path / name for name in ("whole", "shares", "zero"))
    for folder in (whole, shares / "pytorch_model_fsdp_0", zero / "global_step10"):
        folder.mkdir(parents=True)
    check_engine(whole, "plain")
    check_engine(whole, "fsdp")
    for engine in ("plain", "fsdp"):
        with pytest.raises(ValueError, match="shares holds FSDP's shares, with a pickle beside them, which can run code and is not read"):
            check_engine(shares, engine)
    for engine in ("plain", "fsdp", "deepspeed"):
        with pytest.raises(ValueError, match="zero was written by DeepSpeed, in pickles, which can run code and are not read: remove"):
            check_engine(zero, engine)
    for folder in (whole, shares):
        with pytest.raises(ValueError, match="was not written by DeepSpeed, which can't go on from it"):
            check_engine(folder, "deepspeed")


CONFIGS = {
    "one_gpu": ("NO", 1, 1), "ddp": ("MULTI_GPU", 8, 1), "fsdp2": ("FSDP", 8, 1), "zero3": ("DEEPSPEED", 8, 1),
    "two_nodes": ("MULTI_GPU", 16, 2),
}  # fmt: skip
def test_the_configs_are_accelerates_own(monkeypatch):
    """accelerate's loader takes each (it refuses unknown keys, but not inside of an engine's part); its launcher makes of the sharded one
    what was trained with above, of two machines torchrun's arguments, and of ZeRO-3 a DeepSpeed configuration."""
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import DeepSpeedPlugin
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
    from two_processes import FSDP2

    folder = ROOT / "recipes" / "accelerate"
    assert {file.stem for file in folder.glob("*")} == set(CONFIGS)
    parsed, flags = {}, {action.dest for action in launch_command_parser()._actions}
    for name, (kind, count, machines) in CONFIGS.items():
        file = str(folder / f"{name}.yaml")
        config = load_config_from_file(file)
        assert (config.distributed_type.value, config.num_processes, config.num_machines) == (kind, count, machines)
        assert {*config.fsdp_config, *config.deepspeed_config} <= {*flags}  # keys that no flag has would be passed over in silence
        asked = ["--config_file", file, "--machine_rank", "1", "--main_process_ip", "10.0.0.1"] if machines > 1 else ["--config_file", file]
        parsed[name], _, _ = _validate_launch_command(launch_command_parser().parse_args([*asked, "-m", "cdlm.cli"]))
    environment = prepare_multi_gpu_env(parsed["fsdp2"])
    assert {name: environment[name].lower() for name in FSDP2} == {name: value.lower() for name, value in FSDP2.items()}
    prepare_multi_gpu_env(two := parsed["two_nodes"])  # turns them into torchrun's
    assert (two.nproc_per_node, two.nnodes, two.node_rank, two.rdzv_endpoint) == ("8", "2", 1, "10.0.0.1:29500")
    parsed["zero3"].deepspeed_fields_from_accelerate_config = "zero_stage"  # which its launch_command adds
    _, environment = prepare_deepspeed_cmd_env(parsed["zero3"])
    for name, value in environment.items():
        if name.startswith("ACCELERATE_"):
            monkeypatch.setenv(name, value)
    asked = DeepSpeedPlugin().hf_ds_config.config
    sharded = asked["zero_optimization"]
    assert (sharded["stage"], sharded["stage3_gather_16bit_weights_on_model_save"]) == (3, True)
    assert [sharded[name]["device"] for name in ("offload_optimizer", "offload_param")] == ["none", "none"]
    assert asked["gradient_accumulation_steps"] == asked["gradient_clipping"] == "auto"
    assert environment["ACCELERATE_USE_DEEPSPEED"] == "true" and environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
