"""Reveal rules: contract 3 over all of them, and each one's own arithmetic."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cdlm import unmask

RULES = st.one_of(
    st.floats(0, 1).map(unmask.threshold),
    st.floats(0.01, 8).map(unmask.factor),
    st.integers(1, 12).map(unmask.top_k),
    st.tuples(st.integers(1, 12), st.integers(1, 15)).map(lambda pair: unmask.spread(*pair)),
)
# few distinct values, so that ties and values at a threshold are common; 0 and 1 are possible confidences
CONFIDENCES = st.one_of(st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.floats(0, 1, width=32))


@st.composite
def blocks(draw):
    """Confidences and open slots [B, L], rows with no open slot among them."""
    rows, length = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    confidence = draw(st.lists(st.lists(CONFIDENCES, min_size=length, max_size=length), min_size=rows, max_size=rows))
    is_open = draw(st.lists(st.lists(st.booleans(), min_size=length, max_size=length), min_size=rows, max_size=rows))
    return torch.tensor(confidence), torch.tensor(is_open)


@given(rule=RULES, block=blocks(), step=st.integers(0, 20))
@settings(deadline=None, derandomize=True, max_examples=300)
def test_contract_3(rule, block, step):
    """A subset of the open slots; at least one in a row that has one; none in a row that has none; the best one is in it."""
    confidence, is_open = block
    before = confidence.clone(), is_open.clone()
    reveal = rule(confidence, is_open, step)
    assert reveal.dtype == torch.bool and reveal.shape == is_open.shape
    assert not (reveal & ~is_open).any()
    assert torch.equal(reveal.any(dim=1), is_open.any(dim=1))
    for b in is_open.any(dim=1).nonzero()[:, 0].tolist():
        assert confidence[b][reveal[b]].max() == confidence[b][is_open[b]].max()
    assert torch.equal(confidence, before[0]) and torch.equal(is_open, before[1])


@given(rule=RULES, block=blocks())
@settings(deadline=None, derandomize=True, max_examples=60)
def test_a_row_does_not_know_its_batch(rule, block):
    confidence, is_open = block
    reveal = rule(confidence, is_open, 0)
    for b in range(confidence.shape[0]):
        assert torch.equal(rule(confidence[b : b + 1], is_open[b : b + 1], 0)[0], reveal[b])


def reveal(rule, confidence: list[float], is_open: list[bool] | None = None, step: int = 0) -> list[int]:
    """Slots of one row that a rule reveals."""
    opened = torch.tensor([is_open if is_open is not None else [True] * len(confidence)])
    return rule(torch.tensor([confidence]), opened, step)[0].nonzero()[:, 0].tolist()


def test_threshold_is_strict():
    """0.5 is representable: a confidence equal to tau stays masked, unless it is the best one."""
    assert reveal(unmask.threshold(0.5), [0.5, 0.75, 0.5000001, 0.25]) == [1, 2]
    assert reveal(unmask.threshold(0.5), [0.25, 0.5, 0.125]) == [1]
    assert reveal(unmask.threshold(1.0), [1.0, 0.5, 1.0]) in ([0], [2])
    assert reveal(unmask.threshold(0.0), [0.25, 0.0, 0.5]) == [0, 2]


def test_threshold_reveals_all_above_it_and_skips_closed_slots():
    assert reveal(unmask.threshold(0.9), [0.95, 0.99, 0.91, 0.2], [True, False, True, True]) == [0, 2]
    assert reveal(unmask.threshold(0.9), [0.99, 0.3, 0.6, 0.2], [False, True, True, True]) == [2]


def test_a_confidence_of_zero_is_still_revealed_when_it_is_the_only_open_slot():
    assert reveal(unmask.threshold(0.9), [0.9, 0.0, 0.9], [False, True, False]) == [1]


def test_top_k():
    confidence = [0.1, 0.9, 0.5, 0.7]
    assert reveal(unmask.top_k(1), confidence) == [1]
    assert reveal(unmask.top_k(2), confidence) == [1, 3]
    assert reveal(unmask.top_k(2), confidence, [True, False, False, True]) == [0, 3]
    assert reveal(unmask.top_k(3), confidence, [False, False, True, False]) == [2]
    assert reveal(unmask.top_k(9), confidence) == [0, 1, 2, 3]


def test_most_confident_counts_per_row():
    confidence = torch.tensor([[0.1, 0.2, 0.3], [0.3, 0.2, 0.1], [0.3, 0.2, 0.1]])
    is_open = torch.tensor([[True, True, True], [False, True, True], [False, False, False]])
    found = unmask.most_confident(confidence, is_open, 2)
    assert found.tolist() == [[False, True, True], [False, True, True], [False, False, False]]


def shares(slots: int, steps: int) -> list[int]:
    """Slots revealed at each step until none is open."""
    rule, is_open, taken = unmask.spread(slots, steps), torch.ones(1, slots, dtype=torch.bool), []
    confidence = torch.rand(1, slots, generator=torch.Generator().manual_seed(slots))
    while is_open.any():
        now = rule(confidence, is_open, len(taken))
        taken.append(int(now.sum()))
        is_open &= ~now
    return taken


@pytest.mark.parametrize(
    "slots, steps, wanted",
    [(8, 3, [3, 3, 2]), (8, 4, [2, 2, 2, 2]), (32, 5, [7, 7, 6, 6, 6]), (7, 1, [7]), (3, 3, [1, 1, 1]), (3, 8, [1, 1, 1])],
)
def test_spread_by_hand(slots, steps, wanted):
    assert shares(slots, steps) == wanted


@given(slots=st.integers(1, 40), steps=st.integers(1, 45))
@settings(deadline=None, derandomize=True, max_examples=150)
def test_spread_spends_exactly_its_steps(slots, steps):
    taken = shares(slots, steps)
    assert len(taken) == min(slots, steps)
    assert max(taken) - min(taken) <= 1 and taken == sorted(taken, reverse=True)


@pytest.mark.parametrize("tau", [-0.1, 1.01, float("nan")])
def test_a_threshold_outside_0_to_1_is_refused(tau):
    with pytest.raises(ValueError, match=f"confidence_threshold is {tau}.*between 0 and 1"):
        unmask.threshold(tau)


@pytest.mark.parametrize("count", [0, -3])
def test_counts_below_1_are_refused(count):
    with pytest.raises(ValueError, match=f"tokens_per_step is {count}.*at least 1"):
        unmask.top_k(count)
    with pytest.raises(ValueError, match=f"steps is {count}.*at least 1"):
        unmask.spread(8, count)


def test_timesteps_round_down_as_published():
    """16 slots in 16 steps on times 1, 0.9376, ...: int(16 (1 - 0.9376)) = int(0.999) = 0 in the first step, then int(16 x 0.0666) = 1
    and so on, and two in the last. 4 slots in 2 steps: int(4 (1 - 0.5005)) = 1, then the other 3."""
    def counts(slots, steps):
        rule, is_open, found = unmask.timesteps(steps), torch.ones(1, slots, dtype=torch.bool), []
        for step in range(steps):
            revealed = rule(torch.rand(1, slots), is_open, step)
            assert not (revealed & ~is_open).any()
            found.append(int(revealed.sum()))
            is_open &= ~revealed
        return found

    assert counts(16, 16) == [0] + [1] * 14 + [2]
    assert counts(4, 2) == [1, 3]
    assert sum(counts(9, 4)) == 9


def test_timesteps_take_the_most_confident_of_each_row():
    """10 and 5 open slots at the first of 2 steps: int(10 x 0.4995) = 4 and int(5 x 0.4995) = 2."""
    confidence = torch.arange(10.0).repeat(2, 1)
    is_open = torch.ones(2, 10, dtype=torch.bool)
    is_open[1, 5:] = False
    revealed = unmask.timesteps(2)(confidence, is_open, 0)
    assert [row.nonzero()[:, 0].tolist() for row in revealed] == [[6, 7, 8, 9], [3, 4]]
    with pytest.raises(ValueError, match="steps is 0"):
        unmask.timesteps(0)


def test_factor_by_hand():
    """Confidences 0.95, 0.9, 0.8, 0.5: (n + 1)(1 - c_n) = 0.1, 0.3, 0.8, 2.5. Two are below 0.5, three below 1, none below 0.05."""
    confidence = [0.8, 0.95, 0.5, 0.9]
    assert reveal(unmask.factor(0.25), confidence) == [1]  # it is n + 1: with n two would go, 0.05 and 0.2
    assert reveal(unmask.factor(0.5), confidence) == [1, 3]
    assert reveal(unmask.factor(1.0), confidence) == [0, 1, 3]
    assert reveal(unmask.factor(0.05), confidence) == [1]
    assert reveal(unmask.factor(2.6), confidence) == [0, 1, 2, 3]
    assert reveal(unmask.factor(1.0), confidence, [True, False, True, True]) == [0, 3]  # 0.9, 0.8: 0.2 and 0.6


def test_entropy_bound_by_hand():
    """Entropies 0.1, 0.2, 0.4, 1.0: the sums without the largest are 0, 0.1, 0.3, 0.7."""
    score = [-0.4, -0.1, -1.0, -0.2]
    assert reveal(unmask.entropy_bound(0.0), score) == [1]
    assert reveal(unmask.entropy_bound(0.15), score) == [1, 3]
    assert reveal(unmask.entropy_bound(0.35), score) == [0, 1, 3]
    assert reveal(unmask.entropy_bound(0.75), score) == [0, 1, 2, 3]
    assert reveal(unmask.entropy_bound(0.15), score, [True, False, True, True]) == [3]


@given(block=blocks(), bound=st.floats(0, 3))
@settings(deadline=None, derandomize=True, max_examples=100)
def test_entropy_bound_reveals_open_slots_and_at_least_one(block, bound):
    confidence, is_open = block
    revealed = unmask.entropy_bound(bound)(-confidence, is_open, 0)
    assert not (revealed & ~is_open).any() and torch.equal(revealed.any(dim=1), is_open.any(dim=1))


@pytest.mark.parametrize("make, value, named", [
    (unmask.factor, 0.0, "factor is 0.0"), (unmask.factor, float("nan"), "factor is nan"),
    (unmask.entropy_bound, -1.0, "entropy_bound is -1.0"),
])
def test_a_bound_out_of_range_is_refused(make, value, named):
    with pytest.raises(ValueError, match=named):
        make(value)


# where every step decides every slot


def test_the_temperature_falls_from_t_max_to_one_step_above_t_min():
    """4 steps from 0.8 to 0.4: 0.4 + 0.4 n / 4 with n = 4, 3, 2, 1 steps left."""
    found = [float(unmask.temperature(step, 4, 0.4, 0.8)) for step in range(4)]
    assert found == pytest.approx([0.8, 0.7, 0.6, 0.5])
    assert unmask.temperature(1, 3, 0.4, 0.8).dtype == torch.float32


def test_what_is_not_accepted_becomes_noise():
    accept = torch.tensor([[True, False, True]])
    assert unmask.renoise(torch.tensor([[5, 6, 7]]), accept, torch.tensor([[1, 2, 3]])).tolist() == [[5, 2, 7]]


@pytest.mark.parametrize("stability, wanted", [
    (0, [[True, True, False], [True, True, False], [True, False, True], [True, True, True]]),
    (1, [[False, False, False], [True, True, False], [True, False, True], [True, False, True]]),
    (2, [[False, False, False], [False, False, False], [True, False, True], [True, False, True]]),
])  # fmt: skip
def test_a_row_is_done_when_stable_and_sure(stability, wanted):
    """Row 0 never changes and is always sure; row 1 is unsure at the third step (mean 0.3) and changes at the fourth; row 2 never changes
    and is sure (mean below 0.25) from the third step on."""
    best = [[[1, 2], [3, 4], [5, 6]]] * 3 + [[[1, 2], [3, 9], [5, 6]]]
    entropy = [[[0.1, 0.1], [0.2, 0.2], [0.5, 0.1]]] * 2 + [[[0.1, 0.1], [0.5, 0.1], [0.2, 0.2]], [[0.1, 0.1], [0.1, 0.1], [0.0, 0.4]]]
    settled = unmask.Settled(stability, 0.25)
    found = [settled(torch.tensor(b), torch.tensor(e)).tolist() for b, e in zip(best, entropy, strict=True)]
    assert found == wanted
