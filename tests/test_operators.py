"""Every operator against the dense matrix that it stands for.

`lapwing.testing.check_operator` holds the laws. An operator joins by `curvature(generator)`: the operator H as its
structure would make it, without a prior, and the same H as a dense tensor. One that cannot take some kind of prior
leaves that kind out of `shifts`; `index` says which entries share a value in the grouped kind.
"""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import lapwing as lw
from helpers import close, seeded
from lapwing.errors import LapwingError, LapwingWarning, NotPositiveDefinite, Unsupported
from lapwing.operators import (
    Blocks,
    Dense,
    Diagonal,
    EigenPlusDiagonal,
    HeldRows,
    KroneckerPlusDiagonal,
    Mixed,
    OuterRows,
    RootPlusDiagonal,
    linalg,
    root,
)
from lapwing.operators.root import Pair

KINDS = ("uniform", "grouped", "element")
SEEDS = (0, 1)


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def positive(generator: torch.Generator, *shape: int) -> Tensor:
    return 0.5 + torch.rand(*shape, generator=generator, dtype=torch.float64)


class Compliance:
    """An operator and what it stands for. p is the size of whatever `curvature` makes."""

    shifts: tuple[str, ...] = KINDS

    def curvature(self, generator: torch.Generator) -> tuple[Any, Tensor]:
        """H as an operator, and as a dense tensor (p, p) made without it."""
        raise NotImplementedError

    def index(self, p: int) -> Tensor:
        """The group of each entry, for the grouped kind of prior."""
        return torch.arange(p) * 3 % 4 % 3  # three groups of unequal size, not contiguous

    def prior(self, kind: str, p: int, generator: torch.Generator) -> Diagonal:
        if kind == "uniform":
            return Diagonal(positive(generator, 1), p)
        if kind == "element":
            return Diagonal(positive(generator, p), p)
        index = self.index(p)
        return Diagonal(positive(generator, int(index.max()) + 1), p, index)

    @staticmethod
    def spread(d: Diagonal) -> Tensor:
        """diag(d) as a dense matrix, without Diagonal's own rules."""
        values = d.values.expand(d.size) if d.index is None else d.values[d.index]
        return values.diag()

    @pytest.mark.parametrize("seed", SEEDS)
    def test_it_keeps_the_laws_of_operators(self, seed: int) -> None:
        op, dense = self.curvature(seeded(seed))
        lw.testing.check_operator(op, dense, self.shifts, self.index(len(dense)), seed)


def gram(generator: torch.Generator, m: int, p: int) -> Tensor:
    r = normal(generator, m, p)
    return r.mT @ r


# -- the operators -----------------------------------------------------------------------------------------------


class TestUniformDiagonal(Compliance):
    def curvature(self, generator: torch.Generator) -> tuple[Any, Tensor]:
        values = positive(generator, 1)
        return Diagonal(values, 7), torch.eye(7, dtype=torch.float64) * values


class TestGroupedDiagonal(Compliance):
    def curvature(self, generator: torch.Generator) -> tuple[Any, Tensor]:
        values, index = positive(generator, 3), torch.tensor([2, 0, 0, 1, 2, 2, 0])
        return Diagonal(values, 7, index), torch.stack([values[i] for i in index]).diag()


class TestElementDiagonal(Compliance):
    def curvature(self, generator: torch.Generator) -> tuple[Any, Tensor]:
        values = positive(generator, 7)
        return Diagonal(values, 7), values.diag()


class TestDense(Compliance):
    def curvature(self, generator: torch.Generator) -> tuple[Any, Tensor]:
        h = gram(generator, 4, 7)
        return Dense(h), h


class TestDenseIndefinite(Compliance):
    """A Hessian: indefinite by less than any prior here."""

    def curvature(self, generator: torch.Generator) -> tuple[Any, Tensor]:
        h = gram(generator, 4, 7) - 0.2 * torch.eye(7, dtype=torch.float64)
        return Dense(h, psd=False), h


class TestDenseWithScale(Compliance):
    def curvature(self, generator: torch.Generator) -> tuple[Any, Tensor]:
        h, s = gram(generator, 9, 7), positive(generator, 1)[0]
        return Dense(h, s), s * h


class TestHeldRoot(Compliance):
    def curvature(self, generator: torch.Generator) -> tuple[Any, Tensor]:
        r, w = normal(generator, 4, 9), positive(generator, 1)
        return RootPlusDiagonal(HeldRows(r), Diagonal(w, 4)), w * r.mT @ r


class TestHeldRootWithRowWeights(Compliance):
    def curvature(self, generator: torch.Generator) -> tuple[Any, Tensor]:
        r, w, index = normal(generator, 6, 9), positive(generator, 3), torch.arange(6) % 3
        each = torch.stack([w[i] for i in index])
        return RootPlusDiagonal(HeldRows(r), Diagonal(w, 6, index)), r.mT @ each.diag() @ r


class TestHeldRootWithMixedRows(Compliance):
    """W = I ⊗ L Lᵀ: weights that couple each three rows."""

    def curvature(self, generator: torch.Generator) -> tuple[Any, Tensor]:
        r, L = normal(generator, 6, 9), normal(generator, 3, 3)
        return RootPlusDiagonal(HeldRows(r), Mixed(L, 2)), r.mT @ torch.block_diag(L @ L.mT, L @ L.mT) @ r


class TestStreamedRootWithMixedRows(Compliance):
    """W = L Lᵀ of fewer columns than rows."""

    def curvature(self, generator: torch.Generator) -> tuple[Any, Tensor]:
        r, L = normal(generator, 6, 9), normal(generator, 6, 2)
        return RootPlusDiagonal(FakeStream(r), Mixed(L)), r.mT @ L @ L.mT @ r


class TestTallRoot(Compliance):
    """More rows than columns: legal, if not thrifty."""

    def curvature(self, generator: torch.Generator) -> tuple[Any, Tensor]:
        r = normal(generator, 8, 5)
        return RootPlusDiagonal(HeldRows(r), Diagonal(torch.ones(1, dtype=torch.float64), 8)), r.mT @ r


@dataclass(frozen=True, eq=False)
class FakeStream:
    """Rows that give ranges of columns only, of uneven widths, in float32 if so asked, and note what was asked."""

    tensor: Tensor
    width: int = 2
    asked: list[tuple[int, int]] = field(default_factory=list)
    held: bool = False
    pairs: dict[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int]:
        return self.tensor.shape[0], self.tensor.shape[1]

    def ranges(self, beside: int = 0, without: frozenset[str] = frozenset()) -> Iterator[tuple[int, int]]:
        start = 0
        while start < self.shape[1]:
            stop = min(self.shape[1], start + self.width + start % 2)
            yield start, stop
            start = stop

    def block(self, start: int, stop: int) -> Tensor:
        self.asked.append((start, stop))
        return self.tensor[:, start:stop]


class TestStreamedRoot(Compliance):
    def curvature(self, generator: torch.Generator) -> tuple[Any, Tensor]:
        r, w = normal(generator, 4, 9), positive(generator, 1)
        return RootPlusDiagonal(FakeStream(r), Diagonal(w, 4)), w * r.mT @ r


class TestStreamedRootWithRowWeights(Compliance):
    def curvature(self, generator: torch.Generator) -> tuple[Any, Tensor]:
        r, w, index = normal(generator, 6, 9), positive(generator, 3), torch.arange(6) % 3
        each = torch.stack([w[i] for i in index])
        return RootPlusDiagonal(FakeStream(r), Diagonal(w, 6, index)), r.mT @ each.diag() @ r


WHERE = torch.tensor([8, 1, 0, 3, 4, 6])  # the columns of a layer (o, i) = (2, 3) among 9


@dataclass(frozen=True, eq=False)
class FakePairs(FakeStream):
    """Rows of which some columns are outer products; a range without those is a column at a time."""

    def ranges(self, beside: int = 0, without: frozenset[str] = frozenset()) -> Iterator[tuple[int, int]]:
        if not without:
            yield from super().ranges(beside)
            return
        yield from ((c, c + 1) for c in range(self.shape[1]) if c not in WHERE)

    @classmethod
    def make(cls, generator: torch.Generator, m: int) -> FakePairs:
        a, g, tensor = normal(generator, m, 3), normal(generator, m, 2), normal(generator, m, 9)
        for row in range(m):
            tensor[row, WHERE] = torch.outer(g[row], a[row]).reshape(-1)
        return cls(tensor, pairs={"layer": Pair(WHERE, a, g)})


class TestRootOfPairs(Compliance):
    """Rows that are outer products over a layer's columns."""

    def curvature(self, generator: torch.Generator) -> tuple[Any, Tensor]:
        rows, w, index = FakePairs.make(generator, 6), positive(generator, 3), torch.arange(6) % 3
        each = torch.stack([w[i] for i in index])
        return RootPlusDiagonal(rows, Diagonal(w, 6, index)), rows.tensor.mT @ each.diag() @ rows.tensor


class TestRootOfPairsInOneGroup(TestRootOfPairs):
    """A prior's value for the whole layer: its columns are never made."""

    def index(self, p: int) -> Tensor:
        index = torch.tensor([0, 0, 1, 0, 0, 2, 0, 1, 0])
        assert bool((index[WHERE] == 0).all())
        return index


class TestHeldRootWithManyGroups(TestHeldRootWithRowWeights):
    """Past GROUPS values, K is formed anew for each prior instead of kept by group."""

    @pytest.fixture(autouse=True)
    def few(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(root, "GROUPS", 2)


class KroneckerRule(Compliance):
    """blockdiag_b(B_b ⊗ A_b) over W (b, o, i) = (2, 2, 3); a prior's value may belong to a row or to a column."""

    shifts = ("uniform", "grouped")

    def curvature(self, generator: torch.Generator) -> tuple[Any, Tensor]:
        a = torch.stack([gram(generator, 2, 3) for _ in range(2)])  # singular
        b = torch.stack([gram(generator, 4, 2) for _ in range(2)])
        s = positive(generator, 1)[0]
        blocks = [s * torch.kron(b[j], a[j]) for j in range(2)]
        return KroneckerPlusDiagonal(a, b, s), torch.block_diag(*blocks)


class TestKroneckerByRow(KroneckerRule):
    def index(self, p: int) -> Tensor:
        return torch.tensor([2, 0, 1, 0]).repeat_interleave(3)


class TestKroneckerByColumn(KroneckerRule):
    def index(self, p: int) -> Tensor:
        return torch.tensor([[0, 2, 1], [1, 2, 2]]).repeat_interleave(2, 0).reshape(-1)


class TestKroneckerOfOneHotInputs(TestKroneckerByColumn):
    """A diagonal A, as an embedding has."""

    def curvature(self, generator: torch.Generator) -> tuple[Any, Tensor]:
        a, s = positive(generator, 2, 3), positive(generator, 1)[0]
        b = torch.stack([gram(generator, 4, 2) for _ in range(2)])
        blocks = [s * torch.kron(b[j], a[j].diag()) for j in range(2)]
        return KroneckerPlusDiagonal(a, b, s), torch.block_diag(*blocks)


class TestEigenKronecker(Compliance):
    """U diag(v) Uᵀ with U = blockdiag_b(U_B ⊗ U_A) over W (b, o, i) = (2, 2, 3); one prior precision alone."""

    shifts = ("uniform",)
    one_hot = False

    def curvature(self, generator: torch.Generator) -> tuple[Any, Tensor]:
        ub = torch.linalg.qr(normal(generator, 2, 2, 2))[0]
        ua = torch.eye(3, dtype=torch.float64).expand(2, 3, 3)
        ua = ua if self.one_hot else torch.linalg.qr(normal(generator, 2, 3, 3))[0]
        values = positive(generator, 2, 2, 3)
        values[0, 1, 2] = 0  # singular
        dense = torch.zeros(12, 12, dtype=torch.float64)
        for j, o, i in itertools.product(range(2), range(2), range(3)):
            vector = torch.zeros(2, 2, 3, dtype=torch.float64)
            vector[j] = torch.outer(ub[j][:, o], ua[j][:, i])
            dense += values[j, o, i] * torch.outer(vector.reshape(-1), vector.reshape(-1))
        return EigenPlusDiagonal(values, None if self.one_hot else ua, ub), dense


class TestEigenKroneckerOfOneHotInputs(TestEigenKronecker):
    one_hot = True


class TestBlocks(Compliance):
    """A dense, a diagonal and a root block, their entries interleaved."""

    def curvature(self, generator: torch.Generator) -> tuple[Any, Tensor]:
        h, values, r, w = gram(generator, 2, 3), positive(generator, 2), normal(generator, 2, 4), positive(generator, 1)
        where = torch.tensor([4, 1, 7]), torch.tensor([0, 8]), torch.tensor([6, 5, 2, 3])
        parts = Dense(h), Diagonal(values, len(values)), RootPlusDiagonal(HeldRows(r), Diagonal(w, 2))
        dense = torch.zeros(9, 9, dtype=torch.float64)
        for index, block in zip(where, (h, values.diag(), w * r.mT @ r), strict=True):
            for i, row in enumerate(index):
                for j, column in enumerate(index):
                    dense[row, column] = block[i, j]
        return Blocks(parts, where), dense


class TestBlocksOfKronecker(Compliance):
    """What structure='kron' makes: a Kronecker block a layer, the rest dense; a prior's value for each layer."""

    shifts = ("uniform", "grouped")

    def curvature(self, generator: torch.Generator) -> tuple[Any, Tensor]:
        one = torch.ones((), dtype=torch.float64)
        a, b, h = gram(generator, 4, 3), gram(generator, 4, 2), gram(generator, 2, 3)
        index = torch.arange(3, 9), torch.arange(3)
        return Blocks((KroneckerPlusDiagonal(a[None], b[None], one), Dense(h)), index), torch.block_diag(
            h, torch.kron(b, a)
        )

    def index(self, p: int) -> Tensor:
        return (torch.arange(p) >= 3).long()


# -- what only some operators have ---------------------------------------------------------------------------------


def test_counts_of_a_diagonal() -> None:
    index = torch.tensor([1, 1, 0, 2, 1])
    grouped = Diagonal(torch.tensor([3.0, 5.0, 7.0]), 5, index)
    assert grouped.counts().tolist() == [1, 3, 1]
    assert Diagonal(torch.ones(1), 5).counts().tolist() == [5]
    assert Diagonal(torch.ones(5), 5).counts().tolist() == [1] * 5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", SEEDS)
def test_root_logdet_is_differentiable_in_its_row_weights(kind: str, seed: int) -> None:
    generator, suite = seeded(seed), Compliance()
    r, index, d = normal(generator, 6, 9), torch.arange(6) % 3, suite.prior(kind, 9, generator)
    w = positive(generator, 3).requires_grad_()
    op = linalg.shift(RootPlusDiagonal(HeldRows(r), Diagonal(w, 6, index)), d)
    expected = torch.logdet(r.mT @ w[index].diag() @ r + suite.spread(d))
    close(linalg.logdet(op), expected)
    close(torch.autograd.grad(linalg.logdet(op), w)[0], torch.autograd.grad(expected, w)[0])


@pytest.mark.parametrize("seed", SEEDS)
def test_dense_covariance_takes_outer_products(seed: int) -> None:
    g = seeded(seed)
    n, c, o, i = 3, 2, 4, 5
    half = normal(g, 30, o * i + 2)
    op = linalg.shift(Dense(half.mT @ half), Diagonal(positive(g, 1), o * i + 2))
    index = torch.randperm(o * i + 2, generator=g)[: o * i]
    outer = OuterRows(index, normal(g, n, i), normal(g, n, c, o))
    rows = torch.zeros(n, c, op.size, dtype=torch.float64)
    rows[..., index] = torch.einsum("nco,ni->ncoi", outer.g, outer.a).flatten(2)
    close(linalg.covariance(op, outer), linalg.covariance(op, rows))
    other = linalg.shift(op, Diagonal(positive(g, 1), op.size))  # what was kept of one must not serve the other
    close(linalg.covariance(other, outer), linalg.covariance(other, rows))
    moved = OuterRows(index.roll(1), outer.a, outer.g)
    rows = torch.zeros_like(rows)
    rows[..., moved.index] = torch.einsum("nco,ni->ncoi", outer.g, outer.a).flatten(2)
    close(linalg.covariance(op, moved), linalg.covariance(op, rows))


def test_dense_logdet_is_differentiable_in_its_matrix() -> None:
    """Noise per output moves the matrix itself."""
    parts = torch.stack([gram(seeded(i), 3, 5) for i in range(2)])
    w = torch.tensor([0.4, 1.3], dtype=torch.float64, requires_grad=True)
    values = torch.tensor([0.9], dtype=torch.float64, requires_grad=True)
    matrix = torch.einsum("g,gab->ab", w, parts)
    value = linalg.logdet(linalg.shift(Dense(matrix), Diagonal(values, 5)))
    expected = torch.logdet(w[0] * parts[0] + w[1] * parts[1] + values * torch.eye(5, dtype=torch.float64))
    close(value, expected)
    ours, theirs = (torch.autograd.grad(t, (w, values), retain_graph=True) for t in (value, expected))
    close(ours[0], theirs[0])
    close(ours[1], theirs[1])


def test_covariance_of_streamed_rows_beside_a_streamed_root() -> None:
    r, x = normal(seeded(0), 4, 9), normal(seeded(1), 6, 9)
    d = Compliance().prior("grouped", 9, seeded(2))
    rows, stream = FakeStream(r), FakeStream(x.float(), width=3)
    op = linalg.shift(RootPlusDiagonal(rows, Diagonal(torch.ones(1, dtype=torch.float64), 4)), d)
    inverse = torch.linalg.inv(r.mT @ r + Compliance.spread(d))
    exact = x.float().double()
    blocks = exact.reshape(2, 3, 9)
    close(linalg.covariance(op, (stream, 3)), blocks @ inverse @ blocks.mT)
    close(linalg.covariance(op, (stream, 6)), (exact @ inverse @ exact.mT).unsqueeze(0))
    assert max(stop - start for start, stop in rows.asked + stream.asked) < 9  # neither was ever made whole
    held = linalg.shift(RootPlusDiagonal(HeldRows(r), Diagonal(torch.ones(1, dtype=torch.float64), 4)), d)
    close(linalg.covariance(held, (stream, 3)), blocks @ inverse @ blocks.mT)


@pytest.mark.parametrize("kind", KINDS)
def test_covariance_of_pairs_beside_a_root_of_pairs(kind: str) -> None:
    rows, x = FakePairs.make(seeded(0), 4), FakePairs.make(seeded(1), 6)
    suite = TestRootOfPairsInOneGroup()
    d = suite.prior(kind, 9, seeded(2))
    op = linalg.shift(RootPlusDiagonal(rows, Diagonal(torch.ones(1, dtype=torch.float64), 4)), d)
    inverse = torch.linalg.inv(rows.tensor.mT @ rows.tensor + suite.spread(d))
    for c in (3, 6):
        blocks = x.tensor.reshape(-1, c, 9)
        close(linalg.covariance(op, (x, c)), blocks @ inverse @ blocks.mT)
    if kind != "element":
        assert not {c for start, stop in x.asked for c in range(start, stop)} & set(WHERE.tolist())


def test_a_streamed_root_reads_its_rows_once_for_every_scalar_prior() -> None:
    stream = FakeStream(normal(seeded(0), 4, 9))
    op = RootPlusDiagonal(stream, Diagonal(torch.ones(1, dtype=torch.float64), 4))
    blocks = len(list(stream.ranges()))
    for value in (0.1, 1.0, 10.0):
        moving = torch.tensor([value], dtype=torch.float64, requires_grad=True)
        linalg.logdet(linalg.shift(op, Diagonal(moving, 9))).backward()
    assert len(stream.asked) == blocks


def test_many_precisions_cannot_be_tuned_over_streamed_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(root, "GROUPS", 2)
    r, values = normal(seeded(0), 4, 9), positive(seeded(1), 9)
    op = RootPlusDiagonal(FakeStream(r), Diagonal(torch.ones(1, dtype=torch.float64), 4))
    fixed = linalg.shift(op, Diagonal(values, len(values)))
    close(linalg.logdet(fixed), torch.logdet(r.mT @ r + values.diag()))
    close(linalg.traces(fixed, Diagonal(values, len(values))), (r.mT @ r + values.diag()).diagonal())
    with pytest.raises(Unsupported, match="memory_budget"):
        linalg.logdet(linalg.shift(op, Diagonal(values.requires_grad_(), 9)))


def test_a_root_alone_is_singular_and_says_so() -> None:
    op = RootPlusDiagonal(HeldRows(normal(seeded(0), 2, 5)), Diagonal(torch.ones(1, dtype=torch.float64), 2))
    for verb in (linalg.logdet, lambda op: linalg.solve(op, torch.ones(5)), lambda op: linalg.draw(op, 1, seeded(0))):
        with pytest.raises(Unsupported, match="prior precision"):
            verb(op)


# -- a missing pair of operator and verb ---------------------------------------------------------------------------

VERBS = ("mv", "scale", "shift", "solve", "logdet", "draw", "covariance", "diagonal", "to_dense")


@pytest.mark.parametrize("name", VERBS)
def test_a_missing_verb_raises_and_names_alternatives(name: str) -> None:
    class Banded:
        pass

    with pytest.raises(Unsupported) as caught:
        getattr(linalg, name)(Banded(), torch.ones(1))
    text = str(caught.value)
    assert isinstance(caught.value, LapwingError)
    assert name in text
    assert "Banded" in text
    assert sum(known in text for known in ("Dense", "Diagonal", "RootPlusDiagonal")) >= 2
    assert f"linalg.{name}.register" in text


@pytest.mark.parametrize("name", VERBS)
def test_every_operator_has_every_verb(name: str) -> None:
    generic = getattr(linalg, name)
    for operator in (Blocks, Dense, Diagonal, EigenPlusDiagonal, KroneckerPlusDiagonal, RootPlusDiagonal):
        assert generic.dispatch(operator) is not generic.dispatch(object)


# -- the jitter policy ---------------------------------------------------------------------------------------------


@contextmanager
def no_warning() -> Iterator[None]:
    """Warnings are errors in this suite; said aloud where silence is the point."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_a_positive_definite_matrix_takes_no_jitter() -> None:
    matrix = gram(seeded(0), 9, 6)
    with no_warning():
        factor, jitter = linalg.cholesky(matrix)
    assert jitter == 0.0
    close(factor @ factor.mT, matrix)
    op = linalg.shift(Dense(matrix), Diagonal(torch.ones(1, dtype=torch.float64), 6))
    linalg.solve(op, matrix[0])
    assert op.memo.jitter == 0.0


def test_rounding_takes_a_jitter_that_is_said_and_recorded() -> None:
    """A singular matrix whose last pivot is lost to rounding: 10·p·ε·max(diag), once, with a warning."""
    matrix = 4 * torch.ones(3, 3, dtype=torch.float64)
    expected = 10 * 3 * torch.finfo(torch.float64).eps * 4
    with pytest.warns(LapwingWarning, match=re.escape(f"{expected:.3g}")) as caught:
        factor, jitter = linalg.cholesky(matrix)
    assert len(caught) == 1
    assert jitter == expected
    close(factor @ factor.mT, matrix)
    op = Dense(matrix)
    with pytest.warns(LapwingWarning, match="jitter"):
        linalg.draw(op, 2, seeded(0))
    with no_warning():
        linalg.solve(op, matrix[0])  # the same factor: said once
    assert op.memo.jitter == expected


@pytest.mark.parametrize("least", [-0.5, -1e-6])
def test_an_indefinite_matrix_is_an_error_with_its_least_eigenvalue(least: float) -> None:
    q = torch.linalg.qr(normal(seeded(0), 4, 4)).Q
    matrix = q @ torch.tensor([least, 0.3, 1.0, 2.0], dtype=torch.float64).diag() @ q.mT
    matrix = (matrix + matrix.mT) / 2
    with pytest.raises(NotPositiveDefinite, match=re.escape(f"{least:.6g}")) as caught:
        linalg.cholesky(matrix)
    assert "prior precision" in str(caught.value)
    op = Dense(matrix, psd=False)
    for verb in (
        lambda: linalg.solve(op, matrix[0]),
        lambda: linalg.draw(op, 1, seeded(0)),
        lambda: linalg.covariance(op, matrix.reshape(2, 2, 4)),
        lambda: linalg.logdet(op),
    ):
        with pytest.raises(NotPositiveDefinite, match=re.escape(f"{least:.6g}")):
            verb()


def test_an_indefinite_precision_is_an_error_on_every_route_to_its_logdet() -> None:
    """Eigenvalues (a uniform prior that moves), Cholesky, and autograd through the matrix."""
    matrix = torch.tensor([2.0, -0.5, 1.0], dtype=torch.float64).diag()
    uniform = torch.tensor([0.25], dtype=torch.float64, requires_grad=True)
    each = torch.full((3,), 0.25, dtype=torch.float64, requires_grad=True)
    for op in (
        linalg.shift(Dense(matrix, psd=False), Diagonal(uniform, 3)),
        linalg.shift(Dense(matrix, psd=False), Diagonal(each, 3)),
        linalg.shift(Dense(matrix.clone().requires_grad_(), psd=False), Diagonal(uniform, 3)),
    ):
        with pytest.raises(NotPositiveDefinite, match=r"-0\.25"):
            linalg.logdet(op)


def test_a_gram_matrix_beyond_rounding_is_not_clipped() -> None:
    values = torch.tensor([-1e-6, 0.5, 1.0], dtype=torch.float64)
    with pytest.raises(NotPositiveDefinite, match="-1e-06"):
        linalg.clip(values)


def test_eigenvalues_below_zero_by_rounding_are_clipped() -> None:
    values = torch.tensor([-1e-15, -2e-16, 0.0, 1.0], dtype=torch.float64)
    assert linalg.clip(values).tolist() == [0.0, 0.0, 0.0, 1.0]


def test_negative_eigenvalues_of_an_indefinite_curvature_stay() -> None:
    matrix = torch.tensor([-1e-6, 0.5, 1.0], dtype=torch.float64).diag()
    close(Dense(matrix, psd=False).eigenvalues, matrix.diagonal())


@pytest.mark.parametrize("form", ["primal", "dual"])
def test_a_rank_deficient_curvature_has_no_negative_eigenvalue(form: str) -> None:
    r = normal(seeded(0), 3, 40)
    r = torch.cat([r, r.flip(0)])  # rows repeat: RRᵀ is singular too
    values = torch.tensor([0.5], dtype=torch.float64, requires_grad=True)
    one = Diagonal(torch.ones(1, dtype=torch.float64), 6)
    curvature: Any = Dense(r.mT @ r) if form == "primal" else RootPlusDiagonal(HeldRows(r), one)
    with no_warning():
        value = linalg.logdet(linalg.shift(curvature, Diagonal(values, 40)))
    close(value, torch.logdet(r.mT @ r + 0.5 * torch.eye(40, dtype=torch.float64)))
    gram_matrix = r.mT @ r if form == "primal" else r @ r.mT
    raw = torch.linalg.eigvalsh(gram_matrix)
    assert float(raw.min()) < 0  # or this test checks nothing
    assert float(curvature.memo.spectrum(None).eigenvalues.min()) >= 0.0


def test_a_precision_with_nan_is_an_error_that_says_so() -> None:
    matrix = gram(seeded(0), 5, 4)
    matrix[1, 1] = torch.nan
    with pytest.raises(NotPositiveDefinite, match="NaN"):
        linalg.solve(Dense(matrix), torch.ones(4, dtype=torch.float64))


def test_variances_that_are_rounding_are_said_to_be() -> None:
    """The dual form takes a difference: what rounding leaves of it must not look like a variance."""
    R = 1e15 * torch.randn(6, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ones = torch.ones(1, dtype=torch.float64)
    op = RootPlusDiagonal(HeldRows(R), Diagonal(ones, 6), Diagonal(ones, 9))
    with pytest.warns(LapwingWarning, match="6 of 6 variances of outputs are below the rounding"):
        linalg.covariance(op, R.reshape(6, 1, 9))
    linalg.covariance(op, torch.randn(2, 1, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
