"""The linear system of a streamed operator: G + D, G = RᵀWR known by products alone, each a pass over data.

    (I + D^-½ G D^-½) u = b,      u = D^½ z          solved in the unit of D, preconditioned by P = Ĝ + D

Ĝ is an operator near G. Where the data are spread over ranks, so are columns: each rank holds its share of right-hand
sides and all that a solve keeps of it, in groups that fit the memory budget; only products see the columns of all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from lapwing.distributed import Ranks
from lapwing.errors import InvalidValue, NotConverged, Unsupported
from lapwing.operators import linalg
from lapwing.operators.diagonal import Diagonal
from lapwing.solvers import Solution, cg
from lapwing.solvers.product import Product
from lapwing.solvers.sgd import sgd

OWN_VECTORS = 20  # that a solve holds for each column of this rank's own
OTHERS_VECTORS = 4  # and for each column of other ranks
LEAST_MINIBATCHES = 64  # of a round of SGD, which is of whole passes


@dataclass(frozen=True)
class SolvePlan:
    """How solves are made."""

    samples: int
    solver: str  # "cg" or "sgd"
    preconditioner: str  # its name
    tolerance: float  # of ‖b − M x‖ / ‖b‖, in the unit of D; for samples of the data's part of b
    max_steps: int  # of CG or Lanczos, or passes' worth of minibatches
    seed: int
    memory_budget: int


class Root(Protocol):
    """R (m, p), cut by weight into R_h, by products."""

    @property
    def size(self) -> int:
        """The number of parameters p."""

    @property
    def ranks(self) -> Ranks:
        """That the data, and the columns v, are spread over."""

    @property
    def passes(self) -> int:
        """Over the data, so far."""

    def product(self, v: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """RᵀWR v (k, p) and ‖R_h v‖² (k, h), for this rank's columns."""

    @property
    def batches(self) -> int:
        """In a pass."""

    def minibatches(self, weights: Tensor) -> Iterator[Product]:
        """Products whose mean is RᵀWR, without end."""

    def noise(self, columns: Tensor, seed: int) -> Tensor:
        """R_hᵀ e for standard normal e, (h, k, p), for this rank's columns, given by their numbers."""

    def amplitudes(self, weights: Tensor) -> Tensor:
        """What to multiply the noise by, so that its sum over h has the covariance RᵀWR: √w, where all are positive."""

    def diagonal(self) -> Tensor:
        """diag R_hᵀR_h, (h, p)."""


@dataclass(frozen=True, eq=False)
class System:
    """RᵀWR + D, with R by passes over the data."""

    root: Root | None  # None where the data are not at hand: then only what is remembered can be had
    weights: Tensor  # W by column, (h,)
    near: linalg.Operator  # Ĝ, near RᵀWR
    plan: SolvePlan
    diag: Diagonal | None = None  # D; the verbs that need M⁻¹ need it

    @property
    def size(self) -> int:
        """p."""
        return self.near.size

    def reads(self) -> Root:
        """R; an error where the data are not at hand."""
        if self.root is None:
            raise InvalidValue(
                "this reads the training data again, which a file does not hold; give them: lw.load(path, model, "
                "data=loader). Predictions and draws under the saved prior and noise need none"
            )
        return self.root

    def precision(self) -> Diagonal:
        """D, without gradient; an error where there is none."""
        if self.diag is None:
            raise Unsupported("Rᵀ W R alone is singular; shift it by a prior precision first")
        return replace(self.diag, values=self.diag.values.detach())

    @cached_property
    def d(self) -> Tensor:
        """D's diagonal, (p,)."""
        return self.precision().dense()

    @cached_property
    def close(self) -> tuple[linalg.Operator, str]:
        """P = Ĝ + D and its name; where Ĝ cannot absorb D exactly (a Kronecker product and one precision a weight), its
        diagonal does."""
        found = linalg.shift(self.near, self.precision())
        try:
            linalg.solve(found, torch.zeros(1, self.size, dtype=torch.float64, device=self.d.device))
        except Unsupported:
            return Diagonal(linalg.diagonal(self.near) + self.d, self.size), f"diagonal of {self.plan.preconditioner}"
        return found, self.plan.preconditioner

    # -- products in the unit of D ----------------------------------------------------------------------------------

    def gram(self, v: Tensor) -> Tensor:
        """RᵀWR v."""
        return self.reads().product(v, self.weights.detach())[0]

    def whitened(self, gram: Product) -> Product:
        """u ↦ u + D^-½ G D^-½ u, from products with G: the system in the unit of D."""
        scale = self.d.rsqrt()
        return lambda u: u + scale * gram(scale * u).to(u)

    def precondition(self, r: Tensor) -> Tensor:
        """D^½ P⁻¹ D^½ r for r (k, p), in the unit of D."""
        root = self.d.sqrt()
        return root * linalg.solve(self.close[0], root * r) if len(r) else r

    def solved(self, b: Tensor, start: Tensor | None = None, share: float = 1.0) -> Solution:
        """u with (I + D^-½ RᵀWR D^-½) u = b to a residual of tolerance·share·‖b‖, columns in groups that fit the memory
        budget; raises unless converged. b and u are this rank's, residuals those of all."""
        plan, ranks, groups = self.plan, self.reads().ranks, self.groups(len(b), OWN_VECTORS, OTHERS_VECTORS)
        starts = [None] * len(groups) if start is None else start.split(groups)
        tolerance, columns = share * plan.tolerance, zip(b.split(groups), starts, strict=True)
        with ranks.sharing_errors("a solve"):
            found = [self._solve(some, x0, tolerance) for some, x0 in columns]
        out = Solution(
            torch.cat([one.x for one in found]),
            ranks.whole(torch.cat([one.residual for one in found]), "residuals"),
            max(one.steps for one in found),
            not ranks.anywhere(not all(one.converged for one in found), "whether solves converged"),
            sum(one.products for one in found),
        )
        if not out.converged:
            residual = float(out.residual.max()) / share
            raise NotConverged(
                f"{plan.solver} stopped at a residual of {residual:.2g} after {out.steps} steps, "
                f"above {plan.tolerance:g}; use preconditioner='nystrom' with a higher rank, a larger prior precision, "
                "more max_steps, a looser tolerance, or a network in float64"
            )
        return out

    def at_once(self, held: int, passing: int) -> int:
        """How many columns of all ranks fit the memory budget, by the vectors for each of one's own, and of others'."""
        ranks, room = self.reads().ranks.size, self.plan.memory_budget // (8 * self.size)
        own = room // (held + (ranks - 1) * passing)
        return ranks * own if own else max(1, 1 + (room - held) // passing)

    def groups(self, k: int, held: int, passing: int) -> list[int]:
        """How many of its k columns this rank takes in each of the groups that fit the memory budget. Columns come in
        turns: the first of each rank, then the second; so all ranks have as many groups."""
        ranks, at_once = self.reads().ranks, self.at_once(held, passing)
        turns = torch.arange(k) * ranks.size + ranks.rank
        groups = ranks.most(int(turns[-1]) // at_once + 1 if k else 1, "groups of columns")
        return torch.bincount(turns // at_once, minlength=groups).tolist()

    def _solve(self, b: Tensor, start: Tensor | None, tolerance: float) -> Solution:
        plan, root, mv = self.plan, self.reads(), self.whitened(self.gram)

        def anywhere(here: bool) -> bool:
            return root.ranks.anywhere(here, "columns that are not solved for")

        if plan.solver == "cg":
            return cg(mv, b, self.precondition, start, tolerance, plan.max_steps, anywhere)
        batches = (self.whitened(gram) for gram in root.minibatches(self.weights.detach()))
        whole = 2 * -(-LEAST_MINIBATCHES // (2 * root.batches))  # passes a round, as many in each half
        rounds = max(1, plan.max_steps // whole)
        return sgd(mv, batches, b, whole * root.batches, self.precondition, start, tolerance, rounds, anywhere)
