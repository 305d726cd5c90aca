"""The record, tables and figure of the truth study, from the lines that `truth.py` and `_truth_joint.py` wrote."""

from __future__ import annotations

import datetime
import json
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
from _truth_joint import KAPPAS, NAME, POSTERIORS
from _truth_problems import CASES, DRAWS, TRIED
from left_out import line, short

from lapwing.truth import Convergence, TruthBench

from _common import machine, versions  # isort: skip  (benchmarks/, which left_out puts on the path)

ROOT = pathlib.Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "studies" / "results" / "truth.json", ROOT / "docs" / "studies" / "truth.md"
FIGURE = ROOT / "docs" / "studies" / "figures" / "truth.png"
CLASSES = ("accuracy", "agreement", "variation", "nll", "ece", "members", "ood")
VALUES = ("rmse", "variation", "nll", "coverage", "ood")
WORDS = {"variation": "total variation", "nll": "NLL", "ece": "ECE", "rmse": "RMSE", "ood": "AUROC of unknown inputs"}
DIGITS = {"members": 1, "joint 5": 2}
Row = dict[str, Any]
# Izmailov et al., ICML 2021: ResNet-20 on CIFAR-10, HMC on 512 TPUs; accuracy, agreement, total variation
PUBLISHED = {
    "HMC": (0.8964, 0.9401, 0.074),
    "SGLD": (0.8932, 0.9154, 0.110),
    "SGHMC": (0.8938, 0.9198, 0.109),
    "SGHMC, cyclical": (0.8963, 0.9267, 0.099),
    "SGHMC, cyclical, preconditioned": (0.8746, 0.9096, 0.111),
    "mean-field VI": (0.8645, 0.8875, 0.136),
}
HUGE = 1e6
PUBLISHED_JOINT = {  # ResNet-18 on CIFAR-100
    "MAP": (-1.40, -13.97, -27.89, -41.83, -55.89),
    "ensemble of 5": (-0.90, -6.86, -14.17, -22.29, -31.07),
}


def head(*names: str) -> list[str]:
    return [line(names), "|---" + "|--:" * (len(names) - 1) + "|"]


def pooled(lines: list[Row]) -> Row:
    """Means over seeds, and half of the range."""
    keys = dict.fromkeys(key for one in lines for key in one["row"])
    values = {key: np.array([one["row"][key] for one in lines if key in one["row"]]) for key in keys}
    return {key: (float(v.mean()), float(v.max() - v.min()) / 2) for key, v in values.items()}


def by_method(lines: list[Row], case: str, choice: int) -> dict[str, list[Row]]:
    """Lines of a case's scored seeds, {method: lines}, in the order of the methods."""
    mine = [one for one in lines if one["case"] == case and one["seed"] != choice]
    names = [name for name in ("HMC", *TRIED, *POSTERIORS) if any(one["method"] == name for one in mine)]
    return {name: [one for one in mine if one["method"] == name] for name in dict.fromkeys(names)}


def stopped(one: Row) -> int:
    """How many chains of a walk diverged."""
    return sum(n < DRAWS for n in one.get("chains", ()))


def cell(row: Row, key: str) -> str:
    if key not in row:
        return ""
    mean, half = row[key]
    digits = DIGITS.get(key, 3)
    if not np.isfinite(mean):
        return "> 10" if key == "members" else "inf"
    if abs(mean) > HUGE:  # of a walk that went off
        return f"{mean:.0e}"
    return short(mean, digits) + (f" ± {short(half, digits)}" if key == "variation" else "")


def cost(row: Row, reference: float) -> str:
    """In shares of the reference's gradient epochs."""
    if "epochs" not in row:
        return ""
    return "0" if not row["epochs"][0] else f"1/{reference / row['epochs'][0]:,.0f}"


def table(lines: list[Row], case: str, choice: int) -> list[str]:
    """Of one problem, a line a method."""
    found = by_method(lines, case, choice)
    if not found:
        return ["Not scored."]
    columns = VALUES if case == "regression" else CLASSES
    hmc = pooled([one for one in found["HMC"] if one["row"]])
    out = head("method", *(WORDS.get(c, c) for c in columns), "joint, κ = 5", "cost / HMC's")
    for name, some in found.items():
        fine = [one for one in some if one["row"]]
        row = pooled(fine) if fine else {}
        failed = "" if len(fine) == len(some) else f" ({len(some) - len(fine)} of {len(some)} seeds failed)"
        if lost := sum(stopped(one) for one in fine):
            failed += f" ({lost} of {sum(len(one['chains']) for one in fine)} chains diverged)"
        shown = "HMC, half of its chains to the others" if name == "HMC" else name
        share = cost(row, hmc["epochs"][0]) if fine else ""
        out.append(line((shown + failed, *(cell(row, c) for c in (*columns, "joint 5")), share)))
    return out


def references(lines: list[Row]) -> list[str]:
    """Whether they have converged."""
    out = head("reference", "seed", "chains", "draws of each", "gradient epochs", "largest R-hat", "least ESS", "CPU s")
    for one in lines:
        if one["method"] == "HMC":
            c = one.get("convergence")
            told = ("refused: " + one["error"],) if c is None else (c["chains"], c["draws"], f"{c['epochs']:,.0f}")
            more = () if c is None else (f"{c['rhat']:.3f}", f"{c['ess']:,.0f}", f"{one['cpu']:.0f}")
            out.append(line((one["case"], one["seed"], *told, *more)))
    return out


def settings(lines: list[Row], choice: int, chosen: Callable[[str, str], tuple[bool, Any]]) -> list[str]:
    """What was chosen on the seed of choices, of how many that were tried."""
    out = head("method", *CASES)
    for name, tried in TRIED.items():
        if tried.settings != (None,) and not tried.same:
            cells = []
            for case in CASES:
                some = [one for one in lines if (one["case"], one["seed"], one["method"]) == (case, choice, name)]
                known, setting = chosen(case, name)
                cells.append(f"{setting} of {len(some)}" if known else "not chosen")
            out.append(line((name, *(c.replace("'", "") for c in cells))))
    return out


def together(lines: list[Row], choice: int) -> list[str]:
    """Joint log-likelihoods, ours and the published ones, clearly apart."""
    out = head("method", "accuracy", "NLL", "ECE", *(f"κ = {k}" for k in KAPPAS))
    found = by_method(lines, NAME, choice)
    for name, some in found.items():
        row = pooled(some)
        marks = (cell(row, key) for key in ("accuracy", "nll", "ece"))
        out.append(line((name, *marks, *(f"{row[f'joint {k}'][0]:.2f}" for k in KAPPAS))))
    for name, values in PUBLISHED_JOINT.items():
        out.append(line((f"*published, ResNet-18 on CIFAR-100: {name}*", "", "", "", *(f"*{v:.2f}*" for v in values))))
    return out


def published() -> list[str]:
    out = head("published: ResNet-20 on CIFAR-10 (Izmailov et al. 2021)", "accuracy", "agreement", "total variation")
    return [*out, *(line((name, *(short(v, 3) for v in values))) for name, values in PUBLISHED.items())]


def figure(lines: list[Row], choice: int) -> None:
    """Total variation with its cost, a panel a problem: means over seeds."""
    from matplotlib import pyplot as plt

    done = [case for case in CASES if "HMC" in by_method(lines, case, choice)]
    if not done:
        return
    fig, panels = plt.subplots(1, len(done), figsize=(6.5 * len(done), 5.5), squeeze=False)
    for ax, case in zip(panels[0], done, strict=True):
        means(by_method(lines, case, choice)).plot(ax)
        ax.set_title(case)
    fig.tight_layout()
    FIGURE.parent.mkdir(exist_ok=True)
    fig.savefig(FIGURE, dpi=110)
    plt.close(fig)


def means(found: dict[str, list[Row]]) -> TruthBench:
    """Of the seeds that were scored."""
    rows = {}
    for name, some in found.items():
        if fine := [one for one in some if one["row"]]:
            rows["hmc" if name == "HMC" else name] = {key: value for key, (value, _) in pooled(fine).items()}
    return TruthBench(rows, Convergence(**found["HMC"][0]["convergence"]))


def write(lines: list[Row], choice: int, chosen: Callable[[str, str], tuple[bool, Any]]) -> None:
    """The record, the page's tables and its figure."""
    record = {"date": datetime.date.today().isoformat(), "machine": machine(), "versions": versions("torch", "lapwing")}
    cpu = round(sum(one["cpu"] for one in lines))
    RESULTS.write_text(json.dumps({**record, "cpu_seconds": cpu, "lines": lines}, indent=1) + "\n")
    figure(lines, choice)
    made = {
        **{f"{case.capitalize()}": table(lines, case, choice) for case in CASES},
        "Published": published(),
        "Together": together(lines, choice),
        "References": references(lines),
        "Settings": settings(lines, choice, chosen),
    }
    text = "\n".join(part for title, body in made.items() for part in (f"### {title}", "", *body, ""))
    before, _, rest = PAGE.read_text().partition("<!-- tables -->\n")
    after = rest.partition("<!-- end of tables -->\n")[2]
    PAGE.write_text(f"{before}<!-- tables -->\n{text}<!-- end of tables -->\n{after}")
    print(text)
