"""How sure a classifier may be, by its training data alone.

Its probabilities are the mean of p(y | a f + b m + √s e) over e ~ N(0, V) and over m: f the network's logits, V their
covariance under the posterior, m a ridge regression of the labels on features that have seen none, as a process
(ridge.py): away from the data it knows nothing. a, b and s are found at rows of training data, from two figures.

    premium    how much worse the network's own training data are predicted:  L(s, a) − L(0, 1),
               L(s, a) = mean −log E_e p(y_n | a f_n + √s e_n)
    left out   the mean loss of p(y | a ℓ_n + b m_n + √s e), where ℓ_n is what the other logits, and m_n what the other
               labels, foretell of example n by the features; ℓ_n is a draw of its process

1. T ≥ 1, the temperature at which the left-out loss of ℓ/T is least.
2. s ≤ 1, the least of what the left-out loss prefers and of what costs a premium of PREMIUM nats.
3. Where the data are few and the features foretell half of what the network says (R² of ℓ's mean): (a, b) of the least
   left-out loss, a in [FLOOR/T, 1], b in [0, MOST], if that is better by two standard errors.
4. Elsewhere b = 0. Where the data are few, a = 1/T, or as far from 1 as what is left of the premium allows; with many,
   a = 1: the posterior is enough, and a temperature that the premium allows can be far too high.

Where the inputs have no features, s is by the premium alone and a = 1: at 600 classes with three examples each, what
of a temperature cost .02 nats on the training data cost .11 on others. A network that was trained to be modest
(label smoothing: its entropy on training data is far above its loss there) has paid already: its premium is 0.
Constants were chosen on digits, glass, vehicle, Fashion-MNIST and 1,500 images of CIFAR-10
(docs/studies/classifiers.md).
Shapes: k draws of ℓ, j nodes of e, m rows, c outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.likelihoods import Likelihood
from lapwing.predictive.moments import entropy

PREMIUM = 0.02  # nats a row
FLOOR = 0.75  # of 1/T, for a
MOST = 12.0  # for b
LEAST_SCALE = 2.0**-14  # for s, so that error bars do not vanish; it costs about 1e-5 nats
MODEST = 0.25  # nats a row, by which a network may say less of its training data than it knows
MOST_SURE = 2.0  # for a, where held-out labels choose: they may find a network not sure enough
COOLEST = 8.0  # for T, by the premium
FEW = 4000  # examples up to which labels are pooled, and logits cooled: with more, networks outgrow fixed features
HALF = 0.5  # the least R²


@dataclass(frozen=True, eq=False)
class CalibrationRows:
    """What is known of m rows of training data: logits f (m, c), nodes e (j, m, c) of N(0, V), targets y; and, left
    out, draws ℓ (k, m, c) of logits with their R², means (m, c) of labels, and nodes (j, m, c) about those."""

    likelihood: Likelihood
    f: Tensor
    e: Tensor
    y: Tensor
    n: int  # of all the data
    logits: Tensor | None = None
    r2: float = 0.0
    labels: Tensor | None = None
    doubt: Tensor | None = None

    def loss(self, s: float | Tensor, f: Tensor, more: Tensor | None = None) -> Tensor:
        """−log E_e p(y | f + √s e), (..., m), at logits f (..., m, c). more: nodes (j, m, c) beside those of e."""
        if not isinstance(s, Tensor) and s == 0 and more is None:
            return -self.likelihood.log_prob(f, self.y.expand(*f.shape[:-2], *self.y.shape))
        nodes = f.unsqueeze(-3) + (s**0.5 * self.e + (0.0 if more is None else more))  # (..., j, m, c)
        y = self.y.expand(*nodes.shape[:-2], *self.y.shape)
        return math.log(len(self.e)) - self.likelihood.log_prob(nodes, y).logsumexp(-2)

    def premium(self, s: float, a: float) -> float:
        """L(s, a) − L(0, 1)."""
        return float((self.loss(s, a * self.f) - self.loss(0.0, self.f)).mean())

    @property
    def budget(self) -> float:
        """The premium that may be paid: none by a network whose entropy is MODEST above its loss."""
        said = entropy(self.likelihood, self.likelihood.mean(self.f))
        said = said.sum(-1) if said.ndim > self.f.ndim - 1 else said  # binary outputs, one by one
        return 0.0 if float((said - self.loss(0.0, self.f)).mean()) > MODEST else PREMIUM

    def left_out(self, s: float, a: Tensor | float, b: Tensor | float) -> Tensor:
        """The loss of each row, left out, (m,)."""
        assert self.logits is not None
        assert self.labels is not None
        assert self.doubt is not None
        more = b * self.doubt if isinstance(b, Tensor) or b else None
        losses = [self.loss(s, a * one + b * self.labels, more) for one in self.logits]  # one by one: (j, m, c) each
        return torch.stack(losses).mean(0)


@dataclass(frozen=True)
class Choice:
    """s, a and b, and the figures that they follow from; NaN where there are none."""

    scale: float
    a: float
    b: float
    premium: float
    r2: float = math.nan
    temperature: float = math.nan
    left_out: float = math.nan  # the mean left-out loss
    network: float = math.nan  # that of s = 0, a = 1, b = 0


def choose(rows: CalibrationRows) -> Choice:
    """By steps 1 to 4."""
    budget = rows.budget
    s = _largest(lambda s: rows.premium(s, 1.0), budget, LEAST_SCALE, 1.0)
    if rows.logits is None:
        return Choice(s, 1.0, 0.0, rows.premium(s, 1.0))
    T = 1 / _lowest(lambda a: float(rows.left_out(0.0, a, 0.0).mean()), 1 / 50, 1.0)
    scales = [LEAST_SCALE * 2**k for k in range(15)]
    s = min(s, min(scales, key=lambda s: float(rows.left_out(s, 1.0, 0.0).mean())))
    pooled = _pooled(rows, s, T) if rows.n <= FEW and rows.r2 >= HALF else None
    a, b = pooled or (1 / min(T, _coolest(rows, s, budget)), 0.0)
    found = [float(rows.left_out(*some).mean()) for some in ((s, a, b), (0.0, 1.0, 0.0))]
    return Choice(s, a, b, rows.premium(s, a), rows.r2, T, *found)


def _pooled(rows: CalibrationRows, s: float, T: float) -> tuple[float, float] | None:
    """(a, b) of the least left-out loss; None where that is not better than (1, 0) by two standard errors."""
    low, high = torch.tensor([FLOOR / T, 0.0]).double(), torch.tensor([1.0, MOST]).double()
    at = boxed(lambda w: rows.left_out(s, w[0], w[1]).mean(), torch.tensor([1.0, 0.0]).double(), low, high)
    a, b = at.tolist()
    gain = rows.left_out(s, 1.0, 0.0) - rows.left_out(s, a, b)
    return (a, b) if float(gain.mean()) > 2 * float(gain.std()) / math.sqrt(len(gain)) else None


def _coolest(rows: CalibrationRows, s: float, budget: float) -> float:
    """The temperature that is within the premium beside s; 1 where the data are many."""
    return 1.0 if rows.n > FEW else _largest(lambda T: rows.premium(s, 1 / T), budget, 1.0, COOLEST)


def _largest(cost: Callable[[float], float], budget: float, low: float, high: float) -> float:
    """The largest t in [low, high] whose cost is within the budget; low where none is. The cost rises."""
    if cost(high) <= budget:
        return high
    for _ in range(20):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if cost(middle) <= budget else (low, middle)
    return low


def _lowest(loss: Callable[[float], float], low: float, high: float) -> float:
    """argmin of a convex function of log t, by golden sections."""
    ratio, x, y = (math.sqrt(5) - 1) / 2, math.log(low), math.log(high)
    at = lambda t: loss(math.exp(t))  # noqa: E731
    left, right = y - ratio * (y - x), x + ratio * (y - x)
    here, there = at(left), at(right)
    for _ in range(30):
        if here < there:
            y, right, there = right, left, here
            left = y - ratio * (y - x)
            here = at(left)
        else:
            x, left, here = left, right, there
            right = x + ratio * (y - x)
            there = at(right)
    best = math.exp(0.5 * (x + y))
    return min((best, high), key=loss)


def boxed(loss: Callable[[Tensor], Tensor], start: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """argmin in a box, by projected Newton steps that are halved until they help."""
    w, value = start, loss(start)
    for _ in range(40):
        gradient, H = _slopes(loss, w)
        stuck = ((w <= low) & (gradient > 0)) | ((w >= high) & (gradient < 0))
        H = torch.where(stuck[:, None] | stuck, torch.diag_embed(stuck.double()), H)
        values, vectors = torch.linalg.eigh(H)
        step = vectors @ ((vectors.mT @ gradient.masked_fill(stuck, 0.0)) / values.abs().clamp(min=1e-8))
        for halving in range(30):
            new = torch.minimum(torch.maximum(w - step * 0.5**halving, low), high)
            if (found := loss(new)) < value:
                break
        else:
            return w
        small = float(value - found) < 1e-7
        w, value = new, found
        if small:
            return w
    return w


def _slopes(loss: Callable[[Tensor], Tensor], w: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient (k,) and the Hessian (k, k), by reverse mode twice: torch's forward mode is slow here."""
    with torch.enable_grad():
        at = w.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(at), at, create_graph=True)
        rows = [torch.autograd.grad(one, at, retain_graph=True)[0] for one in gradient]
    return gradient.detach(), torch.stack(rows)
