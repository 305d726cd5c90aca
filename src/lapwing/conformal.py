"""Split-conformal sets on top of predictions: whatever the network, they hold y with probability `level`.

A score s(x, y) says how odd y is to the prediction at x. Over n calibration examples, which the fit has not seen, t is
the ⌈(n + 1) level⌉-th smallest score, and {y : s(x, y) ≤ t} holds y with probability at least level, and at most
level + 1/(n + 1) without ties, for examples exchangeable with those; on average over x, not at each.

    normalized    |y − mean| / std                       mean ± t std                       real targets
    quantile      max(q_low − y, y − q_high)             [q_low − t, q_high + t]            the (1 ± level)/2 quantiles
    probability   1 − p_y                                classes of p ≥ 1 − t               the smallest sets on average
    cumulative    Σ p_k, k more probable than y, + ½ p_y     the most probable, up to t     sizes follow difficulty

Each output and position has its own t. Sources: Lei et al. 2018 (normalized), Romano, Patterson and Candès 2019
(quantile), Sadinle, Lei and Wasserman 2019 (probability), Romano, Sesia and Candès 2020 (cumulative, whose random share
of p_y is ½ here).
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing import files, given
from lapwing.curvature.accumulate import check_targets
from lapwing.errors import BrokenFile, InvalidValue, Unsupported
from lapwing.predictive import Prediction

SCHEMA = 1
REAL, CLASSES = ("normalized", "quantile"), ("probability", "cumulative")


@dataclass(frozen=True, eq=False)
class Conformal:
    """Sets of targets at a level, from the scores of calibration examples."""

    score: str
    level: float
    n: int  # calibration examples
    threshold: Tensor  # t, one for each output and position
    likelihood: str

    def interval(self, prediction: Prediction) -> tuple[Tensor, Tensor]:
        """The ends of the interval of y, each of y's shape."""
        self._check(prediction, REAL, "sets")
        if self.score == "normalized":
            away = self.threshold * prediction.std.double()
            return _outward(prediction.mean.double() - away, prediction.mean.double() + away)
        low, high = prediction.interval(self.level)
        return _outward(low.double() - self.threshold, high.double() + self.threshold)

    def sets(self, prediction: Prediction) -> Tensor:
        """Which classes are in the set, (n, ..., classes) bool; it can be empty."""
        self._check(prediction, CLASSES, "interval")
        return _class_scores(prediction, self.score) <= self.threshold.unsqueeze(-1)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one safetensors file, whole or not at all; `lw.conformal.load(path)` reads it."""
        settings = {"score": self.score, "level": self.level, "n": self.n, "likelihood": self.likelihood}
        files.write(path, {"threshold": self.threshold}, {"schema": SCHEMA, **settings}, files.CONFORMAL)

    def _check(self, prediction: Prediction, scores: tuple[str, ...], other: str) -> None:
        if self.score not in scores:
            raise Unsupported(f"score {self.score!r} of {self.likelihood} gives no such thing; use {other}()")
        if prediction.likelihood.name != self.likelihood:
            raise InvalidValue(f"calibrated for {self.likelihood}, asked of a {prediction.likelihood.name} prediction")
        shape = _targets(prediction)[1:]
        if shape != self.threshold.shape:
            raise InvalidValue(
                f"calibrated for targets of shape {tuple(self.threshold.shape)} an example, asked of a prediction of "
                f"{tuple(shape)}"
            )

    def __repr__(self) -> str:
        t = self.threshold
        threshold = f"{float(t):.4g}" if t.numel() == 1 else f"{float(t.min()):.4g} to {float(t.max()):.4g}"
        return f"Conformal({self.score}, level {self.level:g}; {self.n:,} calibration examples; threshold {threshold})"


def load(path: str | os.PathLike[str]) -> Conformal:
    """What `Conformal.save` wrote."""
    tensors, header = files.read(path, SCHEMA, files.CONFORMAL)
    score, level, n, likelihood = (header.get(key) for key in ("score", "level", "n", "likelihood"))
    threshold = tensors.get("threshold")
    if (
        score not in (*REAL, *CLASSES)
        or not (isinstance(level, float) and 0 < level < 1 and isinstance(n, int) and n > 0)
        or not isinstance(likelihood, str)
        or threshold is None
        or not (threshold.is_floating_point() and bool(torch.isfinite(threshold).all()))
    ):
        raise BrokenFile(f"{path} is broken: it does not hold a calibration; save it again")
    return Conformal(score, level, n, threshold, likelihood)


def _outward(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Ends moved by their rounding: the example whose score is the threshold lies on an end, and counts as inside."""
    rounding = 4 * torch.finfo(low.dtype).eps * torch.maximum(low.abs(), high.abs())
    return low - rounding, high + rounding


def calibrate(prediction: Prediction, y: Tensor, level: float = 0.9, score: str = "auto") -> Conformal:
    """From predictions at n inputs that the fit has not seen, and their targets y.

    score: "normalized" or "quantile" for real targets; "probability" or "cumulative" for classes; "auto": the first.
    """
    level = given.share(level, "the level of a conformal set")
    if not isinstance(prediction, Prediction):
        raise InvalidValue(f"calibrate takes a prediction, la.predict(x), got {type(prediction).__name__}")
    classes = prediction.likelihood.classes
    offered = CLASSES if classes else REAL
    score = offered[0] if score == "auto" else score
    if score not in offered:
        raise InvalidValue(f"score for {prediction.likelihood.name} must be 'auto' or one of {offered}, got {score!r}")
    y = prediction.likelihood.aligned(prediction.f_mean, given.targets(y, prediction.f_mean.device))
    check_targets(prediction.likelihood, prediction.f_mean, y)
    rank = math.ceil(round((len(y) + 1) * level, 9))  # 10 · 0.9 is 9, whatever its last digits
    if rank > len(y):
        raise InvalidValue(
            f"level {level} needs {math.ceil(round(level / (1 - level), 9))} calibration examples or more, got {len(y)}"
        )
    if classes:
        scores = _class_scores(prediction, score).gather(-1, y.long().unsqueeze(-1)).squeeze(-1)
    else:
        scores = _real_scores(prediction, y.double(), score, level)
    if not bool(torch.isfinite(scores).all()):
        raise InvalidValue(
            "a calibration score is NaN or infinite: clean the targets, or where y has no variance use score='quantile'"
        )
    threshold = scores.sort(0).values[rank - 1]
    return Conformal(score, level, len(y), threshold, prediction.likelihood.name)


def _targets(prediction: Prediction) -> torch.Size:
    """The shape of y."""
    if not prediction.likelihood.classes:
        return prediction.mean.shape
    return prediction.likelihood.class_probs(prediction.mean).shape[:-1]


def _real_scores(prediction: Prediction, y: Tensor, score: str, level: float) -> Tensor:
    if score == "normalized":
        std = prediction.std.double()
        return torch.where(torch.isfinite(std), (y - prediction.mean).abs() / std, math.nan)
    low, high = prediction.interval(level)
    return torch.maximum(low - y, y - high)


def _class_scores(prediction: Prediction, score: str) -> Tensor:
    """Of each class, (n, ..., classes)."""
    p = prediction.likelihood.class_probs(prediction.probs).double()
    if score == "probability":
        return 1 - p
    ordered, order = p.sort(-1, descending=True)
    return torch.zeros_like(p).scatter(-1, order, ordered.cumsum(-1) - 0.5 * ordered)
