"""Which prior precision predicts real data best: five choices for batch-norm networks, on held-out data.

    pip install -c constraints.txt "lapwing[studies]"
    LAPWING_DATA=<folder> python studies/uci_evidence.py [--only regression digits fashion]

    naive       tuned(center="map"): the evidence at the trained weights, which are no mode
    tangent     tuned(): the evidence at the mode of the tangent model
    layerwise   the same, one precision a layer
    g-prior     the same, in the unit of each Jacobian column
    grid        the best of five precisions on 20 % of the training data, by a network trained on the other 80 %

Everything is predicted about the *network's* mean, so that choices differ in error bars alone. Nine UCI regression sets
(`uci_regression/*.npz`, standard splits 0 to 4, noise learnt), scikit-learn's digits and a part of Fashion-MNIST.
Failures, bounds, warnings and searches that did not settle are counted. Writes `results/uci_evidence.json` and the
tables of `docs/studies/evidence_on_data.md`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import pathlib
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "benchmarks"))

from _common import machine, versions  # noqa: E402

import lapwing as lw  # noqa: E402

SETS = ("boston", "concrete", "energy", "kin8nm", "naval", "power", "protein", "wine", "yacht")
SPLITS, MOST = 5, 1_000  # training examples of a large set; more are left out, drawn with the split as seed
WIDTH, STEPS, BATCH, RATE = 50, 1_000, 100, 1e-2
GRID = (0.01, 0.1, 1.0, 10.0, 100.0)
CLASS_GRID = (1.0, 10.0, 100.0, 1e3, 1e4)  # confident classifiers ask for more
HELD, FLOOR = 0.2, 0.5
SEEDS = {"digits": 5, "fashion": 3}
PARTS = ("regression", "noise", *SEEDS)
RESULTS, PAGE = HERE / "results" / "uci_evidence.json", HERE.parent / "docs" / "studies" / "evidence_on_data.md"
MAIN = ("naive", "tangent", "layerwise", "g-prior")
CHOICES = {  # the order of the tables
    "regression": (
        *("plug-in", *MAIN, "grid", "grid, held-out noise"),
        *("tangent, network's noise", "layerwise, tangent's noise", "layerwise, network's noise"),
        *("layerwise, floored", "g-prior, network's noise", "tangent, tangent mean"),
    ),
    "classes": ("plug-in", *MAIN, "grid"),
}
Data = tuple[Tensor, Tensor]


def folder() -> pathlib.Path:
    found = os.environ.get("LAPWING_DATA")
    if found is None or not pathlib.Path(found, "uci_regression").is_dir():
        raise SystemExit(f"skipped: no uci_regression/ in the folder of LAPWING_DATA, {found!r}; see studies/README.md")
    return pathlib.Path(found)


# -- networks ----------------------------------------------------------------------------------------------------


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    """Two hidden layers with biases before batch norm and ReLU."""
    layers: list[nn.Module] = []
    for i in (inputs, WIDTH):
        layers += [nn.Linear(i, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(WIDTH, outputs)).double()


def cnn() -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, o in ((1, 8), (8, 16), (16, 16)):
        layers += [nn.Conv2d(i, o, 3, 2, 1), nn.BatchNorm2d(o), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, 10)).double()


def trained(make: Callable[[], nn.Sequential], data: Data, loss: Callable[..., Tensor], seed: int) -> nn.Sequential:
    """By Adam with a cosine decay and no weight decay; batch-norm statistics are those of all the data."""
    torch.manual_seed(seed)
    net, (x, y) = make(), data
    optimizer = torch.optim.Adam(net.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for _ in range(STEPS):
        index = torch.randperm(len(x))[:BATCH]
        optimizer.zero_grad()
        loss(net(x[index]), y[index]).backward()
        optimizer.step()
        schedule.step()
    for norm in (m for m in net.modules() if isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d))):
        norm.reset_running_stats()
        norm.momentum = None
    with torch.no_grad():
        net(x)
    return net.eval()


# -- one choice, with all that went wrong ------------------------------------------------------------------------


def tuned(la: lw.Laplace, prior: Any, **options: Any) -> tuple[lw.Laplace | None, dict[str, Any]]:
    """la.tuned under another prior, and the record of how it went; None where it failed."""
    start = time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            out = la.replace(prior=prior).tuned(**options)
        except (lw.errors.LapwingError, torch.linalg.LinAlgError) as error:
            return None, {"failed": f"{type(error).__name__}: {error}", "seconds": time.process_time() - start}
    tuning = out.tuning
    assert tuning is not None
    return out, {
        "seconds": time.process_time() - start,
        "converged": tuning.converged,
        "iterations": tuning.iterations,
        "passes": tuning.passes,
        "at_bound": list(tuning.at_bound),
        "warnings": [str(w.message) for w in caught],
        "log_evidence": float(out.log_evidence()),
        **hyper(out),
    }


def hyper(la: lw.Laplace) -> dict[str, Any]:
    return {
        "precision": la.prior.precision.reshape(-1).tolist(),
        "dimension": la.effective_dimension().reshape(-1).tolist(),
        **{k: float(v) for k, v in la.likelihood.hyperparameters.items()},
    }


def split_off(data: Data, seed: int) -> tuple[Data, Data]:
    """80 % to train on and 20 % to choose by."""
    x, y = data
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    cut = round(HELD * len(x))
    return (x[order[cut:]], y[order[cut:]]), (x[order[:cut]], y[order[:cut]])


# -- regression --------------------------------------------------------------------------------------------------


def regression_data(name: str, split: int) -> tuple[Data, Data, float]:
    """Training and test data, standardized by the training split, and the unit of the targets."""
    stored = np.load(folder() / "uci_regression" / f"{name}.npz")
    x, y = torch.from_numpy(stored["X"]).double(), torch.from_numpy(stored["y"]).double().reshape(-1, 1)
    train, test = (torch.from_numpy(stored[f"{part}_{split}"]).long() for part in ("train", "test"))
    train = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(split))[:MOST]]
    spread = x[train].std(0)
    x = (x - x[train].mean(0)) / torch.where(spread > 0, spread, 1.0)
    unit = float(y[train].std())
    y = (y - y[train].mean()) / unit
    return (x[train], y[train]), (x[test], y[test]), unit


def regression_run(name: str, split: int) -> dict[str, Any]:
    """log-likelihood a test point, in the units of the data, under each choice."""
    train, test, unit = regression_data(name, split)

    def make() -> nn.Sequential:
        return mlp(train[0].shape[1], 1)

    net = trained(make, train, nn.functional.mse_loss, split)
    la = lw.laplace(net, train, "gaussian")
    residual = residuals(net, train)

    def scored(model: lw.Laplace, **options: Any) -> float:
        return float(model.predict(test[0], **options).log_prob(test[1]).mean()) - math.log(unit)

    noise = lw.likelihoods.Gaussian(residual)
    with torch.no_grad():
        plain = float(noise.log_prob(net(test[0]), test[1]).mean()) - math.log(unit)
    out: dict[str, Any] = {"plug-in": {"ll": plain}}
    tangent = None
    for choice, prior, options in (
        ("naive", 1.0, {"center": "map"}),
        ("tangent", 1.0, {}),
        ("layerwise", "layerwise", {}),
        ("g-prior", "gprior", {}),
    ):
        found, out[choice] = tuned(la, prior, **options)
        if found is not None:
            out[choice]["ll"] = scored(found)
            if choice != "naive":
                again = found.replace(likelihood=network_noise(found, residual))
                out[f"{choice}, network's noise"] = {"ll": scored(again), **hyper(again)}
        if choice == "tangent" and found is not None:
            tangent = found
            loose, out["tangent, tangent mean"] = tuned(la, prior, mean="tangent")
            if loose is not None:
                out["tangent, tangent mean"]["ll"] = scored(loose, mean="tangent")
            turn = la.replace(likelihood=found.likelihood)
            held, out["layerwise, tangent's noise"] = tuned(turn, "layerwise", fixed=("noise",))
            if held is not None:
                out["layerwise, tangent's noise"]["ll"] = scored(held)
        if choice == "layerwise" and found is not None and tangent is not None:
            lifted = floored(found, tangent)
            out["layerwise, floored"] = {"ll": scored(lifted), **hyper(lifted)}
    part, held_out = split_off(train, split)
    smaller = trained(make, part, nn.functional.mse_loss, split)
    grid = lw.laplace(smaller, part, "gaussian")
    for label, own, final in (
        ("grid", residuals(smaller, part), residual),
        ("grid, held-out noise", residuals(smaller, held_out), residuals(smaller, held_out)),
    ):
        small = {p: grid.replace(prior=p, likelihood=lw.likelihoods.Gaussian(own)) for p in GRID}
        value = {p: float(m.predict(held_out[0]).log_prob(held_out[1]).mean()) for p, m in small.items()}
        best = max(GRID, key=lambda p: value[p])
        out[label] = {
            "ll": scored(la.replace(prior=best, likelihood=lw.likelihoods.Gaussian(final))),
            "precision": [best],
            "noise": final,
        }
    return out | {"about": about(la, residual, residuals(net, test))}


def residuals(net: nn.Module, data: Data) -> float:
    """Root mean square of y − f(x)."""
    with torch.no_grad():
        return float((net(data[0]) - data[1]).square().mean().sqrt())


def network_noise(la: lw.Laplace, residual: float) -> lw.likelihoods.Gaussian:
    """σ² = SSE / (N − γ) by the residuals of the network, which the predictions are about, not the tangent model's."""
    n, gamma = la.state.n, float(la.effective_dimension().sum())
    return lw.likelihoods.Gaussian(residual * math.sqrt(n / (n - gamma)))


def floored(la: lw.Laplace, tangent: lw.Laplace) -> lw.Laplace:
    """Layerwise precisions, but none so large that a layer has less than half the effective dimension that the scalar
    choice leaves it: there λ_g is lowered towards the scalar, by halving in log space. Noise as the scalar choice's."""
    scalar = tangent.prior.precision.reshape(-1).expand(la.prior.precision.numel())
    one = la.replace(prior=la.prior.replace(precision=scalar.clone()), likelihood=tangent.likelihood)
    goal = FLOOR * one.effective_dimension()
    high = la.prior.precision.reshape(-1).log()
    now = one.replace(prior=la.prior)
    lift = now.effective_dimension() < goal
    low = torch.where(lift, torch.minimum(scalar.log(), high), high)
    for _ in range(6 if bool(lift.any()) else 0):
        middle = 0.5 * (low + high)
        now = one.replace(prior=la.prior.replace(precision=middle.exp()))
        short = now.effective_dimension() < goal
        low, high = torch.where(short & lift, low, middle), torch.where(short & lift, middle, high)
    return one.replace(prior=la.prior.replace(precision=low.exp()))


def noise_run(name: str, split: int) -> dict[str, Any]:
    """Choices under four noises, for predictions about the network's mean: the evidence's own, at h(·, v*); that of the
    network's residuals; the first, lifted afterwards to no less than those residuals; held there while tuning."""
    train, test, unit = regression_data(name, split)
    net = trained(lambda: mlp(train[0].shape[1], 1), train, nn.functional.mse_loss, split)
    la, residual = lw.laplace(net, train, "gaussian"), residuals(net, train)
    out: dict[str, Any] = {"residual": residual, "test": residuals(net, test)}

    def score(label: str, model: lw.Laplace) -> None:
        value = float(model.predict(test[0]).log_prob(test[1]).mean()) - math.log(unit)
        out[label] = {**out.get(label, {}), "ll": value}

    naive, out["naive"] = tuned(la, 1.0, center="map")
    if naive is not None:
        score("naive", naive)
    for choice, prior in (("tangent", 1.0), ("g-prior", "gprior")):
        held, out[choice] = tuned(la, prior)
        if held is not None:
            score(choice, held)
        found, out[f"{choice}, own noise"] = tuned(la, prior, mean="tangent")
        if found is not None:
            own = float(found.likelihood.hyperparameters["noise"])
            score(f"{choice}, own noise", found)
            score(f"{choice}, network's noise", found.replace(likelihood=network_noise(found, residual)))
            score(f"{choice}, lifted", found.replace(likelihood=lw.likelihoods.Gaussian(max(own, residual))))
    return out


def noise_table(sets: dict[str, list[dict[str, Any]]]) -> list[str]:
    kinds = ("", ", own noise", ", network's noise", ", lifted")
    choices = ("naive", *(f"tangent{kind}" for kind in kinds), "g-prior", "g-prior, own noise")
    every = [r for runs in sets.values() for r in runs]
    lines = [row(["set", "residual", "tangent's own noise", *choices]), "|---" + "|--:" * (len(choices) + 2) + "|"]
    for name, runs in sets.items():
        residual = statistics.fmean(r["residual"] for r in runs)
        noise = statistics.fmean(r["tangent, own noise"]["noise"] for r in runs if "noise" in r["tangent, own noise"])
        lines.append(row([name, f"{residual:.4f}", f"{noise:.4f}", *(cell(runs, c, "ll") for c in choices)]))
    wins = ["" if c == "naive" else f"{against(every, c, 'naive', 'll')[0]}/{len(every)}" for c in choices]
    return [*lines, row(["better than naive", "", "", *wins])]


def about(la: lw.Laplace, fit: float, test: float) -> dict[str, Any]:
    return {
        "parameters": la.state.layout.size,
        "examples": la.state.n,
        "structure": str(la.state.structure),
        "train": fit,
        "test": test,
    }


# -- classes -----------------------------------------------------------------------------------------------------


def digits(seed: int) -> tuple[Data, Data, Callable[[], nn.Sequential]]:
    from sklearn.datasets import load_digits

    stored = load_digits()
    x, y = torch.from_numpy(stored.data / 16).double(), torch.from_numpy(stored.target).long()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    a, b = order[:900], order[900:]
    return (x[a], y[a]), (x[b], y[b]), lambda: mlp(64, 10)


def fashion(seed: int) -> tuple[Data, Data, Callable[[], nn.Sequential]]:
    """2,000 training images, others for each seed, and the first 2,000 test images."""
    stored = np.load(folder() / "fashion_mnist.npz")
    index = np.random.default_rng(seed).permutation(len(stored["y_train"]))[:2_000]

    def part(x: Any, y: Any) -> Data:
        return torch.from_numpy(x / 255).double().reshape(-1, 1, 28, 28), torch.from_numpy(y).long().reshape(-1)

    train = part(stored["x_train"][index], stored["y_train"][index])
    return train, part(stored["x_test"][:2_000], stored["y_test"][:2_000]), cnn


def class_scores(probs: Tensor, y: Tensor, bins: int = 15) -> dict[str, float]:
    """NLL, accuracy, and ECE: Σ_b (n_b/n) |accuracy_b − confidence_b| over bins of confidence."""
    confidence, guess = probs.max(-1)
    right = (guess == y).to(confidence)
    index = (confidence * bins).ceil().long().clamp(1, bins) - 1
    gaps = torch.zeros(bins).to(confidence).index_add(0, index, right - confidence)
    nll = -float(probs.gather(-1, y.unsqueeze(-1)).log().mean())
    return {"nll": nll, "ece": float(gaps.abs().sum() / len(y)), "accuracy": float(right.mean())}


def class_run(load: Callable[[int], tuple[Data, Data, Callable[[], nn.Sequential]]], seed: int) -> dict[str, Any]:
    train, test, make = load(seed)
    net = trained(make, train, nn.functional.cross_entropy, seed)
    la = lw.laplace(net, train, "categorical")

    def scored(model: lw.Laplace, data: Data) -> dict[str, float]:
        probs = torch.cat([model.predict(x, link="probit").probs for x in data[0].split(250)])
        return class_scores(probs, data[1])

    with torch.no_grad():
        out: dict[str, Any] = {"plug-in": class_scores(net(test[0]).softmax(-1), test[1])}
        fit = float(nn.functional.cross_entropy(net(train[0]), train[1]))
    for choice, prior, options in (
        ("naive", 1.0, {"center": "map"}),
        ("tangent", 1.0, {}),
        ("layerwise", "layerwise", {}),
        ("g-prior", "gprior", {}),
    ):
        found, out[choice] = tuned(la, prior, **options)
        if found is not None:
            out[choice] |= scored(found, test)
    part, held_out = split_off(train, seed)
    grid = lw.laplace(trained(make, part, nn.functional.cross_entropy, seed), part, "categorical")
    value = {p: scored(grid.replace(prior=p), held_out)["nll"] for p in CLASS_GRID}
    best = min(CLASS_GRID, key=lambda p: value[p])
    out["grid"] = {"precision": [best], **scored(la.replace(prior=best), test)}
    return out | {"about": about(la, fit, out["plug-in"]["nll"])}


# -- tables ------------------------------------------------------------------------------------------------------


def row(cells: Any) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def mean_error(values: list[float]) -> tuple[float, float]:
    """The mean and its standard error."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.fmean(values), error


def cell(runs: list[dict[str, Any]], choice: str, key: str) -> str:
    values = [r[choice][key] for r in runs if key in r.get(choice, {})]
    if not values:
        return "failed"
    mean, error = mean_error(values)
    missing = f" ({len(runs) - len(values)} failed)" if len(values) < len(runs) else ""
    form = ".3f" if abs(mean) < 1e4 else ".1e"
    return f"{mean:{form}} ± {error:{form}}{missing}"


def against(runs: list[dict[str, Any]], a: str, b: str, key: str, sign: int = 1) -> tuple[int, list[float]]:
    """On how many runs a is better than b (a failure of a is a loss), and the differences."""
    both = [r for r in runs if key in r.get(a, {}) and key in r.get(b, {})]
    apart = [sign * (r[a][key] - r[b][key]) for r in both]
    return sum(d > 0 for d in apart), apart


def regression_tables(sets: dict[str, list[dict[str, Any]]]) -> list[str]:
    every = [r for runs in sets.values() for r in runs]
    five = ("plug-in", *MAIN, "grid", "grid, held-out noise")
    lines = [row(["set", "N", *five, "tangent − naive", "wins"]), "|---" + "|--:" * (len(five) + 3) + "|"]
    for name, runs in sets.items():
        wins, apart = against(runs, "tangent", "naive", "ll")
        mean, error = mean_error(apart)
        form = "+.3f" if abs(mean) < 1e4 else "+.1e"
        cells = [cell(runs, choice, "ll") for choice in five]
        lines.append(
            row(
                [
                    name,
                    runs[0]["about"]["examples"],
                    *cells,
                    f"{mean:{form}} ± {error:{form[1:]}}",
                    f"{wins}/{len(runs)}",
                ]
            )
        )
    lines += ["", row(["choice", "mean", "better than naive", "than tangent", "than grid", "mean rank of the five"])]
    lines.append("|---" + "|--:" * 5 + "|")
    ranked = (*MAIN, "grid")
    for choice in CHOICES["regression"]:
        scores = [r[choice]["ll"] for r in every if "ll" in r.get(choice, {})]
        beats = [
            "" if choice == rival else f"{against(every, choice, rival, 'll')[0]}/{len(every)}"
            for rival in ("naive", "tangent", "grid")
        ]
        rank = [1 + sum(r[o].get("ll", -math.inf) > r[choice].get("ll", -math.inf) for o in ranked) for r in every]
        shown = f"{statistics.fmean(rank):.2f}" if choice in ranked else ""
        mean = statistics.fmean(scores)
        lines.append(row([choice, f"{mean:.3f}" if abs(mean) < 1e4 else f"{mean:.1e}", *beats, shown]))
    return lines


def class_tables(name: str, runs: list[dict[str, Any]]) -> list[str]:
    lines = [row([name, "NLL", "ECE", "accuracy", "NLL − naive's"]), "|---" + "|--:" * 4 + "|"]
    for choice in CHOICES["classes"]:
        _, apart = against(runs, choice, "naive", "nll")
        mean, error = mean_error(apart) if apart else (math.nan, math.nan)
        shown = "" if choice == "naive" else f"{mean:+.3f} ± {error:.3f}"
        lines.append(row([choice, *(cell(runs, choice, key) for key in ("nll", "ece", "accuracy")), shown]))
    return lines


def trouble(runs: list[dict[str, Any]]) -> list[str]:
    """What went wrong, for each choice that is tuned."""
    lines = [row(["choice", "runs", "failed", "not settled", "at a bound", "other warnings", "CPU s, median (most)"])]
    lines.append("|---" + "|--:" * 6 + "|")
    for choice in (*MAIN, "layerwise, tangent's noise"):
        found = [r[choice] for r in runs if choice in r]
        if not found:
            continue
        bounds = Counter(name for f in found for name in f.get("at_bound", ()))
        hit = sum(bool(f.get("at_bound")) for f in found)
        shown = f"{hit} ({', '.join(f'{k}: {v}' for k, v in sorted(bounds.items()))})" if hit else "0"
        others = [w for f in found for w in f.get("warnings", ()) if "bound" not in w and "without a mode" not in w]
        seconds = [f["seconds"] for f in found]
        lines.append(
            row(
                [
                    *(choice, len(found), sum("failed" in f for f in found)),
                    *(sum(not f.get("converged", True) for f in found), shown, len(others)),
                    f"{statistics.median(seconds):.2f} ({max(seconds):.1f})",
                ]
            )
        )
    return lines


def write(record: dict[str, Any]) -> None:
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")
    parts = []
    if "regression" in record:
        sets = record["regression"]
        every = [r for runs in sets.values() for r in runs]
        parts += [*regression_tables(sets), "", *trouble(every), ""]
    if "noise" in record:
        parts += [*noise_table(record["noise"]), ""]
    for name in SEEDS:
        if name in record:
            parts += [*class_tables(name, record[name]), "", *trouble(record[name]), ""]
    before, _, rest = PAGE.read_text().partition("<!-- tables -->\n")
    after = rest.partition("<!-- end of tables -->\n")[2]
    PAGE.write_text(f"{before}<!-- tables -->\n" + "\n".join(parts) + f"<!-- end of tables -->\n{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=SETS, help="of the regression sets")
    args = parser.parse_args()
    folder()
    torch.set_num_threads(1)
    record: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"experiment": "uci_evidence"}
    record |= {
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": versions("torch", "lapwing"),
    }
    taken = record.setdefault("cpu_seconds", {})
    for part in args.only:
        if part in ("regression", "noise"):
            one = {"regression": regression_run, "noise": noise_run}[part]
            first = {"regression": 0, "noise": SPLITS}[part]  # the noise was studied on splits 0 to 4; 5 to 9 are fresh
            for name in args.sets:
                if part == "noise" and name == "protein":  # which has five splits only
                    continue
                start = time.process_time()
                runs = [one(name, split) for split in range(first, first + SPLITS)]
                found = record.get(part, {}) | {name: runs}
                record[part] = {s: found[s] for s in SETS if s in found}
                taken[f"{part}: {name}"] = time.process_time() - start
                write(record)
                values = {c: cell(runs, c, "ll") for c in runs[0] if "ll" in (runs[0][c] if c in MAIN else {})}
                print(part, name, values, f"{taken[f'{part}: {name}']:.0f} s", flush=True)
        else:
            start, load = time.process_time(), {"digits": digits, "fashion": fashion}[part]
            record[part] = [class_run(load, seed) for seed in range(SEEDS[part])]
            taken[part] = time.process_time() - start
            write(record)
            print(
                part, {c: cell(record[part], c, "nll") for c in CHOICES["classes"]}, f"{taken[part]:.0f} s", flush=True
            )


if __name__ == "__main__":
    main()
