"""HMC against Pyro's NUTS on a network of 50 weights: the same predictions within Monte-Carlo error.

Errors are √(variance / ESS) of each predicted moment. With few data and much noise trajectories of NUTS are short, so
that it takes a minute of one core; a noise or a prior that is off by a third, or a trajectory that is never refused, is
many errors away.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.posterior.diagnostics import by_arviz

pyro = pytest.importorskip("pyro")
NOISE, LIMIT, WORTH = 0.5, 4.5, 150  # LIMIT: standard errors; WORTH: independent draws of each side at least


def problem() -> tuple[nn.Sequential, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    x = torch.randn(20, 3, dtype=torch.float64)
    return model, x, torch.sin(x[:, :2]) + NOISE * torch.randn(20, 2), torch.randn(6, 3, dtype=torch.float64)


def by_pyro(x: Tensor, y: Tensor, new: Tensor, model: nn.Module, chains: int, draws: int) -> Tensor:
    """Outputs at new inputs of NUTS' draws, (chains, draws, n, c)."""
    import pyro.distributions as dist
    from pyro.infer.mcmc import MCMC, NUTS

    shapes = {name: p.shape for name, p in model.named_parameters()}

    def outputs(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        h = torch.tanh(x @ weights["0.weight"].mT + weights["0.bias"].unsqueeze(-2))
        return h @ weights["2.weight"].mT + weights["2.bias"].unsqueeze(-2)

    def joint() -> None:
        weights = {n: pyro.sample(n, dist.Normal(0.0, 1.0).expand(s).to_event(len(s))) for n, s in shapes.items()}
        pyro.sample("y", dist.Normal(outputs(weights, x), NOISE).to_event(2), obs=y)

    found = []
    for seed in range(chains):
        pyro.set_rng_seed(seed)
        mcmc = MCMC(NUTS(joint, jit_compile=True, ignore_jit_warnings=True), draws, 100, disable_progbar=True)
        mcmc.run()
        found.append(outputs(mcmc.get_samples(), new))
    return torch.stack(found)


def moments(f: Tensor) -> tuple[Tensor, Tensor]:
    """Means of f and f² over draws (k, l, n, c), and their variances, (2, n, c)."""
    both = torch.stack([f, f.square()], 2)  # (k, l, 2, n, c)
    assert float(by_arviz("rhat", both).max()) < 1.05
    worth = by_arviz("ess", both)
    assert float(worth.min()) > WORTH
    return both.mean((0, 1)), both.flatten(0, 1).var(0) / worth


def test_hmc_predicts_as_pyros_nuts_does() -> None:
    model, x, y, new = problem()
    mean, variance = moments(by_pyro(x, y, new, model, chains=2, draws=200))
    post = lw.samplers.hmc(
        model, (x, y), lw.likelihoods.Gaussian(NOISE), chains=8, draws=400, warmup=300, leapfrog=20, start="prior"
    )
    ours, own = moments(post.posterior.by_chain(post.posterior.outputs(new).values))  # type: ignore[attr-defined]
    away = (ours - mean).abs() / (variance + own).sqrt()
    assert float(away.median()) < 1.5
    assert float(away.max()) < LIMIT
