"""Layer rules: how each kind of module is a set of shared linear maps. One file a family."""

from lapwing.curvature.rules import conv, embedding, linear, norm
from lapwing.curvature.rules.base import Rule, register, rule_for
from lapwing.curvature.rules.view import DenseInputs, OneHotInputs

__all__ = ["DenseInputs", "OneHotInputs", "Rule", "conv", "embedding", "linear", "norm", "register", "rule_for"]
