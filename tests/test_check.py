"""`la.check()`: the figures against their definitions, and the words against what they are about."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lapwing as lw

N = 40


def fitted(likelihood: object, epochs: int = 600, **options: object) -> lw.Laplace:
    """A classifier that fits its labels."""
    torch.manual_seed(0)
    x = torch.randn(N, 3).double()
    y = (x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] > 1).long()
    net = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    for _ in range(epochs):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return lw.laplace(net, (x, y), likelihood, **options)


@pytest.mark.parametrize("likelihood", ["categorical", "dirichlet"])
def test_the_figures_are_their_definitions(likelihood: str) -> None:
    la = fitted(likelihood, structure="full", prior=3.0)
    x, y = la.data.inputs, la.data.targets
    found, pred = la.check(), lw.predict(la.spread, la.likelihood.plain, x)
    assert found.rows == N
    assert found.training == pytest.approx(float(-pred.log_prob(y).mean().cpu()), rel=1e-6)
    assert found.network == pytest.approx(float(nn.functional.cross_entropy(la.tangent(x), y)), rel=1e-6)
    root = la.likelihood.scaled_root(pred.f_mean, y)
    reckoned = 0.5 * (root.mT @ pred.covariance @ root).diagonal(dim1=-2, dim2=-1).sum() / N
    assert found.reckoned == pytest.approx(float(reckoned), rel=1e-6)
    if likelihood == "dirichlet":  # whose loss is quadratic: what is paid is what is reckoned with
        assert found.paid == pytest.approx(found.reckoned, rel=0.02)
    assert found.left_out is None
    mode = la.recentered(center="process")
    assert mode.check().left_out == pytest.approx(float(-mode.leave_one_out().score.mean()), rel=1e-6)


def test_a_posterior_that_is_too_wide_is_told_and_what_to_call() -> None:
    wide = fitted("categorical", structure="full", prior=1e-4).check()
    assert not wide.ok
    assert "likelihood='classification'" in repr(wide)
    assert "Raise the prior precision" in repr(wide)
    narrow = fitted("categorical", structure="full", prior=1e6).check()
    assert narrow.ok
    assert narrow.findings == ()
    labels = fitted("dirichlet", structure="kron", prior=1e-6).check()
    assert "likelihood='dirichlet'" not in repr(labels)


def test_the_share_of_the_prior_is_one_where_data_say_nothing() -> None:
    la = fitted("dirichlet", structure="full", prior=1e9).recentered(center="process")
    found = la.check()
    assert found.no_data is not None
    assert found.no_data > 0.99
    assert any("error bars are the prior's" in text for text in found.findings)
