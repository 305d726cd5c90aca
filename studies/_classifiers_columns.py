"""What each column of `classifiers.py` says of a network's test inputs, and how that scores.

    network       softmax f
    hindsight     softmax f/T, T by the test labels
    temperature   softmax f/T, T by labels that no training saw: on small data those of the last fifth, by a network of
                  the same kind trained on the others; ResNets, 1,000 test labels that are not scored
    last layer    "categorical", kron of the last layer, λ by the evidence at the trained weights, probit: what
                  laplace-torch does by default
    softmax       "categorical", kron, λ in the same way
    dirichlet     "dirichlet", kron, λ in the same way, about the network
    layerwise     the same with one λ a layer
    default       lw.laplace(net, data, "classification").tuned().predict(x)

    labelled      of ResNets: the default, tuned(method="validation", data=...) by the labels that *temperature* has

and of some seeds, rivals that a user could choose as well, each kron, about the network unless told otherwise:

    log-ratio     lw.likelihoods.LogRatio() in place of "dirichlet", λ in the same way
    g-prior       "dirichlet", prior=lw.priors.GPrior(1.0), λ in the same way
    views         "dirichlet" of all views of the training images, each with its share of one example's weight
    process       Dirichlet(0.01).tuned(center="process"), predict(x, mean="process")
    mixture       the same, predict(x, mean="mixture")
    validation    tuned(method="validation", data=...) of "dirichlet", by the labels that *temperature* has; on small
                  data by the network that saw four fifths, whose λ and temperature the network that saw all is given
    variational   lw.variational.tangent of "categorical", λ the power of ten of the best bound; about its own mean

The default has λ and the curvature of "dirichlet", so these two share one fit. n test inputs, c classes, m unknown.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import left_out
import torch
from _classifiers_networks import FORWARD, Held, Pair, Problem, logits
from torch import Tensor

import lapwing as lw

from _common import clocks  # isort: skip  (benchmarks/, which left_out puts on the path)

COLUMNS = ("network", "hindsight", "temperature", "last layer", "softmax", "dirichlet", "layerwise", "default")
LABELLED = "labelled"
RIVALS = ("log-ratio", "g-prior", "views", "process", "mixture", "validation", "variational")
FEWER = tuple(c for c in COLUMNS if c not in ("softmax", "layerwise"))  # where networks or data are large
EPSILON = 0.01  # of the process
BOUND = 1e-6  # relative, at which steps towards it end
LAST = {"structure": "kron", "subset": "last_layer"}
JOINT, PIECE, KAPPA = 240, 30, 5  # test inputs whose labels are predicted together, in pieces; anchors of a set
REPEATS = 20  # draws of sets
DRAWS = 1024  # of outputs
RESAMPLED = 200  # draws of all test inputs with repetition, for the spread of the ECE


@dataclass(frozen=True)
class Answer:
    """−log p of the labels (n,), probabilities (n, c), how unknown each input is (n,), and inputs of no class (m,)."""

    loss: Tensor
    probs: Tensor
    known: Tensor
    unknown: Tensor | None
    joint: float | None = None  # log-likelihood of the labels of sets of KAPPA inputs
    seconds: dict[str, float] = field(default_factory=dict)  # of CPU

    def first(self, n: int | None) -> Answer:
        """Of the first n inputs alone."""
        return replace(self, loss=self.loss[:n], probs=self.probs[:n], known=self.known[:n])


def together(log_probs: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor) -> float:
    """Of the first JOINT inputs; every column gets the same sets. log_probs: of a piece and its labels, (draws, n)."""
    found = []
    for some, labels in zip(x[:JOINT].split(PIECE), y[:JOINT].split(PIECE), strict=True):
        made = log_probs(some, labels)
        sets = (torch.Generator().manual_seed(k) for k in range(REPEATS))
        found += [lw.metrics.dyadic(made, KAPPA, generator=g) for g in sets]
    return float(torch.cat(found).mean())


def drawn(pred: lw.Prediction, y: Tensor) -> Tensor:
    """log p(y_n | f_s), (draws, n), of a joint prediction."""
    f, _ = pred.outputs.sample(DRAWS, torch.Generator().manual_seed(0))
    return pred.likelihood.log_prob(f.double(), y.expand(DRAWS, *y.shape))


def tempered(f: Tensor, y: Tensor, strange: Tensor | None, T: float) -> Answer:
    """softmax f/T, float64. An input is as unknown as the largest probability is small."""
    loss, probs = -(f / T).log_softmax(1).gather(1, y[:, None])[:, 0], (f / T).softmax(1)
    unknown = None if strange is None else _doubt((strange / T).softmax(1))
    joint = together(lambda p, y: p.gather(1, y[:, None]).log().mT, probs, y)
    return Answer(loss, probs, _doubt(probs), unknown, joint)


def _doubt(probs: Tensor) -> Tensor:
    return 1 - probs.max(1).values


def temperature(f: Tensor, y: Tensor) -> float:
    """T from .1 to 50, of the least loss."""
    return 1 / left_out.weights([f[:, None]], y, [(0.02, 10.0)])[0]


def predicted(la: lw.Laplace, problem: Problem, seconds: dict[str, float], link: str = "auto") -> Answer:
    """An input is as unknown as `pred.ood_score` says. The time is that of the test inputs."""
    found = rival(la, problem, seconds, link=link)
    unknown = None
    if problem.unknown is not None:
        unknown = torch.cat([la.predict(some).ood_score for some in problem.unknown.split(FORWARD)])
    return replace(found, unknown=unknown, joint=joint(la, problem, link))


def rival(la: Any, problem: Problem, seconds: dict[str, float], **how: Any) -> Answer:
    """Without inputs of no class and labels together."""
    x, y = (t.split(FORWARD) for t in problem.test)
    taken, made = clocks(lambda: [_read(la.predict(some, **how), labels) for some, labels in zip(x, y, strict=True)])
    loss, probs, known = (torch.cat(parts) for parts in zip(*made, strict=True))
    return Answer(loss, probs, known, None, seconds={**seconds, "predict": taken["cpu"]})


def joint(la: lw.Laplace, problem: Problem, link: str = "auto") -> float:
    """`together` of a fit."""
    return together(lambda x, y: drawn(la.predict(x, link, joint=True), y), *problem.test)


def both(la: lw.Laplace, problem: Problem, seconds: dict[str, float], labelled: bool) -> dict[str, Answer]:
    """The default; the same posterior without its rule; and, if asked, with what held labels choose. Where all of that
    is a scale and a factor, from one push."""
    assert la.calibration is not None
    choice = la.calibration.choice
    if choice.b:
        return {
            "default": predicted(la, problem, seconds),
            "dirichlet": predicted(la.replace(prior=la.prior), problem, {}),
        }
    settings = {"default": (choice.scale, choice.a), "dirichlet": (1.0, 1.0)}
    if labelled and problem.held is not None:
        chosen = la.tuned(method="validation", data=problem.held.data).calibration
        assert chosen is not None
        settings[LABELLED] = chosen.choice.scale, chosen.choice.a

    def under(pred: lw.Prediction, s: float, a: float) -> lw.Prediction:
        f = pred.outputs.scaled(s / choice.scale)
        return replace(pred, outputs=f.moved((a / choice.a - 1) * f.mean))

    found: dict[str, list[tuple[Tensor, ...]]] = {name: [] for name in settings}
    taken = 0.0
    for x, y in zip(*(t.split(FORWARD) for t in problem.test), strict=True):
        time, (pred, read) = clocks(lambda x=x, y=y: (pred := la.predict(x), _read(pred, y)))
        found["default"].append(read)
        for name in list(settings)[1:]:
            found[name].append(_read(under(pred, *settings[name]), y))
        taken += time["cpu"]
    unknown = None
    if problem.unknown is not None:
        unknown = torch.cat([la.predict(some).ood_score for some in problem.unknown.split(FORWARD)])
    pushed = [la.predict(x, joint=True) for x in problem.test[0][:JOINT].split(PIECE)]
    out = {}
    for name, (s, a) in settings.items():
        loss, probs, known = (torch.cat(parts) for parts in zip(*found[name], strict=True))
        wider = None if unknown is None else unknown * (s / choice.scale)  # a variance, as that of the known inputs is
        preds = iter([under(pred, s, a) for pred in pushed])
        jointly = together(lambda _, y, preds=preds: drawn(next(preds), y), *problem.test)
        out[name] = Answer(
            loss, probs, known, wider, jointly, {**seconds, "predict": taken} if name == "default" else {}
        )
    return out


def _read(pred: lw.Prediction, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What is kept of a prediction."""
    return -pred.log_prob(y).double(), pred.probs.double(), pred.ood_score


def laplace(
    problem: Problem | Held,
    likelihood: Any,
    how: dict[str, Any] | None = None,
    data: Pair | None = None,
    **options: Any,
) -> tuple[lw.Laplace, dict[str, float]]:
    """Tuned as `how` says, with CPU seconds; at the trained weights unless it does, as "classification" is by itself.
    data: other than those that the network was trained on."""
    how = how or ({} if likelihood == "classification" else {"center": "map"})
    fit, la = clocks(lambda: lw.laplace(problem.net, data or problem.train, likelihood, **options))
    tune, la = clocks(lambda: la.tuned(**how))
    return la, {"fit": fit["cpu"], "tune": tune["cpu"]}


def answers(problem: Problem, columns: tuple[str, ...]) -> tuple[dict[str, Answer], dict[str, Any] | None]:
    """Those of the columns that can be had, beside the network, and what the default has chosen."""
    f, y = logits(problem.net, problem.test[0]), problem.test[1]
    strange = None if problem.unknown is None else logits(problem.net, problem.unknown)
    at: Callable[[Pair], Answer] = lambda pair: tempered(f, y, strange, temperature(*pair))  # noqa: E731
    made, chosen = {"network": tempered(f, y, strange, 1.0)}, None
    if "hindsight" in columns:
        made["hindsight"] = at((f, y))
    if "temperature" in columns and problem.held is not None:
        made["temperature"] = at(problem.held.logits)
    if "last layer" in columns:
        made["last layer"] = predicted(*_of(problem, "categorical", **LAST), link="probit")
    if "softmax" in columns:
        made["softmax"] = predicted(*_of(problem, "categorical", structure="kron"))
    if "layerwise" in columns:
        made["layerwise"] = predicted(*_of(problem, "dirichlet", structure="kron", prior="layerwise"))
    if {"default", LABELLED} & {*columns}:
        la, seconds = laplace(problem, "classification")
        made |= both(la, problem, seconds, LABELLED in columns)
        chosen = _chosen(la)
    return made | rivals(problem, columns), chosen


def rivals(problem: Problem, columns: tuple[str, ...]) -> dict[str, Answer]:
    """Those of the columns, where they can be had."""
    made: dict[str, Answer] = {}
    if "log-ratio" in columns:
        made["log-ratio"] = rival(*_of(problem, lw.likelihoods.LogRatio(), structure="kron"))
    if "g-prior" in columns:
        made["g-prior"] = rival(*_of(problem, "dirichlet", structure="kron", prior=lw.priors.GPrior(1.0)))
    if "views" in columns and problem.views:
        shares, (x, y), n = lw.likelihoods.Weighted(lw.likelihoods.Dirichlet()), problem.train, len(problem.views) + 1
        data = torch.cat([x, *problem.views]), shares.pack(y.repeat(n), torch.full((n * len(y),), 1 / n))
        made["views"] = rival(*_of(problem, shares, data=data, structure="kron"))
    if "process" in columns:
        likelihood = lw.likelihoods.Dirichlet(EPSILON)
        fit = _of(problem, likelihood, how={"center": "process"}, structure="kron")
        made |= {mean: rival(*fit, mean=mean) for mean in ("process", "mixture")}
    if "validation" in columns and problem.held is not None:
        made["validation"] = rival(*validated(problem, problem.held))
    if "variational" in columns:
        made["variational"] = rival(*variational(problem))
    return made


def validated(problem: Problem, held: Held) -> tuple[lw.Laplace, Problem, dict[str, float]]:
    """A prior precision and a temperature by held labels. Where another network was trained without these, they are its
    own, given to the network that is scored."""
    how = {"method": "validation", "data": held.data}
    la, seconds = laplace(held, "dirichlet", how, structure="kron")
    if held.net is not problem.net:
        whole = lw.laplace(problem.net, problem.train, "dirichlet", structure="kron", prior=float(la.prior.precision))
        la = replace(whole, temperature=la.temperature, tuning=la.tuning)
    return la, problem, seconds


def variational(problem: Problem) -> tuple[Any, Problem, dict[str, float]]:
    """Of the power of ten whose bound is above those beside it."""

    def fit(power: int) -> Any:
        return lw.variational.tangent(problem.net, problem.train, "categorical", prior=10.0**power, tolerance=BOUND)

    def climbed() -> Any:
        best, at = fit(0), 0
        for step in (-1, 1):
            while at * step >= 0 and elbo(other := fit(at + step)) > elbo(best):
                best, at = other, at + step
        return best

    tune, best = clocks(climbed)
    return best, problem, {"tune": tune["cpu"]}


def elbo(post: Any) -> float:
    """The lower bound of log p(D)."""
    return float(post.diagnostics.elbo)


def _of(problem: Problem, likelihood: Any, **options: Any) -> tuple[lw.Laplace, Problem, dict[str, float]]:
    la, seconds = laplace(problem, likelihood, **options)
    return la, problem, seconds


def _chosen(la: lw.Laplace) -> dict[str, Any]:
    assert la.calibration is not None
    numbers = {**asdict(la.calibration.choice), "precision": float(la.prior.precision)}
    return {key: None if math.isnan(v) else v for key, v in numbers.items()}


def score(answer: Answer, network: Answer, y: Tensor) -> dict[str, Any]:
    """Means over test inputs; of the differences to the network, mean and variance."""
    hits = [(a.probs.argmax(1) == y).double() for a in (answer, network)]
    pairs = {"nll": answer.loss - network.loss, "accuracy": hits[0] - hits[1]}
    g, n = torch.Generator().manual_seed(0), len(y)
    again = (torch.randint(n, (n,), generator=g) for _ in range(RESAMPLED))
    spread = torch.tensor([lw.metrics.ece(answer.probs[some], y[some]) for some in again]).std()
    return {
        "n": n,
        "nll": float(answer.loss.mean()),
        "nll spread": float(answer.loss.std()) / math.sqrt(n),
        "ece": lw.metrics.ece(answer.probs, y),
        "ece spread": float(spread),
        "joint": answer.joint,
        "brier": lw.metrics.brier(answer.probs, y),
        "accuracy": float(hits[0].mean()),
        "auroc": None if answer.unknown is None else lw.metrics.auroc(answer.known, answer.unknown),
        "seconds": {key: round(v, 3) for key, v in answer.seconds.items()},
        "difference": {key: [float(d.mean()), float(d.var())] for key, d in pairs.items()},
    }


def scored(problem: Problem, columns: tuple[str, ...]) -> dict[str, Any]:
    """All that is kept of a network, of these columns alone."""
    found, chosen = answers(problem, columns)
    y, network = problem.test[1], found["network"]
    scores = {column: score(answer, network, y) for column, answer in found.items() if column in columns}
    if {"temperature", "default"} <= found.keys():  # judged where no label of its own is
        default, beside, other = (found[c].first(problem.unchosen) for c in ("default", "temperature", "network"))
        scores["temperature"] = score(beside, other, y[: problem.unchosen])
        if LABELLED in found:
            scores[LABELLED] = score(found[LABELLED].first(problem.unchosen), other, y[: problem.unchosen])
        d = default.loss - beside.loss
        scores["default"]["beside temperature"] = [len(d), float(d.mean()), float(d.var())]
    return {"n_train": len(problem.train[1]), "n_test": len(y), "choice": chosen, "columns": scores}
