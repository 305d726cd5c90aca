"""CIFAR-10 by trained ResNets: what Laplace approximations make of their probabilities, in one table.

    LAPWING_DATA=<folder> python studies/cifar10.py [--rows map ...]

The 50,000 training images are those of cifar10/cifar10_train.npz, or of the file that LAPWING_CIFAR_TRAIN names. The
networks were trained on all of them, so labels that were held out can only come from the test set: rows that use labels
choose among a few settings by the NLL of 1,000 random test images and are scored on the other 9,000, for each of five
choices of the 1,000; an image's score is its mean over the choices that leave it to be scored. Rows without labels are
scored on all 10,000. Differences between rows are paired, image by image.

What takes long (logits, curvature, covariances of outputs) is kept in LAPWING_CACHE (out/cifar10 unless set). Rows that
are run again replace their entries in `results/cifar10.json`; the table of `docs/studies/cifar10.md` is written anew.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from statistics import mean, median
from typing import Any

import cifar10_samples
import torch
from _networks import data, images, resnet, train_file
from cifar10_outputs import LIKELIHOOD, covariances, features, probabilities
from torch import Tensor, nn

import lapwing as lw
from lapwing import metrics
from lapwing.posterior import curvature

from _common import clocks, machine, versions  # isort: skip  (benchmarks/, which _networks puts on the path)

HERE = pathlib.Path(__file__).parent
RESULTS, PAGE = HERE / "results" / "cifar10.json", HERE.parent / "docs" / "studies" / "cifar10.md"
CACHE = pathlib.Path(os.environ.get("LAPWING_CACHE", HERE.parent / "out" / "cifar10"))
SPLITS, HELD_OUT, BINS, BATCH, SHARDS = 5, 1_000, 15, 128, 5
BASELINES = ("map", "temperature", "isotropic:labels:monte_carlo")


# -- the data ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    depth: int

    @cached_property
    def net(self) -> nn.Module:
        return resnet(self.depth)

    @cached_property
    def test(self) -> tuple[Tensor, Tensor]:
        return images(data("cifar10/cifar10_test.npz"))

    @cached_property
    def ood(self) -> Tensor:
        """Street numbers, which no class fits."""
        return images(data("svhn_test_2000.npz"))[0]

    @cached_property
    def train(self) -> tuple[Tensor, Tensor]:
        return images(train_file())

    def path(self, name: str) -> pathlib.Path:
        CACHE.mkdir(parents=True, exist_ok=True)
        return CACHE / f"resnet{self.depth}_{name}"

    def kept(self, name: str, make: Callable[[], Any]) -> Any:
        """What was made before, with its CPU seconds, or else made now."""
        path = self.path(f"{name}.pt")
        if not path.is_file():
            taken, found = clocks(make)
            torch.save((found, taken["cpu"]), path)
        return torch.load(path, weights_only=True)

    def fitted(self, name: str, make: Callable[[], lw.Laplace]) -> tuple[Any, float]:
        """The state of a fit that was made before, with its CPU seconds, or else made now."""
        path, note = self.path(f"{name}.safetensors"), self.path(f"{name}.seconds")
        if not (path.is_file() and note.is_file()):
            taken, la = clocks(make)
            la.save(path)
            note.write_text(str(taken["cpu"]))
        return lw.load(path, self.net).state, float(note.read_text())

    @cached_property
    def logits(self) -> tuple[Tensor, Tensor]:
        """Of the test images and of the street numbers."""
        return self.kept("logits", lambda: tuple(forward(self.net, x) for x in (self.test[0], self.ood)))[0]

    @cached_property
    def units(self) -> dict[str, float]:
        """CPU seconds of a forward pass and of a gradient epoch over the training images, from 1,000 of them."""
        x, y = self.test[0][:1000], self.test[1][:1000]
        forward(self.net, x[:BATCH])
        passes = [clocks(lambda: forward(self.net, x))[0]["cpu"] for _ in range(3)]
        epochs = [clocks(lambda: gradient(self.net, x, y))[0]["cpu"] for _ in range(2)]
        return {"forward": 50 * min(passes), "gradient": 50 * min(epochs)}

    @cached_property
    def splits(self) -> list[Tensor]:
        """Which test images are scored (True), and which are held out for choosing, (n,) for each choice."""
        out = []
        for seed in range(SPLITS):
            scored = torch.ones(len(self.test[1]), dtype=torch.bool)
            scored[torch.randperm(len(scored), generator=torch.Generator().manual_seed(seed))[:HELD_OUT]] = False
            out.append(scored)
        return out


def forward(net: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([net(batch) for batch in x.split(BATCH)])


def gradient(net: nn.Module, x: Tensor, y: Tensor) -> None:
    for batch, target in zip(x.split(BATCH), y.split(BATCH), strict=True):
        nn.functional.cross_entropy(net(batch), target, reduction="sum").backward()
    net.zero_grad()


# -- scores ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answers:
    """Class probabilities under each of g settings, of the test images (g, n, c) and of the street numbers (g, m, c).
    With more than one setting, held-out labels choose."""

    probs: Tensor
    ood: Tensor
    settings: list[Any] = field(default_factory=list)
    cost: dict[str, float] = field(default_factory=dict)  # CPU seconds by what they were spent on
    about: dict[str, Any] = field(default_factory=dict)


def of_each(probs: Tensor, y: Tensor) -> Tensor:
    """NLL, Brier score and whether the guess is right, for each image, (n, 3)."""
    return torch.stack([metric(probs, y, each=True) for metric in (metrics.nll, metrics.brier, metrics.accuracy)], -1)


def entropy(probs: Tensor) -> Tensor:
    return -torch.xlogy(probs, probs).sum(-1)


def scored(problem: Problem, answers: Answers) -> tuple[dict[str, Any], Tensor]:
    """The figures of a row, and those of each image, (n, 3)."""
    y = problem.test[1]
    each = torch.stack([of_each(probs, y) for probs in answers.probs])  # (g, n, 3)
    labels = len(each) > 1
    splits = problem.splits if labels else [torch.ones(len(y), dtype=torch.bool)]
    best = [int(each[:, ~s, 0].mean(1).argmin()) if labels else 0 for s in splits]
    counts = torch.stack(splits).double()
    mine = torch.stack([each[b] for b in best])  # (splits, n, 3)
    if not bool((counts.sum(0) > 0).all()):
        raise RuntimeError("an image was held out in every split; take other seeds")
    image = (mine * counts.unsqueeze(-1)).sum(0) / counts.sum(0).unsqueeze(-1)
    by_split = torch.stack([m[s, 0].mean() for m, s in zip(mine, splits, strict=True)])
    known, unknown = ([entropy(p[b]) for b in best] for p in (answers.probs, answers.ood))
    out: dict[str, Any] = {
        "nll": float(image[:, 0].mean()),
        "nll_standard_error": float(image[:, 0].std() / math.sqrt(len(y))),
        "accuracy": float(image[:, 2].mean()),
        "brier": float(image[:, 1].mean()),
        "ece": mean([metrics.ece(answers.probs[b][s], y[s], BINS) for b, s in zip(best, splits, strict=True)]),
        "auroc": mean([metrics.auroc(a, b) for a, b in zip(known, unknown, strict=True)]),
        "labels": HELD_OUT if labels else 0,
    }
    if labels:
        out |= {"picked": [answers.settings[b] for b in best], "nll_sd_over_choices": float(by_split.std())}
        out["nll_of_settings"] = [
            [setting, round(float(e), 5)] for setting, e in zip(answers.settings, each[..., 0].mean(1), strict=True)
        ]
    return out, image


# -- rows --------------------------------------------------------------------------------------------------------


Pair = tuple[Tensor, Tensor]  # of the test images and of the street numbers


def settled(f: Pair, cov: Pair, link: str, **more: Any) -> Answers:
    """Answers from f and covariances (g, n, c, c)."""
    probs = [torch.stack([probabilities(a, one, link) for one in b]) for a, b in zip(f, cov, strict=True)]
    return Answers(probs[0], probs[1], **more)


def network(problem: Problem) -> dict[str, Answers]:
    probs = [f.softmax(-1).unsqueeze(0) for f in problem.logits]
    return {"": Answers(probs[0], probs[1])}


def temperature(problem: Problem) -> dict[str, Answers]:
    scales = torch.logspace(-0.1, 0.5, 61)
    probs = [torch.stack([(f / t).softmax(-1) for t in scales]) for f in problem.logits]
    return {"": Answers(probs[0], probs[1], [round(float(t), 4) for t in scales])}


LINKS = ("probit", "probit_centered", "monte_carlo")


def last_layer(structure: str) -> Callable[[Problem], dict[str, Answers]]:
    """Laplace over the last layer; prior precision by the evidence at the trained weights."""

    def row(problem: Problem) -> dict[str, Answers]:
        def fit() -> lw.Laplace:
            la = lw.laplace(problem.net, problem.train, "categorical", subset="last_layer", structure=structure)
            float(la.log_evidence())
            return la

        fitted, la = clocks(fit)
        tuned, la = clocks(lambda: la.tuned(center="map"))
        taken, found = clocks(lambda: [predicted(la, x) for x in (problem.test[0], problem.ood)])
        f, cov = ((found[0][i], found[1][i]) for i in (0, 1))
        cost = {"fit": fitted["cpu"], "tune": tuned["cpu"], "predict": taken["cpu"]}
        about = {"prior_precision": float(la.prior.precision), "log_evidence": float(la.log_evidence())}
        return {link: settled(f, cov, link, cost=cost, about=about) for link in LINKS}

    return row


def predicted(la: lw.Laplace, x: Tensor) -> tuple[Tensor, Tensor]:
    """f and its covariance (1, n, c, c)."""
    found = [la.predict(batch) for batch in x.split(BATCH)]
    return torch.cat([p.f_mean for p in found]), torch.cat([p.covariance.float() for p in found]).unsqueeze(0)


# All layers by Kronecker factors. The training showed the network VIEWS of each image: crops of 32 x 32 pixels after
# padding by 4, each flipped or not. Evidence "over views" takes every view for an example of its own.
VIEWS = 162
SOME = 10_000  # images, for what need not see all
USED = {20: SHARDS}  # of the shards of the training images, by depth; one where not told


def kron_shard(problem: Problem, i: int) -> lw.Laplace:
    """One of SHARDS parts of the training images, one sampled target for each image."""
    x, y = (t.chunk(SHARDS)[i].split(BATCH) for t in problem.train)
    factor, generator = lw.curvature.Factor("monte_carlo", 1), torch.Generator().manual_seed(i)
    batches = list(zip(x, y, strict=True))
    return lw.laplace(problem.net, batches, "categorical", structure="kron", factor=factor, generator=generator)


def kron_state(problem: Problem) -> tuple[Any, float]:
    """G over all weights and training images, and its CPU seconds. Shards are kept, and add; where only some of them
    are used, they count as all."""
    out, seconds, used = None, 0.0, USED.get(problem.depth, 1)
    for i in range(used):
        state, taken = problem.fitted(f"kron_{i}", partial(kron_shard, problem, i))
        out, seconds = state if out is None else out + state, seconds + taken
    return out if used == SHARDS else repeated(out, SHARDS / used), seconds


def repeated(state: Any, times: float) -> Any:
    """The state of the same data `times` over: states add."""
    sums = {key: times * value for key, value in state.sums.items()}
    statistics = {k: times * v for k, v in state.statistics.items()}
    return replace(state, sums=sums, statistics=statistics, memo=lw.curvature.Memo())


def evidence_precision(state: Any) -> float:
    """The prior precision that the evidence at the trained weights picks."""
    prior = lw.priors.Gaussian(1.0).bind(state.layout)
    return float(lw.tune.evidence(state, prior, LIKELIHOOD)[0].precision)


def spread(problem: Problem, name: str, state: Any, precisions: list[float]) -> tuple[Pair, Pair, float]:
    """f and covariances (d + 1, n, c, c) at the test images and the street numbers, kept a thousand at a time."""
    pairs, seconds = [], 0.0
    for kind, x in (("test", problem.test[0]), ("ood", problem.ood)):
        found = []
        for i, some in enumerate(x.split(1000)):
            (held, f, cov), taken = problem.kept(
                f"{name}_{kind}_{i}",
                lambda some=some: (torch.tensor(precisions).double(), *covariances(state, some, precisions)),  # type: ignore[misc]
            )
            if not torch.allclose(held, torch.tensor(precisions).double(), rtol=1e-3):
                raise SystemExit(f"{problem.path(name)}_* hold other precisions than {precisions}; remove them")
            found.append((f, cov))
            seconds += taken
        pairs.append((torch.cat([f for f, _ in found]), torch.cat([cov for _, cov in found], 1)))
    return (pairs[0][0], pairs[1][0]), (pairs[0][1], pairs[1][1]), seconds


WEAK, STRONG = 0.1, [1e4, 2e4]  # prior precisions for labels to choose among, beside those of the evidence
VARIANCES = torch.logspace(-0.4, 0.9, 14).tolist()  # mean variances of a logit for labels to choose among


@lru_cache
def kron_spread(problem: Problem) -> tuple[dict[str, float], Pair, dict[str, Pair], dict[str, float]]:
    """Precisions by name, f, covariances by name and costs."""
    state, fitted = kron_state(problem)
    found = {"evidence": evidence_precision(state), "views": evidence_precision(repeated(state, VIEWS)) / VIEWS}
    named = {"weak": WEAK, **found, **{f"{s:g}": s for s in STRONG}}
    f, cov, taken = spread(problem, "kron", state, list(named.values()))
    by_name = {name: (cov[0][i], cov[1][i]) for i, name in enumerate([*named, "isotropic"])}
    return named, f, by_name, {"fit": fitted, "predict": taken}


def one(cov: Pair, times: float = 1.0) -> Pair:
    return times * cov[0].unsqueeze(0), times * cov[1].unsqueeze(0)


def tempered(cov: dict[str, Pair], precisions: dict[str, float]) -> tuple[Pair, list[Any]]:
    """Covariances at several temperatures, (g, n, c, c), by their mean variance of a logit; and the prior precision and
    temperature of each."""
    settings, parts = [], ([], [])  # type: ignore[var-annotated]
    for name, pair in cov.items():
        variance = float(pair[0].diagonal(dim1=-2, dim2=-1).mean())
        for v in VARIANCES:
            settings.append([precisions[name], round(v / variance, 6)])
            for part, c in zip(parts, pair, strict=True):
                part.append(c * (v / variance))
    return (torch.stack(parts[0]), torch.stack(parts[1])), settings


def kron(problem: Problem) -> dict[str, Answers]:
    precisions, f, cov, cost = kron_spread(problem)
    out = {}
    for link in LINKS:
        for name, times in (("evidence", 1.0), ("views", VIEWS)):
            about = {"prior_precision": times * precisions[name], "likelihood_power": times}
            out[f"{name}:{link}"] = settled(f, one(cov[name], 1 / times), link, cost=cost, about=about)
    strong = ["evidence", *(f"{s:g}" for s in STRONG)]
    by_name = [torch.stack([cov[name][i] for name in strong]) for i in (0, 1)]
    settings = [precisions[name] for name in strong]
    out["labels:monte_carlo"] = settled(f, (by_name[0], by_name[1]), "monte_carlo", settings=settings, cost=cost)
    for name in ("weak", "views", "evidence"):
        both, pairs = tempered({name: cov[name]}, precisions)
        out[f"labels_temperature_{name}:monte_carlo"] = settled(f, both, "monte_carlo", settings=pairs, cost=cost)
    return out


def cropped(x: Tensor, padding: int, generator: torch.Generator) -> Tensor:
    """Random views: crops after padding, flipped or not."""
    wide, n = torch.nn.functional.pad(x, (padding,) * 4), len(x)
    at = torch.randint(0, 2 * padding + 1, (n, 2), generator=generator)
    out = torch.stack([image[:, a : a + 32, b : b + 32] for image, (a, b) in zip(wide, at.tolist(), strict=True)])
    flipped = torch.rand(n, generator=generator) < 0.5
    return torch.where(flipped.reshape(-1, 1, 1, 1), out.flip(-1), out)


def views_state(problem: Problem, count: int) -> tuple[Any, float]:
    """G of a random view of each of the first images, which count for all images, and its CPU seconds."""

    def fit() -> lw.Laplace:
        x, y = (t[:count] for t in problem.train)
        x = cropped(x, 4, torch.Generator().manual_seed(0))
        batches, factor = list(zip(x.split(BATCH), y.split(BATCH), strict=True)), lw.curvature.Factor("monte_carlo", 1)
        return lw.laplace(problem.net, batches, "categorical", structure="kron", factor=factor)

    state, seconds = problem.fitted(f"kron_views_{count}", fit)
    return repeated(state, len(problem.train[1]) / count), seconds


def kron_views(problem: Problem) -> dict[str, Answers]:
    """The evidence over views with the curvature of views, where `kron` takes that of plain images for theirs."""
    found, fitted = views_state(problem, SOME)
    state = repeated(found, VIEWS)
    precision = evidence_precision(state)
    f, cov, taken = spread(problem, "kron_views", state, [precision])
    more: dict[str, Any] = {"cost": {"fit": fitted, "predict": taken}}
    more["about"] = {"prior_precision": precision, "likelihood_power": VIEWS}
    return {f"evidence:{link}": settled(f, one((cov[0][0], cov[1][0])), link, **more) for link in LINKS}


def isotropic(problem: Problem) -> dict[str, Answers]:
    """N(θ*, I/s): no curvature at all, s by labels; J Jᵀ is exact."""
    _, f, cov, cost = kron_spread(problem)
    both, pairs = tempered({"isotropic": cov["isotropic"]}, {"isotropic": 1.0})
    settings = [1 / t for _, t in pairs]
    return {"labels:monte_carlo": settled(f, both, "monte_carlo", settings=settings, cost={"predict": cost["predict"]})}


# Few directions of all weights. `lowrank` and `ella` choose the prior precision by labels; `lowrank` keeps the prior
# beside its directions, ELLA does not, and sums its curvature over fewer images still, each counted once. `samples`
# are draws of the posterior (cifar10_samples.py).
RANK = 100
ELLA_SOME, ELLA_RANK, ANCHORS = 4_000, 20, 2_000
CHOICES = torch.logspace(0, 5, 21).tolist()
THRESHOLD, CENTERS = 0.06, (125, 250, 500)  # τ of the rows of the samples' curvature; images for the tangent center


def part(problem: Problem, index: Any = slice(SOME)) -> list[tuple[Tensor, Tensor]]:
    """Some of the training images, in batches."""
    x, y = (t[index].split(BATCH) for t in problem.train)
    return list(zip(x, y, strict=True))


def lowrank_fit(problem: Problem) -> tuple[tuple[Tensor, float], float]:
    """R with G ≈ RᵀR from a sketch over a part of the images, times what that part is of all; and its share of tr G."""

    def fit() -> tuple[Tensor, float]:
        factor = lw.curvature.Factor("monte_carlo", 1)
        la = lw.laplace(problem.net, part(problem), "categorical", structure=lw.curvature.LowRank(RANK), factor=factor)
        op = curvature(la.state, LIKELIHOOD)
        share = la.state.structure.captured(la.state, torch.ones(1).double())[0]
        return math.sqrt(len(problem.train[1]) / SOME) * op.rows.block(0, op.size), share

    return problem.kept("lowrank_fit", fit)


def lowrank(problem: Problem) -> dict[str, Answers]:
    (R, share), fitted = lowrank_fit(problem)
    _, f, cov, cost = kron_spread(problem)
    F, taken = of_directions(problem, "lowrank", R)
    both: list[Tensor] = []
    for rows, whole in zip(F, cov["isotropic"], strict=True):
        inner = torch.eye(len(R)) * torch.tensor(CHOICES).reshape(-1, 1, 1) + (R @ R.mT).float()
        mine = torch.einsum("nak,gkl,nbl->gnab", rows, torch.linalg.inv(inner.double()).float(), rows)
        both.append((whole - mine) / torch.tensor(CHOICES).reshape(-1, 1, 1, 1))
    spent = {"fit": fitted, "predict": taken + cost["predict"]}
    about = {"share": share}
    found = settled(f, (both[0], both[1]), "monte_carlo", settings=CHOICES, cost=spent, about=about)
    return {"labels:monte_carlo": found}


def ella_fit(problem: Problem) -> tuple[tuple[Tensor, Tensor, float], float]:
    """Directions, Σ ψᵀΛψ and the features' share of the kernel at the anchors."""

    def fit() -> tuple[Tensor, Tensor, float]:
        data = part(problem, slice(ELLA_SOME))
        la = lw.gp.ella(problem.net, data, "categorical", anchors=ANCHORS, rank=ELLA_RANK)
        return la.directions, la.state.sums["gram"][0], la.share

    return problem.kept("ella_fit", fit)


def ella(problem: Problem) -> dict[str, Answers]:
    (V, gram, share), fitted = ella_fit(problem)
    psi, taken = of_directions(problem, "ella", V)
    inverse = torch.linalg.inv(gram + torch.eye(len(gram)).double() * torch.tensor(CHOICES).double().reshape(-1, 1, 1))
    both = [torch.einsum("nak,gkl,nbl->gnab", rows, inverse.float(), rows) for rows in psi]
    spent = {"fit": fitted, "predict": taken}
    about = {"share": share}
    found = settled(problem.logits, (both[0], both[1]), "monte_carlo", settings=CHOICES, cost=spent, about=about)
    # how much the curvature counts, by labels: the source's way is to stop its sum over the data early
    cov, pairs = tempered({"one": (both[0][0], both[1][0])}, {"one": CHOICES[0]})
    part_of = settled(problem.logits, cov, "monte_carlo", settings=pairs, cost=spent, about=about)
    return {"labels:monte_carlo": found, "labels_temperature:monte_carlo": part_of}


def center_images(problem: Problem, tangent: Any, logits: Tensor) -> cifar10_samples.Few:
    """The tangent model of a few training images, each of which counts for many."""
    index = torch.randperm(len(logits), generator=torch.Generator().manual_seed(0))[: CENTERS[-1]]
    x, y = (t[index] for t in problem.train)

    def make() -> tuple[Tensor, Tensor]:
        found = cifar10_samples.Few.read(tangent, x, y, logits[index], 1.0)
        return found.base, found.kernel

    base, kernel = problem.kept("center_images", make)[0]
    return cifar10_samples.Few(base, kernel, y, len(logits) / len(index))


def samples_fit(problem: Problem) -> tuple[tuple[Tensor, dict[str, Any]], float]:
    """Draws of the posterior under several priors, (g, k, p), and what was found on the way."""

    def fit() -> tuple[Tensor, dict[str, Any]]:
        state = kron_state(problem)[0]
        near, theta = curvature(state, LIKELIHOOD), state.tangent.theta
        logits = problem.kept("train_logits", lambda: forward(problem.net, problem.train[0]))[0]
        index, u = cifar10_samples.drawn(logits, THRESHOLD, torch.Generator().manual_seed(0))
        few = center_images(problem, state.tangent, logits)
        root = cifar10_samples.HeldRoot.made(state.tangent, problem.train[0], index, u)
        found = cifar10_samples.at_weights(root, float(theta.double().square().sum()))
        print(f"  {len(u)} rows; precision at the trained weights {found:.4g}", flush=True)
        tangents = {n: cifar10_samples.at_tangent(root, evidence_precision(state), few.first(n)) for n in CENTERS}
        tangent = tangents[CENTERS[-1]]
        z = [root.draw(s) for s in (*STRONG, tangent["precision"])]
        g = lw.priors.GPrior(1.0).bind(state.layout).at(near, theta)
        # as much prior variance as the middle of STRONG gives the rows
        h, squares = g.operator().dense(), sum(rows.square().sum(0).double() for rows in root.rows.split(100))
        strength = math.sqrt(STRONG[0] * STRONG[-1]) * float((squares / h).sum() / squares.sum())
        gammas = [root.gamma(s) for s in (*STRONG, tangent["precision"])]
        root = root.rescaled(h.rsqrt())
        last = root.draw(strength) * h.rsqrt().float()
        about = {"rows": len(u), "at_weights": found, "at_tangent": list(tangents.values()), "gammas": gammas}
        about |= {"tangent": tangent["precision"], "gprior": strength, "gprior_gamma": root.gamma(strength)}
        about |= {"dropped": sum(g.counts_dropped().values())}
        return torch.stack([*z, last]), about

    return problem.kept("samples_fit", fit)


def sample_names() -> list[str]:
    return [*(f"{s:g}" for s in STRONG), "tangent", "gprior"]


def samples(problem: Problem) -> dict[str, Answers]:
    """Sample covariances under one precision, by the evidence at the tangent center or by labels, and a g-prior."""
    (z, about), fitted = samples_fit(problem)
    away, taken = of_directions(problem, "samples", z.flatten(0, 1))
    k, f = z.shape[1], problem.logits
    names = sample_names()
    every = [torch.stack([rows @ rows.mT / k for rows in a.split(k, -1)]) for a in away]  # (g, n, c, c)
    cov: dict[str, Pair] = {name: (every[0][i], every[1][i]) for i, name in enumerate(names)}
    precisions = {name: about.get(name) or float(name) for name in names}
    more: dict[str, Any] = {"cost": {"fit": fitted + problem.units["forward"], "predict": taken}}
    own = {"prior_precision": precisions["tangent"], **about}
    out = {"tangent:monte_carlo": settled(f, one(cov["tangent"]), "monte_carlo", about=own, **more)}
    grid, settings = (every[0][:-1], every[1][:-1]), [precisions[name] for name in names[:-1]]
    out["labels:monte_carlo"] = settled(f, grid, "monte_carlo", settings=settings, **more)
    for name in ("tangent", "gprior"):
        both, pairs = tempered({name: cov[name]}, precisions)
        out[f"labels_temperature_{name}:monte_carlo"] = settled(f, both, "monte_carlo", settings=pairs, **more)
    return out


def of_directions(problem: Problem, name: str, directions: Tensor) -> tuple[Pair, float]:
    """J z at the test images and the street numbers, and its CPU seconds."""
    state, found = kron_state(problem)[0], []
    for kind, x in (("test", problem.test[0]), ("ood", problem.ood)):
        made = [
            problem.kept(f"{name}_{kind}_{i}", partial(features, state.tangent, state.parts, some, directions))
            for i, some in enumerate(x.split(1000))
        ]
        found.append((torch.cat([m for m, _ in made]), sum(seconds for _, seconds in made)))
    return (found[0][0], found[1][0]), found[0][1] + found[1][1]


ROWS: dict[str, Callable[[Problem], dict[str, Answers]]] = {
    "map": network,
    "temperature": temperature,
    "last_layer_full": last_layer("full"),
    "last_layer_kron": last_layer("kron"),
    "isotropic": isotropic,
    "kron": kron,
    "kron_views": kron_views,
    "lowrank": lowrank,
    "ella": ella,
    "samples": samples,
}


# -- the file and the page ---------------------------------------------------------------------------------------


def run(problem: Problem, name: str, records: dict[str, Any]) -> None:
    for variant, answers in ROWS[name](problem).items():
        label = f"{name}:{variant}" if variant else name
        record, image = scored(problem, answers)
        torch.save(image, problem.path(f"images_{label.replace(':', '_')}.pt"))
        record |= {"cost": answers.cost, **answers.about, "date": datetime.date.today().isoformat()}
        if answers.cost:
            record["units"] = problem.units
        records[label] = record
        print(label, *(f"{key} {record[key]:.5f}" for key in ("nll", "accuracy", "ece", "auroc")), flush=True)


def difference(a: Tensor, b: Tensor) -> dict[str, float]:
    found = metrics.paired(a, b)
    return {"difference": found.value, "standard_error": found.standard_error}


def compared(problem: Problem, records: dict[str, Any]) -> None:
    """Paired differences of NLL to the baselines."""
    images_of = {label: problem.path(f"images_{label.replace(':', '_')}.pt") for label in records}
    each = {label: torch.load(path, weights_only=True)[:, 0] for label, path in images_of.items() if path.is_file()}
    for label, own in each.items():
        others = [b for b in BASELINES if b in each and b != label]
        records[label]["against"] = {b: difference(own, each[b]) for b in others}


# -- joint predictions -------------------------------------------------------------------------------------------

JOINT, TOGETHER, KAPPAS = 500, 20, (1, 2, 3, 4, 5)


def joint(problem: Problem, records: dict[str, Any]) -> None:
    """Joint log-likelihoods of dyadic sets of the first test images, within groups of 20 that are predicted together.
    Rows with labels stand at the median of their settings, which some of these images helped to choose."""
    state, y = kron_state(problem)[0], problem.test[1][:JOINT]
    chosen = joint_settings(records)
    precisions = sorted({precision for precision, _ in chosen.values() if precision > 0})
    found = problem.kept("joint", lambda: covariances(state, problem.test[0][:JOINT], precisions, "", TOGETHER, 20))
    (f, cov), _ = found
    cov_of = {precision: cov[i] for i, precision in enumerate(precisions)} | {0.0: cov[-1]}
    scale = median(records["temperature"]["picked"])
    each = {"map": _joint(f, None, y), "temperature": _joint(f / scale, None, y)}
    for label, (precision, times) in chosen.items():
        each[label] = _joint(f, times * cov_of[precision], y)
    more = joint_views(problem, records), joint_lowrank(problem, records, cov[-1]), joint_samples(problem, records)
    for label, found in itertools.chain(*more):
        each[label] = _joint(f, found, y)
    for label, values in each.items():
        found = {str(k): {"mean": float(v.mean()), **against(v, each, k)} for k, v in values.items()}
        records[label]["joint"] = found


def joint_settings(records: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Row -> prior precision (0 for no curvature) and factor on the covariance."""
    out = {}
    for label, record in records.items():
        if label.startswith("kron:") and label.endswith("monte_carlo"):
            if "likelihood_power" in record:
                power = record["likelihood_power"]
                out[label] = record["prior_precision"] / power, 1 / power
            elif "temperature" in label:
                out[label] = record["picked"][0][0], median(t for _, t in record["picked"])
        elif label == "isotropic:labels:monte_carlo":
            out[label] = 0.0, 1 / median(record["picked"])
    return out


def joint_views(problem: Problem, records: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    label = "kron_views:evidence:monte_carlo"
    if label in records:
        state, x = repeated(views_state(problem, SOME)[0], VIEWS), problem.test[0][:JOINT]
        precision = records[label]["prior_precision"]
        found = problem.kept("joint_views", lambda: covariances(state, x, [precision], "", TOGETHER, 20))
        yield label, found[0][1][0]


def joint_lowrank(problem: Problem, records: dict[str, Any], whole: Tensor) -> Iterator[tuple[str, Tensor]]:
    """From J Jᵀ of the groups, (g, t·c, t·c)."""
    label = "lowrank:labels:monte_carlo"
    if label in records:
        (R, _), _ = lowrank_fit(problem)
        rows, precision = _grouped(of_directions(problem, "lowrank", R)[0][0]), median(records[label]["picked"])
        inner = torch.linalg.inv((R @ R.mT).double() + precision * torch.eye(len(R)).double()).float()
        yield label, (whole - rows @ inner @ rows.mT) / precision


def joint_samples(problem: Problem, records: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    mine = [label for label in records if label.startswith("samples:")]
    if not mine:
        return
    (z, about), _ = samples_fit(problem)
    away = _grouped(of_directions(problem, "samples", z.flatten(0, 1))[0][0]).split(z.shape[1], -1)
    cov = {name: rows @ rows.mT / z.shape[1] for name, rows in zip(sample_names(), away, strict=True)}
    for label in mine:
        picked, name = records[label].get("picked"), label.split(":")[1].removeprefix("labels_temperature_")
        if name == "labels":
            value = min(picked, key=lambda one: abs(one - median(picked)))
            yield label, cov["tangent" if value == about["tangent"] else f"{value:g}"]
        else:
            yield label, cov[name] * (1.0 if picked is None else median(t for _, t in picked))


def _grouped(rows: Tensor) -> Tensor:
    """(n, c, k) of the first test images by groups, (g, t·c, k)."""
    return rows[:JOINT].reshape(JOINT // TOGETHER, -1, rows.shape[-1])


def _joint(f: Tensor, cov: Tensor | None, y: Tensor) -> dict[int, Tensor]:
    """Of each set, for each number of anchors; without a covariance the network is one draw."""
    out: dict[int, list[Tensor]] = {kappa: [] for kappa in KAPPAS}
    for i, (mu, labels) in enumerate(zip(f.split(TOGETHER), y.split(TOGETHER), strict=True)):
        shape = (TOGETHER, f.shape[-1])
        given: Any = mu.softmax(-1).unsqueeze(0)
        draws = None if cov is None else 1024
        if cov is not None:
            given = lw.Prediction(
                LIKELIHOOD, lw.outputs.Normal(mu, cov[i].reshape(*shape, *shape), joint=True), "monte_carlo"
            )
        for kappa in KAPPAS:
            generator = torch.Generator().manual_seed(i)
            out[kappa].append(
                metrics.joint_log_likelihood(given, labels, kappa, draws=draws, generator=generator, each=True)
            )
    return {kappa: torch.cat(values) for kappa, values in out.items()}


def against(values: Tensor, each: dict[str, dict[int, Tensor]], kappa: int) -> dict[str, Any]:
    return {b: difference(values, each[b][kappa]) for b in ("map", "temperature")}


# -- the page ----------------------------------------------------------------------------------------------------


def line(cells: list[Any]) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def table(records: dict[str, Any]) -> str:
    names = ["row", "labels", "NLL", "less than MAP", "less than temperature", "less than isotropic"]
    out = [line([*names, "accuracy", "ECE", "Brier", "AUROC", "fit", "precision"]), "|---" + "|--:" * 11 + "|"]
    for label, r in records.items():
        apart = [r.get("against", {}).get(b) for b in BASELINES]
        shown = ["" if d is None else f"{-d['difference']:.4f} ± {d['standard_error']:.4f}" for d in apart]
        spread = f" (± {r['nll_sd_over_choices']:.4f})" if "nll_sd_over_choices" in r else ""
        fit = f"{r['cost']['fit'] / r['units']['gradient']:.2f}" if "fit" in r["cost"] else ""
        precision = f"{r['prior_precision']:.4g}" if "prior_precision" in r else ""
        scores = [f"{r[key]:.4f}" for key in ("accuracy", "ece", "brier", "auroc")]
        out.append(line([label, r["labels"] or "", f"{r['nll']:.4f}{spread}", *shown, *scores, fit, precision]))
    both = [(label, r["joint"]) for label, r in records.items() if "joint" in r]
    if both:
        out += ["", line(["joint log-likelihood", *(f"κ = {k}" for k in KAPPAS)]), "|---" + "|--:" * len(KAPPAS) + "|"]
        for label, r in both:
            out.append(line([label, *(f"{r[str(k)]['mean']:.3f}" for k in KAPPAS)]))
    return "\n".join(out)


def write(depth: int, records: dict[str, Any]) -> None:
    stored = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"experiment": "cifar10", "networks": {}}
    order = {name: i for i, name in enumerate(ROWS)}
    stored["networks"][f"resnet{depth}"] = dict(sorted(records.items(), key=lambda row: order[row[0].split(":")[0]]))
    stored |= {"machine": machine(), "versions": versions("torch", "numpy", "lapwing")}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(stored, indent=1) + "\n")
    before, _, rest = PAGE.read_text().partition("<!-- tables -->\n")
    after = rest.partition("<!-- end of tables -->\n")[2]
    networks = json.loads(RESULTS.read_text())["networks"]
    tables = "\n\n".join(f"**{name}**\n\n{table(records)}" for name, records in networks.items())
    PAGE.write_text(f"{before}<!-- tables -->\n{tables}\n<!-- end of tables -->\n{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=[*ROWS, "joint"], default=[*ROWS, "joint"])
    parser.add_argument("--depth", type=int, default=20, choices=(20, 32, 44, 56))
    args = parser.parse_args()
    problem = Problem(args.depth)
    stored = json.loads(RESULTS.read_text())["networks"] if RESULTS.is_file() else {}
    records = stored.get(f"resnet{args.depth}", {})
    for name in args.rows:
        if name == "joint":
            joint(problem, records)
        else:
            run(problem, name, records)
        compared(problem, records)
        write(args.depth, records)


if __name__ == "__main__":
    main()
