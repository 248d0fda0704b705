"""Published trajectories: both formats against the decoding they were made from, what is screened, and a run that trains on them."""

import json
import shutil
from fnmatch import fnmatch

import mini
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from mini import BLOCK, BUDGET, contents
from safetensors.torch import save_file

from cdlm import cli, data, families
from cdlm.decode import DecodeConfig, decode
from cdlm.importers import Importing, import_folder, steps_of
from cdlm.trajectories import Trajectories, replay, state

MASK, EOS = 1, 2


class Decoding:
    """Answers of the mini teacher, a few tokens a step, with every state as a callback saw it."""

    def __init__(self, folder, count: int, tokens_per_step: int):
        model = families.load(folder)
        self.tokenizer = families.load_tokenizer(folder, model.facts)
        self.questions = [row["prompt"] for row in mini.questions(count, seed=5)]
        self.prompts = [data.prompt_ids(self.tokenizer, text, chat_template=True) for text in self.questions]
        self.states = [[[MASK] * BUDGET] for _ in self.prompts]
        config = DecodeConfig(
            BUDGET, BLOCK, tokens_per_step=tokens_per_step, block_causal=False, use_cache=False, stop_at_eos=False,
        )
        self.final = []
        for row, prompt in enumerate(self.prompts):
            ids = torch.tensor([prompt])
            out = decode(model, ids, torch.ones_like(ids, dtype=torch.bool), config, callback=self.watch(row))
            self.final.append(out.filled_BM[0].tolist())

    def watch(self, row):
        def callback(step):
            now = list(self.states[row][-1])
            now[int(step.first_slot_A[0]) : int(step.first_slot_A[0]) + BLOCK] = step.ids_AS[0].tolist()
            self.states[row].append(now)

        return callback

    def d3llm(self, row: int) -> dict:
        prompt = self.prompts[row]
        return {
            "idx": row, "question": self.questions[row], "prompt_ids": prompt, "trajectory": [prompt + s for s in self.states[row][1:]],
            "final_output": prompt + self.final[row], "generated_text": "", "llm_answer": None, "gt_answer": "", "is_correct": row != 1,
        }

    def tad(self, row: int) -> dict:
        """As TAD's math script writes it: the teacher was shown the reference."""
        shown = f"Question: {self.questions[row]}\nReference Answer: abc\nAfter understanding the reference answer, please try:"
        return {
            "dataset_name": "x", "index": row, "sample_id": 0, "prompt": f"<|user|>{shown}<|assistant|>", "question": shown,
            "answer_gt": "abc", "pred": "abc", "prompt_len": 9, "output_text": "", "answer": "abc",
            "trajectory": {f"step{i}": s for i, s in enumerate(self.states[row])},
        }


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("published")
    mini.write(folder)
    return folder, Decoding(folder / "teacher", 40, 3), Decoding(folder / "teacher", 40, 1)


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def bring(made, source, target, **values):
    asked = Importing(**{"format": "d3llm", "block_length": BLOCK, **values})
    return import_folder(asked, str(source), target, str(made[0] / "teacher"), shard_size=16, say=lambda text: None)


def written(folder, name, rows):
    """The rows as a file of each kind that the published data comes in."""
    if name.endswith(".jsonl"):
        return jsonl(folder / name, rows)
    if name.endswith(".json"):
        (folder / name).write_text(json.dumps(rows))
    elif name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), folder / name)
    else:
        datasets = pytest.importorskip("datasets")
        datasets.Dataset.from_list(rows).save_to_disk(str(folder / name))
    return folder / name


# ---- round trip ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl", "rows.parquet", "saved"])
@pytest.mark.parametrize(("form", "several"), [("d3llm", False), ("d3llm", True), ("tad", False), ("tad", True)])
def test_tokens_and_states_are_those_of_the_decoding(made, tmp_path, form, several, name):
    decoding = made[1] if several else made[2]
    rows = [getattr(decoding, form)(row) for row in range(40)]
    manifest = bring(made, written(tmp_path, name, rows), tmp_path / "out", format=form)
    wanted = ["" if EOS in final[1:] and final[0] != EOS else "empty" if EOS in final else "no_eos" for final in decoding.final]
    stored, everything = Trajectories(tmp_path / "out"), Trajectories(tmp_path / "out", screened=True)
    assert manifest["trajectories"] == len(everything) == 40 and manifest["kept"] == len(stored) > 5
    assert [t.screened for t in everything] == wanted and [t.id for t in stored] == [row for row in range(40) if not wanted[row]]
    for t in everything:
        assert t.tokens.tolist() == decoding.final[t.id] and t.prompt_ids == decoding.prompts[t.id]
        assert t.decoded == BUDGET and t.hidden is None and t.confidence is None and t.temperature is None
        seen = decoding.states[t.id]
        # The state after k slots, for every k that the decoding stopped at, and no state that it was not in.
        assert {BUDGET - s.count(MASK): s for s in seen} == {
            k: state(t.tokens, t.step, k, MASK).tolist() for k in (BUDGET - s.count(MASK) for s in seen)
        }
        assert all(s.tolist() in seen for s in replay(t, MASK))
    for t in stored:
        assert t.answer_ids == decoding.final[t.id][: decoding.final[t.id].index(EOS)]


def test_steps_by_hand():
    """Slots 1 and 2, then 0, then 3: 0 slots were filled before the first state, 2 before the second, 3 before the third."""
    states = torch.tensor([[MASK, 7, 8, MASK], [6, 7, 8, MASK], [6, 7, 8, MASK], [6, 7, 8, 9]])
    assert steps_of(states, MASK, 4, "teacher").tolist() == [2, 0, 0, 3]
    assert steps_of(states, MASK, 2, "teacher") == "not_block_by_block"  # slot 2 came before slot 0
    assert steps_of(states, MASK, 2, "block").tolist() == [1, 0, 2, 3]


def test_the_budget_may_be_cut_to_whole_blocks(made, tmp_path):
    decoding = made[1]
    source = jsonl(tmp_path / "rows.jsonl", [decoding.d3llm(row) for row in range(40)])
    bring(made, source, tmp_path / "out", max_new_tokens=BLOCK)
    stored = Trajectories(tmp_path / "out")
    assert len(stored) > 0
    for t in stored:
        assert t.tokens.tolist() == decoding.final[t.id][:BLOCK] and sorted({*t.step.tolist()}) == [0, 3, 6]


def test_the_reference_answer_that_only_the_teacher_saw_is_left_out(made, tmp_path):
    decoding = made[2]
    code = {**decoding.tad(1), "question": decoding.questions[1], "teacher_text": "x\nReference Answer: abc"}
    del code["prompt"]
    plain = {**decoding.tad(2), "prompt": f"<|user|>{decoding.questions[2]}<|assistant|>"}
    del plain["question"]
    lost = {**decoding.tad(3)}
    del lost["question"]
    source = jsonl(tmp_path / "rows.jsonl", [decoding.tad(0), code, plain, lost, {"summary": "any_success", "solved": 4}])
    jsonl(source, [*map(json.loads, source.read_text().splitlines()), *(decoding.tad(row) for row in range(4, 40))])
    manifest = bring(made, source, tmp_path / "out", format="tad")
    everything = Trajectories(tmp_path / "out", screened=True)
    assert [everything[i].prompt_ids for i in range(3)] == decoding.prompts[:3]
    assert [everything[i].screened for i in (3, 4)] == ["no_prompt", "summary_line"]
    assert manifest["screened"]["no_prompt"] == manifest["screened"]["summary_line"] == 1


def test_a_column_with_the_reference_answer(made, tmp_path):
    decoding = made[2]
    rows = [{**decoding.tad(row), "answer": "abc" if row % 2 == 0 else None} for row in range(40)]
    bring(made, jsonl(tmp_path / "rows.jsonl", rows), tmp_path / "out", format="tad", answer_key="answer")
    everything = Trajectories(tmp_path / "out", screened=True)
    assert {t.screened for t in everything if t.id % 2} == {"no_reference"}
    assert all(decoding.tokenizer.decode(t.answer_ids) == "abc" for t in everything if t.id % 2 == 0)


# ---- what can't be trained on ----------------------------------------------------------------------------------------


def spoil(row: dict, how: str) -> dict:
    """A d3LLM row with one fault."""
    prompt, states = row["prompt_ids"], [list(s) for s in row["trajectory"]]
    first = len(prompt)
    if how == "no_states":
        states = []
    elif how == "other_prompt":
        states[3][0] += 1
    elif how == "short_budget":
        states = [s[:-1] for s in states]
    elif how == "no_mask":
        states = [states[-1], states[-1]]
    elif how == "mask_left":
        states = states[:-1]
    elif how == "token_changed":
        slot = next(i for i in range(first, len(states[0])) if states[4][i] != MASK)
        states[7][slot] = 5 if states[4][slot] != 5 else 6
    elif how == "not_block_by_block":
        states = [prompt + s[first + BLOCK :] + s[first : first + BLOCK] for s in states]
    elif how == "long_prompt":
        prompt = prompt + [9] * 600
        states = [prompt + s[first:] for s in states]
    return {**row, "prompt_ids": prompt, "trajectory": states}


FAULTS = ["no_states", "other_prompt", "short_budget", "no_mask", "mask_left", "token_changed", "not_block_by_block", "long_prompt"]


def test_a_row_that_breaks_what_training_needs_is_screened_with_its_reason(made, tmp_path):
    decoding = made[2]
    good = [decoding.d3llm(row) for row in range(40)]
    good[0] = decoding.d3llm(next(row for row in range(40) if EOS in decoding.final[row][1:]))
    rows = good[:1] + [spoil(row, how) for row, how in zip(good[1:], FAULTS, strict=False)] + good[9:]
    manifest = bring(made, jsonl(tmp_path / "rows.jsonl", rows), tmp_path / "out")
    everything = Trajectories(tmp_path / "out", screened=True)
    assert [everything[i].screened for i in range(1, 9)] == FAULTS
    assert all(manifest["screened"][how] == 1 for how in FAULTS)
    assert manifest["kept"] + sum(manifest["screened"].values()) == 40
    assert not {t.id for t in Trajectories(tmp_path / "out")} & set(range(1, 9))


def test_a_decoding_out_of_block_order_may_be_put_in_order(made, tmp_path):
    decoding = made[2]
    rows = [spoil(decoding.d3llm(row), "not_block_by_block") for row in range(40)]
    source = jsonl(tmp_path / "rows.jsonl", rows)
    with pytest.raises(ValueError, match=r"none of 40 rows .* can be trained on; screened: \{'not_block_by_block': 40\}"):
        bring(made, source, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["rows.jsonl"]
    bring(made, source, tmp_path / "out", order="block")
    for t in Trajectories(tmp_path / "out", screened=True):
        assert torch.equal(t.step // BLOCK, torch.arange(BUDGET) // BLOCK)
        first, second = decoding.states[t.id][-1][BLOCK:], decoding.states[t.id][-1][:BLOCK]
        assert t.tokens.tolist() == first + second


def test_wrong_answers_are_left_out_when_asked(made, tmp_path):
    source = jsonl(tmp_path / "rows.jsonl", [{**made[2].d3llm(row), "is_correct": row % 2 == 0} for row in range(40)])
    kept = bring(made, source, tmp_path / "all")["kept"]
    manifest = bring(made, source, tmp_path / "right", correct_only=True)
    assert 0 < manifest["kept"] < kept and manifest["kept"] + manifest["screened"]["wrong_answer"] == kept
    assert all(t.id % 2 == 0 for t in Trajectories(tmp_path / "right"))


# ---- refused ---------------------------------------------------------------------------------------------------------


def changed(row: dict, old: int, new: int) -> dict:
    return {**row, "trajectory": [[new if token == old else token for token in s] for s in row["trajectory"]]}


@pytest.mark.parametrize(("rows", "values", "wanted"), [
    (lambda d: [changed(d.d3llm(0), MASK, 126336)], {}, r"row 1 holds token 126336; the vocabulary of .*teacher has 58 tokens"),
    (lambda d: [d.d3llm(0), {**d.d3llm(1), "prompt_ids": [-3, *d.prompts[1]], "trajectory": [[-3, *s] for s in d.d3llm(1)["trajectory"]]}],
     {}, "row 2 holds token -3"),
    (lambda d: [changed(d.d3llm(0), MASK, 57)], {}, r"row 1 masks its slots with token 57; the mask token of .*teacher is 1"),
    (lambda d: [{"question": "a", "answer": "b"}], {}, "row 1 has no list under 'prompt_ids'; its columns are question, answer"),
    (lambda d: [d.d3llm(0)], {"format": "tad"}, "row 1 has no dict under 'trajectory'"),
    (lambda d: [{**d.tad(0), "trajectory": {"first": [1]}}], {"format": "tad"}, "named step0, step1, ...; here first"),
    (lambda d: [{"summary": "any_success"}], {"format": "tad"}, r"no row of .*rows\.jsonl is a trajectory"),
    (lambda d: [d.d3llm(0)], {"block_length": 5}, "block_length 5 does not divide the budget, 16 slots"),
    (lambda d: [d.d3llm(0)], {"block_length": 0}, "block_length is 0"),
    (lambda d: [d.d3llm(0)], {"format": "other"}, "format is 'other'; allowed: d3llm, tad"),
    (lambda d: [d.d3llm(0)], {"order": "none"}, "order is 'none'; allowed: teacher, block"),
    (lambda d: [], {}, r"rows\.jsonl holds no rows"),
    (lambda d: [{**d.d3llm(0), "trajectory": [[*d.prompts[0], "x"]]}], {}, "row 1: a state holds something else than token ids"),
    (lambda d: [{**d.d3llm(0), "trajectory": [d.prompts[0]]}], {}, r"no row of .*rows\.jsonl is a trajectory"),
])
def test_what_does_not_fit_the_model_is_one_error_and_leaves_nothing(made, tmp_path, rows, values, wanted):
    source = jsonl(tmp_path / "rows.jsonl", rows(made[2]))
    with pytest.raises(ValueError, match=wanted):
        bring(made, source, tmp_path / "out", **values)
    assert [p.name for p in tmp_path.iterdir()] == ["rows.jsonl"]


def test_a_model_with_blocks_from_position_zero_is_refused(made, tmp_path):
    import shutil

    shutil.copytree(made[0] / "teacher", tmp_path / "teacher")
    config = json.loads((tmp_path / "teacher" / "config.json").read_text())
    (tmp_path / "teacher" / "config.json").write_text(json.dumps({**config, "block_origin": "zero", "prompt_attention": "block_causal"}))
    source = jsonl(tmp_path / "x.jsonl", [made[2].d3llm(0)])
    with pytest.raises(ValueError, match="counts blocks from position 0; the trajectories of d3llm count them from the prompt's end"):
        import_folder(Importing("d3llm", block_length=BLOCK), str(source), tmp_path / "out", str(tmp_path / "teacher"))
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_there_is_left_as_it_is(made, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(ValueError, match="out is there already"):
        bring(made, tmp_path / "nothing.jsonl", tmp_path / "out")
    assert contents(tmp_path / "out") == {"mine": b"x"}


# ---- training on them ------------------------------------------------------------------------------------------------


@pytest.fixture
def recipe(made, tmp_path, monkeypatch):
    """A recipe without a collect section, beside imported trajectories."""
    monkeypatch.chdir(tmp_path)
    source = jsonl(tmp_path / "published.jsonl", [made[1].d3llm(row) for row in range(40)])
    command = ["import", "d3llm", str(source), "trajectories", "--model", str(made[0] / "teacher"), "--block-length", str(BLOCK)]
    assert cli.main(command) == 0
    values = mini.values()
    del values["collect"], values["data"]["prompts"]
    values |= {"model": str(made[0] / "teacher"), "trajectories": "trajectories"}
    values["data"]["test"] = str(made[0] / "test.jsonl")
    (tmp_path / "imported.yaml").write_text(yaml.safe_dump(values))
    return tmp_path / "imported.yaml"


def test_a_run_trains_on_an_imported_folder_without_a_teacher_that_collects(recipe, capsys):
    capsys.readouterr()
    before = contents(recipe.parent / "trajectories")
    assert cli.main(["distill", str(recipe), "--out", "out"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("hold no hidden rows of a teacher; equation 4 takes the token") == 1
    assert "collect:" not in printed and not (recipe.parent / "out" / "trajectories").exists()
    lines = [json.loads(line) for line in (recipe.parent / "out" / "log.jsonl").read_text().splitlines()]
    assert all(line["distill_loss"] > 0 for line in lines if "distill_loss" in line) and "distill_loss" in lines[0]
    assert (recipe.parent / "out" / "export" / "model.safetensors").is_file()
    assert contents(recipe.parent / "trajectories") == before
    assert cli.main(["train", str(recipe), "--out", "out"]) == 0 and "train: done already" in capsys.readouterr().out


def test_a_dry_run_counts_the_imported_rows(recipe, capsys):
    kept = json.loads((recipe.parent / "trajectories" / "manifest.json").read_text())["kept"]
    capsys.readouterr()
    assert cli.main(["distill", str(recipe), "--out", "out", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert f"trajectories {kept} of {recipe.parent / 'trajectories'}; no teacher is run" in printed and "\ncollect" not in printed


@pytest.mark.parametrize(("change", "wanted"), [
    ("decode.block_length=4", "decode.block_length is 4; the trajectories at * were made with 8"),
    ("decode.max_new_tokens=32", "decode.max_new_tokens is 32; the trajectories at * were made with 16"),
    ("trajectories=nowhere", "nowhere has no manifest.json"),
    ("collect.num_prompts=3", "collect and trajectories are both given"),
    ("trajectories=", "missing key collect"),
    ("train.objective=mdlm", "objective mdlm trains on answers, not on trajectories"),
])
def test_a_recipe_that_does_not_fit_its_trajectories(recipe, capsys, change, wanted):
    capsys.readouterr()
    assert cli.main(["train", str(recipe), "--out", "out", "--set", change]) == 2
    assert fnmatch(capsys.readouterr().err, f"cdlm: error: *{wanted}*")


def test_trajectories_of_another_model_are_refused(recipe, capsys, tmp_path):
    mini.save_teacher(tmp_path / "other", seed=9)
    capsys.readouterr()
    assert cli.main(["train", str(recipe), "--out", "out", "--set", f"model={tmp_path / 'other'}"]) == 2
    assert "belong to another model than" in capsys.readouterr().err


def test_a_prompt_that_leaves_no_room_for_the_budget(recipe, capsys, made, tmp_path):
    """250 tokens and 16 slots; the model has 256 positions."""
    rows = [made[1].d3llm(row) for row in range(40)]
    for row in rows:
        row["trajectory"] = [[9] * 250 + s[len(row["prompt_ids"]) :] for s in row["trajectory"]]
        row["prompt_ids"] = [9] * 250
    bring(made, jsonl(tmp_path / "long.jsonl", rows), tmp_path / "long")
    capsys.readouterr()
    assert cli.main(["train", str(recipe), "--out", "out", "--set", "trajectories=long"]) == 2
    assert "a prompt of 250 tokens, which with decode.max_new_tokens 16 is more than the model's 256 positions" in capsys.readouterr().err


def test_the_trajectories_of_another_run_may_be_named(tmp_path_factory, tmp_path, capsys):
    """With their hidden rows, so equation 4 is that of the paper, and the student is the one of the run that collected them."""
    done = mini.finished(tmp_path_factory)
    values = mini.values() | {"model": str(done.recipe.parent / "teacher"), "trajectories": str(done.out / "trajectories")}
    del values["collect"], values["data"]["prompts"]
    values["data"]["test"] = str(done.recipe.parent / "test.jsonl")
    (tmp_path / "again.yaml").write_text(yaml.safe_dump(values))
    assert cli.main(["train", str(tmp_path / "again.yaml"), "--out", str(tmp_path / "out")]) == 0
    assert "hidden rows" not in capsys.readouterr().out
    file = "student/model.safetensors"
    assert (tmp_path / "out" / file).read_bytes() == (done.out / file).read_bytes()


def _column(name, change):
    """A column of every shard with each value changed, or without it (None)."""

    def edit(folder):
        for file in folder.glob("shard-*.parquet"):
            table = pq.read_table(file)
            place, kind = table.column_names.index(name), table.schema.field(name).type
            changed = [] if change is None else [(name, pa.array([change(value) for value in table[name].to_pylist()], kind))]
            table = table.remove_column(place)
            for column, values in changed:
                table = table.add_column(place, column, values)
            pq.write_table(table, file)

    return edit


def _hidden(name="hidden", shape=(5, 16, 32), dtype=torch.bfloat16):
    def edit(folder):
        for file in folder.glob("shard-*.safetensors"):
            save_file({name: torch.zeros(shape, dtype=dtype)}, file)

    return edit


def _manifest(change):
    def edit(folder):
        found = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps({**found, **change(found)}))

    return edit


IMPOSSIBLE = {
    "a token beyond the vocabulary": (
        _column("tokens", lambda v: [*v[:-1], 58]), "shard-00000.parquet, row 1: tokens holds 58; allowed: 0 to 57",
    ),
    "a negative token": (_column("tokens", lambda v: [-5, *v[1:]]), "tokens holds -5"),
    "few tokens": (_column("tokens", lambda v: v[:3]), "tokens has 3 values; there are 16 slots"),
    "a prompt beyond the vocabulary": (_column("prompt_ids", lambda v: [10**6, *v]), "prompt_ids holds 1000000"),
    "an empty prompt": (_column("prompt_ids", lambda v: []), "row 1: prompt_ids is empty"),
    "an answer beyond the vocabulary": (_column("answer_ids", lambda v: [99]), "answer_ids holds 99"),
    "an answer that is too long": (_column("answer_ids", lambda v: [3] * 17), "answer_ids has more than 16"),
    "nothing decoded": (_column("decoded", lambda v: 0), "row 1: decoded must be between 1 and 16"),
    "too much decoded": (_column("decoded", lambda v: 17), "decoded must be between 1 and 16"),
    "nothing revealed": (_column("step", lambda v: [-1] * 16), "step has no 0"),
    "no first step": (_column("step", lambda v: [5] * 16), "step has no 0"),
    "a step too late": (_column("step", lambda v: [*v[:-1], 30000]), "step holds 30000; allowed: -1 to 15"),
    "few steps": (_column("step", lambda v: v[:-1]), "step has 15 values"),
    "few confidences": (_column("confidence", lambda v: v[:-1]), "confidence has 15 values"),
    "null tokens": (_column("tokens", lambda v: None), "row 1: tokens is null"),
    "null among tokens": (_column("tokens", lambda v: [None, *v[1:]]), "tokens has lists that hold null"),
    "no tokens": (_column("tokens", None), "has no column tokens"),
    "no reasons": (_column("screened", None), "has no column screened"),
    "no prompts": (_column("prompt_ids", None), "has no column prompt_ids"),
    "hidden rows of another name": (_hidden("x"), "has no tensor hidden"),
    "hidden rows of another width": (_hidden(shape=(5, 16, 7)), "hidden is BF16 [5, 16, 7]; it must be BF16 [5, 16, 32]"),
    "few hidden rows": (_hidden(shape=(0, 16, 32)), "hidden is BF16 [0, 16, 32]"),
    "hidden rows of whole numbers": (_hidden(dtype=torch.int64), "hidden is I64"),
    "no shards": (_manifest(lambda m: {"shards": []}), "manifest.json has shards []"),
    "a shard twice": (_manifest(lambda m: {"shards": m["shards"][:1] * 2}), "each is named once"),
    "text for hidden": (_manifest(lambda m: {"hidden": "no"}), "hidden true or false"),
    "canvases": (_manifest(lambda m: {"schema": {"canvas": "", "left": ""}}), "are of another kind of model"),
    "decode that is a list": (_manifest(lambda m: {"request": {**m["request"], "decode": [1]}}), "request.decode must be an object"),
}  # fmt: skip


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_values_that_no_teacher_made_are_refused_before_any_work(tmp_path_factory, tmp_path, capsys, name):
    """Of a folder whose checksums are right: one line, with file and row."""
    edit, wanted = IMPOSSIBLE[name]
    done = mini.finished(tmp_path_factory)
    theirs = tmp_path / "theirs"
    shutil.copytree(done.out / "trajectories", theirs)
    edit(theirs)
    assert cli.main(["verify", str(theirs), "--seal"]) == 0
    values = mini.values() | {"model": str(done.recipe.parent / "teacher"), "trajectories": "theirs"}
    del values["collect"], values["data"]["prompts"]
    values["data"]["test"] = str(done.recipe.parent / "test.jsonl")
    (tmp_path / "again.yaml").write_text(yaml.safe_dump(values))
    capsys.readouterr()
    assert cli.main(["train", str(tmp_path / "again.yaml"), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("cdlm: error: ") and said.count("\n") == 1 and wanted in said and "theirs" in said
    assert not (tmp_path / "out").exists()


def test_collect_has_nothing_to_do_where_trajectories_are_named(recipe, capsys):
    assert cli.main(["collect", str(recipe), "--out", "out"]) == 2
    assert "this recipe has no collect stage; it has train, evaluate, export" in capsys.readouterr().err


BROKEN = {
    "a flat trajectory": ("d3llm", {"prompt_ids": [5], "trajectory": [1, 2]}, "row 1"),
    "a state that is null": ("d3llm", {"prompt_ids": [5], "trajectory": [[5, 1], None]}, "row 1"),
    "a state that is a number": ("tad", {"question": "copy:a", "trajectory": {"step0": 5}}, "row 1"),
    "prompt ids in a list": ("d3llm", {"prompt_ids": [[5]], "trajectory": [[[5], 1]]}, "row 1"),
    "text for ids": ("d3llm", {"prompt_ids": ["a"], "trajectory": [["a", 1]]}, "row 1: .*token ids"),
    "a huge id": ("d3llm", {"prompt_ids": [2**70], "trajectory": [[2**70, 1]]}, "row 1: .*token ids"),
    "parts of tokens": ("d3llm", {"prompt_ids": [5], "trajectory": [[5, 9.7, 1], [5, 9.7, 3]]}, "row 1: a state holds something else"),
    "a prompt of parts": ("d3llm", {"prompt_ids": [5.9], "trajectory": [[5.9, 1]]}, "row 1: the prompt holds something else"),
    "right by a number": ("d3llm", {"prompt_ids": [5], "trajectory": [[5, 1]], "is_correct": 0}, "is_correct 0; it must be true, false"),
    "text that is not known": ("tad", {"prompt": "你好", "trajectory": {"step0": [1]}}, "row 1: the tokenizer does not know '你好'"),
    "a step without a number": ("tad", {"prompt": "a", "trajectory": {"step0": [1], "00": [1]}}, "named step0, step1"),
}


@pytest.mark.parametrize("form, row, said", BROKEN.values(), ids=BROKEN)
def test_a_broken_row_is_one_error_that_names_it(made, tmp_path, form, row, said):
    with pytest.raises(ValueError, match=said):
        bring(made, jsonl(tmp_path / "x.jsonl", [row]), tmp_path / "out", format=form)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*.partial"))


def test_an_import_leaves_what_is_not_its_own(made, tmp_path):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "mine").write_text("kept")
    bring(made, jsonl(tmp_path / "x.jsonl", [made[2].d3llm(row) for row in range(40)]), tmp_path / "out")
    assert (tmp_path / "out.partial" / "mine").read_text() == "kept"
