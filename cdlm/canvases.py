"""How a frozen teacher that re-decides every slot at every step runs, and how what it did is stored and replayed.

Behind such a teacher a slot is not filled once: each step accepts slots anew and puts noise into the others. So a trajectory can't be
told by the step at which each slot was filled (`trajectories.py`); it is its states, one before each forward. The state before a step is
the canvas, the set that the step before accepted, its most probable tokens (the argmax canvas), the steps that are left, which
set the temperature, and what self-conditioning saw: the k largest logits of each slot in the step before, behind its temperature.

Logits are stored as the model gave them, before the temperature, in float16 (they are at most a few tens), with the logsumexp of all
of them in float32. So one record serves twice: divided by its step's temperature it is what self-conditioning saw (a softmax over the k
stored tokens: exact where k is the vocabulary, else without what lies behind them), and as it is it is the teacher's distribution for
training, the tokens that are not stored lumped together.

Folder, format version 1: collection.json, shards and manifest.json as in `trajectories.py`, written, resumed and counted as there.
    shard-00000.parquet        a row a trajectory, see SCHEMA
    shard-00000.safetensors    of each step in the parquet file's order: logits f16 [F, S, k], ids i32 [F, S, k], total f32 [F, S]

Shapes: B rows, F steps (forwards of the decoder) of a row's canvases one after another, S slots of a canvas, k stored tokens, V vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cdlm import data, trajectories, unmask
from cdlm.decode import DecodeConfig, Step, decode
from cdlm.families.base import DiffusionLM, NotFinite
from cdlm.processes import ALONE, Processes

SCHEMA = {
    "id": "number of the trajectory",
    "example": "row of the prompt file",
    "group": "task of the prompt",
    "seed": "seed of the teacher's random draws",
    "prompt_ids": "tokens of the prompt, not padded",
    "answer_ids": "tokens of the reference answer, without an end token",
    "tokens": "the finished canvases, one after another",
    "steps": "steps of each canvas",
    "left": "steps that were left at each step, itself included",
    "temperatures": "temperature of each step",
    "canvas": "what stood in the canvas before each step, F x S tokens",
    "accepted": "whether each step accepted the slot, F x S",
    "argmax": "most probable token of each slot behind each step, F x S",
    "decoded": "slots of the finished canvases",
    "stop": "eos, or length when no end token came within the budget",
    "screened": "why the rule of the recipe calls it degenerate, or empty",
}


def step_bytes(slots: int, top_k: int) -> int:
    """Bytes of the logits of one step: per slot k values of 2 bytes, k ids of 4, and 4 for their total."""
    return slots * (6 * top_k + 4)


@dataclass(frozen=True)
class State:
    """A canvas before step `step` of it; at the last `step`, one past the steps taken, the finished canvas.

    open_S: slots that the step before did not accept: all before the first step, none of a finished canvas, whose every slot is decided.
    argmax_S: most probable tokens of the step before; before the first step the canvas itself. left: steps left, 0 of a finished canvas.
    seen_SK, seen_ids_SK: what self-conditioning saw; None before the first step, where it sees nothing.
    """

    step: int
    canvas_S: Tensor
    open_S: Tensor
    argmax_S: Tensor
    left: int
    seen_SK: Tensor | None
    seen_ids_SK: Tensor | None


@dataclass(frozen=True)
class CanvasTrajectory:
    """One decoding of a teacher: for each step of SCHEMA's names a row, [F] or [F, S]; logits, ids: [F, S, k]; total: [F, S]."""

    id: int
    example: int
    group: str
    seed: int
    prompt_ids: list[int]
    answer_ids: list[int]
    tokens: Tensor
    steps: list[int]
    left: Tensor
    temperatures: Tensor
    canvas: Tensor
    accepted: Tensor
    argmax: Tensor
    decoded: int
    stop: str
    screened: str
    logits: Tensor
    ids: Tensor
    total: Tensor

    def first(self, canvas: int) -> int:
        """The row of a canvas's first step."""
        return sum(self.steps[:canvas])

    def state(self, canvas: int, step: int) -> State:
        """The state of canvas number `canvas` before its step number `step`; step == steps[canvas] is the finished one."""
        if not (0 <= canvas < len(self.steps) and 0 <= step <= self.steps[canvas]):
            raise ValueError(f"canvas {canvas}, step {step}: this trajectory has canvases of {self.steps} steps")
        slots, at = self.canvas.shape[1], self.first(canvas) + step
        if step == 0:
            return State(0, self.canvas[at], torch.ones(slots, dtype=torch.bool), self.canvas[at], int(self.left[at]), None, None)
        seen_SK = self.logits[at - 1].float() / self.temperatures[at - 1]
        if step == self.steps[canvas]:
            done_S = self.tokens[canvas * slots : (canvas + 1) * slots]
            return State(step, done_S, torch.zeros(slots, dtype=torch.bool), done_S, 0, seen_SK, self.ids[at - 1].long())
        return State(
            step, self.canvas[at], ~self.accepted[at - 1], self.argmax[at - 1], int(self.left[at]), seen_SK, self.ids[at - 1].long()
        )

    def replay(self) -> Iterator[State]:
        """Every state in order, canvas by canvas, each from noise to finished."""
        for canvas, steps in enumerate(self.steps):
            for step in range(steps + 1):
                yield self.state(canvas, step)


class Recorder:
    """Decoding callback that keeps every step of every row of a batch: values of SCHEMA's names, and the k largest logits."""

    def __init__(self, model: DiffusionLM, config: DecodeConfig, batch: int, top_k: int):
        self.model, self.config, self.top_k = model, config, min(top_k, model.vocab)
        self.values: list[list[dict[str, Any]]] = [[] for _ in range(batch)]
        self.tensors: list[list[dict[str, Tensor]]] = [[] for _ in range(batch)]

    def __call__(self, step: Step) -> None:
        steps, t_min, t_max = self.config.max_denoising_steps, self.config.t_min, self.config.t_max
        assert steps is not None and t_min is not None and t_max is not None
        temperature = float(unmask.temperature(step.step, steps, t_min, t_max))
        for place, row in enumerate(step.row_A.tolist()):
            logits_SV = self.model.head(step.hidden_ASD[place]).float()  # a row at a time: [S, V] of a large vocabulary is large
            value_SK, ids_SK = logits_SV.topk(self.top_k, dim=-1)
            rounded_SK = value_SK.to(torch.float16)
            total_S = logits_SV.scatter(1, ids_SK, rounded_SK.float()).logsumexp(dim=-1)  # so that probabilities still add up to 1
            self.tensors[row].append({
                "logits": rounded_SK[None].cpu(), "ids": ids_SK[None].to(torch.int32).cpu(), "total": total_S[None].cpu(),
            })
            self.values[row].append({
                "block": step.block, "left": steps - step.step, "temperatures": temperature,
                "canvas": step.before_AS[place].tolist(), "accepted": step.reveal_AS[place].tolist(),
                "argmax": step.output_AS[place].tolist(),
            })


def collect(
    model: DiffusionLM, examples: list[data.Example], folder: Path, *, config: DecodeConfig, top_k: int, batch_size: int, shard_size: int,
    seed: int, screen: trajectories.Screen, right: Callable[[data.Example, list[int]], bool], request: dict[str, Any],
    say: Callable[[str], None] = print, processes: Processes = ALONE,
) -> dict[str, Any]:
    """Decode every prompt once into `folder` as `config` says, and return the manifest; the rest as in `trajectories.collect`.

    A row draws from a seed of its own, so a shard's content depends on the request alone.
    """

    def batch_of(
        model: DiffusionLM, jobs: list[tuple[int, tuple[data.Example, float]]], *_: Any
    ) -> trajectories.Collected:
        return _decode_batch(model, [(number, example) for number, (example, _) in jobs], config, top_k, seed, screen, right)

    return trajectories.collect(
        model, examples, folder, config=config, temperatures=[0.0], batch_size=batch_size, shard_size=shard_size, seed=seed, screen=screen,
        right=right, request=request, say=say, processes=processes, batch_of=batch_of, schema=SCHEMA,
    )


def _decode_batch(
    model: DiffusionLM, jobs: list[tuple[int, data.Example]], config: DecodeConfig, top_k: int, seed: int, screen: trajectories.Screen,
    right: Callable[[data.Example, list[int]], bool],
) -> trajectories.Collected:
    """Trajectories of a batch, the logits of all steps beside each."""
    seeds = [data.sample_seed(seed, number) for number, _ in jobs]
    prompts, valid = data.pad_left([example.prompt_ids for _, example in jobs], model.facts.pad_token_id)
    recorder = Recorder(model, config, len(jobs), top_k)
    try:
        out = decode(model, prompts.to(model.device), valid.to(model.device), config, callback=recorder, seeds=seeds)
    except NotFinite as error:
        names = ", ".join(f"{jobs[row][0]} (question {jobs[row][1].index})" for row in error.rows)
        raise FloatingPointError(f"collect: of trajectory {names}: {error}. The shards before are kept") from None
    rows: trajectories.Collected = []
    for row, (number, example) in enumerate(jobs):
        kept, tensors = recorder.values[row], recorder.tensors[row]
        last = [step for step, following in zip(kept, [*kept[1:], None], strict=True)
                if following is None or following["block"] != step["block"]]  # of each canvas; what it left is the finished canvas
        tokens = [token for step in last for token in step["argmax"]]
        within = tokens[: config.max_new_tokens]
        ends = [i for i, token in enumerate(within) if token in model.facts.eos_token_ids]
        answer_ids, stop = (within[: ends[0]], "eos") if ends else (within, "length")
        rows.append(({
            "id": number, "example": example.index, "group": example.group, "seed": seeds[row],
            "prompt_ids": example.prompt_ids, "answer_ids": example.answer_ids, "tokens": tokens,
            "steps": [sum(step["block"] == end["block"] for step in kept) for end in last],
            **{name: [step[name] for step in kept] for name in ("left", "temperatures")},
            **{name: [value for step in kept for value in step[name]] for name in ("canvas", "accepted", "argmax")},
            "decoded": out.decoded_tokens[row], "stop": stop,
            "screened": screen.reason(answer_ids, stop, right(example, answer_ids)),
        }, {name: torch.cat([step[name] for step in tensors]) for name in tensors[0]}))  # fmt: skip
    return rows


def check_folder(folder: Path, *, vocabulary: int, slots: int, canvas_length: int) -> None:
    """`trajectories.check_folder` for a folder of canvases of this length, of at most so many slots. Of the stored logits it looks at
    their shapes and ids."""
    for name in trajectories.read_manifest(folder)["shards"]:
        _, rows = trajectories.read_columns(folder / f"{name}.parquet", SCHEMA, kept=False)
        for column in ("prompt_ids", "answer_ids", "tokens", "canvas", "argmax"):
            rows.require_within(column, 0, vocabulary - 1)
        rows.refuse(rows.lengths("prompt_ids") < 1, "prompt_ids is empty")
        rows.refuse(rows.lengths("answer_ids") > slots, f"answer_ids has more than {slots} values")
        canvases_n = rows.lengths("steps")
        most = -(-slots // canvas_length)
        rows.refuse((canvases_n < 1) | (canvases_n > most), f"steps has a number for each canvas, 1 to {most} of them")
        rows.require_within("steps", 1, 2**15)
        rows.require_length("tokens", canvases_n * canvas_length, f"its canvases have {canvas_length} slots each")
        ends = canvases_n.cumsum()
        sums = rows.values("steps").cumsum()[ends - 1]
        steps_n = sums - [0, *sums[:-1]]
        for column in ("left", "temperatures"):
            rows.require_length(column, steps_n, "there is one for each step")
        for column in ("canvas", "accepted", "argmax"):
            rows.require_length(column, steps_n * canvas_length, f"each step has {canvas_length}")
        rows.require_within("left", 1, 2**15)
        file, total = folder / f"{name}.safetensors", int(sums[-1])
        with trajectories.open_tensors(file) as stored:
            *_, top_k = trajectories.require_shape(stored, file, "logits", [total, canvas_length, None], "F16")
            trajectories.require_shape(stored, file, "ids", [total, canvas_length, top_k], "I32")
            trajectories.require_shape(stored, file, "total", [total, canvas_length], "F32")
            for begin in range(0, total, 256):  # a shard's ids are many
                least, most_id = (int(value) for value in stored.get_slice("ids")[begin : begin + 256].aminmax())
                if least < 0 or most_id >= vocabulary:
                    raise ValueError(f"{file}: ids holds {least if least < 0 else most_id}; allowed: 0 to {vocabulary - 1}")


def load(folder: Path) -> "Canvases | trajectories.Trajectories":
    """A finished folder of either kind, as what it holds."""
    kind = Canvases if "canvas" in trajectories.read_manifest(folder)["schema"] else trajectories.Trajectories
    return kind(folder)


class Canvases(trajectories.Rows):
    """A finished folder, as a sequence of `CanvasTrajectory`. Logits are read from disk one trajectory at a time."""

    def __init__(self, folder: Path, *, screened: bool = False):
        """screened: also give the trajectories that the recipe's rule dropped."""
        import pyarrow.parquet as pq

        super().__init__(folder, screened=screened)
        ends = []  # of each row of a shard, in the steps of the shard's tensors
        for name in self.manifest["shards"]:
            counts = pq.read_table(folder / f"{name}.parquet", columns=["steps"])["steps"].to_pylist()
            ends.append(list(accumulate(map(sum, counts), initial=0)))
        self._steps = [(ends[shard][place], ends[shard][place + 1]) for shard, place in self.places]

    def __getitem__(self, index: int) -> CanvasTrajectory:
        kinds = {"canvas": torch.long, "accepted": torch.bool, "argmax": torch.long, "tokens": torch.long, "left": torch.long}
        row, (begin, end) = self.row(index, {**kinds, "temperatures": torch.float32}), self._steps[index]
        for name in ("canvas", "accepted", "argmax"):
            row[name] = row[name].reshape(end - begin, -1)
        file = self.stored(self.places[index][0])
        return CanvasTrajectory(**row, **{name: file.get_slice(name)[begin:end] for name in ("logits", "ids", "total")})
