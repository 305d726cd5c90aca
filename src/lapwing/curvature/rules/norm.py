"""Scale and shift of normalization layers: z = w·x̂ + bias, one block of one input a channel (or element).

x̂ is the module's own output without its affine parameters: running statistics for batch norm (eval mode), the
statistics of the example for layer, group, instance and RMS norm.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from lapwing.curvature.rules.base import Rule, register


class ScaleRule(Rule):
    """One block of one input for each of c channels, which stand in dimension 1, (n, c, *positions)."""

    def channels(self, module: Any) -> int:
        """The number of channels c."""
        return module.num_features

    def normalized(self, module: Any, x: Tensor) -> Tensor:
        """What scale and bias are applied to, of the shape of x."""
        raise NotImplementedError

    def shape(self, module: Any) -> tuple[int, int, int]:
        return self.channels(module), 1, 1

    def inputs(self, module: Any, x: Tensor, n: int) -> Tensor:
        return self.last(module, self.normalized(module, x), n).unsqueeze(-1)

    def outputs(self, module: Any, g: Tensor, n: int) -> Tensor:
        return self.last(module, g.flatten(0, 1), len(g) * n).unflatten(0, (len(g), n)).unsqueeze(-1)

    def last(self, module: Any, x: Tensor, n: int) -> Tensor:
        """(n', c, *positions) as (n, s, c)."""
        return x.flatten(2).transpose(1, 2).reshape(n, -1, x.shape[1]) if x.ndim > 2 else x.reshape(n, -1, x.shape[1])


@register(_BatchNorm)
class BatchNormRule(ScaleRule):
    def normalized(self, module: Any, x: Tensor) -> Tensor:
        return F.batch_norm(x, module.running_mean, module.running_var, eps=module.eps)


@register(nn.GroupNorm)
class GroupNormRule(ScaleRule):
    def channels(self, module: nn.GroupNorm) -> int:
        return module.num_channels

    def normalized(self, module: nn.GroupNorm, x: Tensor) -> Tensor:
        return F.group_norm(x, module.num_groups, eps=module.eps)


@register(_InstanceNorm)
class InstanceNormRule(ScaleRule):
    def normalized(self, module: Any, x: Tensor) -> Tensor:
        own = module.running_mean is None
        return F.instance_norm(x, module.running_mean, module.running_var, use_input_stats=own, eps=module.eps)


class ElementRule(ScaleRule):
    """The channels are elements of the last dimensions, (n, *positions, *normalized_shape)."""

    def channels(self, module: Any) -> int:
        return math.prod(module.normalized_shape)

    def last(self, module: Any, x: Tensor, n: int) -> Tensor:
        return x.reshape(n, -1, self.channels(module))


@register(nn.LayerNorm)
class LayerNormRule(ElementRule):
    def normalized(self, module: nn.LayerNorm, x: Tensor) -> Tensor:
        return F.layer_norm(x, module.normalized_shape, eps=module.eps)


@register(nn.RMSNorm)
class RMSNormRule(ElementRule):
    def normalized(self, module: nn.RMSNorm, x: Tensor) -> Tensor:
        return F.rms_norm(x, list(module.normalized_shape), eps=module.eps)
