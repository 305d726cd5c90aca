"""Transposed convolutions, bags, attention, recurrent layers and bilinear maps against dense autograd.

A layer stands between its inputs and a fixed nonlinear readout, f (n, 2), and is run as torch runs it, fused. With J by
reverse mode, one output at a time, G = Σ JᵀJ: `block` must be G within each part, `diag` its diagonal, and predictions
J M⁻¹ Jᵀ with the structure's own dense M. Kronecker factors are written out once for each family. Parameters in `generic`
have no rule, for the reason there; all others have one, a weight together with its bias.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.testing import assert_close

import lapwing as lw
from lapwing.errors import InvalidValue, LapwingWarning
from lapwing.operators import linalg

N, OUTPUTS, PRIOR = 5, 2, 0.7


def close(actual: Tensor, expected: Tensor) -> None:
    assert_close(actual, expected, rtol=1e-8, atol=1e-8)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def integers(high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


# -- a layer in a network ------------------------------------------------------------------------------------------


def plain(layer: Any, *x: Tensor) -> Tensor:
    return layer(*x)


@dataclass(frozen=True, eq=False)
class Case:
    name: str
    make: Callable[[], nn.Module]
    inputs: tuple[Tensor, ...]
    run: Callable[..., Tensor] = plain  # run(layer, *inputs) -> (n, ...)
    generic: dict[str, str] = field(default_factory=dict)  # name in the layer, "*" for all -> words of the reason
    slow: bool = False  # rows are made one example at a time, which is said


class Around(nn.Module):
    def __init__(self, layer: nn.Module, run: Callable[..., Tensor], readout: Tensor) -> None:
        super().__init__()
        self.layer, self.run = layer, run
        self.register_buffer("readout", readout)

    def forward(self, *x: Tensor) -> Tensor:
        z = self.run(self.layer, *x)
        return torch.tanh(z.reshape(len(z), -1)) @ self.readout


def moved(net: nn.Module) -> nn.Module:
    """Weights away from their initial values: zero biases and unit scales hide bugs."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(0.6 * torch.randn(p.shape, generator=generator, dtype=torch.float64))
    return net


def around(case: Case) -> Around:
    torch.manual_seed(0)
    layer = case.make().double()
    if not any("parametriz" in name for name, _ in layer.named_parameters()):
        moved(layer)
    width = case.run(copy.deepcopy(layer).eval(), *case.inputs)[0].numel()
    return Around(layer, case.run, normal(width, OUTPUTS, seed=9) / math.sqrt(width))


def rows(net: nn.Module, x: tuple[Any, ...]) -> Tensor:
    """J (n, c, p) over named_parameters, by reverse mode on a copy in eval mode, one output at a time."""
    twin = copy.deepcopy(net).eval()
    parameters, out = list(twin.parameters()), twin(*x)
    found = []
    for value in out.reshape(-1):
        grads = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
        pairs = zip(grads, parameters, strict=True)
        found.append(torch.cat([(torch.zeros_like(p) if g is None else g).reshape(-1) for g, p in pairs]))
    return torch.stack(found).reshape(*out.shape, -1)


@cache
def problem(case: Case) -> tuple[Around, Tensor]:
    net = around(case)
    return net, rows(net, case.inputs)


def fit(net: nn.Module, x: Any, structure: Any, slow: bool = False, **options: Any) -> Any:
    """Unit noise and the exact factor: the curvature is Σ JᵀJ."""
    batches = x if isinstance(x, list) else [x]
    data = [(one, torch.zeros(len(net(*one)), OUTPUTS, dtype=torch.float64)) for one in batches]
    with warnings.catch_warnings():
        if slow:
            warnings.simplefilter("ignore", LapwingWarning)
        return lw.laplace(net, data, "gaussian", structure=structure, prior=PRIOR, factor="exact", **options)


def curvature(la: Any) -> Tensor:
    return linalg.to_dense(la.state.structure.operator(la.state, torch.ones(1, dtype=torch.float64)))


def groups(names: list[str], generic: dict[str, str]) -> list[list[str]]:
    """Parameters that share a part: a weight and its bias, where a rule speaks for them."""
    out: list[list[str]] = []
    for name in names:
        head, _, last = name.rpartition(".")
        partner = f"{head}.{last.replace('weight', 'bias')}" if head else last.replace("weight", "bias")
        alone = "*" in generic or name in generic
        if "weight" in last and partner in names and not alone and partner not in generic:
            out.append([name, partner])
        elif not any(name in group for group in out):
            out.append([name])
    return out


def within(G: Tensor, net: nn.Module, together: list[list[str]]) -> Tensor:
    """G with the entries between groups of parameters set to zero."""
    start, where = 0, {}
    for n, p in net.named_parameters():
        where[n] = torch.arange(start, start + p.numel())
        start += p.numel()
    out = torch.zeros_like(G)
    for group in together:
        index = torch.cat([where[n] for n in group])
        out[index.unsqueeze(-1), index] = G[index][:, index]
    return out


# -- cases: transposed convolutions --------------------------------------------------------------------------------


def transposed(name: str, kind: Any, shape: tuple[int, ...], out: int, kernel: Any, **options: Any) -> Case:
    return Case(
        f"{kind.__name__} {name}", lambda: kind(shape[0], out, kernel, **options), (normal(N, *shape, seed=len(name)),)
    )


UNPROVED = "rule does not give autograd's gradient"
TRANSPOSED = [
    transposed("plain", nn.ConvTranspose1d, (3, 4), 2, 3),
    transposed("without bias", nn.ConvTranspose1d, (2, 4), 3, 3, stride=2, bias=False),
    transposed("all", nn.ConvTranspose1d, (4, 3), 6, 3, stride=3, padding=2, output_padding=1, dilation=2, groups=2),
    transposed("padding beyond the kernel's reach", nn.ConvTranspose1d, (2, 6), 3, 2, padding=2),
    transposed("padding beyond, strided", nn.ConvTranspose1d, (2, 5), 3, 2, stride=3, padding=3, output_padding=2),
    transposed("one tap", nn.ConvTranspose1d, (2, 4), 3, 1, stride=2, output_padding=1),
    transposed("output padding by dilation", nn.ConvTranspose1d, (2, 3), 3, 2, dilation=3, output_padding=2),
    transposed("plain", nn.ConvTranspose2d, (2, 2, 3), 3, (2, 3)),
    transposed("one position", nn.ConvTranspose2d, (3, 1, 1), 2, 1),
    transposed(
        "all",
        nn.ConvTranspose2d,
        (4, 2, 3),
        6,
        (3, 2),
        stride=(2, 3),
        padding=(1, 0),
        output_padding=(1, 2),
        dilation=(1, 2),
        groups=2,
    ),
    transposed("depthwise", nn.ConvTranspose2d, (3, 2, 2), 3, 2, stride=2, groups=3),
    transposed("padding beyond in one direction", nn.ConvTranspose2d, (2, 4, 3), 3, (1, 3), padding=(1, 1)),
    transposed("plain", nn.ConvTranspose3d, (2, 2, 1, 2), 3, (2, 3, 1), stride=(2, 1, 2)),
    transposed("all", nn.ConvTranspose3d, (4, 2, 2, 1), 2, 2, groups=2, stride=2, padding=1, output_padding=1),
    Case(
        "ConvTranspose2d to a size of its own",
        lambda: nn.ConvTranspose2d(2, 3, 3, stride=2),
        (normal(N, 2, 2, 2),),
        lambda m, x: m(x, output_size=(6, 6)),
        {"*": UNPROVED},
    ),
]


# -- bags ----------------------------------------------------------------------------------------------------------


class WeightedBag(nn.Module):
    """A bag whose weights are learned too."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.gate = nn.EmbeddingBag(6, 3, mode="sum"), nn.Linear(2, 4)

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        return self.bag(ids, per_sample_weights=torch.sigmoid(self.gate(x)))


IDS = integers(6, N, 4, seed=5)
FLAT, OFFSETS = integers(6, 11, seed=6), torch.tensor([0, 3, 3, 7, 9])
CUT = "EmbeddingBag's rule cannot take apart what it is called on"
BAGS = [
    Case("EmbeddingBag sum", lambda: nn.EmbeddingBag(6, 3, mode="sum"), (IDS,)),
    Case("EmbeddingBag mean", lambda: nn.EmbeddingBag(6, 3), (IDS,)),
    Case("EmbeddingBag mean, padding", lambda: nn.EmbeddingBag(6, 3, padding_idx=2), (IDS,)),
    Case("EmbeddingBag sum, last as padding", lambda: nn.EmbeddingBag(6, 3, mode="sum", padding_idx=-1), (IDS,)),
    Case(
        "EmbeddingBag mean, a bag of padding",
        lambda: nn.EmbeddingBag(6, 3, padding_idx=2),
        (torch.cat([IDS[:-1], torch.full((1, 4), 2)]),),
    ),
    Case(
        "EmbeddingBag sum, weighted",
        lambda: nn.EmbeddingBag(6, 3, mode="sum", padding_idx=1),
        (IDS, normal(N, 4)),
        lambda m, ids, w: m(ids, per_sample_weights=w),
    ),
    Case("EmbeddingBag, learned weights", WeightedBag, (IDS, normal(N, 2))),
    Case("EmbeddingBag of 32-bit ids", lambda: nn.EmbeddingBag(6, 3), (IDS.int(),)),
    Case(
        "EmbeddingBag max",
        lambda: nn.EmbeddingBag(6, 3, mode="max"),
        (IDS,),
        generic={"weight": "EmbeddingBag's rule does not know 'weight'"},
    ),
    Case(
        "EmbeddingBag by offsets",
        lambda: nn.EmbeddingBag(6, 3),
        (FLAT, OFFSETS),
        generic={"weight": CUT},
        slow=True,
    ),
    Case(
        "EmbeddingBag sum by offsets, weighted",
        lambda: nn.EmbeddingBag(6, 3, mode="sum", padding_idx=0),
        (FLAT, OFFSETS, normal(11)),
        generic={"weight": CUT},
        slow=True,
    ),
    Case(
        "EmbeddingBag with the last offset",
        lambda: nn.EmbeddingBag(6, 3, include_last_offset=True),
        (FLAT, torch.cat([OFFSETS, torch.tensor([11])])),
        generic={"weight": CUT},
        slow=True,
    ),
]


# -- attention -----------------------------------------------------------------------------------------------------

E = 4
SEQUENCE, MEMORY = normal(N, 3, E, seed=11), normal(N, 5, E, seed=12)
PADDED = torch.tensor([[False, False, False], [False, False, True], [False, True, True]]).repeat(2, 1)[:N]
CAUSAL = torch.triu(torch.ones(3, 3, dtype=torch.bool), 1)


def attention(**options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.MultiheadAttention(E, 2, **{"batch_first": True, **options})


def self_attention(m: Any, x: Tensor, **options: Any) -> Tensor:
    return m(x, x, x, **{"need_weights": False, **options})[0]


def with_weights(m: Any, x: Tensor, average: bool) -> Tensor:
    out, weights = m(x, x, x, average_attn_weights=average)
    return torch.cat([out.flatten(1), weights.flatten(1)], 1)


def twice(m: Any, x: Tensor) -> Tensor:
    return self_attention(m, torch.sin(self_attention(m, x)))


OTHERS = {
    n: "MultiheadAttention's rule cannot take apart what it is called on" for n in ("in_proj_weight", "in_proj_bias")
}
ATTENTION = [
    Case("attention", attention(), (SEQUENCE,), self_attention),
    Case("attention, no bias", attention(bias=False), (SEQUENCE,), self_attention),
    Case(
        "attention, time first",
        attention(batch_first=False),
        (SEQUENCE,),
        lambda m, x: self_attention(m, x.transpose(0, 1)).transpose(0, 1),
    ),
    Case(
        "attention, padding", attention(), (SEQUENCE, PADDED), lambda m, x, p: self_attention(m, x, key_padding_mask=p)
    ),
    Case("attention, mask", attention(), (SEQUENCE,), lambda m, x: self_attention(m, x, attn_mask=CAUSAL)),
    Case(
        "attention, causal",
        attention(),
        (SEQUENCE,),
        lambda m, x: self_attention(m, x, attn_mask=CAUSAL, is_causal=True),
    ),
    Case(
        "attention, a mask an example",
        attention(),
        (SEQUENCE, normal(N, 2, 3, 3)),
        lambda m, x, a: self_attention(m, x, attn_mask=a.flatten(0, 1)),
    ),
    Case("attention with its weights", attention(), (SEQUENCE,), lambda m, x: with_weights(m, x, True)),
    Case("attention with the weights of each head", attention(), (SEQUENCE,), lambda m, x: with_weights(m, x, False)),
    Case(
        "attention with learned keys",
        attention(add_bias_kv=True),
        (SEQUENCE,),
        self_attention,
        {n: f"MultiheadAttention's rule does not know '{n}'" for n in ("bias_k", "bias_v")},
    ),
    Case(
        "attention with a zero key",
        attention(add_zero_attn=True),
        (SEQUENCE, PADDED),
        lambda m, x, p: self_attention(m, x, key_padding_mask=p),
    ),
    Case(
        "attention of other widths",
        attention(kdim=3, vdim=5),
        (SEQUENCE, normal(N, 5, 3), normal(N, 5, 5)),
        lambda m, q, k, v: m(q, k, v)[0],
        {"in_proj_bias": "rule does not know 'in_proj_bias'"},
    ),
    Case(
        "attention of other widths, no bias",
        attention(kdim=3, bias=False),
        (SEQUENCE, normal(N, 5, 3), MEMORY),
        lambda m, q, k, v: m(q, k, v)[0],
    ),
    Case("cross-attention", attention(), (SEQUENCE, MEMORY), lambda m, q, k: m(q, k, k)[0], OTHERS),
    Case("cross-attention of one length", attention(), (SEQUENCE, MEMORY[:, :3]), lambda m, q, k: m(q, k, k)[0]),
    Case("attention by keywords", attention(), (SEQUENCE,), lambda m, x: m(query=x, key=x, value=x)[0]),
    Case("attention, twice", attention(), (SEQUENCE,), twice, {"*": "called 2 times"}),
    Case("attention with dropout", attention(dropout=0.5), (SEQUENCE,), self_attention),
]


class Heads(nn.Module):
    """Causal attention by torch's function, more query than key heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (
            nn.Linear(E, 8),
            nn.Linear(E, 4),
            nn.Linear(E, 4, bias=False),
            nn.Linear(8, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, 2)).transpose(1, 2) for f in (self.q, self.k, self.v))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(h.transpose(1, 2).flatten(2))


def encoder(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(E, 2, 6, **{"batch_first": True, **options})


def decoder(m: Any, x: Tensor, memory: Tensor) -> Tensor:
    return m(x, memory, tgt_mask=CAUSAL, tgt_is_causal=True)


CROSS = {f"multihead_attn.{n}": why for n, why in OTHERS.items()}
ATTENTION += [
    Case("attention by function", Heads, (SEQUENCE,)),
    Case("encoder layer", encoder, (SEQUENCE,)),
    Case(
        "encoder layer, norm first, gelu",
        lambda: encoder(norm_first=True, activation="gelu"),
        (SEQUENCE, PADDED),
        lambda m, x, p: m(x, src_key_padding_mask=p),
    ),
    Case("encoder layer, no bias, dropout", lambda: encoder(bias=False, dropout=0.4), (SEQUENCE,)),
    Case(
        "encoder layer, time first, causal",
        lambda: encoder(batch_first=False),
        (SEQUENCE,),
        lambda m, x: m(x.transpose(0, 1), src_mask=CAUSAL, is_causal=True).transpose(0, 1),
        {f"{m}.{n}": UNPROVED for m in ("linear1", "linear2", "norm1", "norm2") for n in ("weight", "bias")},
    ),
    Case(
        "decoder layer",
        lambda: nn.TransformerDecoderLayer(E, 2, 6, batch_first=True),
        (SEQUENCE, MEMORY),
        decoder,
        CROSS,
    ),
    Case(
        "decoder layer, norm first, gelu",
        lambda: nn.TransformerDecoderLayer(E, 2, 6, batch_first=True, norm_first=True, activation="gelu"),
        (SEQUENCE, MEMORY[:, :3]),
        decoder,
    ),
    Case(
        "encoder",
        lambda: nn.TransformerEncoder(encoder(), 2, norm=nn.LayerNorm(E)),
        (SEQUENCE, PADDED),
        lambda m, x, p: m(x, src_key_padding_mask=p).masked_fill(p.unsqueeze(-1), 0.0),
    ),
]


# -- recurrence ----------------------------------------------------------------------------------------------------

STEPS = normal(N, 4, 3, seed=21)


def recurrent(kind: Any, **options: Any) -> Callable[[], nn.Module]:
    return lambda: kind(3, 4, **{"batch_first": True, **options})


def outputs(m: Any, x: Tensor) -> Tensor:
    return m(x)[0]


def final(m: Any, x: Tensor) -> Tensor:
    states = m(x)[1]
    states = states if isinstance(states, tuple) else (states,)
    return torch.cat([s.transpose(0, 1).flatten(1) for s in states], 1)


def time_first(m: Any, x: Tensor) -> Tensor:
    out, states = m(x.transpose(0, 1))
    states = states[1] if isinstance(states, tuple) else states
    return torch.cat([out.transpose(0, 1).flatten(1), states.transpose(0, 1).flatten(1)], 1)


def from_states(m: Any, x: Tensor, *states: Tensor) -> Tensor:
    states = tuple(s.transpose(0, 1).contiguous() for s in states)
    return m(x, states if len(states) > 1 else states[0])[0]


def packed(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    out, _ = m(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
    return pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])[0]


class Started(nn.Module):
    """A recurrent layer whose first state is learned, or computed from the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.lstm, self.first = nn.GRU(3, 4), nn.LSTM(3, 2), nn.Linear(3, 2)
        self.start = nn.Parameter(torch.randn(1, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        a, _ = self.gru(x, self.start.expand(1, x.shape[1], 4).contiguous())
        h = torch.tanh(self.first(x[0])).unsqueeze(0)
        b, (_, cell) = self.lstm(x, (h, 2 * h))
        return torch.cat([a, b, cell.expand(len(b), -1, -1)], -1).transpose(0, 1)


def tied() -> nn.Module:
    net = nn.GRU(3, 3, num_layers=2, batch_first=True)
    net.weight_hh_l1 = net.weight_hh_l0
    return net


RECURRENT = [
    Case("RNN", recurrent(nn.RNN), (STEPS,), outputs),
    Case("RNN relu, no bias", recurrent(nn.RNN, nonlinearity="relu", bias=False), (STEPS,), outputs),
    Case("RNN in both directions", recurrent(nn.RNN, bidirectional=True, num_layers=2), (STEPS,), outputs),
    Case("GRU", recurrent(nn.GRU), (STEPS,), outputs),
    Case("GRU, final state", recurrent(nn.GRU, num_layers=2), (STEPS,), final),
    Case("GRU in both directions, time first", lambda: nn.GRU(3, 4, bidirectional=True), (STEPS,), time_first),
    Case("GRU from a state", recurrent(nn.GRU), (STEPS, normal(N, 1, 4)), from_states),
    Case("LSTM", recurrent(nn.LSTM), (STEPS,), outputs),
    Case("LSTM, no bias, final states", recurrent(nn.LSTM, bias=False, num_layers=2), (STEPS,), final),
    Case("LSTM, time first, cells", lambda: nn.LSTM(3, 2, num_layers=2, bidirectional=True), (STEPS,), time_first),
    Case("LSTM with projections", recurrent(nn.LSTM, proj_size=2), (STEPS,), outputs),
    Case(
        "LSTM with projections, layers, directions",
        recurrent(nn.LSTM, proj_size=2, num_layers=2, bidirectional=True),
        (STEPS,),
        final,
    ),
    Case(
        "LSTM from states",
        recurrent(nn.LSTM, num_layers=2),
        (STEPS, normal(N, 2, 4), normal(N, 2, 4, seed=1)),
        from_states,
    ),
    Case(
        "LSTM with projections from states",
        recurrent(nn.LSTM, proj_size=3),
        (STEPS, normal(N, 1, 3), normal(N, 1, 4, seed=1)),
        from_states,
    ),
    Case("LSTM with dropout", recurrent(nn.LSTM, num_layers=2, dropout=0.5), (STEPS,), outputs),
    Case("one step", recurrent(nn.LSTM), (STEPS[:, :1],), outputs),
    Case("learned states", Started, (STEPS,), generic={"start": "Started has no rule"}, slow=True),
    Case(
        "GRU, packed",
        recurrent(nn.GRU),
        (STEPS, torch.tensor([4, 1, 3, 4, 2])),
        packed,
        {"*": "rule cannot take apart what it is called on"},
        slow=True,
    ),
    Case(
        "LSTM, packed",
        recurrent(nn.LSTM, bidirectional=True),
        (STEPS, torch.tensor([4, 1, 3, 4, 2])),
        packed,
        {"*": "rule cannot take apart what it is called on"},
        slow=True,
    ),
    Case(
        "GRU, called twice",
        lambda: nn.GRU(3, 3, batch_first=True),
        (STEPS,),
        lambda m, x: m(m(x)[0])[0],
        {"*": "called 2 times"},
        slow=True,
    ),
    Case(
        "GRU with tied layers", tied, (STEPS,), outputs, {"weight_hh_l0": "tied: several modules share it"}, slow=True
    ),
]


# -- bilinear maps -------------------------------------------------------------------------------------------------

BILINEAR = [
    Case("Bilinear", lambda: nn.Bilinear(3, 4, 5), (normal(N, 3), normal(N, 4, seed=1))),
    Case("Bilinear, no bias", lambda: nn.Bilinear(3, 4, 2, bias=False), (normal(N, 3), normal(N, 4, seed=1))),
    Case("Bilinear with positions", lambda: nn.Bilinear(3, 4, 5), (normal(N, 3, 3), normal(N, 3, 4, seed=1))),
    Case("Bilinear with itself", lambda: nn.Bilinear(3, 3, 2), (normal(N, 2, 3, 3),), lambda m, x: m(x, x)),
]

CASES = {case.name: case for case in [*TRANSPOSED, *BAGS, *ATTENTION, *RECURRENT, *BILINEAR]}


@pytest.mark.parametrize("name", CASES)
def test_block_and_diag_are_those_of_the_dense_matrix(name: str) -> None:
    case = CASES[name]
    net, J = problem(case)
    G = torch.einsum("ncp,ncq->pq", J, J)
    assert float(G.diagonal().max()) > 1e-4
    names = [n for n, _ in net.named_parameters()]
    generic = {n if n == "*" else f"layer.{n}": why for n, why in case.generic.items()}
    block, diag = (fit(net, case.inputs, s, case.slow) for s in ("block", "diag"))
    close(curvature(block), within(G, net, groups(names, generic)))
    close(curvature(diag), G.diagonal().diag())
    for la, what in ((block, "exact block"), (diag, "exact diagonal")):
        assert set(la.coverage) == set(names)
        for n, text in la.coverage.items():
            why = generic.get(n, generic.get("*"))
            if why is None:
                assert text.startswith(f"{what} (") and text.endswith(" rule)"), (n, text)
            else:
                assert text.startswith(f"{what}, generic: ") and why in text, (n, text)


@pytest.mark.parametrize("structure", ["kron", "ekfac", "block", "diag", "full"])
@pytest.mark.parametrize("name", CASES)
def test_predictions_are_those_of_the_dense_precision(name: str, structure: str) -> None:
    case = CASES[name]
    net, J = problem(case)
    la = fit(net, case.inputs, structure, case.slow)
    with warnings.catch_warnings():
        if case.slow:
            warnings.simplefilter("ignore", LapwingWarning)
        prediction = la.predict(case.inputs)
        eye = torch.eye(J.shape[-1], dtype=torch.float64)
        close(prediction.covariance, J @ linalg.solve(la.posterior.precision, eye) @ J.mT)
        twin = copy.deepcopy(net).eval()
        close(prediction.f_mean, twin(*case.inputs).detach())
        M = la._spread.precision
        if structure != "full":
            close(linalg.solve(M, eye), torch.linalg.inv(linalg.to_dense(M)))
