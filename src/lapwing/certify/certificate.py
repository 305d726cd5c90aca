"""What a certificate says, in numbers and in words.

A variance here is Σ tr V / Σ tr C − 1 over inputs: V the structure's covariances of outputs, C the true posterior's.
Words tell it as error bars, which are square roots.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from lapwing.solvers import Estimate


@dataclass(frozen=True, eq=False)
class Certificate:
    """Estimates with standard errors and 90 % intervals; 1, 0, 0 and 0 if the structure is exact."""

    trace: Estimate  # tr Ĝ / tr G
    log_det: Estimate  # log|Ĝ + A| − log|G + A|
    variance: Estimate | None  # relative error of the variances at new inputs; None where there is no way to tell
    variance_training: Estimate  # the same at the training inputs
    where: str  # what stood for new inputs: "inputs", those that were given, or "leave-one-out"
    inputs: int  # how many
    n: int  # training examples
    probes: int
    passes: int  # over the data
    residual: float  # the largest of conjugate gradients, ‖j − K x‖ / ‖j‖
    structure: str
    notes: tuple[str, ...] = ()  # what to mind: intervals that were widened, and why

    def __repr__(self) -> str:
        lines = [f"  {name:<17} {shown:<34} {words}" for name, shown, words in self._lines()]
        return "\n".join([self._title(), *lines, *(f"  note: {note}" for note in self.notes)])

    def _repr_html_(self) -> str:
        cells = [[escape(cell) for cell in line] for line in self._lines()]
        lines = [f"<th>{name}</th><td>{shown}</td><td>{words}</td>" for name, shown, words in cells]
        rows = "".join(f"<tr>{line}</tr>" for line in lines)
        notes = "".join(f"<tr><th>note</th><td colspan=2>{escape(note)}</td></tr>" for note in self.notes)
        return f"<table><caption>{escape(self._title())}</caption>{rows}{notes}</table>"

    def _title(self) -> str:
        cost = f"{self.probes} probes, {self.passes} passes over the data"
        return f"Certificate of {self.structure} against the true curvature ({cost})"

    def _lines(self) -> list[tuple[str, str, str]]:
        new = ("not told", "error bars at new inputs: give inputs=")
        if self.variance is not None:
            new = (_shown(self.variance), _error_bars(self.variance, f"at new inputs ({self._place()})"))
        training = _shown(self.variance_training), _error_bars(self.variance_training, "at the training inputs")
        return [
            ("trace", _shown(self.trace), _percent(self.trace - 1, "total curvature is", ("too small", "too large"))),
            ("log_det", _shown(self.log_det), _evidence(self.log_det)),
            ("variance", *new),
            ("variance_training", *training),
        ]

    def _place(self) -> str:
        if self.where == "inputs":
            return f"the {self.inputs:,} given"
        return f"leave-one-out, {self.inputs:,} of {self.n:,} training inputs"


def _evidence(log_det: Estimate) -> str:
    """−½ log|·| enters the evidence."""
    nats = 0.5 * abs(log_det.value)
    if nats < 5e-4:
        return "the log evidence is that of the true curvature"
    how = "lower" if log_det.value > 0 else "higher"
    low, high = log_det.interval
    again = _between(0.5 * low, 0.5 * high, "nats", "{:.3g}")
    return f"the log evidence is {nats:.3g} nats {how} than with the true curvature{again}"


def _error_bars(variance: Estimate, where: str) -> str:
    """Standard deviations, the square roots of variances."""
    low, high = ((1 + v) ** 0.5 - 1 for v in variance.interval)
    width = Estimate((1 + variance.value) ** 0.5 - 1, 0.0, (low, high), variance.samples)
    return _percent(width, f"error bars {where} are", ("too narrow", "too wide"))


def _shown(e: Estimate) -> str:
    if not len(e.samples):
        return f"{e.value:.4g} (exact)"
    return f"{e.value:.4g} ± {e.standard_error:.2g}, 90 % [{e.interval[0]:.4g}, {e.interval[1]:.4g}]"


def _percent(e: Estimate, what: str, signs: tuple[str, str]) -> str:
    if max(abs(v) for v in (e.value, *e.interval)) < 5e-4:
        return f"{what} right"
    low, high = e.interval
    again = _between(100 * low, 100 * high, "%", "{:.1f}") if len(e.samples) else ""
    return f"{what} {100 * abs(e.value):.1f} % {signs[e.value > 0]}{again}"


def _between(low: float, high: float, unit: str, digits: str) -> str:
    """The interval in words: of the size, where its sign is sure."""
    if low * high <= 0:
        return ", which may be chance"
    ends = [digits.format(v) for v in sorted((abs(low), abs(high)))]
    return f" ({ends[0]} to {ends[1]} {unit})"
