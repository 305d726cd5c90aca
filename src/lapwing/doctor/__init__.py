"""The doctor looks at a model, its data and a likelihood before any heavy work, and says what it finds.

It reads a few batches, runs a few of them through the network, changes nothing, and raises only where an argument
makes no sense; every problem that it can name is a finding.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from lapwing import api
from lapwing import data as loading
from lapwing.doctor.checks import loader_checks, model_checks, value_checks
from lapwing.doctor.outputs import dead_checks, likelihood_checks, output_checks, slope, training_checks
from lapwing.doctor.reading import read
from lapwing.doctor.report import Cost, Finding, Report
from lapwing.doctor.visit import Visit
from lapwing.errors import InvalidValue

__all__ = ["Cost", "Finding", "Report", "doctor"]


def doctor(
    model: nn.Module,
    data: Any,
    likelihood: Any,
    *,
    subset: Any = "all",
    forward: Any = None,
    memory_budget: int | None = None,
) -> Report:
    """Look at a problem before fitting; print what comes back.

    The arguments are those of `laplace`. memory_budget: bytes that the recommended call may take; by default what is
    free on the device. The model, its gradients and the user's random state are left as they were.
    """
