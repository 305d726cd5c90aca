"""Priors over the weights, and over a noise or a scale that is sampled with them."""

from lapwing.positive import Gamma, HalfCauchy
from lapwing.priors.base import Lifted, Prior
from lapwing.priors.bernoulli import Bernoulli
from lapwing.priors.correlated import Correlated, check_independent
from lapwing.priors.elementwise import Elementwise
from lapwing.priors.gaussian import Gaussian, from_weight_decay
from lapwing.priors.gprior import GPrior
from lapwing.priors.hierarchical import Hierarchical
from lapwing.priors.horseshoe import Horseshoe
from lapwing.priors.jeffreys import Jeffreys
from lapwing.priors.laplace import Laplace
from lapwing.priors.mixture import Mixture
from lapwing.priors.student import StudentT
from lapwing.priors.width import WidthScaled

__all__ = [
    "Bernoulli",
    "Correlated",
    "Elementwise",
    "GPrior",
    "Gamma",
    "Gaussian",
    "HalfCauchy",
    "Hierarchical",
    "Horseshoe",
    "Jeffreys",
    "Laplace",
    "Lifted",
    "Mixture",
    "Prior",
    "StudentT",
    "WidthScaled",
    "check_independent",
    "from_weight_decay",
]
