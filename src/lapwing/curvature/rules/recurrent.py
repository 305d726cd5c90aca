"""RNN, GRU and LSTM: linear maps of the input and of the last hidden state, shared over time.

    z_t = W_ih x_t + b_ih,   z'_t = W_hh h_{t−1} + b_hh,   h_t = cell(z_t, z'_t)   (with projections: h_t ← W_hr h_t)

torch's kernels hide the steps, so they are written out. The gradients of all z'_t are those of zeros that are added to
them. Packed sequences have no rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lapwing.curvature.rules.base import ComposedRule, Keep, Site, register

GATES = {"RNN_TANH": 1, "RNN_RELU": 1, "GRU": 3, "LSTM": 4}
Cell = Callable[[Tensor, Tensor, tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]  # z, z', (h, c) -> (h, c)


@register(nn.RNN, nn.GRU, nn.LSTM)
class RecurrentRule(ComposedRule):
    def sites(self, module: nn.RNNBase) -> tuple[Site, ...]:
        out = []
        for layer, suffix in _directions(module):
            rows, hidden = GATES[module.mode] * module.hidden_size, module.proj_size or module.hidden_size
            width = module.input_size if layer == 0 else hidden * (1 + module.bidirectional)
            out.append(Site(f"ih{suffix}", f"weight_ih{suffix}", f"bias_ih{suffix}", (1, rows, width)))
            out.append(Site(f"hh{suffix}", f"weight_hh{suffix}", f"bias_hh{suffix}", (1, rows, hidden)))
            if module.proj_size:
                shape = 1, module.proj_size, module.hidden_size
                out.append(Site(f"hr{suffix}", f"weight_hr{suffix}", None, shape))
        return tuple(out)

    def forward(self, module: nn.RNNBase, keep: Keep, input: Any, hx: Any = None) -> Any:
        if not isinstance(input, Tensor) or input.ndim != 3 or input.is_nested:
            return type(module).forward(module, input, hx)
        x = input if module.batch_first else input.transpose(0, 1)  # (n, t, i)
        start = _start(module, x, hx)
        ends: list[tuple[Tensor, Tensor]] = []
        outs: list[Tensor] = []
        for _, suffix in _directions(module):
            backward = suffix.endswith("_reverse")
            steps, end = _run(module, keep, suffix, x.flip(1) if backward else x, start[len(ends)])
            ends.append(end)
            outs.append(steps.flip(1) if backward else steps)
            if len(outs) == 1 + module.bidirectional:
                x, outs = torch.cat(outs, -1), []
        out = x if module.batch_first else x.transpose(0, 1)
        hidden, cell = (torch.stack(states) for states in zip(*ends, strict=True))
        return out, (hidden, cell) if module.mode == "LSTM" else hidden


def _directions(module: nn.RNNBase) -> list[tuple[int, str]]:
    """Each layer and direction, in the order of torch's states, with the end of its parameters' names."""
    ends = ("", "_reverse") if module.bidirectional else ("",)
    return [(layer, f"_l{layer}{end}") for layer in range(module.num_layers) for end in ends]


def _start(module: nn.RNNBase, x: Tensor, hx: Any) -> list[tuple[Tensor, Tensor]]:
    count, n = len(_directions(module)), len(x)
    if hx is None:
        hidden = x.new_zeros(count, n, module.proj_size or module.hidden_size)
        return [(h, x.new_zeros(n, module.hidden_size)) for h in hidden]
    if module.mode == "LSTM":
        return list(zip(hx[0], hx[1], strict=True))
    return [(h, h) for h in hx]


def _run(
    module: nn.RNNBase, keep: Keep, suffix: str, x: Tensor, start: tuple[Tensor, Tensor]
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """One layer in one direction: its outputs (n, t, h) and its last states."""

    def own(name: str) -> Any:
        """A parameter, as one alias for all steps: it enters the graph once."""
        found = getattr(module, f"{name}{suffix}", None)
        return None if found is None else found.view_as(found)

    w_ih, w_hh, w_hr, b_ih, b_hh = map(own, ("weight_ih", "weight_hh", "weight_hr", "bias_ih", "bias_hh"))
    z = F.linear(x, w_ih, b_ih).unsqueeze(2)
    keep(f"ih{suffix}", x.unsqueeze(2), z)
    cell = CELLS[module.mode]
    n, t, _, rows = z.shape
    added = [x.new_zeros(n, t, 1, rows).requires_grad_()]
    if w_hr is not None:
        added.append(x.new_zeros(n, t, 1, w_hr.shape[0]).requires_grad_())
    nudges = [zeros.squeeze(2).unbind(1) for zeros in added]
    h, c = start
    before, whole, out = [], [], []
    for step, z_t in enumerate(z.squeeze(2).unbind(1)):
        before.append(h)
        h, c = cell(z_t, F.linear(h, w_hh, b_hh) + nudges[0][step], (h, c))
        if w_hr is not None:
            whole.append(h)
            h = F.linear(h, w_hr) + nudges[1][step]
        out.append(h)
    keep(f"hh{suffix}", torch.stack(before, 1).unsqueeze(2), added[0])
    if w_hr is not None:
        keep(f"hr{suffix}", torch.stack(whole, 1).unsqueeze(2), added[1])
    return torch.stack(out, 1), (h, c)


def _plain(activation: Callable[[Tensor], Tensor]) -> Cell:
    def cell(z: Tensor, r: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        h = activation(z + r)
        return h, h

    return cell


def _gru(z: Tensor, r: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    (zr, zz, zn), (hr, hz, hn) = z.chunk(3, -1), r.chunk(3, -1)
    reset, update = torch.sigmoid(zr + hr), torch.sigmoid(zz + hz)
    new = torch.tanh(zn + reset * hn)
    h = (1 - update) * new + update * state[0]
    return h, h


def _lstm(z: Tensor, r: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    i, f, g, o = (z + r).chunk(4, -1)
    c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


CELLS = {"RNN_TANH": _plain(torch.tanh), "RNN_RELU": _plain(torch.relu), "GRU": _gru, "LSTM": _lstm}
