"""Random recipes and random ways of decoding, with the contracts of the package as oracles. Shared by test_faults.py and faults.py."""

import functools
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml
from conftest import random_model
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from mini import values as mini_values

from cdlm import recipe, terminal
from cdlm.decode import DecodeConfig, Step, decode, slots

# ---- recipes ---------------------------------------------------------------------------------------------------------

SECTIONS = {name: kind for name, kind in recipe.Recipe.__annotations__.items() if name != "folder"}
GROUPS = {
    "data": recipe.Data, "decode": recipe.Decode, "collect": recipe.Collect, "train": recipe.Train, "evaluate": recipe.Evaluate,
    "export": recipe.Export, "push": recipe.Push, "scratch": recipe.Scratch,
}  # fmt: skip
KEYS = [(name,) for name in SECTIONS] + [(group, key) for group, kind in GROUPS.items() for key in kind.__annotations__]
scalars = (
    st.none() | st.booleans() | st.integers(-3, 40) | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=12)
    | st.sampled_from(["cdlm", "mdlm", "bd3lm", "ar", "tidar", "auto", "drop", "cut", "linear", "cosine", "float32", "native", "teacher"])
)  # fmt: skip
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3), max_leaves=6
)
PLAUSIBLE = {  # key -> values that fit the mini recipe, each alone
    ("seed",): [0, 7, 2**32 - 1], ("dtype",): ["float32", "bfloat16"], ("name",): ["a", "ü b", "x" * 199],
    ("decode", "max_new_tokens"): [8, 16, 64], ("decode", "block_length"): [1, 2, 8], ("decode", "confidence_threshold"): [0, 0.5, 1],
    ("collect", "temperatures"): [[0.0], [1, 2.5]], ("collect", "shard_size"): [1, 999], ("collect", "stop_at_eos"): [True, False],
    ("train", "steps"): [1, 10**6], ("train", "learning_rate"): ["2e-5", 1e-12, 1], ("train", "warmup"): [0, 0.5, 10],
    ("train", "scheduler"): ["linear", "cosine", "constant"], ("train", "dlm_weight"): [0, 1.5, None], ("train", "adam_beta2"): [0.95],
    ("train", "lora"): [None, {"rank": 1, "alpha": 1, "targets": ["q_proj"]}], ("train", "noise_ramp"): [0.0, 1],
    ("evaluate", "methods"): [None, ["student"], ["teacher_factor", "student"]], ("evaluate", "thresholds"): [[], [0.5, 0.5]],
    ("evaluate", "num_prompts"): [None, 1], ("evaluate", "repeats"): [1, 3], ("data", "max_prompt_tokens"): [1, 4096],
    ("data", "special_tokens"): [True, False], ("data", "long_prompts"): ["drop"], ("data", "test"): ["train.jsonl", "hub:a/b@main"],
    ("export", "license"): ["", "mit\n---\n"], ("export", "tags"): [[], ["<b>"]], ("export", "dtype"): [None, "float16"],
    ("push",): [None, {"repo_id": "a/b", "private": True}],
}  # fmt: skip
fitting = st.sampled_from([(key, value) for key, values in PLAUSIBLE.items() for value in values])
wild = st.tuples(st.sampled_from(KEYS) | st.tuples(st.text(max_size=8)), anything)
changes = st.lists(fitting, max_size=5) | st.lists(fitting | wild, min_size=1, max_size=4)


def changed_recipe(edits: list[tuple[tuple[str, ...], Any]]) -> dict[str, Any]:
    found = mini_values()
    for (*groups, last), value in edits:
        place: Any = found
        for group in groups:
            if not isinstance(place.get(group), dict):
                place[group] = {}
            place = place[group]
        place[last] = value
    return found


def check_recipe(folder: Path, text: str, keys: list[tuple[str, ...]] | None = None) -> bool:
    """A recipe is taken, and then means the same written down again, or it is refused by one ValueError of bounded length, which names
    one of the keys that were changed (keys, None where it is no recipe; their section for what is missing in it)."""
    file = folder / "fuzz.yaml"
    file.write_text(text, encoding="utf-8")
    try:
        found = recipe.load(file)
    except ValueError as error:
        assert type(error) in (ValueError, recipe.DoubleKey), repr(error)
        assert 0 < len(str(error)) < 3000
        named = [""] if keys is None else [terminal.visible(part[:80], keep="") for key in keys for part in key]
        assert any(name in str(error) for name in named), f"{error} names none of {named}"
        return False
    plain = {key: value for key, value in asdict(found).items() if key != "folder"}
    json.dumps(plain)
    file.write_text(yaml.safe_dump(plain))
    assert repr(recipe.load(file)) == repr(found)  # NaN is not itself
    return True


def recipes(examples: int, part: int = 0) -> int:
    """Random recipes; how many were taken. part: a seed, for other ones."""
    taken = 0
    with tempfile.TemporaryDirectory() as place:
        for name in ("train.jsonl", "test.jsonl"):
            (Path(place) / name).touch()
        (Path(place) / "teacher").mkdir()

        @seed(part)
        @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        @given(st.one_of(changes, st.text(max_size=60)))
        def one(made: str | list[tuple[tuple[str, ...], Any]]) -> None:
            nonlocal taken
            if isinstance(made, str):
                taken += check_recipe(Path(place), made)
            else:
                taken += check_recipe(Path(place), yaml.safe_dump(changed_recipe(made)), [key for key, _ in made])

        one()
    return taken


# ---- decoding --------------------------------------------------------------------------------------------------------

MASK, EOS, VOCABULARY = 1, 2, 17
KINDS = (  # facts of a model
    {}, {"logit_shift": True}, {"prompt_attention": "block_causal", "block_origin": "zero", "block_length": 4},
    {"prompt_attention": "causal", "logit_shift": True}, {"block_origin": "zero"}, {"eos_token_ids": (2, 5)},
)  # fmt: skip


@functools.cache
def model_of(kind: int) -> Any:
    """A tiny model in fp64, so that no rounding decides which slot is revealed."""
    model = random_model("llama", vocab=VOCABULARY, seed=kind, facts=dict(KINDS[kind]))
    model.hf.double()
    return model


@st.composite
def asked(draw: st.DrawFn) -> tuple[int, list[list[int]], dict[str, Any]]:
    """A model, prompts with masks, end tokens and padding tokens in odd places, and values of DecodeConfig."""
    ids = st.integers(3, VOCABULARY - 1) | st.sampled_from([0, MASK, EOS])
    prompts = draw(st.lists(st.lists(ids, min_size=1, max_size=7), min_size=1, max_size=3))
    least = draw(st.sampled_from([1] * 19 + [0]))  # now and then what is refused
    values: dict[str, Any] = {"max_new_tokens": draw(st.integers(least, 9)), "block_length": draw(st.integers(least, 10))}
    way = draw(st.sampled_from(["confidence_threshold", "tokens_per_step", "steps", "steps_per_block", "factor", "entropy_bound"]))
    if way in ("confidence_threshold", "factor", "entropy_bound"):
        values[way] = draw(st.sampled_from([0.05, 0.3, 0.9, 1.0]) | st.floats(least - 0.99, 1.01))
    else:
        values[way] = draw(st.integers(least, 12))
    if way == "entropy_bound":
        values["order"] = "entropy"
    elif way not in ("confidence_threshold", "factor") or not least:
        values["order"] = draw(st.sampled_from(["confidence", "entropy", "margin", "sequential", *(["random"] if not least else [])]))
    if draw(st.booleans()):
        values["block_causal"] = values["use_cache"] = draw(st.booleans())
    if draw(st.integers(0, 3)) == 0:
        values["temperature"] = draw(st.sampled_from([0.3, 1.0, 5.0]) | st.floats(least - 1, 10))
    if draw(st.integers(0, 3)) == 0:
        values["top_k"] = draw(st.integers(least, VOCABULARY + 2))
    if draw(st.integers(0, 3)) == 0:
        values["top_p"] = draw(st.floats(0, 1))
    values["stop_at_eos"] = draw(st.booleans())
    return draw(st.integers(0, len(KINDS) - 1)), prompts, values


class Watch:
    """A decoding callback: every step reveals slots that were open, and at least one of each row (contract 3)."""

    def __init__(self, mask: int):
        self.mask = mask
        self.seen: dict[tuple[int, int], set[int]] = {}

    def __call__(self, step: Step) -> None:
        for place, row in enumerate(step.row_A.tolist()):
            revealed = set(step.reveal_AS[place].nonzero()[:, 0].tolist())
            before = self.seen.setdefault((row, step.block), set())
            assert revealed and not revealed & before, (row, step.block, revealed, before)
            assert self.mask not in step.ids_AS[place][step.reveal_AS[place]].tolist()
            before |= revealed


def pad(prompts: list[list[int]], more: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    from cdlm.data import pad_left

    return pad_left(prompts, 0, max(map(len, prompts)) + more)


def check_decoding(kind: int, prompts: list[list[int]], values: dict[str, Any]) -> bool:
    """A decoding is refused by one ValueError, which names a value, before the first forward; or it keeps the contracts: the budget and the
    end token are honoured, no mask is left, a batch is its rows alone, padding changes nothing, the cache changes nothing."""
    model, forwards = model_of(kind), []
    watch = model.hf.get_input_embeddings().register_forward_pre_hook(lambda *_: forwards.append(1))
    try:
        config = DecodeConfig(**values)
        seeds = list(range(len(prompts))) if config.temperature > 0 else None
        out = decode(model, *pad(prompts), config, seeds=seeds, callback=Watch(MASK))
    except ValueError as error:
        assert type(error) is ValueError and "\n" not in str(error) and not forwards
        assert any(name in str(error) for name in (*values, "use_cache")), error  # which is asked for where nothing is said
        return False
    finally:
        watch.remove()
    assert forwards
    budget = config.max_new_tokens
    assert out.ids_BN.shape == (len(prompts), budget)
    assert out.filled_BM.shape[1] == slots(model.facts, budget, config.block_length)
    for row in range(len(prompts)):
        ids, count = out.ids_BN[row].tolist(), out.output_tokens[row]
        ends = [i for i, token in enumerate(ids[:count]) if token in model.facts.eos_token_ids]
        assert MASK not in ids[:count] and set(ids[count:]) <= {0} and 1 <= count <= budget
        assert ends == ([count - 1] if out.stop[row] == "eos" else []) and (out.stop[row] == "eos" or count == budget)
        assert 1 <= out.steps[row] == out.forwards[row] <= out.decoded_tokens[row]
        alone = decode(model, *pad([prompts[row]], more=row), config, seeds=None if seeds is None else [row])
        assert alone.ids_BN[0].tolist() == ids and alone.steps[0] == out.steps[row], "a row alone, padded, is the row in a batch"
    if config.use_cache:
        again = decode(model, *pad(prompts), DecodeConfig(**{**values, "use_cache": False}), seeds=seeds)
        assert again.ids_BN.tolist() == out.ids_BN.tolist() and again.steps == out.steps, "the cache changes no token"
    return True


def decodings(examples: int, part: int = 0) -> int:
    """Random decodings; how many ran. part: a seed, for other ones."""
    ran = 0

    @seed(part)
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(asked())
    def one(what: tuple[int, list[list[int]], dict[str, Any]]) -> None:
        nonlocal ran
        ran += check_decoding(*what)

    torch.set_num_threads(1)
    one()
    return ran
