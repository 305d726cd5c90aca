"""Do the certificate's 90 % intervals cover the dense truth? Small random networks in float64, structures and
likelihoods mixed, trained a little or not.

    python benchmarks/certificate.py [--networks 400] [--probes 32] [--seed 0]

The truth is dense algebra on Jacobians by torch.func, without the package, but for fits without an example, which are
fits. `trace` is exact where an example has no more outputs than there are probes (as it has in all of these), so its
estimator is run by itself as `trace, probed`. The sketch that others are preconditioned by has a rank of 4: with as
many as these networks have weights, nothing would be left to probes. `variance` is by leave-one-out.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from _common import Bar, table, write
from torch import Tensor, nn

import lapwing as lw
from lapwing.certify import comparison
from lapwing.certify.reader import Reader
from lapwing.curvature import probe
from lapwing.operators import linalg

comparison.RANK = comparison.LEAST = 4

STRUCTURES = ("kron", "diag", "block")
LIKELIHOODS = ("gaussian", "categorical", "bernoulli")
NAMES = ("trace, probed", "log_det", "variance_training", "variance")


def problem(seed: int) -> tuple[nn.Module, Tensor, Tensor, str, str]:
    """A network of one or two hidden layers with random sizes, activation, data and training."""
    g = torch.Generator().manual_seed(seed)

    def pick(*options: Any) -> Any:
        return options[int(torch.randint(len(options), (), generator=g))]

    torch.manual_seed(seed)
    structure, likelihood = STRUCTURES[seed % 3], LIKELIHOODS[seed // 3 % 3]
    i, c, n = pick(2, 3, 5), pick(2, 3, 4), pick(10, 25, 60)
    widths = pick((4,), (7,), (5, 4), (8, 3))
    act = pick(nn.Tanh, nn.ReLU, nn.GELU)
    layers: list[nn.Module] = []
    for a, b in zip((i, *widths), widths, strict=False):
        layers += [nn.Linear(a, b), act()]
    model = nn.Sequential(*layers, nn.Linear(widths[-1], c)).double()
    x = torch.randn(n, i, dtype=torch.float64, generator=g)
    latent = torch.sin(x @ torch.randn(i, c, dtype=torch.float64, generator=g))
    y = {
        "gaussian": latent + 0.1 * torch.randn(n, c, dtype=torch.float64, generator=g),
        "categorical": latent.argmax(-1),
        "bernoulli": (latent > 0).double(),
    }[likelihood]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = {"gaussian": nn.MSELoss(), "categorical": nn.CrossEntropyLoss(), "bernoulli": nn.BCEWithLogitsLoss()}
    for _ in range(pick(0, 20, 100)):
        optimizer.zero_grad()
        losses[likelihood](model(x), y).backward()
        optimizer.step()
    return model, x, y, structure, likelihood


def dense_jacobian(model: nn.Module, x: Tensor) -> Tensor:
    """(n, c, p) by torch.func, in named_parameters() order."""
    params = {name: p.detach() for name, p in model.named_parameters()}
    jac = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, (x,)))(params)
    return torch.cat([j.flatten(2) for j in jac.values()], -1)


def output_hessian(likelihood: str, f: Tensor, noise: float) -> Tensor:
    """Λ (n, c, c)."""
    if likelihood == "gaussian":
        return torch.eye(f.shape[-1], dtype=f.dtype).expand(len(f), -1, -1) / noise**2
    if likelihood == "categorical":
        p = f.softmax(-1)
        return torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
    p = f.sigmoid()
    return torch.diag_embed(p * (1 - p))


def truth(model: nn.Module, x: Tensor, likelihood: str, noise: float, prior: float, ours: Tensor) -> tuple[float, ...]:
    """trace, log_det and variance_training by dense algebra; ours is the posterior precision as a matrix."""
    J = dense_jacobian(model, x)
    eye = prior * torch.eye(J.shape[-1], dtype=J.dtype)
    G = torch.einsum("nap,nab,nbq->pq", J, output_hessian(likelihood, model(x).detach(), noise), J)
    rows = J.flatten(0, 1)
    variances = [(rows * torch.linalg.solve(m, rows.mT).mT).sum() for m in (ours, G + eye)]
    return (
        float((ours - eye).trace() / G.trace()),
        float(torch.logdet(ours) - torch.logdet(G + eye)),
        float(variances[0] / variances[1] - 1),
    )


def left_out(la: lw.Laplace, model: nn.Module, x: Tensor, y: Tensor, kind: str, noise: float) -> float:
    """variance over all inputs, each under a fit of the structure, and a dense posterior, without it."""
    J, hessian = dense_jacobian(model, x), output_hessian(kind, model(x).detach(), noise)
    each, prior = torch.einsum("nap,nab,nbq->npq", J, hessian, J), linalg.to_dense(la.prior.operator())
    K, sums = each.sum(0) + prior, torch.zeros(2, dtype=J.dtype)
    for n, rows in enumerate(J):
        rest = torch.arange(len(x)) != n
        refit = lw.laplace(model, (x[rest], y[rest]), la.likelihood, structure=la.state.structure, prior=la.prior)
        both = linalg.to_dense(refit.posterior.precision), K - each[n]
        sums += torch.stack([(rows * torch.linalg.solve(m, rows.mT).mT).sum() for m in both])
    return float(sums[0] / sums[1] - 1)


def one(seed: int, probes: int) -> dict[str, Any]:
    model, x, y, structure, kind = problem(seed)
    prior, noise = (0.1, 1.0, 5.0)[seed // 9 % 3], 0.3
    likelihood = lw.likelihoods.Gaussian(noise) if kind == "gaussian" else kind
    la = lw.laplace(model, (x, y), likelihood, structure=structure, prior=prior)
    found = la.certify(probes, generator=torch.Generator().manual_seed(10_000 + seed))
    reader = Reader(la.state, la.prior, la.likelihood, la.data, False)
    seen, generator = probe(la.tangent, la.data), torch.Generator().manual_seed(20_000 + seed)
    probed = comparison._trace(reader, seen, probes, generator, la.memory_budget, exact=False)
    dense = truth(model, x, kind, noise, prior, linalg.to_dense(la.posterior.precision))
    dense = (*dense, left_out(la, model, x, y, kind, noise))
    assert abs(found.trace.value - dense[0]) < 1e-8 * dense[0]
    estimates = probed, found.log_det, found.variance_training, found.variance
    rows = {
        name: {
            "truth": t,
            "value": e.value,
            "standard_error": e.standard_error,
            "interval": e.interval,
            "z": (e.value - t) / e.standard_error if e.standard_error else 0.0,
            "covered": e.interval[0] - 1e-9 <= t <= e.interval[1] + 1e-9,
        }
        for name, t, e in zip(NAMES, dense, estimates, strict=True)
    }
    return {"seed": seed, "structure": structure, "likelihood": kind, "passes": found.passes, **rows}


def report(runs: list[dict[str, Any]], probes: int) -> None:
    """Print how many intervals cover, in all and by hundreds of networks, and write results/certificate.json."""
    hundreds = [runs[i : i + 100] for i in range(0, len(runs), 100)]
    rows = [("quantity", "covered", "too low", "too high", "median error", "sd of z", "by hundreds")]
    bars = []
    for name in NAMES:
        each = [run[name] for run in runs]
        missed = [r for r in each if not r["covered"]]
        z = torch.tensor([r["z"] for r in each], dtype=torch.float64)
        error = torch.tensor([r["standard_error"] for r in each], dtype=torch.float64).median()
        low = sum(r["value"] < r["truth"] for r in missed)
        by = [sum(run[name]["covered"] for run in part) for part in hundreds]
        rate = 1 - len(missed) / len(each)
        rows.append(
            (name, f"{rate:.1%}", str(low), str(len(missed) - low), f"{error:.3g}", f"{z.std():.2f}", str(by)),
        )
        bars += [Bar(f"{name}: coverage", rate, 0.85, above=True), Bar(f"{name}: coverage", rate, 0.95)]
    passes = [run["passes"] for run in runs]
    print(f"{len(runs)} networks, {probes} probes, {min(passes)} to {max(passes)} passes over the data")
    print(table(rows), *bars, sep="\n")
    write("certificate", {"probes": probes, "runs": runs}, bars, ("torch", "lapwing"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--networks", type=int, default=400)
    parser.add_argument("--probes", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    report([one(args.seed + i, args.probes) for i in range(args.networks)], args.probes)


if __name__ == "__main__":
    main()
