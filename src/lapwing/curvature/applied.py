"""Outputs that have been through the likelihood's own response already: softmax(softmax(·)), sigmoid(sigmoid(·)).

Such a network runs and fits, and every number of it is wrong. Values give it away: rows that are not negative and sum
to 1, or outputs within [0, 1]. That is proof for a softmax once there are some rows; a sigmoid's range could be chance,
so the graph of one run is asked what the network ends with.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lapwing.errors import InvalidValue, warn
from lapwing.likelihoods import Likelihood
from lapwing.tangent import TangentModel
from lapwing.tangent.evaluating import evaluating
from lapwing.tangent.kernels import plain_kernels

SURE_ROWS = 8  # that sum to 1, before it is called no chance
SURE_VALUES = 32  # that lie in [0, 1], before it is
VIEWS = "View", "UnsafeView", "Reshape", "Squeeze", "Unsqueeze", "Transpose", "Permute", "T"
MOVES = (*VIEWS, "Select", "Slice", "Clone")


def applied(tangent: TangentModel, likelihood: Likelihood, f: Tensor, x: Any) -> tuple[bool, str]:
    """Whether outputs f (m, c) of inputs x are probabilities already, for sure, and in words; "" where they are not."""
    if not looks_applied(likelihood, f):
        return False, ""
    if likelihood.response == "softmax":
        sure = len(f) >= SURE_ROWS or ends_with(tangent, x, "Softmax")
        return sure, "" if not sure else (
            "the outputs are probabilities already (each row sums to 1) and would pass a softmax twice; take the "
            "softmax out of the network, or give logits by forward=lambda model, x: model(x).log()"
        )
    sure = ends_with(tangent, x, "Sigmoid")
    return sure, "" if not sure and f.numel() < SURE_VALUES else (
        f"all {f.numel()} outputs lie in [0, 1], as if a sigmoid were applied already; {likelihood.name} wants "
        "logits: take it out of the network, or use forward=lambda model, x: torch.logit(model(x))"
    )


def looks_applied(likelihood: Likelihood, f: Tensor) -> bool:
    """Whether outputs f (m, c) could be probabilities, by their values."""
    if likelihood.response == "softmax":
        return f.shape[-1] > 1 and _sums_to_one(f)
    return likelihood.response == "sigmoid" and bool(((f >= 0) & (f <= 1)).all())


def check_applied(tangent: TangentModel, likelihood: Likelihood, f: Tensor, x: Any) -> None:
    """Raise where outputs are probabilities already; warn where they may be."""
    sure, words = applied(tangent, likelihood, f, x)
    if words and sure:
        raise InvalidValue(words)
    if words:
        warn(words)


def _sums_to_one(f: Tensor) -> bool:
    rounding = min(100 * torch.finfo(f.dtype).eps, 1e-2)
    return bool((f >= 0).all()) and bool(((f.sum(-1) - 1).abs() < rounding).all())


def ends_with(tangent: TangentModel, x: Any, what: str) -> bool:
    """Whether the last that the network computes is "Softmax" or "Sigmoid", but for views of it."""
    weights = {name: t.detach().requires_grad_() for name, t in tangent.params.items()}
    with torch.enable_grad(), evaluating(tangent.model), plain_kernels():
        node = tangent.apply(weights, x).grad_fn
    while node is not None and _operation(node) in MOVES:
        node = node.next_functions[0][0]
    return node is not None and _operation(node) == what


def _operation(node: Any) -> str:
    """'Sigmoid' for SigmoidBackward0."""
    return str(node.name()).rpartition("Backward")[0].lstrip("_")
