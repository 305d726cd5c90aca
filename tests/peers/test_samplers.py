"""HMC against Pyro's NUTS on a network of 50 weights: the same predictions, misfit and sizes of weights within
Monte-Carlo error, √(variance / ESS) of each mean.

With few data and much noise trajectories of NUTS are short, so that it takes a minute of one core. A prior or a
temperature that is off by a quarter, a noise by a tenth, or proposals that are never refused are beyond the limit; a
leapfrog that begins with a whole kick is just within it, and is left to the identities of `tests/test_samplers.py`.
"""

from __future__ import annotations

import pyro
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.posterior.diagnostics import by_arviz

NOISE, LIMIT, WORTH = 0.5, 4.5, 150  # LIMIT: standard errors; WORTH: independent draws of each side at least


def problem() -> tuple[nn.Sequential, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    x = torch.randn(20, 3, dtype=torch.float64)
    return model, x, torch.sin(x[:, :2]) + NOISE * torch.randn(20, 2), torch.randn(6, 3, dtype=torch.float64)


def outputs(weights: dict[str, Tensor], x: Tensor) -> Tensor:
    """The network by hand, of weights with leading dimensions, (..., n, c)."""
    h = torch.tanh(x @ weights["0.weight"].mT + weights["0.bias"].unsqueeze(-2))
    return h @ weights["2.weight"].mT + weights["2.bias"].unsqueeze(-2)


def by_pyro(x: Tensor, y: Tensor, model: nn.Module, chains: int, draws: int) -> dict[str, Tensor]:
    """NUTS' draws, {name: (chains, draws, ...)}."""
    import pyro.distributions as dist
    from pyro.infer.mcmc import MCMC, NUTS

    shapes = {name: p.shape for name, p in model.named_parameters()}

    def joint() -> None:
        weights = {n: pyro.sample(n, dist.Normal(0.0, 1.0).expand(s).to_event(len(s))) for n, s in shapes.items()}
        pyro.sample("y", dist.Normal(outputs(weights, x), NOISE).to_event(2), obs=y)

    found = []
    for seed in range(chains):
        pyro.set_rng_seed(seed)
        mcmc = MCMC(NUTS(joint, jit_compile=True, ignore_jit_warnings=True), draws, 100, disable_progbar=True)
        mcmc.run()
        found.append(mcmc.get_samples())
    return {name: torch.stack([one[name] for one in found]) for name in shapes}


def means(draws: dict[str, Tensor], x: Tensor, y: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Of f and f² at new inputs, of (y − f)², and of each tensor's squared weights; with their variances, (m,) both."""
    f = outputs(draws, new).flatten(2)  # (k, l, n c)
    misfit = (y - outputs(draws, x)).square().mean((2, 3))
    sizes = [w.square().flatten(2).mean(2) for w in draws.values()]
    values = torch.cat([f, f.square(), torch.stack([misfit, *sizes], 2)], 2)  # (k, l, m)
    assert float(by_arviz("rhat", values).max()) < 1.05
    worth = by_arviz("ess", values)
    assert float(worth.min()) > WORTH
    return values.mean((0, 1)), values.flatten(0, 1).var(0) / worth


def test_hmc_predicts_as_pyros_nuts_does() -> None:
    model, x, y, new = problem()
    theirs, error = means(by_pyro(x, y, model, chains=2, draws=200), x, y, new)
    post = lw.samplers.hmc(
        model, (x, y), lw.likelihoods.Gaussian(NOISE), chains=8, draws=400, warmup=300, leapfrog=20, start="prior"
    )
    chains = post.posterior
    draws = chains.by_chain(chains.weights)  # type: ignore[attr-defined]
    ours, own = means(post.tangent.layout.unflatten(draws), x, y, new)
    away = (ours - theirs).abs() / (error + own).sqrt()
    assert float(away.max()) < LIMIT, away
