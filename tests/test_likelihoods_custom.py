"""A likelihood from its log-density alone: equal to those that are written out, or refused with the point at fault."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from helpers import close
from lapwing.errors import InvalidValue, Unsupported
from lapwing.likelihoods import Categorical, Custom, Poisson, StudentT


@dataclass(frozen=True)
class MyPoisson(Custom):
    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return (y * f - f.exp() - torch.lgamma(y + 1)).sum(-1)


@dataclass(frozen=True)
class MyCategorical(Custom):
    event: ClassVar[int] = 0

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return torch.log_softmax(f, -1).gather(-1, y.unsqueeze(-1)).squeeze(-1)


@dataclass(frozen=True)
class MyCauchy(Custom):
    """Not concave beyond one scale from y."""

    scale: Any = 1.0

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return -torch.log1p(((y - f) / self.scale.to(f)).square()).sum(-1) - math.log(math.pi)


@dataclass(frozen=True)
class MyStudent(Custom):
    concave: ClassVar[bool] = False

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return StudentT(0.7, 5.0).log_prob(f, y)

    def sample(self, f: Tensor, generator: torch.Generator) -> Tensor:
        return StudentT(0.7, 5.0).sample(f, generator)


def problem(outputs: int, n: int = 11) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double()
    return net, torch.randn(n, 3, dtype=torch.float64)


@pytest.mark.parametrize("structure", ["full", "kron", "diag", "block", "matrix_free"])
@pytest.mark.parametrize("kind", ["poisson", "categorical"])
def test_derivatives_of_a_density_are_those_written_out(structure: str, kind: str) -> None:
    """Canonical links: the Hessian is the same whatever y, so all of the posterior and the evidence is equal."""
    net, x = problem(3)
    known, own = (Poisson(), MyPoisson()) if kind == "poisson" else (Categorical(), MyCategorical())
    with torch.no_grad():
        y = known.sample(net(x), torch.Generator().manual_seed(0))
    a = lw.laplace(net, (x, y), own, structure=structure, factor="exact")
    b = lw.laplace(net, (x, y), known, structure=structure, factor="exact")
    v = torch.randn(2, a.state.layout.size, dtype=torch.float64)
    close(lw.operators.linalg.mv(a.posterior.precision, v), lw.operators.linalg.mv(b.posterior.precision, v))
    if structure != "matrix_free":
        close(a.log_evidence(), b.log_evidence())
    if structure == "kron":
        close(a.recentered().log_evidence(), b.recentered().log_evidence())
    close(own.score(net(x), y), known.score(net(x), y))


def test_a_point_where_it_is_not_concave_is_named() -> None:
    net, x = problem(1)
    with torch.no_grad():
        y = net(x) + 0.2
    y[6] += 3.0
    with pytest.raises(InvalidValue, match=r"not concave in f.*row 6 of a batch, f = \[.*\], y = \["):
        lw.laplace(net, (x, y), MyCauchy(1.0))
    assert MyCauchy(1.0).factors == ("exact",)
    y[6] -= 3.0
    la = lw.laplace(net, (x, y), MyCauchy(1.0))  # concave at these data
    assert math.isfinite(float(la.log_evidence()))
    with pytest.raises(InvalidValue, match="fit again"):
        la.replace(likelihood=MyCauchy(2.0))  # fields are settings


def test_without_concavity_the_factor_is_sampled() -> None:
    """Monte-Carlo Fisher by `sample`, which tends to the Fisher information that is known here."""
    net, x = problem(2, n=30)
    with torch.no_grad():
        y = MyStudent().sample(net(x), torch.Generator().manual_seed(0))
    la = lw.laplace(net, (x, y), MyStudent(), structure="full")
    assert la.state.factor.kind == "monte_carlo"
    many = lw.laplace(net, (x, y), MyStudent(), structure="diag", factor=lw.curvature.Factor("monte_carlo", 600))
    exact = lw.laplace(net, (x, y), StudentT(0.7, 5.0), structure="diag")
    found, true = (lw.operators.linalg.diagonal(one.posterior.precision) for one in (many, exact))
    assert float((found / true - 1).abs().max()) < 5 * math.sqrt(3 / 600)  # of squares of scores, kurtosis below 4
    for verb in (lambda: lw.laplace(net, (x, y), MyStudent(), factor="exact"), la.tuned):
        with pytest.raises(Unsupported, match=r"not concave"):
            verb()


def test_neither_concave_nor_sampled_is_an_error() -> None:
    @dataclass(frozen=True)
    class Lost(MyStudent):
        sample = Custom.sample

    net, x = problem(2)
    with pytest.raises(Unsupported, match="no sample method"):
        lw.laplace(net, (x, torch.zeros(11, 2, dtype=torch.float64)), Lost())


def test_densities_that_are_no_densities_are_named() -> None:
    @dataclass(frozen=True)
    class Summed(Custom):
        def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
            return -(y - f).square().sum()

    f, y = torch.zeros(3, 2), torch.ones(3, 2)
    with pytest.raises(InvalidValue, match=r"one number for each row of outputs, \(3,\)"):
        Summed().validate(f, y)
    with pytest.raises(InvalidValue, match="log_prob is -inf at row 1"):
        MyPoisson().validate(f, torch.tensor([[1.0, 1.0], [-1.0, 0.0], [2.0, 3.0]]))


def test_positions_and_files(tmp_path: Path) -> None:
    net, x = problem(3)
    y = torch.randint(3, (11,))
    whole = lw.laplace(net, (x[:10].reshape(5, 2, 3), y[:10].reshape(5, 2)), MyCategorical(), structure="full")
    flat = lw.laplace(net, (x[:10], y[:10]), "categorical", structure="full")
    close(whole.log_evidence(), flat.log_evidence())
    whole.save(tmp_path / "file")
    back = lw.load(tmp_path / "file", net)
    assert torch.equal(back.log_evidence(), whole.log_evidence())
    assert isinstance(back.likelihood, MyCategorical)
