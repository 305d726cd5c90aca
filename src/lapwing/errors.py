"""The errors and warnings of Lapwing. Each message says what was asked, what was got, and what to do."""

from __future__ import annotations


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
