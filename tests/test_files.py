"""Files get their place whole or not at all, checksums find what changed, and a folder has one writer."""

import errno
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError

from cdlm import files, terminal, verify

# ---- writing ---------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Nothing in the package catches it."""


@pytest.mark.parametrize("error", [Killed(), ValueError("no"), OSError(errno.ENOSPC, "No space left on device")])
def test_an_error_while_writing_leaves_the_old_file_and_nothing_beside_it(tmp_path, error):
    (tmp_path / "a.json").write_text("old")
    with pytest.raises((Killed, ValueError, OSError)):
        with files.replacing(tmp_path / "a.json") as partial:
            partial.write_text("half")
            raise error
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a.json": "old"}


def test_a_folder_takes_the_place_of_the_old_one_with_checksums_of_all_but_its_card(tmp_path):
    (tmp_path / "a" / "stale").mkdir(parents=True)
    (tmp_path / "report").write_text("speaks of the old one")
    with files.replacing_folder(tmp_path / "a", before=[tmp_path / "report"]) as partial:
        (partial / "in").mkdir()
        (partial / "in" / "b").write_text("b")
        (partial / "README.md").write_text("card")
        assert (tmp_path / "report").is_file() and (tmp_path / "a" / "stale").is_dir(), "nothing goes before the new one is whole"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]
    # printf b | sha256sum
    b = "3e23e8160039594a33894f6564e1b1348bbd7a0088d42c4acb73eeaed59c009d"
    assert (tmp_path / "a" / "SHA256SUMS").read_text() == f"{b}  in/b\n"
    assert subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=tmp_path / "a", check=False).returncode == 0


def test_a_folder_that_fails_leaves_the_old_one_and_what_speaks_of_it(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "old").touch()
    (tmp_path / "report").touch()
    with pytest.raises(files.NotWritten, match=r"a can't be written: no room$"):
        with files.replacing_folder(tmp_path / "a", before=[tmp_path / "report"]) as partial:
            (partial / "new").touch()
            raise SafetensorError("no\nroom")
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == ["a", "a/old", "report"]


def test_a_folder_that_can_not_be_put_in_place_leaves_the_old_one_there(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "old").touch()
    replace = os.replace

    def refuse(source, target):
        if str(source).endswith(".partial") and Path(target) == tmp_path / "a":
            raise OSError(errno.EIO, "input/output error")
        replace(source, target)

    monkeypatch.setattr(files.os, "replace", refuse)
    with pytest.raises(files.NotWritten, match="a can't be written"):
        with files.replacing_folder(tmp_path / "a") as partial:
            (partial / "new").touch()
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == ["a", "a/old"]


def test_an_error_of_another_file_keeps_its_name(tmp_path):
    with pytest.raises(FileNotFoundError, match="/nowhere/source"):
        with files.replacing(tmp_path / "a"):
            open("/nowhere/source")


# ---- checksums -------------------------------------------------------------------------------------------------------


@given(content=st.binary(min_size=1, max_size=200), place=st.integers(0, 10**6), bit=st.integers(0, 7))
@settings(max_examples=40, deadline=None)
def test_every_changed_bit_is_found(tmp_path_factory, content, place, bit):
    folder = tmp_path_factory.mktemp("sums")
    (folder / "a").write_bytes(content)
    files.seal(folder)
    assert files.faults(folder / files.SUMS) == {}
    changed = bytearray(content)
    changed[place % len(content)] ^= 1 << bit
    (folder / "a").write_bytes(changed)
    (wrong,) = files.faults(folder / files.SUMS).items()
    assert wrong[0] == str(folder / "a") and wrong[1].startswith("not what was written: its sha256 is ")


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", "a/../../b", "\\a", "..", "b\\..\\..\\c"])
def test_a_name_that_leaves_the_folder_is_refused(tmp_path, name):
    assert not files.inside(name)
    (tmp_path / "SHA256SUMS").write_text(f"{'0' * 64}  {name}\n")
    with pytest.raises(ValueError, match=r"line 1 names .*it must be a file in"):
        files.read_sums(tmp_path / "SHA256SUMS")


@pytest.mark.parametrize("name", ["a", "a/b", ".eval_results/c.yaml", "a..b", "...a"])
def test_a_name_that_stays_in_the_folder_is_taken(name):
    assert files.inside(name)


@pytest.mark.parametrize("text", ["0" * 64, "0" * 63 + "  a", "X" * 64 + "  a", "\n", f"{'0' * 64} a"])
def test_a_line_that_is_no_checksum_is_named(tmp_path, text):
    (tmp_path / "s").write_text(text + "\n")
    assert files.faults(tmp_path / "s") == {str(tmp_path / "s"): "damaged: line 1 is no checksum of a file"}


def test_a_missing_file_is_missing_and_a_folder_without_checksums_is_refused(tmp_path):
    (tmp_path / "a").touch()
    with pytest.raises(ValueError, match=r"has no checksums .*cdlm verify .* --seal"):
        files.require_sound(tmp_path / files.SUMS, "this")
    files.seal(tmp_path)
    files.require_sound(tmp_path / files.SUMS, "this")
    (tmp_path / "a").unlink()
    assert files.faults(tmp_path / files.SUMS) == {str(tmp_path / "a"): "missing, though SHA256SUMS names it"}


@pytest.mark.parametrize("cut, why", [(lambda text: "", "it is empty"), (lambda text: text[:-1], "it is cut off"),
                                      (lambda text: text[: len(text) // 2], "it is cut off")])  # fmt: skip
def test_a_file_of_checksums_that_is_empty_or_cut_off_vouches_for_nothing(tmp_path, cut, why):
    (tmp_path / "a").write_text("one")
    files.seal(tmp_path)
    sums = tmp_path / files.SUMS
    sums.write_text(cut(sums.read_text()))
    assert why in files.faults(sums)[str(sums)]
    with pytest.raises(ValueError, match=f"{files.SUMS} is damaged: {why}"):
        files.require_sound(sums, "the folder")


def test_links_in_a_run_folder_lead_nowhere(tmp_path):
    """A folder from elsewhere, with links where the lock and a half-written file would stand: what they point at stays as it was."""
    mine, run = tmp_path / "mine", tmp_path / "run"
    mine.write_text("mine")
    run.mkdir()
    (run / files.LOCK).symlink_to(mine)
    files.partial_of(run / "report.md").symlink_to(mine)
    with pytest.raises(files.NotWritten), files.locked(run):
        pass
    files.write_text(run / "report.md", "text")
    assert mine.read_text() == "mine" and (run / "report.md").read_text() == "text" and not (run / "report.md").is_symlink()


def test_verify_refuses_what_it_does_not_know(tmp_path):
    with pytest.raises(ValueError, match="no folder at"):
        list(verify.check(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="holds nothing that cdlm finished"):
        list(verify.check(tmp_path))


# ---- one writer ------------------------------------------------------------------------------------------------------


def test_the_second_writer_is_refused_by_name_and_the_lock_goes_with_the_first(tmp_path):
    with files.locked(tmp_path):
        with pytest.raises(ValueError, match=rf"is in use by process {os.getpid()} on \S+: wait for it"):
            with files.locked(tmp_path):
                pass
        assert (tmp_path / files.LOCK).is_file(), "the refused one leaves the lock"
    assert list(tmp_path.iterdir()) == []
    with files.locked(tmp_path):
        pass


def test_a_crash_leaves_no_lock_behind(tmp_path):
    child = os.fork()
    if child == 0:
        with files.locked(tmp_path):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert (tmp_path / files.LOCK).is_file()
    with files.locked(tmp_path):
        assert str(os.getpid()) in (tmp_path / files.LOCK).read_text()
    assert list(tmp_path.iterdir()) == []


# ---- what goes out ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "shown"), [
    ("plain Ü 日本 🙂\n\t", "plain Ü 日本 🙂\n\t"), ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"), ("a\rb\x07", "a\\rb\\x07"),
    ("\x9b2J", "\\x9b2J"), ("\u202eabc", "\\u202eabc"), ("a\u2028b", "a\\u2028b"), ("\ud800", "\\ud800"),
    ("👩‍👧", "👩‍👧"), ("\x00", "\\x00"),
])  # fmt: skip
def test_control_characters_are_written_out(text, shown):
    assert terminal.visible(text) == shown
    assert terminal.visible("\n", keep="") == "\\n"


@given(st.text())
@settings(max_examples=100, deadline=None)
def test_nothing_that_moves_a_cursor_is_left(text):
    shown = terminal.visible(text, keep="")
    assert not any(ord(c) < 32 or 0x7F <= ord(c) < 0xA0 for c in shown)


def test_secrets_are_hidden_by_name_and_by_form():
    token = "hf_" + "a1B2" * 10
    environment = {
        "MY_API_KEY": "long-secret-value", "HF_TOKEN": "short", "TOKENIZERS_PARALLELISM": "false-false", "HF_TOKEN_PATH": "/home/me/token"
    }
    text = f"{token} long-secret-value short false-false /home/me/token https://me:pass@host/x"
    assert terminal.without_secrets(text, environment) == (
        "[hidden] [hidden] short false-false /home/me/token https://[hidden]@host/x"
    )


def test_names_are_text_in_markdown():
    shown = terminal.markdown("<b>|[a](b)*c*\n# _d_ snake_case")
    assert shown == "&lt;b&gt;&#124;\\[a\\](b)\\*c\\* # \\_d\\_ snake_case"


def test_json_is_written_with_its_keys_in_order(tmp_path):
    files.write_json(tmp_path / "a.json", {"b": 1, "a": [2]})
    assert (tmp_path / "a.json").read_text() == files.json_text({"a": [2], "b": 1})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": [2], "b": 1}
