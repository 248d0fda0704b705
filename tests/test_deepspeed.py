"""ZeRO-3 in two processes trains as one process does. Needs deepspeed, which the tests' environment does not install: `pip install deepspeed`."""

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


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_zero_3_trains_as_one_process(tmp_path):
    """The same losses (1e-5) and weights; and no checkpoint, for it would be a pickle."""
    file = mini.write(tmp_path)
    values = mini.values()
    values["train"] |= {"steps": STEPS, "save_steps": 2, "learning_rate": 0.0005}
    file.write_text(yaml.safe_dump(values, sort_keys=False))
    one, zero = tmp_path / "one", tmp_path / "zero"
    for stage in ("collect", "train"):
        assert cli.main([stage, str(file), "--out", str(one)]) == 0
    done = launch(ROOT / "tests" / "zero.py", file, zero, one / "trajectories", folder=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "no checkpoints, for DeepSpeed's are pickles" in done.stdout
    wanted = losses(one)
    assert wanted.shape == (STEPS, 4) and json.loads((zero / "student" / "request.json").read_text())
    torch.testing.assert_close(losses(zero), wanted, atol=1e-5, rtol=0)
    first, second = (load_file(out / "student" / "model.safetensors") for out in (one, zero))
    assert first.keys() == second.keys()
    for key, value in first.items():
        torch.testing.assert_close(second[key], value, atol=1e-5, rtol=0)
