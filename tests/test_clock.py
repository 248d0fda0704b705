"""The latency protocol: intervals, ratios, exponents, the first block's end, memory; and how times grow with length."""

import contextlib
import json
import statistics
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import random_model, random_prompts
from hypothesis import given, settings
from hypothesis import strategies as st

from cdlm.data import Example
from cdlm.decode import DecodeConfig, decode
from cdlm.evaluate import clock, growth, run
from cdlm.evaluate.run import Measured, Method, Timed

CPU = torch.device("cpu")


def test_bootstrap_of_one_value_or_of_equal_ones_has_no_width():
    assert clock.speedup([2.0], [0.5]) == clock.Interval(4.0, 4.0, 4.0)
    assert clock.speedup([3.0] * 7, [1.0] * 7) == clock.Interval(3.0, 3.0, 3.0)


def test_bootstrap_of_a_mean_agrees_with_the_normal_interval():
    """0 .. 99: mean 49.5, standard error sqrt(833.25) / 10 = 2.887, so 49.5 +- 1.96 * 2.887 = 43.8 .. 55.2."""
    values = np.arange(100.0)
    found = clock.bootstrap(lambda index: values[index].mean(axis=1), 100)
    assert found.value == 49.5
    assert found.low == pytest.approx(43.84, abs=0.5) and found.high == pytest.approx(55.16, abs=0.5)
    assert found == clock.bootstrap(lambda index: values[index].mean(axis=1), 100), "seeded"
    assert found != clock.bootstrap(lambda index: values[index].mean(axis=1), 100, seed=1)


def test_a_paired_ratio_is_not_widened_by_prompts_that_are_slow_for_both():
    base = [1.0, 10.0, 100.0, 3.0, 30.0]
    found = clock.speedup(base, [value / 4 for value in base])
    assert (found.value, found.low, found.high) == pytest.approx((4, 4, 4))


def test_speedup_is_the_ratio_of_medians_and_refuses_other_prompts():
    assert clock.speedup([1.0, 2.0, 9.0], [0.5, 1.0, 1.0]).value == 2.0
    assert clock.speedup([1.0, 1.0], [0.0, 0.0]) is None, "a clock that showed nothing: no ratio, no division by zero"
    assert np.isfinite(clock.speedup([1.0] * 3, [0.0, 1.0, 1.0]).high)
    for base, other in (([1.0], [1.0, 2.0]), ([], [])):
        with pytest.raises(ValueError, match="same prompts"):
            clock.speedup(base, other)
    with pytest.raises(ValueError, match="at least one value"):
        clock.bootstrap(lambda index: index.mean(axis=1), 0)


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=9))
@settings(deadline=None, derandomize=True, max_examples=30)
def test_an_interval_holds_between_the_smallest_and_the_largest_ratio(times):
    found = clock.speedup(times, [1.0] * len(times))
    assert min(times) <= found.low <= found.high <= max(times) and found.value == pytest.approx(statistics.median(times))


def test_exponent():
    lengths = [256, 512, 1024, 4096]
    assert clock.exponent(lengths, [3 * length**2 for length in lengths]) == pytest.approx(2)
    assert clock.exponent(lengths, [0.5 * length for length in lengths]) == pytest.approx(1)
    assert clock.exponent([1, 2, 4], [1, 2, 16]) == pytest.approx(2)  # slopes 1 and 3 of equal steps: 2
    for bad in (([5], [1.0]), ([5, 5], [1.0, 2.0]), ([1, 2], [0.0, 1.0]), ([1, 2], [1.0])):
        with pytest.raises(ValueError, match="exponent"):
            clock.exponent(*bad)


def test_the_first_block_ends_with_its_last_step(monkeypatch):
    """A clock that counts its readings: one at the start, one after each of the three steps of block 0, none after those of block 1."""
    ticks = iter(range(100))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    seen = clock.FirstBlock(CPU)
    for block in (0, 0, 0, 1, 1):
        seen(SimpleNamespace(block=block))
    assert seen.seconds() == 3.0 and next(ticks) == 4


def test_memory_sees_what_was_allocated():
    clock.reset_memory(CPU)
    before = clock.peak_memory(CPU)
    held = torch.ones(2**26 // 4)
    assert clock.peak_memory(CPU) >= before + 2**25 and held.sum() > 0
    assert clock.memory_kind(CPU).startswith("resident set")


def method(model, block_length, name="student", **reveal):
    config = DecodeConfig(8, block_length, stop_at_eos=False, **(reveal or {"steps_per_block": 2}))
    return Method(name, None, config, model, contextlib.nullcontext)


@pytest.fixture(scope="module")
def model():
    return random_model("llama", seed=2)


@pytest.fixture(scope="module")
def examples():
    draw = torch.Generator().manual_seed(5)
    return [Example(i, "ab"[i % 2], f"p{i}", "?", torch.randint(3, 57, (4 + i,), generator=draw).tolist(), [4]) for i in range(5)]


def test_time_all_at_other_batch_sizes(model, examples):
    """Five questions: five calls of one, two of two; the fifth is left over. All run 8 slots, of which 4 stand behind the first block."""
    measured = [Measured(method(model, 4)), Measured(method(model, 8))]
    run.time_all(measured, examples, warmup=1, repeats=2, batch_sizes=[1, 2])
    for m in measured:
        assert [timed.places for timed in m.times] == [(0,), (1,), (2,), (3,), (4,)] * 2 + [(0, 1), (2, 3)] * 2
        assert all(timed.group is None for timed in m.times if timed.batch == 2), "groups a and b in one batch"
        assert all(0 < timed.first_block <= timed.seconds and timed.peak > 0 for timed in m.times)
    length = {places: timed.output_tokens for timed in measured[0].times if len(places := timed.places) == 1}
    for timed in measured[0].times:
        if timed.batch == 1:
            assert timed.later_tokens == max(0, length[timed.places] - 4)
    assert all(timed.later_tokens == 0 for timed in measured[1].times), "one block: nothing behind it"


def test_tokens_behind_the_first_block_where_blocks_start_at_position_zero(examples):
    """A prompt of 5 tokens and blocks of 4: one of its tokens stands in the first block, which so answers 3."""
    zero = random_model("llama", seed=2, facts={"block_origin": "zero", "prompt_attention": "block_causal"})
    m = Measured(method(zero, 4))
    run.time_all([m], examples[1:2], warmup=0, repeats=1)
    assert len(examples[1].prompt_ids) == 5
    assert m.times[0].later_tokens == max(0, m.times[0].output_tokens - 3)


def test_the_callback_changes_no_token(model):
    prompt, valid = random_prompts([3, 6])
    config = DecodeConfig(8, 4, confidence_threshold=0.5)
    plain, heard = decode(model, prompt, valid, config), decode(model, prompt, valid, config, callback=clock.FirstBlock(CPU))
    assert torch.equal(plain.ids_BN, heard.ids_BN) and plain.steps == heard.steps


def timed(seconds, place, first, later=0, batch=1, peak=0):
    return Timed("a", seconds, 10, (place,) * batch, first, later, peak)


def test_latencies_by_hand(model):
    """Teacher: prompts of 4 and (median of 6 and 10) 8 s; student: 1 and 2 s. Medians over all calls: 6 and 1.5; the ratio is that of
    medians over prompts, 6 / 1.5 = 4. Student behind its first block: (1 - 0.4) / 3 = 0.2 s a token; its second prompt ends in it.
    """
    teacher, student = Measured(method(model, 4, "teacher")), Measured(method(model, 4))
    teacher.times += [timed(4.0, 0, 2.0, 5), timed(6.0, 1, 3.0, 5), timed(10.0, 1, 4.0, 5, peak=9), timed(7.0, 0, 1.0, 4, batch=2)]
    student.times += [timed(1.0, 0, 0.4, 3), timed(2.0, 1, 2.0)]
    rows = run.latencies([student, teacher])
    assert [(row["method"], row["batch"], row["calls"]) for row in rows] == [("student", 1, 2), ("teacher", 1, 3), ("teacher", 2, 1)]
    own, base, batch = rows
    assert own["ratio"]["value"] == pytest.approx(4) and own["base"] == "teacher"
    assert own["ratio"]["low"] is None and own["ratio"]["high"] is None, "two prompts show no interval"
    assert (own["p10_s"], own["median_s"], own["p90_s"]) == (1.0, 1.5, 2.0)
    assert own["first_block_s"] == pytest.approx(1.2) and own["per_token_s"] == pytest.approx(0.2) and own["per_token_n"] == 1
    assert base["ratio"] == {"value": 1.0, "low": None, "high": None} and base["peak_memory_bytes"] == 9
    assert base["per_token_s"] == pytest.approx(0.6), "0.4, 0.6 and 1.2"
    assert batch["per_token_s"] == 1.5 and own["tps"] == pytest.approx(20 / 3)
    assert run.latencies([Measured(method(model, 4))]) == []


def test_an_interval_is_shown_from_five_prompts_on(model):
    """Every prompt four times faster: the interval is 4 to 4; at batch 2 there are four calls and none."""
    teacher, student = Measured(method(model, 4, "teacher")), Measured(method(model, 4))
    for place in range(5):
        teacher.times.append(timed(4.0, place, 1.0))
        student.times.append(timed(1.0, place, 1.0))
        if place:
            teacher.times.append(timed(4.0, place, 1.0, batch=2))
            student.times.append(timed(1.0, place, 1.0, batch=2))
    alone, together = (row for row in run.latencies([teacher, student]) if row["method"] == "student")
    assert (alone["ratio"]["low"], alone["ratio"]["high"]) == (pytest.approx(4), pytest.approx(4))
    assert together["ratio"] == {"value": pytest.approx(4), "low": None, "high": None}


def test_a_method_whose_answers_end_in_the_first_block_has_no_time_a_token(model):
    m = Measured(method(model, 4))
    m.times.append(timed(1.0, 0, 1.0))
    assert run.latencies([m])[0]["per_token_s"] is None


def test_growth_counts_steps_and_is_json(model):
    """Two steps a block of 4: 8 tokens take 4 steps, 16 take 8, cached or not. The prompt and every block but the last are committed."""
    said = []
    found = growth.measure(model, [16, 8], 4, prompt_tokens=5, repeats=2, steps_per_block=2, say=said.append)
    assert [(row["length"], row["steps"]) for row in found["rows"]] == [(8, {"naive": 4, "cached": 4}), (16, {"naive": 8, "cached": 8})]
    assert [row["commit_forwards"] for row in found["rows"]] == [{"naive": 0, "cached": 2}, {"naive": 0, "cached": 4}]
    assert all(len(spent) == 2 for row in found["rows"] for spent in row["seconds"].values()) and len(said) == 2
    medians = [row["median_s"]["naive"] for row in found["rows"]]
    assert found["exponent"]["naive"] == pytest.approx(np.log2(medians[1] / medians[0])) == pytest.approx(found["exponent_tail"]["naive"])
    assert len(growth.table(found)[0]) == len(growth.COLUMNS) and len(growth.lines(found)) == 2
    assert json.loads(json.dumps(found)) == found


def test_a_model_with_more_room(model):
    long = growth.model_of(model.hf.config, model.facts, 1000, dtype=torch.float32, device="cpu", seed=0)
    assert long.hf.config.max_position_embeddings == 1000 and model.hf.config.max_position_embeddings == 256
    assert sum(p.numel() for p in long.parameters()) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("changes, words", [
    ({"lengths": [8]}, "two or more different multiples"), ({"lengths": [8, 8]}, "two or more"), ({"lengths": [8, 10]}, r"\[8, 10\]"),
    ({"lengths": [0, 8]}, "multiples of the block length, 4"), ({"repeats": 0}, "--repeats is 0"),
    ({"prompt_tokens": 0}, "--prompt-tokens is 0"), ({"steps_per_block": 0}, "--steps-per-block is 0"),
    ({"steps_per_block": 5}, "4 slots"),
])  # fmt: skip
def test_growth_refuses(changes, words):
    given = {"lengths": [8, 16], "block_length": 4, "prompt_tokens": 5, "repeats": 1, "steps_per_block": 1, **changes}
    with pytest.raises(ValueError, match=words):
        growth.check(**given)
