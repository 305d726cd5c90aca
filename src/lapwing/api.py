"""The thin shell over the flow.

la   = laplace(model, data, "categorical")     fit: one pass over the data
la   = la.tuned()                              prior and noise by evidence: a new object
pred = la.predict(x)                           error bars
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from lapwing import curvature, files, io, likelihoods, priors, tree, tune
from lapwing.arguments import (
    as_budget,
    as_factor,
    as_likelihood,
    as_prior,
    as_ranks,
    as_shard,
    as_structure,
    as_tangent,
    facts,
)
from lapwing.center import Center, Jacobian, check_gaussian, read, tangent_map
from lapwing.certify import Certificate, certify
from lapwing.curvature import BUDGET, State, accumulate, probe
from lapwing.curvature.data_root import source
from lapwing.curvature.overflow import check_sums
from lapwing.data import Joined, dropped, inputs_of, ranks_of
from lapwing.errors import BrokenFile, InvalidValue, Unsupported
from lapwing.evidence import Evidence, decompose, effective_dimension
from lapwing.operators import Samples, linalg
from lapwing.packing import sound
from lapwing.posterior import Gaussian, condition, placed
from lapwing.predictive import FunctionSamples, Prediction, function_samples, predict
from lapwing.predictive.own_data import training_nll, unfit, warn_unfit
from lapwing.tangent import TangentModel, linearize
from lapwing.tangent.linearize import unwrapped
from lapwing.tune import Tuning

# -- the object --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class Laplace:
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
    temperature: float = 1.0  # of the posterior: its covariance times that; 1 is Bayes, others by held-out data only

    @property
    def tangent(self) -> TangentModel:
        return self.state.tangent

    @cached_property
    def posterior(self) -> Gaussian:
        """N(v̄, (G + A)⁻¹) over the weights, v̄ the trained weights or the tangent MAP, as `center` says."""
        return self._spread if self.center == "map" else replace(self._spread, mean=self.tangent_map.vector)

    @cached_property
    def _spread(self) -> Gaussian:
        """The posterior about the trained weights: all that error bars need."""
        with torch.inference_mode(False), torch.no_grad():
            return condition(self.state, self.prior, self.likelihood, temperature=self.temperature)

    @cached_property
    def tangent_map(self) -> Center:
        """v* under this prior and noise, and how it was found; solved for on the data of the fit unless stored."""
        return self.at if self.at is not None else self._tangent_map(self.prior, self.likelihood)

    @property
    def coverage(self) -> dict[str, str]:
        """Parameter -> how it is treated."""
        out = {**self.state.coverage, **dict.fromkeys(self.frozen, "frozen")}
        dropped = self.prior.counts_dropped() if isinstance(self.prior, priors.GPrior) else {}
        for name, n in dropped.items():
            out[name] += f"; {n} of {self.state.layout.numel(name)} weights dropped by the g-prior: no curvature"
        for name, share in self._captured[1].items():
            out[name] += f"; {100 * share:.1f} % of its curvature"
        return out

    @property
    def _captured(self) -> tuple[str, dict[str, float]]:
        """How much of the total curvature a low rank has, in words, and of each parameter's; none elsewhere."""
        weights = self.likelihood.curvature_weights(self.state.factor.kind).to(self.tangent.device)
        found = self.state.structure.captured(self.state, weights.expand(self.state.weights))
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
        if _center(center or self.center) == "map":
            return decompose(self.state, *new)
        same = prior is None and likelihood is None
        return decompose(self.state, *new, self.tangent_map if same else self._tangent_map(*new))

    @torch.inference_mode(False)
    def effective_dimension(self) -> Tensor:
        """How many directions the data determine, for each prior group."""
        return effective_dimension(self.state, self.prior, self.likelihood)

    @torch.inference_mode(False)
    def tuned(
        self,
        method: str | None = None,
        fixed: tuple[str, ...] = (),
        data: Any = None,
        center: str = "tangent",
        mean: str = "network",
    ) -> Laplace:
        """A new object with the prior precision and noise that the evidence picks.

        center: "tangent", the mode v* of the tangent model: right in every network, and reads the data (of the fit
        unless given) several times; "map", the trained weights: reads none (but 64 examples that classes are
        compared on afterwards), and is biased where they are no mode.
        method: "mackay" iterates λ = γ/‖v̄‖² (the default at "tangent"); "evidence" follows the gradient (at "map");
        "em" is mackay with γ from samples (matrix_free only, and its default);
        "validation" searches for what predicts held-out `data` best: the prior, and the noise or temperature.
        fixed: hyperparameters to hold. mean: that predictions will be about: for "network" a learnt noise is held at or
        above the network's residuals; for "tangent", as in predict(mean="tangent"), those of h(x, v*) are enough.
        """
        if _mean(mean) == "tangent" and (method == "validation" or _center(center) == "map"):
            raise InvalidValue("mean='tangent' belongs to the evidence at center='tangent', which learns v* too")
        if self.streams and data is not None and method != "validation":
            return self._attached(data).tuned(method, fixed, None, center, mean)
        if method == "validation":
            return self._validated(data, (fixed,) if isinstance(fixed, str) else tuple(fixed))
        methods: dict[str, Any] = {"evidence": tune.evidence, "mackay": tune.mackay}
        if self.streams:  # traces by samples
            methods, method = {"em": tune.em}, method or "em"
        method = method or ("mackay" if _center(center) == "tangent" else "evidence")
        if method not in methods:
            raise InvalidValue(f"method must be one of {[*methods, 'validation']}, got {method!r}")
        fixed = (fixed,) if isinstance(fixed, str) else tuple(fixed)
        start = (self.state, self.prior, self.likelihood, fixed)
        if _center(center) == "map":
            if data is not None:
                raise InvalidValue("center='map' reads no data: the evidence is of the data already fitted; drop data=")
            tune.warn_no_mode(self.tangent)
            prior, likelihood, tuning = methods[method](*start)
            return replace(
                self, prior=prior, likelihood=likelihood, tuning=tuning, center="map", at=None, temperature=1.0
            )._compared()
        check_gaussian(self.prior)
        batches = self._data(data, "tuned(center='tangent')", "; center='map' reads none")
        tracker = tune.Tracker(self._center_state, self._jacobian(batches), mean)
        prior, likelihood, tuning = methods[method](*start, tracker=tracker)
        return replace(
            self,
            prior=prior,
            likelihood=likelihood,
            tuning=tuning,
            center="tangent",
            at=tracker.found(),
            data=batches,
            temperature=1.0,
        )._compared()

    # -- new objects ----------------------------------------------------------------------------------------------

    def replace(self, prior: Any = None, likelihood: Any = None) -> Laplace:
        """The same curvature under another prior or noise; a tangent center is solved for when it is needed."""
        return replace(self, prior=self._prior(prior), likelihood=self._likelihood(likelihood), tuning=None, at=None)

    def gathered(self) -> Laplace:
        """matrix_free over a process group, called on every rank: the same with all samples on each, for predictions at
        inputs of a rank's own and to save. Other posteriors are whole on every rank as they are."""
        if not self.streams:
            return self
        return replace(self, state=self.state.structure.gathered(self.state, self._spread.precision))

    @torch.inference_mode(False)
    def recentered(self, data: Any = None) -> Laplace:
        """The same prior and noise, centered at the tangent MAP v*: the evidence, and draws, are taken there."""
        batches = self._data(data, "recentered()")
        center = self._tangent_map(self.prior, self.likelihood, batches)
        return replace(self, center="tangent", at=center, data=batches)

    @torch.inference_mode(False)
    def updated(self, more_data: Any, *, generator: torch.Generator | None = None, progress: bool = False) -> Laplace:
        """The same as a fit over the old and the new data (ekfac: in the eigenbasis of the old).

        Without a generator, the draws of a Monte-Carlo factor start from the number of examples seen so far, so that
        those of one update are not those of the next."""
        generator = generator or torch.Generator().manual_seed(self.state.n)
        structure, factor, added = self.state.structure, self.state.factor, as_shard(more_data, ranks_of(self.data))
        more = accumulate(
            structure,
            self.tangent,
            self.likelihood,
            added,
            factor,
            generator=generator,
            progress=progress,
            basis=self.state if self.state.basis else None,
        )
        data = None if self.data is None else Joined((self.data, added))
        state = check_sums(self.state + more)
        return replace(self, state=state, prior=placed(self.prior, state), tuning=None, data=data, at=None)

    @torch.inference_mode(False)
    def without(self, data: Any, *, progress: bool = False) -> Laplace:
        """The same as a fit without these of its data, by subtraction, at the same weights (ekfac: in the same basis).

        `state.lost` decimal digits cancel, of which a warning tells when few are left. That the data were in the fit is
        checked as far as sums can tell; a dual state finds and drops its rows. It keeps no reference to data."""
        if self.streams:
            raise Unsupported("matrix_free keeps no sums to take data out of; fit again on the data that stay")
        gone = accumulate(
            self.state.structure,
            self.tangent,
            self.likelihood,
            as_shard(data, ranks_of(self.data)),
            self.state.factor,
            progress=progress,
            basis=self.state if self.state.basis else None,
        )
        state = curvature.without(self.state, gone)
        return replace(self, state=state, prior=self._placed_without(state), tuning=None, data=None, at=None)

    def _placed_without(self, state: State) -> Any:
        """The prior after a removal; a g-prior needs each weight's second moment, and rounding is none."""
        if isinstance(self.prior, priors.GPrior):
            before, left = (linalg.diagonal(s.structure.operator(s, s.unit_weights)) for s in (self.state, state))
            lost = curvature.vanished(before, left, state)
            if lost:
                raise InvalidValue(
                    f"{lost} weights had curvature from these data alone: what is left of it is rounding, and the "
                    "g-prior is made of it; fit again on the data that stay, or use another prior"
                )
        return placed(self.prior, state)

    # -- predictions ----------------------------------------------------------------------------------------------

    def predict(
        self,
        x: Any,
        link: str = "auto",
        joint: bool = False,
        mean: str = "network",
        via: str = "tangent",
        *,
        samples: int = 64,
        generator: torch.Generator | None = None,
    ) -> Prediction:
        """Predict with error bars.

        x: inputs as in the data; targets that a mapping holds under "labels" are left out.
        link: "auto", "probit", "probit_centered", "bridge" or "monte_carlo", for classes.
        joint: the covariance over all inputs together.
        mean: "network", or "tangent" for h(x, v̄); the same while the center is the trained weights.
        via: "tangent", or "network" to draw `samples` weights about the trained ones and run the network itself: that
        underfits.
        """
        if _mean(mean) == "tangent" and via == "network":
            raise InvalidValue("via='network' has a mean of its own, that of its runs; drop mean='tangent'")
        moved = mean == "tangent" and self.center == "tangent"
        warn_unfit(self._training_nll, stacklevel=2)
        inputs = tree.moved(inputs_of(x), self.tangent.device)
        return predict(
            self.tangent,
            self._spread,
            self.likelihood.plain,
            inputs,
            link,
            center=self.tangent_map.vector if moved else None,
            joint=joint,
            via=via,
            samples=samples,
            generator=generator,
            memory_budget=self.memory_budget,
        )

    @cached_property
    def _training_nll(self) -> tuple[float, ...]:
        """That of `tuning`, or found now where the data are at hand and in this process; held-out data said it all."""
        if self.tuning is not None and (self.tuning.train_nll or self.tuning.method == "validation"):
            return self.tuning.train_nll
        if self.data is None or ranks_of(self.data).group is not None:  # which may be gone by now
            return ()
        return training_nll(self.tangent, self._spread, self.likelihood, self.data, self.memory_budget)

    def _compared(self) -> Laplace:
        """With the posterior held to some training data, which the record keeps; it warns where it does not fit them.
        Samples of matrix_free are not solved for only for that: its predictions compare."""
        if self.data is None or self.streams or self.tuning is None:
            return self
        nll = training_nll(self.tangent, self._spread, self.likelihood, self.data, self.memory_budget)
        warn_unfit(nll, stacklevel=4)
        out = replace(self, tuning=replace(self.tuning, train_nll=nll))
        out.__dict__["_spread"] = self._spread  # its factorization is made
        return out

    def __call__(self, x: Any) -> Prediction:
        return self.predict(x)

    def draw(self, n: int = 1, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """n weight samples, {parameter: (n, *shape)}: absolute weights about the center, in the network's dtype."""
        if n < 1:
            raise InvalidValue(f"draw gives at least 1 sample, asked for {n}")
        flat = self.posterior.draw(n, generator).to(self.tangent.dtype)
        return torch.func.vmap(lambda vector: self.tangent.embed(self.tangent.layout.unflatten(vector)))(flat)

    def function_samples(
        self, n: int = 1, generator: torch.Generator | None = None, mean: str = "network"
    ) -> FunctionSamples:
        """n functions drawn from the posterior, each the same function at all inputs of all calls (Thompson sampling):
        `functions(x)` are outputs (n, *f.shape). mean: that they are about, as in predict."""
        moved = _mean(mean) == "tangent" and self.center == "tangent"
        center = self.tangent_map.vector if moved else None
        return function_samples(self.tangent, self._spread, n, generator, center)

    # -- how good it is -------------------------------------------------------------------------------------------

    def certify(
        self,
        n_probes: int = 32,
        *,
        inputs: Any = None,
        data: Any = None,
        generator: torch.Generator | None = None,
        progress: bool = False,
    ) -> Certificate:
        """How far the structured curvature is from the true GGN over the data of the fit: total curvature, log-det and
        predictive variances, with standard errors. inputs: new ones, at which variances are compared; without them,
        training inputs stand for new ones, each left out of both posteriors."""
        if self.streams:
            raise Unsupported(
                "matrix_free multiplies by the true curvature, so there is nothing to certify; how well its solves "
                "went is in la.solve, and predictions and evidence carry standard errors"
            )
        return certify(
            self.state,
            self.prior,
            self.likelihood,
            self._data(data, "certify"),
            n_probes,
            inputs=inputs,
            generator=generator,
            progress=progress,
            memory_budget=self.memory_budget,
        )

    @property
    def solve(self) -> Samples:
        """matrix_free: the samples of the posterior (over a process group, this rank's) and how they were solved for,
        residual, steps and passes."""
        if not self.streams:
            raise Unsupported(f"structure '{self.state.structure}' is factorized, not solved by iteration")
        return self._spread.precision.samples

    # -- saving ---------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one safetensors file, whole or not at all."""
        tensors, header = io.pack_state(self.state)
        more, objects = io.pack_objects(self.prior, self.likelihood, self.tuning)
        found, center = io.pack_center(self.tangent_map if self.center == "tangent" else None)
        if self.streams:
            samples, solved = io.pack_samples(self._spread.precision)
            found, center = found | samples, center | solved
        extra = {
            "schema": io.SCHEMA,
            "center": self.center,
            "memory_budget": self.memory_budget,
            "forward_hook": self.tangent.custom_forward,
            "temperature": self.temperature,
        }
        tensors, header = tensors | more | found, header | objects | center | extra
        files.check_target(path)
        io.check_writable(tensors, header, path)
        files.write(path, tensors, header)

    # -- in a terminal --------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        how = f"tuned by {self.tuning.method}" if self.tuning else "not tuned"
        how += f" at the {self.tuning.center}" if self.tuning and self.tuning.center else ""
        if self.center == "tangent" and not (self.tuning and self.tuning.center == "tangent"):
            how += ", centered at the tangent MAP"
        if self.streams:
            how += f"; {self._spread.precision.known or 'not solved yet'}"
        if self.state.lost:
            how += f"; {self.state.lost:.1f} digits lost by removals, about {max(0.0, self.state.digits):.1f} left"
        known = self.tuning.train_nll if self.tuning else self.__dict__.get("_training_nll", ())
        how += f"; {words}" if (words := unfit(known)) else ""
        values = [f"{k} {_range(v.reshape(-1))}" for k, v in self.prior.hyperparameters.items()]
        shown = ", ".join(values) or self.prior.kind
        noise = "".join(f", {k}={_numbers(v)}" for k, v in self.likelihood.hyperparameters.items())
        shown += "" if self.temperature == 1.0 else f"; temperature {self.temperature:.3g}"
        return (
            f"Laplace({self.likelihood.kind}{noise}; {self.state.structure}{self._captured[0]}, "
            f"{self.state.factor} factor; "
            f"{self.state.layout.size:,} parameters, {self.state.n:,} examples; prior {shown}; {how})"
        )

    def _data(self, data: Any, what: str, otherwise: str = "") -> Any:
        """The batches to read again: those given, else those of the fit."""
        if data is None and self.data is None:
            raise InvalidValue(
                f"{what} reads the training data again, which a file or state does not hold; pass data={otherwise}"
            )
        return self.data if data is None else as_shard(data, ranks_of(self.data))

    def _validated(self, data: Any, fixed: tuple[str, ...]) -> Laplace:
        """Tuned on held-out data; v* is not looked at, and solved for again when it is needed."""
        if data is None:
            raise InvalidValue("method='validation' needs held-out data, other than the fit's: pass data=")
        batches = as_shard(data, ranks_of(self.data))
        found = tune.validation(
            self.state, self.prior, self.likelihood, batches, fixed, self.temperature, self.memory_budget
        )
        return replace(self, prior=found[0], likelihood=found[1], temperature=found[2], tuning=found[3], at=None)

    def _jacobian(self, batches: Any) -> Jacobian:
        """J over the data, kept where its rows fit the memory budget."""
        known = self.state.memo.jacobian
        if known is not None and known.batches is batches:
            return known
        found = read(self.state, self.likelihood, batches, self.memory_budget)
        if found.rows is not None:
            self.state.memo.jacobian = found
        return found

    @torch.inference_mode(False)
    def _tangent_map(self, prior: Any, likelihood: Any, batches: Any = None) -> Center:
        """v* for a prior and noise, started from that of this object where it is known."""
        check_gaussian(prior)
        if batches is None:
            batches = self._data(None, "a tangent center for another prior or noise", " to recentered() or tuned()")
        return tangent_map(self._center_state, prior, likelihood, self._jacobian(batches), self.at).alone()

    @property
    def streams(self) -> bool:
        """Whether the curvature is known by products over the data alone."""
        return self.state.structure.streams

    @property
    def _center_state(self) -> State:
        """Whose curvature preconditions the solve for v*: the state's, or where that is streamed its companion's."""
        return self.state.structure.companion(self.state)

    def _attached(self, data: Any) -> Laplace:
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
        return _served(self.state, as_likelihood(likelihood).to(self.tangent.device))


def _center(center: str) -> str:
    if center not in ("tangent", "map"):
        raise InvalidValue(f"center must be 'tangent' or 'map' (the trained weights), got {center!r}")
    return center


def _mean(mean: str) -> str:
    if mean not in ("network", "tangent"):
        raise InvalidValue(f"mean must be 'network' or 'tangent', got {mean!r}")
    return mean


def _range(values: Tensor) -> str:
    if values.numel() == 1:
        return f"{float(values[0]):.4g}"
    return f"{values.numel()} values, {float(values.min()):.3g} to {float(values.max()):.3g}"


def _numbers(value: Tensor) -> str:
    return (
        f"{float(value):.4g}"
        if value.numel() == 1
        else "[" + ", ".join(f"{v:.4g}" for v in value.flatten().tolist()) + "]"
    )


# -- the verbs ---------------------------------------------------------------------------------------------------


@torch.inference_mode(False)
def laplace(
    model: nn.Module,
    data: Any,
    likelihood: Any,
    *,
    structure: Any = "auto",
    subset: Any = "all",
    prior: Any = 1.0,
    factor: Any = "auto",
    forward: Any = None,
    memory_budget: float | None = None,
    generator: torch.Generator | None = None,
    progress: bool = False,
    process_group: Any = None,
    checkpoint: str | os.PathLike[str] | None = None,
    every: int | None = None,
) -> Laplace:
    """Turn a trained network into a Bayesian one, by one pass over its training data.

    data: a DataLoader, a Dataset or (X, y). likelihood: a key of LIKELIHOODS or an object of lw.likelihoods.
    structure: "auto", a key of STRUCTURES or an object.
    subset: "all", "last_layer", globs, {name: mask} or one bool vector.
    prior: a precision, "layerwise", "gprior", {glob: precision} or an object. factor: "auto", "exact", "monte_carlo",
    "empirical", "hessian" or an object. memory_budget: bytes of working memory (1 GiB; 2e9 is 2 GB).
    process_group: "world" or a torch.distributed group, each process of which calls this with its own shard of the data
    (see docs/guide/scaling.md); the result is the same on all, and so must be every call of its methods.
    checkpoint: a file that is written after every `every` batches (100); a fit that finds it there goes on from it to
    the same bits, and refuses that of another fit; it is removed when the fit is done (see docs/guide/continual.md).
    """
    ranks = as_ranks(process_group)
    with ranks.sharing_errors("reading the arguments"):
        budget, likelihood = as_budget(memory_budget), as_likelihood(likelihood)
    batches = as_shard(data, ranks)
    tangent = as_tangent(model, batches, subset, forward)
    with ranks.sharing_errors("reading the prior"):
        bound = as_prior(prior, tangent.layout, tangent.device)
    ranks.agree(
        facts(tangent, likelihood, bound, structure, factor, budget, generator),
        "Give every rank the same network (load one file, or broadcast the weights) and the same arguments",
    )
    seen = probe(tangent, batches, likelihood)
    chosen = as_structure(structure, seen, budget)
    likelihood = likelihood.to(tangent.device)
    state = accumulate(
        chosen,
        tangent,
        likelihood,
        batches,
        as_factor(factor, seen, likelihood, chosen),
        generator=generator,
        progress=progress,
        seen=seen,
        checkpoint=checkpoint,
        every=every,
    )
    expected = seen.n - ranks_of(batches).count(dropped(batches), "dropped examples")
    if state.n != expected:
        raise InvalidValue(
            f"the data gave {expected} examples in one pass and {state.n} in another; curvature and "
            "evidence are sums over data: give a loader that holds the same examples in every pass"
        )
    return replace(_assemble(state, placed(bound, state), likelihood, budget), data=batches)


def from_state(state: State, model: nn.Module, prior: Any, likelihood: Any) -> Laplace:
    """A Laplace object from a state (merged from shards, say) and the network that it was accumulated at."""
    tangent = state.tangent
    shapes = {n: list(s) for n, s in tangent.layout.shapes.items()}
    fresh = linearize(model, _selected(model, tangent.layout, "the state"), forward=tangent.forward)
    io.check_weights(fresh, state.fingerprints, shapes, "the state")
    device = fresh.device
    return _assemble(
        replace(state, tangent=fresh),
        placed(as_prior(prior, fresh.layout, device), state),
        as_likelihood(likelihood).to(device),
        BUDGET,
    )


@torch.inference_mode(False)
def load(path: str | os.PathLike[str], model: nn.Module, *, forward: Any = None, data: Any = None) -> Laplace:
    """Load what `la.save` wrote, for the network that it was fitted at.

    A fit with a forward hook needs the same hook again: functions are not saved. Nor are data: what reads them again
    (another prior under matrix_free, a tangent center, a certificate) needs data=, those of the fit.
    """
    content = files.read(path, io.SCHEMA)
    try:
        la = _loaded(io.checked(*content, path), model, forward, path)
    except BrokenFile as error:
        raise BrokenFile(f"{path} is broken: {error}; save it again") from error
    return la if data is None else la._attached(data)


def _loaded(saved: io.Saved, model: nn.Module, forward: Any, path: Any) -> Laplace:
    if saved.forward_hook and forward is None:
        raise InvalidValue(f"{path} was fitted with a forward= hook, which is not saved; pass it to load again")
    shapes = {name: list(shape) for name, shape in saved.layout.shapes.items()}
    tangent = linearize(model, _selected(model, saved.layout, path), forward=forward)
    io.check_weights(tangent, saved.state["fingerprints"], shapes, path)
    device = tangent.device
    state, prior = saved.attached(tangent), saved.prior.bind(tangent.layout, device)
    if hasattr(prior, "put_back"):  # it has seen the curvature, which may be known by passes over the data alone
        with sound("its prior"):
            prior = prior.put_back(tangent.theta)
    la = _assemble(state, prior, saved.likelihood.to(device), saved.memory_budget)
    at, temperature = saved.center_at(device), saved.temperature
    la = replace(la, center=saved.center, tuning=saved.tuning, at=at, temperature=temperature)
    if la.streams:
        saved.remind(la._spread.precision)
    return la


def _assemble(state: State, prior: priors.Prior, likelihood: likelihoods.Likelihood, budget: int) -> Laplace:
    likelihood = _served(check_sums(state), likelihood)
    treated = state.layout.shapes.keys() | state.coverage.keys()
    frozen = tuple(n for n, _ in state.tangent.model.named_parameters() if n not in treated)
    return Laplace(state, prior, likelihood, memory_budget=budget, frozen=frozen)


def _sourced(state: State, likelihood: likelihoods.Likelihood, data: Any) -> State:
    """A streamed state with these as its data; others as they are."""
    if not state.structure.streams:
        return state
    budget = state.structure.memory_budget
    return replace(state, source=source(state, likelihood, state.weights, data, budget))


def _served(state: State, likelihood: likelihoods.Likelihood) -> likelihoods.Likelihood:
    """The likelihood, if the curvature in the state can serve it: the same kind, and no finer in its noise."""
    weights = len(likelihood.curvature_weights(state.factor.kind))
    if likelihood.kind != state.likelihood or weights not in (1, state.weights):
        raise InvalidValue(
            f"the curvature was accumulated for {state.likelihood} with {state.weights} weights; "
            f"it cannot serve {likelihood.kind} with {weights}: fit again"
        )
    return likelihood


def _selected(model: nn.Module, layout: tree.Layout, where: Any) -> dict[str, Tensor]:
    """What was selected as {name: mask}, once the model is seen to have each parameter in its shape."""
    if not isinstance(model, nn.Module):
        raise InvalidValue(f"model must be a torch.nn.Module, got {type(model).__name__}")
    named = dict(unwrapped(model).named_parameters())
    for name in (*layout.shapes, *layout.empty):
        if name not in named:
            raise InvalidValue(f"{where} was saved from another architecture: the model has no parameter {name}")
        here, saved = named[name].shape, layout.shapes.get(name)
        if here != saved and (saved is not None or here.numel()):
            then = tuple(saved) if saved is not None else "no elements"
            raise InvalidValue(f"{where}: parameter {name} has shape {tuple(here)} here and {then} when saved")
    whole = {name: torch.ones(named[name].shape, dtype=torch.bool) for name in (*layout.shapes, *layout.empty)}
    return whole | layout.masks
