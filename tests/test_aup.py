"""AUP against the published scores, and tokens per forward at equal accuracy by hand."""

import math
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from cdlm.evaluate import aup

PUBLISHED = yaml.safe_load((Path(__file__).parent / "data" / "aup.yaml").read_text())
GOLDEN = [
    (f"{model} {task} {method}", [tuple(point) for point in values["points"]], scores["y_max"], values["aup"])
    for model, tasks in PUBLISHED.items() for task, scores in tasks.items() for method, values in scores.items() if method != "y_max"
]  # fmt: skip


@pytest.mark.parametrize("points, best, wanted", [case[1:] for case in GOLDEN], ids=[case[0] for case in GOLDEN])
def test_published_scores(points, best, wanted):
    """To the last printed digit."""
    assert round(aup.aup(points, best), 2) == wanted


def test_every_published_score_is_tried():
    assert len(GOLDEN) == 16


def test_aup_by_hand():
    """Best 80. W(80) = 1, W(40) = exp(-1.5). (1, 80) (3, 78): 80 + 2 (78 W(78) + 80) / 2, W(78) = exp(-3 * 2 / 80)."""
    assert aup.weight(80, 80) == 1 and aup.weight(90, 80) == 1
    assert aup.weight(40, 80) == pytest.approx(math.exp(-1.5))
    assert aup.aup([(1, 80), (3, 78)], 80) == pytest.approx(80 + 78 * math.exp(-0.075) + 80)
    assert aup.aup([(2, 50)], 50) == 100, "one point: its rectangle"
    assert aup.aup([(3, 78), (1, 80)], 80) == aup.aup([(1, 80), (3, 78)], 80), "in any order"


def test_points_more_than_five_below_the_first_are_dropped():
    """75 is exactly 5 below 80 and stays; 74.9 goes, and what comes behind it is judged against the first point too."""
    assert aup.kept([(1, 80.0), (2, 75.0), (3, 74.9), (4, 76.0)]) == [(1, 80.0), (2, 75.0), (4, 76.0)]
    assert aup.aup([(1, 80.0), (9, 20.0)], 80) == 80.0


def test_nothing_right_is_zero_and_nothing_measured_is_an_error():
    assert aup.aup([(1, 0.0), (4, 0.0)], 0.0) == 0.0
    with pytest.raises(ValueError, match="without a point"):
        aup.aup([], 50.0)


@pytest.mark.parametrize("points, accuracy, wanted", [
    ([(4, 90), (8, 50)], 70, 6.0),
    ([(8, 50), (4, 90)], 60, 7.0),  # 8 - (60 - 50) / 40 * 4
    ([(4, 90), (8, 50)], 50, 8.0),
    ([(4, 90), (8, 50)], 20, 8.0),  # better already at the last point: no extrapolation
    ([(4, 90), (8, 50)], 90, 4.0),
    ([(4, 90), (8, 50)], 91, None),
    ([(2, 60), (4, 90), (8, 50)], 90, 4.0),
    ([(4, 60), (6, 40), (8, 50)], 55, 6 - 0.5 * 2),  # (6, 40) counts as (6, 50): 6 - (55 - 50) / 10 * 2
    ([(5, 50), (5, 90)], 70, 5.0),
    ([], 10, None),
])  # fmt: skip
def test_tokens_per_forward_at(points, accuracy, wanted):
    assert aup.tokens_per_forward_at(points, accuracy) == (None if wanted is None else pytest.approx(wanted))


@given(points=st.lists(st.tuples(st.integers(1, 32), st.integers(0, 100)), max_size=8), wanted=st.integers(0, 100))
@settings(deadline=None, derandomize=True, max_examples=150)
def test_less_accuracy_never_costs_tokens_per_forward(points, wanted):
    found = aup.tokens_per_forward_at(points, wanted)
    assert (found is not None) == any(accuracy >= wanted for _, accuracy in points)
    if found is not None:
        assert max(rate for rate, accuracy in points if accuracy >= wanted) <= found <= max(rate for rate, _ in points)
        assert aup.tokens_per_forward_at(points, wanted - 1) >= found


def line(method, accuracy, tpf, task="all"):
    return {"task": task, "method": method, "accuracy": accuracy, "tpf": tpf}


def test_of_results_by_hand():
    """Best 90. Within 5 of it are slow (90) and fast (86), so equal accuracy is 86: slow reaches 86 at 4 - (86 - 80) / 10 * 2 = 2.8.

    poor ends at 60, never there. AUP of fast: 8 * 86 = 688, one point.
    """
    found = aup.of_results([
        line("slow", 0.9, 2.0), line("slow", 0.8, 4.0), line("fast", 0.86, 8.0), line("poor", 0.6, 9.0), line("poor", None, None),
        line("slow", 0.5, 1.0, task="sort"),
    ])  # fmt: skip
    by = {(row["task"], row["method"]): row for row in found}
    assert list(by) == [("all", "slow"), ("all", "fast"), ("all", "poor"), ("sort", "slow")]
    assert by["all", "slow"]["tokens_per_forward"] == pytest.approx(2.8)
    assert by["all", "fast"]["tokens_per_forward"] == 8.0 and by["all", "poor"]["tokens_per_forward"] is None
    assert by["all", "fast"]["aup"] == pytest.approx(688) and by["all", "fast"]["own_best"] == 86
    assert by["all", "slow"]["aup"] == pytest.approx(2 * 90), "80 is more than 5 below 90"
    assert all(row["at_accuracy"] == pytest.approx(86) and row["best_accuracy"] == 90 for row in found if row["task"] == "all")
    assert by["sort", "slow"]["points"] == 1 and by["all", "poor"]["points"] == 1
    assert aup.of_results([]) == []
