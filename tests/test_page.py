"""report.html: one whole page that asks nobody for anything, with every part that was measured, and none that was not."""

import json
import re
from html.parser import HTMLParser

import pytest
from mini import finished

from cdlm.evaluate import compare, page, report, svg

VOID = {"meta", "br"}


class Reader(HTMLParser):
    """Every tag is closed in its order; texts, tags and attributes are kept."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.text, self.attributes = [], [], "", []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    return finished(tmp_path_factory).out


@pytest.fixture
def found(done):
    return json.loads((done / "report.json").read_text())


def test_the_page_of_a_run(done, found):
    seen = Reader((done / "report.html").read_text())
    for part in ("Accuracy against steps", "Latency", "Accuracy under parallelism", "All tasks", "Training losses",
                 "How answers are written", "Where this comes from", found["environment"]["torch"], "cdlm distill"):  # fmt: skip
        assert part in seen.text, part
    for line in report.summary_lines(found["summary"]):
        assert line in seen.text
    assert {"copy", "reverse"} <= {row["task"] for row in found["decodings"]}
    assert not {"script", "link", "img", "iframe"} & set(seen.tags)
    assert not [name for name, _ in seen.attributes if name in ("src", "href") or name.startswith("on")]
    assert not re.search(r"https?://|url\(|@import", (done / "report.html").read_text()), "nothing is fetched"
    assert "prefers-color-scheme: dark" in seen.text


def test_every_token_of_a_sample_has_the_step_that_revealed_it(found):
    for one in found["decodings"]:
        assert len(one["tokens"]) == len(one["revealed_at"]) > 0
        assert all(1 <= step <= one["steps"] for step in one["revealed_at"])
    assert any(len(set(one["revealed_at"])) > 1 for one in found["decodings"])


def test_the_report_holds_the_seconds_of_the_questions_that_were_timed(done, found):
    """Two of four questions, one of each group in turn: the first two."""
    side = compare.read(done)
    for method in side.samples:
        spent = side.seconds(method)
        assert [len(values) for values in spent] == [1, 1, 0, 0] and min(spent[0] + spent[1]) > 0, method
    own = next(row for row in found["latency"]["rows"] if row["method"] == "student" and row["parameter"] == 0.5)
    seconds = [value for values in side.seconds("student(0.5)") for value in values]
    assert own["median_s"] == pytest.approx(sum(seconds) / 2), "the median of two"
    assert [entry["points"].value for entry in compare.compare(side, side)] == [0.0] * len(side.methods)


def test_report_md_has_the_new_tables(done, found):
    text = (done / "report.md").read_text()
    rows = [row for row in found["parallelism"] if row["task"] == "all"]
    assert report.markdown_table(report.aup_table(rows, report.TITLES), report.AUP_COLUMNS) in text
    assert report.markdown_table(report.latency_table(found["latency"]["rows"]), report.LATENCY_COLUMNS) in text


def test_what_was_not_measured_is_left_out(found):
    """A report from before these parts existed, and one with numbers missing everywhere: a page all the same."""
    old = {key: value for key, value in found.items() if key in ("summary", "results", "environment")}
    seen = Reader(page.html(old, "old", []))
    for part in ("Latency", "Accuracy under parallelism", "Training losses", "How answers are written"):
        assert f"{part}</h2>" not in page.html(old, "old", []) and "All tasks" in seen.text
    names = ("accuracy", "steps", "commit_forwards", "forwards", "output_tokens", "tpf", "latency_s", "tps")
    empty = [{**row, **dict.fromkeys(names), "n": 0} for row in found["results"]]
    hollow = {**old, "results": empty, "summary": report.summarise([], 0.5, None)}
    assert "None" not in Reader(page.html(hollow, "hollow", [])).text and report.markdown(hollow, "hollow")


def test_text_from_outside_is_escaped(found):
    evil = "<script>alert('x')</script>"
    one = {**found["decodings"][0], "prompt": evil, "tokens": [evil], "revealed_at": [1], "task": evil}
    rows = [{**row, "task": evil} if row["task"] == "copy" else row for row in found["results"]]
    bad = {**found, "decodings": [one], "command": evil, "results": rows, "request": {evil: evil}}
    text = page.html(bad, evil, [{"step": 1, evil + "_loss": 1.0}])
    assert "<script" not in text and Reader(text).text.count(evil) >= 6


@pytest.mark.parametrize("low, high, wanted", [
    (0, 100, [0, 20, 40, 60, 80, 100]), (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (3, 3, [3]), (-2, 102, [0, 20, 40, 60, 80, 100]),
    (0, 0.011, [0, 0.002, 0.004, 0.006, 0.008, 0.01]),
])  # fmt: skip
def test_ticks(low, high, wanted):
    assert svg.ticks(low, high) == pytest.approx(wanted)


@pytest.mark.parametrize("low, high, wanted", [(1, 64, [1, 2, 5, 10, 20, 50]), (2.5, 4.5, [2.5, 4.5]), (0.9, 2.2, [1, 2])])
def test_log_ticks(low, high, wanted):
    assert svg.log_ticks(low, high) == pytest.approx(wanted)


def test_a_plot_puts_points_where_they_belong():
    """On a plot of 460 x 300 the axes span x 58 .. 446 and y 10 .. 260: (0, 0) is the lower left corner, (10, 100) the upper right."""
    text = svg.plot([svg.Series("a", 0, [(0, 0), (10, 100)], ["first", "second"])], x="x", y="y", y_range=(0, 100))
    Reader(text)
    assert '<circle cx="58.0" cy="260.0"' in text and '<circle cx="446.0" cy="10.0"' in text
    assert "M58.0 260.0 L446.0 10.0" in text and "<title>second</title>" in text
    same = svg.plot([svg.Series("a", 0, [(3, 5)], [""])], x="x", y="y", log_x=True)
    assert 'cx="252.0" cy="135.0"' in same, "a single point stands in the middle"


def test_bars_start_at_zero_and_have_whiskers():
    """960 wide, names 250, text 250: 460 pixels for the largest whisker, 4 s. Value 2 is 230 wide, its whisker 1 .. 4 is 365 .. 710."""
    text = svg.bars([svg.Bar("a & b", 1, 1.0, 2.0, 4.0, "2 s")], x="seconds")
    Reader(text)
    assert 'x="250" y="7" width="230.0"' in text and "M365.0 10 v10 m0 -5 H710.0" in text and "a &amp; b" in text
    Reader(svg.bars([svg.Bar("none", 0, 0.0, 0.0, 0.0, "")], x="seconds"))
