"""Shared fixtures: tiny float64 networks with unequal dimensions, their data, and a Jacobian that owes nothing to
torch.func.

Every test starts from the same seed and must leave torch's global switches as it found them.
"""

from __future__ import annotations

import copy
import gc
import importlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from helpers import backward_rows, quick

# -- two tiers ---------------------------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What products of laws and parameters have beyond their representatives is of the full tier, unless asked for by
    name."""
    if config.option.keyword or any("::" in str(one) for one in config.args):
        return
    files: dict[Path, dict[str, list[pytest.Function]]] = {}
    for item in items:
        if hasattr(item, "callspec") and not item.get_closest_marker("full"):
            tests = files.setdefault(item.path, {})
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for tests in files.values():
        values = {name: [{k: id(v) for k, v in one.callspec.params.items()} for one in t] for name, t in tests.items()}
        for name, kept in quick(values).items():
            for i, item in enumerate(tests[name]):
                if i not in kept:
                    item.add_marker("full")


def pytest_collection_finish() -> None:
    """Thousands of tests and modules stay to the end: the garbage collector need not look at them again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _quiet_torch() -> None:
    torch.set_num_threads(1)
    with warnings.catch_warnings():  # torch scripts its forward-mode rules at first use, and warns about torch.jit
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.func.jvp(torch.sin, (torch.zeros(()),), (torch.ones(()),))


def _switches() -> dict[str, object]:
    return {
        "oneDNN": bool(torch.backends.mkldnn.enabled),
        "attention fast path": torch.backends.mha.get_fastpath_enabled(),
        "flash attention": torch.backends.cuda.flash_sdp_enabled(),
        "memory-efficient attention": torch.backends.cuda.mem_efficient_sdp_enabled(),
        "math attention": torch.backends.cuda.math_sdp_enabled(),
        "grad mode": torch.is_grad_enabled(),
        "default dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
    }


@pytest.fixture(autouse=True)
def _same_world() -> Iterator[None]:
    torch.default_generator.manual_seed(0)  # the CPU's alone: torch.manual_seed writes down its whole call stack
    before = _switches()
    yield
    assert _switches() == before


@pytest.fixture
def hasty_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its trials take as few examples as they can: what things cost is not what is tested."""
    monkeypatch.setattr(importlib.import_module("lapwing.doctor.trial"), "QUICK", 0.01)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


# -- networks ----------------------------------------------------------------------------------------------------


@pytest.fixture
def mlp() -> nn.Module:
    """5 -> 4 -> 3, p = 39."""
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()


@pytest.fixture
def cnn() -> nn.Module:
    """(2, 5, 6) -> 2, with batch norm away from its initial statistics, p = 95."""
    net = nn.Sequential(
        nn.Conv2d(2, 3, (2, 3), stride=(1, 2)), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.Linear(24, 2)
    ).double()
    norm = net[1]
    assert isinstance(norm, nn.BatchNorm2d)
    nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)
    torch.nn.init.normal_(norm.running_mean), torch.nn.init.uniform_(norm.running_var, 0.5, 2.0)
    return net


@pytest.fixture
def tokens() -> nn.Module:
    """Integers (n, 4) below 7 -> (n, 4, 3): outputs with positions, p = 60."""

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(7, 5)
            self.norm = nn.LayerNorm(5)
            self.head = nn.Linear(5, 3, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            h = self.embedding(x)
            return self.head(self.norm(h + h.mean(1, keepdim=True)).sin())

    return Tokens().double()


# -- data --------------------------------------------------------------------------------------------------------


@pytest.fixture
def regression(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """X (11, 5), y (11, 3), for `mlp`."""
    x = torch.randn(11, 5, generator=generator, dtype=torch.float64)
    return x, torch.randn(11, 3, generator=generator, dtype=torch.float64)


@pytest.fixture
def classification(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """X (11, 5), labels (11,) below 3, for `mlp`."""
    x = torch.randn(11, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (11,), generator=generator)


@pytest.fixture
def images(generator: torch.Generator) -> Tensor:
    """X (4, 2, 5, 6), for `cnn`."""
    return torch.randn(4, 2, 5, 6, generator=generator, dtype=torch.float64)


# -- an oracle ---------------------------------------------------------------------------------------------------


@pytest.fixture
def jacobian() -> Callable[..., Tensor]:
    """jacobian(model, run) -> (*output, p): ∂ run(copy of model, in eval mode)/∂θ by reverse mode, one output at a
    time, over the parameters in named_parameters() order. Nothing of torch.func, nothing of Lapwing."""

    def oracle(model: nn.Module, run: Callable[[nn.Module], Tensor]) -> Tensor:
        twin = copy.deepcopy(model).eval().requires_grad_(True)
        return backward_rows(run(twin), twin.parameters())

    return oracle
