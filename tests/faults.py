"""The campaign of faults: `python tests/faults.py [NAME ...]` prints one line a case (name, ok or FAILED, what was seen) and ends with
status 1 when one failed. NAME: only the groups of these names. tests/test_faults.py runs a part of the same cases.

A server process imports everything once and forks for each command, so that a case costs what the command itself costs. A fault is put
into the fork alone: a signal or an error at a certain call, before it, after it, or with half of a file written, or a result that is no
number.
"""

import contextlib
import functools
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SMALL = (  # of the mini recipe: two shards, two steps with a checkpoint each, one method on one question
    "collect.num_prompts=2", "collect.shard_size=1", "collect.temperatures=[0.0]", "train.steps=2", "train.save_steps=1",
    "train.accumulation=1", "evaluate.methods=[student]", "evaluate.thresholds=[]", "evaluate.truncated_steps=[]",
    "evaluate.num_prompts=1", "evaluate.latency_prompts=1", "evaluate.warmup_prompts=0",
)  # fmt: skip
NOTE = "evaluate.request.json"
TIMED = ("report.sha256", "report.md", "report.html", "report.json", "pareto.png", "log.jsonl", "log.sha256", "export/README.md")


# ---- the server ------------------------------------------------------------------------------------------------------


def _inject(fault: dict[str, Any]) -> None:
    """Put one fault into this process: at the `number`-th call of `function` (module:attribute) whose arguments name `name`, the end of
    a path."""
    import importlib

    if "limit" in fault:  # bytes that a file may have
        resource.setrlimit(resource.RLIMIT_FSIZE, (fault["limit"], fault["limit"]))
    if "function" not in fault:
        return
    module, attribute = fault["function"].split(":")
    owner: Any = importlib.import_module(module)
    *path, last = attribute.split(".")
    for part in path:
        owner = getattr(owner, part)
    real, seen = getattr(owner, last), 0

    def strike() -> None:
        if "errno" in fault:
            raise OSError(fault["errno"], os.strerror(fault["errno"]))
        os.kill(os.getpid(), getattr(signal, fault["signal"]))

    def struck(*args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        named = [str(value) for value in (*args, *kwargs.values()) if isinstance(value, str | os.PathLike)]
        if fault.get("name") is not None and not any(Path(value).match(fault["name"]) for value in named):
            return real(*args, **kwargs)
        seen += 1
        if seen != fault.get("number", 1):
            return real(*args, **kwargs)
        if fault["when"] == "before":
            strike()
            return real(*args, **kwargs)
        result = real(*args, **kwargs)
        if fault["when"] == "no number":
            return result * float("nan")
        if fault["when"] == "half":
            file = [Path(value) for value in named if Path(value).is_file()][-1]  # of a copy, the copy
            os.truncate(file, file.stat().st_size // 2)
        strike()
        return result

    setattr(owner, last, struck)


def _child(asked: dict[str, Any], out: str, err: str) -> None:
    """Run a command and end this process with its status."""
    for number, name in ((1, out), (2, err)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.update(asked["variables"])
    status: Any = 70
    try:
        from cdlm import cli

        os.chdir(asked["folder"])
        _inject(asked["fault"])
        status = cli.main(asked["arguments"])
    except SystemExit as ended:
        status = ended.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status if isinstance(status, int) else 70)


def serve() -> None:
    """Answer commands, a line of JSON each."""
    import matplotlib
    import pyarrow.parquet
    import torch

    torch.set_num_threads(1)
    matplotlib.use("Agg")
    from cdlm import ablate, bench, cli, data, hub, importers, plan, stages, trace, trainer, verify  # noqa: F401  (imported for the forks)
    from cdlm.evaluate import page  # noqa: F401

    assert pyarrow.parquet is not None
    for line in sys.stdin:
        asked = json.loads(line)
        with tempfile.TemporaryDirectory() as place:
            out, err = f"{place}/out", f"{place}/err"
            child = os.fork()
            if child == 0:
                _child(asked, out, err)
            _, ended = os.waitpid(child, 0)
            said = [Path(name).read_text(errors="replace") for name in (out, err)]
        print(json.dumps({"status": os.waitstatus_to_exitcode(ended), "out": said[0], "err": said[1]}), flush=True)


@dataclass(frozen=True)
class Ended:
    """How a command ended. err is without the bars of transformers."""

    status: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        quiet = ("Loading weights", "Writing model shards", "[transformers]", "Warning: You are sending")
        return [line.split("\r")[-1] for line in self.err.splitlines() if line.strip() and not line.split("\r")[-1].startswith(quiet)]

    def refused(self, *named: str) -> str:
        """Why this is no proper refusal (status 2, one line that names these); empty if it is one."""
        if self.status != 2 or len(self.lines) != 1 or not self.lines[0].startswith("cdlm: error: "):
            return f"status {self.status}, {len(self.lines)} lines: {' | '.join(self.lines)[-600:]}"
        return "".join(f"{text!r} is not in: {self.lines[0]}" for text in named if text not in self.lines[0])


    def behind_remarks(self) -> "Ended":
        """With the last line alone, of `cdlm eval`: the harness makes remarks of its own before."""
        return Ended(self.status, self.out, "\n".join(self.lines[-1:]))


class Server:
    """Runs commands of cdlm in forks of one process."""

    def __init__(self, folder: Path):
        environment = {
            **os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf-home"), "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        }  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=folder
        )
        self.folder = folder

    def run(self, *arguments: object, fault: dict[str, Any] | None = None, folder: Path | None = None, **variables: str) -> Ended:
        assert self.process.stdin is not None and self.process.stdout is not None
        asked = {
            "arguments": [str(word) for word in arguments], "fault": fault or {}, "folder": str(folder or self.folder),
            "variables": variables,
        }  # fmt: skip
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        return Ended(**json.loads(self.process.stdout.readline()))

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


# ---- a run, whole and broken -----------------------------------------------------------------------------------------


def small(*changes: str) -> list[str]:
    return [word for change in (*SMALL, *changes) for word in ("--set", change)]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def untimed(report: bytes) -> dict[str, Any]:
    """report.json without what a clock gave and how the command was typed."""
    found = json.loads(report)
    found["summary"].pop("latency_speedup")
    for key in ("latency", "command"):
        found.pop(key)
    for row in found["results"]:
        row.pop("latency_s"), row.pop("tps")
    return found


def same_run(one: Path, other: Path) -> str:
    """How two finished runs differ (also those in their ablation); empty if they are the same but for what a clock gave."""
    a, b = contents(one), contents(other)
    if set(a) != set(b):
        return f"files differ: {sorted(set(a) ^ set(b))}"
    differing = [name for name in a if re.sub("^ablation/[^/]+/", "", name) not in (*TIMED, *CARDS) and a[name] != b[name]]
    if differing:
        return f"contents differ: {differing}"
    return "".join(f"{name} differs" for name in a if Path(name).name == "report.json" and untimed(a[name]) != untimed(b[name]))


@dataclass
class World:
    """The server, the smallest recipe, and its unbroken run. What else cases need is made when it is first asked for."""

    server: Server
    recipe: Path
    whole: Path

    @staticmethod
    def make(folder: Path) -> "World":
        """A mini recipe and its unbroken run, in `folder`."""
        import mini

        recipe = mini.write(folder / "world")
        server = Server(folder)
        world = World(server, recipe, folder / "whole")
        ended = world.distill(world.whole)
        assert ended.status == 0, ended.err
        return world

    @functools.cached_property
    def lora(self) -> "World":
        """The same with a student that is an adapter; its trajectories are the same ones."""
        import mini
        import yaml

        recipe = self.recipe.with_name("lora.yaml")
        recipe.write_text(yaml.safe_dump(mini.values(lora=True), sort_keys=False))
        other = World(self.server, recipe, self.whole.with_name("whole-lora"))
        ended = other.distill(self.start(other.whole, "c"))
        assert ended.status == 0, ended.err
        return other

    @functools.cached_property
    def bench_folder(self) -> Path:
        """The run with an unbroken bench."""
        out = self.whole.with_name("whole-bench")
        shutil.copytree(self.whole, out)
        ended = self.bench(out)
        assert ended.status == 0, ended.err
        return out

    @functools.cached_property
    def ablation(self) -> Path:
        """An unbroken ablation on the run's trajectories."""
        out = self.start(self.whole.with_name("whole-ablation"), "c")
        ended = self.ablate(out)
        assert ended.status == 0, ended.err
        return out

    def bench(self, out: Path, *words: str, fault: dict[str, Any] | None = None) -> Ended:
        sizes = ("--batches", "1", "--lengths", "8,16", "--prompt-tokens", "4")
        return self.server.run("bench", self.recipe, "--out", out, *small(), *sizes, *words, fault=fault)

    def ablate(self, out: Path, fault: dict[str, Any] | None = None) -> Ended:
        return self.server.run("ablate", self.recipe, "--out", out, *small(), fault=fault)

    def distill(self, out: Path, *changes: str, fault: dict[str, Any] | None = None, **variables: str) -> Ended:
        return self.server.run("distill", self.recipe, "--out", out, *small(*changes), fault=fault, **variables)

    def start(self, out: Path, stages: str) -> Path:
        """A run in which these stages are done: any of c, t, e, x for collect, train, evaluate, export."""
        out.mkdir(parents=True)
        for letter, name in (("c", "trajectories"), ("t", "student"), ("x", "export")):
            if letter in stages:
                shutil.copytree(self.whole / name, out / name)
        for letter, names in (("t", ("log.jsonl", "log.sha256")), ("x", ("export.request.json", "export.sha256"))):
            for name in names if letter in stages else ():
                shutil.copy(self.whole / name, out)
        if "e" in stages:
            for file in [*self.whole.glob("report.*"), *(self.whole / name for name in ("pareto.png", "samples.jsonl", NOTE))]:
                shutil.copy(file, out)
        return out


# ---- cases: each gives "" or what went wrong -------------------------------------------------------------------------

REPLACE, SYNC = "os:replace", "cdlm.files:_sync"
KILLS = {  # name -> stages done before, and where it strikes
    "collect: in the middle of a shard's hidden rows": ("", {"function": SYNC, "name": ".shard-00001.safetensors.partial", "when": "half"}),
    "collect: in the middle of a shard's table": ("", {"function": SYNC, "name": ".shard-00001.parquet.partial", "when": "half"}),
    "collect: between a shard's two files": ("", {"function": REPLACE, "name": "shard-00000.parquet", "when": "before"}),
    "collect: between the last shard and the manifest": ("", {"function": "cdlm.trajectories:write_manifest", "when": "before"}),
    "collect: between the checksums and the manifest": ("", {"function": REPLACE, "name": "manifest.json", "when": "before"}),
    "collect: while decoding": ("", {"function": "cdlm.trajectories:decode", "number": 2, "when": "before"}),
    "train: in a step": ("c", {"function": "cdlm.trainer:CDLMTrainer.compute_loss", "number": 2, "when": "before"}),
    "train: in the middle of a checkpoint's optimizer": (
        "c", {"function": "torch:save", "name": "optimizer.pt", "number": 2, "when": "half"}
    ),
    "train: between a checkpoint and its checksums": ("c", {"function": "cdlm.files:seal", "number": 2, "when": "before"}),
    "train: while an old checkpoint is removed": (
        "c", {"function": "transformers.trainer_utils:shutil.rmtree", "name": "checkpoint-1", "when": "before"}
    ),
    "train: before the student is put in place": ("c", {"function": REPLACE, "name": "student", "when": "before"}),
    "train: behind the student": ("c", {"function": REPLACE, "name": "student", "when": "after"}),
    "evaluate: while decoding": ("ct", {"function": "cdlm.evaluate.run:_decode", "when": "before"}),
    "evaluate: in the middle of the samples": ("ct", {"function": SYNC, "name": ".samples.jsonl.partial", "when": "half"}),
    "evaluate: between the checksums and the report": ("ct", {"function": REPLACE, "name": "report.json", "when": "before"}),
    "export: in the middle of the weights": ("cte", {"function": "transformers.modeling_utils:safe_save_file", "when": "half"}),
    "export: before the folder is put in place": ("cte", {"function": REPLACE, "name": "export", "when": "before"}),
    "export: behind the folder": ("cte", {"function": REPLACE, "name": "export", "when": "after"}),
}  # fmt: skip


LORA_KILLS = {  # the same where the student is an adapter
    "train: in the middle of a checkpoint's adapter": (
        "c", {"function": "peft.peft_model:safe_save_file", "number": 2, "when": "half"}
    ),
    "train: between a checkpoint and its checksums": ("c", {"function": "cdlm.files:seal", "number": 2, "when": "before"}),
    "train: in the middle of the student": ("c", {"function": "peft.peft_model:safe_save_file", "number": 3, "when": "half"}),
    "train: behind the student": ("c", {"function": REPLACE, "name": "student", "when": "after"}),
    "export: in the middle of the adapter's weights": (
        "cte", {"function": "cdlm.hub:shutil.copyfile", "name": "adapter_model.safetensors", "when": "half"}
    ),
    "export: before the adapter's checksums": ("cte", {"function": "cdlm.files:seal", "number": 1, "when": "before"}),
    "export: behind the adapter": ("cte", {"function": "cdlm.hub:save_adapter", "when": "after"}),
    "export: before the folder is put in place": ("cte", {"function": REPLACE, "name": "export", "when": "before"}),
}  # fmt: skip


def killed(world: World, out: Path, kill: tuple[str, dict[str, Any]], kind: str) -> str:
    """Killed at a point, the next start ends with the files of an unbroken run; SIGTERM also says so in one line and cleans up."""
    before, fault = kill
    world.start(out, before)
    ended = world.distill(out, fault={**fault, "signal": kind})
    if kind == "SIGKILL" and ended.status != -signal.SIGKILL:
        return f"it was not killed: status {ended.status}, {ended.err[-300:]}"
    if kind == "SIGTERM":
        if ended.status != 143 or len(ended.lines) != 1 or "ended by SIGTERM" not in ended.lines[0]:
            return f"status {ended.status}: {ended.lines}"
        if left := [path.name for path in out.rglob("*") if path.name.endswith(".partial") or path.name == ".lock"]:
            return f"it left {left}"
    again = world.distill(out)
    return f"started again: {again.lines}" if again.status else same_run(out, world.whole)


CASES: dict[str, Callable[[World, Path], str]] = {}
for _kind in ("SIGKILL", "SIGTERM"):
    for _name in KILLS:
        CASES[f"kill / {_kind} / {_name}"] = lambda world, out, name=_name, kind=_kind: killed(world, out, KILLS[name], kind)
    for _name in LORA_KILLS:
        CASES[f"kill / {_kind} / adapter, {_name}"] = (
            lambda world, out, name=_name, kind=_kind: killed(world.lora, out, LORA_KILLS[name], kind)
        )  # fmt: skip


def killed_between(world: World, out: Path, place: str, number: int) -> str:
    """A folder that lacks a file is made again. Killed when the old one has gone from its place (1) or the new one has come (2), the next
    start ends with the files of an unbroken run, and neither of the two is left beside its place."""
    world.start(out, "ctex")
    (out / place / "config.json").unlink()
    ended = world.distill(out, fault={"function": REPLACE, "name": place, "number": number, "when": "after", "signal": "SIGKILL"})
    if ended.status != -signal.SIGKILL or not (out / f".{place}.old").is_dir() or (out / place).is_dir() != (number == 2):
        return f"status {ended.status}, there are {sorted(path.name for path in out.iterdir())}"
    again = world.distill(out)
    return f"started again: {again.lines}" if again.status else same_run(out, world.whole)


for _name in ("student", "export"):
    for _number, _words in ((1, "behind the old"), (2, "behind the new")):
        CASES[f"kill / SIGKILL / a folder is replaced, {_words} {_name}"] = (
            lambda world, out, name=_name, number=_number: killed_between(world, out, name, number)
        )  # fmt: skip


ABLATE_KILLS = {
    "in a variant's training": {"function": "cdlm.trainer:CDLMTrainer.compute_loss", "number": 4, "when": "before"},
    "between a variant's student and the end of its checkpoints": {"function": REPLACE, "name": "student", "number": 2, "when": "after"},
    "between two variants": {"function": REPLACE, "name": "report.json", "number": 1, "when": "after"},
    "before a variant's report": {"function": REPLACE, "name": "report.json", "number": 2, "when": "before"},
    "before the table": {"function": REPLACE, "name": "ablation.md", "when": "before"},
}


def killed_ablation(world: World, out: Path, name: str) -> str:
    """An ablation that was killed, started again, ends with the files of an unbroken one."""
    world.start(out, "c")
    ended = world.ablate(out, fault={**ABLATE_KILLS[name], "signal": "SIGKILL"})
    if ended.status != -signal.SIGKILL:
        return f"it was not killed: status {ended.status}, {ended.err[-300:]}"
    again = world.ablate(out)
    if again.status:
        return f"started again: {again.lines}"
    checked = world.server.run("verify", out)
    return same_run(out, world.ablation) or (f"verify: {checked.lines}" if checked.status else "")


BENCH_KILLS = {
    "in the training of a part": {"function": "cdlm.trainer:CDLMTrainer.compute_loss", "number": 2, "when": "before"},
    "behind the student of a part's training": {"function": REPLACE, "name": "student", "when": "after"},
    "between a part's checksum and the part": {"function": REPLACE, "name": "growth.json", "when": "before"},
    "in the table": {"function": "cdlm.evaluate.run:_decode", "when": "before"},
    "between the report's checksums and the report": {"function": REPLACE, "name": "report.json", "when": "before"},
}


def killed_bench(world: World, out: Path, name: str) -> str:
    """A bench that was killed, started again, ends with the files of an unbroken one, but for what a clock gave; the run is as it was."""
    shutil.copytree(world.whole, out)
    ended = world.bench(out, fault={**BENCH_KILLS[name], "signal": "SIGKILL"})
    if ended.status != -signal.SIGKILL:
        return f"it was not killed: status {ended.status}, {ended.err[-300:]}"
    again = world.bench(out)
    checked = world.server.run("verify", out)
    if again.status or checked.status:
        return f"started again: {again.lines}, verify: {checked.lines}"
    a, b = contents(out), contents(world.bench_folder)
    if set(a) != set(b):
        return f"files differ: {sorted(set(a) ^ set(b))}"
    same = [name for name in a if not name.startswith("bench/")] + ["bench/samples.jsonl"]
    return f"contents differ: {differing}" if (differing := [name for name in same if a[name] != b[name]]) else ""


for _name in ABLATE_KILLS:
    CASES[f"kill / SIGKILL / ablate: {_name}"] = lambda world, out, name=_name: killed_ablation(world, out, name)
for _name in BENCH_KILLS:
    CASES[f"kill / SIGKILL / bench: {_name}"] = lambda world, out, name=_name: killed_bench(world, out, name)


LLADA = ROOT / "tests" / "fixtures" / "llada"  # a checkpoint in its family's format


def killed_conversion(world: World, out: Path, fault: dict[str, Any]) -> str:
    """A conversion that was killed leaves no target; the same command again writes it."""
    out.mkdir()
    ended = world.server.run("convert", LLADA, out / "dst", "--to", "native", fault={**fault, "signal": "SIGKILL"})
    if ended.status != -signal.SIGKILL or (out / "dst").exists():
        return f"status {ended.status}, there are {sorted(path.name for path in out.iterdir())}"
    for name in ("dst", "other"):
        ended = world.server.run("convert", LLADA, out / name, "--to", "native")
        if ended.status:
            return f"{name}: {ended.lines}"
    if sorted(path.name for path in out.iterdir()) != ["dst", "other"]:
        return f"it left {sorted(path.name for path in out.iterdir())}"
    return "" if contents(out / "dst") == contents(out / "other") else "it is another one"


CASES["kill / SIGKILL / convert: in the middle"] = (
    lambda world, out: killed_conversion(world, out, {"function": "cdlm.families.checkpoint:write", "when": "after"})
)  # fmt: skip
CASES["kill / SIGKILL / convert: before the folder is put in place"] = (
    lambda world, out: killed_conversion(world, out, {"function": REPLACE, "name": "dst", "when": "before"})
)  # fmt: skip


def flip(path: Path) -> None:
    """Change one bit of a byte in the middle of a file, one that is no white space."""
    content = bytearray(path.read_bytes())
    place = len(content) // 2
    while bytes(content[place : place + 1]).isspace():
        place += 1
    content[place] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


DAMAGED = (
    "trajectories/shard-00001.safetensors", "trajectories/shard-00001.parquet", "trajectories/shard-00001.sha256",
    "trajectories/SHA256SUMS", "trajectories/manifest.json", "trajectories/collection.json", "student/model.safetensors",
    "student/config.json", "student/generation_config.json", "student/tokenizer.json", "student/tokenizer_config.json",
    "student/chat_template.jinja", "student/request.json", "student/SHA256SUMS", "report.json",
    "report.md", "report.html", "pareto.png", "samples.jsonl", "log.jsonl", "log.sha256", "report.sha256", "evaluate.request.json",
    "export.request.json", "export.sha256", "export/model.safetensors", "export/config.json",
    "export/generation_config.json", "export/tokenizer.json",
    "export/tokenizer_config.json", "export/chat_template.jinja", "export/custom_generate/generate.py", "export/SHA256SUMS",
)  # fmt: skip
LORA_DAMAGED = (  # of a run whose student is an adapter
    "student/adapter_model.safetensors", "student/adapter_config.json", "student/request.json", "student/SHA256SUMS",
    "export/model.safetensors", "export/SHA256SUMS", "export/adapter/adapter_model.safetensors", "export/adapter/adapter_config.json",
    "export/adapter/facts.json", "export/adapter/tokenizer.json", "export/adapter/tokenizer_config.json",
    "export/adapter/chat_template.jinja", "export/adapter/custom_generate/generate.py", "export/adapter/SHA256SUMS",
)  # fmt: skip
CARDS = ("export/README.md", "export/adapter/README.md", "student/README.md")  # their owner's to change, without checksums


def damaged(world: World, out: Path, name: str, change: Callable[[Path], None]) -> str:
    """A damaged file is named, and made again or refused: then every file is as it was."""
    shutil.copytree(world.whole, out)
    change(out / name)
    before = contents(out)
    named = Path(name).name if name.endswith(("SHA256SUMS", ".sha256")) else name  # a file and its checksum differ: which is damaged?
    checked = world.server.run("verify", out)
    if checked.status != 1 or named not in checked.out + checked.err:
        return f"verify: status {checked.status}, {checked.lines}"
    ended = world.distill(out)
    if ended.status == 0:
        if named not in ended.out:
            return f"{name} is not named: {ended.out[-400:]}"
        return "" if contents(out) == contents(world.whole) else "it was not made again as it was"
    return ended.refused(named) or ("" if contents(out) == before else "the refusal changed files")


def all_listed(world: World, out: Path) -> str:
    """Every file of a run is damaged in some case, but for cards, which are their owner's to change."""
    kinds = {re.sub(r"shard-\d+", "shard-00001", name) for whole in (world.whole, world.lora.whole) for name in contents(whole)}
    kinds |= {name for name in contents(world.bench_folder) if name.startswith("bench/")}
    return f"no case damages {sorted(left)}" if (left := kinds - {*DAMAGED, *LORA_DAMAGED, *BENCH_DAMAGED, *CARDS}) else ""


BENCH_DAMAGED = (
    "bench/growth.json", "bench/growth.sha256", "bench/overhead.json", "bench/overhead.sha256", "bench/report.json", "bench/report.md",
    "bench/report.html", "bench/pareto.png", "bench/samples.jsonl", "bench/report.sha256",
)  # fmt: skip


def damaged_bench(world: World, out: Path, name: str, change: Callable[[Path], None]) -> str:
    """A damaged part or report of a bench is named by verify, and refused by a bench that would read it, before any work."""
    shutil.copytree(world.bench_folder, out)
    change(out / name)
    before = contents(out)
    checked = world.server.run("verify", out)
    if checked.status != 1 or name not in checked.out + checked.err:
        return f"verify: status {checked.status}, {checked.lines}"
    ended = world.bench(out, "--parts", "overhead" if "growth" in name else "growth")
    named = Path(name).name if name.endswith(".sha256") else name
    return ended.refused(named) or ("" if contents(out) == before else "the refusal changed files")


def damaged_log(world: World, out: Path, name: str, change: Callable[[Path], None]) -> str:
    """A training log that is damaged before it is read for the report is refused by name; without it the run goes on."""
    world.start(out, "ct")
    change(out / name)
    before = contents(out)
    wrong = world.distill(out).refused(name, "without loss curves", "--seal") if name == "log.jsonl" else world.distill(out).refused(name)
    if wrong or contents(out) != before:
        return wrong or "the refusal changed files"
    (out / "log.jsonl").unlink()
    again = world.distill(out)
    return f"{again.lines}" if again.status or "so the report has no loss curves" not in again.out else ""


def eval_words(model: object) -> list[object]:
    return ["eval", model, "--tasks", "small_world", "--limit", "1"]


def damaged_model(world: World, out: Path, command: str) -> str:
    """One flipped bit in weights that have checksums: every command that would read them refuses them by name."""
    from cdlm import files

    shutil.copytree(world.recipe.parent, out)
    files.seal(out / "teacher")
    flip(out / "teacher" / "model.safetensors")
    before = contents(out)
    words = {
        "distill": ["distill", "mini.yaml", "--out", "out"], "generate": ["generate", "teacher", "--prompt", "copy:ab"],
        "convert": ["convert", "teacher", "dst", "--to", "family"], "push": ["push", "teacher", "--repo-id", "a/b", "--dry-run"],
        "eval": eval_words("teacher"),
    }[command]  # fmt: skip
    wrong = world.server.run(*words, folder=out).behind_remarks().refused("teacher/model.safetensors", "SHA256SUMS says")
    return wrong or ("" if contents(out) == before else "the refusal changed files")


def damaged_comparison(world: World, out: Path, name: str) -> str:
    """A run with one flipped bit in what compare reads, or in its checksum, is not compared."""
    shutil.copytree(world.whole, out)
    if name == "report.sha256":
        text = (out / name).read_text()
        (out / name).write_text(("1" if text[0] == "0" else "0") + text[1:])
        return world.server.run("compare", world.whole, out).refused(f"{out / name} is damaged: its lines are not those that were written")
    flip(out / name)
    return world.server.run("compare", world.whole, out).refused(str(out / name))


def last_checkpoint(world: World, out: Path) -> Path:
    """A run that was killed when all its steps were done; the checkpoint of the last one."""
    world.start(out, "c")
    ended = world.distill(out, fault={"function": "cdlm.stages:_note_log", "when": "before", "signal": "SIGKILL"})
    place = out / "checkpoints" / "checkpoint-2"
    assert ended.status == -signal.SIGKILL and place.is_dir(), f"no {place}: status {ended.status}, {ended.err[-300:]}"
    return place


def damaged_checkpoint(world: World, out: Path, name: str, change: Callable[[Path], None]) -> str:
    """A damaged checkpoint is named and not used; the run ends as an unbroken one."""
    change(last_checkpoint(world, out) / name)
    again = world.distill(out)
    named = f"checkpoint-2/{name}" if name != "SHA256SUMS" else "SHA256SUMS"  # as of a run
    if again.status or named not in again.out or "That checkpoint is not used" not in again.out:
        return f"status {again.status}, {again.lines}, {name} named: {name in again.out}"
    return same_run(out, world.whole)


def unreadable(world: World, out: Path, name: str) -> str:
    """A read error is no damage: one line names the file, nothing goes, and when it can be read again the run goes on from there."""
    if name.startswith("trajectories"):
        world.start(out, "c")
    else:
        last_checkpoint(world, out)
    (out / ".lock").unlink(missing_ok=True)  # of the one that was killed
    before = contents(out)
    ended = world.distill(out, fault={"function": "pathlib:Path.open", "name": name, "when": "before", "errno": 5})
    wrong = ended.refused(f"{out / name} can't be read: Input/output error")
    if wrong or contents(out) != before:
        return wrong or "the refusal changed files"
    again = world.distill(out)
    if "is made again" in again.out or ("checkpoint-2" in name and "goes on from checkpoint-2" not in again.out):
        return f"what was there was not used: {again.out[-600:]}"
    return f"{again.lines}" if again.status else same_run(out, world.whole)


def without_checksums(world: World, out: Path, name: str) -> str:
    """A folder from before there were checksums is refused, with the command that seals it; sealed, it is taken."""
    shutil.copytree(world.whole, out)
    for file in (out / name).glob("*.sha256") if name in ("trajectories", ".") else []:
        file.unlink()
    if name != ".":
        (out / name / "SHA256SUMS").unlink()
    wrong = world.distill(out).refused("has no checksums", "cdlm verify", "--seal")
    if wrong:
        return wrong
    sealed = world.server.run("verify", out, "--seal")
    again = world.distill(out)
    checked = world.server.run("verify", out)
    if sealed.status or again.status or checked.status:
        return f"{sealed.lines} {again.lines} {checked.lines}"
    return "" if contents(out) == contents(world.whole) else "sealing wrote other checksums"


for _change in (flip, truncate):
    for _name in DAMAGED:
        CASES[f"damage / {_change.__name__} / {_name}"] = lambda world, out, name=_name, change=_change: damaged(world, out, name, change)
    for _name in ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "SHA256SUMS"):
        CASES[f"damage / {_change.__name__} / checkpoint {_name}"] = (
            lambda world, out, name=_name, change=_change: damaged_checkpoint(world, out, name, change)
        )  # fmt: skip
    for _name in LORA_DAMAGED:
        CASES[f"damage / {_change.__name__} / adapter, {_name}"] = (
            lambda world, out, name=_name, change=_change: damaged(world.lora, out, name, change)
        )  # fmt: skip
    for _name in ("adapter_model.safetensors", "adapter_config.json", "SHA256SUMS"):
        CASES[f"damage / {_change.__name__} / adapter, checkpoint {_name}"] = (
            lambda world, out, name=_name, change=_change: damaged_checkpoint(world.lora, out, name, change)
        )  # fmt: skip
    for _name in BENCH_DAMAGED:
        CASES[f"damage / {_change.__name__} / {_name}"] = (
            lambda world, out, name=_name, change=_change: damaged_bench(world, out, name, change)
        )  # fmt: skip
    for _name in ("log.jsonl", "log.sha256"):
        CASES[f"damage / {_change.__name__} / {_name} before evaluate"] = (
            lambda world, out, name=_name, change=_change: damaged_log(world, out, name, change)
        )  # fmt: skip
CASES["damage / every file is in a case"] = all_listed
for _name in (
    "checkpoints/checkpoint-2/optimizer.pt", "checkpoints/checkpoint-2/SHA256SUMS", "trajectories/shard-00001.parquet",
    "trajectories/SHA256SUMS",
):  # fmt: skip
    CASES[f"damage / a read error at {_name} is none"] = lambda world, out, name=_name: unreadable(world, out, name)
for _name in ("distill", "generate", "convert", "push", "eval"):
    CASES[f"damage / weights that {_name} would read"] = lambda world, out, name=_name: damaged_model(world, out, name)
for _name in ("report.json", "samples.jsonl", "report.sha256"):
    CASES[f"damage / compare with another {_name}"] = lambda world, out, name=_name: damaged_comparison(world, out, name)
for _name in ("trajectories", "student", "export", "."):
    CASES[f"damage / no checksums / {_name}"] = lambda world, out, name=_name: without_checksums(world, out, name)


def add_line(file: Path) -> None:
    """A checksum of a file that never was, before the last line."""
    *lines, end = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*lines, f"{'0' * 64}  nowhere\n", end]))


def without_end(file: Path) -> None:
    """All lines but the last, as files of checksums were before they had one."""
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))


def cut_at_line(file: Path) -> None:
    """The first half of the lines."""
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[: len(lines) // 2]))


def without(file: Path, into: str = "") -> None:
    """No file or folder there; or a folder, a link that leads nowhere or a file in its place."""
    shutil.rmtree(file) if file.is_dir() else file.unlink()
    if into == "folder":
        file.mkdir()
    elif into == "link":
        file.symlink_to(file.with_name("nowhere"))
    elif into == "file":
        file.write_text("mine")


REFUSED = {  # what is changed of a finished run -> how, and what the refusal says
    "checksums with a line too many": ("student/SHA256SUMS", add_line, ("student/SHA256SUMS is damaged: its lines", "/student to make")),
    "checksums without their last lines": ("student/SHA256SUMS", cut_at_line, ("student/SHA256SUMS is damaged: it is cut off", "--seal")),
    "checksums of an older version": (
        "trajectories/SHA256SUMS", without_end, ("trajectories/SHA256SUMS is damaged: it is cut off", "or of an older version", "--seal"),
    ),
    "a report's checksums without their last lines": ("report.sha256", cut_at_line, ("report.sha256 is damaged: it is cut off", "--seal")),
    "a small file of the student": (
        "student/generation_config.json", without, ("generation_config.json is missing, though SHA256SUMS names it", "/student to make"),
    ),
    "the note of the trajectories": ("trajectories/collection.json", without, ("collection.json is missing, so", "/trajectories to make")),
    "the note of the report": (NOTE, without, (f"{NOTE} is missing, so what", "remove", "report.json to make it again")),
    "the note of the export": ("export.request.json", without, ("export.request.json is missing, so what", "remove", "/export to make")),
    "a damaged note": (NOTE, flip, (f"{NOTE} is not what was written", "Remove", "report.json to make it again", "--seal")),
    "a link as the student": ("student", lambda path: without(path, "link"), ("student is a link; train puts a folder there",)),
    "a file as the student": ("student", lambda path: without(path, "file"), ("student is no folder; train puts a folder there",)),
    "a link as the export": ("export", lambda path: without(path, "link"), ("export is a link; export puts a folder there",)),
    "a folder as the report": ("report.json", lambda path: without(path, "folder"), ("report.json is a folder; evaluate writes a file",)),
}  # fmt: skip


def refused_at_once(world: World, out: Path, name: str, change: Callable[[Path], None], said: tuple[str, ...]) -> str:
    """Nothing is trained or measured before a finished run that can't be gone on with is refused, with what to do."""
    shutil.copytree(world.whole, out)
    change(out / name)
    before = contents(out)
    ended = world.distill(out)
    return ended.refused(*said) or ("" if contents(out) == before and not ended.out else f"work was done: {ended.out[-300:]}")


for _case, (_name, _change, _said) in REFUSED.items():
    CASES[f"damage / refused at once / {_case}"] = (
        lambda world, out, name=_name, change=_change, said=_said: refused_at_once(world, out, name, change, said)
    )  # fmt: skip


def copied_sums(world: World, out: Path) -> str:
    """In a collection that was broken off, a copy of another shard's checksums vouches for none: the shard is made again."""
    world.start(out, "c")
    place = out / "trajectories"
    for name in ("manifest.json", "SHA256SUMS"):
        (place / name).unlink()
    shutil.copy(place / "shard-00000.sha256", place / "shard-00001.sha256")
    flip(place / "shard-00001.safetensors")
    ended = world.distill(out)
    if ended.status or "shard-00001.sha256 is damaged: it names shard-00000.parquet" not in ended.out:
        return f"status {ended.status}, {ended.lines}, {ended.out[-300:]}"
    return same_run(out, world.whole)


CASES["damage / checksums of another shard"] = copied_sums


# ---- two runs in one folder ------------------------------------------------------------------------------------------


def second_run(world: World, out: Path) -> str:
    """The second run in a folder is refused and names the first; nothing changes."""
    import socket

    from cdlm import files

    world.start(out, "c")
    with files.locked(out):
        before = contents(out)
        wrong = world.distill(out).refused(f"process {os.getpid()} on {socket.gethostname()}", str(out))
        if wrong or contents(out) != before:
            return wrong or "the refused run changed files"
    again = world.distill(out)
    return f"{again.lines}" if again.status else same_run(out, world.whole)


def lock_of_the_dead(world: World, out: Path) -> str:
    """A crash leaves no lock behind."""
    world.start(out, "c")
    ended = world.distill(out, fault={"function": "cdlm.stages:train", "when": "before", "signal": "SIGKILL"})
    if ended.status != -signal.SIGKILL or not (out / ".lock").is_file():
        return f"status {ended.status}, lock file there: {(out / '.lock').is_file()}"
    again = world.distill(out)
    return f"{again.lines}" if again.status else same_run(out, world.whole)


def second_writer(world: World, out: Path, command: str) -> str:
    """The second command that would write in one place is refused and names the first; nothing changes. Then it does its work."""
    from cdlm import files

    shutil.copytree(world.whole, out / "run")
    teacher = world.recipe.parent / "teacher"
    stated = json.loads((teacher / "config.json").read_text())
    states = [[5, 6, *[stated["mask_token_id"]] * 8], [5, 6, *[9] * 7, stated["eos_token_id"]]]
    (out / "rows.jsonl").write_text(json.dumps({"prompt_ids": [5, 6], "trajectory": states, "is_correct": True}) + "\n")
    words, place, held = {
        "verify --seal": (["verify", "run", "--seal"], "run", files.locked),
        "verify --seal of a part": (["verify", "run/student", "--seal"], "run", files.locked),
        "convert": (["convert", LLADA, "new/dst", "--to", "native"], "new/dst", files.locked_place),
        "import": (
            ["import", "d3llm", "rows.jsonl", "new/dst", "--model", teacher, "--block-length", "8", "--order", "block"], "new/dst",
            files.locked_place,
        ),
        "eval": ([*eval_words(teacher), "--output_path", "new/dst"], "new/dst/finished.jsonl", files.locked_place),
    }[command]  # fmt: skip
    with held(out / place):
        before = contents(out)
        ended = world.server.run(*words, folder=out).behind_remarks()
        if wrong := ended.refused(f"{place} is in use by process {os.getpid()}"):
            return wrong
        if contents(out) != before:
            return f"the refused command wrote {sorted(set(contents(out)) ^ set(before))}"
    again = world.server.run(*words, folder=out)
    if again.status:
        return f"{again.lines}"
    left = [name for name in contents(out) if name.endswith((".lock", ".partial"))]
    return f"it left {left}" if left else ""


for _name in ("verify --seal", "verify --seal of a part", "convert", "import", "eval"):
    CASES[f"lock / a second {_name}"] = lambda world, out, name=_name: second_writer(world, out, name)
CASES["lock / a second run"] = second_run
CASES["lock / after a crash"] = lock_of_the_dead


# ---- no room, no permission ------------------------------------------------------------------------------------------


def full(world: World, out: Path, before: str, fault: dict[str, Any], named: str) -> str:
    """What can't be written is named in one line; what was there stays, and the next start ends as an unbroken run."""
    world.start(out, before)
    kept = contents(out)
    ended = world.distill(out, fault=fault)
    wrong = ended.refused("can't be written", named)
    if wrong:
        return wrong
    now = contents(out)
    if lost := [name for name in kept if now.get(name) != kept[name]]:
        return f"it lost {lost}"
    if left := [name for name in now if ".partial" in name or name == ".lock"]:
        return f"it left {left}"
    again = world.distill(out)
    return f"{again.lines}" if again.status else same_run(out, world.whole)


for _name, (_before, _fault, _named) in {
    "a limit, before any work": ("", {"limit": 2_000}, "/"),
    "a limit, in a checkpoint": ("c", {"limit": 60_000}, "checkpoint-1"),
    "a limit, in evaluate or export": ("ct", {"limit": 30_000}, "/run/"),
    "a limit, in export": ("cte", {"limit": 60_000}, "export"),
    "disk full at a manifest": ("", {"function": SYNC, "name": ".manifest.json.partial", "when": "before", "errno": 28}, "manifest.json"),
    "disk full at the student": ("c", {"function": "cdlm.files:seal", "number": 3, "when": "before", "errno": 28}, "student"),
    "disk full at the report": ("ct", {"function": SYNC, "name": ".report.json.partial", "when": "before", "errno": 28}, "report.json"),
    "read-only at a shard": ("", {"function": REPLACE, "name": "shard-00000.parquet", "when": "before", "errno": 30}, "shard-00000"),
}.items():
    CASES[f"disk / {_name}"] = lambda world, out, values=(_before, _fault, _named): full(world, out, *values)


for _name, _fault in {
    "weights": {"function": "cdlm.hub:shutil.copyfile", "name": "adapter_model.safetensors", "when": "before", "errno": 28},
    "checksums": {"function": "cdlm.files:seal", "number": 1, "when": "before", "errno": 28},
    "bytes, brought to the disk": {"function": SYNC, "name": "adapter_model.safetensors", "when": "before", "errno": 28},
}.items():
    CASES[f"disk / disk full at an exported adapter's {_name}"] = (
        lambda world, out, fault=_fault: full(world.lora, out, "cte", fault, "export")
    )  # fmt: skip


@contextlib.contextmanager
def mounted(place: Path, size: str) -> Iterator[bool]:
    """A file system of its own at `place`; False where mounting is not allowed."""
    place.mkdir(parents=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place], capture_output=True, check=False)
    try:
        yield done.returncode == 0
    finally:
        if done.returncode == 0:
            subprocess.run(["umount", "-l", place], check=False)


def remount(place: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", "tmpfs", place], check=True)  # with the source named no option is read back


NOT_RUN = "not run: no file system can be mounted here"


def small_disk(world: World, out: Path) -> str:
    """A disk that is full in the middle of training; with more room the same command goes on."""
    with mounted(out, "300k") as allowed:
        if not allowed:
            return NOT_RUN
        ended = world.distill(out / "run")
        if wrong := ended.refused("can't be written", str(out / "run")):
            return wrong
        if not (out / "run" / "trajectories" / "manifest.json").is_file():
            return "the trajectories are lost"
        remount(out, "size=20m")
        again = world.distill(out / "run")
        return f"{again.lines}" if again.status else same_run(out / "run", world.whole)


def read_only_disk(world: World, out: Path) -> str:
    """A read-only disk: one line that names the folder."""
    with mounted(out, "20m") as allowed:
        if not allowed:
            return NOT_RUN
        world.start(out / "run", "c")
        remount(out, "ro")
        for place in (out / "run", out / "new"):
            if wrong := world.distill(place).refused(str(place), "Read-only file system"):
                return wrong
        remount(out, "rw")
        again = world.distill(out / "run")
        return f"{again.lines}" if again.status else same_run(out / "run", world.whole)


CASES["disk / a small file system"] = small_disk
CASES["disk / a read-only file system"] = read_only_disk


# ---- bad input -------------------------------------------------------------------------------------------------------


def edit_json(path: Path, **values: Any) -> None:
    """Change keys of a JSON file; ... takes a key out."""
    found = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in found.items() if value is not ...}))


def edit_tensor(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def _nan(tensors: dict[str, Any]) -> None:
    tensors["lm_head.weight"][3, 4] = float("nan")


def _overflow(tensors: dict[str, Any]) -> None:
    tensors["lm_head.weight"] *= 1e38


def _drop(tensors: dict[str, Any]) -> None:
    tensors.pop("lm_head.weight")


def _cut(tensors: dict[str, Any]) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1].contiguous()


def _setting(change: str) -> Callable[[Path], list[str]]:
    return lambda folder: ["distill", "mini.yaml", "--out", "out", "--set", change]


def _recipe(text: str | bytes) -> Callable[[Path], list[str]]:
    def prepare(folder: Path) -> list[str]:
        (folder / "bad.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
        return ["distill", "bad.yaml", "--out", "out"]

    return prepare


def _rows(text: str | bytes, file: str = "train.jsonl") -> Callable[[Path], list[str]]:
    def prepare(folder: Path) -> list[str]:
        (folder / file).write_bytes(text if isinstance(text, bytes) else text.encode())
        return ["distill", "mini.yaml", "--out", "out"]

    return prepare


def _teacher(change: Callable[[Path], None], command: str = "distill") -> Callable[[Path], list[str]]:
    def prepare(folder: Path) -> list[str]:
        change(folder / "teacher")
        return {
            "distill": ["distill", "mini.yaml", "--out", "out"], "generate": ["generate", "teacher", "--prompt", "copy:ab"],
            "inspect": ["inspect", "teacher"], "plan": ["plan", "mini.yaml", "--out", "out"],
        }[command]  # fmt: skip

    return prepare


def _config(command: str = "generate", **values: Any) -> Callable[[Path], list[str]]:
    """The teacher's config.json with these values."""
    return _teacher(lambda model: edit_json(model / "config.json", **values), command)


def _deep(file: str, command: str) -> Callable[[Path], list[str]]:
    return _teacher(lambda model: (model / file).write_text('{"a":' * 100_000 + "1" + "}" * 100_000) and None, command)


def _command(*words: str) -> Callable[[Path], list[str]]:
    return lambda folder: list(words)


BOMB = "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{y}: &{y} [{','.join(['*' + x] * 9)}]\n" for x, y in zip("abcdefgh", "bcdefghi", strict=True)
)
ROW = '{"task": "copy", "prompt": "copy:ab", "answer": "ab"}\n'
IN_TEST = (  # those that no other test file has
    "a huge budget", "a key that a schedule does not take", "a date where there is none", "a bomb of anchors", "a nest without an end",
    "a recipe in another encoding", "no heads", "weights that are cut", "NaN in the weights", "a missing tensor",
    "weights whose logits overflow",
    "an unknown activation, generate", "a width of text, generate", "quantized weights, inspect", "a nest in config.json",
    "an index that leaves the folder", "an index that is a list", "a chat template that is broken", "half a surrogate",
    "a parquet file that is none", "an unknown command", "text for a flag's number", "a file as --out",
)  # fmt: skip
BAD: dict[str, tuple[Callable[[Path], list[str]], tuple[str, ...]]] = {
    # recipes
    "an unknown key": (_setting("train.stepz=3"), ("unknown key train.stepz", "train.steps")),
    "text for a number": (_setting("train.steps=many"), ("train.steps is 'many'", "whole number")),
    "a huge budget": (_setting("decode.max_new_tokens=999999999999"), ("decode.max_new_tokens is 999999999999", "below 2**31")),
    "a block that does not divide": (_setting("decode.block_length=5"), ("block_length 5", "1, 2, 4, 8, 16")),
    "an unknown schedule": (_setting("train.scheduler=cosin"), ("train.scheduler is 'cosin'", "linear")),
    "a key that a schedule does not take": (
        _setting("train.scheduler_kwargs={power: 2}"), ("train.scheduler_kwargs.power", "constant_with_warmup takes none")
    ),
    "a schedule's value": (
        _setting("train={learning_rate: 0.1, batch_size: 2, steps: 2, scheduler: cosine, scheduler_kwargs: {num_cycles: x}}"),
        ("num_cycles is 'x'", "a number"),
    ),
    "not a number": (_setting("train.learning_rate=.nan"), ("train.learning_rate is nan", "between")),
    "infinity": (_setting("train.warmup=.inf"), ("train.warmup is inf",)),
    "a name that leaves the folder": (_setting("name=../x"), ("name is '../x'", "no '/'")),
    "a name with control characters": (_setting('name="a\\e[31m"'), ("name is 'a\\x1b[31m'", "no control characters")),
    "a date where there is none": (_recipe("name: 2024-13-45\n"), ("bad.yaml is not YAML", "month")),
    "a tag of Python": (_recipe("name: !!python/object/apply:os.system [id]\n"), ("bad.yaml is not YAML",)),
    "a bomb of anchors": (_recipe(BOMB), ("unknown key a",)),
    "a nest without an end": (_recipe("name: " + "[" * 3000), ("bad.yaml", "deep")),
    "a recipe in another encoding": (_recipe("name: ü\n".encode("latin-1")), ("bad.yaml is not UTF-8",)),
    "a binary recipe": (_recipe(bytes(range(256))), ("bad.yaml",)),
    "an empty recipe": (_recipe(""), ("bad.yaml holds None",)),
    "a LoRA target that is none": (
        _setting("train.lora={rank: 2, alpha: 2, targets: [query]}"), ("train.lora.targets names ['query']", "q_proj")
    ),
    "a LoRA rank that is huge": (
        _setting("train.lora={rank: 4611686018427387904, alpha: 2, targets: [q_proj]}"), ("train.lora.rank is 4611686018427387904", "65536")
    ),
    "a folder as the test questions": (_setting("data.test=teacher"), ("data.test", "teacher")),
    # models
    "no model": (_setting("model=./nowhere"), ("model: nothing at",)),
    "config.json that is no JSON": (_teacher(lambda m: (m / "config.json").write_text("{")), ("config.json is not JSON",)),
    "config.json that is a list": (_teacher(lambda m: (m / "config.json").write_text("[1]")), ("config.json holds [1]",)),
    "a layer count of text": (_teacher(lambda m: edit_json(m / "config.json", num_hidden_layers="two")), ("num_hidden_layers",)),
    "no heads": (_teacher(lambda m: edit_json(m / "config.json", num_attention_heads=0)), ("config.json",)),
    "a mask token out of the vocabulary": (_teacher(lambda m: edit_json(m / "config.json", mask_token_id=999)), ("999",)),
    "a mask token of text": (_teacher(lambda m: edit_json(m / "config.json", mask_token_id="mask")), ("mask",)),
    "an unknown model_type": (_teacher(lambda m: edit_json(m / "config.json", model_type="nonesuch")), ("nonesuch",)),
    "a model_type that is a list": (_teacher(lambda m: edit_json(m / "config.json", model_type=["llama"])), ("model_type",)),
    "a negative width, generate": (_config(hidden_size=-8), ("teacher: config.json makes no model", "-8")),
    "a width of text, generate": (_config(hidden_size="64"), ("teacher: config.json", "hidden_size", "'64'")),
    "no heads, generate": (_config(num_attention_heads=0), ("teacher: config.json",)),
    "no layer count, generate": (_config(num_hidden_layers=None), ("teacher: config.json", "num_hidden_layers")),
    "no words, generate": (_config(vocab_size=0), ("teacher: config.json",)),
    "positions of text, generate": (_config(max_position_embeddings="x"), ("max_position_embeddings", "'x'")),
    "an unknown activation, generate": (_config(hidden_act="nonesuch"), ("teacher: config.json", "'nonesuch'")),
    "a scaling of text, generate": (_config(rope_parameters={"rope_type": "linear", "factor": "x", "rope_theta": 1.0}), ("config.json",)),
    "an unknown dtype in config.json, generate": (_config(dtype="nonsense"), ("teacher: config.json", "nonsense")),
    "a model_type that is a list, generate": (_config(model_type=["llama"]), ("model_type ['llama']",)),
    "remote code that is a number, generate": (_config(auto_map=5), ("teacher", "int")),
    **{
        f"quantized weights, {command}": (
            _config(command, quantization_config={"quant_method": "bitsandbytes"}), ("quantization_config", "bitsandbytes", "bfloat16")
        ) for command in ("generate", "plan", "inspect")
    },
    **{
        f"a nest in {file}": (_deep(file, command), (file, "deep"))
        for file, command in (("config.json", "generate"), ("tokenizer_config.json", "generate"), ("generation_config.json", "inspect"))
    },
    "a config.json of 900 levels": (
        _teacher(lambda m: edit_json(m / "config.json", x=json.loads("[" * 900 + "]" * 900)), "generate"), ("config.json", "50 levels")
    ),
    "weights that are cut": (_teacher(lambda m: truncate(m / "model.safetensors")), ("model.safetensors",)),
    "weights that are empty": (_teacher(lambda m: (m / "model.safetensors").write_bytes(b"")), ("model.safetensors",)),
    "NaN in the weights": (_teacher(lambda m: edit_tensor(m / "model.safetensors", _nan)), ("lm_head.weight", "NaN")),
    "weights whose logits overflow": (_teacher(lambda m: edit_tensor(m / "model.safetensors", _overflow)), ("teacher", "logits")),
    "a missing tensor": (_teacher(lambda m: edit_tensor(m / "model.safetensors", _drop)), ("lm_head.weight",)),
    "a tensor of another shape": (_teacher(lambda m: edit_tensor(m / "model.safetensors", _cut)), ("lm_head.weight", "(57, 32)")),
    "an index that leaves the folder": (
        _teacher(lambda m: (m / "model.safetensors.index.json").write_text('{"weight_map": {"lm_head.weight": "../../x.safetensors"}}')),
        ("'../../x.safetensors'", "a file in"),
    ),
    "an index that is a list": (
        _teacher(lambda m: (m / "model.safetensors.index.json").write_text('{"weight_map": [1]}')), ("index.json", "weight_map")
    ),
    "a tokenizer that is no JSON": (_teacher(lambda m: (m / "tokenizer.json").write_text("{]")), ("tokenizer",)),
    "no tokenizer": (_teacher(lambda m: [(m / n).unlink() for n in ("tokenizer.json", "tokenizer_config.json")] and None), ("tokenizer",)),
    "a chat template that is broken": (_teacher(lambda m: (m / "chat_template.jinja").write_text("{% for %}")), ("template",)),
    # data
    "a line that is no JSON": (_rows(ROW + "{oops\n"), ("train.jsonl, line 2 is not JSON",)),
    "a line that is a list": (_rows("[1, 2]\n"), ("train.jsonl, line 1",)),
    "a file without rows": (_rows(""), ("train.jsonl holds no rows",)),
    "data in another encoding": (_rows(b'{"prompt": "\xff"}\n'), ("train.jsonl is not UTF-8",)),
    "a number for a text": (_rows('{"task": "copy", "prompt": 3, "answer": "a"}\n' * 6), ("row 1 has no text under 'prompt'",)),
    "an empty prompt": (
        lambda folder: [
            *_rows('{"task": "copy", "prompt": "", "answer": "a"}\n' * 6)(folder), "--set", "data.chat_template=false",
        ], ("row 1", "0 tokens"),
    ),
    "text that no token stands for": (_rows('{"task": "copy", "prompt": "copy:Q", "answer": "a"}\n' * 6), ("row 1", "does not know")),
    "half a surrogate": (_rows('{"task": "copy", "prompt": "copy:\\ud800", "answer": "a"}\n' * 6), ("row 1",)),
    "an answer that is too long": (_rows(f'{{"task": "copy", "prompt": "copy:a", "answer": "{"a" * 40}"}}\n' * 6), ("row 1", "16")),
    "a prompt that is too long": (_rows(f'{{"task": "copy", "prompt": "copy:{"a" * 90}", "answer": "a"}}\n' * 6), ("row 1", "24")),
    "a nested line": (_rows('{"a":' * 5000 + "1" + "}" * 5000 + "\n"), ("train.jsonl, line 1",)),
    "a number of 5000 digits": (_rows(ROW + f'{{"prompt": {"9" * 5000}}}\n'), ("train.jsonl, line 2", "digits")),
    "a parquet file that is none": (
        lambda folder: [*_rows("PAR1", "train.parquet")(folder), "--set", "data.prompts=train.parquet"], ("train.parquet",)
    ),
    "a group named all": (_rows(ROW.replace('"task": "copy"', '"task": "all"') * 6), ("row 1 has 'all'",)),
    # command lines
    "no command": (_command(), ("COMMAND",)),
    "an unknown command": (_command("distil", "mini.yaml"), ("'distil'", "distill")),
    "an unknown flag": (_command("distill", "mini.yaml", "--setz", "a=1"), ("--setz",)),
    "--debug behind the command": (_command("distill", "--debug", "mini.yaml"), ("--debug stands before COMMAND",)),
    "eval without tasks": (_command("eval", "teacher"), ("--tasks is missing", "lm-eval ls tasks")),
    "a folder without a tokenizer": (
        _teacher(lambda m: [file.unlink() for file in m.glob("tokenizer*")] and None, "generate"), ("teacher has no tokenizer",)
    ),
    "a flag without its value": (_command("generate", "teacher", "--prompt"), ("--prompt", "expected one argument")),
    "text for a flag's number": (_command("generate", "teacher", "--prompt", "copy:a", "--steps", "x"), ("--steps", "'x'")),
    "NaN as a temperature": (_command("generate", "teacher", "--prompt", "copy:a", "--temperature", "nan"), ("temperature is nan",)),
    "a negative seed": (_command("generate", "teacher", "--prompt", "copy:a", "--seed", "-1"), ("seed is -1",)),
    "an unknown dtype": (_command("generate", "teacher", "--prompt", "copy:a", "--dtype", "int8"), ("dtype is 'int8'", "float32")),
    "an unknown card": (_command("roofline", "teacher", "--hardware", "Z9"), ("Z9", "H100")),
    "a file as --out": (
        lambda folder: (folder / "file").write_text("x") and ["distill", "mini.yaml", "--out", "file"], ("file",)
    ),
    "a push of what is no model": (_command("push", "teacher/config.json", "--repo-id", "a/b"), ("teacher/config.json",)),
    "a repository's name": (_command("push", "teacher", "--repo-id", "a b"), ("--repo-id is 'a b'", "user/name")),
    "nothing to verify": (_command("verify", "nowhere"), ("nowhere",)),
    "an import of what is not there": (_command("import", "tad", "nothing.jsonl", "dst", "--model", "teacher"), ("nothing.jsonl",)),
    "a conversion of nothing": (_command("convert", "nothing", "dst", "--to", "native"), ("nothing",)),
}  # fmt: skip


OF_THE_PARSER = (
    "no command", "an unknown command", "an unknown flag", "a flag without its value", "text for a flag's number",
    "--debug behind the command",
)  # fmt: skip


def bad(world: World, out: Path, name: str) -> str:
    """Status 2, one sentence that names value and allowed set, no traceback, nothing written; the same below a traceback with --debug,
    but for what the parser of command lines itself refuses."""
    prepare, named = BAD[name]
    shutil.copytree(world.recipe.parent, out)
    arguments = prepare(out)
    before = contents(out)
    ended = world.server.run(*arguments, folder=out)
    if wrong := ended.refused(*named):
        return wrong
    if contents(out) != before:
        return f"it wrote {sorted(set(contents(out)) ^ set(before))}"
    if (out / "out").exists():
        return "it made the folder out"
    if name in OF_THE_PARSER:
        return ""
    again = world.server.run("--debug", *arguments, folder=out)
    if again.status != 2 or "Traceback" not in again.err or again.lines[-1] != ended.lines[0]:
        return f"with --debug: status {again.status}: {again.err[-400:]}"
    return ""


for _name in BAD:
    CASES[f"input / {_name}"] = lambda world, out, name=_name: bad(world, out, name)


def debug(world: World, out: Path) -> str:
    """--debug shows the traceback above the line."""
    ended = world.server.run("--debug", "distill", "nowhere.yaml")
    if ended.status != 2 or "Traceback" not in ended.err or not ended.lines[-1].startswith("cdlm: error: no recipe"):
        return f"status {ended.status}: {ended.err[-400:]}"
    return ""


CASES["input / --debug"] = debug


# ---- hostile input ---------------------------------------------------------------------------------------------------


class Bomb:
    """A pickle that leaves a file when it is loaded."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def _bomb(path: Path, mark: Path) -> None:
    """A torch file with a pickle that runs code."""
    import torch

    torch.save({"state": Bomb(mark)}, path)


def _checkpointed(world: World, out: Path) -> Path:
    """A run that was killed behind its first checkpoint; the checkpoint."""
    world.start(out, "c")
    world.distill(out, fault={"function": "cdlm.trainer:CDLMTrainer.compute_loss", "number": 2, "when": "before", "signal": "SIGKILL"})
    return out / "checkpoints" / "checkpoint-1"


def pickled_state(world: World, out: Path, name: str) -> str:
    """A checkpoint of somebody else, with checksums that fit: what is more than tensors is not read."""
    from cdlm import files

    place, mark = _checkpointed(world, out), out.parent / "mark"
    if name in ("optimizer.bin", "pytorch_model_fsdp.bin"):  # as if FSDP had written the checkpoint
        import torch

        (place / "optimizer.pt").rename(place / "optimizer.bin")
        torch.save({}, place / "pytorch_model_fsdp.bin")
    _bomb(place / name, mark)
    if name.startswith(("pytorch_model.bin", "adapter_model")):
        (place / "model.safetensors").unlink()
    files.seal(place)
    ended = world.distill(out)
    return "the pickle was run" if mark.exists() else ended.refused("checkpoint-1")


def pickled_weights(world: World, out: Path) -> str:
    """A model with weights in a pickle alone is refused."""
    shutil.copytree(world.recipe.parent, out)
    mark = out.parent / "mark"
    (out / "teacher" / "model.safetensors").unlink()
    _bomb(out / "teacher" / "pytorch_model.bin", mark)
    for command in (["distill", "mini.yaml", "--out", "out"], ["generate", "teacher", "--prompt", "copy:ab"]):
        if wrong := world.server.run(*command, folder=out).refused("pytorch_model.bin is a pickle"):
            return wrong
    return "the pickle was run" if mark.exists() else ""


def remote_code(world: World, out: Path) -> str:
    """Code in a model's folder is not run, whatever its config.json names."""
    shutil.copytree(world.recipe.parent, out)
    mark, teacher = out.parent / "mark", out / "teacher"
    for name in ("modeling_evil", "configuration_evil", "tokenization_evil"):
        (teacher / f"{name}.py").write_text(f"open({str(mark)!r}, 'w')\nclass Evil: pass\n")
    edit_json(teacher / "config.json", auto_map={
        "AutoConfig": "configuration_evil.Evil", "AutoModel": "modeling_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil",
    })  # fmt: skip
    edit_json(teacher / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization_evil.Evil", "tokenization_evil.Evil"]})
    for command in (["generate", "teacher", "--prompt", "copy:ab"], ["inspect", "teacher"], ["distill", "mini.yaml", "--dry-run"]):
        ended = world.server.run(*command, folder=out)
        if mark.exists() or ended.status not in (0, 2):
            return f"{command}: code ran: {mark.exists()}, status {ended.status}: {ended.err[-300:]}"
    return ""


def foreign_kernels(world: World, out: Path) -> str:
    """A config.json that asks for kernels of the Hub gets none."""
    shutil.copytree(world.recipe.parent, out)
    for key in ("attn_implementation", "_attn_implementation", "_experts_implementation"):
        edit_json(out / "teacher" / "config.json", **{key: "someone/evil-kernel"})
        if wrong := world.server.run("inspect", "teacher", folder=out).refused(f"{key} 'someone/evil-kernel'", "not run", "sdpa"):
            return wrong
        edit_json(out / "teacher" / "config.json", **{key: ...})
    return ""


def outside(world: World, out: Path, file: str, old: str, new: str) -> str:
    """A path in a manifest that leaves the folder is refused."""
    from cdlm import files

    shutil.copytree(world.whole, out)
    shutil.rmtree(out / "student")
    text = (out / file).read_text()
    assert old in text
    (out / file).write_text(text.replace(old, new))
    if not file.endswith(("SHA256SUMS", ".sha256")):
        files.seal(out / "trajectories")
    changes = ["--set", "collect=null", "--set", f"trajectories={out / 'trajectories'}"]
    ended = world.server.run("train", world.recipe, "--out", out / "other", *small(), *changes)
    return ended.refused(new.strip(' "'))


EVIL = "<img src=x onerror=alert(1)>|[a](javascript:alert(1))`**"


def escaped(world: World, out: Path) -> str:
    """Names and texts of data and model are text in report and card, not HTML or Markdown."""
    shutil.copytree(world.recipe.parent, out)
    rows = [json.loads(line) for line in (out / "test.jsonl").read_text().splitlines()]
    (out / "test.jsonl").write_text("".join(json.dumps(row | {"task": f"{EVIL}\x1b[31m {row['task']}"}) + "\n" for row in rows))
    run = world.start(out / "out", "ct")
    ended = world.server.run("distill", out / "mini.yaml", "--out", run, *small("evaluate.num_prompts=2"))
    if ended.status:
        return f"status {ended.status}: {ended.lines}"
    if "\x1b[31m" in ended.out:
        return "the task's control characters reach the terminal"
    for name in ("report.html", "report.md", "export/README.md"):
        body = (run / name).read_text().split("\n---\n")[-1]  # the card's front matter is YAML, which a reader does not render
        if "<img src=x" in body or (name != "report.html" and "[a](javascript" in body):
            return f"{name} holds the tag or the link"
    if any(line.count("|") != 0 for line in (run / "report.md").read_text().splitlines() if line.startswith("## ")):
        return "report.md holds a table's edge in a heading"
    return "" if "&lt;img src=x" in (run / "report.html").read_text() else "the name is not in report.html"


def _speak(folder: Path, text: str) -> None:
    """Let the tokenizer write `text` for every letter and digit, as a hostile one would."""
    file = folder / "tokenizer.json"
    found = json.loads(file.read_text())
    vocabulary = found["model"]["vocab"]
    found["model"]["vocab"] = {
        (f"{text}{i}" if len(token) == 1 and token.isalnum() and token not in "copy" else token): i for token, i in vocabulary.items()
    }
    file.write_text(json.dumps(found))


def control_characters(world: World, out: Path) -> str:
    """A model that writes escape sequences moves no cursor through --trace and progress."""
    shutil.copytree(world.recipe.parent, out)
    _speak(out / "teacher", "\x1b]0;owned\x07\x9b2J\u202e")
    ended = world.server.run("generate", "teacher", "--prompt", "copy:", "--max-new-tokens", "8", "--trace", folder=out)
    if ended.status:
        return f"status {ended.status}: {ended.lines}"
    bad = [c for c in "\x1b\x07\x9b\u202e" if c in ended.err]
    if bad or "\\x1b" not in ended.err:
        return f"on stderr: {bad}; {ended.err[-200:]!r}"
    return ""


def special_text(world: World, out: Path) -> str:
    """Text of a special token in a prompt is text (of which the small world's tokenizer lacks a character), a token only where asked."""
    asked = ["generate", world.recipe.parent / "teacher", "--prompt", "copy:a<|mask|>b", "--max-new-tokens", "8"]
    if wrong := world.server.run(*asked).refused("does not know: '|'"):
        return wrong
    ended = world.server.run(*asked, "--special-tokens")
    return f"status {ended.status}: {ended.lines}" if ended.status else ""


SECRET = "hf_" + "Qw7" * 12


def secrets(world: World, out: Path) -> str:
    """No token of the environment is in what is printed or written, also when a bad command names it."""
    shutil.copytree(world.recipe.parent, out)
    known = {"HF_TOKEN": SECRET, "OPENAI_API_KEY": "plain-looking-secret-value"}
    said = [
        world.server.run("distill", "mini.yaml", "--out", "out", *small(), folder=out, **known),
        world.server.run("--debug", "distill", f"{SECRET}.yaml", folder=out, **known),
        world.server.run("distill", "mini.yaml", "--out", "out", *small(f"data.prompts={known['OPENAI_API_KEY']}"), folder=out, **known),
    ]
    if said[1].status != 2 or said[2].status != 2:
        return f"{said[1].lines} {said[2].lines}"
    for value in known.values():
        if any(value in text for ended in said for text in (ended.out, ended.err)):
            return "a secret is printed"
    held = [name for name, content in contents(out / "out").items() if any(value.encode() in content for value in known.values())]
    return f"a secret is in {held}" if held else ""


for _name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "pytorch_model.bin", "optimizer.bin"):
    CASES[f"hostile / a pickle as {_name} of a checkpoint"] = lambda world, out, name=_name: pickled_state(world, out, name)
def linked_checkpoints(world: World, out: Path, name: str) -> str:
    """Checkpoints that are links out of the run's folder are refused before any work, and what they lead to stays as it is."""
    place = last_checkpoint(world, out)
    linked, elsewhere = (place if name else place.parent), out.parent / "elsewhere"
    linked.rename(elsewhere)
    linked.symlink_to(elsewhere)
    kept = contents(elsewhere)
    ended = world.distill(out)
    return ended.refused(f"{linked} is a link to {elsewhere}") or ("" if contents(elsewhere) == kept else "it changed what is elsewhere")


CASES["hostile / a link as the folder of checkpoints"] = lambda world, out: linked_checkpoints(world, out, "")
CASES["hostile / a link as a checkpoint"] = lambda world, out: linked_checkpoints(world, out, "checkpoint-2")
CASES["hostile / a pickle as weights"] = pickled_weights
CASES["hostile / code in a model's folder"] = remote_code
CASES["hostile / kernels that config.json names"] = foreign_kernels
for _name, _values in {
    "a manifest": ("trajectories/manifest.json", '"shard-00000"', '"../../shard-00000"'),
    "checksums": ("trajectories/SHA256SUMS", "  manifest.json", "  ../../manifest.json"),
    "checksums, absolute": ("trajectories/SHA256SUMS", "  manifest.json", "  /etc/passwd"),
}.items():
    CASES[f"hostile / a path outside in {_name}"] = lambda world, out, values=_values: outside(world, out, *values)
CASES["hostile / names that are HTML and Markdown"] = escaped
CASES["hostile / a model that writes control characters"] = control_characters
CASES["hostile / text of special tokens in a prompt"] = special_text
CASES["hostile / secrets of the environment"] = secrets


# ---- the same again --------------------------------------------------------------------------------------------------


def repeated(world: World, out: Path) -> str:
    """The same recipe again, from nothing: trajectories, student and table, bit for bit."""
    ended = world.distill(out)
    return f"{ended.lines}" if ended.status else same_run(out, world.whole)


def batch_size(world: World, out: Path) -> str:
    """Another batch size makes the same trajectories: tokens, steps and seeds (probabilities up to rounding)."""
    import pyarrow.parquet as pq

    found = []
    for size in (1, 4):
        place = out / str(size)
        sampled = ("collect.temperatures=[0.0, 0.7]", "collect.shard_size=4", f"collect.batch_size={size}")
        ended = world.server.run("collect", world.recipe, "--out", place, *small(*sampled))
        if ended.status:
            return f"{ended.lines}"
        found.append(pq.read_table(place / "trajectories" / "shard-00000.parquet").to_pydict())
    differing = [key for key in found[0] if key != "confidence" and found[0][key] != found[1][key]]
    return f"differing: {differing}" if differing else ""


CASES["determinism / the same recipe twice"] = repeated
CASES["determinism / another batch size"] = batch_size


# ---- numbers that are none -------------------------------------------------------------------------------------------


def loss_that_is_none(world: World, out: Path) -> str:
    """A loss that is no number: one line names the step, the samples and the last good checkpoint, from which the same command goes on."""
    world.start(out, "c")
    ended = world.distill(out, fault={"function": "cdlm.losses:consistency_from_hidden", "number": 2, "when": "no number"})
    wrong = ended.refused(
        "the consistency loss is nan", ": step 2, samples: trajectory ", f"The last good checkpoint: {out / 'checkpoints' / 'checkpoint-1'}"
    )
    if wrong:
        return wrong
    again = world.distill(out)
    return f"{again.lines}" if again.status else same_run(out, world.whole)


def endless_loss(world: World, out: Path) -> str:
    """Weights that grow without end are no checkpoint: one line names the step and the last good one."""
    world.start(out, "c")
    growing = ("train.learning_rate=1e3", "train.steps=400", "train.max_grad_norm=1e9", "train.weight_decay=1e6")
    ended = world.distill(out, *growing, "train.scheduler=constant", "train.warmup=0")
    return ended.refused(" is no longer finite: step 2;", f"The last good checkpoint: {out / 'checkpoints' / 'checkpoint-'}")


def no_logits(world: World, out: Path, command: str) -> str:
    """Logits that are no numbers from the second forward on: one line that names the step and the question."""
    world.start(out, "ct" if command == "evaluate" else "")
    words, named = {
        "collect": (["distill", world.recipe, "--out", out, *small()], "collect: of trajectory 0 (question "),
        "evaluate": (["distill", world.recipe, "--out", out, *small()], "evaluate: student(0.5), question "),
        "eval": (eval_words(world.recipe.parent / "teacher"), "eval: task small_world, document 0: "),
        "generate": (["generate", world.recipe.parent / "teacher", "--prompt", "copy:ab", "--max-new-tokens", "8"], "of row 0"),
    }[command]
    ended = world.server.run(*words, fault={"function": "cdlm.families.base:DiffusionLM._align", "number": 2, "when": "no number"})
    return ended.behind_remarks().refused(named, "a logit is not finite in block 0, step 1 of row 0")


CASES["numbers / a loss that is none"] = loss_that_is_none
CASES["numbers / weights that grow without end"] = endless_loss
for _name in ("collect", "evaluate", "eval", "generate"):
    CASES[f"numbers / logits that are none, {_name}"] = lambda world, out, name=_name: no_logits(world, out, name)


# ---- chance ----------------------------------------------------------------------------------------------------------

EACH, PARTS = 500, 10  # 5,000 random cases of each kind, in parts with seeds of their own


def random_recipes(world: World, out: Path, part: int) -> str:
    import fuzz

    taken = fuzz.recipes(EACH, part)
    return "" if taken > EACH // 3 else f"only {taken} of {EACH} random recipes were taken"


def random_decodings(world: World, out: Path, part: int) -> str:
    import fuzz

    ran = fuzz.decodings(EACH, part)
    return "" if ran > EACH // 2 else f"only {ran} of {EACH} random decodings ran"


DAMAGES, SEEDS = 50, 4


def random_damages(world: World, out: Path, seed: int) -> str:
    """A bit of any byte of any file of a finished run, or its end cut off: named, and made again as it was or refused."""
    rng = random.Random(seed)
    for number in range(DAMAGES):
        one = rng.choice((world, world.lora))
        name = rng.choice(sorted(set(contents(one.whole)) - {*CARDS}))
        size = (one.whole / name).stat().st_size
        place, bit = rng.randrange(size), rng.choice((*range(8), None))

        def change(path: Path, place: int = place, bit: int | None = bit) -> None:
            content = bytearray(path.read_bytes())
            if bit is not None:
                content[place] ^= 1 << bit
            path.write_bytes(content if bit is not None else content[:place])

        if seen := damaged(one, out / str(number), name, change):
            return f"{name}, byte {place}, {'cut off' if bit is None else f'bit {bit}'}: {seen}"
        shutil.rmtree(out / str(number))
    return ""


for _seed in range(SEEDS):
    CASES[f"random / {DAMAGES} damages, seed {_seed}"] = lambda world, out, seed=_seed: random_damages(world, out, seed)
for _part in range(PARTS):
    CASES[f"random / {EACH} recipes, seed {_part}"] = lambda world, out, part=_part: random_recipes(world, out, part)
for _part in range(PARTS):
    CASES[f"random / {EACH} decodings, seed {_part}"] = lambda world, out, part=_part: random_decodings(world, out, part)


def groups() -> list[str]:
    return list(dict.fromkeys(name.split(" / ")[0] for name in CASES))


@contextlib.contextmanager
def fresh(folder: Path) -> Iterator[Path]:
    """A place for one case, gone behind it."""
    place = Path(tempfile.mkdtemp(dir=folder))
    try:
        yield place / "run"
    finally:
        shutil.rmtree(place, ignore_errors=True)


def in_own_namespace() -> None:
    """Start again where file systems may be mounted: in a namespace of this process's own, where the kernel gives one to somebody who is
    not root."""
    again = ("unshare", "--user", "--map-root-user", "--mount")
    if os.geteuid() != 0 and shutil.which("unshare") and subprocess.run([*again, "true"], capture_output=True, check=False).returncode == 0:
        os.execvp(again[0], [*again, sys.executable, *sys.argv])


def main(wanted: list[str]) -> int:
    sys.path.insert(0, str(ROOT))
    unknown = [name for name in wanted if name not in groups()]
    if unknown:
        print(f"no group {unknown[0]!r}; there are {', '.join(groups())}", file=sys.stderr)
        return 2
    failed = 0
    with tempfile.TemporaryDirectory() as place:
        world = World.make(Path(place))
        for name, case in CASES.items():
            if wanted and name.split(" / ")[0] not in wanted:
                continue
            with fresh(Path(place)) as out:
                try:
                    seen = case(world, out)
                except Exception:
                    seen = traceback.format_exc(limit=-2).replace("\n", " | ")
            failed += bool(seen) and seen != NOT_RUN
            print(f"{name}: {seen if seen == NOT_RUN else 'FAILED, ' + seen if seen else 'ok'}", flush=True)
        world.server.close()
    print(f"{failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        serve()
    else:
        in_own_namespace()
        sys.exit(main(sys.argv[1:]))
