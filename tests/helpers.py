"""What many tests share: closeness at 1e-8, float64 numbers, a few networks, a Jacobian by plain autograd."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.testing import assert_close

import lapwing as lw
from lapwing.operators import linalg


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-8, absolute: float | None = None) -> None:
    """The same dtype, shape and numbers, to `tolerance` relatively and (unless `absolute` says less) absolutely."""
    assert_close(actual, expected, rtol=tolerance, atol=tolerance if absolute is None else absolute)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(*shape: int) -> Tensor:
    """Standard normal, from torch's global stream."""
    return torch.randn(shape, dtype=torch.float64)


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal, the same at every call."""
    return torch.randn(shape, generator=seeded(seed), dtype=torch.float64)


def integers(high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(high, shape, generator=seeded(seed))


class HalfDead(nn.Module):
    """`dead` does not reach the output: the data say nothing about it."""

    def __init__(self) -> None:
        super().__init__()
        self.live = nn.Linear(3, 2)
        self.dead = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.live(x) + 0 * self.dead(x)


def normed() -> nn.Module:
    """3 -> 4 -> 2 with running statistics that matter; p = 34."""
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()
    nn.init.normal_(net[1].weight), nn.init.normal_(net[1].running_mean), nn.init.uniform_(net[1].running_var, 0.5, 2)
    return net


def backward_rows(out: Tensor, parameters: Iterable[Tensor]) -> Tensor:
    """∂out/∂θ (*out, p) by reverse mode, one output at a time: nothing of torch.func, nothing of Lapwing."""
    parameters, rows = list(parameters), []
    for value in out.reshape(-1):
        grads = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
        pairs = zip(grads, parameters, strict=True)
        rows.append(torch.cat([(torch.zeros_like(p) if g is None else g).reshape(-1) for g, p in pairs]))
    return torch.stack(rows).reshape(*out.shape, -1)


def curvature(la: lw.Laplace) -> Tensor:
    """G (p, p) at curvature weight one."""
    return linalg.to_dense(la.state.structure.operator(la.state, torch.ones(1, dtype=torch.float64)))


def representatives(cases: list[dict[str, int]]) -> set[int]:
    """Which cases of a product of parameters to keep so that each value of each parameter is there: greedily, the case
    with the most values that are still missing."""
    missing, kept = {pair for case in cases for pair in case.items()}, set()
    while missing:
        best = max(range(len(cases)), key=lambda i: len(missing & cases[i].items()))
        kept.add(best)
        missing -= cases[best].items()
    return kept or {0}


def quick(tests: dict[str, list[dict[str, int]]]) -> dict[str, set[int]]:
    """Which cases of the tests of one file are of the quick tier, by the places of each test's cases.

    A test is a law, so a list that several tests go through makes a product of laws and values: of three values and
    more, each test takes every third in turn, and each value meets a third of the laws. Of what is then left of a
    test's own parameters, as many cases as show each value once. A seed is no value: it repeats."""
    valued = {name: [{k: v for k, v in case.items() if k != "seed"} for case in cases] for name, cases in tests.items()}
    users: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name, cases in valued.items():
        for key in cases[0]:
            users.setdefault((key, _values(cases, key)), []).append(name)
    kept = {}
    for name, cases in valued.items():
        left = list(range(len(cases)))
        for key in cases[0]:
            values = _values(cases, key)
            among = users[key, values]
            turns = min(3, len(among)) if len(values) > 2 else 1
            mine = values[among.index(name) % turns :: turns]
            left = [i for i in left if cases[i][key] in mine] or left
        kept[name] = {left[i] for i in representatives([cases[i] for i in left])}
    return kept


def _values(cases: list[dict[str, int]], key: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(case[key] for case in cases))
