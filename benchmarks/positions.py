"""What a prediction at many positions costs: tokens of a sequence and pixels of an image, against their number.

    python benchmarks/positions.py [--repeat 3]

Head alone (subset="last_layer"), whose term at each position is that of an example with one position; and the whole
network, which takes backward passes for each position, or past 4,096 outputs is predicted by 64 draws. Two inputs at a
time; a forward pass of the same inputs is the unit. CPU seconds, with one thread.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from _common import Bar, clocks, least, table, write
from torch import Tensor, nn

import lapwing as lw

CLASSES, WIDTH, INPUTS = 8, 32, 2
POSITIONS = {"last_layer": (64, 256, 1024), "all": (16, 64, 576)}


class Tokens(nn.Module):
    """Attention and a head: (n, q) -> (n, q, c)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 4, 64, 0.0, batch_first=True) for _ in range(1))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        for layer in self.layers:
            h = layer(h)
        return self.head(h)


class Pixels(nn.Module):
    """Convolutions and a head at each pixel: (n, 3, s, s) -> (n, s, s, c)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, WIDTH, 3, padding=1), nn.ReLU(), nn.Conv2d(WIDTH, WIDTH, 3, padding=1))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).relu().permute(0, 2, 3, 1))


def tokens(q: int) -> Tensor:
    return torch.randint(50, (INPUTS, q), generator=torch.Generator().manual_seed(0))


def pixels(q: int) -> Tensor:
    side = round(q**0.5)
    return torch.randn(INPUTS, 3, side, side, generator=torch.Generator().manual_seed(0))


def cpu_seconds(run: Callable[[], Any], repeat: int) -> float:
    return least([clocks(run)[0] for _ in range(repeat)])["cpu"]


def measured(kind: str, subset: str, repeat: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model, inputs = (Tokens(), tokens) if kind == "tokens" else (Pixels(), pixels)
    model.eval()
    x = inputs(16)
    y = torch.randint(CLASSES, model(x).shape[:-1], generator=torch.Generator().manual_seed(1))
    la = lw.laplace(model, (x, y), "categorical", subset=subset, structure="kron")
    rows = []
    for q in POSITIONS[subset]:
        x = inputs(q)
        drawn = la.predict(x).drawn  # a warm-up too
        with torch.no_grad():
            forward = cpu_seconds(lambda x=x: model(x), 5)
        spent = cpu_seconds(lambda x=x: float(la.predict(x).f_var.sum()), repeat if subset == "last_layer" else 1)
        rows.append({"positions": q, "seconds": spent, "forward": forward, "draws": drawn})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = {
        f"{kind}, {subset}": measured(kind, subset, args.repeat)
        for kind in ("tokens", "pixels")
        for subset in POSITIONS
    }
    lines = [("", "positions", "CPU seconds", "forward passes")]
    for name, rows in results.items():
        for r in rows:
            how = ", by draws" if r["draws"] else ""
            lines.append(
                (name + how, f"{r['positions']:,}", f"{r['seconds']:.3f}", f"{r['seconds'] / r['forward']:.1f}")
            )
    print(table(lines))
    bars = []
    for kind in ("tokens", "pixels"):
        last = results[f"{kind}, last_layer"][-1]
        bars.append(Bar(f"{kind}, head: forward passes at 1,024 positions", last["seconds"] / last["forward"], 10))
    for bar in bars:
        print(bar)
    print(
        "written to",
        write("positions", {"inputs": INPUTS, "classes": CLASSES, "results": results}, bars, ("torch", "lapwing")),
    )


if __name__ == "__main__":
    main()
