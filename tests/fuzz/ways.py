"""The same question asked in another way: data cut otherwise, added, taken out; saved and loaded; tuned, recentered."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import torch
from agreement import LOADED, Difference, agree
from cases import Case, loader, rows
from structures import precision_of
from torch import Tensor

import lapwing as lw
from lapwing.errors import Unsupported


def cut_data(case: Case, la: Any, P: Tensor, tolerance: float) -> None:
    """Batches of another size are the same data, where the first batch leads to the same treatment of each layer: of
    experts that see some examples, another first batch may show others."""
    other = case.fit(loader(case.inputs, case.y, max(1, case.n // 2)))
    if other.coverage != la.coverage:
        return
    agree("batches of another size give the same", precision_of(other), P, tolerance, float(P.abs().max()))


def added_data(case: Case, la: Any, P: Tensor, tolerance: float) -> None:
    """A part and then the rest are the whole; ekfac keeps its first basis and repeated sketches their first range."""
    kind = la.state.structure
    if case.n < 2 or isinstance(kind, lw.curvature.EigenKronecker) or getattr(kind, "passes", 1) > 1 or case.a is None:
        return
    k = case.n // 2
    first, rest = ((rows(case.inputs, s), case.y[s]) for s in (slice(0, k), slice(k, None)))
    both = case.fit(first).updated(rest)
    if both.coverage != la.coverage or isinstance(kind, lw.curvature.Block):  # by what the first batch shows of routing
        if isinstance(kind, lw.curvature.Block):
            agree("data added later count the same", precision_of(both).diagonal(), P.diagonal(), tolerance)
        return
    agree("data added later count the same", precision_of(both), P, tolerance, float(P.abs().max()))


def saved(case: Case, la: Any, P: Tensor, tolerance: float) -> None:
    """What is loaded predicts the same."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fit.safetensors"
        la.save(path)
        again = lw.load(path, copy.deepcopy(case.model), forward=case.drawn.forward)
        if not la.streams:  # whose evidence reads the data
            agree(
                "a loaded evidence is the same",
                again.log_evidence(center="map"),
                la.log_evidence(center="map"),
                LOADED[case.dtype],
            )
        agree(
            "a loaded fit predicts the same",
            again.predict(case.new).covariance,
            la.predict(case.new).covariance,
            LOADED[case.dtype],
        )


def tuned(case: Case, la: Any, P: Tensor, tolerance: float) -> None:
    """Tuning at the trained weights never lowers the evidence, and the evidence that it reports is the dense one."""
    if la.streams or not isinstance(la.state.structure, lw.curvature.Full):
        return
    best = la.tuned(center="map")
    before, after = la.log_evidence(center="map"), best.log_evidence()
    if float(after) < float(before) - 1e-5 * max(1.0, abs(float(before))):
        raise Difference(f"tuning raises the evidence: from {float(before):.6g} to {float(after):.6g}")


def recentered(case: Case, la: Any, P: Tensor, tolerance: float) -> None:
    """At v* the slope of the log joint density of the tangent model is zero."""
    if not case.observation.concave or case.a is None or la.streams:
        return
    v = la.recentered().tangent_map.vector.detach().clone().requires_grad_()
    (slope,) = torch.autograd.grad(case.dense.objective(v, case.a, case.mean), v)
    gain = 0.5 * float(slope @ torch.linalg.solve(case.dense.G + torch.diag(case.a), slope))
    if not gain <= (1e-5 if case.dtype == torch.float64 else 1e-2):
        raise Difference(f"v* is the mode of the tangent model: {gain:.2g} nats are left to gain")


def tuned_at_the_tangent(case: Case, la: Any, P: Tensor, tolerance: float) -> None:
    """After tuning at the tangent center v* is the mode under the prior that was found."""
    if not case.observation.concave or la.likelihood.hyperparameters or case.a is None:
        return
    if la.streams and la.prior.precision.numel() > 4:  # a hundred steps of solves: a minute, and nothing to compare
        return
    best = la.tuned()
    if la.streams or best.tuning.at_bound:  # a precision of 1e-27 leaves no digits to compare
        return
    a = best.prior.operator().dense()
    v = best.tangent_map.vector.detach().clone().requires_grad_()
    (slope,) = torch.autograd.grad(case.dense.objective(v, a, case.mean), v)
    gain = 0.5 * float(slope @ torch.linalg.solve(case.dense.G + torch.diag(a), slope))
    if not gain <= (1e-4 if case.dtype == torch.float64 else 1e-2):
        raise Difference(f"v* is the mode under the tuned prior: {gain:.2g} nats are left to gain")


def taken_out(case: Case, la: Any, P: Tensor, tolerance: float) -> None:
    """What is left after a removal is the fit of what stayed, to the digits that the state says are left."""
    if (
        case.n < 2
        or la.streams
        or case.a is None
        or not isinstance(la.state.structure, (lw.curvature.Full, lw.curvature.Diagonal))
    ):
        return
    k = case.n // 2
    first, rest = ((rows(case.inputs, s), case.y[s]) for s in (slice(0, k), slice(k, None)))
    left, only = la.without(rest), case.fit(first)
    agree("data taken out are gone", precision_of(left), precision_of(only), 1e3 * tolerance, float(P.abs().max()))


def asked_for_everything(case: Case, la: Any, P: Tensor, tolerance: float) -> None:
    """Each way to look at a fit or a prediction gives finite numbers of the right shape, or says why it has none."""
    f, _ = case.ahead
    pred = la.predict(case.new)
    for name in ("mean", "std", "epistemic", "aleatoric", "total", "entropy", "mutual_information"):
        try:
            value = getattr(pred, name)
        except Unsupported:
            continue
        wide = any(kind in case.observation.name for kind in ("student", "poisson", "binomial"))  # may be infinite
        if bool(torch.isnan(value).any()) or not (wide or bool(torch.isfinite(value).all())):
            raise Difference(f"pred.{name} is finite: it is not")
    drawn = la.draw(3)
    for name, value in drawn.items():
        if value.shape != (3, *dict(case.model.named_parameters())[name].shape) or not bool(
            torch.isfinite(value).all()
        ):
            raise Difference(f"draws have the shape of {name}, and are finite: {tuple(value.shape)}")
    functions = la.function_samples(2)(case.new)
    if functions.shape != (2, *f.shape) or not bool(torch.isfinite(functions).all()):
        raise Difference("function samples are finite outputs")
    gamma = la.effective_dimension()
    if not la.streams and case.a is not None:
        expected = len(P) - (torch.linalg.inv(P).diagonal() * case.a).sum()
        agree("the effective dimensions add up to tr Ĝ P̂⁻¹", gamma.sum(), expected, tolerance, len(P))
    if set(la.coverage) != {name for name, _ in case.model.named_parameters()}:
        raise Difference("coverage names every parameter")
    repr(la), repr(pred)


OTHER_WAYS = (cut_data, added_data, taken_out, saved, tuned, tuned_at_the_tangent, recentered, asked_for_everything)
