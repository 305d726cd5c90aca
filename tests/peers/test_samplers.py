"""HMC against Pyro's NUTS on a network of 50 weights: the same predictions within Monte-Carlo error."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw

pyro = pytest.importorskip("pyro")
NOISE, LIMIT = 0.3, 5.0  # LIMIT: standard errors


def problem() -> tuple[nn.Sequential, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    x = torch.randn(40, 3, dtype=torch.float64)
    return model, x, torch.sin(x[:, :2]) + NOISE * torch.randn(40, 2), torch.randn(6, 3, dtype=torch.float64)


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
        mcmc = MCMC(NUTS(joint, jit_compile=True, ignore_jit_warnings=True), draws, draws // 2, disable_progbar=True)
        mcmc.run()
        found.append(outputs(mcmc.get_samples(), new))
    return torch.stack(found)


def test_hmc_predicts_as_pyros_nuts_does() -> None:
    model, x, y, new = problem()
    theirs = by_pyro(x, y, new, model, chains=3, draws=200)
    lik = lw.likelihoods.Gaussian(NOISE)
    post = lw.samplers.hmc(model, (x, y), lik, chains=12, draws=300, warmup=300, leapfrog=20, start="prior")
    ours = post.posterior.by_chain(post.posterior.outputs(new).values)  # type: ignore[attr-defined]
    for power in (1, 2):  # means and second moments of f
        a, b = ours.pow(power).mean(1), theirs.pow(power).mean(1)
        error = (a.var(0) / len(a) + b.var(0) / len(b)).sqrt()
        assert float(((a.mean(0) - b.mean(0)).abs() / error).median()) < 2
        assert float(((a.mean(0) - b.mean(0)).abs() / error).max()) < LIMIT * 2  # three chains: errors are rough
