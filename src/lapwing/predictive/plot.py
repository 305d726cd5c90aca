"""A picture of a prediction over inputs of one or two dimensions, with both kinds of uncertainty.

One dimension: the mean, the interval of y, and within it the band of its epistemic part alone, ±z √epistemic; for
classes, each probability with its interval over the posterior. Two dimensions: the mean (for classes, the most probable
one) and beside it the epistemic and aleatoric standard deviations (for classes, their entropies).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lapwing import given
from lapwing.errors import InvalidValue, Unsupported

if TYPE_CHECKING:
    from lapwing.predictive.prediction import Prediction

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # told apart by everyone (Okabe and Ito)
MOST = len(COLORS)  # curves in one picture


def figure(prediction: Prediction, x: Any, data: Any, level: float, ax: Any = None) -> Any:
    """A matplotlib figure over inputs x (n, 1) or (n, 2), with the data (X, y) if given; or that of the axes ax."""
    x, dims = _inputs(prediction, x)
    if prediction.mean.shape[-1] > MOST:
        raise Unsupported(f"{prediction.mean.shape[-1]} outputs are too many for one picture; plot up to {MOST}")
    if data is not None:
        data = tuple(torch.as_tensor(given.array(t)).detach().cpu() for t in data)
        data = (data[0].reshape(len(data[0]), -1), data[1])
    return (_over_line if dims == 1 else _over_plane)(prediction, x, data, level, ax)


def axes_of(
    ax: Any, what: str, size: tuple[float, float], rows: int = 1, columns: int = 1, heights: Any = None
) -> list[Any]:
    """The axes that a user gave, one or a grid of them, as many as are needed; or those of a new figure."""
    if ax is not None:
        found = list(ax.flat) if hasattr(ax, "flat") else list(ax) if isinstance(ax, (list, tuple)) else [ax]
        if len(found) != rows * columns or not all(hasattr(one, "plot") for one in found):
            raise InvalidValue(f"{what} draws in {rows * columns} matplotlib axes, and ax= gives {len(found)} things")
        return found
    figure = given.figure(what, figsize=size)
    return list(figure.subplots(rows, columns, squeeze=False, height_ratios=heights).flat)


def _inputs(prediction: Prediction, x: Any) -> tuple[Tensor, int]:
    x = torch.as_tensor(given.array(x)).detach().cpu().double()
    x = x.reshape(len(x), -1) if x.ndim else x.reshape(1, 1)
    if prediction.mean.ndim != 2 or len(x) != len(prediction.mean) or x.shape[1] not in (1, 2):
        raise InvalidValue(
            "a picture needs outputs (n, c) at inputs (n, 1) or (n, 2); got outputs "
            f"{tuple(prediction.mean.shape)} and inputs {tuple(x.shape)}"
        )
    return x, x.shape[1]


def _over_line(prediction: Prediction, x: Tensor, data: Any, level: float, ax: Any) -> Any:
    order = x[:, 0].argsort()
    at, classes = x[order, 0].numpy(), prediction.likelihood.classes
    z = float(torch.special.ndtri(torch.tensor(0.5 + level / 2, dtype=torch.float64)))
    low, high = (t.detach().cpu()[order] for t in prediction.interval(level))
    mean, spread = prediction.mean.detach().cpu()[order], z * prediction.epistemic.detach().cpu()[order].sqrt()
    (axes,) = axes_of(ax, "prediction.plot()", (6.4, 3.8))
    for j, color in zip(range(mean.shape[-1]), COLORS, strict=False):
        which = f" {j}" if mean.shape[-1] > 1 else ""
        axes.plot(at, mean[:, j], color=color, lw=1.6, label=("p of class" if classes else "mean") + which)
        if classes:
            axes.fill_between(at, low[:, j], high[:, j], color=color, alpha=0.2, lw=0)
            continue
        axes.fill_between(
            at, low[:, j], high[:, j], color=color, alpha=0.15, lw=0, label=f"{100 * level:g} % of y{which}"
        )
        around = (mean[:, j] - spread[:, j], mean[:, j] + spread[:, j])
        axes.fill_between(at, *around, color=color, alpha=0.35, lw=0, label=f"its epistemic part{which}")
    if data is not None:
        targets = data[1].reshape(len(data[1]), -1)
        for j, color in zip(range(targets.shape[-1]), COLORS, strict=False):
            axes.plot(data[0][:, 0], targets[:, j], ".", color="black" if targets.shape[-1] == 1 else color, ms=3)
    axes.set_xlabel("x")
    axes.set_ylabel(f"probability, {100 * level:g} % over the posterior" if classes else "y")
    axes.legend(fontsize="small")
    return axes.figure


def _over_plane(prediction: Prediction, x: Tensor, data: Any, level: float, ax: Any) -> Any:
    if len(x) < 3:
        raise InvalidValue(f"a picture over the plane needs at least 3 inputs, got {len(x)}")
    panels = _panels(prediction)
    rows, columns = len(panels), len(panels[0])
    grid = axes_of(ax, "prediction.plot()", (4.2 * columns, 3.4 * rows), rows, columns)
    for axes, (title, values) in zip(grid, [panel for row in panels for panel in row], strict=True):
        shown = axes.tripcolor(x[:, 0], x[:, 1], values.detach().cpu(), shading="gouraud")
        axes.figure.colorbar(shown, ax=axes)
        axes.set_title(title, fontsize="medium")
        axes.set_xlabel("x₁")
        axes.set_ylabel("x₂")
        if data is not None:
            first = data[1].reshape(len(data[1]), -1)[:, 0]
            axes.scatter(*data[0][:, :2].T, c=first, s=8, cmap="coolwarm", edgecolors="black", linewidths=0.3)
    return grid[0].figure


def _panels(prediction: Prediction) -> list[list[tuple[str, Tensor]]]:
    """Rows of a title and values (n,)."""
    if prediction.likelihood.classes:
        p = prediction.probs
        if p.shape[-1] == 1 or prediction.entropy.ndim > 1:  # binary outputs, one by one
            return [
                [
                    (f"p of output {j}", p[:, j]),
                    ("mutual information: epistemic", prediction.mutual_information[:, j]),
                    ("expected entropy: aleatoric", prediction.expected_entropy[:, j]),
                ]
                for j in range(p.shape[-1])
            ]
        return [
            [
                ("most probable class", p.argmax(-1).to(p)) if p.shape[-1] > 2 else ("p of class 1", p[:, 1]),
                ("mutual information: epistemic", prediction.mutual_information),
                ("expected entropy: aleatoric", prediction.expected_entropy),
            ]
        ]
    which = [f" {j}" if prediction.mean.shape[-1] > 1 else "" for j in range(prediction.mean.shape[-1])]
    return [
        [
            (f"mean{name}", prediction.mean[:, j]),
            (f"epistemic std{name}", prediction.epistemic[:, j].sqrt()),
            (f"aleatoric std{name}", prediction.aleatoric[:, j].sqrt()),
        ]
        for j, name in enumerate(which)
    ]
