"""The networks that `classifiers.py` scores, each with the data that it was trained on and those it is scored on.

    small     scikit-learn's digits, 80 to 700 of them; two hidden layers of 32 units, trained as in `left_out.py`, and
              on images that are moved by a pixel at random
    uci       seven sets of the folder LAPWING_DATA, the same networks
    images    Fashion-MNIST, 2,000 and 60,000 images, and MNIST, 60,000; two convolutions or a residual block
    resnets   published networks for CIFAR-10, whose curvature is that of some of the images
    moons     two moons in the plane: 100 points and the networks of `truth.py`, 60 with less noise and those of `small`

Seeds draw data and networks. No seed is one that the rule was chosen by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import _truth_problems as truth
import left_out
import numpy as np
import torch
from _networks import BasicBlock, data, images, resnet, train_file
from novelty import images as scaled
from sklearn.datasets import load_digits, make_moons
from torch import Tensor, nn
from torch.nn.functional import pad

PARTS = ("small", "uci", "images", "resnets", "moons")
DIGITS, REGIMES = (80, 150, 300, 700), ("end", "L2", "early", "dropout", "smooth", "noisy", "augmented")
UCI = ("australian", "breast_cancer", "ionosphere", "waveform", "satellite", "glass", "vehicle")
UNKNOWN = {"Fashion-MNIST": "mnist.npz", "MNIST": "notmnist_test.npz"}
FILES = {"Fashion-MNIST": "fashion_mnist.npz", "MNIST": "mnist.npz"}
DEPTHS = (20, 32, 44, 56)
SEEDS = {  # of each part; those of moons are others than the rule was tried on
    **dict.fromkeys(("small", "uci"), tuple(range(10, 15))),
    "images": (10, 11, 12),
    "resnets": (0,),
    "moons": tuple(range(40, 50)),
}
CAP, SHARE = 500, 0.7  # examples to train on, of UCI's
TESTED, STRANGE, EPOCHS = 4_000, 1_000, 5  # images; epochs of 60,000
CHOSEN = slice(9_000, 10_000)  # test images that a temperature is chosen by
FORWARD = 128  # inputs at once

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Unit:
    """One network by its names."""

    part: str
    set: str
    kind: str
    regime: str
    seed: int
    train: int = 0  # images, where a part of them is meant
    test: int = 0

    @property
    def row(self) -> tuple[str, ...]:
        """All but the seed."""
        size = (f"{self.train:,} images",) if self.train else ()
        scored = (f"{self.test:,} scored",) if self.part == "resnets" else ()
        return (self.part, self.set, self.kind, self.regime, *size, *scored)

    @property
    def key(self) -> str:
        """By which a network that has been scored is known."""
        return "/".join((*self.row, str(self.seed)))


@dataclass(frozen=True)
class Held:
    """Inputs with labels that a network was not trained on, by which a setting may be chosen; and that network with the
    data that it was trained on."""

    net: nn.Module
    train: Pair
    data: Pair

    @property
    def logits(self) -> Pair:
        """With their labels."""
        return logits(self.net, self.data[0]), self.data[1]


@dataclass(frozen=True)
class Problem:
    """A network in eval mode; inputs and labels that it was trained on, and those that it is scored on; inputs of no
    class; what a temperature may be chosen by; how many of the first test inputs are not among that, None for all; and
    other views of the training data, which have the same labels."""

    net: nn.Module
    train: Pair
    test: Pair
    unknown: Tensor | None = None
    held: Held | None = None
    unchosen: int | None = None
    views: tuple[Tensor, ...] = ()


def units(part: str, seeds: tuple[int, ...], depths: tuple[int, ...], train: int, test: int) -> Iterator[Unit]:
    """All networks of a part. `train` and `test`: images of CIFAR-10 for curvature and for scores."""
    if part == "resnets":
        yield from (Unit(part, "CIFAR-10", f"ResNet-{depth}", "published", 0, train, test) for depth in depths)
    elif part == "images":
        for regime in ("end", "augmented", "early"):
            for kind in ("batch norm", "plain", "residual"):
                yield from (Unit(part, "Fashion-MNIST", kind, regime, seed, 2_000) for seed in seeds)
        for name in ("MNIST", "Fashion-MNIST"):
            for kind in ("batch norm", "plain"):
                yield from (Unit(part, name, kind, f"{EPOCHS} epochs", seed, 60_000) for seed in seeds)
    elif part == "moons":
        yield from (Unit(part, "moons100", "tanh", "N(0, 1)", seed) for seed in seeds)
        for regime in ("end", "L2"):
            for kind in ("batch norm", "plain"):
                yield from (Unit(part, "moons60", kind, regime, seed) for seed in seeds)
    else:
        sets = [f"digits{n}" for n in DIGITS] if part == "small" else UCI
        for name in sets:
            for regime in REGIMES if part == "small" else ("end", "L2"):
                for kind in ("batch norm", "plain"):
                    yield from (Unit(part, name, kind, regime, seed) for seed in seeds)


def problem(unit: Unit) -> Problem:
    """Read and trained."""
    made = {"small": _tabular, "uci": _tabular, "images": _images, "resnets": _cifar10, "moons": _moons}
    return made[unit.part](unit)


@torch.no_grad()
def logits(net: nn.Module, x: Tensor) -> Tensor:
    """(n, c), float64."""
    return torch.cat([net(some).double() for some in x.split(FORWARD)])


# -- images that are moved or mirrored ------------------------------------------------------------------------------


def moved(x: Tensor) -> Tensor:
    """x (n, h, w) moved by up to one pixel, (n, 3, 3, h, w); [:, 1, 1] is x. What comes in is background, the least of
    all values."""
    around = pad(x, (1, 1, 1, 1), value=float(x.min()))
    return around.unfold(1, x.shape[1], 1).unfold(2, x.shape[2], 1)


def views(x: Tensor, side: int, mirrored: bool) -> tuple[Tensor, ...]:
    """Images x (n, ...) of side × side moved by a pixel to each of four sides; and mirrored, if asked."""
    around = moved(x.reshape(-1, side, side))
    found = [around[:, i, j] for i, j in ((0, 1), (1, 0), (1, 2), (2, 1))] + [around[:, 1, 1].flip(-1)] * mirrored
    return tuple(one.reshape(x.shape) for one in found)


def augmented(side: int, mirrored: bool) -> Callable[[Tensor, torch.Generator], Tensor]:
    """Of images x (n, ...), one of nine places each; and half of them mirrored, if asked."""

    def draw(x: Tensor, generator: torch.Generator) -> Tensor:
        n, around = len(x), moved(x.reshape(-1, side, side))
        i, j = torch.randint(3, (2, n), generator=generator)
        found = around[torch.arange(n), i, j]
        if mirrored:
            found = torch.where((torch.rand(n, generator=generator) < 0.5)[:, None, None], found.flip(-1), found)
        return found.reshape(x.shape)

    return draw


# -- small data ---------------------------------------------------------------------------------------------------


def digits(count: int, seed: int) -> tuple[Tensor, ...]:
    """To train on, and to test on as many others, 1,000 at most."""
    x, y = (torch.tensor(a) for a in load_digits(return_X_y=True))
    order = torch.tensor(np.random.default_rng(1000 + seed).permutation(len(x)))
    train, test = order[:count], order[count:][-left_out.TEST :]
    x, y = (x / 8 - 1).float(), y.long()
    return x[train], y[train], x[test], y[test]


def uci(name: str, seed: int) -> tuple[Tensor, ...]:
    """As the file splits it; else 70 % at random, CAP at most, and the other 30 %. satellite has no cap."""
    stored = np.load(data(f"uci_classification/{name}.npz"))
    if "X_tr" in stored:
        x, y, new, y_new = (stored[key] for key in ("X_tr", "y_tr", "X_te", "y_te"))
    else:
        order = np.random.default_rng(1000 + seed).permutation(len(stored["X"]))
        cut = int(SHARE * len(order))
        train, test = order[: cut if name == "satellite" else min(cut, CAP)], order[cut:]
        x, y, new, y_new = (stored[key][some] for some in (train, test) for key in ("X", "y"))
    mean, std = x.mean(0), x.std(0) + 1e-9
    x, new = (torch.tensor((a - mean) / std).float() for a in (x, new))
    return x, torch.tensor(y).long(), new, torch.tensor(y_new).long()


def _tabular(unit: Unit) -> Problem:
    split = uci(unit.set, unit.seed) if unit.part == "uci" else digits(int(unit.set[6:]), unit.seed)
    x_all, y_all, new, y_new = split
    classes, norm = int(torch.cat([y_all, y_new]).max()) + 1, unit.kind == "batch norm"
    train = partial(left_out.trained, classes=classes, norm=norm, seed=unit.seed)
    train = partial(train, augment=augmented(8, False)) if unit.regime == "augmented" else train
    net, x, y = train(x_all, y_all, regime=unit.regime)
    others = views(x, 8, False) if unit.part == "small" else ()
    return Problem(net, (x, y), (new.double(), y_new), held=_fifth(train, x_all, y_all, unit, classes), views=others)


def _fifth(train: Callable[..., tuple[nn.Module, Tensor, Tensor]], x: Tensor, y: Tensor, unit: Unit, c: int) -> Held:
    """The last fifth, and a network that was trained on the others. Wrong labels of c classes are wrong there too, and
    the same as in the network that is scored."""
    regime = unit.regime
    if regime == "noisy":
        y, regime = left_out.spoiled(y, c, torch.Generator().manual_seed(unit.seed)), "end"
    cut = len(x) - len(x) // 5
    net, *seen = train(x[:cut], y[:cut], regime=regime)
    return Held(net, (seen[0], seen[1]), (x[cut:].double(), y[cut:]))


def _moons(unit: Unit) -> Problem:
    if unit.set == "moons100":
        case = truth.moons(unit.seed)
        return Problem(truth.trained(case, unit.seed), case.train, case.test)
    x, y = (torch.tensor(a) for a in make_moons(1_060, noise=0.15, random_state=unit.seed))
    net, *train = left_out.trained(x[:60].float(), y[:60], 2, unit.regime, unit.kind == "batch norm", unit.seed)
    return Problem(net, (train[0], train[1]), (x[60:], y[60:]))


# -- images -------------------------------------------------------------------------------------------------------


def convolutional(kind: str) -> nn.Module:
    """Two convolutions with stride 2, or one and a residual block; then one linear layer."""
    first, last = nn.Conv2d(1, 16, 3, 2, 1), (nn.Flatten(), nn.Linear(32 * 49, 10))
    if kind == "residual":
        return nn.Sequential(first, nn.BatchNorm2d(16), nn.ReLU(), BasicBlock(16, 32, 2), *last)
    norm = nn.BatchNorm2d if kind == "batch norm" else lambda _: nn.Identity()
    second = nn.Conv2d(16, 32, 3, 2, 1)
    return nn.Sequential(first, norm(16), nn.ReLU(), second, norm(32), nn.ReLU(), *last)


def _images(unit: Unit) -> Problem:
    stored, generator = np.load(data(FILES[unit.set])), torch.Generator().manual_seed(unit.seed)
    chosen = np.random.default_rng(unit.seed).permutation(60_000)[: unit.train]
    x, y = scaled(stored["x_train"][chosen]), torch.tensor(stored["y_train"][chosen]).long()
    torch.manual_seed(unit.seed)
    steps = left_out.STEPS if unit.train <= 2_000 else EPOCHS * (unit.train // left_out.BATCH)
    augment = augmented(28, True) if unit.regime == "augmented" else None
    net, x, y = left_out.fitted(convolutional(unit.kind), x, y, unit.regime, generator, steps, augment)
    test, held = (
        (scaled(stored["x_test"][some]), torch.tensor(stored["y_test"][some]).long())
        for some in (slice(TESTED), CHOSEN)
    )
    strange = scaled(np.load(data(UNKNOWN[unit.set]))["x_test"][:STRANGE])
    return Problem(net, (x, y), test, strange, Held(net, (x, y), held), views=views(x, 28, True))


def _cifar10(unit: Unit) -> Problem:
    net, tested = resnet(int(unit.kind.removeprefix("ResNet-"))), partial(images, data("cifar10/cifar10_test.npz"))
    train, test = images(train_file(), slice(unit.train)), tested(slice(unit.test))
    strange = images(data("svhn_test_2000.npz"), slice(STRANGE))[0]
    unchosen = CHOSEN.start if unit.test > CHOSEN.start else None
    return Problem(net, train, test, strange, Held(net, train, tested(CHOSEN)), unchosen)
