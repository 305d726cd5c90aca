"""The neural g-prior: θ ~ N(m, A⁻¹),  A = diag(λ_g · h_d),  h_d = [G]_dd,  G the curvature at unit noise (Eq. 23).

The posterior is that of an isotropic prior after each column of the Jacobian is divided by its root second moment √h_d;
so nothing changes under J → J·diag(c) (units of an input, a ReLU layer scaled up and the next one down).

- h is taken at *unit* noise, so A moves with neither the noise nor its own tuning: over the data a weight adds
  Σ_n J_nd² / (λ h_d) = 1/λ to the prior variance of f, whatever σ. Zellner's form, A = diag(H)·g⁻¹ at noise σ, is this
  one with λ = 1/(g σ²): the same family, with the same optimum when both are tuned.
- A *dead* weight (h_d = 0: a ReLU unit that no example reaches) would have infinite prior variance. It is dropped: held
  at its trained value with next to no variance (1e-30 of the least prior variance in its layer), no term in the
  evidence, and a line in coverage. h_d counts as 0 below (8 ε)² of its layer's largest, ε the rounding of the network's
  dtype (float32 or better), and a whole layer's below (8 ε)² of the network's largest, ε that of float64.
- A *nearly* dead weight has a very wide prior. floor=f lifts h_d to at least f times the mean of its layer, for dead
  weights too. That breaks the invariance, so it is off by default.
- In a Kronecker block diag(B ⊗ A) = diag(B) ⊗ diag(A): dropping and the floor act on each factor, so it stays one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import singledispatch
from typing import Any, ClassVar

import torch
from torch import Tensor

from lapwing.errors import InvalidValue
from lapwing.operators import Blocks, Diagonal, KroneckerPlusDiagonal, linalg
from lapwing.operators.memo import Grouping
from lapwing.priors.gaussian import Gaussian
from lapwing.tree import Layout, layer_of

DROPPED = 1e30  # times the largest second moment of a layer: the precision, over λ, of a weight that is dropped
ROUNDING = 8.0  # epsilons of the largest column that count as no column


@dataclass(frozen=True, eq=False)
class GPrior(Gaussian):
    """`precision` is λ; `per` and `mean` as in Gaussian. Bound to a network by `bind`, to its curvature by `at`."""

    unsaved: ClassVar[tuple[str, ...]] = (*Gaussian.unsaved, "held")
    settings: ClassVar[tuple[str, ...]] = (*Gaussian.settings, "floor")
    of_curvature: ClassVar[bool] = True
    floor: float = 0.0
    unit: Tensor | None = None  # h (p,), once at a curvature; huge where dropped
    dropped: Tensor | None = None  # (p,) of bool
    held: Tensor | None = None  # θ* (p,): where dropped weights stay

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.floor, bool) or not isinstance(self.floor, (int, float)) or not 0 <= self.floor <= 1:
            raise InvalidValue(f"floor is a fraction of the mean second moment, from 0 (off) to 1; got {self.floor!r}")

    def at(self, curvature: Any, theta: Tensor, eps: float = torch.finfo(torch.float64).eps) -> GPrior:
        """This prior with the second moments of a curvature (an operator, at unit noise) and the trained weights."""
        unit, dropped = second_moments(curvature, self._bound(), self.floor, eps)
        return replace(self, unit=unit, dropped=dropped, held=theta.detach().to(torch.float64), grouping=Grouping())

    def put_back(self, theta: Tensor) -> GPrior:
        """As a file has it, at the trained weights: with the second moments that it was saved with."""
        (unit, dropped), size = self._placed(), (self._bound().size,)
        if unit.shape != size or dropped.shape != size or dropped.dtype != torch.bool:
            raise InvalidValue(f"a g-prior over {size[0]} weights has {tuple(unit.shape)} second moments")
        if unit.dtype != torch.float64 or not bool((torch.isfinite(unit) & (unit > 0)).all()):
            raise InvalidValue("the second moments of a g-prior must be positive, finite and float64")
        held, device = theta.detach().to(torch.float64), theta.device
        return replace(self, unit=unit.to(device), dropped=dropped.to(device), held=held, grouping=Grouping())

    def counts_dropped(self) -> dict[str, int]:
        """How many weights of each parameter are dropped; only parameters with some."""
        _, dropped = self._placed()
        found = {name: int(dropped[s].sum()) for name, s in self._bound().slices().items()}
        return {name: n for name, n in found.items() if n}

    def _placed(self) -> tuple[Tensor, Tensor]:
        if self.unit is None or self.dropped is None:
            raise InvalidValue(
                "this g-prior has not seen a curvature yet; use la.prior, or lw.posterior.placed(prior, state)"
            )
        return self.unit, self.dropped

    # -- what the flow needs --------------------------------------------------------------------------------------

    def operator(self) -> Diagonal:
        unit, _ = self._placed()
        return Diagonal(self.precision.reshape(-1), self._bound().size, self.index, unit, self.grouping)

    def mean_vector(self) -> Tensor:
        """m, (p,); a dropped weight's is its trained value."""
        mean = super().mean_vector()
        if self.dropped is None or self.held is None:
            return mean
        return torch.where(self.dropped, self.held, mean)

    def scatter(self, vector: Tensor) -> Tensor:
        """Σ_{d in g} h_d (θ_d − m_d)² for each group, (g,), without the dropped."""
        unit, dropped = self._placed()
        square = (vector.to(torch.float64) - self.mean_vector()).square()
        return self.groups().sums(torch.where(dropped, 0.0, unit * square))

    def log_density(self, v: Tensor) -> Tensor:
        """log N(θ; m, A⁻¹) of the weights that are not dropped."""
        live = (~self._placed()[1]).to(torch.float64)
        return 0.5 * (live * (self.operator().dense() / (2 * math.pi)).log()).sum() - self.price(v)


@singledispatch
def second_moments(op: Any, layout: Layout, floor: float, eps: float) -> tuple[Tensor, Tensor]:
    """h (p,) of a curvature, floored or raised where dead, and which weights are dropped."""
    h, dead = linalg.diagonal(op).detach().clone(), torch.zeros(op.size, dtype=torch.bool)
    dead, top = dead.to(h.device), float(h.max())
    for columns in _layers(layout):
        own = h[columns]
        h[columns], dead[columns] = _none(own, top) if _is_rounding(own, top) else _raised(own, floor, eps)
    return h, dead


@second_moments.register
def _(op: Blocks, layout: Layout, floor: float, eps: float) -> tuple[Tensor, Tensor]:
    moments = [linalg.diagonal(part).detach() for part in op.parts]
    top = max((float(h.max()) for h in moments), default=0.0)
    found = [
        _none(h, top) if _is_rounding(h, top) else _of_block(part, floor, eps)
        for part, h in zip(op.parts, moments, strict=True)
    ]
    return op.join([h for h, _ in found]), op.join([dead for _, dead in found])


def _is_rounding(h: Tensor, top: float) -> bool:
    """Whether a layer has no second moments beside the network's largest: what is there would give it a prior variance
    without bounds."""
    return 0 < float(h.max()) <= (ROUNDING * torch.finfo(torch.float64).eps) ** 2 * top


def _none(h: Tensor, top: float) -> tuple[Tensor, Tensor]:
    return torch.full_like(h, DROPPED * top), torch.ones_like(h, dtype=torch.bool)


@singledispatch
def _of_block(op: Any, floor: float, eps: float) -> tuple[Tensor, Tensor]:
    return _raised(linalg.diagonal(op).detach(), floor, eps)


@_of_block.register
def _(op: KroneckerPlusDiagonal, floor: float, eps: float) -> tuple[Tensor, Tensor]:
    e, dead_e = _raised(op.input_squares.detach(), floor, eps)  # (b, i)
    u, dead_u = _raised(op.b.detach().diagonal(dim1=-2, dim2=-1), floor, eps)  # (b, o)
    h = op.factor.detach() * u.unsqueeze(-1) * e.unsqueeze(-2)
    return h.reshape(-1), (dead_u.unsqueeze(-1) | dead_e.unsqueeze(-2)).reshape(-1)


def _raised(h: Tensor, floor: float, eps: float) -> tuple[Tensor, Tensor]:
    """One layer's (or factor's) second moments: at least the floor, and huge where there is none."""
    if bool((h < 0).any()):
        raise InvalidValue(
            f"the g-prior needs second moments, and {int((h < 0).sum())} of this curvature's diagonal are negative; "
            "use factor='exact', 'monte_carlo' or 'empirical'"
        )
    h = h.clamp(min=floor * float(h.mean()))
    top = float(h.max())
    dead = h <= (ROUNDING * eps) ** 2 * top
    return torch.where(dead, DROPPED * (top or 1.0), h), dead


def _layers(layout: Layout) -> list[Tensor]:
    """The entries of each module's parameters."""
    owners: dict[str, list[Tensor]] = {}
    for name, s in layout.slices().items():
        owners.setdefault(layer_of(name), []).append(torch.arange(s.start, s.stop))
    return [torch.cat(found) for found in owners.values()]
