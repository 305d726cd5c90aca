"""Random networks against dense oracles: `python tests/fuzz/networks.py --cases 200 --seed 0`, `--only SEED` for one.

Each case ends as
    held        every law of `laws.py` held
    refused     all or some of it was refused by a LapwingError of `REFUSALS`, each with the reason why that is right
    FAIL        a difference, an error that is no LapwingError, a refusal that is not on the list, or no end in a minute
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from agreement import Difference
from cases import draw
from laws import hold

from lapwing.errors import LapwingWarning

LIMIT = 60  # seconds a case

REFUSALS: tuple[tuple[str, str], ...] = (
    # (a part of the message, why it is right to refuse)
    ("cannot absorb", "a prior per weight has no Kronecker form"),
    ("there is no last layer", "the head's weights act elsewhere too"),
    ("mixes the outputs", "noise per output needs the exact factor"),
    ("multiplies by the exact output curvature", "matrix_free has no other factor"),
    ("every target is ignored or has the weight 0", "there is nothing to fit"),
    (
        "cg stopped at a residual",
        "a prior that tuning made too weak for conjugate gradients; the message says what to do",
    ),
    ("control flow depends on the data", "routing that the first batch did not show; full takes it"),
)


@dataclass
class Outcome:
    seed: int
    end: str  # held, refused, difference, foreign, refused without a reason, hang
    message: str = ""
    what: str = ""  # likelihood, structure, ...
    warned: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        return self.end not in ("held", "refused")


class Late(BaseException):
    """A case took too long; no `except Exception` on the way may swallow it."""


@contextmanager
def within(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise Late

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run(seed: int, verbose: bool = False) -> Outcome:
    """Draw the case of a seed and see how it ends."""
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of the layers that were drawn
        case = draw(seed)
        case.dense, case.ahead, case.dense.G  # noqa: B018  the oracle's own errors are not the library's
    if verbose:
        print(case)
    out = Outcome(seed, "held", what=f"{case.observation.name}; {case.structure}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with within(LIMIT):
                refused = [f"{type(error).__name__}: {error}" for error in hold(case)]
            unknown = [text for text in refused if not any(part in text for part, _ in REFUSALS)]
            if refused:
                out.end = "refused without a reason" if unknown else "refused"
                out.message = (unknown or refused)[0]
        except Difference as error:
            out.end, out.message = "difference", str(error)
        except Late:
            out.end, out.message = "hang", f"no end in {LIMIT} s"
        except Exception as error:
            out.end, out.message = "foreign", f"{type(error).__name__}: {error}"
            if verbose:
                traceback.print_exc()
    out.warned = sorted({head(str(w.message)) for w in caught if issubclass(w.category, LapwingWarning)})
    out.seconds = time.perf_counter() - start
    return out


def head(message: str) -> str:
    """A message without its numbers and names, so that like ones count as one."""
    return re.sub(r"[0-9][0-9.e+\-]*|\b(stems|trunk|head)\.\S+", "·", message.split("\n")[0])[:110]


def table(outcomes: list[Outcome]) -> str:
    ends = Counter(one.end for one in outcomes)
    warned = sum(bool(one.warned) for one in outcomes)
    lines = [f"{len(outcomes)} cases, {sum(one.seconds for one in outcomes):.0f} s; {warned} warned"]
    lines += [f"  {n:6d}  {end}" for end, n in ends.most_common()]
    for end in sorted(ends.keys() - {"held"}):
        found = [one for one in outcomes if one.end == end]
        for message, n in Counter(head(one.message) for one in found).most_common():
            seeds = [one.seed for one in found if head(one.message) == message]
            lines.append(f"  {end}: {n} × {message}  seeds {seeds[:6]}")
    return "\n".join(lines)


def counts(outcomes: list[Outcome]) -> dict[str, int]:
    """How many cases ended in each way."""
    found = Counter(one.end for one in outcomes)
    ends = ("held", "refused", "difference", "foreign", "refused without a reason", "hang")
    return {end: found[end] for end in ends} | {"warned": sum(bool(one.warned) for one in outcomes)}


def report(outcomes: list[Outcome], first: int) -> dict[str, Any]:
    """What the soak keeps: counts, refusals with how often each was met, and failures with their seeds."""
    refusals = Counter(part for one in outcomes if one.end == "refused" for part, _ in REFUSALS if part in one.message)
    return {
        "cases": len(outcomes),
        "seed": first,
        "seconds": round(sum(one.seconds for one in outcomes)),
        "slowest": round(max(one.seconds for one in outcomes), 1),
        "outcomes": counts(outcomes),
        "refusals": [
            {"message": part, "why": why, "cases": refusals[part]} for part, why in REFUSALS if refusals[part]
        ],
        "failures": [
            {"seed": one.seed, "outcome": one.end, "what": f"{one.message} [{one.what}]"}
            for one in outcomes
            if one.failed
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the others follow")
    parser.add_argument("--out", type=Path, help="a JSON file for counts and failures")
    parser.add_argument("--only", type=int, help="run one seed and print all about it")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.only is not None:
        outcome = run(args.only, verbose=True)
        print(outcome)
        return int(outcome.failed)
    outcomes = []
    for seed in range(args.seed, args.seed + args.cases):
        outcomes.append(run(seed))
        if outcomes[-1].failed:
            print(f"FAIL {outcomes[-1].end}: {outcomes[-1].message[:200]}  [{outcomes[-1].what}]", flush=True)
            print(f"  again: python tests/fuzz/networks.py --only {seed}", flush=True)
    print(table(outcomes))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report(outcomes, args.seed), indent=1, ensure_ascii=False) + "\n")
    return int(any(one.failed for one in outcomes))


if __name__ == "__main__":
    sys.exit(main())
