"""The deep-ensemble equivalent of a method: how many members a deep ensemble needs to be as good (Ashukha et al., ICLR
2020), by the log-likelihood of labels y after temperature scaling:

    CLL(p) = mean_n log softmax(log p_n / T)_{y_n},      T fitted on one half of the examples, scored on the other

over both halves of a few random splits. CLL(l) of an ensemble is the mean over the m runs of l members in a circle; the
score is linear between whole numbers. Shapes: p (n, c), of members (m, n, c). A probability of 0 counts as the least
normal number.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from lapwing import given
from lapwing.errors import InvalidValue
from lapwing.metrics.inputs import class_probs
from lapwing.predictive import Prediction

WIDEST = 6.0  # of log(1/T), either way
HALVINGS = 50


def ensemble_equivalent(
    predicted: Prediction | Tensor,
    members: Tensor,
    y: Tensor,
    *,
    splits: int = 5,
    generator: torch.Generator | None = None,
) -> float:
    """The number of ensemble members that score as `predicted` does, of class probabilities (m, n, c) of each member.

    1 where it is no better than one member; infinity where it is better than all m together."""
    return Ladder(members, y, splits=splits, generator=generator).members_of(predicted)


class Ladder:
    """What 1, 2, … m members of an ensemble score on labels y (n,), for any number of predictions to be held to."""

    def __init__(
        self, members: Tensor, y: Tensor, *, splits: int = 5, generator: torch.Generator | None = None
    ) -> None:
        checked = [class_probs(one, y) for one in members]
        self.each, self.y = torch.stack([p for p, _ in checked]), checked[0][1]
        if self.each.ndim != 3 or self.each.shape[1] < 2:
            raise InvalidValue(f"members are (m, n, c), n ≥ 2; got {tuple(self.each.shape)}")
        self.halves = _halves(len(self.y), given.whole(splits, "splits", 1), given.generator(generator))
        sizes = range(1, len(self.each) + 1)
        self.scores = [float(_calibrated(_ensembles(self.each, k), self.y, self.halves).mean()) for k in sizes]

    def members_of(self, predicted: Prediction | Tensor) -> float:
        """How many members score as a prediction at the same inputs does."""
        p, _ = class_probs(predicted, self.y)
        if p.shape != self.each.shape[1:]:
            raise InvalidValue(
                f"predictions are (n, c), and members (m, n, c); got {tuple(p.shape)}, {tuple(self.each.shape)}"
            )
        goal = float(_calibrated(p.unsqueeze(0), self.y, self.halves))
        if goal <= self.scores[0]:
            return 1.0
        for size, (low, high) in enumerate(itertools.pairwise(self.scores), 1):
            if goal <= high:
                return size + (goal - low) / (high - low)
        return math.inf


def _ensembles(each: Tensor, size: int) -> Tensor:
    """Those of so many members, next to each other in a circle, (e, n, c)."""
    m = len(each)
    starts = range(m if size < m else 1)
    return torch.stack([each[[(start + k) % m for k in range(size)]].mean(0) for start in starts])


def _halves(n: int, splits: int, generator: torch.Generator) -> list[tuple[Tensor, Tensor]]:
    """Examples to fit at, and to score at: each half of each split in both roles."""
    found = []
    for _ in range(splits):
        order = torch.randperm(n, generator=generator, device=generator.device).cpu()
        a, b = order[: n // 2], order[n // 2 :]
        found += [(a, b), (b, a)]
    return found


def _calibrated(p: Tensor, y: Tensor, halves: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The calibrated log-likelihood of each of several predictions (e, n, c), (e,)."""
    log_p = p.clamp_min(torch.finfo(p.dtype).tiny).log()
    scores = [_score(_inverse_temperature(log_p[:, a], y[a]), log_p[:, b], y[b]) for a, b in halves]
    return torch.stack(scores).mean(0)


def _score(beta: Tensor, log_p: Tensor, y: Tensor) -> Tensor:
    return _at(torch.log_softmax(beta[:, None, None] * log_p, -1), y).mean(-1)


def _inverse_temperature(log_p: Tensor, y: Tensor) -> Tensor:
    """1/T by bisection (e,): the log-likelihood is concave in it, its slope log p_y − E log p."""
    right = _at(log_p, y).mean(-1)
    low, high = torch.full_like(right, -WIDEST), torch.full_like(right, WIDEST)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        mean = (torch.softmax(middle.exp()[:, None, None] * log_p, -1) * log_p).sum(-1).mean(-1)
        low, high = torch.where(right > mean, middle, low), torch.where(right > mean, high, middle)
    return ((low + high) / 2).exp()


def _at(values: Tensor, y: Tensor) -> Tensor:
    """Those of the labels, (e, n)."""
    return values.gather(-1, y.expand(len(values), -1).unsqueeze(-1)).squeeze(-1)
