"""One run of the network that keeps each layer's input and gives its output gradients for any cotangents.

    record = Capture(tangent, parts).run(x);   record.f (n, ..., c)
    record.pull(u)  for u (n, K, ..., c)  ->  [(part, a, g (K, n, s, b, o)), ...]

Only gradients with respect to layer outputs are computed: no gradient of a weight is ever formed. The user's own
hooks stay, and see what they always saw.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lapwing.curvature.parts import Part
from lapwing.curvature.rules import ComposedRule, rule_for
from lapwing.errors import InvalidValue
from lapwing.tangent import TangentModel, proof
from lapwing.tangent.evaluating import evaluating
from lapwing.tangent.kernels import any_batching_rule, plain_kernels

T = TypeVar("T")


class Changed(InvalidValue):
    """A batch uses a layer in another way than the probe did, by which its treatment was chosen."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}: control flow depends on the data, and the treatment of each layer was chosen on the first batch; "
            "use structure='full', or leave the layer out of the subset"
        )


@dataclass(eq=False)
class Record:
    """What one run left behind."""

    tangent: TangentModel
    parts: tuple[Part, ...]
    f: Tensor
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    leaves: dict[str, Tensor]
    buffers: dict[str, Any] = field(default_factory=dict)  # of each layer: the user's may have moved on since
    handed_on: dict[str, Tensor] = field(default_factory=dict)  # copies that went on through the network
    runs_once: bool = field(default=False, init=False)  # whether its reverse passes were seen to run no layer again

    @property
    def model(self) -> nn.Module:
        """The user's network."""
        return self.tangent.model

    @cached_property
    def readers(self) -> dict[str, Callable[[Tensor], Tensor]]:
        """How the gradient of each layer's output is read: looked up once, for all cotangents."""
        return {part.name: part.reader(self.model, len(self.f)) for part in self.parts}

    @property
    def called(self) -> list[Part]:
        """The parts whose module was run."""
        return [part for part in self.parts if part.name in self.outputs]

    def view(self, part: Part) -> Any:
        """What a part that was run saw: a view of its inputs (of a convolution, many times their size)."""
        x = self.inputs[part.name]
        try:
            with _holding(self.model.get_submodule(part.module), self.buffers.get(part.name)):
                return part.view(self.model, x, len(self.f))
        except RuntimeError as error:
            shape = tuple(x.shape)
            raise Changed(f"layer {part.name} got inputs {shape} on a batch of {len(self.f)} examples") from error

    def views(self) -> dict[str, Any]:
        """Those of all parts, {name: view}, at once."""
        return {part.name: self.view(part) for part in self.called}

    def is_output(self, part: Part) -> bool:
        """Whether a layer's output is the network's, position by position: a head that nothing follows."""
        z, f = self.outputs.get(part.name), self.f
        if z is None or z.untyped_storage().data_ptr() != f.untyped_storage().data_ptr():
            return False
        rows = self.readers[part.name](z.detach().unsqueeze(0))[0].flatten(2)  # (n, s, c)
        outputs = f.detach().reshape(len(f), -1, f.shape[-1])
        return rows.shape == outputs.shape and torch.equal(rows, outputs)

    @property
    def column_bytes(self) -> int:
        """Memory of one cotangent's gradients over all layers."""
        return sum(t.numel() * t.element_size() for t in self.outputs.values())

    def columns(self, u: Tensor, multiple: int, budget: int) -> Iterator[dict[str, Tensor]]:
        """Output gradients of each layer, {module: (K', n, s, b, o)}, for the cotangents u (n, K, ..., c) a few at a
        time: a multiple of `multiple`, within the budget, and as few as that where convolutions are, which run
        fastest from memory that is still at hand."""
        if not self.called:
            return
        fit = max(1, budget // max(1, self.column_bytes * multiple)) if self.tangent.columns_at_once else 1
        for part_u in u.split(fit * multiple, 1):
            yield self.pull(part_u)

    def pull(self, u: Tensor) -> dict[str, Tensor]:
        """Output gradients of each layer, {module: (K, n, s, b, o)}, for cotangents u (n, K, ..., c)."""
        called = self.called
        if not called:
            return {}
        u = u.transpose(0, 1).to(self.f).reshape(u.shape[1], *self.f.shape)
        outs = [self.outputs[part.name] for part in called]
        grads = self._gradients(outs, u) if self.runs_once else self._first_gradients(outs, u)
        out = {}
        for part, g, z in zip(called, grads, outs, strict=True):
            g = z.new_zeros(len(u), *z.shape) if g is None else g
            out[part.name] = self.readers[part.name](g)
        return out

    def _first_gradients(self, outs: list[Tensor], u: Tensor) -> tuple[Tensor | None, ...]:
        """The same, and whether such a pass runs layers again; where it does not, it needs none of their weights."""
        held: list[tuple[Tensor | None, ...]] = []
        again = self.reverse(lambda: runs_python(lambda: held.append(self._gradients(outs, u)), self.f.device))
        self.runs_once = not again
        return held[0]

    def _gradients(self, outs: list[Tensor], u: Tensor) -> tuple[Tensor | None, ...]:
        if self.tangent.columns_at_once and len(u) > 1:
            key = tuple(part.name for part in self.called), u.shape, proof.shapes(outs)
            run, right = partial(self._batched, outs, u), partial(self._proved, outs, u)
            found = proof.attempt(self.tangent, "layers", key, run, right)
            if found is not None:
                return found
        if len(u) == 1:
            return tuple(None if g is None else g.unsqueeze(0) for g in self._grad(outs, u[0]))
        columns = [self._grad(outs, one) for one in u]
        return tuple(None if g[0] is None else torch.stack(g) for g in zip(*columns, strict=True))

    def _grad(self, outs: list[Tensor], u: Tensor, batched: bool = False) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(self.f, outs, u, retain_graph=True, is_grads_batched=batched, allow_unused=True)

    def _batched(self, outs: list[Tensor], u: Tensor) -> tuple[Tensor | None, ...]:
        with any_batching_rule():
            return self._grad(outs, u, batched=True)

    def _proved(self, outs: list[Tensor], u: Tensor, found: tuple[Tensor | None, ...]) -> bool:
        """Whether Σ_k w_k g_k, for the gradients g_k of cotangents u_k, is autograd's of Σ_k w_k u_k."""
        w = proof.mixture(u, 1)
        want = self._grad(outs, torch.einsum("k,k...->...", w, u))
        names = [part.name for part in self.called]
        batched = {n: g for n, g in zip(names, found, strict=True) if g is not None}
        return proof.agree(batched, dict(zip(names, want, strict=True)), w, self.tangent.eps)

    def gradients(self, of: list[Tensor], u: Tensor) -> tuple[Tensor | None, ...]:
        """Those of uᵀf by other tensors of the run, such as its weights, for one cotangent u (n, ..., c)."""
        return self.reverse(lambda: self._grad(of, u))

    def columns_apart(self, of: list[Tensor], u: Tensor) -> list[tuple[Tensor | None, ...]]:
        """The same for each of several cotangents u (k, n, ..., c), by a plain reverse pass each."""
        return self.reverse(lambda: [self._grad(of, one) for one in u])

    def reverse(self, run: Callable[[], T]) -> T:
        """A reverse pass with the weights and the mode of this run: it may run layers again (checkpoints), which must
        then run in the steps that they ran in."""
        again = {path: _Again(self.model.get_submodule(path)) for path in _sites(self.parts)}
        with evaluating(self.model), plain_kernels(), _forwards(self.model, again):
            return self.tangent.backward(self.leaves, run)


def runs_python(reverse: Callable[[], Any], device: torch.device) -> bool:
    """Whether autograd's engine calls Python in a reverse pass: checkpoints do, and functions with a backward of their
    own. True where that cannot be seen: the engine has threads of its own, or somebody profiles."""
    seen: set[str] = set()
    inside = False

    def look(_: FrameType, event: str, called: Any) -> None:
        nonlocal inside
        if event.startswith("c_") and getattr(called, "__name__", "") == "run_backward":
            inside = event == "c_call"
            seen.add("engine")
        elif event == "call" and inside:
            seen.add("python")

    if device.type != "cpu" or sys.getprofile() is not None:
        reverse()
        return True
    sys.setprofile(look)
    try:
        reverse()
    finally:
        sys.setprofile(None)
    return seen != {"engine"}


@contextmanager
def _holding(module: nn.Module, buffers: dict[str, Any] | None) -> Iterator[None]:
    own = module._buffers
    module.__dict__["_buffers"] = own if buffers is None else buffers
    try:
        yield
    finally:
        module.__dict__["_buffers"] = own


class Capture:
    """Runs the network and records the inputs and outputs of its layers."""

    def __init__(self, tangent: TangentModel, parts: tuple[Part, ...], clone_all: bool = False) -> None:
        self.tangent, self.clone_all = tangent, clone_all
        self.parts = tuple(part for part in parts if not part.generic)
        self.unused = tuple(part for part in parts if part.kind == "unused")

    def run(self, x: Any) -> Record:
        """Run a batch forward, with a graph from the layers' outputs to f (n, ..., c)."""
        model, names = self.tangent.model, {n for part in self.parts + self.unused for n in part.parameters}
        as_it_is = self.tangent.params, nullcontext()
        params, order = as_it_is if self.clone_all else self.tangent.ordered(x)  # the proof runs it as it is
        leaves = {n: p.detach().requires_grad_(n in names) for n, p in params.items()}
        record = Record(self.tangent, self.parts, torch.empty(0), {}, {}, leaves)
        with ExitStack() as hooks, torch.enable_grad(), evaluating(model), plain_kernels():
            for handle in self._hooks(record):
                hooks.callback(handle.remove)
            with self._in_steps(record), order:
                record.f = self.tangent.apply(leaves, x)
        self._check_unused(record)
        if not self.clone_all and not self.tangent.separable(x):
            self._check_apart(record)
        return record

    def _check_unused(self, record: Record) -> None:
        """Nothing is computed here as long as no output depends on those parameters."""
        names = [n for part in self.unused for n in part.parameters]
        if not names or not record.f.requires_grad:
            return
        leaves, zero = [record.leaves[n] for n in names], torch.zeros_like(record.f)
        for name, gradient in zip(names, record.gradients(leaves, zero), strict=True):
            if gradient is not None:
                raise Changed(f"{name} was not used on the first batch and is now")

    def _check_apart(self, record: Record) -> None:
        """In a batch that cannot be cut (a graph), no output may depend on what a rule takes for another example's.
        The examples whose number has a bit set, and those that have not, for each bit, tell every two of them apart."""
        n, called = len(record.f), record.views()
        number = torch.arange(n, device=record.f.device)
        bits = [(number >> b) & 1 for b in range((n - 1).bit_length())]
        if not bits or not called:
            return
        inside = torch.stack([*bits, *(1 - bit for bit in bits)], 1).bool()  # (n, K)
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(record.f.shape, generator=generator, dtype=torch.float64).to(record.f)
        u = inside.reshape(*inside.shape, *[1] * (noise.ndim - 1)) * noise.unsqueeze(1)
        for name, g in record.pull(u).items():
            if bool(g.flatten(2)[~inside.T].any()):
                raise Changed(f"layer {name} took each example by itself on the first batch and mixes them now")

    def _hooks(self, record: Record) -> Iterator[Any]:
        for part in self.parts:
            if part.site:
                continue

            def keep(_m: Any, args: Any, kwargs: Any, out: Any, part: Part = part) -> Any:
                if part.name in record.outputs:
                    raise Changed(f"layer {part.name} was called once on the first batch and is now called again")
                x = args[0] if args else next(iter(kwargs.values()), None)
                if not (isinstance(x, Tensor) and isinstance(out, Tensor)):
                    if self.clone_all:  # the proof: without a record, a generic block takes over
                        return None
                    kinds = f"{type(x).__name__} and gave {type(out).__name__}"
                    raise Changed(f"layer {part.name} was called on {kinds}, not on a tensor and giving one, as before")
                if x.numel() == 0:  # called on no example: no gradient
                    return None
                record.inputs[part.name], record.outputs[part.name] = x, out
                record.buffers[part.name] = dict(_m._buffers)
                if self.clone_all or part.clone:
                    record.handed_on[part.name] = out.clone()
                    return record.handed_on[part.name]
                return None

            yield record.model.get_submodule(part.name).register_forward_hook(keep, with_kwargs=True, prepend=True)

    def _in_steps(self, record: Record) -> AbstractContextManager[None]:
        """Modules that are several linear maps run in steps that show them, and as they were afterwards."""
        model, sites = record.model, _sites(self.parts)
        steps = {path: _Steps(model.get_submodule(path), own, record, self.clone_all) for path, own in sites.items()}
        return _forwards(model, steps)


def _sites(parts: tuple[Part, ...]) -> dict[str, dict[str, Part]]:
    """{module: {site: part}} of the modules that run in steps."""
    out: dict[str, dict[str, Part]] = {}
    for part in parts:
        if part.site:
            out.setdefault(part.module, {})[part.site] = part
    return out


@contextmanager
def _forwards(model: nn.Module, forwards: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Modules, by path, with another forward, and as they were afterwards."""
    changed = []
    try:
        for path, forward in forwards.items():
            module = model.get_submodule(path)
            changed.append(module)
            module.__dict__["forward"] = forward
        yield
    finally:
        for module in changed:
            del module.__dict__["forward"]


class _Again:
    """A module's forward in the steps of its rule, of which nothing is kept."""

    composed = True

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(lambda *_: None, *args, **kwargs)

    def run(self, keep: Callable[[str, Tensor, Tensor], None], *args: Any, **kwargs: Any) -> Any:
        rule = rule_for(self.module)
        assert isinstance(rule, ComposedRule)
        return rule.forward(self.module, keep, *args, **kwargs)


class _Steps(_Again):
    """The same, with each site's inputs and outputs kept in the record."""

    def __init__(self, module: nn.Module, parts: dict[str, Part], record: Record, lenient: bool) -> None:
        super().__init__(module)
        self.parts, self.record, self.lenient = parts, record, lenient

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        again = next((part.name for part in self.parts.values() if part.name in self.record.outputs), None)
        if again is not None:
            raise Changed(f"layer {again} was called once on the first batch and is now called again")
        out = self.run(self._keep, *args, **kwargs)
        missing = [part.name for part in self.parts.values() if part.name not in self.record.outputs]
        if missing and not self.lenient:
            raise Changed(f"layer {missing[0]} was called on inputs of another kind than before")
        return out

    def _keep(self, site: str, a: Tensor, z: Tensor) -> None:
        if site in self.parts:
            name = self.parts[site].name
            self.record.inputs[name], self.record.outputs[name] = a, z
