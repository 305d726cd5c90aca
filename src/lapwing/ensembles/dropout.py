"""MC dropout: a network whose dropout layers stay on at prediction (Gal & Ghahramani, ICML 2016).

    f_s(x) = f(x, θ*, m_s),     m_s ~ Bernoulli(1 − p)/(1 − p) for each unit of each dropout layer      s = 1 … samples

A draw s is one function: its mask is that of all inputs, whatever batch they come in, and follows from the seed. So
equal questions have equal answers, and inputs can be predicted together. All other layers run in eval mode.
Dropout that is no layer (F.dropout, the attention of nn.MultiheadAttention) is off, as it is in eval mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn

from lapwing import given
from lapwing.arguments import as_likelihood
from lapwing.errors import InvalidValue, Unsupported
from lapwing.outputs import Draws
from lapwing.posterior import register
from lapwing.posterior.base import check_inputs
from lapwing.posterior.gaussian import wide
from lapwing.shell import Fitted
from lapwing.splitmix import GOLDEN, mixed
from lapwing.tangent import TangentModel, linearize
from lapwing.tangent.evaluating import evaluating
from lapwing.tangent.kernels import plain_kernels

LAYERS = nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d


def dropout(
    model: nn.Module,
    likelihood: Any,
    samples: int = 64,
    *,
    forward: Any = None,
    generator: torch.Generator | None = None,
) -> Fitted:
    """A network that was trained with dropout layers, and keeps them on: so many masks, which the generator gives.

    It has no prior, knows of no data, and draws masks, not weights."""
    tangent, g = linearize(model, forward=forward), given.generator(generator)
    seed = int(torch.randint(2**62, (), generator=g, device=g.device))
    posterior = Dropout(tangent, seed, given.whole(samples, "samples", 1))
    return Fitted(posterior, as_likelihood(likelihood).to(tangent.device), None, 0, None, "dropout")


@register
@dataclass(frozen=True, eq=False)
class Dropout:
    """The network under `samples` masks that follow from a `seed`."""

    unsaved: ClassVar[tuple[str, ...]] = ("tangent",)  # by a network; not in files
    tangent: TangentModel
    seed: int
    samples: int

    def __post_init__(self) -> None:
        kinds = {type(m).__name__ for m in self.tangent.model.modules() if isinstance(m, nn.modules.dropout._DropoutNd)}
        other = kinds - {layer.__name__ for layer in LAYERS}
        if other:
            raise Unsupported(
                f"MC dropout knows {', '.join(t.__name__ for t in LAYERS)}; the network has {sorted(other)}"
            )
        if not any(m.p > 0 for m in self._layers):
            raise InvalidValue("the network has no dropout layer with p > 0, so all masks would be the same")

    @property
    def _layers(self) -> list[Any]:
        return [m for m in self.tangent.model.modules() if isinstance(m, LAYERS)]

    @torch.inference_mode(False)
    @torch.no_grad()
    def outputs(self, x: Any, joint: bool = False) -> Draws:
        """The network's outputs under each mask."""
        check_inputs(x)
        with evaluating(self.tangent.model), plain_kernels():
            return Draws(torch.stack([wide(self._masked(x, s)) for s in range(self.samples)]), joint=joint)

    def draw(self, n: int, generator: torch.Generator | None = None) -> NoReturn:
        """Refused: a draw is a mask."""
        raise Unsupported("MC dropout draws masks of units, not weight vectors; predict gives their outputs")

    def _masked(self, x: Any, s: int) -> Tensor:
        with _dropping(self._layers, _mixed(self.seed, s)):
            return self.tangent.apply(self.tangent.params, x)

    def __str__(self) -> str:
        return f"{self.samples} masks"


@contextmanager
def _dropping(layers: list[Any], seed: int) -> Iterator[None]:
    """Layers that multiply by masks of a seed: the t-th call of any has the t-th mask."""
    calls = 0

    def hook(layer: Any, _: Any, out: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return out * _mask(layer, out, _mixed(seed, calls))

    handles = [layer.register_forward_hook(hook) for layer in layers if layer.p > 0]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _mask(layer: Any, out: Tensor, seed: int) -> Tensor:
    """0 with probability p, else 1/(1 − p): of each unit (1, ...), or of each channel (1, c, 1, ...)."""
    rest = out.shape[1:] if isinstance(layer, nn.Dropout) else (out.shape[1], *(1 for _ in out.shape[2:]))
    noise = torch.rand((1, *rest), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    kept = (noise >= layer.p).to(torch.float64)
    return (kept / (1 - layer.p) if layer.p < 1 else kept).to(out)


def _mixed(seed: int, n: int) -> int:
    """The n-th number of a seed, for a generator."""
    return int(mixed(torch.tensor(seed) + torch.tensor(n) * GOLDEN)) % 2**63
