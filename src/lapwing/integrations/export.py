"""Error bars that are served without Lapwing: f(x) and J(x) M⁻¹ J(x)ᵀ as a module of plain tensor operations, for
`torch.export` and ONNX.

    served = module(la, example);   mean, f_var = served(x)

Each layer adds J_l Σ_l J_lᵀ, from its inputs a and its output gradients g, which reverse passes give:

    kron, ekfac, diag    Σ_oi (Σ_s g̃_kso ã_si)(Σ_s g̃_lso ã_si) V_oi     in the basis U where Σ_l is diagonal, V (o, i)
    full, block          (Σ_s g ⊗ a) R Rᵀ (Σ_s g ⊗ a)ᵀ                   for a root R of the covariance of the weights

Reverse passes are traced (`make_fx`), so that what is served has no autograd in it and any number of examples.
Shapes: n examples, k, l of c outputs, s positions, o/i outputs and inputs of a layer, r columns of a root.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from lapwing import given
from lapwing.api import Laplace
from lapwing.curvature import Part
from lapwing.curvature.cover import cover
from lapwing.curvature.rules import DenseInputs, rule_for
from lapwing.data import network_inputs
from lapwing.errors import InvalidValue, Unsupported
from lapwing.operators import Blocks, linalg
from lapwing.outputs import WIDE
from lapwing.predictive.link import CLOSED
from lapwing.push.basis import Diagonalized, in_basis

LARGEST = 4096  # weights that a root of their covariance is kept for: 64 MB in float32


def module(la: Laplace, example: Any, link: str = "probit", mean: str | None = None) -> nn.Module:
    """A module with forward(x) -> (mean, f_var), each (n, c), for `torch.export.export` and `torch.onnx.export`.

    mean is E[y] and f_var the variance of the outputs, as in la.predict(x, link, mean=mean). Classes have a link in
    closed form; real numbers need none. mean: "network", or what the fit's task says. example: inputs (n, ...) to trace
    with, at which the module is held to la.predict.
    """
    _check(la, link)
    x = network_inputs(example, la.tangent.device)
    if not isinstance(x, Tensor):
        raise Unsupported(f"a served module takes one tensor of inputs, not {type(x).__name__}; pick it with forward=")
    x = _countable(x)
    served = Served(la, x, link, _multiplied(la, mean or la.mean))
    with torch.no_grad():
        traced = make_fx(served, BACKWARD, tracing_mode="symbolic", _allow_non_fake_inputs=True)(x)
    _hold(traced, la, x, link, mean or la.mean)
    return traced


def _convolution_backward(
    g: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Any,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    output_mask: list[bool],
) -> tuple[Tensor, None, None]:
    """The gradient in a convolution's inputs, as a convolution: ONNX has no operator for it. Weights are constants."""
    spans = zip(x.shape[2:], stride, padding, dilation, weight.shape[2:], strict=True)
    left = [(size + 2 * p - d * (k - 1) - 1) % s for size, s, p, d, k in spans]  # over, past the last step
    over = [0] * len(left) if transposed else left
    back = torch.ops.aten.convolution(g, weight, None, stride, padding, dilation, not transposed, over, groups)
    return back, None, None


BACKWARD = {torch.ops.aten.convolution_backward.default: _convolution_backward}


def _countable(x: Tensor) -> Tensor:
    """Of these examples as many, over and over, as no other dimension has: tracing takes equal sizes for one, and a
    batch of one for always one."""
    n = next(n for n in itertools.count(3) if n not in x.shape[1:])
    return x[torch.arange(n, device=x.device) % len(x)]


class Served(nn.Module):
    """The network with the covariance of its outputs: what is traced."""

    def __init__(self, la: Laplace, x: Tensor, link: str, multiplied: float) -> None:
        super().__init__()
        tangent = la.tangent
        self.network = copy.deepcopy(tangent.model).eval().requires_grad_(False)
        self.network.load_state_dict({**tangent.constants, **tangent.embed(tangent.params)})
        self.call, self.likelihood, self.link, self.multiplied = tangent.forward, la.likelihood.plain, link, multiplied
        self.parts, self.terms = _terms(la.spread.precision, la, x)
        self.shapes: dict[str, torch.Size] = {}  # of what each layer puts out, without examples
        self.shifts: dict[str, Tensor] | None = None
        self.inputs: dict[str, Tensor] = {}
        for part in self.parts:
            layer = self.network.get_submodule(part.name)
            layer.register_forward_hook(functools.partial(self._keep, part.name), with_kwargs=True)
        with torch.no_grad():
            f = self.call(self.network, x)
        self.head = len(self.parts) == 1 and f is self.inputs.pop("put out")
        if f.ndim != 2 or f.shape[-1] > WIDE:
            raise Unsupported(
                f"outputs {tuple(f.shape[1:])} of an example are not served with error bars, only up to {WIDE} in one "
                "row; pick some with forward=, or call la.predict"
            )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """E[y] and the variance of f, (n, c) each."""
        f, cov = self.outputs(x)
        f, response = self.multiplied * f, self.likelihood.response
        mean = f if response == "identity" else CLOSED[response][self.link](f, cov)
        return mean, cov.diagonal(dim1=-2, dim2=-1)

    def outputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """f (n, c) and its covariance (n, c, c)."""
        n, like = x.shape[0], next(self.network.parameters())
        shifts = {name: like.new_zeros(n, *shape) for name, shape in self.shapes.items()}
        if self.head:  # nothing follows it
            f, inputs = self._run(shifts, x)
            gradients = {self.parts[0].name: _units(f)}
        else:
            f, gradients, inputs = self._pulled(shifts, x)
        rows = {}
        for part in self.parts:
            view = _inputs(part, self.network, inputs[part.name], n)
            g = part.reader(self.network, n)(gradients[part.name])
            rows[part.name] = view, g.contiguous()  # of a view, torch.export cannot tell that n may be any number
        return f, torch.stack([term(rows) for term in self.terms]).sum(0)

    def _pulled(self, shifts: dict[str, Tensor], x: Tensor) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """f, the output gradients of each layer (c, n, ...), and the layers' inputs. By autograd, one output at a time:
        transforms of torch.func trace the number of examples as a number."""
        with torch.enable_grad():
            moved = {name: shift.requires_grad_() for name, shift in shifts.items()}
            f, inputs = self._run(moved, x)
            pulled = [torch.autograd.grad(f, list(moved.values()), u, retain_graph=True) for u in _units(f)]
        gradients = [torch.stack(columns) for columns in zip(*pulled, strict=True)]
        detached = {name: a.detach() for name, a in inputs.items()}
        return f.detach(), dict(zip(moved, gradients, strict=True)), detached

    def _run(self, shifts: dict[str, Tensor], x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """f where each layer's outputs are moved, and what the layers are called on."""
        self.shifts, self.inputs = shifts, {}
        try:
            return self.call(self.network, x), self.inputs
        finally:
            self.shifts, self.inputs = None, {}

    def _keep(self, name: str, _: nn.Module, args: Any, kwargs: Any, out: Tensor) -> Tensor:
        if self.shifts is None:
            self.shapes[name], self.inputs["put out"] = out.shape[1:], out
            return out
        self.inputs[name] = args[0] if args else next(iter(kwargs.values()))
        return out + self.shifts[name]


Rows: TypeAlias = dict[str, tuple[DenseInputs, Tensor]]  # {layer: (a (n, s, b, i), g (c, n, s, b, o))}


class Rotated(nn.Module):
    """A layer's term where its posterior is diagonal in a basis."""

    u_inputs: Tensor
    u_outputs: Tensor
    variance: Tensor

    def __init__(self, part: Part, basis: Diagonalized, like: Tensor) -> None:
        super().__init__()
        self.name = part.name
        view, turned, variance = basis
        self.register_buffer("u_inputs", view.a[:, 0].transpose(0, 1).to(like))  # (b, i, i)
        self.register_buffer("u_outputs", turned[:, 0, 0].transpose(0, 1).to(like))  # (b, o, o)
        self.register_buffer("variance", variance.to(like))  # (b, o, i)

    def forward(self, rows: Rows) -> Tensor:
        """(n, c, c)."""
        view, g = rows[self.name]
        alone = self.u_outputs.shape[-1] == 1  # a basis of ±1, which is 1 in products
        turned = g if alone else torch.einsum("knsbo,boq->knsbq", g, self.u_outputs)
        return view.rotated(self.u_inputs).covariance(turned, self.variance)


class Rooted(nn.Module):
    """The term of layers whose weights have a covariance R Rᵀ."""

    def __init__(self, parts: Sequence[Part], op: Any, index: Tensor | None, like: Tensor) -> None:
        super().__init__()
        self.names = [part.name for part in parts]
        if op.size > LARGEST:
            raise Unsupported(
                f"a covariance of {op.size:,} weights is too large to serve ({LARGEST:,} at the most); use "
                "structure='kron', or subset='last_layer'"
            )
        covariance = linalg.solve(op, torch.eye(op.size, dtype=torch.float64, device=like.device))
        root = torch.linalg.cholesky(0.5 * (covariance + covariance.mT))
        root = (root if index is None else root[index]).to(like)
        for place, one in enumerate(root.split([part.size for part in parts])):
            self.register_buffer(f"root{place}", one)  # (b·o·i, r)

    def forward(self, rows: Rows) -> Tensor:
        """(n, c, c)."""
        roots = [self.get_buffer(f"root{place}") for place in range(len(self.names))]
        views = [rows[name] for name in self.names]
        half = sum(view.outer(g).flatten(2) @ root for (view, g), root in zip(views, roots, strict=True))  # (c, n, r)
        return torch.einsum("knr,lnr->nkl", half, half)


def _units(f: Tensor) -> Tensor:
    """A cotangent for each output, (c, n, c)."""
    return torch.eye(f.shape[-1], dtype=f.dtype, device=f.device).unsqueeze(1).expand(-1, f.shape[0], -1)


def _layers(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Those that outputs depend on, if each is one that is served."""
    used = tuple(part for part in parts if part.kind != "unused")
    for part in used:
        if part.generic or part.site:
            _refuse(part, part.reason or "it is several maps in one module")
    return used


def _refuse(part: Part, reason: str) -> None:
    raise Unsupported(
        f"{part.name} is not served ({reason}); use subset='last_layer', name other layers by subset=, or call "
        "la.predict"
    )


@functools.singledispatch
def _terms(precision: Any, la: Laplace, x: Tensor) -> tuple[tuple[Part, ...], nn.ModuleList]:
    """The layers, and what they add to the covariance: all together by one root."""
    used, like = _layers(cover(la.tangent, x)), next(iter(la.tangent.params.values()))
    index = torch.cat([part.index(la.tangent.layout) for part in used]).to(like.device)
    return used, nn.ModuleList([Rooted(used, precision, index, like)])


@_terms.register
def _(precision: Blocks, la: Laplace, x: Tensor) -> tuple[tuple[Part, ...], nn.ModuleList]:
    used, like = _layers(la.spread.parts), next(iter(la.tangent.params.values()))
    operators = dict(zip(la.spread.parts, precision.parts, strict=True))
    bases = {part: _basis(operators[part], part, like.device) for part in used}
    terms = [
        Rooted([part], operators[part], None, like) if basis is None else Rotated(part, basis, like)
        for part, basis in bases.items()
    ]
    return used, nn.ModuleList(terms)


def _basis(op: Any, part: Part, device: torch.device) -> Diagonalized | None:
    """What unit inputs and unit gradients are in the basis where a layer's posterior is diagonal, if it has one."""
    b, o, i = part.shape
    a = torch.eye(i, dtype=torch.float64, device=device).reshape(i, 1, 1, i).expand(-1, -1, b, -1)
    g = torch.eye(o, dtype=torch.float64, device=device).reshape(o, 1, 1, 1, o).expand(-1, -1, -1, b, -1)
    return in_basis(op, part, DenseInputs(a), g)


def _inputs(part: Part, model: nn.Module, x: Tensor, n: Any) -> DenseInputs:
    """a of a layer, (n, s, b, i), as in Part.view, by operations that ONNX has."""
    module = model.get_submodule(part.name)
    rule = rule_for(module)
    assert rule is not None
    a = rule.traced(module, x, n)
    if not isinstance(a, Tensor):
        _refuse(part, f"inputs of {type(module).__name__} are numbers of rows")
    ones = torch.ones_like(a[..., :1])
    if part.weight is None:
        return DenseInputs(ones)
    return DenseInputs(a if part.bias is None else torch.cat([a, ones], -1))


def _multiplied(la: Laplace, mean: str) -> float:
    """What the outputs are multiplied by: a of the calibration, where there is one."""
    chosen = la.calibration if mean == "auto" else None
    if mean not in ("network", "auto") or (chosen is not None and (chosen.process or chosen.features is not None)):
        raise Unsupported(
            f"predictions about mean={mean!r} ({chosen or la.center}) need more than the network; give "
            "mean='network', or call la.predict"
        )
    return 1.0 if chosen is None else chosen.choice.a


def _check(la: Any, link: str) -> None:
    if not isinstance(la, Laplace):
        raise Unsupported(
            f"module takes what lw.laplace gives, got {type(la).__name__}; fit one, or export the network and call "
            "predict yourself"
        )
    if la.streams:
        raise Unsupported(
            "matrix_free knows its covariance by samples, which are not served; use structure='kron', or "
            "subset='last_layer'"
        )
    likelihood = la.likelihood.plain
    if likelihood.response == "identity":
        return
    offered = CLOSED.get(likelihood.response, {}) if likelihood.classes else {}
    if not offered:
        raise Unsupported(
            f"E[y] of {likelihood.name} has no closed form to serve; use 'gaussian' or a likelihood of classes, "
            "or call la.predict"
        )
    if link not in offered:
        raise InvalidValue(f"link must be one of {list(offered)} to be served, got {link!r}{given.near(link, offered)}")


def _hold(served: nn.Module, la: Laplace, x: Tensor, link: str, mean: str) -> None:
    """Raise unless the module gives what la.predict gives, at other numbers of examples too."""
    link = "auto" if la.likelihood.plain.response == "identity" else link
    for inputs in (x, torch.cat([x, x[:1]])):
        pred = la.predict(inputs, link, mean=mean)
        try:
            found = served(inputs)
        except RuntimeError as error:
            raise Unsupported(
                f"tracing takes the number of examples, {len(x)}, for a part of this network: {error}; use "
                "subset='last_layer', or call la.predict"
            ) from error
        for what, one, wanted in zip(("mean", "f_var"), found, (pred.mean, pred.f_var), strict=True):
            gap = float((one - wanted).abs().max() / wanted.abs().max())
            if not gap <= 1e3 * la.tangent.eps:
                raise Unsupported(
                    f"the served {what} is not la.predict's, by {gap:.2g} of its largest value: the network "
                    "does on the example what tracing does not see; use subset='last_layer', or call la.predict"
                )
