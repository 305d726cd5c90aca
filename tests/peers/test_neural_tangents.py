"""NNGP and NTK equal those of neural-tangents 0.6.5 to 1e-6, on dense, convolutional and residual networks.

It runs in an environment of its own (`.venv-jax`, made by `make test-peers`), for jax 0.5.3 and x64; LAPWING_JAX_PYTHON
names another. Ours and theirs differ in three ways that matter here. Their weights are standard normal times
W_std/√fan_in, ours N(0, weight_variance / fan_in): variance = W_std². Their images have channels last. "SAME" pads an
even window by one more at the end, as torch's padding="same" does.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from lapwing.gp import infinite

HERE = pathlib.Path(__file__).parent
PYTHON = os.environ.get("LAPWING_JAX_PYTHON", str(HERE.parents[1] / ".venv-jax" / "bin" / "python"))
WEIGHT, BIAS = 1.6, 0.2


def mlp(activation: Callable[[], nn.Module], depth: int = 2) -> nn.Sequential:
    hidden = [m for _ in range(depth) for m in (nn.Linear(3, 3), activation())]
    return nn.Sequential(*hidden, nn.Linear(3, 1))


def networks() -> dict[str, tuple[str, nn.Sequential]]:
    """Those of neural_tangents_kernels.py, by the same names."""
    relu, residual = nn.ReLU, infinite.Residual
    h, conv = 4, nn.Conv2d
    same = lambda size: conv(h, h, size, padding="same")  # noqa: E731
    normalized = [
        nn.Linear(3, h),
        nn.LayerNorm(h, eps=1e-12),
        relu(),
        nn.Linear(h, h),
        nn.LayerNorm(h, eps=1e-12),
        relu(),
    ]
    deep = residual(nn.Sequential(relu(), nn.Linear(h, h), relu(), nn.Linear(h, h)))
    shallow = residual(nn.Sequential(relu(), nn.Linear(h, h)))
    strided = nn.Sequential(relu(), conv(h, h, 3, stride=2), relu(), conv(h, h, 1))
    pooled = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(h, 1)
    return {
        "mlp relu": ("vectors", mlp(relu, 3)),
        "mlp leaky": ("vectors", mlp(lambda: nn.LeakyReLU(0.2))),
        "mlp gelu": ("vectors", mlp(nn.GELU)),
        "mlp normalized": ("vectors", nn.Sequential(*normalized, nn.Linear(h, 1))),
        "mlp residual": ("vectors", nn.Sequential(nn.Linear(3, h), deep, shallow, relu(), nn.Linear(h, 1))),
        "cnn flat": (
            "images",
            nn.Sequential(conv(2, h, (2, 3), stride=(1, 2)), relu(), same(2), relu(), nn.Flatten(), nn.Linear(40, 1)),
        ),
        "cnn pooled": (
            "images",
            nn.Sequential(conv(2, h, 3, padding=1), relu(), nn.AvgPool2d(2), conv(h, h, 2), relu(), *pooled),
        ),
        "resnet": (
            "images",
            nn.Sequential(
                conv(2, h, 3, padding=1),
                residual(nn.Sequential(relu(), same(3), relu(), same(3))),
                residual(strided, conv(h, h, 3, stride=2)),
                relu(),
                *pooled,
            ),
        ),
    }


@pytest.fixture(scope="module")
def inputs() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    shapes = {"vectors": (5, 3), "other vectors": (4, 3), "images": (4, 2, 6, 5), "other images": (3, 2, 6, 5)}
    return {name: generator.standard_normal(shape) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def theirs(inputs: dict[str, np.ndarray], tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    folder = tmp_path_factory.mktemp("kernels")
    np.savez(folder / "inputs.npz", **inputs)
    call = [PYTHON, str(HERE / "neural_tangents_kernels.py"), str(folder / "inputs.npz"), str(folder / "kernels.npz")]
    subprocess.run(call, check=True, capture_output=True)
    with np.load(folder / "kernels.npz") as found:
        return dict(found)


def kernels(name: str, what: str) -> infinite.Kernel:
    if name in ("mlp erf", "mlp sin"):
        return getattr(infinite, what)(2, name[4:], WEIGHT, BIAS)
    if name == "cnn circular":
        circular = nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular")
        layers = infinite.of(nn.Sequential(circular, nn.AvgPool2d((2, 1)), nn.Flatten(), nn.Linear(60, 1))).layers
        erf = infinite.nngp(1, "erf").layers[1]
        return infinite.Kernel((layers[0], erf, *layers[1:]), what, WEIGHT, BIAS)
    return infinite.of(networks()[name][1], what, WEIGHT, BIAS)


NAMES = [*networks(), "mlp erf", "mlp sin", "cnn circular"]


@pytest.mark.parametrize("what", ["nngp", "ntk"])
@pytest.mark.parametrize("name", NAMES)
def test_kernels_are_theirs(name: str, what: str, inputs: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    kind = "images" if name.startswith(("cnn", "resnet")) else "vectors"
    x, other = (torch.from_numpy(inputs[key]) for key in (kind, f"other {kind}"))
    k = kernels(name, what)
    for ours, key in ((k(x), "own"), (k(x, other), "cross")):
        expected = torch.from_numpy(theirs[f"{name}/{what}/{key}"])
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)
