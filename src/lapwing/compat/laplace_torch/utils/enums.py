"""The words that laplace-torch takes, as its own enumerations of strings; either is taken anywhere."""

from __future__ import annotations

from enum import Enum


class SubsetOfWeights(str, Enum):
    """Which weights are Bayesian."""

    ALL = "all"
    LAST_LAYER = "last_layer"
    SUBNETWORK = "subnetwork"


class HessianStructure(str, Enum):
    """What is kept of the curvature."""

    FULL = "full"
    KRON = "kron"
    DIAG = "diag"
    LOWRANK = "lowrank"
    GP = "gp"


class FunctionalApproximation(str, Enum):
    """How `hessian_structure="gp"` is made affordable."""

    SOD = "sod"
    NYSTROM = "nystrom"
    VARIATIONAL = "variational"


class Likelihood(str, Enum):
    """What the outputs mean."""

    REGRESSION = "regression"
    CLASSIFICATION = "classification"
    REWARD_MODELING = "reward_modeling"


class PredType(str, Enum):
    """Predictions of the linearized network, of samples run through it, or of a process."""

    GLM = "glm"
    NN = "nn"
    GP = "gp"


class LinkApprox(str, Enum):
    """From a Gaussian over logits to probabilities."""

    MC = "mc"
    PROBIT = "probit"
    BRIDGE = "bridge"
    BRIDGE_NORM = "bridge_norm"


class TuningMethod(str, Enum):
    """How a prior precision is chosen."""

    MARGLIK = "marglik"
    GRIDSEARCH = "gridsearch"


class PriorStructure(str, Enum):
    """One prior precision in all, one for each parameter tensor, or one for each weight."""

    SCALAR = "scalar"
    DIAG = "diag"
    LAYERWISE = "layerwise"
