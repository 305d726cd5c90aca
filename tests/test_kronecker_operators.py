"""What only the Kronecker and block operators have; the laws of every operator are in test_operators.py.

M = s·(B ⊗ A) + D: the prior adds to products of eigenvalues, a prior by rows or columns is absorbed by whitening, any
other is refused; eigendecompositions are made once, when first asked for, and shared by every s and uniform D.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import lapwing as lw
from helpers import close
from lapwing.errors import LapwingWarning, NotPositiveDefinite, Unsupported
from lapwing.likelihoods import Gaussian
from lapwing.operators import Blocks, Dense, Diagonal, KroneckerPlusDiagonal, linalg

SEEDS = (0, 1, 2)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gram(seed: int, rows: int, size: int) -> Tensor:
    r = normal(seed, rows, size)
    return r.mT @ r


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


# -- one Kronecker block -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_the_prior_adds_to_products_of_eigenvalues(seed: int) -> None:
    """Σ log(s·m·l + δ), which is not Σ log((l + √δ)(m + √δ))."""
    a, b, s, delta = gram(seed, 2, 3), gram(seed + 10, 4, 2), 0.7, 0.3
    op = linalg.shift(KroneckerPlusDiagonal(a[None], b[None], scalar(s)), Diagonal(scalar(delta).reshape(1), 6))
    l, m = torch.linalg.eigvalsh(a), torch.linalg.eigvalsh(b)
    close(linalg.logdet(op), torch.log(s * torch.outer(m, l) + delta).sum())
    shortcut = torch.log(torch.outer(s**0.5 * m + delta**0.5, s**0.5 * l + delta**0.5)).sum()
    assert abs(float(linalg.logdet(op) - shortcut)) > 0.1


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["uniform", "rows", "columns"])
@pytest.mark.parametrize("diagonal_inputs", [False, True])
def test_logdet_is_differentiable_in_a_mixed_output_factor(kind: str, diagonal_inputs: bool, seed: int) -> None:
    """B = Σ_h w_h B_h: noise per output moves B itself, whitened or not."""
    o, i = 3, 2
    a = normal(seed, i).square() + 0.1 if diagonal_inputs else gram(seed, 1, i)
    each, w = torch.stack([gram(seed + h, 1, o) for h in (1, 2)]), normal(seed, 2).exp().requires_grad_()
    index = {
        "uniform": None,
        "rows": torch.tensor([0, 1, 0]).repeat_interleave(i),
        "columns": torch.arange(i).repeat(o),
    }
    values = normal(seed + 5, 1 if kind == "uniform" else 2).exp().requires_grad_()
    d = Diagonal(values, o * i, index[kind])
    B = torch.einsum("h,hoq->oq", w, each)
    op = linalg.shift(KroneckerPlusDiagonal(a[None], B[None], scalar(0.4)), d)
    with torch.no_grad():
        linalg.logdet(op)  # what it keeps must not lose the gradient
    value = linalg.logdet(op)
    M = 0.4 * torch.kron(B, a.diag() if diagonal_inputs else a) + d.dense().diag()
    close(value, torch.logdet(M))
    for ours, theirs in zip(
        torch.autograd.grad(value, (w, values), retain_graph=True),
        torch.autograd.grad(torch.logdet(M), (w, values)),
        strict=True,
    ):
        close(ours, theirs)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("by", ["weight and bias", "rows", "columns"])
def test_an_uncoupled_last_input_keeps_every_law(by: str, seed: int) -> None:
    """A bias apart from its weight: a precision for each of the two leaves eigenvectors, other priors turn them."""
    o, i = 3, 4
    groups = {
        "weight and bias": torch.tensor([0, 0, 0, 1]).repeat(o),
        "rows": torch.tensor([0, 1, 0]).repeat_interleave(i),
        "columns": torch.tensor([0, 1, 0, 2]).repeat(o),
    }
    A = torch.stack([torch.block_diag(gram(seed + k, 2, i - 1), normal(seed + k, 1, 1).square()) for k in (0, 1)])
    B = torch.stack([gram(seed + 10 + k, 2, o) for k in (0, 1)])
    dense = torch.block_diag(*[0.7 * torch.kron(b, a) for a, b in zip(A, B, strict=True)])
    op = KroneckerPlusDiagonal(A, B, scalar(0.7), apart=True)
    lw.testing.check_operator(op, dense, shifts=("uniform", "grouped"), groups=groups[by].repeat(2), seed=seed)


def test_precisions_of_weight_and_bias_share_one_decomposition(counted: Counter[str]) -> None:
    A, B = torch.block_diag(gram(0, 5, 3), scalar(2.0))[None], gram(1, 5, 2)[None]
    op, index = KroneckerPlusDiagonal(A, B, scalar(0.7), apart=True), torch.tensor([0, 0, 0, 1]).repeat(2)
    for weight, bias in ((0.3, 2.0), (4.0, 0.1)):
        values = torch.tensor([weight, bias], dtype=torch.float64, requires_grad=True)
        moved = linalg.shift(op, Diagonal(values, 8, index))
        linalg.solve(moved, normal(3, 8))
        torch.autograd.grad(linalg.logdet(moved), values)
    assert counted == {"eigh": 2}  # of A without the bias, and of B


@pytest.mark.parametrize("verb", [linalg.logdet, lambda op: linalg.solve(op, torch.ones(6).double())])
def test_a_block_without_a_prior_says_so(verb: Any) -> None:
    op = KroneckerPlusDiagonal(gram(0, 3, 3)[None], gram(1, 2, 2)[None], scalar(1.0), name="fc1")
    with pytest.raises(Unsupported, match="fc1 has no prior yet"):
        verb(op)


@pytest.mark.parametrize(
    "verb",
    [
        linalg.logdet,
        lambda op: linalg.solve(op, torch.ones(6).double()),
        lambda op: linalg.covariance(op, torch.ones(1, 1, 6).double()),
        lambda op: linalg.draw(op, 2, torch.Generator()),
    ],
    ids=["logdet", "solve", "covariance", "draw"],
)
def test_a_prior_for_each_weight_is_refused_by_name(verb: Any) -> None:
    op = KroneckerPlusDiagonal(gram(0, 3, 3)[None], gram(1, 2, 2)[None], scalar(1.0), name="fc1")
    for d in (Diagonal(torch.arange(1.0, 7).double(), 6), Diagonal(torch.ones(2), 6, torch.tensor([0, 1, 1, 1, 0, 0]))):
        with pytest.raises(Unsupported, match=r"element-wise prior on fc1; .*structure='diag'"):
            verb(linalg.shift(op, d))


@pytest.mark.parametrize("size", [1, 3])
def test_layers_of_one_row_or_one_column(size: int) -> None:
    """Where W is a vector, a prior for each weight is a prior by rows or columns."""
    for o, i in ((1, size), (size, 1)):
        a, b = gram(0, 3, i), gram(1, 3, o)
        d = Diagonal(torch.arange(1.0, o * i + 1).double(), o * i)
        op = linalg.shift(KroneckerPlusDiagonal(a[None], b[None], scalar(1.3)), d)
        M = 1.3 * torch.kron(b, a) + d.dense().diag()
        close(linalg.logdet(op), torch.logdet(M))
        close(linalg.solve(op, normal(3, o * i)), torch.linalg.solve(M, normal(3, o * i)))


def test_a_factor_that_is_indefinite_beyond_rounding_is_an_error() -> None:
    bad = torch.diag(torch.tensor([1.0, -0.1, 2.0], dtype=torch.float64))
    for a, b in ((bad, gram(0, 3, 3)), (gram(0, 3, 3), bad)):
        op = linalg.shift(KroneckerPlusDiagonal(a[None], b[None], scalar(1.0)), Diagonal(scalar(5.0).reshape(1), 9))
        with pytest.raises(NotPositiveDefinite, match=r"-0\.1"):
            linalg.logdet(op)


def test_rounding_of_single_precision_sums_is_clipped() -> None:
    """Factors summed in float32 are indefinite by its rounding, not by float64's; so precise are their eigenvalues."""
    bad = torch.diag(torch.tensor([1.0, -1e-6, 2.0], dtype=torch.float64))
    d = Diagonal(scalar(5.0).reshape(1), 9)
    coarse = linalg.shift(
        KroneckerPlusDiagonal(bad[None], gram(0, 3, 3)[None], scalar(1.0), eps=torch.finfo(torch.float32).eps), d
    )
    expected = torch.kron(gram(0, 3, 3), bad.clamp(min=0)) + 5 * torch.eye(9, dtype=torch.float64)
    assert_close(linalg.logdet(coarse), torch.logdet(expected), rtol=1e-6, atol=0)
    with pytest.raises(NotPositiveDefinite):
        linalg.logdet(linalg.shift(KroneckerPlusDiagonal(bad[None], gram(0, 3, 3)[None], scalar(1.0)), d))


# -- lazy, and once ------------------------------------------------------------------------------------------------


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each factorization is made."""
    calls: Counter[str] = Counter()
    for name in ("eigh", "eigvalsh", "cholesky_ex"):
        original = getattr(torch.linalg, name)

        def wrapped(*args: Any, name: str = name, original: Any = original, **kwargs: Any) -> Any:
            calls[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(torch.linalg, name, wrapped)
    return calls


def fitted(prior: Any = 1.0) -> Any:
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    return lw.laplace(net, (normal(0, 9, 4), normal(1, 9, 3)), Gaussian(0.4), structure="kron", prior=prior)


def test_a_fit_factorizes_nothing(counted: Counter[str]) -> None:
    fitted()
    assert not counted


def test_the_evidence_needs_eigenvalues_alone_and_once(counted: Counter[str]) -> None:
    """Two layers of two factors each; every other scalar prior and noise comes from the same."""
    la = fitted()
    for prior, noise in ((1.0, 0.4), (0.3, 0.4), (2.0, 0.7)):
        la.log_evidence(prior=prior, likelihood=Gaussian(noise))
    assert counted == {"eigvalsh": 4}
    la.tuned(center="map")
    assert counted == {"eigvalsh": 4}


def test_predictions_need_eigenvectors_once(counted: Counter[str]) -> None:
    la = fitted()
    la.predict(normal(2, 3, 4))
    la.predict(normal(3, 3, 4), joint=True)
    la.draw(2)
    la.replace(prior=0.2).predict(normal(2, 3, 4))
    assert counted == {"eigh": 4}
    la.log_evidence()
    assert counted == {"eigh": 4}


@pytest.mark.parametrize("seed", SEEDS)
def test_shared_eigendecompositions_do_not_mix_priors(seed: int) -> None:
    """Uniform, whitened, uniform again: each as if it were alone."""
    a, b = gram(seed, 2, 3), gram(seed + 10, 4, 2)
    op, x = KroneckerPlusDiagonal(a[None], b[None], scalar(0.6)), normal(seed, 2, 3, 6)
    rows, columns = torch.tensor([0, 1]).repeat_interleave(3), torch.arange(3).repeat(2)
    values = normal(seed, 3).exp()
    for d in (
        Diagonal(values[:1], 6),
        Diagonal(values[:2], 6, rows),
        Diagonal(values, 6, columns),
        Diagonal(values[1:2], 6),
        Diagonal(values[1:], 6, rows),
    ):
        M = 0.6 * torch.kron(b, a) + d.dense().diag()
        shifted = linalg.shift(op, d)
        close(linalg.covariance(shifted, x), x @ torch.linalg.inv(M) @ x.mT)
        close(linalg.logdet(shifted), torch.logdet(M))


# -- blocks --------------------------------------------------------------------------------------------------------


def test_blocks_take_their_own_part_of_a_prior() -> None:
    """A prior that is element-wise over all may be uniform, by rows or by columns over each block."""
    a, b, h = gram(0, 4, 3), gram(1, 4, 2), gram(2, 2, 2)
    where = torch.tensor([7, 5, 3, 1, 0, 2]), torch.tensor([4, 6])
    op = Blocks((KroneckerPlusDiagonal(a[None], b[None], scalar(1.0)), Dense(h)), where)
    dense = torch.zeros(8, 8, dtype=torch.float64)
    dense[where[0].unsqueeze(-1), where[0]], dense[where[1].unsqueeze(-1), where[1]] = torch.kron(b, a), h
    values = normal(3, 5).exp()
    index = torch.empty(8, dtype=torch.long)
    index[where[1]] = torch.tensor([3, 4])
    for mine in (torch.zeros(6), torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([2, 0, 1, 2, 0, 1])):
        index[where[0]] = mine.long()
        d = Diagonal(values, 8, index.clone())
        M = dense + d.dense().diag()
        close(linalg.logdet(linalg.shift(op, d)), torch.logdet(M))
        close(linalg.solve(linalg.shift(op, d), normal(4, 3, 8)), normal(4, 3, 8) @ torch.linalg.inv(M))
    with pytest.raises(Unsupported, match="structure='diag'"):
        linalg.logdet(linalg.shift(op, Diagonal(torch.arange(1.0, 9).double(), 8)))


def test_blocks_under_a_prior_for_each_weight() -> None:
    where, d = (torch.tensor([2, 0]), torch.tensor([4, 1, 3])), Diagonal(torch.arange(1.0, 6).double(), 5)
    op, dense = Blocks((Dense(gram(0, 2, 2)), Dense(gram(1, 2, 3))), where), torch.zeros(5, 5, dtype=torch.float64)
    for index, block in zip(where, (gram(0, 2, 2), gram(1, 2, 3)), strict=True):
        dense[index.unsqueeze(-1), index] = block
    close(linalg.to_dense(linalg.shift(op, d)), dense + d.dense().diag())
    close(linalg.logdet(linalg.shift(op, d)), torch.logdet(dense + d.dense().diag()))


def test_a_jitter_in_any_block_is_reported() -> None:
    net = nn.Sequential(nn.Linear(6, 1, bias=False)).double()
    x = normal(0, 3, 6) * 1e6
    la = lw.laplace(net, (x, normal(1, 3, 1)), Gaussian(1e-3), structure="block", prior=1e-12)
    with pytest.warns(LapwingWarning, match="jitter"):
        la.draw(1)
    assert la.posterior.jitter > 0
    assert fitted().posterior.jitter == 0
