"""What tuning at the tangent MAP v* takes: tuning at the trained weights, a reading of the data, and the solves for v*.

    J by passes     tune + reading + passes · each     each = N (push + pull)/2 + 2 solves + ½ search
    J in memory     tune + rows + rounds · each        each = factorization + steps · (2 N·C·P sweeps + solve + search)

What a pass or a round costs can be told beforehand; how many there will be cannot: the further the network is from a
mode, and the structure from the true curvature, the more. PASSES and ROUNDS are typical numbers; the report says so.
"""

from __future__ import annotations

from dataclasses import replace

from lapwing.center import jacobian, space
from lapwing.curvature.cost import Needs, Task

PASSES, SEEN = 50, (20, 150)  # over the data: typical, and what tunings have taken
ROUNDS = 5  # where the rows of J are in memory
STEPS_PER_ROUND = {"quadratic": 1, "exact": 8, "approximate": 20}  # by what the structure is to the objective
SOLVES = 2  # with the structure, a pass
PROBES = 4  # of diag JᵀJ, from which the prior starts
SEARCH = 3e-3  # seconds of a search over known directions beside its elements
SWEEPS, LINES = 2, 20  # evaluations of an element, for each of the known directions and their images, and each output


def in_memory(task: Task) -> bool:
    """Whether the rows of J will be kept: the rule of `center.read`."""
    size = 8 * task.n * task.outputs * task.size
    return size <= task.working // 2 and size * task.probe.outputs <= jacobian.HELD_ROWS_BYTES


def centered(need: Needs, task: Task) -> Needs:
    """With the seconds, and the memory, of tuning at the tangent MAP."""
    return _by_rows(need, task) if in_memory(task) else _streamed(need, task)


def _streamed(need: Needs, task: Task) -> Needs:
    n, m, p, rates = task.n, task.n * task.outputs, task.size, task.rates
    room = max(2, space.DIRECTION_BYTES // (8 * (p + m)))
    known = min(PASSES // 2, space.MAX_DIRECTIONS, room)  # directions, at the end
    search = SEARCH + (SWEEPS * known / 2 * (p + m) + LINES * m) * rates.element
    a_pass = n * (rates.read + (rates.push + rates.pull) / 2) + SOLVES * need.solve + search / 2
    a_pass += need.factorize * SOLVES / 8  # hyperparameters move every few passes
    reading = n * (2 * rates.read + task.backward(0) + task.backward(2 * PROBES))
    work = 16 * known * (p + m) + 24 * known * m  # directions twice, and what the search makes of their images
    return replace(need, tangent=need.tune + reading + PASSES * a_pass, each=a_pass, work=work)


def _by_rows(need: Needs, task: Task) -> Needs:
    n, m, p, rates = task.n, task.n * task.outputs, task.size, task.rates
    quadratic = task.likelihood.quadratic
    kind = "approximate" if not need.exact else "quadratic" if quadratic else "exact"
    search = SEARCH + (SWEEPS * STEPS_PER_ROUND[kind] / 2 * (p + m) + LINES * m) * rates.element
    a_round = need.factorize + STEPS_PER_ROUND[kind] * (2 * m * p * rates.sweep + need.solve + search)
    if kind == "approximate":  # P becomes the Hessian, from the rows
        a_round += m * p * min(m, p) * rates.product + 0.6 * min(m, p) ** 3 * rates.product
    rows = n * (rates.read + task.backward(task.outputs)) + 2 * m * p * rates.element
    return replace(need, tangent=need.tune + rows + ROUNDS * a_round, each=a_round, work=16 * m * p)
