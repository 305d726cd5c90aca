"""Kernels of networks as `gpytorch.kernels.Kernel`, for its inference and optimizers (pip install 'lapwing[gpytorch]').

    infinite_kernel(k)          k of lw.gp.infinite, with its variances as parameters that GPyTorch learns
    tangent_kernel(tangent)     J(x₁) J(x₂)ᵀ of lw.linearize, one output or all; a ScaleKernel around it is its prior

The derivatives of k in its variances w and b are central differences of their logarithms, as in lw.gp.infinite, so that
every activation has them; kernels have no derivative in their inputs. GPyTorch gives inputs (..., n, d): `shape` says
what one is to the network. Rows of several outputs are those of an example one after the other, as its tasks are.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lapwing.errors import InvalidValue, Unsupported
from lapwing.gp import infinite, kernel
from lapwing.gp.infinite.tuning import STEP
from lapwing.tangent import TangentModel


def infinite_kernel(k: infinite.Kernel, shape: tuple[int, ...] | None = None) -> Any:
    """A kernel of an infinitely wide network as GPyTorch's, with `weight_variance` and, unless it is 0, `bias_variance`
    as its parameters. shape: (c, *positions) of an input that is an image."""
    gpytorch = _library()
    if not isinstance(k, infinite.Kernel):
        raise InvalidValue(f"infinite_kernel takes a kernel of lw.gp.infinite, got {type(k).__name__}")

    class InfiniteKernel(gpytorch.kernels.Kernel):  # type: ignore[name-defined]
        """k(x₁, x₂), differentiable in the variances."""

        has_lengthscale = False

        def __init__(self) -> None:
            super().__init__()
            self.names = ["weight_variance", *(["bias_variance"] if k.bias_variance > 0 else [])]
            for name in self.names:
                raw = torch.tensor(getattr(k, name), dtype=torch.float64)
                self.register_parameter(f"raw_{name}", torch.nn.Parameter(raw.clone()))
                self.register_constraint(f"raw_{name}", gpytorch.constraints.Positive())
                value = getattr(self, f"raw_{name}_constraint").inverse_transform(raw)
                self.initialize(**{f"raw_{name}": value})

        @property
        def variances(self) -> list[Tensor]:
            """w, and b where it is learnt."""
            return [getattr(self, f"raw_{n}_constraint").transform(getattr(self, f"raw_{n}")) for n in self.names]

        def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **options: Any) -> Tensor:
            """(..., n₁, n₂), or (..., n) of its diagonal."""
            _check(x1, x2, options)
            return _each(lambda a, b: _Differenced.apply(k, a, b, diag, *self.variances), x1, x2, shape)

    return InfiniteKernel()


def tangent_kernel(tangent: TangentModel, output: int | None = None, shape: tuple[int, ...] | None = None) -> Any:
    """The tangent kernel of a network as GPyTorch's: of one output, or of all, which are tasks. It has no parameters;
    the kernel at the inputs that it saw last is kept. shape: of an input that is no vector."""
    gpytorch = _library()

    class TangentKernel(gpytorch.kernels.Kernel):  # type: ignore[name-defined]
        """J(x₁) J(x₂)ᵀ."""

        has_lengthscale = False

        def __init__(self) -> None:
            super().__init__()
            self.kept: tuple[Tensor, Tensor, Tensor] | None = None

        def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **options: Any) -> Tensor:
            """(..., n₁, n₂), or (..., n₁ c, n₂ c) of all outputs; their diagonals."""
            _check(x1, x2, options)
            found = _each(self.between, x1, x2, shape)
            return found.diagonal(dim1=-2, dim2=-1) if diag else found

        def between(self, a: Tensor, b: Tensor) -> Tensor:
            """For inputs of the network."""
            if self.kept is not None and torch.equal(self.kept[0], a) and torch.equal(self.kept[1], b):
                return self.kept[2]
            own = a.shape == b.shape and torch.equal(a, b)
            found = kernel(tangent, a, None if own else b, per_output=output is not None)
            rows = found.shape[: found.ndim // 2].numel()
            found = found.reshape(rows, -1) if output is None else found[output]
            self.kept = a.detach().clone(), b.detach().clone(), found.to(a)
            return self.kept[2]

        def num_outputs_per_input(self, x1: Tensor, x2: Tensor) -> int:
            """1, or all outputs of an example."""
            if output is not None:
                return 1
            with torch.no_grad():
                one = x1.reshape(-1, x1.shape[-1])[:1]
                return tangent(one if shape is None else one.reshape(1, *shape))[0].numel()

    return TangentKernel()


class _Differenced(torch.autograd.Function):
    """k at variances; its derivative in each by central differences of its logarithm."""

    @staticmethod
    def forward(ctx: Any, k: infinite.Kernel, a: Tensor, b: Tensor, diag: bool, *variances: Tensor) -> Tensor:
        ctx.k, ctx.diag, ctx.same = _at(k, variances), diag, a.shape == b.shape and torch.equal(a, b)
        ctx.save_for_backward(a, b, *variances)
        return _value(ctx.k, a, b, diag, ctx.same).to(a)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        a, b, *variances = ctx.saved_tensors
        slopes = []
        for i, value in enumerate(variances):
            ends = []
            for h in (STEP, -STEP):
                moved = [v * math.exp(h) if j == i else v for j, v in enumerate(variances)]
                ends.append(_value(_at(ctx.k, moved), a, b, ctx.diag, ctx.same))
            along = (ends[0] - ends[1]) / (2 * STEP * float(value))
            slopes.append((gradients[0].to(along) * along).sum().to(value))
        return (None, None, None, None, *slopes)


def _at(k: infinite.Kernel, variances: Any) -> infinite.Kernel:
    w, *b = (float(v) for v in variances)
    return k.replace(weight_variance=w, bias_variance=b[0] if b else None)


def _value(k: infinite.Kernel, a: Tensor, b: Tensor, diag: bool, same: bool) -> Tensor:
    if not diag:
        return k(a, None if same else b)
    if not same:
        raise Unsupported("the diagonal of a kernel is of inputs with themselves; evaluate the whole kernel instead")
    return k.diagonal(a)


def _each(function: Any, x1: Tensor, x2: Tensor, shape: tuple[int, ...] | None) -> Tensor:
    """For each of the batches that GPyTorch gives inputs in, as inputs of the network."""
    if x1.ndim > 2:
        x2 = x2.expand(*x1.shape[:-2], *x2.shape[-2:])
        return torch.stack([_each(function, a, b, shape) for a, b in zip(x1, x2, strict=True)])
    return function(*(x if shape is None else x.reshape(-1, *shape) for x in (x1, x2)))


def _check(x1: Tensor, x2: Tensor, options: dict[str, Any]) -> None:
    if options.get("last_dim_is_batch"):
        raise Unsupported("a network takes all dimensions of an input together; last_dim_is_batch=True cannot apply")
    if x1.requires_grad or x2.requires_grad:
        raise Unsupported("kernels of networks have no derivative in their inputs here; detach them")


def _library() -> Any:
    try:
        import gpytorch
    except ImportError as error:
        raise Unsupported("this needs GPyTorch, which is not installed; pip install 'lapwing[gpytorch]'") from error
    return gpytorch
