"""From measured rows to report.json, report.md, report.html, pareto.png and the table a command prints."""

import json
import platform
from pathlib import Path
from typing import Any

import torch

from cdlm import files, terminal
from cdlm.evaluate import aup, growth, overhead, speculation
from cdlm.evaluate.clock import COVERAGE, DRAWS, memory_kind
from cdlm.evaluate.run import Measured, latencies, ratio, result
from cdlm.trajectories import versions

SUMS = "report.sha256"
COLUMNS = ("method", "parameter", "accuracy", "steps", "commit", "forwards", "tokens", "TPF", "median s", "p90 s", "TPS", "timed", "n")
LATENCY_COLUMNS = (
    "method", "parameter", "batch", "p10 s", "median s", "p90 s", "times faster", "95 % interval", "first block s", "a token after it s",
    "TPS", "peak MiB", "calls",
)  # fmt: skip
AUP_COLUMNS = ("method", "points", "best accuracy", "AUP", "TPF at equal accuracy")
THRESHOLDED = (
    "teacher_threshold", "teacher_threshold_stop", "teacher_prefix_cache", "teacher_dual_cache", "student", "student_uncached",
)  # fmt: skip
PROTOCOL = (
    "Wall time of a decode call on a whole batch; prompt and tokenizer outside the clock, after warm-up, the device synchronised at the "
    "edges only, methods interleaved. Percentiles over prompts and repeats. Times faster is the ratio of medians to the base, with the "
    f"middle {COVERAGE:.0%} of {DRAWS} bootstrap draws over prompts. First block: until its last step was taken; a token after it: the "
    "rest of the time over the tokens behind the first block, where there are any."
)
TITLES = {
    "teacher": "teacher, 1 token a step",
    "teacher_truncated": "teacher, cut to few steps",
    "teacher_threshold": "teacher, confidence threshold",
    "teacher_threshold_stop": "teacher, threshold, stops at the end",
    "teacher_fixed": "teacher, fixed tokens a step",
    "teacher_factor": "teacher, factor rule",
    "teacher_entropy_bound": "teacher, entropy bound",
    "teacher_prefix_cache": "teacher, threshold, prefix cache",
    "teacher_dual_cache": "teacher, threshold, dual cache",
    "teacher_interval_cache": "teacher, 1 token a step, interval cache",
    "teacher_block_causal": "teacher under the block-causal mask",
    "autoregressive": "autoregressive, greedy",
    "autoregressive_model": "autoregressive model, stock generate",
    "student_sequential": "student, 1 token a step",
    "transformers_generate": "teacher, transformers' own generate",
    "student": "student, cached",
    "student_uncached": "student, uncached",
    "student_autoregressive": "trained, autoregressive",
    "tidar": "draft and verify",
    "tidar_linear": "draft, then verify",
    "tidar_mix": "draft and verify, mixed logits",
    "transformers_greedy": "transformers, greedy",
    "prompt_lookup": "transformers, prompt lookup",
    "assisted": "transformers, smaller model drafts",
}


def frontier(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """(steps, accuracy) points by rising steps, each with the best accuracy that so many steps or fewer reach."""
    out: list[tuple[float, float]] = []
    for steps, accuracy in sorted(points):
        out.append((steps, max(accuracy, out[-1][1]) if out else accuracy))
    return out


def steps_at(points: list[tuple[float, float]], accuracy: float) -> float | None:
    """Fewest steps at which a sweep reaches an accuracy, by linear interpolation between neighbouring points of its
    frontier; None when it never does. Golden: steps_at([(2, .5), (4, .9)], .7) = 2 + (.7 - .5) / (.9 - .5) * 2 = 3."""
    before: tuple[float, float] | None = None
    for steps, reached in frontier(points):
        if reached >= accuracy:
            if before is None:
                return steps
            share = (accuracy - before[1]) / (reached - before[1])
            return before[0] + share * (steps - before[0])
        before = (steps, reached)
    return None


def own_rows(report: dict[str, Any], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of methods at the recipe's own value: its threshold where that is swept, the steps that the truncated teacher was cut to,
    its number of proposals. Where a recipe has no value of its own, as of the fixed number of tokens, all of a sweep."""
    summary, drafted = report["summary"], report.get("speculation") or {}
    own = {"teacher_truncated": summary["truncated_steps"], "tidar": drafted.get("proposals")}
    own |= dict.fromkeys(THRESHOLDED, summary["confidence_threshold"])
    there = {(row["method"], row["parameter"]) for row in rows}
    return [
        row for row in rows
        if row["parameter"] in (None, own.get(row["method"])) or (row["method"], own.get(row["method"])) not in there
    ]  # fmt: skip


def _pick(results: list[dict[str, Any]], method: str, parameter: float | None = None) -> dict[str, Any] | None:
    for row in results:
        if row["task"] == "all" and row["method"] == method and (parameter is None or row["parameter"] == parameter):
            return row
    return None


def _points(results: list[dict[str, Any]], method: str) -> list[tuple[float, float]]:
    return [(row["steps"], row["accuracy"]) for row in results if row["task"] == "all" and row["method"] == method]


def summarise(results: list[dict[str, Any]], threshold: float, truncated: float | None) -> dict[str, Any]:
    """The claims, over all tasks. A number whose methods were not run is null.

    The student is taken at the recipe's own threshold, the truncated teacher at the student's mean steps (`truncated`).
    matched_accuracy is the accuracy that both sweeps reach: the lower of the student's, at the recipe's threshold, and the best of
    teacher_threshold; threshold_steps and student_steps are the steps at which each sweep first reaches it, interpolated.
    The keys that end in _same_stop say the same of teacher_threshold_stop, which stops as the student does.
    step_reduction and latency_speedup compare the naive teacher with the student at the recipe's threshold.
    Where autoregressive was run, autoregressive_accuracy and _steps are its own, _step_reduction and _latency_speedup against that student.
    """
    teacher, student = _pick(results, "teacher"), _pick(results, "student", threshold)
    cut = _pick(results, "teacher_truncated", truncated) if truncated is not None else None
    out: dict[str, Any] = {
        "confidence_threshold": threshold,
        "teacher_accuracy": teacher and teacher["accuracy"],
        "student_accuracy": student and student["accuracy"],
        "truncated_accuracy": cut and cut["accuracy"],
        "truncated_steps": truncated,
        "teacher_steps": teacher and teacher["steps"],
        "student_steps_at_threshold": student and student["steps"],
        "tpf": student and student["tpf"],
    }
    for method, suffix in (("teacher_threshold", ""), ("teacher_threshold_stop", "_same_stop")):
        matched = threshold_steps = student_steps = None
        sweep = _points(results, method)
        if student and sweep:
            matched = min(student["accuracy"], max(accuracy for _, accuracy in sweep))
            threshold_steps = steps_at(sweep, matched)
            student_steps = steps_at(_points(results, "student"), matched)
        out |= {
            f"matched_accuracy{suffix}": matched,
            f"threshold_steps{suffix}": threshold_steps,
            f"student_steps{suffix}": student_steps,
            f"student_steps_over_threshold_steps{suffix}": ratio(student_steps, threshold_steps),
        }
    out["step_reduction"] = out["latency_speedup"] = None
    if teacher and student:
        out["step_reduction"] = ratio(teacher["steps"], student["steps"])
        if teacher["latency_s"] and student["latency_s"]:
            out["latency_speedup"] = ratio(teacher["latency_s"]["median"], student["latency_s"]["median"])
    greedy = _pick(results, "autoregressive")
    if greedy:
        out |= {"autoregressive_accuracy": greedy["accuracy"], "autoregressive_steps": greedy["steps"]}
        if student:
            out["autoregressive_step_reduction"] = ratio(greedy["steps"], student["steps"])
            if greedy["latency_s"] and student["latency_s"]:
                out["autoregressive_latency_speedup"] = ratio(greedy["latency_s"]["median"], student["latency_s"]["median"])
    return out


def environment(device: str) -> dict[str, Any]:
    """Where the numbers come from: the device that was used, and versions."""
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else f"{platform.processor() or platform.machine()} cpu"
    return {"device": name, "threads": torch.get_num_threads(), **versions()}


def build(
    measured: list[Measured], *, threshold: float, truncated: float | None, batch_size: int, extra: dict[str, Any], device: str = "cpu"
) -> dict[str, Any]:
    """report.json as a dictionary: summary, results for each task and method and for all tasks, parallelism (see aup.py), latency (see
    `run.latencies`), environment, extra."""
    tasks = sorted({row.group for m in measured for row in m.rows})
    results = [result(m, None, batch_size) for m in measured]
    if len(tasks) > 1 or tasks != ["all"]:
        results += [result(m, task, batch_size) for task in tasks for m in measured]
    return {
        "summary": summarise(results, threshold, truncated), "results": results, "parallelism": aup.of_results(results),
        "latency": {"memory": memory_kind(torch.device(device)), "rows": latencies(measured)}, "environment": environment(device), **extra,
    }  # fmt: skip


def _text(value: float | None, form: str) -> str:
    """A number as text; one that is not there is an empty cell."""
    return "" if value is None else format(value, form)


def title(row: dict[str, Any]) -> str:
    """What a row's method is called."""
    return row.get("title") or TITLES.get(row["method"], row["method"])


def titles(results: list[dict[str, Any]]) -> dict[str, str]:
    """What every method is called in the report of these results: TITLES, and a row's own title before it."""
    return {**TITLES, **{row["method"]: title(row) for row in results}}


def _cells(row: dict[str, Any]) -> list[str]:
    latency = row["latency_s"] or {"median": None, "p90": None}
    return [
        title(row), _text(row["parameter"], "g"), _text(row["accuracy"], ".1%"), _text(row["steps"], ".1f"),
        _text(row["commit_forwards"], ".1f"), _text(row["forwards"], ".1f"), _text(row["output_tokens"], ".1f"), _text(row["tpf"], ".2f"),
        _text(latency["median"], ".4f"), _text(latency["p90"], ".4f"), _text(row["tps"], ".0f"), str(row["latency_n"] or ""), str(row["n"]),
    ]  # fmt: skip


def table(results: list[dict[str, Any]]) -> list[list[str]]:
    """Rows of text under COLUMNS."""
    return [_cells(row) for row in results]


def latency_table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Rows of text under LATENCY_COLUMNS."""
    out = []
    for row in rows:
        faster, peak = row["ratio"], row["peak_memory_bytes"] / 2**20
        out.append([
            title(row), _text(row["parameter"], "g"), str(row["batch"]), f"{row['p10_s']:.4f}",
            f"{row['median_s']:.4f}", f"{row['p90_s']:.4f}", f"{faster['value']:.2f}" if faster else "",
            f"{faster['low']:.2f} to {faster['high']:.2f}" if faster and faster["low"] is not None else "", f"{row['first_block_s']:.4f}",
            _text(row["per_token_s"], ".5f"), _text(row["tps"], ".0f"), f"{peak:.0f}", str(row["calls"]),
        ])  # fmt: skip
    return out


def aup_table(rows: list[dict[str, Any]], named: dict[str, str]) -> list[list[str]]:
    """Rows of text under AUP_COLUMNS, the largest AUP first. named: see `titles`."""
    out = []
    for row in sorted(rows, key=lambda row: -row["aup"]):
        equal = f"{row['tokens_per_forward']:.2f}" if row["tokens_per_forward"] is not None else "not reached"
        out.append([named[row["method"]], str(row["points"]), f"{row['own_best']:.1f}%", f"{row['aup']:.1f}", equal])
    return out


def markdown_table(rows: list[list[str]], columns: tuple[str, ...] = COLUMNS) -> str:
    """A GitHub table; numbers to the right."""
    head = "| " + " | ".join(columns) + " |"
    rule = "|" + "|".join("---" if i == 0 else "---:" for i in range(len(columns))) + "|"
    return "\n".join([head, rule, *("| " + " | ".join(row) + " |" for row in rows)])


def aup_line(rows: list[dict[str, Any]]) -> str:
    """What the AUP table of one task is."""
    return (
        "AUP (accuracy under parallelism, arXiv 2601.07568) is the area under accuracy (%) over tokens per forward (TPF) of a method's "
        f"sweep, weighed against the best accuracy of all, {rows[0]['best_accuracy']:.1f} %. TPF at equal accuracy: at "
        f"{rows[0]['at_accuracy']:.1f} %, interpolated."
    )


def summary_lines(summary: dict[str, Any]) -> list[str]:
    """The claims as sentences; those without numbers are left out. What is lost in accuracy stands beside what is won in steps, and of
    a student that has failed (under half of the teacher's accuracy, or none right) no gain in steps or time is claimed."""
    s, lines = summary, []
    teacher, student = s["teacher_accuracy"], s["student_accuracy"]
    failed = student is not None and (student == 0 or (teacher is not None and student < teacher / 2))
    if teacher is not None and student is not None:
        gains = [f"{s['step_reduction']:.1f}x fewer steps"] if s["step_reduction"] else []
        if s["latency_speedup"]:
            gains.append(f"{s['latency_speedup']:.1f}x lower latency")
        lost = round(100 * (teacher - student), 1)
        gains.append(f"{abs(lost):.1f} points of accuracy {'lost' if lost > 0 else 'won'}" if lost else "no accuracy lost")
        lines.append(
            f"student {student:.1%} in {_steps(s['student_steps_at_threshold'], 1)}, teacher {teacher:.1%} in {s['teacher_steps']:.1f}: "
            + ("the student fails, so its steps and seconds are no gain" if failed else ", ".join(gains))
        )
    elif teacher is not None:
        lines.append(f"teacher {teacher:.1%} in {_steps(s['teacher_steps'], 1)}")
    elif failed:
        lines.append(f"student {student:.1%} in {_steps(s['student_steps_at_threshold'], 1)}: the student fails")
    if s.get("autoregressive_accuracy") is not None:
        greedy = f"{s['autoregressive_accuracy']:.1%} in {s['autoregressive_steps']:.1f} steps"
        if s["student_accuracy"] is None:
            lines.append(f"autoregressive {greedy}")
        else:
            lost = round(100 * (s["autoregressive_accuracy"] - s["student_accuracy"]), 1)
            gains = [f"{s['autoregressive_step_reduction']:.1f}x fewer steps"]
            if faster := s.get("autoregressive_latency_speedup"):
                gains.append(f"{faster:.1f}x lower latency")
            gains.append(f"{abs(lost):.1f} points of accuracy {'lost' if lost > 0 else 'won'}" if lost else "no accuracy lost")
            if s["student_accuracy"] < s["autoregressive_accuracy"] / 2 or not s["student_accuracy"]:
                gains = ["the student fails, so its steps and seconds are no gain"]
            lines.append(
                f"student {s['student_accuracy']:.1%} in {_steps(s['student_steps_at_threshold'], 1)}, greedy decoding of the "
                f"autoregressive model it was made of {greedy}: {', '.join(gains)}"
            )
    if s["truncated_accuracy"] is not None:
        lines.append(f"the teacher cut to {_steps(s['truncated_steps'], 0)}: {s['truncated_accuracy']:.1%}")
    for suffix, words in (("", ""), ("_same_stop", ", with the student's stop rule")):
        if s.get(f"student_steps_over_threshold_steps{suffix}") is not None and not failed:
            lines.append(
                f"at {s[f'matched_accuracy{suffix}']:.1%}: student {_steps(s[f'student_steps{suffix}'], 2)}, training-free threshold "
                f"decoding of the teacher{words} {s[f'threshold_steps{suffix}']:.2f}: "
                f"{s[f'student_steps_over_threshold_steps{suffix}']:.2f} of them"
            )
    return lines


def _steps(number: float, digits: int) -> str:
    """A number of steps with its noun: 3.1 steps, 1 step."""
    return "1 step" if number == 1 else f"{number:.{digits}f} steps"


def write(report: dict[str, Any], folder: Path, title: str, log: list[dict[str, Any]] | None = None) -> None:
    """report.md, report.html and pareto.png, checksums of these and of the samples beside them, then report.json: the one that says
    that the stage is done comes last. No secret of the environment is in what can be read, should a name or an answer hold one.

    log: lines of log.jsonl, for the loss curves of report.html.
    """
    from cdlm.evaluate import page

    title = terminal.without_secrets(title)
    files.write_text(folder / "report.md", terminal.without_secrets(markdown(report, title)))
    files.write_text(folder / "report.html", terminal.without_secrets(page.html(report, title, log or [])))
    with files.replacing(folder / "pareto.png") as partial:
        plot(report["results"], partial, title)
    text = terminal.without_secrets(json.dumps(report, indent=2)) + "\n"
    files.write_sums(folder / SUMS, {**beside(folder), "report.json": text.encode()})
    files.write_text(folder / "report.json", text)


def beside(folder: Path) -> dict[str, Path]:
    """What a report's checksums are of, besides report.json: name -> file, of those that are there."""
    names = ("report.md", "report.html", "pareto.png", "samples.jsonl", "evaluate.request.json", "log.jsonl")
    return {name: folder / name for name in names if (folder / name).is_file()}


def markdown(report: dict[str, Any], title: str) -> str:
    """report.md. A report from before AUP or latency rows were written has none of these tables."""
    tasks = sorted({row["task"] for row in report["results"]} - {"all"})
    drafted, named = report.get("speculation"), titles(report["results"])
    told = summary_lines(report["summary"]) + (speculation.lines(drafted) if drafted else [])
    parts = [f"# {terminal.markdown(title)}", "", *(f"- {line}" for line in told), ""]
    parts += [
        "Steps are refinement forwards. With the cache a finished block is committed by the forward that takes the first step "
        "in the next block, so forwards is not steps + commit. Tokens run up to and with the end-of-sequence token. Accuracy "
        f"and steps over n questions at batch {report['results'][0]['batch']}, latency at batch 1 over the timed ones, with all methods "
        "interleaved.", "",
    ]
    for task in ["all", *tasks]:
        parts += [f"## {terminal.markdown(task)}", "", markdown_table(table([r for r in report["results"] if r["task"] == task])), ""]
    parallel = [row for row in report.get("parallelism", []) if row["task"] == "all"]
    if parallel:
        parts += ["## accuracy under parallelism", "", aup_line(parallel), "", markdown_table(aup_table(parallel, named), AUP_COLUMNS), ""]
    timed = report.get("latency", {"rows": []})
    if timed["rows"]:
        parts += ["## latency", "", f"{PROTOCOL} Base: {named[timed['rows'][0]['base']]}. Memory: {timed['memory']}.", ""]
        parts += [markdown_table(latency_table(timed["rows"]), LATENCY_COLUMNS), ""]
    if drafted:
        parts += speculation.markdown(drafted, named, markdown_table)
    if grown := report.get("growth"):
        parts += ["## growth with length", "", *(f"- {line}" for line in growth.lines(grown)), ""]
        parts += [markdown_table(growth.table(grown), growth.COLUMNS), ""]
    if around := report.get("overhead"):
        parts += ["## around the forwards", "", *(f"- {line}" for line in overhead.lines(around)), ""]
    env = report["environment"]
    parts += ["## environment", "", ", ".join(f"{key} {value}" for key, value in env.items()), ""]
    return "\n".join(parts)


def plot(results: list[dict[str, Any]], path: Path, title: str) -> None:
    """Accuracy against steps (log scale), one curve a method; single points where nothing is swept."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.2, 4.4), dpi=140)
    styles = {
        "teacher": ("o", "black"),
        "teacher_truncated": ("s", "tab:red"),
        "teacher_threshold": ("^", "tab:orange"),
        "teacher_threshold_stop": ("v", "tab:olive"),
        "teacher_fixed": ("s", "tab:pink"),
        "teacher_factor": ("<", "tab:brown"),
        "teacher_entropy_bound": (">", "tab:gray"),
        "teacher_prefix_cache": ("1", "goldenrod"),
        "teacher_dual_cache": ("2", "darkgoldenrod"),
        "teacher_interval_cache": ("3", "peru"),
        "teacher_block_causal": ("D", "tab:purple"),
        "transformers_generate": ("x", "tab:gray"),
        "autoregressive": ("o", "black"),
        "autoregressive_model": ("*", "black"),
        "student_sequential": ("D", "tab:green"),
        "student": ("o", "tab:blue"),
        "student_uncached": ("x", "tab:cyan"),
        "student_autoregressive": ("D", "tab:gray"),
        "tidar": ("o", "tab:blue"),
        "tidar_linear": ("s", "tab:green"),
        "tidar_mix": ("^", "tab:orange"),
        "transformers_greedy": ("x", "black"),
        "prompt_lookup": ("v", "tab:brown"),
        "assisted": ("<", "tab:purple"),
    }
    named = titles(results)
    for method, (marker, colour) in styles.items():
        points = sorted(_points(results, method))
        if points:
            steps, accuracy = zip(*points, strict=True)
            axes.plot(steps, [100 * a for a in accuracy], marker=marker, color=colour, label=named[method], markersize=5, linewidth=1.2)
    axes.set_xscale("log")
    ticks = [t for t in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256) if axes.get_xlim()[0] <= t <= axes.get_xlim()[1]]
    axes.set_xticks(ticks, [str(t) for t in ticks])
    axes.minorticks_off()
    axes.set_ylim(-3, 103)
    axes.set_xlabel("refinement steps per answer (mean, log scale)")
    axes.set_ylabel("accuracy, %")
    axes.set_title(title, parse_math=False)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, format="png")
    plt.close(figure)
