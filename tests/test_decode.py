"""Contracts 4 and 5, the budget, the prompt, and what is counted."""

import dataclasses

import pytest
import torch
from conftest import random_hf, random_model, random_prompts
from hypothesis import given, settings
from hypothesis import strategies as st

from cdlm.decode import DecodeConfig, changed, choose, decode
from cdlm.families.base import DiffusionLM, Facts

WAYS = ({"confidence_threshold": 0.5}, {"confidence_threshold": 0.2}, {"tokens_per_step": 3}, {"steps": 7})


def config(**values) -> DecodeConfig:
    return DecodeConfig(**{"max_new_tokens": 24, "block_length": 8, **({} if _way(values) else {"confidence_threshold": 0.4}), **values})


def _way(values) -> bool:
    return any(key in values for key in ("confidence_threshold", "tokens_per_step", "steps"))


def ending_model(**values):
    """A random model whose end token is likely, so that rows stop in different blocks."""
    model = random_model(**values)
    with torch.no_grad():
        model.head.weight[2] += 0.35 * model.head.weight[7:15].sum(dim=0)
    return model


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["qwen2", "llama"])
@pytest.mark.parametrize("budget", [24, 21])
def test_cached_equals_uncached_and_a_batch_equals_each_row_alone(way, kind, budget):
    model = ending_model(kind=kind)
    ids, valid = random_prompts([5, 9, 12, 3, 7, 1])
    asked = config(max_new_tokens=budget, **way)
    cached = decode(model, ids, valid, asked)
    uncached = decode(model, ids, valid, changed(asked, use_cache=False))
    assert torch.equal(cached.ids_BN, uncached.ids_BN)
    assert (cached.steps, cached.output_tokens, cached.stop) == (uncached.steps, uncached.output_tokens, uncached.stop)
    for row in range(ids.shape[0]):
        alone = decode(model, ids[row][valid[row]][None], torch.ones(1, int(valid[row].sum()), dtype=torch.bool), asked)
        assert torch.equal(alone.ids_BN[0], cached.ids_BN[row])
        assert alone.steps[0] == cached.steps[row] and alone.commit_forwards[0] == cached.commit_forwards[row]


def test_rows_of_one_batch_stop_in_different_blocks():
    """The case above is only worth something if it happens."""
    ids, valid = random_prompts([5, 9, 12, 3, 7, 1])
    out = decode(ending_model(), ids, valid, config())
    assert len(set(out.commit_forwards)) > 1 and "eos" in out.stop


@pytest.mark.parametrize("full", [False, True])
def test_left_padding_changes_nothing(full):
    model = ending_model()
    ids, valid = random_prompts([6, 9])
    asked = config(block_causal=not full, use_cache=not full)
    wider = torch.nn.functional.pad(ids, (5, 0), value=0), torch.nn.functional.pad(valid, (5, 0), value=False)
    assert torch.equal(decode(model, ids, valid, asked).ids_BN, decode(model, *wider, asked).ids_BN)
    rubbish = wider[0].masked_fill(~wider[1], 33)  # what stands in padding is never looked at
    assert torch.equal(decode(model, rubbish, wider[1], asked).ids_BN, decode(model, *wider, asked).ids_BN)


def test_block_length_one_with_a_causal_prompt_is_autoregressive_greedy_decoding():
    """Contract 5, against transformers' own cached generate."""
    hf = random_hf("llama", seed=3)
    facts = Facts(mask_token_id=1, eos_token_ids=(2,), pad_token_id=0, logit_shift=True, prompt_attention="causal")
    ids, valid = random_prompts([8, 8])
    ours = decode(DiffusionLM(hf, facts, "native"), ids, valid, config(block_length=1, max_new_tokens=20, stop_at_eos=False))
    theirs = hf.generate(
        ids, attention_mask=valid.long(), do_sample=False, max_new_tokens=20, min_new_tokens=20, eos_token_id=None,
        suppress_tokens=[1], pad_token_id=0,
    )[:, 8:]
    assert torch.equal(ours.filled_BN, theirs)


def test_shifted_logits_cached_equals_uncached():
    """The first slot of a block is predicted by the last row of what precedes it, which the cache has to keep."""
    model = random_model(facts={"logit_shift": True})
    ids, valid = random_prompts([5, 9, 2])
    asked = config(block_length=4, stop_at_eos=False)
    assert torch.equal(decode(model, ids, valid, asked).ids_BN, decode(model, ids, valid, changed(asked, use_cache=False)).ids_BN)


def test_selected_rows_of_a_cache_go_on_as_they_would_alone():
    """Keys, positions, and the boundary row that predicts the first slot of a shifted model."""
    model = random_model(facts={"logit_shift": True})
    ids, valid = random_prompts([5, 9, 2])
    block = torch.full((3, 4), 1)
    with torch.no_grad():
        whole = model.denoise(block, model.prefill(ids, valid, 8, 4), 4)
        cache = model.prefill(ids, valid, 8, 4)
        cache.select(torch.tensor([2, 0]))
        assert torch.allclose(model.denoise(block[:2], cache, 4), whole[[2, 0]], atol=1e-5)
    assert not torch.allclose(whole[0], whole[2], atol=1e-2)


@settings(max_examples=25, deadline=None)
@given(budget=st.integers(1, 20), block=st.integers(1, 9), tau=st.floats(0, 1), full=st.booleans(), stop=st.booleans())
def test_no_mask_in_the_output_and_the_budget_is_exact(budget, block, tau, full, stop):
    ids, valid = random_prompts([4, 6])
    out = decode(
        MODEL, ids, valid,
        DecodeConfig(budget, block, confidence_threshold=tau, block_causal=not full, use_cache=not full, stop_at_eos=stop),
    )
    assert out.ids_BN.shape == (2, budget)
    assert not bool((out.ids_BN == 1).any())
    for row in range(2):
        assert 1 <= out.output_tokens[row] <= out.decoded_tokens[row] <= budget
        assert -(-out.decoded_tokens[row] // block) <= out.steps[row] <= out.decoded_tokens[row]
        assert out.forwards[row] == out.steps[row]
        if out.stop[row] == "length":
            assert out.output_tokens[row] == budget
        else:
            assert out.ids_BN[row, out.output_tokens[row] - 1] == 2
            assert bool((out.ids_BN[row, out.output_tokens[row] :] == 0).all())


MODEL = ending_model()


def test_a_mask_token_typed_into_the_prompt_stays():
    model = random_model()
    ids, valid = random_prompts([6])
    ids[0, 2] = 1
    before = ids.clone()
    seen = []
    decode(model, ids, valid, config(block_causal=False, use_cache=False), callback=lambda step: seen.append(step.first_slot))
    assert torch.equal(ids, before) and seen
    other = before.clone()
    other[0, 2] = 9
    asked = config(stop_at_eos=False)
    assert not torch.equal(decode(model, before, valid, asked).ids_BN, decode(model, other, valid, asked).ids_BN)


def test_steps_cut_a_budget_exactly():
    """10 steps over 3 blocks are 4 + 3 + 3; a block of 8 in 4 steps reveals 2 + 2 + 2 + 2, in 3 steps 3 + 3 + 2."""
    ids, valid = random_prompts([5])
    counts: dict[int, list[int]] = {}
    out = decode(
        random_model(), ids, valid, config(steps=10, block_causal=False, use_cache=False, stop_at_eos=False),
        callback=lambda step: counts.setdefault(step.block, []).append(int(step.reveal_AS.sum())),
    )
    assert counts == {0: [2, 2, 2, 2], 1: [3, 3, 2], 2: [3, 3, 2]}
    assert out.steps == [10]


def test_stopping_at_the_end_token_finishes_its_block_and_counts_up_to_it():
    """A model that says the end token (2) everywhere: one block of 8 is filled, one token is output."""
    model = random_model()
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.weight[2] = 0.0
    always = dataclasses.replace(model.facts, eos_token_ids=(2, 5))
    model.facts = always
    ids, valid = random_prompts([4])
    out = decode(model, ids, valid, config(tokens_per_step=1))  # all logits equal: the first allowed token, 0, is taken
    assert out.stop == ["length"] and out.steps == [24] and out.output_tokens == [24]
    model.facts = dataclasses.replace(always, eos_token_ids=(0,), pad_token_id=3)
    out = decode(model, ids, valid, config(tokens_per_step=1))
    assert out.stop == ["eos"] and out.steps == [8] and out.output_tokens == [1] and out.decoded_tokens == [8]
    assert out.answer(0, (0,)) == []
    whole = decode(model, ids, valid, config(tokens_per_step=1, stop_at_eos=False))
    assert whole.steps == [24] and whole.output_tokens == [1]


def test_the_finished_block_is_committed_by_the_next_blocks_first_step():
    """Forwards of the model: one a step, none for a commit; the first carries prompt + block, the first of a later block 2B."""
    model = random_model()
    widths = []
    rows = model._rows
    model._rows = lambda ids, *rest: (widths.append(ids.shape[1]), rows(ids, *rest))[1]
    ids, valid = random_prompts([5])
    out = decode(model, ids, valid, config(tokens_per_step=4, stop_at_eos=False))
    assert widths == [5 + 8, 8, 16, 8, 16, 8]
    assert (out.steps, out.commit_forwards, out.forwards) == ([6], [3], [6])


def test_sampling_depends_on_a_rows_own_seed_only():
    model = ending_model()
    ids, valid = random_prompts([5, 9, 3])
    asked = config(temperature=1.0)
    batch = decode(model, ids, valid, asked, seeds=[1, 2, 3])
    again = decode(model, ids, valid, asked, seeds=[1, 2, 3])
    other = decode(model, ids, valid, asked, seeds=[4, 5, 6])
    alone = decode(model, ids[1][valid[1]][None], torch.ones(1, 9, dtype=torch.bool), asked, seeds=[2])
    assert torch.equal(batch.ids_BN, again.ids_BN) and not torch.equal(batch.ids_BN, other.ids_BN)
    assert torch.equal(alone.ids_BN[0], batch.ids_BN[1])


def test_sampled_tokens_follow_the_softmax():
    """10,000 draws of one slot from p = (0.5, 0.3, 0.2): each share within 4 standard deviations (at most 0.02)."""
    logits = torch.tensor([0.5, 0.3, 0.2, 1.0]).log().expand(1, 10_000, 4).clone()
    token, confidence = choose(logits, 3, 1.0, [torch.Generator().manual_seed(0)])
    shares = torch.bincount(token[0], minlength=4) / 10_000
    assert torch.allclose(shares, torch.tensor([0.5, 0.3, 0.2, 0.0]), atol=0.02)
    assert torch.allclose(confidence[0], torch.tensor([0.5, 0.3, 0.2])[token[0]], atol=1e-6)


def test_a_logit_that_is_not_finite_is_an_error_with_its_place():
    model = random_model()
    with torch.no_grad():
        model.head.weight[5] = torch.nan
    ids, valid = random_prompts([4])
    with pytest.raises(FloatingPointError, match="block 0, step 0"):
        decode(model, ids, valid, config())


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"block_length": 0}, "block_length is 0"),
        ({"confidence_threshold": 1.5}, "confidence_threshold is 1.5"),
        ({"confidence_threshold": 0.5, "tokens_per_step": 1}, "confidence_threshold, tokens_per_step"),
        ({"confidence_threshold": None}, "given: none"),
        ({"tokens_per_step": 0}, "tokens_per_step is 0"),
        ({"steps": 0}, "steps is 0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"block_causal": False}, "use_cache needs block_causal"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(values, words):
    with pytest.raises(ValueError, match=words.replace(".", r"\.")):
        config(**values)


def test_bad_prompts_are_refused():
    model = random_model()
    ids, valid = random_prompts([4, 4])
    for prompt, mask in ((ids[:, :0], valid[:, :0]), (ids, valid[:, :2]), (ids, valid & torch.tensor([True, True, True, False]))):
        with pytest.raises(ValueError, match="padded on the left"):
            decode(model, prompt, mask, config())
    with pytest.raises(ValueError, match="one seed for each of the 2 rows"):
        decode(model, ids, valid, config(temperature=0.5), seeds=[1])
