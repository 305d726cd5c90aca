"""A Gaussian prior whose weights are not independent:  θ_b ~ N(m_b, C_b/λ_b) for blocks b of weights, N(m, 1/λ) for
all others.

    Correlated(covariance={"fc1.*": C})         C (q, q), of the weights that a pattern matches, in their order
    Correlated(covariance={"fc1.*": (B, A)})    B ⊗ A of a layer: Cov[W_oi, W_o'i'] = B_oo' A_ii'
    Correlated(covariance=C)                    jointly normal: C (p, p) of all weights

W (o, i) is a weight with all but its first dimension as one, and the bias as its last column if the pattern matches it.

With C_b = L_b L_bᵀ, φ = L⁻¹(θ − m) is N(0, 1/λ): A = L⁻ᵀ diag(λ) L⁻¹ is diagonal in whitened coordinates, where a
posterior under it is made (`operators/whitened.py`). So a search tunes λ, and C stays. MacKay's ‖θ_g − m_g‖² is ‖φ_g‖².
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from lapwing import given, tree
from lapwing.errors import InvalidValue, Unsupported
from lapwing.operators import WhiteBlock, Whitened, Whitening, linalg, whiten
from lapwing.priors.base import Prior
from lapwing.priors.elementwise import standard_normal
from lapwing.priors.gaussian import Gaussian
from lapwing.tree import Layout

ROUNDING = 1e-6  # by how much a covariance may fail to be symmetric, relative to its largest entry


@dataclass(frozen=True, eq=False)
class Correlated(Gaussian):
    """`covariance` of some weights, over `precision` λ; `per` and `mean` as in Gaussian, a block within one group."""

    unsaved: ClassVar[tuple[str, ...]] = (*Gaussian.unsaved, "root")
    settings: ClassVar[tuple[str, ...]] = (*Gaussian.settings, "covariance")
    independent: ClassVar[bool] = False
    covariance: Any = None  # {glob: C or (B, A)}, or C
    root: Whitening | None = field(default=None, kw_only=True)  # L, once bound

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.covariance is None:
            raise InvalidValue(
                "covariance is {glob: C}, {glob: (B, A)} or one matrix C for all weights; for independent weights use "
                "lw.priors.Gaussian"
            )
        blocks = self.covariance if isinstance(self.covariance, Mapping) else {"*": self.covariance}
        if not blocks:
            raise InvalidValue("covariance is an empty mapping; give {glob: C} or {glob: (B, A)}")
        object.__setattr__(self, "covariance", {name: _checked(name, c) for name, c in blocks.items()})

    def bind(self, layout: Layout, device: torch.device | None = None) -> Correlated:
        """Fix groups and blocks for a network."""
        bound = super().bind(layout, device)
        root = _whitening(self.covariance, layout, device)
        for block in root.blocks:
            if not isinstance(bound.groups().groups_at(block.index), int):
                raise InvalidValue(
                    f"the weights of covariance {block.name!r} lie in several groups of per={self.per!r}; give per= "
                    "that keeps them together, such as 'all'"
                )
        return replace(bound, root=root)

    @property
    def whitening(self) -> Whitening:
        """L, of a bound prior."""
        self._bound()
        assert self.root is not None
        return self.root

    # -- the density ----------------------------------------------------------------------------------------------

    def operator(self) -> Whitened:
        """A = L⁻ᵀ diag(λ) L⁻¹."""
        return Whitened(self.groups(), self.whitening)

    def scatter(self, vector: Tensor) -> Tensor:
        """‖φ_g‖² of whitened weights, for each group, (g,)."""
        white = self.whitening.solve(vector.to(torch.float64) - self.mean_vector())
        return self.groups().sums(white.square())

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        noise = standard_normal((n, self._bound().size), generator, self.precision)
        return self.mean_vector() + self.whitening.times(noise / self.groups().dense().detach().sqrt())

    # -- what the search asks ---------------------------------------------------------------------------------------

    def stretched(self, v: Tensor, s: Tensor) -> Whitened:
        groups = self.groups()
        return Whitened(replace(groups, values=groups.values.detach() * s), self.whitening)

    def mean_curvature(self, curvature: Any) -> Tensor:
        return linalg.traces(whiten(curvature, self.whitening), self.groups()) / self.counts()

    def balanced(self, squares: Tensor, variance: float) -> dict[str, Tensor]:
        """None: squares of columns of J do not tell those of J L."""
        return {}

    def facts(self) -> dict[str, Tensor]:
        groups = {} if self.index is None else {"groups": self.index}
        return {**self.hyperparameters, **groups, "mean": self.mean_vector(), **_named(self.covariance)}


def check_independent(prior: Prior, what: str) -> None:
    """Raise on a prior with correlated weights, for what needs one precision for each weight."""
    if not prior.independent:
        raise Unsupported(
            f"{what} needs a prior under which weights are independent, and those of {type(prior).__name__} are not; "
            "use lw.priors.Gaussian there, or lw.laplace with structure='full' or 'block'"
        )


def _checked(name: str, c: Any) -> Any:
    """A covariance, or its two factors, in float64; an error for what is none."""
    if isinstance(c, (tuple, list)) and len(c) == 2:
        return tuple(_matrix(f"{which} of covariance {name!r}", one) for which, one in zip("BA", c, strict=True))
    return _matrix(f"covariance {name!r}", c)


def _matrix(what: str, c: Any) -> Tensor:
    c = given.real(c, what).detach()
    if c.ndim != 2 or c.shape[0] != c.shape[1] or not len(c):
        raise InvalidValue(f"{what} must be a square matrix, got shape {tuple(c.shape)}")
    if not bool(torch.isfinite(c).all()) or float((c - c.mT).abs().max()) > ROUNDING * float(c.abs().max()):
        raise InvalidValue(f"{what} must be symmetric and finite; give C = (C + C.mT) / 2")
    if bool(torch.linalg.cholesky_ex(c)[1].any()):
        least = float(torch.linalg.eigvalsh(c)[0])
        raise InvalidValue(f"{what} must be positive definite; its least eigenvalue is {least:.3g}")
    return c


def _whitening(covariance: Mapping[str, Any], layout: Layout, device: torch.device | None) -> Whitening:
    """L of a network, block by block."""
    blocks: list[WhiteBlock] = []
    owner: dict[str, str] = {}
    for pattern, c in covariance.items():
        names = tree.chosen(pattern, layout.names)
        if not names:
            raise InvalidValue(f"covariance {pattern!r} matches no selected parameter; they are {list(layout.names)}")
        for name in names:
            if name in owner:
                raise InvalidValue(f"parameter {name} matches two covariances, {owner[name]!r} and {pattern!r}")
            owner[name] = pattern
        factors = (torch.ones(1, 1, dtype=torch.float64), c) if isinstance(c, Tensor) else c
        index = _flat(names, layout) if isinstance(c, Tensor) else _as_matrix(pattern, names, layout)
        sizes = [len(one) for one in factors]
        if list(index.shape) != sizes:
            kind = "" if isinstance(c, Tensor) else f" (a matrix {tuple(index.shape)})"
            raise InvalidValue(
                f"covariance {pattern!r} is of {' x '.join(map(str, sizes))} weights, and {names} have "
                f"{index.numel()}{kind}; give B (o, o) and A (i, i), or C of all of them"
            )
        outputs, inputs = (torch.linalg.cholesky(one).to(device) for one in factors)
        blocks.append(WhiteBlock(index.reshape(-1).to(device), outputs, inputs, pattern))
    return Whitening(layout.size, tuple(blocks), _key(covariance))


def _flat(names: list[str], layout: Layout) -> Tensor:
    """The entries of some parameters, in order, (1, q)."""
    slices = layout.slices()
    return torch.cat([torch.arange(slices[n].start, slices[n].stop) for n in names]).unsqueeze(0)


def _as_matrix(pattern: str, names: list[str], layout: Layout) -> Tensor:
    """The entries of a layer's weight as a matrix, with the bias as its last column, (o, i)."""
    weights = [n for n in names if len(layout.shapes[n]) > 1]
    biases = [n for n in names if len(layout.shapes[n]) == 1]
    rows = layout.shapes[weights[0]][0] if weights else 0
    masked = [n for n in names if n in layout.masks]
    if len(weights) != 1 or len(biases) > 1 or masked or any(layout.numel(n) != rows for n in biases):
        raise InvalidValue(
            f"a covariance (B, A) is of one weight matrix, with or without its bias, whole; {pattern!r} matches "
            f"{names}: name one layer, or give C of all of them"
        )
    parts = [_flat([n], layout).reshape(rows, -1) for n in (*weights, *biases)]
    return torch.cat(parts, 1)


def _named(covariance: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a mapping of covariances, by name."""
    whole = {f"covariance of {name}": c for name, c in covariance.items() if isinstance(c, Tensor)}
    pairs = {k: c for k, c in covariance.items() if not isinstance(c, Tensor)}
    return whole | {f"{which} of {name}": one for name, c in pairs.items() for which, one in zip("BA", c, strict=True)}


def _key(covariance: Mapping[str, Any]) -> int:
    """A name for these covariances, under which what is whitened by them is kept."""
    return hash(tuple(tree.fingerprints(_named(covariance)).items()))
