"""The Laplace object: a thin shell over the flow.

la   = laplace(model, data, "categorical")     fit: one pass over the data
la   = la.tuned()                              prior and noise by evidence: a new object
pred = la.predict(x)                           error bars
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lapwing import given, io, likelihoods, priors
from lapwing.api import filing, other_data, tuning, words
from lapwing.api.choices import checked_center, checked_mean, weighed_means
from lapwing.api.judging import Judged
from lapwing.arguments import as_likelihood, as_prior, as_shard
from lapwing.calibration import Calibration
from lapwing.center import Center, Jacobian, about_constant, check_gaussian, read, tangent_map
from lapwing.curvature import BUDGET, State
from lapwing.curvature.data_root import source
from lapwing.data import ranks_of
from lapwing.errors import InvalidValue
from lapwing.evidence import Evidence, decompose, effective_dimension
from lapwing.outputs import Blend, Outputs
from lapwing.posterior import Gaussian, condition, placed
from lapwing.posterior.mixture import log_weights
from lapwing.predictive import FunctionSamples, Prediction, function_samples, predict
from lapwing.predictive.about import about
from lapwing.predictive.batched import predicted
from lapwing.predictive.own_data import training_nll, warn_unfit
from lapwing.tangent import TangentModel
from lapwing.tune import Tuning


@dataclass(frozen=True, eq=False, repr=False)
class Laplace(Judged):
    """A network with a Gaussian posterior over its weights. Frozen: every method that changes something returns
    a new object; the curvature is shared."""

    state: State
    prior: priors.Prior
    likelihood: likelihoods.Likelihood
    center: str = "map"
    tuning: Tuning | None = None
    memory_budget: int = BUDGET
    frozen: tuple[str, ...] = field(default=())  # parameters that are not Bayesian
    data: Any = None  # what was fitted, for the verbs that read it again; a reference, never saved
    at: Center | None = None  # v*, where it is known; see `tangent_map`
    temperature: float = 1.0  # of the posterior: its covariance times that; 1 is Bayes
    mean: str = "network"  # that predictions are about, unless told otherwise
    calibration: Calibration | None = None  # what mean="auto" is, once it was chosen
    process_at: Center | None = None  # the mode of the process, where it is known; see `process_map`

    @property
    def n(self) -> int:  # type: ignore[override]
        """Examples that were fitted."""
        return self.state.n

    @property
    def targets(self) -> int | None:  # type: ignore[override]
        """A digest of their targets."""
        return self.state.targets

    @property
    def tangent(self) -> TangentModel:
        """The network as a function of its selected weights."""
        return self.state.tangent

    @cached_property
    def posterior(self) -> Gaussian:
        """N(v̄, (G + A)⁻¹) over the weights, v̄ the tangent MAP if the center is that, else the trained weights."""
        return replace(self.spread, mean=self.tangent_map.vector) if self.center == "tangent" else self.spread

    @cached_property
    def spread(self) -> Gaussian:
        """The posterior about the trained weights: all that error bars need."""
        with torch.inference_mode(False), torch.no_grad():
            found = condition(self.state, self.prior, self.likelihood, temperature=self.temperature)
        return replace(found, memory_budget=self.memory_budget)

    @cached_property
    def tangent_map(self) -> Center:
        """v* under this prior and noise, and how it was found; solved for on the data of the fit unless stored."""
        known = self.at is not None and self.center == "tangent"
        return self.at if known and self.at is not None else self._found("tangent")

    @cached_property
    def process_map(self) -> Center:
        """That of the process about a constant, c + J v."""
        known = self.at if self.center == "process" else self.process_at
        return known if known is not None else self._found("process")

    @property
    def coverage(self) -> dict[str, str]:
        """Parameter -> how it is treated."""
        out = {**self.state.coverage, **dict.fromkeys(self.frozen, "frozen")}
        for name, n in self.prior.counts_dropped().items():
            out[name] += f"; {n} of {self.state.layout.numel(name)} weights dropped by the g-prior: no curvature"
        for name, share in self.captured[1].items():
            out[name] += f"; {100 * share:.1f} % of its curvature"
        return out

    @property
    def captured(self) -> tuple[str, dict[str, float]]:
        """How much of the total curvature a low rank has, in words, and of each parameter's; none elsewhere."""
        weights = self.likelihood.curvature_weights(self.state.factor.kind).to(self.tangent.device)
        found = self.state.structure.captured(self.state, weights.expand(self.state.terms))
        return ("", {}) if found is None else (f" with {100 * found[0]:.1f} % of the curvature", found[1])

    # -- evidence -------------------------------------------------------------------------------------------------

    def log_evidence(self, center: str | None = None, prior: Any = None, likelihood: Any = None) -> Tensor:
        """log p(D), 0-dim float64; differentiable in hyperparameters that require grad.

        center: "tangent" or "map", where `la.center` is not meant. At "tangent", v* belongs to one prior and noise: for
        others it is solved for again, on the data of the fit."""
        return self.decompose(center, prior, likelihood).log_evidence

    @torch.inference_mode(False)
    def decompose(self, center: str | None = None, prior: Any = None, likelihood: Any = None) -> Evidence:
        """The log evidence by its terms, fit − quadratic − occam, and whether it bounds the full curvature's."""
        new = (self._prior(prior), self._likelihood(likelihood))
        where = checked_center(center or self.center)
        if where == "map":
            return decompose(self.state, *new)
        if prior is not None or likelihood is not None:
            return decompose(self.state, *new, self._found(where, *new))
        return decompose(self.state, *new, self.tangent_map if where == "tangent" else self.process_map)

    @torch.inference_mode(False)
    def effective_dimension(self) -> Tensor:
        """How many directions the data determine, for each prior group."""
        return effective_dimension(self.state, self.prior, self.likelihood)

    @given.keywords({"val_loader": "method='validation', data=", "pred_type": "center="})
    @torch.inference_mode(False)
    def tuned(
        self,
        method: str | None = None,
        fixed: tuple[str, ...] = (),
        data: Any = None,
        center: str | None = None,
        mean: str = "network",
        *,
        progress: bool = False,
    ) -> Laplace:
        """A new object with the prior precision and noise that the evidence picks.

        Of "classification", it then chooses by the training data how sure predictions may be, `la.calibration`; its
        center is "map". center of the others:
        center: "tangent", the mode v* of the tangent model: right in every network, and reads the data (of the fit
        unless given) several times; "map", the trained weights: reads none (but 64 examples that classes are
        compared on afterwards), and is biased where they are no mode.
        method: "mackay" iterates λ = γ/‖v̄‖² (the default at "tangent"); "evidence" follows the gradient (at "map");
        "em" is mackay with γ from samples (matrix_free only, and its default);
        "validation" searches for what predicts held-out `data` best: the prior, and the noise or temperature; of
        "classification", how sure predictions may be, under the prior that the evidence picks.
        fixed: hyperparameters to hold. mean: that predictions will be about: for "network" a learnt noise is held at or
        above the network's residuals; for "tangent", as in predict(mean="tangent"), those of h(x, v*) are enough.
        progress: a bar over the steps of the search.
        """
        return tuning.tuned(self, method, fixed, data, center, mean, progress)

    # -- new objects ----------------------------------------------------------------------------------------------

    def replace(self, prior: Any = None, likelihood: Any = None) -> Laplace:
        """The same curvature under another prior or noise; a tangent center is solved for when it is needed."""
        return replace(self.forgetful(), prior=self._prior(prior), likelihood=self._likelihood(likelihood))

    def forgetful(self) -> Laplace:
        """Without what was found for one prior, noise and set of data: a tuning, modes, a calibration."""
        temperature = self.temperature if self.calibration is None else 1.0
        return replace(self, tuning=None, at=None, calibration=None, process_at=None, temperature=temperature)

    def gathered(self) -> Laplace:
        """matrix_free over a process group, called on every rank: the same with all samples on each, for predictions at
        inputs of a rank's own and to save. Other posteriors are whole on every rank as they are."""
        if not self.streams:
            return self
        return replace(self, state=self.state.structure.gathered(self.state, self.spread.precision))

    @torch.inference_mode(False)
    def recentered(self, data: Any = None, center: str = "tangent", *, progress: bool = False) -> Laplace:
        """The same prior and noise, centered at the tangent MAP v*: the evidence, and draws, are taken there. Or at the
        mode of the process about a constant, center="process"."""
        batches = self.read_again(data, "recentered()")
        found = self._found(checked_center(center), self.prior, self.likelihood, batches, progress)
        return replace(self, center=center, at=found, data=batches)

    @torch.inference_mode(False)
    def updated(self, more_data: Any, *, generator: torch.Generator | None = None, progress: bool = False) -> Laplace:
        """The same as a fit over the old and the new data (ekfac: in the eigenbasis of the old).

        Without a generator, the draws of a Monte-Carlo factor start from the number of examples seen so far, so that
        those of one update are not those of the next."""
        return other_data.updated(self, more_data, generator, progress)

    @torch.inference_mode(False)
    def without(self, data: Any, *, progress: bool = False) -> Laplace:
        """The same as a fit without these of its data, by subtraction, at the same weights (ekfac: in the same basis).

        `state.lost` decimal digits cancel, of which a warning tells when few are left. That the data were in the fit is
        checked as far as sums can tell; a dual state finds and drops its rows. It keeps no reference to data."""
        return other_data.without(self, data, progress)

    # -- predictions ----------------------------------------------------------------------------------------------

    @given.keywords({"link_approx": "link=", "pred_type": "via=", "n_samples": "samples="})
    def predict(
        self,
        x: Any,
        link: str = "auto",
        joint: bool = False,
        mean: str | Mapping[str, float] | None = None,
        via: str = "tangent",
        *,
        samples: int = 64,
        generator: torch.Generator | None = None,
        progress: bool = False,
    ) -> Prediction:
        """Predict with error bars.

        x: inputs as in the data, or a loader or dataset of them, whose targets are left out, as are those that a
        mapping holds. Inputs that require grad have gradients. progress: a bar over batches.
        link: "auto", "probit", "probit_centered", "mean_field", "bridge", "bridge_norm" or "monte_carlo".
        joint: the covariance over all inputs together.
        mean: what predictions are about. "auto" is that of la.calibration, and the default of a task; "network" is the
        default of likelihoods; "tangent" for h(x, v̄), the same while the center is the trained weights; "process" for
        c + J v, the mean of a Gaussian process with the tangent kernel and a constant prior mean, solved for on the
        data of the fit where it is not known; "mixture" of the network's and the process's, in equal parts;
        {"network": 3, "process": 1} a mixture with these weights.
        via: "tangent", or "network" to draw `samples` weights about the trained ones and run the network itself: that
        underfits.
        """
        if mean is not None and [*weighed_means(mean)] != ["network"] and via == "network":
            raise InvalidValue(f"via='network' has a mean of its own, that of its runs; drop mean={mean!r}")
        mean = mean or ("network" if via == "network" else self.mean)
        warn_unfit(self._training_nll)
        ask = functools.partial(self._predicted, link, joint, mean, via, samples, generator)
        return predicted(ask, self.tangent, x, joint, progress, generator)

    def _predicted(
        self, link: str, joint: bool, mean: Any, via: str, samples: int, generator: Any, inputs: Any
    ) -> Prediction:
        likelihood, chosen = self.likelihood.plain, self.calibration if mean == "auto" else None
        if (chosen is None and mean in ("network", "auto")) or (mean == "tangent" and self.center == "map"):
            return predict(
                self.spread, likelihood, inputs, link, joint=joint, via=via, samples=samples, generator=generator
            )
        made = self.spread.outputs(inputs, joint, samples=samples, generator=generator)
        if chosen is not None and not chosen.process:
            return Prediction(likelihood.predictive, chosen.applied(made, inputs), link)
        share = None if chosen is None else {"network": 1 - chosen.process, "process": chosen.process}
        parts = weighed_means(mean) if share is None else share
        found = tuple(self._about(one, made, inputs) for one in parts)
        own = found[0] if len(found) == 1 else Blend(found, log_weights([*parts.values()], len(found)))
        return Prediction(likelihood, own, link)

    def _about(self, mean: str, made: Outputs, inputs: Any) -> Outputs:
        """Outputs about the network's, moved to this mean."""
        if mean == "network" or (mean == "tangent" and self.center == "map"):
            return made
        return about(made, self.tangent, inputs, self.tangent_map if mean == "tangent" else self.process_map)

    @cached_property
    def _training_nll(self) -> tuple[float, ...]:
        """That of `tuning`, or found now where the data are at hand and in this process; held-out data said it all."""
        if self.calibration is not None or (self.tuning is not None and self.tuning.method == "validation"):
            return ()
        if self.tuning is not None and self.tuning.train_nll:
            return self.tuning.train_nll
        if self.data is None or ranks_of(self.data).group is not None:  # which may be gone by now
            return ()
        return training_nll(self.spread, self.likelihood, self.data, self.memory_budget)

    def compared(self) -> Laplace:
        """With the posterior held to some training data, which the record keeps; it warns where it does not fit them.
        Samples of matrix_free are not solved for only for that: its predictions compare."""
        if self.data is None or self.streams or self.tuning is None:
            return self
        nll = training_nll(self.spread, self.likelihood, self.data, self.memory_budget)
        warn_unfit(nll)
        out = replace(self, tuning=replace(self.tuning, train_nll=nll))
        out.__dict__["spread"] = self.spread  # its factorization is made
        return out

    def function_samples(
        self, n: int = 1, generator: torch.Generator | None = None, mean: str = "network"
    ) -> FunctionSamples:
        """n functions drawn from the posterior, each the same function at all inputs of all calls (Thompson sampling):
        `functions(x)` are outputs (n, *f.shape). mean: that they are about, as in predict."""
        if checked_mean(mean) not in ("network", "tangent"):
            raise InvalidValue(f"functions are drawn about the network's mean or the tangent's, not mean={mean!r}")
        moved = mean == "tangent" and self.center == "tangent"
        center = self.tangent_map.vector if moved else None
        return function_samples(self.spread, n, generator, center)

    def packed(self, path: Any) -> io.Content:
        """What goes into a file: tensors and a header, which are seen to be such as could be read again."""
        return filing.packed(self, path)

    # -- in a terminal --------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return words.described(self)

    def _repr_html_(self) -> str:
        return words.html(self)

    def read_again(self, data: Any, what: str, otherwise: str = "") -> Any:
        """The batches to read again: those given, else those of the fit."""
        if data is None and self.data is None:
            raise InvalidValue(
                f"{what} reads the training data again, which a file or state does not hold; pass data={otherwise}"
            )
        return self.data if data is None else as_shard(data, ranks_of(self.data))

    def jacobian(self, batches: Any, progress: bool = False) -> Jacobian:
        """J over the data, kept where it fits the memory budget: as rows, or as the inputs of a last layer."""
        known = self.state.memo.jacobian
        if known is not None and known.batches is batches:
            return known
        found = read(self.state, self.likelihood, batches, self.memory_budget, progress)
        if found.held:
            self.state.memo.jacobian = found
        return found

    @torch.inference_mode(False)
    def _found(
        self, center: str, prior: Any = None, likelihood: Any = None, batches: Any = None, progress: bool = False
    ) -> Center:
        """v* of the tangent model or of the process, started from that of this object where it is known."""
        prior, likelihood = check_gaussian(self.prior if prior is None else prior), likelihood or self.likelihood
        if batches is None:
            batches = self.read_again(None, "a tangent center for another prior or noise", " to recentered()")
        jacobian = self.jacobian(batches, progress)
        jacobian = about_constant(jacobian, likelihood) if center == "process" else jacobian
        start = self.at if self.center == center else None
        return tangent_map(self.center_state, prior, likelihood, jacobian, start, progress=progress).alone()

    @property
    def streams(self) -> bool:
        """Whether the curvature is known by products over the data alone."""
        return self.state.structure.streams

    @property
    def center_state(self) -> State:
        """Whose curvature preconditions the solve for v*: the state's, or where that is streamed its companion's."""
        return self.state.structure.companion(self.state)

    def attached(self, data: Any) -> Laplace:
        """With these as the data of the fit."""
        batches = as_shard(data, ranks_of(self.data))
        return replace(self, data=batches, state=_sourced(self.state, self.likelihood, batches))

    def _prior(self, prior: Any) -> priors.Prior:
        if prior is None:
            return self.prior
        return placed(as_prior(prior, self.state.layout, self.tangent.device), self.state)

    def _likelihood(self, likelihood: Any) -> likelihoods.Likelihood:
        if likelihood is None:
            return self.likelihood
        return check_served(self.state, as_likelihood(likelihood).to(self.tangent.device))


def _sourced(state: State, likelihood: likelihoods.Likelihood, data: Any) -> State:
    """A streamed state with these as its data; others as they are."""
    if not state.structure.streams:
        return state
    budget = state.structure.memory_budget
    return replace(state, source=source(state, likelihood, state.terms, data, budget))


def check_served(state: State, likelihood: likelihoods.Likelihood) -> likelihoods.Likelihood:
    """The likelihood, if the curvature in the state can serve it: the same kind, and no finer in its noise."""
    weights = len(likelihood.curvature_weights(state.factor.kind))
    if likelihood.kind != state.likelihood or weights not in (1, state.terms):
        raise InvalidValue(
            f"the curvature was accumulated for {state.likelihood} with {state.terms} weights; "
            f"it cannot serve {likelihood.kind} with {weights}: fit again"
        )
    return likelihood
