"""A network for few data: wide, at random weights, with a scale for each input that the evidence picks.

    f(x) = Σ_k v_k tanh(w_k·u + b_k) + c,   u = s ∘ (2x − 1)      w, b/5 ~ N(0, I), v = ±W^-½
    h(x) = J(u) θ,   θ ~ N(0, D²/λ)                               D = 1 of w, 5 of b, W^-½ of v; variance 10² of c
    λ = (1/n) Σ_n J_n D² J_nᵀ without c                           targets vary as much before data as they do
    log p(y, s, σ) = log N(y; 0, J (D²/λ) Jᵀ + σ² I) + log p(s) + log p(σ)

It is not trained by gradients. A network that is has features that saw the targets, and its evidence does not know
that: with a few dozen data its error bars can be far too narrow. At random weights the tangent model is an
honest process, and its mode is one solve. What few data can tell is how quickly f
moves along each input: s lets them, and inputs that do nothing end at small s. The priors p(s) and p(σ) are broad
log-normals, for when there are next to no data. Shapes: n data, d inputs, W units.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from lapwing.api import Laplace, laplace
from lapwing.curvature import BUDGET
from lapwing.gp.climb import climbed
from lapwing.likelihoods import Gaussian
from lapwing.priors import Gaussian as Normal
from lapwing.tangent import linearize
from lapwing.tangent.graph import with_graph
from lapwing.tune.bounds import Box

WIDTH = 1_024  # of the layer: with fewer units, predictions show which of them were drawn
BIAS = 5.0  # the standard deviation of b: so many units bend beyond the cube that its corners are like its middle
CONSTANT = 10.0  # that of c, in standard deviations of the targets: next to nothing is known of their level
SCALE, NOISE = 2.0, math.exp(-5)  # medians of p(s) √d and p(σ), whose logarithms have a standard deviation of 1
LEAST, MOST = 1e-3, 1e3  # that each hyperparameter may be
TINY = 1e-9  # of a Sobol point: no unit is infinite


class Scaled(nn.Module):
    """Points of the unit cube as s ∘ (2x − 1)."""

    scale: Tensor

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        """(n, d)."""
        return self.scale * (2 * x - 1)


@torch.inference_mode(False)
@torch.enable_grad()
def surrogate(X: Tensor, y: Tensor, generator: torch.Generator) -> Laplace:
    """A fit of points X (n, d) of the unit cube and standardized targets y (n, 1), at the mode of its process."""
    X, y = X.detach().double(), y.detach().double()
    net = network(X.shape[-1], generator).to(X.device)
    evidence = ProcessEvidence(net, X, y)
    found, tuning = climbed(box(X.shape[-1], X.device), evidence, len(y), (), "process")
    prior = normal(float(evidence.kernel(found["scale"])[1]))
    whole = nn.Sequential(Scaled(found["scale"]), *net)
    la = laplace(whole, (X, y), Gaussian(found["noise"]), prior=prior, structure="full")
    return replace(la.recentered(center="process"), tuning=tuning)


def network(d: int, generator: torch.Generator) -> nn.Sequential:
    """The network without its scales, at random weights: w and b by Sobol points, v by signs, which are nearer to
    their law than as many draws."""
    layer = functools.partial(nn.utils.skip_init, nn.Linear, dtype=torch.float64)  # leaves the user's random state
    net = nn.Sequential(layer(d, WIDTH), nn.Tanh(), layer(WIDTH, 1))
    seed = int(torch.randint(2**31, (), generator=generator))
    sobol = torch.quasirandom.SobolEngine(d + 1, scramble=True, seed=seed).draw(WIDTH, dtype=torch.float64)
    units = torch.special.ndtri(sobol.clamp(TINY, 1 - TINY))
    signs = 2.0 * torch.randint(2, (1, WIDTH), generator=generator) - 1
    drawn = units[:, :d], units[:, d], signs, torch.zeros(1)
    with torch.no_grad():
        for weights, values, spread in zip(net.parameters(), drawn, (*spreads(), 0.0), strict=True):
            weights.copy_(spread * values)
    return net


def spreads() -> tuple[float, float, float]:
    """D, the sizes that w, b and v have as drawn."""
    return 1.0, BIAS, WIDTH**-0.5


def normal(precision: float) -> Normal:
    """N(0, D²/λ), of the network behind its scales."""
    each = (precision / spread**2 for spread in spreads())
    return Normal(dict(zip(("1.weight", "1.bias", "3.weight", "3.bias"), (*each, CONSTANT**-2), strict=True)))


def box(d: int, device: torch.device) -> Box:
    """Where the hyperparameters may go; they start at the medians of their priors."""
    start = {"scale": torch.full((d,), SCALE * d**-0.5), "noise": torch.tensor(NOISE)}
    logs = {name: value.to(device, torch.float64).log() for name, value in start.items()}
    low, high = ({name: torch.full_like(v, math.log(end)) for name, v in logs.items()} for end in (LEAST, MOST))
    return Box(low, high, logs, {"scale": tuple(map(str, range(d)))}, floors=("scale", "noise"))


class ProcessEvidence:
    """log p(y, s, σ), but for a constant, and its derivatives in log s and log σ."""

    def __init__(self, net: nn.Module, X: Tensor, y: Tensor) -> None:
        self.tangent, self.x, self.y = linearize(net), 2 * X - 1, y
        sizes = [p.numel() for p in net.parameters()][:-1]  # the last weight is c
        self.spread = torch.cat([y.new_full((n,), spread) for n, spread in zip(sizes, spreads(), strict=True)])

    def __call__(self, values: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """At some values of the hyperparameters."""
        logs = {name: value.log().requires_grad_() for name, value in values.items()}
        found = self.log_evidence(**{name: value.exp() for name, value in logs.items()}) + log_prior(logs)
        return found.detach(), dict(zip(logs, torch.autograd.grad(found, [*logs.values()]), strict=True))

    def log_evidence(self, scale: Tensor, noise: Tensor) -> Tensor:
        """log p(y | s, σ)."""
        K = self.kernel(scale)[0] + CONSTANT**2
        L = torch.linalg.cholesky(K + noise.square() * torch.eye(len(K), dtype=K.dtype, device=K.device))
        white = torch.linalg.solve_triangular(L, self.y, upper=False)
        return -0.5 * white.square().sum() - L.diagonal().log().sum() - 0.5 * len(K) * math.log(2 * math.pi)

    def kernel(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        """J (D²/λ) Jᵀ of the data (n, n), without c, and λ."""
        J = with_graph(self.tangent, scale * self.x, BUDGET)[1][:, 0, :-1] * self.spread
        precision = J.square().sum() / len(J)
        return J @ J.mT / precision, precision


def log_prior(logs: dict[str, Tensor]) -> Tensor:
    """log p(s) + log p(σ), but for a constant."""
    away = logs["scale"] - math.log(SCALE * len(logs["scale"]) ** -0.5), logs["noise"] - math.log(NOISE)
    return -0.5 * (away[0].square().sum() + away[1].square())
