"""The network as a Gaussian process: by features of its tangent kernel, and at infinite width."""

from lapwing.gp import infinite
from lapwing.gp.ella import Ella, ella

__all__ = ["Ella", "ella", "infinite"]
