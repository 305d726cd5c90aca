"""The evidence's slope in hyperparameters η of the network itself (gates, bounds of augmentations), through J.

    ∂η log Z = ∂η log p(D | θ, η) − ½ tr[Σ ∂η G],      Σ = (G + A)⁻¹, θ held

which is the gradient of a sum over data, with Σ = E[z zᵀ] held:

    L(η) = Σ_n log p(y_n | f_n(η)) − ½ Σ_n E_z ‖S_nᵀ J_n(η) z‖²,      S_n Sᵀ_n = Λ_n(f_n(η))

Exact for few parameters (z: the columns of a root of Σ), else by draws z ~ N(0, Σ), which are unbiased; so are batches,
since L is a sum. Exact for structures full, block and diag, whose own log-determinant this differentiates; with kron,
Σ is the Kronecker posterior's and G the Gauss-Newton matrix that it stands for.

Shapes: n data, c outputs, k columns of S, r vectors z (r, p).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.func import jvp, vmap

from lapwing.curvature import State
from lapwing.curvature.accumulate import flat_outputs, flat_targets
from lapwing.data import passes
from lapwing.errors import InvalidValue
from lapwing.operators import linalg
from lapwing.posterior import condition
from lapwing.tangent import TangentModel
from lapwing.tangent.evaluating import evaluating
from lapwing.tangent.kernels import plain_kernels

EXACT = 256  # parameters up to which the trace is exact
CHUNK = 32  # vectors z that are pushed through the network at once


@dataclass(frozen=True, eq=False)
class Surrogate:
    tangent: TangentModel
    likelihood: Any
    z: Tensor  # (r, p), with mean of squares Σ: zᵀz·weight = Σ, or so in expectation
    weight: float

    def __call__(self, eta: Mapping[str, Tensor], x: Any, y: Tensor) -> Tensor:
        """L(η) of a batch, 0-dim float64, differentiable in η."""
        moved = replace(self.tangent, constants={**self.tangent.constants, **eta})
        vectors = self.tangent.layout.unflatten(self.z.to(self.tangent.dtype))

        def push(v: dict[str, Tensor]) -> Tensor:
            return jvp(lambda p: moved.apply(p, x), (self.tangent.params,), (v,))[1]

        with evaluating(self.tangent.model), plain_kernels():
            f = moved.apply(self.tangent.params, x)
            pushed = vmap(push, chunk_size=CHUNK)(vectors)  # J z (r, n, ..., c)
        flat, targets = flat_outputs(f), flat_targets(f, y)
        S = self.likelihood.curvature_root(flat, targets)  # (m, c, k)
        columns = torch.einsum("mck,rmc->rmk", S, pushed.reshape(len(pushed), *flat.shape).to(S))
        weights = self.likelihood.curvature_weights("exact").to(flat.device)
        quadratic = (columns.double().square() * weights).sum()
        return self.likelihood.log_prob(flat, targets).double().sum() - 0.5 * self.weight * quadratic


def surrogate(state: State, prior: Any, likelihood: Any, probes: int, generator: torch.Generator) -> Surrogate:
    """Σ at these hyperparameters as vectors: a root of it where parameters are few, else draws."""
    if state.factor.kind not in ("exact", "monte_carlo"):
        raise InvalidValue(
            f"hyperparameters of the model need a curvature that follows them, not factor='{state.factor.kind}'; "
            "use 'exact' or 'monte_carlo'"
        )
    p = state.layout.size
    with torch.no_grad():
        precision = condition(state, prior, likelihood).precision
        if p > EXACT:
            return Surrogate(state.tangent, likelihood, linalg.draw(precision, probes, generator), 1 / probes)
        eye = torch.eye(p, dtype=torch.float64, device=state.tangent.device)
        covariance = linalg.solve(precision, eye)
        root, _ = linalg.cholesky(0.5 * (covariance + covariance.mT))
    return Surrogate(state.tangent, likelihood, root.mT, 1.0)


@torch.inference_mode(False)
def slope(
    state: State,
    prior: Any,
    likelihood: Any,
    names: Iterable[str],
    batches: Any,
    *,
    probes: int = 16,
    generator: torch.Generator | None = None,
) -> dict[str, Tensor]:
    """∂ log Z / ∂η over all data, for parameters of the model that are not Bayesian, {name: (*shape)}."""
    generator = generator or torch.Generator().manual_seed(0)
    objective = surrogate(state, prior, likelihood, probes, generator)
    eta = {name: state.tangent.constants[name].clone().requires_grad_() for name in names}
    total = {name: torch.zeros_like(value) for name, value in eta.items()}
    for x, y in passes(batches, state.tangent.device):
        for name, grad in _gradient(objective, eta, x, y).items():
            total[name] += grad
    return total


def _gradient(objective: Surrogate, eta: dict[str, Tensor], x: Any, y: Tensor) -> dict[str, Tensor]:
    with torch.enable_grad():
        grads = torch.autograd.grad(objective(eta, x, y), list(eta.values()), allow_unused=True)
    unused = [name for name, grad in zip(eta, grads, strict=True) if grad is None]
    if unused:
        raise InvalidValue(f"the network's outputs do not depend on {unused}; leave them out of hyperparameters=")
    return dict(zip(eta, grads, strict=True))


@torch.inference_mode(False)
def ascend(objective: Surrogate, names: Iterable[str], batches: Any, lr: float) -> dict[str, Tensor]:
    """One pass of Adam over the data, a step a batch; the new η."""
    eta = {name: objective.tangent.constants[name].clone().requires_grad_() for name in names}
    optimizer = torch.optim.Adam(list(eta.values()), lr=lr, maximize=True)
    for x, y in passes(batches, objective.tangent.device):
        for name, grad in _gradient(objective, eta, x, y).items():
            eta[name].grad = grad / len(y)
        optimizer.step()
    return {name: value.detach() for name, value in eta.items()}
