"""How good predictions are: `metric(predicted, y)`.

`predicted` is a Prediction, or plain tensors or arrays: class probabilities (n, ..., c); a pair (mean, std) of
Gaussians; draws of y (s, n, ...). Numbers are means over examples; `each=True` gives the examples' own, which `paired`
compares.
"""

from lapwing.metrics.agreement import agreement, total_variation
from lapwing.metrics.calibration import Reliability, ece, reliability
from lapwing.metrics.equivalent import ensemble_equivalent
from lapwing.metrics.joint import dyadic, joint_log_likelihood
from lapwing.metrics.ranking import SelectiveRisk, aurc, auroc, fpr95, selective_risk
from lapwing.metrics.regression import coverage, crps, interval, pit, rmse, sharpness
from lapwing.metrics.scores import accuracy, brier, nll, paired
from lapwing.metrics.usual import summary

__all__ = [
    "Reliability",
    "SelectiveRisk",
    "accuracy",
    "agreement",
    "aurc",
    "auroc",
    "brier",
    "coverage",
    "crps",
    "dyadic",
    "ece",
    "ensemble_equivalent",
    "fpr95",
    "interval",
    "joint_log_likelihood",
    "nll",
    "paired",
    "pit",
    "reliability",
    "rmse",
    "selective_risk",
    "sharpness",
    "summary",
    "total_variation",
]
