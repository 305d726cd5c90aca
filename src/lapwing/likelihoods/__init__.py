"""Likelihoods: what the network's outputs mean."""

from lapwing.likelihoods.base import Likelihood
from lapwing.likelihoods.bernoulli import Bernoulli
from lapwing.likelihoods.categorical import Categorical
from lapwing.likelihoods.correlated import CorrelatedGaussian
from lapwing.likelihoods.counts import NegativeBinomial, Poisson
from lapwing.likelihoods.custom import Custom
from lapwing.likelihoods.dirichlet import Dirichlet, DirichletBernoulli
from lapwing.likelihoods.gaussian import Gaussian
from lapwing.likelihoods.heteroscedastic import HeteroscedasticGaussian, MeanLogVariance, NaturalHead
from lapwing.likelihoods.known_noise import KnownNoise
from lapwing.likelihoods.log_ratio import LogRatio
from lapwing.likelihoods.ordinal import Ordinal
from lapwing.likelihoods.preference import BradleyTerry, Pairs
from lapwing.likelihoods.reweighted import ClassWeighted, Ignoring, Weighted
from lapwing.likelihoods.several import Several
from lapwing.likelihoods.soft import LabelSmoothing, SoftLabels
from lapwing.likelihoods.student import StudentT

__all__ = [
    "Bernoulli",
    "BradleyTerry",
    "Categorical",
    "ClassWeighted",
    "CorrelatedGaussian",
    "Custom",
    "Dirichlet",
    "DirichletBernoulli",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Ignoring",
    "KnownNoise",
    "LabelSmoothing",
    "Likelihood",
    "LogRatio",
    "MeanLogVariance",
    "NaturalHead",
    "NegativeBinomial",
    "Ordinal",
    "Pairs",
    "Poisson",
    "Several",
    "SoftLabels",
    "StudentT",
    "Weighted",
]
