"""Random numbers of many chains, a generator for each, so that a chain is the same whatever company it has: here, or
on other ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.distributed import ALONE, Ranks


@dataclass(frozen=True)
class Streams:
    """One generator a chain; numbers are float64, (k, ...), on one device. `ranks` have the other chains."""

    generators: tuple[torch.Generator, ...]
    device: torch.device
    ranks: Ranks = ALONE

    @staticmethod
    def of(generator: torch.Generator, chains: int, device: torch.device, ranks: Ranks = ALONE) -> Streams:
        """Seeded by a generator, which moves on; of this rank's share of the chains."""
        seeds = torch.randint(2**62, (chains,), generator=generator, device=generator.device).tolist()
        mine = seeds[ranks.share(chains)]
        return Streams(tuple(torch.Generator().manual_seed(seed) for seed in mine), device, ranks)

    def of_all(self, acceptance: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        """What the chains of all ranks have: acceptances (k,) and places (k, d)."""
        if self.ranks.alone:
            return acceptance, q
        both = self.ranks.whole(torch.cat([acceptance.to(q).unsqueeze(1), q], 1), "the warm-up of chains")
        return both[:, 0].contiguous(), both[:, 1:].contiguous()

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
