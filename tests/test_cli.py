"""The command line: bad input is one line and status 2, a dry run writes nothing, `generate` is `decode`."""

import io
import json
import re
import shutil
from itertools import pairwise

import mini
import pytest
import torch
from mini import contents, finished, snapshot
from rich.console import Console

from cdlm import cli, data, families, stages
from cdlm.decode import DecodeConfig, decode
from cdlm.trace import Trace

NO_CUDA = "cuda:99"  # a GPU that no machine has, with a CUDA build of torch or without one


@pytest.fixture
def done(tmp_path_factory):
    return finished(tmp_path_factory)


@pytest.fixture
def folder(done, tmp_path, monkeypatch):
    """The recipe and its data in a folder of its own, which is also the current one."""
    shutil.copytree(done.recipe.parent, tmp_path / "mini", ignore=shutil.ignore_patterns("out"))
    monkeypatch.chdir(tmp_path / "mini")
    return tmp_path / "mini"


def refused(capsys, arguments: list[str], *named: str) -> None:
    """The command ends with status 2 and one line that names what was wrong."""
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if not line.startswith("Loading weights") and line.strip()]
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("cdlm: error: ") and "Traceback" not in captured.err
    for text in named:
        assert text in lines[0]


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["distill", "collect", "train", "evaluate", "export", "ablate"])
def test_a_missing_recipe(folder, capsys, command):
    refused(capsys, [command, "nowhere.yaml"], "no recipe at nowhere.yaml", "mini.yaml")


@pytest.mark.parametrize(("change", "named"), [
    ("train.stepz=3", ["unknown key train.stepz", "train.steps"]),
    ("colour=blue", ["unknown key colour"]),
    ("family=nonesuch", ["family is 'nonesuch'", "native"]),
    ("decode.block_length=5", ["block_length 5 does not divide", "1, 2, 4, 8, 16"]),
    ("nonsense", ["--set 'nonsense'", "key=value"]),
    ("=3", ["--set '=3'"]),
    ("train.steps=[1", ["--set 'train.steps=[1'", "not YAML"]),
    ("train.steps=many", ["train.steps is 'many'", "a whole number"]),
    ("name.first=a", ["name is no group of keys"]),
    ("decode.confidence_threshold=1.5", ["decode.confidence_threshold is 1.5", "between 0 and 1"]),
    ("data.prompts=nowhere.jsonl", ["data.prompts", "nowhere.jsonl"]),
    ("collect.num_prompts=7", ["data.prompts asks for 7 rows", "has 6"]),
    ("data.answer_key=response", ["no text under 'response'", "task, prompt, answer"]),
    ("decode.max_new_tokens=8", ["decode.max_new_tokens is 8"]),
    ("model=/nowhere", ["model: nothing at /nowhere"]),
    ("model=./nowhere", ["model: nothing at nowhere"]),
    (f"device={NO_CUDA}", [f"device is '{NO_CUDA}'", "this machine has no such device", "cpu"]),
    ("device=nonsense", ["device is 'nonsense'"]),
])
def test_a_bad_value_is_one_line(folder, capsys, change, named):
    refused(capsys, ["distill", "mini.yaml", "--out", "out", "--set", change], *named)
    assert not list(folder.glob("out/**/*.parquet"))


@pytest.mark.parametrize(("text", "named"), [
    ("- a\n- b\n", ["a recipe is a group of keys"]),
    ("name: a\nname: b\n", ["key name stands twice"]),
    ("name: a\n", ["missing key data"]),
    ("name: [x\n b: 3\n", ["not YAML"]),
])
def test_a_broken_recipe_is_one_line(folder, capsys, text, named):
    (folder / "broken.yaml").write_text(text)
    refused(capsys, ["distill", "broken.yaml"], *named)


def test_broken_data_is_one_line_that_names_the_row(folder, capsys):
    with (folder / "train.jsonl").open("a") as stream:
        stream.write("{oops\n")
    refused(capsys, ["distill", "mini.yaml", "--out", "out"], "train.jsonl, line 7 is not JSON")


def test_a_dry_run_of_a_model_that_is_not_there_is_one_line(folder, capsys):
    refused(capsys, ["distill", "mini.yaml", "--dry-run", "--set", "model=./nowhere"], "model: nothing at nowhere")


# "./nowhere" beside mini/mini.yaml is mini/nowhere, which looks like a Hub repository.
def test_a_model_beside_a_recipe_in_a_subfolder_is_not_sought_on_the_hub(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder.parent)
    refused(capsys, ["distill", "mini/mini.yaml", "--out", "out", "--set", "model=./nowhere"], "model: nothing at mini/nowhere")


@pytest.mark.parametrize(("arguments", "named"), [
    (["/nowhere"], ["no model at /nowhere"]),
    (["teacher", "--family", "nonesuch"], ["unknown family 'nonesuch'", "native"]),
    (["teacher", "--dtype", "float64"], ["dtype is 'float64'"]),
    (["teacher", "--temperature", "-1"], ["temperature is -1"]),
    (["teacher", "--confidence-threshold", "1.5"], ["confidence_threshold is 1.5"]),
    (["teacher", "--tokens-per-step", "0"], ["tokens_per_step is 0"]),
    (["teacher", "--tokens-per-step", "2", "--confidence-threshold", "0.5"], ["exactly one of"]),
    (["teacher", "--block-length", "-4"], ["block_length is -4"]),
    (["teacher", "--order", "random"], ["order is 'random'", "entropy"]),
    (["teacher", "--order", "entropy"], ["order 'entropy'", "confidence_threshold"]),
    (["teacher", "--top-k", "0"], ["top_k is 0"]),
    (["teacher", "--steps", "4", "--tokens-per-step", "1"], ["exactly one of"]),
    (["empty"], ["empty has no config.json"]),
    (["plain"], ["no family recognises model_type 'llama'"]),
    (["weightless"], ["model.safetensors"]),
    (["teacher", "--max-new-tokens", "0"], ["max_new_tokens is 0"]),
    (["teacher", "--block-length", "0"], ["block_length is 0"]),
    (["teacher", "--device", NO_CUDA], [f"device is '{NO_CUDA}'"]),
])
def test_generate_with_bad_input_is_one_line(folder, capsys, arguments, named):
    (folder / "empty").mkdir()
    shutil.copytree(folder / "teacher", folder / "weightless", ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copytree(folder / "teacher", folder / "plain")
    config = json.loads((folder / "plain" / "config.json").read_text())
    del config["diffusion_family"]
    (folder / "plain" / "config.json").write_text(json.dumps(config))
    refused(capsys, ["generate", *arguments, "--prompt", "copy:ab"], *named)


@pytest.mark.parametrize(("prompt", "named"), [
    ("", "--prompt is ''; it must hold some text"),
    (" \n", "--prompt is ' \\n'; it must hold some text"),
    ("Ünknown: ab", "--prompt holds text that the tokenizer of teacher does not know: 'Ü '"),
    ("copy:aQb ZaQ", "does not know: 'Q Z'"),
    ("日本", "does not know: '日本'"),
])
@pytest.mark.parametrize("raw", [[], ["--raw"]])
def test_generate_refuses_a_prompt_that_it_can_not_read(folder, capsys, prompt, named, raw):
    refused(capsys, ["generate", "teacher", "--prompt", prompt, "--max-new-tokens", "16", *raw], named)


def _no_room_on_a_device():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB. If reserved but unallocated memory is large ...")


@pytest.mark.parametrize("ask, named", [
    (_no_room_on_a_device, "Tried to allocate 9.00 GiB.)"), (lambda: torch.empty(2**56), "can't allocate memory"),
    (lambda: bytes(2**62), "no bytes named"),
])  # fmt: skip
def test_no_room_in_memory_is_one_line(folder, capsys, monkeypatch, ask, named):
    """And a traceback with --debug; any other RuntimeError stays what it is, for it is a fault of this package."""
    monkeypatch.setattr(stages, "collect", lambda run: ask())
    asked = ["distill", str(folder / "mini.yaml"), "--out", str(folder / "out")]
    assert cli.main(asked) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert line.startswith("cdlm: error: out of memory (") and "train.batch_size" in line and "unallocated" not in line
    assert named in line
    assert cli.main(["--debug", *asked]) == 2 and "Traceback" in capsys.readouterr().err
    monkeypatch.setattr(stages, "collect", lambda run: (_ for _ in ()).throw(RuntimeError("a shape is wrong")))
    with pytest.raises(RuntimeError, match="a shape is wrong"):
        cli.main(asked)


def test_no_command_and_an_unknown_one_end_with_status_2(capsys):
    for arguments in ([], ["nonsense"], ["distill"], ["generate", "folder"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        assert ended.value.code == 2
        assert "Traceback" not in capsys.readouterr().err


def test_a_stage_before_its_time(folder, capsys):
    refused(capsys, ["export", "mini.yaml", "--out", "out"], "export needs the result of collect")


# ---- dry run ---------------------------------------------------------------------------------------------------------


def test_a_dry_run_says_what_it_would_do_and_writes_nothing(folder, capsys):
    before = snapshot(folder.parent)
    assert cli.main(["distill", "mini.yaml", "--out", "out/deep", "--dry-run"]) == 0
    assert snapshot(folder.parent) == before and not (folder / "out").exists()
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    parameters = sum(p.numel() for p in families.load("teacher").parameters())
    assert f"{parameters:,} parameters" in lines["model"] and "teacher" in lines["model"] and "llama" in lines["model"]
    assert "16 tokens in 2 blocks of 8, confidence > 0.5" in lines["decoding"]
    assert "12 trajectories (6 prompts x 2 temperatures)" in lines["collect"]
    assert f"({12 * 16 * 32 * 2:,} bytes) of hidden rows" in lines["collect"]
    assert re.search(r"about \d+ forwards each", lines["collect"])
    assert "6 steps of 4 rows (2.0 epochs), 3 forwards a step" in lines["train"] and "all parameters" in lines["train"]
    assert "4 questions" in lines["evaluate"]
    assert "export" in lines
    for name in ("collect", "train", "evaluate", "in"):
        assert re.search(r"roughly \d+(\.\d+)? (s|min|h)\b", lines[name]), lines[name]


@pytest.mark.parametrize(("changes", "said"), [
    (["train.dlm_weight=0"], "2 forwards a step"),
    (["train.dlm_weight=0", "train.consistency_weight=0"], "1 forwards a step"),
    (["train.steps=null", "train.epochs=4"], "12 steps of 4 rows (4.0 epochs)"),
    (["train.lora={rank: 2, alpha: 4, targets: [q_proj]}"], "LoRA rank 2 on q_proj"),
])
def test_a_dry_run_follows_the_recipe(folder, capsys, changes, said):
    sets = [text for change in changes for text in ("--set", change)]
    assert cli.main(["distill", "mini.yaml", "--dry-run", *sets]) == 0
    assert said in capsys.readouterr().out


def test_a_dry_run_of_a_finished_run_says_what_is_done(done, capsys):
    before = snapshot(done.out)
    assert cli.main(["distill", str(done.recipe), "--out", str(done.out), "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("(done)") == 4 and "roughly 0 s" in printed
    assert snapshot(done.out) == before


# ---- generate --------------------------------------------------------------------------------------------------------


def expected(path, prompt: str, config: DecodeConfig, *, raw: bool = False, seeds: list[int] | None = None):
    model = families.load(path)
    tokenizer = families.load_tokenizer(path, model.facts)
    ids = torch.tensor([data.prompt_ids(tokenizer, prompt, chat_template=not raw)])
    out = decode(model, ids, torch.ones_like(ids, dtype=torch.bool), config, seeds=seeds)
    return out, tokenizer.decode(out.answer(0, model.facts.eos_token_ids))


STUDENT = {"max_new_tokens": 16, "block_length": 8}
TEACHER = {"max_new_tokens": 16, "block_length": 8, "block_causal": False, "use_cache": False}
TEACHER_ARGUMENTS = ["--max-new-tokens", "16", "--block-length", "8"]


@pytest.mark.parametrize(("model", "arguments", "config"), [
    ("export", [], DecodeConfig(**STUDENT, confidence_threshold=0.5)),
    ("export", ["--raw"], DecodeConfig(**STUDENT, confidence_threshold=0.5)),
    ("export", ["--max-new-tokens", "11", "--block-length", "4", "--confidence-threshold", "0.9"],
     DecodeConfig(11, 4, confidence_threshold=0.9)),
    ("export", ["--confidence-threshold", "0"], DecodeConfig(**STUDENT, confidence_threshold=0.0)),
    ("export", ["--tokens-per-step", "3"], DecodeConfig(**STUDENT, tokens_per_step=3)),
    ("export", ["--steps-per-block", "3", "--order", "entropy"], DecodeConfig(**STUDENT, steps_per_block=3, order="entropy")),
    ("export", ["--steps", "5", "--order", "sequential"], DecodeConfig(**STUDENT, steps=5, order="sequential")),
    ("export", ["--confidence-threshold", "0.2", "--steps-per-block", "2", "--top-k", "3"],
     DecodeConfig(**STUDENT, confidence_threshold=0.2, steps_per_block=2, top_k=3)),
    ("export", ["--top-p", "0.3"], DecodeConfig(**STUDENT, confidence_threshold=0.5, top_p=0.3)),
    ("export", ["--temperature", "1.5", "--seed", "7"], DecodeConfig(**STUDENT, confidence_threshold=0.5, temperature=1.5)),
    ("export", ["--attention", "full"],
     DecodeConfig(**STUDENT, confidence_threshold=0.5, block_causal=False, use_cache=False)),
    ("teacher", [*TEACHER_ARGUMENTS, "--tokens-per-step", "1"], DecodeConfig(**TEACHER, tokens_per_step=1)),
    ("teacher", TEACHER_ARGUMENTS, DecodeConfig(**TEACHER, confidence_threshold=0.9)),
])
def test_generate_prints_the_answer_that_decode_gives(done, capsys, model, arguments, config):
    path = done.out / "export" if model == "export" else done.recipe.parent / "teacher"
    for prompt in ("copy:5naj", "reverse:ujywq9n6"):
        assert cli.main(["generate", str(path), "--prompt", prompt, *arguments]) == 0
        captured = capsys.readouterr()
        out, text = expected(path, prompt, config, raw="--raw" in arguments, seeds=[7] if config.temperature else None)
        assert captured.out == text + "\n"
        said = captured.err.splitlines()[-1]
        assert said.startswith(f"{out.steps[0]} steps, {out.commit_forwards[0]} of them with a commit, {out.output_tokens[0]} tokens, ")
        assert f"{out.output_tokens[0] / out.forwards[0]:.2f} tokens a forward" in said and said.endswith(f"stopped at {out.stop[0]}")


def test_a_seed_decides_a_sampled_answer(done, capsys):
    answers = []
    for seed in ("1", "1", "2", "3"):
        assert cli.main(["generate", str(done.out / "export"), "--prompt", "copy:5naj", "--temperature", "3", "--seed", seed]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] and len(set(answers)) > 1


def traced(path, prompt: str, config: DecodeConfig):
    """The lines of a trace below its head, without colours, and what was decoded."""
    model = families.load(path)
    tokenizer = families.load_tokenizer(path, model.facts)
    ids = torch.tensor([data.prompt_ids(tokenizer, prompt, chat_template=True)])
    written = io.StringIO()
    with Trace(tokenizer, config, Console(file=written, width=400, highlight=False)) as trace:
        out = decode(model, ids, torch.ones_like(ids, dtype=torch.bool), config, callback=trace)
    head, *lines = written.getvalue().splitlines()
    assert head.startswith("step block")
    return lines, out, tokenizer


@pytest.mark.parametrize("config", [
    DecodeConfig(**STUDENT, confidence_threshold=0.9), DecodeConfig(**STUDENT, tokens_per_step=3), DecodeConfig(13, 4, tokens_per_step=1),
])
def test_a_trace_has_a_line_a_step_and_ends_with_the_answer(done, config):
    lines, out, tokenizer = traced(done.out / "export", "reverse:ujywq9n6", config)
    assert len(lines) == out.steps[0] > 2
    assert [int(line.split()[0]) for line in lines] == list(range(1, out.steps[0] + 1))
    assert "·" not in lines[-1]
    final = "".join(tokenizer.decode([token]) for token in out.filled_BM[0, : out.decoded_tokens[0]].tolist())
    assert lines[-1].split(maxsplit=2)[2] == final
    # Within a block every step leaves fewer open slots, and only a block's last step leaves none.
    steps = [(int(line.split()[1]), line.count("·")) for line in lines]
    for (block, left), (next_block, next_left) in pairwise(steps):
        assert next_left < left if next_block == block else (next_block == block + 1 and left == 0)


def test_generate_with_trace_shows_every_step_on_stderr(done, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    path = done.out / "export"
    config = DecodeConfig(**STUDENT, tokens_per_step=2)
    assert cli.main(["generate", str(path), "--prompt", "copy:5naj", "--tokens-per-step", "2", "--trace"]) == 0
    captured = capsys.readouterr()
    out, text = expected(path, "copy:5naj", config)
    assert captured.out == text + "\n", "the trace does not mix with the answer"
    lines = [line for line in captured.err.splitlines() if re.match(r" *\d+ +\d+  ", line)]
    assert len(lines) == out.steps[0]
    assert "·" in lines[0] and "·" not in lines[-1]


def test_generate_writes_nothing(done, capsys):
    before = contents(done.out / "export")
    assert cli.main(["generate", str(done.out / "export"), "--prompt", "copy:ab"]) == 0
    assert contents(done.out / "export") == before


def test_the_command_is_a_process_with_the_same_status(folder):
    ended = mini.run_python("from cdlm.cli import main\nsys.exit(main(sys.argv[1:]))", "distill", "nowhere.yaml", folder=folder)
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr.count("\n") == 1 and ended.stderr.startswith("cdlm: error: no recipe at nowhere.yaml")
