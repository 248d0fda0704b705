"""Compares checkpoints in their families' own formats with what the families' own code computed from them.

    python tests/oracle.py FOLDER...     # folders laid out as tests/fixtures/README.md says

Prints the largest difference of logits and the token matches of each decoding; exit status 1 above 1e-4, on a token that differs, or on
a key that it does not know. A reference that no greedy decoding can give is named as such, and not compared.
"""

import itertools
import re
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers.utils import logging

from cdlm import families, masks
from cdlm.decode import DecodeConfig, Step, decode
from cdlm.unmask import Rule

LARGEST = 1e-4


def raw_logits(model: Any, ids: torch.Tensor, valid: torch.Tensor, horizon: torch.Tensor) -> torch.Tensor:
    """The model's own rows, no shift undone."""
    position = masks.positions(valid)
    mask = masks.dense(masks.clean(horizon, position, valid))
    with torch.no_grad():
        return model.hf(input_ids=ids, attention_mask=mask, position_ids=position, use_cache=False).logits


def logit_differences(model: Any, reference: dict[str, torch.Tensor]) -> dict[str, float]:
    """Largest absolute difference of each logits_* key, over real rows."""
    ids, found = reference["input_ids"], {}
    everywhere = torch.ones_like(ids, dtype=torch.bool)
    full = masks.full(masks.positions(everywhere))
    if "logits_full" in reference:
        found["logits_full"] = raw_logits(model, ids, everywhere, full) - reference["logits_full"]
    if "logits_block_causal" in reference:
        prompt = reference["block_causal_prompt"].expand(len(ids)).long()
        horizon = masks.horizon(masks.positions(everywhere), prompt, int(reference["block_causal_block"]))
        found["logits_block_causal"] = raw_logits(model, ids, everywhere, horizon) - reference["logits_block_causal"]
    if "logits_left_padded" in reference:
        valid = reference["attention_mask"].bool()
        difference = raw_logits(model, ids, valid, full) - reference["logits_left_padded"]
        found["logits_left_padded"] = difference * valid[..., None]
    return {key: float(difference.abs().max()) for key, difference in found.items()}


def exactly(count: int) -> Rule:
    """SDAR's static reveal as its own code has it: top-k over confidences that are -inf where a slot is filled, with k the step's share
    whatever is left open. So a filled slot may be written again, with what the model now finds most probable there."""

    def rule(score: torch.Tensor, is_open: torch.Tensor, step: int) -> torch.Tensor:
        top = score.masked_fill(~is_open, -torch.inf).topk(count, dim=1).indices
        return torch.zeros_like(is_open).scatter(1, top, True)

    return rule


class States:
    """A callback that keeps the block as it was after every step."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def __call__(self, step: Step) -> None:
        self.seen.append(step.ids_AS.clone())


def decoding(key: str) -> tuple[DecodeConfig, Rule | None] | None:
    """How the reference was decoded, from its key; None for a key that says nothing this file knows."""
    whole: dict[str, Any] = {"block_causal": False, "use_cache": False, "stop_at_eos": False}
    if match := re.fullmatch(r"gen_tokens_(\d+)per_step_block(\d+)_len(\d+)", key):
        count, block, length = map(int, match.groups())
        return DecodeConfig(length, block, tokens_per_step=count, **whole), None
    # The reverse process on a grid of times, over the whole answer; transformers' default top_k of 50 was in force there.
    if match := re.fullmatch(r"gen_(?:tokens|history)_(maskgit|entropy)_steps(\d+)_len(\d+)", key):
        order, steps, length = {"maskgit": "confidence", "entropy": "entropy"}[match[1]], int(match[2]), int(match[3])
        return DecodeConfig(length, length, steps=steps, schedule="timesteps", order=order, top_k=50, **whole), None
    # Greedy decoding is top_k 1 there, so every confidence is 1 and ties are what top-k makes of them.
    if match := re.fullmatch(r"gen_tokens_(low_confidence_static|low_confidence_dynamic|sequential)_block(\d+)_len(\d+)", key):
        block, length = int(match[2]), int(match[3])
        greedy: dict[str, Any] = {"top_k": 1, "stop_at_eos": False}
        if match[1] == "sequential":
            return DecodeConfig(length, block, tokens_per_step=1, order="sequential", **greedy), None
        if match[1] == "low_confidence_dynamic":
            return DecodeConfig(length, block, confidence_threshold=0.4, **greedy), None
        return DecodeConfig(length, block, steps_per_block=2, **greedy), exactly(block // 2)
    if match := re.fullmatch(r"gen_tokens_thr([\d.]+)_block(\d+)_steps(\d+)_len(\d+)", key):
        block, steps, length = map(int, match.groups()[1:])
        return DecodeConfig(length, block, confidence_threshold=float(match[1]), steps_per_block=steps), None
    return None


def could_be_greedy(model: Any, prompt: torch.Tensor, answer: torch.Tensor, block: int) -> bool:
    """Whether some order of revealing most probable tokens gives this answer, blocks from position 0: every subset of every block's slots
    is tried, each given the reference's own tokens before it."""
    whole, first = torch.cat([prompt, answer], dim=1), prompt.shape[1]
    length_B = torch.tensor([first])
    for start in range(first // block * block, whole.shape[1] // block * block, block):
        slots = [i for i in range(start, start + block) if i >= first]
        reached, todo = {frozenset(slots)}, [frozenset(slots)]
        while todo:
            still = todo.pop()
            ids = whole[:, : start + block].clone()
            ids[0, sorted(still)] = model.facts.mask_token_id
            with torch.no_grad():
                logits = model.sequence_logits(ids, torch.ones_like(ids, dtype=torch.bool), length_B, block)[0]
            logits[:, model.facts.mask_token_id] = -torch.inf
            right = [i for i in still if int(logits[i].argmax()) == int(whole[0, i])]
            for some in (frozenset(c) for n in range(1, len(right) + 1) for c in itertools.combinations(right, n)):
                if still - some not in reached:
                    reached.add(still - some)
                    todo.append(still - some)
        if frozenset() not in reached:
            return False
    return True


SAMPLED = "not greedy: no order of revealing most probable tokens gives it, so it was sampled, and is not compared"
UNKNOWN = "a decoding that this file does not know"


def token_matches(model: Any, reference: dict[str, torch.Tensor]) -> dict[str, tuple[int, int] | str]:
    """(tokens that agree, tokens) of each gen_* key; a text where it can't be compared, which says why."""
    prompt, found = reference["gen_prompt"], {}
    for key in sorted(k for k in reference if k.startswith("gen_") and k != "gen_prompt"):
        asked = decoding(key)
        if asked is None:
            found[key] = UNKNOWN
            continue
        config, rule = asked
        states = States()
        out = decode(model, prompt, torch.ones_like(prompt, dtype=torch.bool), config, rule=rule, callback=states)
        theirs = reference[key]
        if key.startswith("gen_history"):
            ours, theirs = torch.stack(states.seen), theirs[:, :, prompt.shape[1] :]
            assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
        else:
            if torch.equal(theirs[:, : prompt.shape[1]], prompt):
                theirs = theirs[:, prompt.shape[1] :]
            ours = out.filled_BM[:, : theirs.shape[1]]
        found[key] = (int((ours == theirs).sum()), theirs.numel())
        small = config.block_length <= 8  # could_be_greedy tries every subset of a block
        if "_thr" in key and small and not torch.equal(ours, theirs) and not could_be_greedy(model, prompt, theirs, config.block_length):
            found[key] = SAMPLED
    return found


def check(folder: Path) -> int:
    """Print the comparison of one folder; the exit status."""
    model = families.load(folder)
    reference = load_file(folder / "reference.safetensors")
    status = 0
    known = {"logits_full", "logits_block_causal", "logits_left_padded"}
    for key in sorted(k for k in reference if k.startswith("logits_") and k not in known):
        print(f"{folder.name}: {key}: logits that this file does not know")
        status = 1
    for key, difference in logit_differences(model, reference).items():
        print(f"{folder.name}: {key}: largest difference {difference:.1e}")
        status = max(status, int(not difference <= LARGEST))
    for key, match in token_matches(model, reference).items():
        if isinstance(match, str):
            print(f"{folder.name}: {key}: {match}")
            status = 1 if match == UNKNOWN else status
        else:
            print(f"{folder.name}: {key}: {match[0]} of {match[1]} tokens")
            status = 1 if match[0] != match[1] else status
    return status


if __name__ == "__main__":
    logging.disable_progress_bar()
    sys.exit(max((check(Path(name)) for name in sys.argv[1:]), default=2))
