"""The laws that every part keeps, as one call for a part of your own: it returns, or says which laws are broken.

check_operator(op, dense)       every verb of `operators.linalg`, against dense algebra
check_structure(structure)      sums that add, operator, evidence, predictions and files, against dense autograd
check_likelihood(likelihood)    score, curvature, sums and draws, against autograd of its log-density
check_posterior(posterior, x)   outputs, their nodes and draws, against each other
check_prior(prior)              local Gaussian, draws, normalization and evidence, against autograd of its log-density

All in float64, on the CPU, and with torch alone. A broken law is an `errors.BrokenLaw`.
"""

from lapwing.testing.likelihoods import check_likelihood
from lapwing.testing.operators import check_operator
from lapwing.testing.posteriors import check_posterior
from lapwing.testing.priors import check_prior
from lapwing.testing.structures import check_structure

__all__ = ["check_likelihood", "check_operator", "check_posterior", "check_prior", "check_structure"]
