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
from typing import NamedTuple

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


class Packed(NamedTuple):
    """Several runs of one text in one forward: who looks at whom, where each query stands, and what it comes after.

    before_BQ: index of the query row that holds the token before it in its own run; -1 where that is the last committed token of the
    cache (or, without a cache, nothing). Attention does not need it; models that mix neighbouring tokens do.
    """

    sight: Sight
    position_BQ: Tensor
    before_BQ: Tensor


def _after(first_B1: Tensor, start: int, count: int) -> Tensor:
    """`before` of a run of rows that stands at query `start`: its first row comes after `first`, each other one after its neighbour."""
    rest = torch.arange(start, start + max(count - 1, 0), device=first_B1.device).expand(len(first_B1), -1)
    return torch.cat([first_B1, rest], dim=1)[:, :count]


def tidar_training(valid_BS: Tensor, block_length: int, skip: int = 0) -> Packed:
    """TiDAR's training layout, [clean | masks]: causal text, and blocks of masks that see the text before their own block.

    Both have S tokens; with `skip` the masks stand for the columns from there on alone, and a block that begins before that column is
    padding. Blocks start at multiples of block_length, counted over real tokens. A mask row has the position of the token it stands for,
    and follows the mask before it, or, at the head of a block, the clean token there. (TiDAR, arXiv 2511.08923, figure 2.)
    """
    position_BS = positions(valid_BS)
    width, device = valid_BS.shape[1], valid_BS.device
    position_BM, valid_BM = position_BS[:, skip:], valid_BS[:, skip:]
    column_M = torch.arange(skip, width, device=device)
    start_BM = column_M - position_BM % block_length  # the column at which a row's block begins
    valid_BM = valid_BM & (start_BM >= skip)
    text = Tokens(position_BS, position_BS, valid_BS)
    nothing_asked = torch.zeros(len(valid_BS), dtype=torch.long, device=device)
    seen = noisy_clean(position_BM, valid_BM, text, nothing_asked, block_length, origin="zero", clean_first=True)
    column_S = torch.arange(width, device=device)
    text_before = torch.where(valid_BS & (position_BS > 0), column_S - 1, -1)
    masks_before = torch.where(start_BM == column_M, column_M - 1, width - skip + column_M - 1)
    masks_before = torch.where(valid_BM & (position_BM > 0), masks_before, -1)
    return Packed(seen, torch.cat([position_BS, position_BM], dim=1), torch.cat([text_before, masks_before], dim=1))


def tidar_decoding(
    prefix_valid_BP: Tensor, drafts: int, proposals: int | None = None, slots: int | None = None, *, prefix_last: bool = False
) -> Packed:
    """One step of draft and verify against a cached prefix of L real tokens: K drafts, then M proposals of S masks.

    Draft j (from 0) stands at position L + j and is causal; proposal r (1 to M, M at most K) stands at L + r ... L + r + S - 1, sees the
    prefix, the first r drafts and itself, and comes after draft r. K + M S queries; M and S are K if not given, which is the paper's
    layout of K (K + 1). Keys stand as [prefix | queries], or [queries | prefix] with prefix_last, for which a mask can be built once and
    cut to length. (TiDAR, arXiv 2511.08923, figure 3.)
    """
    count = drafts if proposals is None else proposals
    slots = drafts if slots is None else slots
    if not 0 <= count <= drafts:
        raise ValueError(f"{count} proposals for {drafts} drafts; a proposal follows each of the first drafts, so at most {drafts}")
    batch, device = len(prefix_valid_BP), prefix_valid_BP.device
    length_B1 = prefix_valid_BP.sum(dim=1, keepdim=True)
    draft_BK = length_B1 + torch.arange(drafts, device=device)
    number = torch.arange(1, count + 1, device=device).repeat_interleave(slots)
    proposal_BM = length_B1 + number + torch.arange(slots, device=device).repeat(count)
    here = torch.ones_like(draft_BK, dtype=torch.bool), torch.ones_like(proposal_BM, dtype=torch.bool)
    texts = Tokens(draft_BK, draft_BK, here[0])
    blocks_of_masks = Tokens(proposal_BM, length_B1 + number - 1, here[1], number.expand_as(proposal_BM))
    place_BP = positions(prefix_valid_BP)
    prefix = Tokens(place_BP, place_BP, prefix_valid_BP)
    keys = [texts, blocks_of_masks, prefix] if prefix_last else [prefix, texts, blocks_of_masks]
    start_B1 = torch.full((batch, 1), -1, device=device)
    before = [_after(start_B1, 0, drafts)]
    before += [_after(start_B1 + r, drafts + (r - 1) * slots, slots) for r in range(1, count + 1)]  # draft r is query r - 1
    return Packed(sight([texts, blocks_of_masks], keys), torch.cat([draft_BK, proposal_BM], dim=1), torch.cat(before, dim=1))


def tidar_prefill(prompt_valid_BP: Tensor, slots: int, *, masks_last: bool = False) -> Packed:
    """The first forward of draft and verify, [masks | prompt]: a causal prompt that sees no mask, and masks behind it that see it and
    one another. With masks_last [prompt | masks], so that a cache can keep the first P rows. P + slots queries."""
    place_BP = positions(prompt_valid_BP)
    length_B1 = prompt_valid_BP.sum(dim=1, keepdim=True)
    mask_BK = length_B1 + torch.arange(slots, device=place_BP.device)
    everywhere = torch.ones_like(mask_BK, dtype=torch.bool)
    drafting = Tokens(mask_BK, (length_B1 - 1).expand_as(mask_BK), everywhere, torch.zeros_like(mask_BK))
    text = Tokens(place_BP, place_BP, prompt_valid_BP)
    parts = [text, drafting] if masks_last else [drafting, text]
    width, offset, first = place_BP.shape[1], 0 if masks_last else slots, place_BP.shape[1] if masks_last else 0
    column_P = torch.arange(offset, offset + width, device=place_BP.device)
    text_before = torch.where(prompt_valid_BP & (place_BP > 0), column_P - 1, -1)
    masks_before = _after(torch.full_like(length_B1, offset + width - 1), first, slots)
    runs = [(place_BP, text_before), (mask_BK, masks_before)]
    position, before = zip(*(runs if masks_last else runs[::-1]), strict=True)
    return Packed(sight(parts, parts), torch.cat(position, dim=1), torch.cat(before, dim=1))


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
