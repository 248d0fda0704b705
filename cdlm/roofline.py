"""What decoding would cost on an accelerator, without running it: FLOP, bytes and a bound on time, operator by operator.

Operators are counted as eager PyTorch runs them: every operator reads its inputs from memory and writes its output there, in the
dtype of the model; attention is one fused operator (its scores stay on chip); a gated MLP is five (gate, up, activation, product,
down); norms, rotary embeddings and residual additions count too. The time of an operator is the longer of FLOP over peak rate
and bytes over bandwidth; a forward is their sum. Real kernels reach 75 to 90 % of either.

Modes (q: queries a sequence and forward):
    ar     autoregressive: q = 1, against a cache
    dlm    vanilla diffusion LM: the whole of prompt and generation in every forward, no cache, one token a step
    block  block diffusion with a cache: q = block length, `tpf` tokens a forward
    tidar  draft and verify in one forward: q = K (M + 1) for a block of K and M proposals (M = K unless given), `tpf` tokens a forward

The cache holds the prompt and, on average over a generation, half of it. Prefill is not counted.
(CDLM, arXiv 2511.19269, appendix on arithmetic intensity; the roofline of Williams et al., 2009.)
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MODES = ("ar", "dlm", "block", "tidar")
ASSUMED_TPF = 3.0  # tokens a forward of block and tidar, where nothing is known of the model


@dataclass(frozen=True)
class Hardware:
    """An accelerator by its data sheet: dense bf16 and fp8 rates in FLOP/s, bandwidth in bytes/s, memory in bytes."""

    name: str
    bf16: float
    fp8: float | None
    bandwidth: float
    memory: float

    @property
    def ridge(self) -> float:
        """FLOP a byte from which bf16 is bound by compute."""
        return self.bf16 / self.bandwidth


# Vendor data sheets; B200 at the bandwidth that cards report; MI355X from clock times rate.
HARDWARE = {
    name: Hardware(name, bf16 * 1e12, None if fp8 is None else fp8 * 1e12, bandwidth * 1e12, memory * 1e9)
    for name, bf16, fp8, bandwidth, memory in (
        ("A100", 312.0, None, 2.039, 80), ("H100", 989.4, 1979.0, 3.35, 80), ("H200", 989.4, 1979.0, 4.8, 141),
        ("B200", 2250.0, 4500.0, 7.7, 180), ("MI300X", 1307.4, 2614.9, 5.3, 192), ("MI325X", 1307.4, 2614.9, 6.0, 256),
        ("MI355X", 2516.6, 5033.0, 8.0, 288),
    )
}  # fmt: skip


def card(name: str) -> Hardware:
    """The accelerator of that name, in any case."""
    if name.upper() not in HARDWARE:
        raise ValueError(f"unknown hardware {name!r}; allowed: {', '.join(HARDWARE)}")
    return HARDWARE[name.upper()]


@dataclass(frozen=True)
class Shape:
    """A decoder by its sizes. experts 0 means dense; with experts, `dense_layers` layers keep a dense MLP of width `intermediate`.

    shared_intermediate: width of an MLP that every token passes beside the experts. window: keys that a sliding layer sees, for
    `sliding_layers` of the layers. mixing: further parameters of a layer that every token passes (convolutions, a router's MLP).
    full_kv_heads, full_head_dim: of the layers that do not slide, where they are other than the sliding ones'; these make values of their
    keys' projection if full_values is False. conditioning: width of a gated MLP that a canvas passes once, before its layers.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    dense_layers: int = 0
    sliding_layers: int = 0
    window: int = 0
    tied: bool = False
    mixing: int = 0
    full_kv_heads: int = 0
    full_head_dim: int = 0
    full_values: bool = True
    conditioning: int = 0

    @property
    def kinds(self) -> tuple[tuple[int, int, int, bool], ...]:
        """Layers that have the same projections: how many, key-value heads, width of a head, whether values have a projection."""
        if not self.full_head_dim:
            return ((self.layers, self.kv_heads, self.head_dim, True),)
        full = self.layers - self.sliding_layers, self.full_kv_heads or self.kv_heads, self.full_head_dim, self.full_values
        return ((self.sliding_layers, self.kv_heads, self.head_dim, True), full)

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def attention_parameters(self) -> int:
        """Of all layers' projections."""
        return sum(count * self.hidden * dim * (2 * self.heads + (1 + own) * kv) for count, kv, dim, own in self.kinds)

    def _parameters(self, experts: int) -> int:
        gated = 3 * self.hidden
        dense = (self.layers - self.moe_layers) * gated * self.intermediate
        moe = self.moe_layers * (gated * (experts * self.expert_intermediate + self.shared_intermediate) + self.hidden * self.experts)
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.attention_parameters + self.layers * self.mixing + dense + moe + embeddings + gated * self.conditioning

    @property
    def parameters(self) -> int:
        """All weights, norms aside."""
        return self._parameters(self.experts)

    @property
    def active_parameters(self) -> int:
        """Weights that one token passes, the tables of embeddings whole among them, as model cards count."""
        return self._parameters(self.experts_per_token)

    def kv_bytes(self, tokens: int, size: float) -> float:
        """Cache of one sequence; sliding layers keep their window."""
        near = min(tokens, self.window or tokens)
        if self.full_head_dim:
            (sliding, kv, dim, _), (full, full_kv, full_dim, _) = self.kinds
            return 2 * size * (sliding * near * kv * dim + full * tokens * full_kv * full_dim)
        full = self.layers - self.sliding_layers
        return 2 * self.kv_heads * self.head_dim * size * (full * tokens + self.sliding_layers * near)


@dataclass(frozen=True)
class Operator:
    """A group of equal operators in one forward."""

    name: str
    flop: float
    bytes: float

    def seconds(self, hardware: Hardware) -> float:
        return max(self.flop / hardware.bf16, self.bytes / hardware.bandwidth)

    def bound(self, hardware: Hardware) -> str:
        return "compute" if self.flop / hardware.bf16 > self.bytes / hardware.bandwidth else "memory"


def distinct_experts(experts: int, per_token: int, tokens: float) -> float:
    """Expected number of experts that at least one of the tokens is sent to, if routing is uniform: E (1 - (1 - k/E)^tokens)."""
    return experts * (1 - (1 - per_token / experts) ** tokens)


def queries(mode: str, block: int, context: int, generate: int, proposals: int | None = None) -> int:
    """Tokens of a sequence in one forward. proposals: of mode tidar (None: as many as a block has tokens)."""
    drafted = block * (1 + (block if proposals is None else proposals))
    return {"ar": 1, "dlm": context + generate, "block": block, "tidar": drafted}[mode]


def operators(
    shape: Shape, mode: str, *, block: int, batch: int, context: int, generate: int, size: float = 2, proposals: int | None = None
) -> list[Operator]:
    """All operators of one forward. size: bytes of a value."""
    q = queries(mode, block, context, generate, proposals)
    rows = batch * q
    cached = 0 if mode == "dlm" else context + generate / 2
    d = shape.hidden
    out: list[Operator] = []

    def linear(name: str, times: float, inside: int, outside: int, tokens: float = rows, copies: float = 1) -> None:
        """`times` products of [tokens, inside] with `copies` matrices; tokens are shared out among the copies."""
        flop = 2.0 * tokens * inside * outside
        moved = inside * outside * copies + tokens * (inside + outside)
        out.append(Operator(name, times * flop, times * moved * size))

    def pointwise(name: str, times: float, values: float) -> None:
        """`times` operators that move `values` numbers a token, and compute one a number."""
        out.append(Operator(name, times * rows * values, times * rows * values * size))

    layers = shape.layers
    for count, kv_heads, head_dim, own_values in shape.kinds:
        linear("attention: q", count, d, shape.heads * head_dim)
        linear("attention: k", count, d, kv_heads * head_dim)
        if own_values:
            linear("attention: v", count, d, kv_heads * head_dim)
        pointwise("attention: rotary", count, 2 * (shape.heads + kv_heads) * head_dim)
    # A sliding layer sees its window of what is before a block, and the block; in one pass over everything, its window.
    window = shape.window or cached + q
    near = min(q, window) if mode == "dlm" else min(cached, window) + q
    (_, kv_heads, head_dim, _), (_, full_kv_heads, full_head_dim, _) = shape.kinds[0], shape.kinds[-1]
    for name, count, seen, read, kv_width, width in (
        ("attention: scores and values", layers - shape.sliding_layers, cached + q, cached + q, full_kv_heads * full_head_dim,
         shape.heads * full_head_dim),
        ("attention: scores and values, sliding", shape.sliding_layers, near, q if mode == "dlm" else near, kv_heads * head_dim,
         shape.heads * head_dim),
    ):  # fmt: skip
        if count:
            flop = 4.0 * batch * q * seen * width
            out.append(Operator(name, count * flop, count * size * batch * (2 * read * kv_width + 2 * q * width)))
    for count, _, head_dim, _ in shape.kinds:
        linear("attention: output", count, shape.heads * head_dim, d)
    pointwise("norms", 2 * layers + 1, 2 * d)
    pointwise("residual additions", 2 * layers, 3 * d)
    if shape.mixing:
        out.append(Operator("mixing", layers * 2.0 * rows * shape.mixing, layers * size * shape.mixing))

    def mlp(name: str, times: float, inner: int, tokens: float = rows, copies: float = 1) -> None:
        for part in ("gate", "up"):
            linear(f"{name}: {part}", times, d, inner, tokens, copies)
        share = tokens / rows
        pointwise(f"{name}: activation", times, 2 * inner * share)
        pointwise(f"{name}: product", times, 3 * inner * share)
        linear(f"{name}: down", times, inner, d, tokens, copies)

    dense = layers - shape.moe_layers
    if dense:
        mlp("mlp", dense, shape.intermediate)
    if shape.moe_layers:
        linear("router", shape.moe_layers, d, shape.experts)
        touched = distinct_experts(shape.experts, shape.experts_per_token, rows)
        mlp("experts", shape.moe_layers, shape.expert_intermediate, rows * shape.experts_per_token, touched)
        if shape.shared_intermediate:
            mlp("shared mlp", shape.moe_layers, shape.shared_intermediate)
    if shape.conditioning:
        mlp("self-conditioning", 1, shape.conditioning)
        linear("self-conditioning: mean embedding", 1, shape.vocab, d)
    linear("lm_head", 1, d, shape.vocab)
    return out


def intensity(ops: Iterable[Operator]) -> float:
    """FLOP a byte of all operators together."""
    held = list(ops)
    return sum(op.flop for op in held) / sum(op.bytes for op in held)


def largest_memory_bound_batch(
    shape: Shape, hardware: Hardware, mode: str, *, block: int, context: int, generate: int, proposals: int | None = None
) -> int | None:
    """The largest batch whose intensity is under the ridge; 0 if batch 1 is above it, None if no batch reaches it."""

    def under(batch: int) -> bool:
        given: dict[str, Any] = {"block": block, "context": context, "generate": generate, "proposals": proposals}
        return intensity(operators(shape, mode, batch=batch, **given)) < hardware.ridge

    if not under(1):
        return 0
    high = 2
    while under(high):
        high *= 2
        if high > 1 << 20:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if under(middle) else (low, middle)
    return low


def attention_proposals(shape: Shape, hardware: Hardware, block: int, size: float = 2) -> float:
    """Blocks of queries that attention over a long cache takes in for free: ridge / (G block), G query heads a key-value head.

    Attention does 4 H D FLOP a query and key, and reads 2 size G_kv D bytes a key, whatever the length: its intensity is
    q G 2 / size, and q may grow until that is the ridge.
    """
    return hardware.ridge / (2 / size * shape.heads / shape.kv_heads) / block


def free_proposals(
    shape: Shape, hardware: Hardware, *, block: int, batch: int = 1, context: int = 512, generate: int = 256, size: float = 2
) -> int:
    """The most proposals M, 0 to K, of K masks each that a forward takes in beside K drafts with no operator bound by compute. 0: not one.

    Then the arithmetic is free, the forward is not: it moves further bytes of activations and, of experts that more tokens are routed to,
    of weights. `forward_over_one` says how long it takes all the same; `best_proposals` asks that too.

    `attention_proposals` is the part of attention alone, over a long cache; at batch 1 the weights' products reach the ridge first.
    """

    def free(count: int) -> bool:
        found = operators(shape, "tidar", block=block, batch=batch, context=context, generate=generate, size=size, proposals=count)
        return all(op.bound(hardware) == "memory" for op in found)

    return max((count for count in range(1, block + 1) if free(count)), default=0)


def forward_over_one(
    shape: Shape, hardware: Hardware, count: int, *, block: int, batch: int = 1, context: int = 512, generate: int = 256, size: float = 2
) -> float:
    """How many forwards of one token a forward of K drafts and `count` proposals takes as long as."""
    one, all_queries = (
        operators(shape, mode, block=block, batch=batch, context=context, generate=generate, size=size, proposals=count)
        for mode in ("ar", "tidar")
    )
    return sum(op.seconds(hardware) for op in all_queries) / sum(op.seconds(hardware) for op in one)


def best_proposals(
    shape: Shape, hardware: Hardware, *, block: int, batch: int = 1, context: int = 512, generate: int = 256, size: float = 2,
    tpf: float = ASSUMED_TPF,
) -> int:
    """The most proposals M of those with no operator bound by compute whose forward takes at most `tpf` forwards of one token: at `tpf`
    tokens a forward it is then no slower than autoregressive decoding. 0: not one, by the roofline drafting does not pay on this card."""
    given: dict[str, Any] = {"block": block, "batch": batch, "context": context, "generate": generate, "size": size}
    most = free_proposals(shape, hardware, **given)
    return max((count for count in range(1, most + 1) if forward_over_one(shape, hardware, count, **given) <= tpf), default=0)


def analyse(
    shape: Shape, hardware: Hardware, mode: str, *, block: int = 32, batch: int = 1, context: int = 512, generate: int = 256,
    tpf: float = ASSUMED_TPF, proposals: int | None = None,
) -> dict[str, Any]:
    """Everything `cdlm roofline` prints of one model, card and mode; times in seconds, sizes in bytes.

    proposals: M of mode tidar (None: K).
    """
    given = {"block": block, "context": context, "generate": generate}
    priced: dict[str, Any] = {**given, "proposals": proposals}
    ops = operators(shape, mode, batch=batch, **priced)
    per_forward = {"ar": 1.0, "dlm": 1.0, "block": tpf, "tidar": tpf}[mode]
    spent = sum(op.seconds(hardware) for op in ops)
    ar = sum(op.seconds(hardware) for op in operators(shape, "ar", batch=batch, **given))
    found = intensity(ops)
    q = queries(mode, **priced)
    most = free_proposals(shape, hardware, batch=batch, **given) if mode == "tidar" else None
    weights, cache = shape.parameters * 2.0, batch * shape.kv_bytes(context + generate, 2)
    return {
        "hardware": hardware.name,
        "mode": mode,
        "queries": q,
        "flop": sum(op.flop for op in ops),
        "bytes": sum(op.bytes for op in ops),
        "intensity": found,
        "ridge": hardware.ridge,
        "peak_flop_per_second": hardware.bf16,
        "bound": "compute" if found >= hardware.ridge else "memory",
        "seconds_per_forward": spent,
        "tpf": per_forward,
        "tokens_per_second": batch * per_forward / spent,
        "speedup_over_ar": per_forward * ar / spent,
        "largest_memory_bound_batch": largest_memory_bound_batch(shape, hardware, mode, **priced),
        "distinct_experts": distinct_experts(shape.experts, shape.experts_per_token, batch * q) if shape.experts else None,
        "proposals": attention_proposals(shape, hardware, block) if mode == "tidar" else None,
        "free_proposals": most,
        "best_proposals": None if most is None else best_proposals(shape, hardware, batch=batch, tpf=tpf, **given),
        "free_forward_over_one": None if most is None else forward_over_one(shape, hardware, most, batch=batch, **given),
        "weight_bytes": weights,
        "kv_bytes": cache if mode != "dlm" else 0.0,
        "memory_bytes": hardware.memory,
        "fits": weights + (cache if mode != "dlm" else 0.0) <= hardware.memory,
        "operators": [
            {"name": op.name, "flop": op.flop, "bytes": op.bytes, "seconds": op.seconds(hardware), "bound": op.bound(hardware)}
            for op in ops
        ],
    }


def check(
    *, hardware: list[str], modes: list[str], block: int, batch: int, context: int, generate: int, tpf: float, proposals: int | None = None
) -> None:
    """A ValueError that names the first bad value and what is allowed."""
    for name in hardware:
        card(name)
    for mode in modes:
        if mode not in MODES:
            raise ValueError(f"unknown mode {mode!r}; allowed: {', '.join(MODES)}")
    for name, value in (("block", block), ("batch", batch), ("context", context), ("generate", generate)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    if block > generate and {"block", "tidar"} & set(modes):
        raise ValueError(f"block is {block}; it must be at most the tokens generated, {generate}")
    if proposals is not None and (not 1 <= proposals <= block or "tidar" not in modes):
        raise ValueError(f"proposals is {proposals}; it must be between 1 and the block length, {block}, and is of mode tidar")
    if not 0 < tpf <= block:
        raise ValueError(f"tpf is {tpf}; it must be above 0 and at most the block length, {block}")


def shape_of_config(config: Mapping[str, Any], where: str) -> Shape:
    """Sizes from a config.json in transformers' words, and the words that its derivatives use for the same things."""
    if not isinstance(config, Mapping):
        raise ValueError(f"{where} holds {type(config).__name__}; it must be an object with named values")
    canvas = config.get("canvas_length") is not None
    config = config.get("text_config", config)

    def size(*names: str, default: int | None = None) -> int:
        for name in names:
            if config.get(name) is not None:
                return int(config[name])
        if default is None:
            raise ValueError(f"{where} has none of {', '.join(names)}; roofline needs one of them")
        return default

    hidden, heads = size("hidden_size", "d_model"), size("num_attention_heads", "n_heads")
    if heads < 1:
        raise ValueError(f"{where} has {heads} attention heads; there must be at least 1")
    experts = size("num_experts", "n_routed_experts", "num_local_experts", default=0)
    expert_width = size("moe_intermediate_size", "expert_intermediate_size", default=0)
    layers = size("num_hidden_layers", "n_layers")
    intermediate = size("intermediate_size", "mlp_hidden_size", "dense_intermediate_size", default=expert_width)
    kinds = config.get("layer_types") or []
    kv_heads, head_dim = size("num_key_value_heads", "n_kv_heads", default=heads), size("head_dim", default=hidden // heads)
    router, channels = size("router_hidden_size", default=0), (heads + kv_heads) * head_dim
    # A config that says top_k_experts puts an MLP beside the experts of a layer; full layers may have heads of their own.
    beside = intermediate if experts and config.get("top_k_experts") is not None else 0
    named = {"head_dim": config.get("global_head_dim"), "num_key_value_heads": config.get("num_global_key_value_heads")}
    full = next(iter((config.get("per_layer_config") or {"": named}).values()))
    other = bool(kinds) and full.get("head_dim") is not None
    # Two convolutions over queries and keys, the second within heads; a router with a hidden layer of its own size behind another.
    taps = [size(name, default=0) for name in ("cca_time0", "cca_time1")]
    mixing = channels * (taps[0] + head_dim * taps[1]) + router * (hidden + 2 * router)
    return Shape(
        layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim, mixing=mixing, intermediate=intermediate,
        vocab=size("vocab_size", "embedding_size"),
        experts=experts, experts_per_token=size("num_experts_per_tok", "top_k_experts", default=1) if experts else 0,
        expert_intermediate=(expert_width or intermediate) if experts else 0,
        shared_intermediate=(size("num_shared_experts", "n_shared_experts", default=0) * expert_width or beside) if experts else 0,
        dense_layers=size("first_k_dense_replace", default=0) if experts else 0,
        sliding_layers=kinds.count("sliding_attention"), window=size("sliding_window", default=0) if kinds else 0,
        tied=bool(config.get("tie_word_embeddings", config.get("weight_tying", False))),
        full_head_dim=int(full["head_dim"]) if other else 0, full_kv_heads=int(full.get("num_key_value_heads") or kv_heads) if other else 0,
        full_values=not other, conditioning=intermediate if canvas else 0,
    )  # fmt: skip


def count(value: float, unit: str = "") -> str:
    """A number of three digits with a decimal prefix and its unit: 868 k, 8.02 GB."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if value < 999.5 or prefix == "P":
            return f"{value:.3g} {prefix}{unit}".rstrip()
        value /= 1000
    raise AssertionError


def duration(seconds: float) -> str:
    """Seconds with a unit that leaves three digits: 21.3 ms, 4.56 us."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= 0.9995 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def table(found: list[dict[str, Any]]) -> str:
    """One line a card and mode."""
    head = (
        "hardware", "mode", "queries", "FLOP/byte", "ridge", "bound", "forward", "TPF", "tokens/s", "over AR", "memory-bound to batch",
        "experts", "weights", "cache", "fits",
    )  # fmt: skip
    lines = [head]
    for f in found:
        batch = f["largest_memory_bound_batch"]
        lines.append((
            f["hardware"], f["mode"], str(f["queries"]), f"{f['intensity']:.1f}", f"{f['ridge']:.0f}", f["bound"],
            duration(f["seconds_per_forward"]), f"{f['tpf']:g}", f"{f['tokens_per_second']:.0f}", f"{f['speedup_over_ar']:.2f}",
            "any" if batch is None else str(batch), "-" if f["distinct_experts"] is None else f"{f['distinct_experts']:.1f}",
            count(f["weight_bytes"], "B"), count(f["kv_bytes"], "B") if f["kv_bytes"] else "-",
            f"{'yes' if f['fits'] else 'no'}, of {f['memory_bytes'] / 1e9:.0f} GB",
        ))  # fmt: skip
    return "\n".join(columns(lines))


def operator_table(found: dict[str, Any]) -> str:
    """One line an operator of one card and mode."""
    lines = [("operator", "FLOP", "bytes", "FLOP/byte", "time", "bound")]
    lines += [
        (op["name"], count(op["flop"]), count(op["bytes"]), f"{op['flop'] / op['bytes']:.1f}", duration(op["seconds"]), op["bound"])
        for op in found["operators"]
    ]
    return "\n".join(columns(lines))


def columns(lines: Sequence[tuple[str, ...]]) -> list[str]:
    """Lines of cells as text, each column as wide as its longest cell."""
    width = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(line, width, strict=True)).rstrip() for line in lines]
