"""The roofline as a figure: each card's roof, and where each way of decoding stands under it."""

from pathlib import Path
from typing import Any


def draw(found: list[dict[str, Any]], path: Path, title: str) -> None:
    """found: `cdlm.roofline.analyse` of each card and mode. One roof a card, one mark a mode at its intensity."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.2, 4.4), dpi=140)
    low = min(0.5, min(f["intensity"] for f in found) / 2)
    high = max(2000.0, 2 * max(f["intensity"] for f in found))
    marks = {"ar": "o", "dlm": "s", "block": "^", "tidar": "D"}
    roofs = {f["hardware"]: f for f in found}
    for card, colour in zip(roofs, plt.rcParams["axes.prop_cycle"].by_key()["color"] * len(roofs), strict=False):
        ridge = roofs[card]["ridge"]
        peak = roofs[card]["peak_flop_per_second"] / 1e12
        axes.plot([low, ridge, high], [peak * low / ridge, peak, peak], color=colour, label=f"{card}, ridge {ridge:.0f} FLOP/byte")
        for f in found:
            if f["hardware"] == card:
                axes.plot(f["intensity"], min(peak, peak * f["intensity"] / ridge), marks[f["mode"]], color=colour, markersize=6)
    for mode in dict.fromkeys(f["mode"] for f in found):
        axes.plot([], [], marks[mode], color="grey", label=mode)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("arithmetic intensity, FLOP a byte")
    axes.set_ylabel("attainable TFLOP/s, bf16")
    axes.set_title(title)
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, format=path.suffix.lstrip(".") or "png")
    plt.close(figure)
