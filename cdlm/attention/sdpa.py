"""torch's scaled_dot_product_attention: on a CPU, and wherever every key is seen."""

import torch.nn.functional as F
from torch import Tensor

from cdlm.masks import Sight


def attend(q_BHQD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor, seen: Sight | None, scale: float) -> Tensor:
    """As the naive backend gives, without log-sum-exp."""
    gqa = q_BHQD.shape[1] != k_BGKD.shape[1]
    if seen is None:
        return F.scaled_dot_product_attention(q_BHQD, k_BGKD, v_BGKD, scale=scale, enable_gqa=gqa)
    allow_BQK = seen.allow()
    blind_BQ1 = ~allow_BQK.any(dim=-1, keepdim=True)
    mask = (allow_BQK | blind_BQ1)[:, None]
    out = F.scaled_dot_product_attention(q_BHQD, k_BGKD, v_BGKD, attn_mask=mask, scale=scale, enable_gqa=gqa)
    return out.masked_fill(blind_BQ1[:, None], 0.0)
