"""The stages of a run. Each reads the files of the stage before it and writes its own; a stage that is done is not done again.

    runs/<name>/trajectories/   collect
    runs/<name>/student/        train   (checkpoints/ meanwhile, log.jsonl for the losses, log.sha256)
    runs/<name>/report.json     evaluate (report.md, report.html, pareto.png, samples.jsonl)
    runs/<name>/export/         export  (adapter/ in it, when the student is an adapter)
    push.request.json           push    (only with a push section: export/ goes to the Hub)

Of several processes (`accelerate launch`) all come to every stage: shards, rows of a step and questions are dealt out, the main process
alone writes what there is one of, and none leaves a stage before its result is there.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cdlm import canvases, data, families, files, trajectories
from cdlm.decode import changed, slots
from cdlm.evaluate.report import SUMS as REPORT_SUMS
from cdlm.families import adapter as adapters
from cdlm.families import native
from cdlm.families.base import DiffusionLM
from cdlm.families.decoder import read_json
from cdlm.processes import check_engine, deal_rows
from cdlm.recipe import Recipe
from cdlm.runs import OF_A_MODEL, Run, is_done, leave_note, proposals_of, request_of, shape_of, slow_proposals
from cdlm.verify import LOG_SUMS, NOTE_SUMS

RESULTS = {  # a stage -> the folder that it puts in place whole, and the files beside it; the last to be written comes first
    "collect": (), "train": ("student/", "log.jsonl", LOG_SUMS),
    "evaluate": ("report.json", "report.md", "report.html", "pareto.png", "samples.jsonl", REPORT_SUMS, "evaluate.request.json"),
    "export": ("export/", "export.request.json", NOTE_SUMS["export.request.json"]),
    "push": ("push.request.json", NOTE_SUMS["push.request.json"]),
}


# ---- collect ---------------------------------------------------------------------------------------------------------


def collect(run: Run) -> None:
    """The teacher decodes the prompts; see trajectories.py."""
    c = run.recipe.collect
    if c is None:
        raise ValueError("this recipe has no collect section: its objective trains on answers, not on trajectories")
    model = run.load_teacher()
    tokenizer = run.tokenizer(model.facts)
    examples = run.examples(tokenizer, "prompts", c.num_prompts)
    manifest = (_collect_canvases if model.redecides else _collect_revealed)(run, model, tokenizer, examples)
    if run.processes.count == 1:  # of several each wrote a part
        run.sound.add("collect")
    run.say(
        f"collect: {manifest['kept']} of {manifest['trajectories']} trajectories kept; screened: {manifest['screened'] or 'none'}; "
        f"{manifest['bytes']:,} bytes"
    )


def _collect_revealed(run: Run, model: DiffusionLM, tokenizer: Any, examples: list[data.Example]) -> dict[str, Any]:
    """Trajectories of a teacher that fills a slot once; their manifest."""
    r, c = run.recipe, run.recipe.collect
    assert c is not None
    count = len(examples) * len(c.temperatures)
    width = slots(model.facts, r.decode.max_new_tokens, r.decode.block_length)
    size = trajectories.hidden_bytes(count, width, model.hidden_size)
    run.say(f"collect: {count} trajectories, {size / 2**20:.1f} MiB of hidden rows, into {run.trajectories}")
    _require_room(run, size, "hidden rows")
    return trajectories.collect(
        model, examples, run.trajectories, right=lambda example, ids: example.is_right(tokenizer.decode(ids)),
        config=changed(run.decode_config(), stop_at_eos=c.stop_at_eos),
        temperatures=c.temperatures, batch_size=c.batch_size, shard_size=c.shard_size,
        seed=r.seed, screen=trajectories.Screen(**asdict(c.screen)), request=request_of(run, "collect"), say=run.say,
        processes=run.processes,
    )


def _collect_canvases(run: Run, model: DiffusionLM, tokenizer: Any, examples: list[data.Example]) -> dict[str, Any]:
    """The same of a teacher that decides every slot at every step; see canvases.py."""
    r, c = run.recipe, run.recipe.collect
    assert c is not None
    config = changed(run.sampler("teacher"), stop_at_eos=c.stop_at_eos)
    size = canvases.step_bytes(r.decode.block_length, min(c.top_k, model.vocab))
    most = len(examples) * config.blocks * (config.max_denoising_steps or 0) * size
    run.say(
        f"collect: {len(examples)} trajectories of up to {config.blocks} canvases and {config.max_denoising_steps} steps a canvas, "
        f"{min(c.top_k, model.vocab)} logits a slot, {size:,} bytes a step ({most / 2**20:.1f} MiB at most), into {run.trajectories}"
    )
    _require_room(run, most, "logits, at most")
    return canvases.collect(
        model, examples, run.trajectories, right=lambda example, ids: example.is_right(tokenizer.decode(ids)), config=config, top_k=c.top_k,
        batch_size=c.batch_size, shard_size=c.shard_size, seed=r.seed, screen=trajectories.Screen(**asdict(c.screen)),
        request=request_of(run, "collect"), say=run.say, processes=run.processes,
    )


def _require_room(run: Run, size: int, what: str) -> None:
    """A ValueError where the disk has no room for what the shards' tensors will take beside what is there of them."""
    there = sum(file.stat().st_size for file in run.trajectories.glob("shard-*.safetensors"))
    free = shutil.disk_usage(run.out).free
    if size - there > free:
        raise ValueError(f"collect needs {(size - there) / 2**30:.1f} GiB for {what}; {run.out} has {free / 2**30:.1f} GiB free")


# ---- train -----------------------------------------------------------------------------------------------------------


def train(run: Run, watch: Callable[[Any], Any] | None = None) -> None:
    """Train the student, or for mdlm the model itself; goes on from the last checkpoint."""
    from transformers.trainer_utils import get_last_checkpoint

    from cdlm import trainer as training

    r, t = run.recipe, run.recipe.train
    refuse_links(run)
    model = run.load_teacher()
    tokenizer = run.tokenizer(model.facts)
    request = request_of(run, "train")
    checkpoints, processes = run.out / "checkpoints", run.processes
    with processes.main_first():
        if processes.main:
            trajectories.claim(checkpoints, checkpoints / "request.json", request)
    batch_size, accumulation = deal_rows(t.batch_size, t.accumulation, processes.count)

    lengths = None
    dataset: training.TrajectoryStates | training.AnswerNoise | training.CanvasStates
    stored = None
    if t.objective == "cdlm":
        run.require_sound("collect")
        stored = canvases.load(run.trajectories)
    if isinstance(stored, canvases.Canvases):
        dataset = training.CanvasStates(
            stored, model, r.decode.max_new_tokens, r.decode.block_length, r.seed, self_conditioning=t.self_conditioning, finish=t.finish
        )
        head = None
    elif stored is not None:
        if not stored.has_hidden and t.distill_weight:
            run.say(
                "train: these trajectories hold no hidden rows of a teacher; equation 4 takes the token that was revealed as its target "
                "(cross-entropy), not the teacher's distribution"
            )
        dataset = training.TrajectoryStates(stored, model, r.decode.block_length, r.seed)
        head = _frozen_copy(model.head)
    else:
        examples = run.examples(tokenizer, "prompts", t.num_examples)
        noisy = training.CanvasNoise if t.objective == "uniform" else training.AnswerNoise
        dataset = noisy(examples, r.decode.max_new_tokens, r.seed, r.decode.block_length if t.objective == "bd3lm" else None)
        lengths = [(len(e.prompt_ids), len(e.answer_ids)) for e in examples]
        head = None
    per_step = t.batch_size * t.accumulation
    if len(dataset) < per_step:
        screened = f", {run.trajectories / 'manifest.json'} counts what was screened and why" if t.objective == "cdlm" else ""
        raise ValueError(
            f"a step has train.batch_size {t.batch_size} x train.accumulation {t.accumulation} = {per_step} rows; there are {len(dataset)} "
            f"rows to train on{screened}"
        )
    peft_model = None
    if t.lora is not None:
        torch.manual_seed(r.seed)  # adapters start the same whatever ran before in this process
        peft_model = training.add_lora(
            model, rank=t.lora.rank, alpha=t.lora.alpha, targets=t.lora.targets, dropout=t.lora.dropout
        )
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    steps = t.steps or max(1, round((t.epochs or 0) * len(dataset) / per_step))
    run.say(
        f"train: {trainable:,} of {sum(p.numel() for p in model.parameters()):,} parameters, {steps} steps of {per_step} rows "
        f"({steps * per_step / len(dataset):.1f} epochs of {len(dataset)})"
        + ("" if processes.count == 1 else f", in {processes.count} processes with {accumulation} x {batch_size} of them each")
    )
    if t.lora is not None and t.lora.dropout and batch_size != t.batch_size:
        run.say(
            f"train: dropout is drawn by forwards, here of {batch_size} rows: other values than one process draws, whose forwards have "
            f"{t.batch_size}; numbers of processes that divide train.accumulation ({t.accumulation}) give what one gives"
        )
    args = training.CDLMConfig(
        output_dir=str(checkpoints), objective=t.objective, block_length=r.decode.block_length,
        distill_weight=t.distill_weight, consistency_weight=t.consistency_weight, dlm_weight=t.dlm_weight or 0.0,
        noise_floor=t.noise_floor, noise_first_cap=t.noise_first_cap, noise_ramp=t.noise_ramp,
        complementary=t.complementary, alpha=t.alpha, ar_weight=t.ar_weight, self_conditioning=t.self_conditioning, finish=t.finish,
        learning_rate=t.learning_rate, lr_scheduler_type=t.scheduler, lr_scheduler_kwargs=t.scheduler_kwargs or {},
        warmup_steps=round(t.warmup * steps) if t.warmup < 1 else int(t.warmup), max_steps=steps,
        per_device_train_batch_size=batch_size, gradient_accumulation_steps=accumulation,
        activation_checkpointing=t.gradient_checkpointing, bf16=t.bf16,
        weight_decay=t.weight_decay, adam_beta2=t.adam_beta2, max_grad_norm=t.max_grad_norm,
        seed=r.seed, data_seed=r.seed, save_steps=t.save_steps, save_total_limit=1, logging_steps=t.logging_steps,
        use_cpu=r.device == "cpu", dataloader_pin_memory=False, disable_tqdm=True, dataloader_drop_last=True,
    )
    trainer = training.CDLMTrainer(
        model, args, dataset,
        training.Collator(
            model, r.decode.max_new_tokens,
            {"ar": 1, **dict.fromkeys(("bd3lm", "tidar", "uniform"), r.decode.block_length)}.get(t.objective),
            from_zero=t.objective == "tidar",
        ),
        teacher_head=head, lengths=lengths, grouped=t.batch_size, peft_model=peft_model, callbacks=[_progress(run, steps)],
    )
    from transformers.trainer_callback import PrinterCallback

    trainer.remove_callback(PrinterCallback)
    if watch is not None:
        trainer.add_callback(watch(trainer))
    if trainer.engine == "deepspeed":
        run.say("train: no checkpoints, for DeepSpeed's are pickles, which are not read; a training that is broken off starts again")
    with processes.main_first():
        if processes.main:
            _drop_damaged(checkpoints, run.say)
    last = processes.agreed(lambda: _last_checkpoint(checkpoints, trainer.engine))
    if last is not None:
        run.say(f"train: goes on from {Path(last).name}")
    if last is not None and Path(last).name == f"checkpoint-{steps}":
        # All steps are done, only the student was not yet put in place; the Trainer's loop would take one step more.
        trainer.load(last)
        history = json.loads((Path(last) / "trainer_state.json").read_text())["log_history"]
    else:
        try:
            trainer.train(resume_from_checkpoint=last)
        except FloatingPointError as error:
            kept = get_last_checkpoint(str(checkpoints))
            raise FloatingPointError(f"{error}. The last good checkpoint: {kept or 'none was written yet'}") from None
        history = trainer.state.log_history
    state = trainer.full_state()
    trainer.end()
    if processes.main:
        _note_log(run, history)
        _save_student(run, model, tokenizer, peft_model, request, state)
        shutil.rmtree(checkpoints)
    processes.wait()


def _last_checkpoint(checkpoints: Path, engine: str) -> str | None:
    """The checkpoint to go on from, which this engine can read."""
    from transformers.trainer_utils import get_last_checkpoint

    from cdlm.trainer import check_engine as check_checkpoint

    if (last := get_last_checkpoint(str(checkpoints))) is not None:
        check_checkpoint(Path(last), engine)
    return last


def _frozen_copy(module: torch.nn.Module) -> torch.nn.Module:
    import copy

    return copy.deepcopy(module).requires_grad_(False)


def _progress(run: Run, steps: int) -> Any:
    """A callback that says losses, speed and the time left."""
    from transformers import TrainerCallback

    class Progress(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            self.began, self.first = time.monotonic(), state.global_step

        def on_log(self, args, state, control, logs=None, **kwargs):
            shown = {k: v for k, v in (logs or {}).items() if k.endswith("_loss") and k != "train_loss"}
            done = state.global_step - self.first
            if not shown or not done:
                return
            spent = time.monotonic() - self.began
            parts = ", ".join(f"{k[:-5]} {v:.3f}" for k, v in shown.items())
            left = spent / done * (steps - state.global_step)
            run.say(f"train: step {state.global_step} of {steps}, {parts}, {spent / done:.2f} s a step, about {left:.0f} s left")

    return Progress()


def read_log(run: Run) -> list[dict[str, Any]]:
    """What training noted, for the curves of a report; a ValueError where that is not what was written, or names a line that is none."""
    file, out = run.out / "log.jsonl", []
    run.require_sound_log()
    for number, line in enumerate(file.read_text().splitlines() if file.is_file() else [], start=1):
        try:
            out.append(dict(json.loads(line)))
        except (ValueError, TypeError):
            raise ValueError(f"{file}, line {number} is no line of a training log: {line[:40]!r}; remove the file to go on") from None
    return out


def _note_log(run: Run, history: list[dict[str, Any]]) -> None:
    text = "".join(json.dumps(line) + "\n" for line in history)
    files.write_sums(run.out / LOG_SUMS, {"log.jsonl": text.encode()})
    files.write_text(run.out / "log.jsonl", text)


def check_training(run: Run) -> None:
    """What of a training that is to be done is refused before the first stage starts: links for checkpoints, a step that the processes
    can't share, an engine that can't train this model here."""
    refuse_links(run)
    if not is_done(run, "train"):
        t = run.recipe.train
        deal_rows(t.batch_size, t.accumulation, run.processes.count)
        check_engine(run.recipe.device, shares_layers=run.redecides())


def check_places(run: Run, stage: str) -> None:
    """A ValueError, before any work, where what a stage that is not done will write can't take its place: a folder in the place of a file,
    or a file or a link in that of a folder (of a link, the folder that it leads to would be left behind)."""
    if is_done(run, stage):
        return
    for name in RESULTS[stage]:
        path, folder = run.out / name, name.endswith("/")
        if folder and (path.is_symlink() or (os.path.lexists(path) and not path.is_dir())):
            raise ValueError(f"{path} is {'a link' if path.is_symlink() else 'no folder'}; {stage} puts a folder there: remove it")
        if not folder and path.is_dir():
            raise ValueError(f"{path} is a folder; {stage} writes a file there: remove it")


def refuse_links(run: Run) -> None:
    """A ValueError where checkpoints are not the run's own folders: they are removed when the student is there, wherever they stand."""
    checkpoints = run.out / "checkpoints"
    for path in (checkpoints, *sorted(checkpoints.glob("checkpoint-*"))):
        if path.is_symlink():
            raise ValueError(f"{path} is a link to {path.readlink()}; checkpoints must be folders of the run: remove the link")


def remove_leftovers(run: Run) -> None:
    """What a run that was killed left of folders that it was putting in place."""
    for folder in (run.student, run.exported):
        files.remove_halves(folder)


def remove_checkpoints(run: Run) -> None:
    """The checkpoints of a training that is done: the run was killed between putting the student in place and their end."""
    checkpoints = run.out / "checkpoints"
    if checkpoints.is_dir():
        shutil.rmtree(checkpoints)


def _drop_damaged(checkpoints: Path, say: Callable[[str], None]) -> None:
    """Remove the checkpoints that are not whole, and say so: without checksums the run was killed while saving. One that can't be read is
    not shown to be damaged: a NotRead names the file, and nothing goes."""
    killed = "missing: the run was killed while saving, or is of an older version"
    for folder in checkpoints.glob("checkpoint-*"):
        sums = folder / files.SUMS
        wrong = files.faults(sums) if files.is_there(sums) else {str(sums): killed}
        for path, why in wrong.items():
            say(f"train: {path} is {why}. That checkpoint is not used")
        if wrong:
            shutil.rmtree(folder)


def _save_student(
    run: Run, model: DiffusionLM, tokenizer: Any, peft_model: Any, request: dict[str, Any], state: dict[str, torch.Tensor] | None
) -> None:
    """The adapter, or the whole model; request.json comes last and says that it is complete. state: its weights where the model itself
    holds but a shard of them."""
    speak_of_another = [run.out / name for stage in ("evaluate", "export", "push") for name in RESULTS[stage]]
    with files.replacing_folder(run.student, before=speak_of_another) as partial:
        if peft_model is not None:
            peft_model.save_pretrained(partial, state_dict=state)
        else:
            native.state(model.hf.config, trained_facts(run.recipe, model.facts))
            model.hf.save_pretrained(partial, state_dict=state)
            families.save_tokenizer(tokenizer, partial)
        files.write_json(partial / "request.json", request)
    run.sound.add("train")


def trained_facts(recipe: Recipe, start: families.Facts) -> families.Facts:
    """Facts of the trained model. mdlm trains under full attention; the others fix the length of blocks (ar and tidar: 1, and tidar the
    length of drafts)."""
    objective, length = recipe.train.objective, recipe.decode.block_length
    if start.canvases:  # training changes nothing of them
        return start
    start = replace(start, draft_length=length if objective == "tidar" else None, text_attention="block_causal")
    if objective == "mdlm":
        return replace(start, block_length=None, prompt_attention="bidirectional")
    return replace(start, block_length=1 if objective in ("ar", "tidar") else length)


def load_student(run: Run, base: DiffusionLM) -> tuple[DiffusionLM, Any]:
    """The trained model, and the PeftModel around it when it is an adapter on `base` (which is then changed in place)."""
    run.require_sound("train")
    if (run.student / "adapter_config.json").is_file():
        from peft import PeftModel

        adapters.keys(run.student)  # where there are no safetensors PEFT would look for a pickle
        peft_model = PeftModel.from_pretrained(base.hf, run.student)
        facts = base.facts if base.facts.canvases else replace(base.facts, text_attention="block_causal")
        return type(base)(peft_model.get_base_model(), facts, base.family).eval(), peft_model.eval()
    return _load_saved(run), None


def _load_saved(run: Run) -> DiffusionLM:
    """The whole model that training wrote: a stock class with its facts in config.json, whatever format the recipe's model has."""
    r = run.recipe
    run.require_sound("train")
    return families.load(run.student, dtype=r.dtype, device=r.device, attention=r.attention)


# ---- evaluate --------------------------------------------------------------------------------------------------------


def evaluate(run: Run, folder: Path | None = None, more: dict[str, Any] | None = None) -> dict[str, Any]:
    """Accuracy, steps and latency of every method on the test set; writes report.json, report.md, report.html,
    pareto.png, and samples.jsonl with every answer.

    folder: where they go in place of the run's own (they are then no result of this stage). more: further parts of the report. Returns
    the report; of several processes only the main one has it.
    """
    from cdlm.evaluate import report, speculation
    from cdlm.evaluate.run import Measured, question_seconds, reveals, time_all
    from cdlm.evaluate.run import run as run_methods
    from cdlm.methods import Methods, spread

    r, e = run.recipe, run.recipe.evaluate
    if r.train.objective in OF_A_MODEL:
        teacher = run.load_teacher()
        student, peft_model = load_student(run, teacher)
    else:
        teacher = student = _load_saved(run)
        peft_model = None
    assert e.methods is not None
    log = read_log(run)
    if not log:
        run.say(f"evaluate: there is no {run.out / 'log.jsonl'}, so the report has no loss curves")
    tokenizer = run.tokenizer(teacher.facts)
    examples = run.examples(tokenizer, "test", e.num_prompts)
    methods = Methods(run, teacher, student, peft_model)
    if r.decode.proposals == "auto" and (warning := slow_proposals(r, teacher.hf.config)):
        run.say(f"evaluate: decode.proposals is auto: {warning}")

    def measure(names: Sequence[str]) -> list[Measured]:
        return run_methods([m for name in names for m in methods.named(name)], examples, tokenizer, e.batch_size, run.say, run.processes)

    first = [name for name in ("student", "teacher") if name in e.methods]
    measured, tau = measure(first), methods.threshold
    at_tau = [m for m in measured if m.method.name == "student" and m.method.parameter == tau]
    truncated = methods.cut_to(at_tau[0].rows) if at_tau else None
    measured += measure([name for name in e.methods if name not in first])
    if not run.processes.main:  # the clock runs in one process, with the machine to itself; the others wait for its report
        run.processes.wait()
        return {}
    order = {name: i for i, name in enumerate(e.methods)}
    measured.sort(key=lambda m: order[m.method.name])
    timed = spread(examples, e.latency_prompts)
    sizes = sorted({1, *e.latency_batch_sizes})
    run.say(f"evaluate: latency at batch {', '.join(map(str, sizes))} on {len(timed)} prompts, methods interleaved")
    for size in (size for size in sizes if size > len(timed)):
        run.say(f"evaluate: no latency at batch {size}: there are {len(timed)} questions")
    time_all(measured, timed, e.warmup_prompts, e.repeats, sizes, run.say)
    shown = [next(example for example in examples if example.group == group) for group in sorted({x.group for x in examples})][:8]
    drawn = [m.method for m in measured if m.method.name in ("teacher_threshold_stop", "student") and m.method.parameter == tau]
    drawn = drawn or [m.method for m in measured if m.method.name == "tidar"][:1] or [m.method for m in measured][:1]

    request = request_of(run, "evaluate")
    found = report.build(
        measured, threshold=tau, truncated=truncated, batch_size=e.batch_size,
        extra={
            **(more or {}), "recipe": r.name, "dtype": r.dtype, "request": request, "command": run.command,
            "decodings": [reveals(method, example, tokenizer) for example in shown for method in drawn],
        }, device=r.device,
    )
    if r.train.objective == "tidar":
        found["speculation"] = speculation.summarise(
            found["results"], draft_length=r.decode.block_length, proposals=proposals_of(r, teacher.hf.config),
            shape=shape_of(teacher.hf.config), context=r.data.max_prompt_tokens, generate=r.decode.max_new_tokens,
            size=families.DTYPES[r.dtype].itemsize,
        )
    place = {example.index: number for number, example in enumerate(examples)}
    asked = [place[example.index] for example in timed]
    found["latency"]["seconds"] = {m.method.label: question_seconds(m, asked) for m in measured}
    to = folder or run.out
    to.mkdir(parents=True, exist_ok=True)
    (to / "report.json").unlink(missing_ok=True)  # speaks of the samples that are being replaced
    if folder is None:
        files.write_json(to / "evaluate.request.json", request)
    with files.replacing(to / "samples.jsonl") as partial, partial.open("w") as stream:
        for m in measured:
            for example, row in zip(examples, m.rows, strict=True):
                line = {"method": m.method.label, "prompt": example.prompt, "reference": example.answer, **asdict(row)}
                stream.write(json.dumps(line) + "\n")
    report.write(found, to, r.name, log)
    if folder is None:
        run.sound.add("evaluate")
    run.processes.wait()
    return found


# ---- export ----------------------------------------------------------------------------------------------------------


def export(run: Run) -> None:
    """The folder for users: stock architecture, adapter merged, decoder and card beside the weights; the adapter alone in adapter/.

    Where an adapter can't be merged the folder is the adapter, and why is said.
    """
    if run.processes.main:
        _export(run)
    run.processes.wait()


def _export(run: Run) -> None:
    from cdlm import hub
    from cdlm.evaluate import report

    r = run.recipe
    peft_model = None
    if r.train.objective in OF_A_MODEL:
        base = run.load_teacher()
        student, peft_model = load_student(run, base)
        tokenizer = run.tokenizer(base.facts)
        if peft_model is not None and base.unmergeable is None:
            probe = run.examples(tokenizer, "test", 1)[0]
            ids = torch.tensor([probe.prompt_ids + probe.answer_ids], device=base.device)
            student = type(base)(hub.merge_lora(peft_model, ids), base.facts, base.family)
        facts = trained_facts(r, base.facts)
        threshold: float | None = None if r.train.objective == "tidar" else r.decode.confidence_threshold
    else:
        student = _load_saved(run)
        tokenizer, facts, threshold = run.tokenizer(student.facts), student.facts, None
    decoding = None
    if student.redecides:
        sampler = run.sampler("student" if r.train.objective in OF_A_MODEL else "teacher")
        decoding = {name: getattr(sampler, name) for name in student.own_decoding}
        threshold = sampler.entropy_bound if r.train.objective in OF_A_MODEL else None  # the parameter of its row
    report_file = run.out / "report.json"
    run.require_sound("evaluate")
    found = read_json(report_file)
    rows = [row for row in found["results"] if row["task"] == "all"]
    base_model, budget = r.base_model(), r.decode.max_new_tokens

    def card(**kind: bool) -> str:
        return hub.card(
            r.name, report=found, base_model=base_model, license=r.export.license, tags=r.export.tags, datasets=r.export.datasets,
            decode=r.section("decode")["decode"], table=report.markdown_table(report.table(rows)),
            lines=report.summary_lines(found["summary"]), threshold=threshold, objective=r.train.objective, sampler=decoding,
            chat_template=r.data.chat_template, **kind,
        )

    results = adapter = None
    if r.export.benchmark is not None:
        measured_on = time.strftime("%Y-%m-%d", time.gmtime(report_file.stat().st_mtime))
        results = hub.eval_results_yaml(found, r.export.benchmark, threshold, measured_on, r.train.objective, student.redecides)
    if peft_model is not None and threshold is not None:
        stock = not student.redecides and student.family == "native" and student.masks_suffice
        adapter = partial(
            hub.save_adapter, run.student, tokenizer, base_model=base_model, family=student.family, facts=facts, max_new_tokens=budget,
            decoding=decoding or {"confidence_threshold": threshold},
            card=card(adapter=True, stock=stock), eval_results=results, with_decoder=stock,
        )
    if adapter is not None and base_model is None:
        run.say(
            "export: the recipe names no export.base_model, so the adapter's base_model_name_or_path is null, and nothing can load it: "
            "name the Hub repository of its base there and export again"
        )
    if r.export.dtype is not None:
        student.hf.to(families.DTYPES[r.export.dtype])
    for name in RESULTS["push"]:
        (run.out / name).unlink(missing_ok=True)  # speaks of the export that is being replaced
    leave_note(run, "export")
    if adapter is not None and student.unmergeable is not None:
        run.say(f"export: the folder is the adapter alone, not merged: {student.unmergeable}")
        with files.replacing_folder(run.exported) as folder:
            adapter(folder)
        run.sound.add("export")
        run.say(f"export: {run.exported}")
        return
    hub.save(
        student, tokenizer, run.exported, facts=facts, max_new_tokens=budget,
        decoding=decoding or ({} if threshold is None else {"confidence_threshold": threshold}),
        with_decoder=threshold is not None and decoding is None,
        card=card(stock=student.masks_suffice),
        eval_results=results, adapter=adapter,
    )
    run.sound.add("export")
    run.say(f"export: {run.exported}")


# ---- push ------------------------------------------------------------------------------------------------------------


def push(run: Run) -> None:
    """The exported folder, or its adapter alone, to the Hub; a note that this was done."""
    if run.processes.main:
        _push(run)
    run.processes.wait()


def _push(run: Run) -> None:
    from cdlm import hub

    asked = run.recipe.push
    if asked is None:
        raise ValueError("this recipe has no push section: give it one with repo_id, or --repo-id to cdlm push")
    hub.check_token()
    shipment = hub.pack(run.exported, asked.repo_id, adapter_only=asked.adapter_only)
    run.say(hub.listing(shipment, asked.private))
    address = hub.push(shipment, private=asked.private, say=run.say)
    leave_note(run, "push")
    run.say(f"push: {address}")
