"""Low rank: Ĝ = Yᵀ(ΩYᵀ)⁺Y below G, all of G at a rank that holds it, sums that add."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from helpers import close, draw
from lapwing.curvature.lowrank import COPIES, LowRank, pseudorandom
from lapwing.doctor.trial import counted
from lapwing.operators import linalg

SEEDS = range(3)


class Tokens(nn.Module):
    """(n, 4) integers below 7 -> (n, 4, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(7, 5), nn.LayerNorm(5), nn.Linear(5, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        return self.head(self.norm(h + h.mean(1, keepdim=True)).sin())


def problem(kind: str, seed: int = 0) -> tuple[nn.Module, Tensor, Tensor, lw.likelihoods.Likelihood]:
    torch.manual_seed(seed)
    if kind == "tokens":
        return Tokens().double(), torch.randint(7, (5, 4)), torch.randint(3, (5, 4)), lw.likelihoods.Categorical()
    if kind == "images":
        net = nn.Sequential(nn.Conv2d(2, 3, (2, 3), stride=(1, 2)), nn.Tanh(), nn.Flatten(), nn.Linear(24, 2)).double()
        return net, draw(9, 2, 5, 6), torch.randint(2, (9, 2)), lw.likelihoods.Bernoulli()
    net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    if kind == "classes":
        return net, draw(7, 5), torch.randint(3, (7,)), lw.likelihoods.Categorical()
    noise = torch.tensor([0.3, 0.8, 0.5]) if kind == "per output" else torch.tensor(0.4)
    return net, draw(7, 5), draw(7, 3), lw.likelihoods.Gaussian(noise.double())


def gauss_newton(
    model: nn.Module, x: Tensor, likelihood: lw.likelihoods.Likelihood, jacobian: Callable[..., Tensor]
) -> list[Tensor]:
    """G, for noise per output one an output at its weight, from dense autograd of the outputs and of log p."""
    f = model(x).detach()
    J = jacobian(model, lambda twin: twin(x)).reshape(-1, f.shape[-1], sum(p.numel() for p in model.parameters()))
    flat = f.reshape(-1, f.shape[-1])
    out = []
    for row, j in zip(flat, J, strict=True):
        p = row.softmax(-1)
        if isinstance(likelihood, lw.likelihoods.Categorical):
            out.append([j.mT @ (p.diag() - torch.outer(p, p)) @ j])
        elif isinstance(likelihood, lw.likelihoods.Bernoulli):
            s = row.sigmoid()
            out.append([j.mT @ (s * (1 - s)).diag() @ j])
        elif likelihood.noise.ndim:
            out.append([torch.outer(g, g) / s**2 for g, s in zip(j, likelihood.noise, strict=True)])
        else:
            out.append([j.mT @ j / likelihood.noise**2])
    return [torch.stack(part).sum(0) for part in zip(*out, strict=True)]


KINDS = ("classes", "gaussian", "per output", "images", "tokens")
RANKS = {"classes": 16, "gaussian": 22, "per output": 9, "images": 20, "tokens": 45}  # at least that of G


# -- all of the rank ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prior", [0.7, "layerwise"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_rank_that_holds_the_curvature_is_exact(kind: str, prior: object, seed: int, jacobian) -> None:
    model, x, y, likelihood = problem(kind, seed)
    la = lw.laplace(model, (x, y), likelihood, structure=LowRank(RANKS[kind]), prior=prior)
    full = lw.laplace(model, (x, y), likelihood, structure="full", prior=prior)
    g = torch.stack(gauss_newton(model, x, likelihood, jacobian)).sum(0)
    h = g + la.prior.operator().dense().diag()
    close(linalg.to_dense(la.posterior.precision), h)
    close(la.log_evidence(), full.log_evidence())
    close(la.effective_dimension(), full.effective_dimension())
    new = x.roll(1, -1)
    J = jacobian(model, lambda twin: twin(new))
    close(la.predict(new).covariance, J @ torch.linalg.solve(h, J.mT))
    if kind != "tokens":
        rows = J.reshape(-1, J.shape[-1])
        joint = la.predict(new, joint=True).covariance
        close(joint.reshape(len(rows), -1), rows @ torch.linalg.solve(h, rows.mT))


@pytest.mark.parametrize("kind", ["classes", "per output"])
@pytest.mark.parametrize("seed", SEEDS)
def test_draws_have_the_full_covariance(kind: str, seed: int, jacobian) -> None:
    model, x, y, likelihood = problem(kind, seed)
    la = lw.laplace(model, (x, y), likelihood, structure=LowRank(RANKS[kind]))
    sigma = torch.linalg.inv(
        torch.stack(gauss_newton(model, x, likelihood, jacobian)).sum(0) + torch.eye(39, dtype=torch.float64)
    )
    away = la.posterior.draw(20_000) - la.posterior.mean
    found = away.mT @ away / 20_000
    error = ((sigma.diagonal()[:, None] * sigma.diagonal() + sigma.square()) / 20_000).sqrt()
    assert float(((found - sigma) / error).abs().max()) < 5


@pytest.mark.parametrize("center", ["tangent", "map"])
@pytest.mark.parametrize("kind", ["classes", "gaussian", "per output"])
@pytest.mark.filterwarnings("ignore::lapwing.errors.LapwingWarning")  # priors at their bounds
def test_tuning_is_that_of_the_full_curvature(kind: str, center: str) -> None:
    model, x, y, likelihood = problem(kind, 3)
    found, full = (
        lw.laplace(model, (x, y), likelihood, structure=s).tuned(center=center) for s in (LowRank(RANKS[kind]), "full")
    )
    close(found.prior.precision, full.prior.precision, 1e-6)
    for key, value in full.likelihood.hyperparameters.items():
        close(found.likelihood.hyperparameters[key], value, 1e-6)
    close(found.log_evidence(), full.log_evidence())


# -- less of it --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rank", [1, 4])
def test_a_small_rank_is_nystrom_s_formula(kind: str, rank: int, jacobian) -> None:
    model, x, y, likelihood = problem(kind)
    la = lw.laplace(model, (x, y), likelihood, structure=LowRank(rank))
    tests = pseudorandom(rank, la.tangent)
    expected = torch.zeros(tests.shape[1], tests.shape[1], dtype=torch.float64)
    for g in gauss_newton(model, x, likelihood, jacobian):
        sketch = tests @ g
        expected += sketch.mT @ torch.linalg.solve(sketch @ tests.mT, sketch)
    close(linalg.to_dense(la.posterior.precision) - torch.eye(len(expected)), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("passes", [1, 3])
def test_eigenvalues_and_log_determinants_are_lower_bounds(kind: str, passes: int, jacobian) -> None:
    model, x, y, likelihood = problem(kind)
    la = lw.laplace(model, (x, y), likelihood, structure=LowRank(3, passes))
    g = torch.stack(gauss_newton(model, x, likelihood, jacobian)).sum(0)
    ours = linalg.to_dense(la.posterior.precision) - torch.eye(len(g))
    assert float(torch.linalg.eigvalsh(g - ours)[0]) > -1e-9
    assert bool((torch.linalg.eigvalsh(ours) <= torch.linalg.eigvalsh(g) + 1e-9).all())
    full = lw.laplace(model, (x, y), likelihood, structure="full")
    assert float(la.log_evidence()) > float(full.log_evidence())
    assert la.decompose().bound == "upper bound of the full curvature's"
    wider = la.predict(x).covariance - full.predict(x).covariance
    assert float(torch.linalg.eigvalsh(wider).min()) > -1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_passes_come_near_the_top_eigenpairs(kind: str, jacobian) -> None:
    model, x, y, likelihood = problem(kind)
    g = gauss_newton(model, x, likelihood, jacobian)
    best = sum(float(torch.linalg.eigvalsh(one)[-5:].sum()) for one in g) / float(torch.stack(g).sum(0).trace())
    shares = []
    for passes in (1, 2, 4, 12):
        la = lw.laplace(model, (x, y), likelihood, structure=LowRank(5, passes))
        shares.append(la.state.structure.captured(la.state, likelihood.curvature_weights())[0])
    assert shares == sorted(shares)
    assert shares[-1] <= best + 1e-9
    assert shares[-1] > best - 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_the_share_of_the_curvature_is_told(kind: str, jacobian) -> None:
    model, x, y, likelihood = problem(kind)
    la = lw.laplace(model, (x, y), likelihood, structure=LowRank(4))
    g = torch.stack(gauss_newton(model, x, likelihood, jacobian)).sum(0).diagonal()
    ours = linalg.to_dense(la.posterior.precision).diagonal() - 1
    assert f"lowrank (rank 4) with {100 * float(ours.sum() / g.sum()):.1f} % of the curvature" in repr(la)
    for name, columns in la.tangent.layout.slices().items():
        share = float(ours[columns].sum() / g[columns].sum())
        expected = f"rank 4 of the whole network, and the prior; {100 * share:.1f} % of its curvature"
        assert la.coverage[name] == expected


@pytest.mark.parametrize("rank", [4, 22])
def test_certify_sees_what_is_missing(rank: int) -> None:
    model, x, y, likelihood = problem("gaussian")
    la = lw.laplace(model, (x, y), likelihood, structure=LowRank(rank))
    found = la.certify(16)
    share = la.state.structure.captured(la.state, likelihood.curvature_weights())[0]
    assert abs(found.trace.value - share) < 1e-8
    full = lw.laplace(model, (x, y), likelihood, structure="full")
    gap = 2 * float(full.log_evidence() - la.log_evidence())
    assert abs(found.log_det.value - gap) < 5 * found.log_det.standard_error + 1e-6


# -- sums --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("factor", ["exact", "empirical"])
def test_shards_batches_and_orders_add_up_to_the_same(kind: str, factor: str) -> None:
    model, x, y, likelihood = problem(kind)
    options = {"structure": LowRank(4), "factor": factor}
    if (kind, factor) == ("per output", "empirical"):
        with pytest.raises(lw.errors.LapwingError, match="factor='exact'"):
            lw.laplace(model, (x, y), likelihood, **options)
        return
    whole = lw.laplace(model, (x, y), likelihood, **options)
    a, b = (lw.laplace(model, (x[i], y[i]), likelihood, **options).state for i in (slice(2), slice(2, None)))
    merged = lw.from_state(a + b, model, 1.0, likelihood)
    turned = torch.randperm(len(x))
    one_by_one = lw.laplace(model, [(x[i : i + 1], y[i : i + 1]) for i in turned], likelihood, **options)
    updated = lw.laplace(model, (x[:3], y[:3]), likelihood, **options).updated((x[3:], y[3:]))
    for other in (merged, one_by_one, updated):
        close(linalg.to_dense(other.posterior.precision), linalg.to_dense(whole.posterior.precision))
        close(other.log_evidence(), whole.log_evidence())
        assert repr(other) == repr(whole)


@pytest.mark.parametrize("kind", ["classes", "per output"])
def test_later_passes_add_with_shared_test_vectors_only(kind: str) -> None:
    model, x, y, likelihood = problem(kind)
    tangent, structure = lw.linearize(model), LowRank(4, 2)
    whole, a, b = (
        lw.accumulate(structure, tangent, likelihood, (x[i], y[i])) for i in (slice(None), slice(3), slice(3, None))
    )
    with pytest.raises(lw.errors.InvalidValue, match="do not add"):
        a + b
    parts = [lw.accumulate(structure, tangent, likelihood, (x[i], y[i]), basis=whole) for i in (slice(3), slice(3, 9))]
    merged = parts[0] + parts[1]
    close(merged.sums["sketch"], whole.sums["sketch"])
    first = lw.accumulate(LowRank(4), tangent, likelihood, (x, y))
    again = lw.accumulate(structure, tangent, likelihood, (x, y), basis=first)
    assert torch.equal(again.basis["tests"], whole.basis["tests"])
    la = lw.from_state(a, model, 1.0, likelihood)
    assert torch.equal(la.updated((x[3:], y[3:])).state.basis["tests"], a.basis["tests"])
    for wrong in (lw.accumulate(LowRank(5), tangent, likelihood, (x, y)), "state"):
        with pytest.raises(lw.errors.InvalidValue, match="basis must be a state of structure lowrank"):
            lw.accumulate(structure, tangent, likelihood, (x, y), basis=wrong)


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("kind", ["per output", "images"])
def test_what_is_loaded_is_what_was_saved_to_the_last_bit(kind: str, passes: int, tmp_path: Path) -> None:
    model, x, y, likelihood = problem(kind)
    la = lw.laplace(model, (x, y), likelihood, structure=LowRank(4, passes), prior="layerwise")
    la.save(tmp_path / "a.safetensors")
    back = lw.load(tmp_path / "a.safetensors", model)
    assert back.state.structure == la.state.structure
    assert all(torch.equal(t, back.state.sums[k]) for k, t in la.state.sums.items())
    assert torch.equal(back.log_evidence(), la.log_evidence())
    assert torch.equal(back.predict(x).covariance, la.predict(x).covariance)
    assert repr(back) == repr(la)
    assert (la.state + back.state).n == 2 * len(x)


def test_test_vectors_are_splitmix64() -> None:
    """By Python's integers, which do not overflow."""
    tangent = lw.linearize(nn.Linear(3, 2).double())
    mask = 2**64 - 1
    for i, row in enumerate(pseudorandom(4, tangent).tolist()):
        for j, value in enumerate(row):
            z = (i * 8 + j + 1) * 0x9E3779B97F4A7C15 & mask
            z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
            z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
            assert value == ((z ^ z >> 31) >> 11) / 2**53 - 0.5


def test_test_vectors_look_random() -> None:
    v = pseudorandom(40, lw.linearize(nn.Linear(499, 2)))
    assert abs(float(v.mean())) < 5 / (12 * v.numel()) ** 0.5
    correlations = (v @ v.mT * 12 / v.shape[1])[~torch.eye(40, dtype=torch.bool)]
    assert float(correlations.abs().max()) * v.shape[1] ** 0.5 < 5


# -- beside the rest ---------------------------------------------------------------------------------------------


def test_the_name_gives_the_default() -> None:
    model, x, y, likelihood = problem("gaussian")
    la = lw.laplace(model, (x, y), likelihood, structure="lowrank")
    assert la.state.structure == LowRank(39)  # no more than there are parameters
    full = lw.laplace(model, (x, y), likelihood, structure="full")
    close(la.log_evidence(), full.log_evidence())


@pytest.mark.parametrize("subset", ["last_layer", ["0.*"]])
def test_subsets(subset: object) -> None:
    model, x, y, likelihood = problem("classes")
    la, full = (lw.laplace(model, (x, y), likelihood, structure=s, subset=subset) for s in ("lowrank", "full"))
    close(la.log_evidence(), full.log_evidence())
    close(la.predict(x).covariance, full.predict(x).covariance)


def test_the_g_prior() -> None:
    model, x, y, likelihood = problem("gaussian")
    la, full = (lw.laplace(model, (x, y), likelihood, structure=s, prior="gprior") for s in ("lowrank", "full"))
    close(la.log_evidence(), full.log_evidence())
    close(la.predict(x).covariance, full.predict(x).covariance)


def test_the_memory_budget_changes_no_figure() -> None:
    model, x, y, likelihood = problem("images")
    la, small = (
        lw.laplace(model, (x, y), likelihood, structure=LowRank(5, memory_budget=b), memory_budget=b)
        for b in (2**30, 2**16)
    )
    close(la.state.sums["sketch"], small.state.sums["sketch"])
    close(la.predict(x).covariance, small.predict(x).covariance)


@pytest.mark.parametrize("seed", SEEDS)
def test_float32_networks_lose_no_more_than_rounding(seed: int) -> None:
    model, x, y, likelihood = problem("classes", seed)
    exact = lw.laplace(model, (x, y), likelihood, structure="full")
    coarse = lw.laplace(model.float(), (x.float(), y), likelihood, structure=LowRank(30))
    close(coarse.log_evidence(), exact.log_evidence(), 1e-5)
    close(coarse.predict(x.float()).covariance.double(), exact.predict(x).covariance, 1e-4)


@pytest.mark.parametrize(
    ("match", "call"),
    [
        ("at least 1", lambda *p: LowRank(0)),
        ("at least 1", lambda *p: LowRank(3, 0)),
        ("without negative eigenvalues", lambda *p: lw.laplace(*p, structure="lowrank", factor="hessian")),
        ("one pass|two passes", lambda *p: lw.laplace(*p, structure="lowrank") and _with_basis(*p)),
    ],
)
def test_what_cannot_be_done_is_said(match: str, call) -> None:
    with pytest.raises(lw.errors.InvalidValue, match=match):
        call(*_fit(problem("classes")))


def _fit(p: tuple) -> tuple:
    model, x, y, likelihood = p
    return model, (x, y), likelihood


def _with_basis(model: nn.Module, data: tuple, likelihood: object) -> None:
    tangent = lw.linearize(model)
    state = lw.accumulate(LowRank(3), tangent, likelihood, data)
    lw.accumulate(LowRank(3), tangent, likelihood, data, basis=state)


def test_a_sketch_past_all_memory_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lapwing.curvature.lowrank.physical_memory", lambda: 10_000)
    model, x, y, likelihood = problem("classes")
    with pytest.raises(lw.errors.InvalidValue, match="a sketch of rank 20 of 39 parameters takes"):
        lw.laplace(model, (x, y), likelihood, structure=LowRank(20))


@pytest.mark.parametrize("budget", [pytest.param(2**24, marks=pytest.mark.full), 2**26])
def test_the_default_preconditioner_keeps_to_its_budget(budget: int) -> None:
    """Of 20,000 parameters, and 10 outputs of 96 examples: 960 rows, nine times the smaller budget."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 123), nn.Tanh(), nn.Linear(123, 123), nn.Tanh(), nn.Linear(123, 10)).double()
    x, y = torch.randn(96, 32, dtype=torch.float64), torch.randint(10, (96,))
    tangent, structure = lw.linearize(net), lw.curvature.MatrixFree(samples=4, memory_budget=budget)

    def fit() -> None:
        state = lw.accumulate(structure, tangent, lw.likelihoods.Categorical(), (x, y))
        assert state.structure.preconditioner == "nystrom"
        assert state.structure.rank == min(100, budget // (8 * COPIES * tangent.layout.size))
        state.structure.operator(state, torch.ones(1, dtype=torch.float64))

    peak, _ = counted(fit, [*net.parameters(), *tangent.params.values(), x, y])
    assert peak <= budget


def test_noise_per_output_takes_a_sketch_for_each_and_the_budget_counts_them() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 123), nn.Tanh(), nn.Linear(123, 123), nn.Tanh(), nn.Linear(123, 5)).double()
    x, y, budget = torch.randn(60, 32, dtype=torch.float64), torch.randn(60, 5, dtype=torch.float64), 2**26
    tangent, structure = lw.linearize(net), lw.curvature.MatrixFree(samples=4, memory_budget=budget)
    likelihood = lw.likelihoods.Gaussian(noise=torch.full((5,), 0.5, dtype=torch.float64))

    def fit() -> None:
        state = lw.accumulate(structure, tangent, likelihood, (x, y))
        assert state.structure.rank == min(100, budget // (8 * COPIES * tangent.layout.size * 5))
        state.structure.operator(state, likelihood.curvature_weights())

    peak, _ = counted(fit, [*net.parameters(), *tangent.params.values(), x, y])
    assert peak <= budget


def test_the_refusal_counts_a_sketch_for_each_curvature_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y, _ = problem("classes")
    targets = torch.randn(len(y), model(x).shape[-1], dtype=x.dtype)
    c = targets.shape[-1]
    monkeypatch.setattr("lapwing.curvature.lowrank.physical_memory", lambda: 8 * COPIES * 20 * 39 * c - 1)
    noise = torch.ones(c, dtype=torch.float64)
    lw.laplace(model, (x, targets), lw.likelihoods.Gaussian(noise=1.0), structure=LowRank(20))
    with pytest.raises(lw.errors.InvalidValue, match=f"one for each of {c} curvature weights"):
        lw.laplace(model, (x, targets), lw.likelihoods.Gaussian(noise=noise), structure=LowRank(20))
