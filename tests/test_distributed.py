"""Data spread over processes: what a group of ranks computes is what one process computes.

Processes are real: run as a script, this file runs the sessions of one process, and forks the ranks of the others,
which meet over gloo; all write what they found to a folder. The tests start it once and compare the files.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import re
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lapwing as lw
from lapwing.center import jacobian
from lapwing.distributed import Ranks, Shard
from lapwing.operators import Streamed, linalg

N, CUTS = 23, {1: (0, 23), 2: (0, 9, 23), 3: (0, 9, 9, 23)}  # of three ranks the second has no data
STRUCTURES: dict[str, Any] = {
    "primal": lw.curvature.Full("primal"),
    "dual": lw.curvature.Full("dual"),
    "kron": "kron",
    "ekfac": "ekfac",
    "diag": "diag",
    "block": "block",
    "lowrank": lw.curvature.LowRank(7),
    "lowrank, two passes": lw.curvature.LowRank(7, passes=2),
}
LIKELIHOODS = ("categorical", "gaussian", "noises")
FREE = lw.curvature.MatrixFree(samples=4, preconditioner="kron", tolerance=1e-8)


# -- networks and data -------------------------------------------------------------------------------------------


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 2)).double()


def inputs() -> Tensor:
    return torch.randn(N, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def problem(kind: str) -> tuple[Any, Tensor]:
    generator = torch.Generator().manual_seed(2)
    if kind == "categorical":
        return "categorical", torch.randint(2, (N,), generator=generator)
    noise = 0.5 if kind == "gaussian" else torch.tensor([0.5, 0.8])
    return lw.likelihoods.Gaussian(noise), torch.randn(N, 2, generator=generator, dtype=torch.float64)


def shard(x: Tensor, y: Tensor, rank: int, size: int) -> list[tuple[Tensor, Tensor]]:
    """The batches of a rank: five examples each, and shards of unequal sizes."""
    start, stop = CUTS[size][rank : rank + 2]
    return [(x[i : min(i + 5, stop)], y[i : min(i + 5, stop)]) for i in range(start, stop, 5)]


def mine(kind: str, rank: int, size: int) -> tuple[Any, list[tuple[Tensor, Tensor]]]:
    likelihood, y = problem(kind)
    return likelihood, shard(inputs(), y, rank, size)


# -- what ranks do -----------------------------------------------------------------------------------------------


def fits(rank: int, size: int) -> dict[str, Any]:
    """Every structure: its state, evidence, predictions and tuning."""
    out: dict[str, Any] = {}
    group = "world" if size > 1 else None
    if size == 3:
        lw.distributed.exchange.SMALL = 256  # so that tensors travel alone
    for i, (name, structure) in enumerate(STRUCTURES.items()):
        kind = LIKELIHOODS[i % 3]
        likelihood, data = mine(kind, rank, size)
        model = nn.parallel.DistributedDataParallel(network()) if size > 1 and name == "kron" else network()
        la = lw.laplace(model, data, likelihood, structure=structure, process_group=group)
        found = described(la)
        if size < 3 or name in ("dual", "ekfac"):
            tuned = la.tuned()
            found |= {
                f"tuned {key}": value for key, value in described(tuned).items() if key not in ("sums", "batches")
            }
            found["v*"] = tuned.tangent_map.vector
        out[name] = found
    return out


def described(la: Any) -> dict[str, Any]:
    state = la.state
    return {
        "n": state.n,
        "targets": state.targets,
        "names": state.layout.names,
        "sums": {k: v.clone() for k, v in state.sums.items()},
        "statistics": state.statistics,
        "batches": [tuple(batch) for batch in state.batches],
        "evidence": la.log_evidence(center="map"),
        "prior": la.prior.precision,
        "noise": la.likelihood.hyperparameters,
        "covariance": la.predict(inputs()[:3] + 0.1).covariance,
    }


def verbs(rank: int, size: int) -> dict[str, Any]:
    """What else reads the data: automatic choices, passes of the tangent center, held-out data, more data, files."""
    group = "world" if size > 1 else None
    likelihood, data = mine("categorical", rank, size)
    out: dict[str, Any] = {}
    la = lw.laplace(network(), data, likelihood, process_group=group)
    out["auto"] = str(la.state.structure), la.log_evidence()
    kron = lw.laplace(network(), data, likelihood, structure="kron", process_group=group)
    held = [(x + 0.1, y) for x, y in data]
    validated = kron.tuned(method="validation", data=held, fixed="temperature")
    out["validation"] = validated.prior.precision, validated.temperature
    out["updated"] = described(kron.updated(held))
    out["without"] = described_sums(kron.updated(held).without(held))
    out["tuned on all"] = described(kron.updated(held).tuned())
    kron.save(f"{FOLDER[0]}/kron {rank} of {size}")
    there = Shard(data, Ranks(dist.group.WORLD)) if size > 1 else data
    loaded = lw.load(f"{FOLDER[0]}/kron {rank} of {size}", network(), data=there)
    out["loaded"] = described(loaded.recentered())
    certificate = kron.certify(8)
    out["certificate"] = certificate.trace.value
    out["certificate's log_det"] = certificate.log_det.value, certificate.log_det.standard_error
    out["certificate's variance"] = certificate.variance.value, certificate.variance.standard_error
    exact = lw.laplace(network(), data, likelihood, structure="full", process_group=group).certify(8)
    out["certificate of full"] = exact.variance.value, exact.variance_training.value, exact.log_det.value
    given = kron.certify(8, inputs=inputs()[:5] + 0.1)
    out["certificate's inputs"] = given.variance.value, given.variance.standard_error
    kept, jacobian.HELD_ROWS_BYTES = jacobian.HELD_ROWS_BYTES, 0  # J by passes
    out["by passes"] = kron.recentered().tangent_map.vector
    streamed = kron.tuned()
    out["tuned by passes"] = streamed.prior.precision, streamed.log_evidence()
    jacobian.HELD_ROWS_BYTES = kept
    words = torch.randint(6, (N, 2), generator=G(4))
    out["ella"] = features(data, likelihood, group)
    out["ella of streams"] = features(Unsized(data), likelihood, group)
    out["processes"] = [process(data, likelihood, group, **options) for options in PROCESSES]
    tokens = shard(words, problem("categorical")[1], rank, size)
    out["embedding"] = described_sums(
        lw.laplace(embedding(), tokens, likelihood, structure="kron", process_group=group)
    )
    return out


def calibrated(rank: int, size: int) -> dict[str, Any]:
    """How sure a classifier may be: of numbers, by features of all ranks' inputs; and of integers, which have none."""
    group, y = "world" if size > 1 else None, problem("categorical")[1]
    words = torch.randint(6, (N, 2), generator=G(4))
    out: dict[str, Any] = {}
    for name, x, net in (("numbers", inputs(), network()), ("integers", words, embedding())):
        la = lw.laplace(net, shard(x, y, rank, size), "classification", process_group=group).tuned()
        one = la.calibration
        out[name] = one.choice.scale, one.choice.a, one.choice.b, one.choice.premium, la.predict(x[:3]).probs
        out[f"{name}: n"] = one.n, one.findings
    return out


def embedding() -> nn.Module:
    """Integers (n, 2) below 6 -> 2."""
    table = nn.Sequential(nn.Embedding(6, 3), nn.Flatten(), nn.Linear(6, 2)).double()
    table.load_state_dict({k: torch.randn(v.shape, generator=G(3)).double() for k, v in table.state_dict().items()})
    return table


class Unsized:
    """Batches that do not say how many they are."""

    def __init__(self, batches: list[tuple[Tensor, Tensor]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self.batches)


def features(data: Any, likelihood: Any, group: Any) -> dict[str, Any]:
    """ELLA: anchors of all ranks, tuned, saved and loaded."""
    fit = lw.gp.ella(network(), data, likelihood, anchors=11, rank=6, prior=2.0, process_group=group)
    tuned = fit.tuned()
    path = f"{FOLDER[0]}/ella {dist.get_rank() if group else ''}"
    tuned.save(path)
    back = lw.load(path, network())
    return {
        "about": (fit.n, fit.targets, fit.anchors, fit.share),
        "projection": fit.directions.mT @ fit.directions,
        "evidence": fit.log_evidence(),
        "tuned": (tuned.prior.precision, tuned.log_evidence()),
        "covariance": back.predict(inputs()[:3] + 0.1).covariance,
    }


PROCESSES: tuple[dict[str, Any], ...] = (
    {},
    {"inducing": 4},
    {"inducing": 4, "choice": "evidence"},
    {"inducing": inputs()[:3]},
    {"independent": True},
)


def process(data: Any, likelihood: Any, group: Any, **options: Any) -> dict[str, Any]:
    """Functional Laplace of all ranks' data, tuned."""
    fit = lw.gp.functional(network(), data, likelihood, prior=2.0, process_group=group, **options)
    tuned = fit.tuned(center="map") if not options else fit.tuned()
    return {
        "about": (fit.n, fit.targets),
        "evidence": fit.log_evidence(),
        "tuned": tuned.log_evidence(),
        "covariance": tuned.predict(inputs()[:3] + 0.1).covariance,
    }


def described_sums(la: Any) -> dict[str, Any]:
    return {"sums": la.state.sums, "evidence": la.log_evidence()}


def G(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def streams(rank: int, size: int) -> dict[str, Any]:
    """Products over the data, and the solves that are made of them."""
    group = "world" if size > 1 else None
    likelihood, data = mine("gaussian", rank, size)
    data = [(torch.cat([x for x, _ in data]), torch.cat([y for _, y in data]))] if data else []
    la = lw.laplace(network(), data, likelihood, structure=FREE, prior=3.0, process_group=group)
    precision, ranks = la.posterior.precision, la.state.source.ranks
    vectors = torch.randn(3, la.state.layout.size, generator=G(5), dtype=torch.float64)
    product = precision.root.product(vectors[ranks.share(3)], torch.ones(1, dtype=torch.float64))
    out: dict[str, Any] = {
        "product": [ranks.whole(one, "a test") for one in product],
        "solve": linalg.solve(precision, vectors),
        "diagonal": linalg.diagonal(precision),
        "v*": la.recentered().tangent_map.vector,
        "samples": la.gathered().solve.z,
        "draws": la.draw(1, G(7)),
        "variance": la.predict(inputs()[:3]).f_var,
    }
    if size < 3:
        out["sgd"] = stochastic_solve(vectors, rank, size)
        precise = lw.curvature.MatrixFree(samples=200, tolerance=1e-3)
        many = lw.laplace(network(), data, likelihood, structure=precise, prior=3.0, process_group=group)
        out["variances"] = many.predict(inputs()[:3]).f_var
        tuned = many.tuned()
        out["tuned"], out["evidence"] = tuned.prior.precision, tuned.log_evidence()
    alike = [(inputs()[:6], problem("gaussian")[1][:6])]  # on every rank: noise that is the same would add up
    bare = lw.curvature.MatrixFree(preconditioner="none")
    root = lw.laplace(network(), alike, likelihood, structure=bare, process_group=group).state.source
    noise = root.noise(torch.arange(400)[ranks.share(400)], 8)[0]
    out["noise"] = ranks.whole(noise, "a test"), root.diagonal().sum()
    return out


def stochastic_solve(vectors: Tensor, rank: int, size: int) -> Tensor:
    """A solve by minibatches, of which the ranks have unequal numbers."""
    likelihood, data = mine("gaussian", rank, size)
    group, structure = "world" if size > 1 else None, lw.curvature.MatrixFree(solver="sgd", tolerance=0.05)
    la = lw.laplace(network(), data, likelihood, structure=structure, prior=30.0, process_group=group)
    la.state.source.noise(torch.arange(1)[la.state.source.ranks.share(1)], 0)  # the number of batches is known by it
    return linalg.solve(la.posterior.precision, vectors)


def spread(rank: int, size: int) -> dict[str, Any]:
    """Samples that are spread over ranks, each of which has every size-th example."""
    out: dict[str, Any] = {}
    for kind in ("categorical", "noises"):
        likelihood, y = problem(kind)
        mine = inputs()[rank::size], y[rank::size]
        data = [(mine[0][i : i + 7], mine[1][i : i + 7]) for i in range(0, len(mine[0]), 7)]
        group, x = "world" if size > 1 else None, inputs()[:4] + 0.1
        budget = 8 * 26 * 42 if kind == "noises" else 2**30  # of a sample at a time, and of two more that pass
        free = lw.curvature.MatrixFree(samples=5, tolerance=1e-9, preconditioner="nystrom", rank=9)
        free = dataclasses.replace(free, memory_budget=budget)
        la = lw.laplace(network(), data, likelihood, structure=free, prior=2.0, process_group=group)
        most, kept = [0], Streamed.precondition

        def counted(self: Streamed, r: Tensor, most: list[int] = most, kept: Any = kept) -> Tensor:
            most[0] = max(most[0], len(r))
            return kept(self, r)

        Streamed.precondition = counted  # type: ignore[method-assign]
        solve, noise = la.solve, la.posterior.precision.noise
        Streamed.precondition = kept  # type: ignore[method-assign]
        whole = la.gathered()
        out[f"{kind}, own"] = len(solve.z), noise.shape[1], most[0], solve.steps, solve.passes
        found = {
            "samples": whole.solve.z,
            "dimension": la.effective_dimension(),
            "residual": solve.residual < 1e-8,
            "covariance": la.predict(x).covariance,
            "joint": la.predict(x, joint=True).covariance,
            "evidence": la.log_evidence(),
            "kept": la.draw(3),
            "one draw": la.draw(1, G(7)),
            "draws": la.draw(4, G(8)),
            "functions": la.function_samples(2)(x),
            "traces": linalg.traces(la.posterior.precision, la.prior.operator()),
            "image": linalg.mv(la.posterior.precision, torch.eye(42, dtype=torch.float64)[:2]),
        }
        if kind == "categorical":
            la = la.tuned()
            found["tuned"] = la.prior.precision, la.log_evidence()
            found["tuned mean"] = la.predict(x, mean="tangent").f_mean
            found["tuned covariance"] = la.predict(x).covariance
            held = [(x + 0.2, y) for x, y in data]
            found["validated"] = la.tuned(method="validation", data=held, fixed="precision").temperature
            whole = la.gathered()
        out[kind] = found
        out[f"{kind}, elsewhere"] = whole.predict(inputs()[rank : rank + 2]).covariance, la.predict(inputs()).covariance
        if rank == 0:
            whole.save(f"{FOLDER[0]}/{kind} of {size}")
    return out


def sampled(rank: int, size: int) -> dict[str, Any]:
    """A Monte-Carlo factor, of draws that are each rank's own."""
    likelihood, data = mine("gaussian", rank, size)
    group = "world" if size > 1 else None
    data = [(torch.ones_like(x), y) for x, y in data]  # one input: what differs is drawn
    factor, structure = lw.curvature.Factor("monte_carlo", 500), lw.curvature.Full("primal")
    la = lw.laplace(network(), data, likelihood, structure=structure, factor=factor, process_group=group)
    own = Ranks(dist.group.WORLD if group else None).own(G(9))
    return {"gram": la.state.sums["gram"], "own": torch.randn(5, generator=own)}


def bases(rank: int, size: int) -> dict[str, Any]:
    """Eigenvectors that differ between ranks, by their signs."""
    likelihood, data = mine("categorical", rank, size)
    eigh = torch.linalg.eigh

    def turned(*args: Any) -> Any:
        values, vectors = eigh(*args)
        return values, -vectors if rank == 1 else vectors

    torch.linalg.eigh = turned
    la = lw.laplace(network(), data, likelihood, structure="ekfac", process_group="world", memory_budget=2**20)
    ella = lw.gp.ella(network(), data, likelihood, anchors=11, rank=6, process_group="world")
    torch.linalg.eigh = eigh
    return {
        "ella": ella.directions,
        "basis": la.state.basis,
        "sums": la.state.sums,
        "lead": la.data.ranks.traffic["lead messages"],
    }


def traffic(rank: int, size: int) -> dict[str, Any]:
    """Bytes and messages of a fit, and of a product."""
    out: dict[str, Any] = {}
    for name, structure in STRUCTURES.items():
        likelihood, data = mine("categorical", rank, size)
        la = lw.laplace(network(), data, likelihood, structure=structure, process_group="world")
        out[name] = dict(la.data.ranks.traffic)
    likelihood, data = mine("categorical", rank, size)
    la = lw.laplace(network(), data, likelihood, structure=FREE, process_group="world")
    counted = la.data.ranks.traffic
    counted.clear()
    own = torch.ones(3, la.state.layout.size, dtype=torch.float64)[la.data.ranks.share(3)]
    la.state.source.product(own, torch.ones(1).double())
    out["product"] = dict(counted)
    counted.clear()
    la.state.source.product(own[: 1 - rank], torch.ones(1).double())
    out["one vector"] = dict(counted)
    counted.clear()
    la.state.source.noise(torch.arange(3)[la.data.ranks.share(3)], 0)
    out["noise"] = dict(counted)
    _ = la.solve
    counted.clear()
    la.predict(inputs()[:3])
    out["prediction"] = dict(counted)
    return out


# -- faults ------------------------------------------------------------------------------------------------------


def faults(rank: int, size: int) -> dict[str, Any]:
    """Each in turn on the same group, which stays usable: what every rank was told, and a fit afterwards."""
    likelihood, data = mine("gaussian", rank, size)
    x, y = inputs(), problem("gaussian")[1]
    odd = rank == 1

    def fit(model: nn.Module | None = None, batches: Any = data, **options: Any) -> Any:
        options = {"likelihood": likelihood, "structure": "kron", **options}
        return lw.laplace(model or network(), batches, process_group="world", **options)

    def ella(batches: Any = data, rank: int = 6) -> Any:
        return lw.gp.ella(network(), batches, likelihood, anchors=11, rank=rank, process_group="world")

    bad = [(torch.where(torch.tensor(i == 1), torch.nan, xs), ys) for i, (xs, ys) in enumerate(data)]
    la, plain, growing = fit(structure=FREE), fit(), list(data)
    grown = fit(structure=FREE, batches=growing)
    growing += [(x[:1], y[:1])] if odd else []  # another number of examples in a later pass

    repeating = DataLoader(TensorDataset(x, y), sampler=DistributedSampler(x, num_replicas=size, rank=rank))
    cut = network()
    cut[0].weight = nn.Parameter(distribute_tensor(cut[0].weight.data, init_device_mesh("cpu", (size,))))
    other = la.replace(prior=2.0).posterior.precision
    if odd:
        object.__setattr__(other, "precondition", lambda r: 1 / 0 if len(r) else r)
    cases: dict[str, Callable[[], Any]] = {
        "repeats": lambda: fit(batches=repeating),
        "cut": lambda: fit(cut),
        "NaN": lambda: fit(batches=bad if odd else data),
        "weights": lambda: fit(network(odd)),
        "order": lambda: fit(Ordered(odd)),
        "dtype": lambda: fit(network().float() if odd else network()),
        "structure": lambda: fit(structure="diag" if odd else "kron"),
        "prior": lambda: fit(prior=2.0 if odd else 1.0),
        "features": lambda: ella(rank=7 if odd else 6),
        "NaN anchors": lambda: ella(batches=bad if odd else data),
        "likelihood": lambda: fit(likelihood=lw.likelihoods.Gaussian(0.4 if odd else 0.5)),
        "subset": lambda: fit(subset=["3.*"] if odd else "all"),
        "no data": lambda: fit(batches=[]),
        "not data": lambda: fit(batches=7 if odd else data),
        "argument": lambda: fit(prior="odd" if odd else 1.0),
        "step": lambda: la.state.source.noise(torch.arange(1), 0) if odd else plain.recentered(),
        "generator": lambda: la.posterior.draw(2, G(rank)),
        "vectors": lambda: linalg.solve(la.posterior.precision, torch.full((2, 42), 1.0 + rank).double()),
        "in a solve": lambda: other.samples,
        "inputs": lambda: la.predict(x[:2] + rank),
        "NaN inputs": lambda: la.predict(x[:2] / (0.0 if odd else 1.0)),
        "file": lambda: la.save(f"{FOLDER[0]}/spread"),
        "another pass": lambda: grown.recentered(),
        "another product": lambda: grown.solve,
    }
    out: dict[str, Any] = {name: told(case) for name, case in cases.items()}
    out["afterwards"] = plain.log_evidence(), fit().log_evidence()
    dist.destroy_process_group()
    out["destroyed"] = told(lambda: plain.recentered())
    out["still"] = plain.predict(x[:2]).covariance
    return out


class Ordered(nn.Module):
    """The same parameters in one order or the other."""

    def __init__(self, backwards: bool) -> None:
        super().__init__()
        names = ["a", "b"]
        for name in reversed(names) if backwards else names:
            self.register_parameter(name, nn.Parameter(torch.ones(2, 3, dtype=torch.float64)))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.a + 2 * self.b).T


def told(case: Callable[[], Any]) -> tuple[str, str]:
    try:
        case()
    except (lw.errors.LapwingError, ZeroDivisionError) as error:
        return type(error).__name__, str(error)
    return "", "nothing"


def killed(rank: int, size: int) -> dict[str, Any]:
    """One rank dies in the middle of a pass."""
    likelihood, data = mine("gaussian", rank, size)

    class Deadly(list):
        armed = size == 2

        def __iter__(self) -> Iterator[Any]:
            for i, batch in enumerate(data):
                if self.armed and rank == size - 1 and i == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield batch

    deadly = Deadly(data)

    def fit() -> None:
        structure = "kron" if size == 2 else FREE  # of three, it dies in a product of a solve
        la = lw.laplace(network(), deadly, likelihood, structure=structure, process_group="world")
        deadly.armed = True
        _ = la.solve

    begun = time.monotonic()
    name, text = told(fit)
    return {"error": (name, text), "seconds": time.monotonic() - begun}


def absent(rank: int, size: int) -> dict[str, Any]:
    """One rank never comes to a product."""
    likelihood, data = mine("gaussian", rank, size)
    la = lw.laplace(network(), data, likelihood, structure=FREE, process_group="world")
    begun = time.monotonic()
    if rank == 1:
        time.sleep(3 * TIMEOUTS["absent"])
        return {}
    return {"error": told(lambda: la.solve), "seconds": time.monotonic() - begun}


# -- chains and members --------------------------------------------------------------------------------------------


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).double()


def shares(rank: int, size: int) -> dict[str, Any]:
    """Chains and members of an ensemble, of which each rank has a share, and all of the data."""
    group = "world" if size > 1 else None
    data = inputs(), problem("gaussian")[1][:, :1]
    short: dict[str, Any] = {"chains": 3, "draws": 2, "warmup": 22, "process_group": group}
    unknown = lw.likelihoods.Gaussian(noise=lw.priors.Gamma(2.0, 2.0))
    known = lw.likelihoods.Gaussian(0.5)
    out: dict[str, Any] = {}
    for name, make in {
        "hmc": lambda: lw.samplers.hmc(plain(), data, known, leapfrog=2, start="prior", **short),
        "scales": lambda: lw.samplers.hmc(
            plain(), data, unknown, leapfrog=1, prior=lw.priors.Hierarchical(per="layer"), **short
        ),
        "sgld": lambda: lw.samplers.sgld(plain(), data, known, step=1e-4, batch=7, **short),
    }.items():
        post = make()
        chains = post.posterior
        out[name] = chains.weights, chains.lengths, chains.told, chains.latent, post.predict(data[0][:3]).mean
    for name, net in {"at once": plain, "one by one": normed}.items():
        torch.manual_seed(4)
        made = {"members": 3, "steps": 9, "generator": G(5), "process_group": group}
        post = lw.ensembles.train(lambda net=net: net() if net is normed else plain_again(), data, known, **made)
        out[name] = post.predict(data[0][:3]).f_mean, post.draw(4, G(1)), str(post)
    return out


def plain_again() -> nn.Module:
    """From a random start that is not its own."""
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def wrong_shares(rank: int, size: int) -> dict[str, Any]:
    """What goes wrong on one rank, or on all."""
    x, y = inputs(), problem("gaussian")[1][:, :1]
    odd = rank == 1

    def walk(sampler: Any = lw.samplers.hmc, data: Any = (x, y), **options: Any) -> Any:
        options = {"chains": 3, "draws": 2, "warmup": 22, **options}
        return sampler(plain(), data, lw.likelihoods.Gaussian(0.5), process_group="world", **options)

    def train(data: Any = (x, y), **options: Any) -> Any:
        options = {"members": 3, "steps": 4, **options}
        known = lw.likelihoods.Gaussian(0.5)
        return lw.ensembles.train(plain_again, data, known, process_group="world", **options)

    def failing() -> Any:
        kept = lw.samplers.walk.Plan.keeps
        lw.samplers.walk.Plan.keeps = lambda self, t: 1 / 0 if odd and t == 5 else kept(self, t)
        try:
            return walk()
        finally:
            lw.samplers.walk.Plan.keeps = kept

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        start = torch.zeros(3, 41, dtype=torch.float64)
        start[2, 32:40] = 10.0  # of rank 1, where the step is too long for weights into units that weigh so much
        stopped = walk(lw.samplers.sgld, step=1e-3, batch=23, start=start, warmup=0, draws=30)
    out: dict[str, Any] = {
        "diverged": (stopped.posterior.lengths, [str(w.message) for w in caught]),
        "data": told(lambda: walk(data=(x + odd, y))),
        "prior": told(lambda: walk(prior=2.0 if odd else 1.0)),
        "generator": told(lambda: walk(generator=G(rank))),
        "method": told(lambda: walk(leapfrog=3 + odd)),
        "in a step": told(failing),
        "too few": told(lambda: walk(chains=1)),
        "checkpoint": told(lambda: walk(checkpoint=f"{FOLDER[0]}/walk")),
        "NaN": told(lambda: walk(data=(x / (0.0 if odd else 1.0), y))),
        "members": told(lambda: train(members=1)),
        "steps": told(lambda: train(steps=3 + odd)),
        "seeds": told(lambda: train(generator=G(rank))),
        "rate": told(lambda: train(lr=1e300, steps=9)),
    }
    out["afterwards"] = walk().posterior.weights
    return out


# -- sessions ----------------------------------------------------------------------------------------------------

SESSIONS: dict[str, tuple[Callable[[int, int], dict[str, Any]], tuple[int, ...]]] = {
    "fits": (fits, (1, 2, 3)),
    "verbs": (verbs, (1, 2)),
    "calibrated": (calibrated, (1, 2, 3)),
    "streams": (streams, (1, 2, 3)),
    "spread": (spread, (1, 2, 3)),
    "sampled": (sampled, (1, 2)),
    "bases": (bases, (2,)),
    "traffic": (traffic, (2,)),
    "faults": (faults, (2,)),
    "shares": (shares, (1, 2)),
    "wrong shares": (wrong_shares, (2,)),
    "killed": (killed, (2, 3)),
    "absent": (absent, (2,)),
}
THREE = pytest.param(3, marks=pytest.mark.full)  # ranks
UNEVEN = [pytest.param(name, 3, marks=pytest.mark.full) for name in ("dual", "ekfac")]
SHARES = [(1, [5]), (2, [3, 2]), pytest.param(3, [2, 2, 1], marks=pytest.mark.full)]
TIMEOUTS = {"killed": 10, "absent": 2}
FOLDER: list[Path] = []  # where a session's files are


def run(name: str, size: int, folder: Path) -> None:
    """A session: fork its ranks and wait for them."""
    children = []
    for rank in range(size):
        child = os.fork()
        if not child:
            os._exit(_rank(name, rank, size, folder))
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def _rank(name: str, rank: int, size: int, folder: Path) -> int:
    try:
        if size > 1:
            timeout = datetime.timedelta(seconds=TIMEOUTS.get(name, 60))
            store = f"file://{folder}/store {name} {size}"
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timeout)
        FOLDER.append(folder)
        begun = time.process_time()
        torch.save(SESSIONS[name][0](rank, size), folder / f"{name} {rank} of {size}.pt")
        print(f"{name} {rank} of {size}: {time.process_time() - begun:.1f} s", flush=True)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main(folder: Path, most: int) -> None:
    """Every session of as many ranks, at the most. Those of one come first, and here: what torch imports and scripts at
    its first use, which takes longer than most sessions, is then there in every fork."""
    torch.set_num_threads(1)
    for name, (_, sizes) in SESSIONS.items():
        if 1 in sizes:
            _rank(name, 0, 1, folder)
    for name, (_, sizes) in SESSIONS.items():
        for size in sizes:
            if 1 < size <= most:
                run(name, size, folder)


# -- the tests ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    shared = "PYTEST_XDIST_WORKER" in os.environ  # then one worker runs the sessions, and the others wait for it
    path = (tmp_path_factory.getbasetemp().parent if shared else tmp_path_factory.getbasetemp()) / "ranks"
    try:
        path.mkdir()
    except FileExistsError:
        while not (path / "log").exists():
            time.sleep(0.2)
        return path
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command, text = [sys.executable, __file__, str(path), str(_most(request.session.items))], "the sessions did not end"
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
        text = done.stdout + done.stderr
    finally:  # others may be waiting for it
        (path / "text").write_text(text)
        (path / "text").rename(path / "log")
    assert done.returncode == 0, text
    return path


def _most(items: Iterable[pytest.Item]) -> int:
    """The ranks that some of these tests ask for: sessions of three take half of the time."""
    return max(
        getattr(getattr(one, "callspec", None), "params", {}).get("size", 2)
        for one in items
        if one.path == Path(__file__)
    )


def found(folder: Path, name: str, size: int) -> list[dict[str, Any]]:
    """What each rank of a session found."""
    paths = [folder / f"{name} {rank} of {size}.pt" for rank in range(size)]
    missing = [path.name for path in paths if not path.exists()]
    assert not missing, f"{missing}\n{(folder / 'log').read_text()}"
    return [torch.load(path, weights_only=False) for path in paths]


def assert_same(ranks: list[Any]) -> None:
    """Bit by bit on every rank."""
    for other in ranks[1:]:
        close(other, ranks[0], 0.0)


def joined(batches: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    return [torch.cat(parts) for parts in zip(*batches, strict=True)]


def close(mine: Any, other: Any, tolerance: float = 1e-8) -> None:
    if isinstance(mine, dict):
        assert mine.keys() == other.keys()
        mine, other = list(mine.values()), [other[key] for key in mine]
    if isinstance(mine, (list, tuple)):
        for one, another in zip(mine, other, strict=True):
            close(one, another, tolerance)
    elif isinstance(mine, (Tensor, float)):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)
    else:
        assert mine == other


@pytest.mark.parametrize("size", [2, THREE])
@pytest.mark.parametrize("name", STRUCTURES)
def test_state_of_all_ranks_is_that_of_one_process(folder: Path, name: str, size: int) -> None:
    """Identity 10 across processes, with shards of unequal sizes and (of three) an empty one."""
    ranks, (alone,) = ([one[name] for one in found(folder, "fits", n)] for n in (size, 1))
    assert_same(ranks)
    for key in ("n", "targets", "names"):
        assert ranks[0][key] == alone[key]
    for key in ("sums", "statistics", "evidence", "covariance"):
        close(ranks[0][key], alone[key])
    close(joined(ranks[0]["batches"]), joined(alone["batches"]))


@pytest.mark.parametrize("size", [2, THREE])
def test_gram_of_all_ranks_is_that_of_dense_autograd(folder: Path, size: int) -> None:
    model, x = network(), inputs()
    params = dict(model.named_parameters())
    f = torch.softmax(model(x), -1)
    rows = torch.zeros(2, N, 42, dtype=torch.float64)
    for c in range(2):
        for n in range(N):
            grads = torch.autograd.grad(model(x[n : n + 1])[0, c], list(params.values()))
            rows[c, n] = torch.cat([g.reshape(-1) for g in grads])
    middle = torch.diag_embed(f) - f[:, :, None] * f[:, None]
    gram = torch.einsum("anp,nab,bnq->pq", rows, middle, rows).detach()
    for rank in found(folder, "fits", size):
        close(rank["primal"]["sums"]["gram"][0], gram)


@pytest.mark.parametrize(
    ("structure", "size"),
    [
        *((name, 2) for name in STRUCTURES),
        *(pytest.param(name, 3, marks=pytest.mark.full) for name in ("dual", "ekfac")),
    ],
)
def test_tuned_is_that_of_one_process(folder: Path, structure: str, size: int) -> None:
    ranks, (alone,) = ([one[structure] for one in found(folder, "fits", n)] for n in (size, 1))
    assert_same(ranks)
    for key in ("tuned evidence", "tuned prior", "tuned noise", "tuned covariance", "v*"):
        close(ranks[0][key], alone[key], 1e-6)


@pytest.mark.parametrize("size", [2, THREE])
def test_a_calibration_is_the_same_on_all_ranks_and_that_of_one_process(folder: Path, size: int) -> None:
    ranks, (alone,) = (found(folder, "calibrated", n) for n in (size, 1))
    assert_same(ranks)
    for key in ("integers", "integers: n"):
        close(ranks[0][key], alone[key])
    close(ranks[0]["numbers"], alone["numbers"], 1e-6)
    assert ranks[0]["numbers: n"] == alone["numbers: n"] == (N, ())  # nothing to mind: by features


def test_parameters_of_a_wrapped_model_have_their_own_names(folder: Path) -> None:
    assert found(folder, "fits", 2)[0]["kron"]["names"][0] == "0.weight"


@pytest.mark.parametrize(
    "key",
    [
        "auto",
        "validation",
        "updated",
        "without",
        "tuned on all",
        "loaded",
        "certificate",
        "by passes",
        "embedding",
        "ella",
        "ella of streams",
    ],
)
def test_verbs_of_ranks_are_those_of_one_process(folder: Path, key: str) -> None:
    ranks, (alone,) = ([one[key] for one in found(folder, "verbs", n)] for n in (2, 1))
    assert_same(ranks)
    close(ranks[0], alone, 1e-6)


def test_functional_processes_of_ranks_are_those_of_one_process(folder: Path) -> None:
    ranks, (alone,) = ([one["processes"] for one in found(folder, "verbs", n)] for n in (2, 1))
    for one in ranks:
        close(one, alone, 1e-6)
        close(one, ranks[0], 1e-12)


def test_random_starts_agree_within_their_errors(folder: Path) -> None:
    ranks, (alone,) = found(folder, "verbs", 2), found(folder, "verbs", 1)
    assert_same(ranks)
    close(ranks[0]["tuned by passes"], alone["tuned by passes"], 1e-2)
    for key in ("certificate's log_det", "certificate's variance", "certificate's inputs"):
        (here, error), (there, other) = (one[key] for one in (ranks[0], alone))
        assert abs(here - there) < 5 * (error**2 + other**2) ** 0.5 + 1e-6, key
    for one in (ranks[0], alone):
        assert max(map(abs, one["certificate of full"])) < 1e-6


@pytest.mark.parametrize("size", [2, THREE])
def test_products_and_solves_are_those_of_one_process(folder: Path, size: int) -> None:
    ranks, (alone,) = found(folder, "streams", size), found(folder, "streams", 1)
    assert_same(ranks)
    for key, tolerance in (("product", 1e-10), ("diagonal", 1e-10), ("solve", 1e-6), ("v*", 1e-6)):
        close(ranks[0][key], alone[key], tolerance)


def test_minibatches_of_ranks_solve_the_same_system(folder: Path) -> None:
    ranks, (alone,) = ([one["sgd"] for one in found(folder, "streams", n)] for n in (2, 1))
    assert_same(ranks)
    torch.testing.assert_close(ranks[0], alone, rtol=0, atol=0.1 * float(alone.abs().max()))  # twice the tolerance


@pytest.mark.parametrize("size", [1, 2, THREE])
def test_noise_of_ranks_is_their_own(folder: Path, size: int) -> None:
    """E‖Rᵀe‖² = tr G; were the draws of ranks with the same data the same, it would be as many times that."""
    noise, trace = found(folder, "streams", size)[0]["noise"]
    squares = noise.square().sum(-1)
    assert abs(float(squares.mean() - trace)) < 5 * float(squares.std()) / len(squares) ** 0.5


@pytest.mark.parametrize("size", [1, 2])
def test_samples_of_ranks_have_the_exact_posterior(folder: Path, size: int) -> None:
    rank = found(folder, "streams", size)[0]
    likelihood, y = problem("gaussian")
    exact = lw.laplace(network(), (inputs(), y), likelihood, structure="full", prior=3.0)
    ratio = rank["variances"] / exact.predict(inputs()[:3]).f_var
    assert float(ratio.log().abs().max()) < 5 * (2 / 200) ** 0.5
    tuned = exact.tuned()
    assert float((rank["tuned"] / tuned.prior.precision).log().abs()) < 0.25
    assert abs(float(rank["evidence"] - tuned.log_evidence())) < 1


SPREAD = ("categorical", "noises")


@pytest.mark.parametrize("size", [2, THREE])
@pytest.mark.parametrize("kind", SPREAD)
def test_spread_samples_are_those_of_one_process(folder: Path, kind: str, size: int) -> None:
    """Samples, draws, evidence, tuning and predictions of five samples over two and three ranks."""
    ranks, (alone,) = found(folder, "spread", size), found(folder, "spread", 1)
    assert_same([rank[kind] for rank in ranks])
    for key, value in ranks[0][kind].items():
        close(value, alone[kind][key], 1e-6)


@pytest.mark.parametrize(
    ("size", "shares"), [(1, [5]), (2, [3, 2]), pytest.param(3, [2, 2, 1], marks=pytest.mark.full)]
)
@pytest.mark.parametrize("kind", SPREAD)
def test_each_rank_holds_its_share_of_the_samples(folder: Path, kind: str, size: int, shares: list[int]) -> None:
    """Samples, their base noise, and what conjugate gradients keep of them."""
    for rank, share in zip(found(folder, "spread", size), shares, strict=True):
        held, noise, solved, *_ = rank[f"{kind}, own"]
        assert (held, noise) == (share, share)
        assert solved == (share if kind == "categorical" else 1)  # at a time, as the budget has it
    told = [rank[f"{kind}, own"][3:] for rank in found(folder, "spread", size)]
    assert len(set(told)) == 1  # steps and passes


@pytest.mark.parametrize("size", [2, THREE])
@pytest.mark.parametrize("kind", SPREAD)
def test_gathered_samples_leave_the_group(folder: Path, kind: str, size: int) -> None:
    """Each rank then predicts at inputs of its own, and one saves a file that is whole."""
    for i, rank in enumerate(found(folder, "spread", size)):
        elsewhere, everywhere = rank[f"{kind}, elsewhere"]
        close(elsewhere, everywhere[i : i + 2])
        back = lw.load(folder / f"{kind} of {size}", network())
        close(back.predict(inputs()).covariance, everywhere)
        assert len(back.solve.z) == 5


def test_sampled_factors_are_drawn_apart_on_each_rank(folder: Path) -> None:
    ranks, (alone,) = found(folder, "sampled", 2), found(folder, "sampled", 1)
    assert not torch.equal(ranks[0]["own"], ranks[1]["own"])
    torch.testing.assert_close(ranks[0]["gram"], ranks[1]["gram"], rtol=0, atol=0)
    traces = [float(one["gram"].diagonal(dim1=1, dim2=2).sum()) for one in (ranks[0], alone)]
    assert abs(traces[0] / traces[1] - 1) < 5 * (2 * 2 / (N * 2 * 500)) ** 0.5


def test_sums_are_in_one_basis_though_eigenvectors_differ(folder: Path) -> None:
    ranks = found(folder, "bases", 2)
    assert_same(ranks)
    assert ranks[0]["lead"] == 4  # the factors of two layers
    (alone,) = found(folder, "fits", 1)
    likelihood, y = problem("categorical")
    alone = lw.laplace(network(), (inputs(), y), likelihood, structure="ekfac")
    close(ranks[0]["sums"], alone.state.sums)
    fit = lw.gp.ella(network(), (inputs(), y), likelihood, anchors=11, rank=6)
    close(ranks[0]["ella"].mT @ ranks[0]["ella"], fit.directions.mT @ fit.directions)


def test_bytes_are_those_of_the_cost_model(folder: Path) -> None:
    """docs/reference/cost_model.md, for a layer 3 → 5 with bias, a layer norm of 5, a layer 5 → 2: P = 20 + 10 + 12."""
    kron = (4 * 4 + 5 * 5 + 1) + 10 * 10 + (6 * 6 + 2 * 2 + 1)
    expected = {
        "primal": 42 * 42 + 1,
        "dual": 1,
        "kron": kron + 1,
        "ekfac": (kron + 1) + (20 + 100 + 12 + 1),
        "diag": 42 + 1,
        "block": 20**2 + 10**2 + 12**2 + 1,
        "lowrank": 7 * 42 + 6 + 1,
        "lowrank, two passes": 2 * (7 * 42 + 6 + 1),
    }
    for rank in found(folder, "traffic", 2):
        assert {name: rank[name]["sum bytes"] for name in STRUCTURES} == {k: 8 * v for k, v in expected.items()}
        assert rank["dual"]["gather bytes"] == 14 * 8 * (3 + 1 * 2)  # of the larger shard: inputs, and a cotangent
        assert rank["kron"]["sum messages"] == 2
        # three vectors over two ranks: two each, the second of rank 1 padded
        assert [rank["product"][f"{kind} bytes"] for kind in ("gather", "scatter", "sum")] == [
            8 * 2 * 42,
            8 * 4 * (42 + 1),
            8 + 16,
        ]
        assert [rank["product"][f"{kind} messages"] for kind in ("gather", "scatter", "control")] == [1, 1, 4]
        assert [rank["one vector"][f"{kind} bytes"] for kind in ("gather", "scatter")] == [8 * 42, 8 * (42 + 1)]
        assert [rank["noise"][f"{kind} bytes"] for kind in ("gather", "scatter")] == [8 * 2, 8 * 4 * 42]
        assert rank["prediction"]["gather bytes"] == 8 * 2 * 3 * 2  # two of four samples at three inputs, two outputs


FAULTS = {  # what both ranks are told
    "destroyed": "the process group of these data was destroyed",
    "cut": "parameter 0.weight is cut over processes",
    "repeats": "DistributedSampler repeats 1 of 23 examples",
    "weights": "rank 1 differs from rank 0 in weights of 0.weight",
    "order": "rank 1 differs from rank 0 in parameter 0: b of shape (2, 3)",
    "dtype": "torch.float32, there 0.weight of shape (5, 3), torch.float64",
    "structure": "rank 1 differs from rank 0 in structure: 'diag', there 'kron'",
    "prior": "rank 1 differs from rank 0 in prior's precision",
    "features": "rank 1 differs from rank 0 in structure: 'ella, 7 features, 11 anchors', there 'ella, 6 features",
    "likelihood": "rank 1 differs from rank 0 in likelihood's noise: 0.4, there 0.5",
    "subset": "torch.float64, frozen, there",
    "no data": "the data hold no batch on any rank",
    "step": "rank 0: reading the data for the tangent map; rank 1: the noise of the data",
    "another pass": "24 examples, not 23",
    "another product": "pass 1 had 24 examples, not 23",
    "generator": "generators must be in the same state on every rank",
    "inputs": "the inputs differ between ranks",
    "file": "call la = la.gathered() on every rank",
}
LOCAL = {  # what rank 1 does wrong, and rank 0 is told
    "NaN": "the inputs hold 15 NaN",
    "NaN anchors": "the inputs hold 15 NaN",
    "not data": "got int",
    "argument": "got 'odd'",
    "vectors": "right-hand sides must be the same on every rank",
    "in a solve": "division by zero",
    "NaN inputs": "NaN or infinite values",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_ranks_differ_in_is_told_to_all(folder: Path, fault: str) -> None:
    for rank in found(folder, "faults", 2):
        assert FAULTS[fault] in rank[fault][1]


@pytest.mark.parametrize("fault", LOCAL)
def test_an_error_on_one_rank_is_an_error_on_all(folder: Path, fault: str) -> None:
    told_0, told_1 = (rank[fault] for rank in found(folder, "faults", 2))
    assert told_1[0] == ("ZeroDivisionError" if fault == "in a solve" else "InvalidValue")
    assert LOCAL[fault] in told_1[1]
    assert told_0[0] == "RankFailed"
    assert f"rank 1: {told_1[0]}: {told_1[1]}" in told_0[1]


def test_a_group_is_usable_after_an_error(folder: Path) -> None:
    ranks = found(folder, "faults", 2)
    assert_same([rank["afterwards"] for rank in ranks])
    close(*ranks[0]["afterwards"])
    assert_same([rank["still"] for rank in ranks])


@pytest.mark.parametrize("size", [2, THREE])
def test_a_killed_rank_ends_the_others_with_an_error(folder: Path, size: int) -> None:
    """In a fit, and of three in a product of a solve."""
    assert not (folder / f"killed {size - 1} of {size}.pt").exists()
    for i in range(size - 1):
        rank = torch.load(folder / f"killed {i} of {size}.pt", weights_only=False)
        assert rank["error"][0] == "RankFailed"
        assert "start all of them again" in rank["error"][1]
        assert rank["seconds"] < TIMEOUTS["killed"]


def test_a_rank_that_does_not_come_ends_the_others_at_the_timeout(folder: Path) -> None:
    rank = torch.load(folder / "absent 0 of 2.pt", weights_only=False)
    assert rank["error"][0] == "RankFailed"
    assert rank["seconds"] < 3 * TIMEOUTS["absent"]


def test_a_group_must_be_one(folder: Path) -> None:
    data = (inputs(), problem("gaussian")[1])
    with pytest.raises(lw.errors.InvalidValue, match="init_process_group"):
        lw.laplace(network(), data, "gaussian", process_group="world")


def test_readers_of_one_process_refuse_a_shard() -> None:
    data = Shard((inputs(), problem("gaussian")[1]), Ranks())
    with pytest.raises(lw.errors.Unsupported, match="got a Shard"):
        lw.log_joint(network(), data, "gaussian")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))


SHARED = ["hmc", "scales", "sgld", "at once", "one by one"]


@pytest.mark.parametrize("name", SHARED)
def test_chains_and_members_of_ranks_are_those_of_one_process(folder: Path, name: str) -> None:
    (one,), ranks = found(folder, "shares", 1), found(folder, "shares", 2)
    for rank in ranks:
        close(rank[name], one[name], 0.0)


@pytest.mark.parametrize(
    ("fault", "match"),
    [
        ("data", "differs from rank 0 in the data.*same network, data and arguments"),
        ("prior", "differs from rank 0 in the prior's values"),
        ("generator", "the state of the generator"),
        ("method", "differs from rank 0 in the method"),
        ("in a step", "ZeroDivisionError|division by zero"),
        ("too few", "chains=1 for 2 ranks"),
        ("checkpoint", "checkpoint= is of one process"),
        ("members", "members=1 for 2 ranks"),
        ("steps", "differs from rank 0 in steps and lr"),
        ("seeds", "generators must be in the same state"),
        ("rate", "training diverged"),
    ],
)
def test_what_goes_wrong_with_chains_or_members_is_told_to_all(folder: Path, fault: str, match: str) -> None:
    for rank in found(folder, "wrong shares", 2):
        assert rank[fault][0]
        assert re.search(match, rank[fault][1]), rank[fault]


def test_a_diverging_chain_of_one_rank_is_stopped_and_named_there(folder: Path) -> None:
    first, second = (rank["diverged"] for rank in found(folder, "wrong shares", 2))
    assert first[0] == second[0]
    assert first[0][:2] == (30, 30)
    assert 0 < first[0][2] < 30
    assert not first[1]
    assert len(second[1]) == 1
    assert second[1][0].startswith("chain 3 of sgld diverged")
    assert_same([rank["afterwards"] for rank in found(folder, "wrong shares", 2)])
