"""Priors that are no plain Gaussian: densities against torch's, scale mixtures against integrals over the scale, EM by
them, what they do to a MAP, and what refuses them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from scipy import special
from torch import Tensor, distributions, nn

import lapwing as lw
from helpers import close, normal, seeded
from lapwing.errors import InvalidValue, Unsupported
from lapwing.priors import (
    Bernoulli,
    Gamma,
    Gaussian,
    GPrior,
    HalfCauchy,
    Hierarchical,
    Horseshoe,
    Jeffreys,
    Laplace,
    Mixture,
    Prior,
    StudentT,
    WidthScaled,
    from_weight_decay,
)
from lapwing.priors.exponential_integral import scaled_e1
from lapwing.tangent import linearize


def network(seed: int = 0, inputs: int = 3, hidden: int = 4, outputs: int = 2) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs)).double()


def one_weight(prior: Prior) -> Prior:
    return prior.bind(linearize(nn.Linear(1, 1, bias=False).double()).layout)


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# -- laws ------------------------------------------------------------------------------------------------------------


FAMILIES: list[Prior] = [
    Laplace(0.7, per="unit"),
    Laplace(0.7),
    StudentT(0.8, df=3.0, per="layer"),
    StudentT({"0.*": 0.5, "2.*": 3.0}, df=0.9),
    Mixture(0.1, 1.5, 0.3),
    Mixture(0.1, 1.5, 0.3, per="layer"),
    Horseshoe(0.5, per="layer"),
    Hierarchical(Gamma(2.0, 1.0), per="all"),
    WidthScaled(2.0, mean=0.1),
    WidthScaled(2.0, per="layer"),
]
SLOW: list[Prior] = [
    Horseshoe(0.5, slab=2.0),
    Hierarchical(),
    Hierarchical(Gamma(0.5, 1.0), per="input"),
    Hierarchical(per="weight"),
]


@pytest.mark.parametrize("prior", FAMILIES, ids=lambda prior: prior.kind)
def test_families_keep_the_laws_of_priors(prior: Prior) -> None:
    lw.testing.check_prior(prior)


@pytest.mark.full
@pytest.mark.parametrize("prior", SLOW, ids=lambda prior: prior.kind)
def test_families_by_quadrature_keep_the_laws_of_priors(prior: Prior) -> None:
    lw.testing.check_prior(prior)


@pytest.mark.parametrize(
    ("prior", "theirs"),
    [
        (Laplace(0.7), distributions.Laplace(f64(0.0), f64(0.7))),
        (StudentT(0.7, df=2.5), distributions.StudentT(f64(2.5), f64(0.0), f64(0.7))),
        (
            Mixture(0.2, 1.7, 0.3),
            distributions.MixtureSameFamily(
                distributions.Categorical(f64(0.7, 0.3)), distributions.Normal(f64(0.0, 0.0), f64(0.2, 1.7))
            ),
        ),
    ],
    ids=["laplace", "student", "mixture"],
)
def test_densities_are_torchs(prior: Prior, theirs: distributions.Distribution) -> None:
    layout = linearize(network()).layout
    v = 2 * normal(5, layout.size, seed=1)
    close(torch.func.vmap(prior.bind(layout).log_prob)(layout.unflatten(v)), theirs.log_prob(v).sum(-1), 1e-12)


@pytest.mark.parametrize("density", [Gamma(0.5, 1.0), Gamma(3.0, 0.4), HalfCauchy(0.7)], ids=str)
def test_densities_of_positive_numbers(density: lw.priors.Gamma | lw.priors.HalfCauchy) -> None:
    if isinstance(density, Gamma):
        theirs = distributions.Gamma(f64(density.shape), f64(density.rate))
    else:
        theirs = distributions.HalfCauchy(f64(density.scale))
    x = torch.linspace(0.01, 9, 50, dtype=torch.float64)
    close(density.log_prob(x), theirs.log_prob(x), 1e-12)
    t = x.log().requires_grad_()
    (slope,) = torch.autograd.grad((density.log_prob(t.exp()) + t).sum(), t)
    close(density.slope(x), slope, 1e-10)
    draws, median = density.sample((40_000,), seeded(0)), 0.7
    share = torch.as_tensor(float(theirs.cdf(f64(median))))
    assert abs(float((draws < median).double().mean() - share)) < 5 * (0.25 / 40_000) ** 0.5


@pytest.mark.parametrize("bad", [{"shape": 0.0}, {"rate": -1.0}, {"shape": math.nan}, {"rate": "fast"}])
def test_densities_of_positive_numbers_have_positive_parameters(bad: dict[str, float]) -> None:
    with pytest.raises(InvalidValue, match=f"{next(iter(bad))} of Gamma"):
        Gamma(**bad)


def test_the_exponential_integral_is_scipys() -> None:
    z = torch.logspace(-14, 2.5, 300, dtype=torch.float64)
    close(scaled_e1(z), z.exp() * torch.from_numpy(special.exp1(z.numpy())), 1e-12)
    big = f64(1e4, 1e8)
    close(scaled_e1(big), 1 / big - 1 / big**2 + 2 / big**3, 1e-11)
    torch.autograd.gradgradcheck(scaled_e1, (f64(0.3, 1.9, 2.1, 7.0).requires_grad_(),))


# -- scale mixtures --------------------------------------------------------------------------------------------------


def exponential(s: Tensor) -> Tensor:
    return torch.exp(-s / (2 * 0.7**2))


def inverse_gamma(s: Tensor) -> Tensor:
    return s ** (-1.5 - 1) * torch.exp(-3 * 0.8**2 / (2 * s))


def half_cauchy(s: Tensor) -> Tensor:
    """Of s = τ²λ², τ = ½."""
    return 1 / (s.sqrt() * (1 + s / 0.5**2))


def per_scale(s: Tensor) -> Tensor:
    return 1 / s


MIXED: list[tuple[Prior, Callable[[Tensor], Tensor], float]] = [
    (Laplace(0.7), exponential, math.inf),
    (StudentT(0.8, df=3.0), inverse_gamma, math.inf),
    (Horseshoe(0.5), half_cauchy, math.inf),
    (Horseshoe(0.5, slab=1.3), half_cauchy, 1.3),
    (Hierarchical(HalfCauchy(0.5), per="weight"), half_cauchy, math.inf),
    (Jeffreys(floor=1e-9), per_scale, math.inf),
]


@pytest.mark.parametrize("w", [-2.0, 0.03, 1.0, 9.0])
@pytest.mark.parametrize(("prior", "mixing", "slab"), MIXED, ids=[one[0].kind for one in MIXED])
def test_the_quadratic_is_the_mean_precision_of_the_mixture(
    prior: Prior, mixing: Callable[[Tensor], Tensor], slab: float, w: float
) -> None:
    """E[1/s | w] by the integral over s (identity 23); with a slab 1/s = 1/s₀ + 1/c²."""
    log_s = torch.linspace(-30, 60, 90_001, dtype=torch.float64)
    base = log_s.exp()
    s = 1 / (1 / base + slab**-2)
    density = mixing(base) * (-0.5 * w**2 / s).exp() / s.sqrt() * base  # ds₀ = s₀ d log s₀
    want = (density / s).sum() / density.sum()
    close(one_weight(prior).quadratic(f64(w))[0].dense(), want.reshape(1), 1e-7)


@pytest.mark.parametrize("slab", [math.inf, 1.3])
@pytest.mark.parametrize("w", [-2.0, 1e-3, 0.7])
def test_the_density_of_a_horseshoe_is_its_integral(w: float, slab: float) -> None:
    log_u = torch.linspace(-60, 60, 60_001, dtype=torch.float64)
    s = 1 / (1 / (0.5**2 * log_u.exp()) + slab**-2)
    joint = distributions.Normal(f64(0.0), s.sqrt()).log_prob(f64(w)).exp() * (0.5 * log_u).exp() / (1 + log_u.exp())
    want = (joint.sum() * (log_u[1] - log_u[0]) / math.pi).log()
    close(one_weight(Horseshoe(0.5, slab=slab)).log_density(f64(w)), want, 1e-9)


@pytest.mark.parametrize("n", [1, 7, 4000])
@pytest.mark.parametrize("size", [1e-3, 1.0, 50.0])
@pytest.mark.parametrize("scale", [HalfCauchy(0.8), Gamma(0.5, 1.0), Gamma(400.0, 100.0)], ids=str)
def test_the_density_of_a_hierarchy_is_its_integral(n: int, size: float, scale: HalfCauchy | Gamma) -> None:
    """Over log τ on a fine grid, of a group of n weights."""
    v = size * normal(n, seed=n)
    prior = Hierarchical(scale, per="all").bind(linearize(nn.Linear(n, 1, bias=False).double()).layout)
    t = torch.linspace(-25, 60, 400_001, dtype=torch.float64)
    log_joint = -n * (t + 0.5 * math.log(2 * math.pi)) - 0.5 * v.square().sum() * (-2 * t).exp()
    log_joint = log_joint + scale.log_prob(t.exp()) + t
    want = torch.logsumexp(log_joint, 0) + (t[1] - t[0]).log()
    close(prior.log_density(v), want, 1e-9)
    close(prior.quadratic(v)[0].dense()[:1], (log_joint.softmax(0) * (-2 * t).exp()).sum().reshape(1), 1e-8)


SHRINKING = [Laplace(0.3), StudentT(0.2, df=2.0), Horseshoe(0.1), Horseshoe(0.1, slab=1.0), Mixture(0.05, 1.0, 0.2)]
SHRINKING += [Hierarchical(per="all"), Jeffreys(1e-4)]


@pytest.mark.parametrize("prior", SHRINKING, ids=lambda prior: prior.kind)
@pytest.mark.parametrize("seed", [0, 1])
def test_em_never_lowers_the_joint_density(prior: Prior, seed: int) -> None:
    """w ← (XᵀX/σ² + A(w))⁻¹Xᵀy/σ² (identity 23)."""
    x, p, noise = normal(25, 8, seed=seed), 8, 0.4
    y = x @ (normal(p, seed=seed + 5) * (torch.arange(p) < 3)) + noise * normal(25, seed=seed + 9)
    bound = prior.bind(linearize(nn.Linear(p, 1, bias=False).double()).layout)
    w, before = torch.linalg.lstsq(x, y).solution, -math.inf
    for _ in range(30):
        now = float(bound.log_density(w) - 0.5 * ((y - x @ w) / noise).square().sum())
        assert now >= before - 1e-9 * abs(now)
        if now == math.inf:  # at an infinite peak
            break
        before = now
        w = torch.linalg.solve(x.mT @ x / noise**2 + bound.quadratic(w)[0].dense().diag(), x.mT @ y / noise**2)


# -- with the scales -------------------------------------------------------------------------------------------------


LIFTED = [Horseshoe(0.5), Horseshoe(0.5, slab=1.3, per="layer"), Hierarchical(), Hierarchical(Gamma(2, 1), per="input")]


@pytest.mark.parametrize("prior", [*LIFTED, StudentT(), Gaussian(2.0)], ids=lambda prior: prior.kind)
def test_lifting_undoes_lowering_and_knows_its_jacobian(prior: Prior) -> None:
    bound = prior.bind(linearize(network()).layout)
    p = bound.groups().size
    q = bound.lower(normal(p, seed=3))
    assert q.shape == (p + bound.scales,)
    close(bound.lift(q).weights, normal(p, seed=3), 1e-12)

    def natural(q: Tensor) -> Tensor:
        found = bound.lift(q)
        return torch.cat([found.weights, *found.scales.values()])

    q = q + 0.1 * normal(len(q), seed=4)
    close(bound.lift(q).log_jacobian, torch.linalg.slogdet(torch.func.jacrev(natural)(q)).logabsdet, 1e-10)


@pytest.mark.parametrize("prior", [Horseshoe(0.5), Horseshoe(0.5, slab=1.3), Hierarchical(per="all")])
@pytest.mark.parametrize("w", [-1.2, 0.05])
def test_lifted_densities_integrate_to_that_of_the_weights(prior: Prior, w: float) -> None:
    bound = one_weight(prior)
    log_scale = torch.linspace(-30, 30, 6_001, dtype=torch.float64)

    def joint(t: Tensor) -> Tensor:
        deviation = bound.lift(torch.cat([f64(1.0), t])).weights  # ε = 1
        found = bound.lift(torch.cat([w / deviation, t]))
        return found.log_prob + t.squeeze()

    log_joint = torch.func.vmap(joint)(log_scale.unsqueeze(-1))
    close(torch.logsumexp(log_joint, 0) + (log_scale[1] - log_scale[0]).log(), bound.log_density(f64(w)), 1e-9)


# -- what they do ----------------------------------------------------------------------------------------------------


EXCHANGEABLE = [Laplace(0.4), StudentT(per="layer"), Mixture(), Horseshoe(), Hierarchical(), Jeffreys()]
EXCHANGEABLE += [Bernoulli(0.3), WidthScaled(per="layer"), Gaussian(2.0, per="layer")]


@pytest.mark.parametrize("prior", EXCHANGEABLE, ids=lambda prior: prior.kind)
def test_permuted_hidden_units_are_as_likely(prior: Prior) -> None:
    layout = linearize(network()).layout
    bound = prior.bind(layout)
    weights = {name: w.squeeze(0) for name, w in (prior if prior.proper else Laplace()).draw(layout, 1).items()}
    order = torch.tensor([2, 0, 3, 1])
    moved = {**weights, "0.weight": weights["0.weight"][order], "0.bias": weights["0.bias"][order]}
    moved["2.weight"] = weights["2.weight"][:, order]
    close(bound.log_prob(moved), bound.log_prob(weights), 1e-12)


def test_a_students_pull_is_bounded_and_falls_off() -> None:
    """|∂ log p| ≤ (ν + 1)/(2√ν τ), reached at √ν τ; a Gaussian's grows without end."""
    tau, nu = 0.6, 3.0
    w = torch.linspace(0, 50, 5001, dtype=torch.float64)
    pull = torch.func.vmap(torch.func.grad(one_weight(StudentT(tau, df=nu)).log_density))(w.unsqueeze(-1)).abs()
    bound = (nu + 1) / (2 * nu**0.5 * tau)
    assert float(pull.max()) <= bound + 1e-12
    close(w[pull.argmax()], f64(nu**0.5 * tau)[0], 1e-2)
    assert float(pull[-1]) < 0.1 * bound


def lasso(x: Tensor, y: Tensor, threshold: float) -> Tensor:
    """argmin ½‖y − xw‖² + threshold·‖w‖₁, by coordinate descent."""
    w = torch.zeros(x.shape[1], dtype=torch.float64)
    for _ in range(500):
        for j in range(len(w)):
            rest = x[:, j] @ (y - x @ w + x[:, j] * w[j])
            w[j] = rest.sign() * (rest.abs() - threshold).clamp(min=0) / x[:, j].square().sum()
    return w


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_map_of_a_laplace_prior_has_zeros_and_that_of_a_student_none(seed: int) -> None:
    x, noise, b = normal(30, 6, seed=seed), 0.5, 0.08
    y = x[:, :2] @ f64(1.5, -1.0) + noise * normal(30, seed=seed + 3)
    model = nn.Linear(6, 1, bias=False).double()

    def objective(prior: Prior, w: Tensor) -> float:
        with torch.no_grad():
            model.weight.copy_(w.unsqueeze(0))
        return float(prior.penalty(model).detach() + 0.5 * ((y - x @ w) / noise).square().sum())

    w = lasso(x, y, noise**2 / b)
    assert int((w == 0).sum()) >= 2
    least = objective(Laplace(b), w)
    for j in range(6):
        for step in (-1e-4, 1e-4):
            assert objective(Laplace(b), w + step * torch.eye(6, dtype=torch.float64)[j]) > least
    student = StudentT(b, df=2.0).bind(linearize(model).layout)
    for _ in range(200):
        w = torch.linalg.solve(x.mT @ x / noise**2 + student.quadratic(w)[0].dense().diag(), x.mT @ y / noise**2)
    assert bool((w.abs() > 1e-6).all())


def test_width_scaled_units_keep_their_variance() -> None:
    for width in (4, 64):
        layer = nn.Linear(width, 3).double()
        drawn, x = WidthScaled(0.5).draw(layer, 4000, seeded(1)), torch.ones(width, dtype=torch.float64)
        z = (drawn["weight"] @ x).var(0)
        assert bool(((z - 2).abs() < 5 * 2 * (2 / 4000) ** 0.5).all())
        assert abs(float(drawn["bias"].var()) - 2) < 5 * 2 * (2 / 12_000) ** 0.5


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_width_scaling_is_a_gaussian_of_several_precisions(structure: str) -> None:
    model, x, y = network(), normal(12, 3), normal(12, 2, seed=1)
    same = Gaussian({"0.weight": 6.0, "2.weight": 8.0, "*.bias": 2.0})
    ours, theirs = (
        lw.laplace(model, (x, y), "gaussian", structure=structure, prior=prior) for prior in (WidthScaled(2.0), same)
    )
    close(ours.log_evidence(), theirs.log_evidence(), 1e-10)
    close(ours.predict(x).f_var, theirs.predict(x).f_var, 1e-10)


def test_ard_finds_the_input_that_matters() -> None:
    """A scale for each input, MacKay's evidence: the precisions of the inputs that do nothing grow."""
    x = normal(200, 4, seed=2)
    y = x[:, 1:2] + 0.1 * normal(200, 1, seed=3)
    model = nn.Linear(4, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.linalg.lstsq(x, y).solution.mT)
    with pytest.warns(lw.errors.LapwingWarning, match="stopped at a bound"):
        tuned = lw.laplace(model, (x, y), "gaussian", prior=Gaussian(1.0, per="input")).tuned()
    found = tuned.prior.precision
    assert float(found[1]) * 100 < float(found[[0, 2, 3]].min())


# -- penalties -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prior", [Laplace(0.4), Gaussian(3.0, per="layer", mean=0.2), Hierarchical()])
def test_a_penalty_is_minus_the_log_density_and_its_slope_is_the_local_gaussians(prior: Prior) -> None:
    model = network(1)
    bound = prior.bind(linearize(model).layout)
    value = prior.penalty(model)
    close(value.detach(), -bound.log_prob({k: p.detach() for k, p in model.named_parameters()}), 1e-12)
    found = torch.cat([g.reshape(-1) for g in torch.autograd.grad(value, list(model.parameters()))])
    v = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    a, shifted = bound.quadratic(v)
    close(found, a.dense() * v - shifted, 1e-10)
    close(bound.penalty(model), value)


def test_weight_decay_is_a_prior() -> None:
    """The minimum of a mean loss under weight decay is the MAP: ridge regression with λ = decay·n."""
    x, y, decay = normal(40, 3), normal(40, 1, seed=1), 0.05
    model = nn.Linear(3, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.linalg.solve(x.mT @ x / 40 + decay * torch.eye(3).double(), x.mT @ y / 40).mT)
    prior = from_weight_decay(decay, 40)
    assert float(prior.precision) == pytest.approx(2.0)
    loss = 0.5 * (model(x) - y).square().mean() + prior.penalty(model) / 40
    (slope,) = torch.autograd.grad(loss, model.weight)
    close(slope, torch.zeros_like(slope), 1e-12)
    for bad in (0.0, -1.0, math.inf, "some"):
        with pytest.raises(InvalidValue, match="weight_decay"):
            from_weight_decay(bad, 40)


# -- refusals --------------------------------------------------------------------------------------------------------


def test_jeffreys_is_improper_and_says_so() -> None:
    model, x, y = network(), normal(12, 3), normal(12, 2, seed=1)
    prior = Jeffreys(floor=1e-3)
    la = lw.laplace(model, (x, y), "gaussian", prior=prior)
    assert "floor 0.001" in repr(la)
    assert bool((la.predict(x).f_var > 0).all())
    for call in (la.log_evidence, lambda: la.tuned(center="map")):
        with pytest.raises(Unsupported, match="Jeffreys is improper"):
            call()
    with pytest.raises(Unsupported, match="Jeffreys has no draws"):
        prior.draw(model)
    a = one_weight(prior).quadratic(f64(0.0))[0].dense()
    close(a, f64(1e6), 1e-12)
    with pytest.raises(InvalidValue, match="infinite precision"):
        Jeffreys(floor=0.0)


def test_binary_weights_have_probabilities_and_no_slope() -> None:
    model, x, y = network(), normal(12, 3), normal(12, 2, seed=1)
    layout = linearize(model).layout
    prior = Bernoulli(0.3, values=(-1.0, 1.0)).bind(layout)
    draws = prior.sample(4000, seeded(0))
    assert abs(float((draws > 0).double().mean()) - 0.3) < 5 * (0.21 / draws.numel()) ** 0.5
    want = distributions.Bernoulli(f64(0.3)).log_prob((draws[:5] > 0).double()).sum(-1)
    close(torch.func.vmap(prior.log_density)(draws[:5]), want, 1e-12)
    assert float(prior.log_density(0.5 * draws[0])) == -math.inf
    close(prior.nearest(f64(*[0.1, -0.2] * 13)), f64(*[1.0, -1.0] * 13))
    with pytest.raises(Unsupported, match=r"lw\.samplers\.metropolis"):
        lw.laplace(model, (x, y), "gaussian", prior=prior).predict(x)
    with pytest.raises(Unsupported, match="no slope"):
        prior.penalty(model)
    for bad in ({"probability": 1.0}, {"values": (1.0, 1.0)}, {"values": (1.0,)}):
        with pytest.raises(InvalidValue, match="got"):
            Bernoulli(**bad)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: StudentT(df=0.0), "df is one positive"),
        (lambda: Mixture(share=1.5), "between 0 and 1"),
        (lambda: Horseshoe(slab=-1.0), "slab is one positive"),
        (lambda: Hierarchical(scale=2.0), "density of τ"),
        (lambda: Laplace(-1.0), "scale must be positive"),
    ],
)
def test_settings_are_checked(make: Callable[[], Prior], match: str) -> None:
    with pytest.raises(InvalidValue, match=match):
        make()


def test_a_noise_with_a_density_is_for_samplers() -> None:
    model, x, y = network(), normal(12, 3), normal(12, 2, seed=1)
    noisy = lw.likelihoods.Gaussian(noise=Gamma(0.5, 1.0))
    assert noisy.unknown == {"noise": Gamma(0.5, 1.0)}
    for call in (lw.laplace, lw.log_joint, lw.doctor):
        with pytest.raises(Unsupported, match=r"noise ~ Gamma\(shape=0\.5, rate=1\.0\).*lw\.samplers"):
            call(model, (x, y), noisy)
    with pytest.raises(InvalidValue, match="scale"):
        lw.likelihoods.StudentT(scale=Gamma(0.5, 1.0))


def test_a_g_prior_keeps_its_density() -> None:
    """It is of the weights that are not dropped, as a vector too."""
    model, x, y = network(), normal(12, 3), normal(12, 2, seed=1)
    prior = lw.laplace(model, (x, y), "gaussian", prior=GPrior(2.0)).prior
    v = normal(26, seed=8)
    close(prior.log_density(v), prior.log_prob(prior.layout.unflatten(v)))
    assert math.isfinite(float(prior.log_density(v)))
