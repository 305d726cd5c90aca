"""Predictions from structure, which never build a Jacobian, against those that do.

For kron, block and diag under every kind of prior: the covariance of the outputs, of each input and of all together,
equals J M⁻¹ Jᵀ with J by reverse mode, one output at a time, and M the posterior precision as a dense matrix.
"""

from __future__ import annotations

import copy
import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import lapwing as lw
from helpers import backward_rows, close, integers
from helpers import normal as numbers
from lapwing.curvature import Kronecker
from lapwing.errors import InvalidValue, Unsupported
from lapwing.likelihoods import Categorical, Gaussian
from lapwing.operators import linalg
from lapwing.outputs import WIDE
from lapwing.predictive import predict
from lapwing.push import runs

# -- networks ------------------------------------------------------------------------------------------------------


class Images(nn.Module):
    """Convolutions with groups, a norm, and a linear layer: parts with positions and blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, (2, 3), groups=2, padding=(1, 0)), nn.GroupNorm(2, 4)
        self.head = nn.Linear(4 * 4 * 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.conv(x))).flatten(1))


class Words(nn.Module):
    """Repeated tokens, one of them padding; outputs with positions, (n, 3, 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.mix = nn.Embedding(5, 4, padding_idx=0), nn.Linear(3, 3, bias=False)
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        return self.head(torch.tanh(self.norm(h + self.mix(h.mT).mT)))


class Odd(nn.Module):
    """A layer used twice, bare parameters, one of them 0-dimensional, and a layer that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.head = nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        self.scale, self.shift, self.spare = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(())), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x)) * self.scale
        return self.head(torch.tanh(self.again(torch.tanh(self.again(h))))) + self.shift


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3, bias=False), nn.Tanh(), nn.Linear(3, 2))


NETWORKS: dict[str, Any] = {
    "mlp": (mlp, lambda n, seed: numbers(n, 4, seed=seed), lambda n: numbers(n, 2, seed=9)),
    "images": (Images, lambda n, seed: numbers(n, 2, 3, 4, seed=seed), lambda n: numbers(n, 3, seed=9)),
    "words": (Words, lambda n, seed: integers(5, n, 3, seed=seed), lambda n: numbers(n, 3, 2, seed=9)),
    "odd": (Odd, lambda n, seed: numbers(n, 4, seed=seed), lambda n: numbers(n, 2, seed=9)),
}
STRUCTURES: dict[str, Any] = {
    "kron": Kronecker(),
    "kron reduce": Kronecker(sharing="reduce"),
    "block": "block",
    "diag": "diag",
}
PRIORS = ("uniform", "layerwise", "per unit", "weights and biases")


def network(name: str) -> Any:
    net = NETWORKS[name][0]().double()
    with torch.no_grad():
        for i, p in enumerate(net.parameters()):
            p.copy_(0.7 * numbers(*p.shape, seed=i))
    return net


@cache
def fitted(name: str, structure: str) -> Any:
    _, inputs, targets = NETWORKS[name]
    return lw.laplace(network(name), (inputs(7, 1), targets(7)), Gaussian(0.4), structure=STRUCTURES[structure])


def with_prior(la: Any, kind: str) -> Any:
    names = la.state.layout.names
    if kind == "uniform":
        return la.replace(prior=0.7)
    if kind == "layerwise":
        return la.replace(prior=spaced(la, "layer"))
    if kind == "per unit":
        return la.replace(prior=spaced(la, "unit"))
    biases = {n: 1.5 + i / 10 for i, n in enumerate(names) if not n.endswith("weight")}
    return la.replace(prior={"*.weight": 0.6, **biases})


def spaced(la: Any, per: str) -> Any:
    groups = len(lw.priors.Gaussian(1.0, per=per).bind(la.state.layout).names)
    return lw.priors.Gaussian(0.3 + torch.arange(groups) / groups, per=per)


@cache
def rows(name: str, n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs, and the Jacobian of their outputs by reverse mode, (n, ..., c, p)."""
    net, x = copy.deepcopy(network(name)).eval(), NETWORKS[name][1](n, seed)
    return x, backward_rows(net(x), net.parameters())


# -- covariances ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", NETWORKS)
def test_covariances_need_no_jacobian(name: str, structure: str, prior: str) -> None:
    la = with_prior(fitted(name, structure), prior)
    x, J = rows(name, 5, 2)
    inverse = torch.linalg.inv(linalg.to_dense(la.posterior.precision))
    prediction = la.predict(x)
    close(prediction.covariance, J @ inverse @ J.mT)
    close(la.posterior.covariance(J.flatten(0, -3)).reshape(prediction.covariance.shape), J @ inverse @ J.mT)
    close(prediction.f_var, torch.einsum("...p,pq,...q->...", J, inverse, J))
    close(prediction.f_mean, la.tangent(x))
    assert not prediction.covariance.requires_grad


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", NETWORKS)
def test_joint_covariances_need_no_jacobian(name: str, structure: str, prior: str) -> None:
    """Over all inputs, and all positions of each."""
    la = with_prior(fitted(name, structure), prior)
    x, J = rows(name, 5, 2)
    inverse = torch.linalg.inv(linalg.to_dense(la.posterior.precision))
    prediction = la.predict(x, joint=True)
    shape, flat = J.shape[:-1], J.flatten(0, -2)
    close(prediction.covariance, (flat @ inverse @ flat.mT).reshape(*shape, *shape))
    close(prediction.marginal, la.predict(x).covariance)


@pytest.mark.parametrize("structure", ["primal", "dual", "ekfac", "lowrank", "matrix_free"])
def test_positions_are_predicted_together_by_other_structures_too(structure: str) -> None:
    _, inputs, targets = NETWORKS["words"]
    made = {
        "primal": lw.curvature.Full("primal"),
        "dual": lw.curvature.Full("dual"),
        "matrix_free": lw.curvature.MatrixFree(samples=8),
    }
    la = lw.laplace(
        network("words"), (inputs(7, 1), targets(7)), Gaussian(0.4), structure=made.get(structure, structure)
    )
    x, J = (t[-2:] for t in rows("words", 4, 2))
    prediction = la.predict(x, joint=True)
    close(prediction.marginal, la.predict(x).covariance)
    if structure == "matrix_free":
        spread, flat = la.posterior.draw(8) - la.posterior.mean, J.flatten(0, -2)
        away = spread @ flat.mT
        expected = away.mT @ away / 8
    else:
        flat = J.flatten(0, -2)
        expected = flat @ torch.linalg.inv(linalg.to_dense(la.posterior.precision)) @ flat.mT
    close(prediction.covariance, expected.reshape(2, 3, 2, 2, 3, 2), 1e-7)


def test_the_joint_density_over_positions_is_that_of_all_targets_together() -> None:
    la, x, y = fitted("words", "kron"), rows("words", 4, 2)[0], numbers(4, 3, 2, seed=3)
    prediction = la.predict(x, joint=True)
    total = prediction.covariance.reshape(24, 24) + 0.4**2 * torch.eye(24, dtype=torch.float64)
    density = torch.distributions.MultivariateNormal(prediction.f_mean.reshape(-1), total)
    close(prediction.log_prob(y), density.log_prob(y.reshape(-1)))
    assert prediction.f_sample(5).shape == (5, 4, 3, 2)


def test_a_joint_covariance_that_would_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "physical_memory", lambda: 100)
    for structure in ("kron", lw.curvature.Full("dual")):
        la = lw.laplace(network("mlp"), (numbers(7, 4), numbers(7, 2)), Gaussian(0.4), structure=structure)
        with pytest.raises(InvalidValue, match="joint covariance of 10 outputs"):
            la.predict(numbers(5, 4), joint=True)


@pytest.mark.parametrize("budget", [1, 4_000, 50_000])
@pytest.mark.parametrize("structure", ["kron", "block", "diag"])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_memory_budget_does_not_matter(name: str, structure: str, budget: int) -> None:
    la, x = with_prior(fitted(name, structure), "per unit"), NETWORKS[name][1](11, 3)
    tight = predict(la.posterior, la.likelihood, x, memory_budget=budget)
    close(tight.covariance, la.predict(x).covariance)
    if name != "words":
        tight = predict(la.posterior, la.likelihood, x, joint=True, memory_budget=budget)
        close(tight.covariance, la.predict(x, joint=True).covariance)


@pytest.mark.parametrize("structure", ["kron", "block", "diag"])
@pytest.mark.parametrize("name", NETWORKS)
def test_an_input_is_predicted_alike_alone_and_among_others(
    name: str, structure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the inputs are run in pieces, of which the last is smaller."""
    la, x = fitted(name, structure), NETWORKS[name][1](7, 3)
    whole = la.predict(x).covariance
    close(torch.cat([la.predict(x[i : i + 1]).covariance for i in range(7)]), whole)
    monkeypatch.setattr(runs, "LARGEST", 3)
    close(la.predict(x).covariance, whole)
    close(la.predict(x).f_mean, la.tangent(x))


@pytest.mark.parametrize("structure", ["kron", "block", "diag"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_budget_for_fitting_does_not_matter(name: str, structure: str) -> None:
    _, inputs, targets = NETWORKS[name]
    shape: dict[str, Any] = {
        "kron": Kronecker(memory_budget=1_000),
        "block": lw.curvature.Block(memory_budget=1_000),
        "diag": lw.curvature.Diagonal(memory_budget=1_000),
    }
    data, likelihood = (inputs(7, 1), targets(7)), Gaussian([0.4, 0.5, 0.3][: targets(1).shape[-1]])
    tight = lw.laplace(network(name), data, likelihood, structure=shape[structure])
    loose = lw.laplace(network(name), data, likelihood, structure=structure)
    for key, value in loose.state.sums.items():
        close(tight.state.sums[key], value)


def test_inputs_as_tuples_and_mappings() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.scale = nn.Linear(3, 2), nn.Linear(4, 2), nn.Parameter(torch.ones(2))

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return torch.tanh(self.a(a)) * self.b(b) * self.scale

    net, a, b = Two().double(), numbers(6, 3), numbers(6, 4)
    for structure in ("kron", "block", "diag"):
        la = lw.laplace(net, [((a, b), numbers(6, 2, seed=3))], "gaussian", structure=structure)
        expected = la.posterior.covariance(la.tangent.rows((a, b)))
        close(la.predict((a, b)).covariance, expected)
        close(la.predict({"b": b, "a": a}).covariance, expected)


# -- single precision ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["kron", "block", "diag"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_float32_network_gives_the_same_up_to_rounding(name: str, structure: str) -> None:
    _, inputs, targets = NETWORKS[name]

    def single(t: Tensor) -> Tensor:
        return t.float() if t.is_floating_point() else t

    net = network(name).float()
    la = lw.laplace(net, (single(inputs(7, 1)), single(targets(7))), Gaussian(0.4), structure=structure)
    exact = fitted(name, structure)
    found = la.predict(single(inputs(5, 2)))
    assert found.covariance.dtype == torch.float32
    scale = float(exact.predict(inputs(5, 2)).f_var.max())
    assert_close(found.covariance.double(), exact.predict(inputs(5, 2)).covariance, rtol=1e-3, atol=1e-3 * scale)
    assert_close(la.log_evidence(), exact.log_evidence(), rtol=1e-4, atol=1e-3)


# -- draws ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prior", ["uniform", "per unit"])
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", NETWORKS)
def test_draws_of_weights_have_the_covariance_of_predictions(name: str, structure: str, prior: str) -> None:
    """J (θ − θ*) over draws: within the errors of 4,000 of them."""
    la = with_prior(fitted(name, structure), prior)
    x, J = rows(name, 2, 2)
    n = 4000
    draws = la.posterior.draw(n, torch.Generator().manual_seed(5))
    few = la.draw(2, torch.Generator().manual_seed(5))
    assert all(few[name].shape == (2, *p.shape) for name, p in la.tangent.params.items())
    away = draws - la.tangent.theta
    f = torch.einsum("...cp,sp->...sc", J, away)
    exact = la.predict(x).covariance
    root = torch.linalg.cholesky(exact)
    white = torch.linalg.solve_triangular(root, f.mT, upper=False)  # (..., c, s)
    error = math.sqrt(n) * (white @ white.mT / n - torch.eye(exact.shape[-1], dtype=torch.float64))
    assert float(error.abs().max()) < 5 * math.sqrt(2)
    assert float(white.mean(-1).abs().max()) * math.sqrt(n) < 5


@pytest.mark.parametrize("structure", ["kron", "block", "diag"])
@pytest.mark.parametrize("name", NETWORKS)
def test_via_the_network_runs_it_at_drawn_weights(name: str, structure: str) -> None:
    la, x = fitted(name, structure), rows(name, 3, 2)[0]
    found = la.predict(x, via="network", samples=6, generator=torch.Generator().manual_seed(3))
    net, draws = copy.deepcopy(network(name)).eval(), la.draw(6, torch.Generator().manual_seed(3))
    outputs = torch.stack(
        [torch.func.functional_call(net, {n: d[s] for n, d in draws.items()}, (x,)).detach() for s in range(6)]
    )
    close(found.outputs.values, outputs)
    close(found.f_mean, outputs.mean(0))
    away = outputs - outputs.mean(0)
    close(found.covariance, torch.einsum("s...a,s...b->...ab", away, away) / 5)


@pytest.mark.parametrize("structure", ["kron", "diag"])
def test_many_outputs_are_predicted_by_draws_of_the_tangent_model(structure: str) -> None:
    net, x = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, WIDE + 1)).double(), numbers(4, 2)
    y = integers(WIDE + 1, 4)
    la = lw.laplace(net, (x, y), Categorical(), structure=structure, factor="empirical")
    found = la.predict(x, samples=5, generator=torch.Generator().manual_seed(1))
    z = la.posterior.draw(5, torch.Generator().manual_seed(1)) - la.posterior.mean
    J = la.tangent.rows(x)
    close(found.outputs.values, la.tangent(x) + torch.einsum("ncp,sp->snc", J, z))
    close(found.f_mean, la.tangent(x))
    assert found.f_var.shape == (4, WIDE + 1)
    with pytest.raises(Unsupported, match="too many for a covariance"):
        found.covariance  # noqa: B018


# -- what follows --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_joint_density_of_a_prediction(structure: str) -> None:
    """log N(y; f, J Σ Jᵀ + σ²) over all inputs together."""
    la = fitted("images", structure)
    x, J = rows("images", 4, 2)
    y = numbers(4, 3, seed=8)
    flat = J.flatten(0, 1)
    cov = flat @ torch.linalg.inv(linalg.to_dense(la.posterior.precision)) @ flat.mT
    normal = torch.distributions.MultivariateNormal(
        la.tangent(x).reshape(-1), cov + 0.16 * torch.eye(12, dtype=torch.float64)
    )
    close(la.predict(x, joint=True).log_prob(y), normal.log_prob(y.reshape(-1)))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_classes_by_the_probit_link(structure: str) -> None:
    _, inputs, _ = NETWORKS["images"]
    la = lw.laplace(network("images"), (inputs(7, 1), integers(3, 7)), "categorical", structure=STRUCTURES[structure])
    x, J = rows("images", 4, 2)
    variance = torch.einsum("ncp,pq,ncq->nc", J, torch.linalg.inv(linalg.to_dense(la.posterior.precision)), J)
    close(la.predict(x, link="probit").probs, torch.softmax(la.tangent(x) / (1 + math.pi / 8 * variance).sqrt(), -1))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_predicting_leaves_the_network_as_it_was(structure: str) -> None:
    la = fitted("images", structure)
    model = la.tangent.model.train()
    before = [p.clone() for p in model.parameters()]
    la.predict(rows("images", 3, 2)[0])
    assert all(m.training for m in model.modules())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks for m in model.modules())


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_one_layer_whose_outputs_are_cut_into_positions(structure: str) -> None:
    """Its rows are outer products, but not a head's: a position's outputs are some of the layer's."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 12), nn.Unflatten(1, (4, 3))).double()
    x, new = numbers(20, 2), numbers(5, 2, seed=1)
    la = lw.laplace(net, (x, integers(3, 20, 4)), "categorical", structure=structure)
    M = linalg.to_dense(la.posterior.precision)
    f = net(new)
    J = backward_rows(f, net.parameters())
    pred = la.predict(new)
    close(pred.covariance, torch.einsum("nqap,pr,nqbr->nqab", J, torch.linalg.inv(M), J))
