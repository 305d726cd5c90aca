"""The laws of an operator M = s·H + diag(d): every verb of `linalg` is that of the dense matrix.

Each law runs for every kind of diagonal (one value, groups, one an entry), with and without a scale, on a fresh copy.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lapwing.errors import InvalidValue, Unsupported
from lapwing.operators import Diagonal, linalg
from lapwing.testing.laws import Laws, Z, close, normal, same_stream, seeded

KINDS = ("uniform", "grouped", "element")
BATCHES: tuple[tuple[int, ...], ...] = ((), (3,), (2, 3))
DRAWS = 4000


def check_operator(
    op: linalg.Operator,
    dense: Tensor | None = None,
    shifts: tuple[str, ...] = KINDS,
    groups: Tensor | None = None,
    seed: int = 0,
) -> None:
    """Hold an operator, without a shift, to the laws of `operators.linalg`, or raise BrokenLaw.

    dense: the same matrix (p, p), made without the operator; without it, `to_dense` is believed. shifts: the kinds of
    Diagonal that it takes; the others it must refuse. groups (p,): the group of each entry in the "grouped" kind.
    """
    dense = linalg.to_dense(copy.deepcopy(op)) if dense is None else dense
    if unknown := set(shifts) - set(KINDS):
        raise InvalidValue(f"shifts are of {KINDS}, got {sorted(unknown)}")
    case = OperatorCase(op, dense, torch.arange(len(dense)) * 3 % 4 % 3 if groups is None else groups, seed)
    with Laws(type(op).__name__) as law:
        _alone(law, case)
        for kind in shifts:
            for s in (None, 0.3):
                at = f"a shift of kind {kind!r} and scale {s or 1:g}"
                for laws in (_products, _inverses, _draws, _logdet):
                    laws(law, at, case.moved(kind, s), case)
            _gradients(law, kind, case)
        _sharing(law, shifts, case)
        for kind in sorted(set(KINDS) - set(shifts)):
            with law("a kind of shift that it does not take is refused", repr(kind)):
                _refused(case, kind)


@dataclass(frozen=True)
class OperatorCase:
    """H as it came and densely, (p, p), the groups (p,), and where numbers come from."""

    original: linalg.Operator
    dense: Tensor
    groups: Tensor
    seed: int

    @property
    def op(self) -> linalg.Operator:
        """A copy that holds no factorization of another law."""
        return copy.deepcopy(self.original)

    def diagonal(self, kind: str, seed: int = 0) -> Diagonal:
        """diag(d) of a kind."""
        p, index = len(self.dense), self.groups if kind == "grouped" else None
        count = {"uniform": 1, "element": p}.get(kind, int(self.groups.max()) + 1)
        values = 0.5 + torch.rand(count, generator=seeded(self.seed + seed), dtype=torch.float64)
        return Diagonal(values, p, index)

    def moved(self, kind: str, s: float | None) -> tuple[Any, Tensor]:
        """M as an operator and densely."""
        op, dense, d = self.op, self.dense, self.diagonal(kind, 7)
        if s is not None:
            op, dense = linalg.scale(op, torch.tensor(s, dtype=torch.float64)), s * dense
        return linalg.shift(op, d), dense + spread(d)


def spread(d: Diagonal) -> Tensor:
    """diag(d) as a dense matrix, without Diagonal's own rules."""
    return (d.values.expand(d.size) if d.index is None else d.values[d.index]).diag()


def _refused(case: OperatorCase, kind: str) -> None:
    try:
        linalg.logdet(linalg.shift(case.op, case.diagonal(kind)))
    except Unsupported:
        return
    raise AssertionError("no Unsupported was raised")


def _alone(law: Laws, case: OperatorCase) -> None:
    op, dense, v = case.op, case.dense, normal(case.seed, 2, len(case.dense))
    with law("M is symmetric"):
        close(dense, dense.mT)
    with law("its size is that of its matrix"):
        assert op.size == len(dense), f"size is {op.size}, the matrix has {len(dense)} rows"
    with law("without a shift, to_dense, mv and diagonal are those of H"):
        close(linalg.to_dense(op), dense)
        close(linalg.mv(op, v), v @ dense)
        close(linalg.diagonal(op), dense.diagonal())


def _products(law: Laws, at: str, moved: tuple[Any, Tensor], case: OperatorCase) -> None:
    (op, dense), p = moved, len(case.dense)
    with law("to_dense is M", at):
        close(linalg.to_dense(op), dense)
    with law("diagonal is that of M", at):
        close(linalg.diagonal(op), dense.diagonal())
    with law("mv is M v for any batch shape", at):
        for shape in BATCHES:
            v = normal(2, *shape, p)
            close(linalg.mv(op, v), v @ dense)
    with law("traces are sums of diag M over groups", at):
        for kind, index in zip(KINDS, (torch.zeros(p).long(), case.groups, torch.arange(p)), strict=True):
            expected = torch.stack([dense.diagonal()[index == g].sum() for g in range(int(index.max()) + 1)])
            close(linalg.traces(op, case.diagonal(kind)), expected)
    with law("shift and scale compose, and leave M as it was", at):
        d = Diagonal(torch.tensor([0.7], dtype=torch.float64), p)
        twice = linalg.shift(linalg.scale(linalg.shift(op, d), torch.tensor(2.0, dtype=torch.float64)), d)
        expected = 2 * dense + 2.1 * torch.eye(p, dtype=torch.float64)
        close(linalg.to_dense(twice), expected)
        close(linalg.logdet(twice), torch.logdet(expected))
        close(linalg.mv(twice, dense[0]), expected @ dense[0])
        close(linalg.to_dense(op), dense)


def _inverses(law: Laws, at: str, moved: tuple[Any, Tensor], case: OperatorCase) -> None:
    (op, dense), p = moved, len(case.dense)
    inverse = torch.linalg.inv(dense)
    with law("solve is M⁻¹ b for any batch shape", at):
        for shape in BATCHES:
            b = normal(3, *shape, p)
            close(linalg.solve(op, b), b @ inverse)
    with law("solve is symmetric", at):
        solved = linalg.solve(op, torch.eye(p, dtype=torch.float64))
        close(solved, solved.mT)
    with law("solve undoes mv", at):
        v = normal(4, 3, p)
        close(linalg.solve(op, linalg.mv(op, v)), v)
    with law("covariance is X M⁻¹ Xᵀ, per example and joint", at):
        for x in (normal(5, 4, 3, p), normal(6, 1, 12, p)):
            close(linalg.covariance(op, x), x @ inverse @ x.mT)


def _draws(law: Laws, at: str, moved: tuple[Any, Tensor], case: OperatorCase) -> None:
    (op, dense), n, p = moved, DRAWS, len(case.dense)
    with law("draws come from their generator alone", at):
        same_stream(lambda generator: linalg.draw(op, 3, generator))
        two = linalg.draw(op, 2, seeded(1))
        assert not torch.equal(two[0], two[1]), "two draws of one call are the same"
    with law("draws are float64 of shape (n, p)", at):
        found = linalg.draw(op, 2, seeded(0))
        assert found.shape == (2, p), f"shape {tuple(found.shape)}, not {(2, p)}"
        assert found.dtype == torch.float64, f"dtype {found.dtype}"
    with law("draws have mean 0 and covariance M⁻¹", at):
        white = linalg.draw(op, n, seeded(8)) @ torch.linalg.cholesky(dense)  # M = LLᵀ, so Lᵀz ~ N(0, I)
        error = math.sqrt(n) * (white.mT @ white / n - torch.eye(p, dtype=torch.float64))
        for away in (white.mean(0) * math.sqrt(n), error.diagonal() / math.sqrt(2), error - error.diagonal().diag()):
            assert float(away.abs().max()) < Z, f"{float(away.abs().max()):.3g} standard errors away; {Z:g} are allowed"


def _logdet(law: Laws, at: str, moved: tuple[Any, Tensor], case: OperatorCase) -> None:
    op, dense = moved
    with law("logdet is log|M|, before and after another verb", at):
        close(linalg.logdet(copy.deepcopy(op)), torch.logdet(dense))
        linalg.solve(op, dense[0])
        close(linalg.logdet(op), torch.logdet(dense))


def _gradients(law: Laws, kind: str, case: OperatorCase) -> None:
    d, at, dense = case.diagonal(kind), f"a shift of kind {kind!r}", case.dense
    s, values = torch.tensor(0.8, dtype=torch.float64, requires_grad=True), d.values.clone().requires_grad_()
    op = case.op

    def matrix(s: Tensor, values: Tensor) -> Any:
        return linalg.shift(linalg.scale(op, s), Diagonal(values, d.size, d.index))

    exact = torch.logdet(s * dense + spread(Diagonal(values, d.size, d.index)))
    slopes = torch.autograd.grad(exact, (s, values))
    with law("logdet is differentiable in scale and shift", at):
        value = linalg.logdet(matrix(s, values))
        close(value, exact)
        for ours, theirs in zip(torch.autograd.grad(value, (s, values)), slopes, strict=True):
            close(ours, theirs)
    with law("the gradient of logdet is that of finite differences", at):
        check = torch.autograd.gradcheck
        check(lambda s, values: linalg.logdet(matrix(s, values)), (s, values), eps=1e-6, atol=1e-7, rtol=1e-6)
    op = case.op
    moved = matrix(s, values)
    with law("logdet keeps its gradient after other verbs", at):
        with torch.no_grad():
            linalg.solve(moved, dense[0])
            linalg.logdet(moved)
        for _ in range(2):
            close(torch.autograd.grad(linalg.logdet(moved), values, retain_graph=True)[0], slopes[1])
    x, weights = normal(9, 2, 3, len(dense)), normal(10, 2, 3, len(dense))
    with law("solve, draw and covariance carry no gradient in scale and shift", at):
        for found in (linalg.solve(moved, x), linalg.draw(moved, 2, seeded(0)), linalg.covariance(moved, x)):
            assert not found.requires_grad, "one requires a gradient"
    with law("solve has the gradient M⁻¹ in what it acts on", at):
        slope = torch.autograd.grad((weights * linalg.solve(moved, x.requires_grad_())).sum(), x)[0]
        close(slope, weights @ torch.linalg.inv(0.8 * dense + spread(d)))


def _sharing(law: Laws, shifts: tuple[str, ...], case: OperatorCase) -> None:
    """Every verb of H + d for one d after the other, over one H."""
    shared, dense, p = case.op, case.dense, len(case.dense)
    x, shifted = normal(1, 2, 3, p), [case.diagonal(kind, i) for i, kind in enumerate(shifts * 2)]
    if {"grouped", "element"} <= set(shifts):  # as many groups, elsewhere
        shifted.append(Diagonal(case.diagonal("grouped", 5).values, p, case.groups.roll(1)))
    for d in shifted:
        exact, values = dense + spread(d), d.values.clone().requires_grad_()
        with law("shifts that share factorizations do not mix"):
            op = linalg.shift(shared, Diagonal(values, p, d.index))
            close(linalg.logdet(op), torch.logdet(exact))
            close(torch.autograd.grad(linalg.logdet(op), values)[0].sum(), torch.linalg.inv(exact).trace())
            op = linalg.shift(shared, d)
            close(linalg.logdet(op), torch.logdet(exact))
            close(linalg.solve(op, x), x @ torch.linalg.inv(exact))
            close(linalg.covariance(op, x), x @ torch.linalg.inv(exact) @ x.mT)
            doubled = linalg.scale(op, torch.tensor(2.0, dtype=torch.float64))
            close(linalg.logdet(doubled), torch.logdet(2 * exact))
