"""ZeRO-3 in two processes trains as one process does. Not run where deepspeed is not installed (`pip install deepspeed`), as in CI."""

import json
from importlib.util import find_spec

import mini
import pytest
import torch
import yaml
from conftest import ROOT
from safetensors.torch import load_file
from test_processes import launch, losses

from cdlm import cli

STEPS = 10


OTHERS = {  # what is trained: all weights, and adapters on the head too
    "whole": {"steps": STEPS, "learning_rate": 0.0005},
    "lora": {
        "steps": 4, "learning_rate": 0.002, "gradient_checkpointing": True,
        "lora": {**mini.LORA, "targets": ["q_proj", "up_proj", "lm_head"]},
    },
}


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_zero_3_trains_as_one_process(tmp_path):
    """The same losses (1e-5) and weights, with losses in several chunks, of which processes have different numbers; and no checkpoint, for
    it would be a pickle."""
    values, words = mini.values(), []
    mini.write(tmp_path)
    for name, train in OTHERS.items():
        place = tmp_path / f"{name}.yaml"
        place.write_text(yaml.safe_dump({**values, "train": {**values["train"], "save_steps": 2, **train}}, sort_keys=False))
        assert cli.main(["distill", str(place), "--out", str(tmp_path / f"one-{name}")]) == 0
        words += [place, tmp_path / f"zero-{name}"]
    done = launch(ROOT / "tests" / "zero.py", *words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "no checkpoints, for DeepSpeed's are pickles" in done.stdout
    for name, train in OTHERS.items():
        one, zero = (tmp_path / f"{kind}-{name}" for kind in ("one", "zero"))
        wanted, found = losses(one), losses(zero)
        assert wanted.shape == (train["steps"], 4)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
        first, second = (load_file(next((out / "student").glob("*.safetensors"))) for out in (one, zero))
        assert first.keys() == second.keys() and (name == "whole" or any("lm_head" in key for key in first))
        for key, value in first.items():
            torch.testing.assert_close(second[key], value, atol=1e-5, rtol=0)
        first, second = (json.loads((out / "report.json").read_text())["results"] for out in (one, zero))
        clock = ("latency_s", "tps")
        assert [{k: v for k, v in row.items() if k not in clock} for row in first] == [
            {k: v for k, v in row.items() if k not in clock} for row in second
        ]
        assert (zero / "export" / "model.safetensors").is_file()
