"""Labels together: a small convolutional network on 3,000 images of Fashion-MNIST, 960 others to test.

Joint log-likelihoods are by dyadic sampling, κ = 1 … 5 anchors and τ = 1, then 10(κ − 1) labels, the same sets for all
methods. Sets are drawn within pieces of 60 test images, whose joint covariance is small, 20 times of each.
"""

from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.metrics.inputs import DRAWS
from lapwing.metrics.joint import log_probs_of, sets_of, together

TRAIN, TEST, PIECE, REPEATS = 3_000, 960, 60, 20
MEMBERS, RATE, DECAY = 5, 2e-3, 1e-4
EPOCHS = (5, 10, 20)  # tried on the seed of choices
KAPPAS = (1, 2, 3, 4, 5)
NAME = "fashion"
Data = tuple[Tensor, Tensor]


def data(seed: int) -> tuple[Data, Data]:
    folder = os.environ.get("LAPWING_DATA")
    if folder is None or not (file := pathlib.Path(folder) / "fashion_mnist.npz").is_file():
        raise SystemExit("this part reads fashion_mnist.npz from the folder that LAPWING_DATA names")
    stored, rng = np.load(file), np.random.default_rng(seed)
    parts = []
    for part, n in (("train", TRAIN), ("test", TEST)):
        rows = rng.permutation(len(stored[f"y_{part}"]))[:n]
        x = torch.tensor(stored[f"x_{part}"][rows][:, None] / 127.5 - 1, dtype=torch.float32)
        parts.append((x, torch.tensor(stored[f"y_{part}"][rows]).long()))
    return parts[0], parts[1]


def network(train: Data, epochs: int, seed: int) -> nn.Module:
    """Trained as usual: Adam with weight decay, batches of 64, a rate that falls to 0."""
    torch.manual_seed(seed)
    net = nn.Sequential(
        *(nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(16 * 49, 20), nn.ReLU(), nn.Linear(20, 10)),
    )
    (x, y), g = train, torch.Generator().manual_seed(seed)
    adam = torch.optim.Adam(net.parameters(), RATE, weight_decay=DECAY)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(adam, epochs)
    for _ in range(epochs):
        for some in torch.randperm(len(x), generator=g).split(64):
            adam.zero_grad()
            nn.functional.cross_entropy(net(x[some]), y[some]).backward()
            adam.step()
        falling.step()
    return net.eval()


def scored(fit: Any, test: Data) -> dict[str, float]:
    """Joint log-likelihoods, with what is asked of each input by itself."""
    x, y = test
    sets: dict[int, list[Tensor]] = {kappa: [] for kappa in KAPPAS}
    probs = []
    for piece, labels in zip(x.split(PIECE), y.split(PIECE), strict=True):
        pred = fit.predict(piece, joint=True)
        probs.append(pred.probs)
        known = log_probs_of(pred, labels, DRAWS, torch.Generator().manual_seed(0))
        for kappa in KAPPAS:
            for k in range(REPEATS):
                g = torch.Generator().manual_seed(k)
                sets[kappa].append(together(*known, *sets_of(len(labels), kappa, None, g)))
    p = torch.cat(probs)
    found = {name: getattr(lw.metrics, name)(p, y) for name in ("accuracy", "nll", "ece")}
    return {**found, **{f"joint {kappa}": float(torch.cat(some).mean()) for kappa, some in sets.items()}}


def kron(net: nn.Module, train: Data) -> lw.Laplace:
    return lw.laplace(net, train, "categorical", structure="kron").tuned(center="map")


def last_layer(net: nn.Module, train: Data) -> lw.Laplace:
    la = lw.laplace(net, train, "categorical", structure="full", subset="last_layer")
    return la.tuned(center="map")


POSTERIORS: dict[str, Callable[[list[nn.Module], Data], Any]] = {
    "the network": lambda nets, train: lw.ensembles.deep(nets[:1], "categorical"),
    "ensemble of 5": lambda nets, train: lw.ensembles.deep(nets, "categorical"),
    "Laplace, kron, prior by evidence": lambda nets, train: kron(nets[0], train),
    "Laplace, last layer, prior by evidence": lambda nets, train: last_layer(nets[0], train),
    "Laplace, “classification”, tuned": lambda nets, train: lw.laplace(
        nets[0], train, "classification", structure="kron"
    ).tuned(),
    "5 Laplaces, kron, prior by evidence": lambda nets, train: lw.mixture([kron(one, train) for one in nets]),
}


def joint(choice: int, seeds: list[int], stored: Callable[[], dict[str, Any]], keep: Callable[..., None]) -> None:
    """Lines of what is not there yet."""
    for epochs in EPOCHS:
        key = f"{NAME}/{choice}/the network/{epochs}"
        if key not in stored():
            start = time.process_time()
            train, test = data(choice)
            one = lw.ensembles.deep([network(train, epochs, choice)], "categorical")
            about = {"case": NAME, "seed": choice, "method": "the network", "setting": epochs}
            row = scored(one, test)
            keep(key, {**about, "row": row, "cpu": round(time.process_time() - start, 1)})
    tried = [one for one in stored().values() if (one["case"], one["seed"]) == (NAME, choice)]
    best = min(tried, key=lambda one: one["row"]["nll"])["setting"]
    for seed in seeds:
        one_seed(seed, best, stored, keep)


def one_seed(seed: int, epochs: int, stored: Callable[[], dict[str, Any]], keep: Callable[..., None]) -> None:
    """All methods on networks of their own."""
    todo = {name: make for name, make in POSTERIORS.items() if f"{NAME}/{seed}/{name}" not in stored()}
    if not todo:
        return
    train, test = data(seed)
    nets = [network(train, epochs, 100 * seed + k) for k in range(MEMBERS)]
    for name, make in todo.items():
        start = time.process_time()
        row = scored(make(nets, train), test)
        about = {"case": NAME, "seed": seed, "method": name, "setting": epochs}
        keep(f"{NAME}/{seed}/{name}", {**about, "row": row, "cpu": round(time.process_time() - start, 1)})
