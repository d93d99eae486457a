"""Line charts as SVG text: panels side by side, each with its axes, lines, marks and legend.

No library draws it, so a command can write a picture wherever echo2 is installed. The background
is white, and lines differ in colour and dash.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Final

WIDTH: Final = 460
HEIGHT: Final = 300
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 34, 46
COLOURS: Final = ("#1b6ca8", "#c8553d", "#3a7d44", "#7b4ea3", "#b8860b", "#444444", "#0a9396")
TICKS: Final = 5
"""About so many on an axis."""
LEGEND_LINE: Final = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """`points` by ascending x; `low` and `high` are y values of a band around them, or empty."""

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False
    dots: bool = False
    low: Sequence[float] = ()
    high: Sequence[float] = ()

    def __post_init__(self) -> None:
        if not self.points:
            raise ValueError(f"the line {self.name} has no points")
        for x, y in self.points:
            if not (math.isfinite(x) and math.isfinite(y)):
                raise ValueError(f"the line {self.name} has the point ({x}, {y}), not finite")
        for band in (self.low, self.high):
            if band and len(band) != len(self.points):
                raise ValueError(f"the band of {self.name} has {len(band)} values")


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """`marks`: (x, text) of vertical lines. `from_zero`: the y axis begins there."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    marks: Sequence[tuple[float, str]] = field(default=())
    from_zero: bool = True

    def __post_init__(self) -> None:
        if not self.lines:
            raise ValueError(f"the panel {self.title} has no lines")


def svg(panels: Sequence[Panel]) -> str:
    """The picture. ValueError for no panels."""
    if not panels:
        raise ValueError("a picture has at least one panel")
    legend = max(len(panel.lines) for panel in panels) * LEGEND_LINE
    width, height = WIDTH * len(panels), HEIGHT + legend
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for place, panel in enumerate(panels):
        parts += [f'<g transform="translate({place * WIDTH} 0)">', *_panel(panel), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def ticks(low: float, high: float) -> list[float]:
    """Round numbers from at most `low` to at least `high`."""
    span = high - low
    if span <= 0:
        span = abs(high) or 1.0
    raw = span / TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * k for k in (1, 2, 2.5, 5, 10) if power * k >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * k for k in range(first, max(last, first + 1) + 1)]


def _panel(panel: Panel) -> list[str]:
    xs = [x for line in panel.lines for x, _ in line.points]
    ys = [y for line in panel.lines for _, y in line.points]
    for line in panel.lines:
        ys += [*line.low, *line.high]
    x_low, x_high = min(xs), max(xs)
    y_ticks = ticks(min(0.0, *ys) if panel.from_zero else min(ys), max(ys))
    x_ticks = [x for x in ticks(x_low, x_high) if x_low <= x <= x_high]
    span = x_high - x_low or 1.0
    y_low, y_high = y_ticks[0], y_ticks[-1]

    def at_x(x: float) -> float:
        return LEFT + (x - x_low) / span * (WIDTH - LEFT - RIGHT)

    def at_y(y: float) -> float:
        return HEIGHT - BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = [_text(WIDTH / 2, 18, panel.title, anchor="middle", size=13)]
    for y in y_ticks:
        parts.append(_rule(LEFT, at_y(y), right, at_y(y), "#dddddd"))
        parts.append(_text(LEFT - 6, at_y(y) + 4, _number(y), anchor="end"))
    for x in x_ticks:
        parts.append(_rule(at_x(x), bottom, at_x(x), bottom + 4, "#888888"))
        parts.append(_text(at_x(x), bottom + 16, _number(x), anchor="middle"))
    parts.append(_rule(LEFT, bottom, right, bottom, "#888888"))
    parts.append(_text((LEFT + right) / 2, HEIGHT - 12, panel.x_label, anchor="middle"))
    middle = (TOP + bottom) / 2
    parts.append(
        f'<text transform="translate(14 {middle:.1f}) rotate(-90)" text-anchor="middle">'
        f"{escape(panel.y_label)}</text>"
    )
    for x, text in panel.marks:
        if x_low <= x <= x_high:
            parts.append(_rule(at_x(x), TOP, at_x(x), bottom, "#888888", dashed=True))
            left = x <= (x_low + x_high) / 2
            place = at_x(x) + (4 if left else -4)
            parts.append(_text(place, TOP + 10, text, anchor="start" if left else "end"))
    for index, line in enumerate(panel.lines):
        colour = COLOURS[index % len(COLOURS)]
        path = [(at_x(x), at_y(y)) for x, y in line.points]
        if line.low and line.high:
            upper = [(x, at_y(y)) for (x, _), y in zip(path, line.high, strict=True)]
            lower = [(x, at_y(y)) for (x, _), y in zip(path, line.low, strict=True)]
            around = _path([*upper, *reversed(lower)])
            parts.append(f'<polygon points="{around}" fill="{colour}" opacity="0.15"/>')
        dash = ' stroke-dasharray="5 4"' if line.dashed else ""
        parts.append(
            f'<polyline points="{_path(path)}" fill="none" stroke="{colour}" stroke-width="1.8"'
            f"{dash}/>"
        )
        if line.dots or len(path) == 1:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in path]
        y = HEIGHT + index * LEGEND_LINE
        parts.append(
            f'<line x1="{LEFT}" y1="{y}" x2="{LEFT + 24}" y2="{y}" stroke="{colour}" '
            f'stroke-width="1.8"{dash}/>'
        )
        parts.append(_text(LEFT + 30, y + 4, line.name))
    return parts


def _path(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _rule(x1: float, y1: float, x2: float, y2: float, colour: str, *, dashed: bool = False) -> str:
    dash = ' stroke-dasharray="3 3"' if dashed else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{dash}/>'
    )


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 11) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">'
        f"{escape(text)}</text>"
    )


def _number(value: float) -> str:
    return f"{value:.10g}" if abs(value) < 1e6 else f"{value:.3g}"
