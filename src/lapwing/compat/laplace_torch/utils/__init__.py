"""What laplace-torch keeps in `laplace.utils`, as far as users call it."""

from lapwing.compat.laplace_torch.utils.enums import (
    FunctionalApproximation,
    HessianStructure,
    Likelihood,
    LinkApprox,
    PredType,
    PriorStructure,
    SubsetOfWeights,
    TuningMethod,
)
from lapwing.compat.laplace_torch.utils.matrix import Kron, KronDecomposed

__all__ = [
    "FunctionalApproximation",
    "HessianStructure",
    "Kron",
    "KronDecomposed",
    "Likelihood",
    "LinkApprox",
    "PredType",
    "PriorStructure",
    "SubsetOfWeights",
    "TuningMethod",
]
