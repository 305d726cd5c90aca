"""Passes over the same data: one that is over other data than the fit's is an error.

What is compared are sums that do not depend on the order: the number of examples, a digest of the targets, and the
likelihood's statistics of the network's outputs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lapwing import tree
from lapwing.curvature.state import differing
from lapwing.errors import InvalidValue

if TYPE_CHECKING:
    from lapwing.curvature.data_root import DataRoot


@dataclass
class Watch:
    """One pass, held to the data of the fit: their number, targets and the network's outputs, in any order."""

    root: DataRoot  # what the pass is of: the fit's number, digest and statistics
    n: int = 0
    targets: int = 0
    statistics: dict[str, Tensor] = field(default_factory=dict)

    def see(self, f: Tensor, y: Tensor) -> None:
        """Outputs (m, c), one row a position, and targets."""
        if not bool(torch.isfinite(f).all()):
            raise InvalidValue(
                f"the network's outputs hold NaN or infinite values in batch {self.root.counter['batch']} of pass "
                f"{self.root.passes} over the data, though not in the fit: matrix-free needs the same data each "
                "pass"
            )
        self.n += len(y)
        self.targets = (self.targets + tree.digest(y)) % 2**64
        for key, value in self.root.likelihood.statistics(f, self.root.likelihood.rows(y, len(f))).items():
            self.statistics[key] = self.statistics[key] + value if key in self.statistics else value

    def check(self) -> None:
        """Raise unless the pass was over the data of the fit, on all ranks together."""
        mine = [self.statistics.get(key, torch.zeros_like(value)) for key, value in self.root.statistics.items()]
        counts = torch.tensor([self.n, (self.targets + 2**63) % 2**64 - 2**63])  # sums wrap modulo 2⁶⁴
        *found_sums, counts = self.root.ranks.total([*mine, counts], "a pass over the data")
        statistics = dict(zip(self.root.statistics, found_sums, strict=True))
        n, targets = int(counts[0]), int(counts[1]) % 2**64
        found = ""
        if n != self.root.n:
            found = f"{n} examples, not {self.root.n}"
        elif self.root.targets is not None and targets != self.root.targets:
            found = "other targets"
        else:
            apart = differing(statistics, self.root.statistics)
            found = f"another {apart} of the network's outputs" if apart else ""
        if found:
            raise InvalidValue(
                f"matrix-free needs the same data each pass: pass {self.root.passes} had {found}; give a loader "
                "without augmentation, dropped batches or sampling with replacement (shuffling does no harm)"
            )
