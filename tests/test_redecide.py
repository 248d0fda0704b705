"""Decoding that decides every slot at every step, against transformers' own `generate` of DiffusionGemma: the same tokens and steps."""

import itertools
from collections import Counter
from dataclasses import replace

import dgemma
import pytest
import torch
from conftest import random_model, random_prompts
from transformers import DiffusionGemmaGenerationConfig
from transformers.models.diffusion_gemma.generation_diffusion_gemma import EntropyBoundSamplerConfig

from cdlm.decode import DecodeConfig, changed, decode, entropies

CANVAS, VOCAB = 8, 128
ENDS = (2, 17, 40, 77, 99, 120)  # so many that rows end in different canvases
CONFIG = DecodeConfig(
    3 * CANVAS, CANVAS, entropy_bound=4.0, order="entropy", max_denoising_steps=10, t_min=0.05, t_max=0.2, stability_threshold=1,
    entropy_threshold=0.4,
)


@pytest.fixture(scope="module")
def model():
    return dgemma.random_model(facts={"eos_token_ids": ENDS}, scale=0.8)


def own(model, prompt, valid, config, seed):
    """transformers' `generate`: new tokens, and steps of each row, which it gives as tokens a forward."""
    generation = DiffusionGemmaGenerationConfig(
        max_new_tokens=config.max_new_tokens, max_denoising_steps=config.max_denoising_steps,
        sampler_config=EntropyBoundSamplerConfig(entropy_bound=float(config.entropy_bound)), t_min=config.t_min, t_max=config.t_max,
        stability_threshold=config.stability_threshold, confidence_threshold=config.entropy_threshold,
        eos_token_id=list(model.facts.eos_token_ids) if config.stop_at_eos else None, pad_token_id=model.facts.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(seed)
    before = model.hf.generation_config.eos_token_id
    model.hf.generation_config.eos_token_id = generation.eos_token_id
    out = model.hf.generate(input_ids=prompt, attention_mask=valid.long(), generation_config=generation)
    model.hf.generation_config.eos_token_id = before
    new = out.sequences[:, prompt.shape[1] :]
    counted = (new != model.facts.pad_token_id).sum(dim=1) / out.tokens_per_forward
    return new, [round(float(steps)) for steps in counted]


def ours(model, prompt, valid, config, seed):
    torch.manual_seed(seed)
    return decode(model, prompt, valid, config)


def but(**changes):
    return changed(CONFIG, **{"entropy_bound": CONFIG.entropy_bound, **changes})


SETTINGS = {
    "as it is": {},
    "no ends": {"stop_at_eos": False},
    "two steps unchanged": {"stability_threshold": 2},
    "entropy alone": {"stability_threshold": 0},
    "never done before its last step": {"entropy_threshold": 1e-9, "max_denoising_steps": 3},
    "one step": {"max_denoising_steps": 1},
    "hot, a tight bound": {"t_min": 0.9, "t_max": 1.5, "entropy_bound": 0.05, "max_denoising_steps": 4},
}


@pytest.mark.parametrize("what, seed", [*((what, 0) for what in SETTINGS), ("as it is", 1), ("entropy alone", 1)])
def test_decoding_is_transformers_generate_token_for_token_and_step_for_step(model, what, seed):
    """Three prompts of unequal length, three canvases. transformers goes on with rows that have stopped, and its random numbers with them,
    until all have; what is behind a row's end is padding in both."""
    prompt, valid = random_prompts([5, 23, 11], vocab=VOCAB, seed=seed)
    config = but(**SETTINGS[what])
    tokens, steps = own(model, prompt, valid, config, seed)
    found = ours(model, prompt, valid, config, seed)
    width = tokens.shape[1]
    assert found.steps == steps
    ids_BN = found.ids_BN if config.stop_at_eos else found.filled_BM  # transformers was told of no end token there
    assert ids_BN[:, :width].tolist() == tokens.tolist() and (ids_BN[:, width:] == model.facts.pad_token_id).all()


def test_the_oracle_sees_rows_that_stop_and_canvases_that_settle_at_different_times(model):
    """Otherwise the test above would show little: of the two runs "as it is", rows end in different canvases, and canvases take different
    numbers of steps."""
    canvases, steps = set(), set()
    for seed in (0, 1):
        prompt, valid = random_prompts([5, 23, 11], vocab=VOCAB, seed=seed)
        seen = Counter()
        torch.manual_seed(seed)

        def note(step, seen=seen):
            seen.update((step.block, row) for row in step.row_A.tolist())

        out = decode(model, prompt, valid, CONFIG, callback=note)
        canvases |= {(seed, count) for count in out.commit_forwards}
        steps |= set(seen.values())
        assert [sum(n for (_, row), n in seen.items() if row == i) for i in range(3)] == out.steps
        assert out.forwards == [s + c for s, c in zip(out.steps, out.commit_forwards, strict=True)]  # a commit is a forward of its own
        assert out.decoded_tokens == [CANVAS * count for count in out.commit_forwards]
    assert len(canvases) > 2 and len(steps) > 2


def test_with_seeds_a_row_does_not_know_its_batch(model):
    """Each row alone, all three, and in another order: the same tokens and counts."""
    prompt, valid = random_prompts([5, 23, 11], vocab=VOCAB)
    whole = decode(model, prompt, valid, CONFIG, seeds=[7, 8, 9])
    turned = decode(model, prompt[[2, 0, 1]], valid[[2, 0, 1]], CONFIG, seeds=[9, 7, 8])
    for row, length in enumerate([5, 23, 11]):
        alone = decode(model, prompt[row : row + 1, -length:], valid[row : row + 1, -length:], CONFIG, seeds=[7 + row])
        other = [1, 2, 0][row]
        for out, place in ((alone, 0), (turned, other)):
            assert out.ids_BN[place].tolist() == whole.ids_BN[row].tolist()
            for count in ("steps", "commit_forwards", "forwards", "output_tokens", "decoded_tokens", "stop"):
                assert getattr(out, count)[place] == getattr(whole, count)[row]
    assert len({tuple(decode(model, prompt[:1], valid[:1], CONFIG, seeds=[s]).ids_BN[0].tolist()) for s in range(3)}) == 3


@pytest.mark.parametrize("budget", [1, 8, 11])
def test_a_budget_is_honoured_and_its_last_canvas_is_whole(model, budget):
    """11 tokens are the first 11 of two whole canvases: what 16 would give, cut."""
    prompt, valid = random_prompts([5, 9], vocab=VOCAB)
    config = but(max_new_tokens=budget, stop_at_eos=False)
    out = decode(model, prompt, valid, config, seeds=[1, 2])
    whole = decode(model, prompt, valid, but(max_new_tokens=-(-budget // CANVAS) * CANVAS, stop_at_eos=False), seeds=[1, 2])
    assert out.ids_BN.shape == (2, budget) and out.filled_BM.shape == (2, -(-budget // CANVAS) * CANVAS)
    assert out.steps == whole.steps and torch.equal(out.filled_BM, whole.filled_BM)
    for row, count in enumerate(out.output_tokens):
        assert out.ids_BN[row, :count].tolist() == whole.filled_BM[row, :count].tolist() and count <= budget


def test_what_a_step_shows(model):
    """Accepted slots hold the token that was drawn; slots once accepted are decided again, and some become noise; a block's output is the
    most probable tokens of its last step; what the next step is told are the logits behind the temperature."""
    prompt, valid = random_prompts([9], vocab=VOCAB)
    steps = []
    out = decode(model, prompt, valid, but(stop_at_eos=False, entropy_bound=1.0), seeds=[3], callback=steps.append)
    lost = 0
    for before, after in itertools.pairwise(steps):
        if after.block == before.block:
            assert torch.equal(after.before_AS, before.ids_AS)
            lost += int((before.reveal_AS & ~after.reveal_AS).sum())
        else:
            assert torch.equal(before.output_AS[0], out.filled_BM[0, before.block * CANVAS : after.block * CANVAS])
    for step in steps:
        assert torch.equal(step.ids_AS[step.reveal_AS], step.token_AS[step.reveal_AS]) and step.reveal_AS.any()
        temperature = 0.05 + 0.15 * (10 - step.step) / 10
        with torch.no_grad():
            logits = model.head(step.hidden_ASD)
        torch.testing.assert_close(step.seen.logits_BSK * temperature, logits, atol=1e-3, rtol=1e-3)
        assert torch.equal(step.output_AS, logits.argmax(dim=-1))
    assert lost > 0


@pytest.mark.parametrize("values, message", [
    ({"t_min": None}, "max_denoising_steps, t_max, stability_threshold, entropy_threshold: deciding .* also needs t_min"),
    ({"entropy_bound": None, "tokens_per_step": 1}, "also needs entropy_bound"),
    ({"max_denoising_steps": 0}, "max_denoising_steps is 0; it must be at least 1"),
    ({"t_min": 0.9}, r"t_min is 0.9 and t_max 0.2; 0 <= t_min <= t_max, finite, and t_max above 0"),
    ({"t_min": 0.0, "t_max": 0.0}, "t_min is 0.0 and t_max 0.0"),
    ({"stability_threshold": -1}, "stability_threshold is -1; it is a number of steps, 0 or more"),
    ({"entropy_threshold": 0.0}, "entropy_threshold is 0.0; it must be above 0 and finite"),
    ({"order": "confidence"}, "entropy_bound adds up entropies; order 'confidence' gives none"),
    ({"temperature": 0.5}, "temperature is 0.5; with max_denoising_steps tokens are drawn at t_max to t_min"),
    ({"top_k": 3}, "top_k is 3; with max_denoising_steps"),
    ({"use_cache": False}, "use_cache is False; with max_denoising_steps"),
])  # fmt: skip
def test_values_that_do_not_go_together_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **values)


def test_a_config_for_another_noise_is_refused(model):
    prompt, valid = random_prompts([4], vocab=58)
    with pytest.raises(ValueError, match=r"this model's noise has no mask token, .* give entropy_bound, max_d"):
        decode(model, prompt, valid, DecodeConfig(8, 8, confidence_threshold=0.9))
    with pytest.raises(ValueError, match="max_denoising_steps is 10; this model's noise is a mask token, so slots are revealed once"):
        decode(random_model(), prompt, valid, CONFIG)
    with pytest.raises(ValueError, match="block_length is 4; this model has blocks of 8, whole ones"):
        decode(model, prompt, valid, replace(CONFIG, block_length=4))


def test_a_logit_that_is_no_number_is_named():
    broken = dgemma.random_model()
    with torch.no_grad():
        broken.hf.model.decoder.layers[1].layer_scalar.fill_(torch.nan)
    prompt, valid = random_prompts([4], vocab=VOCAB)
    with pytest.raises(FloatingPointError, match="a logit is not finite in block 0, step 0 of row 0:"):
        decode(broken, prompt, valid, CONFIG, seeds=[0])


def test_entropies_are_those_of_torchs_distribution():
    """A token that is ruled out adds nothing."""
    logits = torch.randn(2, 5, 11, generator=torch.Generator().manual_seed(0)) * 4
    logits[0, 1, :6] = -torch.inf
    torch.testing.assert_close(entropies(logits, 2), torch.distributions.Categorical(logits=logits).entropy())
