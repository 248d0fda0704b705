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

from cdlm import cli, files, terminal, verify

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
    # printf '%s  in/b\n' 3e23... | sha256sum
    end = subprocess.run(["sha256sum"], input=f"{b}  in/b\n".encode(), capture_output=True, check=True).stdout.decode()[:64]
    assert (tmp_path / "a" / "SHA256SUMS").read_text() == f"{b}  in/b\n# sha256 of the lines above: {end}\n"
    assert subprocess.run(["sha256sum", "-c", "--quiet", "--strict", "SHA256SUMS"], cwd=tmp_path / "a", check=False).returncode == 0


def test_a_folder_that_fails_leaves_the_old_one_and_what_speaks_of_it(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "old").touch()
    (tmp_path / "report").touch()
    with pytest.raises(files.NotWritten, match=r"a can't be written: no room$"):
        with files.replacing_folder(tmp_path / "a", before=[tmp_path / "report"]) as partial:
            (partial / "new").touch()
            raise SafetensorError("no\nroom")
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == ["a", "a/old", "report"]


def test_a_folder_takes_the_place_of_a_link_that_leads_nowhere(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "nowhere")
    with files.replacing_folder(tmp_path / "a") as partial:
        (partial / "in").touch()
    assert (tmp_path / "a" / "in").is_file() and not (tmp_path / "a").is_symlink() and len(list(tmp_path.iterdir())) == 1


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


def test_halves_of_a_folder_that_was_being_replaced_go_and_the_folder_stays(tmp_path):
    for name in ("a", ".a.partial", ".a.old", ".b.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "in").touch()
    files.remove_halves(tmp_path / "a")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".b.old", "a"] and (tmp_path / "a" / "in").is_file()


def test_a_new_folder_takes_no_place_that_is_taken(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "mine").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("a", "link"):
        with pytest.raises(ValueError, match=f"{name} is there already"):
            with files.new_folder(tmp_path / name):
                pass
    with files.new_folder(tmp_path / "b") as partial:
        (partial / "in").touch()
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == ["a", "a/mine", "b", "b/SHA256SUMS", "b/in", "link"]


def test_scratch_starts_empty_and_goes_whatever_happens(tmp_path):
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "of a run that was killed").touch()
    with pytest.raises(Killed):
        with files.scratch(tmp_path / "s") as scratch:
            assert list(scratch.iterdir()) == []
            (scratch / "half").touch()
            raise Killed
    assert list(tmp_path.iterdir()) == []


def test_lines_behind_a_file_are_on_the_disk_when_they_are_added(tmp_path, monkeypatch):
    """Each call brings its lines to the disk; the first one also the file's name."""
    synced: list[str] = []
    monkeypatch.setattr(files.os, "fsync", lambda number: synced.append(os.readlink(f"/proc/self/fd/{number}")))
    file = tmp_path / "a.jsonl"
    files.append_text(file, "1\n2\n")
    assert synced == [str(file), str(tmp_path)]
    files.append_text(file, "3\n")
    assert synced == [str(file), str(tmp_path), str(file)] and file.read_text() == "1\n2\n3\n"


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


def test_a_folders_checksums_are_also_of_the_checksums_of_a_folder_in_it(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a").touch()
    files.seal(tmp_path / "in")
    with files.locked(tmp_path):  # the lock is no content
        files.seal(tmp_path)
    assert set(files.read_sums(tmp_path / files.SUMS)) == {"in/a", "in/SHA256SUMS"}


@pytest.mark.parametrize(("change", "why"), [
    (lambda lines: [lines[0].replace("config", "weights"), *lines[1:]], "line 2 names weights again"),
    (lambda lines: [lines[0].replace("config", "confhg"), *lines[1:]], "its lines are not those that were written"),
    (lambda lines: [*lines[:2], "0" * 64 + "  nowhere", lines[2]], "its lines are not those that were written"),
    (lambda lines: lines[1:], "its lines are not those that were written"),
    (lambda lines: lines[:2], "it is cut off behind line 2, or of an older version"),
    (lambda lines: lines[:1], "it is cut off behind line 1, or of an older version"),
    (lambda lines: [*lines, lines[0]], "line 3 is no checksum of a file"),
])  # fmt: skip
def test_checksums_that_were_changed_are_damaged_themselves(tmp_path, change, why):
    """Whatever became of a line: what it says of the files would hide one, or send for one that never was."""
    for name in ("config", "weights"):
        (tmp_path / name).touch()
    files.seal(tmp_path)
    sums = tmp_path / files.SUMS
    files.require_sound(sums, "this")
    sums.write_text("".join(f"{line}\n" for line in change(sums.read_text().splitlines())))
    assert files.faults(sums)[str(sums)].startswith(f"damaged: {why}")
    with pytest.raises(ValueError, match=rf"SHA256SUMS is damaged: {why}.* Remove this to make it again, or.*cdlm verify .* --seal"):
        files.require_sound(sums, "this")


@pytest.mark.parametrize("name", ["a\nb", "a\rb", "..\\b", "\udcff"])
def test_a_name_that_can_not_be_read_again_is_not_written(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(ValueError, match="can't stand in a file of checksums"):
        files.seal(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_every_other_name_is_read_as_it_was_written(tmp_path):
    names = {" a ", "\x85", "\u2028", "a\\b", "#", "\x0c", "ü"}
    for name in names:
        (tmp_path / name).touch()
    files.seal(tmp_path)
    assert set(files.read_sums(tmp_path / files.SUMS)) == names and files.faults(tmp_path / files.SUMS) == {}


@pytest.mark.parametrize("name", ["a", files.SUMS])
def test_a_read_error_is_no_damage(tmp_path, monkeypatch, name):
    """A disk that gives no bytes says nothing of what is on it: an error that names the file, not a fault to be mended by removing it."""
    (tmp_path / "a").touch()
    files.seal(tmp_path)
    real = Path.open

    def refuse(path, *args, **kwargs):
        if path.name == name:
            raise OSError(errno.EIO, "Input/output error")
        return real(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    for look in (files.faults, lambda sums: files.require_as_written(tmp_path / "a", sums, ""), lambda sums: files.require_sound(sums, "")):
        with pytest.raises(files.NotRead, match=rf"/{name} can't be read: Input/output error"):
            look(tmp_path / files.SUMS)


def test_a_file_of_which_nothing_can_be_found_out_is_not_missing(tmp_path, monkeypatch):
    def refuse(path, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(files.NotRead, match="a can't be read: Permission denied"):
        files.is_there(tmp_path / "a")


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


def test_checksums_of_weights_may_be_of_another_program(tmp_path):
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / name).touch()
    lines = subprocess.run("sha256sum *", shell=True, cwd=tmp_path, capture_output=True, check=True).stdout.decode()
    sums = tmp_path / files.SUMS
    sums.write_text(lines)
    files.require_sound_weights(tmp_path)
    sums.write_text(lines.splitlines(keepends=True)[0])  # as if the rest were cut off
    with pytest.raises(ValueError, match=r"SHA256SUMS is damaged: it is cut off behind line 1.* cdlm verify .* --seal"):
        files.require_sound_weights(tmp_path)
    files.seal(tmp_path)
    (tmp_path / "c.safetensors").touch()  # of their owner
    files.require_sound_weights(tmp_path)


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


def test_verify_goes_on_behind_a_file_of_checksums_that_is_damaged(tmp_path, capsys):
    for name in ("trajectories", "student"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text("{}")
        files.seal(tmp_path / name)
    (tmp_path / "trajectories" / files.SUMS).write_text("half")
    (tmp_path / "student" / "manifest.json").write_text("[]")
    assert cli.main(["verify", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert f"{tmp_path}/trajectories/SHA256SUMS is damaged: it is cut off" in said.err and "student/manifest.json is not what" in said.err
    assert "student/SHA256SUMS: 1 of 1 files damaged" in said.out


def test_verify_goes_on_behind_an_artifact_without_checksums(tmp_path, capsys):
    for name in ("trajectories", "student"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text("{}")
    files.seal(tmp_path / "student")
    assert cli.main(["verify", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert f"{tmp_path}/trajectories/SHA256SUMS is missing: {tmp_path}/trajectories has no checksums; --seal writes them" in said.err
    assert "student/SHA256SUMS: all files as they were written" in said.out


@pytest.mark.parametrize(("left", "named"), [
    (["report.json", "evaluate.request.json"], "student/request.json is missing, though evaluate.request.json is there"),
    (["export/README.md", "export/config.json"], "report.json is missing, though export/README.md is there"),
    (["push.request.json"], "export/config.json is missing, though push.request.json is there"),
])  # fmt: skip
def test_verify_names_a_result_that_is_not_there_though_a_later_one_is(tmp_path, capsys, left, named):
    for name in left:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    assert cli.main(["verify", str(tmp_path), "--seal"]) == 0 and cli.main(["verify", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith(f"cdlm: error: {tmp_path}/{named}, which speaks of it")


def test_verify_looks_at_what_the_checksums_of_shards_say(tmp_path, capsys):
    (tmp_path / "manifest.json").write_text("{}")
    for name in ("shard-00000", "shard-00001"):
        for ending in ("parquet", "safetensors"):
            (tmp_path / f"{name}.{ending}").write_text(name)
    assert cli.main(["verify", str(tmp_path), "--seal"]) == 0 and cli.main(["verify", str(tmp_path)]) == 0
    (tmp_path / "shard-00001.sha256").write_bytes((tmp_path / "shard-00000.sha256").read_bytes())
    files.seal(tmp_path)
    assert cli.main(["verify", str(tmp_path)]) == 1
    assert f"{tmp_path}/shard-00001.sha256 is damaged: its checksums of shard-00001.parquet, shard-" in capsys.readouterr().err


def test_sealing_waits_for_the_run_that_a_folder_is_part_of(tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    for name in ("student", "export/adapter", "ablation/x/student"):
        (run / name).mkdir(parents=True)
        (run / name / "config.json").write_text("{}")
    (tmp_path / ".lock").write_text("no lock of a run")
    with files.locked(run):
        for name in ("student", "export/adapter", "ablation/x/student"):
            assert cli.main(["verify", str(run / name), "--seal"]) == 2
            assert f"{run} is in use by process" in capsys.readouterr().err
        monkeypatch.chdir(run / "ablation")
        assert cli.main(["verify", "../student", "--seal"]) == 2
        assert not (run / "student" / files.SUMS).exists()
    monkeypatch.chdir(run / "ablation" / "x" / "student")
    assert cli.main(["verify", ".", "--seal"]) == 0 and files.faults(Path(files.SUMS)) == {}
    monkeypatch.chdir(run)
    assert cli.main(["verify", ".", "--seal"]) == 0
    assert (tmp_path / ".lock").read_text() == "no lock of a run", "a file of another's stays"


def test_verify_looks_at_every_part_of_a_run_and_seals_the_inner_one_first(tmp_path, capsys):
    parts = {
        "": "log.jsonl", "export/adapter": "adapter_config.json", "export": "config.json", "bench": "growth.json",
        "ablation/all-three": "report.json", "ablation/all-three/student": "adapter_config.json",
    }
    for place, name in parts.items():
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        (tmp_path / place / name).write_text("{}")
    assert cli.main(["verify", str(tmp_path), "--seal"]) == 0 and cli.main(["verify", str(tmp_path)]) == 0
    assert set(files.read_sums(tmp_path / "export" / files.SUMS)) == {"config.json", "adapter/adapter_config.json", "adapter/SHA256SUMS"}
    assert files.read_sums(tmp_path / "log.sha256").keys() == {"log.jsonl"} and not (tmp_path / files.LOCK).exists()
    for place, name in parts.items():
        capsys.readouterr()
        (tmp_path / place / name).write_text("[]")
        assert cli.main(["verify", str(tmp_path)]) == 1
        assert f"{tmp_path / place / name} is not what was written" in capsys.readouterr().err
        (tmp_path / place / name).write_text("{}")


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


def test_a_place_has_one_writer_before_anything_stands_there(tmp_path):
    place = tmp_path / "new" / "er" / "a"
    with files.locked_place(place):
        with pytest.raises(ValueError, match=rf"new/er/a is in use by process {os.getpid()} on \S+: wait for it"):
            with files.locked_place(place):
                pass
        with files.locked_place(place.with_name("b")), files.locked(place.parent):
            pass
        assert place.parent.is_dir(), "the refused one removes nothing"
    assert list(tmp_path.iterdir()) == [], "folders on the way to nothing go again"
    with files.locked_place(place):
        place.touch()
    assert [path.name for path in place.parent.iterdir()] == ["a"]


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


@pytest.mark.parametrize("name, hidden", [
    ("PGPASSWORD", True), ("MYSQL_PWD", True), ("GITHUB_PAT", True), ("AWS_SECRET_ACCESS_KEY", True), ("NPM_AUTH", True),
    ("GPG_PASSPHRASE", True), ("wandb_api_key", True), ("REGISTRY_PASSWORD_PROD", True),
    ("ACCESSTOKEN", True), ("apiToken", True), ("APIKEY1", True), ("AWS_CREDS", True), ("SIGNING_PRIVATEKEY", True),
    ("TOKENIZERS_PARALLELISM", False),
    ("PWD", False), ("OLDPWD", False), ("SSH_AUTH_SOCK", False), ("PATH", False), ("MONKEY", False), ("XAUTHORITY", False),
])  # fmt: skip
def test_names_of_secrets(name, hidden):
    """The current directory and a socket are none."""
    shown = terminal.without_secrets("at correct-horse now", {name: "correct-horse"})
    assert shown == ("at [hidden] now" if hidden else "at correct-horse now")
    assert terminal.holds_secret(b"correct-horse", {name: "correct-horse"}) is hidden


@pytest.mark.parametrize("value", ["back\\slash-it", "two lines\nof a long key", "with\ta tab", "quo'te\"d and é"])
def test_a_secret_is_found_however_it_is_written_out(value):
    """As Python and JSON write it, and where lines are folded."""
    for shown in (value, repr(value), json.dumps(value), json.dumps(value, ensure_ascii=False), " ".join(value.split())):
        assert not any(part in terminal.without_secrets(shown, {"A_TOKEN": value}) for part in (value, shown.strip("'\"")))
        assert terminal.holds_secret(shown.encode(), {"A_TOKEN": value})
    for part in value.splitlines():
        assert len(part) < 8 or terminal.without_secrets(f"only {part} here", {"A_TOKEN": value}) == "only [hidden] here"
    assert terminal.without_secrets(f"https://{'a' * 20}@host/x", {}) == "https://[hidden]@host/x"


def test_a_secret_that_begins_another_leaves_nothing_of_it():
    assert terminal.without_secrets("abcdefgh-rest", {"A_TOKEN": "abcdefgh", "B_TOKEN": "abcdefgh-rest"}) == "[hidden]"


def test_names_are_text_in_markdown():
    shown = terminal.markdown("<b>|[a](b)*c*\n# _d_ snake_case")
    assert shown == "&lt;b&gt;&#124;\\[a\\](b)\\*c\\* # \\_d\\_ snake_case"


def test_a_folder_is_on_the_disk_before_it_is_in_place(tmp_path, monkeypatch):
    """All its files, then itself, then the rename."""
    did, replace = [], os.replace
    monkeypatch.setattr(files, "_sync", lambda path: did.append(path.name))
    monkeypatch.setattr(files.os, "replace", lambda old, new: did.append(f"-> {Path(new).name}") or replace(old, new))
    with files.replacing_folder(tmp_path / "out") as partial:
        (partial / "a").write_text("a")
    placed = did.index("-> out")
    assert {"a", files.SUMS} <= set(did[:placed]) and did[placed - 1] == ".out.partial" and did[placed + 1] == tmp_path.name


def test_json_is_written_with_its_keys_in_order(tmp_path):
    files.write_json(tmp_path / "a.json", {"b": 1, "a": [2]})
    assert (tmp_path / "a.json").read_text() == files.json_text({"a": [2], "b": 1})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": [2], "b": 1}
