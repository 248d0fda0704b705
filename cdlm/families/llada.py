"""LLaDA (arXiv 2502.09992) as a Llama: aligned logits, full attention, blocks from the end of the prompt."""

from typing import Any

from cdlm.families.base import Facts
from cdlm.families.checkpoint import Entry, same
from cdlm.families.decoder import layer, need, refuse, rope, token_facts

NAME = "llada"
NATIVE = "llama"
NAMES = {
    "self_attn.q_proj": "q_proj", "self_attn.k_proj": "k_proj", "self_attn.v_proj": "v_proj", "self_attn.o_proj": "attn_out",
    "mlp.gate_proj": "ff_proj", "mlp.up_proj": "up_proj", "mlp.down_proj": "ff_out",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ff_norm",
}  # fmt: skip


def matches(config: dict[str, Any]) -> bool:
    return config.get("model_type") == "llada"


def facts(config: dict[str, Any]) -> Facts:
    return token_facts(config, NAME)


def native_config(config: dict[str, Any]) -> dict[str, Any]:
    """Values of a LlamaConfig."""
    refuse(config, NAME, "Llama", {
        "alibi": (False,), "rope": (True,), "layer_norm_type": ("rms",), "include_bias": (False,), "include_qkv_bias": (False, None),
        "block_type": ("llama",), "activation_type": ("silu",), "attention_layer_norm": (False,), "scale_logits": (False,),
        "bias_for_layer_norm": (False, None), "clip_qkv": (None,),
    })  # fmt: skip
    heads = need(config, "n_heads")
    kv_heads = config.get("n_kv_heads")
    if kv_heads is None:
        kv_heads = 1 if config.get("multi_query_attention") else heads
    return {
        "model_type": NATIVE, "hidden_size": need(config, "d_model"), "intermediate_size": need(config, "mlp_hidden_size"),
        "num_hidden_layers": need(config, "n_layers"), "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "vocab_size": need(config, "embedding_size", "vocab_size"), "rms_norm_eps": need(config, "rms_norm_eps"),
        "rope_parameters": rope(config), "max_position_embeddings": need(config, "max_sequence_length"),
        "tie_word_embeddings": bool(config.get("weight_tying", False)),
    }  # fmt: skip


def entries(config: dict[str, Any]) -> list[Entry]:
    root = "model.transformer"
    found = [same("model.embed_tokens.weight", f"{root}.wte.weight"), same("model.norm.weight", f"{root}.ln_f.weight")]
    for number in range(need(config, "n_layers")):
        found += layer(number, NAMES, f"{root}.blocks")
    if not config.get("weight_tying", False):
        found.append(same("lm_head.weight", f"{root}.ff_out.weight"))
    return found
