"""Labels together: a small convolutional network on 5,000 images of Fashion-MNIST, 1,000 others to test.

Joint log-likelihoods are by dyadic sampling, κ = 1 … 5 anchors and τ = 1, then 10(κ − 1) labels, the same sets for all
methods. Sets are drawn within pieces of 100 test images, whose joint covariance fits in memory, and 20 times of each.
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

TRAIN, TEST, PIECE, REPEATS = 5_000, 1_000, 100, 20
MEMBERS, RATE, DECAY = 5, 2e-3, 1e-4
EPOCHS = (5, 10, 20, 40)  # tried on the seed of choices
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


def scored(predict: Callable[[Tensor], lw.Prediction], test: Data) -> dict[str, float]:
    """Joint log-likelihoods, with what is asked of each input by itself."""
    x, y = test
    sums, probs = dict.fromkeys(KAPPAS, 0.0), []
    for piece, labels in zip(x.split(PIECE), y.split(PIECE), strict=True):
        pred = predict(piece)
        probs.append(pred.probs)
        for kappa in KAPPAS:
            for k in range(REPEATS if kappa > 1 else 1):
                g = torch.Generator().manual_seed(k)
                sums[kappa] += lw.metrics.joint_log_likelihood(pred, labels, kappa, generator=g) / (
                    len(x) // PIECE * (REPEATS if kappa > 1 else 1)
                )
    p = torch.cat(probs)
    found = {name: getattr(lw.metrics, name)(p, y) for name in ("accuracy", "nll", "ece")}
    return {**found, **{f"joint {kappa}": value for kappa, value in sums.items()}}


def posteriors(nets: list[nn.Module], train: Data) -> dict[str, Callable[[], Any]]:
    """Each made when it is asked for."""
    word, net = "categorical", nets[0]
    return {
        "the network": lambda: lw.ensembles.deep(nets[:1], word),
        "ensemble of 5": lambda: lw.ensembles.deep(nets, word),
        "Laplace, kron, prior by evidence": lambda: lw.laplace(net, train, word, structure="kron").tuned(center="map"),
        "Laplace, last layer, prior by evidence": lambda: lw.laplace(
            net, train, word, structure="full", subset="last_layer"
        ).tuned(center="map"),
        "Laplace, “classification”, tuned": lambda: lw.laplace(net, train, "classification").tuned(),
        "5 Laplaces, kron, prior by evidence": lambda: lw.mixture(
            [lw.laplace(one, train, word, structure="kron").tuned(center="map") for one in nets]
        ),
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
            row = scored(lambda x, fit=one: fit.predict(x, joint=True), test)
            keep(key, {**about, "row": row, "cpu": round(time.process_time() - start, 1)})
    tried = [one for one in stored().values() if (one["case"], one["seed"]) == (NAME, choice)]
    best = min(tried, key=lambda one: one["row"]["nll"])["setting"]
    for seed in seeds:
        one_seed(seed, best, stored, keep)


def one_seed(seed: int, epochs: int, stored: Callable[[], dict[str, Any]], keep: Callable[..., None]) -> None:
    """All methods on networks of their own."""
    train, test = data(seed)
    nets: list[nn.Module] = []
    made = posteriors(nets, train)
    if all(f"{NAME}/{seed}/{name}" in stored() for name in made):
        return
    nets += [network(train, epochs, 100 * seed + k) for k in range(MEMBERS)]
    for name, make in posteriors(nets, train).items():
        key, start = f"{NAME}/{seed}/{name}", time.process_time()
        if key in stored():
            continue
        fit = make()
        row = scored(lambda x, fit=fit: fit.predict(x, joint=True), test)
        about = {"case": NAME, "seed": seed, "method": name, "setting": epochs}
        keep(key, {**about, "row": row, "cpu": round(time.process_time() - start, 1)})
