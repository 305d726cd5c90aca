"""Fast routes, proved against plain autograd.

Products with the Jacobian are made by torch's batching and forward-mode rules, and some of those are wrong: they raise,
give another shape or, where sizes coincide, other numbers. So the first result of a route on inputs of each shape is
held to plain reverse passes over the same inputs, by identities that wrong numbers do not pass:

    rows    (n, k, p)   Σ_nk w_nk (uᵀ_nk J_n)  =  Jᵀ(Σ_k w_nk u_nk)      w random: every row has its part
    pulls   (k, p)      Σ_k w_k (Jᵀu_k)        =  Jᵀ(Σ_k w_k u_k)
    pushes  (k, n, c)   rᵀ(J v_k)              =  (Jᵀr)ᵀ v_k             r random, for each k

w is normal over ‖u‖, so that no cotangent is too small to count. Gaps are held to the rounding of the network's
coarsest dtype, parameter by parameter. A gradient that is 0 on all of these inputs (dead units, a PReLU that sees
nothing negative) proves nothing about its rule; then the route is held to autograd at weights nearby too.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from lapwing import tree
from lapwing.tangent.facts import Facts
from lapwing.tangent.kernels import out_of_memory

if TYPE_CHECKING:
    from lapwing.tangent.model import TangentModel

Gradients = Mapping[str, Tensor | None]  # {name: (*shape)}, None where no output depends on it
Rows = Mapping[str, Tensor]  # {name: (n, k, *shape)} or {name: (k, *shape)}
Pull = Callable[["TangentModel", Any, Tensor], Rows]  # a route, run again at other weights
Push = Callable[["TangentModel", Any], Tensor]
T = TypeVar("T")
NEARBY_EXAMPLES = 4  # that run at weights nearby
MOVES = 4  # such weights
PUSH_EXAMPLES = 64  # of a push that are held to a reverse pass, which takes more memory than the push


def attempt(
    tangent: TangentModel,
    route: str,
    key: Hashable,
    run: Callable[[], T],
    right: Callable[[T], bool],
    lacks: tuple[type[Exception], ...] = (RuntimeError,),
) -> T | None:
    """What a fast route gives; None where it fails with an error that says that torch lacks a rule, or is not right on
    inputs of these shapes: it is closed from then on."""
    if route in tangent.facts.closed:
        return None
    try:
        found = run()
    except lacks as error:
        if out_of_memory(error):
            raise
    else:
        if once(tangent, route, key, lambda: right(found)):
            return found
    tangent.facts.closed.add(route)
    return None


def once(tangent: TangentModel, route: str, key: Hashable, right: Callable[[], bool]) -> bool:
    """Whether a route is right on inputs of these shapes: asked once, and remembered by the tangent model."""
    proved = tangent.facts.proved
    if (route, key) not in proved and not right():
        return False
    proved.add((route, key))
    return True


def shapes(x: Any, *more: Tensor) -> Hashable:
    """The shapes of all tensors, by which proofs are remembered."""
    return tuple(t.shape for t in (*tree.tensors(x), *more))


# -- the identities ------------------------------------------------------------------------------------------------


def rows(tangent: TangentModel, x: Any, u: Tensor, names: tuple[str, ...], found: Rows, again: Pull) -> bool:
    """Whether uᵀJ(x_n), {name: (n, k, *shape)} for u (n, k, ..., c), is autograd's. again: the route anew."""
    return _pulled(tangent, x, u, names, found, again, lead=2)


def pulls(tangent: TangentModel, x: Any, u: Tensor, found: Rows, again: Pull) -> bool:
    """Whether Jᵀu, {name: (k, *shape)} for u (k, n, ..., c), is autograd's."""
    return _pulled(tangent, x, u, None, found, again, lead=1)


def _pulled(
    tangent: TangentModel, x: Any, u: Tensor, names: tuple[str, ...] | None, found: Rows, again: Pull, lead: int
) -> bool:
    def compared(at: TangentModel, x: Any, u: Tensor, found: Rows) -> tuple[bool, Gradients]:
        w = mixture(u, lead)
        mixed = torch.einsum("nk,nk...->n..." if lead == 2 else "k,k...->...", w, u)
        truth = at.gradients(x, mixed, names)
        return agree(found, truth, w, tangent.eps), truth

    right, truth = compared(tangent, x, u, found)
    if not right or not _some_zero(truth):
        return right
    few, index = _few(tangent, x)
    u = u[index] if lead == 2 else u[:, index]
    return _nearby(tangent, ("pulled", *truth), few, lambda at: compared(at, few, u, again(at, few, u))[0])


def pushes(tangent: TangentModel, x: Any, v: Tensor, found: Tensor, again: Push) -> bool:
    """Whether J(x)v, (k, n, ..., c) for v (k, p), is autograd's."""
    if found.shape[1] > PUSH_EXAMPLES and tangent.separable(x):
        x, found = tree.rows_of(x, slice(0, PUSH_EXAMPLES)), found[:, :PUSH_EXAMPLES]
    r = normal(found.shape[1:], found)
    truth = tangent.gradients(x, r)
    right = _adjoint(tangent, v, found, r, truth)
    if not right or not _some_zero(truth):
        return right
    few, index = _few(tangent, x)
    r = r[index]
    return _nearby(tangent, "pushed", few, lambda at: _adjoint(tangent, v, again(at, few), r, at.gradients(few, r)))


def _adjoint(tangent: TangentModel, v: Tensor, found: Tensor, r: Tensor, truth: Gradients) -> bool:
    if found.shape != (len(v), *r.shape):
        return False
    along = tangent.layout.unflatten(v)
    terms = [(g * along[n].to(g)).double().reshape(len(v), -1) for n, g in truth.items() if g is not None]
    pushed = (found * r).double().reshape(len(v), -1)
    want = sum((t.sum(1) for t in terms), pushed.new_zeros(len(v)))
    if not bool(torch.isfinite(want).all()):
        return True
    size = sum((t.square().sum(1) for t in terms), pushed.square().sum(1)).sqrt()
    return bool(((pushed.sum(1) - want).abs() <= _coarse(tangent.eps) * size + 1e-300).all())


def agree(found: Rows, truth: Gradients, w: Tensor, eps: float) -> bool:
    """Whether Σ w found, for found {name: (*w.shape, *shape)}, is the truth for each name, up to rounding."""
    flat = {
        n: t.detach().reshape(w.numel(), -1) for n, t in found.items() if t.numel() and t.shape[: w.ndim] == w.shape
    }
    if any(n not in flat or flat[n].shape[1] != g.numel() for n, g in truth.items() if g is not None and g.numel()):
        return False
    w = w.reshape(-1)
    sizes = {n: float((w * torch.linalg.vector_norm(t, dim=1).to(w)).double().norm()) for n, t in flat.items()}
    total = sum(size**2 for size in sizes.values()) ** 0.5
    for n, t in flat.items():
        want = truth.get(n)
        mixed = w.to(t) @ t
        want = torch.zeros_like(mixed) if want is None else want.reshape(-1).to(mixed)
        gap = float((mixed - want).double().norm())
        if bool(torch.isfinite(want).all()) and not gap <= _coarse(eps) * sizes[n] + _fine(eps) * total + 1e-300:
            return False
    return True


def mixture(u: Tensor, lead: int) -> Tensor:
    """Weights w of the first `lead` dimensions of cotangents, normal over ‖u‖, and 0 where u is."""
    size = torch.linalg.vector_norm(u.flatten(lead), dim=-1)
    counts = size > torch.finfo(size.dtype).eps * size.max()  # what is smaller is rounding
    return torch.where(counts, normal(size.shape, size) / size, torch.zeros_like(size))


def _coarse(eps: float) -> float:
    return min(0.1, 1e4 * eps)


def _fine(eps: float) -> float:
    """Of the size of all gradients together: one that is 0 but for rounding is as large as what canceled in it."""
    return min(0.1, 1e3 * eps)


def normal(shape: Any, like: Tensor) -> Tensor:
    """Standard normal numbers of a seed of their own."""
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return noise.to(like)


# -- weights nearby ------------------------------------------------------------------------------------------------


def _some_zero(truth: Gradients) -> bool:
    return any(g is not None and not bool(g.any()) for g in truth.values())


def _few(tangent: TangentModel, x: Any) -> tuple[Any, slice]:
    if not tangent.separable(x):
        return x, slice(None)
    return tree.rows_of(x, slice(0, NEARBY_EXAMPLES)), slice(0, NEARBY_EXAMPLES)


def _nearby(tangent: TangentModel, what: Hashable, x: Any, right: Callable[[TangentModel], bool]) -> bool:
    """Whether a route is right at weights moved by about their own size, a few times over; asked once. Where the
    network does not stand that (it fails, or is not finite), there is nothing against the route."""

    def stands(at: TangentModel) -> bool:
        try:
            return not bool(torch.isfinite(at(x)).all()) or right(at)
        except (RuntimeError, ValueError):
            return True

    return once(tangent, "nearby", what, lambda: all(stands(at) for at in moved(tangent)))


def moved(tangent: TangentModel) -> Iterator[TangentModel]:
    """The tangent model at other weights, which remembers nothing but how batches are cut."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(MOVES):
        params = {}
        for n, p in tangent.params.items():
            noise = torch.randn(p.shape, generator=generator, dtype=p.dtype).to(p.device)
            size = p.square().mean().sqrt()
            params[n] = p + noise * torch.where(size > 0, size, torch.ones_like(size))
        yield replace(tangent, params=params, facts=Facts(separable=tangent.facts.separable))
