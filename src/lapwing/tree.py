"""Layouts of parameters, and the few tree operations that inputs need.

A `Layout` fixes the order of the selected parameters (that of `named_parameters()`) and turns a dict of
tensors into a vector and back:  flatten: {name: (..., *shape)} -> (..., p),  unflatten: the inverse.
With an element mask, a parameter's entry is the 1-D tensor of its selected elements.
"""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lapwing.errors import InvalidValue
from lapwing.splitmix import mixed_signed


@dataclass(frozen=True, eq=False)
class Layout:
    """Names, full shapes and element masks of the selected parameters, in order."""

    shapes: dict[str, torch.Size]  # full shapes, before masking
    masks: dict[str, Tensor]  # bool masks, only for partly selected parameters
    empty: tuple[str, ...] = ()  # selected too, and without elements, so that they are in no vector

    def numel(self, name: str) -> int:
        """How many elements of a parameter are selected."""
        return int(self.masks[name].sum()) if name in self.masks else math.prod(self.shapes[name])

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parameters, in order."""
        return tuple(self.shapes)

    @property
    def size(self) -> int:
        """How many elements are selected in all, p."""
        return sum(self.numel(name) for name in self.shapes)

    def slices(self) -> dict[str, slice]:
        """Where each parameter lies in the flat vector."""
        out, start = {}, 0
        for name in self.shapes:
            out[name] = slice(start, start + self.numel(name))
            start = out[name].stop
        return out

    def shape(self, name: str) -> torch.Size:
        """The shape of the parameter's entry in a dict: its own, or (k,) under a mask."""
        return torch.Size([self.numel(name)]) if name in self.masks else self.shapes[name]

    def flatten(self, tree: Mapping[str, Tensor], batch_dims: int = 0) -> Tensor:
        """{name: tensor} as a vector (..., p), after so many batch dimensions."""
        if set(tree) != set(self.shapes):
            raise InvalidValue(f"expected tensors for {list(self.shapes)}, got {list(tree)}")
        for name in self.shapes:
            if tree[name].shape[batch_dims:] != self.shape(name):
                found, expected = tuple(tree[name].shape[batch_dims:]), tuple(self.shape(name))
                raise InvalidValue(f"the tensor for {name} must have shape {expected}, got {found}")
        parts = [tree[name] for name in self.shapes]
        return torch.cat([t.reshape((*t.shape[:batch_dims], -1)) for t in parts], dim=-1)

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """Split (..., p) into {name: (..., *shape)}."""
        if vector.shape[-1] != self.size:
            raise InvalidValue(f"expected a last dimension of {self.size} parameters, got {vector.shape[-1]}")
        lead = vector.shape[:-1]
        return {name: vector[..., s].reshape((*lead, *self.shape(name))) for name, s in self.slices().items()}

    def gather(self, full: Mapping[str, Tensor]) -> Tensor:
        """The selected elements of full-shaped tensors, as one vector (p,)."""
        return torch.cat([(full[n][self.masks[n]] if n in self.masks else full[n].reshape(-1)) for n in self.shapes])

    def same_as(self, other: Layout) -> bool:
        """Whether another layout has the same names, shapes and masks."""
        return (
            list(self.shapes.items()) == list(other.shapes.items())
            and self.masks.keys() == other.masks.keys()
            and all(torch.equal(self.masks[k].cpu(), other.masks[k].cpu()) for k in self.masks)
        )


def layer_of(name: str) -> str:
    """The module that owns a parameter: 'block.fc1' for 'block.fc1.weight', '' for one of the root's own."""
    return name.rpartition(".")[0]


def chosen(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that a pattern means: the one that it is, letter by letter, or else those that it matches as a glob. So
    a name that holds *, ? or [ means itself."""
    names = list(names)
    return [pattern] if pattern in names else [name for name in names if fnmatch.fnmatchcase(name, pattern)]


def plain(tree: Any) -> Any:
    """The same tree, its mappings of any class (a Hugging Face BatchEncoding) as dicts, which torch can look into."""
    return pytree.tree_map(
        lambda leaf: {key: plain(value) for key, value in leaf.items()} if isinstance(leaf, Mapping) else leaf, tree
    )


def leaves(tree: Any) -> list[Any]:
    """The leaves of a tree, in order."""
    return [tree] if isinstance(tree, Tensor) else pytree.tree_leaves(plain(tree))


def tensors(tree: Any) -> list[Tensor]:
    """Its leaves that are tensors."""
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Apply a function to every tensor of a tree; other leaves (None, numbers, strings) stay as they are."""
    if isinstance(tree, Tensor):
        return function(tree)
    return pytree.tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, plain(tree))


def moved(tree: Any, device: torch.device, what: str = "the inputs") -> Any:
    """The same tree with its tensors on a device."""
    if any(t.is_meta for t in tensors(tree)):
        raise InvalidValue(f"{what} are on the meta device, which holds no values; load the data first")
    return map_tensors(lambda t: t.to(device), tree)


def detached(tree: Any) -> Any:
    """The same tree with its tensors cut from any graph: data are not differentiated by."""
    return map_tensors(lambda t: t.detach() if t.requires_grad else t, tree)


def batch_size(tree: Any) -> int:
    """The common first dimension of a tree's tensors."""
    found = tensors(tree)
    if not found:
        raise InvalidValue("the batch's inputs hold no tensor; give tensors or a tree of tensors")
    if any(t.ndim == 0 for t in found):
        raise InvalidValue("an input tensor is 0-dimensional; its first dimension must be the batch")
    sizes = {t.shape[0] for t in found}
    if len(sizes) != 1:
        raise InvalidValue(
            f"the batch's input tensors have first dimensions {sorted(sizes)}; they must agree, or, where they are no "
            "examples (a graph), be given as whole batches in a list: [(inputs, targets), ...]"
        )
    return sizes.pop()


def rows_of(tree: Any, index: slice) -> Any:
    """The examples `index` of a batch."""
    return map_tensors(lambda t: t[index], tree)


def joined(trees: Sequence[Any]) -> Any:
    """Batches of one kind as one batch; leaves that are no tensors are those of the first."""
    found = [tensors(one) for one in trees]
    if any([t.shape[1:] for t in one] != [t.shape[1:] for t in found[0]] for one in found):
        raise InvalidValue("batches of inputs differ in their shapes, so they cannot be put together")
    whole = iter([torch.cat(parts) for parts in zip(*found, strict=True)])
    return map_tensors(lambda _: next(whole), trees[0])


def batch_dims(tree: Any) -> Any:
    """vmap's in_dims for a batch: the first dimension of each tensor, None for other leaves."""
    return pytree.tree_map(lambda leaf: 0 if isinstance(leaf, Tensor) else None, plain(tree))


def same(a: Any, b: Any) -> bool:
    """Two trees with equal tensors (NaN equal to NaN)."""
    mine, theirs = ([t if t.layout is torch.strided else t.to_dense() for t in tensors(part)] for part in (a, b))
    return len(mine) == len(theirs) and all(
        s.shape == t.shape and bool(((s == t) | ((s != s) & (t != t))).all()) for s, t in zip(mine, theirs, strict=True)
    )


def digest(rows: Tensor) -> int:
    """A hash of a set of rows (n, ...) that adds: digest(A ∪ B) = digest(A) + digest(B) mod 2⁶⁴, in any order.

    Of the values rounded to float32, so that a cast or another device does not count as other rows."""
    return int(row_digests(rows).sum()) % 2**64


def row_digests(batch: Any) -> Tensor:
    """A hash of each row of a tree's tensors (n, ...), as in `digest`: (n,)."""
    found = tensors(batch)
    total = _row_digests(found[0])
    for tensor in found[1:]:
        total = mixed_signed(total) + _row_digests(tensor)
    return total


def _row_digests(rows: Tensor) -> Tensor:
    bits = rows.detach().reshape(len(rows), -1).cpu().to(torch.float32) + 0.0  # −0 is 0
    words = bits.view(torch.int32).to(torch.int64)
    return mixed_signed(mixed_signed(words + _places(words.shape[1])).sum(1))


@functools.lru_cache(16)
def _places(width: int) -> Tensor:
    """A hash of each place in a row, (width,)."""
    return mixed_signed(torch.arange(1, width + 1))


def raw(tensor: Tensor) -> Tensor:
    """A tensor's bytes, in order, on the CPU."""
    flat = tensor.detach().cpu().reshape(-1)
    if flat.stride() != (1,):  # one value, expanded, is contiguous to torch, and has no bytes to view
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def fingerprints(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """A short hash of each tensor's dtype, shape and bytes."""
    out = {}
    for name, tensor in tensors.items():
        head = f"{tensor.dtype}{tuple(tensor.shape)}".encode()
        out[name] = hashlib.blake2b(head + raw(tensor).numpy().tobytes(), digest_size=8).hexdigest()
    return out
