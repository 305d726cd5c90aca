"""Networks and a precision policy for the tests against peers (`make test-peers`).

The peers are installed without their dependencies' pins: laplace-torch 0.3 asks for torchvision and for one older
alpha of asdfghjkl. Neither is needed here. Only BackPACK's `utils.examples` imports torchvision, and nothing that
laplace-torch or curvlinops imports reaches it; asdfghjkl serves backends that these tests do not call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


@dataclass(frozen=True)
class Case:
    """A briefly trained float64 network with its data: unequal widths, a short last batch, unseen inputs."""

    name: str
    model: nn.Module
    inputs: Tensor
    targets: Tensor
    unseen: Tensor
    likelihood: str  # in Lapwing's words

    @property
    def loader(self) -> DataLoader:
        return DataLoader(TensorDataset(self.inputs, self.targets), batch_size=7)  # not a divisor of n

    @property
    def theirs(self) -> str:
        """The likelihood in laplace-torch's words."""
        return {"gaussian": "regression", "categorical": "classification"}[self.likelihood]

    @property
    def last(self) -> list[str]:
        """Names of the last layer's parameters."""
        owner = [n for n, _ in self.model.named_parameters()][-1].rpartition(".")[0]
        return [n for n, _ in self.model.named_parameters() if n.rpartition(".")[0] == owner]


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    """laplace-torch multiplies its operators by `torch.eye(p)` in the *default* dtype, so a float64 network needs
    float64 as the default. Lapwing does not look at the default."""
    before, threads = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    yield
    torch.set_default_dtype(before)
    torch.set_num_threads(threads)


def _trained(model: nn.Module, x: Tensor, y: Tensor, loss: nn.Module, steps: int = 60) -> nn.Module:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    model.zero_grad()
    return model.eval()


def regressor(seed: int, bias: bool = True) -> Case:
    """A tanh MLP with two outputs, 3-7-5-2."""
    torch.manual_seed(seed)
    x = torch.randn(40, 3)
    clean = torch.stack([torch.sin(x[:, 0]) + x[:, 1], x[:, 2].square() - x[:, 0]], 1)
    y = clean + 0.2 * torch.randn(40, 2)
    model = nn.Sequential(
        nn.Linear(3, 7, bias=bias), nn.Tanh(), nn.Linear(7, 5, bias=bias), nn.Tanh(), nn.Linear(5, 2, bias=bias)
    )
    return Case("regressor", _trained(model, x, y, nn.MSELoss()), x, y, 2 * torch.randn(9, 3), "gaussian")


def classifier(seed: int, bias: bool = True) -> Case:
    """A ReLU MLP with three classes, 4-6-5-3."""
    torch.manual_seed(seed)
    x = torch.randn(33, 4)
    y = (x[:, 0] > 0).long() + (x[:, 1] + x[:, 2] > 0.5).long()
    model = nn.Sequential(
        nn.Linear(4, 6, bias=bias), nn.ReLU(), nn.Linear(6, 5, bias=bias), nn.ReLU(), nn.Linear(5, 3, bias=bias)
    )
    return Case("classifier", _trained(model, x, y, nn.CrossEntropyLoss()), x, y, 2 * torch.randn(8, 4), "categorical")


def cnn(seed: int, bias: bool = True) -> Case:
    """Two convolutions (one strided and padded) and a linear layer, 2 x 6 x 5 pixels, four classes."""
    torch.manual_seed(seed)
    x = torch.randn(30, 2, 6, 5)
    y = 2 * (x[:, 0].mean((1, 2)) > 0).long() + (x[:, 1, :3].mean((1, 2)) > 0).long()
    model = nn.Sequential(
        nn.Conv2d(2, 3, (3, 2), bias=bias),  # (3, 4, 4)
        nn.Tanh(),
        nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=bias),  # (4, 2, 2)
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(16, 4, bias=bias),
    )
    _trained(model, x, y, nn.CrossEntropyLoss(), steps=15)  # few, so that its probabilities stay away from 0 and 1
    return Case("cnn", model, x, y, 2 * torch.randn(6, 2, 6, 5), "categorical")


MAKERS = {"regressor": regressor, "classifier": classifier, "cnn": cnn}


@pytest.fixture(params=list(MAKERS))
def case(request: pytest.FixtureRequest, _float64: None) -> Case:
    """Each of the three networks, with biases."""
    return MAKERS[request.param](seed=1)


@pytest.fixture(params=list(MAKERS))
def case_without_bias(request: pytest.FixtureRequest, _float64: None) -> Case:
    """The same networks without biases, where joining a bias to its weight or not makes no difference."""
    return MAKERS[request.param](seed=2, bias=False)


@pytest.fixture
def regression(_float64: None) -> Case:
    return regressor(seed=3)


@pytest.fixture
def regression_without_bias(_float64: None) -> Case:
    return regressor(seed=5, bias=False)


@pytest.fixture
def cnn_without_bias(_float64: None) -> Case:
    return cnn(seed=6, bias=False)


@pytest.fixture(params=["classifier", "cnn"])
def classification(request: pytest.FixtureRequest, _float64: None) -> Case:
    return MAKERS[request.param](seed=4)
