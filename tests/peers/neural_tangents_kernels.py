"""Kernels of neural-tangents 0.6.5, as numbers in a file: test_neural_tangents.py runs it in an environment of its own.

    python neural_tangents_kernels.py inputs.npz kernels.npz

neural-tangents imports `neural_tangents.experimental`, and so TensorFlow, only to show it: an empty module spares that.
"""

from __future__ import annotations

import sys
import types

import numpy as np

sys.modules["neural_tangents.experimental"] = types.ModuleType("neural_tangents.experimental")

import jax  # noqa: E402

jax.config.update("jax_enable_x64", True)

from neural_tangents import stax  # noqa: E402

WEIGHT, BIAS = 1.6, 0.2  # variances
SIZES = {"W_std": WEIGHT**0.5, "b_std": BIAS**0.5}


def dense() -> tuple:
    return stax.Dense(1, **SIZES)


def conv(size: tuple[int, int], strides: tuple[int, int] = (1, 1), padding: str = "VALID") -> tuple:
    return stax.Conv(1, size, strides, padding, **SIZES)


def residual(*branch: tuple, shortcut: tuple | None = None) -> tuple:
    both = stax.parallel(stax.serial(*branch), stax.Identity() if shortcut is None else shortcut)
    return stax.serial(stax.FanOut(2), both, stax.FanInSum())


def networks() -> dict[str, tuple[str, tuple]]:
    """By name: what they take, and the layers."""
    relu = stax.Relu()
    return {
        "mlp relu": ("vectors", (dense(), relu, dense(), relu, dense(), relu, dense())),
        "mlp leaky": ("vectors", (dense(), stax.LeakyRelu(0.2), dense(), stax.LeakyRelu(0.2), dense())),
        "mlp erf": ("vectors", (dense(), stax.Erf(), dense(), stax.Erf(), dense())),
        "mlp sin": ("vectors", (dense(), stax.Sin(), dense(), stax.Sin(), dense())),
        "mlp gelu": ("vectors", (dense(), stax.Gelu(), dense(), stax.Gelu(), dense())),
        "mlp normalized": ("vectors", (dense(), stax.LayerNorm(), relu, dense(), stax.LayerNorm(), relu, dense())),
        "mlp residual": (
            "vectors",
            (dense(), residual(relu, dense(), relu, dense()), residual(relu, dense()), relu, dense()),
        ),
        "cnn flat": (
            "images",
            (conv((2, 3), (1, 2)), relu, conv((2, 2), padding="SAME"), relu, stax.Flatten(), dense()),
        ),
        "cnn pooled": (
            "images",
            (
                conv((3, 3), padding="SAME"),
                relu,
                stax.AvgPool((2, 2), (2, 2)),
                conv((2, 2)),
                relu,
                stax.GlobalAvgPool(),
                dense(),
            ),
        ),
        "cnn circular": (
            "images",
            (conv((3, 3), padding="CIRCULAR"), stax.Erf(), stax.AvgPool((2, 1), (2, 1)), stax.Flatten(), dense()),
        ),
        "resnet": (
            "images",
            (
                conv((3, 3), padding="SAME"),
                residual(relu, conv((3, 3), padding="SAME"), relu, conv((3, 3), padding="SAME")),
                residual(relu, conv((3, 3), (2, 2)), relu, conv((1, 1)), shortcut=conv((3, 3), (2, 2))),
                relu,
                stax.GlobalAvgPool(),
                dense(),
            ),
        ),
    }


def main(source: str, target: str) -> None:
    given, out = np.load(source), {}
    for name, (kind, layers) in networks().items():
        x1, x2 = given[kind], given[f"other {kind}"]
        if kind == "images":
            x1, x2 = (np.moveaxis(x, 1, -1) for x in (x1, x2))  # channels last
        kernel = stax.serial(*layers)[2]
        for what in ("nngp", "ntk"):
            out[f"{name}/{what}/own"] = np.asarray(kernel(x1, None, what))
            out[f"{name}/{what}/cross"] = np.asarray(kernel(x1, x2, what))
    np.savez(target, **out)


if __name__ == "__main__":
    main(*sys.argv[1:])
