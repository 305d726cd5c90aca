"""Whole networks of the kinds that people train, against the dense GGN of a small configuration.

diag must be its diagonal, block its diagonal blocks, kron its definition for linear maps and the exact block for all
else; and the predictions of each, J M⁻¹ Jᵀ with J by reverse mode.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lapwing as lw
from helpers import backward_rows, close, curvature, integers
from helpers import normal as numbers
from lapwing.operators import linalg

# -- networks ------------------------------------------------------------------------------------------------------


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


class LeNet(nn.Module):
    """Convolutions, pooling, two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 3, 2)
        self.fc1, self.fc2 = nn.Linear(3 * 2 * 2, 5), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = F.max_pool2d(torch.tanh(self.conv1(x)), 2)
        return self.fc2(torch.tanh(self.fc1(F.relu(self.conv2(h)).flatten(1))))


class Residual(nn.Module):
    """Convolutions without bias, batch norms, a strided shortcut, in-place activations."""

    def __init__(self, inp: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inp, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, padding=1, bias=False), nn.BatchNorm2d(out)
        self.relu, self.shortcut = nn.ReLU(inplace=True), nn.Sequential()
        if stride > 1 or inp != out:
            self.shortcut = nn.Sequential(nn.Conv2d(inp, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.bn1(self.conv1(x)))
        h = self.bn2(self.conv2(h))
        h += self.shortcut(x)
        return self.relu(h)


def resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1, bias=False),
        nn.BatchNorm2d(2),
        nn.ReLU(inplace=True),
        Residual(2, 2, 1),
        Residual(2, 3, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(3, 4),
    )


class Mixer(nn.Module):
    """Embeddings of tokens and of positions, layer norms, token and channel mixing, mean over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(6, 4), nn.Embedding(3, 4)
        self.norm1, self.norm2 = nn.LayerNorm(4), nn.LayerNorm(4)
        self.across = nn.Sequential(nn.Linear(3, 2), nn.GELU(), nn.Linear(2, 3))
        self.within = nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 4))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        h = h + self.across(self.norm1(h).mT).mT
        h = h + self.within(self.norm2(h))
        return self.head(h.mean(1))


class Odd(nn.Module):
    """An MLP with a bare parameter and a layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.last = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.gate = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x)) * self.gate
        return self.last(torch.tanh(self.twice(torch.tanh(self.twice(h)))))


class Tied(nn.Module):
    """A language model whose embedding is its output layer: outputs (n, t, c)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.mix, self.norm = nn.Embedding(4, 3), nn.Linear(3, 3), nn.RMSNorm(3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        h = h + torch.tanh(self.mix(h)).cumsum(1)
        return self.head(self.norm(h))


class Attention(nn.Module):
    """A causal transformer block with its projections as layers, as people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(5, 4), nn.RMSNorm(4)
        self.qkv, self.out, self.head = nn.Linear(4, 12, bias=False), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x)
        q, k, v = self.qkv(self.norm(h)).unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(h + self.out(mixed.transpose(1, 2).flatten(2)))


NETWORKS: dict[str, Any] = {
    "MLP": (mlp, numbers(6, 6), integers(3, 6)),
    "LeNet": (LeNet, numbers(5, 1, 6, 6), integers(4, 5)),
    "ResNet": (resnet, numbers(4, 1, 4, 4), integers(4, 4)),
    "mixer": (Mixer, integers(6, 5, 3), integers(3, 5)),
    "MLP with a bare parameter and a layer used twice": (Odd, numbers(6, 5), integers(3, 6)),
    "embedding tied to the output": (Tied, integers(4, 5, 3), integers(4, 5, 3)),
    "attention": (Attention, integers(5, 4, 3), integers(3, 4, 3)),
}
GENERIC = {  # parameters that no rule can speak for
    "mixer": {"places.weight"},
    "MLP with a bare parameter and a layer used twice": {"twice.weight", "twice.bias", "gate"},
    "embedding tied to the output": {"embedding.weight"},
}


@cache
def network(name: str) -> Any:
    net = NETWORKS[name][0]().double().train()
    with torch.no_grad():
        for i, (key, t) in enumerate(net.state_dict().items()):
            value = numbers(*t.shape, seed=i)
            if key.endswith("running_var"):
                t.copy_(value.abs() + 0.5)
            elif key.endswith("running_mean"):
                t.copy_(value)
            elif t.is_floating_point():  # scales and biases above zero on average, so that no ReLU is dead
                t.copy_(value / math.sqrt(t[0].numel()) if t.ndim > 1 else value + 1)
    return net


@cache
def fitted(name: str, structure: str) -> Any:
    _, x, y = NETWORKS[name]
    structures = {"kron reduce": lw.curvature.Kronecker(sharing="reduce")}
    return lw.laplace(network(name), (x, y), "categorical", structure=structures.get(structure, structure), prior=0.5)


def forward(name: str, x: Tensor) -> Tensor:
    """The network's outputs, by a graph of their own."""
    net = network(name)
    net.eval()
    out = net(x)
    net.train()
    return out


@cache
def jacobian(name: str, seed: int | None = None) -> Tensor:
    return backward_rows(forward(name, inputs(name, seed)), network(name).parameters())


def inputs(name: str, seed: int | None = None) -> Tensor:
    x = NETWORKS[name][1]
    if seed is None:
        return x
    return numbers(3, *x.shape[1:], seed=seed) if x.is_floating_point() else integers(4, 3, *x.shape[1:], seed=seed)


def middle(f: Tensor) -> Tensor:
    p = torch.softmax(f.detach(), -1)
    return torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)


@cache
def ggn(name: str) -> Tensor:
    J = jacobian(name)
    return torch.einsum("...cp,...cd,...dq->pq", J, middle(forward(name, inputs(name))), J)


def kronecker(name: str, module: str, sharing: str) -> tuple[Tensor, Tensor]:
    """(1/NS) B ⊗ A of a layer from what it was given and what autograd says of its output, in the order of W."""
    net, seen = network(name), {}
    layer = net.get_submodule(module)

    def keep(_m: Any, args: Any, out: Tensor) -> Tensor:
        seen.update(x=args[0].detach(), z=out)
        return out.clone()  # what comes next may change it in place

    handle = layer.register_forward_hook(keep)
    f = forward(name, inputs(name))
    handle.remove()
    n, c, L = len(f), f.shape[-1], middle(f)
    if isinstance(layer, nn.Conv2d):
        assert layer.groups == 1
        a = F.unfold(seen["x"], layer.kernel_size, padding=layer.padding, stride=layer.stride).mT  # (n, s, i)
    elif isinstance(layer, nn.Embedding):
        a = F.one_hot(seen["x"].reshape(n, -1), layer.num_embeddings).double()
    else:
        a = seen["x"].reshape(n, -1, seen["x"].shape[-1])
    if getattr(layer, "bias", None) is not None:
        a = torch.cat([a, torch.ones_like(a[..., :1])], -1)
    g = backward_rows(f, [seen["z"]]).reshape(n, -1, c, *seen["z"].shape)  # (n, q, c, n, ...)
    g = g[range(n), :, :, range(n)]
    g = g.movedim(3, -1) if isinstance(layer, nn.Conv2d) else g
    g = g.reshape(n, g.shape[1], c, -1, g.shape[-1])  # (n, q, c, s, o)
    scale = 1 / (n * a.shape[1])
    if sharing == "reduce":
        a, g, scale = a.mean(1, keepdim=True), g.sum(3, keepdim=True), 1 / n
    A = torch.einsum("nsi,nsj->ij", a, a)
    B = torch.einsum("nqcso,nqcd,nqdsp->op", g, L.reshape(n, -1, c, c), g)
    return scale * torch.kron(B, A), standing(net, module)


def standing(net: Any, module: str) -> Tensor:
    """Where W[o, i] of a layer, its bias last, stands in the vector of parameters."""
    start, where = 0, {}
    for n, p in net.named_parameters():
        where[n] = torch.arange(start, start + p.numel())
        start += p.numel()
    layer, weight = net.get_submodule(module), where[f"{module}.weight"]
    if isinstance(layer, nn.Embedding):
        return weight.reshape(layer.weight.shape).mT.reshape(-1)
    matrix = weight.reshape(len(layer.weight), -1)
    if layer.bias is not None:
        matrix = torch.cat([matrix, where[f"{module}.bias"].unsqueeze(-1)], -1)
    return matrix.reshape(-1)


# -- the laws ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NETWORKS)
def test_every_parameter_matters(name: str) -> None:
    """No layer is dead here: what is zero proves nothing."""
    s, diagonal = fitted(name, "diag").state.layout.slices(), ggn(name).diagonal()
    assert all(float(diagonal[s[n]].max()) > 1e-4 for n in s)


@pytest.mark.parametrize("name", NETWORKS)
def test_diag_is_the_diagonal(name: str) -> None:
    close(curvature(fitted(name, "diag")), ggn(name).diagonal().diag())


@pytest.mark.parametrize("name", NETWORKS)
def test_block_holds_the_diagonal_blocks(name: str) -> None:
    la, G = fitted(name, "block"), ggn(name)
    expected = torch.zeros_like(G)
    for part in la.state.parts:
        s = la.state.layout.slices()
        index = torch.cat([torch.arange(s[n].start, s[n].stop) for n in part.parameters])
        expected[index.unsqueeze(-1), index] = G[index][:, index]
    close(curvature(la), expected)


@pytest.mark.parametrize("structure", ["kron", "kron reduce"])
@pytest.mark.parametrize("name", NETWORKS)
def test_kron_holds_its_definition_and_exact_blocks(name: str, structure: str) -> None:
    la, G = fitted(name, structure), ggn(name)
    expected, modules = torch.zeros_like(G), dict(network(name).named_modules())
    for part in la.state.parts:
        if part.kind == "kron":
            assert isinstance(modules[part.name], (nn.Linear, nn.Conv2d, nn.Embedding))
            block, index = kronecker(name, part.name, la.state.structure.sharing)
        else:
            assert part.kind == "dense"
            s = la.state.layout.slices()
            index = torch.cat([torch.arange(s[n].start, s[n].stop) for n in part.parameters])
            block = G[index][:, index]
        expected[index.unsqueeze(-1), index] = block
    close(curvature(la), expected)
    generic = {n for part in la.state.parts if part.generic for n in part.parameters}
    assert generic == GENERIC.get(name, set())
    assert set(la.coverage) == {n for n, _ in network(name).named_parameters()}


@pytest.mark.parametrize("structure", ["kron", "kron reduce", "block", "diag", "full"])
@pytest.mark.parametrize("name", NETWORKS)
def test_predictions_are_those_of_the_dense_precision(name: str, structure: str) -> None:
    la = fitted(name, structure)
    M = linalg.to_dense(la.posterior.precision)
    if structure == "full":
        close(M, ggn(name) + 0.5 * torch.eye(len(M), dtype=torch.float64))
    J, x = jacobian(name, 5), inputs(name, 5)
    prediction = la.predict(x)
    close(prediction.covariance, J @ torch.linalg.inv(M) @ J.mT)
    close(prediction.f_mean, forward(name, x).detach())


@pytest.mark.parametrize("structure", ["kron", "block", "diag", "full"])
@pytest.mark.parametrize("name", NETWORKS)
def test_evidences_are_those_of_the_dense_precision(name: str, structure: str) -> None:
    la, (_, x, y) = fitted(name, structure), NETWORKS[name]
    fit = -F.cross_entropy(forward(name, x).detach().flatten(0, -2), y.reshape(-1), reduction="sum")
    theta = torch.cat([p.detach().reshape(-1) for p in network(name).parameters()])
    M = linalg.to_dense(la.posterior.precision)
    close(
        la.log_evidence(),
        fit - 0.25 * theta.square().sum() - 0.5 * (torch.logdet(M) - len(M) * math.log(0.5)),
    )


@pytest.mark.parametrize("name", NETWORKS)
def test_finer_structures_have_the_greater_evidence(name: str) -> None:
    full, block, diag = (float(fitted(name, s).log_evidence()) for s in ("full", "block", "diag"))
    assert full > block > diag
