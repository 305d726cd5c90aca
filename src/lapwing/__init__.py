"""Lapwing turns a trained PyTorch network into a Bayesian one: error bars, evidence, and the prior and noise that
the evidence picks."""

from lapwing import (
    conformal,
    curvature,
    distributed,
    ensembles,
    errors,
    gp,
    likelihoods,
    metrics,
    operators,
    outputs,
    posterior,
    predictive,
    priors,
    samplers,
    scores,
    selection,
    subsets,
    tangent,
    testing,
    training,
    truth,
    tune,
    variational,
)
from lapwing.api import Laplace, from_state, laplace, load
from lapwing.curvature import accumulate
from lapwing.doctor import doctor
from lapwing.log_joint import LogJoint, log_joint
from lapwing.merging import merge
from lapwing.posterior import condition
from lapwing.predictive import Prediction, predict
from lapwing.report import report
from lapwing.selection import compare
from lapwing.shell import Fitted, mixture
from lapwing.tangent import linearize
from lapwing.training import OnlineEvidence
from lapwing.truth import truth_bench

__version__ = "0.1.0"

__all__ = [
    "Fitted",
    "Laplace",
    "LogJoint",
    "OnlineEvidence",
    "Prediction",
    "accumulate",
    "compare",
    "condition",
    "conformal",
    "curvature",
    "distributed",
    "doctor",
    "ensembles",
    "errors",
    "from_state",
    "gp",
    "laplace",
    "likelihoods",
    "linearize",
    "load",
    "log_joint",
    "merge",
    "metrics",
    "mixture",
    "operators",
    "outputs",
    "posterior",
    "predict",
    "predictive",
    "priors",
    "report",
    "samplers",
    "scores",
    "selection",
    "subsets",
    "tangent",
    "testing",
    "training",
    "truth",
    "truth_bench",
    "tune",
    "variational",
]
