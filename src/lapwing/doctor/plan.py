"""The plan: what each structure would take in memory and time, and which one to use.

Times are told in gradients, so that they mean the same on every machine: seconds over those of a gradient, as in
training, reading included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lapwing import arguments
from lapwing.curvature import BUDGET
from lapwing.curvature.memory import physical_memory
from lapwing.curvature.structure import covered
from lapwing.doctor.needs import Need, Problem, Rates, measure, need, survey, with_products
from lapwing.doctor.reading import Sample
from lapwing.doctor.report import Cost
from lapwing.doctor.trial import THOUSAND, gradient_seconds
from lapwing.errors import InvalidValue, LapwingError
from lapwing.likelihoods import Likelihood
from lapwing.tangent import TangentModel

NAMES = ("full (primal)", "full (dual)", "kron", "block", "diag")
FAILS = (LapwingError, RuntimeError, ValueError, TypeError, NotImplementedError)  # of the user's model, in a trial
LIBRARIES = 16 * 2**20  # bytes of buffers that torch's libraries keep for themselves


@dataclass(frozen=True)
class Plan:
    """What each structure costs, and which is recommended."""

    costs: dict[str, Cost]
    choice: str  # a name of costs
    structure: str  # what to pass to laplace
    working: int  # the memory_budget to pass
    treatment: dict[str, str]
    epoch: float  # seconds of a gradient epoch
    failures: dict[str, str]  # structures whose trial failed, and why


def draw_up(
    tangent: TangentModel,
    last: TangentModel | None,
    likelihood: Likelihood,
    sample: Sample,
    limit: int,
    budget: int | None,
) -> Plan:
    """Plan every structure, and the last layer alone where there is one."""
    working = BUDGET if budget is None else max(2**16, budget // 2)
    problem = survey(tangent, likelihood, sample, working)
    basic = measure(problem, sample)
    rates, failures = _rates(basic, problem)
    names = NAMES if problem.counted else tuple(name for name in NAMES if name != "full (dual)")
    needs, failed = _needs(problem, rates, names)
    failures |= failed
    if last is not None and last.layout.size < tangent.layout.size:
        small = survey(last, likelihood, sample, working)
        name, _ = _preferred(small)
        found, more = _needs(small, _rates(basic, small)[0], (name,))
        if name in found:
            needs["last_layer"] = replace(found[name], note=name.split()[0])
        else:
            failures["last_layer"] = more[name]
    again = gradient_seconds(tangent, likelihood, problem.batch)  # before and after: the load of a machine varies
    unit = min(rates.gradient, again) + rates.read
    costs = {
        name: _cost_of(found, problem, unit, limit) for name, found in needs.items() if not math.isnan(found.memory)
    }
    if not set(costs) & {_preferred(problem)[0], "kron", "diag", "last_layer"}:
        raise InvalidValue(f"no structure works; {'; '.join(f'{name}: {text}' for name, text in failures.items())}")
    choice, structure = _choose(problem, costs)
    chosen = problem if choice != "last_layer" else survey(last, likelihood, sample, working)  # type: ignore[arg-type]
    costs[choice] = replace(costs[choice], note=f"{costs[choice].note}, recommended")
    epoch = problem.n * unit if problem.counted else math.nan
    return Plan(costs, choice, structure, working, _treatment(chosen, structure), epoch, failures)


def _cost_of(found: Need, problem: Problem, unit: float, limit: int) -> Cost:
    peaks = found.memory, max(found.memory, found.kept + found.work)
    at_map, memory = (int(min(peak + problem.copies + LIBRARIES, 2**62)) for peak in peaks)
    epoch = problem.n * unit
    tune, tangent, each = (
        seconds / epoch if problem.counted else math.nan for seconds in (found.tune, found.tangent, found.each)
    )
    predict, fits = found.predict / (THOUSAND * unit), memory <= limit
    return Cost(memory, found.fit / epoch, tune, predict, fits, found.note, tangent, each, at_map)


def _rates(basic: Rates, problem: Problem) -> tuple[Rates, dict[str, str]]:
    """With the seconds of products with J; they stay unknown where J cannot be multiplied by, and why."""
    try:
        return with_products(basic, problem), {}
    except FAILS as error:
        return basic, {"center='tangent'": _told_error(error)}


def _needs(problem: Problem, rates: Rates, names: tuple[str, ...]) -> tuple[dict[str, Need], dict[str, str]]:
    """What each structure takes; and, where its trial failed, why."""
    needs, failures = {}, {}
    for name in names:
        try:
            needs[name] = need(name, problem, rates)
        except FAILS as error:
            failures[name] = _told_error(error)
    return needs, failures


def _told_error(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"


def _preferred(problem: Problem) -> tuple[str, str]:
    """The structure of the highest quality that is not out of proportion: a name of the plan, and of laplace."""
    rows = problem.n * problem.outputs if problem.counted else math.inf
    if min(problem.size, rows) <= arguments.SMALL:
        return ("full (primal)" if problem.primal else "full (dual)"), "full"
    return "kron", "kron"


def _choose(problem: Problem, costs: dict[str, Cost]) -> tuple[str, str]:
    options = dict([_preferred(problem), ("kron", "kron"), ("diag", "diag"), ("last_layer", "auto")])
    known = {name: structure for name, structure in options.items() if name in costs}
    for name, structure in known.items():
        if costs[name].fits:
            return name, structure
    least = min(known, key=lambda name: costs[name].memory)
    return least, known[least]


def _treatment(problem: Problem, structure: str) -> dict[str, str]:
    """What la.coverage will say."""
    chosen = arguments.as_structure(structure, problem.seen, problem.working)
    parts = chosen.parts(problem.tangent, problem.seen.inputs)
    return covered(chosen.formed(problem.primal), parts, problem.tangent) | _rest(problem)


def _rest(problem: Problem) -> dict[str, str]:
    names, layout = (n for n, _ in problem.tangent.model.named_parameters()), problem.tangent.layout
    return {n: "frozen" for n in names if n not in layout.shapes and n not in layout.empty}


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
