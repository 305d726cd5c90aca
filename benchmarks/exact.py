"""The exact posterior, timed: `structure="full"` in its primal form beside laplace-torch, and its dual form at size.

(a) Primal: a tanh MLP 8-50-50-1 (P = 3,051), N = 5,000 in float32, batches of 128: fit, tune, predict 2,000 points.
    Beside it, in the same run: laplace-torch 0.3 with a full Hessian, one float64 eigendecomposition of size P, and one
    epoch of plain gradients over the same loader.
(b) Dual: an MLP of 1,001,050 parameters, N·C = 1,000: evidence and the covariances of 100 points, against the Gram
    matrix layer by layer, K_l = (a aᵀ + 1) ∘ (g gᵀ), from activations a and output gradients g that are captured by
    hand in a float64 copy of the network. In a process of its own, whose peak memory is read.

    python benchmarks/exact.py [--skip-peer] [--repeat 3] [--threads 2]
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
from typing import Any

import torch
from _common import Bar, clock, clocks, least, peak_memory, table, write
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw

SEED = 0
PACKAGES = ("lapwing", "torch", "numpy", "laplace-torch", "curvlinops-for-pytorch", "backpack-for-pytorch")


def train(model: nn.Module, loader: DataLoader, loss: nn.Module, epochs: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
    model.zero_grad()
    model.eval()


# -- (a) primal --------------------------------------------------------------------------------------------------

STEPS = ("fit", "tune", "predict")
BACKENDS = {"default": "its default backend", "fastest": "the faster backend for each step"}
Times = dict[str, dict[str, float]]  # step -> clock -> seconds


def small_problem() -> tuple[nn.Module, DataLoader, Tensor]:
    torch.manual_seed(SEED)
    x = torch.randn(7_000, 8)
    y = (torch.sin(2 * x[:, :1]) + x[:, 1:2] * x[:, 2:3]) + 0.2 * torch.randn(7_000, 1)
    model = nn.Sequential(nn.Linear(8, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 1))
    loader = DataLoader(TensorDataset(x[:5_000], y[:5_000]), batch_size=128)
    train(model, loader, nn.MSELoss(), epochs=10)
    return model, loader, x[5_000:]


def gradient_epoch(model: nn.Module, loader: DataLoader) -> None:
    loss = nn.MSELoss()
    for x, y in loader:
        model.zero_grad()
        loss(model(x), y).backward()
    model.zero_grad()


def touched(prediction: lw.Prediction) -> dict[str, float]:
    """Sums that need every covariance and every variance of y."""
    return {"sum_of_variances": float(prediction.covariance.sum()), "sum_of_totals": float(prediction.total.sum())}


def ours(model: nn.Module, loader: DataLoader, unseen: Tensor) -> tuple[Times, dict[str, float]]:
    fit, la = clocks(lambda: lw.laplace(model, loader, "gaussian", structure="full"))
    tune, tuned = clocks(lambda: la.tuned(center="map"))
    predict, sums = clocks(lambda: touched(tuned.predict(unseen)))
    found = {"log_evidence": float(tuned.log_evidence()), "prior_precision": float(tuned.prior.precision)}
    return {"fit": fit, "tune": tune, "predict": predict}, found | {"noise": float(tuned.likelihood.noise)} | sums


def theirs(
    model: nn.Module, loader: DataLoader, unseen: Tensor, noise: float
) -> tuple[dict[str, Times], dict[str, Any]]:
    """laplace-torch's steps with its default backend (curvlinops), and with the faster of two for each step.

    They are long and run once, after a warm-up on one batch. Its tuning moves the prior only (100 steps, its
    default), so the noise is given, at our tuned value.
    """
    from laplace import Laplace
    from laplace.curvature import BackPackGGN, CurvlinopsGGN

    def make(backend: Any) -> Any:
        return Laplace(copy.deepcopy(model), "regression", "all", "full", sigma_noise=noise, backend=backend)

    one = DataLoader(TensorDataset(*(t[:128] for t in loader.dataset.tensors)), batch_size=128)
    times: dict[str, Times] = {}
    found: dict[str, Any] = {}
    for name, backend in {"curvlinops": CurvlinopsGGN, "backpack": BackPackGGN}.items():
        make(backend).fit(one)
        la = make(backend)
        fit, _ = clocks(lambda la=la: la.fit(loader))
        if not found:
            tune, _ = clocks(lambda la=la: la.optimize_prior_precision(method="marglik"))
            found["log_evidence"] = float(la.log_marginal_likelihood())
            found["prior_precision"] = float(la.prior_precision)
        la.prior_precision = found["prior_precision"]
        predict, sums = clocks(lambda la=la: [float(t.sum()) for t in la(unseen)])
        found["sum_of_variances"] = sums[1]
        times[name] = {"fit": fit, "tune": tune, "predict": predict}  # tuning is the same code for both
    fastest = {step: min((t[step] for t in times.values()), key=lambda t: t["wall"]) for step in STEPS}
    return {"default": times["curvlinops"], "fastest": fastest}, found


def total(times: Times, clock: str) -> float:
    return sum(times[step][clock] for step in STEPS)


def primal(repeat: int, skip_peer: bool) -> tuple[dict[str, Any], list[Bar]]:
    model, loader, unseen = small_problem()
    p = sum(t.numel() for t in model.parameters())
    half = torch.randn(p, p, generator=torch.Generator().manual_seed(SEED), dtype=torch.float64)
    matrix = half @ half.mT
    gradient_epoch(model, loader)
    ours(model, loader, unseen)  # warm-ups
    runs, epochs, eighs, found = [], [], [], {}
    for _ in range(repeat):  # in turn, so that a busy spell hits all of them
        epochs += [clocks(lambda: gradient_epoch(model, loader))[0] for _ in range(5)]
        run, found = ours(model, loader, unseen)
        runs.append(run)
        eighs.append(clocks(lambda: torch.linalg.eigh(matrix))[0])
    mine: Times = {step: least([run[step] for run in runs]) for step in STEPS}
    epoch, eigh = least(epochs), least(eighs)
    body: dict[str, Any] = {
        "parameters": p,
        "lapwing": {"seconds": mine, **found, "runs": runs},
        "eigh": eigh,
        "gradient_epoch": epoch,
    }
    ratios = {
        clock: {"eighs": total(mine, clock) / eigh[clock], "fit_in_gradient_epochs": mine["fit"][clock] / epoch[clock]}
        for clock in ("wall", "cpu")
    }
    bars = [  # each by the clock that speaks against us
        Bar("(a) fit + tune + predict, in eigendecompositions", max(r["eighs"] for r in ratios.values()), 4),
        Bar("(a) fit, in gradient epochs", max(r["fit_in_gradient_epochs"] for r in ratios.values()), 60),
    ]
    rows = [("(a) seconds by the wall", *STEPS, "total", "total, CPU"), _row("lapwing", mine)]
    if not skip_peer:
        peers, values = theirs(model, loader, unseen, found["noise"])
        body["laplace_torch"] = {"seconds": peers, **values}
        for which, peer in peers.items():
            faster = {clock: total(peer, clock) / total(mine, clock) for clock in ratios}
            for clock, times in faster.items():
                ratios[clock][f"times_faster_than_{which}"] = times
            what = f"(a) times faster than laplace-torch 0.3, {BACKENDS[which]}"
            bars.append(Bar(what, min(faster.values()), 30, above=True))
            rows.append(_row(f"laplace-torch 0.3, {BACKENDS[which]}", peer))
            steps = (f"{peer[step]['wall'] / mine[step]['wall']:.1f}" for step in STEPS)
            rows.append(("  times faster", *steps, f"{faster['wall']:.1f}", f"{faster['cpu']:.1f}"))
    rows.append((f"one float64 eigh of {p:,}", "", "", "", f"{eigh['wall']:.3f}", f"{eigh['cpu']:.3f}"))
    rows.append(("one gradient epoch", "", "", "", f"{epoch['wall']:.3f}", f"{epoch['cpu']:.3f}"))
    print(table(rows), "\n")
    return body | {"ratios": ratios}, bars


def _row(name: str, times: Times) -> tuple[str, ...]:
    steps = (f"{times[step]['wall']:.3f}" for step in STEPS)
    return (name, *steps, f"{total(times, 'wall'):.3f}", f"{total(times, 'cpu'):.3f}")


# -- (b) dual ----------------------------------------------------------------------------------------------------


def big_problem() -> tuple[nn.Sequential, Tensor, Tensor, Tensor]:
    torch.manual_seed(SEED)
    x, y = torch.randn(100, 50), torch.randint(10, (100,))
    model = nn.Sequential(nn.Linear(50, 970), nn.Tanh(), nn.Linear(970, 970), nn.Tanh(), nn.Linear(970, 10))
    train(model, DataLoader(TensorDataset(x, y), batch_size=50), nn.CrossEntropyLoss(), epochs=3)
    return model, x, y, torch.randn(100, 50)


def captured(model: nn.Sequential, x: Tensor, u: Tensor) -> list[tuple[Tensor, Tensor]]:
    """(a (n, i), g (n, k, o)) of each linear layer: its inputs, and the gradients of uᵀf at its outputs, u (n, k, c).

    By hand: forward layer by layer, then back through Wᵀ and 1 − tanh².
    """
    inputs, h = [], x
    for layer in model:
        if isinstance(layer, nn.Linear):
            inputs.append(h)
        h = layer(h)
    linear = [layer for layer in model if isinstance(layer, nn.Linear)]
    gradients, g = [u], u
    for layer, a in zip(linear[:0:-1], inputs[:0:-1], strict=True):  # a is the tanh before this layer
        g = (g @ layer.weight) * (1 - a.square()).unsqueeze(1)
        gradients.append(g)
    return list(zip(inputs, gradients[::-1], strict=True))


def gram(left: list[tuple[Tensor, Tensor]], right: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Σ_l (a aᵀ + 1) ∘ (g gᵀ) for the rows of two sets, (n k, m j)."""
    total: Any = 0
    for (a, g), (b, h) in zip(left, right, strict=True):
        products = torch.einsum("nko,mjo->nkmj", g, h) * (a @ b.mT + 1)[:, None, :, None]
        total = total + products.reshape(g.shape[0] * g.shape[1], -1)
    return total


@torch.no_grad()
def reference(model: nn.Sequential, x: Tensor, y: Tensor, unseen: Tensor, prior: float) -> tuple[Tensor, Tensor]:
    """Log evidence and covariances (n, c, c) by Gram matrices in float64; nothing of Lapwing's is used."""
    model, x, unseen = copy.deepcopy(model).double(), x.double(), unseen.double()
    f = model(x)
    p = f.softmax(-1)
    values, vectors = torch.linalg.eigh(torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2))
    root = (vectors * values.clamp(min=0).sqrt().unsqueeze(-2)).mT  # (n, k, c): rows u with Σ_k u uᵀ = Λ
    train_rows = captured(model, x, root)
    c = f.shape[-1]
    unseen_rows = captured(model, unseen, torch.eye(c, dtype=torch.float64).expand(len(unseen), c, c))
    k, cross, own = (
        gram(left, right) / prior
        for left, right in ((train_rows, train_rows), (train_rows, unseen_rows), (unseen_rows, unseen_rows))
    )
    inner = torch.eye(len(k), dtype=torch.float64) + k
    theta = sum(t.square().sum() for t in model.parameters())
    fit = f.log_softmax(-1).gather(-1, y.unsqueeze(-1)).sum()
    evidence = fit - 0.5 * prior * theta - 0.5 * torch.logdet(inner)
    joint = own - cross.mT @ torch.linalg.solve(inner, cross)
    n = len(unseen)
    covariance = joint.reshape(n, c, n, c)[torch.arange(n), :, torch.arange(n)]
    return evidence, covariance


def dual_here(repeat: int) -> dict[str, Any]:
    """Runs in a process of its own; the peak is read before the reference is computed."""
    model, x, y, unseen = big_problem()
    prior = 1.0
    before = peak_memory()

    def run() -> tuple[Any, float, Tensor, dict[str, float]]:
        fit, la = clock(lambda: lw.laplace(model, (x, y), "categorical", structure="full", prior=prior))
        evidence, value = clock(lambda: float(la.log_evidence()))

        def covariances() -> Tensor:
            prediction = la.predict(unseen)
            float(prediction.mean.sum())
            return prediction.covariance

        predict, covariance = clock(covariances)
        return la, value, covariance, {"fit": fit, "evidence": evidence, "predict": predict}

    runs = [run() for _ in range(repeat)]
    la, value, covariance, _ = runs[0]
    peak = peak_memory()
    evidence, expected = reference(model, x, y, unseen, prior)
    assert set(la.coverage.values()) == {"exact (dual)"}, la.coverage
    return {
        "parameters": sum(t.numel() for t in model.parameters()),
        "data_times_outputs": len(x) * 10,
        "seconds": min(({**r[3], "total": sum(r[3].values())} for r in runs), key=lambda s: s["total"]),
        "seconds_of_runs": [r[3] for r in runs],
        "peak_bytes": peak,
        "peak_bytes_before": before,
        "log_evidence": value,
        "log_evidence_reference": float(evidence),
        "evidence_error": float(abs(value - evidence) / abs(evidence)),
        "covariance_error": float((covariance.double() - expected).abs().max() / expected.abs().max()),
        "worst_variance_error": float(
            ((covariance.double() - expected).diagonal(dim1=1, dim2=2).abs() / expected.diagonal(dim1=1, dim2=2)).max()
        ),
    }


def dual(repeat: int, threads: int) -> tuple[dict[str, Any], list[Bar]]:
    call = [sys.executable, __file__, "--child", "--repeat", str(repeat), "--threads", str(threads)]
    child = subprocess.run(call, check=True, stdout=subprocess.PIPE, text=True)
    out = json.loads(child.stdout.splitlines()[-1])
    seconds = out["seconds"]
    steps = ("fit", "evidence", "predict", "total")
    rows = [
        ("(b) dual form", *steps, "peak GB", "of them before"),
        (
            f"lapwing, {out['parameters']:,} parameters",
            *(f"{seconds[s]:.2f}" for s in steps),
            f"{out['peak_bytes'] / 1e9:.2f}",
            f"{out['peak_bytes_before'] / 1e9:.2f}",
        ),
    ]
    print(table(rows), "\n")
    return out, [
        Bar("(b) seconds", seconds["total"], 60),
        Bar("(b) peak GB of the process", out["peak_bytes"] / 1e9, 4),
        Bar("(b) relative error of the evidence", out["evidence_error"], 1e-4),
        Bar("(b) relative error of the covariances", out["covariance_error"], 1e-4),
        Bar("(b) greatest relative error of one variance", out["worst_variance_error"], 1e-4),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--skip-peer", action="store_true", help="leave laplace-torch out (it takes minutes)")
    parser.add_argument("--repeat", type=int, default=3, help="runs, of which the best counts")
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0 leaves its own choice")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.child:
        print(json.dumps(dual_here(args.repeat)))
        return
    small, bars = primal(args.repeat, args.skip_peer)
    big, more = dual(args.repeat, args.threads)
    bars += more
    print("\n".join(map(str, bars)))
    name = "exact_without_peer" if args.skip_peer else "exact"
    body = {"seeds": {"network_and_data": SEED}, "repeat": args.repeat, "primal": small, "dual": big}
    print("\nwritten:", f"benchmarks/results/{write(name, body, bars, PACKAGES).name}")


if __name__ == "__main__":
    main()
