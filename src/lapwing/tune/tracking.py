"""v* followed through changing hyperparameters: the tangent center of a tuning.

Each v* starts from the last, over one reading of the data. A group starts at λ_g = tr(K_g)/(N·C s²), K_g = J_g J_gᵀ/λ_g
at λ_g = 1: each group gives the outputs a prior variance of s², that of the targets of a Gaussian likelihood, else 1.
So neither the start nor the optimum found from it depends on how a layer, or the targets, are scaled.

The noise that the evidence learns is that of the residuals at h(·, v*). Predictions about the network's mean err by the
network's residuals instead, which can be many times larger; for those, σ is held at or above √(SSE(θ*)/(N·C)).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from lapwing.center import Center, Jacobian, check_gaussian, stretched, tangent_map
from lapwing.curvature import State
from lapwing.evidence import decompose
from lapwing.likelihoods import Likelihood, polarization
from lapwing.operators import linalg, plus
from lapwing.posterior import curvature
from lapwing.priors import Gaussian, Prior
from lapwing.tune.bounds import EDGE, Box, Tuning
from lapwing.tune.modes import normalized_by

NATS = 1.0  # below the tangent MAP at which the trained weights are said to be no mode
AT_ONCE = 8  # steps towards v* by passes before the hyperparameters are looked at again: they may still be far off
# Tolerances of v*: where the rows of J are in memory; and by passes, where a hundredth of a posterior standard
# deviation for each direction that the data determine is enough (more moved log λ by less than .01 on a CNN).
HELD, STREAMED = 1e-6, 1e-2


@dataclass(eq=False)
class Tracker:
    """Mutable inside one tuning only: it remembers the last v*."""

    state: State
    jacobian: Jacobian
    mean: str = "network"  # that predictions will be about
    last: Center | None = None
    first: int = field(init=False)

    def __post_init__(self) -> None:
        self.first = self.jacobian.passes - 1  # the reading is one

    @property
    def held(self) -> bool:
        """Whether J is in memory."""
        return self.jacobian.held

    @property
    def tolerance(self) -> float:
        """Of the residual of v*."""
        return HELD if self.held else STREAMED

    @property
    def kind(self) -> str:
        """What it is the mode of: the tangent model, or the process about a constant."""
        return "tangent" if self.jacobian.constant is None else "process"

    @property
    def passes(self) -> int:
        """Over the data, so far."""
        return self.jacobian.passes - self.first

    def center(
        self, prior: Prior, likelihood: Likelihood, tolerance: float | None = None, strict: bool = False
    ) -> Center:
        """v* as precisely as asked; where J is in memory, precision is cheap, and more of it is asked for."""
        tolerance = max(self.tolerance, (tolerance or 0.0) * (0.01 if self.held else 1.0))
        steps = None if strict or self.held else AT_ONCE
        self.last = tangent_map(
            self.state,
            check_gaussian(prior),
            likelihood,
            self.jacobian,
            self.last,
            tolerance=tolerance,
            strict=strict,
            steps=steps,
        )
        return self.last

    def predicted(self, prior: Gaussian, likelihood: Likelihood) -> Center:
        """What the structure says of v* near the last one, v + (Ĝ + A)⁻¹(Jᵀ score − A(v − m)), without a pass; how well
        it fits is taken to stay as it is."""
        last, a = self.last, prior.operator()
        assert last is not None
        assert last.pulled is not None
        assert last.weights is not None
        now, then = likelihood.curvature_weights("exact").to(last.weights), last.weights
        if likelihood.paired:
            now, then = (polarization.matrix_of(weights).diagonal() for weights in (now, then))
        ratio = (now / then).mean()
        gradient = ratio * last.pulled - linalg.mv(a, last.vector - prior.mean_vector())
        structure = stretched(curvature(self.state, likelihood), last.stretch)
        away = linalg.solve(plus(structure, a), gradient)
        return replace(last, vector=last.vector + away)

    def found(self) -> Center:
        """The last v*, without what the search for it keeps."""
        assert self.last is not None
        return self.last.alone()

    def report(self, tuning: Tuning, prior: Prior, likelihood: Likelihood, floors: tuple[str, ...] = ()) -> Tuning:
        """The record of a tuning at this center, once v* is what it is asked to be at the hyperparameters found; floors
        names those that were held at a floor."""
        center = self.center(prior, likelihood, strict=True)
        notes = [self._note(prior, likelihood, center)]
        notes += ["the noise is held at the network's residuals, the tangent model's being smaller"] if floors else []
        note = "; ".join(filter(None, notes))
        return replace(tuning, center=self.kind, passes=self.passes, residual=center.residual, note=note)

    def _note(self, prior: Prior, likelihood: Likelihood, center: Center) -> str:
        """That the trained weights are no mode, if they are not, and what was done about it."""
        with torch.no_grad():
            at, there = (decompose(self.state, prior, likelihood, v) for v in (center, None))
            short = float((at.fit - at.quadratic) - (there.fit - there.quadratic))
        if self.jacobian.constant is not None:
            return ""
        layers = normalized_by(self.state.tangent)
        if not layers and short <= NATS:
            return ""
        cause = f"normalization layers ({', '.join(layers)}) leave the posterior without a mode; " if layers else ""
        return f"{cause}the trained weights are {short:.3g} nats below the tangent MAP, where the evidence was taken"

    def started(self, bounds: Box, prior: Prior, likelihood: Likelihood) -> Box:
        """The bounds with the precisions' start at tr(K_g)/(N·C s²), and the noise's floor."""
        low, start, floors = dict(bounds.low), dict(bounds.start), []
        floored = likelihood.floors(self.state.statistics) if self.mean in ("network", "mixture") else {}
        for name, least in floored.items():
            if name in start:
                low[name] = torch.maximum(low[name], least.to(low[name]))
                start[name] = torch.maximum(start[name], low[name] + EDGE)
                floors.append(name)
        if any(name in start for name in prior.hyperparameters):
            variance = sum(self.jacobian.counts) * likelihood.output_variance(self.state.statistics)
            for name, value in prior.balanced(self.jacobian.column_squares(), variance).items():
                if name in start:
                    start[name] = value.clamp(low[name] + 1, bounds.high[name] - 1)
        return replace(bounds, low=low, start=start, floors=tuple(floors))
