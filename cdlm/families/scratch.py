"""A model from nothing: a stock config, a tokenizer, and an initialisation that fits a small network.

"default"  transformers' own initialisation, N(0, 0.02) for most models.
"fan_in"   weights N(0, 1 / fan_in), embeddings N(0, 1), biases 0: activations keep their size at any width.
"copying"  fan_in, and two matrices start as partners of others: lm_head is the embedding scaled by width ** -0.5, and each
           o_proj is the transpose of its v_proj. So a head that attends to a token raises that token's logit from the
           first step on, and attention learns where to look without waiting for a copying circuit to form by chance.
A family whose layers need something else has a `start` of its own, which comes after these.
"""

from pathlib import Path
from typing import Any

import torch

from cdlm.families import convert, diffusion_gemma, native, zaya
from cdlm.families.base import DiffusionLM, Facts
from cdlm.families.wrap import wrap

INITS = ("default", "fan_in", "copying")


def _fan_in(hf: Any) -> None:
    convolutions = {id(module.weight) for module in hf.modules() if isinstance(module, torch.nn.Conv1d)}
    for name, parameter in hf.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif name.endswith("qk_norm.temp"):  # what keys are multiplied with; at 0 attention would look nowhere
            parameter.fill_(1.0)
        elif parameter.ndim in (2, 3):  # one matrix, or one an expert, or one a tap
            embedding = parameter is hf.get_input_embeddings().weight
            inputs = parameter[0].numel() if id(parameter) in convolutions else parameter.shape[-1]
            parameter.normal_(0.0, 1.0 if embedding else inputs**-0.5)


def _copying(hf: Any) -> None:
    head, embedding = hf.get_output_embeddings().weight, hf.get_input_embeddings().weight
    if head is not embedding:
        head.copy_(embedding * embedding.shape[1] ** -0.5)
    for name, module in hf.named_modules():
        if hasattr(module, "v_proj") and hasattr(module, "o_proj") and hf.config.model_type != diffusion_gemma.MODEL_TYPE:
            if module.o_proj.weight.shape != module.v_proj.weight.T.shape:
                raise ValueError(
                    f"init copying: {name}.o_proj is {tuple(module.o_proj.weight.shape)}, the transpose of v_proj is "
                    f"{tuple(module.v_proj.weight.T.shape)}; it needs as many key-value heads as heads"
                )
            module.o_proj.weight.copy_(module.v_proj.weight.T)
        elif hasattr(module, "o_proj") and hasattr(module, "qkv_proj"):
            module.o_proj.weight.copy_(zaya.value_weight(module).T)


def build(
    config_path: Path, tokenizer_path: Path, *, init: str, seed: int, dtype: torch.dtype = torch.float32, **stated: Any
) -> DiffusionLM:
    """A freshly initialised masked diffusion LM with the tokenizer's special tokens as its facts.

    stated: facts besides those; without any the model is bidirectional with aligned logits.
    """
    from transformers import AutoConfig, AutoTokenizer

    if init not in INITS:
        raise ValueError(f"scratch.init is {init!r}; allowed: {', '.join(INITS)}")
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
    config = AutoConfig.from_pretrained(config_path)
    if config.model_type == diffusion_gemma.MODEL_TYPE:
        stated = {**diffusion_gemma.stated(config.to_dict()), **stated}
    marked = stated.get("noise", "absorbing") != "uniform"
    for token in (*(("mask",) if marked else ()), "eos", "pad"):
        if getattr(tokenizer, f"{token}_token_id") is None:
            raise ValueError(f"the tokenizer at {tokenizer_path} has no {token} token")
    if (vocab_size := config.get_text_config().vocab_size) < len(tokenizer):
        raise ValueError(f"{config_path} has vocab_size {vocab_size}; the tokenizer has {len(tokenizer)} tokens")
    config.eos_token_id, config.pad_token_id, config.bos_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id, None
    facts = Facts(
        mask_token_id=tokenizer.mask_token_id if marked else None, eos_token_ids=(tokenizer.eos_token_id,),
        pad_token_id=tokenizer.pad_token_id,
        **stated,
    )
    for key, value in native.config_keys(facts).items():
        setattr(config, key, value)
    torch.manual_seed(seed)
    hf = convert.auto_class(config.model_type).from_config(config, attn_implementation="sdpa", dtype=dtype)
    with torch.no_grad():
        if init != "default":
            _fan_in(hf)
        if init == "copying":
            _copying(hf)
        if init != "default" and config.model_type == diffusion_gemma.MODEL_TYPE:
            diffusion_gemma.start(hf, copying=init == "copying")
    hf.generation_config.eos_token_id, hf.generation_config.pad_token_id = config.eos_token_id, config.pad_token_id
    return wrap(hf, facts, native.NAME)
