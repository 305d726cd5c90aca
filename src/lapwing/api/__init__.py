"""The Laplace object, and the verbs that make one."""

from lapwing.api.object import Laplace
from lapwing.api.verbs import from_state, laplace, load

__all__ = ["Laplace", "from_state", "laplace", "load"]
