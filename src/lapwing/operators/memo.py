"""What an operator has worked out of H, and shares with all that `scale` and `shift` make of it, whatever s and d.

One class a kind of operator, one field a thing: no name can meet another. A memo is filled on demand, and is all of an
operator that changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(eq=False)
class Grouping:
    """What follows from the index of a Diagonal alone; diagonals of other values that share the index share it."""

    counts: Tensor | None = None  # entries of each group, (g,)


@dataclass(eq=False)
class BlockGroups:
    """For the last grouping that a shift had, the groups of each block's entries."""

    grouping: Grouping | None = None
    groups: list[Tensor | int] = field(default_factory=list)


@dataclass(eq=False)
class Spectrum:
    """Eigenvalues in one unit of D; of a Kronecker product with (l, U_A, m, U_B)."""

    eigenvalues: Tensor | None = None
    eigenvectors: tuple[Tensor, Tensor | None, Tensor, Tensor] | None = None


@dataclass(eq=False)
class Factorizations:
    """Of one matrix H: a spectrum for each unit of D, and the jitter that Cholesky factors took."""

    jitter: float = 0.0
    spectra: dict[int | None, Spectrum] = field(default_factory=dict)  # by Diagonal.unit_key
    whitened: dict[int, Any] = field(default_factory=dict)  # what is kept of LᵀHL, by Whitening.key

    def spectrum(self, d: Any) -> Spectrum:
        """That in the unit of a Diagonal, or in none."""
        return self.spectra.setdefault(None if d is None else d.unit_key, Spectrum())


@dataclass(eq=False)
class KroneckerFactors(Factorizations):
    """Of B ⊗ A."""

    inputs: Tensor | None = None  # A in float64


@dataclass(eq=False)
class RowGrams(Factorizations):
    """Of rows R."""

    grams: dict[tuple[int, int | None, int | None], Tensor] = field(default_factory=dict)  # (g, m, m), by grouping
