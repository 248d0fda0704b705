"""The report: every number by hand, nothing invented where a method was not run, and report.json as the last file."""

import contextlib
import copy
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cdlm.decode import DecodeConfig
from cdlm.evaluate import clock, report
from cdlm.evaluate.run import Measured, Method, Row, Timed


def row(method, parameter=None, *, accuracy, steps, latency=None, task="all", **values):
    """A line of results with numbers that are not looked at unless given."""
    return {
        "task": task, "method": method, "parameter": parameter, "accuracy": accuracy, "steps": steps, "commit_forwards": 1.0,
        "forwards": steps, "output_tokens": 20.0, "tpf": 20.0 / steps, "latency_s": latency, "tps": None, "batch": 32,
        "latency_batch": 1 if latency else None, "latency_n": 4 if latency else 0, "n": 10, "stop_at_eos": True, **values,
    }  # fmt: skip


def results():
    """A teacher of 0.9 in 64 steps, its sweep (4, 0.5) (8, 0.8) (16, 0.9), a student's sweep (2, 0.4) (4, 0.8) (8, 0.85).
    With the student's stop rule the teacher's sweep is (3, 0.5) (5, 0.8) (10, 0.9).

    The lines of the task "sort" would change every claim if they were looked at.
    """
    return [
        row("teacher", accuracy=0.2, steps=60.0, task="sort"),
        row("student", 0.9, accuracy=0.97, steps=1.0, task="sort"),
        row("teacher_threshold", 0.9, accuracy=0.99, steps=2.0, task="sort"),
        row("teacher_truncated", 4.0, accuracy=0.6, steps=3.0, task="sort"),
        row("teacher", accuracy=0.9, steps=64.0, latency={"median": 1.2, "p90": 1.5}),
        row("teacher_truncated", 4.0, accuracy=0.3, steps=4.0),
        row("teacher_threshold", 0.5, accuracy=0.5, steps=4.0),
        row("teacher_threshold", 0.9, accuracy=0.8, steps=8.0),
        row("teacher_threshold", 0.99, accuracy=0.9, steps=16.0),
        row("teacher_threshold_stop", 0.5, accuracy=0.5, steps=3.0),
        row("teacher_threshold_stop", 0.9, accuracy=0.8, steps=5.0),
        row("teacher_threshold_stop", 0.99, accuracy=0.9, steps=10.0),
        row("student", 0.5, accuracy=0.4, steps=2.0),
        row("student", 0.9, accuracy=0.8, steps=4.0, latency={"median": 0.1, "p90": 0.2}, tpf=4.5),
        row("student", 0.99, accuracy=0.85, steps=8.0),
    ]


def test_frontier():
    """By rising steps, each point with the best accuracy so far; at equal steps the better one comes last."""
    assert report.frontier([(4, 0.5), (2, 0.6), (8, 0.9), (6, 0.7)]) == [(2, 0.6), (4, 0.6), (6, 0.7), (8, 0.9)]
    assert report.frontier([(3, 0.9), (3, 0.2)]) == [(3, 0.2), (3, 0.9)]
    assert report.frontier([]) == []


@pytest.mark.parametrize(
    "points, accuracy, wanted",
    [
        ([(2, 0.5), (4, 0.9)], 0.7, 3.0),  # halfway: 2 + 0.2 / 0.4 * 2
        ([(2, 0.5), (4, 0.9)], 0.6, 2.5),  # a quarter of the way
        ([(4, 0.9), (2, 0.5)], 0.6, 2.5),  # in any order
        ([(2, 0.5), (4, 0.9)], 0.9, 4.0),
        ([(2, 0.5), (4, 0.9)], 0.5, 2.0),
        ([(2, 0.5), (4, 0.9)], 0.1, 2.0),  # the first point is already better: its steps, no extrapolation
        ([(2, 0.5), (4, 0.9)], 0.91, None),
        ([(2, 0.5), (3, 0.4), (4, 0.9)], 0.7, 3.5),  # (3, 0.4) counts as (3, 0.5): 3 + 0.2 / 0.4 * 1
        ([(2, 0.5), (2, 0.9)], 0.7, 2.0),
        ([(2, 0.5), (5, 0.5), (6, 0.5)], 0.5, 2.0),
        ([], 0.5, None),
    ],
)
def test_steps_at(points, accuracy, wanted):
    assert report.steps_at(points, accuracy) == (None if wanted is None else pytest.approx(wanted))


@given(points=st.lists(st.tuples(st.integers(1, 64), st.integers(0, 20).map(lambda n: n / 20)), max_size=8), wanted=st.integers(0, 20))
@settings(deadline=None, derandomize=True, max_examples=150)
def test_steps_at_lies_within_the_sweep_and_rises_with_accuracy(points, wanted):
    found = report.steps_at(points, wanted / 20)
    reachable = any(accuracy >= wanted / 20 for _, accuracy in points)
    assert (found is not None) == reachable
    if found is not None:
        assert min(steps for steps, _ in points) <= found <= min(steps for steps, accuracy in points if accuracy >= wanted / 20)
        assert report.steps_at(points, wanted / 20 - 0.01) <= found


@pytest.mark.parametrize(
    "seconds, p10, median, p90",
    [
        ([3.0], 3.0, 3.0, 3.0),
        ([2.0, 1.0], 1.0, 1.5, 2.0),
        ([10.0, 1.0, 9.0, 2.0, 8.0, 3.0, 7.0, 4.0, 6.0, 5.0], 1.0, 5.5, 9.0),  # nearest rank: the 1st and the 9th of 10
        ([float(i) for i in range(1, 12)], 2.0, 6.0, 10.0),  # 0.1 * 11 = 1.1 and 0.9 * 11 = 9.9: the 2nd and the 10th of 11
        ([float(i) for i in range(1, 21)], 2.0, 10.5, 18.0),
    ],
)
def test_latency(seconds, p10, median, p90):
    before = list(seconds)
    assert clock.Latency.of(seconds) == clock.Latency(p10, median, p90)
    assert seconds == before


def test_seconds_runs_the_call_once():
    calls = []

    def call():
        calls.append(1)
        return "answer"

    spent, returned = clock.seconds(call, torch.device("cpu"))
    assert calls == [1] and returned == "answer" and isinstance(spent, float)


def test_summary_by_hand():
    """matched: min(student 0.8, best of the sweep 0.9) = 0.8. The sweep reaches it at (8, 0.8), the student at (4, 0.8): 4 / 8.
    With the student's stop rule the sweep reaches it at (5, 0.8): 4 / 5.

    Reduction 64 / 4 = 16; speedup 1.2 / 0.1 = 12. Lines of single tasks are not looked at.
    """
    assert report.summarise(results(), 0.9, 4.0) == {
        "confidence_threshold": 0.9, "teacher_accuracy": 0.9, "student_accuracy": 0.8, "truncated_accuracy": 0.3,
        "truncated_steps": 4.0, "teacher_steps": 64.0, "student_steps_at_threshold": 4.0, "tpf": 4.5, "matched_accuracy": 0.8,
        "threshold_steps": 8.0, "student_steps": 4.0, "student_steps_over_threshold_steps": 0.5, "step_reduction": 16.0,
        "latency_speedup": pytest.approx(12.0), "matched_accuracy_same_stop": 0.8, "threshold_steps_same_stop": 5.0,
        "student_steps_same_stop": 4.0, "student_steps_over_threshold_steps_same_stop": 0.8,
    }  # fmt: skip


def test_summary_interpolates_at_a_students_accuracy_between_two_points():
    """At threshold 0.5 the student has 0.4, below the sweep's first point (4, 0.5). At 0.99 it has 0.85: 8 + 0.05 / 0.1 * 8 = 12."""
    low, high = report.summarise(results(), 0.5, None), report.summarise(results(), 0.99, None)
    assert (low["matched_accuracy"], low["threshold_steps"], low["student_steps"]) == (0.4, 4.0, 2.0)
    assert (high["matched_accuracy"], high["student_steps"]) == (0.85, 8.0)
    assert high["threshold_steps"] == pytest.approx(12.0)
    assert high["student_steps_over_threshold_steps"] == pytest.approx(8 / 12)
    assert high["latency_speedup"] is None  # the student was not timed at this threshold


def test_a_student_above_the_sweep_is_compared_at_the_best_of_the_sweep():
    """The sweep without its last point ends at 0.8; a student of 0.85 passes 0.8 at 4 steps."""
    found = report.summarise([r for r in results() if r["parameter"] != 0.99 or r["method"] == "student"], 0.99, None)
    assert (found["matched_accuracy"], found["threshold_steps"], found["student_steps"]) == (0.8, 8.0, 4.0)


MATCHED = ["matched_accuracy", "threshold_steps", "student_steps", "student_steps_over_threshold_steps"]
CLAIMS = {
    "teacher": ["teacher_accuracy", "teacher_steps", "step_reduction", "latency_speedup"],
    "teacher_truncated": ["truncated_accuracy"],
    "teacher_threshold": MATCHED,
    "teacher_threshold_stop": [f"{key}_same_stop" for key in MATCHED],
    "student": [
        *(f"{key}_same_stop" for key in MATCHED),
        "student_accuracy", "student_steps_at_threshold", "tpf", "matched_accuracy", "threshold_steps", "student_steps",
        "student_steps_over_threshold_steps", "step_reduction", "latency_speedup",
    ],
}  # fmt: skip


@pytest.mark.parametrize("missing", CLAIMS)
def test_a_method_that_was_not_run_gives_null_and_leaves_the_rest(missing):
    whole, found = report.summarise(results(), 0.9, 4.0), report.summarise([r for r in results() if r["method"] != missing], 0.9, 4.0)
    assert {key for key, value in found.items() if value is None} == set(CLAIMS[missing])
    for key, value in found.items():
        assert value is None or value == whole[key], key
    assert all("None" not in line for line in report.summary_lines(found))


def test_nothing_measured_gives_null_everywhere():
    found = report.summarise([], 0.9, None)
    assert found.pop("confidence_threshold") == 0.9
    assert set(found.values()) == {None}
    assert report.summary_lines({"confidence_threshold": 0.9, **found}) == []


def test_an_accuracy_of_zero_is_a_number():
    """0.0 is not "missing": a student that gets nothing right is reported, and needs as few steps as the sweep has."""
    found = report.summarise([row("teacher", accuracy=0.0, steps=64.0), row("teacher_threshold", 0.9, accuracy=0.0, steps=8.0),
                              row("student", 0.9, accuracy=0.0, steps=4.0)], 0.9, None)  # fmt: skip
    assert (found["teacher_accuracy"], found["student_accuracy"], found["matched_accuracy"]) == (0.0, 0.0, 0.0)
    assert (found["threshold_steps"], found["student_steps"], found["student_steps_over_threshold_steps"]) == (8.0, 4.0, 0.5)
    assert report.summary_lines(found) == [
        "student 0.0% in 4.0 steps, teacher 0.0% in 64.0: the student fails, so its steps and seconds are no gain"
    ]


@pytest.mark.parametrize("accuracy, ending", [
    (0.0, "the student fails, so its steps and seconds are no gain"),
    (0.44, "the student fails, so its steps and seconds are no gain"),  # under half of 0.9
    (0.45, "64.0x fewer steps, 45.0 points of accuracy lost"),
    (0.9, "64.0x fewer steps, no accuracy lost"),
    (0.93, "64.0x fewer steps, 3.0 points of accuracy won"),
])  # fmt: skip
def test_a_gain_is_never_claimed_without_what_it_cost(accuracy, ending):
    """A student that answers at once and wrongly takes one step: 64 / 1 = 64 times fewer, and that is no success."""
    rows = [row("teacher", accuracy=0.9, steps=64.0), row("teacher_threshold", 0.9, accuracy=0.9, steps=8.0),
            row("teacher_truncated", 1.0, accuracy=0.1, steps=1.0), row("student", 0.9, accuracy=accuracy, steps=1.0)]  # fmt: skip
    lines = report.summary_lines(report.summarise(rows, 0.9, 1.0))
    assert lines[:2] == [f"student {accuracy:.1%} in 1 step, teacher 90.0% in 64.0: {ending}", "the teacher cut to 1 step: 10.0%"]
    assert len(lines) == (2 if "fails" in ending else 3), "a student that fails is not compared with threshold decoding"


def test_a_student_that_gets_nothing_right_is_named_without_a_teacher():
    found = report.summarise([row("student", 0.9, accuracy=0.0, steps=1.0)], 0.9, None)
    assert report.summary_lines(found) == ["student 0.0% in 1 step: the student fails"]


def test_summary_lines():
    assert report.summary_lines(report.summarise(results(), 0.9, 4.0)) == [
        "student 80.0% in 4.0 steps, teacher 90.0% in 64.0: 16.0x fewer steps, 12.0x lower latency, 10.0 points of accuracy lost",
        "the teacher cut to 4 steps: 30.0%",
        "at 80.0%: student 4.00 steps, training-free threshold decoding of the teacher 8.00: 0.50 of them",
        "at 80.0%: student 4.00 steps, training-free threshold decoding of the teacher, with the student's stop rule 5.00: "
        "0.80 of them",
    ]
    alone = [r for r in results() if r["method"] == "teacher"]
    assert report.summary_lines(report.summarise(alone, 0.9, None)) == ["teacher 90.0% in 64.0 steps"]


def test_summary_against_greedy_decoding():
    """A student of 4 steps and 0.1 s beside greedy decoding in 24 steps and 0.3 s: 6 and 3 times."""
    greedy = row("autoregressive", accuracy=0.95, steps=24.0, latency={"median": 0.3, "p90": 0.4})
    found = report.summarise([*(r for r in results() if r["method"] == "student"), greedy], 0.9, None)
    assert report.summary_lines(found) == [
        "student 80.0% in 4.0 steps, greedy decoding of the autoregressive model it was made of 95.0% in 24.0 steps: 6.0x fewer steps, "
        "3.0x lower latency, 15.0 points of accuracy lost"
    ]
    worthless = [{**r, "accuracy": 0.4} for r in results() if r["method"] == "student"]
    assert report.summary_lines(report.summarise([*worthless, greedy], 0.9, None))[0].endswith(
        "the student fails, so its steps and seconds are no gain"
    )
    assert report.summary_lines(report.summarise([greedy], 0.9, None)) == ["autoregressive 95.0% in 24.0 steps"]


def measured(name, parameter, rows, times=()):
    method = Method(name, parameter, DecodeConfig(64, 32, confidence_threshold=0.9), model=None, weights=contextlib.nullcontext)
    return Measured(method, rows, list(times))


def test_build_by_hand():
    """Student: sort 1 of 2 right, copy 1 of 1. Steps 4, 6, 2: mean 4. TPF (10 + 20 + 6) / (4 + 6 + 2) = 3, not a mean of ratios.

    Timed on one prompt of each task: 0.5 s for 10 tokens and 0.1 s for 8: TPS 18 / 0.6 = 30, median 0.3. Batches of two are apart.
    """
    student = measured(
        "student", 0.9,
        [Row("sort", True, "a", 4, 1, 4, 10), Row("sort", False, "b", 6, 2, 6, 20), Row("copy", True, "c", 2, 1, 2, 6)],
        [Timed("sort", 0.5, 10), Timed("copy", 0.1, 8, places=(2,)), Timed(None, 9.0, 50, places=(0, 2))],
    )  # fmt: skip
    teacher = measured("teacher", None, [Row("sort", True, "a", 64, 0, 64, 10)] * 2 + [Row("copy", False, "c", 64, 0, 64, 6)])
    found = report.build([teacher, student], threshold=0.9, truncated=None, batch_size=8, extra={"seed": 5})
    assert found["seed"] == 5
    assert [(r["task"], r["method"]) for r in found["results"]] == [
        ("all", "teacher"), ("all", "student"), ("copy", "teacher"), ("copy", "student"), ("sort", "teacher"), ("sort", "student"),
    ]  # fmt: skip
    whole = found["results"][1]
    assert whole == {
        "task": "all", "method": "student", "parameter": 0.9, "accuracy": pytest.approx(2 / 3), "steps": 4.0,
        "commit_forwards": pytest.approx(4 / 3), "forwards": 4.0, "output_tokens": 12.0, "tpf": 3.0,
        "queries_per_forward": None, "accepted": None,
        "latency_s": {"p10": 0.1, "median": pytest.approx(0.3), "p90": 0.5}, "tps": pytest.approx(30.0), "batch": 8, "latency_batch": 1,
        "latency_n": 2, "n": 3, "stop_at_eos": True,
    }  # fmt: skip
    sort = found["results"][5]
    assert (sort["accuracy"], sort["steps"], sort["tpf"], sort["n"], sort["latency_n"], sort["tps"]) == (0.5, 5.0, 3.0, 2, 1, 20.0)
    assert found["results"][0]["latency_s"] is None and found["results"][0]["tps"] is None
    assert found["summary"]["step_reduction"] == 16.0 and found["summary"]["latency_speedup"] is None
    json.dumps(found)


def test_build_does_not_repeat_a_single_unnamed_task():
    teacher = measured("teacher", None, [Row("all", True, "a", 4, 0, 4, 4)])
    found = report.build([teacher], threshold=0.9, truncated=None, batch_size=1, extra={})
    assert [r["task"] for r in found["results"]] == ["all"]


def full_report():
    env = {"device": "a cpu", "threads": 2, "python": "3.11", "torch": "2", "transformers": "5"}
    return {"summary": report.summarise(results(), 0.9, 4.0), "results": results(), "environment": env}


def test_table():
    """A number that was not measured is an empty cell, and so is the parameter of a method that sweeps nothing."""
    lines = report.table([row("student", 0.9, accuracy=0.805, steps=4.0, latency={"median": 0.1, "p90": 0.25}, tps=151.6),
                          row("teacher", accuracy=1.0, steps=64.0)])  # fmt: skip
    assert lines == [
        ["student, cached", "0.9", "80.5%", "4.0", "1.0", "4.0", "20.0", "5.00", "0.1000", "0.2500", "152", "4", "10"],
        ["teacher, 1 token a step", "", "100.0%", "64.0", "1.0", "64.0", "20.0", "0.31", "", "", "", "", "10"],
    ]
    assert all(len(line) == len(report.COLUMNS) for line in lines)


def test_markdown_table():
    text = report.markdown_table(report.table([r for r in results() if r["task"] == "all"][:2])).split("\n")
    assert text[0] == "| method | parameter | accuracy | steps | commit | forwards | tokens | TPF | median s | p90 s | TPS | timed | n |"
    assert text[1] == "|---|" + "---:|" * 12
    assert text[2].startswith("| teacher, 1 token a step |  | 90.0% | 64.0 |")
    assert text[3].startswith("| teacher, cut to few steps | 4 | 30.0% | 4.0 |")
    assert len(text) == 4 and {line.count("|") for line in text} == {14}


def test_write_puts_report_json_last(tmp_path, monkeypatch):
    seen = []

    def plot(rows, path, title):
        seen.append(sorted(file.name for file in tmp_path.iterdir()))
        path.write_text("picture")

    monkeypatch.setattr(report, "plot", plot)
    report.write(full_report(), tmp_path, "a title")
    assert seen == [["report.html", "report.md"]]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["pareto.png", "report.html", "report.json", "report.md", "report.sha256"]
    assert json.loads((tmp_path / "report.json").read_text()) == json.loads(json.dumps(full_report()))


def test_a_report_that_breaks_leaves_no_report_json(tmp_path, monkeypatch):
    def plot(rows, path, title):
        raise RuntimeError("no display")

    monkeypatch.setattr(report, "plot", plot)
    with pytest.raises(RuntimeError, match="no display"):
        report.write(full_report(), tmp_path, "a title")
    assert not (tmp_path / "report.json").exists()


def test_report_md_has_every_row_under_its_task(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "plot", lambda rows, path, title: path.write_text("picture"))
    report.write(full_report(), tmp_path, "a title")
    text = (tmp_path / "report.md").read_text()
    assert text.startswith("# a title\n\n- student 80.0% in 4.0 steps")
    parts = {part.split("\n")[0]: part for part in text.split("\n## ")[1:]}
    assert list(parts) == ["all", "sort", "environment"]
    assert report.markdown_table(report.table([r for r in results() if r["task"] == "all"])) in parts["all"]
    assert report.markdown_table(report.table([r for r in results() if r["task"] == "sort"])) in parts["sort"]
    assert "at batch 32, latency at batch 1" in text and "device a cpu, threads 2" in parts["environment"]


def test_plot_draws_and_changes_no_result(tmp_path):
    before = copy.deepcopy(results())
    given = copy.deepcopy(before)
    report.plot(given, tmp_path / "pareto.png", "a title")
    assert given == before
    assert (tmp_path / "pareto.png").read_bytes().startswith(b"\x89PNG")


def test_own_rows_are_the_recipes_values_and_whole_sweeps_without_one():
    """Threshold 0.9, truncated to 4: of fixed, 2 and 4 both stay, though 4 is also the number of steps; of factor all; of a method that was
    swept without the own value all."""
    def row(method, parameter):
        return {"method": method, "parameter": parameter}

    rows = [row("teacher", None), *(row("student", t) for t in (0.5, 0.9)), *(row("teacher_fixed", k) for k in (2, 4)),
            *(row("teacher_truncated", s) for s in (4, 8)), *(row("teacher_factor", f) for f in (0.9, 1.0)),
            row("teacher_threshold", 0.3)]  # fmt: skip
    kept = report.own_rows({"summary": {"confidence_threshold": 0.9, "truncated_steps": 4}}, rows)
    assert [(r["method"], r["parameter"]) for r in kept] == [
        ("teacher", None), ("student", 0.9), ("teacher_fixed", 2), ("teacher_fixed", 4), ("teacher_truncated", 4), ("teacher_factor", 0.9),
        ("teacher_factor", 1.0), ("teacher_threshold", 0.3),
    ]  # fmt: skip


def test_names_from_outside_are_plain_text_in_markdown():
    rows = [Row("<script>\n# a|b", True, "a", 4, 1, 4, 10)]
    found = report.build([measured("student", 0.9, rows)], threshold=0.9, truncated=None, batch_size=8, extra={})
    text = report.markdown(found, "x<y>\n# z")
    assert "## &lt;script&gt; # a&#124;b" in text and "# x&lt;y&gt; # z" in text and "<script>" not in text and "\n# a" not in text


def test_a_secret_of_the_environment_is_in_no_report(tmp_path, monkeypatch):
    """Also where a recipe's name or a task is one."""
    monkeypatch.setenv("SOME_API_KEY", "correct-horse")
    found = full_report()
    found["results"] = [{**row, "task": "correct-horse" if row["task"] != "all" else "all"} for row in found["results"]]
    report.write(found, tmp_path, "named correct-horse")
    for name in ("report.md", "report.html", "report.json"):
        text = (tmp_path / name).read_text()
        assert "correct-horse" not in text and "[hidden]" in text, name
