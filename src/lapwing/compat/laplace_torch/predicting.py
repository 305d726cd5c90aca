"""Predictions as laplace-torch gives them: tensors, not a Prediction.

    classes      probabilities (n, c), by a link (`lapwing.predictive.link`) or by draws of logits ("mc")
    regression   mean (n, c) and covariance (n, c, c) of the outputs, without the noise; joint: (n c,) and (n c, n c)

Draws come from the generator that is given or, as in laplace-torch, from torch's global one: code that was written for
it seeds that one, and gets the same draws.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lapwing.compat.laplace_torch.utils.enums import Likelihood, LinkApprox, PredType
from lapwing.errors import InvalidValue
from lapwing.likelihoods import Categorical
from lapwing.outputs.points import psd_root
from lapwing.predictive.link import closed_form


def normal_samples(mean: Tensor, var: Tensor, n_samples: int, generator: torch.Generator | None = None) -> Tensor:
    """Draws (s, n, c) of normals with mean (n, c) and variance (n, c) or (n, c, c); all inputs share the noise.
    A variance may be singular, as that of a few weights under many outputs is."""
    noise = torch.randn(mean.shape[-1], n_samples, generator=generator, dtype=mean.dtype, device=mean.device)
    root = torch.diag_embed(var.sqrt()) if var.shape == mean.shape else psd_root(var)
    return (mean.unsqueeze(-1) + root @ noise).permute(2, 0, 1)


class Predicting:
    """Calls of an estimator that knows the moments of its outputs (`_glm_predictive_distribution`) and can draw its
    weights and run the network at them (`_nn_functional_samples`)."""

    likelihood: Likelihood

    def _glm_predictive_distribution(self, x: Any, joint: bool = False) -> tuple[Tensor, Tensor]:
        """The mean (n, c) and covariance (n, c, c) of the outputs at inputs; joint: (n c,) and (n c, n c)."""
        raise NotImplementedError

    def _nn_functional_samples(
        self, x: Any, n_samples: int = 100, generator: torch.Generator | None = None, **model_kwargs: Any
    ) -> Tensor:
        """Outputs (s, n, c) of the network at drawn weights."""
        raise NotImplementedError

    def _meaning(self, fitting: bool) -> Likelihood:
        """Reward models are fitted as classes and predict rewards."""
        if self.likelihood == Likelihood.REWARD_MODELING:
            return Likelihood.CLASSIFICATION if fitting else Likelihood.REGRESSION
        return self.likelihood

    def __call__(
        self,
        x: Any,
        pred_type: PredType | str = PredType.GLM,
        joint: bool = False,
        link_approx: LinkApprox | str = LinkApprox.PROBIT,
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
        fitting: bool = False,
        **model_kwargs: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Probabilities (n, c) of classes, or mean and variance of regression, at inputs."""
        link = _checked(pred_type, link_approx)
        meaning = self._meaning(fitting)
        if pred_type == PredType.NN:
            if link != LinkApprox.MC:
                raise InvalidValue(f"pred_type='nn' averages draws: say link_approx='mc', got {link.value!r}")
            return self._nn_prediction(x, meaning, n_samples, generator, **model_kwargs)
        if meaning == Likelihood.REGRESSION:
            mean, var = self._glm_predictive_distribution(x, joint=joint)
            return mean, var.diagonal(dim1=-2, dim2=-1) if diagonal_output and not joint else var
        mean, var = self._glm_predictive_distribution(x)
        if link == LinkApprox.MC:
            return self._link_samples(mean, var, n_samples, diagonal_output, generator).softmax(-1).mean(0)
        return closed_form(Categorical(), link.value, mean, var)

    def _nn_prediction(
        self, x: Any, meaning: Likelihood, n_samples: int, generator: torch.Generator | None, **model_kwargs: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        f = self._nn_functional_samples(x, n_samples, generator, **model_kwargs)
        return (f.mean(0), f.var(0)) if meaning == Likelihood.REGRESSION else f.softmax(-1).mean(0)

    def predictive(self, x: Any, pred_type: PredType | str, link_approx: LinkApprox | str, n_samples: int) -> Any:
        """The call itself, by another name."""
        return self(x, pred_type=pred_type, link_approx=link_approx, n_samples=n_samples)

    @staticmethod
    def _link_samples(
        mean: Tensor, var: Tensor, n_samples: int, diagonal_output: bool, generator: torch.Generator | None
    ) -> Tensor:
        var = var.diagonal(dim1=-2, dim2=-1) if diagonal_output else var
        return normal_samples(mean, var, n_samples, generator)

    def functional_samples(
        self,
        x: Any,
        pred_type: PredType | str = PredType.GLM,
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Draws of the outputs, (s, n, c)."""
        _checked(pred_type, LinkApprox.MC)
        if pred_type == PredType.NN:
            return self._nn_functional_samples(x, n_samples, generator)
        return self._link_samples(*self._glm_predictive_distribution(x), n_samples, diagonal_output, generator)

    def predictive_samples(
        self,
        x: Any,
        pred_type: PredType | str = PredType.GLM,
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Draws of the outputs, (s, n, c); of classes, of their probabilities."""
        f = self.functional_samples(x, pred_type, n_samples, diagonal_output, generator)
        return f.softmax(-1) if self.likelihood == Likelihood.CLASSIFICATION else f


def _checked(pred_type: Any, link_approx: Any) -> LinkApprox:
    if pred_type not in (PredType.GLM, PredType.NN):
        raise InvalidValue(f"pred_type must be 'glm' or 'nn', got {pred_type!r}")
    try:
        return LinkApprox(link_approx)
    except ValueError as error:
        known = ", ".join(repr(one.value) for one in LinkApprox)
        raise InvalidValue(f"link_approx must be one of {known}; got {link_approx!r}") from error
