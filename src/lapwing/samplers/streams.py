"""Random numbers of many chains, a generator for each, so that a chain is the same whatever company it has."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Streams:
    """One generator a chain; numbers are float64, (k, ...), on one device."""

    generators: tuple[torch.Generator, ...]
    device: torch.device

    @staticmethod
    def of(generator: torch.Generator, chains: int, device: torch.device) -> Streams:
        """Seeded by a generator, which moves on."""
        seeds = torch.randint(2**62, (chains,), generator=generator, device=generator.device).tolist()
        return Streams(tuple(torch.Generator().manual_seed(seed) for seed in seeds), device)

    def normal(self, *shape: int) -> Tensor:
        """Standard normal numbers."""
        return torch.stack([torch.randn(shape, generator=g, dtype=torch.float64) for g in self.generators]).to(
            self.device
        )

    def uniform(self, *shape: int) -> Tensor:
        """Numbers in [0, 1)."""
        return torch.stack([torch.rand(shape, generator=g, dtype=torch.float64) for g in self.generators]).to(
            self.device
        )

    def index(self, n: int, count: int) -> Tensor:
        """Whole numbers below n, (k, count), with repetition."""
        return torch.stack([torch.randint(n, (count,), generator=g) for g in self.generators]).to(self.device)

    def state(self) -> Tensor:
        """Where the generators are, (k, bytes)."""
        return torch.stack([g.get_state() for g in self.generators])

    def resume(self, state: Tensor) -> None:
        """Go on from there."""
        for g, mine in zip(self.generators, state, strict=True):
            g.set_state(mine.clone())  # set_state of torch 2.13 crashes on a view
