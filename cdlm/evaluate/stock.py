"""transformers' own `generate` as a method beside this package's decoders: cached greedy decoding of a causal LM, and its assisted
generation. Knows transformers' generation; knows no question and no clock.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from cdlm.decode import Callback, DecodeConfig, Decoded
from cdlm.families.base import DiffusionLM


@contextmanager
def _counted(hf: Any) -> Iterator[list[int]]:
    """The widths (query tokens a row) of the forwards that a model takes meanwhile."""
    widths: list[int] = []

    def note(module, args, kwargs) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        widths.append(int(ids.shape[1]))

    hook = hf.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield widths
    finally:
        hook.remove()


@torch.no_grad()
def generate(
    model: DiffusionLM, prompt_BP: Tensor, valid_BP: Tensor, config: DecodeConfig, *, callback: Callback | None = None, **flags: Any
) -> Decoded:
    """Greedy answers of at most config.max_new_tokens by the stock model's own `generate`, with its own cache.

    callback: not called; there are no blocks. flags: more arguments of `generate`, such as prompt_lookup_num_tokens or assistant_model;
        with those one row at a time.
    A step is a forward of the model. Of a batch's row those are counted that were taken until the row had ended, one a token.
    """
    facts, (batch, prompt) = model.facts, prompt_BP.shape
    if flags and batch > 1:
        raise ValueError(f"assisted generation decodes one row at a time; this batch has {batch}")
    with _counted(model.hf) as widths:
        ids = model.hf.generate(
            prompt_BP, attention_mask=valid_BP.long(), max_new_tokens=config.max_new_tokens, do_sample=False,
            eos_token_id=list(facts.eos_token_ids), pad_token_id=facts.pad_token_id, use_cache=True, **flags,
        )[:, prompt:]  # fmt: skip
    ids_BN = torch.full((batch, config.max_new_tokens), facts.pad_token_id, dtype=ids.dtype, device=ids.device)
    lengths, stop = [], []
    for row, tokens in enumerate(ids.tolist()):
        ends = [i for i, token in enumerate(tokens) if token in facts.eos_token_ids]
        lengths.append(min(ends[0] + 1 if ends else len(tokens), config.max_new_tokens))
        stop.append("eos" if ends else "length")
        ids_BN[row, : lengths[row]] = ids[row, : lengths[row]]
    steps = [len(widths)] if batch == 1 else list(lengths)
    return Decoded(
        ids_BN=ids_BN, filled_BM=ids_BN.clone(), steps=steps, commit_forwards=[0] * batch, forwards=list(steps), output_tokens=lengths,
        decoded_tokens=list(lengths), stop=stop,
    )
