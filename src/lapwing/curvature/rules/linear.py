"""Linear: z = W a + bias on the last dimension; all other dimensions but the batch are shared positions.

Bilinear: z_o = xᵀ W_o x' + bias_o, a linear map of the products x_i x'_j.
"""

from __future__ import annotations

from torch import Tensor, nn

from lapwing.curvature.rules.base import ComposedRule, Keep, Rule, Site, fold, register


@register(nn.Linear)
class LinearRule(Rule):
    def shape(self, module: nn.Linear) -> tuple[int, int, int]:
        return 1, module.out_features, module.in_features

    def inputs(self, module: nn.Linear, x: Tensor, n: int) -> Tensor:
        return fold(x, n, 1).unsqueeze(2)

    def outputs(self, module: nn.Linear, g: Tensor, n: int) -> Tensor:
        return g.reshape(len(g), n, -1, 1, g.shape[-1])


@register(nn.Bilinear)
class BilinearRule(ComposedRule):
    def sites(self, module: nn.Bilinear) -> tuple[Site, ...]:
        shape = 1, module.out_features, module.in1_features * module.in2_features
        return (Site("products", "weight", "bias", shape),)

    def forward(self, module: nn.Bilinear, keep: Keep, input1: Tensor, input2: Tensor) -> Tensor:
        out = nn.functional.bilinear(input1, input2, module.weight, module.bias)
        products = (input1.unsqueeze(-1) * input2.unsqueeze(-2)).flatten(-2)
        rows = len(out) if out.ndim > 1 else 1
        z = out.reshape(rows, -1, 1, out.shape[-1])
        keep("products", products.reshape(rows, -1, 1, products.shape[-1]), z)
        return z.reshape(out.shape)
