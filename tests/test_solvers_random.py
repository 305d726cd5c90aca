"""Nyström approximations, error bars of log-determinants and preconditioned solves against dense linear algebra."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.curvature.products import gauss_newton
from lapwing.errors import InvalidValue, NotConverged, NotPositiveDefinite
from lapwing.operators import Dense, Diagonal, linalg
from lapwing.solvers import cg, slq
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


def nystrom(g: Tensor, rank: int, generator: torch.Generator):
    tests = torch.randn(min(rank, len(g)), len(g), generator=generator, dtype=torch.float64)
    return from_sketch(tests @ g, tests)


# -- Nyström -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("rank", "size"), [(7, 31), (7, 7), (1, 5)])
@pytest.mark.parametrize("more", [0, 3])
def test_a_matrix_of_low_rank_is_met_exactly(seed: int, rank: int, size: int, more: int) -> None:
    g = psd(seed, torch.cat([torch.logspace(2, -2, rank), torch.zeros(size - rank)]))
    found = nystrom(g, rank + more, seeded(seed))
    k = min(rank + more, size)
    off = 10 * found.shift * seen_badly(torch.randn(k, size, generator=seeded(seed), dtype=torch.float64), g, rank)
    assert off < 1e-7
    torch.testing.assert_close(found.root.mT @ found.root, g, rtol=1e-8, atol=1e-9 + off)
    torch.testing.assert_close(found.vectors @ found.vectors.mT, torch.eye(k, dtype=torch.float64))
    truth = torch.linalg.eigvalsh(g).flip(0)[:k]
    torch.testing.assert_close(found.values, truth.clamp(min=0), rtol=1e-8, atol=1e-9 + off)


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
    found = nystrom(g, rank, seeded(seed))
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


def test_a_zero_matrix_is_zero() -> None:
    found = nystrom(torch.zeros(9, 9, dtype=torch.float64), 4, seeded(0))
    assert float(found.root.abs().max()) == found.shift == 0


# -- log-determinants --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("condition", [1e1, 1e3])
def test_error_bars_of_log_determinants_are_honest(condition: float) -> None:
    k = psd(7, torch.logspace(0, torch.tensor(condition).log10(), 25))
    truth, hits = float(torch.logdet(k)), 0
    for seed in range(100):
        low, high = slq(times(k), normal(seed, 12, 25), torch.log)[0].interval
        hits += low <= truth <= high
    assert 80 <= hits <= 97


# -- preconditioners ---------------------------------------------------------------------------------------------


def test_a_fitted_operator_is_a_preconditioner() -> None:
    g, a = psd(0, decaying(25)), Diagonal(torch.full((1,), 0.5, dtype=torch.float64), 25)
    precision = linalg.shift(Dense(g, torch.ones((), dtype=torch.float64)), a)
    k = g + 0.5 * torch.eye(25)
    solution = cg(times(k), normal(0, 2, 25), functools.partial(linalg.solve, precision), tolerance=1e-8)
    assert (solution.steps, solution.converged) == (1, True)


@pytest.mark.parametrize("kind", ["kron", "lowrank"])
def test_preconditioners_of_a_network_s_curvature_leave_its_solution(kind: str) -> None:
    """Either of them; all of the rank needs one step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 3)).double()
    x, y, prior = normal(0, 60, 5), torch.arange(60) % 3, 0.1
    structure = "kron" if kind == "kron" else lw.curvature.LowRank(250)
    la = lw.laplace(model, (x, y), "categorical", structure=structure, prior=prior)
    batches, p = lw.data.as_batches((x, y)), la.state.layout.size
    b = normal(1, 4, p)

    def mv(v: Tensor) -> Tensor:
        return gauss_newton(la.tangent, la.likelihood, batches, v) + prior * v

    preconditioner = functools.partial(linalg.solve, la.posterior.precision)
    plain, helped = cg(mv, b, tolerance=1e-9), cg(mv, b, preconditioner, tolerance=1e-9)
    assert helped.converged
    torch.testing.assert_close(helped.x, plain.x, rtol=1e-6, atol=1e-6)
    assert helped.steps <= {"kron": 1_000, "lowrank": 2}[kind]


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
        nystrom(g, 20, seeded(0))
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


def test_a_matrix_that_is_not_symmetric_is_named() -> None:
    with pytest.raises(InvalidValue, match="not symmetric"):
        nystrom(psd(6, torch.linspace(1, 4, 12)).triu(), 6, seeded(0))
