"""Kernels that torch.func can differentiate.

Fused kernels are fast and lack forward-mode derivatives or batching rules: attention (use the math kernel), the
inference path of nn.MultiheadAttention and TransformerEncoderLayer (switch it off), LSTM through oneDNN (switch
oneDNN off, only when needed, since convolutions live there), embedding bags (compose them from gathers). One is wrong:
the backward pass of instance norm, of one example whose gradient has its channels last (compose it from means).
Every pass of a tangent model runs under `plain_kernels`; its values are those of the fused kernels up to rounding.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode


@contextmanager
def plain_kernels(onednn: bool = True) -> Iterator[None]:
    """In it, torch runs kernels that torch.func can differentiate; onednn=False switches oneDNN off too, and composes
    embedding bags."""
    if onednn and torch.instance_norm is composed_instance_norm:  # in it already
        yield
        return
    fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), replaced("instance_norm", composed_instance_norm):
            if onednn:
                yield
            else:
                with _without_onednn(), ComposedEmbeddingBag():
                    yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)


@contextmanager
def _without_onednn() -> Iterator[None]:
    was = bool(torch.backends.mkldnn.enabled)
    _set_onednn(False)
    try:
        yield
    finally:
        _set_onednn(was)


def _set_onednn(enabled: bool) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TF32 acceleration on top of oneDNN")
        torch.backends.mkldnn.set_flags(enabled)


class ComposedEmbeddingBag(TorchFunctionMode):
    """Replaces the fused embedding bag, which has neither forward mode nor a second derivative."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.embedding_bag:
            return composed_embedding_bag(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


_instance_norm, _embedding = torch.instance_norm, torch.embedding


@contextmanager
def replaced(name: str, by: Any) -> Iterator[None]:
    """A function of torch in whose place another runs: in modules, in torch.nn.functional, and in checkpointed layers
    that a reverse pass runs again. In other threads too, meanwhile; the values are the same."""
    was = getattr(torch, name)
    setattr(torch, name, by)
    try:
        yield
    finally:
        setattr(torch, name, was)


def composed_instance_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """torch.instance_norm by means over positions; one that would update running statistics is left to torch.

    The fused one is a batch norm of (1, n·c, ...): for n = 1 a gradient with channels last (behind a transpose, or a
    convolution that runs so) is read in the wrong order, in torch 2.13."""
    if use_input_stats and running_mean is not None:
        return _instance_norm(
            input, weight, bias, running_mean, running_var, use_input_stats, momentum, eps, cudnn_enabled
        )
    column = (-1, *[1] * (input.ndim - 2))  # one number a channel
    if use_input_stats:
        dims = tuple(range(2, input.ndim))
        mean, variance = input.mean(dims, keepdim=True), input.var(dims, unbiased=False, keepdim=True)
    else:
        assert running_mean is not None
        assert running_var is not None
        mean, variance = running_mean.reshape(column), running_var.reshape(column)
    out = (input - mean) / (variance + eps).sqrt()
    out = out if weight is None else out * weight.reshape(column)
    return out if bias is None else out + bias.reshape(column)


def padded_embedding(weight: Tensor, input: Tensor, padding_idx: int = -1, *args: Any, **kwargs: Any) -> Tensor:
    """torch.embedding with the row of padding_idx held in place. Reverse mode gives it no gradient; forward mode would
    move it, and J v would not be the transpose of Jᵀ u."""
    out = _embedding(weight, input, padding_idx, *args, **kwargs)
    if padding_idx < 0:
        return out
    return torch.where((input == padding_idx).unsqueeze(-1), out.detach(), out)


def composed_embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """F.embedding_bag from gathers: bags (n, length), or a flat list (total,) cut by offsets (n,)."""
    if offsets is None:
        bag = torch.arange(input.shape[0], device=input.device).repeat_interleave(input.shape[1])
        bags, index = input.shape[0], input.reshape(-1)
    else:
        offsets = offsets[:-1] if include_last_offset else offsets
        bags, index = len(offsets), input
        positions = torch.arange(len(input), device=input.device)
        bag = torch.bucketize(positions, offsets, right=True) - 1
    if padding_idx is not None:
        keep = index != padding_idx % len(weight)
        bag, index = bag[keep], index[keep]
        per_sample_weights = None if per_sample_weights is None else per_sample_weights.reshape(-1)[keep]
    vectors = weight[index]
    if per_sample_weights is not None:
        vectors = vectors * per_sample_weights.reshape(-1, 1)
    if mode == "max":
        return _bag_max(vectors, bag, bags)
    total = vectors.new_zeros(bags, weight.shape[1]).index_add(0, bag, vectors)
    if mode == "sum":
        return total
    counts = torch.bincount(bag, minlength=bags).clamp(min=1).to(total)
    return total / counts.unsqueeze(-1)


def _bag_max(vectors: Tensor, bag: Tensor, bags: int) -> Tensor:
    """The largest entry of each bag and column, gathered, so that its derivative is a gather too."""
    order = bag.unsqueeze(-1).expand_as(vectors)
    low = torch.full((bags, vectors.shape[1]), -torch.inf, dtype=vectors.dtype, device=vectors.device)
    top = low.scatter_reduce(0, order, vectors.detach(), "amax")
    hit = vectors.detach() == top[bag]
    rank = torch.arange(len(vectors), device=vectors.device).unsqueeze(-1).expand_as(vectors)
    first = torch.full_like(low, len(vectors), dtype=torch.long)
    first = first.scatter_reduce(0, order, torch.where(hit, rank, len(vectors)), "amin")
    padded = torch.cat([vectors, vectors.new_zeros(1, vectors.shape[1])])
    return padded.gather(0, first)  # an empty bag gives zeros


@contextmanager
def any_batching_rule() -> Iterator[None]:
    """Without torch's warning about a slow batching rule, which is still a right one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        yield


def out_of_memory(error: Exception) -> bool:
    """Whether a pass failed for want of memory, which another route is no answer to."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
