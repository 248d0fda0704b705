"""The README's numbers are those of the report that is kept beside it."""

import os
import re
import subprocess
import sys

import torch
from conftest import ROOT


def test_the_readme_shows_the_kept_report():
    found = subprocess.run(
        [sys.executable, ROOT / "eval" / "readme.py", "--check"], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert found.returncode == 0, found.stderr or "run `make results` after `make distill RECIPE=recipes/tiny.yaml`"


def test_commands_of_the_readme_exist():
    from cdlm.cli import _parser

    text = (ROOT / "README.md").read_text()
    known = next(a for a in _parser()._actions if a.dest == "command").choices
    named = {line.split()[1] for line in text.splitlines() if line.startswith("    cdlm ")}
    assert named and named <= set(known)
    targets = {line.split(":")[0] for line in (ROOT / "Makefile").read_text().splitlines() if line and line[0].isalpha() and ":" in line}
    assert {word for word in ("distill", "test", "teacher") if f"make {word}" in text} <= targets


def test_the_readmes_attention_code_runs_and_computes_what_sdpa_does(monkeypatch):
    """The block that registers the backends, as it stands there, from the repository's root."""
    from transformers import AutoModelForCausalLM

    from cdlm import masks

    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (code,) = [block for block in blocks if "attention.register()" in block]
    monkeypatch.chdir(ROOT)
    named: dict = {}
    exec(compile(code, "README.md", "exec"), named)
    assert named["model"].config._attn_implementation == "cdlm_auto"
    judge = AutoModelForCausalLM.from_pretrained("recipes/tiny/teacher", attn_implementation="sdpa")
    with torch.no_grad():
        wanted = judge(
            input_ids=named["ids"], position_ids=named["position"], attention_mask=masks.dense(named["mask"])
        ).logits
    assert torch.allclose(named["logits"], wanted, atol=1e-5)
    # Block-causal: what stands in the last block changes nothing before it, and something in its own block.
    ids = named["ids"].clone()
    ids[0, -1] = 5 + (ids[0, -1] - 4) % 52
    with torch.no_grad():
        other = named["model"](input_ids=ids, position_ids=named["position"], attention_mask=named["mask"].packed()).logits
    before = named["logits"].detach()
    assert torch.equal(other[:, :48], before[:, :48]) and not torch.equal(other[:, 48:63], before[:, 48:63])


def test_the_readme_explains_every_column_of_the_roofline():
    from cdlm import roofline

    text = (ROOT / "README.md").read_text()
    head = roofline.table([]).split("  ")
    assert len(head) == 15
    for column in (name.strip() for name in head):
        assert column in ("hardware", "mode") or f"**{column}**" in text, column
