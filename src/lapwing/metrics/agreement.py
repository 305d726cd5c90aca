"""How close two predictive distributions of classes are: p, q (n, ..., c), of two methods at the same inputs.

    agreement         mean 1[argmax p = argmax q]             1 where they say the same class everywhere
    total variation   mean ½ Σ_c |p_c − q_c|                  from 0 to 1

(Izmailov, Vikram, Hoffman & Wilson, ICML 2021: approximations held to HMC.)
"""

from __future__ import annotations

from torch import Tensor

from lapwing.errors import InvalidValue
from lapwing.metrics.inputs import all_class_probs
from lapwing.predictive import Prediction


def agreement(p: Prediction | Tensor, q: Prediction | Tensor) -> float:
    """The share of inputs at which both find the same class the most probable."""
    p, q = _both(p, q)
    return float((p.argmax(-1) == q.argmax(-1)).double().mean())


def total_variation(p: Prediction | Tensor, q: Prediction | Tensor) -> float:
    """½ Σ_c |p_c − q_c|, mean over inputs."""
    p, q = _both(p, q)
    return float((p - q).abs().sum(-1).mean() / 2)


def _both(p: Prediction | Tensor, q: Prediction | Tensor) -> tuple[Tensor, Tensor]:
    p, q = all_class_probs(p), all_class_probs(q)
    if p.shape != q.shape:
        raise InvalidValue(f"both must be probabilities at the same inputs, got {tuple(p.shape)} and {tuple(q.shape)}")
    return p, q.to(p.device)
