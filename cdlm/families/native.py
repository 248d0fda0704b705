"""Family "native": a folder under a stock transformers architecture, with the facts in its config.json.

This is what training and `cdlm export` write. The facts are keys of config.json named as the fields of
`Facts` (mask_token_id, block_length, block_origin, logit_shift, prompt_attention, noise).
"""

from typing import Any

from cdlm.families.base import FACT_NAMES, Facts

NAME = "native"


def matches(config: dict[str, Any]) -> bool:
    """Does this config.json say that it belongs here?"""
    return config.get("diffusion_family") == NAME


def facts(config: dict[str, Any]) -> Facts:
    """The facts that config.json states; a missing mask token or end-of-sequence token is refused, never guessed."""
    marked = config.get("noise", "absorbing") != "uniform"
    for key in (*(("mask_token_id",) if marked else ()), "eos_token_id", "pad_token_id"):
        if config.get(key) is None:
            raise ValueError(f"config.json has no {key}; a {NAME} diffusion checkpoint must state it (pad and eos are not stand-ins)")
    eos = config["eos_token_id"]
    stated = {name: config[name] for name in FACT_NAMES if config.get(name) is not None and name != "eos_token_ids"}
    stated.setdefault("mask_token_id", None)
    return Facts(**stated, eos_token_ids=tuple(eos) if isinstance(eos, list) else (eos,))


def config_keys(facts: Facts) -> dict[str, Any]:
    """The keys to add to a stock config so that `matches` and `facts` find them again."""
    return {"diffusion_family": NAME, **facts.to_config()}


def state(config: Any, facts: Facts) -> None:
    """Put the facts into a transformers config, in place; what it held of other facts, which these do not name, goes."""
    stated = config_keys(facts)
    for key in FACT_NAMES:
        if key in vars(config) and key not in stated and key not in ("eos_token_ids", "pad_token_id"):
            delattr(config, key)
    for key, value in stated.items():
        setattr(config, key, value)
    config.eos_token_id, config.pad_token_id = list(facts.eos_token_ids), facts.pad_token_id
    if hasattr(config, "canvas_length"):  # transformers' own name of it, where a class has one
        config.canvas_length = facts.block_length
