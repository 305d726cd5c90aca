"""Structured curvature against gradients, forward passes and laplace-torch 0.3, in one run.

    python benchmarks/structured.py [--skip-peer] [--repeat 3] [--only cnn mlp memory resnet growth]

Units: a *gradient epoch* is one forward and backward pass over the same loader, a *forward* one forward pass over the
same inputs. Everything lazy is touched: a fit ends with its evidence, a prediction with its covariances.
The ResNet part reads the weights and images that the environment variable LAPWING_DATA points to, and is skipped
without them.
"""

from __future__ import annotations

import argparse
import functools
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from _common import Bar, best, clock, least, peak_memory, table, write
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw
from lapwing.curvature import Factor

SEED, BATCH = 0, 128
PACKAGES = ("torch", "numpy", "lapwing", "laplace-torch", "curvlinops-for-pytorch", "backpack-for-pytorch")


# -- problems ----------------------------------------------------------------------------------------------------


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, 2, 1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(1568, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def mlp(outputs: int = 100, width: int = 256) -> nn.Module:
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs))


def problem(name: str, n: int = 4000) -> tuple[nn.Module, DataLoader, Tensor]:
    """A network, a loader over n examples and the inputs to predict at."""
    torch.manual_seed(SEED)
    if name == "cnn":
        net, x, y = cnn(), torch.randn(n, 1, 28, 28), torch.randint(0, 10, (n,))
        return net, DataLoader(TensorDataset(x, y), BATCH), x
    net, x, y = mlp(), torch.randn(n, 64), torch.randint(0, 100, (n,))
    return net, DataLoader(TensorDataset(x, y), BATCH), x[:64]


def gradient_epoch(net: nn.Module, loader: DataLoader) -> None:
    for x, y in loader:
        net.zero_grad()
        nn.functional.cross_entropy(net(x), y, reduction="sum").backward()
    net.zero_grad()


def forward(net: nn.Module, inputs: Tensor) -> None:
    with torch.no_grad():
        for x in inputs.split(BATCH):
            net(x)


# -- ours and theirs ---------------------------------------------------------------------------------------------


def fit(net: nn.Module, loader: DataLoader, structure: str, factor: Any) -> Callable[[], Any]:
    return lambda: lw.laplace(net, loader, "categorical", structure=structure, factor=factor)


def peer(net: nn.Module, loader: DataLoader, inputs: Tensor, predict_first: int) -> dict[str, dict[str, float]]:
    """laplace-torch's fit and covariances, by backend; the prediction is timed on the first few inputs and scaled."""
    from laplace import Laplace
    from laplace.curvature import BackPackGGN, CurvlinopsGGN

    out = {}
    for backend in (BackPackGGN, CurvlinopsGGN):

        def make(backend: Any = backend) -> Any:
            la = Laplace(net, "classification", subset_of_weights="all", hessian_structure="kron", backend=backend)
            la.fit(loader)
            la.log_marginal_likelihood()
            return la

        seconds, la = clock(make)

        def predict(la: Any = la) -> Any:
            return [la._glm_predictive_distribution(x)[1].sum() for x in inputs[:predict_first].split(BATCH)]

        taken, _ = clock(predict)
        out[backend.__name__] = {"fit": seconds, "predict": taken * len(inputs) / predict_first}
    return out


def structured(name: str, repeat: int, skip_peer: bool) -> tuple[dict[str, Any], list[Bar]]:
    net, loader, inputs = problem(name)
    gradient_epoch(net, loader)
    forward(net, inputs)
    out: dict[str, Any] = {
        "parameters": sum(p.numel() for p in net.parameters()),
        "gradient_epoch": best(lambda: gradient_epoch(net, loader), repeat),
        "forward": best(lambda: forward(net, inputs), repeat),
    }
    for label, structure, factor in [
        ("kron_exact", "kron", "exact"),
        ("kron_monte_carlo_1", "kron", Factor("monte_carlo", 1)),
        ("kron_default", "kron", "auto"),
        ("diag_exact", "diag", "exact"),
    ]:
        out[label] = best(fit(net, loader, structure, factor), repeat)
    la = fit(net, loader, "kron", "exact")()
    out["tune"] = best(lambda: _tune(la), repeat)
    out["predict_first"] = clock(lambda: _predict(la, inputs))[0]  # with the eigendecompositions
    out["predict"] = best(lambda: _predict(la, inputs), repeat)
    if not skip_peer:
        out["peer"] = peer(net, loader, inputs, 128 if name == "cnn" else len(inputs))
    return out, _bars(name, out)


def _tune(la: lw.Laplace) -> None:
    la.state.memo.clear()
    float(la.tuned(center="map").log_evidence())


def _predict(la: lw.Laplace, inputs: Tensor) -> None:
    float(la.replace(prior=2.0).predict(inputs).covariance.sum())


def _bars(name: str, t: dict[str, Any]) -> list[Bar]:
    unit = t["gradient_epoch"]
    peers = t.get("peer", {})
    fastest_fit = min((p["fit"] for p in peers.values()), default=None)
    fastest_predict = min((p["predict"] for p in peers.values()), default=None)
    if name == "cnn":
        bars = [
            Bar("cnn: exact KFAC fit, gradient epochs", t["kron_exact"] / unit, 5),
            Bar("cnn: KFAC fit with 1 Monte-Carlo sample, gradient epochs", t["kron_monte_carlo_1"] / unit, 2.5),
            Bar("cnn: full 10x10 covariances, forward passes", t["predict"] / t["forward"], 60),
            Bar("cnn: tuning at the map, gradient epochs", t["tune"] / unit, 1),
            Bar("cnn: exact diagonal, gradient epochs", t["diag_exact"] / unit, 8),
        ]
        if peers:
            bars += [
                Bar("cnn: exact KFAC fit, times faster than laplace-torch", fastest_fit / t["kron_exact"], 1.5, True),
                Bar("cnn: covariances, times faster than laplace-torch", fastest_predict / t["predict"], 50, True),
            ]
        return bars
    bars = [Bar("mlp: default KFAC fit, gradient epochs", t["kron_default"] / unit, 12)]
    if peers:
        bars += [
            Bar("mlp: exact KFAC fit, times faster than laplace-torch", fastest_fit / t["kron_exact"], 1.5, True),
            Bar("mlp: covariances of 64 inputs, times faster", fastest_predict / t["predict"], 100, True),
        ]
    return bars


# -- memory ------------------------------------------------------------------------------------------------------


def memory(_repeat: int, _skip_peer: bool) -> tuple[dict[str, Any], list[Bar]]:
    """Peak memory of each job above a process that has torch and the data, each in a process of its own."""
    jobs = ("cnn:base", "cnn:train", "cnn:diag", "mlp:base", "mlp:train", "mlp:predict", "mlp:diag")
    peaks = {job: int(subprocess.check_output([sys.executable, __file__, "--job", job], text=True)) for job in jobs}
    above = {job: peaks[job] - peaks[f"{job[:3]}:base"] for job in jobs}
    bars = [
        Bar("cnn: exact diagonal, memory over a training step's", above["cnn:diag"] / above["cnn:train"], 2),
        Bar("mlp: covariances of 64 inputs, GB above torch", above["mlp:predict"] / 1e9, 1),
        Bar("mlp: exact diagonal, GB above torch", above["mlp:diag"] / 1e9, 1),
    ]
    return {"bytes_above_base": above}, bars


def job(name: str) -> None:
    which, task = name.split(":")
    net, loader, inputs = problem(which)
    x, y = next(iter(loader))
    forward(net, x[:8])
    if task == "train":
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
    elif task == "predict":
        _predict(fit(net, loader, "kron", "auto")(), inputs)
    elif task == "diag":
        float(fit(net, loader, "diag", "exact")().log_evidence())
    print(peak_memory())


# -- ResNet-20, last layer ---------------------------------------------------------------------------------------


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(h)) + self.downsample(x))


class ResNet20(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        widths = [(16, 16, 1), (16, 32, 2), (32, 64, 2)]
        self.layer1, self.layer2, self.layer3 = (
            nn.Sequential(BasicBlock(i, o, s), BasicBlock(o, o, 1), BasicBlock(o, o, 1)) for i, o, s in widths
        )
        self.fc = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.bn1(self.conv1(x)))
        return self.fc(self.layer3(self.layer2(self.layer1(h))).mean((2, 3)))


def resnet(repeat: int, _skip_peer: bool) -> tuple[dict[str, Any], list[Bar]]:
    folder = os.environ.get("LAPWING_DATA")
    if folder is None or not (pathlib.Path(folder) / "resnet_cifar10/resnet20.pt").is_file():
        return {"skipped": "LAPWING_DATA names no folder with the ResNet weights"}, []
    root = pathlib.Path(folder)
    net = ResNet20().eval()
    net.load_state_dict(torch.load(root / "resnet_cifar10/resnet20.pt", weights_only=True))
    stored = np.load(root / "cifar10/cifar10_test.npz")
    mean, std = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2023, 0.1994, 0.2010])
    x = ((torch.from_numpy(stored["x"][:2000]) / 255 - mean) / std).permute(0, 3, 1, 2).contiguous()
    y = torch.from_numpy(stored["y"][:2000]).long().reshape(-1)
    loader = DataLoader(TensorDataset(x, y), BATCH)
    accuracy = float((torch.cat([net(b).argmax(-1) for b in x.split(BATCH)]) == y).float().mean())

    def passes() -> None:
        with torch.no_grad():
            for b, _ in loader:
                net(b)

    def fit(structure: str) -> lw.Laplace:
        la = lw.laplace(net, loader, "categorical", subset="last_layer", structure=structure)
        float(la.log_evidence())
        return la

    def predict(la: lw.Laplace) -> None:
        for b in x.split(BATCH):
            float(la.predict(b).covariance.sum())

    jobs: dict[str, Callable[[], Any]] = {"forward": passes}
    for structure in ("full", "kron"):
        jobs[f"fit_{structure}"] = functools.partial(fit, structure)
        jobs[f"predict_{structure}"] = functools.partial(predict, fit(structure))
    rounds = [{name: clock(run)[0] for name, run in jobs.items()} for _ in range(repeat + 1)]  # in turn: loads vary
    out: dict[str, Any] = {"images": len(x), "map_accuracy": accuracy, **least(rounds)}
    unit = out["forward"]
    return out, [
        Bar(f"resnet20: last layer {s}, {job} in forward passes", out[f"{job}_{s}"] / unit, 1.2)
        for s in ("full", "kron")
        for job in ("fit", "predict")
    ]


# -- growth ------------------------------------------------------------------------------------------------------


def growth(repeat: int, _skip_peer: bool) -> tuple[dict[str, Any], list[Bar]]:
    """Seconds of an exact KFAC fit over three decades of data (one network) and of parameters (fixed outputs)."""
    torch.manual_seed(SEED)
    data, params = [], []
    net = mlp(10)
    for n in (100, 1_000, 10_000, 100_000):
        loader = DataLoader(TensorDataset(torch.randn(n, 64), torch.randint(0, 10, (n,))), BATCH)
        data.append((n, best(fit(net, loader, "kron", "exact"), repeat)))
    for width in (32, 128, 448, 1440):
        wide = mlp(10, width)
        loader = DataLoader(TensorDataset(torch.randn(1000, 64), torch.randint(0, 10, (1000,))), BATCH)
        params.append((sum(p.numel() for p in wide.parameters()), best(fit(wide, loader, "kron", "exact"), repeat)))
    _plot(data, params)
    slope = {k: float(np.polyfit(*np.log(np.array(v)).T, 1)[0]) for k, v in (("data", data), ("parameters", params))}
    return {"data": data, "parameters": params, "log_log_slope": slope}, [
        Bar("growth: log-log slope in data", slope["data"], 1.1),
        Bar("growth: log-log slope in parameters", slope["parameters"], 1.1),
    ]


def _plot(data: list[tuple[int, float]], params: list[tuple[int, float]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, 2, figsize=(8, 3.2), constrained_layout=True)
    for ax, points, label in zip(axes, (data, params), ("examples", "parameters"), strict=True):
        x, t = np.array(points).T
        ax.loglog(x, t, "o-", color="#0072B2", label="exact KFAC fit")
        ax.loglog(x, t[-1] * x / x[-1], "--", color="#999999", label="linear")
        ax.set(xlabel=f"number of {label}", ylabel="seconds")
        ax.legend(frameon=False)
        ax.grid(alpha=0.3)
    path = pathlib.Path(__file__).parent / "results" / "structured_growth.png"
    path.parent.mkdir(exist_ok=True)
    fig.savefig(path, dpi=120)
    plt.close(fig)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sections: dict[str, Callable[[int, bool], tuple[dict[str, Any], list[Bar]]]] = {
        "cnn": lambda r, s: structured("cnn", r, s),
        "mlp": lambda r, s: structured("mlp", r, s),
        "memory": memory,
        "resnet": resnet,
        "growth": growth,
    }
    parser.add_argument("--skip-peer", action="store_true", help="do not run laplace-torch")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=list(sections), default=list(sections))
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        job(args.job)
        return
    body: dict[str, Any] = {"seed": SEED, "batch": BATCH}
    bars: list[Bar] = []
    for name in args.only:
        body[name], more = sections[name](args.repeat, args.skip_peer)
        bars += more
        rows = [(k, f"{v:.4g}") for k, v in body[name].items() if isinstance(v, float)]
        print(f"\n{name}", *([table(rows)] if rows else [body[name]]), *more, sep="\n")
    whole = set(args.only) == set(sections) and not args.skip_peer
    print("\nwritten to", write("structured" if whole else "structured_partial", body, bars, PACKAGES))


if __name__ == "__main__":
    main()
