"""The problems of the truth study, and the methods with the settings that were tried.

    regression   y = sin x + .3 ε, 45 examples with a gap from −1 to 1; Linear(1, 16), Tanh, Linear(16, 1)
    moons        two moons with noise .25, 100 examples; Linear(2, 8), Tanh, Linear(8, 8), Tanh, Linear(8, 2)
    digits       scikit-learn's, 300 images of ten classes; Linear(64, 10), Tanh, Linear(10, 10)

All weights are N(0, 1) before data, all numbers float64. Every method that walks or trains gets at most a hundredth of
the reference's gradient epochs; "longer" ones a tenth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits, make_moons
from torch import Tensor, nn

import lapwing as lw
from lapwing.truth import Problem, Trial, methods

PRIOR, NOISE = 1.0, 0.3
STEPS, RATE = 3_000, 0.02  # of Adam over all examples, its rate falling to 0
DRAWS, CHAINS, BATCH = 50, 4, 32  # of the samplers by minibatches
PARTICLES = 256  # that other methods predict by, where they draw
Data = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """A problem: networks, data, and how long its reference walks."""

    name: str
    sizes: tuple[int, ...]
    train: Data
    test: Data
    unknown: Tensor
    likelihood: Any
    reference: dict[str, int]

    def network(self, dropout: float = 0.0) -> nn.Sequential:
        """Tanh layers, with dropout behind each if asked."""
        layers: list[nn.Module] = []
        for i, o in zip(self.sizes[:-2], self.sizes[1:-1], strict=True):
            layers += [nn.Linear(i, o), nn.Tanh(), *([nn.Dropout(dropout)] if dropout else [])]
        return nn.Sequential(*layers, nn.Linear(*self.sizes[-2:])).double()

    @property
    def epochs(self) -> float:
        """Of the reference."""
        r = self.reference
        return float(r["chains"] * (r["warmup"] + r["draws"] * r["thin"]) * r["leapfrog"])

    @property
    def classes(self) -> bool:
        """Whether targets are labels."""
        return isinstance(self.likelihood, str)


def regression(seed: int) -> Case:
    g = torch.Generator().manual_seed(seed)
    uniform = lambda n, low, high: low + (high - low) * torch.rand(n, 1, generator=g, dtype=torch.float64)  # noqa: E731
    noisy = lambda x: (x, torch.sin(x) + NOISE * torch.randn(x.shape, generator=g, dtype=torch.float64))  # noqa: E731
    side = torch.where(torch.rand(45, 1, generator=g) < 0.5, -1.0, 1.0).double()
    far = torch.where(torch.rand(100, 1, generator=g) < 0.5, -1.0, 1.0).double() * uniform(100, 5, 8)
    train, test = noisy(side * uniform(45, 1, 4)), noisy(uniform(200, -4, 4))
    plan = {"chains": 4, "draws": 250, "warmup": 400, "thin": 3, "leapfrog": 40}
    return Case("regression", (1, 16, 1), train, test, far, lw.likelihoods.Gaussian(noise=NOISE), plan)


def moons(seed: int) -> Case:
    x, y = (torch.tensor(a) for a in make_moons(600, noise=0.25, random_state=seed))
    far = 12 * torch.rand(1_000, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 6
    far = far[(far - torch.tensor([0.5, 0.25])).norm(dim=1) > 3][:500]
    plan = {"chains": 4, "draws": 250, "warmup": 200, "thin": 3, "leapfrog": 20}
    return Case("moons", (2, 8, 8, 2), (x[:100], y[:100]), (x[100:], y[100:]), far, "categorical", plan)


def digits(seed: int) -> Case:
    raw, rng = load_digits(), np.random.default_rng(seed)
    order = rng.permutation(len(raw.target))
    x, y = torch.tensor(raw.data[order] / 8 - 1), torch.tensor(raw.target[order])
    mixed = torch.stack([image[torch.from_numpy(rng.permutation(64))] for image in x[800:1100]])
    plan = {"chains": 4, "draws": 250, "warmup": 250, "thin": 2, "leapfrog": 30}
    return Case("digits", (64, 10, 10), (x[:300], y[:300]), (x[300:800], y[300:800]), mixed, "categorical", plan)


CASES = {"regression": regression, "moons": moons, "digits": digits}


def trained(case: Case, seed: int) -> nn.Module:
    """A maximum of log p(D, θ)."""
    torch.manual_seed(seed)
    net = case.network()
    target = lw.log_joint(net, case.train, case.likelihood, PRIOR)
    theta, n = target.start.clone().requires_grad_(), len(case.train[1])
    adam = torch.optim.Adam([theta], RATE)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(adam, STEPS)
    for _ in range(STEPS):
        adam.zero_grad()
        (-target(theta) / n).backward()
        adam.step()
        falling.step()
    nn.utils.vector_to_parameters(theta.detach(), net.parameters())
    return net


# -- methods ------------------------------------------------------------------------------------------------------

Run = Callable[[Problem, Case, Any], Trial]


@dataclass(frozen=True)
class Method:
    """`run(problem, case, setting)`; settings: those that are tried on the seed of choices; same: take its choice."""

    run: Run
    settings: tuple[Any, ...] = (None,)
    same: str = ""
    classes: bool = False  # for labels alone


def laplace(**told: Any) -> Run:
    return lambda problem, case, _: methods.by_laplace(problem, **told)


def named(name: str) -> Run:
    """One that the bench knows."""
    return lambda problem, case, _: methods.METHODS[name](problem)


def through(problem: Problem, case: Case, _: Any) -> Trial:
    la = methods.by_laplace(problem, structure="full").fit
    asked = {"via": "network", "samples": PARTICLES, "generator": problem.seeded()}
    return Trial(la, float(problem.outputs), asked)


def tuned(problem: Problem, case: Case, _: Any) -> Trial:
    return Trial(methods.by_laplace(problem, structure="full").fit.tuned())


def default(problem: Problem, case: Case, _: Any) -> Trial:
    return Trial(lw.laplace(problem.model, problem.data, "classification", structure="full").tuned())


def mean_field(share: float) -> Run:
    def run(problem: Problem, case: Case, setting: Any) -> Trial:
        lr, start = setting
        told = {"lr": lr, "draws": PARTICLES}
        if start == "laplace":
            told["start"] = methods.by_laplace(problem, structure="diag").fit
        batch = min(128, problem.n)
        return methods.mean_field(problem, int(share * case.epochs * problem.n / batch), batch, **told)

    return run


def walk(sampler: Any, share: float, **told: Any) -> Run:
    def run(problem: Problem, case: Case, setting: Any) -> Trial:
        steps = int(share * case.epochs * problem.n / (CHAINS * min(BATCH, problem.n)))
        thin = max(1, steps * 4 // (5 * DRAWS))
        plan = {"batch": BATCH, "chains": CHAINS, "draws": DRAWS, "thin": thin}
        warmup = (steps - DRAWS * thin) // 5 * 5
        return methods.by_steps(problem, sampler, setting * methods.safe_step(problem), warmup=warmup, **plan, **told)

    return run


def retrained(problem: Problem, case: Case, members: int) -> int:
    """Steps of each member, of a hundredth of the reference's epochs."""
    return int(0.01 * case.epochs / members * problem.batches)


def ensemble(problem: Problem, case: Case, lr: Any) -> Trial:
    return methods.ensemble(problem, 5, retrained(problem, case, 5), lr)


def blended(problem: Problem, case: Case, lr: Any) -> Trial:
    return methods.laplaces(problem, 5, retrained(problem, case, 5), lr, structure="full")


def swag(problem: Problem, case: Case, lr: Any) -> Trial:
    steps = int(0.01 * case.epochs * problem.n / BATCH)
    return methods.swag(problem, steps, lr, BATCH, samples=PARTICLES)


def dropout(problem: Problem, case: Case, setting: Any) -> Trial:
    lr, p = setting
    own = Problem(case.network(p), problem.data, problem.likelihood, problem.prior, problem.seed)
    return methods.dropout(own, retrained(problem, case, 1), lr, samples=PARTICLES)


STEP = (0.1, 0.3, 1.0, 3.0, 10.0)  # in the unit of `methods.safe_step`
FIELD = tuple((lr, start) for lr in (0.003, 0.01, 0.03) for start in ("trained", "laplace"))
TRIED = {
    "the network": Method(lambda problem, case, _: methods.trained(problem)),
    "Laplace, full": Method(laplace(structure="full")),
    "Laplace, kron": Method(laplace(structure="kron")),
    "Laplace, diag": Method(laplace(structure="diag")),
    "Laplace, last layer": Method(laplace(structure="full", subset="last_layer")),
    "Laplace, matrix-free": Method(named("laplace matrix-free")),
    "Laplace, full, tangent center": Method(named("laplace tangent")),
    "Laplace, full, Dirichlet labels": Method(named("laplace dirichlet"), classes=True),
    "Laplace, full, prior by evidence": Method(tuned),
    "Laplace, “classification”, tuned": Method(default, classes=True),
    "Laplace, full, through the network": Method(through),
    "variational, tangent model": Method(named("variational tangent")),
    "mean-field VI": Method(mean_field(0.01), FIELD),
    "mean-field VI, longer": Method(mean_field(0.1), same="mean-field VI"),
    "SGLD": Method(walk(lw.samplers.sgld, 0.01), STEP),
    "SGLD, longer": Method(walk(lw.samplers.sgld, 0.1), STEP[:3]),
    "SGHMC": Method(walk(lw.samplers.sghmc, 0.01), STEP),
    "cyclical SGHMC": Method(walk(lw.samplers.sghmc, 0.01, cycles=5), STEP),
    "ensemble of 5": Method(ensemble, (0.003, 0.01, 0.03)),
    "5 Laplaces, full": Method(blended, same="ensemble of 5"),
    "SWAG": Method(swag, (0.003, 0.01, 0.03, 0.1, 0.3)),
    "MC dropout": Method(dropout, tuple((lr, p) for lr in (0.01, 0.03) for p in (0.02, 0.05, 0.1, 0.2))),
}
