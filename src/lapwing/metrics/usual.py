"""The usual metrics of a prediction in one call."""

from __future__ import annotations

from torch import Tensor

from lapwing.metrics.calibration import ece
from lapwing.metrics.inputs import Forecast, of_arrays
from lapwing.metrics.regression import coverage, crps, rmse, sharpness
from lapwing.metrics.scores import accuracy, brier, nll
from lapwing.predictive import Prediction


@of_arrays
def summary(predicted: Forecast, y: Tensor) -> dict[str, float]:
    """{name: value}: accuracy, NLL, Brier and ECE of classes; RMSE, NLL, CRPS, and coverage and sharpness of the 95 %
    interval of real values. A plain tensor is of class probabilities where y are integers, else of draws, which have no
    NLL."""
    known = isinstance(predicted, Prediction)
    of_classes = predicted.likelihood.classes if isinstance(predicted, Prediction) else not y.is_floating_point()
    if of_classes and not isinstance(predicted, tuple):
        return {metric.__name__: metric(predicted, y) for metric in (accuracy, nll, brier, ece)}
    each = (rmse, nll, crps, coverage) if known or isinstance(predicted, tuple) else (rmse, crps, coverage)
    return {metric.__name__: metric(predicted, y) for metric in each} | {"sharpness": sharpness(predicted)}
