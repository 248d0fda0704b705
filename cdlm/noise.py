"""How clean tokens become noisy, and how much a noise level weighs. Knows no model and no task.

Shapes: B rows, L tokens.
"""

import torch
from torch import Tensor


def mask_tokens(
    ids_BL: Tensor, level: Tensor, maskable_BL: Tensor, mask_token_id: int, uniform_BL: Tensor
) -> tuple[Tensor, Tensor]:
    """Absorbing noise: each maskable token becomes the mask token with probability `level`.

    level: one a row [B], or one a token [B, L] (block diffusion: one a block).
    uniform_BL: draws from U[0, 1), given by the caller so that a row's noise does not depend on its batch.
    Returns the noisy ids and where they were masked, both [B, L]. (LLaDA, arXiv 2502.09992, equation 3 and
    CDLM, arXiv 2511.19269, equation 6: q(x_t | x_0) masks i.i.d. with probability t.)
    """
    masked_BL = maskable_BL & (uniform_BL < (level[:, None] if level.ndim == 1 else level))
    return torch.where(masked_BL, mask_token_id, ids_BL), masked_BL


def rising_cap(progress: float, first: float, ramp: float) -> float:
    """Upper end of the noise levels at `progress` (0..1) of training: from `first` to 1 over the first `ramp` of it.

    first=1 gives the plain U(0, 1) of the papers. A small network that starts with few masks first learns to compute
    one token from its neighbours, and then, level by level, from less.
    """
    if ramp <= 0:
        return 1.0
    return min(1.0, first + (1.0 - first) * progress / ramp)


def noise_level(uniform_B: Tensor, cap: float, floor: float) -> Tensor:
    """Noise levels t = floor + (cap - floor) u, u ~ U[0, 1). The weight of a level is 1 / t, so `floor` bounds it."""
    return floor + (cap - floor) * uniform_B
