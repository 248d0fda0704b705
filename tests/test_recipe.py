"""Recipes: those in the repository parse, and every kind of mistake is one ValueError that names the key and what is allowed."""

import copy
import dataclasses
import json
import re
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, TINY

from cdlm import recipe

BASE = {
    "name": "test",
    "model": "teacher",
    "data": {"prompts": "rows.jsonl", "test": "rows.jsonl"},
    "decode": {"max_new_tokens": 64, "block_length": 32},
    "collect": {"num_prompts": 10},
    "train": {"learning_rate": 1.0e-4, "batch_size": 4, "steps": 10},
}


def changed(changes: dict) -> dict:
    """BASE with some values replaced, keys as a.b; a value of ... takes the key away."""
    values = copy.deepcopy(BASE)
    for key, value in changes.items():
        *sections, last = key.split(".")
        place = values
        for section in sections:
            place = place.setdefault(section, {})
        if value is ...:
            del place[last]
        else:
            place[last] = value
    return values


def load(folder: Path, changes: dict | None = None, overrides: list[str] | None = None) -> recipe.Recipe:
    (folder / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    (folder / "recipe.yaml").write_text(yaml.safe_dump(changed(changes or {})))
    return recipe.load(folder / "recipe.yaml", overrides)


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_recipe_of_the_repository_parses(path):
    found = recipe.load(path)
    assert found.name and found.folder == path.parent
    head = path.read_text().split("\n\n")[0].split("\nname:")[0]
    assert head.startswith("#") and re.search(r"make |cdlm ", head), "a recipe stands under a header with its command"


def test_there_are_recipes():
    assert list((ROOT / "recipes").glob("*.yaml"))


def test_defaults(tmp_path):
    found = load(tmp_path)
    assert found.decode.confidence_threshold == 0.9
    assert found.collect.temperatures == [0.0, 0.5] and found.collect.screen == recipe.Screening()
    assert (found.train.distill_weight, found.train.consistency_weight, found.train.dlm_weight) == (1.0, 0.5, 0.64)  # 0.01 x 64
    assert found.evaluate.methods == list(recipe.METHODS)
    assert found.train.lora is None and found.family is None and found.device == "cpu" and found.seed == 0


def test_sections_become_their_types(tmp_path):
    found = load(tmp_path, {
        "train.lora": {"rank": 8, "alpha": 16, "targets": ["q_proj", "v_proj"]}, "collect.screen": {"ngram": 4, "drop": False},
        "train.epochs": 2, "train.steps": ..., "family": "native", "evaluate.thresholds": [1, 0.5],
    })  # fmt: skip
    assert found.train.lora == recipe.Lora(8, 16, ["q_proj", "v_proj"])
    assert found.collect.screen == recipe.Screening(ngram=4, drop=False)
    assert isinstance(found.train.epochs, float) and found.train.steps is None
    assert found.evaluate.thresholds == [1.0, 0.5] and isinstance(found.evaluate.thresholds[0], float)


@pytest.mark.parametrize("text, value", [("2e-5", 2e-5), ("2.0e-5", 2e-5), ("1", 1.0), ("0.001", 1e-3), ('"3e-4"', 3e-4)])
def test_numbers_may_be_written_as_people_write_them(tmp_path, text, value):
    """YAML 1.1 reads 2e-5 as text."""
    load(tmp_path)
    file = tmp_path / "recipe.yaml"
    file.write_text(file.read_text().replace("learning_rate: 0.0001", f"learning_rate: {text}"))
    found = recipe.load(file).train.learning_rate
    assert found == value and isinstance(found, float)
    assert load(tmp_path, {}, [f"train.learning_rate={text}"]).train.learning_rate == value


WRONG = {
    # unknown keys, with a suggestion where one is near
    "unknown key": ({"train.learning_rat": 1}, "unknown key train.learning_rat; did you mean train.learning_rate?"),
    "unknown section": ({"dat": {}}, "unknown key dat; did you mean data?"),
    "unknown key, nothing near": (
        {"decode.xyzzy": 1}, "unknown key decode.xyzzy; known keys: max_new_tokens, block_length, confidence_threshold"
    ),
    "unknown key, deep": ({"collect.screen": {"ngrams": 3}}, "unknown key collect.screen.ngrams; did you mean collect.screen.ngram?"),
    "a number as key": ({"train": {7: 1}}, "unknown key train.7; known keys: learning_rate"),
    "internal key": ({"folder": "/tmp"}, "unknown key folder; known keys: name"),
    # missing keys
    "missing section": ({"decode": ...}, "missing key decode: a group of keys"),
    "missing key": ({"train.learning_rate": ...}, "missing key train.learning_rate: a number"),
    "missing name": ({"name": ...}, "missing key name: text"),
    "missing key, deep": ({"train.lora": {"rank": 1, "alpha": 2}}, "missing key train.lora.targets: a list, each item text"),
    # wrong types
    "text for a number": ({"train.learning_rate": "fast"}, "train.learning_rate is 'fast'; it must be a number"),
    "true for a number": ({"train.learning_rate": True}, "train.learning_rate is True; it must be a number"),
    "null for a number": ({"train.learning_rate": None}, "train.learning_rate is None; it must be a number"),
    "1.5 for a whole number": ({"train.batch_size": 1.5}, "train.batch_size is 1.5; it must be a whole number"),
    "true for a whole number": ({"train.batch_size": True}, "train.batch_size is True; it must be a whole number"),
    "text for a whole number": ({"train.batch_size": "4"}, "train.batch_size is '4'; it must be a whole number"),
    "a number for text": ({"name": 3}, "name is 3; it must be text"),
    "text for true": ({"data.chat_template": "yes please"}, "data.chat_template is 'yes please'; it must be true or false"),
    "1 for true": ({"collect.stop_at_eos": 1}, "collect.stop_at_eos is 1; it must be true or false"),
    "a number for a list": ({"collect.temperatures": 0.5}, "collect.temperatures is 0.5; it must be a list, each item a number"),
    "a wrong item": ({"collect.temperatures": [0.0, "hot"]}, "collect.temperatures[1] is 'hot'; it must be a number"),
    "text for a group": ({"decode": "fast"}, "decode is 'fast'; it must be a group of keys"),
    "a list for a group": ({"train.scheduler_kwargs": [1]}, "train.scheduler_kwargs is [1]; it must be a group of keys"),
    "text for a group or null": ({"train.lora": "small"}, "train.lora is 'small'; it must be a group of keys"),
    # limits
    "block length": (
        {"decode.block_length": 24},
        "decode.block_length 24 does not divide decode.max_new_tokens 64; lengths that do: 1, 2, 4, 8, 16, 32, 64",
    ),
    "block length 0": ({"decode.block_length": 0}, "decode.block_length is 0; it must be at least 1"),
    "no new tokens": ({"decode.max_new_tokens": 0}, "decode.max_new_tokens is 0; it must be at least 1"),
    "threshold": ({"decode.confidence_threshold": 1.5}, "decode.confidence_threshold is 1.5; it must be between 0 and 1"),
    "threshold nan": ({"decode.confidence_threshold": float("nan")}, "decode.confidence_threshold is nan; it must be between 0 and 1"),
    "prompt tokens": ({"data.max_prompt_tokens": 0}, "data.max_prompt_tokens is 0; it must be at least 1"),
    "no steps": ({"train.steps": 0}, "train.steps is 0; it must be at least 1"),
    "no epochs": ({"train.steps": ..., "train.epochs": 0.0}, "train.epochs is 0.0; it must be at least 1e-06"),
    "learning rate 0": ({"train.learning_rate": 0}, "train.learning_rate is 0.0; it must be between 1e-12 and 1000.0"),
    "negative warmup": ({"train.warmup": -0.1}, "train.warmup is -0.1; it must be at least 0"),
    "batch size 0": ({"train.batch_size": 0}, "train.batch_size is 0; it must be at least 1"),
    "accumulation 0": ({"train.accumulation": 0}, "train.accumulation is 0; it must be at least 1"),
    "save steps 0": ({"train.save_steps": 0}, "train.save_steps is 0; it must be at least 1"),
    "negative distill": ({"train.distill_weight": -1.0}, "train.distill_weight is -1.0; it must be at least 0"),
    "negative consistency": ({"train.consistency_weight": -0.5}, "train.consistency_weight is -0.5; it must be at least 0"),
    "negative dlm": ({"train.dlm_weight": -0.01}, "train.dlm_weight is -0.01; it must be at least 0"),
    "nothing to train": (
        {"train.distill_weight": 0, "train.consistency_weight": 0, "train.dlm_weight": 0},
        "train.distill_weight, consistency_weight and dlm_weight are all 0: nothing would be trained",
    ),
    "weight decay": ({"train.weight_decay": -0.1}, "train.weight_decay is -0.1; it must be at least 0"),
    "adam beta2": ({"train.adam_beta2": 1.5}, "train.adam_beta2 is 1.5; it must be between 0 and 1"),
    "noise floor 0": ({"train.noise_floor": 0}, "train.noise_floor is 0.0 and train.noise_first_cap 1.0; 0 < noise_floor < "),
    "noise floor at the cap": (
        {"train.noise_floor": 0.3, "train.noise_first_cap": 0.3}, "train.noise_floor is 0.3 and train.noise_first_cap 0.3; 0 < "
    ),
    "noise cap above 1": ({"train.noise_first_cap": 1.1}, "train.noise_floor is 0.02 and train.noise_first_cap 1.1; 0 < noise_floor < "),
    "noise floor nan": ({"train.noise_floor": float("nan")}, "train.noise_floor is nan and train.noise_first_cap 1.0; 0 < "),
    "noise ramp": ({"train.noise_ramp": 2}, "train.noise_ramp is 2.0; it must be between 0 and 1"),
    "no examples": ({"train.num_examples": 0}, "train.num_examples is 0; it must be at least 1"),
    "no questions": ({"evaluate.num_prompts": 0}, "evaluate.num_prompts is 0; it must be at least 1"),
    "lora without targets": ({"train.lora": {"rank": 1, "alpha": 1, "targets": []}}, "train.lora.targets is empty; name the linear "),
    "lora alpha": ({"train.lora": {"rank": 1, "alpha": 0, "targets": ["q"]}}, "train.lora.alpha is 0; it must be between 1 and 2147483647"),
    "lora rank": ({"train.lora": {"rank": 0, "alpha": 1, "targets": ["q"]}}, "train.lora.rank is 0; it must be between 1 and 65536"),
    "huge lora rank": (
        {"train.lora": {"rank": 10**23, "alpha": 1, "targets": ["q"]}}, f"train.lora.rank is {10**23}; it must be between 1 and 65536"
    ),
    "lora dropout": (
        {"train.lora": {"rank": 1, "alpha": 1, "targets": ["q"], "dropout": 2}}, "train.lora.dropout is 2.0; it must be between 0 and 1"
    ),
    "no temperatures": ({"collect.temperatures": []}, "collect.temperatures is empty; give at least one, 0.0 is greedy"),
    "negative temperature": ({"collect.temperatures": [0.0, -0.5]}, "collect.temperatures is -0.5; it must be between 0 and 100"),
    "no prompts": ({"collect.num_prompts": 0}, "collect.num_prompts is 0; it must be at least 1"),
    "ngram 0": ({"collect.screen": {"ngram": 0}}, "collect.screen.ngram is 0; it must be at least 1"),
    "repeats 0": ({"collect.screen": {"repeats": 0}}, "collect.screen.repeats is 0; it must be at least 1"),
    "sweep threshold": ({"evaluate.thresholds": [0.5, 9]}, "evaluate.thresholds is 9.0; it must be between 0 and 1"),
    "sweep steps": ({"evaluate.truncated_steps": [8, 0]}, "evaluate.truncated_steps is 0; it must be at least 1"),
    "fixed": ({"evaluate.fixed": [0]}, "evaluate.fixed is 0; it must be at least 1"),
    "factor": ({"evaluate.factors": [0.0]}, "evaluate.factors is 0.0; it must be at least"),
    "entropy bound": ({"evaluate.entropy_bounds": [-0.1]}, "evaluate.entropy_bounds is -0.1; it must be at least 0"),
    "evaluate repeats": ({"evaluate.repeats": 0}, "evaluate.repeats is 0; it must be at least 1"),
    "evaluate warmup": ({"evaluate.warmup_prompts": -1}, "evaluate.warmup_prompts is -1; it must be at least 0"),
    # names
    "name with a slash": ({"name": "a/b"}, "name is 'a/b'; it names a folder under runs/: no '/', and not only dots"),
    "name of one dot": ({"name": "."}, "name is '.'; it names a folder under runs/: no '/', and not only dots"),
    "name of dots": ({"name": ".."}, "name is '..'; it names a folder under runs/: no '/', and not only dots"),
    "empty name": ({"name": ""}, "name is ''; it names a folder under runs/"),
    "family": ({"family": "natve"}, "family is 'natve'; allowed: native"),
    "dtype": ({"dtype": "float8"}, "dtype is 'float8'; allowed: float32, bfloat16, float16"),
    "objective": ({"train.objective": "cdml"}, "train.objective is 'cdml'; allowed: cdlm, mdlm, bd3lm, ar"),
    "scheduler": (
        {"train.scheduler": "cosin"},
        "train.scheduler is 'cosin'; allowed: constant, constant_with_warmup, linear, cosine, cosine_with_min_lr, warmup_stable_decay",
    ),
    "no methods": ({"evaluate.methods": []}, "evaluate.methods is []; name at least one of teacher, teacher_truncated, "),
    "a method twice": (
        {"evaluate.methods": ["student", "teacher", "student"]}, "evaluate.methods is ['student', 'teacher', 'student']; name at least "
    ),
    "method": ({"evaluate.methods": ["teacher", "pupil"]}, "evaluate.methods is 'pupil'; allowed: teacher, teacher_truncated"),
    # relations
    "model and scratch": ({"scratch": {"config": "c", "tokenizer": "t"}}, "exactly one of model and scratch must be given"),
    "neither model nor scratch": ({"model": ...}, "exactly one of model and scratch must be given"),
    "steps and epochs": ({"train.epochs": 2}, "exactly one of train.steps and train.epochs must be given"),
    "neither steps nor epochs": ({"train.steps": ...}, "exactly one of train.steps and train.epochs must be given"),
    "cdlm without collect": ({"collect": ...}, "missing key collect: objective cdlm trains on trajectories"),
    "cdlm from scratch": (
        {"model": ..., "scratch": {"config": "c", "tokenizer": "t"}}, "objective cdlm distills a teacher: give model, not scratch"
    ),
    # what an objective does not read
    "complementary mdlm": ({"train.complementary": True, "train.objective": "mdlm"},
                           "train.complementary is True; objective mdlm does not read it: leave it out"),
    "complementary cdlm": ({"train.complementary": True}, "train.complementary is True; objective cdlm does not read it"),
    "dlm_weight of bd3lm": (
        {"train.dlm_weight": 0.5, "train.objective": "bd3lm", "collect": ...}, "train.dlm_weight is 0.5; objective bd3lm does not"
    ),
    "noise of ar": ({"train.noise_ramp": 0.5, "train.objective": "ar", "collect": ...}, "train.noise_ramp is 0.5; objective ar does not"),
    "complementary from few masks": (
        {"train.complementary": True, "train.noise_first_cap": 0.5, "train.objective": "bd3lm", "collect": ...},
        "train.noise_first_cap is 0.5; with complementary masks it must be 1",
    ),
    "bd3lm with collect": ({"train.objective": "bd3lm"}, "collect: objective bd3lm trains on answers, not on trajectories"),
    "bd3lm from scratch": (
        {"train.objective": "bd3lm", "collect": ..., "model": ..., "scratch": {"config": "c", "tokenizer": "t"}},
        "objective bd3lm starts from a model that can write: give model, not scratch",
    ),
    "method of another objective": (
        {"train.objective": "bd3lm", "collect": ..., "evaluate.methods": ["teacher"]},
        "evaluate.methods is 'teacher'; allowed: autoregressive, student_sequential, student, student_uncached",
    ),
    # files
    "no prompts file": ({"data.prompts": "nothing.jsonl"}, "data.prompts: no file at "),
    "no test file": ({"data.test": "nothing.jsonl"}, "data.test: no file at "),
    "hub without revision": ({"data.prompts": "hub:a/b"}, "'hub:a/b' is not of the form hub:USER/NAME[/CONFIG]@REVISION[:SPLIT]"),
    "hub without user": ({"data.test": "hub:b@main"}, "'hub:b@main' is not of the form hub:USER/NAME[/CONFIG]@REVISION[:SPLIT]"),
    "no prompts named": ({"data.prompts": ...}, "missing key data.prompts: text"),
    "no test named": ({"data.test": ...}, "missing key data.test: text"),
    "long prompts": ({"data.long_prompts": "cut"}, "data.long_prompts is 'cut'; allowed: error, drop"),
    "long answers": ({"data.long_answers": "keep"}, "data.long_answers is 'keep'; allowed: error, cut, drop"),
    "collect and trajectories": ({"trajectories": "t"}, "collect and trajectories are both given"),
    "trajectories for mdlm": (
        {"trajectories": "t", "collect": ..., "train.objective": "mdlm"}, "trajectories is 't'; objective mdlm trains on answers"
    ),
    "no scratch config": (
        {"model": ..., "scratch": {"config": "c.json", "tokenizer": "."}, "train.objective": "mdlm"}, "scratch.config: nothing at "
    ),
    "no scratch tokenizer": (
        {"model": ..., "scratch": {"config": "rows.jsonl", "tokenizer": "t"}, "train.objective": "mdlm"}, "scratch.tokenizer: nothing at "
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_mistake_is_one_error_that_names_the_key_and_what_is_allowed(tmp_path, what):
    changes, wanted = WRONG[what]
    with pytest.raises(ValueError) as caught:
        load(tmp_path, changes)
    message = str(caught.value)
    assert message.startswith(wanted), message
    assert "\n" not in message


@pytest.mark.parametrize("changes", [{"train.distill_weight": 0}, {"train.warmup": 100}, {"collect.temperatures": [0.0]},
                                     {"decode.block_length": 64}, {"train.steps": ..., "train.epochs": 0.5},
                                     {"train.noise_floor": 0.5, "train.noise_first_cap": 0.51}, {"train.num_examples": 1},
                                     {"evaluate.num_prompts": 1}, {"evaluate.methods": ["student"]},
                                     {"data.prompts": "hub:a/b@main", "data.test": "hub:a/b/c@main:validation"},
                                     {"data.prompts": ..., "collect": ..., "trajectories": "t"},
                                     {"data.long_prompts": "drop", "data.long_answers": "cut"}])  # fmt: skip
def test_values_at_their_limits_are_accepted(tmp_path, changes):
    assert load(tmp_path, changes).name == "test"


def test_a_key_that_stands_twice(tmp_path):
    load(tmp_path)
    file = tmp_path / "recipe.yaml"
    whole = file.read_text()
    file.write_text(whole + "name: other\n")
    with pytest.raises(ValueError, match=r"^key name stands twice \(line 1"):
        recipe.load(file)
    file.write_text(whole.replace("  batch_size: 4\n", "  batch_size: 4\n  batch_size: 8\n"))
    with pytest.raises(ValueError, match=r"^key batch_size stands twice"):
        recipe.load(file)


@pytest.mark.parametrize("text, wanted", [
    ("a: [1\n", r"recipe\.yaml is not YAML"),
    ("- 1\n- 2\n", r"recipe\.yaml holds \[1, 2\]; a recipe is a group"),
    ("", r"recipe\.yaml holds None; a recipe is a group"),
])  # fmt: skip
def test_a_file_that_is_no_recipe(tmp_path, text, wanted):
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(ValueError, match=wanted):
        recipe.load(tmp_path / "recipe.yaml")


def test_a_missing_recipe_names_those_that_are_there(tmp_path):
    load(tmp_path)
    with pytest.raises(ValueError, match=r"^no recipe at .*recipes\.yaml; there are .*recipe\.yaml$"):
        recipe.load(tmp_path / "recipes.yaml")
    with pytest.raises(ValueError, match=r"^no recipe at .*nowhere/r\.yaml$"):
        recipe.load(tmp_path / "nowhere" / "r.yaml")
    with pytest.raises(ValueError, match=r"^no recipe at "):
        recipe.load(tmp_path)


def test_overrides(tmp_path):
    found = load(tmp_path, {}, [
        "train.steps=25", "decode.confidence_threshold=0.5", "name=x=y", "evaluate.thresholds=[0.5, 0.75]", "collect.screen.drop=false",
        "train.lora={rank: 4, alpha: 8, targets: [q_proj]}", "train.lora.alpha=16", "data.group_key=task",
    ])  # fmt: skip
    assert found.train.steps == 25 and found.decode.confidence_threshold == 0.5 and found.name == "x=y"
    assert found.evaluate.thresholds == [0.5, 0.75] and found.collect.screen == recipe.Screening(drop=False)
    assert found.train.lora == recipe.Lora(4, 16, ["q_proj"]) and found.data.group_key == "task"
    assert load(tmp_path).train.steps == 10


def test_an_override_may_take_a_value_back_to_null(tmp_path):
    found = load(tmp_path, {}, ["train.steps=null", "train.epochs=2"])
    assert found.train.steps is None and found.train.epochs == 2.0


@pytest.mark.parametrize(
    "override, wanted",
    [
        ("train.steps", "--set 'train.steps' is not of the form key=value, as in --set train.steps=100"),
        ("=5", "--set '=5' is not of the form key=value"),
        ("train.steps.more=5", "--set 'train.steps.more=5': steps is no group of keys"),
        ("train.steps=[1", "--set 'train.steps=[1': the value is not YAML"),
        ("train.stepz=5", "unknown key train.stepz; did you mean train.steps?"),
        ("trains.steps=5", "unknown key trains; did you mean train?"),
        ("train.steps=many", "train.steps is 'many'; it must be a whole number"),
        ("decode.block_length=48", "decode.block_length 48 does not divide"),
    ],
)
def test_a_bad_override(tmp_path, override, wanted):
    with pytest.raises(ValueError) as caught:
        load(tmp_path, {}, [override])
    assert str(caught.value).startswith(wanted)


def test_paths_are_relative_to_the_recipe(tmp_path):
    found = load(tmp_path)
    assert found.path("a/b") == tmp_path / "a" / "b" and found.path("/a/b") == Path("/a/b")
    assert found.model_path() == "teacher"  # no such folder beside the recipe: a Hub id
    (tmp_path / "teacher").mkdir()
    assert found.model_path() == tmp_path / "teacher"
    with pytest.raises(ValueError, match=r"^model: nothing at .*gone$"):
        load(tmp_path, {"model": "./gone"}).model_path()


def test_section_gives_plain_values(tmp_path):
    found = load(tmp_path).section("decode", "collect", "seed")
    assert found["decode"] == {
        "max_new_tokens": 64, "block_length": 32, "confidence_threshold": 0.9, "proposals": None, "sampler": None, "student_sampler": None,
    }
    assert found["seed"] == 0
    assert found["collect"]["screen"] == {"ngram": 8, "repeats": 3, "drop": True, "correct_only": False}


def test_objectives_are_those_of_the_trainer():
    from cdlm import trainer

    assert set(recipe.OBJECTIVES) == set(trainer.OBJECTIVES) == set(trainer.LOSSES)


@pytest.mark.parametrize("objective", ["mdlm", "bd3lm", "ar", "uniform"])
def test_methods_default_to_those_of_the_objective(tmp_path, objective):
    found = load(tmp_path, {"train.objective": objective, "collect": ...})
    assert found.evaluate.methods == list(recipe.METHODS_OF[objective])
    assert set(recipe.METHODS_OF) == set(recipe.OBJECTIVES)


def test_screening_is_the_screen_of_the_trajectories():
    from cdlm.trajectories import Screen

    def stated(kind):
        return [(f.name, f.default) for f in dataclasses.fields(kind)]

    assert stated(recipe.Screening) == stated(Screen)


def test_a_model_from_nothing_with_the_small_worlds_files(tmp_path):
    found = load(tmp_path, {
        "model": ..., "collect": ..., "train.objective": "mdlm",
        "scratch": {"config": str(TINY / "scratch" / "config.json"), "tokenizer": str(TINY / "tokenizer")},
    })  # fmt: skip
    assert found.scratch.init == "copying" and found.model is None


# ---- the recipes of real models ---------------------------------------------------------------------------------------


ROOM = ROOT / "recipes"
# arXiv 2511.19269, section 5 and table of weights: LoRA rank and alpha, learning rate, and the weight of equation 6 times L_g = 256.
# The first has 7,500 prompts, the second 7,500 of math beside them.
PAPER = {"dream-7b-instruct": (32, 2e-5, 0.01 * 256, 7500), "llada-8b-instruct": (64, 1e-5, 0.1 * 256, 15000)}


@pytest.mark.parametrize("name", PAPER)
def test_a_recipe_of_the_paper_has_its_values(name):
    r, (rank, rate, weight, prompts) = recipe.load(ROOM / f"{name}.yaml"), PAPER[name]
    t = r.train
    assert (t.lora.rank, t.lora.alpha, t.learning_rate) == (rank, rank, rate)
    assert set(t.lora.targets) == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert (t.distill_weight, t.consistency_weight, t.dlm_weight) == (1.0, 0.5, pytest.approx(weight))
    assert (t.scheduler, t.warmup, t.epochs, t.batch_size * t.accumulation) == ("constant_with_warmup", 0.05, 16, 64)
    assert (r.decode.max_new_tokens, r.decode.block_length, r.decode.confidence_threshold) == (256, 32, 0.9)
    assert (r.collect.temperatures, r.collect.num_prompts, r.collect.stop_at_eos) == ([0.0, 0.5], prompts, False)
    assert (r.data.max_prompt_tokens, r.dtype, r.device, r.hardware) == (512, "bfloat16", "cuda", "A100")


# mask, end and pad tokens, block length, where blocks start, the shift.
IDS = {
    "dream-7b-instruct": (151666, (151643,), 151643, None, "prompt_end", True),
    "llada-8b-instruct": (126336, (126081,), 126081, None, "prompt_end", False),
    "sdar-4b-chat": (151669, (151643,), 151643, 4, "zero", False),
    "llada2-mini": (156895, (156892,), 156892, 32, "zero", False),
    "fast-dllm-v2-7b": (151665, (151645,), 151643, 32, "zero", True),
    "zaya1-8b-tidar": (262145, (106,), 0, None, "prompt_end", True),
    "tidar-qwen2.5-1.5b": (151665, (151643,), 151643, None, "prompt_end", True),
    "tidar-qwen3-8b": (151669, (151643,), 151643, None, "prompt_end", True),
    "diffusiongemma-26b-a4b": (None, (1, 106, 50), 0, 256, "prompt_end", False),
}


@pytest.mark.parametrize("name", IDS)
def test_the_config_beside_a_recipe_states_its_familys_facts(name):
    from cdlm import families

    r = recipe.load(ROOM / f"{name}.yaml")
    assert r.path(r.config) == ROOM / name / "config.json"
    config = json.loads(r.path(r.config).read_text())
    facts = families.find(config, r.family).facts(config)
    found = facts.mask_token_id, facts.eos_token_ids, facts.pad_token_id, facts.block_length, facts.block_origin, facts.logit_shift
    assert found == IDS[name]
    assert facts.block_length in (None, r.decode.block_length)


def test_every_config_beside_a_recipe_is_named_by_one():
    used = {r.path(r.config) for r in map(recipe.load, ROOM.glob("*.yaml")) if r.config}
    assert used == {ROOM / name / "config.json" for name in IDS}


@pytest.mark.parametrize("name", IDS)
def test_a_real_recipes_header_says_what_is_not_known(name):
    head = (ROOM / f"{name}.yaml").read_text().split("\nname:")[0]
    assert f"make distill RECIPE=recipes/{name}.yaml" in head and f"{name}/config.json:" in head
    assert "Not run here" in head and ("Expected" in head) == (name in PAPER)


def test_a_data_set_of_the_hub_is_no_file(tmp_path):
    value = "hub:openai/gsm8k/main@main:test"
    assert load(tmp_path, {"data.test": value, "data.prompts": value}).data.test == value
    with pytest.raises(ValueError, match=r"data\.test: no file at"):
        load(tmp_path, {"data.test": "hubs/gsm8k.jsonl"})


@pytest.mark.parametrize("changes, said", [
    ({"config": "nowhere.json"}, "config: no file at"),
    ({"config": "rows.jsonl", "model": ..., "scratch": {"config": "rows.jsonl", "tokenizer": "."}, "train.objective": "mdlm"},
     "config is a copy of the config.json of model; with scratch it is scratch.config"),
    ({"hardware": "H1000"}, "unknown hardware 'H1000'; allowed: A100, H100"),
])
def test_config_and_hardware_are_checked(tmp_path, changes, said):
    with pytest.raises(ValueError, match=said):
        load(tmp_path, changes)
