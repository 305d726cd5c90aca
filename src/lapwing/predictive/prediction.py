"""A prediction: a distribution over the network's outputs f at some inputs, and what it says of y.

Law of total variance, Var[y] = Var_f(E[y|f]) + E_f[Var(y|f)]:   total = epistemic + aleatoric.
For a Gaussian likelihood and a normal f all parts are exact; where its mean or noise is another function of f, they are
those of the delta method (link "delta"). Elsewhere all fields are sums over one set of nodes of f, so that none
contradicts another: for classes total = mean (1 − mean), H(mean) = expected entropy + mutual information, log p(y) =
log mean_y. A link in closed form that is asked for by name has its own mean, from which total, entropy and log p(y)
follow; nodes give the shares of their parts (`moments.py`). Quantiles are those of the full predictive, the mixture of
p(y|f) over f. Where f is a mixture, p(y) is that of its parts: Σ_k w_k p_k(y).
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
from lapwing.outputs import WIDE, Nodes, Normal, Outputs
from lapwing.predictive import normal, plot, quantiles, show, together
from lapwing.predictive.integral import Integral
from lapwing.predictive.link import LINKS, OUTPUTS, closed_form, resolve
from lapwing.predictive.response import GaussianResponse, Response
from lapwing.solvers.estimate import variance_of

TRIES = 1000  # draws of f for one that the likelihood can take


@dataclass(frozen=True, eq=False)
class Prediction:
    """What `outputs`, a distribution over f (n, ..., c), say of y under a likelihood: one, or one for each of their
    sources (`lw.likelihoods.Several`)."""

    likelihood: Likelihood
    outputs: Outputs
    link: str = "auto"
    index: Any = None  # of the frame that inputs came in

    def __post_init__(self) -> None:
        if self.link not in LINKS:
            raise InvalidValue(f"link must be one of {LINKS}, got {self.link!r}{given.near(self.link, LINKS)}")
        if self.likelihood.sources not in (None, self.outputs.sources):
            raise InvalidValue(f"{self.likelihood.sources} likelihoods for {self.outputs.sources} sources of outputs")
        if self.drawn and self.link not in ("auto", "monte_carlo"):
            raise InvalidValue(f"a prediction by draws averages over them: link={self.link!r} cannot apply; use 'auto'")
        if not self.drawn:  # raise now, not when a field is read: a pair that has no rule, and means that have no y
            inside = self.likelihood.inside(self.f_mean)
            if self._link != "monte_carlo" and not bool(inside.all()):
                raise InvalidValue(
                    f"{int((~inside).sum())} of {inside.numel()} mean outputs are outside of what "
                    f"{self.likelihood.name} can take: the tangent model has left it there; use mean='network', or "
                    "link='monte_carlo', which leaves such draws out"
                )

    def __getitem__(self, index: slice) -> Prediction:
        """The prediction at some of its inputs."""
        if not isinstance(index, slice):
            raise InvalidValue(f"a prediction is cut by a slice of its inputs, such as [:5], got {index!r}")
        return replace(self, outputs=self.outputs[index], index=None if self.index is None else self.index[index])

    # -- outputs f ------------------------------------------------------------------------------------------------

    @property
    def f_mean(self) -> Tensor:
        """E[f], (n, ..., c)."""
        return self.outputs.mean

    @property
    def covariance(self) -> Tensor:
        """Of the outputs, (n, ..., c, c), or (n, ..., c, n, ..., c) if joint."""
        return self.outputs.covariance

    @property
    def marginal(self) -> Tensor:
        """The covariance of each input's outputs, (n, ..., c, c)."""
        return self.outputs.marginal

    @property
    def joint(self) -> bool:
        """Whether inputs are predicted together."""
        return self.outputs.joint

    @property
    def f_var(self) -> Tensor:
        """Var[f], (n, ..., c)."""
        return self.outputs.variance

    @property
    def f_var_standard_error(self) -> Tensor:
        """Of f_var: zero where it is exact, f_var √(2/k) where it is the mean square of k samples."""
        samples = self.outputs.samples
        return self.f_var * (0.0 if samples is None else math.sqrt(2 / samples))

    @property
    def f_var_interval(self) -> tuple[Tensor, Tensor]:
        """90 % for each f_var: by the χ² distribution that k samples have, however few; both ends are f_var where it is
        exact."""
        samples = self.outputs.samples
        return (self.f_var, self.f_var) if samples is None else variance_of(self.f_var, samples)

    @property
    def drawn(self) -> bool:
        """Whether f is known by draws, of all inputs together."""
        return not all(part.smooth for _, part in self.outputs.parts)

    @property
    def ood_score(self) -> Tensor:
        """How far an input is from what the data told, one number each, (n, ...): the variance of its outputs, in sum.
        For softmax, without that of a common shift of all logits, which no probability sees."""
        f_var, c = self.f_var, self.f_mean.shape[-1]
        if self.likelihood.response != "softmax":
            return f_var.sum(-1)
        if c <= WIDE:
            return f_var.sum(-1) - self.marginal.sum((-1, -2)) / c
        rows = torch.arange(self.f_mean[..., 0].numel(), device=self.f_mean.device)
        some = self.outputs.nodes(rows, None)
        gap = some.f - some.f.mean(-1, keepdim=True)
        spread = some.average((gap - some.average(gap)).square()).sum(-1)
        return spread.reshape(self.f_mean.shape[:-1]).to(self.f_mean)

    # -- the response y -------------------------------------------------------------------------------------------

    @property
    def gaussian(self) -> bool:
        """Whether y is Gaussian, exactly or by the delta method: N(mean, total) for each target."""
        return self.outputs.normal and self.likelihood.normal and self._link in ("exact", "delta")

    @property
    def mean(self) -> Tensor:
        """E[y]: class probabilities for classes, (n, ..., t)."""
        return self._response.mean.to(self.f_mean)

    @property
    def probs(self) -> Tensor:
        """Class probabilities, (n, ..., c)."""
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
        """Var[y] = epistemic + aleatoric."""
        return self._response.total.to(self.f_mean)

    @property
    def std(self) -> Tensor:
        """√total."""
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
        return self.outputs.sample(given.whole(n, "the number of draws"), given.generator(generator))[0]

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """n draws of y: of the mean's own classes under a link in closed form, unless inputs are joint."""
        n, generator = given.whole(n, "the number of draws"), given.generator(generator)
        if self._by_mean and not self.joint:
            f = OUTPUTS[self.likelihood.response](self._response.mean)
            y = self.likelihood.sample(f.expand(n, *f.shape), generator)
            return y.to(self.f_mean) if y.is_floating_point() else y
        if not self.gaussian:
            f, source = self._inside(n, generator)
            return self.likelihood.at(source).sample(f, generator)
        f = self.f_sample(n, generator)
        D, away = normal.slope(self.likelihood, self.f_mean), f - self.f_mean
        moved = away if D is None else torch.einsum("...ta,s...a->s...t", D, away)
        return moved + self.likelihood.sample(self.f_mean.expand_as(f), generator)

    # -- the distribution of y ------------------------------------------------------------------------------------

    def cdf(self, y: Tensor) -> Tensor:
        """P(target ≤ y) of each target by itself, (n, ..., t)."""
        self._check_ordered()
        y = self.likelihood.aligned(self.f_mean, given.targets(y, self.f_mean.device))
        if y.shape[:-1] != self.f_mean.shape[:-1] or y.ndim != self.f_mean.ndim:
            raise InvalidValue(f"cdf takes one y for each target, as log_prob does, got {tuple(y.shape)}")
        if self.gaussian:
            return torch.special.ndtr((y - self.mean) / self.std)
        if not self.has_cdf:
            raise Unsupported(f"{self.likelihood.name} has no distribution function cdf; use quantile or sample")
        return self._averaged(lambda one, f, y: _known(one.cdf(f, y)), y)

    def pmf(self, y: Tensor) -> Tensor:
        """P(target = y) of each target by itself, (n, ..., t), for counts."""
        if not self.likelihood.counts:
            raise Unsupported(f"pmf is for counts; a {self.likelihood.name} prediction has log_prob")
        y = self.likelihood.aligned(self.f_mean, given.targets(y, self.f_mean.device))
        return self._averaged(lambda one, f, y: one.pmf(f, y), y)

    @property
    def has_cdf(self) -> bool:
        """Whether `cdf` can be had; else quantiles are those of draws."""
        f = self.f_mean.reshape(-1, self.f_mean.shape[-1])[:1]
        return not self.likelihood.classes and self.likelihood.cdf(f, f.new_zeros(1, 1)) is not None

    @property
    def smooth(self) -> bool:
        """Whether the distribution function is an integral over f, and not a mean over draws of it."""
        return self.outputs.smooth and (self.gaussian or self._integral.by_line)

    def quantile(self, q: float) -> Tensor:
        """The least y that has F(y) ≥ q, of each target by itself; for classes, the quantile of the class probabilities
        over the posterior. Where the likelihood has no distribution function it is that of draws."""
        q = given.share(q, "a quantile")
        if self.gaussian:
            return self.mean + self.std * float(torch.special.ndtri(torch.tensor(q, dtype=torch.float64)))
        known, classes = self.has_cdf, self.likelihood.classes

        def of(one: Likelihood, some: Nodes, _: Tensor) -> Tensor:
            if classes:
                return quantiles.value_quantile(one.mean(some.f), some, q)
            return (quantiles.quantile if known else quantiles.sample_quantile)(one, some, q)

        return self._integral.over(of, self._integral.by_line and (known or classes)).to(self.f_mean)

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """The central interval, between the quantiles (1 ± level)/2: its ends."""
        level = given.share(level, "the level of an interval")
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)

    def log_prob(self, y: Tensor) -> Tensor:
        """log p(y) of each input, (n, ...); of all inputs together, 0-dim, if the prediction is joint."""
        y = self.likelihood.aligned(self.f_mean, given.targets(y, self.f_mean.device))
        targets = flat_targets(self.likelihood, self.f_mean, y)
        self.likelihood.validate(self._means_inside(), targets)
        if len(self._parts) > 1:
            return torch.logsumexp(torch.stack([w + part.log_prob(y).double() for w, part in self._parts]), 0)
        if self.gaussian:
            return normal.log_prob(self.likelihood, self.f_mean, self.covariance, self.joint, y)
        if self.joint:
            return self._joint_log_prob(y)
        if self._by_mean:  # of independent outputs, though they depend on each other through f
            out = self.likelihood.class_log_prob(self._response.mean.flatten(0, -2), targets)
            return out.reshape(self.f_mean.shape[:-1]).to(self.f_mean)

        def of(one: Likelihood, some: Nodes, rows: Tensor) -> Tensor:
            mine = targets[rows]
            return some.log_average(one.log_prob(some.f, mine.expand(len(some.f), *mine.shape)))

        return self._integral.over(of, self.f_mean.shape[-1] == 1).to(self.f_mean)

    # -- to look at -----------------------------------------------------------------------------------------------

    def to_numpy(self) -> dict[str, Any]:
        """Mean, std and their parts as NumPy arrays, by name; entropies too for classes."""
        return show.to_numpy(self)

    def to_frame(self) -> Any:
        """The same as a pandas frame, a row an input, under the index of the frame that inputs came in; name_0, name_1,
        ... where outputs are several."""
        return show.to_frame(self)

    def plot(self, x: Any, data: Any = None, level: float = 0.95, ax: Any = None) -> Any:
        """A matplotlib figure over inputs x (n, 1) or (n, 2): both kinds of band, and the data (X, y) if given. ax:
        axes to draw in, over (n, 2) one for each panel."""
        return plot.figure(self, x, data, level, ax)

    def __repr__(self) -> str:
        return show.text(self)

    def _repr_html_(self) -> str:
        return show.html(self)

    # -- inside ---------------------------------------------------------------------------------------------------

    @property
    def _link(self) -> str:
        return "monte_carlo" if self.drawn else resolve(self.likelihood, self.link)

    @property
    def _by_mean(self) -> bool:
        """Whether a link in closed form gives the probabilities of classes, and all follows from them."""
        return self.likelihood.classes and self._link != "monte_carlo"

    @cached_property
    def _parts(self) -> tuple[tuple[float, Prediction], ...]:
        """Of outputs that are a mixture: log-weights and predictions by its parts, each with its own likelihoods."""
        found, start = [], 0
        for w, part in self.outputs.parts:
            stop = start + part.sources
            found.append((w, Prediction(self.likelihood.some(start, stop), part, self.link)))
            start = stop
        return tuple(found)

    @cached_property
    def _integral(self) -> Integral:
        return Integral(self.likelihood, self.outputs)

    @cached_property
    def _response(self) -> Response | GaussianResponse:
        if self.gaussian:
            return GaussianResponse(self.likelihood, self.f_mean.double(), self.marginal.double())
        return Response(self._integral, self._closed if self._by_mean else None)

    @property
    def _closed(self) -> Tensor:
        """E[y] by a link in closed form."""
        if len(self._parts) > 1:
            return torch.stack([math.exp(w) * part._closed for w, part in self._parts]).sum(0)
        return closed_form(self.likelihood, self.link, self.f_mean.double(), self.marginal.double())

    @property
    def _classes(self) -> Response:
        if not self.likelihood.classes:
            raise Unsupported(
                f"entropies are for classes; a {self.likelihood.name} prediction has epistemic and aleatoric variances"
            )
        assert isinstance(self._response, Response)
        return self._response

    def _averaged(self, values: Callable[[Likelihood, Tensor, Tensor], Tensor], y: Tensor) -> Tensor:
        """Over f, of values(likelihood, f, y) of each target by itself."""
        targets = y.reshape(-1, y.shape[-1]).double()
        found = self._integral.over(lambda one, some, rows: some.average(values(one, some.f, targets[rows])))
        return found.to(self.f_mean)

    def _check_ordered(self) -> None:
        if self.likelihood.classes:
            raise Unsupported(f"a {self.likelihood.name} prediction is of classes, without order; use probs")

    def _means_inside(self) -> Tensor:
        """Mean outputs (N, c), to hold targets to; any that the likelihood cannot take gives way to one that it can."""
        f = flat_outputs(self.f_mean)
        inside = self.likelihood.inside(f)
        return torch.where(inside.unsqueeze(-1), f, f[inside][:1]) if bool(inside.any()) else f

    def _inside(self, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
        """Draws of f, and their sources, with those that the likelihood cannot take drawn again."""
        f, source = self.outputs.sample(n, generator)
        for _ in range(TRIES):
            outside = ~self.likelihood.inside(f)  # (s, n, ...)
            if not bool(outside.any()):
                return f, source
            if self.joint or source is not None:  # a draw is of all inputs
                outside = outside.flatten(1).any(1).reshape(-1, *[1] * (outside.ndim - 1))
            again, other = self.outputs.sample(n, generator)
            f = torch.where(outside.unsqueeze(-1), again, f)
            if source is not None and other is not None:
                source = torch.where(outside.flatten().to(source.device), other, source)
        raise InvalidValue(
            f"{TRIES} draws of f gave none that {self.likelihood.name} can take; the posterior is too wide there for "
            "draws: use link='auto'"
        )

    def _joint_log_prob(self, y: Tensor) -> Tensor:
        """log E_f Π_n p(y_n | f_n), over those f that the likelihood can take."""
        targets = flat_targets(self.likelihood, self.f_mean, y)
        if isinstance(self.outputs, Normal):
            inside = self.likelihood.inside(self.outputs.points()).flatten(1).all(1)
            c, d = self.f_mean.shape[-1], self.f_mean.numel()
            mean, cov = self.f_mean.reshape(-1, c), self.covariance.reshape(d, d)
            return together.log_density(self.likelihood.log_prob, mean, cov, targets) - inside.double().mean().log()
        rows = torch.arange(self.f_mean[..., 0].numel(), device=self.f_mean.device)
        draws = self.outputs.nodes(rows, None)  # (s, N, c), of equal weights at all rows
        inside = self.likelihood.inside(draws.f).all(1)
        log_weight = torch.where(inside, draws.log_weight[:, 0], -math.inf)
        each = self.likelihood.at(draws.source).log_prob(draws.f, targets.expand(len(draws.f), *targets.shape)).sum(1)
        each = torch.where(inside, each, -math.inf)
        return torch.logsumexp(each + log_weight, 0) - torch.logsumexp(log_weight, 0)


def _known(values: Tensor | None) -> Tensor:
    assert values is not None
    return values
