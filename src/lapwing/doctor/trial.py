"""Small trials: the fit of one batch, and the prediction of a few inputs, timed and their memory counted.

What a structure costs is best told by its own code. A fit is linear in its batches, so two short fits give the price
of a batch and what comes once:

    seconds(fit of m batches) = once + m · batch

Memory is counted by a ledger of live tensor storages. The work of a prediction is linear in inputs and budget
together (pieces are cut to the budget), so two small predictions with budgets in proportion tell that of a large one.
"""

from __future__ import annotations

import copy
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lapwing import tree
from lapwing.center import Jacobian
from lapwing.curvature import State, Structure, accumulate
from lapwing.curvature.accumulate import flat_outputs, flat_targets
from lapwing.curvature.cost import NEW, Task
from lapwing.curvature.layered import pretend_factorized
from lapwing.doctor.reading import Batch
from lapwing.likelihoods import Likelihood
from lapwing.posterior import condition
from lapwing.predictive import predict
from lapwing.priors import Gaussian
from lapwing.push import LARGEST
from lapwing.tangent import TangentModel

QUICK = 0.2  # seconds that one kind of trial may take, about
REPEAT = 6  # runs of a quick one
FEW = 8  # examples of the first, smallest trial
SIDE, LARGE, ELEMENTS = 384, 1500, 50_000  # of the tensors that algebra is timed on
TWIN = 10**8  # parameters of a model that may be copied


# -- clocks and ledgers --------------------------------------------------------------------------------------------


def seconds(run: Callable[[], Any], device: torch.device, repeat: int = REPEAT) -> float:
    """The least time of a few runs, fewer of slow ones; warm up before.

    On a CPU it is the time of this thread, which a busy machine does not stretch as it does that of the clock on the
    wall; both agree on an idle one.
    """
    clock = time.thread_time if device.type == "cpu" else time.perf_counter
    best, spent = float("inf"), 0.0
    for _ in range(repeat):
        _wait(device)
        start = clock()
        run()
        _wait(device)
        took = clock() - start
        best, spent = min(best, took), spent + took
        if spent > QUICK:
            break
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Ledger(TorchDispatchMode):
    """Counts the bytes of tensors that are alive, beside those known before; `peak` is the most there were."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known: dict[int, Any] = {}
        for tensor in known:
            self._enter(tensor, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._enter(leaf, None)
        return out

    def _enter(self, tensor: Tensor, size: int | None) -> None:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # a wrapper without a storage of its own
            return
        key = storage._cdata
        if key in self.known:
            return
        size = storage.nbytes() if size is None else size
        self.known[key] = weakref.finalize(storage, self._leave, key, size)
        self.live += size
        self.peak = max(self.peak, self.live)

    def _leave(self, key: int, size: int) -> None:
        self.known.pop(key, None)
        self.live -= size


def counted(run: Callable[[], Any], known: Iterable[Tensor]) -> tuple[int, Any]:
    """The most bytes alive during a run, and what it returned."""
    with Ledger(known) as ledger:
        out = run()
    return ledger.peak, out


# -- what a gradient costs: the unit -------------------------------------------------------------------------------


def gradient_seconds(tangent: TangentModel, likelihood: Likelihood, batch: Batch) -> float:
    """Of one example, in a batch like this one, as in training: on a twin of the model, where it can be copied."""
    x, y = batch
    run: Callable[[], Any] = partial(tangent.vjp, x, torch.ones_like(tangent(x)))

    def plainly() -> Any:
        with torch.enable_grad():
            f = tangent.forward(twin, x)
            value = likelihood.log_prob(flat_outputs(f), flat_targets(likelihood, f, y)).sum()
            return torch.autograd.grad(value, weights, allow_unused=True)

    try:
        if sum(p.numel() for p in tangent.model.parameters()) > TWIN:
            raise MemoryError
        twin = copy.deepcopy(tangent.model).eval()
        weights = [p for p in twin.parameters() if p.requires_grad]
        plainly()
        run = plainly
    except Exception:  # a model that is too large or odd to be copied, or whose parameters are all frozen
        run()
    return seconds(run, tangent.device) / len(y)


def jacobian_seconds(tangent: TangentModel, batch: Batch) -> tuple[float, float]:
    """Of J v and of Jᵀu, for one example in a pass over batches like this one; reading them is not in it."""
    x, y = batch
    f = tangent(x)
    flat, targets = flat_outputs(f).to(torch.float64), y.flatten(0, f.ndim - 2)
    times = 2
    jacobian = Jacobian(
        tangent, [batch] * times, flat.repeat(times, 1), torch.cat([targets] * times), (f.shape,) * times, None
    )
    v = torch.ones(tangent.layout.size, dtype=torch.float64, device=tangent.device)
    u = torch.ones_like(jacobian.f)
    runs = (lambda: jacobian.push(v), lambda: jacobian.pull(u))
    for run in runs:
        run()
    push, pull = (seconds(run, tangent.device) / (times * len(y)) for run in runs)
    return push, pull


# -- a fit ---------------------------------------------------------------------------------------------------------


def try_fit(structure: Structure, task: Task) -> tuple[State, float, float, tuple[int, int]]:
    """Fit a batch, or as much of it as there is time for: the state, the seconds that a fit takes beside its batches
    and those of an example in a batch, and the bytes of a fit of one batch, with how many examples that had."""
    tangent, (x, y) = task.tangent, task.batch

    def fit(some: Batch, batches: int) -> State:
        here = replace(task.probe, n=batches * len(some[1]))
        return accumulate(structure, tangent, task.likelihood, [some] * batches, task.factor, seen=here)

    def head(n: int) -> Batch:
        return (tree.rows_of(x, slice(0, n)), y[:n]) if n < len(y) else task.batch

    n = len(y)
    if tangent.separable(x):
        n = _affordable(lambda n: fit(head(n), 1), min(FEW, n), n, tangent.device)
    some = head(n)
    peak, state = counted(lambda: fit(some, 1), _known(tangent, task.batch))
    one = seconds(lambda: fit(some, 1), tangent.device)
    many = 4 if one < QUICK / 2 else 2  # the more batches, the less a noisy clock says of one
    each = max((seconds(lambda: fit(some, many), tangent.device) - one) / (many - 1), 0.1 * one)
    once = max(one - each, 0.0)
    if n < len(y):  # what a batch costs beside its examples weighs more in a small one
        half = head(n // 2)
        each = _grown(each, seconds(lambda: fit(half, 1), tangent.device) - once, n, len(y))
    return state, once, each / len(y), (peak, n)


def _grown(whole: float, half: float, n: int, most: int) -> float:
    """Seconds of `most` examples at once, from those of n and of n/2: a line, held against the noise of clocks."""
    slope = min(max((whole - half) / (n - n // 2), 0.2 * whole / n), whole / n)
    return whole + slope * (most - n)


def _affordable(run: Callable[[int], Any], few: int, most: int, device: torch.device) -> int:
    """How many examples a trial has the time for: from a few on, four times as many while that is quick."""
    n = few
    while n < most and seconds(partial(run, n), device, 1) < QUICK / 2:
        n = min(most, 4 * n)
    return n


# -- a prediction --------------------------------------------------------------------------------------------------


def try_predict(state: State, task: Task) -> tuple[float, int, int]:
    """Predict with a posterior whose eigenvectors are replaced by the identity's: they cost as much to use and
    nothing to find. Inputs are run LARGEST at a time, so no more are needed to see a piece of that size; where there
    is no time for so many, fewer, with a budget in proportion. The seconds for 1,000 inputs, the bytes while a piece of
    them is run, and those of what comes out, with its copies on the way."""
    pretend_factorized(state)
    tangent, likelihood, x, budget = state.tangent, task.likelihood, task.batch[0], task.working
    prior = Gaussian(1.0).bind(state.layout, tangent.device)
    posterior = condition(state, prior, likelihood)

    def run(n: int) -> Any:
        share = max(2**16, budget * n // LARGEST)
        return predict(posterior, likelihood, _tiled(x, n) if cuts else x, memory_budget=share)

    def bytes_of(n: int) -> tuple[int, int]:
        peak, out = counted(lambda: run(n), _known(tangent, (x, None)))
        return peak, sum(t.numel() * t.element_size() for t in vars(out.outputs).values() if isinstance(t, Tensor)) // n

    cuts = tangent.separable(x)
    n = _affordable(run, 4, LARGEST, tangent.device) if cuts else len(tangent(x))
    took = seconds(lambda: run(n), tangent.device)
    thousand = took / n * NEW
    if cuts and n < LARGEST:
        thousand = _grown(took, seconds(lambda: run(n // 2), tangent.device), n, LARGEST) / LARGEST * NEW
    if took > n * QUICK:  # counting is slower still: a prediction's work stays within the budget
        return thousand, budget // 2, 0
    work, each = bytes_of(n)
    if cuts and n < LARGEST:
        less, _ = bytes_of(n // 2)
        work += (work - less) * (LARGEST - n) // (n - n // 2)
    return thousand, work, 4 * each * (NEW - LARGEST)  # float64, joined, and as handed out


def _tiled(x: Any, n: int) -> Any:
    """n examples, by repeating those of a batch."""
    times = -(-n // tree.batch_size(x))
    return tree.map_tensors(lambda t: t.repeat(times, *[1] * (t.ndim - 1))[:n], x)


def _known(tangent: TangentModel, batch: Any) -> list[Tensor]:
    return [*tangent.params.values(), *tangent.constants.values(), *tree.tensors(batch)]


# -- dense algebra -------------------------------------------------------------------------------------------------


def algebra_seconds(device: torch.device) -> dict[str, float]:
    """Of the smallest pieces of matrix products and of the evidence, by the names of `Rates`."""
    double, single = (torch.ones(SIDE, SIDE, dtype=dtype, device=device) for dtype in (torch.float64, torch.float32))
    large = torch.ones(LARGE, LARGE, dtype=torch.float64, device=device)
    values = torch.ones(ELEMENTS, dtype=torch.float64, device=device)

    def evaluate() -> None:
        with torch.enable_grad():
            log_precision = torch.zeros((), dtype=torch.float64, device=device, requires_grad=True)
            torch.autograd.grad(torch.log(values + log_precision.exp()).sum(), log_precision)

    runs: dict[str, tuple[Callable[[], Any], int]] = {
        "product": (lambda: double @ double, SIDE**3),
        "product32": (lambda: single @ single, SIDE**3),
        "sweep": (lambda: large @ large[0], large.numel()),
        "element": (evaluate, ELEMENTS),
    }
    for run, _ in runs.values():
        run()
    return {name: seconds(run, device) / count for name, (run, count) in runs.items()}
