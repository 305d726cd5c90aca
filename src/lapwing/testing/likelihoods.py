"""The laws of a likelihood p(y | f): score, curvature, sums and draws follow from its log-density.

    score = ∂_f log p,   S Sᵀ = Λ = E_y[−∂²_f log p] = E_y[score scoreᵀ],   log p(D) from sums that add

Rows of outputs f (n, c), drawn by the check; targets y by `targets`, or by the likelihood's own `sample`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import grad, hessian, vmap

from lapwing.curvature.factor import Factor, output_factor
from lapwing.likelihoods import Likelihood
from lapwing.testing.laws import Laws, close, normal, same_stream, seeded, within

DRAWS, ROWS = 4000, 6
Density = Callable[[Tensor, Tensor], Tensor]  # log p of one row: f (c,), y -> ()


def check_likelihood(
    likelihood: Likelihood,
    outputs: int = 2,
    log_prob: Density | None = None,
    values: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None,
    inside: Callable[[Tensor], Tensor] = lambda x: x,
    targets: Callable[[Tensor, torch.Generator], Tensor] | None = None,
    canonical: bool = True,
    seed: int = 0,
) -> None:
    """Hold a likelihood to its laws, or raise BrokenLaw.

    log_prob: the log-density of one row, made without the likelihood; without it, its own is believed. values: of f
    (c,), every y and its probability (or nodes and weights of an integral), for means over y that are exact; without
    it, they are means over draws. inside: normal numbers (n, c) -> outputs that the likelihood takes. targets: of f and
    a generator, y as it is fitted to, such as with weights packed in. canonical: −∂² log p is the same for every y.
    """

    def own(f: Tensor, y: Tensor) -> Tensor:
        return likelihood.log_prob(f.unsqueeze(0), y.unsqueeze(0)).squeeze(0)

    f = inside(normal(seed, ROWS, outputs))
    y = (targets or likelihood.sample)(f, seeded(seed + 100))
    case = LikelihoodCase(likelihood, f, y, log_prob or own, values, canonical, seed)
    with Laws(type(likelihood).__name__) as law:
        _density(law, case)
        _slope(law, case)
        _curvature(law, case)
        _sums(law, case)
        _sampled_factor(law, case)
        if targets is None and likelihood.plain is likelihood:
            _draws(law, case)
        if values is not None:
            _every(law, case)


@dataclass(frozen=True)
class LikelihoodCase:
    """A likelihood at rows f (n, c) and y, with what is believed of it."""

    likelihood: Likelihood
    f: Tensor
    y: Tensor
    log_prob: Density
    values: Callable[[Tensor], tuple[Tensor, Tensor]] | None
    canonical: bool
    seed: int

    def expected(self) -> Tensor | None:
        """Λ (n, c, c): −∂² log p, or its mean over y; None where only draws can say it."""
        if self.canonical:
            return -vmap(hessian(self.log_prob))(self.f, self.y)
        return None if self.values is None else torch.stack([self._mean(f) for f in self.f])

    def _mean(self, f: Tensor) -> Tensor:
        assert self.values is not None
        y, p = self.values(f)
        return -torch.einsum("v,vab->ab", p, vmap(hessian(self.log_prob), in_dims=(None, 0))(f, y))


def _density(law: Laws, case: LikelihoodCase) -> None:
    likelihood, f, y = case.likelihood, case.f, case.y
    with law("validate takes what it samples"):
        likelihood.validate(f, y)
    with law("log_prob is one number a row, for any batch shape"):
        found = likelihood.log_prob(f.expand(2, *f.shape), y.expand(2, *y.shape))
        assert found.shape == (2, ROWS), f"shape {tuple(found.shape)}, not {(2, ROWS)}"
        close(found[1], likelihood.log_prob(f, y))
    with law("log_prob is the density that was given"):
        each = [case.log_prob(one, target) for one, target in zip(f, y, strict=True)]
        close(likelihood.log_prob(f, y), torch.stack(each))
    with law("loss is the mean of −log_prob"):
        close(likelihood.loss(f, y), -likelihood.log_prob(f, y).mean())
    with law("log_prob can be differentiated twice under vmap"):
        found = vmap(hessian(lambda f, y: likelihood.log_prob(f[None], y[None])[0]))(f, y)
        close(found, vmap(hessian(case.log_prob))(f, y))


def _slope(law: Laws, case: LikelihoodCase) -> None:
    likelihood, f, y = case.likelihood, case.f, case.y
    exact = vmap(grad(case.log_prob))(f, y)
    with law("gradient is ∂ log p / ∂f"):
        close(likelihood.gradient(f, y), exact)
    if not likelihood.paired:
        with law("score, times the curvature weights, is ∂ log p / ∂f"):
            close(likelihood.score(f, y) * likelihood.curvature_weights().expand(f.shape[-1]), exact)


def _curvature(law: Laws, case: LikelihoodCase) -> None:
    likelihood, f, y = case.likelihood, case.f, case.y
    expected, root = case.expected(), likelihood.scaled_root(f, y)
    if expected is None:
        expected = root @ root.mT
    with law("the curvature root has S Sᵀ = Λ, the mean of −∂² log p / ∂f²"):
        close(root @ root.mT, expected)
    if likelihood.paired:
        return
    w, v = likelihood.curvature_weights(), normal(case.seed + 1, 3, *f.shape)
    with law("curvature_product is Λ v"):
        close(w * likelihood.curvature_product(f, y, v), torch.einsum("nab,knb->kna", expected, v))
    with law("curvature_trace is tr Λ"):
        found = w * likelihood.curvature_trace(f, y)
        close(found, expected.diagonal(dim1=1, dim2=2).sum(-1))
    with law("curvature_noise has the covariance Λ"):
        e = w.sqrt() * likelihood.curvature_noise(f, y, DRAWS, seeded(case.seed + 2))  # (k, n, c)
        within(torch.einsum("kna,knb->knab", e, e), expected)


def _sums(law: Laws, case: LikelihoodCase) -> None:
    likelihood, f, y = case.likelihood, case.f, case.y
    parts = [likelihood.statistics(f[i], y[i]) for i in (slice(0, 2), slice(2, None))]
    sums = {key: parts[0][key] + parts[1][key] for key in parts[0]}
    for factor in (1.0, 0.3):
        with law("statistics add, and give Σ log p at every hyperparameter", f"hyperparameters times {factor:g}"):
            other = likelihood.replace(**{k: factor * v for k, v in likelihood.hyperparameters.items()})
            close(other.log_likelihood(sums), other.log_prob(f, y).sum())
    with law("coordinates lead back to the hyperparameters"):
        for name, value in likelihood.moved(likelihood.coordinates()).hyperparameters.items():
            close(value, likelihood.hyperparameters[name])


def _sampled_factor(law: Laws, case: LikelihoodCase) -> None:
    likelihood, generator = case.likelihood, seeded(case.seed + 3)
    if "monte_carlo" not in likelihood.factors:
        return
    with law("the monte_carlo factor has S Sᵀ = Λ on average"):
        f, y, factor = case.f, case.y, Factor("monte_carlo", 4)
        S = torch.stack([output_factor(factor, likelihood, f, y, generator) for _ in range(400)])
        root = likelihood.scaled_root(f, y)
        within(likelihood.curvature_weights("monte_carlo") * S @ S.mT, root @ root.mT)


def _draws(law: Laws, case: LikelihoodCase) -> None:
    likelihood, f = case.likelihood, case.f
    many = f.expand(DRAWS, *f.shape)
    with law("draws come from their generator alone"):
        same_stream(lambda generator: likelihood.sample(many, generator))
    y = likelihood.sample(many, seeded(case.seed + 4))
    with law("draws have the mean and the variance that mean and variance say"):
        mean, variance = likelihood.mean(f), likelihood.variance(f)
        numbers = _numbers(y, mean)
        within(numbers, mean)
        within((numbers - mean).square(), variance)
    with law("draws have the Fisher information: E[score scoreᵀ] = S Sᵀ"):
        score = vmap(vmap(grad(case.log_prob)))(many, y)
        root = likelihood.scaled_root(f, y[0])
        within(torch.einsum("kna,knb->knab", score, score), root @ root.mT)


def _every(law: Laws, case: LikelihoodCase) -> None:
    """What draws say on average, over every y."""
    likelihood = case.likelihood
    assert case.values is not None
    mean, variance = likelihood.mean(case.f), likelihood.variance(case.f)
    root = likelihood.scaled_root(case.f, case.y)
    for f, m, v, fisher in zip(case.f, mean, variance, root @ root.mT, strict=True):
        y, p = case.values(f)
        with law("the probabilities of every y add up to one"):
            close(p.sum(), torch.ones((), dtype=torch.float64))
        with law("mean and variance are those over every y"):
            close(m, torch.einsum("v,va->a", p, _numbers(y, m)))
            close(v, torch.einsum("v,va->a", p, (_numbers(y, m) - m).square()))
        with law("the Fisher information over every y is S Sᵀ"):
            score = vmap(grad(case.log_prob), in_dims=(None, 0))(f, y)
            close(torch.einsum("v,va,vb->ab", p, score, score), fisher)
    with law("mean and variance take any batch shape"):
        close(likelihood.mean(case.f.expand(2, *case.f.shape))[1], mean)
        close(likelihood.variance(case.f.expand(2, *case.f.shape))[1], variance)


def _numbers(y: Tensor, mean: Tensor) -> Tensor:
    """Targets as numbers of the mean's kind: labels one-hot."""
    return y.double() if y.is_floating_point() else torch.nn.functional.one_hot(y, mean.shape[-1]).double()
