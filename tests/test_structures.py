"""kron, block and diag against their definitions on every kind of layer, and the identities that tie them together.

G = Σ_n J_nᵀ Λ_n J_n is made densely by autograd. `block` must hold its diagonal blocks and `diag` its diagonal; `kron`
must hold (1/NS) Σ a aᵀ ⊗ Σ gᵀΛg (expand) or (1/N) Σ ā āᵀ ⊗ Σ ḡᵀΛḡ (reduce), with a, g taken from autograd here.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from helpers import backward_rows, close, integers
from helpers import normal as numbers
from lapwing.curvature import Block, Diagonal, Factor, Full, Kronecker, accumulate
from lapwing.curvature.factor import output_factor
from lapwing.errors import InvalidValue, Unsupported
from lapwing.likelihoods import Categorical, Gaussian
from lapwing.operators import linalg
from lapwing.tangent import linearize

N, C = 5, 3


def filled(net: nn.Module) -> Any:
    """The network in float64 with weights and statistics away from their initial values."""
    net = net.double().eval()
    with torch.no_grad():
        for i, (name, t) in enumerate(net.state_dict().items()):
            if name.endswith("running_var"):
                t.copy_(numbers(*t.shape, seed=i).abs() + 0.5)
            elif t.is_floating_point():
                t.copy_(0.6 * numbers(*t.shape, seed=i))
    return net


class Layer(nn.Module):
    """A layer of some kind, and a linear readout of its squashed outputs."""

    def __init__(self, layer: nn.Module, x: Tensor) -> None:
        super().__init__()
        self.layer = layer
        self.head = nn.Linear(filled(copy.deepcopy(layer))(x).flatten(1).shape[1], C)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(x)).flatten(1))


LAYERS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "linear": (lambda: nn.Linear(4, 3), numbers(N, 4)),
    "linear with positions": (lambda: nn.Linear(2, 3), numbers(N, 4, 2)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 2, groups=2, padding=1), numbers(N, 4, 3)),
    "conv2d": (lambda: nn.Conv2d(2, 3, (2, 3), stride=(2, 1), padding=(1, 0)), numbers(N, 2, 4, 4)),
    "conv3d": (lambda: nn.Conv3d(1, 2, 2, bias=False), numbers(N, 1, 2, 3, 2)),
    "embedding": (lambda: nn.Embedding(5, 2, padding_idx=1), integers(5, N, 4)),
    "batch norm": (lambda: nn.BatchNorm2d(3), numbers(N, 3, 2, 2)),
    "layer norm": (lambda: nn.LayerNorm((2, 3)), numbers(N, 2, 2, 3)),
    "group norm": (lambda: nn.GroupNorm(2, 4), numbers(N, 4, 3)),
    "instance norm": (lambda: nn.InstanceNorm1d(3, affine=True), numbers(N, 3, 4)),
    "rms norm": (lambda: nn.RMSNorm(5), numbers(N, 2, 5)),
}
STRUCTURES: dict[str, Any] = {
    "kron": Kronecker(),
    "kron reduce": Kronecker(sharing="reduce"),
    "kron apart": Kronecker(bias="apart"),
    "block": Block(),
    "diag": Diagonal(),
}
FACTORS = ("exact", "empirical", "monte_carlo")


# -- the definitions -----------------------------------------------------------------------------------------------


@cache
def case(name: str) -> tuple[Any, Tensor, Tensor]:
    """A network with a layer of this kind, its inputs and labels."""
    make, x = LAYERS[name]
    return filled(Layer(make(), x)), x, integers(C, N, seed=1)


@cache
def jacobians(name: str) -> Tensor:
    net, x, _ = case(name)
    return backward_rows(net(x), net.parameters()).reshape(N, C, -1)


@cache
def middle(name: str, factor: str) -> Tensor:
    """Λ (n, c, c) of a categorical likelihood: of the model, of the data, or of targets drawn by one generator."""
    net, x, y = case(name)
    f = net(x).detach()
    p = torch.softmax(f, -1)
    if factor == "exact":
        return torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
    if factor == "empirical":
        score = nn.functional.one_hot(y, C) - p
        return score.unsqueeze(-1) * score.unsqueeze(-2)
    S = output_factor(Factor("monte_carlo", 3), Categorical(), f, y, torch.Generator().manual_seed(4))
    return S @ S.mT


@cache
def captured(name: str, module: str) -> tuple[Tensor, Tensor]:
    """Inputs a (n, s, b, i), with a 1 for the bias, and output Jacobians g (n, c, s, b, o) of a layer, by autograd."""
    net, x, _ = case(name)
    seen = {}
    layer = net.get_submodule(module)
    handle = layer.register_forward_hook(lambda m, args, out: seen.update(x=args[0].detach(), z=out))
    f = net(x)
    handle.remove()
    g = torch.stack([torch.autograd.grad(f[:, c].sum(), seen["z"], retain_graph=True)[0] for c in range(C)], 1)
    return inputs_of(layer, seen["x"]), arranged(layer, g)


def arranged(layer: Any, z: Tensor) -> Tensor:
    """Outputs (n, c, *output) as (n, c, s, b, o)."""
    if isinstance(layer, (nn.Linear, nn.Embedding)):
        return z.reshape(*z.shape[:2], -1, 1, z.shape[-1])
    last, groups = z.movedim(2, -1), layer.groups
    return last.reshape(*z.shape[:2], -1, groups, last.shape[-1] // groups)


def inputs_of(layer: Any, x: Tensor) -> Tensor:
    """a[n, s, b]: the gradient of the first output of a position and block with respect to its row of the weight."""
    z = arranged(layer, layer(x).unsqueeze(1))[:, 0]
    n, s, b, _ = z.shape
    found = []
    for i, value in enumerate(z[..., 0].reshape(-1)):
        (w,) = torch.autograd.grad(value, layer.weight, retain_graph=True)
        if isinstance(layer, nn.Embedding):
            found.append(w[:, 0])
        else:
            found.append(w.reshape(b, z.shape[-1], -1)[i % b, 0])
    a = torch.stack(found).reshape(n, s, b, -1)
    return a if getattr(layer, "bias", None) is None else torch.cat([a, torch.ones_like(a[..., :1])], -1)


def inputs(name: str, module: str, a: Tensor, bias: str) -> Tensor:
    """Σ a aᵀ (b, i, i), without the products of a bias's input with the others where it is apart."""
    A = torch.einsum("nsbi,nsbj->bij", a, a)
    if bias == "joint" or getattr(case(name)[0].get_submodule(module), "bias", None) is None:
        return A
    return torch.stack([torch.block_diag(one[:-1, :-1], one[-1:, -1:]) for one in A])


def kronecker(name: str, module: str, factor: str, sharing: str, bias: str = "joint") -> Tensor:
    a, g = captured(name, module)
    scale = 1 / (N * a.shape[1])
    if sharing == "reduce":
        a, g, scale = a.mean(1, keepdim=True), g.sum(2, keepdim=True), 1 / N
    A = inputs(name, module, a, bias)
    B = torch.einsum("ncsbo,ncd,ndsbq->boq", g, middle(name, factor), g)
    return torch.block_diag(*[scale * torch.kron(b, a) for a, b in zip(A, B, strict=True)])


def standing(net: Any, module: str) -> Tensor:
    """Where W[b, o, i] of a layer, its bias last, stands in the vector of parameters; any order if it is no map."""
    start, where = 0, {}
    for n, p in net.named_parameters():
        where[n] = torch.arange(start, start + p.numel())
        start += p.numel()
    layer = net.get_submodule(module)
    weight = where[f"{module}.weight"]
    if isinstance(layer, nn.Embedding):
        return weight.reshape(layer.weight.shape).mT.reshape(-1)
    if "norm" in type(layer).__name__.lower():
        return torch.cat([where[f"{module}.{n}"] for n, _ in layer.named_parameters()])
    blocks = getattr(layer, "groups", 1)
    matrix = weight.reshape(blocks, len(layer.weight) // blocks, -1)
    if getattr(layer, "bias", None) is not None:
        matrix = torch.cat([matrix, where[f"{module}.bias"].reshape(*matrix.shape[:2], 1)], -1)
    return matrix.reshape(-1)


def ggn(name: str, factor: str) -> Tensor:
    J = jacobians(name)
    return torch.einsum("ncp,ncd,ndq->pq", J, middle(name, factor), J)


def fitted(name: str, structure: str, factor: str) -> Any:
    net, x, y = case(name)
    return accumulate(
        STRUCTURES[structure],
        linearize(net),
        Categorical(),
        (x, y),
        Factor(factor, 3),
        generator=torch.Generator().manual_seed(4),
    )


def operator(state: Any, weights: Any = (1.0,)) -> Any:
    return state.structure.operator(state, torch.as_tensor(weights, dtype=torch.float64))


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_structure_and_factor(name: str, structure: str, factor: str) -> None:
    """The whole curvature: each part by its definition, and nothing between the parts."""
    state, G = fitted(name, structure, factor), ggn(name, factor)
    expected = torch.zeros_like(G)
    for part in state.parts:
        index = standing(case(name)[0], part.name)
        if part.kind == "kron":
            found = kronecker(name, part.name, factor, STRUCTURES[structure].sharing, STRUCTURES[structure].bias)
        else:
            found = G[index][:, index]
        expected[index.unsqueeze(-1), index] = found if part.kind != "diagonal" else found.diagonal().diag()
    close(linalg.to_dense(operator(state)), expected)
    kinds = {part.name: part.kind for part in state.parts}
    assert kinds == {
        "layer": {"block": "dense", "diag": "diagonal"}.get(structure, "dense" if "norm" in name else "kron"),
        "head": {"block": "dense", "diag": "diagonal"}.get(structure, "kron"),
    }


# -- states that add -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", ["exact", "empirical"])
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", ["linear with positions", "conv2d", "embedding", "layer norm"])
def test_batches_order_and_shards_do_not_matter(name: str, structure: str, factor: str) -> None:
    net, x, y = case(name)
    tangent, whole = linearize(net), fitted(name, structure, factor)

    def state(index: Any, *sizes: int) -> Any:
        batches = list(zip(x[index].split(sizes), y[index].split(sizes), strict=True))
        return accumulate(STRUCTURES[structure], tangent, Categorical(), batches, factor)

    mixed = torch.tensor([3, 0, 4, 2, 1])
    for other in (
        state(slice(None), 1, 3, 1),
        state(mixed, 2, 3),
        state(mixed[:2], 2) + state(mixed[2:], 1, 2),
        (state([0], 1) + state([1, 2], 2)) + (state([3], 1) + state([4], 1)),
    ):
        assert other.n == N
        assert other.sums.keys() == whole.sums.keys()
        for key, value in whole.sums.items():
            close(other.sums[key], value)
        close(other.statistics["log_lik"], whole.statistics["log_lik"])
        close(linalg.to_dense(operator(other)), linalg.to_dense(operator(whole)))


def by_layer(G: Tensor) -> Tensor:
    """The diagonal blocks of the two layers, of 16 and 10 weights, of the perceptron of `check_structure`."""
    return torch.block_diag(G[:16, :16], G[16:, 16:])


LAWS: dict[str, tuple[Any, dict[str, Any]]] = {
    "primal": (Full("primal"), {"keeps": lambda G: G}),
    "dual": (Full("dual"), {"keeps": lambda G: G}),
    "diag": (Diagonal(), {"keeps": lambda G: G.diagonal().diag()}),
    "block": (Block(), {"keeps": by_layer}),
    "kron": (Kronecker(), {"shifts": ("uniform", "grouped")}),
    "kron reduce": (Kronecker(sharing="reduce"), {"shifts": ("uniform", "grouped")}),
    "kron apart": (Kronecker(bias="apart"), {"shifts": ("uniform", "grouped")}),
    "ekfac": (lw.curvature.EigenKronecker(), {"shifts": ("uniform", "grouped"), "adds": False}),
    "low rank": (lw.curvature.LowRank(), {"adds": False}),
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", LAWS)
def test_it_keeps_the_laws_of_structures(name: str, seed: int) -> None:
    structure, options = LAWS[name]
    lw.testing.check_structure(structure, **options, seed=seed)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_it_keeps_the_laws_of_structures_on_a_convolution(structure: str) -> None:
    net, x, y = case("conv2d")
    shifts = ("uniform", "grouped") if "kron" in structure else ("uniform", "grouped", "element")
    lw.testing.check_structure(STRUCTURES[structure], problem=(net, x, y, Categorical()), shifts=shifts)


def test_states_of_different_sharing_or_factor_do_not_add() -> None:
    one = fitted("linear with positions", "kron", "exact")
    with pytest.raises(InvalidValue, match="structures"):
        one + fitted("linear with positions", "kron reduce", "exact")
    with pytest.raises(InvalidValue, match="factors"):
        one + fitted("linear with positions", "kron", "empirical")


def test_a_generator_fixes_the_monte_carlo_factor() -> None:
    net, x, y = case("linear")

    def sums(seed: int | None) -> Tensor:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        return lw.laplace(
            net, (x, y), "categorical", structure="kron", factor="monte_carlo", generator=generator
        ).state.sums["layer/B"]

    assert torch.equal(sums(None), sums(None))
    assert torch.equal(sums(3), sums(3))
    assert not torch.equal(sums(3), sums(4))


@pytest.mark.parametrize("structure", ["kron", "block", "diag"])
def test_the_hessian_needs_the_full_structure(structure: str) -> None:
    net, x, y = case("linear")
    with pytest.raises(InvalidValue, match="structure='full'"):
        lw.laplace(net, (x, y), "categorical", structure=structure, factor="hessian")


# -- identities 8, 9 and 15 ----------------------------------------------------------------------------------------


def dense(la: Any) -> Tensor:
    return linalg.to_dense(la.posterior.precision)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_kron_is_exact_for_one_linear_layer_and_gaussian_noise(sharing: str) -> None:
    net, x = filled(nn.Sequential(nn.Linear(4, 3))), numbers(7, 4)
    data = (x, numbers(7, 3, seed=1))
    kron, full = (
        lw.laplace(net, data, "gaussian", structure=s) for s in (Kronecker(sharing=sharing), Full(form="primal"))
    )
    close(dense(kron), dense(full))
    close(kron.log_evidence(), full.log_evidence())


@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
@pytest.mark.parametrize("factor", ["exact", "empirical"])
def test_kron_is_the_exact_block_for_one_example_without_sharing(likelihood: str, factor: str) -> None:
    """With the empirical factor, or any: B ⊗ A is exact as a is the same for all columns."""
    net, x = filled(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))), numbers(1, 4)
    data = (x, integers(3, 1) if likelihood == "categorical" else numbers(1, 3))
    kron, block = (lw.laplace(net, data, likelihood, structure=s, factor=factor) for s in ("kron", "block"))
    close(dense(kron), dense(block))
    assert float((dense(block) - dense(block).diagonal().diag()).abs().max()) > 1e-3


def test_kron_is_the_exact_block_of_deep_linear_networks_with_squared_loss() -> None:
    """Output gradients are the same for all examples."""
    net, x = filled(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2, bias=False), nn.Linear(2, 3))), numbers(7, 4)
    data = (x, numbers(7, 3, seed=1))
    kron, block = (lw.laplace(net, data, Gaussian(0.3), structure=s) for s in ("kron", "block"))
    close(dense(kron), dense(block))


def test_kron_differs_from_the_block_where_it_approximates() -> None:
    """So that the three identities above can fail."""
    net, x = filled(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))), numbers(7, 4)
    kron, block = (lw.laplace(net, (x, numbers(7, 3)), "gaussian", structure=s) for s in ("kron", "block"))
    assert float((dense(kron) - dense(block)).abs().max()) > 0.1


@pytest.mark.parametrize("structure", ["kron", "kron reduce"])
def test_the_log_determinant_does_not_depend_on_the_basis_of_a_layers_inputs(structure: str) -> None:
    """x Q into W Q: the same network, a rotated A."""
    net, x, y = case("linear with positions")
    turned, Q = copy.deepcopy(net), torch.linalg.qr(numbers(2, 2, seed=5))[0]
    with torch.no_grad():
        turned.layer.weight.copy_(net.layer.weight @ Q)
    one, other = (
        lw.laplace(m, (inputs, y), "categorical", structure=STRUCTURES[structure], prior=0.3)
        for m, inputs in ((net, x), (turned, x @ Q))
    )
    close(turned(x @ Q), net(x))
    close(linalg.logdet(one.posterior.precision), linalg.logdet(other.posterior.precision))
    diagonals = [
        lw.laplace(m, (i, y), "categorical", structure="diag", prior=0.3) for m, i in ((net, x), (turned, x @ Q))
    ]
    assert abs(float(diagonals[0].log_evidence() - diagonals[1].log_evidence())) > 1e-6


@pytest.mark.parametrize("name", LAYERS)
def test_coarser_structures_bound_the_evidence_from_below(name: str) -> None:
    """log|full| ≤ log|block| ≤ log|diag| (Fischer, Hadamard), so their evidences are ordered."""
    net, x, y = case(name)
    full, block, diag = (
        float(lw.laplace(net, (x, y), "categorical", structure=s, prior=0.1).log_evidence())
        for s in (Full(form="primal"), "block", "diag")
    )
    assert full > block > diag


@pytest.mark.parametrize("structure", ["kron", "kron reduce", "block", "full"])
def test_the_last_layer_is_the_neural_linear_model(structure: str) -> None:
    """Bayesian linear regression on the features φ: V = (ΦᵀΦ/σ² + λ)⁻¹, the same for each output."""
    net = filled(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))
    x, y, new, noise, prior = numbers(9, 4), numbers(9, 3, seed=1), numbers(6, 4, seed=2), 0.4, 0.7
    la = lw.laplace(
        net, (x, y), Gaussian(noise), structure=STRUCTURES.get(structure, structure), subset="last_layer", prior=prior
    )
    assert la.state.layout.names == ("2.weight", "2.bias")
    features = [torch.cat([net[:2](t), torch.ones(len(t), 1)], 1).detach() for t in (x, new)]
    precision = features[0].mT @ features[0] / noise**2 + prior * torch.eye(6, dtype=torch.float64)
    V = torch.linalg.inv(precision)
    variance = torch.einsum("ni,ij,nj->n", features[1], V, features[1])
    close(la.predict(new).covariance, variance.reshape(-1, 1, 1) * torch.eye(3, dtype=torch.float64))
    joint = torch.einsum("ni,ij,mj->nm", features[1], V, features[1])
    eye = torch.eye(3, dtype=torch.float64)
    close(la.predict(new, joint=True).covariance, torch.einsum("nm,cd->ncmd", joint, eye))
    sse, theta = (y - net(x)).square().sum(), torch.cat([p.reshape(-1) for p in net[2].parameters()])
    fit = -0.5 * sse / noise**2 - 27 * math.log(noise * math.sqrt(2 * math.pi))
    ratio = 3 * (torch.logdet(precision) - 6 * math.log(prior))
    close(la.log_evidence(), (fit - 0.5 * prior * theta.square().sum() - 0.5 * ratio).detach())


@pytest.mark.parametrize("likelihood", ["gaussian", "categorical"])
def test_a_last_layer_shared_over_positions(likelihood: str) -> None:
    """Outputs (n, s, c): with Gaussian noise kron is exact; for classes the block is, and both hold all positions."""

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(2, 4), nn.Linear(4, C)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.body(x)))

    net, x = filled(Tokens()), numbers(N, 3, 2)
    data = (x, integers(C, N, 3) if likelihood == "categorical" else numbers(N, 3, C, seed=1))
    block, kron, full = (
        lw.laplace(net, data, likelihood, structure=s, subset="last_layer")
        for s in ("block", "kron", Full(form="primal"))
    )
    close(dense(block), dense(full))
    close(block.predict(x).covariance, full.predict(x).covariance)
    if likelihood == "gaussian":
        close(dense(kron), dense(full))
        close(kron.predict(x).covariance, full.predict(x).covariance)
        close(kron.log_evidence(), full.log_evidence())


# -- noise per output ----------------------------------------------------------------------------------------------


NOISES: dict[str, Any] = {"one noise": 0.4, "one for each output": [0.3, 0.5, 0.8]}


@pytest.mark.parametrize("name", ["linear with positions", "conv2d", "embedding", "batch norm"])
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_noise_per_output(name: str, noise: str, structure: str) -> None:
    """Λ = diag(1/σ²) by definition, and under another noise without a second pass."""
    net, x, _ = case(name)
    y, J = numbers(N, C, seed=1), jacobians(name)
    la = lw.laplace(net, (x, y), Gaussian(NOISES[noise]), structure=STRUCTURES[structure])
    for sigma in (NOISES[noise], [0.2, 0.7, 1.1] if noise == "one for each output" else 0.7, 0.9):
        moved = la.replace(likelihood=Gaussian(sigma))
        inverse = torch.as_tensor(sigma, dtype=torch.float64).expand(C) ** -2
        G = torch.einsum("ncp,c,ncq->pq", J, inverse, J)
        expected = torch.zeros_like(G)
        for part in la.state.parts:
            index = standing(net, part.name)
            found = G[index][:, index]
            if part.kind == "kron":
                a, g = captured(name, part.name)
                scale = 1 / (N * a.shape[1])
                if STRUCTURES[structure].sharing == "reduce":
                    a, g, scale = a.mean(1, keepdim=True), g.sum(2, keepdim=True), 1 / N
                A = inputs(name, part.name, a, STRUCTURES[structure].bias)
                B = torch.einsum("ncsbo,c,ncsbq->boq", g, inverse, g)
                found = torch.block_diag(*[scale * torch.kron(b, a) for a, b in zip(A, B, strict=True)])
            expected[index.unsqueeze(-1), index] = found.diagonal().diag() if part.kind == "diagonal" else found
        close(dense(moved), expected + torch.eye(len(G), dtype=torch.float64))


@pytest.mark.parametrize("structure", ["block", "diag", "kron"])
def test_noise_per_output_with_positions(structure: str, jacobian: Any) -> None:
    """Outputs (n, s, c): each column of the factor belongs to one position and one output."""
    net = filled(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, C)))
    x, sigma = numbers(N, 2, 2), torch.tensor([0.3, 0.5, 0.8], dtype=torch.float64)
    la = lw.laplace(net, (x, numbers(N, 2, C)), Gaussian(sigma), structure=structure, subset=["2.*"])
    J = jacobian(net, lambda m: m(x))[..., 12:]  # (n, s, c, p)
    G = torch.einsum("nscp,c,nscq->pq", J, sigma**-2, J)
    G = G.diagonal().diag() if structure == "diag" else G  # kron is exact here
    close(dense(la), G + torch.eye(len(G), dtype=torch.float64))


# -- priors --------------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Every kind of part: an embedding, a grouped convolution, a linear layer, a norm, bare and unused parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 4)
        self.conv = nn.Conv1d(4, 6, 2, groups=2)
        self.norm = nn.LayerNorm(6)
        self.spare = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(6))
        self.head = nn.Linear(6, C)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.conv(self.embedding(x).mT)).mT
        return self.head(torch.tanh(self.norm(h)).mean(1) * self.scale)


PRIORS: dict[str, Any] = {
    "scalar": 0.6,
    "layerwise": lw.priors.Gaussian(torch.tensor([0.3, 0.5, 0.8, 1.3, 2.1, 0.4]), per="layer"),
    "per unit": lw.priors.Gaussian(0.5 + torch.arange(4 + 6 + 6 + 2 + 6 + 3) / 10, per="unit"),
    "weights and biases": {
        "*.weight": 0.4,
        "conv.bias": 0.9,
        "head.bias": 2.3,
        "norm.bias": 1.7,
        "spare.bias": 1.1,
        "scale": 3.0,
    },
}


@cache
def mixed(structure: str, noise: str) -> tuple[Any, Tensor]:
    """A fit with prior precision 1, and its curvature densely."""
    net, x = filled(Mixed()), integers(4, 6, 5)
    structure = STRUCTURES.get(structure, structure)
    la = lw.laplace(net, (x, numbers(6, C, seed=1)), Gaussian(NOISES[noise]), structure=structure)
    G = linalg.to_dense(operator(la.state, la.likelihood.curvature_weights().expand(la.state.terms)))
    return la, G


def spread(la: Any, prior: Any) -> Tensor:
    """diag A from the names of parameters, without the prior's own groups."""
    named = dict(la.tangent.model.named_parameters())
    if isinstance(prior, float):
        return torch.full((la.state.layout.size,), prior, dtype=torch.float64)
    if isinstance(prior, dict):
        each = [prior["*.weight" if n.endswith("weight") else n] for n in named]
        return torch.tensor(each, dtype=torch.float64).repeat_interleave(
            torch.tensor([p.numel() for p in named.values()])
        )
    values, layers, out = prior.precision, list(dict.fromkeys(n.rpartition(".")[0] for n in named)), []
    start: dict[Any, int] = {}
    used = 0
    for n, p in named.items():
        layer = n.rpartition(".")[0]
        if prior.per == "layer":
            out.append(values[layers.index(layer)].expand(p.numel()))
            continue
        if (layer, len(p)) not in start:
            start[layer, len(p)] = used
            used += len(p)
        mine = values[start[layer, len(p)] : start[layer, len(p)] + len(p)]
        out.append(mine.repeat_interleave(p.numel() // len(p)))
    return torch.cat(out)


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_priors_of_every_granularity(structure: str, prior: str, noise: str) -> None:
    """Precision, log-determinant, solve, draws and evidence against the dense G + A."""
    la, G = mixed(structure, noise)
    la = la.replace(prior=PRIORS[prior])
    d = spread(la, PRIORS[prior])
    M = G + d.diag()
    close(dense(la), M)
    precision, b = la.posterior.precision, numbers(2, 3, len(M))
    close(linalg.logdet(precision), torch.logdet(M))
    close(linalg.solve(precision, b), b @ torch.linalg.inv(M))
    close(linalg.covariance(precision, b), b @ torch.linalg.inv(M) @ b.mT)
    theta = la.tangent.theta
    fit = la.likelihood.log_likelihood(la.state.statistics)
    close(la.log_evidence(), fit - 0.5 * (d * theta.square()).sum() - 0.5 * (torch.logdet(M) - d.log().sum()))
    white = (la.posterior.draw(3000, torch.Generator().manual_seed(0)) - theta) @ torch.linalg.cholesky(M)
    assert float(white.mean(0).abs().max()) * math.sqrt(3000) < 5
    error = math.sqrt(3000) * (white.mT @ white / 3000 - torch.eye(len(M), dtype=torch.float64))
    assert float(error.diagonal().abs().max()) / math.sqrt(2) < 5
    assert float((error - error.diagonal().diag()).abs().max()) < 5.5


@pytest.mark.parametrize("structure", ["block", "diag"])
def test_a_prior_for_each_weight(structure: str) -> None:
    la, G = mixed(structure, "one noise")
    d = 0.3 + torch.arange(len(G)) / 50
    la = la.replace(prior=lw.priors.Gaussian(d, per="weight"))
    close(dense(la), G + d.double().diag())
    close(linalg.logdet(la.posterior.precision), torch.logdet(G + d.double().diag()))


def test_kron_refuses_a_prior_for_each_weight_and_names_diag() -> None:
    la, G = mixed("kron", "one noise")
    la = la.replace(prior=lw.priors.Gaussian(0.3 + torch.arange(len(G)) / 50, per="weight"))
    with pytest.raises(Unsupported, match=r"element-wise prior on (embedding|conv|head).*structure='diag'"):
        la.log_evidence()
    with pytest.raises(Unsupported, match="structure='diag'"):
        la.predict(integers(4, 2, 5))


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_evidence_gradients_are_finite_differences(structure: str, prior: str, noise: str) -> None:
    la, _ = mixed(structure, noise)
    bound = la.replace(prior=PRIORS[prior]).prior
    log_prior, log_noise = bound.precision.log(), la.likelihood.noise.log()

    def evidence(log_prior: Tensor, log_noise: Tensor) -> Tensor:
        return la.log_evidence(
            prior=bound.replace(precision=log_prior.exp()), likelihood=la.likelihood.replace(noise=log_noise.exp())
        )

    at = [log_prior.clone().requires_grad_(), log_noise.clone().requires_grad_()]
    found = torch.autograd.grad(evidence(*at), at)
    for which, step in itertools.product((0, 1), (1e-4,)):
        direction = numbers(*at[which].shape, seed=3)
        ends = []
        for sign in (1, -1, 2, -2):  # a five-point rule
            moved = [t.detach() for t in at]
            moved[which] = moved[which] + sign * step * direction
            ends.append(evidence(*moved))
        slope = (8 * (ends[0] - ends[1]) - (ends[2] - ends[3])) / (12 * step)
        close((found[which] * direction).sum(), slope, 1e-7)


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("structure", ["kron", "block", "diag"])
def test_effective_dimensions_are_traces(structure: str, prior: str) -> None:
    """γ = tr[G (G + A)⁻¹] over each group."""
    la, G = mixed(structure, "one noise")
    la = la.replace(prior=PRIORS[prior])
    index = la.prior.index if la.prior.index is not None else torch.zeros(len(G), dtype=torch.long)
    each = (G @ torch.linalg.inv(G + la.prior.operator().dense().diag())).diagonal()
    close(la.effective_dimension(), torch.zeros_like(la.prior.precision.reshape(-1)).index_add(0, index, each))


# -- saving --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_saving_is_exact_to_the_bit(structure: str, noise: str, tmp_path: Path) -> None:
    la, _ = mixed(structure, noise)
    la = la.replace(prior=PRIORS["per unit"])
    la.save(tmp_path / "net.safetensors")
    back = lw.load(tmp_path / "net.safetensors", la.tangent.model)
    assert back.state.structure == la.state.structure
    assert back.state.parts == la.state.parts
    assert back.coverage == la.coverage
    for name in ("sums", "statistics"):
        mine, theirs = getattr(la.state, name), getattr(back.state, name)
        assert mine.keys() == theirs.keys()
        for key in mine:
            assert mine[key].dtype == theirs[key].dtype
            assert torch.equal(mine[key], theirs[key])
    x = integers(4, 3, 5, seed=7)
    assert torch.equal(back.predict(x).covariance, la.predict(x).covariance)
    assert torch.equal(back.predict(x).f_mean, la.predict(x).f_mean)
    assert torch.equal(back.log_evidence(), la.log_evidence())
    more = (integers(4, 2, 5, seed=8), numbers(2, C, seed=9))
    close(back.updated(more).log_evidence(), la.updated(more).log_evidence())


# -- tuning --------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:normalization layers")
@pytest.mark.parametrize("structure", ["kron", "block", "diag"])
def test_tuning_finds_a_stationary_point_of_the_evidence(structure: str) -> None:
    la, _ = mixed(structure, "one noise")
    tuned = la.tuned(center="map")
    assert float(tuned.log_evidence()) > float(la.log_evidence())
    at = [tuned.prior.precision.log().requires_grad_(), tuned.likelihood.noise.log().requires_grad_()]
    value = tuned.log_evidence(
        prior=tuned.prior.replace(precision=at[0].exp()), likelihood=tuned.likelihood.replace(noise=at[1].exp())
    )
    for slope in torch.autograd.grad(value, at):
        assert float(slope.abs().max()) < 1e-3 or tuned.tuning.at_bound
