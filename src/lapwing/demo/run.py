"""A trained network, and the same network with error bars: digits with unknown classes, and a curve with a gap.

Prints what changes from the trained weights (MAP) to the Laplace posterior, and writes pictures and one page.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

import lapwing as lw
from lapwing.demo import data as demo_data
from lapwing.demo import figures, page
from lapwing.demo.metrics import as_text, auroc, classification, regression, table

PRIOR = 1.0  # precision that both networks are trained with, and lapwing's default


@contextmanager
def step(text: str) -> Iterator[None]:
    """Say what is done, then how long it took."""
    start = time.perf_counter()
    print(f"{text} ...", flush=True)
    yield
    print(f"    {time.perf_counter() - start:.1f} s", flush=True)


def train(model: nn.Module, log_prob, n: int, steps: int, batch: int, rate: float, seed: int, extra=()) -> None:
    """Maximize Σ_n log p(y_n | f(x_n)) − ½ λ ‖θ‖² by Adam: the MAP estimate under a Gaussian prior."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam([*model.parameters(), *extra], lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # such small matrices are slower on several
    for _ in tqdm(range(steps), desc="    training", leave=False, disable=None):
        index = torch.randperm(n, generator=generator)[:batch]
        square = sum(p.square().sum() for p in model.parameters())
        loss = -log_prob(index) * n / len(index) + 0.5 * PRIOR * square
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    torch.set_num_threads(threads)


# -- digits --------------------------------------------------------------------------------------------------------


def digits_network(data: demo_data.Digits, seed: int) -> nn.Module:
    """64-30-30-7, trained on the digits."""
    torch.manual_seed(seed)
    classes = 10 - len(demo_data.UNKNOWN)
    model = nn.Sequential(nn.Linear(64, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, classes))
    (x, y), likelihood = data.train, lw.likelihoods.Categorical()
    train(model, lambda i: likelihood.log_prob(model(x[i]), y[i]).sum(), len(x), 2000, 128, 5e-3, seed)
    return model.eval()


def run_digits(seed: int) -> dict:
    """Data, network, posteriors, predictions and the row of each in the table."""
    data = demo_data.digits(seed)
    n = f"{len(data.train[0])} images of 7 classes; {len(data.test[0])} to test, {len(data.unknown)} of unknown classes"
    with step(f"Digits: train a 64-30-30-7 network on {n}"):
        model = digits_network(data, seed)
    with step("Digits: curvature (one pass) and evidence"):
        before = lw.laplace(model, data.train, "classification", prior=PRIOR)
        after = before.tuned()
        print(f"    {after}")
    with step("Digits: predictions with error bars"):
        inputs = {"test": data.test[0], "moved": data.moved[0], "unknown": data.unknown}
        predictions = {name: after.predict(x) for name, x in inputs.items()}
        with torch.no_grad():
            probs = {"MAP": {name: model(x).softmax(-1) for name, x in inputs.items()}}
        probs["Laplace"] = {name: p.probs for name, p in predictions.items()}
    spread = {name: p.epistemic.sum(-1) for name, p in predictions.items()}
    rows = {name: digits_row(p, data, None if name == "MAP" else spread) for name, p in probs.items()}
    return {
        "data": data,
        "model": model,
        "before": before,
        "after": after,
        "probs": probs,
        "spread": spread,
        "table": table(rows, "digits"),
    }


def digits_row(probs: dict[str, Tensor], data: demo_data.Digits, spread: dict[str, Tensor] | None) -> dict[str, str]:
    """A row of the table: on the test images, on those moved, and telling unknown ones."""
    test, moved = classification(probs["test"], data.test[1]), classification(probs["moved"], data.moved[1])
    doubt = {name: 1 - p.max(-1).values for name, p in probs.items()}
    row = {"accuracy": f"{test['accuracy']:.1%}"}
    row |= {name: f"{test[name]:.3f}" for name in ("NLL", "ECE", "Brier")}
    row |= {f"{name}, moved": f"{moved[name]:.3f}" for name in ("NLL", "ECE")}
    row["AUROC by confidence"] = f"{auroc(doubt['test'], doubt['unknown']):.3f}"
    if spread is not None:
        row["AUROC by epistemic"] = f"{auroc(spread['test'], spread['unknown']):.3f}"
    return row


# -- wines ---------------------------------------------------------------------------------------------------------


def wines_network(data: demo_data.Wines, seed: int) -> tuple[nn.Module, float]:
    """The network and the noise (a standard deviation) that maximize the likelihood together."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 1))
    log_noise = torch.zeros((), requires_grad=True)
    x, y = data.train

    def log_prob(index: Tensor) -> Tensor:
        z = (y[index] - model(x[index])) / log_noise.exp()
        return -(0.5 * z.square() + log_noise).sum()

    train(model, log_prob, len(x), 1500, len(x), 1e-2, seed, extra=(log_noise,))
    return model.eval(), float(log_noise.detach().exp())


def run_wines(seed: int) -> dict:
    """Data, network, posteriors and the table."""
    data = demo_data.wines(seed)
    n = f"{len(data.train[0])} wines; {len(data.test[0])} to test, {len(data.gap[0])} hidden in the gap"
    with step(f"Wines: train a 1-50-50-1 network on {n}"):
        model, noise = wines_network(data, seed)
    with step("Wines: curvature, evidence, predictions"):
        before = lw.laplace(model, data.train, "regression", prior=PRIOR)
        after = before.tuned()
        print(f"    {after}")
    rows: dict[str, dict[str, str]] = {"MAP": {}, "Laplace": {}}
    for name, (x, y) in {"test": data.test, "gap": data.gap}.items():
        pred = after.predict(x)
        with torch.no_grad():
            f = model(x)
        for row, (mean, std) in {"MAP": (f, torch.full_like(f, noise)), "Laplace": (pred.mean, pred.std)}.items():
            scores = regression(mean, std, y, unit=data.scales[3])
            rows[row] |= {f"{k}, {name}": f"{v:.0%}" if k == "coverage" else f"{v:.3f}" for k, v in scores.items()}
    return {
        "data": data,
        "model": model,
        "noise": noise,
        "before": before,
        "after": after,
        "table": table(rows, "wines"),
    }


# -- all of it -----------------------------------------------------------------------------------------------------


def evidence_table(results: dict[str, dict]) -> list[list[str]]:
    """What tuning made of the evidence and the prior precision."""
    rows = {}
    for name, result in results.items():
        before, after = result["before"], result["after"]
        rows[name] = {
            "log evidence before": f"{float(before.log_evidence()):.1f}",
            "after tuning": f"{float(after.log_evidence()):.1f}",
            "prior precision before": f"{float(before.prior.precision):.2f}",
            "after": f"{float(after.prior.precision):.2f}",
            "effective parameters": f"{float(after.effective_dimension()):.0f} of {after.state.layout.size:,}",
        }
    return table(rows, "evidence")


def run(out: Path, seed: int = 0) -> None:
    """Train, fit, print the tables, and write the pictures and the page into a folder."""
    out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    results = {"digits": run_digits(seed), "wines": run_wines(seed)}
    tables = [results["digits"]["table"], results["wines"]["table"], evidence_table(results)]
    with step("Pictures and page"):
        pictures = figures.draw_all(results, out)
        html = page.write(out / "index.html", tables, pictures, results)
    for lines in tables:
        print("\n" + as_text(lines))
    print(f"\nWrote {', '.join(p.name for p in pictures.values())} and {html} in {time.perf_counter() - start:.0f} s.")
