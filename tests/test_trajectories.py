"""Contract 7, screening, and the files."""

import json
import tracemalloc

import pytest
import torch
from conftest import random_model

from cdlm import data, trajectories
from cdlm.decode import DecodeConfig, decode
from cdlm.trajectories import Screen, Trajectories, replay, state

BUDGET, BLOCK = 12, 4


def examples(count: int = 5) -> list[data.Example]:
    draw = torch.Generator().manual_seed(1)
    rows = []
    for i in range(count):
        prompt = torch.randint(3, 57, (3 + i,), generator=draw).tolist()
        rows.append(data.Example(i, "even" if i % 2 == 0 else "odd", "", "", prompt, [7, 8, 9]))
    return rows


def collect(folder, model=None, *, screen=None, shard_size=4, stop=False, **changes):
    values = {
        "config": DecodeConfig(BUDGET, BLOCK, tokens_per_step=1, stop_at_eos=stop), "temperatures": [0.0, 0.5], "batch_size": 3,
        "shard_size": shard_size, "seed": 0, "screen": screen or Screen(drop=False),
        "right": lambda example, ids: ids == example.answer_ids, "request": {"who": "test"}, "say": lambda text: None,
    }
    return trajectories.collect(model or random_model(), examples(), folder, **{**values, **changes})


def test_replay_gives_every_state_of_the_teacher(tmp_path):
    """Each state is the one the decoder had, seen by a callback of a separate decoding; the last is the teacher's output."""
    model = random_model()
    collect(tmp_path, model)
    stored = Trajectories(tmp_path)
    for i in range(5):  # temperature 0.0 comes first
        prompt = torch.tensor([stored[i].prompt_ids])
        seen = [torch.full((BUDGET,), 1)]

        def watch(step, seen=seen):
            now = seen[-1].clone()
            now[int(step.first_slot_A[0]) : int(step.first_slot_A[0]) + BLOCK] = step.ids_AS[0]
            seen.append(now)

        asked = DecodeConfig(BUDGET, BLOCK, tokens_per_step=1, block_causal=False, use_cache=False, stop_at_eos=False)
        out = decode(model, prompt, torch.ones_like(prompt, dtype=torch.bool), asked, callback=watch)
        states = list(replay(stored[i], 1))
        assert len(states) == BUDGET + 1 and all(torch.equal(a, b) for a, b in zip(states, seen, strict=True))
        assert torch.equal(states[-1], out.filled_BM[0])
        assert [int((s == 1).sum()) for s in states] == list(range(BUDGET, -1, -1))


def test_head_of_the_stored_hidden_rows_is_the_teachers_logits(tmp_path):
    """lm_head(hidden) at each slot equals the logits that the teacher, run anew on the state before the reveal, gives there.

    The rows are stored in bf16 (8 bits of mantissa): the hidden rows must agree to 2**-8 of their size, and the most probable
    token of the rebuilt distribution must be the one that was revealed (temperature 0)."""
    model = random_model()
    collect(tmp_path, model)
    stored = Trajectories(tmp_path)
    for i in range(5):
        t = stored[i]
        prompt = torch.tensor([t.prompt_ids])
        for slot in range(BUDGET):
            before = torch.cat([prompt, state(t.tokens, t.step, int(t.step[slot]), 1)[None]], dim=1)
            with torch.no_grad():
                row = model.sequence_hidden(before, torch.ones_like(before, dtype=torch.bool))[0, prompt.shape[1] + slot]
                assert torch.allclose(t.hidden[slot].float(), row, rtol=2**-8, atol=1e-5)
                logits, rebuilt = model.head(row), model.head(t.hidden[slot].float())
            assert float((logits - rebuilt).abs().max()) < 0.02 * float(logits.abs().max())
            assert float(t.confidence[slot]) == pytest.approx(float(logits.softmax(-1)[t.tokens[slot]]), abs=1e-5)
            logits[1] = rebuilt[1] = -torch.inf
            assert int(logits.argmax()) == int(t.tokens[slot])


def test_a_shifted_teacher_stores_the_row_that_produced_the_logits(tmp_path):
    model = random_model(facts={"logit_shift": True})
    collect(tmp_path, model)
    t = Trajectories(tmp_path)[2]
    prompt = torch.tensor([t.prompt_ids])
    before = torch.cat([prompt, state(t.tokens, t.step, int(t.step[3]), 1)[None]], dim=1)
    from cdlm import masks

    valid = torch.ones_like(before, dtype=torch.bool)
    mask = torch.ones(1, 1, before.shape[1], before.shape[1], dtype=torch.bool)
    with torch.no_grad():
        raw = model._rows(before, mask, masks.positions(valid), None)
    assert torch.allclose(t.hidden[3].float(), raw[0, prompt.shape[1] + 3 - 1], rtol=2**-8, atol=1e-5)


def test_one_token_a_step_block_by_block(tmp_path):
    collect(tmp_path)
    for t in Trajectories(tmp_path):
        assert sorted(t.step.tolist()) == list(range(BUDGET))
        assert torch.equal(t.step.reshape(-1, BLOCK) // BLOCK, torch.arange(BUDGET // BLOCK)[:, None].expand(-1, BLOCK))


def test_files_are_what_the_module_says(tmp_path):
    manifest = collect(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        ["SHA256SUMS", "collection.json", "manifest.json",
         *(f"shard-0000{i}{s}" for i in range(3) for s in (".parquet", ".safetensors", ".sha256"))]
    )
    assert manifest == json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["trajectories"] == 10 and manifest["format_version"] == 1 and manifest["decoded_slots"] == 10 * BUDGET
    stored = Trajectories(tmp_path)
    assert [t.id for t in stored] == list(range(10))
    assert [t.temperature for t in stored] == [0.0] * 5 + [0.5] * 5
    assert stored[0].hidden.dtype == torch.bfloat16 and stored[0].hidden.shape == (BUDGET, 32)
    assert trajectories.hidden_bytes(15_000, 256, 3584) / 2**30 == pytest.approx(25.6, abs=0.05)  # the paper, Dream
    assert trajectories.hidden_bytes(15_000, 256, 4096) / 2**30 == pytest.approx(29.3, abs=0.05)  # the paper, LLaDA


def test_datasets_reads_the_shards(tmp_path):
    datasets = pytest.importorskip("datasets")
    collect(tmp_path)
    table = datasets.load_dataset("parquet", data_files=str(tmp_path / "*.parquet"), split="train", cache_dir=str(tmp_path / "cache"))
    assert len(table) == 10 and set(table.column_names) == set(trajectories.SCHEMA)
    assert list(table[3]["tokens"]) == Trajectories(tmp_path)[3].tokens.tolist()


def test_the_same_files_whatever_was_there_before(tmp_path):
    """A run that finds some shards ends with the same bytes as one that finds none."""
    collect(tmp_path / "whole")
    collect(tmp_path / "part")
    for name in ("shard-00001.parquet", "shard-00002.safetensors", "shard-00002.parquet", "manifest.json"):
        (tmp_path / "part" / name).unlink()
    (tmp_path / "part" / "shard-00001.safetensors.partial").write_bytes(b"half")
    collect(tmp_path / "part")
    for file in (tmp_path / "whole").iterdir():
        assert file.read_bytes() == (tmp_path / "part" / file.name).read_bytes(), file.name


def test_another_request_is_refused_and_nothing_is_lost(tmp_path):
    collect(tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="who: 'test' there, 'other' now"):
        collect(tmp_path, request={"who": "other"})
    assert before == {p.name: p.read_bytes() for p in tmp_path.iterdir()}


def test_unfinished_or_foreign_folders_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no manifest\.json"):
        Trajectories(tmp_path)
    collect(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "format_version": 9}))
    with pytest.raises(ValueError, match="format version 9; this package reads version 1"):
        Trajectories(tmp_path)
    for key in ("request", "request_hash", "kept", "trajectories", "schema"):
        (tmp_path / "manifest.json").write_text(json.dumps({**manifest, key: None}))
        with pytest.raises(ValueError, match=rf"manifest\.json has {key} None; it is damaged"):
            Trajectories(tmp_path)


def test_screening_reasons():
    screen = Screen(ngram=2, repeats=2, correct_only=True)
    assert screen.reason([5, 6, 7], "length", True) == "no_eos"
    assert screen.reason([], "eos", False) == "empty"
    assert screen.reason([5, 6, 5, 6, 5, 6], "eos", False) == "repeated_ngram"  # (5, 6) stands three times, two are allowed
    assert screen.reason([5, 6, 5, 6, 7], "eos", False) == "wrong_answer"
    assert screen.reason([5, 6], "eos", True) == ""
    assert Screen(ngram=2, repeats=2).reason([5, 6, 5, 6, 7], "eos", False) == ""  # the correctness filter is off by default


def test_dropped_trajectories_are_counted_and_kept_on_disk(tmp_path):
    """A random teacher hardly ever ends: what is dropped is counted by reason, and can still be read."""
    manifest = collect(tmp_path, screen=Screen(drop=True))
    assert manifest["screened"].get("no_eos", 0) > 0
    assert manifest["kept"] == 10 - sum(manifest["screened"].values())
    assert len(Trajectories(tmp_path)) == manifest["kept"]
    assert len(Trajectories(tmp_path, screened=True)) == 10


def test_stopping_at_the_end_token_leaves_the_rest_unrevealed(tmp_path):
    model = random_model()
    with torch.no_grad():
        model.head.weight[2] += 0.5 * model.head.weight[7:20].sum(dim=0)
    collect(tmp_path, model, stop=True)
    stopped = [t for t in Trajectories(tmp_path) if t.decoded < BUDGET]
    assert stopped
    for t in stopped:
        assert t.stop == "eos" and t.decoded % BLOCK == 0
        assert bool((t.step[t.decoded :] == -1).all()) and bool((t.tokens[t.decoded :] == 1).all())
        assert float(t.hidden[t.decoded :].abs().sum()) == 0
        assert len(list(replay(t, 1))) == t.decoded + 1


ZERO = {"block_origin": "zero", "prompt_attention": "block_causal", "block_length": 2}


@pytest.mark.parametrize("stop", [False, True])
def test_a_block_diffusion_teacher_decodes_as_one_and_fills_the_students_blocks(tmp_path, stop):
    """A teacher with blocks of 2 from position 0, students with blocks of 4: what is stored is a decoding of the teacher's own, without its
    cache, to the end of the student's last block; prompts of 3 to 7 tokens give the student's first block 1, 4, 3, 2 and 1 slots."""
    model = random_model(facts=ZERO)
    with torch.no_grad():
        model.head.weight[2] += 0.35 * model.head.weight[7:15].sum(dim=0)
    collect(tmp_path, model, stop=stop)
    stored = Trajectories(tmp_path)
    seen = set()
    for i in range(5):
        t = stored[i]
        prompt, room = torch.tensor([t.prompt_ids]), {3: 1, 4: 4, 5: 3, 6: 2, 7: 1}[len(t.prompt_ids)]
        assert t.tokens.shape == (BUDGET + BLOCK - 1,)
        last = room + 12 if room < 4 else 12  # as many whole blocks as hold 12 slots
        assert t.decoded == last if not stop else (t.decoded - room) % BLOCK == 0
        asked = DecodeConfig(20, 2, tokens_per_step=1, use_cache=False, stop_at_eos=False)
        out = decode(model, prompt, torch.ones_like(prompt, dtype=torch.bool), asked)
        assert torch.equal(out.filled_BM[0, : t.decoded], t.tokens[: t.decoded])
        assert sorted(t.step[: t.decoded].tolist()) == list(range(t.decoded)) and set(t.step[t.decoded :].tolist()) <= {-1}
        assert bool((t.tokens[t.decoded :] == 1).all()) and not bool(t.hidden[t.decoded :].any())
        if stop and t.decoded < last:
            ends = [s for s, token in enumerate(t.tokens.tolist()) if token == 2]
            assert t.decoded - BLOCK <= ends[0] < t.decoded
            seen.add("stopped")
    assert seen == ({"stopped"} if stop else set())


def test_a_students_block_is_made_of_the_teachers_whole_blocks(tmp_path):
    with pytest.raises(ValueError, match=r"decode\.block_length is 4; the teacher decodes in blocks of 3"):
        collect(tmp_path, random_model(facts={**ZERO, "block_length": 3}))
    assert not list(tmp_path.iterdir())


def test_an_end_token_behind_the_budget_is_none(tmp_path, monkeypatch):
    """Budget 12, prompts in blocks of 4: the last block may end with slot 14, but slots 12 to 14 are no part of the answer."""

    def with_a_late_end(*args, **kwargs):
        out = decode(*args, **kwargs)
        out.filled_BM[:, :12] = 7
        out.filled_BM[:, 12:14] = 2
        return out

    monkeypatch.setattr(trajectories, "decode", with_a_late_end)
    collect(tmp_path, random_model(facts={**ZERO, "block_length": 4}))
    stored = list(Trajectories(tmp_path, screened=True))
    assert {t.stop for t in stored} == {"length"} and {t.screened for t in stored} == {"no_eos"}
    assert any(2 in t.tokens.tolist() for t in stored), "the end token is there, behind the budget"


def test_rows_are_held_in_columns(tmp_path):
    """60 rows of 4,096 values in three columns take at most twice their 4 bytes a value; as Python's integers it would be ten times."""
    import pyarrow as pa

    (tmp_path / "collection.json").write_text("{}")
    slots = list(range(1000, 1000 + 4096))
    row = {
        "example": 0, "group": "a", "temperature": 0.0, "seed": 0, "prompt_ids": [1], "answer_ids": [2], "tokens": slots, "step": slots,
        "confidence": [0.5] * 4096, "decoded": 4096, "stop": "eos", "screened": "",
    }  # fmt: skip
    rows = [{"id": number, **row} for number in range(60)]
    trajectories.write_shard(tmp_path, "shard-00000", rows, None)
    trajectories.write_manifest(tmp_path, ["shard-00000"], {}, trajectories.Screen(), hidden=False)
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    stored = Trajectories(tmp_path)
    python, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(stored) == 60 and stored[59].id == 59 and stored[-1].tokens.tolist() == slots
    assert python + pa.total_allocated_bytes() - before < 2 * 4 * 3 * 4096 * 60
    with pytest.raises(IndexError, match="row 60 of 60"):
        stored[60]


def test_a_model_is_hashed_again_only_when_a_file_of_it_is_another(tmp_path, monkeypatch):
    read = []
    real = trajectories.folder_hash
    monkeypatch.setattr(trajectories, "folder_hash", lambda folder: read.append(folder) or real(folder))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("of no account")
    hashes = trajectories.Hashes()
    first = hashes.of(tmp_path)
    assert first == real(tmp_path) == hashes.of(tmp_path) and len(read) == 1
    (tmp_path / "notes.txt").write_text("changed")
    assert hashes.of(tmp_path) == first and len(read) == 1
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    second = hashes.of(tmp_path)
    (tmp_path / "other").write_bytes(b"weighed")
    (tmp_path / "other").replace(tmp_path / "model.safetensors")  # the same size, and perhaps the same time
    assert len({first, second, hashes.of(tmp_path)}) == 3 and len(read) == 3
    assert hashes.of("user/name") == "user/name"


def test_hidden_rows_are_read_one_trajectory_at_a_time(tmp_path, monkeypatch):
    """Never the tensor of a shard."""
    collect(tmp_path)
    stored, asked = Trajectories(tmp_path), []
    opened = stored.stored(0)

    class OnlySlices:
        def get_slice(self, name):
            asked.append(name)
            return opened.get_slice(name)

    monkeypatch.setattr(stored, "stored", lambda shard: OnlySlices())
    assert stored[1].hidden.shape == (BUDGET, 32) and asked == ["hidden"]
