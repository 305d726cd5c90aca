"""Data taken out again: state(A \\ B) = state(A) − state(B).

Sums are subtracted; a dual state, which holds its data, drops the rows. A difference has fewer digits than what it is
made of: log10(‖S‖ / ‖S − R‖) decimal digits cancel, of the −log10 ε that the network's dtype gives. The state keeps
count of them (`lost`, of the worst sum, added up over removals), and a warning says when few are left.

That the data were in the fit is checked as far as sums can tell: no sum of squares may become negative, no matrix
indefinite, beyond rounding.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lapwing import tree
from lapwing.curvature.checkpoint import digest
from lapwing.curvature.state import Memo, State, sizes
from lapwing.errors import InvalidValue, warn
from lapwing.likelihoods import Likelihood

FEW = 4.0  # decimal digits; with fewer left, a warning
ROUNDING = 1e3  # units in the last place of the whole by which what is left may be wrong
MATRICES, SQUARES = ("gram", "A", "B"), ("diagonal", "values", "trace", "count", "A")  # sums, by the end of their names
COUNTS = ("sse", "square", "count")  # statistics that are never negative


def without(whole: State, part: State, likelihood: Likelihood | None = None) -> State:
    """The state of the data of `whole` that are not those of `part`, which must be among them; with the fit's
    likelihood, what it says of log p is checked too."""
    whole.belongs(part, "subtract")
    if whole.factor.kind == "monte_carlo" and not whole.holds_data:
        raise InvalidValue(
            "the draws of a monte_carlo factor cannot be made again, so they cannot be taken out; fit with "
            "factor='exact' or 'empirical', or with lw.curvature.Full('dual'), which keeps its rows; or fit again"
        )
    if part.n >= whole.n:
        raise InvalidValue(f"cannot take {part.n} examples out of a fit of {whole.n}: none would be left")
    left = replace(
        whole,
        n=whole.n - part.n,
        statistics={k: v - part.statistics[k] for k, v in whole.statistics.items()},
        sums={k: v - part.sums[k] for k, v in whole.sums.items()},
        batches=_rows_left(whole, part) if whole.holds_data else (),
        targets=None if whole.targets is None or part.targets is None else (whole.targets - part.targets) % 2**64,
        inputs=None if whole.inputs is None or part.inputs is None else whole.inputs - part.inputs,
        memo=Memo(),
    )
    _check_statistics(whole, left, likelihood is not None and likelihood.discrete)
    cores = [state.structure.cores(state) for state in (whole, left)]
    for key, core in cores[1].items():
        _positive(key, whole, cores[0][key], core)
    left = replace(left, sums={key: _checked(key, whole, left) for key in left.sums})
    left = replace(left, lost=whole.lost + _cancelled(whole, left))
    if left.digits < FEW:
        warn(
            f"{left.lost:.1f} decimal digits cancelled, and about {max(left.digits, 0):.1f} are left in the worst sum; "
            "fit again on the data that stay",
        )
    return left


def vanished(whole: Tensor, left: Tensor, state: State) -> int:
    """How many entries of a diagonal were there and are rounding now."""
    return int(((whole > 0) & (left <= ROUNDING * state.eps * whole)).sum())


# -- what cancels --------------------------------------------------------------------------------------------------


def _cancelled(whole: State, left: State) -> float:
    """Decimal digits, of the sum that loses most."""
    pairs = [(float(s.norm()), float(left.sums[key].norm())) for key, s in whole.sums.items()]
    before, after = sizes(whole.statistics), sizes(left.statistics)
    pairs += [(float(before[key].norm()), float(after[key].norm())) for key in before]
    return max((math.log10(s / max(d, whole.eps * s)) for s, d in pairs if s > d), default=0.0)


# -- whether they were in it ---------------------------------------------------------------------------------------


def _tolerance(state: State, size: Tensor) -> float:
    return ROUNDING * state.eps * float(size.abs().max())


def _never(what: str, value: float) -> InvalidValue:
    return InvalidValue(
        f"these data were not all in the fit: without them {what} would be {value:.3g}, which no data give; take out "
        "only what was fitted, as it was then (the same preprocessing and labels)"
    )


def _check_statistics(whole: State, left: State, discrete: bool) -> None:
    signs = dict.fromkeys(COUNTS, 1.0) | ({"log_lik": -1.0} if discrete else {})
    for key, value in left.statistics.items():
        worst = float((signs.get(key, 0.0) * value).min())
        if worst < -_tolerance(whole, whole.statistics[key]):
            raise _never(f"their statistic '{key}'", float(value.reshape(-1)[0]) if value.ndim == 0 else worst)


def _checked(key: str, whole: State, left: State) -> Tensor:
    """A sum, if squares can add up to it; what is below zero by rounding becomes zero."""
    before, value, name = whole.sums[key], left.sums[key], key.rpartition("/")[2]
    if whole.factor.kind == "hessian":
        return value
    if name in MATRICES and value.ndim > 2:
        return _positive(key, whole, before, value)
    if name not in SQUARES:
        return value
    if float(value.min()) < -_tolerance(whole, before):
        raise _never(f"the least entry of {key}", float(value.min()))
    return value.clamp(min=0)


def _positive(key: str, whole: State, before: Tensor, matrix: Tensor) -> Tensor:
    """Matrices (..., p, p) without the eigenvalues below zero that rounding gave them."""
    exact, p = matrix.to(torch.float64), matrix.shape[-1]
    unit = torch.eye(p, dtype=torch.float64, device=matrix.device)
    rounding = p * torch.finfo(torch.float64).eps * float(exact.flatten(-2).norm(dim=-1).max())
    if not rounding or not torch.linalg.cholesky_ex(exact + rounding * unit)[1].any():
        return matrix
    values, vectors = torch.linalg.eigh(exact)
    if float(values.min()) < -_tolerance(whole, before.to(torch.float64).flatten(-2).norm(dim=-1)):
        raise _never(f"the least eigenvalue of {key}", float(values.min()))
    return ((vectors * values.clamp(min=0).unsqueeze(-2)) @ vectors.mT).to(matrix)


# -- the dual form -------------------------------------------------------------------------------------------------


def _rows_left(whole: State, part: State) -> tuple[tuple[Any, Tensor], ...]:
    """The batches without the examples of `part`, each found by its inputs; of several, that of the nearest cotangents
    (those of the same target, under an empirical factor)."""
    places: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for b, (x, u) in enumerate(whole.batches):
        for row, key in enumerate(_keys(whole, x, len(u))):
            places[key].append((b, row))
    gone: dict[int, set[int]] = defaultdict(set)
    for x, u in part.batches:
        for row, key in enumerate(_keys(whole, x, len(u))):
            found = places[key]
            if not found:
                raise InvalidValue(
                    "an example of these data is not in the fit, or was taken out before; take out only what was "
                    "fitted, as it was then (the same preprocessing, and whole batches where they cannot be cut)"
                )
            b, there = min(found, key=lambda place: float((whole.batches[place[0]][1][place[1]] - u[row]).norm()))
            found.remove((b, there))
            gone[b].add(there)
    kept = [(x, u, [row for row in range(len(u)) if row not in gone[b]]) for b, (x, u) in enumerate(whole.batches)]
    return tuple((x, u) if len(rows) == len(u) else _some(x, u, rows) for x, u, rows in kept if rows)


def _keys(state: State, x: Any, n: int) -> list[int]:
    """A number for each example of a batch; where it cannot be cut, for the batch and each place in it."""
    if state.tangent.separable(x):
        return tree.row_digests(x).tolist()
    return [hash((digest(x), row)) for row in range(n)]


def _some(x: Any, u: Tensor, rows: list[int]) -> tuple[Any, Tensor]:
    index = torch.tensor(rows, device=u.device)
    return tree.map_tensors(lambda t: t[index.to(t.device)], x), u[index]
