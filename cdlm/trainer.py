"""What exists only because a Trainer calls it: datasets that draw states, a collator, CDLMConfig and CDLMTrainer.

Six objectives. "cdlm" trains a block-causal student from a teacher's trajectories with three losses (CDLM, arXiv 2511.19269,
algorithm 2). The others train on prompts and answers: "mdlm" a bidirectional masked diffusion LM (LLaDA, arXiv 2502.09992, SFT
loss), "bd3lm" a block diffusion LM (BD3-LM, arXiv 2503.09573), "ar" an autoregressive one, "tidar" an autoregressive one that also drafts
blocks of its own text from masks (TiDAR, arXiv 2511.08923), "uniform" a block diffusion LM whose noise is random tokens, on one canvas
of a row at a time, with self-conditioning (Chen et al., arXiv 2208.04202). The losses stand in `losses.py`.

Every random draw of a row comes from a seed made of (seed, epoch, row), so it depends on neither batch nor device nor on
where a run was resumed. The order of rows is of (seed, epoch), and an epoch is whole steps: a step has the same rows however many
processes share them. An mdlm row's budget is of the group of rows that it stands with (`InGroup`), not of the forward that it is in.
Dropout alone is drawn by forwards: from a seed of (seed, step, first row), so what it does depends on which rows share a forward.

Shapes: B rows, P prompt tokens, N slots, S slots of a canvas, L = P + N, D width, V vocabulary, k stored tokens.
"""

import contextlib
import os
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import Dataset, Sampler
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy, rotate_checkpoints

from cdlm import data, files, losses, masks, noise
from cdlm.families.base import DiffusionLM, Seen

# What torch.save's RuntimeError says where a file can't be written (a full disk, no permission): its zip writer, C++ streams, plain writes.
WRITER_FAILED = ("inline_container.cc", "PytorchStreamWriter", "iostream error", "write(): fd")


@dataclass
class CDLMConfig(TrainingArguments):
    """TrainingArguments with the values of consistency distillation.

    The three weights default to the paper's for Dream (1.0, 0.5, 0.01), its w_m multiplied by L_g = 256 because the loss here
    is a mean over the budget where equation 6 is a sum. A weight of 0 skips that loss and the forward it needs.
    """

    objective: str = field(
        default="cdlm", metadata={"help": "cdlm: three losses on trajectories; on answers: mdlm, bd3lm, ar, tidar, uniform."}
    )
    block_length: int = field(default=32, metadata={"help": "Slots of a block."})
    distill_weight: float = field(default=1.0, metadata={"help": "Weight of equation 4."})
    consistency_weight: float = field(default=0.5, metadata={"help": "Weight of equation 5."})
    dlm_weight: float = field(default=2.56, metadata={"help": "Weight of equation 6 (0.01 x 256 in the paper's units)."})
    noise_floor: float = field(default=0.02, metadata={"help": "Smallest noise level t; the largest weight is its inverse."})
    noise_first_cap: float = field(default=1.0, metadata={"help": "Largest noise level at the start of training; 1 is U(0, 1)."})
    noise_ramp: float = field(default=0.0, metadata={"help": "Share of training over which the largest level rises to 1."})
    complementary: bool = field(default=False, metadata={"help": "bd3lm: each row with its mask and with the complement of it."})
    alpha: float = field(default=1.0, metadata={"help": "tidar: weight of the autoregressive loss beside the diffusion loss, which has 1."})
    ar_weight: float = field(default=1.0, metadata={"help": "uniform: weight of the encoder's next-token loss beside the diffusion loss."})
    self_conditioning: float = field(
        default=0.5, metadata={"help": "Canvases: probability that a row is told what the step before saw; otherwise it is told nothing."}
    )
    finish: float = field(default=0.5, metadata={"help": "cdlm on canvases: probability that y* is the finished canvas."})
    learning_rate: float = field(default=2e-5, metadata={"help": "Peak learning rate."})
    lr_scheduler_type: str = field(default="constant_with_warmup", metadata={"help": "Schedule of the learning rate."})
    warmup_steps: float = field(default=0.05, metadata={"help": "Warm-up steps; below 1, their share of all steps."})
    remove_unused_columns: bool = field(default=False, metadata={"help": "Batches carry columns that no forward names."})
    report_to: str = field(default="none", metadata={"help": "Where to report besides the log."})
    bf16: bool = field(default=False, metadata={"help": "Forwards in bfloat16 (autocast); weights keep their dtype, losses are fp32."})

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise ValueError(f"objective is {self.objective!r}; allowed: {', '.join(OBJECTIVES)}")
        for name in ("distill_weight", "consistency_weight", "dlm_weight", "alpha", "ar_weight"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)}; a weight is 0 or above, and finite")
        for name in ("self_conditioning", "finish"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; a probability is between 0 and 1")
        if self.objective == "cdlm" and not any(self.weights.values()):
            raise ValueError("distill_weight, consistency_weight and dlm_weight are all 0: nothing would be trained")
        if self.complementary and (self.objective != "bd3lm" or self.noise_first_cap < 1):
            raise ValueError(
                "complementary masks belong to objective bd3lm with noise_first_cap 1 (the complement of few masks is many); "
                f"objective is {self.objective}, noise_first_cap {self.noise_first_cap}"
            )
        if not 0 < self.noise_floor < self.noise_first_cap <= 1:
            raise ValueError(f"0 < noise_floor < noise_first_cap <= 1 must hold; got {self.noise_floor} and {self.noise_first_cap}")
        super().__post_init__()

    @property
    def weights(self) -> dict[str, float]:
        """Of each loss; 1 for one that is not named."""
        if self.objective == "tidar":
            return losses.tidar_weights(self.alpha)
        if self.objective == "uniform":
            return {"ar": self.ar_weight}
        if self.objective != "cdlm":
            return {}
        return {"distill": self.distill_weight, "consistency": self.consistency_weight, "dlm": self.dlm_weight}


class Trajectory(Protocol):
    """What training reads of a stored trajectory."""

    @property
    def prompt_ids(self) -> list[int]: ...
    @property
    def answer_ids(self) -> list[int]: ...
    @property
    def tokens(self) -> Tensor: ...
    @property
    def step(self) -> Tensor: ...
    @property
    def decoded(self) -> int: ...
    @property
    def hidden(self) -> Tensor | None: ...


class Stored(Protocol):
    """A sequence of them."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Trajectory: ...


class State(Protocol):
    """A canvas before one of a teacher's steps; the names are those of `canvases.State`."""

    @property
    def canvas_S(self) -> Tensor: ...
    @property
    def open_S(self) -> Tensor: ...
    @property
    def seen_SK(self) -> Tensor | None: ...
    @property
    def seen_ids_SK(self) -> Tensor | None: ...


class CanvasTrajectory(Protocol):
    """What training reads of a stored trajectory of canvases."""

    @property
    def prompt_ids(self) -> list[int]: ...
    @property
    def answer_ids(self) -> list[int]: ...
    @property
    def tokens(self) -> Tensor: ...
    @property
    def steps(self) -> list[int]: ...
    @property
    def logits(self) -> Tensor: ...
    @property
    def ids(self) -> Tensor: ...
    @property
    def total(self) -> Tensor: ...
    def first(self, canvas: int) -> int: ...
    def state(self, canvas: int, step: int) -> State: ...


class StoredCanvases(Protocol):
    """A sequence of them."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> CanvasTrajectory: ...


class InGroup(NamedTuple):
    """A row as it is asked for among those of its group, of which a batch may hold a part."""

    row: int
    group: tuple[int, ...]


class _Drawing(Dataset):
    """A dataset whose rows are drawn anew each epoch, from (seed, epoch, row)."""

    def __init__(self, seed: int):
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def generator(self, index: int) -> torch.Generator:
        return torch.Generator().manual_seed(data.sample_seed(self.seed, self.epoch, index))


class TrajectoryStates(_Drawing):
    """Trajectories as pairs of states: y at a random step, y* when y's block is full. (Algorithm 2, lines 2-4.)

    t_start is uniform over the steps the teacher took: 0..N-1, with N the decoded slots where it stopped early. Where a teacher
    revealed several slots at once, the draw goes back to the state before that step, so y is a state that it was in.

    A row: prompt_ids; y, y_star [N]; decoded, the slots that the teacher filled before it stopped; hidden [N, D] of the teacher,
    unless the trajectory has none;
    answer [N], the reference filled up with end tokens; level and uniform [N], the noise that equation 6 puts on the answer.
    """

    def __init__(self, trajectories: Stored, model: DiffusionLM, block_length: int, seed: int):
        super().__init__(seed)
        self.trajectories, self.block_length = trajectories, block_length
        self.mask, self.eos = model.facts.mask_id, model.facts.eos_token_ids[0]
        self.from_zero = model.facts.block_origin == "zero"

    def __len__(self) -> int:
        return len(self.trajectories)

    def name(self, index: int) -> str:
        """A row's sample, as an error names it."""
        return f"trajectory {getattr(self.trajectories[index], 'id', index)}"

    def __getitem__(self, index: int) -> dict[str, Any]:
        trajectory, draw = self.trajectories[index], self.generator(index)
        slots = trajectory.tokens.shape[0]
        drawn = int(torch.randint(trajectory.decoded, (1,), generator=draw))
        start = int(trajectory.step[trajectory.step <= drawn].max())
        tail = len(trajectory.prompt_ids) % self.block_length if self.from_zero else 0  # prompt tokens in the first block
        end = min(trajectory.decoded, ((start + tail) // self.block_length + 1) * self.block_length - tail)
        revealed = trajectory.step >= 0
        hidden = {} if trajectory.hidden is None else {"hidden": trajectory.hidden}
        return {
            "index": index,
            "prompt_ids": trajectory.prompt_ids,
            "y": torch.where(revealed & (trajectory.step < start), trajectory.tokens, self.mask),
            "y_star": torch.where(revealed & (torch.arange(slots) < end), trajectory.tokens, self.mask),
            "decoded": torch.tensor(trajectory.decoded),
            **hidden,
            "answer": torch.tensor(data.fill_budget(trajectory.answer_ids, slots, self.eos)),
            "level": torch.rand(1, generator=draw)[0],
            "uniform": torch.rand(slots, generator=draw),
        }


class CanvasStates(_Drawing):
    """Trajectories of canvases as pairs of states of one canvas: y before a random step, y* later.

    The canvas is uniform over those that the teacher finished, y over the states before its steps. y* is the finished canvas with
    probability `finish`, else uniform over the states between them (finished if there are none). A row: prompt_ids, the finished
    canvases before it included; y, y_star [S]; open, open_star [S], the slots that are not accepted; target, target_ids [S, k] and
    target_total [S], the teacher's logits in the step that led to y*, conditioned as the teacher was; seen, seen_ids [S, k] and
    seen_star, seen_star_ids, what self-conditioning saw at y and y*, and told, whether the student is told it at y. It is told nothing
    at the first state of a canvas, and elsewhere with probability self_conditioning: the others stand for a student that jumps to y at
    once, and has seen nothing either. For the restore loss: reference_prompt_ids, the prompt and the reference answer before one of its
    canvases, that canvas (answer [S]), and its noise: level, uniform, token.
    """

    def __init__(
        self, trajectories: StoredCanvases, model: DiffusionLM, max_new_tokens: int, canvas_length: int, seed: int, *,
        self_conditioning: float = 0.5, finish: float = 0.5,
    ):
        super().__init__(seed)
        self.trajectories, self.eos = trajectories, model.facts.eos_token_ids[0]
        self.max_new_tokens, self.canvas_length = max_new_tokens, canvas_length
        self.self_conditioning, self.finish = self_conditioning, finish

    def __len__(self) -> int:
        return len(self.trajectories)

    def name(self, index: int) -> str:
        """A row's sample, as an error names it."""
        return f"trajectory {index}"

    def __getitem__(self, index: int) -> dict[str, Any]:
        row, draw, size = self.trajectories[index], self.generator(index), self.canvas_length

        def below(limit: int) -> int:
            return int(torch.randint(limit, (1,), generator=draw))

        def chance() -> float:
            return float(torch.rand(1, generator=draw))

        canvas = below(len(row.steps))
        steps = row.steps[canvas]
        start, whole, between, told = below(steps), chance() < self.finish, chance(), chance() < self.self_conditioning
        later = steps if whole or start + 1 == steps else start + 1 + int(between * (steps - 1 - start))
        y, y_star, led = row.state(canvas, start), row.state(canvas, later), row.first(canvas) + later - 1
        assert y_star.seen_SK is not None and y_star.seen_ids_SK is not None  # a step led to it
        nothing = torch.zeros_like(y_star.seen_SK), torch.zeros_like(y_star.seen_ids_SK)
        seen, seen_ids = (y.seen_SK, y.seen_ids_SK) if start else nothing
        answer_tokens = min(len(row.answer_ids) + 1, self.max_new_tokens)  # the end token too, unless the answer was cut
        at = below(-(-answer_tokens // size)) * size
        return {
            "index": index, "prompt_ids": [*row.prompt_ids, *row.tokens[: canvas * size].tolist()],
            "y": y.canvas_S, "open": y.open_S, "seen": seen, "seen_ids": seen_ids, "told": torch.tensor(told and start > 0),
            "y_star": y_star.canvas_S, "open_star": y_star.open_S, "seen_star": y_star.seen_SK, "seen_star_ids": y_star.seen_ids_SK,
            "target": row.logits[led], "target_ids": row.ids[led].long(), "target_total": row.total[led],
            "reference_prompt_ids": [*row.prompt_ids, *row.answer_ids[:at]],
            "answer": torch.tensor(data.fill_budget(row.answer_ids[: at + size], at + size, self.eos))[at:],
            "level": torch.rand(1, generator=draw)[0],
            "uniform": torch.rand(size, generator=draw),
            "token": torch.rand(size, generator=draw),
        }


class AnswerNoise(_Drawing):
    """Examples as noisy answers: prompt_ids, answer_ids, level, uniform [max_new_tokens] and levels, as many as a row has blocks.

    level is the row's noise level (mdlm); levels has one a block (bd3lm), and one more for blocks that begin in the prompt.
    longest, tokens of the longest answer, and budget, a draw, are the same in all rows of an `InGroup`'s group; else the row's own.
    """

    def __init__(self, examples: Sequence[data.Example], max_new_tokens: int, seed: int, block_length: int | None = None):
        super().__init__(seed)
        self.examples, self.max_new_tokens = examples, max_new_tokens
        self.levels = 0 if block_length is None else -(-max_new_tokens // block_length) + 1

    def __len__(self) -> int:
        return len(self.examples)

    def name(self, index: int) -> str:
        """A row's sample, as an error names it."""
        return f"question {self.examples[index].index}"

    def __getitem__(self, place: int | InGroup) -> dict[str, Any]:
        index, group = place if isinstance(place, InGroup) else (place, (place,))
        example, draw, first = self.examples[index], self.generator(index), self.generator(group[0])
        level, _ = torch.rand(1, generator=draw)[0], torch.rand(1, generator=draw)  # the second is the budget's, of the group's first row
        return {
            "index": index,
            "prompt_ids": example.prompt_ids,
            "answer_ids": example.answer_ids,
            "level": level,
            "longest": max(len(self.examples[row].answer_ids) for row in group),
            "budget": float(torch.rand(2, generator=first)[1]),
            "uniform": torch.rand(self.max_new_tokens, generator=draw),
            "levels": torch.rand(self.levels, generator=draw),
        }


class CanvasNoise(AnswerNoise):
    """Examples with the draws of one noisy canvas each: `canvas` chooses which of the answer's, `level`, `uniform` and `token` are its
    noise, `told` decides whether self-conditioning is told something. Canvases behind the one with the end token are never drawn."""

    def __getitem__(self, place: int | InGroup) -> dict[str, Any]:
        row = super().__getitem__(place)
        draw = self.generator(row["index"])
        draw.manual_seed(data.sample_seed(draw.initial_seed(), 1))  # a stream of its own beside that of the row it adds to
        return {
            **row, "canvas": torch.rand(1, generator=draw)[0], "told": torch.rand(1, generator=draw)[0],
            "token": torch.rand(self.max_new_tokens, generator=draw),
        }


class Collator:
    """Rows to tensors: prompts padded on the left, everything else stacked.

    Rows with answer_ids get a common budget of slots, filled up with end tokens. For mdlm it is the longest answer of the rows' group with
    its end token, plus a random part of what is left to max_new_tokens (the draw of the group's first row, cubed, so that most groups are
    short and some are full): there the budget, and with it the loss, depends on which rows stand together, but not on which of them share
    a batch. With whole_blocks (a block length; 1 for ar) it is the longest answer with its end token and the rest of that block, at most
    max_new_tokens; `length` says how many tokens the answer of each row has with its end token, and the losses look no further than
    the block that it ends in. from_zero: blocks start at position 0, whatever the model's own do (tidar).
    """

    def __init__(self, model: DiffusionLM, max_new_tokens: int, whole_blocks: int | None = None, *, from_zero: bool = False):
        self.pad, self.eos, self.max_new_tokens = model.facts.pad_token_id, model.facts.eos_token_ids[0], max_new_tokens
        self.whole_blocks, self.from_zero = whole_blocks, from_zero or model.facts.block_origin == "zero"

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        prompt, valid = data.pad_left([row["prompt_ids"] for row in rows], self.pad)
        batch = {"prompt": prompt, "prompt_valid": valid}
        if "index" in rows[0]:
            batch["index"] = torch.tensor([row["index"] for row in rows])
        if "reference_prompt_ids" in rows[0]:
            reference, reference_valid = data.pad_left([row["reference_prompt_ids"] for row in rows], self.pad)
            batch |= {"reference": reference, "reference_valid": reference_valid}
            return batch | {
                key: torch.stack([row[key] for row in rows]) for key in rows[0] if key != "index" and not key.endswith("prompt_ids")
            }
        if "answer_ids" in rows[0]:
            if self.whole_blocks is None:
                longest = min(max(row["longest"] for row in rows) + 1, self.max_new_tokens)
                slots = longest + round((self.max_new_tokens - longest) * rows[0]["budget"] ** 3)
            else:
                longest = min(max(len(row["answer_ids"]) for row in rows) + 1, self.max_new_tokens)
                # One block more where the first block begins inside the prompt, for then the last one ends that much later.
                blocks = -(-longest // self.whole_blocks) + self.from_zero
                slots = min(self.max_new_tokens, blocks * self.whole_blocks)
            batch["length"] = torch.tensor([min(len(row["answer_ids"]) + 1, slots) for row in rows])
            batch["levels"] = torch.stack([row["levels"] for row in rows])
            batch["answer"] = torch.tensor([data.fill_budget(row["answer_ids"], slots, self.eos) for row in rows])
            batch["uniform"] = torch.stack([row["uniform"][:slots] for row in rows])
            batch["level"] = torch.stack([row["level"] for row in rows])
            for key in ("canvas", "told", "token"):
                if key in rows[0]:
                    batch[key] = torch.stack([row[key] for row in rows])
        else:
            for key in ("y", "y_star", "decoded", "hidden", "answer", "uniform", "level"):
                if key in rows[0]:
                    batch[key] = torch.stack([row[key] for row in rows])
        return batch


class LengthGrouped(Sampler[int]):
    """A random order in which rows of similar length stand together: batches of a shuffled chunk, sorted, then shuffled."""

    def __init__(self, lengths: Sequence[tuple[int, int]], batch_size: int, seed: int, chunk: int = 16):
        self.lengths, self.batch_size, self.seed, self.chunk, self.epoch = lengths, batch_size, seed, chunk, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        draw = torch.Generator().manual_seed(data.sample_seed(self.seed, self.epoch))
        order = torch.randperm(len(self.lengths), generator=draw).tolist()
        step = self.batch_size * self.chunk
        for begin in range(0, len(order), step):
            rows = sorted(order[begin : begin + step], key=lambda i: self.lengths[i])
            batches = [rows[i : i + self.batch_size] for i in range(0, len(rows), self.batch_size)]
            full = [b for b in batches if len(b) == self.batch_size]
            for i in torch.randperm(len(full), generator=draw).tolist():
                yield from full[i]
            yield from (row for b in batches if len(b) < self.batch_size for row in b)


class Shuffled(Sampler[int]):
    """A random order of all rows, of seed + epoch: that of accelerate's own sampler."""

    def __init__(self, count: int, seed: int):
        self.count, self.seed, self.epoch = count, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.count, generator=torch.Generator().manual_seed(self.seed + self.epoch)).tolist()


class WholeSteps(Sampler):
    """As much of an epoch's order as makes whole steps of `per_step` rows; what is left over of an epoch is not used in it.

    Engines deal a step's rows out to processes in batches, some of every so many: with a last step of fewer rows they would drop or repeat
    some, others for other numbers of processes. in_groups: rows as `InGroup`, of `grouped` rows each, which divides per_step.
    """

    def __init__(self, order: Shuffled | LengthGrouped, per_step: int, grouped: int, *, in_groups: bool):
        self.order, self.per_step, self.grouped, self.in_groups = order, per_step, grouped, in_groups
        if per_step % grouped:
            raise ValueError(f"a step has {per_step} rows, which are no whole groups of {grouped}")
        if not len(self):
            raise ValueError(f"a step has {per_step} rows; there are {len(order)} rows to train on")

    def set_epoch(self, epoch: int) -> None:
        self.order.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.order) // self.per_step * self.per_step

    def __iter__(self) -> Iterator[int | InGroup]:
        order = list(self.order)[: len(self)]
        for begin in range(0, len(order), self.grouped):
            group = tuple(order[begin : begin + self.grouped])
            yield from (InGroup(row, group) for row in group) if self.in_groups else group


class _Epoch(TrainerCallback):
    """Tells dataset and sampler which epoch it is."""

    def __init__(self, *listeners: Any):
        self.listeners = listeners

    def on_epoch_begin(self, args, state, control, **kwargs):
        for listener in self.listeners:
            listener.set_epoch(int(state.epoch or 0))


class CDLMTrainer(Trainer):
    """transformers' Trainer with the objectives of this package.

    teacher_head: the teacher's lm_head, for "cdlm"; it stays as it is, also when the student's own head is trained. lengths: of each row,
    by which rows stand together. grouped: how many do (None: those of a forward; of several processes, what one would take): a whole
    number of groups is a step, a whole number of forwards a group.
    Every loss is logged under its name, with its weight beside it. loss_is_scaled_for_ga is False: a loss is a mean over its
    micro-batch, and the Trainer divides by the number of micro-batches.

    Under `accelerate launch` the Trainer's own engine (DDP, FSDP2, DeepSpeed) wraps the model, and a process gets every so-manieth
    micro-batch of those that one process would take; with that many fewer micro-batches a step, or smaller ones, the steps are the same
    ones. An engine
    gathers weights and reduces gradients around the forward of what it wraps, so all of an objective, its several forwards, the head and
    the losses, runs inside one call of the wrapped model. Checkpoints are written under all but DeepSpeed.
    """

    _tag_names = ["cdlm", "diffusion", "block-diffusion"]
    _name = "CDLM"
    _paper = {"title": "CDLM: Consistency Diffusion Language Models for Faster Sampling", "id": "2511.19269"}
    loss_is_scaled_for_ga = False

    def __init__(
        self, model: DiffusionLM, args: CDLMConfig, train_dataset: Dataset, data_collator: Collator,
        teacher_head: nn.Module | None = None, lengths: Sequence[tuple[int, int]] | None = None, grouped: int | None = None,
        peft_model: Any = None, **kwargs: Any,
    ):
        stored_logits = isinstance(train_dataset, CanvasStates)
        if args.objective == "cdlm" and args.distill_weight > 0 and teacher_head is None and not stored_logits:
            raise ValueError("objective cdlm with distill_weight > 0 needs teacher_head, the teacher's lm_head")
        if args.n_gpu > 1:
            raise ValueError(f"one process has {args.n_gpu} GPUs; start one process a GPU: accelerate launch --num_processes {args.n_gpu}")
        if args.fp16:
            raise ValueError("fp16 is True; allowed: bf16, or the model's own dtype")
        wrapped = model.hf if peft_model is None else peft_model  # what checkpoints save; forwards go through `model`
        if args.gradient_checkpointing and peft_model is not None:
            model.hf.enable_input_require_grads()  # a checkpoint whose inputs need no gradient would give its adapters none
        super().__init__(model=wrapped, args=args, train_dataset=train_dataset, data_collator=data_collator, **kwargs)
        asked = {"FSDP": "ACCELERATE_USE_FSDP", "DeepSpeed": "ACCELERATE_USE_DEEPSPEED"}
        for name, variable in asked.items():
            if os.environ.get(variable, "false").lower() == "true" and self.engine != name.lower():
                raise ValueError(f"accelerate was asked for {name}, which it does not run on this device ({args.device}); take DDP")
        if self.engine != "plain" and model.redecides:
            raise ValueError(
                f"{self.engine} shards layers; this model's encoder and decoder share theirs, and a batch decides how many forwards there "
                "are: take DDP"
            )
        if self.engine == "fsdp" and (kind := self.accelerator.state.fsdp_plugin.state_dict_type.name) != "FULL_STATE_DICT":
            raise ValueError(f"fsdp_state_dict_type is {kind}; it must be FULL_STATE_DICT: others keep a pickle, which is never read")
        if self.engine == "fsdp" and args.bf16:  # accelerate's own would also round losses, and sum gradients, in bfloat16
            plugin = self.accelerator.state.fsdp_plugin
            plugin.mixed_precision_policy = replace(plugin.mixed_precision_policy, output_dtype=None, reduce_dtype=torch.float32)
        if self.engine == "deepspeed":
            self.args.save_strategy = SaveStrategy.NO  # its checkpoints are pickles, which are never read
        self.diffusion, self.teacher_head, self.lengths, self.grouped = model, teacher_head, lengths, grouped
        self._calls = False  # whether the model's forward is `_call`
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = defaultdict(int)
        self._epoch = _Epoch(*([train_dataset] if isinstance(train_dataset, _Drawing) else []))
        self.add_callback(self._epoch)

    def _get_train_sampler(self, train_dataset=None):
        args, rows = self.args, self.train_dataset if train_dataset is None else train_dataset
        each = args.train_batch_size
        grouped = self.grouped or each
        if grouped % each:
            raise ValueError(f"a forward has {each} rows, which do not divide a group of {grouped}")
        order: Shuffled | LengthGrouped
        if self.lengths is None:
            order = Shuffled(len(rows), args.seed if args.data_seed is None else args.data_seed)
        else:
            order = LengthGrouped(self.lengths, grouped, args.seed)
        per_step = each * args.gradient_accumulation_steps * args.world_size
        sampler = WholeSteps(order, per_step, grouped, in_groups=isinstance(rows, AnswerNoise))
        self._epoch.listeners += (sampler,)
        return sampler

    def _prepare_input(self, data: dict[str, Tensor]) -> dict[str, Tensor]:
        """To the device and no more: the Trainer would also round noise to the dtype of an engine."""
        return {name: value.to(self.args.device) for name, value in data.items()}

    @property
    def head(self) -> losses.Head:
        """What makes logits of hidden rows. Losses ask it once a chunk, again in the backward, and processes have different numbers of
        chunks: of a head that FSDP shards the weights are there for all of a micro-batch, and what FSDP does around each call is left out,
        or one process would wait for weights that the other never sends."""
        head = self.diffusion.head
        return head.forward if isinstance(head, FSDPModule) else head

    def training_step(self, *args, **kwargs):
        """As the Trainer's; then a sharded head gives its weights back."""
        loss = super().training_step(*args, **kwargs)
        if isinstance(head := self.diffusion.head, FSDPModule):
            head.reshard()
        return loss

    @property
    def engine(self) -> str:
        """plain (one process, or DDP), fsdp or deepspeed. The last two shard weights, and their checkpoints have other files."""
        return "fsdp" if self.is_fsdp_enabled else "deepspeed" if self.is_deepspeed_enabled else "plain"

    def full_state(self) -> dict[str, Tensor] | None:
        """After training, all weights in the main process; None where no engine has sharded them. All processes call."""
        return None if self.engine == "plain" else self.accelerator.get_state_dict(self.model_wrapped)

    def end(self) -> None:
        """After the last call of a trainer: models that are loaded later are whole ones. transformers has them loaded in shares as long as
        the arguments of a training under ZeRO-3 are remembered."""
        if self.engine == "deepspeed":
            from transformers.integrations.deepspeed import unset_hf_deepspeed_config

            unset_hf_deepspeed_config()

    def train(self, *args, **kwargs):
        """As the Trainer's, with the wrapped model's forward replaced meanwhile."""
        with self.calling():
            return super().train(*args, **kwargs)

    def load(self, checkpoint: str) -> None:
        """The weights of a checkpoint, without a step of training."""
        if self.engine == "plain":
            self._load_from_checkpoint(checkpoint)
        else:  # a sharded checkpoint is read into a model that is wrapped
            self._prepare_for_training(self.args.max_steps, self.get_train_dataloader(), checkpoint)

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Inside, the trained module's forward calls what it is given, so that engines wrap all of an objective."""
        trained, self._calls = self.model, True
        trained.forward = _call
        try:
            yield
        finally:
            self._calls = False
            del trained.forward

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        assert isinstance(self.args, CDLMConfig)
        objective = OBJECTIVES[self.args.objective]
        if "index" in inputs:  # what dropout draws from: not the process, nor where a run was resumed
            torch.manual_seed(data.sample_seed(self.args.seed, self.state.global_step, int(inputs["index"][0])))

        def work() -> dict[str, Tensor]:
            if isinstance(head := self.diffusion.head, FSDPModule):
                head.unshard()
            return objective(self, inputs)

        # A closure, for engines cast the tensors that they see among arguments, and noise must not be rounded.
        parts = (model if self._calls else _call)(work)
        total = None
        for name, loss in parts.items():
            weight = self.args.weights.get(name, 1.0)
            self._require_finite(loss, name, inputs)
            self._sums[name] = self._sums.get(name, 0) + loss.detach()
            self._counts[name] += 1
            total = weight * loss if total is None else total + weight * loss
        return (total, {}) if return_outputs else total

    def _require_finite(self, loss: Tensor, name: str, inputs: dict[str, Tensor]) -> None:
        """A FloatingPointError that names the loss, the step and the samples of the micro-batch it is of, if it is no number."""
        try:
            losses.finite(loss, name)
        except FloatingPointError as error:
            named = getattr(self.train_dataset, "name", lambda index: f"row {index}")
            samples = ", ".join(named(index) for index in inputs["index"].tolist()) if "index" in inputs else "not known"
            raise FloatingPointError(f"{error}: step {self.state.global_step + 1}, samples: {samples}") from None

    def _save_checkpoint(self, model, trial):
        """The Trainer's checkpoint, with checksums written last and no pickle that nobody reads; older ones go after that.

        A FloatingPointError for weights that are no numbers: a checkpoint is always one to go on from.
        """
        where = Path(self._get_output_dir(trial=trial))
        folder = where / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and not bool(torch.isfinite(parameter).all()):
                raise FloatingPointError(f"{name} is no longer finite: step {self.state.global_step}; lower the learning rate")
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            with files.names_path(folder):
                super()._save_checkpoint(model, trial)
        except RuntimeError as error:
            if not any(text in str(error) for text in WRITER_FAILED):
                raise
            raise files.NotWritten(f"{folder} can't be written: {' '.join(str(error).split())}") from error
        finally:
            self.args.save_total_limit = limit
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            with files.names_path(folder):
                (folder / "training_args.bin").unlink(missing_ok=True)
                files.seal(folder)
                files.sync_all(folder)
            rotate_checkpoints(str(where), self.args.save_total_limit)

    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
        """The Trainer's; weights of whole models are read here, before FSDP takes its shares of the model. See `head` for the rest."""
        if self.engine == "fsdp" and resume_from_checkpoint is not None and written_by(Path(resume_from_checkpoint)) == "plain":
            read_whole(self.model, Path(resume_from_checkpoint))
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if isinstance(head := self.diffusion.head, FSDPModule):
            head.set_reshard_after_forward(False, recurse=False)
            head.set_reshard_after_backward(False, recurse=False)
        if self.engine == "deepspeed" and (sharding := getattr(self.model_wrapped.optimizer, "parameter_offload", None)) is not None:
            sharding.persistent_parameters += keep_gathered(self.diffusion.head)
        return prepared

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        """From safetensors alone, but for what FSDP reads of its own: the Trainer would also read weights from a pickle."""
        place = Path(resume_from_checkpoint)
        written = written_by(place)
        own = place.glob("pytorch_model_fsdp*.bin") if written == "fsdp" else ()  # accelerate reads that with weights_only, others do not
        if pickles := sorted({*place.glob("*model*.bin"), *place.glob("*model*.bin.index.json")} - {*own}):
            raise ValueError(f"{pickles[0]} is a pickle, which can run code; weights are read from safetensors alone: remove it")
        if written == self.engine:
            with _plain_state(resume_from_checkpoint):
                super()._load_from_checkpoint(resume_from_checkpoint, model)
        elif self.engine == "plain":
            read_whole(self.model, place)

    def _load_optimizer_and_scheduler(self, checkpoint):
        with _plain_state(checkpoint):
            if checkpoint is None or written_by(Path(checkpoint)) == self.engine:
                super()._load_optimizer_and_scheduler(checkpoint)
            else:
                self._translate_optimizer(Path(checkpoint))
                self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / "scheduler.pt", weights_only=True))

    def _translate_optimizer(self, checkpoint: Path) -> None:
        """The optimizer's state of whole models for FSDP, or the other way round: FSDP names parameters, and without it they are numbered
        in the order of their groups, which is the same one."""
        named = {id(parameter): name for name, parameter in self.model.named_parameters()}
        order = [named[id(parameter)] for group in self.optimizer.param_groups for parameter in group["params"]]
        if self.engine == "plain":
            saved = torch.load(checkpoint / "optimizer.bin", map_location="cpu", weights_only=True)
            self.optimizer.load_state_dict(_renamed(saved, {name: number for number, name in enumerate(order)}))
            return
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

        saved = {}
        if self.accelerator.is_main_process:  # which hands each its share
            saved = _renamed(torch.load(checkpoint / "optimizer.pt", map_location="cpu", weights_only=True), dict(enumerate(order)))
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_optimizer_state_dict(self.model, self.optimizer, saved, options=options)

    def _load_rng_state(self, checkpoint):
        with _plain_state(checkpoint):
            super()._load_rng_state(checkpoint)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the mean of each loss since the last log, and its weight."""
        assert isinstance(self.args, CDLMConfig)
        for name, value in self._sums.items():
            logs[f"{name}_loss"] = round(float(self.accelerator.gather(value).mean()) / self._counts[name], 6)
            if name in self.args.weights:
                logs[f"{name}_weight"] = self.args.weights[name]
        self._sums, self._counts = {}, defaultdict(int)
        super().log(logs, start_time)

    def _cap(self) -> float:
        assert isinstance(self.args, CDLMConfig)
        progress = self.state.global_step / max(1, self.state.max_steps)
        return noise.rising_cap(progress, self.args.noise_first_cap, self.args.noise_ramp)


def keep_gathered(head: nn.Module) -> list[Any]:
    """Let ZeRO-3 keep a module's weights whole in every process, as it does those of small modules, and do nothing around its calls, of
    which processes have different numbers; the weights that it sharded before."""
    sharded: list[Any] = [parameter for parameter in head.parameters() if not parameter.ds_persist]
    for parameter in sharded:
        parameter.ds_persist = True
    if sharded:
        sharded[0].all_gather(sharded)
    for module in head.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if hook.__module__.startswith("deepspeed.")]:
                del hooks[key]
    return sharded


@contextlib.contextmanager
def _plain_state(checkpoint: str | None) -> Iterator[None]:
    """Optimizer, schedule and random state are read by torch's weights_only reader, which makes tensors and plain values and calls
    nothing. What it refuses becomes a ValueError."""
    try:
        yield
    except pickle.UnpicklingError as error:
        reason = str(error).split("\n", 1)[0]
        raise ValueError(f"{checkpoint} holds state that is more than tensors and plain values, and is not read: {reason}") from None


def written_by(checkpoint: Path) -> str:
    """The engine that wrote a checkpoint: plain, fsdp or deepspeed."""
    if any(checkpoint.glob("pytorch_model_fsdp*")):
        return "fsdp"
    return "deepspeed" if any(checkpoint.glob("global_step*")) else "plain"


def check_engine(checkpoint: Path, engine: str) -> None:
    """A ValueError unless this engine can go on from a checkpoint.

    One process, DDP and FSDP go on from each other's, for theirs hold whole weights and the whole state of the optimizer (FSDP's if
    its state dict type is FULL_STATE_DICT). DeepSpeed goes on from none: its own are read by its own reader, which runs pickles.
    """
    written = written_by(checkpoint)
    if written == "deepspeed":
        raise ValueError(
            f"{checkpoint} was written by DeepSpeed, in pickles, which can run code and are not read: remove {checkpoint.parent} to train "
            "from the start, under an engine whose checkpoints are read: one process, DDP or FSDP"
        )
    if engine == "deepspeed":
        raise ValueError(f"{checkpoint} was not written by DeepSpeed, which can't go on from it: start as it was, or remove it")
    if written == "fsdp" and not (checkpoint / "pytorch_model_fsdp.bin").is_file():
        raise ValueError(
            f"{checkpoint} holds FSDP's shares, with a pickle beside them, which can run code and is not read: remove {checkpoint.parent} "
            "to train from the start, with fsdp_state_dict_type FULL_STATE_DICT"
        )


def read_whole(model: Any, checkpoint: Path) -> None:
    """The trained weights of a checkpoint, from safetensors, into a model that no engine has wrapped. A ValueError if any is missing."""
    found: dict[str, Tensor] = {}
    for file in sorted(checkpoint.glob("*model*.safetensors")):
        found |= load_file(file)
    if (checkpoint / "adapter_model.safetensors").is_file():
        from peft import set_peft_model_state_dict

        missing = set_peft_model_state_dict(model, found).missing_keys
    else:
        missing = model.load_state_dict(found, strict=False).missing_keys
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}  # tied ones once, by the name that is saved
    if lost := sorted(trained & {*missing}):
        raise ValueError(f"{checkpoint} has no weights for {len(lost)} parameters that are trained, {lost[0]} among them")


def _renamed(state: dict[str, Any], names: dict[Any, Any]) -> dict[str, Any]:
    """An optimizer's state with other keys for the parameters."""
    groups = [{**group, "params": [names[key] for key in group["params"]]} for group in state["param_groups"]]
    return {"state": {names[key]: value for key, value in state["state"].items()}, "param_groups": groups}


def _call(work: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The forward of a module in training."""
    return work()


def _whole(batch: dict[str, Tensor], slots_BN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Prompt and slots as one sequence: ids [B, L], valid [B, L], prompt lengths [B]."""
    ids_BL = torch.cat([batch["prompt"], slots_BN], dim=1)
    valid_BL = torch.cat([batch["prompt_valid"], torch.ones_like(slots_BN, dtype=torch.bool)], dim=1)
    return ids_BL, valid_BL, batch["prompt_valid"].sum(dim=1)


def _noisy_answer(trainer: CDLMTrainer, batch: dict[str, Tensor], block_length: int | None) -> Tensor:
    """Equation 6 on the reference answers, under the block-causal mask or (None) under full attention."""
    model, args = trainer.diffusion, trainer.args
    assert isinstance(args, CDLMConfig)
    level_B = noise.noise_level(batch["level"], trainer._cap(), args.noise_floor)
    everywhere = torch.ones_like(batch["answer"], dtype=torch.bool)
    noisy_BN, masked_BN = noise.mask_tokens(batch["answer"], level_B, everywhere, model.facts.mask_id, batch["uniform"])
    prompt = batch["prompt"].shape[1]
    row_BND = model.sequence_hidden(*_whole(batch, noisy_BN), block_length)[:, prompt:]
    length_B = torch.full_like(level_B, batch["answer"].shape[1])
    return losses.masked_diffusion_from_hidden(row_BND, trainer.head, batch["answer"], masked_BN, level_B, length_B, model.vocab)


def mdlm_losses(trainer: CDLMTrainer, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """LLaDA's SFT loss under full attention."""
    return {"mdlm": _noisy_answer(trainer, batch, None)}


def ar_losses(trainer: CDLMTrainer, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Next-token cross-entropy on answers and their end tokens, under causal attention (blocks of one token)."""
    prompt, slots = batch["prompt"].shape[1], batch["answer"].shape[1]
    model = trainer.diffusion
    row_BND = model.sequence_hidden(*_whole(batch, batch["answer"]), 1)[:, prompt:]
    asked_BN = torch.arange(slots, device=row_BND.device) < batch["length"][:, None]
    return {"ar": losses.next_token_from_hidden(row_BND, trainer.head, batch["answer"], asked_BN, model.vocab)}


def bd3lm_losses(trainer: CDLMTrainer, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Block diffusion: noisy blocks behind the clean text before them, a noise level t for each block of a row.

    Each masked slot weighs 1/t of its block, and a row's sum is divided by its slots: those up to the end of the block that holds its
    end token, which is where decoding stops. (BD3-LM, arXiv 2503.09573, L_BD with the weight 1/t.)

    With `complementary` each row is trained twice, with its mask and with the complement of it, so that every slot is a target exactly
    once (Fast-dLLM v2, arXiv 2509.26328, section 3). Then every slot weighs 1: the weight 1/t makes up for slots that are seldom a
    target, and here none is; 1/t and 1/(1 - t) side by side would let the few slots of nearly clean views outweigh all others.
    """
    model, args = trainer.diffusion, trainer.args
    assert isinstance(args, CDLMConfig)
    slots = batch["answer"].shape[1]
    ids_BL, valid_BL, prompt_B = _whole(batch, batch["answer"])
    position_BN = prompt_B[:, None] + torch.arange(slots, device=prompt_B.device)
    block_BN = masks.blocks(position_BN, prompt_B, args.block_length, origin=model.facts.block_origin)
    block_BN = block_BN - block_BN[:, :1]
    last_B1 = block_BN.gather(1, batch["length"][:, None] - 1)
    asked_BN = block_BN <= last_B1
    level_BN = noise.noise_level(batch["levels"], trainer._cap(), args.noise_floor).gather(1, block_BN)
    noisy_BN, masked_BN = noise.mask_tokens(batch["answer"], level_BN, asked_BN, model.facts.mask_id, batch["uniform"])
    length_B = asked_BN.sum(dim=1)
    views = [(noisy_BN, masked_BN)]
    if args.complementary:
        other_BN = asked_BN & ~masked_BN
        views.append((torch.where(other_BN, model.facts.mask_id, batch["answer"]), other_BN))
        level_BN = torch.ones_like(level_BN)
    found = [
        losses.masked_diffusion_from_hidden(
            model.noisy_clean_hidden(seen_BN, ids_BL, valid_BL, prompt_B, args.block_length), trainer.head, batch["answer"], target_BN,
            level_BN, length_B, model.vocab,
        )
        for seen_BN, target_BN in views
    ]
    return {"bd3lm": torch.stack(found).sum()}


def tidar_losses(trainer: CDLMTrainer, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """TiDAR: next-token and one-step diffusion cross-entropy in one forward of [clean | all masks]. (arXiv 2511.08923, section 3.1.)

    The clean half is plain causal text, and its row before a token predicts it. Every token of the second half is a mask, which sees its
    own block of masks and the clean text before that block, and predicts the token of its own position. Blocks start at multiples of
    block_length from position 0. The tokens that count are the same for both losses: those of the answer and its end token; the paper
    trains on documents, where all but the first count. Of the second half only the blocks that hold answer tokens are computed.
    """
    model, args = trainer.diffusion, trainer.args
    assert isinstance(args, CDLMConfig)
    ids_BL, valid_BL, _ = _whole(batch, batch["answer"])
    prompt, (_, length) = batch["prompt"].shape[1], ids_BL.shape
    skip = max(0, prompt - args.block_length + 1)
    layout = masks.tidar_training(valid_BL, args.block_length, skip)
    masked_BM = torch.full_like(ids_BL[:, skip:], model.facts.mask_id)
    row_BQD = model.packed_hidden(torch.cat([ids_BL, masked_BM], dim=1), layout.position_BQ, layout.sight, layout.before_BQ)
    asked_BN = torch.arange(length - prompt, device=ids_BL.device) < batch["length"][:, None]
    halves = {"ar": row_BQD[:, prompt - 1 : length - 1], "diffusion": row_BQD[:, length + prompt - skip :]}
    return {
        name: losses.next_token_from_hidden(row_BND, trainer.head, batch["answer"], asked_BN, model.vocab)
        for name, row_BND in halves.items()
    }


def _canvas_noise(trainer: CDLMTrainer, batch: dict[str, Tensor], clean_BS: Tensor) -> Tensor:
    """A clean canvas with the batch's noise on it, [B, S]."""
    args = trainer.args
    assert isinstance(args, CDLMConfig)
    slots = clean_BS.shape[1]
    level_B = noise.noise_level(batch["level"], trainer._cap(), args.noise_floor)
    everywhere = torch.ones_like(clean_BS, dtype=torch.bool)
    return trainer.diffusion.noise.corrupt(clean_BS, level_B, everywhere, batch["uniform"][:, :slots], batch["token"][:, :slots])[0]


def uniform_losses(trainer: CDLMTrainer, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Uniform noise: cross-entropy on all slots of one canvas a row, behind the clean text before it, and the causal encoder's next-token
    cross-entropy on the answer and its end token.

    The canvas is drawn from those up to the one with the end token; behind it stand end tokens, which are targets too. Rows are told what
    a first forward without gradients saw, with probability `self_conditioning` each; the others are told nothing.
    """
    model, args = trainer.diffusion, trainer.args
    assert isinstance(args, CDLMConfig)
    size, prompt = args.block_length, batch["prompt"].shape[1]
    canvases_B = -(-batch["length"] // size)
    first_B = (batch["canvas"] * canvases_B).long().clamp(max=canvases_B - 1) * size
    clean_BS = batch["answer"].gather(1, first_B[:, None] + torch.arange(size, device=first_B.device))
    noisy_BS = _canvas_noise(trainer, batch, clean_BS)
    longest = int(batch["length"].max())  # no canvas is behind what stands further on, and no token there is a target
    ids_BL, valid_BL, _ = _whole(batch, batch["answer"][:, :longest])
    row_BLD, canvas_BSD = model.text_and_canvas(ids_BL, valid_BL, prompt + first_B, noisy_BS, batch["told"] < args.self_conditioning)
    asked_BN = torch.arange(longest, device=first_B.device) < batch["length"][:, None]
    everywhere = torch.ones_like(clean_BS, dtype=torch.bool)
    return {
        "diffusion": losses.next_token_from_hidden(canvas_BSD, trainer.head, clean_BS, everywhere, model.vocab),
        "ar": losses.next_token_from_hidden(row_BLD[:, prompt:], trainer.head, ids_BL[:, prompt:], asked_BN, model.vocab),
    }


def cdlm_losses(trainer: CDLMTrainer, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Equations 4, 5 and 6; those of weight 0 are left out, and so is the forward that only they need."""
    model, args = trainer.diffusion, trainer.args
    assert isinstance(args, CDLMConfig)
    if "open_star" in batch:
        return canvas_losses(trainer, batch)
    prompt, mask, block = batch["prompt"].shape[1], model.facts.mask_id, args.block_length
    out: dict[str, Tensor] = {}
    if args.distill_weight or args.consistency_weight:
        row_BND = model.sequence_hidden(*_whole(batch, batch["y"]), block)[:, prompt:]
        open_BN, open_later_BN = batch["y"] == mask, batch["y_star"] == mask
        if args.distill_weight and "hidden" not in batch:
            out["distill"] = losses.token_distillation_from_hidden(
                row_BND, trainer.head, batch["y_star"], open_BN & ~open_later_BN, model.vocab
            )
        elif args.distill_weight:
            assert trainer.teacher_head is not None
            teacher_BND = batch["hidden"].to(next(trainer.teacher_head.parameters()).dtype)
            out["distill"] = losses.distillation_from_hidden(
                row_BND, trainer.head, teacher_BND, trainer.teacher_head, open_BN & ~open_later_BN, model.vocab
            )
        if args.consistency_weight:
            with torch.no_grad(), eval_mode(model.hf):
                later_BND = model.sequence_hidden(*_whole(batch, batch["y_star"]), block)[:, prompt:]
            # Blocks behind the one with the end token are no part of S_y: no decoding that stops there ever asks for them.
            asked_BN = torch.arange(open_BN.shape[1], device=open_BN.device) < batch["decoded"][:, None]
            out["consistency"] = losses.consistency_from_hidden(
                row_BND, trainer.head, later_BND, _without_dropout(trainer), open_BN & open_later_BN & asked_BN, model.vocab
            )
    if args.dlm_weight:
        out["dlm"] = _noisy_answer(trainer, batch, block)
    return out


def canvas_losses(trainer: CDLMTrainer, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Equations 4, 5 and 6 on one canvas a row, where every slot is decided anew at every step (`CanvasStates` says what a batch holds).

    distill: KL from the teacher's logits, not divided by a temperature, on slots accepted between y and y*. consistency: KL from the
    student at y*, told what the teacher was told there, on slots open in both. dlm: cross-entropy on all slots of a noisy reference
    canvas behind the reference before it, told nothing.
    """
    model, args = trainer.diffusion, trainer.args
    assert isinstance(args, CDLMConfig)
    prompt, valid, size = batch["prompt"], batch["prompt_valid"], args.block_length
    out: dict[str, Tensor] = {}
    if args.distill_weight or args.consistency_weight:
        seen = Seen(batch["seen"], batch["seen_ids"], batch["told"])
        row_BSD = model.answer_hidden(prompt, valid, batch["y"], size, seen)
        if args.distill_weight:
            out["distill"] = losses.top_k_distillation_from_hidden(
                row_BSD, trainer.head, batch["target"], batch["target_ids"], batch["target_total"], batch["open"] & ~batch["open_star"],
                model.vocab,
            )
        if args.consistency_weight:
            with torch.no_grad(), eval_mode(model.hf):
                seen_star = Seen(batch["seen_star"], batch["seen_star_ids"])
                later_BSD = model.answer_hidden(prompt, valid, batch["y_star"], size, seen_star)
            open_both_BS = batch["open"] & batch["open_star"]
            out["consistency"] = losses.consistency_from_hidden(
                row_BSD, trainer.head, later_BSD, _without_dropout(trainer), open_both_BS, model.vocab
            )
    if args.dlm_weight:
        noisy_BS = _canvas_noise(trainer, batch, batch["answer"])
        row_BSD = model.answer_hidden(batch["reference"], batch["reference_valid"], noisy_BS, size)
        everywhere = torch.ones_like(noisy_BS, dtype=torch.bool)
        out["dlm"] = losses.next_token_from_hidden(row_BSD, trainer.head, batch["answer"], everywhere, model.vocab)
    return out


def _without_dropout(trainer: CDLMTrainer) -> losses.Head:
    def forward(row_ND: Tensor) -> Tensor:
        with eval_mode(trainer.diffusion.head):
            return trainer.head(row_ND)

    return forward


@contextlib.contextmanager
def eval_mode(model: nn.Module):
    """Without dropout, as the target of equation 5 is computed."""
    was = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was)


OBJECTIVES = {
    "cdlm": cdlm_losses, "mdlm": mdlm_losses, "bd3lm": bd3lm_losses, "ar": ar_losses, "tidar": tidar_losses, "uniform": uniform_losses,
}


def match_targets(hf: nn.Module, targets: list[str]) -> None:
    """Every LoRA target names a linear layer of the model, or a ValueError lists those there are."""
    linear = {name.rsplit(".", 1)[-1] for name, module in hf.named_modules() if isinstance(module, nn.Linear)}
    missing = [target for target in targets if target not in linear]
    if missing or not targets:
        raise ValueError(f"train.lora.targets names {missing or 'nothing'}; this model's linear layers: {', '.join(sorted(linear))}")


def add_lora(model: DiffusionLM, *, rank: int, alpha: int, targets: list[str], dropout: float = 0.0) -> nn.Module:
    """Put LoRA layers into the model (in place) and return the PeftModel; every target must match a module.

    The base weights stay frozen: with the adapter off (`peft_model.disable_adapter()`) the model is the teacher again.
    """
    return put_lora(model.hf, rank=rank, alpha=alpha, targets=targets, dropout=dropout, left_alone=model.left_alone)


def put_lora(
    hf: nn.Module, *, rank: int, alpha: int, targets: list[str], dropout: float, left_alone: str | None = None
) -> nn.Module:
    """`add_lora` on a transformers model. left_alone: modules that get no adapter, as PEFT's exclude_modules."""
    from peft import LoraConfig, get_peft_model

    match_targets(hf, targets)
    config = LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=targets, exclude_modules=left_alone, lora_dropout=dropout, bias="none"
    )
    return get_peft_model(hf, config)
