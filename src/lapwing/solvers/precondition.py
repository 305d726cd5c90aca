"""Preconditioners of K = G + diag(a), as callables r (k, p) -> M⁻¹ r for `cg`.

    diagonal(diag K)        M = diag K                                                     Jacobi
    nystrom(Ĝ, a)           M = Vᵀ diag(l − l_k) V + diag(l_k + a),   Ĝ = Vᵀ diag(l) V       l_k the least of l

The second is Frangella, Tropp and Udell's (2023), to a constant, where a is one number. A fitted structure is a
preconditioner too: functools.partial(linalg.solve, posterior.precision), with Kronecker factors among others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lapwing.errors import InvalidValue, NotPositiveDefinite
from lapwing.solvers.nystrom import Nystrom
from lapwing.solvers.product import Product


def diagonal(values: Tensor) -> Product:
    """M = diag(values), (p,)."""
    _positive(values, "the diagonal of the matrix")
    return lambda r: r / values.to(r)


def nystrom(found: Nystrom, shift: float | Tensor) -> Product:
    """M for K = G + diag(shift), shift one number or (p,), from an approximation of G."""
    p = found.vectors.shape[-1]
    a = torch.as_tensor(shift, dtype=torch.float64, device=found.values.device)
    if a.ndim and a.shape != (p,):
        raise InvalidValue(f"shift must be one number or one for each of {p} entries, got shape {tuple(a.shape)}")
    _positive(a, "the shift")
    least = found.values[-1]
    d = (least + a).expand(p)
    root = (found.values - least).sqrt().unsqueeze(-1) * found.vectors  # (k, p)
    over = root / d
    inner = torch.linalg.cholesky(torch.eye(len(root), dtype=d.dtype, device=d.device) + over @ root.mT)
    return lambda r: r.to(d) / d - torch.cholesky_solve(over @ r.to(d).mT, inner).mT @ over


def _positive(values: Tensor, what: str) -> None:
    if not bool((torch.isfinite(values) & (values > 0)).all()):
        raise NotPositiveDefinite(f"a preconditioner needs {what} positive and finite, got {float(values.min()):.3g}")
