"""Answering only where one is sure: the risk at coverage k/n is the mean loss of the k examples of least uncertainty.

    AURC   mean over k = 1 … n of the risk at coverage k/n   (Geifman, Uziel, El-Yaniv 2019)

Among examples of equal uncertainty the order is random, and the risk is its expectation: it does not depend on the
order in which examples are given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lapwing.errors import InvalidValue, Unsupported
from lapwing.metrics.inputs import vector


@dataclass(frozen=True, eq=False)
class SelectiveRisk:
    """The mean loss of the examples that are answered, the most certain first."""

    coverage: Tensor  # (n,), 1/n … 1
    risk: Tensor  # (n,), mean loss of those answered; the last is that of all

    @property
    def aurc(self) -> float:
        """The area under it: the mean risk over all coverages."""
        return float(self.risk.mean())

    def plot(self) -> Any:
        """A figure of risk against coverage (needs matplotlib)."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise Unsupported(
                "selective_risk.plot() needs matplotlib, which is not installed; pip install 'lapwing[demo]'"
            ) from error
        figure = Figure(figsize=(4.5, 3.5), layout="constrained")
        axes = figure.subplots()
        axes.plot(self.coverage.cpu().numpy(), self.risk.cpu().numpy(), color="#0072B2", label=f"AURC {self.aurc:.4f}")
        axes.set_xlabel("coverage: share of inputs answered")
        axes.set_ylabel("risk: mean loss of those answered")
        axes.legend()
        return figure


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


def aurc(uncertainty: Tensor, loss: Tensor) -> float:
    """The area under risk against coverage: low if losses are small, and large only where uncertainty is."""
    return selective_risk(uncertainty, loss).aurc
