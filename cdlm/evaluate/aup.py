"""Accuracy under parallelism (AUP, d3LLM, arXiv 2601.07568), and tokens per forward at equal accuracy.

Knows points (tokens per forward, accuracy in percent) of a sweep, and nothing of models. One number for a sweep: the area under
accuracy over tokens per forward, where accuracy that is lost against the best of all methods counts ever less.
"""

import math
from typing import Any

DROP = 5.0  # points of accuracy: how far below its first point a sweep may fall and still count
STEEPNESS = 3.0

Point = tuple[float, float]


def weight(accuracy: float, best: float) -> float:
    """W(y) = min(exp(-3 (1 - y / y_max)), 1). best: y_max, the best accuracy of any method on the task; above 0."""
    return min(math.exp(-STEEPNESS * (1 - accuracy / best)), 1.0)


def kept(points: list[Point]) -> list[Point]:
    """The points by rising tokens per forward (at equal ones by falling accuracy), without those more than 5 below the first accuracy."""
    ordered = sorted(points, key=lambda point: (point[0], -point[1]))
    return [point for point in ordered if point[1] >= ordered[0][1] - DROP]


def aup(points: list[Point], best: float) -> float:
    """rho_1 y_1 + sum_i (rho_i - rho_(i-1)) (y_i W(y_i) + y_(i-1) W(y_(i-1))) / 2 over the points that are kept.

    points: at least one (tokens per forward, accuracy in percent). best: see `weight`; where it is 0 no method is ever right: 0.
    """
    if not points:
        raise ValueError("a sweep without a point has no AUP")
    if best <= 0:
        return 0.0
    first, *rest = kept(points)
    area, before = first[0] * first[1], first
    for point in rest:
        area += (point[0] - before[0]) * (point[1] * weight(point[1], best) + before[1] * weight(before[1], best)) / 2
        before = point
    return area


def tokens_per_forward_at(points: list[Point], accuracy: float) -> float | None:
    """Most tokens per forward at which a sweep still reaches an accuracy, by linear interpolation between neighbouring points of its
    frontier (each point with the best accuracy that as many tokens per forward, or more, reach); None when it never does.

    Golden: tokens_per_forward_at([(4, 90), (8, 50)], 70) = 8 - (70 - 50) / (90 - 50) * 4 = 6.
    """
    before: Point | None = None
    for rate, reached in sorted(points, key=lambda point: (-point[0], point[1])):
        reached = reached if before is None else max(reached, before[1])
        if reached >= accuracy:
            if before is None:
                return rate
            return before[0] - (accuracy - before[1]) / (reached - before[1]) * (before[0] - rate)
        before = (rate, reached)
    return None


def of_results(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """AUP of every method on every task of a report's results, and its tokens per forward at equal accuracy.

    Equal accuracy (`at_accuracy`, percent) is the lowest best accuracy among the methods that come within 5 points of the task's best:
    so all of these reach it, and tokens_per_forward is null for the others. A method with one point is a sweep of one. Accuracies
    are in percent; own_best is the method's, best_accuracy the task's.
    """
    out: list[dict[str, Any]] = []
    for task in dict.fromkeys(row["task"] for row in results):
        sweeps: dict[str, list[Point]] = {}
        for row in results:
            if row["task"] == task and row["accuracy"] is not None and row["tpf"] is not None:
                sweeps.setdefault(row["method"], []).append((row["tpf"], 100 * row["accuracy"]))
        tops = {method: max(accuracy for _, accuracy in points) for method, points in sweeps.items()}
        if not tops:
            continue
        best = max(tops.values())
        level = min(top for top in tops.values() if top >= best - DROP)
        out += [
            {
                "task": task, "method": method, "points": len(points), "aup": aup(points, best), "own_best": tops[method],
                "best_accuracy": best, "at_accuracy": level, "tokens_per_forward": tokens_per_forward_at(points, level),
            }
            for method, points in sweeps.items()
        ]
    return out
