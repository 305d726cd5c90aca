"""Iterative solvers: callables and tensors in, a result with its residual or standard error out; no operators."""

from lapwing.solvers.cg import Solution, cg
from lapwing.solvers.estimate import Estimate
from lapwing.solvers.lanczos import Lanczos, Quadrature, quadrature, slq
from lapwing.solvers.nystrom import Nystrom

__all__ = ["Estimate", "Lanczos", "Nystrom", "Quadrature", "Solution", "cg", "quadrature", "slq"]
