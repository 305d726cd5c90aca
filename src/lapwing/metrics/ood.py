"""Telling unknown inputs from known ones by a score that should be higher for the unknown, such as an entropy.

    AUROC   P(score of an unknown input > score of a known one), ties count half
    FPR95   the share of unknown inputs that pass as known, at the least threshold that passes 95 % of the known

A threshold passes every input at or below it, so equal scores pass together and the order of inputs does not matter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lapwing.metrics.inputs import vector


def auroc(known: Tensor, unknown: Tensor) -> float:
    """0.5 if the score says nothing, 1 if it tells all unknown inputs from all known ones."""
    known, unknown = _scores(known, unknown)
    below = torch.searchsorted(known, unknown, right=False)
    at_or_below = torch.searchsorted(known, unknown, right=True)
    return float((below + at_or_below).double().mean() / (2 * len(known)))


def fpr95(known: Tensor, unknown: Tensor) -> float:
    """Of unknown inputs, the share that passes where 95 % of known inputs do: 0.95 if the score says nothing."""
    known, unknown = _scores(known, unknown)
    passing = -(-95 * len(known) // 100)  # ⌈0.95 n⌉, in integers
    return float((unknown <= known[passing - 1]).double().mean())


def _scores(known: Tensor, unknown: Tensor) -> tuple[Tensor, Tensor]:
    """Both flat, the known sorted."""
    known, unknown = vector(known, "the scores of known inputs"), vector(unknown, "the scores of unknown inputs")
    return known.sort().values, unknown.to(known.device)
