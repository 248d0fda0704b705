"""Trajectories that others published, as a folder that `cdlm train` reads. Knows their file formats; knows no loss and no decoder.

d3llm: the files of d3LLM (arXiv 2601.07568), among them the Hub's d3LLM/trajectory_data_llada_32 and trajectory_data_dream_32.
    Read in duterscmy/d3LLM, a copy of hao-ai-lab/d3LLM, at commit 95581cf: d3llm/d3llm_LLaDA/distill_1_data_prepare/
    d3llm_llada_generate_partly.py and d3llm_llada_generate_multinode.py, their Dream counterparts, and distill_2_training/
    d3llm_llada_train.py. A row: idx, question, prompt_ids, trajectory, final_output, generated_text, llm_answer, gt_answer,
    is_correct (and nfe for Dream). trajectory: the whole sequence, prompt and slots, after each step, each a list of token ids;
    the all-masked start is not written down. One token a step, block by block. Dream's is_correct is always true.
tad: the files of TAD (arXiv 2605.09536). Read in BHmingyang/TAD at commit 140e820: prepare/llada_gen_math_traj.py,
    dream_gen_math_traj.py, llada_gen_code_traj.py and LLaDA/train_llada.py. A JSONL line: question, trajectory {"step0": ids of
    the slots, ...}, and for mathematics prompt, answer_gt, output_text, for code solution_ref, teacher_text; the last line is a
    summary. Step 0 is all masked (LLaDA). Only right answers are kept. The teacher was shown the reference answer in its prompt:
    the student's prompt here is the question without it, in the model's chat template.
Assumed, not seen: the published files themselves (only the code that writes and reads them); that the Hub's data sets have the
    columns which d3llm_llada_generate_multinode.py writes; that a TAD file whose prompt holds no reference answer, as its
    training code needs, means that prompt for the student; that Dream's history in TAD is one state a step.

A row is turned into final tokens and steps (see trajectories.py): the step of a slot is the number of slots filled before the
state in which it first stands. A row that can't be trained on is screened, with the first reason of SCREENED that applies; it
stays in the folder as a row without tokens, and is counted. These files hold no hidden rows and no confidences. Nor do they hold
reference answers for equation 6: the teacher's own answer stands in for them, unless a column is named.
Shapes: T states, N slots.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cdlm import data, families, files, trajectories

ORDERS = ("teacher", "block")
SCREENED = {
    "summary_line": "a line of statistics, no trajectory",
    "no_states": "no state, or states without slots or of unequal length",
    "no_prompt": "no prompt without the reference answer",
    "long_prompt": "a prompt of more tokens than --max-prompt-tokens",
    "other_prompt": "a state that starts with other tokens than the prompt",
    "short_budget": "fewer slots than the budget",
    "no_mask": "no masked slot in the first state",
    "mask_left": "a slot that is still masked in the last state",
    "token_changed": "a slot that was revealed and later masked again or changed",
    "not_block_by_block": "a slot revealed before all blocks in front of it were full",
    "no_reference": "no text under --answer-key, or one longer than the budget",
}
REFERENCE = "\nReference Answer: "  # how TAD's prompts begin what only the teacher may see


@dataclass(frozen=True)
class Record:
    """A row of a published file: prompt tokens, the slots' states in order, and whether the file calls the answer right."""

    prompt_ids: list[int]
    states: list[list[int]]
    right: bool = True


Tokens = Callable[[str, bool], list[int]]  # text, and whether to wrap it in the chat template


def _column(row: dict[str, Any], key: str, kind: type, where: str) -> Any:
    if not isinstance(row.get(key), kind):
        raise ValueError(f"{where} has no {kind.__name__} under {key!r}; its columns are {', '.join(map(str, row))}")
    return row[key]


def read_d3llm(row: dict[str, Any], tokens: Tokens, where: str) -> Record | str:
    """A row of d3LLM's format, or why it can't be used."""
    prompt, states = _column(row, "prompt_ids", list, where), _column(row, "trajectory", list, where)
    if any(state[: len(prompt)] != prompt for state in states):
        return "other_prompt"
    right = row.get("is_correct")
    if right is not None and not isinstance(right, bool):
        raise ValueError(f"{where} has is_correct {right!r}; it must be true, false or missing")
    return Record(prompt, [state[len(prompt) :] for state in states], right is not False)


def read_tad(row: dict[str, Any], tokens: Tokens, where: str) -> Record | str:
    """A line of TAD's format, or why it can't be used."""
    if "summary" in row and "trajectory" not in row:
        return "summary_line"
    trajectory = _column(row, "trajectory", dict, where)
    if not all(re.fullmatch(r"step\d+", key) for key in trajectory):
        raise ValueError(f"{where}: the states of a trajectory are named step0, step1, ...; here {', '.join(trajectory)}")
    keys = sorted(trajectory, key=lambda key: int(key.removeprefix("step")))
    states = [trajectory[key] for key in keys if trajectory[key] is not None]  # a table holds null for steps that others have
    prompt = row.get("prompt")
    if isinstance(prompt, str) and REFERENCE not in prompt:
        return Record(tokens(prompt, False), states)
    question = row.get("question")
    if not isinstance(question, str):
        return "no_prompt"
    return Record(tokens(question.partition(REFERENCE)[0].removeprefix("Question: "), True), states)


FORMATS = {"d3llm": read_d3llm, "tad": read_tad}


def steps_of(states_TN: Tensor, mask_token_id: int, block_length: int, order: str) -> Tensor | str:
    """The step of every slot [N], from the states of a decoding in order; or the reason why it is none to train on.

    A slot is revealed in the first state where it is not masked. Its step is the number of slots that were revealed in earlier
    states, so slots revealed together share a step. order "block" takes blocks in turn and keeps the order within each: a
    decoding that did not go block by block becomes one that could have.
    """
    revealed_TN = states_TN != mask_token_id
    if bool(revealed_TN[0].all()):
        return "no_mask"
    if not bool(revealed_TN[-1].all()):
        return "mask_left"
    if bool((revealed_TN[:-1] & (states_TN[:-1] != states_TN[1:])).any()):
        return "token_changed"
    when_N = revealed_TN.int().argmax(dim=0)
    block_N = torch.arange(when_N.shape[0]) // block_length
    if order == "block":
        when_N = when_N + block_N * states_TN.shape[0]
    step_N = (when_N[None, :] < when_N[:, None]).sum(dim=1)
    return step_N if torch.equal(step_N // block_length, block_N) else "not_block_by_block"


@dataclass(frozen=True)
class Importing:
    """What to make of a file. max_new_tokens: the budget, None for that of the first row; of a longer row the first blocks are
    taken. block_length must divide it. limit: read so many rows. answer_key: a column with the text of a reference answer."""

    format: str
    block_length: int = 32
    max_new_tokens: int | None = None
    order: str = "teacher"
    answer_key: str | None = None
    max_prompt_tokens: int = 512
    limit: int | None = None
    correct_only: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (("format", tuple(FORMATS)), ("order", ORDERS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed: {', '.join(allowed)}")
        for name in ("block_length", "max_new_tokens", "max_prompt_tokens", "limit"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")


def _source(value: str) -> tuple[Iterator[dict[str, Any]], str]:
    """Rows, and what names them exactly: a commit of the Hub, or sha256 of the file, or of a folder's files."""
    if data.is_hub(value):
        rows, found = data.load_hub(data.parse_hub(value, "train"))
        return iter(rows), found.commit
    path = Path(value)
    digest = hashlib.sha256()
    for file in sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path] if path.is_file() else []:
        with file.open("rb") as stream:
            while chunk := stream.read(1 << 22):
                digest.update(chunk)
    return data.stream_rows(path), digest.hexdigest()


def _whole_numbers(values: list[Any], dimensions: int, what: str) -> Tensor:
    """Token ids as a tensor, or a ValueError: nothing is rounded, and true is no token."""
    try:
        found = torch.tensor(values)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{what} holds something else than token ids: {error}") from None
    if found.numel() and (found.dtype != torch.long or found.dim() != dimensions):
        raise ValueError(f"{what} holds something else than token ids: {str(values)[:80]}")
    return found.long()


class _Reader:
    """Turns rows into rows of a shard. The first row decides the budget, and whether the mask token is the model's."""

    def __init__(self, asked: Importing, source: str, model: str, facts: families.Facts, vocabulary: int, tokenizer: Any):
        self.asked, self.source, self.model, self.facts, self.vocabulary = asked, source, model, facts, vocabulary
        self.tokenizer, self.budget, self.checked = tokenizer, asked.max_new_tokens, False
        self.screen = trajectories.Screen(correct_only=asked.correct_only)

    def reference(self, text: str) -> list[int]:
        """Tokens of a reference answer; the text of a special token is text in it."""
        if unknown := data.unknown_text(self.tokenizer, text):
            raise ValueError(f"the tokenizer does not know {unknown!r} in {text!r}")
        return data.text_ids(self.tokenizer, text)

    def tokens(self, text: str, chat_template: bool) -> list[int]:
        """Tokens of a prompt: of a question, wrapped; or of one that its publisher wrapped, in which special tokens are tokens."""
        if unknown := data.unknown_text(self.tokenizer, text, special_tokens=not chat_template):
            raise ValueError(f"the tokenizer does not know {unknown!r} in {text!r}")
        if chat_template:
            return data.prompt_ids(self.tokenizer, text, chat_template=True)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def row(self, number: int, row: dict[str, Any]) -> dict[str, Any]:
        """One row by the names of trajectories.SCHEMA."""
        try:
            found = self._read(number, row)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            where = f"{self.source}, row {number + 1}"
            raise ValueError(str(error) if str(error).startswith(where) else f"{where}: {error}") from None
        empty = {"prompt_ids": [], "answer_ids": [], "tokens": [], "step": [], "decoded": 0, "stop": "", "screened": found}
        return {
            "id": number, "example": number, "group": "all", "temperature": None, "seed": None, "confidence": None,
            **(empty if isinstance(found, str) else found),
        }

    def _read(self, number: int, row: dict[str, Any]) -> dict[str, Any] | str:
        where = f"{self.source}, row {number + 1}"
        record = FORMATS[self.asked.format](row, self.tokens, where)
        if isinstance(record, str):
            return record
        if not record.states or not record.states[0] or len({len(state) for state in record.states}) != 1:
            return "no_states"
        states_TN = _whole_numbers(record.states, 2, f"{where}: a state")
        _whole_numbers([record.prompt_ids], 2, f"{where}: the prompt")
        if not record.prompt_ids:
            return "no_prompt"
        self._fits(record, states_TN, where)
        if not 0 < len(record.prompt_ids) <= self.asked.max_prompt_tokens:
            return "long_prompt"
        assert self.budget is not None
        if states_TN.shape[1] < self.budget:
            return "short_budget"
        states_TN = states_TN[:, : self.budget]
        step_N = steps_of(states_TN, self.facts.mask_id, self.asked.block_length, self.asked.order)
        if isinstance(step_N, str):
            return step_N
        tokens = states_TN[-1].tolist()
        end = next((i for i, token in enumerate(tokens) if token in self.facts.eos_token_ids), None)
        answer, stop = tokens[:end], "length" if end is None else "eos"
        reference = answer
        if self.asked.answer_key is not None:
            text = row.get(self.asked.answer_key)
            reference = self.reference(text) if isinstance(text, str) else []
            if not 0 < len(reference) < self.budget:
                return "no_reference"
        return {
            "prompt_ids": record.prompt_ids, "answer_ids": reference, "tokens": tokens, "step": step_N.tolist(), "decoded": self.budget,
            "stop": stop, "screened": self.screen.reason(answer, stop, record.right),
        }

    def _fits(self, record: Record, states_TN: Tensor, where: str) -> None:
        """The row's token ids are the model's, or a ValueError that names the one that is not."""
        ids = torch.cat([torch.tensor(record.prompt_ids, dtype=torch.long), states_TN.flatten()])
        for wrong in (int(ids.max()), int(ids.min())):
            if not 0 <= wrong < self.vocabulary:
                raise ValueError(f"{where} holds token {wrong}; the vocabulary of {self.model} has {self.vocabulary} tokens")
        if not self.checked:
            mask, (common, _) = self.facts.mask_id, Counter(states_TN[0].tolist()).most_common(1)[0]
            if not bool((states_TN[0] == mask).any()):
                raise ValueError(f"{where} masks its slots with token {common}; the mask token of {self.model} is {mask}")
            self.checked = True
            self.budget = self.budget or states_TN.shape[1]
            if self.budget % self.asked.block_length:
                raise ValueError(f"block_length {self.asked.block_length} does not divide the budget, {self.budget} slots")


def import_folder(
    asked: Importing, source: str, target: Path, model: str, *, family: str | None = None, shard_size: int = 256,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Read a published file into `target`, a folder of trajectories, and return its manifest.

    source: a .jsonl, .json or .parquet file, a folder that Dataset.save_to_disk wrote, or hub:USER/NAME@REVISION[:SPLIT].
    model: the folder or Hub repository that is to be trained; its config and tokenizer are read, no weights.
    `target` appears when all is read; a ValueError leaves nothing behind. One at a time writes it.
    """
    if target.exists():
        raise ValueError(f"{target} is there already; name a folder that does not exist yet")
    with files.locked_place(target):
        return _import(asked, source, target, model, family, shard_size, say)


def _import(
    asked: Importing, source: str, target: Path, model: str, family: str | None, shard_size: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """`import_folder` for the one that holds the lock."""
    config = families.read_config(model)
    facts = families.facts_of(model, config, families.find(config, family))
    if facts.block_origin != "prompt_end":
        raise ValueError(f"{model} counts blocks from position 0; the trajectories of {asked.format} count them from the prompt's end")
    vocabulary = config.get("vocab_size")
    if not isinstance(vocabulary, int):
        raise ValueError(f"config.json of {model} has vocab_size {vocabulary!r}; it must be a whole number")
    rows, source_hash = _source(source)
    reader = _Reader(asked, source, model, facts, vocabulary, families.load_tokenizer(model, facts))
    with files.new_folder(target) as partial:
        names: list[str] = []
        waiting: list[dict[str, Any]] = []

        def write() -> None:
            names.append(f"shard-{len(names):05d}")
            trajectories.write_shard(partial, names[-1], waiting, None)
            say(f"import: {waiting[-1]['id'] + 1} rows read")
            waiting.clear()

        for number, row in enumerate(rows):
            if number == asked.limit:
                break
            waiting.append(reader.row(number, row))
            if len(waiting) == shard_size:
                write()
        if waiting:
            write()
        if not names:
            raise ValueError(f"{source} holds no rows")
        if reader.budget is None:
            raise ValueError(f"no row of {source} is a trajectory")
        request = {
            **asdict(asked), "source": source, "source_hash": source_hash, "teacher": trajectories.folder_hash(model), "family": family,
            "mask_token_id": facts.mask_id, "screen": asdict(reader.screen),
            "decode": {"max_new_tokens": reader.budget, "block_length": asked.block_length},
        }
        files.write_json(partial / "collection.json", json.loads(json.dumps(request)))
        manifest = trajectories.write_manifest(partial, names, request, reader.screen, hidden=False)
        if manifest["kept"] == 0:
            raise ValueError(f"none of {manifest['trajectories']} rows of {source} can be trained on; screened: {manifest['screened']}")
    say(f"import: {manifest['kept']} of {manifest['trajectories']} trajectories kept; screened: {manifest['screened'] or 'none'}")
    return manifest
