"""cdlm: fewer, cheaper steps for block diffusion language models."""

from typing import Any

__version__ = "0.1.0"
__all__ = ["DecodeConfig", "generate", "load"]


def __getattr__(name: str) -> Any:
    """Public names, loaded on first use so that a plain import stays light: load, DecodeConfig, and generate, which is
    `cdlm.decode.decode`."""
    if name == "load":
        from cdlm.families import load

        return load
    if name in ("DecodeConfig", "generate"):
        from cdlm import decode

        return decode.decode if name == "generate" else decode.DecodeConfig
    raise AttributeError(f"module 'cdlm' has no attribute {name!r}")
