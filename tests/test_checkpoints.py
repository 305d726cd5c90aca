"""Checkpointed layers run forward again in every reverse pass: at the weights and in the mode of the fit, whatever has
become of the user's model since."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import helpers
import lapwing as lw
from lapwing.curvature.capture import Capture


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


# -- against a twin without checkpoints ------------------------------------------------------------------------------


class Blocks(nn.Module):
    """4 -> 3 -> (5 -> 3, checkpointed) -> 2."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.first, self.last = how, nn.Linear(4, 3), nn.Linear(3, 2)
        self.a, self.b = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 5)), nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.ones(3))

    def body(self, h: Tensor) -> Tensor:
        return torch.tanh(nn.functional.linear(self.a(h), self.b.weight, self.b.bias) * self.scale)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "input":  # no input of the block requires a gradient
            return self.last(checkpoint(lambda x: self.body(torch.tanh(self.first(x))), x, use_reentrant=True))
        h = torch.tanh(self.first(x))
        if self.how == "sequential":
            layers = nn.Sequential(self.a, _Rest(self))
            return self.last(checkpoint_sequential(layers, 2, h, use_reentrant=False))
        if self.how == "plain" or (self.how == "some" and len(x) % 2):
            return self.last(self.body(h))
        return self.last(checkpoint(self.body, h, use_reentrant=self.how == "reentrant"))


class _Rest(nn.Module):
    def __init__(self, net: Blocks) -> None:
        super().__init__()
        object.__setattr__(self, "net", net)

    def forward(self, h: Tensor) -> Tensor:
        b = self.net.b
        return torch.tanh(nn.functional.linear(h, b.weight, b.bias) * self.net.scale)


HOWS = ["once more", "reentrant", "sequential", "input", "some"]
STRUCTURES: dict[str, Any] = {
    **{name: name for name in ("kron", "block", "diag", "ekfac", "lowrank")},
    "primal": lw.curvature.Full(form="primal"),
    "dual": lw.curvature.Full(form="dual"),
    "matrix_free": lw.curvature.MatrixFree(samples=4, seed=0),
}
SUBSETS: list[Any] = ["all", ["a.*"], ["first.*"], ["first.*", "a.0.*"], ["last.*", "b.*", "scale"], ["a.0.weight"]]
SLOW = "ignore:this network"


def twin(how: str) -> Blocks:
    torch.manual_seed(3)
    return Blocks(how).double()


def data() -> list[tuple[Tensor, Tensor]]:
    x = torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = torch.arange(7) % 2
    return [(x[:3], y[:3]), (x[3:], y[3:])]  # an odd batch and an even one


def fitted(how: str, structure: str, subset: Any) -> lw.Laplace:
    return lw.laplace(twin(how), data(), "categorical", structure=STRUCTURES[structure], subset=subset)


close = partial(helpers.close, tolerance=1e-7, absolute=1e-9)


def loaded(la: lw.Laplace, how: str, path: Any) -> lw.Laplace:
    """Saved, loaded, and the network trained on since."""
    la.save(path)
    net = twin(how)
    found = lw.load(path, net)
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(3)
    return found


@pytest.mark.filterwarnings(SLOW)
@pytest.mark.parametrize("subset", SUBSETS, ids=str)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_checkpoints_change_no_figure(structure: str, subset: Any, tmp_path: Any) -> None:
    x, how = data()[1][0], HOWS[SUBSETS.index(subset) % 2]
    la, plain = fitted(how, structure, subset), fitted("plain", structure, subset)
    close(la.predict(x).covariance, plain.predict(x).covariance)
    found = loaded(la, how, tmp_path / "fit").predict(x)
    assert_close(found.covariance, la.predict(x).covariance, rtol=1e-12, atol=1e-14)


@pytest.mark.filterwarnings(SLOW)
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("structure", ["kron", "dual"])
def test_checkpoints_of_every_kind(structure: str, how: str, tmp_path: Any) -> None:
    x = data()[1][0]
    for subset in ("all", ["a.*"]):
        la, plain = fitted(how, structure, subset), fitted("plain", structure, subset)
        close(la.predict(x).covariance, plain.predict(x).covariance)
        found = loaded(la, how, tmp_path / str(len(subset))).predict(x)
        assert_close(found.covariance, la.predict(x).covariance, rtol=1e-12, atol=1e-14)


@pytest.mark.filterwarnings(SLOW)
@pytest.mark.parametrize("center", ["map", "tangent"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_checkpointed_networks_are_tuned(structure: str, center: str) -> None:
    x, subset = data()[1][0], ["a.*"]
    found, want = (fitted(how, structure, subset).tuned(center=center).predict(x) for how in ("once more", "plain"))
    close(found.f_mean, want.f_mean)
    close(found.covariance, want.covariance)


@pytest.mark.parametrize("how", HOWS)
def test_checkpoints_are_left_as_they_were(how: str) -> None:
    before = torch.utils.checkpoint.CheckpointFunction
    net = twin(how)
    lw.linearize(net).vjp(data()[0][0], torch.ones(3, 2, dtype=torch.float64))
    assert torch.utils.checkpoint.CheckpointFunction is before
    net(data()[0][0].requires_grad_()).sum().backward()
    assert all(p.grad is not None for p in net.parameters())


@pytest.mark.filterwarnings(SLOW)
def test_a_profiler_is_left_alone() -> None:
    """Whether layers run again is seen by a profile function, unless there is one already."""
    calls: list[str] = []

    def mine(frame: Any, event: str, _: Any) -> None:
        calls.append(event)

    x = data()[1][0]
    sys.setprofile(mine)
    try:
        found = fitted("once more", "kron", "all").predict(x)
        assert sys.getprofile() is mine
    finally:
        sys.setprofile(None)
    close(found.covariance, fitted("plain", "kron", "all").predict(x).covariance)
    assert calls


class Convolved(nn.Module):
    """Convolutions are pulled back through one cotangent at a time: several reverse passes of one run."""

    def __init__(self, on: bool) -> None:
        super().__init__()
        self.on, self.conv, self.last = on, nn.Conv1d(1, 3, 2), nn.Linear(9, 3)

    def body(self, x: Tensor) -> Tensor:
        return torch.tanh(self.conv(x.unsqueeze(1))).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.body, x, use_reentrant=False) if self.on else self.body(x))


@pytest.mark.parametrize("subset", ["all", ["conv.*"], ["last.*"]], ids=str)
@pytest.mark.parametrize("structure", ["kron", "diag", "ekfac"])
def test_every_reverse_pass_runs_layers_at_the_weights_of_the_fit(structure: str, subset: Any) -> None:
    (x, y), nets = data()[1], []
    for on in (True, False):
        torch.manual_seed(0)
        nets.append(Convolved(on).double())
    one, two = (lw.laplace(net, (x, y), "categorical", structure=structure, subset=subset) for net in nets)
    with torch.no_grad():
        for p in nets[0].parameters():
            p.mul_(3)
    close(one.predict(x).covariance, two.predict(x).covariance)
    found, want = (Capture(la.tangent, la.state.parts).run(x) for la in (one, two))
    for seed in range(3):
        u = torch.randn(len(x), 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        for name, g in want.pull(u).items():
            close(found.pull(u)[name], g)
