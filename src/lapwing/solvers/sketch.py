"""A random projection S (s, p) that keeps lengths and angles, by the fast Hartley transform H:

    S v = √(p/s) · (H D v) at s random places,     D random signs,  H v = Re Fv − Im Fv,  F unitary Fourier transform

H is orthogonal, so S is too where s = p; E‖S v‖² = ‖v‖². O(p log p) a vector, and p bytes to keep. Source: Ailon and
Chazelle 2009; Tropp 2011.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.errors import InvalidValue


@dataclass(frozen=True, eq=False)
class Hartley:
    """A random sketch of vectors of p numbers onto s of them."""

    signs: Tensor  # D (p,), int8
    places: Tensor  # (s,)

    @classmethod
    def drawn(cls, size: int, onto: int, generator: torch.Generator, device: torch.device) -> Hartley:
        """A sketch from `size` numbers onto `onto`, with signs and places drawn."""
        if not 1 <= onto <= size:
            raise InvalidValue(f"a sketch of {size} numbers has from 1 to {size} of them, got {onto}")
        signs = torch.randint(0, 2, (size,), generator=generator, device=generator.device, dtype=torch.int8) * 2 - 1
        places = torch.randperm(size, generator=generator, device=generator.device)[:onto]
        return cls(signs.to(device), places.to(device))

    def __call__(self, v: Tensor) -> Tensor:
        """S v, (..., p) -> (..., s)."""
        p, s = len(self.signs), len(self.places)
        z = torch.fft.rfft(v * self.signs, norm="ortho")
        mirrored = self.places > p // 2  # F at p − i is the conjugate of F at i
        at = z[..., torch.where(mirrored, p - self.places, self.places)]
        return (at.real - torch.where(mirrored, -1, 1) * at.imag) * (p / s) ** 0.5
