"""The empirical tangent kernel equals J Jᵀ of plain autograd, however it is cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from helpers import backward_rows, close, draw, normal
from lapwing.gp.empirical import own_products, products
from lapwing.gp.gradients import Side
from lapwing.gp.multiply import by_rows


class Tied(nn.Module):
    """A weight that is used twice: no rule speaks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(torch.tanh(self.inner(x)))))


class Mixing(nn.Module):
    """Outputs that depend on the whole batch: it cannot be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x)) - torch.tanh(self.inner(x)).mean(0)


class Branching(nn.Module):
    """Which layer is called depends on the data: no treatment is chosen for all batches."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        up = x[:, :1] > 0
        first = self.one(x) if bool(up.any()) else 0.0
        second = self.two(x) if not bool(up.all()) else 0.0
        return torch.where(up, first, second)


def network(kind: str) -> tuple[nn.Module, tuple[int, ...]]:
    torch.manual_seed(0)
    if kind == "dense":
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double(), (4,)
    if kind == "images":
        head = nn.Flatten(), nn.Linear(24, 3)
        return nn.Sequential(nn.Conv2d(2, 4, 2, groups=2), nn.BatchNorm2d(4), nn.Tanh(), *head).double().eval(), (
            2,
            3,
            4,
        )
    if kind == "tied":
        return Tied().double(), (4,)
    if kind == "mixing":
        return Mixing().double(), (4,)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double(), (2, 4)  # positions


KINDS = ("dense", "images", "tied", "positions", "mixing")


def jacobian(model: nn.Module, x: Tensor) -> Tensor:
    """(*f, p)."""
    return backward_rows(model(x), model.parameters())


@pytest.mark.filterwarnings("ignore:this network cannot be cut into examples")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [None, 2**16])
def test_it_is_the_product_of_jacobians(kind: str, budget: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, shape = network(kind)
    smaller_pieces(monkeypatch, 4)
    tangent, x, other = lw.linearize(model), draw(7, *shape), draw(5, *shape)
    J, H = jacobian(model, x), jacobian(model, other)
    close(lw.gp.kernel(tangent, x, other, memory_budget=budget), torch.tensordot(J, H, ([-1], [-1])), 1e-10)
    close(lw.gp.kernel(tangent, x, memory_budget=budget), torch.tensordot(J, J, ([-1], [-1])), 1e-10)
    if kind != "positions":
        each = torch.einsum("ncp,mcp->cnm", J, H)
        close(lw.gp.kernel(tangent, x, other, per_output=True, memory_budget=budget), each, 1e-10)
        own = torch.einsum("ncp,mcp->cnm", J, J)
        close(lw.gp.kernel(tangent, x, per_output=True, memory_budget=budget), own, 1e-10)


def smaller_pieces(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr("lapwing.gp.gradients.LARGEST", size)
    monkeypatch.setattr("lapwing.gp.gradients.CONVOLVED", size)


@pytest.mark.parametrize("kind", ["dense", "images", "tied", "positions"])
@pytest.mark.parametrize("block", [1, 2, 3])
@pytest.mark.parametrize("cost", [-(10**6), 10**6], ids=["factored", "made"])
def test_blocks_and_pieces_change_nothing(kind: str, block: int, cost: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few examples at once on both sides, few outputs, and both orders of a layer's products."""
    model, shape = network(kind)
    smaller_pieces(monkeypatch, 2)
    monkeypatch.setattr("lapwing.gp.gradients.ELEMENTWISE", cost)
    monkeypatch.setattr("lapwing.gp.empirical.ENTRIES", 200)
    tangent, x, other = lw.linearize(model), draw(7, *shape), draw(5, *shape)
    J, H = jacobian(model, x), jacobian(model, other)
    side = Side(tangent, x, 2 * block * J[0].numel() * 8)
    there = Side(tangent, other, side.budget)
    own = torch.stack([rows.flatten(0, -2) @ rows.flatten(0, -2).mT for rows in J])
    close(own_products(side), own, 1e-10)
    if kind == "positions":
        close(products(side, there), torch.tensordot(J, H, ([-1], [-1])), 1e-10)
        close(products(side, None), torch.tensordot(J, J, ([-1], [-1])), 1e-10)
        return
    for per_output, law in ((True, "ncp,mcp->cnm"), (False, "ncp,mdp->ncmd")):
        close(products(side, there, per_output), torch.einsum(law, J, H), 1e-10)
        close(products(side, None, per_output), torch.einsum(law, J, J), 1e-10)


@pytest.mark.parametrize("kind", ["dense", "images"])
def test_a_prior_weighs_the_weights(kind: str) -> None:
    model, shape = network(kind)
    tangent, x, other = lw.linearize(model), draw(7, *shape), draw(5, *shape)
    J, H = jacobian(model, x), jacobian(model, other)
    for precision in (0.3 + torch.rand(J.shape[-1]).double(), torch.full((J.shape[-1],), 0.7).double()):
        found = products(Side(tangent, x, 2**20, precision), Side(tangent, other, 2**20, precision))
        close(found, torch.einsum("ncp,p,mdp->ncmd", J, 1 / precision, H), 1e-10)


def test_subsets_float32_and_one_input() -> None:
    model, _ = network("dense")
    x = normal(1, 4)
    last = lw.linearize(model, subset="last_layer", example=x)
    J = jacobian(model, x)[..., 25:]
    close(lw.gp.kernel(last, x), torch.einsum("ncp,mdp->ncmd", J, J), 1e-10)
    single = lw.gp.kernel(lw.linearize(model.float()), x.float())
    assert single.dtype == torch.float64
    model.double()


@pytest.mark.parametrize("kind", ["dense", "images"])
def test_float32_is_float64_up_to_rounding(kind: str) -> None:
    """Another library makes the products there, from memory in another order."""
    model, shape = network(kind)
    x, other = draw(7, *shape), draw(5, *shape)
    J, H = jacobian(model, x), jacobian(model, other)
    tangent = lw.linearize(model.float())
    for per_output, law in ((True, "ncp,mcp->cnm"), (False, "ncp,mdp->ncmd")):
        found = lw.gp.kernel(tangent, x.float(), other.float(), per_output=per_output)
        assert float((found - torch.einsum(law, J, H)).norm() / found.norm()) < 1e-6


def test_products_of_rows_whatever_their_order_in_memory() -> None:
    a, b = normal(6, 4, 5), normal(3, 4, 5, seed=1)
    strided, ordered = (a[:, 1], b[:, 2]), (a[:, 1].contiguous(), b[:, 2].contiguous())
    for one, two in (strided, ordered, (a[:, 0, :1], b[:, 1, :1]), (a[:1, 3], b[:, 3].contiguous())):
        close(by_rows(one, two), one @ two.mT, 1e-12)
        found = by_rows(one.float(), two.float())
        assert float((found - one @ two.mT).norm() / found.norm()) < 1e-6


def test_tokens_are_looked_up() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4), nn.Tanh(), nn.Flatten(), nn.Linear(20, 3)).double()
    x, other = torch.randint(7, (6, 5)), torch.randint(7, (4, 5))
    J, H = jacobian(model, x), jacobian(model, other)
    close(lw.gp.kernel(lw.linearize(model), x, other), torch.einsum("ncp,mdp->ncmd", J, H), 1e-10)


@pytest.mark.filterwarnings("ignore:this network cannot be batched")
def test_layers_that_are_not_always_called() -> None:
    torch.manual_seed(0)
    model, x = Branching().double(), draw(6, 4)
    x[:, 0] = torch.tensor([1.0, -1, 1, -1, 1, 1])  # the probe calls both, single examples one
    J = jacobian(model, x)
    side = Side(lw.linearize(model), x, 2 * J[0].numel() * 8)
    close(products(side, None), torch.einsum("ncp,mdp->ncmd", J, J), 1e-10)
    other = Side(side.tangent, x[:1], 2**20)
    close(products(side, other), torch.einsum("ncp,mdp->ncmd", J, J[:1]), 1e-10)


def test_repeated_inputs_have_equal_rows() -> None:
    model, _ = network("dense")
    x = normal(3, 4)
    K = lw.gp.kernel(lw.linearize(model), torch.cat([x, x]))
    close(K[:3], K[3:], 1e-12)


def test_bad_input_is_named() -> None:
    model, _ = network("positions")
    tangent = lw.linearize(model)
    with pytest.raises(lw.errors.Unsupported, match="per_output"):
        lw.gp.kernel(tangent, draw(3, 2, 4), per_output=True)
    with pytest.raises(lw.errors.InvalidValue, match=r"lw\.linearize"):
        lw.gp.kernel(model, draw(3, 2, 4))
    with pytest.raises(lw.errors.InvalidValue, match="no example"):
        lw.gp.kernel(tangent, draw(0, 2, 4))
    with pytest.raises(lw.errors.InvalidValue, match="NaN"):
        lw.gp.kernel(tangent, draw(3, 2, 4) * float("nan"))
