"""The script for GPUs, on a CPU: it measures what it says and writes it; and without a GPU it says so."""

import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

SCRIPT = ROOT / "eval" / "gpu_check.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def test_the_smoke_run_checks_times_and_writes(tmp_path):
    command = [sys.executable, str(SCRIPT), "--smoke", "--out", str(tmp_path / "x.json")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "x.json").read_text())
    assert found["correctness"]["cases"] == 2 + 3, "two block-causal masks and three with groups"
    assert found["correctness"]["largest_error"]["triton, torch.float32"] < 1e-4
    assert {line["backend"] for line in found["lines"]} == {"naive", "sdpa", "flex", "triton"}
    prefill = next(line for line in found["lines"] if line["kind"] == "prefill")
    # 32 queries, prompt of 16 that sees itself (16 x 16), then one block of 16 that sees all 32: 768 pairs, 8 heads of 128.
    assert prefill["tflop_per_s"] * prefill["ms"] * 1e9 == pytest.approx(4 * 768 * 8 * 128)
    assert all(line["ms"] > 0 for line in found["lines"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so():
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT)
    assert done.returncode == 2 and "no GPU here" in done.stderr
