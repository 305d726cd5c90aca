"""A network that applies the likelihood's softmax or sigmoid itself is not fitted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.errors import InvalidValue, LapwingWarning


class Ending(nn.Module):
    """A linear map with a function at its end."""

    def __init__(self, function: Any, outputs: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.act, self.linear, self.function = nn.Tanh(), nn.Linear(4, outputs).double(), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(self.act(x)))


def inputs(n: int = 20) -> Tensor:
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def labels(n: int = 20, classes: int = 3) -> Tensor:
    return torch.arange(n) % classes


SOFTMAX = {
    "module": nn.Softmax(-1),
    "function": lambda f: torch.softmax(f, -1),
    "by hand": lambda f: f.exp() / f.exp().sum(-1, keepdim=True),
    "mixed": lambda f: 0.9 * torch.softmax(f, -1) + 0.1 / 3,
}


@pytest.mark.parametrize("structure", ["full", "kron", "ekfac", "diag", "matrix_free"])
def test_a_softmax_is_refused_by_every_structure(structure: str) -> None:
    with pytest.raises(InvalidValue, match=r"would pass a softmax twice; take the softmax out"):
        lw.laplace(Ending(nn.Softmax(-1)), (inputs(), labels()), "categorical", structure=structure)


@pytest.mark.parametrize("kind", SOFTMAX)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_softmax_is_known_by_its_values(kind: str, dtype: torch.dtype) -> None:
    model = Ending(SOFTMAX[kind]).to(dtype)
    with pytest.raises(InvalidValue, match="softmax twice"):
        lw.laplace(model, (inputs().to(dtype), labels()), "categorical")
    weighted = lw.likelihoods.ClassWeighted(weights=(1.0, 2.0, 3.0))
    with pytest.raises(InvalidValue, match="softmax twice"):
        lw.laplace(model, (inputs().to(dtype), labels()), weighted)


def test_one_example_is_enough_where_the_graph_tells() -> None:
    with pytest.raises(InvalidValue, match="softmax twice"):
        lw.laplace(Ending(nn.Softmax(-1)), (inputs(2), labels(2)), "categorical")
    lw.laplace(Ending(SOFTMAX["by hand"]), (inputs(2), labels(2)), "categorical")  # two rows could be chance


@pytest.mark.parametrize("function", [nn.Sigmoid(), torch.sigmoid, lambda f: torch.sigmoid(f).unsqueeze(1).squeeze(1)])
def test_a_sigmoid_is_refused(function: Any) -> None:
    y = (labels()[:, None] > torch.arange(3)).double()
    with pytest.raises(InvalidValue, match=r"lie in \[0, 1\].*take it out of the network"):
        lw.laplace(Ending(function), (inputs(), y), "bernoulli")


def test_outputs_that_may_be_a_sigmoids_are_a_warning() -> None:
    y = (labels()[:, None] > torch.arange(3)).double()
    with pytest.warns(LapwingWarning, match=r"all 60 outputs lie in \[0, 1\]"):
        lw.laplace(
            Ending(lambda f: torch.sigmoid(f).clamp(1e-3, 1 - 1e-3)), (inputs(), y), "bernoulli", structure="ekfac"
        )
    lw.laplace(Ending(lambda f: torch.sigmoid(f).clamp(1e-3, 1 - 1e-3)), (inputs(4), y[:4]), "bernoulli")  # too few


def test_logits_and_log_probabilities_are_fitted() -> None:
    y = (labels()[:, None] > torch.arange(3)).double()
    for function in (nn.Identity(), nn.LogSoftmax(-1), nn.Sigmoid()):  # a sigmoid's outputs are logits like others
        lw.laplace(Ending(function), (inputs(), labels()), "categorical")
    lw.laplace(Ending(lambda f: 4 * torch.sigmoid(f) - 2), (inputs(), y), "bernoulli")
    lw.laplace(Ending(nn.Softmax(-1)), (inputs(), y), "gaussian")


def test_what_to_do_works() -> None:
    model = Ending(nn.Softmax(-1))
    la = lw.laplace(model, (inputs(), labels()), "categorical", forward=lambda model, x: model(x).log())
    plain = lw.laplace(Ending(nn.Identity()), (inputs(), labels()), "categorical")
    torch.testing.assert_close(la.log_evidence(), plain.log_evidence())
