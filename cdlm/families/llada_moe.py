"""LLaDA-MoE (arXiv 2509.24389) as a Qwen3-MoE: aligned logits, full attention, blocks from the end of the prompt.

Its own code never renormalises the weights of the chosen experts, whatever config.json says.
"""

from typing import Any

from cdlm.families.base import Facts
from cdlm.families.checkpoint import Entry, same, stack
from cdlm.families.decoder import ATTENTION, NORMS, QK_NORM, layer, need, refuse, rope, token_facts, unchanged

NAME = "llada_moe"
NATIVE = "qwen3_moe"


def matches(config: dict[str, Any]) -> bool:
    return config.get("model_type") == "lladamoe" or (
        config.get("model_type") == "llada" and "expert_intermediate_size" in config  # as some of its configs say
    )


def facts(config: dict[str, Any]) -> Facts:
    return token_facts(config, NAME)


def native_config(config: dict[str, Any]) -> dict[str, Any]:
    """Values of a Qwen3MoeConfig."""
    layers = need(config, "num_hidden_layers")
    refuse(config, NAME, "Qwen3-MoE", {
        "hidden_act": ("silu",), "attention_bias": (False,), "shared_expert_intermediate_size": (None, 0), "clip_qkv": (None,),
        "moe_router_enable_expert_bias": (False, None), "moe_router_score_function": ("softmax", None), "partial_rotary_factor": (1, 1.0),
        "qk_layernorm": (True,), "moe_layer_freq": ([1] * layers, 1, None), "routed_scaling_factor": (1, 1.0, None),
        "router_num_group": (None, 0, 1), "router_topk_group": (None, 0, 1),
    })  # fmt: skip
    return {
        "model_type": NATIVE, "rope_parameters": rope(config), "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        "head_dim": config.get("head_dim") or need(config, "hidden_size") // need(config, "num_attention_heads"),
        "moe_intermediate_size": need(config, "expert_intermediate_size"), "norm_topk_prob": False, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "intermediate_size": need(config, "dense_intermediate_size", "expert_intermediate_size"),
        **{name: need(config, name) for name in (
            "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size", "rms_norm_eps",
            "max_position_embeddings", "num_experts", "num_experts_per_tok",
        )},
    }  # fmt: skip


def experts(number: int, count: int) -> list[Entry]:
    """A layer's expert matrices, stacked: gate and up joined, and down."""
    mlp = f"model.layers.{number}.mlp"

    def each(*parts: str) -> list[list[str]]:
        return [[f"{mlp}.experts.{e}.{part}.weight" for part in parts] for e in range(count)]

    return [stack(f"{mlp}.experts.gate_up_proj", each("gate_proj", "up_proj")), stack(f"{mlp}.experts.down_proj", each("down_proj"))]


def entries(config: dict[str, Any]) -> list[Entry]:
    found = [same("model.embed_tokens.weight"), same("model.norm.weight")]
    for number in range(need(config, "num_hidden_layers")):
        found += layer(number, unchanged(*ATTENTION, *QK_NORM, *NORMS, "mlp.gate"), "model.layers")
        found += experts(number, need(config, "num_experts"))
    if not config.get("tie_word_embeddings", False):
        found.append(same("lm_head.weight"))
    return found
