"""Attention by its definition: the judge of every other backend."""

import torch
from torch import Tensor

from cdlm.masks import Sight


def attend(q_BHQD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor, seen: Sight | None, scale: float) -> tuple[Tensor, Tensor]:
    """softmax(q k^T scale) v over the keys that each query sees, in fp32, and its log-sum-exp [B, H, Q].

    A query that sees nothing gives zeros, and a log-sum-exp of minus infinity.
    """
    group = q_BHQD.shape[1] // k_BGKD.shape[1]
    k, v = (x.repeat_interleave(group, dim=1).float() for x in (k_BGKD, v_BGKD))
    score_BHQK = q_BHQD.float() @ k.mT * scale
    if seen is not None:
        score_BHQK = score_BHQK.masked_fill(~seen.allow()[:, None], -torch.inf)
    lse_BHQ = score_BHQK.logsumexp(dim=-1)
    finite = torch.where(lse_BHQ.isinf(), 0.0, lse_BHQ)
    return ((score_BHQK - finite[..., None]).exp() @ v).to(q_BHQD.dtype), lse_BHQ
