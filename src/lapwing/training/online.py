"""Evidence during training: prior, noise and hyperparameters of the network learnt along with its weights.

    online = OnlineEvidence(model, loader, "categorical", structure="kron", prior="layerwise", every=5, burn_in=10)
    for epoch in range(100):
        for x, y in loader:
            loss = online.loss(model(x), y)     # mean negative log-likelihood + ½θᵀAθ/N
            optimizer.zero_grad(); loss.backward(); optimizer.step()
        online.step()
    online.restore()                            # the weights of the highest evidence
    la = online.laplace()

Every `every` epochs after `burn_in`, one pass accumulates the curvature G at the current weights; with G fixed, steps
by gradient on (log λ, log σ) climb the evidence at those weights (`climb.py`); training goes on under the new A. The
weights are no mode then, only on their way to one, so early evidences are low.

A. Immer, M. Bauer, V. Fortuin, G. Rätsch, M. E. Khan. Scalable marginal likelihood estimation for model selection in
deep learning. ICML 2021.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from lapwing import given
from lapwing.api import Laplace, laplace
from lapwing.data import as_batches
from lapwing.errors import InvalidValue, warn
from lapwing.likelihoods import Likelihood
from lapwing.priors import Gaussian
from lapwing.training.climb import climb, finite, matched, move, shown, weights_beside
from lapwing.training.history import EvidenceRecord, History, recorded
from lapwing.training.loss import TrainingLoss, begin
from lapwing.training.snapshot import Snapshot, copied, loaded, plain, restored
from lapwing.tune.bounds import box
from lapwing.tune.surrogate import surrogate


class OnlineEvidence:
    """Learns hyperparameters by the evidence in the user's own training loop.

    loader, likelihood, structure, prior, factor, forward: as for `lw.laplace`; the loader is read once an update, in
    eval mode, and must hold the training data without augmentation.
    every, burn_in: an update at the epochs burn_in, burn_in + every, ...
    steps, lr: gradient steps an update, by Adam in log space with a rate that falls from lr to 0.
    fixed: hyperparameters to hold ("precision", "noise").
    hyperparameters: globs over parameters of the model that are no weights: learnt by the evidence, through the
    Jacobian, by one pass of Adam with rate hyper_lr an update. Leave them out of the optimizer.
    probes: draws that estimate their gradient in networks of more than 256 weights.
    """

    def __init__(
        self,
        model: nn.Module,
        loader: Any,
        likelihood: Any,
        *,
        structure: Any = "kron",
        prior: Any = "layerwise",
        factor: Any = "auto",
        every: int = 5,
        burn_in: int = 10,
        steps: int = 40,
        lr: float = 0.2,
        fixed: tuple[str, ...] = (),
        hyperparameters: Sequence[str] = (),
        hyper_lr: float = 0.01,
        probes: int = 16,
        forward: Any = None,
    ) -> None:
        for name, value in (("every", every), ("steps", steps), ("probes", probes)):
            given.whole(value, name, 1)
        given.whole(burn_in, "burn_in")
        for name, rate in (("lr", lr), ("hyper_lr", hyper_lr)):
            if not isinstance(rate, (int, float)) or not (rate > 0 and math.isfinite(rate)):
                raise InvalidValue(f"{name} must be positive and finite, got {rate!r}")
        self.model, self.every, self.burn_in, self.steps, self.lr = model, every, burn_in, steps, lr
        self.fixed = (fixed,) if isinstance(fixed, str) else tuple(fixed)
        self.hyper_lr, self.probes = hyper_lr, probes
        self.data = as_batches(loader)
        self.names = matched(model, hyperparameters)
        self.subset = weights_beside(model, self.names)
        self.settings = {"structure": structure, "factor": factor, "subset": self.subset, "forward": forward}
        self.epoch = 0
        self.best: Snapshot | None = None
        self._records: list[EvidenceRecord] = []
        self._losses: list[Tensor] = []
        self._warned = False
        self.objective = begin(model, self.data, likelihood, prior, self.fixed, self.settings)
        self.prior, self.likelihood, self.n = self.objective.prior, self.objective.likelihood, self.objective.n
        self.given = self.likelihood  # bounds are of the noise that was given: those of a noise on its way would move

    # -- in the loop ----------------------------------------------------------------------------------------------

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        """Mean negative log-likelihood of a batch of outputs, plus ½ ‖θ − m‖²_A / N, at the current hyperparameters.

        The mean is over examples (positions and outputs are summed), constants and 1/σ² included, so a Gaussian's
        gradient is that of the halved squared error over σ². Add no weight decay of the optimizer to it."""
        out = self.objective.loss(f, y)
        self._losses.append(out.detach())
        return out

    def penalty(self) -> Tensor:
        """½ ‖θ − m‖²_A / N, for a loss of one's own."""
        return self.objective(self.model)

    @torch.inference_mode(False)
    def step(self) -> EvidenceRecord | None:
        """Count an epoch; where one is due, update the hyperparameters and return the record."""
        epoch = self.epoch + 1
        if epoch < self.burn_in or (epoch - self.burn_in) % self.every:
            self.epoch = epoch
            return None
        loss = math.fsum(map(float, self._losses)) / len(self._losses) if self._losses else math.nan
        if self._losses and not math.isfinite(loss):
            raise InvalidValue(
                f"training diverged: the mean loss up to epoch {epoch} is {loss}; lower the learning rate, or restore()"
            )
        la = self._fitted()
        bounds = box(la.state, self.prior, self.given, self.fixed)
        prior, likelihood, at_bound = climb(la.state, self.prior, self.likelihood, bounds, self.steps, self.lr)
        also = shown(self.model, self.names, {*prior.hyperparameters, *likelihood.hyperparameters})
        record = recorded(epoch, la.state, prior, likelihood, len(at_bound), loss, also)
        value = finite(record.log_evidence, [*bounds.start])
        if self.best is None or value > self.best.log_evidence:
            self.best = Snapshot(epoch, value, copied(self.model), prior, likelihood)
        if self.names:
            draws = torch.Generator().manual_seed(self.epoch)
            slope = surrogate(la.state, prior, likelihood, self.probes, draws)
            move(self.model, self.names, slope, self.data, self.hyper_lr)
        self.epoch, self._losses = epoch, []
        self._records.append(record)
        self._set(prior, likelihood)
        self._warn(at_bound)
        return record

    @property
    def history(self) -> History:
        """The records of all updates so far."""
        return History(tuple(self._records))

    # -- after the loop -------------------------------------------------------------------------------------------

    def restore(self) -> Snapshot:
        """Put the weights and hyperparameters of the highest evidence back."""
        best = self._best()
        self.model.load_state_dict(best.state_dict)
        self._set(best.prior, best.likelihood)
        return best

    @torch.inference_mode(False)
    def laplace(self, at: str = "best") -> Laplace:
        """The Laplace object at the weights and hyperparameters of the highest evidence, or at the "current" ones.

        It keeps weights of its own; to load it from a file, `restore()` the network first."""
        if at == "current":
            return self._fitted()
        if at != "best":
            raise InvalidValue(f"at must be 'best' or 'current', got {at!r}")
        best = self._best()
        with self._at(best):
            return self._fitted()

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed training needs beside the model and its optimizer; plain, for torch.save."""
        return {
            "epoch": self.epoch,
            "n": self.n,
            "losses": [float(loss) for loss in self._losses],
            "records": [asdict(record) for record in self._records],
            "best": None if self.best is None else self.best.plain(),
            **plain(self.prior, self.likelihood),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`; the object must be made with the same arguments."""
        wanted = self.state_dict().keys()
        if set(state) != set(wanted):
            raise InvalidValue(f"a state of OnlineEvidence holds {sorted(wanted)}, got {sorted(state)}")
        if state["n"] != self.n:
            raise InvalidValue(f"the state is of a training on {state['n']} examples, the loader holds {self.n}")
        prior, likelihood = restored(state, self.prior, self.likelihood)
        best = None if state["best"] is None else loaded(state["best"], self.prior, self.likelihood)
        self._records = [EvidenceRecord(**record) for record in state["records"]]
        self._losses = [torch.tensor(loss, dtype=torch.float64) for loss in state["losses"]]
        self.epoch, self.best = state["epoch"], best
        self._set(prior, likelihood)

    def __repr__(self) -> str:
        last = self._records[-1] if self._records else None
        how = "no update yet" if last is None else f"log evidence {last.log_evidence:.2f} at epoch {last.epoch}"
        best = "" if self.best is None else f"; best {self.best.log_evidence:.2f} at epoch {self.best.epoch}"
        return f"OnlineEvidence({self.likelihood.name}; epoch {self.epoch}; {how}{best})"

    # -- inside ---------------------------------------------------------------------------------------------------

    def _fitted(self) -> Laplace:
        return laplace(self.model, self.data, self.likelihood, prior=self.prior, **self.settings)

    def _set(self, prior: Gaussian, likelihood: Likelihood) -> None:
        self.prior, self.likelihood = prior, likelihood
        self.objective = TrainingLoss(self.model, prior, likelihood, self.n)

    def _best(self) -> Snapshot:
        if self.best is None:
            first = self.burn_in or self.every
            raise InvalidValue(f"no evidence was taken yet: the first is at epoch {first}, and this is {self.epoch}")
        return self.best

    @contextmanager
    def _at(self, best: Snapshot) -> Iterator[None]:
        """The model and hyperparameters at a snapshot, and given back."""
        weights, prior, likelihood = copied(self.model), self.prior, self.likelihood
        self.model.load_state_dict(best.state_dict)
        self.prior, self.likelihood = best.prior, best.likelihood
        try:
            yield
        finally:
            self.model.load_state_dict(weights)
            self.prior, self.likelihood = prior, likelihood

    def _warn(self, at_bound: tuple[str, ...]) -> None:
        if at_bound and not self._warned:
            self._warned = True
            warn(
                f"{len(at_bound)} hyperparameters, {at_bound[0]} first, ended at a bound: the data do not determine "
                "them; each record counts them in at_bound, and this is said once",
            )
