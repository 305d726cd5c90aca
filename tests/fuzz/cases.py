"""One case from one seed: network × likelihood × structure × factor × subset × prior × dtype × form of the data.

What the library is told stands beside what it means, in plain tensors: `chosen`, the places of the Bayesian weights in
the vector of all, and `a`, `mean`, the diagonal and mean of the prior over those.
"""

from __future__ import annotations

import fnmatch
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from generator import Drawn, network, outputs
from observations import OBSERVATIONS, Observation
from oracle import Dense, jacobian, plain_copy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw

STRUCTURES: tuple[Callable[[random.Random], Any], ...] = (
    lambda rng: lw.curvature.Full("primal"),
    lambda rng: lw.curvature.Full("dual"),
    lambda rng: lw.curvature.Block(),
    lambda rng: lw.curvature.Diagonal(),
    lambda rng: lw.curvature.Kronecker(),
    lambda rng: lw.curvature.Kronecker(sharing="reduce") if rng.random() < 0.3 else lw.curvature.Kronecker(),
    lambda rng: lw.curvature.EigenKronecker(),
    lambda rng: lw.curvature.LowRank(rng.choice((1, 3, 8, 200)), rng.choice((1, 1, 2))),
    lambda rng: lw.curvature.MatrixFree(),
)


@dataclass(frozen=True)
class Case:
    seed: int
    drawn: Drawn
    observation: Observation
    structure: Any
    factor: str
    subset: Any
    chosen: Tensor  # (p,) places of the selected weights in the vector of all
    prior: Any
    a: Tensor | None  # (p,), None for the g-prior, which looks at the curvature
    mean: Tensor  # (p,)
    inputs: Any
    y: Tensor
    new: Any  # inputs to predict at
    batch: int | None  # of a loader; None: the data as tensors

    @property
    def model(self) -> nn.Module:
        return self.drawn.model

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    @property
    def n(self) -> int:
        return len(self.y)

    @cached_property
    def plain(self) -> nn.Module:
        return plain_copy(self.model)

    @cached_property
    def dense(self) -> Dense:
        """The oracle over the data."""
        f, J = jacobian(self.plain, self.inputs)
        theta = torch.cat([p.detach().reshape(-1) for p in self.plain.parameters()])
        return Dense(f, J[..., self.chosen], self.y, theta[self.chosen], self.observation, self.factor == "empirical")

    @cached_property
    def ahead(self) -> tuple[Tensor, Tensor]:
        """f and J of the oracle at the new inputs."""
        f, J = jacobian(self.plain, self.new)
        return f, J[..., self.chosen]

    @property
    def data(self) -> Any:
        return (self.inputs, self.y) if self.batch is None else loader(self.inputs, self.y, self.batch)

    def fit(self, data: Any = None, **options: Any) -> Any:
        known: dict[str, Any] = {"structure": self.structure, "subset": self.subset, "prior": self.prior}
        known |= {"factor": self.factor, "forward": self.drawn.forward} | options
        return lw.laplace(self.model, self.data if data is None else data, self.observation.likelihood, **known)

    def __str__(self) -> str:
        said = self.prior if not isinstance(self.prior, lw.priors.Gaussian) else f"{type(self.prior).__name__}"
        return (
            f"seed {self.seed}: {self.observation.name}, {self.structure}, {self.factor} factor, {self.dtype}, "
            f"{self.n} examples, f {tuple(self.dense.f.shape)}, {len(self.chosen)} weights, prior {said}, "
            f"mean {self.mean.unique().tolist()[:3]}, subset {self.subset}, batch {self.batch}\n{self.model}"
        )


def rows(inputs: Any, index: slice) -> Any:
    if isinstance(inputs, dict):
        return {key: value[index] for key, value in inputs.items()}
    return tuple(value[index] for value in inputs) if isinstance(inputs, tuple) else inputs[index]


def loader(inputs: Any, y: Tensor, size: int) -> Any:
    """Batches of a size: by torch's loader for one tensor, else a list."""
    if isinstance(inputs, Tensor):
        return DataLoader(TensorDataset(inputs, y), batch_size=size)
    starts = range(0, len(y), size)
    return [(rows(inputs, slice(i, i + size)), y[i : i + size]) for i in starts]


def draw(seed: int) -> Case:
    """The case of a seed; torch's random state is left as it was."""
    rng = random.Random(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        while not tame(case := _draw(rng, seed)):
            pass
        return case


def tame(case: Case) -> bool:
    """Whether derivatives leave digits to compare: not where a norm divides by nothing; and in float32, where torch's
    own derivatives in float32 are those in float64."""
    exact = case.dense.J, case.ahead[1]
    if not all(bool(torch.isfinite(J).all()) and float(J.abs().max()) < 1e3 for J in exact):
        return False
    if case.dtype == torch.float64:
        return True
    found = [jacobian(case.plain, some, torch.float32)[1][..., case.chosen] for some in (case.inputs, case.new)]
    case.plain.double()
    return all(
        float((a - b).abs().max()) <= 1e-4 * max(1.0, float(b.abs().max())) for a, b in zip(found, exact, strict=True)
    )


def _draw(rng: random.Random, seed: int) -> Case:
    observation = rng.choice(OBSERVATIONS)(rng)
    drawn = network(rng, observation.c, observation.end)
    dtype = torch.float64 if rng.random() < 0.75 else torch.float32
    drawn.model.to(dtype)
    n = rng.choice((1, observation.c, rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 9)))
    inputs, new = drawn.inputs(n, dtype), drawn.inputs(rng.randint(1, 3), dtype)
    training = drawn.model.training
    with torch.no_grad():
        y = observation.targets(outputs(drawn.model.eval(), inputs))
    drawn.model.train(training)
    subset, chosen, masks = draw_subset(rng, drawn.model)
    prior, a, mean = draw_prior(rng, masks)
    structure = rng.choice(STRUCTURES)(rng)
    factor = "empirical" if rng.random() < 0.1 else "exact"
    batch = None if rng.random() < 0.5 else rng.randint(1, n)
    case = Case(seed, drawn, observation, structure, factor, subset, chosen, prior, a, mean, inputs, y, new, batch)
    return case if a is not None or _clear(case) else replace(case, prior=1.0, a=torch.ones_like(mean), mean=0 * mean)


def _clear(case: Case) -> bool:
    """Whether each weight's second moment is zero or well above rounding, so that a g-prior has one meaning."""
    h = case.dense.unit_G.diagonal()
    small = 1e-16 if case.dtype == torch.float64 else 1e-6
    return float(h.max()) > 1e-6 and not bool(((h > 0) & (h < small * h.max())).any())


# -- subsets ---------------------------------------------------------------------------------------------------------


def draw_subset(rng: random.Random, model: nn.Module) -> tuple[Any, Tensor, dict[str, Tensor]]:
    """What is told, the places that it means, and {name: mask}."""
    named = dict(model.named_parameters())
    way = rng.choice(("all", "all", "all", "last_layer", "globs", "masks", "vector"))
    free = [name for name, p in named.items() if p.requires_grad]
    some = [name for name in named if rng.random() < 0.5] or [rng.choice(sorted(named))]
    masks = {name: torch.zeros(p.shape, dtype=torch.bool) for name, p in named.items()}
    told: Any = way
    if way == "all":
        masks |= {name: torch.ones_like(masks[name]) for name in free}
    elif way == "last_layer":
        masks |= {name: torch.ones_like(masks[name]) for name in named if name.startswith("head.")}
    elif way == "globs":
        told = [name if rng.random() < 0.7 else name.rpartition(".")[0] + "*" for name in some]
        hit = [name for name in named if any(fnmatch.fnmatchcase(name, glob) for glob in told)]
        masks |= {name: torch.ones_like(masks[name]) for name in hit}
    elif way == "masks":
        masks |= {name: torch.rand(named[name].shape) < 0.6 for name in some}
        masks[some[0]] = torch.ones_like(masks[some[0]])
        told = {name: masks[name] for name in some}
    else:
        masks |= {name: torch.rand(named[name].shape) < 0.6 for name in free}
        masks["head.weight"] = torch.ones_like(masks["head.weight"])
        told = torch.cat([masks[name].reshape(-1) for name in free])
    chosen = torch.cat([mask.reshape(-1) for mask in masks.values()]).nonzero().squeeze(-1)
    return told, chosen, {name: mask for name, mask in masks.items() if bool(mask.any())}


# -- priors ----------------------------------------------------------------------------------------------------------


def draw_prior(rng: random.Random, masks: dict[str, Tensor]) -> tuple[Any, Tensor | None, Tensor]:
    """What is told, and the prior's diagonal and mean over the selected weights."""
    counts = {name: int(mask.sum()) for name, mask in masks.items()}
    p = sum(counts.values())
    told_mean, mean = draw_mean(rng, masks, counts)
    way = rng.choice(("float", "float", "float", "layerwise", "layer", "globs", "unit", "weight", "gprior"))
    if way == "float":
        value = rng.uniform(0.3, 3.0)
        if told_mean is None:
            return value, torch.full((p,), value, dtype=torch.float64), mean
        return lw.priors.Gaussian(value, mean=told_mean), torch.full((p,), value, dtype=torch.float64), mean
    if way == "layerwise":
        return "layerwise", torch.ones(p).double(), torch.zeros(p).double()
    extra = {} if told_mean is None else {"mean": told_mean}
    if way == "gprior":
        return lw.priors.GPrior(rng.uniform(0.3, 3.0), **extra), None, mean
    if way == "weight":
        value = 0.3 + 2 * torch.rand(p).double()
        return lw.priors.Gaussian(value, per="weight", **extra), value, mean
    index = {"layer": by_layer, "unit": by_unit, "globs": by_name}[way](masks)
    value = 0.3 + 2 * torch.rand(int(index.max()) + 1).double()
    told: Any = value
    if way == "globs":
        told = dict(zip(masks, value.tolist(), strict=True))
        return lw.priors.Gaussian({escape(k): v for k, v in told.items()}, **extra), value[index], mean
    return lw.priors.Gaussian(told, per=way, **extra), value[index], mean


def escape(name: str) -> str:
    return name.replace("[", "[[]")


def draw_mean(rng: random.Random, masks: dict[str, Tensor], counts: dict[str, int]) -> tuple[Any, Tensor]:
    """What is told of the prior's mean, None for zero, and the vector."""
    p, way = sum(counts.values()), rng.random()
    if way < 0.7:
        return None, torch.zeros(p).double()
    if way < 0.85:
        value = rng.uniform(-0.5, 0.5)
        return value, torch.full((p,), value, dtype=torch.float64)
    each = {name: torch.randn(mask.shape).double()[mask] for name, mask in masks.items()}
    told = {name: v.reshape(masks[name].shape) if bool(masks[name].all()) else v for name, v in each.items()}
    return told, torch.cat(list(each.values()))


def by_name(masks: dict[str, Tensor]) -> Tensor:
    return torch.cat([torch.full((int(mask.sum()),), i) for i, mask in enumerate(masks.values())])


def by_layer(masks: dict[str, Tensor]) -> Tensor:
    """Groups by the module that owns a parameter, numbered as they come."""
    owners = [name.rpartition(".")[0] for name in masks]
    number = {owner: i for i, owner in enumerate(dict.fromkeys(owners))}
    return torch.cat([torch.full((int(masks[n].sum()),), number[o]) for n, o in zip(masks, owners, strict=True)])


def by_unit(masks: dict[str, Tensor]) -> Tensor:
    """Slices along dimension 0, of those with a weight; a module's equally long parameters share theirs."""
    start: dict[tuple[str, int], int] = {}
    used, parts = 0, []
    for name, mask in masks.items():
        length = mask.shape[0] if mask.ndim else 1
        key = name.rpartition(".")[0], length
        if key not in start:
            start[key], used = used, used + length
        unit = torch.arange(length).reshape(-1, *[1] * (mask.ndim - 1)) if mask.ndim else torch.zeros(())
        parts.append((start[key] + unit.expand(mask.shape))[mask])
    return torch.cat(parts).long().unique(return_inverse=True)[1]
