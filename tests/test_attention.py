"""Every backend against the naive one, values and gradients; the naive one against torch's softmax; tiles against the mask.

The triton kernels run in Triton's interpreter here (conftest.py sets TRITON_INTERPRET before triton is imported); memory that
a kernel should fill starts as NaN.
"""

from itertools import combinations, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cdlm import attention, masks
from cdlm.attention import attend, fused, kernels, naive, tiles

LENGTHS, BLOCKS, PREFIXES, GROUPS, ORIGINS = (1, 7, 33, 70, 130), (1, 4, 16, 32), (0, 33), (1, 4), masks.ORIGINS


def corner(length: int, block: int, prefix: int, group: int) -> tuple[str, bool]:
    """Origin and padding of a case: every pair of values of two factors stands somewhere in QUICK (a test counts)."""
    turn = LENGTHS.index(length) + BLOCKS.index(block) + PREFIXES.index(prefix) + 2 * GROUPS.index(group)
    return ORIGINS[turn % 2], bool(turn // 2 % 2)


QUICK = [(*case, *corner(*case)) for case in product(LENGTHS, BLOCKS, PREFIXES, GROUPS)]
ALL = list(product(LENGTHS, BLOCKS, PREFIXES, GROUPS, ORIGINS, (False, True)))


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Memory that nobody has written reads as NaN."""
    for name in ("empty", "empty_strided"):
        make = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *args, make=make, **kwargs: _nan(make(*args, **kwargs)))


def _nan(x):
    return x.fill_(torch.nan) if x.is_floating_point() else x


def layout(length: int, block: int, prefix: int, origin: str, padded: bool) -> masks.Sight:
    """Queries at the last `length` of prefix + length positions; left padding hides some keys from the second row."""
    total = prefix + length
    pad = min(5, total - 1) if padded else 0
    valid = torch.ones(2, total, dtype=torch.bool)
    valid[1, :pad] = False
    position = masks.positions(valid)
    prompt = (valid.sum(1) // 3).clamp(min=1)
    horizon = masks.horizon(position, prompt, block, origin=origin)
    if padded:
        horizon[0, -1] = -1  # a row that sees nothing
    return masks.clean(horizon[:, prefix:], position, valid)


def run(backend: str, q, k, v, seen, d_out, d_lse=None):
    """Outputs and gradients; log-sum-exp only where d_lse is given."""
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    out = attend(q, k, v, seen, backend=backend, need_lse=d_lse is not None)
    if d_lse is None:
        return (out, *torch.autograd.grad((out * d_out).sum(), (q, k, v)))
    out, lse = out
    seen_by_some = ~lse.isinf()
    loss = (out * d_out).sum() + (lse[seen_by_some] * d_lse[seen_by_some]).sum()
    return (out, lse, *torch.autograd.grad(loss, (q, k, v)))


def tensors(length: int, keys: int, group: int, dim: int, kv_heads: int = 1, batch: int = 2):
    draw = torch.Generator().manual_seed(length * 1000 + keys)
    shapes = [(batch, kv_heads * group, length, dim), *[(batch, kv_heads, keys, dim)] * 2, (batch, kv_heads * group, length, dim)]
    return [torch.randn(shape, generator=draw) for shape in shapes], torch.randn(shapes[0][:3], generator=draw)


def compare(seen: masks.Sight, length: int, keys: int, group: int, dim: int = 32, kv_heads: int = 1):
    (q, k, v, d_out), d_lse = tensors(length, keys, group, dim, kv_heads, batch=len(seen.horizon_BQ))
    wanted = run("naive", q, k, v, seen, d_out, d_lse)
    found = run("triton", q, k, v, seen, d_out, d_lse)
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), wanted, found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def test_the_naive_backend_is_softmax_over_what_is_seen():
    (q, k, v, _), _ = tensors(5, 8, 2, 4)
    seen = layout(5, 2, 3, "prompt_end", padded=True)
    out, lse = naive.attend(q, k, v, seen, 0.5)
    allow = seen.allow()
    for b, h, i in product(range(2), range(2), range(5)):
        keys = allow[b, i].nonzero()[:, 0].tolist()
        if not keys:
            assert out[b, h, i].tolist() == [0.0] * 4 and lse[b, h, i] == -torch.inf
            continue
        score = [float(q[b, h, i] @ k[b, 0, j]) * 0.5 for j in keys]
        weight = [torch.tensor(s).exp() for s in score]
        wanted = sum(w * v[b, 0, j] for w, j in zip(weight, keys, strict=True)) / sum(weight)
        torch.testing.assert_close(out[b, h, i], wanted)
        torch.testing.assert_close(lse[b, h, i], sum(weight).log())


@pytest.mark.parametrize("length, block, prefix, group, origin, padded", QUICK)
def test_triton_is_naive(length, block, prefix, group, origin, padded):
    compare(layout(length, block, prefix, origin, padded), length, prefix + length, group)


def test_the_quick_grid_has_every_pair_of_values():
    factors = list(zip(*QUICK, strict=True))
    assert len(QUICK) == 80
    for first, second in combinations(factors, 2):
        assert set(zip(first, second, strict=True)) == set(product(set(first), set(second)))


@pytest.mark.slow
@pytest.mark.parametrize("length, block, prefix, group, origin, padded", ALL)
def test_triton_is_naive_on_the_whole_grid(length, block, prefix, group, origin, padded):
    compare(layout(length, block, prefix, origin, padded), length, prefix + length, group)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_triton_is_naive_at_every_head_dimension(dim):
    compare(layout(20, 8, 5, "zero", padded=True), 20, 25, 4, dim, kv_heads=2)


def noisy_clean(length: int, block: int) -> masks.Sight:
    valid = torch.ones(2, length, dtype=torch.bool)
    valid[1, :3] = False
    prompt = torch.tensor([5, 2])
    position = masks.positions(valid)
    clean = masks.Tokens(position, masks.horizon(position, prompt, block), valid)
    noisy = prompt[:, None] + torch.arange(length - 5)
    return masks.noisy_clean(noisy, torch.ones_like(noisy, dtype=torch.bool), clean, prompt, block)


@pytest.mark.parametrize("group", [1, 3])
def test_triton_is_naive_under_masks_with_groups(group):
    """[noisy | clean], TiDAR's training and decoding; group 3 does not divide a tile."""
    valid = torch.ones(2, 45, dtype=torch.bool)
    valid[0, :7] = False
    for seen in (noisy_clean(50, 16), masks.tidar_training(valid, 8).sight, masks.tidar_decoding(valid, 7).sight):
        compare(seen, seen.horizon_BQ.shape[1], seen.position_BK.shape[1], group)


def test_triton_without_a_mask_sees_everything():
    (q, k, v, d_out), _ = tensors(9, 40, 4, 32)
    for a, b in zip(run("naive", q, k, v, None, d_out), run("triton", q, k, v, None, d_out), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)


def test_triton_with_expanded_keys_has_their_gradient():
    """One key-value sequence for both rows of the batch, by expand: its gradient is the sum over rows."""
    seen = layout(9, 4, 3, "zero", padded=False)
    (q, k, v, d_out), _ = tensors(9, 12, 2, 32)
    found = []
    for backend in ("naive", "triton"):
        one = k[:1].clone().requires_grad_()
        out = attend(q, one.expand(2, -1, -1, -1), v[:1].expand(2, -1, -1, -1), seen, backend=backend)
        found.append(torch.autograd.grad((out * d_out).sum(), one)[0])
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)


def test_triton_takes_transposed_inputs_as_models_give_them():
    seen = layout(12, 4, 0, "zero", padded=False)
    (q, k, v, d_out), _ = tensors(12, 12, 2, 32)
    wanted = run("naive", q, k, v, seen, d_out)
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    odd = d_out.mT.contiguous().mT  # the last dimension is not the dense one
    for a, b in zip(wanted, run("triton", q, k, v, seen, odd), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)


def test_triton_in_half_precision():
    """fp16; the interpreter can't do bfloat16, and says so."""
    dtype, tolerance = torch.float16, 3e-3
    seen = layout(20, 4, 5, "prompt_end", padded=True)
    (q, k, v, d_out), _ = tensors(20, 25, 2, 32)
    wanted = run("naive", q, k, v, seen, d_out)
    for a, b in zip(wanted, run("triton", *(x.to(dtype) for x in (q, k, v)), seen, d_out.to(dtype)), strict=True):
        assert b.dtype == dtype
        assert (b.float() - a).abs().max() <= tolerance * a.abs().max()


@pytest.mark.parametrize("length, prefix, group, padded", [(7, 0, 1, True), (33, 33, 4, False), (70, 33, 4, True)])
def test_sdpa_is_naive(length, prefix, group, padded):
    seen = layout(length, 4, prefix, "zero", padded)
    (q, k, v, d_out), _ = tensors(length, prefix + length, group, 16)
    for a, b in zip(run("naive", q, k, v, seen, d_out), run("sdpa", q, k, v, seen, d_out), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("group", [1, 4])
def test_flex_is_naive(group):
    for seen in (layout(33, 4, 5, "prompt_end", padded=True), noisy_clean(40, 8)):
        queries, keys = seen.horizon_BQ.shape[1], seen.position_BK.shape[1]
        (q, k, v, _), _ = tensors(queries, keys, group, 16)
        torch.testing.assert_close(attend(q, k, v, seen, backend="flex"), attend(q, k, v, seen, backend="naive"), rtol=1e-5, atol=1e-5)


def test_a_flex_block_mask_is_made_once_a_mask():
    from cdlm.attention import flex

    seen = layout(33, 4, 0, "zero", padded=False)
    assert flex.block_mask(seen) is flex.block_mask(seen)
    assert flex.block_mask(seen) is not flex.block_mask(layout(33, 4, 0, "zero", padded=False))


def test_flex_closures_are_used_again_when_their_mask_is_gone():
    from cdlm.attention import flex

    def made(padded):
        seen = layout(21, 4, 3, "zero", padded)
        return seen, flex.block_mask(seen).mask_mod

    first, one = made(False)
    second, two = made(True)
    assert one is not two, "both masks are alive"
    del first
    third, three = made(True)
    assert three is one
    (q, k, v, _), _ = tensors(21, 24, 1, 16)
    for seen in (second, third):
        torch.testing.assert_close(attend(q, k, v, seen, backend="flex"), attend(q, k, v, seen, backend="naive"), rtol=1e-5, atol=1e-5)


# ---- tiles ------------------------------------------------------------------------------------------------------------


@given(data=st.data(), kind=st.sampled_from(("clean", "noisy", "tidar")), rows=st.sampled_from((2, 4, 8)), keys=st.sampled_from((2, 4)))
@settings(deadline=None, derandomize=True, max_examples=150)
def test_tiles_left_out_are_dark_and_full_tiles_are_bright(data, kind, rows, keys):
    group = data.draw(st.sampled_from((1, 2, 3)))
    if kind == "clean":
        length, prefix = data.draw(st.integers(1, 14)), data.draw(st.integers(0, 6))
        seen = layout(length, data.draw(st.integers(1, 5)), prefix, data.draw(st.sampled_from(ORIGINS)), data.draw(st.booleans()))
    elif kind == "noisy":
        seen = noisy_clean(data.draw(st.integers(6, 16)), data.draw(st.integers(1, 5)))
    else:
        valid = torch.ones(1, data.draw(st.integers(1, 8)), dtype=torch.bool)
        seen = masks.tidar_decoding(valid, data.draw(st.integers(1, 3))).sight
    partial, full = tiles.verdicts(seen, rows, keys, group)
    allow = seen.allow().repeat_interleave(group, dim=1)
    for b, t, u in product(range(len(allow)), range(partial.shape[1]), range(partial.shape[2])):
        tile = allow[b, t * rows : (t + 1) * rows, u * keys : (u + 1) * keys]
        assert not (partial[b, t, u] and full[b, t, u])
        if full[b, t, u]:
            assert tile.all() and tile.shape[1] == keys, "a tile that reaches past the last key is not full"
        elif not partial[b, t, u]:
            assert not tile.any()
    both = ((tiles.by_rows, (partial, full)), (tiles.by_keys, (partial.mT, full.mT)))
    for make, kinds in both:
        visits = make(seen, rows, keys, group)
        for b, t in product(range(len(allow)), range(visits.order.shape[1])):
            some, all_ = int(visits.partial[b, t]), int(visits.full[b, t])
            assert set(visits.order[b, t, :some].tolist()) == set(kinds[0][b, t].nonzero()[:, 0].tolist())
            assert set(visits.order[b, t, some : some + all_].tolist()) == set(kinds[1][b, t].nonzero()[:, 0].tolist())


def test_tiles_of_a_block_causal_mask_by_hand():
    """Eight answer slots in blocks of 4, tiles of 4 x 4: the first block sees itself, the second both."""
    position = torch.arange(8)[None]
    seen = masks.clean(masks.horizon(position, torch.tensor([0]), 4), position, torch.ones(1, 8, dtype=torch.bool))
    partial, full = tiles.verdicts(seen, 4, 4, 1)
    assert full[0].int().tolist() == [[1, 0], [1, 1]] and not partial.any()
    partial, full = tiles.verdicts(seen, 8, 4, 2)  # two heads a group: eight rows are the same four queries
    assert full[0].int().tolist() == [[1, 0], [1, 1]] and not partial.any()


def test_the_kernels_know_the_numbers_of_the_masks():
    assert (kernels.CLEAN.value, kernels.NO_GROUP.value, kernels.NEVER.value) == (masks.CLEAN, masks.NO_GROUP, masks.NEVER)


# ---- choosing, and what is refused --------------------------------------------------------------------------------------


def test_auto_says_which_and_why(caplog):
    (q, k, v, _), _ = tensors(3, 3, 1, 8)
    seen = layout(3, 2, 0, "zero", padded=False)
    assert attention.choose(q, None) == ("sdpa", "every key is seen, so no mask is needed")
    assert attention.choose(q, seen) == ("sdpa", "on a CPU")
    assert attention.choose(q, seen, need_lse=True)[0] == "naive"
    attention._tell.cache_clear()
    with caplog.at_level("INFO", logger="cdlm.attention"):
        attend(q, k, v, seen)
        attend(q, k, v, seen)
    assert [record.getMessage() for record in caplog.records] == ["attention: backend sdpa (on a CPU)"]


def test_on_a_gpu_auto_takes_the_kernel_where_it_fits():
    def gpu(dim, dtype=torch.bfloat16):
        return type("Fake", (), {"device": torch.device("cuda"), "shape": (1, 1, 4, dim), "dtype": dtype})()

    seen = layout(4, 2, 0, "zero", padded=False)
    assert attention.choose(gpu(128), seen)[0] == "triton"
    assert attention.choose(gpu(96), seen)[0] == "flex"
    assert attention.choose(gpu(128, torch.float64), seen, need_lse=True)[0] == "naive"


@pytest.mark.parametrize("change, said", [
    ({"backend": "fa2"}, "attention backend 'fa2'; allowed: naive, sdpa, flex, triton, auto"),
    ({"k": (2, 1, 4, 8), "v": (2, 1, 4, 8)}, "the mask is for rows, queries, keys"),
    ({"k": (2, 2, 3, 8), "v": (2, 2, 3, 8)}, "3 query heads do not divide among 2 key-value heads"),
    ({"v": (2, 1, 3, 4)}, "attention takes q"),
    ({"backend": "sdpa", "need_lse": True}, "backend sdpa gives no log-sum-exp; allowed: naive, triton"),
    ({"backend": "triton"}, "head dimensions 8 and 8; allowed: 32, 64, 128, 256"),
])  # fmt: skip
def test_what_is_refused(change, said):
    shapes = {"q": (2, 3, 3, 8), "k": (2, 1, 3, 8), "v": (2, 1, 3, 8)} | {n: s for n, s in change.items() if n in "qkv"}
    rest = {n: s for n, s in change.items() if n not in ("q", "k", "v")}
    with pytest.raises(ValueError) as error:
        attend(*(torch.zeros(shapes[n]) for n in "qkv"), layout(3, 2, 0, "zero", padded=False), **rest)
    assert said in str(error.value)


def test_the_interpreter_refuses_bfloat16():
    q = torch.zeros(1, 1, 4, 32, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"bits of bfloat16 as integers; allowed in it: torch\.float16, torch\.float32"):
        attend(q, q, q, backend="triton")


def test_triton_refuses_other_dtypes_and_a_cpu_without_the_interpreter(monkeypatch):
    q = torch.zeros(1, 1, 4, 32)
    with pytest.raises(ValueError, match=r"torch.float64.*allowed: one of torch.bfloat16, torch.float16, torch.float32"):
        attend(q.double(), q.double(), q.double(), backend="triton")
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match="needs a GPU, or TRITON_INTERPRET=1"):
        attend(q, q, q, backend="triton")


def test_flex_refuses_gradients_on_a_cpu():
    q = torch.zeros(1, 1, 4, 8, requires_grad=True)
    with pytest.raises(ValueError, match="flex has no backward on a CPU; allowed there: naive, sdpa"):
        attend(q, q, q, backend="flex")


# ---- inside stock models -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    attention.register()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=32, max_position_embeddings=64,
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("backend", attention.BACKENDS)
def test_a_stock_model_under_a_packed_mask_is_the_model_under_the_dense_one(llama, backend):
    ids = torch.randint(0, 40, (2, 12), generator=torch.Generator().manual_seed(1))
    seen = layout(12, 4, 0, "prompt_end", padded=False)
    llama.set_attn_implementation("sdpa")
    with torch.no_grad():
        wanted = llama(ids, attention_mask=masks.dense(seen)).logits
        llama.set_attn_implementation(f"cdlm_{backend}")
        found = llama(ids, attention_mask=seen.packed()).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_stock_model_trains_through_the_kernel(llama):
    ids = torch.randint(0, 40, (2, 12), generator=torch.Generator().manual_seed(1))
    seen = layout(12, 4, 0, "zero", padded=False)
    gradients = []
    for name, mask in (("sdpa", masks.dense(seen)), ("cdlm_triton", seen.packed())):
        llama.set_attn_implementation(name)
        llama.zero_grad()
        llama(ids, attention_mask=mask, labels=ids).loss.backward()
        gradients.append(llama.model.layers[0].self_attn.q_proj.weight.grad.clone())
    assert gradients[0].abs().max() > 0
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-6)


def test_a_stock_models_own_causal_mask_and_cache_work_too(llama):
    ids = torch.randint(0, 40, (2, 10), generator=torch.Generator().manual_seed(2))
    padding = torch.ones(2, 10, dtype=torch.long)
    padding[1, :3] = 0
    tokens = []
    for name in ("sdpa", "cdlm_naive"):
        llama.set_attn_implementation(name)
        tokens.append(llama.generate(ids, attention_mask=padding, max_new_tokens=6, do_sample=False, pad_token_id=0))
    assert torch.equal(*tokens)


def test_no_mask_is_not_the_models_own_causal_mask(llama):
    ids = torch.randint(0, 40, (2, 6), generator=torch.Generator().manual_seed(3))
    everywhere = torch.ones_like(ids, dtype=torch.bool)
    position = masks.positions(everywhere)
    llama.set_attn_implementation("cdlm_naive")
    with torch.no_grad():
        full = llama(ids, attention_mask=masks.clean(masks.full(position), position, everywhere).packed()).logits
        assert torch.allclose(llama(ids, attention_mask=masks.everything(ids.device)).logits, full, atol=1e-6)
        assert not torch.allclose(llama(ids).logits, full, atol=1e-3)


def test_what_a_model_asks_for_and_this_attention_lacks_is_refused(llama):
    forward = attention._for_transformers("naive")
    q = torch.zeros(1, 1, 2, 8)
    with pytest.raises(ValueError, match=r"the model asks for softcap 50\.0"):
        forward(None, q, q, q, None, softcap=50.0)


def test_layers_share_one_unpacked_mask(llama, monkeypatch):
    made = []
    unpack = masks.Sight.unpack
    monkeypatch.setattr(masks.Sight, "unpack", staticmethod(lambda *args: made.append(1) or unpack(*args)))
    llama.set_attn_implementation("cdlm_naive")
    with torch.no_grad():
        llama(torch.zeros(2, 12, dtype=torch.long), attention_mask=layout(12, 4, 0, "zero", padded=False).packed())
    assert len(made) == 1


def test_a_dense_mask_is_refused_by_name(llama):
    llama.set_attn_implementation("cdlm_naive")
    seen = layout(12, 4, 0, "zero", padded=False)
    with pytest.raises(ValueError, match=r"cdlm_naive takes masks.Sight.packed\(\).*not a mask of torch.bool"):
        llama(torch.zeros(2, 12, dtype=torch.long), attention_mask=masks.dense(seen))


def test_shapes_are_there_for_every_target_head_dimension_and_dtype():
    from cdlm.attention.machine_code import TARGETS

    for target, size, dim in product(TARGETS, (2, 4), fused.HEAD_DIMS):
        for shape in fused.shapes_of(target, size, dim):
            assert shape.rows >= 16 and shape.keys >= 16 and shape.warps in (2, 4, 8)


def test_a_diffusion_model_decodes_the_same_under_every_backend():
    """The committed teacher, block-causal with its cache: left-padded prompts of unequal length."""
    from conftest import TINY

    from cdlm import data, families
    from cdlm.decode import DecodeConfig, decode

    texts, tokens = ("copy:k3xw", "sort:81bz"), []
    config = DecodeConfig(max_new_tokens=16, block_length=8, confidence_threshold=0.5)
    for backend in ("auto", "naive", "sdpa"):
        model = families.load(TINY / "teacher", attention=backend)
        assert model.hf.config._attn_implementation == ("sdpa" if backend == "auto" else f"cdlm_{backend}")
        tokenizer = families.load_tokenizer(TINY / "teacher", model.facts)
        ids, valid = data.pad_left([data.prompt_ids(tokenizer, text, chat_template=True) for text in texts], model.facts.pad_token_id)
        tokens.append(decode(model, ids, valid, config).filled_BM)
    assert torch.equal(tokens[0], tokens[1]) and torch.equal(tokens[0], tokens[2])


def test_a_diffusion_model_has_the_same_rows_and_gradients_under_the_kernel():
    from conftest import TINY

    from cdlm import families

    found = []
    ids = torch.randint(3, 50, (2, 20), generator=torch.Generator().manual_seed(0))
    valid = torch.ones_like(ids, dtype=torch.bool)
    valid[1, :3] = False
    for backend in ("sdpa", "triton"):
        model = families.load(TINY / "teacher", attention=backend)
        rows = model.sequence_hidden(ids, valid, valid.sum(1) - 8, 4)[valid]
        rows.square().mean().backward()
        found.append((rows.detach(), model.hf.model.layers[0].self_attn.k_proj.weight.grad))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-4)


def test_an_unknown_backend_is_refused():
    from conftest import TINY

    from cdlm import families

    with pytest.raises(ValueError, match="attention is 'fa2'; allowed: auto, naive, sdpa, flex, triton"):
        families.load(TINY / "teacher", attention="fa2")
