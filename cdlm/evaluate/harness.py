"""The model `cdlm` of lm-eval, which is used as it is. Knows the harness and the decoder; knows no recipe and no task.

`generate_until` decodes with `cdlm.decode.decode`, as `cdlm generate` does: the same prompt gives the same text. Of every sample it keeps
what it cost. Started by `accelerate launch`, each process decodes the share of the samples that the harness gives it. Importing this module
makes the name known: `lm_eval.simple_evaluate(model="cdlm", model_args="pretrained=FOLDER", ...)`.
"""

import glob
import hashlib
import json
import os
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

import torch
from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs

from cdlm import __version__, data, families, files
from cdlm.decode import DecodeConfig, changed, decode, resolve, slots
from cdlm.evaluate import likelihood
from cdlm.evaluate.clock import seconds
from cdlm.families import adapter
from cdlm.families.base import NotFinite
from cdlm.processes import check_device, launched

DECODING = tuple(field.name for field in fields(DecodeConfig) if field.name not in ("use_cache", "block_causal", "temperature"))
OWN = ("pretrained", "family", "dtype", "device", "batch_size", "attention", "nelbo_samples", "seed", "resume", "special_tokens")
PER_REQUEST = ("until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p")
COSTS = ("steps", "commit_forwards", "forwards", "output_tokens")


@dataclass(frozen=True)
class Asked:
    """One text to generate: its tokens, how to decode, what ends it, a key that stands for all of it and the model, where it is from, and
    the seed of its sampling, which does not depend on where the model's folder is."""

    ids: list[int]
    decoding: DecodeConfig
    until: tuple[str, ...]
    key: str
    where: str
    seed: int


class Finished:
    """Samples that are done, a JSON object a line in a file, so that a run that was killed goes on. A line cut short is left out, one
    that is not what was written (each holds its own checksum) is an error.

    Each process writes a file of its own (NAME.jsonl, NAME.rank1.jsonl, ...) and reads those of all, so that a run may go on with
    another number of processes.
    """

    def __init__(self, path: Path | None, rank: int = 0):
        self.path, self.rows = path, dict[str, dict[str, Any]]()
        if path is None:
            return
        self.path = path.with_name(f"{path.stem}.rank{rank}{path.suffix}") if rank else path
        for file in (path, *sorted(path.parent.glob(f"{glob.escape(path.stem)}.rank*{path.suffix}"))):
            if file.is_file():
                self._read(file)

    def _read(self, file: Path) -> None:
        content = file.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if file == self.path and len(whole) < len(content):  # killed while writing: drop it, so that the next line starts on its own
            os.truncate(file, len(whole))
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                row = json.loads(line)
                stated, key = row.pop("sha256"), row.pop("key")
            except (ValueError, KeyError, AttributeError):
                raise ValueError(f"{file}, line {number} is no finished sample; move the file away to start again") from None
            if stated != self._sum(key, row):
                raise ValueError(f"{file}, line {number} is not what was written; move the file away to start again")
            self.rows[key] = row

    @staticmethod
    def _sum(key: str, row: dict[str, Any]) -> str:
        return hashlib.sha256(json.dumps([key, row]).encode()).hexdigest()[:16]

    def add(self, rows: dict[str, dict[str, Any]]) -> None:
        """Keep a batch of samples, key -> row: brought to the disk (fsync) before the next batch starts."""
        self.rows |= rows
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            files.append_text(self.path, "".join(
                json.dumps({"key": key, **row, "sha256": self._sum(key, row)}) + "\n" for key, row in rows.items()
            ))  # fmt: skip


class Progress:
    """Says how far it is, from the tenth sample on with the time that is left, at most once in `every` seconds."""

    def __init__(self, total: int, say: Callable[[str], None], every: float = 10.0):
        self.total, self.say, self.every = total, say, every
        self.began, self.said, self.done = time.monotonic(), -float("inf"), 0

    def add(self, count: int) -> None:
        """So many samples more."""
        self.done += count
        now = time.monotonic()
        if self.done < min(10, self.total) or (now - self.said < self.every and self.done < self.total):
            return
        self.said, spent = now, now - self.began
        left = spent / self.done * (self.total - self.done)
        self.say(f"eval: {self.done} of {self.total} samples in {spent:.0f} s, about {left:.0f} s left")


def trim(text: str, until: Iterable[str]) -> str:
    """The text before the first of the strings that end it."""
    places = [place for stop in until if stop and (place := text.find(stop)) >= 0]
    return text[: min(places)] if places else text


def check_types(decoding: dict[str, Any]) -> None:
    """Refuse values that are of no use for their fields of `DecodeConfig`, as `block_length=x`; it takes their types on trust."""
    for field in fields(DecodeConfig):
        value, kinds = decoding.get(field.name), get_args(field.type) or (field.type,)
        if value is not None and not (type(value) in kinds or (float in kinds and type(value) is int)):
            names = {bool: "true or false", int: "a whole number", float: "a number", str: "a word"}
            raise ValueError(f"{field.name} is {value!r}; it must be {names[next(kind for kind in names if kind in kinds)]}")


def request_values(raw: dict[str, Any], budget: int) -> dict[str, Any]:
    """What a task asks of decoding, in the harness's own reading, with until as a list; budget: its max_gen_toks where it has none."""
    given = normalize_gen_kwargs(raw, default_max_gen_toks=budget)
    unknown = sorted(set(given) - set(PER_REQUEST))
    if unknown:
        raise ValueError(f"{', '.join(unknown)} unknown; allowed: {', '.join(PER_REQUEST)}")
    if any(isinstance(value, float) and name.startswith("max_") for name, value in raw.items()):
        raise ValueError("the budget must be a whole number")
    if not all(isinstance(stop, str) for stop in given["until"]):
        raise ValueError(f"until is {given['until']}; it must be texts, as until=END or 'until=[\"END\",\"5\"]'")
    return {**given, "temperature": float(given.get("temperature", 0.0))}


def settled(text: str, until: Iterable[str]) -> bool:
    """Whether one of the strings is in the text, and nothing that may follow can change what `trim` leaves."""
    stops = [stop for stop in until if stop]
    place = len(trim(text, stops))
    return place < len(text) and not any(stop.startswith(text[i:]) for i in range(place) for stop in stops)


def processes(device: str) -> Any:
    """The Accelerator of a process that `accelerate launch` (or torchrun) started beside others; None in a process that is alone."""
    if launched() == 1:
        return None
    try:
        from accelerate import Accelerator, InitProcessGroupKwargs
    except ModuleNotFoundError:
        raise ValueError("WORLD_SIZE is above 1; several processes need accelerate: pip install 'cdlm[train]'") from None
    # The fastest process waits for the slowest, however long that takes.
    return Accelerator(cpu=torch.device(device).type == "cpu", kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(weeks=52))])


def fingerprint(path_or_id: str) -> list[Any]:
    """What tells a checkpoint from another without reading its weights: names, sizes and times of its files, or a repository's name."""
    folder = Path(path_or_id)
    if not folder.is_dir():
        return [path_or_id]
    files = sorted(file for file in folder.iterdir() if file.is_file())
    own = [str(folder.resolve()), *((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files)]
    an_adapter = not (folder / "config.json").is_file() and (folder / adapter.CONFIG).is_file()
    return [*own, fingerprint(adapter.base_of(folder / adapter.CONFIG))] if an_adapter else own


@register_model("cdlm")
class CDLM(TemplateLM):
    """A checkpoint that `cdlm.load` reads, an adapter's folder too, as a model of the harness.

    pretrained: a folder or a Hub repository. family, dtype, device: as in `cdlm.load`. batch_size: prompts decoded together.
    attention and the values of `DecodeConfig` (block_length, confidence_threshold, steps ...): as in `cdlm generate`, with its defaults;
    a task's max_gen_toks goes before max_new_tokens, its temperature counts where its do_sample is not false.
    special_tokens: whether the text of a special token in what a task asks stands for that token; without it, it is text. A chat
    template's own special tokens are tokens all the same.
    nelbo_samples: random masks a likelihood is estimated from, for models that have no exact one; without it they refuse likelihoods.
    seed: of sampling and of those masks. resume: a file of finished samples; those that it holds are not decoded again.
    say: takes lines about progress.
    """

    def __init__(
        self, pretrained: str, *, family: str | None = None, dtype: str = "float32", device: str = "cpu", batch_size: int | str = 1,
        max_batch_size: int | None = None, attention: str | None = None, nelbo_samples: int | None = None, seed: int = 0,
        resume: str | Path | None = None, special_tokens: bool = False, say: Callable[[str], None] | None = None, **decoding: Any,
    ):
        super().__init__()
        unknown = sorted(set(decoding) - set(DECODING))
        if unknown:
            raise ValueError(f"model_args: unknown {', '.join(unknown)}; allowed: {', '.join((*OWN, *DECODING))}")
        check_types(decoding)
        if not str(batch_size).isdigit() or int(batch_size) < 1:
            raise ValueError(f"batch_size is {batch_size!r}; it must be a whole number of at least 1 (there is no automatic one)")
        if nelbo_samples is not None and (isinstance(nelbo_samples, bool) or not isinstance(nelbo_samples, int) or nelbo_samples < 1):
            raise ValueError(f"nelbo_samples is {nelbo_samples!r}; it must be a whole number of at least 1")
        if not isinstance(special_tokens, bool):
            raise ValueError(f"special_tokens is {special_tokens!r}; it must be true or false")
        check_device(device)
        self.accelerator = processes(device)
        if self.accelerator is not None:
            self._rank, self._world_size = self.accelerator.process_index, self.accelerator.num_processes
            device = str(self.accelerator.device)
        self.stated = families.read_config(pretrained)
        self.model = families.load(pretrained, family=family, dtype=dtype, device=device)
        self.tokenizer = families.load_tokenizer(pretrained, self.model.facts)
        vocabulary = self.model.hf.get_input_embeddings().num_embeddings
        if len(self.tokenizer) > vocabulary:
            raise ValueError(f"the tokenizer has {len(self.tokenizer)} tokens, the model {vocabulary}: not the tokenizer of this model")
        self.pretrained, self.dtype, self.batch_size, self.seed = str(pretrained), dtype, int(batch_size), seed
        self._device, self.nelbo_samples = self.model.device, nelbo_samples
        self.values = {"attention": attention, **decoding}
        self.decoding = resolve(self.model, self.stated, **self.values)
        self.finished = Finished(Path(resume) if resume is not None else None, self.rank)
        speak = say if say is not None else lambda text: print(text, file=sys.stderr, flush=True)
        self.say = speak if self.rank == 0 else lambda text: None
        self.special_tokens, self.templated = special_tokens, dict[str, list[tuple[str, bool]]]()
        self.costs: dict[tuple[str, int], list[dict[str, Any]]] = {}
        self.identity = json.dumps([fingerprint(self.pretrained), family, dtype, seed, __version__, version("transformers")])

    # what the harness asks of one process among several

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Of a number that each process has, [world_size]: here this process's own, as often as there are processes.

        The harness gathers nothing but how many requests each has, and repeats the last one where one has fewer, for models whose forwards
        need all processes at once. These decode alone, and must not: what is repeated would be answered and counted twice.
        """
        return tensor.reshape(1).expand(self.world_size) if self.world_size > 1 else tensor

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """The objects of all processes, by rank, at process dst; None at the others."""
        if self.world_size == 1:
            return [obj]
        found = [None] * self.world_size if self.rank == dst else None
        torch.distributed.gather_object(obj, found, dst=dst)
        return found

    def barrier(self) -> None:
        """Wait for the other processes."""
        if self.accelerator is not None:
            self.accelerator.wait_for_everyone()

    # what the harness asks of a tokenizer

    @property
    def eot_token_id(self) -> int:
        return self.model.facts.eos_token_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """Stands before a text that has nothing before it."""
        return self.eot_token_id if self.tokenizer.bos_token_id is None else self.tokenizer.bos_token_id

    @property
    def max_length(self) -> int | None:
        """Positions that the model has; None where it does not say."""
        return getattr(self.model.text_config, "max_position_embeddings", None)

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The chat as one text; without a generation prompt the last turn is left open, to be gone on with."""
        if self.tokenizer.chat_template is None:
            raise ValueError(f"--apply_chat_template: the tokenizer of {self.pretrained} has no chat template")

        def rendered(contents: list[str]) -> str:
            return self.tokenizer.apply_chat_template(
                [{**turn, "content": content} for turn, content in zip(chat_history, contents, strict=True)], tokenize=False,
                add_generation_prompt=add_generation_prompt, continue_final_message=not add_generation_prompt,
            )

        contents = [turn["content"] for turn in chat_history]
        text = rendered(contents)
        if self.special_tokens or not any(data.holds_special_text(self.tokenizer, content) for content in contents):
            self.templated[text] = [(text, True)]
        else:
            self.templated[text] = data.chat_parts(contents, rendered, "--model_args special_tokens=true")
        return text

    def _part_ids(self, parts: list[tuple[str, bool]]) -> list[int]:
        """Tokens of the parts of a templated chat, as `data.chat_parts` gives them."""
        return [token for text, own in parts for token in data.text_ids(self.tokenizer, text, special_tokens=own)]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Tokens of a text. None adds special tokens as the tokenizer does, but not to a chat that `apply_chat_template` made here, which
        brings its own; nothing else is known to be a chat."""
        if add_special_tokens is None and string in self.templated:
            return self._part_ids(self.templated[string])
        if add_special_tokens is None:
            bos = self.tokenizer.bos_token
            add_special_tokens = not (self.special_tokens and bos and string.startswith(bos))
        plain = not self.special_tokens and data.holds_special_text(self.tokenizer, string)
        return self.tokenizer(string, add_special_tokens=add_special_tokens, split_special_tokens=plain)["input_ids"]

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """As the harness's own (white space at the context's end goes to the continuation), also behind a templated chat: to its text
        nothing is added, and the continuation is text as a turn is."""
        if context not in self.templated:
            return super()._encode_pair(context, continuation)
        *first, (last, own) = self.templated[context]
        kept = last.rstrip()
        text = last[len(kept) :] + continuation
        apart = own and not self.special_tokens and data.holds_special_text(self.tokenizer, text)
        before = self._part_ids([*first, (kept, own)])
        return before, self._part_ids([*first, *([(kept, own), (text, False)] if apart else [(kept + text, own)])])[len(before) :]

    # generation

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """A text for each request, cut before the first string of its `until`. Costs go to `self.costs`, by task and document.

        Everything is checked before the first forward. Decoding stops after the block that has such a string; the text is what the whole
        answer's would be, cut. Output tokens are counted up to and with the string, as they are with an end token.
        """
        asked = self._asked(requests)
        waiting = [i for i, one in enumerate(asked) if one.key not in self.finished.rows]
        if len(waiting) < len(asked):
            self.say(f"eval: {len(asked) - len(waiting)} of {len(asked)} samples were finished before")
        progress = Progress(len(waiting), self.say)
        for batch in self._batches(asked, waiting):
            self._decode([asked[i] for i in batch])
            progress.add(len(batch))
        for request in requests:
            self.costs[request.task_name, request.doc_id] = []
        texts, known = [], set(waiting)
        for i, (request, one) in enumerate(zip(requests, asked, strict=True)):
            row = self.finished.rows[one.key]
            self.costs[request.task_name, request.doc_id].append({**row, "finished_before": i not in known})
            texts.append(trim(row["text"], one.until))
        return texts

    def _asked(self, requests: list[Instance]) -> list[Asked]:
        """All requests, checked."""
        asked: list[Asked] = []
        seen: dict[str, int] = {}
        for request in requests:
            context, raw = request.args
            try:
                given = request_values(raw, self.decoding.max_new_tokens)
            except (ValueError, TypeError) as error:
                raise ValueError(f"task {request.task_name}, gen_kwargs {raw}: {error}") from None
            sampling = {name: given[name] for name in ("top_k", "top_p") if given["do_sample"] and given.get(name) is not None}
            values = {**self.values, **sampling, "max_new_tokens": given["max_gen_toks"]}
            decoding = replace(resolve(self.model, self.stated, **values), temperature=given["temperature"])
            ids = self.tok_encode(context)
            where = f"task {request.task_name}, document {request.doc_id}"
            if not ids:
                raise ValueError(f"{where}: the prompt has no tokens")
            longest = len(ids) + slots(self.model.facts, decoding.max_new_tokens, decoding.block_length)
            if self.max_length is not None and longest > self.max_length:
                raise ValueError(
                    f"{where}: the prompt's {len(ids)} tokens and max_gen_toks {decoding.max_new_tokens} are {longest} positions, the "
                    f"model has {self.max_length}; give --gen_kwargs max_gen_toks=N or a smaller --num_fewshot"
                )
            # The document is part of it, so that a sample's seed does not depend on which other samples a process has.
            content = json.dumps([self.seed, request.task_name, request.doc_id, ids, asdict(decoding), given["until"]])
            seen[content] = seen.get(content, -1) + 1  # equal requests that are repeated have keys, and seeds, of their own
            drawn, key = (
                hashlib.sha256(f"{of}{content} {seen[content]}".encode()).hexdigest() for of in ("", self.identity)
            )
            asked.append(Asked(ids, decoding, tuple(given["until"]), key, where, int(drawn[:15], 16)))
        return asked

    def _batches(self, asked: list[Asked], waiting: list[int]) -> Iterable[list[int]]:
        """Requests that are decoded alike, shortest prompts first, batch_size at a time."""
        alike: dict[DecodeConfig, list[int]] = {}
        for i in sorted(waiting, key=lambda i: len(asked[i].ids)):
            alike.setdefault(asked[i].decoding, []).append(i)
        for group in alike.values():
            for start in range(0, len(group), self.batch_size):
                yield group[start : start + self.batch_size]

    def _decode(self, batch: list[Asked]) -> None:
        """Decode a batch and keep its samples. A row's seconds are its share of the batch's."""
        decoding, facts = batch[0].decoding, self.model.facts
        prompt_BP, valid_BP = data.pad_left([one.ids for one in batch], facts.pad_token_id)
        prompt_BP, valid_BP = prompt_BP.to(self.model.device), valid_BP.to(self.model.device)
        seeds = [one.seed for one in batch] if decoding.draws else None

        def ends(row: int, ids: list[int]) -> bool:
            whole = next((place for place, token in enumerate(ids) if token in facts.eos_token_ids), len(ids))
            return settled(self.tokenizer.decode(ids[:whole]), batch[row].until)

        asks = ends if any(one.until for one in batch) else None
        try:
            spent, out = seconds(lambda: decode(self.model, prompt_BP, valid_BP, decoding, seeds=seeds, ends=asks), self.model.device)
        except NotFinite as error:
            raise FloatingPointError(f"eval: {'; '.join(batch[row].where for row in error.rows)}: {error}") from None
        rows: dict[str, dict[str, Any]] = {}
        for row, one in enumerate(batch):
            ids = out.answer(row, facts.eos_token_ids)
            tokens = self._tokens_until(ids, one.until)
            rows[one.key] = {
                "text": self.tokenizer.decode(ids), "steps": out.steps[row], "commit_forwards": out.commit_forwards[row],
                "forwards": out.forwards[row], "output_tokens": out.output_tokens[row] if tokens is None else tokens,
                "stop": out.stop[row] if tokens is None else "until", "seconds": spent / len(batch), "batch": len(batch),
            }  # fmt: skip
        self.finished.add(rows)

    def _tokens_until(self, ids: list[int], until: tuple[str, ...]) -> int | None:
        """Tokens up to and with the first whose text has a string of `until` in it; None where none has."""

        def has_one(count: int) -> bool:
            text = self.tokenizer.decode(ids[:count])
            return trim(text, until) != text

        return bisect_left(range(len(ids)), True, key=has_one) if has_one(len(ids)) else None

    # likelihoods

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """(log p(continuation | context), whether greedy decoding writes it) of each request; exact, or minus the NELBO."""
        pairs = [(context, continuation) for _, context, continuation in requests]
        self._check_pairs(pairs)
        progress = Progress(len(pairs), self.say)
        order = sorted(range(len(pairs)), key=lambda i: len(pairs[i][0]) + len(pairs[i][1]))
        found: dict[int, tuple[float, bool]] = {}
        causal = likelihood.is_causal(self.model)
        step = self.batch_size if causal else 1
        for start in range(0, len(order), step):
            part = order[start : start + step]
            asked = [pairs[i] for i in part]
            found.update(zip(part, likelihood.exact(self.model, asked) if causal else [self._estimate(*asked[0])], strict=True))
            progress.add(len(part))
        return [found[i] for i in range(len(pairs))]

    def _check_pairs(self, pairs: list[tuple[list[int], list[int]]]) -> None:
        """Refuse what can't be answered, before the first forward. The last token of a causal pair is only predicted, never read."""
        causal = likelihood.is_causal(self.model)
        room = None if self.max_length is None else self.max_length + causal
        if not causal and self.nelbo_samples is None:
            raise ValueError(
                f"{self.pretrained} is a diffusion model and has no exact likelihood; --model_args nelbo_samples=N estimates an upper "
                "bound of -log p from N random masks (a task of type generate_until needs none)"
            )
        for number, (context, continuation) in enumerate(pairs):
            if not continuation:
                raise ValueError(f"likelihood request {number}: the continuation has no tokens")
            if room is not None and len(context) + len(continuation) > room:
                raise ValueError(
                    f"likelihood request {number}: {len(context)} + {len(continuation)} tokens, the model has {self.max_length} positions"
                )

    def _estimate(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        """Minus the NELBO, and whether this model's own greedy decoding writes the continuation."""
        assert self.nelbo_samples is not None
        bound = likelihood.nelbo(
            self.model, context, continuation, samples=self.nelbo_samples, seed=self.seed, batch_size=self.batch_size,
            block_length=self.decoding.block_length if self.decoding.block_causal else None,
        )
        greedy = changed(
            self.decoding, tokens_per_step=1, max_new_tokens=len(continuation), stop_at_eos=False, order="confidence", schedule="even"
        )
        prompt_BP, valid_BP = data.pad_left([context], self.model.facts.pad_token_id)
        out = decode(self.model, prompt_BP.to(self.model.device), valid_BP.to(self.model.device), greedy)
        return -bound, out.filled_BM[0, : len(continuation)].tolist() == continuation

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """log p of whole texts, in windows of the model's length as the harness cuts them. Only for causal checkpoints."""
        if not likelihood.is_causal(self.model):
            raise ValueError(
                f"{self.pretrained} is a diffusion model: a perplexity of whole texts (loglikelihood_rolling) is not defined for it here"
            )
        if self.max_length is None:
            raise ValueError(f"{self.pretrained} does not say how many positions it has (max_position_embeddings); windows need it")
        totals = []
        for request in requests:
            windows = utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]), prefix_token=self.prefix_token_id, max_seq_len=self.max_length, context_len=1
            )
            pairs = [utils.make_disjoint_window(window) for window in windows]
            totals.append(sum(value for value, _ in self._loglikelihood_tokens([(("", ""), *pair) for pair in pairs])))
        return totals

    # what is written down

    def get_model_info(self) -> dict[str, Any]:
        """For `config` in the harness's results: everything that a score depends on, resolved."""
        return {"cdlm": {
            "model": self.pretrained, "family": self.model.family, "facts": asdict(self.model.facts), "decode": asdict(self.decoding),
            "dtype": self.dtype, "device": str(self.model.device), "attention_kernel": self.model.hf.config._attn_implementation,
            "batch_size": self.batch_size, "processes": self.world_size, "seed": self.seed, "nelbo_samples": self.nelbo_samples,
            "parameters": sum(p.numel() for p in self.model.hf.parameters()),
            "versions": {"cdlm": __version__, **{name: version(name) for name in ("torch", "transformers", "lm_eval")}},
        }}  # fmt: skip


def summary(costs: list[dict[str, Any]]) -> dict[str, float]:
    """Means of steps, forwards and tokens a sample, TPF and TPS, over at least one sample. TPS counts output tokens over the wall time of
    `decode`; TPF over forwards."""
    tokens, forwards, spent = (sum(row[name] for row in costs) for name in ("output_tokens", "forwards", "seconds"))
    means = {name: sum(row[name] for row in costs) / len(costs) for name in COSTS}
    return {**means, "tpf": tokens / forwards, **({"tps": tokens / spent} if spent else {})}


def add_costs(results: dict[str, Any] | None, lm: CDLM, chosen: dict[str, list[int]] | None = None) -> None:
    """Put what decoding cost beside the scores of tasks and groups (as metrics of filter "none") and into each sample, and samples in the
    order of their documents, in place. Called in every process of a run; only the first has results, the others' costs are sent to it.

    chosen: the documents of each task, where the harness was given `samples`; it counts them from 0.
    """
    shares = lm.gather_object(lm.costs)
    if results is None or shares is None:
        return
    costs = {sample: held for share in shares for sample, held in share.items()}

    def rows_of(name: str) -> list[dict[str, Any]]:
        members = results.get("group_subtasks", {}).get(name)
        own = [row for key in sorted(costs) if key[0] == name for row in costs[key]]
        return [row for member in members for row in rows_of(member)] if members else own

    for scores in (results["results"], results.get("groups", {})):
        for name in scores:
            if rows := rows_of(name):
                scores[name].update({f"{metric},none": value for metric, value in summary(rows).items()})
    for task, held in results.get("samples", {}).items():
        numbers = {document: number for number, document in enumerate(chosen[task])} if chosen and task in chosen else None
        filters = list(dict.fromkeys(sample["filter"] for sample in held))
        held.sort(key=lambda sample: (filters.index(sample["filter"]), sample["doc_id"]))
        for sample in held:
            number = sample["doc_id"] if numbers is None else numbers[sample["doc_id"]]
            if (task, number) in costs:
                sample["costs"] = costs[task, number]
