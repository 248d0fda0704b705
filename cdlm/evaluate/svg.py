"""Small plots as SVG text that stands inside a page and takes its colours from the page's CSS.

Knows numbers and labels; knows no report. Classes that the page must style: axis, grid, label, bar, whisker, line, mark, and s0 .. s8,
the colours of the series (as `color`, which lines and marks take as currentColor).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from html import escape

LEFT, RIGHT, TOP, BOTTOM = 58, 14, 10, 40  # margins of a plot, in pixels
MARKS = ("circle", "square", "triangle", "diamond", "cross")
COLOURS = 9


@dataclass(frozen=True)
class Series:
    """A named curve. number: which colour and mark; both go round. notes: what a point says when pointed at."""

    name: str
    number: int
    points: list[tuple[float, float]]
    notes: list[str]


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from low to high, about `count` of them: multiples of 1, 2 or 5 times a power of ten."""
    if not low < high:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(size * power for size in (1, 2, 5, 10) if size * power >= rough * 0.75)
    return [index * step for index in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten from low to high, both above 0; the ends themselves where fewer than two fall between."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [size * 10.0**power for power in powers for size in (1, 2, 5)]
    inside = [value for value in found if low * 0.999 <= value <= high * 1.001]
    return inside if len(inside) > 1 else sorted({low, high})


def _mark(kind: str, x: float, y: float, number: int, note: str) -> str:
    shapes = {
        "circle": f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"',
        "square": f'<rect x="{x - 3.5:.1f}" y="{y - 3.5:.1f}" width="7" height="7"',
        "triangle": f'<path d="M{x:.1f} {y - 4.6:.1f} l4.6 8 h-9.2 z"',
        "diamond": f'<path d="M{x:.1f} {y - 5:.1f} l5 5 l-5 5 l-5 -5 z"',
        "cross": f'<path d="M{x - 4:.1f} {y - 4:.1f} l8 8 m0 -8 l-8 8"',
    }
    title = f"<title>{escape(note)}</title>" if note else ""
    return f'{shapes[kind]} class="mark {kind} s{number % COLOURS}">{title}</{shapes[kind][1:].split(" ", 1)[0]}>'


def swatch(number: int) -> str:
    """A series' mark alone, for a legend."""
    return f'<svg class="swatch" width="14" height="12" aria-hidden="true">{_mark(MARKS[number % len(MARKS)], 7, 6, number, "")}</svg>'


def _span(values: list[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if low < high else (low - 0.5, high + 0.5)


def plot(
    series: list[Series], *, x: str, y: str, width: int = 460, height: int = 300, log_x: bool = False,
    y_range: tuple[float, float] | None = None, marks: bool = True, y_form: str = "g",
) -> str:
    """Curves over one pair of axes. x, y: the axes' names. log_x: a logarithmic x axis, all x above 0. At least one point in all."""
    drawn = [one for one in series if one.points]
    xs = [point[0] for one in drawn for point in one.points]
    if log_x:
        low, high = min(xs) / 1.15, max(xs) * 1.15
        x_ticks = log_ticks(low, high)
        at: Callable[[float], float] = math.log
    else:
        low, high = _span(xs)
        x_ticks = ticks(low, high)
        at = float
    bottom, top = y_range or _span([point[1] for one in drawn for point in one.points])
    inner_width, inner_height = width - LEFT - RIGHT, height - TOP - BOTTOM

    def px(value: float) -> float:
        return LEFT + (at(value) - at(low)) / (at(high) - at(low)) * inner_width

    def py(value: float) -> float:
        return TOP + (top - value) / (top - bottom) * inner_height

    out = [f'<svg class="plot" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(y)} against {escape(x)}">']
    for value in ticks(bottom, top):
        out.append(f'<line class="grid" x1="{LEFT}" x2="{width - RIGHT}" y1="{py(value):.1f}" y2="{py(value):.1f}"/>')
        out.append(f'<text class="label" x="{LEFT - 6}" y="{py(value) + 4:.1f}" text-anchor="end">{value:{y_form}}</text>')
    for value in x_ticks:
        out.append(f'<line class="grid" x1="{px(value):.1f}" x2="{px(value):.1f}" y1="{TOP}" y2="{height - BOTTOM}"/>')
        out.append(f'<text class="label" x="{px(value):.1f}" y="{height - BOTTOM + 16}" text-anchor="middle">{value:g}</text>')
    out.append(f'<path class="axis" d="M{LEFT} {TOP} V{height - BOTTOM} H{width - RIGHT}"/>')
    out.append(f'<text class="label" x="{LEFT + inner_width / 2:.0f}" y="{height - 6}" text-anchor="middle">{escape(x)}</text>')
    middle = TOP + inner_height / 2
    out.append(f'<text class="label" transform="translate(12 {middle:.0f}) rotate(-90)" text-anchor="middle">{escape(y)}</text>')
    for one in drawn:
        path = " ".join(f"{'L' if i else 'M'}{px(a):.1f} {py(b):.1f}" for i, (a, b) in enumerate(one.points))
        if len(one.points) > 1:
            out.append(f'<path class="line s{one.number % COLOURS}" d="{path}"/>')
        if marks:
            kind = MARKS[one.number % len(MARKS)]
            out += [_mark(kind, px(a), py(b), one.number, note) for (a, b), note in zip(one.points, one.notes, strict=True)]
    return "".join([*out, "</svg>"])


@dataclass(frozen=True)
class Bar:
    """One bar: its name, its value with the ends of its whisker, and what is written behind it."""

    name: str
    number: int
    low: float
    value: float
    high: float
    text: str


def bars(rows: list[Bar], *, x: str, width: int = 960) -> str:
    """Horizontal bars from 0, with whiskers; at least one."""
    row, names, texts = 30, 250, 250
    height = row * len(rows) + BOTTOM
    most = max(bar.high for bar in rows) or 1.0

    def px(value: float) -> float:
        return names + value / most * (width - names - texts)

    out = [f'<svg class="plot wide" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(x)}">']
    for value in ticks(0, most):
        out.append(f'<line class="grid" x1="{px(value):.1f}" x2="{px(value):.1f}" y1="0" y2="{height - BOTTOM}"/>')
        out.append(f'<text class="label" x="{px(value):.1f}" y="{height - BOTTOM + 16}" text-anchor="middle">{value:g}</text>')
    for place, bar in enumerate(rows):
        middle = row * place + row / 2
        out.append(f'<text class="label name" x="{names - 8}" y="{middle + 4:.0f}" text-anchor="end">{escape(bar.name)}</text>')
        out.append(
            f'<rect class="bar s{bar.number}" x="{names}" y="{middle - 8:.0f}" width="{max(1.0, px(bar.value) - names):.1f}" height="16"/>'
        )
        ends = f"M{px(bar.low):.1f} {middle - 5:.0f} v10 m0 -5 H{px(bar.high):.1f} m0 -5 v10"
        out.append(f'<path class="whisker" d="{ends}"/>')
        out.append(f'<text class="label name" x="{px(bar.high) + 8:.1f}" y="{middle + 4:.0f}">{escape(bar.text)}</text>')
    out.append(f'<path class="axis" d="M{names} 0 V{height - BOTTOM}"/>')
    out.append(f'<text class="label" x="{names}" y="{height - 6}">{escape(x)}</text>')
    return "".join([*out, "</svg>"])
