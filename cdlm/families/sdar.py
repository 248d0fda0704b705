"""SDAR (arXiv 2510.06303) as a Qwen3, and SDAR-MoE as a Qwen3-MoE: aligned logits, block-causal with blocks from position 0."""

from typing import Any

from cdlm.families import llada_moe
from cdlm.families.base import Facts
from cdlm.families.checkpoint import Entry, same
from cdlm.families.decoder import ATTENTION, MLP, NORMS, QK_NORM, layer, need, refuse, rope, token_facts, unchanged

NAME = "sdar"
NATIVE = "qwen3"
BLOCK_KEY = "block_size"
NATIVE_MOE = "qwen3_moe"
BLOCK = 4  # of the released models, where config.json states none


def _is_moe(config: dict[str, Any]) -> bool:
    return config.get("model_type") == "sdar_moe"


def matches(config: dict[str, Any]) -> bool:
    return config.get("model_type") in ("sdar", "sdar_moe")


def facts(config: dict[str, Any]) -> Facts:
    block = config.get("block_size") or BLOCK
    return token_facts(config, NAME, block_length=block, block_origin="zero", prompt_attention="block_causal")


def native_config(config: dict[str, Any]) -> dict[str, Any]:
    """Values of a Qwen3Config or, for the MoE, of a Qwen3MoeConfig."""
    refuse(config, NAME, "Qwen3", {
        "hidden_act": ("silu",), "use_sliding_window": (False,), "attention_bias": (False,), "shared_expert_intermediate_size": (None, 0),
        "decoder_sparse_step": (1,), "mlp_only_layers": ([], None),
    })  # fmt: skip
    heads, hidden = need(config, "num_attention_heads"), need(config, "hidden_size")
    names = [
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size", "rms_norm_eps",
        "max_position_embeddings",
    ]  # fmt: skip
    values = {
        "model_type": NATIVE, "rope_parameters": rope(config), "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        "head_dim": config.get("head_dim") or hidden // heads,
    }  # fmt: skip
    if _is_moe(config):
        names += ["num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"]
        values |= {"model_type": NATIVE_MOE, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return {**values, **{name: need(config, name) for name in names}}


def entries(config: dict[str, Any]) -> list[Entry]:
    found = [same("model.embed_tokens.weight"), same("model.norm.weight")]
    mlp = ("mlp.gate",) if _is_moe(config) else MLP
    for number in range(need(config, "num_hidden_layers")):
        found += layer(number, unchanged(*ATTENTION, *QK_NORM, *mlp, *NORMS), "model.layers")
        if _is_moe(config):
            found += llada_moe.experts(number, need(config, "num_experts"))
    if not config.get("tie_word_embeddings", False):
        found.append(same("lm_head.weight"))
    return found
