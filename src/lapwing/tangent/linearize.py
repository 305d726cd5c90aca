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
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, jvp, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from lapwing import tree
from lapwing.errors import InvalidValue, LapwingError, LapwingWarning, NetworkFailed
from lapwing.tangent import proof
from lapwing.tangent.evaluating import evaluating
from lapwing.tangent.kernels import any_batching_rule, out_of_memory, plain_kernels
from lapwing.tangent.memory_order import ChannelsLast, channels_last, convolves_on_cpu
from lapwing.tangent.subset import Forward, Swapped, compiled, select, telling
from lapwing.tree import Layout

T = TypeVar("T")
PUSHES = ("forward", "unfused", "double", "rows")  # ways to J v
ROWS = ("vmap", "columns", "loop")  # ways to rows: batched over examples and cotangents, examples, nothing
DTYPES = torch.float16, torch.bfloat16, torch.float32, torch.float64
vjp: Any = torch.func.vjp  # its annotation leaves the two-value form out


def call(model: nn.Module, inputs: Any) -> Any:
    """How inputs reach the model by default: a mapping as keywords, a tuple or list as positions; and what is taken of
    its outputs: the logits, where it returns a mapping that has some (Hugging Face)."""
    if isinstance(inputs, Mapping):
        out = model(**inputs)
    else:
        out = model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)
    return out["logits"] if isinstance(out, Mapping) and "logits" in out else out


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
    with evaluating(model), plain_kernels():
        layout = select(model, subset, example, forward)
    tensors = {n: t.detach().clone() for n, t in [*model.named_parameters(), *model.named_buffers()]}
    params = {n: tensors[n][layout.masks[n]] if n in layout.masks else tensors.pop(n) for n in layout.names}
    buffers = tuple(n for n, _ in model.named_buffers())
    return TangentModel(model, params, tensors, layout, forward, buffers)


def unwrapped(model: Any) -> Any:
    """The network that torch.compile and DistributedDataParallel wrap, in any order."""
    while compiled(model) or isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model._orig_mod
    return model


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


@dataclass(frozen=True, eq=False)
class TangentModel:
    """The network as a function of its selected weights: f(θ*) and J as products, (n, ..., c) by (p,)."""

    model: nn.Module  # borrowed: its modules are run, its tensors are not used
    params: dict[str, Tensor]  # θ*, the selected parameters, in order
    constants: dict[str, Tensor]  # every other parameter and buffer
    layout: Layout
    forward: Forward
    buffers: tuple[str, ...] = ()
    route: dict[str, Any] = field(default_factory=dict)  # which kernels were found to work

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(iter(self.params.values())).device

    @property
    def dtype(self) -> torch.dtype:
        """Of vectors over all parameters: theirs, or the one that holds them all where they differ."""
        return functools.reduce(torch.promote_types, (p.dtype for p in self.params.values()))

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
        return {
            n: (self.constants[n].index_put((self.layout.masks[n],), v) if n in self.layout.masks else v)
            for n, v in own.items()
        }

    def apply(self, params: Mapping[str, Tensor], x: Any) -> Tensor:
        """f(x, θ): the network itself, not linearized, at any weights."""
        x = tree.map_tensors(lambda t: t.clone() if t.is_inference() else t, x)  # those cannot be differentiated by
        with telling(self.model, x):
            out = functional_call(Swapped(self.model, self.forward), self._tensors(params), (x,))
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
        return {f"model.{n}": t for n, t in {**self.constants, **buffers, **self.embed(params)}.items()}

    def ordered(self, x: Any, reverse: bool = True) -> tuple[dict[str, Tensor], AbstractContextManager[Any]]:
        """θ* in the order of memory in which convolutions run fastest, and the mode to apply it in (`memory_order`)."""
        if "channels_last" not in self.route:
            self.route["channels_last"] = convolves_on_cpu(self.model, self.params) and self._same_channels_last(x)
        if not self.route["channels_last"]:
            return self.params, nullcontext()
        return self._channels_last, ChannelsLast(reverse)

    @functools.cached_property
    def _channels_last(self) -> dict[str, Tensor]:
        return channels_last(self.params)

    def _same_channels_last(self, x: Any) -> bool:
        """Whether the outputs of a few examples, and the gradient of their sum, are the same with channels last, up to
        rounding. Checkpointed layers run again outside of the mode, and may fail there."""
        few = tree.rows_of(x, slice(0, 4)) if self.separable(x) else x

        def run(params: Mapping[str, Tensor], order: AbstractContextManager[Any]) -> tuple[Tensor, Tensor]:
            leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
            ends = list(leaves.values())
            with evaluating(self.model), plain_kernels(), torch.enable_grad():
                with order:
                    f = self.apply(leaves, few)
                grads = self.backward(leaves, lambda: torch.autograd.grad(f.sum(), ends, allow_unused=True))
            filled = [torch.zeros_like(t) if g is None else g for g, t in zip(grads, ends, strict=True)]
            return f.detach(), torch.cat([g.reshape(-1) for g in filled])

        try:
            each = zip(run(self.params, nullcontext()), run(self._channels_last, ChannelsLast()), strict=True)
            return all(bool((a - b).abs().max() <= 1e-3 * a.abs().max()) for a, b in each)
        except Exception:  # it looks at strides, in a way of its own; what else it may be will show as it is run
            return False

    def backward(self, params: Mapping[str, Tensor], run: Callable[[], T]) -> T:
        """Run a reverse pass of `apply(params, ...)`: checkpointed layers run forward again in it, and must do so at
        the same weights, whatever has become of the user's."""
        held: list[T] = []
        call = Swapped(self.model, lambda *_: held.append(run()))  # type: ignore[arg-type]
        try:
            functional_call(call, self._tensors(params), (None,))
        except (LapwingError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            raise NetworkFailed(
                f"a reverse pass through the network failed: {type(error).__name__}: {error}; check that backward() "
                "works on its outputs (a layer that changes its input in place does not, in a checkpoint)"
            ) from error
        return held[0]

    def __call__(self, x: Any) -> Tensor:
        with torch.no_grad(), evaluating(self.model), plain_kernels():
            return self.apply(self.params, x)

    # -- cutting batches into examples ----------------------------------------------------------------------------

    def separable(self, x: Any) -> bool:
        """Whether a batch may be cut into examples: whether each output depends on its own example alone.

        Told on the first batch of several examples, by running a part of it; a graph, or a network that mixes its
        batch, is then always run whole.
        """
        try:
            n = tree.batch_size(x)
        except InvalidValue:
            return False
        if "separable" not in self.route and n > 1:
            n = min(n, 8)
            self.route["separable"] = self._cuts(x, n, min(n - 1, 3))
        return self.route.get("separable", True)

    def _cuts(self, x: Any, n: int, k: int) -> bool:
        """Whether the first k of n examples, and the last one alone, give what they give together with the others:
        the edges of a graph that all point forwards would pass the first."""
        try:
            whole = self(tree.rows_of(x, slice(0, n)))
            pieces = [(piece, self(tree.rows_of(x, piece))) for piece in (slice(0, k), slice(n - 1, n))]
        except Exception:  # the parts do not fit together
            self(x)  # what fails on the whole batch too is no matter of cutting, and raises
            return False
        if len(whole) != n or any(part.shape != whole[piece].shape for piece, part in pieces):
            return False
        gap = max(float((part - whole[piece]).abs().max()) for piece, part in pieces)
        eps = max(self.eps, torch.finfo(whole.dtype).eps)
        return gap <= 1e4 * eps * float(whole.abs().max().clamp(min=1e-30))

    def output_shape(self, x: Any) -> tuple[int, int]:
        """Positions and outputs c of an example; remembered for inputs of the same shapes."""
        separable = self.separable(x)
        key = tuple(t.shape[1:] if separable else t.shape for t in tree.tensors(x))
        known = self.route.setdefault("outputs", {})
        if key not in known:
            f = self(tree.rows_of(x, slice(0, 1)) if separable else x)
            known[key] = f[0, ..., 0].numel(), f.shape[-1]
        return known[key]

    def pieces(self, x: Any, u: Tensor, bytes_each: int, budget: int) -> Iterator[tuple[Any, Tensor]]:
        """Cut a batch and its cotangents u (n, ...) into pieces of examples of bytes_each within the budget."""
        n, size = len(u), max(1, budget // max(1, bytes_each))
        if size >= n or not self.separable(x):
            yield x, u
            return
        for start in range(0, n, size):
            index = slice(start, start + size)
            yield tree.rows_of(x, index), u[index]

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
            leaves, grads = self._pullback(x, lambda _: u, names)
        return dict(zip(leaves, grads, strict=True))

    def _pullback(
        self, x: Any, cotangent: Callable[[Tensor], Tensor], names: tuple[str, ...] | None = None
    ) -> tuple[dict[str, Tensor], Any]:
        """Jᵀu by plain autograd, which takes every network; differentiable in u where u requires grad."""
        with torch.enable_grad():
            leaves = {n: self.params[n].detach().requires_grad_() for n in names or self.params}
            params = {**self.params, **leaves}
            out = self.apply(params, x)
            u = cotangent(out)
            if not out.requires_grad:
                return leaves, (None,) * len(leaves)
            keep = u.requires_grad
            grads = self.backward(
                params,
                lambda: torch.autograd.grad(out, list(leaves.values()), u, create_graph=keep, allow_unused=True),
            )
            return leaves, grads

    @torch.inference_mode(False)
    def jvp(self, x: Any, v: Mapping[str, Tensor]) -> Tensor:
        """Forward mode; where a kernel lacks it or has it wrong, the same by unfused kernels, by two reverse passes, or
        by all rows of the Jacobian."""
        start = PUSHES.index(self.route.get("jvp", PUSHES[0]))  # from the one that worked last
        for how in PUSHES[start:-1]:
            try:
                out = self._push(x, v, how)
            except (RuntimeError, NotImplementedError) as error:
                if out_of_memory(error):
                    raise
                continue
            vector = self.layout.flatten(v).unsqueeze(0)
            again = functools.partial(_pushed_alone, v=v, how=how)
            if self._proved_push(how, x, vector, out.unsqueeze(0), again):
                self.route["jvp"] = how
                return out
        out = self._push(x, v, "rows")
        if self.route.get("jvp") != "rows":
            _say_slow("has no derivative of its derivative in torch", "neither forward mode nor two reverse passes")
            self.route["jvp"] = "rows"
        return out

    def _push(self, x: Any, v: Mapping[str, Tensor], how: str) -> Tensor:
        if how == "rows":
            return self._push_rows(x, v)
        return self._double_vjp(x, v) if how == "double" else self._forward_jvp(x, v, onednn=how == "forward")

    def _proved_push(
        self, how: str, x: Any, v: Tensor, found: Tensor, again: Callable[[TangentModel, Any], Tensor]
    ) -> bool:
        return proof.once(self, how, proof.shapes(x, v), lambda: proof.pushes(self, x, v, found, again))

    @torch.inference_mode(False)
    def jvps(self, x: Any, v: Tensor) -> tuple[Tensor, Tensor]:
        """f(x) and J(x) v for several vectors v (k, p) by one run of the network: (n, ..., c) and (k, n, ..., c)."""
        if self.route.get("jvp", "forward") in ("forward", "unfused") and self.route.get("jvps", "vmap") == "vmap":
            try:
                f, found = self._pushes(x, v)
            except (RuntimeError, NotImplementedError, ValueError) as error:  # no forward mode, or no batching rule
                if out_of_memory(error):
                    raise
            else:
                if self._proved_push("jvps", x, v, found, lambda at, x: at._pushes(x, v)[1]):
                    return f, found
            self.route["jvps"] = "loop"
        return self(x), torch.stack([self.jvp(x, self.layout.unflatten(one.to(self.dtype))) for one in v])

    def _pushes(self, x: Any, v: Tensor) -> tuple[Tensor, Tensor]:
        tangents = {n: t.to(self.params[n].dtype) for n, t in self.layout.unflatten(v).items()}
        params, order = self.ordered(x, reverse=False)

        def push(one: dict[str, Tensor]) -> Any:
            return jvp(lambda p: self.apply(p, x), (params,), (one,))

        onednn = self.route.get("jvp", "forward") == "forward"
        with evaluating(self.model), plain_kernels(onednn), order, any_batching_rule():
            return vmap(push, out_dims=(None, 0))(tangents)  # type: ignore[arg-type]

    @torch.inference_mode(False)
    def vjps(self, x: Any, u: Tensor) -> Tensor:
        """Σ_n J(x_n)ᵀ u_n for several cotangents u (k, n, ..., c) by one run of the network: (k, p)."""
        if len(u) > 1 and self.columns_at_once and self.route.get("vjps", "vmap") == "vmap":
            try:
                found = self._pulls(x, u, batched=True)
            except RuntimeError as error:  # no batching rule
                if out_of_memory(error):
                    raise
            else:
                if proof.once(self, "vjps", proof.shapes(x, u), lambda: self._proved_pulls(x, u, found)):
                    return self._flat(found, len(u))
            self.route["vjps"] = "loop"
        return self._flat(self._pulls(x, u, batched=False), len(u))

    def _proved_pulls(self, x: Any, u: Tensor, found: dict[str, Tensor]) -> bool:
        return proof.pulls(self, x, u, found, lambda at, x, u: at._pulls(x, u, batched=True))

    def _pulls(self, x: Any, u: Tensor, batched: bool) -> dict[str, Tensor]:
        """{name: (k, *shape)} for the parameters that the outputs depend on."""
        params, order = self.ordered(x)
        with evaluating(self.model), plain_kernels(), torch.enable_grad():
            leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
            with order:
                out = self.apply(leaves, x)
            if not out.requires_grad:
                return {}
            ends = list(leaves.values())

            def pull(some: Tensor) -> Any:
                return torch.autograd.grad(
                    out, ends, some.to(out), retain_graph=True, allow_unused=True, is_grads_batched=batched
                )

            if batched:
                with any_batching_rule():
                    grads = self.backward(leaves, lambda: pull(u))
            else:
                columns = self.backward(leaves, lambda: [pull(one) for one in u])
                grads = [None if g[0] is None else torch.stack(g) for g in zip(*columns, strict=True)]
        return {n: g for n, g in zip(leaves, grads, strict=True) if g is not None}

    def _flat(self, grads: Mapping[str, Tensor], k: int) -> Tensor:
        filled = [grads[n] if n in grads else p.new_zeros(k, *p.shape) for n, p in self.params.items()]
        return torch.cat([g.reshape(k, -1) for g in filled], -1)

    @torch.inference_mode(False)
    def through(self, x: Any, v: Tensor, middle: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """J(x) v (n, ..., c) and Σ_n J(x_n)ᵀ u_n (p,) for u = middle(f, J v), v (p,), by one run of the network:
        forward mode beside the graph of the reverse pass; by a run each where that cannot be, or is not right."""
        if self.route.get("through", "one") == "one":
            try:
                jv, u, found = self._through(x, v, middle)
            except (RuntimeError, NotImplementedError) as error:  # no forward mode; a checkpoint that saves no tangents
                if out_of_memory(error):
                    raise
            else:
                if proof.once(self, "through", proof.shapes(x), lambda: self._proved_through(x, v, jv, u, found)):
                    return jv, self.layout.flatten(found).to(v)
            self.route["through"] = "two"
        f, pushed = self.jvps(x, v.unsqueeze(0))
        jv = pushed[0].detach()
        return jv, self.vjps(x, middle(f.detach(), jv).unsqueeze(0))[0]

    def _proved_through(self, x: Any, v: Tensor, jv: Tensor, u: Tensor, found: dict[str, Tensor]) -> bool:
        along, one = v.unsqueeze(0), {n: g.unsqueeze(0) for n, g in found.items()}

        def pulled(at: TangentModel, x: Any, u: Tensor) -> dict[str, Tensor]:
            return {n: g.unsqueeze(0) for n, g in at._through(x, v, lambda *_: u[0])[2].items()}

        return proof.pushes(
            self, x, along, jv.unsqueeze(0), lambda at, x: at._through(x, v, lambda _, jv: jv)[0].unsqueeze(0)
        ) and proof.pulls(self, x, u.unsqueeze(0), one, pulled)

    def _through(
        self, x: Any, v: Tensor, middle: Callable[[Tensor, Tensor], Tensor]
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """J v, u, and Jᵀu by name."""
        along = self.layout.unflatten(v)
        params, order = self.ordered(x)
        with evaluating(self.model), plain_kernels(), torch.enable_grad():
            leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
            with forward_ad.dual_level(), order:
                tangents = {n: torch.empty_like(leaf).copy_(along[n]) for n, leaf in leaves.items()}  # in its order
                duals = {n: forward_ad.make_dual(leaf, tangents[n]) for n, leaf in leaves.items()}
                f, pushed = forward_ad.unpack_dual(self.apply(duals, x))
                jv = torch.zeros_like(f) if pushed is None else pushed.detach().clone()
            u = middle(f.detach(), jv).to(f)  # outside the dual level, lest the reverse pass be pushed forward too
            grads: Any = (None,) * len(leaves)
            if f.requires_grad:
                reverse = lambda: torch.autograd.grad(f, list(leaves.values()), u, allow_unused=True)  # noqa: E731
                grads = self.backward(leaves, reverse)
        filled = {n: torch.zeros_like(t) if g is None else g for (n, t), g in zip(leaves.items(), grads, strict=True)}
        return jv, u, filled

    def _forward_jvp(self, x: Any, v: Mapping[str, Tensor], onednn: bool) -> Tensor:
        with evaluating(self.model), plain_kernels(onednn):
            tangents = {n: t.to(self.params[n].dtype) for n, t in v.items()}
            return jvp(lambda p: self.apply(p, x), (self.params,), (tangents,))[1]

    def _double_vjp(self, x: Any, v: Mapping[str, Tensor]) -> Tensor:
        """J v as the derivative of u ↦ Jᵀu, which is linear, pulled back by v."""
        held: list[Tensor] = []

        def zero(out: Tensor) -> Tensor:
            held.append(torch.zeros_like(out, requires_grad=True))
            return held[0]

        with evaluating(self.model), plain_kernels(onednn=False):
            leaves, grads = self._pullback(x, zero)
            used = [(g, v[n].to(g)) for n, g in zip(leaves, grads, strict=True) if g is not None and g.requires_grad]
            if not used:
                return torch.zeros_like(held[0])
            along = [t for _, t in used]
            return self.backward(leaves, lambda: torch.autograd.grad([g for g, _ in used], held[0], along)[0])

    def _push_rows(self, x: Any, v: Mapping[str, Tensor]) -> Tensor:
        """J v by a reverse pass for each output, which nothing but plain autograd takes part in."""
        f, vector = self(x), self.layout.flatten(v)
        u = _units(f)
        with evaluating(self.model), plain_kernels():
            rows = self._pull_loop(self.params, x, u.expand(len(f), *u.shape))
        return (rows @ vector.to(rows)).reshape(f.shape)

    # -- rows of the Jacobian -------------------------------------------------------------------------------------

    def rows(self, x: Any) -> Tensor:
        """J(x_n) for each example, (n, ..., c, p)."""
        f = self(x)
        u = _units(f)
        rows = self.pulled(x, u.expand(len(f), *u.shape))
        return rows.reshape(*f.shape, -1)

    @torch.inference_mode(False)
    def pulled(self, x: Any, u: Tensor, names: tuple[str, ...] | None = None) -> Tensor:
        """uᵀJ(x_n) for the cotangents of each example: u (n, k, ..., c) -> (n, k, p), for some parameters only
        if `names` says so. Batched over examples and cotangents; over examples alone, or not at all, where torch has no
        rule for that or a wrong one."""
        names = names or self.layout.names
        with evaluating(self.model), plain_kernels():
            if "rows" not in self.route and not self.separable(x):
                _say_slow("cannot be cut into examples", "inputs of unequal length, or outputs that mix the batch")
                self.route["rows"] = "loop"
            cause = ""
            for how in ROWS[ROWS.index(self.route.get("rows", ROWS[0])) : -1]:
                try:
                    found = self._pull_batched(x, u, names, how)
                except (RuntimeError, ValueError) as error:
                    if out_of_memory(error):
                        raise
                    cause = cause or str(error).splitlines()[0][:200]
                else:
                    prove = functools.partial(self._proved_rows, x, u, names, how, found)
                    if proof.once(self, how, (names, proof.shapes(x, u)), prove):
                        self.route["rows"] = how
                        return torch.cat([found[n].reshape(*u.shape[:2], -1) for n in names], dim=-1)
                    cause = "its rules do not give the gradient that autograd gives"
            if self.route.get("rows") != "loop":
                _say_slow("cannot be batched over examples by torch.func.vmap", cause)
                self.route["rows"] = "loop"
            return self._pull_loop({n: self.params[n] for n in names}, x, u)

    def _proved_rows(self, x: Any, u: Tensor, names: tuple[str, ...], how: str, found: dict[str, Tensor]) -> bool:
        return proof.rows(self, x, u, names, found, lambda at, x, u: at._pull_batched(x, u, names, how))

    def _pull_batched(self, x: Any, u: Tensor, names: tuple[str, ...], how: str) -> dict[str, Tensor]:
        """{name: (n, k, *shape)}."""

        def pull_one(moving: dict[str, Tensor], x: Any, u: Tensor) -> dict[str, Tensor]:
            one = tree.map_tensors(lambda t: t.unsqueeze(0), x)
            _, pull = vjp(lambda p: self.apply({**self.params, **p}, one)[0], moving)
            if how == "vmap":
                return vmap(lambda cotangent: pull(cotangent)[0])(u)
            columns = [pull(cotangent)[0] for cotangent in u]
            return {n: torch.stack([column[n] for column in columns]) for n in moving}

        moving = {n: self.params[n] for n in names}
        with evaluating(self.model), plain_kernels(), any_batching_rule():
            return vmap(pull_one, in_dims=(None, tree.batch_dims(x), 0))(moving, tree.plain(x), u)

    def _pull_loop(self, moving: dict[str, Tensor], x: Any, u: Tensor) -> Tensor:
        """The same without batching over examples: one example a time, or, where inputs cannot be cut into
        examples (a graph), one cotangent of one example a time over the whole batch."""
        n, k = u.shape[:2]
        leaves = {name: t.detach().requires_grad_() for name, t in moving.items()}
        out = []
        with torch.enable_grad():
            whole = None if self.separable(x) else self.apply({**self.params, **leaves}, x)
            for i in range(n):
                f = (
                    whole[i]
                    if whole is not None
                    else self.apply({**self.params, **leaves}, tree.rows_of(x, slice(i, i + 1)))[0]
                )
                grads: Any = [[None] * len(leaves)] * k  # if this example does not use them
                if f.requires_grad:

                    def pull(f: Tensor = f, i: int = i) -> Any:
                        ends = list(leaves.values())
                        return [
                            torch.autograd.grad(f, ends, u[i, j], retain_graph=True, allow_unused=True)
                            for j in range(k)
                        ]

                    grads = self.backward({**self.params, **leaves}, pull)
                flat = [
                    torch.cat(
                        [
                            (torch.zeros_like(t) if g is None else g).reshape(-1)
                            for g, t in zip(gs, leaves.values(), strict=True)
                        ]
                    )
                    for gs in grads
                ]
                out.append(torch.stack(flat))
        return torch.stack(out)


def _units(f: Tensor) -> Tensor:
    """A cotangent for each output of an example: (c, ..., c)."""
    outputs = f[0].numel()
    return torch.eye(outputs, dtype=f.dtype, device=f.device).reshape(outputs, *f.shape[1:])


def _pushed_alone(at: TangentModel, x: Any, v: Mapping[str, Tensor], how: str) -> Tensor:
    return at._push(x, v, how).unsqueeze(0)


def _say_slow(what: str, cause: str) -> None:
    warnings.warn(
        f"this network {what}, so Jacobian rows are made one example at a time, which is slow; the cause: {cause}",
        LapwingWarning,
        stacklevel=4,
    )
