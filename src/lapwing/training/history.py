"""The record of an evidence that was followed through training: a sequence that prints and plots itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lapwing.curvature import State
from lapwing.evidence import effective_dimension, log_evidence
from lapwing.likelihoods import Likelihood
from lapwing.predictive.plot import axes_of
from lapwing.priors import Prior

SHOWN = 64  # groups that are kept by name; of more, quantiles


@dataclass(frozen=True)
class EvidenceRecord:
    """One update of the hyperparameters."""

    epoch: int
    log_evidence: float  # after the update
    log_likelihood: float  # of the training data, at the weights
    effective_dimension: float
    train_loss: float  # mean of the losses since the last record, NaN where none were seen
    hyperparameters: dict[str, float]  # each group's, or quantiles where they are thousands
    at_bound: int  # how many hyperparameters ended at a bound


def summary(name: str, values: Tensor, labels: tuple[str, ...] = ()) -> dict[str, float]:
    """{name[label]: value}, or quantiles of more than SHOWN values."""
    flat = values.detach().reshape(-1).to(torch.float64)
    if flat.numel() == 1 and len(labels) < 2:
        return {name: float(flat)}
    if flat.numel() <= SHOWN:
        keys = labels or tuple(str(i) for i in range(flat.numel()))
        return {f"{name}[{key}]": value for key, value in zip(keys, flat.tolist(), strict=True)}
    ordered = flat.sort().values  # torch.quantile refuses more than 16 million values
    places = {"least": 0, "median": (len(ordered) - 1) // 2, "most": len(ordered) - 1}
    return {f"{name} ({place})": float(ordered[i]) for place, i in places.items()}


def summaries(prior: Prior, likelihood: Likelihood) -> dict[str, float]:
    """Those of all hyperparameters of a prior and a likelihood."""
    of_prior = [summary(name, value, prior.labels()[name]) for name, value in prior.hyperparameters.items()]
    of_noise = [summary(name, value) for name, value in likelihood.hyperparameters.items()]
    return {key: value for part in (*of_prior, *of_noise) for key, value in part.items()}


def recorded(
    epoch: int, state: State, prior: Prior, likelihood: Likelihood, at_bound: int, loss: float, also: dict[str, float]
) -> EvidenceRecord:
    """The record of an update to these hyperparameters, and also to those of the network."""
    with torch.no_grad():
        value, fit = log_evidence(state, prior, likelihood), likelihood.log_likelihood(state.statistics)
    dimension = float(effective_dimension(state, prior, likelihood).sum())
    values = {**summaries(prior, likelihood), **also}
    return EvidenceRecord(epoch, float(value), float(fit), dimension, loss, values, at_bound)


@dataclass(frozen=True)
class History:
    """The records of a training, in order."""

    records: tuple[EvidenceRecord, ...] = ()
    converged: bool | None = None  # of a loop with a stopping rule

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> EvidenceRecord:
        return self.records[index]

    def __iter__(self) -> Iterator[EvidenceRecord]:
        return iter(self.records)

    @property
    def best(self) -> EvidenceRecord | None:
        """The record of the highest evidence."""
        return max(self.records, key=lambda r: r.log_evidence, default=None)

    def __str__(self) -> str:
        if not self.records:
            return "History(no update yet)"
        head = ("epoch", "log evidence", "log likelihood", "eff. dim.", "train loss", "hyperparameters")
        rows = [head, *(_row(r, r is self.best) for r in self.records)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head) - 1)]
        cells = [[*(c.rjust(w) for c, w in zip(row, widths, strict=False)), row[-1]] for row in rows]
        return "\n".join([*("  ".join(row).rstrip() for row in cells), "* the highest evidence"])

    def plot(self, ax: Any = None) -> Any:
        """A figure of evidence and fit, effective dimension and hyperparameters over epochs (needs matplotlib). ax:
        three axes to draw in."""
        fit, dimension, values = axes_of(ax, "history.plot()", (11, 3.2), 1, 3)
        epochs = [r.epoch for r in self.records]
        fit.plot(epochs, [r.log_evidence for r in self.records], "o-", color="#0072B2", label="log evidence")
        fit.plot(epochs, [r.log_likelihood for r in self.records], "s--", color="#D55E00", label="log likelihood")
        dimension.plot(epochs, [r.effective_dimension for r in self.records], "o-", color="#009E73")
        names = tuple(dict.fromkeys(name for r in self.records for name in r.hyperparameters))
        for name in names:
            values.plot(epochs, [r.hyperparameters.get(name, float("nan")) for r in self.records], label=name)
        if all(v > 0 for r in self.records for v in r.hyperparameters.values()):
            values.set_yscale("log")
        fit.set(xlabel="epoch", ylabel="nats")
        dimension.set(xlabel="epoch", ylabel="effective dimension")
        values.set(xlabel="epoch", ylabel="hyperparameters")
        fit.legend(frameon=False)
        if 0 < len(names) <= 10:
            values.legend(frameon=False, fontsize=7)
        return fit.figure


def _row(record: EvidenceRecord, best: bool) -> tuple[str, ...]:
    shown = [f"{name} {value:.3g}" for name, value in list(record.hyperparameters.items())[:3]]
    more = len(record.hyperparameters) - len(shown)
    bound = f"; {record.at_bound} at a bound" if record.at_bound else ""
    return (
        f"{record.epoch}{'*' if best else ' '}",
        f"{record.log_evidence:.2f}",
        f"{record.log_likelihood:.2f}",
        f"{record.effective_dimension:.1f}",
        f"{record.train_loss:.4f}",
        ", ".join(shown) + (f", {more} more" if more else "") + bound,
    )
