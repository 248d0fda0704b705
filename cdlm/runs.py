"""A run: a recipe and the folder it writes to. What it starts from, what of its inputs is refused before any work, what each stage was
asked for, and which stages are done. Does no stage's work (stages.py).
Every stage leaves a note of what it was asked to do. A folder that holds the result of other values is an error, not a redo.
Every stage leaves checksums of what it wrote (see files.py), and the next one reads nothing that differs from them: a damaged shard or
checkpoint is made again, anything else that is damaged is an error that names the file.
"""

import json
import tempfile
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from cdlm import canvases, data, families, files, roofline, trajectories
from cdlm.decode import DecodeConfig, slots
from cdlm.evaluate.report import SUMS as REPORT_SUMS
from cdlm.families import causal, checkpoint, native
from cdlm.families.base import DiffusionLM
from cdlm.families.decoder import read_json
from cdlm.processes import ALONE, Processes
from cdlm.recipe import OTHER_MODEL, Collect, Recipe, Sampler
from cdlm.verify import LOG_SUMS, NOTE_SUMS

STAGES = ("collect", "train", "evaluate", "export")
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
    sound: set[str] = field(default_factory=set, init=False, repr=False)  # stages whose files were compared or written
    _hub: dict[str, tuple[Any, data.HubData]] = field(default_factory=dict, init=False, repr=False)
    _examples: dict[tuple[str, int | None], list[data.Example]] = field(default_factory=dict, init=False, repr=False)
    _hashes: trajectories.Hashes = field(default_factory=trajectories.Hashes, init=False, repr=False)

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
        if stage not in self.sound and sums is not None:
            files.require_sound(sums, self.out / "report.json" if stage == "evaluate" else sums.parent)
            if stage == "train":
                self.require_sound_log()
        self.sound.add(stage)

    def require_sound_log(self) -> None:
        """A ValueError unless log.jsonl, where it was not removed, is what training wrote. The run of an older version has no checksum of
        it before its report is finished; then the report's is the one."""
        log, sums, report_sums = self.out / "log.jsonl", self.out / LOG_SUMS, self.out / REPORT_SUMS
        if not files.is_there(log):
            return
        if not files.is_there(sums) and files.is_there(report_sums) and log.name in files.read_sums(report_sums):
            files.require_as_written(log, report_sums, log)
        else:
            files.require_sound(sums, log, "to go on without loss curves")

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

    def load_draft_model(self) -> DiffusionLM:
        """The model that evaluate.draft_model names, in the form that transformers' own generate takes."""
        r = self.recipe
        folder, family = self._other("draft_model", r.family)
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
            assert facts is not None  # a model from scratch trains on answers
            self.check_trajectories(getattr(model.config, "max_position_embeddings", None), facts, model.get_input_embeddings().weight)
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

    def check_trajectories(self, room: int | None, facts: families.Facts, embedding_VD: Any) -> None:
        """The folder that the recipe names fits the recipe and the model, or one ValueError. room: the positions of the model;
        embedding_VD: the shape of its embedding."""
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
        if (there := asked.get("teacher")) != self.weights_hash():
            raise ValueError(
                f"the trajectories at {self.trajectories} belong to another model than {r.model}: its hash is {self.weights_hash()}, "
                f"theirs {there}"
            )
        self._check_rows(facts, embedding_VD.shape)
        longest = trajectories.longest_prompt(self.trajectories)
        if room is not None and longest + r.decode.max_new_tokens > room:
            raise ValueError(
                f"the trajectories at {self.trajectories} have a prompt of {longest} tokens, which with decode.max_new_tokens "
                f"{r.decode.max_new_tokens} is more than the model's {room} positions; import them with a smaller --max-prompt-tokens"
            )

    def _check_rows(self, facts: families.Facts, shape: Any) -> None:
        """The rows of the folder that the recipe names are such as its teacher makes, or one ValueError."""
        d, schema = self.recipe.decode, trajectories.read_manifest(self.trajectories)["schema"]
        vocabulary, width = max(shape[0], (facts.mask_token_id or 0) + 1), shape[1]  # a mask token that is added has a row of its own
        filled = slots(facts, d.max_new_tokens, d.block_length)
        if self.redecides() != ("canvas" in schema):
            raise ValueError(f"the trajectories at {self.trajectories} are of another kind of model than {self.recipe.model}")
        if self.redecides():
            canvases.check_folder(self.trajectories, vocabulary=vocabulary, slots=filled, canvas_length=d.block_length)
        else:
            trajectories.check_folder(self.trajectories, vocabulary=vocabulary, slots=filled, width=width)

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


def leave_note(run: Run, stage: str) -> None:
    """The values that a stage was asked for, beside a folder that goes out without them, and before them their checksum."""
    name, text = f"{stage}.request.json", files.json_text(request_of(run, stage))
    files.write_sums(run.out / NOTE_SUMS[name], {name: text.encode()})
    files.write_text(run.out / name, text)


def is_done(run: Run, stage: str, *, sound: bool = True) -> bool:
    """Is the stage's result there, and is it of these values? Another recipe's result is an error.

    sound: also that its files are what was written, by their checksums. A missing file of a report or an export makes its stage not done,
    and so does a missing or damaged file of the run's own trajectories. Anything else that is damaged, or has no checksums, is an error
    that names it, and so is what is missing of a student or of the notes: a training takes too long to be done again unasked.
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
    result = last if stage in ("evaluate", "push") else last.parent
    if not files.is_there(note):
        raise ValueError(f"{note} is missing, so what {result} was made of is not known: remove {result} to make it again")
    if (sums := run.sums(stage)) is not None:
        files.require_as_written(note, sums, result)
    if note.name in NOTE_SUMS and files.is_there(own := run.out / NOTE_SUMS[note.name]):  # of an older version there is none
        files.require_sound(own, result)
    trajectories.compare(note, request_of(run, stage), result)
    return not sound or stage in run.sound or _is_sound(run, stage)


def _is_sound(run: Run, stage: str) -> bool:
    sums = run.sums(stage)
    if sums is not None and stage != "train" and files.is_there(sums):
        wrong = files.faults(sums)
        missing = [path for path, why in wrong.items() if why.startswith("missing")]
        older = files.OLDER in wrong.get(str(sums), "")  # to be sealed, not collected again
        own = stage == "collect" and run.shared_trajectories is None and not older
        if wrong and (own or len(missing) == len(wrong)):
            for path, why in wrong.items():
                run.say(f"{stage}: {path} is {why}")
            return False
    run.require_sound(stage)
    return True


def autoregressive(facts: families.Facts, asked_by: str) -> None:
    """A ValueError unless blocks of one token are next-token prediction for a model with these facts."""
    wrong = {name: getattr(facts, name) for name, value in AUTOREGRESSIVE.items() if getattr(facts, name) != value}
    if wrong:
        raise ValueError(f"{asked_by} needs a causal model with shifted logits (family causal); this one has {wrong}")


# ---- drafts -----------------------------------------------------------------------------------------------------------


def shape_of(config: Any) -> roofline.Shape:
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
        "shape": shape_of(config), "hardware": roofline.card(recipe.hardware), "block": d.block_length,
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
