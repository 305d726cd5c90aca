"""What can be said about a model and its data before the model is run: one function a topic, findings out.

A check is a generator of findings. It says "ok" where a user might wonder, and nothing where nobody would.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler

from lapwing import data as loading
from lapwing import fixed, tree
from lapwing.curvature import rules
from lapwing.doctor.reading import Batch, Excerpt
from lapwing.doctor.report import Finding, error, note, ok, warning
from lapwing.tree import layer_of

NORMS = (_BatchNorm, _InstanceNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
HALF = (torch.float16, torch.bfloat16)


def named(names: Any, most: int = 3) -> str:
    """'a, b, c and 4 more'."""
    names = [n or "the model itself" for n in names]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def plural(n: int, what: str) -> str:
    """ "1 example", "2 examples"."""
    return f"{n:,} {what}" + ("" if n == 1 else "s")


# -- the model -----------------------------------------------------------------------------------------------------


def model_checks(model: nn.Module, compiled: bool = False) -> Iterator[Finding]:
    """What the modules and parameters of a network say."""
    parameters = dict(model.named_parameters())
    lazy = [n for n, p in parameters.items() if isinstance(p, nn.parameter.UninitializedParameter)]
    if lazy:
        yield error(f"parameters: {named(lazy)} have no shape yet (a lazy module); run the model once")
        return
    if not parameters:
        what = type(model).__name__
        yield error(f"parameters: {what} has no parameters; there is nothing to be Bayesian about")
        return
    meta = [n for n, p in parameters.items() if p.is_meta]
    if meta:
        yield error(f"parameters: {named(meta)} lie on the meta device and hold no values; load weights")
    yield from _values(model)
    yield from _kinds(model, parameters)
    yield from _modes(model, compiled)
    yield from _batch_norm(model)
    yield from _normalization(model)


def _values(model: nn.Module) -> Iterator[Finding]:
    for what, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        found = [(n, t) for n, t in tensors if t.is_floating_point() and not t.is_meta]
        bad = [n for n, t in found if not bool(torch.isfinite(t).all())]
        if bad:
            yield error(
                f"weights: {what} {named(bad)} holds NaN or infinite values; train again, or load a sound checkpoint"
            )


def _kinds(model: nn.Module, parameters: Mapping[str, Tensor]) -> Iterator[Finding]:
    frozen = [n for n, p in parameters.items() if not p.requires_grad]
    if frozen:
        count = sum(parameters[n].numel() for n in frozen)
        yield note(
            f"frozen: {plural(len(frozen), 'parameter')} ({count:,} elements: {named(frozen)}) do not require grad and "
            "stay fixed; call requires_grad_() on them, or name them in subset=, to make them Bayesian"
        )
    for name, others in tied(model).items():
        yield note(f"shared: {name} is shared with {named(others)}: one parameter, counted once, its uses added up")
    generic = bare(model)
    if generic:
        yield note(
            f"bare: {named(generic)} belong to modules without a layer rule; kron and block give them an exact block "
            "of their own, or a diagonal where that is too large"
        )
    yield from _types(parameters)


def _types(parameters: Mapping[str, Tensor]) -> Iterator[Finding]:
    devices = sorted({str(p.device) for p in parameters.values()})
    if len(devices) > 1:
        yield error(
            f"device: parameters lie on several devices ({', '.join(devices)}); move the model to one with model.to()"
        )
    half = [n for n, p in parameters.items() if p.dtype in HALF]
    if half:
        yield note(
            f"precision: {named(half)} are {parameters[half[0]].dtype}: curvature is summed in float32 or better, but "
            "gradients keep the rounding of half precision; fit with model.float() for exact figures"
        )
    dtypes = sorted({str(p.dtype) for p in parameters.values()})
    if len(dtypes) > 1:
        yield warning(
            f"precision: parameters have several dtypes ({', '.join(dtypes)}); use model.float() or model.double()"
        )


def tied(model: nn.Module) -> dict[str, list[str]]:
    """Parameters that go by several names: first name -> the others."""
    seen: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        seen.setdefault(id(p), []).append(name)
    return {names[0]: names[1:] for names in seen.values() if len(names) > 1}


def bare(model: nn.Module) -> list[str]:
    """Parameters of modules that no layer rule knows."""
    return [n for n, _ in model.named_parameters() if rules.rule_for(model.get_submodule(layer_of(n))) is None]


def _modes(model: nn.Module, compiled: bool) -> Iterator[Finding]:
    if compiled:
        yield note("compile: the model under torch.compile is used, since its Jacobians are needed")
    training = sum(m.training for m in model.modules())
    if training:
        yield note(
            f"mode: the model is in train mode ({plural(training, 'module')}); that is fine: it is run in eval mode "
            "(dropout off, batch norm by its running statistics) and given back as it was"
        )


def _batch_norm(model: nn.Module) -> Iterator[Finding]:
    layers = {n: m for n, m in model.named_modules() if isinstance(m, _BatchNorm)}
    without = [n for n, m in layers.items() if m.running_mean is None]
    if without:
        yield error(
            f"batch norm: {named(without)} normalize by each batch (track_running_stats=False), so an output depends "
            "on the other examples of its batch; use running statistics, or a layer or group norm"
        )
    fresh = [n for n, m in layers.items() if m.running_mean is not None and _untouched(m)]
    if fresh:
        yield warning(
            f"batch norm: {named(fresh)} hold running statistics that were never updated (mean 0, variance 1), so eval "
            "mode normalizes by nothing; run some batches in train mode, or load the buffers of the checkpoint too"
        )
    if layers and not without and not fresh:
        yield ok(f"batch norm: {plural(len(layers), 'layer')}, used with the running statistics")


def _untouched(m: Any) -> bool:
    return bool((m.running_mean == 0).all()) and bool((m.running_var == 1).all())


def _normalization(model: nn.Module) -> Iterator[Finding]:
    found = [type(m).__name__ for m in model.modules() if isinstance(m, NORMS)]
    found += ["WeightNorm"] * len({layer_of(n) for n, _ in model.named_parameters() if n.endswith("weight.original0")})
    if not found:
        return
    counts = ", ".join(f"{found.count(kind)} {kind}" for kind in dict.fromkeys(found))
    yield note(
        f"normalization: normalization layers ({counts}) make the weights before them scale-free, so the posterior has "
        "no mode and the evidence at the trained weights is biased: trust comparisons at equal architecture only, and "
        "check a tuned prior on held-out data"
    )


# -- the data ------------------------------------------------------------------------------------------------------


def loader_checks(batches: Any, sample: Excerpt) -> Iterator[Finding]:
    """What the loader says: examples left out, streams, order."""
    lost = loading.dropped(batches)
    if lost:
        yield warning(
            f"loader: drop_last=True leaves out {lost} of {sample.n} examples, and curvature and evidence are sums "
            "over data; build the loader with drop_last=False"
        )
    yield from _stream(batches, sample)
    sampler = batches.sampler if isinstance(batches, DataLoader) else None
    yield from _sampling(sampler)
    if sample.n is None:
        yield note(
            "loader: the data do not tell how many examples they hold, so the fit counts them by a pass of its own, "
            "and the plan cannot say what tuning costs; a map-style dataset would spare both"
        )
    elif sample.n == 1:
        yield warning("loader: the data hold one example: error bars will be those of the prior")
    else:
        order = ", shuffled (which is fine)" if isinstance(sampler, RandomSampler) else ""
        yield ok(f"loader: {plural(sample.n, 'example')} in batches of {sample.batch:,}{order}")
    yield from _augmentation(sample)


def _stream(batches: Any, sample: Excerpt) -> Iterator[Finding]:
    if not isinstance(batches, DataLoader) or not isinstance(batches.dataset, IterableDataset):
        return
    if batches.drop_last:
        yield warning(
            "loader: drop_last=True leaves out the last examples of the stream, how many only a pass would tell, and "
            "curvature and evidence are sums over data; build the loader with drop_last=False"
        )
    if fixed.starts_twice(batches, sample.spread):
        yield error(
            f"loader: {batches.num_workers} workers begin with the same batch, so each reads the whole stream, and "
            "examples would count several times; share it out by torch.utils.data.get_worker_info(), or use "
            "num_workers=1"
        )


def _sampling(sampler: Any) -> Iterator[Finding]:
    if getattr(sampler, "replacement", False) is True:
        yield warning(
            f"loader: {type(sampler).__name__} draws examples with replacement, so some count twice and some not at "
            "all; fit on a loader that visits each example once"
        )
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        yield note(
            f"loader: DistributedSampler gives one of {sampler.num_replicas} shards: fit on every rank, with "
            "process_group='world', and on shards without padding, which repeats examples"
        )


def _augmentation(sample: Excerpt) -> Iterator[Finding]:
    if sample.again is None:
        return
    parts = [
        what
        for what, a, b in zip(("inputs", "targets"), sample.first, sample.again, strict=True)
        if not tree.same(a, b)
    ]
    if not parts:
        yield ok("augmentation: two reads of the first batch agree: no random augmentation")
    elif sample.indexed:
        yield error(
            f"augmentation: two reads of the same examples give different {' and '.join(parts)}: a random augmentation "
            "is on. The curvature would be that of one random copy of the data, and is refused; fit on a dataset "
            "without it"
        )
    else:
        yield note(
            f"augmentation: two passes start with different {' and '.join(parts)}: shuffling is fine, random "
            "augmentation is not; a stream does not say which it is before the fit, which compares two passes and "
            "refuses the latter"
        )


def value_checks(batches: tuple[Batch, ...]) -> Iterator[Finding]:
    """NaN or infinite inputs and targets; examples without targets."""
    for what, k in (("inputs", 0), ("targets", 1)):
        tensors = [t for batch in batches for t in tree.tensors(batch[k]) if t.is_floating_point()]
        bad = sum(int((~torch.isfinite(t)).sum()) for t in tensors)
        if bad:
            total = sum(math.prod(t.shape) for t in tensors)
            found = f"{plural(bad, 'NaN or infinite value')} among {total:,} looked at"
            yield error(f"{what}: the {what} hold {found}; clean the data")
