"""The network as a Gaussian process: by its tangent kernel, features of it, inducing inputs, and at infinite width."""

from lapwing.gp import infinite
from lapwing.gp.ella import Ella, ella
from lapwing.gp.empirical import kernel
from lapwing.gp.functional import Functional, functional

__all__ = ["Ella", "Functional", "ella", "functional", "infinite", "kernel"]
