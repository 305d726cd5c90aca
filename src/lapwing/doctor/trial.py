"""Small trials: the fit of one batch, and the prediction of a few inputs, timed and their memory counted.

What a structure costs is best told by its own code. A fit is linear in its batches, so two short fits give the price
of a batch and what comes once:

    seconds(fit of m batches) = once + m · batch

Memory is counted by a ledger of live tensor storages. The work of a prediction is linear in inputs and budget
together (pieces are cut to the budget), so two small predictions with budgets in proportion tell that of a large one.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lapwing import tree
from lapwing.curvature import Factor, Probe, State, accumulate
from lapwing.doctor.outputs import log_prob_and_gradient
from lapwing.doctor.reading import Batch
from lapwing.likelihoods import Likelihood
from lapwing.posterior import condition
from lapwing.predictive import predict
from lapwing.predictive.pushforward import LARGEST
from lapwing.priors import Gaussian
from lapwing.tangent import TangentModel

QUICK = 0.15  # seconds that one kind of trial may take, about
REPEAT = 3
FEW = 8  # inputs of a small prediction
THOUSAND = 1000


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
    """Of one example, in a batch like this one."""
    x, y = batch
    log_prob_and_gradient(tangent, likelihood, x, y)
    return seconds(lambda: log_prob_and_gradient(tangent, likelihood, x, y), tangent.device) / len(y)


def forward_seconds(tangent: TangentModel, x: Any, n: int) -> float:
    return seconds(lambda: tangent(x), tangent.device) / n


# -- a fit ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FitTrial:
    state: State
    once: float  # seconds that a fit takes beside its batches
    example: float  # seconds of an example in a batch
    peak: int  # bytes of a fit of one batch of this size


def try_fit(
    structure: Any, tangent: TangentModel, likelihood: Likelihood, factor: Factor, seen: Probe, batch: Batch
) -> FitTrial:
    def fit(batches: int) -> State:
        return accumulate(structure, tangent, likelihood, [batch] * batches, factor, seen=seen)

    n = len(batch[1])
    peak, state = counted(lambda: fit(1), _known(tangent, batch))
    one = seconds(lambda: fit(1), tangent.device)
    two = seconds(lambda: fit(2), tangent.device)
    each = max(two - one, 0.1 * one)
    return FitTrial(state, max(one - each, 0.0), each / n, peak)


# -- a prediction --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PredictTrial:
    thousand: float  # seconds for 1,000 inputs
    peak: int  # bytes for 1,000 inputs, what comes out among them


def try_predict(state: State, likelihood: Likelihood, x: Any, budget: int, quick: bool) -> PredictTrial:
    """Predict with a posterior whose eigenvectors are replaced by the identity's: they cost as much to use and
    nothing to find. Inputs are run LARGEST at a time, so no more are needed to see a piece of that size."""
    _pretend_decomposed(state)
    tangent = state.tangent
    prior = Gaussian(1.0).bind(state.layout, tangent.device)
    posterior = condition(state, prior, likelihood)

    def run(n: int, share: int) -> Any:
        return predict(tangent, posterior, likelihood, _tiled(x, n), memory_budget=share)

    def bytes_of(n: int, share: int) -> tuple[int, int]:
        peak, out = counted(lambda: run(n, share), _known(tangent, (x, None)))
        return peak, sum(t.numel() * t.element_size() for t in (out.f_mean, out.covariance)) // n

    few, _ = bytes_of(FEW, budget * FEW // LARGEST)
    if quick:
        work, each = bytes_of(LARGEST, budget)
        took = seconds(lambda: run(LARGEST, budget), tangent.device) / LARGEST
    else:
        more, each = bytes_of(2 * FEW, budget * 2 * FEW // LARGEST)
        work = few + (more - few) * (LARGEST - FEW) // FEW
        took = seconds(lambda: run(2 * FEW, budget), tangent.device) / (2 * FEW)
    return PredictTrial(took * THOUSAND, work + 4 * each * (THOUSAND - LARGEST))  # float64, joined, and as handed out


def _pretend_decomposed(state: State) -> None:
    for part in state.parts:
        if part.kind != "kron":
            continue
        a, b = state.sums[f"{part.name}/A"], state.sums[f"{part.name}/B"][0]
        ones = [torch.ones(t.shape[0], t.shape[-1], dtype=torch.float64, device=b.device) for t in (a, b)]
        eyes = [torch.diag_embed(one) for one in ones]
        vectors = ones[0], None if a.ndim == 2 else eyes[0], ones[1], eyes[1]
        state.cache.setdefault(part.name, {})["eigenvectors"] = vectors


def _tiled(x: Any, n: int) -> Any:
    """n examples, by repeating those of a batch; a batch that cannot be cut stays as it is."""
    try:
        times = -(-n // tree.batch_size(x))
    except ValueError:
        return x
    return tree.map_tensors(lambda t: t.repeat(times, *[1] * (t.ndim - 1))[:n], x)


def _known(tangent: TangentModel, batch: Any) -> list[Tensor]:
    return [*tangent.params.values(), *tangent.constants.values(), *tree.tensors(batch)]


# -- dense algebra -------------------------------------------------------------------------------------------------


def product_seconds(device: torch.device, dtype: torch.dtype, side: int = 384) -> float:
    """Of one multiplication and addition in a matrix product."""
    a = torch.ones(side, side, dtype=dtype, device=device)
    a @ a
    return seconds(lambda: a @ a, device) / side**3


def element_seconds(device: torch.device, size: int = 50_000) -> float:
    """Of one parameter in one evaluation of the evidence and its gradient."""
    values = torch.ones(size, dtype=torch.float64, device=device)

    def run() -> None:
        with torch.enable_grad():
            log_precision = torch.zeros((), dtype=torch.float64, device=device, requires_grad=True)
            torch.autograd.grad(torch.log(values + log_precision.exp()).sum(), log_precision)

    run()
    return seconds(run, device) / size
