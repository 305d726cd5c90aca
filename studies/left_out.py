"""Can the training data of a classifier say how sure it should be? Each example left out, in closed form.

    [LAPWING_DATA=<folder>] python studies/left_out.py [--sets digits80 ...] [--seeds 0 1]

Networks with two hidden layers of 32 ReLU units, with batch norm and without, trained in seven ways. A column is a way
to make probabilities of a network; only hindsight sees a test label.

    network         softmax f
    hindsight       softmax f/T, T by the test labels
    kron            "dirichlet", ε = .1, kron about f, λ by the evidence at the trained weights
    process         tangent kernel about a constant, ε = .01, λ by evidence: half about its own mean, half about f
    equal trace     the same, each parameter tensor's kernel at one trace, a factor on σ² by evidence
    left-out T      softmax f/T, T ≥ 1 by left-out logits
    pooled          softmax(a f + b m), (a, b) by left-out logits
    or network      the same where R² ≥ .7, else the network
    or equal trace  the same where R² ≥ .7, else "equal trace"

`_left_out.py` has the equations. The last four have a kernel that has seen no label: last features of 16 networks that
nobody has trained. n data, m new inputs, c classes, p parameters.
Writes `results/left_out.json` and the tables of `docs/studies/left_out.md`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import pathlib
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from _left_out import (
    Kernel,
    averaged,
    left_out_logits,
    left_out_nll,
    mixture,
    nll,
    normalized,
    pooled,
    processes,
    weights,
)
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

import lapwing as lw

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "benchmarks"))

from _common import machine, versions  # noqa: E402

cross_entropy = nn.functional.cross_entropy
RESULTS, PAGE = HERE / "results" / "left_out.json", HERE.parent / "docs" / "studies" / "left_out.md"
TRAINING = {"digits80": 80, "digits150": 150, "digits300": 300, "glass": 149, "vehicle": 300}  # examples
REGIMES = ("end", "L2", "AdamW", "early", "dropout", "smooth", "noisy")
COLUMNS = (
    "network",
    "hindsight",
    "kron",
    "process",
    "equal trace",
    "left-out T",
    "pooled",
    "or network",
    "or equal trace",
)
TEST, WIDTH, BATCH, STEPS, PATIENCE = 1000, 32, 32, 3000, 15
Augment = Callable[[Tensor, torch.Generator], Tensor]
GUARD = 0.7  # the least R²
CONCENTRATIONS = (0.003, 0.01, 0.03, 0.1, 0.3)

# -- data and networks ------------------------------------------------------------------------------------------------


def data(name: str, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Inputs and labels to train on and to test on; None where the folder has no such file."""
    n = TRAINING[name]
    if name.startswith("digits"):
        x, y = load_digits(return_X_y=True)
    else:
        path = pathlib.Path(os.environ.get("LAPWING_DATA", "")) / "uci_classification" / f"{name}.npz"
        if not path.is_file():
            return None
        stored = np.load(path)
        x, y = stored["X"].astype(float), np.unique(stored["y"], return_inverse=True)[1].reshape(-1)
    order = np.random.default_rng(1000 + seed).permutation(len(x))
    train, test = order[:n], order[n:][-TEST:]
    x = x / 8 - 1 if name.startswith("digits") else (x - x[train].mean(0)) / (x[train].std(0) + 1e-9)
    x, y = torch.tensor(x).float(), torch.tensor(y).long()
    return x[train], y[train], x[test], y[test]


def network(inputs: int, classes: int, norm: bool, dropout: bool = False) -> nn.Sequential:
    """Two hidden layers, with batch norm if asked."""
    layers: list[nn.Module] = []
    for width in (inputs, WIDTH):
        layers += [nn.Linear(width, WIDTH), *([nn.BatchNorm1d(WIDTH)] if norm else []), nn.ReLU()]
        layers += [nn.Dropout(0.3)] if dropout else []
    return nn.Sequential(*layers, nn.Linear(WIDTH, classes))


def spoiled(y: Tensor, classes: int, generator: torch.Generator) -> Tensor:
    """A fifth of the labels wrong."""
    other = (y + torch.randint(1, classes, y.shape, generator=generator)) % classes
    return torch.where(torch.rand(len(y), generator=generator) < 0.2, other, y)


def trained(
    x: Tensor, y: Tensor, classes: int, regime: str, norm: bool, seed: int, augment: Augment | None = None
) -> tuple[nn.Module, Tensor, Tensor]:
    """A network in eval mode, and the examples that it was trained on; all in float64."""
    generator = torch.Generator().manual_seed(seed)
    y = spoiled(y, classes, generator) if regime == "noisy" else y
    torch.manual_seed(seed)
    net = network(x.shape[1], classes, norm, regime == "dropout")
    net, x, y = fitted(net, x, y, regime, generator, augment=augment)
    return net.double(), x.double(), y


def fitted(
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    regime: str,
    generator: torch.Generator,
    steps: int = STEPS,
    augment: Augment | None = None,
) -> tuple[nn.Module, Tensor, Tensor]:
    """The network after that training, in eval mode, and the examples that it saw; augment: makes others of a batch's
    inputs at each step."""
    held = len(x) // 5 if regime == "early" else 0
    (x, y), (x_held, y_held) = (x[held:], y[held:]), (x[:held], y[:held])
    kind, decay = torch.optim.AdamW if regime == "AdamW" else torch.optim.Adam, {"L2": 0.003, "AdamW": 0.1}
    optimizer = kind(net.parameters(), lr=3e-3, weight_decay=decay.get(regime, 0.0))
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    best, state, since, step = math.inf, net.state_dict(), 0, 0
    while step < steps and since <= PATIENCE:
        for i in torch.randperm(len(x), generator=generator).split(BATCH):
            if len(i) >= 8:  # batch norm of fewer is noise
                optimizer.zero_grad()
                some = augment(x[i], generator) if augment else x[i]
                cross_entropy(net(some), y[i], label_smoothing=0.1 if regime == "smooth" else 0.0).backward()
                optimizer.step()
                step += 1
                if not held:
                    rate.step()
        if held:
            with torch.no_grad():
                loss = float(cross_entropy(net.eval()(x_held), y_held))
            net.train()
            since += 1
            if loss < best:
                best, since, state = loss, 0, {k: v.clone() for k, v in net.state_dict().items()}
    net.load_state_dict(state)  # where nothing is held out, the last
    return net.eval(), x, y


@torch.no_grad()
def label_free(x: Tensor, new: Tensor, classes: int, norm: bool, networks: int = 16) -> Kernel:
    """Last features of networks at their initialization, and a bias: half of the variance each."""
    both, rows, variance = torch.cat([x, new]), torch.zeros(()), torch.zeros(())
    for seed in range(networks):
        torch.manual_seed(9000 + seed)
        net = network(x.shape[1], classes, norm).double()
        for module in net:
            if isinstance(module, nn.BatchNorm1d):
                module.momentum = None  # statistics of all the data
        net(x)
        h = net.eval()[:-1](both)
        h = h / h[: len(x)].square().sum(1).mean().sqrt()
        rows, variance = rows + h @ h[: len(x)].mT + 1, variance + h.square().sum(1) + 1
    return normalized(rows[None], variance[None])


def jacobian(net: nn.Module, x: Tensor) -> list[Tensor]:
    """(n, c, p) of each parameter tensor."""
    weights, buffers = dict(net.named_parameters()), dict(net.named_buffers())
    weights = {name: w.detach() for name, w in weights.items()}

    def one(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(net, {**weights, **buffers}, (x[None],))[0]

    return [J.flatten(2) for J in vmap(jacrev(one), (None, 0), chunk_size=100)(weights, x).values()]


def tangents(net: nn.Module, x: Tensor, new: Tensor) -> tuple[Kernel, Kernel]:
    """One kernel a class of the trained network: as it is, and with all parameter tensors at one trace."""
    n, parts = len(x), []
    for J in jacobian(net, torch.cat([x, new])):
        J = J.transpose(0, 1)  # (c, n + m, p)
        parts.append((J @ J[:, :n].mT, J.square().sum(2)))
    equal = [(rows / scale, v / scale) for rows, v in parts for scale in [v[:, :n].mean().clamp_min(1e-20)]]
    plain, same = (normalized(sum(r for r, _ in some), sum(v for _, v in some)) for some in (parts, equal))
    return plain, same


# -- one network ------------------------------------------------------------------------------------------------------


def one(sets: tuple[Tensor, ...], regime: str, norm: bool, seed: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Probabilities of each column at the test inputs, and what else is to be known of a network."""
    x_all, y_all, new, y_new = sets
    classes, new = int(torch.cat([y_all, y_new]).max()) + 1, new.double()
    net, x, y = trained(x_all, y_all, classes, regime, norm, seed)
    with torch.no_grad():
        f, f_new = net(x), net(new)
    la = lw.laplace(net, (x, y), lw.likelihoods.Dirichlet(0.1), structure="kron").tuned(center="map")
    plain, same = tangents(net, x, new)
    own, equal = processes(plain, y, classes, 0.01)[0], processes(same, y, classes, 0.01)[1]
    free = label_free(x, new, classes, norm)
    partner = min((p for c in CONCENTRATIONS for p in processes(free, y, classes, c)), key=lambda p: left_out_nll(p, y))
    left, R2 = left_out_logits(free.train[0], f)
    T = 1 / weights([left], y, [(0.02, 10.0)])[0]
    hindsight = 1 / weights([f_new[:, None]], y_new, [(0.02, 10.0)])[0]
    made = {
        "network": f_new.softmax(1),
        "hindsight": (f_new / hindsight).softmax(1),
        "kron": la.predict(new).probs,
        "process": mixture(own, f_new),
        "equal trace": mixture(equal, f_new),
        "left-out T": (f_new / max(1.0, T)).softmax(1),
        "pooled": pooled(left, f_new, y, partner, max(1.0, T)),
    }
    made |= {f"or {other}": made["pooled" if R2 >= GUARD else other] for other in ("network", "equal trace")}
    fits = {"process": own, "equal trace": equal, "label-free": partner}
    loo = {
        name: (left_out_nll(fit, y), float(nll(averaged(fit.mean, fit.variance), y_new).mean()))
        for name, fit in fits.items()
    }
    return made, {"own mean, left out and test": loo, "T": T, "T in hindsight": hindsight, "R2": R2}


# -- the study --------------------------------------------------------------------------------------------------------


def pooled_row(found: list[tuple[dict[str, Tensor], Tensor]]) -> dict[str, Any]:
    """NLL and accuracy of each column over seeds, and whether they are worse than the network's by two standard errors
    of the paired difference."""

    def by(measure: Any) -> dict[str, Tensor]:
        return {c: torch.cat([measure(made[c], y) for made, y in found]) for c in COLUMNS}

    def worse(difference: Tensor) -> bool:
        return bool(difference.mean() > 2 * difference.std() / len(difference) ** 0.5)

    losses, hits = by(nll), by(lambda p, y: (p.argmax(1) == y).double())
    return {
        "nll": {c: float(v.mean()) for c, v in losses.items()},
        "accuracy": {c: float(v.mean()) for c, v in hits.items()},
        "above": {c: worse(v - losses["network"]) for c, v in losses.items()},
        "less accurate": {c: worse(hits["network"] - v) for c, v in hits.items()},
    }


def study(name: str, seeds: list[int]) -> list[dict[str, Any]]:
    """A row for each way to train, over seeds."""
    rows = []
    for regime in REGIMES:
        for norm in (True, False):
            found, networks = [], []
            for seed in seeds:
                sets = data(name, seed)
                assert sets is not None
                made, info = one(sets, regime, norm, seed)
                found.append((made, sets[3]))
                networks.append(info)
            row = {"set": name, "regime": regime, "batch norm": norm, **pooled_row(found), "networks": networks}
            cells = (f"{row['nll'][c]:.3f}{'*' if row['above'][c] else ' '}" for c in COLUMNS)
            print(f"{name:<10} {regime:<8} {'norm ' if norm else 'plain'}", *cells, flush=True)
            rows.append(row)
    return rows


def line(cells: Any) -> str:
    """Of a table."""
    return "| " + " | ".join(map(str, cells)) + " |"


def short(value: float, digits: int) -> str:
    """Without the zero before the point."""
    return ("−" if value < 0 else "") + f"{abs(value):.{digits}f}".removeprefix("0")


def tables(rows: list[dict[str, Any]]) -> list[str]:
    """Means over rows, by set and by regime; then how far leave-one-out is from the test labels."""

    def norm(row: dict[str, Any]) -> str:
        return "batch norm" if row["batch norm"] else "plain"

    def means(some: list[dict[str, Any]], what: str = "nll") -> list[str]:
        return [short(float(np.mean([r[what][c] for r in some])), 3) for c in COLUMNS]

    out = [line(("networks", *COLUMNS)), "|---" + "|--:" * len(COLUMNS) + "|"]
    for key in (lambda r: f"{r['set']}, {norm(r)}", lambda r: f"*{r['regime']}*"):
        for name in dict.fromkeys(map(key, rows)):
            out.append(line((name, *means([r for r in rows if key(r) == name]))))
    out.append(line((f"**mean of {len(rows)} rows**", *means(rows))))
    out.append(line(("accuracy", *means(rows, "accuracy"))))
    for what in ("above", "less accurate"):
        out.append(line((f"rows {what}", *(sum(r[what][c] for r in rows) for c in COLUMNS))))
    return [*out, "", *leaks(rows, norm)]


def leaks(rows: list[dict[str, Any]], norm: Any) -> list[str]:
    """Left-out NLL beside that of the test labels, and left-out temperatures beside those in hindsight. The former
    without networks of wrong labels: test labels are right, and the two would not compare."""
    head = ("networks", "process: left out", "test", "equal trace: left out", "test", "label-free: left out", "test")
    out = [line((*head, "correlation of log T", "mean log T − log T in hindsight", "R² < .7"))]
    out.append("|---" + "|--:" * 9 + "|")
    for kind in ("batch norm", "plain"):
        some = [n for r in rows if norm(r) == kind for n in r["networks"]]
        clean = [n for r in rows if norm(r) == kind and r["regime"] != "noisy" for n in r["networks"]]
        pairs = np.mean([list(n["own mean, left out and test"].values()) for n in clean], 0)
        T, best = (np.log([n[k] for n in some]) for k in ("T", "T in hindsight"))
        figures = (*pairs.reshape(-1), np.corrcoef(T, best)[0, 1], (T - best).mean())
        cells = (short(float(v), 2) for v in figures)
        out.append(line((f"{len(some)}, {kind}", *cells, sum(n["R2"] < GUARD for n in some))))
    return out


def write(record: dict[str, Any]) -> None:
    """The record, and its tables in the page."""
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")
    before, _, rest = PAGE.read_text().partition("<!-- tables -->\n")
    after = rest.partition("<!-- end of tables -->\n")[2]
    text = "\n".join([*tables(record["rows"]), ""])
    PAGE.write_text(f"{before}<!-- tables -->\n{text}<!-- end of tables -->\n{after}")
    print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", choices=tuple(TRAINING), default=tuple(TRAINING))
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1))
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", lw.errors.LapwingWarning)  # of tuning at the trained weights, which is meant
    there = [name for name in args.sets if data(name, 0) is not None]
    for name in set(args.sets) - set(there):
        print(f"skipped: no uci_classification/{name}.npz in the folder of LAPWING_DATA; see studies/README.md")
    record = {"date": datetime.date.today().isoformat(), "machine": machine(), "versions": versions("torch", "lapwing")}
    print("NLL; * above the network by two standard errors:", ", ".join(COLUMNS))
    rows = [row for name in there for row in study(name, args.seeds)]
    write({**record, "seeds": list(args.seeds), "cpu_seconds": round(time.process_time()), "rows": rows})


if __name__ == "__main__":
    main()
