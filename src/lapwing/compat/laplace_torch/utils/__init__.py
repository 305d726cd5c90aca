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
from lapwing.compat.laplace_torch.utils.subnetmask import (
    LargestMagnitudeSubnetMask,
    LargestVarianceDiagLaplaceSubnetMask,
    LargestVarianceSWAGSubnetMask,
    LastLayerSubnetMask,
    ModuleNameSubnetMask,
    ParamNameSubnetMask,
    RandomSubnetMask,
    SubnetMask,
)

__all__ = [
    "FunctionalApproximation",
    "HessianStructure",
    "Kron",
    "KronDecomposed",
    "LargestMagnitudeSubnetMask",
    "LargestVarianceDiagLaplaceSubnetMask",
    "LargestVarianceSWAGSubnetMask",
    "LastLayerSubnetMask",
    "Likelihood",
    "LinkApprox",
    "ModuleNameSubnetMask",
    "ParamNameSubnetMask",
    "PredType",
    "PriorStructure",
    "RandomSubnetMask",
    "SubnetMask",
    "SubsetOfWeights",
    "TuningMethod",
]
