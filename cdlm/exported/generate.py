"""Block diffusion decoding with an exact block cache, for `model.generate(..., custom_generate=FOLDER, trust_remote_code=True)`.

Needs only torch and transformers. The answer is filled block by block: every step is one forward over the block against the
cached keys and values of all that precedes it, and reveals each slot whose confidence is above the threshold (at least the best
one). The first step in a block also carries the tokens that precede it, the prompt or the finished block, under the block-causal
mask, and their keys and values stay in the cache. (CDLM, arXiv 2511.19269.)
"""

import torch
from transformers import DynamicCache, GenerationConfig

# Arguments that transformers' generate hands on, or a tokenizer adds, and that change nothing here.
PASSED = (
    "use_cache", "synced_gpus", "token_type_ids", "negative_prompt_ids", "negative_prompt_attention_mask", "pad_token_id", "tokenizer",
    "return_dict_in_generate", "eos_token_id", "streamer", "assistant_model", "prefix_allowed_tokens_fn", "stopping_criteria",
    "logits_processor", "cache", "cache_implementation",
)


def generate(
    model,
    inputs=None,
    input_ids=None,
    attention_mask=None,
    generation_config=None,
    max_new_tokens=None,
    block_length=None,
    confidence_threshold=None,
    **kwargs,
):
    """Greedy answers, [rows, prompt + new tokens]; prompts are padded on the left, tokens behind an end token are padding.

    max_new_tokens, block_length, confidence_threshold: default to generation_config.json and config.json.
    """
    config = model.config
    from_zero, shifted, prompt_attention = config.block_origin == "zero", config.logit_shift, config.prompt_attention
    if from_zero and prompt_attention == "bidirectional":
        raise ValueError("blocks from position 0 under a bidirectional prompt have no exact cache, and this file decodes with one")
    implementation = model.config._attn_implementation
    if implementation not in ("sdpa", "eager"):
        raise ValueError(f"attn_implementation is {implementation!r}; this file needs one that takes any mask: sdpa or eager")
    defaults = generation_config or model.generation_config
    unknown = [k for k, v in kwargs.items() if v is not None and k not in PASSED and not hasattr(defaults, k)]
    if unknown:
        raise ValueError(f"unknown argument {unknown[0]}; known: max_new_tokens, block_length, confidence_threshold")
    neutral = {
        "do_sample": (False,), "num_beams": (1,), "num_return_sequences": (1,), "repetition_penalty": (1.0,), "max_length": (),
        "temperature": (1.0,), "top_p": (1.0,), "top_k": (), "min_new_tokens": (0,), "stopping_criteria": (), "logits_processor": (),
        "streamer": (), "assistant_model": (), "prefix_allowed_tokens_fn": (),
    }
    asked = [k for k, same in neutral.items() if kwargs.get(k) is not None and kwargs[k] not in same]
    asked += [k for k in ("eos_token_id", "return_dict_in_generate") if kwargs.get(k)]
    usual = vars(GenerationConfig())
    asked += [k for k, v in kwargs.items() if k in usual and k not in (*neutral, *PASSED) and v is not None and v != usual[k]]
    asked += [k for k, same in neutral.items() if same and getattr(defaults, k, None) not in (None, *same)]
    if asked:
        raise ValueError(f"decoding is greedy, block by block; not supported: {', '.join(asked)}")
    budget = next((n for n in (max_new_tokens, defaults.max_new_tokens, model.generation_config.max_new_tokens) if n is not None), 0)
    block = config.block_length if block_length is None else block_length
    threshold = config.confidence_threshold if confidence_threshold is None else confidence_threshold
    if budget < 1 or block < 1 or not 0 <= threshold <= 1:
        raise ValueError(f"max_new_tokens {budget} and block_length {block} must be 1 or more, confidence_threshold {threshold} in 0..1")
    prompt = input_ids if input_ids is not None else inputs
    if prompt is None:
        raise ValueError("no prompt: give input_ids, [rows, tokens]")
    if prompt.shape[1] == 0:
        raise ValueError("the prompt is empty; it must hold at least one token")
    valid = torch.ones_like(prompt, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    rows, mask_id, pad_id = prompt.shape[0], config.mask_token_id, config.pad_token_id
    eos = torch.tensor(config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id], device=prompt.device)

    # The prompt is cut where the first block begins: what is left of it stands at the head of that block, and is never written.
    length = valid.sum(1)
    tail = length % block if from_zero else torch.zeros_like(length)
    end_of_row = (tail + budget + block - 1) // block * block if from_zero else torch.full_like(length, budget)
    width = int(end_of_row.max())
    keep = int((length - tail).max())
    canvas = torch.full((rows, width), mask_id, device=prompt.device)
    pending, pending_valid = prompt.new_full((rows, keep), pad_id), valid.new_zeros(rows, keep)  # go into the cache with the next forward
    for row in range(rows):
        tokens, head = prompt[row, valid[row]], int(length[row] - tail[row])
        pending[row, keep - head :], pending_valid[row, keep - head :] = tokens[:head], True
        canvas[row, : len(tokens) - head] = tokens[head:]

    def horizon(position):
        """Last position that a token may look at."""
        start = torch.zeros_like(length) if from_zero else length
        block_end = start[:, None] + ((position - start[:, None]) // block + 1) * block - 1
        if prompt_attention == "causal":
            in_prompt = position
        elif prompt_attention == "bidirectional":
            in_prompt = (length[:, None] - 1).expand_as(position)
        else:
            in_prompt = block_end if from_zero else torch.minimum((position // block + 1) * block - 1, length[:, None] - 1)
        return torch.where(position < length[:, None], in_prompt, block_end)

    cache = DynamicCache(config=config)
    key_valid, key_position = valid[:, :0], length[:, None][:, :0]
    before = None  # logits of the last token before the block, which predict its first slot in a model with shifted logits
    stopped = torch.zeros(rows, dtype=torch.bool, device=prompt.device)
    for first in range(0, width, block):
        end = min(first + block, width)
        slots = canvas[:, first:end].clone()
        in_answer = torch.arange(first, end, device=prompt.device) >= tail[:, None]
        is_open = in_answer & ~stopped[:, None]
        while bool(is_open.any()):
            ids = torch.cat([pending, slots], dim=1)
            fresh = torch.cat([pending_valid, torch.ones_like(slots, dtype=torch.bool)], dim=1)
            position = key_valid.sum(1, keepdim=True) + (fresh.cumsum(1) - 1).clamp(min=0)
            count, seen = pending.shape[1], torch.cat([key_position, position], dim=1)
            allow = torch.cat([key_valid, fresh], dim=1)[:, None, :] & (seen[:, None, :] <= horizon(position)[:, :, None])
            allow = allow | ~allow.any(-1, keepdim=True)
            mask = allow[:, None]
            if implementation == "eager":  # adds the mask to its scores
                mask = torch.zeros(mask.shape, dtype=model.dtype, device=mask.device).masked_fill(~mask, torch.finfo(model.dtype).min)
            logits = model(input_ids=ids, attention_mask=mask, position_ids=position, cache=cache, use_cache=True,
                           logits_to_keep=slots.shape[1] + (count > 0)).logits.float()
            # Keep the pending tokens' keys and values, drop the block's.
            cache.crop(-slots.shape[1])
            if count > 0:
                key_valid = torch.cat([key_valid, pending_valid], dim=1)
                key_position = torch.cat([key_position, position[:, :count]], dim=1)
                before, logits = logits[:, :1], logits[:, 1:]
                pending, pending_valid = pending[:, :0], pending_valid[:, :0]
            if shifted:
                logits = torch.cat([torch.zeros_like(logits[:, :1]) if before is None else before, logits[:, :-1]], dim=1)

            probability = logits.softmax(-1)
            token = logits.index_fill(-1, torch.tensor([mask_id], device=logits.device), -torch.inf).argmax(-1)
            confidence = probability.gather(-1, token[..., None])[..., 0]
            if not bool(confidence.isfinite().all()):
                raise FloatingPointError(f"a logit is not finite in the block that starts at slot {first}")
            best = confidence.masked_fill(~is_open, -1).argmax(1, keepdim=True)
            reveal = ((confidence > threshold) | torch.zeros_like(is_open).scatter(1, best, True)) & is_open
            slots = torch.where(reveal, token, slots)
            is_open = is_open & ~reveal
        canvas[:, first:end] = slots
        pending, pending_valid = slots, torch.ones_like(slots, dtype=torch.bool)
        stopped = stopped | (torch.isin(slots, eos) & in_answer).any(1) | (end_of_row <= end)
        if bool(stopped.all()):
            break
    answer = torch.stack([canvas[row, int(tail[row]) : int(tail[row]) + budget] for row in range(rows)])
    is_end = torch.isin(answer, eos)
    behind = (is_end.cumsum(1) - is_end.long()) > 0
    answer = answer.masked_fill(behind, pad_id)
    return torch.cat([prompt, answer], dim=1)
