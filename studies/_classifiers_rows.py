"""Rows of `classifiers.py`: all seeds of one set, kind of network and way to train it.

d_n is the loss of a column at a test example less that of the network, N examples in all seeds. A row is above the
network if

    mean d > 2 sd(d)/√N   and   mean d > 10⁻⁴ nats

and less accurate if its hits are fewer by two standard errors of the paired difference. Means and errors of some seeds,
with N, are enough to add others: a row of the record and lines of other networks make the row of all.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from _classifiers_columns import COLUMNS, LABELLED, RIVALS
from _classifiers_networks import PARTS

LEAST = 1e-4  # nats that count
FRESH = {  # sets or networks, and who saw their test labels before; others had a say in this rule
    **dict.fromkeys(("satellite", "ResNet-32", "ResNet-44", "ResNet-56"), "nobody"),
    **dict.fromkeys(("moons100", "moons60", "australian", "breast_cancer", "ionosphere", "waveform"), "other rules"),
}
MEASURES = ("nll", "ece", "brier", "accuracy", "auroc", "joint")
Row = dict[str, Any]


def pooled(parts: list[tuple[int, float, float]]) -> tuple[float, float]:
    """Mean and its standard error over all examples, from (n, mean, variance) of each seed."""
    n, means, variances = (np.array(column) for column in zip(*parts, strict=True))
    mean = float((n * means).sum() / n.sum())
    squares = ((n - 1) * variances + n * (means - mean) ** 2).sum()
    return mean, math.sqrt(squares / (n.sum() - 1) / n.sum())


def seeds_of(row: Row, column: str) -> list[int]:
    """Of a column in the record."""
    return row["columns"][column].get("seeds", row["seeds"])


def of_record(row: Row, column: str) -> Row:
    """A column of the record as if it were of one network, with all its test examples."""
    found = row["columns"][column]
    n = found.get("n", row["n_test"])
    pairs = {what: [found[f"{what} − network"], found[f"{what} error"] ** 2 * n] for what in ("nll", "accuracy")}
    return {**found, "n": n, "seeds": seeds_of(row, column), "difference": pairs}


def of_line(one: Row, column: str) -> Row:
    """A column of one network; of a rival, with the loss of the default on that network."""
    found = {**one["columns"][column], "seeds": [one["seed"]]}
    if column in RIVALS:
        found["default"] = one["columns"]["default"]["nll"]
    if "beside temperature" in found:
        found["beside temperature"] = pooled([tuple(found["beside temperature"])])
    return found


def parts_of(column: str, old: Row | None, lines: list[Row]) -> list[Row]:
    """What a column of a row is made of: of the record and of lines with other seeds; of lines alone, where they have
    all seeds of the record."""
    new = {one["seed"]: of_line(one, column) for one in lines if column in one["columns"]}
    if old is None or column not in old["columns"] or set(seeds_of(old, column)) <= set(new):
        return [new[seed] for seed in sorted(new)]
    before = of_record(old, column)
    return [before, *(new[seed] for seed in sorted(new) if seed not in before["seeds"])]


def pooled_column(found: list[Row]) -> Row:
    """Means over networks, weighted by test examples, and paired differences to the network."""
    n, seeds = [one["n"] for one in found], [len(one["seeds"]) for one in found]
    row: Row = {**dict.fromkeys(MEASURES), "n": sum(n), "seeds": [seed for one in found for seed in one["seeds"]]}
    kept = [what for what in (*MEASURES, "default") if found[0].get(what) is not None]
    row |= {what: float(np.average([one[what] for one in found], weights=n)) for what in kept}
    for what in ("nll", "ece"):  # one network's spread over draws of test inputs, of the mean of several
        squares = [(count * one[f"{what} spread"]) ** 2 for count, one in zip(n, found, strict=True)]
        row[f"{what} spread"] = math.sqrt(sum(squares)) / sum(n)
    if len(found) == 1 and "beside temperature" in found[0]:  # of ResNets, which have no seeds
        row["beside temperature"] = found[0]["beside temperature"]
    phases = set.intersection(*(set(one["seconds"]) for one in found))  # the posterior without its rule may have none
    times = {key: [one["seconds"][key] for one in found] for key in sorted(phases)}
    row["seconds"] = {key: float(np.average(each, weights=seeds)) for key, each in times.items()}
    for what in ("nll", "accuracy"):
        sums = [(count, *one["difference"][what]) for count, one in zip(n, found, strict=True)]
        row[f"{what} − network"], row[f"{what} error"] = pooled(sums)
    d, error = row["nll − network"], row["nll error"]
    row["within"] = 2 * error < d <= LEAST
    row["above"] = d > max(2 * error, LEAST)
    row["less accurate"] = -row["accuracy − network"] > 2 * row["accuracy error"]
    return row


def rows_of(lines: list[Row], record: list[Row]) -> list[Row]:
    """Networks that differ by their seed alone, as one, in the order of the parts; rows of the record get the seeds of
    lines that they do not have."""
    old, new = {row["name"]: row for row in record}, {}
    for one in lines:
        new.setdefault(", ".join(one["row"]), []).append(one)
    rows = old | {name: joined(name, old.get(name), some) for name, some in new.items()}
    return sorted(rows.values(), key=lambda row: PARTS.index(row["part"]))


def joined(name: str, old: Row | None, lines: list[Row]) -> Row:
    """A row of the record with the networks of some lines."""
    about = {what: lines[0][what] for what in ("part", "set", "kind", "regime")}
    seen = FRESH.get(about["set"]) or FRESH.get(about["kind"], "this rule")
    parts = {c: parts_of(c, old, lines) for c in (*COLUMNS, *RIVALS, LABELLED)}
    columns = {c: pooled_column(found) for c, found in parts.items() if found}
    network, chosen = columns["network"], {one["seed"]: one["choice"] for one in lines if one["choice"]}
    before = dict(zip(old["seeds"], old["choices"], strict=True)) if old else {}
    choices = [before.get(seed) or chosen[seed] for seed in columns["default"]["seeds"]]
    about |= {"name": name, "seen by": seen, "seeds": network["seeds"], "n_test": network["n"]}
    return {**about, "columns": columns, "choices": choices}
