"""Networks of many kinds against the dense GGN of a small configuration, many outputs, and bad input.

With J by reverse mode on the network as torch runs it and Λ = −∇² log p of its outputs, G = Σ JᵀΛJ over examples and
positions: `full` must be G, `block` and `diag` its blocks and diagonal, `kron` must predict by its own dense matrix.
"""

from __future__ import annotations

import math
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lapwing as lw
from helpers import backward_rows, close, curvature, integers, normal
from lapwing.errors import InvalidValue, LapwingWarning
from lapwing.operators import linalg

PRIOR = 0.6


def moved(net: nn.Module) -> nn.Module:
    """Weights away from their initial values, in double precision."""
    generator = torch.Generator().manual_seed(3)
    net = net.double()
    with torch.no_grad():
        for name, p in net.named_parameters():
            if "parametrizations" not in name:
                p.add_(0.2 * torch.randn(p.shape, generator=generator, dtype=torch.float64))
    return net


# -- networks ------------------------------------------------------------------------------------------------------


class UNet(nn.Module):
    """Down by a strided convolution, up by a transposed one, a skip; a class for each pixel, channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 3, 2, stride=2)
        self.norm, self.up = nn.GroupNorm(1, 3), nn.ConvTranspose2d(3, 2, 2, stride=2)
        self.head = nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = torch.tanh(self.first(x))
        h = torch.tanh(self.up(torch.tanh(self.norm(self.down(skip)))))
        return self.head(torch.cat([skip, h], 1)).movedim(1, -1)


class ViT(nn.Module):
    """Patches, a class token, learned positions, an encoder layer of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 4, 2, stride=2)
        self.token, self.positions = nn.Parameter(torch.randn(1, 1, 4)), nn.Parameter(torch.randn(1, 5, 4))
        layer = nn.TransformerEncoderLayer(4, 2, 5, activation="gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patches(x).flatten(2).mT
        h = torch.cat([self.token.expand(len(h), -1, -1), h], 1) + self.positions
        return self.head(self.norm(self.encoder(h)[:, 0]))


class GPT(nn.Module):
    """A causal block over tokens, with the embedding as its head."""

    def __init__(self, vocabulary: int = 5, width: int = 4, bayesian_head: bool = True) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(6, width)
        self.norm1, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 6), nn.Linear(6, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm1(h)).chunk(3, -1))
        h = h + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return self.head(h + self.down(F.gelu(self.up(self.norm2(h)))))


class Recurrent(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.embedding, self.body = nn.Embedding(5, 3), kind(3, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embedding(ids))[0].amax(1))


class GraphNet(nn.Module):
    """Two rounds of messages over edges, a class for each node."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.message, self.head = nn.Linear(2, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 3)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        h = torch.tanh(self.inp(nodes))
        for _ in range(2):
            h = torch.tanh(h + torch.zeros_like(h).index_add(0, edges[1], self.message(h)[edges[0]]))
        return self.head(h)


def weight_normalized() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    for i in (0, 2):
        parametrizations.weight_norm(net[i])
    return net


def adapted() -> nn.Module:
    """A transformer with adapters in its feed-forward layers and a trained head; all else is frozen."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(
        r=2, target_modules=["linear1", "linear2", "patches"], lora_dropout=0.2, modules_to_save=["head"]
    )
    return peft.get_peft_model(ViT(), config)


EDGES = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 2], [1, 2, 3, 4, 5, 0, 3, 5]])


def run_graph(model: Any, x: Any) -> Tensor:
    return model(x["nodes"], x["edges"])


@dataclass(frozen=True, eq=False)
class Kind:
    make: Callable[[], nn.Module]
    x: Any
    y: Tensor
    new: Any
    forward: Any = None
    slow: bool = False

    def run(self, net: nn.Module, x: Any) -> Tensor:
        return net(x) if self.forward is None else self.forward(net, x)


IMAGES, NEW = normal(5, 1, 4, 4), normal(2, 1, 4, 4, seed=5)
KINDS = {
    "U-Net": Kind(UNet, IMAGES, integers(3, 5, 4, 4), NEW),
    "ViT": Kind(ViT, IMAGES, integers(3, 5), NEW),
    "GPT": Kind(GPT, integers(5, 4, 6), integers(5, 4, 6, seed=1), integers(5, 2, 4, seed=2)),
    "LSTM": Kind(lambda: Recurrent(nn.LSTM), integers(5, 5, 4), integers(3, 5), integers(5, 3, 6, seed=4)),
    "GRU": Kind(lambda: Recurrent(nn.GRU), integers(5, 5, 4), integers(3, 5), integers(5, 3, 6, seed=4)),
    "LoRA": Kind(adapted, IMAGES, integers(3, 5), NEW),
    "weight norm": Kind(weight_normalized, normal(6, 4), integers(3, 6), normal(3, 4, seed=2)),
    "graph": Kind(
        GraphNet,
        {"nodes": normal(6, 2), "edges": EDGES},
        integers(3, 6),
        {"nodes": normal(4, 2, seed=3), "edges": torch.tensor([[0, 1, 3], [1, 2, 0]])},
        run_graph,
        slow=True,
    ),
}


@contextmanager
def quiet(slow: bool) -> Iterator[None]:
    with warnings.catch_warnings():
        if slow:  # rows are made one example at a time, which is said
            warnings.simplefilter("ignore", LapwingWarning)
        yield


def rows(net: nn.Module, f: Tensor) -> Tensor:
    """∂f/∂θ over the parameters that require grad, (*f, p), one output at a time."""
    return backward_rows(f, [p for p in net.parameters() if p.requires_grad])


@dataclass(frozen=True, eq=False)
class Dense:
    net: nn.Module
    f: Tensor
    G: Tensor
    new: Tensor  # J at new inputs
    theta: Tensor


@cache
def dense(name: str) -> Dense:
    kind = KINDS[name]
    torch.manual_seed(0)
    net = moved(kind.make()).eval()
    f = kind.run(net, kind.x)
    J, p = rows(net, f), f.softmax(-1).detach()
    L = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
    G = torch.einsum("...cp,...cd,...dq->pq", J, L, J)
    theta = torch.cat([p.detach().reshape(-1) for p in net.parameters() if p.requires_grad])
    return Dense(net, f.detach(), G, rows(net, kind.run(net, kind.new)), theta)


@cache
def fitted(name: str, structure: str) -> Any:
    kind, net = KINDS[name], dense(name).net
    with quiet(kind.slow):
        data = [(kind.x, kind.y)]
        options = {"structure": structure, "prior": PRIOR, "factor": "exact", "forward": kind.forward}
        return lw.laplace(net, data, "categorical", **options)


def precision(la: Any) -> Tensor:
    """The dense posterior precision of any structure (that of the dual form by its inverse)."""
    eye = torch.eye(la.state.layout.size, dtype=torch.float64)
    with quiet(True):
        return torch.linalg.inv(linalg.solve(la.posterior.precision, eye))


# What has no rule, and why; all else has one.
WITHOUT = {
    "ViT": {"token": "ViT has no rule for it", "positions": "ViT has no rule for it"},
    "GPT": {"tokens.weight": "tied: several modules share it", "places.weight": "rule does not give autograd's"},
    "graph": dict.fromkeys(("inp.weight", "inp.bias"), "rule does not give") | {"message.weight": "called 2 times"},
    "weight norm": {
        f"{i}.parametrizations.weight.original{j}": "ParametrizationList has no rule" for i in (0, 2) for j in (0, 1)
    },
}


@pytest.mark.parametrize("name", KINDS)
def test_coverage_says_what_has_no_rule(name: str) -> None:
    without = {n: text for n, text in fitted(name, "block").coverage.items() if "generic" in text}
    expected = WITHOUT.get(name, {})
    assert set(without) == set(expected)
    assert all(expected[n] in text for n, text in without.items())
    frozen = {n for n, p in dense(name).net.named_parameters() if not p.requires_grad}
    assert frozen == {n for n, text in fitted(name, "kron").coverage.items() if text == "frozen"}
    assert bool(frozen) == (name == "LoRA")


@pytest.mark.parametrize("name", KINDS)
def test_full_is_the_dense_matrix(name: str) -> None:
    G = dense(name).G
    close(precision(fitted(name, "full")) - PRIOR * torch.eye(len(G), dtype=torch.float64), G, 1e-7)


@pytest.mark.parametrize("name", KINDS)
def test_block_and_diag_are_its_blocks_and_diagonal(name: str) -> None:
    la, G = fitted(name, "block"), dense(name).G
    close(curvature(fitted(name, "diag")), G.diagonal().diag())
    layout, expected = la.state.layout, torch.zeros_like(G)
    for part in la.state.parts:  # which parameters share one is tested with the rules
        index = torch.cat([torch.arange(s.start, s.stop) for s in (layout.slices()[n] for n in part.parameters)])
        expected[index.unsqueeze(-1), index] = G[index][:, index]
    close(curvature(la), expected)
    assert bool((expected.diagonal() == G.diagonal()).all())  # every parameter is in one


@pytest.mark.parametrize("structure", ["full", "kron", "block", "diag"])
@pytest.mark.parametrize("name", KINDS)
def test_predictions_and_evidence_are_those_of_the_dense_precision(name: str, structure: str) -> None:
    la, kind, truth = fitted(name, structure), KINDS[name], dense(name)
    M = precision(la)
    with quiet(kind.slow):
        prediction = la.predict(kind.new)
    close(prediction.covariance, truth.new @ torch.linalg.inv(M) @ truth.new.mT)
    close(prediction.f_mean, kind.run(truth.net, kind.new).detach())
    assert prediction.mean.shape == prediction.f_mean.shape
    fit = -F.cross_entropy(truth.f.flatten(0, -2), kind.y.reshape(-1), reduction="sum")
    complexity = torch.logdet(M) - len(M) * math.log(PRIOR)
    close(la.log_evidence(), fit - 0.5 * PRIOR * truth.theta.square().sum() - 0.5 * complexity, 1e-7)


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.filterwarnings("ignore::lapwing.errors.LapwingWarning")  # weights at random are no mode, and it is said
def test_tuning_and_draws(name: str, structure: str) -> None:
    """The tuned evidence is the largest nearby, and draws have the posterior's spread along one direction."""
    la = fitted(name, structure)
    tuned = la.tuned(center="map")
    best = float(tuned.log_evidence())
    assert best >= float(la.log_evidence())
    chosen = float(tuned.prior.precision)
    for factor in (0.8, 1.25):
        assert float(tuned.log_evidence(prior=chosen * factor)) <= best + 1e-6 * abs(best)
    draws, n = la.draw(400, torch.Generator().manual_seed(1)), 400
    away = torch.cat([(draws[k] - p).reshape(n, -1) for k, p in la.tangent.params.items()], 1)
    v = normal(away.shape[1], seed=8)
    variance = float(v @ torch.linalg.solve(precision(la), v))
    projected = away @ v
    assert abs(float(projected.mean())) < 5 * math.sqrt(variance / n)
    assert abs(float(projected.var()) / variance - 1) < 5 * math.sqrt(2 / (n - 1))


# -- many outputs --------------------------------------------------------------------------------------------------


class Ledger(TorchDispatchMode):
    """The number of elements of the largest tensor that was made, and how many passes ran backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.largest = max(self.largest, leaf.untyped_storage().nbytes() // leaf.element_size())
        return out


class Tagger(nn.Module):
    """A class for each token; what is before the head mixes the tokens."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 4), nn.Linear(4, classes)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.body(x))
        return self.head(h + h.mean(1, keepdim=True))


@contextmanager
def counting_passes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    count, grad = [0], torch.autograd.grad

    def counted(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        return grad(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch.autograd, "grad", counted)
        yield count


@pytest.mark.parametrize("structure", ["full", "kron", "ekfac", "block", "diag"])
@pytest.mark.parametrize("positions", [5, 1500])
def test_a_head_at_many_positions_is_exact(structure: str, positions: int) -> None:
    """f = W [h, 1], so that the covariance of one position is [h, 1]ᵀ Σ_cd [h, 1], however many there are."""
    net = moved(Tagger())
    data = (normal(4, 5, 2), integers(3, 4, 5))
    la = lw.laplace(net, data, "categorical", structure=structure, subset="last_layer", prior=PRIOR, factor="exact")
    x = normal(2, positions, 2, seed=1)
    prediction = la.predict(x)
    with torch.no_grad():
        h = torch.tanh(net.body(x))  # type: ignore[operator]
        h = h + h.mean(1, keepdim=True)
    S = torch.linalg.inv(precision(la))
    at = {n: torch.arange(s.start, s.stop) for n, s in la.state.layout.slices().items()}
    order = torch.cat([at["head.weight"].reshape(3, 4), at["head.bias"].reshape(3, 1)], 1)  # (c, i)
    S = S[order.reshape(-1)][:, order.reshape(-1)].reshape(3, 5, 3, 5)
    a = torch.cat([h, torch.ones_like(h[..., :1])], -1)
    close(prediction.covariance, torch.einsum("nti,cidj,ntj->ntcd", a, S, a))


class Headed(nn.Module):
    """A body, a head, and what is made of the head's outputs."""

    def __init__(self, body: nn.Module, head: nn.Module, out: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.head, self.out = body, head, out

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.body(x))
        return self.out(self.head(h, h.sin()) if isinstance(self.head, nn.Bilinear) else self.head(h))


def last(f: Tensor) -> Tensor:
    return f.movedim(1, -1)


PIXELS, TOKENS = normal(3, 2, 3, 2), normal(3, 4, 3)
HEADS: dict[str, tuple[Callable[[], nn.Module], Callable[[Tensor], Tensor], Tensor]] = {
    "convolution": (lambda: nn.Conv2d(4, 3, 3, padding=1), last, PIXELS),
    "groups": (lambda: nn.Conv2d(4, 6, 2, groups=2), last, PIXELS),
    "depthwise": (lambda: nn.Conv2d(4, 4, 2, groups=4), last, PIXELS),
    "transposed": (lambda: nn.ConvTranspose2d(4, 3, 2), last, PIXELS),
    "transposed groups": (lambda: nn.ConvTranspose2d(4, 6, 2, groups=2), last, PIXELS),
    "batch norm": (lambda: nn.BatchNorm2d(4), last, PIXELS),
    "layer norm": (lambda: nn.LayerNorm(4), lambda f: f, TOKENS),
    "bilinear": (lambda: nn.Bilinear(4, 4, 3), lambda f: f, TOKENS),
    "positions for outputs": (lambda: nn.Linear(4, 3), lambda f: f.mT, TOKENS),
    "reversed": (lambda: nn.Linear(4, 3), lambda f: f.flip(1), TOKENS),
    "every other position": (lambda: nn.Linear(4, 3), lambda f: f[:, ::2], TOKENS),
    "flattened": (lambda: nn.Linear(4, 3), lambda f: f.flatten(1), TOKENS),
    "a grid of anchors": (lambda: nn.Linear(4, 6), lambda f: f.unflatten(-1, (2, 3)), TOKENS),
}


@pytest.mark.parametrize("structure", ["full", "kron", "block", "diag"])
@pytest.mark.parametrize("name", HEADS)
def test_heads_of_all_kinds_at_many_positions(name: str, structure: str) -> None:
    head, out, x = HEADS[name]
    torch.manual_seed(0)
    net = moved(Headed(nn.Conv2d(2, 4, 1) if x is PIXELS else nn.Linear(3, 4), head(), out)).eval()
    J = rows(net, net(x))
    sizes = [p.numel() for p in net.parameters()]
    y = torch.zeros(J.shape[:-1], dtype=torch.float64)
    for subset, J_s in (("all", J), ("last_layer", J[..., sum(sizes[:2]) :])):
        la = lw.laplace(net, (x, y), "gaussian", structure=structure, subset=subset, prior=PRIOR, factor="exact")
        G, M = torch.einsum("...cp,...cq->pq", J_s, J_s), precision(la)
        eye = PRIOR * torch.eye(len(G), dtype=torch.float64)
        if structure == "full":
            close(M, G + eye, 1e-7)
        elif structure != "kron":
            close(M.diagonal(), G.diagonal() + PRIOR)
        close(la.predict(x).covariance, J_s @ torch.linalg.inv(M) @ J_s.mT)


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_a_head_at_more_positions_takes_no_more_passes(structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No pass runs backwards for a position, and no tensor grows faster than they do."""
    net = moved(Tagger())
    data = (normal(4, 5, 2), integers(3, 4, 5))
    la = lw.laplace(net, data, "categorical", structure=structure, subset="last_layer", prior=PRIOR, factor="exact")
    la.predict(normal(2, 3, 2))  # factorizations are made once
    passes, largest = [], []
    for positions in (20, 2000):
        x = normal(2, positions, 2, seed=1)
        with counting_passes(monkeypatch) as count, Ledger() as ledger:
            la.predict(x)
        passes.append(count[0])
        largest.append(ledger.largest)
    assert passes[0] == passes[1] <= 4
    assert largest[1] <= 100 * largest[0]
    assert largest[1] <= 2 * 2000 * 3 * 15  # a row for each output of each position, and nothing between positions


def test_marginals_of_a_whole_network_take_passes_in_proportion_to_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    net = moved(Tagger())
    la = lw.laplace(net, (normal(4, 5, 2), integers(3, 4, 5)), "categorical", structure="kron", factor="exact")
    passes = []
    for positions in (10, 40):
        la.predict(normal(1, positions, 2))
        with counting_passes(monkeypatch) as count:
            la.predict(normal(1, positions, 2))
        passes.append(count[0])
    assert passes[1] <= 4 * passes[0]


class Wide(nn.Module):
    """600 outputs of 9 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 3)
        self.register_buffer("spread", normal(3, 600))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.body(x)) @ self.spread


@pytest.mark.full
@pytest.mark.parametrize(
    "structure", [pytest.param("full", marks=pytest.mark.full), "kron", pytest.param("diag", marks=pytest.mark.full)]
)
def test_draws_of_many_outputs_have_the_exact_covariance(structure: str) -> None:
    net, samples = moved(Wide()), 600
    la = lw.laplace(net, (normal(5, 2), normal(5, 600, seed=1)), "gaussian", structure=structure, prior=PRIOR)
    x = normal(2, 2, seed=2)
    prediction = la.predict(x, samples=samples, generator=torch.Generator().manual_seed(4))
    J = rows(net, net(x))
    exact = J @ torch.linalg.inv(precision(la)) @ J.mT  # (n, 600, 600)
    variance = exact.diagonal(dim1=1, dim2=2)
    z = (prediction.f_var / variance - 1) / math.sqrt(2 / samples)
    assert float(z.abs().max()) < 5
    away = prediction.outputs.values - prediction.f_mean  # (s, n, c)
    sigma = (variance / samples).sqrt()
    assert float((away.mean(0) / sigma).abs().max()) < 5
    u = normal(7, 600, seed=3)
    found = torch.einsum("snc,kc->snk", away, u).square().mean(0)
    expected = torch.einsum("kc,ncd,kd->nk", u, exact, u)
    assert float(((found / expected - 1) / math.sqrt(2 / samples)).abs().max()) < 5
    close(prediction.f_mean, net(x).detach())
    with pytest.raises(lw.errors.Unsupported, match="600 outputs are too many for a covariance matrix"):
        _ = prediction.covariance


@pytest.mark.parametrize("structure", ["kron", "diag"])
def test_many_outputs_make_no_tensor_of_outputs_by_parameters(structure: str) -> None:
    c, n = 1200, 3
    net = nn.Sequential(nn.Linear(4, 10), nn.Tanh(), nn.Linear(10, c))
    parameters = sum(p.numel() for p in net.parameters())
    x, y = torch.randn(n, 4), torch.randint(c, (n,))
    with Ledger() as ledger:
        la = lw.laplace(net, (x, y), "categorical", structure=structure)
        assert la.state.factor.kind == "monte_carlo"
        prediction = la.predict(x)
        assert prediction.f_var.shape == (n, c)
    most = max(c * c if structure == "kron" else 0, 8 * parameters, 64 * n * c)
    assert ledger.largest <= most < c * parameters / 10


def test_a_batch_whose_cotangents_are_large_is_cut() -> None:
    net, x, y = moved(Tagger()), normal(60, 5, 2), integers(3, 60, 5)
    whole = lw.laplace(net, (x, y), "categorical", structure="kron", factor="exact")
    calls: list[int] = []
    handle = net.register_forward_hook(lambda _m, args, _out: calls.append(len(args[0])))
    cut = lw.laplace(net, (x, y), "categorical", structure="kron", factor="exact", memory_budget=2**16)
    handle.remove()
    assert max(calls) * 15 * 15 * 4 <= 2**14  # (K, positions, c) cotangents in single precision
    close(curvature(cut), curvature(whole))
    close(cut.log_evidence(), whole.log_evidence())
    assert cut.state.n == 60


def test_a_head_over_a_vocabulary_gets_its_exact_diagonal() -> None:
    """One column of the empirical factor, g = softmax(f) − y: the diagonal is Σ g_o² a_i²."""
    c = 8200
    net = moved(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, c)))
    x, y = normal(3, 2), integers(c, 3)
    la = lw.laplace(net, (x, y), "categorical", structure="kron", factor="empirical", prior=PRIOR)
    assert la.coverage["0.weight"] == "Kronecker (Linear rule)"
    text = "exact diagonal (Linear rule): a Kronecker factor of 8,200 rows is too long"
    assert la.coverage["2.weight"] == la.coverage["2.bias"] == text
    with torch.no_grad():
        a = net[:2](x)  # type: ignore[index]
        g = net(x).softmax(-1) - F.one_hot(y, c)
    diagonal = linalg.diagonal(la.posterior.precision)
    slices = la.state.layout.slices()
    close(diagonal[slices["2.weight"]], PRIOR + torch.einsum("no,ni->oi", g.square(), a.square()).reshape(-1))
    close(diagonal[slices["2.bias"]], PRIOR + g.square().sum(0))
    assert la.predict(x, samples=4).mean.shape == (3, c)


# -- bad input -----------------------------------------------------------------------------------------------------

STRUCTURES = ["full", "kron", "block", "diag"]


class Spare(nn.Module):
    """A layer that nothing calls, and one direction of a layer that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(2, 3, batch_first=True, bidirectional=True)
        self.attention, self.head = nn.MultiheadAttention(4, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x)[0][:, -1, :3])


@pytest.mark.parametrize("structure", STRUCTURES)
def test_parameters_that_no_output_depends_on_keep_their_prior(structure: str) -> None:
    net, x = moved(Spare()), normal(5, 4, 2)
    la = lw.laplace(net, (x, normal(5, 2)), "gaussian", structure=structure, prior=PRIOR)
    M, slices = precision(la), la.state.layout.slices()
    J = rows(net, net(x))
    for name, s in slices.items():
        if name.startswith("attention") or name.endswith("_reverse"):
            assert not bool(J[..., s].any())
            close(M[s], PRIOR * torch.eye(len(M), dtype=torch.float64)[s])
            if structure != "full" and name.startswith("attention"):
                assert la.coverage[name] == "prior only: no output depends on it"
    close(la.predict(x).covariance, J @ torch.linalg.inv(M) @ J.mT)


class Summed(nn.Module):
    """Attention summed over positions, of which there may be none."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.attention = nn.Embedding(5, 4), nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embedding(ids)
        h = self.attention(h, h, h, need_weights=False)[0]
        return self.head(torch.tanh(h.sum(1)))


@pytest.mark.parametrize("structure", ["block", "diag", "kron"])
@pytest.mark.parametrize("lengths", [(3, 0), (0, 3), (3, 1, 0, 2)])
def test_sequences_of_length_zero(structure: str, lengths: tuple[int, ...]) -> None:
    net = moved(Summed())
    batches = [(integers(5, 4, t, seed=t), normal(4, 2)) for t in lengths]
    try:
        la = lw.laplace(net, batches, "gaussian", structure=structure, prior=PRIOR)
    except InvalidValue as error:  # what the first batch did not use is named
        assert lengths[0] == 0
        assert "first batch" in str(error)  # noqa: PT017
        return
    G = sum(torch.einsum("ncp,ncq->pq", J, J) for J in (rows(net, net(x)) for x, _ in batches))
    assert isinstance(G, Tensor)
    close(curvature(la).diagonal(), G.diagonal()) if structure != "kron" else None
    x = batches[0][0]
    J = rows(net, net(x))
    close(la.predict(x).covariance, J @ torch.linalg.inv(precision(la)) @ J.mT)


def test_a_sequence_that_is_all_padding_is_refused() -> None:
    """Attention over nothing is NaN in torch."""

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 2)

        def forward(self, x: Tensor, padding: Tensor) -> Tensor:
            return self.head(self.attention(x, x, x, key_padding_mask=padding)[0].mean(1))

    net, x = moved(Padded()), normal(3, 2, 4)
    padding = torch.tensor([[False, False], [True, True], [False, True]])
    for structure in STRUCTURES:
        with pytest.raises(InvalidValue, match="NaN or infinite"):
            lw.laplace(net, [((x, padding), normal(3, 2))], "gaussian", structure=structure)


class Mixed(nn.Module):
    """A body in single and a head in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.attention = nn.GRU(2, 4, batch_first=True), nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.gru(x)[0]
        return self.head(self.attention(h, h, h)[0].double().sin().sum(1))


@pytest.mark.parametrize("structure", ["full", "block", "diag", "kron"])
def test_mixed_dtypes(structure: str) -> None:
    torch.manual_seed(0)
    net, x = Mixed(), torch.randn(5, 3, 2)
    la = lw.laplace(net, (x, normal(5, 2)), "gaussian", structure=structure, prior=PRIOR)
    J = rows(net, net(x)).double()
    G = torch.einsum("ncp,ncq->pq", J, J)
    M = precision(la)
    if structure == "full":
        assert_close(M, G + PRIOR * torch.eye(len(G), dtype=torch.float64), rtol=1e-4, atol=1e-4)
    elif structure != "kron":
        assert_close(M.diagonal(), G.diagonal() + PRIOR, rtol=1e-4, atol=1e-4)
    assert_close(la.predict(x).covariance, J @ torch.linalg.inv(M) @ J.mT, rtol=1e-4, atol=1e-4)
    assert not any("generic" in text for text in la.coverage.values())
    assert la.tangent.separable(x)


class Shared(nn.Module):
    """One attention module and one recurrent one, each under two names and called under both."""

    def __init__(self) -> None:
        super().__init__()
        self.a = self.b = nn.MultiheadAttention(4, 2, batch_first=True)
        self.c = self.d = nn.RNN(4, 4, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.c(self.a(x, x, x)[0])[0]
        return self.head(self.d(self.b(h, h, h)[0])[0][:, -1])


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.filterwarnings("ignore::lapwing.errors.LapwingWarning")  # recurrent kernels cannot be batched
def test_shared_modules(structure: str) -> None:
    net, x = moved(Shared()), normal(5, 3, 4)
    la = lw.laplace(net, (x, normal(5, 2)), "gaussian", structure=structure, prior=PRIOR)
    J = rows(net, net(x))
    G, M = torch.einsum("ncp,ncq->pq", J, J), precision(la)
    if structure == "full":
        close(M, G + PRIOR * torch.eye(len(G), dtype=torch.float64))
    close(M.diagonal(), G.diagonal() + PRIOR) if structure != "kron" else None
    close(la.predict(x).covariance, J @ torch.linalg.inv(M) @ J.mT)
    if structure != "full":
        shared = [text for n, text in la.coverage.items() if not n.startswith("head")]
        assert all("its module is called 2 times" in text for text in shared)


HALF = """
import copy, os, sys, traceback, warnings
import torch
from torch import nn
import lapwing as lw
from lapwing.operators import linalg

warnings.simplefilter("error")
warnings.filterwarnings("ignore", message="TF32 acceleration")
warnings.filterwarnings("ignore", category=DeprecationWarning)  # torch scripts its rules at first use


class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.layer = kind, {
            "transposed": lambda: nn.ConvTranspose1d(3, 4, 2, stride=2),
            "attention": lambda: nn.MultiheadAttention(4, 2, batch_first=True),
            "recurrent": lambda: nn.GRU(3, 4, batch_first=True),
            "bilinear": lambda: nn.Bilinear(3, 3, 2),
        }[kind]()
        self.head = nn.Linear({"transposed": 32, "bilinear": 8}.get(kind, 16), 2)

    def forward(self, x):
        if self.kind == "transposed":
            h = self.layer(x.mT)
        elif self.kind == "attention":
            x = torch.cat([x, x[..., :1]], -1)
            h = self.layer(x, x, x, need_weights=False)[0]
        else:
            h = self.layer(x)[0] if self.kind == "recurrent" else self.layer(x, x.sin())
        return self.head(torch.tanh(h).flatten(1))


def curvature(la):
    return linalg.to_dense(la.state.structure.operator(la.state, torch.ones(1, dtype=torch.float64)))


def check(kind):
    torch.manual_seed(0)
    exact = Net(kind).double()
    half = copy.deepcopy(exact).bfloat16()
    x, y = torch.randn(6, 4, 3).double(), torch.randn(6, 2).double()
    for structure in ("kron", "block", "diag"):
        one = lw.laplace(exact, (x, y), "gaussian", structure=structure)
        two = lw.laplace(half, (x.bfloat16(), y.bfloat16()), "gaussian", structure=structure)
        expected, found = curvature(one), curvature(two)
        assert found.dtype == torch.float64
        assert float((found - expected).norm() / expected.norm()) < 0.1
        a, b = one.predict(x).covariance, two.predict(x.bfloat16()).covariance
        assert float((a - b).norm() / a.norm()) < 0.1, (a, b)
        assert two.coverage == one.coverage


for kind in sys.argv[1:]:
    child = os.fork()
    if not child:
        try:
            check(kind)
        except Exception as error:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(77 if "mkldnn" in str(error) or "not implemented for 'BFloat16'" in str(error) else 1)
        os._exit(0)
    print(kind, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
LAYERS = ("transposed", "attention", "recurrent", "bilinear")


@cache
def half_precision(kinds: tuple[str, ...]) -> tuple[dict[str, int], str]:
    """How a check of each layer in bfloat16 ended, in a process of its own: on some processors torch's kernels for it
    end in an illegal instruction, or give up and switch themselves off."""
    done = subprocess.run([sys.executable, "-c", HALF, *kinds], capture_output=True, text=True, check=True)
    return {kind: int(code) for kind, code in (line.split() for line in done.stdout.splitlines())}, done.stderr


@pytest.mark.parametrize("kind", [LAYERS[0], *(pytest.param(kind, marks=pytest.mark.full) for kind in LAYERS[1:])])
def test_half_precision(kind: str) -> None:
    codes, said = half_precision(LAYERS[:1] if kind == LAYERS[0] else LAYERS[1:])
    if codes[kind] < 0 or codes[kind] == 77:
        pytest.skip(f"this machine's torch cannot run the {kind} layer in bfloat16 (exit code {codes[kind]})")
    assert codes[kind] == 0, said
