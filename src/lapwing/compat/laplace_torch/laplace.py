"""`Laplace(model, likelihood, subset_of_weights, hessian_structure, ...)`: the estimator that the words mean."""

from __future__ import annotations

from typing import Any

from torch import nn

from lapwing.compat.laplace_torch.base import BaseLaplace
from lapwing.compat.laplace_torch.diag import DiagLaplace
from lapwing.compat.laplace_torch.full import FullLaplace
from lapwing.compat.laplace_torch.functional import FunctionalLaplace
from lapwing.compat.laplace_torch.kron import KronLaplace
from lapwing.compat.laplace_torch.last_layer import DiagLLLaplace, FullLLLaplace, FunctionalLLLaplace, KronLLLaplace
from lapwing.compat.laplace_torch.lowrank import LowRankLaplace
from lapwing.compat.laplace_torch.subnet import DiagSubnetLaplace, FullSubnetLaplace
from lapwing.compat.laplace_torch.utils.enums import (
    FunctionalApproximation,
    HessianStructure,
    Likelihood,
    SubsetOfWeights,
)
from lapwing.errors import InvalidValue, Unsupported

ESTIMATORS: dict[tuple[str, str], type[BaseLaplace]] = {
    cls._key: cls
    for cls in (
        *(FullLaplace, KronLaplace, DiagLaplace, LowRankLaplace, FunctionalLaplace),
        *(FullLLLaplace, KronLLLaplace, DiagLLLaplace, FunctionalLLLaplace),
        *(FullSubnetLaplace, DiagSubnetLaplace),
    )
}


def Laplace(
    model: nn.Module,
    likelihood: Likelihood | str,
    subset_of_weights: SubsetOfWeights | str = SubsetOfWeights.LAST_LAYER,
    hessian_structure: HessianStructure | str = HessianStructure.KRON,
    *args: Any,
    functional_approximation: FunctionalApproximation | str = FunctionalApproximation.SOD,
    **kwargs: Any,
) -> Any:
    """An estimator over all weights, the last layer or a subnetwork, with a structure of its curvature; the other
    arguments are that estimator's (`BaseLaplace`)."""
    subset, structure = SubsetOfWeights(subset_of_weights), HessianStructure(hessian_structure)
    _check_approximation(FunctionalApproximation(functional_approximation), structure)
    try:
        estimator = ESTIMATORS[subset.value, structure.value]
    except KeyError as error:
        known = ", ".join(f"{s} with {h}" for s, h in ESTIMATORS)
        raise InvalidValue(f"there is no {subset.value} with {structure.value}; there is {known}") from error
    return estimator(model, likelihood, *args, **kwargs)


def _check_approximation(approximation: FunctionalApproximation, structure: HessianStructure) -> None:
    if approximation == FunctionalApproximation.SOD:
        return
    if structure != HessianStructure.GP:
        raise InvalidValue(
            f"functional_approximation belongs to hessian_structure='gp', and this is '{structure.value}'"
        )
    raise Unsupported(
        f"functional_approximation='{approximation.value}' is not carried over; Nyström features of the tangent kernel "
        "are those of lapwing.gp.ella"
    )
