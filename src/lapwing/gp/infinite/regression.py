"""The process of an infinitely wide network, given data: one Gaussian process for each output, all with one kernel.

    ỹ_c = f_c(x) + √D_c ε,   f_c ~ GP(m_c, k)
    mean_c(x) = m_c + k(x, X)(K + D_c)⁻¹(ỹ_c − m_c),    cov_c(x, x') = k(x, x') − k(x, X)(K + D_c)⁻¹ k(X, x')
    log Z = Σ_c log N(ỹ_c; m_c, K + D_c)

    regression       ỹ = y, D = σ², m = 0: the network's own prior
    classification   ỹ and D made of labels (likelihoods/dirichlet.py), m the mean of ỹ_c in the weights 1/D_c

With the "ntk" kernel it is the process whose prior covariance is Θ, which is not the law of trained networks. K (n, n)
is made once; outputs of one noise share one factorization, others are factorized one by one where all at once
would not fit. Shapes: n data, c outputs, m new inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lapwing import data as loading
from lapwing import tune
from lapwing.curvature import BUDGET
from lapwing.errors import InvalidValue
from lapwing.gp.infinite.kernel import Kernel
from lapwing.gp.infinite.moments import check_inputs
from lapwing.gp.infinite.tuning import searched
from lapwing.likelihoods import Dirichlet, Gaussian, Likelihood
from lapwing.operators import linalg
from lapwing.outputs import Normal
from lapwing.predictive import Prediction


@dataclass(frozen=True, eq=False, repr=False)
class Regression:
    """A kernel of an infinitely wide network, with data. Frozen: whatever changes something returns a new object."""

    kernel: Kernel
    x: Tensor  # (n, ...), float64
    y: Tensor  # the targets
    likelihood: Any  # a Gaussian, or a Dirichlet of labels
    outputs: int  # c
    centered: bool = False  # whether it is about a constant, that of labels, and not about 0
    tuning: tune.Tuning | None = None

    @property
    def n(self) -> int:
        """Examples."""
        return len(self.x)

    @cached_property
    def observed(self) -> tuple[Tensor, Tensor]:
        """ỹ (n, c) and D, (n, c) or one number an output (1, c), or for all (1, 1)."""
        return self.likelihood.observations(self.x.new_zeros(self.n, self.outputs), self.y)

    @cached_property
    def constant(self) -> Tensor:
        """m (c,), before data."""
        return self.likelihood.constant(self.y, self.outputs) if self.centered else self.x.new_zeros(self.outputs)

    @cached_property
    def gram(self) -> Tensor:
        """K (n, n), without noise."""
        return self.kernel(self.x)

    def log_evidence(self) -> Tensor:
        """log p(ỹ), 0-dim float64: of labels, the density of the observations that are made of them."""
        (y, _), total = self.observed, self.x.new_zeros(())
        for columns, root in self.roots():
            half = torch.linalg.solve_triangular(root, y[:, columns] - self.constant[columns], upper=False)
            logdet = 2 * root.diagonal().log().sum() + self.n * math.log(2 * math.pi)
            total = total - 0.5 * (half.square().sum() + half.shape[1] * logdet)
        return total

    def predict(self, x: Any, link: str = "auto", joint: bool = False) -> Prediction:
        """Predict with error bars at inputs (m, ...), all of them together if joint; link as in `Laplace.predict`."""
        x = check_inputs(x)
        mean, cov = self._moments(x, joint)
        return Prediction(self.likelihood.plain, Normal(mean, cov, joint), link)

    def __call__(self, x: Any) -> Prediction:
        return self.predict(x)

    def tuned(self, fixed: str | tuple[str, ...] = ()) -> Regression:
        """A new object with the variances of weights and biases, and the noise, that the evidence picks.

        fixed: which of "weight_variance", "bias_variance" and "noise" to hold. A bias variance of 0 is held."""
        held = (fixed,) if isinstance(fixed, str) else tuple(fixed)
        values, tuning = searched(self, held)
        return replace(self.at(values), tuning=tuning)

    def at(self, values: dict[str, Tensor]) -> Regression:
        """The same data under other variances and noise."""
        own = {name: float(v) for name, v in values.items() if name != "noise"}
        noise = {name: v for name, v in values.items() if name == "noise"}
        likelihood = self.likelihood.replace(**noise) if noise else self.likelihood
        made = replace(self, kernel=self.kernel.replace(**own), likelihood=likelihood, tuning=None)
        if not own:
            made.__dict__["gram"] = self.gram
        return made

    def roots(self) -> Iterator[tuple[slice, Tensor]]:
        """Outputs that share a noise, and the Cholesky factor (n, n) of K + D."""
        if "_kept" in self.__dict__ or 8 * self.n**2 * self.observed[1].shape[1] <= BUDGET:
            yield from self._kept
        else:
            yield from self._made()

    @cached_property
    def _kept(self) -> tuple[tuple[slice, Tensor], ...]:
        return tuple(self._made())

    def _made(self) -> Iterator[tuple[slice, Tensor]]:
        noises = self.observed[1]
        for c, noise in enumerate(noises.mT):
            columns = slice(None) if noises.shape[1] == 1 else slice(c, c + 1)
            noisy = self.gram.clone()
            noisy.diagonal().add_(noise)
            yield columns, linalg.cholesky(noisy)[0]

    def _moments(self, x: Tensor, joint: bool) -> tuple[Tensor, Tensor]:
        """Means (m, c) and covariances (m, c, c) or (m, c, m, c)."""
        m, c, cross = len(x), self.outputs, self.kernel(self.x, x)  # (n, m)
        prior = self.kernel(x) if joint else self.kernel.diagonal(x)
        mean, spread = x.new_zeros(m, c), x.new_zeros(c, *prior.shape)
        for columns, root in self.roots():
            half = torch.linalg.solve_triangular(root, cross, upper=False)  # (n, m)
            away = self.observed[0][:, columns] - self.constant[columns]
            mean[:, columns] = half.mT @ torch.linalg.solve_triangular(root, away, upper=False)
            if joint:
                spread[columns] = prior - half.mT @ half
            else:
                spread[columns] = (prior - half.square().sum(0)).clamp(min=0)  # rounding, where data are dense
        mean += self.constant
        if not joint:
            return mean, torch.diag_embed(spread.mT)
        cov = x.new_zeros(m, c, m, c)
        cov.diagonal(dim1=1, dim2=3).copy_(spread.permute(1, 2, 0))
        return mean, cov

    def __repr__(self) -> str:
        known = self.likelihood.hyperparameters.items()
        noise = "".join(f", {k}={' '.join(f'{float(one):.4g}' for one in v.reshape(-1))}" for k, v in known)
        tuned = "" if self.tuning is None else f"; tuned by {self.tuning.method}"
        return f"Regression({self.kernel!r}; {self.likelihood.kind}{noise}; {self.n:,} examples{tuned})"


def regression(kernel: Kernel, data: Any, noise: Any = 0.1) -> Regression:
    """A process given real targets."""
    x, y = gathered(data)
    if y.ndim == 1:
        raise InvalidValue(f"targets of a regression are (n, c), got {tuple(y.shape)}; give y[:, None]")
    return _checked(kernel, x, y, Gaussian(noise), y.shape[-1])


def classification(kernel: Kernel, data: Any, concentration: float = 0.1, classes: int | None = None) -> Regression:
    """A process given labels."""
    x, y = gathered(data)
    seen = y.shape[-1] if y.is_floating_point() else int(y.max()) + 1
    found = _checked(kernel, x, y, Dirichlet(concentration), seen if classes is None else classes)
    return replace(found, centered=True)


def _checked(kernel: Kernel, x: Tensor, y: Tensor, likelihood: Likelihood, outputs: int) -> Regression:
    likelihood.validate(x.new_zeros(len(x), outputs), y)
    return Regression(kernel, x, y, likelihood, outputs)


def gathered(data: Any) -> tuple[Tensor, Tensor]:
    """All inputs and targets of the data, as two tensors."""
    parts = list(loading.passes(loading.as_batches(data), torch.device("cpu")))
    if not all(isinstance(v, Tensor) for part in parts for v in part):
        raise InvalidValue("data of an infinitely wide network are tensors (x, y), or batches of them")
    x, y = (torch.cat(some) for some in zip(*parts, strict=True))
    return check_inputs(x), y
