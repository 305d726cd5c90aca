"""Likelihoods: what the network's outputs mean."""

from lapwing.likelihoods.base import Likelihood
from lapwing.likelihoods.bernoulli import Bernoulli
from lapwing.likelihoods.categorical import Categorical
from lapwing.likelihoods.gaussian import Gaussian

__all__ = ["Bernoulli", "Categorical", "Gaussian", "Likelihood"]
