"""Whether chains have converged, by ArviZ (the extra `mcmc`):

    R̂      rank-normalized split R-hat: √(variance of all draws / variance within chains), 1 where chains agree
    ESS     how many independent draws the chains are worth, in the bulk

(Vehtari, Gelman, Simpson, Carpenter & Bürkner 2021). Of weights, and of functions: a network has many weights for one
function, so chains may agree on the outputs and on no weight. Shapes: k chains, l draws of each, p weights, n inputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lapwing import tree
from lapwing.data import inputs_of
from lapwing.errors import Unsupported

if TYPE_CHECKING:
    from lapwing.posterior.chains import Chains


@dataclass(frozen=True, eq=False, repr=False)
class Diagnostics:
    """What chains say of themselves."""

    chains: Chains

    @property
    def acceptance(self) -> Tensor | None:
        """The mean acceptance of each chain, (k,); None where nothing is refused."""
        return self._mean("acceptance")

    @property
    def divergent(self) -> Tensor | None:
        """The share of each chain's draws whose trajectory diverged, (k,); None where none can."""
        return self._mean("divergent")

    @property
    def energy(self) -> Tensor | None:
        """−log π + the momentum's, of each draw, (k, l); None where there is no momentum."""
        told = self.chains.told
        return self.chains.by_chain(told["energy"]) if "energy" in told else None

    @property
    def bfmi(self) -> Tensor | None:
        """E(ΔE)²/Var E of each chain, (k,): below 0.3 momenta are too small to move the energy (Betancourt 2016)."""
        energy = self.energy
        return None if energy is None else energy.diff(dim=1).square().mean(1) / energy.var(1)

    def rhat(self, x: Any = None) -> Tensor:
        """R̂ of each weight (p,), or of the outputs at inputs x, (n, ..., c)."""
        return self._by("rhat", x)

    def ess(self, x: Any = None) -> Tensor:
        """The effective number of draws for each weight (p,), or for the outputs at inputs x, (n, ..., c)."""
        return self._by("ess", x)

    def _mean(self, name: str) -> Tensor | None:
        told = self.chains.told
        return self.chains.by_chain(told[name].double()).mean(1) if name in told else None

    def _by(self, name: str, x: Any) -> Tensor:
        values = self.chains.weights if x is None else self.chains.outputs(self._placed(x)).values
        return by_arviz(name, self.chains.by_chain(values))

    def _placed(self, x: Any) -> Any:
        return tree.moved(inputs_of(x), self.chains.tangent.device)

    def __repr__(self) -> str:
        lines = [str(self.chains)]
        for name in ("acceptance", "divergent", "bfmi"):
            value = getattr(self, name)
            if value is not None:
                lines.append(f"{name} " + ", ".join(f"{v:.3g}" for v in value.tolist()))
        return "Diagnostics(" + "; ".join(lines) + "; rhat(x), ess(x) at inputs, rhat(), ess() of weights)"


def _arviz() -> Any:
    try:
        import arviz
    except ImportError as error:
        raise Unsupported("this needs ArviZ: pip install 'lapwing[mcmc]'") from error
    return arviz


def by_arviz(name: str, values: Tensor) -> Tensor:
    """rhat or ess of values (k, l, ...), (...)."""
    flat = values.detach().double().cpu().reshape(*values.shape[:2], math.prod(values.shape[2:]))
    arviz = _arviz()
    data = arviz.convert_to_dataset({"values": flat.numpy()})
    found = getattr(arviz, name)(data)["values"].values
    return torch.from_numpy(found.copy()).reshape(values.shape[2:])


def inference_data(chains: Chains) -> Any:
    """Draws as arviz.InferenceData; chains that were stopped early are left out, which ArviZ cannot hold."""
    named = chains.tangent.layout.unflatten(chains.weights)
    for name, value in chains.latent.items():
        while name in named:  # a parameter has that name
            name += "_"
        named[name] = value
    posterior = {name: chains.by_chain(value).cpu().numpy() for name, value in named.items()}
    names = {"acceptance": "acceptance_rate", "divergent": "diverging", "log_density": "lp"}
    told = {names.get(k, k): chains.by_chain(v).cpu().numpy() for k, v in chains.told.items()}
    return _arviz().from_dict(posterior=posterior, sample_stats=told or None)
