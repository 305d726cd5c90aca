"""One Gaussian process for each output of a trained network: one kernel K_c (n, n), not one of all pairs of outputs.

    h_c(x) = f_c(x, θ*) + J_c(x)(v_c − θ*),   v_c ~ N(m, A⁻¹/s) for each output c,   K_c = J_c A⁻¹ J_cᵀ / s
    f_c(x) ~ N(f_c(x, θ*), k_c(x, x) − k_c(x, X) S B⁻¹ S k_c(X, x)),   S² = Λ_cc,   B = I + S K_c S

Outputs are independent before data. Couplings of the curvature between outputs, which softmax has, are dropped; those
of Gaussian noise, of "dirichlet" labels and of "bernoulli" are none. The evidence integrates the quadratic expansion of
log p(y | h) about f(θ*), with score g and o = J(θ* − m), over the process:

    b = g + Λ o,   log Z = Σ [log p(y | f) − gᵀo − ½ oᵀΛo] + ½ Σ_c bᵀ(K_c − K_c S B⁻¹ S K_c) b − ½ Σ_c log|B|

which is exact for a quadratic likelihood, and for one output the tangent model's. Shapes: n data, c outputs, m inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lapwing import data as loading
from lapwing import io, tree, tune
from lapwing.api.verbs import LOADERS, linearized
from lapwing.arguments import as_likelihood, as_prior, as_ranks, as_shard, as_tangent, facts
from lapwing.curvature import BUDGET
from lapwing.distributed import Ranks
from lapwing.errors import BrokenFile, InvalidValue, Unsupported
from lapwing.gp.choice import roots
from lapwing.gp.climb import Slopes, climbed
from lapwing.gp.empirical import own_products, products
from lapwing.gp.features import scale_of
from lapwing.gp.fit import SAME, feature_prior, gathered
from lapwing.gp.gradients import Side
from lapwing.gp.inducing import positive
from lapwing.likelihoods import Likelihood
from lapwing.operators import linalg
from lapwing.outputs import Normal
from lapwing.posterior.base import check_inputs, register
from lapwing.priors import Gaussian
from lapwing.shell import Shell
from lapwing.tangent import TangentModel
from lapwing.tune.bounds import Box

RANGE = 1e6  # either way, that the scale of the prior may move from where it starts


@register
@dataclass(frozen=True, eq=False)
class OutputProcesses:
    """The processes, given data. A file of it holds the inputs of the data."""

    unsaved: ClassVar[tuple[str, ...]] = ("tangent",)
    tangent: TangentModel
    x: Tensor  # inputs (n, ...)
    y: Tensor  # targets
    f: Tensor  # outputs (n, c), float64
    shift: Tensor  # o (n, c)
    gram: Tensor  # K_c at s = 1, (c, n, n)
    precision: Tensor  # diag A at s = 1, (p,)
    root: Tensor  # S, (c, n): of the likelihood's curvature
    scale: Tensor  # s, 0-dim

    @torch.inference_mode(False)
    @torch.no_grad()
    def outputs(self, x: Any, joint: bool = False) -> Normal:
        """N(f(x), ·), without covariances between outputs."""
        check_inputs(x)
        here = Side(self.tangent, x, BUDGET, self.precision)
        cross = products(replace(here, x=self.x), here, per_output=True) / self.scale  # (c, n, m)
        if joint:
            prior = products(here, None, per_output=True) / self.scale
        else:
            prior = own_products(here).diagonal(dim1=1, dim2=2).mT / self.scale  # (c, m)
        seen = torch.linalg.solve_triangular(self.factors(), self.root.unsqueeze(-1) * cross, upper=False)
        m, c = here.f.shape
        if not joint:
            variance = (prior - seen.square().sum(1)).clamp(min=0)  # rounding, where data are dense
            return Normal(here.f, torch.diag_embed(variance.mT).to(here.f))
        cov = prior.new_zeros(m, c, m, c)
        cov.diagonal(dim1=1, dim2=3).copy_(positive(prior - seen.mT @ seen).permute(1, 2, 0))
        return Normal(here.f, cov.to(here.f), True)

    def factors(self) -> Tensor:
        """Cholesky factors of B, (c, n, n)."""
        return torch.stack([linalg.cholesky(b)[0] for b in inner(self.gram / self.scale, self.root)])

    def draw(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Processes draw functions, not weights: an error that says how."""
        raise Unsupported(
            "processes of independent outputs have draws of functions, and none of weights; use "
            "predict(x, joint=True).f_sample(n)"
        )

    def __str__(self) -> str:
        return f"{len(self.gram)} processes of {len(self.x)} inputs"


@dataclass(frozen=True, eq=False, repr=False)
class Independent(Shell):
    """A network with a Gaussian process for each output. Frozen. Its file holds the data's inputs and targets."""

    posterior: OutputProcesses
    prior: Gaussian
    likelihood: Likelihood
    targets: int | None = None
    tuning: tune.Tuning | None = None
    made: ClassVar[str] = "functional"

    @property
    def n(self) -> int:  # type: ignore[override]
        """Examples that were fitted."""
        return len(self.posterior.x)

    def log_evidence(self) -> Tensor:
        """log p(D), 0-dim float64, at the mode that the quadratic expansion about the network's outputs has."""
        with torch.no_grad():
            return evidence(self.posterior, self.likelihood, self.posterior.scale)

    @torch.inference_mode(False)
    def tuned(self, fixed: str | tuple[str, ...] = ()) -> Independent:
        """A new object with the scale of the prior and the noise that the evidence picks; reads no data. fixed: which
        of "precision" and the likelihood's hyperparameters to hold."""
        held = (fixed,) if isinstance(fixed, str) else tuple(fixed)
        values, tuning = climbed(self._box(held), self._slopes, self.posterior.f.numel(), held, "tangent")
        scale = values.pop("precision", self.posterior.scale)
        return replace(_at(self, scale, self.likelihood.replace(**values)), tuning=tuning)

    def _slopes(self, values: dict[str, Tensor]) -> Slopes:
        logs = {k: v.log().requires_grad_() for k, v in values.items()}
        noise = self.likelihood.moved({k: v for k, v in logs.items() if k != "precision"})
        scale = logs["precision"].exp() if "precision" in logs else self.posterior.scale
        value = evidence(self.posterior, noise, scale)
        slopes = torch.autograd.grad(value, list(logs.values()))
        return value.detach(), dict(zip(logs, slopes, strict=True))

    def _box(self, fixed: tuple[str, ...]) -> Box:
        known = ["precision", *self.likelihood.hyperparameters]
        if unknown := [name for name in fixed if name not in known]:
            raise InvalidValue(f"fixed={unknown} names no hyperparameter; they are {known}")
        now = self.posterior.scale.log()
        span = torch.tensor(RANGE, dtype=torch.float64).log()
        limits = {"precision": (now - span, now + span, now)} if "precision" not in fixed else {}
        if any(name not in fixed for name in self.likelihood.hyperparameters):
            sums = self.likelihood.statistics(self.posterior.f, self.posterior.y)
            limits |= {k: v for k, v in self.likelihood.limits(sums).items() if k not in fixed}
        if not limits:
            raise InvalidValue(f"all hyperparameters {known} are fixed; there is nothing to tune")
        low, high, start = ({k: v[i] for k, v in limits.items()} for i in range(3))
        return Box(low, high, start, {})

    def packed(self, path: Any) -> io.Content:
        """What goes into a file: tensors and a header."""
        tensors, header = io.pack_fitted(self, path)
        return tensors, header | {"kind": "independent"}

    def __repr__(self) -> str:
        tuned = "" if self.tuning is None else f"; tuned by {self.tuning.method}"
        return f"Independent({self.likelihood.kind}; {self.posterior}; {self.tangent.layout.size:,} parameters{tuned})"


@torch.no_grad()
def independent(model: nn.Module, data: Any, likelihood: Any, prior: Any, process_group: Any = None) -> Independent:
    """A process for each output, fitted to data; over ranks, each makes a part of the rows of its kernels."""
    ranks = as_ranks(process_group)
    with ranks.sharing_errors("reading the arguments"):
        likelihood = as_likelihood(likelihood)
        if likelihood.paired:
            raise Unsupported(
                "noise that is correlated between outputs has no independent processes; drop independent=True"
            )
    batches = as_shard(data, ranks)
    ranks, tangent = loading.ranks_of(batches), as_tangent(model, batches, "all", None)
    with ranks.sharing_errors("reading the prior"):
        bound = feature_prior(as_prior(prior, tangent.layout, tangent.device))
    about = facts(tangent, likelihood, bound, "functional, independent outputs", "exact", BUDGET, None)
    ranks.agree(about, SAME)
    likelihood = likelihood.to(tangent.device)
    x, y = gathered(batches, tangent, "independent=True keeps inputs that are tensors; use inducing= for others")
    precision = bound.operator().dense().detach().clone()
    side = Side(tangent, x, BUDGET, precision)
    likelihood.validate(side.f, y)
    away = tangent.theta.to(torch.float64) - bound.mean_vector()
    pieces = side.pieces(slice(0, len(x)))
    shift = torch.cat([tangent.jvps(piece, away.to(tangent.dtype)[None])[1][0] for _, piece in pieces])
    one, f = torch.ones((), dtype=torch.float64, device=tangent.device), side.f.double()
    root = roots(likelihood, f, y)
    made = OutputProcesses(tangent, x, y, f, shift.double(), _gram(side, ranks), precision, root, one)
    return Independent(made, bound, likelihood, tree.digest(y) % 2**64)


def _gram(side: Side, ranks: Ranks) -> Tensor:
    """K_c, (c, n, n), of which each rank makes some rows."""
    if ranks.alone:
        return products(side, None, per_output=True)
    with ranks.sharing_errors("the kernel"):
        mine = side.f.new_zeros(0, side.outputs, len(side.f), dtype=torch.float64)
        share = ranks.share(len(side.f))
        if share.stop > share.start:
            mine = products(replace(side, x=side.x[share]), side, per_output=True).transpose(0, 1).contiguous()
    found = ranks.whole(mine, "rows of kernels").transpose(0, 1)
    return 0.5 * (found + found.mT)


def evidence(given: OutputProcesses, likelihood: Likelihood, scale: Tensor) -> Tensor:
    """log Z under a noise and a scale of the prior; differentiable in both."""
    f, y, o = given.f, given.y, given.shift
    S, g = roots(likelihood, f, y), likelihood.gradient(f, y)
    fit = likelihood.log_prob(f, y).sum() - (g * o).sum() - 0.5 * (S.mT * o).square().sum()
    b = (g + S.mT.square() * o).mT.unsqueeze(-1)  # (c, n, 1)
    K = given.gram / scale
    B = torch.linalg.cholesky(inner(K, S))
    Kb = K @ b
    half = torch.linalg.solve_triangular(B, S.unsqueeze(-1) * Kb, upper=False)
    gained = (b * Kb).sum() - half.square().sum()
    return fit + 0.5 * gained - B.diagonal(dim1=1, dim2=2).log().sum()


def inner(K: Tensor, S: Tensor) -> Tensor:
    """B = I + S K S, (c, n, n)."""
    return torch.eye(K.shape[-1], dtype=K.dtype, device=K.device) + S.unsqueeze(-1) * K * S.unsqueeze(-2)


def _at(fit: Independent, scale: Tensor, likelihood: Likelihood) -> Independent:
    """The same data under another scale of the prior and another noise."""
    here = fit.posterior
    with torch.no_grad():
        root = roots(likelihood, here.f, here.y)
    prior = fit.prior.scaled(float(scale / here.scale))
    return replace(fit, posterior=replace(here, scale=scale, root=root), prior=prior, likelihood=likelihood)


def _loaded(tensors: dict[str, Tensor], header: dict[str, Any], model: nn.Module, forward: Any, path: Any) -> Any:
    saved = io.checked_fit(tensors, header, path)
    tangent = linearized(saved, model, forward, path)
    if saved.prior is None:
        raise BrokenFile("it has no prior, which a process needs")
    prior = feature_prior(saved.prior.bind(tangent.layout, tangent.device))
    found = Independent(saved.attached(tangent), prior, saved.likelihood.to(tangent.device), saved.targets)
    scale_of(prior, found.posterior.precision)  # raises where they do not belong together
    return found


LOADERS["independent"] = _loaded
