"""A likelihood of one's own, from its log-density alone: score and curvature are derivatives of it.

    score = ∂_f log p(y | f),      −∂²_f log p(y | f) = Q diag(l) Qᵀ = S Sᵀ,   S = Q √l      where log p is concave

The Hessian is taken at the data's y, row by row, and a negative eigenvalue beyond rounding is an error that names the
row. A log-density that is not concave says so with `concave = False`, and gets Monte-Carlo Fisher factors: scores at
targets that its `sample` draws.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import grad, jacrev, vmap

from lapwing.errors import InvalidValue, Unsupported
from lapwing.likelihoods.base import Likelihood

ROUNDING = 1e3  # in units of the last place of a row's largest eigenvalue


@dataclass(frozen=True)
class Custom(Likelihood):
    """Subclass it with `log_prob(f, y)`, (n, c) and targets -> (n,), in operations that torch.func can differentiate.

    Fields are settings. `sample` is for factor="monte_carlo" and for draws of y; `mean` and `variance` for predictions;
    `validate` for targets that are refused with words of your own; `event = 0` where a target is a label."""

    settings: ClassVar[tuple[str, ...]] = ()

    @property
    def hyperparameters(self) -> dict[str, Tensor]:
        return {}

    @property
    def kind(self) -> str:
        settings = ", ".join(f"{f.name}={getattr(self, f.name).tolist()}" for f in fields(self))
        return f"{self.name}({settings})" if settings else self.name

    @property
    def factors(self) -> tuple[str, ...]:
        samples = type(self).sample is not Likelihood.sample
        return ("exact",) * self.concave + ("monte_carlo",) * samples

    def validate(self, f: Tensor, y: Tensor) -> None:
        found = self.log_prob(f, y)
        if found.shape != f.shape[:-1]:
            raise InvalidValue(
                f"{self.name}.log_prob must give one number for each row of outputs, {tuple(f.shape[:-1])}; got "
                f"{tuple(found.shape)}"
            )
        bad = (~torch.isfinite(found)).reshape(-1).nonzero().flatten()
        if len(bad):
            row = int(bad[0])
            raise InvalidValue(f"{self.name}.log_prob is {float(found.reshape(-1)[row])} at {_point(f, y, row)}")

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        return vmap(grad(self._one))(f, y)

    def curvature_root(self, f: Tensor, y: Tensor) -> Tensor:
        if not self.concave:
            raise Unsupported(f"{self.name} is not concave, so its Hessian is no factor; use factor='monte_carlo'")
        values, vectors = torch.linalg.eigh(-vmap(jacrev(grad(self._one)))(f, y))
        slack = ROUNDING * torch.finfo(values.dtype).eps * values.abs().amax(-1, keepdim=True)
        bad = (values < -slack).any(-1).nonzero().flatten()
        if len(bad):
            row = int(bad[0])
            raise InvalidValue(
                f"{self.name} is not concave in f: −∂² log p has the eigenvalue {float(values[row, 0]):.3g} at "
                f"{_point(f, y, row)}; set concave = False and give it a sample method, for factor='monte_carlo'"
            )
        return vectors * values.clamp(min=0).sqrt().unsqueeze(-2)

    def _one(self, f: Tensor, y: Tensor) -> Tensor:
        return self.log_prob(f.unsqueeze(0), y.unsqueeze(0))[0]


def _point(f: Tensor, y: Tensor, row: int) -> str:
    """Row `row` of a batch, in words."""
    outputs, targets = f.reshape(-1, f.shape[-1])[row], y.reshape(f.shape[:-1].numel(), -1)[row]
    return f"row {row} of a batch, f = {_short(outputs)}, y = {_short(targets)}"


def _short(values: Tensor) -> str:
    return "[" + ", ".join(f"{v:.4g}" for v in values[:4].tolist()) + (", ...]" if len(values) > 4 else "]")
