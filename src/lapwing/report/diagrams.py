"""The diagrams of a report, each an SVG: predictions of the network are drawn in the style s0, of fits in s1, s2, ...

reliability     accuracy against confidence, discs by how many predictions are there
intervals       how often central intervals hold y, against how often they say: |2 F(y) − 1| ≤ level
pit             histogram of F(y), flat if predictions are right
spread          root mean squared error against predicted standard deviation, in groups of equal size
risk            mean loss of those that are answered, the most certain first
novelty         ood_score of test inputs, and of inputs that are unlike the training data
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lapwing.metrics import Reliability
from lapwing.report.charts import Axis, Chart, Point, around, bars, dots, line
from lapwing.report.facts import ReportFacts, Scored

LEVELS = tuple(k / 20 for k in range(1, 20))  # of intervals
BINS, GROUPS = 10, 8  # of a histogram of F(y); of examples by their standard deviation
LEAST = 10  # predictions in a bin that is drawn: fewer are noise
COLUMNS = 30  # of a histogram of scores
COLORS = 5  # of fits
POINTS = 200  # of a curve, at most


def styles(facts: ReportFacts) -> list[tuple[str, Scored]]:
    """Each predictor with its style; s0 belongs to the network."""
    start = 1 if facts.network is None else 0
    return [(style_of(start + k), one) for k, one in enumerate(facts.all)]


def style_of(place: int) -> str:
    """s0, then s1 to s5 over and over, dashed from the second time on."""
    color = f"s{(place - 1) % COLORS + 1}" if place else "s0"
    return color if place <= COLORS else f"{color} again"


def shares(x: str, y: str) -> Chart:
    """A chart of shares against shares, with the diagonal on which both agree."""
    chart = Chart(Axis(0, 1, x), Axis(0, 1, y))
    chart.mark("line ideal", line(chart, [(0, 0), (1, 1)]))
    return chart


def reliability(facts: ReportFacts) -> str:
    """Accuracy against confidence."""
    chart = shares("confidence: what it says", "accuracy: how often it is right")
    for style, one in styles(facts):
        if one.reliability is not None:
            curve, discs = reliability_marks(chart, one.reliability)
            chart.mark(f"line {style}", curve)
            chart.mark(f"dots {style}", discs)
    return chart.svg("Reliability diagram: accuracy against confidence")


def reliability_marks(chart: Chart, found: Reliability) -> tuple[str, str]:
    """The curve, and discs whose area is the share of predictions, by bins of LEAST predictions or more."""
    kept = found.count >= min(LEAST, float(found.count.max()))
    points = list(zip(found.confidence[kept].tolist(), found.accuracy[kept].tolist(), strict=True))
    share = (found.count[kept] / found.count.sum()).tolist()
    return line(chart, points), dots(chart, points, [2 + 9 * math.sqrt(s) for s in share])


def coverages(pit: Tensor) -> list[Point]:
    """(level, share of y within the central interval of that level), by F(y)."""
    away = (2 * pit.flatten() - 1).abs()
    return [(level, float((away <= level).double().mean())) for level in LEVELS]


def intervals(facts: ReportFacts) -> str:
    """How often intervals hold y."""
    chart = shares("level: how often the interval says it holds y", "how often it does")
    for style, one in styles(facts):
        if one.pit is not None:
            chart.mark(f"line {style}", interval_marks(chart, one.pit))
    return chart.svg("Share of targets within central intervals, against their level")


def interval_marks(chart: Chart, pit: Tensor) -> str:
    """The curve from (0, 0) to (1, 1)."""
    return line(chart, [(0.0, 0.0), *coverages(pit), (1.0, 1.0)])


def histogram(values: Tensor, edges: Sequence[float]) -> list[float]:
    """Shares of values between edges, the last of them included."""
    cuts = torch.tensor(edges[1:-1], dtype=torch.float64)
    place = torch.bucketize(values.flatten().double().cpu(), cuts, right=True)
    return (torch.bincount(place, minlength=len(edges) - 1).double() / values.numel()).tolist()


def pit(facts: ReportFacts) -> str:
    """A histogram of F(y) of the first fit."""
    one = facts.fits[0]
    assert one.pit is not None
    edges = [k / BINS for k in range(BINS + 1)]
    heights = histogram(one.pit, edges)
    chart = Chart(Axis(0, 1, "F(y): the predicted share below what happened"), Axis(0, 1.1 * max(heights), "share"))
    chart.mark("fill s1", bars(chart, list(zip(edges, edges[1:], heights, strict=False))))
    chart.mark("line ideal", line(chart, [(0, 1 / BINS), (1, 1 / BINS)]))
    return chart.svg("Histogram of F(y): flat if predictions are right")


def grouped(std: Tensor, error: Tensor, groups: int = GROUPS) -> list[Point]:
    """(root mean square of std, of error) in groups of equal size, by rising std."""
    order = std.flatten().argsort(stable=True)
    pairs = zip(std.flatten()[order].tensor_split(groups), error.flatten()[order].tensor_split(groups), strict=True)
    return [(_rms(s), _rms(e)) for s, e in pairs if len(s)]


def _rms(values: Tensor) -> float:
    return float(values.double().square().mean().sqrt())


def spread(facts: ReportFacts) -> str:
    """Root mean squared error against predicted standard deviation, of each predictor."""
    found = {}
    for style, one in styles(facts):
        if one.interval is not None:
            y = one.prediction.likelihood.aligned(one.prediction.f_mean, facts.targets)
            found[style] = grouped(one.prediction.std.double(), one.prediction.mean.double() - y)
    top = 1.05 * max(v for points in found.values() for p in points for v in p)
    chart = Chart(Axis(0, top, "predicted standard deviation of y"), Axis(0, top, "root mean squared error"))
    chart.mark("line ideal", line(chart, [(0, 0), (top, top)]))
    for style, points in found.items():
        chart.mark(f"line {style}", line(chart, points))
        chart.mark(f"dots {style}", dots(chart, points, 3.5))
    return chart.svg("Root mean squared error against predicted standard deviation")


def risk(facts: ReportFacts) -> str:
    """Mean loss of those that are answered."""
    curves = {}
    for style, one in styles(facts):
        if one.risk is not None:
            curves[style] = _thinned(one.risk.coverage.tolist(), one.risk.risk.tolist())
    top = max((v for points in curves.values() for _, v in points), default=0.0) or 1.0
    what = "share of wrong labels" if facts.fits[0].classes else "mean absolute error"
    chart = Chart(Axis(0, 1, "coverage: share of inputs answered, the surest first"), Axis(0, 1.05 * top, what))
    for style, points in curves.items():
        chart.mark(f"line {style}", line(chart, points))
    return chart.svg("Risk against coverage")


def _thinned(x: list[float], y: list[float]) -> list[Point]:
    step = -(-len(x) // POINTS)
    kept = [*range(0, len(x) - 1, step), len(x) - 1]
    return [(x[k], y[k]) for k in kept]


def novelty(known: Tensor, unknown: Tensor | None) -> str:
    """Histograms of ood_score, on a logarithmic scale where all scores are positive."""
    known = known.double().cpu()
    scores = known if unknown is None else torch.cat([known, unknown.double().cpu()])
    low, high = float(scores.min()), float(scores.max())
    if log := low > 0 and high > 4 * low:
        edges = torch.logspace(math.log10(low), math.log10(high), COLUMNS + 1, dtype=torch.float64).tolist()
    else:
        high = high if high > low else low + 1.0
        edges = torch.linspace(low, high, COLUMNS + 1, dtype=torch.float64).tolist()
    found = {"fill s1": histogram(known, edges)}
    if unknown is not None:
        found["fill s0"] = histogram(unknown, edges)
    top = 1.1 * max(v for heights in found.values() for v in heights)
    chart = Chart(Axis(edges[0], edges[-1], "ood_score", log), Axis(0, top, "share"))
    for style, heights in found.items():
        chart.mark(style, bars(chart, list(zip(edges, edges[1:], heights, strict=False))))
    return chart.svg("Histogram of ood_score")


def trace(values: Sequence[float], what: str) -> str:
    """A number after each step of a tuning."""
    steps = [float(k) for k in range(1, len(values) + 1)]
    ends = around(steps)
    ticks = tuple((v, label) for v, label in ends.marks() if v == int(v))
    chart = Chart(Axis(ends.low, ends.high, "step", ticks=ticks), around(values, what), height=250)
    points = list(zip(steps, values, strict=True))
    chart.mark("line s1", line(chart, points))
    chart.mark("dots s1", dots(chart, points))
    return chart.svg(f"{what} after each step of the tuning")
