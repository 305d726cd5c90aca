"""What the choice of a calibration reads of the training data: one pass over the inputs, and one through the network.

Sums are over all the data; logits, nodes and features are kept at ROWS of them at the most, from all batches alike, at
which loss is looked at.
Shapes: n data, m rows, d features, c outputs, j nodes, k draws.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lapwing.calibration.features import InputFeatures, input_features
from lapwing.calibration.ridge import LOGIT_NOISE, RidgeFit, Sums
from lapwing.curvature.accumulate import flat_outputs, flat_targets
from lapwing.data import passes, ranks_of
from lapwing.likelihoods import Likelihood
from lapwing.outputs import WIDE, Outputs
from lapwing.outputs.points import psd_root, quasi_normal
from lapwing.posterior import Gaussian
from lapwing.tree import rows_of

ROWS = 512  # m
NODES = 16  # j and k


@dataclass(frozen=True, eq=False)
class Seen:
    """Rows of training data: outputs f (m, c), nodes e (j, m, c) about them, targets y; and what the features know of
    all the data: of the network's outputs, and of observations that targets make, each left out at the rows."""

    f: Tensor
    e: Tensor
    y: Tensor
    n: int
    features: InputFeatures | None = None
    network: RidgeFit | None = None
    targets: RidgeFit | None = None

    @property
    def draws(self) -> Tensor:
        """Left-out outputs of the network (k, m, c): draws of what its other outputs foretell."""
        assert self.network is not None
        z = quasi_normal(NODES, self.f.shape[-1]).to(self.f) @ psd_root(self.network.between).mT
        return self.network.mean + self.network.spread[:, None] * z[:, None]

    @property
    def doubt(self) -> Tensor:
        """Nodes (j, m, c) of what the targets of others leave open, about its mean."""
        assert self.targets is not None
        z = quasi_normal(NODES, 2 * self.f.shape[-1]).to(self.f)[:, self.f.shape[-1] :]  # not those of e
        return self.targets.doubt[:, None] * (z @ symmetric_root(self.targets.between))[:, None]

    @property
    def r2(self) -> float:
        """How much of the network's outputs the others foretell."""
        assert self.network is not None
        missed, whole = (self.f - self.network.mean).square().sum(), (self.f - self.network.offset).square().sum()
        return float(1 - missed / whole) if float(whole) > 0 else 0.0


@torch.no_grad()
def read(
    posterior: Gaussian, likelihood: Likelihood, batches: Iterable[Any], total: int, progress: bool = False
) -> Seen:
    """By passes over the data of the fit, `total` examples. The likelihood makes observations of targets."""
    device, ranks = posterior.tangent.device, ranks_of(batches)
    features = input_features(batches, device)
    kept: list[tuple[Tensor, ...]] = []
    sums: list[Tensor] = []
    phis: list[Tensor] = []
    n, step = 0, math.ceil(total / ROWS)  # every so many examples one, whatever order the data are in
    for x, y in passes(batches, device, progress, "calibration"):
        some = slice(-n % step, None, step) if posterior.tangent.separable(x) else slice(None)
        n += len(y)
        if len(y[some]):
            kept.append(_rows(posterior, likelihood, rows_of(x, some), y[some]))
        if features is not None:
            f = posterior.tangent(x).double()
            if f.ndim != 2 or f.shape[1] > WIDE:
                features = None  # outputs at several positions of one input, or too many for covariances
                continue
            phi = features(x)
            phis.append(phi[some])
            _add(sums, phi, f, _observed(likelihood, f, y))
    kept, n = ranks.joined(kept, "rows of training data"), ranks.count(n, "examples")  # a rank may have none
    f, e, y = (torch.cat(parts, dim) for parts, dim in zip(zip(*kept, strict=True), (0, 1, 0), strict=True))
    if ranks.anywhere(features is None, "outputs without features"):
        return Seen(f, e, y, n)
    phi = torch.cat(ranks.joined(phis, "features of rows"))
    sums = ranks.total(sums or _no_sums(phi, f), "sums of features")
    fits = _regressions(sums, n, phi, f, _observed(likelihood, f, y))
    return Seen(f, e, y, n, features, *fits)


def symmetric_root(B: Tensor) -> Tensor:
    """B^½ (c, c). Observations of one-hot labels have a singular B: among its other roots rounding would choose."""
    values, vectors = torch.linalg.eigh(B)
    return (vectors * values.clamp(min=0).sqrt()) @ vectors.mT


def _observed(likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
    """What targets say of outputs, (n, c)."""
    return likelihood.observations(f, likelihood.aligned(f, y))[0].double()  # type: ignore[attr-defined]


def _rows(posterior: Gaussian, likelihood: Likelihood, x: Any, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """f (m, c), e (j, m, c) and y."""
    made = posterior.outputs(x)
    return flat_outputs(made.mean).double(), nodes_of(made, NODES), flat_targets(likelihood, made.mean, y)


def nodes_of(made: Outputs, j: int) -> Tensor:
    """Of outputs about their mean, (j, m, c)."""
    f = flat_outputs(made.mean).double()
    if made.normal:  # the same nodes as `doubt` has, so that the two together are of one set
        root = psd_root(made.marginal.double().reshape(*f.shape, f.shape[-1]))
        return torch.einsum("nab,jb->jna", root, quasi_normal(j, 2 * f.shape[-1]).to(f)[:, : f.shape[-1]])
    return made.nodes(torch.arange(len(f), device=f.device), None).f[:j] - f


def _no_sums(phi: Tensor, f: Tensor) -> list[Tensor]:
    """What a rank without data adds to: zeros, for features (m, d) and outputs (m, c)."""
    d, c = phi.shape[1], f.shape[1]
    return [phi.new_zeros(shape) for shape in ((d, d), (d,), *2 * ((d, c), (c, c), (c,)))]


def _add(sums: list[Tensor], phi: Tensor, f: Tensor, t: Tensor) -> None:
    """Φᵀ Φ and Φᵀ 1; then for outputs f and observations t each Φᵀ t, tᵀ t, tᵀ 1."""
    found = [phi.mT @ phi, phi.sum(0), *(one for t in (f, t) for one in (phi.mT @ t, t.mT @ t, t.sum(0)))]
    if not sums:
        sums.extend(torch.zeros_like(one) for one in found)
    for total, one in zip(sums, found, strict=True):
        total += one


def _regressions(sums: list[Tensor], n: int, phi: Tensor, f: Tensor, t: Tensor) -> tuple[RidgeFit, RidgeFit]:
    gram, total, *rest = sums
    of = [Sums(gram, cross, total, square, one, n) for cross, square, one in (rest[:3], rest[3:])]
    return of[0].fitted(phi, f, LOGIT_NOISE), of[1].fitted(phi, t)
