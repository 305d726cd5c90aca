"""The outputs at new inputs by samples of the posterior, where its precision is known by products alone:

    f + J(x) z_k,   Cov f ≈ (1/k) Σ_k (J z_k)(J z_k)ᵀ          z_k of mean zero: unbiased, over any inputs together

One push a sample; of samples that are spread over ranks, each rank pushes its own. The covariance is fitted to the
samples and Gaussian draws are made from it: an average of softmaxes over so few samples would be far noisier. A
variance from k samples has a relative standard error of √(2/k).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lapwing import tree
from lapwing.curvature.products import at_once, pieces
from lapwing.errors import InvalidValue
from lapwing.operators import Streamed
from lapwing.outputs import WIDE, Normal, Outputs, Spread
from lapwing.push.graph import covariance, pushed_with_graph
from lapwing.push.runs import At
from lapwing.push.verb import push
from lapwing.tangent import TangentModel
from lapwing.tangent.graph import asked


@push.register
def _(precision: Streamed, at: At) -> Outputs:
    """By the kept samples, also past so many outputs that a covariance is too large. Of samples that are spread over
    ranks, each rank pushes its own, at inputs that are the same on all."""
    z, ranks = precision.spread, precision.ranks
    if not ranks.agrees({f"input {i}": t for i, t in enumerate(tree.tensors(at.x)) if t.layout is torch.strided}):
        raise InvalidValue(
            f"samples are spread over {ranks.size} ranks, each of which pushes its own to the inputs, and the inputs "
            "differ between ranks; give the same to all, or call la = la.gathered() on all and predict on each its own"
        )
    with ranks.sharing_errors("a prediction"):
        f, away = pushed(at.tangent, z, at.x)
    away = ranks.whole(away, "a prediction")
    if f.shape[-1] <= WIDE:
        return Normal(f, covariance(away, at.joint), at.joint, samples=len(away))
    if at.joint:
        raise InvalidValue(f"{f.shape[-1]} outputs are predicted by draws, so joint=True cannot apply; use joint=False")
    return Spread(f + away, f, samples=len(away))


def pushed(tangent: TangentModel, z: Tensor, x: Any) -> tuple[Tensor, Tensor]:
    """f (n, ..., c) and J z (k, n, ..., c), in float32 or better; with a graph to x where one is asked for."""
    if asked(x):
        return pushed_with_graph(tangent, z, x)
    fs, aways = [], []
    for piece in _pieces(tangent, x, len(z)):
        made = [tangent.jvps(piece, some) for some in z.split(at_once(tangent))] if len(z) else []
        f = made[0][0].detach() if made else tangent(piece)
        dtype = torch.promote_types(f.dtype, torch.float32)
        fs.append(f.to(dtype))
        aways.append(torch.cat([f.new_zeros(0, *f.shape), *(away for _, away in made)]).detach().to(dtype))
    return torch.cat(fs), torch.cat(aways, 1)


def _pieces(tangent: TangentModel, x: Any, k: int) -> Iterator[Any]:
    if not tangent.separable(x):
        yield x
        return
    index = torch.arange(tree.batch_size(x), device=tangent.device)
    for piece, _ in pieces(tangent, x, index, k):
        yield piece
