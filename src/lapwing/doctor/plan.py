"""The plan: what each structure would take in memory and time, and which one to use.

What it takes is what a structure says of itself (curvature/cost.py) at the rates of this machine, and, where that is
small enough, a trial on a batch (trial.py) in place of what it tells better.

Times are told in gradients, so that they mean the same on every machine: seconds over those of a gradient, as in
training, reading included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lapwing import arguments, tree
from lapwing.curvature import BUDGET, Probe
from lapwing.curvature.cost import EVIDENCE, HEAP, NEW, Needs, Rates, Task
from lapwing.curvature.memory import physical_memory
from lapwing.curvature.structure import Structure, covered
from lapwing.doctor import trial
from lapwing.doctor.reading import Batch, Excerpt
from lapwing.doctor.report import Cost
from lapwing.doctor.tangent import centered
from lapwing.errors import InvalidValue, LapwingError
from lapwing.likelihoods import Likelihood
from lapwing.tangent import TangentModel

AUTO, LAST = "auto", "last_layer"  # what laplace may be told
FAILS = (LapwingError, RuntimeError, ValueError, TypeError, NotImplementedError)  # of the user's model, in a trial
ASSUMED = 10_000  # examples, where the data do not tell
TRY = 2**28  # bytes of state that a trial may make
TRY_DENSE = 1500  # side of a dense block that a trial may factorize
PIECES = 1.7  # bytes that the process grows by for a byte of passing tensors, where many pieces pass
LIBRARIES = 16 * 2**20  # bytes of buffers that torch's libraries keep for themselves


@dataclass(frozen=True)
class Outlook:
    """What each structure costs, and which is recommended."""

    costs: dict[str, Cost]
    choice: str  # a name of costs
    structure: Any  # what to pass to laplace: a word, or a Structure
    working: int  # the memory_budget to pass
    treatment: dict[str, str]
    epoch: float  # seconds of a gradient epoch
    failures: dict[str, str]  # structures whose trial failed, and why


def draw_up(
    tangent: TangentModel,
    last: TangentModel | None,
    likelihood: Likelihood,
    sample: Excerpt,
    limit: int,
    budget: int | None,
    structure: Any = AUTO,
) -> Outlook:
    """Plan every structure, the user's own among them, and the last layer alone where there is one."""
    working = BUDGET if budget is None else max(2**16, budget // 2)
    failures: dict[str, str] = {}
    basic = measure(tangent, likelihood, sample)
    task = survey(tangent, likelihood, sample, working, _rates(basic, tangent, sample.first, failures))
    options = _options(task, structure, failures)
    rows = {str(one): one for one in arguments.planned(working)} | {name: one for name, (_, one) in options.items()}
    needs, tasks = _needs(task, rows, failures), dict.fromkeys(options, task)
    if last is not None and last.layout.size < tangent.layout.size:
        small = survey(last, likelihood, sample, working, _rates(basic, last, sample.first, {}))
        tasks[LAST], options[LAST] = small, (AUTO, resolved(AUTO, small))
        found = _needs(small, {LAST: options[LAST][1]}, failures)
        needs |= {name: replace(one, note=arguments.automatic(small.probe)) for name, one in found.items()}
    again = trial.gradient_seconds(tangent, likelihood, sample.first)  # before and after: the load of a machine varies
    unit = min(basic.gradient, again) + basic.read
    costs = {name: _cost_of(one, task, unit, limit) for name, one in needs.items()}
    choice = _choose([name for name in options if name in costs], costs, failures)
    costs[choice] = replace(costs[choice], note=f"{costs[choice].note}, recommended".removeprefix(", "))
    epoch, (word, chosen) = task.n * unit if task.counted else math.nan, options[choice]
    return Outlook(costs, choice, word, working, _treatment(tasks[choice], chosen), epoch, failures)


def _options(task: Task, structure: Any, failures: dict[str, str]) -> dict[str, tuple[Any, Structure]]:
    """What may be recommended, the best first: {row: (what to pass, the structure as it will be fitted)}."""
    options: dict[str, tuple[Any, Structure]] = {}
    for word in (structure, arguments.automatic(task.probe), *arguments.FALLBACKS):
        if isinstance(word, str) and word == AUTO:
            continue
        try:
            found = resolved(word, task)
        except FAILS as error:
            failures[str(word)] = _first_line(error)
        else:
            options.setdefault(str(found), (word, found))
    return options


def _cost_of(found: Needs, task: Task, unit: float, limit: int) -> Cost:
    copied = [*task.tangent.params.values(), *task.tangent.constants.values()]
    beside = sum(t.numel() * t.element_size() for t in copied) + LIBRARIES
    peaks = found.memory, max(found.memory, found.kept + found.work)
    at_map, memory = (int(min(peak + beside, 2**62)) for peak in peaks)
    epoch = task.n * unit
    tune, tangent, each = (
        seconds / epoch if task.counted else math.nan for seconds in (found.tune, found.tangent, found.each)
    )
    predict, fits = found.predict / (NEW * unit), memory <= limit
    return Cost(memory, found.fit / epoch, tune, predict, fits, found.note, tangent, each, at_map)


def _rates(basic: Rates, tangent: TangentModel, batch: Batch, failures: dict[str, str]) -> Rates:
    """With the seconds of products with J; they stay unknown where J cannot be multiplied by, and why."""
    try:
        push, pull = trial.jacobian_seconds(tangent, batch)
    except FAILS as error:
        failures["center='tangent'"] = _first_line(error)
        return basic
    return replace(basic, push=push, pull=pull)


def _needs(task: Task, rows: dict[str, Any], failures: dict[str, str]) -> dict[str, Needs]:
    """What each structure takes; where its trial fails, `failures` says why."""
    out: dict[str, Needs] = {}
    for name, structure in rows.items():
        try:
            found = needs_of(structure, task)
        except FAILS as error:
            failures[name] = _first_line(error)
        else:
            out |= {} if found is None else {name: found}
    return out


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"


def _choose(names: list[str], costs: dict[str, Cost], failures: dict[str, str]) -> str:
    """The first that fits; where none does, the least."""
    if not names:
        raise InvalidValue(f"no structure works; {'; '.join(f'{name}: {text}' for name, text in failures.items())}")
    return next((name for name in names if costs[name].fits), min(names, key=lambda name: costs[name].memory))


def _treatment(task: Task, structure: Structure) -> dict[str, str]:
    """What la.coverage will say."""
    tangent, parts = task.tangent, getattr(structure, "parts", None)
    treated = covered(structure, () if parts is None else parts(tangent, task.probe.inputs), tangent)
    frozen = [name for name, _ in tangent.model.named_parameters() if name not in treated]
    return treated | dict.fromkeys(frozen, "frozen")


# -- what a structure takes ------------------------------------------------------------------------------------------


def measure(tangent: TangentModel, likelihood: Likelihood, sample: Excerpt) -> Rates:
    """What this machine takes for a gradient, a forward pass, a product and the like."""
    gradient = trial.gradient_seconds(tangent, likelihood, sample.first)
    return Rates(gradient, sample.seconds, **trial.algebra_seconds(tangent.device))


def survey(tangent: TangentModel, likelihood: Likelihood, sample: Excerpt, working: int, rates: Rates) -> Task:
    """The task of fitting this network to these data; `working` are the bytes of memory_budget."""
    x, _ = sample.first
    few = tree.rows_of(x, slice(0, 4)) if tangent.separable(x) else x
    f, weights = tangent(few), len(likelihood.curvature_weights())
    seen = Probe(sample.n or ASSUMED, f[0, ..., 0].numel(), f.shape[-1], tangent.layout.size, few, weights)
    factor = arguments.as_factor("auto", seen, likelihood)
    task = Task(tangent, likelihood, factor, seen, sample.first, sample.batch, working, rates, bool(sample.n))
    return task.with_parts()


def under(structure: Structure, task: Task) -> Task:
    """With the output factor that a fit of this structure takes."""
    return replace(task, factor=arguments.as_factor("auto", task.probe, task.likelihood, structure))


def resolved(structure: Any, task: Task) -> Structure:
    """A structure, or one by its name, as it will be fitted."""
    found = arguments.as_structure(structure, task.probe, task.working)
    return found.resolved(task.probe, under(found, task).factor)


def needs_of(structure: Structure, task: Task) -> Needs | None:
    """Bytes and seconds of a structure; None where they grow with data whose number is not known."""
    task = under(structure, task)
    says = getattr(structure, "needs", None)
    found = Needs() if says is None else says(task)
    if found.grows and not task.counted:
        return None
    small = found.state + found.factors + found.passing <= TRY and found.side <= TRY_DENSE
    found = _tried(structure, found, task) if small else found
    return centered(replace(found, fit=found.fit + found.passes * task.n * task.rates.read), task)


def _tried(structure: Structure, found: Needs, task: Task) -> Needs:
    state, once, example, (peak, examples) = trial.try_fit(structure, task)
    found = replace(found, fit=once + task.n * example)
    if found.grows:
        return found
    thousand, work, handed_out = trial.try_predict(state, task)
    memory, held = found.memory, PIECES * work + handed_out
    if found.by_batch:
        fitting = HEAP * (peak - found.state) * max(1.0, task.batch_size / examples)
        memory = found.state + max(fitting, max(found.factors, EVIDENCE * task.size) + found.passing)
    return replace(found, predict=thousand, memory=max(memory, found.state + found.factors + held))


def free_memory(device: torch.device) -> int:
    """Bytes that are free on the device; on Linux what the kernel calls available."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        pass
    return physical_memory()
