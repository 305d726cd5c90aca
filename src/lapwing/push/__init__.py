"""From a posterior over weights to outputs at new inputs: one verb, one file an operator."""

from lapwing.push import (  # noqa: F401  register
    blocks,
    dense,
    diagonal,
    eigen_kronecker,
    kronecker,
    root,
    streamed,
    whitened,
)
from lapwing.push.graph import graphed, together
from lapwing.push.runs import LARGEST, At, in_pieces
from lapwing.push.streamed import pushed
from lapwing.push.verb import push

__all__ = ["LARGEST", "At", "graphed", "in_pieces", "push", "pushed", "together"]
