"""Objective tidar: causal text and blocks of masks behind it in one forward, and what of it can see what."""

import pytest
import torch
import torch.nn.functional as F
from conftest import random_model
from test_block_diffusion import examples

from cdlm import masks
from cdlm.trainer import AnswerNoise, CDLMConfig, CDLMTrainer, Collator, add_lora, tidar_losses

BLOCK, BUDGET, MASK, EOS = 4, 16, 1, 2
CAUSAL = {"logit_shift": True, "prompt_attention": "causal"}
KINDS = ("llama", "qwen3")


def trainer(tmp_path, *, kind="qwen2", block_length=BLOCK, rows=None, peft=None, **values) -> CDLMTrainer:
    model = random_model(kind, facts=CAUSAL)
    args = CDLMConfig(
        output_dir=str(tmp_path), objective="tidar", block_length=block_length, use_cpu=True, disable_tqdm=True,
        dataloader_pin_memory=False, save_strategy="no", logging_steps=1, warmup_steps=0, lr_scheduler_type="constant",
        **{"max_steps": 2, "per_device_train_batch_size": 4, "learning_rate": 1e-3, **values},
    )
    dataset = AnswerNoise(rows or examples(), BUDGET, 0)
    wrapped = None if peft is None else add_lora(model, **peft)
    return CDLMTrainer(model, args, dataset, Collator(model, BUDGET, block_length, from_zero=True), peft_model=wrapped)


def parts_of(t: CDLMTrainer, rows: list[int]) -> dict[str, float]:
    with torch.no_grad():
        return {name: float(loss) for name, loss in tidar_losses(t, t.data_collator([t.train_dataset[i] for i in rows])).items()}


def halves(model, ids, valid, block, skip=0):
    """Raw logits of the clean tokens and of the masks."""
    layout = masks.tidar_training(valid, block, skip)
    both = torch.cat([ids, torch.full_like(ids[:, skip:], MASK)], dim=1)
    with torch.no_grad():
        logits = model.head(model.packed_hidden(both, layout.position_BQ, layout.sight, layout.before_BQ))
    return logits[:, : ids.shape[1]], logits[:, ids.shape[1] :]


def text(lengths=(11, 7, 9)):
    width, draw = max(lengths), torch.Generator().manual_seed(3)
    valid = torch.tensor([[False] * (width - n) + [True] * n for n in lengths])
    return torch.randint(3, 58, (len(lengths), width), generator=draw) * valid, valid


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", [1, 4])
def test_the_clean_half_is_a_plain_causal_forward(kind, block):
    """In fp64: what is left is the order of sums, since every masked key weighs 0."""
    model, (ids, valid) = random_model(kind, facts=CAUSAL).double(), text()
    clean, _ = halves(model, ids, valid, block)
    with torch.no_grad():
        for row in range(3):
            plain = model.hf(input_ids=ids[row][valid[row]][None]).logits[0]
            torch.testing.assert_close(clean[row][valid[row]], plain, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_no_mask_sees_its_own_answer(kind):
    """Every token changed in turn: the masks of its block and of the blocks before it stay bit for bit, those of the next block do not."""
    model, (ids, valid) = random_model(kind, facts=CAUSAL), text()
    clean, masked = halves(model, ids, valid, BLOCK)
    for column in range(ids.shape[1]):
        other = ids.clone()
        other[:, column] = (other[:, column] + 7) % 55 + 3
        moved_clean, moved = halves(model, other, valid, BLOCK)
        for row in range(3):
            pad = int((~valid[row]).sum())
            if column < pad:
                continue
            block = (column - pad) // BLOCK
            end = min(pad + (block + 1) * BLOCK, ids.shape[1])
            assert torch.equal(moved[row, pad:end], masked[row, pad:end])
            assert torch.equal(moved_clean[row, pad:column], clean[row, pad:column]), "nor does a clean row see what follows it"
            assert end == ids.shape[1] or not torch.equal(moved[row, end:], masked[row, end:])


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_of_masks_is_what_decoding_asks(kind):
    """The rows of a block are those of the masks that a prefill of the text before it has behind it."""
    model, (ids, valid) = random_model(kind, facts=CAUSAL), text((9, 9))
    _, masked = halves(model, ids, valid, 3)
    for start in (3, 6):
        layout = masks.tidar_prefill(valid[:, :start], 3, masks_last=True)
        asked = torch.cat([ids[:, :start], torch.full_like(ids[:, :3], MASK)], dim=1)
        with torch.no_grad():
            logits = model.head(model.packed_hidden(asked, layout.position_BQ, layout.sight, layout.before_BQ))[:, start:]
        torch.testing.assert_close(masked[:, start : start + 3], logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("skip", [1, 4, 6])
def test_masks_may_be_left_out_where_nothing_is_asked(skip):
    model, (ids, valid) = random_model("llama", facts=CAUSAL), text()
    clean, masked = halves(model, ids, valid, 3)
    clean_again, part = halves(model, ids, valid, 3, skip)
    torch.testing.assert_close(clean_again, clean, rtol=1e-5, atol=1e-5)
    for row in range(3):
        pad = int((~valid[row]).sum())
        first = next(c for c in range(pad, ids.shape[1]) if c >= skip and (c - pad) % 3 == 0)
        torch.testing.assert_close(part[row, first - skip :], masked[row, first:], rtol=1e-5, atol=1e-5)


def test_both_losses_are_the_loop_over_answer_tokens(tmp_path):
    """Each row alone, each block of masks in a forward of its own behind the text before it. Blocks start at position 0 and so inside
    a prompt; the tokens that count are those of the answer and its end token."""
    t = trainer(tmp_path)
    model, ar, diffusion = t.diffusion, 0.0, 0.0
    for example in examples():
        ids = [*example.prompt_ids, *example.answer_ids, EOS]
        with torch.no_grad():
            logits = model.hf(input_ids=torch.tensor([ids])).logits[0]
        asked = range(len(example.prompt_ids), len(ids))
        ar += sum(float(F.cross_entropy(logits[p - 1], torch.tensor(ids[p]))) for p in asked) / len(asked) / 4
        for start in range(0, len(ids), BLOCK):
            before = torch.tensor([ids[:start]], dtype=torch.long)
            asked_ids = torch.cat([before, torch.full((1, BLOCK), MASK)], dim=1)
            horizon = torch.tensor([[*range(start), *[start + BLOCK - 1] * BLOCK]])
            seen = masks.clean(horizon, torch.arange(start + BLOCK)[None], torch.ones(1, start + BLOCK, dtype=torch.bool))
            with torch.no_grad():
                block = model.hf(input_ids=asked_ids, attention_mask=masks.dense(seen)).logits[0, start:]
            for p in set(asked) & set(range(start, start + BLOCK)):
                diffusion += float(F.cross_entropy(block[p - start], torch.tensor(ids[p]))) / len(asked) / 4
    assert parts_of(t, [0, 1, 2, 3]) == pytest.approx({"ar": ar, "diffusion": diffusion}, rel=1e-4)


def test_the_loss_of_a_row_does_not_depend_on_its_batch(tmp_path):
    t = trainer(tmp_path)
    alone = [parts_of(t, [i]) for i in range(4)]
    for name, loss in parts_of(t, [0, 1, 2, 3]).items():
        assert loss == pytest.approx(sum(part[name] for part in alone) / 4, rel=1e-4)


@pytest.mark.parametrize("alpha, ar, diffusion", [(1.0, 1 / 2, 1 / 2), (3.0, 3 / 4, 1 / 4), (0.0, 0.0, 1.0)])
def test_alpha_mixes_the_two(tmp_path, alpha, ar, diffusion):
    t = trainer(tmp_path, alpha=alpha)
    parts = parts_of(t, [0, 1, 2, 3])
    with torch.no_grad():
        total = float(t.compute_loss(None, t.data_collator([t.train_dataset[i] for i in range(4)])))
    assert total == pytest.approx(ar * parts["ar"] + diffusion * parts["diffusion"], rel=1e-5)
    t.log({})
    line = t.state.log_history[0]
    assert (line["ar_weight"], line["diffusion_weight"]) == pytest.approx((ar, diffusion))
    with pytest.raises(ValueError, match=r"alpha is -0\.5; a weight is 0 or above"):
        trainer(tmp_path, alpha=-0.5)


@pytest.mark.parametrize("peft", [None, {"rank": 2, "alpha": 4, "targets": ["q_proj", "v_proj"]}], ids=["full", "lora"])
def test_training_moves_both_losses_down_with_finite_gradients(tmp_path, peft):
    t = trainer(tmp_path, max_steps=40, learning_rate=1e-3 if peft is None else 2e-2, peft=peft)
    before = parts_of(t, [0, 1, 2, 3])
    t.train()
    after = parts_of(t, [0, 1, 2, 3])
    assert all(after[name] < 0.9 * before[name] for name in ("ar", "diffusion")), (before, after)
    assert all(torch.isfinite(torch.tensor(line["grad_norm"])) for line in t.state.log_history if "grad_norm" in line)
