"""What the samplers by minibatches share: the estimated gradient, its preconditioner, the step size over a cycle.

    ĝ = ∇ log p(θ) + (n/b) Σ_batch ∇ log p(y | f(x, θ))             over T, b examples drawn with repetition
    V ← α V + (1 − α) (ĝ/n)²,   G = 1/(λ + √V)                       RMSprop (Li et al. 2016), G = 1 without
    ε_t = ε ½(1 + cos(π t/C))                                        in cycles of C steps (Zhang et al. 2020)

In a cycle's warm-up there is no noise: it searches, and what follows samples. G is taken for constant, as is usual.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing import given
from lapwing.errors import InvalidValue
from lapwing.samplers.adaptation import Stage, State, check_step
from lapwing.samplers.streams import Streams
from lapwing.samplers.target import Target

FLOOR = 1e-5  # λ


@dataclass(frozen=True)
class Minibatch:
    """How a gradient is estimated, and how far to go along it."""

    step_size: float  # ε
    batch: int
    cyclical: bool = False
    rmsprop: float | None = None  # α

    def __post_init__(self) -> None:
        check_step(self.step_size)
        given.whole(self.batch, "batch", 1)
        if self.rmsprop is not None and not 0 < given.share(self.rmsprop, "rmsprop") < 1:
            raise InvalidValue(f"rmsprop is the decay of mean squares, such as 0.99, got {self.rmsprop}")

    def begin(self, target: Target, q: Tensor, streams: Streams) -> State:
        """The chains' places, and the first estimates there."""
        zero = {} if self.rmsprop is None else {"squares": torch.zeros_like(q)}
        return self.moved(target, {**zero, "q": q}, q, streams)

    def moved(self, target: Target, state: State, q: Tensor, streams: Streams) -> State:
        """The state at q (k, d), where ĝ and log π are estimated by a batch of each chain's own."""
        n = target.examples.n
        value, g = target.noisy_value_and_grad(q, streams.index(n, min(self.batch, n)))
        state = {**state, "q": q, "log_density": value, "gradient": g}
        if self.rmsprop is None:
            return state
        return {**state, "squares": self.rmsprop * state["squares"] + (1 - self.rmsprop) * (g / n).square()}

    def metric(self, state: State) -> Tensor:
        """G, (k, d)."""
        return torch.ones_like(state["q"]) if self.rmsprop is None else 1 / (FLOOR + state["squares"].sqrt())

    def at(self, stage: Stage) -> tuple[float, float]:
        """ε of this step, and the temperature of its noise: 0 while a cycle searches."""
        if not self.cyclical:
            return self.step_size, 1.0
        return 0.5 * self.step_size * (1 + math.cos(math.pi * stage.t / stage.steps)), float(not stage.warming)
