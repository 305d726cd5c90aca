"""The tangent MAP: v* of every route is the mode of the tangent model's posterior.

Oracles are dense and written here: J by autograd row by row; for a Gaussian v* = (G + A)⁻¹(JᵀΛ(y − f + Jθ) + A m), for
the others Newton's method on dense J with autograd's derivatives of log p.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw
from helpers import backward_rows, close, draw

STREAMED = 2**16  # bytes: too few for the rows of J, so that products are passes over the data
STRUCTURES = {
    "primal": lw.curvature.Full("primal"),
    "dual": lw.curvature.Full("dual"),
    "kron": "kron",
    "block": "block",
    "diag": "diag",
}
KINDS = ("gaussian", "per output", "categorical", "bernoulli")


def network() -> nn.Module:
    """3 -> 30 (normalized) -> 2, p = 122 + 60."""
    net = nn.Sequential(nn.Linear(3, 30), nn.LayerNorm(30), nn.Tanh(), nn.Linear(30, 2)).double()
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(0.7 * draw(*p.shape))
    return net


def problem(kind: str, seed: int = 0, n: int = 70) -> tuple[nn.Module, Tensor, Tensor, lw.likelihoods.Likelihood]:
    torch.manual_seed(seed)
    model, x = network(), draw(n, 3)
    f = model(x).detach() + draw(n, 2)
    if kind == "categorical":
        return model, x, torch.distributions.Categorical(logits=f).sample(), lw.likelihoods.Categorical()
    if kind == "bernoulli":
        return model, x, torch.bernoulli(torch.sigmoid(f)), lw.likelihoods.Bernoulli()
    noise = torch.tensor([0.3, 0.8], dtype=torch.float64) if kind == "per output" else torch.tensor(0.5)
    return model, x, f, lw.likelihoods.Gaussian(noise)


def prior_of(name: str) -> Any:
    return {"scalar": 0.7, "layerwise": "layerwise", "mean": lw.priors.Gaussian(2.0, per="unit", mean=0.1)}[name]


def dense(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """f (n, c), J (n, c, p) and θ (p,), by autograd."""
    params = list(model.parameters())
    f = model(x)
    return f.detach(), backward_rows(f, params), torch.cat([p.detach().reshape(-1) for p in params])


def objective(kind: str, z: Tensor, y: Tensor, noise: Tensor | None) -> Tensor:
    """−log p(y | z), with torch's own distributions."""
    if kind == "categorical":
        return -torch.distributions.Categorical(logits=z).log_prob(y).sum()
    if kind == "bernoulli":
        return -torch.distributions.Bernoulli(logits=z).log_prob(y).sum()
    return -torch.distributions.Normal(z, noise).log_prob(y).sum()


def solved(kind: str, la: lw.Laplace, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """v* by damped Newton on the dense problem."""
    f, J, theta = dense(model, x)
    a, m = la.prior.operator().dense(), la.prior.mean_vector()
    noise = getattr(la.likelihood, "noise", None)

    def loss(v: Tensor) -> Tensor:
        z = f + torch.einsum("ncp,p->nc", J, v - theta)
        return objective(kind, z, y, noise) + 0.5 * (a * (v - m).square()).sum()

    v = theta.clone()
    for _ in range(100):
        g = torch.func.grad(loss)(v)
        d = torch.linalg.solve(torch.func.hessian(loss)(v), -g)
        t = 1.0
        while loss(v + t * d) > loss(v) + 1e-4 * t * (g @ d) + 1e-12 and t > 1e-8:
            t /= 2
        v = v + t * d
        if float(d.norm()) < 1e-12 * float(v.norm()):
            break
    return v


# -- v* ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("kind", KINDS)
def test_v_star_is_the_mode_of_the_dense_tangent_model(kind: str, structure: str) -> None:
    for prior, seed in (("scalar", 0), ("layerwise", 1), ("mean", 2)):
        model, x, y, likelihood = problem(kind, seed)
        la = lw.laplace(model, (x, y), likelihood, structure=STRUCTURES[structure], prior=prior_of(prior))
        expected = solved(kind, la, model, x, y)
        found = la.recentered().tangent_map
        assert found.residual < 1e-9
        close(found.vector, expected, 1e-7 if kind in ("categorical", "bernoulli") else 1e-8)
        f, J, theta = dense(model, x)
        z = f + torch.einsum("ncp,p->nc", J, expected - theta)
        for key, value in likelihood.statistics(z, y).items():
            close(found.statistics[key], value, 1e-7)


@pytest.mark.parametrize("seed", [0, 1])
def test_v_star_of_a_gaussian_is_the_closed_form(seed: int) -> None:
    model, x, y, likelihood = problem("per output", seed)
    la = lw.laplace(model, (x, y), likelihood, structure=lw.curvature.Full("primal"), prior=prior_of("mean"))
    f, J, theta = dense(model, x)
    w, a, m = likelihood.noise**-2, la.prior.operator().dense(), la.prior.mean_vector()
    H = torch.einsum("ncp,c,ncq->pq", J, w, J) + a.diag()
    b = torch.einsum("ncp,c,nc->p", J, w, y - f + torch.einsum("ncp,p->nc", J, theta)) + a * m
    close(la.recentered().at.vector, torch.linalg.solve(H, b))


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("kind", ["per output", "categorical"])
def test_passes_over_the_data_reach_v_star_to_the_residual_that_they_report(kind: str, structure: str) -> None:
    model, x, y, likelihood = problem(kind)
    held = lw.laplace(model, (x, y), likelihood, structure=STRUCTURES[structure], prior=0.7)
    loader = DataLoader(TensorDataset(x, y), 40)
    streamed = lw.laplace(
        model, loader, likelihood, structure=STRUCTURES[structure], prior=0.7, memory_budget=STREAMED
    ).recentered()
    recentered = held.recentered()
    found, exact = streamed.tangent_map, recentered.tangent_map
    assert found.residual <= 2.5e-4
    assert found.passes > 0
    _, J, _ = dense(model, x)
    away = found.vector - exact.vector
    f_gap, a_gap = torch.einsum("ncp,p->nc", J, away).norm(), (0.7 * away.square().sum()).sqrt()
    size = max(1.0, float((0.7 * exact.vector.square().sum()).sqrt()))
    assert float(f_gap + a_gap) < 0.02 * size  # the structure's P⁻¹ is not the Hessian's: a factor beyond the residual
    close(streamed.log_evidence(), recentered.log_evidence(), 1e-5)


def test_v_star_answers_to_float32_networks() -> None:
    model, x, y, likelihood = problem("categorical")
    exact = lw.laplace(model, (x, y), likelihood, structure="kron").recentered()
    for budget in (None, STREAMED):
        single = lw.laplace(model.float(), (x.float(), y), likelihood, structure="kron", memory_budget=budget)
        close(single.recentered().log_evidence(), exact.log_evidence(), 1e-4)
        model.double()


def test_a_last_layer_is_the_neural_linear_model() -> None:
    """Bayesian linear regression on the features: its posterior mean is v*, its evidence is M(v*)."""
    model, x, y, likelihood = problem("gaussian")
    la = lw.laplace(model, (x, y), likelihood, subset="last_layer", prior=0.7).recentered()
    features = torch.cat([model[:3](x).detach(), torch.ones(len(x), 1)], -1).double()
    H = features.mT @ features / 0.25 + 0.7 * torch.eye(31).double()
    w = torch.linalg.solve(H, features.mT @ y / 0.25)  # (i + 1, o)
    close(la.at.vector, torch.cat([w[:-1].mT.reshape(-1), w[-1]]))
    cov = 0.25 * torch.eye(len(x)) + features @ features.mT / 0.7
    normal = torch.distributions.MultivariateNormal(torch.zeros(len(x)).double(), cov)
    close(la.log_evidence(), normal.log_prob(y.mT).sum())


# -- the object --------------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """A frozen backbone that counts the examples that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.seen = nn.Linear(3, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return torch.tanh(self.inner(x))


@pytest.mark.parametrize("kind", [*KINDS, "positions"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("structure", ["full", "kron"])
def test_features_of_a_frozen_backbone_are_read_once(kind: str, bias: bool, structure: str) -> None:
    _, x, y, likelihood = problem("gaussian" if kind == "positions" else kind, n=280)
    if kind == "positions":
        x, y = x.reshape(140, 2, 3), y.reshape(140, 2, 2)
    torch.manual_seed(0)
    net = nn.Sequential(Counting(), nn.Linear(4, 2, bias=bias)).double()
    made = [
        lw.laplace(net, data, likelihood, structure=structure, subset="last_layer", prior=0.7, memory_budget=budget)
        for data, budget in (((x, y), None), (DataLoader(TensorDataset(x, y), 30), STREAMED))
    ]
    rows, head = (la.jacobian(la.data) for la in made)
    assert rows.rows is not None
    assert rows.head is None
    assert head.rows is None
    assert head.head is not None
    v, u, root = draw(rows.rows.shape[1]), draw(*rows.f.shape), draw(*rows.f.shape, 3)
    close(head.push(v), rows.push(v))
    close(head.pull(u), rows.pull(u))
    close(head.column_squares(), rows.column_squares())
    dense_rows = torch.einsum("mcq,mcp->mqp", root, rows.rows.reshape(*rows.f.shape, -1)).flatten(0, 1)
    close(head.head.gram(root), dense_rows.mT @ dense_rows)
    net[0].seen = 0
    exact, read = (la.tuned(center="tangent") for la in made)
    close(read.tangent_map.vector, exact.tangent_map.vector, 1e-5)
    close(read.log_evidence(), exact.log_evidence(), 1e-5)
    assert read.tuning is not None
    assert read.tuning.passes == 1
    few = net[0].seen
    for precision in (0.01, 100.0):
        made[1].replace(prior=precision).recentered()
    if kind != "positions":
        made[1].predict(x[:1], mean="process")
    assert net[0].seen - few < len(x)  # the one input, and a few that predictions are held to


def test_a_center_can_be_asked_for_in_every_way() -> None:
    model, x, y, likelihood = problem("gaussian")
    la = lw.laplace(model, (x, y), likelihood, structure="kron")
    moved = la.recentered()
    assert (la.center, moved.center) == ("map", "tangent")
    close(la.log_evidence(center="tangent"), moved.log_evidence())
    close(moved.log_evidence(center="map"), la.log_evidence())
    assert moved.log_evidence() > la.log_evidence()
    other = moved.replace(prior=3.0)  # v* is another one, and solved for when it is needed
    assert other.center == "tangent"
    assert other.at is None
    close(other.log_evidence(), la.replace(prior=3.0).recentered().log_evidence())
    close(moved.log_evidence(prior=3.0), other.log_evidence())
    assert "centered at the tangent MAP" in repr(moved)
    more = moved.updated((x[:7], y[:7]))
    both = lw.laplace(model, (torch.cat([x, x[:7]]), torch.cat([y, y[:7]])), likelihood, structure="kron")
    close(more.log_evidence(), both.recentered().log_evidence())
    with pytest.raises(lw.errors.InvalidValue, match="'tangent', 'map'"):
        la.log_evidence(center="mode")


def test_the_predictive_mean_is_the_networks_unless_told() -> None:
    model, x, y, likelihood = problem("gaussian")
    new = draw(5, 3)
    for structure in STRUCTURES.values():
        la = lw.laplace(model, (x, y), likelihood, structure=structure).recentered()
        f, J, theta = dense(model, new)
        close(la.predict(new).f_mean, f)
        close(la.predict(new, mean="tangent").f_mean, f + torch.einsum("ncp,p->nc", J, la.at.vector - theta))
        close(la.predict(new, mean="tangent").covariance, la.predict(new).covariance)
        close(la.predict(new, mean="tangent", joint=True).f_mean, la.predict(new, mean="tangent").f_mean)
    with pytest.raises(lw.errors.InvalidValue, match="drop mean="):
        la.predict(new, mean="tangent", via="network")
    close(lw.laplace(model, (x, y), likelihood).predict(new, mean="tangent").f_mean, f)


def test_draws_are_about_the_center() -> None:
    model, x, y, likelihood = problem("gaussian")
    la = lw.laplace(model, (x, y), likelihood, structure="diag", prior=5.0).recentered()
    close(la.posterior.mean, la.at.vector)
    drawn = la.tangent.layout.flatten(la.draw(2000), 1)
    error = la.posterior.draw(2000).std(0) / 2000**0.5
    assert ((drawn.mean(0) - la.at.vector).abs() < 5 * error).all()


def test_a_center_is_saved_bit_by_bit(tmp_path: Path) -> None:
    model, x, y, likelihood = problem("gaussian")
    la = lw.laplace(model, (x, y), likelihood, structure="kron").recentered()
    la.save(tmp_path / "net")
    back = lw.load(tmp_path / "net", model)
    assert back.center == "tangent"
    assert torch.equal(back.tangent_map.vector, la.tangent_map.vector)
    assert all(torch.equal(value, la.at.statistics[key]) for key, value in back.at.statistics.items())
    close(back.log_evidence(), la.log_evidence(), 1e-12)  # eigenvalues come with or without their vectors
    assert torch.equal(back.predict(x[:3], mean="tangent").f_mean, la.predict(x[:3], mean="tangent").f_mean)
    assert (back.at.residual, back.at.passes, back.at.iterations) == (la.at.residual, la.at.passes, la.at.iterations)
    for ask in (lambda: back.log_evidence(prior=2.0), back.tuned, lambda: back.replace(prior=2.0).log_evidence()):
        with pytest.raises(lw.errors.InvalidValue, match="data="):
            ask()
    close(back.recentered(data=(x, y)).log_evidence(), la.log_evidence())
    with pytest.warns(lw.errors.LapwingWarning, match="normalization layers"):
        assert back.tuned(center="map").center == "map"


# -- data --------------------------------------------------------------------------------------------------------


def test_other_data_than_those_of_the_fit_are_refused() -> None:
    model, x, y, likelihood = problem("gaussian")
    la = lw.laplace(model, (x, y), likelihood)
    with pytest.raises(lw.errors.InvalidValue, match="69 examples, not 70"):
        la.recentered(data=(x[1:], y[1:]))
    with pytest.raises(lw.errors.InvalidValue, match="not the data of the fit"):
        la.recentered(data=(x, y + 1))


@pytest.mark.parametrize("budget", [None, STREAMED])
def test_a_shuffled_loader_gives_the_same_v_star_and_the_users_random_state_stays(budget: int | None) -> None:
    model, x, y, likelihood = problem("categorical")
    loader = DataLoader(TensorDataset(x, y), 16, shuffle=True)
    la = lw.laplace(model, loader, likelihood, structure="kron", memory_budget=budget)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    moved = la.recentered()
    assert torch.equal(before, torch.get_rng_state())
    torch.rand(3)  # another order
    expected = lw.laplace(model, (x, y), likelihood, structure="kron").recentered()
    close(moved.log_evidence(), expected.log_evidence(), 1e-5)
    close(moved.recentered().log_evidence(), expected.log_evidence(), 1e-5)


class Reordered:
    """Batches in an order that changes from pass to pass, whatever the random state."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y, self.turn = x, y, 0

    def __iter__(self) -> Any:
        self.turn += 1
        order = torch.roll(torch.arange(len(self.x)), self.turn)
        return iter([(self.x[order], self.y[order])])


def test_an_order_that_changes_between_passes_is_an_error_and_not_a_wrong_answer() -> None:
    model, x, y, likelihood = problem("gaussian")
    la = lw.laplace(model, Reordered(x, y), likelihood, structure="kron", memory_budget=STREAMED)
    with pytest.raises(lw.errors.InvalidValue, match="shuffle=False"):
        la.recentered()


def test_outputs_with_positions_have_their_v_star() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double(), draw(20, 5, 3)
    y = model(x).detach() + 0.3 * draw(20, 5, 2)
    flat = lw.laplace(model, (x.reshape(-1, 3), y.reshape(-1, 2)), lw.likelihoods.Gaussian(0.3)).recentered()
    for budget in (None, STREAMED):
        la = lw.laplace(model, (x, y), lw.likelihoods.Gaussian(0.3), structure="full", memory_budget=budget)
        close(la.recentered().at.vector, flat.at.vector, 1e-6)


def test_a_solve_that_does_not_converge_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y, likelihood = problem("categorical")
    la = lw.laplace(model, (x, y), likelihood, structure="diag", prior=1e-3)
    monkeypatch.setattr("lapwing.center.search.SEARCH_STEPS", 1)
    with pytest.raises(lw.errors.NotConverged, match="residual"):
        la.recentered()


class Poisson(lw.likelihoods.Likelihood):
    """A log link: a full Newton step from far away overflows, so the line search must hold it."""

    def validate(self, f: Tensor, y: Tensor) -> None: ...

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return (y * f - f.exp() - torch.lgamma(y + 1)).sum(-1)

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        return y - f.exp()

    def hessian_root(self, f: Tensor) -> Tensor:
        return torch.diag_embed((0.5 * f).exp())

    def curvature_weights(self, factor: str = "exact") -> Tensor:
        return torch.ones(1, dtype=torch.float64)

    def statistics(self, f: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"log_lik": self.log_prob(f.double(), y).sum()}

    def log_likelihood(self, statistics: dict[str, Tensor]) -> Tensor:
        return statistics["log_lik"]


def test_the_line_search_holds_a_step_that_would_overflow() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 9), nn.Tanh(), nn.Linear(9, 1)).double(), draw(40, 3)
    with torch.no_grad():
        model[2].bias -= 12.0  # rates of e⁻¹² at the network, for counts in the hundreds
    y = torch.poisson(torch.full((40, 1), 300.0)).double()
    la = lw.laplace(model, (x, y), Poisson(), structure="full", prior=1e-4).recentered()
    f, J, theta = dense(model, x)
    z = f + torch.einsum("ncp,p->nc", J, la.at.vector - theta)
    gradient = torch.einsum("ncp,nc->p", J, y - z.exp()) - 1e-4 * la.at.vector
    assert float(gradient.abs().max()) < 1e-5
    assert la.at.residual < 1e-8
