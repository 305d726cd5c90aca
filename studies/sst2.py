"""The default for classifiers over LoRA adapters: MiniLM fine-tuned on SST-2 by transformers' Trainer.

    LAPWING_DATA=<folder> python studies/sst2.py [--seeds 0 1 2]

For each seed: adapters and a classifier are trained on 2,000 sentences, and `LaplaceCallback("classification")` fits
and tunes the posterior over them when the Trainer is done. Scored once on the test sentences, of which nothing was
chosen. Losses are paired over sentences, all seeds together; their standard error counts a sentence once. Each seed is
a line of `out/sst2.jsonl`, and a run leaves out what is there. Writes `results/sst2.json` and the tables of
`docs/studies/sst2.md`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import pathlib
import tempfile
import warnings
from typing import Any

import torch
from left_out import line
from real_networks import SENTENCES, minilm
from torch import Tensor

import lapwing as lw

from _common import clocks, machine, versions  # isort: skip  (benchmarks/, which left_out puts on the path)

HERE = pathlib.Path(__file__).parent
LINES = HERE.parent / "out" / "sst2.jsonl"
RESULTS, PAGE = HERE / "results" / "sst2.json", HERE.parent / "docs" / "studies" / "sst2.md"
EPOCHS, RATE, BATCH, FORWARD = 5, 1e-3, 32, 64
COLUMNS = ("network", "Laplace")
SECONDS = ("train", "fit and tune", "predict")
PACKAGES = ("torch", "lapwing", "transformers", "peft")


def trained(net: Any, examples: list[dict[str, Tensor]], seed: int) -> tuple[lw.Laplace, dict[str, float]]:
    """The tuned posterior of adapters that the Trainer has trained; CPU seconds."""
    from transformers import Trainer, TrainingArguments

    from lapwing.integrations.huggingface import LaplaceCallback

    laplace = LaplaceCallback("classification", data=torch.utils.data.DataLoader(examples, FORWARD))  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder, seed=seed, num_train_epochs=EPOCHS, learning_rate=RATE, use_cpu=True, report_to=[],
            per_device_train_batch_size=BATCH, save_strategy="no", logging_strategy="epoch", disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(net, args, train_dataset=examples)
        train, _ = clocks(trainer.train)
        fit, _ = clocks(lambda: laplace.on_train_end(args, trainer.state, None, model=net))
    assert laplace.la is not None
    return laplace.la, {"train": train["cpu"], "fit and tune": fit["cpu"]}


def scored(seed: int) -> dict[str, Any]:
    """Probabilities of the test sentences by the network and by its posterior, with their labels."""
    net, examples = minilm(seed)
    la, seconds = trained(net, examples("train", SENTENCES), seed)
    test = list(torch.utils.data.DataLoader(examples("test", None), FORWARD))  # type: ignore[arg-type]
    net.eval()
    with torch.no_grad():
        network = torch.cat([net(**some).logits.softmax(-1) for some in test])
    predict, ours = clocks(lambda: torch.cat([la.predict(some).probs for some in test]))
    assert la.calibration is not None
    return {
        "seed": seed,
        "labels": torch.cat([some["labels"] for some in test]).tolist(),
        "network": network.tolist(),
        "Laplace": ours.tolist(),
        "calibration": str(la.calibration),
        "precision": float(la.prior.precision),
        "parameters": la.tangent.layout.size,
        "seconds": {**seconds, "predict": predict["cpu"]},
    }


def measures(p: Tensor, y: Tensor) -> dict[str, float]:
    """NLL, ECE of 15 bins, and accuracy."""
    return {"nll": lw.metrics.nll(p, y), "ece": lw.metrics.ece(p, y), "accuracy": lw.metrics.accuracy(p, y)}


def table(found: list[dict[str, Any]]) -> tuple[list[str], dict[str, Any]]:
    """A line a seed, means, and the paired differences."""
    out = [line(("seed", *(f"{what}, {c}" for what in ("NLL", "ECE", "accuracy") for c in COLUMNS), "CPU s"))]
    out += ["|---" + "|--:" * 7 + "|"]
    rows, gaps, hits = [], [], []
    for one in found:
        y = torch.tensor(one["labels"])
        p = {c: torch.tensor(one[c], dtype=torch.float64) for c in COLUMNS}
        rows.append({c: measures(p[c], y) for c in COLUMNS})
        cells = [f"{rows[-1][c][what]:.4f}" for what in ("nll", "ece", "accuracy") for c in COLUMNS]
        out.append(line((one["seed"], *cells, f"{sum(one['seconds'].values()):.0f}")))
        each = {c: lw.metrics.nll(p[c], y, each=True) for c in COLUMNS}
        gaps.append(each["Laplace"] - each["network"])
        right = {c: (p[c].argmax(1) == y).double() for c in COLUMNS}
        hits.append(right["Laplace"] - right["network"])
    mean = {c: {k: sum(r[c][k] for r in rows) / len(rows) for k in rows[0][c]} for c in COLUMNS}
    out.append(line(("mean", *(f"{mean[c][k]:.4f}" for k in ("nll", "ece", "accuracy") for c in COLUMNS), "")))
    paired = {name: _paired(torch.stack(some).mean(0)) for name, some in (("nll", gaps), ("accuracy", hits))}
    words = (f"{name} {m:+.4f} ± {e:.4f}" for name, (m, e) in paired.items())
    lower = sum(r["Laplace"]["ece"] < r["network"]["ece"] for r in rows)
    out += ["", f"Laplace less network: {', '.join(words)}. ECE is lower in {lower} of {len(rows)} seeds."]
    return out, {"seeds": rows, "mean": mean, "paired": paired}


def _paired(d: Tensor) -> tuple[float, float]:
    return float(d.mean()), float(d.std()) / math.sqrt(len(d))


def stored() -> list[dict[str, Any]]:
    """What has been scored."""
    return [json.loads(text) for text in LINES.read_text().splitlines()] if LINES.is_file() else []


def write(found: list[dict[str, Any]]) -> None:
    """The record, and the page's tables."""
    lines, made = table(found)
    kept = [{k: one[k] for k in ("seed", "calibration", "precision", "parameters", "seconds")} for one in found]
    record = {"date": datetime.date.today().isoformat(), "machine": machine(), "versions": versions(*PACKAGES)}
    RESULTS.write_text(json.dumps({**record, **made, "runs": kept}, indent=1) + "\n")
    more = [f"- seed {one['seed']}: λ = {one['precision']:.3g}; {one['calibration']}" for one in kept]
    costs = [line(("CPU seconds", *SECONDS)), "|---" + "|--:" * len(SECONDS) + "|"]
    costs += [line((f"seed {one['seed']}", *(f"{one['seconds'][k]:.0f}" for k in SECONDS))) for one in kept]
    before, _, rest = PAGE.read_text().partition("<!-- tables -->\n")
    after = rest.partition("<!-- end of tables -->\n")[2]
    text = "\n".join([*lines, "", *more, "", *costs, ""])
    PAGE.write_text(f"{before}<!-- tables -->\n{text}<!-- end of tables -->\n{after}")
    print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2))
    args = parser.parse_args()
    warnings.simplefilter("ignore", lw.errors.LapwingWarning)
    LINES.parent.mkdir(exist_ok=True)
    for seed in args.seeds:
        if seed not in {one["seed"] for one in stored()}:
            found = scored(seed)
            with LINES.open("a") as file:
                file.write(json.dumps(found) + "\n")
    write(sorted(stored(), key=lambda one: one["seed"]))


if __name__ == "__main__":
    main()
