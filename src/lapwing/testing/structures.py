"""The laws of a structure: what it keeps of G = Σ_n J_nᵀ Λ_n J_n adds over data, and all else follows from it.

With M = Ĝ + λI for the Ĝ that it keeps: log p(D) has log|M|, predictions have J M⁻¹ Jᵀ, its operator keeps the laws of
operators. Only what Ĝ has to be is the structure's own: `keeps` says it.
"""

from __future__ import annotations

import copy
import math
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.api import Laplace, laplace, load
from lapwing.curvature import Structure
from lapwing.errors import InvalidValue
from lapwing.likelihoods import Gaussian, Likelihood
from lapwing.merging import merge
from lapwing.operators import linalg
from lapwing.testing.laws import Laws, close, network, normal, rows
from lapwing.testing.operators import KINDS, check_operator

LAMBDA = 0.7


def check_structure(
    structure: Structure,
    keeps: Callable[[Tensor], Tensor] | None = None,
    problem: tuple[nn.Module, Tensor, Tensor, Likelihood] | None = None,
    shifts: tuple[str, ...] = KINDS,
    adds: bool = True,
    seed: int = 0,
) -> None:
    """Hold a structure to its laws, or raise BrokenLaw.

    keeps: what it makes of the dense G (p, p), such as `lambda G: G.diagonal().diag()`; a structure that approximates
    G in a way of its own has none. problem (model, x, y, likelihood): a float64 network and its data; a perceptron with
    a noise for each output without. shifts: the kinds of prior that it takes. adds: whether fits of parts add up.
    """
    given = problem or (
        network(seed, 3, 4, 2),
        normal(seed, 11, 3),
        normal(seed + 1, 11, 2),
        Gaussian(torch.tensor([0.4, 0.9])),
    )
    model, x, y, likelihood = given
    if len(x) < 5:
        raise InvalidValue(f"the laws need five examples or more, got {len(x)}")

    def fit(data: Any, likelihood: Likelihood = likelihood) -> Laplace:
        return laplace(model, data, likelihood, structure=structure, prior=LAMBDA, factor="exact")

    with Laws(str(structure)) as law:
        with law("a fit leaves the network and the global random state as they were"):
            before, stream = copy.deepcopy(model.state_dict()), torch.random.get_rng_state()
            fit((x, y)).log_evidence()
            assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items()), "weights or buffers moved"
            assert torch.equal(torch.random.get_rng_state(), stream), "torch's global random state moved"
        la = fit((x, y))
        _curvature(law, la, model, x, y, keeps)
        _sums(law, la, fit, x, y, adds)
        _follows(law, la, model, x)
        with law("its operator keeps the laws of operators"):
            weights = la.likelihood.curvature_weights(la.state.factor.kind).expand(la.state.terms)
            check_operator(la.state.structure.operator(la.state, weights), _kept(la), shifts, _layers(la), seed)
        _file(law, la, model, x)


def _kept(la: Laplace) -> Tensor:
    """Ĝ, (p, p)."""
    M = linalg.to_dense(la.posterior.precision)
    return M - LAMBDA * torch.eye(len(M), dtype=torch.float64)


def _layers(la: Laplace) -> Tensor:
    """A group for each layer, (p,)."""
    layers = [name.rpartition(".")[0] for name in la.state.layout.names]
    numbers = {name: i for i, name in enumerate(dict.fromkeys(layers))}
    sizes = torch.tensor([la.state.layout.numel(name) for name in la.state.layout.names])
    return torch.tensor([numbers[name] for name in layers]).repeat_interleave(sizes)


def _curvature(
    law: Laws, la: Laplace, model: nn.Module, x: Tensor, y: Tensor, keeps: Callable[[Tensor], Tensor] | None
) -> None:
    kept = _kept(la)
    with law("coverage says how each parameter is treated"):
        missing = set(dict(model.named_parameters())) - set(la.coverage)
        assert not missing, f"nothing on {sorted(missing)}"
    with law("the curvature is symmetric and positive semidefinite"):
        close(kept, kept.mT)
        least = float(torch.linalg.eigvalsh(kept)[0])
        assert least > -1e-8 * float(kept.abs().max()), f"its least eigenvalue is {least:.6g}"
    if keeps is not None:
        with law("the curvature is what `keeps` makes of the dense Σ Jᵀ Λ J"):
            J = rows(model(x), model)
            J = J.reshape(-1, *J.shape[-2:])
            f = model(x).detach()
            S = la.likelihood.scaled_root(f.reshape(J.shape[:2]), la.likelihood.rows(y, len(J)))
            root = torch.einsum("ncp,nck->pnk", J, S).flatten(1)
            close(kept, keeps(root @ root.mT))


def _sums(law: Laws, la: Laplace, fit: Callable[..., Laplace], x: Tensor, y: Tensor, adds: bool) -> None:
    kept, mixed = _kept(la), torch.arange(len(x)).roll(2).flip(0)
    with law("batches and their order do not matter"):
        for order, sizes in ((torch.arange(len(x)), (1, 3)), (mixed, (2, 2))):
            batches = (*sizes, len(x) - sum(sizes))
            other = fit(list(zip(x[order].split(batches), y[order].split(batches), strict=True)))
            close(_kept(other), kept)
            close(other.log_evidence(), la.log_evidence())
    with law("another noise is the same sums, weighed otherwise"):
        scaled = {name: 1.7 * value for name, value in la.likelihood.hyperparameters.items()}
        other = la.likelihood.replace(**scaled)
        close(_kept(la.replace(likelihood=other)), _kept(fit((x, y), other)))
    if not adds:
        return
    with law("fits of parts add up to the fit of all"):
        close(_kept(merge([fit((x[:4], y[:4])), fit((x[4:], y[4:]))])), kept)
    with law("more data update a fit, and no factorization of the first lingers"):
        first = fit((x[:4], y[:4]))
        first.log_evidence(), first.predict(x).covariance
        both = first.updated((x[4:], y[4:]))
        close(both.log_evidence(), la.log_evidence())
        close(both.predict(x).covariance, la.predict(x).covariance)


def _follows(law: Laws, la: Laplace, model: nn.Module, x: Tensor) -> None:
    G, theta = _kept(la), torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    p, J = len(G), rows(model(x), model)
    M = G + LAMBDA * torch.eye(p, dtype=torch.float64)
    with law("the evidence has log|M| of its own matrix"):
        ratio = torch.logdet(M) - p * math.log(LAMBDA)
        fit = la.likelihood.log_likelihood(la.state.statistics)
        close(la.log_evidence(center="map"), fit - 0.5 * LAMBDA * theta @ theta - 0.5 * ratio)
    with law("the effective dimension is tr Ĝ M⁻¹"):
        close(la.effective_dimension().sum(), (G @ torch.linalg.inv(M)).trace())
    with law("predictions have the covariance J M⁻¹ Jᵀ, per example and joint"):
        close(la.predict(x).covariance, J @ torch.linalg.inv(M) @ J.mT)
        joint = torch.einsum("ncp,pq,mdq->ncmd", J.flatten(1, -2), torch.linalg.inv(M), J.flatten(1, -2))
        found = la.predict(x, joint=True).covariance
        close(found.reshape(joint.shape), joint)


def _file(law: Laws, la: Laplace, model: nn.Module, x: Tensor) -> None:
    with law("a file gives the fit back, bit by bit"), tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "fit.safetensors")
        la.save(path)
        fresh, again = la.replace(prior=LAMBDA), load(path, model)
        assert again.state.structure == la.state.structure, f"it is of {again.state.structure}"
        for key, value in la.state.sums.items():
            assert torch.equal(again.state.sums[key], value), f"the sums {key!r} differ"
        close(again.log_evidence(), fresh.log_evidence(), 1e-12)
        close(again.predict(x).covariance, fresh.predict(x).covariance, 1e-12)
