"""How good probabilities and error bars are. p (n, c) probabilities, y (n,) labels.

accuracy   mean 1[argmax p = y]                     NLL    −mean log p_y
ECE        Σ_b (n_b/n) |accuracy_b − confidence_b|  Brier  mean ‖p − onehot(y)‖², 0 to 2
AUROC      P(score of an unknown input > score of a known one), ties count half
coverage   how often y lies within mean ± 1.96 std: 0.95 if the error bars are right
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

BINS = 15


@dataclass(frozen=True)
class Bins:
    """Of predictions by their confidence; empty bins are left out."""

    confidence: Tensor  # mean of max p
    accuracy: Tensor
    fraction: Tensor  # of all predictions

    @property
    def ece(self) -> float:
        """The mean gap between accuracy and confidence."""
        return float((self.fraction * (self.accuracy - self.confidence).abs()).sum())


def reliability(p: Tensor, y: Tensor, bins: int = BINS) -> Bins:
    """Predictions in bins of equal width of their confidence."""
    confidence, label = p.double().max(-1)
    right = (label == y).double()
    index = (confidence * bins).long().clamp(max=bins - 1)
    count = torch.bincount(index, minlength=bins).double()
    kept = count > 0

    def mean(values: Tensor) -> Tensor:
        return torch.bincount(index, weights=values, minlength=bins)[kept] / count[kept]

    return Bins(mean(confidence), mean(right), count[kept] / len(p))


def classification(p: Tensor, y: Tensor) -> dict[str, float]:
    """Accuracy, NLL, ECE and Brier score."""
    p = p.double()
    hit = p.gather(-1, y.unsqueeze(-1)).squeeze(-1)
    onehot = torch.nn.functional.one_hot(y, p.shape[-1])
    return {
        "accuracy": float((p.argmax(-1) == y).double().mean()),
        "NLL": float(-hit.clamp(min=torch.finfo(p.dtype).tiny).log().mean()),
        "ECE": reliability(p, y).ece,
        "Brier": float((p - onehot).square().sum(-1).mean()),
    }


def auroc(known: Tensor, unknown: Tensor) -> float:
    """Of scores that should be higher for unknown inputs."""
    truth = torch.cat([torch.zeros(len(known)), torch.ones(len(unknown))])
    return float(roc_auc_score(truth.numpy(), torch.cat([known, unknown]).double().numpy()))


def regression(mean: Tensor, std: Tensor, y: Tensor, unit: float = 1.0) -> dict[str, float]:
    """Gaussian predictions of standardized targets; `unit` is the target's standard deviation."""
    mean, std, y = mean.double() * unit, std.double() * unit, y.double() * unit
    z = (y - mean) / std
    return {
        "RMSE": float((y - mean).square().mean().sqrt()),
        "NLL": float((0.5 * z.square() + std.log() + 0.5 * math.log(2 * math.pi)).mean()),
        "coverage": float((z.abs() <= 1.96).double().mean()),
    }


def table(rows: dict[str, dict[str, str]], corner: str = "") -> list[list[str]]:
    """Named rows of named cells as a header and lines; a cell that a row lacks is a dash."""
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    return [[corner, *columns], *([name, *(row.get(c, "–") for c in columns)] for name, row in rows.items())]


def as_text(lines: list[list[str]]) -> str:
    """Aligned columns for a terminal."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    texts = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    return "\n".join([texts[0], "-" * len(texts[0]), *texts[1:]])
