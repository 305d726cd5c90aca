"""Predictions that are draws: no array of outputs by outputs is made, whatever is asked of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lapwing as lw


class Largest(TorchDispatchMode):
    """The most elements of a tensor that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor))])
        return out


@pytest.mark.parametrize("seed", [0, 1])
def test_moments_of_draws_hold_no_more_than_the_draws(seed: int) -> None:
    s, n, q, c = 5, 2, 3, 700
    generator = torch.Generator().manual_seed(seed)
    f = torch.randn(n, q, c, generator=generator, dtype=torch.float64)
    draws = f + torch.randn(s, n, q, c, generator=generator, dtype=torch.float64)
    y = torch.randint(c, (n, q), generator=generator)
    assert c * c > draws.numel()  # a matrix of outputs by outputs would show
    with Largest() as ledger:
        pred = lw.Prediction(lw.likelihoods.Categorical(), lw.outputs.Draws(draws, f))
        found = pred.probs, pred.epistemic, pred.aleatoric, pred.expected_entropy, pred.log_prob(y)
    assert ledger.elements <= draws.numel()

    p = draws.softmax(-1)
    torch.testing.assert_close(found[0], p.mean(0), atol=1e-8, rtol=1e-8)
    torch.testing.assert_close(found[1], p.var(0, correction=0), atol=1e-8, rtol=1e-8)
    torch.testing.assert_close(found[2], (p * (1 - p)).mean(0), atol=1e-8, rtol=1e-8)
    torch.testing.assert_close(found[3], -(p * p.log()).sum(-1).mean(0), atol=1e-8, rtol=1e-8)
    torch.testing.assert_close(found[4], p.mean(0).gather(-1, y[..., None])[..., 0].log(), atol=1e-8, rtol=1e-8)
