"""Layers of torch.nn, by the kind of data that they take. Sizes are without the batch.

    vector (d,)    sequence (t, d)    signal (d, t)    image (d, h, w)    volume (d, h, w, z)    tokens (t,) of integers

`LAYERS[kind]` are functions (rng, size) -> module that keep the kind; `BRIDGES[kind]` change it, and say to what. What
a module makes of a size is found by running it (`after`); a draw that does not fit raises, and the caller draws again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Size = tuple[int, ...]
Make = Callable[[random.Random, Size], nn.Module]
WORDS = 5  # in a vocabulary


def example(kind: str, size: Size, n: int) -> Tensor:
    """n random inputs of a kind, float32 or integers."""
    return torch.randint(WORDS, (n, *size)) if kind == "tokens" else torch.randn(n, *size)


def after(module: nn.Module, kind: str, size: Size) -> Size:
    """The size of a module's output, by running it on one example and on two."""
    with torch.no_grad():
        one, two = (module.eval()(example(kind, size, n)) for n in (1, 2))
    if len(one) != 1 or len(two) != 2 or one.shape[1:] != two.shape[1:]:
        raise ValueError("the first dimension is not the batch")
    return tuple(two.shape[1:])


# -- modules that need a line more than torch.nn has --------------------------------------------------------------


class First(nn.Module):
    """The first output of a recurrent layer."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)[0]


class SelfAttention(nn.Module):
    def __init__(self, body: nn.MultiheadAttention, weights: bool) -> None:
        super().__init__()
        self.body, self.weights = body, weights

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x, x, x.sin(), need_weights=self.weights)[0]


class WithItself(nn.Module):
    """A bilinear layer of x and sin x."""

    def __init__(self, body: nn.Bilinear) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x, x.sin())


class Plain(nn.Module):
    """A function of torch without parameters."""

    def __init__(self, name: str, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.name, self.function = name, function

    def extra_repr(self) -> str:
        return self.name

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


# -- what every kind takes ---------------------------------------------------------------------------------------

SMOOTH: tuple[Callable[[], nn.Module], ...] = (
    nn.Tanh, nn.Sigmoid, nn.GELU, lambda: nn.GELU("tanh"), nn.SiLU, nn.Mish, nn.Softplus, nn.Softsign, nn.Tanhshrink,
    nn.LogSigmoid, nn.ELU, nn.SELU, nn.CELU, lambda: nn.Softplus(2.0, 3.0),
)  # fmt: skip
KINKED: tuple[Callable[[], nn.Module], ...] = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.Softshrink, nn.Hardshrink, nn.RReLU,
    lambda: nn.Threshold(0.1, 0.2), lambda: nn.ReLU(inplace=True), lambda: nn.SiLU(inplace=True),
    lambda: nn.LeakyReLU(0.3, inplace=True), lambda: nn.ELU(inplace=True), lambda: nn.Hardtanh(inplace=True),
)  # fmt: skip


def activation(rng: random.Random, size: Size) -> nn.Module:
    return rng.choice(SMOOTH + KINKED)()


def slopes(rng: random.Random, size: Size) -> nn.Module:
    """PReLU, whose one or several slopes belong to dimension 1."""
    return nn.PReLU(rng.choice((1, size[0])), init=0.3)


def noise(rng: random.Random, size: Size) -> nn.Module:
    return rng.choice((nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.Identity))()


def groups(rng: random.Random, size: Size) -> nn.Module:
    return nn.GroupNorm(rng.choice([g for g in (1, 2, 4) if size[0] % g == 0]), size[0])


def last(rng: random.Random, size: Size) -> nn.Module:
    kinds: tuple[Callable[[], nn.Module], ...] = (
        lambda: nn.LayerNorm(size[-1]), lambda: nn.LayerNorm(size), lambda: nn.LayerNorm(size[-1], bias=False),
        lambda: nn.RMSNorm(size[-1]), lambda: nn.LayerNorm(size[-1], elementwise_affine=False),
    )  # fmt: skip
    return rng.choice(kinds)()


def softmaxes(rng: random.Random, size: Size) -> nn.Module:
    return rng.choice((nn.Softmax, nn.LogSoftmax, nn.Softmin))(-1)


def glu(rng: random.Random, size: Size) -> nn.Module:
    return nn.GLU(1)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "cumsum": lambda x: x.cumsum(-1),
    "sort": lambda x: x.sort(-1)[0],
    "roll": lambda x: x.roll(1, -1) + 0.5 * x,
    "flip": lambda x: x.flip(-1),
    "unit length": lambda x: x / (1 + x.square().sum(-1, keepdim=True)).sqrt(),
    "where": lambda x: torch.where(x > 0.2, x.sin(), 0.5 * x),
    "logsumexp": lambda x: x - x.logsumexp(-1, keepdim=True),
    "clamp": lambda x: x.clamp(-1.5, 1.5),
    "in place": lambda x: x.clone().mul_(1.3).add_(0.1),
    "masked": lambda x: x.masked_fill(x > 2, 0.0),
    "split": lambda x: torch.cat([x[..., :1], x[..., 1:] * x[..., :1]], -1),
}


def function(rng: random.Random, size: Size) -> nn.Module:
    name = rng.choice(sorted(FUNCTIONS))
    return Plain(name, FUNCTIONS[name])


EVERYWHERE: tuple[Make, ...] = (activation, activation, slopes, noise, groups, last, softmaxes, glu, function)


# -- layers by kind ------------------------------------------------------------------------------------------------


def linear(rng: random.Random, size: Size) -> nn.Module:
    return nn.Linear(size[-1], rng.randint(2, 4), bias=rng.random() < 0.8)


def bilinear(rng: random.Random, size: Size) -> nn.Module:
    return WithItself(nn.Bilinear(size[-1], size[-1], 2, bias=rng.random() < 0.7))


def recurrent(rng: random.Random, size: Size) -> nn.Module:
    options: dict[str, Any] = {"batch_first": True, "bidirectional": rng.random() < 0.3, "bias": rng.random() < 0.8}
    kind = rng.choice((nn.RNN, nn.GRU, nn.LSTM))
    if kind is nn.LSTM and rng.random() < 0.3:
        options["proj_size"] = 1
    return First(kind(size[-1], 2, num_layers=rng.choice((1, 1, 2)), **options))


def attention(rng: random.Random, size: Size) -> nn.Module:
    heads = rng.choice([h for h in (1, 2) if size[-1] % h == 0])
    options: dict[str, Any] = {"bias": rng.random() < 0.7}
    if rng.random() < 0.2:
        options |= {"add_bias_kv": True} if options["bias"] else {"add_zero_attn": True}
    body = nn.MultiheadAttention(size[-1], heads, batch_first=True, **options)
    return SelfAttention(body, rng.random() < 0.5)


def transformer(rng: random.Random, size: Size) -> nn.Module:
    options: dict[str, Any] = {"norm_first": rng.random() < 0.5, "activation": rng.choice(("relu", "gelu"))}
    return nn.TransformerEncoderLayer(size[-1], 1, 2, batch_first=True, **options)


def convolution(dims: int) -> Make:
    def make(rng: random.Random, size: Size) -> nn.Module:
        kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        split = rng.choice([g for g in (1, 1, 2) if size[0] % g == 0])
        out = split * rng.randint(1, 2)
        padding = rng.choice((0, 1, "same")) if dims < 3 else rng.choice((0, 1))
        stride = 1 if padding == "same" else rng.randint(1, 2)
        mode = rng.choice(("zeros", "zeros", "reflect", "replicate", "circular")) if dims < 3 else "zeros"
        options: dict[str, Any] = {"padding": padding, "stride": stride, "dilation": rng.randint(1, 2), "groups": split}
        return kind(size[0], out, rng.randint(1, 3), bias=rng.random() < 0.7, padding_mode=mode, **options)

    return make


def transposed(dims: int) -> Make:
    def make(rng: random.Random, size: Size) -> nn.Module:
        kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1]
        split = rng.choice([g for g in (1, 1, 2) if size[0] % g == 0])
        stride = rng.randint(1, 2)
        options: dict[str, Any] = {"output_padding": rng.randint(0, stride - 1), "groups": split, "stride": stride}
        return kind(size[0], split, rng.randint(1, 2), padding=rng.randint(0, 1), bias=rng.random() < 0.7, **options)

    return make


def batch_norm(dims: int) -> Make:
    def make(rng: random.Random, size: Size) -> nn.Module:
        kinds = (
            (nn.BatchNorm1d, nn.InstanceNorm1d),
            (nn.BatchNorm2d, nn.InstanceNorm2d),
            (nn.BatchNorm3d, nn.InstanceNorm3d),
        )
        kind = rng.choice(kinds[dims - 1] if len(size) > 1 else kinds[0][:1])
        return kind(
            size[0], affine=rng.random() < 0.8, track_running_stats=kind in kinds[dims - 1][:1] or rng.random() < 0.4
        )

    return make  # fmt: skip


def pool(dims: int) -> Make:
    def make(rng: random.Random, size: Size) -> nn.Module:
        of = lambda name: getattr(nn, f"{name}{dims}d")  # noqa: E731
        kinds: list[Callable[[], nn.Module]] = [
            lambda: of("MaxPool")(2), lambda: of("MaxPool")(2, 1, 1), lambda: of("AvgPool")(2),
            lambda: of("AvgPool")(2, 1, 1, count_include_pad=False), lambda: of("AdaptiveAvgPool")(2),
            lambda: of("AdaptiveMaxPool")(2), lambda: nn.Upsample(scale_factor=2), lambda: of("ConstantPad")(1, 0.3),
            lambda: of("ReplicationPad")(1), lambda: of("ReflectionPad")(1), lambda: of("Dropout")(),
            lambda: nn.LocalResponseNorm(2), lambda: nn.ChannelShuffle(2) if size[0] % 2 == 0 else nn.Identity(),
        ]  # fmt: skip
        if dims == 2:
            kinds += [lambda: nn.PixelShuffle(2), lambda: nn.PixelUnshuffle(2), lambda: nn.Softmax2d()]
            kinds += [
                lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
                lambda: nn.LPPool2d(2, 2),
                lambda: nn.ZeroPad2d(1),
            ]
        return rng.choice(kinds)()

    return make  # fmt: skip


LAYERS: dict[str, tuple[Make, ...]] = {
    "vector": (linear, linear, linear, bilinear, batch_norm(1), *EVERYWHERE),
    "sequence": (linear, recurrent, recurrent, attention, attention, transformer, *EVERYWHERE),
    "signal": (convolution(1), convolution(1), transposed(1), batch_norm(1), pool(1), *EVERYWHERE),
    "image": (convolution(2), convolution(2), transposed(2), batch_norm(2), pool(2), pool(2), *EVERYWHERE),
    "volume": (convolution(3), transposed(3), batch_norm(3), pool(3), *EVERYWHERE),
    "tokens": (),
}


# -- from one kind to another ----------------------------------------------------------------------------------------


def embedding(rng: random.Random, size: Size) -> nn.Module:
    options: dict[str, Any] = {"padding_idx": rng.choice((None, 0, 3)), "sparse": rng.random() < 0.2}
    return nn.Embedding(WORDS, rng.randint(2, 3), **options)


def bag(rng: random.Random, size: Size) -> nn.Module:
    return nn.EmbeddingBag(
        WORDS, rng.randint(2, 3), mode=rng.choice(("mean", "sum")), padding_idx=rng.choice((None, 1))
    )


def swap(rng: random.Random, size: Size) -> nn.Module:
    return Plain("transpose", lambda x: x.mT)


def flat(rng: random.Random, size: Size) -> nn.Module:
    return nn.Flatten()


def pooled(rng: random.Random, size: Size) -> nn.Module:
    """(t, d) -> (d,)."""
    name = rng.choice(("mean", "last", "max"))
    return Plain(name, {"mean": lambda x: x.mean(1), "last": lambda x: x[:, -1], "max": lambda x: x.amax(1)}[name])


def unflat(rng: random.Random, size: Size) -> nn.Module:
    return nn.Unflatten(1, (1, size[0]))


BRIDGES: dict[str, tuple[tuple[str, Make], ...]] = {
    "vector": (("signal", unflat),),
    "sequence": (("vector", pooled), ("vector", flat), ("signal", swap)),
    "signal": (("vector", flat), ("sequence", swap)),
    "image": (("vector", flat), ("signal", lambda rng, size: nn.Flatten(2))),
    "volume": (("vector", flat),),
    "tokens": (("sequence", embedding), ("sequence", embedding), ("vector", bag)),
}
