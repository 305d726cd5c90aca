"""The methods that a bench knows by name, each a function of the problem: the posterior that it finds, and its cost.

The cost is in gradient epochs beyond the trained network: one is a gradient of the log-likelihood over all n examples.

    steps of batches      chains · steps · batch / n
    Laplace               c, the outputs: as many backward passes over the data give J; matrix-free its passes
    a retrained network   its steps, each a gradient over a batch

A network that is trained anew starts at its modules' `reset_parameters`, by Adam on −log p(D, θ)/n, without dropout.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lapwing import data as loading
from lapwing import ensembles, samplers, tree, variational
from lapwing.api import laplace
from lapwing.errors import InvalidValue, Unsupported
from lapwing.log_joint import LogJoint, log_joint
from lapwing.operators import linalg
from lapwing.samplers.examples import HeldExamples
from lapwing.shell import Fitted, Shell, mixture
from lapwing.subsets import Swag


@dataclass(frozen=True, eq=False)
class Problem:
    """What every method is given."""

    model: nn.Module
    data: Any
    likelihood: Any
    prior: Any
    seed: int = 0
    joint: LogJoint = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "joint", log_joint(self.model, self.data, self.likelihood, self.prior))

    def seeded(self) -> torch.Generator:
        """A generator of its own for each call."""
        return torch.Generator().manual_seed(self.seed)

    @property
    def n(self) -> int:
        """Examples."""
        return self.joint.n

    @property
    def outputs(self) -> int:
        """c."""
        return self.joint.tangent.output_shape(loading.first_inputs(self.joint.batches, self.joint.tangent.device))[1]

    @property
    def batches(self) -> int:
        """Steps of an epoch."""
        return sum(1 for _ in loading.passes(self.joint.batches, self.joint.tangent.device))


@dataclass(frozen=True, eq=False)
class Trial:
    """A posterior that a method found, its gradient epochs if known, and how to ask it: arguments of `predict`."""

    fit: Shell
    epochs: float | None = None
    asked: dict[str, Any] = field(default_factory=dict)  # never written to


Method = Callable[[Problem], Any]  # a fit, or a Trial


def trained(problem: Problem) -> Trial:
    """The network as it is."""
    return Trial(ensembles.deep([problem.model], problem.joint.likelihood), 0.0)


def by_laplace(problem: Problem, likelihood: Any = None, center: str = "map", **told: Any) -> Trial:
    """A Laplace at the problem's own prior; told: other arguments of `lw.laplace`. likelihood: another than the
    problem's, of labels as observations, say. center: "tangent" predicts about h(x, v*)."""
    likelihood = problem.likelihood if likelihood is None else likelihood
    la = laplace(problem.model, problem.data, likelihood, prior=problem.prior, **told)
    epochs = la.solve.passes if la.streams else problem.outputs
    if center == "map":
        return Trial(la, float(epochs))
    la = la.recentered(center=center)
    epochs += la.tangent_map.passes or problem.outputs  # no passes: J was read once more, and kept
    return Trial(la, float(epochs), {"mean": "tangent"})


def variational_tangent(problem: Problem) -> Trial:
    """The nearest Gaussian of all weights in the tangent model; its steps read no data."""
    post = variational.tangent(problem.model, problem.data, problem.likelihood, prior=problem.prior)
    return Trial(post, float(problem.outputs))


def mean_field(problem: Problem, steps: int = 2000, batch: int = 128, **told: Any) -> Trial:
    """Mean-field variational inference from the trained network."""
    post = variational.mean_field(
        *(problem.model, problem.data, problem.likelihood),
        **{"prior": problem.prior, "steps": steps, "batch": batch, "generator": problem.seeded(), **told},
    )
    return Trial(post, steps * min(batch, problem.n) / problem.n)


def by_steps(
    problem: Problem,
    sampler: Callable[..., Fitted],
    step: float | None = None,
    batch: int = 32,
    chains: int = 4,
    draws: int = 100,
    warmup: int = 1000,
    thin: int = 10,
    **told: Any,
) -> Trial:
    """A minibatch sampler; step: None is `safe_step`."""
    batch = min(batch, problem.n)
    plan = {"batch": batch, "chains": chains, "draws": draws, "warmup": warmup, "thin": thin}
    own = {"step": safe_step(problem) if step is None else step, "prior": problem.prior, "generator": problem.seeded()}
    post = sampler(problem.model, problem.data, problem.likelihood, **{**plan, **own, **told})
    return Trial(post, chains * (warmup + draws * thin) * batch / problem.n)


def safe_step(problem: Problem) -> float:
    """A fifth of the least variance of any weight given the others, 1/max diag(H + A): what Langevin steps stand."""
    la = laplace(problem.model, problem.data, problem.likelihood, prior=problem.prior, structure="diag")
    return 0.2 / float(linalg.diagonal(la.posterior.precision).max())


def networks(problem: Problem, members: int, steps: int, lr: float, dropout: bool = False) -> tuple[Any, list[Any]]:
    """Networks trained anew under the problem's prior: as one fit, and each."""
    made: list[nn.Module] = []

    def make() -> nn.Module:
        made.append(_fresh(problem.model, dropout))
        return made[-1]

    told = {"members": members, "steps": steps, "lr": lr, "prior": problem.prior, "generator": problem.seeded()}
    return ensembles.train(make, problem.data, problem.likelihood, **told), made


def ensemble(problem: Problem, members: int = 5, steps: int = 1000, lr: float = 1e-2) -> Trial:
    """A deep ensemble, each member a MAP under the problem's prior."""
    fit, _ = networks(problem, members, steps, lr)
    return Trial(fit, members * steps / problem.batches)


def laplaces(problem: Problem, members: int = 5, steps: int = 1000, lr: float = 1e-2, **told: Any) -> Trial:
    """A mixture in equal parts of Laplaces about each member of an ensemble."""
    _, made = networks(problem, members, steps, lr)
    each = [laplace(net, problem.data, problem.likelihood, prior=problem.prior, **told) for net in made]
    return Trial(mixture(each), members * (steps / problem.batches + problem.outputs))


def swag(
    problem: Problem,
    steps: int = 1000,
    lr: float = 1e-2,
    batch: int = 32,
    snapshots: int = 40,
    rank: int = 20,
    samples: int = 64,
) -> Trial:
    """SWAG of a run of SGD from the trained network, at a constant rate under the problem's prior. The spread of its
    snapshots is that of minibatches: `batch` examples a step, drawn with repetition."""
    net, joint, g = copy.deepcopy(problem.model).eval(), problem.joint, problem.seeded()
    seen, sgd = Swag(net, rank), torch.optim.SGD(net.parameters(), lr)
    examples, batch = HeldExamples.of(joint), min(batch, problem.n)
    for step in range(steps):
        x, y = examples.some(torch.randint(problem.n, (1, batch), generator=g))
        f = joint.tangent.forward(net, tree.map_tensors(lambda t: t[0], x))
        fit = joint.likelihood.log_prob(f.double(), y[0]).sum() / batch
        sgd.zero_grad()
        (joint.prior.penalty(net) / problem.n - fit).backward()
        sgd.step()
        if (step + 1) % max(1, steps // snapshots) == 0:
            seen.update()
    return Trial(ensembles.swag(seen, joint.likelihood, samples=samples, generator=g), steps * batch / problem.n)


def dropout(problem: Problem, steps: int = 1000, lr: float = 1e-2, samples: int = 64) -> Trial:
    """MC dropout: a network trained anew with the model's dropout layers on."""
    _, made = networks(problem, 1, steps, lr, dropout=True)
    fit = ensembles.dropout(made[0], problem.joint.likelihood, samples, generator=problem.seeded())
    return Trial(fit, steps / problem.batches)


def _fresh(model: nn.Module, dropout: bool) -> nn.Module:
    """The architecture at a random start, its dropout off unless it is asked for."""
    net = copy.deepcopy(model)
    for name, module in net.named_modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
        elif next(module.parameters(recurse=False), None) is not None:
            raise Unsupported(
                f"{name or 'the network'} ({type(module).__name__}) has weights and no reset_parameters(), so that it "
                "cannot be trained anew; give methods= a fit of your own, {name: fit}"
            )
        if isinstance(module, nn.modules.dropout._DropoutNd) and not dropout:
            module.p = 0.0
    return net


METHODS: dict[str, Method] = {
    "map": trained,
    "laplace": by_laplace,
    "laplace full": lambda problem: by_laplace(problem, structure="full"),
    "laplace kron": lambda problem: by_laplace(problem, structure="kron"),
    "laplace diag": lambda problem: by_laplace(problem, structure="diag"),
    "laplace last layer": lambda problem: by_laplace(problem, structure="full", subset="last_layer"),
    "laplace matrix-free": lambda problem: by_laplace(problem, structure="matrix_free", generator=problem.seeded()),
    "laplace tangent": lambda problem: by_laplace(problem, center="tangent", structure="full"),
    "laplace dirichlet": lambda problem: by_laplace(problem, "dirichlet", structure="full"),
    "variational tangent": variational_tangent,
    "mean-field": mean_field,
    "sgld": lambda problem: by_steps(problem, samplers.sgld),
    "sghmc": lambda problem: by_steps(problem, samplers.sghmc),
    "cyclical sghmc": lambda problem: by_steps(problem, samplers.sghmc, cycles=5),
    "ensemble": ensemble,
    "mixture of laplaces": laplaces,
    "swag": swag,
    "dropout": dropout,
}


def tried(problem: Problem, name: str, method: Any) -> Trial:
    """What a method gives: a function of the problem, a fit, or a trial."""
    found = method(problem) if callable(method) and not isinstance(method, Shell) else method
    found = Trial(found) if isinstance(found, Shell) else found
    if not isinstance(found, Trial):
        raise InvalidValue(f"method {name!r} is a function of the problem that gives a fit, or a fit; got {found!r}")
    return found
