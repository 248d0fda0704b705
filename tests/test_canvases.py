"""States of canvases: stored and replayed as the teacher was in them, drawn in pairs, and what is trained on them."""

import copy
from dataclasses import replace

import dgemma
import pytest
import torch
from conftest import ROOT

from cdlm import canvases, cli, data, losses, trajectories
from cdlm.decode import DecodeConfig, decode
from cdlm.families.base import Seen
from cdlm.trainer import CanvasNoise, CanvasStates, CDLMConfig, CDLMTrainer, Collator, canvas_losses, uniform_losses

CANVAS, BUDGET, VOCAB, STEPS = 8, 16, 128, 5


def config(**changes) -> DecodeConfig:
    values = {"entropy_bound": 2.0, "max_denoising_steps": STEPS, "t_min": 0.4, "t_max": 0.8, "stability_threshold": 1,
              "entropy_threshold": 0.005, "stop_at_eos": False}  # fmt: skip
    return DecodeConfig(BUDGET, CANVAS, order="entropy", **{**values, **changes})


def examples(count: int = 5) -> list[data.Example]:
    draw = torch.Generator().manual_seed(1)
    tokens = [torch.randint(3, VOCAB, (n,), generator=draw).tolist() for i in range(count) for n in (4 + i, 3 + 2 * i)]
    return [data.Example(i, "all", "p", "a", tokens[2 * i], tokens[2 * i + 1]) for i in range(count)]


def collect(folder, model=None, *, top_k=VOCAB, shard_size=2, number=5, **changes):
    return canvases.collect(
        model or dgemma.random_model(), examples(number), folder, config=config(**changes), top_k=top_k, batch_size=2,
        shard_size=shard_size, seed=3, screen=trajectories.Screen(drop=False), right=lambda example, ids: True, request={"a": 1},
        say=lambda line: None,
    )


def by_hand(model, example: data.Example, *, top_k: int = VOCAB, seed: int = 0, steps: tuple[int, ...] = (3, 4)):
    """A trajectory without the decoder: random canvases and random acceptances, and what the model says to them, told what it said last."""
    draw = torch.Generator().manual_seed(seed)
    temperatures = torch.rand(sum(steps), generator=draw) + 0.5
    canvas, accepted, argmax, tokens, kept = [], [], [], [], []
    prompt, at = list(example.prompt_ids), 0
    for count in steps:
        seen = None
        for _ in range(count):
            ids = torch.randint(3, VOCAB, (1, CANVAS), generator=draw)
            with torch.no_grad():
                before = torch.tensor([prompt])
                logits = model.head(model.answer_hidden(before, torch.ones_like(before, dtype=torch.bool), ids, CANVAS, seen))
            value, chosen = logits.topk(top_k, dim=-1)
            rounded = value.to(torch.float16)
            kept.append((rounded, chosen.int(), logits.scatter(2, chosen, rounded.float()).logsumexp(-1)))
            seen = Seen(kept[-1][0].float() / temperatures[at], chosen)
            canvas.append(ids)
            accepted.append(torch.rand(1, CANVAS, generator=draw) < 0.4)
            argmax.append(logits.argmax(-1))
            at += 1
        tokens.append(argmax[-1][0])
        prompt += tokens[-1].tolist()
    logits, ids, total = (torch.cat(part) for part in zip(*kept, strict=True))
    return canvases.CanvasTrajectory(
        0, example.index, "all", 0, example.prompt_ids, example.answer_ids, torch.cat(tokens), list(steps),
        torch.tensor([n - i for n in steps for i in range(n)]), temperatures, torch.cat(canvas), torch.cat(accepted), torch.cat(argmax),
        sum(CANVAS for _ in steps), "length", "", logits, ids, total,
    )


def trainer(tmp_path, model, dataset, **values) -> CDLMTrainer:
    args = CDLMConfig(
        output_dir=str(tmp_path), block_length=CANVAS, use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False,
        per_device_train_batch_size=2, save_strategy="no", logging_steps=1, learning_rate=1e-3, warmup_steps=0,
        **{"max_steps": 2, **values},
    )
    return CDLMTrainer(model, args, dataset, Collator(model, BUDGET, CANVAS))


def test_an_engine_that_shards_layers_is_refused(tmp_path, monkeypatch):
    """Encoder and decoder share layers, each of which would be a unit of its own."""
    model = dgemma.random_model()
    collect(tmp_path / "c", model)
    dataset = CanvasStates(canvases.load(tmp_path / "c"), model, BUDGET, CANVAS, 0)
    assert dataset[3]["index"] == 3 and dataset.name(3) == "trajectory 3"  # what an error of a loss names
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match=r"asked for FSDP, which it does not run on this device \(cpu\); take DDP"):
        trainer(tmp_path, model, dataset)
    monkeypatch.setattr(CDLMTrainer, "engine", "fsdp")
    with pytest.raises(ValueError, match=r"asked for FSDP, which shards layers; .* take DDP"):
        trainer(tmp_path, model, dataset)


# ---- stored and replayed -------------------------------------------------------------------------------------------------


def test_replay_gives_every_state_of_the_teacher(tmp_path):
    """What a callback of the same decoding saw: canvas, accepted set, argmax canvas, temperature and what self-conditioning was told."""
    model, seen = dgemma.random_model(), {}
    collect(tmp_path, model)
    stored = canvases.load(tmp_path)
    assert isinstance(stored, canvases.Canvases) and len(stored) == 5
    for number, example in enumerate(examples()):
        seen.clear()
        prompt = torch.tensor([example.prompt_ids])
        out = decode(
            model, prompt, torch.ones_like(prompt, dtype=torch.bool), config(), seeds=[data.sample_seed(3, number)],
            callback=lambda step: seen.setdefault(step.block, []).append(step),
        )
        row = stored[number]
        assert row.tokens.tolist() == out.filled_BM[0].tolist() and row.steps == [len(seen[block]) for block in sorted(seen)]
        for canvas, steps in enumerate(seen[block] for block in sorted(seen)):
            for i, step in enumerate(steps):
                state, after = row.state(canvas, i), row.state(canvas, i + 1)
                assert torch.equal(state.canvas_S, step.before_AS[0]) and state.left == STEPS - i
                last = i + 1 == len(steps)
                assert torch.equal(after.open_S, torch.zeros(CANVAS, dtype=torch.bool) if last else ~step.reveal_AS[0])
                assert torch.equal(after.argmax_S, step.output_AS[0])
                told = torch.zeros(CANVAS, VOCAB).scatter(1, after.seen_ids_SK, after.seen_SK)
                torch.testing.assert_close(told, step.seen.logits_BSK[0], atol=0.02, rtol=1e-3)
            first = row.state(canvas, 0)
            assert first.seen_SK is None and bool(first.open_S.all())


def test_stored_logits_are_the_models_before_the_temperature(tmp_path):
    """head(hidden) of a state, told what it was told; the k largest, and the logsumexp of all."""
    model = dgemma.random_model()
    collect(tmp_path, model, top_k=10, number=1, shard_size=1)
    row = canvases.load(tmp_path)[0]
    for canvas in range(2):
        prompt = torch.tensor([[*row.prompt_ids, *row.tokens[: canvas * CANVAS].tolist()]])
        state, at = row.state(canvas, 0), row.first(canvas)
        with torch.no_grad():
            rows = model.answer_hidden(prompt, torch.ones_like(prompt, dtype=torch.bool), state.canvas_S[None], CANVAS)
        value, ids = model.head(rows)[0].topk(10, dim=-1)
        assert row.ids[at].tolist() == ids.tolist()
        torch.testing.assert_close(row.logits[at].float(), value, atol=0.01, rtol=1e-3)
        torch.testing.assert_close(row.total[at], model.head(rows)[0].logsumexp(-1), atol=0.01, rtol=0)


def test_the_same_files_whatever_was_there_before(tmp_path):
    """A killed run's folder ends as an unbroken one does, byte for byte."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        collect(folder)
    for name in ("shard-00001.parquet", "manifest.json"):
        (broken / name).unlink()
    (broken / "shard-00002.safetensors").unlink()
    collect(broken)
    files = sorted(file.name for file in whole.iterdir())
    assert files == sorted(file.name for file in broken.iterdir()) and len(files) >= 8
    for name in files:
        assert (whole / name).read_bytes() == (broken / name).read_bytes(), name


def test_a_row_does_not_depend_on_its_batch_or_shard(tmp_path):
    collect(tmp_path / "a")
    collect(tmp_path / "b", shard_size=5)
    a, b = canvases.load(tmp_path / "a"), canvases.load(tmp_path / "b")
    for i in range(5):
        assert torch.equal(a[i].canvas, b[i].canvas) and torch.equal(a[i].logits, b[i].logits) and a[i].steps == b[i].steps


def test_bytes_of_a_step():
    """256 slots of 64 values of 2 bytes, 64 ids of 4 and a total of 4: 256 x (128 + 256 + 4)."""
    assert canvases.step_bytes(256, 64) == 256 * 388


# ---- pairs of states -----------------------------------------------------------------------------------------------------


def test_pairs_are_states_of_one_canvas_and_targets_the_step_that_led_to_the_later_one():
    model, example = dgemma.random_model(), examples()[4]
    row = by_hand(model, example)
    dataset = CanvasStates([row], model, BUDGET, CANVAS, seed=0)
    found, told = set(), {True: 0, False: 0}
    for epoch in range(200):
        dataset.set_epoch(epoch)
        item = dataset[0]
        canvas = (len(item["prompt_ids"]) - len(example.prompt_ids)) // CANVAS
        assert item["prompt_ids"] == [*example.prompt_ids, *row.tokens[: canvas * CANVAS].tolist()]
        start = next(s for s in range(row.steps[canvas]) if torch.equal(row.state(canvas, s).canvas_S, item["y"]))
        later = next(s for s in range(1, row.steps[canvas] + 1) if torch.equal(item["target_total"], row.total[row.first(canvas) + s - 1]))
        assert later > start and torch.equal(item["open"], row.state(canvas, start).open_S)
        assert torch.equal(item["open_star"], row.state(canvas, later).open_S)
        assert torch.equal(item["seen_star"], row.state(canvas, later).seen_SK)
        if start:
            told[bool(item["told"])] += 1
        else:
            assert not bool(item["told"]), "nothing is seen before a canvas's first step"
        found.add((canvas, start, later))
    every = {(c, a, b) for c, n in enumerate(row.steps) for a in range(n) for b in range(a + 1, n + 1)}
    assert found == every, "the rarest of the 16 pairs has the probability 1/48 and is missed by 200 draws with (47/48)**200 = 1.5 %"
    assert min(told.values()) > 30


@pytest.mark.parametrize(("chance", "ends"), [(1.0, {True}), (0.0, {True, False})])
def test_finish_is_the_probability_of_the_finished_canvas(chance, ends):
    model = dgemma.random_model()
    dataset = CanvasStates([by_hand(model, examples()[1], steps=(6,))], model, BUDGET, CANVAS, seed=0, finish=chance)
    finished = []
    for epoch in range(60):
        dataset.set_epoch(epoch)
        finished.append(not bool(dataset[0]["open_star"].any()))
    assert set(finished) == ends
    if chance == 0.0:
        assert sum(finished) / 60 < 0.5, "only from the last state, one of six, is there no state between"


def test_the_reference_canvas_stands_behind_the_reference():
    """11 answer tokens and the end token: two canvases of 8, filled up with end tokens. An answer that was cut has no canvas behind it."""
    model, example = dgemma.random_model(), examples()[4]
    assert len(example.answer_ids) == 11
    row = by_hand(model, example)
    seen = set()
    for epoch in range(40):
        dataset = CanvasStates([row, replace(row, answer_ids=list(range(3, 3 + BUDGET)))], model, BUDGET, CANVAS, seed=0)
        dataset.set_epoch(epoch)
        item = dataset[0]
        at = len(item["reference_prompt_ids"]) - len(example.prompt_ids)
        filled = example.answer_ids + [2] * (BUDGET - 11)
        assert item["reference_prompt_ids"] == [*example.prompt_ids, *filled[:at]] and item["answer"].tolist() == filled[at : at + CANVAS]
        seen.add(at)
        cut = dataset[1]
        assert len(cut["reference_prompt_ids"]) - len(example.prompt_ids) <= BUDGET - CANVAS and 2 not in cut["answer"].tolist()
    assert seen == {0, CANVAS}


# ---- what is trained -----------------------------------------------------------------------------------------------------


def kl(target: torch.Tensor, logits: torch.Tensor) -> float:
    return float((target.softmax(-1) * (target.log_softmax(-1) - logits.log_softmax(-1))).sum())


def test_the_losses_are_those_of_the_states(tmp_path):
    """Equations 4, 5 and 6 of a step, by a loop over rows and slots."""
    teacher, model = dgemma.random_model(), dgemma.random_model(seed=1)
    rows = [by_hand(teacher, example, seed=i) for i, example in enumerate(examples(4))]
    dataset = CanvasStates(rows, model, BUDGET, CANVAS, seed=0, finish=0.0)
    dataset.set_epoch(3)
    t = trainer(tmp_path, model, dataset)
    items = [dataset[i] for i in range(4)]
    assert any(bool(item["told"]) for item in items) and any(not bool(item["told"]) for item in items)
    found = canvas_losses(t, t.data_collator(items))
    distill, consistent, restore = 0.0, 0.0, 0.0
    for item in items:
        def logits(prompt_ids, canvas, seen=None):
            prompt = torch.tensor([prompt_ids])
            with torch.no_grad():
                return model.head(model.answer_hidden(prompt, torch.ones_like(prompt, dtype=torch.bool), canvas[None], CANVAS, seen))[0]

        told = Seen(item["seen"][None], item["seen_ids"][None]) if item["told"] else None
        here = logits(item["prompt_ids"], item["y"], told)
        later = logits(item["prompt_ids"], item["y_star"], Seen(item["seen_star"][None], item["seen_star_ids"][None]))
        target = torch.zeros(CANVAS, VOCAB).scatter(1, item["target_ids"], item["target"].float())
        u = [i for i in range(CANVAS) if item["open"][i] and not item["open_star"][i]]
        s = [i for i in range(CANVAS) if item["open"][i] and item["open_star"][i]]
        distill += sum(kl(target[i], here[i]) for i in u) / max(1, len(u)) / 4
        consistent += sum(kl(later[i], here[i]) for i in s) / max(1, len(s)) / 4
        level = 0.02 + 0.98 * float(item["level"])
        noisy = item["answer"].clone()
        for i in range(CANVAS):
            if float(item["uniform"][i]) < level:
                noisy[i] = int(float(item["token"][i]) * VOCAB)
        log_p = logits(item["reference_prompt_ids"], noisy).log_softmax(-1)
        restore -= sum(float(log_p[i, item["answer"][i]]) for i in range(CANVAS)) / CANVAS / 4
    assert found["distill"].item() == pytest.approx(distill, rel=1e-3) and distill > 0.01
    assert found["consistency"].item() == pytest.approx(consistent, rel=1e-3) and consistent > 0.01
    assert found["dlm"].item() == pytest.approx(restore, rel=1e-3)


def test_a_student_that_is_the_teacher_has_nothing_to_distill(tmp_path):
    """At the state of a step, told what the teacher was told, towards that step's own logits: the loss is what float16 rounds, and so is
    the gradient. Told nothing where the teacher was told something, it is not."""
    model = dgemma.random_model()
    row = by_hand(model, examples()[2], steps=(4,))
    dataset = CanvasStates([row], model, BUDGET, CANVAS, seed=0)
    item = dataset[0]
    y, y_star = row.state(0, 2), row.state(0, 3)
    item |= {"y": y.canvas_S, "open": torch.ones(CANVAS, dtype=torch.bool), "open_star": torch.zeros(CANVAS, dtype=torch.bool),
             "seen": y.seen_SK, "seen_ids": y.seen_ids_SK, "told": torch.tensor(True), "prompt_ids": list(row.prompt_ids),
             "y_star": y_star.canvas_S, "target": row.logits[2], "target_ids": row.ids[2].long(), "target_total": row.total[2]}  # fmt: skip
    t = trainer(tmp_path, model, dataset, consistency_weight=0.0, dlm_weight=0.0)
    found = canvas_losses(t, t.data_collator([item, item]))["distill"]
    found.backward()
    steepest = max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
    assert abs(found.item()) < 1e-4 and steepest < 0.05
    untold = canvas_losses(t, t.data_collator([{**item, "told": torch.tensor(False)}] * 2))["distill"]
    assert untold.item() > 1.0


@pytest.mark.parametrize("share", [0.5, 0.0])
def test_uniforms_losses_by_a_loop(tmp_path, share):
    """Each row alone, through the family's two other calls: the canvas behind its clean prefix, told what a first look saw; the encoder's
    next token over the answer and its end."""
    model = dgemma.random_model()
    dataset = CanvasNoise(examples(6), BUDGET, seed=0)
    t = trainer(tmp_path, model, dataset, objective="uniform", self_conditioning=share)
    items = [dataset[i] for i in range(6)]
    found = uniform_losses(t, t.data_collator(items))
    diffusion, ar, canvases_seen, told_seen = 0.0, 0.0, set(), set()
    for item in items:
        answer = data.fill_budget(item["answer_ids"], BUDGET, 2)
        length = len(item["answer_ids"]) + 1
        at = min(int(float(item["canvas"]) * -(-length // CANVAS)), -(-length // CANVAS) - 1) * CANVAS
        clean, noisy = torch.tensor(answer[at : at + CANVAS]), torch.tensor(answer[at : at + CANVAS])
        for i in range(CANVAS):
            if float(item["uniform"][i]) < 0.02 + 0.98 * float(item["level"]):
                noisy[i] = int(float(item["token"][i]) * VOCAB)
        prompt = torch.tensor([[*item["prompt_ids"], *answer[:at]]])
        valid = torch.ones_like(prompt, dtype=torch.bool)
        with torch.no_grad():
            rows = model.answer_hidden(prompt, valid, noisy[None], CANVAS)
            if told := float(item["told"]) < share:
                rows = model.answer_hidden(prompt, valid, noisy[None], CANVAS, Seen(model.head(rows)))
            log_p = model.head(rows)[0].log_softmax(-1)
            text = torch.tensor([[*item["prompt_ids"], *answer[:length]]])
            next_p = model.head(model.clean_hidden(text, torch.ones_like(text, dtype=torch.bool)))[0].log_softmax(-1)
        diffusion -= sum(float(log_p[i, clean[i]]) for i in range(CANVAS)) / CANVAS / 6
        first = len(item["prompt_ids"])
        ar -= sum(float(next_p[first + i, answer[i]]) for i in range(length)) / length / 6
        canvases_seen.add(at)
        told_seen.add(told)
    assert found["diffusion"].item() == pytest.approx(diffusion, rel=1e-3)
    assert found["ar"].item() == pytest.approx(ar, rel=1e-3)
    assert canvases_seen == {0, CANVAS} and told_seen == {share > 0, False}


def test_training_moves_the_model_and_logs_each_loss_with_its_weight(tmp_path):
    model = dgemma.random_model()
    before = copy.deepcopy(model.hf.state_dict())
    t = trainer(tmp_path, model, CanvasNoise(examples(4), BUDGET, seed=0), objective="uniform", ar_weight=0.25)
    t.train()
    line = t.state.log_history[0]
    assert line["loss"] == pytest.approx(line["diffusion_loss"] + 0.25 * line["ar_loss"], rel=1e-4) and line["ar_weight"] == 0.25
    after = model.hf.state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert any("self_conditioning" in name for name in moved) and not any("vision" in name for name in moved)
    assert torch.equal(after["model.encoder.language_model.layers.0.self_attn.q_proj.weight"],
                       after["model.decoder.layers.0.self_attn.q_proj.weight"])  # fmt: skip


def test_logits_of_a_canvas_are_never_whole(tmp_path, monkeypatch):
    """With room for the logits of two slots, the head is asked for at most two at a time, in self-conditioning's look too; the numbers
    stay. (At the real vocabulary: eval/canvas_memory.py.)"""
    model = dgemma.random_model()
    sft, pairs = CanvasNoise(examples(2), BUDGET, seed=0), CanvasStates([by_hand(model, x) for x in examples(2)], model, BUDGET, CANVAS, 0)
    cases = [(uniform_losses, trainer(tmp_path, model, sft, objective="uniform", self_conditioning=1.0)),
             (canvas_losses, trainer(tmp_path, model, pairs))]  # fmt: skip
    batches = [t.data_collator([t.train_dataset[i] for i in range(2)]) for _, t in cases]
    plain = [{name: value.item() for name, value in f(t, b).items()} for (f, t), b in zip(cases, batches, strict=True)]
    asked = []
    model.hf.lm_head.register_forward_hook(lambda module, given, out: asked.append(given[0].shape[:-1].numel()))
    monkeypatch.setattr(losses, "CHUNK_VALUES", 2 * VOCAB)
    monkeypatch.setattr(type(model), "held_logits", 2 * VOCAB)
    for (f, t), batch, before in zip(cases, batches, plain, strict=True):
        found = f(t, batch)
        sum(found.values()).backward()
        assert {name: value.item() for name, value in found.items()} == pytest.approx(before, rel=1e-5)
    assert asked and max(asked) == 2


# ---- the divergence over named tokens --------------------------------------------------------------------------------------


def test_top_k_kl_by_hand():
    """Target (1/2, 1/4, 1/4), student (1/4, 1/4, 1/2), two tokens named: 1/2 ln 2 + 1/4 ln 1 + 1/4 ln (1/4 / 1/2) = 1/4 ln 2."""
    target, student = torch.tensor([[0.5, 0.25, 0.25]]).log() + 3.0, torch.tensor([[0.25, 0.25, 0.5]]).log()
    ids = torch.tensor([[0, 1]])
    found = losses.top_k_kl(target[:, :2], ids, target.logsumexp(-1), student)
    assert found.tolist() == pytest.approx([0.25 * 0.6931472], rel=1e-5)


def test_top_k_kl_is_the_whole_divergence_where_all_are_named_and_no_more_where_not():
    torch.manual_seed(0)
    target, student = torch.randn(20, 12) * 3, torch.randn(20, 12) * 3
    whole = losses.forward_kl(target, student)
    for k in (12, 11, 5, 1):
        value, ids = target.topk(k, dim=-1)
        found = losses.top_k_kl(value, ids, target.logsumexp(-1), student)
        assert bool((found <= whole * (1 + 1e-4) + 1e-4).all()) and bool((found >= -1e-5).all())
        if k == 12:
            torch.testing.assert_close(found, whole)


# ---- from nothing, and with adapters -------------------------------------------------------------------------------------


def test_a_model_from_nothing_is_deterministic_sized_for_its_world_and_copies(tmp_path):
    """Under 4 MB in float16, each weight counted once; scores of attention start near 1, heads as copiers; canvas and ids as stated."""
    from conftest import TINY

    from cdlm.families import scratch

    made = [
        scratch.build(TINY / "scratch-diffusiongemma/config.json", TINY / "tokenizer", init="copying", seed=seed) for seed in (0, 0, 1)
    ]
    assert all(torch.equal(a, b) for a, b in zip(made[0].parameters(), made[1].parameters(), strict=True))
    assert not torch.equal(made[0].hf.lm_head.weight, made[2].hf.lm_head.weight)
    model = made[0]
    facts = model.facts
    assert (facts.mask_token_id, facts.eos_token_ids, facts.pad_token_id, facts.block_length, facts.noise) == (None, (2,), 0, 32, "uniform")
    assert 2 * sum(p.numel() for p in model.parameters()) < 4e6
    layers = model.hf.model.decoder.layers
    assert torch.equal(layers[0].self_attn.o_proj.weight, layers[0].self_attn.v_proj.weight.T)
    shared = layers[1].self_attn  # no value projection, and two query heads to a key-value head
    assert shared.v_proj is None and torch.equal(shared.o_proj.weight[:, :64], shared.k_proj.weight[:64].T)
    assert torch.equal(shared.o_proj.weight[:, 64:128], shared.k_proj.weight[:64].T)
    assert float(layers[0].self_attn.q_norm.weight[0]) == pytest.approx(32**-0.25)
    assert float(model.hf.lm_head.weight.std()) == pytest.approx(128**-0.5, rel=0.05)


def test_adapters_leave_the_vision_tower_alone():
    from cdlm.trainer import add_lora

    model = dgemma.random_model()
    adapted = add_lora(model, rank=2, alpha=2, targets=["q_proj", "up_proj"])
    names = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert names and not any("vision" in name for name in names)
    for part in ("encoder.language_model", "decoder.layers", "decoder.self_conditioning"):
        assert any(part in name for name in names), part


def test_other_models_have_no_canvases():
    from conftest import random_model

    model, ids = random_model(), torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match="no canvases; objective uniform is for models that have"):
        model.text_and_canvas(ids, ids.bool(), torch.tensor([2]), ids, torch.tensor([True]))


def test_objective_uniform_has_no_students_sampler(capsys):
    asked = ["distill", str(ROOT / "recipes" / "tiny-diffusiongemma-teacher.yaml"), "--dry-run"]
    assert cli.main(asked) == 0
    assert cli.main([*asked, "--set", "decode.student_sampler={max_denoising_steps: 4}"]) == 2
    assert "decode.student_sampler is given; objective uniform has no student: leave it out" in capsys.readouterr().err
