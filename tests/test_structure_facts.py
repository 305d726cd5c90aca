"""Structures and operators say what is special about them, and own what they factorize.

No room asks for their class: a structure of a user's own, which says other facts, is treated by what it says.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.curvature.full import DualRows
from lapwing.curvature.rows import StreamedRows
from lapwing.errors import InvalidValue, LapwingWarning
from lapwing.operators import Blocks, Dense, Diagonal, RootPlusDiagonal, linalg

FACTORIZATIONS = ("eigvalsh", "eigh", "cholesky", "cholesky_ex", "qr")


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def data(n: int = 7, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(n, d, generator=generator, dtype=torch.float64) for d in (3, 2))  # type: ignore[return-value]


def rows_of(net: nn.Module, x: Tensor) -> Tensor:
    """J (n·c, p) by autograd, one output at a time."""
    out = [torch.autograd.grad(f, list(net.parameters()), retain_graph=True) for f in net(x).reshape(-1)]
    return torch.stack([torch.cat([g.reshape(-1) for g in row]) for row in out])


# -- factorizations have an owner --------------------------------------------------------------------------------------


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often torch was asked for each factorization."""
    count: Counter[str] = Counter()
    for name in FACTORIZATIONS:
        real = getattr(torch.linalg, name)

        def counted(*args: Any, _name: str = name, _real: Callable[..., Any] = real, **kwargs: Any) -> Any:
            count[_name] += 1
            return _real(*args, **kwargs)

        monkeypatch.setattr(torch.linalg, name, counted)
    return count


@pytest.mark.parametrize("structure", ["kron", "block", "full", lw.curvature.Full("dual"), lw.curvature.LowRank(5)])
def test_other_priors_and_noises_factorize_nothing_again(structure: Any, made: Counter[str]) -> None:
    la = lw.laplace(network(), data(), lw.likelihoods.Gaussian(0.5), structure=structure)

    def slope(precision: float, noise: float) -> None:
        values = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (precision, noise)]
        prior, likelihood = lw.priors.Gaussian(values[0]), lw.likelihoods.Gaussian(values[1])
        bound = prior.bind(la.state.layout)
        torch.autograd.grad(lw.evidence.log_evidence(la.state, bound, likelihood), values)

    slope(1.0, 0.5)
    assert sum(made.values()) > 0
    made.clear()
    slope(3.0, 0.2)
    slope(0.3, 2.0)
    assert not made


def test_a_state_of_other_sums_remembers_nothing(made: Counter[str]) -> None:
    one, other = (lw.laplace(network(), data(7, seed), "gaussian", structure="full") for seed in (1, 2))
    float(one.log_evidence())
    both = one.state + other.state
    assert both.memo is not one.state.memo
    made.clear()
    found = lw.evidence.log_evidence(both, one.prior, one.likelihood)
    assert made
    x, y = (torch.cat(parts) for parts in zip(data(7, 1), data(7, 2), strict=True))
    expected = lw.laplace(network(), (x, y), "gaussian", structure="full").log_evidence()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=0.0)


def test_no_class_of_these_rooms_keeps_an_untyped_cache() -> None:
    kinds = [getattr(room, name) for room in (lw.operators, lw.curvature) for name in room.__all__]
    for kind in kinds:
        if isinstance(kind, type) and hasattr(kind, "__dataclass_fields__"):
            assert not [f.name for f in fields(kind) if f.type == "dict[Any, Any]"], kind


def test_jitter_is_that_of_the_block_that_took_most() -> None:
    u = torch.tensor([[1.0, 1.0, 1.0 + 1e-9]], dtype=torch.float64).mT * 1e8
    flat = Dense(u @ u.mT, diag=Diagonal(torch.tensor([1e-3], dtype=torch.float64), 3))
    sound = Diagonal(torch.ones(2, dtype=torch.float64), 2)
    blocks = Blocks((sound, flat), (torch.arange(2), torch.arange(2, 5)))
    assert linalg.jitter(blocks) == linalg.jitter(sound) == 0.0
    with pytest.warns(LapwingWarning, match="jitter"):
        linalg.solve(blocks, torch.ones(5, dtype=torch.float64))
    assert linalg.jitter(blocks) == linalg.jitter(flat) > 0.0


# -- a structure of one's own ------------------------------------------------------------------------------------------


@lw.curvature.register
@dataclass(frozen=True)
class OwnRows(lw.curvature.Structure):
    """The whole curvature by its rows, as a user may write it: it keeps the data, and is exact."""

    bound: ClassVar[str] = "exact"
    label: str = "mine"

    @property
    def keeps_rows(self) -> bool:
        return True

    def resolved(self, probe: Any, factor: Any) -> OwnRows:
        return self

    def start(self, tangent: Any, likelihood: Any, factor: Any, probe: Any) -> DualRows:
        return DualRows(tangent, likelihood.paired)

    def operator(self, state: lw.curvature.State, weights: Tensor) -> RootPlusDiagonal:
        rows = StreamedRows(state.tangent, state.batches, self.memory_budget)
        return RootPlusDiagonal(rows, Diagonal(weights, rows.shape[0]))

    def coverage(self, parts: Any, tangent: Any) -> dict[str, str]:
        return dict.fromkeys(tangent.layout.names, "its rows")


@lw.curvature.register
@dataclass(frozen=True)
class Silent(OwnRows):
    """The same, but it does not say that it keeps its rows."""

    @property
    def keeps_rows(self) -> bool:
        return False


def test_a_structure_of_ones_own_is_saved_and_loaded_with_its_rows(tmp_path: Path) -> None:
    net, (x, y) = network(), data()
    la = lw.laplace(net, (x, y), lw.likelihoods.Gaussian(0.5), prior=2.0, structure=OwnRows("yours"))
    la.save(tmp_path / "la")
    back = lw.load(tmp_path / "la", network())
    assert back.state.structure == OwnRows("yours")
    assert back.decompose(center="map").bound == "exact"
    J, at = rows_of(net, x), rows_of(net, x[:2] + 0.1)
    S = torch.linalg.inv(J.mT @ J / 0.5**2 + 2.0 * torch.eye(J.shape[1], dtype=torch.float64))
    expected = torch.einsum("mp,pq,mq->m", at, S, at).reshape(2, 2)
    torch.testing.assert_close(back.predict(x[:2] + 0.1).f_var, expected, rtol=1e-9, atol=0.0)


def test_rows_that_a_structure_does_not_speak_of_are_not_saved(tmp_path: Path) -> None:
    la = lw.laplace(network(), data(), "gaussian", structure=Silent())
    with pytest.raises(InvalidValue, match="holds 1 batches of data"):
        la.save(tmp_path / "la")


def test_a_class_that_is_no_structure_is_refused() -> None:
    class Plain:
        def resolved(self, probe: Any, factor: Any) -> Plain:
            return self

    net, likelihood = network(), lw.likelihoods.Gaussian()
    for wrong in (Plain(), lw.curvature.Kronecker, "kron", None):
        with pytest.raises(InvalidValue, match=r"lw\.curvature\.Structure"):
            lw.accumulate(wrong, lw.linearize(net), likelihood, data())
    for wrong in (Plain(), lw.curvature.Kronecker):
        with pytest.raises(InvalidValue, match="structure must be"):
            lw.laplace(net, data(), likelihood, structure=wrong)


# -- what the house's own say ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_evidence_is_on_the_side_that_the_structure_says(seed: int) -> None:
    net, (x, y) = network(seed), data(7, seed)

    def evidence(structure: Any) -> tuple[float, str]:
        la = lw.laplace(net, (x, y), lw.likelihoods.Gaussian(0.5), prior=2.0, structure=structure)
        found = la.decompose(center="map")
        assert found.bound.split(" ")[0] in (la.state.structure.bound, "an")
        return float(found.log_evidence), la.state.structure.bound

    full, _ = evidence("full")
    sides = {"exact": lambda gap: abs(gap) < 1e-9, "lower": lambda gap: gap < 0, "upper": lambda gap: gap > 0}
    for structure in ("full", lw.curvature.Full("dual"), "block", "diag", lw.curvature.LowRank(3)):
        value, bound = evidence(structure)
        assert sides[bound](value - full), structure


@pytest.mark.parametrize("structure", ["kron", "full", lw.curvature.MatrixFree(samples=4)])
def test_only_what_streams_keeps_draws_and_estimates(structure: Any) -> None:
    la = lw.laplace(network(), data(), "gaussian", structure=structure)
    precision, streams = la.posterior.precision, la.state.structure.streams
    assert streams is (str(la.state.structure) == "matrix_free")
    assert (linalg.log_determinant(precision) is not None) is streams
    kept = linalg.kept_draws(precision, 3)
    assert (kept is not None) is streams
    assert linalg.kept_draws(precision, 5) is None
    if kept is not None:
        torch.testing.assert_close(la.posterior.draw(3), la.posterior.mean + kept)
    v = torch.ones(precision.size, dtype=torch.float64)
    torch.testing.assert_close(linalg.mv(linalg.gathered(precision), v), linalg.mv(precision, v))


# -- many examples -----------------------------------------------------------------------------------------------------


def test_of_many_examples_kronecker_factors_sample_one_column() -> None:
    """Also what that costs: the factors, the evidence and the error bars of the exact factor, to a few percent."""
    n = lw.curvature.Kronecker.samples_past
    assert n is not None
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5)).double()
    x = torch.randn(n + 1, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = (2 * net(x).detach()).argmax(1)
    few, many = (lw.laplace(net, (x[:m], y[:m]), "dirichlet", structure="kron") for m in (n, n + 1))
    exact = lw.laplace(net, (x, y), "dirichlet", structure="kron", factor="exact")
    assert few.state.factor.kind == "exact"
    assert "exact factor" in repr(few)
    assert many.state.factor == lw.curvature.Factor("monte_carlo", 1)
    assert "monte_carlo (1 sample) factor" in repr(many)
    for key, want in exact.state.sums.items():
        assert float((many.state.sums[key] - want).norm() / want.norm()) < 0.03, key
    assert float(many.log_evidence() / exact.log_evidence() - 1) == pytest.approx(0, abs=1e-3)
    ratio = many.predict(x[:50]).f_var / exact.predict(x[:50]).f_var
    assert float(ratio.min()) > 0.9
    assert float(ratio.max()) < 1.1


@pytest.mark.parametrize(
    ("structure", "likelihood"),
    [("block", "gaussian"), ("diag", "gaussian"), ("full", "gaussian"), ("kron", lw.likelihoods.Gaussian([0.1, 0.2]))],
)
def test_what_is_exact_or_told_apart_by_output_samples_nothing(structure: str, likelihood: Any, small: None) -> None:
    assert lw.laplace(network(), data(7), likelihood, structure=structure).state.factor.kind == "exact"


def test_one_output_has_one_column_already(small: None) -> None:
    x, y = data(7)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    assert lw.laplace(net, (x, y[:, :1]), "gaussian", structure="kron").state.factor.kind == "exact"
    assert lw.laplace(network(), (x, y), "gaussian", structure="kron").state.factor.samples == 1


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven examples are many."""
    monkeypatch.setattr(lw.curvature.Kronecker, "samples_past", 6)


def test_inputs_of_one_layer_at_a_time_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """A convolution's, each position's patch, are many times its input: those of all layers at once filled memory."""
    from lapwing.curvature.capture import Record

    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 2, 3, padding=1) for _ in range(4)]
    net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 2)).double()
    x, y = torch.randn(5, 2, 4, 4, dtype=torch.float64), torch.randint(2, (5,))
    alive: list[weakref.ref[Any]] = []
    most, made = 0, Record.view

    def watched(record: Record, part: Any) -> Any:
        nonlocal most
        most = max(most, sum(one() is not None for one in alive))
        view = made(record, part)
        alive.append(weakref.ref(view))
        return view

    la = lw.laplace(net, (x, y), "categorical", structure="kron")
    monkeypatch.setattr(Record, "view", watched)
    lw.accumulate(lw.curvature.Kronecker(), la.tangent, la.likelihood, (x, y))
    fitting, most = most, 0
    la.predict(x)
    assert fitting <= 1
    assert most <= 1
