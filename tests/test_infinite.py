"""Networks of infinite width: kernels against published forms, quadrature, random networks and Gaussian algebra."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from helpers import close, normal, seeded
from lapwing.gp import infinite
from lapwing.gp.infinite import activations, quadrature
from lapwing.gp.infinite.tuning import value_and_slope

SEEDS = range(3)
CLOSED: dict[str, tuple[activations.Activation, Callable[[Tensor], Tensor]]] = {
    "relu": (activations.LeakyReLU(), torch.relu),
    "leaky": (activations.LeakyReLU(0.2), lambda u: nn.functional.leaky_relu(u, 0.2)),
    "erf": (activations.Erf(), torch.erf),
    "sin": (activations.Sin(), torch.sin),
    "identity": (activations.Identity(), lambda u: u),
}


def variances(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """k₁₁, k₂₂ and k₁₂ of pairs: at any correlation, at ±1 and near, and of an input that is 0."""
    k11, k22 = 4 * torch.rand(2, 40, generator=seeded(seed), dtype=torch.float64) + 0.01
    rho = 2 * torch.rand(40, generator=seeded(seed + 9), dtype=torch.float64) - 1
    rho[:5] = torch.tensor([1.0, -1.0, 1 - 1e-9, 0.999, 0.0])
    k11[5] = 0
    return k11, k22, rho * (k11 * k22).sqrt()


# -- activations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CLOSED)
@pytest.mark.parametrize("seed", SEEDS)
def test_quadrature_equals_closed_forms(name: str, seed: int) -> None:
    """Identity 27."""
    closed, function = CLOSED[name]
    rule, k = quadrature.IntegratedActivation(function), variances(seed)
    close(rule.second(*k), closed.second(*k), 1e-10)
    steep = k[0] == 0  # relu has no slope at 0
    close(rule.slope(*k)[~steep], closed.slope(*k)[~steep], 1e-10)
    close(rule.mean(k[0]), closed.mean(k[0]), 1e-10)


@pytest.mark.parametrize("module", [nn.Tanh(), nn.GELU(), nn.ELU(), nn.SiLU(), nn.Softplus()], ids=str)
def test_quadrature_equals_an_integral_over_a_grid(module: nn.Module) -> None:
    """A trapezoidal rule on a fine grid, which knows of no correlation: v = ρ u + √(1 − ρ²) w."""
    grid = torch.linspace(-9, 9, 1001, dtype=torch.float64)
    weight = torch.exp(-0.5 * grid.square()) / math.sqrt(2 * math.pi) * (grid[1] - grid[0])
    rule = quadrature.integrated(module)
    for k11, k22, rho in ((0.5, 1.5, 0.3), (2.0, 1.0, -0.8), (1.0, 1.0, 0.97)):
        u, v = math.sqrt(k11) * grid[:, None], math.sqrt(k22) * (rho * grid[:, None] + math.sqrt(1 - rho**2) * grid)
        expected = torch.einsum("ab,a,b->", module(u) * module(v), weight, weight)
        k = [torch.tensor([value], dtype=torch.float64) for value in (k11, k22, rho * math.sqrt(k11 * k22))]
        close(rule.second(*k)[0], expected, 3e-6)  # the grid's own error at a kink of a second derivative
        slope = torch.func.jvp(module, (u,), (torch.ones_like(u),))[1]
        other = torch.func.jvp(module, (v,), (torch.ones_like(v),))[1]
        close(rule.slope(*k)[0], torch.einsum("ab,a,b->", slope * other, weight, weight), 3e-5)


def test_a_slope_is_the_derivative_of_the_second_moment() -> None:
    """Price's theorem: ∂E[φφ]/∂k₁₂ = E[φ'φ']."""
    k11, k22, k12 = (v[6:] for v in variances(1))
    for closed, _ in CLOSED.values():
        up, down = (closed.second(k11, k22, k12 * (1 + h)) for h in (1e-5, -1e-5))
        close((up - down) / (2e-5 * k12), closed.slope(k11, k22, k12), 1e-6)


def test_kinks_elsewhere_are_told() -> None:
    with pytest.warns(lw.errors.LapwingWarning, match=r"known to 0\.\d+ only"):
        infinite.nngp(1, nn.Hardtanh())


# -- dense networks ---------------------------------------------------------------------------------------------------


def arc_cosine(x1: Tensor, x2: Tensor, order: int) -> Tensor:
    """J_n(θ) of Cho and Saul 2009, Eqs. 5 and 6, over inputs."""
    cos = (x1 @ x2.mT) / (x1.norm(dim=1)[:, None] * x2.norm(dim=1))
    theta = torch.acos(cos.clamp(-1, 1))
    return math.pi - theta if order == 0 else torch.sin(theta) + (math.pi - theta) * torch.cos(theta)


def test_relu_equals_cho_and_saul_and_jacot() -> None:
    """One hidden layer: K = w²/2 · ‖x‖‖x'‖/d · J₁/π · ..., and Θ = K + w Θ₀ (π − θ)/2π, written from the papers."""
    x1, x2, w = normal(6, 3), normal(4, 3, seed=1), 1.7
    size = x1.norm(dim=1)[:, None] * x2.norm(dim=1) / 3
    K = w * w * size * arc_cosine(x1, x2, 1) / (2 * math.pi)
    close(infinite.nngp(1, "relu", w)(x1, x2), K)
    base = w * x1 @ x2.mT / 3
    close(infinite.ntk(1, "relu", w)(x1, x2), K + w * base * arc_cosine(x1, x2, 0) / (2 * math.pi))


def test_erf_equals_williams() -> None:
    """Williams 1997, Eq. 11, with the input augmented by the bias."""
    x1, x2, w, b = normal(6, 3), normal(4, 3, seed=1), 1.7, 0.4
    inner = lambda a, c: b + w * (a * c).sum(-1) / 3  # noqa: E731
    k12, k11, k22 = inner(x1[:, None], x2), inner(x1, x1)[:, None], inner(x2, x2)
    expected = b + w * 2 / math.pi * torch.asin(2 * k12 / ((1 + 2 * k11) * (1 + 2 * k22)).sqrt())
    close(infinite.nngp(1, "erf", w, b)(x1, x2), expected)


def test_depth_counts_hidden_layers() -> None:
    x = normal(4, 3)
    close(infinite.nngp(0, weight_variance=1.5, bias_variance=0.3)(x), 0.3 + 1.5 * x @ x.mT / 3)
    close(infinite.ntk(0, weight_variance=1.5, bias_variance=0.3)(x), 0.3 + 1.5 * x @ x.mT / 3)
    close(infinite.ntk(2, "identity", 1.0)(x), 3 * x @ x.mT / 3)  # each of three layers gives as much
    assert sum(layer.weighs for layer in infinite.nngp(depth=3).layers) == 4


@pytest.mark.parametrize("width", [1, 3, 40])
def test_one_hidden_layer_has_the_kernel_at_any_width(width: int) -> None:
    """Identity 18: its covariance does not depend on the width, and a ReLU network's excess kurtosis is 15/H."""
    draws, x, w = 400_000 // width, normal(3, 2), 2.0
    W = math.sqrt(w / 2) * torch.randn(draws, width, 2, generator=seeded(width), dtype=torch.float64)
    v = math.sqrt(w / width) * torch.randn(draws, width, generator=seeded(99), dtype=torch.float64)
    f = torch.einsum("dh,dhn->dn", v, torch.relu(W @ x.mT))
    products = f[:, :, None] * f[:, None]
    error = products.std(0) / math.sqrt(draws)
    assert bool(((products.mean(0) - infinite.nngp(1)(x)).abs() < 4.5 * error).all())
    fourth = (f / infinite.nngp(1).diagonal(x).sqrt()) ** 4
    assert bool(((fourth.mean(0) - 3 - 15 / width).abs() < 4.5 * fourth.std(0) / math.sqrt(draws)).all())


# -- random networks of finite width ----------------------------------------------------------------------------------

WIDE = 48


def networks(kind: str, channels: int) -> nn.Sequential:
    """Of any width, with unequal sizes, strides and paddings."""
    h = channels
    if kind == "dense":
        return nn.Sequential(nn.Linear(3, h), nn.Tanh(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, 1))
    if kind == "flat":
        first = nn.Conv2d(2, h, (2, 3), padding=(1, 0), stride=(1, 2))  # (5, 5) -> (6, 2)
        return nn.Sequential(first, nn.ReLU(), nn.Conv2d(h, h, 2), nn.ReLU(), nn.Flatten(), nn.Linear(5 * h, 1))
    if kind == "pooled":
        pools = nn.AvgPool2d((2, 1)), nn.AdaptiveAvgPool2d(1)
        first, second = nn.Conv2d(2, h, 2, padding=1), nn.Conv2d(h, h, 3, padding=1, padding_mode="circular")
        return nn.Sequential(first, nn.ReLU(), pools[0], second, nn.ReLU(), pools[1], nn.Flatten(), nn.Linear(h, 1))
    if kind == "residual":
        block = nn.Sequential(nn.ReLU(), nn.Linear(h, h), nn.ReLU())
        ends = nn.Linear(h, h), nn.ReLU(), nn.Linear(h, 1)
        return nn.Sequential(nn.Linear(3, h), nn.ReLU(), infinite.Residual(block[1:]), *ends)
    if kind == "normalized":
        ends = nn.Linear(h, h), nn.LayerNorm(h, elementwise_affine=False), nn.ReLU(), nn.Linear(h, 1)
        return nn.Sequential(nn.Linear(3, h), nn.ReLU(), nn.LayerNorm(h, elementwise_affine=False), *ends)
    assert kind == "images normalized"
    norm = nn.GroupNorm(1, h, affine=False)
    return nn.Sequential(
        nn.Conv1d(2, h, 3),
        nn.ReLU(),
        norm,
        nn.Conv1d(h, h, 2),
        nn.ReLU(),
        nn.AvgPool1d(2),
        nn.Flatten(),
        nn.Linear(h, 1),
    )


INPUTS = {"dense": (3,), "residual": (3,), "normalized": (3,), "images normalized": (2, 6)}
KINDS = ("dense", "flat", "pooled", "residual", "normalized", "images normalized")


def drawn(net: nn.Sequential, draws: int, w: float, b: float, seed: int) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Weights N(0, w / fan_in) and biases N(0, b) of many networks, and the standard deviation of each parameter."""
    generator = seeded(seed)
    std = {n: math.sqrt(b if n.endswith("bias") else w / p[0].numel()) for n, p in net.named_parameters()}
    shapes = {n: (draws, *p.shape) for n, p in net.named_parameters()}
    return {n: std[n] * torch.randn(s, generator=generator, dtype=torch.float64) for n, s in shapes.items()}, std


def has_the_mean(found: Tensor, K: Tensor) -> None:
    """Within 4.5 standard errors and what a width of `WIDE` is off by, O(1/WIDE); and near in the median."""
    error = found.std(0) / math.sqrt(len(found))
    assert bool(((found.mean(0) - K).abs() < 4.5 * error + 3 / WIDE * K.diagonal().max()).all())
    assert float((found.mean(0) / K).log().abs().median()) < 0.25


@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.full) if k == "pooled" else k for k in KINDS])
def test_random_networks_have_the_kernel(kind: str) -> None:
    """Identity 27."""
    w, b, x, net = 1.6, 0.2, normal(3, *INPUTS.get(kind, (2, 5, 5))), networks(kind, WIDE).double()
    weights, _ = drawn(net, 1_500, w, b, 1)
    with torch.no_grad():
        f = torch.func.vmap(lambda p: torch.func.functional_call(net, p, (x,))[:, 0], chunk_size=250)(weights)
    has_the_mean(f[:, :, None] * f[:, None], infinite.of(networks(kind, 1), "nngp", w, b)(x))


@pytest.mark.parametrize("kind", KINDS)
def test_random_networks_have_the_tangent_kernel(kind: str) -> None:
    """In the parameters that are N(0, 1): w = √(w/fan_in) ω, b = √b β, so gradients are scaled by those."""
    w, b, x, net = 1.6, 0.2, normal(3, *INPUTS.get(kind, (2, 5, 5))), networks(kind, WIDE).double()
    weights, std = drawn(net, 60, w, b, 2)
    found = []
    for d in range(60):
        leaves = {n: p[d].clone().requires_grad_() for n, p in weights.items()}
        out = torch.func.functional_call(net, leaves, (x,))[:, 0]
        grads = [torch.autograd.grad(value, list(leaves.values()), retain_graph=True) for value in out]
        scaled = [[std[n] * g.reshape(-1) for n, g in zip(leaves, each, strict=True)] for each in grads]
        J = torch.stack([torch.cat(each) for each in scaled])
        found.append(J @ J.mT)
    has_the_mean(torch.stack(found), infinite.of(networks(kind, 1), "ntk", w, b)(x))


def finite(
    phi: Callable[[Tensor], Tensor], H: int, w: float, b: float, x: Tensor, n: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Covariances given all but the last weights, and tangent kernels, of n networks of two layers of H units."""
    generator, slope, scale = seeded(1_000 * seed + H), torch.func.vmap(torch.func.grad(phi)), math.sqrt(w / H)
    draw = lambda *shape: torch.randn(n, *shape, generator=generator, dtype=torch.float64)  # noqa: E731
    inner, own = lambda a, c: a.mT @ c, math.sqrt(b)
    K0 = w * x @ x.mT / x.shape[1] + b
    u1 = draw(H, x.shape[1]) @ x.mT * math.sqrt(w / x.shape[1]) + own * draw(H, 1)
    h1, W = phi(u1), draw(H, H)
    u2 = scale * W @ h1 + own * draw(H, 1)
    h2 = phi(u2)
    d2 = scale * draw(H, 1) * slope(u2.reshape(-1)).reshape(u2.shape)
    d1 = scale * W.mT @ d2 * slope(u1.reshape(-1)).reshape(u1.shape)
    K1, K2 = (w / H * inner(h, h) + b for h in (h1, h2))
    return K2, K2 + inner(d2, d2) * K1 + inner(d1, d1) * K0


@pytest.mark.full
@pytest.mark.parametrize("name", ["relu", "erf", "sin", "tanh"])
def test_the_mean_over_many_networks_is_the_kernel_within_its_error(name: str) -> None:
    """10⁵ networks of 32 units a layer and 10⁵ of 64: twice one mean less the other is off the limit by O(1/64²)."""
    phi = {"relu": torch.relu, "erf": torch.erf, "sin": torch.sin, "tanh": torch.tanh}[name]
    w, b, x = 1.6, 0.2, normal(2, 3)
    parts = []
    for seed in range(50):
        narrow, wide = (finite(phi, H, w, b, x, 2_000, seed) for H in (32, 64))
        parts.append([2 * two.mean(0) - one.mean(0) for one, two in zip(narrow, wide, strict=True)])
    for found, what in zip(zip(*parts, strict=True), ("nngp", "ntk"), strict=True):
        means, k = torch.stack(found), getattr(infinite, what)(2, phi, w, b)(x)
        error = means.std(0) / math.sqrt(len(means))
        assert bool((error < 0.01 * k.diagonal().max()).all())
        assert bool(((means.mean(0) - k).abs() < 4 * error + 2e-3 * k.abs()).all())


# -- laws of the call -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["nngp", "ntk"])
def test_blocks_halves_and_diagonals_are_the_kernel(kind: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    k = infinite.of(networks(kind, 1), what, 1.6, 0.2)
    x, other = normal(7, *INPUTS.get(kind, (2, 5, 5))), normal(4, *INPUTS.get(kind, (2, 5, 5)), seed=1)
    whole, across = k(x), k(x, other)
    close(k(x, x), whole, 1e-7)  # the slope of relu where both inputs are one, by rounding
    close(k(torch.cat([x, other]))[:7, 7:], across, 1e-12)
    close(k.diagonal(x), whole.diagonal(), 1e-12)
    assert torch.equal(whole, whole.mT)
    monkeypatch.setattr("lapwing.gp.infinite.kernel.ENTRIES", 9 * 5**4)
    close(k(x), whole, 1e-12)
    close(k(x, other), across, 1e-12)
    close(k.diagonal(x), whole.diagonal(), 1e-12)
    assert float(torch.linalg.eigvalsh(whole)[0]) > 0


def test_positions_kept_in_pairs_or_alone_give_the_same() -> None:
    """Without pooling, pairs of different positions are not needed; a pool of one position asks for them."""
    x, net = normal(4, 2, 5, 5), networks("flat", 1)
    for what in ("nngp", "ntk"):
        paired = infinite.of(nn.Sequential(net[0], nn.AvgPool2d(1), *net[1:]), what, 1.6, 0.2)
        close(paired(x), infinite.of(net, what, 1.6, 0.2)(x), 1e-12)


def test_a_sequential_is_its_description() -> None:
    x = normal(5, 3)
    net = nn.Sequential(nn.Linear(3, 7), nn.ReLU(), nn.Sequential(nn.Linear(7, 5), nn.ReLU()), nn.Linear(5, 2))
    for what in ("nngp", "ntk"):
        described = getattr(infinite, what)(2, "relu", 1.6, 0.2)
        assert torch.equal(infinite.of(net, what, 1.6, 0.2)(x), described(x))
    bare = nn.Sequential(nn.Linear(3, 7, bias=False), nn.ReLU(), nn.Linear(7, 2, bias=False))
    assert torch.equal(infinite.of(bare, "nngp", 1.6, 0.2)(x), infinite.nngp(1, "relu", 1.6)(x))


def test_a_module_of_one_s_own_is_read_by_its_rule() -> None:
    class Sine(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(x)

    net = nn.Sequential(nn.Linear(3, 7), Sine(), nn.Linear(7, 1))
    with pytest.raises(lw.errors.Unsupported, match="Sine has no rule"):
        infinite.of(net)
    infinite.register(Sine)(lambda module: infinite.nngp(1, "sin").layers[1:2])
    close(infinite.of(net)(normal(4, 3)), infinite.nngp(1, "sin")(normal(4, 3)))


def test_repeated_inputs_have_equal_rows_and_positive_draws() -> None:
    x = normal(3, 2)
    k = infinite.ntk(3, "relu", 2.0)(torch.cat([x, x]))
    close(k[:3], k[3:], 1e-7)
    draws = infinite.nngp(3).draw(torch.cat([x, x]), 5)
    assert draws.shape == (5, 6)
    close(draws[:, :3], draws[:, 3:], 1e-6)


def test_draws_have_the_covariance_and_are_repeatable() -> None:
    k, x = infinite.nngp(2, "erf", 1.5, 0.1), normal(3, 2)
    draws = k.draw(x, 40_000, seeded(3))
    products = draws[:, :, None] * draws[:, None]
    assert bool(((products.mean(0) - k(x)).abs() < 4.5 * products.std(0) / 200).all())
    assert torch.equal(k.draw(x, 4), k.draw(x, 4))


# -- given data -------------------------------------------------------------------------------------------------------


def data(outputs: int = 2, n: int = 9) -> tuple[Tensor, Tensor]:
    x = normal(n, 3)
    return x, torch.sin(x[:, :1] * torch.arange(1, outputs + 1)) + 0.1 * normal(n, outputs, seed=5)


@pytest.mark.parametrize("noise", [0.3, [0.3, 0.7]])
@pytest.mark.parametrize("what", ["nngp", "ntk"])
def test_regression_is_gaussian_algebra(noise: object, what: str) -> None:
    (x, y), new = data(), normal(4, 3, seed=8)
    k = getattr(infinite, what)(2, "relu", 1.6, 0.2)
    fit = k.regression((x, y), noise=noise)
    sigma = torch.as_tensor(noise, dtype=torch.float64).expand(2)
    K, cross, own = k(x), k(new, x), k(new)
    total, joint = 0.0, fit.predict(new, joint=True)
    for c in range(2):
        C = K + sigma[c] ** 2 * torch.eye(9, dtype=torch.float64)
        total += torch.distributions.MultivariateNormal(torch.zeros(9).double(), C).log_prob(y[:, c])
        cov = own - cross @ torch.linalg.solve(C, cross.mT)
        close(fit.predict(new).f_mean[:, c], cross @ torch.linalg.solve(C, y[:, c]))
        close(fit.predict(new).f_var[:, c], cov.diagonal())
        close(joint.covariance[:, c, :, c], cov)
        close(fit.predict(new).total[:, c], cov.diagonal() + sigma[c] ** 2)
    close(fit.log_evidence(), torch.as_tensor(total))
    assert not bool(joint.covariance[:, 0, :, 1].any())


def test_a_linear_network_is_bayesian_linear_regression() -> None:
    """Depth 0: f = xᵀβ, β ~ N(0, w/d): the evidence of the primal form."""
    x, y = data(1)
    fit = infinite.nngp(0, weight_variance=1.5).regression((x, y), noise=0.4)
    A = x.mT @ x / 0.16 + 3 / 1.5 * torch.eye(3, dtype=torch.float64)
    mean = torch.linalg.solve(A, x.mT @ y / 0.16)
    quad = (y / 0.4).square().sum() - (mean.mT @ A @ mean).sum()
    occam = torch.logdet(A) - 3 * math.log(3 / 1.5)
    close(fit.log_evidence(), -0.5 * (quad + occam + 9 * math.log(2 * math.pi * 0.16)))
    close(fit.predict(x).f_mean, x @ mean)


def labels(n: int = 12) -> tuple[Tensor, Tensor]:
    x = normal(n, 3)
    return x, torch.arange(n) % 3


def test_classification_is_regression_on_the_observed_logits() -> None:
    (x, y), k, new = labels(), infinite.nngp(2, "erf", 1.6, 0.2), normal(4, 3, seed=8)
    fit, likelihood = k.classification((x, y), concentration=0.05), lw.likelihoods.Dirichlet(0.05)
    target, variance = likelihood.observations(torch.zeros(12, 3).double(), y)
    constant, total = (target / variance).sum(0) / (1 / variance).sum(0), 0.0
    for c in range(3):
        C = k(x) + variance[:, c].diag()
        prior = torch.distributions.MultivariateNormal(constant[c].expand(12), C)
        total += prior.log_prob(target[:, c])
        away = torch.linalg.solve(C, target[:, c] - constant[c])
        close(fit.predict(new).f_mean[:, c], constant[c] + k(new, x) @ away)
    close(fit.log_evidence(), torch.as_tensor(total))
    pred = fit.predict(new)
    close(pred.probs.sum(1), torch.ones(4).double(), 1e-10)
    soft = nn.functional.one_hot(y, 3).double()
    close(k.classification((x, soft), 0.05).log_evidence(), fit.log_evidence())


@pytest.mark.parametrize("kind", ["shared", "per output", "labels"])
@pytest.mark.parametrize("activation", ["relu", "erf", torch.tanh])
def test_slopes_of_the_evidence_are_its_differences(kind: str, activation: object) -> None:
    k = infinite.ntk(2, activation, 1.6, 0.2)
    fit = (
        k.classification(labels())
        if kind == "labels"
        else k.regression(data(), 0.3 if kind == "shared" else [0.3, 0.5])
    )
    names = ("weight_variance", "bias_variance", *fit.likelihood.hyperparameters)
    _, slope = value_and_slope(fit, names)
    for name in names:
        value = torch.as_tensor(getattr(fit.likelihood if name == "noise" else fit.kernel, name), dtype=torch.float64)
        for i in range(value.numel()):
            moved = torch.zeros(value.numel()).double()
            moved[i] = 1e-4
            ends = [fit.at({name: value * (s * moved).exp().reshape(value.shape)}).log_evidence() for s in (1, -1)]
            close(slope[name].reshape(-1)[i], (ends[0] - ends[1]) / 2e-4, 1e-5)


def test_tuning_ends_where_the_evidence_is_flat_and_higher() -> None:
    fit = infinite.nngp(2, "relu", 2.0, 0.1).regression(data(1, 25), noise=0.5)
    tuned = fit.tuned()
    assert float(tuned.log_evidence()) > float(fit.log_evidence()) + 1
    assert tuned.tuning.converged
    _, slope = value_and_slope(tuned, ("weight_variance", "bias_variance", "noise"))
    assert all(abs(float(v)) < 0.02 for v in slope.values())
    held = fit.tuned(fixed="noise")
    assert float(held.likelihood.noise) == 0.5
    assert float(fit.log_evidence()) < float(held.log_evidence()) <= float(tuned.log_evidence()) + 1e-6
    assert "tuned by evidence" in repr(tuned)


def test_outputs_that_do_not_fit_at_once_are_factorized_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    fit, new = infinite.nngp(1).classification(labels()), normal(4, 3, seed=8)
    kept = fit.predict(new), fit.log_evidence()
    monkeypatch.setattr("lapwing.gp.infinite.regression.BUDGET", 0)
    fresh = infinite.nngp(1).classification(labels())
    assert torch.equal(fresh.log_evidence(), kept[1])
    assert torch.equal(fresh.predict(new).covariance, kept[0].covariance)


def test_one_example_and_repeated_examples() -> None:
    k = infinite.nngp(2)
    one = k.regression((normal(1, 3), normal(1, 2)), noise=0.1)
    assert one.predict(normal(2, 3)).f_mean.shape == (2, 2)
    x, y = data(1)
    twice = k.regression((torch.cat([x, x]), torch.cat([y, y])), noise=0.3)
    close(twice.predict(x).f_mean, k.regression((x, y), noise=0.3 / math.sqrt(2)).predict(x).f_mean)
    with pytest.warns(lw.errors.LapwingWarning, match="jitter"):  # singular to rounding
        k.regression((torch.cat([x, x]), torch.cat([y, y])), noise=1e-9).log_evidence()


def test_loaders_float32_and_arrays_are_taken() -> None:
    (x, y), k = data(), infinite.nngp(2)
    expected = k.regression((x, y), noise=0.3).log_evidence()
    batches = [(x[:4], y[:4]), (x[4:], y[4:])]
    close(k.regression(batches, noise=0.3).log_evidence(), expected)
    close(k.regression((np.asarray(x), np.asarray(y)), noise=0.3).log_evidence(), expected)
    assert k.regression((x.float(), y.float()), noise=0.3).predict(x.float()).f_mean.dtype == torch.float64


# -- bad input --------------------------------------------------------------------------------------------------------

h = nn.Linear(3, 3)
CASES: dict[str, tuple[Callable[[], object], str]] = {
    "batch norm": (lambda: infinite.of(nn.Sequential(h, nn.BatchNorm1d(3))), "BatchNorm1d has no rule"),
    "max pool": (lambda: infinite.of(nn.Sequential(nn.Conv2d(1, 1, 2), nn.MaxPool2d(2))), "MaxPool2d has no rule"),
    "groups": (lambda: infinite.of(nn.Sequential(nn.Conv2d(2, 2, 2, groups=2))), "one group"),
    "reflected": (
        lambda: infinite.of(nn.Sequential(nn.Conv2d(2, 2, 2, padding_mode="reflect"))),
        "zeros or in a circle",
    ),
    "two activations": (lambda: infinite.of(nn.Sequential(h, nn.ReLU(), nn.Tanh(), h))(normal(2, 3)), "normal"),
    "activated inputs": (lambda: infinite.of(nn.Sequential(nn.ReLU(), h))(normal(2, 3)), "normal"),
    "no last layer": (lambda: infinite.of(nn.Sequential(h, nn.ReLU()))(normal(2, 3)), "end in an activation"),
    "a branch without weights": (lambda: infinite.of(nn.Sequential(h, infinite.Residual(nn.ReLU()))), "no weights"),
    "a residual at the inputs": (lambda: infinite.of(infinite.Residual(h))(normal(2, 3)), "3 inputs themselves"),
    "positions that do not add": (
        lambda: infinite.of(
            nn.Sequential(nn.Conv1d(2, 2, 1), infinite.Residual(nn.Conv1d(2, 2, 2)), nn.AdaptiveAvgPool1d(1))
        )(normal(2, 2, 5)),
        "shortcut",
    ),
    "positions in a linear layer": (lambda: infinite.nngp(1)(normal(2, 3, 4)), "flatten or pool"),
    "no positions": (lambda: infinite.of(nn.Sequential(nn.Conv2d(3, 1, 2)))(normal(2, 3)), "axes of positions"),
    "another input": (lambda: infinite.of(nn.Sequential(h))(normal(2, 4)), "takes 3 inputs and got 4"),
    "two inputs": (lambda: infinite.nngp(1)(normal(2, 4), normal(2, 5)), "each"),
    "a window": (lambda: infinite.of(nn.Sequential(nn.Conv1d(2, 2, 9)))(normal(2, 2, 5)), "does not fit"),
    "NaN": (lambda: infinite.nngp(1)(normal(2, 4) * math.nan), "NaN"),
    "no inputs": (lambda: infinite.nngp(1)(normal(0, 4)), "at least one"),
    "a vector": (lambda: infinite.nngp(1)(normal(4)), r"\(n, c\)"),
    "a word": (lambda: infinite.nngp(1, "swish"), "activation must be one of"),
    "a depth": (lambda: infinite.nngp(-1), "depth"),
    "a variance": (lambda: infinite.nngp(1, weight_variance=0.0), "weight_variance is one finite number above 0"),
    "a bias": (lambda: infinite.nngp(1, bias_variance=-1.0), "bias_variance"),
    "a kind": (lambda: infinite.of(h, "gp"), "kind"),
    "flat targets": (lambda: infinite.nngp(1).regression((normal(3, 2), normal(3)), 0.1), r"y\[:, None\]"),
    "a noise": (lambda: infinite.nngp(1).regression((normal(3, 2), normal(3, 2)), -0.1), "noise"),
    "labels": (lambda: infinite.nngp(1).classification((normal(3, 2), torch.tensor([0, 1, 2])), classes=2), "label"),
    "fixed": (lambda: infinite.nngp(1).regression(data(), 0.1).tuned("prior"), "names no hyperparameter"),
    "all fixed": (lambda: infinite.nngp(1).classification(labels()).tuned("weight_variance"), "nothing to tune"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_has_no_rule_is_named(name: str) -> None:
    call, match = CASES[name]
    with pytest.raises(lw.errors.LapwingError, match=match):
        call()
