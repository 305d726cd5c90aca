"""Correlated noise in the structures that need a root of the curvature, which its weights of both signs do not have by
themselves: the dual form, low rank, matrix-free, ELLA, and the g-prior; against dense autograd."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import lapwing as lw
from helpers import close
from lapwing.curvature import Full, Kronecker, LowRank, MatrixFree
from lapwing.likelihoods import CorrelatedGaussian, Gaussian, Weighted, polarization
from lapwing.operators import linalg
from lapwing.solvers.nystrom import mixed_root, span_of

R = torch.tensor([[0.5, 0.3, -0.1], [0.3, 0.8, 0.2], [-0.1, 0.2, 0.4]], dtype=torch.float64)
P, LAMBDA, SEEDS = 31, 0.7, (0, 1, 2)
EXACT: dict[str, Any] = {
    "dual": Full("dual"),
    "lowrank": LowRank(P),
    "two passes": LowRank(P, passes=2),
    "matrix_free": MatrixFree(samples=8, tolerance=1e-12),
}


@dataclass(frozen=True)
class Problem:
    net: nn.Module
    x: Tensor
    y: Tensor
    J: Tensor  # (n, 3, p)

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        return self.x, self.y

    def G(self, noise: Tensor) -> Tensor:
        return torch.einsum("nap,ab,nbq->pq", self.J, noise.inverse(), self.J)

    def log_evidence(self, noise: Tensor, a: Tensor) -> Tensor:
        """Eq. 5 at the trained weights, for A = diag(a)."""
        theta, f = nn.utils.parameters_to_vector(self.net.parameters()).detach(), self.net(self.x).detach()
        fit = torch.distributions.MultivariateNormal(f, noise).log_prob(self.y).sum()
        return fit - 0.5 * (a * theta.square()).sum() - 0.5 * (torch.logdet(self.G(noise) + a.diag()) - a.log().sum())

    def covariance(self, noise: Tensor, a: Tensor) -> Tensor:
        return self.J @ torch.linalg.solve(self.G(noise) + a.diag(), self.J.mT)


def problem(seed: int = 0, n: int = 8) -> Problem:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, teacher = torch.randn(n, 3, dtype=torch.float64), nn.Linear(3, 3).double()
    noise = torch.randn(n, 3, dtype=torch.float64) @ torch.linalg.cholesky(R).mT
    params = {k: v.detach() for k, v in net.named_parameters()}
    jac = jacrev(lambda p: functional_call(net, p, (x,)))(params)
    J = torch.cat([jac[k].reshape(n, 3, -1) for k in params], -1)
    return Problem(net, x, (net(x) + 0.5 * teacher(x)).detach() + noise, J)


def spread(precision: float, p: int = P) -> Tensor:
    return torch.full((p,), precision, dtype=torch.float64)


# -- weights and matrices ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("c", [1, 2, 3, 5])
def test_a_symmetric_matrix_is_its_weights(c: int) -> None:
    root = torch.randn(c, c, dtype=torch.float64)
    matrix, C = root @ root.mT, polarization.columns(c)
    w = polarization.weights_of(matrix)
    assert C.shape == (c, c * (c + 1) // 2)
    close((C * w) @ C.mT, matrix)
    close(polarization.matrix_of(w), matrix)


# -- fixed noise -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("seed", SEEDS)
def test_posterior_and_evidence_are_dense(name: str, seed: int) -> None:
    p = problem(seed)
    a = torch.cat([spread(0.4, 16), spread(2.0, 15)])
    prior = lw.priors.Gaussian(torch.tensor([0.4, 2.0], dtype=torch.float64), per="layer")
    la = lw.laplace(p.net, p.data, CorrelatedGaussian(R), structure=EXACT[name], prior=prior)
    M = p.G(R) + a.diag()
    close(linalg.to_dense(la.posterior.precision), M)
    b = torch.randn(2, P, dtype=torch.float64)
    close(linalg.solve(la.posterior.precision, b), b @ M.inverse())
    if name != "matrix_free":
        close(la.log_evidence(), p.log_evidence(R, a))
        close(la.predict(p.x).covariance, p.covariance(R, a))
        gamma = torch.linalg.solve(M, p.G(R)).diagonal()
        close(la.effective_dimension(), torch.stack([gamma[:16].sum(), gamma[16:].sum()]))


@pytest.mark.parametrize("seed", SEEDS)
def test_matrix_free_estimates_cover_the_truth(seed: int) -> None:
    """γ and log Z within 5 of their standard errors; variances of f, whose relative error is √(2/S), too."""
    p = problem(seed)
    la = lw.laplace(p.net, p.data, CorrelatedGaussian(R), structure=MatrixFree(samples=256), prior=LAMBDA)
    found = la.decompose().estimate
    assert found is not None
    assert abs(found.value - float(p.log_evidence(R, spread(LAMBDA)))) < 5 * found.standard_error + 1e-9
    gamma = torch.linalg.solve(p.G(R) + spread(LAMBDA).diag(), p.G(R)).trace()
    assert abs(la.solve.dimension.value - float(gamma)) < 5 * la.solve.dimension.standard_error
    exact = p.covariance(R, spread(LAMBDA)).diagonal(dim1=1, dim2=2)
    assert float((la.predict(p.x).f_var / exact - 1).abs().max()) < 5 * math.sqrt(2 / 256)


def test_the_noise_of_samples_has_the_curvature_as_covariance() -> None:
    """Σ_ab L_ab Σ_n J_naᵀ e_nb, at a covariance that was not known in the fit, of rows that weigh differently."""
    p, draws = problem(), 20_000
    w = torch.rand(len(p.x), dtype=torch.float64) + 0.1
    weighted = Weighted(CorrelatedGaussian(torch.eye(3)))
    la = lw.laplace(p.net, (p.x, weighted.pack(p.y, w)), weighted, structure="matrix_free")
    op = la.replace(likelihood=weighted.replace(covariance=R)).posterior.precision
    found = op.pulled(op.root.noise(torch.arange(draws), 0))
    exact = torch.einsum("nap,n,ab,nbq->pq", p.J, w, R.inverse(), p.J)
    error = ((exact.square() + torch.outer(exact.diagonal(), exact.diagonal())) / draws).sqrt()
    assert float(((found.mT @ found / draws - exact) / error).abs().max()) < 5


@pytest.mark.parametrize("name", EXACT)
def test_rows_that_weigh_differently(name: str) -> None:
    p = problem()
    w, weighted = torch.rand(len(p.x), dtype=torch.float64) + 0.1, Weighted(CorrelatedGaussian(R))
    la = lw.laplace(p.net, (p.x, weighted.pack(p.y, w)), weighted, structure=EXACT[name], prior=LAMBDA)
    exact = torch.einsum("nap,n,ab,nbq->pq", p.J, w, R.inverse(), p.J) + spread(LAMBDA).diag()
    close(linalg.to_dense(la.posterior.precision), exact)


@pytest.mark.parametrize("name", EXACT)
def test_outputs_with_positions(name: str) -> None:
    """(n, q, c): every position has its own noise."""
    p, q = problem(n=10), 5
    data = p.x.reshape(2, q, 3), p.y.reshape(2, q, 3)
    la = lw.laplace(p.net, data, CorrelatedGaussian(R), structure=EXACT[name], prior=LAMBDA)
    close(linalg.to_dense(la.posterior.precision), p.G(R) + spread(LAMBDA).diag())


def test_full_takes_the_smaller_side() -> None:
    p = problem()
    assert str(lw.laplace(p.net, p.data, CorrelatedGaussian(R)).state.structure) == "full (dual)"
    state = lw.laplace(p.net, p.data, CorrelatedGaussian(R), structure="full").state
    assert [u.shape for _, u in state.batches] == [(8, 3, 3)]  # no rows of pairs


@pytest.mark.parametrize("name", EXACT)
def test_shards_add_and_can_be_taken_out(name: str) -> None:
    p, likelihood = problem(), CorrelatedGaussian(R)
    whole = lw.laplace(p.net, p.data, likelihood, structure=EXACT[name], prior=LAMBDA)
    few = lw.laplace(p.net, (p.x[:5], p.y[:5]), likelihood, structure=EXACT[name], prior=LAMBDA)
    rest = p.x[5:], p.y[5:]
    if name == "two passes":  # of one basis only
        later = lw.accumulate(EXACT[name], whole.tangent, likelihood, rest, basis=few.state)
    else:
        later = lw.laplace(p.net, rest, likelihood, structure=EXACT[name]).state
    prior = whole.prior.operator()
    both = linalg.shift(lw.posterior.curvature(few.state + later, likelihood), prior)
    close(linalg.to_dense(both), p.G(R) + spread(LAMBDA).diag())
    if name != "matrix_free":
        part = torch.einsum("nap,ab,nbq->pq", p.J[:5], R.inverse(), p.J[:5])
        left = whole.without(rest)
        close(linalg.to_dense(left.posterior.precision), part + spread(LAMBDA).diag(), 1e-7)


def test_one_range_serves_every_weight() -> None:
    """Rows that are dependent have many orthonormal bases, and the members of a batch of them need not get the same."""
    p, likelihood = problem(), CorrelatedGaussian(R)
    for n in (1, 2, 5):
        state = lw.accumulate(LowRank(P, passes=2), lw.linearize(p.net), likelihood, (p.x[:n], p.y[:n]))
        tests = state.basis["tests"]
        assert torch.equal(tests, tests[:1].expand_as(tests))


@pytest.mark.parametrize("name", EXACT)
def test_a_file_gives_it_back(name: str, tmp_path: Any) -> None:
    p = problem()
    la = lw.laplace(p.net, p.data, CorrelatedGaussian(R), structure=EXACT[name], prior=LAMBDA)
    la.save(tmp_path / "la.safetensors")
    back = lw.load(tmp_path / "la.safetensors", p.net)
    assert back.state.paired
    assert torch.equal(back.predict(p.x).covariance, la.predict(p.x).covariance)


# -- a rank that is less than full ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_low_rank_is_the_nystroem_approximation_at_every_noise(seed: int) -> None:
    """One pass, at the identity; then at R the Ĝ that a sketch of G(R) itself gives: Ω Ĝ = Ω G and rank Ĝ ≤ k."""
    p, k = problem(seed), 6
    la = lw.laplace(p.net, p.data, CorrelatedGaussian(torch.eye(3)), structure=LowRank(k), prior=LAMBDA)
    at = la.replace(likelihood=CorrelatedGaussian(R))
    found = linalg.to_dense(at.posterior.precision) - spread(LAMBDA).diag()
    values = torch.linalg.eigvalsh(found)
    assert float(values[: P - k].abs().max()) < 1e-9 * float(values[-1])
    assert float(torch.linalg.eigvalsh(p.G(R) - found)[0]) > -1e-9 * float(values[-1])
    tests = la.state.structure.tests(la.state)[0]
    close(tests @ found, tests @ p.G(R))
    share = float(found.trace() / p.G(R).trace())
    assert f"{100 * share:.1f} % of the curvature" in repr(at)
    assert "upper" in at.decompose().bound


def test_more_passes_come_nearer_to_the_top_eigenpairs() -> None:
    p, k = problem(), 6
    left = []
    for passes in (1, 2, 4):
        la = lw.laplace(p.net, p.data, CorrelatedGaussian(R), structure=LowRank(k, passes=passes), prior=LAMBDA)
        left.append(float((p.G(R) + spread(LAMBDA).diag() - linalg.to_dense(la.posterior.precision)).trace()))
    best = float(torch.linalg.eigvalsh(p.G(R))[:-k].sum())
    assert left[0] > left[1] > left[2] > best
    assert left[2] < 1.1 * best


@pytest.mark.parametrize("mixture", [torch.tensor([1.0, -2.0]), torch.tensor([0.5, 0.0])])
def test_a_sketch_of_a_sum_with_weights_must_be_of_a_semidefinite_matrix(mixture: Tensor) -> None:
    roots = torch.randn(2, 7, 7, dtype=torch.float64)
    parts, tests = roots @ roots.mT, torch.randn(3, 7, dtype=torch.float64)
    span = span_of(tests @ parts, tests)
    w = mixture.double()
    if float(w.min()) < 0:
        with pytest.raises(lw.errors.NotPositiveDefinite, match="positive semidefinite"):
            mixed_root(span, w)
        return
    L, whole = mixed_root(span, w), torch.einsum("h,hpq->pq", w, parts)
    close(span.V.mT @ L @ L.mT @ span.V, whole @ tests.mT @ torch.linalg.inv(tests @ whole @ tests.mT) @ tests @ whole)
    assert not mixed_root(span, 0 * w).any()


# -- noise that is learnt ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", [Full("dual"), LowRank(P), LowRank(5), "diag"])
def test_the_evidence_has_the_slope_of_differences_in_the_covariance(structure: Any) -> None:
    p, step = problem(), 1e-4
    start = CorrelatedGaussian(R)
    la = lw.laplace(p.net, p.data, start, structure=structure, prior=LAMBDA)
    X = start.coordinates()["covariance"].requires_grad_()
    (slope,) = torch.autograd.grad(la.log_evidence(likelihood=start.moved({"covariance": X})), X)
    for a, b in ((0, 0), (0, 2), (1, 2)):
        unit = torch.zeros(3, 3, dtype=torch.float64)
        unit[a, b] = step
        up, down = (la.log_evidence(likelihood=start.moved({"covariance": X.detach() + s * unit})) for s in (1.0, -1.0))
        close(slope[a, b], (up - down) / (2 * step), 1e-6)


@pytest.mark.parametrize("method", ["mackay", "evidence"])
@pytest.mark.parametrize("center", ["map", "tangent"])
def test_the_same_covariance_is_learnt_in_every_exact_form(method: str, center: str) -> None:
    """Primal, dual and a sketch of full rank; and where the evidence has no slope, N R = Σ rrᵀ + Σ J Σ Jᵀ."""
    p = problem(n=20)
    found = [
        lw.laplace(p.net, p.data, CorrelatedGaussian(torch.eye(3)), structure=structure).tuned(method, center=center)
        for structure in (Full("primal"), Full("dual"), LowRank(P))
    ]
    for la in found[1:]:
        close(la.log_evidence(), found[0].log_evidence(), 1e-5)
        close(la.likelihood.covariance, found[0].likelihood.covariance, 1e-3)
    noise, a = found[1].likelihood.covariance, spread(float(found[1].prior.precision))
    f = p.net(p.x).detach()
    if center == "tangent":
        theta = nn.utils.parameters_to_vector(p.net.parameters()).detach()
        f = f + p.J @ (found[1].tangent_map.vector - theta)
    r = p.y - f
    close(noise, (r.mT @ r + p.covariance(noise, a).sum(0)) / len(r), 2e-3)


@pytest.mark.parametrize("center", ["map", "tangent"])
def test_matrix_free_learns_it_by_em(center: str) -> None:
    """The covariance is the fixed point of its own samples, and that of exact traces within their error."""
    p = problem(n=40)
    structure = MatrixFree(samples=256, tolerance=1e-6)
    la = lw.laplace(p.net, p.data, CorrelatedGaussian(torch.eye(3)), structure=structure).tuned(center=center)
    assert la.tuning is not None
    assert la.tuning.converged
    noise, z = la.likelihood.covariance, la.posterior.precision.samples.z
    f, theta = p.net(p.x).detach(), nn.utils.parameters_to_vector(p.net.parameters()).detach()
    r = p.y - (f + p.J @ (la.tangent_map.vector - theta) if center == "tangent" else f)
    moved = torch.einsum("nap,kp->kna", p.J, z)
    close(noise, (r.mT @ r + torch.einsum("kna,knb->ab", moved, moved) / len(z)) / len(r), 5e-3)
    full = lw.laplace(p.net, p.data, CorrelatedGaussian(torch.eye(3)), structure="full").tuned(center=center)
    error = float((moved.square().sum((1, 2)) / len(r)).std() / len(z) ** 0.5)
    assert float((noise - full.likelihood.covariance).abs().max()) < 5 * error + 5e-3


# -- the g-prior ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", [Full("primal"), *EXACT.values()])
def test_the_g_prior_is_of_the_curvature_at_unit_noise(structure: Any) -> None:
    p = problem(1)
    prior = lw.priors.GPrior(0.3)
    la = lw.laplace(p.net, p.data, CorrelatedGaussian(R), structure=structure, prior=prior)
    a = 0.3 * p.J.square().sum((0, 1))
    close(linalg.to_dense(la.posterior.precision), p.G(R) + a.diag())
    if not isinstance(structure, MatrixFree):
        close(la.log_evidence(), p.log_evidence(R, a))
        close(la.predict(p.x).covariance, p.covariance(R, a))


@pytest.mark.parametrize("structure", ["kron", "block", "diag"])
def test_its_second_moments_are_those_of_noise_one(structure: str) -> None:
    p = problem(1)
    mine, plain = (
        lw.laplace(p.net, p.data, one, structure=structure, prior="gprior")
        for one in (CorrelatedGaussian(R), Gaussian(torch.ones(3)))
    )
    close(mine.prior.unit, plain.prior.unit)
    same = lw.laplace(p.net, p.data, CorrelatedGaussian(torch.eye(3)), structure=structure, prior="gprior")
    close(same.log_evidence(), plain.log_evidence())
    tuned = mine.tuned()
    assert float(tuned.log_evidence()) > float(mine.recentered().log_evidence())


# -- the rest of the house -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXACT)
def test_a_diagonal_covariance_is_noise_per_output(name: str) -> None:
    p, sigma = problem(), torch.tensor([0.5, 1.2, 0.8], dtype=torch.float64)
    a, b = (
        lw.laplace(p.net, p.data, one, structure=EXACT[name], prior=LAMBDA)
        for one in (CorrelatedGaussian(torch.diag(sigma**2)), Gaussian(sigma))
    )
    close(linalg.to_dense(a.posterior.precision), linalg.to_dense(b.posterior.precision))


@pytest.mark.parametrize("preconditioner", ["none", "diag", "kron", "nystrom"])
def test_every_preconditioner_takes_it(preconditioner: str) -> None:
    p = problem()
    structure = MatrixFree(samples=4, preconditioner=preconditioner, tolerance=1e-12)
    la = lw.laplace(p.net, p.data, CorrelatedGaussian(R), structure=structure, prior=LAMBDA)
    b = torch.randn(2, P, dtype=torch.float64)
    close(linalg.solve(la.posterior.precision, b), b @ (p.G(R) + spread(LAMBDA).diag()).inverse())


def test_ella_with_all_rows_is_exact() -> None:
    p = problem()
    found = lw.gp.ella(p.net, p.data, CorrelatedGaussian(R), anchors=10_000, rank=10_000, prior=LAMBDA)
    close(found.predict(p.x).covariance, p.covariance(R, spread(LAMBDA)), 1e-7)


def test_the_check_up_knows_it() -> None:
    p = problem(n=80)
    assert "full" in str(lw.doctor(p.net, p.data, CorrelatedGaussian(R)))


def test_a_certificate_of_the_exact_form_is_clean() -> None:
    p = problem()
    la = lw.laplace(p.net, p.data, CorrelatedGaussian(R), structure=Full("dual"), prior=LAMBDA)
    found = la.certify(16)
    assert abs(float(found.trace.value) - 1) < 1e-6


# -- gradients that are all rounding -------------------------------------------------------------------------------


class Keys(nn.Module):
    """Attention with keys of their own, whose gradient, summed over positions, is zero but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, kdim=3, vdim=3, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x[..., :3], x[..., :3], need_weights=False)[0].mean(1))


class Sign(nn.Module):
    """A layer whose one output is normalized to ±1, so that no output depends on it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 1), nn.Linear(1, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(nn.functional.normalize(self.a(x[:, 0]), dim=-1)) + self.c(x[:, 0])


ROUNDED = {"reduce": Kronecker(sharing="reduce"), "kron": "kron", "ekfac": "ekfac", "diag": "diag"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("structure", ROUNDED)
@pytest.mark.parametrize("make", [Keys, Sign])
def test_a_curvature_that_is_all_rounding_is_none(make: Any, structure: str, dtype: torch.dtype) -> None:
    """At any noise, also one that is nearly singular; tuned to a single precision, and to one a layer."""
    near = torch.ones(3, 3, dtype=torch.float64) + 1e-4 * torch.eye(3, dtype=torch.float64)
    for seed, n in ((0, 1), (2, 2), (3, 20)):
        torch.manual_seed(seed)
        net, x, y = make().to(dtype), torch.randn(n, 3, 4, dtype=dtype), torch.randn(n, 3, dtype=dtype)
        for noise in (R, near):
            for prior in (1e-3, "layerwise"):
                la = lw.laplace(net, (x, y), CorrelatedGaussian(noise), structure=ROUNDED[structure], prior=prior)
                assert torch.isfinite(la.log_evidence())
                assert float(linalg.diagonal(la.posterior.precision).min()) > 0
                assert torch.isfinite(la.predict(x).covariance).all()


@pytest.mark.parametrize("off", [1e-3, 1e-9])
def test_a_curvature_that_is_indefinite_beyond_rounding_is_refused(off: float) -> None:
    p = problem()
    la = lw.laplace(p.net, p.data, CorrelatedGaussian(R), structure="kron", prior=LAMBDA)
    key = next(k for k in la.state.sums if k.endswith("/B"))
    size = float(la.state.sums[key].abs().max())
    one = torch.einsum("h,hboq->boq", CorrelatedGaussian(R).curvature_weights("exact"), la.state.sums[key])
    values, vectors = torch.linalg.eigh(one[0])
    weights, wrong = CorrelatedGaussian(R).curvature_weights("exact"), la.state.sums[key].clone()
    wrong[0] -= (values[0] + off * size) * torch.outer(vectors[:, 0], vectors[:, 0]) / weights[0]
    state = replace(la.state, sums=la.state.sums | {key: wrong}, memo=lw.curvature.Memo())
    with pytest.raises(lw.errors.NotPositiveDefinite, match="indefinite"):
        linalg.logdet(linalg.shift(lw.posterior.curvature(state, CorrelatedGaussian(R)), la.prior.operator()))
