"""Laws that are held one after the other, and an error in the end that names each broken one with its figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import TracebackType

import torch
from torch import Tensor, nn
from torch.testing import assert_close

from lapwing.errors import BrokenLaw

Z = 5.0  # standard errors that a mean of draws may be away: a false alarm once in a million


class Laws:
    """`with Laws(name) as law: with law("solve undoes mv"): ...`. All are tried; the first figures of each are kept."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self.broken: dict[str, str] = {}
        self.cause: Exception | None = None

    def __enter__(self) -> Laws:
        return self

    @contextmanager
    def __call__(self, law: str, at: str = "") -> Iterator[None]:
        try:
            yield
        except Exception as error:  # told in __exit__, whatever it is
            kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
            where = f"at {at}: " if at else ""
            self.broken.setdefault(law, f"{where}{kind}{error}".replace("\n", "\n      "))
            self.cause = self.cause or error

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None and self.broken:
            broken = "\n".join(f"  {law}\n      {figures}" for law, figures in self.broken.items())
            raise BrokenLaw(f"{self.subject} breaks {len(self.broken)} law(s):\n{broken}") from self.cause


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-8) -> None:
    """Equal in dtype, shape and numbers, to a relative and absolute tolerance."""
    assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def within(draws: Tensor, expected: Tensor) -> None:
    """The mean of draws (n, ...) is what it should be, within Z standard errors."""
    error = (draws.std(0) / math.sqrt(len(draws))).clamp(min=1e-12)
    away = float(((draws.mean(0) - expected).abs() / error).max())
    assert away < Z, f"a mean over {len(draws)} draws is {away:.3g} standard errors away; at most {Z:g} are allowed"


def same_stream(draw: Callable[[torch.Generator], Tensor]) -> None:
    """Draws come from their generator alone: the same seed gives the same, and the global stream stays where it is."""
    before = torch.random.get_rng_state()
    one, again, other = (draw(seeded(seed)) for seed in (1, 1, 2))
    assert torch.equal(one, again), "the same seed gives other draws"
    assert not torch.equal(one, other), "another seed gives the same draws"
    assert torch.equal(torch.random.get_rng_state(), before), "torch's global random state moved"


def seeded(seed: int) -> torch.Generator:
    """A generator of its own."""
    return torch.Generator().manual_seed(seed)


def normal(seed: int, *shape: int) -> Tensor:
    """Standard normal numbers in float64."""
    return torch.randn(shape, generator=seeded(seed), dtype=torch.float64)


def rows(out: Tensor, model: nn.Module) -> Tensor:
    """∂out/∂θ (*out, p), by reverse mode, one output at a time."""
    parameters, found = list(model.parameters()), []
    for value in out.reshape(-1):
        grads = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
        pairs = zip(grads, parameters, strict=True)
        found.append(torch.cat([(torch.zeros_like(p) if g is None else g).reshape(-1) for g, p in pairs]))
    return torch.stack(found).reshape(*out.shape, -1)


def network(seed: int, *layers: int) -> nn.Module:
    """A perceptron with tanh, its weights away from their initial values; global random state is left as found."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        parts = [m for i, o in pairwise(layers) for m in (nn.Linear(i, o), nn.Tanh())]
        return nn.Sequential(*parts[:-1]).double()
