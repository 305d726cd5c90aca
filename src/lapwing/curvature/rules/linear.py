"""Linear: z = W a + bias on the last dimension; all other dimensions but the batch are shared positions."""

from __future__ import annotations

from torch import Tensor, nn

from lapwing.curvature.rules.base import Rule, fold, register


@register(nn.Linear)
class LinearRule(Rule):
    def shape(self, module: nn.Linear) -> tuple[int, int, int]:
        return 1, module.out_features, module.in_features

    def inputs(self, module: nn.Linear, x: Tensor, n: int) -> Tensor:
        return fold(x, n, 1).unsqueeze(2)

    def outputs(self, module: nn.Linear, g: Tensor, n: int) -> Tensor:
        return g.reshape(len(g), n, -1, 1, g.shape[-1])
