"""Likelihoods: what the network's outputs mean."""

from lapwing.likelihoods.base import Likelihood
from lapwing.likelihoods.bernoulli import Bernoulli
from lapwing.likelihoods.categorical import Categorical
from lapwing.likelihoods.gaussian import Gaussian
from lapwing.likelihoods.heteroscedastic import HeteroscedasticGaussian, MeanLogVariance, NaturalHead

__all__ = [
    "Bernoulli",
    "Categorical",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Likelihood",
    "MeanLogVariance",
    "NaturalHead",
]
