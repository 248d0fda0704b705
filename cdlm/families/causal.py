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

from cdlm import masks
from cdlm.families.base import DiffusionLM, Facts
from cdlm.families.decoder import listed, stock_tokenizer, token_facts

NAME = "causal"
MASK_TOKEN = "<|mask|>"
TOLERANCE = {True: 1e-3, False: 0.3}  # of a row of logits, in fp32 or not (other rounding may send a token to another expert)
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


@torch.no_grad()
def check(model: DiffusionLM, path_or_id: str | Path) -> None:
    """A ValueError unless positions and a mask say all that the model must know, tried on six tokens before any work.

    The rows of this package's forwards against the model's own plain forward of [text] and of [text but for its last token, mask]: a
    prompt of 4 tokens with padding on its left goes into a cache, then 2 drafts and, behind them in the forward but not in the text, a
    mask that follows the first. What would be wrong without an error: attention by the place of a key in the forward (alibi), positions
    that a model counts for itself, a state beside the keys, a scale or cap behind the head. Not seen on so few tokens: a window.
    """
    if model.device.type == "meta":
        return
    assert model.facts.mask_token_id is not None
    text_BL, valid_BL, there = _probe_text(model), torch.tensor([[False] * 2 + [True] * 4]), slice(2, None)
    mask_B1 = text_BL.new_full((1, 1), model.facts.mask_token_id)
    prompt_BP, draft_BK = torch.cat([text_BL.new_full((1, 2), model.facts.pad_token_id), text_BL[:, :4]], dim=1), text_BL[:, 4:]
    kind = type(model.hf).__name__
    try:
        whole = model.hf(input_ids=torch.cat([text_BL, torch.cat([text_BL[:, :5], mask_B1], dim=1)]), use_cache=False).logits.float()
        cache = model.new_cache(valid_BL.sum(dim=1), 6 + 3)
        prefill = masks.tidar_prefill(valid_BL, 0, masks_last=True)
        read_BLD = model.packed_hidden(prompt_BP, prefill.position_BQ, prefill.sight, prefill.before_BQ, cache)
        cache.commit(prefill.position_BQ, valid_BL, read_BLD[:, -1])
        step = masks.tidar_decoding(cache.valid_BK, 2, 1, 1)
        row_BQD = model.packed_hidden(torch.cat([draft_BK, mask_B1], dim=1), step.position_BQ, step.sight, step.before_BQ, cache)
        found = model.head(torch.cat([read_BLD[:, there], row_BQD], dim=1)).float()[0]
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, NotImplementedError) as error:
        raise ValueError(
            f"{path_or_id}: {kind} does not take the positions, masks and cache of this package "
            f"({type(error).__name__}: {' '.join(str(error).split())}); only attention that follows them can draft or fill blocks"
        ) from None
    wanted = torch.cat([whole[0], whole[1, -1:]])
    apart = float(((found - wanted).norm(dim=-1) / (wanted - wanted.mean(dim=-1, keepdim=True)).norm(dim=-1).clamp(min=1e-9)).max())
    if not apart <= TOLERANCE[model.hf.dtype == torch.float32]:
        raise ValueError(
            f"{path_or_id}: {kind} computes other logits under this package's positions and masks than by itself ({apart:.0%} apart): its "
            "attention does not follow them alone, or it scales or caps its logits; it can't draft or fill blocks"
        )


def _probe_text(model: DiffusionLM) -> torch.Tensor:
    """Six ids that are no mask token, all different where the vocabulary has as many, [1, 6]."""
    ids = [token for token in range(3, model.hf.get_input_embeddings().weight.shape[0]) if token != model.facts.mask_token_id]
    return torch.tensor([[ids[(7 * i + 1) % len(ids)] for i in range(6)]])


def _refuse_windows(config: Any) -> None:
    """A window, or layers that are no attention, would not follow the masks of block diffusion."""
    for name in ("attention_types", "window_size"):  # a window that starts behind what `check` tries
        if (value := getattr(config, name, None)) is not None:
            raise ValueError(f"family {NAME}: this model has {name} {value!r}; only full attention can be block-causal")
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
