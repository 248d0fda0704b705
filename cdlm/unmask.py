"""Which open slots are revealed now. No model in sight: confidences in, a subset of the open slots out.

A rule is a function (confidence_BL, open_BL, step) -> reveal_BL. Every rule returns a subset of the open slots, and at
least one slot in each row that has one (contract 3); `timesteps`, which copies a published schedule, may leave steps out. In place of
confidences any score may stand whose largest values come first, where a rule has no threshold. Shapes: B rows, L slots of the active block.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Rule = Callable[[Tensor, Tensor, int], Tensor]


def most_confident(confidence_BL: Tensor, open_BL: Tensor, count: int) -> Tensor:
    """The `count` most confident open slots of each row (all of them if fewer are open)."""
    score_BL = confidence_BL.float().masked_fill(~open_BL, -torch.inf)
    top = score_BL.topk(min(count, score_BL.shape[1]), dim=1).indices
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
