"""A prediction in a terminal, in a notebook and as NumPy arrays: the first inputs, with the mean of y, its standard
deviation, and the part of that which more data would remove, √epistemic."""

from __future__ import annotations

import html as escaping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lapwing.errors import Unsupported
from lapwing.predictive.link import resolve, rules

if TYPE_CHECKING:
    from lapwing.predictive.prediction import Prediction

ROWS, COLUMNS = 5, 3  # shown


def to_numpy(prediction: Prediction) -> dict[str, Any]:
    """The fields that there are, by name."""
    names = ["mean", "std", "epistemic", "aleatoric", "total", "f_mean", "f_var"]
    names += ["entropy", "expected_entropy", "mutual_information"] if prediction.likelihood.classes else []
    found = {name: _part(prediction, name) for name in names}
    return {name: values.detach().cpu().numpy() for name, values in found.items() if values is not None}


def to_frame(prediction: Prediction) -> Any:
    """Of `to_numpy`, with a column for each output."""
    try:
        import pandas
    except ImportError as error:
        raise Unsupported(
            "prediction.to_frame() needs pandas, which is not installed; pip install pandas, or use to_numpy()"
        ) from error
    columns: dict[str, Any] = {}
    for name, values in to_numpy(prediction).items():
        flat = values.reshape(len(values), -1)
        several = flat.shape[1] > 1
        columns |= {f"{name}_{j}" if several else name: flat[:, j] for j in range(flat.shape[1])}
    return pandas.DataFrame(columns, index=prediction.index)


def text(prediction: Prediction) -> str:
    """A table for a terminal."""
    columns, rows = _table(prediction)
    widths = [max(len(column), *(len(row[j]) for row in rows)) for j, column in enumerate(columns)]
    lines = ["  " + "  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in [columns, *rows]]
    return "\n".join([_head(prediction), *lines, *(["  ..."] if len(prediction.f_mean) > ROWS else [])])


def html(prediction: Prediction) -> str:
    """A table for a notebook."""
    columns, rows = _table(prediction)
    more = [["…"] * len(columns)] if len(prediction.f_mean) > ROWS else []
    head = "".join(f"<th>{escaping.escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escaping.escape(c)}</td>" for c in row) + "</tr>" for row in rows + more)
    title = escaping.escape(_head(prediction))
    return f"<p><code>{title}</code></p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _head(prediction: Prediction) -> str:
    n, *positions, c = prediction.f_mean.shape
    at = f" at {' × '.join(map(str, positions))} positions" if positions else ""
    joint = ", joint" if prediction.joint else ""
    return f"Prediction({prediction.likelihood.name}, {n} inputs, {c} outputs{at}{joint}{_by(prediction)})"


def _by(prediction: Prediction) -> str:
    """What stands between f and y, where there is a choice."""
    if by := str(prediction.outputs):
        return f", {by}"
    link = resolve(prediction.likelihood, prediction.link)
    return f", link {link}" if len(rules(prediction.likelihood)) > 1 else ""


def _table(prediction: Prediction) -> tuple[list[str], list[list[str]]]:
    few = prediction[:ROWS]
    parts = {name: values for name in ("mean", "std", "epistemic std") if (values := _part(few, name)) is not None}
    return list(parts), [[_short(values[i]) for values in parts.values()] for i in range(len(few.f_mean))]


def _part(prediction: Prediction, name: str) -> Tensor | None:
    try:
        return prediction.epistemic.sqrt() if name == "epistemic std" else getattr(prediction, name)
    except Unsupported:  # noise that is not known, a mean that is not there: what is there is shown
        return None


def _short(row: Tensor) -> str:
    values = row.flatten()[:COLUMNS].tolist()
    return ", ".join(f"{v:.4g}" for v in values) + (", ..." if row.numel() > COLUMNS else "")
