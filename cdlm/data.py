"""How text becomes rows of tokens and batches. Knows files, the Hub's data sets, columns and tokenizers; knows no model and no loss.

Rows come from a .jsonl, .parquet or .json file, or from a data set of the Hub, which is written

    hub:USER/NAME[/CONFIG]@REVISION[:SPLIT]        as in hub:openai/gsm8k/main@main:train

REVISION is a branch, a tag or a commit. A branch such as main moves: only a commit makes a run repeatable.

Shapes: B rows, P prompt tokens (left padded), N answer slots.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
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


HUB = re.compile(r"hub:([\w.-]+/[\w.-]+)(?:/([\w.-]+))?@([^:@\s]+)(?::(\S+))?")


@dataclass(frozen=True)
class HubData:
    """A split of a data set of the Hub at a revision. commit: what the revision stood for when it was read, or "" before."""

    name: str
    config: str | None
    revision: str
    split: str
    commit: str = ""

    def __str__(self) -> str:
        return f"hub:{self.name}{f'/{self.config}' if self.config else ''}@{self.revision}:{self.split}"


def is_hub(value: str) -> bool:
    """Whether a recipe's value names a data set of the Hub, not a file."""
    return value.startswith("hub:")


def parse_hub(value: str, split: str) -> HubData:
    """The parts of hub:USER/NAME[/CONFIG]@REVISION[:SPLIT]; `split` where none is named."""
    match = HUB.fullmatch(value)
    if match is None:
        raise ValueError(f"{value!r} is not of the form hub:USER/NAME[/CONFIG]@REVISION[:SPLIT], as in hub:openai/gsm8k/main@main:train")
    name, config, revision, named = match.groups()
    return HubData(name, config, revision, named or split)


def _datasets(what: str) -> Any:
    """The library, or a ValueError that says what needs it."""
    if find_spec("datasets") is None:
        raise ValueError(f"{what} needs the library datasets: pip install 'cdlm[data]'")
    import datasets

    return datasets


def load_hub(source: HubData, timeout: float = 10.0) -> tuple[Any, HubData]:
    """A split as a `datasets.Dataset`, and the source with the commit that was read. Runs no code of the repository.

    The revision is resolved to a commit first, in one request of at most `timeout` seconds, so a name that is mistyped or a Hub
    that is out of reach is one quick ValueError. With HF_HUB_OFFLINE=1 the local cache of `datasets` answers; when it holds
    another commit than the one asked for, that is an error.
    """
    datasets = _datasets(str(source))
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    # What the HTTP client of huggingface_hub raises when nothing answers; which client that is depends on the version.
    no_answer = HfHubHTTPError.__mro__[1]
    where = f"data set {source.name} at revision {source.revision}"
    commit = None
    if not constants.HF_HUB_OFFLINE:
        try:
            commit = HfApi().dataset_info(source.name, revision=source.revision, timeout=timeout).sha
        except RevisionNotFoundError:
            raise ValueError(f"the Hub has no revision {source.revision!r} of the data set {source.name}") from None
        except RepositoryNotFoundError:
            raise ValueError(f"the Hub has no {where}, or it is private and no token is set") from None
        except (no_answer, OSError, ValueError) as error:
            raise ValueError(f"the Hub at {constants.ENDPOINT} does not give {where}: {type(error).__name__}: {error}") from None
    elif re.fullmatch(r"[0-9a-f]{40}", source.revision):
        commit = source.revision
    bars = datasets.utils.logging.is_progress_bar_enabled()
    datasets.utils.logging.disable_progress_bar()
    try:
        found = datasets.load_dataset(source.name, source.config, revision=commit or source.revision, split=source.split)
    except (no_answer, ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"{where}, split {source.split}, can't be read: {error}") from None
    finally:
        if bars:
            datasets.utils.logging.enable_progress_bar()
    # The cache keeps a data set under its commit; offline, `datasets` takes the newest there is, whatever revision it was asked for.
    there = Path(found.cache_files[0]["filename"]).parent.name if found.cache_files else ""
    if constants.HF_HUB_OFFLINE and commit not in (None, there):
        raise ValueError(f"{where}: the local cache gives commit {there}, and HF_HUB_OFFLINE=1 forbids asking the Hub")
    if len(found) == 0:
        raise ValueError(f"{source} holds no rows")
    return found, replace(source, commit=commit or there)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a JSONL file. Only "\\n" ends a line; str.splitlines would also split inside a string."""
    try:
        with path.open(encoding="utf-8", newline="\n") as stream:
            for number, line in enumerate(stream, start=1):
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:  # a ValueError is also a number of more digits than Python reads
                    raise ValueError(f"{path}, line {number} is not JSON: {error}") from None
                if not isinstance(row, dict):
                    raise ValueError(f"{path}, line {number} is {row!r}; every line is an object with named columns")
                yield row
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from None


def stream_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a .jsonl, .parquet or .json file, or of a folder that `Dataset.save_to_disk` wrote, without holding all in memory
    (a .json file, one list of objects, is read whole). An error names the line that can't be read."""
    if path.is_dir():
        try:
            saved = _datasets(str(path)).load_from_disk(str(path))
        except OSError as error:
            raise ValueError(f"{path} is no folder that Dataset.save_to_disk wrote: {error}") from None
        if isinstance(saved, dict):
            raise ValueError(f"{path} holds several splits, {', '.join(saved)}; name the folder of one of them")
        yield from saved
    elif not path.is_file():
        raise ValueError(f"no data file at {path}")
    elif path.suffix == ".parquet":
        import pyarrow.parquet

        try:
            for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=64):
                yield from batch.to_pylist()
        except (pyarrow.ArrowException, OSError) as error:
            raise ValueError(f"{path} can't be read as parquet: {error}") from None
    elif path.suffix == ".jsonl":
        yield from _lines(path)
    elif path.suffix == ".json":
        try:
            rows = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not JSON: {error}") from None
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError(f"{path} is no list of objects with named columns")
        yield from rows
    else:
        raise ValueError(f"{path} ends in {path.suffix!r}; allowed: .jsonl, .parquet, .json")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All rows of a file; an error names the line that can't be read."""
    rows = list(stream_rows(path))
    if not rows:
        raise ValueError(f"{path} holds no rows")
    return rows


USER, ASSISTANT = ("user", "human"), ("assistant", "gpt")


def column_text(value: Any, roles: tuple[str, ...]) -> str | None:
    """The text of a cell: text as it is, or of a chat (a list of {role, content} or {from, value}) the first turn of a role.

    Other turns, a system prompt among them, are left out. None where the cell holds neither.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        return None
    for turn in value:
        if not isinstance(turn, dict):
            return None
        if turn.get("role", turn.get("from")) in roles:
            text = turn.get("content", turn.get("value"))
            return text if isinstance(text, str) else None
    return None


def text_ids(tokenizer, text: str, *, special_tokens: bool = False) -> list[int]:
    """Tokens of a text alone. special_tokens: whether the text of a special token, as <|mask|>, stands for that token; else it is text."""
    return tokenizer(text, add_special_tokens=False, split_special_tokens=not special_tokens)["input_ids"]


def holds_special_text(tokenizer, text: str) -> bool:
    """Whether a text holds the text of a special token."""
    added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    return any(token in text for token in [*tokenizer.all_special_tokens, *added])


def prompt_ids(tokenizer, prompt: str, *, chat_template: bool, special_tokens: bool = False) -> list[int]:
    """Tokens of a prompt, wrapped as one user turn when `chat_template` says so. special_tokens: as in `text_ids`.

    The template's own special tokens stay tokens: where the prompt holds the text of some, what stands before and behind it is read apart
    from it.
    """
    plain = not special_tokens and holds_special_text(tokenizer, prompt)
    if not chat_template:
        return tokenizer(prompt, split_special_tokens=plain)["input_ids"]
    if tokenizer.chat_template is None:
        raise ValueError("data.chat_template is true, but the tokenizer has no chat template")

    def rendered(content: str) -> str:
        from jinja2 import TemplateError

        try:
            return tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise ValueError(f"the tokenizer's chat template can't be used: {error}") from None

    if not plain:
        return tokenizer(rendered(prompt), add_special_tokens=False)["input_ids"]
    parts = chat_parts([prompt], lambda contents: rendered(contents[0]), "data.special_tokens, --special-tokens")
    return [token for text, own in parts for token in text_ids(tokenizer, text, special_tokens=own)]


def chat_parts(contents: Sequence[str], rendered: Callable[[list[str]], str], how: str) -> list[tuple[str, bool]]:
    """A templated chat in its parts, in order: (text, whether it is the template's own and not of a turn).

    rendered: the chat's text from the text of its turns, `contents`. A ValueError where the template changes a turn by more than white
    space at its ends; how: what then reads special tokens in all of it.
    """
    places = [f"where the text of turn {number} stands" for number in range(len(contents))]
    frame, rest = rendered(places), rendered(list(contents))
    parts: list[tuple[str, bool]] = []
    for number, (place, content) in enumerate(zip(places, contents, strict=True)):
        before, found, frame = frame.partition(place)
        behind, more, _ = frame.partition(places[number + 1]) if number + 1 < len(places) else (frame, "", "")
        rest, fits = rest[len(before) :], bool(found) and rest.startswith(before)
        texts = [content, content.lstrip(), content.rstrip(), content.strip()]
        texts = [text for text in texts if fits and (rest == text + behind or (more and rest.startswith(text + behind)))]
        if not texts:
            raise ValueError(
                f"the prompt {content[:60]!r} stands in a chat that holds the text of a special token, and the chat template changes what "
                f"it wraps, so the two can't be told apart; take it out, or read it as the token ({how})"
            )
        parts += [(before, True), (texts[0], False)]
        rest = rest[len(texts[0]) :]
    return [*parts, (rest, True)]


LONG_PROMPTS, LONG_ANSWERS = ("error", "drop"), ("error", "cut", "drop")


def unknown_text(tokenizer, text: str, *, special_tokens: bool = False) -> str:
    """The characters of a text that no token stands for, each once: those read as the unknown token, and those that are dropped.

    White space that is dropped does not count: some tokenizers do that on purpose. Where a byte-pair model drops a character it shifts
    the places of the next ones, so what is lost is looked up alone too.
    """

    def lost(part: str) -> list[str]:
        read = tokenizer(part, add_special_tokens=False, return_offsets_mapping=True, split_special_tokens=not special_tokens)
        gone = [not character.isspace() for character in part]
        for token, (start, end) in zip(read["input_ids"], read["offset_mapping"], strict=True):
            gone[start:end] = [token == tokenizer.unk_token_id] * (end - start)
        return [character for character, is_gone in zip(part, gone, strict=True) if is_gone]

    found = dict.fromkeys(lost(text))
    alone = [character for character in dict.fromkeys(text) if lost(character)] if found else []
    return "".join([character for character in found if character in alone] or alone or found)


def read_examples(
    source: Path | Sequence[dict[str, Any]], tokenizer, *, prompt_key: str, answer_key: str, group_key: str | None, chat_template: bool,
    max_prompt_tokens: int, max_new_tokens: int, accept_key: str | None = None, limit: int | None = None, what: str = "data",
    name: str | None = None, long_prompts: str = "error", long_answers: str = "error", say: Callable[[str], None] = print,
    special_tokens: bool = False,
) -> list[Example]:
    """The first `limit` rows that fit, as examples, in the source's order.

    source: a file, or rows with a length (a `datasets.Dataset`), called `name` in messages. prompt_key and answer_key name a
        text column or a chat column (see `column_text`), possibly the same one.
    accept_key: the column with the pattern of the right answers; a row may have none there, and then its reference alone is right.
    long_prompts: what becomes of a prompt of more than max_prompt_tokens: "error", or "drop" (the paper: over 512).
    long_answers: of an answer that does not fit into max_new_tokens with its end-of-sequence token: "error", "drop", or "cut" to
        the budget, and then without an end token (the paper cuts and pads references to the budget). Correctness is still
        judged by the whole text. What was dropped or cut is counted and said.
    special_tokens: whether the text of a special token in prompts and answers stands for that token; else it is text like any other.
    An unknown token, a missing column or a pattern that is none or does not match the reference is an error that names the row.
    """
    rows = read_rows(source) if isinstance(source, Path) else source
    name = name or str(source)
    if limit is not None and not 1 <= limit <= len(rows):
        raise ValueError(f"{what} asks for {limit} rows; {name} has {len(rows)}")
    columns = ", ".join(map(str, rows[0]))
    if accept_key is not None and what == "data.test" and not any(accept_key in row for row in rows):
        columns = ", ".join(dict.fromkeys(str(key) for row in rows for key in row))
        raise ValueError(f"no row of {name} has {accept_key!r} (data.accept_key); its columns are {columns}")
    examples: list[Example] = []
    counted: Counter[str] = Counter()
    seen = 0
    for index, row in enumerate(rows):
        if len(examples) == limit:
            break
        seen += 1
        where = f"{name}, row {index + 1}"
        texts = [column_text(row.get(prompt_key), USER), column_text(row.get(answer_key), ASSISTANT)]
        group = row.get(group_key) if group_key else "all"
        for key, text in zip((prompt_key, answer_key, group_key), (*texts, group), strict=True):
            if not isinstance(text, str):
                raise ValueError(f"{where} has no text under {key!r}; its columns are {', '.join(map(str, row))}")
        question, reference = str(texts[0]), str(texts[1])
        try:
            (question + reference).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{where} holds text that is no Unicode: {error.object[error.start]!r} is half a character") from None
        prompt = prompt_ids(tokenizer, question, chat_template=chat_template, special_tokens=special_tokens)
        answer = text_ids(tokenizer, reference, special_tokens=special_tokens)
        if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in prompt + answer:
            raise ValueError(f"{where} holds text the tokenizer does not know: {question!r} / {reference!r}")
        if len(prompt) > max_prompt_tokens and long_prompts == "drop":
            counted[f"prompts of more than {max_prompt_tokens} tokens dropped"] += 1
            continue
        if not 0 < len(prompt) <= max_prompt_tokens:
            raise ValueError(
                f"{where}: the prompt has {len(prompt)} tokens, allowed are 1 to {max_prompt_tokens} (data.max_prompt_tokens); "
                "data.long_prompts: drop leaves such rows out"
            )
        if len(answer) + 1 > max_new_tokens:
            if long_answers == "error":
                raise ValueError(
                    f"{where}: answer and end token are {len(answer) + 1} tokens, decode.max_new_tokens is {max_new_tokens}; "
                    "data.long_answers: cut or drop allows such rows"
                )
            counted[f"answers of {max_new_tokens} tokens or more {'cut' if long_answers == 'cut' else 'dropped'}"] += 1
            if long_answers == "drop":
                continue
            answer = answer[:max_new_tokens]
        if group_key and group == "all":
            raise ValueError(f"{where} has 'all' under {group_key!r}; that name stands for all groups together in a report")
        example = Example(index, str(group), question, reference, prompt, answer, row.get(accept_key) if accept_key else None)
        try:
            if not example.is_right(example.answer):
                raise ValueError(f"{where}: {accept_key!r} is {example.accept!r}, which does not match the answer {example.answer!r}")
        except (re.error, TypeError):
            raise ValueError(f"{where}: {accept_key!r} is {example.accept!r}, which is no regular expression") from None
        examples.append(example)
    if counted:
        say(f"{what}: of {seen} rows of {name}, " + ", ".join(f"{count} {text}" for text, count in counted.items()))
    if not examples or (limit is not None and len(examples) < limit):
        raise ValueError(f"{what} asks for {limit or 'at least 1'} rows; {name} has {len(examples)} that fit")
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
    """The answer, then end-of-sequence tokens to the end of the budget, as LLaDA's SFT data has them. An answer that was cut fills it."""
    assert len(answer_ids) <= length
    return answer_ids + [eos_token_id] * (length - len(answer_ids))


def sample_seed(*parts: int) -> int:
    """One seed from several numbers (seed, epoch, sample id ...), the same on every machine and in every process."""
    import hashlib

    digest = hashlib.sha256(",".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:7], "little")
