"""Which `DiffusionLM` a stock architecture gets. Knows model types; knows no checkpoint."""

from typing import Any

from cdlm.families import diffusion_gemma, zaya
from cdlm.families.base import DiffusionLM, Facts

CLASSES: dict[str, type[DiffusionLM]] = {
    zaya.MODEL_TYPE: zaya.ZayaLM, diffusion_gemma.MODEL_TYPE: diffusion_gemma.DiffusionGemmaLM,
}  # fmt: skip


def class_of(model_type: Any) -> type[DiffusionLM]:
    """The class of an architecture; one whose masks say all gets the common one."""
    return CLASSES.get(str(model_type), DiffusionLM)


def wrap(hf: Any, facts: Facts, family: str) -> DiffusionLM:
    """A transformers model as a diffusion LM; an architecture that is not local in positions gets a class of its own."""
    return class_of(hf.config.model_type)(hf, facts, family)
