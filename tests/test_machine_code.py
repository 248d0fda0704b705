"""`cdlm kernels`: real compiles in a process of their own (this one interprets kernels), and what makes it fail."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from conftest import ROOT

from cdlm import cli
from cdlm.attention import machine_code
from cdlm.attention.machine_code import Report, table

GOOD = Report("attention_forward", "gfx942", 128, "bf16", 64, 64, 4, 1, 200, 0, 0, 0, 16384, 65536, {"v_mfma_f32_32x32x8_bf16": 48}, 2)


def python(code: str) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=environment)


def test_a_kernel_is_compiled_for_an_amd_and_an_nvidia_card_that_are_not_here():
    code = """
import json
from dataclasses import asdict
from cdlm.attention import fused, machine_code
for target in ("gfx942", "sm_90"):
    shape = fused.shapes_of(target, 2, 64)[0]
    print(json.dumps(asdict(machine_code.compile_one("attention_forward", target, 64, "bf16", shape))))
"""
    done = python(code)
    assert done.returncode == 0, done.stderr
    amd, nvidia = (json.loads(line) for line in done.stdout.splitlines())
    assert all(name.startswith("v_mfma_f32_") and "bf16" in name for name in amd["matrix"]) and sum(amd["matrix"].values()) > 0
    assert any(name.startswith("wgmma.mma_async") for name in nvidia["matrix"])
    for found in (amd, nvidia):
        assert 0 < found["registers"] <= 512 and found["spills"] == 0 and found["waves"] >= 1
        assert 0 < found["shared"] <= found["shared_limit"]


def test_a_spill_is_seen():
    """A tile that no register file holds: 128 rows by 64 keys of head dimension 256 on 4 warps."""
    code = """
from cdlm.attention import machine_code
from cdlm.attention.fused import Shape
report = machine_code.compile_one("attention_backward_q", "sm_90", 256, "bf16", Shape(128, 64, 4, 1))
print(report.spills, report.fault)
"""
    done = python(code)
    assert done.returncode == 0, done.stderr
    spills, fault = done.stdout.strip().split(" ", 1)
    assert int(spills) > 0 and fault.startswith(f"spills {spills}, ")


@pytest.mark.parametrize("change, fault", [
    ({}, ""),
    ({"spills": 3}, "spills 3, 0 bytes of scratch"),
    ({"scratch": 8}, "spills 0, 8 bytes of scratch"),
    ({"scalar_spills": 8}, ""),
    ({"shared": 65537}, "65537 bytes of shared memory, 65536 allowed"),
    ({"matrix": {}}, "no matrix instruction"),
])  # fmt: skip
def test_what_must_not_be_shipped(change, fault):
    assert replace(GOOD, **change).fault == fault


def test_the_command_fails_on_a_fault_and_says_which(monkeypatch, tmp_path, capsys):
    bad = replace(GOOD, spills=3)
    monkeypatch.setattr(machine_code, "check_targets", lambda names: None)
    monkeypatch.setattr(machine_code, "survey", lambda names, workers: [GOOD, bad])
    assert cli.main(["kernels", "--json", str(tmp_path / "k.json")]) == 1
    assert "attention_forward on gfx942 at head dimension 128: spills 3, 0 bytes of scratch" in capsys.readouterr().err
    assert [kernel["fault"] for kernel in json.loads((tmp_path / "k.json").read_text())["kernels"]] == ["", "spills 3, 0 bytes of scratch"]
    monkeypatch.setattr(machine_code, "survey", lambda names, workers: [GOOD])
    assert cli.main(["kernels"]) == 0


def test_an_unknown_target_and_the_interpreter_are_refused(capsys, monkeypatch):
    assert cli.main(["kernels", "--targets", "gfx90a"]) == 2
    assert "unknown target 'gfx90a'; allowed: gfx942, gfx950, sm_90, sm_100" in capsys.readouterr().err
    assert cli.main(["kernels", "--targets", ""]) == 2
    assert "no target given; allowed: gfx942" in capsys.readouterr().err
    assert cli.main(["kernels"]) == 2
    assert "TRITON_INTERPRET is 1" in capsys.readouterr().err


def test_the_table_has_a_line_a_kernel():
    lines = table([GOOD, replace(GOOD, spills=1)]).splitlines()
    assert len(lines) == 3 and "48 v_mfma_f32_32x32x8_bf16" in lines[1] and lines[2].endswith("spills 1, 0 bytes of scratch")
