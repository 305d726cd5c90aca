"""What a likelihood p(y | f) must say, per example: f (n, c), y as its class documents.

Curvature is kept at *unit* scale and multiplied afterwards, so that tuning the noise never needs a second pass:

    −∂²_f log p = Σ_g w_g S_g S_gᵀ,   S = hessian_root(f) (n, c, k),  w = curvature_weights() (g,)

With one weight (g = 1) it multiplies everything; with g = k weights, weight j belongs to column j of S.

Fields are of two kinds. *Hyperparameters* scale the curvature and enter the log-likelihood through sums, so that the
evidence tunes them without a pass. *Settings* shape the curvature (a dispersion, degrees of freedom): they are fixed at
the fit, and another value is another fit.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from lapwing import registry
from lapwing.errors import InvalidValue, Unsupported
from lapwing.likelihoods.checks import as_positive
from lapwing.positive import Positive
from lapwing.solvers.noise import Placed, standard_normal


@dataclass(frozen=True)
class Likelihood:
    """Base class. Fields are positive float64 tensors: hyperparameters, but for those that `settings` names."""

    settings: ClassVar[tuple[str, ...]] = ()  # fields that are fixed at the fit
    outcome: ClassVar[str] = ""  # what y is, where other likelihoods have densities of the same
    concave: ClassVar[bool] = True  # in f, for every y: what the tangent MAP needs
    event: ClassVar[int] = 1  # dimensions of y that belong to one row of f: 0 where y is a label
    soft: ClassVar[bool] = False  # a label may also be a row of probabilities, which are floating point
    paired: ClassVar[bool] = False  # weights are of outputs and of pairs of them, with both signs: polarization.py
    quadratic: ClassVar[bool] = False  # in f: the curvature is the same at every f
    response: ClassVar[str] = ""  # how E[y|f] comes from f: "identity", "softmax", "sigmoid", or "" for any other way
    classes: ClassVar[bool] = False  # y is a class, and E[y|f] are probabilities
    normal: ClassVar[bool] = False  # y given f is Gaussian, N(mean(f), noise_covariance(f))
    elementwise: ClassVar[bool] = False  # y_j depends on f_j alone: its predictions are integrals over one dimension
    deviation: ClassVar[str] = ""  # the hyperparameter that is a standard deviation σ of y, with curvature ∝ σ⁻²
    sampled: ClassVar[tuple[str, ...]] = ()  # hyperparameters that a sampler can draw: they may be a density of theirs
    counts: ClassVar[bool] = False  # y are integers from 0 on, and so are their quantiles

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        registry.enter("likelihood", cls)

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if not (f.name in self.sampled and isinstance(value, Positive)):
                object.__setattr__(self, f.name, as_positive(f.name, value))

    @property
    def name(self) -> str:
        """The class's name, in lower case."""
        return type(self).__name__.lower()

    @property
    def hyperparameters(self) -> dict[str, Tensor]:
        """What the evidence tunes, by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in self.settings}

    @property
    def unknown(self) -> dict[str, Positive]:
        """Hyperparameters that are to be sampled with the weights, each with its density."""
        return {name: value for name, value in self.hyperparameters.items() if isinstance(value, Positive)}

    def at_values(self, values: Mapping[str, Tensor]) -> Any:
        """The same at other hyperparameters, which are not checked: for what runs under vmap."""
        out = copy.copy(self)
        for name, value in values.items():
            object.__setattr__(out, name, value)
        return out

    @property
    def kind(self) -> str:
        """What a fit is of: the name, with the settings; hyperparameters may differ."""
        settings = ", ".join(f"{name}={getattr(self, name).tolist()}" for name in self.settings)
        return f"{self.name}({settings})" if settings else self.name

    @property
    def density(self) -> str:
        """What an evidence is a density of: those of the same targets and of one density may be compared."""
        return self.outcome or self.name

    @property
    def discrete(self) -> bool:
        """Whether y has probabilities, and no density: then log p is never positive."""
        return self.classes or self.counts

    @property
    def plain(self) -> Likelihood:
        """The likelihood of new targets, where those of the fit were weighted or smoothed."""
        return self

    def at(self, source: Tensor | None) -> Likelihood:
        """The likelihood at nodes of f (s, ...) from these sources: the same at all, unless there are several."""
        return self

    @property
    def sources(self) -> int | None:
        """For how many sources of f it has values; None where it serves any number."""
        return None

    @property
    def distinct(self) -> tuple[Likelihood, ...]:
        """Those that there are: itself, unless there are several."""
        return (self,)

    def some(self, start: int, stop: int) -> Likelihood:
        """That of some of the sources of f."""
        return self

    def spread(self, count: int) -> dict[str, Tensor]:
        """The hyperparameters of each of so many sources of f, {name: (count, ...)}."""
        return {name: value.expand(count, *value.shape) for name, value in self.hyperparameters.items()}

    @property
    def predictive(self) -> Likelihood:
        """What scores predictions of the fit's own targets, weighted as they are there: itself, unless it was fitted to
        other numbers that it made of them."""
        return self

    @property
    def unit(self) -> Any:
        """The same at unit scale."""
        return self.replace(**{name: torch.ones_like(v) for name, v in self.hyperparameters.items()})

    def replace(self, **hyperparameters: Any) -> Any:
        """The same with other hyperparameters."""
        return replace(self, **hyperparameters)

    def to(self, device: torch.device) -> Any:
        """The same with its tensors on a device."""
        return self.replace(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})

    # -- the observations -----------------------------------------------------------------------------------------

    def validate(self, f: Tensor, y: Tensor) -> None:
        """Raise on targets that the likelihood cannot take. Not part of log_prob, which must stay traceable."""
        raise NotImplementedError

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """log p(y_n | f_n), (n,)."""
        raise NotImplementedError

    def sample(self, f: Tensor, generator: torch.Generator) -> Tensor:
        """One y for each row of f."""
        raise NotImplementedError

    def inside(self, f: Tensor) -> Tensor:
        """Where outputs (..., c) are parameters of a distribution, (...) bool: Gaussian draws of f may not be."""
        return torch.ones(f.shape[:-1], dtype=torch.bool, device=f.device)

    def rows(self, y: Tensor, m: int) -> Tensor:
        """Targets (n, ..., t), or labels (n, ...), as a row for each of m rows of outputs: (m, t) or (m,)."""
        event = self.event_of(y)
        return y.reshape(m, 1) if event == 1 and y.numel() == m else y.reshape(m, *y.shape[y.ndim - event :])

    def event_of(self, y: Tensor) -> int:
        """Dimensions of these targets that belong to one row of f."""
        return 1 if self.soft and y.is_floating_point() else self.event

    def aligned(self, f: Tensor, y: Tensor) -> Tensor:
        """Targets (n, ...) of one output (n, ..., 1) as (n, ..., 1), where each output has a target; else as given."""
        lone = f.shape[-1] == 1 and y.shape == f.shape[:-1] and self.event_of(y) == 1
        return y.unsqueeze(-1) if lone else y

    def kept(self, y: Tensor) -> Tensor | None:
        """Which examples of targets (n, ...) count for anything, (n,) bool; None where all do."""
        return None

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        """What to train the network on: the mean over examples of −log p, outputs f (n, ..., c)."""
        self.validate(f.detach(), y)
        return -self.log_prob(f, y).sum() / len(f)

    # -- what the doctor asks ---------------------------------------------------------------------------------------

    def target_hint(self, f: Tensor, y: Tensor) -> str:
        """What targets that `validate` refuses seem to be, and what to do; "" where nothing tells. f (n, ..., c)."""
        return ""

    def target_note(self, y: Tensor, outputs: int) -> str:
        """What is odd about valid targets, all of them in one vector (m,); "" where nothing is."""
        return ""

    def constant(self, y: Tensor, outputs: int = 0) -> Tensor | None:
        """The outputs (c,) that fit targets y of m rows best if all have the same; None where that is not known.
        outputs: c, where labels that are not among y must count too."""
        return None

    # -- moments of y given f, for predictions ---------------------------------------------------------------------

    def mean(self, f: Tensor) -> Tensor:
        """E[y | f] (class probabilities), (..., c)."""
        raise Unsupported(f"{self.name} does not say its mean; give it a method mean(f), for predictions")

    def variance(self, f: Tensor) -> Tensor:
        """Var[y | f], (..., c); of classes p(1 − p)."""
        if self.classes:
            return self.mean(f) * (1 - self.mean(f))
        raise Unsupported(f"{self.name} does not say its variance; give it a method variance(f), for predictions")

    def noise_covariance(self, f: Tensor) -> Tensor:
        """Cov[y | f], (..., t, t)."""
        return torch.diag_embed(self.variance(f))

    def observed(self, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Where y is Gaussian: what was observed, (..., t), and the covariance of its noise, (..., t, t)."""
        return y, self.noise_covariance(f)

    def cdf(self, f: Tensor, y: Tensor) -> Tensor | None:
        """P(target ≤ y_j | f) of each target by itself, of y's shape, for predicted quantiles; None where it is not
        known, and they are those of samples."""
        return None

    def pmf(self, f: Tensor, y: Tensor) -> Tensor:
        """P(target = y_j | f) of each target by itself, of y's shape, where targets are counts."""
        at, below = self.cdf(f, y), self.cdf(f, (y - 1).clamp(min=0))
        if at is None or below is None:
            raise Unsupported(f"{self.name} has no distribution function; give it a method cdf(f, y), or pmf(f, y)")
        return at - torch.where(y > 0, below, 0.0)

    def class_probs(self, mean: Tensor) -> Tensor:
        """E[y] as probabilities of classes that exclude each other, along the last axis."""
        return mean

    def class_log_prob(self, mean: Tensor, y: Tensor) -> Tensor:
        """log p(y_n) where classes have the probabilities E[y], (n,)."""
        p = self.class_probs(mean)
        each = p.clamp(min=torch.finfo(p.dtype).tiny).log().gather(-1, y.long().unsqueeze(-1)).squeeze(-1)
        return each.reshape(len(each), -1).sum(-1)

    # -- the curvature, at unit scale -----------------------------------------------------------------------------

    @property
    def factors(self) -> tuple[str, ...]:
        """The output factors that there are, of "exact" and "monte_carlo"."""
        return ("exact", "monte_carlo")

    def columns(self, outputs: int) -> int:
        """k of S (n, c, k), for c outputs."""
        return outputs

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        """∂_f log p(y | f) at unit scale, (n, c)."""
        raise NotImplementedError

    def hessian_root(self, f: Tensor) -> Tensor:
        """S with S Sᵀ = −∂²_f log p at unit scale, (n, c, k)."""
        raise NotImplementedError

    def curvature_root(self, f: Tensor, y: Tensor) -> Tensor:
        """S at the rows of the data, (n, c, k): hessian_root(f), unless what rows weigh depends on their targets."""
        return self.hessian_root(f)

    def curvature_product(self, f: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """S Sᵀ v at unit scale, v (k, n, c)."""
        root = self.curvature_root(f, y)
        return torch.einsum("ncq,knq->knc", root, torch.einsum("ncq,knc->knq", root, v.to(root)))

    def curvature_trace(self, f: Tensor, y: Tensor) -> Tensor:
        """tr S Sᵀ of each row at unit scale, (n,)."""
        return self.curvature_root(f, y).square().sum((-1, -2))

    def curvature_noise(self, f: Tensor, y: Tensor, k: int, generator: torch.Generator | Placed) -> Tensor:
        """S e for k standard normal e, which has the covariance S Sᵀ: (k, n, c)."""
        root = self.curvature_root(f, y)
        noise = standard_normal(root[:, 0].expand(k, *root[:, 0].shape), generator)
        return torch.einsum("ncq,knq->knc", root, noise)

    def sampled_scores(self, f: Tensor, y: Tensor, k: int, generator: torch.Generator) -> Tensor:
        """k scores at targets drawn from p(y | f) at unit scale, over √k: E[S Sᵀ] is the Fisher's, (n, c, k)."""
        unit = self.unit
        return torch.stack([unit.score(f, unit.sample(f, generator)) for _ in range(k)], -1) / k**0.5

    def unit_log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """log p at unit scale up to constants, cut by weight: (n, g), so that ∂² log p = Σ_g w_g ∂² of column g."""
        return self.log_prob(f, y).unsqueeze(-1)

    def curvature_weights(self, factor: str = "exact") -> Tensor:
        """w (g,) for a given output factor: 1, unless there are hyperparameters."""
        self._fixed("curvature_weights")
        return torch.ones(1, dtype=torch.float64)

    # -- and at the likelihood's own hyperparameters ----------------------------------------------------------------

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """∂_f log p(y | f), (n, c)."""
        return self.score(f, y) * self.curvature_weights().to(f)

    def scaled_root(self, f: Tensor, y: Tensor) -> Tensor:
        """S with S Sᵀ = −∂²_f log p, (n, c, k)."""
        return self.curvature_root(f, y) * self.curvature_weights().sqrt().to(f)

    # -- the fit, from sums ---------------------------------------------------------------------------------------

    def statistics(self, f: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Sums over the batch, in float64, from which the log-likelihood follows for every hyperparameter."""
        self._fixed("statistics")
        return {"log_lik": self.log_prob(f.double(), y.double() if y.is_floating_point() else y).sum()}

    def shapes(self, statistics: dict[str, Tensor]) -> dict[str, tuple[int, ...]] | None:
        """Of the sums that `statistics` gives, as far as these tell the number of outputs; None where a class with a
        `statistics` of its own does not say."""
        return {"log_lik": ()} if type(self).statistics is Likelihood.statistics else None

    def check_shapes(self, statistics: dict[str, Tensor]) -> None:
        """Raise on sums that `statistics` does not give."""
        wanted = self.shapes(statistics)
        found = {key: tuple(value.shape) for key, value in statistics.items()}
        if wanted is not None and found != wanted:
            raise InvalidValue(f"the statistics of {self.kind} have the shapes {wanted}, got {found}")
        if any(value.dtype != torch.float64 for value in statistics.values()):
            raise InvalidValue(f"the statistics of {self.kind} are float64")

    def log_likelihood(self, statistics: dict[str, Tensor]) -> Tensor:
        """Σ_n log p(y_n | f_n), differentiable in the hyperparameters."""
        self._fixed("log_likelihood")
        return statistics["log_lik"]

    # -- what a search moves ----------------------------------------------------------------------------------------

    def coordinates(self) -> dict[str, Tensor]:
        """The hyperparameters, without bounds to keep: their logarithms."""
        return {name: value.detach().log() for name, value in self.hyperparameters.items()}

    def moved(self, coordinates: dict[str, Tensor]) -> Any:
        """The likelihood at these coordinates."""
        return self.replace(**{name: value.exp() for name, value in coordinates.items()})

    def limits(self, statistics: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
        """{name: (low, high, start)} of the coordinates, from sums at the trained weights."""
        self._fixed("limits")
        return {}

    def floors(self, statistics: dict[str, Tensor]) -> dict[str, Tensor]:
        """{name: coordinate} below which predictions about the network's outputs would be too sure, from sums there."""
        return {}

    def wanted(self, statistics: dict[str, Tensor], slope: Tensor) -> dict[str, Tensor]:
        """The coordinates at MacKay's fixed point, for slope = ∂ log|G + A| / ∂ hyperparameter."""
        raise NotImplementedError

    def output_variance(self, statistics: dict[str, Tensor]) -> float:
        """What a search gives the outputs as prior variance to start with."""
        return 1.0

    def target_scale(self, statistics: dict[str, Tensor]) -> Tensor:
        """The standard deviation of the targets, in the shape of `deviation`."""
        raise NotImplementedError

    def check(self, statistics: dict[str, Tensor]) -> None:
        """Raise on sums over all data that there is nothing to fit to."""

    def _fixed(self, method: str) -> None:
        names = list(self.hyperparameters)
        if names:
            raise NotImplementedError(f"{self.name} has hyperparameters {names}; give it a {method}")
