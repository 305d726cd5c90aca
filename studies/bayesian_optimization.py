"""Bayesian optimization with a Laplace posterior in BoTorch, beside its own Gaussian process and random search.

    python studies/bayesian_optimization.py              # --choose: only the first half;  --table: runs nothing

First the candidates for the network run on other functions and seeds (Six-hump camel and Levy-3, seeds 100 to 102), and
the one of the least mean log10 regret is taken. Then it runs on Branin and Hartmann-3, seeds 0 to 9, beside the rivals.

All methods start from the same Sobol points and then evaluate one point a step, 30 evaluations in all, of a function
without noise. Both models maximize LogExpectedImprovement by `optimize_acqf` with the same restarts; the Gaussian
process is SingleTaskGP as it comes, fitted by its marginal likelihood. The network is trained anew at every step.
Writes studies/results/bayesian_optimization.jsonl, a line a run, which it goes on from, and the figure and the tables
of docs/studies/bayesian_optimization.md.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import time
import warnings
from typing import Any

import numpy as np
import torch
from botorch.acquisition.analytic import LogExpectedImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.transforms import Standardize
from botorch.optim import optimize_acqf
from botorch.test_functions import Branin, Hartmann, Levy, SixHumpCamel
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor, nn

import lapwing as lw
from lapwing.integrations.botorch import LaplaceModel

ROOT = pathlib.Path(__file__).parents[1]
JOURNAL = ROOT / "studies/results/bayesian_optimization.jsonl"
PAGE = ROOT / "docs/studies/bayesian_optimization.md"
FIGURE = ROOT / "docs/studies/figures" / "bayesian_optimization.png"
NAMES = {"random": "random search", "gp": "SingleTaskGP"}
SCORED = {"Branin": (Branin, {}), "Hartmann-3": (Hartmann, {"dim": 3})}
OTHERS = {"Six-hump camel": (SixHumpCamel, {}), "Levy-3": (Levy, {"dim": 3})}
SCORING, CHOOSING = range(10), range(100, 103)  # seeds
FIRST, EVALUATIONS, RESTARTS, RAW = 6, 30, 5, 128
WIDTH, STEPS, RATE = 50, 400, 1e-2
# layers of the network, and what its posterior is about
CANDIDATES: dict[str, dict[str, Any]] = {
    f"{layers} x {WIDTH}, {mean}": {"layers": layers, "mean": mean}
    for layers in (1, 2)
    for mean in ("tangent", "process")
}


def network(d: int, layers: int) -> nn.Module:
    hidden: list[nn.Module] = []
    for size in [d, *[WIDTH] * (layers - 1)]:
        hidden += [nn.Linear(size, WIDTH), nn.Tanh()]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, 1)).double()


def trained(net: nn.Module, x: Tensor, y: Tensor) -> nn.Module:
    optimizer = torch.optim.Adam(net.parameters(), RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for _ in range(STEPS):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
        schedule.step()
    return net


class Centered(nn.Module):
    """Points of the unit cube as [−2, 2]."""

    def forward(self, x: Tensor) -> Tensor:
        return 4 * x - 2


def laplace(X: Tensor, Y: Tensor, seed: int, layers: int, mean: str) -> Any:
    torch.manual_seed(1_000 * seed + len(X))
    outcomes = Standardize(1)
    y = outcomes(Y)[0]
    net = trained(nn.Sequential(Centered(), network(X.shape[-1], layers)), X, y)
    la = lw.laplace(net, (X, y), "gaussian").tuned(center="process" if mean == "process" else "tangent")
    return LaplaceModel(la, mean, outcome_transform=outcomes.eval())


def process(X: Tensor, Y: Tensor) -> Any:
    model = SingleTaskGP(X, Y)
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    return model


def run(made: Any, method: str, seed: int, candidate: dict[str, Any]) -> list[float]:
    """The regret, the best value so far beside the optimum, after each evaluation."""
    function = made[0](**made[1], negate=True).double()
    low, high = function.bounds.double()
    d = len(low)
    sobol = torch.quasirandom.SobolEngine(d, scramble=True, seed=seed)
    X = sobol.draw(FIRST, dtype=torch.float64)
    Y = function(low + (high - low) * X).unsqueeze(-1)
    chooser = torch.Generator().manual_seed(seed)
    cube = torch.stack([torch.zeros(d), torch.ones(d)]).double()
    while len(X) < EVALUATIONS:
        if method == "random":
            new = torch.rand(1, d, generator=chooser, dtype=torch.float64)
        else:
            model = process(X, Y) if method == "gp" else laplace(X, Y, seed, **candidate)
            torch.manual_seed(1_000 * seed + len(X))
            new, _ = optimize_acqf(LogExpectedImprovement(model, Y.max()), cube, 1, RESTARTS, RAW)
        X = torch.cat([X, new])
        Y = torch.cat([Y, function(low + (high - low) * new).unsqueeze(-1)])
    best = Y.squeeze(-1).cummax(0).values
    return (function.optimal_value - best).tolist()


def journal() -> dict[tuple[str, str, int], dict[str, Any]]:
    lines = JOURNAL.read_text().splitlines() if JOURNAL.is_file() else []
    rows = [json.loads(line) for line in lines]
    return {(row["function"], row["method"], row["seed"]): row for row in rows}


def collect(functions: dict[str, Any], methods: list[str], seeds: range) -> None:
    done = journal()
    for seed in seeds:
        for name, made in functions.items():
            for method in methods:
                if (name, method, seed) in done:
                    continue
                start = time.process_time()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # BoTorch tells of steps of its optimizers
                    regret = run(made, method, seed, CANDIDATES.get(method, {}))
                row = {"function": name, "method": method, "seed": seed, "regret": regret}
                row["cpu_seconds"] = time.process_time() - start
                with JOURNAL.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(name, method, seed, f"{regret[-1]:.2e}", f"{row['cpu_seconds']:.0f} s", flush=True)


def regrets(name: str, method: str, seeds: range) -> np.ndarray:
    found = journal()
    return np.array([found[name, method, seed]["regret"] for seed in seeds if (name, method, seed) in found])


def table(functions: dict[str, Any], methods: list[str], seeds: range) -> list[str]:
    """Mean log10 regret at the end, and paired differences with the Gaussian process and with random search."""
    rows = [
        "| function | method | mean | median | beside SingleTaskGP | beside random search |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for name in functions:
        ends = {method: _logs(regrets(name, method, seeds))[:, -1] for method in methods}
        for method, values in ends.items():
            gaps = [_gap(values - ends[other]) if other != method else "–" for other in NAMES]
            shown = f"{name} | {NAMES.get(method, method)} | {values.mean():.2f} | {np.median(values):.2f}"
            rows.append(f"| {shown} | {' | '.join(gaps)} |")
    return rows


def _gap(gap: np.ndarray) -> str:
    return f"{gap.mean():+.2f} ± {gap.std(ddof=1) / len(gap) ** 0.5:.2f}"


def write(mark: str, rows: list[str]) -> None:
    """The rows between their marks in the page."""
    print("\n".join(rows), flush=True)
    before, _, rest = PAGE.read_text().partition(f"<!-- {mark} -->\n")
    after = rest.partition(f"<!-- end of {mark} -->\n")[2]
    PAGE.write_text("\n".join([f"{before}<!-- {mark} -->", *rows, f"<!-- end of {mark} -->\n"]) + after)


def figure(methods: list[str], seeds: range) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    styles = [
        *zip(
            methods, ("random search", "SingleTaskGP", "LaplaceModel"), ("gray", "tab:orange", "tab:blue"), strict=True
        )
    ]
    fig, axes = plt.subplots(1, len(SCORED), figsize=(10, 3.8), layout="constrained")
    for ax, name in zip(axes, SCORED, strict=True):
        for method, label, color in styles:
            values = _logs(regrets(name, method, seeds))
            steps, mean = np.arange(1, values.shape[1] + 1), values.mean(0)
            error = values.std(0, ddof=1) / len(values) ** 0.5
            ax.plot(steps, mean, color=color, label=label)
            ax.fill_between(steps, mean - error, mean + error, color=color, alpha=0.2, linewidth=0)
        ax.set(title=name, xlabel="evaluations", ylabel="log10 regret")
        ax.axvline(FIRST, color="black", linewidth=0.5, linestyle=":")
    axes[0].legend()
    FIGURE.parent.mkdir(exist_ok=True)
    fig.savefig(FIGURE, dpi=110)


def chosen() -> str:
    """The candidate of the least mean log10 regret on the other functions."""
    ends = {method: [_logs(regrets(name, method, CHOOSING))[:, -1].mean() for name in OTHERS] for method in CANDIDATES}
    return min(ends, key=lambda method: float(np.mean(ends[method])))


def _logs(regret: np.ndarray) -> np.ndarray:
    return np.log10(np.maximum(regret, 1e-12))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--choose", action="store_true", help="only the choice among the candidates")
    parser.add_argument("--table", action="store_true", help="only the tables and the figure, of what was run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.table:
        collect(OTHERS, ["random", "gp", *CANDIDATES], CHOOSING)
    write("choice", table(OTHERS, ["random", "gp", *CANDIDATES], CHOOSING))
    print(f"chosen: {chosen()}", flush=True)
    if options.choose:
        return
    methods = ["random", "gp", chosen()]
    if not options.table:
        collect(SCORED, methods, SCORING)
    write("scores", table(SCORED, methods, SCORING))
    figure(methods, SCORING)
    print(f"{sum(row['cpu_seconds'] for row in journal().values()):.0f} CPU seconds in the journal")


if __name__ == "__main__":
    main()
