"""How probable a text is under a model: exactly for one that writes from left to right, as a bound for a diffusion model.

Knows models and losses; knows no harness. Shapes: B rows, P prompt tokens, N answer tokens, L = P + N, V vocabulary, R random maskings.
"""

import torch
from torch import Tensor

from cdlm import data, losses, masks
from cdlm.families.base import DiffusionLM


def is_causal(model: DiffusionLM) -> bool:
    """Whether the checkpoint predicts one token after another, so that its likelihoods are exact."""
    return model.facts.prompt_attention == "causal" and model.facts.logit_shift and model.facts.block_length in (None, 1)


@torch.no_grad()
def exact(model: DiffusionLM, pairs: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
    """Of each (prompt, answer): log p(answer | prompt) in nats, and whether greedy decoding would write it.

    Both are token ids, the prompt not empty. The rows are one batch, padded on the left.
    """
    assert is_causal(model)
    ids_BL, valid_BL = data.pad_left([prompt + answer for prompt, answer in pairs], model.facts.pad_token_id)
    ids_BL, valid_BL = ids_BL.to(model.device), valid_BL.to(model.device)
    longest = max(len(answer) for _, answer in pairs)
    hidden_BLD = model.sequence_hidden(ids_BL, valid_BL, valid_BL.sum(dim=1), 1)
    logits_BNV = model.head(hidden_BLD[:, ids_BL.shape[1] - longest :]).float()
    found = []
    for (_, answer), logits_NV in zip(pairs, logits_BNV, strict=True):
        logits_NV = logits_NV[longest - len(answer) :]
        token_N = torch.tensor(answer, device=model.device)
        likely = logits_NV.log_softmax(dim=-1).gather(-1, token_N[:, None]).sum()
        found.append((likely.item(), bool((logits_NV.argmax(dim=-1) == token_N).all())))
    return found


def maskings(block_N: Tensor, samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random masks of an answer, [R, N], and the share of its block that each slot's mask has, [R, N].

    block_N: the number of the block that each slot is in. Of a block of b slots a mask takes l, l uniform over 1..b, each choice of
    them equally likely; over the R masks l is spread evenly (LLaDA, arXiv 2502.09992, equation 6, with fewer draws at random).
    """
    masked_RN = torch.zeros(samples, block_N.shape[0], dtype=torch.bool)
    level_RN = torch.zeros(samples, block_N.shape[0])
    for block in block_N.unique().tolist():
        slot = (block_N == block).nonzero()[:, 0]
        size = slot.shape[0]
        even_R = (torch.rand(1, generator=generator) + torch.arange(samples) / samples) % 1
        even_R = even_R[torch.randperm(samples, generator=generator)]  # so that blocks do not all take few, then all take many
        count_R = 1 + (even_R * size).long().clamp(max=size - 1)
        rank_Rb = torch.rand(samples, size, generator=generator).argsort(dim=1).argsort(dim=1)
        masked_RN[:, slot] = rank_Rb < count_R[:, None]
        level_RN[:, slot] = (count_R / size)[:, None].expand(-1, size)
    return masked_RN, level_RN


@torch.no_grad()
def nelbo(
    model: DiffusionLM, prompt: list[int], answer: list[int], *, samples: int, seed: int, block_length: int | None, batch_size: int = 1
) -> float:
    """An upper bound of -log p(answer | prompt) in nats, estimated: the mean over `samples` random masks of sum over masked slots of
    (1 / level) cross-entropy, `losses.masked_diffusion` without its division by the length.

    block_length: None for full attention, one noise level for the answer; a number for block diffusion, one level a block, each block
    behind the clean text before it (BD3-LM, arXiv 2503.09573). The prompt must not be empty.
    """
    device, mask = model.device, model.facts.mask_id
    prompt_length_1, length = torch.tensor([len(prompt)]), len(answer)
    block_N = torch.zeros(length, dtype=torch.long)
    if block_length is not None:
        position_1N = torch.arange(len(prompt), len(prompt) + length)[None]
        block_N = masks.blocks(position_1N, prompt_length_1, block_length, origin=model.facts.block_origin)[0]
    masked_RN, level_RN = maskings(block_N, samples, torch.Generator().manual_seed(seed))
    ids_L, total = torch.tensor(prompt + answer, device=device), 0.0
    for masked_BN, level_BN in zip(masked_RN.split(batch_size), level_RN.split(batch_size), strict=True):
        rows = masked_BN.shape[0]
        masked_BN, ids_BL = masked_BN.to(device), ids_L.expand(rows, -1)
        target_BN, valid_BL = ids_BL[:, len(prompt) :], torch.ones_like(ids_BL, dtype=torch.bool)
        noisy_BN = target_BN.masked_fill(masked_BN, mask)
        if block_length is None:
            logits_BNV = model.sequence_logits(torch.cat([ids_BL[:, : len(prompt)], noisy_BN], dim=1), valid_BL)[:, len(prompt) :]
        else:
            logits_BNV = model.noisy_clean_logits(noisy_BN, ids_BL, valid_BL, prompt_length_1.to(device).expand(rows), block_length)
        once_B = torch.ones(rows, device=device)
        total += rows * losses.masked_diffusion(logits_BNV, target_BN, masked_BN, level_BN.to(device), once_B).item()
    return total / samples
