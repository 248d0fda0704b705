"""What a user does with a model that decides every slot at every step: export, stock transformers, generate, trace, inspect, eval, and
the rows of a report."""

import contextlib
import io
import json
import re
import shutil
from dataclasses import replace

import dgemma
import mini
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from conftest import TINY
from rich.console import Console
from safetensors.torch import load_file, save_file

from cdlm import cli, data, families, hub, runs
from cdlm.decode import DecodeConfig, decode, resolve
from cdlm.evaluate.assisted import DiffusionGenerateConfig
from cdlm.evaluate.run import Method, answers, first_tokens, reveals, score, seeds_of
from cdlm.trace import Trace

CANVAS, BUDGET = 8, 16
DECODING = {
    "order": "entropy", "entropy_bound": 2.0, "max_denoising_steps": 3, "t_min": 0.2, "t_max": 0.5, "stability_threshold": 1,
    "entropy_threshold": 0.25,
}
CONFIG = DecodeConfig(BUDGET, CANVAS, **DECODING)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An exported random model with the small world's tokenizer, which says that it takes 3 steps a canvas."""
    from transformers import AutoTokenizer

    out = tmp_path_factory.mktemp("redecide") / "export"
    model = dgemma.random_model(vocab=58)
    tokenizer = AutoTokenizer.from_pretrained(TINY / "tokenizer")
    hub.save(
        model, tokenizer, out, facts=model.facts, max_new_tokens=BUDGET, decoding=DECODING, card="card", with_decoder=False
    )
    return out


@pytest.fixture(scope="module")
def loaded(folder):
    model = families.load(folder)
    return model, families.load_tokenizer(folder, model.facts)


def asked(tokenizer, *prompts):
    return [
        data.Example(i, "copy", text, "x", data.prompt_ids(tokenizer, text, chat_template=True), [5]) for i, text in enumerate(prompts)
    ]


STOCK = """
import json, torch
from transformers import AutoModelForImageTextToText
torch.set_num_threads(1)
model = AutoModelForImageTextToText.from_pretrained(sys.argv[1])
ids = torch.tensor([json.loads(sys.argv[2])])
torch.manual_seed(5)
out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids))
print(json.dumps([type(model).__name__, out.sequences[0, ids.shape[1]:].tolist(), float(out.tokens_per_forward[0])]))
"""


def test_stock_transformers_in_a_new_process_decodes_the_exported_folder_with_its_few_steps(folder, loaded, tmp_path):
    """Without this package, by generation_config.json alone: the class, the tokens of our decoder, and its number of steps."""
    model, tokenizer = loaded
    ids = data.prompt_ids(tokenizer, "copy:5naj", chat_template=True)
    ended = mini.run_python(STOCK, folder, json.dumps(ids), folder=tmp_path, package=False)
    assert ended.returncode == 0, ended.stderr
    kind, tokens, per_forward = json.loads(ended.stdout)
    config = resolve(model, families.read_config(folder))
    assert config == CONFIG
    torch.manual_seed(5)
    prompt = torch.tensor([ids])
    out = decode(model, prompt, torch.ones_like(prompt, dtype=torch.bool), config)
    assert kind == "DiffusionGemmaForBlockDiffusion" and out.steps[0] <= 3 * out.commit_forwards[0]
    assert out.ids_BN[0, : len(tokens)].tolist() == tokens
    assert round(sum(token != 0 for token in tokens) / per_forward) == out.steps[0]


def test_the_exported_folder_states_its_decoding_and_holds_no_decoder_of_masks(folder):
    stated = json.loads((folder / "generation_config.json").read_text())
    assert stated["max_denoising_steps"] == 3 and stated["sampler_config"]["entropy_bound"] == 2.0
    assert stated["confidence_threshold"] == 0.25 and stated["max_new_tokens"] == BUDGET and stated["eos_token_id"] == [2]
    assert not (folder / "custom_generate").exists()


def test_values_that_are_given_go_before_the_checkpoints(loaded):
    model, _ = loaded
    config = resolve(model, {}, max_new_tokens=5, max_denoising_steps=7, entropy_bound=0.5, confidence_threshold=None)
    assert config == replace(CONFIG, max_new_tokens=5, max_denoising_steps=7, entropy_bound=0.5)


def test_a_checkpoint_that_states_nothing_decodes_as_transformers_does_by_default():
    found = dgemma.random_model().own_decoding
    assert found == {
        "order": "entropy", "entropy_bound": 0.1, "max_denoising_steps": 48, "t_min": 0.4, "t_max": 0.8, "stability_threshold": 1,
        "entropy_threshold": 0.005,
    }


def test_generate_is_the_decoder_with_a_seed(folder, loaded, capsys, monkeypatch):
    """The answer on stdout, the trace and the counts on stderr: a line a step."""
    monkeypatch.setenv("COLUMNS", "400")
    model, tokenizer = loaded
    ids = torch.tensor([data.prompt_ids(tokenizer, "copy:5naj", chat_template=True)])
    out = decode(model, ids, torch.ones_like(ids, dtype=torch.bool), CONFIG, seeds=[4])
    assert cli.main(["generate", str(folder), "--prompt", "copy:5naj", "--seed", "4", "--trace"]) == 0
    captured = capsys.readouterr()
    assert captured.out == tokenizer.decode(out.answer(0, (2,))) + "\n"
    assert len([line for line in captured.err.splitlines() if re.match(r" *\d+ +\d+  ", line)]) == out.steps[0]
    assert f"{out.steps[0]} steps and {out.commit_forwards[0]} commit forwards, {out.output_tokens[0]} tokens" in captured.err
    assert cli.main(["generate", str(folder), "--prompt", "copy:5naj", "--confidence-threshold", "0.9"]) == 2
    assert "exactly one of" in capsys.readouterr().err


def test_generate_takes_every_value_of_the_sampler(folder, loaded, capsys):
    """One flag a value; they are those of the decoding, and change it."""
    model, tokenizer = loaded
    ids = torch.tensor([data.prompt_ids(tokenizer, "copy:5naj", chat_template=True)])
    values = {
        "max_denoising_steps": 9, "t_min": 0.1, "t_max": 0.9, "stability_threshold": 1, "entropy_threshold": 4.0, "entropy_bound": 1.5,
    }  # fmt: skip
    flags = [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    found = []
    for words, config in (([], CONFIG), (flags, replace(CONFIG, **values))):
        out = decode(model, ids, torch.ones_like(ids, dtype=torch.bool), config, seeds=[4])
        assert cli.main(["generate", str(folder), "--prompt", "copy:5naj", "--seed", "4", *words]) == 0
        captured = capsys.readouterr()
        assert captured.out == tokenizer.decode(out.answer(0, (2,))) + "\n" and f"{out.steps[0]} steps" in captured.err
        found.append(captured.out)
    assert found[0] != found[1]


def test_a_trace_shows_slots_that_are_decided_again(loaded):
    """Colours: green where a slot is accepted that was noise, yellow where it gets another token, red where it is taken back."""
    model, tokenizer = loaded
    config = replace(CONFIG, max_denoising_steps=12, stop_at_eos=False, entropy_bound=1.0, t_max=1.0)
    written, steps = io.StringIO(), []
    ids = torch.tensor([data.prompt_ids(tokenizer, "reverse:ab", chat_template=True)])
    console = Console(file=written, width=400, highlight=False, force_terminal=True, color_system="standard")
    with Trace(tokenizer, config, console, (2,)) as trace:
        decode(model, ids, torch.ones_like(ids, dtype=torch.bool), config, callback=lambda s: (trace(s), steps.append(s)), seeds=[1])
    head, *lines = written.getvalue().splitlines()
    assert "taken back: red" in head and len(lines) == len(steps)
    before = None
    for step, line in zip(steps, lines, strict=True):
        now = [token if held else None for token, held in zip(step.ids_AS[0].tolist(), step.reveal_AS[0].tolist(), strict=True)]
        before = [None] * CANVAS if step.step == 0 else before
        changes = [(a, b) for a, b in zip(before, now, strict=True) if a != b]
        assert ("\x1b[1;30;42m" in line) == any(a is None for a, _ in changes)
        assert ("\x1b[1;30;43m" in line) == any(a is not None and b is not None for a, b in changes)
        assert ("\x1b[1;37;41m" in line) == any(b is None for _, b in changes)
        before = now
    assert any("\x1b[1;37;41m" in line for line in lines)


def test_inspect_says_what_it_is(folder, capsys):
    assert cli.main(["inspect", str(folder)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^noise +uniform", said, re.M) and re.search(r"^native +DiffusionGemmaForBlockDiffusion", said, re.M)
    assert re.search(r"^mask_token_id +None", said, re.M) and re.search(r"^block_length +8", said, re.M)


def test_eval_answers_with_a_seed_a_sample_whatever_the_batch(folder):
    harness = pytest.importorskip("cdlm.evaluate.harness")
    from lm_eval.api.instance import Instance

    asked = [Instance("generate_until", {}, (text, {"until": [], "max_gen_toks": 8}), 0, ("t", i, 1))
             for i, text in enumerate(["copy:abc", "reverse:0123456789", "sort:zyx"])]  # fmt: skip
    found = [harness.CDLM(str(folder), batch_size=size, say=lambda text: None).generate_until(asked) for size in (1, 3)]
    assert found[0] == found[1] and len(set(found[0])) > 1


def test_transformers_own_generate_is_a_method_with_the_same_counts(loaded):
    """A batch of three: tokens, steps, commits and forwards are those of this package's decoder with the same random numbers, and the
    generator is put back as it was."""
    model, tokenizer = loaded
    examples = asked(tokenizer, "copy:abc", "reverse:0123456789", "sort:zyx")
    prompt, valid = data.pad_left([example.prompt_ids for example in examples], 0)
    seeds = seeds_of(examples)
    method = Method("transformers_generate", None, DiffusionGenerateConfig(CONFIG), model, None)
    before, blocks = torch.get_rng_state(), []
    found = answers(method, prompt, valid, seeds, lambda step: blocks.append(step.block))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(seeds[0])
    wanted = decode(model, prompt, valid, CONFIG)
    assert found.ids_BN.tolist() == wanted.ids_BN.tolist() and blocks == list(range(max(wanted.commit_forwards)))
    for name in ("steps", "commit_forwards", "forwards", "output_tokens", "stop"):
        assert getattr(found, name) == getattr(wanted, name)
    assert first_tokens(method, 7) == CANVAS


def test_a_row_of_padding_alone_is_a_row(loaded, monkeypatch):
    """transformers gives it no tokens a forward; at batch 1 its steps are the forwards of the decoder."""
    model, tokenizer = loaded
    (example,) = asked(tokenizer, "copy:abc")
    prompt, valid = data.pad_left([example.prompt_ids], 0)
    generate, forwards = model.hf.generate, []

    def padding(**given):
        watch = model.hf.model.decoder.register_forward_hook(lambda *_: forwards.append(1))
        out = generate(**given)
        watch.remove()
        out.sequences[:, prompt.shape[1] :] = model.facts.pad_token_id
        out.tokens_per_forward = torch.zeros_like(out.tokens_per_forward)
        return out

    monkeypatch.setattr(model.hf, "generate", padding)
    ids, steps = model.own_generate(prompt, valid, CONFIG.max_new_tokens, {name: getattr(CONFIG, name) for name in model.own_decoding})
    assert ids.unique().tolist() == [model.facts.pad_token_id] and steps == [len(forwards)] and len(forwards) > 1


def test_scores_do_not_depend_on_the_batch(loaded):
    model, tokenizer = loaded
    examples = asked(tokenizer, "copy:abc", "reverse:0123456789", "sort:zyx")
    method = Method("student", 2.0, CONFIG, model, contextlib.nullcontext)
    assert score(method, examples, tokenizer, 1) == score(method, examples, tokenizer, 3)
    shown = reveals(method, examples[0], tokenizer)
    assert max(shown["revealed_at"]) <= shown["steps"] and min(shown["revealed_at"]) >= 1


def test_transformers_has_no_diffusion_decoding_of_other_models():
    from conftest import random_model

    with pytest.raises(ValueError, match="transformers has no diffusion decoding of its own for a model of type qwen2"):
        random_model().own_generate(torch.ones(1, 2, dtype=torch.long), torch.ones(1, 2, dtype=torch.bool), 4, {})


SAMPLER = {
    "max_denoising_steps": 4, "entropy_bound": 1.0, "t_min": 0.2, "t_max": 0.5, "stability_threshold": 1, "entropy_threshold": 0.2
}
RECIPE = {
    "name": "canvas", "seed": 3, "model": "teacher",
    "data": {"prompts": "train.jsonl", "test": "train.jsonl", "group_key": "task", "max_prompt_tokens": 24},
    "decode": {
        "max_new_tokens": BUDGET, "block_length": CANVAS, "sampler": SAMPLER, "student_sampler": {**SAMPLER, "max_denoising_steps": 2},
    },
    "collect": {"num_prompts": 3, "batch_size": 3, "shard_size": 3, "screen": {"drop": False}, "top_k": 8},
    "train": {"steps": 1, "batch_size": 2, "learning_rate": 0.001, "save_steps": 1, "logging_steps": 1},
    "evaluate": {
        "methods": list(runs.REDECIDING_METHODS), "truncated_steps": [1], "entropy_bounds": [0.5],
        "num_prompts": 2, "batch_size": 2, "latency_prompts": 1, "warmup_prompts": 0,
    },
    "export": {"license": "mit"},
}


def write_run(folder, **changes):
    """A recipe of a random teacher of the small world's tokenizer, and questions."""
    from transformers import AutoTokenizer

    folder.mkdir(exist_ok=True)
    dgemma.random_hf(vocab=58).save_pretrained(folder / "teacher")
    AutoTokenizer.from_pretrained(TINY / "tokenizer").save_pretrained(folder / "teacher")
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in mini.questions(3, seed=1)))
    (folder / "canvas.yaml").write_text(yaml.safe_dump({**RECIPE, **changes}, sort_keys=False))
    return folder / "canvas.yaml"


def test_a_run_from_teacher_to_export(tmp_path, capsys):
    """Rows of all four methods; the teacher is also cut to the student's mean steps a canvas, by name "truncated" in the summary; the
    exported folder takes the student's steps."""
    recipe = write_run(tmp_path)
    assert cli.main(["distill", str(recipe), "--out", str(tmp_path / "out")]) == 0, capsys.readouterr().err
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    rows = {(row["method"], row["parameter"]): row for row in report["results"] if row["task"] == "all"}
    mean = rows["student", 1.0]
    cut = max(1, round(mean["steps"] / mean["commit_forwards"]))
    assert set(rows) == {
        ("teacher", None), ("transformers_generate", None), ("student", 0.5), ("student", 1.0), ("teacher_truncated", 1.0),
        ("teacher_entropy_bound", 0.5), ("teacher_entropy_bound", 1.0),
        ("teacher_truncated", float(cut)),
    } or cut == 1  # fmt: skip
    assert report["summary"]["truncated_steps"] == cut and report["summary"]["confidence_threshold"] == 1.0
    for row in rows.values():
        assert row["forwards"] == pytest.approx(row["steps"] + row["commit_forwards"]) and row["steps"] <= 4 * row["commit_forwards"]
    assert rows["teacher_truncated", 1.0]["steps"] == rows["teacher_truncated", 1.0]["commit_forwards"]
    assert rows["teacher_entropy_bound", 1.0]["steps"] <= 2 * rows["teacher_entropy_bound", 1.0]["commit_forwards"], "the student's sampler"
    assert mean["steps"] <= 2 * mean["commit_forwards"] and rows["teacher", None]["title"] == "teacher, its own sampler"
    for name in ("report.md", "report.html"):  # in every table, as the base of the latencies and above each sample
        text = (tmp_path / "out" / name).read_text()
        assert "teacher, its own sampler" in text and "1 token a step" not in text, name
    stated = json.loads((tmp_path / "out" / "export" / "generation_config.json").read_text())
    assert stated["max_denoising_steps"] == 2 and stated["sampler_config"]["entropy_bound"] == 1.0
    card = (tmp_path / "out" / "export" / "README.md").read_text()
    assert "AutoModelForImageTextToText" in card and "at most 2 steps a canvas, entropy bound 1" in card
    assert resolve(families.load(tmp_path / "out" / "export"), {}).max_denoising_steps == 2
    capsys.readouterr()
    assert cli.main(["bench", str(recipe), "--out", str(tmp_path / "out"), "--batches", "1"]) == 0
    said = capsys.readouterr().out
    assert "teacher, its own sampler" in said and "transformers' own generate" in said
    assert cli.main(["bench", str(recipe), "--out", str(tmp_path / "out"), "--parts", "growth"]) == 2
    assert "a model that decides every slot at every step has table alone" in capsys.readouterr().err


def test_an_adapter_on_tied_weights_is_exported_alone_and_why_is_said(tmp_path, capsys):
    """Not merged: the folder is the adapter, which loads onto its base and decodes with the student's steps."""
    lora = {"rank": 2, "alpha": 4, "targets": ["q_proj", "o_proj"]}
    evaluate = {**RECIPE["evaluate"], "methods": ["student"], "num_prompts": 1, "entropy_bounds": []}
    recipe = write_run(tmp_path, train={**RECIPE["train"], "lora": lora}, evaluate=evaluate)
    assert cli.main(["distill", str(recipe), "--out", str(tmp_path / "out")]) == 0, capsys.readouterr().err
    assert "the adapter alone, not merged: encoder and decoder read the same weights" in capsys.readouterr().out
    out = tmp_path / "out" / "export"
    assert (out / "adapter_model.safetensors").is_file() and not (out / "model.safetensors").exists()
    config = json.loads((out / "adapter_config.json").read_text())
    (out / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": str(tmp_path / "teacher")}))
    assert resolve(families.load(out), {}).max_denoising_steps == 2


@pytest.mark.parametrize("changes, message", [
    ({"evaluate": {"methods": ["teacher", "student_uncached"]}},
     "evaluate.methods has student_uncached; a model that decides every slot at every step has teacher"),
    ({"collect": {"temperatures": [0.0, 0.7]}},
     "collect.temperatures is [0.0, 0.7]; nothing reads it of a model that decides every slot at every step: leave it out"),
    ({"decode": {"confidence_threshold": 0.5}}, "decode.confidence_threshold is 0.5; nothing reads it"),
    ({"evaluate": {"thresholds": [0.5]}}, "evaluate.thresholds is [0.5]; nothing reads it"),
    ({"decode": {"student_sampler": {**SAMPLER, "t_min": 0.5}}},
     "decode.student_sampler.t_min is 0.5; it must be below decode.student_sampler.t_max, which is 0.5"),
])  # fmt: skip
def test_what_such_a_model_does_not_read_is_refused_before_any_work(tmp_path, capsys, changes, message):
    recipe = write_run(tmp_path, **{section: {**RECIPE[section], **values} for section, values in changes.items()})
    assert cli.main(["distill", str(recipe), "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out" / "trajectories").exists()


@pytest.mark.parametrize("change", ["decode.sampler={max_denoising_steps: 4}", "collect.top_k=8", "train.finish=0.1"])
def test_what_only_such_a_model_reads_is_refused_of_another(tmp_path, capsys, change):
    recipe = mini.write(tmp_path)
    assert cli.main(["distill", str(recipe), "--out", str(tmp_path / "out"), "--set", change]) == 2
    said = capsys.readouterr().err
    assert change.partition("=")[0] in said and "nothing reads it of a model that fills a slot once" in said


def test_trajectories_of_another_sampler_are_refused(tmp_path, capsys):
    recipe = write_run(tmp_path)
    assert cli.main(["collect", str(recipe), "--out", str(tmp_path / "out")]) == 0, capsys.readouterr().err
    hotter = {**RECIPE["decode"], "sampler": {**SAMPLER, "t_max": 0.9}}
    other = write_run(tmp_path, collect=None, decode=hotter, trajectories=str(tmp_path / "out" / "trajectories"))
    assert cli.main(["train", str(other), "--out", str(tmp_path / "new")]) == 2
    assert "decode.sampler is" in capsys.readouterr().err and not (tmp_path / "new" / "student").exists()


IMPOSSIBLE = {  # of a column, or of the tensors
    "tokens": (lambda v: [*v[:-1], 58], "shard-00000.parquet, row 1: tokens holds 58; allowed: 0 to 57"),
    "canvas": (lambda v: v[:-1], "canvas has"),
    "accepted": (lambda v: v[:-1], "accepted has"),
    "argmax": (lambda v: [-1, *v[1:]], "argmax holds -1"),
    "steps": (lambda v: [], "steps has a number for each canvas"),
    "left": (lambda v: v[:-1], "left has"),
    "logits": (lambda t: t[:-1], "logits is F16"),
    "ids": (lambda t: t + 58, "ids holds "),
    "total": (lambda t: t[:, :-1].contiguous(), "total is F32"),
}  # fmt: skip


def test_canvases_that_no_teacher_made_are_refused_before_any_work(tmp_path, capsys):
    """One line each, with file and row or tensor; the folder as it was collected is taken."""
    assert cli.main(["collect", str(write_run(tmp_path)), "--out", str(tmp_path / "out")]) == 0, capsys.readouterr().err
    theirs = tmp_path / "theirs"
    other = write_run(tmp_path, collect=None, trajectories="theirs")
    shutil.copytree(tmp_path / "out" / "trajectories", theirs)
    assert cli.main(["plan", str(other)]) == 0, capsys.readouterr().err
    for name, (change, wanted) in IMPOSSIBLE.items():
        shutil.rmtree(theirs)
        shutil.copytree(tmp_path / "out" / "trajectories", theirs)
        for file in theirs.glob("shard-*"):
            if file.suffix == ".parquet" and name in (table := pq.read_table(file)).column_names:
                values = pa.array([change(value) for value in table[name].to_pylist()], table.schema.field(name).type)
                pq.write_table(table.set_column(table.column_names.index(name), name, values), file)
            if file.suffix == ".safetensors" and name in (tensors := load_file(file)):
                save_file({**tensors, name: change(tensors[name])}, file)
        assert cli.main(["verify", str(theirs), "--seal"]) == 0
        capsys.readouterr()
        assert cli.main(["train", str(other), "--out", str(tmp_path / "new")]) == 2, name
        said = capsys.readouterr().err
        assert said.startswith("cdlm: error: ") and said.count("\n") == 1 and wanted in said and "theirs" in said, said
