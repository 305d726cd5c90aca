"""Gradient evaluations a second: four chains of HMC at once, beside Pyro's HMC.

    python benchmarks/samplers.py [--draws 200] [--leapfrog 20] [--repeat 3]

A 3-8-2 perceptron of 50 weights with tanh, 100 examples, Gaussian noise, a normal prior, float64, one thread. The step
is given, so that both walk trajectories of the same number of gradients, draws × leapfrog of each chain. Pyro's model
samples each parameter and conditions on the targets; it runs one chain (several run in processes of their own), by
default and with its potential compiled (`jit_compile`). Set-up counts for both, reading and tracing for us. It needs
pyro-ppl 1.9.2; without it, only ensembles are timed.

Ensembles: five members trained at once, beside one trained in the same way, and one in a loop of plain torch: 500 steps
of Adam over batches of 50, on the perceptron and on 784-32-10 with labels.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from _common import Bar, clocks, least, table, write
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw

CHAINS, NOISE, STEP = 4, 0.5, 0.01
BAR = 10.0  # times Pyro's gradients a second
STEPS = 500  # of a training
FIVE = 3.0  # times one training, that five members may take


def problem() -> tuple[nn.Sequential, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    x = torch.randn(100, 3, dtype=torch.float64)
    return model, x, torch.sin(x[:, :2]) + NOISE * torch.randn(100, 2, dtype=torch.float64)


def ours(draws: int, leapfrog: int) -> Callable[[], Any]:
    model, x, y = problem()
    told: dict[str, Any] = {"chains": CHAINS, "draws": draws, "warmup": 0, "leapfrog": leapfrog, "step": STEP}
    return lambda: lw.samplers.hmc(model, (x, y), lw.likelihoods.Gaussian(NOISE), **told)


def pyros(draws: int, leapfrog: int, jit: bool) -> Callable[[], Any]:
    import pyro
    import pyro.distributions as dist
    from pyro.infer.mcmc import HMC, MCMC

    model, x, y = problem()
    shapes = {name: p.shape for name, p in model.named_parameters()}

    def joint() -> None:
        zero = torch.zeros((), dtype=torch.float64)
        weights = {n: pyro.sample(n, dist.Normal(zero, 1.0).expand(s).to_event(len(s))) for n, s in shapes.items()}
        f = torch.tanh(x @ weights["0.weight"].mT + weights["0.bias"]) @ weights["2.weight"].mT + weights["2.bias"]
        pyro.sample("y", dist.Normal(f, NOISE).to_event(2), obs=y)

    def run() -> None:
        pyro.set_rng_seed(0)
        fixed: dict[str, Any] = {"adapt_step_size": False, "adapt_mass_matrix": False, "jit_compile": jit}
        kernel = HMC(joint, step_size=STEP, num_steps=leapfrog, ignore_jit_warnings=True, **fixed)
        MCMC(kernel, num_samples=draws, warmup_steps=0, disable_progbar=True).run()

    return run


def rate(run: Callable[[], Any], gradients: int, repeat: int) -> dict[str, float]:
    """Gradients a second, by the wall and by the CPU, after a run to warm up."""
    run()
    return {clock: gradients / seconds for clock, seconds in least([clocks(run)[0] for _ in range(repeat)]).items()}


def ensembles(repeat: int) -> dict[str, float]:
    """Seconds of CPU of five members over those of one, {what one, network: ratio}; data and steps alike."""
    torch.manual_seed(0)
    small, wide = problem(), (torch.randn(1000, 784), torch.randint(10, (1000,)))
    cases: dict[str, tuple[Any, Any, Any, Any]] = {
        "3-8-2": (lambda: perceptron(3, 8, 2).double(), small[1:], "gaussian", nn.functional.mse_loss),
        "784-32-10": (lambda: perceptron(784, 32, 10), wide, "categorical", nn.functional.cross_entropy),
    }
    ratios: dict[str, float] = {}
    for name, (make, (x, y), likelihood, loss) in cases.items():
        loader = DataLoader(TensorDataset(x, y), 50, shuffle=True)

        def plain(make: Any = make, loader: Any = loader, loss: Any = loss) -> None:
            net = make()
            adam, taken = torch.optim.Adam(net.parameters(), 1e-2), 0
            while taken < STEPS:
                for some, targets in loader:
                    adam.zero_grad()
                    loss(net(some), targets).backward()
                    adam.step()
                    taken += 1

        def trained(members: int, make: Any = make, loader: Any = loader, likelihood: str = likelihood) -> None:
            lw.ensembles.train(make, loader, likelihood, members=members, steps=STEPS)

        runs = {"five": lambda: trained(5), "one": lambda: trained(1), "one in plain torch": plain}
        for run in runs.values():
            run()
        turns = [{what: clocks(run)[0]["cpu"] for what, run in runs.items()} for _ in range(repeat)]
        least = {what: min(turn[what] for turn in turns) for what in runs}
        ratios |= {f"{what}, {name}": least["five"] / least[what] for what in ("one", "one in plain torch")}
    return ratios


def perceptron(i: int, h: int, o: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(i, h), nn.Tanh(), nn.Linear(h, o))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--leapfrog", type=int, default=20)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    trained = ensembles(args.repeat)
    fives = [Bar(f"five members at once over {name}", v, FIVE) for name, v in trained.items()]
    if importlib.util.find_spec("pyro") is None:
        print(*fives, "chains: skipped, pyro is not installed; nothing is written", sep="\n")
        return
    one = args.draws * args.leapfrog
    found = {
        f"lapwing, {CHAINS} chains at once": rate(ours(args.draws, args.leapfrog), CHAINS * one, args.repeat),
        "pyro": rate(pyros(args.draws, args.leapfrog, jit=False), one, args.repeat),
        "pyro, compiled": rate(pyros(args.draws, args.leapfrog, jit=True), one, args.repeat),
    }
    rows = [("gradients a second", "wall", "cpu")]
    rows += [(name, *(f"{rates[clock]:,.0f}" for clock in ("wall", "cpu"))) for name, rates in found.items()]
    print(table(rows))
    mine = found[f"lapwing, {CHAINS} chains at once"]
    bars = [
        Bar("gradients a second over Pyro's, by the CPU", mine["cpu"] / found["pyro"]["cpu"], BAR, above=True),
        *fives,
    ]
    body = {**vars(args), "chains": CHAINS, "parameters": 50, "gradients_a_second": found}
    body["over_pyro_compiled"] = mine["cpu"] / found["pyro, compiled"]["cpu"]
    print(*bars, f"over Pyro's compiled: {body['over_pyro_compiled']:.1f}", sep="\n")
    print("\nwritten to", write("samplers", body, bars, ("torch", "lapwing", "pyro-ppl")))


if __name__ == "__main__":
    main()
