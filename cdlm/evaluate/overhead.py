"""What the parts of this package cost around the forwards of the model: a decoding step, and a training step.

Knows clocks and the two loops; knows no question and no checkpoint. On a GPU the device is waited for at the edges of every part, so a
decoding step takes longer there than in `clock`, and the shares are of that longer time.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from cdlm import decode as decoding
from cdlm.decode import DecodeConfig
from cdlm.evaluate.clock import waiting
from cdlm.families.base import DiffusionLM

PARTS = {
    "model": "the model's forward and its head",
    "masks": "positions and masks",
    "choosing": "probabilities and tokens from logits",
    "rule": "which slots are revealed",
}


WARMUP = 2  # training steps


@contextmanager
def _timed(owner: Any, name: str, spent: dict[str, float], part: str, wait: Callable[[], None]) -> Iterator[None]:
    """Meanwhile, add the seconds of owner.name to a part."""
    there, own = getattr(owner, name), name in vars(owner)

    def call(*args, **kwargs):
        wait()
        start = time.perf_counter()
        try:
            return there(*args, **kwargs)
        finally:
            wait()
            spent[part] += time.perf_counter() - start

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, there) if own else delattr(owner, name)


def of_decoding(
    model: DiffusionLM, prompts: list[tuple[Tensor, Tensor]], config: DecodeConfig, *, repeats: int = 3, warmup: int = 3
) -> dict[str, Any]:
    """Where the time of a decoding at batch 1 goes: seconds a step, and the share of each of PARTS and of the rest.

    prompts: (ids, padding mask) of single rows, on the model's device. outside_model: 1 less the model's share.
    """
    wait, spent, steps = waiting(model.device), dict.fromkeys(PARTS, 0.0), 0
    for prompt, valid in prompts[:warmup]:
        decoding.decode(model, prompt, valid, config)
    with ExitStack() as stack:
        timed = [(model, "_rows", "model"), (model.head, "forward", "model"), (model, "_horizon", "masks"), (model, "_mask", "masks"),
                 (model, "_no_mask", "masks"), (decoding, "choose", "choosing"), (decoding, "score", "choosing")]  # fmt: skip
        for owner, name, part in timed:
            stack.enter_context(_timed(owner, name, spent, part, wait))
        total = 0.0
        for _ in range(repeats):
            for prompt, valid in prompts:
                wait()
                start = time.perf_counter()
                out = decoding.decode(model, prompt, valid, config, rule=_RuleTimed(config, spent, wait))
                wait()
                total += time.perf_counter() - start
                steps += out.steps[0]
    shares = {part: seconds / total for part, seconds in spent.items()}
    return {
        "steps": steps, "seconds_per_step": total / steps, "shares": {**shares, "rest": 1 - sum(shares.values())},
        "outside_model": 1 - shares["model"],
    }  # fmt: skip


class _RuleTimed:
    """The rule of a config that does not depend on the block, with its time noted."""

    def __init__(self, config: DecodeConfig, spent: dict[str, float], wait: Callable[[], None]):
        self.rule, self.spent, self.wait = config.rule(0, config.block_length), spent, wait

    def __call__(self, confidence_BL: Tensor, open_BL: Tensor, step: int) -> Tensor:
        self.wait()
        start = time.perf_counter()
        reveal_BL = self.rule(confidence_BL, open_BL, step)
        self.wait()
        self.spent["rule"] += time.perf_counter() - start
        return reveal_BL


def watch_training(found: dict[str, list[float]], warmup: int = WARMUP) -> Callable[[Any], Any]:
    """A factory of a Trainer callback that notes, for steps of objective cdlm behind the first `warmup`, the seconds of the whole step
    ("step": data, losses, backward, clipping, optimizer) and, right after it on the same batch, those of its forwards and backwards alone
    ("alone": y and the answer with gradient, y* without; two backwards)."""
    from transformers import TrainerCallback

    from cdlm import trainer as training

    def make(trainer: Any) -> Any:
        model = trainer.diffusion
        held: list[dict[str, Tensor]] = []
        loss_of, wait = trainer.compute_loss, waiting(trainer.diffusion.device)

        def keep(wrapped, inputs, *args, **kwargs):
            held[:] = [inputs]
            return loss_of(wrapped, inputs, *args, **kwargs)

        trainer.compute_loss = keep

        def alone(batch: dict[str, Tensor]) -> None:
            prompt, block = batch["prompt"].shape[1], trainer.args.block_length
            for slots_BN in (batch["y"], batch["answer"]):
                logits = model.sequence_logits(*training.whole(batch, slots_BN), block)[:, prompt:]
                logits.backward(torch.ones_like(logits))
            with torch.no_grad():
                model.sequence_logits(*training.whole(batch, batch["y_star"]), block)
            model.hf.zero_grad()

        class Watch(TrainerCallback):
            def on_train_begin(self, args, state, control, **kwargs):
                self.start = time.perf_counter()

            def on_step_end(self, args, state, control, **kwargs):
                wait()
                whole = time.perf_counter() - self.start
                start = time.perf_counter()
                alone(held[0])
                wait()
                if state.global_step > warmup:
                    found["step"].append(whole)
                    found["alone"].append(time.perf_counter() - start)
                self.start = time.perf_counter()

        return Watch()

    return make


def of_training(found: dict[str, list[float]]) -> dict[str, Any]:
    """Medians of what `watch_training` noted, and the median ratio of a whole step to its forwards and backwards alone."""
    ratios = [whole / alone for whole, alone in zip(found["step"], found["alone"], strict=True)]
    return {
        "steps": len(ratios), "seconds_per_step": statistics.median(found["step"]), "seconds_alone": statistics.median(found["alone"]),
        "ratio": statistics.median(ratios),
    }


def lines(found: dict[str, Any]) -> list[str]:
    """The findings as sentences."""
    out = []
    if decoded := found.get("decoding"):
        shares = ", ".join(f"{PARTS.get(part, 'the rest')} {share:.1%}" for part, share in decoded["shares"].items())
        out.append(
            f"decoding: {1000 * decoded['seconds_per_step']:.2f} ms a step at batch 1, {decoded['outside_model']:.1%} of it outside the "
            f"model ({shares})"
        )
    if trained := found.get("training"):
        out.append(
            f"training: a step takes {trained['seconds_per_step']:.3f} s, its three forwards and two backwards alone "
            f"{trained['seconds_alone']:.3f} s: {trained['ratio']:.2f} times (median of {trained['steps']} steps)"
        )
    return out
