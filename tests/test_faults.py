"""A part of the campaign of faults (faults.py runs all of it), chosen so that each kind of fault is there once; and fuzzing."""

import faults
import fuzz
import pytest
from faults import CASES, NOT_RUN, World

QUICK = [
    "kill / SIGTERM / train: in the middle of a checkpoint's optimizer",
    "kill / SIGKILL / export: before the folder is put in place",
    "kill / SIGKILL / adapter, export: behind the adapter",
    "damage / flip / adapter, export/adapter/SHA256SUMS",
    "damage / a read error at checkpoints/checkpoint-2/optimizer.pt is none",
    "lock / a second convert",
    "lock / a second verify --seal",
    "hostile / a link as a checkpoint",
    "damage / flip / trajectories/shard-00001.safetensors",
    "damage / flip / student/model.safetensors",
    "damage / truncate / samples.jsonl",
    "damage / flip / export/config.json",
    "damage / truncate / checkpoint optimizer.pt",
    "damage / no checksums / trajectories",
    "damage / every file is in a case",
    "damage / weights that distill would read",
    "damage / weights that convert would read",
    "damage / compare with another samples.jsonl",
    "damage / checksums of another shard",
    *[f"damage / refused at once / {name}" for name in faults.REFUSED],
    "numbers / logits that are none, evaluate",
    "lock / a second run",
    "disk / a limit, in a checkpoint",
    "disk / disk full at the report",
    "hostile / a pickle as optimizer.pt of a checkpoint",
    "hostile / a pickle as pytorch_model.bin of a checkpoint",
    "hostile / code in a model's folder",
    "hostile / a path outside in checksums",
    "hostile / names that are HTML and Markdown",
    "hostile / a model that writes control characters",
    "hostile / text of special tokens in a prompt",
    "input / --debug",
    *[f"input / {name}" for name in faults.BAD if name in faults.IN_TEST],
]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    made = World.make(tmp_path_factory.mktemp("faults"))
    yield made
    made.server.close()


@pytest.mark.parametrize("name", QUICK)
def test_a_case_of_the_campaign(world, tmp_path, name):
    seen = CASES[name](world, tmp_path / "run")
    if seen == NOT_RUN:
        pytest.skip(NOT_RUN)
    assert seen == ""


def test_random_recipes_are_taken_or_refused_by_one_error():
    assert fuzz.recipes(200) > 60


def test_random_decodings_keep_the_contracts():
    assert fuzz.decodings(40) > 15
