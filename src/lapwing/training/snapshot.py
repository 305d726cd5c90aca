"""One moment of a training: the network's weights with the prior and likelihood that they were trained under.

`plain` and `restored` take hyperparameters to what torch.save keeps, and back:

    {**prior.hyperparameters, "likelihood_values": likelihood.hyperparameters}
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lapwing.errors import InvalidValue
from lapwing.likelihoods import Likelihood
from lapwing.priors import Gaussian


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Weights and hyperparameters of the highest evidence so far."""

    epoch: int
    log_evidence: float
    state_dict: dict[str, Any]  # of the model: a copy
    prior: Gaussian
    likelihood: Likelihood

    def plain(self) -> dict[str, Any]:
        """Tensors and numbers by name, for torch.save."""
        kept = {"epoch": self.epoch, "log_evidence": self.log_evidence, "state_dict": self.state_dict}
        return {**kept, **plain(self.prior, self.likelihood)}


def loaded(saved: dict[str, Any], prior: Gaussian, likelihood: Likelihood) -> Snapshot:
    """The snapshot that `plain` is of; prior and likelihood are of its kind."""
    weights = copy.deepcopy(saved["state_dict"])
    return Snapshot(saved["epoch"], saved["log_evidence"], weights, *restored(saved, prior, likelihood))


def copied(model: nn.Module) -> dict[str, Any]:
    """The model's state_dict, with tensors of its own."""
    return copy.deepcopy({k: v.detach() if isinstance(v, Tensor) else v for k, v in model.state_dict().items()})


def plain(prior: Gaussian, likelihood: Likelihood) -> dict[str, Any]:
    """Copies of all hyperparameters, by name."""
    return {
        **{k: v.clone() for k, v in prior.hyperparameters.items()},
        "likelihood_values": {k: v.clone() for k, v in likelihood.hyperparameters.items()},
    }


def restored(saved: dict[str, Any], prior: Gaussian, likelihood: Likelihood) -> tuple[Gaussian, Likelihood]:
    """The prior and likelihood at hyperparameters that `plain` gave."""
    own, values = prior.hyperparameters, saved["likelihood_values"]
    found = {name: saved[name] for name in own}
    for name, value in own.items():
        if found[name].shape != value.shape or values.keys() != likelihood.hyperparameters.keys():
            raise InvalidValue(
                f"the state has {found[name].numel()} prior {name}s and {list(values)}, this object "
                f"{value.numel()} and {list(likelihood.hyperparameters)}; make it alike"
            )
    device = next(iter(own.values())).device
    moved = likelihood.replace(**{k: v.to(device) for k, v in values.items()})
    return prior.replace(**{k: v.to(device) for k, v in found.items()}), moved
