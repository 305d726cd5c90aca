"""What a fit says of itself: how each layer is treated, its certificate, its tuning, and where it was made."""

from __future__ import annotations

import platform
import sys
import warnings
from collections.abc import Iterable
from datetime import datetime, timezone
from typing import Any

import numpy as np
import torch

from lapwing.data import ranks_of
from lapwing.errors import LapwingError, LapwingWarning
from lapwing.report.charts import short

CHEAP = 1_000_000  # parameters times training examples, up to which a certificate takes seconds
LAYERS = 40  # parameters shown by name


def coverage(fit: Any) -> list[list[str]]:
    """Parameter, elements, treatment; the first LAYERS of them. Empty where the fit has no such thing."""
    found = getattr(fit, "coverage", None)
    if not isinstance(found, dict):
        return []
    sizes = {name: p.numel() for name, p in fit.tangent.model.named_parameters()}
    rows = [[name, f"{sizes[name]:,}" if name in sizes else "", how] for name, how in found.items()]
    more = len(rows) - LAYERS
    return [*rows[:LAYERS], *([[f"and {more} more", "", "see la.coverage"]] if more > 0 else [])]


def certificate(fit: Any, asked: bool | None) -> tuple[Any, str]:
    """The certificate, where it is asked for, or not told and cheap; and else why there is none."""
    if not hasattr(fit, "certify"):
        return None, "This posterior has no structured curvature to certify."
    if fit.streams:
        return None, "Matrix-free multiplies by the true curvature: there is nothing to certify."
    if fit.state.structure.bound == "exact" and fit.state.factor.kind == "exact":
        return None, f"The structure {fit.state.structure} is the exact curvature: there is nothing to certify."
    if asked is None and (fit.data is None or ranks_of(fit.data).group is not None):
        return None, "A certificate reads the training data again, which this fit does not hold."
    if asked is False or (asked is None and fit.n * fit.state.layout.size > CHEAP):
        return None, "Not made here: a certificate takes passes over the training data. Ask for it by certify=True."
    try:
        return fit.certify(), ""
    except LapwingError as error:
        if asked:
            raise
        return None, f"A certificate could not be made: {error}."


def tuning(fit: Any) -> list[list[str]]:
    """How the prior and noise were found, by name."""
    found = getattr(fit, "tuning", None)
    if found is None:
        return []
    rows = [
        ["method", found.method + (f", at the {found.center}" if found.center else "")],
        ["steps", f"{found.iterations}" + ("" if found.converged else ", not converged")],
        ["passes over the data", f"{found.passes}" if found.passes else ""],
        ["held", ", ".join(found.fixed)],
        ["at a bound", ", ".join(found.at_bound)],
        ["note", found.note],
    ]
    return [row for row in rows if row[1]]


def described(fit: Any) -> list[list[str]]:
    """The fit's own words, and its hyperparameters."""
    rows = [["fit", repr(fit)], ["network", type(fit.tangent.model).__name__]]
    if fit.n:
        rows.append(["training examples", f"{fit.n:,}"])
    rows += [[f"likelihood: {k}", _values(v)] for k, v in getattr(fit.likelihood, "hyperparameters", {}).items()]
    prior = getattr(fit, "prior", None)
    rows += [[f"prior: {k}", _values(v)] for k, v in ({} if prior is None else prior.hyperparameters).items()]
    if getattr(fit, "calibration", None) is not None:
        rows.append(["calibration", f"{fit.calibration}; {fit.calibration.figures}"])
    if hasattr(fit.posterior, "diagnostics"):
        rows.append(["chains", str(fit.diagnostics)])
    return rows


def _values(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return str(value)
    flat = value.detach().double().flatten().tolist()
    return short(flat[0]) if len(flat) == 1 else f"{len(flat)} values, {short(min(flat))} to {short(max(flat))}"


def warned(heard: Iterable[warnings.WarningMessage]) -> list[str]:
    """What was warned of, each once."""
    found = (str(one.message) for one in heard if issubclass(one.category, LapwingWarning))
    return list(dict.fromkeys(found))


def environment(fit: Any) -> list[list[str]]:
    """Versions, the machine, and now."""
    return [
        ["lapwing", sys.modules["lapwing"].__version__],  # which imports this room, and so cannot be imported here
        ["torch", torch.__version__],
        ["numpy", np.__version__],
        ["python", platform.python_version()],
        ["platform", platform.platform()],
        ["device, dtype", f"{fit.tangent.device}, {str(fit.tangent.dtype).removeprefix('torch.')}"],
        ["made", datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")],
    ]
