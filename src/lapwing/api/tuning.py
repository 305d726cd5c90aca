"""Tuning a Laplace object: the prior and noise that the evidence, or held-out data, pick."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lapwing import given, tune
from lapwing.api.choices import checked_center, checked_mean
from lapwing.arguments import as_shard
from lapwing.calibration import calibrate, chosen_by, with_process
from lapwing.center import about_constant, check_gaussian
from lapwing.data import ranks_of
from lapwing.errors import InvalidValue

if TYPE_CHECKING:
    from lapwing.api.object import Laplace


def tuned(
    la: Laplace,
    method: str | None,
    fixed: tuple[str, ...],
    data: Any,
    center: str | None,
    mean: str,
    progress: bool = False,
) -> Laplace:
    """As `Laplace.tuned` says."""
    if la.mean == "auto" and la.likelihood.classes and center in (None, "map"):
        if method == "validation":
            return _by_labels(la, data, fixed, mean, progress)
        return _calibrated(la, method, fixed, data, mean, progress)
    center = center or "tangent"
    if checked_mean(mean) == "auto":
        raise InvalidValue("mean='auto' is what tuned() of a classification chooses; name a mean, or drop mean=")
    if mean != "network" and (method == "validation" or checked_center(center) == "map"):
        raise InvalidValue(f"mean={mean!r} belongs to the evidence at center='tangent' or 'process', which learn v*")
    if la.streams and data is not None and method != "validation":
        return la.attached(data).tuned(method, fixed, None, center, mean, progress=progress)
    if method == "validation":
        return _validated(la, data, (fixed,) if isinstance(fixed, str) else tuple(fixed), progress)
    methods: dict[str, Any] = {"evidence": tune.evidence, "mackay": tune.mackay}
    if la.streams:  # traces by samples
        methods, method = {"em": tune.em}, method or "em"
    method = method or ("evidence" if checked_center(center) == "map" else "mackay")
    if method not in methods:
        known = [*methods, "validation"]
        raise InvalidValue(f"method must be one of {known}, got {method!r}{given.near(method, known)}")
    fixed = (fixed,) if isinstance(fixed, str) else tuple(fixed)
    start = (la.state, la.prior, la.likelihood, fixed)
    if checked_center(center) == "map":
        if data is not None:
            raise InvalidValue("center='map' reads no data: the evidence is of the data already fitted; drop data=")
        tune.warn_no_mode(la.tangent)
        prior, likelihood, tuning = methods[method](*start, progress=progress)
        found = replace(la.forgetful(), prior=prior, likelihood=likelihood, tuning=tuning, center="map")
        return replace(found, temperature=1.0).compared()
    check_gaussian(la.prior)
    batches = la.read_again(data, f"tuned(center={center!r})", "; center='map' reads none")
    jacobian = la.jacobian(batches, progress)
    jacobian = about_constant(jacobian, la.likelihood) if center == "process" else jacobian
    tracker = tune.Tracker(la.center_state, jacobian, mean)
    prior, likelihood, tuning = methods[method](*start, tracker=tracker, progress=progress)
    found = replace(la.forgetful(), prior=prior, likelihood=likelihood, tuning=tuning, center=center)
    found = replace(found, at=tracker.found(), data=batches, temperature=1.0).compared()
    return _with_process(found) if la.mean == "auto" else found


def _with_process(la: Laplace) -> Laplace:
    """With the process in predictions, where the curvature is exact: its mode is one more solve."""
    if la.state.structure.bound != "exact" or la.state.factor.kind != "exact" or la.likelihood.classes:
        return la
    return replace(la, process_at=la.process_map, calibration=with_process(la.n))


def _calibrated(
    la: Laplace, method: str | None, fixed: tuple[str, ...], data: Any, mean: str, progress: bool
) -> Laplace:
    """A prior by the evidence at the trained weights, and how sure predictions may be by the training data."""
    for name, value, ways in (("method", method, (None, "evidence")), ("mean", mean, ("network", "auto"))):
        if value not in ways:
            raise InvalidValue(
                f"a classification is tuned by the evidence at the trained weights; drop {name}={value!r}, or give "
                "center='tangent', which chooses no calibration"
            )
    batches = la.read_again(data, "tuned()")
    fixed = (fixed,) if isinstance(fixed, str) else tuple(fixed)
    prior, likelihood, tuning = tune.evidence(la.state, la.prior, la.likelihood, fixed, progress=progress)
    found = replace(la.forgetful(), prior=prior, likelihood=likelihood, tuning=tuning, center="map", temperature=1.0)
    chosen = calibrate(found.spread, likelihood, batches, la.n, progress)
    return replace(found, data=batches, temperature=chosen.choice.scale, calibration=chosen)


def _by_labels(la: Laplace, data: Any, fixed: Any, mean: str, progress: bool) -> Laplace:
    """The prior as it was chosen, or as the evidence picks it, and how sure predictions may be by held-out labels."""
    if fixed or mean not in ("network", "auto"):
        raise InvalidValue(
            "held-out labels choose how sure a classification may be, and leave the prior to the evidence; drop "
            f"{f'fixed={fixed!r}' if fixed else f'mean={mean!r}'}, or fit with likelihood='dirichlet'"
        )
    batches = _held_out(la, data)
    la = la if la.calibration is not None else _calibrated(la, None, (), None, "network", progress)
    assert la.calibration is not None
    known = replace(la.forgetful(), center="map")  # at temperature 1
    chosen = chosen_by(la.calibration, known.spread, la.likelihood.predictive, batches, progress)
    at_bound = ("temperature",) if chosen.narrow else ()
    tune.warn_bound(at_bound, "held-out data prefer the plain network")
    trace = (-chosen.choice.network, -chosen.choice.left_out)
    tuning = tune.Tuning("validation", "map", trace, len(trace), True, at_bound, passes=1)
    return replace(known, data=la.data, temperature=chosen.choice.scale, calibration=chosen, tuning=tuning)


def _held_out(la: Laplace, data: Any) -> Any:
    """Batches of data that the fit has not seen."""
    if data is None:
        raise InvalidValue("method='validation' needs held-out data, other than the fit's: pass data=")
    return as_shard(data, ranks_of(la.data))


def _validated(la: Laplace, data: Any, fixed: tuple[str, ...], progress: bool) -> Laplace:
    """Tuned on held-out data; v* is not looked at, and solved for again when it is needed."""
    batches = _held_out(la, data)
    start = (la.state, la.prior, la.likelihood, batches, fixed, la.temperature, la.memory_budget)
    found = tune.validation(*start, progress=progress)
    return replace(la.forgetful(), prior=found[0], likelihood=found[1], temperature=found[2], tuning=found[3])
