"""Functions drawn from the posterior: the same function at every input, together distributed as the posterior is."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import lapwing as lw

STRUCTURES: dict[str, Any] = {
    "primal": lw.curvature.Full("primal"),
    "dual": lw.curvature.Full("dual"),
    "kron": "kron",
    "ekfac": "ekfac",
    "block": "block",
    "diag": "diag",
    "lowrank": lw.curvature.LowRank(rank=6),
    "matrix_free": lw.curvature.MatrixFree(samples=8, tolerance=1e-10),
}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def fitted(structure: Any, seed: int = 0) -> lw.Laplace:
    data = draw(9, 3, seed=seed + 1), draw(9, 2, seed=seed + 2)
    return lw.laplace(network(seed), data, lw.likelihoods.Gaussian(0.4), structure=structure, prior=0.7)


def tangent_values(model: nn.Module, x: Tensor, weights: dict[str, Tensor], k: int) -> Tensor:
    """f(x) + J(x)(w − θ*) for weight samples w, by reverse mode, one output at a time."""
    parameters = dict(model.named_parameters())
    out = model(x)
    values = out.detach().expand(k, *out.shape).clone()
    for i, j in [(i, j) for i in range(out.shape[0]) for j in range(out.shape[1])]:
        grads = torch.autograd.grad(out[i, j], list(parameters.values()), retain_graph=True)
        for (name, p), g in zip(parameters.items(), grads, strict=True):
            values[:, i, j] += ((weights[name] - p.detach()) * g).flatten(1).sum(1)
    return values


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("seed", [0, 1])
def test_values_are_those_of_one_function_however_they_are_asked_for(structure: str, seed: int) -> None:
    la, x = fitted(STRUCTURES[structure], seed), draw(7, 3, seed=9)
    functions = la.function_samples(5, torch.Generator().manual_seed(3))
    together = functions(x)
    assert together.shape == (5, 7, 2)
    apart = torch.cat([functions(x[4:]), functions(x[:4])], 1)[:, [3, 4, 5, 6, 0, 1, 2]]
    assert_close(apart, together, rtol=1e-10, atol=1e-10)
    again = la.function_samples(5, torch.Generator().manual_seed(3))(x)
    assert_close(again, together, rtol=0, atol=0)
    assert not torch.equal(la.function_samples(5, torch.Generator().manual_seed(4))(x), together)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_function_is_the_tangent_model_at_drawn_weights(structure: str) -> None:
    la, x = fitted(STRUCTURES[structure]), draw(4, 3, seed=9)
    found = la.function_samples(3, torch.Generator().manual_seed(5))(x)
    weights = la.draw(3, torch.Generator().manual_seed(5))
    assert_close(found, tangent_values(la.tangent.model, x, weights, 3), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("structure", ["primal", "dual", "kron", "diag"])
def test_functions_at_inputs_of_two_calls_have_the_joint_covariance(structure: str) -> None:
    k = 20_000
    la, a, b = fitted(STRUCTURES[structure]), draw(2, 3, seed=9), draw(1, 3, seed=10)
    functions = la.function_samples(k, torch.Generator().manual_seed(1))
    values = torch.cat([functions(a), functions(b)], 1)
    joint = la.predict(torch.cat([a, b]), joint=True)
    away, cov = (values - joint.f_mean).reshape(k, 6), joint.covariance.reshape(6, 6)
    error = (cov.square() + cov.diagonal().outer(cov.diagonal())).sqrt() / math.sqrt(k)
    assert ((away.mT @ away / k - cov).abs() < 5 * error).all()
    assert (away.mean(0).abs() < 5 * (cov.diagonal() / k).sqrt()).all()


def test_a_function_of_a_linear_network_is_affine_in_its_input() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    la = lw.laplace(model, (draw(9, 3), draw(9, 2, seed=1)), lw.likelihoods.Gaussian(0.4))
    functions, x = la.function_samples(4), draw(2, 3, seed=9)
    middle = functions(x.mean(0, keepdim=True))
    assert_close(middle, functions(x).mean(1, keepdim=True), rtol=1e-10, atol=1e-10)


def test_about_the_tangent_mode_functions_move_by_what_predictions_do() -> None:
    la, x = fitted("full").recentered(), draw(4, 3, seed=9)
    plain, moved = (la.function_samples(3, torch.Generator().manual_seed(1), mean=m)(x) for m in ("network", "tangent"))
    shift = la.predict(x, mean="tangent").f_mean - la.predict(x).f_mean
    assert float(shift.abs().max()) > 1e-3
    assert_close(moved - plain, shift.expand_as(plain), rtol=1e-8, atol=1e-8)


def test_kept_samples_of_matrix_free_are_its_functions() -> None:
    la, x = fitted(STRUCTURES["matrix_free"]), draw(4, 3, seed=9)
    away = la.function_samples(8)(x) - la.predict(x).f_mean
    assert_close(away.square().mean(0), la.predict(x).f_var, rtol=1e-8, atol=1e-8)


def test_functions_leave_the_random_state_and_refuse_nonsense() -> None:
    la, state = fitted("full"), torch.get_rng_state()
    functions = la.function_samples(2)
    functions(draw(2, 3))
    assert torch.equal(torch.get_rng_state(), state)
    assert len(functions) == 2
    assert "2 functions" in repr(functions)
    with pytest.raises(lw.errors.InvalidValue, match="at least 1"):
        la.function_samples(0)
    with pytest.raises(lw.errors.InvalidValue, match="NaN"):
        functions(torch.full((1, 3), math.nan).double())
    with pytest.raises(lw.errors.InvalidValue, match="mean"):
        la.function_samples(1, mean="center")
