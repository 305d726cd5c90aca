"""From the posterior over weights to the outputs at new inputs: f(x) ~ N(f(x, θ*), J(x) Σ J(x)ᵀ) (Eq. 4).

via="tangent"   the Gaussian above, exact for the tangent model
via="network"   weights are drawn and run through the network itself; known to underfit, offered for comparison
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lapwing import given, tree
from lapwing.curvature.capture import Capture, Record
from lapwing.curvature.cover import cover
from lapwing.curvature.memory import physical_memory
from lapwing.curvature.rows import RowMaker, StreamedRows
from lapwing.data import check_finite
from lapwing.distributed import ALONE
from lapwing.errors import InvalidValue
from lapwing.likelihoods import Likelihood
from lapwing.operators import Blocks, Dense, HeldRows, RootPlusDiagonal, Streamed
from lapwing.posterior import Gaussian
from lapwing.predictive import sampled, structured
from lapwing.predictive.prediction import Prediction
from lapwing.tangent import TangentModel
from lapwing.tangent.evaluating import evaluating
from lapwing.tangent.kernels import plain_kernels
from lapwing.tangent.rows import units

LARGEST = 128  # examples run at once: more only leave the caches
MANY = 512  # outputs past which predictions are draws, not covariances
AT_ONCE = 8  # weight vectors drawn at a time
MOST = 4096  # outputs at all positions past which they are too, unless only a head is Bayesian


@torch.inference_mode(False)
def predict(
    tangent: TangentModel,
    posterior: Gaussian,
    likelihood: Likelihood,
    x: Any,
    link: str = "auto",
    *,
    center: Tensor | None = None,
    joint: bool = False,
    via: str = "tangent",
    samples: int = 64,
    generator: torch.Generator | None = None,
    memory_budget: int = 2**30,
) -> Prediction:
    """Predict at x, about f(x), or about h(x, v̄) = f(x) + J(x)(v̄ − θ*) where a center v̄ is given."""
    samples, memory_budget = given.whole(samples, "samples", 1), given.memory(memory_budget)
    ranks = posterior.precision.ranks if isinstance(posterior.precision, Streamed) else ALONE
    with ranks.sharing_errors("reading the inputs"):
        check_finite(x, "the inputs")
        if any(t.ndim and not len(t) for t in tree.tensors(x)):
            raise InvalidValue("the inputs hold no example to predict at; give at least one")
    with torch.no_grad():
        if via == "network":
            return _through_network(tangent, posterior, likelihood, x, link, joint, samples, generator)
        if via != "tangent":
            raise InvalidValue(f"via must be 'tangent' or 'network', got {via!r}")
        if isinstance(posterior.precision, Streamed):
            return _by_samples(tangent, posterior.precision, likelihood, x, link, center, joint)
        if not joint and _too_many(tangent, x):
            return _by_draws(tangent, posterior, likelihood, x, link, center, samples, generator)
        f, cov = latent(tangent, posterior, x, joint, memory_budget)
        f = f if center is None else f + _moved(tangent, center, x)
        return Prediction(likelihood, _float(f), cov.to(_float(f)), link, joint)


def _too_many(tangent: TangentModel, x: Any) -> bool:
    """Whether covariances cost too much: outputs too many, or positions, each of which takes backward passes through
    the whole network. A head's own term takes none."""
    positions, c = tangent.output_shape(x)
    if c > MANY or positions * c <= MOST:
        return c > MANY
    live = [part for part in cover(tangent, x) if part.kind != "unused"]
    one = tree.rows_of(x, slice(0, 1)) if tangent.separable(x) else x
    record = Capture(tangent, tuple(live)).run(one)
    return any(part.generic or not record.is_output(part) for part in live)


def latent(tangent: TangentModel, posterior: Gaussian, x: Any, joint: bool, budget: int) -> tuple[Tensor, Tensor]:
    """f (n, ..., c) and J Σ Jᵀ: (n, ..., c, c), or (n, ..., c, n, ..., c) if joint."""
    precision = posterior.precision
    if isinstance(precision, RootPlusDiagonal) and not isinstance(precision.rows, HeldRows):
        return _dual(tangent, posterior, x, joint, budget)
    parts = posterior.parts or cover(tangent, x)
    fs, covs = [], []
    maker = RowMaker(tangent, parts)
    run = Capture(tangent, parts).run if isinstance(precision, Blocks) else maker.run
    for piece, record in runs(tangent, run, x, whole=joint, budget=budget):
        f = record.f.detach()
        if joint:
            _check_joint(f)
        fs.append(f)
        if isinstance(precision, Blocks):
            term = structured.joint if joint else structured.marginals
            covs.append(term(tangent, precision, parts, piece, record, budget))
        else:
            covs.append(_dense(maker, posterior, piece, record, joint, budget))
    return torch.cat(fs), torch.cat(covs)


def runs(
    tangent: TangentModel, run: Callable[[Any], Record], x: Any, whole: bool, budget: int
) -> Iterator[tuple[Any, Record]]:
    """Runs of the network over pieces of the inputs whose gradients, for all outputs, fit the budget."""
    if whole or not tangent.separable(x):
        yield x, run(x)
        return
    shapes = tuple(t.shape[1:] for t in tree.tensors(x))
    known = tangent.facts.example_bytes
    if shapes not in known:
        one = run(tree.rows_of(x, slice(0, 1)))
        outputs = one.f[0].numel()
        known[shapes] = 2 * one.column_bytes * outputs + 16 * outputs**2 + 1
    size = max(1, min(LARGEST, budget // 2 // known[shapes]))
    for start in range(0, tree.batch_size(x), size):
        piece = tree.rows_of(x, slice(start, start + size))
        yield piece, run(piece)


def _dense(maker: RowMaker, posterior: Gaussian, x: Any, record: Record, joint: bool, budget: int) -> Tensor:
    """One precision in memory: rows of the Jacobian, in pieces."""
    f = record.f.detach()
    whole = joint or not isinstance(posterior.precision, Dense)  # which has a rule for outer products
    outer = None if whole else maker.head(record)
    if outer is None and not whole and f.ndim == 2:
        outer = maker.outer(record, units(f))
    if outer is not None:
        return posterior.covariance(outer).reshape(*f.shape, f.shape[-1])
    pieces = maker.rows(record, x, units(f), budget // 6)
    if joint:
        return posterior.covariance(torch.cat(list(pieces)).reshape(1, f.numel(), -1)).reshape(*f.shape, *f.shape)
    c = f.shape[-1]
    return torch.cat([posterior.covariance(rows.reshape(-1, c, rows.shape[-1])) for rows in pieces]).reshape(
        *f.shape, c
    )


def _dual(tangent: TangentModel, posterior: Gaussian, x: Any, joint: bool, budget: int) -> tuple[Tensor, Tensor]:
    """The rows of the training data are streamed beside those of the inputs, a range of parameters at a time."""
    f = tangent(x)
    if joint:
        _check_joint(f)
    rows = StreamedRows(tangent, ((x, units(f)),), budget)
    blocks = posterior.covariance((rows, f.numel() if joint else f.shape[-1]))
    return f, blocks.reshape(*f.shape, *(f.shape if joint else f.shape[-1:]))


def _check_joint(f: Tensor) -> None:
    size, limit = 8 * f.numel() ** 2, physical_memory() // 4
    if size > limit:
        raise InvalidValue(
            f"the joint covariance of {f.numel():,} outputs is {size / 1e9:.3g} GB, more than a quarter of the memory; "
            "predict fewer inputs together, or use function_samples"
        )


def _moved(tangent: TangentModel, center: Tensor, x: Any) -> Tensor:
    """J(x)(v̄ − θ*)."""
    away = (center - tangent.theta.to(center)).to(tangent.dtype)
    return tangent.jvp(x, tangent.layout.unflatten(away)).detach()


def _by_draws(
    tangent: TangentModel,
    posterior: Gaussian,
    likelihood: Likelihood,
    x: Any,
    link: str,
    center: Tensor | None,
    samples: int,
    generator: torch.Generator | None,
) -> Prediction:
    """f + J z for draws z of the posterior about its mean: one jvp a draw, whatever the number of outputs."""
    if link not in ("auto", "monte_carlo"):
        raise InvalidValue(f"so many outputs are predicted by draws, so link={link!r} cannot apply; use 'auto'")
    f = _float(tangent(x) if center is None else tangent(x) + _moved(tangent, center, x))
    size, limit = samples * f.numel() * f.element_size(), physical_memory() // 4
    if size > limit:
        raise InvalidValue(
            f"{samples} draws of {tuple(f.shape)} outputs are {size / 1e9:.3g} GB, more than a quarter of the memory; "
            "predict fewer inputs at once, or give samples= fewer"
        )
    generator = generator or torch.Generator().manual_seed(0)
    draws = f.new_empty(samples, *f.shape)
    for start in range(0, samples, AT_ONCE):  # so few weight vectors are held at a time
        some = draws[start : start + AT_ONCE]
        away = posterior.draw(len(some), generator) - posterior.mean
        some.copy_(tangent.jvps(x, away)[1])
    return Prediction(likelihood, f, None, "monte_carlo", False, draws.add_(f))


def _by_samples(
    tangent: TangentModel,
    precision: Streamed,
    likelihood: Likelihood,
    x: Any,
    link: str,
    center: Tensor | None,
    joint: bool,
) -> Prediction:
    """By the kept samples; past so many outputs that a covariance is too large, by the samples themselves. Of samples
    that are spread over ranks, each rank pushes its own, at inputs that are the same on all."""
    z, ranks = precision.spread, precision.ranks
    if not ranks.agrees({f"input {i}": t for i, t in enumerate(tree.tensors(x)) if t.layout is torch.strided}):
        raise InvalidValue(
            f"samples are spread over {ranks.size} ranks, each of which pushes its own to the inputs, and the inputs "
            "differ between ranks; give the same to all, or call la = la.gathered() on all and predict on each its own"
        )
    moves = z if center is None else torch.cat([z, (center - tangent.theta.to(center)).unsqueeze(0)])
    with ranks.sharing_errors("a prediction"):
        f, away = sampled.pushed(tangent, moves, x)
    f, away = (f, away) if center is None else (f + away[-1], away[:-1])
    away = ranks.whole(away, "a prediction")
    if f.shape[-1] <= MANY:
        return Prediction(likelihood, f, sampled.covariance(away, joint), link, joint, samples=len(away))
    if joint or link not in ("auto", "monte_carlo"):
        raise InvalidValue(
            f"{f.shape[-1]} outputs are predicted by draws, so joint={joint} and link={link!r} cannot apply; use "
            "joint=False and link='auto'"
        )
    return Prediction(likelihood, f, None, "monte_carlo", False, f + away, samples=len(away))


def _through_network(
    tangent: TangentModel,
    posterior: Gaussian,
    likelihood: Likelihood,
    x: Any,
    link: str,
    joint: bool,
    samples: int,
    generator: torch.Generator | None,
) -> Prediction:
    if link not in ("auto", "monte_carlo"):
        raise InvalidValue(f"via='network' averages over weight samples, so link={link!r} cannot apply; use 'auto'")
    if samples < 2:
        raise InvalidValue(f"via='network' takes the variance over weight samples: give at least 2, got {samples}")
    weights = posterior.draw(samples, generator).to(tangent.dtype)
    with evaluating(tangent.model), plain_kernels():
        outputs = torch.stack([_float(tangent.apply(tangent.layout.unflatten(w), x)) for w in weights])
    mean = outputs.mean(0)
    away = outputs - mean
    if joint:
        flat = away.reshape(samples, -1)
        cov = (flat.mT @ flat / (samples - 1)).reshape(*mean.shape, *mean.shape)
    else:
        cov = torch.einsum("s...a,s...b->...ab", away, away) / (samples - 1)
    return Prediction(likelihood, mean, cov, "monte_carlo", joint, outputs)


def _float(f: Tensor) -> Tensor:
    return f.to(torch.promote_types(f.dtype, torch.float32))
