"""torch's scaled_dot_product_attention: on a CPU, and wherever every key is seen."""

from weakref import WeakKeyDictionary

import torch.nn.functional as F
from torch import Tensor

from cdlm.masks import Sight

_dense: WeakKeyDictionary[Sight, tuple[Tensor, Tensor]] = WeakKeyDictionary()


def attend(q_BHQD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor, seen: Sight | None, scale: float) -> Tensor:
    """As the naive backend gives, without log-sum-exp."""
    gqa = q_BHQD.shape[1] != k_BGKD.shape[1]
    if seen is None:
        return F.scaled_dot_product_attention(q_BHQD, k_BGKD, v_BGKD, scale=scale, enable_gqa=gqa)
    if seen not in _dense:  # all layers share a mask
        allow_BQK = seen.allow()
        blind_BQ1 = ~allow_BQK.any(dim=-1, keepdim=True)
        _dense[seen] = (allow_BQK | blind_BQ1)[:, None], blind_BQ1[:, None]
    mask, blind = _dense[seen]
    out = F.scaled_dot_product_attention(q_BHQD, k_BGKD, v_BGKD, attn_mask=mask, scale=scale, enable_gqa=gqa)
    return out.masked_fill(blind, 0.0)
