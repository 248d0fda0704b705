"""Draft and verify: what stands is what the autoregressive model would have written, whatever the drafts are.

A random model's drafts hardly ever stand, so a `Prophet` stands in for a trained one: its mask rows are the rows of the model's own greedy
continuation, but for some that are wrong.
"""

import contextlib
import itertools

import pytest
import torch
from conftest import random_model, random_prompts

from cdlm import masks
from cdlm.decode import DecodeConfig, decode
from cdlm.families.base import DiffusionLM, NotFinite
from cdlm.speculate import SpeculateConfig, Speculated, _draw, speculate, stand, stand_lossless

CAUSAL = {"logit_shift": True, "prompt_attention": "causal"}
LAYOUTS = [(k, m, "parallel") for k in (1, 2, 4, 8) for m in sorted({1, min(2, k), k})] + [(k, None, "linear") for k in (1, 2, 4, 8)]
KINDS = ("llama", "qwen3")


def causal_model(kind="llama", **values):
    return random_model(kind, facts=CAUSAL, **values)


def greedy(model, prompt, valid, budget):
    return decode(model, prompt, valid, DecodeConfig(budget, 1, tokens_per_step=1))


class Prophet(DiffusionLM):
    """Mask rows that are the autoregressive rows of the greedy continuation; of every `wrong`-th position they are another token's."""

    def __init__(self, model, prompt, valid, budget, wrong=5):
        super().__init__(model.hf, model.facts, model.family)
        text = greedy(model, prompt, valid, budget).filled_BM
        ids = torch.cat([prompt, text], dim=1)
        whole = torch.cat([valid, torch.ones_like(text, dtype=torch.bool)], dim=1)
        self.told, self.width, self.wrong = model.sequence_hidden(ids, whole, valid.sum(dim=1), 1), ids.shape[1], wrong
        self.length, self.prompt, self.lengths, self.rows = valid.sum(dim=1), prompt.shape[1], valid.sum(dim=1), None

    def packed_hidden(self, ids, position, sight, before, cache=None):
        rows = super().packed_hidden(ids, position, sight, before, cache)
        lengths = self.length if cache is None else cache.prompt_length_B
        told = torch.stack([self.told[self._row(ids, cache, b)] for b in range(len(ids))])
        column = (position + (self.prompt - lengths)[:, None]).clamp(max=self.width - 1)
        column = torch.where(position % self.wrong == 0, (column + 1).clamp(max=self.width - 1), column)
        return torch.where((ids == self.facts.mask_token_id)[..., None], told.gather(1, column[..., None].expand_as(rows)), rows)

    def new_cache(self, prompt_length_B, capacity):
        cache = super().new_cache(prompt_length_B, capacity)
        cache.number = torch.arange(len(prompt_length_B))
        select = cache.select

        def following(rows):
            select(rows)
            cache.number = cache.number[rows]

        cache.select = following
        return cache

    @staticmethod
    def _row(ids, cache, b):
        return b if cache is None else int(cache.number[b])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drafts, proposals, layout", LAYOUTS)
def test_greedy_is_autoregressive_greedy_token_for_token(kind, drafts, proposals, layout):
    """200 random prompts at once, of 1 to 12 tokens, padded on the left; the rows stop at different places."""
    model = causal_model(kind)
    prompt, valid = random_prompts([1 + i % 12 for i in range(200)])
    wanted = greedy(model, prompt, valid, 8)
    found = speculate(model, prompt, valid, SpeculateConfig(8, drafts, proposals, layout))
    assert torch.equal(found.ids_BN, wanted.ids_BN)
    assert found.output_tokens == wanted.output_tokens and found.stop == wanted.stop and "eos" in found.stop


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drafts, proposals, layout", [case for case in LAYOUTS if case[0] > 1])
def test_drafts_that_stand_change_nothing_but_the_number_of_forwards(kind, drafts, proposals, layout):
    model = causal_model(kind, seed=1)
    prompt, valid = random_prompts([1 + i % 7 for i in range(24)], seed=1)
    wanted = greedy(model, prompt, valid, 21)
    prophet = Prophet(model, prompt, valid, 21)
    found = speculate(prophet, prompt, valid, SpeculateConfig(21, drafts, proposals, layout))
    assert torch.equal(found.ids_BN, wanted.ids_BN) and found.output_tokens == wanted.output_tokens
    histogram = [sum(row[r] for row in found.accepted) for r in range(drafts + 1)]
    assert histogram[0] == 0 and histogram[-1] > 0 and histogram[1] > 0, histogram
    assert sum(found.steps) < 0.8 * sum(wanted.steps)
    for row in range(24):
        assert sum(found.accepted[row]) == found.steps[row]
        known = 1 + sum(r * count for r, count in enumerate(found.accepted[row]))
        assert found.output_tokens[row] <= known
        assert found.forwards[row] == 1 + found.steps[row] if layout == "parallel" else found.forwards[row] >= 1 + found.steps[row]
        if layout == "parallel":
            assert found.queries[row] == found.steps[row] * drafts * (1 + proposals)
        else:
            assert found.queries[row] <= found.steps[row] * 2 * drafts


@pytest.mark.parametrize("drafts, proposals, layout", [case for case in LAYOUTS if case[0] > 1])
def test_drafts_that_are_never_wrong_all_stand(drafts, proposals, layout):
    """As many in a step as there are: K behind the prefill; then K, or, where r drafts stood and M < r proposals were made, K - (r - M)."""
    model = causal_model(seed=1)
    prompt, valid = random_prompts([6, 3], seed=1)
    found = speculate(Prophet(model, prompt, valid, 40, wrong=10**6), prompt, valid, SpeculateConfig(30, drafts, proposals, layout))
    for row in range(2):
        known, there, steps = 1, drafts, []
        while known < found.output_tokens[row]:
            steps.append(there)
            known += there
            there = drafts if proposals is None else drafts - max(0, there - proposals)
        assert found.accepted[row] == [steps.count(r) for r in range(drafts + 1)] and sum(steps) >= 20


@pytest.mark.parametrize("drafts, proposals, layout", [(4, 2, "parallel"), (4, 4, "parallel"), (4, None, "linear")])
def test_a_batch_is_each_row_alone(drafts, proposals, layout):
    model = causal_model(seed=1)
    prompt, valid = random_prompts([3, 7, 1, 5, 6], seed=2)
    prophet = Prophet(model, prompt, valid, 15)
    config = SpeculateConfig(15, drafts, proposals, layout)
    together = speculate(prophet, prompt, valid, config)
    for row in range(5):
        own, there = prompt[row : row + 1][:, ~valid[row].logical_not()], valid[row : row + 1][:, valid[row]]
        alone = speculate(Prophet(model, own, there, 15), own, there, config)
        assert torch.equal(alone.ids_BN[0], together.ids_BN[row])
        assert (alone.accepted[0], alone.forwards[0], alone.stop[0]) == (together.accepted[row], together.forwards[row], together.stop[row])


@pytest.mark.parametrize("drafts, proposals, layout", [(8, 3, "parallel"), (8, None, "linear")])
def test_the_budget_and_an_end_token_may_fall_inside_a_draft(drafts, proposals, layout):
    model = causal_model(seed=1)
    prompt, valid = random_prompts([4, 2, 6], seed=1)
    text = greedy(model, prompt, valid, 18).filled_BM
    for budget in range(1, 12):
        found = speculate(Prophet(model, prompt, valid, 18), prompt, valid, SpeculateConfig(budget, drafts, proposals, layout))
        assert torch.equal(found.ids_BN, greedy(model, prompt, valid, budget).ids_BN)
    for place in range(1, 9):  # the token there becomes the end token
        end = int(text[0, place])
        ending = random_model("llama", seed=1, facts={**CAUSAL, "eos_token_ids": (end,)})
        wanted = greedy(ending, prompt, valid, 18)
        found = speculate(Prophet(ending, prompt, valid, 18), prompt, valid, SpeculateConfig(18, drafts, proposals, layout))
        assert torch.equal(found.ids_BN, wanted.ids_BN) and found.stop == wanted.stop and found.stop[0] == "eos"
        assert found.answer(0, (end,)) == text[0, : text[0].tolist().index(end)].tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drafts, proposals, layout, rows", [(4, 4, "parallel", 5), (4, 1, "parallel", 1), (4, None, "linear", 5)])
def test_the_cache_after_a_step_is_that_of_a_fresh_forward_of_the_committed_tokens(kind, drafts, proposals, layout, rows, monkeypatch):
    model = causal_model(kind, seed=1)
    prompt, valid = random_prompts([6, 3, 5, 1, 4][:rows], seed=1)
    prophet = Prophet(model, prompt, valid, 17)
    made, text, looked = [], [[] for _ in range(rows)], []
    new_cache = prophet.new_cache
    monkeypatch.setattr(prophet, "new_cache", lambda *arguments: made.append(new_cache(*arguments)) or made[-1])

    def look(step):
        cache, after_first = made[0], layout == "linear" and step.block > 1  # there the first draft was committed when it was drafted from
        for i, row in enumerate(step.row_A.tolist() if step.block else []):
            known = text[row] if after_first else text[row][:-1]
            ids = torch.cat([prompt[row][valid[row]], torch.tensor(known, dtype=torch.long)])[None]
            fresh = model.prefill(ids, torch.ones_like(ids, dtype=torch.bool), 1, 1)
            kept = cache.valid_BK[i].nonzero()[:, 0]
            assert cache.position_BK[i, kept].tolist() == list(range(ids.shape[1]))
            for held, there in zip(cache.layers, fresh.layers, strict=True):
                for name in ("keys", "values"):
                    a, b = getattr(held, name)[i, :, kept], getattr(there, name)[0, :, : ids.shape[1]]
                    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
            looked.append(len(known))
        for i, row in enumerate(step.row_A.tolist()):
            text[row] += step.new_AK[i, : step.count_A[i]].tolist()

    speculate(prophet, prompt, valid, SpeculateConfig(17, drafts, proposals, layout), callback=look)
    assert len(looked) > rows * 4 and max(looked) >= 12


def test_one_row_is_never_copied():
    model = causal_model(seed=1)
    prompt, valid = random_prompts([5], seed=1)
    layers = []
    new_cache = model.new_cache
    model.new_cache = lambda *arguments: layers.extend((made := new_cache(*arguments)).layers) or made
    homes = set()
    speculate(model, prompt, valid, SpeculateConfig(12, 4), callback=lambda step: homes.add(layers[0].keys.data_ptr()))
    assert len(homes) == 1


def test_an_adapter_of_the_drafting_forward_leaves_no_trace():
    """Active, it makes nonsense of the weights; the text is the same, so nothing of that forward was kept, and it was off elsewhere."""
    model = causal_model(seed=1)
    prompt, valid = random_prompts([4, 6, 2], seed=1)
    weight, entered = model.hf.model.layers[0].mlp.up_proj.weight, []

    @contextlib.contextmanager
    def adapter():
        weight.data.neg_()
        entered.append(True)
        yield
        weight.data.neg_()

    found = speculate(model, prompt, valid, SpeculateConfig(12, 4, layout="linear"), adapter=adapter)
    assert torch.equal(found.ids_BN, greedy(model, prompt, valid, 12).ids_BN)
    assert len(entered) == max(found.steps) > 2 and found.queries == [8 * steps for steps in found.steps]
    with pytest.raises(ValueError, match="adapter is for the drafting forward of the linear layout"):
        speculate(model, prompt, valid, SpeculateConfig(12, 4), adapter=adapter)


# ---- lossless --------------------------------------------------------------------------------------------------------

VOCAB, SAMPLES, LENGTH = 8, 20_000, 3


def small_model():
    return causal_model(vocab=VOCAB, seed=4, scale=1.3)


def sequences(prompt):
    """Every text of three tokens without the mask token behind the prompt, and the prompt before each."""
    tokens = [token for token in range(VOCAB) if token != 1]
    text = torch.tensor(list(itertools.product(tokens, repeat=LENGTH)))
    return text, torch.cat([prompt.expand(len(text), -1), text], dim=1)


def trimmed(text):
    """What follows the end token is padding."""
    behind = (text == 2).long().cumsum(dim=1) - (text == 2).long() > 0
    return text.masked_fill(behind, 0)


def probabilities(rows_logits, text, temperature):
    """Of each text, from logits [texts, 3, V] that predict its tokens."""
    logits = rows_logits.double().index_fill(-1, torch.tensor([1]), -torch.inf) / temperature
    return logits.softmax(dim=-1).gather(-1, text[..., None])[..., 0].prod(dim=1)


def chi_square(samples, text, probability):
    """p-value of the samples under the distribution over trimmed texts; cells of fewer than 5 expected samples are taken together."""
    def number(rows):
        return (rows * torch.tensor([VOCAB**2, VOCAB, 1])).sum(dim=1)

    expected = torch.zeros(VOCAB**LENGTH, dtype=torch.float64).index_add(0, number(trimmed(text)), probability) * len(samples)
    observed = torch.bincount(number(samples), minlength=VOCAB**LENGTH).double()
    assert expected.sum().item() == pytest.approx(len(samples)) and observed[expected == 0].sum() == 0
    large = expected >= 5
    cells = [torch.cat([x[large], x[~large].sum()[None]]) for x in (observed, expected)]
    statistic, freedom = ((cells[0] - cells[1]) ** 2 / cells[1].clamp(min=1e-9)).sum(), int(large.sum())
    return float(torch.special.gammaincc(torch.tensor(freedom / 2, dtype=torch.float64), statistic / 2))


@pytest.mark.parametrize(
    "drafts, proposals, layout, temperature", [(3, 3, "parallel", 1.0), (2, 1, "parallel", 0.6), (3, None, "linear", 1.0)]
)
def test_lossless_samples_have_the_autoregressive_distribution(drafts, proposals, layout, temperature):
    """20,000 texts of 3 tokens from a vocabulary of 8: not to be told from the exact distribution, and far from the drafts' own."""
    model, prompt = small_model(), torch.tensor([[5, 3, 6, 4]])
    text, whole = sequences(prompt)
    valid = torch.ones_like(whole, dtype=torch.bool)
    exact = probabilities(model.sequence_logits(whole, valid, torch.full((len(whole),), 4), 1)[:, 4:], text, temperature)
    layout_of = masks.tidar_prefill(torch.ones(1, 4, dtype=torch.bool), LENGTH, masks_last=True)
    ids = torch.cat([prompt, torch.full((1, LENGTH), 1)], dim=1)
    marginal = model.head(model.packed_hidden(ids, layout_of.position_BQ, layout_of.sight, layout_of.before_BQ))[:, 4:]
    drafted = probabilities(marginal.expand(len(text), -1, -1), text, temperature)

    many = prompt.expand(SAMPLES, -1)
    config = SpeculateConfig(LENGTH, drafts, proposals, layout, rule="lossless", temperature=temperature)
    found = speculate(model, many, torch.ones_like(many, dtype=torch.bool), config, seeds=list(range(SAMPLES)))
    share = sum(sum(row[2:]) for row in found.accepted) / sum(found.steps)
    assert 0.2 < share < 0.95, f"drafts must both stand and fall for this to say anything; {share:.0%} of the steps had one that stood"
    assert chi_square(found.ids_BN, text, exact.detach()) > 0.01
    assert chi_square(found.ids_BN, text, drafted.detach()) < 1e-12


def exactly(model, vocab, length, samples, config):
    """p-value of so many sampled texts, which have no end token, under the exact autoregressive distribution; and how many drafts stood."""
    prompt, tokens = torch.tensor([[3, 2, 3, 0]]), [token for token in range(vocab) if token != 1]
    text = torch.tensor(list(itertools.product(tokens, repeat=length)))
    whole = torch.cat([prompt.expand(len(text), -1), text], dim=1)
    with torch.no_grad():
        logits = model.sequence_logits(whole, torch.ones_like(whole, dtype=torch.bool), torch.full((len(whole),), 4), 1)[:, 4:]
    base = torch.tensor([vocab**i for i in range(length)])
    expected = torch.zeros(vocab**length, dtype=torch.float64)
    expected[(text * base).sum(dim=1)] = probabilities(logits, text, config.temperature) * samples
    many = prompt.expand(samples, -1)
    found = speculate(model, many, torch.ones_like(many, dtype=torch.bool), config, seeds=list(range(samples)))
    observed = torch.bincount((found.ids_BN * base).sum(dim=1), minlength=len(expected)).double()
    large = expected >= 5
    cells = [torch.cat([x[large], x[~large].sum()[None]]) for x in (observed, expected)]
    statistic = ((cells[0] - cells[1]) ** 2 / cells[1].clamp(min=1e-9)).sum()
    p_value = float(torch.special.gammaincc(torch.tensor(int(large.sum()) / 2, dtype=torch.float64), statistic / 2))
    return p_value, [sum(row[r] for row in found.accepted) for r in range(config.draft_length + 1)]


def test_a_proposals_tail_and_missing_drafts_are_lossless_too():
    """One proposal for three lengths: behind two or three drafts that stand there is its tail, or nothing. Token K + 2 shows it."""
    model = random_model("llama", facts={**CAUSAL, "eos_token_ids": (1000,)}, vocab=4, seed=4, scale=1.0)
    p_value, stood = exactly(model, 4, 5, 4000, SpeculateConfig(5, 3, 1, rule="lossless", temperature=1.0))
    assert min(stood[1:]) > 200 and p_value > 0.01, (p_value, stood)


def test_a_sample_depends_on_its_seed_alone():
    model = small_model()
    prompt, valid = random_prompts([4, 2, 6], vocab=VOCAB)
    config = SpeculateConfig(9, 3, rule="lossless", temperature=1.0)
    together = speculate(model, prompt, valid, config, seeds=[7, 8, 9])
    alone = speculate(model, prompt[1:2, 4:], valid[1:2, 4:], config, seeds=[8])
    assert torch.equal(alone.ids_BN[0], together.ids_BN[1])
    assert not torch.equal(speculate(model, prompt, valid, config, seeds=[1, 2, 3]).ids_BN, together.ids_BN)


def test_lossless_by_hand():
    """Draft 1 has p 0.5 and q 0.8: it stands at u = 0.6 (0.48 < 0.5), and falls at 0.7 (0.56); then p - q leaves token 0 alone."""
    p = torch.tensor([[[0.5, 0.5, 0.0], [0.1, 0.2, 0.7]]], dtype=torch.float64)
    q = torch.tensor([[[0.2, 0.8, 0.0], [0.0, 0.0, 0.0]]], dtype=torch.float64)
    draft = torch.tensor([[2, 1]])
    for u, count, token in ((0.6, 2, 1), (0.7, 1, 0)):  # behind both, u = 0.25 falls between 0.1 and 0.3: token 1
        found = stand_lossless(p, q, draft, torch.tensor([[u, 0.25]], dtype=torch.float64))
        assert [x.item() for x in found] == [count, token]
    missing = q.clone()
    missing[:, 0] = 0
    found = stand_lossless(p.index_fill(-1, torch.tensor([1]), 0.0), missing, draft, torch.tensor([[0.0, 0.9]], dtype=torch.float64))
    assert found[0].item() == 1, "a token of probability 0 never stands"


def test_a_draw_never_gives_a_token_of_probability_zero():
    probability = torch.tensor([[[0.0, 0.3, 0.7, 0.0]]])
    for u, token in ((0.0, 1), (0.2999, 1), (0.3001, 2), (1.0, 2)):
        assert _draw(probability, torch.tensor([[u]], dtype=torch.float64)).item() == token


# ---- mix -------------------------------------------------------------------------------------------------------------


def test_drafts_stand_from_the_left():
    target, draft = torch.tensor([[4, 5, 6], [4, 5, 6], [9, 5, 6], [4, 9, 6]]), torch.tensor([[3, 4, 5], [3, 4, 7], [3, 4, 5], [3, 4, 5]])
    assert [x.tolist() for x in stand(target, draft)] == [[3, 2, 1, 2], [6, 5, 9, 9]]


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_mix_is_greedy_decoding_by_mixed_logits(beta):
    """With a proposal for every length the drafts matter to nothing: each token is the argmax of the mixed logits behind the text."""
    model = causal_model(seed=1)
    prompt, valid = random_prompts([4, 4, 4], seed=1)
    found = speculate(model, prompt, valid, SpeculateConfig(10, 4, rule="mix", beta=beta))
    text = prompt
    for _ in range(10):
        layout = masks.tidar_prefill(torch.ones_like(text, dtype=torch.bool), 4, masks_last=True)
        ids = torch.cat([text, torch.ones(3, 4, dtype=torch.long)], dim=1)
        logits = model.head(model.packed_hidden(ids, layout.position_BQ, layout.sight, layout.before_BQ))[:, text.shape[1] - 1 :]
        mixed = (beta * logits[:, 0] + (1 - beta) * logits[:, 1]).index_fill(-1, torch.tensor([1]), -torch.inf)
        text = torch.cat([text, mixed.argmax(dim=-1)[:, None]], dim=1)
    for row in range(3):
        count = found.output_tokens[row]
        assert found.ids_BN[row, :count].tolist() == text[row, 4 : 4 + count].tolist()


def test_mix_with_few_proposals_and_in_the_linear_layout_decodes_to_the_end():
    """beta 1 is greedy there too; the second best proposal's tail, and drafts of the linear layout, weigh in at a beta below 1."""
    model = causal_model(seed=1)
    prompt, valid = random_prompts([4, 2, 6], seed=1)
    for proposals, layout in ((1, "parallel"), (2, "parallel"), (None, "linear")):
        trusting = speculate(model, prompt, valid, SpeculateConfig(12, 4, proposals, layout, rule="mix", beta=1.0))
        assert torch.equal(trusting.ids_BN, greedy(model, prompt, valid, 12).ids_BN)
        mixed = speculate(model, prompt, valid, SpeculateConfig(12, 4, proposals, layout, rule="mix", beta=0.0))
        assert sum(mixed.steps) < sum(trusting.steps), "drafts that the diffusion head verifies stand more often"


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values, message",
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0; it must be at least 1"),
        ({"draft_length": 0}, "draft_length is 0; it must be at least 1"),
        ({"proposals": 5}, "proposals is 5; it must be between 1 and draft_length, 4"),
        ({"proposals": 2, "layout": "linear"}, "proposals is 2; the linear layout has none"),
        ({"layout": "tree"}, "layout is 'tree'; allowed: parallel, linear"),
        ({"rule": "typical"}, "rule is 'typical'; allowed: greedy, lossless, mix"),
        ({"rule": "lossless"}, "rule is 'lossless' and temperature 0.0"),
        ({"temperature": 1.0}, "rule is 'greedy' and temperature 1.0"),
        ({"temperature": float("nan")}, "temperature is nan; it must be finite"),
        ({"beta": 0.5}, "beta is 0.5 and rule 'greedy'"),
        ({"beta": 1.5, "rule": "mix"}, "beta is 1.5 and rule 'mix'"),
        ({"max_new_tokens": 8.5}, "max_new_tokens is 8.5; it must be a whole number"),
        ({"max_new_tokens": True}, "max_new_tokens is True; it must be a whole number"),
        ({"draft_length": "8"}, "draft_length is '8'; it must be a whole number"),
        ({"draft_length": None}, "draft_length is None; it must be a whole number"),
        ({"proposals": True}, "proposals is True; it must be a whole number"),
        ({"temperature": None, "rule": "lossless"}, "temperature is None; it must be a number"),
        ({"beta": "x", "rule": "mix"}, "beta is 'x'; it must be a number"),
    ],
)
def test_a_bad_value_is_named(values, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        SpeculateConfig(**{"max_new_tokens": 8, "draft_length": 4, **values})


def test_what_can_not_be_decoded_is_refused():
    model = causal_model()
    prompt, valid = random_prompts([4, 2])
    with pytest.raises(ValueError, match="give one seed for each of the 2 rows"):
        speculate(model, prompt, valid, SpeculateConfig(8, 4, rule="lossless", temperature=1.0))
    with pytest.raises(ValueError, match="padded on the left"):
        speculate(model, prompt, valid.flip(1), SpeculateConfig(8, 4))
    for seed in (-1, 2**70, 1.5):
        with pytest.raises(ValueError, match=f"seed is {seed}; it must be a whole number, between 0 and"):
            speculate(model, prompt, valid, SpeculateConfig(8, 4, rule="lossless", temperature=1.0), seeds=[1, seed])
    with pytest.raises(ValueError, match=r"at least one row"):
        speculate(model, prompt[:0], valid[:0], SpeculateConfig(8, 4))
    with pytest.raises(ValueError, match=r"padding mask is of dtype torch.float32"):
        speculate(model, prompt, valid.float(), SpeculateConfig(8, 4))
    with pytest.raises(ValueError, match="needs a causal model"):
        speculate(random_model("llama"), prompt, valid, SpeculateConfig(8, 4))
    broken = causal_model()
    broken.hf.lm_head.weight.data[5] = torch.nan
    with pytest.raises(FloatingPointError, match="step 0 of rows 0, 1"):
        speculate(broken, prompt, valid, SpeculateConfig(8, 4))


class Broken(DiffusionLM):
    """Mask rows that are not finite, at the prompt or from the first step on; of one row of the batch alone, where it is named."""

    def __init__(self, model, since, only=None):
        super().__init__(model.hf, model.facts, model.family)
        self.since, self.only, self.forwards = since, only, 0

    def packed_hidden(self, ids, position, sight, before, cache=None):
        rows = super().packed_hidden(ids, position, sight, before, cache)
        self.forwards += 1
        bad = (ids == self.facts.mask_token_id) & (self.forwards > self.since)
        if self.only is not None:
            bad &= torch.arange(len(ids))[:, None] == self.only
        return torch.where(bad[..., None], torch.nan, rows)


@pytest.mark.parametrize("layout", ["parallel", "linear"])
@pytest.mark.parametrize("rule", [{"rule": "mix", "beta": 0.5}, {"rule": "lossless", "temperature": 1.0}, {}])
@pytest.mark.parametrize("since", [0, 1])
def test_mask_rows_that_are_not_finite_stop_it(since, rule, layout):
    prompt, valid = random_prompts([4, 2, 6], seed=1)
    with pytest.raises(FloatingPointError, match=r"a logit is not finite in step [012] of rows [012, ]+:"):
        speculate(Broken(causal_model(seed=1), since), prompt, valid, SpeculateConfig(8, 4, layout=layout, **rule), seeds=[1, 2, 3])


@pytest.mark.parametrize("layout", ["parallel", "linear"])
def test_the_row_that_is_not_finite_is_named(layout):
    prompt, valid = random_prompts([4, 2, 6], seed=1)
    with pytest.raises(NotFinite, match=r"a logit is not finite in step 0 of row 1:") as caught:
        speculate(Broken(causal_model(seed=1), 0, only=1), prompt, valid, SpeculateConfig(8, 4, layout=layout))
    assert caught.value.rows == [1]


@pytest.mark.parametrize("temperature", [1e-3, 1e-308, 5e-324])
def test_a_very_low_temperature_is_greedy(temperature):
    model = causal_model(seed=1)
    prompt, valid = random_prompts([4, 2, 6], seed=1)
    config = SpeculateConfig(8, 4, rule="lossless", temperature=temperature)
    assert torch.equal(speculate(model, prompt, valid, config, seeds=[1, 2, 3]).ids_BN, greedy(model, prompt, valid, 8).ids_BN)


@pytest.mark.parametrize(
    "drafts, proposals, layout", [(4, None, "parallel"), (4, 1, "parallel"), (4, None, "linear"), (1, None, "parallel")]
)
@pytest.mark.parametrize("budget", [1, 9])
def test_no_mask_or_draft_stands_behind_the_positions_that_are_asked_for(budget, drafts, proposals, layout):
    """Drafts that are always right go furthest. One position less is refused before any forward."""
    model = causal_model(seed=1)
    prompt, valid = random_prompts([6, 3], seed=1)
    prophet, seen = Prophet(model, prompt, valid, 20, wrong=10**6), []
    forward = prophet.packed_hidden
    prophet.packed_hidden = lambda ids, position, *rest: seen.append(int(position.max())) or forward(ids, position, *rest)
    config = SpeculateConfig(budget, drafts, proposals, layout, stop_at_eos=False)
    speculate(prophet, prompt, valid, config)
    assert max(seen) < 6 + config.most_positions <= 6 + budget + 2 * drafts
    model.hf.config.max_position_embeddings = 6 + config.most_positions - 1
    seen.clear()
    with pytest.raises(ValueError, match=f"a prompt of 6 tokens and max_new_tokens {budget} are {6 + config.most_positions} positions"):
        speculate(prophet, prompt, valid, config)
    assert not seen


def test_positions_that_depend_on_the_length_of_the_text_are_refused():
    model = causal_model()
    prompt, valid = random_prompts([4])
    for kind in ("dynamic", "longrope"):
        model.hf.config.rope_parameters = {"rope_type": kind, "rope_theta": 1e4}
        with pytest.raises(ValueError, match=f"the model's rope_type is '{kind}'; draft and verify needs positions that are the same"):
            speculate(model, prompt, valid, SpeculateConfig(8, 4))
    assert speculate(model, prompt, valid, SpeculateConfig(2, 1)).steps, "nothing is drafted"


def test_what_a_forward_costs_is_counted():
    found = Speculated(torch.zeros(2, 4), [3, 0], [1, 1], [4, 1], [60, 0], [4, 1], [[0, 3], [0, 0]], ["length", "eos"])
    assert found.tokens_per_forward == [1.0, 1.0] and found.queries_per_forward == [20.0, None]
