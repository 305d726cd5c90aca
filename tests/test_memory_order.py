"""Channels last: what a capture sees in float32 is what it sees in the usual order, and in float64."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lapwing as lw
from lapwing.curvature.capture import Capture
from lapwing.curvature.products import gauss_newton

N, CLASSES = 7, 3


class Viewed(nn.Module):
    """`view` of what a convolution gave, which no tensor with channels last would have."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 6, 3, padding=1), nn.Linear(6 * 5 * 4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.conv(x)).view(len(x), -1))


class Means(Viewed):
    """A mean over one side, of three dimensions and in no order that has a name."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6 * 5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.conv(x)).mean(-1).view(len(x), -1))


class Shuffled(Viewed):
    """Channels cut into groups and shuffled."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Conv2d(6, 6, 3, padding=1, groups=3)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.conv(x))
        z = z.view(len(x), 2, 3, 5, 4).transpose(1, 2).contiguous().view(len(x), 6, 5, 4)
        return self.head(torch.relu(self.second(z)).flatten(1))


class Strided(Viewed):
    """Reads its memory in an order of its own."""

    def forward(self, x: Tensor) -> Tensor:
        z = torch.relu(self.conv(x))
        return self.head(torch.as_strided(z, (len(x), 120), (120, 1)))


class Residual(Viewed):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.second = nn.BatchNorm2d(6), nn.Conv2d(6, 6, (3, 1), padding=(1, 0))
        self.head = nn.Linear(6 * 2 * 2, CLASSES)
        self.norm.running_mean.uniform_(-0.5, 0.5)
        self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.relu(self.norm(self.conv(x)))
        z = nn.functional.max_pool2d(z + self.second(z), 2)
        return self.head(torch.flatten(z, 1))


def plain() -> nn.Module:
    layers = nn.Conv2d(2, 6, 3, 2, 1), nn.ReLU(), nn.Conv2d(6, 4, 3, 1, 1), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(24, CLASSES))


NETS = {"plain": plain, "view": Viewed, "mean": Means, "shuffle": Shuffled, "residual": Residual}


def problem(make: type, seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(seed)
    net = make().eval()
    return net, torch.randn(N, 2, 5, 4), torch.randint(CLASSES, (N,))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("structure", ["kron", "diag", "block"])
@pytest.mark.parametrize("name", NETS)
def test_curvature_and_predictions_are_those_of_float64(name: str, structure: str, seed: int) -> None:
    net, x, y = problem(NETS[name], seed)
    one = lw.laplace(net, [(x, y)], "categorical", structure=structure)
    two = lw.laplace(copy.deepcopy(net).double(), [(x.double(), y)], "categorical", structure=structure)
    assert one.state.tangent.facts.channels_last
    assert not two.state.tangent.facts.channels_last
    for key, value in two.state.sums.items():
        torch.testing.assert_close(one.state.sums[key].double(), value.double(), rtol=1e-4, atol=1e-5)
    close = one.predict(x).covariance.double(), two.predict(x.double()).covariance.double()
    torch.testing.assert_close(*close, rtol=1e-4, atol=1e-6)


def test_activations_and_gradients_run_with_channels_last() -> None:
    net, x, y = problem(NETS["plain"], 0)
    state = lw.laplace(net, [(x, y)], "categorical", structure="kron").state
    record = Capture(state.tangent, state.parts).run(x)
    inner = record.outputs["2"]
    assert inner.is_contiguous(memory_format=torch.channels_last)
    assert not inner.is_contiguous()
    (g,) = torch.autograd.grad(record.f.sum(), inner)
    assert g.stride() == inner.stride()


class Picky(Viewed):
    """Takes no order but the usual."""

    def forward(self, x: Tensor) -> Tensor:
        z = torch.relu(self.conv(x))
        if not z.is_contiguous():
            raise ValueError("not contiguous")
        return self.head(z.flatten(1))


@pytest.mark.parametrize("make", [Strided, Picky])
def test_a_network_that_looks_at_its_memory_runs_as_it_is(make: type) -> None:
    net, x, y = problem(make, 0)
    la = lw.laplace(net, [(x, y)], "categorical", structure="diag")
    assert not la.state.tangent.facts.channels_last
    twin = lw.laplace(copy.deepcopy(net).double(), [(x.double(), y)], "categorical", structure="diag")
    for key, value in twin.state.sums.items():
        torch.testing.assert_close(la.state.sums[key].double(), value.double(), rtol=1e-4, atol=1e-5)


def test_the_model_keeps_its_weights_in_their_order() -> None:
    net, x, y = problem(NETS["plain"], 0)
    before = {n: (p.stride(), p.detach().clone()) for n, p in net.named_parameters()}
    lw.laplace(net, [(x, y)], "categorical", structure="kron").predict(x)
    for name, p in net.named_parameters():
        assert p.stride() == before[name][0]
        assert torch.equal(p, before[name][1])


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", NETS)
def test_products_are_those_of_float64(name: str, seed: int) -> None:
    net, x, y = problem(NETS[name], seed)
    one, two = lw.linearize(net), lw.linearize(copy.deepcopy(net).double())
    v = torch.randn(3, one.layout.size, generator=torch.Generator().manual_seed(seed))
    likelihood = lw.likelihoods.Categorical()
    for some in (v[:1], v):  # by one run for both directions, and by jvps and vjps
        found = gauss_newton(one, likelihood, [(x, y)], some)
        expected = gauss_newton(two, likelihood, [(x.double(), y)], some.double())
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert one.facts.channels_last
    assert "through" not in one.facts.closed
    assert "jvps" not in one.facts.closed


class Squashed(Viewed):
    """What follows the flattening keeps its output, so a second run goes past it."""

    def first(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.relu(self.conv(x)).view(len(x), -1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x))


class Checkpointed(Squashed):
    """Its first layer runs again in the reverse pass, where `view` fails with channels last."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.first, x, use_reentrant=False))


class Reshaped(Checkpointed):
    """The same with `flatten`, which works."""

    def first(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.relu(self.conv(x)).flatten(1))


@pytest.mark.parametrize(("make", "last"), [(Checkpointed, False), (Reshaped, True)])
@pytest.mark.parametrize("structure", ["kron", "diag", "matrix_free"])
def test_checkpointed_layers_run_again(structure: str, make: type, last: bool) -> None:
    net, x, y = problem(make, 0)
    plain = Squashed().eval()
    plain.load_state_dict(net.state_dict())
    one, two = (lw.laplace(each, [(x, y)], "categorical", structure=structure) for each in (net, plain))
    assert one.state.tangent.facts.channels_last == last
    assert two.state.tangent.facts.channels_last
    torch.testing.assert_close(one.predict(x).covariance, two.predict(x).covariance, rtol=1e-3, atol=1e-5)
