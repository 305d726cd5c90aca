"""Likelihoods: what the network's outputs mean."""

from lapwing.likelihoods.base import Likelihood
from lapwing.likelihoods.bernoulli import Bernoulli
from lapwing.likelihoods.categorical import Categorical
from lapwing.likelihoods.counts import NegativeBinomial, Poisson
from lapwing.likelihoods.gaussian import Gaussian
from lapwing.likelihoods.heteroscedastic import HeteroscedasticGaussian, MeanLogVariance, NaturalHead
from lapwing.likelihoods.ordinal import Ordinal
from lapwing.likelihoods.preference import BradleyTerry, Pairs
from lapwing.likelihoods.student import StudentT

__all__ = [
    "Bernoulli",
    "BradleyTerry",
    "Categorical",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Likelihood",
    "MeanLogVariance",
    "NaturalHead",
    "NegativeBinomial",
    "Ordinal",
    "Pairs",
    "Poisson",
    "StudentT",
]
