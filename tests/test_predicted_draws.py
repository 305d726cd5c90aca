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


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_gaussian_known_by_draws_is_averaged_over_more_than_those(seed: int) -> None:
    """E softmax f over f ~ N(μ, A Aᵀ/s), against 20,000 draws of that: the s draws alone are far off."""
    s, n, c = 16, 3, 600
    generator = torch.Generator().manual_seed(seed)
    mean = 2 * torch.randn(n, c, generator=generator, dtype=torch.float64)
    away = 4 * torch.randn(s, n, c, generator=generator, dtype=torch.float64)
    z = torch.randn(20_000, s, generator=generator, dtype=torch.float64) / s**0.5
    truth = torch.stack([(mean + torch.tensordot(some, away, 1)).softmax(-1).mean(0) for some in z.split(500)]).mean(0)

    spread = lw.outputs.Spread(mean + away, mean)
    pred = lw.Prediction(lw.likelihoods.Categorical(), spread)
    few = lw.Prediction(lw.likelihoods.Categorical(), lw.outputs.Draws(mean + away, mean))
    apart = lambda p: 0.5 * (p - truth).abs().sum(-1).max()  # noqa: E731
    assert apart(pred.probs) < 0.1 < 0.4 < apart(few.probs)

    nodes = spread.nodes(torch.arange(n), None)
    torch.testing.assert_close(nodes.average(nodes.f), mean, atol=0.05, rtol=0)
    found, known = nodes.average((nodes.f - mean).square()), spread.variance
    torch.testing.assert_close(found, known, atol=0, rtol=0.1)
    f, source = spread.sample(4000, generator)
    assert source is None
    torch.testing.assert_close(f.var(0), known, atol=0, rtol=0.2)


def test_many_outputs_say_how_well_their_variance_is_known() -> None:
    model = torch.nn.Linear(3, 600).double()
    x, y = torch.randn(20, 3, dtype=torch.float64), torch.randint(600, (20,))
    pred = lw.laplace(model, (x, y), "dirichlet").predict(x, samples=8)
    torch.testing.assert_close(pred.f_var_standard_error, pred.f_var / 2)
    assert pred.drawn
    assert str(pred.outputs) == "a Gaussian known by 8 draws"
