"""LLaDA2.x (arXiv 2512.15745) as a GLM-4-MoE: aligned logits, block-causal with blocks of 32 from position 0."""

from typing import Any

from cdlm.families import llada_moe
from cdlm.families.base import Facts
from cdlm.families.checkpoint import Entry, same, split
from cdlm.families.decoder import MLP, layer, need, refuse, rope, token_facts, unchanged

NAME = "llada2_moe"
NATIVE = "glm4_moe"
BLOCK_KEY = "block_size"
NAMES = {
    "self_attn.o_proj": "attention.dense", "self_attn.q_norm": "attention.query_layernorm", "self_attn.k_norm": "attention.key_layernorm",
    "input_layernorm": "input_layernorm", "post_attention_layernorm": "post_attention_layernorm",
}  # fmt: skip


def matches(config: dict[str, Any]) -> bool:
    return config.get("model_type") == "llada2_moe"


def facts(config: dict[str, Any]) -> Facts:
    block = config.get("block_size", config.get("block_length", 32))
    return token_facts(config, NAME, block_length=block, block_origin="zero", prompt_attention="block_causal")


def _head_dim(config: dict[str, Any]) -> int:
    return config.get("head_dim") or need(config, "hidden_size") // need(config, "num_attention_heads")


def native_config(config: dict[str, Any]) -> dict[str, Any]:
    """Values of a Glm4MoeConfig."""
    refuse(config, NAME, "GLM-4-MoE", {
        "hidden_act": ("silu",), "use_bias": (False,), "use_qkv_bias": (False,), "use_sliding_window": (False,), "use_qk_norm": (True,),
        "score_function": ("sigmoid",), "moe_router_enable_expert_bias": (True,), "norm_head": (False,),
    })  # fmt: skip
    return {
        "model_type": NATIVE, "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)), "head_dim": _head_dim(config),
        "rope_parameters": rope(config, partial_rotary_factor=config.get("partial_rotary_factor", 1.0)),
        "n_routed_experts": need(config, "num_experts"), "n_shared_experts": config.get("num_shared_experts", 0), "norm_topk_prob": True,
        "use_qk_norm": True, "attention_bias": False, "num_mtp_layers": 0,
        **{name: need(config, name) for name in (
            "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
            "rms_norm_eps", "max_position_embeddings", "num_experts_per_tok", "moe_intermediate_size", "n_group", "topk_group",
            "routed_scaling_factor", "first_k_dense_replace",
        )},
    }  # fmt: skip


def entries(config: dict[str, Any]) -> list[Entry]:
    dim, heads, kv_heads = _head_dim(config), need(config, "num_attention_heads"), need(config, "num_key_value_heads")
    found = [same("model.embed_tokens.weight", "model.word_embeddings.weight"), same("model.norm.weight")]
    for number in range(need(config, "num_hidden_layers")):
        root = f"model.layers.{number}"
        found += layer(number, NAMES, "model.layers")
        found.append(split(
            [f"{root}.self_attn.{x}_proj.weight" for x in "qkv"], f"{root}.attention.query_key_value.weight",
            [heads * dim, kv_heads * dim, kv_heads * dim],
        ))  # fmt: skip
        if number < need(config, "first_k_dense_replace"):
            found += layer(number, unchanged(*MLP), "model.layers")
            continue
        found.append(same(f"{root}.mlp.gate.weight"))
        found.append(same(f"{root}.mlp.gate.e_score_correction_bias", f"{root}.mlp.gate.expert_bias"))
        found += llada_moe.experts(number, need(config, "num_experts"))
        if config.get("num_shared_experts"):
            found += layer(number, unchanged(*(name.replace("mlp.", "mlp.shared_experts.") for name in MLP)), "model.layers")
    if not config.get("tie_word_embeddings", False):
        found.append(same("lm_head.weight"))
    return found
