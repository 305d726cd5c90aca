"""The table of scores: what each is called, what it is, and how it is written."""

from __future__ import annotations

from collections.abc import Callable

from lapwing.report.charts import percent
from lapwing.report.facts import LEVEL, ReportFacts, Scored

Say = Callable[[float], str]
SCORES: dict[str, tuple[str, str, Say]] = {  # name: (shown, what it is, in digits)
    "nll": ("NLL", "−log p, nats an example; low is good", "{:.4f}".format),
    "accuracy": ("accuracy", "share of right labels", percent),
    "confidence": ("confidence", "mean p of the most probable class; should be the accuracy", percent),
    "ece": ("ECE", "calibration error, 15 bins; low is good", "{:.4f}".format),
    "brier": ("Brier", "squared distance to the label, 0 to 2; low is good", "{:.4f}".format),
    "rmse": ("RMSE", "root mean squared error, in the unit of y; low is good", "{:.4g}".format),
    "coverage": (
        "coverage",
        f"share of y within the {100 * LEVEL:.0f} % interval; should be {100 * LEVEL:.0f} %",
        percent,
    ),
    "sharpness": ("width", f"of the {100 * LEVEL:.0f} % interval; small is good, at equal coverage", "{:.4g}".format),
    "aurc": ("AURC", "mean risk over all coverages; low is good", "{:.4g}".format),
}


def table(facts: ReportFacts) -> list[list[str]]:
    """A row for each score, a column for each predictor; the last says what it is."""
    names = [name for name in SCORES if any(name in _scores(one) for one in facts.all)]
    rows = [["", *(one.name for one in facts.all), ""]]
    for name in names:
        label, what, say = SCORES[name]
        cells = [say(_scores(one)[name]) if name in _scores(one) else "–" for one in facts.all]
        rows.append([label, *cells, what])
    return rows


def _scores(one: Scored) -> dict[str, float]:
    return one.scores | ({} if one.risk is None else {"aurc": one.risk.aurc})
