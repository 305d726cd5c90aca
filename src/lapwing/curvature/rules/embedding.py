"""Embedding: a linear map from rows of the identity, given by their numbers; the weight is stored (i, o).

EmbeddingBag: z = Σ_j w_j W[id_j], a linear map of a bag's (weighted) counts. Bags of one length, (n, length), with
modes "sum" and "mean". The maximum is no linear map shared by all outputs, and bags cut by offsets are not examples in
the first dimension: those have no rule.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lapwing.curvature.rules.base import ComposedRule, Keep, Rule, Site, register
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


@register(nn.EmbeddingBag)
class EmbeddingBagRule(ComposedRule):
    def sites(self, module: nn.EmbeddingBag) -> tuple[Site, ...]:
        if module.mode == "max":
            return ()
        return (Site("bag", "weight", None, (1, module.embedding_dim, module.num_embeddings), transposed=True),)

    def forward(
        self,
        module: nn.EmbeddingBag,
        keep: Keep,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        out = type(module).forward(module, input, offsets, per_sample_weights)
        if offsets is not None or input.ndim != 2:
            return out
        live = torch.ones_like(input) if module.padding_idx is None else input != module.padding_idx
        weights = live.to(out) if per_sample_weights is None else live * per_sample_weights.to(out)
        if module.mode == "mean":
            weights = weights / live.to(out).sum(-1, keepdim=True).clamp(min=1)
        counts = out.new_zeros(len(input), module.num_embeddings).scatter_add(1, input.long(), weights.detach())
        z = out.reshape(len(input), 1, 1, -1)
        keep("bag", counts.reshape(len(input), 1, 1, -1), z)
        return z.reshape(out.shape)
