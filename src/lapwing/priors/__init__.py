"""Priors over the weights."""

from lapwing.priors.base import Prior
from lapwing.priors.gaussian import Gaussian
from lapwing.priors.gprior import GPrior

__all__ = ["GPrior", "Gaussian", "Prior"]
