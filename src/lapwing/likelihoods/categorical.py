"""Classes by softmax: y in {0, …, c−1}, p = softmax(f).

    −∂²_f log p = diag(p) − p pᵀ = R Rᵀ,   R = diag(√p) − p √pᵀ   (rank c − 1: never inverted)

R √p = 0, so a reflection that turns √p into the last axis leaves c − 1 columns: with r = √p,
S_j = R_j − R_c · r_j / (1 + r_c), j < c, and S Sᵀ = R Rᵀ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from lapwing.errors import InvalidValue
from lapwing.likelihoods.base import Likelihood, standard_normal
from lapwing.likelihoods.checks import check_labels
from lapwing.solvers.noise import Placed

NO_LABEL = torch.iinfo(torch.int64).min  # for F.cross_entropy, which would pass over −100 without a word

MANY_LABELS = 20  # for each output, before one that never occurs is odd
FEW_LABELS = 5  # that are named


@dataclass(frozen=True)
class Categorical(Likelihood):
    """Labels y (n,) of c classes, with logits f (n, c)."""

    outcome: ClassVar[str] = "labels"
    event: ClassVar[int] = 0
    response: ClassVar[str] = "softmax"
    classes: ClassVar[bool] = True

    def validate(self, f: Tensor, y: Tensor) -> None:
        classes = f.shape[-1]
        if classes < 2:
            raise InvalidValue(f"categorical needs at least 2 outputs, got {classes}; for one logit use 'bernoulli'")
        check_labels(f, y, classes, self.name)

    def target_hint(self, f: Tensor, y: Tensor) -> str:
        if y.shape == f.shape and bool(((y == 0) | (y == 1)).all()) and bool((y.sum(-1) == 1).all()):
            return ". They are one-hot: give y.argmax(-1), or lw.likelihoods.SoftLabels() for probabilities"
        if y.is_floating_point() and bool(y.isnan().any()):
            return f". {int(y.isnan().sum())} of them are missing (NaN)"
        if y.is_floating_point() and not bool((y == y.round()).all()):
            return ". They look like regression targets: use likelihood='gaussian'"
        if not y.is_floating_point() and y.numel() and int(y.min()) == 1 and int(y.max()) == f.shape[-1]:
            return ". They seem to count from 1: subtract it"
        if not y.is_floating_point() and y.numel() and int(y.min()) < 0:
            return f". To leave out rows of {int(y.min())}, use lw.likelihoods.Ignoring(likelihood, {int(y.min())})"
        return ". Drop the last dimension with y.squeeze(-1)" if y.ndim == f.ndim and y.shape[-1] == 1 else ""

    def target_note(self, y: Tensor, outputs: int) -> str:
        seen = torch.bincount(y[y >= 0].long(), minlength=outputs) > 0
        if len(y) < MANY_LABELS * outputs and int(seen.sum()) > 1:
            return ""
        if int(seen.sum()) == 1 < len(y):
            return f"all {len(y):,} examples have the label {int(seen.int().argmax())}; nothing tells the others apart"
        missing = (~seen).nonzero().flatten().tolist()
        more = f" and {len(missing) - FEW_LABELS:,} more" if len(missing) > FEW_LABELS else ""
        shown = ", ".join(str(k) for k in missing[:FEW_LABELS])
        return f"no example of {len(y):,} has the label {shown}{more}, of {outputs} outputs" if missing else ""

    def constant(self, y: Tensor, outputs: int = 0) -> Tensor | None:
        return (torch.bincount(y.long(), minlength=outputs).double() / len(y)).log()

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        rows, labels = f.reshape(-1, f.shape[-1]), y.long().reshape(-1)
        return -F.cross_entropy(rows, labels, reduction="none", ignore_index=NO_LABEL).reshape(y.shape)

    def sample(self, f: Tensor, generator: torch.Generator) -> Tensor:
        p = torch.softmax(f, -1).reshape(-1, f.shape[-1]).to(generator.device)
        return torch.multinomial(p, 1, generator=generator).reshape(f.shape[:-1]).to(f.device)

    def mean(self, f: Tensor) -> Tensor:
        return torch.softmax(f, -1)

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        return F.one_hot(y.long(), f.shape[-1]).to(f) - torch.softmax(f, -1)

    def columns(self, outputs: int) -> int:
        return outputs - 1

    def hessian_root(self, f: Tensor) -> Tensor:
        p = torch.softmax(f, -1)
        r = p.sqrt()
        R = torch.diag_embed(r) - p.unsqueeze(-1) * r.unsqueeze(-2)
        return R[..., :-1] - R[..., -1:] * (r[..., :-1] / (1 + r[..., -1:])).unsqueeze(-2)

    # without a matrix of outputs by outputs, which a vocabulary could not have

    def curvature_product(self, f: Tensor, y: Tensor, v: Tensor) -> Tensor:
        p = torch.softmax(f, -1)
        pv = p * v.to(p)
        return pv - p * pv.sum(-1, keepdim=True)

    def curvature_trace(self, f: Tensor, y: Tensor) -> Tensor:
        p = torch.softmax(f, -1)
        return (p * (1 - p)).sum(-1)

    def curvature_noise(self, f: Tensor, y: Tensor, k: int, generator: torch.Generator | Placed) -> Tensor:
        p = torch.softmax(f, -1)
        e = p.sqrt() * standard_normal(p.expand(k, *p.shape), generator)  # (diag √p − p √pᵀ) e
        return e - p * e.sum(-1, keepdim=True)
