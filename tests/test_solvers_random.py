"""Nyström approximations, trace and diagonal estimators and preconditioners against dense linear algebra."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.curvature.products import gauss_newton
from lapwing.errors import InvalidValue, NotConverged, NotPositiveDefinite
from lapwing.operators import Dense, Diagonal, linalg
from lapwing.solvers import cg, nystrom, precondition, slq, trace
from lapwing.solvers.nystrom import from_sketch

SEEDS = range(3)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(1_000 + seed)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=seeded(seed), dtype=torch.float64)


def psd(seed: int, spectrum: Tensor) -> Tensor:
    p = len(spectrum)
    q = torch.linalg.qr(normal(seed, p, p))[0]
    return (q * spectrum.double()) @ q.mT


def decaying(p: int) -> Tensor:
    return 10.0 ** torch.linspace(2, -4, p, dtype=torch.float64)


def times(g: Tensor):
    return lambda v: v @ g


# -- Nyström -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("rank", "size"), [(7, 31), (7, 7), (1, 5)])
@pytest.mark.parametrize("more", [0, 3])
def test_a_matrix_of_low_rank_is_met_exactly(seed: int, rank: int, size: int, more: int) -> None:
    g = psd(seed, torch.cat([torch.logspace(2, -2, rank), torch.zeros(size - rank)]))
    found = nystrom(times(g), size, rank + more, seeded(seed))
    k = min(rank + more, size)
    off = 10 * found.shift * seen_badly(torch.randn(k, size, generator=seeded(seed), dtype=torch.float64), g, rank)
    assert off < 1e-7
    torch.testing.assert_close(found.root.mT @ found.root, g, rtol=1e-8, atol=1e-9 + off)
    torch.testing.assert_close(found.vectors @ found.vectors.mT, torch.eye(k, dtype=torch.float64))
    truth = torch.linalg.eigvalsh(g).flip(0)[:k]
    torch.testing.assert_close(found.values, truth.clamp(min=0), rtol=1e-8, atol=1e-9 + off)
    assert abs(found.missing.value) < 1e-9 + size * off


def seen_badly(tests: Tensor, g: Tensor, rank: int) -> float:
    """How much of what is added to G, ν, stays in Ĝ: 1 + ‖(Ω U)⁺ Ω U⊥‖², which is large where as many test vectors as
    ranks happen to see G's range U at a flat angle. How large ν is depends on the processor's linear algebra."""
    vectors = torch.linalg.eigh(g)[1].flip(1)
    inside, outside = tests @ vectors[:, :rank], tests @ vectors[:, rank:]
    return 1 + float(torch.linalg.matrix_norm(torch.linalg.pinv(inside) @ outside, 2) ** 2 if rank < len(g) else 0)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("rank", [1, 6, 20])
def test_a_sketch_is_below_its_matrix(seed: int, rank: int) -> None:
    g = psd(seed, decaying(33))
    found = nystrom(times(g), 33, rank, seeded(seed))
    left = torch.linalg.eigvalsh(g - found.root.mT @ found.root)
    assert float(left[0]) > -1e-9  # Ĝ ⪯ G
    assert bool((found.values <= torch.linalg.eigvalsh(g).flip(0)[:rank] + 1e-9).all())
    assert bool((found.values.diff() <= 0).all())


@pytest.mark.parametrize("seed", SEEDS)
def test_a_sketch_follows_its_formula(seed: int) -> None:
    """Gᵀ Ωᵀ (Ω G Ωᵀ)⁻¹ Ω G, written out."""
    g, tests = psd(seed, torch.linspace(1, 5, 14)), normal(seed + 10, 5, 14)
    y = tests @ g
    found = from_sketch(y, tests)
    torch.testing.assert_close(
        found.root.mT @ found.root, y.mT @ torch.linalg.solve(y @ tests.mT, y), rtol=1e-8, atol=1e-9
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_products_that_are_off_by_rounding_are_shifted_and_shifted_back(seed: int) -> None:
    g = psd(seed, torch.cat([torch.linspace(1, 3, 8), torch.full((6,), -1e-5)]))
    tests = normal(seed + 10, 12, 14)
    found = from_sketch(tests @ g, tests, torch.finfo(torch.float32).eps)
    assert 1e-5 < found.shift < 1e-4
    moved = g + found.shift * torch.eye(14)
    y = tests @ moved
    values = torch.linalg.eigvalsh(y.mT @ torch.linalg.solve(y @ tests.mT, y)).flip(0)[:12]
    torch.testing.assert_close(found.values, (values - found.shift).clamp(min=0), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("p", "k"), [(40, 40), (40, 7), (900, 30)])
def test_rounding_is_no_skew_and_a_skew_is_no_rounding(dtype: torch.dtype, p: int, k: int, seed: int) -> None:
    """Sums of products in the dtype pass, whatever the rank; a skew far above what they leave does not, nor does a
    negative eigenvalue."""
    eps, tests = torch.finfo(dtype).eps, normal(seed, k, p)
    rows = (normal(seed + 10, 5, p) * decaying(p)).to(dtype)  # fewer than test vectors: ΩGΩᵀ is singular
    sketch = ((rows @ tests.to(dtype).mT).mT @ rows).double()
    g = rows.double().mT @ rows.double()
    found = from_sketch(sketch, tests, eps)
    assert found.shift < 2e-3 * float(found.values[0])
    wrong = normal(seed + 20, p, p)
    skew = (wrong - wrong.mT) / torch.linalg.matrix_norm(wrong - wrong.mT, 2)
    size = torch.linalg.matrix_norm(g, 2)
    with pytest.raises(InvalidValue, match="not symmetric"):
        from_sketch(sketch + 1e5 * eps * size * tests @ skew, tests, eps)
    with pytest.raises(NotPositiveDefinite, match="positive semidefinite"):
        from_sketch(sketch - 1e5 * eps * size * tests @ tests.mT @ tests / p, tests, eps)


def test_a_skew_of_a_thousandth_is_refused() -> None:
    g, tests = psd(0, torch.linspace(1, 3, 14)), normal(1, 5, 14)
    skew = normal(2, 14, 14)
    with pytest.raises(InvalidValue, match="not symmetric"):
        from_sketch(tests @ (g + 1e-3 * (skew - skew.mT) / torch.linalg.matrix_norm(skew - skew.mT, 2)), tests)


def test_rounding_that_takes_over_is_said() -> None:
    g, tests = psd(0, torch.linspace(1, 3, 14)), normal(1, 5, 14)
    tests[4] = tests[3] + 1e-9 * tests[4]
    noisy = tests @ g + 1e-9 * normal(3, 5, 14)
    with pytest.raises(InvalidValue, match=r"nearly dependent.*smaller rank"):
        from_sketch(noisy, tests, 1e-9)


@pytest.mark.parametrize("seed", SEEDS)
def test_sketches_of_a_sum_add(seed: int) -> None:
    a, b, tests = psd(seed, decaying(19)), psd(seed + 10, decaying(19)), normal(seed + 20, 6, 19)
    apart, whole = from_sketch(tests @ a + tests @ b, tests), from_sketch(tests @ (a + b), tests)
    torch.testing.assert_close(apart.root.mT @ apart.root, whole.root.mT @ whole.root, rtol=1e-8, atol=1e-9)


def test_what_is_missing_is_told_honestly() -> None:
    g = psd(0, decaying(60))
    hits = 0
    for seed in range(100):
        found = nystrom(times(g), 60, 8, seeded(seed))
        low, high = found.missing.interval
        hits += low <= float(g.trace() - found.values.sum()) <= high
    assert 80 <= hits <= 97


def test_a_zero_matrix_is_zero() -> None:
    found = nystrom(lambda v: 0 * v, 9, 4)
    assert float(found.root.abs().max()) == found.missing.value == found.shift == 0


# -- traces and diagonals ----------------------------------------------------------------------------------------

SPECTRA = {
    "flat": torch.linspace(1, 2, 70),
    "fast": 10.0 ** torch.linspace(3, -4, 70),
    "step": torch.cat([torch.full((10,), 50.0), torch.full((60,), 0.5)]),
    "indefinite": torch.linspace(-2, 3, 70),
}


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("estimator", ["hutchinson", "xtrace"])
def test_error_bars_of_traces_are_honest(estimator: str, spectrum: str) -> None:
    g = psd(1, SPECTRA[spectrum])
    truth, hits = float(g.trace()), 0
    for seed in range(100):
        low, high = getattr(trace, estimator)(times(g), 70, 12, seeded(seed)).interval
        hits += low <= truth <= high
    assert 80 <= hits <= (97 if spectrum != "step" else 100)  # nearly all of a step is in the probes' span


@pytest.mark.parametrize("seed", SEEDS)
def test_error_bars_of_a_diagonal_are_honest(seed: int) -> None:
    g = psd(seed, decaying(50))
    found = trace.diagonal(times(g), 50, 400, seeded(seed))
    away = (found.value - g.diagonal()) / found.standard_error
    assert float(away.abs().max()) < 5
    assert 0.8 <= float((away.abs() < 1.645).double().mean()) <= 0.98


@pytest.mark.parametrize("seed", SEEDS)
def test_a_diagonal_matrix_has_its_trace_and_diagonal_exactly(seed: int) -> None:
    d = normal(seed, 40)
    estimate = trace.hutchinson(lambda v: v * d, 40, 5, seeded(seed))
    assert abs(estimate.value - float(d.sum())) + estimate.standard_error < 1e-12
    found = trace.diagonal(lambda v: v * d, 40, 5, seeded(seed))
    torch.testing.assert_close(found.value, d)
    assert float(found.standard_error.max()) < 1e-14


@pytest.mark.parametrize("seed", SEEDS)
def test_xtrace_is_its_definition(seed: int) -> None:
    """Each probe left out once, with a projector made anew for it."""
    g, p, k = psd(seed, decaying(30)), 30, 6
    estimate = trace.xtrace(times(g), p, k, seeded(seed))
    omega = torch.randn(k, p, generator=seeded(seed), dtype=torch.float64)
    omega = omega * p**0.5 / omega.norm(dim=-1, keepdim=True)
    for i in range(k):
        others = (omega @ g)[torch.arange(k) != i]
        q = torch.linalg.qr(others.mT)[0]
        x = omega[i] - q @ (q.mT @ omega[i])
        expected = (q.mT @ g @ q).trace() + x @ g @ x * (p - k + 1) / (x @ x)
        torch.testing.assert_close(estimate.samples[i], expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("rank", [0, 3])
def test_xtrace_of_a_low_rank_is_exact(rank: int) -> None:
    g = psd(3, torch.cat([torch.linspace(1, 9, rank), torch.zeros(41 - rank)]))
    estimate = trace.xtrace(times(g), 41, 5)
    assert abs(estimate.value - float(g.trace())) < 1e-10
    assert estimate.standard_error < 1e-8


def test_xtrace_of_few_dimensions_is_their_trace() -> None:
    g = psd(4, torch.linspace(1, 3, 8))
    estimate = trace.xtrace(times(g), 8, 4)
    assert (estimate.standard_error, len(estimate.samples)) == (0, 0)
    assert abs(estimate.value - float(g.trace())) < 1e-10


def test_xtrace_beats_hutchinson_where_eigenvalues_fall() -> None:
    """At 60 products of 80 dimensions, by a factor of ten and more."""
    g = psd(5, decaying(80))
    pairs = [(trace.xtrace(times(g), 80, 30, seeded(s)), trace.hutchinson(times(g), 80, 60, seeded(s))) for s in SEEDS]
    assert all(10 * x.standard_error < h.standard_error for x, h in pairs)


@pytest.mark.parametrize("condition", [1e1, 1e3])
def test_error_bars_of_log_determinants_are_honest(condition: float) -> None:
    k = psd(7, torch.logspace(0, torch.tensor(condition).log10(), 25))
    truth, hits = float(torch.logdet(k)), 0
    for seed in range(100):
        low, high = slq(times(k), normal(seed, 12, 25), torch.log)[0].interval
        hits += low <= truth <= high
    assert 80 <= hits <= 97


# -- preconditioners ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shift", ["number", "each"])
def test_a_nystrom_preconditioner_is_its_matrix(seed: int, shift: str) -> None:
    g = psd(seed, decaying(21))
    a = torch.tensor(0.3).double() if shift == "number" else normal(seed, 21).exp()
    found = nystrom(times(g), 21, 6, seeded(seed))
    least, v = found.values[-1], found.vectors
    m = (v.mT * (found.values - least)) @ v + torch.diag((least + a).expand(21))
    r = normal(seed + 5, 4, 21)
    torch.testing.assert_close(precondition.nystrom(found, a)(r), torch.linalg.solve(m, r.mT).mT, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("seed", SEEDS)
def test_frangella_s_form(seed: int) -> None:
    """(l_k + μ) V (Λ + μ)⁻¹ Vᵀ + I − V Vᵀ, over l_k + μ."""
    g, mu = psd(seed, decaying(18)), 0.07
    found = nystrom(times(g), 18, 5, seeded(seed))
    l, v = found.values, found.vectors
    theirs = (v.mT * ((l[-1] + mu) / (l + mu))) @ v + torch.eye(18) - v.mT @ v
    r = normal(seed, 3, 18)
    torch.testing.assert_close(precondition.nystrom(found, mu)(r), r @ theirs / (l[-1] + mu), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("seed", SEEDS)
def test_preconditioners_save_steps(seed: int) -> None:
    p, mu = 120, 1e-2
    g = psd(seed, 10.0 ** torch.linspace(4, -6, p))
    k, b = g + mu * torch.eye(p), normal(seed, 3, p)
    plain = cg(times(k), b, tolerance=1e-9)
    nice = cg(times(k), b, precondition.nystrom(nystrom(times(g), p, 60, seeded(seed)), mu), tolerance=1e-9)
    assert nice.converged
    assert 5 * nice.steps < plain.steps
    torch.testing.assert_close(nice.x, torch.linalg.solve(k, b.mT).mT, rtol=1e-5, atol=1e-6)
    scales = 10.0 ** torch.linspace(-2, 2, p, dtype=torch.float64)  # badly scaled: what Jacobi is for
    k = scales[:, None] * psd(seed, torch.linspace(1, 2, p)) * scales
    jacobi = cg(times(k), b, precondition.diagonal(k.diagonal()), tolerance=1e-9)
    assert jacobi.converged
    assert 5 * jacobi.steps < cg(times(k), b, tolerance=1e-9).steps


def test_a_fitted_operator_is_a_preconditioner() -> None:
    g, a = psd(0, decaying(25)), Diagonal(torch.full((1,), 0.5, dtype=torch.float64), 25)
    precision = linalg.shift(Dense(g, torch.ones((), dtype=torch.float64)), a)
    k = g + 0.5 * torch.eye(25)
    solution = cg(times(k), normal(0, 2, 25), functools.partial(linalg.solve, precision), tolerance=1e-8)
    assert (solution.steps, solution.converged) == (1, True)


@pytest.mark.parametrize("kind", ["kron", "lowrank", "nystrom"])
def test_preconditioners_of_a_network_s_curvature_leave_its_solution(kind: str) -> None:
    """Any of them; all of the rank needs one step, and a Nyström approximation a third of those of none."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 3)).double()
    x, y, prior = normal(0, 60, 5), torch.arange(60) % 3, 0.1
    structure = "kron" if kind == "kron" else lw.curvature.LowRank(250)
    la = lw.laplace(model, (x, y), "categorical", structure=structure, prior=prior)
    batches, p = lw.data.as_batches((x, y)), la.state.layout.size
    b = normal(1, 4, p)

    def curvature(v: Tensor) -> Tensor:
        return gauss_newton(la.tangent, la.likelihood, batches, v)

    def mv(v: Tensor) -> Tensor:
        return curvature(v) + prior * v

    preconditioner = functools.partial(linalg.solve, la.posterior.precision)
    if kind == "nystrom":
        preconditioner = precondition.nystrom(nystrom(curvature, p, 80), prior)
    plain, helped = cg(mv, b, tolerance=1e-9), cg(mv, b, preconditioner, tolerance=1e-9)
    assert helped.converged
    torch.testing.assert_close(helped.x, plain.x, rtol=1e-6, atol=1e-6)
    assert helped.steps <= {"kron": 1_000, "lowrank": 2, "nystrom": plain.steps // 3}[kind]


# -- bad input ---------------------------------------------------------------------------------------------------


def fails_at(g: Tensor, call: int, how):
    """Products with g, of which the given one goes wrong."""
    made = [0]

    def mv(v: Tensor) -> Tensor:
        made[0] += 1
        return how(v @ g) if made[0] == call else v @ g

    return mv


def poisoned(out: Tensor) -> Tensor:
    out = out.clone()
    out[0, 0] = float("nan")
    return out


@pytest.mark.parametrize(
    ("call", "solve"),
    [
        (3, lambda mv, b: cg(mv, b, tolerance=1e-12)),
        (3, lambda mv, b: slq(mv, b, torch.log)),
        (1, lambda mv, b: nystrom(mv, 20, 4)),
        (1, lambda mv, b: trace.hutchinson(mv, 20, 6)),
        (1, lambda mv, b: trace.diagonal(mv, 20, 6)),
        (2, lambda mv, b: trace.xtrace(mv, 20, 6)),
    ],
)
def test_nan_halfway_is_an_error(call: int, solve) -> None:
    mv = fails_at(psd(0, torch.logspace(0, 3, 20)), call, poisoned)
    with pytest.raises(InvalidValue, match="NaN or infinite values in a product"):
        solve(mv, normal(0, 5, 20))


def changing(g: Tensor, spread: float):
    """Another matrix each call: as of a loader that drops or augments."""
    made = [0]

    def mv(v: Tensor) -> Tensor:
        made[0] += 1
        weights = 1 + spread * normal(made[0], len(g))
        return v @ (g * weights[:, None] * weights + torch.eye(len(g)))

    return mv


@pytest.mark.parametrize("spread", [0.03, 0.3])
def test_a_matrix_that_changes_is_named(spread: float) -> None:
    g, b = psd(1, torch.logspace(0, 2, 40)), normal(1, 4, 40)
    with pytest.raises(InvalidValue, match=r"changes between products.*same examples in each pass"):
        cg(changing(g, spread), b, tolerance=1e-8)
    with pytest.raises(InvalidValue, match="changes between products"):
        slq(changing(g, spread), b, torch.log)


def test_an_indefinite_matrix_is_named() -> None:
    g = psd(2, torch.linspace(-1, 5, 20))
    with pytest.raises(NotPositiveDefinite, match="vᵀGv = -"):
        nystrom(times(g), 20, 20)
    with pytest.raises(NotPositiveDefinite, match="the matrix positive definite"):
        cg(times(g), normal(2, 4, 20), tolerance=1e-12)


def test_a_stall_is_told_apart_from_a_change() -> None:
    """Coarse products end the gain; the matrix is still one matrix."""
    g = psd(3, torch.logspace(0, 5, 30))
    coarse = g.float()
    solution = cg(lambda v: (v.float() @ coarse).double(), normal(3, 2, 30), tolerance=1e-13, max_steps=3_000)
    assert not solution.converged
    with pytest.raises(NotConverged, match="still moves"):
        slq(times(psd(3, torch.logspace(0, 12, 30))), normal(3, 4, 30), torch.log, max_steps=4)


@pytest.mark.parametrize(
    ("error", "match", "call"),
    [
        (InvalidValue, "not symmetric", lambda g: nystrom(times(g.triu()), 12, 6)),
        (InvalidValue, "rank", lambda g: nystrom(times(g), 12, 0)),
        (InvalidValue, "keep the shape", lambda g: nystrom(lambda v: v[:, :3], 12, 5)),
        (InvalidValue, "at least 4 probes", lambda g: trace.hutchinson(times(g), 12, 3)),
        (InvalidValue, "at least 4 probes", lambda g: trace.xtrace(times(g), 12, 2)),
        (InvalidValue, "at least 4 probes", lambda g: trace.diagonal(times(g), 12, 1)),
        (NotPositiveDefinite, "diagonal of the matrix positive", lambda g: precondition.diagonal(-g.diagonal())),
        (NotPositiveDefinite, "shift positive", lambda g: precondition.nystrom(nystrom(times(g), 12, 4), 0.0)),
        (InvalidValue, "each of 12", lambda g: precondition.nystrom(nystrom(times(g), 12, 4), torch.ones(3))),
    ],
)
def test_what_cannot_be_done_is_said(error: type[Exception], match: str, call) -> None:
    with pytest.raises(error, match=match):
        call(psd(6, torch.linspace(1, 4, 12)))
