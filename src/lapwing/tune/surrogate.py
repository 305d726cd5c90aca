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
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import jvp, vmap

from lapwing.curvature import State
from lapwing.curvature.accumulate import flat_outputs, flat_targets
from lapwing.data import passes
from lapwing.errors import InvalidValue
from lapwing.likelihoods import Likelihood
from lapwing.operators import linalg
from lapwing.posterior import condition
from lapwing.priors import Prior
from lapwing.tangent import TangentModel, proof
from lapwing.tangent.evaluating import evaluating
from lapwing.tangent.kernels import any_batching_rule, plain_kernels

EXACT = 256  # parameters up to which the trace is exact
CHUNK = 32  # vectors z that are pushed through the network at once


@dataclass(frozen=True, eq=False)
class Surrogate:
    """L(η) and its gradient, a batch at a time."""

    tangent: TangentModel
    likelihood: Likelihood
    z: Tensor  # (r, p), with mean of squares Σ: zᵀz·weight = Σ, or so in expectation
    weight: float

    def __call__(self, eta: Mapping[str, Tensor], x: Any, y: Tensor) -> Tensor:
        """L(η) of a batch, 0-dim float64, differentiable in η."""
        moved = self._at(eta)
        with evaluating(self.tangent.model), plain_kernels():
            f = moved.apply(self.tangent.params, x)
            pushed = self._pushed(moved, eta, x, f)  # J z (r, n, ..., c)
        flat, targets = flat_outputs(f), flat_targets(self.likelihood, f, y)
        S = self.likelihood.curvature_root(flat, targets)  # (m, c, k)
        columns = torch.einsum("mck,rmc->rmk", S, pushed.reshape(len(pushed), *flat.shape).to(S))
        weights = self.likelihood.curvature_weights("exact").to(flat.device)
        quadratic = (columns.double().square() * weights).sum()
        return self.likelihood.log_prob(flat, targets).double().sum() - 0.5 * self.weight * quadratic

    def gradient(self, eta: Mapping[str, Tensor], x: Any, y: Tensor) -> tuple[Tensor | None, ...]:
        """∂η L of a batch; None for what the outputs do not depend on."""
        run = lambda: torch.autograd.grad(self(eta, x, y), list(eta.values()), allow_unused=True)  # noqa: E731
        with evaluating(self.tangent.model), plain_kernels(), torch.enable_grad():
            return self._at(eta).backward(self.tangent.params, run)

    def _at(self, eta: Mapping[str, Tensor]) -> TangentModel:
        return replace(self.tangent, constants={**self.tangent.constants, **eta})

    def _pushed(self, moved: TangentModel, eta: Mapping[str, Tensor], x: Any, f: Tensor) -> Tensor:
        """Forward mode, all vectors at once; by reverse passes where torch has no rule for that, or a wrong one."""
        key, lacks = (tuple(eta), proof.shapes(x, self.z)), (RuntimeError, ValueError)
        run, right = partial(self._forward, moved, x), partial(self._proved, moved, eta, x, f)
        found = proof.attempt(self.tangent, "surrogate", key, run, right, lacks)
        return self._reverse(moved, x) if found is None else found

    def _forward(self, moved: TangentModel, x: Any) -> Tensor:
        vectors = self.tangent.layout.unflatten(self.z.to(self.tangent.dtype))

        def push(v: dict[str, Tensor]) -> Tensor:
            return jvp(lambda p: moved.apply(p, x), (self.tangent.params,), (v,))[1]

        with any_batching_rule():
            return vmap(push, chunk_size=CHUNK)(vectors)

    def _reverse(self, moved: TangentModel, x: Any) -> Tensor:
        """J z as the derivative of u ↦ (Jᵀu)ᵀz, for each z."""
        vectors = self.tangent.layout.unflatten(self.z.to(self.tangent.dtype))
        with torch.enable_grad():
            leaves = {n: p.detach().requires_grad_() for n, p in self.tangent.params.items()}
            f = moved.apply(leaves, x)
            u = torch.zeros_like(f, requires_grad=True)
            grads = torch.autograd.grad(f, list(leaves.values()), u, create_graph=True, allow_unused=True)
            pulled = {n: g for n, g in zip(leaves, grads, strict=True) if g is not None and g.requires_grad}
            if not pulled:
                return torch.zeros_like(f).expand(len(self.z), *f.shape)
            each = [
                torch.stack([(g * vectors[n][k]).sum() for n, g in pulled.items()]).sum() for k in range(len(self.z))
            ]
            return torch.stack([torch.autograd.grad(one, u, create_graph=True)[0] for one in each])

    def _proved(self, moved: TangentModel, eta: Mapping[str, Tensor], x: Any, f: Tensor, found: Tensor) -> bool:
        """Whether s = rᵀJ(η)(Σ_k w_k z_k), for random r and w, has autograd's value and derivatives in η."""
        w, r = proof.mixture(self.z, 1).to(f), proof.normal(f.shape, f)
        along = self.tangent.layout.unflatten(w @ self.z.to(w))
        leaves = {n: p.detach().requires_grad_() for n, p in self.tangent.params.items()}
        grads = torch.autograd.grad(
            moved.apply(leaves, x), list(leaves.values()), r, create_graph=True, allow_unused=True
        )
        want = sum((g * along[n]).sum() for n, g in zip(leaves, grads, strict=True) if g is not None)
        mine, truth = (self._slopes(one, eta) for one in (torch.einsum("k,kn...,n...->", w, found, r), want))
        one = torch.ones(1, dtype=f.dtype, device=f.device)
        return proof.agree({n: g.unsqueeze(0) for n, g in mine.items()}, truth, one, self.tangent.eps)

    @staticmethod
    def _slopes(value: Any, eta: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A value and its derivatives in η."""
        found: Any = (None,) * len(eta)
        if isinstance(value, Tensor) and value.requires_grad:
            found = torch.autograd.grad(value, list(eta.values()), retain_graph=True, allow_unused=True)
        slopes = {n: torch.zeros_like(t) if g is None else g for (n, t), g in zip(eta.items(), found, strict=True)}
        return {**slopes, "": torch.as_tensor(value).detach()}


def surrogate(state: State, prior: Prior, likelihood: Likelihood, probes: int, generator: torch.Generator) -> Surrogate:
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
    prior: Prior,
    likelihood: Likelihood,
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
    grads = objective.gradient(eta, x, y)
    unused = [name for name, grad in zip(eta, grads, strict=True) if grad is None]
    if unused:
        raise InvalidValue(f"the network's outputs do not depend on {unused}; leave them out of hyperparameters=")
    return {name: grad for name, grad in zip(eta, grads, strict=True) if grad is not None}


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
