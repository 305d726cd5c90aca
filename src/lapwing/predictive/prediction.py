"""A prediction: a Gaussian over the network's outputs f at some inputs, and what it says of y.

Law of total variance, Var[y] = Var_f(E[y|f]) + E_f[Var(y|f)]:   total = epistemic + aleatoric.
For a Gaussian likelihood all parts are exact; where its mean or noise is another function of f, they are those of the
delta method (link "delta"). Elsewhere all fields are sums over one set of nodes of f, so that none contradicts another:
for classes total = mean (1 − mean), H(mean) = expected entropy + mutual information, log p(y) = log mean_y. A link in
closed form that is asked for by name has its own mean, from which total, entropy and log p(y) follow; nodes give the
shares of their parts (`moments.py`). Quantiles are those of the full predictive, the mixture of p(y|f) over f.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lapwing import given
from lapwing.curvature.accumulate import flat_outputs, flat_targets
from lapwing.errors import InvalidValue, Unsupported
from lapwing.likelihoods import Likelihood
from lapwing.predictive import mixture, normal, plot, show, together
from lapwing.predictive.integral import Integral
from lapwing.predictive.link import DRAWS, LINKS, OUTPUTS, closed_form, psd_root, quasi_normal, resolve
from lapwing.predictive.nodes import Nodes
from lapwing.predictive.response import GaussianResponse, Response
from lapwing.solvers.estimate import variance_of

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
        # raise now, not when a field is read
        _check_finite(self.f_mean, "mean outputs", "check the weights and the inputs")
        if self.cov is not None:
            _check_finite(self.cov, "variances and covariances of the outputs", "raise the prior precision")
        if self.outputs is None:  # a pair that has no rule, and means that have no y
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

    @property
    def mean(self) -> Tensor:
        """E[y]: class probabilities for classes, (n, ..., t)."""
        return self._response.mean.to(self.f_mean)

    @property
    def probs(self) -> Tensor:
        if not self.likelihood.classes:
            raise Unsupported(f"a {self.likelihood.name} prediction has no class probabilities; use mean and std")
        return self.mean

    @property
    def epistemic(self) -> Tensor:
        """Var of E[y|f] over the posterior: what more data would tell."""
        return self._response.epistemic.to(self.f_mean)

    @property
    def aleatoric(self) -> Tensor:
        """E of Var[y|f]: noise that no data remove."""
        return self._response.aleatoric.to(self.f_mean)

    @property
    def total(self) -> Tensor:
        return self._response.total.to(self.f_mean)

    @property
    def std(self) -> Tensor:
        return self._response.total.sqrt().to(self.f_mean)

    @property
    def entropy(self) -> Tensor:
        """H(E p), in nats: the total uncertainty about the class, (n, ...)."""
        return self._classes.entropy.to(self.f_mean)

    @property
    def expected_entropy(self) -> Tensor:
        """E H(p): its aleatoric part."""
        return (self._classes.entropy - self._classes.information).to(self.f_mean)

    @property
    def mutual_information(self) -> Tensor:
        """H(E p) − E H(p) ≥ 0: its epistemic part, the information that y would give about the weights."""
        return self._classes.information.to(self.f_mean)

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
        """n draws of y: of the mean's own classes under a link in closed form, unless inputs are joint."""
        generator = given.generator(generator)
        if self._by_mean and not self.joint:
            f = OUTPUTS[self.likelihood.response](self._response.mean)
            y = self.likelihood.sample(f.expand(n, *f.shape), generator)
            return y.to(self.f_mean) if y.is_floating_point() else y
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
        return self._averaged(lambda f, y: _known(self.likelihood.cdf(f, y)), y)

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
        return self.outputs is None and (self.gaussian or self._integral.by_line)

    def quantile(self, q: float) -> Tensor:
        """The least y that has F(y) ≥ q, of each target by itself; for classes, the quantile of the class probabilities
        over the posterior. Where the likelihood has no distribution function it is that of draws."""
        q = given.share(q, "a quantile")
        if self.gaussian:
            return self.mean + self.std * float(torch.special.ndtri(torch.tensor(q, dtype=torch.float64)))
        known, classes = self.has_cdf, self.likelihood.classes

        def of(some: Nodes, _: Tensor) -> Tensor:
            if classes:
                return mixture.value_quantile(self.likelihood.mean(some.f), some, q)
            return (mixture.quantile if known else mixture.sample_quantile)(self.likelihood, some, q)

        return self._integral.over(of, self._integral.by_line and (known or classes)).to(self.f_mean)

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
        if self._by_mean:  # of independent outputs, though they depend on each other through f
            out = self.likelihood.class_log_prob(self._response.mean.flatten(0, -2), targets)
            return out.reshape(self.f_mean.shape[:-1]).to(self.f_mean)

        def of(some: Nodes, rows: Tensor) -> Tensor:
            mine = targets[rows]
            return some.log_average(self.likelihood.log_prob(some.f, mine.expand(len(some.f), *mine.shape)))

        return self._integral.over(of, self.f_mean.shape[-1] == 1).to(self.f_mean)

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

    @property
    def _by_mean(self) -> bool:
        """Whether a link in closed form gives the probabilities of classes, and all follows from them."""
        if self.outputs is not None or not self.likelihood.classes:
            return False
        return resolve(self.likelihood, self.link) != "monte_carlo"

    @cached_property
    def _integral(self) -> Integral:
        return Integral(self.likelihood, self.f_mean, None if self.outputs is not None else self.marginal, self.outputs)

    @cached_property
    def _response(self) -> Response | GaussianResponse:
        if self.outputs is not None:
            return Response(self._integral)
        mean, cov = self.f_mean.double(), self.marginal.double()
        if self.gaussian:
            return GaussianResponse(self.likelihood, mean, cov)
        return Response(self._integral, closed_form(self.likelihood, self.link, mean, cov))

    @property
    def _classes(self) -> Response:
        if not self.likelihood.classes:
            raise Unsupported(
                f"entropies are for classes; a {self.likelihood.name} prediction has epistemic and aleatoric variances"
            )
        assert isinstance(self._response, Response)
        return self._response

    def _averaged(self, values: Callable[[Tensor, Tensor], Tensor], y: Tensor) -> Tensor:
        """Over f, of values(f, y) of each target by itself."""
        targets = y.reshape(-1, y.shape[-1]).double()
        found = self._integral.over(lambda some, rows: some.average(values(some.f, targets[rows])))
        return found.to(self.f_mean)

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


def _check_finite(values: Tensor, what: str, do: str) -> None:
    bad = int((~torch.isfinite(values)).sum())
    if bad:
        dtype, wider = str(values.dtype).removeprefix("torch."), values.dtype != torch.float64
        raise InvalidValue(
            f"{bad} of {values.numel()} {what} are NaN or infinite in {dtype}, which ends at "
            f"{torch.finfo(values.dtype).max:.2g}: {do}" + (", or predict with network.double()" if wider else "")
        )


def _diagonal_blocks(cov: Tensor, shape: torch.Size) -> Tensor:
    """(n, ..., c, c) of (n, ..., c, n, ..., c)."""
    c, rows = shape[-1], shape[:-1].numel()
    blocks = cov.reshape(rows, c, rows, c).diagonal(dim1=0, dim2=2)  # (c, c, n)
    return blocks.permute(2, 0, 1).reshape(*shape, c)


def _known(values: Tensor | None) -> Tensor:
    assert values is not None
    return values
