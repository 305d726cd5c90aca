"""What the slider of the prior precision moves: for each name, what each step shows, an attribute `d` or a text.

    {"chosen": k, "values": {name: [at step 0, at step 1, ...]}}         embedded as JSON, read by page.js

The evidence is drawn by its terms, each as its difference to the chosen prior, so that all share one scale in nats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lapwing.report.charts import Axis, Chart, around, dots, line, percent, short, signed, uprights
from lapwing.report.diagrams import reliability_marks, shares
from lapwing.report.facts import Scored
from lapwing.report.sweep import CHOSEN, Sweep

SHOWN = 48  # test examples with error bars
ROOM = 1.3  # nats shown, beyond what the terms move by within a decade
TERMS = {"fit": "t-fit", "quadratic": "t-quadratic", "occam": "t-occam"}


@dataclass(frozen=True)
class Moving:
    """Charts at the chosen prior, and what to put in their place at the others."""

    evidence: str
    predictions: str
    what: str  # what the second chart shows
    values: dict[str, list[str]]

    def payload(self) -> dict[str, Any]:
        """For the page's script."""
        return {"chosen": CHOSEN, "values": self.values}


def moving(sweep: Sweep) -> Moving:
    """The charts and readings of a sweep."""
    values: dict[str, list[str]] = {}
    evidence = _evidence(sweep, values)
    first = sweep.steps[0].scored
    if first.classes:
        what, chart = "reliability", _reliability(sweep, values)
    elif first.interval is not None:
        what, chart = "error bars", _error_bars(sweep, values)
    else:
        what, chart = "", ""
    _readings(sweep, values)
    return Moving(evidence, chart, what, values)


def deltas(sweep: Sweep) -> dict[str, list[float]]:
    """{term: its share in log Z, less that at the chosen prior}, at each step; and "log_evidence"."""
    signs = {"log_evidence": 1, "fit": 1, "quadratic": -1, "occam": -1}
    out = {}
    for name, sign in signs.items():
        each = [sign * float(getattr(step.terms, name)) for step in sweep.steps]
        out[name] = [v - each[CHOSEN] for v in each]
    return out


def _precisions(sweep: Sweep) -> list[float]:
    return [step.factor * (sweep.precision or 1.0) for step in sweep.steps]


def _evidence(sweep: Sweep, values: dict[str, list[str]]) -> str:
    at, found = _precisions(sweep), deltas(sweep)
    near = [v for each in found.values() for v in each[CHOSEN - 4 : CHOSEN + 5]]
    reach = ROOM * max(max(abs(v) for v in near), 1e-9)
    low, high = max(-reach, min(map(min, found.values()))), min(reach, max(map(max, found.values())))
    label = "prior precision" if sweep.precision else "prior precision × c"
    ends = around([low, high])
    chart = Chart(Axis(at[0], at[-1], label, log=True), Axis(ends.low, ends.high, "nats, less those at the chosen"))
    for name, style in TERMS.items():
        chart.mark(f"line {style}", line(chart, list(zip(at, found[name], strict=True))))
    points = list(zip(at, found["log_evidence"], strict=True))
    chart.mark("line s1 strong", line(chart, points))
    chart.mark("line ideal", line(chart, [(at[CHOSEN], ends.low), (at[CHOSEN], ends.high)]))
    values["marker"] = [dots(chart, [p], 6) for p in points]
    chart.mark("dots s1", values["marker"][CHOSEN], "marker")
    return chart.svg("Log evidence and its terms over the prior precision")


def _reliability(sweep: Sweep, values: dict[str, list[str]]) -> str:
    chart = shares("confidence: what it says", "accuracy: how often it is right")
    marks = [reliability_marks(chart, _known(step.scored.reliability)) for step in sweep.steps]
    values["curve"], values["discs"] = [m[0] for m in marks], [m[1] for m in marks]
    chart.mark("line s1 faint", reliability_marks(chart, _known(sweep.own.reliability))[0])
    chart.mark("line s1", values["curve"][CHOSEN], "curve")
    chart.mark("dots s1", values["discs"][CHOSEN], "discs")
    return chart.svg("Reliability at the prior precision of the slider")


def _error_bars(sweep: Sweep, values: dict[str, list[str]]) -> str:
    """Of the first target, over the input where that is one number, else in order of the mean."""
    chosen = sweep.steps[CHOSEN].scored
    mean, y = _first(chosen.prediction.mean), _first(_targets(chosen, sweep.targets))
    alone = isinstance(sweep.inputs, Tensor) and sweep.inputs[0].numel() == 1
    order = (sweep.inputs.flatten() if alone else mean).argsort(stable=True)
    rows = order[torch.linspace(0, len(order) - 1, min(SHOWN, len(order))).round().long()]
    at = sweep.inputs.flatten()[rows].tolist() if alone else [float(k) for k in range(1, len(rows) + 1)]
    low, high = (_first(end)[rows] for end in _known(chosen.interval))
    ends = around([*low.tolist(), *high.tolist(), *y[rows].tolist()], "y", pad=0.15)
    label = "input" if alone else "test examples, by their predicted mean"
    chart = Chart(around(at, label), ends)
    for step in sweep.steps:
        spans = zip(at, *(_first(end)[rows].tolist() for end in _known(step.scored.interval)), strict=True)
        values.setdefault("bars", []).append(uprights(chart, spans))
    chart.mark("bars s1", values["bars"][CHOSEN], "bars")
    chart.mark("dots s1", dots(chart, list(zip(at, mean[rows].tolist(), strict=True)), 2.4))
    chart.mark("dots seen", dots(chart, list(zip(at, y[rows].tolist(), strict=True)), 2.4))
    return chart.svg("95 % error bars of test examples at the prior precision of the slider")


def _targets(one: Scored, y: Tensor) -> Tensor:
    return one.prediction.likelihood.aligned(one.prediction.f_mean, y)


def _first(values: Tensor) -> Tensor:
    """(n,): the first of what each example has."""
    return values.reshape(len(values), -1)[:, 0].double().cpu()


def _known(value: Any) -> Any:
    assert value is not None
    return value


def _readings(sweep: Sweep, values: dict[str, list[str]]) -> None:
    steps, at = sweep.steps, _precisions(sweep)
    values["precision"] = [f"{v:.3g}" if sweep.precision else f"× {v:.3g}" for v in at]
    for name in ("log_evidence", "fit", "quadratic", "occam"):
        values[name] = [signed(f"{float(getattr(step.terms, name)):,.2f}") for step in steps]
    values["nll"] = [signed(f"{step.scored.scores['nll']:.4f}") for step in steps]
    for name, say in (("ece", "{:.4f}".format), ("confidence", percent), ("coverage", percent), ("sharpness", short)):
        if name in steps[0].scored.scores:
            values[name] = [say(step.scored.scores[name]) for step in steps]
