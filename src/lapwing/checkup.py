"""Whether a posterior can be believed, by the data that it was fitted to: `la.check()`.

    training   mean −log p(y_n | D) of training rows, beside the network's own −log p(y_n | f_n)
    reckoned   ½ Σ tr Λ_n C_n / m: what the posterior's own quadratic says that a draw of the weights costs a row
    paid       what draws of it do cost: E_f[−log p(y_n | f)] + log p(y_n | f_n)
    left out   mean −log p(y_n | D without n), in closed form, where the structure is exact and at a mode
    no data    Σ tr C₋ₙ / Σ tr J_n A⁻¹ J_nᵀ: the share of the prior's variance at a left-out input that the others leave

A posterior that pays far more than it reckons with is no local approximation any more. One that predicts its own data
worse than its network is too wide, or its network has memorized wrong labels: these figures cannot tell which. Where
predictions are calibrated, `training` is theirs, what they pay was chosen, and the calibration's own findings are told.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lapwing.center import Center
from lapwing.curvature.accumulate import flat_outputs, flat_targets
from lapwing.data import passes
from lapwing.errors import InvalidValue
from lapwing.leave_one_out import left_out
from lapwing.likelihoods import Likelihood
from lapwing.outputs import Normal
from lapwing.posterior import Gaussian
from lapwing.predictive.about import about
from lapwing.predictive.own_data import unfit
from lapwing.predictive.prediction import Prediction
from lapwing.priors import Prior
from lapwing.push import At, push

ROWS = 512  # of training outputs that are looked at
DEAR = 4.0  # times what it reckons with, that draws may cost
EMPTY = 0.9  # share of the prior's variance above which the data say little of a new input


@dataclass(frozen=True)
class Check:
    """Means over some training rows, in nats; None where they cannot be had."""

    rows: int
    training: float
    network: float
    reckoned: float
    paid: float
    by_labels: bool  # whether it was fitted to observations made of labels, as "dirichlet" is
    left_out: float | None = None
    no_data: float | None = None
    calibration: Any = None  # how sure predictions may be, where that was chosen: its words, `figures` and `findings`

    @property
    def findings(self) -> tuple[str, ...]:
        """What the figures say, and what to do; () where nothing is wrong."""
        found = [] if self.calibration is None else list(self.calibration.findings)
        if self.calibration is None and (words := unfit((self.training, self.network))):
            first = "C" if self.by_labels else "Fit with likelihood='classification', or c"
            found.append(
                f"it {words}: it is too wide, or the network has memorized wrong labels. "
                f"{first}all tuned(method='validation', data=held_out)"
            )
        if self.paid > DEAR * self.reckoned + 0.1:
            found.append(
                f"a draw of it costs {self.paid:.3g} nats a row where its quadratic says {self.reckoned:.3g}: it "
                "reaches beyond where the likelihood is as it was approximated. Raise the prior precision"
            )
        if self.no_data is not None and self.no_data > EMPTY:
            found.append(
                f"the other examples leave {100 * self.no_data:.0f} % of the prior's variance at an example that is "
                "left out: its error bars are the prior's. Look at how the prior precision was chosen"
            )
        return tuple(found)

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def __repr__(self) -> str:
        lines = [
            f"{self.rows:,} training rows: −log p {self.training:.4g} by the posterior, {self.network:.4g} without it",
            f"a draw costs {self.paid:.3g} nats more a row; the posterior reckons with {self.reckoned:.3g}",
        ]
        if self.left_out is not None and self.no_data is not None:
            lines.append(
                f"left out, in closed form: −log p {self.left_out:.4g} (features have seen the labels: optimistic); "
                f"{100 * self.no_data:.0f} % of the prior's variance is left"
            )
        if self.calibration is not None:
            lines.append(f"calibrated, {self.calibration}: {self.calibration.figures}")
        return "\n".join(lines + [f"! {text}" for text in self.findings])


@torch.inference_mode(False)
@torch.no_grad()
def checked(
    posterior: Gaussian,
    prior: Prior,
    likelihood: Likelihood,
    batches: Any,
    center: Center | None = None,
    calibration: Any = None,
) -> Check:
    """On the first rows of the data of the fit, about the network's outputs. center: a mode that examples can be left
    out at, where the curvature is exact. calibration: what predictions are about, where that was chosen."""
    z, C, K, mode, y, shown, around = _rows(posterior, prior, likelihood, batches, center, calibration)
    made = Prediction(likelihood.predictive, Normal(z, C))
    predicted = Prediction(likelihood.predictive, Normal(shown, around))
    S, some = likelihood.scaled_root(z, y), made.outputs.nodes(torch.arange(len(z), device=z.device), None)
    some = replace(some, f=torch.cat([some.f, 2 * z - some.f]))  # in pairs, so that slopes cancel
    paid = likelihood.log_prob(z, y) - likelihood.log_prob(some.f, y.expand(len(some.f), *y.shape)).mean(0)
    figures = (
        -float(predicted.log_prob(y).mean()),
        -float(made.likelihood.log_prob(z, y).mean()),
        0.5 * _trace(S.mT @ C @ S) / len(z),
        float(paid.mean()),
    )
    out: dict[str, float] = {}
    if center is not None:
        mean, cov, _ = left_out(likelihood, mode, C, y, z)
        out["left_out"] = -float(Prediction(likelihood.predictive, Normal(mean, cov)).log_prob(y).mean())
        out["no_data"] = _trace(cov) / _trace(K)
    return Check(len(z), *figures, likelihood.predictive is not likelihood, **out, calibration=calibration)


def _trace(matrices: Tensor) -> float:
    return float(matrices.diagonal(dim1=-2, dim2=-1).sum())


def _rows(
    posterior: Gaussian, prior: Prior, likelihood: Likelihood, batches: Any, center: Center | None, calibration: Any
) -> tuple[Tensor, ...]:
    """Outputs (m, c), their covariances and those of the prior (m, c, c), outputs at the center, targets, and outputs
    and covariances as predictions have them, of the first rows; without a center, nothing is made of the two that it is
    needed for."""
    tangent, a = posterior.tangent, prior.quadratic(posterior.tangent.theta.double())[0]
    found: list[tuple[Tensor, ...]] = []
    for x, y in passes(batches, tangent.device, label="check"):
        made = posterior.outputs(x)
        before, mode = made, made
        if center is not None:
            before = push(a, At(tangent, x, budget=posterior.memory_budget))
            mode = about(made, tangent, x, center)
        shown = made if calibration is None else calibration.applied(made, x)
        f, v, z = (flat_outputs(one.mean).double() for one in (made, mode, shown))
        C, K, around = (one.marginal.double().reshape(*f.shape, f.shape[-1]) for one in (made, before, shown))
        found.append((f, C, K, v, flat_targets(likelihood, made.mean, y), z, around))
        if sum(len(one[0]) for one in found) >= ROWS:
            break
    if not found:
        raise InvalidValue("the data hold no example to check the posterior on; give those of the fit")
    return tuple(torch.cat(some)[:ROWS] for some in zip(*found, strict=True))
