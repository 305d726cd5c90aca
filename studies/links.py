"""Links from a Gaussian over logits to class probabilities, against the mean of softmax over 100,000 draws.

    python studies/links.py [--draws 100000] [--seed 0]

Two kinds of Gaussian. Drawn: means N(0, 2²) and covariances of a typical standard deviation, for 2 to 100 classes, with
independent logits of equal variance ("isotropic"), a random full covariance of the differences ("correlated"), and the
latter with a common shift of all logits as uncertain again ("shift"). Real: the posterior of a small network on the
digits of scikit-learn (8 x 8 images, 10 classes), tuned by evidence, at test images and at the same images under noise.

For each link: total variation ½ Σ |p − p*| from the truth p*, its mean and largest value over inputs; and on digits the
negative log-likelihood of the labels beside the truth's. "mean" is softmax(μ), no link at all; "iid 32" and "iid 512"
average that many random draws, as Monte-Carlo is commonly done. Truths of two halves of the draws tell how well p* is
known.
Writes studies/results/links.json.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import time
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import lapwing as lw

ROOT = pathlib.Path(__file__).parents[1]
LIKELIHOOD = lw.likelihoods.Categorical()
LINKS = ("probit", "probit_centered", "mean_field", "bridge", "monte_carlo")
IID = (32, 512)
INPUTS, CLASSES, STDS, KINDS = 50, (2, 10, 100), (1.0, 2.0, 4.0), ("isotropic", "correlated", "shift")
CHUNK = 2**23


def drawn(kind: str, classes: int, std: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """μ (n, c) and V (n, c, c): logits of variance std² on average."""
    mean = 2 * torch.randn(INPUTS, classes, generator=generator, dtype=torch.float64)
    eye = torch.eye(classes, dtype=torch.float64)
    if kind == "isotropic":
        return mean, std**2 * eye.expand(INPUTS, classes, classes)
    root = torch.randn(INPUTS, classes, classes, generator=generator, dtype=torch.float64)
    root = root - root.mean(-2, keepdim=True)  # no variance of a common shift
    cov = root @ root.mT
    cov = std**2 * cov / cov.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    return mean, cov + (std**2 if kind == "shift" else 0.0)


def truth(mean: Tensor, cov: Tensor, draws: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The means of softmax over two halves of the draws."""
    root = torch.linalg.eigh(cov)
    root = (root.eigenvectors * root.eigenvalues.clamp(min=0).sqrt().unsqueeze(-2)).float()
    mean, halves = mean.float(), []
    for _ in range(2):
        total = torch.zeros_like(mean, dtype=torch.float64)
        left = draws // 2
        while left:
            some = min(left, max(1, CHUNK // mean.numel()))
            noise = torch.randn(some, *mean.shape, generator=generator)
            total += (mean + torch.einsum("nab,snb->sna", root, noise)).softmax(-1).sum(0)
            left -= some
        halves.append(total / (draws // 2))
    return halves[0], halves[1]


def variation(p: Tensor, q: Tensor) -> dict[str, float]:
    each = 0.5 * (p - q).abs().sum(-1)
    return {"mean": float(each.mean()), "max": float(each.max())}


def compared(
    mean: Tensor, cov: Tensor, draws: int, generator: torch.Generator, y: Tensor | None = None
) -> dict[str, Any]:
    halves = truth(mean, cov, draws, generator)
    p = 0.5 * (halves[0] + halves[1])
    found: dict[str, Tensor] = {"mean": mean.softmax(-1)}
    seconds = {}
    for link in LINKS:
        start = time.perf_counter()
        found[link] = lw.Prediction(LIKELIHOOD, lw.outputs.Normal(mean, cov), link).probs
        seconds[link] = time.perf_counter() - start
    for k in IID:
        found[f"iid {k}"] = (
            lw.Prediction(LIKELIHOOD, lw.outputs.Normal(mean, cov)).f_sample(k, generator).softmax(-1).mean(0)
        )
    out: dict[str, Any] = {name: variation(q, p) for name, q in found.items()}
    for link, spent in seconds.items():
        out[link]["milliseconds an input"] = 1e3 * spent / len(mean)
    out["truth"] = variation(halves[0], halves[1])
    if y is not None:
        for name, q in {**found, "truth": p}.items():
            out[name]["nll"] = lw.metrics.nll(q, y)
            out[name]["ece"] = lw.metrics.ece(q, y)
    return out


def digits(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    raw = load_digits()
    x, y = torch.tensor(raw.data / 8 - 1), torch.tensor(raw.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    return x[order[:600]], y[order[:600]], x[order[600:900]], y[order[600:900]]


def posterior(x: Tensor, y: Tensor, seed: int) -> lw.Laplace:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).double()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(300):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return lw.laplace(model, (x, y), "categorical", structure="kron").tuned()


def real(draws: int, seed: int) -> dict[str, Any]:
    x, y, new, labels = digits(seed)
    la, out = posterior(x, y, seed), {}
    noise = torch.randn(new.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for name, inputs in (("digits", new), ("digits, noise of half their range", new + noise)):
        pred, generator = la.predict(inputs), torch.Generator().manual_seed(seed)
        out[name] = compared(pred.f_mean, pred.covariance, draws, generator, labels)
        out[name]["std of logits"] = float(pred.f_var.mean().sqrt())
    return out


def told(name: str, result: dict[str, Any]) -> None:
    rows = [k for k in result if isinstance(result[k], dict)]
    print(name)
    for row in rows:
        more = "".join(f"  {k} {result[row][k]:.4f}" for k in ("nll", "ece") if k in result[row])
        print(f"  {row:<16} mean {result[row]['mean']:.4f}  max {result[row]['max']:.4f}{more}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    results = real(args.draws, args.seed)
    for name, result in results.items():
        told(name, result)
    for kind in KINDS:
        for classes in CLASSES:
            for std in STDS if classes < 100 else STDS[1:2]:
                generator = torch.Generator().manual_seed(args.seed)
                name = f"{kind}, {classes} classes, std {std:g}"
                results[name] = compared(*drawn(kind, classes, std, generator), args.draws, generator)
                told(name, results[name])
    record = {
        "draws": args.draws,
        "seed": args.seed,
        "inputs": INPUTS,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "results": results,
    }
    target = ROOT / "studies/results/links.json"
    target.write_text(json.dumps(record, indent=1) + "\n")
    print("written to", target.relative_to(ROOT))


if __name__ == "__main__":
    main()
