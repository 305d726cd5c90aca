"""The laws of a posterior: its outputs are one distribution, however they are asked for.

Σ_s w_s = 1,  Σ_s w_s f_s = E f,  Σ_s w_s (f_s − E f)² = Var f        over its nodes, as precisely as those are
an input does not depend on its company;  joint=True has the same marginals;  draws are those of its moments
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lapwing import tree
from lapwing.outputs import Outputs
from lapwing.posterior import Posterior
from lapwing.testing.laws import Laws, close, same_stream, seeded, within

DRAWS = 4000
ROUGH = 0.1  # of a standard deviation or variance, that sums over 512 points may be away
ROUNDING = 1e-4  # in a network's float32


def check_posterior(posterior: Posterior, x: Any) -> None:
    """Hold a posterior to its laws at inputs x, two of them at the least, or raise BrokenLaw."""
    with Laws(type(posterior).__name__) as law:
        made = posterior.outputs(x)
        _moments(law, made)
        _nodes(law, made)
        with law("an input does not depend on its company"):
            some = posterior.outputs(tree.rows_of(x, slice(0, 1)))
            _like(some.mean, made.mean[:1])
            _like(some.variance, made.variance[:1])
        with law("joint=True has the same marginals"):
            joint = posterior.outputs(x, joint=True)
            _like(joint.mean, made.mean)
            _like(joint.marginal, made.marginal)
        with law("draws of f have its mean"):
            f, source = made.sample(DRAWS, seeded(0))
            within(f.double(), made.mean.double())
            assert source is None or int(source.max()) < made.sources, "a draw is of a source that there is not"
        with law("draws come from their generator alone"):
            same_stream(lambda generator: posterior.draw(50, generator))


def _moments(law: Laws, made: Outputs) -> None:
    with law("moments have the shapes of f"):
        shape = tuple(made.mean.shape)
        assert tuple(made.variance.shape) == shape, f"variances {tuple(made.variance.shape)} for outputs {shape}"
        expected = (*shape, shape[-1])
        assert tuple(made.marginal.shape) == expected, f"covariances {tuple(made.marginal.shape)} for {expected}"
    with law("variances are the diagonal of covariances"):
        _like(made.marginal.diagonal(dim1=-2, dim2=-1), made.variance)
    with law("a slice is the outputs at those inputs"):
        _like(made[:1].variance, made.variance[:1])
    with law("without its spread it is its mean"):
        certain = made.scaled(0.0)
        _like(certain.mean, made.mean)
        _like(certain.variance, torch.zeros_like(made.variance))


def _nodes(law: Laws, made: Outputs) -> None:
    c = made.mean.shape[-1]
    mean, variance = (t.reshape(-1, c).double() for t in (made.mean, made.variance))
    some = made.nodes(torch.arange(len(mean), device=mean.device), None)
    with law("the weights of nodes sum to one"):
        total = some.log_weight.exp().sum(0)
        close(total, torch.ones_like(total))
    with law("nodes have the moments of f"):
        found = some.average(some.f)
        spread = some.average((some.f - found).square())
        away = ((found - mean).abs() / variance.sqrt().clamp(min=1e-12)).max()
        assert float(away) < ROUGH, f"their mean is {float(away):.3g} standard deviations away"
        off = ((spread - variance).abs() / variance.clamp(min=1e-12)).max()
        worth = float((2 * some.log_weight).exp().sum(0).max())  # 1 / the number of equal draws
        assert float(off) < ROUGH + 2 * worth, f"their variance is away by {float(off):.3g} of it"


def _like(actual: Tensor, expected: Tensor) -> None:
    exact = actual.dtype == torch.float64
    close(actual.double(), expected.double(), 1e-8 if exact else ROUNDING)
