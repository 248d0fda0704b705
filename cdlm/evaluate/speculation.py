"""What draft and verify won and what it cost: the part of a report that only objective tidar has.

Knows lines of report.json and rooflines; knows no model and no clock.
"""

from typing import Any

from cdlm import roofline
from cdlm.evaluate.run import ratio

COLUMNS = (
    "method", "parameter", "accuracy", "tokens a forward", "query tokens a forward", "median s", "times faster than autoregressive",
    "drafts that stand, mean",
)  # fmt: skip
CARD_COLUMNS = (
    "card", "most proposals bound by memory", "a forward of K (M + 1) tokens, in forwards of one", "times faster than autoregressive",
)  # fmt: skip


def stood(histogram: list[int] | None) -> float | None:
    """Mean number of drafts that stood in a step. Golden: [0, 1, 3] is (1 + 2 * 3) / 4 = 1.75."""
    steps = sum(histogram or [])
    return ratio(sum(r * count for r, count in enumerate(histogram or [])), steps)


def summarise(
    results: list[dict[str, Any]], *, draft_length: int, proposals: int, shape: roofline.Shape, context: int, generate: int, size: float
) -> dict[str, Any]:
    """rows: a line for each method over all tasks, with its median latency against the method autoregressive (None where one was not
    timed). cards: for each card the most proposals that are free, how long a forward of the recipe's K (M + 1) query tokens takes in
    forwards of one token, and the tokens of a forward over that, all by the roofline at batch 1.
    """
    rows = [row for row in results if row["task"] == "all"]
    base = next((row for row in rows if row["method"] == "autoregressive"), None)
    base_seconds = base["latency_s"]["median"] if base and base["latency_s"] else None
    own = next((row for row in rows if row["method"] == "tidar" and row["parameter"] == proposals), None)
    given: dict[str, Any] = {"block": draft_length, "batch": 1, "context": context, "generate": generate, "size": size}
    cards = []
    for name, card in roofline.HARDWARE.items():
        longer = roofline.forward_over_one(shape, card, proposals, **given)
        cards.append({
            "card": name, "free_proposals": roofline.free_proposals(shape, card, **given), "forward_over_one": longer,
            "speedup": ratio(own["tpf"] if own else None, longer),
        })  # fmt: skip
    return {
        "draft_length": draft_length,
        "proposals": proposals,
        "rows": [
            {
                **{key: row[key] for key in ("method", "parameter", "accuracy", "tpf", "queries_per_forward", "accepted")},
                "median_s": row["latency_s"] and row["latency_s"]["median"], "mean_accepted": stood(row["accepted"]),
                "times_faster": ratio(base_seconds, row["latency_s"] and row["latency_s"]["median"]),
            }
            for row in rows
        ],
        "cards": cards,
    }


def table(found: dict[str, Any], titles: dict[str, str]) -> list[list[str]]:
    """Rows of text under COLUMNS."""

    def text(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    return [
        [
            titles.get(row["method"], row["method"]), text(row["parameter"], "g"), text(row["accuracy"], ".1%"), text(row["tpf"], ".2f"),
            text(row["queries_per_forward"], ".1f"), text(row["median_s"], ".4f"), text(row["times_faster"], ".2f"),
            text(row["mean_accepted"], ".2f"),
        ]
        for row in found["rows"]
    ]  # fmt: skip


def card_table(found: dict[str, Any]) -> list[list[str]]:
    """Rows of text under CARD_COLUMNS."""
    return [
        [
            row["card"], str(row["free_proposals"]), f"{row['forward_over_one']:.2f}",
            "" if row["speedup"] is None else f"{row['speedup']:.2f}",
        ]
        for row in found["cards"]
    ]  # fmt: skip


def histogram_lines(found: dict[str, Any], titles: dict[str, str]) -> list[str]:
    """Steps in which 1, 2, ... drafts stood, one line a method that drafts."""
    out = []
    for row in found["rows"]:
        if row["accepted"] and len(row["accepted"]) > 2:
            name = titles.get(row["method"], row["method"]) + ("" if row["parameter"] is None else f" ({row['parameter']:g})")
            out.append(f"{name}: " + ", ".join(f"{r} in {count}" for r, count in enumerate(row["accepted"]) if r))
    return out


def lines(found: dict[str, Any]) -> list[str]:
    """The claims as sentences: what a forward gives, and what the clock says of it, beside autoregressive decoding of the same run."""
    picked = {(row["method"], row["parameter"]): row for row in found["rows"]}
    base, out = picked.get(("autoregressive", None)), []
    for name, words in ((("tidar", found["proposals"]), "draft and verify in one forward"), (("tidar_linear", None), "in two forwards")):
        row = picked.get(name)
        if row is None:
            continue
        text = f"{words}: {row['accuracy']:.1%}, {row['tpf']:.2f} tokens a forward of {row['queries_per_forward'] or 0:.1f} query tokens"
        if base is not None:
            lost = round(100 * (base["accuracy"] - row["accuracy"]), 1)
            text += f"; autoregressive {base['accuracy']:.1%}, " + (
                f"{abs(lost):.1f} points {'lost' if lost > 0 else 'won'}" if lost else "nothing lost"
            )
        if row["times_faster"]:
            text += f", {row['times_faster']:.2f} times its speed by the clock"
        out.append(text)
    return out


def markdown(found: dict[str, Any], titles: dict[str, str], as_table: Any) -> list[str]:
    """The section of report.md."""
    length, count = found["draft_length"], found["proposals"]
    return [
        "## draft and verify", "",
        f"Drafts of {length}, {count} proposals: {length * (count + 1)} query tokens a forward in the parallel layout, at most "
        f"{2 * length} a step of two forwards in the linear one. Query tokens leave out the prompt's forward; of an assistant's "
        "forwards only the time is counted.", "",
        as_table(table(found, titles), COLUMNS), "",
        "Steps in which so many drafts stood:", "", *(f"- {line}" for line in histogram_lines(found, titles)), "",
        "By the roofline at batch 1: the most proposals with which no operator is bound by compute, and what the recipe's forward costs "
        "(also bound by memory it moves more activations, and they weigh the more the smaller a model is):", "",
        as_table(card_table(found), CARD_COLUMNS), "",
    ]  # fmt: skip
