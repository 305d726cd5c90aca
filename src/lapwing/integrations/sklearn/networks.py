"""The networks that an estimator trains, by what its `network=` says."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lapwing.errors import InvalidValue
from lapwing.given import whole

WIDTHS: tuple[tuple[int, ...], ...] = ((), (50,), (50, 50))  # of network="auto"; () is a linear model


def networks_of(network: Any, inputs: int, outputs: int, seed: int) -> dict[str, nn.Module]:
    """{name: module} of modules (n, inputs) -> (n, outputs), none of which is the user's own. Random starts follow the
    seed; torch's global stream is given back."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if isinstance(network, str) and network == "auto":
            return {named(widths): perceptron(inputs, widths, outputs) for widths in WIDTHS}
        if isinstance(network, Sequence) and not isinstance(network, str):
            widths = [whole(width, "the width of a layer", 1) for width in network]
            return {named(widths): perceptron(inputs, widths, outputs)}
        if not isinstance(network, nn.Module) and not callable(network):
            raise InvalidValue(
                "network must be 'auto', widths of layers such as (50, 50), a torch module or a function (n_features, "
                f"n_outputs) -> module, got {network!r}"
            )
        made = copy.deepcopy(network) if isinstance(network, nn.Module) else network(inputs, outputs)
    return {type(made).__name__: checked(made, inputs, outputs)}


def perceptron(inputs: int, widths: Sequence[int], outputs: int) -> nn.Sequential:
    """Hidden layers of these widths, each with tanh behind it, in float64."""
    sizes = [inputs, *widths]
    layers = [layer for pair in itertools.pairwise(sizes) for layer in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], outputs)).double()


def named(widths: Sequence[int]) -> str:
    """ "linear", "50" or "50-50"."""
    return "-".join(map(str, widths)) or "linear"


def checked(net: Any, inputs: int, outputs: int) -> nn.Module:
    """The network, if it takes the inputs and has the outputs."""
    if not isinstance(net, nn.Module):
        raise InvalidValue(f"network(n_features, n_outputs) must give a torch.nn.Module, got {type(net).__name__}")
    first = next(net.parameters(), None)
    if first is None:
        raise InvalidValue(f"{type(net).__name__} has no parameters to train")
    net.eval()
    with torch.no_grad():
        shape = tuple(net(torch.zeros(2, inputs).to(first)).shape)
    if shape != (2, outputs):
        raise InvalidValue(f"the network must give (n, {outputs}) for inputs (n, {inputs}); it gave {shape} for n = 2")
    return net
