"""Arguments in words become objects here, and nowhere else: "kron", "layerwise", "world", bytes of memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lapwing import curvature, given, likelihoods, priors, tree
from lapwing.curvature import BUDGET, Factor, Probe
from lapwing.curvature.factor import KINDS
from lapwing.data import as_batches, first_inputs, ranks_of
from lapwing.distributed import ALONE, Ranks, Shard
from lapwing.errors import InvalidValue, Unsupported
from lapwing.tangent import TangentModel, linearize
from lapwing.tree import Layout

SMALL = 4_000  # structure="auto": full while min(P, N·C) stays within this
FEW = 4  # examples to trace the network with
FEW_OUTPUTS = 16  # factor="auto": exact up to this many outputs, those of all positions counted
STRUCTURES = {
    "full": curvature.Full,
    "kron": curvature.Kronecker,
    "ekfac": curvature.EigenKronecker,
    "block": curvature.Block,
    "diag": curvature.Diagonal,
    "matrix_free": curvature.MatrixFree,
    "lowrank": curvature.LowRank,
}
FALLBACKS = ("kron", "diag")  # what the doctor recommends where "auto" does not fit, the best first
LIKELIHOODS = {
    "gaussian": likelihoods.Gaussian,
    "categorical": likelihoods.Categorical,
    "bernoulli": likelihoods.Bernoulli,
    "dirichlet": likelihoods.Dirichlet,
    "dirichlet_bernoulli": likelihoods.DirichletBernoulli,
    "heteroscedastic": likelihoods.HeteroscedasticGaussian,
    "poisson": likelihoods.Poisson,
    "bradley_terry": likelihoods.BradleyTerry,
}


LOSSES = {  # what people train on, by the name of its class or function
    "CrossEntropyLoss": "categorical",
    "cross_entropy": "categorical",
    "NLLLoss": "categorical",
    "nll_loss": "categorical",
    "MSELoss": "gaussian",
    "mse_loss": "gaussian",
    "BCEWithLogitsLoss": "bernoulli",
    "binary_cross_entropy_with_logits": "bernoulli",
    "PoissonNLLLoss": "poisson",
    "poisson_nll_loss": "poisson",
}
TASKS = ("classification", "regression")  # what people come with; a task also says how predictions are made
# structure="auto" of a task: its calibration wants error bars that are as wide at training inputs as at others
STRUCTURE_OF = {"classification": "kron"}


def as_task(likelihood: Any, outputs: int) -> Any:
    """The likelihood that a task stands for, in a network of so many outputs; others as they are."""
    if not task_of(likelihood):
        return likelihood
    if likelihood == "regression":
        return likelihoods.Gaussian()
    return likelihoods.Dirichlet() if outputs > 1 else likelihoods.DirichletBernoulli()


def task_of(likelihood: Any) -> str:
    """A task by its name; "" for likelihoods."""
    return likelihood if isinstance(likelihood, str) and likelihood in TASKS else ""


def as_likelihood(likelihood: Any) -> likelihoods.Likelihood:
    """A likelihood by its name, or as it is."""
    if isinstance(likelihood, likelihoods.Likelihood):
        if likelihood.unknown:
            told = ", ".join(f"{name} ~ {density}" for name, density in likelihood.unknown.items())
            raise Unsupported(
                f"{likelihood.name} has {told}, which only lw.samplers can draw; give a number here, and learn it by "
                "la.tuned()"
            )
        return likelihood
    if isinstance(likelihood, str) and likelihood in LIKELIHOODS:
        return LIKELIHOODS[likelihood]()
    if task_of(likelihood):
        raise InvalidValue(
            f"{likelihood!r} is a task of lw.laplace and lw.doctor; name a likelihood here: 'gaussian', 'categorical' "
            "or another"
        )
    found = f"an array, {type(likelihood).__name__}" if given.is_array(likelihood) else repr(likelihood)
    raise InvalidValue(
        f"likelihood must be one of {[*TASKS, *LIKELIHOODS]} or an object, got {found}{_meant(likelihood)}"
    )


def _meant(likelihood: Any) -> str:
    """The likelihood that a word, a loss or a class seems to mean."""
    if given.is_array(likelihood):
        return "; inputs and targets are one argument, (X, y), and the likelihood comes after it"
    named = likelihood if isinstance(likelihood, type) or callable(likelihood) else type(likelihood)
    name = likelihood if isinstance(likelihood, str) else getattr(named, "__name__", type(likelihood).__name__)
    if name in LOSSES:
        task = {"categorical": ", or the task 'classification'", "gaussian": ", or the task 'regression'"}
        return f"; a network trained on {name} has the likelihood {LOSSES[name]!r}{task.get(LOSSES[name], '')}"
    if isinstance(likelihood, type) and issubclass(likelihood, likelihoods.Likelihood):
        return f"; give an object of that class: {name}()"
    return given.near(likelihood, (*TASKS, *LIKELIHOODS))


def as_prior(prior: Any, layout: Layout, device: torch.device) -> priors.Prior:
    """A prior from a precision, a word, {glob: precision} or an object, bound to the parameters."""
    if isinstance(prior, (int, float, Tensor)) and not isinstance(prior, bool):
        prior = priors.Gaussian(prior) if torch.as_tensor(prior).ndim == 0 else priors.Gaussian(prior, per="weight")
    elif prior == "layerwise":
        prior = priors.Gaussian(1.0, per="layer")
    elif isinstance(prior, str) and prior == "gprior":
        prior = priors.GPrior()
    elif isinstance(prior, Mapping):
        prior = priors.Gaussian(prior)
    if not isinstance(prior, priors.Prior):
        raise InvalidValue(
            f"prior must be a precision, 'layerwise', 'gprior', {{glob: precision}} or an object, got {prior!r}"
        )
    return prior.bind(layout, device)


def automatic(seen: Probe) -> str:
    """What structure="auto" is, by the size of the problem."""
    return "full" if min(seen.parameters, seen.n * seen.outputs * seen.positions) <= SMALL else "kron"


def planned(memory_budget: int) -> tuple[Any, ...]:
    """The structures that the doctor compares."""
    forms = (curvature.Full(form, memory_budget) for form in ("primal", "dual"))
    return *forms, *(STRUCTURES[name](memory_budget=memory_budget) for name in ("kron", "block", "diag"))


def as_structure(structure: Any, seen: Probe, memory_budget: int) -> curvature.Structure:
    """A structure by its name, with this memory budget, or as it is; "auto" goes by the size of the problem."""
    if isinstance(structure, str) and structure == "auto":
        structure = automatic(seen)
    if isinstance(structure, str) and structure in STRUCTURES:
        return STRUCTURES[structure](memory_budget=memory_budget)
    if not isinstance(structure, curvature.Structure):
        raise InvalidValue(
            f"structure must be 'auto', {list(STRUCTURES)} or an object, got {structure!r}"
            f"{given.near(structure, ('auto', *STRUCTURES))}"
        )
    return structure


def as_factor(
    factor: Any, seen: Probe, likelihood: likelihoods.Likelihood, structure: curvature.Structure | None = None
) -> Factor:
    """An output factor by its name, or as it is; "auto" goes by the number of outputs, and of examples."""
    if factor == "auto" and structure is not None and structure.exact_factor_is_free:
        return Factor("exact")  # products with it cost nothing more
    if factor == "auto":
        several = len(likelihood.curvature_weights()) > 1  # noise per output: only the exact factor keeps it apart
        columns, most = seen.outputs * seen.positions, structure.samples_past if structure is not None else None
        many = most is not None and seen.n > most and columns > 1
        wanted = "exact" if several or not (many or columns > FEW_OUTPUTS) else "monte_carlo"
        if not likelihood.factors:
            raise Unsupported(f"{likelihood.name} is not concave and has no sample method, so it has no output factor")
        found = Factor(wanted if wanted in likelihood.factors else likelihood.factors[0])
        return replace(found, samples=1) if many and found.kind == "monte_carlo" else found
    if not isinstance(factor, (str, Factor)):
        raise InvalidValue(f"factor must be 'auto', one of {KINDS} or lw.curvature.Factor, got {factor!r}")
    return Factor(factor) if isinstance(factor, str) else factor


def as_tangent(model: Any, batches: Any, subset: Any, forward: Any) -> TangentModel:
    """The network linearized over a subset of its weights, traced with the first batch."""
    parameters = model.parameters() if isinstance(model, nn.Module) else iter(())
    device = next((p.device for p in parameters), torch.device("cpu"))
    example = first_inputs(batches, device)
    if forward is None and isinstance(example, Tensor):
        example = example[:FEW]  # enough to trace
    with ranks_of(batches).sharing_errors("linearizing the network"):
        return linearize(model, subset, forward=forward, example=example)


def as_ranks(process_group: Any) -> Ranks:
    """The processes of a torch.distributed group; "world" is all of them."""
    if process_group is None:
        return ALONE
    if not (dist.is_available() and dist.is_initialized()):
        raise InvalidValue(f"process_group={process_group!r} needs torch.distributed.init_process_group() first")
    group = dist.group.WORLD if isinstance(process_group, str) and process_group == "world" else process_group
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise InvalidValue(
            f"process_group must be None, 'world' or a torch.distributed group that this process is in; got {group!r}"
        )
    return Ranks(group)


def as_shard(data: Any, ranks: Ranks) -> Any:
    """Batches, of which each rank has a shard where there are several."""
    with ranks.sharing_errors("reading the arguments"):
        return as_batches(data if ranks.alone or isinstance(data, Shard) else Shard(data, ranks), sharded=True)


def as_start(start: Any, tangent: TangentModel, prior: priors.Prior, chains: int, generator: torch.Generator) -> Tensor:
    """Where chains begin, (k, p) in float64: all at the "trained" weights, at draws of the "prior", or as given; for a
    discrete prior at the values nearest to that."""
    size, theta = tangent.layout.size, tangent.theta.to(torch.float64)
    if isinstance(start, str) and start in ("trained", "prior"):
        found = prior.sample(chains, generator).to(theta) if start == "prior" else theta.expand(chains, -1)
    else:
        found = start.to(theta) if isinstance(start, Tensor) else given.real(start, "start").to(theta)
        if found.shape != (chains, size):
            raise InvalidValue(
                f"start is 'trained', 'prior' or weights ({chains}, {size}), a row a chain; got {tuple(found.shape)}"
            )
    return torch.stack([prior.nearest(v) for v in found])


def as_budget(memory_budget: float | None) -> int:
    """Bytes of working memory; None is BUDGET, 2e9 is a whole number."""
    return BUDGET if memory_budget is None else given.memory(memory_budget, least=2**16)


def facts(
    tangent: TangentModel,
    likelihood: likelihoods.Likelihood,
    prior: Any,
    structure: Any,
    factor: Any,
    budget: int,
    generator: torch.Generator | None,
) -> dict[str, str]:
    """What must be the same on every rank, in words; weights by their hashes."""
    out, selected = {}, tangent.layout.shapes
    for i, (name, p) in enumerate(tangent.model.named_parameters()):
        how = "" if name in selected else ", frozen"
        out[f"parameter {i}"] = f"{name} of shape {tuple(p.shape)}, {p.dtype}{how}"
    masks = tree.fingerprints(tangent.layout.masks)
    out |= {f"weights of {name}": value for name, value in tangent.fingerprints().items()}
    out |= {f"a mask of {name}": value for name, value in masks.items()}
    out["likelihood"] = likelihood.kind
    out |= {f"likelihood's {key}": str(value.tolist()) for key, value in likelihood.hyperparameters.items()}
    out["prior"] = prior.kind
    out |= {f"prior's {key}": value for key, value in tree.fingerprints(prior.facts()).items()}
    for what, thing in (("structure", structure), ("factor", factor), ("memory_budget", budget)):
        out[what] = repr(thing) if type(thing).__repr__ is not object.__repr__ else type(thing).__name__
    out |= tree.fingerprints({} if generator is None else {"generator": given.generator(generator).get_state()})
    return out
