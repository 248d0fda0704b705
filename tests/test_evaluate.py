"""Measuring: what is right, who is timed when, and the arithmetic from rows to a report."""

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import random_model
from mini import finished

from cdlm import ablate, recipe, runs
from cdlm.data import Example
from cdlm.decode import DecodeConfig
from cdlm.evaluate import report, run
from cdlm.evaluate.clock import Latency
from cdlm.evaluate.run import Measured, Method, Row, Timed

CACHED = DecodeConfig(max_new_tokens=13, block_length=4, confidence_threshold=0.4)


@pytest.fixture(scope="module")
def model():
    return random_model("llama", seed=2)


@pytest.fixture(scope="module")
def examples():
    draw = torch.Generator().manual_seed(5)
    lengths = [9, 3, 12, 5, 3, 7]
    return [
        Example(i, "ab"[i % 2], f"p{i}", "?", torch.randint(3, 57, (length,), generator=draw).tolist(), [4])
        for i, length in enumerate(lengths)
    ]


def method(model, config=CACHED, name="student", parameter=None, **kwargs):
    return Method(name, parameter, config, model, contextlib.nullcontext, **kwargs)


def test_score_gives_rows_in_the_examples_order(model, examples, tokenizer):
    alone = [run.score(method(model), [example], tokenizer, 1)[0] for example in examples]
    assert len({row.text for row in alone}) > 3, "the rows can be told apart"
    for batch in (1, 4, 6):
        assert run.score(method(model), examples, tokenizer, batch) == alone, batch
    assert run.score(method(model), examples[::-1], tokenizer, 4) == alone[::-1]


def test_score_is_the_same_for_every_batch_size_under_full_attention(model, examples, tokenizer):
    naive = DecodeConfig(max_new_tokens=8, block_length=4, tokens_per_step=1, block_causal=False, use_cache=False)
    assert run.score(method(model, naive), examples, tokenizer, 1) == run.score(method(model, naive), examples, tokenizer, 4)


def test_score_marks_what_is_right_and_puts_the_weights_in_place(model, examples, tokenizer):
    said = run.score(method(model), examples, tokenizer, 2)
    known = [replace(e, answer=row.text if i == 2 else row.text + "!") for i, (e, row) in enumerate(zip(examples, said, strict=True))]
    entered = []

    @contextlib.contextmanager
    def weights():
        entered.append(True)
        yield

    rows = run.score(replace(method(model), weights=weights), known, tokenizer, 4)
    assert [row.correct for row in rows] == [False, False, True, False, False, False]
    assert [row.group for row in rows] == ["a", "b", "a", "b", "a", "b"]
    assert entered == [True, True], "once a batch"


def test_time_all_interleaves_methods_prompt_by_prompt(monkeypatch, model, examples):
    asked, timing = [], [False]

    def fake_decode(model, prompt, valid, config, callback=None, seeds=None):
        assert prompt.shape[0] == 1 and bool(valid.all()) and seeds is None, "greedy decoding draws nothing"
        assert (callback is not None) == timing[0], "the first block's end is noted where the clock runs"
        asked.append((timing[0], config.block_length, prompt[0].tolist()))
        return SimpleNamespace(output_tokens=[config.block_length])

    def fake_seconds(call, device):
        timing[0] = True
        returned = call()
        timing[0] = False
        return float(len(asked)), returned

    monkeypatch.setattr(run, "decode", fake_decode)
    monkeypatch.setattr(run, "seconds", fake_seconds)
    measured = [Measured(method(model, replace(CACHED, block_length=length))) for length in (2, 5)]
    run.time_all(measured, examples[:3], warmup=2, repeats=2)
    warm = [(block, ids) for clock, block, ids in asked if not clock]
    assert sorted(warm) == sorted((block, e.prompt_ids) for e in examples[:2] for block in (2, 5))
    assert all(not clock for clock, _, _ in asked[:4]), "warm-up comes before the clock"
    clocked = [(block, ids) for clock, block, ids in asked if clock]
    order = [(2, 5), (5, 2), (2, 5), (5, 2), (2, 5), (5, 2)]  # no method always follows the same one
    assert clocked == [(block, e.prompt_ids) for e, blocks in zip(examples[:3] * 2, order, strict=True) for block in blocks]
    assert [(timed.group, timed.output_tokens) for timed in measured[0].times] == [("a", 2), ("b", 2), ("a", 2)] * 2
    assert [timed.places for timed in measured[0].times] == [(0,), (1,), (2,)] * 2
    assert [timed.seconds for timed in measured[0].times] == [5.0, 8.0, 9.0, 12.0, 13.0, 16.0]


def hand_made(model) -> Measured:
    rows = [
        Row("a", True, "x", steps=4, commit_forwards=1, forwards=5, output_tokens=10),
        Row("a", False, "y", steps=8, commit_forwards=2, forwards=10, output_tokens=2),
        Row("b", True, "z", steps=6, commit_forwards=3, forwards=5, output_tokens=13),
    ]
    times = [("a", 1.0, 10), ("b", 2.0, 2), ("a", 3.0, 6), ("a", 6.0, 6)]
    return Measured(method(model, parameter=0.4), rows, [Timed(*values) for values in times])


def test_result_over_all_tasks(model):
    out = run.result(hand_made(model), None, 7)
    assert out["task"] == "all" and out["method"] == "student" and out["parameter"] == 0.4
    assert out["accuracy"] == pytest.approx(2 / 3)
    assert (out["steps"], out["commit_forwards"]) == (6, 2)
    assert out["forwards"] == pytest.approx(20 / 3)
    assert out["output_tokens"] == pytest.approx(25 / 3)
    assert out["tpf"] == pytest.approx(25 / 20), "total tokens over total forwards, not the mean of ratios"
    assert out["latency_s"] == {"p10": 1.0, "median": 2.5, "p90": 6.0}
    assert out["tps"] == pytest.approx(24 / 12)
    assert (out["batch"], out["latency_batch"], out["latency_n"], out["n"]) == (7, 1, 4, 3)
    assert out["stop_at_eos"] is True


def test_result_over_one_task(model):
    out = run.result(hand_made(model), "a", 7)
    assert (out["task"], out["n"], out["latency_n"], out["accuracy"], out["steps"]) == ("a", 2, 3, 0.5, 6)
    assert out["tpf"] == pytest.approx(12 / 15)
    assert out["latency_s"]["median"] == 3.0
    assert out["tps"] == pytest.approx(22 / 10)


def test_a_method_that_was_not_timed_has_no_latency(model):
    out = run.result(replace_times(hand_made(model)), None, 1)
    assert out["latency_s"] is None and out["tps"] is None and out["latency_batch"] is None and out["latency_n"] == 0


def replace_times(measured: Measured) -> Measured:
    measured.times.clear()
    return measured


@pytest.mark.parametrize(("seconds", "p10", "median", "p90"), [
    ([3.0], 3.0, 3.0, 3.0), ([2.0, 1.0], 1.0, 1.5, 2.0), ([float(i) for i in range(10, 0, -1)], 1.0, 5.5, 9.0),
    ([float(i) for i in range(1, 12)], 2.0, 6.0, 10.0),
])
def test_latency_is_median_and_nearest_rank(seconds, p10, median, p90):
    assert Latency.of(seconds) == Latency(p10, median, p90)


def test_steps_at_interpolates_on_the_frontier():
    assert report.steps_at([(2, 0.5), (4, 0.9)], 0.7) == pytest.approx(3)
    assert report.steps_at([(4, 0.9), (2, 0.5)], 0.5) == 2
    assert report.steps_at([(2, 0.5), (4, 0.9)], 0.95) is None
    assert report.steps_at([(2, 0.6), (3, 0.4), (4, 0.8)], 0.7) == pytest.approx(3.5), "a worse point with more steps costs nothing"
    assert report.frontier([(3, 0.4), (2, 0.6)]) == [(2, 0.6), (3, 0.6)]


def line(method: str, parameter: float | None, accuracy: float, steps: float, median: float | None = None) -> dict:
    return {
        "task": "all", "method": method, "parameter": parameter, "accuracy": accuracy, "steps": steps, "tpf": 3.0,
        "latency_s": {"median": median, "p90": median} if median else None,
    }


def test_summary_arithmetic():
    results = [
        line("teacher", None, 0.9, 64.0, 2.0), line("teacher_truncated", 8, 0.2, 8.0), line("teacher_threshold", 0.5, 0.4, 10.0),
        line("teacher_threshold", 0.9, 0.8, 20.0), line("student", 0.5, 0.6, 4.0), line("student", 0.9, 0.7, 8.0, 0.25),
    ]
    out = report.summarise(results, threshold=0.9, truncated=8)
    assert (out["teacher_accuracy"], out["student_accuracy"], out["truncated_accuracy"]) == (0.9, 0.7, 0.2)
    assert out["matched_accuracy"] == 0.7
    assert out["threshold_steps"] == pytest.approx(17.5) and out["student_steps"] == 8.0
    assert out["student_steps_over_threshold_steps"] == pytest.approx(8 / 17.5)
    assert out["step_reduction"] == 8.0 and out["latency_speedup"] == 8.0 and out["tpf"] == 3.0
    assert len(report.summary_lines(out)) == 3


def test_summary_leaves_null_what_was_not_run():
    out = report.summarise([line("teacher", None, 0.9, 64.0, 2.0)], threshold=0.9, truncated=None)
    assert out["teacher_accuracy"] == 0.9
    for key in ("student_accuracy", "truncated_accuracy", "threshold_steps", "student_steps", "step_reduction", "latency_speedup", "tpf"):
        assert out[key] is None, key
    assert report.summary_lines(out) == ["teacher 90.0% in 64.0 steps"]


@pytest.fixture
def base(tmp_path_factory, tmp_path):
    return runs.Run(recipe.load(finished(tmp_path_factory).recipe), tmp_path / "out", say=lambda text: None)


@pytest.mark.parametrize(("name", "weights"), [
    ("distillation only", (1.0, 0.0, 0.0)), ("consistency only", (0.0, 0.5, 0.0)), ("distillation and consistency", (1.0, 0.5, 0.0)),
    ("all three", (1.0, 0.5, 0.5)),
])
def test_a_variant_switches_off_exactly_the_other_losses(base, name, weights):
    part = ablate.variant(base, name)
    train = part.recipe.train
    assert (train.distill_weight, train.consistency_weight, train.dlm_weight) == weights
    restored = replace(train, distill_weight=1.0, consistency_weight=0.5, dlm_weight=0.5)
    assert restored == base.recipe.train, "nothing else of the training changes"
    assert replace(part.recipe, train=base.recipe.train, evaluate=base.recipe.evaluate) == base.recipe
    assert part.trajectories == base.trajectories and part.out != base.out
    assert base.recipe.train.dlm_weight == 0.5, "the run itself stays as it is"


def test_variants_have_folders_of_their_own(base):
    assert len(ablate.VARIANTS) == 4
    assert len({ablate.variant(base, name).out for name in ablate.VARIANTS}) == 4


@pytest.mark.parametrize("weight", ablate.WEIGHTS)
def test_ablate_refuses_a_loss_that_the_recipe_does_not_use(base, weight):
    unused = replace(base.recipe, train=replace(base.recipe.train, **{weight: 0.0}))
    with pytest.raises(ValueError, match=rf"train\.{weight} is 0"):
        ablate.run(runs.Run(unused, base.out, say=base.say))
    assert not base.out.exists()


def test_ablate_refuses_another_objective(base):
    other = replace(base.recipe, train=replace(base.recipe.train, objective="mdlm"))
    with pytest.raises(ValueError, match="objective cdlm"):
        ablate.run(runs.Run(other, base.out, say=base.say))


def test_ablate_gives_one_line_a_variant_and_leaves_the_run_alone(tmp_path_factory, tmp_path):
    done = finished(tmp_path_factory)
    out = done.copy(tmp_path / "out")
    text = ablate.run(runs.Run(recipe.load(done.recipe, ["train.steps=1", "evaluate.num_prompts=2"]), out, say=lambda text: None))
    assert text + "\n" == (out / "ablation" / "ablation.md").read_text()
    lines = text.splitlines()[2:]
    assert [part.split("|")[1].strip() for part in lines] == list(ablate.VARIANTS)
    assert [part.split("|")[2].strip() for part in lines] == ["1, 0, 0", "0, 0.5, 0", "1, 0.5, 0", "1, 0.5, 0.5"]
    weights = {name: (out / "ablation" / name.replace(" ", "-") / "student" / "model.safetensors").read_bytes() for name in ablate.VARIANTS}
    assert len(set(weights.values())) == 4, "each variant trains another student"
    assert (out / "report.json").read_bytes() == (done.out / "report.json").read_bytes()
