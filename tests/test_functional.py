"""Functional Laplace: inducing inputs and independent outputs, against the exact dual form and dense algebra."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from helpers import backward_rows, close, draw
from lapwing.gp.choice import farthest, pivots

KINDS = ("gaussian", "per output", "classes", "labels", "binary", "images", "sequences")


def problem(kind: str, seed: int = 0) -> tuple[nn.Module, Tensor, Tensor, lw.likelihoods.Likelihood]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x = draw(8, 4)
    if kind == "images":
        net = nn.Sequential(nn.Conv2d(2, 3, (2, 3), stride=(1, 2)), nn.Tanh(), nn.Flatten(), nn.Linear(24, 2)).double()
        return net, draw(8, 2, 5, 6), draw(8, 2), lw.likelihoods.Gaussian(0.4)
    if kind == "sequences":
        return net, draw(6, 2, 4), torch.randint(3, (6, 2)), lw.likelihoods.Categorical()
    if kind == "classes":
        return net, x, torch.randint(3, (8,)), lw.likelihoods.Categorical()
    if kind == "labels":
        return net, x, torch.randint(3, (8,)), lw.likelihoods.Dirichlet(0.1)
    if kind == "binary":
        return net, x, torch.randint(2, (8, 3)), lw.likelihoods.Bernoulli()
    return net, x, draw(8, 3), lw.likelihoods.Gaussian([0.3, 0.8, 0.5] if kind == "per output" else 0.4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prior", [0.7, "layerwise"])
def test_all_data_as_inducing_inputs_are_the_exact_process(kind: str, prior: object) -> None:
    """At training and at new inputs, together and apart, and in the evidence at the trained weights."""
    model, x, y, likelihood = problem(kind)
    prior = lw.priors.Gaussian(0.7, per="layer") if prior == "layerwise" else prior
    full, new = lw.laplace(model, (x, y), likelihood, structure="full", prior=prior), draw(3, *x.shape[1:])
    found = lw.gp.functional(model, (x, y), likelihood, inducing=x, prior=prior)
    for at in (x, new):
        close(found.predict(at).f_mean, full.predict(at).f_mean)
        close(found.predict(at).covariance, full.predict(at).covariance, 1e-7)
        close(found.predict(at, joint=True).covariance, full.predict(at, joint=True).covariance, 1e-7)
    close(found.log_evidence(), full.log_evidence(center="map"), 1e-7)
    moved = found.replace(prior=prior * 2 if isinstance(prior, float) else prior.scaled(2.0))
    close(moved.predict(new).covariance, full.replace(prior=moved.prior).predict(new).covariance, 1e-7)


@pytest.mark.parametrize("seed", range(3))
def test_fewer_inducing_inputs_follow_the_dense_formula(seed: int) -> None:
    """cov = k − Q + ψ G⁻¹ ψᵀ, with Q = K_xZ K_ZZ⁻¹ K_Zx: by dense matrices of autograd."""
    model, x, y, likelihood = problem("classes", seed)
    Z, new, a = draw(3, 4), draw(4, 4), 0.7
    found = lw.gp.functional(model, (x, y), likelihood, inducing=Z, prior=a)
    J, H, R = (backward_rows(model(t), model.parameters()).flatten(0, 1) for t in (x, Z, new))
    half = torch.linalg.cholesky(H @ H.mT / a)
    psi, there = (torch.linalg.solve_triangular(half, H @ rows.mT / a, upper=False) for rows in (J, R))
    p = model(x).softmax(-1)
    blocks = torch.block_diag(*(torch.diag_embed(p) - p[:, :, None] * p[:, None]))
    G = psi @ blocks @ psi.mT + torch.eye(9).double()
    cov = R @ R.mT / a - there.mT @ there + there.mT @ torch.linalg.solve(G, there)
    close(found.predict(new, joint=True).covariance.reshape(12, 12), cov.detach(), 1e-7)
    theta = torch.cat([p.reshape(-1) for p in model.parameters()])
    fit = torch.distributions.Categorical(logits=model(x)).log_prob(y).sum()
    close(found.log_evidence(), (fit - 0.5 * a * theta @ theta - 0.5 * torch.logdet(G)).detach(), 1e-7)
    exact = lw.laplace(model, (x, y), likelihood, structure="full", prior=a)
    assert float(found.log_evidence()) >= float(exact.log_evidence(center="map"))


def test_farthest_points_start_far_from_the_mean_and_differ() -> None:
    x = torch.tensor([[0.0, 0], [1, 0], [0, 2], [9, 9], [9, 9], [-1, 0]]).double()
    found = farthest(x, 4)
    assert torch.equal(found[0], x[3])
    assert torch.equal(found[1], x[5])
    assert len(found.unique(dim=0)) == 4
    assert len(farthest(x, 99)) == 5  # one is there twice


@pytest.mark.parametrize("seed", range(3))
def test_pivots_are_where_most_is_left(seed: int) -> None:
    """Against K − K_z K_zz⁻¹ K_zᵀ by a solver, anew for each pivot."""
    root = torch.randn(9, 6, generator=torch.Generator().manual_seed(seed)).double()
    K, chosen = root @ root.mT, []
    for _ in range(5):
        cross = K[:, chosen]
        left = K - cross @ torch.linalg.solve(K[chosen][:, chosen], cross.mT) if chosen else K
        chosen.append(int(left.diagonal().argmax()))
    assert pivots(K, 5).tolist() == chosen
    assert len(pivots(K, 9)) == 6  # the rank
    assert len(pivots(torch.cat([torch.cat([K, K], 1)] * 2), 99)) == 6


@pytest.mark.parametrize("kind", ["gaussian", "per output", "classes", "labels", "binary", "images"])
def test_inputs_chosen_by_the_evidence_are_all_of_them_in_the_end(kind: str) -> None:
    model, x, y, likelihood = problem(kind)
    exact = lw.laplace(model, (x, y), likelihood, structure="full", prior=0.7)
    found = lw.gp.functional(model, (x, y), likelihood, inducing=len(x), choice="evidence", prior=0.7)
    close(found.log_evidence(), exact.log_evidence(center="map"), 1e-7)
    close(found.predict(x).covariance, exact.predict(x).covariance, 1e-7)


@pytest.mark.parametrize("count", [1, 3, 6])
def test_what_the_chosen_inputs_leave_bounds_the_evidence(count: int) -> None:
    """One output: 0 ≤ log Z − exact ≤ ½ tr Λ(K − Q), and farthest inputs leave more where an input says nothing."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double(), draw(20, 3)
    with torch.no_grad():
        net[0].weight[:, 2] = 0  # of no consequence to f, and far apart
    x[:, 2] *= 100
    y, likelihood = draw(20, 1), lw.likelihoods.Gaussian(0.4)
    exact = float(lw.laplace(net, (x, y), likelihood, structure="full", subset=["2.*"]).log_evidence(center="map"))
    net[0].requires_grad_(False)
    J, off = backward_rows(net(x), net[2].parameters()).flatten(0, 1), {}
    for choice in ("farthest", "evidence"):
        fit = lw.gp.functional(net, (x, y), likelihood, inducing=count, choice=choice)
        H = backward_rows(net(fit.inducing.points), net[2].parameters()).flatten(0, 1)
        K, cross = J @ J.mT, J @ H.mT
        left = (K - cross @ torch.linalg.pinv(H @ H.mT, rtol=1e-12) @ cross.mT).trace() / 0.16
        off[choice] = float(fit.log_evidence()) - exact
        assert -1e-6 <= off[choice] <= 0.5 * float(left) + 1e-6
    if count > 1:  # the first is where the prior is widest, which is no choice
        assert off["evidence"] < off["farthest"] + 1e-6


def test_a_number_of_inducing_inputs_tunes_saves_and_compares(tmp_path: Path) -> None:
    model, x, y, likelihood = problem("gaussian")
    fit = lw.gp.functional(model, (x, y), likelihood, inducing=5)
    tuned = fit.tuned()
    assert float(tuned.log_evidence()) > float(fit.log_evidence())
    tuned.save(tmp_path / "fit")
    again = lw.load(tmp_path / "fit", model)
    assert torch.equal(again.predict(x).covariance, tuned.predict(x).covariance)
    close(again.log_evidence(), tuned.log_evidence(), 1e-12)
    table = lw.compare({"few": tuned, "all": lw.laplace(model, (x, y), likelihood).tuned(center="map")})
    assert {row.name for row in table.rows} == {"few", "all"}
    assert repr(tuned).startswith(
        "Functional(gaussian; 15 features of 5 inducing inputs; 43 parameters, 8 examples; tuned"
    )
    with pytest.raises(lw.errors.Unsupported, match="f_sample"):
        tuned.draw(2)


def test_without_inducing_inputs_it_is_the_dual_form() -> None:
    model, x, y, likelihood = problem("gaussian")
    found = lw.gp.functional(model, (x, y), likelihood, prior=0.7)
    assert str(found.state.structure) == "full (dual)"
    exact = lw.laplace(model, (x, y), likelihood, structure="full", prior=0.7)
    close(found.log_evidence(center="tangent"), exact.log_evidence(center="tangent"))


# -- independent outputs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gaussian", "per output", "labels", "binary", "images"])
@pytest.mark.parametrize("seed", range(3))
def test_independent_outputs_are_one_process_each(kind: str, seed: int) -> None:
    """Against dense algebra on each output's own rows; the evidence of a quadratic likelihood is log N(r; 0, K + D)."""
    model, x, y, likelihood = problem(kind, seed)
    new, a = draw(3, *x.shape[1:]), 0.7
    found = lw.gp.functional(model, (x, y), likelihood, independent=True, prior=a)
    J, R = (backward_rows(model(t), model.parameters()).detach() for t in (x, new))
    f, theta = model(x).detach(), torch.cat([p.reshape(-1) for p in model.parameters()]).detach()
    precision = likelihood.scaled_root(f, y).square().sum(-1)
    total, joint = 0.0, found.predict(new, joint=True)
    for c in range(f.shape[1]):
        K, cross = J[:, c] @ J[:, c].mT / a, R[:, c] @ J[:, c].mT / a
        C = K + torch.diag(1 / precision[:, c])
        cov = R[:, c] @ R[:, c].mT / a - cross @ torch.linalg.solve(C, cross.mT)
        close(joint.covariance[:, c, :, c], cov, 1e-7)
        close(found.predict(new).f_var[:, c], cov.diagonal(), 1e-7)
        r = likelihood.gradient(f, y)[:, c] / precision[:, c] + J[:, c] @ theta
        total += torch.distributions.MultivariateNormal(torch.zeros(len(x)).double(), C).log_prob(r)
    assert not bool(joint.covariance[:, 0, :, 1].any())
    if likelihood.quadratic:
        close(found.log_evidence(), torch.as_tensor(total), 1e-7)


def test_one_output_has_the_tangent_evidence() -> None:
    """The process's evidence is the tangent model's (identity 3)."""
    torch.manual_seed(0)
    net, x, y = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double(), draw(8, 4), draw(8, 1)
    full = lw.laplace(net, (x, y), lw.likelihoods.Gaussian(0.4), structure="full", prior=0.7)
    found = lw.gp.functional(net, (x, y), lw.likelihoods.Gaussian(0.4), independent=True, prior=0.7)
    close(found.log_evidence(), full.log_evidence(center="tangent"), 1e-7)
    close(found.predict(x).covariance, full.predict(x).covariance, 1e-7)


@pytest.mark.parametrize("kind", ["gaussian", "classes", "labels"])
def test_independent_outputs_are_tuned_and_saved(kind: str, tmp_path: Path) -> None:
    model, x, y, likelihood = problem(kind)
    fit = lw.gp.functional(model, (x, y), likelihood, independent=True)
    tuned = fit.tuned()
    assert float(tuned.log_evidence()) > float(fit.log_evidence())
    _, slopes = tuned._slopes({"precision": tuned.posterior.scale, **tuned.likelihood.hyperparameters})
    assert tuned.tuning.at_bound or all(float(v.abs().max()) < 0.02 for v in slopes.values())
    tuned.save(tmp_path / "fit")
    again = lw.load(tmp_path / "fit", model)
    assert torch.equal(again.predict(x).covariance, tuned.predict(x).covariance)
    assert torch.equal(again.log_evidence(), tuned.log_evidence())
    held = fit.tuned(fixed="precision") if kind == "gaussian" else fit
    assert float(held.posterior.scale) == 1
    assert "3 processes of 8 inputs" in repr(tuned)


def test_bad_input_is_named() -> None:
    model, x, y, likelihood = problem("gaussian")
    with pytest.raises(lw.errors.InvalidValue, match="whole number"):
        lw.gp.functional(model, (x, y), likelihood, inducing=0)
    with pytest.raises(lw.errors.InvalidValue, match="no example"):
        lw.gp.functional(model, (x, y), likelihood, inducing=x[:0])
    with pytest.raises(lw.errors.InvalidValue, match="choice must be one of"):
        lw.gp.functional(model, (x, y), likelihood, inducing=3, choice="random")
    sequences = problem("sequences")
    with pytest.raises(lw.errors.Unsupported, match="without positions"):
        lw.gp.functional(sequences[0], sequences[1:3], sequences[3], inducing=3, choice="evidence")
    with pytest.raises(lw.errors.Unsupported, match="drop one"):
        lw.gp.functional(model, (x, y), likelihood, inducing=3, independent=True)
    with pytest.raises(lw.errors.Unsupported, match="gprior"):
        lw.gp.functional(model, (x, y), likelihood, inducing=3, prior="gprior")
    with pytest.raises(lw.errors.InvalidValue, match="names no hyperparameter"):
        lw.gp.functional(model, (x, y), likelihood, independent=True).tuned("weight")
    one = lw.gp.functional(model, (x[:1], y[:1]), likelihood, inducing=4)
    assert one.predict(x).f_var.shape == (8, 3)
    twice = torch.cat([x, x])
    close(
        lw.gp.functional(model, (x, y), likelihood, inducing=twice).log_evidence(),
        lw.gp.functional(model, (x, y), likelihood, inducing=x).log_evidence(),
        1e-7,
    )


@pytest.mark.parametrize(
    "options", [{}, {"inducing": 4}, {"inducing": 4, "choice": "evidence"}, {"independent": True}], ids=str
)
def test_one_example_and_repeated_ones_are_right(options: dict[str, object]) -> None:
    """Each example twice is each once under half the noise variance, and covariances stay positive."""
    model, x, y, _ = problem("gaussian")
    one = lw.gp.functional(model, (x[:1], y[:1]), lw.likelihoods.Gaussian(0.4), **options)
    assert bool(torch.isfinite(one.predict(x).f_var).all())
    assert bool(torch.isfinite(one.log_evidence()))
    twice = torch.cat([x, x]), torch.cat([y, y])
    found = lw.gp.functional(model, twice, lw.likelihoods.Gaussian(0.4), **options).predict(twice[0], joint=True)
    once = lw.gp.functional(model, (x, y), lw.likelihoods.Gaussian(0.4 / 2**0.5), **options).predict(x, joint=True)
    close(found.covariance[:8, :, :8], once.covariance, 1e-7)
    exact = lw.gp.functional(model, twice, lw.likelihoods.Gaussian(1e-5), **options).predict(twice[0], joint=True)
    values = torch.linalg.eigvalsh(exact.covariance.reshape(48, 48))
    assert float(values[0]) > -1e-9
    assert bool(torch.isfinite(exact.f_sample(3)).all())


SOME = ("gaussian", "labels")


@pytest.mark.filterwarnings("ignore:tuning stopped at a bound")  # targets are noise, and may ask for no prior
@pytest.mark.parametrize(
    "kind", [k if k in SOME else pytest.param(k, marks=pytest.mark.full) for k in KINDS if k != "sequences"]
)
@pytest.mark.parametrize("by", ["all data", "a number", "inputs", "independent"])
def test_every_process_has_the_same_verbs(by: str, kind: str, tmp_path: Path) -> None:
    """tuned, log_evidence, predict and save, whatever the process is made of."""
    model, x, y, likelihood = problem(kind)
    options = {"all data": {}, "a number": {"inducing": 3}, "inputs": {"inducing": x[:4]}}
    found = lw.gp.functional(model, (x, y), likelihood, **options.get(by, {"independent": True}))
    tuned = found.tuned()
    # of all data it is a Laplace object, whose search is about its tangent's mode
    centers = {} if by != "all data" else {"center": tuned.tuning.center}
    assert float(tuned.log_evidence(**centers)) >= float(found.log_evidence(**centers)) - 1e-6
    tuned.save(tmp_path / "fit")
    again = lw.load(tmp_path / "fit", model)
    close(again.log_evidence(), tuned.log_evidence(), 1e-8)
    close(again.predict(x).covariance, tuned.predict(x).covariance, 1e-8)
