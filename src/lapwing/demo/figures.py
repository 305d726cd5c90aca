"""The demo's pictures, in the Okabe-Ito colors, which the color-blind can tell apart."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display needed

import matplotlib.pyplot as plt
import torch
from matplotlib.ticker import FixedLocator, FormatStrFormatter, MaxNLocator, NullLocator, PercentFormatter
from sklearn.metrics import roc_curve
from torch import Tensor

from lapwing import files
from lapwing.demo.data import GAP
from lapwing.demo.metrics import auroc, reliability

BLACK, GRAY, BLUE, SKY, VERMILION, ORANGE, GREEN = (
    "#1a1a1a",
    "#6b6b6b",
    "#0072B2",
    "#56B4E9",
    "#D55E00",
    "#E69F00",
    "#009E73",
)
STYLE: Any = {
    "figure.dpi": 100,
    "savefig.dpi": 160,
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GRAY,
    "axes.labelcolor": BLACK,
    "xtick.color": GRAY,
    "ytick.color": GRAY,
    "legend.frameon": False,
    "legend.fontsize": 9,
}
SHOWN = {
    "MAP": (VERMILION, "s", "--"),
    "Laplace": (BLUE, "o", "-"),
}


def draw_all(results: dict, folder: Path) -> dict[str, Path]:
    """All pictures as PNG files in a folder, {name: path}."""
    figures = {"error_bars": error_bars, "reliability": calibration, "unknown": unknown, "evidence": evidence}
    paths = {}
    with plt.rc_context(STYLE):
        for name, draw in figures.items():
            paths[name] = folder / f"{name}.png"
            figure, content = draw(results), io.BytesIO()
            figure.savefig(content, bbox_inches="tight", facecolor="white")
            plt.close(figure)
            files.write_whole(paths[name], content.getvalue())
    return paths


def error_bars(results: dict) -> plt.Figure:
    """Above: 95 % bands. Below: the two parts of the variance, stacked."""
    run = results["wines"]
    data, la, unit = run["data"], run["after"], run["data"].scales[3]
    grid = torch.linspace(0.1, 5.3, 300, dtype=torch.float64)
    pred = la.predict(data.standardized(grid))
    mean, epistemic, total = pred.mean, pred.epistemic.sqrt(), pred.std
    figure, (top, low) = plt.subplots(
        2, 1, figsize=(7.2, 5.6), sharex=True, height_ratios=[2.6, 1], layout="constrained"
    )

    def band(width: Tensor) -> tuple[Tensor, Tensor]:
        return data.color(mean - 1.96 * width), data.color(mean + 1.96 * width)

    top.fill_between(grid, *band(total), color=SKY, alpha=0.30, lw=0, label="Laplace: 95 % of wines (both parts)")
    top.fill_between(grid, *band(epistemic), color=BLUE, alpha=0.45, lw=0, label="Laplace: epistemic part alone")
    for edge in band(torch.full_like(mean, run["noise"])):
        top.plot(grid, edge, color=VERMILION, ls="--", lw=1.2)
    top.plot([], [], color=VERMILION, ls="--", lw=1.2, label="MAP: 95 % (noise alone)")
    top.plot(grid, data.color(mean), color=BLACK, lw=1.6, label="mean")
    x, y = data.train
    top.plot(data.flavanoids(x), data.color(y), "o", ms=3, color=BLACK, alpha=0.8, label="wines it was trained on")
    x, y = data.gap
    top.plot(data.flavanoids(x), data.color(y), "o", ms=4, mfc="white", mec=VERMILION, label="wines hidden in the gap")
    top.set(
        yscale="log",
        ylim=(0.8, 30),
        ylabel="color intensity (log scale)",
        title="Error bars widen where there are no data",
    )
    top.yaxis.set_major_locator(FixedLocator([1, 2, 5, 10, 20]))
    top.yaxis.set_minor_locator(NullLocator())
    top.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    top.legend(loc="upper center", ncols=2, columnspacing=1.2)
    aleatoric, model = pred.aleatoric.squeeze(-1) * unit**2, pred.epistemic.squeeze(-1) * unit**2
    low.fill_between(grid, 0 * aleatoric, aleatoric, color=SKY, alpha=0.45, lw=0, label="aleatoric (noise)")
    low.fill_between(grid, aleatoric, aleatoric + model, color=BLUE, alpha=0.6, lw=0, label="epistemic (weights)")
    low.set(ylim=(0, None), xlim=(0.1, 5.3), ylabel="variance of\nlog color", xlabel="flavanoids (as recorded)")
    low.legend(loc="upper right", ncols=2)
    for axes in (top, low):
        axes.axvspan(*GAP, color=GRAY, alpha=0.12, lw=0, zorder=0)
    top.text(sum(GAP) / 2, 0.87, "gap: hidden\nfrom training", ha="center", va="bottom", color=GRAY, fontsize=9)
    return figure


def calibration(results: dict) -> plt.Figure:
    """Bins of ten and more predictions; the share of predictions is the size of a mark."""
    run = results["digits"]
    figure, panels = plt.subplots(1, 2, figsize=(8.6, 4.8), sharey=True, layout="constrained")
    labels = {"test": run["data"].test[1], "moved": run["data"].moved[1]}
    for axes, name, title in zip(panels, labels, ["Test images", "Test images moved by one pixel"], strict=True):
        axes.plot([0, 1], [0, 1], color=GRAY, lw=1)
        for i, (label, (color, marker, line)) in enumerate(SHOWN.items()):
            p, y = run["probs"][label][name], labels[name]
            bins = reliability(p, y, bins=10)
            kept = bins.fraction * len(y) >= 10
            x, right, size = bins.confidence[kept], bins.accuracy[kept], 18 + 230 * bins.fraction[kept]
            axes.plot(x, right, line, color=color, lw=1.4, zorder=2)
            axes.scatter(x, right, s=size, color=color, marker=marker, zorder=3, alpha=0.85, lw=0)
            axes.plot([], [], line, marker=marker, ms=5, color=color, label=label)
            place = (0.97, 0.22 - 0.07 * i) if name == "test" else (0.03, 0.97 - 0.07 * i)
            side = {"ha": "right" if name == "test" else "left", "va": "top", "transform": axes.transAxes}
            axes.text(*place, f"ECE {reliability(p, y).ece:.3f}", color=color, **side)
        axes.set(xlim=(0.1, 1.04), ylim=(0, 1.04), xlabel="confidence", title=title, aspect="equal")
        axes.xaxis.set_major_formatter(PercentFormatter(1))
        axes.yaxis.set_major_formatter(PercentFormatter(1))
    panels[0].set_ylabel("accuracy")
    panels[0].text(0.13, 0.95, "too modest", color=GRAY, fontsize=9, style="italic")
    panels[1].text(1.0, 0.03, "too certain", color=GRAY, fontsize=9, style="italic", ha="right")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


def unknown(results: dict) -> plt.Figure:
    """Left: how well known and unknown digits are told apart. Right: where MAP is most certain of the impossible."""
    run = results["digits"]
    doubt = {name: 1 - p.max(-1).values for name, p in run["probs"]["MAP"].items()}
    figure = plt.figure(figsize=(9.2, 4.1), layout="constrained")
    halves: Any = figure.subfigures(1, 2, width_ratios=[1, 1.15])
    left, right = halves
    axes = left.subplots()
    for label, scores, color, line in [
        ("Laplace: epistemic variance", run["spread"], BLUE, "-"),
        ("MAP: 1 − confidence", doubt, VERMILION, "--"),
    ]:
        truth = [0] * len(scores["test"]) + [1] * len(scores["unknown"])
        false, true, _ = roc_curve(truth, torch.cat([scores["test"], scores["unknown"]]).tolist())
        area = auroc(scores["test"], scores["unknown"])
        axes.plot(false, true, line, color=color, lw=1.8, label=f"{label}\nAUROC {area:.3f}")
    axes.plot([0, 1], [0, 1], color=GRAY, lw=0.8)
    axes.set(
        xlim=(-0.01, 1), ylim=(0, 1.01), aspect="equal", xlabel="known digits flagged", ylabel="unknown digits flagged"
    )
    axes.set_title("Telling 7, 8, 9 from 0 to 6")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PercentFormatter(1))
    axes.legend(loc="lower right")
    certain = doubt["unknown"].argsort()[:8]
    rank = torch.searchsorted(run["spread"]["test"].sort().values, run["spread"]["unknown"]) / len(doubt["test"])
    for i, image in zip(certain.tolist(), right.subplots(2, 4).flat, strict=True):
        image.imshow(run["data"].unknown[i].reshape(8, 8), cmap="gray_r")
        image.set(xticks=[], yticks=[])
        image.spines[:].set_visible(False)
        guess = int(run["probs"]["MAP"]["unknown"][i].argmax())
        image.set_title(f"“{guess}”: {1 - float(doubt['unknown'][i]):.1%}", color=VERMILION, fontsize=9, loc="center")
        image.set_xlabel(f"above {float(rank[i]):.0%}\nof known", color=BLUE, fontsize=9)
    right.suptitle("The unknown digits that MAP is surest of", x=0.02, ha="left", fontsize=11, fontweight="bold")
    right.supxlabel("MAP’s label and confidence; below, the rank of the epistemic variance", fontsize=9, color=GRAY)
    return figure


def evidence(results: dict) -> plt.Figure:
    """log evidence over the prior precision, all else as tuned."""
    figure, panels = plt.subplots(1, 2, figsize=(8.6, 3.5), layout="constrained")
    names = {"digits": "Digits, 64-30-30-7", "wines": "Wines, 1-50-50-1"}
    for axes, (name, title) in zip(panels, names.items(), strict=True):
        before, after = results[name]["before"], results[name]["after"]
        best, start = float(after.prior.precision), float(before.prior.precision)
        grid = torch.logspace(-1, 1, 61, dtype=torch.float64) * best
        with torch.no_grad():
            values = torch.stack([after.log_evidence(prior=float(v)) for v in grid])
            top, at_start = float(after.log_evidence()), float(after.log_evidence(prior=start))
        axes.plot(grid, values, color=BLACK, lw=1.6)
        axes.plot(start, at_start, "s", color=VERMILION, ms=6, label=f"trained with λ = {start:g}")
        axes.plot(best, top, "o", color=BLUE, ms=7, label=f"tuned: λ = {best:.2f}")
        axes.axvline(best, color=BLUE, lw=0.8, ls=":")
        low = float(values.min())
        axes.set(
            xscale="log",
            title=title,
            xlabel="prior precision λ",
            ylim=(low - 0.05 * (top - low), top + 0.12 * (top - low)),
        )
        axes.xaxis.set_major_formatter(FormatStrFormatter("%g"))
        axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.legend(loc="lower left")
    panels[0].set_ylabel("log evidence (nats)")
    return figure
