"""The rows of a step are the same however many processes share them: the order, the budget, the dropout, and where a run goes on."""

import pytest
import torch
from accelerate import skip_first_batches
from accelerate.data_loader import prepare_data_loader
from conftest import random_model
from hypothesis import given, settings
from hypothesis import strategies as st
from test_trajectories import BLOCK, BUDGET
from torch.utils.data import DataLoader
from transformers import TrainingArguments

from cdlm.data import Example
from cdlm.processes import deal_rows
from cdlm.trainer import AnswerNoise, CDLMConfig, CDLMTrainer, Collator, InGroup, LengthGrouped, Shuffled, WholeSteps, add_lora

SEED = 3


def examples(count):
    """Of many lengths."""
    return [Example(i, "all", "", "", [5] * (1 + i * 7 % 5), [7] * (i * 5 % BUDGET)) for i in range(count)]


def sampler(rows, batch_size, accumulation, *, by_length, in_groups=True):
    lengths = [(len(e.prompt_ids), len(e.answer_ids)) for e in rows]
    used = len(rows) // (batch_size * accumulation) * (batch_size * accumulation)
    order = LengthGrouped(lengths, batch_size, SEED, used=used) if by_length else Shuffled(len(rows), SEED)
    return WholeSteps(order, batch_size * accumulation, batch_size, in_groups=in_groups)


def stream(rows, batch_size, accumulation, count, *, by_length=True, epochs=3, begin=0):
    """Steps of `epochs` epochs, from step `begin` on, each as (row, slots) of all of its forwards in `count` processes."""
    each, forwards = deal_rows(batch_size, accumulation, count)
    noise, collate, steps = AnswerNoise(rows, BUDGET, SEED), Collator(random_model(), BUDGET), []
    own = []
    for rank in range(count):
        order = sampler(rows, batch_size, accumulation, by_length=by_length)
        loader = DataLoader(noise, batch_size=each, sampler=order, drop_last=True, collate_fn=collate)
        own.append((order, prepare_data_loader(loader, num_processes=count, process_index=rank, put_on_device=False, even_batches=True)))
    an_epoch = len(rows) // (batch_size * accumulation)
    for epoch in range(begin // an_epoch, epochs):
        noise.set_epoch(epoch)
        read = []
        for order, loader in own:
            assert len(loader) == an_epoch * forwards
            if epoch == begin // an_epoch and begin % an_epoch:
                loader = skip_first_batches(loader, begin % an_epoch * forwards)
            order.set_epoch(epoch)  # the Trainer tells the loader, and a callback tells the sampler
            loader.set_epoch(epoch)
            read.append(list(loader))
        for i in range(0, len(read[0]), forwards):
            batches = [batch for process in read for batch in process[i : i + forwards]]
            steps.append(sorted((int(row), batch["answer"].shape[1]) for batch in batches for row in batch["index"]))
    return steps


@pytest.mark.parametrize("by_length", [True, False])
def test_a_step_has_the_same_rows_and_slots_in_any_number_of_processes(by_length):
    """Three epochs of 29 rows in steps of 8: three steps each, and five rows of an epoch are left out."""
    rows = examples(29)
    one = stream(rows, 4, 2, 1, by_length=by_length)
    assert len(one) == 9 and all(len({row for row, _ in step}) == 8 for step in one)
    for epoch in range(3):
        assert len({row for step in one[3 * epoch : 3 * epoch + 3] for row, _ in step}) == 24
    assert one[:3] != one[3:6] and len({slots for step in one for _, slots in step}) > 2
    for count in (2, 4, 8):
        assert stream(rows, 4, 2, count, by_length=by_length) == one


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_a_run_goes_on_within_its_second_epoch_in_another_number_of_processes(count):
    rows = examples(29)
    assert stream(rows, 4, 2, count, begin=4) == stream(rows, 4, 2, 1)[4:]


@settings(max_examples=25, deadline=None)
@given(
    batch_size=st.integers(1, 6), accumulation=st.integers(1, 4), steps=st.integers(1, 4), left=st.integers(0, 23), by_length=st.booleans(),
    data=st.data(),
)
def test_any_split_of_any_step(batch_size, accumulation, steps, left, by_length, data):
    per_step = batch_size * accumulation
    count = data.draw(st.sampled_from([n for n in range(1, per_step + 1) if per_step % n == 0]))
    rows = examples(per_step * steps + left % per_step)
    begin = data.draw(st.integers(0, 2 * steps - 1))
    one = stream(rows, batch_size, accumulation, 1, by_length=by_length, epochs=2)
    assert len(one) == 2 * steps
    assert stream(rows, batch_size, accumulation, count, by_length=by_length, epochs=2, begin=begin) == one[begin:]


def test_a_group_has_one_budget():
    """By hand: the longest answer with its end token, and the cubed draw of the first row's share of what is left."""
    rows = [Example(i, "all", "", "", [5], [7] * length) for i, length in enumerate((2, 5, 1, 3))]
    noise, collate = AnswerNoise(rows, BUDGET, SEED), Collator(random_model(), BUDGET)
    group = (2, 0, 1, 3)
    draw = torch.rand(2, generator=noise.generator(2))[1]
    slots = 6 + round((BUDGET - 6) * float(draw) ** 3)
    for part in ([2, 0, 1, 3], [2, 0], [1, 3], [3]):
        batch = collate([noise[InGroup(row, group)] for row in part])
        assert batch["answer"].shape == (len(part), slots)
        assert torch.equal(batch["uniform"][0], noise[part[0]]["uniform"][:slots]), "a row's noise is its own"


def trainer(out, rows, *, processes=1, monkeypatch=None, model=None, peft_model=None, grouped=None, batch_size=4, **values):
    if monkeypatch is not None:
        monkeypatch.setattr(TrainingArguments, "world_size", processes)
    args = CDLMConfig(
        output_dir=str(out), objective="mdlm", block_length=BLOCK, use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False, seed=SEED,
        dataloader_drop_last=True, per_device_train_batch_size=batch_size, save_strategy="no", logging_steps=1, warmup_steps=0, max_steps=6,
        learning_rate=1e-3, **values,
    )
    model = model or random_model()
    lengths = [(len(e.prompt_ids), len(e.answer_ids)) for e in rows]
    return CDLMTrainer(
        model, args, AnswerNoise(rows, BUDGET, SEED), Collator(model, BUDGET), lengths=lengths, grouped=grouped, peft_model=peft_model
    )


def test_the_trainer_samples_whole_steps_of_all_processes(tmp_path, monkeypatch):
    """What the streams above were made with is what the Trainer makes: 29 rows in steps of 4 x 2."""
    rows = examples(29)
    wanted = list(sampler(rows, 4, 2, by_length=True))
    assert list(trainer(tmp_path, rows, gradient_accumulation_steps=2)._get_train_sampler()) == wanted and len(wanted) == 24
    for count, batch_size, forwards in ((2, 4, 1), (4, 2, 1)):
        t = trainer(
            tmp_path, rows, processes=count, monkeypatch=monkeypatch, grouped=4, batch_size=batch_size, gradient_accumulation_steps=forwards
        )
        assert list(t._get_train_sampler()) == wanted


def test_a_split_group_gives_the_same_gradient_steps(tmp_path):
    """mdlm over two ends of epochs: groups of four in forwards of four, of two and of one, to rounding."""
    found = []
    for batch_size, accumulation in ((4, 1), (2, 2), (1, 4)):
        t = trainer(tmp_path, examples(13), grouped=4, batch_size=batch_size, gradient_accumulation_steps=accumulation, optim="sgd")
        t.train()
        assert int(t.state.epoch) == 2
        found.append(torch.tensor([line["loss"] for line in t.state.log_history if "mdlm_loss" in line]))
    assert len(found[0]) == 6 and float(found[0].std()) > 0.01
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=1e-5, rtol=0)


def test_rows_that_make_no_step_and_forwards_that_make_no_group_are_refused(tmp_path):
    with pytest.raises(ValueError, match="a step has 8 rows; there are 7 rows to train on"):
        trainer(tmp_path, examples(7), gradient_accumulation_steps=2).train()
    with pytest.raises(ValueError, match="a forward has 3 rows, which do not divide a group of 4"):
        trainer(tmp_path, examples(24), grouped=4, batch_size=3, gradient_accumulation_steps=4).train()
    with pytest.raises(ValueError, match="a step has 4 rows, which are no whole groups of 8"):
        trainer(tmp_path, examples(24), grouped=8, batch_size=4).train()


def test_dropout_is_of_the_step_and_the_rows(tmp_path):
    """Whatever was drawn before in the process: two forwards of the same rows in the same step drop the same, another step drops others."""
    torch.manual_seed(0)
    model = random_model()
    peft_model = add_lora(model, rank=2, alpha=4, targets=["q_proj", "v_proj"], dropout=0.5)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    t = trainer(tmp_path, examples(8), model=model, peft_model=peft_model)
    model.train()
    batch = t.data_collator([t.train_dataset[i] for i in (0, 1)])

    def loss(step, inputs):
        torch.rand(step + 1)
        t.state.global_step = step
        return float(t.compute_loss(model.hf, inputs).detach())

    first = loss(0, batch)
    assert loss(0, batch) == first != loss(1, batch)
    assert loss(0, {**batch, "index": batch["index"] + 1}) != first


def test_every_row_has_its_turn():
    """Of 41 rows of 41 lengths 32 are used in an epoch, and not always the shorter ones: each of them in about 156 of 200 epochs."""
    order = WholeSteps(LengthGrouped([(i, i) for i in range(41)], 16, SEED, used=32), 16, 16, in_groups=False)
    seen = torch.zeros(41)
    for epoch in range(200):
        order.set_epoch(epoch)
        seen[list(order)] += 1
    assert int(seen.sum()) == 200 * 32 and 120 < int(seen.min()) and int(seen.max()) < 190  # 156 +- 5.9
