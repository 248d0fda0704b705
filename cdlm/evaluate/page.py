"""report.html: one page that needs nothing besides itself, from what report.json holds and the lines of log.jsonl.

Knows the report's keys and HTML; draws with svg.py. All text that comes from outside is escaped.
"""

import json
from html import escape
from typing import Any

from cdlm.evaluate import growth, overhead, speculation, svg
from cdlm.evaluate import report as tables

CSS = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #60666d; --paper: #ffffff; --card: #f5f6f8; --rule: #dcdfe4;
  --s0: #3b3f45; --s1: #c0392b; --s2: #d9780f; --s3: #7d8a00; --s4: #8e44ad; --s5: #00796b; --s6: #2e8b3d; --s7: #1f6fd6; --s8: #0097b8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --soft: #9aa2ab; --paper: #14171a; --card: #1d2125; --rule: #343a41;
  --s0: #c8ccd1; --s1: #ff7b6b; --s2: #ffae57; --s3: #c9d64b; --s4: #cf9bea; --s5: #4dc7b5; --s6: #6fd07d; --s7: #6ea8ff; --s8: #5bd4ee; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 24px 20px 60px; max-width: 1100px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 19px; margin: 36px 0 8px; } h3 { font-size: 15px; margin: 12px 0 2px; }
p, li { max-width: 78ch; } .soft, figcaption { color: var(--soft); font-size: 13px; }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; margin: 16px 0; }
.tile { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 10px 16px; flex: 1 1 190px; }
.tile b { display: block; font-size: 24px; line-height: 1.25; } .tile span { color: var(--soft); font-size: 13px; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(300px, 1fr)); gap: 12px; } figure { margin: 0; }
.plot { width: 100%; height: auto; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 13px; margin: 6px 0; }
.swatch { vertical-align: -1px; margin-right: 5px; }
.grid { stroke: var(--rule); } .axis { stroke: var(--soft); fill: none; } .label { fill: var(--soft); font-size: 12px; }
.label.name { fill: var(--ink); } .line { fill: none; stroke: currentColor; stroke-width: 2; } .mark { fill: currentColor; }
.mark.cross { stroke: currentColor; stroke-width: 2; } .bar { fill: currentColor; opacity: 0.8; }
.whisker { stroke: var(--ink); stroke-width: 1.5; fill: none; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { padding: 3px 7px; text-align: right; border-bottom: 1px solid var(--rule); } th:first-child, td:first-child { text-align: left; }
th { color: var(--soft); font-weight: 600; } tr.own td { font-weight: 600; } details { margin: 10px 0; } summary { cursor: pointer; }
pre { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 10px 14px; overflow-x: auto; font-size: 12.5px; }
.tokens { display: flex; flex-wrap: wrap; gap: 3px 2px; margin: 4px 0 10px; }
.token { text-align: center; border-radius: 4px; padding: 1px 4px; font: 14px/1.3 ui-monospace, monospace; border: 1px solid var(--rule); }
.token small { display: block; font-size: 10px; opacity: 0.85; }
"""
SERIES = "".join(f".s{i} {{ color: var(--s{i % 9}); }} " for i in range(len(tables.TITLES)))


def html(report: dict[str, Any], title: str, log: list[dict[str, Any]]) -> str:
    """The whole page. log: lines of log.jsonl; those with losses become the loss curves. A part that was not measured is left out."""
    parts = [
        f"<h1>{escape(title)}</h1>", _introduction(report), _tiles(report["summary"]), _summary(report["summary"]), _pareto(report),
        _latency(report), _drafts(report), _parallelism(report), _growth(report), _results(report), _losses(log),
        _decodings(report), _origin(report),
    ]
    head = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}: cdlm report</title><style>{CSS}{SERIES}</style></head>\n<body>\n"
    )
    return head + "\n".join(part for part in parts if part) + "\n</body></html>\n"


def _introduction(report: dict[str, Any]) -> str:
    questions = max((row["n"] for row in report["results"] if row["task"] == "all"), default=0)
    return (
        f'<p class="soft">Answers of a diffusion language model to {questions} test questions, decoded in several ways by one '
        "decoder in one process. A step is one pass of the network that refines a block of tokens: fewer steps are faster. What matters is "
        "how few steps a way of decoding needs, and how many answers are still right.</p>"
    )


def _tiles(summary: dict[str, Any]) -> str:
    """The four numbers that a stranger should see first; those that were not measured are left out."""
    teacher, student = summary["teacher_accuracy"], summary["student_accuracy"]
    if student is None:
        return ""
    tiles = [(f"{student:.1%}", "right: student" + (f" (teacher {teacher:.1%})" if teacher is not None else ""))]
    if summary["student_steps_at_threshold"] is not None:
        against = f" (teacher {summary['teacher_steps']:.1f})" if summary["teacher_steps"] is not None else ""
        tiles.append((f"{summary['student_steps_at_threshold']:.1f}", f"steps an answer: student{against}"))
    if summary["tpf"] is not None:
        tiles.append((f"{summary['tpf']:.1f}", "tokens a forward: student"))
    if summary["latency_speedup"]:
        tiles.append((f"{summary['latency_speedup']:.1f}x", "lower latency than the teacher, batch 1"))
    return '<div class="tiles">' + "".join(f'<div class="tile"><b>{a}</b><span>{escape(b)}</span></div>' for a, b in tiles) + "</div>"


def _summary(summary: dict[str, Any]) -> str:
    lines = tables.summary_lines(summary)
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>" if lines else ""


def _number(method: str) -> int:
    """The colour and mark of a method, the same in every plot."""
    names = list(tables.TITLES)
    return names.index(method) if method in names else len(names) - 1


def _pareto(report: dict[str, Any]) -> str:
    tasks = ["all", *sorted({row["task"] for row in report["results"]} - {"all"})]
    methods = list(dict.fromkeys(row["method"] for row in report["results"]))
    titles = tables.titles(report["results"])
    legend = "".join(f"<span>{svg.swatch(_number(m))}{escape(titles[m])}</span>" for m in methods)
    figures = []
    for task in tasks:
        series = []
        for method in methods:
            rows = [
                row for row in report["results"]
                if row["task"] == task and row["method"] == method and row["steps"] and row["accuracy"] is not None
            ]
            rows.sort(key=lambda row: row["steps"])
            notes = [f"{titles[method]}{_at(row['parameter'])}: {row['accuracy']:.1%} in {row['steps']:.1f} steps" for row in rows]
            series.append(svg.Series(titles[method], _number(method), [(row["steps"], 100 * row["accuracy"]) for row in rows], notes))
        if any(one.points for one in series):
            least = min(accuracy for one in series for _, accuracy in one.points)
            bottom = max(-2, 10 * (min(least, 80) // 10) - 2)
            drawn = svg.plot(
                series, x="steps an answer (log scale)", y="right answers, %", log_x=True, y_range=(bottom, 102),
                width=900 if task == "all" else 340, height=420 if task == "all" else 260,
            )
            figures.append((task, drawn))
    if not figures:
        return ""
    rest = "".join(f"<figure><h3>{escape(task)}</h3>{drawn}</figure>" for task, drawn in figures[1:])
    return (
        '<h2>Accuracy against steps</h2><p class="soft">Up and to the left is better. Each point is one setting of a method (a threshold, '
        f'or a number of steps); point at it for its numbers.</p><div class="legend">{legend}</div><figure>{figures[0][1]}</figure>'
        + (f'<h3>each task alone</h3><div class="plots">{rest}</div>' if rest else "")
    )


def _at(parameter: float | None) -> str:
    return "" if parameter is None else f" at {parameter:g}"


def _latency(report: dict[str, Any]) -> str:
    timed = report.get("latency", {"rows": []})
    rows = tables.own_rows(report, timed["rows"])
    if not rows:
        return ""
    out = ["<h2>Latency</h2>"]
    for size in sorted({row["batch"] for row in rows}):
        bars = []
        for row in (row for row in rows if row["batch"] == size):
            faster = row["ratio"]
            times = f", {faster['value']:.1f}x" if faster else ""
            times += f" ({faster['low']:.1f} to {faster['high']:.1f})" if faster and faster["low"] is not None else ""
            times = ", the base" if row["method"] == row["base"] else times
            text = f"{row['median_s']:.4f} s{times}"
            bars.append(svg.Bar(tables.title(row), _number(row["method"]), row["p10_s"], row["median_s"], row["p90_s"], text))
        out.append(f"<h3>batch {size}</h3>{svg.bars(bars, x='seconds a call: median, and p10 to p90')}")
    base = escape(tables.titles(report["results"])[rows[0]["base"]])
    out.append(
        f'<p class="soft">Behind each bar: the median, and how many times faster than the base ({base}) with its 95 % interval. '
        f"{escape(tables.PROTOCOL)} Memory: {escape(timed['memory'])}.</p>"
    )
    table = _table(tables.LATENCY_COLUMNS, tables.latency_table(timed["rows"]))
    return "".join([*out, f"<details><summary>every setting, with first block, later tokens and memory</summary>{table}</details>"])


def _parallelism(report: dict[str, Any]) -> str:
    rows = [row for row in report.get("parallelism", []) if row["task"] == "all"]
    if not rows:
        return ""
    line, table = escape(tables.aup_line(rows)), tables.aup_table(rows, tables.titles(report["results"]))
    return f'<h2>Accuracy under parallelism</h2><p class="soft">{line}</p>{_table(tables.AUP_COLUMNS, table)}'


def _growth(report: dict[str, Any]) -> str:
    """How time grows with length, and what is spent around the forwards; where `cdlm bench` measured them."""
    parts = []
    if grown := report.get("growth"):
        parts += ["<h2>Growth with length</h2>", "<ul>", *(f"<li>{escape(line)}</li>" for line in growth.lines(grown)), "</ul>"]
        parts.append(_table(growth.COLUMNS, growth.table(grown)))
    if around := report.get("overhead"):
        parts += ["<h2>Time around the forwards</h2>", "<ul>", *(f"<li>{escape(line)}</li>" for line in overhead.lines(around)), "</ul>"]
    return "\n".join(parts)


def _drafts(report: dict[str, Any]) -> str:
    found = report.get("speculation")
    if not found:
        return ""
    lines, titles = "".join(f"<li>{escape(line)}</li>" for line in speculation.lines(found)), tables.titles(report["results"])
    stood = "".join(f"<li>{escape(line)}</li>" for line in speculation.histogram_lines(found, titles))
    return (
        f"<h2>Draft and verify</h2><ul>{lines}</ul>{_table(speculation.COLUMNS, speculation.table(found, titles))}"
        '<p class="soft">Query tokens leave out the prompt\'s forward; of an assistant\'s forwards only the time is counted.</p>'
        f"<details><summary>how many drafts stood in a step, and what query tokens cost on a card</summary><ul>{stood}</ul>"
        f"{_table(speculation.CARD_COLUMNS, speculation.card_table(found))}</details>"
    )


def _results(report: dict[str, Any]) -> str:
    rows = [row for row in report["results"] if row["task"] == "all"]
    shown = tables.own_rows(report, rows)
    out = ["<h2>All tasks</h2>", _table(tables.COLUMNS, tables.table(shown))]
    out.append(
        '<p class="soft">Steps are refinement forwards. With the cache, a finished block is committed by the forward that takes the first '
        "step in the next block, so forwards is not steps + commit. Tokens run up to and with the end token; TPF is tokens over forwards."
        "</p>"
    )
    for task in ["all", *sorted({row["task"] for row in report["results"]} - {"all"})]:
        held = [row for row in report["results"] if row["task"] == task]
        table = _table(tables.COLUMNS, tables.table(held))
        out.append(f"<details><summary>{escape(task)}, every setting</summary>{table}</details>")
    return "".join(out)


def _table(columns: tuple[str, ...], rows: list[list[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _losses(log: list[dict[str, Any]]) -> str:
    curves: dict[str, list[tuple[float, float]]] = {}
    for line in log:
        for key, value in line.items():
            if (key == "loss" or key.endswith("_loss")) and key != "train_loss" and isinstance(value, int | float) and "step" in line:
                curves.setdefault(key, []).append((line["step"], value))
    figures = []
    for key, points in curves.items():
        top = max(value for _, value in points) or 1.0
        one = svg.Series(key, 7, points, [""] * len(points))
        y_range = (min(0.0, *(value for _, value in points)), top)
        drawn = svg.plot([one], x="training step", y=key, marks=False, width=340, height=220, y_range=y_range)
        figures.append(f"<figure><h3>{escape(key)}</h3>{drawn}</figure>")
    return f'<h2>Training losses</h2><div class="plots">{"".join(figures)}</div>' if figures else ""


def _decodings(report: dict[str, Any]) -> str:
    decodings, titles = report.get("decodings", []), tables.titles(report["results"])
    if not decodings:
        return ""
    out = [
        '<h2>How answers are written</h2><p class="soft">One question a task. The number under a token is the step that revealed it; '
        "tokens of one step are written at once. The stronger the colour, the later; ∎ ends the answer.</p>"
    ]
    for place, one in enumerate(decodings):
        steps = "1 step" if one["steps"] == 1 else f"{one['steps']} steps"
        right = "right" if one["correct"] else f"wrong, expected {one['reference']}"
        if not place or decodings[place - 1]["prompt"] != one["prompt"]:
            out.append(f"<h3>{escape(one['task'])}: <code>{escape(one['prompt'])}</code></h3>")
        out.append(
            f'<div class="soft">{escape(titles[one["method"]])}{_at(one["parameter"])}: {steps}, {escape(right)}</div>'
        )
        spans = []
        for text, step in zip(one["tokens"], one["revealed_at"], strict=True):
            share = (step - 1) / max(1, one["steps"] - 1)
            seen = text.replace(" ", "␣").replace("\n", "⏎") or "∅"
            colour = f"background: hsla(210, 80%, 55%, {0.08 + 0.5 * share:.2f})"
            spans.append(f'<span class="token" style="{colour}">{escape(seen)}<small>{step}</small></span>')
        out.append(f'<div class="tokens">{"".join(spans)}</div>')
    return "".join(out)


def _origin(report: dict[str, Any]) -> str:
    """Where the numbers come from: the command, the machine, the recipe."""
    out = ["<h2>Where this comes from</h2>"]
    if report.get("command"):
        out.append(f"<p>Made by</p><pre>{escape(report['command'])}</pre>")
    out.append(_table(("environment", ""), [[str(key), str(value)] for key, value in report["environment"].items()]))
    if "request" in report:
        out.append(
            "<details open><summary>the recipe's values, and hashes of model and data</summary>"
            f"<pre>{escape(json.dumps(report['request'], indent=2))}</pre></details>"
        )
    return "".join(out)
