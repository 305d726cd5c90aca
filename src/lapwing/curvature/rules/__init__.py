"""Layer rules: how each kind of module is a set of shared linear maps. One file a family."""

from lapwing.curvature.rules import attention, conv, embedding, linear, norm, recurrent  # noqa: F401 - they register
from lapwing.curvature.rules.base import ComposedRule, Rule, Site, register, rule_for
from lapwing.curvature.rules.view import DenseInputs, OneHotInputs

__all__ = ["ComposedRule", "DenseInputs", "OneHotInputs", "Rule", "Site", "register", "rule_for"]
