"""Every likelihood of the library beside its density, written out here in plain torch.

An `Observation` has the library's object, random targets, log p(y | f) of one row f (c,), and Λ = −∂² log p of that
row, or its mean over y where the library says that it takes the Fisher information. Noise and settings are random.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw

L = lw.likelihoods
LOG_2PI = math.log(2 * math.pi)
Row = Callable[[Tensor, Tensor], Tensor]


class Natural(nn.Module):
    """(a, b) -> (a, −½ log(1 + eᵇ) − 0.05): natural parameters of a Gaussian, the second negative."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a, -0.5 * torch.log1p(b.exp()) - 0.05], -1)


@dataclass(frozen=True)
class Observation:
    name: str
    likelihood: Any
    c: int  # outputs
    targets: Callable[[Tensor], Tensor]  # f (..., c) -> y
    log_prob: Row  # of one row
    information: Row | None = None  # Λ of one row, where it is not the Hessian at y
    unit: Row | None = None  # Λ at unit noise, which the g-prior is made of
    end: Callable[[], nn.Module] = nn.Identity
    concave: bool = True

    def curvature(self, f: Tensor, y: Tensor) -> Tensor:
        """Λ (c, c) at one row, in float64."""
        if self.information is not None:
            return self.information(f, y)
        return _hessian(lambda f: -self.log_prob(f, y), f)

    def unit_curvature(self, f: Tensor, y: Tensor) -> Tensor:
        return self.curvature(f, y) if self.unit is None else self.unit(f, y)

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        f = f.detach().requires_grad_()
        return torch.autograd.grad(self.log_prob(f, y), f)[0]


def _hessian(function: Callable[[Tensor], Tensor], f: Tensor) -> Tensor:
    """By two reverse passes, row by row."""
    f = f.detach().requires_grad_()
    (slope,) = torch.autograd.grad(function(f), f, create_graph=True)
    if not slope.requires_grad:
        return torch.zeros(len(f), len(f), dtype=f.dtype)
    return torch.stack([torch.autograd.grad(s, f, retain_graph=True)[0] for s in slope])


def normal(f: Tensor, y: Tensor, std: Tensor | float) -> Tensor:
    std = torch.as_tensor(std, dtype=f.dtype).expand(f.shape)
    return -(0.5 * ((y - f) / std) ** 2 + std.log() + 0.5 * LOG_2PI).sum()


def eye(f: Tensor, y: Tensor) -> Tensor:
    return torch.eye(len(f), dtype=f.dtype)


def near(f: Tensor) -> Tensor:
    return f + 0.5 * torch.randn_like(f)


def labels(classes: int) -> Callable[[Tensor], Tensor]:
    return lambda f: torch.randint(classes, f.shape[:-1])


def softmax_log_prob(f: Tensor, y: Tensor) -> Tensor:
    return f[int(y)] - f.exp().sum().log()


# -- one function a likelihood ---------------------------------------------------------------------------------------


def gaussian(rng: random.Random) -> Observation:
    c = rng.randint(1, 4)
    each = c > 1 and rng.random() < 0.4
    noise: Any = torch.tensor([rng.uniform(0.4, 1.5) for _ in range(c)]).double() if each else rng.uniform(0.4, 1.5)
    return Observation("gaussian", L.Gaussian(noise), c, near, lambda f, y: normal(f, y, noise), unit=eye)


def correlated(rng: random.Random) -> Observation:
    c = rng.randint(2, 3)
    root = torch.eye(c).double() + 0.4 * torch.randn(c, c).double()
    R = root @ root.mT
    inverse, log_det = torch.linalg.inv(R), torch.logdet(R)
    log_prob = lambda f, y: -0.5 * ((y - f) @ inverse @ (y - f) + log_det + len(f) * LOG_2PI)  # noqa: E731
    return Observation("correlated", L.CorrelatedGaussian(R), c, near, log_prob, unit=eye)


def known_noise(rng: random.Random) -> Observation:
    c = rng.randint(1, 3)
    pack = lambda f: L.KnownNoise.pack(near(f), 0.4 + torch.rand_like(f))  # noqa: E731
    return Observation("known noise", L.KnownNoise(), c, pack, lambda f, y: normal(f, y[:c], y[c:]))


def student(rng: random.Random) -> Observation:
    c, s, nu = rng.randint(1, 3), rng.uniform(0.4, 2.0), rng.uniform(2.5, 9.0)

    def log_prob(f: Tensor, y: Tensor) -> Tensor:
        ways = math.lgamma(0.5 * nu + 0.5) - math.lgamma(0.5 * nu) - 0.5 * math.log(math.pi * nu) - math.log(s)
        return (ways - 0.5 * (nu + 1) * torch.log(1 + ((y - f) / s) ** 2 / nu)).sum()

    fisher = lambda f, y: (nu + 1) / ((nu + 3) * s**2) * eye(f, y)  # noqa: E731
    return Observation("student", L.StudentT(s, nu), c, near, log_prob, fisher, concave=False)


def heteroscedastic(rng: random.Random) -> Observation:
    t = rng.randint(1, 2)

    def log_prob(f: Tensor, y: Tensor) -> Tensor:
        variance = -0.5 / f[t:]
        return normal(f[:t] * variance, y, variance.sqrt())

    targets = lambda f: torch.randn(*f.shape[:-1], t, dtype=f.dtype)  # noqa: E731
    return Observation("heteroscedastic", L.HeteroscedasticGaussian(), 2 * t, targets, log_prob, end=Natural)


def mean_log_variance(rng: random.Random) -> Observation:
    t = rng.randint(1, 2)
    log_prob = lambda f, y: normal(f[:t], y, (0.5 * f[t:]).exp())  # noqa: E731
    fisher = lambda f, y: torch.diag(torch.cat([(-f[t:]).exp(), torch.full_like(f[t:], 0.5)]))  # noqa: E731
    targets = lambda f: near(f[..., :t])  # noqa: E731
    return Observation("mean and log variance", L.MeanLogVariance(), 2 * t, targets, log_prob, fisher, concave=False)


def categorical(rng: random.Random) -> Observation:
    c = rng.randint(2, 4)
    return Observation("categorical", L.Categorical(), c, labels(c), softmax_log_prob)


def soft_labels(rng: random.Random) -> Observation:
    c = rng.randint(2, 4)
    log_prob = lambda f, y: (y * (f - f.exp().sum().log())).sum()  # noqa: E731
    return Observation("soft labels", L.SoftLabels(), c, lambda f: torch.randn_like(f).softmax(-1), log_prob)


def smoothing(rng: random.Random) -> Observation:
    c, e = rng.randint(2, 4), rng.uniform(0.05, 0.4)

    def log_prob(f: Tensor, y: Tensor) -> Tensor:
        t = (1 - e) * (torch.arange(c) == y).to(f) + e / c
        return (t * (f - f.exp().sum().log())).sum()

    return Observation("label smoothing", L.LabelSmoothing(e), c, labels(c), log_prob)


def bernoulli(rng: random.Random) -> Observation:
    c = rng.randint(1, 4)
    log_prob = lambda f, y: -torch.log1p(torch.exp((1 - 2 * y) * f)).sum()  # noqa: E731
    return Observation("bernoulli", L.Bernoulli(), c, lambda f: torch.randint(2, f.shape).to(f), log_prob)


def ordinal(rng: random.Random) -> Observation:
    k = rng.randint(1, 3)
    cuts = torch.linspace(-1, 1, k).double() + 0.1

    def probabilities(f: Tensor) -> Tensor:
        below = torch.cat([torch.sigmoid(cuts - f), torch.ones(1, dtype=f.dtype)])
        return torch.cat([below[:1], below.diff()])

    def fisher(f: Tensor, y: Tensor) -> Tensor:
        f = f.detach().requires_grad_()
        p = probabilities(f)
        slopes = torch.stack([torch.autograd.grad(one, f, retain_graph=True)[0] for one in p])
        return (slopes**2 / p.detach()[:, None]).sum().reshape(1, 1)

    return Observation(
        "ordinal", L.Ordinal(cuts), 1, labels(k + 1), lambda f, y: probabilities(f)[int(y)].log(), fisher
    )


def bradley_terry(rng: random.Random) -> Observation:
    log_prob = lambda f, y: f[int(y)] - f.exp().sum().log()  # noqa: E731
    return Observation("bradley-terry", L.BradleyTerry(), 2, labels(2), log_prob)


def poisson(rng: random.Random) -> Observation:
    log_prob = lambda f, y: (y * f - f.exp() - torch.lgamma(y + 1)).sum()  # noqa: E731
    return Observation("poisson", L.Poisson(), rng.randint(1, 3), lambda f: torch.randint(6, f.shape).to(f), log_prob)


def negative_binomial(rng: random.Random) -> Observation:
    r = rng.uniform(0.5, 6.0)

    def log_prob(f: Tensor, y: Tensor) -> Tensor:
        ways = torch.lgamma(y + r) - math.lgamma(r) - torch.lgamma(y + 1)
        return (ways + y * f + r * math.log(r) - (y + r) * (f.exp() + r).log()).sum()

    fisher = lambda f, y: torch.diag(r * f.exp() / (r + f.exp()))  # noqa: E731
    targets = lambda f: torch.randint(6, f.shape).to(f)  # noqa: E731
    return Observation("negative binomial", L.NegativeBinomial(r), rng.randint(1, 3), targets, log_prob, fisher)


# -- rows that count for more or less ----------------------------------------------------------------------------------


def weighted(rng: random.Random) -> Observation:
    """A weight with each row, in front of some other likelihood."""
    base = rng.choice((gaussian, categorical, bernoulli, student, negative_binomial, correlated))(rng)
    likelihood = L.Weighted(base.likelihood)
    scaled = lambda one: None if one is None else lambda f, y: y[-1] * one(f, _own(base, y))  # noqa: E731

    def targets(f: Tensor) -> Tensor:
        w = 2 * torch.rand(f.shape[:-1], dtype=f.dtype) * (torch.rand(f.shape[:-1]) > 0.2)
        return likelihood.pack(base.targets(f), w)

    return Observation(
        f"weighted {base.name}", likelihood, base.c, targets, scaled(base.log_prob), scaled(base.information),
        scaled(base.unit), concave=base.concave,
    )  # fmt: skip


def _own(base: Observation, y: Tensor) -> Tensor:
    """The base's targets beside a weight: labels are one number, vectors are the rest."""
    return y[0] if base.name == "categorical" else y[:-1]


def class_weighted(rng: random.Random) -> Observation:
    c = rng.randint(2, 4)
    w = torch.rand(c).double() + 0.2
    log_prob = lambda f, y: w[int(y)] * softmax_log_prob(f, y)  # noqa: E731
    return Observation("class weights", L.ClassWeighted(L.Categorical(), w), c, labels(c), log_prob)


def ignoring(rng: random.Random) -> Observation:
    c = rng.randint(2, 4)

    def targets(f: Tensor) -> Tensor:
        y = torch.randint(c, f.shape[:-1])
        return torch.where(torch.rand(y.shape) < 0.3, -100, y)

    log_prob = lambda f, y: softmax_log_prob(f, y) if y >= 0 else 0.0 * f.sum()  # noqa: E731
    return Observation("ignored labels", L.Ignoring(L.Categorical()), c, targets, log_prob)


OBSERVATIONS: tuple[Callable[[random.Random], Observation], ...] = (
    gaussian, gaussian, gaussian, correlated, known_noise, student, heteroscedastic, mean_log_variance,
    categorical, categorical, soft_labels, smoothing, bernoulli, ordinal, bradley_terry, poisson, negative_binomial,
    weighted, class_weighted, ignoring,
)  # fmt: skip
