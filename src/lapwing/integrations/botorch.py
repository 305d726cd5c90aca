"""A fit as a model of BoTorch, for its acquisition functions and `optimize_acqf` (pip install 'lapwing[botorch]').

    LaplaceModel(la).posterior(X)      f(X) ~ N(m(X), J(X) M⁻¹ J(X)ᵀ) over the q points of each batch, X (*b, q, d)

M is the precision of the weights; m is the network, or the mean of the tangent model. Conditioning on observations
(X', Y') is that of Bayesian linear regression on the features J, at the weights, prior and noise of the fit:

    K = J' M⁻¹ J'ᵀ + R,   G = J M⁻¹ J'ᵀ K⁻¹,   f(X) ~ N(m(X) + G (Y' − m(X')), J M⁻¹ Jᵀ − G J' M⁻¹ Jᵀ)

so fantasies are those of a Gaussian process whose hyperparameters stay: the network is not trained again. Everything
has gradients in X, Y' and X'. Shapes: b batches, q points, d dimensions, c outputs, p weights, k seen points.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lapwing import given
from lapwing.api import Laplace
from lapwing.data import first_inputs
from lapwing.errors import InvalidValue, NotPositiveDefinite, Unsupported
from lapwing.integrations.distributions import blocks, normal
from lapwing.integrations.surrogate import surrogate
from lapwing.push import together
from lapwing.tangent.graph import asked, with_graph

try:
    from botorch.models.model import FantasizeMixin, Model
except ImportError:  # LaplaceModel says so
    Model, FantasizeMixin = nn.Module, object

MEANS = ("network", "tangent", "process")


@dataclass(frozen=True, eq=False)
class Observations:
    """Observations that a model was conditioned on, as the network sees them."""

    X: Tensor  # (*b, k, d)
    Y: Tensor  # (*s, *b, k, c)
    noise: Tensor  # covariances, (*s, *b, k, c, c)

    def and_more(self, new: Observations) -> Observations:
        """Both."""
        return Observations(_after(self.X, new.X, 2), _after(self.Y, new.Y, 2), _after(self.noise, new.noise, 3))


class LaplaceModel(Model, FantasizeMixin):
    """What `lw.laplace` gives, of normal targets, as a model of BoTorch.

    mean: what the posterior is about: "network", "tangent" for h(x, v*), or "process" for c + J v, as in la.predict.
    input_transform, outcome_transform: BoTorch's, trained; the fit is of what they have made of inputs and outcomes.
    """

    def __init__(
        self, la: Laplace, mean: str = "network", *, input_transform: Any = None, outcome_transform: Any = None
    ) -> None:
        _check(la, mean)
        super().__init__()
        self.la, self.about, self.likelihood = la, mean, la.likelihood.plain
        self.kept = tuple(range(_outputs_of(la)))
        self.seen: Observations | None = None
        for name, transform in (("input_transform", input_transform), ("outcome_transform", outcome_transform)):
            if transform is not None:
                setattr(self, name, transform)
        self.eval()

    @classmethod
    def of_data(
        cls,
        X: Tensor,
        Y: Tensor,
        *,
        input_transform: Any = None,
        outcome_transform: Any = None,
        generator: torch.Generator | None = None,
    ) -> LaplaceModel:
        """A model of data alone, as SingleTaskGP(X, Y) is one once it is fitted: X (n, d) in the unit cube, Y (n, 1).

        The network is made here, wide and at random weights, and the evidence picks a scale for each input and the
        noise (`surrogate.py`). input_transform, outcome_transform: BoTorch's, which are trained here; outcomes
        are standardized unless one is given."""
        _check_data(X, Y)
        from botorch.models.transforms import Standardize
        from botorch.models.utils import validate_input_scaling

        outcomes = Standardize(1) if outcome_transform is None else outcome_transform
        x = X if input_transform is None else input_transform.train()(X)
        y = outcomes.train()(Y, X=X)[0]
        validate_input_scaling(x, y)
        la = surrogate(x, y, given.generator(generator))
        if input_transform is not None:
            input_transform.eval()
        return cls(la, "process", input_transform=input_transform, outcome_transform=outcomes.eval())

    @property
    def num_outputs(self) -> int:
        """How many outputs there are."""
        return len(self.kept)

    @property
    def batch_shape(self) -> torch.Size:
        """That of the observations that it was conditioned on; () without any."""
        return torch.Size() if self.seen is None else self.seen.Y.shape[:-2]

    def posterior(
        self,
        X: Tensor,
        output_indices: list[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: Any = None,
    ) -> Any:
        """A GPyTorchPosterior over the q points of each batch, X (*b, q, d). observation_noise: True for that of the
        fit, or variances (*b, q, c) among the transformed outcomes."""
        if output_indices is not None:
            return self.subset_output(output_indices).posterior(X, None, observation_noise, posterior_transform)
        from botorch.posteriors.gpytorch import GPyTorchPosterior

        self.eval()
        mean, cov = self._conditioned(self.transform_inputs(X))
        if observation_noise is not False:
            cov = cov + blocks(self._noise(mean, None if observation_noise is True else observation_noise))
        found = GPyTorchPosterior(normal(mean.to(X), cov.to(X)))
        if hasattr(self, "outcome_transform"):
            found = self.outcome_transform.untransform_posterior(found, X=X)
        return found if posterior_transform is None else posterior_transform(posterior=found, X=X)

    def subset_output(self, idcs: list[int]) -> LaplaceModel:
        """The model of some of the outputs."""
        if self.seen is not None:
            raise Unsupported(
                "outputs of a model that was conditioned on observations depend on all of them; take subset_output "
                "before condition_on_observations, or a posterior_transform"
            )
        new = self._again()
        if hasattr(self, "outcome_transform"):
            new.outcome_transform = self.outcome_transform.subset_output(idcs=idcs)
        new.kept = tuple(self.kept[i] for i in idcs)
        return new

    def condition_on_observations(self, X: Tensor, Y: Tensor, noise: Tensor | None = None, **options: Any) -> Any:
        """The model after more observations X (*b, k, d), Y (*s, *b, k, c), at the weights, prior and noise of the fit.
        noise: their variances, like Y, among the transformed outcomes; without it that of the fit."""
        if options:
            raise Unsupported(f"condition_on_observations takes X, Y and noise, got {sorted(options)} too; drop those")
        if hasattr(self, "outcome_transform"):
            Y, _ = self.outcome_transform(Y=Y, Yvar=noise, X=X)
        inputs, new = self.transform_inputs(X), self._again()
        more = Observations(inputs, Y, self._noise(Y, noise))
        new.kept, new.seen = self.kept, more if self.seen is None else self.seen.and_more(more)
        return new

    # -- inside ---------------------------------------------------------------------------------------------------

    def _again(self) -> LaplaceModel:
        transforms = {name: getattr(self, name, None) for name in ("input_transform", "outcome_transform")}
        return type(self)(self.la, self.about, **transforms)

    def _noise(self, f: Tensor, variances: Tensor | None) -> Tensor:
        """Cov[y | f] at outputs f (..., c) that are kept, (..., c, c)."""
        if variances is not None:
            return torch.diag_embed(variances.expand_as(f))
        c, kept = _outputs_of(self.la), list(self.kept)
        return self.likelihood.noise_covariance(f.new_zeros(*f.shape[:-1], c))[..., kept, :][..., kept]

    def _conditioned(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The mean (*b, q, c) and the covariance (*b, q·c, q·c) after what was seen."""
        if self.seen is None:
            return self._fitted(x)
        seen, q, c = self.seen, x.shape[-2], self.num_outputs
        mean, cov = self._fitted(_after(seen.X, x, 2))
        k = mean.shape[-2] - q
        noise = blocks(seen.noise)
        L = _cholesky(cov[..., : k * c, : k * c] + noise)
        half = torch.linalg.solve_triangular(L, cov[..., : k * c, k * c :], upper=False)  # L⁻¹ J' M⁻¹ Jᵀ
        gap = (seen.Y - mean[..., :k, :]).flatten(-2).unsqueeze(-1)
        moved = (half.mT @ torch.linalg.solve_triangular(L, gap, upper=False)).squeeze(-1)
        mean = mean[..., k:, :] + moved.unflatten(-1, (q, c))
        cov = cov[..., k * c :, k * c :] - half.mT @ half
        return mean, cov.expand(*mean.shape[:-2], *cov.shape[-2:])

    def _fitted(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The same before, in float64."""
        *batch, q, _ = x.shape
        flat, budget = x.reshape(-1, x.shape[-1]), self.la.memory_budget
        flat = flat if torch.is_grad_enabled() else flat.detach()
        each = 8 * q * len(self.kept) * self.la.tangent.layout.size
        step = len(flat) if asked(x) else q * max(1, budget // (4 * each))
        made = [self._jointly(piece, q) for piece in flat.split(max(1, step))]
        mean, cov = (torch.cat(found) for found in zip(*made, strict=True))
        return mean.reshape(*batch, q, self.num_outputs), cov.reshape(*batch, *cov.shape[-2:])

    def _jointly(self, x: Tensor, q: int) -> tuple[Tensor, Tensor]:
        """For points of the network (b·q, d), q of them together."""
        tangent = self.la.tangent
        f, J = with_graph(tangent, x.to(tangent.dtype), self.la.memory_budget)
        if f.ndim > 2:
            raise Unsupported(f"BoTorch knows outputs (q, c) of points; these are {tuple(f.shape)}: use forward=")
        f, J = f.double()[:, list(self.kept)], J[:, list(self.kept)]
        if self.about == "tangent":
            f = f + J @ (self.la.tangent_map.vector - tangent.theta.to(J))
        elif self.about == "process":
            center = self.la.process_map
            assert center.constant is not None
            f = center.constant[list(self.kept)] + J @ center.vector
        return f, together(self.la.spread.precision, J, q * f.shape[-1])

    def _set_transformed_inputs(self) -> None:
        """BoTorch's eval() would transform training inputs: a fit has none."""

    def _revert_to_original_inputs(self) -> None:
        """Nor does train() take that back."""


def _outputs_of(la: Laplace) -> int:
    sums = la.state.statistics
    if "sum" in sums:
        return len(sums["sum"])
    return la.tangent.output_shape(first_inputs(la.read_again(None, "LaplaceModel"), la.tangent.device))[1]


def _after(a: Tensor, b: Tensor, own: int) -> Tensor:
    """Points of a, then those of b, (*batch, points, ...), of which `own` dimensions are not batches."""
    batch = torch.broadcast_shapes(a.shape[:-own], b.shape[:-own])
    return torch.cat([t.expand(*batch, *t.shape[-own:]) for t in (a, b.to(a))], -own)


def _cholesky(K: Tensor) -> Tensor:
    L, info = torch.linalg.cholesky_ex(K)
    if bool(info.any()):
        raise NotPositiveDefinite(
            "the covariance of the observations is singular: points are the same and the noise is too small for "
            "float64; give a larger noise=, or condition on each point once"
        )
    return L


def _check_library() -> None:
    if FantasizeMixin is object:
        raise Unsupported("LaplaceModel needs BoTorch, which is not installed; pip install 'lapwing[botorch]'")


def _check_data(X: Any, Y: Any) -> None:
    _check_library()
    if not (isinstance(X, Tensor) and isinstance(Y, Tensor) and X.ndim == 2 and Y.shape == (len(X), 1) and len(X)):
        got = [tuple(t.shape) if isinstance(t, Tensor) else type(t).__name__ for t in (X, Y)]
        raise InvalidValue(
            f"of_data takes points X (n, d) and outcomes Y (n, 1), got {got[0]} and {got[1]}; of several outcomes make "
            "a model each and join them by botorch.models.ModelList"
        )


def _check(la: Any, mean: str) -> None:
    _check_library()
    if not isinstance(la, Laplace):
        raise Unsupported(
            f"LaplaceModel takes what lw.laplace gives, got {type(la).__name__}; fit one, or give draws of functions "
            "to botorch.models.ensemble.EnsembleModel"
        )
    if not la.likelihood.normal or la.likelihood.response != "identity":
        raise Unsupported(
            f"acquisition functions reckon with normal outcomes, and these are {la.likelihood.name}; fit a "
            "'gaussian', or give a model of each class's score to optimize"
        )
    if mean not in MEANS:
        raise InvalidValue(f"mean must be one of {MEANS}, got {mean!r}{given.near(mean, MEANS)}")
