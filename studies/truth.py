"""Which approximate posterior predicts as Hamiltonian Monte Carlo does, and which predicts labels together?

    python studies/truth.py [--part choose score joint] [--cases regression moons digits] [--seeds 0 1 2]
    python studies/truth.py --table

Each method on each problem and seed is scored once: its line goes to out/truth.jsonl, references to out/truth, and a
run leaves out what is there. `choose` tries the settings of methods on seed 9 (data, network and chains), and takes
those nearest to the reference, of which no chain diverged; `score` scores other seeds by them; `joint` (LAPWING_DATA
has fashion_mnist.npz) is of labels together. `--table` brings all lines, and those of the record that were not run
again, into `results/truth.json`, and writes the tables and the figure of `docs/studies/truth.md`.
`_truth_problems.py` has problems and methods, `_truth_joint.py` the second part,
`_truth_page.py` the tables.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import time
import warnings
from functools import lru_cache, partial
from operator import itemgetter
from typing import Any

import torch
from _truth_joint import joint
from _truth_page import RESULTS, stopped, write
from _truth_problems import CASES, PRIOR, TRIED, Case, Method, trained

import lapwing as lw
from lapwing.truth import Bench, Problem, Trial

ROOT = pathlib.Path(__file__).parents[1]
LINES, CACHE = ROOT / "out" / "truth.jsonl", ROOT / "out" / "truth"
CHOICE, SEEDS = 9, [0, 1, 2]  # the seed that settings are chosen on, and those that are scored
JOINT_SEEDS = 2
Row = dict[str, Any]


def stored() -> dict[str, Row]:
    """All lines, by key."""
    text = LINES.read_text().splitlines() if LINES.is_file() else []
    return {one["key"]: one for one in map(json.loads, text)}


def recorded() -> list[Row]:
    """All lines, and of the record what they are not of: it travels with the repository, lines do not."""
    mine, about = list(stored().values()), itemgetter("case", "seed", "method")
    old = json.loads(RESULTS.read_text())["lines"] if RESULTS.is_file() else []
    return [*(one for one in old if about(one) not in set(map(about, mine))), *mine]


def keep(key: str, line: Row) -> None:
    LINES.parent.mkdir(exist_ok=True)
    with LINES.open("a") as file:
        file.write(json.dumps({"key": key, **line}) + "\n")
    figures = {k: v for k, v in (line["row"] or {}).items() if k in ("variation", "agreement", "nll", "epochs")}
    print(key, *(f"{k} {v:.4g}" for k, v in figures.items()), line.get("error", ""), f"{line['cpu']:.1f} s", flush=True)


@lru_cache(maxsize=1)
def bench(name: str, seed: int) -> tuple[Case, Bench]:
    """A problem with its reference; a classifier's yardstick is ten networks."""
    case = CASES[name](seed)
    problem = Problem(trained(case, seed), case.train, case.likelihood, PRIOR, seed)
    yardstick = None
    if case.classes and seed != CHOICE:
        told = {"members": 10, "steps": 1_000, "prior": PRIOR, "generator": torch.Generator().manual_seed(seed + 1_000)}
        yardstick = lw.ensembles.train(case.network, case.train, case.likelihood, **told)
    return case, Bench(problem, {**case.reference, "start": "prior"}, case.test, case.unknown, yardstick, CACHE)


def run(name: str, seed: int, method: str, setting: Any = None) -> None:
    """A line, unless it is there; of the reference for the method "HMC"."""
    key = f"{name}/{seed}/{method}" + ("" if setting is None else f"/{setting}")
    if key in stored():
        return
    start, about = time.process_time(), {"case": name, "seed": seed, "method": method, "setting": setting}
    row, more = None, {}
    try:
        case, held = bench(name, seed)
        if method == "HMC":
            row, more = held.reference_row(), {"convergence": vars(held.convergence)}
        else:
            tried = TRIED[method]
            start = time.process_time()
            found: list[Trial] = []
            row = held.row(method, lambda problem: found.append(tried.run(problem, case, setting)) or found[0])
            more = {"chains": list(getattr(found[0].fit.posterior, "lengths", []))}
    except (lw.errors.NotConverged, lw.errors.InvalidValue, ValueError, RuntimeError) as error:
        more = {"error": f"{type(error).__name__}: {error}"}
    keep(key, {**about, "row": row, **more, "cpu": round(time.process_time() - start, 1)})


def methods_of(name: str) -> dict[str, Method]:
    return {k: m for k, m in TRIED.items() if name != "regression" or not m.classes}


def chosen(known: list[Row], name: str, method: str) -> tuple[bool, Any]:
    """Whether there is a choice yet, and the setting nearest to the reference on the seed of choices."""
    of = TRIED[method].same or method
    if TRIED[of].settings == (None,):
        return True, None
    lines = [one for one in known if (one["case"], one["seed"], one["method"]) == (name, CHOICE, of)]
    fine = [one for one in lines if one["row"] and math.isfinite(one["row"]["variation"]) and not stopped(one)]
    if len(lines) < len(TRIED[of].settings) or not fine:
        return False, None
    return True, min(fine, key=lambda one: one["row"]["variation"])["setting"]


def choose(names: list[str]) -> None:
    for name in names:
        run(name, CHOICE, "HMC")
        for method, tried in methods_of(name).items():
            for setting in () if tried.settings == (None,) else tried.settings:
                run(name, CHOICE, method, setting)


def score(names: list[str], seeds: list[int]) -> None:
    """Methods whose settings are chosen, or that have none."""
    for seed in seeds:
        for name in names:
            run(name, seed, "HMC")
            for method in methods_of(name):
                key = f"{name}/{seed}/{method}"
                if any(k == key or k.startswith(f"{key}/") for k in stored()):
                    continue
                known, setting = chosen(list(stored().values()), name, method)
                if known:
                    run(name, seed, method, setting)
                else:
                    print(f"{key}: left out, no setting has been chosen; run --part choose", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=("choose", "score", "joint"), default=["choose", "score", "joint"])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--table", action="store_true", help="nothing is run: the record and the page of what there is")
    args = parser.parse_args()
    if CHOICE in args.seeds:
        parser.error(f"seed {CHOICE} is that of the choices; score others")
    if args.table:
        return write(recorded(), CHOICE, partial(chosen, recorded()))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # diverged chains are counted, and priors that the evidence picks are meant
    if "choose" in args.part:
        choose(args.cases)
    if "score" in args.part:
        score(args.cases, args.seeds)
    if "joint" in args.part:
        joint(CHOICE, args.seeds[:JOINT_SEEDS], stored, keep)


if __name__ == "__main__":
    main()
