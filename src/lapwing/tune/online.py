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
by gradient on (log λ, log σ) climb the evidence at those weights (Eq. 5), inside the bounds of `bounds.py`; training
goes on under the new A. The weights are no mode then, only on their way to one, so early evidences are low.
Hyperparameters of the network itself follow `surrogate.py`.

A. Immer, M. Bauer, V. Fortuin, G. Rätsch, M. E. Khan. Scalable marginal likelihood estimation for model selection in
deep learning. ICML 2021.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lapwing import tree
from lapwing.curvature import State
from lapwing.data import as_batches
from lapwing.errors import InvalidValue, LapwingWarning, NotConverged
from lapwing.evidence import effective_dimension, log_evidence, scatter
from lapwing.operators import Blocks, Diagonal, linalg
from lapwing.tune.bounds import Box, at_values, box
from lapwing.tune.history import History, Record, summaries, summary
from lapwing.tune.objective import Objective, begin
from lapwing.tune.surrogate import ascend, surrogate

if TYPE_CHECKING:
    from lapwing.api import Laplace


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Weights and hyperparameters of the highest evidence so far."""

    epoch: int
    log_evidence: float
    state_dict: dict[str, Any]  # of the model: a copy
    prior: Any
    likelihood: Any


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
        for name, value, least in (
            ("every", every, 1),
            ("burn_in", burn_in, 0),
            ("steps", steps, 1),
            ("probes", probes, 1),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InvalidValue(f"{name} must be a whole number, at least {least}; got {value!r}")
        for name, rate in (("lr", lr), ("hyper_lr", hyper_lr)):
            if not isinstance(rate, (int, float)) or not (rate > 0 and math.isfinite(rate)):
                raise InvalidValue(f"{name} must be positive and finite, got {rate!r}")
        self.model, self.every, self.burn_in, self.steps, self.lr = model, every, burn_in, steps, lr
        self.fixed = (fixed,) if isinstance(fixed, str) else tuple(fixed)
        self.hyper_lr, self.probes, self.structure, self.factor, self.forward = (
            hyper_lr,
            probes,
            structure,
            factor,
            forward,
        )
        self.data = as_batches(loader)
        self.names = _matched(model, hyperparameters)
        self.subset: Any = "all"
        if self.names:
            self.subset = [n for n, p in model.named_parameters() if p.requires_grad and n not in self.names]
        self.epoch = 0
        self.best: Checkpoint | None = None
        self._records: list[Record] = []
        self._losses: list[Tensor] = []
        self._warned = False
        self.objective = begin(model, self.data, likelihood, prior, structure, factor, self.fixed, self.subset, forward)
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
    def step(self) -> Record | None:
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
        with torch.no_grad():
            value = _finite(float(log_evidence(la.state, prior, likelihood)), [*bounds.start])
        record = Record(
            epoch=epoch,
            log_evidence=value,
            log_likelihood=float(likelihood.log_likelihood(la.state.statistics)),
            effective_dimension=float(effective_dimension(la.state, prior, likelihood).sum()),
            train_loss=loss,
            hyperparameters={**summaries(prior, likelihood), **self._network()},
            at_bound=len(at_bound),
        )
        if self.best is None or value > self.best.log_evidence:
            self.best = Checkpoint(epoch, value, copy.deepcopy(_detached(self.model)), prior, likelihood)
        if self.names:
            self._move_model(la.state, prior, likelihood)
        self.epoch, self._losses = epoch, []
        self._records.append(record)
        self._set(prior, likelihood)
        self._warn(at_bound)
        return record

    @property
    def history(self) -> History:
        return History(tuple(self._records))

    # -- after the loop -------------------------------------------------------------------------------------------

    def restore(self) -> Checkpoint:
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
        best = None
        if self.best is not None:
            best = {**vars(self.best), **_values(self.best.prior, self.best.likelihood)}
            del best["prior"], best["likelihood"]
        return {
            "epoch": self.epoch,
            "n": self.n,
            "losses": [float(loss) for loss in self._losses],
            "records": [asdict(record) for record in self._records],
            "best": best,
            **_values(self.prior, self.likelihood),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`; the object must be made with the same arguments."""
        wanted = self.state_dict().keys()
        if set(state) != set(wanted):
            raise InvalidValue(f"a state of OnlineEvidence holds {sorted(wanted)}, got {sorted(state)}")
        if state["n"] != self.n:
            raise InvalidValue(f"the state is of a training on {state['n']} examples, the loader holds {self.n}")
        prior, likelihood = self._with(state)
        best = None
        if state["best"] is not None:
            hyper = (*self.prior.hyperparameters, "likelihood_values")
            saved = {k: v for k, v in state["best"].items() if k not in hyper}
            best_prior, best_likelihood = self._with(state["best"])
            best = Checkpoint(
                **{**saved, "state_dict": copy.deepcopy(saved["state_dict"])},
                prior=best_prior,
                likelihood=best_likelihood,
            )
        self._records = [Record(**record) for record in state["records"]]
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
        from lapwing import api  # this is a loop over that shell

        return api.laplace(
            self.model,
            self.data,
            self.likelihood,
            structure=self.structure,
            subset=self.subset,
            prior=self.prior,
            factor=self.factor,
            forward=self.forward,
        )

    def _network(self) -> dict[str, float]:
        """The network's hyperparameters, apart from those of prior and likelihood, whatever they are called."""
        taken = {*self.prior.hyperparameters, *self.likelihood.hyperparameters}
        found = {f"model.{n}" if n in taken else n: self.model.get_parameter(n) for n in self.names}
        return {k: v for name, t in found.items() for k, v in summary(name, t).items()}

    def _move_model(self, state: State, prior: Any, likelihood: Any) -> None:
        generator = torch.Generator().manual_seed(self.epoch)
        objective = surrogate(state, prior, likelihood, self.probes, generator)
        moved = ascend(objective, self.names, self.data, self.hyper_lr)
        bad = [name for name, value in moved.items() if not bool(torch.isfinite(value).all())]
        if bad:
            raise NotConverged(f"the evidence's slope in {bad} is not finite; lower hyper_lr, or leave them out")
        with torch.no_grad():
            for name, value in moved.items():
                self.model.get_parameter(name).copy_(value)

    def _set(self, prior: Any, likelihood: Any) -> None:
        self.prior, self.likelihood = prior, likelihood
        self.objective = Objective(self.model, prior, likelihood, self.n)

    def _best(self) -> Checkpoint:
        if self.best is None:
            first = self.burn_in or self.every
            raise InvalidValue(f"no evidence was taken yet: the first is at epoch {first}, and this is {self.epoch}")
        return self.best

    @contextmanager
    def _at(self, best: Checkpoint) -> Iterator[None]:
        """The model and hyperparameters at a checkpoint, and given back."""
        weights, prior, likelihood = copy.deepcopy(_detached(self.model)), self.prior, self.likelihood
        self.model.load_state_dict(best.state_dict)
        self.prior, self.likelihood = best.prior, best.likelihood
        try:
            yield
        finally:
            self.model.load_state_dict(weights)
            self.prior, self.likelihood = prior, likelihood

    def _with(self, state: dict[str, Any]) -> tuple[Any, Any]:
        own, values = self.prior.hyperparameters, state["likelihood_values"]
        found = {name: state[name] for name in own}
        for name, value in own.items():
            if found[name].shape != value.shape or values.keys() != self.likelihood.hyperparameters.keys():
                raise InvalidValue(
                    f"the state has {found[name].numel()} prior {name}s and {list(values)}, this object "
                    f"{value.numel()} and {list(self.likelihood.hyperparameters)}; make it alike"
                )
        device = next(iter(own.values())).device
        likelihood = self.likelihood.replace(**{k: v.to(device) for k, v in values.items()})
        return self.prior.replace(**{k: v.to(device) for k, v in found.items()}), likelihood

    def _warn(self, at_bound: tuple[str, ...]) -> None:
        if at_bound and not self._warned:
            self._warned = True
            warnings.warn(
                f"{len(at_bound)} hyperparameters, {at_bound[0]} first, ended at a bound: the data do not determine "
                "them; each record counts them in at_bound, and this is said once",
                LapwingWarning,
                stacklevel=3,
            )


@torch.inference_mode(False)
def climb(
    state: State, prior: Any, likelihood: Any, bounds: Box, steps: int, lr: float
) -> tuple[Any, Any, tuple[str, ...]]:
    """Adam on log hyperparameters from where they are, projected on their bounds, with the curvature fixed."""
    now = {**prior.coordinates(), **likelihood.coordinates()}
    values = {
        key: now[key].reshape(start.shape).clamp(bounds.low[key], bounds.high[key]).requires_grad_()
        for key, start in bounds.start.items()
    }
    value_at = _fixed_curvature(state, prior, likelihood)
    optimizer = torch.optim.Adam(list(values.values()), lr=lr, maximize=True)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * (1 - step / steps)
        optimizer.zero_grad()
        with torch.enable_grad():
            value = value_at(*at_values(prior, likelihood, values))
            _finite(float(value.detach()), [*values])
            value.backward()
        optimizer.step()
        with torch.no_grad():
            for key, log_value in values.items():
                log_value.clamp_(bounds.low[key], bounds.high[key])
    final = {key: log_value.detach() for key, log_value in values.items()}
    return *at_values(prior, likelihood, final), bounds.at_bound(final)


def _fixed_curvature(state: State, prior: Any, likelihood: Any) -> Callable[[Any, Any], Tensor]:
    """(prior, likelihood) ↦ log Z with what does not move made once. Noise per output mixes the curvature anew."""
    if len(likelihood.curvature_weights(state.factor.kind)) > 1 or state.weights > 1:
        return lambda prior, likelihood: log_evidence(state, prior, likelihood)
    unit = state.structure.operator(state, torch.ones(1, dtype=torch.float64, device=state.tangent.device))
    flat = isinstance(unit, Blocks) and all(isinstance(part, Diagonal) for part in unit.parts)
    diagonal = linalg.diagonal(unit) if flat else None
    square = scatter(state, prior)

    def value_at(prior: Any, likelihood: Any) -> Tensor:
        a, w = prior.operator(), likelihood.curvature_weights(state.factor.kind)[0].to(square.device)
        if diagonal is None:
            ratio = linalg.logdet(linalg.shift(linalg.scale(unit, w), a)) - a.logdet()
        else:  # as many hyperparameters as weights, maybe: few kernels a step
            ratio = torch.log1p(w * diagonal / a.dense()).sum()
        quadratic = (prior.precision.reshape(-1) * square).sum()
        return likelihood.log_likelihood(state.statistics) - 0.5 * quadratic - 0.5 * ratio

    return value_at


def _finite(value: float, names: list[str]) -> float:
    if not math.isfinite(value):
        raise NotConverged(
            f"the log evidence became {value} while tuning {names}; hold one of them with fixed=, or check the scale "
            "of the targets. Nothing was changed"
        )
    return value


def _matched(model: Any, patterns: Sequence[str]) -> tuple[str, ...]:
    if not isinstance(patterns, Sequence) or isinstance(patterns, str) or not all(isinstance(p, str) for p in patterns):
        raise InvalidValue(f"hyperparameters is a list of globs over parameter names, got {patterns!r}")
    names = [n for n, p in model.named_parameters() if p.requires_grad] if patterns else []
    for pattern in patterns:
        if not tree.chosen(pattern, names):
            raise InvalidValue(
                f"hyperparameters: {pattern!r} matches no parameter that requires grad; they are {names}"
            )
    meant = {name for pattern in patterns for name in tree.chosen(pattern, names)}
    found = tuple(n for n in names if n in meant)
    if found and len(found) == len(names):
        raise InvalidValue("hyperparameters= takes every parameter, and leaves no weight to be Bayesian about")
    return found


def _detached(model: nn.Module) -> dict[str, Any]:
    return {k: v.detach() if isinstance(v, Tensor) else v for k, v in model.state_dict().items()}


def _values(prior: Any, likelihood: Any) -> dict[str, Any]:
    return {
        **{k: v.clone() for k, v in prior.hyperparameters.items()},
        "likelihood_values": {k: v.clone() for k, v in likelihood.hyperparameters.items()},
    }
