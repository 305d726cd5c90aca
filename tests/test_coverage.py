"""Whatever a network does with its parameters, none is dropped and none is wrong.

Each network here uses its parameters in some way that layer rules could misread. For all of them, on every structure:
the exact diagonal is that of the dense GGN, every dense part is its block, every parameter stands in la.coverage with
a reason, and the model is left as it was found.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lapwing as lw
from helpers import close
from helpers import normal as numbers
from lapwing.errors import InvalidValue
from lapwing.likelihoods import Gaussian
from lapwing.operators import linalg

N = 6
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet")  # torch's vmap


# -- networks --------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """An embedding that is also the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.fc = nn.Linear(3, 3)
        self.out = nn.Linear(3, 5, bias=True)
        self.out.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.fc(self.embedding(x).mean(1))))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.last = nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.again(torch.tanh(self.again(h)))))


class Functional(nn.Module):
    """A layer whose weight is used without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.last = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(F.linear(x, self.fc.weight, self.fc.bias)))


class CalledAndFunctional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.last = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.fc(x) + F.linear(x.cos(), self.fc.weight)))


class SilentSecondUse(nn.Module):
    """The second use of a weight has no gradient on the first four examples: a probe of them cannot see it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.last = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        gate = F.relu(x[:, :1])
        return self.last(torch.tanh(self.fc(x) + gate * F.linear(x, self.fc.weight)))


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.last = nn.Linear(4, 3), nn.Linear(3, 2)
        self.scale, self.temperature = nn.Parameter(torch.randn(3)), nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.fc(x) * self.scale)) / self.temperature


class Low(nn.Module):
    """A custom layer, z = U V x."""

    def __init__(self, inp: int, out: int) -> None:
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.randn(out, 2)), nn.Parameter(torch.randn(2, inp))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.other.mT @ self.weight.mT


class Spare(nn.Module):
    """A module that is never called, and one whose output goes nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.spare, self.fc, self.lost, self.last = nn.Linear(3, 2), nn.Linear(4, 3), nn.Linear(3, 5), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.fc(x))
        self.lost(h)
        return self.last(h)


class InPlace(nn.Module):
    """Outputs that are changed after the layer has given them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.last = nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = F.elu(self.a(x), inplace=True)
        h = self.b(h)
        h[:, 1] = 0
        h = self.c(torch.tanh(h)).mul_(0.5)
        h.add_(1).sin_()
        return self.last(h).add_(x[:, :2])


class FirstToken(nn.Module):
    """The batch in dimension 1, and only the first position read: the sum over examples is then right in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.last = nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = x.transpose(0, 1)  # (t, n, i)
        return self.last(torch.tanh(self.norm(self.fc(h)))[0])


class DeadAtFirst(nn.Module):
    """The batch in dimension 1, behind a ReLU that is dead on the first four examples: their gradients are all 0."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.gate, self.last = nn.Linear(3, 4), nn.Linear(3, 1), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.gate(x[:, 0])) * self.last(torch.tanh(self.fc(x.transpose(0, 1)))).sum(0)


class TimeFirst(nn.Module):
    """The batch in dimension 1, all positions read."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.fc(x.transpose(0, 1)))).sum(0)


class Positions(nn.Module):
    """A layer whose input has no batch at all: an embedding of positions, as many as the probe has examples."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places, self.last = nn.Embedding(5, 3), nn.Embedding(4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        return self.last(torch.tanh(h).mean(1))


class Queries(nn.Module):
    """A layer applied to a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.key, self.last = nn.Parameter(torch.randn(4, 3)), nn.Linear(3, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        attention = torch.softmax(x @ self.key(self.queries).mT, -1)
        return self.last(attention @ self.key.bias.expand(4, 5).cos() + x)


class TupleLinear(nn.Linear):
    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x), None


class Tuples(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.last = TupleLinear(4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.fc(x)[0]))


class Keywords(nn.Module):
    """Layers called by keyword, as fc(input=x)."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.last = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(input=torch.tanh(self.fc(input=x)))


class Attention(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.attention = nn.MultiheadAttention(4, 2, batch_first=batch_first)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = x if self.batch_first else x.transpose(0, 1)
        h = self.attention(h, h, h, need_weights=False)[0]
        return self.last(h.mean(1 if self.batch_first else 0))


class Encoder(nn.Module):
    """nn.TransformerEncoder: in eval mode a fused kernel reads the weights of submodules that are never called."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        layer = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.1, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.encoder(x if self.batch_first else x.transpose(0, 1))
        return self.last(h[:, 0] if self.batch_first else h[0])


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.utils.checkpoint.checkpoint(self.body, x, use_reentrant=False)
        return self.last(torch.tanh(h))


class Routed(nn.Module):
    """Each example goes to one of two experts: layers are called on some of the examples."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.last = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)]), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 3)
        for i, expert in enumerate(self.experts):
            mine = (x[:, 0] > 0) == bool(i)
            h[mine] = expert(x[mine])
        return self.last(torch.tanh(h))


class Straight(torch.autograd.Function):
    """A function with a derivative of the user's own, and no rule for vmap."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return g * (1 - 0.3 * x.tanh())


class OwnDerivative(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.last = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Straight.apply(self.fc(x)))


class Recurrent(nn.Module):
    def __init__(self, kind: Any, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.rnn, self.last = kind(3, 2, batch_first=batch_first), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out = self.rnn(x if self.batch_first else x.transpose(0, 1))[0]
        return self.last(out[:, -1] if self.batch_first else out[-1])


class NoRules(nn.Module):
    """Modules of torch without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act = nn.ConvTranspose1d(2, 3, 2, stride=2), nn.PReLU(3)
        self.bag, self.both, self.last = nn.EmbeddingBag(4, 2), nn.Bilinear(6, 2, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.up(x.reshape(-1, 2, 2))).mean(-1)
        bag = self.bag((x > 0).long().sum(-1, keepdim=True) % 4)
        return self.last(torch.tanh(self.both(torch.cat([h, h.sin()], -1), bag)))


def weight_normed() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    torch.nn.utils.parametrizations.weight_norm(net[0])
    return net


def with_dropout_and_norm() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Tanh(), nn.Linear(3, 2))
    nn.init.normal_(net[1].running_mean), nn.init.uniform_(net[1].running_var, 0.5, 2.0)  # type: ignore[arg-type]
    return net.train()


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    x: Tensor
    says: dict[str, str] = field(default_factory=dict)  # what coverage says of some parameters, under kron
    subset: Any = "all"


ids = torch.randint(5, (N, 4), generator=torch.Generator().manual_seed(3))
vectors = numbers(N, 4)
KRON = "Kronecker (Linear rule)"
gated = torch.cat([-vectors[:4, :1].abs(), vectors[4:, :1].abs()])  # no gradient through a ReLU on the first four
CASES = {
    "tied": Case(
        Tied, ids, {"embedding.weight": "exact block, generic: tied: several modules share it", "fc.weight": KRON}
    ),
    "used twice": Case(
        Twice,
        vectors,
        {"again.weight": "exact block, generic: its module is called 2 times", "first.bias": KRON, "last.bias": KRON},
    ),
    "used functionally": Case(
        Functional, vectors, {"fc.weight": "exact block, generic: its module is not called itself", "last.weight": KRON}
    ),
    "called and used functionally": Case(
        CalledAndFunctional, vectors, {"fc.weight": "exact block, generic: fc.weight is used more than once"}
    ),
    "a second use that the probe cannot see": Case(
        SilentSecondUse,
        torch.cat([gated, vectors[:, 1:]], 1),
        {"fc.weight": "exact block, generic: fc.weight is used more than once"},
    ),
    "bare parameters": Case(
        Bare,
        vectors,
        {
            "scale": "exact block, generic: Bare has no rule for it",
            "temperature": "exact block, generic: Bare has no rule for it",
        },
    ),
    "a module without a rule": Case(
        lambda: nn.Sequential(Low(4, 3), nn.Tanh(), Low(3, 2)),
        vectors,
        {"0.other": "exact block, generic: Low has no rule for it"},
    ),
    "some elements of a layer": Case(
        lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)),
        vectors,
        {
            "0.weight": "exact block, generic: only some of its elements are selected",
            "0.bias": "Kronecker (Linear rule)",
            "2.weight": KRON,
            "2.bias": "frozen",
        },
        subset={
            "0.weight": torch.arange(12).reshape(3, 4) % 3 != 0,
            "0.bias": torch.ones(3, dtype=torch.bool),
            "2.weight": torch.ones(2, 3, dtype=torch.bool),
        },
    ),
    "never called": Case(
        Spare,
        vectors,
        {"spare.weight": "prior only: no output depends on it", "spare.bias": "prior only", "fc.weight": KRON},
    ),
    "changed in place": Case(InPlace, vectors, {"a.weight": KRON, "b.weight": KRON, "c.weight": KRON}),
    "batch in dimension 1, first token": Case(FirstToken, numbers(N, 5, 3), {"fc.weight": "exact block, generic"}),
    "batch in dimension 1, two tokens": Case(FirstToken, numbers(N, 2, 3), {"norm.bias": "exact block, generic"}),
    "batch in dimension 1": Case(TimeFirst, numbers(N, 5, 3), {"fc.weight": "exact block, generic"}),
    "batch in dimension 1, as many positions as examples": Case(TimeFirst, numbers(N, N, 3)),
    "an input without a batch": Case(
        Positions, ids, {"places.weight": "exact block, generic", "tokens.weight": "Kronecker (Embedding rule)"}
    ),
    "a layer of a parameter": Case(
        Queries, numbers(N, 5), {"key.weight": "exact block, generic", "queries": "exact block, generic"}
    ),
    "a layer that returns a tuple": Case(Tuples, vectors, {"fc.weight": "exact block, generic", "last.weight": KRON}),
    "called by keyword": Case(Keywords, vectors, {"fc.weight": KRON, "last.weight": KRON}),
    "attention": Case(
        lambda: Attention(True),
        numbers(N, 3, 4),
        {
            "attention.in_proj_weight": "Kronecker (MultiheadAttention rule)",
            "attention.out_proj.weight": "Kronecker (MultiheadAttention rule)",
        },
    ),
    "attention, batch in dimension 1": Case(lambda: Attention(False), numbers(N, 3, 4)),
    "a transformer": Case(
        lambda: Encoder(True),
        numbers(N, 3, 4),
        {"encoder.layers.0.linear1.weight": KRON, "encoder.layers.1.norm2.weight": "exact block (LayerNorm rule)"},
    ),
    "a transformer, batch in dimension 1": Case(
        lambda: Encoder(False), numbers(N, 3, 4), {"encoder.layers.0.linear1.weight": "exact block, generic"}
    ),
    "weights that are computed": Case(
        weight_normed,
        vectors,
        {
            "0.bias": "Kronecker (ParametrizedLinear rule)",
            "0.parametrizations.weight.original0": "exact block, generic: ParametrizationList has no rule for it",
        },
    ),
    "an LSTM": Case(
        lambda: Recurrent(nn.LSTM, True),
        numbers(N, 3, 3),
        {"rnn.weight_ih_l0": "Kronecker (LSTM rule)", "last.weight": KRON},
    ),
    "a GRU, batch in dimension 1": Case(
        lambda: Recurrent(nn.GRU, False),
        numbers(N, 3, 3),
        {"rnn.bias_hh_l0": "Kronecker (GRU rule)", "last.weight": KRON},
    ),
    "rarer modules of torch, one without a rule": Case(
        NoRules,
        vectors,
        {
            "up.weight": "Kronecker (ConvTranspose1d rule)",
            "act.weight": "exact block, generic: PReLU has no rule for it",
            "bag.weight": "Kronecker (EmbeddingBag rule)",
            "both.weight": "Kronecker (Bilinear rule)",
        },
    ),
    "checkpointed": Case(Checkpointed, vectors, {"body.0.weight": KRON}),
    "a derivative of its own": Case(OwnDerivative, vectors, {"fc.weight": KRON}),
    "train mode, dropout and batch norm": Case(
        with_dropout_and_norm, vectors, {"0.weight": KRON, "1.weight": "exact block (BatchNorm1d rule)"}
    ),
}


# -- the law ---------------------------------------------------------------------------------------------------------


def network(case: Case) -> nn.Module:
    net = case.make().double()
    with torch.no_grad():
        for i, p in enumerate(net.parameters()):
            p.copy_(0.7 * numbers(*p.shape, seed=i))
    return net


def selected(net: nn.Module, subset: Any) -> Tensor:
    """Which entries of the vector of all parameters the subset holds."""
    named = dict(net.named_parameters())
    if subset == "all":
        return torch.ones(sum(p.numel() for p in named.values()), dtype=torch.bool)
    masks = [subset.get(n, torch.zeros(p.shape, dtype=torch.bool)) for n, p in named.items()]
    return torch.cat([mask.reshape(-1) for mask in masks])


def fit(net: nn.Module, x: Any, structure: Any, **options: Any) -> Any:
    with torch.no_grad():
        y = torch.zeros_like(copy.deepcopy(net).eval()(x))
    return lw.laplace(net, (x, y), Gaussian(noise=0.5), structure=structure, **options)


def curvature(la: Any) -> tuple[Any, Tensor]:
    """The curvature without the prior, as an operator and dense."""
    weights = la.likelihood.curvature_weights(la.state.factor.kind)
    op = la.state.structure.operator(la.state, weights)
    return op, linalg.to_dense(op)


def holds(net: nn.Module, x: Any, jacobian: Any, subset: Any = "all", **options: Any) -> dict[str, str]:
    """diag, block and kron against the dense GGN of noise 0.5; gives kron's coverage."""
    J = jacobian(net, lambda m: m(x)).flatten(0, -2)[:, selected(net, subset)]
    G = 4 * J.mT @ J
    close(curvature(fit(net, x, "diag", subset=subset, **options))[1], G.diagonal().diag())
    for structure in ("block", "kron"):
        la = fit(net, x, structure, subset=subset, **options)
        op, dense = curvature(la)
        assert sorted(torch.cat(op.index).tolist()) == list(range(len(G)))
        mask = torch.zeros_like(G)
        for part, index in zip(la.state.parts, op.index, strict=True):
            if part.kind != "kron":
                mask[index.unsqueeze(-1), index] = 1
                exact = G[index][:, index]
                close(dense[index][:, index], exact.diagonal().diag() if part.kind == "diagonal" else exact)
            assert part.kind in ("unused", "dense") or structure == "kron"
        if structure == "block":
            close(dense, G * mask)
    assert set(la.coverage) == {n for n, _ in net.named_parameters()}
    return la.coverage


@pytest.mark.filterwarnings("ignore:this network cannot be batched over examples")
@pytest.mark.parametrize("name", CASES)
def test_nothing_is_dropped(name: str, jacobian: Any) -> None:
    case = CASES[name]
    net = network(case)
    before = {n: t.clone() for n, t in net.state_dict().items()}
    modes = [m.training for m in net.modules()]
    covered = holds(net, case.x, jacobian, case.subset)
    for parameter, says in case.says.items():
        assert covered[parameter].startswith(says), (parameter, covered[parameter])
    assert [m.training for m in net.modules()] == modes
    for n, t in net.state_dict().items():
        assert torch.equal(t, before[n])
    assert all(p.grad is None for p in net.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_every_parameter_says_how_it_is_treated_and_why(jacobian: Any) -> None:
    net = network(CASES["never called"])
    net.fc.bias.requires_grad_(False)
    for structure, what in (("diag", "exact diagonal"), ("block", "exact block"), ("kron", "Kronecker")):
        covered = fit(net, vectors, structure).coverage
        assert covered == {
            "spare.weight": "prior only: no output depends on it",
            "spare.bias": "prior only: no output depends on it",
            "fc.weight": f"{what} (Linear rule)",
            "fc.bias": "frozen",
            "lost.weight": "prior only: no output depends on it",
            "lost.bias": "prior only: no output depends on it",
            "last.weight": f"{what} (Linear rule)",
            "last.bias": f"{what} (Linear rule)",
        }


@pytest.mark.parametrize("structure", ["diag", "block", "kron"])
def test_a_parameter_that_is_never_used_keeps_its_prior(structure: str) -> None:
    prior = {"spare.*": 5.0, "lost.*": 2.0, "fc.*": 1.0, "last.*": 1.0}
    la = fit(network(CASES["never called"]), vectors, structure, prior=prior)
    precision = linalg.to_dense(la.posterior.precision)
    s = la.state.layout.slices()
    for name, value in (("spare.weight", 5.0), ("spare.bias", 5.0), ("lost.weight", 2.0), ("lost.bias", 2.0)):
        expected = torch.zeros_like(precision[s[name]])
        expected[:, s[name]] = value * torch.eye(s[name].stop - s[name].start, dtype=torch.float64)
        close(precision[s[name]], expected)


def test_a_large_parameter_without_a_rule_gets_its_exact_diagonal(jacobian: Any) -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.fc = nn.Parameter(torch.randn(41, 25)), nn.Linear(41, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(torch.tanh(x @ self.wide.mT / 5))

    covered = holds(Large().double(), numbers(3, 25), jacobian)
    assert covered["wide"] == "exact diagonal, generic: Large has no rule for it"
    assert covered["fc.weight"] == KRON


# -- control flow that depends on the data ----------------------------------------------------------------------------


SLOW = "ignore:this network cannot be batched over examples"


class Branches(nn.Module):
    """Which layers run, and how often, is said by the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.extra, self.last = nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        h = torch.tanh(self.fc(x))
        for _ in range(int(times[0])):
            h = torch.tanh(self.extra(h))
        return self.last(h)


def branching(*times: int) -> list[tuple[Any, Tensor]]:
    """Batches of three examples on which the extra layer runs so many times."""
    return [((numbers(3, 4, seed=i), torch.full((3,), t)), numbers(3, 2, seed=10 + i)) for i, t in enumerate(times)]


def dense_ggn(jacobian: Any, net: nn.Module, batches: Any) -> Tensor:
    J = torch.cat([jacobian(net, lambda m, x=x: m(*x)).flatten(0, -2) for x, _ in batches])
    return J.mT @ J


@pytest.mark.parametrize("structure", ["diag", "block", "kron"])
@pytest.mark.parametrize(
    ("times", "error"),
    [
        ((1, 1, 2), "layer extra was called once on the first batch and is now called again"),
        ((0, 0, 1), r"extra\.weight was not used on the first batch and is now"),
    ],
)
def test_a_later_batch_that_uses_layers_otherwise_is_named(structure: str, times: Any, error: str) -> None:
    net = Branches().double()
    with pytest.raises(InvalidValue, match=f"{error}: control flow depends on the data.*structure='full'"):
        lw.laplace(net, branching(*times), "gaussian", structure=structure)
    assert not any(m._forward_hooks for m in net.modules())


@pytest.mark.filterwarnings(SLOW)
@pytest.mark.parametrize("times", [(1, 1, 2), (0, 0, 1), (2, 1, 0), (1, 0, 1)])
@pytest.mark.parametrize("form", ["primal", "dual"])
def test_the_full_structure_serves_every_control_flow(times: Any, form: str, jacobian: Any) -> None:
    net, batches = network(Case(Branches, vectors)), branching(*times)
    la = lw.laplace(net, batches, "gaussian", structure=lw.curvature.Full(form=form))
    close(curvature(la)[1], dense_ggn(jacobian, net, batches))
    inverse = torch.linalg.inv(dense_ggn(jacobian, net, batches) + torch.eye(la.state.layout.size).double())
    for i, t in enumerate((0, 1, 2)):
        x = numbers(2, 4, seed=i), torch.full((2,), t)
        J = jacobian(net, lambda m, x=x: m(*x))
        close(la.predict(x).covariance, J @ inverse @ J.mT)


@pytest.mark.filterwarnings(SLOW)
@pytest.mark.parametrize("times", [(2, 1, 0, 2), (1, 0, 1)])
def test_a_layer_that_some_batches_skip(times: Any, jacobian: Any) -> None:
    """Twice on the first batch: generic, and exact whatever comes. Once: the rule, and a batch without it adds 0."""
    net, batches = network(Case(Branches, vectors)), branching(*times)
    G = dense_ggn(jacobian, net, batches)
    close(curvature(lw.laplace(net, batches, "gaussian", structure="diag"))[1], G.diagonal().diag())
    _, block = curvature(lw.laplace(net, batches, "gaussian", structure="block"))
    close(block, G * (block != 0))
    assert bool((block != 0).sum() > 80)


def test_examples_that_go_to_different_layers(jacobian: Any) -> None:
    """Each expert sees some of the examples: generic, one example at a time, and exact."""
    net = network(Case(Routed, vectors))
    with pytest.warns(lw.errors.LapwingWarning, match="one example at a time"):
        covered = holds(net, vectors, jacobian)
    assert covered["experts.0.weight"].startswith("exact block, generic")
    assert covered["last.weight"] == KRON


@pytest.mark.parametrize("structure", ["diag", "block", "kron"])
def test_examples_that_go_to_another_layer_later_are_named(structure: str, jacobian: Any) -> None:
    """All of the probe goes to one expert, which the rule is then proved for; later examples do not."""
    net, x = network(Case(Routed, vectors)), vectors.clone()
    x[:, 0] = torch.tensor([1, 1, 1, 1, 1, -1])
    with pytest.raises(InvalidValue, match=r"layer experts\.1 got inputs \(5, 4\) on a batch of 6 examples: control"):
        fit(net, x, structure)
    with pytest.warns(lw.errors.LapwingWarning, match="one example at a time"):
        la = fit(net, x, lw.curvature.Full(form="primal"))
    J = jacobian(net, lambda m: m(x)).flatten(0, -2)
    close(curvature(la)[1], 4 * J.mT @ J)


class Graph(nn.Module):
    """Nodes that hear of their neighbors: the batch cannot be cut. The first four are alone."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.mixed, self.last = nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor, neighbors: Tensor) -> Tensor:
        h = neighbors @ torch.tanh(self.fc(x))
        return self.last(torch.tanh(neighbors @ self.mixed(h)))


@pytest.mark.filterwarnings("ignore:this network")
def test_a_graph_whose_first_nodes_are_alone(jacobian: Any) -> None:
    net, neighbors = network(Case(Graph, vectors)), torch.eye(7, dtype=torch.float64)
    neighbors[4:, 4:] = 1 / 3
    x = (numbers(7, 3), neighbors)
    J = jacobian(net, lambda m: m(*x)).flatten(0, -2)
    G = J.mT @ J
    for structure in ("diag", "block"):
        la = lw.laplace(net, [(x, numbers(7, 2))], "gaussian", structure=structure)
        _, found = curvature(la)
        close(found, G * (found != 0))
        close(found.diagonal(), G.diagonal())
        covered = la.coverage
        assert "generic: Linear's rule does not give autograd's gradient here" in covered["fc.weight"]
        assert "(Linear rule)" in covered["last.weight"]


def test_layers_whose_probe_has_no_gradient(jacobian: Any) -> None:
    net, x = network(Case(DeadAtFirst, vectors)), numbers(N, 5, 3)
    with torch.no_grad():
        net.gate.weight.copy_(torch.tensor([[1.0, 0, 0]])), net.gate.bias.zero_()
        x[:, 0, 0] = torch.tensor([-1, -2, -1, -3, 1, 2])
    covered = holds(net, x, jacobian)
    assert covered["fc.weight"].endswith("Linear's rule does not give autograd's gradient here")
    assert covered["gate.weight"] == KRON


def test_training_on_does_not_move_a_fit() -> None:
    """Weights and running statistics are those of the fit, also where a rule reads them."""
    net, more = network(CASES["train mode, dropout and batch norm"]), numbers(4, 4, seed=6)
    fits = {s: fit(net, vectors, s) for s in ("diag", "block", "kron", lw.curvature.Full(form="primal"))}
    before = {s: la.predict(more).covariance for s, la in fits.items()}
    for p in net.parameters():
        p.data.mul_(1.5)
    net(10 * vectors)  # in train mode: moves the running statistics
    for s, la in fits.items():
        close(la.predict(more).covariance, before[s])
        update = la.updated((vectors, numbers(N, 2))).state.sums
        for key, value in la.state.sums.items():
            close(update[key], 2 * value)


# -- the user's own hooks, compiled models, dtypes ---------------------------------------------------------------------


def test_hooks_of_the_user_stay_and_see_what_they_saw(jacobian: Any) -> None:
    """Hooks that read, that change a layer's input and that change its output: all part of the network."""

    def hooked() -> tuple[nn.Module, list[Any], list[Tensor]]:
        net = network(CASES["used twice"])
        seen: list[Tensor] = []
        handles = [
            net.first.register_forward_pre_hook(lambda m, args: (args[0].cos(),)),
            net.first.register_forward_hook(lambda m, args, out: seen.append(out.detach().clone())),
            net.first.register_forward_hook(lambda m, args, out: 0.5 * out.sin()),
            net.first.register_forward_hook(lambda m, args, out: seen.append(out.detach().clone())),
            net.last.register_forward_hook(lambda m, args, kwargs, out: out.mul_(2), with_kwargs=True),
        ]
        return net, handles, seen

    net, _, seen = hooked()
    net(vectors)
    as_ever = [t.clone() for t in seen]
    hooks = [(dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in net.modules()]
    covered = holds(net, vectors, jacobian)
    assert covered["first.weight"] == covered["last.weight"] == KRON
    assert [(dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in net.modules()] == hooks
    seen.clear()
    with torch.no_grad():
        net(vectors)
    for found, expected in zip(seen, as_ever, strict=True):
        close(found, expected)


def test_what_a_hook_of_the_user_sees_while_lapwing_runs() -> None:
    """The whole batch, as its layer gave it: a hook that keeps activations keeps the right ones."""
    net, seen = network(CASES["used twice"]), []
    expected = net.first(vectors).detach()
    net.first.register_forward_hook(lambda m, args, out: seen.append((len(out), out.detach().clone())))
    lw.laplace(net, (vectors, numbers(N, 2)), "gaussian", structure="kron", subset=["first.*", "last.*"])
    assert seen
    for n, found in seen:  # the first examples; or the last alone, which tells whether a batch may be cut
        alone = n == 1 and not torch.allclose(found, expected[:1])
        close(found, expected[-1:] if alone else expected[:n])


@pytest.mark.parametrize("structure", ["diag", "kron"])
def test_a_backward_hook_of_the_user_does_no_harm(structure: str, jacobian: Any) -> None:
    net, norms = network(CASES["used twice"]), []
    exact = fit(net, vectors, structure)
    net.first.register_full_backward_hook(lambda m, gi, go: norms.append(float(go[0].norm())))
    close(curvature(fit(net, vectors, structure))[1], curvature(exact)[1])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor")  # the compiler
@pytest.mark.parametrize("how", ["model", "in place", "submodule"])
def test_a_compiled_model(how: str, jacobian: Any) -> None:
    plain = nn.Sequential(
        nn.Linear(4, 3), nn.Tanh(), nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.Linear(3, 2)
    ).double()
    net: Any = copy.deepcopy(plain)
    if how == "model":
        net = torch.compile(net, backend="eager")
    elif how == "in place":
        net.compile(backend="eager")
    else:
        net[2] = torch.compile(net[2], backend="eager")
    net(vectors)
    G = 4 * (lambda J: J.mT @ J)(jacobian(plain, lambda m: m(vectors)).flatten(0, -2))
    la = fit_compiled(net, "diag")
    close(curvature(la)[1], G.diagonal().diag())
    kron, expected = fit_compiled(net, "kron"), fit(plain, vectors, "kron")
    assert len(kron.coverage) == 6
    close(kron.predict(vectors).covariance, expected.predict(vectors).covariance)


def fit_compiled(net: nn.Module, structure: str) -> Any:
    y = torch.zeros(N, 2, dtype=torch.float64)
    return lw.laplace(net, (vectors, y), Gaussian(noise=0.5), structure=structure)


@pytest.mark.parametrize("structure", ["diag", "block", "kron"])
def test_the_order_of_channels_in_memory_does_not_matter(structure: str) -> None:
    convs = nn.Conv2d(4, 6, 3, padding=1, groups=2), nn.BatchNorm2d(6), nn.Tanh(), nn.Conv2d(6, 3, 2, stride=2)
    net = nn.Sequential(*convs, nn.Flatten(), nn.Linear(12, 2)).double()
    x, last = numbers(N, 4, 5, 4), torch.channels_last
    other = copy.deepcopy(net).to(memory_format=last)
    one, two = fit(net, x, structure), fit(other, x.contiguous(memory_format=last), structure)
    close(curvature(two)[1], curvature(one)[1])
    close(two.predict(x.contiguous(memory_format=last)).covariance, one.predict(x).covariance)


@pytest.mark.parametrize("structure", ["diag", "block", "kron"])
def test_a_bfloat16_network_is_proved_and_summed_in_single_precision(structure: str) -> None:
    net, y = network(CASES["train mode, dropout and batch norm"]), numbers(N, 2)
    exact = fit(net, vectors, structure)
    half = lw.laplace(
        copy.deepcopy(net).bfloat16(), (vectors.bfloat16(), y.bfloat16()), Gaussian(0.5), structure=structure
    )
    assert half.coverage == exact.coverage
    expected, found = curvature(exact)[1], curvature(half)[1]
    assert float((found - expected).norm() / expected.norm()) < 0.05
    assert bool(torch.isfinite(half.predict(vectors.bfloat16()).covariance).all())


@pytest.mark.parametrize("structure", ["diag", "kron"])
def test_inputs_of_another_dtype_are_named(structure: str) -> None:
    net = network(CASES["used twice"])
    with pytest.raises(RuntimeError, match="dtype"):
        lw.laplace(net, (vectors.long(), numbers(N, 2)), "gaussian", structure=structure)
    assert not any(m._forward_hooks for m in net.modules())


def test_an_error_in_the_network_leaves_no_hooks() -> None:
    class Fussy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            out = self.fc(x)
            if torch.is_grad_enabled():
                raise RuntimeError("no gradients here")
            return out

    net = Fussy().double().train()
    with pytest.raises(RuntimeError, match="no gradients here"):
        lw.laplace(net, (vectors, numbers(N, 2)), "gaussian", structure="kron")
    assert not net.fc._forward_hooks
    assert net.training


@pytest.mark.parametrize("structure", ["diag", "block", "kron"])
def test_a_single_example(structure: str, jacobian: Any) -> None:
    """N = 1: the probe doubles it, so that rules are still proved."""
    net, x = network(CASES["batch in dimension 1"]), numbers(1, 5, 3)
    J = jacobian(net, lambda m: m(x)).flatten(0, -2)
    la = fit(net, x, structure)
    assert la.coverage["fc.weight"].startswith("exact")
    close(linalg.diagonal(curvature(la)[0])[: 4 * 3 + 4], 4 * J.square().sum(0)[: 4 * 3 + 4])
