"""How good a Laplace object is: certificates, examples that are left out, and a check by its own training data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lapwing.api.choices import checked_mean
from lapwing.center import Center
from lapwing.certify import Certificate, certify
from lapwing.checkup import Check, checked
from lapwing.curvature import State
from lapwing.errors import InvalidValue, Unsupported
from lapwing.leave_one_out import LeaveOneOut, leave_one_out
from lapwing.operators import Samples
from lapwing.priors import Prior
from lapwing.shell import Shell


class Judged(Shell):
    """What a Laplace object can say of itself."""

    if TYPE_CHECKING:  # of the Laplace object
        state: State
        prior: Prior
        center: str
        calibration: Any
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

    def check(self, data: Any = None) -> Check:
        """Hold the posterior to some of its training data, and say in words what that means and what to call instead:
        its loss beside the network's, what draws cost beside what it reckons with, and examples that are left out where
        the structure is exact; and what a calibration was chosen by. Prints itself; `check.ok`, `check.findings`."""
        batches = self.read_again(data, "check")
        exact = self.state.structure.bound == "exact" and self.state.factor.kind == "exact"
        center = None if self.center == "map" or not exact else self._mode
        return checked(self.spread, self.prior, self.likelihood, batches, center, self.calibration)

    @property
    def _mode(self) -> Center:
        return self.process_map if self.center == "process" else self.tangent_map

    @torch.inference_mode(False)
    def leave_one_out(self, mean: str = "process", data: Any = None) -> LeaveOneOut:
        """Each training example by a posterior of all the others, in closed form: means, covariances and log scores.
        Exact for structure="full" of the model that `mean` names, "process" or "tangent"; for "network" one Newton step
        from its outputs. It is optimistic: the features have seen the labels. See `docs/guide/evidence.md`."""
        batches = self.read_again(data, "leave_one_out")
        if checked_mean(mean) in ("mixture", "auto"):
            raise InvalidValue(
                f"mean={mean!r} is made of others, which are left out one by one: ask for 'network', 'tangent' or "
                "'process'; what a calibration was chosen by is in la.calibration"
            )
        center = None if mean == "network" else self.process_map if mean == "process" else self.tangent_map
        return leave_one_out(self.spread, self.likelihood, batches, center)

    @property
    def solve(self) -> Samples:
        """matrix_free: the samples of the posterior (over a process group, this rank's) and how they were solved for,
        residual, steps and passes."""
        if not self.streams:
            raise Unsupported(f"structure '{self.state.structure}' is factorized, not solved by iteration")
        return self.spread.precision.samples
