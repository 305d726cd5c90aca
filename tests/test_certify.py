"""The certificate against dense algebra: J by torch.func, G, K⁻¹ and log-determinants as matrices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from helpers import close
from lapwing.certify import certify
from lapwing.certify import inputs as new_inputs
from lapwing.certify.comparison import _trace
from lapwing.certify.leave_one_out import sample
from lapwing.certify.reader import Reader, solved
from lapwing.curvature import LowRank, probe
from lapwing.data import as_batches
from lapwing.distributed import ALONE
from lapwing.errors import InvalidValue
from lapwing.operators import linalg
from lapwing.solvers import Estimate, quadrature

ONE = torch.ones((), dtype=torch.float64)
STRUCTURES = ("full", "block", "kron", "ekfac", "diag")


def network(seed: int, i: int = 3, h: int = 5, c: int = 2) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(i, h), nn.Tanh(), nn.Linear(h, c)).double()


def batch(seed: int, kind: str, n: int = 14, i: int = 3, c: int = 2) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, i, generator=g, dtype=torch.float64)
    if kind == "categorical":
        return x, torch.randint(c, (n,), generator=g)
    y = torch.randn(n, c, generator=g, dtype=torch.float64)
    return x, (y > 0).double() if kind == "bernoulli" else y


def jacobian(model: nn.Module, x: Tensor, names: tuple[str, ...] | None = None) -> Tensor:
    """J, (n, c, p)."""
    params = {name: p.detach() for name, p in model.named_parameters() if names is None or name in names}
    jac = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, (x,)))(params)
    return torch.cat([j.detach().flatten(2) for j in jac.values()], -1)


def output_hessian(kind: str, f: Tensor, sigma: Tensor) -> Tensor:
    if kind == "gaussian":
        return torch.diag_embed((1 / sigma**2).expand(f.shape))
    if kind == "categorical":
        p = f.softmax(-1)
        return torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
    return torch.diag_embed(f.sigmoid() * (1 - f.sigmoid()))


def truth(la: Any, J: Tensor, hessian: Tensor) -> tuple[float, float, float]:
    """trace, log_det and variance_training; only our own precision comes from the package."""
    ours, prior = linalg.to_dense(la.posterior.precision), linalg.to_dense(la.prior.operator())
    G = torch.einsum("nap,nab,nbq->pq", J, hessian, J)
    rows = J.flatten(0, 1)
    mine, true = ((rows * torch.linalg.solve(m, rows.mT).mT).sum() for m in (ours, G + prior))
    gap = torch.logdet(ours) - torch.logdet(G + prior)
    return float((ours - prior).trace() / G.trace()), float(gap), float(mine / true - 1)


def assert_near(
    certificate: lw.certify.Certificate, dense: tuple[float, float, float], z: float = 5.0, rounding: float = 1e-8
) -> None:
    estimates = (certificate.trace, certificate.log_det, certificate.variance_training)
    for name, e, t in zip(("trace", "log_det", "variance_training"), estimates, dense, strict=True):
        assert abs(e.value - t) <= z * e.standard_error + rounding * max(1, abs(t)), (
            name,
            e.value,
            t,
            e.standard_error,
        )


def probed_trace(la: Any, k: int, generator: torch.Generator, budget: int = 2**20) -> Estimate:
    reader = Reader(la.state, la.prior, la.likelihood, la.data, False)
    return _trace(reader, probe(la.tangent, la.data), k, generator, budget, exact=False)


@pytest.fixture
def coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sketch of rank 4, so that networks of a few weights leave something to probes."""
    monkeypatch.setattr(lw.certify.comparison, "RANK", 4)
    monkeypatch.setattr(lw.certify.comparison, "LEAST", 1)


@pytest.mark.usefixtures("coarse")
@pytest.mark.parametrize("kind", ["gaussian", "categorical", "bernoulli"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_every_structure_is_held_to_the_dense_truth(structure: str, kind: str) -> None:
    model, (x, y) = network(0), batch(0, kind)
    sigma = torch.tensor(0.4, dtype=torch.float64)
    likelihood = lw.likelihoods.Gaussian(sigma) if kind == "gaussian" else kind
    la = lw.laplace(model, (x, y), likelihood, structure=structure, prior=0.7)
    assert_near(la.certify(64), truth(la, jacobian(model, x), output_hessian(kind, model(x).detach(), sigma)))


@pytest.mark.parametrize("form", ["primal", "dual"])
@pytest.mark.parametrize("kind", ["gaussian", "categorical"])
def test_the_full_curvature_has_no_difference_to_find(form: str, kind: str) -> None:
    la = lw.laplace(network(1), batch(1, kind), kind, structure=lw.curvature.Full(form=form), prior=0.3)
    found = la.certify(8)
    exact = ((found.trace, 1.0), (found.log_det, 0.0), (found.variance, 0.0), (found.variance_training, 0.0))
    for e, value in exact:
        assert abs(e.value - value) < 1e-8
        assert e.standard_error < 1e-8
    assert found.passes <= 11
    for where in (f"new inputs (leave-one-out, {found.inputs} of 14 training inputs)", "the training inputs"):
        assert f"error bars at {where} are right" in repr(found)


def test_noise_per_output_and_a_prior_per_layer() -> None:
    model, (x, y) = network(2, c=3), batch(2, "gaussian", c=3)
    sigma = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)
    la = lw.laplace(model, (x, y), lw.likelihoods.Gaussian(sigma), structure="diag", prior={"0.*": 0.5, "2.*": 4.0})
    dense = truth(la, jacobian(model, x), output_hessian("gaussian", model(x).detach(), sigma))
    assert_near(la.certify(64), dense)
    probed = probed_trace(la, 64, torch.Generator())
    assert abs(probed.value - dense[0]) <= 5 * probed.standard_error + 1e-8


@pytest.mark.parametrize("structure", ["kron", "diag"])
def test_the_last_layer(structure: str) -> None:
    model, (x, y) = network(3), batch(3, "categorical")
    la = lw.laplace(model, (x, y), "categorical", structure=structure, subset="last_layer")
    J = jacobian(model, x, ("2.weight", "2.bias"))
    assert_near(la.certify(64), truth(la, J, output_hessian("categorical", model(x).detach(), ONE)))


def test_a_masked_subset() -> None:
    model, (x, y) = network(4), batch(4, "gaussian")
    mask = torch.rand(5, 3, generator=torch.Generator().manual_seed(0)) > 0.4
    la = lw.laplace(model, (x, y), "gaussian", structure="diag", subset={"0.weight": mask})
    J = jacobian(model, x, ("0.weight",))[..., mask.flatten()]
    assert_near(la.certify(64), truth(la, J, output_hessian("gaussian", model(x).detach(), ONE)))


def test_outputs_with_positions_and_shared_weights() -> None:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()  # (n, q, 3) -> (n, q, 2)
    x, y = torch.randn(6, 5, 3, dtype=torch.float64), torch.randint(2, (6, 5))
    la = lw.laplace(model, (x, y), "categorical", structure="kron")
    flat = x.reshape(-1, 3)
    J, hessian = jacobian(model, flat), output_hessian("categorical", model(flat).detach(), ONE)
    dense = truth(la, J, hessian)
    assert_near(la.certify(64), dense)
    assert len(la.certify(8).trace.samples) == 8  # ten columns an example: more than the probes
    assert_near(la.certify(8), dense, 8.0)


@pytest.mark.parametrize("factor", ["monte_carlo", "empirical"])
def test_a_sampled_factor_is_held_to_the_exact_one(factor: str) -> None:
    model, (x, y) = network(6), batch(6, "categorical")
    la = lw.laplace(model, (x, y), "categorical", structure="full", factor=factor)
    dense = truth(la, jacobian(model, x), output_hessian("categorical", model(x).detach(), ONE))
    assert abs(dense[1]) > 1e-3
    assert_near(la.certify(64), dense)


def test_batches_and_their_order_do_not_matter() -> None:
    model, (x, y) = network(7), batch(7, "gaussian", n=20)
    la = lw.laplace(model, (x, y), "gaussian", structure="kron")
    whole = la.certify(16)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=7, shuffle=True)
    before = torch.get_rng_state()
    shuffled = la.certify(16, data=loader)
    assert torch.equal(before, torch.get_rng_state())
    torch.testing.assert_close(whole.log_det.samples, shuffled.log_det.samples, rtol=1e-6, atol=1e-6)
    for a, b in ((whole.variance, shuffled.variance), (whole.variance_training, shuffled.variance_training)):
        assert a is not None
        assert b is not None
        assert abs(a.value - b.value) < 5 * (a.standard_error**2 + b.standard_error**2) ** 0.5


@pytest.mark.usefixtures("coarse")
def test_probes_in_groups_are_the_same_probes() -> None:
    la = lw.laplace(network(8), batch(8, "gaussian"), "gaussian", structure="diag")
    few = lw.laplace(network(8), batch(8, "gaussian"), "gaussian", structure="diag", memory_budget=2**16)
    together, apart = la.certify(16), few.certify(16)
    assert apart.passes > together.passes
    away = (together.log_det.samples - apart.log_det.samples).abs().max()
    assert float(away) < 0.1 * float(together.log_det.samples.std())
    for a, b in ((together.variance, apart.variance), (together.variance_training, apart.variance_training)):
        torch.testing.assert_close(a.samples, b.samples, rtol=1e-5, atol=0)


def test_lanczos_vectors_that_do_not_fit_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them give the same log-determinant, in more steps."""
    kept: list[int] = []

    def watched(*arguments: Any) -> Any:
        kept.append(arguments[-1])
        return quadrature(*arguments)

    monkeypatch.setattr("lapwing.certify.comparison.quadrature", watched)
    monkeypatch.setattr("lapwing.certify.comparison.RANK", 0)  # no sketch, whatever the budget
    data = batch(8, "gaussian")
    la = lw.laplace(network(8), data, "gaussian", structure="diag")
    found = [certify(la.state, la.prior, la.likelihood, data, 4, memory_budget=budget) for budget in (2**20, 2**12)]
    assert kept[0] > 1_000
    assert kept[1] == 2
    away = (found[0].log_det.samples - found[1].log_det.samples).abs().max()
    assert float(away) < 0.1 * float(found[0].log_det.samples.std())


@pytest.mark.full
@pytest.mark.usefixtures("coarse")
def test_standard_errors_fall_with_the_root_of_the_probes() -> None:
    la = lw.laplace(network(9), batch(9, "gaussian", n=300), "gaussian", structure="diag", prior=0.5)
    few, many = la.certify(32), la.certify(128)
    pairs = [(getattr(few, name), getattr(many, name)) for name in ("log_det", "variance", "variance_training")]
    for a, b in pairs:
        assert 1.3 < a.standard_error / b.standard_error < 3.1  # 2


def test_the_network_and_its_generators_are_left_as_they_were() -> None:
    model, data = network(10), batch(10, "gaussian")
    la = lw.laplace(model.train(), data, "gaussian", structure="kron")
    weights, state = [p.clone() for p in model.parameters()], torch.get_rng_state()
    first, second = la.certify(8), la.certify(8)
    assert model.training
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(state, torch.get_rng_state())
    assert first.log_det.value == second.log_det.value
    assert first.variance.value == second.variance.value


def test_a_float32_network() -> None:
    model, (x, y) = network(11).float(), batch(11, "gaussian")
    la = lw.laplace(model, (x.float(), y.float()), "gaussian", structure="kron")
    J = jacobian(network(11), x)
    dense = truth(la, J, output_hessian("gaussian", torch.zeros(len(x), 2).double(), ONE))
    assert_near(la.certify(64), dense, rounding=1e-5)


def test_what_it_says() -> None:
    model, (x, y) = network(12), batch(12, "gaussian", n=1030)
    la = lw.laplace(model, (x, y), lw.likelihoods.Gaussian(0.1), structure="diag", prior=0.1)
    found = la.certify(64)
    text, html = repr(found), found._repr_html_()
    assert found.variance is not None
    assert 20 < found.inputs <= 64
    assert found.where == "leave-one-out"
    assert found.log_det.interval[0] > 0  # Hadamard
    new, training = (100 * abs((1 + e.value) ** 0.5 - 1) for e in (found.variance, found.variance_training))
    wide = f"error bars at new inputs (leave-one-out, {found.inputs} of 1,030 training inputs) are {new:.1f} % too "
    there = f"error bars at the training inputs are {training:.1f} % too "
    lower = f"the log evidence is {found.log_det.value / 2:.3g} nats lower than with the true curvature ("
    for words in ("diag", "64 probes", f"{found.passes} passes", "(exact)", wide, there, lower):
        assert words in text
        assert words in html
    assert max(map(len, text.splitlines())) < 190


@pytest.mark.parametrize(
    ("value", "interval", "words"),
    [
        (0.7744, (0.75, 0.8), "are 12.0 % too narrow (10.6 to 13.4 %)"),
        (1.21, (1.1, 1.33), "are 10.0 % too wide (4.9 to 15.3 %)"),
        (1.21, (0.9, 1.6), "are 10.0 % too wide, which may be chance"),
        (1.0, (0.9999, 1.0001), "are right"),
        (1.0001, (0.5, 2.0), "are 0.0 % too wide, which may be chance"),
    ],
)
@pytest.mark.parametrize(("where", "place"), [("inputs", "the 32 given"), ("leave-one-out", "leave-one-out, 32 of 90")])
def test_error_bars_are_square_roots_of_variances(
    value: float, interval: tuple[float, float], words: str, where: str, place: str
) -> None:
    e = Estimate(value, 0.02, interval, torch.ones(32)) - 1
    text = repr(lw.certify.Certificate(e, e, e, e, where, 32, 90, 32, 40, 1e-7, "kron", ("mind this",)))
    assert f"error bars at new inputs ({place}" in text
    assert text.count(words) == 2
    assert text.endswith("\n  note: mind this")


# -- new inputs --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("coarse")
@pytest.mark.parametrize("kind", ["gaussian", "categorical"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_variances_at_given_inputs_are_those_of_dense_algebra(structure: str, kind: str) -> None:
    model, (x, y), (new, _) = network(20), batch(20, kind), batch(21, kind, n=9)
    la = lw.laplace(model, (x, y), kind, structure=structure, prior=0.7)
    found = la.certify(64, inputs=2 * new)
    J, hessian = jacobian(model, x), output_hessian(kind, model(x).detach(), ONE)
    K = torch.einsum("nap,nab,nbq->pq", J, hessian, J) + linalg.to_dense(la.prior.operator())
    rows = jacobian(model, 2 * new).flatten(0, 1)
    ours, true = ((rows @ torch.linalg.inv(m) * rows).sum() for m in (linalg.to_dense(la.posterior.precision), K))
    assert found.where == "inputs"
    assert found.inputs == 9
    assert abs(found.variance.value - float(ours / true - 1)) <= 5 * found.variance.standard_error + 1e-7
    assert_near(found, truth(la, J, hessian))


@pytest.mark.parametrize("kind", ["gaussian", "bernoulli"])
@pytest.mark.parametrize("structure", ["full", "block", "kron", "diag", "ekfac", LowRank(5)])
def test_leave_one_out_is_a_refit_without_each_example(
    structure: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one output a random sign is nothing random, and with all inputs nothing is drawn."""
    monkeypatch.setattr(lw.certify.reader, "TOLERANCE", {torch.float64: 1e-10})
    model, (x, y) = network(22, c=1), batch(22, kind, c=1)
    sigma = torch.tensor(0.3, dtype=torch.float64)
    likelihood = lw.likelihoods.Gaussian(sigma) if kind == "gaussian" else kind
    la = lw.laplace(model, (x, y), likelihood, structure=structure, prior=0.7)
    found = la.certify(20)
    J, hessian = jacobian(model, x), output_hessian(kind, model(x).detach(), sigma)
    ours, true = [], []
    for n in range(len(x)):
        rest = torch.arange(len(x)) != n
        refit = lw.laplace(model, (x[rest], y[rest]), likelihood, structure=structure, prior=0.7)
        if structure == "ekfac":  # it keeps the basis of all examples, which a refit turns
            refit = la.without((x[n : n + 1], y[n : n + 1]))
        K = torch.einsum("nap,nab,nbq->pq", J[rest], hessian[rest], J[rest]) + 0.7 * torch.eye(J.shape[-1]).double()
        ours.append(J[n, 0] @ torch.linalg.solve(linalg.to_dense(refit.posterior.precision), J[n, 0]))
        true.append(J[n, 0] @ torch.linalg.solve(K, J[n, 0]))
    assert found.inputs == 14
    expected = float(torch.stack(ours).sum() / torch.stack(true).sum() - 1)
    assert abs(found.variance.value - expected) < 1e-8 * max(1, abs(expected))


@pytest.mark.parametrize("kind", ["gaussian", "categorical", "bernoulli"])
@pytest.mark.parametrize("budget", [2**30, 2**10])
def test_solves_without_an_example_are_the_closed_form(budget: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """C (I − Λ C)⁻¹ is the covariance of a refit: also where Λ is singular (softmax), and whether rows of the examples
    fit the memory budget or are made anew for each product."""
    monkeypatch.setattr(lw.certify.reader, "TOLERANCE", {torch.float64: 1e-11})
    seed = budget % 7
    model, (x, y) = network(30 + seed, c=3), batch(30 + seed, kind, c=3)
    la = lw.laplace(model, (x, y), kind, structure="kron", prior=0.2)
    reader = Reader(la.state, la.prior, la.likelihood, as_batches((x, y)), False)
    reader.n = len(x)
    near = la.posterior
    new = new_inputs.left_out(
        reader, probe(la.tangent, reader.batches), near, 14, torch.Generator().manual_seed(seed), budget
    )
    assert (new.examples.rows is None) == (budget == 2**10)
    ends, _, _ = solved(reader, la.posterior.precision, new.j, new.extra(0), 2**30)
    J, hessian = jacobian(model, x), output_hessian(kind, model(x).detach(), ONE)
    K = torch.einsum("nap,nab,nbq->pq", J, hessian, J) + 0.2 * torch.eye(J.shape[-1]).double()
    for place, (one, _) in new.examples.held.items():
        n = int((x == one).all(-1).nonzero())
        u = torch.linalg.lstsq(J[n].mT, new.j[place].unsqueeze(-1)).solution.squeeze(-1)
        torch.testing.assert_close(u.abs(), torch.ones_like(u))  # signs
        C = J[n] @ torch.linalg.solve(K, J[n].mT)
        closed = C @ torch.linalg.inv(torch.eye(3) - hessian[n] @ C)
        refit = J[n] @ torch.linalg.solve(K - J[n].mT @ hessian[n] @ J[n], J[n].mT)
        torch.testing.assert_close(closed, refit, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(ends[0][place], u @ closed @ u, rtol=1e-8, atol=1e-10)


def test_leave_one_out_of_outputs_with_positions_leaves_all_positions_out() -> None:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()  # (n, q, 3) -> (n, q, 2)
    x, y = torch.randn(8, 5, 3, dtype=torch.float64), torch.randint(2, (8, 5))
    found = lw.laplace(model, (x, y), "categorical", structure="full", prior=0.1).certify(8)
    assert abs(found.variance.value) < 1e-8
    kron = lw.laplace(model, (x, y), "categorical", structure="kron", prior=0.1)
    J, hessian = jacobian(model, x.reshape(-1, 3)), output_hessian("categorical", model(x).detach().reshape(-1, 2), ONE)
    J, hessian = J.unflatten(0, (8, 5)), hessian.unflatten(0, (8, 5))
    ours, true = [], []
    for n in range(8):
        rest = torch.arange(8) != n
        P = lw.laplace(model, (x[rest], y[rest]), "categorical", structure="kron", prior=0.1).posterior.precision
        K = torch.einsum("nsap,nsab,nsbq->pq", J[rest], hessian[rest], J[rest]) + 0.1 * torch.eye(J.shape[-1]).double()
        rows = J[n].flatten(0, 1)
        for m, into in ((linalg.to_dense(P), ours), (K, true)):
            into.append((rows @ torch.linalg.inv(m) * rows).sum())
    expected = float(torch.stack(ours).sum() / torch.stack(true).sum() - 1)
    got = kron.certify(64).variance
    assert abs(got.value - expected) < 5 * got.standard_error


@pytest.mark.parametrize("batch_size", [5, 17])
def test_weighted_draws_of_a_pass_have_the_means_of_all_examples(batch_size: int) -> None:
    """Half of the draws are by sizes, and the weighted mean of anything is that over all examples."""
    n, k = 40, 4_000
    values, sizes = torch.arange(n, dtype=torch.float64), torch.logspace(-2, 2, n, dtype=torch.float64)
    batches = [(v.unsqueeze(-1), v) for v in values.split(batch_size)]
    found = sample(batches, lambda x, y: sizes[y.long()], k, ALONE, torch.Generator().manual_seed(0))
    drawn = torch.tensor([float(found.held[place][1]) for place in range(k)], dtype=torch.float64)
    assert torch.equal(drawn.long(), found.numbers)
    for of in (values, sizes, torch.ones(n, dtype=torch.float64)):
        each = of[found.numbers] * found.weights
        assert abs(float(each.mean() - of.mean())) < 4 * float(each.std()) / k**0.5
    expected = 0.5 / n + 0.5 * sizes / sizes.sum()
    counts = torch.bincount(found.numbers, minlength=n) / k
    assert bool(((counts - expected).abs() < 5 * (expected / k).sqrt()).all())
    torch.testing.assert_close(found.weights, 1 / (n * expected[found.numbers]))


def test_an_input_of_high_leverage_is_not_missed() -> None:
    """One of 400 inputs has nearly all of the variance left out: by 16 uniform draws it would be missed 24 times in
    25, and the structure found too wide."""
    model, (x, y) = network(27, c=1), batch(27, "gaussian", n=400, c=1)
    x = 0.1 * x
    x[7] = 30.0
    la = lw.laplace(model, (x, y), lw.likelihoods.Gaussian(0.05), structure="diag", prior=0.1)
    J, hessian = jacobian(model, x), output_hessian("gaussian", model(x).detach(), torch.tensor(0.05).double())
    expected = left_out(la, J, hessian)
    for seed in range(4):
        found = la.certify(16, generator=torch.Generator().manual_seed(seed))
        assert found.variance.interval[0] <= expected <= found.variance.interval[1]
        assert found.variance.value < -0.98
        assert any("one training input has" in note for note in found.notes)


@pytest.mark.parametrize("why", ["sampled", "dear"])
def test_a_structure_that_keeps_its_examples_says_so(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    factor = "monte_carlo" if why == "sampled" else "exact"
    la = lw.laplace(network(23), batch(23, "categorical"), "categorical", structure="block", factor=factor)
    if why == "dear":
        assert not any("keeps the examples" in note for note in la.certify(8).notes)
        monkeypatch.setattr("lapwing.certify.leave_one_out.WORK", 0)
    assert any("keeps the examples" in note for note in la.certify(8).notes)


def test_examples_that_run_as_one_batch_are_not_left_out() -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x - x.mean(0))

    x, y = batch(24, "gaussian")
    found = lw.laplace(Mixing(), (x, y), "gaussian", structure="diag").certify(8)
    assert found.variance is None
    assert "give inputs=" in found.notes[0]
    assert "not told" in repr(found)
    given = lw.laplace(Mixing(), (x, y), "gaussian", structure="diag").certify(8, inputs=x[:5])
    assert given.variance is not None
    assert not given.notes


def test_one_input_that_decides_is_told_of() -> None:
    model, (x, y) = network(25, c=1), batch(25, "gaussian", n=40, c=1)
    x[7] *= 40
    found = lw.laplace(model, (x, y), lw.likelihoods.Gaussian(0.01), structure="kron").certify(40)
    assert any("one training input has" in note for note in found.notes)


# -- convergence -------------------------------------------------------------------------------------------------


def stiff(seed: int, structure: str) -> tuple[Any, tuple[float, float, float]]:
    """Little noise and a weak prior: the structure alone is a poor preconditioner."""
    model, (x, y) = network(seed, h=40), batch(seed, "gaussian", n=200)
    sigma = torch.tensor(1e-4, dtype=torch.float64)
    la = lw.laplace(model, (x, y), lw.likelihoods.Gaussian(sigma), structure=structure, prior=1e-2)
    return la, truth(la, jacobian(model, x), output_hessian("gaussian", model(x).detach(), sigma))


@pytest.mark.parametrize("structure", ["kron", "diag"])
def test_a_stiff_problem_is_certified_in_few_passes(structure: str) -> None:
    la, dense = stiff(26, structure)
    found = la.certify(8)
    assert found.passes < 60
    assert found.residual < 1e-6
    assert not [note for note in found.notes if "stopped" in note or "settled" in note]
    assert_near(found, dense, 8.0, 1e-5)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_what_does_not_converge_is_answered_with_a_wider_interval(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lw.certify.comparison, "RANK", 0)  # no sketch
    la = lw.laplace(network(15), batch(15, "gaussian", n=30), "gaussian", structure="diag", prior=0.05)
    whole = la.certify(8, generator=torch.Generator().manual_seed(seed))
    monkeypatch.setattr(lw.certify.comparison, "LANCZOS_STEPS", 4)
    monkeypatch.setattr(lw.certify.reader, "CG_STEPS", 4)
    found = la.certify(8, generator=torch.Generator().manual_seed(seed))
    assert found.residual > 1e-6
    assert any("conjugate gradients stopped at a residual of" in note for note in found.notes)
    assert any("Lanczos has not settled in 4 steps" in note for note in found.notes)
    assert not whole.notes
    for name in ("variance", "variance_training", "log_det"):
        a, b = getattr(found, name), getattr(whole, name)
        assert a.interval[0] <= b.interval[0] + 1e-9
        assert a.interval[1] >= b.interval[1] - 1e-9
        assert a.interval[1] - a.interval[0] > b.interval[1] - b.interval[0]


# -- bad input ---------------------------------------------------------------------------------------------------


def test_it_asks_for_the_data_of_the_fit(tmp_path: Any) -> None:
    model, (x, y) = network(13), batch(13, "gaussian")
    la = lw.laplace(model, (x, y), "gaussian", structure="kron")
    la.save(tmp_path / "la.safetensors")
    loaded = lw.load(tmp_path / "la.safetensors", model)
    with pytest.raises(InvalidValue, match="pass data="):
        loaded.certify()
    assert loaded.certify(8, data=(x, y)).log_det.value == la.certify(8).log_det.value
    with pytest.raises(InvalidValue, match="14 examples and the data hold 9"):
        la.certify(8, data=(x[:9], y[:9]))


@pytest.mark.parametrize("probes", [0, 3, 8.0, "32"])
def test_too_few_probes(probes: Any) -> None:
    la = lw.laplace(network(14), batch(14, "gaussian"), "gaussian", structure="diag")
    with pytest.raises(InvalidValue, match="n_probes must be a whole number, at least 4"):
        la.certify(probes)


@pytest.mark.parametrize(
    ("inputs", "words"), [(torch.zeros(0, 3).double(), "no example"), (torch.full((2, 3), torch.nan).double(), "NaN")]
)
def test_inputs_that_say_nothing(inputs: Tensor, words: str) -> None:
    la = lw.laplace(network(14), batch(14, "gaussian"), "gaussian", structure="diag")
    with pytest.raises(InvalidValue, match=words):
        la.certify(8, inputs=inputs)


def test_weights_that_no_output_depends_on() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(3, 2).double(), nn.Parameter(torch.zeros(4, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    x, y = batch(16, "gaussian")
    la = lw.laplace(Idle(), (x, y), "gaussian", structure="kron")
    found = la.certify(8)  # one linear layer: Kronecker factors are exact
    exact = (found.log_det.value, found.variance_training.value, found.trace.value - 1)
    assert max(map(abs, exact)) < 1e-8
    only = lw.laplace(Idle(), (x, y), "gaussian", structure="diag", subset=["idle"])
    with pytest.raises(InvalidValue, match="no output depends on the selected weights"):
        only.certify(8)


# -- coverage ----------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.usefixtures("coarse")
@pytest.mark.filterwarnings("ignore:all 96 outputs lie in")  # of a network that is not trained, by chance
def test_intervals_cover_the_dense_truth_nine_times_in_ten() -> None:
    """24 networks and probes of their own; at 90 %, fewer than 17 hits have a chance of .2 % (binomial), and 96 of 96,
    for intervals that are too wide, of .004 %."""
    hits = {"trace": 0, "log_det": 0, "variance_training": 0, "variance": 0}
    for seed in range(24):
        kind = ("gaussian", "categorical", "bernoulli")[seed % 3]
        model, (x, y) = network(100 + seed, 2, 3, 3), batch(100 + seed, kind, 60, 2, 3)
        la = lw.laplace(model, (x, y), kind, structure="diag", prior=(0.5, 2.0)[seed % 2])
        J, hessian = jacobian(model, x), output_hessian(kind, model(x).detach(), ONE)
        dense = (*truth(la, J, hessian), left_out(la, J, hessian))
        generator = torch.Generator().manual_seed(1_000 + seed)
        found = la.certify(10, generator=generator)
        probed = probed_trace(la, 10, generator)
        for name, t in zip(hits, dense, strict=True):
            e = probed if name == "trace" else getattr(found, name)
            hits[name] += e.interval[0] <= t <= e.interval[1]
    assert all(n >= 17 for n in hits.values()), hits
    assert sum(hits.values()) < 96


def left_out(la: Any, J: Tensor, hessian: Tensor) -> float:
    """variance by leave-one-out over all inputs, of a diagonal structure, which is a sum over examples."""
    ours, prior = linalg.to_dense(la.posterior.precision), linalg.to_dense(la.prior.operator())
    each = torch.einsum("nap,nab,nbq->npq", J, hessian, J)
    K = each.sum(0) + prior
    P = [ours - torch.diag(one.diagonal()) for one in each]
    pairs = [
        torch.stack([(rows @ torch.linalg.inv(m) * rows).sum() for m in (p, K - one)])
        for rows, p, one in zip(J, P, each, strict=True)
    ]
    mine, true = torch.stack(pairs).sum(0)
    return float(mine / true - 1)


@pytest.mark.parametrize(("kind", "structure"), [("gaussian", "kron"), ("gaussian", "diag"), ("categorical", "diag")])
def test_a_corrected_fit_has_the_summed_variance_of_the_true_posterior(
    kind: str, structure: str, tmp_path: Any
) -> None:
    model, data = network(1), batch(1, kind, n=40)
    new = torch.randn(30, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    fits = [lw.laplace(model, data, kind, structure=one, prior=0.5) for one in (structure, "full")]
    before, true = (float(la.predict(new).f_var.sum()) for la in fits)
    found = fits[0].certify(64, inputs=new)
    mended = fits[0].corrected(found)
    factor = 1 + found.variance.value
    close(mended.predict(new).covariance, fits[0].predict(new).covariance / factor)
    assert abs(before / true - factor) < 4 * found.variance.standard_error
    assert abs(before / true - 1) > 4 * found.variance.standard_error  # there was something to correct
    close(mended.log_evidence(), fits[0].log_evidence())
    mended.save(tmp_path / "la")
    close(lw.load(tmp_path / "la", model).predict(new).f_var, mended.predict(new).f_var)


def test_a_certificate_of_another_fit_and_a_covariance_that_was_scaled_are_refused() -> None:
    model, (x, y) = network(1), batch(1, "categorical", n=40)
    kron, full = (lw.laplace(model, (x, y), "categorical", structure=one) for one in ("kron", "full"))
    found = kron.certify(8, inputs=x)
    with pytest.raises(InvalidValue, match="certificate of kron on 40 examples, and the fit is of full"):
        full.corrected(found)
    with pytest.raises(InvalidValue, match="scaled already"):
        kron.corrected(found).corrected(found)
    with pytest.raises(InvalidValue, match="does not tell variances"):
        kron.corrected(replace(found, variance=None))
