"""The reference: draws of the posterior by HMC, kept on disk, and refused unless its chains agree on the functions.

R̂ is that of what each draw predicts at the test inputs: class probabilities, or outputs. A file's name is a digest
of all that its draws follow from (`samplers/journal.py`: weights, data, likelihood, prior, settings, generator), of the
network's layers, and of log p(D, θ) at its weights. While chains run their checkpoint is beside it, so that a killed
run goes on. Both are written whole or not at all (`files.py`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lapwing import files, given, tree
from lapwing.api import load
from lapwing.errors import InvalidValue, NotConverged
from lapwing.posterior import Chains
from lapwing.posterior.diagnostics import by_arviz
from lapwing.samplers import hmc
from lapwing.samplers.hmc import Hmc
from lapwing.samplers.journal import identity
from lapwing.samplers.target import targeted
from lapwing.samplers.walk import Plan
from lapwing.shell import Fitted
from lapwing.truth.methods import Problem

LIMIT = 1.1  # of R-hat, in function space
FEWEST = 3  # chains
SCHEMA = 2
SETTINGS: dict[str, Any] = {"chains": 4, "draws": 1000, "warmup": 500, "leapfrog": 20, "start": "prior"}
KNOWN = {*SETTINGS, "thin", "step"}


@dataclass(frozen=True)
class Convergence:
    """What the reference's chains say of themselves, over all predictions at the test inputs."""

    rhat: float  # the largest
    ess: float  # the least
    acceptance: float | None  # mean; None of a sampler that refuses nothing
    chains: int
    draws: int  # of each
    epochs: float | None  # gradient epochs, all chains together; None of a fit that was given

    def __str__(self) -> str:
        cost = "" if self.epochs is None else f", {self.epochs:,.0f} gradient epochs"
        return (
            f"{self.chains} chains of {self.draws:,} draws{cost}; R-hat of predictions at most {self.rhat:.3f}, "
            f"ESS at least {self.ess:,.0f}"
        )


def referenced(
    problem: Problem, reference: Any, cache: str | os.PathLike[str] | None, progress: bool
) -> tuple[Fitted, float | None]:
    """The reference, from the cache if it is there, with its cost in gradient epochs."""
    if isinstance(reference, Fitted):
        _check_same(reference, problem)
        return reference, None
    settings = _settings(reference)
    plan = Plan(settings["chains"], settings["draws"], settings["warmup"], settings.get("thin", 1))
    epochs = float(plan.chains * plan.steps * settings["leapfrog"])
    told = {"prior": problem.prior, "generator": problem.seeded(), "progress": progress, **settings}
    given_ = problem.model, problem.data, problem.likelihood
    if cache is None:
        return hmc(*given_, **told), epochs
    folder = files.as_path(cache)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"hmc-{_digest(problem, settings, plan)}.safetensors"
    if path.exists():
        return _loaded(path, problem), epochs
    fit = hmc(*given_, **told, checkpoint=path.with_suffix(".walk"))
    fit.save(path)
    return fit, epochs


def _check_same(fit: Fitted, problem: Problem) -> None:
    """Raise on what has no chains, and on a fit of another network, other targets or another density."""
    if not isinstance(fit.posterior, Chains):
        raise InvalidValue(f"{fit!r} has no chains, so that nothing tells whether it converged; give a sampler's fit")
    mine, other = problem.joint, fit.tangent
    prior = None if fit.prior is None else tree.fingerprints(fit.prior.facts())
    differs = [
        what
        for what, same in (
            ("parameters", other.layout.same_as(mine.tangent.layout)),
            ("targets", (fit.n, fit.targets) == (mine.n, mine.targets)),
            ("likelihood", fit.likelihood.kind == mine.likelihood.kind),
            ("prior", prior == tree.fingerprints(mine.prior.facts())),
        )
        if not same
    ]
    if differs:
        raise InvalidValue(f"the reference {fit!r} is of another problem: its {', '.join(differs)} differ")


def _settings(reference: Any) -> dict[str, Any]:
    if isinstance(reference, str) and reference == "hmc":
        return dict(SETTINGS)
    if not isinstance(reference, Mapping):
        raise InvalidValue(
            f"reference is 'hmc', a mapping of lw.samplers.hmc's arguments, or a sampler's fit; got {reference!r}"
        )
    wrong = set(reference) - KNOWN
    if wrong:
        raise InvalidValue(f"reference knows {sorted(KNOWN)}, not {sorted(wrong)}{given.near(min(wrong), KNOWN)}")
    return {**SETTINGS, **reference}


def _digest(problem: Problem, settings: dict[str, Any], plan: Plan) -> str:
    target = targeted(problem.model, problem.data, problem.likelihood, problem.prior, 1.0, "all", None)
    kernel = Hmc(settings["leapfrog"], settings.get("step"))
    of = identity(target, kernel, plan, problem.seeded(), settings["start"])
    there = f"{float(problem.joint(problem.joint.start).detach()):.8g}"  # two networks may differ in what they do alone
    text = json.dumps([SCHEMA, str(problem.model), there, of], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _loaded(path: Path, problem: Problem) -> Fitted:
    found = load(path, problem.model)
    if not isinstance(found, Fitted):
        raise InvalidValue(f"{path} holds no sampler's fit; delete it, and the reference is drawn again")
    return found


def converged(fit: Any, x: Any, epochs: float | None) -> Convergence:
    """What its chains say; raises where they disagree on what they predict at x."""
    chains = fit.posterior
    if len(chains.lengths) < FEWEST:
        raise InvalidValue(f"a reference needs {FEWEST} chains, it has {len(chains.lengths)}")
    if len(set(chains.lengths)) > 1:
        raise NotConverged(f"chains of the reference diverged after {chains.lengths} draws; take a smaller step")
    each = chains.by_chain(responses(fit, x))
    rhat, ess = by_arviz("rhat", each), by_arviz("ess", each)
    if not bool((rhat <= LIMIT).all()):  # NaN, of chains that stand still, is no agreement
        above, most = float((~(rhat <= LIMIT)).double().mean()), float(rhat.nan_to_num(torch.inf).max())
        raise NotConverged(
            f"the reference has not converged: R-hat of its predictions is up to {most:.3g}, and above {LIMIT} at "
            f"{above:.0%} of them, so that nothing can be held to it; give reference= more draws, warmup or leapfrog"
        )
    acceptance = fit.diagnostics.acceptance
    accepted = None if acceptance is None else float(acceptance.mean())
    return Convergence(float(rhat.max()), float(ess.min()), accepted, len(each), each.shape[1], epochs)


def responses(fit: Any, x: Any) -> Tensor:
    """What each particle predicts at x, (s, n, ...): class probabilities, or outputs."""
    f, likelihood = fit.posterior.outputs(x).values, fit.likelihood.plain
    return likelihood.mean(f) if likelihood.classes else f
