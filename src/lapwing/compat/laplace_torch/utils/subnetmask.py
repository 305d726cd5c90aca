"""Masks of subnetworks, as laplace-torch makes them: `mask.select(train_loader)` gives the indices that are chosen.

    RandomSubnetMask                       k weights at random, by torch's global generator
    LargestMagnitudeSubnetMask             the k largest |θ|
    LargestVarianceDiagLaplaceSubnetMask   the k largest variances of a diagonal Laplace approximation
    LargestVarianceSWAGSubnetMask          the k largest variances along a run of SGD (`lapwing.subsets.Swag`)
    ParamNameSubnetMask, ModuleNameSubnetMask, LastLayerSubnetMask      by name

Indices are those of the vector of all parameters that require grad.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from lapwing import tree
from lapwing.errors import InvalidValue
from lapwing.subsets import Swag
from lapwing.tangent.calling import call
from lapwing.tangent.evaluating import evaluating
from lapwing.tangent.subset import last_layer, trainable

LEAST = 1e-30  # variance along a run that did not move


class SubnetMask:
    """A choice among the weights, made once."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self._layout = model, trainable(model)
        named = dict(model.named_parameters())
        self.parameter_vector = torch.cat([named[n].detach().reshape(-1) for n in self._layout.names])
        self._indices: Tensor | None = None

    @property
    def indices(self) -> Tensor:
        """The chosen indices, (k,); after select()."""
        if self._indices is None:
            raise AttributeError("this mask has chosen nothing yet; run select() first")
        return self._indices

    @property
    def n_params_subnet(self) -> int:
        """How many weights are chosen."""
        return len(self.indices)

    def select(self, train_loader: Any = None) -> Tensor:
        """Choose: the indices, (k,), rising."""
        if self._indices is not None:
            raise InvalidValue("this mask has chosen already; make a new one")
        self._indices = self.get_subnet_mask(train_loader).nonzero()[:, 0]
        return self._indices

    def get_subnet_mask(self, train_loader: Any) -> Tensor:
        """Whether each weight is chosen, (p,)."""
        raise NotImplementedError


class ScoreBasedSubnetMask(SubnetMask):
    """The k weights of the highest score."""

    def __init__(self, model: nn.Module, n_params_subnet: int) -> None:
        super().__init__(model)
        size = len(self.parameter_vector)
        if not isinstance(n_params_subnet, int) or not 0 < n_params_subnet <= size:
            raise InvalidValue(
                f"n_params_subnet must be from 1 to {size}, the weights there are; got {n_params_subnet!r}"
            )
        self._k = n_params_subnet

    def compute_param_scores(self, train_loader: Any) -> Tensor:
        """A score for each weight, (p,)."""
        raise NotImplementedError

    def get_subnet_mask(self, train_loader: Any) -> Tensor:
        """Whether each weight is among the highest, (p,)."""
        scores = self.compute_param_scores(train_loader)
        chosen = torch.zeros_like(scores, dtype=torch.bool)
        return chosen.index_fill(0, torch.argsort(scores, descending=True)[: self._k], True)


class RandomSubnetMask(ScoreBasedSubnetMask):
    """k weights at random."""

    def compute_param_scores(self, train_loader: Any) -> Tensor:
        """Uniform numbers, (p,)."""
        return torch.rand_like(self.parameter_vector)


class LargestMagnitudeSubnetMask(ScoreBasedSubnetMask):
    """The k largest weights."""

    def compute_param_scores(self, train_loader: Any) -> Tensor:
        """|θ|, (p,)."""
        return self.parameter_vector.abs()


class LargestVarianceDiagLaplaceSubnetMask(ScoreBasedSubnetMask):
    """The k weights of largest variance under a diagonal Laplace approximation, which is fitted."""

    def __init__(self, model: nn.Module, n_params_subnet: int, diag_laplace_model: Any) -> None:
        super().__init__(model, n_params_subnet)
        self.diag_laplace_model = diag_laplace_model

    def compute_param_scores(self, train_loader: Any) -> Tensor:
        """Variances, (p,)."""
        self.diag_laplace_model.fit(_needed(train_loader))
        return self.diag_laplace_model.posterior_variance


class LargestVarianceSWAGSubnetMask(ScoreBasedSubnetMask):
    """The k weights of largest variance along a run of SGD on a copy of the network."""

    def __init__(
        self,
        model: nn.Module,
        n_params_subnet: int,
        likelihood: str = "classification",
        swag_n_snapshots: int = 40,
        swag_snapshot_freq: int = 1,
        swag_lr: float = 0.01,
    ) -> None:
        if likelihood not in ("classification", "regression"):
            raise InvalidValue(f"likelihood must be 'classification' or 'regression', got {likelihood!r}")
        super().__init__(model, n_params_subnet)
        self.criterion = nn.CrossEntropyLoss() if likelihood == "classification" else nn.MSELoss()
        self.snapshots, self.every, self.lr = swag_n_snapshots, swag_snapshot_freq, swag_lr

    def compute_param_scores(self, train_loader: Any) -> Tensor:
        """Variances over the snapshots, (p,)."""
        model = deepcopy(self.model).train()
        swag, device = Swag(model), self.parameter_vector.device
        optimizer = torch.optim.SGD(model.parameters(), lr=self.lr, momentum=0.9, weight_decay=3e-4)
        for epoch in range(self.snapshots * self.every):
            for x, y in _needed(train_loader):
                optimizer.zero_grad()
                self.criterion(model(x.to(device)), y.to(device)).backward()
                optimizer.step()
            if epoch % self.every == 0:
                swag.update()
        return swag.variance().clamp(min=LEAST).to(self.parameter_vector)


class ParamNameSubnetMask(SubnetMask):
    """All weights of some parameters."""

    def __init__(self, model: nn.Module, parameter_names: list[str]) -> None:
        super().__init__(model)
        self.names = list(parameter_names)

    def get_subnet_mask(self, train_loader: Any) -> Tensor:
        """Whether each weight belongs to them, (p,)."""
        missing = sorted(set(self.names) - set(self._layout.names))
        if missing or not self.names:
            raise InvalidValue(
                f"parameters {missing or 'to choose'} are not there; there are {list(self._layout.names)}"
            )
        chosen = torch.zeros_like(self.parameter_vector, dtype=torch.bool)
        for name in self.names:
            chosen[self._layout.slices()[name]] = True
        return chosen


class ModuleNameSubnetMask(ParamNameSubnetMask):
    """All weights of some modules without children."""

    def __init__(self, model: nn.Module, module_names: list[str]) -> None:
        super().__init__(model, [])
        self.modules = list(module_names)

    def get_subnet_mask(self, train_loader: Any) -> Tensor:
        """Whether each weight belongs to them, (p,)."""
        known = {tree.layer_of(name) for name in self._layout.names}
        missing = sorted(set(self.modules) - known)
        if missing or not self.modules:
            raise InvalidValue(
                f"modules {missing or 'to choose'} have no parameters of their own; those that have: {sorted(known)}"
            )
        self.names = [name for name in self._layout.names if tree.layer_of(name) in self.modules]
        return super().get_subnet_mask(train_loader)


class LastLayerSubnetMask(ModuleNameSubnetMask):
    """All weights of the last layer, which is found on a batch unless it is named."""

    def __init__(self, model: nn.Module, last_layer_name: str | None = None) -> None:
        super().__init__(model, [] if last_layer_name is None else [last_layer_name])

    def get_subnet_mask(self, train_loader: Any) -> Tensor:
        """Whether each weight belongs to it, (p,)."""
        if not self.modules:
            x = next(iter(_needed(train_loader)))[0][:1].to(self.parameter_vector.device)
            with evaluating(self.model):
                self.modules = [tree.layer_of(last_layer(self.model, x, call)[0])]
        return super().get_subnet_mask(train_loader)


def _needed(loader: Any) -> Any:
    if loader is None:
        raise InvalidValue("this mask looks at the data: select(train_loader)")
    return loader
