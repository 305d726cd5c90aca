"""Every likelihood beyond the first three: densities, derivatives, Fisher information, moments, and each structure of
its curvature in a small network, against torch.distributions and dense autograd.

A new likelihood joins by one more entry in CASES, and is held to the laws of `lapwing.testing.check_likelihood`. What a
case says of p(y | f) comes from torch.distributions or is written out here, never from the package.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, distributions, nn
from torch.func import functional_call, hessian, jacrev, vmap

import lapwing as lw
from helpers import close, seeded
from lapwing.errors import Unsupported
from lapwing.likelihoods import (
    BradleyTerry,
    Categorical,
    ClassWeighted,
    CorrelatedGaussian,
    Dirichlet,
    DirichletBernoulli,
    Gaussian,
    HeteroscedasticGaussian,
    Ignoring,
    KnownNoise,
    LabelSmoothing,
    Likelihood,
    LogRatio,
    MeanLogVariance,
    NaturalHead,
    NegativeBinomial,
    Ordinal,
    Poisson,
    SoftLabels,
    StudentT,
    Weighted,
)
from lapwing.operators import linalg

Z = 5.0  # standard errors
SEEDS = (0, 1)


def softplus_half(x: Tensor) -> Tensor:
    """(a, b) -> (a, −½ log(1 + eᵇ)), written out."""
    a, b = x.chunk(2, -1)
    return torch.cat([a, -0.5 * torch.log1p(b.exp())], -1)


def grid_nodes(n: int = 40) -> tuple[Tensor, Tensor]:
    """Nodes and weights of E over a standard normal (Gauss-Hermite), exact for polynomials."""
    import numpy as np

    nodes, weights = np.polynomial.hermite_e.hermegauss(n)
    return torch.from_numpy(nodes), torch.from_numpy(weights) / math.sqrt(2 * math.pi)


@dataclass(frozen=True)
class Case:
    make: Callable[[], Likelihood]
    outputs: int
    log_prob: Callable[[Tensor, Tensor], Tensor]  # of one example: f (c,), y -> ()
    values: Callable[
        [Tensor], tuple[Tensor, Tensor]
    ]  # f (c,) -> every y (v, ...) and its probability, or nodes and weights
    inside: Callable[[Tensor], Tensor] = lambda x: x  # normal draws -> outputs that the likelihood takes
    head: Callable[[], nn.Module] = nn.Identity  # the last module of a network
    canonical: bool = True  # −∂² log p does not depend on y
    sample: Callable[[Any, Tensor, torch.Generator], Tensor] = lambda one, f, generator: one.sample(f, generator)
    packed: Callable[[Any, Tensor], Tensor] = lambda _, y: y  # targets as they are fitted to

    def targets(self, likelihood: Likelihood, f: Tensor, seed: int) -> Tensor:
        return self.packed(likelihood, self.sample(likelihood, f, seeded(seed)))

    def curvature(self, f: Tensor, y: Tensor) -> Tensor:
        """E_y[−∂² log p], (c, c), summed over every y (or by quadrature); where rows weigh differently, −∂² log p."""
        if self.values is None:
            return -hessian(self.log_prob)(f, y)
        y, p = self.values(f)
        each = vmap(hessian(self.log_prob), in_dims=(None, 0))(f, y)
        return -torch.einsum("v,vab->ab", p, each)


def natural(f: Tensor, y: Tensor) -> Tensor:
    eta1, eta2 = f.chunk(2, -1)
    return distributions.Normal(-eta1 / (2 * eta2), (-1 / (2 * eta2)).sqrt()).log_prob(y).sum()


def natural_values(f: Tensor) -> tuple[Tensor, Tensor]:
    eta1, eta2 = f.chunk(2, -1)
    return normal_values(-eta1 / (2 * eta2), (-1 / (2 * eta2)).sqrt())


def normal_values(mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    nodes, weights = grid_nodes(12)
    many = torch.cartesian_prod(*[nodes] * len(mean)).reshape(-1, len(mean))
    share = torch.cartesian_prod(*[weights] * len(mean)).reshape(-1, len(mean)).prod(-1)
    return mean + std * many, share


def mean_log_variance(f: Tensor, y: Tensor) -> Tensor:
    mean, log_variance = f.chunk(2, -1)
    return distributions.Normal(mean, (0.5 * log_variance).exp()).log_prob(y).sum()


def every_count(log_pmf: Callable[[Tensor, Tensor], Tensor], most: int) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """All pairs of counts up to a number beyond which there is nothing, for two outputs, or all counts for one."""

    def values(f: Tensor) -> tuple[Tensor, Tensor]:
        one = torch.arange(most, dtype=torch.float64)
        y = torch.cartesian_prod(*[one] * len(f)).reshape(-1, len(f))
        return y, vmap(log_pmf, in_dims=(None, 0))(f, y).exp()

    return values


def poisson(f: Tensor, y: Tensor) -> Tensor:
    return distributions.Poisson(f.exp()).log_prob(y).sum()


R = torch.tensor([2.5, 6.0], dtype=torch.float64)


def negative_binomial(f: Tensor, y: Tensor) -> Tensor:
    """Γ(y + r)/(Γ(r) y!) q^y (1 − q)^r with q = μ/(r + μ), since torch's own has no Hessian under vmap."""
    r = R[: len(f)]
    q = f.exp() / (r + f.exp())
    ways = torch.lgamma(y + r) - torch.lgamma(r) - torch.lgamma(y + 1)
    return (ways + y * q.log() + r * torch.log1p(-q)).sum()


SCALES, NU = torch.tensor([0.6, 2.0], dtype=torch.float64), 9


def student(f: Tensor, y: Tensor) -> Tensor:
    return distributions.StudentT(float(NU), f, SCALES).log_prob(y).sum()


def student_values(f: Tensor) -> tuple[Tensor, Tensor]:
    """t = √ν tan θ has the density ∝ cos^(ν−1) θ: equal steps in θ are exact for an odd ν."""
    theta = (torch.arange(48, dtype=torch.float64) + 0.5) * math.pi / 48 - math.pi / 2
    weight = theta.cos() ** (NU - 1)
    weight = weight / weight.sum()
    t = torch.cartesian_prod(*[math.sqrt(NU) * theta.tan()] * 2)
    return f + SCALES * t, torch.cartesian_prod(weight, weight).prod(-1)


CUTS = torch.tensor([-1.3, 0.1, 0.9], dtype=torch.float64)


def ordinal(f: Tensor, y: Tensor) -> Tensor:
    below = torch.cat([torch.sigmoid(CUTS - f), torch.ones(1, dtype=torch.float64)])
    p = torch.cat([below[:1], below.diff()])
    return (p.log() * (torch.arange(4) == y)).sum()


def every_label(log_pmf: Callable[[Tensor, Tensor], Tensor], classes: int) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    return lambda f: (torch.arange(classes), vmap(log_pmf, in_dims=(None, 0))(f, torch.arange(classes)).exp())


def preference(f: Tensor, y: Tensor) -> Tensor:
    return torch.log(torch.sigmoid((1 - 2 * y) * (f[0] - f[1])))


C = torch.tensor([0.3, 2.0, 1.1], dtype=torch.float64)


def weights_of(n: int) -> Tensor:
    return 0.25 * torch.arange(n, dtype=torch.float64)  # the first row weighs nothing


def class_weight(y: Tensor) -> Tensor:
    return (C * (torch.arange(3) == y)).sum()


def categorical(f: Tensor, y: Tensor) -> Tensor:
    return (torch.log_softmax(f, -1) * (torch.arange(len(f)) == y)).sum()


def smoothed(f: Tensor, y: Tensor) -> Tensor:
    t = 0.8 * (torch.arange(len(f)) == y).double() + 0.2 / len(f)
    return (torch.log_softmax(f, -1) * t).sum()


def gamma_observation(alpha: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of log g, where E[g] = Var[g] = α and g is log-normal."""
    variance = (1 + 1 / alpha).log()
    return alpha.log() - variance / 2, variance.sqrt()


def dirichlet(f: Tensor, t: Tensor) -> Tensor:
    """Of probabilities t (c,); ε = 0.1."""
    target, noise = gamma_observation(0.1 + t)
    return distributions.Normal(f, noise, validate_args=False).log_prob(target).sum()


def dirichlet_label(f: Tensor, y: Tensor) -> Tensor:
    return dirichlet(f, (torch.arange(len(f)) == y).double())


def log_ratio(f: Tensor, t: Tensor) -> Tensor:
    """Of contrasts of the logits, in any basis of them; probabilities t (c,), ε = 0.1."""
    target, noise = gamma_observation(0.1 + t)
    V = torch.linalg.svd(torch.ones(1, len(f), dtype=f.dtype))[2][1:].mT  # (c, c − 1)
    cov = V.mT @ torch.diag(noise**2) @ V
    return distributions.MultivariateNormal(V.mT @ f, cov, validate_args=False).log_prob(V.mT @ target)


def log_ratio_label(f: Tensor, y: Tensor) -> Tensor:
    return log_ratio(f, (torch.arange(len(f)) == y).double())


def dirichlet_bernoulli(f: Tensor, y: Tensor) -> Tensor:
    (one, its), (zero, other) = gamma_observation(0.3 + y), gamma_observation(1.3 - y)
    noise = (its**2 + other**2).sqrt()
    return distributions.Normal(f, noise, validate_args=False).log_prob(one - zero).sum()


def gaussian(f: Tensor, y: Tensor) -> Tensor:
    return distributions.Normal(f, 0.7).log_prob(y).sum()


WEIGHTED: dict[str, Case] = {
    "weighted labels": Case(
        lambda: Weighted(Categorical()), 3, lambda f, y: y[1] * categorical(f, y[0]), None,
        packed=lambda one, y: one.pack(y, weights_of(len(y))),
    ),
    "weighted gaussian": Case(
        lambda: Weighted(Gaussian(0.7)), 2, lambda f, y: y[2] * gaussian(f, y[:2]), None,
        packed=lambda one, y: one.pack(y, weights_of(len(y))),
    ),
    "weighted heteroscedastic": Case(
        lambda: Weighted(HeteroscedasticGaussian()), 2, lambda f, y: y[1] * natural(f, y[:1]), None,
        inside=softplus_half, head=NaturalHead, packed=lambda one, y: one.pack(y, weights_of(len(y))),
    ),
    "class weights": Case(
        lambda: ClassWeighted(Categorical(), C), 3, lambda f, y: class_weight(y) * categorical(f, y), None
    ),
    "ignored labels with class weights": Case(
        lambda: Ignoring(ClassWeighted(Categorical(), C), -1), 3,
        lambda f, y: torch.where(y < 0, 0.0, class_weight(y) * categorical(f, y)), None,
        packed=lambda _, y: torch.where(torch.arange(len(y)) % 3 == 1, -1, y),
    ),
    "label smoothing": Case(lambda: LabelSmoothing(0.2), 3, smoothed, None),
    "soft labels": Case(
        SoftLabels, 3, lambda f, y: (y * torch.log_softmax(f, -1)).sum(), None,
        packed=lambda _, y: (y + C) / (1 + C.sum()),
    ),
    "known noise": Case(
        KnownNoise, 2, lambda f, y: distributions.Normal(f, y[2:], validate_args=False).log_prob(y[:2]).sum(), None,
        sample=lambda _, f, generator: f + torch.randn(f.shape, generator=generator, dtype=f.dtype),
        packed=lambda one, y: one.pack(y, 0.3 + weights_of(2 * len(y)).reshape(-1, 2)),
    ),
    "dirichlet": Case(Dirichlet, 3, dirichlet_label, None),
    "dirichlet, soft labels": Case(
        Dirichlet, 3, dirichlet, None,
        packed=lambda _, y: 0.6 * nn.functional.one_hot(y, 3) + 0.4 * C / C.sum(),
    ),
    "log ratio": Case(LogRatio, 3, log_ratio_label, None),
    "log ratio, soft labels": Case(
        LogRatio, 3, log_ratio, None,
        packed=lambda _, y: 0.6 * nn.functional.one_hot(y, 3) + 0.4 * C / C.sum(),
    ),
    "dirichlet bernoulli": Case(lambda: DirichletBernoulli(0.3), 2, dirichlet_bernoulli, None),
    "weighted dirichlet": Case(
        lambda: Weighted(Dirichlet()), 3, lambda f, y: y[1] * dirichlet_label(f, y[0]), None,
        packed=lambda one, y: one.pack(y, weights_of(len(y))),
    ),
    "weighted dirichlet, soft labels": Case(
        lambda: Weighted(Dirichlet()), 3, lambda f, y: y[3] * dirichlet(f, y[:3]), None,
        packed=lambda one, y: one.pack(0.6 * nn.functional.one_hot(y, 3) + 0.4 * C / C.sum(), weights_of(len(y))),
    ),
    "ignored labels with class weights, dirichlet": Case(
        lambda: Ignoring(ClassWeighted(Dirichlet(), C), -1), 3,
        lambda f, y: torch.where(y < 0, 0.0, class_weight(y) * dirichlet_label(f, y)), None,
        packed=lambda _, y: torch.where(torch.arange(len(y)) % 3 == 1, -1, y),
    ),
}  # fmt: skip

NOISE = torch.tensor([[0.5, 0.3, -0.1], [0.3, 0.8, 0.2], [-0.1, 0.2, 0.4]], dtype=torch.float64)


def correlated_values(f: Tensor) -> tuple[Tensor, Tensor]:
    y, p = normal_values(torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64))
    return f + y @ torch.linalg.cholesky(NOISE).mT, p


CASES: dict[str, Case] = {
    **WEIGHTED,
    "weighted correlated gaussian": Case(
        lambda: Weighted(CorrelatedGaussian(NOISE)), 3,
        lambda f, y: y[3] * distributions.MultivariateNormal(f, NOISE).log_prob(y[:3]), None,
        packed=lambda one, y: one.pack(y, weights_of(len(y))),
    ),
    "correlated gaussian": Case(
        lambda: CorrelatedGaussian(NOISE), 3,
        lambda f, y: distributions.MultivariateNormal(f, NOISE, validate_args=False).log_prob(y), correlated_values,
    ),
    "poisson": Case(Poisson, 2, poisson, every_count(poisson, 80)),
    "negative binomial": Case(
        lambda: NegativeBinomial(2.5), 1, negative_binomial, every_count(negative_binomial, 1000), canonical=False
    ),
    "negative binomial, dispersion per output": Case(
        lambda: NegativeBinomial(R), 2, negative_binomial, every_count(negative_binomial, 120),
        inside=lambda x: 0.5 * x, canonical=False,
    ),
    "student": Case(lambda: StudentT(SCALES, NU), 2, student, student_values, canonical=False),
    "ordinal": Case(
        lambda: Ordinal(CUTS), 1, ordinal, every_label(ordinal, 4), canonical=False
    ),
    "bradley-terry": Case(BradleyTerry, 2, preference, every_label(preference, 2)),
    "heteroscedastic": Case(
        HeteroscedasticGaussian, 4, natural, natural_values, inside=softplus_half, head=NaturalHead
    ),
    "heteroscedastic, one target": Case(
        HeteroscedasticGaussian, 2, natural, natural_values, inside=softplus_half, head=NaturalHead
    ),
    "mean and log variance": Case(
        MeanLogVariance,
        2,
        mean_log_variance,
        lambda f: normal_values(f[:1], (0.5 * f[1:]).exp()),
        canonical=False,
    ),
}  # fmt: skip


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


# -- densities, scores, factors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_it_keeps_the_laws_of_likelihoods(case: Case, seed: int) -> None:
    one = case.make()
    targets = None if case.values is not None else lambda f, g: case.packed(one, case.sample(one, f, g))
    lw.testing.check_likelihood(
        one, case.outputs, case.log_prob, case.values, case.inside, targets, case.canonical, seed
    )


@pytest.mark.parametrize("name", ["weighted labels", "known noise"])
def test_the_noise_of_matrix_free_samples_has_the_curvature_as_covariance(name: str) -> None:
    """Σ_n J_nᵀ S_n e_n, with each row's own weight: mean squares within Z standard errors of diag G."""
    p = problem(CASES[name])
    la = lw.laplace(p.net, (p.x, p.y), p.likelihood, structure="matrix_free")
    found = la.state.source.noise(torch.arange(2000), 0)[0].square().mean(0) / p.G.diagonal()
    assert float((found - 1).abs().max()) < Z * math.sqrt(2 / 2000)


def test_what_mixes_the_outputs_has_no_monte_carlo_factor(case: Case) -> None:
    likelihood = case.make()
    if "monte_carlo" not in likelihood.factors:
        with pytest.raises(Unsupported, match="mixes the outputs"):
            likelihood.curvature_weights("monte_carlo")


# -- every structure, in a network -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """A network with two layers, its data, and everything about it by dense autograd."""

    net: nn.Module
    x: Tensor
    y: Tensor
    likelihood: Likelihood
    J: Tensor  # (n, c, p)
    curvature: Tensor  # Λ (n, c, c)
    log_lik: float

    @property
    def G(self) -> Tensor:
        return torch.einsum("nap,nab,nbq->pq", self.J, self.curvature, self.J)

    def columns(self, name: str) -> slice:
        start = 0
        for key, p in self.net.named_parameters():
            if key == name:
                return slice(start, start + p.numel())
            start += p.numel()
        raise KeyError(name)


def problem(case: Case, seed: int = 0, n: int = 9) -> Problem:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, case.outputs), case.head()).double()
    x = torch.randn(n, 3, dtype=torch.float64)
    likelihood = case.make()
    with torch.no_grad():
        f = net(x)
        y = case.targets(likelihood, f, seed)
    params = dict(net.named_parameters())
    jac = jacrev(lambda p: functional_call(net, p, (x,)))({k: v.detach() for k, v in params.items()})
    J = torch.cat([jac[k].reshape(n, case.outputs, -1) for k in params], -1)
    curvature = torch.stack([case.curvature(one, target) for one, target in zip(f, y, strict=True)])
    fit = float(sum(case.log_prob(one, target) for one, target in zip(f, y, strict=True)))
    return Problem(net, x, y, likelihood, J, curvature, fit)


LAMBDA = 0.7


def evidence(p: Problem, occam: Tensor) -> Tensor:
    theta = nn.utils.parameters_to_vector(p.net.parameters()).detach()
    return p.log_lik - 0.5 * LAMBDA * theta @ theta - 0.5 * occam


@pytest.mark.parametrize("form", ["primal", "dual"])
def test_full_is_the_dense_curvature(case: Case, form: str) -> None:
    p = problem(case)
    la = lw.laplace(p.net, (p.x, p.y), p.likelihood, structure=lw.curvature.Full(form), prior=LAMBDA, factor="exact")
    precision = p.G + LAMBDA * torch.eye(len(p.G), dtype=torch.float64)
    close(la.log_evidence(), evidence(p, torch.logdet(precision) - len(p.G) * math.log(LAMBDA)))
    close(la.predict(p.x).covariance, p.J @ torch.linalg.solve(precision, p.J.mT))


def test_diag_is_the_diagonal(case: Case) -> None:
    p = problem(case)
    la = lw.laplace(p.net, (p.x, p.y), p.likelihood, structure="diag", prior=LAMBDA, factor="exact")
    close(la.log_evidence(), evidence(p, torch.log1p(p.G.diagonal() / LAMBDA).sum()))


def test_kron_is_the_product_of_its_factors(case: Case) -> None:
    """H_l = (1/N) Σ gᵀΛg ⊗ Σ [a, 1][a, 1]ᵀ, with g = ∂f/∂(bias of the layer), over rows that weigh anything."""
    p = problem(case)
    la = lw.laplace(p.net, (p.x, p.y), p.likelihood, structure="kron", prior=LAMBDA, factor="exact")
    hidden = torch.tanh(p.net[0](p.x)).detach()  # type: ignore[index]
    there = p.curvature.flatten(1).any(1)
    occam = torch.zeros((), dtype=torch.float64)
    for name, a in (("0.bias", p.x[there]), ("2.bias", hidden[there])):
        g = p.J[..., p.columns(name)]  # (n, c, o)
        B = torch.einsum("nao,nab,nbq->oq", g, p.curvature, g)
        a = torch.cat([a, torch.ones(len(a), 1, dtype=torch.float64)], -1)
        products = torch.outer(torch.linalg.eigvalsh(B), torch.linalg.eigvalsh(a.mT @ a)) / len(a)
        occam = occam + torch.log1p(products / LAMBDA).sum()
    close(la.log_evidence(), evidence(p, occam))


def test_last_layer_is_its_block(case: Case) -> None:
    p = problem(case)
    la = lw.laplace(p.net, (p.x, p.y), p.likelihood, subset="last_layer", prior=LAMBDA, factor="exact")
    mine = slice(p.columns("2.weight").start, p.columns("2.bias").stop)
    precision = p.G[mine, mine] + LAMBDA * torch.eye(mine.stop - mine.start, dtype=torch.float64)
    J = p.J[..., mine]
    close(la.predict(p.x).covariance, J @ torch.linalg.solve(precision, J.mT))


def test_matrix_free_multiplies_by_it(case: Case) -> None:
    p = problem(case)
    la = lw.laplace(p.net, (p.x, p.y), p.likelihood, structure="matrix_free", prior=LAMBDA)
    v = torch.randn(3, len(p.G), generator=seeded(3), dtype=torch.float64)
    close(linalg.mv(la.posterior.precision, v), v @ p.G + LAMBDA * v)
    close(p.likelihood.log_likelihood(la.state.statistics), torch.tensor(p.log_lik, dtype=torch.float64))


def test_the_evidence_at_the_tangent_map_is_stationary(case: Case) -> None:
    """v* of the convex objective: its gradient by autograd of the tangent model is zero; others are refused."""
    p = problem(case, n=14)
    la = lw.laplace(p.net, (p.x, p.y), p.likelihood, structure="kron", prior=LAMBDA)
    if not p.likelihood.concave:
        with pytest.raises(Unsupported, match="center='map'"):
            la.recentered()
        return
    v = la.recentered().tangent_map.vector.clone().requires_grad_()
    theta = nn.utils.parameters_to_vector(p.net.parameters()).detach()
    h = p.net(p.x).detach() + p.J @ (v - theta)
    fit = sum(case.log_prob(one, target) for one, target in zip(h, p.y, strict=True))
    (slope,) = torch.autograd.grad(fit - 0.5 * LAMBDA * v @ v, v)
    assert float(slope.norm()) < 1e-6


def test_the_evidence_has_the_gradient_of_differences(case: Case) -> None:
    """Identity 19, in every hyperparameter there is."""
    p = problem(case)
    la = lw.laplace(p.net, (p.x, p.y), p.likelihood, structure="kron", prior=LAMBDA)
    step = 1e-4

    def at(value: Tensor) -> Tensor:
        return la.log_evidence(prior=value)

    x = torch.tensor(LAMBDA, dtype=torch.float64, requires_grad=True)
    slope = torch.autograd.grad(la.log_evidence(prior=lw.priors.Gaussian(x)), x)[0]
    close(slope, (at(x.detach() + step) - at(x.detach() - step)) / (2 * step), 1e-6)
    for name, value in p.likelihood.coordinates().items():
        moving = value.clone().requires_grad_()
        found = torch.autograd.grad(la.log_evidence(likelihood=p.likelihood.moved({name: moving})), moving)[0]
        for i in range(value.numel()):
            unit = torch.zeros(value.numel(), dtype=torch.float64)
            unit[i] = step
            sides = [p.likelihood.moved({name: value + s * unit.reshape(value.shape)}) for s in (1, -1)]
            up, down = (la.log_evidence(likelihood=side) for side in sides)
            close(found.reshape(-1)[i], (up - down) / (2 * step), 1e-6)


def test_a_file_gives_it_back(case: Case, tmp_path: Any) -> None:
    p = problem(case)
    la = lw.laplace(p.net, (p.x, p.y), p.likelihood, structure="kron", prior=LAMBDA)
    la.save(tmp_path / "la.safetensors")
    back = lw.load(tmp_path / "la.safetensors", p.net)
    assert back.likelihood.kind == p.likelihood.kind
    assert torch.equal(back.log_evidence(), la.log_evidence())


def test_networks_in_single_precision_give_the_same(case: Case) -> None:
    """Up to their rounding; targets may be in either precision. The tangent MAP for some, as it takes its time."""
    p = problem(case)
    exact = lw.laplace(p.net, (p.x, p.y), p.likelihood, structure="kron", prior=LAMBDA, factor="exact")
    single = copy.deepcopy(p.net).float()
    for y in (p.y, p.y.float() if p.y.is_floating_point() else p.y):
        la = lw.laplace(single, (p.x.float(), y), p.likelihood, structure="kron", prior=LAMBDA, factor="exact")
        close(la.log_evidence(), exact.log_evidence(), 1e-3)
    if case in (CASES["heteroscedastic"], CASES["weighted labels"], CASES["known noise"], CASES["poisson"]):
        close(la.recentered().log_evidence(), exact.recentered().log_evidence(), 1e-3)


def test_the_true_hessian_is_that_of_the_log_density(case: Case) -> None:
    """factor="hessian": −∂²_θ Σ log p(y | f(x, θ)), the network's own second derivatives included."""
    p = problem(case, n=5)
    if not p.likelihood.concave:
        with pytest.raises(Unsupported, match="factor='exact'"):
            lw.laplace(p.net, (p.x, p.y), p.likelihood, factor="hessian")
        return
    la = lw.laplace(p.net, (p.x, p.y), p.likelihood, structure="full", factor="hessian")
    params = {k: v.detach() for k, v in p.net.named_parameters()}
    sizes = [v.numel() for v in params.values()]

    def loss(theta: Tensor) -> Tensor:
        parts = zip(params, theta.split(sizes), strict=True)
        f = functional_call(p.net, {k: part.reshape(params[k].shape) for k, part in parts}, (p.x,))
        return -sum((case.log_prob(one, target) for one, target in zip(f, p.y, strict=True)), torch.zeros(()))

    expected = hessian(loss)(torch.cat([v.reshape(-1) for v in params.values()]))
    weights = p.likelihood.curvature_weights("hessian")
    close(torch.einsum("g,gab->ab", weights, la.state.sums["gram"]), expected)
