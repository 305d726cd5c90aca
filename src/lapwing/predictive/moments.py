"""Moments of y from nodes of f: the one place where sums over nodes become fields of a prediction.

    mean        m = Σ_s w_s m_s,   m_s = E[y | f_s]
    epistemic   Σ_s w_s (m_s − m)²                       aleatoric   Σ_s w_s Var[y | f_s]

For classes y is 0 or 1 in each class, so total = m (1 − m), and aleatoric is what epistemic leaves of it; beside them
the entropies H(m) = Σ_s w_s H(m_s) + mutual information.

A link in closed form has another mean m′. Its total is m′ (1 − m′) and its entropy H(m′): nodes give only the shares,
epistemic/total and information/entropy (`share`). Nodes (s, n, c), targets (n, t), all in float64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lapwing.likelihoods import Likelihood
from lapwing.outputs import Nodes


def mean_and_spread(likelihood: Likelihood, nodes: Nodes) -> Tensor:
    """Mean and epistemic variance, (n, 2, t). Squares are taken about the mean, so nothing cancels; what is beyond the
    largest float is infinite, not NaN."""
    means = likelihood.mean(nodes.f)
    mean = nodes.average(means)
    mean = mean.clamp(max=1) if likelihood.classes else mean  # weights sum to one but for rounding
    spread = nodes.average((means - mean).square())
    return torch.stack([mean, torch.where(mean.isinf(), math.inf, spread)], 1)


def noise(likelihood: Likelihood, nodes: Nodes) -> Tensor:
    """The expected variance of y given f, (n, t)."""
    return nodes.average(likelihood.variance(nodes.f))


def expected_entropy(likelihood: Likelihood, nodes: Nodes) -> Tensor:
    """E H(p), (n, ...)."""
    return nodes.average(entropy(likelihood, likelihood.mean(nodes.f)))


def binary_variance(mean: Tensor) -> Tensor:
    """Of what is 1 with these probabilities and else 0."""
    return mean * (1 - mean)


def entropy(likelihood: Likelihood, mean: Tensor) -> Tensor:
    """H of the class that has the probabilities E[y], in nats."""
    p = likelihood.class_probs(mean)
    return -torch.xlogy(p, p).sum(-1)


def share(part: Tensor, whole: Tensor, of: Tensor) -> Tensor:
    """The same share of another whole: of · part/whole, and 0 of a whole that is 0."""
    return of * torch.where(whole > 0, part / whole, 0.0).clamp(0, 1)
