"""The default for classifiers beside the network it was given, and beside what else a user could do.

    LAPWING_DATA=<folder> python studies/classifiers.py [--part small uci images resnets] [--seeds 10 11 12]
    python studies/classifiers.py --table

Each network is scored once: its line goes to out/classifiers.jsonl, and a run leaves out what is there or in the
record, `results/classifiers.json`. Several runs may write at once. `--table` brings the lines into the record, whose
rows get the seeds that they do not have, and writes the tables of `docs/studies/classifiers.md` anew. A row whose
seeds are all in the lines is made of these alone: so a change of the rule is scored with `--again`.

`_classifiers_networks.py` has networks, `_classifiers_columns.py` columns, `_classifiers_rows.py` what makes a row.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import time
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import torch
from _classifiers_columns import COLUMNS, FEWER, LABELLED, RIVALS, scored
from _classifiers_networks import DEPTHS, PARTS, SEEDS, Unit, problem, units
from _classifiers_rows import MEASURES, Row, rows_of, seeds_of
from left_out import line, short

import lapwing as lw

from _common import machine, versions  # isort: skip  (benchmarks/, which left_out puts on the path)

HERE = pathlib.Path(__file__).parent
LINES = HERE.parent / "out" / "classifiers.jsonl"
RESULTS, PAGE = HERE / "results" / "classifiers.json", HERE.parent / "docs" / "studies" / "classifiers.md"
SMALL = ("small", "uci")
WITH_RIVALS = {"small": (13,), "uci": (13, 14), "images": (11,), "moons": (40, 41)}  # seeds
WITHOUT = {  # columns that cannot be had, or take half a minute of CPU and more
    **dict.fromkeys(("digits150", "digits300", "digits700"), ("variational",)),
    "uci": ("views", "variational"),
    "satellite": ("process", "mixture", "validation"),
    "moons": ("views", "temperature", "validation", "variational"),
    "images": ("process", "mixture", "validation", "variational"),
}
NAMES = {"joint": "joint, κ = 5"}
BARS = {"ResNet-20": 0.2275, "ResNet-32": 0.2120, "ResNet-44": 0.1980, "ResNet-56": 0.1850}  # NLL of the default
ECE_BAR = 0.012

# -- scores -------------------------------------------------------------------------------------------------------


def stored() -> list[Row]:
    """The lines of all networks that were scored."""
    return [json.loads(one) for one in LINES.read_text().splitlines()] if LINES.is_file() else []


def recorded() -> Row:
    """The record, or an empty one."""
    return json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"cpu_seconds": 0, "rows": []}


def wanted(unit: Unit) -> tuple[str, ...]:
    """Columns of a network; rivals for some seeds of a row."""
    if unit.part == "resnets":
        return (*FEWER, LABELLED)
    if unit.train > 10_000:
        return FEWER
    columns = COLUMNS + (RIVALS if unit.seed in WITH_RIVALS[unit.part] else ())
    without = (*WITHOUT.get(unit.part, ()), *WITHOUT.get(unit.set, ()))
    return tuple(c for c in columns if c not in without)


def missing(todo: list[Unit], lines: list[Row], rows: list[Row]) -> Iterator[tuple[Unit, tuple[str, ...]]]:
    """Networks with columns that neither lines nor the record have; with rivals go the columns they are held to."""
    known = {(row["name"], c, seed) for row in rows for c in row["columns"] for seed in seeds_of(row, c)}
    known |= {(", ".join(one["row"]), c, one["seed"]) for one in lines for c in one["columns"]}
    for unit in todo:
        columns = wanted(unit)
        left = tuple(c for c in columns if (", ".join(unit.row[1:]), c, unit.seed) not in known)
        if left:
            beside = tuple(c for c in ("network", "default") if c not in left and set(left) & set(RIVALS))
            yield unit, (*beside, *left)


def run(unit: Unit, columns: tuple[str, ...]) -> Row:
    """A network scored."""
    wall, cpu = time.perf_counter(), time.process_time()
    found = scored(problem(unit), columns)
    seconds = {"wall": round(time.perf_counter() - wall, 1), "cpu": round(time.process_time() - cpu, 1)}
    about = {"key": unit.key, "part": unit.part, "set": unit.set, "kind": unit.kind, "row": list(unit.row[1:])}
    return {**about, "regime": unit.regime, "seed": unit.seed, **found, "seconds": seconds}


def runs(todo: list[Unit], limit: int | None, again: bool) -> None:
    """A line each, in the file and on the screen."""
    some = list(missing(todo, stored(), [] if again else recorded()["rows"]))[:limit]
    LINES.parent.mkdir(exist_ok=True)
    for i, (unit, columns) in enumerate(some, 1):
        found = run(unit, columns)
        with LINES.open("a") as file:
            file.write(json.dumps(found) + "\n")
        cells = (f"{c} {s['nll']:.3f}" for c, s in found["columns"].items())
        took = f"{found['seconds']['wall']:.0f} s, {found['seconds']['cpu']:.0f} s of CPU"
        print(f"{i}/{len(some)} {unit.key}: {took}; NLL", *cells, flush=True)


# -- tables -------------------------------------------------------------------------------------------------------


def head(*names: str) -> list[str]:
    return [line(names), "|---" + "|--:" * (len(names) - 1) + "|"]


def cell(row: Row, column: str, what: str = "nll") -> str:
    """A figure; * above the network, † of fewer seeds than the row."""
    found = row["columns"].get(column)
    if found is None or found.get(what) is None:
        return ""
    fewer = "†" if len(seeds_of(row, column)) < len(row["seeds"]) else ""
    return short(found[what], 3) + ("*" if what == "nll" and found["above"] else "") + fewer


def each(rows: list[Row]) -> list[str]:
    """NLL, a line a row."""
    return [*head("networks", *COLUMNS), *(line((r["name"], *(cell(r, c) for c in COLUMNS))) for r in rows)]


def means(some: list[Row], what: str = "nll") -> list[str]:
    """Of rows that have all columns."""
    return [short(float(np.mean([r["columns"][c][what] for r in some])), 3) for c in COLUMNS]


def grouped(rows: list[Row]) -> list[str]:
    """Means of NLL by set and network, and by regime."""
    out = head("networks", "rows", *COLUMNS)
    keys: tuple[Callable[[Row], str], ...] = (lambda r: f"{r['set']}, {r['kind']}", lambda r: f"*{r['regime']}*")
    for key in keys:
        for name in dict.fromkeys(map(key, rows)):
            some = [r for r in rows if key(r) == name]
            out.append(line((name, len(some), *means(some))))
    return out


def summary(rows: list[Row]) -> list[str]:
    """Of small data: means of all measures, and how many rows are worse than the network."""
    out = head("small data", *COLUMNS)
    fresh = [r for r in rows if r["seen by"] != "this rule"]
    for words, some in (("sets that had no say", fresh), ("all sets", rows)):
        if not some:
            continue
        for what in ("nll", "ece", "brier", "accuracy", "joint"):
            out.append(line((f"{words}, {len(some)} rows: {NAMES.get(what, what)}", *means(some, what))))
        for what in ("above", "less accurate"):
            out.append(line((f"{words}: rows {what}", *(sum(r["columns"][c][what] for r in some) for c in COLUMNS))))
    return out


def rivals(rows: list[Row]) -> list[str]:
    """NLL, means over the rows that have a column, beside the network and the default on the same networks."""
    out = head(
        "column", "rows", "networks", "network", "column", "default", "above the network", "below the default", "s"
    )
    for column in (*COLUMNS[1:-1], *RIVALS, COLUMNS[-1]):
        some = [(r["columns"][column], r) for r in rows if column in r["columns"]]
        if not some:
            continue
        own = [c["nll"] for c, _ in some]
        network = [c["nll"] - c["nll − network"] for c, _ in some]
        default = [c.get("default", r["columns"]["default"]["nll"]) for c, r in some]
        figures = (short(float(np.mean(v)), 3) for v in (network, own, default))
        lower = sum(a < b for a, b in zip(own, default, strict=True))
        seconds = [sum(c["seconds"].values()) for c, _ in some if len(c["seconds"]) > 1]
        cost = f"{np.mean(seconds):.1f}" if seconds else ""
        count = sum(len(seeds_of(r, column)) for _, r in some)
        out.append(line((column, len(some), count, *figures, sum(c["above"] for c, _ in some), lower, cost)))
    return out


def measures(rows: list[Row]) -> list[str]:
    """Of images: what is not NLL."""
    out = head("networks", "", *COLUMNS)
    for row in rows:
        for what in MEASURES[1:]:
            if row["columns"]["network"].get(what) is not None:
                out.append(line((row["name"], NAMES.get(what, what), *(cell(row, c, what) for c in COLUMNS))))
    return out


def cost_group(row: Row) -> str:
    """Networks that cost about the same."""
    size = row["name"].rsplit(", ", 1)[1]
    return {"images": f"{row['set']}, {size}", "resnets": row["kind"]}.get(row["part"], row["part"])


def costs(rows: list[Row]) -> list[str]:
    """CPU seconds of one network, means over rows."""
    phases, columns = ("fit", "tune", "predict"), ("default", "last layer")
    out = head("CPU seconds", *(f"{c}: {phase}" for c in columns for phase in phases))
    for name in dict.fromkeys(map(cost_group, rows)):
        some = [r["columns"] for r in rows if cost_group(r) == name]
        figures = (np.mean([r[c]["seconds"][phase] for r in some]) for c in columns for phase in phases)
        out.append(line((name, *(f"{v:.2f}" for v in figures))))
    return out


def worse(rows: list[Row]) -> list[str]:
    """Rows in which the default is worse than the network, with the figures."""

    def listed(what: str, of: str) -> str:
        found = [(r["name"], r["columns"]["default"]) for r in rows if r["columns"]["default"][what]]
        figures = (f"{name} ({c[f'{of} − network']:+.2g} ± {c[f'{of} error']:.2g})" for name, c in found)
        return "; ".join(figures) or "none"

    return [
        f"- Rows in which the default is above the network: {listed('above', 'nll')}.",
        f"- Above by two standard errors and at most 10⁻⁴ nats, which does not count: {listed('within', 'nll')}.",
        f"- Rows in which it is less accurate: {listed('less accurate', 'accuracy')}.",
    ]


def bars(rows: list[Row]) -> list[str]:
    """The default on CIFAR-10 beside what was asked of it. Errors: of an NLL or ECE itself, over test images; of the
    difference to the temperature, paired, on the images that it was not chosen by; there, too, the default whose scale
    the labels of the temperature choose."""
    out = head(
        "default on CIFAR-10", "scored", "NLL", "bar", "", "ECE", "bar", "", "NLL − temperature's", "with labels"
    )
    for kind, bar in BARS.items():
        some = [r for r in rows if r["part"] == "resnets" and r["kind"] == kind]
        if not some:
            out.append(
                line((kind, "none", "", short(bar, 4), "not scored", "", short(ECE_BAR, 4), "not scored", "", ""))
            )
        for row in some:
            c, words = row["columns"]["default"], ("missed", "met")
            nll, ece = (f"{short(c[what], 4)} ± {short(c[f'{what} spread'], 4)}" for what in ("nll", "ece"))
            verdicts = (words[c["nll"] <= bar], words[c["ece"] <= ECE_BAR])
            mean, error = c["beside temperature"]
            chosen = row["columns"].get(LABELLED)
            beside = "" if chosen is None else f"{short(chosen['nll'], 4)}, ECE {short(chosen['ece'], 4)}"
            cells = (nll, short(bar, 4), verdicts[0], ece, short(ECE_BAR, 4), verdicts[1], f"{mean:+.4f} ± {error:.4f}")
            name = row["name"].removeprefix("CIFAR-10, ").replace(", published", "").rpartition(", ")[0]
            out.append(line((name, f"{row['n_test']:,}", *cells, beside)))
    return out


def counts(rows: list[Row]) -> list[str]:
    """Networks and seeds of each part."""
    out = []
    for part in dict.fromkeys(r["part"] for r in rows):
        some = [r["seeds"] for r in rows if r["part"] == part]
        seeds = sorted({seed for row in some for seed in row})
        of = "" if part == "resnets" else f", seeds {', '.join(map(str, seeds))}"
        fewer = sum(len(row) < len(seeds) for row in some)
        of += f"; {fewer} rows have fewer" if fewer else ""
        out.append(f"- *{part}*: {len(some)} rows, {sum(map(len, some))} networks{of}.")
    return out


def tables(rows: list[Row]) -> list[str]:
    """Fresh sets first."""
    if not rows:
        return ["No network has been scored yet."]
    unseen, fresh, others = ([r for r in rows if r["seen by"] == who] for who in ("nobody", "other rules", "this rule"))
    small, large = ([r for r in rows if r["part"] in parts] for parts in (SMALL, ("images", "resnets")))
    few = [r for r in rows if r["part"] == "images" and "softmax" in r["columns"]]
    made = (
        ("Worse than the network", worse(rows)),
        ("Bars of CIFAR-10", bars(rows)),
        ("Scored", counts(rows)),
        ("NLL where no trial has looked", each(unseen) if unseen else []),
        ("NLL where trials of other rules have looked", each(fresh) if fresh else []),
        ("Small data in sum", summary(small) if small else []),
        ("Rivals, small data", rivals(small) if small else []),
        ("Rivals, 2,000 images", rivals(few) if few else []),
        ("Rivals, two moons", rivals(some) if (some := [r for r in rows if r["part"] == "moons"]) else []),
        ("NLL of small data that had a say", grouped(some) if (some := [r for r in small if r in others]) else []),
        ("NLL of images that had a say", each(some) if (some := [r for r in large if r in others]) else []),
        ("Images, other measures", measures(large) if large else []),
        ("Cost", costs(rows)),
    )
    return [text for title, body in made if body for text in (f"### {title}", "", *body, "")]


def fresh(one: Row, there: set[tuple[str, str, int]]) -> bool:
    """Whether a line has something that the record has not: its time is counted then."""
    return any((", ".join(one["row"]), c, one["seed"]) not in there for c in one["columns"])


def write(lines: list[Row]) -> None:
    """The record, and its tables in the page. What the record has stays, unless all its seeds were scored anew."""
    old = recorded()
    rows = rows_of(lines, old["rows"])
    there = {(row["name"], c, seed) for row in old["rows"] for c in row["columns"] for seed in seeds_of(row, c)}
    added = sum(one["seconds"]["cpu"] for one in lines if fresh(one, there))
    record = {"date": datetime.date.today().isoformat(), "machine": machine(), "versions": versions("torch", "lapwing")}
    count, cpu = sum(len(row["seeds"]) for row in rows), round(old["cpu_seconds"] + added)
    head = json.dumps({**record, "networks": count, "cpu_seconds": cpu}, indent=1).removesuffix("\n}")
    body = ",\n".join(map(json.dumps, rows))  # a row a line
    RESULTS.write_text(f'{head},\n "rows": [\n{body}\n ]\n}}\n')
    before, _, rest = PAGE.read_text().partition("<!-- tables -->\n")
    after = rest.partition("<!-- end of tables -->\n")[2]
    text = "\n".join(tables(rows)).rstrip("\n") + "\n"
    PAGE.write_text(f"{before}<!-- tables -->\n{text}<!-- end of tables -->\n{after}")
    print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--seeds", nargs="+", type=int, help="in place of those of the record")
    parser.add_argument("--depth", nargs="+", type=int, choices=DEPTHS, default=DEPTHS, help="of ResNets")
    parser.add_argument("--images", type=int, default=2_500, help="of CIFAR-10, for curvature")
    parser.add_argument("--test", type=int, default=2_000, help="of CIFAR-10's test images, that are scored")
    parser.add_argument("--limit", type=int, help="networks, in this run")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--again", action="store_true", help="also what the record has")
    parser.add_argument("--table", action="store_true", help="no networks: the record and the page of what there is")
    args = parser.parse_args()
    if args.table:
        return write(stored())
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore", lw.errors.LapwingWarning)  # of tuning at the trained weights, which is meant
    some = (tuple(args.depth), args.images, args.test)
    todo = [unit for part in args.part for unit in units(part, tuple(args.seeds or SEEDS[part]), *some)]
    runs(todo, args.limit, args.again)


if __name__ == "__main__":
    main()
