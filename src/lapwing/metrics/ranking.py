"""Inputs ranked by a score of uncertainty: the unknown should rank above the known, and the wrong above the right.

    AUROC   P(score of an unknown input > score of a known one), ties count half
    FPR95   the share of unknown inputs that pass as known, at the least threshold that passes 95 % of the known
    AURC    mean over k = 1 … n of the risk at coverage k/n, the mean loss of the k examples of least uncertainty
            (Geifman, Uziel, El-Yaniv 2019)

A threshold passes every input at or below it, so equal scores pass together. Among examples of equal uncertainty the
order is random, and the risk is its expectation. Nothing depends on the order in which inputs are given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lapwing.errors import InvalidValue
from lapwing.metrics.inputs import of_arrays, vector
from lapwing.predictive.plot import axes_of


@of_arrays
def auroc(known: Tensor, unknown: Tensor) -> float:
    """0.5 if the score says nothing, 1 if it tells all unknown inputs from all known ones."""
    known, unknown = _scores(known, unknown)
    below = torch.searchsorted(known, unknown, right=False)
    at_or_below = torch.searchsorted(known, unknown, right=True)
    return float((below + at_or_below).double().mean() / (2 * len(known)))


@of_arrays
def fpr95(known: Tensor, unknown: Tensor) -> float:
    """Of unknown inputs, the share that passes where 95 % of known inputs do: 0.95 if the score says nothing."""
    known, unknown = _scores(known, unknown)
    passing = -(-95 * len(known) // 100)  # ⌈0.95 n⌉, in integers
    return float((unknown <= known[passing - 1]).double().mean())


def _scores(known: Tensor, unknown: Tensor) -> tuple[Tensor, Tensor]:
    """Both flat, the known sorted."""
    known, unknown = vector(known, "the scores of known inputs"), vector(unknown, "the scores of unknown inputs")
    return known.sort().values, unknown.to(known.device)


@dataclass(frozen=True, eq=False)
class SelectiveRisk:
    """The mean loss of the examples that are answered, the most certain first."""

    coverage: Tensor  # (n,), 1/n … 1
    risk: Tensor  # (n,), mean loss of those answered; the last is that of all

    @property
    def aurc(self) -> float:
        """The area under it: the mean risk over all coverages."""
        return float(self.risk.mean())

    def plot(self, ax: Any = None) -> Any:
        """A figure of risk against coverage (needs matplotlib). ax: axes to draw in."""
        (axes,) = axes_of(ax, "selective_risk.plot()", (4.5, 3.5))
        axes.plot(self.coverage.cpu().numpy(), self.risk.cpu().numpy(), color="#0072B2", label=f"AURC {self.aurc:.4f}")
        axes.set_xlabel("coverage: share of inputs answered")
        axes.set_ylabel("risk: mean loss of those answered")
        axes.legend()
        return axes.figure


@of_arrays
def selective_risk(uncertainty: Tensor, loss: Tensor) -> SelectiveRisk:
    """Of a loss, such as `1 - accuracy(pred, y, each=True)`, by an uncertainty, such as `1 - pred.probs.amax(-1)`."""
    u, cost = vector(uncertainty, "the uncertainties"), vector(loss, "the losses")
    if len(u) != len(cost):
        raise InvalidValue(f"there are {len(u)} uncertainties and {len(cost)} losses; give one each an example")
    values, group = torch.unique(u, return_inverse=True)  # in rising order
    count = torch.bincount(group, minlength=len(values))
    level = torch.bincount(group, weights=cost.to(u.device), minlength=len(values)) / count  # a group's mean loss
    answered = torch.arange(1, len(u) + 1, device=u.device).double()
    return SelectiveRisk(answered / len(u), level.repeat_interleave(count).cumsum(0) / answered)


@of_arrays
def aurc(uncertainty: Tensor, loss: Tensor) -> float:
    """The area under risk against coverage: low if losses are small, and large only where uncertainty is."""
    return selective_risk(uncertainty, loss).aurc
