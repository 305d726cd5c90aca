"""The truth bench: every method on the same model, data, likelihood and prior, held to the same reference."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from lapwing import data as loading
from lapwing import given, tree
from lapwing.errors import InvalidValue
from lapwing.metrics.equivalent import Ladder
from lapwing.posterior import Particles
from lapwing.predictive import Prediction
from lapwing.predictive.plot import axes_of
from lapwing.shell import Fitted, Shell
from lapwing.truth.methods import METHODS, Problem, Trial, tried
from lapwing.truth.reference import Convergence, converged, referenced, responses
from lapwing.truth.scores import scored

DIGITS = {"epochs": "{:,.0f}", "seconds": "{:.1f}", "members": "{:.1f}", "rhat": "{:.3f}"}


@dataclass(frozen=True, eq=False)
class TruthBench:
    """{method: {metric: value}}, the reference first; prints as a table."""

    rows: dict[str, dict[str, float]]
    convergence: Convergence

    def to_dict(self) -> dict[str, dict[str, float]]:
        """{method: {metric: value}}."""
        return {name: dict(row) for name, row in self.rows.items()}

    def __getitem__(self, name: str) -> dict[str, float]:
        if name not in self.rows:
            raise InvalidValue(f"no method {name!r} was tried; they are {list(self.rows)}")
        return self.rows[name]

    def __repr__(self) -> str:
        columns = list(dict.fromkeys(key for row in self.rows.values() for key in row))
        lines = [["method", *columns]]
        lines += [[name, *(_shown(row.get(key), key) for key in columns)] for name, row in self.rows.items()]
        widths = [max(len(line[j]) for line in lines) for j in range(len(lines[0]))]
        text = [
            "  ".join(c.rjust(w) if j else c.ljust(w) for j, (c, w) in enumerate(zip(line, widths, strict=True)))
            for line in lines
        ]
        return "\n".join([*(line.rstrip() for line in text), f"reference: {self.convergence}"])

    def plot(self, ax: Any = None) -> Any:
        """A figure of each method's total variation from the reference, the nearest on top, with its cost beside it
        (needs matplotlib). ax: axes."""
        (axes,) = axes_of(ax, "bench.plot()", (6.5, 1.2 + 0.26 * len(self.rows)))
        found = sorted(((row["variation"], name) for name, row in self.rows.items() if name != "hmc"), reverse=True)
        for place, (variation, name) in enumerate(found):
            axes.plot(variation, place, "o", color="#0072B2")
            if (epochs := self.rows[name].get("epochs")) is not None:
                told = {"xytext": (6, -3), "textcoords": "offset points", "fontsize": 7, "color": "#555555"}
                axes.annotate(f"{epochs:,.0f}", (variation, place), **told)
        axes.axvline(self.rows["hmc"]["variation"], color="#999999", linestyle="--", label="half of HMC from the other")
        axes.set_yticks(range(len(found)), [name for _, name in found])
        axes.set_xlim(0, 1.25 * max(variation for variation, _ in found))
        axes.set_xlabel("total variation from HMC; numbers are gradient epochs")
        axes.legend(loc="upper right")
        return axes.figure


class Bench:
    """A problem with its reference, made once and seen to have converged; `row` holds a method to it."""

    def __init__(
        self,
        problem: Problem,
        reference: Any,
        test: Any,
        unknown: Any = None,
        yardstick: Shell | None = None,
        cache: str | os.PathLike[str] | None = None,
        progress: bool = False,
    ) -> None:
        device = problem.joint.tangent.device
        found = list(loading.passes(loading.as_batches(test), device))
        self.problem, self.unknown = problem, unknown
        self.x, self.y = tree.joined([x for x, _ in found]), torch.cat([y for _, y in found])
        self.ladder = None if yardstick is None else Ladder(self._members(yardstick), self.y)
        start = time.perf_counter()
        self.reference, epochs = referenced(problem, reference, cache, progress)
        self.seconds = time.perf_counter() - start
        self.convergence = converged(self.reference, self.x, epochs)

    def _members(self, yardstick: Any) -> Tensor:
        """What each network of an ensemble predicts, (m, n, c)."""
        if not isinstance(yardstick, Fitted) or not isinstance(yardstick.posterior, Particles):
            raise InvalidValue(f"yardstick is a fit of networks, such as lw.ensembles.train gives; got {yardstick!r}")
        return responses(yardstick, self.x)

    @cached_property
    def truth(self) -> Prediction:
        """The reference's prediction at the test inputs."""
        return self.reference.predict(self.x)

    def reference_row(self) -> dict[str, float]:
        """The reference's own metrics; its agreement and variation are those of half of its chains with the others."""
        trial = Trial(self.reference, self.convergence.epochs)
        row = scored(trial, self.x, self.y, self.truth, self.unknown, self.ladder)
        a, b = (Trial(half) for half in _halves(self.reference))
        halves = scored(a, self.x, self.y, b.fit.predict(self.x))
        row |= {key: halves[key] for key in ("agreement", "variation") if key in halves}
        return _with_cost(row, self.convergence.epochs, self.seconds)

    def row(self, name: str, method: Any = None) -> dict[str, float]:
        """{metric: value} of a method: one by its name, a function of the problem, a fit, or a Trial."""
        check_known({name: method})
        start = time.perf_counter()
        trial = tried(self.problem, name, METHODS[name] if method is None else method)
        seconds = time.perf_counter() - start
        row = scored(trial, self.x, self.y, self.truth, self.unknown, self.ladder)
        return _with_cost(row, trial.epochs, seconds)


def truth_bench(
    model: nn.Module,
    data: Any,
    likelihood: Any,
    prior: Any = 1.0,
    methods: Sequence[str] | Mapping[str, Any] = ("map", "laplace", "mean-field", "ensemble"),
    reference: Any = "hmc",
    *,
    test: Any,
    unknown: Any = None,
    yardstick: Shell | None = None,
    cache: str | os.PathLike[str] | None = None,
    seed: int = 0,
    progress: bool = False,
) -> TruthBench:
    """Hold methods to the posterior of a trained network's weights, as Hamiltonian Monte Carlo finds it.

    methods: names of `lw.truth.METHODS`, or {name: a function of the problem that gives a fit, a fit, or None for the
    method of that name}. reference: "hmc", a mapping of arguments of `lw.samplers.hmc`, or a sampler's fit; refused
    where R-hat of its predictions at the test inputs is above 1.1. test: (x, y), held out. unknown: inputs of another
    kind, which predictions should be unsure of. yardstick: a deep ensemble, in whose members a classifier's score is
    told. cache: a folder for references. Costs are gradient epochs beyond the trained network."""
    named = dict(methods) if isinstance(methods, Mapping) else dict.fromkeys(methods)
    if isinstance(methods, str) or not named:
        raise InvalidValue(f"methods is a list of names, or a mapping {{name: fit}}, not empty; got {methods!r}")
    check_known(named)
    if "hmc" in named:
        raise InvalidValue("the row 'hmc' is that of the reference; give the method another name")
    problem = Problem(model, data, likelihood, prior, given.whole(seed, "seed"))
    bench = Bench(problem, reference, test, unknown, yardstick, cache, progress)
    rows = {"hmc": bench.reference_row()}
    for name, method in named.items():
        rows[str(name)] = bench.row(str(name), method)
    return TruthBench(rows, bench.convergence)


def check_known(methods: Mapping[str, Any]) -> None:
    """Raise unless methods without a function or a fit of their own have one by their name."""
    for name, method in methods.items():
        if method is None and name not in METHODS:
            raise InvalidValue(
                f"methods are {list(METHODS)}, or {{name: fit}}; got {name!r}{given.near(name, METHODS)}"
            )


def _halves(fit: Fitted) -> tuple[Fitted, Fitted]:
    """The first half of the chains, and the others, as fits of their own."""
    chains: Any = fit.posterior
    cut = sum(chains.lengths[: len(chains.lengths) // 2])
    parts = Particles(chains.tangent, chains.weights[:cut]), Particles(chains.tangent, chains.weights[cut:])
    likelihoods = fit.likelihood.some(0, cut), fit.likelihood.some(cut, len(chains.weights))
    a, b = (replace(fit, posterior=p, likelihood=lik) for p, lik in zip(parts, likelihoods, strict=True))
    return a, b


def _with_cost(row: dict[str, float], epochs: float | None, seconds: float) -> dict[str, float]:
    return {**row, **({} if epochs is None else {"epochs": epochs}), "seconds": seconds}


def _shown(value: float | None, key: str) -> str:
    if value is None:
        return ""
    return "inf" if math.isinf(value) else DIGITS.get(key, "{:.3f}").format(value)
