"""Priors over the weights."""

from lapwing.priors.gaussian import Gaussian

__all__ = ["Gaussian"]
