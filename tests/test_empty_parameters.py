"""A parameter without elements changes nothing: the fit is that of the network without it, and coverage says so."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import helpers
import lapwing as lw

C = lw.curvature
STRUCTURES: dict[str, Callable[[], Any]] = {
    "kron": lambda: "kron",
    "reduce": lambda: C.Kronecker(sharing="reduce"),
    "block": lambda: "block",
    "ekfac": lambda: "ekfac",
    "diag": lambda: "diag",
    "primal": lambda: C.Full("primal"),
    "dual": lambda: C.Full("dual"),
    "lowrank": lambda: C.LowRank(6),
    "two passes": lambda: C.LowRank(6, passes=2),
    "matrix_free": lambda: C.MatrixFree(samples=4),
}
EMPTY = {"none", "wide", "into.weight", "into.bias", "back.weight"}


class Net(nn.Module):
    """3 → 4 → 2; with `empty`, also through a layer of no units, whose bias alone has elements."""

    def __init__(self, empty: bool) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)
        self.empty = empty
        if empty:
            self.none = nn.Parameter(torch.empty(0))
            self.wide = nn.Parameter(torch.empty(3, 0, 2))  # that nothing uses
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Initializing zero-element tensors")
                self.into, self.back = nn.Linear(4, 0), nn.Linear(0, 4)
            self.back.bias.requires_grad_(False).zero_()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        if self.empty:
            h = h + self.back(self.into(h)) + self.none.sum()
        return self.last(self.norm(h))


def networks() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain, empty = Net(False).double(), Net(True).double()
    empty.load_state_dict(plain.state_dict(), strict=False)
    return plain, empty


def data(n: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(n, c, generator=generator, dtype=torch.float64) for c in (3, 2))  # type: ignore[return-value]


close = partial(helpers.close, absolute=1e-10)


PRIORS: dict[str, Callable[[], Any]] = {
    "one": lambda: 0.7,
    "layerwise": lambda: "layerwise",
    "unit": lambda: lw.priors.Gaussian(0.7, per="unit"),
    "weight": lambda: lw.priors.Gaussian(0.7, per="weight"),
    "groups": lambda: {"first.*": 0.5, "norm.*": 1.0, "last.*": 2.0},
    "gprior": lambda: "gprior",
}
REFUSED = {("kron", "weight"), ("reduce", "weight"), ("ekfac", "weight"), ("ekfac", "unit"), ("ekfac", "gprior")}


@pytest.mark.parametrize(("structure", "prior"), [(s, p) for s in STRUCTURES for p in PRIORS if (s, p) not in REFUSED])
def test_the_fit_is_that_without_it(structure: str, prior: str) -> None:
    plain, empty = (
        lw.laplace(net, data(), "gaussian", structure=STRUCTURES[structure](), prior=PRIORS[prior]())
        for net in networks()
    )
    close(empty.log_evidence(), plain.log_evidence())
    close(empty.predict(data()[0]).covariance, plain.predict(data()[0]).covariance)
    close(empty.posterior.draw(2), plain.posterior.draw(2))
    assert {n for n, said in empty.coverage.items() if said == "no elements"} == EMPTY
    assert empty.coverage["back.bias"] == "frozen"
    assert {n: said for n, said in empty.coverage.items() if n in plain.coverage} == plain.coverage


@pytest.mark.parametrize("structure", STRUCTURES)
def test_it_is_tuned_saved_updated_and_taken_out(structure: str, tmp_path: Path) -> None:
    (x, y), found = data(12), []
    for net in networks():
        la = lw.laplace(net, (x, y), lw.likelihoods.Gaussian(0.5), structure=STRUCTURES[structure]())
        la.tuned()
        la.save(tmp_path / "la.safetensors")
        back = lw.load(tmp_path / "la.safetensors", net)
        assert back.coverage == la.coverage
        if structure != "matrix_free":
            found.append([back.log_evidence(), la.without((x[8:], y[8:])).log_evidence()])
            found[-1].append(la.updated((x[:3], y[:3])).log_evidence())
    for mine, theirs in zip(*found, strict=True) if found else ():
        close(mine, theirs)


def test_last_layers_and_check_ups() -> None:
    _, net = networks()
    assert lw.laplace(net, data(), "gaussian", subset="last_layer").state.layout.names == ("last.weight", "last.bias")
    said = str(lw.doctor(net, data(), "gaussian"))
    assert "nan" not in said
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Initializing zero-element tensors")
        head = nn.Sequential(nn.Linear(3, 0), nn.Linear(0, 2)).double()
    la = lw.laplace(head, data(), "gaussian", subset="last_layer")
    assert la.state.layout.names == ("1.bias",)
    assert torch.isfinite(la.log_evidence())


@pytest.mark.parametrize("subset", [["none"], ["none", "wide"], ["into.*"], {"none": torch.ones(0, dtype=torch.bool)}])
def test_nothing_but_such_parameters_is_refused(subset: Any) -> None:
    with pytest.raises(lw.errors.InvalidValue, match="nothing to be Bayesian about"):
        lw.laplace(networks()[1], data(), "gaussian", subset=subset)


def test_a_network_of_nothing_else_is_refused() -> None:
    net = nn.Module()
    net.none = nn.Parameter(torch.empty(0))
    with pytest.raises(lw.errors.InvalidValue, match="no elements"):
        lw.laplace(net, data(), "gaussian")
