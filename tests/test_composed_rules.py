"""Transposed convolutions, bags, attention, recurrent layers and bilinear maps against dense autograd.

A layer stands between its inputs and a fixed nonlinear readout, f (n, 2), and is run as torch runs it, fused. With J by
reverse mode, one output at a time, G = Σ JᵀJ: `block` must be G within each part, `diag` its diagonal, and predictions
J M⁻¹ Jᵀ with the structure's own dense M. Kronecker factors are written out once for each family. Parameters in
`generic` have no rule, for the reason there; all others have one, a weight together with its bias.
"""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from torch.utils.checkpoint import checkpoint

import lapwing as lw
from helpers import backward_rows, close, curvature, integers, normal
from lapwing.curvature.rules import base
from lapwing.errors import InvalidValue, LapwingWarning
from lapwing.operators import linalg

N, OUTPUTS, PRIOR = 5, 2, 0.7


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
    with evaluating(layer):
        width = case.run(layer, *case.inputs)[0].numel()
    return Around(layer, case.run, normal(width, OUTPUTS, seed=9) / math.sqrt(width))


@contextmanager
def evaluating(net: nn.Module) -> Iterator[nn.Module]:
    """A copy in eval mode would be plainer, but a module with computed weights has none."""
    modes = {m: m.training for m in net.modules()}
    net.eval()
    yield net
    for m, training in modes.items():
        m.training = training


def rows(net: nn.Module, x: tuple[Any, ...]) -> Tensor:
    """J (n, c, p) over named_parameters, by reverse mode in eval mode, one output at a time."""
    with evaluating(net):
        out = net(*x)
    return backward_rows(out, net.parameters())


def outputs_of(net: nn.Module, x: tuple[Any, ...]) -> Tensor:
    with evaluating(net):
        return net(*x).detach()


@cache
def problem(case: Case) -> tuple[Around, Tensor]:
    net = around(case)
    return net, rows(net, case.inputs)


def fit(net: nn.Module, x: Any, structure: Any, slow: bool = False, **options: Any) -> Any:
    """Unit noise and the exact factor: the curvature is Σ JᵀJ."""
    batches = x if isinstance(x, list) else [x]
    data = [(one, torch.zeros(len(outputs_of(net, one)), OUTPUTS, dtype=torch.float64)) for one in batches]
    with warnings.catch_warnings():
        if slow:
            warnings.simplefilter("ignore", LapwingWarning)
        return lw.laplace(net, data, "gaussian", structure=structure, prior=PRIOR, factor="exact", **options)


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


HIDDEN = "rule cannot take apart what it is called on"
OTHERS = dict.fromkeys(("in_proj_weight", "in_proj_bias"), f"MultiheadAttention's {HIDDEN}")
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
                assert re.fullmatch(rf"{what} \(\w+ rule\)", text), (n, text)
            else:
                assert re.match(f"{what}, generic: .*{why}", text), (n, text)


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
        close(prediction.f_mean, outputs_of(net, case.inputs))
        M = la.spread.precision
        if structure != "full":
            close(linalg.solve(M, eye), torch.linalg.inv(linalg.to_dense(M)))


def test_terms_that_cancel_do_not_refute_a_rule() -> None:
    """A bias of keys has no gradient but rounding: it adds the same to every score."""
    net, J = problem(CASES["attention by function"])
    where = {n: i for i, n in enumerate(n for n, _ in net.named_parameters())}
    sizes = [p.numel() for p in net.parameters()]
    bias = J.split(sizes, -1)[where["layer.k.bias"]]
    assert 0 < float(bias.abs().max()) < 1e-14
    for dtype in (torch.float64, torch.float32):
        x = tuple(t.to(dtype) for t in CASES["attention by function"].inputs)
        own = copy.deepcopy(net).to(dtype)
        y = torch.zeros(N, OUTPUTS, dtype=dtype)
        la = lw.laplace(own, [(x, y)], "gaussian", structure="kron")
        assert set(la.coverage.values()) == {"Kronecker (Linear rule)"}
        only = lw.laplace(own, [(x, y)], "gaussian", structure="diag", subset=["layer.k.bias"])
        assert only.coverage["layer.k.bias"] == "exact diagonal (Linear rule)"


# -- Kronecker factors, written out --------------------------------------------------------------------------------


def kron(a: Tensor, g: Tensor) -> Tensor:
    """(1/NS) B ⊗ A for inputs a (n, s, i) and gradients g (n, s, c, o), in the order of W (o, i)."""
    A, B = torch.einsum("nsi,nsj->ij", a, a), torch.einsum("nsco,nscp->op", g, g)
    return torch.kron(B, A) / (a.shape[0] * a.shape[1])


def ones(a: Tensor) -> Tensor:
    return torch.cat([a, torch.ones_like(a[..., :1])], -1)


def gradients(f: Tensor, z: Tensor) -> Tensor:
    """∂f[n, c]/∂z for z (n, ...), (n, c, ...)."""
    columns = [torch.autograd.grad(f[:, c].sum(), z, retain_graph=True)[0] for c in range(f.shape[1])]
    return torch.stack(columns, 1)


def standing(net: nn.Module) -> dict[str, Tensor]:
    """Where each parameter's elements stand in the vector of all, in the parameter's shape."""
    out, start = {}, 0
    for n, p in net.named_parameters():
        out[n] = torch.arange(start, start + p.numel()).reshape(p.shape)
        start += p.numel()
    return out


def assert_kron(net: nn.Module, x: tuple[Any, ...], blocks: list[tuple[Tensor, Tensor]], f: Tensor) -> None:
    """Each (indices of W in row-major order, its Kronecker block) is what `kron` holds, and it holds nothing else."""
    close(f.detach(), outputs_of(net, x))  # what is written out here is the network
    size = sum(p.numel() for p in net.parameters())
    expected = torch.zeros(size, size, dtype=torch.float64)
    for index, block in blocks:
        expected[index.reshape(-1, 1), index.reshape(-1)] = block
    close(curvature(fit(net, x, "kron")), expected)


def read(net: Any, z: Tensor) -> Tensor:
    return torch.tanh(z.reshape(len(z), -1)) @ net.readout


def joined(weight: Tensor, bias: Tensor) -> Tensor:
    """Positions of W (o, i) with those of the bias as its last column."""
    return torch.cat([weight.reshape(len(weight), -1), bias.unsqueeze(-1)], -1)


@pytest.mark.parametrize("name", ["ConvTranspose1d all", "ConvTranspose2d all", "ConvTranspose3d plain"])
def test_factors_of_a_transposed_convolution(name: str) -> None:
    """An input of output y and block b is ∂z[y, first output of b]/∂W: autograd's, of the fused kernel."""
    case = CASES[name]
    net, (x,) = problem(case)[0], case.inputs
    layer: Any = net.layer
    z = layer(x)  # (n, c, *out)
    b, o = layer.groups, layer.out_channels // layer.groups
    per = layer.weight.shape[0] // b
    flat = z.flatten(2)  # (n, c, s)
    a = torch.zeros(len(x), flat.shape[2], b, per, math.prod(layer.kernel_size), dtype=torch.float64)
    for n in range(len(x)):
        for s in range(flat.shape[2]):
            for block in range(b):
                (grad,) = torch.autograd.grad(flat[n, block * o, s], layer.weight, retain_graph=True)
                a[n, s, block] = grad[block * per : (block + 1) * per, 0].flatten(1)
    f = read(net, z)
    g = gradients(f, z).flatten(3).permute(0, 3, 1, 2)  # (n, s, outputs, c)
    at, blocks = standing(net), []
    for block in range(b):
        weight = at["layer.weight"][block * per : (block + 1) * per].transpose(0, 1)  # (o, per, *kernel)
        mine = slice(block * o, (block + 1) * o)
        inputs = ones(a[:, :, block].flatten(2))
        blocks.append((joined(weight, at["layer.bias"][mine]), kron(inputs, g[..., mine])))
    assert_kron(net, case.inputs, blocks, f)


@pytest.mark.parametrize("name", ["EmbeddingBag mean, padding", "EmbeddingBag sum, weighted"])
def test_factors_of_a_bag(name: str) -> None:
    """The inputs are the shares of each row in a bag."""
    case = CASES[name]
    net = problem(case)[0]
    layer: Any = net.layer
    ids = case.inputs[0]
    share = case.inputs[1] if len(case.inputs) > 1 else torch.ones(ids.shape, dtype=torch.float64)
    share = share * (ids != layer.padding_idx)
    if layer.mode == "mean":
        share = share / (ids != layer.padding_idx).sum(1, keepdim=True)
    a = (F.one_hot(ids, 6) * share.unsqueeze(-1)).sum(1, keepdim=True)  # (n, 1, 6)
    z = a.squeeze(1) @ layer.weight
    f = read(net, z)
    g = gradients(f, z).unsqueeze(1)
    assert_kron(net, case.inputs, [(standing(net)["layer.weight"].T, kron(a, g))], f)


@pytest.mark.parametrize("name", ["Bilinear", "Bilinear with positions"])
def test_factors_of_a_bilinear_map(name: str) -> None:
    case = CASES[name]
    net = problem(case)[0]
    layer: Any = net.layer
    x, y = (t.reshape(N, -1, t.shape[-1]) for t in case.inputs)
    a = torch.einsum("nsi,nsj->nsij", x, y).flatten(2)
    z = a @ layer.weight.flatten(1).T + layer.bias
    f = read(net, z)
    at = standing(net)
    block = kron(ones(a), gradients(f, z).transpose(1, 2))
    assert_kron(net, case.inputs, [(joined(at["layer.weight"], at["layer.bias"]), block)], f)


def test_factors_of_attention() -> None:
    """Queries, keys and values are three blocks of the joint projection, each with factors of its own."""
    case = CASES["attention, padding"]
    net, (x, padding) = problem(case)[0], case.inputs
    layer: Any = net.layer
    q, k, v = (x @ w.T + b for w, b in zip(layer.in_proj_weight.chunk(3), layer.in_proj_bias.chunk(3), strict=True))
    heads = [t.unflatten(-1, (2, 2)).transpose(1, 2) for t in (q, k, v)]  # (n, h, s, e)
    scores = heads[0] @ heads[1].mT / math.sqrt(2)
    scores = scores.masked_fill(padding[:, None, None], -math.inf)
    h = (scores.softmax(-1) @ heads[2]).transpose(1, 2).flatten(2)
    z = h @ layer.out_proj.weight.T + layer.out_proj.bias
    f = read(net, z)
    at = standing(net)
    blocks = [
        (joined(weight, bias), kron(ones(x), gradients(f, t).transpose(1, 2)))
        for weight, bias, t in zip(
            at["layer.in_proj_weight"].chunk(3), at["layer.in_proj_bias"].chunk(3), (q, k, v), strict=True
        )
    ]
    out = joined(at["layer.out_proj.weight"], at["layer.out_proj.bias"])
    blocks.append((out, kron(ones(h.detach()), gradients(f, z).transpose(1, 2))))
    assert_kron(net, case.inputs, blocks, f)


@pytest.mark.parametrize("name", ["RNN", "GRU", "LSTM", "LSTM with projections"])
def test_factors_of_a_recurrent_layer(name: str) -> None:
    """A step is a position; inputs and states have a factor each, z_t = W_ih x_t + b_ih and z'_t = W_hh h + b_hh."""
    case = CASES[name]
    net, (x,) = problem(case)[0], case.inputs
    m: Any = net.layer
    project = m.proj_size > 0
    h, c = torch.zeros(N, m.proj_size or 4, dtype=torch.float64), torch.zeros(N, 4, dtype=torch.float64)
    ins, states, before, whole, projected, out = [], [], [], [], [], []
    for t in range(x.shape[1]):
        before.append(h.detach())
        z, r = x[:, t] @ m.weight_ih_l0.T + m.bias_ih_l0, h @ m.weight_hh_l0.T + m.bias_hh_l0
        ins.append(z)
        states.append(r)
        if isinstance(m, nn.GRU):
            reset, update = ((z[:, s] + r[:, s]).sigmoid() for s in (slice(0, 4), slice(4, 8)))
            h = (1 - update) * (z[:, 8:] + reset * r[:, 8:]).tanh() + update * h
        elif isinstance(m, nn.LSTM):
            i, forget, cell, o = (z + r).split(4, 1)
            c = forget.sigmoid() * c + i.sigmoid() * cell.tanh()
            h = o.sigmoid() * c.tanh()
        else:
            h = (z + r).tanh()
        if project:
            whole.append(h.detach())
            h = h @ m.weight_hr_l0.T
            projected.append(h)
        out.append(h)
    f = read(net, torch.stack(out, 1))
    at = standing(net)

    def over_time(steps: list[Tensor]) -> Tensor:
        return torch.stack([gradients(f, z) for z in steps], 1)  # (n, t, c, o)

    blocks = [
        (joined(at["layer.weight_ih_l0"], at["layer.bias_ih_l0"]), kron(ones(x), over_time(ins))),
        (
            joined(at["layer.weight_hh_l0"], at["layer.bias_hh_l0"]),
            kron(ones(torch.stack(before, 1)), over_time(states)),
        ),
    ]
    if project:
        blocks.append((at["layer.weight_hr_l0"], kron(torch.stack(whole, 1), over_time(projected))))
    assert_kron(net, case.inputs, blocks, f)


# -- subsets, batches, files ---------------------------------------------------------------------------------------

SUBSETS = {
    "attention, padding": (["*in_proj_bias"], ["*in_proj_weight"], ["*out_proj*"], ["*bias"]),
    "attention of other widths": (["*q_proj_weight"], ["*v_proj_weight", "*in_proj_bias"]),
    "LSTM with projections": (["*weight_hh*"], ["*bias*"], ["*weight_hr*", "*bias_ih*"]),
    "GRU, final state": (["*_l1"], ["*bias_hh_l0"]),
    "ConvTranspose2d all": (["*bias"], ["*weight"]),
    "Bilinear with positions": (["*bias"], ["*weight"]),
    "EmbeddingBag mean": (["*"],),
}


@pytest.mark.parametrize("structure", ["kron", "block", "diag", "full"])
@pytest.mark.parametrize(("name", "subset"), [(n, s) for n, several in SUBSETS.items() for s in several])
def test_parts_of_a_layer(name: str, subset: list[str], structure: str) -> None:
    case = CASES[name]
    net, J = problem(case)
    la = fit(net, case.inputs, structure, subset=subset)
    names, at = la.state.layout.names, standing(net)
    J = J[..., torch.cat([at[n].reshape(-1) for n in names])]
    G = torch.einsum("ncp,ncq->pq", J, J)
    M = linalg.to_dense(la.posterior.precision)
    eye = PRIOR * torch.eye(len(G), dtype=torch.float64)
    if structure == "full":
        close(M, G + eye)
    elif structure == "diag":
        close(M, G.diagonal().diag() + eye)
    elif structure == "block":
        inside = within(torch.ones_like(G), Selected(net, names), groups(list(names), {})).bool()
        close(M, G * inside + eye)
    close(la.predict(case.inputs).covariance, J @ torch.linalg.inv(M) @ J.mT)
    frozen = [n for n in at if n not in names]
    assert {la.coverage[n] for n in frozen} <= {"frozen"}


class Selected:
    def __init__(self, net: nn.Module, names: Any) -> None:
        self.own = {n: p for n, p in net.named_parameters() if n in names}

    def named_parameters(self) -> Any:
        return self.own.items()


FEW = ["ConvTranspose2d all", "EmbeddingBag mean, padding", "attention, padding", "encoder", "LSTM with projections"]
FEW += ["GRU from a state", "Bilinear with positions"]


@pytest.mark.parametrize("structure", ["kron", "block", "diag"])
@pytest.mark.parametrize("name", FEW)
def test_batches_of_any_size_and_a_file(name: str, structure: str, tmp_path: Path) -> None:
    case = CASES[name]
    net, x = problem(case)[0], case.inputs
    whole = fit(net, x, structure)
    cuts = [slice(0, 1), slice(1, 4), slice(4, 5)]
    cut = fit(net, [tuple(t[s] for t in x) for s in cuts], structure)
    close(curvature(cut), curvature(whole))
    assert cut.coverage == whole.coverage
    whole.save(tmp_path / "net.safetensors")
    again = lw.load(tmp_path / "net.safetensors", net)
    assert again.coverage == whole.coverage
    close(again.predict(x).covariance, whole.predict(x).covariance)
    close(again.log_evidence(), whole.log_evidence())
    some = tuple(t[1:3] for t in x)
    close(whole.predict(some).covariance, whole.predict(x).covariance[1:3])
    close(whole.predict(tuple(t[:1] for t in x)).covariance, whole.predict(x).covariance[:1])


# -- the user's module ---------------------------------------------------------------------------------------------


def snapshot(net: nn.Module) -> dict[str, Any]:
    return {
        name: (
            sorted(m.__dict__),
            [id(w) for w in getattr(m, "_flat_weights", ())],
            m.training,
            list(m._forward_hooks.values()),
            list(m._forward_pre_hooks.values()),
            list(m._backward_hooks.values()),
            [(k, id(p), p._version, p.requires_grad) for k, p in m._parameters.items() if p is not None],
            [(k, id(p)) for k, p in m._buffers.items()],
        )
        for name, m in net.named_modules()
    }


KEPT = [*FEW, "LSTM with dropout", "GRU in both directions, time first", "decoder layer", "attention with dropout"]


@pytest.mark.parametrize("name", [*KEPT, "spectral norm"])
def test_the_users_module_stays_as_it_was(name: str) -> None:
    case = {**CASES, **{c.name: c for c in COMPUTED}}[name]
    net = around(case).train()
    if "LSTM" in name:
        net.layer.eval()  # modes may be mixed
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    before, state = snapshot(net), {k: t.clone() for k, t in net.state_dict().items()}
    random = torch.get_rng_state()
    for structure in ("kron", "full"):
        fit(net, case.inputs, structure).predict(case.inputs)
    assert snapshot(net) == before
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(t, state[k]) for k, t in net.state_dict().items())
    assert all(p.grad is not None and torch.equal(p.grad, torch.ones_like(p)) for p in net.parameters())


HOOKED = ["EmbeddingBag mean", "attention", "LSTM", "GRU", "Bilinear", "ConvTranspose1d plain"]


@pytest.mark.parametrize("name", HOOKED)
def test_hooks_of_the_user_run_and_may_change_things(name: str) -> None:
    case = CASES[name]
    net = around(case)
    calls = []

    def after(_m: Any, _args: Any, out: Any) -> Any:
        calls.append(type(out))
        first = out[0] if isinstance(out, tuple) else out
        return (first * 2 + 1, *out[1:]) if isinstance(out, tuple) else first * 2 + 1

    def before(_m: Any, args: Any) -> Any:
        return tuple(t.sin() if t.is_floating_point() else t for t in args)

    net.layer.register_forward_hook(after)
    net.layer.register_forward_pre_hook(before)
    J = rows(net, case.inputs)
    seen = set(calls)
    G = torch.einsum("ncp,ncq->pq", J, J)
    calls.clear()
    close(curvature(fit(net, case.inputs, "diag")), G.diagonal().diag())
    la = fit(net, case.inputs, "block")
    close(curvature(la), within(G, net, groups([n for n, _ in net.named_parameters()], {})))
    assert all(" rule)" in text for text in la.coverage.values())
    assert set(calls) == seen


class Doubled(nn.MultiheadAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out, weights = super().forward(*args, **kwargs)
        return out * 2 + args[0], weights


class Reversed(nn.GRU):
    def forward(self, input: Tensor, hx: Any = None) -> Any:  # type: ignore[override]
        out, h = super().forward(input.flip(1), hx)
        return out.flip(1), h


class Scaled(nn.Bilinear):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return super().forward(a, 3 * b)


class Squared(nn.EmbeddingBag):
    def forward(self, *args: Any) -> Tensor:
        return F.embedding_bag(args[0], self.weight.square(), mode="sum")


class Renamed(nn.LSTM):
    """A subclass that runs as its parent does."""


SUBCLASSES = [
    Case("own attention", lambda: Doubled(E, 2, batch_first=True), (SEQUENCE,), self_attention, {"*": "has no rule"}),
    Case(
        "own GRU", lambda: Reversed(3, 4, batch_first=True), (STEPS,), outputs, {"*": "Reversed has no rule"}, slow=True
    ),
    Case("own Bilinear", lambda: Scaled(3, 4, 2), BILINEAR[0].inputs, generic={"*": "Scaled has no rule"}),
    Case("own bag", lambda: Squared(6, 3), (IDS,), generic={"*": "Squared has no rule"}),
    Case("the same LSTM", lambda: Renamed(3, 4, batch_first=True), (STEPS,), outputs),
]


@pytest.mark.parametrize("case", SUBCLASSES, ids=lambda case: case.name)
def test_subclasses_with_a_forward_of_their_own(case: Case) -> None:
    net, J = problem(case)
    G = torch.einsum("ncp,ncq->pq", J, J)
    la = fit(net, case.inputs, "block", case.slow)
    names = [n for n, _ in net.named_parameters()]
    generic = dict.fromkeys(names, "") if case.generic else {}
    close(curvature(la), within(G, net, groups(names, generic)))
    for n, text in la.coverage.items():
        if case.generic and "out_proj" not in n:
            assert case.generic["*"] in text
        assert ("generic" in text) == bool(case.generic)


def test_a_forward_of_the_instance_is_run_and_kept() -> None:
    case = CASES["attention"]
    net = around(case)
    layer: Any = net.layer
    plain_forward = layer.forward

    def own(*args: Any, **kwargs: Any) -> Any:
        out, weights = plain_forward(*args, **kwargs)
        return out.exp(), weights

    layer.forward = own
    x = case.inputs[0]
    J = backward_rows(net.eval()(x).view(-1), net.parameters())
    G = J.T @ J
    la = fit(net, case.inputs, "diag")
    close(curvature(la), G.diagonal().diag())
    assert all("generic" in text for text in la.coverage.values())
    assert layer.forward is own


def test_an_error_on_the_way_leaves_the_module_as_it_was() -> None:
    net = around(CASES["LSTM"])
    with pytest.raises(RuntimeError):
        lw.laplace(net, [((normal(N, 4, 7),), torch.zeros(N, 2))], "gaussian", structure="kron")
    assert "forward" not in net.layer.__dict__
    assert not net.layer._forward_hooks


# -- what changes from batch to batch ------------------------------------------------------------------------------


class MaybeMasked(nn.Module):
    """Attends over a memory where there is one, else over itself; with a mask where there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(E, 2, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor | None = None, memory: Tensor | None = None) -> Tensor:
        memory = x if memory is None else memory
        return self.attention(x, memory, memory, key_padding_mask=mask)[0].sin().sum(1)[:, :OUTPUTS]


def sums(net: nn.Module, batches: list[tuple[Any, ...]]) -> Tensor:
    found = [rows(net, x) for x in batches]
    return sum(torch.einsum("ncp,ncq->pq", J, J) for J in found)  # type: ignore[return-value]


@pytest.mark.parametrize("structure", ["block", "diag"])
def test_a_mask_or_another_length_that_comes_later_is_right(structure: str) -> None:
    net = moved(MaybeMasked().double())
    batches: list[tuple[Any, ...]] = [
        (SEQUENCE,),
        (SEQUENCE, PADDED),
        (MEMORY,),
        (SEQUENCE, None, SEQUENCE.flip(0).exp()),
    ]
    la = fit(net, batches, structure)
    G = sums(net, batches)
    names = [n for n, _ in net.named_parameters()]
    close(curvature(la), within(G, net, groups(names, {})) if structure == "block" else G.diagonal().diag())


@pytest.mark.parametrize("structure", ["kron", "block", "diag"])
def test_a_memory_of_another_length_that_comes_later_is_named(structure: str) -> None:
    net = moved(MaybeMasked().double())
    batches: list[tuple[Any, ...]] = [(SEQUENCE,), (SEQUENCE, None, MEMORY)]
    with pytest.raises(InvalidValue, match=r"attention.in_proj was called on inputs of another kind than before"):
        fit(net, batches, structure)
    assert "forward" not in net.attention.__dict__
    la = fit(net, batches, "full")
    close(linalg.solve(la.posterior.precision, torch.eye(G_size(net), dtype=torch.float64)), inverse(net, batches))


def G_size(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def inverse(net: nn.Module, batches: list[tuple[Any, ...]]) -> Tensor:
    return torch.linalg.inv(sums(net, batches) + PRIOR * torch.eye(G_size(net), dtype=torch.float64))


class MaybePacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(3, 2, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        return (self.gru(x)[0] if lengths is None else packed(self.gru, x, lengths)).sum(1)


def test_a_packed_batch_that_comes_later_is_named() -> None:
    net = moved(MaybePacked().double())
    with pytest.raises(InvalidValue, match=r"gru.* was called on inputs of another kind than before"):
        fit(net, [(STEPS,), (STEPS, torch.tensor([4, 1, 3, 4, 2]))], "kron")
    other = [(STEPS,), (STEPS[:, :2],), (normal(2, 6, 3),)]
    close(curvature(fit(net, other, "diag")), sums(net, other).diagonal().diag())


def test_a_packed_batch_that_comes_first() -> None:
    """Then no rule speaks, and every batch is right."""
    net = moved(MaybePacked().double())
    batches = [(STEPS, torch.tensor([4, 1, 3, 4, 2])), (STEPS,)]
    la = fit(net, batches, "diag", slow=True)
    close(curvature(la), sums(net, batches).diagonal().diag())
    assert all("cannot take apart" in text for text in la.coverage.values())


class SometimesTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(2, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.gru(x)[0]
        return (self.gru(h)[0] if x.shape[1] > 3 else h).sum(1)


def test_a_layer_that_is_called_again_later_is_named() -> None:
    net = moved(SometimesTwice().double())
    with pytest.raises(InvalidValue, match=r"gru.ih_l0 was called once on the first batch and is now called again"):
        fit(net, [(normal(N, 3, 2),), (normal(N, 4, 2),)], "kron")


# -- weights that are computed -------------------------------------------------------------------------------------


class Standardized(nn.Conv2d):
    """A convolution whose kernels are standardized in every pass."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        w = w / (w.std((1, 2, 3), keepdim=True) + 1e-5)
        return F.conv2d(x, w, self.bias, self.stride, self.padding)


def recurrent_norm() -> nn.Module:
    return parametrizations.weight_norm(nn.LSTM(3, 4, batch_first=True), "weight_hh_l0")


def embedded_attention() -> nn.Module:
    net = nn.MultiheadAttention(E, 2, batch_first=True)
    parametrizations.spectral_norm(net.out_proj, "weight")
    return net


IMAGES = normal(N, 2, 3, 4)
BARE = "ParametrizationList has no rule for it"
NORMED = {f"parametrizations.weight.original{i}": BARE for i in (0, 1)}
COMPUTED = [
    Case("weight norm", lambda: parametrizations.weight_norm(nn.Linear(3, 4)), (normal(N, 3),), generic=NORMED),
    Case(
        "weight norm of a convolution",
        lambda: parametrizations.weight_norm(nn.Conv2d(2, 3, 2, padding=1)),
        (IMAGES,),
        generic=NORMED,
    ),
    Case(
        "weight norm of a transposed convolution",
        lambda: parametrizations.weight_norm(nn.ConvTranspose2d(2, 3, 2, stride=2), dim=1),
        (IMAGES,),
        generic=NORMED,
    ),
    Case(
        "spectral norm",
        lambda: parametrizations.spectral_norm(nn.Linear(3, 4)),
        (normal(N, 3),),
        generic={"parametrizations.weight.original": BARE},
    ),
    Case(
        "orthogonal",
        lambda: parametrizations.orthogonal(nn.Linear(3, 4)),
        (normal(N, 3),),
        generic={"parametrizations.weight.original": BARE},
    ),
    Case(
        "weight norm of an LSTM",
        recurrent_norm,
        (STEPS,),
        outputs,
        {f"parametrizations.weight_hh_l0.original{i}": BARE for i in (0, 1)},
        slow=True,
    ),
    Case(
        "spectral norm in attention",
        embedded_attention,
        (SEQUENCE,),
        self_attention,
        {"out_proj.parametrizations.weight.original": BARE},
    ),
    Case(
        "standardized convolution",
        lambda: Standardized(2, 3, 2),
        (IMAGES,),
        generic=dict.fromkeys(("weight", "bias"), "layer.weight is used more than once"),
    ),
]


@pytest.mark.parametrize("structure", ["block", "diag", "kron"])
@pytest.mark.parametrize("case", COMPUTED, ids=lambda case: case.name)
def test_weights_that_are_computed(case: Case, structure: str) -> None:
    net, J = problem(case)
    G = torch.einsum("ncp,ncq->pq", J, J)
    la = fit(net, case.inputs, structure, case.slow)
    names = [n for n, _ in net.named_parameters()]
    generic = {f"layer.{n}": why for n, why in case.generic.items()}
    if structure == "diag":
        close(curvature(la), G.diagonal().diag())
    elif structure == "block":
        close(curvature(la), within(G, net, groups(names, generic)))
    else:  # what has no rule gets its exact block
        found, exact = curvature(la), within(G, net, [[n] for n in generic])
        index = torch.cat([standing(net)[n].reshape(-1) for n in generic])
        close(found[index][:, index], exact[index][:, index])
    for n, text in la.coverage.items():
        assert (", generic: " in text) == (n in generic)
        assert generic.get(n, "") in text
    with warnings.catch_warnings():
        if case.slow:
            warnings.simplefilter("ignore", LapwingWarning)
        prediction = la.predict(case.inputs)
    close(prediction.covariance, J @ torch.linalg.inv(linalg.to_dense(la.posterior.precision)) @ J.mT)


class Classifier(nn.Module):
    """Two encoder layers, the mean over positions and a head, for adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, E), nn.Tanh(), nn.Linear(E, 5), nn.Tanh())
        self.head = nn.Linear(5, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean(1))


def adapted(**options: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(r=2, target_modules=["0", "2"], lora_dropout=0.3, modules_to_save=["head"], **options)
    net = moved(peft.get_peft_model(Classifier(), config).double())
    assert any(not p.requires_grad for p in net.parameters())
    return net


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"use_dora": True}], ids=["plain", "rs", "DoRA"])
def test_adapters_of_peft_are_fitted_where_they_require_grad(options: dict[str, Any]) -> None:
    net, x = adapted(**options), (STEPS,)
    with evaluating(net):
        own = {n: p for n, p in net.named_parameters() if p.requires_grad}
        f = net(*x)
    J = backward_rows(f, own.values())
    G = torch.einsum("ncp,ncq->pq", J, J)
    la = {s: fit(net, x, s) for s in ("full", "block", "diag", "kron")}
    assert set(la["full"].state.layout.names) == set(own)
    close(linalg.to_dense(la["full"].posterior.precision), G + PRIOR * torch.eye(len(G), dtype=torch.float64))
    close(curvature(la["diag"]), G.diagonal().diag())
    names = list(own)
    generic = dict.fromkeys([n for n in names if "generic" in la["block"].coverage[n]], "")
    close(curvature(la["block"]), within(G, Selected(net, names), groups(names, generic)))
    adapters = [n for n in names if "lora_A" in n or "lora_B" in n]
    rules = {la["kron"].coverage[n] for n in adapters}
    if not options.get("use_dora"):
        assert rules == {"Kronecker (Linear rule)"}
    else:
        assert all(text.startswith("exact block, generic: ") for text in rules)
    assert all(la["kron"].coverage[n] == "frozen" for n, _ in net.named_parameters() if n not in own)
    M = linalg.to_dense(la["kron"].posterior.precision)
    close(la["kron"].predict(x).covariance, J @ torch.linalg.inv(M) @ J.mT)


class Doubling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x @ self.weight.T


def test_a_rule_that_runs_a_module_as_it_does_not_run_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradients are those of its own steps: only the outputs tell."""

    class Wrong(base.ComposedRule):
        def sites(self, module: Any) -> tuple[base.Site, ...]:
            return (base.Site("map", "weight", None, (1, 4, 3)),)

        def forward(self, module: Any, keep: Any, x: Tensor) -> Tensor:  # type: ignore[override]
            z = (x @ module.weight.T).reshape(len(x), 1, 1, 4)
            keep("map", x.reshape(len(x), 1, 1, 3), z)
            return z.reshape(len(x), 4)

    monkeypatch.setitem(base._RULES, Doubling, Wrong())
    case = Case("wrong", Doubling, (normal(N, 3),))
    net, J = problem(case)
    la = fit(net, case.inputs, "diag")
    close(curvature(la), torch.einsum("ncp,ncp->p", J, J).diag())
    assert la.coverage == {"layer.weight": "exact diagonal, generic: its module could not be run in steps"}


# -- options that change how torch goes backwards ------------------------------------------------------------------


def checkpointed(m: Any, x: Tensor) -> Tensor:
    def run(x: Tensor) -> Tensor:
        return m(x)[0] if isinstance(m, nn.GRU) else self_attention(m, x)

    return checkpoint(run, x, use_reentrant=False)


CHECKPOINTED = [
    Case("checkpointed attention", attention(), (SEQUENCE,), checkpointed),
    Case("checkpointed GRU", recurrent(nn.GRU), (STEPS,), checkpointed),
]


@pytest.mark.parametrize("case", CHECKPOINTED, ids=lambda case: case.name)
def test_checkpoints_run_a_module_again(case: Case) -> None:
    net, J = problem(case)
    la = fit(net, case.inputs, "diag", case.slow)
    close(curvature(la), torch.einsum("ncp,ncp->p", J, J).diag())
    assert all("rule" in text for text in la.coverage.values())  # the second run goes by the same steps


@pytest.mark.parametrize("option", ["sparse", "scale_grad_by_freq"])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_options_of_gradients_do_not_change_the_derivative(kind: Any, option: str) -> None:
    """A gradient that is sparse, or divided by how often a token is in the batch, is for training alone."""
    one, two = (Case("", lambda o=o: kind(6, 3, **o), (IDS,)) for o in ({}, {option: True}))
    (net, J), other = problem(one), around(two)
    G = torch.einsum("ncp,ncq->pq", J, J)
    for structure in ("block", "diag", "full"):
        la = fit(other, two.inputs, structure)
        want = G if structure != "diag" else G.diagonal().diag()
        close(linalg.to_dense(la.posterior.precision), want + PRIOR * torch.eye(len(G), dtype=torch.float64))
        close(la.predict(two.inputs).covariance, fit(net, one.inputs, structure).predict(one.inputs).covariance)
    assert getattr(other.layer, option) is True
