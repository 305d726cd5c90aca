"""Features of the tangent kernel by inducing inputs Z, all of whose outputs are kept (Nyström):

    K_ZZ = U diag(l) Uᵀ,    ψ(x) = K(x, Z) U l^-½  (c, k),    ψ ψᵀ = K_xZ K_ZZ⁻¹ K_Zx

They are made of the kernel (`empirical.py`), not of jvps: for many features that is a backward pass for each output of
Z and x instead of one product with the Jacobian a feature. Directions whose l is rounding are left out. One more
feature is zero: along it lies what the prior says of θ* and no feature sees: the evidence counts all of ½‖θ* − m‖²_A.

Shapes: m inducing inputs, n data, c outputs, k features.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from lapwing import tree
from lapwing.curvature import BUDGET, Accumulator, Factor, Full, Part, Probe, State, Structure, register
from lapwing.curvature.structure import Kept
from lapwing.distributed import Ranks
from lapwing.errors import InvalidValue
from lapwing.gp.empirical import own_products, products
from lapwing.gp.features import LEAST, Features, FeatureSum, scale_of
from lapwing.gp.gradients import Side
from lapwing.likelihoods import Likelihood
from lapwing.packing import Expected
from lapwing.priors import Gaussian
from lapwing.tangent import TangentModel


@register
@dataclass(frozen=True, eq=False)
class Inducing(Structure):
    """The curvature of the kernel's features at inducing inputs; a file holds those inputs."""

    bound: ClassVar[str] = "upper"
    shell: ClassVar[str] = "functional"
    points: Any  # Z: inputs as the network takes them
    precision: Tensor  # diag A, (p,)
    basis: Tensor  # U l^-½, (m·c, k)

    def __str__(self) -> str:
        return "inducing points"

    def to(self, device: torch.device) -> Inducing:
        """The same on a device."""
        moved = tree.moved(self.points, device)
        return replace(self, points=moved, precision=self.precision.to(device), basis=self.basis.to(device))

    def scale(self, prior: Gaussian) -> Tensor:
        """c, 0-dim, of a prior that is c times that of the features; differentiable."""
        return scale_of(prior, self.precision)

    @property
    def size(self) -> int:
        """Features, the zero one too."""
        return self.basis.shape[1] + 1

    def resolved(self, probe: Probe, factor: Factor) -> Inducing:
        """The structure as it will be fitted to such data, or an error where it cannot be."""
        return self

    def start(self, tangent: TangentModel, likelihood: Likelihood, factor: Factor, probe: Probe) -> Accumulator:
        """An empty accumulator for a pass over the data."""
        terms = len(likelihood.curvature_weights(factor.kind))
        return FeatureSum(tangent, self.features(tangent), self.size, terms)

    def features(self, tangent: TangentModel) -> Features:
        """x -> f (n, ..., c) and ψ (k, n, ..., c)."""
        there = Side(tangent, self.points, BUDGET, self.precision)

        def made(x: Any) -> tuple[Tensor, Tensor]:
            here = replace(there, x=x)
            cross = products(there, here).reshape(len(self.basis), -1)  # (m·c, n·...·c)
            psi = torch.cat([self.basis.mT @ cross, cross.new_zeros(1, cross.shape[1])])
            return here.f, psi.reshape(self.size, *here.f.shape)

        return made

    def outside(self, tangent: TangentModel, x: Any, psi: Tensor, joint: bool) -> Tensor:
        """k(x, x) − ψ ψᵀ, (n, ..., c, c) or (n, ..., c, n, ..., c); what rounding leaves below zero is zero."""
        here, flat = Side(tangent, x, BUDGET, self.precision), psi.flatten(2)
        shape = here.f.shape
        if joint:
            side = shape.numel()
            rest = products(here, None).reshape(side, side) - psi.flatten(1).mT @ psi.flatten(1)
            return positive(rest).reshape(*shape, *shape)
        rest = own_products(here) - torch.einsum("kna,knb->nab", flat, flat)  # of all positions of an example
        q, c = shape[1:-1].numel(), shape[-1]
        each = rest.reshape(-1, q, c, q, c).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)  # (n, q, c, c)
        return positive(each.contiguous()).reshape(*shape, c)

    def seen(self, tangent: TangentModel, away: Tensor) -> Tensor:
        """V A a = (U l^-½)ᵀ J_Z a for a vector of weights a (p,), and what no feature sees of ‖a‖_A: (k,)."""
        _, pushed = tangent.jvps(self.points, away.to(tangent.dtype)[None])
        along = self.basis.mT @ pushed.reshape(-1).to(self.basis)
        rest = (away.square() * self.precision).sum() - along.square().sum()
        return torch.cat([along, rest.clamp(min=0).sqrt().reshape(1)])

    def operator(self, state: State, weights: Tensor) -> Any:
        """Σ_h w_h Σ ψᵀΛ_hψ, (k, k)."""
        return Full("primal").operator(state, weights)

    def keeps(self, layout: tree.Layout, parts: tuple[Part, ...], terms: int, factor: Factor) -> Kept:
        """What the sums and the basis of a state must look like, by their names: files are held to it."""
        double = all(t.dtype == torch.float64 and bool(torch.isfinite(t).all()) for t in (self.precision, self.basis))
        shapes = self.basis.ndim == 2 and self.precision.shape == (layout.size,) and bool((self.precision > 0).all())
        if parts or not double or not shapes:
            raise InvalidValue(f"features {tuple(self.basis.shape)} and precisions of {layout.size} weights do not fit")
        return {"gram": Expected(((terms, self.size, self.size),), squares=True, gram=True)}, {}

    def coverage(self, parts: tuple[Part, ...], tangent: TangentModel) -> dict[str, str]:
        """How each parameter is treated, in words."""
        return dict.fromkeys(tangent.layout.names, f"{self.basis.shape[1]} features of the whole network")


def induced(tangent: TangentModel, points: Any, prior: Gaussian, ranks: Ranks) -> Inducing:
    """The features of inducing inputs under a prior; those of rank 0, where ranks differ in eigenvectors."""
    precision = prior.operator().dense().detach().clone()
    side = Side(tangent, points, BUDGET, precision)
    q = side.f.numel()
    found = dict(zip(("values", "vectors"), torch.linalg.eigh(products(side, None).reshape(q, q)), strict=True))
    values, vectors = (found if ranks.agrees(found) else ranks.lead(found)).values()
    if not bool(values[-1] > 0):
        raise InvalidValue("no output at the inducing inputs depends on the selected weights, so there is no feature")
    kept = values > LEAST * q * values[-1]
    return Inducing(points, precision, vectors[:, kept] / values[kept].sqrt())


def positive(matrix: Tensor) -> Tensor:
    """Symmetric matrices (..., q, q) with eigenvalues below zero set to zero."""
    values, vectors = torch.linalg.eigh(0.5 * (matrix + matrix.mT))
    return (vectors * values.clamp(min=0).unsqueeze(-2)) @ vectors.mT
