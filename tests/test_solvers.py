"""Conjugate gradients and Lanczos against dense linear algebra."""

from __future__ import annotations

import math

import pytest
import scipy.stats
import torch
from torch import Tensor

from lapwing.errors import InvalidValue, NotConverged, NotPositiveDefinite
from lapwing.solvers import Lanczos, cg, slq
from lapwing.solvers.estimate import chi_square, mean_of, ratio_of, student_t, variance_of


def spd(seed: int, p: int, condition: float = 1e3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    q = torch.linalg.qr(torch.randn(p, p, generator=generator, dtype=torch.float64))[0]
    return (q * torch.logspace(0, torch.tensor(condition).log10(), p, dtype=torch.float64)) @ q.mT


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 + seed), dtype=torch.float64)


# -- conjugate gradients -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("preconditioned", [False, True])
def test_cg_is_the_dense_solve(seed: int, warm: bool, preconditioned: bool) -> None:
    k, b = spd(seed, 23), normal(seed, 5, 23)
    diag = k.diagonal()
    x0 = normal(seed + 50, 5, 23) if warm else None
    solution = cg(
        lambda v: v @ k, b, (lambda r: r / diag) if preconditioned else None, x0, tolerance=1e-12, max_steps=500
    )
    assert solution.converged
    torch.testing.assert_close(solution.x, torch.linalg.solve(k, b.mT).mT, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(solution.residual, (b - solution.x @ k).norm(dim=-1) / b.norm(dim=-1))
    assert bool((solution.residual <= 1e-12).all())


def test_cg_takes_as_many_steps_as_there_are_distinct_eigenvalues() -> None:
    q = torch.linalg.qr(normal(0, 17, 17))[0]
    k = (q * torch.tensor([1.0, 2.0, 5.0]).repeat(6)[:17].double()) @ q.mT
    assert cg(lambda v: v @ k, normal(1, 4, 17), tolerance=1e-10).steps == 3


def test_the_inverse_as_preconditioner_takes_one_step() -> None:
    k = spd(0, 19, 1e6)
    solution = cg(lambda v: v @ k, normal(2, 3, 19), lambda r: torch.linalg.solve(k, r.mT).mT, tolerance=1e-8)
    assert (solution.steps, solution.products, solution.converged) == (1, 2, True)


def test_a_column_that_is_done_is_frozen_and_no_longer_multiplied() -> None:
    """One column is an eigenvector (one step), one is zero (no step), one is hard."""
    k = spd(3, 20)
    easy = torch.linalg.eigh(k)[1][:, 4]
    b = torch.stack([easy, torch.zeros(20, dtype=torch.float64), normal(3, 20)])
    widths: list[int] = []

    def mv(v: Tensor) -> Tensor:
        widths.append(len(v))
        return v @ k

    solution = cg(mv, b, tolerance=1e-10)
    assert widths[:2] == [2, 1]
    assert len(widths) == solution.products
    assert set(widths[1:-1]) == {1}
    assert widths[-1] == 2  # the true residuals, in the end
    torch.testing.assert_close(solution.x, torch.linalg.solve(k, b.mT).mT, rtol=1e-7, atol=1e-8)
    assert float(solution.residual[1]) == 0


def test_columns_do_not_depend_on_each_other() -> None:
    k, b = spd(4, 21), normal(4, 6, 21)
    together = cg(lambda v: v @ k, b, tolerance=1e-7)
    for row, x in zip(b, together.x, strict=True):
        torch.testing.assert_close(cg(lambda v: v @ k, row[None], tolerance=1e-7).x[0], x)


@pytest.mark.parametrize("x0", [None, "at the solution"])
def test_a_start_at_the_solution_costs_one_product(x0: str | None) -> None:
    k, b = spd(5, 12), normal(5, 2, 12)
    exact = torch.linalg.solve(k, b.mT).mT
    solution = cg(lambda v: v @ k, b, x0=None if x0 is None else exact, tolerance=1e-9)
    assert solution.converged
    assert (solution.products == 1) is (x0 is not None)
    torch.testing.assert_close(solution.residual, (b - solution.x @ k).norm(dim=-1) / b.norm(dim=-1))


def test_the_residual_reported_is_the_true_one_even_where_products_are_coarse() -> None:
    """Products in float32 bar the way to 1e-12: said, not hidden, and not tried for ever."""
    k, b = spd(6, 30, 1e4), normal(6, 3, 30)
    coarse = k.float()
    solution = cg(lambda v: (v.float() @ coarse).double(), b, tolerance=1e-12, max_steps=5_000)
    assert not solution.converged
    assert solution.steps < 2_000
    measured = (b - (solution.x.float() @ coarse).double()).norm(dim=-1) / b.norm(dim=-1)
    torch.testing.assert_close(solution.residual, measured)
    assert bool((solution.residual < 1e-2).all())


def test_too_few_steps_are_reported() -> None:
    k, b = spd(7, 40, 1e6), normal(7, 2, 40)
    solution = cg(lambda v: v @ k, b, tolerance=1e-10, max_steps=5)
    assert (solution.converged, solution.steps) == (False, 5)
    torch.testing.assert_close(solution.residual, (b - solution.x @ k).norm(dim=-1) / b.norm(dim=-1))


def test_an_ill_conditioned_system_passes_a_refresh() -> None:
    k, b = spd(8, 60, 1e6), normal(8, 2, 60)
    solution = cg(lambda v: v @ k, b, tolerance=1e-8, max_steps=5_000)
    assert solution.converged
    assert solution.steps > 60


def test_rows_may_have_matrices_of_their_own() -> None:
    """K + E_row, with a preconditioner for K alone; rows that are done no longer ask for theirs."""
    k, b, e = spd(3, 9), normal(4, 5, 9), normal(5, 5, 9)
    asked: list[int] = []

    def extra(v: Tensor, rows: Tensor) -> Tensor:
        asked.append(len(rows))
        return (e[rows] * v).sum(-1, keepdim=True) * e[rows] * (rows > 0).unsqueeze(-1)  # none for row 0

    found = cg(lambda v: v @ k, b, lambda r: torch.linalg.solve(k, r.mT).mT, tolerance=1e-12, extra=extra)
    matrices = torch.stack([k + (i > 0) * torch.outer(e[i], e[i]) for i in range(5)])
    torch.testing.assert_close(found.x, torch.linalg.solve(matrices, b.unsqueeze(-1)).squeeze(-1))
    assert found.converged
    assert min(asked) < 5


def test_cg_leaves_its_arguments_alone() -> None:
    k, b, x0 = spd(9, 10), normal(9, 2, 10), normal(10, 2, 10)
    kept = b.clone(), x0.clone()
    cg(lambda v: v @ k, b, x0=x0)
    assert torch.equal(b, kept[0])
    assert torch.equal(x0, kept[1])


@pytest.mark.parametrize(
    ("error", "match", "call"),
    [
        (NotPositiveDefinite, "the matrix positive definite", lambda k, b: cg(lambda v: -v @ k, b)),
        (NotPositiveDefinite, "the preconditioner positive", lambda k, b: cg(lambda v: v @ k, b, lambda r: -r)),
        (InvalidValue, "NaN or infinite values in a product", lambda k, b: cg(lambda v: v @ k * float("nan"), b)),
        (InvalidValue, "keep the shape", lambda k, b: cg(lambda v: (v @ k)[0], b)),
        (InvalidValue, r"shape \(k, p\)", lambda k, b: cg(lambda v: v @ k, b[0])),
        (InvalidValue, "finite", lambda k, b: cg(lambda v: v @ k, b / 0)),
        (InvalidValue, "x0 must have the shape", lambda k, b: cg(lambda v: v @ k, b, x0=b[:1])),
        (InvalidValue, "tolerance > 0", lambda k, b: cg(lambda v: v @ k, b, tolerance=0.0)),
        (InvalidValue, "max_steps", lambda k, b: cg(lambda v: v @ k, b, max_steps=0)),
    ],
)
def test_what_cannot_be_solved_is_said(error: type[Exception], match: str, call) -> None:
    with pytest.raises(error, match=match):
        call(spd(0, 6), normal(0, 2, 6))


# -- Lanczos -----------------------------------------------------------------------------------------------------


def metric(m: Tensor):
    return (lambda v: v @ m), (lambda v: torch.linalg.solve(m, v.mT).mT)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("weighted", [False, True])
def test_slq_with_all_steps_and_a_basis_of_probes_is_exact(seed: int, weighted: bool) -> None:
    p = 17
    k, m = spd(seed, p), spd(seed + 10, p, 50.0) if weighted else torch.eye(p, dtype=torch.float64)
    inner, solve = metric(m)
    basis = torch.linalg.inv(torch.linalg.cholesky(m))  # rows are orthonormal in the inner product of m
    run = Lanczos.start(lambda v: solve(v @ k), basis, inner)
    for _ in range(p):
        run.step()
    values = torch.linalg.eigvals(torch.linalg.solve(m, k)).real
    for f in (torch.log, torch.sqrt, torch.reciprocal):
        torch.testing.assert_close(run.quadrature(f).sum(), f(values).sum(), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_basis_is_orthonormal_and_makes_the_matrix_tridiagonal(weighted: bool) -> None:
    p = 30
    k, m = spd(1, p, 1e8), spd(2, p, 1e3) if weighted else torch.eye(p, dtype=torch.float64)
    inner, solve = metric(m)
    run = Lanczos.start(lambda v: solve(v @ k), normal(1, 3, p), inner)
    for _ in range(20):
        run.step()
    q = torch.stack(run.basis[:-1], 1)  # (k, m, p)
    eye = torch.eye(20, dtype=torch.float64).expand(3, 20, 20)
    torch.testing.assert_close(q @ m @ q.mT, eye, rtol=0, atol=1e-10)
    torch.testing.assert_close(q @ k @ q.mT, run.tridiagonal(), rtol=1e-8, atol=1e-8 * float(k.abs().max()))


def test_breakdown_is_the_column_s_own() -> None:
    """A start in an invariant subspace of two dimensions is exact after two steps and multiplied no more."""
    p = 15
    k = spd(3, p)
    vectors = torch.linalg.eigh(k)[1].mT
    starts = torch.stack([vectors[2] + 2 * vectors[7], normal(3, p), vectors[4]])
    widths: list[int] = []

    def mv(v: Tensor) -> Tensor:
        widths.append(len(v))
        return v @ k

    run = Lanczos.start(mv, starts)
    for _ in range(p):
        run.step()
    unit = starts / starts.norm(dim=-1, keepdim=True)
    values, basis = torch.linalg.eigh(k)
    log = basis @ values.log().diag() @ basis.mT
    torch.testing.assert_close(run.quadrature(torch.log), ((unit @ log) * unit).sum(-1), rtol=1e-8, atol=1e-8)
    assert widths[:3] == [3, 2, 1]


@pytest.mark.parametrize("seed", range(5))
def test_the_error_bar_of_slq_covers_the_truth(seed: int) -> None:
    p = 60
    k, m = spd(seed, p, 1e4), spd(seed + 20, p, 1e2)
    inner, solve = metric(m)
    starts = normal(seed, 40, p) @ torch.linalg.inv(torch.linalg.cholesky(m))  # N(0, m⁻¹)
    estimate, steps = slq(lambda v: solve(v @ k), starts, torch.log, inner)
    truth = float(torch.logdet(k) - torch.logdet(m))
    assert abs(estimate.value - truth) < 5 * estimate.standard_error
    assert steps < p
    assert estimate.samples.shape == (40,)


@pytest.mark.parametrize("window", [2, 5])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_ghosts_share_the_weight_of_their_eigenvalue(seed: int, weighted: bool, window: int) -> None:
    """Without reorthogonalization T has copies of eigenvalues; quadratures are those of the full form all the same."""
    p = 60
    spectrum = torch.cat([torch.linspace(1, 2, p - 3), torch.tensor([1e2, 1e3, 1e4])]).double()
    vectors = torch.linalg.qr(normal(seed, p, p))[0]
    k, m = (vectors * spectrum) @ vectors.mT, spd(seed + 20, p, 5.0) if weighted else torch.eye(p, dtype=torch.float64)
    inner, solve = metric(m)
    starts = torch.linalg.inv(torch.linalg.cholesky(m))[:7]
    full, short = (Lanczos.start(lambda v: solve(v @ k), starts, inner, w) for w in (None, window))
    for step in range(3 * p):
        short.step()
        if step < p:
            full.step()
    assert len(short.basis) == window
    top = torch.linalg.eigvals(torch.linalg.solve(m, k)).real.max()
    copies = (torch.linalg.eigvalsh(short.tridiagonal()) > 0.99 * top).sum(-1)
    assert int(copies.min()) > 1
    for f in (torch.log, torch.sqrt, torch.reciprocal):
        torch.testing.assert_close(short.quadrature(f), full.quadrature(f), rtol=1e-8, atol=1e-8)


def test_three_vectors_from_a_basis_of_probes_give_the_log_determinant() -> None:
    p = 40
    k = spd(4, p, 1e4)
    run = Lanczos.start(lambda v: v @ k, torch.eye(p, dtype=torch.float64), window=2)
    for _ in range(4 * p):
        run.step()
    torch.testing.assert_close(run.quadrature(torch.log).sum(), torch.logdet(k), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("seed", range(5))
def test_three_vectors_give_the_estimate_of_the_full_form(seed: int) -> None:
    p = 200
    k, starts = spd(seed, p, 3e3), normal(seed, 12, p)
    (full, _), (short, steps) = (slq(lambda v: v @ k, starts, torch.log, window=w) for w in (None, 2))
    away = abs(short.value - full.value)
    assert away < 0.02 * full.standard_error
    assert abs(short.value - float(torch.logdet(k))) < 5 * short.standard_error
    assert steps < p


def test_a_quadrature_of_what_should_be_positive_and_is_not_is_named() -> None:
    k = spd(0, 20) - 2 * torch.eye(20, dtype=torch.float64)
    with pytest.raises(NotPositiveDefinite, match="the least is -"):
        slq(lambda v: v @ k, normal(0, 8, 20), torch.log)


def test_the_identity_takes_one_step_and_has_no_error() -> None:
    estimate, steps = slq(lambda v: v, normal(0, 8, 11), torch.log)
    assert steps == 1
    assert abs(estimate.value) + estimate.standard_error < 1e-12


def test_a_quadrature_that_has_not_settled_is_an_error() -> None:
    k = spd(0, 50, 1e10)
    with pytest.raises(NotConverged, match="still moves"):
        slq(lambda v: v @ k, normal(0, 8, 50), torch.log, max_steps=3)


@pytest.mark.parametrize(
    ("match", "call"),
    [
        ("longer than zero", lambda: slq(lambda v: v, torch.zeros(4, 3), torch.log)),
        (r"shape \(k, p\)", lambda: slq(lambda v: v, torch.ones(3), torch.log)),
        ("NaN", lambda: slq(lambda v: v * float("nan"), torch.ones(4, 3), torch.log)),
        ("at least 4 probes", lambda: slq(lambda v: v, torch.ones(3, 3), torch.log)),
        ("max_steps", lambda: slq(lambda v: v, torch.ones(4, 3), torch.log, max_steps=0)),
        ("window of at least 2", lambda: slq(lambda v: v, torch.ones(4, 3), torch.log, window=1)),
    ],
)
def test_what_lanczos_cannot_take_is_said(match: str, call) -> None:
    with pytest.raises(InvalidValue, match=match):
        call()


# -- estimates ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("freedom", "tolerance"), [(3, 2e-2), (7, 1e-3), (15, 1e-4), (31, 1e-5), (500, 1e-8)])
def test_student_s_quantile(freedom: int, tolerance: float) -> None:
    assert abs(student_t(0.9, freedom) / scipy.stats.t.ppf(0.95, freedom) - 1) < tolerance


@pytest.mark.parametrize("freedom", [1, 4, 17, 1_000])
@pytest.mark.parametrize("level", [0.05, 0.5, 0.95])
def test_the_quantile_of_chi_square(freedom: int, level: float) -> None:
    assert abs(chi_square(level, freedom) / scipy.stats.chi2.ppf(level, freedom) - 1) < 1e-9


@pytest.mark.parametrize("samples", [1, 4, 8, 32])
def test_the_interval_of_a_variance_covers_nine_times_in_ten(samples: int) -> None:
    """However few the draws; ± 1.645 standard errors hold it in 76 of 100 runs with 4 of them."""
    squares = (3 * normal(samples, 4_000, samples)).square().mean(-1)
    low, high = variance_of(squares, samples)
    hits = float(((low <= 9) & (high >= 9)).double().mean())
    assert abs(hits - 0.9) < 5 * math.sqrt(0.9 * 0.1 / 4_000)


def test_the_interval_of_a_mean_covers_nine_times_in_ten() -> None:
    draws = normal(7, 2_000, 12)
    hits = sum(low <= 0 <= high for low, high in (mean_of(s).interval for s in draws))
    assert abs(hits / 2_000 - 0.9) < 5 * math.sqrt(0.9 * 0.1 / 2_000)


def test_the_interval_of_a_ratio_covers_nine_times_in_ten() -> None:
    """Skewed, correlated numbers: E a / E b = 1.5."""
    squares = normal(8, 2_000, 32, 6).square()
    b = squares.sum(-1)
    a = 1.5 * (squares[..., :4].sum(-1) + 2 * squares[..., 4])
    hits = sum(lo <= 1.5 <= hi for lo, hi in (ratio_of(x, y).interval for x, y in zip(a, b, strict=True)))
    assert abs(hits / 2_000 - 0.9) < 5 * math.sqrt(0.9 * 0.1 / 2_000)


def test_a_wider_interval_holds_both() -> None:
    e = mean_of(torch.arange(8.0).double())
    low, high = e.interval
    assert e.wider(low + 0.1, high + 0.1).interval == (low, high + 0.1)
    assert e.wider(low - 0.1, high - 0.1).interval == (low - 0.1, high)


def test_a_ratio_to_itself_is_one_without_error() -> None:
    s = normal(9, 10).square()
    estimate = ratio_of(3 * s, s)
    assert abs(estimate.value - 3) + estimate.standard_error < 1e-12
