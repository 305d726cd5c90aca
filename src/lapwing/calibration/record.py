"""A calibration: what predictions of a posterior are multiplied by, and moved by.

    classes    outputs ~ N(a f(x) + b m(x), s V(x) + b² B ‖φ(x) R‖²),      m(x) = φ(x) w + offset  (Eq. 28, ridge.py)
    numbers    a mixture of N(f(x), V(x)) and N(p(x), V(x)), p the mean of the process about a constant

s is the temperature of the posterior, which its owner keeps. Shapes: d features, c outputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from lapwing.calibration.classes import (
    FEW,
    HALF,
    LEAST_SCALE,
    MOST_SURE,
    CalibrationRows,
    Choice,
    choose,
)
from lapwing.calibration.features import COUNT, InputFeatures, suits
from lapwing.calibration.reading import read
from lapwing.calibration.ridge import RidgeFit
from lapwing.errors import BrokenFile, InvalidValue
from lapwing.likelihoods import Likelihood
from lapwing.outputs import Normal, Outputs
from lapwing.packing import Entries, Tensors, pack_plain, unpack_plain
from lapwing.posterior import Gaussian

PROCESS = 0.25  # of a mixture
KEPT = ("weights", "offset", "between", "root")  # of a regression, in a file


@dataclass(frozen=True, eq=False, repr=False)
class Calibration:
    """A choice of s, a and b, with the regression m on features φ where b is not 0."""

    choice: Choice
    n: int  # examples that it was chosen by
    features: InputFeatures | None = None
    labels: RidgeFit | None = None
    process: float = 0.0  # the weight of the process in the mixture
    held_out: int = 0  # labels that no training saw, if the choice is by those

    def applied(self, made: Outputs, x: Any) -> Outputs:
        """Outputs at x with a f + b m for their mean; V in their covariance is that of the temperature s."""
        a, b = self.choice.a, self.choice.b
        if self.features is None or self.labels is None:
            return made if a == 1 else made.moved((a - 1) * made.mean)
        assert isinstance(made, Normal)  # others have no features
        phi = self.featured(x)
        half = phi @ self.labels.root
        shape = "nd,md,ab->namb" if made.joint else "nd,nd,ab->nab"
        more = b**2 * torch.einsum(shape, half, half, self.labels.between)
        mean, cov = a * made.mean + (b * self.labels(phi)).to(made.mean), made.covariance + more.to(made.covariance)
        return replace(made, mean=mean, covariance=cov)

    def featured(self, x: Any) -> Tensor:
        """φ (n, d) of inputs."""
        assert self.features is not None
        if not suits(x) or x[0].numel() != len(self.features.center):
            raise InvalidValue(
                f"this fit was calibrated on inputs of {len(self.features.center)} numbers each; give such inputs, or "
                "predict(mean='network')"
            )
        return self.features(x)

    @property
    def narrow(self) -> bool:
        """Whether no error bars, and logits as they were, are left."""
        one = self.choice
        return one.scale < 1.01 * LEAST_SCALE and abs(one.a - 1) < 0.01 and not one.b

    @property
    def by_features(self) -> bool:
        """Whether examples that are left out had a say."""
        return not math.isnan(self.choice.r2)

    def __repr__(self) -> str:
        return f"Calibration({self})"

    def __str__(self) -> str:
        if self.process:
            return f"{100 * self.process:.0f} % of the process"
        one = self.choice
        words = f"covariance × {one.scale:.3g}, logits × {one.a:.3g}"
        return words + (f", labels of near inputs × {one.b:.3g}" if one.b else "")

    @property
    def figures(self) -> str:
        """What it was chosen by, in words."""
        one = self.choice
        if self.process:
            return "a weight that is the same for all fits"
        if self.held_out:
            found = f"−log p {one.left_out:.4g} where the training data's choice has {one.network:.4g}"
            return f"by {self.held_out:,} held-out labels: {found}"
        words = f"its training data cost {one.premium:.3g} nats more a row"
        if not self.by_features:
            return words
        return (
            f"{words}; left out, −log p {one.left_out:.4g} where the network has {one.network:.4g}; near inputs "
            f"foretell its logits with R² {one.r2:.2f}"
        )

    @property
    def findings(self) -> tuple[str, ...]:
        """What a user should know of how it was chosen."""
        one = self.choice
        if self.process or self.held_out:
            return ()
        if not self.by_features:
            why = "its inputs have no features that examples could be left out by"
        elif one.r2 < HALF:
            why = f"near inputs foretell little of what the network says (R² {one.r2:.2f})"
        elif self.n > FEW and not one.b:
            why = f"with {self.n:,} examples a network knows more than near inputs do"
        else:
            return ()
        return (
            f"how sure it may be was chosen by what that costs on its own training data ({one.premium:.3g} nats a "
            f"row), as {why}. A network that was held back in training (strong weight decay with normalization) may "
            "end too modest: with held-out labels, call tuned(method='validation', data=...)",
        )

    def to(self, device: torch.device) -> Calibration:
        """On a device."""
        if self.features is None or self.labels is None:
            return self
        features = InputFeatures(self.features.center.to(device), self.features.scale.to(device))
        moved = {name: getattr(self.labels, name).to(device) for name in KEPT}
        return replace(self, features=features, labels=replace(self.labels, **moved))


def with_process(n: int) -> Calibration:
    """For numbers: three parts of the network's outputs, one of the process's. The weight was chosen on five sets
    (docs/studies/regressors.md); leave-one-out cannot choose it: the process's features have seen the targets."""
    return Calibration(Choice(1.0, 1.0, 0.0, 0.0), n, process=PROCESS)


@torch.inference_mode(False)
def calibrate(
    posterior: Gaussian, likelihood: Likelihood, batches: Iterable[Any], n: int, progress: bool = False
) -> Calibration:
    """Chosen by the data of the fit, n examples. The posterior is that of temperature 1; the likelihood makes
    observations of labels, as "dirichlet" does."""
    seen = read(posterior, likelihood, batches, n, progress)
    known = (seen.f, seen.e, seen.y, seen.n)
    if seen.network is None or seen.targets is None:
        return Calibration(choose(CalibrationRows(likelihood.predictive, *known)), seen.n)
    choice = choose(CalibrationRows(likelihood.predictive, *known, seen.draws, seen.r2, seen.targets.mean, seen.doubt))
    return Calibration(choice, seen.n, seen.features, seen.targets) if choice.b else Calibration(choice, seen.n)


# -- files -----------------------------------------------------------------------------------------------------------


def pack(calibration: Calibration | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """As tensors and a header."""
    if calibration is None:
        return {}, {"calibration": None}
    numbers = {key: None if math.isnan(v) else v for key, v in pack_plain(calibration.choice).items()}
    tensors: dict[str, Tensor] = {}
    if calibration.features is not None and calibration.labels is not None:
        tensors = {f"calibration.{name}": getattr(calibration.features, name) for name in ("center", "scale")}
        tensors |= {f"calibration.{name}": getattr(calibration.labels, name) for name in KEPT}
        tensors["calibration.waves"] = calibration.features.fingerprint
    told = {"n": calibration.n, "process": calibration.process, "held_out": calibration.held_out}
    return tensors, {"calibration": {"choice": numbers, **told}}


def unpack(entries: Entries, held: Tensors) -> Calibration | None:
    """Checked against itself."""
    spec = entries.take("calibration", "dict | None")
    if spec is None:
        return None
    inner = Entries(spec)
    numbers, n = inner.take("choice", "dict"), inner.take("n", "int", 1)
    process, held_out = inner.take("process", "float", 0.0, 1.0), inner.take("held_out", "int", 0)
    inner.done()
    if set(numbers) != {one.name for one in fields(Choice)}:
        raise BrokenFile(f"its calibration has the numbers {list(numbers)}")
    numbers = {key: math.nan if v is None else v for key, v in numbers.items()}
    choice = Choice(**unpack_plain(Choice, numbers, "its calibration"))
    if not (0 < choice.scale <= 1 and 0 < choice.a <= (MOST_SURE if held_out else 1) and 0 <= choice.b < math.inf):
        raise BrokenFile(f"its calibration multiplies by {choice.scale}, {choice.a} and {choice.b}")
    if process and (choice.b or choice.a != 1):
        raise BrokenFile("its calibration is of classes, and mixes a process in")
    if not choice.b:
        return Calibration(choice, n, process=process, held_out=held_out)
    center, double = held.finite("calibration.center", dtype=torch.float64), torch.float64
    offset = held.finite("calibration.offset", dtype=double)
    if center.ndim != 1 or offset.ndim != 1:
        raise BrokenFile("its calibration has no vectors of inputs and outputs")
    scale, c, d = held.finite("calibration.scale", (len(center),), double), len(offset), COUNT + 1
    weights = held.finite("calibration.weights", (d, c), double)
    between, root = held.finite("calibration.between", (c, c), double), held.finite("calibration.root", (d, d), double)
    none = offset.new_zeros(0)  # of rows that are left out
    labels, features = RidgeFit(weights, offset, between, root, none, none, math.nan), InputFeatures(center, scale)
    waves = held.finite("calibration.waves", (2,), double)
    if not torch.allclose(waves, features.fingerprint, rtol=1e-9):
        raise BrokenFile("its calibration is by other random features than this PyTorch makes of the same seed")
    return Calibration(choice, n, features, labels, held_out=held_out)
