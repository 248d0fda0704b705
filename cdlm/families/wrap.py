"""Which `DiffusionLM` a stock architecture gets. Knows model types; knows no checkpoint."""

from typing import Any

from cdlm.families import zaya
from cdlm.families.base import DiffusionLM, Facts

CLASSES: dict[str, type[DiffusionLM]] = {zaya.MODEL_TYPE: zaya.ZayaLM}


def wrap(hf: Any, facts: Facts, family: str) -> DiffusionLM:
    """A transformers model as a diffusion LM; an architecture that is not local in positions gets a class of its own."""
    return CLASSES.get(hf.config.model_type, DiffusionLM)(hf, facts, family)
