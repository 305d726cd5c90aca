"""laplace-torch's calls on Lapwing: `from lapwing.compat.laplace_torch import Laplace, marglik_training`.

Every name of `laplace.__all__` is here; ELLA and VaLLA raise when they are made. `utils` has the masks of subnetworks,
`curvature` the names of backends. What is not carried over: docs/guide/migrating.md.
"""

from lapwing.compat.laplace_torch.absent import ELLA, VaLLA
from lapwing.compat.laplace_torch.base import BaseLaplace
from lapwing.compat.laplace_torch.diag import DiagLaplace
from lapwing.compat.laplace_torch.full import FullLaplace
from lapwing.compat.laplace_torch.functional import BaseFunctionalLaplace, FunctionalLaplace
from lapwing.compat.laplace_torch.kron import KronLaplace
from lapwing.compat.laplace_torch.laplace import Laplace
from lapwing.compat.laplace_torch.last_layer import (
    DiagLLLaplace,
    FullLLLaplace,
    FunctionalLLLaplace,
    KronLLLaplace,
    LLLaplace,
)
from lapwing.compat.laplace_torch.lowrank import LowRankLaplace
from lapwing.compat.laplace_torch.marglik_training import marglik_training
from lapwing.compat.laplace_torch.parametric import ParametricLaplace
from lapwing.compat.laplace_torch.subnet import DiagSubnetLaplace, FullSubnetLaplace, SubnetLaplace
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

__all__ = [
    "ELLA",
    "BaseFunctionalLaplace",
    "BaseLaplace",
    "DiagLLLaplace",
    "DiagLaplace",
    "DiagSubnetLaplace",
    "FullLLLaplace",
    "FullLaplace",
    "FullSubnetLaplace",
    "FunctionalApproximation",
    "FunctionalLLLaplace",
    "FunctionalLaplace",
    "HessianStructure",
    "KronLLLaplace",
    "KronLaplace",
    "LLLaplace",
    "Laplace",
    "Likelihood",
    "LinkApprox",
    "LowRankLaplace",
    "ParametricLaplace",
    "PredType",
    "PriorStructure",
    "SubnetLaplace",
    "SubsetOfWeights",
    "TuningMethod",
    "VaLLA",
    "marglik_training",
]
