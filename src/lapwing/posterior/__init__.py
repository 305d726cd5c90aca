"""Posteriors: what is believed of a network after data, and how it becomes outputs."""

from lapwing.posterior.base import Posterior, register
from lapwing.posterior.chains import Chains
from lapwing.posterior.conditioning import condition, curvature, placed, prior_precision
from lapwing.posterior.diagnostics import Diagnostics
from lapwing.posterior.gaussian import Gaussian
from lapwing.posterior.mixture import Mixture
from lapwing.posterior.particles import Particles
from lapwing.posterior.process import Process

__all__ = [
    "Chains",
    "Diagnostics",
    "Gaussian",
    "Mixture",
    "Particles",
    "Posterior",
    "Process",
    "condition",
    "curvature",
    "placed",
    "prior_precision",
    "register",
]
