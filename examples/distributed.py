"""One posterior over several processes, each with its shard of the data.

    torchrun --nproc-per-node 2 examples/distributed.py fit
    torchrun --nproc-per-node 2 examples/distributed.py tune
    LAPWING_DATA=<folder> torchrun --nproc-per-node 2 examples/distributed.py cifar10 --images 128 --samples 4

`fit` and `tune` train a small network on scikit-learn's digits; `cifar10` takes samples of the posterior of a trained
ResNet-20 by conjugate gradients, without a matrix. Without torchrun the script is one process, and does the same.
"""

from __future__ import annotations

import argparse
import datetime
import os
import pathlib
import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import lapwing as lw

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "studies"))


def loader(x: Tensor, y: Tensor) -> DataLoader:
    """This rank's shard: every world_size-th example. Shards need not be of one size; no example is repeated."""
    data = TensorDataset(x, y)
    return DataLoader(Subset(data, range(dist.get_rank(), len(data), dist.get_world_size())), batch_size=32)


def trained(x: Tensor, y: Tensor) -> nn.Module:
    """A network that rank 0 trains and the others are given: a posterior is about one set of weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    if dist.get_rank() == 0:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=1e-4)
        for _ in range(100):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    for p in model.parameters():
        dist.broadcast(p.data, 0)
    return nn.parallel.DistributedDataParallel(model)


def digits(tune: bool) -> None:
    from sklearn.datasets import load_digits

    stored = load_digits()
    x, y = torch.tensor(stored.data / 16).float(), torch.tensor(stored.target).long()
    train, test = slice(0, 1200), slice(1200, None)
    model = trained(x[train], y[train])
    la = lw.laplace(model, loader(x[train], y[train]), "categorical", structure="kron", process_group="world")
    la = la.tuned() if tune else la
    pred = la.predict(x[test])
    say(la)
    say(f"log evidence {float(la.log_evidence()):.4f}, held-out NLL {-float(pred.log_prob(y[test]).mean()):.4f}")
    if dist.get_rank() == 0:
        pathlib.Path("out").mkdir(exist_ok=True)
        la.save("out/digits.lapwing.safetensors")  # the same on every rank: one of them writes it


def cifar10(images: int, samples: int) -> None:
    from _networks import data, resnet, train_file  # what the studies share
    from _networks import images as read

    x, y = read(train_file(), slice(0, images))
    structure = lw.curvature.MatrixFree(samples=samples, tolerance=0.05)
    start = time.perf_counter()
    la = lw.laplace(resnet(20), loader(x, y), "categorical", structure=structure, prior=1000.0, process_group="world")
    say(la.solve)  # each rank for its share of the samples, which it then pushes to the same inputs as the others
    x_test, y_test = read(data("cifar10/cifar10_test.npz"), slice(0, 100))
    pred = la.predict(x_test)
    say(la)
    say(f"NLL of 100 test images {-float(pred.log_prob(y_test).mean()):.4f}; {time.perf_counter() - start:.0f} s")


def say(what: object) -> None:
    if dist.get_rank() == 0:
        print(what, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["fit", "tune", "cifar10"])
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--samples", type=int, default=4)
    args = parser.parse_args()
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        os.environ.setdefault(name, value)  # what torchrun sets
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=10))
    try:
        cifar10(args.images, args.samples) if args.what == "cifar10" else digits(args.what == "tune")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
