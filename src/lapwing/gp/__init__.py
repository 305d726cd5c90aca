"""The network as a Gaussian process, by features of its tangent kernel."""

from lapwing.gp.ella import Ella, ella

__all__ = ["Ella", "ella"]
