"""How good a Laplace object is: certificates, examples that are left out, and a check by its own training data."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from lapwing.api.choices import checked_mean
from lapwing.center import Center
from lapwing.certify import Certificate, certify
from lapwing.checkup import Check, checked
from lapwing.curvature import State
from lapwing.errors import InvalidValue, Unsupported, warn
from lapwing.leave_one_out import LeaveOneOut, leave_one_out
from lapwing.operators import Samples
from lapwing.priors import Prior
from lapwing.shell import Shell

if TYPE_CHECKING:
    from lapwing.api.object import Laplace


class Judged(Shell):
    """What a Laplace object can say of itself."""

    if TYPE_CHECKING:  # of the Laplace object
        state: State
        prior: Prior
        center: str
        calibration: Any
        temperature: float
        tuning: Any
        memory_budget: int
        spread: Any
        streams: Any
        tangent_map: Any
        process_map: Any
        read_again: Any

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
            self.read_again(data, "certify"),
            n_probes,
            inputs=inputs,
            generator=generator,
            progress=progress,
            memory_budget=self.memory_budget,
        )

    def corrected(self, certificate: Certificate) -> Laplace:
        """With its covariance divided by what a certificate, made under this prior and noise, says that its variances
        at new inputs are of the true posterior's: one number, kept in `la.temperature`. `certify(inputs=x)` with inputs
        like those to come gives a better one than training inputs that are left out."""
        if self.temperature != 1 or self.calibration is not None:
            raise InvalidValue(
                "the covariance was scaled already, by tuned() or another certificate; correct a fit of a likelihood "
                "by its name ('dirichlet', 'gaussian'), tuned by the evidence"
            )
        if (certificate.n, certificate.structure) != (self.n, str(self.state.structure)):
            raise InvalidValue(
                f"this is a certificate of {certificate.structure} on {certificate.n:,} examples, and the fit is of "
                f"{self.state.structure} on {self.n:,}; give la.corrected(la.certify(inputs=x))"
            )
        if certificate.variance is None or not certificate.variance.value > -1:
            raise InvalidValue("the certificate does not tell variances at new inputs; make one by certify(inputs=x)")
        tuning = None if self.tuning is None else replace(self.tuning, train_nll=())
        return replace(cast("Laplace", self), temperature=1 / (1 + certificate.variance.value), tuning=tuning)

    def check(self, data: Any = None) -> Check:
        """Hold the posterior to some of its training data, and say in words what that means and what to call instead:
        its loss beside the network's, what draws cost beside what it reckons with, and examples that are left out where
        the structure is exact; and what a calibration was chosen by. Prints itself; `check.ok`, `check.findings`."""
        batches = self.read_again(data, "check")
        center = None if self.center == "map" or not self._exact else self._mode
        return checked(self.spread, self.prior, self.likelihood, batches, center, self.calibration)

    @property
    def _exact(self) -> bool:
        return self.state.structure.bound == "exact" and self.state.factor.kind == "exact"

    @property
    def _mode(self) -> Center:
        return self.process_map if self.center == "process" else self.tangent_map

    @torch.inference_mode(False)
    def leave_one_out(self, mean: str = "process", data: Any = None, *, progress: bool = False) -> LeaveOneOut:
        """Each training example by a posterior of all the others, in closed form: means, covariances and log scores.
        Exact for structure="full" of the model that `mean` names, "process" or "tangent"; for "network" one Newton step
        from its outputs. Other structures have their own covariances in it, with a warning, or are refused. It is
        optimistic: the features have seen the labels. See `docs/guide/evidence.md`."""
        batches = self.read_again(data, "leave_one_out")
        if checked_mean(mean) in ("mixture", "auto"):
            raise InvalidValue(
                f"mean={mean!r} is made of others, which are left out one by one: ask for 'network', 'tangent' or "
                "'process'; what a calibration was chosen by is in la.calibration"
            )
        if not self._exact:
            warn(
                f"leave_one_out() takes covariances of '{self.state.structure}' ({self.state.factor.kind} factor) for "
                "those of the curvature, which may be far off at single examples; it is exact for structure='full'"
            )
        center = None if mean == "network" else self.process_map if mean == "process" else self.tangent_map
        return leave_one_out(self.spread, self.likelihood, batches, center, progress)

    @property
    def solve(self) -> Samples:
        """matrix_free: the samples of the posterior (over a process group, this rank's) and how they were solved for,
        residual, steps and passes."""
        if not self.streams:
            raise Unsupported(f"structure '{self.state.structure}' is factorized, not solved by iteration")
        return self.spread.precision.samples
