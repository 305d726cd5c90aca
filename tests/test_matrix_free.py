"""Matrix-free inference against the full curvature and dense autograd: products, samples, evidence, tuning, files."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw
from lapwing.curvature import MatrixFree
from lapwing.distributed import ALONE
from lapwing.errors import InvalidValue, NotConverged, NotPositiveDefinite, Unsupported
from lapwing.operators import Diagonal, SolvePlan, Streamed, linalg
from lapwing.operators.streamed import Remembered
from lapwing.solvers import Estimate, Lanczos
from lapwing.solvers.estimate import variance_of
from lapwing.solvers.noise import Placed, generator_of
from lapwing.solvers.sgd import sgd

TIGHT = 1e-12
SAMPLES = {"regression": 600, "classes": 48, "tags": 300}  # convolutions run vectors a few at a time


def double(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def regression(seed: int = 0) -> tuple[nn.Module, Tensor, Tensor, str]:
    """p = 39, unequal widths; weights and targets by the seed."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    return net, double(17, 5, seed=seed + 1), double(17, 3, seed=seed + 2), "gaussian"


def classes(seed: int = 0) -> tuple[nn.Module, Tensor, Tensor, str]:
    """A convolution with running statistics, p = 41, and 3 classes."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(4, 3)).double().eval()
    x = double(21, 1, 4, 3, seed=seed + 1)
    return net, x, torch.randint(3, (21,), generator=torch.Generator().manual_seed(seed + 2)), "categorical"


class Tagger(nn.Module):
    """Integers (n, 4) -> two logits at each of 4 positions; p = 41."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(5, 5), nn.LayerNorm(5), nn.Linear(5, 1, bias=False)
        self.scale = nn.Parameter(torch.tensor([1.3]))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.embedding(x) + self.embedding(x).mean(1, keepdim=True)).sin()
        return torch.cat([self.head(h), self.scale * h[..., :1]], -1)


def tags(seed: int = 0) -> tuple[nn.Module, Tensor, Tensor, str]:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    x, y = (torch.randint(high, (9, 4), generator=generator) for high in (5, 2))
    return Tagger().double(), x, y, "categorical"


class Attention(nn.Module):
    """(n, 5, 3) -> two logits by one head over 5 positions; p = 44."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.head = (nn.Linear(3, o) for o in (3, 3, 3, 2))

    def forward(self, x: Tensor) -> Tensor:
        weights = (self.query(x) @ self.key(x).mT).softmax(-1)
        return self.head((weights @ self.value(x)).tanh().mean(1))


def attention(seed: int = 0) -> tuple[nn.Module, Tensor, Tensor, str]:
    torch.manual_seed(seed)
    y = torch.randint(2, (30,), generator=torch.Generator().manual_seed(seed + 2))
    return Attention().double(), 2 * double(30, 5, 3, seed=seed + 1), y, "categorical"


PROBLEMS: dict[str, Callable[..., tuple[nn.Module, Tensor, Tensor, str]]] = {
    "regression": regression,
    "classes": classes,
    "tags": tags,
}


def fits(name: str, seed: int = 0, prior: Any = 0.7, **settings: Any) -> tuple[lw.Laplace, lw.Laplace]:
    """A problem's full and matrix-free fits."""
    net, x, y, likelihood = PROBLEMS[name](seed)
    full = lw.laplace(net, (x, y), likelihood, structure=lw.curvature.Full("primal"), prior=prior, factor="exact")
    return full, lw.laplace(net, (x, y), likelihood, structure=MatrixFree(**settings), prior=prior)


Oracle = Callable[..., Tensor]


def dense(jacobian: Oracle, net: nn.Module, x: Tensor, likelihood: str) -> Tensor:
    """Σ Jᵀ Λ J at unit noise, by rows of autograd and Λ written down, without the package."""
    J = jacobian(net, lambda twin: twin(x))
    f = copy.deepcopy(net).eval()(x).detach()
    J = J.reshape(-1, f.shape[-1], J.shape[-1])
    if likelihood == "gaussian":
        return torch.einsum("map,maq->pq", J, J)
    p = f.reshape(-1, f.shape[-1]).softmax(-1)
    return torch.einsum("map,mab,mbq->pq", J, torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2), J)


def precision_of(la: lw.Laplace) -> Streamed:
    return la.posterior.precision


def based(seed: int, k: int, n: int, c: int) -> Tensor:
    """The standard normal numbers of k samples at n examples with c outputs."""
    return Placed(seed, torch.arange(k), torch.arange(n)).normal(torch.empty(k, n, c, dtype=torch.float64))


class MatrixRoot:
    """R by a matrix in memory: an operator's root that owes nothing to a network."""

    def __init__(self, R: Tensor, sign: float = 1.0) -> None:
        self.R, self.sign, self.passes, self.batches = R, sign, 0, 4
        self.size, self.ranks = R.shape[1], ALONE

    def product(self, v: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        self.passes += 1
        image = v @ self.R.mT
        return self.sign * weights[0] * image @ self.R, image.square().sum(-1, keepdim=True)

    def minibatches(self, weights: Tensor) -> Iterator[Callable[[Tensor], Tensor]]:
        while True:
            for part in self.R.tensor_split(self.batches):
                yield lambda v, part=part: weights[0] * (len(self.R) / len(part)) * (v @ part.mT) @ part

    def noise(self, columns: Tensor, seed: int) -> Tensor:
        return (based(seed, len(columns), 1, len(self.R))[:, 0] @ self.R).unsqueeze(0)

    def amplitudes(self, weights: Tensor) -> Tensor:
        return weights.sqrt()

    def diagonal(self) -> Tensor:
        return self.R.square().sum(0, keepdim=True)


def held(R: Tensor, a: Tensor, near: Tensor | None = None, sign: float = 1.0, **plan: Any) -> Streamed:
    """RᵀR + diag(a), streamed, with a preconditioner of diag(near)."""
    settings = {"samples": 32, "solver": "cg", "preconditioner": "diag", "tolerance": 1e-6, "max_steps": 200, "seed": 0}
    near = torch.zeros_like(a) if near is None else near
    made = SolvePlan(**{**settings, "memory_budget": 2**30, **plan})
    one = torch.ones(1, dtype=torch.float64)
    return Streamed(MatrixRoot(R, sign), one, Diagonal(near, len(a)), made, Diagonal(a, len(a)))


# -- products ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preconditioner", ["kron", "diag", "nystrom", "none"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_products_are_those_of_the_dense_curvature(name: str, preconditioner: str, jacobian: Oracle) -> None:
    net, x, y, likelihood = PROBLEMS[name](3)
    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    structure = MatrixFree(preconditioner=preconditioner, tolerance=TIGHT)
    la = lw.laplace(net, loader, likelihood, structure=structure, prior=0.7)
    G = dense(jacobian, net, x, likelihood)
    op, M = precision_of(la), G + 0.7 * torch.eye(len(G), dtype=torch.float64)
    torch.testing.assert_close(linalg.to_dense(op), M, atol=1e-9, rtol=1e-9)
    one = double(len(G), seed=1)  # a single vector has a route of its own
    torch.testing.assert_close(linalg.mv(op, one), M @ one, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(linalg.diagonal(op), M.diagonal(), atol=1e-9, rtol=1e-9)
    b = double(1, 3, len(G), seed=2)
    torch.testing.assert_close(linalg.covariance(op, b), b @ M.inverse() @ b.mT, atol=1e-7, rtol=1e-7)
    twice = linalg.shift(linalg.scale(op, torch.tensor(2.5, dtype=torch.float64)), la.prior.operator())
    expected = 2.5 * M + 0.7 * torch.eye(len(G), dtype=torch.float64)
    torch.testing.assert_close(linalg.to_dense(twice), expected, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(linalg.solve(twice, b[0, :1]), b[0, :1] @ expected.inverse(), atol=1e-8, rtol=1e-8)


def test_noise_per_output_keeps_outputs_apart(jacobian: Oracle) -> None:
    net, x, y, _ = regression(5)
    noise = torch.tensor([0.5, 1.5, 2.0], dtype=torch.float64)
    likelihood = lw.likelihoods.Gaussian(noise)
    la = lw.laplace(net, (x, y), likelihood, structure=MatrixFree(samples=300, tolerance=1e-9), prior=0.7)
    J = jacobian(net, lambda twin: twin(x))
    M = torch.einsum("nap,a,naq->pq", J, noise**-2, J) + 0.7 * torch.eye(J.shape[-1], dtype=torch.float64)
    torch.testing.assert_close(linalg.to_dense(precision_of(la)), M, atol=1e-9, rtol=1e-9)
    parts = torch.einsum("nap,pq,naq,a->a", J, M.inverse(), J, noise**-2)
    found = noise**-2 * precision_of(la).samples.squares  # (k, outputs)
    away = (found.mean(0) - parts) / (found.std(0) / len(found) ** 0.5)
    assert float(away.abs().max()) < 5
    full = lw.laplace(net, (x, y), likelihood, structure="full", prior=0.7)
    exact = full.effective_dimension()
    torch.testing.assert_close(parts.sum().reshape(1), exact, atol=1e-8, rtol=1e-8)


def test_curvature_of_softmax_needs_no_matrix() -> None:
    from lapwing.curvature import products

    f, v, y = double(4, 6, seed=0), double(3, 4, 6, seed=1), torch.zeros(4).long()
    likelihood = lw.likelihoods.Categorical()
    root = likelihood.hessian_root(f)
    expected = torch.einsum("mcq,mdq,kmd->kmc", root, root, v)
    torch.testing.assert_close(products.output_curvature(likelihood, f, y, v), expected, atol=1e-12, rtol=1e-12)
    draws = likelihood.curvature_noise(f[:1], y[:1], 100_000, torch.Generator().manual_seed(0))[:, 0]
    gap = draws.mT @ draws / len(draws) - root[0] @ root[0].mT
    assert float(gap.abs().max()) < 5 * 0.25 * (2 / len(draws)) ** 0.5


# -- samples (identity 12) ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])
def test_both_objectives_of_sample_then_optimize_have_the_sample_as_minimizer(seed: int, jacobian: Oracle) -> None:
    net, x, y, _ = regression(seed)
    sigma, a = 0.6, 1.3
    likelihood = lw.likelihoods.Gaussian(sigma)
    la = lw.laplace(net, (x, y), likelihood, structure=MatrixFree(samples=5, tolerance=1e-14, seed=seed), prior=a)
    J = jacobian(net, lambda twin: twin(x)).reshape(-1, 39)
    e = based(seed, 5, 17, 3).reshape(5, -1)
    e0 = torch.stack([torch.randn(39, generator=generator_of(seed + 1, j), dtype=torch.float64) for j in range(5)])
    top = torch.cat([J / sigma, a**0.5 * torch.eye(39, dtype=torch.float64)])
    noisy = torch.cat([e, e0], 1)  # ½Σ‖Jz − ε‖²_Λ + ½‖z − θ₀‖²_A, with Λε = S e
    moved = torch.cat([0 * e, a**0.5 * (e0 / a**0.5 + e @ (J / sigma) / a)], 1)  # ½Σ‖Jz‖²_Λ + ½‖z − θᴺ‖²_A
    first, second = (torch.linalg.lstsq(top, right.mT).solution.mT for right in (noisy, moved))
    torch.testing.assert_close(first, second, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(la.solve.z, first, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("name", PROBLEMS)
def test_samples_have_the_posterior_covariance_and_dimension(name: str) -> None:
    full, la = fits(name, 1, samples=SAMPLES[name], tolerance=1e-5)
    z, S = la.solve.z, linalg.to_dense(full.posterior.precision).inverse()
    spread = (S.diagonal().outer(S.diagonal()) + S.square()).sqrt() / len(z) ** 0.5  # of an entry of zᵀz/k
    assert float(((z.mT @ z / len(z) - S) / spread).abs().max()) < 5
    dimension, exact = la.solve.dimension, float(full.effective_dimension().sum())
    assert abs(dimension.value - exact) < 5 * dimension.standard_error
    torch.testing.assert_close(float(la.effective_dimension().sum()), dimension.value)
    # γ by the other form, P − λ‖z‖², of the same draws
    other = z.shape[1] - 0.7 * z.square().sum(1)
    assert abs(float(other.mean()) - exact) < 5 * float(other.std()) / len(z) ** 0.5


def test_the_prior_draw_does_not_pass_for_a_sample_where_data_say_little() -> None:
    """Many weights, few data of little curvature: against ‖b‖, nearly all prior noise, no residual would show."""
    R, a = 0.05 * double(3, 2000, seed=0), torch.ones(2000, dtype=torch.float64)
    op = held(R, a, tolerance=1e-3, samples=64)
    inner = torch.eye(3, dtype=torch.float64) + R @ R.mT
    exact = (R @ R.mT @ inner.inverse()).diagonal()  # diag R M⁻¹ Rᵀ
    found = (op.spread @ R.mT).square().mean(0)
    assert op.samples.steps > 0
    assert float(((found - exact) / (exact * (2 / 64) ** 0.5)).abs().max()) < 5
    assert float((R @ R.mT).diagonal().min()) > 3 * float(exact.max())  # what the prior draw alone would give


def test_groups_of_the_prior_share_the_samples() -> None:
    net, x, y, likelihood = regression(2)
    structure = MatrixFree(samples=8, tolerance=TIGHT, preconditioner="kron")
    one = lw.laplace(net, (x, y), likelihood, structure=structure, prior=0.7)
    layers = one.replace(prior={"0.*": 0.7, "2.*": 0.7})
    torch.testing.assert_close(layers.solve.z, one.solve.z, atol=1e-9, rtol=1e-9)
    each = one.replace(prior=torch.full((39,), 0.7, dtype=torch.float64))
    torch.testing.assert_close(each.solve.z, one.solve.z, atol=1e-9, rtol=1e-9)
    assert each.solve.preconditioner == "diagonal of kron"  # which cannot absorb one precision a weight
    total = one.effective_dimension().sum()
    for grouped in (layers, each):
        torch.testing.assert_close(grouped.effective_dimension().sum(), total, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("name", ["regression", "classes"])
def test_the_same_noise_gives_the_same_sample_when_the_precision_is_set_back(name: str) -> None:
    _, la = fits(name, 4, samples=6, tolerance=TIGHT)
    first = la.solve
    moved = la.replace(prior=40.0).solve
    assert float((moved.z - first.z).abs().max()) > 0.1
    back = la.replace(prior=0.7).solve
    torch.testing.assert_close(back.z, first.z, atol=1e-9, rtol=1e-9)
    near = la.replace(prior=0.7 * 1.001).solve
    assert near.steps < first.steps  # it starts from the last


def test_another_seed_gives_other_samples_and_the_generator_gives_the_seed() -> None:
    net, x, y, likelihood = regression(0)
    made = [
        lw.laplace(net, (x, y), likelihood, structure=MatrixFree(samples=4, seed=seed), generator=g).solve.z
        for seed, g in [(-1, None), (-1, torch.Generator().manual_seed(9)), (5, None)]
    ]
    again = lw.laplace(net, (x, y), likelihood, structure=MatrixFree(samples=4)).solve.z
    assert torch.equal(made[0], again)
    assert not torch.allclose(made[0], made[1])
    assert not torch.allclose(made[0], made[2])


def test_draws_are_the_kept_samples_or_fresh_ones() -> None:
    _, la = fits("regression", samples=6, tolerance=1e-10)
    theta = la.tangent.theta
    flat = la.tangent.layout.flatten(la.draw(4), batch_dims=1)
    torch.testing.assert_close(flat - theta, la.solve.z[:4])
    fresh = la.posterior.draw(6, torch.Generator().manual_seed(3)) - theta
    assert not torch.allclose(fresh, la.solve.z)


# -- the stochastic route ----------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("name", ["regression", "classes"])
def test_minibatches_lead_to_the_samples_of_cg(name: str) -> None:
    net, x, y, likelihood = PROBLEMS[name](1)
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    exact, rough = (
        lw.laplace(net, loader, likelihood, structure=MatrixFree(4, solver, tolerance=tolerance, seed=3), prior=2.0)
        for solver, tolerance in [("cg", 1e-10), ("sgd", 0.1)]
    )
    residual = rough.solve.residual
    assert residual <= 0.1
    M = linalg.to_dense(precision_of(exact)) / 2.0  # in the unit of the prior, where the residual is measured
    b = exact.solve.z * 2.0**0.5 @ M
    missed = b - rough.solve.z * 2.0**0.5 @ M
    assert float((missed.norm(dim=1) / b.norm(dim=1)).max()) <= 0.1001
    assert "sgd" in repr(rough.solve)


def test_minibatches_solve_before_any_pass_was_made() -> None:
    full, rough = fits("regression", prior=10.0, solver="sgd", preconditioner="none", tolerance=1e-2)
    b = double(2, full.state.layout.size, seed=3)
    found, expected = linalg.solve(precision_of(rough), b), linalg.solve(full.posterior.precision, b)
    assert float((found - expected).norm() / expected.norm()) < 0.05


def test_sgd_minimizes_its_quadratic() -> None:
    R = double(40, 7, seed=0)
    K = R.mT @ R + torch.eye(7, dtype=torch.float64)
    root = MatrixRoot(R)
    batches = ((lambda v, mv=mv: mv(v) + v) for mv in root.minibatches(torch.ones(1, dtype=torch.float64)))
    b = double(3, 7, seed=1)
    found = sgd(lambda v: v @ K, batches, b, 64, tolerance=1e-3)
    assert found.converged
    assert float((found.x @ K - b).norm(dim=1).max()) <= 1e-3 * float(b.norm(dim=1).max())
    stopped = sgd(lambda v: v @ K, batches, b, 4, tolerance=1e-9, rounds=1)
    assert not stopped.converged
    with pytest.raises(InvalidValue, match="rounds"):
        sgd(lambda v: v @ K, batches, b, 4, rounds=0)


# -- predictions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROBLEMS)
def test_predictive_variances_agree_with_full_within_their_bars(name: str) -> None:
    full, la = fits(name, 2, samples=SAMPLES[name], tolerance=1e-5)
    x = PROBLEMS[name](2)[1][:5]
    mine, exact = la.predict(x), full.predict(x)
    torch.testing.assert_close(mine.f_mean, exact.f_mean)
    assert mine.outputs.samples == SAMPLES[name]
    away = (mine.f_var - exact.f_var) / mine.f_var_standard_error
    assert float(away.abs().max()) < 5
    assert not exact.f_var_standard_error.any()
    (low, high), same = mine.f_var_interval, exact.f_var_interval
    assert bool(((low < mine.f_var) & (mine.f_var < high)).all())
    assert all(torch.equal(end, exact.f_var) for end in same)
    if name != "tags":
        joint = la.predict(x, joint=True)
        torch.testing.assert_close(joint.marginal, mine.covariance)
        gap = joint.covariance - full.predict(x, joint=True).covariance
        scale = mine.f_var.max() * (2 / SAMPLES[name]) ** 0.5
        assert float(gap.abs().max() / scale) < 5


def test_classes_are_predicted_by_draws_of_the_fitted_gaussian() -> None:
    full, la = fits("tags", 2, samples=600, tolerance=1e-4)
    x = tags(2)[1][:6]
    mine, exact = (one.predict(x, link="monte_carlo").probs for one in (la, full))
    torch.testing.assert_close(mine, exact, atol=0.05, rtol=0)


def test_the_tangent_mean_is_one_more_push() -> None:
    full, la = fits("regression", 3, samples=8)
    x = regression(3)[1][:4]
    moved, exact = (one.recentered().predict(x, mean="tangent") for one in (la, full))
    torch.testing.assert_close(moved.f_mean, exact.f_mean, atol=1e-7, rtol=1e-7)
    torch.testing.assert_close(moved.f_var, la.predict(x).f_var)


def test_so_many_outputs_are_predicted_by_the_samples() -> None:
    torch.manual_seed(0)
    net = nn.Linear(3, 600).double()
    x, y = double(5, 3, seed=1), torch.arange(5)
    la = lw.laplace(net, (x, y), "categorical", structure=MatrixFree(samples=6))
    pred = la.predict(x)
    assert pred.drawn
    assert pred.outputs.values.shape == (6, 5, 600)
    with pytest.raises(InvalidValue, match="by draws"):
        la.predict(x, joint=True)


# -- the evidence (identity 13) ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROBLEMS)
def test_lanczos_from_all_unit_vectors_gives_the_log_determinant_exactly(name: str) -> None:
    full, la = fits(name, 1)
    op, P = precision_of(la), la.state.layout.size
    run = Lanczos.start(lambda v: linalg.mv(op, v), torch.eye(P, dtype=torch.float64))
    while len(run.alpha) < P and bool(run.alive.any()):  # a start that is exhausted before is exact
        run.step()
    found, exact = run.quadrature(torch.log).sum(), linalg.logdet(full.posterior.precision)
    torch.testing.assert_close(found, exact, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("preconditioner", ["kron", "none"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_evidence_agrees_with_full_within_its_bar(name: str, preconditioner: str) -> None:
    full, la = fits(name, 3, samples=32, preconditioner=preconditioner)
    terms, exact = la.decompose(), full.decompose()
    assert terms.estimate is not None
    assert exact.estimate is None
    assert terms.bound == "an estimate of the full curvature's"
    torch.testing.assert_close(terms.fit, exact.fit)
    torch.testing.assert_close(terms.estimate.value, float(la.log_evidence()))
    assert abs(terms.estimate.value - float(exact.log_evidence)) < 5 * terms.estimate.standard_error


@pytest.mark.parametrize(
    ("problem", "preconditioner", "samples"),
    [
        pytest.param(regression, "kron", 32, id="mlp", marks=pytest.mark.full),
        pytest.param(classes, "none", 16, id="cnn"),
        pytest.param(attention, "nystrom", 16, id="attention", marks=pytest.mark.full),
    ],
)
def test_bars_are_honest(problem: Callable[..., Any], preconditioner: str, samples: int, jacobian: Oracle) -> None:
    """90 % bars of evidence, γ and predictive variances hold the truth of the dense curvature in 80 to 97 of 100 runs.

    Products are with the network's rows in memory, lest a hundred runs take minutes."""
    net, x, y, likelihood = problem(7)
    structure = MatrixFree(samples, preconditioner=preconditioner, tolerance=1e-3)
    la = lw.laplace(net, (x, y), likelihood, structure=structure, prior=0.7)
    G = dense(jacobian, net, x, likelihood)
    values, vectors = torch.linalg.eigh(G)
    root = MatrixRoot((values.clamp(min=0).sqrt() * vectors).mT)
    M = G + 0.7 * torch.eye(len(G), dtype=torch.float64)
    S, rows = M.inverse(), jacobian(net, lambda twin: twin(x[:4])).reshape(-1, len(G))
    variances = torch.einsum("mp,pq,mq->m", rows, S, rows)
    hits = {"logdet": 0.0, "gamma": 0.0, "variance": 0.0}
    for seed in range(100):
        plan = replace(precision_of(la).plan, seed=1000 + 7 * seed)
        op = replace(precision_of(la), root=root, plan=plan, memo=Remembered())
        hits["logdet"] += covers(op.log_determinant, float(torch.logdet(M)))
        hits["gamma"] += covers(op.samples.dimension, float((G * S).sum()))
        squares = (op.spread @ rows.mT).square().mean(0)
        low, high = variance_of(squares, samples)  # f_var_interval
        hits["variance"] += float(((low <= variances) & (variances <= high)).double().mean())
    assert all(80 <= n <= 97 for n in hits.values()), hits


def covers(estimate: Estimate, truth: float) -> bool:
    low, high = estimate.interval
    return low <= truth <= high


@pytest.mark.parametrize("name", ["regression", "tags"])
def test_the_slope_of_the_evidence_is_that_of_full_within_its_bar(name: str) -> None:
    full, la = fits(name, 5, samples=100, tolerance=1e-5)
    slopes = []
    for one in (la, full):
        value = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
        (slope,) = torch.autograd.grad(one.log_evidence(prior=lw.priors.Gaussian(value)), value)
        slopes.append(float(slope))
    bar = 0.5 * la.solve.dimension.standard_error / 0.7
    assert abs(slopes[0] - slopes[1]) < 5 * bar
    assert not la.log_evidence().requires_grad


# -- tuning ------------------------------------------------------------------------------------------------------


def taught(seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A network, and targets of it and another: precisions are inside their bounds."""
    net, x = regression(seed)[0], double(60, 5, seed=seed + 3)
    teacher = regression(seed + 50)[0]
    return net, x, (net(x) + teacher(x)).detach() + 0.3 * double(60, 3, seed=seed + 4)


@pytest.mark.parametrize("center", ["map", "tangent"])
@pytest.mark.parametrize("prior", [1.0, {"0.*": 1.0, "2.*": 1.0}])
def test_em_ends_where_mackay_does_with_exact_traces(prior: Any, center: str) -> None:
    net, x, y = taught(1)
    full = lw.laplace(net, (x, y), "gaussian", structure="full", prior=prior).tuned("mackay", center=center)
    structure = MatrixFree(samples=300, tolerance=1e-4)
    la = lw.laplace(net, (x, y), "gaussian", structure=structure, prior=prior).tuned(center=center)
    assert la.tuning is not None
    assert (la.tuning.method, la.tuning.center, la.tuning.converged) == ("em", center, True)
    gamma = la.solve.gamma
    error = (gamma.std(0) / len(gamma) ** 0.5 / gamma.mean(0).clamp(min=1)).max()
    ratio = (la.prior.precision / full.prior.precision).log().abs().max()
    assert float(ratio) < 5 * float(error) + 0.01
    torch.testing.assert_close(la.likelihood.noise, full.likelihood.noise, rtol=0.01, atol=0)


def test_the_fixed_point_is_one() -> None:
    net, x, y = taught(4)
    la = lw.laplace(net, (x, y), "gaussian", structure=MatrixFree(samples=64), prior="layerwise").tuned()
    gamma = la.effective_dimension()
    scatter = la.prior.scatter(la.tangent_map.vector)
    torch.testing.assert_close(gamma, la.prior.precision * scatter, rtol=0.01, atol=0.01)


def test_only_em_tunes_it_and_em_tunes_only_it() -> None:
    full, la = fits("regression", samples=8)
    for method in ("mackay", "evidence"):
        with pytest.raises(InvalidValue, match="em"):
            la.tuned(method)
    with pytest.raises(InvalidValue, match="mackay"):
        full.tuned("em")
    with pytest.raises(Unsupported, match="mackay"):
        lw.tune.em(full.state, full.prior, full.likelihood)


def test_held_out_data_tune_it_too() -> None:
    net, x, y = taught(1)
    likelihood = lw.likelihoods.Gaussian(0.2)
    la = lw.laplace(net, (x[:40], y[:40]), likelihood, structure=MatrixFree(samples=4, tolerance=0.1, rank=39))
    found = la.tuned("validation", data=(x[40:], y[40:]), fixed="noise")
    assert torch.isfinite(found.predict(x[:2]).f_var).all()


def test_the_g_prior_sees_the_exact_diagonal() -> None:
    net, x, y, likelihood = regression(4)
    full = lw.laplace(net, (x, y), likelihood, structure="full", prior="gprior")
    la = lw.laplace(net, (x, y), likelihood, structure=MatrixFree(samples=200, tolerance=1e-4), prior="gprior")
    torch.testing.assert_close(la.prior.operator().dense(), full.prior.operator().dense(), rtol=1e-8, atol=1e-8)
    mine = la.predict(x[:3])
    away = (mine.f_var - full.predict(x[:3]).f_var) / mine.f_var_standard_error
    assert float(away.abs().max()) < 5


# -- states and files --------------------------------------------------------------------------------------------


def test_states_add_as_their_data_do() -> None:
    net, x, y, likelihood = regression(6)
    structure = MatrixFree(samples=5, tolerance=TIGHT, seed=2)
    whole = lw.laplace(net, (x, y), likelihood, structure=structure)
    grown = lw.laplace(net, (x[:7], y[:7]), likelihood, structure=structure).updated((x[7:], y[7:]))
    assert grown.state.n == 17
    torch.testing.assert_close(
        linalg.to_dense(precision_of(grown)), linalg.to_dense(precision_of(whole)), atol=1e-10, rtol=1e-10
    )
    tangent, lik = whole.tangent, whole.likelihood
    parts = [lw.accumulate(structure, tangent, lik, (x[s], y[s])) for s in (slice(0, 7), slice(7, 17))]
    merged = lw.from_state(parts[0] + parts[1], net, 1.0, likelihood)
    torch.testing.assert_close(
        linalg.to_dense(precision_of(merged)), linalg.to_dense(precision_of(whole)), atol=1e-10, rtol=1e-10
    )


def test_a_file_holds_the_samples_and_asks_for_the_data_beyond_them(tmp_path: Any) -> None:
    net, x, y = taught(1)
    la = lw.laplace(net, (x, y), "gaussian", structure=MatrixFree(8, tolerance=1e-4), prior="layerwise").tuned()
    evidence = la.log_evidence()
    la.save(tmp_path / "a.safetensors")
    back = lw.load(tmp_path / "a.safetensors", net)
    assert back.state.structure == la.state.structure
    assert torch.equal(back.solve.z, la.solve.z)
    assert (back.solve.residual, back.solve.steps) == (la.solve.residual, la.solve.steps)
    assert torch.equal(back.predict(x[:3]).f_var, la.predict(x[:3]).f_var)
    assert torch.equal(back.effective_dimension(), la.effective_dimension())
    torch.testing.assert_close(back.log_evidence(), evidence, rtol=1e-12, atol=0)
    assert back.draw(3)["0.weight"].shape == (3, 4, 5)
    with pytest.raises(InvalidValue, match="data="):
        back.replace(prior=3.0).predict(x[:3])
    with pytest.raises(InvalidValue, match="data="):
        back.posterior.draw(3, torch.Generator().manual_seed(1))
    whole = lw.load(tmp_path / "a.safetensors", net, data=(x, y))
    moved, same = (one.replace(prior=3.0).predict(x[:3]).f_var for one in (whole, la))
    torch.testing.assert_close(moved, same, rtol=0.01, atol=0)
    assert back.tuned(data=(x, y)).tuning is not None
    with pytest.raises(InvalidValue, match="same data each pass"):
        lw.load(tmp_path / "a.safetensors", net, data=(x[1:], y[1:])).replace(prior=3.0).predict(x[:3])


def test_repr_tells_how_the_solve_went() -> None:
    _, la = fits("regression", samples=8)
    assert "not solved yet" in repr(la)
    la.predict(regression()[1][:2])
    assert f"8 samples by cg (preconditioner nystrom): {la.solve.steps} steps" in repr(la)


def test_the_preconditioner_is_chosen_by_memory() -> None:
    net, x, y, _ = regression(0)
    found = [
        lw.accumulate(
            MatrixFree(samples=4, memory_budget=budget, **settings),
            lw.linearize(net),
            lw.likelihoods.Gaussian(1.0),
            (x, y),
        ).structure
        for budget, settings in [
            (2**30, {}),
            (8 * 6 * 39 * 7, {}),
            (8 * 6 * 39 * 8, {}),
            (1, {"preconditioner": "nystrom"}),
            (1, {"rank": 12}),
        ]
    ]
    assert [(s.preconditioner, s.rank) for s in found] == [
        ("nystrom", 9),  # a quarter of 39
        ("none", 0),
        ("nystrom", 8),
        ("nystrom", 1),
        ("nystrom", 12),
    ]


def test_the_default_takes_fewer_steps_than_none() -> None:
    """A spectrum that falls, as those of networks do: the top of it is what conjugate gradients spend steps on."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 2)).double()
    x, y = double(200, 6, seed=1), double(200, 2, seed=2)
    steps = {
        name: lw.laplace(
            net, (x, y), "gaussian", structure=MatrixFree(4, preconditioner=name, seed=1), prior=0.1
        ).solve.steps
        for name in ("auto", "none")
    }
    assert 2 * steps["auto"] <= steps["none"], steps


# -- bad input ---------------------------------------------------------------------------------------------------


class Changing:
    """Batches that are others in some pass: by `change(pass, x, y)`."""

    def __init__(self, x: Tensor, y: Tensor, change: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        self.x, self.y, self.change, self.count = x, y, change, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.count += 1
        for index in (slice(0, 9), slice(9, 17)):
            yield self.change(self.count, self.x[index], self.y[index])


CHANGES: dict[str, tuple[Callable[..., Any], str]] = {
    "augmentation": (lambda i, x, y: (x + 0.05 * (i > 8), y), "another sse"),
    "targets": (lambda i, x, y: (x, y + (i > 8)), "other targets"),
    "fewer": (lambda i, x, y: (x[:-1], y[:-1]) if i > 8 else (x, y), "15 examples, not 17"),
    "nan": (lambda i, x, y: (x * float("nan"), y) if i > 8 and len(x) == 8 else (x, y), "batch 2 of pass"),
}


@pytest.mark.parametrize("solver", ["cg", "sgd"])
@pytest.mark.parametrize("name", CHANGES)
def test_data_that_change_between_passes_are_named(name: str, solver: str) -> None:
    change, message = CHANGES[name]
    net, x, y, likelihood = regression(1)
    loader = Changing(x, y, change)

    def run() -> None:
        la = lw.laplace(net, loader, likelihood, structure=MatrixFree(samples=4, solver=solver, tolerance=1e-9))
        la.log_evidence(), la.predict(x)

    with pytest.raises(InvalidValue, match=message) as error:
        run()
    assert "same data each pass" in str(error.value)


def test_a_shuffled_loader_is_the_same_data() -> None:
    net, x, y, likelihood = regression(1)
    loader = DataLoader(TensorDataset(x, y), 4, shuffle=True)
    assert lw.laplace(net, loader, likelihood, structure=MatrixFree(samples=4)).solve.residual <= 1e-6


def test_samples_do_not_depend_on_the_batches() -> None:
    """Their noise belongs to sample and example, wherever a batch ends."""
    net, x, y, likelihood = tags(1)
    loaders, free = [DataLoader(TensorDataset(x, y), n) for n in (3, len(x))], MatrixFree(4, tolerance=TIGHT)
    made = [lw.laplace(net, loader, likelihood, structure=free).solve.z for loader in loaders]
    torch.testing.assert_close(*made, rtol=1e-8, atol=1e-8)


def test_noise_by_its_place_is_standard_normal() -> None:
    """Moments, and products of neighbors in column, row, entry or seed, within five standard errors."""
    e, other = based(0, 20, 30, 50), based(1, 20, 30, 50)
    n = e.numel()
    moments = (e.mean(), 0, 1), (e.square().mean(), 1, 2), (e.pow(3).mean(), 0, 15), (e.pow(4).mean(), 3, 96)
    pairs = (e[1:] * e[:-1], e[:, 1:] * e[:, :-1], e[..., 1:] * e[..., :-1], e * other)
    for value, truth, variance in (*moments, *((pair.mean(), 0, 1) for pair in pairs)):
        assert abs(float(value) - truth) < 5 * (1.1 * variance / n) ** 0.5


def test_an_indefinite_operator_is_named() -> None:
    R, a = double(9, 6, seed=0), torch.full((6,), 0.1, dtype=torch.float64)
    with pytest.raises(NotPositiveDefinite, match="positive definite"):
        _ = held(R, a, sign=-1.0).samples


def test_a_solver_that_stalls_is_named() -> None:
    R, a = double(40, 30, seed=0) * torch.logspace(-3, 3, 30, dtype=torch.float64), torch.ones(30, dtype=torch.float64)
    with pytest.raises(NotConverged, match=r"residual of .* after 3 steps.*max_steps"):
        _ = held(R, a, max_steps=3).samples
    with pytest.raises(NotConverged, match="sgd stopped"):
        _ = held(R, a, max_steps=2, solver="sgd").samples


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"samples": 3}, "samples of matrix_free must be a whole number, at least 4"),
        ({"solver": "gmres"}, "'cg' or 'sgd'"),
        ({"preconditioner": "ilu"}, "kron"),
        ({"rank": -1}, "rank"),
        ({"tolerance": -1.0}, "tolerance"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        MatrixFree(**settings)


def test_other_factors_and_certificates_are_refused() -> None:
    net, x, y, likelihood = regression()
    for factor in ("monte_carlo", "empirical", "hessian"):
        with pytest.raises(InvalidValue, match="exact"):
            lw.laplace(net, (x, y), likelihood, structure="matrix_free", factor=factor)
    la = lw.laplace(net, (x, y), likelihood, structure="matrix_free")
    with pytest.raises(Unsupported, match=r"la\.solve"):
        la.certify()
    with pytest.raises(Unsupported, match="factorized"):
        _ = lw.laplace(net, (x, y), likelihood, structure="full").solve


def test_solves_in_groups_of_columns_are_the_same() -> None:
    R, a = double(25, 30, seed=0), torch.ones(30, dtype=torch.float64)
    whole, groups = (held(R, a, tolerance=1e-12, memory_budget=budget) for budget in (2**30, 8 * 20 * 30 * 5))
    torch.testing.assert_close(groups.samples.z, whole.samples.z, atol=1e-9, rtol=1e-9)


def test_a_budget_of_no_lanczos_vectors_gives_the_same_evidence() -> None:
    R, a = double(60, 90, seed=0), torch.linspace(0.5, 3, 90, dtype=torch.float64)
    whole, short = (held(R, a, memory_budget=budget).log_determinant for budget in (2**30, 1))
    exact = float(torch.logdet(R.mT @ R + a.diag()))
    assert abs(short.value - whole.value) < 0.1 * whole.standard_error  # groups of 4 probes stop at their own bars
    assert abs(short.value - exact) < 5 * short.standard_error
    assert torch.corrcoef(torch.stack([short.samples, whole.samples]))[0, 1] > 0.999


def test_the_model_is_left_as_it_was_found() -> None:
    net, x, y, likelihood = classes(1)
    net.train()
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    before = copy.deepcopy(net.state_dict())
    torch.manual_seed(5)
    state = torch.get_rng_state()
    la = lw.laplace(
        net, DataLoader(TensorDataset(x, y), 9, shuffle=True), likelihood, structure=MatrixFree(4, tolerance=0.01)
    )
    la.tuned().predict(x), la.log_evidence()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())
    assert net.training
    assert all(bool((p.grad == 1).all()) and p.requires_grad for p in net.parameters())
