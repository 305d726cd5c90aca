"""Iterative solvers: callables and tensors in, a result with its residual or standard error out; no operators."""

from lapwing.solvers.cg import Solution, cg
from lapwing.solvers.estimate import Estimate
from lapwing.solvers.lanczos import Lanczos, slq

__all__ = ["Estimate", "Lanczos", "Solution", "cg", "slq"]
