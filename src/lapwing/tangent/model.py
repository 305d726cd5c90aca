"""The tangent model: h(x, v) = f(x, θ*) + J(x)(v − θ*), J = ∂f/∂θ at the trained weights, in eval mode.

    model(x)         f(x, θ*)                  (n, ..., c)
    model.jvp(x, v)  J(x) v                    v {name: (*shape)} -> (n, ..., c)
    model.vjp(x, u)  Σ_n J(x_n)ᵀ u_n           u (n, ..., c) -> {name: (*shape)}
    model.jvps, vjps                           the same for k vectors at once, flat: (k, p) and (k, n, ..., c)
    model.rows(x)    J(x), per example         (n, ..., c, p)

Weights and buffers are copied when the model is linearized: training it further does not move the tangent model,
and no pass changes the user's module. Index letters: n data, c outputs, p parameters, k cotangents an example.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from lapwing import tree
from lapwing.errors import InvalidValue, LapwingError, NetworkFailed
from lapwing.tangent import cutting, memory_order, pull, push, rows
from lapwing.tangent.calling import Forward, call, naming_inputs, swapped, unwrapped
from lapwing.tangent.evaluating import evaluating
from lapwing.tangent.facts import Facts
from lapwing.tangent.kernels import plain_kernels
from lapwing.tangent.subset import select
from lapwing.tree import Layout

T = TypeVar("T")
DTYPES = torch.float16, torch.bfloat16, torch.float32, torch.float64


@dataclass(frozen=True, eq=False)
class TangentModel:
    """The network as a function of its selected weights: f(θ*) and J as products, (n, ..., c) by (p,)."""

    model: nn.Module  # borrowed: its modules are run, its tensors are not used
    params: dict[str, Tensor]  # θ*, the selected parameters, in order
    constants: dict[str, Tensor]  # every other parameter and buffer
    layout: Layout
    forward: Forward
    buffers: tuple[str, ...] = ()
    facts: Facts = field(default_factory=Facts)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(iter(self.params.values())).device

    @property
    def dtype(self) -> torch.dtype:
        """Of vectors over all parameters: theirs, or the one that holds them all where they differ."""
        return functools.reduce(torch.promote_types, (p.dtype for p in self.params.values()))

    @property
    def sum_dtype(self) -> torch.dtype:
        """Of sums over data: that dtype, float32 or better."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def eps(self) -> float:
        """Of the network's coarsest dtype."""
        dtypes = {t.dtype for t in (*self.params.values(), *self.constants.values()) if t.is_floating_point()}
        return max(torch.finfo(dtype).eps for dtype in dtypes)

    @functools.cached_property
    def columns_at_once(self) -> bool:
        """Whether cotangents are best pulled back together: matrix products are, convolutions are not."""
        return not any(isinstance(m, _ConvNd) for m in self.model.modules())

    @property
    def custom_forward(self) -> bool:
        """Whether the user gave a forward=."""
        return self.forward is not call

    @property
    def theta(self) -> Tensor:
        """θ* as one vector, (p,)."""
        return self.layout.flatten(self.params)

    def fingerprints(self) -> dict[str, str]:
        """A hash of every weight and buffer, selected or not."""
        return tree.fingerprints({**self.constants, **self.embed(self.params)})

    # -- the network as a function of the selected parameters -----------------------------------------------------

    def embed(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Full-shaped tensors of the selected parameters in their own dtypes, masked elements put in their places."""
        own = {n: v.to(self.params[n].dtype) for n, v in params.items()}
        masked = {n: self.constants[n].index_put((mask,), own[n]) for n, mask in self.layout.masks.items() if n in own}
        return own | masked

    def apply(self, params: Mapping[str, Tensor], x: Any) -> Tensor:
        """f(x, θ): the network itself, not linearized, at any weights."""
        x = tree.map_tensors(lambda t: t.clone() if t.is_inference() else t, x)  # those cannot be differentiated by
        with naming_inputs(self.model, x), swapped(self.model, self._tensors(params)):
            out = self.forward(self.model, x)
        if not isinstance(out, Tensor):
            raise InvalidValue(
                f"the model returns {type(out).__name__}, not a tensor (n, ..., c); "
                "pick the output with forward=lambda model, x: ..."
            )
        if out.ndim < 2:
            raise InvalidValue(
                f"the model's output has shape {tuple(out.shape)}; it must be (n, ..., c), "
                "so add the output dimension: forward=lambda model, x: model(x).unsqueeze(-1)"
            )
        return out

    def _tensors(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        buffers = {n: self.constants[n].clone() for n in self.buffers}  # a pass may move its buffers
        return {**self.constants, **buffers, **self.embed(params)}

    @functools.cached_property
    def channels_last(self) -> dict[str, Tensor]:
        """θ* with channels last."""
        return memory_order.channels_last(self.params)

    def ordered(self, x: Any, reverse: bool = True) -> tuple[dict[str, Tensor], AbstractContextManager[Any]]:
        """θ* in the order of memory in which convolutions run fastest, and the mode to apply it in (`memory_order`)."""
        return memory_order.ordered(self, x, reverse)

    def backward(self, params: Mapping[str, Tensor], run: Callable[[], T]) -> T:
        """Run a reverse pass of `apply(params, ...)`: checkpointed layers run forward again in it, and must do so at
        the same weights, whatever has become of the user's."""
        try:
            with swapped(self.model, self._tensors(params)):
                return run()
        except (LapwingError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            raise NetworkFailed(
                f"a reverse pass through the network failed: {type(error).__name__}: {error}; check that backward() "
                "works on its outputs (a layer that changes its input in place does not, in a checkpoint)"
            ) from error

    def __call__(self, x: Any) -> Tensor:
        with torch.no_grad(), evaluating(self.model), plain_kernels():
            return self.apply(self.params, x)

    # -- cutting batches into examples ----------------------------------------------------------------------------

    def separable(self, x: Any) -> bool:
        """Whether a batch may be cut into examples: whether each output depends on its own example alone.

        Told on the first batch of several examples, by running a part of it; a graph, or a network that mixes its
        batch, is then always run whole.
        """
        return cutting.separable(self, x)

    def output_shape(self, x: Any) -> tuple[int, int]:
        """Positions and outputs c of an example."""
        return cutting.output_shape(self, x)

    def pieces(self, x: Any, y: Tensor, size: int) -> Iterator[tuple[Any, Tensor]]:
        """A batch, with targets or cotangents y (n, ...), in pieces of at most `size` examples, where it can be cut."""
        return cutting.pieces(self, x, y, max(1, size))

    # -- products with the Jacobian -------------------------------------------------------------------------------

    @torch.inference_mode(False)
    def vjp(self, x: Any, u: Tensor) -> dict[str, Tensor]:
        """Jᵀu for u (n, ..., c), {name: tensor of the parameter's shape}."""
        grads = self.gradients(x, u)
        return {n: torch.zeros_like(self.params[n]) if g is None else g for n, g in grads.items()}

    def gradients(self, x: Any, u: Tensor, names: tuple[str, ...] | None = None) -> dict[str, Tensor | None]:
        """Jᵀu for some parameters (all by default) by plain autograd, by which every other route is judged; None where
        no output depends on one."""
        with evaluating(self.model), plain_kernels():
            leaves, grads = pull.pullback(self, x, lambda _: u, names)
        return dict(zip(leaves, grads, strict=True))

    @torch.inference_mode(False)
    def vjps(self, x: Any, u: Tensor) -> Tensor:
        """Σ_n J(x_n)ᵀ u_n for several cotangents u (k, n, ..., c) by one run of the network: (k, p)."""
        return pull.vjps(self, x, u)

    @torch.inference_mode(False)
    def jvp(self, x: Any, v: Mapping[str, Tensor]) -> Tensor:
        """J v for v {name: tensor of the parameter's shape}, (n, ..., c)."""
        return push.jvp(self, x, v)

    @torch.inference_mode(False)
    def jvps(self, x: Any, v: Tensor) -> tuple[Tensor, Tensor]:
        """f(x) and J(x) v for several vectors v (k, p) by one run of the network: (n, ..., c) and (k, n, ..., c)."""
        return push.jvps(self, x, v)

    @torch.inference_mode(False)
    def through(self, x: Any, v: Tensor, middle: pull.Middle) -> tuple[Tensor, Tensor]:
        """J(x) v (n, ..., c) and Σ_n J(x_n)ᵀ u_n (p,) for u = middle(f, J v), v (p,), by one run of the network."""
        return pull.through(self, x, v, middle)

    def rows(self, x: Any) -> Tensor:
        """J(x_n) for each example, (n, ..., c, p)."""
        f = self(x)
        return self.pulled(x, rows.units(f)).reshape(*f.shape, -1)

    @torch.inference_mode(False)
    def pulled(self, x: Any, u: Tensor, names: tuple[str, ...] | None = None) -> Tensor:
        """uᵀJ(x_n) for the cotangents of each example: u (n, k, ..., c) -> (n, k, p), for some parameters only
        if `names` says so."""
        return rows.pulled(self, x, u, names or self.layout.names)


# -- networks that can be linearized ------------------------------------------------------------------------------


@torch.inference_mode(False)
def linearize(
    model: nn.Module, subset: Any = "all", *, forward: Forward | None = None, example: Any = None
) -> TangentModel:
    """Linearize a network at its weights.

    subset: "all", "last_layer" (needs example=, a batch of inputs to trace), a list of globs, or {name: mask}.
    forward: forward(model, inputs) -> outputs, where the model cannot be called on a batch's inputs as they are.
    """
    model = unwrapped(model)
    _check(model)
    forward = forward or call
    layout = select(model, subset, example, forward)
    tensors = {n: t.detach().clone() for n, t in [*model.named_parameters(), *model.named_buffers()]}
    params = {n: tensors[n][layout.masks[n]] if n in layout.masks else tensors.pop(n) for n in layout.names}
    buffers = tuple(n for n, _ in model.named_buffers())
    return TangentModel(model, params, tensors, layout, forward, buffers)


def _check(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise InvalidValue(f"model must be a torch.nn.Module, got {type(model).__name__}")
    for name, p in model.named_parameters():
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise InvalidValue(f"parameter {name} is uninitialized (a lazy module); run the model once first")
        if hasattr(p, "full_tensor") or getattr(p, "_is_flat_param", False):  # a DTensor, or of the first FSDP
            raise InvalidValue(
                f"parameter {name} is cut over processes (FSDP, DTensor), and every process needs the whole network; "
                "load its full state dict into a plain copy"
            )
        if p.is_meta:
            raise InvalidValue(f"parameter {name} is on the meta device, which holds no values; load the weights first")
        if p.is_floating_point() and p.dtype not in DTYPES:
            raise InvalidValue(
                f"parameter {name} is {p.dtype}, in which there is no arithmetic; cast the network to one of "
                f"{', '.join(str(dtype) for dtype in DTYPES)}"
            )
        if p.is_floating_point() and not torch.isfinite(p).all():
            raise InvalidValue(f"parameter {name} holds NaN or infinite values; train the network again")
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise InvalidValue(
                f"{name} renormalizes its weight in every pass (max_norm={module.max_norm}), so the network is no "
                "fixed function of it; normalize it once and set max_norm=None"
            )
        if isinstance(module, _BatchNorm) and module.running_mean is None:
            raise InvalidValue(
                f"{name} normalizes by the statistics of each batch (track_running_stats=False), so its outputs "
                "depend on the other examples; use running statistics, or a layer or group norm"
            )
