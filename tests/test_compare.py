"""`cdlm compare`: differences and intervals by hand, and no comparison of runs that were asked other questions."""

import json

import pytest

from cdlm import cli, files
from cdlm.evaluate import compare


def sample(method, number, correct, *, steps=4, tokens=20, seconds=(), prompt=None):
    return {
        "method": method, "prompt": prompt or f"p{number}", "reference": f"r{number}", "group": "sort", "correct": correct, "text": "x",
        "steps": steps, "commit_forwards": 1, "forwards": steps, "output_tokens": tokens, "seconds": list(seconds),
    }  # fmt: skip


def write(folder, samples, *, threshold=0.9, truncated=None, device="a cpu"):
    """A run's folder with what compare reads, from its samples."""
    folder.mkdir(parents=True)
    results = []
    for label in dict.fromkeys(one["method"] for one in samples):
        name, _, value = label.partition("(")
        results.append({"task": "all", "method": name, "parameter": float(value.rstrip(")")) if value else None})
    spent = {}
    for one in samples:
        asked = [row for row in samples if row["method"] == one["method"]]
        spent[one["method"]] = {str(i): row["seconds"] for i, row in enumerate(asked) if row["seconds"]}
    summary = {"confidence_threshold": threshold, "truncated_steps": truncated}
    found = {"summary": summary, "results": results, "environment": {"device": device}, "latency": {"seconds": spent}}
    (folder / "report.json").write_text(json.dumps(found))
    (folder / "samples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in samples))
    return folder


@pytest.fixture
def runs(tmp_path):
    """A: student at 0.9 right on 1 of 4 in 4 steps; at 0.5 on none. B: student at 0.95 right on 3 of 4 in 2 steps, twice as fast."""
    a = [sample("student(0.5)", i, False, steps=9) for i in range(4)]
    a += [sample("student(0.9)", i, i == 0, seconds=[2.0 + i] if i < 2 else []) for i in range(4)]
    a += [sample("teacher", i, True, steps=64) for i in range(4)]
    b = [sample("student(0.95)", i, i > 0, steps=2, seconds=[(2.0 + i) / 2, 50.0, 0.1] if i < 3 else []) for i in range(4)]
    return write(tmp_path / "a", a), write(tmp_path / "b", b, threshold=0.95, device="\x1b[31manother cpu")


def test_compare_by_hand(runs):
    """Right in A: 1 0 0 0, in B: 0 1 1 1; B - A: -100, 100, 100, 100, mean 50. TPF 80 / 16 and 80 / 8. Seconds of both: 2, 3 and 1, 1.5."""
    a, b = (compare.read(folder) for folder in runs)
    (entry,) = compare.compare(a, b)
    assert entry["method"] == "student" and (entry["a"]["parameter"], entry["b"]["parameter"]) == (0.9, 0.95)
    assert (entry["a"]["accuracy"], entry["b"]["accuracy"], entry["points"].value) == (0.25, 0.75, 50.0)
    assert -100 <= entry["points"].low < 50 < entry["points"].high == 100
    assert (entry["a"]["steps"], entry["b"]["steps"], entry["a"]["tpf"], entry["b"]["tpf"]) == (4, 2, 5, 10)
    assert entry["timed"] == 2 and (entry["faster"].value, entry["faster"].low, entry["faster"].high) == pytest.approx((2, 2, 2))
    (cells,) = compare.table([entry])
    assert len(cells) == len(compare.COLUMNS) and cells[:6] == ["student, cached", "0.9", "0.95", "25.0%", "75.0%", "+50.0"]
    assert cells[11] == "2.00x"
    words = " ".join(compare.remarks(a, b, [entry]))
    assert "4 questions" in words and "over the 2 questions that both timed" in words and "device a cpu and \x1b[31manother cpu" in words


def test_a_run_against_itself_differs_by_nothing(runs):
    side = compare.read(runs[0])
    for entry in compare.compare(side, side):
        assert (entry["points"].value, entry["points"].low, entry["points"].high) == (0, 0, 0)
    assert "Not the same environment" not in " ".join(compare.remarks(side, side, compare.compare(side, side)))


def test_the_interval_of_an_accuracy_difference():
    """25 of 100 questions won, none lost: mean 25, standard error 100 sqrt(0.25 * 0.75 / 100) = 4.33, so 25 +- 8.5."""
    found = compare.points_between([False] * 100, [i < 25 for i in range(100)])
    assert found.value == 25 and found.low == pytest.approx(16.5, abs=1.1) and found.high == pytest.approx(33.5, abs=1.1)
    with pytest.raises(ValueError, match="same questions"):
        compare.points_between([True], [])


def test_runs_that_were_not_timed_and_outputs_without_a_token(tmp_path):
    one = write(tmp_path / "a", [{**sample("student(0.9)", 0, True, steps=0, tokens=0)}])
    old = json.loads((one / "report.json").read_text())
    (one / "report.json").write_text(json.dumps({key: value for key, value in old.items() if key != "latency"}))
    side = compare.read(one)
    (entry,) = compare.compare(side, side)
    assert entry["faster"] is None and entry["a"]["tpf"] is None
    assert compare.table([entry])[0][9:] == ["", "", "", ""]
    assert "Latency is not compared" in " ".join(compare.remarks(side, side, [entry]))


@pytest.mark.parametrize("change, words", [
    (lambda rows: [{**row, "prompt": "other"} if row["prompt"] == "p2" else row for row in rows],
     r"question 3 differs: \S+a asks 'p2' .*'other'"),
    (lambda rows: [{**row, "reference": "r"} if row["prompt"] == "p1" else row for row in rows],
     r"question 2 differs.*answer 'r1'.*answer 'r'"),
    (lambda rows: [row for row in rows if row["prompt"] != "p3"], r"question 4 differs: \S+a asks 'p3'.* has 3 questions"),
    (lambda rows: [*rows, sample("student(0.95)", 4, True)], r"question 5 differs: \S+c asks 'p4'.* has 4 questions"),
])  # fmt: skip
def test_other_questions_are_refused_by_name(runs, tmp_path, change, words, capsys):
    rows = [json.loads(line) for line in (runs[1] / "samples.jsonl").read_text().splitlines()]
    other = write(tmp_path / "c", change(rows), threshold=0.95)
    with pytest.raises(ValueError, match=words):
        compare.compare(compare.read(runs[0]), compare.read(other))
    assert cli.main(["compare", str(runs[0]), str(other)]) == 2
    assert "differs" in capsys.readouterr().err


def test_what_is_no_run_is_refused(runs, tmp_path):
    with pytest.raises(ValueError, match=r"has no report\.json"):
        compare.read(tmp_path)
    (runs[0] / "samples.jsonl").write_text("{")
    with pytest.raises(ValueError, match="not the folder of an evaluated run"):
        compare.read(runs[0])
    (runs[1] / "samples.jsonl").write_text("")
    with pytest.raises(ValueError, match="holds no result"):
        compare.read(runs[1])


@pytest.mark.parametrize("damage", ["report.json", "samples.jsonl", "report.sha256"])
def test_a_damaged_run_is_refused_by_name(runs, capsys, damage):
    """One flipped bit that leaves every file readable; files that compare does not read may be the owner's."""
    names = {name: runs[1] / name for name in ("report.json", "samples.jsonl", "report.md")}
    (runs[1] / "report.md").write_text("# a report\n")
    files.write_sums(runs[1] / "report.sha256", names)
    (runs[1] / "report.md").write_text("# my words\n")
    assert cli.main(["compare", str(runs[0]), str(runs[1])]) == 0
    capsys.readouterr()
    content = (runs[1] / damage).read_bytes()
    changed = content.replace(b'"steps": 2', b'"steps": 3', 1).replace(b"another", b"anothes").replace(b"  report.json", b" !report.json")
    assert changed != content
    (runs[1] / damage).write_bytes(changed)
    assert cli.main(["compare", str(runs[0]), str(runs[1])]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"cdlm: error: {runs[1] / damage} is ")


def test_runs_without_a_method_in_common(runs, tmp_path):
    other = write(tmp_path / "c", [sample("autoregressive", i, True) for i in range(4)])
    with pytest.raises(ValueError, match=r"no method in common: \S+ has student; \S+ has autoregressive"):
        compare.compare(compare.read(runs[1]), compare.read(other))


def test_the_command(runs, tmp_path, capsys):
    assert cli.main(["compare", str(runs[0]), str(runs[1]), "--json", str(tmp_path / "out" / "c.json")]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("| method | A | B |") and "| student, cached | 0.9 | 0.95 |" in printed
    assert "a cpu and \\x1b[31manother cpu." in printed and "\x1b" not in printed
    (entry,) = json.loads((tmp_path / "out" / "c.json").read_text())["methods"]
    assert entry["points"]["value"] == 50.0 and entry["faster"]["value"] == 2.0


def test_a_sweep_without_a_value_of_its_own_is_taken_at_its_first(tmp_path):
    """The truncated steps, 4, are no value of the fixed number of tokens, nor is the threshold, 0.9, one of the factor rule."""
    rows = [{"task": "all", "method": method, "parameter": value}
            for method, values in (("teacher_fixed", (2, 4)), ("teacher_factor", (0.5, 0.9)), ("student", (0.5, 0.9)))
            for value in values]  # fmt: skip
    side = compare.Side(tmp_path, {"summary": {"confidence_threshold": 0.9, "truncated_steps": 4}, "results": rows}, {})
    assert [side.own(method) for method in ("teacher_fixed", "teacher_factor", "student")] == [2, 0.5, 0.9]
