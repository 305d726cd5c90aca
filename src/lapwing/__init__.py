"""Lapwing turns a trained PyTorch network into a Bayesian one: error bars, evidence, and the prior and noise that
the evidence picks.

Rooms that a first fit does not need (`LATER`) are imported when they are first named, or when a file holds a class of
theirs.
"""

import importlib
from typing import TYPE_CHECKING, Any

from lapwing import (
    conformal,
    curvature,
    distributed,
    errors,
    likelihoods,
    metrics,
    operators,
    outputs,
    posterior,
    predictive,
    priors,
    registry,
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
from lapwing.log_joint import LogJoint, log_joint
from lapwing.merging import merge
from lapwing.posterior import condition
from lapwing.predictive import Prediction, predict
from lapwing.report import report
from lapwing.selection import compare
from lapwing.shell import Fitted, mixture
from lapwing.tangent import linearize
from lapwing.training import OnlineEvidence

if TYPE_CHECKING:
    from lapwing import ensembles, gp, samplers, testing, truth, variational
    from lapwing.truth import truth_bench

__version__ = "0.2.0"

LATER = ("ensembles", "gp", "samplers", "testing", "truth", "variational")

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


def __getattr__(name: str) -> Any:
    if name in LATER:
        return importlib.import_module(f"lapwing.{name}")
    if name == "truth_bench":
        return importlib.import_module("lapwing.truth").truth_bench
    raise AttributeError(f"module 'lapwing' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _all_rooms() -> None:
    for name in LATER:
        importlib.import_module(f"lapwing.{name}")


registry.later(_all_rooms)
