"""The data of a fit, read once for the tangent MAP: outputs and targets, and the rows of J where they fit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lapwing import data as loading
from lapwing import fixed
from lapwing.center.jacobian import Jacobian
from lapwing.curvature import BUDGET, State
from lapwing.curvature.accumulate import flat_outputs, flat_targets
from lapwing.curvature.cover import cover
from lapwing.curvature.rows import RowMaker
from lapwing.curvature.state import differing
from lapwing.errors import InvalidValue, Unsupported
from lapwing.likelihoods import Likelihood
from lapwing.tangent.rows import units

HELD_ROWS_BYTES = 2**28  # of rows, for one output, up to which they are kept


@torch.inference_mode(False)
def read(state: State, likelihood: Likelihood, batches: Iterable[Any], memory_budget: int = BUDGET) -> Jacobian:
    """The Jacobian of the data of the fit, by one pass; other data than those are an error."""
    if not likelihood.concave:
        raise Unsupported(
            f"{likelihood.name} is not concave in the network's outputs, so the tangent model may have several modes; "
            "use center='map', the trained weights"
        )
    tangent = state.tangent
    fs: list[Tensor] = []
    ys: list[Tensor] = []
    rows: list[Tensor] = []
    shapes: list[torch.Size] = []
    held, maker, ranks = False, None, loading.ranks_of(batches)
    inputs = fixed.no_sums()
    with ranks.sharing_errors("reading the data for the tangent map"):
        for x, y in loading.passes(batches, tangent.device, label="tangent map"):
            if maker is None:
                maker = RowMaker(tangent, cover(tangent, x))
            inputs += fixed.input_sums(x, len(y))
            record = maker.run(x)
            f = record.f.detach()
            if not fs:
                every = state.n * f[0].numel()
                size = 8 * every * tangent.layout.size
                # a product with rows reads them all; past a size, a run of the network, which has c of them, is quicker
                held = size <= memory_budget // 2 and size * f.shape[-1] <= HELD_ROWS_BYTES
                if 48 * every > memory_budget * ranks.size:
                    raise InvalidValue(
                        f"the tangent center keeps outputs of all data in memory, {state.n} x {f[0].numel()} several "
                        "times, which is past memory_budget; raise it, or use center='map'"
                    )
            if held:
                pieces = maker.rows(record, x, units(f), memory_budget // 8)
                rows += [piece.reshape(-1, tangent.layout.size).to(torch.float64) for piece in pieces]
            fs.append(flat_outputs(f).to(torch.float64))
            ys.append(flat_targets(f, y))
            shapes.append(f.shape)
    mine = (fs[0][:0], ys[0][:0], held) if fs else None
    no_f, no_y, held = ranks.first(mine, "the shapes of outputs and targets")  # a rank without data has none
    outputs, targets = torch.cat([no_f.to(tangent.device), *fs]), torch.cat([no_y.to(tangent.device), *ys])
    found = torch.cat([outputs.new_zeros(0, tangent.layout.size), *rows]) if held else None
    jacobian = Jacobian(tangent, batches, outputs, targets, tuple(shapes), found)
    jacobian.counter["passes"] += 1
    _check_same_data(state, likelihood, jacobian)
    fixed.check_inputs(ranks.total([inputs], "sums of the inputs")[0], state.inputs)
    return jacobian


def _check_same_data(state: State, likelihood: Likelihood, jacobian: Jacobian) -> None:
    ranks = jacobian.ranks
    n = ranks.count(sum(shape[0] for shape in jacobian.shapes), "the number of examples")
    apart = differing(jacobian.statistics(likelihood, jacobian.f, state), state.statistics)
    if n != state.n or apart:
        what = f"{n} examples, not {state.n}" if n != state.n else f"another {apart} of the network's outputs"
        raise InvalidValue(
            f"these are not the data of the fit: they have {what}. Give the same data, without augmentation, or use "
            "center='map', which reads none"
        )
