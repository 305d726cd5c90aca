"""How far a structure is from the true curvature, by probes; at training inputs that are left out; in words."""

from lapwing.certify.certificate import Certificate
from lapwing.certify.comparison import certify

__all__ = ["Certificate", "certify"]
