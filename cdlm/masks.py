"""Which position may look at which. Knows positions and blocks; knows no token, no weight and no model.

Every mask of this package is one comparison: a query at `position` may look at keys up to its *horizon*,

    allow(q, k) = position_k <= horizon(q)  and  k is not padding.

Causal attention has horizon = position; block-causal attention rounds it up to the end of the query's block; full
attention has no horizon. (CDLM, arXiv 2511.19269, section 4 and figure 2.)

Shapes: B rows, L tokens, Q queries, K keys.
"""

import torch
from torch import Tensor

ORIGINS = ("prompt_end", "zero")
PROMPT_ATTENTION = ("bidirectional", "block_causal", "causal")
NO_HORIZON = torch.iinfo(torch.int32).max


def horizon(
    position_BL: Tensor,
    prompt_length_B: Tensor,
    block_length: int,
    *,
    origin: str = "prompt_end",
    prompt_attention: str = "bidirectional",
) -> Tensor:
    """Last position that each query may look at under the block-causal mask, [B, L].

    position_BL: absolute positions, padding not counted (the first real token of a row is 0).
    prompt_length_B: real prompt tokens of each row.
    origin: where blocks start, "prompt_end" or "zero" (position 0). With "zero" the tail of a prompt shares
        its block with the first answer tokens, is visible to that whole block, and sees it unless the prompt is causal.
    prompt_attention: how prompt rows that share no block with the answer look at one another: "bidirectional",
        "block_causal" or "causal".

    A bidirectional prompt row sees the whole prompt; a block-causal one its own block, cut at the end of the prompt
    when blocks start there; a causal one itself and what precedes it.
    """
    for name, value, allowed in (("origin", origin, ORIGINS), ("prompt_attention", prompt_attention, PROMPT_ATTENTION)):
        if value not in allowed:
            raise ValueError(f"{name} is {value!r}; allowed: {', '.join(allowed)}")
    if block_length < 1:
        raise ValueError(f"block_length is {block_length}; a block holds at least 1 token")
    prompt_B1 = prompt_length_B[:, None]
    start_B1 = prompt_B1 if origin == "prompt_end" else torch.zeros_like(prompt_B1)
    block_end = start_B1 + ((position_BL - start_B1) // block_length + 1) * block_length - 1
    if prompt_attention == "causal":
        in_prompt = position_BL
    elif prompt_attention == "bidirectional":
        in_prompt = (prompt_B1 - 1).expand_as(position_BL)
        if origin == "zero":
            in_prompt = torch.maximum(in_prompt, block_end)
    elif origin == "zero":
        in_prompt = block_end
    else:  # block-causal prompt, its blocks counted from position 0 and the last one cut at the prompt's end
        in_prompt = torch.minimum((position_BL // block_length + 1) * block_length - 1, prompt_B1 - 1)
    return torch.where(position_BL < prompt_B1, in_prompt, block_end)


def attention_mask(horizon_BQ: Tensor, key_position_BK: Tensor, key_valid_BK: Tensor) -> Tensor:
    """Boolean mask [B, 1, Q, K], True where the query may look (the 4D form that transformers' models take).

    Padding queries stand at position 0 (see `positions`) and see what the first token sees; nobody looks at them and their
    outputs are never read. A query that would see nothing is let look at everything, so that softmax stays finite.
    """
    allow = (key_position_BK[:, None, :] <= horizon_BQ[:, :, None]) & key_valid_BK[:, None, :]
    allow = allow | ~allow.any(dim=-1, keepdim=True)
    return allow[:, None]


def positions(valid_BL: Tensor) -> Tensor:
    """Absolute positions from a padding mask (True = real token), [B, L]; padding gets position 0."""
    return (valid_BL.long().cumsum(dim=1) - 1).clamp(min=0)
