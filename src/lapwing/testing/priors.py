"""The laws of a prior p(θ): its local Gaussian, draws, normalization and evidence follow from its log-density.

A v − A m = −∇ log p(v)        the Gaussian that stands for p near v has its gradient
E[∇ log p] = 0,  E[θ_i ∂_i log p] = −1,  E[∂ log p / ∂ hyperparameter] = 0        over draws, by parts
log Z = log p(D|θ) + log p(θ) + (p/2) log 2π − ½ log|G + A(θ)|        by dense algebra
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from lapwing.api import laplace, load
from lapwing.errors import InvalidValue, LapwingError, Unsupported
from lapwing.likelihoods import Gaussian
from lapwing.operators import linalg
from lapwing.priors import Prior
from lapwing.tangent import linearize
from lapwing.testing.laws import Laws, close, network, normal, rows, same_stream, seeded, within

DRAWS, NOISE = 4000, 0.6


def check_prior(
    prior: Prior, model: nn.Module | None = None, data: tuple[Tensor, Tensor] | None = None, seed: int = 0
) -> None:
    """Hold a prior to its laws, or raise BrokenLaw.

    model, data (x, y): a float64 network that the prior can be bound to, and what it is fitted to, y real; a small
    perceptron without. Laws of draws are for a prior with `sample`; that its density integrates to one is held where
    it can be bound to a single weight.
    """
    if (model is None) != (data is None):
        raise InvalidValue("give a model and its data (x, y) together, or neither")
    model = network(seed, 3, 2, 2) if model is None else model
    x, y = (normal(seed, 12, 3), normal(seed + 1, 12, 2)) if data is None else data
    bound = prior if prior.layout is not None else prior.bind(linearize(model).layout)
    with Laws(type(prior).__name__) as law:
        _density(law, bound, seed)
        _hyperparameters(law, bound, seed)
        _draws(law, bound, model)
        _normalized(law, prior)
        _evidence(law, prior, bound, model, x, y)


def _at(prior: Prior, v: Tensor) -> Tensor:
    """log p of a vector (p,)."""
    assert prior.layout is not None
    return prior.log_prob(prior.layout.unflatten(v))


def _density(law: Laws, prior: Prior, seed: int) -> None:
    many = normal(seed + 2, 3, prior.groups().size)
    with law("log_prob is one float64 number"):
        value = _at(prior, many[0])
        assert (value.shape, value.dtype) == ((), torch.float64), f"shape {tuple(value.shape)}, {value.dtype}"
        assert bool(torch.isfinite(value)), f"it is {float(value)}"
    with law("log_prob can be mapped over weights by vmap"):
        close(vmap(lambda v: _at(prior, v))(many), torch.stack([_at(prior, v) for v in many]))
    for v in many:
        with law("the Gaussian of quadratic has the gradient of log_prob: A v − A m = −∇ log p(v)"):
            a, shifted = prior.quadratic(v)
            close(linalg.mv(a, v) - shifted, -grad(lambda v: _at(prior, v))(v))
        with law("the diagonal of A is positive, one number a weight"):
            each = linalg.diagonal(prior.quadratic(v)[0])
            assert each.shape == v.shape, f"shape {tuple(each.shape)}, not {tuple(v.shape)}"
            assert bool((each > 0).all()), f"its least is {float(each.min()):.6g}"
        if prior.gaussian:
            with law("A of a Gaussian is −∇² log p"):
                hessian = torch.autograd.functional.hessian(lambda v: _at(prior, v), v)
                close(linalg.to_dense(prior.quadratic(v)[0]), -hessian)


def _hyperparameters(law: Laws, prior: Prior, seed: int) -> None:
    now, v = prior.coordinates(), normal(seed + 5, prior.groups().size)
    with law("coordinates lead back to the hyperparameters"):
        for name, value in prior.moved(now).hyperparameters.items():
            close(value, prior.hyperparameters[name], 1e-12)
    with law("log_prob and A are differentiable in the coordinates"):
        names, values = tuple(now), [value.clone().requires_grad_() for value in now.values()]

        def both(*values: Tensor) -> tuple[Tensor, Tensor]:
            moved = prior.moved(dict(zip(names, values, strict=True)))
            return _at(moved, v), linalg.to_dense(moved.quadratic(v)[0])

        if values:  # a prior may have none
            torch.autograd.gradcheck(both, values, eps=1e-6, atol=1e-6, rtol=1e-5)
    with law("a search starts between its limits"):
        groups = len(prior.counts())
        for name, (low, high, start) in prior.limits(torch.ones(2, groups, dtype=torch.float64), v).items():
            assert bool(((low <= start) & (start <= high)).all()), f"{name}: {low}, {start}, {high}"


def _draws(law: Laws, prior: Prior, model: nn.Module) -> None:
    try:
        prior.sample(1, seeded(0))
    except Unsupported:
        return
    p = prior.groups().size
    with law("draws come from their generator alone"):
        same_stream(lambda generator: prior.sample(3, generator))
    with law("draw gives networks, in the model's shapes and dtypes"):
        for name, w in prior.draw(model, 2, seeded(0)).items():
            own = model.get_parameter(name)
            assert (w.shape, w.dtype) == ((2, *own.shape), own.dtype), f"{name}: {tuple(w.shape)}, {w.dtype}"
    draws = prior.sample(DRAWS, seeded(3))
    with law("sample gives float64 of shape (n, p)"):
        assert (draws.shape, draws.dtype) == ((DRAWS, p), torch.float64), f"{tuple(draws.shape)}, {draws.dtype}"
    score = vmap(grad(lambda v: _at(prior, v)))(draws)
    with law("draws are of log_prob: E[∇ log p] = 0"):
        within(score, torch.zeros(p, dtype=torch.float64))
    with law("draws are of log_prob: E[θ_i ∂_i log p] = −1"):
        within(draws * score, -torch.ones(p, dtype=torch.float64))
    for name, now in prior.coordinates().items():

        def slope(value: Tensor, v: Tensor, name: str = name) -> Tensor:
            return _at(prior.moved({**prior.coordinates(), name: value}), v)

        with law(f"log_prob is normalized at every {name}: E[∂ log p / ∂ {name}] = 0"):
            found = vmap(grad(slope), in_dims=(None, 0))(now, draws)
            within(found, torch.zeros_like(now))


def _normalized(law: Laws, prior: Prior) -> None:
    """∫ p(w) dw over one weight, w = ±eᵗ, by the trapezoid rule: a density may have an infinite peak at 0."""
    if any(value.ndim for value in prior.hyperparameters.values()):
        return
    try:
        one = prior.bind(linearize(nn.Linear(1, 1, bias=False).double()).layout)
    except LapwingError:
        return  # its groups or its mean are those of other parameters
    t = torch.linspace(-60, 30, 9_001, dtype=torch.float64)
    w = torch.cat([t.exp(), -t.exp()])
    with law("log_prob integrates to one"):
        density = vmap(lambda v: _at(one, v))(w.unsqueeze(-1)).exp() * w.abs()
        close(density.sum() * (t[1] - t[0]), torch.ones((), dtype=torch.float64), 1e-4)


def _evidence(law: Laws, prior: Prior, bound: Prior, model: nn.Module, x: Tensor, y: Tensor) -> None:
    outputs, theta = model(x), torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    J = rows(outputs.reshape(-1), model)
    la = laplace(model, (x, y), Gaussian(NOISE), structure="full", prior=prior)
    with law("the evidence of a fit is that of dense algebra"):
        precision = J.mT @ J / NOISE**2 + linalg.to_dense(bound.quadratic(theta)[0])
        fit = -0.5 * ((y - outputs.detach()) / NOISE).square().sum() - y.numel() * math.log(NOISE)
        constants = 0.5 * (len(theta) - y.numel()) * math.log(2 * math.pi)
        expected = fit + constants + _at(bound, theta) - 0.5 * torch.logdet(precision)
        close(la.log_evidence(center="map"), expected)
    with law("a file gives the prior back"), tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "fit.safetensors")
        la.save(path)
        again = load(path, model)
        _same(again.prior.hyperparameters, la.prior.hyperparameters)
        assert torch.equal(again.log_evidence(center="map"), la.log_evidence(center="map")), "another evidence"


def _same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys(), f"{list(found)}, not {list(expected)}"
    for name, value in found.items():
        assert torch.equal(value, expected[name]), f"another {name}"
