"""The Triton kernels: flash attention over a mask of horizons and groups (masks.Sight), forward and backward.

One program handles one tile of one key-value head of one row of the batch. The query heads of the group are packed into the
rows of a tile: row r is query r // G, head r % G, so a block of 16 tokens with 4 query heads a key-value head fills 64 rows.
Which tiles are visited comes from tiles.py: first those that are partly visible, with the mask evaluated, then those that are
wholly visible, without. Scores live in registers; the mask is never in memory.

Names: q, k, v, o, do, dq, dk, dv are tiles [rows or keys, D]; lse is log-sum-exp in natural units, kept as log2 inside.
"""

import triton
import triton.language as tl

CLEAN = tl.constexpr(-1)  # masks.CLEAN; a test compares
NO_GROUP = tl.constexpr(-2)
NEVER = tl.constexpr(2147483647)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _rows(tile, head, n_queries, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Of a tile's rows: query number, query head, and whether the row is there."""
    row = tile * ROWS + tl.arange(0, ROWS)
    query = row // GROUP
    return query, head * GROUP + row % GROUP, query < n_queries


@triton.jit
def _allow(horizon, own, position, other):
    """The mask of a tile, [rows, keys]."""
    near = position[None, :] <= horizon[:, None]
    return tl.where(other[None, :] == CLEAN, near, other[None, :] == own[:, None])


@triton.jit
def _keys_of(tile, position_ptr, other_ptr, n_keys, KEYS: tl.constexpr):
    """Key numbers of a tile, whether they are there, and what the mask needs of them."""
    key = tile * KEYS + tl.arange(0, KEYS)
    there = key < n_keys
    return key, there, tl.load(position_ptr + key, there, NEVER), tl.load(other_ptr + key, there, CLEAN)


@triton.jit
def _attend_tile(
    acc, top, total, q, tile, k_ptr, v_ptr, k_step, v_step, position_ptr, other_ptr, horizon, own, n_keys, scale_log2,
    MASKED: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One more tile of keys into a row's running output, maximum and sum (all in base 2)."""
    dim = tl.arange(0, D)
    if MASKED:
        key, there, position, other = _keys_of(tile, position_ptr, other_ptr, n_keys, KEYS)
        k = tl.load(k_ptr + key[:, None] * k_step + dim[None, :], there[:, None], 0.0)
        v = tl.load(v_ptr + key[:, None] * v_step + dim[None, :], there[:, None], 0.0)
    else:
        key = tile * KEYS + tl.arange(0, KEYS)
        k = tl.load(k_ptr + key[:, None] * k_step + dim[None, :])
        v = tl.load(v_ptr + key[:, None] * v_step + dim[None, :])
    score = tl.dot(q, k.T, input_precision=PRECISION) * scale_log2
    if MASKED:
        score = tl.where(_allow(horizon, own, position, other), score, float("-inf"))
    higher = tl.maximum(top, tl.max(score, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weight = tl.exp2(score - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(weight, 1)
    acc = acc * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
    return acc, higher, total


@triton.jit
def attention_forward(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, horizon_ptr, own_ptr, position_ptr, other_ptr, order_ptr, partial_ptr, full_ptr,
    q_batch, q_head, q_step, k_batch, k_head, k_step, v_batch, v_head, v_step, o_batch, o_head, o_step,
    n_queries, n_keys, n_kv_heads, scale_log2,
    GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Outputs and log-sum-exps of a tile of rows. Grid: (row tiles, B x key-value heads)."""
    tile, both = tl.program_id(0), tl.program_id(1)
    batch, head = (both // n_kv_heads).to(tl.int64), both % n_kv_heads
    query, q_of, here = _rows(tile, head, n_queries, GROUP, ROWS)
    dim = tl.arange(0, D)
    q = tl.load(q_ptr + batch * q_batch + (q_of * q_head + query * q_step)[:, None] + dim[None, :], here[:, None], 0.0)
    horizon = tl.load(horizon_ptr + batch * n_queries + query, here, -1)
    own = tl.load(own_ptr + batch * n_queries + query, here, NO_GROUP)
    k_ptr += batch * k_batch + head * k_head
    v_ptr += batch * v_batch + head * v_head
    position_ptr += batch * n_keys
    other_ptr += batch * n_keys
    row_tiles, key_tiles = tl.num_programs(0), tl.cdiv(n_keys, KEYS)
    order_ptr += (batch * row_tiles + tile) * key_tiles
    partial = tl.load(partial_ptr + batch * row_tiles + tile)
    both_kinds = partial + tl.load(full_ptr + batch * row_tiles + tile)
    acc = tl.zeros([ROWS, D], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for i in range(partial):
        acc, top, total = _attend_tile(
            acc, top, total, q, tl.load(order_ptr + i), k_ptr, v_ptr, k_step, v_step, position_ptr, other_ptr, horizon, own,
            n_keys, scale_log2, True, KEYS, D, PRECISION,
        )  # fmt: skip
    for i in range(partial, both_kinds):
        acc, top, total = _attend_tile(
            acc, top, total, q, tl.load(order_ptr + i), k_ptr, v_ptr, k_step, v_step, position_ptr, other_ptr, horizon, own,
            n_keys, scale_log2, False, KEYS, D, PRECISION,
        )  # fmt: skip
    blind = total == 0.0
    o = tl.where(blind[:, None], 0.0, acc / tl.where(blind, 1.0, total)[:, None])
    tl.store(
        o_ptr + batch * o_batch + (q_of * o_head + query * o_step)[:, None] + dim[None, :], o.to(o_ptr.dtype.element_ty), here[:, None]
    )
    lse = tl.where(blind, float("-inf"), (top + tl.log2(tl.where(blind, 1.0, total))) * LN2)
    tl.store(lse_ptr + (batch * n_kv_heads * GROUP + q_of) * n_queries + query, lse, here)


@triton.jit
def _dq_tile(
    dq, q, do, lse_log2, delta, tile, k_ptr, v_ptr, k_step, v_step, position_ptr, other_ptr, horizon, own, n_keys, scale_log2,
    MASKED: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One more tile of keys into the gradient of a tile of rows (without the scale)."""
    dim = tl.arange(0, D)
    key, there, position, other = _keys_of(tile, position_ptr, other_ptr, n_keys, KEYS)
    k = tl.load(k_ptr + key[:, None] * k_step + dim[None, :], there[:, None], 0.0)
    v = tl.load(v_ptr + key[:, None] * v_step + dim[None, :], there[:, None], 0.0)
    weight = tl.exp2(tl.dot(q, k.T, input_precision=PRECISION) * scale_log2 - lse_log2[:, None])
    if MASKED:
        weight = tl.where(_allow(horizon, own, position, other), weight, 0.0)
    d_weight = tl.dot(do, v.T, input_precision=PRECISION)
    d_score = weight * (d_weight - delta[:, None])
    return dq + tl.dot(d_score.to(k.dtype), k, input_precision=PRECISION)


@triton.jit
def attention_backward_q(
    q_ptr, k_ptr, v_ptr, do_ptr, dq_ptr, lse_ptr, delta_ptr, horizon_ptr, own_ptr, position_ptr, other_ptr,
    order_ptr, partial_ptr, full_ptr,
    q_batch, q_head, q_step, k_batch, k_head, k_step, v_batch, v_head, v_step, o_batch, o_head, o_step,
    n_queries, n_keys, n_kv_heads, scale, scale_log2,
    GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of a tile of rows of q, laid out as q. Grid: (row tiles, B x key-value heads)."""
    tile, both = tl.program_id(0), tl.program_id(1)
    batch, head = (both // n_kv_heads).to(tl.int64), both % n_kv_heads
    query, q_of, here = _rows(tile, head, n_queries, GROUP, ROWS)
    dim = tl.arange(0, D)
    q_where = batch * q_batch + (q_of * q_head + query * q_step)[:, None] + dim[None, :]
    q = tl.load(q_ptr + q_where, here[:, None], 0.0)
    do = tl.load(do_ptr + batch * o_batch + (q_of * o_head + query * o_step)[:, None] + dim[None, :], here[:, None], 0.0)
    flat = (batch * n_kv_heads * GROUP + q_of) * n_queries + query
    lse_log2 = tl.load(lse_ptr + flat, here, 0.0) * LOG2E
    delta = tl.load(delta_ptr + flat, here, 0.0)
    horizon = tl.load(horizon_ptr + batch * n_queries + query, here, -1)
    own = tl.load(own_ptr + batch * n_queries + query, here, NO_GROUP)
    k_ptr += batch * k_batch + head * k_head
    v_ptr += batch * v_batch + head * v_head
    position_ptr += batch * n_keys
    other_ptr += batch * n_keys
    row_tiles, key_tiles = tl.num_programs(0), tl.cdiv(n_keys, KEYS)
    order_ptr += (batch * row_tiles + tile) * key_tiles
    partial = tl.load(partial_ptr + batch * row_tiles + tile)
    both_kinds = partial + tl.load(full_ptr + batch * row_tiles + tile)
    dq = tl.zeros([ROWS, D], tl.float32)
    for i in range(partial):
        dq = _dq_tile(
            dq, q, do, lse_log2, delta, tl.load(order_ptr + i), k_ptr, v_ptr, k_step, v_step, position_ptr, other_ptr, horizon, own,
            n_keys, scale_log2, True, KEYS, D, PRECISION,
        )  # fmt: skip
    for i in range(partial, both_kinds):
        dq = _dq_tile(
            dq, q, do, lse_log2, delta, tl.load(order_ptr + i), k_ptr, v_ptr, k_step, v_step, position_ptr, other_ptr, horizon, own,
            n_keys, scale_log2, False, KEYS, D, PRECISION,
        )  # fmt: skip
    tl.store(dq_ptr + q_where, (dq * scale).to(dq_ptr.dtype.element_ty), here[:, None])


@triton.jit
def _dkv_tile(
    dk, dv, k, v, tile, head, q_ptr, do_ptr, lse_ptr, delta_ptr, horizon_ptr, own_ptr, q_head, q_step, o_head, o_step,
    position, other, n_queries, scale_log2,
    MASKED: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One more tile of rows into the gradients of a tile of keys (dk without the scale).

    Weights and their gradients are computed transposed, [keys, rows], as the two sums over rows need them.
    """
    dim = tl.arange(0, D)
    query, q_of, here = _rows(tile, head, n_queries, GROUP, ROWS)
    q = tl.load(q_ptr + (q_of * q_head + query * q_step)[:, None] + dim[None, :], here[:, None], 0.0)
    do = tl.load(do_ptr + (q_of * o_head + query * o_step)[:, None] + dim[None, :], here[:, None], 0.0)
    lse_log2 = tl.load(lse_ptr + q_of * n_queries + query, here, 0.0) * LOG2E
    delta = tl.load(delta_ptr + q_of * n_queries + query, here, 0.0)
    horizon = tl.load(horizon_ptr + query, here, -1)
    own = tl.load(own_ptr + query, here, NO_GROUP)
    weight = tl.exp2(tl.dot(k, q.T, input_precision=PRECISION) * scale_log2 - lse_log2[None, :])
    if MASKED:
        near = position[:, None] <= horizon[None, :]
        weight = tl.where(tl.where(other[:, None] == CLEAN, near, other[:, None] == own[None, :]), weight, 0.0)
    dv += tl.dot(weight.to(do.dtype), do, input_precision=PRECISION)
    d_weight = tl.dot(v, do.T, input_precision=PRECISION)
    d_score = weight * (d_weight - delta[None, :])
    dk += tl.dot(d_score.to(q.dtype), q, input_precision=PRECISION)
    return dk, dv


@triton.jit
def attention_backward_kv(
    q_ptr, k_ptr, v_ptr, do_ptr, dk_ptr, dv_ptr, lse_ptr, delta_ptr, horizon_ptr, own_ptr, position_ptr, other_ptr,
    order_ptr, partial_ptr, full_ptr,
    q_batch, q_head, q_step, k_batch, k_head, k_step, v_batch, v_head, v_step, o_batch, o_head, o_step,
    n_queries, n_keys, n_kv_heads, scale, scale_log2,
    GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of keys and values, laid out as k and v. Grid: (key tiles, B x key-value heads)."""
    tile, both = tl.program_id(0), tl.program_id(1)
    batch, head = (both // n_kv_heads).to(tl.int64), both % n_kv_heads
    dim = tl.arange(0, D)
    key, there, position, other = _keys_of(tile, position_ptr + batch * n_keys, other_ptr + batch * n_keys, n_keys, KEYS)
    k_where = batch * k_batch + head * k_head + key[:, None] * k_step + dim[None, :]
    v_where = batch * v_batch + head * v_head + key[:, None] * v_step + dim[None, :]
    k = tl.load(k_ptr + k_where, there[:, None], 0.0)
    v = tl.load(v_ptr + v_where, there[:, None], 0.0)
    q_ptr += batch * q_batch
    do_ptr += batch * o_batch
    lse_ptr += batch * n_kv_heads * GROUP * n_queries
    delta_ptr += batch * n_kv_heads * GROUP * n_queries
    horizon_ptr += batch * n_queries
    own_ptr += batch * n_queries
    key_tiles, row_tiles = tl.num_programs(0), tl.cdiv(n_queries * GROUP, ROWS)
    order_ptr += (batch * key_tiles + tile) * row_tiles
    partial = tl.load(partial_ptr + batch * key_tiles + tile)
    both_kinds = partial + tl.load(full_ptr + batch * key_tiles + tile)
    dk = tl.zeros([KEYS, D], tl.float32)
    dv = tl.zeros([KEYS, D], tl.float32)
    for i in range(partial):
        dk, dv = _dkv_tile(
            dk, dv, k, v, tl.load(order_ptr + i), head, q_ptr, do_ptr, lse_ptr, delta_ptr, horizon_ptr, own_ptr,
            q_head, q_step, o_head, o_step, position, other, n_queries, scale_log2, True, GROUP, D, ROWS, PRECISION,
        )  # fmt: skip
    for i in range(partial, both_kinds):
        dk, dv = _dkv_tile(
            dk, dv, k, v, tl.load(order_ptr + i), head, q_ptr, do_ptr, lse_ptr, delta_ptr, horizon_ptr, own_ptr,
            q_head, q_step, o_head, o_step, position, other, n_queries, scale_log2, False, GROUP, D, ROWS, PRECISION,
        )  # fmt: skip
    tl.store(dk_ptr + k_where, (dk * scale).to(dk_ptr.dtype.element_ty), there[:, None])
    tl.store(dv_ptr + v_where, dv.to(dv_ptr.dtype.element_ty), there[:, None])
