"""Which position may look at which. Knows positions and blocks; knows no token, no weight and no model.

Every mask of this package is one comparison a pair of tokens. A clean key is seen up to the query's *horizon*, a key that stands
in a *group* is seen by the queries of that group alone:

    allow(q, k) = position_k <= horizon_q    where k is clean
                  group_k == group_q         where k stands in a group.

Causal attention has horizon = position; block-causal attention rounds it up to the end of the query's block; full attention
has no horizon. Groups are the blocks of mask tokens that stand beside the clean text: the noisy half of block diffusion
training, TiDAR's masks, the proposals of draft and verify. (CDLM, arXiv 2511.19269, section 4 and figure 2; BD3-LM,
arXiv 2503.09573, section 3; TiDAR, arXiv 2511.08923, figures 2 and 3.)

Shapes: B rows, L tokens, P prefix, C clean tokens, N noisy tokens, Q queries, K keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ORIGINS = ("prompt_end", "zero")
PROMPT_ATTENTION = ("bidirectional", "block_causal", "causal")
NEVER = torch.iinfo(torch.int32).max
NO_HORIZON = NEVER - 1
CLEAN = -1
NO_GROUP = -2


@dataclass(frozen=True, eq=False)
class Sight:
    """Who looks at whom, in four rows of integers in place of a [Q, K] matrix. Equal to itself only.

    horizon_BQ: last clean position that a query sees. group_BQ: the group it stands in, or NO_GROUP.
    position_BK: absolute position of a key, or NEVER for padding. group_BK: the group it stands in (0 or more), or CLEAN.
    """

    horizon_BQ: Tensor
    group_BQ: Tensor
    position_BK: Tensor
    group_BK: Tensor

    def __post_init__(self) -> None:
        shapes = {name: tuple(getattr(self, name).shape) for name in ("horizon_BQ", "group_BQ", "position_BK", "group_BK")}
        if shapes["horizon_BQ"] != shapes["group_BQ"] or shapes["position_BK"] != shapes["group_BK"]:
            raise ValueError(f"horizon and group of the queries have one shape, position and group of the keys one; these have {shapes}")
        if len(shapes["horizon_BQ"]) != 2 or len(shapes["position_BK"]) != 2 or shapes["horizon_BQ"][0] != shapes["position_BK"][0]:
            raise ValueError(f"queries are [B, Q] and keys [B, K] of the same rows; these have {shapes}")

    def allow(self) -> Tensor:
        """The matrix, [B, Q, K], True where the query may look."""
        clean = (self.group_BK == CLEAN)[:, None, :]
        near = self.position_BK[:, None, :] <= self.horizon_BQ[:, :, None]
        return torch.where(clean, near, self.group_BK[:, None, :] == self.group_BQ[:, :, None])

    def packed(self) -> Tensor:
        """As one tensor [B, 1, 2, Q + K], int32: it passes through a transformers model as an attention mask of four dimensions."""
        seen = torch.cat([self.horizon_BQ, self.position_BK], dim=1)
        group = torch.cat([self.group_BQ, self.group_BK], dim=1)
        return torch.stack([seen, group], dim=1)[:, None].to(torch.int32)

    @staticmethod
    def unpack(packed: Tensor, queries: int) -> "Sight":
        """The inverse of `packed`, in tensors of its own."""
        seen, group = packed[:, 0, 0], packed[:, 0, 1]
        return Sight(*(x.clone() for x in (seen[:, :queries], group[:, :queries], seen[:, queries:], group[:, queries:])))


@dataclass(frozen=True)
class Tokens:
    """A run of tokens that a mask is put together from, [B, L] each. group_BL is None for clean tokens."""

    position_BL: Tensor
    horizon_BL: Tensor
    valid_BL: Tensor
    group_BL: Tensor | None = None


def sight(queries: Sequence[Tokens], keys: Sequence[Tokens]) -> Sight:
    """Runs of queries that look at runs of keys, in the order given. Padding is seen by nobody; a padding query in a group sees nothing."""

    def groups(parts: Sequence[Tokens], clean: int) -> Tensor:
        rows = [torch.full_like(t.position_BL, clean) if t.group_BL is None else t.group_BL.masked_fill(~t.valid_BL, clean) for t in parts]
        return torch.cat(rows, dim=1)

    horizons = [t.horizon_BL if t.group_BL is None else t.horizon_BL.masked_fill(~t.valid_BL, -1) for t in queries]
    return Sight(
        torch.cat(horizons, dim=1), groups(queries, NO_GROUP),
        torch.cat([t.position_BL.masked_fill(~t.valid_BL, NEVER) for t in keys], dim=1), groups(keys, CLEAN),
    )


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


def blocks(position_BL: Tensor, prompt_length_B: Tensor, block_length: int, *, origin: str = "prompt_end") -> Tensor:
    """Number of the block that each position is in, [B, L], counted from the origin; negative in a prompt that precedes it."""
    start_B1 = prompt_length_B[:, None] if origin == "prompt_end" else torch.zeros_like(prompt_length_B[:, None])
    return torch.div(position_BL - start_B1, block_length, rounding_mode="floor")


def full(position_BL: Tensor) -> Tensor:
    """Horizon of full attention, [B, L]: everything."""
    return torch.full_like(position_BL, NO_HORIZON)


def everything(device: torch.device) -> Tensor:
    """The packed form of no mask at all: every query sees every key. (None would have a model make a causal mask of its own.)"""
    return torch.empty(1, 1, 2, 0, dtype=torch.int32, device=device)


def clean(horizon_BQ: Tensor, position_BK: Tensor, valid_BK: Tensor) -> Sight:
    """Clean queries with these horizons, and clean keys: block-causal, causal or full attention, over a cached prefix or none."""
    everywhere = torch.ones_like(horizon_BQ, dtype=torch.bool)
    return sight([Tokens(horizon_BQ, horizon_BQ, everywhere)], [Tokens(position_BK, position_BK, valid_BK)])


def noisy_clean(
    position_BN: Tensor, valid_BN: Tensor, clean: Tokens, prompt_length_B: Tensor, block_length: int, *, origin: str = "prompt_end",
    clean_first: bool = False,
) -> Sight:
    """Training of block diffusion in one forward, [noisy | clean]: a noisy block sees itself and the clean tokens before it.

    position_BN: absolute positions of noisy answer slots. clean: prompt and clean answer, with their own horizons (`horizon`,
    or the position for a causal stream). The prompt is clean for every block, also where it ends inside one (origin "zero").
    clean_first gives [clean | noisy], TiDAR's order. (BD3-LM, arXiv 2503.09573.)
    """
    start_B1 = prompt_length_B[:, None] if origin == "prompt_end" else torch.zeros_like(prompt_length_B[:, None])
    block_BN = (position_BN - start_B1) // block_length
    before_BN = torch.maximum(start_B1 + block_BN * block_length, prompt_length_B[:, None]) - 1
    noisy = Tokens(position_BN, before_BN, valid_BN, block_BN)
    parts = [clean, noisy] if clean_first else [noisy, clean]
    return sight(parts, parts)


def tidar_training(valid_BS: Tensor, block_length: int) -> Sight:
    """TiDAR's training mask, [clean | masks], both of S tokens: causal text, and blocks of masks that see the text before them.

    Blocks start at multiples of block_length, counted over real tokens. (TiDAR, arXiv 2511.08923, figure 2.)
    """
    position_BS = positions(valid_BS)
    text = Tokens(position_BS, position_BS, valid_BS)
    nothing_asked = torch.zeros(len(valid_BS), dtype=torch.long, device=valid_BS.device)
    return noisy_clean(position_BS, valid_BS, text, nothing_asked, block_length, origin="zero", clean_first=True)


def tidar_decoding(prefix_valid_BP: Tensor, draft_length: int, *, prefix_last: bool = False) -> tuple[Sight, Tensor]:
    """One step of draft and verify: K drafts, then K proposals of K masks, against a cached prefix of P tokens.

    Draft j stands at position L + j and is causal; proposal r (1 to K) stands at L + r ... L + r + K - 1, sees the prefix, the
    first r drafts and itself. K (K + 1) queries. Keys stand as [prefix | queries], or [queries | prefix] with prefix_last, for
    which a mask can be built once and cut to length. Gives the mask and the queries' positions [B, K (K + 1)].
    (TiDAR, arXiv 2511.08923, figure 3.)
    """
    count, device = draft_length, prefix_valid_BP.device
    length_B1 = prefix_valid_BP.sum(dim=1, keepdim=True)
    draft_BK = length_B1 + torch.arange(count, device=device)
    number = torch.arange(1, count + 1, device=device).repeat_interleave(count)
    proposal_BM = length_B1 + number + torch.arange(count, device=device).repeat(count)
    here = torch.ones_like(draft_BK, dtype=torch.bool), torch.ones_like(proposal_BM, dtype=torch.bool)
    drafts = Tokens(draft_BK, draft_BK, here[0])
    proposals = Tokens(proposal_BM, length_B1 + number - 1, here[1], number.expand_as(proposal_BM))
    place_BP = positions(prefix_valid_BP)
    prefix = Tokens(place_BP, place_BP, prefix_valid_BP)
    keys = [drafts, proposals, prefix] if prefix_last else [prefix, drafts, proposals]
    return sight([drafts, proposals], keys), torch.cat([draft_BK, proposal_BM], dim=1)


def tidar_prefill(prompt_valid_BP: Tensor, draft_length: int) -> tuple[Sight, Tensor]:
    """The first forward of draft and verify, [masks | prompt]: a causal prompt that sees no mask, and masks behind it that see it and
    one another. Gives the mask and all positions [B, K + P]."""
    place_BP = positions(prompt_valid_BP)
    length_B1 = prompt_valid_BP.sum(dim=1, keepdim=True)
    mask_BK = length_B1 + torch.arange(draft_length, device=place_BP.device)
    everywhere = torch.ones_like(mask_BK, dtype=torch.bool)
    parts = [
        Tokens(mask_BK, (length_B1 - 1).expand_as(mask_BK), everywhere, torch.zeros_like(mask_BK)),
        Tokens(place_BP, place_BP, prompt_valid_BP),
    ]
    return sight(parts, parts), torch.cat([mask_BK, place_BP], dim=1)


def dense(seen: Sight) -> Tensor:
    """Boolean mask [B, 1, Q, K], True where the query may look (the 4D form that transformers' models take).

    Padding queries stand at position 0 (see `positions`) and see what the first token sees; nobody looks at them and their
    outputs are never read. A query that would see nothing is let look at everything, so that softmax stays finite.
    """
    allow = seen.allow()
    return (allow | ~allow.any(dim=-1, keepdim=True))[:, None]


def positions(valid_BL: Tensor) -> Tensor:
    """Absolute positions from a padding mask (True = real token), [B, L]; padding gets position 0."""
    return (valid_BL.long().cumsum(dim=1) - 1).clamp(min=0)
