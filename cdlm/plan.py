"""What a run would do, without doing it: the plan that --dry-run prints. Reads configs and data, loads no weights, and fetches nothing
for a recipe that has a config. On a card also what stages hold of its memory, for a number of devices under each engine (memory.py).

Times are rough. On a card they come from the roofline (roofline.py), on this CPU from a measured matrix product. Where questions are
not on this machine the recipe's counts and limits stand for them, which makes the times upper bounds, and the plan says so.
"""

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from cdlm import ablate, data, families, memory, roofline
from cdlm.canvases import step_bytes
from cdlm.decode import slots
from cdlm.processes import deal_rows
from cdlm.recipe import Recipe
from cdlm.runs import OF_A_MODEL, STAGES, Run, is_done, proposals_of, slow_proposals, stages_of
from cdlm.trajectories import hidden_bytes, read_manifest, teacher_decoding

# Share of the bound that a run reaches: kernels reach 75 to 90 % of it, and between them an eager loop waits for launches, for the host
# that chooses tokens, for the optimiser and for data. An assumption, not a fit; LOG.md says how far it is from published hours.
EFFICIENCY = 0.5
# Tokens a step of threshold decoding, teacher or student: published sweeps take 32 to 108 steps for 256 slots (arXiv 2511.19269).
TOKENS_A_STEP = 4


@dataclass(frozen=True)
class Questions:
    """What the plan takes of a set of questions: how many, mean prompt tokens, mean slots filled until the block with the end token."""

    count: int
    prompt_tokens: float
    slots: float


@dataclass(frozen=True)
class Work:
    """`forwards` forwards of `rows` rows, in a mode of the roofline; `passes` as much work each (a backward is one or two more).

    block: length of its blocks where it is not the recipe's. alone: done by one process while the others wait.
    """

    forwards: float
    rows: int = 1
    mode: str = "dlm"
    passes: float = 1.0
    block: int | None = None
    alone: bool = False


def machine_flops(width: int) -> float:
    """FLOP/s of fp32 matrix products at this width on this machine, measured for a fraction of a second."""
    a, b = torch.randn(2048, width), torch.randn(width, 4 * width)
    a @ b
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < 0.2:
        a @ b
        count += 1
    return count * 2 * 2048 * width * 4 * width / (time.perf_counter() - start)


class Plan:
    """The resolved plan of a run; its stages as lines of text. hardware: a card instead of the recipe's. gpus: devices, None for one
    without a table of memory."""

    def __init__(self, run: Run, hardware: str | None = None, gpus: int | None = None):
        self.run, r = run, run.recipe
        if gpus is not None and gpus < 1:
            raise ValueError(f"--gpus is {gpus}; it must be at least 1")
        self.gpus, self.counts_devices = gpus or 1, gpus is not None
        deal_rows(r.train.batch_size, r.train.accumulation, self.gpus)
        self.inputs = run.check_inputs(everything=False)
        self.parameters = sum(p.numel() for p in self.inputs.model.parameters())
        self.config = self.inputs.model.config
        self.sizes = self.config.get_text_config()
        self.redecides = families.class_of(self.config.model_type).redecides
        self.stored = read_manifest(run.trajectories)["kept"] if r.trajectories else None  # trajectories that a recipe names
        self.prompts = _questions(r, self.inputs.prompts, r.collect.num_prompts if r.collect else self.stored or r.train.num_examples)
        self.tests = _questions(r, self.inputs.tests, r.evaluate.num_prompts)
        card = hardware or r.hardware
        self.card = roofline.card(card) if card is not None else None
        self.shape = roofline.shape_of_config(self.config.to_dict(), str(self.inputs.source)) if self.card else None
        self.speed = machine_flops(self.sizes.hidden_size) * EFFICIENCY if self.card is None and r.device == "cpu" else None
        self.total = 0.0
        self.spent: dict[str, float | None] = {}
        # The slots that a teacher fills, and how: as a block diffusion model with a cache if it is one, else over the whole sequence.
        facts, self.slots, self.teacher = self.inputs.facts, r.decode.max_new_tokens, ("dlm", r.decode.block_length)
        if facts is not None:
            self.slots = slots(facts, r.decode.max_new_tokens, r.decode.block_length)
            own = teacher_decoding(facts, r.decode.max_new_tokens, r.decode.block_length, stop_at_eos=True)
            self.teacher = ("block" if own.block_causal else "dlm", own.block_length)

    def seconds(self, work: Sequence[Work], prompt_tokens: float) -> float | None:
        """Rough time of some forwards; None without a card to take it from."""
        d = self.run.recipe.decode
        out = 0.0
        for w in work:
            devices = 1 if w.alone else self.gpus
            shape = {"block": w.block or d.block_length, "context": max(1, round(prompt_tokens)), "generate": d.max_new_tokens}
            if self.card is not None:
                assert self.shape is not None
                size = families.DTYPES[self.run.recipe.dtype].itemsize
                operators = roofline.operators(self.shape, w.mode, batch=w.rows, size=size, **shape)
                out += w.forwards * w.passes * sum(op.seconds(self.card) for op in operators) / EFFICIENCY / devices
            elif self.speed is not None:
                tokens = w.rows * roofline.queries(w.mode, **shape)
                out += w.forwards * w.passes * tokens * 2.0 * self.parameters / self.speed / devices
            else:
                return None
        return out

    def head(self) -> list[str]:
        """Recipe, model, decoding, and what was not on this machine."""
        r, run = self.run.recipe, self.run
        native = self.inputs.family in ("native", "scratch")
        kind = self.config.model_type if native else f"{self.inputs.family} as {self.config.model_type}"
        budget, block = r.decode.max_new_tokens, r.decode.block_length
        lines = [
            f"recipe      {r.name} -> {run.out}",
            f"model       {r.model or self.inputs.source}: {kind}, {self.parameters:,} parameters, {r.dtype}, {r.device}",
        ]
        if self.shape is not None and self.shape.experts:
            lines.append(f"            {self._experts()}")
        if self.card is not None and not self.counts_devices:
            lines.append(f"memory      {self._memory()}")
        if run.here() is None:
            lines.append(f"not here    the model; its sizes are those of {self.inputs.source}")
        for name, read, asked in (
            ("prompts", self.inputs.prompts, self.prompts.count), ("test", self.inputs.tests, self.tests.count)
        ):
            if read is None and not (name == "prompts" and self.stored):
                value = getattr(r.data, name)
                what = f"data.{name}, {value}" if data.is_hub(value) else f"the tokenizer for data.{name}, {value}"
                counted = f"{asked} questions, as the recipe says" if asked else "how many questions the recipe does not say, so none count"
                lines.append(
                    f"not here    {what}: {counted}, each with a prompt of {r.data.max_prompt_tokens} tokens and the whole budget"
                )
        if self.stored:
            lines.append(f"trajectories {self.stored} of {run.trajectories}; no teacher is run to make more")
        if r.train.objective == "tidar":
            count = proposals_of(r, self.config)
            lines.append(f"decoding    {budget} tokens, {block} drafts and {count} proposals a forward: {block * (count + 1)} query tokens")
            if r.decode.proposals == "auto" and (warning := slow_proposals(r, self.config)):
                lines.append(f"decoding    {warning}")
        elif self.redecides:
            teacher, student = run.sampler("teacher"), run.sampler("student")
            lines.append(
                f"decoding    {budget} tokens in {budget // block} canvases of {block}, each in at most {teacher.max_denoising_steps} "
                f"steps; student {student.max_denoising_steps}"
            )
        else:
            lines.append(
                f"decoding    {budget} tokens in {budget // block} blocks of {block}, confidence > {r.decode.confidence_threshold:g}"
            )
        return lines

    def _experts(self) -> str:
        """Parameters in all and those that a token passes; beside them what stands outside the layers and embeddings."""
        assert self.shape is not None
        plain = replace(self.shape, conditioning=0)
        beside = {
            "self-conditioning": self.shape.parameters - plain.parameters,
            "a vision tower that is left alone": sum(p.numel() for name, p in self.inputs.model.named_parameters() if "vision" in name),
        }
        more = "".join(f", and {count / 1e9:.2f}B of {name}" for name, count in beside.items() if count)
        return f"{plain.parameters / 1e9:.1f}B parameters in layers and tables, {plain.active_parameters / 1e9:.1f}B active a token{more}"

    def _memory(self) -> str:
        """What collecting and training hold of the one card: the count that `devices` tells stage by stage."""
        assert self.card is not None
        r = self.run.recipe
        wanted = [stage for stage in ("collect", "train") if stage in stages_of(r)]
        parts = [f"{stage} {roofline.count(self.held(stage)['one_gpu'].total, 'B')}" for stage in wanted]
        return (
            f"about {', '.join(parts)} of a card's {roofline.count(self.card.memory, 'B')}; weights "
            f"{roofline.count(self.trained.weights, 'B')}, {roofline.count(self.trained.trained, 'B')} of them trained (--gpus 1 says more)"
        )

    def stage(self, name: str, run: Run | None = None, label: str = "") -> str:
        """One stage as a line, its time added to the total."""
        run = run or self.run
        of = {"collect": self._collect, "train": self._train, "evaluate": self._evaluate, "export": self._export, "push": self._push}
        words, work, prompt_tokens = of[name](run)
        done = is_done(run, name, sound=False)
        spent = 0.0 if done else self.seconds(work, prompt_tokens)
        self.total += spent or 0.0
        self.spent[name] = spent
        ending = " (done)" if done else "" if spent is None or not work else f", roughly {clock(spent)}"
        return f"{label or name:<11} {words}{ending}"

    def foot(self) -> str:
        """The total, and what it rests on."""
        if self.card is not None:
            rates = f"{self.card.bf16 / 1e12:.0f} TFLOP/s, {self.card.bandwidth / 1e12:.2f} TB/s"
            on = f"one {self.card.name}" if self.gpus == 1 else f"{self.gpus} {self.card.name}"
            return f"in all      roughly {clock(self.total)} of {on} ({rates}) at {EFFICIENCY:.0%} of its roofline"
        if self.speed is not None:
            return f"in all      roughly {clock(self.total)} at {self.speed / 1e9:.0f} GFLOP/s"
        cards = ", ".join(roofline.HARDWARE)
        return f"in all      no time: device is {self.run.recipe.device}; name a card with --hardware, one of {cards}"

    @cached_property
    def trained(self) -> memory.Model:
        """The model in training, on the meta device."""
        from cdlm.families import convert
        from cdlm.trainer import put_lora

        r, t = self.run.recipe, self.run.recipe.train
        hf = convert.skeleton(self.config).to(families.DTYPES[r.dtype])
        if t.lora is not None:
            with torch.device("meta"), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # those of libraries about a model that is only counted
                put_lora(
                    hf, rank=t.lora.rank, alpha=t.lora.alpha, targets=t.lora.targets, dropout=t.lora.dropout,
                    left_alone=families.class_of(self.config.model_type).left_alone,
                )
        shape = roofline.shape_of_config(self.config.to_dict(), str(self.inputs.source))
        noisy = r.decode.max_new_tokens if t.objective in ("bd3lm", "tidar") else 0
        size, _ = deal_rows(t.batch_size, t.accumulation, self.gpus)
        length = r.data.max_prompt_tokens + self.slots + noisy
        return memory.measure(hf, size, length, checkpointing=t.gradient_checkpointing, shape=shape if shape.experts else None)

    @property
    def engines(self) -> tuple[str, ...]:
        """Those that can train this model on so many devices: sharding takes models apart whose encoder and decoder share no layers."""
        able = tuple(name for name in memory.ENGINES if name not in memory.SHARDED or not self.redecides)
        return able if self.gpus > 1 else able[:1]

    def held(self, stage: str) -> dict[str, memory.Held]:
        """What a stage holds on a device, by engine."""
        r, t = self.run.recipe, self.run.recipe.train
        engines = self.engines
        model, size = self.trained, families.DTYPES[r.dtype].itemsize
        vocab, hidden = self.config.get_text_config().vocab_size, self.config.get_text_config().hidden_size
        if stage == "train":
            distilling = t.objective == "cdlm" and t.distill_weight > 0 and not self.redecides  # of canvases logits are stored
            views = bool(t.distill_weight or t.consistency_weight) + bool(t.dlm_weight) if t.objective == "cdlm" else 1 + t.complementary
            rows, _ = deal_rows(t.batch_size, t.accumulation, self.gpus)
            return {
                engine: memory.training(
                    model, engine, self.gpus, forwards=views, teacher_head=float(vocab * hidden * size) * distilling,
                    slots=rows * self.slots, vocab=vocab,
                )
                for engine in engines
            }
        adapter = model.trained if t.lora is not None else 0.0
        base = model.weights - adapter
        if stage == "export" and self.redecides and t.lora is not None:
            return dict.fromkeys(engines, memory.Held({"weights": base + adapter}))
        if stage == "export":  # the student, and the model that it is merged into
            return dict.fromkeys(engines, memory.Held({"weights": base + adapter, "student": base}))
        shape = roofline.shape_of_config(self.config.to_dict(), str(self.inputs.source))
        batch = r.collect.batch_size if stage == "collect" and r.collect is not None else r.evaluate.batch_size
        length = r.data.max_prompt_tokens + self.slots
        weights = {"weights": base}
        if stage == "evaluate" and t.objective in OF_A_MODEL:
            weights["student"] = adapter or base
        widest = max(shape.intermediate, shape.experts_per_token * shape.expert_intermediate + shape.shared_intermediate)
        cached = stage == "evaluate" or self.teacher[0] == "block"
        held = memory.decoding(
            weights, rows=batch, length=length, block=r.decode.block_length, vocab=vocab, size=size, inner=4.0 * hidden + 3 * widest,
            cache=batch * shape.kv_bytes(length, size) if cached else 0.0,
        )
        return dict.fromkeys(engines, held)

    def disk(self, stage: str) -> float:
        """Bytes that a stage writes, at its height: a checkpoint more stands there while the next one is written."""
        r, t = self.run.recipe, self.run.recipe.train
        model = self.trained
        student = model.trained if t.lora is not None else model.weights
        if stage == "collect":
            assert r.collect is not None
            if self.redecides:
                return float(self._canvas_bytes())
            count = self.prompts.count * len(r.collect.temperatures)
            row = 4 * (self.prompts.prompt_tokens + 2 * r.decode.max_new_tokens + self.slots) + 6 * self.slots
            return hidden_bytes(count, self.slots, self.sizes.hidden_size) + count * row
        if stage == "train":
            return 2 * (student + 2 * model.trained) + student
        if stage == "export":
            if self.redecides and t.lora is not None:  # its adapters are not merged
                return student
            kept = r.export.dtype or r.dtype
            merged = self.parameters * float(families.DTYPES[kept].itemsize)
            return merged + (student if t.lora is not None else 0.0)
        return 2000.0 * self.tests.count * len(r.evaluate.methods or ())

    def devices(self, stages: Sequence[str]) -> list[str]:
        """A table of stages: memory of one device under each engine, whether it fits, hours of all devices, disk."""
        engines = self.engines
        room = self.card.memory if self.card is not None else None
        lines = [("stage", *engines, "hours", "device hours", "disk")]
        for stage in stages:
            held, spent = self.held(stage), self.spent.get(stage)
            cells = [_memory(held[engine].total, room) for engine in engines]
            hours = ("-", "-") if not spent else (f"{spent / 3600:.2f}", f"{spent / 3600 * self.gpus:.1f}")
            lines.append((stage, *cells, *hours, roofline.count(self.disk(stage), "B")))
        card = f"{self.card.name}, {roofline.count(self.card.memory, 'B')}" if self.card is not None else "a device; no card was named"
        rows, batches = deal_rows(self.run.recipe.train.batch_size, self.run.recipe.train.accumulation, self.gpus)
        out = [
            f"memory      of one device ({card}), {self.gpus} of them, training {batches} x {rows} rows a step on each",
            *roofline.columns(lines),
        ]
        if "train" in stages:
            for engine, one in self.held("train").items():
                parts = ", ".join(f"{name} {roofline.count(size, 'B')}" for name, size in one.parts.items() if size)
                loads = f"; loading {roofline.count(one.load, 'B')}" if one.load else ""
                out.append(f"train, {engine}: {parts}{loads}")
        wide = f" A stage fits when it needs at most {memory.HEADROOM:.0%} of a card." if room is not None else ""
        out.append(f"Without the driver's own memory and fragmentation.{wide} Communication takes no time here.")
        return out

    def _collect(self, run: Run) -> tuple[str, list[Work], float]:
        c = run.recipe.collect
        assert c is not None
        temperatures, prompts = len(c.temperatures), self.prompts
        rows = prompts.count * temperatures
        if self.redecides:
            return self._collect_canvases(run)
        filled = min(prompts.slots, self.slots) if c.stop_at_eos and self.inputs.prompts is not None else self.slots
        size = hidden_bytes(rows, self.slots, self.sizes.hidden_size)
        words = (
            f"{rows} trajectories ({prompts.count} prompts x {temperatures} temperatures), about {filled:.0f} forwards each, "
            f"{size / 2**30:.3f} GiB ({size:,} bytes) of hidden rows"
        )
        mode, block = self.teacher
        return words, [Work(filled * rows / c.batch_size, c.batch_size, mode, block=block)], prompts.prompt_tokens

    def _canvases(self) -> float:
        """Canvases of a trajectory, on average."""
        c = self.run.recipe.collect
        assert c is not None
        return (min(self.prompts.slots, self.slots) if c.stop_at_eos else self.slots) / self.run.recipe.decode.block_length

    def _canvas_bytes(self) -> int:
        """Bytes of the trajectories of canvases, if each takes all its steps."""
        r, c = self.run.recipe, self.run.recipe.collect
        assert c is not None
        steps, kept = self.run.sampler("teacher").max_denoising_steps or 0, min(c.top_k, self.sizes.vocab_size)
        return int(self.prompts.count * self._canvases() * steps * step_bytes(r.decode.block_length, kept))

    def _collect_canvases(self, run: Run) -> tuple[str, list[Work], float]:
        """Where a teacher decides every slot at every step: each takes all its steps, which is the most."""
        r, c, prompts = run.recipe, run.recipe.collect, self.prompts
        assert c is not None
        steps, block, kept = run.sampler("teacher").max_denoising_steps or 0, r.decode.block_length, min(c.top_k, self.sizes.vocab_size)
        canvases, size = self._canvases(), self._canvas_bytes()
        words = (
            f"{prompts.count} trajectories of about {canvases:.1f} canvases, at most {steps} steps each, {kept} logits a slot: at most "
            f"{size / 2**30:.3f} GiB ({size:,} bytes)"
        )
        return words, [Work(steps * canvases * prompts.count / c.batch_size, c.batch_size, "block", block=block)], prompts.prompt_tokens

    def _train(self, run: Run) -> tuple[str, list[Work], float]:
        r, t = run.recipe, run.recipe.train
        batch = t.batch_size * t.accumulation
        of = self.prompts.count * (len(r.collect.temperatures) if r.collect and not self.redecides else 1)
        steps = t.steps or max(1, round((t.epochs or 0) * of / batch))
        epochs = f"{steps * batch / of:.1f} epochs" if of else "of rows that are not counted here"
        w = t.distill_weight, t.consistency_weight, t.dlm_weight
        if t.objective == "cdlm":
            learning, looking = bool(w[0] or w[1]) + bool(w[2]), bool(w[1])
        else:
            learning, looking = 1 + t.complementary, False
        lora = "all parameters" if t.lora is None else f"LoRA rank {t.lora.rank} on {', '.join(t.lora.targets)}"
        words = (
            f"{t.objective}, {lora}: {steps} steps of {batch} rows ({epochs}), {learning + looking} forwards a step"
        )
        backward = 2 if t.lora is None else 1  # frozen weights need no gradient, only what flows through them does
        passes = float(learning * (1 + backward) + looking)
        if t.objective in ("bd3lm", "tidar"):  # the noisy or masked answer stands beside prompt and clean answer
            length = self.prompts.prompt_tokens + r.decode.max_new_tokens
            passes *= (length + r.decode.max_new_tokens) / length
        if self.redecides:  # the text before a canvas, and the canvas; of uniform all of the text, and the canvas once or twice
            length, budget, block = self.prompts.prompt_tokens + r.decode.max_new_tokens, r.decode.max_new_tokens, r.decode.block_length
            canvas = length + block * (1 + t.self_conditioning / 3) if t.objective == "uniform" else length - budget / 2 + block / 2
            passes *= canvas / length
        return words, [Work(steps * t.accumulation, t.batch_size, passes=passes)], self.prompts.prompt_tokens

    def _evaluate(self, run: Run) -> tuple[str, list[Work], float]:
        r, e = run.recipe, run.recipe.evaluate
        budget, tests = r.decode.max_new_tokens, self.tests
        thresholds = sorted({*e.thresholds, r.decode.confidence_threshold})
        few = budget / TOKENS_A_STEP
        sweep = len(thresholds) * few
        assert e.methods is not None
        steps = {
            "teacher": tests.slots if e.teacher_stops_at_eos else budget, "teacher_block_causal": tests.slots, "teacher_threshold": sweep,
            "teacher_threshold_stop": sweep, "student": sweep, "student_uncached": few,
            "teacher_fixed": sum(budget / k for k in e.fixed), "teacher_factor": len(e.factors) * few,
            "teacher_entropy_bound": len(e.entropy_bounds) * few, "teacher_prefix_cache": sweep, "teacher_dual_cache": sweep,
            "teacher_interval_cache": budget, "autoregressive_model": tests.slots, "autoregressive": tests.slots,
            "student_sequential": tests.slots,
            **dict.fromkeys(("student_autoregressive", "transformers_greedy"), tests.slots),
            **dict.fromkeys(("prompt_lookup", "assisted", "tidar_linear"), tests.slots / 2),
            "tidar": len({*e.proposals, r.decode.proposals or r.decode.block_length}) * few, "tidar_mix": len(set(e.betas)) * few,
            "teacher_truncated": sum(e.truncated_steps) + (few if "student" in e.methods else 0),
        }
        if self.redecides:
            canvases = min(tests.slots, self.slots) / r.decode.block_length
            teacher, student = (canvases * (run.sampler(which).max_denoising_steps or 0) for which in ("teacher", "student"))
            bounds = len({*e.entropy_bounds, run.sampler("student").entropy_bound})
            steps |= {"teacher": teacher, "transformers_generate": teacher,
                      **dict.fromkeys(("student", "teacher_entropy_bound"), bounds * student),
                      "teacher_truncated": sum(canvases * count for count in e.truncated_steps) + student}  # fmt: skip
        cached = ("teacher_block_causal", "student", "student_sequential")
        timed = {  # batch size -> calls with the clock, and those before it
            size: calls * e.repeats + min(e.warmup_prompts, calls)
            for size in {1, *e.latency_batch_sizes} if (calls := min(e.latency_prompts, tests.count) // size)
        }
        work = []
        for method in e.methods:
            mode, block = ("block", r.decode.block_length) if method in cached else self.teacher
            if method == "student_uncached":
                mode, block = "dlm", r.decode.block_length
            if method in ("autoregressive", "student_autoregressive", "transformers_greedy"):
                mode, block = "ar", 1
            if method in ("tidar", "tidar_mix", "tidar_linear", "prompt_lookup", "assisted"):
                mode, block = "tidar" if method in ("tidar", "tidar_mix") else "block", r.decode.block_length
            work += [
                Work(steps[method] * tests.count / e.batch_size, e.batch_size, mode, block=block),
                *(Work(steps[method] * calls, size, mode, block=block, alone=True) for size, calls in sorted(timed.items())),
            ]
        if r.train.objective == "tidar":
            counts = sorted({*e.proposals, proposals_of(r, self.config)}, reverse=True)
            swept = f"proposals {', '.join(map(str, counts))}; beta {', '.join(f'{x:g}' for x in sorted(set(e.betas)))}"
        elif self.redecides:
            swept = "at most the samplers' steps"
        else:
            swept = f"thresholds {', '.join(f'{x:g}' for x in thresholds)}"
        words = (
            f"{tests.count} questions, {', '.join(e.methods)}; {swept}; "
            f"about {sum(w.forwards * w.rows for w in work):.0f} forwards of a row"
        )
        return words, work, tests.prompt_tokens

    def _export(self, run: Run) -> tuple[str, list[Work], float]:
        kept = self.redecides and run.recipe.train.lora is not None  # adapters that are not merged
        size = self.trained.trained if kept else self.parameters * families.DTYPES[run.recipe.dtype].itemsize
        return f"{run.exported}, {size / 2**20:.1f} MiB{' (the adapter)' if kept else ''}", [], 0.0

    def _push(self, run: Run) -> tuple[str, list[Work], float]:
        asked = run.recipe.push
        assert asked is not None
        what = "the adapter of the export" if asked.adapter_only else "the export"
        return f"{what} to {asked.repo_id}{' (private)' if asked.private else ''}", [], 0.0


def text(run: Run, stages: Sequence[str] = (*STAGES, "push"), hardware: str | None = None, gpus: int | None = None) -> str:
    """The plan of these stages: models, parameters, steps, bytes, forwards, a rough time; for a number of devices also memory and disk."""
    wanted = [stage for stage in stages if stage in stages_of(run.recipe)]
    if not wanted:
        raise ValueError(f"this recipe has no {stages[0]} stage; it has {', '.join(stages_of(run.recipe))}")
    plan = Plan(run, hardware, gpus)
    lines = [*plan.head(), *(plan.stage(stage) for stage in wanted), plan.foot()]
    return "\n".join(lines if gpus is None else [*lines, "", *plan.devices([stage for stage in wanted if stage != "push"])])


def ablation(run: Run, hardware: str | None = None) -> str:
    """The plan of `cdlm ablate`: one collection, then every variant trained and measured."""
    ablate.check(run)
    plan = Plan(run, hardware)
    lines = [*plan.head(), plan.stage("collect")]
    for name in ablate.VARIANTS:
        part = ablate.variant(run, name)
        lines += [f"ablation    {name} -> {part.out}", plan.stage("train", part, "  train"), plan.stage("evaluate", part, "  evaluate")]
    return "\n".join([*lines, plan.foot()])


def _questions(r: Recipe, read: list[data.Example] | None, asked: int | None) -> Questions:
    """The questions that were read, or what the recipe says of them: its count, the longest prompt, the whole budget."""
    if read is None:
        return Questions(asked or 0, r.data.max_prompt_tokens, r.decode.max_new_tokens)
    block = r.decode.block_length
    slots = sum(-(-(len(e.answer_ids) + 1) // block) * block for e in read) / len(read)
    return Questions(len(read), sum(len(e.prompt_ids) for e in read) / len(read), slots)


def _memory(needed: float, room: float | None) -> str:
    ending = "" if room is None else " fits" if needed <= memory.HEADROOM * room else " too much"
    return roofline.count(needed, "B") + ending


def clock(seconds: float) -> str:
    """A duration in the largest unit that fits."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
