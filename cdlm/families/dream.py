"""Dream (arXiv 2508.15487), DreamCoder and Open-dLLM as a Qwen2: logits shifted by one (row i - 1 predicts token i), full attention."""

from typing import Any

from cdlm.families.base import Facts
from cdlm.families.checkpoint import Entry, same
from cdlm.families.decoder import ATTENTION, MLP, NORMS, layer, need, refuse, rope, token_facts, unchanged

NAME = "dream"
NATIVE = "qwen2"


def matches(config: dict[str, Any]) -> bool:
    return config.get("model_type") == "Dream"


def facts(config: dict[str, Any]) -> Facts:
    return token_facts(config, NAME, logit_shift=True)


def native_config(config: dict[str, Any]) -> dict[str, Any]:
    """Values of a Qwen2Config."""
    refuse(config, NAME, "Qwen2", {"hidden_act": ("silu",), "use_sliding_window": (False,), "use_mrope": (False,)})
    return {
        "model_type": NATIVE, "rope_parameters": rope(config), "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        **{name: need(config, name) for name in (
            "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
            "rms_norm_eps", "max_position_embeddings",
        )},
    }  # fmt: skip


def entries(config: dict[str, Any]) -> list[Entry]:
    found = [same("model.embed_tokens.weight"), same("model.norm.weight")]
    for number in range(need(config, "num_hidden_layers")):
        found += layer(number, unchanged(*ATTENTION, *MLP, *NORMS), "model.layers", bias=ATTENTION[:3])
    if not config.get("tie_word_embeddings", False):
        found.append(same("lm_head.weight"))
    return found
