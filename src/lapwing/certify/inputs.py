"""New inputs at which variances are compared, as vectors j = Σ_n J_nᵀu_n, u random signs: (k, p).

Those that a user gives, all in each j; else training inputs, one in each j, under P and K without its example
(`leave_one_out.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lapwing import data as loading
from lapwing import tree
from lapwing.certify.leave_one_out import LeftOut, LeftOutExamples, every, random_signs, sample, sizes_of
from lapwing.certify.reader import Reader
from lapwing.curvature import Probe
from lapwing.curvature.matrix_free import FEW_COLUMNS
from lapwing.errors import InvalidValue
from lapwing.operators import linalg
from lapwing.posterior import Gaussian
from lapwing.priors import Prior
from lapwing.solvers.estimate import FEWEST

LARGE, OFTEN = 0.25, 8  # of a sum over inputs, and times its mean, from one of them, of which a note tells


@dataclass(frozen=True, eq=False)
class Inputs:
    """New inputs, as vectors j (k, p): of all that were given, or each of a training input that is left out."""

    where: str
    count: int
    j: Tensor
    weights: Tensor  # (k,), of each in a sum
    examples: LeftOutExamples | None = None
    numbers: Tensor | None = None  # (k,): the same where it is the same example

    def extra(self, before: int) -> Callable[[Tensor, Tensor], Tensor] | None:
        """What makes K v of rows of a solve, the first `before` of which are others, that without their examples."""
        examples = self.examples
        return None if examples is None else lambda v, rows: examples.gone(v, rows - before)

    def ours(self, precision: linalg.Operator, prior: Prior) -> tuple[Tensor, bool]:
        """The structure's variances (k,), and whether examples were taken out of it, where that was to be."""
        if self.examples is None:
            return (self.j * linalg.solve(precision, self.j)).sum(-1), True
        return self.examples.ours(prior, self.j)

    def notes(self, removed: bool, true: Tensor) -> list[str]:
        """What to mind, given whether examples were taken out and the true variances (k,)."""
        if self.numbers is None:
            return []
        if not self.count:
            return ["examples that run as one batch, or fewer than four, cannot be left out one by one: give inputs="]
        said = []
        if not removed:
            said.append(
                "the structure keeps the examples that the true posterior leaves out (a sampled factor, or too dear to "
                "factorize for each), so it looks narrower than it is at new inputs"
            )
        of_each = torch.stack([true[self.numbers == number].sum() for number in self.numbers.unique()])
        share = float(of_each.max() / true.sum())
        if share > max(LARGE, OFTEN / self.count):
            said.append(
                f"one training input has {100 * share:.0f} % of the variance by leave-one-out, which speaks of inputs "
                "like that one; inputs= asks about others"
            )
        return said


def given(reader: Reader, x: Any, k: int, generator: torch.Generator) -> Inputs:
    """j = Σ_n J(x_n)ᵀu_n over inputs that a user gave, the same on every rank."""
    tangent = reader.state.tangent
    with reader.ranks.sharing_errors("reading the inputs"):
        x = loading.network_inputs(x, tangent.device)
        loading.check_finite(x, "the inputs")
        n = tree.batch_size(x)
        if not n:
            raise InvalidValue("the inputs hold no example to certify at; give at least one")
        cuts = range(0, n, loading.BATCH) if tangent.separable(x) else range(1)
        pieces = [tree.rows_of(x, slice(i, i + loading.BATCH)) for i in cuts] if len(cuts) > 1 else [x]
        total = torch.zeros(k, tangent.layout.size, dtype=torch.float64, device=tangent.device)
        for piece in pieces:
            f = tangent(piece)
            total += tangent.vjps(piece, random_signs((k, *f.shape), generator, f)).to(total)
        if not bool(total.any()):
            raise InvalidValue("no output at these inputs depends on the selected weights; give others")
    return Inputs("inputs", n, reader.ranks.same(total, "vectors of signs at the inputs"), torch.ones_like(total[:, 0]))


def left_out(reader: Reader, seen: Probe, near: Gaussian, k: int, generator: torch.Generator, budget: int) -> Inputs:
    """j = J_nᵀu of k training inputs, or of all where they are no more; of none where an example cannot be left out.
    near: a posterior near the true one."""
    state, ranks, likelihood = reader.state, reader.ranks, reader.likelihood
    device, own = state.tangent.device, reader.n
    found = LeftOut({}, torch.zeros(0), torch.zeros(0))
    if state.tangent.separable(seen.inputs) and state.n >= FEWEST:

        def sizes(x: Any, y: Tensor) -> Tensor:
            return sizes_of(near, likelihood, x, y, budget)

        few = seen.outputs * seen.positions <= FEW_COLUMNS
        start = sum(ranks.gather(own, "examples of each rank")[: ranks.rank])
        with ranks.sharing_errors("examples"):
            batches = reader.each("examples")
            if state.n <= k:
                found = every(batches, state.n, start)
            else:
                found = sample(batches, sizes if few else None, k, ranks, generator)
        reader.check()
    examples = LeftOutExamples(state, likelihood, ranks, found.held, len(found.weights), budget)
    j, count = examples.pulled(ranks.own(generator)), len(found.numbers.unique())
    return Inputs("leave-one-out", count, j, found.weights.to(device), examples, found.numbers.to(device))
