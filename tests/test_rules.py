"""Every layer rule against autograd: the view z = W a, its gradients, and what follows from them.

A layer stands alone in a network with a fixed nonlinear readout, so that the Jacobian is that of its weight and
bias. `a` and `g` are defined without the rules, by autograd: a[n, s, b] is the gradient of one output of position s
and block b with respect to its own row of W, and g is the gradient with respect to the layer's output, put in order
by `arranged`, which is written down here once more.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import lapwing as lw
from lapwing.curvature import Diagonal, Kronecker, accumulate
from lapwing.curvature.capture import Capture, Record
from lapwing.curvature.cover import cover
from lapwing.curvature.parts import Part
from lapwing.curvature.rules import Rule, base
from lapwing.operators import linalg
from lapwing.tangent import linearize

N, COTANGENTS, OUTPUTS = 4, 3, 2
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")  # torch's own, of its speed


def close(actual: Tensor, expected: Tensor) -> None:
    assert_close(actual.to(expected), expected, rtol=1e-8, atol=1e-8)


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


# -- the layers --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]  # of an example
    fold: bool = False  # positions joined to the batch before the layer, (n·t, ...)
    tokens: int = 0  # inputs are numbers below this


def linear(name: str, shape: tuple[int, ...], **options: Any) -> Case:
    fold = options.pop("fold", False)
    return Case(f"linear {name}", lambda: nn.Linear(shape[-1], 5, **options), shape, fold)


def conv(name: str, kind: Any, shape: tuple[int, ...], out: int, kernel: Any, **options: Any) -> Case:
    return Case(f"{kind.__name__} {name}", lambda: kind(shape[0], out, kernel, **options), shape)


def norm(name: str, make: Callable[[], nn.Module], shape: tuple[int, ...], fold: bool = False) -> Case:
    return Case(name, make, shape, fold)


CASES = [
    linear("plain", (3,)),
    linear("without bias", (3,), bias=False),
    linear("with positions", (4, 3)),
    linear("with two dimensions of positions", (2, 3, 4)),
    linear("folded", (4, 3), fold=True),
    linear("folded without bias", (2, 3), fold=True, bias=False),
    linear("one output a position", (2, 1)),
    conv("plain", nn.Conv1d, (2, 7), 3, 3),
    conv("strided, dilated", nn.Conv1d, (2, 9), 3, 3, stride=2, dilation=2, padding=1, bias=False),
    conv("same", nn.Conv1d, (2, 6), 3, 4, padding="same"),
    conv("same, dilated", nn.Conv1d, (2, 6), 3, 3, padding="same", dilation=2),
    conv("circular", nn.Conv1d, (2, 6), 3, 3, padding=2, padding_mode="circular"),
    conv("one position", nn.Conv1d, (2, 3), 3, 3),
    conv("plain", nn.Conv2d, (2, 4, 5), 3, (2, 3)),
    conv("without bias", nn.Conv2d, (2, 4, 5), 3, (2, 3), bias=False),
    conv("strided, padded", nn.Conv2d, (2, 5, 6), 3, (3, 2), stride=(2, 3), padding=(1, 0)),
    conv("stride that leaves a rest", nn.Conv2d, (2, 6, 5), 3, 3, stride=2),
    conv("same, uneven", nn.Conv2d, (2, 4, 5), 3, (2, 3), padding="same"),
    conv("valid", nn.Conv2d, (2, 4, 5), 3, (2, 3), padding="valid"),
    conv("reflect", nn.Conv2d, (2, 3, 4), 3, 3, padding=(2, 1), padding_mode="reflect"),
    conv("replicate", nn.Conv2d, (2, 3, 4), 3, 3, padding=(2, 1), padding_mode="replicate"),
    conv("circular", nn.Conv2d, (2, 3, 4), 3, 3, padding=(2, 1), padding_mode="circular"),
    conv("same, reflect", nn.Conv2d, (2, 4, 5), 3, (2, 3), padding="same", padding_mode="reflect"),
    conv("dilated", nn.Conv2d, (2, 5, 5), 3, (2, 3), dilation=(3, 2)),
    conv("two groups", nn.Conv2d, (4, 3, 4), 6, (2, 3), groups=2, padding=1),
    conv("depthwise", nn.Conv2d, (3, 4, 3), 3, (2, 3), groups=3),
    conv("depthwise, several outputs", nn.Conv2d, (2, 4, 3), 6, 2, groups=2, bias=False),
    conv("pointwise", nn.Conv2d, (3, 2, 3), 4, 1),
    Case("Conv2d folded", lambda: nn.Conv2d(2, 3, 2), (3, 2, 3, 3), fold=True),
    conv("plain", nn.Conv3d, (2, 3, 2, 3), 3, (2, 1, 2)),
    conv(
        "all options", nn.Conv3d, (4, 3, 3, 4), 2, (2, 3, 2), groups=2, stride=(1, 2, 1), padding=(0, 1, 1), bias=False
    ),
    conv("replicate", nn.Conv3d, (2, 2, 2, 3), 3, 2, padding=(1, 0, 1), padding_mode="replicate"),
    Case("embedding", lambda: nn.Embedding(6, 3), (5,), tokens=6),
    Case("embedding with padding", lambda: nn.Embedding(4, 3, padding_idx=2), (5,), tokens=4),
    Case("embedding, one token", lambda: nn.Embedding(3, 4), (), tokens=3),
    Case("embedding, two dimensions of tokens", lambda: nn.Embedding(3, 2, padding_idx=-1), (2, 3), tokens=3),
    norm("BatchNorm1d", lambda: nn.BatchNorm1d(3), (3,)),
    norm("BatchNorm1d with positions", lambda: nn.BatchNorm1d(3), (3, 4)),
    norm("BatchNorm1d folded", lambda: nn.BatchNorm1d(3), (4, 3), fold=True),
    norm("BatchNorm2d", lambda: nn.BatchNorm2d(3), (3, 2, 4)),
    norm("BatchNorm2d folded", lambda: nn.BatchNorm2d(3), (2, 3, 2, 4), fold=True),
    norm("BatchNorm3d", lambda: nn.BatchNorm3d(2), (2, 2, 1, 3)),
    norm("LayerNorm", lambda: nn.LayerNorm(5), (5,)),
    norm("LayerNorm with positions", lambda: nn.LayerNorm(5), (3, 5)),
    norm("LayerNorm of two dimensions", lambda: nn.LayerNorm((2, 3)), (4, 2, 3)),
    norm("LayerNorm without bias", lambda: nn.LayerNorm(5, bias=False), (3, 5)),
    norm("GroupNorm", lambda: nn.GroupNorm(2, 4), (4, 3)),
    norm("GroupNorm without positions", lambda: nn.GroupNorm(2, 6), (6,)),
    norm("GroupNorm of images", lambda: nn.GroupNorm(2, 4, eps=0.1), (4, 2, 3)),
    norm("InstanceNorm1d", lambda: nn.InstanceNorm1d(3, affine=True), (3, 4)),
    norm("InstanceNorm2d", lambda: nn.InstanceNorm2d(3, affine=True), (3, 2, 4)),
    norm(
        "InstanceNorm2d with statistics", lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True), (3, 2, 4)
    ),
    norm("InstanceNorm1d folded", lambda: nn.InstanceNorm1d(3, affine=True), (2, 3, 4), fold=True),
    norm("InstanceNorm3d", lambda: nn.InstanceNorm3d(2, affine=True), (2, 2, 1, 3)),
    norm("RMSNorm", lambda: nn.RMSNorm(5), (5,)),
    norm("RMSNorm with positions", lambda: nn.RMSNorm(5, eps=0.1), (3, 5)),
    norm("RMSNorm of two dimensions", lambda: nn.RMSNorm((2, 3)), (4, 2, 3)),
]


class Around(nn.Module):
    """A layer between its inputs and a fixed nonlinear readout, (n, c)."""

    def __init__(self, layer: nn.Module, case: Case, readout: Tensor) -> None:
        super().__init__()
        self.layer, self.case = layer, case
        self.register_buffer("readout", readout)

    def into(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1) if self.case.fold else x

    def forward(self, x: Tensor) -> Tensor:
        z = self.layer(self.into(x)).reshape(len(x), -1)
        return torch.tanh(z) @ self.readout


def inputs_of(case: Case, generator: torch.Generator) -> Tensor:
    if not case.tokens:
        return normal(generator, N, *case.shape)
    return torch.randint(case.tokens, (N, *case.shape), generator=generator)


def network_of(case: Case, generator: torch.Generator) -> tuple[Around, Tensor]:
    """The layer with weights and statistics away from their initial values."""
    layer = case.make().double()
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(normal(generator, *p.shape))
    for name, buffer in layer.named_buffers():
        if name == "running_mean":
            buffer.copy_(normal(generator, *buffer.shape))
        if name == "running_var":
            buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator, dtype=torch.float64))
    x = inputs_of(case, generator)
    probe = Around(copy.deepcopy(layer).eval(), case, torch.empty(0))
    width = probe.layer(probe.into(x)).reshape(N, -1).shape[1]
    return Around(layer, case, normal(generator, width, OUTPUTS) / width**0.5), x


def arranged(module: Any, z: Tensor, n: int) -> Tensor:
    """An output as (n, s, b, o): what is a position, a block and an output of each kind of layer."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        return z.reshape(n, -1, 1, z.shape[-1])
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return z.reshape(n, -1, int(torch.tensor(module.normalized_shape).prod()), 1)
    blocks = module.groups if hasattr(module, "groups") else z.shape[1]
    last = z.movedim(1, -1)
    return last.reshape(n, -1, blocks, last.shape[-1] // blocks)


def as_matrix(module: Any, weight: Tensor, blocks: int) -> Tensor:
    """A tensor in the weight's shape as (b, o, i)."""
    if isinstance(module, nn.Embedding):
        return weight.mT.unsqueeze(0)
    if isinstance(module, nn.Linear):
        return weight.unsqueeze(0)
    return (
        weight.reshape(blocks, -1, 1)
        if weight.ndim == 1 or not hasattr(module, "groups")
        else weight.reshape(blocks, weight.shape[0] // blocks, -1)
    )


# -- what autograd says ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """A layer as Lapwing sees it, beside what autograd says of it."""

    net: Around
    x: Tensor
    part: Part
    record: Record
    view: Any
    u: Tensor  # (n, K, c)
    g: Tensor  # (K, n, s, b, o)
    rows: Tensor  # (K, n, p) by autograd
    inputs: Tensor  # (n, s, b, i) by autograd

    @property
    def tangent_index(self) -> Tensor:
        return self.part.index(linearize(self.net, list(self.part.parameters)).layout)


SELECTIONS = ("all", "weight", "bias")


@cache
def seen(case: Case, selection: str = "all") -> Seen:
    generator = torch.Generator().manual_seed(CASES.index(case))
    net, x = network_of(case, generator)
    names = [n for n, _ in net.named_parameters() if selection in ("all", n.removeprefix("layer."))]
    tangent = linearize(net, names)
    (part,) = cover(tangent, x)
    assert not part.generic
    record = Capture(tangent, (part,)).run(x)
    u = normal(generator, N, COTANGENTS, OUTPUTS)
    g = record.pull(u)[part.name]
    rows, inputs = by_autograd(net, x, u, names)
    return Seen(net, x, part, record, record.views()[part.name], u, g, rows, inputs)


def by_autograd(net: Around, x: Tensor, u: Tensor, names: list[str]) -> tuple[Tensor, Tensor]:
    """Gradients uᵀJ of each example, (K, n, p), and inputs a (n, s, b, i) as gradients of single outputs."""
    net = copy.deepcopy(net).eval()
    parameters = [dict(net.named_parameters())[n] for n in names]
    f = net(x)
    rows = [
        torch.cat([g.reshape(-1) for g in torch.autograd.grad(f[n], parameters, u[n, k], retain_graph=True)])
        for k in range(u.shape[1])
        for n in range(N)
    ]
    z = arranged(net.layer, net.layer(net.into(x)), N)
    n, s, b, _ = z.shape
    a = []
    for value, block in zip(z[..., 0].reshape(-1), torch.arange(b).repeat(n * s), strict=True):
        grads = torch.autograd.grad(value, parameters, retain_graph=True)
        row = [
            as_matrix(net.layer, grad, b)[block, 0] if name.endswith("weight") else grad.reshape(b, -1)[block, :1]
            for name, grad in zip(names, grads, strict=True)
        ]
        a.append(torch.cat(row))
    return torch.stack(rows).reshape(u.shape[1], N, -1), torch.stack(a).reshape(n, s, b, -1)


def selected(case: Case) -> list[str]:
    both = any(n == "bias" for n, _ in case.make().named_parameters())
    return list(SELECTIONS) if both else ["all"]


PAIRS = [pytest.param(case, s, id=f"{case.name}, {s}") for case in CASES for s in selected(case)]
sweep = pytest.mark.parametrize(("case", "selection"), PAIRS)


# -- the laws ----------------------------------------------------------------------------------------------------


@sweep
def test_gradients_of_each_example_are_autograds(case: Case, selection: str) -> None:
    it = seen(case, selection)
    found = it.part.split(it.view.outer(it.g))
    close(torch.cat([found[n] for n, _ in it.net.named_parameters() if n in found], -1), it.rows)
    index = slice(1, 3)
    close(it.view.chunk(index).outer(it.g[:, index]), it.view.outer(it.g)[:, index])


@sweep
def test_the_index_puts_a_part_where_its_parameters_stand(case: Case, selection: str) -> None:
    it = seen(case, selection)
    close(it.view.outer(it.g).flatten(2), it.rows[..., it.tangent_index])


@sweep
def test_squares_sum_positions_before_they_square(case: Case, selection: str) -> None:
    it = seen(case, selection)
    close(it.view.squares(it.g).reshape(-1), it.rows.square().sum((0, 1))[it.tangent_index])


@sweep
def test_covariance_and_variance_under_a_diagonal(case: Case, selection: str) -> None:
    it = seen(case, selection)
    v = 0.5 + torch.rand(it.part.size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    spread = torch.empty_like(v)
    spread[it.tangent_index] = v
    expected = torch.einsum("knp,p,lnp->nkl", it.rows, spread, it.rows)
    close(it.view.covariance(it.g, v.reshape(it.part.shape)), expected)
    close(it.view.variance(it.g, v.reshape(it.part.shape)), expected.diagonal(dim1=1, dim2=2))


EXACT = ("Norm", "depthwise, bias")  # one input and one output a block: kron keeps their exact block instead


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize(("case", "selection"), [p for p in PAIRS if not any(e in str(p.id) for e in EXACT)])
def test_kronecker_factors_are_sums_over_inputs_and_output_gradients(case: Case, selection: str, sharing: str) -> None:
    """Expand: Σ_{n,s} a aᵀ and Σ_{n,s} g gᵀ, over N·S. Reduce: of the mean of a and the sum of g, over N."""
    it = seen(case, selection)
    tangent, y = linearize(it.net, list(it.part.parameters)), torch.zeros(N, OUTPUTS, dtype=torch.float64)
    state = accumulate(Kronecker(sharing=sharing), tangent, lw.likelihoods.Gaussian(), (it.x, y))
    found = linalg.to_dense(state.structure.operator(state, torch.ones(1, dtype=torch.float64)))
    unit = torch.eye(OUTPUTS, dtype=torch.float64).expand(N, OUTPUTS, OUTPUTS)
    a, g = it.inputs, torch.stack([output_gradient(it.net, it.x, unit[:, k]) for k in range(OUTPUTS)])
    if sharing == "reduce":
        a, g = a.mean(1, keepdim=True), g.sum(2, keepdim=True)
    A, B = torch.einsum("nsbi,nsbj->bij", a, a), torch.einsum("knsbo,knsbq->boq", g, g)
    blocks = [torch.kron(b, a) / (N * g.shape[2]) for a, b in zip(A, B, strict=True)]
    index = standing(it.net.layer, list(it.part.parameters), len(blocks))
    close(found[index][:, index], torch.block_diag(*blocks))


def standing(layer: Any, names: list[str], blocks: int) -> Tensor:
    """Where W[b, o, i], its bias last, stands in the vector of the selected parameters."""
    start, columns = 0, []
    for name in names:
        p = dict(layer.named_parameters())[name.removeprefix("layer.")]
        where = torch.arange(start, start + p.numel()).reshape(p.shape)
        start += p.numel()
        columns.append(where.reshape(blocks, -1, 1) if name.endswith("bias") else as_matrix(layer, where, blocks))
    return torch.cat(columns, -1).reshape(-1)


def output_gradient(net: Around, x: Tensor, u: Tensor) -> Tensor:
    """g (n, s, b, o) for one cotangent an example, by autograd."""
    net = copy.deepcopy(net).eval()
    z = net.layer(net.into(x)).detach().requires_grad_()
    f = torch.tanh(z.reshape(N, -1)) @ net.readout
    return arranged(net.layer, torch.autograd.grad(f, z, u)[0], N)


@sweep
def test_output_gradients_in_order(case: Case, selection: str) -> None:
    it = seen(case, selection)
    for k in range(COTANGENTS):
        close(it.g[k], output_gradient(it.net, it.x, it.u[:, k]))
    assert it.view.positions == it.inputs.shape[1]


@sweep
def test_inputs_in_another_basis(case: Case, selection: str) -> None:
    it = seen(case, selection)
    b, _, i = it.part.shape
    basis = normal(torch.Generator().manual_seed(2), b, i, i + 1)
    expected = torch.einsum("knboi,bij->knboj", it.view.outer(it.g), basis)
    close(it.view.rotated(basis).outer(it.g), expected)
    close(it.view.rotated(None).outer(it.g), it.view.outer(it.g))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_size_of_a_batch_does_not_matter(case: Case) -> None:
    """The exact diagonal over batches of 4, of 1 and 3, and of 2, 1 and 1: also where the probe holds one example."""
    it = seen(case)
    tangent, y = linearize(it.net), torch.zeros(N, OUTPUTS, dtype=torch.float64)
    unit = torch.eye(OUTPUTS, dtype=torch.float64).repeat(N, 1, 1)
    exact = by_autograd(it.net, it.x, unit, list(it.part.parameters))[0].square().sum((0, 1))
    for sizes in ([4], [1, 3], [2, 1, 1]):
        batches = list(zip(it.x.split(sizes), y.split(sizes), strict=True))
        state = accumulate(Diagonal(), tangent, lw.likelihoods.Gaussian(), batches)
        close(state.sums["layer/diagonal"][0], exact[it.part.index(tangent.layout)])


# -- which rule speaks for which module -----------------------------------------------------------------------------


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules registered in a test are gone after it."""
    monkeypatch.setattr(base, "_RULES", dict(base._RULES))


def fit(net: nn.Module, x: Tensor, structure: str, **options: Any) -> Any:
    y = torch.zeros(len(x), net(x).shape[-1], dtype=torch.float64)
    return lw.laplace(net, (x, y), "gaussian", structure=structure, **options)


def ggn(jacobian: Any, net: nn.Module, x: Tensor) -> Tensor:
    J = jacobian(net, lambda m: m(x)).flatten(0, -2)
    return J.mT @ J


class Mine(nn.Module):
    """z = 2 xᵀ W + bias, the weight stored (i, o)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5, dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn(5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x @ self.weight + self.bias


class MineRule(Rule):
    transposed = True

    def shape(self, module: Any) -> tuple[int, int, int]:
        return 1, 5, 3

    def inputs(self, module: Any, x: Tensor, n: int) -> Tensor:
        return 2 * x.reshape(n, -1, 1, 3)

    def outputs(self, module: Any, g: Tensor, n: int) -> Tensor:
        return g.reshape(len(g), n, -1, 1, 5)


def treated(net: nn.Module, x: Tensor, jacobian: Any) -> dict[str, str]:
    """How kron treats each parameter, once every structure is found to be exact where it must be."""
    G = ggn(jacobian, net, x)
    diag, kron = fit(net, x, "diag").state, fit(net, x, "kron").state
    one = torch.ones(1, dtype=torch.float64)
    close(linalg.diagonal(diag.structure.operator(diag, one)), G.diagonal())
    dense = linalg.to_dense(kron.structure.operator(kron, one))
    for part in kron.parts:
        if part.kind == "dense":
            index = part.index(kron.layout)
            close(dense[index][:, index], G[index][:, index])
    return kron.coverage


def test_a_users_rule_is_used(registry: None, jacobian: Any) -> None:
    net, x = nn.Sequential(nn.Tanh(), Mine(), nn.Tanh(), nn.Linear(5, 2)).double(), torch.randn(4, 3).double()
    assert treated(net, x, jacobian)["1.weight"] == "exact block, generic: Mine has no rule for it"
    base.register(Mine)(MineRule)
    assert treated(net, x, jacobian)["1.weight"] == "Kronecker (Mine rule)"

    class Child(Mine):
        pass

    net[1] = Child()
    assert treated(net, x, jacobian)["1.bias"] == "Kronecker (Child rule)"


def test_a_users_rule_for_a_known_module_takes_over(registry: None, jacobian: Any) -> None:
    """The first class along the MRO that has a rule."""

    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(2 * x)

    net, x = nn.Sequential(Doubled(3, 5), nn.Tanh(), nn.Linear(5, 2)).double(), torch.randn(4, 3).double()
    assert treated(net, x, jacobian)["0.weight"].endswith("Doubled's rule does not give autograd's gradient here")

    @base.register(Doubled)
    class DoubledRule(base._RULES[nn.Linear].__class__):  # type: ignore[misc]
        def inputs(self, module: Any, x: Tensor, n: int) -> Tensor:
            return super().inputs(module, 2 * x, n)

    assert treated(net, x, jacobian)["0.weight"] == "Kronecker (Doubled rule)"
    assert treated(net, x, jacobian)["2.weight"] == "Kronecker (Linear rule)"


class Scaled(MineRule):
    def inputs(self, module: Any, x: Tensor, n: int) -> Tensor:
        return x.reshape(n, -1, 1, 3)  # forgets the 2


class Transposed(MineRule):
    transposed = False


class Swapped(MineRule):
    """Each example's gradient given to the next one: right in their sum."""

    def inputs(self, module: Any, x: Tensor, n: int) -> Tensor:
        return super().inputs(module, x, n).roll(1, 0)

    def outputs(self, module: Any, g: Tensor, n: int) -> Tensor:
        return super().outputs(module, g, n).roll(1, 1)


class Joined(MineRule):
    """Two examples taken for one with two positions, and zeros for the other: right in their sum."""

    def inputs(self, module: Any, x: Tensor, n: int) -> Tensor:
        return self.joined(super().inputs(module, x, n), 0)

    def outputs(self, module: Any, g: Tensor, n: int) -> Tensor:
        return self.joined(super().outputs(module, g, n), 1)

    @staticmethod
    def joined(t: Tensor, dim: int) -> Tensor:
        pair = torch.cat([t, t.roll(-1, dim)], dim + 1)  # (n, 2 s, ...)
        even = (torch.arange(t.shape[dim]) % 2 == 0).to(t)
        return pair * even.reshape(-1, *[1] * (t.ndim - dim - 1))


class WrongShape(MineRule):
    def shape(self, module: Any) -> tuple[int, int, int]:
        return 1, 5, 2


class OtherPositions(MineRule):
    def outputs(self, module: Any, g: Tensor, n: int) -> Tensor:
        return super().outputs(module, g, n).repeat(1, 1, 2, 1, 1)


class Raising(MineRule):
    def inputs(self, module: Any, x: Tensor, n: int) -> Tensor:
        return x[module.nothing]


class NotEvenTensors(MineRule):
    def outputs(self, module: Any, g: Tensor, n: int) -> Any:
        return None


@pytest.mark.parametrize(
    "wrong",
    [Scaled, Transposed, Swapped, Joined, WrongShape, OtherPositions, Raising, NotEvenTensors],
    ids=lambda rule: rule.__name__,
)
def test_a_wrong_rule_is_caught_and_the_exact_block_takes_over(
    wrong: type[Rule], registry: None, jacobian: Any
) -> None:
    base.register(Mine)(wrong)
    net, x = nn.Sequential(nn.Linear(4, 3), Mine(), nn.Tanh(), nn.Linear(5, 2)).double(), torch.randn(5, 4).double()
    covered = treated(net, x, jacobian)
    for name in ("1.weight", "1.bias"):
        assert covered[name] == "exact block, generic: Mine's rule does not give autograd's gradient here"
    assert covered["0.weight"] == covered["3.weight"] == "Kronecker (Linear rule)"
