"""Checkpoint families: one file a family, and the one way to load a checkpoint.

The file of a family offers NAME, `matches(config)` and `facts(config)`, with `config` the parsed config.json. A family whose files have
names of their own also offers NATIVE, the model_type of the stock class that computes the same, `native_config(config)` and
`entries(config)`, its key map. One whose facts do not stand in config.json alone offers `facts_of(path, config)`, one that changes a
loaded model `prepare(hf, facts, path)`.
"""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors import SafetensorError

from cdlm import attention as attending
from cdlm.families import causal, dream, fast_dllm_v2, llada, llada2_moe, llada_moe, native, sdar
from cdlm.families.base import DiffusionLM, Facts

FAMILIES: dict[str, ModuleType] = {
    module.NAME: module for module in (native, llada_moe, llada, dream, fast_dllm_v2, sdar, llada2_moe, causal)
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ATTENTION = ("auto", *attending.BACKENDS)

__all__ = [
    "ATTENTION", "DTYPES", "FAMILIES", "DiffusionLM", "Facts", "facts_of", "find", "load", "load_tokenizer", "read_config",
    "save_tokenizer", "set_attention",
]  # fmt: skip


def read_config(path_or_id: str | Path) -> dict[str, Any]:
    """config.json of a local folder or a Hub repository, as a dictionary. Runs no code of the repository."""
    folder = Path(path_or_id)
    if folder.is_dir():
        file = folder / "config.json"
        if not file.is_file():
            raise ValueError(f"{folder} has no config.json; a model is a folder with config.json, safetensors and a tokenizer")
    elif folder.is_absolute() or str(path_or_id).count("/") != 1:
        raise ValueError(f"no model at {path_or_id}: neither a folder here nor a Hub repository of the form user/name")
    else:
        from huggingface_hub import hf_hub_download

        file = Path(hf_hub_download(str(path_or_id), "config.json"))
    try:
        config = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file} holds {config!r}; it must be an object with named values")
    return config


def find(config: dict[str, Any], family: str | None = None) -> ModuleType:
    """The family that a config.json belongs to, or the one named."""
    if family is not None:
        if family not in FAMILIES:
            raise ValueError(f"unknown family {family!r}; known: {', '.join(sorted(FAMILIES))}")
        return FAMILIES[family]
    for module in FAMILIES.values():
        if module.matches(config):
            return module
    raise ValueError(
        f"no family recognises model_type {config.get('model_type')!r}; known: {', '.join(sorted(FAMILIES))}. "
        "Name one with family= if you know that it fits."
        + (" This architecture is a stock causal LM: family causal makes a diffusion LM of it." if causal.is_stock(config) else "")
    )


def facts_of(path_or_id: str | Path, config: dict[str, Any], module: ModuleType) -> Facts:
    """The facts of a checkpoint: from config.json, for families with `facts_of` from what stands beside it too."""
    return module.facts_of(path_or_id, config) if hasattr(module, "facts_of") else module.facts(config)


def load(
    path_or_id: str | Path,
    *,
    family: str | None = None,
    dtype: torch.dtype | str = torch.float32,
    device: str = "cpu",
    attention: str = "auto",
) -> DiffusionLM:
    """A checkpoint as a `DiffusionLM` with `.facts`, in eval mode. No remote code is run.

    attention: a backend of cdlm.attention, or "auto" (on a CPU transformers' own sdpa).
    """
    from transformers import AutoModelForCausalLM

    if isinstance(dtype, str):
        if dtype not in DTYPES:
            raise ValueError(f"dtype is {dtype!r}; allowed: {', '.join(DTYPES)}")
        dtype = DTYPES[dtype]
    config = read_config(path_or_id)
    module = find(config, family)
    facts = facts_of(path_or_id, config, module)
    if hasattr(module, "entries"):
        from cdlm.families import convert

        hf = convert.load(local_folder(path_or_id), config, module, facts, dtype)
    else:
        try:
            hf = AutoModelForCausalLM.from_pretrained(path_or_id, dtype=dtype, attn_implementation="sdpa", trust_remote_code=False)
        except SafetensorError as error:
            raise ValueError(f"the weights at {path_or_id} can't be read: {error}") from None
    if hasattr(module, "prepare"):
        module.prepare(hf, facts, path_or_id)
    set_attention(hf, attention, device)
    return DiffusionLM(hf.to(device), facts, module.NAME).eval()


def local_folder(path_or_id: str | Path) -> Path:
    """The folder itself, or where the Hub's files of a repository are kept: config, safetensors and tokenizer, no code."""
    if Path(path_or_id).is_dir():
        return Path(path_or_id)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(str(path_or_id), allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]))


def set_attention(hf: Any, backend: str, device: str) -> None:
    """Give a transformers model one of this package's attention backends."""
    if backend not in ATTENTION:
        raise ValueError(f"attention is {backend!r}; allowed: {', '.join(ATTENTION)}")
    if backend != "auto" or torch.device(device).type != "cpu":
        attending.register()
        hf.set_attn_implementation(attending.PREFIX + backend)


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Save a tokenizer beside a model and read it back as a user would: refused when the folder reads other tokens.

    transformers chooses a tokenizer class by the model_type of the config.json beside it, whatever the tokenizer itself says;
    for some model types that is one which splits text differently.
    """
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(folder)
    again = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if again.backend_tokenizer.to_str() != tokenizer.backend_tokenizer.to_str():
        raise ValueError(
            f"beside a config.json of model_type {read_config(folder).get('model_type')!r} transformers reads this tokenizer as "
            f"{type(again).__name__}, which splits text differently; use a model_type that leaves it as it is (llama does)"
        )


def load_tokenizer(path_or_id: str | Path, facts: Facts):
    """The tokenizer of a checkpoint, padding on the left, checked against the checkpoint's facts.

    A mask token that family causal added to the model is added here too.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path_or_id, padding_side="left", trust_remote_code=False)
    if tokenizer.mask_token_id is None and facts.mask_token_id == len(tokenizer):
        causal.add_mask(tokenizer)
    for name, stated in (("mask", facts.mask_token_id), ("pad", facts.pad_token_id)):
        found = getattr(tokenizer, f"{name}_token_id")
        if found is not None and found != stated:
            raise ValueError(f"the tokenizer's {name} token is {found}, the checkpoint's is {stated}: not the tokenizer of this model")
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in facts.eos_token_ids:
        raise ValueError(
            f"the tokenizer's eos token is {tokenizer.eos_token_id}, the checkpoint's are {list(facts.eos_token_ids)}: "
            "not the tokenizer of this model"
        )
    return tokenizer
