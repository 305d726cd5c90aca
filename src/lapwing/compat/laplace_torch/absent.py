"""Estimators of laplace-torch that are not carried over: they can be imported and asked for, and raise when made."""

from __future__ import annotations

from typing import Any

from lapwing.compat.laplace_torch.functional import BaseFunctionalLaplace
from lapwing.errors import Unsupported


class ELLA(BaseFunctionalLaplace):
    """Nyström features of the tangent kernel: not carried over; `lapwing.gp.ella` is Lapwing's own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise Unsupported("ELLA (functional_approximation='nystrom') is not carried over; use lapwing.gp.ella")


class VaLLA(BaseFunctionalLaplace):
    """Variational inducing points: not carried over."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise Unsupported(
            "VaLLA (functional_approximation='variational') is not carried over; for many data use lapwing.gp.ella, or "
            "lapwing.laplace(..., structure='matrix_free')"
        )
