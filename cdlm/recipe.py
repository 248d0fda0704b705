"""Which values a run has. A recipe is a YAML file of values; this module knows their names, types and limits.

Everything is checked before any work: an unknown key, a missing key, a wrong type or a value outside its range is one
ValueError that names the key and what is allowed. Paths are relative to the recipe's folder.
"""

import dataclasses
import difflib
import math
import os
import reprlib
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from cdlm.terminal import visible

OBJECTIVES = ("cdlm", "mdlm", "bd3lm", "ar", "tidar", "uniform")
SCHEDULERS: dict[str, tuple[str, ...]] = {  # schedule -> what train.scheduler_kwargs may hold
    "constant": (), "constant_with_warmup": (), "linear": (), "cosine": ("num_cycles",),
    "cosine_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate"),
    "warmup_stable_decay": ("num_decay_steps", "num_stable_steps", "warmup_type", "decay_type", "min_lr_ratio", "num_cycles"),
}  # fmt: skip
SHAPES_OF_DECAY = ("linear", "cosine", "1-sqrt")
METHODS = (
    "teacher", "teacher_truncated", "teacher_threshold", "teacher_threshold_stop", "teacher_block_causal", "student", "student_uncached",
)
BASELINES = (
    "teacher_fixed", "teacher_factor", "teacher_entropy_bound", "teacher_prefix_cache", "teacher_dual_cache",
    "teacher_interval_cache",
)
OTHER_MODEL = "autoregressive_model"  # needs evaluate.autoregressive
METHODS_OF = {  # objective -> what can be measured after it
    "cdlm": (*METHODS, "transformers_generate"), "mdlm": METHODS,
    "bd3lm": ("autoregressive", "student_sequential", "student", "student_uncached"),
    "ar": ("autoregressive",), "uniform": ("teacher", "teacher_truncated", "transformers_generate"),
    "tidar": (
        "autoregressive", "student_autoregressive", "tidar", "tidar_linear", "tidar_mix", "transformers_greedy", "prompt_lookup",
        "assisted",
    ),
}
# Keys of train that only some objectives read; given another value than its default elsewhere, a key is refused. mdlm's recipes may
# carry those of cdlm.
READ_BY = {
    "distill_weight": ("cdlm", "mdlm"), "consistency_weight": ("cdlm", "mdlm"), "dlm_weight": ("cdlm", "mdlm"),
    **dict.fromkeys(("noise_floor", "noise_first_cap", "noise_ramp"), ("cdlm", "mdlm", "bd3lm", "uniform")),
    "complementary": ("bd3lm",), "alpha": ("tidar",), "ar_weight": ("uniform",), "self_conditioning": ("uniform", "cdlm"),
    "finish": ("cdlm",),
}


@dataclass(frozen=True)
class Scratch:
    """A model that starts from nothing. config: a config.json; tokenizer: a folder. init: see families/scratch.py."""

    config: str
    tokenizer: str
    init: str = "copying"


@dataclass(frozen=True)
class Data:
    """Where questions come from. prompts: those to train on; test: those to measure on, never trained on. Each is a .jsonl or
    .parquet file, or hub:USER/NAME[/CONFIG]@REVISION[:SPLIT] (split: train for prompts, test for test; only a commit as REVISION
    makes a run repeatable). prompts may be missing where the recipe names finished trajectories.

    prompt_key, answer_key: a column with text, or with a chat (list of {role, content} or {from, value}): its first user turn is
        the prompt, its first assistant turn the answer.
    test_answer_key: the answers' column in test, where it has another name there.
    accept_key: the column with a regular expression that every right answer matches, for questions with several.
    special_tokens: whether the text of a special token in a prompt or answer, as <|mask|>, stands for that token; else it is text.
    long_prompts: what becomes of a prompt of more than max_prompt_tokens: error or drop. long_answers: of an answer that does not
        fit into decode.max_new_tokens: error, cut (to the budget, without an end token) or drop. Both are counted and said.
        In test, drop means cut for answers: no question is left out of a measurement because its answer is long.
    """

    test: str
    prompts: str | None = None
    prompt_key: str = "prompt"
    answer_key: str = "answer"
    test_answer_key: str | None = None
    accept_key: str | None = None
    group_key: str | None = None
    chat_template: bool = True
    special_tokens: bool = False
    max_prompt_tokens: int = 512
    long_prompts: str = "error"
    long_answers: str = "error"


@dataclass(frozen=True)
class Sampler:
    """How a model decodes that decides every slot of a canvas at every step; see decode.DecodeConfig. The values are transformers' own.

    max_denoising_steps: of a canvas. entropy_threshold: what transformers calls confidence_threshold.
    """

    max_denoising_steps: int = 48
    entropy_bound: float = 0.1
    t_min: float = 0.4
    t_max: float = 0.8
    stability_threshold: int = 1
    entropy_threshold: float = 0.005


@dataclass(frozen=True)
class Decode:
    """max_new_tokens is the budget L_g, block_length is B, confidence_threshold the student's own tau.

    Of objective tidar block_length is K, the tokens of a draft, and proposals is M, the blocks of masks that stand behind the drafts in a
    forward: a number from 1 to K, null for K (the paper's), or auto: what the roofline picks for the recipe's `hardware`, the most with
    which no operator is bound by compute and a forward takes no longer than three of single tokens (roofline.best_proposals), at least 1.

    sampler: of a model that decides every slot at every step, which has no threshold: how the teacher decodes. student_sampler: how the
    student does (null: as the teacher).
    """

    max_new_tokens: int
    block_length: int
    confidence_threshold: float = 0.9
    proposals: int | str | None = None
    sampler: Sampler | None = None
    student_sampler: Sampler | None = None


@dataclass(frozen=True)
class Screening:
    """Which trajectories count as degenerate; see trajectories.Screen."""

    ngram: int = 8
    repeats: int = 3
    drop: bool = True
    correct_only: bool = False


@dataclass(frozen=True)
class Collect:
    """num_prompts: the first so many rows of data.prompts. stop_at_eos: a row stops after the block with its end token.

    top_k: of a teacher that re-decides every slot at every step, how many logits of a slot are stored a step; see canvases.py.
    """

    num_prompts: int
    top_k: int = 64
    temperatures: list[float] = field(default_factory=lambda: [0.0, 0.5])
    batch_size: int = 32
    shard_size: int = 256
    stop_at_eos: bool = True
    screen: Screening = field(default_factory=Screening)


@dataclass(frozen=True)
class Lora:
    """Rank, alpha and the linear layers that get an adapter."""

    rank: int
    alpha: int
    targets: list[str]
    dropout: float = 0.0


@dataclass(frozen=True)
class Train:
    """How the student (objective cdlm) or a model of its own (the others) is trained. lora: null trains all parameters.

    complementary: bd3lm only, see trainer.bd3lm_losses. alpha: tidar only, the weight of the autoregressive loss beside the diffusion loss.
    ar_weight: uniform only, of the encoder's next-token loss. self_conditioning: how often a canvas is told what the step before saw
        (uniform; cdlm on canvases). finish: cdlm on canvases, how often y* is the finished canvas in place of a state before it.
    READ_BY says which keys an objective does not read.
    batch_size: rows of a forward; accumulation: forwards of an optimiser step. Exactly one of steps and epochs. Several processes share
        these rows; a step has as many, whatever their number.
    gradient_checkpointing: layers keep their inputs alone and are computed again in the backward. bf16: forwards in bfloat16 by autocast,
        for weights of dtype float32; with dtype bfloat16 everything is in it.
    The weights default to the paper's 1.0, 0.5 and 0.01; the last one times decode.max_new_tokens, see PAPERS.md (null).
    """

    learning_rate: float
    batch_size: int
    objective: str = "cdlm"
    steps: int | None = None
    epochs: float | None = None
    accumulation: int = 1
    scheduler: str = "constant_with_warmup"
    scheduler_kwargs: dict[str, Any] | None = None
    warmup: float = 0.05
    weight_decay: float = 0.0
    adam_beta2: float = 0.999
    max_grad_norm: float = 1.0
    distill_weight: float = 1.0
    consistency_weight: float = 0.5
    dlm_weight: float | None = None
    noise_floor: float = 0.02
    noise_first_cap: float = 1.0
    noise_ramp: float = 0.0
    complementary: bool = False
    alpha: float = 1.0
    ar_weight: float = 1.0
    self_conditioning: float = 0.5
    finish: float = 0.5
    lora: Lora | None = None
    num_examples: int | None = None
    gradient_checkpointing: bool = False
    bf16: bool = False
    save_steps: int = 100
    logging_steps: int = 10


@dataclass(frozen=True)
class Evaluate:
    """What is measured. methods: null for all that METHODS_OF has for the objective, and autoregressive_model where its key is
    given; after cdlm and mdlm also BASELINES, when named.

    thresholds and truncated_steps are the sweeps; the recipe's own threshold is always among them. fixed (tokens a step), factors and
    entropy_bounds are those of the training-free baselines of these names; prefix and dual cache are Fast-dLLM's, at the thresholds;
    of a model that decides every slot at every step entropy_bounds is the sweep of its student too;
    interval_cache is dLLM-Cache's, prompt_refresh and response_refresh steps apart (100 and 6: its command for LLaDA-8B-Base).

    autoregressive: a folder of a causal LM with the same tokenizer, for the method autoregressive_model.

    proposals and betas are sweeps of the methods tidar and tidar_mix; decode.proposals is always among the former. draft_model: a folder
    with a smaller autoregressive model of the same tokenizer, for the method assisted.

    num_prompts: test rows for accuracy and steps (null: all), decoded batch_size at a time. latency_prompts: so many of
    them, from the groups in turn, at batch 1, all methods interleaved, after warmup prompts, each prompt `repeats` times.
    teacher_stops_at_eos: false lets teacher, teacher_truncated and teacher_threshold decode the whole budget, as the paper's
        baselines do (its naive teacher: 256 steps). teacher_threshold_stop is teacher_threshold with the student's stop rule.
    """

    methods: list[str] | None = None
    thresholds: list[float] = field(default_factory=lambda: [0.5, 0.7, 0.8, 0.9, 0.95, 0.99])
    truncated_steps: list[int] = field(default_factory=list)
    fixed: list[int] = field(default_factory=lambda: [2, 4])
    factors: list[float] = field(default_factory=lambda: [0.5, 1.0])
    entropy_bounds: list[float] = field(default_factory=lambda: [0.1, 0.5])
    prompt_refresh: int = 100
    response_refresh: int = 6
    autoregressive: str | None = None
    proposals: list[int] = field(default_factory=list)
    betas: list[float] = field(default_factory=lambda: [0.0, 0.5])
    draft_model: str | None = None
    num_prompts: int | None = None
    batch_size: int = 32
    latency_prompts: int = 20
    warmup_prompts: int = 3
    repeats: int = 1
    latency_batch_sizes: list[int] = field(default_factory=lambda: [1])
    teacher_stops_at_eos: bool = False


@dataclass(frozen=True)
class Export:
    """What the exported folder and its card say besides what is measured.

    base_model: the Hub repository of the model (default: the recipe's own model, when that is one).
    benchmark: the Hub dataset that data.test is of; with it the results are also written to .eval_results/.
    dtype: in which the whole model is stored (null: as it was trained); what is measured is the model before that rounding.
    """

    license: str = "apache-2.0"
    tags: list[str] = field(default_factory=list)
    datasets: list[str] = field(default_factory=list)
    base_model: str | None = None
    benchmark: str | None = None
    dtype: str | None = None


@dataclass(frozen=True)
class Push:
    """Where the exported folder is sent, as a recipe's last stage. adapter_only: its adapter/ alone, not the merged model."""

    repo_id: str
    private: bool = False
    adapter_only: bool = False


@dataclass(frozen=True)
class Recipe:
    """All values of a run. Exactly one of model (a folder or a Hub repository) and scratch.

    trajectories: a finished folder, by cdlm import or by another run's collect; then there is no collect section and no such stage.
    config: a copy of the model's config.json, from which --dry-run takes the sizes when the model is not on this machine; a real run
        refuses a model of other sizes. hardware: the card of --dry-run's estimate, a name of roofline.HARDWARE.
    """

    name: str
    data: Data
    decode: Decode
    train: Train
    collect: Collect | None = None
    evaluate: Evaluate = field(default_factory=Evaluate)
    export: Export = field(default_factory=Export)
    push: Push | None = None
    model: str | None = None
    scratch: Scratch | None = None
    trajectories: str | None = None
    config: str | None = None
    family: str | None = None
    dtype: str = "float32"
    attention: str = "auto"
    device: str = "cpu"
    hardware: str | None = None
    seed: int = 0
    folder: Path = field(default=Path("."), metadata={"internal": True})

    def path(self, value: str) -> Path:
        """A path of the recipe, relative to the recipe's folder."""
        return Path(value) if Path(value).is_absolute() else self.folder / value

    def model_path(self) -> Path | str:
        """The teacher's folder, or its Hub id when no such folder is there."""
        assert self.model is not None
        local = self.path(self.model)
        if not local.exists() and self.model.startswith((".", "/")):
            raise ValueError(f"model: nothing at {local}")
        return local if local.exists() else self.model

    def base_model(self) -> str | None:
        """The Hub repository of the model that the recipe starts from, None when it has none."""
        if self.export.base_model is not None or self.model is None:
            return self.export.base_model
        return None if self.path(self.model).exists() else self.model

    def section(self, *names: str) -> dict[str, Any]:
        """Some sections as plain values, for a stage's note of what it was asked to do."""
        return {name: _plain(getattr(self, name)) for name in names}


class _Short(reprlib.Repr):
    """Shows no more than a line of a value, however deep it is."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxlist, self.maxdict, self.maxstring, self.maxlong, self.maxother = 4, 12, 12, 200, 60, 120


def _shown(value: Any) -> str:
    """A value as an error shows it."""
    return _Short().repr(value)


def _plain(value: Any) -> Any:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


def _type_name(kind: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false", types.NoneType: "null"}
    if kind in names:
        return names[kind]
    if typing.get_origin(kind) is list:
        return f"a list, each item {_type_name(typing.get_args(kind)[0])}"
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return " or ".join(_type_name(part) for part in typing.get_args(kind))
    return "a group of keys"


def _convert(value: Any, kind: Any, where: str) -> Any:
    """The value as the type a field asks for, or a ValueError that names the key."""
    wrong = ValueError(f"{where} is {_shown(value)}; it must be {_type_name(kind)}")
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        parts = typing.get_args(kind)
        if value is None and types.NoneType in parts:
            return None
        kinds = [part for part in parts if part is not types.NoneType]
        if len(kinds) > 1 and type(value) not in kinds:
            raise wrong
        return _convert(value, kinds[0] if len(kinds) == 1 else type(value), where)
    if origin is list:
        if not isinstance(value, list):
            raise wrong
        return [_convert(item, typing.get_args(kind)[0], f"{where}[{i}]") for i, item in enumerate(value)]
    if origin is dict:
        if not isinstance(value, dict):
            raise wrong
        return value
    if dataclasses.is_dataclass(kind):
        return _build(kind, value, where)
    if kind is float:
        if isinstance(value, str):  # YAML reads 2e-5 as text
            try:
                value = float(value)
            except ValueError:
                raise wrong from None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong
        return float(value)
    if kind is int and (isinstance(value, bool) or not isinstance(value, int)):
        raise wrong
    if not isinstance(value, kind):
        raise wrong
    return value


def _build(kind: Any, values: Any, where: str) -> Any:
    """A section from its mapping: every key known, every key without a default there, every type right."""
    if not isinstance(values, dict):
        raise ValueError(f"{where or 'the recipe'} is {_shown(values)}; it must be a group of keys")
    hints = typing.get_type_hints(kind)
    known = {f.name: f for f in dataclasses.fields(kind) if not f.metadata.get("internal")}
    dot = f"{where}." if where else ""
    for key in values:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {dot}{close[0]}?" if close else f"known keys: {', '.join(known)}"
            raise ValueError(f"unknown key {dot}{visible(str(key)[:80], keep='')}; {hint}")
    for name, f in known.items():
        if name not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise ValueError(f"missing key {dot}{name}: {_type_name(hints[name])}")
    return kind(**{key: _convert(value, hints[key], f"{dot}{key}") for key, value in values.items()})


def _override(values: dict[str, Any], assignment: str) -> None:
    """Apply one --set a.b=value; the value is read as YAML."""
    key, equals, text = assignment.partition("=")
    if not equals or not key:
        raise ValueError(f"--set {assignment!r} is not of the form key=value, as in --set train.steps=100")
    *sections, last = key.split(".")
    for section in sections:
        if values.get(section) is None:
            values[section] = {}
        values = values[section]
        if not isinstance(values, dict):
            raise ValueError(f"--set {assignment!r}: {section} is no group of keys")
    try:
        values[last] = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ValueError(f"--set {assignment!r}: the value is not YAML") from None


class DoubleKey(ValueError):
    """A key that stands twice."""


class _Strict(yaml.SafeLoader):
    """YAML that refuses a key that stands twice."""


def _mapping(loader: _Strict, node: yaml.MappingNode) -> dict[str, Any]:
    keys = [loader.construct_object(key) for key, _ in node.value]
    for key in keys:
        if keys.count(key) > 1:
            raise DoubleKey(f"key {key} stands twice (line {node.start_mark.line + 1} and below)")
    return {str(key): value for key, value in loader.construct_mapping(node, deep=True).items()}


_Strict.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def load(path: Path, overrides: list[str] | None = None) -> Recipe:
    """Read and check a recipe. `overrides` are texts of the form a.b=value."""
    if not path.is_file():
        near = sorted(str(p) for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        raise ValueError(f"no recipe at {path}" + (f"; there are {', '.join(near)}" if near else ""))
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_Strict)
    except RecursionError:
        raise ValueError(f"{path} is nested too deep; a recipe is a group of keys, some of them groups themselves") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from None
    except DoubleKey:
        raise
    except (yaml.YAMLError, ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"{path} is not YAML: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds {_shown(values)}; a recipe is a group of keys")
    for assignment in overrides or []:
        _override(values, assignment)
    recipe = dataclasses.replace(_build(Recipe, values, ""), folder=path.parent)
    if recipe.train.dlm_weight is None and recipe.train.objective in READ_BY["dlm_weight"]:
        train = dataclasses.replace(recipe.train, dlm_weight=0.01 * recipe.decode.max_new_tokens)
        recipe = dataclasses.replace(recipe, train=train)
    if recipe.evaluate.methods is None:
        methods = [name for name in METHODS_OF.get(recipe.train.objective, METHODS)
                   if recipe.train.objective != "cdlm" or name != "transformers_generate"]  # of models that have one for diffusion
        methods += [OTHER_MODEL] if recipe.evaluate.autoregressive is not None else []
        if recipe.train.objective == "tidar" and recipe.evaluate.draft_model is None:
            methods.remove("assisted")
        recipe = dataclasses.replace(recipe, evaluate=dataclasses.replace(recipe.evaluate, methods=methods))
    check(recipe)
    return recipe


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def check(recipe: Recipe) -> None:
    """Limits and relations between values. Touches only files that the recipe names."""
    from cdlm import roofline
    from cdlm.data import LONG_ANSWERS, LONG_PROMPTS, is_hub, parse_hub
    from cdlm.families import ATTENTION, DTYPES, FAMILIES

    def within(name: str, value: float, low: float, high: float = float("inf")) -> None:
        if not low <= value <= high or value == float("inf"):
            limit = f"at least {low}" if high == float("inf") else f"between {low} and {high}"
            raise ValueError(f"{name} is {value}; it must be {limit}")

    def one_of(name: str, value: str, allowed: typing.Iterable[str]) -> None:
        if value not in allowed:
            raise ValueError(f"{name} is {value!r}; allowed: {', '.join(allowed)}")

    r, d, t, e = recipe, recipe.decode, recipe.train, recipe.evaluate
    if (r.model is None) == (r.scratch is None):
        raise ValueError("exactly one of model and scratch must be given")
    if not r.name or "/" in r.name or r.name.strip(".") == "":
        raise ValueError(f"name is {r.name!r}; it names a folder under runs/: no '/', and not only dots")
    if visible(r.name, keep="") != r.name or len(r.name.encode()) > 200:
        raise ValueError(f"name is {_shown(r.name)}; it names a folder: no control characters, and at most 200 bytes")
    if r.family is not None:
        one_of("family", r.family, FAMILIES)
    if r.config is not None:
        if r.model is None:
            raise ValueError("config is a copy of the config.json of model; with scratch it is scratch.config")
        if not r.path(r.config).is_file():
            raise ValueError(f"config: no file at {r.path(r.config)}")
    if r.hardware is not None:
        roofline.card(r.hardware)
    one_of("dtype", r.dtype, DTYPES)
    if r.export.dtype is not None:
        one_of("export.dtype", r.export.dtype, DTYPES)
    one_of("attention", r.attention, ATTENTION)
    if r.device == "cpu" and (r.attention == "flex" or (r.attention == "triton" and os.environ.get("TRITON_INTERPRET") != "1")):
        raise ValueError(f"attention is {r.attention!r} and device is 'cpu'; allowed there: auto, naive, sdpa")
    one_of("train.objective", t.objective, OBJECTIVES)
    for name in ("max_new_tokens", "block_length"):
        within(f"decode.{name}", getattr(d, name), 1)
        if getattr(d, name) >= 2**31:
            raise ValueError(f"decode.{name} is {getattr(d, name)}; it must be below 2**31")
    within("decode.confidence_threshold", d.confidence_threshold, 0, 1)
    for name, sampler in (("sampler", d.sampler), ("student_sampler", d.student_sampler)):
        if sampler is not None:
            _check_sampler(f"decode.{name}", sampler, within)
    within("data.max_prompt_tokens", r.data.max_prompt_tokens, 1)
    if d.max_new_tokens % d.block_length:
        raise ValueError(
            f"decode.block_length {d.block_length} does not divide decode.max_new_tokens {d.max_new_tokens}; "
            f"lengths that do: {', '.join(map(str, _divisors(d.max_new_tokens)))}"
        )
    if (t.steps is None) == (t.epochs is None):
        raise ValueError("exactly one of train.steps and train.epochs must be given")
    within("train.steps", 1 if t.steps is None else t.steps, 1)
    within("train.epochs", 1 if t.epochs is None else t.epochs, 1e-6)
    within("train.learning_rate", t.learning_rate, 1e-12, 1e3)
    for name in ("warmup", "weight_decay", "max_grad_norm"):
        within(f"train.{name}", getattr(t, name), 0)
    within("train.adam_beta2", t.adam_beta2, 0, 1)
    if t.adam_beta2 == 1:
        raise ValueError("train.adam_beta2 is 1; it must be below 1")
    within("seed", r.seed, 0, 2**32 - 1)
    if t.scheduler == "warmup_stable_decay" and "num_decay_steps" not in (t.scheduler_kwargs or {}):
        raise ValueError("train.scheduler warmup_stable_decay needs train.scheduler_kwargs.num_decay_steps")
    if t.scheduler == "cosine_with_min_lr" and not {"min_lr", "min_lr_rate"} & set(t.scheduler_kwargs or {}):
        raise ValueError("train.scheduler cosine_with_min_lr needs train.scheduler_kwargs.min_lr or min_lr_rate")
    one_of("train.scheduler", t.scheduler, SCHEDULERS)
    _check_schedule(t)
    if not 0 < t.noise_floor < t.noise_first_cap <= 1:
        raise ValueError(
            f"train.noise_floor is {t.noise_floor} and train.noise_first_cap {t.noise_first_cap}; 0 < noise_floor < noise_first_cap <= 1 "
            "must hold"
        )
    within("train.noise_ramp", t.noise_ramp, 0, 1)
    within("train.num_examples", 1 if t.num_examples is None else t.num_examples, 1)
    within("evaluate.num_prompts", 1 if e.num_prompts is None else e.num_prompts, 1)
    for name in ("batch_size", "accumulation", "save_steps", "logging_steps"):
        within(f"train.{name}", getattr(t, name), 1)
    for name in ("distill_weight", "consistency_weight", "dlm_weight", "alpha"):
        within(f"train.{name}", getattr(t, name) or 0.0, 0)
    within("train.ar_weight", t.ar_weight, 0)
    for name in ("self_conditioning", "finish"):
        within(f"train.{name}", getattr(t, name), 0, 1)
    for f in dataclasses.fields(t):
        if t.objective not in READ_BY.get(f.name, OBJECTIVES) and getattr(t, f.name) != f.default:
            raise ValueError(f"train.{f.name} is {getattr(t, f.name)}; objective {t.objective} does not read it: leave it out")
    if t.bf16 and r.dtype == "float16":
        raise ValueError("train.bf16 is true and dtype 'float16'; allowed with it: float32, bfloat16")
    if t.complementary and t.noise_first_cap < 1:
        raise ValueError(f"train.noise_first_cap is {t.noise_first_cap}; with complementary masks it must be 1: their complement is many")
    if t.objective in ("bd3lm", "ar", "tidar", "uniform") and r.collect is not None:
        raise ValueError(f"collect: objective {t.objective} trains on answers, not on trajectories; leave the section out")
    if t.objective in ("bd3lm", "tidar") and r.model is None:
        raise ValueError(f"objective {t.objective} starts from a model that can write: give model, not scratch")
    if t.lora is not None:
        within("train.lora.rank", t.lora.rank, 1, 2**16)  # above the width of any layer
        within("train.lora.alpha", t.lora.alpha, 1, 2**31 - 1)
        within("train.lora.dropout", t.lora.dropout, 0, 1)
        if not t.lora.targets:
            raise ValueError("train.lora.targets is empty; name the linear layers that get an adapter, or set train.lora to null")
    if t.objective == "cdlm":
        if r.collect is None and r.trajectories is None:
            raise ValueError("missing key collect: objective cdlm trains on trajectories (or give trajectories: a finished folder)")
        if r.collect is not None and r.trajectories is not None:
            raise ValueError("collect and trajectories are both given; a run's trajectories come from one of them")
        if r.model is None:
            raise ValueError("objective cdlm distills a teacher: give model, not scratch")
        if not any((t.distill_weight, t.consistency_weight, t.dlm_weight)):
            raise ValueError("train.distill_weight, consistency_weight and dlm_weight are all 0: nothing would be trained")
    if r.collect is not None:
        for name in ("num_prompts", "batch_size", "shard_size", "top_k"):
            within(f"collect.{name}", getattr(r.collect, name), 1)
        if not r.collect.temperatures:
            raise ValueError("collect.temperatures is empty; give at least one, 0.0 is greedy")
        for temperature in r.collect.temperatures:
            within("collect.temperatures", temperature, 0, 100)
        within("collect.screen.ngram", r.collect.screen.ngram, 1)
        within("collect.screen.repeats", r.collect.screen.repeats, 1)
    allowed = (*METHODS_OF[t.objective], *(BASELINES if t.objective in ("cdlm", "mdlm") else ()), OTHER_MODEL)
    if not e.methods or len(set(e.methods)) < len(e.methods):
        raise ValueError(f"evaluate.methods is {e.methods}; name at least one of {', '.join(allowed)}, each once")
    for method in e.methods:
        one_of("evaluate.methods", method, allowed)
    if e.methods == ["teacher_truncated"] and not e.truncated_steps:
        raise ValueError("evaluate.truncated_steps is empty, and without the method student there is no number of steps to cut to")
    for tau in e.thresholds:
        within("evaluate.thresholds", tau, 0, 1)
    for steps in e.truncated_steps:
        within("evaluate.truncated_steps", steps, 1)
    for count in e.fixed:
        within("evaluate.fixed", count, 1)
    for bound in e.factors:
        within("evaluate.factors", bound, 1e-6)
    for bound in e.entropy_bounds:
        within("evaluate.entropy_bounds", bound, 0)
    if OTHER_MODEL in e.methods and e.autoregressive is None:
        raise ValueError(f"evaluate.methods has {OTHER_MODEL}; evaluate.autoregressive, the folder of its model, is missing")
    for name in ("batch_size", "latency_prompts", "repeats", "prompt_refresh", "response_refresh"):
        within(f"evaluate.{name}", getattr(e, name), 1)
    within("evaluate.warmup_prompts", e.warmup_prompts, 0)
    for size in e.latency_batch_sizes:
        within("evaluate.latency_batch_sizes", size, 1, e.latency_prompts)
    _check_drafts(r)
    _check_hub(r)
    if r.trajectories is not None and t.objective != "cdlm":
        raise ValueError(f"trajectories is {r.trajectories!r}; objective {t.objective} trains on answers, not on trajectories")
    if r.data.prompts is None and r.trajectories is None:
        raise ValueError("missing key data.prompts: text")
    one_of("data.long_prompts", r.data.long_prompts, LONG_PROMPTS)
    one_of("data.long_answers", r.data.long_answers, LONG_ANSWERS)
    for name, value, split in (("prompts", r.data.prompts, "train"), ("test", r.data.test, "test")):
        if value is not None and is_hub(value):
            parse_hub(value, split)
        elif value is not None and not r.path(value).is_file():
            raise ValueError(f"data.{name}: no file at {r.path(value)}")
    if r.scratch is not None:
        for name in ("config", "tokenizer"):
            if not r.path(getattr(r.scratch, name)).exists():
                raise ValueError(f"scratch.{name}: nothing at {r.path(getattr(r.scratch, name))}")


def _check_sampler(name: str, sampler: Sampler, within: typing.Callable[..., None]) -> None:
    """Limits of a sampler's values."""
    within(f"{name}.max_denoising_steps", sampler.max_denoising_steps, 1)
    within(f"{name}.stability_threshold", sampler.stability_threshold, 0)
    for key in ("entropy_bound", "entropy_threshold", "t_max"):
        within(f"{name}.{key}", getattr(sampler, key), 1e-9)
    within(f"{name}.t_min", sampler.t_min, 0)
    if not sampler.t_min < sampler.t_max:
        raise ValueError(f"{name}.t_min is {sampler.t_min}; it must be below {name}.t_max, which is {sampler.t_max}")


def _check_schedule(t: Train) -> None:
    """What train.scheduler_kwargs holds is what the schedule takes; else training would find out, after collecting."""
    allowed = SCHEDULERS[t.scheduler]
    for key, value in (t.scheduler_kwargs or {}).items():
        where = f"train.scheduler_kwargs.{key}"
        if key not in allowed:
            raise ValueError(f"unknown key {where}; scheduler {t.scheduler} takes {', '.join(allowed) or 'none'}")
        if key in ("warmup_type", "decay_type"):
            if value not in SHAPES_OF_DECAY:
                raise ValueError(f"{where} is {_shown(value)}; allowed: {', '.join(SHAPES_OF_DECAY)}")
        elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise ValueError(f"{where} is {_shown(value)}; it must be a number of at least 0")
        elif key.endswith("_steps") and not isinstance(value, int):
            raise ValueError(f"{where} is {value}; it must be a whole number")


def _check_drafts(r: Recipe) -> None:
    """What only objective tidar reads."""
    from cdlm import roofline

    d, e, most = r.decode, r.evaluate, r.decode.block_length
    if r.train.objective != "tidar":
        given = {f"evaluate.{name}": (getattr(e, name), getattr(Evaluate(), name)) for name in ("proposals", "betas", "draft_model")}
        for name, (value, default) in {"decode.proposals": (d.proposals, None), **given}.items():
            if value != default:
                raise ValueError(f"{name} is {value!r}; objective {r.train.objective} does not read it: leave it out")
        return
    if isinstance(d.proposals, str):
        if d.proposals != "auto":
            raise ValueError(f"decode.proposals is {d.proposals!r}; allowed: a number from 1 to {most}, auto, null")
        if r.hardware is None:
            raise ValueError(f"decode.proposals is auto; it needs hardware, a card of {', '.join(roofline.HARDWARE)}")
    for name, count in [("decode.proposals", d.proposals), *(("evaluate.proposals", count) for count in e.proposals)]:
        if isinstance(count, int) and not 1 <= count <= most:
            raise ValueError(f"{name} is {count}; it must be between 1 and decode.block_length, {most}")
    if "tidar_mix" in (e.methods or ()) and not e.betas:
        raise ValueError("evaluate.betas is []; evaluate.methods has tidar_mix, which is measured at each beta: name one, or leave it out")
    for beta in e.betas:
        if not 0 <= beta <= 1:
            raise ValueError(f"evaluate.betas is {beta}; it must be between 0 and 1")
    if "assisted" in (e.methods or ()) and e.draft_model is None:
        raise ValueError("evaluate.methods has assisted; it needs evaluate.draft_model, a folder with a smaller model")
    if e.draft_model is not None and not r.path(e.draft_model).is_dir():
        raise ValueError(f"evaluate.draft_model: no folder at {r.path(e.draft_model)}")


def _check_hub(r: Recipe) -> None:
    """Names of Hub repositories, and whether what push asks for will be there."""
    named = {"export.base_model": r.export.base_model, "export.benchmark": r.export.benchmark}
    for key, name in (named | ({"push.repo_id": r.push.repo_id} if r.push is not None else {})).items():
        if name is not None:
            from cdlm.hub import check_repo_id

            check_repo_id(name, key)
    if r.push is not None and r.push.adapter_only:
        if r.train.objective == "tidar":
            raise ValueError("push.adapter_only is true; objective tidar exports the merged model alone")
        if r.train.lora is None:
            raise ValueError("push.adapter_only is true and train.lora null: a student that trains all parameters has no adapter")
        if r.base_model() is None:
            raise ValueError(
                f"push.adapter_only is true, and model is {r.model!r}, a folder of this machine; "
                "name its Hub repository in export.base_model"
            )
