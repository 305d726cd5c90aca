"""Whether events of probability p happen a fraction p of the time.

    ECE   Σ_b (n_b / n) |accuracy_b − confidence_b|      over bins b of confidence = max p

Bins are of equal width, [k/B, (k+1)/B), or adaptive: of equal counts, where equal confidences stay together.
Classwise, each class's own p is binned against 1[y = class], and the classes' errors are averaged (Kull et al. 2019;
with adaptive bins, Nixon et al. 2019).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lapwing.errors import InvalidValue
from lapwing.metrics.inputs import class_probs, of_arrays
from lapwing.predictive import Prediction
from lapwing.predictive.plot import axes_of

BINS = 15


@dataclass(frozen=True, eq=False)
class Reliability:
    """Predictions by bins of confidence; empty bins are left out."""

    confidence: Tensor  # (b,), mean of each bin
    accuracy: Tensor  # (b,)
    count: Tensor  # (b,), predictions in the bin

    @property
    def ece(self) -> float:
        """The expected calibration error: Σ_bins count·|accuracy − confidence| over the count of all."""
        return float((self.count * (self.accuracy - self.confidence).abs()).sum() / self.count.sum())

    def plot(self, ax: Any = None) -> Any:
        """A figure of accuracy against confidence, over how many predictions are where (needs matplotlib). ax: axes to
        draw in, one, or two for the counts too."""
        several = ax is None or hasattr(ax, "flat") or isinstance(ax, (list, tuple))
        axes, *below = axes_of(ax, "reliability.plot()", (4, 4.6), 1 + several, heights=(4, 1) if several else None)
        axes.plot([0, 1], [0, 1], "--", color="gray", lw=1, label="calibrated")
        confidence, accuracy, count = (t.cpu().numpy() for t in (self.confidence, self.accuracy, self.count))
        axes.plot(confidence, accuracy, "o-", color="#0072B2", label=f"ECE {self.ece:.3f}")
        axes.set_ylabel("accuracy")
        axes.legend()
        for counts in below:
            counts.bar(confidence, count, width=0.5 / BINS, color="#0072B2")
            counts.set_ylabel("count")
            counts.set_xlim(axes.get_xlim())
        (axes, *below)[-1].set_xlabel("confidence")
        return axes.figure


@of_arrays
def reliability(predicted: Prediction | Tensor, y: Tensor, bins: int = BINS, *, adaptive: bool = False) -> Reliability:
    """Accuracy and confidence of the most probable class, by bins of confidence."""
    p, y = class_probs(predicted, y)
    confidence, label = p.flatten(0, -2).max(-1)
    return _binned(confidence, label == y.flatten(), bins, adaptive)


@of_arrays
def ece(
    predicted: Prediction | Tensor, y: Tensor, bins: int = BINS, *, adaptive: bool = False, classwise: bool = False
) -> float:
    """The expected calibration error of the most probable class, or classwise the mean over classes of each one's."""
    if not classwise:
        return reliability(predicted, y, bins, adaptive=adaptive).ece
    p, y = class_probs(predicted, y)
    columns = p.flatten(0, -2).mT.contiguous()  # (c, n)
    each = [_binned(column, y.flatten() == c, bins, adaptive).ece for c, column in enumerate(columns)]
    return sum(each) / len(each)


def _binned(confidence: Tensor, happened: Tensor, bins: int, adaptive: bool) -> Reliability:
    if bins < 1:
        raise InvalidValue(f"bins must be at least 1, got {bins}")
    inner = torch.arange(1, bins, device=confidence.device)
    edges = confidence.sort().values[inner * len(confidence) // bins] if adaptive else inner.double() / bins
    index = torch.bucketize(confidence, edges, right=True)  # how many edges lie at or below
    count = torch.bincount(index, minlength=bins).double()
    kept = count > 0

    def mean(values: Tensor) -> Tensor:
        return torch.bincount(index, weights=values.double(), minlength=bins)[kept] / count[kept]

    return Reliability(mean(confidence), mean(happened), count[kept])
