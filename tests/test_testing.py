"""`lapwing.testing` passes parts that keep their laws, and names the law that a planted bug breaks, with figures."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import lapwing as lw
from helpers import normal
from lapwing.errors import BrokenLaw, InvalidValue
from lapwing.operators import Dense, Diagonal, linalg
from lapwing.testing import check_likelihood, check_operator, check_prior, check_structure
from lapwing.testing.laws import Laws

Bug = tuple[str, Callable[..., Any], str]  # what is wrong, how, and the law that says so


def two_broken_laws() -> None:
    with Laws("Thing") as law:
        for at in "ab":
            with law("first", at):
                raise AssertionError("1 is not 2")
        with law("second"):
            raise KeyError("x")


def test_every_broken_law_is_named_with_its_first_figures() -> None:
    with pytest.raises(BrokenLaw, match=r"Thing breaks 2 .*\n  first\n +at a: 1 is not 2\n  second\n +Key") as caught:
        two_broken_laws()
    assert isinstance(caught.value, lw.errors.LapwingError)
    assert isinstance(caught.value.__cause__, AssertionError)


def test_it_comes_with_the_package_and_without_pytest() -> None:
    code = "import sys, lapwing as lw; lw.testing.check_operator; assert 'pytest' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# -- operators -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Faulty:
    """A dense matrix with one verb that is wrong."""

    inner: Any
    bug: str = ""

    @property
    def size(self) -> int:
        return self.inner.size


OPERATORS: dict[str, Bug] = {
    "logdet off": ("logdet", lambda found, *_: 1.001 * found, r"logdet is log\|M\|"),
    "logdet without gradient": ("logdet", lambda found, *_: found.detach() + 0 * found, "logdet is differentiable"),
    "solve not symmetric": ("solve", lambda found, *_: found + 1e-3 * found.roll(1, -1), "solve is symmetric"),
    "solve off": ("solve", lambda found, *_: 1.001 * found, "solve undoes mv"),
    "draws too wide": ("draw", lambda found, *_: 1.3 * found, "draws have mean 0 and covariance"),
    "draws shifted": ("draw", lambda found, *_: found + 1, "draws have mean 0 and covariance"),
    "draws of their own": ("draw", lambda found, *_: torch.randn_like(found), "draws come from their generator alone"),
    "covariance off": ("covariance", lambda found, *_: found + 1e-6, "covariance is X M"),
    "diagonal off": ("diagonal", lambda found, *_: found + 1e-6, "traces are sums"),
    "mv off": ("mv", lambda found, *_: 1.001 * found, "mv is M v"),
    "mv of vectors only": ("mv", lambda found, *_: found[0] if found.ndim == 3 else found, "mv is M v for any batch"),
    "dense off": ("to_dense", lambda found, *_: found + 1e-6, "to_dense is M"),
    "shift that adds nothing": ("shift", lambda found, op, *_: op, "shift and scale compose"),
}


def call(verb: str, op: Faulty, *args: Any) -> Any:
    found = getattr(linalg, verb)(op.inner, *args)
    found = replace(op, inner=found) if verb in ("scale", "shift") else found
    wrong, how, _ = OPERATORS.get(op.bug, ("", None, ""))
    return how(found, op, *args) if how is not None and wrong == verb else found


for verb in ("mv", "scale", "shift", "solve", "logdet", "draw", "covariance", "diagonal", "to_dense"):
    getattr(linalg, verb).register(Faulty, partial(call, verb))


def matrix() -> Tensor:
    r = normal(4, 7)
    return r.mT @ r


def test_an_operator_without_a_bug_passes() -> None:
    check_operator(Faulty(Dense(matrix())), matrix())
    check_operator(Faulty(Dense(matrix())))


@pytest.mark.parametrize("bug", OPERATORS)
def test_a_planted_bug_of_an_operator_is_named(bug: str) -> None:
    with pytest.raises(BrokenLaw, match=OPERATORS[bug][2]):
        check_operator(Faulty(Dense(matrix()), bug), matrix())


def test_a_kind_of_shift_that_should_be_refused_is_named() -> None:
    with pytest.raises(BrokenLaw, match=r"does not take is refused\n.*'element': no Unsupported was raised"):
        check_operator(Dense(matrix()), matrix(), shifts=("uniform", "grouped"))
    with pytest.raises(InvalidValue, match="scalar"):
        check_operator(Dense(matrix()), matrix(), shifts=("scalar",))


# -- likelihoods -----------------------------------------------------------------------------------------------------


class Counts(lw.likelihoods.Poisson):
    bug = ""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        wrong, how, _ = LIKELIHOODS.get(type(self).bug, ("", None, ""))
        return (lambda *args: how(found(*args), *args)) if how is not None and name == wrong else found


LIKELIHOODS: dict[str, Bug] = {
    "score off": ("score", lambda found, *_: found + 1e-6, "score, times the curvature weights"),
    "root off": ("hessian_root", lambda found, *_: 1.001 * found, "the curvature root has S Sᵀ = Λ"),
    "draws too many": ("sample", lambda found, *_: found + 1, "draws have the mean"),
    "mean off": ("mean", lambda found, *_: 1.1 * found, "draws have the mean"),
    "variance off": ("variance", lambda found, *_: 1.2 * found, "draws have the mean and the variance"),
    "density off": ("log_prob", lambda found, *_: found + 1e-6, "log_prob is the density that was given"),
    "sums off": ("statistics", lambda found, *_: {"log_lik": found["log_lik"] + 1}, "statistics add"),
    "trace off": ("curvature_trace", lambda found, *_: 1.1 * found, "curvature_trace is tr Λ"),
    "noise off": ("curvature_noise", lambda found, *_: 1.2 * found, "curvature_noise has the covariance"),
}


def poisson(f: Tensor, y: Tensor) -> Tensor:
    return (y * f - f.exp() - torch.lgamma(y + 1)).sum()


@pytest.mark.parametrize("bug", ["", *LIKELIHOODS])
def test_a_planted_bug_of_a_likelihood_is_named(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counts, "bug", bug)
    if not bug:
        check_likelihood(Counts(), log_prob=poisson)
        return
    with pytest.raises(BrokenLaw, match=LIKELIHOODS[bug][2]):
        check_likelihood(Counts(), log_prob=poisson)


# -- priors ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Heavy(lw.priors.Prior):
    """w ~ Laplace(0, b), times what a test makes wrong."""

    scale: Any = 1.0
    per: Any = "all"
    settings = (*lw.priors.Prior.settings, "density", "curvature", "spread")
    density: float = 2.0
    curvature: float = 1.0
    spread: float = 1.0

    def log_prob(self, weights: Any) -> Tensor:
        b = self.each(self.scale)
        return -(self.vector(weights).abs() / b + (self.density * b).log()).sum()

    def quadratic(self, v: Tensor) -> tuple[Diagonal, Tensor]:
        return Diagonal(self.curvature / (self.each(self.scale) * v.abs()), len(v)), torch.zeros_like(v)

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        b = self.spread * self.each(self.scale)
        u = torch.rand((n, len(b)), generator=generator, dtype=torch.float64) - 0.5
        return -b * u.sign() * torch.log1p(-2 * u.abs())


@dataclass(frozen=True, eq=False)
class Unscaled(Heavy):
    """Without its constant −log 2b."""

    def log_prob(self, weights: Any) -> Tensor:
        return -(self.vector(weights).abs() / self.each(self.scale)).sum()


PRIORS: dict[str, tuple[lw.priors.Prior, str]] = {
    "quadratic off": (Heavy(curvature=1.001), "has the gradient of log_prob"),
    "draws too wide": (Heavy(spread=1.2), r"E\[θ_i ∂_i log p\] = −1"),
    "constant off": (Heavy(density=3.0), "log_prob integrates to one"),
    "not normalized in its scale": (Unscaled(), "log_prob is normalized at every scale"),
    "negative curvature": (Heavy(curvature=-1.0), "the diagonal of A is positive"),
}


@pytest.mark.parametrize("bug", PRIORS)
def test_a_planted_bug_of_a_prior_is_named(bug: str) -> None:
    prior, law = PRIORS[bug]
    with pytest.raises(BrokenLaw, match=law):
        check_prior(prior)


def test_a_model_comes_with_its_data() -> None:
    check_prior(Heavy(0.7, per="layer"))
    with pytest.raises(InvalidValue, match="together"):
        check_prior(Heavy(), torch.nn.Linear(3, 2))


# -- structures ------------------------------------------------------------------------------------------------------


class TraceSum:
    """tr G_h for each curvature weight h, (h,)."""

    mutable = ("sum",)

    def __init__(self, tangent: Any, weights: int, bug: str) -> None:
        self.tangent, self.bug, self.sum = tangent, bug, torch.zeros(weights, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        if self.bug == "draws":
            torch.rand(1)
        return self.tangent(x)

    def observe(self, x: Tensor, y: Tensor, f: Tensor, u: Tensor, column: Tensor) -> None:
        rows, weights = self.tangent.pulled(x, u.to(f)), len(self.sum)
        found = torch.stack([rows[:, h::weights].double().square().sum() for h in range(weights)])
        self.sum = found if self.bug == "last batch" else self.sum + found / (len(x) if self.bug == "means" else 1)

    def finish(self) -> tuple[dict[str, Tensor], tuple[()]]:
        return {"trace": self.sum}, ()


@lw.curvature.register
@dataclass(frozen=True)
class Isotropic(lw.curvature.Structure):
    """G ≈ (tr G / P) I."""

    bug: str = ""

    def __str__(self) -> str:
        return "isotropic"

    def resolved(self, probe: Any, factor: Any) -> Isotropic:
        return self

    def start(self, tangent: Any, likelihood: Any, factor: Any, probe: Any) -> TraceSum:
        return TraceSum(tangent, len(likelihood.curvature_weights(factor.kind)), self.bug)

    def operator(self, state: Any, weights: Tensor) -> Any:
        p, each = state.layout.size, (weights @ state.sums["trace"]).reshape(1)
        op = Diagonal((1.01 if self.bug == "scale" else 1) * each / p, p)
        return Faulty(op, "logdet off") if self.bug == "operator" else op

    def coverage(self, parts: Any, tangent: Any) -> dict[str, str]:
        return dict.fromkeys(tangent.layout.names[self.bug == "coverage" :], "its mean curvature")


STRUCTURES = {
    "last batch": "batches and their order do not matter",
    "means": "fits of parts add up",
    "scale": "the curvature is what `keeps` makes",
    "coverage": "coverage says how each parameter is treated\n.*0.weight",
    "operator": r"its operator keeps the laws of operators\n.*logdet is log\|M\|",
    "draws": "the global random state",
}


def mean_curvature(G: Tensor) -> Tensor:
    return G.trace() / len(G) * torch.eye(len(G), dtype=torch.float64)


@pytest.mark.parametrize("bug", ["", *STRUCTURES])
def test_a_planted_bug_of_a_structure_is_named(bug: str) -> None:
    if not bug:
        check_structure(Isotropic(), mean_curvature)
        return
    with pytest.raises(BrokenLaw, match=f"(?s){STRUCTURES[bug]}"):
        check_structure(Isotropic(bug), mean_curvature)


def test_a_structure_needs_some_examples() -> None:
    with pytest.raises(InvalidValue, match="five examples"):
        check_structure("diag", problem=(torch.nn.Linear(3, 2), normal(4, 3), normal(4, 2), lw.likelihoods.Gaussian()))
