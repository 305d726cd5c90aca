"""A Laplace object in words."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from torch import Tensor

from lapwing.predictive.own_data import unfit

if TYPE_CHECKING:
    from lapwing.api.object import Laplace


def described(la: Laplace) -> str:
    """In one line: likelihood, curvature, prior, and how they were found."""
    found = facts(la)
    return (
        f"Laplace({found['likelihood']}; {found['curvature']}; {found['parameters']} parameters, {found['examples']} "
        f"examples; prior {found['prior']}; {found['tuning']})"
    )


def html(la: Laplace) -> str:
    """A table for a notebook."""
    rows = "".join(f"<tr><th>{key}</th><td>{escape(value)}</td></tr>" for key, value in facts(la).items())
    return f"<table><caption>Laplace</caption><tbody>{rows}</tbody></table>"


def facts(la: Laplace) -> dict[str, str]:
    """What there is to say, by name."""
    how = f"tuned by {la.tuning.method}" if la.tuning else "not tuned"
    how += f" at the {la.tuning.center}" if la.tuning and la.tuning.center else ""
    if la.center == "tangent" and not (la.tuning and la.tuning.center == "tangent"):
        how += ", centered at the tangent MAP"
    if la.streams:
        how += f"; {la.spread.precision.known or 'not solved yet'}"
    if la.state.lost:
        how += f"; {la.state.lost:.1f} digits lost by removals, about {max(0.0, la.state.digits):.1f} left"
    known = la.tuning.train_nll if la.tuning else la.__dict__.get("_training_nll", ())
    how += f"; {said}" if (said := unfit(known)) else ""
    values = [f"{k} {_range(v.reshape(-1))}" for k, v in la.prior.hyperparameters.items()]
    shown = ", ".join(values) or la.prior.kind
    shown += "" if la.temperature == 1.0 or la.calibration else f"; temperature {la.temperature:.3g}"
    shown += f"; {la.calibration}" if la.calibration else ""
    noise = "".join(f", {k}={_numbers(v)}" for k, v in la.likelihood.hyperparameters.items())
    return {
        "likelihood": f"{la.likelihood.kind}{noise}",
        "curvature": f"{la.state.structure}{la.captured[0]}, {la.state.factor} factor",
        "parameters": f"{la.state.layout.size:,}",
        "examples": f"{la.state.n:,}",
        "prior": shown,
        "tuning": how,
    }


def _range(values: Tensor) -> str:
    if values.numel() == 1:
        return f"{float(values[0]):.4g}"
    return f"{values.numel()} values, {float(values.min()):.3g} to {float(values.max()):.3g}"


def _numbers(value: Tensor) -> str:
    return (
        f"{float(value):.4g}"
        if value.numel() == 1
        else "[" + ", ".join(f"{v:.4g}" for v in value.flatten().tolist()) + "]"
    )
