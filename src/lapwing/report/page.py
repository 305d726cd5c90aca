"""The sections of a report, in words, charts and tables. What comes from users (names, classes of networks, reprs) is
escaped, by `pieces.py` or here."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Sequence
from typing import Any

from lapwing import metrics
from lapwing.report import diagrams, pictures, record, scores, verdict
from lapwing.report.charts import percent
from lapwing.report.facts import ReportFacts
from lapwing.report.moving import Moving, moving
from lapwing.report.pieces import charts, document, legend, scrolled, section, table, words, wrapped
from lapwing.report.sweep import Sweep
from lapwing.report.verdict import Verdict
from lapwing.selection.compare import Comparison

READINGS = {
    "log_evidence": "log evidence",
    "fit": "fit",
    "quadratic": "quadratic",
    "occam": "occam",
    "nll": "NLL",
    "ece": "ECE",
    "confidence": "confidence",
    "coverage": "coverage",
    "sharpness": "width",
}
CAPTIONS = {
    "reliability": "On the dashed line, p is right a share p of the time. Below it: too sure. Discs grow with the "
    "number of predictions; bins of fewer than ten are left out.",
    "intervals": "On the dashed line, intervals hold y as often as they say. Below it: too narrow.",
    "spread": "Examples in groups by predicted standard deviation. On the dashed line, errors are as large as that.",
    "risk": "Answer only the surest. A curve that rises to the right says that the uncertain ones are the wrong ones.",
    "pit": "Flat if the whole distribution is right. A hill says too wide, a valley too narrow, a slope a bias.",
    "evidence": "Each term less what it is at the prior of the fit, which the dashed line marks. The disc is where the "
    "slider is. The evidence is taken at",
    "known": "ood_score of the test inputs: the variance of the outputs, which grows away from the training data. "
    "report(…, ood=x) sets inputs that are unlike them beside it.",
}
LEFT_OUT = (
    "Under this fit’s calibration ({}) predictions hardly depend on the prior. NLL, ECE, confidence and the second "
    "chart are therefore without it, as la.replace(prior=…) predicts; the evidence knows no calibration."
)
TERMS = (("s1", "log evidence"), ("t-fit", "fit"), ("t-quadratic", "− quadratic"), ("t-occam", "− occam"))


def of_fit(
    fit: Any, facts: ReportFacts, found: Sweep | str, certificate: tuple[Any, str], warned: Sequence[str]
) -> str:
    """The page of one fit; warned: what was warned of on the way."""
    parts = [
        _top(verdict.of_fit(fit, facts), f"Report · {_network(fit)} · {facts.n:,} test examples", warned),
        _scores(facts),
        _quality(facts, whole=True),
        _prior(found),
        _novelty(facts),
        _examples(facts),
        _made(fit, certificate),
        _where(fit),
    ]
    return document("Lapwing report", parts)


def of_several(fits: dict[str, Any], facts: ReportFacts, found: Comparison | str, warned: Sequence[str]) -> str:
    """The page of several fits; found: their evidences, or why these are not compared."""
    first = next(iter(fits.values()))
    over = f"Comparison · {_network(first)} · {len(fits)} fits · {facts.n:,} test examples"
    parts = [
        _top(verdict.of_several(facts), over, warned),
        _scores(facts),
        _quality(facts, whole=False),
        section("Evidence", words(found) if isinstance(found, str) else scrolled(found._repr_html_())),
        section("What they are", table([["name", "fit"], *([name, repr(fit)] for name, fit in fits.items())], "mono")),
        _where(first),
    ]
    return document("Lapwing comparison", parts)


def _network(fit: Any) -> str:
    return type(fit.tangent.model).__name__


# -- sections --------------------------------------------------------------------------------------------------------


def _top(said: Verdict, over: str, warned: Sequence[str]) -> str:
    todo = "".join(f"<li>{html.escape(line)}</li>" for line in said.advice)
    heard = "".join(f'<p class="note">Warning: {html.escape(line)}</p>' for line in warned)
    return (
        f'<p class="over">{html.escape(over)}</p><div class="verdict {said.tone}"><h1>{html.escape(said.headline)}</h1>'
        f'<p class="lead">{html.escape(said.because)}</p></div><ul class="do">{todo}</ul>{heard}'
    )


def _scores(facts: ReportFacts) -> str:
    notes = facts.notes
    if facts.network is not None:
        noise = (
            "" if facts.fits[0].classes else ", with the noise that its training residuals have, where they are known"
        )
        notes = (*notes, f"The plain network (of an ensemble, the first) predicts by its outputs alone{noise}.")
    return section("Scores", table(scores.table(facts), "numbers") + "".join(map(words, notes)))


def _quality(facts: ReportFacts, whole: bool) -> str:
    """whole: with the histogram, which is of one fit."""
    one = facts.fits[0]
    key = legend([*((style, each.name) for style, each in diagrams.styles(facts)), ("dash", "ideal")])
    if one.reliability is not None:
        return section("Can its probabilities be believed?", key + _drawn(facts, diagrams.reliability, diagrams.risk))
    if one.pit is not None:
        makers = (diagrams.intervals, diagrams.spread, diagrams.risk, *([diagrams.pit] if whole else []))
        return section("Can its error bars be believed?", key + _drawn(facts, *makers))
    kind = one.prediction.likelihood.name
    return section(
        "Calibration",
        words(f"Of a {kind} prediction and such targets there is the NLL alone: no intervals to hold to them."),
    )


def _drawn(facts: ReportFacts, *makers: Callable[[ReportFacts], str]) -> str:
    return charts((make(facts), CAPTIONS[make.__name__]) for make in makers)


def _prior(found: Sweep | str) -> str:
    title = "What if the prior were another?"
    if isinstance(found, str):
        return section(title, words(found))
    made = moving(found)
    held = "the trained weights." if found.center == "map" else f"the mode of the {found.center} model."
    drawn = [(made.evidence, f"{CAPTIONS['evidence']} {held}")]
    if made.predictions:
        drawn.append((made.predictions, _moved(found, made.what)))
    said = words(LEFT_OUT.format(found.left_out)) if found.left_out else ""
    seen = (("seen", "observed"),) if made.what == "error bars" else ()
    moved = _slider(made, len(found.steps)) + legend(TERMS + seen) + charts(drawn) + _payload(made)
    return section(title, said + moved)


def _moved(found: Sweep, what: str) -> str:
    n = len(found.targets)
    shown = {
        "reliability": f"Reliability on {n:,} test examples; dotted: that of the fit.",
        "error bars": f"95 % intervals of some test examples; the readings are of {n:,}.",
    }[what]
    held = "The noise and the mean are held." if found.left_out else "The noise, the mean and the calibration are held."
    return f"{shown} {held}{' They hardly depend on the prior.' if found.still else ''}"


def _slider(made: Moving, count: int) -> str:
    at = made.payload()["chosen"]
    cells = "".join(
        f'<div><dt>{label}</dt><dd data-sweep="{name}">{html.escape(made.values[name][at])}</dd></div>'
        for name, label in READINGS.items()
        if name in made.values
    )
    first = html.escape(made.values["precision"][at])
    return (
        '<div class="slider" id="slider"><label for="precision"><span>Prior precision: the larger, the narrower the '
        f'error bars</span><output for="precision" data-sweep="precision">{first}</output></label>'
        f'<input id="precision" type="range" min="0" max="{count - 1}" step="1" value="{at}" hidden>'
        f'<button type="button" hidden>Back to the fit’s own prior</button><dl class="readings">{cells}</dl></div>'
    )


def _payload(made: Moving) -> str:
    text = json.dumps(made.payload(), ensure_ascii=True).replace("<", "\\u003c")
    return f'<script type="application/json" id="sweep">{text}</script>'


def _novelty(facts: ReportFacts) -> str:
    title = "Does it know what it has not seen?"
    if facts.unlike is None:
        if not float(facts.novelty.max()) > 0:
            return section(title, words("Its outputs have no variance at the test inputs: ood_score is 0 everywhere."))
        return section(title, charts([(diagrams.novelty(facts.novelty, None), CAPTIONS["known"])]))
    known, unlike = facts.novelty, facts.unlike
    auroc = metrics.auroc(known, unlike)
    said = (
        f"ood_score tells the {len(unlike):,} inputs that were given as unlike the training data from the "
        f"{len(known):,} test inputs with an AUROC of {auroc:.3f}: in {percent(auroc)} of pairs, the unlike one has "
        "the higher score."
    )
    key = legend([("s1", "test inputs"), ("s0", "inputs unlike the training data")])
    return section(title, words(said) + key + charts([(diagrams.novelty(known, unlike), "")]))


def _examples(facts: ReportFacts) -> str:
    found = pictures.most_uncertain(facts)
    if not found:
        return ""
    what = "wrong label" if facts.fits[0].classes else "outside of its 95 % interval"
    said = words(f"The {len(found)} test examples that it is least sure of. Red: {what}.")
    if found[0].picture:
        body = "".join(
            f'<figure><img alt="test example {one.place}" src="{one.picture}"><figcaption><span{_red(one.wrong)}>'
            f"{html.escape(one.predicted)}</span><br>is {html.escape(one.happened)}</figcaption></figure>"
            for one in found
        )
        return section("Where it is least sure", f'{said}<div class="examples">{body}</div>')
    head = ["example", "predicted", "happened", "input"]
    rows = "".join(
        f"<tr><th>{one.place}</th><td><span{_red(one.wrong)}>{html.escape(one.predicted)}</span></td>"
        f"<td>{html.escape(one.happened)}</td><td>{html.escape(one.numbers)}</td></tr>"
        for one in found
    )
    return section("Where it is least sure", said + wrapped(head, rows, "numbers"))


def _red(wrong: bool) -> str:
    return ' class="wrong"' if wrong else ""


def _made(fit: Any, certificate: tuple[Any, str]) -> str:
    body = table([["", ""], *record.described(fit), *record.tuning(fit)], "mono")
    tuning = getattr(fit, "tuning", None)
    if tuning is not None and len(tuning.trace) > 1:
        held_out = tuning.method == "validation"
        what = "held-out log-likelihood, best yet" if held_out else "log evidence (nats)"
        body += charts([(diagrams.trace(tuning.trace, what), "After each step of the tuning.")])
    elif hasattr(fit, "tuned") and tuning is None:
        body += words("It was not tuned.")
    made, reason = certificate
    body += "<h3>Certificate</h3>" + (words(reason) if made is None else scrolled(made._repr_html_()))
    if layers := record.coverage(fit):
        body += "<h3>Coverage by layer</h3>" + table([["parameter", "elements", "treated as"], *layers], "mono")
    return section("How it was made", body)


def _where(fit: Any) -> str:
    return section("Environment", table([["", ""], *record.environment(fit)], "mono"))
