"""One self-contained page: pictures as data URIs, tables, captions."""

from __future__ import annotations

import base64
import html
from pathlib import Path

from lapwing import files

TITLE = "Lapwing: a trained network, and the same network with error bars"
CAPTIONS = {
    "error_bars": (
        "A curve with a gap",
        "Color intensity of 178 Italian wines against their flavanoids (real data, bundled with scikit-learn). The "
        "wines between 1.2 and 2.2 were hidden from training. MAP knows one noise level everywhere. The Laplace "
        "posterior adds what the weights do not know: little where there are wines, much in the gap and beyond the "
        "last wines. The parts add up: total variance = aleatoric + epistemic.",
    ),
    "reliability": (
        "Are the probabilities right?",
        "Seven digit classes, half of the images for training. A point on the diagonal is right as often as it says; "
        "its size is the share of predictions (bins of fewer than ten are left out). Move the same images by one "
        "pixel and the trained network is wrong and certain; with error bars it is less certain, though still too "
        "certain.",
    ),
    "unknown": (
        "Classes that it never saw",
        "The digits 7, 8 and 9 were held out. The epistemic part of the variance tells them from known digits better "
        "than the network’s own confidence. Right: the eight unknown digits of which MAP is surest, with its "
        "label and confidence, and the share of known test digits whose epistemic variance is lower.",
    ),
    "evidence": (
        "The prior that the data pick",
        "The log evidence (marginal likelihood) of the training data over the prior precision, after one pass over "
        "the data: no validation set, no retraining. The circle is what la.tuned() returns.",
    ),
}
NOTES = [
    "MAP: the trained weights alone. Laplace: the default, tuned on the training data alone. For digits, logits and "
    "labels of near inputs are pooled; for wines, the network and the process of its tangent kernel are mixed.",
    "NLL in nats and ECE (15 bins): lower is better. moved: the test images, one pixel to each of four sides. AUROC: "
    "test digits against unknown classes, by 1 − confidence, and by epistemic variance. Coverage: of 95 % "
    "intervals. RMSE and NLL of wines are of log color intensity.",
    "One seed, one split: lapwing demo --seed 1 shows another. Data, networks and held-out parts were "
    "picked among several tried, for a clear picture: this is a demonstration, not a benchmark.",
]
STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.55 system-ui, sans-serif; color: #1a1a1a; max-width: 60rem; margin: 2.5rem auto;
  padding: 0 1.2rem; }
h1 { font-size: 1.7rem; line-height: 1.25; margin-bottom: .3rem; } h2 { font-size: 1.2rem; margin: 2.4rem 0 .4rem; }
.lead { color: #4a4a4a; margin-top: 0; } img { width: 100%; height: auto; display: block; margin: .6rem 0 0; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .86rem; margin: 1rem 0; width: 100%;
  font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .6rem; text-align: right; border-bottom: 1px solid #e4e4e4; }
th { border-bottom: 2px solid #1a1a1a; font-weight: 600; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; white-space: nowrap; }
tbody tr:hover { background: #f2f8fc; }
pre { background: #f5f5f5; padding: .8rem 1rem; overflow-x: auto; font-size: .86rem; }
.notes { color: #4a4a4a; font-size: .9rem; padding-left: 1.1rem; }
"""
CODE = """import lapwing as lw

la = lw.laplace(model, (X, y), "classification")   # one pass over the training data
la = la.tuned()                                    # how sure it may be, by the training data alone
pred = la.predict(x)                               # pred.probs, pred.epistemic, pred.aleatoric"""


def write(path: Path, tables: list[list[list[str]]], pictures: dict[str, Path], results: dict) -> Path:
    """Write the page; its path."""
    figures = "".join(_figure(name, pictures[name]) for name in CAPTIONS)
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in NOTES)
    reprs = "\n".join(f"{name}: {run['after']!r}" for name, run in results.items())
    text = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(TITLE)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head><body>'
        f"<h1>{html.escape(TITLE)}</h1>"
        '<p class="lead">Two small networks on data that scikit-learn bundles, before and after three lines.</p>'
        f"<pre>{html.escape(CODE)}</pre>{''.join(map(_table, tables))}"
        f'<ul class="notes">{notes}</ul>{figures}<h2>The objects</h2><pre>{html.escape(reprs)}</pre></body></html>\n'
    )
    files.write_whole(path, text.encode())
    return path


def _figure(name: str, picture: Path) -> str:
    title, caption = (html.escape(text) for text in CAPTIONS[name])
    data = base64.b64encode(picture.read_bytes()).decode()
    return f'<h2>{title}</h2><p>{caption}</p><img alt="{title}" src="data:image/png;base64,{data}">'


def _table(lines: list[list[str]]) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in lines[0])
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line) + "</tr>" for line in lines[1:])
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
