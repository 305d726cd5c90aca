"""laplace-torch's backends by their names. Here all are one code, and a name only says which curvature is meant:

    ...GGN       generalized Gauss-Newton, Σ Jᵀ Λ J (`stochastic=True`: Λ by sampled targets)
    ...EF        empirical Fisher, Σ Jᵀ r rᵀ J; of regression twice that, as laplace-torch sums it
    ...Hessian   the true Hessian of the negative log-likelihood, for `hessian_structure="full"` and "lowrank"

A class of laplace-torch itself, or of one's own with such a name, is taken by its name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lapwing.curvature import Factor
from lapwing.errors import InvalidValue, Unsupported

__all__ = [
    "AsdfghjklEF",
    "AsdfghjklGGN",
    "AsdfghjklHessian",
    "AsdlEF",
    "AsdlGGN",
    "AsdlHessian",
    "BackPackEF",
    "BackPackGGN",
    "CurvatureInterface",
    "CurvlinopsEF",
    "CurvlinopsGGN",
    "CurvlinopsHessian",
    "EFInterface",
    "GGNInterface",
]


class CurvatureInterface:
    """The base of all backends."""

    factor: ClassVar[str] = ""


class GGNInterface(CurvatureInterface):
    """Generalized Gauss-Newton."""

    factor = "exact"


class EFInterface(CurvatureInterface):
    """The empirical Fisher."""

    factor = "empirical"


class HessianInterface(CurvatureInterface):
    """The true Hessian."""

    factor = "hessian"


def _named(name: str, kind: type[CurvatureInterface]) -> type[CurvatureInterface]:
    return type(name, (kind,), {"__doc__": kind.__doc__, "__module__": __name__})


CurvlinopsGGN = _named("CurvlinopsGGN", GGNInterface)
CurvlinopsEF = _named("CurvlinopsEF", EFInterface)
CurvlinopsHessian = _named("CurvlinopsHessian", HessianInterface)
BackPackGGN = _named("BackPackGGN", GGNInterface)
BackPackEF = _named("BackPackEF", EFInterface)
AsdlGGN = _named("AsdlGGN", GGNInterface)
AsdlEF = _named("AsdlEF", EFInterface)
AsdlHessian = _named("AsdlHessian", HessianInterface)
AsdfghjklGGN = _named("AsdfghjklGGN", GGNInterface)
AsdfghjklEF = _named("AsdfghjklEF", EFInterface)
AsdfghjklHessian = _named("AsdfghjklHessian", HessianInterface)

KINDS = {"GGN": "exact", "EF": "empirical", "Hessian": "hessian"}
KNOWN = {"stochastic", "num_samples", "low_rank", "last_layer"}  # of backend_kwargs


def factor_of(backend: Any, options: dict[str, Any]) -> Factor:
    """The output factor that a backend and its options mean."""
    if unknown := sorted(set(options) - KNOWN):
        raise Unsupported(f"backend_kwargs {unknown} have no meaning here; those that have are {sorted(KNOWN)}")
    name = getattr(backend, "__name__", repr(backend))
    kind = getattr(backend, "factor", "") or next((k for end, k in KINDS.items() if name.endswith(end)), "")
    if not isinstance(kind, str) or kind not in KINDS.values():
        raise InvalidValue(
            f"backend must be a class whose name ends in GGN, EF or Hessian, which says the curvature; got {name}: a "
            "backend that computes something else is not carried over"
        )
    if kind == "exact" and options.get("stochastic"):
        return Factor("monte_carlo", options.get("num_samples", 1))
    return Factor(kind)


@dataclass(frozen=True)
class Backend:
    """`la.backend`: Jacobians, as code written for laplace-torch asks for them."""

    rows: Callable[[Any, bool], tuple[Tensor, Tensor]]

    def jacobians(self, x: Any, enable_backprop: bool = False) -> tuple[Tensor, Tensor]:
        """J (n, c, p) and f (n, c) at inputs, differentiable in them if told."""
        with torch.enable_grad():
            return self.rows(x, enable_backprop)

    last_layer_jacobians = functorch_jacobians = jacobians
