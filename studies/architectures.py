"""Does the evidence rank architectures as test data do? MLPs of several widths and depths and CNNs on Fashion-MNIST.

    LAPWING_DATA=<folder> python studies/architectures.py [--images 60000 2000] [--seeds 0 1]

Each network is trained on training images alone, by Adam with a rate that falls to 0, with its precisions (one a layer)
learnt on the way by `lw.OnlineEvidence`. The log evidence is then taken by a Kronecker-factored Laplace approximation
with the exact factor, tuned at the trained weights: no network here is normalized, and training ends near a mode.
`lw.compare` puts the evidences side by side, with the NLL of Laplace's prediction on the 10,000 test images; beside it
the NLL of the trained network, and Spearman's rank correlation of log evidence and −NLL over the architectures. On all
images, the conditional evidence log p(D | D') = log Z(D) − log Z(D') too, D' the first 20,000 of D, each Z by its own
training. And the evidence with the log-determinant of the true curvature, by Lanczos quadrature, at the precisions that
the Kronecker-factored one chose.
Writes `results/architectures.json`, `docs/studies/figures/architectures.png` and the tables of
`docs/studies/architectures.md`.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import os
import pathlib
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "benchmarks"))

from _common import machine, versions  # noqa: E402

import lapwing as lw  # noqa: E402
from lapwing.curvature.products import gauss_newton  # noqa: E402
from lapwing.operators import linalg  # noqa: E402
from lapwing.solvers.lanczos import Lanczos  # noqa: E402

BATCH, RATE, UPDATES, RESAMPLED = 100, 1e-3, 5, 2_000
EPOCHS = {60_000: 10, 2_000: 60}  # by the convergence of the evidence on a seed of its own; see the page
WHOLE, FIRST, FIRST_EPOCHS = 60_000, 20_000, 30  # images to condition on; in as many steps as all of them take
PROBES, SETTLED = 2, 0.001  # of the log-determinant of the true curvature; nats an image in the last quarter of steps
RESULTS, PAGE = HERE / "results" / "architectures.json", HERE.parent / "docs" / "studies" / "architectures.md"
FIGURE = HERE.parent / "docs" / "studies" / "figures" / "architectures.png"
Data = tuple[Tensor, Tensor]
Runs = dict[str, list[dict[str, Any]]]  # of each network, one a seed
LABELS = {
    "log_evidence": "log evidence",
    "log_evidence_true": "log evidence, true curvature",
    "log_evidence_conditional": "conditional evidence",
    "fit": "training fit",
    "parameters": "most parameters",
}
RIGHT = 5, 4  # of names in the figure, in points from the dot
PLACES = {  # where that would lie on another, with all images
    "log_evidence": {"MLP 20-20": (-5, -9)},
    "log_evidence_true": {
        "MLP 20": (6, 4),
        "MLP 20-20": (-6, -9),
        "MLP 20-20-20-20": (-6, 2),
        "MLP 100": (6, 4),
        "MLP 100-100": (-6, -9),
        "MLP 100-100-100-100": (-6, 2),
    },
    "log_evidence_conditional": {
        "MLP 20-20-20-20": (-6, 2),
        "MLP 20-20": (-6, -8),
        "MLP 100-100-100-100": (-6, 2),
        "MLP 100-100": (-6, -9),
        "linear": (-6, -9),
    },
}


# -- networks ----------------------------------------------------------------------------------------------------


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Flatten()]
    for i, o in zip((784, *widths), widths, strict=False):
        layers += [nn.Linear(i, o), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear((784, *widths)[-1], 10))


def cnn(*channels: int) -> nn.Sequential:
    """Convolutions of stride 2, then one linear layer."""
    layers: list[nn.Module] = []
    size = 28
    for i, o in zip((1, *channels), channels, strict=False):
        layers += [nn.Conv2d(i, o, 3, 2, 1), nn.ReLU()]
        size = (size + 1) // 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels[-1] * size**2, 10))


NETWORKS: dict[str, Callable[[], nn.Sequential]] = {
    "linear": lambda: mlp(),
    "MLP 5": lambda: mlp(5),
    "MLP 20": lambda: mlp(20),
    "MLP 100": lambda: mlp(100),
    "MLP 20-20": lambda: mlp(20, 20),
    "MLP 100-100": lambda: mlp(100, 100),
    "MLP 20-20-20-20": lambda: mlp(20, 20, 20, 20),
    "MLP 100-100-100-100": lambda: mlp(100, 100, 100, 100),
    "CNN 4": lambda: cnn(4),
    "CNN 16": lambda: cnn(16),
    "CNN 8-8": lambda: cnn(8, 8),
    "CNN 16-32": lambda: cnn(16, 32),
}


# -- one network -------------------------------------------------------------------------------------------------


def images(count: int, seed: int) -> tuple[Data, Data]:
    """`count` training images, drawn by the seed, and all test images."""
    folder = os.environ.get("LAPWING_DATA")
    if folder is None or not pathlib.Path(folder, "fashion_mnist.npz").is_file():
        raise SystemExit(
            f"skipped: no fashion_mnist.npz in the folder of LAPWING_DATA, {folder!r}; see studies/README.md"
        )
    stored = np.load(pathlib.Path(folder, "fashion_mnist.npz"))
    index = np.random.default_rng(seed).permutation(len(stored["y_train"]))[:count]

    def part(x: Any, y: Any) -> Data:
        x = torch.from_numpy(x).float().reshape(-1, 1, 28, 28) / 255
        return (x - 0.286) / 0.353, torch.from_numpy(y).long().reshape(-1)  # the set's mean and standard deviation

    return part(stored["x_train"][index], stored["y_train"][index]), part(stored["x_test"], stored["y_test"])


def fitted(make: Callable[[], nn.Sequential], data: Data, epochs: int, seed: int) -> tuple[Any, dict[str, Any]]:
    """The network trained by evidence, as a tuned Laplace object, and how that went."""
    start = time.process_time()
    torch.manual_seed(seed)
    net, loader, every = make(), DataLoader(TensorDataset(*data), 500), epochs // UPDATES
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        factor = lw.curvature.Factor("monte_carlo", 1)
        online = lw.OnlineEvidence(net, loader, "categorical", every=every, burn_in=every, factor=factor)
        optimizer = torch.optim.Adam(net.parameters(), lr=RATE)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
        for _ in range(epochs):
            for index in torch.randperm(len(data[1])).split(BATCH):
                optimizer.zero_grad()
                online.loss(net(data[0][index]), data[1][index]).backward()
                optimizer.step()
            schedule.step()
            online.step()
        la = lw.laplace(net.eval(), loader, "categorical", structure="kron", factor="exact", prior="layerwise")
        la = la.tuned(center="map")
    assert la.tuning is not None
    return la, {
        "evidence_a_step": [record.log_evidence / len(data[1]) for record in online.history],
        "precision": la.prior.precision.reshape(-1).tolist(),
        "converged": la.tuning.converged,
        "at_bound": list(la.tuning.at_bound),
        "warnings": [str(w.message) for w in caught],
        "cpu_seconds": time.process_time() - start,
    }


def excess(la: Any, data: Data) -> tuple[float, float]:
    """½ (log|Ĝ + A| − log|G + A|), G the true curvature, Ĝ the structure's: by how much the log evidence is too low. A
    mean over probes, and how far they are from it."""
    precision, a = la.posterior.precision, la.prior.operator()
    batches = list(zip(*(t.split(1_000) for t in data), strict=True))

    def step(v: Tensor) -> Tensor:
        product = gauss_newton(la.tangent, la.likelihood, batches, v) + linalg.mv(a, v)
        return linalg.solve(precision, product)

    starts = linalg.draw(precision, PROBES, torch.Generator().manual_seed(0))
    run, means = Lanczos.start(step, starts, lambda v: linalg.mv(precision, v)), [math.inf]
    while len(means) < 12 or abs(means[-1] - means[-len(means) // 4]) > SETTLED * len(data[1]):
        run.step()
        each = starts.shape[-1] * run.quadrature(lambda values: -0.5 * values.log())
        means.append(float(each.mean()))
    return means[-1], float(each.std() / PROBES**0.5)


def scored(net: Callable[[Tensor], Tensor], test: Data) -> tuple[Tensor, dict[str, float]]:
    """−log p(y) of each test image by the trained network, and its accuracy."""
    with torch.no_grad():
        f = torch.cat([net(x) for x in test[0].split(500)]).double()
    each = nn.functional.cross_entropy(f, test[1], reduction="none")
    return each, {"nll": float(each.mean()), "accuracy": float((f.argmax(-1) == test[1]).double().mean())}


# -- ranks -------------------------------------------------------------------------------------------------------


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Correlation of ranks (no ties among these)."""
    ranks = [np.argsort(np.argsort(np.asarray(values))) for values in (a, b)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def mean(runs: list[dict[str, Any]], key: str) -> float:
    return statistics.fmean(float(r[key]) for r in runs)


def measured(found: Runs) -> list[str]:
    """What could rank the networks of `found`, evidences first."""
    return [by for by in LABELS if all(by in r for runs in found.values() for r in runs)]


def correlations(found: Runs) -> dict[str, Any]:
    """Spearman's correlations with −NLL of what could rank the networks of `found`."""
    seeds = range(len(next(iter(found.values()))))
    out: dict[str, Any] = {}
    for key in ("nll", "nll_laplace"):
        worth = [-mean(runs, key) for runs in found.values()]
        out[key] = {by: spearman([mean(runs, by) for runs in found.values()], worth) for by in measured(found)}
        out[key]["each seed"] = {
            by: [spearman([r[s][by] for r in found.values()], [-r[s][key] for r in found.values()]) for s in seeds]
            for by in measured(found)
        }
    return out


def intervals(found: Runs, each: dict[str, list[Tensor]]) -> dict[str, list[float]]:
    """5 and 95 % of Spearman's correlations with −NLL when test images are drawn anew: how much of the order is
    the test set's noise."""
    nll = torch.stack([torch.stack(each[name]).mean(0) for name in found]).numpy()  # (network, image)
    draws = np.random.default_rng(0).multinomial(nll.shape[1], np.full(nll.shape[1], 1 / nll.shape[1]), RESAMPLED)
    means = -(nll @ draws.T) / nll.shape[1]
    out = {}
    for by in measured(found):
        values = [mean(runs, by) for runs in found.values()]
        out[by] = np.quantile([spearman(values, m) for m in means.T], (0.05, 0.95)).tolist()
    return out


# -- the page ----------------------------------------------------------------------------------------------------


def size(record: dict[str, Any], by: str) -> int:
    """How many images the evidence is of."""
    return int(record["images"]) - (FIRST if by == "log_evidence_conditional" else 0)


def shown(runs: list[dict[str, Any]], key: str, scale: float = 1.0) -> str:
    if len(runs) == 1:
        return f"{mean(runs, key) / scale:.3f}"
    error = statistics.stdev(float(r[key]) for r in runs) / math.sqrt(len(runs))
    return f"{mean(runs, key) / scale:.3f} ± {error / scale:.3f}"


def table(record: dict[str, Any]) -> list[str]:
    found: Runs = record["networks"]
    n, c = record["images"], record["spearman"]
    evidences = [by for by in measured(found) if by.startswith("log_evidence")]
    order = sorted(found, key=lambda name: mean(found[name], "nll"))
    heads = {"log_evidence": "log evidence / N", "log_evidence_true": "true curvature"}
    heads |= {"log_evidence_conditional": f"conditional / {n - FIRST:,}"}
    head = ["network", "parameters", *(heads[by] for by in evidences), "fit / N"]
    head += ["effective dimension", "test NLL", "rank", "test NLL, Laplace", "accuracy"]
    lines = [f"**{n:,} training images, {record['epochs']} epochs, seeds {record['seeds']}**", ""]
    lines += ["| " + " | ".join(head) + " |", "|---" + "|--:" * (len(head) - 1) + "|"]
    for name, runs in sorted(found.items(), key=lambda item: -mean(item[1], "log_evidence")):
        cells = [name, f"{runs[0]['parameters']:,}"]
        cells += [shown(runs, key, size(record, key)) for key in (*evidences, "fit")]
        cells += [f"{mean(runs, 'effective_dimension'):.0f}", shown(runs, "nll"), str(order.index(name) + 1)]
        lines.append("| " + " | ".join([*cells, shown(runs, "nll_laplace"), shown(runs, "accuracy")]) + " |")
    head = ["Spearman's correlation with −NLL of", "the network", "Laplace", "the network, MLPs alone"]
    head += ["the network, seed by seed", "90 % over test images"]
    lines += ["", "| " + " | ".join(head) + " |", "|---" + "|--:" * (len(head) - 1) + "|"]
    for by in measured(found):
        values = [c["all"]["nll"][by], c["all"]["nll_laplace"][by], c["MLPs"]["nll"][by]]
        cells = [LABELS[by], *(f"{v:.2f}" for v in values)]
        cells.append(", ".join(f"{v:.2f}" for v in c["all"]["nll"]["each seed"][by]))
        cells.append(" to ".join(f"{v:.2f}" for v in c["intervals"].get(by, ())))
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, "", f"CPU time {record['cpu_seconds'] / 60:.1f} minutes."]


def draw(records: dict[str, dict[str, Any]]) -> None:
    from matplotlib.figure import Figure

    kinds = ("log_evidence", "log_evidence_true", "log_evidence_conditional")
    figure = Figure(figsize=(5.6 * len(kinds), 4.6 * len(records)), layout="constrained")
    grid = figure.subplots(len(records), len(kinds), squeeze=False)
    for axis, (record, by) in zip(grid.flat, itertools.product(records.values(), kinds), strict=True):
        if by not in measured(record["networks"]):
            axis.axis("off")
            continue
        for name, runs in record["networks"].items():
            color = "#D55E00" if name.startswith("CNN") else "#0072B2"
            x, y = [r[by] / size(record, by) for r in runs], [r["nll"] for r in runs]
            axis.plot(x, y, "-", color=color, lw=0.8)
            axis.plot(x, y, ".", color=color, ms=4)
            axis.plot(statistics.fmean(x), statistics.fmean(y), "o", color=color)
            place, shift = (
                (statistics.fmean(x), statistics.fmean(y)),
                PLACES[by].get(name, RIGHT) if record["images"] == WHOLE else RIGHT,
            )
            side = "right" if shift[0] < 0 else "left"
            axis.annotate(name, place, xytext=shift, textcoords="offset points", fontsize=7, ha=side)
        title, label = f"{record['images']:,} training images", f"{LABELS[by]}, a training image (nats)"
        if by == "log_evidence_conditional":
            title, label = f"{title}, given {FIRST:,} of them", "conditional evidence an added image (nats)"
            low, high = axis.get_ylim()
            axis.plot([-low, -high], [low, high], "--", color="0.6", lw=0.8, zorder=0, scaley=False)
            axis.annotate("   NLL = −evidence", (-(low + high) / 2, (low + high) / 2), fontsize=7, color="0.4")
        axis.set(xlabel=label, ylabel="test NLL of the network (nats)")
        axis.set_title(f"{title}: Spearman {record['spearman']['all']['nll'][by]:.2f}", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(FIGURE, dpi=140, facecolor="white")


def write(record: dict[str, Any]) -> None:
    """Put a record among those that are there, and the tables and the figure after it."""
    records = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    records[str(record["images"])] = record
    records = dict(sorted(records.items(), key=lambda item: -int(item[0])))
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(records, indent=1) + "\n")
    before, _, rest = PAGE.read_text().partition("<!-- tables -->\n")
    after = rest.partition("<!-- end of tables -->\n")[2]
    text = "\n\n".join("\n".join(table(r)) for r in records.values())
    PAGE.write_text(f"{before}<!-- tables -->\n{text}\n<!-- end of tables -->\n{after}")
    draw(records)


# -- all of them -------------------------------------------------------------------------------------------------


def run(count: int, seeds: list[int]) -> dict[str, Any]:
    """All networks on `count` images."""
    start = time.process_time()
    found: Runs = {name: [] for name in NETWORKS}
    each: dict[str, list[Tensor]] = {name: [] for name in NETWORKS}
    for seed in seeds:
        train, test = images(count, seed)
        models, notes = {}, {}
        for name, make in NETWORKS.items():
            models[name], notes[name] = fitted(make, train, EPOCHS[count], seed)
            value, seconds = float(models[name].log_evidence()) / count, notes[name]["cpu_seconds"]
            if count == WHOLE:
                first, more = fitted(make, (train[0][:FIRST], train[1][:FIRST]), FIRST_EPOCHS, seed)
                terms = first.decompose()
                more |= {key: float(getattr(terms, key)) for key in ("log_evidence", "fit", "quadratic", "occam")}
                more |= {"effective_dimension": float(first.effective_dimension().sum())}
                notes[name] |= {"first": more, "log_evidence_conditional": value * count - more["log_evidence"]}
            off, error = excess(models[name], train)
            notes[name] |= {"log_evidence_true": value * count + off, "excess_error": error}
            print(f"{count} {seed} {name:<20} log evidence {value:.4f} an image, {seconds:.0f} s", flush=True)
        comparison = lw.compare(models, DataLoader(TensorDataset(*test), 500))
        print(comparison, flush=True)
        for name, row in comparison.to_dict().items():
            losses, scores = scored(models[name].tangent, test)
            each[name].append(losses)
            found[name].append({**row, "nll_laplace": row["nll"], **scores, **notes[name]})
    mlps = {name: runs for name, runs in found.items() if not name.startswith("CNN")}
    ranks = {"all": correlations(found), "MLPs": correlations(mlps), "intervals": intervals(found, each)}
    record = {"experiment": "architectures", "date": datetime.date.today().isoformat(), "images": count, "seeds": seeds}
    record |= {"epochs": EPOCHS[count], "machine": machine(), "versions": versions("torch", "lapwing")}
    return record | {"networks": found, "spearman": ranks, "cpu_seconds": time.process_time() - start}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, nargs="+", default=[*EPOCHS], choices=[*EPOCHS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    args = parser.parse_args()
    torch.set_num_threads(1)
    for count in args.images:
        record = run(count, args.seeds)
        write(record)
        print(record["spearman"], flush=True)


if __name__ == "__main__":
    main()
