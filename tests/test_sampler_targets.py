"""The density that samplers walk on, of many chains at once: the log joint of each, its gradient by plain autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from helpers import close, normal, seeded
from lapwing.errors import LapwingWarning
from lapwing.priors import Laplace
from lapwing.samplers.target import targeted


def mlp() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()


@pytest.mark.parametrize("likelihood", ["gaussian", "categorical"])
def test_the_target_is_the_log_joint_with_its_gradient(likelihood: str) -> None:
    model, x = mlp(), normal(11, 2)
    y = normal(11, 2, seed=1) if likelihood == "gaussian" else (x[:, 0] > 0).long()
    joint = lw.log_joint(model, (x, y), likelihood, Laplace(0.7))
    batches = [(x[:4], y[:4]), (x[4:8], y[4:8]), (x[8:], y[8:])]
    theta = joint.start + 0.3 * normal(3, 17)
    theta.requires_grad_()
    truth = torch.stack([joint(one) for one in theta])
    (slope,) = torch.autograd.grad(truth.sum(), theta)
    for data, times in (((x, y), 1.0), (batches, 0.5)):
        target = targeted(model, data, likelihood, Laplace(0.7), 1 / times, "all", None)
        with target.running():
            for _ in range(2):  # the first call proves, the second replays
                value, g = target.value_and_grad(theta.detach())
                close(value, times * truth.detach(), 1e-12)
                close(g, times * slope, 1e-12)
                close(target.value(theta.detach()), times * truth.detach(), 1e-12)


IMAGES = nn.Sequential(
    nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(), nn.LayerNorm(8),
    nn.Linear(8, 3),
)  # fmt: skip
TOKENS = nn.Sequential(nn.Embedding(5, 4), nn.TransformerEncoderLayer(4, 2, 6, 0.1, batch_first=True), nn.Linear(4, 2))


@pytest.mark.parametrize("kind", ["images", "tokens"])
def test_the_target_of_many_kinds_of_layers(kind: str) -> None:
    """What is traced and replayed is the network, with operations that write in place, or give several tensors."""
    torch.manual_seed(1)
    model = (IMAGES if kind == "images" else TOKENS).double()
    x = normal(4, 1, 6, 6) if kind == "images" else torch.randint(5, (4, 3), generator=seeded(0))
    y = torch.tensor([0, 2, 1, 1]) if kind == "images" else torch.randint(2, (4, 3), generator=seeded(1))
    target = targeted(model, (x, y), "categorical", 1.0, 1.0, "all", None)
    theta = (target.joint.start + 0.1 * normal(2, target.size)).requires_grad_()
    truth = torch.stack([target.joint(one) for one in theta])
    (slope,) = torch.autograd.grad(truth.sum(), theta)
    with target.running():
        for _ in range(3):
            value, g = target.value_and_grad(theta.detach())
            close(value, truth.detach(), 1e-10)
            close(g, slope, 1e-8)


def test_minibatch_values_and_gradients_are_unbiased() -> None:
    """The mean over all batches of one example is what all data give."""
    model, x, y = mlp(), normal(6, 2), normal(6, 2, seed=1)
    target = targeted(model, (x, y), "gaussian", 1.0, 1.0, "all", None)
    q = target.start(target.joint.start.expand(6, -1)) + 0.1
    with target.running():
        each = target.noisy_value_and_grad(q, torch.arange(6).unsqueeze(1))
        for found, whole in zip(each, target.value_and_grad(q), strict=True):
            close(found.mean(0), whole[0], 1e-12)


def test_a_network_that_torch_cannot_batch_runs_chain_by_chain() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTM(2, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.cell(x)[0][:, -1]

    model, x, y = Recurrent().double(), normal(5, 3, 2), normal(5, 2, seed=1)
    target = targeted(model, (x, y), "gaussian", 1.0, 1.0, "all", None)
    q = target.start(target.joint.start.expand(2, -1)) + 0.1 * normal(2, target.size)
    with target.running(), pytest.warns(LapwingWarning, match="one by one"):
        value, _ = target.value_and_grad(q)
    close(value, torch.stack([target.joint(one) for one in q]), 1e-12)
