"""The networks that `classifiers.py` scores, each with the data that it was trained on and those it is scored on.

    small     scikit-learn's digits, 80 to 700 of them; two hidden layers of 32 units, trained as in `left_out.py`
    uci       seven sets of the folder LAPWING_DATA, the same networks
    images    Fashion-MNIST, 2,000 and 60,000 images, and MNIST, 60,000; two convolutions or a residual block
    resnets   published networks for CIFAR-10, whose curvature is that of some of the images
    moons     two moons in the plane: 100 points and the networks of `truth.py`, 60 with less noise and those of `small`

Seeds draw data and networks. No seed is one that the rule was chosen by.
"""

from __future__ import annotations

from collections.abc import Iterator
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

PARTS = ("small", "uci", "images", "resnets", "moons")
DIGITS, REGIMES = (80, 150, 300, 700), ("end", "L2", "early", "dropout", "smooth", "noisy")
UCI = ("australian", "breast_cancer", "ionosphere", "waveform", "satellite", "glass", "vehicle")
UNKNOWN = {"Fashion-MNIST": "mnist.npz", "MNIST": "notmnist_test.npz"}
FILES = {"Fashion-MNIST": "fashion_mnist.npz", "MNIST": "mnist.npz"}
DEPTHS = (20, 32, 44, 56)
SEEDS = (10, 11, 12)
CAP, SHARE = 500, 0.7  # examples to train on, of UCI's
TESTED, STRANGE, EPOCHS = 4_000, 1_000, 5  # images; epochs of 60,000
CHOSEN = slice(9_000, 10_000)  # CIFAR-10's test images that a temperature is chosen by
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
class Problem:
    """A network in eval mode; inputs and labels that it was trained on, and those that it is scored on; inputs of no
    class; logits with labels that a temperature may be chosen by; and how many of the first test inputs are not among
    those, None for all."""

    net: nn.Module
    train: Pair
    test: Pair
    unknown: Tensor | None = None
    held: Pair | None = None
    unchosen: int | None = None


def units(part: str, seeds: tuple[int, ...], depths: tuple[int, ...], train: int, test: int) -> Iterator[Unit]:
    """All networks of a part. `train` and `test`: images of CIFAR-10 for curvature and for scores."""
    if part == "resnets":
        yield from (Unit(part, "CIFAR-10", f"ResNet-{depth}", "published", 0, train, test) for depth in depths)
    elif part == "images":
        for kind in ("batch norm", "plain", "residual"):
            for regime in ("end", "early"):
                yield from (Unit(part, "Fashion-MNIST", kind, regime, seed, 2_000) for seed in seeds[:2])
        for name in ("MNIST", "Fashion-MNIST"):
            yield from (Unit(part, name, k, f"{EPOCHS} epochs", seeds[0], 60_000) for k in ("batch norm", "plain"))
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
    net, x, y = left_out.trained(x_all, y_all, classes, unit.regime, norm, unit.seed)
    held = _four_fifths(x_all, y_all, classes, unit.regime, norm, unit.seed)
    return Problem(net, (x, y), (new.double(), y_new), held=held)


def _four_fifths(x: Tensor, y: Tensor, classes: int, regime: str, norm: bool, seed: int) -> Pair:
    """Logits and labels of the last fifth by a network that was trained on the others. Wrong labels are wrong there
    too, and the same as in the network that is scored."""
    if regime == "noisy":
        y, regime = left_out.spoiled(y, classes, torch.Generator().manual_seed(seed)), "end"
    cut = len(x) - len(x) // 5
    net = left_out.trained(x[:cut], y[:cut], classes, regime, norm, seed)[0]
    return logits(net, x[cut:].double()), y[cut:]


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
    net, x, y = left_out.fitted(convolutional(unit.kind), x, y, unit.regime, generator, steps)
    test = scaled(stored["x_test"][:TESTED]), torch.tensor(stored["y_test"][:TESTED]).long()
    return Problem(net, (x, y), test, scaled(np.load(data(UNKNOWN[unit.set]))["x_test"][:STRANGE]))


def _cifar10(unit: Unit) -> Problem:
    net, tested = resnet(int(unit.kind.removeprefix("ResNet-"))), partial(images, data("cifar10/cifar10_test.npz"))
    x, y = tested(CHOSEN)
    train, test = images(train_file(), slice(unit.train)), tested(slice(unit.test))
    strange = images(data("svhn_test_2000.npz"), slice(STRANGE))[0]
    unchosen = CHOSEN.start if unit.test > CHOSEN.start else None
    return Problem(net, train, test, strange, held=(logits(net, x), y), unchosen=unchosen)
