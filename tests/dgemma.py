"""A tiny random DiffusionGemma for the tests: 4 layers (3 sliding, 1 full), 4 experts, canvas 8, a vision tower that nothing asks."""

import torch


def random_hf(*, seed: int = 0, vocab: int = 128, canvas: int = 8, window: int = 16, scale: float = 1.0, **text):
    """The transformers class. Every parameter is random, norms and scales too. `scale` is that of matrices; at 1 rounding does not grow
    from step to step, so that a decoding is the same with padding and without."""
    from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

    config = DiffusionGemmaConfig(
        text_config={
            "vocab_size": vocab, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 1, "sliding_window": window,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "num_experts": 4, "top_k_experts": 2,
            "moe_intermediate_size": 16, "max_position_embeddings": 512, "pad_token_id": 0, "eos_token_id": 2, "bos_token_id": None, **text,
        },
        vision_config={
            "model_type": "gemma4_vision", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
            "num_key_value_heads": 1, "head_dim": 8, "position_embedding_size": 4,
        },
        canvas_length=canvas,
    )  # fmt: skip
    torch.manual_seed(seed)
    hf = DiffusionGemmaForBlockDiffusion(config)
    hf.set_attn_implementation("sdpa")
    with torch.no_grad():
        for parameter in hf.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, scale * parameter.shape[-1] ** -0.5)
            else:
                parameter.normal_(1.0, 0.2)
        hf.get_input_embeddings().weight.normal_()
    hf.generation_config.eos_token_id, hf.generation_config.pad_token_id = [2], 0
    return hf.eval()


def random_model(*, facts: dict | None = None, **values):
    """`random_hf` as a DiffusionLM: eos 2, pad 0, no mask token."""
    from cdlm.families import diffusion_gemma
    from cdlm.families.base import Facts
    from cdlm.families.wrap import wrap

    hf = random_hf(**values)
    base = {**diffusion_gemma.stated(hf.config.to_dict()), "mask_token_id": None, "eos_token_ids": (2,), "pad_token_id": 0}
    return wrap(hf, Facts(**{**base, **(facts or {})}), diffusion_gemma.NAME).eval()
