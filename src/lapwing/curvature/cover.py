"""Coverage that is proved: which rule speaks for which parameter, checked against autograd on a probe batch.

For a random cotangent of each example of the probe, the gradient that a rule implies from that example's own inputs
and output gradients, Σ_s g ⊗ a, must equal autograd's, and the parameter must enter the graph once. A parameter that
is tied, used twice or functionally, hidden from a fused kernel, masked, or of a layer without a rule fails that (or
never gets there) and is treated by an exact generic block. Nothing is dropped; `reason` says why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lapwing import tree
from lapwing.curvature.capture import Capture, Record
from lapwing.curvature.parts import Part
from lapwing.curvature.rules import rule_for
from lapwing.errors import InvalidValue, NetworkFailed
from lapwing.tangent import TangentModel, proof, pull
from lapwing.tangent.evaluating import evaluating
from lapwing.tangent.kernels import plain_kernels

PROBE = 4  # examples


def cover(tangent: TangentModel, x: Any) -> tuple[Part, ...]:
    """Parts for all selected parameters, in the order of the network, of kind '' (rule or generic) or 'unused'.

    Proved once for a tangent model, and remembered there."""
    if tangent.facts.parts is None:
        tangent.facts.parts = _cover(tangent, x)
    return tangent.facts.parts


def _cover(tangent: TangentModel, x: Any) -> tuple[Part, ...]:
    x = _few(tangent, x)
    layers, reasons = candidates(tangent)
    gradient, calls = _run_plainly(tangent, layers, x)  # None: no output depends on it
    layers = [part for part in layers if any(gradient[n] is not None for n in part.parameters)]
    layers, why = _called_once(layers, calls)
    reasons |= why
    proved, why = _prove(tangent, layers, x)
    reasons |= why
    claimed = {n for part in proved for n in part.parameters}
    rest = []
    for n in tangent.layout.names:
        if n not in claimed:
            kind, reason = "", reasons.get(n, "a bare parameter")
            if gradient[n] is None:
                kind, reason = "unused", "no output depends on it"
            rest.append(Part(n, kind, n, None, (1, 1, tangent.layout.numel(n)), generic=True, reason=reason))
    order = {n: i for i, n in enumerate(tangent.layout.names)}
    return tuple(sorted([*proved, *rest], key=lambda part: order[part.parameters[0]]))


def check_layers(parts: tuple[Part, ...], tangent: TangentModel) -> None:
    """Raise unless the parts are of layers that the network has, as their rules see them."""
    known = {part.name: part for part in candidates(tangent)[0]}
    for part in parts:
        if not part.generic and replace(part, kind="", reason="", clone=False) != known.get(part.name):
            raise InvalidValue(
                f"the network has no layer {part.name} of the shape {part.shape}, or its rule is not known here; "
                "register rules of your own (lw.curvature.rules.register) first"
            )


def _few(tangent: TangentModel, x: Any) -> Any:
    """A few examples: at least two, so that examples can be told apart."""
    if not tangent.separable(x):
        return x
    n = tree.batch_size(x)
    return tree.map_tensors(lambda t: torch.cat([t, t]), x) if n == 1 else tree.rows_of(x, slice(0, PROBE))


def candidates(tangent: TangentModel) -> tuple[list[Part], dict[str, str]]:
    """Modules with a rule for some of their parameters, and why the other parameters have none."""
    names = {id(p): n for n, p in tangent.model.named_parameters()}
    users = Counter(names[id(p)] for m in tangent.model.modules() for p in m._parameters.values() if p is not None)
    taken = set(names.values())
    parts: list[Part] = []
    reasons: dict[str, str] = {}
    for name in tangent.layout.names:
        if users[name] > 1:
            reasons[name] = "tied: several modules share it"
        elif name in tangent.layout.masks:
            reasons[name] = "only some of its elements are selected"
    claimed = set(reasons)
    for path, module in tangent.model.named_modules():
        rule = rule_for(module)
        for site in () if rule is None else rule.sites(module):
            mine = {k: _named(module, local, names) for k, local in (("weight", site.weight), ("bias", site.bias))}
            mine = {k: n for k, n in mine.items() if n in tangent.layout.shapes and n not in claimed}
            if mine:
                b, o, i = site.shape
                width = (i if "weight" in mine else 0) + ("bias" in mine)
                name = ".".join(part for part in (path, site.name) if part)
                name = name if name not in taken else f"{path}..{site.name}"  # a parameter has the name of a site
                own = Part(name, "", mine.get("weight"), mine.get("bias"), (b, o, width), site.transposed, site.kernel)
                parts.append(replace(own, site=site.name))
                claimed.update(mine.values())
        for local, p in module._parameters.items():
            if p is not None and names[id(p)] not in claimed:
                kind = type(module).__name__
                why = f"{kind} has no rule for it" if rule is None else f"{kind}'s rule does not know '{local}'"
                reasons[names[id(p)]] = why
    return parts, reasons


def _named(module: nn.Module, local: str | None, names: dict[int, str]) -> str:
    """The full name of a module's parameter, "" if it has none of that name."""
    path, _, last = (local or "").rpartition(".")
    p = module.get_submodule(path)._parameters.get(last)
    return "" if p is None else names[id(p)]


def _run_plainly(
    tangent: TangentModel, parts: list[Part], x: Any
) -> tuple[dict[str, Tensor | None], Mapping[str, int]]:
    """The gradient of all outputs' sum by each parameter, and how often each module ran forward."""
    calls: Counter[str] = Counter()
    with ExitStack() as hooks, evaluating(tangent.model), plain_kernels():
        for path in {part.module for part in parts}:
            module = tangent.model.get_submodule(path)
            hook = module.register_forward_hook(lambda _m, _i, _o, path=path: calls.update([path]))
            hooks.callback(hook.remove)

        def ones(f: Tensor) -> Tensor:
            hooks.close()  # a reverse pass may run layers again
            return torch.ones_like(f)

        leaves, gradients = pull.pullback(tangent, x, ones)
    return dict(zip(leaves, gradients, strict=True)), calls


def _called_once(parts: list[Part], calls: Mapping[str, int]) -> tuple[list[Part], dict[str, str]]:
    reasons: dict[str, str] = {}
    for part in parts:
        count = calls.get(part.module, 0)
        if count != 1:
            why = f"its module is called {count} times" if count else "its module is not called itself"
            reasons |= dict.fromkeys(part.parameters, why)
    return [part for part in parts if calls.get(part.module) == 1], reasons


def _prove(tangent: TangentModel, parts: list[Part], x: Any) -> tuple[list[Part], dict[str, str]]:
    """The parts whose rule gives autograd's gradient for every example of the probe, and why the others do not."""
    record = Capture(tangent, tuple(parts), clone_all=True).run(x)
    if any(part.site for part in parts) and not _run_in_steps(tangent, record, x):
        whole = [part for part in parts if not part.site]
        proved, why = _prove(tangent, whole, x)
        text = "its module could not be run in steps"
        return proved, why | {n: text for part in parts if part.site for n in part.parameters}
    uses = _uses(record)
    often = {part: name for part in parts for name in part.parameters if uses[name] > 1}
    loose = [] if tangent.separable(x) else [part for part in parts if not _one_row_each(record, part)]
    proved, silent = _proved(record, [part for part in parts if part not in often and part not in loose])
    if silent:  # a gradient that is 0 on the whole probe (dead units) proves nothing
        wrong = set(silent) - set(_proved_nearby(tangent, silent, x))
        proved = [part for part in proved if part not in wrong]
    reasons: dict[str, str] = {}
    for part in parts:
        if part not in proved:
            module = type(tangent.model.get_submodule(part.module)).__name__
            text = f"{module}'s rule does not give autograd's gradient here"
            text = "the batch cannot be cut, and its inputs are not one row an example" if part in loose else text
            text = f"{often[part]} is used more than once" if part in often else text
            hidden = part.site and part.name not in record.outputs
            text = f"{module}'s rule cannot take apart what it is called on" if hidden else text
            reasons |= dict.fromkeys(part.parameters, text)
    changed = {name for name, handed in record.handed_on.items() if handed._version > 0}
    return [replace(part, clone=part.name in changed) for part in proved], reasons


def _one_row_each(record: Record, part: Part) -> bool:
    """Whether a layer's inputs have the examples first. Where a batch cannot be cut, nothing else says which rows are
    whose: graphs of equal size would look like examples with positions, until a batch of others comes."""
    return part.name in record.inputs and len(record.inputs[part.name]) == len(record.f)


def _run_in_steps(tangent: TangentModel, record: Record, x: Any) -> bool:
    """Whether modules that were run in steps gave what they give by themselves, up to the rounding of the network's
    coarsest dtype, and can be gone back through (a checkpoint runs them once more, and not in steps)."""
    f, want = record.f.detach(), tangent(x)
    tensors = (f, *tangent.params.values(), *tangent.constants.values())
    eps = max(torch.finfo(t.dtype).eps for t in tensors if t.is_floating_point())
    if not bool((f - want).abs().max() <= min(0.1, 1e4 * eps) * want.abs().max().clamp(min=1e-30)):
        return False
    outs, zero = [record.outputs[part.name] for part in record.called], torch.zeros_like(f)
    if not outs:
        return True
    try:  # without reading the gradients: rows of other layers may be of some examples only
        record.gradients(outs, zero)
    except NetworkFailed:
        return False
    return True


def _proved_nearby(tangent: TangentModel, parts: list[Part], x: Any) -> list[Part]:
    """The parts whose rule is right at weights moved by about their own size, a few times over; where the network
    does not stand that, there is nothing against them."""
    for nearby in proof.moved(tangent):
        try:
            record = Capture(nearby, tuple(parts), clone_all=True).run(x)
            if bool(torch.isfinite(record.f).all()) and len(record.called) == len(parts):
                parts, _ = _proved(record, parts)
        except (RuntimeError, ValueError):
            continue
    return parts


def _proved(record: Record, parts: list[Part]) -> tuple[list[Part], list[Part]]:
    """The parts whose rule agrees with autograd, and those of them that have no gradient at all."""
    n, generator = len(record.f), torch.Generator().manual_seed(0)
    loud: set[str] = set()
    for start in range(0, n, PROBE):  # all of them: a batch that cannot be cut may mix some examples and not others
        examples = slice(start, min(n, start + PROBE))
        k = examples.stop - start
        u = record.f.new_zeros(k, n, *record.f.shape[1:])  # each cotangent is of one example alone
        noise = torch.randn(k, *record.f.shape[1:], generator=generator, dtype=torch.float64)
        _own(u, examples).copy_(noise)
        truth, outputs = _gradients(record, parts, u)
        parts = [part for part in parts if _agrees(record, part, outputs.get(part.name), truth, examples)]
        loud |= {name for name, g in truth.items() if bool(g.any())}
    return parts, [part for part in parts if not loud.intersection(part.parameters)]


def _own(columns: Tensor, examples: slice) -> Tensor:
    """The first of some examples in the first of columns (k, n, ...), the second in the second, (k, ...)."""
    return columns[:, examples].diagonal(dim1=0, dim2=1).movedim(-1, 0)


def _gradients(record: Record, parts: list[Part], u: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Autograd's of each cotangent u (k, n, ..., c): by parameters {name: (k, *shape)}, and by the outputs of layers
    {part: (k, *output)} that lie in the graph."""
    names = [name for part in parts for name in part.parameters]
    layers = [part.name for part in record.called if part in parts and record.outputs[part.name].requires_grad]
    if not names or not record.f.requires_grad:
        return {}, {}
    ends = [record.leaves[name] for name in names] + [record.outputs[name] for name in layers]
    columns = zip(*record.columns_apart(ends, u), strict=True)
    found = [
        torch.stack([torch.zeros_like(end) if g is None else g for g in column])
        for end, column in zip(ends, columns, strict=True)
    ]
    return dict(zip(names, found, strict=False)), dict(zip(layers, found[len(names) :], strict=True))


def _uses(record: Record) -> Counter[str]:
    """How often each parameter enters the graph: a second use may have no gradient on the probe, and yet on others."""
    names = {id(leaf): name for name, leaf in record.leaves.items()}
    uses: Counter[str] = Counter()
    seen, stack = set(), [record.f.grad_fn]
    while stack:
        node = stack.pop()
        for following, _ in () if node is None else node.next_functions:
            leaf = names.get(id(getattr(following, "variable", None)))
            if leaf is not None:
                uses[leaf] += 1
            elif following not in seen:
                seen.add(following)
                stack.append(following)
    return uses


def _agrees(record: Record, part: Part, g: Tensor | None, truth: dict[str, Tensor], examples: slice) -> bool:
    """Whether the rule gives the gradient of each example from its own inputs and output gradients alone."""
    if g is None:
        return False
    eps = torch.finfo(g.dtype).eps
    try:
        g, view = record.readers[part.name](g), replace(record, parts=(part,)).views()[part.name]
        if g.shape != (examples.stop - examples.start, len(record.f), view.positions, *part.shape[:2]):
            return False
        g, mine = _own(g, examples).unsqueeze(0), view.chunk(examples)
        implied = part.split(mine.outer(g)[0])
        terms = part.split(mine.absolute().outer(g.abs())[0])  # Σ_s |g ⊗ a|: a sum is no preciser than them
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError):  # what the rule did not expect
        return False
    for name, vectors in implied.items():
        want = truth[name].flatten(1)
        if vectors.shape != want.shape:
            return False
        gap, size, most = torch.stack([vectors.to(want) - want, want, terms[name].to(want)]).double().norm(dim=-1)
        if not bool((gap <= min(0.1, 1e4 * eps) * size + min(0.1, 1e3 * eps) * most + 1e-300).all()):
            return False
    return True


def explain(part: Part, model: nn.Module) -> str:
    """What a parameter of this part gets, in words."""
    words = {"kron": "Kronecker", "dense": "exact block", "diagonal": "exact diagonal", "unused": "prior only"}
    what = words[part.kind]
    if not part.generic:
        rule = f"{what} ({type(model.get_submodule(part.module)).__name__} rule)"
        return f"{rule}: {part.reason}" if part.reason else rule
    return f"{what}: {part.reason}" if part.kind == "unused" else f"{what}, generic: {part.reason}"
