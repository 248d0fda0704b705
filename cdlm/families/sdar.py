"""SDAR (arXiv 2510.06303), dense, as a Qwen3: aligned logits, block-causal with blocks from position 0."""

from typing import Any

from cdlm.families.base import Facts
from cdlm.families.checkpoint import Entry, same
from cdlm.families.decoder import ATTENTION, MLP, NORMS, QK_NORM, layer, need, refuse, rope, token_facts, unchanged

NAME = "sdar"
NATIVE = "qwen3"


def matches(config: dict[str, Any]) -> bool:
    return config.get("model_type") == "sdar"


def facts(config: dict[str, Any]) -> Facts:
    block = config.get("block_size")
    return token_facts(config, NAME, block_length=block, block_origin="zero", prompt_attention="block_causal")


def native_config(config: dict[str, Any]) -> dict[str, Any]:
    """Values of a Qwen3Config."""
    refuse(config, NAME, "Qwen3", {"hidden_act": ("silu",), "use_sliding_window": (False,), "attention_bias": (False,)})
    heads, hidden = need(config, "num_attention_heads"), need(config, "hidden_size")
    return {
        "model_type": NATIVE, "rope_parameters": rope(config), "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        "head_dim": config.get("head_dim") or hidden // heads,
        **{name: need(config, name) for name in (
            "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
            "rms_norm_eps", "max_position_embeddings",
        )},
    }  # fmt: skip


def entries(config: dict[str, Any]) -> list[Entry]:
    found = [same("model.embed_tokens.weight"), same("model.norm.weight")]
    for number in range(need(config, "num_hidden_layers")):
        found += layer(number, unchanged(*ATTENTION, *QK_NORM, *MLP, *NORMS), "model.layers")
    if not config.get("tie_word_embeddings", False):
        found.append(same("lm_head.weight"))
    return found
