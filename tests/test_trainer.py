"""What a step trains, with which weights, and that neither grouping nor a break changes it."""

import copy
from dataclasses import replace

import pytest
import torch
from conftest import random_model
from test_trajectories import BLOCK, BUDGET, collect, examples

from cdlm import data, files, losses
from cdlm.trainer import (
    AnswerNoise,
    CDLMConfig,
    CDLMTrainer,
    Collator,
    LengthGrouped,
    TrajectoryStates,
    add_lora,
    cdlm_losses,
    loop,
)
from cdlm.trajectories import Trajectories


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("trajectories")
    collect(where)
    return where


def trainer(folder, out, model=None, *, peft_model=None, lengths=None, dataset=None, callbacks=None, **values):
    model = model or random_model()
    args = CDLMConfig(
        output_dir=str(out), block_length=BLOCK, use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False,
        **{"max_steps": 2, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "save_strategy": "no", "logging_steps": 1,
           "warmup_steps": 0, "lr_scheduler_type": "constant", **values},
    )
    dataset = dataset or TrajectoryStates(Trajectories(folder), model, BLOCK, seed=0)
    return CDLMTrainer(
        model, args, dataset, Collator(model, BUDGET), teacher_head=copy.deepcopy(model.head).requires_grad_(False),
        peft_model=peft_model, lengths=lengths, callbacks=callbacks,
    )


def weights(model) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.hf.state_dict().items()}


def moved(before, after) -> float:
    return max(float((before[name] - after[name]).abs().max()) for name in before)


@pytest.mark.parametrize("alone", ["distill_weight", "consistency_weight", "dlm_weight"])
def test_each_loss_alone_moves_parameters_and_skips_the_others_forwards(folder, tmp_path, alone):
    off = dict.fromkeys(("distill_weight", "consistency_weight", "dlm_weight"), 0.0)
    model = random_model()
    before, calls = weights(model), []
    whole = model.sequence_hidden
    model.sequence_hidden = lambda *args: (calls.append(1), whole(*args))[1]
    t = trainer(folder, tmp_path, model, **{**off, alone: 1.0})
    t.train()
    assert moved(before, weights(model)) > 1e-5
    name = alone.removesuffix("_weight")
    logged = [line for line in t.state.log_history if f"{name}_loss" in line]
    assert len(logged) == 2 and all(line[alone] == 1.0 for line in logged)
    others = {"distill", "consistency", "dlm"} - {name}
    assert not any(f"{other}_loss" in line for line in t.state.log_history for other in others)
    assert len(calls) == 2 * {"distill": 1, "consistency": 2, "dlm": 1}[name]


def test_all_three_are_logged_with_their_weights(folder, tmp_path):
    t = trainer(folder, tmp_path, distill_weight=1.0, consistency_weight=0.5, dlm_weight=0.25)
    t.train()
    line = t.state.log_history[0]
    assert (line["distill_weight"], line["consistency_weight"], line["dlm_weight"]) == (1.0, 0.5, 0.25)
    total = line["distill_loss"] + 0.5 * line["consistency_loss"] + 0.25 * line["dlm_loss"]
    assert line["loss"] == pytest.approx(total, rel=1e-4)


def kl(target: torch.Tensor, logits: torch.Tensor) -> float:
    return float((target.softmax(-1) * (target.log_softmax(-1) - logits.log_softmax(-1))).sum())


def test_the_losses_are_those_of_the_states(folder, tmp_path):
    """Equations 4, 5 and 6 of a step, by a loop over rows and slots; the teacher's head is not the student's, which has moved on."""
    model = random_model()
    t = trainer(folder, tmp_path, model)
    with torch.no_grad():
        model.head.weight.mul_(1.2)
    rows = [t.train_dataset[i] for i in range(4)]
    rows[0]["decoded"] = torch.tensor(BLOCK)  # as if the teacher had stopped after the first block
    batch = t.data_collator(rows)
    found = cdlm_losses(t, batch)
    distill, consistent, restore = 0.0, 0.0, 0.0
    for row in rows:
        prompt = len(row["prompt_ids"])
        valid = torch.ones(1, prompt + BUDGET, dtype=torch.bool)
        with torch.no_grad():
            logits, later = (
                model.sequence_logits(
                    torch.cat([torch.tensor(row["prompt_ids"]), row[key]])[None], valid, torch.tensor([prompt]), BLOCK
                )[0, prompt:] for key in ("y", "y_star")
            )
            teacher = t.teacher_head(row["hidden"].float())
            level = 0.02 + 0.98 * float(row["level"])
            masked = [i for i in range(BUDGET) if float(row["uniform"][i]) < level]
            noisy = row["answer"].clone()
            noisy[masked] = 1
            restored = model.sequence_logits(
                torch.cat([torch.tensor(row["prompt_ids"]), noisy])[None], valid, torch.tensor([prompt]), BLOCK
            )[0, prompt:].log_softmax(-1)
        restore -= sum(float(restored[i, row["answer"][i]]) for i in masked) / level / BUDGET / 4
        u = [i for i in range(BUDGET) if row["y"][i] == 1 and row["y_star"][i] != 1]
        s = [i for i in range(int(row["decoded"])) if row["y_star"][i] == 1]
        assert u and not set(u) & set(s)
        distill += sum(kl(teacher[i], logits[i]) for i in u) / len(u) / 4
        consistent += sum(kl(later[i], logits[i]) for i in s) / len(s) / 4 if s else 0.0
    assert found["distill"].item() == pytest.approx(distill, rel=1e-4)
    assert found["consistency"].item() == pytest.approx(consistent, rel=1e-4)
    assert found["dlm"].item() == pytest.approx(restore, rel=1e-4)


def test_states_of_a_teacher_that_stopped_early(folder):
    """Steps are drawn from those it took; blocks it never decoded are masked in every state, and counted out."""
    model, whole = random_model(), Trajectories(folder)[0]
    never = torch.arange(BUDGET) >= BLOCK
    stopped = replace(whole, decoded=BLOCK, step=whole.step.masked_fill(never, -1), tokens=whole.tokens.masked_fill(never, 1))
    dataset, starts = TrajectoryStates([stopped], model, BLOCK, seed=0), set()
    for epoch in range(60):
        dataset.set_epoch(epoch)
        row = dataset[0]
        assert int(row["decoded"]) == BLOCK
        assert bool((row["y_star"][:BLOCK] != 1).all()) and bool((row["y_star"][BLOCK:] == 1).all())
        starts.add(int((row["y"] != 1).sum()))
    assert starts == set(range(BLOCK)), "60 draws miss one of 4 with probability below 4 (3/4)**60 = 1.3e-7"


def test_states_of_a_teacher_that_revealed_several_slots_at_once(folder):
    """Steps 0 0 0 3 in each block of four: y is a state that the teacher was in, and U_y is never empty.

    A draw of 0, 1 or 2 is the state with nothing revealed, 3 the one with three slots, and so on: six states.
    """
    whole = Trajectories(folder)[0]
    steps = torch.tensor([0, 0, 0, 3, 4, 4, 4, 7, 8, 8, 8, 11])
    several = replace(whole, step=steps, hidden=None, confidence=None)
    dataset, starts = TrajectoryStates([several], random_model(), BLOCK, seed=0), set()
    for epoch in range(200):
        dataset.set_epoch(epoch)
        row = dataset[0]
        assert "hidden" not in row
        starts.add((int((row["y"] != 1).sum()), int((row["y_star"] != 1).sum())))
    assert starts == {(0, 4), (3, 4), (4, 8), (7, 8), (8, 12), (11, 12)}  # 200 draws miss one with probability below 6 (11/12)**200


def test_without_hidden_rows_equation_4_takes_the_trajectorys_tokens(folder, tmp_path):
    """By a loop over rows and slots: -log of the student's probability of the token that was revealed."""
    model = random_model()
    stored = [replace(Trajectories(folder)[i], hidden=None, confidence=None) for i in range(4)]
    t = trainer(folder, tmp_path, model, dataset=TrajectoryStates(stored, model, BLOCK, seed=0))
    rows, expected = [t.train_dataset[i] for i in range(4)], 0.0
    for row, trajectory in zip(rows, stored, strict=True):
        prompt = len(row["prompt_ids"])
        valid = torch.ones(1, prompt + BUDGET, dtype=torch.bool)
        with torch.no_grad():
            whole = torch.cat([torch.tensor(row["prompt_ids"]), row["y"]])[None]
            log_p = model.sequence_logits(whole, valid, torch.tensor([prompt]), BLOCK)[0, prompt:].log_softmax(-1)
        u = [i for i in range(BUDGET) if row["y"][i] == 1 and row["y_star"][i] != 1]
        expected -= sum(float(log_p[i, trajectory.tokens[i]]) for i in u) / len(u) / 4
    found = cdlm_losses(t, t.data_collator(rows))
    assert found["distill"].item() == pytest.approx(expected, rel=1e-5) and "consistency" in found


def test_a_cut_answer_fills_the_budget_and_no_more(folder):
    """The longest answer of the batch has as many tokens as the budget: no slot for an end token is added."""
    model = random_model()
    examples = [data.Example(0, "all", "", "", [5, 6], [7] * BUDGET), data.Example(1, "all", "", "", [5], [8])]
    dataset = AnswerNoise(examples, BUDGET, seed=0)
    batch = Collator(model, BUDGET)([dataset[0], dataset[1]])
    assert batch["answer"].tolist() == [[7] * BUDGET, [8] + [2] * (BUDGET - 1)]


def test_a_student_that_is_its_teacher_has_no_distillation_loss(folder):
    """Contract 8, on the whole path: the teacher's own logits at y give a zero loss and a zero gradient."""
    logits = torch.randn(2, 6, 9, requires_grad=True)
    which = torch.tensor([[True] * 6, [False] * 6])
    loss = losses.distillation(logits, logits.detach().clone(), which)
    loss.backward()
    assert float(loss) == pytest.approx(0.0, abs=1e-7) and float(logits.grad.abs().max()) < 1e-7


def test_states_stop_at_the_end_of_the_block(folder):
    """t_end is the end of t_start's block: y* has that block and the earlier ones full, nothing of the later ones."""
    model = random_model()
    dataset = TrajectoryStates(Trajectories(folder), model, BLOCK, seed=0)
    starts = set()
    for epoch in range(12):
        dataset.set_epoch(epoch)
        for i in range(len(dataset)):
            row = dataset[i]
            start, end = int((row["y"] != 1).sum()), int((row["y_star"] != 1).sum())
            assert end == (start // BLOCK + 1) * BLOCK
            assert bool((row["y_star"][:end] != 1).all()) and bool((row["y_star"][end:] == 1).all())
            starts.add(start)
    assert starts == set(range(BUDGET))  # uniform over 0..N-1: 120 draws miss one of 12 with probability below 12 (11/12)**120 = 4e-4


def test_draws_depend_on_seed_epoch_and_row_only(folder):
    model = random_model()
    one, two = (TrajectoryStates(Trajectories(folder), model, BLOCK, seed=0) for _ in range(2))
    two[4]
    assert torch.equal(one[3]["uniform"], two[3]["uniform"])
    two.set_epoch(1)
    assert not torch.equal(one[3]["uniform"], two[3]["uniform"])


class FullBudget(AnswerNoise):
    """Every batch at the full budget, as the budget is drawn by groups of rows and the two ways have other groups."""

    def __getitem__(self, index):
        return {**super().__getitem__(index), "budget": 1.0}


@pytest.mark.parametrize("objective", ["cdlm", "mdlm"])
def test_accumulating_eight_rows_is_a_batch_of_eight(folder, tmp_path, objective):
    """SGD-like comparison: one step, 1 x 8 and 8 x 1, the same parameters to 1e-6 of a step of 1e-3."""
    found = []
    for batch, accumulation in ((8, 1), (1, 8)):
        model = random_model()
        rows = examples(8)
        same = [rows[3]] * 8  # one prompt length and answer, so that both ways pad alike and only the noise differs
        dataset = None if objective == "cdlm" else FullBudget(same, BUDGET, seed=0)
        t = trainer(
            folder, tmp_path / str(batch), model, dataset=dataset, objective=objective, max_steps=1, per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation, optim="sgd", max_grad_norm=0.0, dlm_weight=1.0,
        )
        t.train()
        found.append(weights(model))
    assert moved(found[0], weights(random_model())) > 1e-5
    assert moved(found[0], found[1]) < 1e-6


@pytest.mark.parametrize("lora", [False, True])
def test_a_resumed_run_ends_with_the_weights_of_an_unbroken_one(folder, tmp_path, lora):
    def build(out):
        model = random_model()
        torch.manual_seed(5)
        peft_model = add_lora(model, rank=2, alpha=4, targets=["q_proj", "down_proj"]) if lora else None
        return model, trainer(
            folder, out, model, peft_model=peft_model, max_steps=6, save_strategy="steps", save_steps=3, per_device_train_batch_size=4,
        )

    model, t = build(tmp_path / "whole")
    t.train()
    whole = weights(model)
    again, resumed = build(tmp_path / "again")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert resumed.state.global_step == 6
    assert moved(whole, weights(again)) == 0.0
    assert moved(whole, weights(build(tmp_path / "fresh")[0])) > 0


@pytest.mark.parametrize("words", [
    "[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534", "basic_ios::clear: iostream error",
])
def test_only_a_writers_error_says_that_a_checkpoint_cant_be_written(folder, tmp_path, monkeypatch, words):
    """The two things that torch.save says on a full disk; any other RuntimeError passes as it is."""
    t = trainer(folder, tmp_path, random_model(), max_steps=1, save_strategy="steps", save_steps=1)
    for text, kind in ((words, files.NotWritten), ("CUDA error: an illegal memory access was encountered", RuntimeError)):

        def fail(*args, text=text):
            raise RuntimeError(text)

        monkeypatch.setattr("transformers.trainer.Trainer._save_checkpoint", fail)
        with pytest.raises((RuntimeError, OSError)) as caught:
            t._save_checkpoint(t.model, None)
        assert type(caught.value) is kind and text in str(caught.value)
        assert (str(tmp_path) in str(caught.value)) == (kind is files.NotWritten)


def test_lora_trains_adapters_only_and_off_is_the_teacher(folder, tmp_path):
    model = random_model()
    ids = torch.arange(3, 15)[None]
    valid = torch.ones_like(ids, dtype=torch.bool)
    with torch.no_grad():
        teacher = model.sequence_logits(ids, valid)
    peft_model = add_lora(model, rank=2, alpha=4, targets=["q_proj", "v_proj"])
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name.rsplit(".lora_", 1)[0].rsplit(".", 1)[-1] for name in trained} == {"q_proj", "v_proj"}
    trainer(folder, tmp_path, model, peft_model=peft_model, max_steps=3).train()
    model.eval()
    with torch.no_grad():
        assert not torch.allclose(model.sequence_logits(ids, valid), teacher, atol=1e-4)
        with peft_model.disable_adapter():
            assert torch.equal(model.sequence_logits(ids, valid), teacher)


def test_every_lora_target_must_match():
    with pytest.raises(ValueError, match=r"names \['ff_proj'\].*down_proj, gate_proj"):
        add_lora(random_model(), rank=2, alpha=4, targets=["q_proj", "ff_proj"])
    with pytest.raises(ValueError, match="names nothing"):
        add_lora(random_model(), rank=2, alpha=4, targets=[])


def test_full_training_leaves_the_teachers_head_alone(folder, tmp_path):
    model = random_model()
    t = trainer(folder, tmp_path, model)
    head = t.teacher_head.weight.clone()
    t.train()
    assert torch.equal(t.teacher_head.weight, head) and not torch.equal(model.head.weight, head)


def test_length_grouped_batches():
    lengths = [(i % 7, i % 3) for i in range(100)]
    sampler = LengthGrouped(lengths, 5, seed=0, chunk=4)
    order = list(sampler)
    assert sorted(order) == list(range(100)) and order == list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) != order

    def spread(rows):
        return sum(len({lengths[i][0] for i in rows[k : k + 5]}) for k in range(0, 100, 5))

    assert spread(order) < spread(list(range(100)))


def test_rows_stand_together_as_in_one_process(tmp_path, folder):
    """A process of two takes forwards of half the rows: the order is that of whole ones."""
    lengths = [(i % 7, i % 3) for i in range(24)]
    orders = []
    for rows, grouped in ((4, None), (2, 4)):
        t = trainer(folder, tmp_path, per_device_train_batch_size=rows, gradient_accumulation_steps=4 // rows)
        t.lengths, t.grouped = lengths, grouped
        orders.append(list(t._get_train_sampler()))
    assert orders[0] == orders[1] and sorted(orders[0]) == list(range(24))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"objective": "rl"}, "objective is 'rl'; allowed: cdlm, mdlm, bd3lm, ar"),
        ({"distill_weight": -1.0}, "distill_weight is -1.0"),
        ({"alpha": float("nan"), "objective": "tidar"}, "alpha is nan; a weight is 0 or above, and finite"),
        ({"distill_weight": 0.0, "consistency_weight": 0.0, "dlm_weight": 0.0}, "nothing would be trained"),
        ({"noise_floor": 0.0}, "noise_floor"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(tmp_path, values, words):
    with pytest.raises(ValueError, match=words):
        CDLMConfig(output_dir=str(tmp_path), use_cpu=True, **values)


def test_distillation_needs_a_teacher_head(folder, tmp_path):
    model = random_model()
    dataset = TrajectoryStates(Trajectories(folder), model, BLOCK, seed=0)
    with pytest.raises(ValueError, match="needs teacher_head"):
        CDLMTrainer(model, CDLMConfig(output_dir=str(tmp_path), use_cpu=True), dataset, Collator(model, BUDGET))


def test_the_target_of_equation_5_leaves_the_student_in_training_mode(folder, tmp_path):
    t = trainer(folder, tmp_path)
    t.diffusion.hf.train()
    cdlm_losses(t, t.data_collator([t.train_dataset[0]]))
    assert t.diffusion.hf.training


def test_dropout_is_off_in_the_target_of_equation_5(folder, tmp_path):
    """Adapters with dropout, on the head too: the student's rows have it, the rows at y* and their head do not."""
    model = random_model()
    torch.manual_seed(3)
    peft_model = add_lora(model, rank=4, alpha=64, targets=["q_proj", "v_proj", "lm_head"], dropout=0.5)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    t = trainer(folder, tmp_path, model, peft_model=peft_model, distill_weight=0.0, dlm_weight=0.0, consistency_weight=1.0)
    row = next(row for row in (t.train_dataset[i] for i in range(len(t.train_dataset))) if bool((row["y_star"] == 1).any()))
    batch, prompt = t.data_collator([row]), len(row["prompt_ids"])
    model.hf.train()
    torch.manual_seed(7)
    found = cdlm_losses(t, batch)["consistency"]
    open_N = (row["y"] == 1) & (row["y_star"] == 1) & (torch.arange(BUDGET) < row["decoded"])
    valid, length = torch.ones(1, prompt + BUDGET, dtype=torch.bool), torch.tensor([prompt])

    def rows(slots):
        ids = torch.cat([torch.tensor(row["prompt_ids"]), slots])[None]
        return model.sequence_hidden(ids, valid, length, BLOCK)[0, prompt:][open_N]

    torch.manual_seed(7)
    student = model.head(rows(row["y"]))
    model.hf.eval()
    target = model.head(rows(row["y_star"]))
    assert float(found) == pytest.approx(kl(target, student) / int(open_N.sum()), rel=1e-4)
    assert float((target - model.head(rows(row["y_star"]))).abs().max()) == 0 and float(found) > 0.1


def test_bf16_computes_forwards_in_bfloat16_and_losses_in_fp32(folder, tmp_path):
    """Weights stay fp32 and move; logits are bfloat16, and the losses near those of fp32, not equal."""
    found = {}
    for bf16 in (False, True):
        model = random_model()
        before, seen = weights(model), set()
        model.head.register_forward_hook(lambda module, args, out, seen=seen: seen.add(out.dtype))
        t = trainer(folder, tmp_path / str(bf16), model, bf16=bf16, max_steps=1)
        t.train()
        assert all(value.dtype == torch.float32 for value in weights(model).values()) and moved(before, weights(model)) > 1e-5
        found[bf16] = (seen, t.state.log_history[0]["loss"])
    assert found[False][0] == {torch.float32} and found[True][0] == {torch.bfloat16}
    assert found[True][1] != found[False][1] and found[True][1] == pytest.approx(found[False][1], rel=0.1)


def test_a_checkpoint_is_on_the_disk_when_older_ones_go(folder, tmp_path, monkeypatch):
    """Its checksums too."""
    did, sync, rotate = [], files.sync_all, loop.rotate_checkpoints
    monkeypatch.setattr(files, "sync_all", lambda place: did.append((place.name, (place / files.SUMS).is_file())) or sync(place))
    monkeypatch.setattr(loop, "rotate_checkpoints", lambda *args: did.append("older") or rotate(*args))
    trainer(folder, tmp_path / "out", save_strategy="steps", save_steps=1, save_total_limit=1, max_steps=2).train()
    assert did == [("checkpoint-1", True), "older", ("checkpoint-2", True), "older"]
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-2"]


def test_fp16_is_refused(folder, tmp_path):
    args = CDLMConfig(output_dir=str(tmp_path), use_cpu=True)
    args.fp16 = True
    with pytest.raises(ValueError, match="fp16 is True; allowed: bf16"):
        CDLMTrainer(random_model(), args, None, None, teacher_head=torch.nn.Identity())


def test_an_engine_that_accelerate_would_leave_out_is_refused(folder, tmp_path, monkeypatch):
    """On a CPU accelerate does not shard, and says nothing."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match=r"asked for FSDP.*take DDP"):
        trainer(folder, tmp_path)


def test_deepspeed_writes_no_pickles_that_nobody_reads(folder, tmp_path, monkeypatch):
    """Nothing is saved at step 2 under its name; under the engine that really runs here, a checkpoint is."""
    for engine in ("deepspeed", "plain"):
        monkeypatch.setattr(CDLMTrainer, "engine", engine)
        trainer(folder, tmp_path / engine, save_strategy="steps", save_steps=2, max_steps=2).train()
    assert not (tmp_path / "deepspeed" / "checkpoint-2").exists() and (tmp_path / "plain" / "checkpoint-2").is_dir()


@pytest.mark.parametrize("lora", [False, True])
def test_gradient_checkpointing_gives_the_same_weights(folder, tmp_path, lora):
    """Two steps with and without: the same losses and weights, and the layers of a step with a gradient run twice, so it was on."""
    found = []
    for on in (False, True):
        model, calls = random_model(), []
        torch.manual_seed(5)
        peft_model = add_lora(model, rank=2, alpha=4, targets=["q_proj"]) if lora else None
        first = model.hf.get_decoder().layers[0].self_attn.k_proj
        first.register_forward_hook(lambda *args, calls=calls: calls.append(1))
        t = trainer(folder, tmp_path / str(on), model, peft_model=peft_model, gradient_checkpointing=on, max_steps=2)
        t.train()
        found.append((weights(model), [line["loss"] for line in t.state.log_history if "loss" in line], len(calls)))
    assert moved(found[0][0], found[1][0]) < 1e-6 and found[0][1] == pytest.approx(found[1][1], rel=1e-5)
    assert found[0][2] == 2 * 3 and found[1][2] == 2 * (2 + 2 + 1)  # y and the answer again in the backward, y* once


def test_states_of_blocks_from_position_zero(tmp_path):
    """Prompts of 3 to 7 tokens, blocks of 4: the first block has 1, 4, 3, 2 or 1 slots. y* is y with y's block filled; a state's open slots
    before it are none, behind it all."""
    collect(tmp_path, random_model(facts={"block_origin": "zero", "prompt_attention": "block_causal", "block_length": 4}))
    model = random_model(facts={"block_origin": "zero", "prompt_attention": "block_causal", "block_length": 4})
    rows = TrajectoryStates(Trajectories(tmp_path), model, BLOCK, seed=0)
    seen = set()
    for epoch in range(12):
        rows.set_epoch(epoch)
        for i in range(5):
            row = rows[i]
            tail = len(row["prompt_ids"]) % BLOCK
            open_now, open_later = row["y"] == 1, row["y_star"] == 1
            newly = (open_now & ~open_later).nonzero()[:, 0].tolist()
            block = {(slot + tail) // BLOCK for slot in newly}
            assert len(block) == 1
            place = (torch.arange(len(open_now)) + tail) // BLOCK
            assert not bool(open_now[place < min(block)].any()) and not bool(open_later[place <= min(block)].any())
            assert bool(open_now[place > min(block)].all())
            seen.add((tail, min(block)))
    assert len(seen) > 10
