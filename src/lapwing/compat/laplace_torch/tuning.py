"""How laplace-torch picks a prior precision.

marglik      Adam on log λ, `n_steps` steps of −log p(D), from one start
gridsearch   the λ of a grid with the least validation loss: the mean negative log-likelihood of classes, the mean
             squared error of regression, or a loss of one's own, loss(predictions, targets) or an object with
             update, compute and reset (torchmetrics)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.linalg import LinAlgError
from tqdm.auto import tqdm

from lapwing.compat.laplace_torch.loading import Batches
from lapwing.compat.laplace_torch.utils.enums import Likelihood, PriorStructure
from lapwing.errors import InvalidValue, NotPositiveDefinite


def marglik(la: Any, steps: int, lr: float, start: Any, structure: PriorStructure, progress: bool) -> None:
    """Climb the evidence of a fitted estimator, and set the prior precision that it ends at."""
    la.prior_precision = start
    if len(la.prior_precision) == 1:
        lengths = {PriorStructure.SCALAR: 1, PriorStructure.LAYERWISE: la.n_layers, PriorStructure.DIAG: la.n_params}
        la.prior_precision = la.prior_precision.expand(lengths[structure]).clone()
    log_precision = la.prior_precision.detach().log().requires_grad_()
    optimizer = torch.optim.Adam([log_precision], lr=lr)
    for _ in tqdm(range(steps), desc="evidence", disable=not progress, leave=False):
        optimizer.zero_grad()
        with torch.enable_grad():
            loss = -la.log_marginal_likelihood(log_precision.exp())
        loss.backward()
        optimizer.step()
    la.prior_precision = log_precision.detach().exp()


def gridsearch(la: Any, grid: Tensor, loader: Any, loss: Any, how: dict[str, Any], progress: bool) -> None:
    """Set the prior precision of a grid (k,) that has the least validation loss."""
    if loader is None:
        raise InvalidValue("method='gridsearch' needs held-out data: give val_loader=")
    loss = loss or (SquaredError() if la.likelihood == Likelihood.REGRESSION else MeanNLL())
    results = []
    for value in tqdm(grid, desc="grid", disable=not progress, leave=False):
        la.prior_precision = value
        try:
            results.append(validated(la, Batches(loader, la.dict_key_y), loss, how))
        except (LinAlgError, NotPositiveDefinite):
            results.append(torch.inf)
    la.prior_precision = grid[min(range(len(grid)), key=results.__getitem__)]


@torch.no_grad()
def validated(la: Any, batches: Batches, loss: Any, how: dict[str, Any]) -> float:
    """The loss of an estimator's predictions over batches."""
    running = hasattr(loss, "update") and hasattr(loss, "compute")
    if running and hasattr(loss, "reset"):
        loss.reset()
    kept: list[tuple[Tensor, ...]] = []
    for x, y in batches:
        found = la(x, **how, fitting=True)
        found, y = (found if isinstance(found, tuple) else (found,)), y.to(la._device)
        if running:
            _update(loss, found, y)
        else:
            kept.append((*found, y))
    if running:
        return float(loss.compute().sum())
    return float(loss(*(torch.cat(column) for column in zip(*kept, strict=True))))


def _update(loss: Any, found: tuple[Tensor, ...], y: Tensor) -> None:
    """With mean and variance, or with the mean alone where the loss takes no more."""
    try:
        loss.update(*found, y)
    except TypeError:
        loss.update(found[0], y)


class MeanNLL:
    """The mean of −log p of labels, for probabilities (n, c); labels of −100 are left out."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start anew."""
        self.total, self.count = torch.zeros((), dtype=torch.float64), 0

    def update(self, probs: Tensor, y: Tensor) -> None:
        """Add a batch."""
        probs, y = probs.reshape(-1, probs.shape[-1]), y.reshape(-1)
        self.total += torch.nn.functional.nll_loss(probs.log(), y, reduction="sum").cpu()
        self.count += int((y != -100).sum())

    def compute(self) -> Tensor:
        """The mean so far, 0-dim."""
        return self.total / self.count


class SquaredError(MeanNLL):
    """The mean squared error of each output, (c,)."""

    def update(self, probs: Tensor, y: Tensor) -> None:
        """Add a batch of means (n, c)."""
        self.total = self.total + (probs - y).square().sum(0).double().cpu()
        self.count += len(y)
