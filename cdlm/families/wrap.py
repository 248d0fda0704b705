"""Which `DiffusionLM` a stock architecture gets. Knows model types; knows no checkpoint."""

from typing import Any

from cdlm.families import diffusion_gemma, zaya
from cdlm.families.base import DiffusionLM, Facts

CLASSES: dict[str, type[DiffusionLM]] = {
    zaya.MODEL_TYPE: zaya.ZayaLM, diffusion_gemma.MODEL_TYPE: diffusion_gemma.DiffusionGemmaLM,
}  # fmt: skip


def wrap(hf: Any, facts: Facts, family: str) -> DiffusionLM:
    """A transformers model as a diffusion LM; an architecture that is not local in positions gets a class of its own."""
    return CLASSES.get(hf.config.model_type, DiffusionLM)(hf, facts, family)
