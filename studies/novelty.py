"""Which number of a prediction tells unknown inputs from known ones best: `pred.ood_score` against its rivals.

    LAPWING_DATA=... python studies/novelty.py

Known: Fashion-MNIST, 2,000 training images, two small CNNs (with batch norm, without), 1,000 test images. Unknown:
1,000 test images each of MNIST, KMNIST and notMNIST. Posteriors: kron and the last layer, softmax labels and
"dirichlet", each tuned at the trained weights. For each score the area under the ROC curve, .5 is chance.
Writes studies/results/novelty.json.
"""

from __future__ import annotations

import json
import os
import pathlib
import time

import numpy as np
import torch
from torch import Tensor, nn

import lapwing as lw

ROOT = pathlib.Path(__file__).parents[1]
UNKNOWN = {"MNIST": "mnist.npz", "KMNIST": "kmnist_test.npz", "notMNIST": "notmnist_test.npz"}
IMAGES, TRAIN, EPOCHS, SEED = 1_000, 2_000, 25, 0
STRUCTURES = {"kron": {"structure": "kron"}, "last layer": {"structure": "full", "subset": "last_layer"}}


def images(array: np.ndarray) -> Tensor:
    return torch.tensor(array[:, None] / 127.5 - 1, dtype=torch.float32)


def network(normalized: bool) -> nn.Module:
    torch.manual_seed(SEED)
    norms = [nn.BatchNorm2d(16), nn.BatchNorm2d(32)] if normalized else [nn.Identity(), nn.Identity()]
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, 2, 1), norms[0], nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, 2, 1), norms[1], nn.ReLU(), nn.Flatten()),
        *(nn.Linear(32 * 49, 32), nn.ReLU(), nn.Linear(32, 10)),
    )


def trained(net: nn.Module, x: Tensor, y: Tensor) -> nn.Module:
    optimizer = torch.optim.Adam(net.parameters(), 2e-3)
    for _ in range(EPOCHS):
        for some in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[some]), y[some]).backward()
            optimizer.step()
    return net.eval()


def scores(pred: lw.Prediction) -> dict[str, Tensor]:
    gap = pred.f_mean - pred.f_mean.mean(-1, keepdim=True)
    return {
        "ood_score": pred.ood_score,
        "ood_score / gap²": pred.ood_score / gap.square().sum(-1),
        "f_var, in sum": pred.f_var.sum(-1),
        "mutual information": pred.mutual_information,
        "entropy": pred.entropy,
        "1 − largest p": 1 - pred.probs.max(-1).values,
        "energy, −log Σ exp f": -torch.logsumexp(pred.f_mean, -1),
    }


def main() -> None:
    folder = pathlib.Path(os.environ["LAPWING_DATA"])
    torch.set_num_threads(1)
    start = time.process_time()
    fashion = np.load(folder / "fashion_mnist.npz")
    chosen = np.random.default_rng(SEED).permutation(60_000)[:TRAIN]
    x, y = images(fashion["x_train"][chosen]), torch.tensor(fashion["y_train"][chosen]).long()
    known, labels = images(fashion["x_test"][:IMAGES]), torch.tensor(fashion["y_test"][:IMAGES]).long()
    unknown = {name: images(np.load(folder / file)["x_test"][:IMAGES]) for name, file in UNKNOWN.items()}
    rows = []
    for normalized in (True, False):
        net = trained(network(normalized), x, y)
        for likelihood in ("categorical", "dirichlet"):
            for name, options in STRUCTURES.items():
                la = lw.laplace(net, (x, y), likelihood, **options).tuned(center="map")
                pred = la.predict(known)
                here, nll = scores(pred), float(-pred.log_prob(labels).mean())
                for other, inputs in unknown.items():
                    there = scores(la.predict(inputs))
                    found = {key: lw.metrics.auroc(here[key], there[key]) for key in here}
                    row = {"batch norm": normalized, "likelihood": likelihood, "structure": name, "unknown": other}
                    rows.append({**row, "nll": nll, **found})
                    print(*row.values(), *(f"{key} {value:.3f}" for key, value in found.items()), sep="  ", flush=True)
    means = {key: float(np.mean([row[key] for row in rows if row["structure"] == "kron"])) for key in here}
    print("mean over kron:", *(f"{key} {value:.3f}" for key, value in means.items()), sep="  ")
    record = {"seed": SEED, "torch": torch.__version__, "cpu_seconds": time.process_time() - start}
    (ROOT / "studies/results/novelty.json").write_text(json.dumps({**record, "kron": means, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
