"""Checkpoints from a family's own format into a stock transformers class, and back. Runs no code of a repository.

A native folder that was converted keeps the family's config under `diffusion_source` in its config.json, so that the way back needs
nothing else.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from cdlm import files as disk
from cdlm.families import checkpoint, native
from cdlm.families.base import DiffusionLM, Facts
from cdlm.families.decoder import refuse_foreign_kernels, refuse_quantization

SOURCE = "diffusion_source"
COPIED = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "chat_template*", "generation_config.json", "added_tokens.json")


def _ignored(config: dict[str, Any]) -> Any:
    """Tensors that the native class computes for itself: rotary tables, and a head that is tied to the embeddings."""
    tied = bool(config.get("tie_word_embeddings", config.get("weight_tying", False)))

    def ignored(key: str) -> bool:
        return key.endswith("rotary_emb.inv_freq") or (tied and key in ("lm_head.weight", "model.transformer.ff_out.weight"))

    return ignored


def native_config(config: dict[str, Any], module: ModuleType, facts: Facts) -> Any:
    """The stock config with the family's facts and its own config inside."""
    made = stock_config(module.native_config(config))
    native.state(made, facts)
    made.bos_token_id = config.get("bos_token_id")
    setattr(made, SOURCE, {"family": module.NAME, "config": config})
    return made


def auto_class(model_type: Any) -> Any:
    """The Auto class that makes a language model of this model_type: the one of causal LMs, or of models that also take images."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto import modeling_auto

    causal, images = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return AutoModelForImageTextToText if model_type in images and model_type not in causal else AutoModelForCausalLM


def skeleton(config: Any) -> Any:
    """The class without weights; a ValueError where the config makes none."""
    try:
        with torch.device("meta"):
            return auto_class(config.model_type).from_config(config)
    except KeyError as error:
        raise ValueError(f"config.json makes no model: it names {error}, which transformers does not know") from None
    except (TypeError, RuntimeError, ZeroDivisionError, IndexError, AttributeError, AssertionError) as error:
        raise ValueError(f"config.json makes no model: {error}") from None


def stock_config(config: dict[str, Any]) -> Any:
    """A config.json in transformers' own words as its config, or a ValueError that says which value it can't take."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    refuse_foreign_kernels(config, "the model")
    refuse_quantization(config, "the model")
    values = {key: value for key, value in config.items() if key not in ("transformers_version", "model_type")}
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ValueError(f"config.json has model_type {model_type!r}; it names the stock class, as text")
    try:
        return AutoConfig.for_model(model_type, **values)
    except KeyError as error:
        raise ValueError(f"config.json can't be read as {model_type}: it names {error}, which transformers does not know") from None
    except (TypeError, ZeroDivisionError, AttributeError, StrictDataclassError) as error:
        raise ValueError(f"config.json can't be read as {model_type}: {' '.join(str(error).split())}") from None


def _shapes(model: Any) -> dict[str, torch.Size]:
    return {key: tensor.shape for key, tensor in model.state_dict().items()}


def load(folder: Path, config: dict[str, Any], module: ModuleType, facts: Facts, dtype: torch.dtype) -> Any:
    """The stock model, filled from the family's files one entry at a time; bad files are refused with file and key."""
    try:
        made = native_config(config, module, facts)
        empty = skeleton(made)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    files, entries = checkpoint.Files(folder), module.entries(config)
    checkpoint.check_keys(entries, files, _ignored(config))
    tensors = dict(checkpoint.native_tensors(entries, files, _shapes(empty), dtype))
    model = type(empty).from_pretrained(None, config=made, state_dict=tensors, dtype=dtype, attn_implementation="sdpa")
    lacking = sorted(key for key, tensor in model.state_dict().items() if tensor.device.type == "meta")
    if lacking:
        raise ValueError(f"{folder}: {lacking[0]} was not filled ({len(lacking)} such tensors)")
    return model


def load_stock(folder: Path, dtype: torch.dtype) -> Any:
    """A folder under a stock architecture as its own class; what is missing, too much, of another shape or not finite is refused with its
    name, where transformers would start it at random or say so in a warning."""
    from cdlm.families.decoder import read_json
    from cdlm.families.wrap import class_of

    config = read_json(folder / "config.json")
    try:
        skeleton(stock_config(config))
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    files, model_type = checkpoint.Files(folder), config["model_type"]
    try:
        model, found = auto_class(model_type).from_pretrained(
            folder, dtype=dtype, attn_implementation="sdpa", trust_remote_code=False, use_safetensors=True, ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except SafetensorError as error:
        raise ValueError(f"the weights at {folder} can't be read: {error}") from None
    except (TypeError, KeyError, IndexError, AttributeError, ImportError) as error:  # of a value that only from_pretrained looks at
        raise ValueError(f"{folder}: transformers makes no model of its config.json: {type(error).__name__}: {error}") from None
    for key, there, wanted in sorted(found["mismatched_keys"]):
        where = files.file(key) if key in files else folder
        raise ValueError(f"{where}: {key} has shape {tuple(there)}; config.json says {tuple(wanted)}")
    if missing := sorted(found["missing_keys"]):
        raise ValueError(f"{folder} has no tensor {missing[0]} ({len(missing)} are missing)")
    if extra := sorted(key for key in found["unexpected_keys"] if not key.endswith("rotary_emb.inv_freq")):
        raise ValueError(f"{folder}: the class {type(model).__name__} has no place for {extra[0]} ({len(extra)} such tensors)")
    for key, tensor in model.named_parameters():
        if tensor.numel() and not bool(torch.stack(tensor.detach().aminmax()).isfinite().all()):
            raise ValueError(f"{files.file(key) if key in files else folder}: {key} holds NaN or infinity")
    if class_of(model_type).head is DiffusionLM.head:
        _refuse_scaled_logits(model, folder)
    return model


def _refuse_scaled_logits(model: Any, folder: Path) -> None:
    """A ValueError for a class that does more than its head with its hidden rows (scales or caps logits), or whose logits are no numbers:
    seen on three tokens."""
    ids = torch.arange(3)[None] % model.config.get_text_config().vocab_size
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits.float()
        ours = model.get_output_embeddings()(model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state).float()
    if not bool(whole.isfinite().all()):
        raise ValueError(
            f"{folder}: the logits of three tokens hold NaN or infinity: its weights are broken, or too large for {model.dtype}"
        )
    if not torch.allclose(whole, ours, rtol=1e-2, atol=1e-2 * float(whole.abs().max())):
        raise ValueError(f"{folder}: {type(model).__name__} scales or caps its logits behind the head, which is not supported here")


def _copy_rest(source: Path, target: Path) -> None:
    for pattern in COPIED:
        for file in source.glob(pattern):
            if file.suffix != ".py":
                shutil.copyfile(file, target / file.name)


def to_native(source: Path, config: dict[str, Any], module: ModuleType, facts: Facts, target: Path) -> None:
    """Write a folder that stock transformers loads; values keep their dtype and bits."""
    made = native_config(config, module, facts)
    files, entries = checkpoint.Files(source), module.entries(config)
    checkpoint.check_keys(entries, files, _ignored(config))
    empty = skeleton(made)
    made.architectures = [type(empty).__name__]
    made.dtype = files.get(entries[0].family[0]).dtype
    made.save_pretrained(target)
    checkpoint.write(target, checkpoint.native_tensors(entries, files, _shapes(empty), None))
    _copy_rest(source, target)


def to_family(source: Path, config: dict[str, Any], families: dict[str, ModuleType], target: Path) -> None:
    """Write a folder under the family's own names and config, from a native one that was converted from that family."""
    kept = config.get(SOURCE)
    if not isinstance(kept, dict) or kept.get("family") not in families:
        raise ValueError(f"{source}/config.json has no {SOURCE}: it was not converted from a family, so there is no format to go back to")
    from cdlm.families import token_ids

    module, family_config = families[kept["family"]], kept["config"]
    files, entries = checkpoint.Files(source), module.entries(family_config)

    def tensors() -> Any:
        for entry in entries:
            found: list[Tensor] = entry.to_family([files.get(key) for key in entry.native])
            yield from zip(entry.family, found, strict=True)

    block, key = config.get("block_length"), getattr(module, "BLOCK_KEY", None)
    if key is not None and block is not None and block != module.facts(token_ids(source, family_config)[0]).block_length:
        family_config = {**family_config, key: block}  # a student with longer blocks
    (target / "config.json").write_text(json.dumps(family_config, indent=2) + "\n")
    checkpoint.write(target, tensors())
    _copy_rest(source, target)


def folder(source: Path, target: Path, to: str, families: dict[str, ModuleType], family: str | None = None) -> None:
    """Convert a local folder, `to` "native" or "family". The target must not exist; it appears when it is whole. One at a time writes it.

    family: read it as this family, where its config.json does not say which one it is.
    """
    from cdlm.families import facts_of, find, read_config

    if to not in ("native", "family"):
        raise ValueError(f"--to is {to!r}; allowed: native, family")
    if target.exists():
        raise ValueError(f"{target} exists; convert writes a new folder")
    if not source.is_dir():
        raise ValueError(f"{source} is no folder here; convert works on local folders")
    disk.require_sound_weights(source)
    config = read_config(source)
    with disk.locked_place(target), disk.new_folder(target) as partial:
        if to == "family":
            to_family(source, config, families, partial)
        else:
            module = find(config, family)
            if not hasattr(module, "entries"):
                raise ValueError(f"{source} is native already (model_type {config.get('model_type')!r})")
            to_native(source, config, module, facts_of(source, config, module), partial)


def describe(path: str | Path, config: dict[str, Any], module: ModuleType) -> Iterator[str]:
    """The lines that `cdlm inspect` prints, as they are found out: family, facts and their origins, native class, parameters, weights.

    What is refused is a ValueError in the place of the line it spoils.
    """
    from cdlm.families import facts_of, token_ids

    yield f"family      {module.NAME}"
    if "auto_map" in config:
        named = config["auto_map"]
        yield f"auto_map    names remote code ({', '.join(named) if isinstance(named, dict) else named}); it is not run"
    facts, origins = facts_of(path, config, module), {**token_ids(path, config)[1], **getattr(module, "ORIGINS", {})}
    keys = {"eos_token_ids": ("eos_token_id",), "block_length": ("block_size", "bd_size", "block_length")}
    for name, value in {**facts.to_config(), "eos_token_ids": list(facts.eos_token_ids), "pad_token_id": facts.pad_token_id}.items():
        stated = [key for key in keys.get(name, (name,)) if config.get(key) is not None and value in (config[key], [config[key]])]
        origin = f"config.json, {stated[0]}" if stated else origins.get(keys.get(name, (name,))[0], origins.get(name))
        yield f"{name:<18} {value!s:<16} from {origin or f'the family, {module.NAME}'}"
    own_format = hasattr(module, "entries")
    made = native_config(config, module, facts) if own_format else stock_config(config)
    empty = skeleton(made)
    if not hasattr(module, "prepare"):  # which gives a mask token its row
        facts.check_ids(empty.get_input_embeddings().weight.shape[0], path)
    yield f"native      {type(empty).__name__}"
    yield f"parameters  {sum(p.numel() for p in empty.parameters()):,}"
    if not Path(path).is_dir():
        yield "weights     on the Hub; loading checks them"
        return
    files = checkpoint.Files(Path(path))
    if own_format:
        entries = module.entries(config)
        checkpoint.check_keys(entries, files, _ignored(config))
        checkpoint.check_shapes(entries, files, _shapes(empty))
    elif not getattr(made, "tie_word_embeddings", False) and not any("experts" in key for key in files.keys()):
        if lacking := sorted(set(_shapes(empty)) - files.keys()):
            raise ValueError(f"{path} has no tensor {lacking[0]} ({len(lacking)} are missing)")
    yield f"weights     {len(files.keys())} tensors in {', '.join(files.names[:3])}{' ...' if len(files.names) > 3 else ''}"
