"""What a structure takes here: what it says of itself (curvature/cost.py) at the rates of this machine, and, where that
is small enough, a trial on a batch (trial.py) in place of what it tells better."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lapwing import arguments, tree
from lapwing.curvature import Probe
from lapwing.curvature.cost import EVIDENCE, HEAP, Needs, Rates, Task
from lapwing.doctor import trial
from lapwing.doctor.reading import Excerpt
from lapwing.doctor.tangent import centered
from lapwing.likelihoods import Likelihood
from lapwing.tangent import TangentModel

ASSUMED = 10_000  # examples, where the data do not tell
TRY = 2**28  # bytes of state that a trial may make
TRY_DENSE = 1500  # side of a dense block that a trial may factorize
PIECES = 1.7  # bytes that the process grows by for a byte of passing tensors, where many pieces pass


def measure(tangent: TangentModel, likelihood: Likelihood, sample: Excerpt) -> Rates:
    """What this machine takes for a gradient, a forward pass, a product and the like."""
    x, y = sample.first
    return Rates(
        gradient=trial.gradient_seconds(tangent, likelihood, (x, y)),
        forward=trial.forward_seconds(tangent, x, len(y)),
        read=sample.seconds,
        **trial.algebra_seconds(tangent.device),
    )


def survey(tangent: TangentModel, likelihood: Likelihood, sample: Excerpt, working: int, rates: Rates) -> Task:
    """The task of fitting this network to these data; `working` are the bytes of memory_budget."""
    x, _ = sample.first
    few = tree.rows_of(x, slice(0, 4)) if tangent.separable(x) else x
    f, weights = tangent(few), len(likelihood.curvature_weights())
    seen = Probe(sample.n or ASSUMED, f[0, ..., 0].numel(), f.shape[-1], tangent.layout.size, few, weights)
    factor = arguments.as_factor("auto", seen, likelihood)
    task = Task(tangent, likelihood, factor, seen, sample.first, sample.batch, working, rates, bool(sample.n))
    return task.with_parts()


def under(structure: Any, task: Task) -> Task:
    """With the output factor that a fit of this structure takes."""
    return replace(task, factor=arguments.as_factor("auto", task.probe, task.likelihood, structure))


def resolved(structure: Any, task: Task) -> Any:
    """A structure, or one by its name, as it will be fitted."""
    found = arguments.as_structure(structure, task.probe, task.working)
    return found.resolved(task.probe, under(found, task).factor)


def needs_of(structure: Any, task: Task) -> Needs | None:
    """Bytes and seconds of a structure; None where they grow with data whose number is not known."""
    task = under(structure, task)
    says = getattr(structure, "needs", None)
    found = Needs() if says is None else says(task)
    if found.grows and not task.counted:
        return None
    small = found.state + found.factors + found.passing <= TRY and found.side <= TRY_DENSE
    found = _tried(structure, found, task) if small else found
    return centered(replace(found, fit=found.fit + found.passes * task.n * task.rates.read), task)


def _tried(structure: Any, found: Needs, task: Task) -> Needs:
    tried = trial.try_fit(structure, task.tangent, task.likelihood, task.factor, task.probe, task.batch)
    found = replace(found, fit=tried.once + task.n * tried.example)
    if found.grows:
        return found
    pushed = trial.try_predict(tried.state, task.likelihood, task.batch[0], task.working)
    memory, held = found.memory, PIECES * pushed.work + pushed.handed_out
    if found.by_batch:
        fitting = HEAP * (tried.peak - found.state) * max(1.0, task.batch_size / tried.examples)
        memory = found.state + max(fitting, max(found.factors, EVIDENCE * task.size) + found.passing)
    return replace(found, predict=pushed.thousand, memory=max(memory, found.state + found.factors + held))
