"""A prediction: a Gaussian over the network's outputs f at some inputs, and what it says of y.

Law of total variance, Var[y] = Var_f(E[y|f]) + E_f[Var(y|f)]:   total = epistemic + aleatoric.
For a Gaussian likelihood all parts are exact. For classes they come from one fixed set of quasi-random draws of f
(so the parts add up exactly), and the entropies beside them: H(E p) = E H(p) + mutual information.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lapwing.curvature.accumulate import flat_outputs, flat_targets
from lapwing.errors import InvalidValue, Unsupported
from lapwing.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from lapwing.predictive.link import DRAWS, LINKS, closed_form, psd_root, quasi_normal

CHUNK = 2**24  # numbers in a chunk of draws


@dataclass(frozen=True, eq=False)
class Prediction:
    """`f_mean` (n, ..., c); `covariance` (n, ..., c, c), or (n, c, n, c) if joint; all of the outputs f.

    Where outputs are too many for a covariance, or draws are not Gaussian (via="network"), `outputs` holds draws.
    """

    likelihood: Likelihood
    f_mean: Tensor
    cov: Tensor | None
    link: str = "auto"
    joint: bool = False
    outputs: Tensor | None = None  # (s, n, ..., c): draws of f
    samples: int | None = None  # of the posterior, where the covariance is an estimate from some

    def __post_init__(self) -> None:
        if self.link not in LINKS:
            raise InvalidValue(f"link must be one of {LINKS}, got {self.link!r}")
        if self.outputs is None:  # raise for a pair that has no rule now, not when the mean is read
            c = self.f_mean.shape[-1]
            closed_form(self.likelihood, self.link, self.f_mean.new_zeros(1, c), torch.eye(c).to(self.f_mean)[None])

    # -- outputs f ------------------------------------------------------------------------------------------------

    @property
    def marginal(self) -> Tensor:
        """The covariance of each input's outputs, (n, ..., c, c)."""
        if not self.joint:
            return self.covariance
        n, c = self.covariance.shape[:2]
        return self.covariance.permute(0, 2, 1, 3)[torch.arange(n), torch.arange(n)].reshape(n, c, c)

    @property
    def covariance(self) -> Tensor:
        if self.cov is None:
            raise Unsupported(
                f"{self.f_mean.shape[-1]} outputs are too many for a covariance matrix; use f_var, or f_sample(n)"
            )
        return self.cov

    @property
    def f_var(self) -> Tensor:
        if self.cov is None and self.outputs is not None:
            return (self.outputs - self.f_mean).square().mean(0)
        return self.marginal.diagonal(dim1=-2, dim2=-1)

    @property
    def f_var_standard_error(self) -> Tensor:
        """Of f_var: zero where it is exact, f_var √(2/k) where it is the mean square of k samples."""
        return self.f_var * (0.0 if self.samples is None else math.sqrt(2 / self.samples))

    # -- the response y -------------------------------------------------------------------------------------------

    @cached_property
    def mean(self) -> Tensor:
        """E[y]: class probabilities for classes, (n, ..., c)."""
        if self.outputs is not None:
            return self._moments["mean"]
        closed = closed_form(self.likelihood, self.link, self.f_mean, self.marginal)
        return self._moments["mean"] if closed is None else closed

    @property
    def probs(self) -> Tensor:
        if not self._classes:
            raise Unsupported(f"a {self.likelihood.name} prediction has no class probabilities; use mean and std")
        return self.mean

    @property
    def epistemic(self) -> Tensor:
        """Var of E[y|f] over the posterior: what more data would tell."""
        return self.f_var if self._exact else self._moments["epistemic"]

    @property
    def aleatoric(self) -> Tensor:
        """E of Var[y|f]: noise that no data remove."""
        return self.likelihood.variance(self.f_mean) if self._exact else self._moments["aleatoric"]

    @property
    def total(self) -> Tensor:
        return self.epistemic + self.aleatoric

    @property
    def std(self) -> Tensor:
        return self.total.sqrt()

    @property
    def entropy(self) -> Tensor:
        """H(E p), in nats: the total uncertainty about the class, (n, ...)."""
        return _entropy(self._probabilities(self._moments["mean"]))

    @property
    def expected_entropy(self) -> Tensor:
        """E H(p): its aleatoric part."""
        self._probabilities(self.f_mean)
        return self._moments["entropy"]

    @property
    def mutual_information(self) -> Tensor:
        """H(E p) − E H(p) ≥ 0: its epistemic part, the information that y would give about the weights."""
        return self.entropy - self.expected_entropy

    # -- draws, densities, quantiles ------------------------------------------------------------------------------

    def f_sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """n draws of f, (n, *f_mean.shape); over all inputs jointly if the prediction is joint."""
        generator = generator or torch.Generator().manual_seed(0)
        if self.outputs is not None:
            pick = torch.randint(len(self.outputs), (n,), generator=generator, device=generator.device)
            return self.outputs[pick.to(self.outputs.device)]
        shape, dims = self._blocks()
        noise = torch.randn((n, *shape, dims), generator=generator, dtype=torch.float64, device=generator.device)
        return self._colored(noise.to(self.f_mean.device))

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """n draws of y."""
        generator = generator or torch.Generator().manual_seed(0)
        return self.likelihood.sample(self.f_sample(n, generator), generator)

    def quantile(self, q: float) -> Tensor:
        """The quantile of y; for classes, that of the class probabilities over the posterior."""
        if not 0 < q < 1:
            raise InvalidValue(f"a quantile lies strictly between 0 and 1, got {q}")
        if self._exact:
            return self.mean + self.std * math.sqrt(2) * torch.erfinv(torch.tensor(2 * q - 1, dtype=torch.float64)).to(
                self.mean
            )
        draws = self.outputs if self.outputs is not None else self._quasi()
        values = (
            self.likelihood.mean(draws)
            if self._classes
            else self.likelihood.sample(draws, torch.Generator().manual_seed(0)).to(self.f_mean)
        )
        return torch.quantile(values, q, dim=0)

    def log_prob(self, y: Tensor) -> Tensor:
        """log p(y) of each input, (n, ...); of all inputs together, 0-dim, if the prediction is joint."""
        y = y.to(self.f_mean.device)
        self.likelihood.validate(flat_outputs(self.f_mean), flat_targets(self.f_mean, y))
        if self._exact:
            return self._gaussian_log_prob(y)
        if self.joint or self.outputs is not None:
            draws = self.outputs if self.outputs is not None else self._quasi()
            each = self.likelihood.log_prob(draws, y.expand(len(draws), *y.shape))  # (s, n, ...)
            each = each.flatten(1).sum(1) if self.joint else each
            return torch.logsumexp(each, 0) - math.log(len(draws))
        if not self._classes or (self.link == "monte_carlo" and y.shape == self.f_mean.shape):
            return self._drawn_log_prob(y)
        # the predictive distribution of one y is that of E[y|f]: a categorical of its mean; with a closed-form link,
        # independent bernoullis (their dependence through f, which is there with several outputs, is left out)
        p = self.mean.clamp(torch.finfo(self.mean.dtype).tiny, 1)
        if y.shape == self.f_mean.shape:
            least = torch.finfo(p.dtype).eps / 2  # a probability that rounds to 1 does not make the other impossible
            return torch.where(y.bool(), p.log(), torch.log1p(-p.clamp(max=1 - least))).sum(-1)
        return p.log().gather(-1, y.long().unsqueeze(-1)).squeeze(-1)

    # -- inside ---------------------------------------------------------------------------------------------------

    @property
    def _exact(self) -> bool:
        return isinstance(self.likelihood, Gaussian) and self.outputs is None

    @property
    def _classes(self) -> bool:
        return isinstance(self.likelihood, (Bernoulli, Categorical))

    def _blocks(self) -> tuple[tuple[int, ...], int]:
        """Independent Gaussian blocks of f: their batch shape and size."""
        c = self.f_mean.shape[-1]
        return ((), self.f_mean.numel()) if self.joint else (tuple(self.f_mean.shape[:-1]), c)

    def _root(self) -> Tensor:
        shape, dims = self._blocks()
        return psd_root(self.covariance.to(torch.float64).reshape(*shape, dims, dims))

    def _colored(self, noise: Tensor) -> Tensor:
        """Standard normal (s, *shape, dims) turned into draws of f."""
        draws = (self._root() @ noise.unsqueeze(-1)).squeeze(-1)
        return self.f_mean + draws.reshape(len(noise), *self.f_mean.shape).to(self.f_mean)

    def _quasi(self) -> Tensor:
        shape, dims = self._blocks()
        noise = quasi_normal(DRAWS, dims).to(self.f_mean.device)
        return self._colored(noise.reshape(DRAWS, *[1] * len(shape), dims).expand(DRAWS, *shape, dims))

    @cached_property
    def _moments(self) -> dict[str, Tensor]:
        """Mean, variance parts and expected entropy over draws of f, in chunks of inputs."""
        c = self.f_mean.shape[-1]
        mean = self.f_mean.reshape(-1, c)
        outputs = None if self.outputs is None else self.outputs.reshape(len(self.outputs), -1, c)
        cov = mean if outputs is not None else self.marginal.reshape(-1, c, c)
        parts: list[dict[str, Tensor]] = []
        size = max(1, CHUNK // (DRAWS * c))
        for start in range(0, len(mean), size):
            index = slice(start, start + size)
            if outputs is None:
                draws = Prediction(self.likelihood, mean[index], cov[index])._quasi()
            else:  # no Gaussian is made of them: its check alone would hold outputs x outputs
                draws = outputs[:, index]
            parts.append(_moments(self.likelihood, draws))
        joined = {k: torch.cat([part[k] for part in parts]) for k in parts[0]}
        return {k: v.reshape(*self.f_mean.shape[:-1], *v.shape[1:]) for k, v in joined.items()}

    def _drawn_log_prob(self, y: Tensor) -> Tensor:
        """log E_f p(y | f) of each input: outputs that are independent given f depend on each other through f."""
        c = self.f_mean.shape[-1]
        mean, cov, targets = self.f_mean.reshape(-1, c), self.marginal.reshape(-1, c, c), flat_targets(self.f_mean, y)
        parts = []
        size = max(1, CHUNK // (DRAWS * c))
        for start in range(0, len(mean), size):
            index = slice(start, start + size)
            draws = Prediction(self.likelihood, mean[index], cov[index])._quasi()
            mine = targets[index]
            each = self.likelihood.log_prob(draws, mine.expand(len(draws), *mine.shape))
            parts.append(torch.logsumexp(each, 0) - math.log(len(draws)))
        return torch.cat(parts).reshape(self.f_mean.shape[:-1])

    def _probabilities(self, p: Tensor) -> Tensor:
        if not self._classes:
            raise Unsupported(
                f"entropies are for classes; a {self.likelihood.name} prediction has epistemic and aleatoric variances"
            )
        return p if self.likelihood.name == "categorical" else torch.stack([p, 1 - p], -1)

    def _gaussian_log_prob(self, y: Tensor) -> Tensor:
        shape, dims = self._blocks()
        cov = self.covariance.to(torch.float64).reshape(*shape, dims, dims)
        noise = self.likelihood.variance(self.f_mean).to(torch.float64).reshape(*shape, dims)
        root = torch.linalg.cholesky(cov + torch.diag_embed(noise))
        residual = (y - self.f_mean).to(torch.float64).reshape(*shape, dims, 1)
        z = torch.linalg.solve_triangular(root, residual, upper=False).squeeze(-1)
        half_logdet = root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return -0.5 * z.square().sum(-1) - half_logdet - 0.5 * dims * math.log(2 * math.pi)

    def __repr__(self) -> str:
        n, c = self.f_mean.shape[0], self.f_mean.shape[-1]
        head = f"Prediction({self.likelihood.name}, {n} inputs, {c} outputs{', joint' if self.joint else ''})"
        rows = [f"  {'mean':>28}  {'std':>22}"]
        for i in range(min(n, 5)):
            rows.append(f"  {_short(self.mean[i]):>28}  {_short(self.std[i]):>22}")
        return "\n".join([head, *rows, *(["  ..."] if n > 5 else [])])


def _moments(likelihood: Likelihood, f: Tensor) -> dict[str, Tensor]:
    """Over draws f (s, n, c); the mean of squares is taken about the mean, so nothing cancels."""
    means = likelihood.mean(f)
    mean = means.mean(0)
    out: dict[str, Any] = {
        "mean": mean,
        "epistemic": (means - mean).square().mean(0),
        "aleatoric": likelihood.variance(f).mean(0),
    }
    if isinstance(likelihood, (Bernoulli, Categorical)):
        p = means if likelihood.name == "categorical" else torch.stack([means, 1 - means], -1)
        out["entropy"] = _entropy(p).mean(0)
    return out


def _entropy(p: Tensor) -> Tensor:
    return -torch.xlogy(p, p).sum(-1)


def _short(row: Tensor) -> str:
    values = row.flatten()[:3].tolist()
    return ", ".join(f"{v:.4g}" for v in values) + (", ..." if row.numel() > 3 else "")
