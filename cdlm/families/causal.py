"""Family "causal": any causal language model of stock transformers, taken as a block diffusion LM that is yet to be trained.

With blocks of one token it is what it was, next-token prediction; training (objective bd3lm) makes the blocks longer. Nothing in a
config.json says that a model is meant so, therefore this family is never recognised: name it.

What a causal LM lacks is a mask token. It is taken from config.json (mask_token_id) or from the tokenizer; where neither has one,
`<|mask|>` is added as the tokenizer's next token, with a row of the embeddings (and of an untied head) that starts as the mean of the
rows of all other tokens. The pad and end tokens are never used for it.
"""

from pathlib import Path
from typing import Any

import torch

from cdlm.families.base import Facts
from cdlm.families.decoder import listed, stock_tokenizer, token_facts

NAME = "causal"
MASK_TOKEN = "<|mask|>"
ORIGINS = dict.fromkeys(("mask_token_id", "eos_token_ids", "pad_token_id"), "the tokenizer or generation_config.json")


def matches(config: dict[str, Any]) -> bool:
    """Never: a causal LM is a diffusion LM only where the user says so."""
    return False


def is_stock(config: dict[str, Any]) -> bool:
    """Whether transformers has a causal LM of this model_type of its own."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return str(config.get("model_type")) in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def facts(config: dict[str, Any]) -> Facts:
    """The facts, where config.json states all tokens; `facts_of` also asks the tokenizer and generation_config.json."""
    return token_facts(config, NAME, logit_shift=True, prompt_attention="causal")


def facts_of(path_or_id: str | Path, config: dict[str, Any]) -> Facts:
    """The facts of a folder or Hub repository.

    A config.json that stands alone (a path to the file) is all there is.
    mask: config.json's, else the tokenizer's, else the id that `<|mask|>` gets. End tokens: the tokenizer's first (training ends answers
    with it), then those of generation_config.json and config.json. pad: the tokenizer's, else config.json's, else the first end token.
    """
    if Path(path_or_id).is_file():  # a config.json that stands alone is all there is
        return facts(config)
    tokenizer, generation = stock_tokenizer(path_or_id), _generation_config(path_or_id)
    ends = [tokenizer.eos_token_id, *listed(generation.get("eos_token_id")), *listed(config.get("eos_token_id"))]
    ends = list(dict.fromkeys(end for end in ends if end is not None))
    if not ends:
        raise ValueError(f"neither the tokenizer nor config.json nor generation_config.json of {path_or_id} has an end-of-sequence token")
    pads = (tokenizer.pad_token_id, config.get("pad_token_id"), generation.get("pad_token_id"))
    mask = config.get("mask_token_id")
    return facts({
        **config, "mask_token_id": add_mask(tokenizer) if mask is None else mask, "eos_token_id": ends,
        "pad_token_id": next((pad for pad in pads if pad is not None and pad >= 0), ends[0]),
    })  # fmt: skip


def add_mask(tokenizer: Any) -> int:
    """The id of the tokenizer's mask token; where it has none it gets `<|mask|>` (in place)."""
    if tokenizer.mask_token_id is None:
        taken = {number: token for token, number in tokenizer.get_vocab().items()}
        tokenizer.add_special_tokens({"mask_token": MASK_TOKEN})
        if taken.get(tokenizer.mask_token_id, MASK_TOKEN) != MASK_TOKEN:
            raise ValueError(
                f"the tokenizer's ids have holes: the next one, {tokenizer.mask_token_id}, is that of {taken[tokenizer.mask_token_id]!r}; "
                "add a mask token to it by hand and state mask_token_id in config.json"
            )
    return tokenizer.mask_token_id


def prepare(hf: Any, facts: Facts, path_or_id: str | Path) -> None:
    """Give a loaded model a row for the mask token (in place), where the tokenizer as it is stored has no such token.

    The row is the mean of the rows of all tokens that the tokenizer has, in the embeddings and in the head with its bias, also where a
    spare row is there already. Raises ValueError for a model that does not look at the whole past.
    """
    _refuse_windows(hf.config)
    add_row(hf, facts, path_or_id)


def add_row(hf: Any, facts: Facts, path_or_id: str | Path) -> None:
    """The part of `prepare` that has to do with the mask token alone."""
    vocabulary = sorted(stock_tokenizer(path_or_id).get_vocab().values())
    rows = hf.get_input_embeddings().weight.shape[0]
    if vocabulary[-1] >= rows:
        raise ValueError(f"the tokenizer of {path_or_id} has a token of id {vocabulary[-1]}; the model's embeddings have {rows} rows")
    mask = facts.mask_id
    if mask >= rows:
        hf.resize_token_embeddings(mask + 1, mean_resizing=False)
    if mask in vocabulary:
        return
    embedding, head = hf.get_input_embeddings(), hf.get_output_embeddings()
    tables = {id(table): table for table in (embedding.weight, head.weight, getattr(head, "bias", None)) if table is not None}
    with torch.no_grad():
        for table in tables.values():
            new = table[vocabulary].float().mean(dim=0).to(table.dtype)
            table[rows:], table[mask] = new, new


def _refuse_windows(config: Any) -> None:
    """A window, or layers that are no attention, would not follow the masks of block diffusion."""
    window, room = getattr(config, "sliding_window", None), getattr(config, "max_position_embeddings", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - {"full_attention", "sliding_attention"}:
        raise ValueError(f"family {NAME}: this model has layers of kind {', '.join(sorted(kinds))}; only attention can be block-causal")
    if window is not None and (not kinds or "sliding_attention" in kinds) and (room is None or window < room):
        raise ValueError(f"family {NAME}: this model's attention has a window of {window}; only full attention can be block-causal")


def _generation_config(path_or_id: str | Path) -> dict[str, Any]:
    """generation_config.json as a dictionary, empty where there is none."""
    from transformers import GenerationConfig

    if Path(path_or_id).is_dir() and not (Path(path_or_id) / "generation_config.json").is_file():
        return {}
    try:
        return GenerationConfig.from_pretrained(path_or_id).to_dict()
    except OSError:  # a Hub repository without the file
        return {}
