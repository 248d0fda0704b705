"""Checkpoint families: one file a family, and the one way to load a checkpoint.

The file of a family offers NAME, `matches(config)` and `facts(config)`, with `config` the parsed config.json. A family whose files have
names of their own also offers NATIVE, the model_type of the stock class that computes the same, `native_config(config)` and
`entries(config)`, its key map. One whose facts do not stand in config.json alone offers `facts_of(path, config)`, one that changes a
loaded model `prepare(hf, facts, path)`, one whose models may be of kinds that do not fit here `check(model, path)`, tried before use.
"""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from cdlm import attention as attending
from cdlm import files
from cdlm.families import adapter, causal, diffusion_gemma, dream, fast_dllm_v2, llada, llada2_moe, llada_moe, native, nemotron, sdar, zaya
from cdlm.families.base import DiffusionLM, Facts
from cdlm.families.decoder import listed, read_json, refuse_foreign_kernels, refuse_quantization, stock_tokenizer
from cdlm.families.wrap import class_of, wrap

FAMILIES: dict[str, ModuleType] = {
    module.NAME: module
    for module in (native, llada_moe, llada, dream, fast_dllm_v2, sdar, llada2_moe, nemotron, zaya, diffusion_gemma, causal)
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ATTENTION = ("auto", *attending.BACKENDS)

__all__ = [
    "ATTENTION", "DTYPES", "FAMILIES", "DiffusionLM", "Facts", "facts_of", "find", "load", "load_tokenizer", "read_config",
    "save_tokenizer", "set_attention",
]  # fmt: skip


def read_config(path_or_id: str | Path) -> dict[str, Any]:
    """config.json of a local folder or a Hub repository, as a dictionary. Runs no code of the repository.

    Of an adapter it is the config.json of its base, with the adapter's facts.json over it.
    """
    look = _looker(path_or_id)
    file = look("config.json")
    if file is None and (found := adapter.find(look)) is not None:
        base = adapter.base_of(found[0])
        if Path(base).is_dir() and Path(base).resolve() == Path(path_or_id).resolve():
            raise ValueError(f"{found[0]} names itself as its base; base_model_name_or_path must be another model")
        return adapter.overlay(read_config(base), found[1])
    if file is None:
        raise ValueError(f"{path_or_id} has no config.json; a model is a folder with config.json, safetensors and a tokenizer")
    config = read_json(file)
    refuse_foreign_kernels(config, path_or_id)
    refuse_quantization(config, path_or_id)
    return config


def _looker(path_or_id: str | Path) -> Callable[[str], Path | None]:
    """A function from a file's name to where the file is, in a folder or in what is kept of a Hub repository; None: it has no such file."""
    folder = Path(path_or_id)
    if folder.is_dir():
        return lambda name: folder / name if (folder / name).is_file() else None
    if folder.is_absolute() or str(path_or_id).count("/") != 1:
        raise ValueError(f"no model at {path_or_id}: neither a folder here nor a Hub repository of the form user/name")
    return lambda name: _hub_file(str(path_or_id), name)


def _hub_file(repo_id: str, name: str) -> Path | None:
    """A small file of a Hub repository, None if the repository has none of that name; one ValueError, and no retries, where it can't
    be had. What was downloaded before serves while the Hub can't be reached."""
    from huggingface_hub import constants, errors, get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache

    try:
        get_hf_file_metadata(hf_hub_url(repo_id, name))
        return Path(hf_hub_download(repo_id, name))
    except errors.RemoteEntryNotFoundError:
        return None
    except errors.HFValidationError as error:
        raise ValueError(f"no model at {repo_id}: neither a folder here nor the name of a Hub repository ({error})") from None
    except errors.GatedRepoError:
        raise ValueError(
            f"{repo_id} is gated: ask for access on its page at {constants.ENDPOINT}/{repo_id}, then log in (HF_TOKEN or `hf auth login`)"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ValueError(
            f"no model {repo_id}: no folder of that name here, and none on the Hub ({constants.ENDPOINT}) that can be seen; "
            "if it is private, log in (HF_TOKEN or `hf auth login`)"
        ) from None
    except (errors.HTTPError, OSError) as error:
        kept = try_to_load_from_cache(repo_id, name)
        if isinstance(kept, str):
            return Path(kept)
        if kept is not None:
            return None  # known to be absent
        if isinstance(error, errors.OfflineModeIsEnabled):
            why = "HF_HUB_OFFLINE is set"
        elif isinstance(error, errors.HfHubHTTPError) and error.response.status_code in (401, 403):
            why = f"the Hub refused it ({error.response.status_code}): check the token (HF_TOKEN or `hf auth login`)"
        elif isinstance(error, errors.HfHubHTTPError):
            why = f"{constants.ENDPOINT} answered {error.response.status_code}"
        else:
            why = f"{constants.ENDPOINT} can't be reached: {error}"
        raise ValueError(f"model {repo_id}: no folder of that name here, nothing kept from earlier downloads, and {why}") from None


def find(config: dict[str, Any], family: str | None = None) -> ModuleType:
    """The family that a config.json belongs to, or the one named; of an adapter, the one that its facts.json names."""
    family = family or config.get("adapter_family")
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
    """The facts of a checkpoint: from config.json and, for token ids that it does not state, from what stands beside it (`token_ids`).

    A family with a `facts_of` of its own is asked instead.
    """
    if hasattr(module, "facts_of"):
        return module.facts_of(path_or_id, config)
    found = token_ids(path_or_id, config)[0]
    if hasattr(module, "check_generation") and not Path(path_or_id).is_file():
        module.check_generation(path_or_id, _read(_looker(path_or_id)("generation_config.json")))
    try:
        return module.facts(found)
    except ValueError as error:
        raise ValueError(f"{path_or_id}: {error}") from None


def token_ids(path_or_id: str | Path, config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The config with mask_token_id, eos_token_id and pad_token_id where config.json, the tokenizer or generation_config.json states them,
    in that order, and the file that each came from. generation_config.json's further end tokens are added: generation stops at each.

    Nothing is guessed: an id that no file states stays out. A config.json that stands alone (a path to the file) is all there is.
    """
    found = dict(config)
    origin = {f"{kind}_token_id": "config.json" for kind in ("mask", "eos", "pad") if config.get(f"{kind}_token_id") is not None}
    if Path(path_or_id).is_file():
        return found, origin
    look = _looker(path_or_id)
    tokenizer, generation = _tokenizer_ids(look), _read(look("generation_config.json"))
    if config.get("noise") == "uniform":  # such a model has no mask token, whatever its tokenizer holds
        tokenizer.pop("mask_token_id", None)
    for name in ("mask_token_id", "eos_token_id", "pad_token_id"):
        for file, ids in (("tokenizer_config.json", tokenizer), ("generation_config.json", generation)):
            if found.get(name) is None and ids.get(name) is not None:
                found[name], origin[name] = ids[name], file
    ends = [*listed(found.get("eos_token_id")), *listed(generation.get("eos_token_id"))]
    if len(unique := list(dict.fromkeys(ends))) > len(listed(found.get("eos_token_id"))):
        found["eos_token_id"] = unique
        origin["eos_token_id"] += " and generation_config.json"
    return found, origin


def _read(file: Path | None) -> dict[str, Any]:
    """A JSON object, empty where there is no file."""
    return {} if file is None else read_json(file)


def _tokenizer_ids(look: Callable[[str], Path | None]) -> dict[str, int]:
    """Ids of the special tokens that tokenizer_config.json names, from the files alone."""
    config = _read(look("tokenizer_config.json"))
    added = {row["content"]: int(number) for number, row in config.get("added_tokens_decoder", {}).items()}
    if any(config.get(f"{kind}_token") is not None for kind in ("mask", "eos", "pad")):
        file = _read(look("tokenizer.json"))
        vocabulary = file.get("model", {}).get("vocab", {})
        added = {
            **(vocabulary if isinstance(vocabulary, dict) else {}), **{row["content"]: row["id"] for row in file.get("added_tokens", [])},
            **added,
        }
    ids = {}
    for kind in ("mask", "eos", "pad"):
        token = config.get(f"{kind}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if token in added:
            ids[f"{kind}_token_id"] = added[token]
    return ids


def load(
    path_or_id: str | Path,
    *,
    family: str | None = None,
    dtype: torch.dtype | str = torch.float32,
    device: str = "cpu",
    attention: str = "auto",
) -> DiffusionLM:
    """A checkpoint as a `DiffusionLM` with `.facts`, in eval mode. No remote code is run. Weights that are not what their folder's
    checksums say, where it has some, are refused.

    attention: a backend of cdlm.attention, or "auto" (on a CPU transformers' own sdpa).
    """
    if isinstance(dtype, str):
        if dtype not in DTYPES:
            raise ValueError(f"dtype is {dtype!r}; allowed: {', '.join(DTYPES)}")
        dtype = DTYPES[dtype]
    look = _looker(path_or_id)
    if look("config.json") is None and (found := adapter.find(look)) is not None:
        family = family or adapter.overlay({}, found[1]).get("adapter_family")
        base = load(adapter.base_of(found[0]), family=family, dtype=dtype, device=device, attention=attention)
        return adapter.put_on(base, local_folder(path_or_id), found[1])
    config = read_config(path_or_id)
    module = find(config, family)
    facts = facts_of(path_or_id, config, module)
    from cdlm.families import convert

    folder = local_folder(path_or_id)
    files.require_sound_weights(folder)
    if hasattr(module, "entries"):
        hf = convert.load(folder, config, module, facts, dtype)
    else:
        hf = convert.load_stock(folder, dtype)
    if hasattr(module, "prepare"):
        module.prepare(hf, facts, path_or_id)
    facts.check_ids(hf.get_input_embeddings().weight.shape[0], path_or_id)
    model = wrap(hf, facts, module.NAME).eval()
    if hasattr(module, "check"):
        module.check(model, path_or_id)
    set_attention(hf, attention, device)
    return model.to(device)


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
    own = class_of(hf.config.model_type).own_attention
    if own is not None:
        if backend not in ("auto", own):
            kind = hf.config.model_type
            raise ValueError(f"attention is {backend!r}; a model of type {kind} takes transformers' own {own}: auto or {own}")
        return
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
    tokenizer = stock_tokenizer(path_or_id, padding_side="left")
    if tokenizer.mask_token_id is None and facts.mask_token_id == len(tokenizer):
        causal.add_mask(tokenizer)
    for name, stated in (("mask", facts.mask_token_id), ("pad", facts.pad_token_id)):
        found = getattr(tokenizer, f"{name}_token_id")
        if stated is not None and found is not None and found != stated:
            raise ValueError(f"the tokenizer's {name} token is {found}, the checkpoint's is {stated}: not the tokenizer of this model")
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in facts.eos_token_ids:
        raise ValueError(
            f"the tokenizer's eos token is {tokenizer.eos_token_id}, the checkpoint's are {list(facts.eos_token_ids)}: "
            "not the tokenizer of this model"
        )
    return tokenizer
