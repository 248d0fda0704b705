"""Training of block diffusion: one forward asks what cached decoding asks, and the losses are what their equations say."""

import json
from itertools import pairwise, product

import pytest
import torch
import torch.nn.functional as F
from conftest import random_model, random_prompts
from hypothesis import given, settings
from hypothesis import strategies as st

from cdlm import losses, masks
from cdlm.data import Example
from cdlm.families.base import DiffusionLM
from cdlm.trainer import AnswerNoise, CDLMConfig, CDLMTrainer, Collator

MASK, EOS = 1, 2


def by_cached_decoding(model: DiffusionLM, noisy, prompt, prompt_valid, answer, block_length: int) -> torch.Tensor:
    """Logits of the noisy slots, block by block: commit the prompt, then denoise each block and commit it clean. One row at a time.

    Where blocks start at position 0 the tail of the prompt stands at the head of the first block, unless the prompt is causal: such a
    tail is committed with the prompt.
    """
    rows = []
    facts = model.facts
    for row in range(len(answer)):
        asked, slots = prompt[row][prompt_valid[row]], answer.shape[1]
        length = len(asked)
        over = length % block_length if facts.block_origin == "zero" else 0
        tail = 0 if facts.prompt_attention == "causal" else over
        clean = torch.cat([asked[length - tail :], answer[row]])[None]
        open_ = torch.cat([asked[length - tail :], noisy[row]])[None]
        edges = [0, *range(block_length - over + tail, slots + tail, block_length), slots + tail]
        cache = model.new_cache(torch.tensor([length]), length + slots)
        if length > tail:
            model.commit(asked[None, : length - tail], torch.ones(1, length - tail, dtype=torch.bool), cache, block_length)
        parts = []
        for begin, end in pairwise(edges):
            parts.append(model.head(model.denoise(open_[:, begin:end], cache, block_length)))
            model.commit(clean[:, begin:end], torch.ones(1, end - begin, dtype=torch.bool), cache, block_length)
        rows.append(torch.cat(parts, dim=1)[:, tail:])
    return torch.cat(rows)


def noisy_answers(lengths: list[int], slots: int, seed: int = 0):
    """Random left-padded prompts, answers, and the answers with about half of their slots masked."""
    prompt, valid = random_prompts(lengths, seed=seed)
    draw = torch.Generator().manual_seed(seed + 1)
    answer = torch.randint(3, 58, (len(lengths), slots), generator=draw)
    return prompt, valid, answer, torch.where(torch.rand(answer.shape, generator=draw) < 0.5, MASK, answer)


def in_one_forward(model, noisy, prompt, valid, answer, block_length):
    ids = torch.cat([prompt, answer], dim=1)
    everywhere = torch.cat([valid, torch.ones_like(answer, dtype=torch.bool)], dim=1)
    return model.noisy_clean_logits(noisy, ids, everywhere, valid.sum(dim=1), block_length)


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("origin", masks.ORIGINS)
@pytest.mark.parametrize("prompt_attention", masks.PROMPT_ATTENTION)
def test_one_forward_gives_the_logits_of_cached_decoding(prompt_attention, origin, shift):
    """The oracle. Prompts of 5, 8 and 2 tokens padded on the left, 11 slots in blocks of 4: the last block is shorter."""
    model = random_model(facts={"prompt_attention": prompt_attention, "block_origin": origin, "logit_shift": shift})
    for slots, block_length in ((11, 4), (8, 1), (6, 8)):
        prompt, valid, answer, noisy = noisy_answers([5, 8, 2], slots)
        with torch.no_grad():
            found = in_one_forward(model, noisy, prompt, valid, answer, block_length)
            wanted = by_cached_decoding(model, noisy, prompt, valid, answer, block_length)
        assert wanted.abs().max() > 1
        assert torch.allclose(found, wanted, atol=1e-4), (slots, block_length, float((found - wanted).abs().max()))


@pytest.mark.parametrize("kind, attention", [("llama", "naive"), ("qwen3", "sdpa")])
def test_one_forward_gives_them_with_this_packages_attention_too(kind, attention):
    from cdlm import families

    model = random_model(kind, facts={"prompt_attention": "causal", "logit_shift": True})
    prompt, valid, answer, noisy = noisy_answers([5, 8, 2], 11)
    with torch.no_grad():
        wanted = in_one_forward(model, noisy, prompt, valid, answer, 4)
        families.set_attention(model.hf, attention, "cpu")
        assert torch.allclose(in_one_forward(model, noisy, prompt, valid, answer, 4), wanted, atol=1e-4)


@settings(max_examples=30, deadline=None)
@given(
    prompt_attention=st.sampled_from(masks.PROMPT_ATTENTION), origin=st.sampled_from(masks.ORIGINS), block_length=st.integers(1, 7),
    slots=st.integers(2, 12), slot=st.integers(0, 11), shift=st.booleans(), what=st.sampled_from(["clean", "noisy"]),
)
def test_a_noisy_block_depends_on_nothing_but_itself_and_the_clean_text_before_it(
    prompt_attention, origin, block_length, slots, slot, shift, what
):
    """Change one token of the clean or of the noisy answer: only the blocks behind it, or only its own block, may notice."""
    slot = slot % slots
    model = MODELS[prompt_attention, origin, shift]
    prompt, valid, answer, noisy = noisy_answers([4, 6], slots)
    changed = {"clean": answer.clone(), "noisy": noisy.clone()}
    changed[what][:, slot] = 57 - changed[what][:, slot]
    with torch.no_grad():
        before = in_one_forward(model, noisy, prompt, valid, answer, block_length)
        after = in_one_forward(model, changed["noisy"], prompt, valid, changed["clean"], block_length)
    position = valid.sum(dim=1)[:, None] + torch.arange(slots)
    block = masks.blocks(position, valid.sum(dim=1), block_length, origin=origin)
    may = block > block[:, slot : slot + 1] if what == "clean" else block == block[:, slot : slot + 1]
    moved = (before - after).abs().amax(dim=-1) > 1e-4
    assert not bool((moved & ~may).any())
    if what == "clean" and bool(may.any()):
        assert bool(moved.any()), "the clean text before a block is read"


MODELS = {
    (prompt, origin, shift): random_model(facts={"prompt_attention": prompt, "block_origin": origin, "logit_shift": shift})
    for prompt, origin, shift in product(masks.PROMPT_ATTENTION, masks.ORIGINS, (False, True))
}


def test_blocks_are_counted_from_the_prompts_end_or_from_zero():
    """Prompts of 3 and 6, positions 0..8, blocks of 4."""
    position, prompt = torch.arange(9).expand(2, 9), torch.tensor([3, 6])
    assert masks.blocks(position, prompt, 4).tolist() == [[-1, -1, -1, 0, 0, 0, 0, 1, 1], [-2, -2, -1, -1, -1, -1, 0, 0, 0]]
    assert masks.blocks(position, prompt, 4, origin="zero").tolist() == [[0, 0, 0, 0, 1, 1, 1, 1, 2]] * 2


def test_masked_diffusion_with_a_level_a_slot_by_hand():
    """Two slots of two tokens, logits 0: each costs log 2. Levels 0.5 and 0.25 over 2 slots: (2 + 4) log 2 / 2 = 3 log 2."""
    level = torch.tensor([[0.5, 0.25]])
    everywhere = torch.ones(1, 2, dtype=torch.bool)
    found = losses.masked_diffusion(torch.zeros(1, 2, 2), torch.zeros(1, 2, dtype=torch.long), everywhere, level, torch.tensor([2.0]))
    assert found.item() == pytest.approx(3 * torch.tensor(2.0).log().item())


def test_next_token_by_hand():
    """Rows of one and two asked tokens at log 2 and 0 each: (log 2 + (log 2 + 0) / 2) / 2."""
    logits = torch.zeros(2, 2, 2)
    logits[1, 1, 0] = 50.0
    asked = torch.tensor([[True, False], [True, True]])
    found = losses.next_token(logits, torch.zeros(2, 2, dtype=torch.long), asked)
    assert found.item() == pytest.approx(0.75 * torch.tensor(2.0).log().item(), abs=1e-6)


# ---- the objectives ----------------------------------------------------------------------------------------------------

BUDGET, BLOCK = 12, 4
CAUSAL = {"prompt_attention": "causal", "logit_shift": True}


def examples(lengths=((5, 3), (8, 9), (2, 4), (6, 11))) -> list[Example]:
    """Questions of these prompt and answer lengths."""
    draw = torch.Generator().manual_seed(4)
    texts = [[torch.randint(3, 58, (n,), generator=draw).tolist() for n in pair] for pair in lengths]
    return [Example(i, "all", "", "", prompt, answer) for i, (prompt, answer) in enumerate(texts)]


def trainer(tmp_path, objective: str, *, facts=CAUSAL, rows=None, block_length=BLOCK, **values) -> CDLMTrainer:
    model = random_model(facts=facts)
    args = CDLMConfig(
        output_dir=str(tmp_path), objective=objective, block_length=block_length, use_cpu=True, disable_tqdm=True,
        dataloader_pin_memory=False, save_strategy="no", logging_steps=1, warmup_steps=0, lr_scheduler_type="constant",
        **{"max_steps": 2, "per_device_train_batch_size": 4, "learning_rate": 1e-3, **values},
    )
    dataset = AnswerNoise(rows or examples(), BUDGET, 0, block_length if objective == "bd3lm" else None)
    whole = {"bd3lm": block_length, "ar": 1, "mdlm": None}[objective]
    return CDLMTrainer(model, args, dataset, Collator(model, BUDGET, whole))


def loss_of(t: CDLMTrainer, rows: list[int]) -> float:
    with torch.no_grad():
        return float(t.compute_loss(None, t.data_collator([t.train_dataset[i] for i in rows])))


@pytest.mark.parametrize("complementary", [False, True])
@pytest.mark.parametrize("facts", [CAUSAL, {"block_origin": "zero"}])
def test_bd3lm_is_the_loop_over_rows_blocks_and_slots(tmp_path, facts, complementary):
    """Each row alone, by cached decoding. Answers of 3, 9, 4 and 11 tokens end with their end token in slots 3, 9, 4 and 11."""
    t = trainer(tmp_path, "bd3lm", facts=facts, complementary=complementary)
    model, total = t.diffusion, 0.0
    for i, example in enumerate(examples()):
        row = t.train_dataset[i]
        start = len(example.prompt_ids) if model.facts.block_origin == "zero" else 0
        block = [(start + j) // BLOCK - start // BLOCK for j in range(BUDGET)]
        answer = example.answer_ids + [EOS] * (BUDGET - len(example.answer_ids))
        slots = [j for j in range(BUDGET) if block[j] <= block[len(example.answer_ids)]]
        level = [0.02 + 0.98 * float(row["levels"][block[j]]) for j in slots]
        masked = [float(row["uniform"][j]) < level[j] for j in slots]
        prompt, clean = torch.tensor([example.prompt_ids]), torch.tensor([answer[: len(slots)]])
        for view in (masked, [not m for m in masked])[: 1 + complementary]:
            noisy = torch.where(torch.tensor([view]), MASK, clean)
            with torch.no_grad():
                logits = by_cached_decoding(model, noisy, prompt, torch.ones_like(prompt, dtype=torch.bool), clean, BLOCK)[0]
            for j in range(len(slots)):
                if view[j]:
                    total += float(F.cross_entropy(logits[j], clean[0, j])) / (1.0 if complementary else level[j]) / len(slots) / 4
    assert loss_of(t, [0, 1, 2, 3]) == pytest.approx(total, rel=1e-4)


def test_complementary_masks_make_every_slot_a_target_once(tmp_path, monkeypatch):
    asked = []
    whole = losses.masked_diffusion_from_hidden
    monkeypatch.setattr(losses, "masked_diffusion_from_hidden", lambda *args: (asked.append(args[3]), whole(*args))[1])
    t = trainer(tmp_path, "bd3lm", complementary=True)
    loss_of(t, [0, 1, 2, 3])
    assert len(asked) == 2 and not bool((asked[0] & asked[1]).any())
    # 3 + 1 tokens fill a block of 4, 9 + 1 three, 4 + 1 two, 11 + 1 three.
    assert (asked[0] | asked[1]).sum(dim=1).tolist() == [4, 12, 8, 12]
    assert bool(asked[0].any()) and bool(asked[1].any())


@pytest.mark.parametrize("objective", ["bd3lm", "ar"])
def test_the_loss_of_a_row_does_not_depend_on_its_batch(tmp_path, objective):
    t = trainer(tmp_path, objective)
    assert loss_of(t, [0, 1, 2, 3]) == pytest.approx(sum(loss_of(t, [i]) for i in range(4)) / 4, rel=1e-4)


def test_ar_is_transformers_own_loss(tmp_path):
    t = trainer(tmp_path, "ar")
    for i, example in enumerate(examples()):
        ids = torch.tensor([[*example.prompt_ids, *example.answer_ids, EOS]])
        labels = ids.clone()
        labels[:, : len(example.prompt_ids)] = -100
        with torch.no_grad():
            wanted = float(t.diffusion.hf(input_ids=ids, labels=labels).loss)
        assert loss_of(t, [i]) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("values", [{"objective": "bd3lm"}, {"objective": "bd3lm", "complementary": True}, {"objective": "ar"}])
def test_training_moves_the_loss_down(tmp_path, values):
    """The same four rows again and again, on the noise of epoch 0 at first and at last."""
    t = trainer(tmp_path, max_steps=30, **values)
    before = loss_of(t, [0, 1, 2, 3])
    t.train()
    t.train_dataset.set_epoch(0)
    assert loss_of(t, [0, 1, 2, 3]) < 0.7 * before
    assert f"{values['objective']}_loss" in t.state.log_history[0]
    json.dumps(t.state.log_history)


@pytest.mark.parametrize("values", [{"objective": "mdlm"}, {"objective": "ar"}, {"objective": "bd3lm", "noise_first_cap": 0.5}])
def test_complementary_masks_elsewhere_are_refused(tmp_path, values):
    with pytest.raises(ValueError, match="complementary masks belong to objective bd3lm with noise_first_cap 1"):
        CDLMConfig(output_dir=str(tmp_path), use_cpu=True, complementary=True, **values)
