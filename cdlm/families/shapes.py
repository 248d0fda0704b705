"""Sizes of known checkpoints, for `cdlm roofline NAME`. From their config.json files and model cards."""

from cdlm.roofline import Shape

SHAPES = {
    "llada-8b": Shape(layers=32, hidden=4096, heads=32, kv_heads=32, head_dim=128, intermediate=12288, vocab=126464),
    "dream-7b": Shape(layers=28, hidden=3584, heads=28, kv_heads=4, head_dim=128, intermediate=18944, vocab=152064),
    "llama-3.1-8b": Shape(layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocab=128256),
    "qwen2.5-7b": Shape(layers=28, hidden=3584, heads=28, kv_heads=4, head_dim=128, intermediate=18944, vocab=152064),
    "llada2-mini": Shape(
        layers=20, hidden=2048, heads=16, kv_heads=4, head_dim=128, intermediate=5120, vocab=157184, experts=256, experts_per_token=8,
        expert_intermediate=512, shared_intermediate=512, dense_layers=1,
    ),
    # mixing: the two convolutions over queries and keys (1280 channels, width 2, the second in 10 groups) and the router's MLP of 256.
    "zaya1-8b": Shape(
        layers=40, hidden=2048, heads=8, kv_heads=2, head_dim=128, intermediate=0, vocab=262272, experts=16, experts_per_token=1,
        expert_intermediate=2048, tied=True, mixing=1280 * 2 + 1280 * 128 * 2 + 2048 * 256 + 2 * 256 * 256,
    ),
    # Full layers (one in six) have heads of their own, and make values of their keys' projection.
    "diffusiongemma-26b-a4b": Shape(
        layers=30, hidden=2816, heads=16, kv_heads=8, head_dim=256, intermediate=2112, vocab=262144, experts=128, experts_per_token=8,
        expert_intermediate=704, shared_intermediate=2112, sliding_layers=25, window=1024, tied=True, full_kv_heads=2, full_head_dim=512,
        full_values=False, conditioning=2112,
    ),
}  # fmt: skip
