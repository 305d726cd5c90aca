"""A verdict in words: whether a fit predicts test data better than its plain network, by how much, and what to do.

Better or worse is said where the 90 % interval of the mean difference of NLL leaves zero out. At the same mean and
spread, n (t se / gain)² examples would tell a difference that n do not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from lapwing.report.charts import percent, short_of
from lapwing.report.facts import LEVEL, NETWORK, ReportFacts, Scored
from lapwing.solvers.estimate import Estimate

FEW = 100  # test examples, below which figures say little
SHARE = 1.96  # standard errors of a share, beyond which it is no chance


@dataclass(frozen=True)
class Verdict:
    """A line, what it rests on, and what to do."""

    tone: str  # "good", "bad" or "even"
    headline: str
    because: str
    advice: tuple[str, ...]


def of_fit(fit: Any, facts: ReportFacts) -> Verdict:
    """Of one fit, beside its network."""
    one = facts.fits[0]
    gain = facts.gain(one)
    if gain is None:
        return Verdict(
            "even", f"NLL {short_of(one.scores['nll'])} nats an example", _on(facts), _advice(fit, facts, "")
        )
    tone = _tone(gain)
    headline = {
        "good": "Better than the plain network on the test data",
        "bad": "Worse than the plain network on the test data",
        "even": "On par with the plain network: the difference is within chance",
    }[tone]
    return Verdict(tone, headline, _because(facts, one, gain), _advice(fit, facts, tone))


def _tone(gain: Estimate) -> str:
    low, high = gain.interval
    return "good" if low > 0 else "bad" if high < 0 else "even"


def _because(facts: ReportFacts, one: Scored, gain: Estimate) -> str:
    assert facts.network is not None
    way, sign = ("lower", 1) if gain.value > 0 else ("higher", -1)
    low, high = sorted(sign * v for v in gain.interval)
    return (
        f"Its NLL is {short_of(one.scores['nll'])} nats an example, the network’s "
        f"{short_of(facts.network.scores['nll'])}: {way} by {short_of(abs(gain.value))} ± {gain.standard_error:.2g}. "
        f"That is the mean difference over the same {facts.n:,} examples with its standard error; its 90 % interval is "
        f"{short_of(low)} to {short_of(high)}."
    )


def _on(facts: ReportFacts) -> str:
    return f"Mean −log p of {facts.n:,} test examples. {' '.join(facts.notes)}"


# -- what to do ------------------------------------------------------------------------------------------------------


def _advice(fit: Any, facts: ReportFacts, tone: str) -> tuple[str, ...]:
    found = [*_use(fit, facts, tone), *_calibration(fit, facts, tone), *_tuning(fit)]
    if facts.n < FEW:
        found.append(f"{facts.n} test examples are few: read every figure here with its chance in mind.")
    return tuple(found)


def _use(fit: Any, facts: ReportFacts, tone: str) -> list[str]:
    if tone == "good":
        return ["Predict with it: la.predict(x)."]
    if tone == "bad":
        return [_remedy(fit, "Predict with the network meanwhile.")]
    if tone == "even":
        gain = facts.gain(facts.fits[0])
        assert gain is not None
        return [
            "Its probabilities are as good as the network’s; its error bars and ood_score come on top." + _more(gain)
        ]
    return []


def _more(gain: Estimate) -> str:
    """How many examples would tell."""
    n, half = len(gain.samples), (gain.interval[1] - gain.interval[0]) / 2
    need = n * (half / gain.value) ** 2 if gain.value else math.inf
    if not need < 1e6:
        return ""
    return f" If the difference is what it seems, about {_round_up(need):,} test examples would tell it from chance."


def _round_up(n: float) -> int:
    """To two digits."""
    power = 10 ** max(0, math.floor(math.log10(n)) - 1)
    return math.ceil(n / power) * power


def _remedy(fit: Any, otherwise: str) -> str:
    if getattr(fit, "tuning", None) is None and hasattr(fit, "tuned"):
        return f"It is not tuned: la = la.tuned() picks its prior and noise. {otherwise}"
    if hasattr(fit, "calibration"):
        return f"With labels that were held out: la.tuned(method='validation', data=held_out). {otherwise}"
    return (
        f"With targets that were held out, lw.conformal.calibrate(la.predict(x), y) gives sets that hold. {otherwise}"
    )


def _calibration(fit: Any, facts: ReportFacts, tone: str) -> list[str]:
    one = facts.fits[0]
    if "coverage" in one.scores:
        return _intervals(one, facts.targets.numel())
    if "confidence" not in one.scores:
        return []
    said, was = one.scores["confidence"], one.scores["accuracy"]
    error = math.sqrt(max(was * (1 - was), 1 / facts.n) / facts.n)
    figures = f"mean confidence {percent(said)}, accuracy {percent(was)} ± {percent(error)}"
    if abs(said - was) <= SHARE * error:
        return [f"It is as sure as it is right: {figures}."]
    how = "surer than it is right" if said > was else "less sure than it is right"
    remedy = "" if tone == "bad" else _remedy(fit, "")  # which has been said
    return [f"It is {how}: {figures}. {remedy}".rstrip()]


def _intervals(one: Scored, count: int) -> list[str]:
    was = one.scores["coverage"]
    error = math.sqrt(LEVEL * (1 - LEVEL) / count)
    words = f"Its {100 * LEVEL:.0f} % intervals hold {percent(was)} of the test targets"
    if abs(was - LEVEL) <= SHARE * error:
        return [f"{words}, which is within chance (± {percent(error)})."]
    how = "too narrow" if was < LEVEL else "wider than they need be"
    return [
        f"{words} (± {percent(error)} by chance): they are {how}. lw.conformal.calibrate(la.predict(x), y) on held-out "
        "data makes them hold as often as they say."
    ]


def _tuning(fit: Any) -> list[str]:
    tuning = getattr(fit, "tuning", None)
    if tuning is None:
        return []
    found = []
    if tuning.at_bound:
        found.append(
            f"The tuning stopped at a bound for {', '.join(tuning.at_bound[:4])}: the data do not determine it."
        )
    if not tuning.converged:
        found.append(f"The tuning stopped after {tuning.iterations} steps without converging.")
    return found


# -- several fits ----------------------------------------------------------------------------------------------------


def of_several(facts: ReportFacts) -> Verdict:
    """The one of least NLL, beside the next and the network."""
    ordered = sorted(facts.fits, key=lambda one: one.scores["nll"])
    best, second = ordered[0], ordered[1]
    gain = facts.gain(best, second)
    assert gain is not None
    sure = _tone(gain) == "good"
    headline = f"{best.name} predicts the test data best" if sure else f"{best.name} leads, within chance"
    told = [_beside(best, second, gain)]
    over = facts.gain(best)
    if over is not None:
        told.append(_beside(best, facts.network, over))
    tone = "bad" if over is not None and _tone(over) == "bad" else "good" if sure else "even"
    return Verdict(tone, headline, " ".join(told), _which(best, second, sure, tone, gain))


def _beside(best: Scored, other: Any, gain: Estimate) -> str:
    who = f"the {NETWORK}" if other.name == NETWORK else other.name
    way = "lower" if gain.value >= 0 else "higher"
    return (
        f"Its NLL is {short_of(abs(gain.value))} ± {gain.standard_error:.2g} nats an example {way} than that of {who} "
        f"({short_of(best.scores['nll'])} against {short_of(other.scores['nll'])})."
    )


def _which(best: Scored, second: Scored, sure: bool, tone: str, gain: Estimate) -> tuple[str, ...]:
    network = {"bad": ("The plain network predicts better than any of them: tune them, or predict with it.",)}
    if tone in network:
        return network[tone]
    if sure:
        return (f"Predict with {best.name}.",)
    return (f"Take {best.name} or {second.name}, whichever is cheaper.{_more(gain)}",)
