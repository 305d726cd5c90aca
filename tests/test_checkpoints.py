"""Checkpointed layers run forward again in every reverse pass: at the weights and in the mode of the fit, whatever has
become of the user's model since."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import lapwing as lw


class Checkpointed(nn.Module):
    def __init__(self, alone: bool) -> None:
        super().__init__()
        body = [nn.Linear(4, 3)] if alone else [nn.Linear(4, 3), nn.Tanh(), nn.Dropout(0.5), nn.Linear(3, 3)]
        self.body, self.last = nn.Sequential(*body), nn.Linear(3, 2)
        self.alone, self.on = alone, True

    def forward(self, x: Tensor) -> Tensor:
        body = self.body[0] if self.alone else self.body
        h = checkpoint(body, x, use_reentrant=False) if self.on else body(x)
        return self.last(torch.tanh(h))


def network(alone: bool) -> Checkpointed:
    torch.manual_seed(0)
    return Checkpointed(alone).double()


def figures(la: lw.Laplace, x: Tensor) -> dict[str, Any]:
    u, v = torch.ones(len(x), 2, dtype=torch.float64), la.tangent.params
    pushed, pulled = la.tangent.through(x, la.tangent.theta, lambda _, jv: jv)
    return {
        "covariance": la.predict(x).covariance,
        "vjp": la.tangent.layout.flatten(la.tangent.vjp(x, u)),
        "vjps": la.tangent.vjps(x, u.unsqueeze(0)),
        "jvp": la.tangent.jvp(x, v),
        "through": torch.cat([pushed.reshape(-1), pulled]),
        "rows": la.tangent.rows(x),
    }


@pytest.mark.filterwarnings("ignore:this network cannot be batched")
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("structure", ["full", "kron", "block", "diag"])
def test_the_user_may_train_on(structure: str, alone: bool) -> None:
    x = torch.randn(9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = torch.arange(9) % 2
    plain = network(alone)
    plain.on = False
    expected = figures(lw.laplace(plain, (x, y), "categorical", structure=structure), x)
    net = network(alone).train()
    la = lw.laplace(net, (x, y), "categorical", structure=structure)
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(3)
    for key, value in figures(la, x).items():
        assert_close(value, expected[key], rtol=1e-8, atol=1e-8, msg=key)
    assert all(module.training for module in net.modules())
