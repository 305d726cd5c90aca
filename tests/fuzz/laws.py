"""What must hold of a fit, whatever the network. Each law compares the library with dense plain torch, or with itself
asked in another way; a law that fails raises `Difference`.

Every structure has a precision P̂ = Ĝ + A, which products with unit vectors make dense. So each case shows that
- Ĝ is what the structure says it is (`CURVATURES`), against the oracle's G;
- predictions are J P̂⁻¹ Jᵀ with the oracle's J, alone and jointly, one by one and in a batch;
- the evidence is that of P̂ by a dense log-determinant.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from agreement import TOLERANCE, Difference, agree, snapshot, untouched
from cases import Case, rows
from oracle import covariance
from structures import CURVATURES, precision_of
from torch import Tensor
from ways import OTHER_WAYS

import lapwing as lw
from lapwing.errors import LapwingError

WAYS = 3  # of asking in another way, for each case


def prior_of(case: Case, la: Any, tolerance: float) -> Tensor:
    """A (p,): the case's own; the g-prior's from the library, held to the exact curvature where there is one."""
    if case.a is not None:
        agree("the prior is as told", la.prior.operator().dense(), case.a, 1e-12)
        return case.a
    a = la.prior.operator().dense()
    if (
        isinstance(la.state.structure, (lw.curvature.Full, lw.curvature.Block, lw.curvature.Diagonal))
        and case.factor == "exact"
    ):
        live = ~la.prior.dropped
        expected = float(la.prior.precision) * case.dense.unit_G.diagonal()
        agree("the g-prior is the diagonal of the curvature", a[live], expected[live], tolerance)
        agree(
            "the g-prior drops what has no curvature", expected[~live], 0 * expected[~live], 1e-9, float(expected.max())
        )
    return a


def predictions(case: Case, la: Any, P: Tensor, live: Tensor, tolerance: float) -> None:
    f, J = case.ahead
    J = J[..., live]
    scale = float(covariance(J, torch.diag(P.diagonal()), False).diagonal(dim1=-2, dim2=-1).abs().max())
    pred = la.predict(case.new)
    agree("the mean is the network", pred.f_mean, f, tolerance, 1.0)
    if la.streams:
        return samples(case, la, pred, covariance(J, P, False), scale)
    expected = covariance(J, P, False)
    agree("predictions are J P̂⁻¹ Jᵀ", pred.covariance, expected, tolerance, scale)
    agree("f_var is the diagonal", pred.f_var, expected.diagonal(dim1=-2, dim2=-1), tolerance, scale)
    joint = la.predict(case.new, joint=True).covariance
    agree("joint predictions are J P̂⁻¹ Jᵀ", joint, covariance(J, P, True), tolerance, scale)
    one = la.predict(rows(case.new, slice(0, 1)))
    agree("one input alone is that input in a batch", one.covariance, pred.covariance[:1], tolerance, scale)


def samples(case: Case, la: Any, pred: Any, expected: Tensor, scale: float) -> None:
    """Matrix-free predictions are of samples: variances within seven standard errors."""
    variance = expected.diagonal(dim1=-2, dim2=-1)
    error = (2 / pred.outputs.samples) ** 0.5 * variance + 1e-9 * scale + 1e-12
    off = float(((pred.f_var.double() - variance).abs() / error).max())
    if off > 7:
        raise Difference(f"matrix-free variances are those of the posterior: {off:.1f} standard errors away")


def evidences(case: Case, la: Any, G: Tensor, a: Tensor, tolerance: float) -> None:
    if la.streams:  # an estimate with an error bar of its own
        return
    live = live_of(la)
    dense, mean = case.dense, case.mean
    short = type(dense)(dense.f, dense.J[..., live], dense.y, dense.theta[live], dense.observation, dense.empirical)
    expected = short.evidence(G[live][:, live], a[live], mean[live], fit=dense.log_likelihood)
    terms = dense.log_likelihood.abs() + (a * (dense.theta - mean) ** 2)[live].sum() + len(a)
    agree("the evidence is that of P̂", la.log_evidence(center="map"), expected, tolerance, float(terms))


def live_of(la: Any) -> Tensor:
    dropped = getattr(la.prior, "dropped", None)
    return torch.ones(la.state.layout.size, dtype=torch.bool) if dropped is None else ~dropped


# -- all of them -------------------------------------------------------------------------------------------------------


def fitted(case: Case, la: Any, P: Tensor, tolerance: float) -> None:
    """Curvature, prior, predictions and evidence of a fit."""
    a, live = prior_of(case, la, tolerance), live_of(la)
    if case.a is not None:
        CURVATURES[type(la.state.structure)](case, la, case.dense.G, P - torch.diag(a), tolerance)
    agree("the precision is symmetric", P[live][:, live], P[live][:, live].mT, tolerance)
    G = torch.where(live & live[:, None], P - torch.diag(torch.where(live, a, 0.0)), 0.0)
    predictions(case, la, P[live][:, live], live, tolerance)
    evidences(case, la, G, a, tolerance)


def hold(case: Case) -> list[LapwingError]:
    """Every law of this case, or the first `Difference`. Returns what was refused; one law's refusal stops no other."""
    before, tolerance = snapshot(case.model), TOLERANCE[case.dtype]
    refused: list[LapwingError] = []
    try:
        la = case.fit()
        P = precision_of(la)
    except LapwingError as error:
        untouched(case.model, before)
        return [error]
    for law in (fitted, *random.Random(case.seed).sample(OTHER_WAYS, WAYS)):
        try:
            law(case, la, P, tolerance)
        except LapwingError as error:
            refused.append(error)
        untouched(case.model, before)
    return refused
