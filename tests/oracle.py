"""Compares checkpoints in their families' own formats with what the families' own code computed from them.

    python tests/oracle.py FOLDER...     # folders laid out as tests/fixtures/README.md says

Prints the largest difference of logits and the token matches of each decoding; exit status 1 above 1e-4 or on a token that differs, 3
where a decoding of the reference can't be reproduced yet (it is named).
"""

import re
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from cdlm import families, masks
from cdlm.decode import DecodeConfig, decode

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


def decoding(key: str) -> DecodeConfig | None:
    """How the reference was decoded, from its key; None where this package has no such decoding yet."""
    whole: dict[str, Any] = {"block_causal": False, "use_cache": False, "stop_at_eos": False}
    if match := re.fullmatch(r"gen_tokens_(\d+)per_step_block(\d+)_len(\d+)", key):
        count, block, length = map(int, match.groups())
        return DecodeConfig(length, block, tokens_per_step=count, **whole)
    return None


def token_matches(model: Any, reference: dict[str, torch.Tensor]) -> dict[str, tuple[int, int] | None]:
    """(tokens that agree, tokens) of each gen_* key; None where it can't be decoded yet."""
    prompt, found = reference["gen_prompt"], {}
    for key in sorted(k for k in reference if k.startswith("gen_") and k != "gen_prompt"):
        config = decoding(key)
        if config is None:
            found[key] = None
            continue
        ours = decode(model, prompt, torch.ones_like(prompt, dtype=torch.bool), config).filled_BN
        theirs = reference[key][:, prompt.shape[1] :]
        found[key] = (int((ours == theirs).sum()), theirs.numel())
    return found


def check(folder: Path) -> int:
    """Print the comparison of one folder; the exit status."""
    model = families.load(folder)
    reference = load_file(folder / "reference.safetensors")
    status = 0
    for key, difference in logit_differences(model, reference).items():
        print(f"{folder.name}: {key}: largest difference {difference:.1e}")
        status = max(status, int(not difference <= LARGEST))
    for key, match in token_matches(model, reference).items():
        if match is None:
            print(f"{folder.name}: {key}: no such decoding yet")
            status = status or 3
        else:
            print(f"{folder.name}: {key}: {match[0]} of {match[1]} tokens")
            status = 1 if match[0] != match[1] else status
    return status


if __name__ == "__main__":
    found = [check(Path(name)) for name in sys.argv[1:]]
    sys.exit(1 if 1 in found else max(found, default=2))
