"""What the doctor hands back: findings, the plan, the treatment of each parameter, and a call; printed in 100 columns.

A finding's message says what, got, do. Costs are counted in gradients, the unit that everyone with a trained network
has a feeling for: `fit`, `tune` and `tangent` in gradient epochs (one forward and backward pass over the training
data), `predict` in gradient passes over the 1,000 inputs predicted. Memory is what comes on top of the model, the data
and torch itself.
"""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from lapwing.doctor.tangent import PASSES, SEEN

WIDTH = 100
SEVERITIES = ("error", "warning", "note", "ok")  # in the order in which they are printed
UNITS = "fit, tune and tangent in gradient epochs, predict in gradient passes over 1,000 inputs"
TYPICAL = (
    "tune: at the trained weights, center='map'; tangent: at the tangent MAP, as tuned() does, with a",
    f"typical {PASSES} passes over the data ({SEEN[0]} to {SEEN[1]} have been seen: how many cannot be told before)",
)
SHOWN = 16  # parameters printed before the rest is folded


@dataclass(frozen=True)
class Finding:
    """One thing that was found, and what to do about it."""

    severity: str  # "ok", "note", "warning" or "error"
    topic: str
    message: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.topic}: {self.message}"

    @classmethod
    def of(cls, severity: str, text: str) -> Finding:
        """From "topic: message"."""
        topic, _, message = text.partition(": ")
        return cls(severity, topic, message)


ok, note, warning, error = (partial(Finding.of, severity) for severity in ("ok", "note", "warning", "error"))


@dataclass(frozen=True)
class Cost:
    """What a structure would take; `tune` and `tangent` are NaN where the number of examples is unknown."""

    memory: int  # bytes at the peak of fit, tune and predict
    fit: float  # gradient epochs
    tune: float  # gradient epochs
    predict: float  # gradient passes over the 1,000 inputs
    fits: bool  # the memory limit
    note: str = ""
    tangent: float = math.nan  # gradient epochs of tuning at the tangent MAP, with a typical number of passes
    each: float = math.nan  # of those, for each pass over the data; where J is in memory, for each round
    memory_at_map: int = 0  # bytes at the peak, where tuning is at the trained weights


@dataclass(frozen=True)
class Report:
    """The doctor's report. `ok` says that nothing stands in the way of a fit."""

    title: str
    findings: tuple[Finding, ...]
    plan: dict[str, Cost]
    parameters: dict[str, str]  # parameter -> treatment under the recommended structure
    shapes: dict[str, tuple[int, ...]]
    recommendation: str  # a call that runs where lw, model, data (and what was passed by name) are; "" if none does
    options: Mapping[str, str] = field(default_factory=dict)  # the arguments of that call by name, as Python
    limit: int = 0  # bytes that the plan was held against
    epoch: float = math.nan  # seconds of one gradient epoch here

    @property
    def ok(self) -> bool:
        """Whether nothing found is an error."""
        return not self.by("error")

    def by(self, severity: str) -> tuple[Finding, ...]:
        """The findings of one severity."""
        return tuple(f for f in self.findings if f.severity == severity)

    def __str__(self) -> str:
        parts = [self.title, "=" * min(WIDTH, len(self.title)), "", *self._findings()]
        parts += self._parameters() + self._plan() + self._recommendation()
        return "\n".join(line.rstrip() for line in parts)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return _page(self)

    # -- sections -------------------------------------------------------------------------------------------------

    def _findings(self) -> list[str]:
        counts = ", ".join(_count(len(self.by(s)), s) for s in SEVERITIES[:3])
        lines = [f"Findings: {counts}"]
        topics = max((len(f.topic) for f in self.findings), default=0)
        for finding in ordered(self.findings):
            head = f"  {finding.severity:<7}  {finding.topic:<{topics}}  "
            lines += textwrap.wrap(
                finding.message, WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False
            )
        return [*lines, ""]

    def _parameters(self) -> list[str]:
        if not self.parameters:
            return []
        total = sum(math.prod(s) for s in self.shapes.values())
        lines = [f"Parameters: {len(self.parameters)} tensors, {total:,} elements"]
        return [*lines, *(f"  {line}" for line in table(parameter_rows(self), right=(2,))), ""]

    def _plan(self) -> list[str]:
        if not self.plan:
            return []
        epoch = f"; a gradient epoch takes about {seconds(self.epoch)} here" if self.epoch == self.epoch else ""
        lines = [f"Plan: within {size(self.limit)}{epoch}", f"  {UNITS}"]
        lines += [f"  {line}" for line in TYPICAL]
        lines += [f"  {line}" for line in table(plan_rows(self), right=(1, 2, 3, 4, 5))]
        return [*lines, ""]

    def _recommendation(self) -> list[str]:
        call = self.recommendation or "none until the errors above are mended"
        return ["Recommended call", *textwrap.wrap(call, WIDTH, initial_indent="  ", subsequent_indent="      ")]


def ordered(findings: Sequence[Finding]) -> list[Finding]:
    """Findings, the most severe first."""
    return sorted(findings, key=lambda f: SEVERITIES.index(f.severity))


# -- rows of the tables, for text and HTML alike -------------------------------------------------------------------


def plan_rows(report: Report) -> list[list[str]]:
    """The table of costs, row by row, with its head."""
    rows = [["structure", "peak memory", "fit", "tune", "tangent", "predict", ""]]
    for name, cost in report.plan.items():
        remark = cost.note if cost.fits else f"{cost.note}, too large".removeprefix(", ")
        rows.append(
            [name, size(cost.memory), *map(significant, (cost.fit, cost.tune, cost.tangent, cost.predict)), remark]
        )
    return rows


def parameter_rows(report: Report) -> list[list[str]]:
    """Parameter, shape, count, treatment; runs past SHOWN are folded by treatment."""
    names = list(report.parameters)
    shown = names if len(names) <= SHOWN else names[: SHOWN // 2] + names[-(SHOWN // 2) + 1 :]
    rows = []
    for i, name in enumerate(shown):
        if len(shown) < len(names) and i == SHOWN // 2:
            rows.append(_folded(report, [n for n in names if n not in set(shown)]))
        shape = report.shapes.get(name, ())
        rows.append([_cut(name, 40), "x".join(map(str, shape)) or "scalar", f"{math.prod(shape):,}"])
        rows[-1].append(report.parameters[name])
    room = WIDTH - 2 - sum(2 + max(len(row[j]) for row in rows) for j in range(3))
    return [[*row[:3], _cut(row[3], room)] for row in rows]


def _folded(report: Report, names: list[str]) -> list[str]:
    count = sum(math.prod(report.shapes.get(n, ())) for n in names)
    treatments = dict.fromkeys(report.parameters[n] for n in names)
    what = next(iter(treatments)) if len(treatments) == 1 else f"{len(treatments)} treatments: see .parameters"
    return [f"... {len(names)} more", "", f"{count:,}", what]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def table(rows: list[list[str]], right: tuple[int, ...]) -> list[str]:
    """Aligned columns, two spaces apart; `right` are set to the right."""
    widths = [max(len(row[j]) for row in rows) for j in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [c.rjust(w) if j in right else c.ljust(w) for j, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip()[: WIDTH - 2])
    return lines


# -- units for people ----------------------------------------------------------------------------------------------


def size(count: float) -> str:
    """Bytes as people read them: 512 B, 3.4 MB, 1.2 GB."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5 or unit == "TB":
            return f"{count:,.0f} {unit}" if unit == "B" or count >= 99.5 else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def seconds(count: float) -> str:
    """A time with its unit: "3.1 ms"."""
    for limit, unit, scale in ((1e-3, "us", 1e6), (1.0, "ms", 1e3), (120.0, "s", 1.0), (7200.0, "min", 1 / 60)):
        if count < limit:
            return f"{significant(count * scale)} {unit}"
    return f"{significant(count / 3600)} h"


def significant(value: float) -> str:
    """Two digits are all that a prediction deserves."""
    if value != value:
        return "?"
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}" if value == 0 else "inf"
    if value < 1e-2:
        return "< 0.01"
    return f"{value:.1f}" if 1 <= value < 10 else f"{value:.2f}" if value < 1 else f"{float(f'{value:.2g}'):,.0f}"


def _count(n: int, what: str) -> str:
    return f"{n or 'no'} {what}{'s' if n != 1 else ''}"


# -- in a notebook -------------------------------------------------------------------------------------------------

_COLORS = {"error": "#b00020", "warning": "#a05a00", "note": "#3a5a8c", "ok": "#2e7d32"}


def _page(report: Report) -> str:
    cell = "padding:2px 10px 2px 0;text-align:left;vertical-align:top"
    body = [f"<div><h4>{html.escape(report.title)}</h4><table>"]
    for f in ordered(report.findings):
        mark = f"<b style='color:{_COLORS[f.severity]}'>{f.severity}</b>"
        body.append(f"<tr><td style='{cell}'>{mark}</td><td style='{cell}'>{html.escape(f.topic)}</td>")
        body.append(f"<td style='{cell}'>{html.escape(f.message)}</td></tr>")
    body.append("</table>")
    for heading, rows in (("Parameters", parameter_rows(report)), ("Plan", plan_rows(report))):
        if not (report.parameters if heading == "Parameters" else report.plan):
            continue
        body.append(f"<h5>{heading}</h5><table>")
        body += ["<tr>" + "".join(f"<td style='{cell}'>{html.escape(c)}</td>" for c in row) + "</tr>" for row in rows]
        body.append("</table>")
    call = html.escape(report.recommendation or "none until the errors above are mended")
    return "".join([*body, f"<h5>Recommended call</h5><pre>{call}</pre></div>"])
