"""Markov chain Monte Carlo over a network's weights: a file a method, each with its equation; walk.py is their loop."""

from lapwing.samplers.hmc import hmc
from lapwing.samplers.langevin import langevin
from lapwing.samplers.mala import mala
from lapwing.samplers.metropolis import metropolis
from lapwing.samplers.sghmc import sghmc
from lapwing.samplers.sgld import sgld

__all__ = ["hmc", "langevin", "mala", "metropolis", "sghmc", "sgld"]
