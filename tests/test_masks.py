"""Masks against a double loop over positions, against transformers' own mask, and under attention."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from cdlm import masks

ORIGINS = ("prompt_end", "zero")
PROMPT_ATTENTIONS = ("bidirectional", "block_causal", "causal")


def may_look(q: int, k: int, prompt: int, block: int, origin: str, prompt_attention: str) -> bool:
    """The definition, for one query and one key, both real tokens at absolute positions."""

    def number(i: int) -> int:
        """Block of a position; the prompt is block -1 where blocks start behind it."""
        if origin == "zero":
            return i // block
        return -1 if i < prompt else (i - prompt) // block

    if q >= prompt:  # an answer row: all earlier blocks and its own
        return number(k) <= number(q)
    if prompt_attention == "causal":
        return k <= q
    if origin == "zero" and number(q) == number(prompt):  # the prompt's tail, in the block of the first answer token
        return number(k) <= number(q)
    if prompt_attention == "bidirectional":
        return k < prompt
    return k < prompt and k // block <= q // block


def layout(prompts: list[int], slots: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Left-padded rows of these prompts and as many slots: which are real, their positions, the prompt lengths."""
    width = max(prompts)
    valid = torch.tensor([[False] * (width - p) + [True] * (p + slots) for p in prompts])
    return valid, masks.positions(valid), torch.tensor(prompts)


@given(
    prompts=st.lists(st.integers(1, 7), min_size=1, max_size=3),
    slots=st.integers(0, 8),
    block=st.integers(1, 5),
    origin=st.sampled_from(ORIGINS),
    prompt_attention=st.sampled_from(PROMPT_ATTENTIONS),
    skip=st.integers(0, 14),
)
@settings(deadline=None, derandomize=True, max_examples=300)
def test_mask_is_the_double_loop(prompts, slots, block, origin, prompt_attention, skip):
    """Queries from `skip` on against all keys (a cached prefix of `skip` tokens): every pair of real tokens, and padding keys."""
    valid, position, prompt_length = layout(prompts, slots)
    skip = min(skip, valid.shape[1] - 1)
    horizon = masks.horizon(position[:, skip:], prompt_length, block, origin=origin, prompt_attention=prompt_attention)
    mask = masks.dense(masks.clean(horizon, position, valid))
    assert mask.dtype == torch.bool and mask.shape == (len(prompts), 1, valid.shape[1] - skip, valid.shape[1])
    assert mask.any(dim=-1).all()
    for b, prompt in enumerate(prompts):
        pad = max(prompts) - prompt
        for q in range(max(skip, pad), valid.shape[1]):
            found = mask[b, 0, q - skip].tolist()
            wanted = [k >= pad and may_look(q - pad, k - pad, prompt, block, origin, prompt_attention) for k in range(valid.shape[1])]
            assert found == wanted, (b, q)


def test_horizon_by_hand():
    """Prompt of 3, blocks of 2 behind it: [3 4] [5 6]. From zero: [0 1] [2 3] [4 5] [6 7], position 2 shares a block with slot 3."""
    position, prompt = torch.arange(7)[None], torch.tensor([3])
    golden = {
        ("prompt_end", "bidirectional"): [2, 2, 2, 4, 4, 6, 6],
        ("prompt_end", "block_causal"): [1, 1, 2, 4, 4, 6, 6],
        ("prompt_end", "causal"): [0, 1, 2, 4, 4, 6, 6],
        ("zero", "bidirectional"): [2, 2, 3, 3, 5, 5, 7],
        ("zero", "block_causal"): [1, 1, 3, 3, 5, 5, 7],
        ("zero", "causal"): [0, 1, 2, 3, 5, 5, 7],
    }
    for (origin, prompt_attention), wanted in golden.items():
        found = masks.horizon(position, prompt, 2, origin=origin, prompt_attention=prompt_attention)
        assert found.tolist() == [wanted], (origin, prompt_attention)


def test_block_length_1_with_a_causal_prompt_is_the_causal_mask():
    valid, position, prompt = layout([4, 2], 5)
    mask = masks.dense(masks.clean(masks.horizon(position, prompt, 1, prompt_attention="causal"), position, valid))
    causal = torch.ones(9, 9, dtype=torch.bool).tril() & valid[:, None, :]
    assert torch.equal(mask[:, 0][valid], causal[valid])


def test_no_horizon_sees_every_real_token():
    valid, position, _ = layout([4, 1], 3)
    mask = masks.dense(masks.clean(torch.full_like(position, masks.NO_HORIZON), position, valid))
    assert torch.equal(mask[:, 0], valid[:, None, :].expand(2, 7, 7))


def test_positions_do_not_count_padding():
    valid = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]], dtype=torch.bool)
    assert masks.positions(valid).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]]


@pytest.mark.parametrize("values, wanted", [
    ({"origin": "end"}, "origin is 'end'; allowed: prompt_end, zero"),
    ({"prompt_attention": "full"}, "prompt_attention is 'full'; allowed: bidirectional, block_causal, causal"),
])
def test_an_unknown_layout_is_refused_with_what_is_allowed(values, wanted):
    _, position, prompt = layout([2], 2)
    with pytest.raises(ValueError, match=f"^{wanted}$"):
        masks.horizon(position, prompt, 2, **values)


def test_a_row_with_nothing_to_see_sees_everything():
    horizon = torch.tensor([[-1, 0], [5, 5]])
    valid = torch.tensor([[True, True, True], [False, False, False]])
    mask = masks.dense(masks.clean(horizon, torch.arange(3).expand(2, 3), valid))
    assert mask[:, 0].tolist() == [[[True] * 3, [True, False, False]], [[True] * 3, [True] * 3]]


@pytest.mark.parametrize("block", [0, -4])
def test_block_length_below_1_is_refused(block):
    with pytest.raises(ValueError, match=f"block_length is {block}"):
        masks.horizon(torch.arange(3)[None], torch.tensor([1]), block)


@pytest.mark.parametrize("prompts", [[5], [3, 5, 1]])
@pytest.mark.parametrize("block", [1, 3, 4])
@pytest.mark.parametrize(
    "origin, prompt_attention",
    [("prompt_end", "bidirectional"), ("prompt_end", "block_causal"), ("prompt_end", "causal"), ("zero", "block_causal")],
)
def test_mask_is_the_one_transformers_makes_from_block_ids(prompts, block, origin, prompt_attention):
    """create_causal_mask opens the causal mask within groups of equal block_sequence_ids; -1 stays causal."""
    from transformers import Qwen2Config
    from transformers.masking_utils import create_causal_mask

    valid, position, prompt_length = layout(prompts, 7)
    in_prompt = position < prompt_length[:, None]
    prompt_group = {
        "bidirectional": torch.zeros_like(position), "block_causal": position // block, "causal": torch.full_like(position, -1)
    }[prompt_attention]
    answer_group = 100 + (position - prompt_length[:, None]) // block
    group = position // block if origin == "zero" else torch.where(in_prompt, prompt_group, answer_group)
    config = Qwen2Config(attn_implementation="sdpa")
    theirs = create_causal_mask(
        config, torch.zeros(*valid.shape, 8), valid, None, block_sequence_ids=group.masked_fill(~valid, -1), allow_is_causal_skip=False
    )
    horizon = masks.horizon(position, prompt_length, block, origin=origin, prompt_attention=prompt_attention)
    ours = masks.dense(masks.clean(horizon, position, valid))
    assert theirs.dtype == torch.bool
    assert torch.equal(ours[:, 0][valid], theirs[:, 0][valid])


def naive_attention(q_BHLD, k_BGKD, v_BGKD, mask):
    """softmax(q k^T / sqrt(D)) v, query heads in equal groups over the key-value heads."""
    group = q_BHLD.shape[1] // k_BGKD.shape[1]
    k_BHKD, v_BHKD = k_BGKD.repeat_interleave(group, dim=1), v_BGKD.repeat_interleave(group, dim=1)
    score = torch.einsum("bhqd,bhkd->bhqk", q_BHLD, k_BHKD) * q_BHLD.shape[-1] ** -0.5
    score = score.masked_fill(~mask, -torch.inf)
    weight = torch.exp(score - score.amax(dim=-1, keepdim=True))
    weight = weight / weight.sum(dim=-1, keepdim=True)
    return torch.einsum("bhqk,bhkd->bhqd", weight, v_BHKD)


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("prompts, slots, block, skip", [([5, 3], 6, 3, 0), ([1, 7, 4], 10, 4, 0), ([5, 2], 8, 4, 9), ([6], 1, 1, 6)])
def test_naive_attention_is_sdpa(prompts, slots, block, skip, kv_heads):
    """Values and gradients of all rows, those of padding included; `skip` leading tokens are keys only, as cached ones are."""
    valid, position, prompt_length = layout(prompts, slots)
    mask = masks.dense(masks.clean(masks.horizon(position[:, skip:], prompt_length, block), position, valid))
    draw = torch.Generator().manual_seed(0)

    def normal(heads, length):
        return torch.randn(len(prompts), heads, length, 5, generator=draw, requires_grad=True)

    keys = valid.shape[1]
    q, k, v = normal(6, keys - skip), normal(kv_heads, keys), normal(kv_heads, keys)
    theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    ours = naive_attention(q, k, v, mask)
    out = torch.randn(ours.shape, generator=draw)
    assert ours.isfinite().all() and theirs.isfinite().all()
    torch.testing.assert_close(theirs, ours, atol=1e-6, rtol=1e-5)
    wanted, found = torch.autograd.grad(ours, (q, k, v), out), torch.autograd.grad(theirs, (q, k, v), out)
    for name, a, b in zip("qkv", wanted, found, strict=True):
        assert a.isfinite().all(), name
        torch.testing.assert_close(b, a, atol=1e-5, rtol=1e-5, msg=lambda text, name=name: f"gradient of {name}: {text}")


def test_keys_behind_the_horizon_and_padding_change_nothing():
    """Values of hidden keys are replaced by NaN-free noise: the answer rows of the first block stay bit-identical."""
    valid, position, prompt_length = layout([3, 5], 8)
    mask = masks.dense(masks.clean(masks.horizon(position, prompt_length, 4), position, valid))
    q, k, v = torch.randn(3, 2, 2, 13, 4, generator=torch.Generator().manual_seed(1))
    block = slice(5, 9)
    before = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)[:, :, block]
    k, v = k.clone(), v.clone()
    k[:, :, 9:], v[:, :, 9:], k[0, :, :2], v[0, :, :2] = 7.0, -9.0, 5.0, 11.0
    after = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)[:, :, block]
    assert torch.equal(before, after)
    v[0, :, 2] += 1.0  # the first prompt token of row 0 is seen
    assert not torch.equal(before[0], F.scaled_dot_product_attention(q, k, v, attn_mask=mask)[0, :, block])


# ---- masks with groups: each against a double loop over the words of its paper ----------------------------------------


@given(
    prompts=st.lists(st.integers(0, 5), min_size=1, max_size=3), slots=st.integers(1, 7), block=st.integers(1, 4),
    origin=st.sampled_from(ORIGINS), prompt_attention=st.sampled_from(PROMPT_ATTENTIONS),
)  # fmt: skip
@settings(deadline=None, derandomize=True, max_examples=200)
def test_noisy_clean_is_the_double_loop(prompts, slots, block, origin, prompt_attention):
    """[noisy answer | prompt and clean answer]."""
    valid, position, prompt_length = layout(prompts, slots)
    noisy_position = prompt_length[:, None] + torch.arange(slots)
    clean = masks.Tokens(
        position, masks.horizon(position, prompt_length, block, origin=origin, prompt_attention=prompt_attention), valid
    )
    found = masks.noisy_clean(
        noisy_position, torch.ones_like(noisy_position, dtype=torch.bool), clean, prompt_length, block, origin=origin
    ).allow()
    width = valid.shape[1]
    for b, prompt in enumerate(prompts):
        pad = max(prompts) - prompt
        start = prompt if origin == "prompt_end" else 0
        for q in range(slots):
            number = (prompt + q - start) // block
            noisy = [(prompt + k - start) // block == number for k in range(slots)]
            text = [k >= pad and (k - pad < prompt or (k - pad - start) // block < number) for k in range(width)]
            assert found[b, q].tolist() == noisy + text, (b, q)
        for q in range(pad, width):
            text = [k >= pad and may_look(q - pad, k - pad, prompt, block, origin, prompt_attention) for k in range(width)]
            assert found[b, slots + q].tolist() == [False] * slots + text, (b, q)


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=3), block=st.integers(1, 5))
@settings(deadline=None, derandomize=True, max_examples=100)
def test_tidar_training_is_the_double_loop(lengths, block):
    width = max(lengths)
    valid = torch.tensor([[False] * (width - n) + [True] * n for n in lengths])
    found = masks.tidar_training(valid, block).sight.allow()
    for b, n in enumerate(lengths):
        pad = width - n
        for q in range(pad, width):
            text = [k >= pad and k <= q for k in range(width)]
            assert found[b, q].tolist() == text + [False] * width
            earlier = [k >= pad and (k - pad) // block < (q - pad) // block for k in range(width)]
            own = [k >= pad and (k - pad) // block == (q - pad) // block for k in range(width)]
            assert found[b, width + q].tolist() == earlier + own
        for q in range(pad):
            assert not found[b, width + q].any(), "a padding mask sees nothing"


@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=3), drafts=st.integers(1, 5), last=st.booleans())
@settings(deadline=None, derandomize=True, max_examples=100)
def test_tidar_decoding_is_the_double_loop(lengths, drafts, last):
    width = max(lengths)
    valid = torch.tensor([[False] * (width - n) + [True] * n for n in lengths], dtype=torch.bool)
    seen, position, _ = masks.tidar_decoding(valid, drafts, prefix_last=last)
    found = seen.allow()
    assert found.shape == (len(lengths), drafts * (drafts + 1), width + drafts * (drafts + 1))
    for b, n in enumerate(lengths):
        prefix = [k >= width - n for k in range(width)]
        wanted, where = [], []
        for j in range(drafts):
            wanted.append([k <= j for k in range(drafts)] + [False] * drafts**2)
            where.append(n + j)
        for r in range(1, drafts + 1):
            for i in range(drafts):
                own = [number == r for number in range(1, drafts + 1) for _ in range(drafts)]
                wanted.append([k < r for k in range(drafts)] + own)
                where.append(n + r + i)
        assert position[b].tolist() == where
        assert found[b].tolist() == [(row + prefix) if last else (prefix + row) for row in wanted]


@given(length=st.integers(0, 5), drafts=st.integers(1, 4), data=st.data())
@settings(deadline=None, derandomize=True, max_examples=60)
def test_tidar_decoding_with_fewer_proposals_is_a_part_of_it(length, drafts, data):
    """The first drafts and slots of the whole layout, row for row and key for key."""
    count, slots = data.draw(st.integers(0, drafts)), data.draw(st.integers(1, drafts))
    valid = torch.ones(1, length, dtype=torch.bool)
    whole, part = masks.tidar_decoding(valid, drafts), masks.tidar_decoding(valid, drafts, count, slots)
    kept = [*range(drafts), *(drafts * r + i for r in range(1, count + 1) for i in range(slots))]
    assert part.position_BQ.tolist() == whole.position_BQ[:, kept].tolist()
    seen = whole.sight.allow()[:, kept][:, :, [*range(length), *(length + i for i in kept)]]
    assert torch.equal(part.sight.allow(), seen)
    with pytest.raises(ValueError, match=f"{drafts + 1} proposals for {drafts} drafts"):
        masks.tidar_decoding(valid, drafts, drafts + 1)


def test_what_each_row_of_a_tidar_step_comes_after():
    """Two drafts, proposals behind each: rows 0 1 | 2 3 | 4 5. Without proposals of three masks, one draft alone, and prefills."""
    valid = torch.tensor([[False, True, True]])
    assert masks.tidar_decoding(valid, 2).before_BQ.tolist() == [[-1, 0, 0, 2, 1, 4]]
    assert masks.tidar_decoding(valid, 1, 1, 3).before_BQ.tolist() == [[-1, 0, 1, 2]]
    assert masks.tidar_decoding(valid, 3, 0).before_BQ.tolist() == [[-1, 0, 1]]
    assert masks.tidar_prefill(valid, 2).before_BQ.tolist() == [[4, 0, -1, -1, 3]]
    last = masks.tidar_prefill(valid, 2, masks_last=True)
    assert last.before_BQ.tolist() == [[-1, -1, 1, 2, 3]] and last.position_BQ.tolist() == [[0, 0, 1, 2, 3]]
    assert masks.tidar_prefill(valid, 0, masks_last=True).before_BQ.tolist() == [[-1, -1, 1]]


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=3), block=st.integers(1, 5), skip=st.integers(0, 8))
@settings(deadline=None, derandomize=True, max_examples=100)
def test_tidar_training_rows_come_after_what_precedes_them(lengths, block, skip):
    width = max(lengths)
    skip = min(skip, width)
    valid = torch.tensor([[False] * (width - n) + [True] * n for n in lengths])
    whole, part = masks.tidar_training(valid, block), masks.tidar_training(valid, block, skip)
    for b, n in enumerate(lengths):
        pad = width - n
        text = [-1] * (pad + 1) + list(range(pad, width - 1))
        heads = [c >= pad and (c - pad) % block == 0 for c in range(width)]
        kept = [c >= pad and c - (c - pad) % block >= skip for c in range(skip, width)]
        wanted = [-1 if c <= pad else c - 1 if heads[c] else width - skip + c - 1 for c in range(skip, width)]
        assert part.before_BQ[b].tolist() == text + [w if k else -1 for w, k in zip(wanted, kept, strict=True)]
        place = [max(0, c - pad) for c in range(width)]
        assert part.position_BQ[b].tolist() == place + place[skip:]
        columns = [*range(width), *range(width + skip, 2 * width)]
        there, seen = whole.sight.allow()[b][columns][:, columns], part.sight.allow()[b]
        for q in range(width - skip):
            assert torch.equal(seen[width + q], there[width + q]) if kept[q] else not seen[width + q].any()
        assert torch.equal(seen[:width], there[:width])


def test_tidar_positions_are_those_of_the_papers_figure():
    _, position, _ = masks.tidar_decoding(torch.ones(1, 3, dtype=torch.bool), 3)
    assert position.tolist() == [[3, 4, 5, 4, 5, 6, 5, 6, 7, 6, 7, 8]]  # figure 3: L = 3, K = 3


def test_tidar_prefill_by_hand():
    seen, position, _ = masks.tidar_prefill(torch.tensor([[False, True, True]]), 2)
    assert position.tolist() == [[2, 3, 0, 0, 1]]
    assert seen.allow()[0].int().tolist() == [[1, 1, 0, 1, 1], [1, 1, 0, 1, 1], [0, 0, 0, 1, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]


def test_a_packed_mask_comes_back():
    seen, _, _ = masks.tidar_decoding(torch.tensor([[False, True, True, True]]), 3)
    packed = seen.packed()
    assert packed.shape == (1, 1, 2, 12 + 16) and packed.dtype == torch.int32
    assert torch.equal(masks.Sight.unpack(packed, 12).allow(), seen.allow())


def test_runs_that_do_not_fit_together_are_refused():
    row = torch.zeros(1, 3, dtype=torch.long)
    with pytest.raises(ValueError, match=r"position and group of the keys one.*\(1, 3\).*\(1, 2\)"):
        masks.Sight(row, row, row, row[:, :2])
    with pytest.raises(ValueError, match="of the same rows"):
        masks.Sight(row, row, row.expand(2, 3), row.expand(2, 3))
