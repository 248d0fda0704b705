"""How text becomes rows of tokens and batches. Knows files, columns and tokenizers; knows no model and no loss.

Shapes: B rows, P prompt tokens (left padded), N answer slots.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Example:
    """One question: its place in the file, its group (a task name), its text and its tokens.

    answer_ids holds the reference answer without an end-of-sequence token. accept: a regular expression that the whole text of
    a right answer matches, where there are several; None where only the reference answer is right.
    """

    index: int
    group: str
    prompt: str
    answer: str
    prompt_ids: list[int]
    answer_ids: list[int]
    accept: str | None = None

    def is_right(self, text: str) -> bool:
        """Whether the whole text is a right answer, white space at the ends aside."""
        if self.accept is not None:
            return re.fullmatch(self.accept, text.strip()) is not None
        return text.strip() == self.answer.strip()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSONL or parquet file; an error names the line that can't be read."""
    if not path.is_file():
        raise ValueError(f"no data file at {path}")
    if path.suffix == ".parquet":
        import pyarrow.parquet

        rows = pyarrow.parquet.read_table(path).to_pylist()
    elif path.suffix == ".jsonl":
        rows = []
        try:
            text = path.read_text(encoding="utf-8").removesuffix("\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8: {error}") from None
        # Only "\n" ends a line of JSONL; str.splitlines would also split inside a string.
        for number, line in enumerate(text.split("\n") if text else [], start=1):
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number} is not JSON: {error}") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number} is {row!r}; every line is an object with named columns")
            rows.append(row)
    else:
        raise ValueError(f"{path} ends in {path.suffix!r}; allowed: .jsonl, .parquet")
    if not rows:
        raise ValueError(f"{path} holds no rows")
    return rows


def prompt_ids(tokenizer, prompt: str, *, chat_template: bool) -> list[int]:
    """Tokens of a prompt, wrapped as one user turn when `chat_template` says so."""
    if chat_template:
        if tokenizer.chat_template is None:
            raise ValueError("data.chat_template is true, but the tokenizer has no chat template")
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True)
        return tokenizer(prompt, add_special_tokens=False)["input_ids"]
    return tokenizer(prompt)["input_ids"]


def unknown_text(tokenizer, text: str) -> str:
    """The characters of a text that no token stands for, each once: those read as the unknown token, and those that are dropped.

    White space that is dropped does not count: some tokenizers do that on purpose. Where a byte-pair model drops a character it shifts
    the places of the next ones, so what is lost is looked up alone too.
    """

    def lost(part: str) -> list[str]:
        read = tokenizer(part, add_special_tokens=False, return_offsets_mapping=True)
        gone = [not character.isspace() for character in part]
        for token, (start, end) in zip(read["input_ids"], read["offset_mapping"], strict=True):
            gone[start:end] = [token == tokenizer.unk_token_id] * (end - start)
        return [character for character, is_gone in zip(part, gone, strict=True) if is_gone]

    found = dict.fromkeys(lost(text))
    alone = [character for character in dict.fromkeys(text) if lost(character)] if found else []
    return "".join([character for character in found if character in alone] or alone or found)


def read_examples(
    path: Path, tokenizer, *, prompt_key: str, answer_key: str, group_key: str | None, chat_template: bool,
    max_prompt_tokens: int, max_new_tokens: int, accept_key: str | None = None, limit: int | None = None, what: str = "data",
) -> list[Example]:
    """The first `limit` rows of a file as examples, in the file's order.

    accept_key: the column with the pattern of the right answers; a row may have none there, and then its reference alone is right.
    A prompt longer than max_prompt_tokens, an answer that does not fit into max_new_tokens with its end-of-sequence token, an
    unknown token, a missing column or a pattern that is none or does not match the reference is an error that names the row.
    """
    rows = read_rows(path)
    if limit is not None and not 1 <= limit <= len(rows):
        raise ValueError(f"{what} asks for {limit} rows; {path} has {len(rows)}")
    if accept_key is not None and what == "data.test" and not any(accept_key in row for row in rows):
        columns = ", ".join(dict.fromkeys(str(key) for row in rows for key in row))
        raise ValueError(f"no row of {path} has {accept_key!r} (data.accept_key); its columns are {columns}")
    examples = []
    for index, row in enumerate(rows[:limit]):
        where = f"{path}, row {index + 1}"
        for key in (prompt_key, answer_key, *([group_key] if group_key else [])):
            if not isinstance(row.get(key), str):
                raise ValueError(f"{where} has no text under {key!r}; its columns are {', '.join(map(str, row))}")
        prompt = prompt_ids(tokenizer, row[prompt_key], chat_template=chat_template)
        answer = tokenizer(row[answer_key], add_special_tokens=False)["input_ids"]
        if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in prompt + answer:
            raise ValueError(f"{where} holds text the tokenizer does not know: {row[prompt_key]!r} / {row[answer_key]!r}")
        if not 0 < len(prompt) <= max_prompt_tokens:
            raise ValueError(f"{where}: the prompt has {len(prompt)} tokens, allowed are 1 to {max_prompt_tokens} (data.max_prompt_tokens)")
        if len(answer) + 1 > max_new_tokens:
            raise ValueError(f"{where}: answer and end token are {len(answer) + 1} tokens, decode.max_new_tokens is {max_new_tokens}")
        group = row[group_key] if group_key else "all"
        if group_key and group == "all":
            raise ValueError(f"{where} has 'all' under {group_key!r}; that name stands for all groups together in a report")
        example = Example(index, group, row[prompt_key], row[answer_key], prompt, answer, row.get(accept_key) if accept_key else None)
        try:
            if not example.is_right(example.answer):
                raise ValueError(f"{where}: {accept_key!r} is {example.accept!r}, which does not match the answer {example.answer!r}")
        except (re.error, TypeError):
            raise ValueError(f"{where}: {accept_key!r} is {example.accept!r}, which is no regular expression") from None
        examples.append(example)
    return examples


def pad_left(rows: list[list[int]], pad_token_id: int, width: int | None = None) -> tuple[Tensor, Tensor]:
    """Rows of unequal length as ids [B, P] and a mask [B, P], True for real tokens. Padding is known by place, not by id."""
    width = max(len(row) for row in rows) if width is None else width
    ids = torch.full((len(rows), width), pad_token_id, dtype=torch.long)
    valid = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        ids[i, width - len(row) :] = torch.tensor(row, dtype=torch.long)
        valid[i, width - len(row) :] = True
    return ids, valid


def fill_budget(answer_ids: list[int], length: int, eos_token_id: int) -> list[int]:
    """The answer, then end-of-sequence tokens to the end of the budget, as LLaDA's SFT data has them."""
    assert len(answer_ids) < length
    return answer_ids + [eos_token_id] * (length - len(answer_ids))


def sample_seed(*parts: int) -> int:
    """One seed from several numbers (seed, epoch, sample id ...), the same on every machine and in every process."""
    import hashlib

    digest = hashlib.sha256(",".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:7], "little")
