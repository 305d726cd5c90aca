"""A search for the hyperparameters at which a process's evidence is highest: L-BFGS with a strong Wolfe search in log
space, inside bounds by log η = low + (high − low)·sigmoid(u), as in `tune/evidence.py`."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lapwing.errors import NotConverged
from lapwing.tune.bounds import Box, Tuning, warn_bound

STEPS = 60
TOLERANCE = 1e-6  # of the gradient, relative to the number of targets
Slopes = tuple[Tensor, dict[str, Tensor]]  # log Z, and its derivatives in log η


def climbed(
    box: Box, evidence: Callable[[dict[str, Tensor]], Slopes], count: int, fixed: tuple[str, ...], center: str
) -> tuple[dict[str, Tensor], Tuning]:
    """The hyperparameters found, and how it went; evidence: of their values, count: of targets."""
    u = {k: torch.logit((v - box.low[k]) / (box.high[k] - box.low[k])).requires_grad_() for k, v in box.start.items()}
    trace: list[float] = []
    enough = TOLERANCE * count
    optimizer = torch.optim.LBFGS(
        list(u.values()), max_iter=STEPS, tolerance_grad=enough, tolerance_change=1e-10, line_search_fn="strong_wolfe"
    )

    def logs() -> dict[str, Tensor]:
        return {k: box.low[k] + (box.high[k] - box.low[k]) * torch.sigmoid(v) for k, v in u.items()}

    def closure() -> Tensor:
        optimizer.zero_grad()
        now = logs()
        value, slope = evidence({k: v.detach().exp() for k, v in now.items()})
        if not math.isfinite(float(value)):
            raise NotConverged(f"the log evidence became {float(value)} while tuning {list(u)}; fix one with fixed=")
        torch.autograd.backward(list(now.values()), [-slope[k] for k in now])
        trace.append(float(value))
        return -value

    optimizer.step(closure)
    final = {k: v.detach() for k, v in logs().items()}
    values = {k: v.exp() for k, v in final.items()}
    at_bound = box.at_bound(final)
    steep = max(float(v.abs().max()) for v in evidence(values)[1].values())
    converged = bool(at_bound) or steep <= max(1e-2, 100 * enough)
    warn_bound(at_bound)
    steps = optimizer.state[next(iter(u.values()))]["n_iter"]
    return values, Tuning("evidence", center, tuple(trace), steps, converged, at_bound, fixed)
