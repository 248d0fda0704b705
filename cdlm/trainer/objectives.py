"""The objectives: of a batch, the losses of one forward and backward by name. The losses themselves stand in `losses.py`.

Shapes: B rows, P prompt tokens, N slots, S slots of a canvas, L = P + N, D width, V vocabulary.
"""

import contextlib
from typing import Protocol

import torch
from torch import Tensor, nn

from cdlm import losses, masks, noise
from cdlm.families.base import DiffusionLM, Seen
from cdlm.trainer.config import CDLMConfig


class Training(Protocol):
    """What an objective asks of the trainer. head: what makes logits of hidden rows; teacher_head: the teacher's, None where no loss needs
    it."""

    diffusion: DiffusionLM
    args: CDLMConfig
    teacher_head: nn.Module | None

    @property
    def head(self) -> losses.Head: ...

    def noise_cap(self) -> float:
        """The largest noise level now."""


def whole(batch: dict[str, Tensor], slots_BN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Prompt and slots as one sequence: ids [B, L], valid [B, L], prompt lengths [B]."""
    ids_BL = torch.cat([batch["prompt"], slots_BN], dim=1)
    valid_BL = torch.cat([batch["prompt_valid"], torch.ones_like(slots_BN, dtype=torch.bool)], dim=1)
    return ids_BL, valid_BL, batch["prompt_valid"].sum(dim=1)


def _noisy_answer(trainer: Training, batch: dict[str, Tensor], block_length: int | None) -> Tensor:
    """Equation 6 on the reference answers, under the block-causal mask or (None) under full attention."""
    model, args = trainer.diffusion, trainer.args
    level_B = noise.noise_level(batch["level"], trainer.noise_cap(), args.noise_floor)
    everywhere = torch.ones_like(batch["answer"], dtype=torch.bool)
    noisy_BN, masked_BN = noise.mask_tokens(batch["answer"], level_B, everywhere, model.facts.mask_id, batch["uniform"])
    prompt = batch["prompt"].shape[1]
    row_BND = model.sequence_hidden(*whole(batch, noisy_BN), block_length)[:, prompt:]
    length_B = torch.full_like(level_B, batch["answer"].shape[1])
    return losses.masked_diffusion_from_hidden(row_BND, trainer.head, batch["answer"], masked_BN, level_B, length_B, model.vocab)


def mdlm_losses(trainer: Training, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """LLaDA's SFT loss under full attention."""
    return {"mdlm": _noisy_answer(trainer, batch, None)}


def ar_losses(trainer: Training, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Next-token cross-entropy on answers and their end tokens, under causal attention (blocks of one token)."""
    prompt, slots = batch["prompt"].shape[1], batch["answer"].shape[1]
    model = trainer.diffusion
    row_BND = model.sequence_hidden(*whole(batch, batch["answer"]), 1)[:, prompt:]
    asked_BN = torch.arange(slots, device=row_BND.device) < batch["length"][:, None]
    return {"ar": losses.next_token_from_hidden(row_BND, trainer.head, batch["answer"], asked_BN, model.vocab)}


def bd3lm_losses(trainer: Training, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Block diffusion: noisy blocks behind the clean text before them, a noise level t for each block of a row.

    Each masked slot weighs 1/t of its block, and a row's sum is divided by its slots: those up to the end of the block that holds its
    end token, which is where decoding stops. (BD3-LM, arXiv 2503.09573, L_BD with the weight 1/t.)

    With `complementary` each row is trained twice, with its mask and with the complement of it, so that every slot is a target exactly
    once (Fast-dLLM v2, arXiv 2509.26328, section 3). Then every slot weighs 1: the weight 1/t makes up for slots that are seldom a
    target, and here none is; 1/t and 1/(1 - t) side by side would let the few slots of nearly clean views outweigh all others.
    """
    model, args = trainer.diffusion, trainer.args
    slots = batch["answer"].shape[1]
    ids_BL, valid_BL, prompt_B = whole(batch, batch["answer"])
    position_BN = prompt_B[:, None] + torch.arange(slots, device=prompt_B.device)
    block_BN = masks.blocks(position_BN, prompt_B, args.block_length, origin=model.facts.block_origin)
    block_BN = block_BN - block_BN[:, :1]
    last_B1 = block_BN.gather(1, batch["length"][:, None] - 1)
    asked_BN = block_BN <= last_B1
    level_BN = noise.noise_level(batch["levels"], trainer.noise_cap(), args.noise_floor).gather(1, block_BN)
    noisy_BN, masked_BN = noise.mask_tokens(batch["answer"], level_BN, asked_BN, model.facts.mask_id, batch["uniform"])
    length_B = asked_BN.sum(dim=1)
    views = [(noisy_BN, masked_BN)]
    if args.complementary:
        other_BN = asked_BN & ~masked_BN
        views.append((torch.where(other_BN, model.facts.mask_id, batch["answer"]), other_BN))
        level_BN = torch.ones_like(level_BN)
    found = [
        losses.masked_diffusion_from_hidden(
            model.noisy_clean_hidden(seen_BN, ids_BL, valid_BL, prompt_B, args.block_length), trainer.head, batch["answer"], target_BN,
            level_BN, length_B, model.vocab,
        )
        for seen_BN, target_BN in views
    ]
    return {"bd3lm": torch.stack(found).sum()}


def tidar_losses(trainer: Training, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """TiDAR: next-token and one-step diffusion cross-entropy in one forward of [clean | all masks]. (arXiv 2511.08923, section 3.1.)

    The clean half is plain causal text, and its row before a token predicts it. Every token of the second half is a mask, which sees its
    own block of masks and the clean text before that block, and predicts the token of its own position. Blocks start at multiples of
    block_length from position 0. The tokens that count are the same for both losses: those of the answer and its end token; the paper
    trains on documents, where all but the first count. Of the second half only the blocks that hold answer tokens are computed.
    """
    model, args = trainer.diffusion, trainer.args
    ids_BL, valid_BL, _ = whole(batch, batch["answer"])
    prompt, (_, length) = batch["prompt"].shape[1], ids_BL.shape
    skip = max(0, prompt - args.block_length + 1)
    layout = masks.tidar_training(valid_BL, args.block_length, skip)
    masked_BM = torch.full_like(ids_BL[:, skip:], model.facts.mask_id)
    row_BQD = model.packed_hidden(torch.cat([ids_BL, masked_BM], dim=1), layout.position_BQ, layout.sight, layout.before_BQ)
    asked_BN = torch.arange(length - prompt, device=ids_BL.device) < batch["length"][:, None]
    halves = {"ar": row_BQD[:, prompt - 1 : length - 1], "diffusion": row_BQD[:, length + prompt - skip :]}
    return {
        name: losses.next_token_from_hidden(row_BND, trainer.head, batch["answer"], asked_BN, model.vocab)
        for name, row_BND in halves.items()
    }


def _canvas_noise(trainer: Training, batch: dict[str, Tensor], clean_BS: Tensor) -> Tensor:
    """A clean canvas with the batch's noise on it, [B, S]."""
    args = trainer.args
    slots = clean_BS.shape[1]
    level_B = noise.noise_level(batch["level"], trainer.noise_cap(), args.noise_floor)
    everywhere = torch.ones_like(clean_BS, dtype=torch.bool)
    return trainer.diffusion.noise.corrupt(clean_BS, level_B, everywhere, batch["uniform"][:, :slots], batch["token"][:, :slots])[0]


def uniform_losses(trainer: Training, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Uniform noise: cross-entropy on all slots of one canvas a row, behind the clean text before it, and the causal encoder's next-token
    cross-entropy on the answer and its end token.

    The canvas is drawn from those up to the one with the end token; behind it stand end tokens, which are targets too. Rows are told what
    a first forward without gradients saw, with probability `self_conditioning` each; the others are told nothing.
    """
    model, args = trainer.diffusion, trainer.args
    size, prompt = args.block_length, batch["prompt"].shape[1]
    canvases_B = -(-batch["length"] // size)
    first_B = (batch["canvas"] * canvases_B).long().clamp(max=canvases_B - 1) * size
    clean_BS = batch["answer"].gather(1, first_B[:, None] + torch.arange(size, device=first_B.device))
    noisy_BS = _canvas_noise(trainer, batch, clean_BS)
    longest = int(batch["length"].max())  # no canvas is behind what stands further on, and no token there is a target
    ids_BL, valid_BL, _ = whole(batch, batch["answer"][:, :longest])
    row_BLD, canvas_BSD = model.text_and_canvas(ids_BL, valid_BL, prompt + first_B, noisy_BS, batch["told"] < args.self_conditioning)
    asked_BN = torch.arange(longest, device=first_B.device) < batch["length"][:, None]
    everywhere = torch.ones_like(clean_BS, dtype=torch.bool)
    return {
        "diffusion": losses.next_token_from_hidden(canvas_BSD, trainer.head, clean_BS, everywhere, model.vocab),
        "ar": losses.next_token_from_hidden(row_BLD[:, prompt:], trainer.head, ids_BL[:, prompt:], asked_BN, model.vocab),
    }


def cdlm_losses(trainer: Training, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Equations 4, 5 and 6; those of weight 0 are left out, and so is the forward that only they need."""
    model, args = trainer.diffusion, trainer.args
    if "open_star" in batch:
        return canvas_losses(trainer, batch)
    prompt, mask, block = batch["prompt"].shape[1], model.facts.mask_id, args.block_length
    out: dict[str, Tensor] = {}
    if args.distill_weight or args.consistency_weight:
        row_BND = model.sequence_hidden(*whole(batch, batch["y"]), block)[:, prompt:]
        open_BN, open_later_BN = batch["y"] == mask, batch["y_star"] == mask
        if args.distill_weight and "hidden" not in batch:
            out["distill"] = losses.token_distillation_from_hidden(
                row_BND, trainer.head, batch["y_star"], open_BN & ~open_later_BN, model.vocab
            )
        elif args.distill_weight:
            assert trainer.teacher_head is not None
            teacher_BND = batch["hidden"].to(next(trainer.teacher_head.parameters()).dtype)
            out["distill"] = losses.distillation_from_hidden(
                row_BND, trainer.head, teacher_BND, trainer.teacher_head, open_BN & ~open_later_BN, model.vocab
            )
        if args.consistency_weight:
            with torch.no_grad(), eval_mode(model.hf):
                later_BND = model.sequence_hidden(*whole(batch, batch["y_star"]), block)[:, prompt:]
            # Blocks behind the one with the end token are no part of S_y: no decoding that stops there ever asks for them.
            asked_BN = torch.arange(open_BN.shape[1], device=open_BN.device) < batch["decoded"][:, None]
            out["consistency"] = losses.consistency_from_hidden(
                row_BND, trainer.head, later_BND, _without_dropout(trainer), open_BN & open_later_BN & asked_BN, model.vocab
            )
    if args.dlm_weight:
        out["dlm"] = _noisy_answer(trainer, batch, block)
    return out


def canvas_losses(trainer: Training, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Equations 4, 5 and 6 on one canvas a row, where every slot is decided anew at every step (`CanvasStates` says what a batch holds).

    distill: KL from the teacher's logits, not divided by a temperature, on slots accepted between y and y*. consistency: KL from the
    student at y*, told what the teacher was told there, on slots open in both. dlm: cross-entropy on all slots of a noisy reference
    canvas behind the reference before it, told nothing.
    """
    model, args = trainer.diffusion, trainer.args
    prompt, valid, size = batch["prompt"], batch["prompt_valid"], args.block_length
    out: dict[str, Tensor] = {}
    if args.distill_weight or args.consistency_weight:
        seen = Seen(batch["seen"], batch["seen_ids"], batch["told"])
        row_BSD = model.answer_hidden(prompt, valid, batch["y"], size, seen)
        if args.distill_weight:
            out["distill"] = losses.top_k_distillation_from_hidden(
                row_BSD, trainer.head, batch["target"], batch["target_ids"], batch["target_total"], batch["open"] & ~batch["open_star"],
                model.vocab,
            )
        if args.consistency_weight:
            with torch.no_grad(), eval_mode(model.hf):
                seen_star = Seen(batch["seen_star"], batch["seen_star_ids"])
                later_BSD = model.answer_hidden(prompt, valid, batch["y_star"], size, seen_star)
            open_both_BS = batch["open"] & batch["open_star"]
            out["consistency"] = losses.consistency_from_hidden(
                row_BSD, trainer.head, later_BSD, _without_dropout(trainer), open_both_BS, model.vocab
            )
    if args.dlm_weight:
        noisy_BS = _canvas_noise(trainer, batch, batch["answer"])
        row_BSD = model.answer_hidden(batch["reference"], batch["reference_valid"], noisy_BS, size)
        everywhere = torch.ones_like(noisy_BS, dtype=torch.bool)
        out["dlm"] = losses.next_token_from_hidden(row_BSD, trainer.head, batch["answer"], everywhere, model.vocab)
    return out


def _without_dropout(trainer: Training) -> losses.Head:
    def forward(row_ND: Tensor) -> Tensor:
        with eval_mode(trainer.diffusion.head):
            return trainer.head(row_ND)

    return forward


@contextlib.contextmanager
def eval_mode(model: nn.Module):
    """Without dropout, as the target of equation 5 is computed."""
    was = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was)


LOSSES = {
    "cdlm": cdlm_losses, "mdlm": mdlm_losses, "bd3lm": bd3lm_losses, "ar": ar_losses, "tidar": tidar_losses, "uniform": uniform_losses,
}
