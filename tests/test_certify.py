"""The certificate against dense algebra: J by torch.func, G, K⁻¹ and log-determinants as matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.certify import Reader, _trace, certify
from lapwing.errors import InvalidValue, NotConverged
from lapwing.operators import linalg
from lapwing.solvers import slq

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
    """trace, log_det and variance; only our own precision comes from the package."""
    ours, prior = linalg.to_dense(la.posterior.precision), linalg.to_dense(la.prior.operator())
    G = torch.einsum("nap,nab,nbq->pq", J, hessian, J)
    rows = J.flatten(0, 1)
    mine, true = ((rows * torch.linalg.solve(m, rows.mT).mT).sum() for m in (ours, G + prior))
    gap = torch.logdet(ours) - torch.logdet(G + prior)
    return float((ours - prior).trace() / G.trace()), float(gap), float(mine / true - 1)


def assert_near(
    certificate: lw.certify.Certificate, dense: tuple[float, float, float], z: float = 5.0, rounding: float = 1e-8
) -> None:
    estimates = (certificate.trace, certificate.log_det, certificate.variance)
    for name, e, t in zip(("trace", "log_det", "variance"), estimates, dense, strict=True):
        assert abs(e.value - t) <= z * e.standard_error + rounding * max(1, abs(t)), (
            name,
            e.value,
            t,
            e.standard_error,
        )


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
    for e, exact in ((found.trace, 1.0), (found.log_det, 0.0), (found.variance, 0.0)):
        assert abs(e.value - exact) < 1e-8
        assert e.standard_error < 1e-8
    assert found.passes <= 6
    assert "error bars are right" in repr(found)


def test_noise_per_output_and_a_prior_per_layer() -> None:
    model, (x, y) = network(2, c=3), batch(2, "gaussian", c=3)
    sigma = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)
    la = lw.laplace(model, (x, y), lw.likelihoods.Gaussian(sigma), structure="diag", prior={"0.*": 0.5, "2.*": 4.0})
    dense = truth(la, jacobian(model, x), output_hessian("gaussian", model(x).detach(), sigma))
    assert_near(la.certify(64), dense)
    probed = _trace(Reader(la.state, la.prior, la.likelihood, la.data, False), 64, torch.Generator(), 2**20, False)
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
    assert abs(whole.variance.value - shuffled.variance.value) < 5 * whole.variance.standard_error


def test_probes_in_groups_are_the_same_probes() -> None:
    la = lw.laplace(network(8), batch(8, "gaussian"), "gaussian", structure="diag")
    few = lw.laplace(network(8), batch(8, "gaussian"), "gaussian", structure="diag", memory_budget=2**16)
    together, apart = la.certify(16), few.certify(16)
    assert apart.passes > together.passes
    away = (together.log_det.samples - apart.log_det.samples).abs().max()
    assert float(away) < 0.1 * float(together.log_det.samples.std())


def test_lanczos_vectors_that_do_not_fit_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them give the same log-determinant, in more steps."""
    kept: list[int] = []

    def watched(*arguments: Any) -> Any:
        kept.append(arguments[-1])
        return slq(*arguments)

    monkeypatch.setattr("lapwing.certify.slq", watched)
    data = batch(8, "gaussian")
    la = lw.laplace(network(8), data, "gaussian", structure="diag")
    found = [certify(la.state, la.prior, la.likelihood, data, 4, memory_budget=budget) for budget in (2**20, 2**12)]
    assert kept[0] > 1_000
    assert kept[1] == 2
    away = (found[0].log_det.samples - found[1].log_det.samples).abs().max()
    assert float(away) < 0.1 * float(found[0].log_det.samples.std())


def test_standard_errors_fall_with_the_root_of_the_probes() -> None:
    la = lw.laplace(network(9), batch(9, "gaussian", n=30), "gaussian", structure="diag", prior=0.5)
    few, many = la.certify(32), la.certify(128)
    for a, b in ((few.log_det, many.log_det), (few.variance, many.variance)):
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
    model, (x, y) = network(12), batch(12, "gaussian", n=30)
    la = lw.laplace(model, (x, y), lw.likelihoods.Gaussian(0.1), structure="diag", prior=0.1)
    found = la.certify(64)
    text, html = repr(found), found._repr_html_()
    assert found.variance.interval[0] > 0
    assert found.log_det.interval[0] > 0  # Hadamard
    wide = f"error bars are {100 * ((1 + found.variance.value) ** 0.5 - 1):.1f} % too wide ("
    lower = f"the log evidence is {found.log_det.value / 2:.3g} nats lower than with the true curvature ("
    for words in ("diag", "64 probes", f"{found.passes} passes", "(exact)", wide, lower):
        assert words in text
        assert words in html
    assert max(map(len, text.splitlines())) < 160


@pytest.mark.parametrize(
    ("value", "interval", "words"),
    [
        (0.7744, (0.75, 0.8), "error bars are 12.0 % too narrow (10.6 to 13.4 %)"),
        (1.21, (1.1, 1.33), "error bars are 10.0 % too wide (4.9 to 15.3 %)"),
        (1.21, (0.9, 1.6), "error bars are 10.0 % too wide, which may be chance"),
        (1.0, (0.999, 1.001), "error bars are right"),
    ],
)
def test_error_bars_are_square_roots_of_variances(value: float, interval: tuple[float, float], words: str) -> None:
    e = lw.solvers.Estimate(value, 0.02, interval, torch.ones(32)) - 1
    assert words in repr(lw.certify.Certificate(e, e, e, 32, 40, 1e-7, "kron"))


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


def test_a_solve_that_does_not_converge_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    la = lw.laplace(network(15), batch(15, "gaussian", n=30), "gaussian", structure="diag", prior=1e-3)
    monkeypatch.setattr(lw.certify, "MAX_STEPS", 2)
    monkeypatch.setattr(lw.certify, "_log_det", lambda *_: None)
    with pytest.raises(NotConverged, match=r"raise the prior precision, use a closer structure"):
        la.certify(8)


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
    assert abs(found.log_det.value) + abs(found.variance.value) + abs(found.trace.value - 1) < 1e-8
    only = lw.laplace(Idle(), (x, y), "gaussian", structure="diag", subset=["idle"])
    with pytest.raises(InvalidValue, match="no output depends on the selected weights"):
        only.certify(8)


# -- coverage ----------------------------------------------------------------------------------------------------


def test_intervals_cover_the_dense_truth_nine_times_in_ten() -> None:
    """60 networks and probes of their own; at 90 %, fewer than 45 hits have a chance of 0.03 % (binomial), and 60 of
    60, for an interval that is too wide, of 0.2 %."""
    hits = {"trace": 0, "log_det": 0, "variance": 0}
    for seed in range(60):
        kind = ("gaussian", "categorical", "bernoulli")[seed % 3]
        structure = ("kron", "diag", "block")[seed // 3 % 3]
        model, (x, y) = network(100 + seed, 2, 3, 3), batch(100 + seed, kind, 12, 2, 3)
        la = lw.laplace(model, (x, y), kind, structure=structure, prior=(0.5, 2.0)[seed % 2])
        dense = truth(la, jacobian(model, x), output_hessian(kind, model(x).detach(), ONE))
        generator = torch.Generator().manual_seed(1_000 + seed)
        found = la.certify(16, generator=generator)
        reader = Reader(la.state, la.prior, la.likelihood, la.data, False)
        probed = _trace(reader, 16, generator, la.memory_budget, exact=False)
        for name, e, t in zip(hits, (probed, found.log_det, found.variance), dense, strict=True):
            hits[name] += e.interval[0] <= t <= e.interval[1]
    assert all(45 <= n <= 59 for n in hits.values()), hits
