"""How sure a classifier may be, by labels that were held out.

Its probabilities are those of classes.py, the mean of p(y | t (a f + b m) + √s e) over e ~ N(0, V) and over m, with a
and b as the training data chose them. With labels that no training saw there is nothing to guard against: s and t are
those of the least

    −(1/m) Σ_m log E p(y_m | t (a f_m + b m_m) + √s e_m),       s in [LEAST_SCALE, 1], t in [LEAST, MOST_SURE/a]

from what the training data chose. Two numbers, so that a hundred labels are enough: in trials on digits a third, b
beside a, was overfitted by as many (.163 → .249), where t is not. Shapes: j nodes of e, m rows, c outputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lapwing.calibration.classes import LEAST_SCALE, MOST_SURE, CalibrationRows, Choice, boxed
from lapwing.calibration.reading import nodes_of, symmetric_root
from lapwing.calibration.record import Calibration
from lapwing.curvature.accumulate import flat_outputs, flat_targets
from lapwing.data import passes, ranks_of
from lapwing.errors import InvalidValue
from lapwing.likelihoods import Likelihood
from lapwing.outputs.points import quasi_normal
from lapwing.posterior import Gaussian

LEAST = 0.02  # for t
NODES = 128  # j, at the most
ROOM = 2**25  # numbers of e


@torch.inference_mode(False)
def chosen_by(
    calibration: Calibration, posterior: Gaussian, likelihood: Likelihood, batches: Iterable[Any], progress: bool
) -> Calibration:
    """The calibration with s, a and b by held-out data. The posterior is that of temperature 1."""
    rows = _read(calibration, posterior, likelihood, batches, progress)
    first = calibration.choice
    start, low, high = torch.tensor(
        [[math.log(first.scale), 1.0], [math.log(LEAST_SCALE), LEAST], [0.0, MOST_SURE / first.a]], dtype=torch.float64
    )
    assert rows.labels is not None
    assert rows.doubt is not None
    about, doubt = first.a * rows.f + first.b * rows.labels, first.b * rows.doubt

    def loss(w: Tensor) -> Tensor:
        return rows.loss(w[0].exp(), w[1] * about, w[1] * doubt).mean()

    at = boxed(loss, start, low, high)
    with torch.no_grad():
        before, after = float(loss(start)), float(loss(at))
    if not math.isfinite(after):
        raise InvalidValue(f"the held-out labels have a mean −log p of {after} under the fit; check them")
    log_s, t = at.tolist()
    choice = Choice(math.exp(log_s), t * first.a, t * first.b, math.nan, first.r2, first.temperature, after, before)
    return replace(calibration, choice=choice, held_out=rows.n)


@torch.no_grad()
def _read(
    calibration: Calibration, posterior: Gaussian, likelihood: Likelihood, batches: Iterable[Any], progress: bool
) -> CalibrationRows:
    """By one pass; every rank has all rows."""
    ranks, device, kept = ranks_of(batches), posterior.tangent.device, []
    for x, y in passes(batches, device, progress, "held out"):
        made = posterior.outputs(x)
        f, targets = flat_outputs(made.mean).double(), flat_targets(likelihood, made.mean, y)
        likelihood.validate(f, targets)
        kept.append((f, nodes_of(made, NODES), targets, *_pooled(calibration, x, f)))
    kept = ranks.joined(kept, "held-out data")
    dims = 0, 1, 0, 0, 1
    f, e, y, labels, doubt = (torch.cat(one, dim) for one, dim in zip(zip(*kept, strict=True), dims, strict=True))
    few = max(16, min(NODES, ROOM // f.numel()))
    return CalibrationRows(likelihood, f, e[:few], y, len(f), labels=labels, doubt=doubt[:few])


def _pooled(calibration: Calibration, x: Any, f: Tensor) -> tuple[Tensor, Tensor]:
    """What labels of near inputs say (m, c), and nodes about it (j, m, c); zeros where they are not pooled."""
    if calibration.labels is None:
        return torch.zeros_like(f), f.new_zeros(NODES, *f.shape)
    phi, c = calibration.featured(x), f.shape[1]
    spread = (phi @ calibration.labels.root).norm(dim=1)
    z = quasi_normal(NODES, 2 * c).to(f)[:, c:]  # not those of e
    return calibration.labels(phi), spread[:, None] * (z @ symmetric_root(calibration.labels.between))[:, None]
