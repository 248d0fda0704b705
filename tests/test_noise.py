"""Noise: golden values, and the same row whatever its batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cdlm import noise
from cdlm.decode import entropies

MASK = 1


def test_masked_by_hand():
    """u < t and maskable: 0.49 < 0.5 yes; 0.5 < 0.5 no; 0.0 but not maskable; 0.9 no. Second row t = 0.95: all maskable ones."""
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 8]])
    maskable = torch.tensor([[True, True, False, True], [True, True, False, True]])
    uniform = torch.tensor([[0.49, 0.5, 0.0, 0.9], [0.49, 0.5, 0.0, 0.9]])
    noisy, masked = noise.mask_tokens(ids, torch.tensor([0.5, 0.95]), maskable, MASK, uniform)
    assert noisy.tolist() == [[MASK, 6, 7, 8], [MASK, MASK, 7, MASK]]
    assert masked.tolist() == [[True, False, False, False], [True, True, False, True]]
    assert ids.tolist() == [[5, 6, 7, 8], [5, 6, 7, 8]]  # the clean tokens are left alone


@pytest.mark.parametrize("level, share", [(0.0, 0), (1.0, 6)])
def test_the_ends_of_the_scale(level, share):
    uniform = torch.tensor([[0.0, 0.2, 0.4, 0.6, 0.8, 1 - 2**-24]])
    _, masked = noise.mask_tokens(torch.full((1, 6), 9), torch.tensor([level]), torch.ones(1, 6, dtype=torch.bool), MASK, uniform)
    assert int(masked.sum()) == share


@given(seed=st.integers(0, 1000), rows=st.integers(1, 4), length=st.integers(1, 9))
@settings(deadline=None, derandomize=True, max_examples=60)
def test_only_maskable_tokens_change_and_a_row_does_not_know_its_batch(seed, rows, length):
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 50, (rows, length), generator=draw)
    level, uniform = torch.rand(rows, generator=draw), torch.rand(rows, length, generator=draw)
    maskable = torch.rand(rows, length, generator=draw) < 0.6
    noisy, masked = noise.mask_tokens(ids, level, maskable, MASK, uniform)
    assert not (masked & ~maskable).any()
    assert torch.equal(noisy == MASK, masked)
    assert torch.equal(noisy[~masked], ids[~masked])
    for b in range(rows):
        row = slice(b, b + 1)
        alone, _ = noise.mask_tokens(ids[row], level[row], maskable[row], MASK, uniform[row])
        assert torch.equal(alone[0], noisy[b])


def test_a_token_is_masked_with_probability_t():
    uniform = torch.rand(2, 20_000, generator=torch.Generator().manual_seed(0))
    everywhere = torch.ones_like(uniform, dtype=torch.bool)
    _, masked = noise.mask_tokens(torch.full(uniform.shape, 9), torch.tensor([0.1, 0.7]), everywhere, MASK, uniform)
    share = masked.float().mean(dim=1)
    torch.testing.assert_close(share, torch.tensor([0.1, 0.7]), atol=0.01, rtol=0)  # 3 standard deviations of 0.7: 0.0097


@pytest.mark.parametrize(
    "progress, first, ramp, cap",
    [
        (0.0, 0.15, 0.4, 0.15),
        (0.1, 0.15, 0.4, 0.3625),  # 0.15 + 0.85 * 0.1 / 0.4
        (0.2, 0.15, 0.4, 0.575),
        (0.4, 0.15, 0.4, 1.0),
        (1.0, 0.15, 0.4, 1.0),
        (0.0, 0.15, 0.0, 1.0),  # no ramp: the plain U(0, 1) from the start
        (0.3, 1.0, 0.5, 1.0),
    ],
)
def test_rising_cap(progress, first, ramp, cap):
    assert noise.rising_cap(progress, first, ramp) == pytest.approx(cap, abs=1e-12)


def test_noise_level():
    """0.1 + (0.9 - 0.1) * u."""
    level = noise.noise_level(torch.tensor([0.0, 0.25, 0.5]), cap=0.9, floor=0.1)
    torch.testing.assert_close(level, torch.tensor([0.1, 0.3, 0.5]))


def test_noise_level_stays_within_its_bounds():
    uniform = torch.cat([torch.rand(5000, generator=torch.Generator().manual_seed(3)), torch.tensor([0.0, 1 - 2**-24])])
    level = noise.noise_level(uniform, cap=0.6, floor=0.02)
    assert float(level.min()) == pytest.approx(0.02) and float(level.max()) == pytest.approx(0.6)
    assert float(level.min()) >= 0.02 - 1e-9 and float(level.max()) <= 0.6 + 1e-6


# processes


def test_uniform_noise_by_hand():
    """V = 10. Level 0.5: u 0.4 and 0.49 become noise, floor(10 v) = 3 and 7; 0.5 and 0.9 stay; where nothing may change, nothing does.
    7 stood there before: the clean token may be drawn, and is noise all the same."""
    ids, where = torch.tensor([[5, 7, 6, 8, 9]]), torch.tensor([[True, True, True, True, False]])
    uniform, token = torch.tensor([[0.4, 0.49, 0.5, 0.9, 0.0]]), torch.tensor([[0.3, 0.75, 0.1, 0.1, 0.1]])
    noisy, noisy_at = noise.Uniform(10).corrupt(ids, torch.tensor([0.5]), where, uniform, token)
    assert noisy.tolist() == [[3, 7, 6, 8, 9]] and noisy_at.tolist() == [[True, True, False, False, False]]
    ones = torch.full((1, 5), 1 - 2**-24)
    assert noise.Uniform(10).corrupt(ids, torch.tensor([1.0]), where, uniform, ones)[0].tolist() == [[9, 9, 9, 9, 9]]
    with pytest.raises(ValueError, match="uniform noise puts random tokens: give token_BL"):
        noise.Uniform(10).corrupt(ids, torch.tensor([0.5]), where, uniform)


def test_absorbing_noise_is_mask_tokens():
    ids, where, level = torch.tensor([[5, 6, 7]]), torch.ones(1, 3, dtype=torch.bool), torch.tensor([0.5])
    uniform = torch.tensor([[0.1, 0.6, 0.4]])
    found, wanted = noise.Absorbing(MASK).corrupt(ids, level, where, uniform), noise.mask_tokens(ids, level, where, MASK, uniform)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert noise.Absorbing(MASK).blank(2, noise.Draws(3), [0, 2]).tolist() == [[MASK, MASK]] * 2


def test_a_process_by_its_name():
    assert noise.process("absorbing", 3, 10) == noise.Absorbing(3) and noise.process("absorbing", 3, 10).marked
    assert noise.process("uniform", None, 10) == noise.Uniform(10) and not noise.process("uniform", None, 10).marked
    with pytest.raises(ValueError, match="noise is 'gaussian'; allowed: absorbing, uniform"):
        noise.process("gaussian", None, 10)


def test_rows_with_seeds_draw_alone_and_without_all_together():
    probability = torch.tensor([[[0.2, 0.0, 0.8], [0.0, 1.0, 0.0]]] * 3)
    whole, one = noise.Draws(3, seeds=[4, 5, 6]), noise.Draws(1, seeds=[5])
    assert torch.equal(whole.tokens(4, 50, [0, 1, 2])[1], one.tokens(4, 50, [0])[0])
    assert torch.equal(whole.choice(probability, [0, 1, 2])[1], one.choice(probability[1:2], [0])[0])
    assert not whole.together
    together = noise.Draws(3)
    torch.manual_seed(3)
    found = together.tokens(4, 50, [0, 1, 2]), together.choice(probability, [0, 1, 2])
    torch.manual_seed(3)
    assert torch.equal(found[0], torch.randint(0, 50, (3, 4))) and together.together
    assert torch.equal(found[1], torch.multinomial(probability.flatten(0, 1), 1).view(3, 2))
    with pytest.raises(ValueError, match="2 seeds for 3 rows; give one for each row"):
        noise.Draws(3, seeds=[1, 2])


def test_a_choice_has_the_probabilities_it_is_given():
    """2,000 slots of one row: a token of probability 0.3 within 4 standard deviations (0.041), one of 0 never."""
    found = noise.Draws(1, seeds=[0]).choice(torch.tensor([0.3, 0.0, 0.7]).expand(1, 2000, 3), [0])
    assert abs(float((found == 0).float().mean()) - 0.3) < 0.041 and not (found == 1).any()


def test_a_draw_does_not_depend_on_how_many_slots_are_drawn_at_a_time(monkeypatch):
    """Nor an entropy."""
    logits = torch.randn(2, 7, 50, generator=torch.Generator().manual_seed(3)) * 3
    found = []
    for slots in (1, 3, 100):
        monkeypatch.setattr(noise, "SLOTS", slots)
        draws = noise.Draws(2, seeds=[5, 9])
        found.append((draws.choice(logits.softmax(dim=-1), [0, 1]).tolist(), entropies(logits, slots).tolist()))
    assert found[0] == found[1] == found[2] and len(set(found[0][0][0])) > 3
