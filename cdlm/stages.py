"""The stages of a run. Each reads the files of the stage before it and writes its own; a stage that is done is not done again.

    runs/<name>/trajectories/   collect
    runs/<name>/student/        train   (checkpoints/ meanwhile, log.jsonl for the losses, log.sha256)
    runs/<name>/report.json     evaluate (report.md, report.html, pareto.png, samples.jsonl)
    runs/<name>/export/         export  (adapter/ in it, when the student is an adapter)
    push.request.json           push    (only with a push section: export/ goes to the Hub)

Every stage leaves a note of what it was asked to do. A folder that holds the result of other values is an error, not a redo.
Every stage leaves checksums of what it wrote (see files.py), and the next one reads nothing that differs from them: a damaged shard or
checkpoint is made again, anything else that is damaged is an error that names the file.

Of several processes (`accelerate launch`) all come to every stage: shards, rows of a step and questions are dealt out, the main process
alone writes what there is one of, and none leaves a stage before its result is there.
"""

import contextlib
import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cdlm import canvases, data, families, files, roofline, trajectories
from cdlm.decode import DecodeConfig, changed, slots
from cdlm.evaluate.report import SUMS as REPORT_SUMS
from cdlm.evaluate.report import beside
from cdlm.families import adapter as adapters
from cdlm.families import causal, checkpoint, native
from cdlm.families.base import DiffusionLM
from cdlm.families.decoder import read_json
from cdlm.processes import ALONE, Processes
from cdlm.recipe import OTHER_MODEL, Collect, Recipe, Sampler
from cdlm.verify import LOG_SUMS, NOTE_SUMS

STAGES = ("collect", "train", "evaluate", "export")
PUSHED = ("push.request.json", NOTE_SUMS["push.request.json"])
BLOCKWISE = ("cdlm", "bd3lm")  # objectives that make a block-causal student of the model they start from
OF_A_MODEL = (*BLOCKWISE, "tidar")  # objectives whose student is measured beside the model they start from
AUTOREGRESSIVE = {"logit_shift": True, "prompt_attention": "causal"}  # facts under which blocks of one token are next-token prediction
REDECIDING_METHODS = (  # where every step decides every slot
    "teacher", "teacher_truncated", "teacher_entropy_bound", "transformers_generate", "student",
)  # fmt: skip
UNREAD = {  # whether a model decides every slot at every step -> what is not read of its recipe
    True: (
        ("decode", "confidence_threshold"), ("collect", "temperatures"), ("evaluate", "thresholds"), ("evaluate", "teacher_stops_at_eos"),
    ),
    False: (
        ("decode", "sampler"), ("decode", "student_sampler"), ("collect", "top_k"), ("train", "finish"), ("train", "self_conditioning"),
    ),
}  # fmt: skip
SIZES = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "tie_word_embeddings", "num_experts", "n_routed_experts", "n_shared_experts", "num_experts_per_tok",
    "moe_intermediate_size", "first_k_dense_replace",
)
DEFAULT_SPLIT = {"prompts": "train", "test": "test"}


def stages_of(recipe: Recipe) -> list[str]:
    """The stages that a recipe has, in their order."""
    return [s for s in STAGES if s != "collect" or recipe.collect is not None] + (["push"] if recipe.push is not None else [])


def agree(found: Any, there: Any, model: str, copy: str) -> None:
    """Refuse a model whose sizes are not those of the recipe's copy of its config.json."""
    for name in SIZES:
        a, b = (getattr(config.get_text_config(), name, None) for config in (found, there))
        if a != b:
            raise ValueError(f"{model} has {name} {a!r}; {copy} (the recipe's config) says {b!r}: not the model of this recipe")


@dataclass(frozen=True)
class Inputs:
    """What a run starts from: the model without weights, its family and facts ("scratch" has none yet), where its config was read, and
    the questions (None: not on this machine)."""

    model: Any
    family: str
    facts: families.Facts | None
    source: Path | str
    prompts: list[data.Example] | None
    tests: list[data.Example] | None


@dataclass
class Run:
    """A recipe and the folder it writes to."""

    recipe: Recipe
    out: Path
    say: Callable[[str], None] = print
    shared_trajectories: Path | None = None
    command: str | None = None  # what the user typed, for the report
    processes: Processes = ALONE
    _hub: dict[str, tuple[Any, data.HubData]] = field(default_factory=dict, repr=False)
    _examples: dict[tuple[str, int | None], list[data.Example]] = field(default_factory=dict, repr=False)
    _hashes: trajectories.Hashes = field(default_factory=trajectories.Hashes, repr=False)
    _sound: set[str] = field(default_factory=set, repr=False)  # stages whose files were compared with their checksums, or just written

    @property
    def trajectories(self) -> Path:
        named = self.recipe.trajectories
        return self.shared_trajectories or (self.recipe.path(named) if named else self.out / "trajectories")

    @property
    def student(self) -> Path:
        return self.out / "student"

    @property
    def exported(self) -> Path:
        return self.out / "export"

    def sums(self, stage: str) -> Path | None:
        """The file with the checksums of what a stage writes; None for push, which writes a note alone."""
        return {
            "collect": self.trajectories / files.SUMS, "train": self.student / files.SUMS, "evaluate": self.out / REPORT_SUMS,
            "export": self.exported / files.SUMS,
        }.get(stage)

    def require_sound(self, stage: str) -> None:
        """A ValueError unless what a finished stage wrote is still that. Its files are read once a run."""
        sums = self.sums(stage)
        if stage not in self._sound and sums is not None:
            files.require_sound(sums, f"{self.out / 'report.json'}" if stage == "evaluate" else str(sums.parent))
            if stage == "train":
                self._require_sound_log()
        self._sound.add(stage)

    def _require_sound_log(self) -> None:
        """A ValueError unless log.jsonl, where it was not removed, is what training wrote. The run of an older version has no checksum of
        it before its report is finished; then the report's is the one."""
        log, sums, report_sums = self.out / "log.jsonl", self.out / LOG_SUMS, self.out / REPORT_SUMS
        if not files.is_there(log):
            return
        remedy = f"remove {log} to go on without loss curves"
        if files.is_there(sums):
            _require_stated(sums, remedy)
        elif files.is_there(report_sums) and log.name in files.read_sums(report_sums):
            files.require_as_written(log, report_sums)
        else:
            raise ValueError(
                f"{log} has no checksums ({sums} is missing), so it can't be told from a damaged one: {remedy}, or, if you trust it, write "
                f"them with cdlm verify {self.out} --seal"
            )

    def load_teacher(self) -> DiffusionLM:
        """The model that the recipe starts from: the teacher, or a fresh one for `scratch`."""
        r = self.recipe
        if r.scratch is not None:
            from cdlm.families import scratch

            model = scratch.build(
                r.path(r.scratch.config), r.path(r.scratch.tokenizer), init=r.scratch.init, seed=r.seed, dtype=families.DTYPES[r.dtype],
                **(AUTOREGRESSIVE if r.train.objective == "ar" else {}),
            ).to(r.device)
            families.set_attention(model.hf, r.attention, r.device)
            return model
        model = families.load(r.model_path(), family=r.family, dtype=r.dtype, device=r.device, attention=r.attention)
        facts = self.teacher_facts(model.facts)
        return model if facts == model.facts else type(model)(model.hf, facts, model.family).eval()

    def teacher_facts(self, facts: families.Facts) -> families.Facts:
        """What the recipe takes the model for: a teacher that was trained with objective tidar shows its diffusion mode."""
        return facts.of_diffusion_mode() if self.recipe.train.objective == "cdlm" and facts.draft_length is not None else facts

    def load_other(self) -> DiffusionLM | None:
        """The autoregressive model that evaluate.autoregressive names, in the form that transformers' own generate takes."""
        r = self.recipe
        if r.evaluate.autoregressive is None:
            return None
        folder, family = self._other("autoregressive", None)
        return families.load(folder, family=family, dtype=r.dtype, device=r.device, attention="sdpa")

    def _other(self, key: str, family: str | None) -> tuple[Path, str]:
        """Where the model of a key of evaluate is (autoregressive or draft_model), and its family: the one named, else what its config.json
        states, else causal; a ValueError unless a causal LM with this run's tokenizer is there."""
        r, name = self.recipe, f"evaluate.{key}"
        value = getattr(r.evaluate, key)
        folder = r.path(value)
        if not (folder / "config.json").is_file():
            raise ValueError(f"{name} is {value}; no model at {folder}")
        config = families.read_config(folder)
        stated = native.matches(config) or not causal.is_stock(config)
        module = families.find(config, family or (None if stated else causal.NAME))
        facts = families.facts_of(folder, config, module)
        autoregressive(facts, name)
        here, there = r.path(r.scratch.tokenizer) if r.scratch else self.here(), folder
        if here is not None:
            from transformers import AutoTokenizer

            own, other = (AutoTokenizer.from_pretrained(place, trust_remote_code=False).get_vocab() for place in (here, there))
            if own != other:
                raise ValueError(
                    f"{name}: the tokenizer in {there} ({len(other)} tokens) differs from the model's in {here} "
                    f"({len(own)} tokens); steps and seconds of the two would not be of the same text"
                )
        return folder, module.NAME

    def tokenizer(self, facts: families.Facts) -> Any:
        r = self.recipe
        return families.load_tokenizer(r.path(r.scratch.tokenizer) if r.scratch else r.model_path(), facts)

    def examples(self, tokenizer: Any, which: str, limit: int | None) -> list[data.Example]:
        """Questions of data.prompts or data.test, read once a run, so that what is said of them is said once."""
        d, source = self.recipe.data, self.source(which)
        long_answers = "cut" if which == "test" and d.long_answers == "drop" else d.long_answers
        answer_key = (d.test_answer_key if which == "test" else None) or d.answer_key
        if (which, limit) not in self._examples:
            self._examples[which, limit] = data.read_examples(
                source if isinstance(source, Path) else self.hub(which)[0], tokenizer, name=str(source), say=self.say,
                prompt_key=d.prompt_key, answer_key=answer_key, accept_key=d.accept_key, group_key=d.group_key,
                chat_template=d.chat_template, max_prompt_tokens=d.max_prompt_tokens, long_prompts=d.long_prompts,
                max_new_tokens=self.recipe.decode.max_new_tokens, long_answers=long_answers, limit=limit, what=f"data.{which}",
                special_tokens=d.special_tokens,
            )
        return self._examples[which, limit]

    def source(self, which: str) -> Path | data.HubData:
        """What data.prompts or data.test names: a file, or a split of a data set of the Hub."""
        value = getattr(self.recipe.data, which)
        return data.parse_hub(value, DEFAULT_SPLIT[which]) if data.is_hub(value) else self.recipe.path(value)

    def hub(self, which: str) -> tuple[Any, data.HubData]:
        """The rows that data.prompts or data.test names on the Hub, and the commit they are of; asked once a run."""
        source = self.source(which)
        assert isinstance(source, data.HubData)
        if which not in self._hub:
            self._hub[which] = data.load_hub(source)
            if source.revision != (commit := self._hub[which][1].commit):
                self.say(f"data.{which}: {source} is commit {commit} today; name the commit and the run is repeatable")
        return self._hub[which]

    def data_hash(self, which: str) -> str:
        """What was read: sha256 of a file, or the commit and split of a data set of the Hub."""
        source = self.source(which)
        return files.sha256(source) if isinstance(source, Path) else str(replace(source, revision=self.hub(which)[1].commit))

    def here(self) -> Path | None:
        """The folder on this machine that holds the model: its own, or the Hub's cache; None when it is still to be fetched, or made by
        another recipe (a folder that is not there, where the recipe has a copy of its config)."""
        r = self.recipe
        if r.scratch is not None:
            return r.path(r.scratch.config).parent
        assert r.model is not None
        if r.config is not None and r.model.startswith((".", "/")) and not r.path(r.model).exists():
            return None
        place = r.model_path()
        if isinstance(place, Path):
            return place
        from huggingface_hub import try_to_load_from_cache

        if place.count("/") != 1:
            return None
        files = [try_to_load_from_cache(place, name) for name in ("config.json", "tokenizer_config.json")]
        return Path(files[0]).parent if all(isinstance(file, str) for file in files) else None

    def _model_config(self, place: Path | str | None) -> tuple[dict[str, Any], Path | str]:
        """The model's config.json, and where it was read: at `place`, else from the recipe's copy, else from the Hub."""
        r = self.recipe
        if r.scratch is not None:
            return read_json(r.path(r.scratch.config)), r.path(r.scratch.config)
        if place is None and r.config is not None:
            return read_json(r.path(r.config)), r.path(r.config)
        return families.read_config(place or r.model_path()), place or r.model_path()

    def redecides(self) -> bool:
        """Whether the recipe's model decides every slot at every step; from its config.json."""
        return families.class_of(self._model_config(self.here())[0].get("model_type")).redecides

    def check_inputs(self, *, everything: bool = True) -> "Inputs":
        """Read all questions and match LoRA targets before any stage starts, so that a bad one costs no work.

        everything: False (a dry run) leaves out what is not on this machine and fetches nothing if the recipe has a config.
        """
        from cdlm.families import convert

        r = self.recipe
        place = r.model_path() if everything and r.scratch is None else self.here()
        config, source = self._model_config(place)
        if r.config is not None and place is not None:
            agree(self._stock(config, place), self._stock(read_json(r.path(r.config)), None), str(r.model), str(r.path(r.config)))
        facts = None
        if r.scratch is None:
            facts = self.teacher_facts(families.facts_of(place or source, config, families.find(config, r.family)))
            self._check_teacher(facts)
        if r.evaluate.autoregressive is not None:
            self._other("autoregressive", None)
        if r.evaluate.draft_model is not None:
            self._other("draft_model", r.family)
        model = convert.skeleton(self._stock(config, place))
        self._check_objective(model.config)
        if r.scratch is None and everything and isinstance(place, Path):  # weights that are damaged or can't be read are refused now
            files.require_sound_weights(place)
            if (place / "config.json").is_file():
                checkpoint.Files(place)
        if r.trajectories is not None:
            self.check_trajectories(getattr(model.config, "max_position_embeddings", None))
        filled = r.decode.max_new_tokens if facts is None else slots(facts, r.decode.max_new_tokens, r.decode.block_length)
        longest = r.data.max_prompt_tokens + filled
        room = getattr(model.config, "max_position_embeddings", None)
        if room is not None and longest > room:
            raise ValueError(
                f"data.max_prompt_tokens {r.data.max_prompt_tokens} and decode.max_new_tokens {r.decode.max_new_tokens} are {longest} "
                f"positions; the model has {room}"
            )
        if r.train.objective == "tidar":
            self._check_room_of_drafts(model.config)
        if r.train.lora is not None:
            from cdlm.trainer import match_targets

            match_targets(model, r.train.lora.targets)
        prompts = tests = None
        if place is not None:
            tokenizer = self._checked_tokenizer(facts, place)
            with tempfile.TemporaryDirectory() as folder, files.names_path(Path(folder)):  # refused now, not at the end
                model.config.save_pretrained(folder)
                families.save_tokenizer(tokenizer, Path(folder))
            if r.data.prompts is not None and r.trajectories is None and (everything or not data.is_hub(r.data.prompts)):
                prompts = self.examples(tokenizer, "prompts", r.collect.num_prompts if r.collect else r.train.num_examples)
            if everything or not data.is_hub(r.data.test):
                tests = self.examples(tokenizer, "test", r.evaluate.num_prompts)
        family = families.find(config, r.family).NAME if r.scratch is None else "scratch"
        return Inputs(model, family, facts, source, prompts, tests)

    def _check_objective(self, config: Any) -> None:
        """A ValueError for an objective that a model of this config can't be trained with, or a block that is not its canvas."""
        r, kind = self.recipe, families.class_of(config.model_type)
        allowed, redecides = kind.objectives, kind.redecides
        if r.train.objective not in allowed:
            raise ValueError(
                f"train.objective is {r.train.objective!r}; a model of type {config.model_type} is trained with {', '.join(allowed)}"
            )
        for name in r.evaluate.methods or []:
            if redecides and name not in (*REDECIDING_METHODS, OTHER_MODEL):
                raise ValueError(
                    f"evaluate.methods has {name}; a model that decides every slot at every step has {', '.join(REDECIDING_METHODS)}"
                )
            if not redecides and name == "transformers_generate":
                raise ValueError(f"evaluate.methods has {name}; transformers has no diffusion decoding of type {config.model_type}")
        _check_unread(r, redecides)
        canvas = getattr(config, "canvas_length", None)
        if canvas is not None and r.decode.block_length != canvas:
            raise ValueError(f"decode.block_length is {r.decode.block_length}; this model's canvas has {canvas} slots, and a block is one")

    def _check_room_of_drafts(self, config: Any) -> None:
        """A ValueError where a model with this config has no positions for the masks and drafts behind the budget."""
        from cdlm.speculate import SpeculateConfig

        r, d = self.recipe, self.recipe.decode
        most = max(proposals_of(r, config), *r.evaluate.proposals, 1)
        asked = f"data.max_prompt_tokens {r.data.max_prompt_tokens} and decode.max_new_tokens {d.max_new_tokens}"
        SpeculateConfig(d.max_new_tokens, d.block_length, most).check_room(config, r.data.max_prompt_tokens, asked)

    def _check_teacher(self, facts: families.Facts) -> None:
        """A ValueError for a model with these facts from which the recipe can't start."""
        r = self.recipe
        methods = r.evaluate.methods or ()
        if r.train.objective in ("ar", "tidar"):
            autoregressive(facts, f"objective {r.train.objective}")
        elif "autoregressive" in methods:
            autoregressive(facts, "evaluate.methods autoregressive")
        own = trajectories.teacher_decoding(facts, r.decode.max_new_tokens, r.decode.block_length, stop_at_eos=True)
        if r.train.objective in BLOCKWISE and (facts.block_origin, facts.prompt_attention) == ("zero", "bidirectional"):
            raise ValueError(
                f"{r.model} has block_origin 'zero' and prompt_attention 'bidirectional'; a block-causal student of it would have no "
                "exact cache: prompt_attention must be block_causal or causal"
            )
        if r.train.objective == "cdlm" and facts.prompt_attention == "causal" and not facts.block_causal:
            raise ValueError(
                f"{r.model} is a causal LM: it can't fill slots under full attention, so there are no trajectories to collect; "
                "train.objective bd3lm makes a block diffusion model of it"
            )
        caches = [name for name in methods if name in ("teacher_prefix_cache", "teacher_dual_cache", "teacher_interval_cache")]
        if caches and own.block_causal:
            raise ValueError(f"evaluate.methods has {caches[0]}; this teacher is a block diffusion model, whose own cache is exact")

    def _stock(self, config: dict[str, Any], place: Path | str | None) -> Any:
        """The stock transformers config of a config.json, be it a family's own or a stock one."""
        from cdlm.families import convert

        r = self.recipe
        if r.scratch is None:
            module = families.find(config, r.family)
            if hasattr(module, "entries"):
                return convert.native_config(config, module, families.facts_of(place, config, module) if place else module.facts(config))
        return convert.stock_config(config)

    def _checked_tokenizer(self, facts: families.Facts | None, place: Path | str) -> Any:
        if facts is not None:
            return families.load_tokenizer(place, facts)
        from transformers import AutoTokenizer

        assert self.recipe.scratch is not None
        return AutoTokenizer.from_pretrained(self.recipe.path(self.recipe.scratch.tokenizer), trust_remote_code=False)

    def check_trajectories(self, room: int | None) -> None:
        """The folder that the recipe names fits the recipe and the model, or one ValueError. room: the positions of the model."""
        asked = trajectories.read_manifest(self.trajectories)["request"]
        self.require_sound("collect")
        r = self.recipe
        for name in ("max_new_tokens", "block_length"):
            if (there := asked.get("decode", {}).get(name)) != (here := getattr(r.decode, name)):
                raise ValueError(f"decode.{name} is {here}; the trajectories at {self.trajectories} were made with {there}")
        if "sampler" in asked.get("decode", {}) or r.decode.sampler is not None:
            there = {**asdict(Sampler()), **(asked.get("decode", {}).get("sampler") or {})}
            if there != (here := asdict(r.decode.sampler or Sampler())):
                raise ValueError(f"decode.sampler is {here}; the trajectories at {self.trajectories} were made with {there}")
        longest = trajectories.longest_prompt(self.trajectories)
        if room is not None and longest + r.decode.max_new_tokens > room:
            raise ValueError(
                f"the trajectories at {self.trajectories} have a prompt of {longest} tokens, which with decode.max_new_tokens "
                f"{r.decode.max_new_tokens} is more than the model's {room} positions; import them with a smaller --max-prompt-tokens"
            )
        if (there := asked.get("teacher")) != self.weights_hash():
            raise ValueError(
                f"the trajectories at {self.trajectories} belong to another model than {r.model}: its hash is {self.weights_hash()}, "
                f"theirs {there}"
            )

    def decode_config(self) -> DecodeConfig:
        """The student's own decoding."""
        d = self.recipe.decode
        return DecodeConfig(
            max_new_tokens=d.max_new_tokens, block_length=d.block_length, confidence_threshold=d.confidence_threshold
        )

    def sampler(self, which: str) -> DecodeConfig:
        """How "teacher" or "student" decodes where every step decides every slot."""
        d = self.recipe.decode
        own = (d.student_sampler if which == "student" else None) or d.sampler or Sampler()
        return DecodeConfig(max_new_tokens=d.max_new_tokens, block_length=d.block_length, order="entropy", **asdict(own))

    def weights_hash(self) -> str:
        r = self.recipe
        if r.scratch is not None:
            config, tokenizer = r.path(r.scratch.config), r.path(r.scratch.tokenizer)
            return f"scratch {files.sha256(config)} {self._hashes.of(tokenizer)}"
        return self._hashes.of(r.model_path())


def _require_stated(sums: Path, remedy: str) -> None:
    """A ValueError that names the first file which is not what its checksums say, and what to do."""
    for path, why in files.faults(sums).items():
        raise ValueError(f"{path} is {why}; {remedy}, or, if you changed it, take it for good with cdlm verify {sums.parent} --seal")


def _check_unread(r: Recipe, redecides: bool) -> None:
    """A ValueError for a key that nothing reads of such a model, and that is given another value than its default."""
    kind = "decides every slot at every step" if redecides else "fills a slot once"
    for name, key in UNREAD[redecides]:
        part = getattr(r, name)
        for f in fields(part) if part is not None else ():
            default = f.default if f.default_factory is MISSING else f.default_factory()
            if f.name == key and (value := getattr(part, key)) != default:
                raise ValueError(f"{name}.{key} is {value}; nothing reads it of a model that {kind}: leave it out")
    if r.train.objective == "uniform" and r.decode.student_sampler is not None:
        raise ValueError("decode.student_sampler is given; objective uniform has no student: leave it out")


def request_of(run: Run, stage: str) -> dict[str, Any]:
    """The values that decide what a stage writes, as JSON has them."""
    return json.loads(json.dumps(_request(run, stage)))


def _request(run: Run, stage: str) -> dict[str, Any]:
    r = run.recipe
    base = {"seed": r.seed, "family": r.family, "dtype": r.dtype, "teacher": run.weights_hash()}
    data_keys = {k: v for k, v in r.section("data")["data"].items() if k not in ("test", "test_answer_key", "special_tokens")}
    if r.data.special_tokens:
        data_keys["special_tokens"] = True
    unread = ("confidence_threshold", "proposals", "student_sampler", *(("sampler",) if r.decode.sampler is None else ()))
    decode = {k: v for k, v in r.section("decode")["decode"].items() if k not in unread}
    made = {**base, "data": data_keys, **r.section("collect"), "decode": decode}
    if made["collect"] is not None and made["collect"]["top_k"] == Collect.top_k:
        del made["collect"]["top_k"]  # as `plain` below
    if r.data.prompts is not None:
        made["prompts"] = run.data_hash("prompts")
    if r.trajectories is not None:
        made["trajectories"] = trajectories.read_manifest(run.trajectories)["request_hash"]
    if stage == "collect":
        return made
    unread = (
        "save_steps", "logging_steps", "gradient_checkpointing", *(() if r.train.objective == "tidar" else ("alpha",)),
        *(() if r.train.bf16 else ("bf16",)),
    )  # fmt: skip
    plain = {f.name: f.default for f in fields(r.train) if f.name in ("ar_weight", "self_conditioning", "finish")}  # few runs state these
    training = {k: v for k, v in r.section("train")["train"].items() if k not in unread and not (k in plain and v == plain[k])}
    trained = {**made, "train": training, **r.section("scratch")}
    if stage == "train":
        return trained
    measured = {**trained, **r.section("decode", "evaluate"), "test": run.data_hash("test")}
    for name in ("sampler", "student_sampler"):
        if measured["decode"][name] is None:
            del measured["decode"][name]
    if r.evaluate.autoregressive is not None:
        measured["autoregressive"] = run._hashes.of(r.path(r.evaluate.autoregressive))
    if r.train.objective == "tidar":
        measured["assistant"] = None if r.evaluate.draft_model is None else run._hashes.of(r.path(r.evaluate.draft_model))
        measured["hardware"] = r.hardware if r.decode.proposals == "auto" else None
    else:  # what the other objectives do not read
        measured["decode"] = {k: v for k, v in measured["decode"].items() if k != "proposals"}
        measured["evaluate"] = {k: v for k, v in measured["evaluate"].items() if k not in ("proposals", "betas", "draft_model")}
    measured |= {"device": r.device, "attention": r.attention, "test_answer_key": r.data.test_answer_key}
    if stage == "evaluate":
        return measured
    return {**measured, **r.section("export")} if stage == "export" else {**measured, **r.section("export", "push")}


def _leave_note(run: Run, stage: str) -> None:
    """The values that a stage was asked for, beside a folder that goes out without them, and before them their checksum."""
    name, text = f"{stage}.request.json", files.json_text(request_of(run, stage))
    files.write_sums(run.out / NOTE_SUMS[name], {name: text.encode()})
    files.write_text(run.out / name, text)


def is_done(run: Run, stage: str, *, sound: bool = True) -> bool:
    """Is the stage's result there, and is it of these values? Another recipe's result is an error.

    sound: also that its files are what was written, by their checksums. A missing file makes a stage not done, and so does a damaged
    shard of the run's own trajectories; anything else that is damaged, or has no checksums, is an error that names it.
    """
    last = {
        "collect": run.trajectories / "manifest.json", "train": run.student / "request.json",
        "evaluate": run.out / "report.json", "export": run.exported / "README.md", "push": run.out / "push.request.json",
    }[stage]
    if not last.is_file():
        return False
    note = {
        "collect": run.trajectories / "collection.json", "train": run.student / "request.json",
        "evaluate": run.out / "evaluate.request.json", "export": run.out / "export.request.json", "push": last,
    }[stage]
    if (sums := run.sums(stage)) is not None and note.is_file():
        files.require_as_written(note, sums)
    if note.name in NOTE_SUMS and files.is_there(own := run.out / NOTE_SUMS[note.name]):  # of an older version there is none
        _require_stated(own, f"remove {last.parent if stage == 'export' else last} to make it again")
    trajectories.compare(note, request_of(run, stage), last if stage in ("evaluate", "push") else last.parent)
    return not sound or stage in run._sound or _is_sound(run, stage)


def _is_sound(run: Run, stage: str) -> bool:
    sums = run.sums(stage)
    if sums is not None and files.is_there(sums):
        wrong = files.faults(sums)
        missing = [path for path, why in wrong.items() if why.startswith("missing")]
        own = stage == "collect" and run.shared_trajectories is None
        if wrong and (own or len(missing) == len(wrong)):
            if not own:
                files.require_names(sums, ["report.json", *beside(run.out)] if stage == "evaluate" else files.sealed(sums.parent))
            for path, why in wrong.items():
                run.say(f"{stage}: {path} is {why}")
            return False
    run.require_sound(stage)
    return True


# ---- collect ---------------------------------------------------------------------------------------------------------


def collect(run: Run) -> None:
    """The teacher decodes the prompts; see trajectories.py."""
    r, c = run.recipe, run.recipe.collect
    if c is None:
        raise ValueError("this recipe has no collect section: its objective trains on answers, not on trajectories")
    model = run.load_teacher()
    tokenizer = run.tokenizer(model.facts)
    examples = run.examples(tokenizer, "prompts", c.num_prompts)
    if model.redecides:
        _collect_canvases(run, model, tokenizer, examples)
        return
    count = len(examples) * len(c.temperatures)
    width = slots(model.facts, r.decode.max_new_tokens, r.decode.block_length)
    size = trajectories.hidden_bytes(count, width, model.hidden_size)
    there = sum(file.stat().st_size for file in run.trajectories.glob("shard-*.safetensors"))
    run.say(f"collect: {count} trajectories, {size / 2**20:.1f} MiB of hidden rows, into {run.trajectories}")
    free = shutil.disk_usage(run.out).free
    if size - there > free:
        raise ValueError(f"collect needs {(size - there) / 2**30:.1f} GiB for hidden rows; {run.out} has {free / 2**30:.1f} GiB free")
    manifest = trajectories.collect(
        model, examples, run.trajectories, right=lambda example, ids: example.is_right(tokenizer.decode(ids)),
        config=changed(run.decode_config(), stop_at_eos=c.stop_at_eos),
        temperatures=c.temperatures, batch_size=c.batch_size, shard_size=c.shard_size,
        seed=r.seed, screen=trajectories.Screen(**asdict(c.screen)), request=request_of(run, "collect"), say=run.say,
        processes=run.processes,
    )
    if run.processes.count == 1:  # of several each wrote a part
        run._sound.add("collect")
    run.say(f"collect: {manifest['kept']} of {manifest['trajectories']} trajectories kept; screened: {manifest['screened'] or 'none'}")


def _collect_canvases(run: Run, model: DiffusionLM, tokenizer: Any, examples: list[data.Example]) -> None:
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
    free = shutil.disk_usage(run.out).free
    if most > free:
        raise ValueError(f"collect needs up to {most / 2**30:.1f} GiB for logits; {run.out} has {free / 2**30:.1f} GiB free")
    manifest = canvases.collect(
        model, examples, run.trajectories, right=lambda example, ids: example.is_right(tokenizer.decode(ids)), config=config, top_k=c.top_k,
        batch_size=c.batch_size, shard_size=c.shard_size, seed=r.seed, screen=trajectories.Screen(**asdict(c.screen)),
        request=request_of(run, "collect"), say=run.say, processes=run.processes,
    )
    if run.processes.count == 1:  # of several each wrote a part
        run._sound.add("collect")
    run.say(
        f"collect: {manifest['kept']} of {manifest['trajectories']} trajectories kept; screened: {manifest['screened'] or 'none'}; "
        f"{manifest['bytes']:,} bytes"
    )


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

    from cdlm.trainer import check_engine

    if (last := get_last_checkpoint(str(checkpoints))) is not None:
        check_engine(Path(last), engine)
    return last


def deal_rows(batch_size: int, accumulation: int, processes: int) -> tuple[int, int]:
    """Rows of a forward and forwards of a step for each of some processes, which share the rows of one process' step.

    Forwards are dealt out whole where that is possible: then every process takes some of the very batches of one process. Else each of
    those is split into equal parts, the largest that fit, so that rows that stand together stay so.
    """
    rows = batch_size * accumulation
    if rows % processes:
        raise ValueError(
            f"a step has train.batch_size {batch_size} x train.accumulation {accumulation} = {rows} rows, which {processes} processes "
            f"can't share evenly; numbers that can: {', '.join(str(n) for n in range(1, rows + 1) if rows % n == 0)}"
        )
    each = rows // processes
    size = math.gcd(batch_size, each)
    return size, each // size


def autoregressive(facts: families.Facts, asked_by: str) -> None:
    """A ValueError unless blocks of one token are next-token prediction for a model with these facts."""
    wrong = {name: getattr(facts, name) for name, value in AUTOREGRESSIVE.items() if getattr(facts, name) != value}
    if wrong:
        raise ValueError(f"{asked_by} needs a causal model with shifted logits (family causal); this one has {wrong}")


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
    run._require_sound_log()
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
    speak_of_another = (
        "report.json", "report.md", "report.html", "pareto.png", "samples.jsonl", REPORT_SUMS, *PUSHED, run.exported.name,
    )  # fmt: skip
    with files.replacing_folder(run.student, before=[run.out / name for name in speak_of_another]) as partial:
        if peft_model is not None:
            peft_model.save_pretrained(partial, state_dict=state)
        else:
            native.state(model.hf.config, trained_facts(run.recipe, model.facts))
            model.hf.save_pretrained(partial, state_dict=state)
            families.save_tokenizer(tokenizer, partial)
        files.write_json(partial / "request.json", request)
    run._sound.add("train")


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
    from cdlm.evaluate.assisted import GenerateConfig
    from cdlm.evaluate.run import Measured, Method, mean, question_seconds, reveals, time_all
    from cdlm.evaluate.run import run as run_methods

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

    @contextlib.contextmanager
    def teacher_weights() -> Iterator[None]:
        with peft_model.disable_adapter() if peft_model is not None else contextlib.nullcontext():
            yield

    naive = trajectories.teacher_decoding(
        teacher.facts, r.decode.max_new_tokens, r.decode.block_length, stop_at_eos=e.teacher_stops_at_eos
    )
    other = run.load_other()
    tau = r.decode.confidence_threshold
    thresholds = sorted({*e.thresholds, tau})
    own = run.decode_config()

    drafting = _drafting(run, teacher, student, teacher_weights) if r.train.objective == "tidar" else {}
    if r.decode.proposals == "auto" and (warning := slow_proposals(r, teacher.hf.config)):
        run.say(f"evaluate: decode.proposals is auto: {warning}")
    if teacher.redecides:
        naive, own = run.sampler("teacher"), run.sampler("student")
        assert own.entropy_bound is not None
        tau = own.entropy_bound
        thresholds = sorted({*e.entropy_bounds, tau})

    def methods(name: str) -> list[Method]:
        if teacher.redecides and name in REDECIDING_METHODS:
            return _redeciding(name, naive, own, thresholds, cut_steps, (teacher, teacher_weights), student)
        if name == "teacher":
            return [Method(name, None, naive, teacher, teacher_weights)]
        if name in ("teacher_threshold", "teacher_threshold_stop"):
            stop = e.teacher_stops_at_eos or name == "teacher_threshold_stop"
            return [
                Method(name, t, changed(naive, confidence_threshold=t, stop_at_eos=stop), teacher, teacher_weights)
                for t in thresholds
            ]
        if name == "teacher_fixed":
            return [Method(name, k, changed(naive, tokens_per_step=int(k)), teacher, teacher_weights) for k in sorted(set(e.fixed))]
        if name == "teacher_factor":
            return [Method(name, f, changed(naive, factor=f), teacher, teacher_weights) for f in sorted(set(e.factors))]
        if name == "teacher_entropy_bound":
            bounds = sorted(set(e.entropy_bounds))
            return [Method(name, b, changed(naive, entropy_bound=b, order="entropy"), teacher, teacher_weights) for b in bounds]
        if name in ("teacher_prefix_cache", "teacher_dual_cache"):
            kind = name.removeprefix("teacher_").removesuffix("_cache")
            return [
                Method(name, t, changed(naive, confidence_threshold=t, approximate_cache=kind), teacher, teacher_weights)
                for t in thresholds
            ]
        if name == "teacher_interval_cache":
            every = {"prompt_refresh": e.prompt_refresh, "response_refresh": e.response_refresh}
            return [Method(name, None, changed(naive, approximate_cache="interval", **every), teacher, teacher_weights)]
        if name == "autoregressive_model":
            assert other is not None
            return [Method(name, None, GenerateConfig(r.decode.max_new_tokens), other, contextlib.nullcontext)]
        if name == "teacher_block_causal":
            return [Method(name, None, changed(own, tokens_per_step=1), teacher, teacher_weights)]
        if r.train.objective == "tidar":
            return drafting[name]
        if name == "autoregressive":
            return [Method(name, None, DecodeConfig(r.decode.max_new_tokens, 1, tokens_per_step=1), teacher, teacher_weights)]
        if name == "student_sequential":
            return [Method(name, None, changed(own, tokens_per_step=1), student, contextlib.nullcontext)]
        if name == "student":
            return [
                Method(name, t, changed(own, confidence_threshold=t), student, contextlib.nullcontext) for t in thresholds
            ]
        if name == "student_uncached":
            return [Method(name, tau, changed(own, use_cache=False), student, contextlib.nullcontext)]
        return [
            Method(name, s, changed(naive, steps=int(s)), teacher, teacher_weights) for s in sorted(cut_steps)
        ]

    measured: list[Measured] = []
    cut_steps = set(e.truncated_steps)
    truncated: float | None = None
    first = [m for name in ("student", "teacher") if name in e.methods for m in methods(name)]
    measured += run_methods(first, examples, tokenizer, e.batch_size, run.say, run.processes)
    at_tau = [m for m in measured if m.method.name == "student" and m.method.parameter == tau]
    if at_tau:
        truncated = max(naive.blocks + (teacher.facts.block_origin == "zero"), round(mean(row.steps for row in at_tau[0].rows)))
        if teacher.redecides:  # steps of a block, of which an answer has as many as it has commits
            rows = at_tau[0].rows
            truncated = max(1, round(sum(row.steps for row in rows) / sum(row.commit_forwards for row in rows)))
        cut_steps |= {truncated}
    rest = [m for name in e.methods if name not in ("student", "teacher") for m in methods(name)]
    measured += run_methods(rest, examples, tokenizer, e.batch_size, run.say, run.processes)
    if not run.processes.main:  # the clock runs in one process, with the machine to itself; the others wait for its report
        run.processes.wait()
        return {}
    order = {name: i for i, name in enumerate(e.methods)}
    measured.sort(key=lambda m: order[m.method.name])
    timed = _spread(examples, e.latency_prompts)
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
            shape=_shape(teacher.hf.config), context=r.data.max_prompt_tokens, generate=r.decode.max_new_tokens,
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
        run._sound.add("evaluate")
    run.processes.wait()
    return found


def _redeciding(
    name: str, sampler: DecodeConfig, own: DecodeConfig, bounds: list[float], cut_steps: set[int], teacher: tuple[DiffusionLM, Any],
    student: DiffusionLM,
) -> list[Any]:
    """Methods of a model that decides every slot at every step; see evaluate/run.py. sampler, own: the teacher's and the student's."""
    from cdlm.evaluate.assisted import DiffusionGenerateConfig
    from cdlm.evaluate.run import Method

    if name == "teacher":
        return [Method(name, None, sampler, *teacher, title="teacher, its own sampler")]
    if name == "teacher_truncated":
        cut = "teacher, its own sampler cut to few steps a block"
        return [Method(name, s, replace(sampler, max_denoising_steps=int(s)), *teacher, title=cut) for s in sorted(cut_steps)]
    if name == "teacher_entropy_bound":
        return [Method(name, b, replace(own, entropy_bound=b), *teacher, title="teacher, the student's sampler") for b in bounds]
    if name == "transformers_generate":
        return [Method(name, None, DiffusionGenerateConfig(sampler), *teacher)]
    return [Method(name, b, replace(own, entropy_bound=b), student, contextlib.nullcontext, "student, its own sampler") for b in bounds]


def _shape(config: Any) -> roofline.Shape:
    return roofline.shape_of_config(config.to_dict(), "the model's config")


def proposals_of(recipe: Recipe, config: Any) -> int:
    """M of the recipe for a model of these sizes: its own number, K, or what the roofline picks for its card (at least 1)."""
    d = recipe.decode
    if isinstance(d.proposals, int):
        return d.proposals
    if d.proposals is None:
        return d.block_length
    return max(1, roofline.best_proposals(**_priced(recipe, config)))


def _priced(recipe: Recipe, config: Any) -> dict[str, Any]:
    """What the roofline asks of a recipe and a model of these sizes to price drafts."""
    d = recipe.decode
    assert recipe.hardware is not None
    return {
        "shape": _shape(config), "hardware": roofline.card(recipe.hardware), "block": d.block_length,
        "context": recipe.data.max_prompt_tokens, "generate": d.max_new_tokens, "size": families.DTYPES[recipe.dtype].itemsize,
    }


def slow_proposals(recipe: Recipe, config: Any) -> str | None:
    """What to say of proposals auto where by the roofline not even one pays on the recipe's card; None where one does."""
    priced = _priced(recipe, config)
    if roofline.best_proposals(**priced):
        return None
    return (
        f"one proposal is the least, and on {recipe.hardware} a forward with it takes {roofline.forward_over_one(count=1, **priced):.1f} "
        "times as long as one of a single token: slower than autoregressive decoding below so many tokens a forward"
    )


def _drafting(run: Run, base: DiffusionLM, student: DiffusionLM, base_weights: Callable[[], Any]) -> dict[str, list[Any]]:
    """What can be measured after objective tidar, by its name in the recipe. base_weights puts the weights in place that the recipe starts
    from, where both share them."""
    from cdlm.evaluate.assisted import GenerateConfig
    from cdlm.evaluate.run import Method
    from cdlm.speculate import SpeculateConfig

    r, e = run.recipe, run.recipe.evaluate
    budget, length, own = r.decode.max_new_tokens, r.decode.block_length, proposals_of(r, base.hf.config)

    def of_base(name: str, config: Any) -> Method:
        return Method(name, None, config, base, base_weights)

    def of_student(name: str, parameter: float | None, **values: Any) -> Method:
        return Method(name, parameter, SpeculateConfig(budget, **{"draft_length": length, **values}), student, contextlib.nullcontext)

    assistant = None
    if e.draft_model is not None and "assisted" in (e.methods or ()):
        folder, family = run._other("draft_model", r.family)
        assistant = families.load(folder, family=family, dtype=r.dtype, device=r.device, attention="sdpa").hf
    return {
        "autoregressive": [of_base("autoregressive", SpeculateConfig(budget, 1))],
        "student_autoregressive": [of_student("student_autoregressive", None, draft_length=1)],
        "tidar": [of_student("tidar", count, proposals=count) for count in sorted({*e.proposals, own}, reverse=True)],
        "tidar_linear": [of_student("tidar_linear", None, layout="linear")],
        "tidar_mix": [of_student("tidar_mix", beta, proposals=own, rule="mix", beta=beta) for beta in sorted(set(e.betas))],
        "transformers_greedy": [of_base("transformers_greedy", GenerateConfig(budget))],
        "prompt_lookup": [of_base("prompt_lookup", GenerateConfig(budget, prompt_lookup=length))],
        "assisted": [of_base("assisted", GenerateConfig(budget, assistant=assistant))],
    }


def _spread(examples: list[data.Example], count: int) -> list[data.Example]:
    """`count` examples, taken from the groups in turn so that each has its share."""
    groups: dict[str, list[data.Example]] = {}
    for example in examples:
        groups.setdefault(example.group, []).append(example)
    out: list[data.Example] = []
    place = 0
    while len(out) < min(count, len(examples)):
        out += [rows[place] for rows in groups.values() if place < len(rows)]
        place += 1
    return out[:count]


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
    if r.export.dtype is not None:
        student.hf.to(families.DTYPES[r.export.dtype])
    for name in PUSHED:
        (run.out / name).unlink(missing_ok=True)  # speaks of the export that is being replaced
    _leave_note(run, "export")
    if adapter is not None and student.unmergeable is not None:
        run.say(f"export: the folder is the adapter alone, not merged: {student.unmergeable}")
        with files.replacing_folder(run.exported) as folder:
            adapter(folder)
        run._sound.add("export")
        run.say(f"export: {run.exported}")
        return
    hub.save(
        student, tokenizer, run.exported, facts=facts, max_new_tokens=budget,
        decoding=decoding or ({} if threshold is None else {"confidence_threshold": threshold}),
        with_decoder=threshold is not None and decoding is None,
        card=card(stock=student.masks_suffice),
        eval_results=results, adapter=adapter,
    )
    run._sound.add("export")
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
    _leave_note(run, "push")
    run.say(f"push: {address}")
