"""Nemotron-Labs-Diffusion (arXiv 2607.05722), the open-weights successor of TiDAR, as a Ministral3: one causal model with three modes.

The facts are those of its autoregressive mode: causal, shifted logits, blocks of one token. Its linear self-speculation is
draft and verify in the linear layout, with an adapter in the drafting forward alone (`drafting`); a draft's first slot is not drafted
but taken from the causal row before it. Its block diffusion mode has two variants, in both of which a mask's row predicts its own position,
a block sees all of itself and the causal text before it, and a finished block is committed by a causal forward. Without causal_context
masks stand in the whole block, of which each step fills at least one slot, or all above the threshold: `DiffusionLM.diffusion_mode`.
With causal_context the first slot of a block is taken from the causal row of the token before; that variant is not here.
Read in copies of its own code and in ports of it, and not tried on its weights, which were not at hand: all of this, and the names below.
"""

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from cdlm.families import adapter
from cdlm.families.base import Facts
from cdlm.families.checkpoint import Entry, same
from cdlm.families.decoder import ATTENTION, MLP, NORMS, layer, need, refuse, token_facts, unchanged

NAME = "nemotron_labs_diffusion"
NATIVE = "ministral3"
DRAFT_ADAPTER = "linear_spec_lora"
BLOCK = 32  # masks of a draft, where config.json states none
ROOT = "encoder."  # stands before the names of all tensors but the head, where the native class has "model."


def matches(config: dict[str, Any]) -> bool:
    return config.get("model_type") == NAME


def facts(config: dict[str, Any]) -> Facts:
    drafts = BLOCK if config.get("block_size") is None else config["block_size"]
    return token_facts(config, NAME, logit_shift=True, prompt_attention="causal", block_length=1, draft_length=drafts)


def native_config(config: dict[str, Any]) -> dict[str, Any]:
    """Values of a Ministral3Config."""
    refuse(config, NAME, "Ministral3", {
        "hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,), "sliding_window": (None,),
        "tie_word_embeddings": (False,),
    })  # fmt: skip
    return {"model_type": NATIVE, "tie_word_embeddings": False, **{name: need(config, name) for name in (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
        "rms_norm_eps", "max_position_embeddings", "rope_parameters",
    )}}  # fmt: skip


def entries(config: dict[str, Any]) -> list[Entry]:
    found = [same(f"model.{name}.weight", f"{ROOT}{name}.weight") for name in ("embed_tokens", "norm")]
    for number in range(need(config, "num_hidden_layers")):
        found += layer(number, unchanged(*ATTENTION, *MLP, *NORMS), f"{ROOT}layers")
    return [*found, same("lm_head.weight", "diffusion_head.weight")]


def drafting(hf: Any, folder: Path) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Put the adapter of a checkpoint's subfolder linear_spec_lora on its native model, switched off, and give what switches it on for a
    `with` block: the adapter is for drafting forwards alone.

    Raises ValueError where the files are no adapter of this model.
    """
    count = len(adapter.keys(folder))
    named = {key.replace(f".{ROOT}", ".model."): tensor for key, tensor in load_file(folder / adapter.WEIGHTS).items()}
    with tempfile.TemporaryDirectory() as native:
        save_file(named, Path(native) / adapter.WEIGHTS, {"format": "pt"})
        shutil.copyfile(folder / adapter.CONFIG, Path(native) / adapter.CONFIG)
        try:
            hf.load_adapter(native)
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"the adapter {folder} does not fit its base: {' '.join(str(error).split())}") from None
    adapted = [module for module in hf.modules() if hasattr(module, "lora_A")]
    placed = sum("lora_" in name for name, _ in hf.named_parameters())
    if placed != count:
        raise ValueError(f"the adapter {folder} has {count} tensors, its base has room for {placed}: not the base of this adapter")

    def switch(on: bool) -> None:
        for module in adapted:
            module.enable_adapters(on)

    @contextlib.contextmanager
    def switched_on() -> Iterator[None]:
        switch(True)
        try:
            yield
        finally:
            switch(False)

    switch(False)
    return switched_on
