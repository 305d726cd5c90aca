"""Noise that depends on the input: natural parameters and Laplace against the remedies of the literature.

    pip install -c constraints.txt "lapwing[studies]"
    LAPWING_DATA=<folder> python studies/heteroscedastic.py [--sets boston ...] [--only sets motorcycle]

One network for all, y | x ~ N(μ, s²): one hidden layer of 50 units (tanh), two outputs (one where there is one noise).

    natural              η = (a, −½ softplus b), μ = −η₁/(2η₂), s² = −1/(2η₂), by maximum likelihood
    natural + Laplace    the same, tuned by the evidence of its tangent model, which also chooses between two trainings
    mean/log-variance    μ = a, log s² = b, by maximum likelihood
    ensemble             five of them, as a mixture
    beta-NLL             the same likelihood, each term weighted by s (no gradient through the weight), β = ½
    faithful             μ by least squares; b sees neither the error's gradient in μ nor moves the hidden layer
    one noise + Laplace  least squares and one σ, in the same way

M. Seitzer et al. On the pitfalls of heteroscedastic uncertainty estimation with probabilistic neural nets. ICLR 2022.
A. Stirn et al. Faithful heteroscedastic regression with neural networks. AISTATS 2023.
Writes `results/heteroscedastic.json` (another run adds the splits that it lacks),
`docs/studies/figures/heteroscedastic.png` and the tables of `docs/studies/heteroscedastic.md`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import pathlib
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "benchmarks"))

from _common import machine, versions  # noqa: E402
from uci_evidence import SETS as UCI  # noqa: E402
from uci_evidence import folder, mean_error, row  # noqa: E402

import lapwing as lw  # noqa: E402

CRISPR = ("flow-cytometry-HEK293", "survival-screen-A375", "survival-screen-HEK293")
SETS = (*UCI, *CRISPR)
WIDTH, BATCH, RATE, STEPS, EVERY = 50, 100, 3e-2, 2_000, 100  # validated every so many steps
DECAYS, HELD, MEMBERS = (0.01, 0.3, 10.0), 0.2, 5
UPDATE, DRAWS = 200, 512  # steps between updates of the prior in training; draws of (η₁, η₂)
SPLITS, PARTS = 5, ("motorcycle", "sets")
RESULTS, PAGE = HERE / "results" / "heteroscedastic.json", HERE.parent / "docs" / "studies" / "heteroscedastic.md"
FIGURE = HERE.parent / "docs" / "studies" / "figures" / "heteroscedastic.png"
FIT, KINDS = "natural, evidence", ("tangent, draws", "tangent, delta", "network, draws", "network, delta")
MAIN = f"{FIT}, {KINDS[0]}"
RIVALS = (
    *("mean/log-variance", "ensemble", "beta-NLL", "faithful"),
    *("one noise, evidence, network", "one noise, evidence, tangent"),
)
VARIANTS = (
    *("natural", *(f"natural, {training}, tangent, draws" for training in ("validated", "online", "both"))),
    *(f"{FIT}, {kind}" for kind in KINDS[1:]),
)
LABELS = {
    MAIN: "natural + Laplace",
    "one noise, evidence, network": "one noise + Laplace",
    "one noise, evidence, tangent": "one noise + Laplace, tangent mean",
    "natural": "maximum likelihood",
    "natural, validated, tangent, draws": "+ Laplace, validated",
    "natural, online, tangent, draws": "+ Laplace, online",
    "natural, both, tangent, draws": "both, mixed",
    **{f"{FIT}, {kind}": f"by evidence: {kind}" for kind in KINDS[1:]},
}
RMSE = ("natural", "mean/log-variance", "beta-NLL", "faithful", "one noise, evidence, network")
Data = tuple[Tensor, Tensor]
Moments = tuple[Tensor, Tensor]  # mean and variance of y


# -- data --------------------------------------------------------------------------------------------------------


def raw(name: str, split: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs, targets and the rows of training and test data; CRISPR sets, which have no splits, are cut 9 to 1."""
    if name in UCI:
        stored = np.load(folder() / "uci_regression" / f"{name}.npz")
        x, y = (torch.from_numpy(stored[key]).double() for key in ("X", "y"))
        train, test = (torch.from_numpy(stored[f"{part}_{split}"]).long() for part in ("train", "test"))
        return x, y.reshape(-1, 1), train, test
    stored = np.load(folder() / "crispr" / f"{name}.npz")
    bases = torch.from_numpy(stored["x"])
    x = torch.stack([bases == code for code in range(4)], -1).flatten(1).double()  # padding is all zeros
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(split))
    cut = len(x) // 10
    return x, torch.from_numpy(stored["y_mean"]).double().reshape(-1, 1), order[cut:], order[:cut]


def standardized(x: Tensor, y: Tensor, train: Tensor, test: Tensor) -> tuple[Data, Data, float]:
    """Training and test data in units of the training data, and the unit of the targets."""
    spread, unit = x[train].std(0), float(y[train].std())
    x = (x - x[train].mean(0)) / torch.where(spread > 0, spread, 1.0)
    y = (y - y[train].mean()) / unit
    return (x[train], y[train]), (x[test], y[test]), unit


def cut(rows: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """80 % to train on and 20 % to choose by."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    held = round(HELD * len(rows))
    return rows[order[held:]], rows[order[:held]]


# -- losses: outputs (..., 2) and targets (..., 1) to a number an example -------------------------------------------


def gaussian_nll(mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
    return 0.5 * (variance.log() + (y - mean).square() / variance + math.log(2 * math.pi))


def natural(f: Tensor) -> Moments:
    twice = F.softplus(f[..., 1:])  # −2η₂
    return f[..., :1] / twice, 1 / twice


def mean_log_variance(f: Tensor) -> Moments:
    return f[..., :1], f[..., 1:].exp()


def beta_nll(f: Tensor, y: Tensor) -> Tensor:
    mean, variance = mean_log_variance(f)
    return variance.detach().sqrt() * gaussian_nll(mean, variance, y)


def faithful(f: Tensor, y: Tensor) -> Tensor:
    mean, variance = mean_log_variance(f)
    return 0.5 * (y - mean).square() + gaussian_nll(mean.detach(), variance, y)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "natural": lambda f, y: gaussian_nll(*natural(f), y),
    "mean/log-variance": lambda f, y: gaussian_nll(*mean_log_variance(f), y),
    "beta-NLL": beta_nll,
    "faithful": faithful,
    "one noise": lambda f, y: 0.5 * (y - f[..., :1]).square(),
}


def validated(loss: str, f: Tensor, y: Tensor) -> float:
    """Log-likelihood of held-out data; with one noise, at the noise that is best for them."""
    if loss == "one noise":
        return -0.5 * math.log(2 * math.pi * math.e * float((y - f[..., :1]).square().mean()))
    return -float(gaussian_nll(*(natural if loss == "natural" else mean_log_variance)(f), y).mean())


# -- many networks trained at once ---------------------------------------------------------------------------------


class Stack(nn.Module):
    """m networks of the same shape, with weights (m, i, o): independent, as are Adam's steps."""

    def __init__(self, losses: list[str], inputs: int, seeds: list[int]) -> None:
        super().__init__()
        starts = {loss: losses.index(loss) for loss in losses}  # those of one loss stand together
        self.kinds = {loss: slice(start, start + losses.count(loss)) for loss, start in starts.items()}
        single = [self.single(inputs, seed) for seed in seeds]
        for name in ("0.weight", "0.bias", "2.weight", "2.bias"):
            each = torch.stack([net.get_parameter(name).detach().float() for net in single])
            each = each.mT.contiguous() if each.ndim == 3 else each.unsqueeze(1)
            self.register_parameter(name.replace(".", "_"), nn.Parameter(each))
        free = torch.tensor([float(loss != "faithful") for loss in losses])
        self.register_buffer("free", free.reshape(-1, 1, 1))

    @staticmethod
    def single(inputs: int, seed: int, outputs: int = 2) -> nn.Sequential:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return nn.Sequential(nn.Linear(inputs, WIDTH), nn.Tanh(), nn.Linear(WIDTH, outputs)).double()

    def forward(self, x: Tensor) -> Tensor:
        """(m, n, i) to (m, n, 2)."""
        w, v = self.get_parameter("0_weight"), self.get_parameter("2_weight")
        h = torch.tanh(torch.baddbmm(self.get_parameter("0_bias"), x, w))
        still = torch.lerp(h.detach(), h, self.get_buffer("free"))  # what the second output sees
        f = torch.cat([h @ v[..., :1], still @ v[..., 1:]], -1)
        return f + self.get_parameter("2_bias")

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        """Summed over networks, averaged over examples."""
        return torch.stack([LOSSES[kind](f[at], y[at]).sum() for kind, at in self.kinds.items()]).sum() / f.shape[1]

    def network(self, k: int, outputs: int = 2) -> nn.Sequential:
        """One of them, in float64."""
        net = self.single(self.get_parameter("0_weight").shape[1], 0, outputs)
        with torch.no_grad():
            for name, parameter in net.named_parameters():
                mine = self.get_parameter(name.replace(".", "_"))[k].T.double()
                parameter.copy_(mine[: len(parameter)].reshape(parameter.shape))
        return net


def train(stack: Stack, data: Data, decays: list[float], seed: int, steps: int, each: Callable[[int], None]) -> None:
    """By Adam with a cosine decay over STEPS, of which `steps` are taken; `each` is called every EVERY of them. The
    penalty is ½ δ ‖θ‖² / N, and each network has batches of its own."""
    x, y = (part.float() for part in data)
    generator = torch.Generator().manual_seed(seed)
    weight = torch.tensor(decays).reshape(-1, 1, 1) / len(x)
    optimizer = torch.optim.Adam(stack.parameters(), lr=RATE, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for step in range(1, steps + 1):
        index = torch.randint(len(x), (len(decays), min(BATCH, len(x))), generator=generator)
        optimizer.zero_grad()
        stack.loss(stack(x[index]), y[index]).backward()
        for p in stack.parameters():
            p.grad = weight * p.detach() if p.grad is None else p.grad.addcmul_(weight, p.detach())
        optimizer.step()
        schedule.step()
        if step % EVERY == 0:
            each(step)


@dataclass(frozen=True)
class Choice:
    """Of weight decay and number of steps, by held-out data."""

    decay: float
    steps: int
    value: float


def chosen(part: Data, held: Data, seed: int) -> dict[str, Choice]:
    """For each loss the best of all decays and numbers of steps."""
    kinds = [(loss, decay) for loss in LOSSES for decay in DECAYS]
    stack = Stack([loss for loss, _ in kinds], part[0].shape[1], [seed] * len(kinds))
    best: dict[str, Choice] = {}

    def look(step: int) -> None:
        with torch.no_grad():
            f = stack(held[0].float().expand(len(kinds), *held[0].shape)).double()
        for k, (loss, decay) in enumerate(kinds):
            found = Choice(decay, step, validated(loss, f[k], held[1]))
            if math.isfinite(found.value) and (loss not in best or found.value > best[loss].value):
                best[loss] = found

    train(stack, part, [decay for _, decay in kinds], seed, STEPS, look)
    return best


def fitted(data: Data, choices: dict[str, Choice], seed: int) -> dict[str, list[nn.Sequential]]:
    """Networks of each loss on all the training data, five of mean/log-variance, each stopped where was chosen."""
    losses = [loss for loss in LOSSES for _ in range(MEMBERS if loss == "mean/log-variance" else 1)]
    seeds = [seed + 1_000 * losses[:k].count(loss) for k, loss in enumerate(losses)]
    stack = Stack(losses, data[0].shape[1], seeds)
    out: dict[str, list[nn.Sequential]] = {loss: [] for loss in LOSSES}

    def keep(step: int) -> None:
        for k, loss in enumerate(losses):
            if choices[loss].steps == step:
                out[loss].append(stack.network(k, 1 if loss == "one noise" else 2))

    most = max(choice.steps for choice in choices.values())
    train(stack, data, [choices[loss].decay for loss in losses], seed, most, keep)
    return out


# -- Laplace -------------------------------------------------------------------------------------------------------


def online(data: Data, likelihood: Any, seed: int) -> lw.Laplace:
    """Trained on all the data under precisions (and noise) that the evidence learns on the way; none is held out."""
    x, y = data
    outputs = 1 if likelihood.name == "gaussian" else 2
    net = Stack.single(x.shape[1], seed, outputs)
    if outputs == 2:
        net.append(lw.likelihoods.NaturalHead())
    evidence = lw.OnlineEvidence(net, data, likelihood, every=1, burn_in=1)
    optimizer = torch.optim.Adam(net.parameters(), lr=RATE, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    generator = torch.Generator().manual_seed(seed)
    for step in range(1, STEPS + 1):
        index = torch.randint(len(x), (min(BATCH, len(x)),), generator=generator)
        optimizer.zero_grad()
        evidence.loss(net(x[index]), y[index]).backward()
        optimizer.step()
        schedule.step()
        if step % UPDATE == 0:
            evidence.step()
    evidence.restore()
    return lw.laplace(net, data, evidence.likelihood)


def mixture(prediction: lw.Prediction, y: Tensor) -> tuple[Tensor, float]:
    """log E p(y | η) over draws of η with η₂ < 0, and the share of draws left out: what link="monte_carlo" does, and
    also where the center of the draws lies outside."""
    f, likelihood = prediction.f_sample(DRAWS), prediction.likelihood
    inside = likelihood.inside(f)
    each = torch.stack([likelihood.log_prob(one, y) for one in f])  # −∞ outside
    return torch.logsumexp(each, 0) - inside.sum(0).log(), 1 - float(inside.double().mean())


def natural_scores(la: lw.Laplace, test: Data, unit: float) -> dict[str, tuple[Tensor, dict[str, Any]]]:
    """log p(y) about the tangent model's mean h(x, v*) and about the network's, by draws and by the delta method; that
    has no meaning where h has η₂ ≥ 0, and is about the network's mean there."""
    out = {}
    about = {mean: la.predict(test[0], mean=mean, link="delta") for mean in ("network", "tangent")}
    for mean, prediction in about.items():
        value, left_out = mixture(prediction, test[1])
        out[f"{mean}, draws"] = value - math.log(unit), {"left_out": left_out}
        inside = prediction.likelihood.inside(prediction.f_mean).unsqueeze(-1)
        f_mean = torch.where(inside, prediction.f_mean, about["network"].f_mean)
        value = replace(prediction, f_mean=f_mean).log_prob(test[1])
        out[f"{mean}, delta"] = value - math.log(unit), {"outside": int((~inside).sum())}
    return out


def one_noise_scores(la: lw.Laplace, test: Data, unit: float) -> dict[str, tuple[Tensor, dict[str, Any]]]:
    """About each mean with the noise that is learnt for it: at least the network's residuals for the network's mean."""
    fits = {"network": la, "tangent": la.tuned(mean="tangent")}
    means = {mean: fit.predict(test[0], mean=mean) for mean, fit in fits.items()}
    rmse = {mean: unit * float((p.mean - test[1]).square().mean().sqrt()) for mean, p in means.items()}
    return {mean: (p.log_prob(test[1]) - math.log(unit), {"rmse": rmse[mean]}) for mean, p in means.items()}


def facts(la: lw.Laplace, unit: float) -> dict[str, Any]:
    """unit: of the targets that la was fitted to, in training standard deviations."""
    assert la.tuning is not None
    return {
        "log_evidence": float(la.log_evidence()) - la.state.n * math.log(unit),
        "precision": float(la.prior.precision),
        "dimension": float(la.effective_dimension().sum()),
        "structure": str(la.state.structure),
        "converged": la.tuning.converged,
        **{k: float(v) * unit for k, v in la.likelihood.hyperparameters.items()},
    }


def by_evidence(name: str, fits: dict[str, tuple[lw.Laplace, float]], score: Any, test: Data, unit: float) -> Any:
    """Scores of fits of one model that were trained in different ways, of the one that the evidence prefers, and of all
    as a mixture; with each fit the unit of its targets."""
    known = {training: facts(la, noise) for training, (la, noise) in fits.items()}
    best = max(known, key=lambda training: known[training]["log_evidence"])
    out: dict[str, Any] = {f"{name}, {training}": fact for training, fact in known.items()}
    out[f"{name}, evidence"] = known[best] | {"training": best}
    logs: dict[str, list[Tensor]] = {}
    for training, (la, noise) in fits.items():
        for kind, (value, more) in score(la, (test[0], test[1] / noise), unit * noise).items():
            out[f"{name}, {training}, {kind}"] = {"ll": float(value.mean())} | more
            logs.setdefault(kind, []).append(value)
            if training == best:
                out[f"{name}, evidence, {kind}"] = out[f"{name}, {training}, {kind}"]
    for kind, each in logs.items():
        both = torch.logsumexp(torch.stack(each), 0) - math.log(len(each))
        out[f"{name}, both, {kind}"] = {"ll": float(both.mean())}
    return out


# -- one split -----------------------------------------------------------------------------------------------------


def plain(nets: dict[str, list[nn.Sequential]], test: Data, unit: float) -> dict[str, dict[str, Any]]:
    """The networks as they are, and the ensemble as a mixture."""
    out = {}
    for loss, members in nets.items():
        if loss == "one noise":
            continue
        with torch.no_grad():
            each = [(natural if loss == "natural" else mean_log_variance)(net(test[0])) for net in members]
        log_prob = torch.stack([-gaussian_nll(*moments, test[1]) for moments in each])
        out[loss] = {"ll": float(log_prob[0].mean()) - math.log(unit)} | {
            "rmse": unit * float((each[0][0] - test[1]).square().mean().sqrt())
        }
        if len(members) > 1:
            mixed = torch.logsumexp(log_prob, 0) - math.log(len(members))
            out["ensemble"] = {"ll": float(mixed.mean()) - math.log(unit)}
    return out


def run(name: str, split: int, develop: bool = False) -> dict[str, Any]:
    """All methods on one split; to develop, on a part of its training data in the place of the test data."""
    x, y, train_rows, test_rows = raw(name, split)
    if develop:
        train_rows, test_rows = cut(train_rows, 77)
    data, test, unit = standardized(x, y, train_rows, test_rows)
    part, held = ((data[0][rows], data[1][rows]) for rows in cut(torch.arange(len(train_rows)), split))
    start = time.process_time()
    choices = chosen(part, held, split)
    nets = fitted(data, choices, split)
    out: dict[str, Any] = plain(nets, test, unit)
    likelihood = lw.likelihoods.HeteroscedasticGaussian()
    single = online(data, lw.likelihoods.Gaussian(), split)
    noise = float(single.likelihood.hyperparameters["noise"])
    fits = {
        "validated": (lw.laplace(nets["one noise"][0], data, "gaussian").tuned(), 1.0),
        "online": (single.tuned(), 1.0),
    }
    out |= by_evidence("one noise", fits, one_noise_scores, test, unit)
    head = nn.Sequential(*nets["natural"][0], lw.likelihoods.NaturalHead())
    fits = {
        "validated": (lw.laplace(head, data, likelihood).tuned(), 1.0),
        "online": (online((data[0], data[1] / noise), likelihood, split).tuned(), noise),
    }
    out |= by_evidence("natural", fits, natural_scores, test, unit)
    about = {
        "n": len(train_rows),
        "chosen": {loss: {"decay": c.decay, "steps": c.steps} for loss, c in choices.items()},
        "cpu_seconds": time.process_time() - start,
    }
    return out | {"about": about}


# -- motorcycle ----------------------------------------------------------------------------------------------------


def motorcycle() -> dict[str, Any]:
    """Silverman's data and what three fits say of them, with both kinds of band."""
    from matplotlib.figure import Figure

    stored = torch.from_numpy(np.loadtxt(folder() / "toy1d" / "mcycle.csv", delimiter=",", usecols=(1, 2))).double()
    x, y = stored[:, :1], stored[:, 1:]
    center, spread, unit = x.mean(), x.std(), float(y.std())
    data = ((x - center) / spread, (y - y.mean()) / unit)
    grid = torch.linspace(-5, 75, 321, dtype=torch.float64).reshape(-1, 1)
    at = (grid - center) / spread
    single = online(data, lw.likelihoods.Gaussian(), 0)
    noise = float(single.likelihood.hyperparameters["noise"])
    la = online((data[0], data[1] / noise), lw.likelihoods.HeteroscedasticGaussian(), 0).tuned()
    single = single.tuned()
    net = fitted(data, {loss: Choice(0.01, STEPS, 0.0) for loss in LOSSES}, 0)["mean/log-variance"][0]
    with torch.no_grad():
        mean, variance = mean_log_variance(net(at))
    panels = {
        "natural parameters + Laplace": bands(la.predict(at, mean="tangent", link="delta"), unit * noise),
        "one noise + Laplace": bands(single.predict(at, mean="tangent"), unit),
        "mean/log-variance, maximum likelihood": (unit * mean, unit * variance.sqrt(), unit * variance.sqrt()),
    }
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    axes = figure.subplots(1, 3, sharey=True)
    for axis, (title, (mean, aleatoric, total)) in zip(axes, panels.items(), strict=True):
        mean = mean + y.mean()
        t = grid[:, 0]
        for std, color, label in ((total, "#c6dbef", "total"), (aleatoric, "#6baed6", "noise")):
            axis.fill_between(
                t, (mean - 2 * std)[:, 0], (mean + 2 * std)[:, 0], color=color, lw=0, label=f"± 2 s, {label}"
            )
        axis.plot(t, mean, color="#08306b", lw=1.2)
        axis.plot(x, y, ".", color="black", ms=3)
        axis.set(title=title, xlabel="ms after impact", xlim=(-5, 75), ylim=(-220, 160))
    axes[0].set_ylabel("acceleration / g")
    axes[0].legend(loc="lower right", frameon=False)
    FIGURE.parent.mkdir(exist_ok=True)
    figure.savefig(FIGURE, dpi=110)
    return {"natural": facts(la, noise), "one noise": facts(single, 1.0)}


def bands(prediction: lw.Prediction, unit: float) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, standard deviation of the noise, and of all."""
    return unit * prediction.mean, unit * prediction.aleatoric.sqrt(), unit * prediction.std


# -- tables --------------------------------------------------------------------------------------------------------


def values(runs: list[dict[str, Any]], method: str, key: str = "ll") -> list[float]:
    return [r[method][key] for r in runs]


def cell(runs: list[dict[str, Any]], method: str, key: str = "ll") -> str:
    return signed(*mean_error(values(runs, method, key))).removeprefix("+")


def apart(runs: list[dict[str, Any]], method: str, rival: str) -> tuple[float, float]:
    """Mean difference over splits, and its standard error."""
    return mean_error([a - b for a, b in zip(values(runs, method), values(runs, rival), strict=True)])


def behind(runs: list[dict[str, Any]], method: str, rivals: tuple[str, ...]) -> list[str]:
    """Rivals that are better by more than one standard error of the difference; that of a single split is not known,
    and any that is better counts."""
    found = {rival: apart(runs, method, rival) for rival in rivals}
    worse = {rival: pair for rival, pair in found.items() if pair[0] + (0.0 if math.isnan(pair[1]) else pair[1]) < 0}
    return [f"{LABELS.get(rival, rival)} ({signed(*pair)})" for rival, pair in worse.items()]


def signed(mean: float, error: float) -> str:
    return f"{mean:+.3f}" if math.isnan(error) else f"{mean:+.3f} ± {error:.3f}"


def tables(sets: dict[str, list[dict[str, Any]]]) -> list[str]:
    shown = (MAIN, *RIVALS)
    lines = [row(["set", "N", "splits", *(LABELS.get(m, m) for m in shown)]), "|---" + "|--:" * (len(shown) + 2) + "|"]
    for name, runs in sets.items():
        best = max(shown, key=lambda m: statistics.fmean(values(runs, m)))
        cells = [f"**{cell(runs, m)}**" if m == best else cell(runs, m) for m in shown]
        lines.append(row([name, runs[0]["about"]["n"], len(runs), *cells]))
    held = {name: behind(runs, MAIN, RIVALS) for name, runs in sets.items()}
    lines += [
        "",
        f"As good as every other within one standard error: {sum(not b for b in held.values())} of {len(sets)}.",
        "",
    ]
    lines += [row(["set", "who is better by more than one standard error of the difference"]), "|---|---|"]
    lines += [row([name, "; ".join(b) or "none"]) for name, b in held.items()]
    lines += ["", row(["set", *(LABELS.get(m, m) for m in VARIANTS)]), "|---" + "|--:" * len(VARIANTS) + "|"]
    lines += [row([name, *(cell(runs, m) for m in VARIANTS)]) for name, runs in sets.items()]
    lines += [
        "",
        row(
            [
                "set",
                "draws left out",
                "precision",
                "effective dimension",
                "online chosen",
                *(f"RMSE, {LABELS[m] if 'evidence' in m else m}" for m in RMSE),
            ]
        ),
    ]
    lines.append("|---" + "|--:" * (4 + len(RMSE)) + "|")
    for name, runs in sets.items():
        left = statistics.fmean(values(runs, MAIN, "left_out"))
        numbers = [f"{statistics.fmean(values(runs, FIT, key)):.3g}" for key in ("precision", "dimension")]
        numbers.append(f"{sum(r[FIT]['training'] == 'online' for r in runs)}/{len(runs)}")
        errors = [f"{statistics.fmean(values(runs, m, 'rmse')):.4g}" for m in RMSE]
        lines.append(row([name, f"{100 * left:.2g} %", *numbers, *errors]))
    return lines


def write(record: dict[str, Any]) -> None:
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")
    if "sets" not in record or not PAGE.is_file():
        return
    before, _, rest = PAGE.read_text().partition("<!-- tables -->\n")
    after = rest.partition("<!-- end of tables -->\n")[2]
    made = "\n".join(tables(record["sets"]))
    PAGE.write_text(f"{before}<!-- tables -->\n{made}\n<!-- end of tables -->\n{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=SETS)
    parser.add_argument("--splits", type=int, default=SPLITS)
    args = parser.parse_args()
    folder()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    warnings.simplefilter("ignore", lw.errors.LapwingWarning)  # draws left out are counted
    record: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"experiment": "heteroscedastic"}
    record |= {
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": versions("torch", "lapwing"),
    }
    if "motorcycle" in args.only:
        record["motorcycle"] = motorcycle()
        write(record)
    for split in range(args.splits if "sets" in args.only else 0):
        for name in args.sets:
            runs = record.setdefault("sets", {}).setdefault(name, [])
            if split < len(runs):  # from a run that was cut short
                continue
            runs.append(run(name, split))
            write(record)
            print(split, name, {m: round(runs[-1][m]["ll"], 3) for m in (MAIN, *RIVALS)}, flush=True)


if __name__ == "__main__":
    main()
