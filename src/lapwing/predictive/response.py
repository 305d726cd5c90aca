"""The moments of y at all inputs of a prediction, each made of the one before, in float64: none is rounded in between.

    by nodes     mean, variances and entropies are sums over one set of nodes of f (`moments.py`)
    by a link    the mean is given; total and entropy follow from it, and nodes give the shares of their parts
    Gaussian     exact, or by the delta method (`normal.py`)

Targets (n, ..., t).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lapwing.likelihoods import Likelihood
from lapwing.predictive import moments, normal
from lapwing.predictive.integral import Integral


@dataclass(frozen=True, eq=False)
class Response:
    """By nodes, or by a link."""

    integral: Integral
    closed: Tensor | None = None  # E[y] by a link in closed form

    @property
    def likelihood(self) -> Likelihood:
        """Of y given f."""
        return self.integral.likelihood

    @property
    def mean(self) -> Tensor:
        """E[y]."""
        return self._sums[0] if self.closed is None else self.closed

    @property
    def epistemic(self) -> Tensor:
        """Var of E[y|f]."""
        mean, spread = self._sums
        if not self.likelihood.classes:
            return spread
        return moments.share(spread, moments.binary_variance(mean), of=self.total)

    @cached_property
    def aleatoric(self) -> Tensor:
        """E of Var[y|f]."""
        if self.likelihood.classes:
            return self.total - self.epistemic
        return self.integral.over(lambda one, some, _: moments.noise(one, some), sharp=False)

    @property
    def total(self) -> Tensor:
        """Var[y]."""
        return moments.binary_variance(self.mean) if self.likelihood.classes else self.epistemic + self.aleatoric

    # of classes alone

    @property
    def entropy(self) -> Tensor:
        """H(E p), of classes."""
        return moments.entropy(self.likelihood, self.mean)

    @cached_property
    def information(self) -> Tensor:
        """H(E p) − E H(p), of classes."""
        whole = moments.entropy(self.likelihood, self._sums[0])
        part = whole - self.integral.over(lambda one, some, _: moments.expected_entropy(one, some))
        return moments.share(part, whole, of=self.entropy)

    @cached_property
    def _sums(self) -> tuple[Tensor, Tensor]:
        """Mean and epistemic variance over nodes."""
        found = self.integral.over(lambda one, some, _: moments.mean_and_spread(one, some), sharp=False)
        mean, spread = found.unbind(-2)
        return mean, spread


@dataclass(frozen=True, eq=False)
class GaussianResponse:
    """Exact, or by the delta method."""

    likelihood: Likelihood
    f_mean: Tensor  # (n, ..., c)
    cov: Tensor  # (n, ..., c, c)

    @property
    def mean(self) -> Tensor:
        """E[y]."""
        return self.likelihood.mean(self.f_mean)

    @property
    def epistemic(self) -> Tensor:
        """Var of E[y|f]."""
        D = normal.slope(self.likelihood, self.f_mean)
        if D is None:
            return self.cov.diagonal(dim1=-2, dim2=-1)
        return torch.einsum("...ta,...ab,...tb->...t", D, self.cov, D)

    @property
    def aleatoric(self) -> Tensor:
        """E of Var[y|f]."""
        return self.likelihood.variance(self.f_mean)

    @property
    def total(self) -> Tensor:
        """Var[y]."""
        return self.epistemic + self.aleatoric
