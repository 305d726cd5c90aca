"""Approximate posteriors held to the true one, by Hamiltonian Monte Carlo that is seen to have converged."""

from lapwing.truth.bench import Bench, TruthBench, truth_bench
from lapwing.truth.methods import METHODS, Problem, Trial
from lapwing.truth.reference import Convergence

__all__ = ["METHODS", "Bench", "Convergence", "Problem", "Trial", "TruthBench", "truth_bench"]
