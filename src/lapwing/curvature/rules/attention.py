"""MultiheadAttention: the projections of queries, keys and values, and that of the heads' output, which the module's
own kernel hides from hooks.

The packed projection (3e, e) is three blocks, with queries, keys and values as their inputs: their positions must
be as many (self-attention; else it has no rule). Projections of inputs of several widths are three sites, their joint
bias a parameter by itself. Between the projections runs torch's own function, with identities in their place: masks,
causality and extra keys are all its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lapwing.curvature.rules.base import ComposedRule, Keep, Site, register


@register(nn.MultiheadAttention)
class AttentionRule(ComposedRule):
    def sites(self, module: nn.MultiheadAttention) -> tuple[Site, ...]:
        e = module.embed_dim
        out = Site("out_proj", "out_proj.weight", "out_proj.bias", (1, e, e))
        if module._qkv_same_embed_dim:
            return Site("in_proj", "in_proj_weight", "in_proj_bias", (3, e, e)), out
        widths = (("q", e), ("k", module.kdim or e), ("v", module.vdim or e))
        return *(Site(f"{name}_proj", f"{name}_proj_weight", None, (1, e, i)) for name, i in widths), out

    def forward(
        self,
        module: nn.MultiheadAttention,
        keep: Keep,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> Any:
        if query.ndim != 3 or query.is_nested:
            return type(module).forward(
                module, query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        inputs = [x if module.batch_first else x.transpose(0, 1) for x in (query, key, value)]  # (n, s, e)
        projected = _projected(module, keep, inputs)
        e = module.embed_dim
        identity = torch.eye(e, dtype=query.dtype, device=query.device)
        q, k, v = (x.transpose(0, 1) for x in projected)
        heads, weights = F.multi_head_attention_forward(
            q,
            k,
            v,
            embed_dim_to_check=e,
            num_heads=module.num_heads,
            in_proj_weight=None,
            in_proj_bias=None,
            bias_k=module.bias_k,
            bias_v=module.bias_v,
            add_zero_attn=module.add_zero_attn,
            dropout_p=0.0,
            out_proj_weight=identity,
            out_proj_bias=None,
            training=False,
            key_padding_mask=key_padding_mask,
            need_weights=need_weights,
            attn_mask=attn_mask,
            use_separate_proj_weight=True,
            q_proj_weight=identity,
            k_proj_weight=identity,
            v_proj_weight=identity,
            average_attn_weights=average_attn_weights,
            is_causal=is_causal,
        )
        a = heads.transpose(0, 1)
        z = F.linear(a, module.out_proj.weight, module.out_proj.bias).unsqueeze(2)
        keep("out_proj", a.unsqueeze(2), z)
        out = z.squeeze(2)
        return (out if module.batch_first else out.transpose(0, 1)), weights


def _projected(module: nn.MultiheadAttention, keep: Keep, inputs: list[Tensor]) -> list[Tensor]:
    """Queries, keys and values as the heads see them, (n, s, e) each."""
    biases = [None] * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    if module._qkv_same_embed_dim:
        linear = zip(inputs, module.in_proj_weight.chunk(3), biases, strict=True)
        each = [F.linear(x, w, b) for x, w, b in linear]
        if len({x.shape[1] for x in inputs}) > 1:
            return each
        z = torch.stack(each, 2)  # (n, s, 3, e)
        keep("in_proj", torch.stack(inputs, 2), z)
        return list(z.unbind(2))
    out = []
    for name, x, b in zip("qkv", inputs, biases, strict=True):
        z = F.linear(x, getattr(module, f"{name}_proj_weight")).unsqueeze(2)
        keep(f"{name}_proj", x.unsqueeze(2), z)
        out.append(z.squeeze(2) if b is None else z.squeeze(2) + b)
    return out
