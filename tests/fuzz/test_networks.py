"""Sixty random networks, thirty in the quick tier: every law of `laws.py` holds, or the fit is refused for a reason
on the list.

`make soak` runs 2,000; `python tests/fuzz/networks.py --only SEED` runs one and shows it.
"""

from __future__ import annotations

import copy

import pytest
import torch
from agreement import Difference, agree, snapshot, untouched
from cases import draw
from networks import run
from oracle import jacobian, plain_copy
from torch import nn

CASES = 60


@pytest.mark.parametrize("first", [0, 10, *(pytest.param(k, marks=pytest.mark.full) for k in range(20, CASES, 10))])
def test_random_networks_agree_with_dense_torch(first: int) -> None:
    failed = [one for one in map(run, range(first, first + 10)) if one.failed]
    assert not failed, "\n".join(
        f"{one.end}: {one.message}  [{one.what}]; again: python tests/fuzz/networks.py --only {one.seed}"
        for one in failed
    )


def test_a_seed_is_one_case() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    one, two = draw(11), draw(11)
    assert torch.equal(torch.get_rng_state(), before)
    assert str(one) == str(two)
    for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_oracle_is_right_where_the_answer_is_known() -> None:
    """J of a linear layer W x + b: row c has x at the places of W_c, and one at b_c."""
    net = nn.Linear(3, 2)
    x = torch.randn(4, 3)
    f, J = jacobian(plain_copy(net), x)
    expected = torch.zeros(4, 2, 8, dtype=torch.float64)
    for c in range(2):
        expected[:, c, 3 * c : 3 * c + 3] = x.double()
        expected[:, c, 6 + c] = 1
    torch.testing.assert_close(J, expected)
    torch.testing.assert_close(f.float(), net(x).detach(), rtol=1e-5, atol=1e-6)


def test_a_difference_is_seen() -> None:
    ones = torch.ones(3)
    agree("equal", ones, ones + 1e-9, 1e-7)
    with pytest.raises(Difference, match="off by"):
        agree("not equal", ones, ones + 1e-5, 1e-7)
    with pytest.raises(Difference, match="NaN"):
        agree("no number", ones * torch.nan, ones, 1e-7)


@pytest.mark.parametrize("what", ["values", "modes", "hooks", "flags", "random"])
def test_a_touched_model_is_seen(what: str) -> None:
    net = copy.deepcopy(draw(3).model)
    before = snapshot(net)
    if what == "values":
        next(net.parameters()).data.add_(1e-6)
    elif what == "modes":
        net.train(not net.training)
    elif what == "hooks":
        net.head.register_forward_hook(lambda *_: None)
    elif what == "flags":
        net.head.weight.requires_grad_(False)
    else:
        torch.rand(1)
    with pytest.raises(Difference, match=what):
        untouched(net, before)
