"""Models side by side: log Z = fit − quadratic − occam of each (Eq. 5), and what held-out data say. Posteriors without
an evidence (particles, mixtures) are compared by held-out data alone.

Evidences are of the same thing only if they are densities of the same targets, under the same kind of likelihood, with
the same kind of weights integrated over: a last layer's evidence takes the layers below as given, and is no rival of a
whole network's. Anything else is refused. Inputs may differ (other features, other transforms): p(y | x) is of y.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from lapwing.data import as_batches, passes
from lapwing.errors import InvalidValue, Unsupported, warn
from lapwing.predictive.plot import axes_of
from lapwing.tree import layer_of


@dataclass(frozen=True)
class Row:
    """One model. log_evidence = fit − quadratic − occam, at the model's own center, prior and noise; None where its
    posterior has no evidence."""

    name: str
    log_evidence: float | None
    difference: float | None  # to the best, ≤ 0
    fit: float | None
    quadratic: float | None
    occam: float | None
    effective_dimension: float | None
    parameters: int
    structure: str  # of the curvature, or what the posterior is made of
    bound: str
    center: str
    tuned: str  # the method, or "no"
    nll: float | None = None  # held-out, mean a point


@dataclass(frozen=True)
class Comparison:
    """Rows by falling evidence, or by rising held-out NLL where one has no evidence; prints as a table."""

    rows: tuple[Row, ...]
    n: int  # examples that the evidence is of
    weights: str  # which weights are integrated over

    @property
    def best(self) -> Row:
        """The first row."""
        return self.rows[0]

    def __getitem__(self, name: str) -> Row:
        found = {row.name: row for row in self.rows}
        if name not in found:
            raise InvalidValue(f"no model {name!r} was compared; they are {list(found)}")
        return found[name]

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """{name: {column: value}}, in the order of the rows."""
        return {row.name: {k: v for k, v in asdict(row).items() if k != "name"} for row in self.rows}

    def _table(self) -> list[list[str]]:
        held = any(row.nll is not None for row in self.rows)
        head = ["model", "log evidence", "difference", "fit", "quadratic", "occam", "dimension", "parameters"]
        out = [[*head, "structure", "center", "tuned", *(["held-out NLL"] if held else [])]]
        for r in self.rows:
            numbers = [r.log_evidence, r.difference, r.fit, r.quadratic, r.occam, r.effective_dimension]
            figures = ["" if v is None else f"{v:.2f}" for v in numbers]
            words = [f"{r.parameters:,}", r.structure, r.center, r.tuned]
            out.append([r.name, *figures, *words, *(["" if r.nll is None else f"{r.nll:.4f}"] if held else [])])
        return out

    def _notes(self) -> list[str]:
        kinds = dict.fromkeys(row.bound for row in self.rows if row.bound)
        labels = [f"{kind}: {', '.join(row.name for row in self.rows if row.bound == kind)}" for kind in kinds]
        notes = [f"evidence of {self.n:,} examples over {self.weights}"]
        return [*notes, "log evidence is " + "; ".join(labels)] if labels else notes

    def __repr__(self) -> str:
        table = self._table()
        widths = [max(len(line[j]) for line in table) for j in range(len(table[0]))]
        texts = {0, *(table[0].index(name) for name in ("structure", "center", "tuned"))}
        lines = []
        for line in table:
            cells = enumerate(zip(line, widths, strict=True))
            lines.append("  ".join(c.ljust(w) if j in texts else c.rjust(w) for j, (c, w) in cells).rstrip())
        return "\n".join(lines + self._notes())

    def _repr_html_(self) -> str:
        head, *body = [[html.escape(cell) for cell in line] for line in self._table()]
        rows = ["<tr>" + "".join(f"<td>{cell}</td>" for cell in line) + "</tr>" for line in body]
        top = "<tr>" + "".join(f"<th>{cell}</th>" for cell in head) + "</tr>"
        notes = "<br>".join(html.escape(note) for note in self._notes())
        return f"<table><thead>{top}</thead><tbody>{''.join(rows)}</tbody></table><p>{notes}</p>"

    def plot(self, ax: Any = None) -> Any:
        """A figure of the evidences, and of held-out NLL against them where there is one (needs matplotlib). ax: axes
        to draw in, one for the evidences alone, or two."""
        if any(row.log_evidence is None for row in self.rows):
            raise Unsupported("comparison.plot() is of evidences, and some of these have none; plot their held-out NLL")
        several = ax is None or hasattr(ax, "flat") or isinstance(ax, (list, tuple))
        held = several and all(row.nll is not None for row in self.rows)
        size = 10 if held else 5, 0.4 * len(self.rows) + 2
        axes = axes_of(ax, "comparison.plot()", size, 1, 2 if held else 1)
        axes[0].barh([r.name for r in self.rows], [r.difference or 0.0 for r in self.rows], color="#0072B2")
        axes[0].invert_yaxis()
        axes[0].set_xlabel("log evidence, difference to the best (nats)")
        if held:
            axes[1].plot([r.log_evidence or 0.0 for r in self.rows], [r.nll for r in self.rows], "o", color="#D55E00")
            for r in self.rows:
                place = r.log_evidence or 0.0, r.nll or 0.0
                axes[1].annotate(r.name, place, xytext=(4, 4), textcoords="offset points")
            axes[1].set_xlabel("log evidence")
            axes[1].set_ylabel("held-out negative log-likelihood, mean a point")
        return axes[0].figure


@torch.inference_mode(False)
def compare(models: Mapping[str, Any] | Sequence[Any], data: Any = None) -> Comparison:
    """The evidence of each {name: fit}, its terms, and with held-out data (X, y) or a loader its NLL beside it. They
    may be of any kind; where one has no evidence, they are compared by held-out data. Those of a list are named by
    their places, "0", "1", and so on."""
    if isinstance(models, (list, tuple)):
        models = {str(place): la for place, la in enumerate(models)}
    if not isinstance(models, Mapping) or not models:
        raise InvalidValue(f"compare takes {{name: la}}, or a list, of at least one fit, got {type(models).__name__}")
    for name, la in models.items():
        if not hasattr(la, "log_evidence") or not hasattr(la, "predict"):
            raise InvalidValue(f"compare takes fits, such as lw.laplace makes; {name!r} is a {type(la).__name__}")
    without = [name for name, la in models.items() if not hasattr(la, "decompose")]
    if without and data is None:
        raise InvalidValue(f"{without} have no evidence, so they are compared by held-out data: pass data=")
    known = {name: la for name, la in models.items() if name not in without}
    if known:
        check_same(known)
        _warn_mixed(known)
    held_out = None if data is None else as_batches(data)
    rows = [(_row if name in known else _bare_row)(str(name), la, held_out) for name, la in models.items()]
    if without:
        rows.sort(key=lambda row: row.nll or 0.0)
    else:
        rows.sort(key=lambda row: -(row.log_evidence or 0.0))
    best = max((row.log_evidence for row in rows if row.log_evidence is not None), default=0.0)
    away = [None if row.log_evidence is None else row.log_evidence - best for row in rows]
    ordered = tuple(replace(row, difference=d) for row, d in zip(rows, away, strict=True))
    first = next(iter(models.values()))
    return Comparison(ordered, first.n, weights_of(first))


def _bare_row(name: str, fit: Any, held_out: Any) -> Row:
    """Of a posterior without evidence."""
    nll = held_out_nll(fit, held_out)
    made, size = getattr(fit, "made", "") or "no", fit.tangent.layout.size
    return Row(name, None, None, None, None, None, None, size, str(fit.posterior), "", "", made, nll)


def _row(name: str, la: Any, held_out: Any) -> Row:
    with torch.no_grad():
        terms = la.decompose()
    value = float(terms.log_evidence)
    if not math.isfinite(value):
        raise InvalidValue(f"the log evidence of {name!r} is {value}; look at its prior and noise before comparing it")
    return Row(
        name=name,
        log_evidence=value,
        difference=0.0,
        fit=float(terms.fit),
        quadratic=float(terms.quadratic),
        occam=float(terms.occam),
        effective_dimension=float(la.effective_dimension().sum()),
        parameters=la.state.layout.size,
        structure=str(la.state.structure),
        bound=terms.bound,
        center=la.center,
        tuned="no" if la.tuning is None else la.tuning.method,
        nll=None if held_out is None else held_out_nll(la, held_out),
    )


def held_out_nll(la: Any, batches: Any) -> float:
    """−log p(y), mean over the points of a held-out set."""
    total, count = 0.0, 0
    for x, y in passes(batches, la.tangent.device, label="held out"):
        each = la.predict(x).log_prob(y)
        total, count = total - float(each.double().sum()), count + each.numel()
    return total / count


def weights_of(la: Any) -> str:
    """Which kind of weights the evidence integrates over."""
    layout = la.tangent.layout
    if layout.masks:
        return "a mask of weights"
    if not la.frozen:
        return "all weights"
    owners = {layer_of(name) for name in layout.names}
    last = [name for name, _ in la.tangent.model.named_parameters()][-1]
    return "the last layer's weights" if owners == {layer_of(last)} else "some layers' weights"


def check_same(models: Mapping[str, Any]) -> None:
    """Raise unless the evidences are of the same targets, kind of likelihood and kind of weights."""
    items = list(models.items())
    first, a = items[0]
    for name, b in items[1:]:
        for what, mine, theirs, why in [
            ("likelihoods", a.likelihood.density, b.likelihood.density, "their densities are of different things"),
            ("numbers of examples", a.n, b.n, "evidence is a density of all targets together"),
            ("weight subsets", weights_of(a), weights_of(b), "an evidence takes the weights left out as given"),
        ]:
            if mine != theirs:
                raise InvalidValue(
                    f"{first!r} and {name!r} have different {what} ({mine}; {theirs}), so their evidences cannot be "
                    f"compared: {why}; fit them alike"
                )
        if None not in (a.targets, b.targets) and a.targets != b.targets:
            raise InvalidValue(
                f"{first!r} and {name!r} were fitted to different targets (other data, or the same in other units), so "
                "their evidences cannot be compared: evidence is a density of the targets; fit them to the same"
            )


def _warn_mixed(models: Mapping[str, Any]) -> None:
    def among(key: Any) -> dict[Any, list[str]]:
        out: dict[Any, list[str]] = {}
        for name, la in models.items():
            out.setdefault(key(la), []).append(str(name))
        return out

    said = []
    tuned = among(lambda la: la.tuning is not None)
    if len(tuned) > 1:
        said.append(f"{tuned[False]} are not tuned and {tuned[True]} are: tune all of them, or none")
    centers = among(lambda la: la.center)
    if len(centers) > 1:
        said.append(f"centers differ ({centers}): take the evidence of all at one, by la.recentered()")
    if any(la.targets is None for la in models.values()):
        said.append("a state does not say what its targets were, so that they are the same is taken on trust")
    for text in said:
        warn(f"compare: {text}")
