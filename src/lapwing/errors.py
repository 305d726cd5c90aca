"""The errors and warnings of Lapwing. Each message says what was asked, what was got, and what to do."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import warnings

import torch

OURS = tuple(os.path.dirname(path) + os.sep for path in (__file__, torch.__file__))  # whose lines are not the user's
OURS += (functools.__file__, contextlib.__file__)


class LapwingError(Exception):
    """Base of every error that Lapwing raises on purpose."""


class InvalidValue(LapwingError, ValueError):
    """An argument, a batch, a label or a file has a value that cannot be used."""


class BrokenFile(InvalidValue):
    """A file does not hold what it should: it is cut short, was changed, or does not belong together."""


class Unsupported(LapwingError, TypeError):
    """Two parts were combined that have no rule for each other; the message names alternatives."""


class NotPositiveDefinite(LapwingError, ArithmeticError):
    """A precision that must be positive definite is not; the message names its least eigenvalue."""


class NotConverged(LapwingError, RuntimeError):
    """An iteration ended without meeting its stopping rule."""


class NetworkFailed(LapwingError, RuntimeError):
    """The user's network raised on a batch; what it raised is the cause, and stands in the message."""


class RankFailed(LapwingError, RuntimeError):
    """Another process of the group failed, died or fell out of step."""


class BrokenLaw(LapwingError, AssertionError):
    """A part breaks laws of its protocol (`lapwing.testing`); the message names each, with its figures."""


class LapwingWarning(UserWarning):
    """Something the user should know about, that does not make the answer wrong."""


def warn(message: str) -> None:
    """A LapwingWarning that points at the line of the user's which led to it, however many of ours lie between."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(OURS):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, LapwingWarning, stacklevel=level)
