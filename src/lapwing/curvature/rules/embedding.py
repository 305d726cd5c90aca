"""Embedding: a linear map from rows of the identity, given by their numbers; the weight is stored (i, o)."""

from __future__ import annotations

from torch import Tensor, nn

from lapwing.curvature.rules.base import Rule, register
from lapwing.curvature.rules.view import OneHotInputs


@register(nn.Embedding)
class EmbeddingRule(Rule):
    transposed = True

    def shape(self, module: nn.Embedding) -> tuple[int, int, int]:
        return 1, module.embedding_dim, module.num_embeddings

    def inputs(self, module: nn.Embedding, x: Tensor, n: int) -> OneHotInputs:
        return OneHotInputs(x.reshape(n, -1), module.num_embeddings, module.padding_idx)

    def outputs(self, module: nn.Embedding, g: Tensor, n: int) -> Tensor:
        return g.reshape(len(g), n, -1, 1, g.shape[-1])
