"""Variances over width:  w ~ N(0, 1/(λ·fan_in)), so that a unit's input keeps its variance however wide the layer
before it is; in the limit of many units the network is a Gaussian process (Neal 1996; Matthews et al. 2018).

    A = diag(λ_g · u_i),        u_i = fan_in of the parameter of w_i; 1 for biases and other vectors
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.operators import Diagonal
from lapwing.priors.gaussian import Gaussian


@dataclass(frozen=True, eq=False)
class WidthScaled(Gaussian):
    """`precision` is λ; `per` and `mean` as in Gaussian."""

    @property
    def unit(self) -> Tensor:
        """fan_in of each weight's parameter, (p,)."""
        layout = self._bound()
        each = [layout.shapes[name][1:].numel() if len(layout.shapes[name]) > 1 else 1 for name in layout.names]
        counts = torch.tensor([layout.numel(name) for name in layout.names])
        return torch.tensor(each).repeat_interleave(counts).to(self.precision)

    def operator(self) -> Diagonal:
        return Diagonal(self.precision.reshape(-1), self._bound().size, self.index, self.unit, self.grouping)

    def scatter(self, vector: Tensor) -> Tensor:
        """Σ_{i in g} u_i (θ_i − m_i)² for each group, (g,)."""
        return self.groups().sums(self.unit * (vector.to(torch.float64) - self.mean_vector()).square())
