"""cdlm bench: every baseline in one table, transformers' own generate beside them, and where the time of a step goes."""

import json

import mini
import pytest
import torch
from conftest import TINY, random_model, random_prompts

from cdlm import bench, cli, families, files, recipe, runs, stages
from cdlm.decode import DecodeConfig, decode
from cdlm.evaluate import overhead
from cdlm.evaluate.assisted import GenerateConfig, generate
from cdlm.families.base import DiffusionLM

AR = {"logit_shift": True, "prompt_attention": "causal"}


@pytest.fixture
def done(tmp_path_factory):
    return mini.finished(tmp_path_factory)


def ending_model(**facts) -> DiffusionLM:
    """A random model whose end token is likely, so that rows stop in different places."""
    model = random_model("llama", facts=facts)
    with torch.no_grad():
        model.head.weight[2] += 0.35 * model.head.weight[7:15].sum(dim=0)
    return model


def causal_model() -> DiffusionLM:
    return ending_model(**AR)


def test_stock_generate_of_a_batch_is_greedy_decoding_with_blocks_of_one():
    """Contract 5, in the shape of a method: tokens, forwards, lengths and stops of every row, at once and alone."""
    model = causal_model()
    ids, valid = random_prompts([5, 9, 2, 7])
    own, theirs = decode(model, ids, valid, DecodeConfig(12, 1, tokens_per_step=1)), generate(model, ids, valid, GenerateConfig(12))
    assert torch.equal(own.ids_BN, theirs.ids_BN) and own.output_tokens == theirs.output_tokens and own.stop == theirs.stop
    assert theirs.forwards == own.forwards and len(set(own.stop)) == 2, "some rows end, some fill the budget"
    for row, length in enumerate([5, 9, 2, 7]):
        alone = generate(model, ids[row][valid[row]][None], torch.ones(1, length, dtype=torch.bool), GenerateConfig(12))
        assert torch.equal(alone.ids_BN[0], own.ids_BN[row])
        assert alone.forwards == [own.forwards[row]] and alone.queries == [theirs.queries[row]]


@pytest.fixture
def copy(done, tmp_path):
    """A finished run that may be written to."""
    return done.copy(tmp_path / "run")


def autoregressive_folder(folder) -> None:
    model = causal_model()
    model.hf.save_pretrained(folder)
    families.save_tokenizer(families.load_tokenizer(TINY / "tokenizer", model.facts), folder)


def test_bench_measures_every_method_and_writes_its_parts(done, copy, tmp_path):
    folder = tmp_path / "ar"
    autoregressive_folder(folder)
    before = {path.relative_to(copy): path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    r = recipe.load(done.recipe, [f"evaluate.autoregressive={folder}", "evaluate.methods=[student, teacher]"])
    growing = {"prompt_tokens": 4, "repeats": 1, "steps_per_block": 1}
    said: list[str] = []
    printed = bench.run(r, copy, list(bench.PARTS), [1, 2], [16, 32], growing, say=said.append)
    found = json.loads((copy / "bench" / "report.json").read_text())
    names = {row["method"] for row in found["results"]}
    assert names == {*recipe.METHODS, *recipe.BASELINES, recipe.OTHER_MODEL}
    assert {row["batch"] for row in found["latency"]["rows"]} == {1, 2}
    assert {row["method"] for row in found["latency"]["rows"]} == names, "all of them are timed"
    (other,) = [row for row in found["latency"]["rows"] if row["method"] == recipe.OTHER_MODEL and row["batch"] == 1]
    assert 0 < other["first_block_s"] < other["median_s"]
    assert [row["length"] for row in found["growth"]["rows"]] == [16, 32]
    shares = found["overhead"]["decoding"]["shares"]
    assert sum(shares.values()) == pytest.approx(1) and set(shares) == {*overhead.PARTS, "rest"} and min(shares.values()) > 0
    assert found["overhead"]["training"]["steps"] == bench.TRAINING_STEPS and found["overhead"]["training"]["ratio"] > 0
    for name in ("report.md", "report.html"):
        text = (copy / "bench" / name).read_text()
        assert "rowth with length" in text and "three forwards and two backwards" in text
    rows = {line.split("|")[1].strip(): line for line in printed.splitlines() if line.startswith("| ")}
    assert "(1.00x)" in rows["teacher, 1 token a step"] and "(+0.0)" in rows["teacher, 1 token a step"]
    assert rows["autoregressive model, stock generate"].count("x)") == 4
    after = {path.relative_to(copy): path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    assert {path: there for path, there in after.items() if path.parts[0] != "bench"} == before, "the run itself is as it was"


def test_the_papers_table_has_ratios_to_naive_decoding():
    """Naive: 100 tokens/s, 2 s, 64 steps, 20 tokens, 90 %. Student: 400 (4x), 0.5 s (0.25x), 4 (0.0625 -> 0.06x), 10 (0.5x), 85 % (-5)."""
    def row(method, tps, latency, steps, tokens, accuracy):
        return {"task": "all", "method": method, "parameter": None, "tps": tps, "latency_s": {"median": latency}, "steps": steps,
                "output_tokens": tokens, "accuracy": accuracy}  # fmt: skip
    rows = [
        row("student", 400, 0.5, 4, 10, 0.85), row("teacher", 100, 2.0, 64, 20, 0.9), row("teacher_fixed", None, 1.0, 2, 0.0, 0.1),
    ]  # fmt: skip
    first, second, third = bench.table({"results": rows})
    assert first == ["student, cached", "", "400 (4.00x)", "0.5000 (0.25x)", "4.0 (0.06x)", "10.0 (0.50x)", "85.0% (-5.0)"]
    assert second[2:] == ["100 (1.00x)", "2.0000 (1.00x)", "64.0 (1.00x)", "20.0 (1.00x)", "90.0% (+0.0)"]
    assert third[2] == "" and third[5] == "0.0 (0.00x)", "an answer of no tokens has no speed, and divides nothing"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--parts", "table,speed"], "--parts has 'speed'; allowed: table, growth, overhead"),
        (["--parts", "table", "--batches", "0,4"], "--batches is [0, 4]"),
        (["--parts", "growth", "--lengths", "8,9"], "--lengths is [8, 9]"),
        (["--parts", "table"], "run cdlm distill first"),
        (["--set", "evaluate.methods=[autoregressive_model]"], "evaluate.autoregressive, the folder of its model, is missing"),
    ],
)
def test_what_cannot_be_measured_is_one_line(done, tmp_path, capsys, flags, words):
    assert cli.main(["bench", str(done.recipe), "--out", str(tmp_path / "new"), *flags]) == 2
    assert words in capsys.readouterr().err and not (tmp_path / "new").exists()


def test_an_autoregressive_model_must_be_one_and_have_the_runs_tokenizer(done, tmp_path):
    def checked(folder) -> None:
        run = runs.Run(recipe.load(done.recipe, [f"evaluate.autoregressive={folder}"]), tmp_path / "out", say=lambda text: None)
        run.check_inputs()

    autoregressive_folder(tmp_path / "ar")
    checked(tmp_path / "ar")
    with pytest.raises(ValueError, match="no model at"):
        checked(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"evaluate\.autoregressive needs a causal model"):
        checked(done.recipe.parent / "teacher")
    file = tmp_path / "ar" / "tokenizer.json"
    text = json.loads(file.read_text())
    vocabulary = text["model"]["vocab"]
    vocabulary["Ω"] = vocabulary.pop("q")
    file.write_text(json.dumps(text))
    with pytest.raises(ValueError, match="differs from the model's"):
        checked(tmp_path / "ar")


def test_parts_of_a_decoding_leave_the_model_as_it_was():
    model = ending_model()
    prompts = [random_prompts([5]), random_prompts([9])]
    own = dict(vars(model))
    found = overhead.of_decoding(model, prompts, DecodeConfig(12, 4, confidence_threshold=0.3), repeats=1)
    assert vars(model) == own and "forward" not in vars(model.head)
    assert found["steps"] == sum(decode(model, *prompt, DecodeConfig(12, 4, confidence_threshold=0.3)).steps[0] for prompt in prompts)
    assert 0 < found["outside_model"] < 1 and found["seconds_per_step"] > 0


def test_parts_made_one_after_another_meet_in_one_report(done, copy):
    r = recipe.load(done.recipe, ["evaluate.methods=[student]", "evaluate.latency_prompts=2"])
    growing = {"prompt_tokens": 4, "repeats": 1, "steps_per_block": 1}
    say = [].append
    bench.run(r, copy, ["table"], [1], [16, 32], growing, say=say)
    first = json.loads((copy / "bench" / "report.json").read_text())
    assert "growth" not in first
    bench.run(r, copy, ["growth"], [1], [16, 32], growing, say=say)
    both = json.loads((copy / "bench" / "report.json").read_text())
    assert both["results"] == first["results"] and [row["length"] for row in both["growth"]["rows"]] == [16, 32]
    assert "Growth with length" in (copy / "bench" / "report.html").read_text()
    whole = (copy / "bench" / "report.json").read_bytes()
    (copy / "bench" / "report.json").write_bytes(whole.replace(b"accuracy", b"accurate", 1))
    with pytest.raises(ValueError, match=r"report\.json is not what was written"):  # else it would be sealed as it is
        bench.run(r, copy, ["growth"], [1], [16, 32], growing, say=say)
    (copy / "bench" / "report.json").write_bytes(whole)
    part = copy / "bench" / "growth.json"
    good = part.read_text()
    part.write_text(good.replace("16", "17"))
    with pytest.raises(ValueError, match=r"growth\.json is not what was written: .*growth\.sha256 says"):
        bench.run(r, copy, ["overhead"], [1], [16, 32], growing, say=say)
    assert not (copy / "bench" / "overhead.json").exists(), "it is found before any work"

    def sealed(text: str) -> None:
        part.write_text(text)
        files.write_sums(part.with_suffix(".sha256"), {part.name: part})

    sealed(json.dumps({**json.loads(good), "block_length": 12}))
    with pytest.raises(ValueError, match=r"growth\.json is of blocks of 12, decode\.block_length is 8"):
        bench.run(r, copy, ["table"], [1], [16, 32], growing, say=say)
    sealed("{")
    with pytest.raises(ValueError, match=r"growth\.json is not JSON"):
        bench.run(r, copy, ["table"], [1], [16, 32], growing, say=say)
    assert json.loads((copy / "bench" / "report.json").read_text()) == both


def test_a_broken_training_log_is_found_before_anything_is_measured(done, copy):
    log = copy / "log.jsonl"
    log.write_text(log.read_text()[:-5])
    said: list[str] = []
    run = runs.Run(recipe.load(done.recipe), copy, say=said.append)
    before = {path: path.read_bytes() for path in copy.glob("*") if path.is_file()}
    with pytest.raises(ValueError, match=r"log\.jsonl is not what was written: .*Remove .*log\.jsonl to go on without loss curves"):
        stages.evaluate(run)
    (copy / "log.sha256").unlink()  # as of an older version: the finished report has a checksum of it, too
    with pytest.raises(ValueError, match=r"log\.jsonl is not what was written: .* report\.sha256 says"):
        stages.evaluate(run)
    (copy / "report.sha256").unlink()
    with pytest.raises(ValueError, match=r"log\.jsonl has no checksums .*cdlm verify .* --seal"):
        stages.evaluate(run)
    files.write_sums(copy / "log.sha256", {"log.jsonl": log})  # by somebody who looks at nothing
    with pytest.raises(ValueError, match=r"log\.jsonl, line \d+ is no line of a training log"):
        stages.evaluate(run)
    for name in ("log.sha256", "report.sha256"):
        (copy / name).write_bytes(before[copy / name])
    assert not said and {path: path.read_bytes() for path in copy.glob("*") if path.is_file()} == before


def test_overhead_is_not_asked_of_what_decodes_no_blocks(done, tmp_path, capsys):
    r = recipe.load(done.recipe, ["train.objective=mdlm"])
    assert bench.parts_of(r) == ["table", "growth"] and bench.parts_of(recipe.load(done.recipe)) == list(bench.PARTS)
    flags = ["--parts", "overhead", "--set", "train.objective=mdlm", "--out", str(tmp_path / "new")]
    assert cli.main(["bench", str(done.recipe), *flags]) == 2 and "which is of a block decoder" in capsys.readouterr().err


def test_names_from_outside_are_plain_text_in_the_terminals_table(done, copy, capsys):
    """A task named like a closing tag of the terminal's markup is shown as it is; it ended in a traceback."""
    file = copy / "report.json"
    file.write_text(file.read_text().replace('"task": "copy"', '"task": "[/red]"'))
    cli._print_table(runs.Run(recipe.load(done.recipe), copy, say=lambda text: None))
    assert "[/red]" in capsys.readouterr().out


def test_the_report_of_a_bench_says_what_was_typed():
    typed = ["bench", "recipes/tiny.yaml", "--parts", "table", "--batches", "1,4"]
    args = cli._parser().parse_args(typed)
    args.typed = typed
    assert cli._typed(args) == "cdlm bench recipes/tiny.yaml --parts table --batches 1,4"
