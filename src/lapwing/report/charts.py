"""Charts as SVG: every mark is a path, so that what moves is an attribute `d`, and colors are classes of the page's.

    chart = Chart(Axis(0, 1, "confidence"), Axis(0, 1, "accuracy"))
    chart.mark("line a", line(chart, points))
    chart.svg("what it shows")

What is outside of the axes is cut off at the frame. Coordinates are rounded to a tenth of a pixel.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

WIDTH, HEIGHT = 460, 330  # of a chart, in its own pixels
LEFT, RIGHT, TOP, BOTTOM = 70, 14, 14, 46  # around the frame
EDGE = 12  # by which discs may overlap the frame
TICKS = 5  # at most about so many on an axis

Point = tuple[float, float]


@dataclass(frozen=True)
class Axis:
    """From low to high, with a label; logarithmic where asked."""

    low: float
    high: float
    label: str = ""
    log: bool = False
    ticks: tuple[tuple[float, str], ...] | None = None  # those that are nice unless told

    def share(self, value: float) -> float:
        """Where a value lies between the ends, 0 to 1."""
        low, high, value = (self._at(v) for v in (self.low, self.high, value))
        return (value - low) / (high - low)

    def _at(self, value: float) -> float:
        return math.log10(value) if self.log else value

    def marks(self) -> tuple[tuple[float, str], ...]:
        """Ticks, with their labels."""
        if self.ticks is not None:
            return self.ticks
        values = decades(self.low, self.high) if self.log else nice(self.low, self.high)
        return tuple((v, short(v)) for v in values)


def around(values: Iterable[float], label: str = "", pad: float = 0.05) -> Axis:
    """An axis that holds finite values, with a little room."""
    known = [v for v in values if math.isfinite(v)] or [0.0]
    low, high = min(known), max(known)
    room = pad * (high - low) or max(abs(high), 1.0) * pad
    return Axis(low - room, high + room, label)


def nice(low: float, high: float, count: int = TICKS) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten from low to high, about so many."""
    raw = (high - low) / count
    power = 10 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [k * step for k in range(first, last + 1)]


def decades(low: float, high: float) -> list[float]:
    """Powers of ten from low to high, every so many; where there are fewer than two, nice numbers."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    if last - first < 1:
        return [v for v in nice(low, high) if v > 0]
    return [10.0**k for k in range(first, last + 1, -(-(last - first + 1) // 7))]


def short(value: float) -> str:
    """A number on an axis."""
    if value == 0 or abs(value) < 1e-12:
        return "0"
    if 1e-3 <= abs(value) < 1e5:
        return signed(f"{value:,.10g}" if abs(value) >= 1e3 else f"{value:.4g}")
    return signed(f"{value:.2g}".replace("e-0", "e-").replace("e+0", "e"))


def short_of(value: float) -> str:
    """To three digits."""
    return short(float(f"{value:.3g}"))


def signed(text: str) -> str:
    """A number with a minus sign, which a hyphen is not."""
    return text.replace("-", "−")


def percent(share: float) -> str:
    """To a tenth."""
    return f"{100 * share:.1f}\u00a0%"


@dataclass
class Chart:
    """Marks within a frame. Mutable, inside the making of a page only."""

    x: Axis
    y: Axis
    width: float = WIDTH
    height: float = HEIGHT
    marks: list[str] = field(default_factory=list)
    discs: list[str] = field(default_factory=list)  # above the others, and whole at the edge of the frame

    def at(self, x: float, y: float) -> Point:
        """In pixels."""
        across, up = self.width - LEFT - RIGHT, self.height - TOP - BOTTOM
        return LEFT + across * self.x.share(x), TOP + up * (1 - self.y.share(y))

    def mark(self, style: str, d: str, moves: str = "", title: str = "") -> None:
        """A path of a style; `moves`: by what name the slider knows it."""
        said = f"<title>{html.escape(title)}</title>" if title else ""
        known = f' data-sweep="{moves}"' if moves else ""
        drawn = self.discs if style.startswith("dots") else self.marks
        drawn.append(f'<path class="{style}" d="{d}"{known}>{said}</path>')

    def svg(self, what: str) -> str:
        """The chart, with its axes; what: for those who cannot see it."""
        left, top, right, bottom = LEFT, TOP, self.width - RIGHT, self.height - BOTTOM
        return (
            f'<svg viewBox="0 0 {_px(self.width)} {_px(self.height)}" role="img" aria-label="{html.escape(what)}">'
            f"{self._axes(left, top, right, bottom)}"
            f"{self._cut(self.marks, 1)}{self._cut(self.discs, EDGE)}</svg>"
        )

    def _cut(self, marks: list[str], edge: float) -> str:
        """Marks within the frame, and so many pixels around it."""
        across, up = self.width - LEFT - RIGHT, self.height - TOP - BOTTOM
        box = [_px(v) for v in (LEFT - edge, TOP - edge, across + 2 * edge, up + 2 * edge)]
        place = f'x="{box[0]}" y="{box[1]}" width="{box[2]}" height="{box[3]}"'
        return f'<svg {place} viewBox="{" ".join(box)}">{"".join(marks)}</svg>' if marks else ""

    def _axes(self, left: float, top: float, right: float, bottom: float) -> str:
        parts = [f'<path class="axis" d="M{left} {_px(bottom)}H{_px(right)}"/>']
        for value, label in self.x.marks():
            x = self.at(value, self.y.low)[0]
            parts.append(f'<path class="grid" d="M{_px(x)} {top}V{_px(bottom)}"/>')
            parts.append(_text(x, bottom + 16, label, "middle"))
        for value, label in self.y.marks():
            y = self.at(self.x.low, value)[1]
            parts.append(f'<path class="grid" d="M{left} {_px(y)}H{_px(right)}"/>')
            parts.append(_text(left - 7, y + 4, label, "end"))
        parts.append(_text((left + right) / 2, self.height - 6, self.x.label, "middle", "label"))
        turned = f"rotate(-90 12 {_px((top + bottom) / 2)})"
        parts.append(_text(12, (top + bottom) / 2, self.y.label, "middle", "label", turned))
        return "".join(parts)


# -- marks -----------------------------------------------------------------------------------------------------------


def line(chart: Chart, points: Sequence[Point]) -> str:
    """Through points."""
    return "".join(f"{'L' if k else 'M'}{_at(chart, p)}" for k, p in enumerate(points))


def dots(chart: Chart, points: Iterable[Point], radii: Iterable[float] | float = 3.0) -> str:
    """Discs at points."""
    points = list(points)
    sizes = [radii] * len(points) if isinstance(radii, (int, float)) else list(radii)
    out = []
    for (x, y), r in zip((chart.at(*p) for p in points), sizes, strict=True):
        out.append(
            f"M{_px(x - r)} {_px(y)}a{_px(r)} {_px(r)} 0 1 0 {_px(2 * r)} 0a{_px(r)} {_px(r)} 0 1 0 {_px(-2 * r)} 0"
        )
    return "".join(out)


def bars(chart: Chart, boxes: Iterable[tuple[float, float, float]], gap: float = 1.0) -> str:
    """Rectangles (from, to, height) that stand on the lower end of the axis."""
    out = []
    for low, high, height in boxes:
        (x1, y1), (x2, y2) = chart.at(low, chart.y.low), chart.at(high, height)
        out.append(f"M{_px(x1 + gap / 2)} {_px(y1)}V{_px(y2)}H{_px(x2 - gap / 2)}V{_px(y1)}Z")
    return "".join(out)


def uprights(chart: Chart, spans: Iterable[tuple[float, float, float]]) -> str:
    """Lines (x, low, high) from low to high: error bars."""
    return "".join(f"M{_at(chart, (x, low))}V{_px(chart.at(x, high)[1])}" for x, low, high in spans)


def band(chart: Chart, lower: Sequence[Point], upper: Sequence[Point]) -> str:
    """The area between two lines."""
    return line(chart, [*lower, *reversed(upper)]) + "Z"


def _at(chart: Chart, point: Point) -> str:
    x, y = chart.at(*point)
    return f"{_px(x)} {_px(y)}"


def _px(value: float) -> str:
    """To a tenth of a pixel, within what a browser draws."""
    return f"{min(max(value, -1e5), 1e5):.1f}".removesuffix(".0")


def _text(x: float, y: float, text: str, anchor: str, style: str = "tick", transform: str = "") -> str:
    turn = f' transform="{transform}"' if transform else ""
    where = f'x="{_px(x)}" y="{_px(y)}" text-anchor="{anchor}"'
    return f'<text class="{style}" {where}{turn}>{html.escape(text)}</text>'
