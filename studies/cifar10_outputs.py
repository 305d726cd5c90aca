"""Outputs of a network under a Gaussian posterior over all its weights, f ~ N(f(x), V): V = J (G + δI)⁻¹ Jᵀ for
several δ at once, J times given directions, and E softmax(f).

Shapes: n images, c classes, p weights, d precisions, k directions, t images that are predicted together.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

import lapwing as lw
from lapwing.curvature.capture import Capture
from lapwing.operators import linalg
from lapwing.outputs.points import DRAWS, psd_root, quasi_normal
from lapwing.posterior import curvature
from lapwing.predictive.link import closed_form

LIKELIHOOD = lw.likelihoods.Categorical()


def probabilities(f: Tensor, cov: Tensor, link: str) -> Tensor:
    """E softmax(f): by 512 quasi-random draws with the full covariance for link="monte_carlo"."""
    if link != "monte_carlo":
        return closed_form(LIKELIHOOD, link, f, cov)
    noise, out = quasi_normal(DRAWS, f.shape[-1]).float(), []
    for mu, v in zip(f.split(500), cov.split(500), strict=True):
        out.append((mu.unsqueeze(-2) + noise @ psd_root(v.double()).float().mT).softmax(-1).mean(-2))
    return torch.cat(out)


def covariances(
    state: Any, x: Tensor, precisions: list[float], names: str = "", together: int = 1, size: int = 16
) -> tuple[Tensor, Tensor]:
    """f and J (G + δI)⁻¹ Jᵀ for several δ, with J Jᵀ last, by one set of backward passes: in the eigenbasis of G only
    the weights of the squares depend on δ. (d + 1, n/t, t·c, t·c), jointly over t inputs in a row; of the layers
    alone whose names match the pattern `names`."""
    capture, out, fs = Capture(state.tangent, state.parts), [], []
    turned = {part.name: _basis(op) for part, op in blocks(state, names)}
    for batch in x.split(size):
        record = capture.run(batch)
        f, views = record.f.detach(), record.views()
        n, c = f.shape
        gradients = record.pull(torch.eye(c).expand(n, c, c))
        total = f.new_zeros(len(precisions) + 1, n // together, together * c, together * c)
        for name, (ua, ub, values) in turned.items():
            rows = _rows(views[name], gradients[name], ua, ub).reshape(n // together, together * c, -1)
            for i, precision in enumerate(precisions):
                half = rows * (values + precision).rsqrt()
                total[i] += half @ half.mT
            total[-1] += rows @ rows.mT
        fs.append(f)
        out.append(total)
    return torch.cat(fs), torch.cat(out, 1)


def features(tangent: Any, parts: Any, x: Tensor, directions: Tensor, size: int = 16) -> Tensor:
    """J(x) Vᵀ for directions V (k, p), (n, c, k)."""
    capture, out = Capture(tangent, parts), []
    columns = {part.name: directions[:, part.index(tangent.layout)].float() for part in parts}
    for batch in x.split(size):
        record = capture.run(batch)
        n, c = record.f.shape
        gradients, views = record.pull(torch.eye(c).expand(n, c, c)), record.views()
        total = record.f.new_zeros(c, n, len(directions))
        for name, own in columns.items():
            total += views[name].outer(gradients[name]).flatten(2) @ own.mT
        out.append(total.transpose(0, 1).detach())
    return torch.cat(out)


def blocks(state: Any, names: str = "") -> list[tuple[Any, Any]]:
    """Parts of the network and their blocks of G."""
    pairs = zip(state.parts, curvature(state, LIKELIHOOD).parts, strict=True)
    return [(part, op) for part, op in pairs if re.match(names, part.name)]


def _basis(op: Any) -> tuple[Tensor, Tensor | None, Tensor]:
    """Eigenvectors (those of A and of B for a Kronecker product) and eigenvalues of a block of G."""
    if isinstance(op, lw.operators.KroneckerPlusDiagonal):
        l, ua, m, ub = op.decomposition
        assert ua is not None
        return ua.float(), ub.float(), (op.factor * m.unsqueeze(-1) * l.unsqueeze(-2)).flatten().float()
    values, vectors = torch.linalg.eigh(linalg.to_dense(op))
    return vectors.float(), None, values.clamp(min=0).float()


def _rows(view: Any, g: Tensor, ua: Tensor, ub: Tensor | None) -> Tensor:
    """A layer's rows of J in the eigenbasis, (n, c, p)."""
    if ub is None:
        return (view.outer(g).flatten(2) @ ua).transpose(0, 1)
    return view.rotated(ua).outer(torch.einsum("knsbo,boq->knsbq", g, ub)).flatten(2).transpose(0, 1).contiguous()
