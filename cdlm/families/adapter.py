"""Adapters: a folder or Hub repository with adapter_config.json, adapter_model.safetensors and facts.json, on a base that it names.

facts.json holds what the base's config.json does not say of the student: block_length, confidence_threshold, max_new_tokens, the family as
which the base is read, and the base's own facts, so that an adapter on another base is noticed. There is no config.json: beside one,
transformers takes an adapter for a part of a whole model and does not ask for its base.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from cdlm import files
from cdlm.families.base import DiffusionLM, Facts
from cdlm.families.decoder import read_json

CONFIG, WEIGHTS, FACTS = "adapter_config.json", "adapter_model.safetensors", "facts.json"


def base_of(file: Path) -> str:
    """The base that an adapter_config.json names."""
    base = read_json(file).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ValueError(
            f"{file} names no base: base_model_name_or_path is {base!r}; it must be a Hub repository of the form user/name. An export "
            "takes it from the recipe's export.base_model: name it there and export again"
        )
    return base


def keys(folder: Path) -> list[str]:
    """The names of the adapter's tensors; a ValueError when its safetensors file is missing or can't be read."""
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as weights:
            return list(weights.keys())
    except (SafetensorError, FileNotFoundError) as error:
        raise ValueError(f"{folder / WEIGHTS} can't be read: {error}") from None


def facts_json(facts: Facts, **decode: Any) -> dict[str, Any]:
    """The values of facts.json, under the keys that config.json has for them."""
    return {**facts.to_config(), "eos_token_id": list(facts.eos_token_ids), "pad_token_id": facts.pad_token_id, **decode}


def overlay(base_config: dict[str, Any], file: Path | None) -> dict[str, Any]:
    """The base's config.json with the values of facts.json (when there is one) over it."""
    return base_config if file is None else {**base_config, **read_json(file)}


def put_on(base: DiffusionLM, folder: Path, file: Path | None) -> DiffusionLM:
    """The base with the adapter's layers in it, and the facts of the student; a ValueError where they do not fit, or are damaged."""
    files.require_sound_weights(folder)
    stated = overlay({}, file)
    own = facts_json(base.facts)
    for key in ("mask_token_id", "eos_token_id", "pad_token_id", "logit_shift", "block_origin", "prompt_attention", "noise"):
        if key in stated and stated[key] != own[key]:
            raise ValueError(f"{folder / FACTS} has {key} {stated[key]!r}, its base has {own[key]!r}: not the base of this adapter")
    count = len(keys(folder))
    try:
        base.hf.load_adapter(str(folder))
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"the adapter {folder} does not fit its base: {' '.join(str(error).split())}") from None
    placed = sum("lora_" in name for name, _ in base.hf.named_parameters())
    if placed != count:
        raise ValueError(f"the adapter {folder} has {count} tensors, its base has room for {placed}: not the base of this adapter")
    if base.own_decoding and set(base.own_decoding) <= set(stated):
        base.state_decoding(stated)
    base.hf.generation_config.max_new_tokens = stated.get("max_new_tokens", base.hf.generation_config.max_new_tokens)
    return type(base)(base.hf, replace(base.facts, block_length=stated.get("block_length", base.facts.block_length)), base.family).eval()


def find(look: Callable[[str], Path | None]) -> tuple[Path, Path | None] | None:
    """adapter_config.json and facts.json (None: there is none) of what has no config.json; None for what is no adapter.
    `look` finds a file by its name."""
    config = look(CONFIG)
    return None if config is None else (config, look(FACTS))
