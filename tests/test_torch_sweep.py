"""Every differentiable module and function of torch.nn in a small network: each product with the Jacobian, and the
curvature of a fit, are those of plain autograd, one output at a time.

torch's batching rules and forward-mode rules are not all right, and what is wrong hides where sizes coincide. So each
network runs with numbers of examples, outputs and cotangents that differ, and with equal ones. A module or function
that is neither in a table nor left out for a reason fails a test: new versions of torch are noticed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import helpers
import lapwing as lw
from helpers import draw as normal
from lapwing.operators import linalg

Shape = tuple[int, ...]
V, M, S, I, D = (4,), (2, 3), (2, 6), (2, 4, 6), (2, 2, 4, 2)  # of an example: vector, matrix, signal, image, volume


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module] = nn.Identity
    shapes: tuple[Shape, ...] = (V,)  # of what the layer is called on
    call: Callable[..., Any] = field(default=lambda layer, *x: layer(*x))


class Around(nn.Module):
    """A layer between two linear ones, which make what it is called on."""

    def __init__(self, case: Case, outputs: int) -> None:
        super().__init__()
        self.case, self.layer = case, case.make()
        self.first = nn.Linear(3, sum(torch.Size(shape).numel() for shape in case.shapes))
        with torch.no_grad():
            width = self.body(torch.zeros(2, 3)).shape[1]
        self.last = nn.Linear(width, outputs)

    def body(self, x: Tensor) -> Tensor:
        parts = self.first(x).split([torch.Size(shape).numel() for shape in self.case.shapes], 1)
        made = [part.reshape(len(x), *shape) for part, shape in zip(parts, self.case.shapes, strict=True)]
        out = self.case.call(self.layer, *made)
        return torch.cat([t.reshape(len(x), -1) for t in (out if isinstance(out, tuple) else (out,))], 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(x))


def of(make: Callable[..., nn.Module], *args: Any, on: Any = V, call: Any = None, **options: Any) -> Case:
    shapes = on if isinstance(on[0], tuple) else (on,)
    case = Case(lambda: make(*args, **options), shapes)
    return case if call is None else Case(case.make, shapes, call)


def by(function: Callable[..., Any], *on: Shape) -> Case:
    """A function of tensors of these shapes, (n, *shape) each."""
    return Case(shapes=on or (V,), call=lambda _, *x: function(*x))


def label(x: Tensor, classes: int) -> Tensor:
    """A class of each example, told by its own numbers."""
    return (3 * x.detach().flatten(1)[:, 0].abs()).long() % classes


def ids(x: Tensor) -> Tensor:
    """Two integers below 5 of each example."""
    return (4 * x.detach().flatten(1)[:, :2].abs()).long() % 5


def batch_second(layer: Any, *x: Tensor) -> Tensor:
    return layer(*(t.transpose(0, 1) for t in x)).transpose(0, 1)


def unpooled(layer: Any, x: Tensor, dimensions: int) -> Tensor:
    pool = getattr(F, f"max_pool{dimensions}d")
    return layer(*pool(x, 2, return_indices=True))


def fixed(kind: Any, dimensions: int) -> nn.Module:
    """A pooling in random regions, always the same ones, for one example or two."""

    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            sample = torch.full((len(x), 2, dimensions), 0.3, dtype=x.dtype)
            return kind((1,) * (dimensions - 2) + (2, 2), output_size=2, _random_samples=sample)(x)

    return Fixed()


def constant(*shape: int) -> Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)


ACTIVATIONS = (
    "CELU", "ELU", "GELU", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "LeakyReLU", "LogSigmoid", "Mish",
    "PReLU", "RReLU", "ReLU", "ReLU6", "SELU", "SiLU", "Sigmoid", "Softplus", "Softshrink", "Softsign", "Tanh",
    "Tanhshrink", "Dropout", "AlphaDropout", "FeatureAlphaDropout", "Identity", "Flatten",
)  # fmt: skip

MODULES: dict[str, Case] = {
    **{name: of(getattr(nn, name)) for name in ACTIVATIONS},
    "Threshold": of(nn.Threshold, 0.1, -0.3),
    "GLU": of(nn.GLU),
    "LogSoftmax": of(nn.LogSoftmax, -1),
    "Softmax": of(nn.Softmax, -1),
    "Softmin": of(nn.Softmin, -1),
    "Softmax2d": of(nn.Softmax2d, on=I),
    "Unflatten": of(nn.Unflatten, 1, (2, 2)),
    "Dropout1d": of(nn.Dropout1d, on=S),
    "Dropout2d": of(nn.Dropout2d, on=I),
    "Dropout3d": of(nn.Dropout3d, on=D),
    # linear maps
    "Linear": of(nn.Linear, 4, 3),
    "Bilinear": of(nn.Bilinear, 4, 3, 2, on=(V, (3,))),
    "Conv1d": of(nn.Conv1d, 2, 3, 2, on=S),
    "Conv2d": of(nn.Conv2d, 2, 2, 2, groups=2, on=I),
    "Conv3d": of(nn.Conv3d, 2, 3, 2, on=D),
    "ConvTranspose1d": of(nn.ConvTranspose1d, 2, 3, 2, on=S),
    "ConvTranspose2d": of(nn.ConvTranspose2d, 2, 3, 2, stride=2, on=I),
    "ConvTranspose3d": of(nn.ConvTranspose3d, 2, 3, 2, on=D),
    "Embedding": of(nn.Embedding, 5, 3, call=lambda layer, x: layer(ids(x)) * x.sum(1)[:, None, None]),
    "EmbeddingBag": of(nn.EmbeddingBag, 5, 3, call=lambda layer, x: layer(ids(x)) * x.sum(1)[:, None]),
    # normalization
    "BatchNorm1d": of(nn.BatchNorm1d, 2, on=S),
    "BatchNorm2d": of(nn.BatchNorm2d, 2, on=I),
    "BatchNorm3d": of(nn.BatchNorm3d, 2, on=D),
    "SyncBatchNorm": of(nn.SyncBatchNorm, 2, on=I),
    "InstanceNorm1d": of(nn.InstanceNorm1d, 2, affine=True, on=S),
    "InstanceNorm2d": of(nn.InstanceNorm2d, 2, affine=True, on=I),
    "InstanceNorm3d": of(nn.InstanceNorm3d, 2, affine=True, on=D),
    "GroupNorm": of(nn.GroupNorm, 2, 4, on=(4, 3)),
    "LayerNorm": of(nn.LayerNorm, 4),
    "RMSNorm": of(nn.RMSNorm, 4),
    "LocalResponseNorm": of(nn.LocalResponseNorm, 2, on=I),
    "CrossMapLRN2d": of(nn.CrossMapLRN2d, 2, on=I),
    # pooling and shapes
    **{f"{kind}Pool{d}d": of(getattr(nn, f"{kind}Pool{d}d"), 2, on=on)
       for d, on in ((1, S), (2, I), (3, D)) for kind in ("Avg", "Max", "AdaptiveAvg", "AdaptiveMax")},
    **{f"LPPool{d}d": of(getattr(nn, f"LPPool{d}d"), 3, 2, on=on, call=lambda m, x: m(x.exp()))
       for d, on in ((1, S), (2, I), (3, D))},
    "FractionalMaxPool2d": of(fixed, nn.FractionalMaxPool2d, 2, on=I),
    "FractionalMaxPool3d": of(fixed, nn.FractionalMaxPool3d, 3, on=(2, 3, 4, 4)),
    **{f"MaxUnpool{d}d": of(getattr(nn, f"MaxUnpool{d}d"), 2, on=on, call=lambda layer, x, d=d: unpooled(layer, x, d))
       for d, on in ((1, S), (2, I), (3, D))},
    **{f"{kind}Pad{d}d": of(getattr(nn, f"{kind}Pad{d}d"), 1, *((0.5,) if kind == "Constant" else ()), on=on)
       for d, on in ((1, S), (2, I), (3, D)) for kind in ("Circular", "Constant", "Reflection", "Replication", "Zero")},
    "ChannelShuffle": of(nn.ChannelShuffle, 2, on=(4, 3)),
    "PixelShuffle": of(nn.PixelShuffle, 2, on=(4, 2, 3)),
    "PixelUnshuffle": of(nn.PixelUnshuffle, 2, on=(1, 4, 2)),
    "Fold": of(nn.Fold, (3, 4), 2, on=(8, 6)),
    "Unfold": of(nn.Unfold, 2, on=I),
    "Upsample": of(nn.Upsample, scale_factor=2, mode="bicubic", on=I),
    "UpsamplingBilinear2d": of(nn.UpsamplingBilinear2d, scale_factor=2, on=I),
    "UpsamplingNearest2d": of(nn.UpsamplingNearest2d, scale_factor=2, on=I),
    # sequences
    "RNN": of(nn.RNN, 3, 2, batch_first=True, on=M, call=lambda layer, x: layer(x)[0]),
    "GRU": of(nn.GRU, 3, 2, batch_first=True, on=M, call=lambda layer, x: layer(x)[0]),
    "LSTM": of(nn.LSTM, 3, 2, batch_first=True, on=M, call=lambda layer, x: layer(x)[0]),
    "RNNCell": of(nn.RNNCell, 4, 2),
    "GRUCell": of(nn.GRUCell, 4, 2),
    "LSTMCell": of(nn.LSTMCell, 4, 2),
    "MultiheadAttention": of(nn.MultiheadAttention, 4, 2, batch_first=True, on=(3, 4),
                             call=lambda layer, x: layer(x, x, x)[0]),
    "TransformerEncoderLayer": of(nn.TransformerEncoderLayer, 4, 2, 3, batch_first=True, on=(3, 4)),
    "TransformerDecoderLayer": of(nn.TransformerDecoderLayer, 4, 2, 3, on=((3, 4), (2, 4)), call=batch_second),
    "TransformerEncoder": of(lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 3, batch_first=True), 1),
                             on=(3, 4)),
    "TransformerDecoder": of(lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(4, 2, 3), 1),
                             on=((3, 4), (2, 4)), call=batch_second),
    "Transformer": of(nn.Transformer, 4, 2, 1, 1, 3, batch_first=True, on=((3, 4), (2, 4))),
    # similarities and losses, an example at a time
    "CosineSimilarity": of(nn.CosineSimilarity, on=(V, V)),
    "PairwiseDistance": of(nn.PairwiseDistance, on=(V, V)),
    **{name: of(getattr(nn, name), reduction="none", on=(V, V))
       for name in ("L1Loss", "MSELoss", "HuberLoss", "SmoothL1Loss", "PoissonNLLLoss")},
    "KLDivLoss": of(nn.KLDivLoss, reduction="none", on=(V, V), call=lambda m, a, b: m(a, b.exp())),
    "BCELoss": of(nn.BCELoss, reduction="none", on=(V, V), call=lambda m, a, b: m(a.sigmoid(), b.sigmoid())),
    "BCEWithLogitsLoss": of(nn.BCEWithLogitsLoss, reduction="none", on=(V, V)),
    "CrossEntropyLoss": of(nn.CrossEntropyLoss, reduction="none", label_smoothing=0.1,
                           call=lambda m, a: m(a, label(a, 4))),
    "NLLLoss": of(nn.NLLLoss, reduction="none", call=lambda m, a: m(a, label(a, 4))),
    "NLLLoss2d": of(nn.NLLLoss, reduction="none", on=I,
                    call=lambda m, a: m(a, label(a, 2)[:, None, None].expand(-1, 4, 6))),
    "GaussianNLLLoss": of(nn.GaussianNLLLoss, reduction="none", on=(V, V, V), call=lambda m, a, b, c: m(a, b, c.exp())),
    "SoftMarginLoss": of(nn.SoftMarginLoss, reduction="none", call=lambda m, a: m(a, torch.ones_like(a))),
    "HingeEmbeddingLoss": of(nn.HingeEmbeddingLoss, reduction="none", call=lambda m, a: m(a, -torch.ones_like(a))),
    "MarginRankingLoss": of(nn.MarginRankingLoss, 0.5, reduction="none", on=(V, V),
                            call=lambda m, a, b: m(a, b, torch.ones_like(a))),
    "CosineEmbeddingLoss": of(nn.CosineEmbeddingLoss, reduction="none", on=(V, V),
                              call=lambda m, a, b: m(a, b, torch.ones(len(a)).to(a))),
    "TripletMarginLoss": of(nn.TripletMarginLoss, reduction="none", on=(V, V, V)),
    "TripletMarginWithDistanceLoss": of(nn.TripletMarginWithDistanceLoss, reduction="none", on=(V, V, V)),
    "MultiMarginLoss": of(nn.MultiMarginLoss, reduction="none", call=lambda m, a: m(a, label(a, 4))),
    "MultiLabelMarginLoss": of(nn.MultiLabelMarginLoss, reduction="none",
                               call=lambda m, a: m(a, torch.tensor([[1, 3, -1, -1]]).expand(len(a), -1))),
    "MultiLabelSoftMarginLoss": of(nn.MultiLabelSoftMarginLoss, reduction="none",
                                   call=lambda m, a: m(a, torch.tensor([[1, 0, 0, 1]]).to(a).expand(len(a), -1))),
    "CTCLoss": of(nn.CTCLoss, reduction="none", on=(5, 3), call=lambda m, a: m(
        a.transpose(0, 1).log_softmax(-1), torch.tensor([[1, 2]]).expand(len(a), -1),
        torch.full((len(a),), 5), torch.full((len(a),), 2))),
    "AdaptiveLogSoftmaxWithLoss": of(nn.AdaptiveLogSoftmaxWithLoss, 4, 5, [2], call=lambda m, a: m.log_prob(a)),
    "LinearCrossEntropyLoss": of(nn.LinearCrossEntropyLoss, 4, 3, reduction="none",
                                 call=lambda m, a: m(a, label(a, 3))),
}  # fmt: skip

LAZY = "the same module once its shapes are known; uninitialized ones are refused by name"
NOT_MODULES = {
    **dict.fromkeys((name for name in dir(nn) if name.startswith("Lazy")), LAZY),
    **dict.fromkeys(("Module", "Container", "Sequential", "ModuleDict", "ModuleList"), "no operation of its own"),
    **dict.fromkeys(("ParameterDict", "ParameterList"), "no operation of its own"),
    **dict.fromkeys(("RNNBase", "RNNCellBase"), "abstract"),
    "DataParallel": "spreads a module over several GPUs",
}

# functions that modules of the table call
CALLED = {
    **{f"{kind}_pool{d}d": f"{name}Pool{d}d" for d in (1, 2, 3) for kind, name in (
        ("avg", "Avg"), ("max", "Max"), ("lp", "LP"),
        ("adaptive_avg", "AdaptiveAvg"), ("adaptive_max", "AdaptiveMax"))},
    **{f"{kind}{d}d": f"{name}{d}d" for d in (1, 2, 3) for kind, name in (
        ("conv", "Conv"), ("conv_transpose", "ConvTranspose"), ("dropout", "Dropout"), ("max_unpool", "MaxUnpool"))},
    **{f"fractional_max_pool{d}d": f"FractionalMaxPool{d}d" for d in (2, 3)},
    **{name.lower(): name for name in ACTIVATIONS if hasattr(F, name.lower())},
    "leaky_relu": "LeakyReLU",
    "alpha_dropout": "AlphaDropout", "feature_alpha_dropout": "FeatureAlphaDropout", "threshold": "Threshold",
    "glu": "GLU", "linear": "Linear", "bilinear": "Bilinear", "embedding": "Embedding", "embedding_bag": "EmbeddingBag",
    "log_softmax": "LogSoftmax", "softmax": "Softmax", "softmin": "Softmin", "channel_shuffle": "ChannelShuffle",
    "native_channel_shuffle": "ChannelShuffle", "pixel_shuffle": "PixelShuffle", "pixel_unshuffle": "PixelUnshuffle",
    "fold": "Fold", "unfold": "Unfold", "upsample": "Upsample", "interpolate": "Upsample",
    "upsample_bilinear": "UpsamplingBilinear2d", "upsample_nearest": "UpsamplingNearest2d",
    "instance_norm": "InstanceNorm2d", "group_norm": "GroupNorm", "local_response_norm": "LocalResponseNorm",
    "multi_head_attention_forward": "MultiheadAttention", "cosine_similarity": "CosineSimilarity",
    "pairwise_distance": "PairwiseDistance", "l1_loss": "L1Loss", "mse_loss": "MSELoss", "huber_loss": "HuberLoss",
    "smooth_l1_loss": "SmoothL1Loss", "kl_div": "KLDivLoss", "poisson_nll_loss": "PoissonNLLLoss",
    "binary_cross_entropy": "BCELoss", "binary_cross_entropy_with_logits": "BCEWithLogitsLoss",
    "cross_entropy": "CrossEntropyLoss", "nll_loss": "NLLLoss", "gaussian_nll_loss": "GaussianNLLLoss",
    "soft_margin_loss": "SoftMarginLoss", "hinge_embedding_loss": "HingeEmbeddingLoss",
    "margin_ranking_loss": "MarginRankingLoss", "cosine_embedding_loss": "CosineEmbeddingLoss",
    "triplet_margin_loss": "TripletMarginLoss", "triplet_margin_with_distance_loss": "TripletMarginWithDistanceLoss",
    "multi_margin_loss": "MultiMarginLoss", "multilabel_margin_loss": "MultiLabelMarginLoss",
    "multilabel_soft_margin_loss": "MultiLabelSoftMarginLoss", "ctc_loss": "CTCLoss",
    "linear_cross_entropy": "LinearCrossEntropyLoss",
}  # fmt: skip

FUNCTIONS: dict[str, Case] = {
    **{f"{name}_": by(lambda a, name=name: getattr(F, f"{name}_")(1 * a))
       for name in ("celu", "elu", "hardtanh", "leaky_relu", "relu", "rrelu", "selu")},
    "threshold_": by(lambda a: F.threshold_(1 * a, 0.1, -0.3)),
    **{f: by(lambda a, f=f: getattr(F, f)(a, 2)[0], on) for d, on in ((1, S), (2, I), (3, D))
       for f in (f"max_pool{d}d_with_indices", f"adaptive_max_pool{d}d_with_indices")},
    "affine_grid": by(lambda t: F.affine_grid(t, [len(t), 1, 3, 2], align_corners=False), (2, 3)),
    "grid_sample": by(lambda a, g: F.grid_sample(a, g.tanh(), align_corners=False), I, (3, 2, 2)),
    "conv_tbc": by(lambda a: torch.stack(F.conv_tbc(a.transpose(0, 1).contiguous(), constant(2, 2, 3).to(a),
                                                    constant(3).to(a)).unbind(1)), (4, 2)),
    "normalize": by(lambda a: F.normalize(a, dim=-1)),
    "pdist": by(lambda a: torch.stack([F.pdist(one) for one in a.unbind()]), (3, 2)),
    "scaled_dot_product_attention": by(F.scaled_dot_product_attention, (2, 3, 4), (2, 5, 4), (2, 5, 4)),
    "pad": by(lambda a: F.pad(a, (1, 0, 2, 1), mode="reflect"), I),
    "prelu": by(lambda a, b: F.prelu(a, constant(4).to(a)) * b, V, V),
    "layer_norm": by(lambda a: F.layer_norm(a, (4,))),
    "rms_norm": by(lambda a: F.rms_norm(a, (4,))),
    "batch_norm": by(lambda a: F.batch_norm(a, constant(4).to(a), constant(4).to(a) + 2)),
}  # fmt: skip

NOT_FUNCTIONS = {
    "one_hot": "integers in, integers out",
    "gumbel_softmax": "random: no function of its inputs",
    **dict.fromkeys(("fractional_max_pool2d_with_indices", "fractional_max_pool3d_with_indices"), "random"),
    **dict.fromkeys(("grouped_mm", "scaled_mm", "scaled_grouped_mm"), "of low precision on GPUs alone"),
}
HELPERS = ("Optional", "assert_int_or_pair", "boolean_dispatch", "handle_torch_function", "has_torch_function",
           "has_torch_function_unary", "has_torch_function_variadic")  # fmt: skip


# options by which a module runs another kernel
OPTIONS: dict[str, Case] = {
    "PReLU, a slope a channel": of(nn.PReLU, 2, on=S),
    "GELU, tanh": of(nn.GELU, approximate="tanh"),
    "ReLU, in place": of(nn.ReLU, inplace=True, call=lambda m, a: m(1 * a)),
    "Conv1d, groups": of(nn.Conv1d, 2, 4, 2, groups=2, dilation=2, padding=1, on=S),
    "Conv2d, circular": of(nn.Conv2d, 2, 3, 2, stride=2, padding=1, padding_mode="circular", on=I),
    "ConvTranspose2d, groups": of(nn.ConvTranspose2d, 2, 4, 2, groups=2, on=I),
    "Embedding, padded": of(nn.Embedding, 5, 3, padding_idx=1, call=lambda m, x: m(ids(x)) * x.sum(1)[:, None, None]),
    "EmbeddingBag, max": of(nn.EmbeddingBag, 5, 3, mode="max", call=lambda m, x: m(ids(x)) * x.sum(1)[:, None]),
    "EmbeddingBag, weighted": of(nn.EmbeddingBag, 5, 3, mode="sum", call=lambda m, x: m(ids(x), None, x[:, :2])),
    "LSTM, projected": of(nn.LSTM, 3, 4, 2, proj_size=2, batch_first=True, on=M, call=lambda m, x: m(x)[0]),
    "GRU, both ways": of(nn.GRU, 3, 2, bidirectional=True, batch_first=True, on=M, call=lambda m, x: m(x)[0]),
    "InstanceNorm1d, tracked": of(nn.InstanceNorm1d, 2, track_running_stats=True, on=S),
    "BatchNorm1d, no scale": of(nn.BatchNorm1d, 4, affine=False),
    "GroupNorm, one group": of(nn.GroupNorm, 1, 2, on=I),
    "LayerNorm, two sides": of(nn.LayerNorm, (2, 3), on=M),
    "MaxPool2d, strides": of(nn.MaxPool2d, 3, stride=1, padding=1, dilation=2, on=(2, 6, 7)),
    "AvgPool2d, padded": of(nn.AvgPool2d, 3, padding=1, count_include_pad=False, on=I),
    **{f"Upsample, {mode}": of(nn.Upsample, scale_factor=1.5, mode=mode, on=on)
       for mode, on in (("nearest", I), ("bilinear", I), ("linear", S), ("trilinear", D), ("nearest-exact", I))},
    "PairwiseDistance, p = 1": of(nn.PairwiseDistance, 1.0, on=(V, V)),
    "TransformerEncoderLayer, norm first": of(nn.TransformerEncoderLayer, 4, 2, 3, norm_first=True, batch_first=True,
                                              activation="gelu", on=(3, 4)),
    "MultiheadAttention, weights": of(nn.MultiheadAttention, 4, 2, batch_first=True, add_bias_kv=True, on=(3, 4),
                                      call=lambda m, x: m(x, x, x)),
    "grid_sample, nearest": by(lambda a, g: F.grid_sample(a, g, "nearest", "border", False), I, (3, 2, 2)),
    "grid_sample, bicubic": by(lambda a, g: F.grid_sample(a, g, "bicubic", "reflection", True), I, (3, 2, 2)),
    "scaled_dot_product_attention, causal": by(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), (2, 3, 4), (2, 3, 4), (2, 3, 4)),
    "normalize, p = 1": by(lambda a: F.normalize(a, p=1.0, dim=-1)),
    "cross_entropy, weighted": by(lambda a: F.cross_entropy(a, label(a, 4), constant(4).to(a) + 2, reduction="none")),
    "kl_div, log": by(lambda a, b: F.kl_div(a, b, reduction="none", log_target=True), V, V),
}  # fmt: skip


# -- the tables are whole --------------------------------------------------------------------------------------------


def test_every_module_of_torch_has_its_case() -> None:
    found = {n for n in dir(nn) if isinstance(getattr(nn, n), type) and issubclass(getattr(nn, n), nn.Module)}
    assert found == set(MODULES) | set(NOT_MODULES), found ^ (set(MODULES) | set(NOT_MODULES))


def test_every_function_of_torch_has_its_case() -> None:
    public = {n for n in dir(F) if not n.startswith("_") and callable(getattr(F, n))}
    public -= {n for n in public if isinstance(getattr(F, n), type)} | set(HELPERS)
    known = set(FUNCTIONS) | set(CALLED) | set(NOT_FUNCTIONS)
    assert public <= known, public - known
    assert set(CALLED.values()) <= set(MODULES)


# -- the sweep -------------------------------------------------------------------------------------------------------

CASES = {**MODULES, **{f"F.{name}": case for name, case in FUNCTIONS.items()}, **OPTIONS}
SIZES = [(3, 2, 4), (2, 2, 2)]  # examples, outputs, cotangents: all different, all the same
SLOW = "ignore:this network|LSTM with projections"  # what is slow, and torch about its own kernels


def problem(case: Case, n: int, outputs: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(n)
    net = Around(case, outputs).double().eval()
    for p in net.parameters():
        nn.init.normal_(p, std=0.7)
    return net, torch.randn(n, 3, dtype=torch.float64)


close = partial(helpers.close, absolute=1e-9)


@pytest.mark.filterwarnings(SLOW)
@pytest.mark.parametrize("name", CASES)
def test_every_product_is_that_of_autograd(name: str, jacobian: Callable[..., Tensor]) -> None:
    for n, c, k in SIZES:
        net, x = problem(CASES[name], n, c)
        J = jacobian(net, lambda twin, x=x: twin(x))
        assert J.abs().sum() > 0
        assert torch.isfinite(J).all()
        tangent, v, u, w = lw.linearize(net), normal(k, J.shape[-1]), normal(k, n, c), normal(n, k, c)
        close(tangent.rows(x), J)
        close(tangent.pulled(x, w), torch.einsum("nkc,ncp->nkp", w, J))
        close(tangent.pulled(x, w[:, :1]), torch.einsum("nkc,ncp->nkp", w[:, :1], J))
        close(tangent.vjps(x, u), torch.einsum("knc,ncp->kp", u, J))
        close(tangent.jvps(x, v)[1], torch.einsum("kp,ncp->knc", v, J))
        close(tangent.jvp(x, tangent.layout.unflatten(v[0])), J @ v[0])
        pushed, pulled = tangent.through(x, v[0], lambda _, jv: jv.sin())
        close(pushed, J @ v[0])
        close(pulled, torch.einsum("ncp,nc->p", J, (J @ v[0]).sin()))


@pytest.mark.filterwarnings(SLOW)
@pytest.mark.parametrize("name", CASES)
def test_the_curvature_of_a_fit_is_that_of_autograd(name: str, jacobian: Callable[..., Tensor]) -> None:
    n, c, _ = SIZES[1]
    net, x = problem(CASES[name], n, c)
    J = jacobian(net, lambda twin: twin(x))
    likelihood = lw.likelihoods.Gaussian(1.0)
    la = lw.laplace(net, (x, torch.zeros(n, c, dtype=torch.float64)), likelihood, structure="full", prior=1.0)
    G = torch.einsum("ncp,ncq->pq", J, J)
    close(linalg.to_dense(la.posterior.precision), G + torch.eye(len(G), dtype=torch.float64))
