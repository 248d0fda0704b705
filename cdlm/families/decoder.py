"""What the families' files share: the tensors of a stock decoder layer, and how a config is read."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cdlm.families.base import Facts
from cdlm.families.checkpoint import Entry, same


def layer(number: int, names: dict[str, str], prefix: str, *, bias: tuple[str, ...] = ()) -> Iterator[Entry]:
    """Entries of one layer: native name (behind model.layers.N.) -> the family's (behind `prefix`.N.)."""
    for native, family in names.items():
        yield same(f"model.layers.{number}.{native}.weight", f"{prefix}.{number}.{family}.weight")
        if native in bias:
            yield same(f"model.layers.{number}.{native}.bias", f"{prefix}.{number}.{family}.bias")


ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
QK_NORM = ("self_attn.q_norm", "self_attn.k_norm")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
NORMS = ("input_layernorm", "post_attention_layernorm")


def unchanged(*names: str) -> dict[str, str]:
    """Names that the family shares with the native class."""
    return {name: name for name in names}


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object; a ValueError that names the file if it holds none."""
    try:
        found = json.loads(file.read_text())
    except ValueError as error:  # also text that is not UTF-8
        raise ValueError(f"{file} is not JSON: {error}") from None
    except RecursionError:
        raise ValueError(f"{file} is nested too deep to be read") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds {repr(found)[:80]}; it must be an object with named values")
    return found


IMPLEMENTATIONS = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")
LOCAL = (None, "eager", "sdpa", "flex_attention", "grouped_mm", "batched_mm")


DEEPEST = 50  # levels of a config.json


def refuse_foreign_kernels(config: Any, where: Any, level: int = 0) -> None:
    """A ValueError for a config.json, or a part of one at this level, that names an implementation which transformers would fetch from the
    Hub: code. And for one of more levels than any has."""
    if level > DEEPEST:
        raise ValueError(f"{where}: config.json is nested more than {DEEPEST} levels deep")
    if isinstance(config, list):
        for part in config:
            refuse_foreign_kernels(part, where, level + 1)
    if not isinstance(config, dict):
        return
    for key, value in config.items():
        if key in IMPLEMENTATIONS and value not in LOCAL:
            raise ValueError(
                f"{where}: config.json has {key} {value!r}, which may be code of a repository, and is not run; allowed: "
                f"{', '.join(map(str, LOCAL[1:]))}, or none"
            )
        refuse_foreign_kernels(value, where, level + 1)


def refuse_quantization(config: dict[str, Any], where: Any) -> None:
    """A ValueError for a config.json whose weights are stored in a quantized form."""
    if config.get("quantization_config") is not None:
        raise ValueError(
            f"{where}: config.json has quantization_config {str(config['quantization_config'])[:80]}; weights that are quantized can't be "
            "read here: take the float32, bfloat16 or float16 weights that they were made from, whose config.json has no such key"
        )


def listed(value: Any) -> list[int]:
    """End tokens as a list; a ValueError unless they are whole numbers."""
    ends = [] if value is None else value if isinstance(value, list) else [value]
    for end in ends:
        if isinstance(end, bool) or not isinstance(end, int):
            raise ValueError(f"eos_token_id is {value!r}; it must be a whole number or a list of them")
    return ends


def need(config: dict[str, Any], *names: str) -> Any:
    """The value under the first name that is there; a ValueError if none is."""
    for name in names:
        if config.get(name) is not None:
            return config[name]
    raise ValueError(f"config.json has none of: {', '.join(names)}")


def refuse(config: dict[str, Any], family: str, native: str, allowed: dict[str, tuple[Any, ...]]) -> None:
    """A ValueError for the first value that the native class can't express. allowed: key -> what may stand there; a missing key may."""
    for key, values in allowed.items():
        if key in config and config[key] not in values:
            shown = ", ".join(repr(value) for value in values)
            raise ValueError(f"{family}: config.json has {key} {config[key]!r}, which {native} can't express; allowed: {shown}")


TOKENIZERS = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt",
)  # fmt: skip


def require_tokenizer(path_or_id: Any) -> None:
    """A ValueError for a folder here that holds no file of a tokenizer, as a run's student/ is."""
    folder = Path(path_or_id)
    if not folder.is_dir() or any((folder / name).is_file() for name in TOKENIZERS):
        return
    run = folder.absolute().parent
    instead = ""
    if (folder / "request.json").is_file():  # the note of a run's training
        adapter = f", or {run / 'export' / 'adapter'}" if (folder / "adapter_config.json").is_file() else ""
        instead = f"; it is the student of a run, not a folder to use: take {run / 'export'}{adapter}, which the stage export writes"
    raise ValueError(f"{folder} has no tokenizer (tokenizer.json and tokenizer_config.json){instead}")


def stock_tokenizer(path_or_id: Any, **values: Any) -> Any:
    """The tokenizer of a folder or Hub repository in a class of transformers' own; code of the repository is not run.

    A tokenizer whose config names code of its own (auto_map) is read from tokenizer.json, else from vocab.json and merges.txt as the
    byte-pair tokenizer of Qwen2, which is what such repositories derive theirs from.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

    require_tokenizer(path_or_id)
    try:
        return AutoTokenizer.from_pretrained(path_or_id, trust_remote_code=False, **values)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
    for kind in (PreTrainedTokenizerFast, Qwen2Tokenizer):
        try:
            return kind.from_pretrained(path_or_id, **values)
        except (ValueError, OSError, TypeError):  # it has not the files of this kind
            continue
    raise ValueError(f"{path_or_id}: its tokenizer is code of the repository, which is not run, and it has no tokenizer.json or merges.txt")


def token_facts(config: dict[str, Any], family: str, **facts: Any) -> Facts:
    """Facts with the token ids that config.json states. A missing mask token is refused: pad and eos are not stand-ins.

    A pad token that is missing is the first end-of-sequence token: padding is known by place here, never by its id.
    """
    if config.get("mask_token_id") is None:
        raise ValueError(
            f"config.json has no mask_token_id, and neither tokenizer nor generation_config.json names a mask token; a {family} checkpoint "
            "needs one (pad and eos are not stand-ins): state it in config.json"
        )
    eos = need(config, "eos_token_id")
    ends = tuple(eos) if isinstance(eos, list) else (eos,)
    pad = config["pad_token_id"] if config.get("pad_token_id") is not None else ends[0]
    return Facts(mask_token_id=config["mask_token_id"], eos_token_ids=ends, pad_token_id=pad, **facts)


def rope(config: dict[str, Any], **more: Any) -> dict[str, Any]:
    """rope_parameters of a native config."""
    scaling = config.get("rope_scaling")
    if scaling is not None:
        return {**scaling, "rope_type": scaling.get("rope_type", scaling.get("type")), "rope_theta": need(config, "rope_theta"), **more}
    return {"rope_type": "default", "rope_theta": need(config, "rope_theta"), **more}
