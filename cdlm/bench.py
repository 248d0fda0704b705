"""`cdlm bench`: a finished run's student beside every baseline of its teacher in one process, and what a reader of such a table asks next:
how time grows with length, and what is spent around the model's forwards.

Everything goes into the folder bench of a run, a file a part with its checksum, so that the parts may be made one after another; the report
shows all that are there.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cdlm import data, families, files, runs, stages
from cdlm.evaluate import growth, overhead, report
from cdlm.evaluate.run import BASES
from cdlm.families.decoder import read_json
from cdlm.recipe import BASELINES, METHODS_OF, OTHER_MODEL, Recipe
from cdlm.verify import LAST

PARTS = ("table", "growth", "overhead")
SCRATCH = ".training"  # in the folder bench: of a part, gone behind it
COLUMNS = ("method", "parameter", "TPS", "latency s", "steps", "length", "score")
TRAINING_STEPS = 12


def parts_of(recipe: Recipe, redecides: bool = False) -> list[str]:
    """What can be measured of a recipe's run. redecides: its model decides every slot at every step, so that no growth against full
    attention and no overhead of revealing is there to be measured."""
    if redecides:
        return ["table"]
    return [part for part in PARTS if part != "overhead" or recipe.train.objective in runs.BLOCKWISE]


def check(
    recipe: Recipe, parts: list[str], batches: list[int], lengths: list[int], growing: dict[str, int], redecides: bool = False
) -> None:
    """One ValueError for what can't be measured."""
    if redecides and parts != ["table"]:
        raise ValueError(f"--parts has {', '.join(parts)}; a model that decides every slot at every step has table alone")
    if "overhead" in parts and "overhead" not in parts_of(recipe):
        raise ValueError(f"--parts has overhead, which is of a block decoder; objective {recipe.train.objective} makes none")
    for part in parts:
        if part not in PARTS:
            raise ValueError(f"--parts has {part!r}; allowed: {', '.join(PARTS)}")
    if not batches or min(batches) < 1 or len(set(batches)) < len(batches):
        raise ValueError(f"--batches is {batches}; allowed: different batch sizes of at least 1")
    if "growth" in parts:
        growth.check(lengths, recipe.decode.block_length, **growing)


def run(
    recipe: Recipe, out: Path, parts: list[str], batches: list[int], lengths: list[int], growing: dict[str, int], *,
    command: str | None = None, say: Callable[[str], None] = print,
) -> str:
    """Measure the parts, write them to out/bench, and return what is printed: the paper's table, and the findings as sentences."""
    own = runs.Run(recipe, out, say=say, command=command)
    if ("table" in parts or "overhead" in parts) and not (own.student / "request.json").is_file():
        raise ValueError(f"there is no student in {out}; run cdlm distill first (--parts growth needs none)")
    if "table" in parts or "overhead" in parts:
        runs.is_done(own, "train")  # an error for another recipe's student
    folder = out / "bench"
    kept = {name: _read(folder / f"{name}.json", recipe) for name in ("growth", "overhead") if name not in parts}
    log = None
    if "table" not in parts and (folder / "report.json").is_file():
        log = stages.read_log(own)
        files.require_sound(folder / report.SUMS, f"the report in {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    said: list[str] = []
    more = {name: found for name, found in kept.items() if found is not None}
    with files.scratch(folder / SCRATCH) as scratch:
        if "growth" in parts:
            more["growth"] = _write(folder / "growth.json", _growth(own, lengths, growing))
        if "overhead" in parts:
            more["overhead"] = _write(folder / "overhead.json", _overhead(own, scratch))
    if "table" in parts:
        found = stages.evaluate(dataclasses.replace(own, recipe=_everything(recipe, batches, own.redecides())), folder, more)
        said += [report.markdown_table(table(found), COLUMNS), "", *report.summary_lines(found["summary"])]
    elif (folder / "report.json").is_file():  # a part made behind the table goes into its report
        report.write({**read_json(folder / "report.json"), **more}, folder, recipe.name, log)
    if "growth" in parts:
        said += ["", report.markdown_table(growth.table(more["growth"]), growth.COLUMNS), *growth.lines(more["growth"])]
    if "overhead" in parts:
        said += overhead.lines(more["overhead"])
    return "\n".join([*said, str(folder)])


def _everything(recipe: Recipe, batches: list[int], redecides: bool) -> Recipe:
    """The recipe with every method that can be measured after its objective, each at its own values, thresholds at the recipe's alone."""
    e, objective = recipe.evaluate, recipe.train.objective
    methods = [*METHODS_OF[objective], *(BASELINES if objective in ("cdlm", "mdlm") else ())]
    methods = [name for name in methods if (name in runs.REDECIDING_METHODS if redecides else name != "transformers_generate")]
    if e.autoregressive is not None:
        methods.append(OTHER_MODEL)
    prompts = max(e.latency_prompts, *batches)
    thresholds = e.thresholds if redecides else [recipe.decode.confidence_threshold]  # of a model that redecides nobody reads them
    return dataclasses.replace(recipe, evaluate=dataclasses.replace(
        e, methods=methods, thresholds=thresholds, latency_batch_sizes=sorted({1, *batches}),
        latency_prompts=prompts,
    ))  # fmt: skip


def _growth(run: runs.Run, lengths: list[int], growing: dict[str, int]) -> dict[str, Any]:
    r = run.recipe
    found = run.check_inputs(everything=False)
    if found.facts is None:
        raise ValueError("growth takes a recipe with a model; this one starts from scratch and states no facts of a diffusion model")
    positions = growing["prompt_tokens"] + max(lengths) + r.decode.block_length
    model = growth.model_of(
        found.model.config, found.facts, positions, dtype=families.DTYPES[r.dtype], device=r.device, seed=r.seed
    )
    measured = growth.measure(model, lengths, r.decode.block_length, seed=r.seed, say=run.say, **growing)
    return {"recipe": r.name, "environment": report.environment(r.device), **measured}


def _write(file: Path, found: dict[str, Any]) -> dict[str, Any]:
    """A part that was measured now, and before it its checksum."""
    text = files.json_text(found)
    files.write_sums(file.with_name(LAST[file.name]), {file.name: text.encode()})
    files.write_text(file, text)
    return found


def _read(file: Path, recipe: Recipe) -> dict[str, Any] | None:
    """A part that was measured before; None where it was not. A ValueError for one of other blocks than the recipe's, or that is not what
    was written."""
    if not file.is_file():
        return None
    files.require_sound(file.with_name(LAST[file.name]), str(file))
    found = read_json(file)
    if (block := found.get("block_length")) != recipe.decode.block_length:
        raise ValueError(
            f"{file} is of blocks of {block}, decode.block_length is {recipe.decode.block_length}; remove it or measure that part again"
        )
    return found


def _overhead(run: runs.Run, scratch: Path) -> dict[str, Any]:
    """Of the student's decoding, and, after objective cdlm, of a few training steps on the run's trajectories (in a folder that the caller
    throws away)."""
    r = run.recipe
    out: dict[str, Any] = {"environment": report.environment(r.device), "block_length": r.decode.block_length}
    student, _ = stages.load_student(run, run.load_teacher())
    examples = run.examples(run.tokenizer(student.facts), "test", r.evaluate.num_prompts)[: r.evaluate.latency_prompts]
    prompts = [data.pad_left([example.prompt_ids], student.facts.pad_token_id) for example in examples]
    prompts = [(prompt.to(student.device), valid.to(student.device)) for prompt, valid in prompts]
    out["decoding"] = overhead.of_decoding(student, prompts, run.decode_config())
    if r.train.objective == "cdlm" and run.trajectories.is_dir():
        seen: dict[str, list[float]] = {"step": [], "alone": []}
        train = dataclasses.replace(
            r.train, steps=TRAINING_STEPS + overhead.WARMUP, epochs=None, save_steps=10**6, accumulation=1
        )
        short = dataclasses.replace(
            run, recipe=dataclasses.replace(r, train=train), out=scratch, shared_trajectories=run.trajectories, say=lambda text: None,
        )  # fmt: skip
        stages.train(short, overhead.watch_training(seen))
        out["training"] = overhead.of_training(seen)
    return out


def table(found: dict[str, Any]) -> list[list[str]]:
    """The paper's table over all tasks at batch 1, each number with its ratio to naive decoding. Rows of text under COLUMNS.

    Latency and speed are of the timed questions, the rest of all. score is accuracy, with the points won or lost in place of a ratio.
    """
    rows = [row for row in found["results"] if row["task"] == "all"]
    base = next((row for name in BASES for row in rows if row["method"] == name), rows[0])

    def cell(value: float | None, naive: float | None, form: str) -> str:
        if value is None:
            return ""
        return format(value, form) + (f" ({value / naive:.2f}x)" if naive else "")

    out = []
    for row in rows:
        own, naive = row["latency_s"], base["latency_s"]
        out.append([
            report.title(row), "" if row["parameter"] is None else f"{row['parameter']:g}",
            cell(row["tps"], base["tps"], ".0f"), cell(own and own["median"], naive and naive["median"], ".4f"),
            cell(row["steps"], base["steps"], ".1f"), cell(row["output_tokens"], base["output_tokens"], ".1f"),
            f"{row['accuracy']:.1%} ({100 * (row['accuracy'] - base['accuracy']):+.1f})",
        ])  # fmt: skip
    return out
