"""Kronecker factors: a block B ⊗ A for each weight and B for its bias, P = (B ⊗ A) / (σ² T) + λ.

`H_facs` lists them by parameter tensor, `H` and `posterior_precision` by eigenvalues and eigenvectors (matrix.py).
laplace-torch's own lists may share a scale out otherwise between B and A: their product is the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lapwing.compat.laplace_torch.parametric import ParametricLaplace
from lapwing.compat.laplace_torch.parts import parts_of
from lapwing.compat.laplace_torch.utils.matrix import Kron, KronDecomposed
from lapwing.curvature import Kronecker, Part, State
from lapwing.errors import InvalidValue, Unsupported, warn
from lapwing.tangent import TangentModel


class KronLaplace(ParametricLaplace):
    """All weights, with Kronecker factors of each layer."""

    _key = ("all", "kron")

    def __init__(self, *args: Any, damping: bool = False, **kwargs: Any) -> None:
        if damping:
            message = "damping=True has no effect: laplace-torch 0.3 drops it when it adds the prior, and so do we"
            warn(message)
        self.damping = damping
        self._decomposed: tuple[State, KronDecomposed] | None = None
        super().__init__(*args, **kwargs)

    @property
    def _structure(self) -> Kronecker:  # type: ignore[override]
        told = dict(self._asdl_fisher_kwargs)
        sharing = told.pop("kfac_approx", "expand")
        if told:
            raise Unsupported(f"asdl_fisher_kwargs {sorted(told)} have no meaning here; 'kfac_approx' has")
        return Kronecker(sharing=sharing, bias="apart")

    def _precision_lengths(self) -> tuple[int, ...]:
        return (self.n_layers,)

    @property
    def H_facs(self) -> Kron | None:
        """The factors of each parameter tensor, in the order of the network; None before a fit."""
        if self._state is None:
            return None
        entries = {name: entry for part in self._state.parts for name, entry in _listed(part, self._state).items()}
        found = [entries[name] for name in self._names]
        return Kron([[(self._unit * b).to(self._dtype), *(t.to(self._dtype) for t in a)] for b, *a in found])

    @property
    def H(self) -> KronDecomposed:
        """The factors by eigenvalues and eigenvectors."""
        state = self._fitted
        if self._decomposed is None or self._decomposed[0] is not state:
            factors = self.H_facs
            assert factors is not None
            self._decomposed = state, factors.decompose(self.damping)
        return self._decomposed[1]

    @property
    def posterior_precision(self) -> KronDecomposed:
        """P, by eigenvalues and eigenvectors, with gradients in the hyperparameters."""
        return self.H * self._H_factor + self.prior_precision

    def _covariance(self, rows: Tensor) -> Tensor:
        """In the dtype of the rows, where every layer has Kronecker factors: no difference is taken."""
        if rows.dtype != self._dtype or any(part.kind != "kron" for part in self._fitted.parts):
            return super()._covariance(rows)
        half = self.posterior_precision.whitened(rows)
        return half @ half.mT

    def _colored(self, noise: Tensor) -> Tensor:
        with torch.no_grad():
            return self.posterior_precision.bmm(noise, -0.5)

    def _packed(self) -> list[list[Tensor]]:
        factors = self.H_facs
        assert factors is not None
        return factors.kfacs

    def _unpacked(self, H: Any, tangent: TangentModel) -> State:
        parts, entries = parts_of(self._structure, tangent), dict(zip(self._names, H, strict=True))
        sums: dict[str, Tensor] = {}
        for part in parts:
            own = {name: [t.double().to(self._device) for t in entries[name]] for name in part.parameters}
            sums |= {f"{part.name}/{key}": value for key, value in _summed(part, own, self._unit).items()}
        return self._restored(tangent, sums, parts)


def _listed(part: Part, state: State) -> dict[str, list[Tensor]]:
    """The factors of a part's parameters: {weight: [B, A / count], bias: [B]}."""
    if part.kind != "kron" or part.shape[0] > 1 or part.transposed:
        raise Unsupported(
            f"{part.name} has no Kronecker factors in laplace-torch's form (it is {part.kind}, or its weight is stored "
            "in blocks); evidence and predictions have it, and H, H_facs, posterior_precision and samples do not: for "
            "those, leave it out by requires_grad_(False)"
        )
    A, B, count = (state.sums[f"{part.name}/{key}"].double() for key in ("A", "B", "count"))
    b, a = B[0, 0], A[0] / count.clamp(min=1)
    out = {}
    if part.weight is not None:
        order = _stored(part)
        out[part.weight] = [b, a[order][:, order]]
    if part.bias is not None:
        out[part.bias] = [b * a[-1, -1]]
    return out


def _summed(part: Part, own: dict[str, list[Tensor]], unit: float) -> dict[str, Tensor]:
    """The sums of a part, from the factors of its parameters."""
    if part.kind != "kron":
        raise InvalidValue(f"the saved state has Kronecker factors of {part.name}, which has none here")
    b = own[part.parameters[0]][0]
    blocks = []
    if part.weight is not None:
        order = torch.argsort(_stored(part))
        blocks.append(own[part.weight][1][order][:, order])
    if part.bias is not None:
        blocks.append((own[part.bias][0].trace() / b.trace()).reshape(1, 1))
    a = torch.block_diag(*blocks)
    return {"A": a[None], "B": (b / unit)[None, None], "count": b.new_ones(())}


def _stored(part: Part) -> Tensor:
    """Where each input of a weight, as it is stored (channels, offsets), stands among ours (offsets, channels)."""
    inner = part.shape[2] - (part.bias is not None)
    return torch.arange(inner).reshape(part.kernel, -1).mT.reshape(-1)
