"""`pred.ood_score`: the variance of outputs, without what the response cannot see."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lapwing as lw
from helpers import close


def outputs(seed: int, n: int = 4, c: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    root = torch.randn(n, c, c, generator=g).double()
    return torch.randn(n, c, generator=g).double(), root @ root.mT


@pytest.mark.parametrize("seed", range(3))
def test_of_classes_it_is_the_trace_of_centered_logits(seed: int) -> None:
    mean, cov = outputs(seed)
    P = torch.eye(3).double() - 1 / 3
    score = lw.Prediction(lw.likelihoods.Categorical(), lw.outputs.Normal(mean, cov)).ood_score
    close(score, (P @ cov @ P).diagonal(dim1=-2, dim2=-1).sum(-1))
    shifted = lw.Prediction(lw.likelihoods.Categorical(), lw.outputs.Normal(mean, cov + 7.0)).ood_score
    close(shifted, score)
    for likelihood in (lw.likelihoods.Gaussian(0.3), lw.likelihoods.Bernoulli()):
        close(lw.Prediction(likelihood, lw.outputs.Normal(mean, cov)).ood_score, cov.diagonal(dim1=-2, dim2=-1).sum(-1))


def test_of_many_classes_it_is_that_of_the_draws() -> None:
    values = torch.randn(6, 4, 600, generator=torch.Generator().manual_seed(0)).double()
    pred = lw.Prediction(lw.likelihoods.Categorical(), lw.outputs.Draws(values))
    gap = values - values.mean(-1, keepdim=True)
    close(pred.ood_score, gap.var(0, correction=0).sum(-1))


def test_it_tells_inputs_that_are_far_from_the_data() -> None:
    torch.manual_seed(0)
    x = torch.randn(80, 2).double()
    y = (x[:, 0] > 0).long()
    net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2)).double()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    for _ in range(200):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    la = lw.laplace(net, (x, y), "dirichlet", structure="full").tuned(center="map")
    near, far = la.predict(torch.randn(50, 2).double()).ood_score, la.predict(8 + torch.randn(50, 2).double()).ood_score
    assert lw.metrics.auroc(near, far) > 0.9
