"""Only the last layer is Bayesian: the others are features. The network itself is used, not a copy of it.

Which layer is the last is found on the first batch (`tangent/subset.py`), or named. Jacobians are those of the network,
so features of several positions need no `feature_reduction`: the network says itself how it reduces them.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
from torch import Tensor

from lapwing import tree
from lapwing.compat.laplace_torch import loading
from lapwing.compat.laplace_torch.base import BaseLaplace
from lapwing.compat.laplace_torch.diag import DiagLaplace
from lapwing.compat.laplace_torch.full import FullLaplace
from lapwing.compat.laplace_torch.functional import FunctionalLaplace
from lapwing.compat.laplace_torch.kron import KronLaplace
from lapwing.compat.laplace_torch.parametric import ParametricLaplace
from lapwing.errors import InvalidValue
from lapwing.tangent import TangentModel, linearize


class FeatureReduction(str, Enum):
    """How features of several positions become those of the last layer."""

    PICK_FIRST = "pick_first"
    PICK_LAST = "pick_last"
    AVERAGE = "average"


class LastLayer(BaseLaplace):
    """An estimator of the last layer, which may be known only at the first batch: until then a prior may have any
    length."""

    _found: str | None  # its name

    def _select(self) -> None:
        """The parameters of the last layer, once it is known."""
        if self._found is None:
            self._names, self.params, self.n_params, self.n_layers = (), [], None, None
            return
        modules = dict(self.model.named_modules())
        if self._found not in modules:
            raise InvalidValue(f"last_layer_name={self._found!r} is no module of the network; they are {list(modules)}")
        prefix = f"{self._found}." if self._found else ""
        self._set_parameters({prefix + n: p for n, p in modules[self._found].named_parameters()})

    @property
    def prior_precision(self) -> Tensor:
        return self._prior_precision

    @prior_precision.setter
    def prior_precision(self, value: float | Tensor) -> None:
        if self._found is None:
            self._prior_precision = value
        else:
            _setter(BaseLaplace, "prior_precision")(self, value)

    @property
    def prior_mean(self) -> Tensor:
        return self._prior_mean

    @prior_mean.setter
    def prior_mean(self, value: float | Tensor) -> None:
        if self._found is None:
            self._prior_mean = value
        else:
            _setter(BaseLaplace, "prior_mean")(self, value)

    def _linearized(self, inputs: Any) -> TangentModel:
        forward = loading.caller(inputs)
        if self._found is not None:
            return linearize(self.model, list(self._names), forward=forward)
        if inputs is None:
            raise InvalidValue("the last layer is not known yet; give last_layer_name= before load_state_dict")
        tangent = linearize(self.model, "last_layer", forward=forward, example=tree.moved(inputs, self._device))
        self._know(tree.layer_of(tangent.layout.names[0]))
        return tangent

    def _know(self, name: str) -> None:
        """The last layer's name, and what waited for it."""
        self._found = name
        self._select()
        self.prior_precision, self.prior_mean = self._prior_precision, self._prior_mean


class LLLaplace(LastLayer, ParametricLaplace):
    """The last layer alone."""

    def __init__(
        self,
        model: torch.nn.Module,
        likelihood: Any,
        sigma_noise: float | Tensor = 1.0,
        prior_precision: float | Tensor = 1.0,
        prior_mean: float | Tensor = 0.0,
        temperature: float = 1.0,
        enable_backprop: bool = False,
        feature_reduction: FeatureReduction | str | None = None,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        backend: Any = None,
        last_layer_name: str | None = None,
        backend_kwargs: dict[str, Any] | None = None,
        asdl_fisher_kwargs: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        if asdl_fisher_kwargs is not None:
            raise InvalidValue("asdl_fisher_kwargs is not taken for the last layer, as in laplace-torch; drop it")
        self.feature_reduction, self._last_layer_name = _checked_reduction(feature_reduction), last_layer_name
        self._found = last_layer_name
        settings: dict[str, Any] = {"dict_key_x": dict_key_x, "dict_key_y": dict_key_y, "backend": backend}
        settings |= {"backend_kwargs": backend_kwargs, "enable_backprop": enable_backprop, **more}
        super().__init__(model, likelihood, sigma_noise, prior_precision, prior_mean, temperature, **settings)

    def fit(self, train_loader: Any, override: bool = True, progress_bar: bool = False) -> None:
        """Sum the curvature of the last layer over a loader."""
        if not override:
            raise InvalidValue("the last layer is not fitted on: override=False belongs to subset_of_weights='all'")
        super().fit(train_loader, True, progress_bar)

    def _batched(self, tangent: TangentModel) -> bool:
        """Always: what is in front of the last layer depends on no draw, and runs once for several."""
        return True

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "data": None,
            "_last_layer_name": self._last_layer_name,
            "last_layer": self._found,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._last_layer_name != state_dict["_last_layer_name"]:
            named = state_dict["_last_layer_name"]
            raise InvalidValue(f"the saved state has last_layer_name={named!r}, and this one {self._last_layer_name!r}")
        if self._found is None and state_dict.get("last_layer") is not None:
            self._know(state_dict["last_layer"])
        elif self._found is None and state_dict["data"] is not None:  # of laplace-torch: a batch to find it on
            batch = state_dict["data"]
            self._linearized(batch if isinstance(batch, dict) else batch[0])
        super().load_state_dict(state_dict)


def _checked_reduction(given: Any) -> Any:
    known = [None, *(one.value for one in FeatureReduction)]
    if given not in known:
        raise InvalidValue(f"feature_reduction must be one of {known}, got {given!r}")
    return given


def _setter(cls: type, name: str) -> Any:
    return getattr(cls, name).fset


class FullLLLaplace(LLLaplace, FullLaplace):
    """The last layer, with the dense curvature."""

    _key = ("last_layer", "full")


class KronLLLaplace(LLLaplace, KronLaplace):
    """The last layer, with Kronecker factors."""

    _key = ("last_layer", "kron")


class DiagLLLaplace(LLLaplace, DiagLaplace):
    """The last layer, with the diagonal of the curvature."""

    _key = ("last_layer", "diag")


class FunctionalLLLaplace(LastLayer, FunctionalLaplace):
    """The last layer, as a process on a subset of the data."""

    _key = ("last_layer", "gp")

    def __init__(
        self,
        model: torch.nn.Module,
        likelihood: Any,
        n_subset: int,
        *args: Any,
        last_layer_name: str | None = None,
        feature_reduction: FeatureReduction | str | None = None,
        **kwargs: Any,
    ) -> None:
        self._found = last_layer_name
        self.feature_reduction = _checked_reduction(feature_reduction)
        super().__init__(model, likelihood, n_subset, *args, **kwargs)
