"""Iterative solvers: callables and tensors in, a result with its residual or standard error out; no operators."""

from lapwing.solvers.cg import Solution, cg

__all__ = ["Solution", "cg"]
