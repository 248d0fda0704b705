"""How the frozen teacher runs, and how what it did is stored and replayed. (CDLM, arXiv 2511.19269, section 3 and algorithm 1.)

The teacher decodes every prompt block by block, one token a step, under its own attention (full, unless it is a block diffusion model
itself). A trajectory is stored as final
token and reveal step of each slot: the state at step k is the slots with step < k, the others masked, so every
intermediate state is rebuilt without storing one. Beside them goes the hidden row, after the final norm, that produced the
logits of the slot when it was revealed: lm_head turns it back into the teacher's distribution.

A folder may also be made from trajectories that others published (`importers.py`). They come without hidden rows and
confidences, and several slots may have been revealed at once: the step of a slot is always the number of slots that were filled
before the step that revealed it. With one token a step that is the number of the step. So the state at step k is one that the
teacher was in, or, inside such a step, the one after it. Training needs of a trajectory that it went block by block: after k
blocks' worth of slots, the first k blocks are filled and nothing else.

Folder, format version 1:
    collection.json            what the run was asked to do; a run with other values refuses to go on in this folder
    shard-00000.parquet        a row a trajectory, see SCHEMA
    shard-00000.safetensors    hidden: bf16 [rows, N, D], rows in the parquet file's order; zero where nothing was revealed;
                               missing, as manifest.json says under hidden, in a folder of imported trajectories
    shard-00000.sha256         checksums of the shard's two files
    SHA256SUMS                 checksums of everything
    manifest.json              written last: counts, screening by reason, bytes
Files are written whole and renamed into place, a shard's parquet last; a shard is complete when its files are those of its checksums.

Where blocks start at position 0, a student fills its last block whole: N is then the budget and block_length - 1 more, and `decoded` ends
where the student's last block does.
Shapes: B rows, N slots (the budget, see above), S slots of a block, D width.
"""

import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from cdlm import data, files
from cdlm.decode import DecodeConfig, Step, decode, slots
from cdlm.families.base import DiffusionLM, Facts, NotFinite
from cdlm.families.decoder import read_json
from cdlm.processes import ALONE, Processes

FORMAT_VERSION = 1
SCHEMA = {
    "id": "number of the trajectory",
    "example": "row of the prompt file",
    "group": "task of the prompt",
    "temperature": "sampling temperature of the teacher",
    "seed": "seed of its sampling",
    "prompt_ids": "tokens of the prompt, not padded",
    "answer_ids": "tokens of the reference answer, without an end token",
    "tokens": "final token of each of the N slots; the mask token where decoding had stopped",
    "step": "slots filled before the step that revealed each slot, -1 where decoding had stopped",
    "confidence": "probability of the token when it was revealed; null where it is not known, as are temperature and seed",
    "decoded": "slots that were filled, up to the end of a block",
    "stop": "eos, or length when no end token came within the budget",
    "screened": "why the rule of the recipe calls it degenerate, or empty",
}


@dataclass(frozen=True)
class Screen:
    """Which trajectories are degenerate (a student trained on repetitions learns to repeat).

    ngram, repeats: an n-gram of that many tokens that occurs more than `repeats` times in the answer.
    drop: leave them out of training; False only counts them. correct_only: also drop wrong answers.
    """

    ngram: int = 8
    repeats: int = 3
    drop: bool = True
    correct_only: bool = False

    def reason(self, answer_ids: list[int], stop: str, right: bool) -> str:
        """"" for a sound trajectory, else the first reason that applies."""
        if stop != "eos":
            return "no_eos"
        if not answer_ids:
            return "empty"
        grams = Counter(tuple(answer_ids[i : i + self.ngram]) for i in range(len(answer_ids) - self.ngram + 1))
        if grams and max(grams.values()) > self.repeats:
            return "repeated_ngram"
        if self.correct_only and not right:
            return "wrong_answer"
        return ""


@dataclass(frozen=True)
class Trajectory:
    """One decoding of the teacher. tokens, step, confidence: [N]; hidden: bf16 [N, D]. What an imported one lacks is None."""

    id: int
    example: int
    group: str
    temperature: float | None
    seed: int | None
    prompt_ids: list[int]
    answer_ids: list[int]
    tokens: Tensor
    step: Tensor
    confidence: Tensor | None
    decoded: int
    stop: str
    screened: str
    hidden: Tensor | None


def state(tokens_N: Tensor, step_N: Tensor, k: int, mask_token_id: int) -> Tensor:
    """The answer before step k, [N]: slots revealed at a step below k, the others masked."""
    return torch.where((step_N >= 0) & (step_N < k), tokens_N, mask_token_id)


def replay(trajectory: Trajectory, mask_token_id: int) -> Iterator[Tensor]:
    """Every state of a trajectory in order, from all masked to the last, each [N]."""
    for k in range(trajectory.decoded + 1):
        yield state(trajectory.tokens, trajectory.step, k, mask_token_id)


def hidden_bytes(trajectories: int, slots: int, width: int) -> int:
    """Bytes of the stored hidden rows, 2 a value. (The paper: 15k x 256 x 3584 x 2 = 25.6 GiB for a 7B model.)"""
    return trajectories * slots * width * 2


class Recorder:
    """Decoding callback that keeps, for each slot, when and from which hidden row it was revealed."""

    def __init__(self, batch: int, slots: int, width: int):
        self.step = torch.full((batch, slots), -1, dtype=torch.int16)
        self.confidence = torch.zeros(batch, slots)
        self.hidden = torch.zeros(batch, slots, width, dtype=torch.bfloat16)
        self.taken = torch.zeros(batch, dtype=torch.int16)

    def __call__(self, step: Step) -> None:
        row, place = step.reveal_AS.nonzero(as_tuple=True)
        slot = place + step.first_slot_A[row]
        kept = slot < self.step.shape[1]
        row, place, slot = row[kept], place[kept], slot[kept]
        where = (step.row_A[row].cpu(), slot.cpu())
        self.step[where] = self.taken[where[0]]
        self.confidence[where] = step.confidence_AS[row, place].float().cpu()
        self.hidden[where] = step.hidden_ASD[row, place].to(torch.bfloat16).cpu()
        self.taken[step.row_A.cpu()] += 1


def _hashed(folder: Path) -> list[Path]:
    """The files of a model folder that say what it computes: config, tokenizer, weights."""
    names = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    return sorted([*(folder / name for name in names if (folder / name).is_file()), *folder.glob("*.safetensors")])


def folder_hash(folder: str | Path) -> str:
    """sha256 over the names and contents of a model folder's config, weights and tokenizer; the id itself for a Hub repository."""
    folder = Path(folder)
    if not folder.is_dir():
        return str(folder)
    digest = hashlib.sha256()
    for file in _hashed(folder):
        digest.update(file.name.encode())
        with file.open("rb") as stream:
            while chunk := stream.read(1 << 22):
                digest.update(chunk)
    return digest.hexdigest()


class Hashes:
    """`folder_hash`, each folder read once: again only when a file of it has another size, time or place on disk."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[list[tuple[str, int, int, int]], str]] = {}

    def of(self, folder: str | Path) -> str:
        stats = [(file.name, file.stat()) for file in _hashed(Path(folder))]
        seen = [(name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats]
        if (known := self._known.get(str(folder))) is None or known[0] != seen:
            self._known[str(folder)] = known = (seen, folder_hash(folder))
        return known[1]


def versions() -> dict[str, str]:
    """What ran."""
    import platform

    import transformers

    from cdlm import __version__

    return {"cdlm": __version__, "python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}


def compare(note: Path, request: dict[str, Any], where: Path) -> None:
    """Refuse `where` if the note beside it asks for other values than `request`; the error names each that differs."""
    before = read_json(note) if note.is_file() else {}
    changed = sorted(key for key in {*before, *request} if before.get(key) != request.get(key))
    if changed:
        what = "; ".join(_difference(key, before.get(key), request.get(key)) for key in changed)
        raise ValueError(
            f"{where} holds the result of other values ({what}), says {note}. Take another --out, or remove it to make it again."
        )


def _difference(key: str, before: Any, now: Any) -> str:
    if isinstance(before, dict) and isinstance(now, dict):
        parts = [k for k in {**before, **now} if before.get(k) != now.get(k)]
        return ", ".join(f"{key}.{k}: {before.get(k)!r} there, {now.get(k)!r} now" for k in parts)
    return f"{key}: {before!r} there, {now!r} now"


def claim(folder: Path, note: Path, request: dict[str, Any]) -> None:
    """Mark a folder as belonging to this request, or refuse one that belongs to another."""
    folder.mkdir(parents=True, exist_ok=True)
    if note.is_file():
        compare(note, request, folder)
    else:
        files.write_json(note, request)


def teacher_decoding(facts: Facts, max_new_tokens: int, block_length: int, *, stop_at_eos: bool) -> DecodeConfig:
    """How a teacher decodes for students of this budget and these blocks: one token a step, as the teacher was trained."""
    own = facts.block_length if facts.block_causal else None
    if own is not None and block_length % own:
        raise ValueError(
            f"decode.block_length is {block_length}; the teacher decodes in blocks of {own}, a student's block must be made of whole ones"
        )
    return DecodeConfig(
        max_new_tokens=max_new_tokens, block_length=own or block_length, tokens_per_step=1, block_causal=own is not None,
        use_cache=own is not None, stop_at_eos=stop_at_eos, stop_length=block_length,
    )


def last_slot(block_origin: str, prompt_length: int, max_new_tokens: int, block_length: int) -> int:
    """One past the last answer slot that a student fills: the end of its last block."""
    if block_origin == "prompt_end":
        return max_new_tokens
    tail = prompt_length % block_length
    return -(-(tail + max_new_tokens) // block_length) * block_length - tail


# A batch's trajectories: of each the values of its parquet row, and its tensors, whose first dimension grows where rows are joined.
Collected = list[tuple[dict[str, Any], dict[str, Tensor]]]


def collect(
    model: DiffusionLM,
    examples: list[data.Example],
    folder: Path,
    *,
    config: DecodeConfig,
    temperatures: list[float],
    batch_size: int,
    shard_size: int,
    seed: int,
    screen: Screen,
    right: Callable[[data.Example, list[int]], bool],
    request: dict[str, Any],
    say: Callable[[str], None] = print,
    processes: Processes = ALONE,
    batch_of: Callable[..., Collected] | None = None,
    schema: dict[str, str] = SCHEMA,
) -> dict[str, Any]:
    """Decode every prompt at every temperature into `folder`, and return the manifest. Goes on at the first shard that is missing or is
    not what was written.

    `config` gives the student's budget and blocks. The teacher decodes one token a step: under full attention in the student's blocks, or,
    if it is a block diffusion model, as such in blocks of its own length, which must divide the student's. A shard's content
    depends on the request alone, so a run that was killed ends with the same files as one that was not.
    right: whether the tokens of an answer are a right one, for the screen.
    processes: whole shards are dealt out to them, so their number changes no file; the main one writes the manifest.
    batch_of: decodes a batch, with the arguments of `_decode_batch`; schema: what its rows hold. (Another kind of trajectory: canvases.py.)
    """
    asked = config
    if batch_of is None:
        batch_of = _decode_batch
        asked = teacher_decoding(model.facts, config.max_new_tokens, config.block_length, stop_at_eos=config.stop_at_eos)
    with processes.main_first():
        if processes.main:
            claim(folder, folder / "collection.json", request)
    jobs = [(example, temperature) for temperature in temperatures for example in examples]
    shards = [list(enumerate(jobs))[i : i + shard_size] for i in range(0, len(jobs), shard_size)]
    names = [f"shard-{i:05d}" for i in range(len(shards))]
    # All have looked before the first of them writes, and deal out what the main one saw.
    todo = processes.agreed(lambda: [i for i, name in enumerate(names) if not is_whole(folder, name, say)])
    if len(todo) < len(shards):
        say(f"collect: {len(shards) - len(todo)} of {len(shards)} shards are there already")
    todo = processes.share(todo)
    began = time.monotonic()
    for done, i in enumerate(todo, start=1):
        rows: Collected = []
        # Prompts of similar length share a batch, so little is computed for padding.
        order = sorted(shards[i], key=lambda job: (job[1][1], len(job[1][0].prompt_ids)))
        for start in range(0, len(order), batch_size):
            rows += batch_of(model, order[start : start + batch_size], asked, config, seed, screen, right)
        rows.sort(key=lambda row: row[0]["id"])
        joined = {name: torch.cat([tensors[name] for _, tensors in rows]) for name in rows[0][1]}
        write_shard(folder, names[i], [row for row, _ in rows], joined, schema)
        spent = time.monotonic() - began
        count = sum(len(shards[j]) for j in todo[:done])
        left = spent / count * (sum(len(shards[j]) for j in todo) - count)
        rate = f"{processes.count * count / spent:.1f} trajectories/s" + (f" in {processes.count} processes" if processes.count > 1 else "")
        say(f"collect: shard {i + 1} of {len(shards)}, {rate}, about {left:.0f} s left")
    processes.wait()
    if processes.main:
        write_manifest(folder, names, request, screen, schema=schema)
    processes.wait()
    return read_manifest(folder)


def _decode_batch(
    model: DiffusionLM, jobs: list[tuple[int, tuple[data.Example, float]]], config: DecodeConfig, student: DecodeConfig, seed: int,
    screen: Screen, right: Callable[[data.Example, list[int]], bool],
) -> Collected:
    """Trajectories of a batch, hidden rows [1, N, D] beside each."""
    rows: Collected = []
    width = slots(model.facts, student.max_new_tokens, student.block_length)
    config = DecodeConfig(**{**asdict(config), "max_new_tokens": width})  # the student's last block, whole
    for temperature in sorted({t for _, (_, t) in jobs}):
        part = [(number, example) for number, (example, t) in jobs if t == temperature]
        seeds = [data.sample_seed(seed, number) for number, _ in part]
        prompts, valid = data.pad_left([example.prompt_ids for _, example in part], model.facts.pad_token_id)
        recorder = Recorder(len(part), width, model.hidden_size)
        try:
            out = decode(
                model, prompts.to(model.device), valid.to(model.device),
                DecodeConfig(**{**asdict(config), "temperature": temperature}), callback=recorder, seeds=seeds,
            )
        except NotFinite as error:
            names = ", ".join(f"{part[row][0]} (question {part[row][1].index})" for row in error.rows)
            raise FloatingPointError(f"collect: of trajectory {names}: {error}. The shards before are kept") from None
        final = out.filled_BM[:, :width].cpu()
        for row, (number, example) in enumerate(part):
            last = last_slot(model.facts.block_origin, len(example.prompt_ids), student.max_new_tokens, student.block_length)
            final[row, last:] = model.facts.mask_id
            for stored, nothing in ((recorder.step, -1), (recorder.confidence, 0), (recorder.hidden, 0)):
                stored[row, last:] = nothing
            within = final[row, : min(last, student.max_new_tokens, out.decoded_tokens[row])].tolist()
            ends = [i for i, token in enumerate(within) if token in model.facts.eos_token_ids]
            answer_ids, stop = (within[: ends[0]], "eos") if ends else (within, "length")
            rows.append(({
                "id": number, "example": example.index, "group": example.group, "temperature": temperature, "seed": seeds[row],
                "prompt_ids": example.prompt_ids, "answer_ids": example.answer_ids, "tokens": final[row].tolist(),
                "step": recorder.step[row].tolist(), "confidence": recorder.confidence[row].tolist(),
                "decoded": min(out.decoded_tokens[row], last), "stop": stop,
                "screened": screen.reason(answer_ids, stop, right(example, answer_ids)),
            }, {"hidden": recorder.hidden[row : row + 1]}))
    return rows


def is_whole(folder: Path, name: str, say: Callable[[str], None]) -> bool:
    """Whether a shard is there and is what was written, by its checksums. Of one that is there and damaged, or has no checksums, it is
    said that it is made again: its content depends on the request alone."""
    sums = folder / f"{name}.sha256"
    if not (folder / f"{name}.parquet").is_file():
        return False
    wrong = files.faults(sums) if files.is_there(sums) else {str(sums): "missing: without checksums it can't be told from a damaged shard"}
    if not wrong and (named := set(files.read_sums(sums))) != (own := shard_files(folder, name)):
        wrong = {str(sums): f"damaged: it names {', '.join(sorted(named)) or 'nothing'}, not {', '.join(sorted(own))}"}
    for path, why in wrong.items():
        say(f"collect: {path} is {why}. The shard is made again")
    return not wrong


def shard_files(folder: Path, name: str) -> set[str]:
    """The names of a shard's files that are there, its checksums aside; the parquet file's in any case."""
    tensors = f"{name}.safetensors"
    return {f"{name}.parquet", *([tensors] if files.is_there(folder / tensors) else [])}


def _types() -> dict[str, Any]:
    """Arrow's types of what the rows of either kind hold."""
    import pyarrow as pa

    ints, floats = pa.list_(pa.int32()), pa.list_(pa.float32())
    return {
        "id": pa.int64(), "example": pa.int64(), "group": pa.string(), "temperature": pa.float32(), "seed": pa.int64(),
        "prompt_ids": ints, "answer_ids": ints, "tokens": ints, "step": pa.list_(pa.int16()), "confidence": floats,
        "decoded": pa.int32(), "stop": pa.string(), "screened": pa.string(),
        "steps": ints, "left": ints, "temperatures": floats, "canvas": ints, "accepted": pa.list_(pa.bool_()), "argmax": ints,
    }


def write_shard(
    folder: Path, name: str, rows: list[dict[str, Any]], tensors: dict[str, Tensor] | None, schema: dict[str, str] = SCHEMA
) -> None:
    """A shard whole, parquet last; without tensors there is no safetensors file. rows: values by the names of the schema."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    types = _types()
    table = pa.Table.from_pylist(rows, schema=pa.schema([(name, types[name]) for name in schema]))
    written: dict[str, Path] = {}
    if tensors:
        written[f"{name}.safetensors"] = folder / f"{name}.safetensors"
        with files.replacing(folder / f"{name}.safetensors") as partial:
            save_file({name: value.contiguous() for name, value in tensors.items()}, partial, {"format_version": str(FORMAT_VERSION)})
    with files.replacing(folder / f"{name}.parquet") as partial:
        pq.write_table(table, partial)
        files.write_sums(folder / f"{name}.sha256", {**written, f"{name}.parquet": partial})


def write_manifest(
    folder: Path, names: list[str], request: dict[str, Any], screen: Screen, *, hidden: bool = True, schema: dict[str, str] = SCHEMA
) -> dict[str, Any]:
    """Count what the shards hold, and write and return the manifest: the folder is finished."""
    import pyarrow.parquet as pq

    reasons: Counter[str] = Counter()
    total, slots = 0, 0
    stated: dict[str, Path | bytes | str] = {"collection.json": folder / "collection.json"}
    for name in names:
        stated |= files.read_sums(folder / f"{name}.sha256")
        table = pq.read_table(folder / f"{name}.parquet", columns=["screened", "decoded"])
        reasons.update(reason for reason in table["screened"].to_pylist() if reason)
        slots += sum(table["decoded"].to_pylist())
        total += table.num_rows
    manifest = {
        "format_version": FORMAT_VERSION,
        "schema": schema,
        "request": request,
        "shards": names,
        "trajectories": total,
        "decoded_slots": slots,
        "screened": dict(sorted(reasons.items())),
        "kept": total - sum(reasons.values()) if screen.drop else total,
        "hidden": hidden,
        "bytes": sum((folder / file).stat().st_size for file in stated if not file.endswith(".json")),
        "request_hash": hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest(),
        "versions": versions(),
    }
    for name in names:
        stated[f"{name}.sha256"] = folder / f"{name}.sha256"
    stated["manifest.json"] = files.json_text(manifest).encode()
    files.write_sums(folder / files.SUMS, stated)
    files.write_json(folder / "manifest.json", manifest)
    return manifest


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a finished folder of this format version, or a ValueError that says what is there instead."""
    file = folder / "manifest.json"
    if not file.is_file():
        raise ValueError(f"{folder} has no manifest.json: collecting is not finished there")
    manifest = read_json(file)
    version = manifest.get("format_version")
    if version != FORMAT_VERSION:
        raise ValueError(f"{folder} has format version {version}; this package reads version {FORMAT_VERSION}")
    names = manifest.get("shards")
    if not isinstance(names, list) or not all(isinstance(name, str) and re.fullmatch(r"shard-\d{5,}", name) for name in names):
        raise ValueError(f"{file} has shards {str(names)[:80]}; each is a name of the form shard-00000, a file in {folder}")
    if not names or len(set(names)) < len(names):
        raise ValueError(f"{file} has shards {str(names)[:80]}; there is at least one, and each is named once")
    for key, kind in {"request": dict, "request_hash": str, "kept": int, "trajectories": int, "schema": dict}.items():
        if not isinstance(manifest.get(key), kind):
            raise ValueError(f"{file} has {key} {str(manifest.get(key))[:80]}; it is damaged: collect again, or import again")
    if not isinstance(manifest["request"].get("decode", {}), dict) or not isinstance(manifest.get("hidden", True), bool):
        raise ValueError(f"{file}: request.decode must be an object, hidden true or false; it is damaged: collect again, or import again")
    return manifest


def longest_prompt(folder: Path) -> int:
    """Tokens of the longest prompt among the trajectories of a finished folder."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    names = read_manifest(folder)["shards"]
    return max(
        pc.max(pc.list_value_length(pq.read_table(folder / f"{name}.parquet", columns=["prompt_ids"])["prompt_ids"])).as_py()
        for name in names
    )


@dataclass(frozen=True)
class Columns:
    """Rows of a shard in Arrow's columns, to look at all of them at once. places: of each its place in the file, [n]."""

    file: Path
    table: Any
    places: Any

    def lengths(self, name: str) -> Any:
        """Of each list of a column, [n]."""
        import pyarrow.compute as pc

        return pc.list_value_length(self.table[name]).to_numpy()

    def values(self, name: str) -> Any:
        """Those of all lists, one after another."""
        import pyarrow.compute as pc

        return pc.list_flatten(self.table[name]).to_numpy()

    def refuse(self, wrong: Any, words: str) -> None:
        """A ValueError that names the first row that is wrong, [n]."""
        if wrong.any():
            raise ValueError(f"{self.file}, row {self.places[int(wrong.argmax())] + 1}: {words}")

    def require_length(self, name: str, wanted: Any, words: str) -> None:
        """Each list of a column has as many values as wanted."""
        lengths = self.lengths(name)
        if (wrong := lengths != wanted).any():
            self.refuse(wrong, f"{name} has {lengths[int(wrong.argmax())]} values; {words}")

    def require_within(self, name: str, least: int, most: int) -> None:
        """All values of a column of lists are among these."""
        import pyarrow.compute as pc

        values = self.values(name)
        bad = (values < least) | (values > most)
        if bad.any():
            row = pc.list_parent_indices(self.table[name].combine_chunks())[int(bad.argmax())].as_py()
            raise ValueError(
                f"{self.file}, row {self.places[row] + 1}: {name} holds {values[int(bad.argmax())]}; allowed: {least} to {most}"
            )


def read_columns(file: Path, schema: dict[str, str], *, kept: bool) -> tuple[int, Columns]:
    """How many rows a shard's parquet file has, and its rows, or those that the rule of the recipe kept. A ValueError where a column of
    the schema is missing, is of another kind or lacks a value that it must have."""
    import numpy
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(file)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{file} can't be read: {error}") from None
    types = _types()
    if not table.num_rows:
        raise ValueError(f"{file} holds no rows")
    for name in schema:
        if table.column_names.count(name) != 1:
            raise ValueError(f"{file} has no column {name}; it needs {', '.join(schema)}")
        if (there := _kind(table[name].type)) != (wanted := _kind(types[name])):
            raise ValueError(f"{file}: column {name} holds {there}; it must hold {wanted}")
        lists = pa.types.is_list(types[name])
        if name not in ("temperature", "seed", "confidence") and table[name].null_count:
            raise ValueError(f"{file}, row {pc.index(pc.is_null(table[name]), True).as_py() + 1}: {name} is null")
        if lists and pc.list_flatten(table[name]).null_count:
            raise ValueError(f"{file}: column {name} has lists that hold null")
    if extra := sorted(set(table.column_names) - set(schema)):
        raise ValueError(f"{file} has a column {extra[0]}, which is not known; known: {', '.join(schema)}")
    places = pc.equal(table["screened"], "").to_numpy().nonzero()[0] if kept else numpy.arange(table.num_rows)
    return table.num_rows, Columns(file, table.take(pa.array(places)), places)


def _kind(kind: Any) -> str:
    """A type of Arrow in words; how wide its numbers are does not matter."""
    from pyarrow import types

    if types.is_list(kind):
        return f"lists of {_kind(kind.value_type)}"
    words = {"whole numbers": types.is_integer, "numbers": types.is_floating, "truth values": types.is_boolean, "text": types.is_string}
    return next((word for word, of in words.items() if of(kind)), str(kind))


def require_shape(stored: Any, file: Path, name: str, shape: list[int | None], dtype: str) -> list[int]:
    """The shape of a tensor in an open safetensors file; a ValueError where it is not there or is another one (None: any size)."""
    if name not in stored.keys():
        raise ValueError(f"{file} has no tensor {name}")
    found = stored.get_slice(name)
    there = found.get_shape()
    if found.get_dtype() != dtype or len(there) != len(shape) or any(b is not None and a != b for a, b in zip(there, shape, strict=True)):
        asked = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{file}: {name} is {found.get_dtype()} {there}; it must be {dtype} [{asked}]")
    return there


def check_folder(folder: Path, *, vocabulary: int, slots: int, width: int) -> None:
    """A ValueError, with file and row, where a finished folder holds what no teacher with such a vocabulary, hidden width and number of
    slots did. Looks at the rows that are trained on, whole columns at a time, and of hidden rows at their shape alone."""
    manifest = read_manifest(folder)
    drop = manifest["kept"] < manifest["trajectories"]
    for name in manifest["shards"]:
        count, rows = read_columns(folder / f"{name}.parquet", SCHEMA, kept=drop)
        for column in ("prompt_ids", "answer_ids", "tokens"):
            rows.require_within(column, 0, vocabulary - 1)
        rows.refuse(rows.lengths("prompt_ids") < 1, "prompt_ids is empty")
        rows.refuse(rows.lengths("answer_ids") > slots, f"answer_ids has more than {slots} values")
        for column in ("tokens", "step"):
            rows.require_length(column, slots, f"there are {slots} slots")
        known = rows.table["confidence"].is_valid()
        Columns(rows.file, rows.table.filter(known), rows.places[known.to_numpy()]).require_length(
            "confidence", slots, f"there are {slots} slots"
        )
        rows.require_within("step", -1, slots - 1)
        rows.refuse(~(rows.values("step").reshape(-1, slots) == 0).any(axis=1), "step has no 0; the first step fills a slot")
        decoded = rows.table["decoded"].to_numpy()
        rows.refuse((decoded < 1) | (decoded > slots), f"decoded must be between 1 and {slots}")
        if manifest.get("hidden", True):
            file = folder / f"{name}.safetensors"
            with open_tensors(file) as stored:
                require_shape(stored, file, "hidden", [count, slots, width], "BF16")


def open_tensors(file: Path) -> Any:
    """An open safetensors file of a shard, or a ValueError."""
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} can't be read ({error}); remove it and collect again") from None


class Rows:
    """The rows of a finished folder, in Arrow's columns: as Python's objects they would take many times as much memory, in each process.

    places: of each row its shard, and its row there. Tensors beside the rows are read from disk when they are asked for.
    """

    def __init__(self, folder: Path, *, screened: bool = False):
        """screened: also give the trajectories that the recipe's rule dropped."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.manifest = read_manifest(folder)
        drop = self.manifest["kept"] < self.manifest["trajectories"] and not screened
        self.places: list[tuple[int, int]] = []
        self._files = [folder / f"{name}.safetensors" for name in self.manifest["shards"]]
        self._open: dict[int, Any] = {}
        tables = []
        for shard, name in enumerate(self.manifest["shards"]):
            table = pq.read_table(folder / f"{name}.parquet")
            kept = [place for place, why in enumerate(table["screened"].to_pylist()) if not (drop and why)]
            tables.append(table.take(pa.array(kept, pa.int64())))
            self.places += [(shard, place) for place in kept]
        self._table = pa.concat_tables(tables).combine_chunks()

    def __len__(self) -> int:
        return self._table.num_rows

    def row(self, index: int, tensors: dict[str, torch.dtype]) -> dict[str, Any]:
        """Values by the names of the schema. tensors: name -> dtype of those lists that are given as tensors."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        found: dict[str, Any] = {}
        for name in self._table.column_names:
            value = self._table[name][index % len(self)]
            if name in tensors and value.is_valid:
                found[name] = torch.tensor(value.values.to_numpy(zero_copy_only=False), dtype=tensors[name])
            else:
                found[name] = value.as_py()
        return found

    def stored(self, shard: int) -> Any:
        """The open safetensors file of a shard."""
        if shard not in self._open:
            self._open[shard] = open_tensors(self._files[shard])
        return self._open[shard]


class Trajectories(Rows):
    """A finished folder, as a sequence of `Trajectory`. Hidden rows are read from disk one trajectory at a time."""

    @property
    def has_hidden(self) -> bool:
        return self.manifest.get("hidden", True)

    def hidden(self, index: int) -> Tensor | None:
        if not self.has_hidden:
            return None
        shard, place = self.places[index]
        return self.stored(shard).get_slice("hidden")[place]

    def __getitem__(self, index: int) -> Trajectory:
        row = self.row(index, {"tokens": torch.long, "step": torch.long, "confidence": torch.float32})
        return Trajectory(**row, hidden=self.hidden(index))
