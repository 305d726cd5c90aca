"""Bayesian optimization with a Laplace posterior in BoTorch, beside its own Gaussian process and random search.

    python studies/bayesian_optimization.py              # --choose: not the scored runs;  --table: runs nothing
    python studies/bayesian_optimization.py --seeds 0 5  # the scored runs of seeds 0 to 4 alone

Three parts, each with a table of docs/studies/bayesian_optimization.md, which the script writes, as it does the figure:

    why       predictions at new points after 20 Sobol points of six functions: whether error bars are honest
    choice    runs on Six-hump camel and Levy-3, seeds 100 to 102: which network is trained, and of what mean
    scores    runs on Branin and Hartmann-3, seeds 0 to 9

In runs all methods start from the same Sobol points and then evaluate one point a step, 30 evaluations in all, of a
function without noise. Models maximize LogExpectedImprovement by `optimize_acqf` with the same restarts; the Gaussian
process is SingleTaskGP as it comes, fitted by its marginal likelihood. `LaplaceModel.of_data` makes its network itself;
the other networks are trained anew at every step. studies/results/bayesian_optimization.jsonl has a line a run, and a
line for each set of predictions; what it has is not run again.
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
from botorch.test_functions import Ackley, Branin, Griewank, Hartmann, Levy, Rosenbrock, SixHumpCamel, StyblinskiTang
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor, nn

import lapwing as lw
from lapwing.integrations.botorch import LaplaceModel

ROOT = pathlib.Path(__file__).parents[1]
JOURNAL = ROOT / "studies/results/bayesian_optimization.jsonl"
PAGE = ROOT / "docs/studies/bayesian_optimization.md"
FIGURE = ROOT / "docs/studies/figures" / "bayesian_optimization.png"
BEFORE = "2 x 50, process"  # of the trained networks the one of the least mean log10 regret in the choice
NAMES = {
    "random": "random search",
    "gp": "SingleTaskGP",
    "of_data": "LaplaceModel.of_data",
    BEFORE: "LaplaceModel, trained 2 x 50",
}
SCORED = {"Branin": (Branin, {}), "Hartmann-3": (Hartmann, {"dim": 3})}
OTHERS = {"Six-hump camel": (SixHumpCamel, {}), "Levy-3": (Levy, {"dim": 3})}
PREDICTED = {
    **OTHERS,
    "Rosenbrock-3": (Rosenbrock, {"dim": 3, "bounds": [(-2.0, 2.0)] * 3}),
    "Griewank-3": (Griewank, {"dim": 3, "bounds": [(-5.0, 5.0)] * 3}),
    "Ackley-2": (Ackley, {"dim": 2, "bounds": [(-5.0, 5.0)] * 2}),
    "Styblinski-Tang-3": (StyblinskiTang, {"dim": 3}),
}
SCORING, CHOOSING = range(10), range(100, 103)  # seeds
SEEN, NEW = 20, 300  # points of the predictions
PART = "predictions of "
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


def of_data(X: Tensor, Y: Tensor, seed: int) -> Any:
    return LaplaceModel.of_data(X, Y, generator=torch.Generator().manual_seed(seed))


def process(X: Tensor, Y: Tensor) -> Any:
    model = SingleTaskGP(X, Y)
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    return model


def fitted(method: str, X: Tensor, Y: Tensor, seed: int) -> Any:
    if method in CANDIDATES:
        return laplace(X, Y, seed, **CANDIDATES[method])
    return process(X, Y) if method == "gp" else of_data(X, Y, seed)


def run(made: Any, method: str, seed: int) -> list[float]:
    """The regret, the best value so far beside the optimum, after each evaluation."""
    function, value, X = started(made, FIRST, seed)
    Y, d = value(X), X.shape[-1]
    chooser = torch.Generator().manual_seed(seed)
    cube = torch.stack([torch.zeros(d), torch.ones(d)]).double()
    while len(X) < EVALUATIONS:
        if method == "random":
            new = torch.rand(1, d, generator=chooser, dtype=torch.float64)
        else:
            model = fitted(method, X, Y, seed)
            torch.manual_seed(1_000 * seed + len(X))
            new, _ = optimize_acqf(LogExpectedImprovement(model, Y.max()), cube, 1, RESTARTS, RAW)
        X, Y = torch.cat([X, new]), torch.cat([Y, value(new)])
    best = Y.squeeze(-1).cummax(0).values
    return (function.optimal_value - best).tolist()


def started(made: Any, n: int, seed: int) -> tuple[Any, Any, Tensor]:
    """The function to be maximized, its values (n, 1) at points of the unit cube, and n Sobol points."""
    function = made[0](**made[1], negate=True).double()
    low, high = function.bounds.double()
    sobol = torch.quasirandom.SobolEngine(len(low), scramble=True, seed=seed)
    value = lambda x: function(low + (high - low) * x).unsqueeze(-1)  # noqa: E731
    return function, value, sobol.draw(n, dtype=torch.float64)


def predictions(made: Any, method: str, seed: int) -> list[float]:
    """Of new points: log10 of the root mean squared error over the standard deviation of the values that were seen, the
    mean negative log density, and the share inside of two standard deviations."""
    _, value, X = started(made, SEEN, seed)
    Y, x = value(X), torch.rand(NEW, X.shape[-1], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    model = fitted(method, X, Y, seed)
    with torch.no_grad():
        found = model.posterior(x)
    gap, spread = ((value(x) - found.mean) / Y.std()), found.variance.sqrt() / Y.std()
    density = torch.distributions.Normal(0.0, spread).log_prob(gap)
    numbers = gap.square().mean().sqrt().log10(), -density.mean(), (gap.abs() < 2 * spread).double().mean()
    return [float(number) for number in numbers]


def journal() -> dict[tuple[str, str, int], dict[str, Any]]:
    lines = JOURNAL.read_text().splitlines() if JOURNAL.is_file() else []
    rows = [json.loads(line) for line in lines]
    return {(row["function"], row["method"], row["seed"]): row for row in rows}


def collect(functions: dict[str, Any], methods: list[str], seeds: range, part: str = "") -> None:
    """Runs that are not in the journal; part=PART for predictions."""
    done = journal()
    for seed in seeds:
        for name, made in functions.items():
            for method in methods:
                if (part + name, method, seed) in done:
                    continue
                start = time.process_time()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # BoTorch tells of steps of its optimizers
                    found = (predictions if part else run)(made, method, seed)
                row = {"function": part + name, "method": method, "seed": seed, "numbers" if part else "regret": found}
                row["cpu_seconds"] = time.process_time() - start
                with JOURNAL.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(part + name, method, seed, f"{found[-1]:.2e}", f"{row['cpu_seconds']:.0f} s", flush=True)


def why(methods: list[str]) -> list[str]:
    """Predictions of all functions and seeds, in the mean."""
    rows = [
        "| method | log10 error | negative log density | worst of them | inside of two standard deviations |",
        "|---|--:|--:|--:|--:|",
    ]
    found = journal()
    for method in methods:
        cells = [found[f"{PART}{name}", method, seed]["numbers"] for name in PREDICTED for seed in CHOOSING]
        error, density, inside = np.array(cells).T
        shown = f"{error.mean():.2f} | {density.mean():.2f} | {density.max():.1f} | {100 * inside.mean():.0f} %"
        rows.append(f"| {NAMES.get(method, method)} | {shown} |")
    return rows


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
            gaps = [_gap(values - ends[other]) if other != method else "–" for other in ("gp", "random")]
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

    colors = {"random": "gray", "gp": "tab:orange", "of_data": "tab:blue", BEFORE: "tab:green"}
    fig, axes = plt.subplots(1, len(SCORED), figsize=(10, 3.8), layout="constrained")
    for ax, name in zip(axes, SCORED, strict=True):
        for method in methods:
            values = _logs(regrets(name, method, seeds))
            steps, mean = np.arange(1, values.shape[1] + 1), values.mean(0)
            error = values.std(0, ddof=1) / len(values) ** 0.5
            ax.plot(steps, mean, color=colors[method], label=NAMES[method])
            ax.fill_between(steps, mean - error, mean + error, color=colors[method], alpha=0.2, linewidth=0)
        ax.set(title=name, xlabel="evaluations", ylabel="log10 regret")
        ax.axvline(FIRST, color="black", linewidth=0.5, linestyle=":")
    axes[0].legend()
    FIGURE.parent.mkdir(exist_ok=True)
    fig.savefig(FIGURE, dpi=110)


def _logs(regret: np.ndarray) -> np.ndarray:
    return np.log10(np.maximum(regret, 1e-12))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--choose", action="store_true", help="only the choice among the candidates")
    parser.add_argument("--table", action="store_true", help="only the tables and the figure, of what was run")
    parser.add_argument("--seeds", type=int, nargs=2, help="the scored runs of these seeds, and no table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tried, scored = ["random", "gp", *CANDIDATES, "of_data"], ["random", "gp", BEFORE, "of_data"]
    if options.seeds:
        collect(SCORED, scored, range(*options.seeds))
        return
    if not options.table:
        collect(PREDICTED, tried[1:], CHOOSING, PART)
        collect(OTHERS, tried, CHOOSING)
    write("why", why(tried[1:]))
    write("choice", table(OTHERS, tried, CHOOSING))
    if options.choose:
        return
    if not options.table:
        collect(SCORED, scored, SCORING)
    write("scores", table(SCORED, scored, SCORING))
    figure(scored, SCORING)
    print(f"{sum(row['cpu_seconds'] for row in journal().values()):.0f} CPU seconds in the journal")


if __name__ == "__main__":
    main()
