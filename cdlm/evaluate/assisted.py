"""transformers' own generation as a method: greedy, with prompt lookup, with a smaller model that drafts, or of a diffusion model.

These are the decodings that a user of such a model has at hand. Knows `generate`; knows no report and no clock.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cdlm import attention
from cdlm.decode import DecodeConfig, Decoded
from cdlm.families.base import DiffusionLM
from cdlm.speculate import Speculated, Verified


@dataclass(frozen=True)
class GenerateConfig:
    """Greedy `generate`, plain, or with drafts of at most `prompt_lookup` tokens that followed the last ones earlier in the text, or with
    an assistant (a stock model of the same tokenizer) that drafts as transformers has it by default. Not both."""

    max_new_tokens: int
    prompt_lookup: int | None = None
    assistant: nn.Module | None = None
    stop_at_eos: bool = True

    def __post_init__(self) -> None:
        if self.prompt_lookup is not None and self.assistant is not None:
            raise ValueError("prompt_lookup and assistant are both given; a draft comes from one of them")


@contextmanager
def _counted(hf: nn.Module, seen: Callable[[int], None]) -> Iterator[None]:
    """Tells the query tokens of each forward of a model, when it is done."""

    def note(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        seen((kwargs["input_ids"] if "input_ids" in kwargs else args[0]).shape[1])

    handle = hf.register_forward_hook(note, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _without_advice() -> Iterator[None]:
    """transformers warns at every call with an assistant of how it passes its own arguments on."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


@contextmanager
def _stock_attention(hf: Any) -> Iterator[None]:
    """A user of transformers alone has its attention, not this package's."""
    own = hf.config._attn_implementation
    if not own.startswith(attention.PREFIX):
        yield
        return
    hf.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        hf.set_attn_implementation(own)


@torch.no_grad()
def generate(
    model: DiffusionLM, prompt_BP: Tensor, valid_BP: Tensor, config: GenerateConfig, callback: Callable[[Verified], None] | None = None
) -> Speculated:
    """Greedy answers: a batch at once, or row by row where there are drafts (those of several rows are beyond `generate`).

    Forwards are those of the model itself, not of an assistant; of a batch, those that a row needed, one a token. Without drafts each
    of them is a step, that of the prompt too, which takes the first one, as in `cdlm.decode`; with drafts steps are those that verify.
    callback: called once a row or batch, after the forward of its prompt.
    """
    facts = model.facts
    ids_BN = prompt_BP.new_full((len(prompt_BP), config.max_new_tokens), facts.pad_token_id)
    drafting: dict[str, Any] = {}
    if config.prompt_lookup is not None:
        drafting = {"prompt_lookup_num_tokens": config.prompt_lookup}
    elif config.assistant is not None:
        drafting = {"assistant_model": config.assistant}
    together = [list(range(len(prompt_BP)))] if not drafting else [[row] for row in range(len(prompt_BP))]
    forwards, queries, tokens, stop = [], [], [], []
    for rows in together:
        wide = valid_BP[rows].any(dim=0)
        ids_AP, valid_AP, seen = prompt_BP[rows][:, wide], valid_BP[rows][:, wide], list[int]()

        def note(count: int, rows: list[int] = rows, seen: list[int] = seen) -> None:
            seen.append(count)
            if callback is not None and len(seen) == 1:
                callback(Verified(0, torch.tensor(rows), ids_BN[rows, :0], torch.zeros(len(rows), dtype=torch.long)))

        with _counted(model.hf, note), _without_advice(), _stock_attention(model.hf):
            out_AN = model.hf.generate(
                input_ids=ids_AP, attention_mask=valid_AP.long(), max_new_tokens=config.max_new_tokens, do_sample=False,
                suppress_tokens=[facts.mask_id], eos_token_id=list(facts.eos_token_ids), pad_token_id=facts.pad_token_id, **drafting,
            )[:, ids_AP.shape[1] :]
        for row, found in zip(rows, out_AN.tolist(), strict=True):
            end = next((i for i, token in enumerate(found) if token in facts.eos_token_ids), None)
            tokens.append(len(found) if end is None else end + 1)
            stop.append("length" if end is None else "eos")
            ids_BN[row, : tokens[-1]] = out_AN[row - rows[0], : tokens[-1]]
            forwards.append(len(seen) if len(rows) == 1 else tokens[-1])
            queries.append(sum(seen[1:]) if len(rows) == 1 else tokens[-1] - 1)
    steps = [count - 1 for count in forwards] if drafting else list(forwards)
    return Speculated(ids_BN, steps, [1] * len(tokens), forwards, queries, tokens, [], stop)


@dataclass(frozen=True)
class DiffusionGenerateConfig:
    """The `generate` that transformers has for a diffusion model, with the values of `sampler`."""

    sampler: DecodeConfig

    @property
    def max_new_tokens(self) -> int:
        return self.sampler.max_new_tokens

    @property
    def stop_at_eos(self) -> bool:
        return self.sampler.stop_at_eos

    @property
    def draws(self) -> bool:
        return self.sampler.draws


@torch.no_grad()
def diffusion_generate(
    model: DiffusionLM, prompt_BP: Tensor, valid_BP: Tensor, config: DiffusionGenerateConfig, seed: int,
    callback: Callable[[Verified], None] | None = None,
) -> Decoded:
    """Answers of a batch, whose rows draw together from torch's generator at `seed` (it is put back as it was). Commits are a forward
    each, as many as a row had blocks. callback: called after each block."""

    def after_block(number: int) -> None:
        if callback is not None:
            rows = torch.arange(len(prompt_BP))
            callback(Verified(number, rows, prompt_BP[:, :0], torch.zeros_like(rows)))

    values = {name: getattr(config.sampler, name) for name in model.own_decoding}
    devices = [prompt_BP.device] if prompt_BP.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        found_BN, steps = model.own_generate(
            prompt_BP, valid_BP, config.max_new_tokens, values, stop_at_eos=config.stop_at_eos, after_block=after_block
        )
    ids_BN = prompt_BP.new_full((len(prompt_BP), config.max_new_tokens), model.facts.pad_token_id)
    ids_BN[:, : found_BN.shape[1]] = found_BN
    ends_BN = torch.isin(ids_BN, torch.tensor(model.facts.eos_token_ids, device=ids_BN.device))
    tokens, stop = [], []
    for row, ends in enumerate(ends_BN.tolist()):
        tokens.append(ends.index(True) + 1 if True in ends else config.max_new_tokens)
        stop.append("eos" if True in ends else "length")
        ids_BN[row, tokens[-1] :] = model.facts.pad_token_id
    block = config.sampler.block_length
    blocks = [-(-(count if config.stop_at_eos else config.max_new_tokens) // block) for count in tokens]
    forwards = [s + c for s, c in zip(steps, blocks, strict=True)]
    return Decoded(ids_BN, ids_BN, steps, blocks, forwards, tokens, [count * block for count in blocks], stop)
