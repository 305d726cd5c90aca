"""What a sampler learns in its warm-up: a step size by dual averaging, and the variance of each coordinate.

    log ε_t = μ − (√t/γ) H_t,        H_t = (1 − 1/(t + t₀)) H_{t−1} + (δ − a_t)/(t + t₀)
    log ε̄_t = t^{−κ} log ε_t + (1 − t^{−κ}) log ε̄_{t−1}

a_t is the chains' mean acceptance, δ what it should be (Nesterov 2009; Hoffman & Gelman 2014). Variances are those of
all chains over three windows of the warm-up, shrunk as in Stan. Chains share both; neither moves once draws are kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lapwing import given
from lapwing.errors import InvalidValue, NotConverged
from lapwing.samplers.streams import Streams

GAMMA, T0, KAPPA = 0.05, 10.0, 0.75  # of dual averaging, as in Stan
WINDOWS = (0.1, 0.2, 0.45, 0.9)  # shares of the warm-up: where the first window begins, and where each of three ends
LEAST = 1e-12  # a step below this moves nothing
FEW = 20  # warm-up steps that are too few for variances

State = dict[str, Tensor]


class Stage(NamedTuple):
    """Where a walk is: step t of a cycle, that begins with so many steps of warm-up."""

    t: int
    warmup: int
    steps: int

    @property
    def warming(self) -> bool:
        """Whether what is drawn now is thrown away."""
        return self.t < self.warmup


@dataclass(frozen=True)
class Adaptation:
    """Of a step size, aiming at a mean acceptance; a step that is given is not moved, nor are variances then."""

    aim: float  # δ
    step: float | None = None
    bounds: tuple[float, float] | None = None  # of a step that is no length: it is held there

    def __post_init__(self) -> None:
        if self.step is not None:
            check_step(self.step)

    def begin(self, q: Tensor) -> State:
        """At the start q (k, d): a step of d^−¼, which warm-up moves fast, or the one given."""
        step = self.step if self.step is not None else q.shape[1] ** -0.25
        zero, d = torch.zeros((), dtype=torch.float64), q.shape[1]
        return {
            **_restarted(math.log(step)),
            "log_step": torch.tensor(math.log(step), dtype=torch.float64),
            "variance": torch.ones(d, dtype=torch.float64, device=q.device),
            "seen": zero.clone(),
            "mean": torch.zeros(d, dtype=torch.float64, device=q.device),
            "scatter": torch.zeros(d, dtype=torch.float64, device=q.device),
        }

    def update(self, state: State, stage: Stage, acceptance: Tensor, q: Tensor, method: str, streams: Streams) -> State:
        """After a transition in the warm-up, to q (k, d) with the acceptances (k,), with those of other ranks."""
        if self.step is not None or not stage.warming:
            return state
        acceptance, q = streams.of_all(acceptance, q)
        state = self._averaged(state, float(acceptance.mean()))
        begin, *ends = (int(share * stage.warmup) for share in WINDOWS)
        if stage.warmup >= FEW and begin <= stage.t < ends[-1]:
            state = _gathered(state, q)
            if stage.t + 1 in ends:
                state = _with_variance(state)
        if stage.t + 1 == stage.warmup:
            state = {**state, "log_step": state["log_mean"]}
        if float(state["log_step"]) < math.log(LEAST):
            raise NotConverged(
                f"the step of {method} fell to {float(state['log_step'].exp()):.3g} in warm-up step {stage.t + 1}: "
                "next to no proposal is accepted. Check that log p(D, θ) is finite and smooth about the start, scale "
                "inputs and targets, or give start= and step="
            )
        return state

    def _averaged(self, state: State, acceptance: float) -> State:
        count = state["count"] + 1
        error = (1 - 1 / (count + T0)) * state["error"] + (self.aim - acceptance) / (count + T0)
        log_step = state["center"] - count.sqrt() / GAMMA * error
        log_step = log_step if self.bounds is None else log_step.clamp(*(math.log(bound) for bound in self.bounds))
        share = count**-KAPPA
        log_mean = share * log_step + (1 - share) * state["log_mean"]
        return {**state, "count": count, "error": error, "log_step": log_step, "log_mean": log_mean}


def check_step(step: float) -> None:
    """Raise on what is no step size."""
    value = given.real(step, "step")
    if value.ndim or not LEAST <= float(value) < math.inf:
        raise InvalidValue(
            f"step must be a number of at least {LEAST:g}, got {value.tolist()}: a smaller one moves nothing"
        )


def _restarted(log_step: float) -> State:
    """Dual averaging from the start, about ten times this step."""
    zero = torch.zeros((), dtype=torch.float64)
    return {"center": zero + log_step + math.log(10), "error": zero, "count": zero, "log_mean": zero + log_step}


def _gathered(state: State, q: Tensor) -> State:
    """With the chains' places in mean and scatter (Chan's update)."""
    k, before = len(q), state["seen"]
    seen, away = before + k, q.mean(0) - state["mean"]
    own = (q - q.mean(0)).square().sum(0)
    mean = state["mean"] + away * (k / seen)
    return {
        **state,
        "seen": seen,
        "mean": mean,
        "scatter": state["scatter"] + own + away.square() * (before * k / seen),
    }


def _with_variance(state: State) -> State:
    """The window's variances in the place of the last; the step keeps its length on average."""
    n = state["seen"]
    variance = state["scatter"] / (n - 1) * (n / (n + 5)) + 1e-3 * (5 / (n + 5))
    log_step = float(state["log_mean"] + 0.5 * (state["variance"].log() - variance.log()).mean())
    empty = {"seen": torch.zeros_like(n), "mean": torch.zeros_like(variance), "scatter": torch.zeros_like(variance)}
    return {**state, **empty, **_restarted(log_step), "log_step": torch.tensor(log_step).double(), "variance": variance}
