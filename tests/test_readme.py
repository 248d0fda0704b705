"""The README's numbers are those of the report that is kept beside it."""

import os
import subprocess
import sys

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
