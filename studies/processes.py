"""Three ways from data to a Gaussian process or a network's posterior, on four small UCI regression sets.

    LAPWING_DATA=<folder> python studies/processes.py [--sets boston concrete energy yacht] [--splits 0 1]

    plug-in      the trained network, one hidden layer of 20 erf units, with the noise of its training residuals
    functional   lw.gp.functional(net, data, "gaussian").tuned(): its tangent model, prior and noise by the evidence
    hmc          the same architecture: weights N(0, 2 / fan_in), biases N(0, 1), functional's noise but at least 0.1 of
                 the targets' deviation, so that chains mix; four chains that begin at draws of the prior
    hmc's nngp   infinitely many units, with that prior and noise: what HMC's would be if its layer were wide
    nngp, ntk    infinitely many units, variances and noise by the evidence

Inputs and targets are standardized by the training split; the log-likelihood is in the targets' standard deviations.
R-hat is the largest over the test inputs' outputs. Each row is added to studies/results/processes.json as soon as it is
known, and what is there is not run again. Writes the tables of docs/studies/processes.md.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from left_out import line
from torch import Tensor, nn
from uci_evidence import Data, regression_data, trained

import lapwing as lw
from lapwing.gp import infinite

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "benchmarks"))

from _common import machine, versions

HERE = pathlib.Path(__file__).parent
RESULTS, PAGE = HERE / "results" / "processes.json", HERE.parent / "docs" / "studies" / "processes.md"
SETS = ("boston", "concrete", "energy", "yacht")
METHODS = ("plug-in", "functional", "hmc", "hmc's nngp", "nngp", "ntk")
WIDTH, CHAINS, DRAWS, WARMUP, LEAPFROG = 20, 4, 300, 500, 100
WEIGHTS, BIASES, NOISE = 2.0, 1.0, 0.1  # variances of HMC's prior, and its least noise


class Erf(nn.Module):
    """The activation: smooth, and with a closed form at infinite width."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.erf(x)


def network(inputs: int) -> nn.Sequential:
    """One hidden layer."""
    return nn.Sequential(nn.Linear(inputs, WIDTH), Erf(), nn.Linear(WIDTH, 1)).double()


def plug_in(net: nn.Module, data: Data) -> Callable[[Tensor], Any]:
    x, y = data
    with torch.no_grad():
        noise = float((y - net(x)).square().mean().sqrt())
    return lambda new: torch.distributions.Normal(net(new).detach(), noise)


def scores(predicted: Any, y: Tensor) -> dict[str, float]:
    """RMSE, log-likelihood and the share of targets in the 95 % interval."""
    p, rmse = predicted.cdf(y), float((predicted.mean - y).square().mean().sqrt())
    inside = ((p > 0.025) & (p < 0.975)).double()
    return {"rmse": rmse, "ll": float(predicted.log_prob(y).mean()), "coverage": float(inside.mean())}


def one(name: str, split: int) -> dict[str, Any]:
    """All methods on a split."""
    train, (new, y_new), _ = regression_data(name, split)
    inputs, out = train[0].shape[1], {}

    def timed(method: str, make: Callable[[], tuple[Any, dict[str, Any]]]) -> Any:
        start = time.process_time()
        fit, more = make()
        predicted = fit(new) if method == "plug-in" else fit.predict(new)
        out[method] = {**scores(predicted, y_new), **more, "cpu_seconds": round(time.process_time() - start, 1)}
        return fit

    net = trained(lambda: network(inputs), train, nn.functional.mse_loss, split)
    timed("plug-in", lambda: (plug_in(net, train), {}))

    def functional() -> tuple[Any, dict[str, Any]]:
        fit = lw.gp.functional(net, train, "gaussian").tuned()
        return fit, {"noise": float(fit.likelihood.noise), "log_evidence": float(fit.log_evidence())}

    exact = timed("functional", functional)

    noise = max(NOISE, float(exact.likelihood.noise))

    def hmc() -> tuple[Any, dict[str, Any]]:
        prior = lw.priors.WidthScaled({"*.weight": 1 / WEIGHTS, "*.bias": 1 / BIASES})
        fit = lw.samplers.hmc(
            net, train, lw.likelihoods.Gaussian(noise), prior=prior, chains=CHAINS, draws=DRAWS, warmup=WARMUP,
            leapfrog=LEAPFROG, start="prior", generator=torch.Generator().manual_seed(split),
        )  # fmt: skip
        rhat = float(torch.as_tensor(fit.diagnostics.rhat(new)).max())
        acceptance = float(torch.as_tensor(fit.diagnostics.acceptance).mean())
        return fit, {"rhat": rhat, "noise": noise, "acceptance": acceptance}

    timed("hmc", hmc)
    wide = infinite.nngp(1, "erf", WEIGHTS, BIASES)
    timed("hmc's nngp", lambda: (wide.regression(train, noise=noise), {"noise": noise}))
    for kind in ("nngp", "ntk"):

        def process(kind: str = kind) -> tuple[Any, dict[str, Any]]:
            k = getattr(infinite, kind)(1, "erf", 2.0, 0.5)
            fit = k.regression(train, noise=0.3).tuned()
            more = {"noise": float(fit.likelihood.noise), "log_evidence": float(fit.log_evidence())}
            return fit, more | {"w": fit.kernel.weight_variance, "b": fit.kernel.bias_variance}

        timed(kind, process)
    return out


def saved(record: dict[str, Any]) -> None:
    part = RESULTS.with_suffix(".partial")
    part.write_text(json.dumps(record, indent=1) + "\n")
    part.replace(RESULTS)


def table(rows: dict[str, Any]) -> list[str]:
    """Means over splits, and the standard error of the log-likelihood's."""
    names = ("set", "method", "RMSE", "log-likelihood", "inside 95 %", "R-hat", "CPU seconds")
    out = [line(names), "|---|---" + "|--:" * 5 + "|"]
    for name in SETS:
        splits = [row for key, row in rows.items() if key.startswith(f"{name} ")]
        for method in METHODS if splits else ():
            each = {key: torch.tensor([s[method].get(key, math.nan) for s in splits]) for key in
                    ("rmse", "ll", "coverage", "rhat", "cpu_seconds")}  # fmt: skip
            spread = f" ± {float(each['ll'].std()) / math.sqrt(len(splits)):.2f}" if len(splits) > 1 else ""
            rhat = f"{float(each['rhat'].max()):.2f}" if method == "hmc" else ""
            mean = {key: float(v.mean()) for key, v in each.items()}
            ll, inside = f"{mean['ll']:.2f}" + spread, f"{100 * mean['coverage']:.0f} %"
            out.append(line((name, method, f"{mean['rmse']:.3f}", ll, inside, rhat, f"{mean['cpu_seconds']:.1f}")))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=SETS)
    parser.add_argument("--splits", nargs="+", type=int, default=(0, 1))
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", lw.errors.LapwingWarning)
    record = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": {}}
    record |= {"machine": machine(), "versions": versions("torch", "lapwing")}
    for split in options.splits:
        for name in options.sets:
            key = f"{name} {split}"
            if key not in record["rows"]:
                start = time.process_time()
                record["rows"][key] = one(name, split)
                record["cpu_seconds"] = record.get("cpu_seconds", 0) + round(time.process_time() - start)
                saved(record)
                print(key, json.dumps(record["rows"][key]), flush=True)
    text = "\n".join([*table(record["rows"]), ""])
    if PAGE.exists():
        before, _, rest = PAGE.read_text().partition("<!-- tables -->\n")
        after = rest.partition("<!-- end of tables -->\n")[2]
        PAGE.write_text(f"{before}<!-- tables -->\n{text}<!-- end of tables -->\n{after}")
    print(text)


if __name__ == "__main__":
    main()
