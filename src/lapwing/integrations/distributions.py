"""Predictions as GPyTorch's distributions (pip install 'lapwing[gpytorch]'): f ~ N(μ, V), or y ~ N(μ, V + R).

    distribution(pred)                what the weights do not know about f; of one output a MultivariateNormal over the
                                      inputs, of several a MultitaskMultivariateNormal, whose tasks are the outputs
    distribution(pred, noise=True)    the same of y, noise and all, where y is Gaussian

A prediction that is joint gives one distribution over all inputs. One that is not gives a batch of them, one an input.
Entry (n, c) of a covariance is row n·C + c, as tasks that are interleaved are. Shapes: n inputs, c of C outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lapwing.errors import InvalidValue, Unsupported
from lapwing.predictive import Prediction


def distribution(pred: Prediction, noise: bool = False) -> Any:
    """f as a distribution of GPyTorch, in the dtype of the prediction; with noise=True, y."""
    _check(pred, noise)
    mean, cov = pred.f_mean, pred.covariance
    if pred.joint:
        cov = cov.reshape(mean.numel(), mean.numel())
    else:
        mean = mean.unsqueeze(-2)  # a batch of single inputs
    if noise:
        cov = cov + blocks(pred.likelihood.noise_covariance(mean))
    return normal(mean, cov)


def normal(mean: Tensor, covariance: Tensor) -> Any:
    """GPyTorch's normal distribution with mean (..., n, c) and covariance (..., n·c, n·c)."""
    from linear_operator import to_linear_operator  # GPyTorch's; without it a singular covariance raises at once

    distributions, covariance = _library().distributions, to_linear_operator(covariance)
    if mean.shape[-1] == 1:
        return distributions.MultivariateNormal(mean.squeeze(-1), covariance)
    return distributions.MultitaskMultivariateNormal(mean, covariance)


def blocks(each: Tensor) -> Tensor:
    """Covariances of outputs (..., n, c, c) as those of n independent inputs together, (..., n·c, n·c)."""
    n, c = each.shape[-3:-1]
    apart = torch.eye(n, dtype=each.dtype, device=each.device)
    found = torch.einsum("...nab,nm->...namb", each, apart)
    return found.reshape(*each.shape[:-3], n * c, n * c)


def _check(pred: Any, noise: bool) -> None:
    _library()
    if not isinstance(pred, Prediction):
        raise InvalidValue(f"distribution takes what la.predict(x) gives, got {type(pred).__name__}")
    if pred.f_mean.ndim != 2:
        raise Unsupported(
            f"this prediction has outputs at several positions, {tuple(pred.f_mean.shape)}; GPyTorch's distributions "
            "are over inputs (n, c): use pred.f_sample, or pick a position with forward="
        )
    if not pred.outputs.normal:
        raise Unsupported(
            "this prediction is made of draws or of a mixture and is no normal distribution; use pred.f_sample, or the "
            "prediction of lw.laplace(...).predict(x, mean='network')"
        )
    if noise and not (pred.likelihood.normal and pred.likelihood.response == "identity"):
        raise Unsupported(
            f"y of {pred.likelihood.name} is not f and Gaussian noise; drop noise=True for f, or use pred.sample"
        )


def _library() -> Any:
    try:
        import gpytorch
    except ImportError as error:
        raise Unsupported("this needs GPyTorch, which is not installed; pip install 'lapwing[gpytorch]'") from error
    return gpytorch
