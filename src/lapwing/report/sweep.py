"""The evidence and the predictions of a fit as its prior precision is multiplied by c, everything else held.

    log Z(c) = fit − quadratic − occam,        f ~ N(·, J (G + c A)⁻¹ Jᵀ)        for c from 1/100 to 100

Held are the noise, the mean that predictions are about, and a calibration, so that at c = 1 predictions are the fit's
own. A calibration that leaves nothing to the prior is left out instead, as replace(prior=...) does. Where the tangent
center would take passes over the data at each c, the evidence is that at the trained weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lapwing import tree
from lapwing.data import ranks_of
from lapwing.evidence import Evidence
from lapwing.report.facts import ReportFacts, Scored, scored

DECADES, EACH = 2, 4  # to both sides, and steps in each
FACTORS = tuple(10 ** (k / EACH) for k in range(-DECADES * EACH, DECADES * EACH + 1))
CHOSEN = DECADES * EACH  # the place of c = 1
EXAMPLES = 1000  # of the test data, at most
STILL = 1e-3  # nats an example


@dataclass(frozen=True, eq=False)
class Step:
    """At one prior precision."""

    factor: float  # c
    terms: Evidence
    scored: Scored


@dataclass(frozen=True, eq=False)
class Sweep:
    """Steps by rising precision; that of the fit is at CHOSEN."""

    steps: tuple[Step, ...]
    precision: float | None  # λ of the fit, where it is one number
    center: str  # where the evidence is taken
    inputs: Any
    targets: Tensor  # of the test examples that are predicted
    own: Scored  # what the fit itself predicts of them
    left_out: str = ""  # the calibration that steps predict without

    @property
    def best(self) -> Step:
        """Where the evidence is highest."""
        return max(self.steps, key=lambda step: float(step.terms.log_evidence))

    @property
    def still(self) -> bool:
        """Whether predictions hardly move: their NLL, by less than STILL."""
        return _still([step.scored for step in self.steps])


def over_priors(fit: Any, facts: ReportFacts) -> Sweep | str:
    """Over the prior precision, at up to EXAMPLES of the test data; or why there is none."""
    if reason := _without(fit):
        return reason
    x, y = facts.inputs, facts.targets
    if fit.tangent.separable(x):
        some = slice(0, None, -(-len(y) // EXAMPLES))
        x, y = tree.rows_of(x, some), y[some]
    center = _center(fit)
    priors, left_out = [fit.prior.scaled(c) for c in FACTORS], ""
    with torch.no_grad():
        terms = [_terms(fit.replace(prior=prior), fit.center, center) for prior in priors]
        # the fit's own mean and calibration, which replace() forgets
        found = [scored("", dataclasses.replace(fit, prior=prior).predict(x), y) for prior in priors]
        own = found[CHOSEN]
        if getattr(fit, "calibration", None) is not None and _still(found):
            left_out = str(fit.calibration)
            found = [scored("", fit.replace(prior=prior).predict(x), y) for prior in priors]
    values = fit.prior.precision.detach().reshape(-1)
    precision = float(values[0]) if values.numel() == 1 else None
    return Sweep(tuple(map(Step, FACTORS, terms, found)), precision, center, x, y, own, left_out)


def _without(fit: Any) -> str:
    prior = getattr(fit, "prior", None)
    if not hasattr(fit, "decompose"):
        return "This posterior has no evidence with terms to show, and no prior that could be moved after the fit."
    if prior is None or not prior.gaussian:
        return f"The prior ({'none' if prior is None else prior.kind}) has no precision to move."
    if getattr(fit, "streams", False):
        return "Matrix-free posteriors are solved for anew under each prior, so this page has one prior alone."
    return ""


def _center(fit: Any) -> str:
    """The fit's own where J is in memory, all of them in this process, so that each v* is cheap."""
    if fit.center == "map" or ranks_of(fit.data).group is not None:
        return "map"
    known = fit.state.memo.jacobian
    held = known is not None and known.held and known.batches is fit.data
    return str(fit.center) if held else "map"


def _terms(fit: Any, own: str, center: str) -> Evidence:
    return fit.decompose() if center == own else fit.decompose(center)


def _still(found: Sequence[Scored]) -> bool:
    nll = [one.scores["nll"] for one in found]
    return max(nll) - min(nll) < STILL
