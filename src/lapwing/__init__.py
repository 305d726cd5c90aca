"""Lapwing turns a trained PyTorch network into a Bayesian one: error bars, evidence, and the prior and noise that
the evidence picks."""

from lapwing import (
    conformal,
    curvature,
    distributed,
    errors,
    gp,
    likelihoods,
    metrics,
    operators,
    predictive,
    priors,
    scores,
    selection,
    subsets,
    tangent,
    training,
    tune,
)
from lapwing.api import Laplace, from_state, laplace, load
from lapwing.curvature import accumulate
from lapwing.doctor import doctor
from lapwing.merging import merge
from lapwing.posterior import condition
from lapwing.predictive import Prediction, predict
from lapwing.selection import compare
from lapwing.tangent import linearize
from lapwing.training import OnlineEvidence

__version__ = "0.1.0"

__all__ = [
    "Laplace",
    "OnlineEvidence",
    "Prediction",
    "accumulate",
    "compare",
    "condition",
    "conformal",
    "curvature",
    "distributed",
    "doctor",
    "errors",
    "from_state",
    "gp",
    "laplace",
    "likelihoods",
    "linearize",
    "load",
    "merge",
    "metrics",
    "operators",
    "predict",
    "predictive",
    "priors",
    "scores",
    "selection",
    "subsets",
    "tangent",
    "training",
    "tune",
]
