"""Contracts 4 and 5, the budget, the prompt, and what is counted."""

import dataclasses

import pytest
import torch
from conftest import random_hf, random_model, random_prompts
from hypothesis import given, settings
from hypothesis import strategies as st

from cdlm import unmask
from cdlm.decode import DecodeConfig, changed, choose, decode, likely, score
from cdlm.families.base import DiffusionLM, Facts

WAYS = ({"confidence_threshold": 0.5}, {"confidence_threshold": 0.2}, {"tokens_per_step": 3}, {"steps": 7})


def config(**values) -> DecodeConfig:
    return DecodeConfig(**{"max_new_tokens": 24, "block_length": 8, **({} if _way(values) else {"confidence_threshold": 0.4}), **values})


def _way(values) -> bool:
    return any(key in values for key in ("confidence_threshold", "factor", "entropy_bound", "tokens_per_step", "steps", "steps_per_block"))


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
    assert torch.equal(ours.filled_BM, theirs)


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
    decode(model, ids, valid, config(block_causal=False, use_cache=False), callback=lambda step: seen.append(step.first_slot_A))
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
    """10,000 draws of one slot from p = (0.25, 0.15, 0.1, mask 0.5): the mask is never drawn, so shares are 0.5, 0.3 and 0.2 within 4
    standard deviations (at most 0.02); confidences are the probabilities with the mask among them."""
    probability = torch.tensor([0.25, 0.15, 0.1, 0.5])
    logits = probability.log().expand(1, 10_000, 4).clone()
    token, confidence, all_of_them = choose(logits, 3, 1.0, [torch.Generator().manual_seed(0)])
    shares = torch.bincount(token[0], minlength=4) / 10_000
    assert torch.allclose(shares, torch.tensor([0.5, 0.3, 0.2, 0.0]), atol=0.02)
    assert torch.allclose(confidence[0], probability[token[0]], atol=1e-6)
    assert torch.allclose(all_of_them, probability.expand_as(all_of_them), atol=1e-6)


def test_the_mask_is_never_chosen_and_counts_in_the_confidence():
    """Greedy: the mask has 0.6; of the others 0.3 is taken, and 0.3 is its confidence."""
    token, confidence, _ = choose(torch.tensor([[[0.1, 0.3, 0.6]]]).log(), 2, 0.0, None)
    assert token.tolist() == [[1]] and confidence.item() == pytest.approx(0.3)


def test_top_k_and_top_p_leave_the_likely_tokens():
    """p = 0.1, 0.2, 0.3, 0.4. top_k 2 leaves 0.3 and 0.4, that is 3/7 and 4/7; top_p 0.4 leaves 0.4 alone, since it adds up to 0.4
    by itself; top_p 0.41 takes 0.3 too."""
    logits = torch.tensor([[[0.1, 0.2, 0.3, 0.4]]]).log()
    assert torch.allclose(likely(logits, 2, None).softmax(-1)[0, 0], torch.tensor([0, 0, 3 / 7, 4 / 7]))
    assert likely(logits, None, 0.39).softmax(-1)[0, 0].tolist() == [0, 0, 0, 1]
    halves = torch.tensor([[[0.5, 0.25, 0.25]]]).log()  # exact in binary: the first alone adds up to 0.5
    assert likely(halves, None, 0.5).isfinite().tolist() == [[[True, False, False]]]
    assert likely(halves, None, 0.5, temperature=4.0).isfinite().sum() == 2  # flatter: 0.37, 0.31, 0.31
    assert torch.allclose(likely(logits, None, 0.41).softmax(-1)[0, 0], torch.tensor([0, 0, 3 / 7, 4 / 7]))
    assert torch.equal(likely(logits, 4, 1.0), logits) and torch.equal(likely(logits, None, None), logits)


def test_scores_of_the_orders():
    """Two slots, p = (0.5, 0.5, 0) and (0.6, 0.2, 0.2). Entropies ln 2 = 0.693 and 0.6 ln(1/0.6) + 0.4 ln 5 = 0.950; leads 0 and 0.4."""
    probability = torch.tensor([[[0.5, 0.5, 0.0], [0.6, 0.2, 0.2]]])
    confidence = probability.max(-1).values
    assert torch.allclose(score("confidence", confidence, probability), torch.tensor([[0.5, 0.6]]))
    assert torch.allclose(score("entropy", confidence, probability), torch.tensor([[-0.693147, -0.950271]]), atol=1e-5)
    assert torch.allclose(score("margin", confidence, probability), torch.tensor([[0.0, 0.4]]))
    assert score("sequential", confidence, probability).tolist() == [[0.0, -1.0]]


# ---- blocks from position 0 ------------------------------------------------------------------------------------------

ZERO = {"block_origin": "zero", "prompt_attention": "block_causal"}
ZERO_WAYS = (
    {"confidence_threshold": 0.3}, {"tokens_per_step": 1}, {"steps_per_block": 3}, {"confidence_threshold": 0.2, "steps_per_block": 2},
    {"tokens_per_step": 2, "order": "sequential"}, {"tokens_per_step": 1, "order": "entropy"}, {"tokens_per_step": 3, "order": "margin"},
    {"steps": 9}, {"confidence_threshold": 0.3, "top_k": 5}, {"factor": 1.2}, {"entropy_bound": 1.5, "order": "entropy"},
)  # fmt: skip
LENGTHS = [5, 9, 12, 3, 7, 1, 8]  # with blocks of 4: tails of 1, 1, 0, 3, 3, 1 and 0 tokens; prompts shorter than a block among them


@pytest.mark.parametrize("way", ZERO_WAYS, ids=str)
@pytest.mark.parametrize("facts", [{}, {"logit_shift": True}, {"prompt_attention": "causal"}], ids=["plain", "shift", "causal"])
def test_blocks_from_zero_cached_equals_uncached_and_a_batch_equals_each_row_alone(way, facts):
    model = ending_model(facts={**ZERO, **facts})
    ids, valid = random_prompts(LENGTHS)
    asked = DecodeConfig(10, 4, **way)
    cached, uncached = decode(model, ids, valid, asked), decode(model, ids, valid, dataclasses.replace(asked, use_cache=False))
    assert torch.equal(cached.filled_BM, uncached.filled_BM)
    assert (cached.steps, cached.output_tokens, cached.stop) == (uncached.steps, uncached.output_tokens, uncached.stop)
    for row, length in enumerate(LENGTHS):
        alone = decode(model, ids[row][valid[row]][None], torch.ones(1, length, dtype=torch.bool), asked)
        assert torch.equal(alone.filled_BM[0], cached.filled_BM[row]) and alone.steps[0] == cached.steps[row]
        assert alone.commit_forwards[0] + (length < 4) == cached.commit_forwards[row]  # a short prompt alone has nothing to commit


def naive_block_decoding(model, prompt: list[int], budget: int, block: int, tau: float, least: int, stop: bool) -> list[int]:
    """Judge of the above: one row, no cache, no batch, whole blocks from position 0, each forward over all up to the block's end."""
    blocks = -(-(len(prompt) + budget) // block)
    ids = prompt + [1] * (blocks * block - len(prompt))
    for first in range(len(prompt) // block * block, len(ids), block):
        end = first + block
        while 1 in ids[max(first, len(prompt)) : end]:
            here = torch.tensor([ids[:end]])
            logits = model.sequence_logits(here, torch.ones_like(here, dtype=torch.bool), torch.tensor([len(prompt)]), block)[0].detach()
            probability = logits.softmax(-1)
            probability[:, 1] = -1
            slots = [i for i in range(max(first, len(prompt)), end) if ids[i] == 1]
            best = {i: (float(probability[i].max()), int(probability[i].argmax())) for i in slots}
            ordered = sorted(slots, key=lambda i: -best[i][0])
            for i in [*ordered[:least], *(i for i in ordered[least:] if best[i][0] > tau)]:
                ids[i] = best[i][1]
        if stop and 2 in ids[max(first, len(prompt)) : end]:
            break
    return ids[len(prompt) :]


@pytest.mark.parametrize("facts", [ZERO, {**ZERO, "logit_shift": True}], ids=["plain", "shift"])
@pytest.mark.parametrize("tau, least", [(0.15, 1), (0.3, 2), (0.9, 1)])
def test_blocks_from_zero_equal_a_naive_loop(facts, tau, least):
    model = ending_model(facts=facts)
    ids, valid = random_prompts(LENGTHS)
    out = decode(model, ids, valid, DecodeConfig(9, 4, confidence_threshold=tau, steps_per_block=4 // least))
    for row in range(len(LENGTHS)):
        expected = naive_block_decoding(model, ids[row][valid[row]].tolist(), 9, 4, tau, least, stop=True)
        assert out.filled_BM[row].tolist() == expected[:12] + [1] * (12 - len(expected))
        assert out.decoded_tokens[row] == len([t for t in expected if t != 1])


def test_an_end_token_in_the_tail_of_a_prompt_stops_nothing():
    """A chat prompt ends with end tokens of its own; with blocks from position 0 they share the first block with the answer."""
    model = random_model(facts=ZERO)
    with torch.no_grad():
        model.head.weight[2] = 0.0  # never says it itself: of 57 random logits the largest is above 0
    ids = torch.tensor([[5, 6, 7, 8, 9, 2, 2]])
    out = decode(model, ids, torch.ones_like(ids, dtype=torch.bool), DecodeConfig(9, 4, tokens_per_step=1))
    assert 2 not in out.ids_BN and out.decoded_tokens == [9] and out.stop == ["length"]
    assert out.steps == [9]  # 7 + 9 = 16 tokens: four whole blocks


def test_the_last_block_is_filled_whole_and_cut():
    """5 + 6 = 11 tokens are three blocks of 4: 7 answer slots are filled, 6 are given out."""
    ids, valid = random_prompts([5])
    out = decode(random_model(facts=ZERO), ids, valid, DecodeConfig(6, 4, tokens_per_step=1, stop_at_eos=False))
    assert out.ids_BN.shape == (1, 6) and out.filled_BM.shape == (1, 6 + 4 - 1)
    assert out.steps == [7] and out.decoded_tokens == [7] and out.output_tokens == [6]
    assert torch.equal(out.filled_BM[:, :6], out.ids_BN) and out.filled_BM[0, 7:].tolist() == [1, 1]


def test_a_mask_token_in_the_tail_of_a_prompt_stays():
    model, ids = random_model(facts=ZERO), torch.tensor([[5, 6, 7, 8, 9, 1]])
    seen, everywhere = [], torch.ones_like(ids, dtype=torch.bool)
    decode(model, ids, everywhere, DecodeConfig(4, 4, tokens_per_step=1), callback=lambda s: seen.append((s.ids_AS, s.reveal_AS)))
    assert seen[0][0][0, :2].tolist() == [9, 1] and not bool(torch.stack([reveal[:, :2] for _, reveal in seen[:2]]).any())


def test_a_bidirectional_prompt_with_blocks_from_zero_has_no_exact_cache():
    model = random_model(facts={"block_origin": "zero"})
    ids, valid = random_prompts([5])
    with pytest.raises(ValueError, match="decode with use_cache=False"):
        decode(model, ids, valid, config())
    assert decode(model, ids, valid, config(use_cache=False)).ids_BN.shape == (1, 24)


def test_another_rule_may_write_a_slot_again_but_never_the_prompt():
    """A rule that names every slot of the block at every step: the prompt's tail stays, all else is written."""
    model, ids = random_model(facts=ZERO), torch.tensor([[5, 6, 7, 8, 9, 11]])
    tails = []
    out = decode(
        model, ids, torch.ones_like(ids, dtype=torch.bool), DecodeConfig(4, 4, tokens_per_step=1, stop_at_eos=False),
        rule=lambda score, is_open, step: torch.ones_like(is_open), callback=lambda s: tails.append(s.ids_AS[0, :2].tolist()),
    )
    assert out.steps == [2] and tails[0] == [9, 11]
    once = decode(model, ids, torch.ones_like(ids, dtype=torch.bool), DecodeConfig(4, 4, tokens_per_step=4, stop_at_eos=False))
    assert torch.equal(out.ids_BN, once.ids_BN)


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
        ({"steps_per_block": 0}, "steps is 0"),
        ({"steps": 3, "steps_per_block": 1}, "given: steps, steps_per_block"),
        ({"order": "random"}, "order is 'random'; allowed: confidence, entropy, margin, sequential"),
        ({"order": "entropy", "confidence_threshold": 0.5}, "order 'entropy' gives none"),
        ({"schedule": "cosine"}, "schedule is 'cosine'"),
        ({"schedule": "timesteps"}, "schedule 'timesteps' spreads steps"),
        ({"factor": 1.0, "order": "entropy"}, "factor asks for probabilities"),
        ({"entropy_bound": 1.0}, "entropy_bound adds up entropies"),
        ({"approximate_cache": "dual"}, "use_cache is exact"),
        ({"approximate_cache": "both", "block_causal": False, "use_cache": False}, "approximate_cache is 'both'; allowed: prefix, dual"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
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


# ---- approximate caches of full attention ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["prefix", "dual"])
@pytest.mark.parametrize("shift", [False, True])
def test_approximate_caches_are_exact_for_one_layer(kind, shift):
    """Keys of the first layer depend on the tokens alone, and tokens outside the active block do not change while it is refined: with one
    layer nothing is stale, except that a shifted model's first slot is predicted by a row outside the window, which has seen the block."""
    model = ending_model(facts={"logit_shift": shift})
    model.hf.model.layers = model.hf.model.layers[:1]
    model.hf.config.num_hidden_layers = 1
    ids, valid = random_prompts([5, 9, 2])
    asked = DecodeConfig(12, 4, confidence_threshold=0.3, block_causal=False, use_cache=False)
    cached = decode(model, ids, valid, dataclasses.replace(asked, approximate_cache=kind))
    exact = decode(model, ids, valid, asked)
    if not shift:
        assert torch.equal(cached.filled_BM, exact.filled_BM) and cached.steps == exact.steps
    for row, length in enumerate([5, 9, 2]):
        alone = decode(
            model, ids[row][valid[row]][None], torch.ones(1, length, dtype=torch.bool), dataclasses.replace(asked, approximate_cache=kind)
        )
        assert torch.equal(alone.filled_BM[0], cached.filled_BM[row])


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("kind", ["prefix", "dual"])
def test_approximate_caches_compute_a_window_against_what_was(kind, shift):
    """The rows of a window against keys that were kept equal the rows of a whole forward as long as nothing has changed, also with padding,
    and with two layers they differ once the block has: that is what makes these caches approximate."""
    model = random_model(facts={"logit_shift": shift})
    ids, valid = random_prompts([6, 9])
    ids, valid = torch.cat([ids, torch.full((2, 8), 1)], dim=1), torch.cat([valid, torch.ones(2, 8, dtype=torch.bool)], dim=1)
    window = slice(9, 13 if kind == "dual" else 17)
    with torch.no_grad():
        cache = model.new_whole_cache(17)
        whole = model.window_hidden(ids, valid, 0, cache)
        assert torch.allclose(whole[valid], model.sequence_hidden(ids, valid)[valid], atol=1e-5)
        assert torch.allclose(model.window_hidden(ids[:, window], valid, 9, cache), whole[:, window], atol=1e-5)
        changed_ids = ids.clone()
        changed_ids[:, 9:11] = 20
        there = model.window_hidden(changed_ids[:, window], valid, 9, cache)
        exact = model.sequence_hidden(changed_ids, valid)[:, window]
        assert 1e-3 < float((there - exact).abs().max())
        single = model.new_whole_cache(14)
        model.window_hidden(ids[:1, 3:], valid[:1, 3:], 0, single)
        assert torch.allclose(model.window_hidden(changed_ids[:1, window], valid[:1, 3:], 6, single), there[:1], atol=1e-5)


@pytest.mark.parametrize("kind", ["prefix", "dual"])
def test_approximate_caches_take_fewer_tokens_a_step(kind):
    """Budget 12 in blocks of 4 after a prompt of 5: the first step of a block computes 17 tokens, the others the window: 4, or all from the
    block on (12, 8, 4)."""
    model, widths = random_model(), []
    rows = model._rows
    model._rows = lambda ids, *rest: (widths.append(ids.shape[1]), rows(ids, *rest))[1]
    ids, valid = random_prompts([5])
    asked = DecodeConfig(12, 4, tokens_per_step=2, block_causal=False, use_cache=False, approximate_cache=kind, stop_at_eos=False)
    decode(model, ids, valid, asked)
    assert widths == ([17, 4] * 3 if kind == "dual" else [17, 12, 17, 8, 17, 4])


def interval(prompt, response, **values):
    return DecodeConfig(
        **{"max_new_tokens": 12, "block_length": 4, "tokens_per_step": 1} | values, block_causal=False, use_cache=False,
        approximate_cache="interval", prompt_refresh=prompt, response_refresh=response,
    )  # fmt: skip


def test_interval_refresh_computes_everything_the_answer_or_the_block():
    """Prompt of 5, budget 12 in blocks of 4, one token a step, 12 steps: all 17 tokens at steps 0, 6; the answer's 12 at 2, 4, 8, 10; else
    the block's 4."""
    model, widths = random_model(), []
    rows = model._rows
    model._rows = lambda ids, *rest: (widths.append(ids.shape[1]), rows(ids, *rest))[1]
    ids, valid = random_prompts([5])
    decode(model, ids, valid, interval(6, 2, stop_at_eos=False))
    assert widths == [17, 4, 12, 4, 12, 4] * 2


@pytest.mark.parametrize("shift", [False, True])
def test_interval_refresh_is_exact_at_interval_1_and_a_batch_is_its_rows(shift):
    """Everything refreshed at every step is the naive decoding; with longer intervals a batch still is each row alone, also once rows have
    stopped, and what is said differs from the naive decoding's."""
    model = ending_model(facts={"logit_shift": shift})
    lengths = [5, 9, 2, 7, 3, 11, 4]
    ids, valid = random_prompts(lengths)
    naive = decode(model, ids, valid, DecodeConfig(12, 4, tokens_per_step=1, block_causal=False, use_cache=False))
    assert torch.equal(decode(model, ids, valid, interval(1, 1)).filled_BM, naive.filled_BM)
    old = decode(model, ids, valid, interval(100, 100))
    assert shift or len(set(old.steps)) > 1, "some row stops before another"
    for row, length in enumerate(lengths):
        alone = decode(model, ids[row][valid[row]][None], torch.ones(1, length, dtype=torch.bool), interval(100, 100))
        assert torch.equal(alone.filled_BM[0], old.filled_BM[row]) and alone.steps[0] == old.steps[row]
    assert not torch.equal(old.filled_BM, naive.filled_BM)


def test_interval_refresh_needs_rows_that_go_together():
    model = random_model()
    ids, valid = random_prompts([5])
    with pytest.raises(ValueError, match="takes no rule of one's own"):
        decode(model, ids, valid, interval(4, 2), rule=unmask.top_k(1))
    with pytest.raises(ValueError, match="begin at the prompt's end"):
        decode(random_model(facts=ZERO), ids, valid, interval(4, 2))
    for prompt, response, words in ((0, 2, "prompt_refresh is 0"), (4, None, "response_refresh is None")):
        with pytest.raises(ValueError, match=words):
            interval(prompt, response)
    with pytest.raises(ValueError, match="needs tokens_per_step or steps"):
        interval(4, 2, tokens_per_step=None, confidence_threshold=0.5)
    with pytest.raises(ValueError, match="prompt_refresh: only approximate_cache 'interval'"):
        DecodeConfig(12, 4, tokens_per_step=1, prompt_refresh=4)


def test_steps_are_at_most_those_asked_for_where_blocks_start_at_zero():
    """N 16, B 4, 8 steps over at most 5 blocks are 2, 2, 2, 1, 1. A prompt of 8 tokens has 4 blocks: 7 steps. One of 9 leaves 3 open slots
    in the first block, 2 a step: 2 steps; of 10 or 11 leaves 2 or 1: 1 step."""
    model = random_model(facts=ZERO)
    ids, valid = random_prompts([8, 9, 10, 11])
    out = decode(model, ids, valid, DecodeConfig(16, 4, steps=8, stop_at_eos=False))
    assert out.steps == [7, 8, 7, 7]


def test_a_temperature_of_almost_nothing_is_greedy():
    model = random_model()
    ids, valid = random_prompts([5, 9])
    greedy = decode(model, ids, valid, config(tokens_per_step=1))
    for temperature in (1e-310, 1e-9):
        cold = decode(model, ids, valid, config(tokens_per_step=1, temperature=temperature), seeds=[1, 2])
        assert torch.equal(cold.ids_BN, greedy.ids_BN)


def test_a_hole_in_the_padding_mask_is_refused():
    ids, valid = random_prompts([5])
    valid[0, 2] = False
    with pytest.raises(ValueError, match="padded on the left"):
        decode(random_model(), ids, valid, config())
    with pytest.raises(ValueError, match=r"block_length is 9223372036854775808; it must be at least 1 \(and below 2"):
        config(block_length=2**63)
