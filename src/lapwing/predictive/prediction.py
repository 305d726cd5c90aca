"""A prediction: a Gaussian over the network's outputs f at some inputs, and what it says of y.

Law of total variance, Var[y] = Var_f(E[y|f]) + E_f[Var(y|f)]:   total = epistemic + aleatoric.
For a Gaussian likelihood all parts are exact; where its mean or noise is another function of f, they are those of the
delta method (link "delta"). Elsewhere they are sums over one fixed set of nodes (so the parts add up exactly), and for
classes the entropies beside them: H(E p) = E H(p) + mutual information. Densities and quantiles are those of the full
predictive, the mixture of p(y|f) over f.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lapwing import given
from lapwing.curvature.accumulate import flat_outputs, flat_targets
from lapwing.errors import InvalidValue, Unsupported
from lapwing.likelihoods import Likelihood
from lapwing.predictive import mixture, nodes, normal, plot, show, together
from lapwing.predictive.link import LINKS, closed_form, psd_root, quasi_normal, resolve
from lapwing.predictive.nodes import DRAWS, Nodes
from lapwing.solvers.estimate import variance_of

CHUNK = 2**24  # numbers in a chunk of draws
TRIES = 1000  # draws of f for one that the likelihood can take


@dataclass(frozen=True, eq=False)
class Prediction:
    """`f_mean` (n, ..., c); `covariance` (n, ..., c, c), or (n, ..., c, n, ..., c) if joint; all of the outputs f.

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
        if self.outputs is None:
            # raise now, not when the mean is read, for a pair that has no rule, and for means that have no y
            drawn = resolve(self.likelihood, self.link) == "monte_carlo"
            inside = self.likelihood.inside(self.f_mean)
            if not drawn and not bool(inside.all()):
                raise InvalidValue(
                    f"{int((~inside).sum())} of {inside.numel()} mean outputs are outside of what "
                    f"{self.likelihood.name} can take: the tangent model has left it there; use mean='network', or "
                    "link='monte_carlo', which leaves such draws out"
                )

    def __getitem__(self, index: slice) -> Prediction:
        """The prediction at some of its inputs."""
        if not isinstance(index, slice):
            raise InvalidValue(f"a prediction is cut by a slice of its inputs, such as [:5], got {index!r}")
        cov = self.cov
        if cov is not None:
            cov = cov[index]
            cov = cov.movedim(self.f_mean.ndim, 0)[index].movedim(0, self.f_mean.ndim) if self.joint else cov
        outputs = None if self.outputs is None else self.outputs[:, index]
        return replace(self, f_mean=self.f_mean[index], cov=cov, outputs=outputs)

    # -- outputs f ------------------------------------------------------------------------------------------------

    @property
    def marginal(self) -> Tensor:
        """The covariance of each input's outputs, (n, ..., c, c)."""
        if not self.joint:
            return self.covariance
        return _diagonal_blocks(self.covariance, self.f_mean.shape)

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

    @property
    def f_var_interval(self) -> tuple[Tensor, Tensor]:
        """90 % for each f_var: by the χ² distribution that k samples have, however few; both ends are f_var where it is
        exact."""
        return (self.f_var, self.f_var) if self.samples is None else variance_of(self.f_var, self.samples)

    # -- the response y -------------------------------------------------------------------------------------------

    @property
    def gaussian(self) -> bool:
        """Whether y is Gaussian, exactly or by the delta method: N(mean, total) for each target."""
        return (
            self.outputs is None
            and self.likelihood.normal
            and resolve(self.likelihood, self.link) in ("exact", "delta")
        )

    @cached_property
    def mean(self) -> Tensor:
        """E[y]: class probabilities for classes, (n, ..., t)."""
        if self.outputs is not None:
            return self._moments["mean"]
        closed = closed_form(self.likelihood, self.link, self.f_mean, self.marginal)
        return self._moments["mean"] if closed is None else closed

    @property
    def probs(self) -> Tensor:
        if not self.likelihood.classes:
            raise Unsupported(f"a {self.likelihood.name} prediction has no class probabilities; use mean and std")
        return self.mean

    @property
    def epistemic(self) -> Tensor:
        """Var of E[y|f] over the posterior: what more data would tell."""
        if not self.gaussian:
            return self._moments["epistemic"]
        D = normal.slope(self.likelihood, self.f_mean)
        return self.f_var if D is None else torch.einsum("...ta,...ab,...tb->...t", D, self.marginal, D)

    @property
    def aleatoric(self) -> Tensor:
        """E of Var[y|f]: noise that no data remove."""
        return self.likelihood.variance(self.f_mean) if self.gaussian else self._expected_variance

    @property
    def total(self) -> Tensor:
        return self.epistemic + self.aleatoric

    @property
    def std(self) -> Tensor:
        return self.total.sqrt()

    @property
    def entropy(self) -> Tensor:
        """H(E p), in nats: the total uncertainty about the class, (n, ...)."""
        self._check_classes()
        return _entropy(self.likelihood.class_probs(self._moments["mean"]))

    @property
    def expected_entropy(self) -> Tensor:
        """E H(p): its aleatoric part."""
        self._check_classes()
        return self._moments["entropy"]

    @property
    def mutual_information(self) -> Tensor:
        """H(E p) − E H(p) ≥ 0: its epistemic part, the information that y would give about the weights."""
        return self.entropy - self.expected_entropy

    # -- draws ----------------------------------------------------------------------------------------------------

    def f_sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """n draws of f, (n, *f_mean.shape); over all inputs jointly if the prediction is joint."""
        n, generator = given.whole(n, "the number of draws"), given.generator(generator)
        if self.outputs is not None:
            pick = torch.randint(len(self.outputs), (n,), generator=generator, device=generator.device)
            return self.outputs[pick.to(self.outputs.device)]
        shape, dims = self._blocks()
        noise = torch.randn((n, *shape, dims), generator=generator, dtype=torch.float64, device=generator.device)
        return self._colored(noise.to(self.f_mean.device))

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """n draws of y."""
        generator = given.generator(generator)
        f = self.f_sample(n, generator)
        if not self.gaussian:
            return self.likelihood.sample(self._inside(f, generator), generator)
        D, away = normal.slope(self.likelihood, self.f_mean), f - self.f_mean
        moved = away if D is None else torch.einsum("...ta,s...a->s...t", D, away)
        return moved + self.likelihood.sample(self.f_mean.expand_as(f), generator)

    # -- the distribution of y ------------------------------------------------------------------------------------

    def cdf(self, y: Tensor) -> Tensor:
        """P(target ≤ y) of each target by itself, (n, ..., t)."""
        self._check_ordered()
        y = given.targets(y, self.f_mean.device)
        if y.shape[:-1] != self.f_mean.shape[:-1] or y.ndim != self.f_mean.ndim:
            raise InvalidValue(f"cdf takes one y for each target, as log_prob does, got {tuple(y.shape)}")
        if self.gaussian:
            return torch.special.ndtr((y - self.mean) / self.std)
        if not self.has_cdf:
            raise Unsupported(f"{self.likelihood.name} has no distribution function cdf; use quantile or sample")
        return self._averaged(self.likelihood.cdf, y)

    def pmf(self, y: Tensor) -> Tensor:
        """P(target = y) of each target by itself, (n, ..., t), for counts."""
        if not self.likelihood.counts:
            raise Unsupported(f"pmf is for counts; a {self.likelihood.name} prediction has log_prob")
        return self._averaged(self.likelihood.pmf, y.to(self.f_mean.device))

    @property
    def has_cdf(self) -> bool:
        """Whether `cdf` can be had; else quantiles are those of draws."""
        f = self.f_mean.reshape(-1, self.f_mean.shape[-1])[:1]
        return not self.likelihood.classes and self.likelihood.cdf(f, f.new_zeros(1, 1)) is not None

    @property
    def smooth(self) -> bool:
        """Whether the distribution function is an integral over f, and not a mean over draws of it."""
        return self.outputs is None and (self.gaussian or self._by_line)

    def quantile(self, q: float) -> Tensor:
        """The least y that has F(y) ≥ q, of each target by itself; for classes, the quantile of the class probabilities
        over the posterior. Where the likelihood has no distribution function it is that of draws."""
        q = given.share(q, "a quantile")
        if self.gaussian:
            return self.mean + self.std * float(torch.special.ndtri(torch.tensor(q, dtype=torch.float64)))
        known = self.has_cdf
        parts = []
        for _, some in self._nodes(self._by_line and known):
            if self.likelihood.classes:
                parts.append(torch.quantile(self.likelihood.mean(some.f), q, dim=0))
            else:
                parts.append((mixture.quantile if known else mixture.sample_quantile)(self.likelihood, some, q))
        return self._shaped(parts).to(self.f_mean)

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """The central interval, between the quantiles (1 ± level)/2: its ends."""
        level = given.share(level, "the level of an interval")
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)

    def log_prob(self, y: Tensor) -> Tensor:
        """log p(y) of each input, (n, ...); of all inputs together, 0-dim, if the prediction is joint."""
        y = given.targets(y, self.f_mean.device)
        targets = flat_targets(self.f_mean, y)
        self.likelihood.validate(self._means_inside(), targets)
        if self.gaussian:
            return normal.log_prob(self.likelihood, self.f_mean, self.covariance, self.joint, y)
        if self.joint:
            return self._joint_log_prob(y)
        closed = self.outputs is None and resolve(self.likelihood, self.link) != "monte_carlo"
        if self.likelihood.classes and closed:  # of independent outputs, though they depend on each other through f
            out = self.likelihood.class_log_prob(self.mean.reshape(-1, self.mean.shape[-1]), targets)
            return out.reshape(self.f_mean.shape[:-1])
        parts = []
        for index, some in self._nodes(self.f_mean.shape[-1] == 1):
            mine = targets[index]
            parts.append(some.log_average(self.likelihood.log_prob(some.f, mine.expand(len(some.f), *mine.shape))))
        return self._shaped(parts)

    # -- to look at -----------------------------------------------------------------------------------------------

    def to_numpy(self) -> dict[str, Any]:
        """Mean, std and their parts as NumPy arrays, by name; entropies too for classes."""
        return show.to_numpy(self)

    def plot(self, x: Any, data: Any = None, level: float = 0.95) -> Any:
        """A matplotlib figure over inputs x (n, 1) or (n, 2): both kinds of band, and the data (X, y) if given."""
        return plot.figure(self, x, data, level)

    def __repr__(self) -> str:
        return show.text(self)

    def _repr_html_(self) -> str:
        return show.html(self)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _averaged(self, values: Any, y: Tensor) -> Tensor:
        """Over f, of values(f, y) of each target by itself."""
        targets = y.reshape(-1, y.shape[-1])
        each = [some.average(values(some.f, targets[i].to(some.f))) for i, some in self._nodes(self._by_line)]
        return self._shaped(each)

    @property
    def _by_line(self) -> bool:
        """Whether a target's distribution is an integral over one output."""
        return self.likelihood.elementwise or self.f_mean.shape[-1] == 1

    @property
    def _sharpness(self) -> Tensor:
        """How much wider the posterior over f is than p(y|f), squared: by variances, or by the information in y where
        they are infinite; without end where the likelihood does not say."""
        try:
            finite = bool(torch.isfinite(self.likelihood.variance(self.f_mean)).all())
            return self._moments["epistemic"] / self._expected_variance if finite else self._information
        except Unsupported:
            return self.f_mean.new_full((1,), math.inf)

    @property
    def _information(self) -> Tensor:
        return self.f_var * self.likelihood.hessian_root(self.f_mean).square().sum(-1)

    def _check_classes(self) -> None:
        if not self.likelihood.classes:
            raise Unsupported(
                f"entropies are for classes; a {self.likelihood.name} prediction has epistemic and aleatoric variances"
            )

    def _check_ordered(self) -> None:
        if self.likelihood.classes:
            raise Unsupported(f"a {self.likelihood.name} prediction is of classes, without order; use probs")

    def _blocks(self) -> tuple[tuple[int, ...], int]:
        """Independent Gaussian blocks of f: their batch shape and size."""
        c = self.f_mean.shape[-1]
        return ((), self.f_mean.numel()) if self.joint else (tuple(self.f_mean.shape[:-1]), c)

    def _colored(self, noise: Tensor) -> Tensor:
        """Standard normal (s, *shape, dims) turned into draws of f."""
        shape, dims = self._blocks()
        root = psd_root(self.covariance.to(torch.float64).reshape(*shape, dims, dims))
        draws = (root @ noise.unsqueeze(-1)).squeeze(-1)
        return self.f_mean + draws.reshape(len(noise), *self.f_mean.shape).to(self.f_mean)

    def _means_inside(self) -> Tensor:
        """Mean outputs (N, c), to hold targets to; any that the likelihood cannot take gives way to one that it can."""
        f = flat_outputs(self.f_mean)
        inside = self.likelihood.inside(f)
        return torch.where(inside.unsqueeze(-1), f, f[inside][:1]) if bool(inside.any()) else f

    def _inside(self, f: Tensor, generator: torch.Generator) -> Tensor:
        """Draws of f with those that the likelihood cannot take drawn again."""
        for _ in range(TRIES):
            outside = ~self.likelihood.inside(f)  # (s, n, ...)
            if not bool(outside.any()):
                return f
            if self.joint:
                outside = outside.flatten(1).any(1).reshape(-1, *[1] * (outside.ndim - 1))
            f = torch.where(outside.unsqueeze(-1), self.f_sample(len(f), generator), f)
        raise InvalidValue(
            f"{TRIES} draws of f gave none that {self.likelihood.name} can take; the posterior is too wide there for "
            "draws: use link='auto'"
        )

    def _nodes(self, by_line: bool, sharp: bool = True) -> Iterator[tuple[slice, Nodes]]:
        """Nodes of f for chunks of the inputs (with their positions), flattened to (N, c); sharp: to resolve p(y|f),
        and not only its moments."""
        c = self.f_mean.shape[-1]
        mean = self.f_mean.reshape(-1, c)
        outputs = None if self.outputs is None else self.outputs.reshape(len(self.outputs), -1, c)
        cov = None if outputs is not None else self.marginal.reshape(-1, c, c)
        steps = nodes.STEPS
        if by_line and sharp and outputs is None:
            steps = nodes.fine(self._sharpness)
        count = max(DRAWS, 2 * nodes.REACH * steps) if outputs is None else len(outputs)
        size = max(1, CHUNK // (count * c))
        for start in range(0, len(mean), size):
            index = slice(start, start + size)
            if outputs is not None:
                found = nodes.drawn(outputs[:, index])
            else:
                assert cov is not None
                var = cov[index].diagonal(dim1=-2, dim2=-1)
                found = nodes.line(mean[index], var, steps) if by_line else nodes.cloud(mean[index], cov[index])
            yield index, found.inside(self.likelihood)

    @cached_property
    def _moments(self) -> dict[str, Tensor]:
        """Mean, epistemic variance and expected entropy over f."""
        parts = [_moments(self.likelihood, some) for _, some in self._nodes(self._by_line, sharp=False)]
        return {k: self._shaped([part[k] for part in parts]) for k in parts[0]}

    @cached_property
    def _expected_variance(self) -> Tensor:
        some = self._nodes(self._by_line, sharp=False)
        return self._shaped([part.average(self.likelihood.variance(part.f)) for _, part in some])

    def _shaped(self, parts: list[Tensor]) -> Tensor:
        """Chunks of rows (N, ...) put together, positions in their places."""
        out = torch.cat(parts)
        return out.reshape(*self.f_mean.shape[:-1], *out.shape[1:])

    def _joint_log_prob(self, y: Tensor) -> Tensor:
        """log E_f Π_n p(y_n | f_n), over those f that the likelihood can take."""
        drawn = self.outputs is not None
        f = (
            self.outputs
            if self.outputs is not None
            else self._colored(quasi_normal(DRAWS, self._blocks()[1]).to(self.f_mean.device))
        )
        inside = self.likelihood.inside(f).flatten(1).all(1)
        if drawn:
            each = self.likelihood.log_prob(f[inside], y.expand(int(inside.sum()), *y.shape))
            return torch.logsumexp(each.flatten(1).sum(1), 0) - math.log(len(each))
        c, d = self.f_mean.shape[-1], self.f_mean.numel()
        mean, cov, targets = self.f_mean.reshape(-1, c), self.covariance.reshape(d, d), flat_targets(self.f_mean, y)
        return together.log_density(self.likelihood.log_prob, mean, cov, targets) - inside.double().mean().log()


def _diagonal_blocks(cov: Tensor, shape: torch.Size) -> Tensor:
    """(n, ..., c, c) of (n, ..., c, n, ..., c)."""
    c, rows = shape[-1], shape[:-1].numel()
    blocks = cov.reshape(rows, c, rows, c).diagonal(dim1=0, dim2=2)  # (c, c, n)
    return blocks.permute(2, 0, 1).reshape(*shape, c)


def _moments(likelihood: Likelihood, some: Nodes) -> dict[str, Tensor]:
    """Over nodes f (s, n, c); the mean of squares is taken about the mean, so nothing cancels."""
    means = likelihood.mean(some.f)
    mean = some.average(means)
    out = {"mean": mean, "epistemic": some.average((means - mean).square())}
    if likelihood.classes:
        out["entropy"] = some.average(_entropy(likelihood.class_probs(means)))
    return out


def _entropy(p: Tensor) -> Tensor:
    return -torch.xlogy(p, p).sum(-1)
