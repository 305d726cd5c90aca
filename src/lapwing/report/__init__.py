"""A report of one fit, or of several, on test data: one HTML page that needs nothing but itself.

facts      predictions at the test data, scored, beside those of the plain network     facts.py
verdict    better or worse, by how much, what to do                                    verdict.py
sweep      the same at other prior precisions, for a slider                            sweep.py, moving.py
page       diagrams (SVG), tables, words                                               diagrams.py, page.py
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lapwing import files, selection
from lapwing.errors import InvalidValue, LapwingError, LapwingWarning, Unsupported
from lapwing.report import page, record
from lapwing.report.facts import ReportFacts, gather
from lapwing.report.sweep import Sweep, over_priors
from lapwing.selection.compare import Comparison

__all__ = ["report"]


@torch.inference_mode(False)
def report(fits: Any, test: Any, path: str | os.PathLike[str], *, ood: Any = None, certify: bool | None = None) -> Path:
    """Write one HTML page about a fit, or about several: {name: fit}, or a list. It says in words whether they predict
    test data, (X, y) or batches, better than the plain network, and shows why. Returns the path.

    ood: inputs that are unlike the training data, to be told by `ood_score`; of one fit alone. certify: whether a
    certificate is made, which reads the training data; where not told, it is if that is quick."""
    files.check_target(path)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always", LapwingWarning)
        text = _written(fits, test, ood, certify, heard)
    files.write_whole(path, text.encode("utf-8"))
    for one in {str(one.message): one for one in heard}.values():
        warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
    return files.as_path(path)


def _written(fits: Any, test: Any, ood: Any, certify: bool | None, heard: list[Any]) -> str:
    if isinstance(fits, Sequence):
        fits = {str(place): fit for place, fit in enumerate(fits)}
    if isinstance(fits, Mapping):
        return _of_several(fits, test, ood, certify, heard)
    _check("the fit", fits)
    facts = gather({"with error bars": fits}, test, ood)
    certificate = record.certificate(fits, certify)
    said = record.warned(heard)  # before the sweep, whose warnings are about other priors
    return page.of_fit(fits, facts, _swept(fits, facts), certificate, said)


def _swept(fit: Any, facts: ReportFacts) -> Sweep | str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LapwingWarning)
        try:
            return over_priors(fit, facts)
        except LapwingError as error:  # of another prior than the fit's, which nobody asked for
            return f"Other priors could not be shown: {error}."


def _of_several(fits: Mapping[Any, Any], test: Any, ood: Any, certify: bool | None, heard: list[Any]) -> str:
    if len(fits) < 2:
        raise InvalidValue(f"a report of several needs two fits or more, got {len(fits)}; of one, call la.report")
    if ood is not None or certify is not None:
        raise Unsupported("ood= and certify= belong to the report of one fit: call la.report(test, path) of each")
    for name, fit in fits.items():
        _check(repr(name), fit)
    named = {str(name): fit for name, fit in fits.items()}
    return page.of_several(named, gather(named, test), _compared(named), record.warned(heard))


def _compared(fits: Mapping[str, Any]) -> Comparison | str:
    """Their evidences, or why these cannot be compared."""
    if not all(hasattr(fit, "decompose") for fit in fits.values()):
        return "Not all of these have an evidence with terms, so they are compared by the test data alone."
    try:
        return selection.compare(fits)
    except InvalidValue as error:
        return f"The evidences are not compared: {error}."


def _check(name: str, fit: Any) -> None:
    if not hasattr(fit, "predict") or not hasattr(fit, "tangent"):
        raise InvalidValue(f"a report is of fits, such as lw.laplace makes; {name} is a {type(fit).__name__}")
