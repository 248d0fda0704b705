"""The losses. Tensors in, one differentiable number out; no model, no trainer.

Each mean is taken over a row's own set first and over the rows of the batch next, so the number does not depend on how
rows are grouped into micro-batches. An empty set gives a zero that stays connected to the logits.

Each loss stands here twice: of logits, which is the definition, and `..._from_hidden`, of hidden rows and the head that makes logits of
them. The second gives the same number and gradients, asks the head only about slots that count, and holds the logits of one chunk of
slots at a time, in the backward too, where they are computed again: what it holds does not grow with vocabulary times length.

Shapes: B rows, L tokens, N chosen slots, D width, V vocabulary, K stored tokens of a slot. Sources are given per function; CDLM is
arXiv 2511.19269.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Head = Callable[[Tensor], Tensor]  # hidden rows [..., D] -> logits [..., V]
CHUNK_VALUES = 1 << 23  # logits of a chunk: 32 MiB in fp32, of which a loss holds a few copies


def mean_over_sets(value_N: Tensor, set_BL: Tensor) -> Tensor:
    """Mean over each row's set, then over rows. value_N holds one value for each True of set_BL, in row-major order.

    A row with an empty set counts as zero.
    """
    weight_BL = set_BL / (set_BL.sum(dim=1, keepdim=True).clamp(min=1) * set_BL.shape[0])
    return (value_N * weight_BL[set_BL]).sum()


def forward_kl(target_logits_NV: Tensor, logits_NV: Tensor) -> Tensor:
    """KL(softmax(target) || softmax(logits)) of each row, in nats and fp32, [N]. No gradient reaches the target."""
    target_log_p = F.log_softmax(target_logits_NV.detach().float(), dim=-1)
    log_q = F.log_softmax(logits_NV.float(), dim=-1)
    return F.kl_div(log_q, target_log_p, reduction="none", log_target=True).sum(dim=-1)


def distillation(logits_BLV: Tensor, teacher_logits_BLV: Tensor, newly_revealed_BL: Tensor) -> Tensor:
    """CDLM equation 4: mean over U_y of KL(teacher || student).

    logits_BLV: student at state y. teacher_logits_BLV: lm_head of the hidden row the teacher had when it revealed the slot.
    newly_revealed_BL: U_y, the slots that are masked in y and revealed in y*.
    """
    return mean_over_sets(forward_kl(teacher_logits_BLV[newly_revealed_BL], logits_BLV[newly_revealed_BL]), newly_revealed_BL)


def token_distillation(logits_BLV: Tensor, token_BL: Tensor, newly_revealed_BL: Tensor) -> Tensor:
    """CDLM equation 4 where only the teacher's token is known: mean over U_y of -log student(token), in nats.

    That is the KL divergence from a distribution with all its mass on token_BL, the token that the teacher revealed.
    """
    ce_N = F.cross_entropy(logits_BLV[newly_revealed_BL].float(), token_BL[newly_revealed_BL], reduction="none")
    return mean_over_sets(ce_N, newly_revealed_BL)


def consistency(logits_BLV: Tensor, later_logits_BLV: Tensor, still_masked_BL: Tensor) -> Tensor:
    """CDLM equation 5: mean over S_y of KL(stopgrad(student at y*) || student at y).

    still_masked_BL: S_y, the slots that are masked in both states. The target is the same weights at the better informed
    state, detached.
    """
    return mean_over_sets(forward_kl(later_logits_BLV[still_masked_BL], logits_BLV[still_masked_BL]), still_masked_BL)


def masked_diffusion(logits_BLV: Tensor, target_BL: Tensor, masked_BL: Tensor, level: Tensor, length_B: Tensor) -> Tensor:
    """CDLM equation 6 and LLaDA's SFT loss: mean over rows of (1/L_g) sum over masked i of (1/t) cross-entropy_i.

    level: the noise level t, one a row [B] or one a slot [B, L] (block diffusion: one a block; BD3-LM, arXiv 2503.09573
        with the linear schedule, where the weight is 1/t too). length_B: L_g, how many slots of the row could have been masked.
    The paper's equation 6 is a plain sum, without 1/L_g: its weight w_m is multiplied by L_g here.
    """
    ce_N = F.cross_entropy(logits_BLV[masked_BL].float(), target_BL[masked_BL], reduction="none")
    return _over_levels(ce_N, masked_BL, level, length_B)


def _over_levels(ce_N: Tensor, masked_BL: Tensor, level: Tensor, length_B: Tensor) -> Tensor:
    """Equation 6's sum of the cross-entropies of masked slots, arguments as in `masked_diffusion`."""
    level_BL = (level[:, None] if level.ndim == 1 else level).expand_as(masked_BL)
    weight_BL = 1.0 / (level_BL * length_B[:, None] * masked_BL.shape[0])
    return (ce_N * weight_BL[masked_BL]).sum()


def next_token(logits_BLV: Tensor, target_BL: Tensor, asked_BL: Tensor) -> Tensor:
    """Cross-entropy: mean over a row's asked tokens, then over rows. The logits are aligned: row i predicts token i.

    Autoregressive training, and both halves of TiDAR's."""
    return mean_over_sets(F.cross_entropy(logits_BLV[asked_BL].float(), target_BL[asked_BL], reduction="none"), asked_BL)


def by_chunks(score: Callable[..., Tensor], head: Head, hidden_ND: Tensor, *others: Tensor, vocab: int) -> Tensor:
    """score(head(hidden), *others) of each row, [N], with the logits of at most CHUNK_VALUES / vocab rows held at a time.

    score: logits [C, V] and chunks of the others, tensors of N rows, to [C]. Rows of one chunk alone are scored as they are; of more,
    each chunk is a checkpoint whose logits are computed again in the backward.
    """
    size = max(1, CHUNK_VALUES // vocab)
    if hidden_ND.shape[0] <= size:
        return score(head(hidden_ND), *others)

    def part(hidden_CD: Tensor, *chunk: Tensor) -> Tensor:
        return score(head(hidden_CD), *chunk)

    chunks = zip(hidden_ND.split(size), *(other.split(size) for other in others), strict=True)
    return torch.cat([checkpoint(part, *chunk, use_reentrant=False) for chunk in chunks])


def forward_kl_from_hidden(target_ND: Tensor, target_head: Head, hidden_ND: Tensor, head: Head, vocab: int) -> Tensor:
    """`forward_kl` of the logits that two heads make of hidden rows, [N]. No gradient reaches the target or its head."""

    def score(logits_CV: Tensor, target_CD: Tensor) -> Tensor:
        with torch.no_grad():
            target_CV = target_head(target_CD)
        return forward_kl(target_CV, logits_CV)

    return by_chunks(score, head, hidden_ND, target_ND.detach(), vocab=vocab)


def cross_entropy_from_hidden(hidden_ND: Tensor, head: Head, token_N: Tensor, vocab: int) -> Tensor:
    """-log softmax(head(hidden))[token] of each row, in nats and fp32, [N]."""

    def score(logits_CV: Tensor, token_C: Tensor) -> Tensor:
        return F.cross_entropy(logits_CV.float(), token_C, reduction="none")

    return by_chunks(score, head, hidden_ND, token_N, vocab=vocab)


def distillation_from_hidden(
    hidden_BLD: Tensor, head: Head, teacher_BLD: Tensor, teacher_head: Head, newly_revealed_BL: Tensor, vocab: int
) -> Tensor:
    """`distillation` (CDLM equation 4) of the student's and the teacher's hidden rows."""
    kl_N = forward_kl_from_hidden(teacher_BLD[newly_revealed_BL], teacher_head, hidden_BLD[newly_revealed_BL], head, vocab)
    return mean_over_sets(kl_N, newly_revealed_BL)


def token_distillation_from_hidden(hidden_BLD: Tensor, head: Head, token_BL: Tensor, newly_revealed_BL: Tensor, vocab: int) -> Tensor:
    """`token_distillation` of the student's hidden rows."""
    return next_token_from_hidden(hidden_BLD, head, token_BL, newly_revealed_BL, vocab)


def consistency_from_hidden(
    hidden_BLD: Tensor, head: Head, later_BLD: Tensor, later_head: Head, still_masked_BL: Tensor, vocab: int
) -> Tensor:
    """`consistency` (CDLM equation 5) of the student's hidden rows at y and y*. later_head: the same head, without dropout."""
    kl_N = forward_kl_from_hidden(later_BLD[still_masked_BL], later_head, hidden_BLD[still_masked_BL], head, vocab)
    return mean_over_sets(kl_N, still_masked_BL)


def masked_diffusion_from_hidden(
    hidden_BLD: Tensor, head: Head, target_BL: Tensor, masked_BL: Tensor, level: Tensor, length_B: Tensor, vocab: int
) -> Tensor:
    """`masked_diffusion` (CDLM equation 6) of hidden rows."""
    ce_N = cross_entropy_from_hidden(hidden_BLD[masked_BL], head, target_BL[masked_BL], vocab)
    return _over_levels(ce_N, masked_BL, level, length_B)


def next_token_from_hidden(hidden_BLD: Tensor, head: Head, target_BL: Tensor, asked_BL: Tensor, vocab: int) -> Tensor:
    """`next_token` of hidden rows."""
    return mean_over_sets(cross_entropy_from_hidden(hidden_BLD[asked_BL], head, target_BL[asked_BL], vocab), asked_BL)


def top_k_kl(target_NK: Tensor, ids_NK: Tensor, total_N: Tensor, logits_NV: Tensor) -> Tensor:
    """KL(target || softmax(logits)) of each row over K named tokens and "any other", in nats and fp32, [N].

    target_NK: the target's logits of the tokens ids_NK. total_N: logsumexp of all its logits, so a named token has the probability that
    it has among all. Lumping the others together can only bring the divergence down (log-sum inequality); with K = V it is `forward_kl`.
    """
    log_q_NK = F.log_softmax(logits_NV.float(), dim=-1).gather(-1, ids_NK)
    log_p_NK = target_NK.detach().float() - total_N.detach().float()[:, None]
    named_N = (log_p_NK.exp() * (log_p_NK - log_q_NK)).sum(dim=-1)
    if ids_NK.shape[-1] == logits_NV.shape[-1]:
        return named_N
    # Sums of probabilities leave about 1e-7 of rounding; a probability below that is none.
    other_p_N, other_q_N = ((1.0 - log_NK.exp().sum(dim=-1)).clamp(min=1e-7) for log_NK in (log_p_NK, log_q_NK))
    return named_N + other_p_N * (other_p_N.log() - other_q_N.log())


def top_k_distillation_from_hidden(
    hidden_BLD: Tensor, head: Head, target_BLK: Tensor, ids_BLK: Tensor, total_BL: Tensor, accepted_BL: Tensor, vocab: int
) -> Tensor:
    """CDLM equation 4 where the K largest of the teacher's logits are stored: mean over U_y of KL(teacher || student), see `top_k_kl`.

    hidden_BLD: the student's rows at state y. target_BLK, ids_BLK, total_BL: the teacher's logits, not divided by a temperature, in the
    step that led to y*. accepted_BL: U_y, the slots that are open in y and accepted in y*.
    """

    def score(logits_CV: Tensor, target_CK: Tensor, ids_CK: Tensor, total_C: Tensor) -> Tensor:
        return top_k_kl(target_CK, ids_CK, total_C, logits_CV)

    chosen = (rows[accepted_BL] for rows in (hidden_BLD, target_BLK, ids_BLK, total_BL))
    return mean_over_sets(by_chunks(score, head, *chosen, vocab=vocab), accepted_BL)


def tidar_weights(alpha: float) -> dict[str, float]:
    """TiDAR's loss is the sum of both means with these weights: (alpha AR + diffusion) / (1 + alpha). (arXiv 2511.08923, equation 2.)"""
    return {"ar": alpha / (1 + alpha), "diffusion": 1 / (1 + alpha)}


def finite(loss: Tensor, name: str) -> Tensor:
    """The loss, or a FloatingPointError that names it."""
    if not torch.isfinite(loss):
        raise FloatingPointError(f"the {name} loss is {loss.item()}; lower the learning rate or look at the data of this step")
    return loss
