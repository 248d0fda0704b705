"""Fast-dLLM v2 (arXiv 2509.26328) as a Qwen2: shifted logits, block-causal with blocks of 32 from position 0."""

from typing import Any

from cdlm.families import dream
from cdlm.families.base import Facts
from cdlm.families.checkpoint import Entry
from cdlm.families.decoder import token_facts

NAME = "fast_dllm_v2"
NATIVE = dream.NATIVE
BLOCK_KEY = "bd_size"


def matches(config: dict[str, Any]) -> bool:
    return config.get("model_type") == "Fast_dLLM_Qwen"


def facts(config: dict[str, Any]) -> Facts:
    block = config.get("bd_size", config.get("block_size", 32))
    return token_facts(config, NAME, logit_shift=True, block_length=block, block_origin="zero", prompt_attention="block_causal")


def native_config(config: dict[str, Any]) -> dict[str, Any]:
    """Values of a Qwen2Config."""
    return dream.native_config(config)


def entries(config: dict[str, Any]) -> list[Entry]:
    return dream.entries(config)
