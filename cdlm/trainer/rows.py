"""Rows of training: datasets that draw states and noise, a collator that makes batches of them, and the order in which they come.

Every random draw of a row comes from a seed made of (seed, epoch, row), so it depends on neither batch nor device nor on where a run was
resumed. The order of rows is of (seed, epoch), and an epoch is whole steps: a step has the same rows however many processes share them.
An mdlm row's budget is of the group of rows that it stands with (`InGroup`), not of the forward that it is in.

Shapes: N slots, S slots of a canvas, D width, k stored tokens.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler
from transformers import TrainerCallback

from cdlm import data
from cdlm.families.base import DiffusionLM


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


class Drawing(Dataset):
    """A dataset whose rows are drawn anew each epoch, from (seed, epoch, row)."""

    def __init__(self, seed: int):
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def generator(self, index: int) -> torch.Generator:
        return torch.Generator().manual_seed(data.sample_seed(self.seed, self.epoch, index))


class TrajectoryStates(Drawing):
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


class CanvasStates(Drawing):
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


class AnswerNoise(Drawing):
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
    """A random order in which rows of similar length stand together: batches of a shuffled chunk, sorted, then shuffled.

    used: how many rows an epoch gives (None: all); those that are left out are drawn before any is sorted, so that each has its turn.
    """

    def __init__(self, lengths: Sequence[tuple[int, int]], batch_size: int, seed: int, chunk: int = 16, used: int | None = None):
        self.lengths, self.batch_size, self.seed, self.chunk, self.used, self.epoch = lengths, batch_size, seed, chunk, used, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        draw = torch.Generator().manual_seed(data.sample_seed(self.seed, self.epoch))
        order = torch.randperm(len(self.lengths), generator=draw).tolist()[: self.used]
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


class Epoch(TrainerCallback):
    """Tells dataset and sampler which epoch it is."""

    def __init__(self, *listeners: Any):
        self.listeners = listeners

    def on_epoch_begin(self, args, state, control, **kwargs):
        for listener in self.listeners:
            listener.set_epoch(int(state.epoch or 0))
