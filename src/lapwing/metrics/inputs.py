"""What a metric is given, as tensors that can be relied on, in float64; anything else is an error that names it.

class_probs   probabilities (n, ..., c) and labels (n, ...); a binary output counts as two classes
response      a real-valued prediction: a pair (mean, std) of Gaussians, or draws (s, *y.shape)
vector        finite numbers (n,), one an example
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from lapwing.errors import InvalidValue, Unsupported
from lapwing.given import array
from lapwing.predictive import Prediction

F = TypeVar("F", bound=Callable[..., Any])
Gaussians: TypeAlias = tuple[Tensor, Tensor]  # mean and standard deviation, both of y's shape
Forecast: TypeAlias = Prediction | Gaussians | Tensor  # of real values: Gaussians, or draws (s, *y.shape)
DRAWS = 1024  # of a prediction that has no closed form


def of_arrays(metric: F) -> F:
    """A metric of tensors for arrays, frames and lists too; targets (n, ...) of one output (n, ..., 1) are read as
    (n, ..., 1)."""
    signature = inspect.signature(metric)

    @functools.wraps(metric)
    def run(*args: Any, **kwargs: Any) -> Any:
        named = {name: _as_tensors(value) for name, value in signature.bind(*args, **kwargs).arguments.items()}
        if isinstance(named.get("y"), Tensor) and "predicted" in named:
            named["y"] = _aligned(named["predicted"], named["y"])
        return metric(**named)

    return run  # type: ignore[return-value]


def _as_tensors(value: Any) -> Any:
    return tuple(array(one) for one in value) if isinstance(value, tuple) else array(value)


def _aligned(predicted: Any, y: Tensor) -> Tensor:
    if isinstance(predicted, Prediction):
        return predicted.likelihood.aligned(predicted.f_mean, y)
    mean = predicted[0] if isinstance(predicted, tuple) and predicted else predicted
    shape = tuple(mean.shape) if isinstance(mean, Tensor) else ()
    lone = shape[-1:] == (1,) and tuple(y.shape) in (shape[:-1], shape[1:-1])  # of means, or of draws
    return y.unsqueeze(-1) if lone else y


def class_probs(predicted: Prediction | Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """(n, ..., c) and (n, ...), float64 and int64."""
    if not isinstance(predicted, Prediction):
        return _checked_probs(predicted, y)
    likelihood = predicted.likelihood
    if not likelihood.classes:
        raise Unsupported(f"a {likelihood.name} prediction has no classes; use nll, crps, coverage, pit or sharpness")
    p = likelihood.class_probs(predicted.probs)
    if likelihood.event:  # a label for each output, which may be of any dtype
        likelihood.validate(predicted.f_mean, tensor(y, "the labels").to(p.device))
        y = y.long()
    return _checked_probs(p, y)


def all_class_probs(predicted: Prediction | Tensor) -> Tensor:
    """(n, ..., c), float64, without labels."""
    p = predicted
    if isinstance(predicted, Prediction):
        if not predicted.likelihood.classes:
            raise Unsupported(f"a {predicted.likelihood.name} prediction has no classes to agree on")
        p = predicted.likelihood.class_probs(predicted.probs)
    p = tensor(p, "the probabilities")
    return _checked_probs(p, torch.zeros(p.shape[:-1], dtype=torch.long, device=p.device))[0]


def _checked_probs(p: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    p, y = finite(p, "the probabilities"), tensor(y, "the labels")
    if p.ndim < 2 or p.shape[-1] < 2:
        raise InvalidValue(
            f"probabilities must be (n, ..., c) with a column for each of c ≥ 2 classes, got {tuple(p.shape)}; for a "
            "binary p give torch.stack([1 - p, p], -1)"
        )
    if y.is_meta:
        raise InvalidValue("the labels are on the meta device, which holds no values; load the data first")
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise InvalidValue(f"labels must be integers, got {y.dtype}; use y.long()")
    if y.shape != p.shape[:-1]:
        raise InvalidValue(
            f"labels of shape {tuple(y.shape)} do not match probabilities {tuple(p.shape)}; "
            f"give labels of shape {tuple(p.shape[:-1])}"
        )
    if int(y.min()) < 0 or int(y.max()) >= p.shape[-1]:
        raise InvalidValue(f"labels run from {int(y.min())} to {int(y.max())}, outside 0..{p.shape[-1] - 1}")
    sums = p.double().sum(-1)
    slack = max(1e-4, p.shape[-1] * torch.finfo(p.dtype).eps)
    if float(p.min()) < 0 or float((sums - 1).abs().max()) > slack:
        raise InvalidValue(
            f"probabilities must not be negative and must sum to one; got a least one of {float(p.min()):.4g} and sums "
            f"from {float(sums.min()):.6g} to {float(sums.max()):.6g}; for logits give torch.softmax(logits, -1)"
        )
    return p.double(), y.long().to(p.device)


def response(predicted: Forecast, y: Tensor | None = None) -> Gaussians | Tensor:
    """(mean, std), or draws (s, *y.shape), once y, where it is given, is seen to be real numbers of that shape."""
    if isinstance(predicted, Prediction):
        predicted = _of_prediction(predicted)
    if isinstance(predicted, tuple):
        mean, std = _gaussians(predicted)
        check_targets(y, mean.shape)
        return mean, std
    draws = finite(predicted, "the draws")
    if draws.ndim < 2 or len(draws) < 2:
        raise InvalidValue(f"draws must be (s, n, ...) with s ≥ 2, got {tuple(draws.shape)}; or give (mean, std)")
    check_targets(y, draws.shape[1:])
    return draws.double()


def check_drawn(predicted: Prediction, y: Tensor) -> None:
    """That y can be a draw of a prediction of real values."""
    refuse_classes(predicted)
    check_targets(y, predicted.sample(1).shape[1:])


def refuse_classes(predicted: Prediction) -> None:
    """Raise if a prediction is of classes."""
    if predicted.likelihood.classes:
        raise Unsupported(f"a {predicted.likelihood.name} prediction is of classes; use nll, brier, ece or accuracy")


def _of_prediction(predicted: Prediction) -> Gaussians | Tensor:
    refuse_classes(predicted)
    if predicted.gaussian:
        return predicted.mean, predicted.std
    return predicted.sample(DRAWS)


def _gaussians(pair: Any) -> Gaussians:
    if len(pair) != 2:
        raise InvalidValue(f"Gaussians are a pair (mean, std), got {len(pair)} things")
    mean, std = finite(pair[0], "the means"), finite(pair[1], "the standard deviations")
    if mean.shape != std.shape:
        raise InvalidValue(f"means are {tuple(mean.shape)} and standard deviations {tuple(std.shape)}; give one each")
    if not float(std.min()) > 0:
        raise InvalidValue(f"standard deviations must be positive, got a least one of {float(std.min()):.4g}")
    return mean.double(), std.double()


def check_targets(y: Tensor | None, shape: torch.Size) -> None:
    """Raise unless targets are finite and of the shape of the predictions."""
    if y is not None and finite(y, "the targets").shape != shape:
        hint = "; add the output dimension with y.unsqueeze(-1)" if y.ndim == len(shape) - 1 else ""
        raise InvalidValue(f"targets of shape {tuple(y.shape)} do not match predictions {tuple(shape)}{hint}")


def vector(values: Any, what: str) -> Tensor:
    """Finite numbers (n,), in float64."""
    values = finite(values, what).double().contiguous()
    if values.ndim != 1:
        raise InvalidValue(
            f"{what} must be (n,), one number an example, got {tuple(values.shape)}; reduce or flatten them"
        )
    return values


def finite(values: Any, what: str) -> Tensor:
    """A tensor of finite real numbers."""
    values = tensor(values, what)
    if values.is_complex():
        raise InvalidValue(f"{what} are complex; give real numbers")
    bad = int((~torch.isfinite(values)).sum())
    if bad:
        raise InvalidValue(f"{what} hold {bad} NaN or infinite values of {values.numel()}; give finite real numbers")
    return values


def no_nan(scores: Tensor, what: str) -> Tensor:
    """Scores may be infinite (the NLL of what had probability 0); NaN is none."""
    bad = int(scores.isnan().sum())
    if bad:
        raise InvalidValue(f"{bad} of {scores.numel()} {what} are NaN: the prediction says nothing there; look at it")
    return scores


def tensor(values: Any, what: str) -> Tensor:
    """A tensor that is not empty, cut from any graph."""
    if isinstance(values, Prediction):
        raise InvalidValue(f"{what} must be a tensor, got a Prediction; give one of its parts, such as its entropy")
    if not isinstance(values, Tensor):
        raise InvalidValue(f"{what} must be a tensor, an array or a list of numbers, got {type(values).__name__}")
    if not values.numel():
        raise InvalidValue(f"{what} are empty, of shape {tuple(values.shape)}; a metric needs at least one example")
    return values.detach()
