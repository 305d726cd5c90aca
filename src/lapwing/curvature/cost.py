"""What a structure takes, told before it is fitted: bytes, and seconds at the rates of a machine.

A structure that treats the network part by part takes what its parts take. A part has q = b·o·i parameters at s
positions; h is the number of curvature weights, K that of cotangents an example, C that of outputs:

    kind       state          factorized         fit, an example    tune                        predict, an input
    kron       b(i² + h·o²)   b(i² + o² + o·i)   s·b(i² + K·o²)     b(eig(i) + eig(o))          s·b(i² + C·o² + C·o·i)
    dense      h·q²           q²                 K·q²               eigenvalues(q) + chol(q)    ¾ C·q²
    diagonal   h·q            –                  q, K·s·q           –                           C·s·q

The whole matrix (primal) is one dense part. By rows (dual) m = N·K of them meet in (m, m) matrices. A structure that
says nothing of itself is known by trials alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lapwing import tree
from lapwing.curvature.capture import Capture
from lapwing.curvature.cover import cover
from lapwing.curvature.factor import Factor
from lapwing.curvature.gram import panels
from lapwing.curvature.parts import Part
from lapwing.curvature.structure import Probe
from lapwing.likelihoods import Likelihood
from lapwing.tangent import TangentModel

NEW = 1000  # inputs that are predicted
EVALUATIONS, WITH_NOISE = 4, 14  # of the evidence while tuning the prior alone, and with the noise
EVALUATION = 1e-3, 2.5e-4  # seconds of one beside its elements: once, and a part
EVIDENCE = 48  # bytes a parameter, while the evidence and its gradient are evaluated
HEAP = 1.4  # bytes that the process grows by for a byte of passing tensors: gaps, and copies inside kernels


@dataclass(frozen=True)
class Rates:
    """Seconds, on this machine."""

    gradient: float  # of an example, in a batch; a third of it is the run forward
    read: float  # of an example, by the loader
    product: float  # of a multiplication and addition in matrix products, float64
    product32: float
    element: float  # of a parameter in one evaluation of the evidence
    sweep: float  # of an element of a matrix in its product with a vector
    push: float = math.nan  # of an example's J v, in a pass over the data
    pull: float = math.nan  # of an example's Jᵀu

    # LAPACK, in products of the same size: the smaller a matrix, the less of it is products

    def eigenvalues(self, n: int) -> float:
        """Of an n × n matrix."""
        return (1.5 + 1000 / max(n, 1)) * n**3 * self.product

    def eigenvectors(self, n: int) -> float:
        """With its eigenvalues."""
        return (5 + 1500 / max(n, 1)) * n**3 * self.product

    def cholesky(self, n: int) -> float:
        """The Cholesky factor of an n × n matrix."""
        return (0.6 + 300 / max(n, 1)) * n**3 * self.product


@dataclass(frozen=True)
class Needs:
    """Bytes and seconds of a structure; NaN is what it cannot say."""

    memory: float = 0.0  # bytes at the peak of fit, tuning and prediction
    fit: float = math.nan
    tune: float = math.nan
    predict: float = math.nan  # of NEW inputs
    note: str = ""  # what it is, in words
    solve: float = math.nan  # seconds of one solve with the precision
    factorize: float = 0.0  # seconds, before it, for each new prior or noise
    exact: bool = False  # whether the precision is that of the tangent model
    state: float = 0.0  # bytes of its sums
    factors: float = 0.0  # bytes of factorizations that predictions use
    passing: float = 0.0  # bytes more, while they are made
    kept: float = 0.0  # bytes that stay between fit and prediction
    side: int = 0  # of the largest matrix that is factorized
    passes: int = 1  # over the data
    by_batch: bool = True  # whether a trial on a batch tells the memory of a fit
    grows: bool = False  # with the data, so that no trial tells a prediction
    work: float = 0.0  # bytes beside those kept, while tuning at the tangent MAP
    tangent: float = math.nan  # seconds of tuning at the tangent MAP
    each: float = math.nan  # of those, for each pass over the data, or each round where J is in memory


@dataclass(frozen=True)
class Task:
    """A network, its data and its likelihood, as far as costs depend on them, and the rates of the machine."""

    tangent: TangentModel
    likelihood: Likelihood
    factor: Factor
    probe: Probe
    batch: tuple[Any, Any]  # to try things on
    batch_size: int  # that the fit will have
    working: int  # bytes of memory_budget
    rates: Rates
    counted: bool = True  # whether the number of examples is known, and not assumed
    parts: tuple[Part, ...] = ()
    positions: dict[str, int] = field(default_factory=dict)  # of each part, where there are several; never written to

    @property
    def n(self) -> int:
        """The number of examples."""
        return self.probe.n

    @property
    def size(self) -> int:
        """The number of parameters."""
        return self.probe.parameters

    @property
    def outputs(self) -> int:
        """Outputs of an example, at all positions."""
        return self.probe.outputs * self.probe.positions

    @property
    def columns(self) -> int:
        """Cotangents an example; of a softmax, one less than outputs."""
        if self.factor.kind == "exact":
            return self.likelihood.columns(self.probe.outputs) * self.probe.positions
        return self.factor.columns(self.probe.outputs, self.probe.positions)

    @property
    def terms(self) -> int:
        """The number of curvature weights."""
        return len(self.likelihood.curvature_weights(self.factor.kind))

    @property
    def element(self) -> int:
        """Bytes of a number in the network's precision, float32 at the least."""
        return torch.empty(0, dtype=self.tangent.sum_dtype).element_size()

    def with_parts(self) -> Task:
        """With the parts of the network, found by running it on the probe's inputs."""
        parts = cover(self.tangent, self.probe.inputs)
        with torch.no_grad():
            views = Capture(self.tangent, parts).run(self.probe.inputs).views()
        return replace(self, parts=parts, positions={name: view.positions for name, view in views.items()})

    def outer(self, part: Part) -> bool:
        """Whether an example's gradient of a part is an outer product."""
        once = self.positions.get(part.name, 1) == 1
        return once and not part.generic and part.shape[0] == 1 and not part.transposed

    def backward(self, columns: int) -> float:
        """Seconds of one run forward and so many backward, an example."""
        return self.rates.gradient * (1 + columns) / 3

    def evaluations(self, size: int, parts: int = 1) -> float:
        """Seconds of the evidence while tuning."""
        count = WITH_NOISE if self.likelihood.hyperparameters else EVALUATIONS
        return count * (3 * size * self.rates.element + EVALUATION[0] + parts * EVALUATION[1])


# -- parts: fit and predict are of one example -----------------------------------------------------------------------


def of_kron(part: Part, task: Task) -> Needs:
    """Two Kronecker factors."""
    (b, o, i), s, rates = part.shape, task.positions.get(part.name, 1), task.rates
    copies, single = (1, 1.0) if task.element == 8 else (2, 0.7)  # float32 saves less here than in products
    return Needs(
        state=task.element * b * (i**2 + task.terms * o**2),
        factors=8 * b * (copies * (i**2 + o**2) + o * i),
        passing=24 * b * max(i, o) ** 2,
        fit=s * b * (i**2 + task.columns * o**2) * rates.product32,
        tune=b * sum(single * rates.eigenvalues(n) + rates.eigenvectors(n) for n in (o, i)),
        predict=s * b * (i**2 + task.outputs * (o**2 + o * i)) * rates.product32,
        solve=2 * b * o * i * (o + i) * rates.product + 4 * part.size * rates.element,  # into the eigenbasis and back
    )


def of_dense(size: int, task: Task) -> Needs:
    """One matrix, its Cholesky factor and its eigenvalues."""
    rates, squared = task.rates, size**2
    return Needs(
        state=8 * task.terms * squared,
        factors=8 * squared,
        passing=24 * squared,
        fit=task.columns * squared * rates.product,
        tune=rates.eigenvalues(size) + rates.cholesky(size),
        predict=0.75 * task.outputs * squared * rates.product,
        solve=squared * rates.sweep,
        factorize=rates.cholesky(size),
        side=size,
    )


def of_diagonal(part: Part, task: Task) -> Needs:
    """One number a parameter."""
    s, q, rates = task.positions.get(part.name, 1), part.size, task.rates
    fit, predict = (q * times * rates.product32 for times in (task.columns * s if s > 1 else 1, task.outputs * s))
    return Needs(state=8 * task.terms * q, fit=fit, tune=0.0, predict=predict, solve=q * rates.element)


KINDS: dict[str, tuple[str, Callable[[Part, Task], Needs]]] = {
    "kron": ("Kronecker factors", of_kron),
    "dense": ("exact per layer", lambda part, task: of_dense(part.size, task)),
    "diagonal": ("exact diagonal", of_diagonal),
}


def of_parts(task: Task, kind_of: Callable[[Part], str]) -> Needs:
    """The parts together, each of the kind that the structure gives it."""
    kinds = [(part, kind_of(part)) for part in task.parts if part.kind != "unused"]
    each = [KINDS[kind][1](part, task) for part, kind in kinds]
    names = ("state", "factors", "fit", "tune", "predict", "solve", "factorize")
    total = {name: sum(getattr(one, name) for one in each) for name in names}
    kept, transient = total["state"] + total["factors"], max((one.passing for one in each), default=0)
    gradients = sum(4 * task.positions.get(part.name, 1) * part.shape[0] * part.shape[1] for part in task.parts)
    fitting = min(task.working, 3 * task.batch_size * gradients * task.columns)
    total["fit"] = task.n * (total["fit"] + task.backward(task.columns))
    total["tune"] += task.evaluations(task.size, len(task.parts))
    total["predict"] = NEW * (total["predict"] + task.backward(task.outputs))
    return Needs(
        memory=kept + transient + fitting,
        passing=transient,
        kept=kept,
        side=max((one.side for one in each), default=0),
        note=next((note for kind, (note, _) in KINDS.items() if kind in dict(kinds).values()), ""),
        **total,
    )


# -- the whole -----------------------------------------------------------------------------------------------------


def of_matrix(task: Task, gathered: int) -> Needs:
    """G as a matrix (p, p), from rows of J that are `gathered` before they are multiplied."""
    n, k, p, rates = task.n, task.columns, task.size, task.rates
    whole, matrix, new = of_dense(p, task), 8 * p**2, NEW * task.outputs
    lower = 0.5 + 0.5 * min(1.0, panels(p).step / p)  # the lower triangle, in panels
    each = task.backward(k) + k * p * (rates.element + p * lower * rates.product)
    return replace(
        whole,
        factors=0.0,
        memory=whole.state + max(matrix + HEAP * min(task.working, 12 * gathered * p), 3 * matrix),
        kept=whole.state + 2 * matrix,
        fit=n * each + matrix * rates.element,
        tune=whole.tune + task.evaluations(p),
        predict=NEW * (whole.predict + rates.gradient) + new * p * rates.element,
        exact=task.factor.kind == "exact",
        note="exact",
        by_batch=False,
    )


def of_rows(task: Task) -> Needs:
    """G by its rows. Of layers without shared positions none are made: ⟨g ⊗ a, g' ⊗ a'⟩ = ⟨g, g'⟩⟨a, a'⟩."""
    n, p, rates, new = task.n, task.size, task.rates, NEW * task.outputs
    k = task.outputs if task.likelihood.paired else task.columns  # columns of pairs are not kept
    m, outer = n * k, [part for part in task.parts if task.outer(part)]
    sides = sum(part.shape[1] + part.shape[2] for part in outer)
    if 8 * m * sides > task.working:
        outer, sides = [], 0
    wide = p - sum(part.size for part in outer)  # columns that must be made
    held = not wide or 8 * m * p <= task.working
    rows = 0 if not wide else 16 * m * p if held else task.working
    inputs = n * sum(t.numel() * t.element_size() for t in tree.tensors(task.batch[0])) / len(task.batch[1])
    make = n * task.backward(k) + m * wide * rates.element
    again = 0.0 if held else make
    entry = (sides + wide) * rates.product + (2 + 4 * len(outer)) * rates.element  # of the product of two rows
    return Needs(
        memory=inputs + 8 * sides * (m + new) + rows + 8 * max(5 * m**2, 2 * m**2 + 7 * m * new),
        kept=inputs + 8 * sides * m + rows / 2 + 24 * m**2,
        fit=n * task.backward(0),
        tune=make + m**2 * entry + rates.eigenvalues(m) + rates.cholesky(m) + task.evaluations(m),
        predict=new * (m * (entry + 0.75 * m * rates.product) + wide * rates.element)
        + NEW * task.backward(task.outputs)
        + again,
        solve=2 * m * p * rates.sweep + again,
        factorize=rates.cholesky(m),
        exact=task.factor.kind == "exact",
        note="exact",
        by_batch=False,
        grows=True,
    )
