"""The evidence at the tangent MAP, and what it picks, in networks with and without normalization layers.

M(θ*) − M(v*) = −½‖θ* − v*‖²_{G+A}      M(v*) = log N(y; f − Jθ* + J m, σ²I + J A⁻¹Jᵀ)      (Gaussian likelihood)
∂M(v*)/∂ log λ_g = ½(γ_g − λ_g‖v*_g − m_g‖²)                 the derivative of v* itself drops out
f(x, k w) = f(x, w):   (w, λ) → (k w, λ/k²) changes neither evidence nor predictive
"""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from helpers import HalfDead, backward_rows, close, draw

METHODS = ("mackay", "evidence")


class Standardized(nn.Linear):
    """A layer of a normalization-free network: each unit's weights less their mean, over their standard deviation."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        w = (w - w.mean(1, keepdim=True)) / w.std(1, keepdim=True)
        return nn.functional.linear(x, w, self.bias)


class UnitNorm(nn.Module):
    """Layer norm without a guard against zero: exactly invariant."""

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return x / x.square().mean(-1, keepdim=True).sqrt()


def norm_of(kind: str, width: int) -> nn.Module:
    made = {
        "batch": lambda: nn.BatchNorm1d(width),
        "batch, not affine": lambda: nn.BatchNorm1d(width, affine=False),
        "layer": lambda: nn.LayerNorm(width, eps=1e-12),
        "layer, not affine": lambda: nn.LayerNorm(width, eps=1e-12, elementwise_affine=False),
        "group": lambda: nn.GroupNorm(2, width, eps=1e-12),
        "group, not affine": lambda: nn.GroupNorm(2, width, eps=1e-12, affine=False),
        "unit": UnitNorm,
    }
    return made[kind]() if kind in made else nn.Identity()


NORMS = (
    "batch",
    "batch, not affine",
    "layer",
    "layer, not affine",
    "group",
    "group, not affine",
    "standardized",
    "none",
)


def network(norm: str, seed: int = 0, outputs: int = 2) -> nn.Module:
    torch.manual_seed(seed)
    first = Standardized(3, 8) if norm == "standardized" else nn.Linear(3, 8, bias=False)
    net = nn.Sequential(first, norm_of(norm, 8), nn.Tanh(), nn.Linear(8, outputs)).double()
    if norm.startswith("batch"):  # statistics of some data, as after training
        net.train()
        for _ in range(20):
            net(draw(50, 3) + 0.3)
    return net.eval()


def problem(norm: str, seed: int = 0, n: int = 30) -> tuple[nn.Module, Tensor, Tensor]:
    model = network(norm, seed)
    x = draw(n, 3)
    target = torch.stack([torch.sin(2 * x[:, 0]) + x[:, 1], x[:, 1] * x[:, 2]], -1)
    return model, x, target + 0.2 * draw(n, 2)


def dense(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """f (n·c,), J (n·c, p) and θ (p,), by autograd."""
    params = list(model.parameters())
    f = model(x)
    return (
        f.detach().reshape(-1),
        backward_rows(f.reshape(-1), params),
        torch.cat([p.detach().reshape(-1) for p in params]),
    )


# -- identity 3: the error of the usual evidence, and what the right one is ----------------------------------------


@pytest.mark.parametrize("norm", NORMS)
def test_the_evidence_at_the_weights_is_less_by_half_their_distance_from_v_star(norm: str) -> None:
    for seed in (0, 1):
        model, x, y = problem(norm, seed)
        la = lw.laplace(model, (x, y), lw.likelihoods.Gaussian(0.4), structure="full", prior=0.9).recentered()
        _, J, theta = dense(model, x)
        away = theta - la.at.vector
        H = J.mT @ J / 0.16 + 0.9 * torch.eye(len(theta))
        close(la.log_evidence(center="map") - la.log_evidence(), -0.5 * away @ H @ away)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("form", ["primal", "dual"])
def test_the_tangent_evidence_is_the_marginal_likelihood_of_a_gaussian_process(norm: str, form: str) -> None:
    model, x, y = problem(norm, 2)
    noise = torch.tensor([0.3, 0.6], dtype=torch.float64)
    prior = lw.priors.Gaussian(2.0, per="layer", mean=0.2)
    la = lw.laplace(model, (x, y), lw.likelihoods.Gaussian(noise), structure=lw.curvature.Full(form), prior=prior)
    f, J, theta = dense(model, x)
    cov = noise.square().repeat(len(x)).diag() + J @ J.mT / 2.0
    mean = f + J @ (torch.full_like(theta, 0.2) - theta)
    expected = torch.distributions.MultivariateNormal(mean, cov).log_prob(y.reshape(-1))
    close(la.log_evidence(center="tangent"), expected)
    terms = la.decompose(center="tangent")
    close(terms.fit - terms.quadratic - terms.occam, expected)
    assert terms.bound == "exact"


# -- identity 4: scale invariance ----------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["layer, not affine", "group, not affine", "standardized", "unit"])
def test_a_normalized_layer_has_no_curvature_along_its_own_weights(norm: str) -> None:
    model, x, _ = problem(norm)
    _, J, theta = dense(model, x)
    own = torch.zeros_like(theta)
    size = model[0].weight.numel()
    own[:size] = theta[:size]
    if norm == "standardized":  # invariant to the scale of each unit's weights, bias apart
        assert float((J @ own).abs().max()) < 1e-9
    else:
        assert float((J @ own).abs().max()) < 1e-9 * float(J.abs().max())


def rescaled(model: nn.Module, k: float) -> nn.Module:
    """The same function, with the first layer's weights k times as large."""
    out = copy.deepcopy(model)
    with torch.no_grad():
        out[0].weight *= k
        if isinstance(out[1], nn.BatchNorm1d):
            out[1].running_mean *= k
            out[1].running_var.mul_(k**2).add_(out[1].eps * (k**2 - 1))
    return out


@pytest.mark.parametrize("structure", ["full", "kron", "diag", "block"])
@pytest.mark.parametrize("norm", ["batch", "layer", "group, not affine", "standardized"])
def test_scaling_a_layer_and_its_prior_leaves_evidence_and_predictive_unchanged(norm: str, structure: str) -> None:
    model, x, y = problem(norm)
    if norm == "standardized":
        model[0].bias.requires_grad_(False)
    prior = {name: 0.5 + i for i, name in enumerate(n for n, p in model.named_parameters() if p.requires_grad)}
    reference = lw.laplace(model, (x, y), lw.likelihoods.Gaussian(0.3), structure=structure, prior=prior).recentered()
    for k in (0.1, 7.0, 100.0):
        scaled = {**prior, "0.weight": prior["0.weight"] / k**2}
        la = lw.laplace(
            rescaled(model, k), (x, y), lw.likelihoods.Gaussian(0.3), structure=structure, prior=scaled
        ).recentered()
        close(la.log_evidence(), reference.log_evidence(), 1e-7)
        close(la.predict(x[:4] + 1).covariance, reference.predict(x[:4] + 1).covariance, 1e-7)


@pytest.mark.filterwarnings("ignore:tuning stopped at a bound")
@pytest.mark.parametrize("norm", ["layer", "layer, not affine", "group", "batch", "standardized"])
def test_a_layerwise_tuned_predictive_does_not_depend_on_the_scale_of_a_layer(norm: str) -> None:
    model, x, y = problem(norm, n=60)
    new, target = draw(40, 3), draw(40, 2)
    if norm == "standardized":
        model[0].bias.requires_grad_(False)

    def fitted(net: nn.Module, prior: Any) -> Tensor:
        return lw.laplace(net, (x, y), "gaussian", structure="full", prior=prior).tuned().predict(new).log_prob(target)

    layerwise, shared = fitted(model, "layerwise"), fitted(model, 1.0)
    for k in (0.1, 3.0, 100.0):
        assert float((fitted(rescaled(model, k), "layerwise") - layerwise).abs().max()) < 1e-3
    assert float((fitted(rescaled(model, 100.0), 1.0) - shared).abs().max()) > 1e-2


def test_the_naive_evidence_falls_as_weights_grow_and_the_tangent_one_stays_bounded() -> None:
    model, x, y = problem("unit")
    found = []
    for k in (10.0, 100.0, 1000.0):
        la = lw.laplace(rescaled(model, k), (x, y), lw.likelihoods.Gaussian(0.3), structure="full", prior=1.0)
        found.append((float(la.log_evidence()), float(la.log_evidence(center="tangent"))))
    naive, tangent = zip(*found, strict=True)
    square = float(model[0].weight.detach().square().sum())
    assert naive[2] - naive[1] == pytest.approx(-0.5 * square * (1e6 - 1e4), rel=1e-3)
    assert abs(tangent[2] - tangent[1]) < 0.1  # the layer's own contribution fades, and nothing else moves
    assert max(tangent) - min(tangent) < 5


# -- derivatives ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gaussian", "per output", "categorical"])
@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_the_gradient_of_the_tangent_evidence_is_its_finite_difference(kind: str, structure: str) -> None:
    model, x, y = problem("layer")
    noise = {"gaussian": torch.tensor(0.4), "per output": torch.tensor([0.3, 0.5])}.get(kind)
    likelihood = lw.likelihoods.Categorical() if noise is None else lw.likelihoods.Gaussian(noise.double())
    la = lw.laplace(
        model, (x, y if noise is not None else y.argmax(-1)), likelihood, structure=structure, prior="layerwise"
    )
    logs = {"precision": torch.tensor([0.3, -0.5, 0.8], dtype=torch.float64)}
    if noise is not None:
        logs["noise"] = noise.double().log()

    def value(now: dict[str, Tensor]) -> Tensor:
        likelihood = None if noise is None else la.likelihood.replace(noise=now["noise"].exp())
        return la.log_evidence("tangent", la.prior.replace(precision=now["precision"].exp()), likelihood)

    moving = {k: v.clone().requires_grad_() for k, v in logs.items()}
    slopes = dict(zip(moving, torch.autograd.grad(value(moving), list(moving.values())), strict=True))
    for key, at in logs.items():
        for i in range(at.numel()):
            h = torch.zeros_like(at)
            h.reshape(-1)[i] = 1e-4
            difference = (value({**logs, key: at + h}) - value({**logs, key: at - h})) / 2e-4
            close(slopes[key].reshape(-1)[i], difference, 1e-5)
    assert not value(logs).requires_grad


# -- identities 6 and 7: the fixed point ---------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:tuning stopped at a bound")
@pytest.mark.parametrize("norm", ["batch", "layer, not affine", "standardized", "none"])
@pytest.mark.parametrize("prior", [1.0, "layerwise"])
def test_what_is_tuned_is_a_stationary_point_that_em_shares(norm: str, prior: Any) -> None:
    model, x, y = problem(norm)
    for structure in ("full", "kron", "diag"):
        la = lw.laplace(model, (x, y), lw.likelihoods.Gaussian(0.2), structure=structure, prior=prior)
        tuned = la.tuned(fixed=("noise",))
        assert tuned.center == tuned.tuning.center == "tangent"
        gamma, square = tuned.effective_dimension(), tuned.prior.scatter(tuned.at.vector)
        lam = tuned.prior.precision.reshape(-1)
        inside = torch.tensor([f"precision[{name}]" not in tuned.tuning.at_bound for name in tuned.prior.names])
        gap = (gamma - lam * square).abs() / gamma.clamp(min=1)
        assert (gap[inside] <= 1.01e-3).all()
        trace = lw.operators.linalg.traces(tuned.spread.precision, tuned.prior.groups())
        assert trace.shape == gamma.shape
        covariance = torch.linalg.inv(lw.operators.linalg.to_dense(tuned.posterior.precision)).diagonal()
        index = tuned.prior.index if tuned.prior.index is not None else torch.zeros(len(covariance)).long()
        tr = torch.zeros_like(gamma).index_add(0, index, covariance)
        em = tuned.prior.counts() / (square + tr)  # λ = P/(‖v‖² + tr Σ) has the same fixed point
        counts = tuned.prior.counts()
        assert ((counts - em.reciprocal() * lam * counts)[inside].abs() <= 1.1e-3 * gamma.clamp(min=1)[inside]).all()


@pytest.mark.filterwarnings("ignore:tuning stopped at a bound")
@pytest.mark.parametrize("kind", ["gaussian", "categorical"])
def test_gradient_and_fixed_point_pick_the_same_scalar(kind: str) -> None:
    model, x, y = problem("layer")
    data = (x, y if kind == "gaussian" else y.argmax(-1))
    for structure in ("full", "kron", "block", "diag"):
        la = lw.laplace(model, data, kind, structure=structure)
        first, second = (la.tuned(method) for method in METHODS)
        close(first.log_evidence(), second.log_evidence(), 1e-4)
        close(first.prior.precision.log(), second.prior.precision.log(), 2e-2)
        grid = [
            float(la.log_evidence("tangent", prior=float(p), likelihood=second.likelihood)) for p in (0.5, 1.0, 2.0)
        ]
        assert float(second.log_evidence()) >= max(grid) - 1e-6


def test_effective_dimensions_are_within_their_bounds_and_fall_with_the_precision() -> None:
    for norm in NORMS:
        model, x, y = problem(norm, n=5)
        la = lw.laplace(model, (x, y), lw.likelihoods.Gaussian(0.2), structure="full").recentered()
        gammas = [float(la.replace(prior=p).effective_dimension().sum()) for p in (1e-4, 1e-2, 1.0, 1e2, 1e4)]
        assert all(a > b for a, b in itertools.pairwise(gammas))
        assert 0 <= gammas[-1] <= gammas[0] <= min(10, la.state.layout.size)


# -- identity 8: bounds ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["batch", "layer", "none"])
@pytest.mark.parametrize("kind", ["gaussian", "categorical"])
def test_block_and_diagonal_evidences_are_lower_bounds(norm: str, kind: str) -> None:
    model, x, y = problem(norm)
    data = (x, y if kind == "gaussian" else y.argmax(-1))
    terms = {
        s: lw.laplace(model, data, kind, structure=s).decompose("tangent") for s in ("full", "block", "diag", "kron")
    }
    assert terms["diag"].log_evidence <= terms["block"].log_evidence <= terms["full"].log_evidence
    close(terms["diag"].fit, terms["full"].fit, 1e-7)  # v* is the tangent model's own, whatever the structure
    close(terms["kron"].quadratic, terms["full"].quadratic, 1e-7)
    assert [terms[s].bound.split()[0] for s in ("full", "block", "diag", "kron")] == [
        "exact",
        "lower",
        "lower",
        "neither",
    ]
    rough = lw.laplace(model, data, kind, structure="diag", factor="monte_carlo")
    assert rough.decompose("map").bound.startswith("neither")


@pytest.mark.parametrize("kind", ["gaussian", "categorical"])
def test_a_partition_of_the_data_bounds_the_evidence_and_merging_blocks_tightens_it(kind: str) -> None:
    model, x, y = problem("layer")
    target = y if kind == "gaussian" else y.argmax(-1)
    la = lw.laplace(model, (x, target), kind, structure=lw.curvature.Full("dual"), prior="layerwise").recentered()

    def over(*sizes: int) -> lw.evidence.Evidence:
        blocks = zip(x.split(sizes), target.split(sizes), strict=True)
        states = [lw.accumulate(lw.curvature.Full("dual"), la.tangent, la.likelihood, block) for block in blocks]
        return lw.evidence.partitioned(states, la.prior, la.likelihood, la.at)

    whole, two, five = over(30), over(10, 20), over(10, 5, 5, 4, 6)
    close(whole.log_evidence, la.log_evidence())
    assert whole.bound == "exact"
    assert five.log_evidence < two.log_evidence < whole.log_evidence
    assert two.bound.startswith("lower bound")
    _, J, _ = dense(model, x)
    if kind == "gaussian":  # Σ_b ½ log|I + K_bb|, by hand
        K = J @ J.mT
        expected = sum(
            0.5 * torch.logdet(torch.eye(2 * n) + K[i : i + 2 * n, i : i + 2 * n]) for i, n in ((0, 10), (20, 20))
        )
        close(two.occam, expected)
    with pytest.raises(lw.errors.InvalidValue, match="at least one state"):
        lw.evidence.partitioned([], la.prior, la.likelihood)


# -- tuning: its default, its record, its limits ---------------------------------------------------------------------


def test_tuning_at_the_tangent_center_is_the_default_and_says_how_it_went() -> None:
    model, x, y = problem("none", n=50)
    for budget in (None, 2**16):
        tuned = lw.laplace(model, (x, y), "gaussian", structure="kron", memory_budget=budget).tuned()
        how = tuned.tuning
        assert (how.method, how.center, how.converged, how.at_bound) == ("mackay", "tangent", True, ())
        assert how.iterations == len(how.trace)
        assert how.residual <= (1e-6 if budget is None else 1e-2)
        assert how.passes == 1 if budget is None else how.passes > 1
        assert how.trace[-1] == pytest.approx(float(tuned.log_evidence()), abs=1e-2)
        assert "tuned by mackay at the tangent" in repr(tuned)


@pytest.mark.parametrize("kind", ["gaussian", "per output", "categorical"])
@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_passes_over_the_data_tune_like_rows_in_memory(kind: str, structure: str) -> None:
    model, x, y = problem("layer", n=50)
    likelihood = {"per output": lw.likelihoods.Gaussian([1.0, 1.0])}.get(kind, kind)
    data = (x, y.argmax(-1) if kind == "categorical" else y)
    held = lw.laplace(model, data, likelihood, structure=structure).tuned()
    streamed = lw.laplace(model, data, likelihood, structure=structure, memory_budget=2**16).tuned()
    assert streamed.tuning.converged
    close(streamed.log_evidence(), held.log_evidence(), 1e-3)
    close(streamed.prior.precision.log(), held.prior.precision.log(), 2e-2)


def test_normalization_layers_are_named_where_the_naive_evidence_is_asked_for() -> None:
    model, x, y = problem("batch")
    la = lw.laplace(model, (x, y), "gaussian")
    with pytest.warns(lw.errors.LapwingWarning, match=r"normalization layers \(1\).*center='tangent'") as caught:
        la.tuned(center="map", fixed=("noise",))
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tuned = la.tuned(fixed=("noise",))
        assert "normalization layers (1)" in tuned.tuning.note
        short = float(tuned.log_evidence() - tuned.log_evidence(center="map"))
        assert f"{short:.3g} nats below the tangent MAP" in tuned.tuning.note
        last = lw.laplace(model, (x, y), "gaussian", subset="last_layer")  # what follows the norm has a mode
        last.tuned(center="map", fixed=("noise",))


@pytest.mark.filterwarnings("ignore:tuning stopped at a bound")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_dead_units_leave_tuning_finite(method: str, structure: str) -> None:
    torch.manual_seed(0)
    model, x = HalfDead().double(), draw(20, 3)
    y = model(x).detach() + 0.2 * draw(20, 2)
    tuned = lw.laplace(model, (x, y), "gaussian", structure=structure, prior="layerwise").tuned(method)
    assert torch.isfinite(tuned.prior.precision).all()
    assert torch.isfinite(tuned.log_evidence())
    assert torch.isfinite(tuned.predict(x).total).all()
    close(tuned.at.vector[8:], torch.zeros(8).double(), 1e-3)  # what the data do not see is at its prior mean


@pytest.mark.filterwarnings("ignore:tuning stopped at a bound")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("per_output", [False, True])
def test_labels_without_noise_stop_at_a_bound(method: str, per_output: bool) -> None:
    torch.manual_seed(1)
    model, x = network("none"), draw(60, 3)
    y = model(x).detach()
    noise = torch.ones(2 if per_output else ()).double()
    tuned = lw.laplace(model, (x, y), lw.likelihoods.Gaussian(noise), structure="full").tuned(method)
    assert torch.isfinite(tuned.likelihood.noise).all()
    assert torch.isfinite(tuned.prior.precision).all()
    assert torch.isfinite(tuned.log_evidence())
    assert float(tuned.likelihood.noise.max()) < 0.05 * float(y.std())
    assert math.isfinite(tuned.tuning.residual)


@pytest.mark.filterwarnings("ignore:tuning stopped at a bound")
@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_targets_of_any_scale_are_tuned_alike(scale: float) -> None:
    """y → s·y with f → s·f: σ scales, precisions of the last layer fall by s²; evidence moves by −NC log s."""
    model, x, y = problem("layer")
    with torch.no_grad():
        big = copy.deepcopy(model)
        big[3].weight *= scale
        big[3].bias *= scale
    ours = lw.laplace(model, (x, y), "gaussian", structure="full", prior="layerwise").tuned()
    theirs = lw.laplace(big, (x, scale * y), "gaussian", structure="full", prior="layerwise").tuned()
    close(theirs.likelihood.noise.log(), ours.likelihood.noise.log() + math.log(scale), 1e-2)


@pytest.mark.filterwarnings("ignore:tuning stopped at a bound")
@pytest.mark.parametrize("method", METHODS)
def test_one_example_can_be_tuned(method: str) -> None:
    model, x, y = problem("layer", n=1)
    tuned = lw.laplace(model, (x, y), "gaussian").tuned(method, fixed=("noise",))
    assert torch.isfinite(tuned.log_evidence())


# -- the noise, and the mean that predictions are about -----------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("per_output", [False, True])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_noise_is_held_at_the_residuals_of_the_mean_that_predictions_are_about(
    method: str, per_output: bool, seed: int
) -> None:
    model, x, _ = problem("batch", seed, n=60)
    f, J, _ = dense(model, x)
    f, away = f.reshape(-1, 2), (J @ draw(J.shape[-1])).reshape(-1, 2)
    y = f + 0.3 * away / away.std(0) + 0.05 * draw(*f.shape)  # which the tangent model fits, and the network does not
    noise = torch.ones(2, dtype=torch.float64) if per_output else 1.0
    la = lw.laplace(model, (x, y), lw.likelihoods.Gaussian(noise), structure="full")
    residual = (y - f).square()
    residual = (residual.mean(0) if per_output else residual.mean().reshape(1)).sqrt()
    about = {mean: la.tuned(method, mean=mean) for mean in ("network", "tangent")}
    own, held = (about[mean].likelihood.noise.reshape(-1) for mean in ("tangent", "network"))
    assert (own < 0.9 * residual).any()
    assert (held >= residual * (1 - 1e-6)).all()
    stuck = own < residual
    close(held[stuck], residual[stuck], 2e-3)
    how = about["network"].tuning
    assert how.converged
    assert how.at_bound == ()
    assert "the noise is held at the network's residuals" in how.note
    assert "the noise is held" not in about["tangent"].tuning.note
    gamma, v = about["network"].effective_dimension(), about["network"].tangent_map.vector
    close(about["network"].prior.precision.reshape(-1) * v.square().sum(), gamma.reshape(-1), 5e-3)


def test_a_noise_above_the_residuals_is_what_the_evidence_picks() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    x = draw(40, 3)
    y = x @ draw(3, 1) + 0.3 * draw(40, 1)
    with torch.no_grad():
        solution = torch.linalg.lstsq(torch.cat([x, torch.ones(40, 1)], 1), y).solution  # θ* fits best
        model.weight.copy_(solution[:3].mT)
        model.bias.copy_(solution[3])
    la = lw.laplace(model, (x, y), "gaussian")
    one, other = la.tuned(mean="network"), la.tuned(mean="tangent")
    close(one.likelihood.noise, other.likelihood.noise, 2e-3)
    close(one.prior.precision, other.prior.precision, 2e-3)


def test_the_mean_of_a_tuning_is_checked() -> None:
    model, x, y = problem("none")
    la = lw.laplace(model, (x, y), "gaussian")
    with pytest.raises(lw.errors.InvalidValue, match=r"mean must be one of .*, got 'other'"):
        la.tuned(mean="other")
    with pytest.raises(lw.errors.InvalidValue, match="belongs to the evidence at center='tangent'"):
        la.tuned(mean="tangent", center="map")


@pytest.mark.filterwarnings("ignore:tuning stopped at a bound")
@pytest.mark.parametrize("budget", [None, 2**16])
def test_half_precision_settles_at_what_its_rounding_leaves(budget: int | None) -> None:
    model, x, y = problem("layer", n=50)
    half = copy.deepcopy(model).half()
    exact = lw.laplace(model, (x, y), "gaussian", structure="kron").tuned()
    rough = lw.laplace(half, (x.half(), y.half()), "gaussian", structure="kron", memory_budget=budget).tuned()
    assert rough.tuning.converged
    assert rough.tuning.residual < 0.2
    close(rough.prior.precision.log(), exact.prior.precision.log(), 0.1)
    close(rough.likelihood.noise.log(), exact.likelihood.noise.log(), 0.02)


@pytest.mark.filterwarnings("ignore:tuning stopped at a bound")
@pytest.mark.parametrize("structure", ["full", "block", "diag"])
def test_a_precision_for_each_weight_is_tuned_at_the_tangent_center(structure: str) -> None:
    model, x, y = problem("layer", n=50)
    prior = lw.priors.Gaussian(1.0, per="weight")
    tuned = lw.laplace(model, (x, y), "gaussian", structure=structure, prior=prior).tuned()
    assert tuned.tuning.converged
    gamma, v = tuned.effective_dimension(), tuned.tangent_map.vector
    precision = tuned.prior.precision.reshape(-1)
    free = (precision.log() - precision.log().max()).abs() > 1e-2  # those at their bound are no fixed points
    close((precision * v.square())[free], gamma.reshape(-1)[free], 5e-3)
