"""Which open slots are revealed now. No model in sight: confidences in, a subset of the open slots out.

A rule is a function (confidence_BL, open_BL, step) -> reveal_BL. Every rule returns a subset of the open slots, and at
least one slot in each row that has one (contract 3); `timesteps`, which copies a published schedule, may leave steps out. In place of
confidences any score may stand whose largest values come first, where a rule has no threshold.

Where noise is not marked, every slot is open at every step, and what a rule returns is *accepted*: those slots take the token that was
drawn for them, all others become noise again, and the next step decides anew. Such a block needs a temperature for its draws, and a rule
that says when it is done. Shapes: B rows, L slots of the active block.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Rule = Callable[[Tensor, Tensor, int], Tensor]


def most_confident(confidence_BL: Tensor, open_BL: Tensor, count: int) -> Tensor:
    """The `count` most confident open slots of each row (all of them if fewer are open)."""
    score_BL = confidence_BL.float().masked_fill(~open_BL, -torch.inf)
    top = score_BL.argmax(dim=1, keepdim=True) if count == 1 else score_BL.topk(min(count, score_BL.shape[1]), dim=1).indices
    return torch.zeros_like(open_BL).scatter(1, top, True) & open_BL


def threshold(tau: float) -> Rule:
    """Every open slot with confidence > tau (strictly), and always the most confident one.

    (Fast-dLLM, arXiv 2505.22618, section 3.3; CDLM, section 6. tau is a probability, not its logarithm.)
    """
    if not 0.0 <= tau <= 1.0:
        raise ValueError(f"confidence_threshold is {tau}; it is a probability between 0 and 1")

    def rule(confidence_BL: Tensor, open_BL: Tensor, step: int) -> Tensor:
        return (open_BL & (confidence_BL > tau)) | most_confident(confidence_BL, open_BL, 1)

    return rule


def factor(value: float) -> Rule:
    """The n most confident open slots, n the largest for which (n + 1)(1 - c_n) < factor, c_n the confidence of the n-th; at least one.

    The less sure the last of them is, the fewer go together. (Fast-dLLM, arXiv 2505.22618, factor-based decoding.)
    """
    if not 0 < value < float("inf"):
        raise ValueError(f"factor is {value}; it must be above 0 and finite")

    def rule(confidence_BL: Tensor, open_BL: Tensor, step: int) -> Tensor:
        ordered_BL, place_BL = confidence_BL.float().masked_fill(~open_BL, -torch.inf).sort(dim=1, descending=True)
        number_L = torch.arange(1, ordered_BL.shape[1] + 1, device=ordered_BL.device)
        fits_BL = (number_L + 1) * (1 - ordered_BL) < value
        count_B = (fits_BL * number_L).amax(dim=1).clamp(min=1)
        chosen_BL = number_L <= count_B[:, None]
        return torch.zeros_like(open_BL).scatter(1, place_BL, chosen_BL) & open_BL

    return rule


def entropy_bound(bound: float) -> Rule:
    """The open slots of smallest entropy, as many as keep the sum of their entropies less the largest of them within `bound` (nats).

    The score that this rule gets is the negative entropy (order "entropy"). That difference bounds how far the joint distribution of the
    slots is from the product of their own. (EB-Sampler, arXiv 2505.24857; at least one slot.)
    """
    if not 0 <= bound < float("inf"):
        raise ValueError(f"entropy_bound is {bound}; it must be 0 or above, and finite")

    def rule(score_BL: Tensor, open_BL: Tensor, step: int) -> Tensor:
        ordered_BL, place_BL = (-score_BL.float()).masked_fill(~open_BL, torch.inf).sort(dim=1)
        before_BL = ordered_BL.cumsum(dim=1) - ordered_BL  # sorted, so the last is the largest: the sum of all before it
        return torch.zeros_like(open_BL).scatter(1, place_BL, before_BL <= bound) & open_BL

    return rule


def top_k(count: int) -> Rule:
    """A fixed number of slots a step, the most confident first (LLaDA's low-confidence remasking). 1 is the naive decoder."""
    if count < 1:
        raise ValueError(f"tokens_per_step is {count}; at least 1 slot is revealed a step")
    return lambda confidence_BL, open_BL, step: most_confident(confidence_BL, open_BL, count)


def spread(slots: int, steps: int) -> Rule:
    """`slots` slots over at most `steps` steps: each step takes an equal share, the earlier ones the remainder.

    `step` counts from 0 within the block. This is the teacher "cut to K steps" of the paper's truncation baseline.
    """
    if steps < 1:
        raise ValueError(f"steps is {steps}; a block takes at least 1 step")
    share, rest = divmod(slots, steps)

    def rule(confidence_BL: Tensor, open_BL: Tensor, step: int) -> Tensor:
        return most_confident(confidence_BL, open_BL, max(1, share + (step < rest)))

    return rule


def timesteps(steps: int, epsilon: float = 1e-3) -> Rule:
    """The schedule of the reverse process on a grid of times from 1 to epsilon: going from t to s, int(open (1 - s / t)) slots are
    revealed, the most confident first; the last step reveals all that is left.

    int() rounds down, so a step may reveal none: 16 slots in 16 steps start with a step that reveals none and end with one that reveals
    two. (Dream, arXiv 2508.15487, as its generation code rounds.)
    """
    if steps < 1:
        raise ValueError(f"steps is {steps}; a block takes at least 1 step")
    time = torch.linspace(1, epsilon, steps + 1)

    def rule(confidence_BL: Tensor, open_BL: Tensor, step: int) -> Tensor:
        if step >= steps - 1:
            return open_BL.clone()
        count_B = (open_BL.sum(dim=1).cpu() * (1 - time[step + 1] / time[step])).long().to(open_BL.device)
        rank_BL = confidence_BL.float().masked_fill(~open_BL, -torch.inf).argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        return (rank_BL < count_B[:, None]) & open_BL

    return rule


def temperature(step: int, steps: int, t_min: float, t_max: float) -> Tensor:
    """Temperature of a step, counted from 0: t_min + (t_max - t_min) n / N with n = N - step, the steps that are left. It starts at t_max
    and ends one N-th above t_min. fp32, as it divides logits. (DiffusionGemma, as its generation code has it.)"""
    left = torch.tensor(steps - step, dtype=torch.int32)
    return t_min + (t_max - t_min) * (left / steps)


def renoise(token_BL: Tensor, accept_BL: Tensor, noise_BL: Tensor) -> Tensor:
    """The block after a step that decides every slot anew: accepted slots hold the token drawn for them, all others noise."""
    return torch.where(accept_BL, token_BL, noise_BL)


class Settled:
    """Says which rows are done: those whose most probable tokens are what they were in each of the last `stability` steps of this block,
    and whose slots' entropies (nats) have a mean below `entropy`. (DiffusionGemma's stable-and-confident stopping.)

    stability 0 asks for the entropy alone. An object serves one block.
    """

    def __init__(self, stability: int, entropy: float):
        self.stability, self.entropy = stability, entropy
        self.before: list[Tensor] = []

    def __call__(self, best_BL: Tensor, entropy_BL: Tensor) -> Tensor:
        done_B = entropy_BL.mean(dim=-1) < self.entropy
        if len(self.before) < self.stability:
            done_B = torch.zeros_like(done_B)
        for earlier_BL in self.before:
            done_B = done_B & (earlier_BL == best_BL).all(dim=-1)
        self.before = [*self.before, best_BL][1 if len(self.before) == self.stability else 0 :]
        return done_B
