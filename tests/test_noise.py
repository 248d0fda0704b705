"""Noise: golden values, and the same row whatever its batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cdlm import noise

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
