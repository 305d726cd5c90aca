"""SGLD, SGHMC and mean-field inference against posteriors 0.1.3: the same steps for the same noise where both have the
same recursion, and the same distribution where they do not.

    theirs  SGLD:   θ ← θ + ℓ g + √(2ℓ) ξ                                    so ℓ = ε/2
            SGHMC:  θ ← θ + ℓ m,  m ← m + ℓ g − ℓ α m + √(2αℓ) ξ             so ℓ² = ε/2, ℓα = a

Their SGHMC moves by the old momentum, ours by the new one: both are alike as ε → 0 only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import posteriors  # not importorskip: a part that is missing would pass for a test
import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.samplers.streams import Streams
from lapwing.samplers.target import targeted
from lapwing.variational.climb import Objective
from lapwing.variational.factors import Family, MeanField

NOISE, PRECISION, BATCH = 0.3, 1.5, 8
LIMIT = 5.0  # standard errors


def problem() -> tuple[nn.Sequential, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    x = torch.randn(30, 3, dtype=torch.float64)
    return model, x, torch.sin(x[:, :2]) + NOISE * torch.randn(30, 2, dtype=torch.float64)


def density(model: nn.Module, n: int) -> Callable[[Any, Any], tuple[Tensor, Tensor]]:
    """log p(θ) + (n/b) Σ log p(y | f), written by hand as posteriors wants it."""

    def log_posterior(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, y = batch
        f = torch.func.functional_call(model, params, (x,))
        fit = torch.distributions.Normal(f, NOISE).log_prob(y).sum() * (n / len(y))
        normal = torch.distributions.Normal(0.0, PRECISION**-0.5)
        return fit + sum(normal.log_prob(p).sum() for p in params.values()), torch.zeros(())

    return log_posterior


def fed(monkeypatch: pytest.MonkeyPatch, name: str, noise: dict[str, Tensor]) -> None:
    """torch's random numbers replaced by those given, which they ask for by the names of weights in order."""
    noises = iter([noise[key] for key in sorted(noise)])
    monkeypatch.setattr(torch, name, lambda *args, **kwargs: next(noises))


def test_sgld_takes_the_steps_of_posteriors(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = problem()
    steps, eps, likelihood = 12, 2e-4, lw.likelihoods.Gaussian(NOISE)
    told: dict[str, Any] = {"chains": 1, "draws": steps, "warmup": 0, "step": eps, "batch": BATCH, "prior": PRECISION}
    post = lw.samplers.sgld(model, (x, y), likelihood, generator=torch.Generator().manual_seed(3), **told)
    ours = post.posterior.weights  # type: ignore[attr-defined]
    streams = Streams.of(torch.Generator().manual_seed(3), 1, torch.device("cpu"))
    theirs = posteriors.sgmcmc.sgld.build(density(model, len(x)), lr=eps / 2)
    state, layout = theirs.init({k: p.detach().clone() for k, p in model.named_parameters()}), post.tangent.layout
    for t in range(steps):
        index = streams.index(len(x), BATCH)[0]
        noise = layout.unflatten(streams.normal(layout.size)[0])
        with monkeypatch.context() as patched:
            fed(patched, "randn_like", noise)
            state, _ = theirs.update(state, (x[index], y[index]))
        found = torch.cat([state.params[k].reshape(-1) for k in layout.names])
        torch.testing.assert_close(ours[t], found, rtol=1e-10, atol=1e-12)


def test_sghmc_has_the_distribution_of_posteriors() -> None:
    """Of a linear model, whose posterior both come near to: their moments within Monte-Carlo error and O(ε)."""
    torch.manual_seed(1)
    x = torch.randn(30, 2, dtype=torch.float64)
    y = x @ torch.tensor([[1.0], [-0.5]], dtype=torch.float64) + NOISE * torch.randn(30, 1, dtype=torch.float64)
    model = nn.Linear(2, 1, bias=False).double()
    H = x.mT @ x / NOISE**2 + PRECISION * torch.eye(2, dtype=torch.float64)
    covariance, mean = torch.linalg.inv(H), torch.linalg.solve(H, x.mT @ y[:, 0] / NOISE**2)
    eps, a, chains, steps = 0.02 / float(torch.linalg.eigvalsh(H)[-1]), 0.2, 300, 200
    told: dict[str, Any] = {"chains": chains, "draws": 1, "warmup": steps - 1, "step": eps, "friction": a, "batch": 30}
    likelihood = lw.likelihoods.Gaussian(NOISE)
    full = lw.samplers.sghmc(model, (x, y), likelihood, prior=PRECISION, **{**told, "batch": 3000})
    ours = full.posterior.weights  # type: ignore[attr-defined]
    lr = (eps / 2) ** 0.5
    theirs = posteriors.sgmcmc.sghmc
    log_posterior = density(model, len(x))

    def step(w: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
        state = theirs.SGHMCState({"weight": w}, {"weight": m})
        state, _ = theirs.update(state, (x, y), log_posterior, lr=lr, alpha=a / lr)
        return state.params["weight"], state.momenta["weight"]

    w = model.weight.detach().expand(chains, 1, 2).clone()
    m = torch.zeros_like(w)
    for _ in range(steps):
        w, m = torch.func.vmap(step, randomness="different")(w, m)
    deviation = covariance.diagonal().sqrt()
    for draws in (ours, w[:, 0]):
        assert float(((draws.mean(0) - mean).abs() / deviation).max()) < LIMIT / chains**0.5
    ratio = (ours.var(0) / w[:, 0].var(0)).log().abs()
    assert float(ratio.max()) < LIMIT * (4 / chains) ** 0.5


def test_the_bound_of_mean_field_inference_is_that_of_posteriors_with_its_slopes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the same draw: the sampled bound, with slopes through the draw alone (their "sticking the landing")."""
    model, x, y = problem()
    target = targeted(model, (x, y), lw.likelihoods.Gaussian(NOISE), PRECISION, 1.0, "all", None)
    theta, layout = target.joint.tangent.theta.double(), target.joint.tangent.layout
    q = MeanField(theta, torch.full_like(theta, 0.05), Family.of("normal"))
    ours = Objective.of(target, q, len(x), local=False, closed=False)
    value = ours.value(torch.Generator().manual_seed(5))
    mine = torch.autograd.grad(value, q.parameters)
    noise = torch.randn((1, len(theta)), generator=torch.Generator().manual_seed(5), dtype=torch.float64)

    def bound(mean: dict[str, Tensor], log_sd: dict[str, Tensor]) -> Tensor:
        sd = {k: s.exp() for k, s in log_sd.items()}
        return posteriors.vi.diag.nelbo(mean, sd, (x, y), density(model, len(x)), stl=True)[0]

    leaves = [{k: v.detach().clone().requires_grad_() for k, v in layout.unflatten(p).items()} for p in q.parameters]
    with monkeypatch.context() as patched:
        fed(patched, "randn", layout.unflatten(noise))
        theirs = -bound(*leaves)
    torch.testing.assert_close(value.detach(), theirs.detach(), rtol=1e-10, atol=1e-10)
    for found, leaf in zip(mine, leaves, strict=True):
        slopes = torch.autograd.grad(theirs, list(leaf.values()), retain_graph=True)
        torch.testing.assert_close(found, torch.cat([s.reshape(-1) for s in slopes]), rtol=1e-9, atol=1e-9)
