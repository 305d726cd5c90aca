"""What every network with a posterior offers, whatever its posterior is: predict, draw, save, compare.

    Shell     the verbs, written once
    Fitted    a posterior of any kind: particles of a sampler, say
    Blended   several of these as one, with weights: a mixture

`Laplace` is another, with verbs of its own.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lapwing import files, given, io, selection
from lapwing.errors import InvalidValue, Unsupported
from lapwing.likelihoods import Likelihood, Several
from lapwing.outputs import Blend
from lapwing.posterior import Mixture, Posterior
from lapwing.posterior.mixture import log_weights
from lapwing.predictive import Prediction
from lapwing.predictive.batched import predicted
from lapwing.priors import Prior
from lapwing.report import report
from lapwing.tangent import TangentModel

ELSEWHERE = {  # what laplace-torch calls things, and what to call here
    "fit": "lw.laplace(model, data, likelihood) has fitted it already; la.updated(more_data) adds data",
    "optimize_prior_precision": "call la = la.tuned()",
    "log_marginal_likelihood": "call la.log_evidence()",
    "sample": "la.draw(n) gives weights, la.predict(x).sample(n) targets",
    "predictive_samples": "call la.predict(x).sample(n)",
    "functional_samples": "call la.function_samples(n)(x)",
    "functional_variance": "call la.predict(x).f_var",
    "prior_precision": "it is la.prior.hyperparameters['precision']",
    "sigma_noise": "it is la.likelihood.noise",
    "posterior_precision": "it is la.posterior.precision",
    "state_dict": "call la.save(path)",
    "load_state_dict": "call lw.load(path, model)",
}


class Shell:
    """A network with a posterior. Frozen: whatever changes something returns a new object."""

    posterior: Any
    likelihood: Likelihood
    n: int
    targets: int | None

    def __getattr__(self, name: str) -> Any:
        if hasattr(type(self), name):  # a property that raised an AttributeError of its own
            return object.__getattribute__(self, name)
        known = (key for key in dir(self) if not key.startswith("_"))
        hint = f"; {ELSEWHERE[name]}" if name in ELSEWHERE else given.near(name, known)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}", name=name, obj=self)

    @property
    def tangent(self) -> TangentModel:
        """The network as a function of its selected weights."""
        return self.posterior.tangent

    @property
    def frozen(self) -> tuple[str, ...]:
        """Parameters that are not Bayesian."""
        layout = self.tangent.layout
        known = {*layout.shapes, *layout.empty}
        return tuple(n for n, _ in self.tangent.model.named_parameters() if n not in known)

    def predict(self, x: Any, link: str = "auto", joint: bool = False, *, progress: bool = False) -> Prediction:
        """Predict with error bars at inputs as in the data, or at those of a loader; joint: all inputs together. link:
        as in `Laplace.predict`, where outputs are normal. progress: a bar over batches."""

        def one(inputs: Any) -> Prediction:
            return Prediction(self.likelihood.plain, self.posterior.outputs(inputs, joint), link)

        return predicted(one, self.tangent, x, joint, progress)

    def __call__(self, x: Any) -> Prediction:
        return self.predict(x)

    def draw(self, n: int = 1, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """n weight samples, {parameter: (n, *shape)}: absolute weights, in the network's dtype."""
        if n < 1:
            raise InvalidValue(f"draw gives at least 1 sample, asked for {n}")
        return self._named(self.posterior.draw(n, generator))

    def _named(self, flat: Tensor) -> dict[str, Tensor]:
        """Weight vectors (n, p) as {parameter: (n, *shape)}."""
        unflatten = lambda vector: self.tangent.embed(self.tangent.layout.unflatten(vector))  # noqa: E731
        return torch.func.vmap(unflatten)(flat.to(self.tangent.dtype))

    def log_evidence(self) -> Tensor:
        """log p(D), where it is known."""
        raise Unsupported(f"{self!r} has no evidence: its posterior is known by draws; compare on held-out data")

    def report(self, test: Any, path: str | os.PathLike[str], *, ood: Any = None, certify: bool | None = None) -> Path:
        """Write one HTML page: whether this predicts test data, (X, y) or batches, better than the plain network, by
        how much, and why. ood: inputs unlike the training data, to be told by ood_score. certify: whether to make a
        certificate; unless told, where that is quick."""
        return report(self, test, path, ood=ood, certify=certify)

    def packed(self, path: Any) -> io.Content:
        """What goes into a file: tensors and a header, which are seen to be such as could be read again."""
        raise NotImplementedError

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one safetensors file, whole or not at all."""
        files.check_target(path)
        files.write(path, *self.packed(path))


@dataclass(frozen=True, eq=False, repr=False)
class Fitted(Shell):
    """A network with a posterior of any kind."""

    posterior: Posterior
    likelihood: Likelihood
    prior: Prior | None  # None where the weights had none: an ensemble's, say
    n: int  # examples; 0 where they were not told
    targets: int | None = None  # a digest of them, by which comparisons know them
    made: str = ""  # by what

    @property
    def diagnostics(self) -> Any:
        """What a sampler's chains say of themselves: acceptance, R-hat, effective numbers of draws."""
        return self._of_chains("diagnostics")

    def to_arviz(self) -> Any:
        """A sampler's draws as arviz.InferenceData (the extra `mcmc`)."""
        return self._of_chains("to_arviz")()

    def _of_chains(self, name: str) -> Any:
        if not hasattr(self.posterior, name):
            raise Unsupported(f"{self!r} has no chains, which {name} is about; lw.samplers gives some")
        return getattr(self.posterior, name)

    def packed(self, path: Any) -> io.Content:
        """What goes into a file: tensors and a header."""
        return io.pack_fitted(self, path)

    def __repr__(self) -> str:
        data = f", {self.n:,} examples" if self.n else ""
        prior = "none" if self.prior is None else self.prior.kind
        return (
            f"Fitted({self.likelihood.kind}; {self.posterior} by {self.made}; {self.tangent.layout.size:,} parameters"
            f"{data}; prior {prior})"
        )


@dataclass(frozen=True, eq=False, repr=False)
class Blended(Shell):
    """Several networks with posteriors as one, member k with the weight w_k."""

    members: tuple[Shell, ...]
    log_weight: Tensor  # (k,), float64

    @cached_property
    def posterior(self) -> Mixture:
        """The mixture of the members'."""
        return Mixture(tuple(one.posterior for one in self.members), self.log_weight)

    @property
    def likelihood(self) -> Likelihood:  # type: ignore[override]
        """The first member's; others may have another noise."""
        return self.members[0].likelihood

    @property
    def n(self) -> int:  # type: ignore[override]
        """Examples."""
        return self.members[0].n

    @property
    def targets(self) -> int | None:  # type: ignore[override]
        """A digest of the targets."""
        return self.members[0].targets

    def predict(self, x: Any, link: str = "auto", joint: bool = False, *, progress: bool = False) -> Prediction:
        """Predict with error bars, each member under its own noise."""

        def one(inputs: Any) -> Prediction:
            found = [member.predict(inputs, joint=joint).outputs for member in self.members]  # as each would by itself
            own = Several.of([member.likelihood.plain for member in self.members], [one.sources for one in found])
            return Prediction(own, Blend(tuple(found), self.log_weight), link)

        return predicted(one, self.tangent, x, joint, progress)

    def packed(self, path: Any) -> io.Content:
        """What goes into a file: what its members' would hold, and their networks."""
        return io.pack_blended(self, path)

    def __repr__(self) -> str:
        shown = ", ".join(f"{math.exp(w):.3g} × {one!r}" for w, one in zip(self.log_weight, self.members, strict=True))
        return f"Mixture({shown})"


def mixture(members: Sequence[Shell], weights: Any = "uniform", data: Any = None) -> Blended:
    """Several fits as one, each with its weight: fits of one network trained from several starts, say.

    weights: "uniform"; a number for each, which need not sum to one; "stacked", those that predict held-out data= best;
    or "evidence", p(D | k)/Σ p(D | j), of fits that have one, of the same data. Log evidences differ by many nats, so
    that nearly always leaves one member: it says which of them is true, not how to predict well. Their networks must
    have outputs of one shape, and their likelihoods be of one kind; each keeps its own noise."""
    if not isinstance(members, Sequence) or not members or not all(isinstance(one, Shell) for one in members):
        raise InvalidValue(f"mixture takes a list of fits, such as lw.laplace gives, at least one; got {members!r}")
    Several.of([one.likelihood.plain for one in members], [1] * len(members))  # raises where they differ
    if (data is not None) != (isinstance(weights, str) and weights == "stacked"):
        raise InvalidValue(f"weights='stacked' needs held-out data=, and nothing else reads them; got {weights!r}")
    return Blended(tuple(members), _weighed(members, weights, data))


def _weighed(members: Sequence[Shell], weights: Any, data: Any) -> Tensor:
    """Log-weights (k,) that sum to one."""
    if isinstance(weights, str) and weights == "stacked":
        return selection.stacked(selection.held_out_densities(members, data)).log().cpu()
    if isinstance(weights, str) and weights == "evidence":
        with torch.no_grad():
            evidences = torch.stack([one.log_evidence().double().cpu() for one in members])
        selection.check_same({str(k): one for k, one in enumerate(members)})
        return torch.log_softmax(evidences, 0)
    return log_weights(weights, len(members))
