"""Data that users name on the command line: a file, or `module:loader`.

    .npz              arrays x and y (or X, Y, inputs, targets, labels; or as --inputs and --target name them)
    .csv, .parquet    what pandas reads: the columns of --target, and of --inputs or all others, as floating numbers
    module:loader     a function that returns data as `lw.laplace` takes them

Over R processes, rank r has every R-th example from the r-th on; a loader with two parameters is called with
(rank, R) and returns that share itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from lapwing import given, tree
from lapwing.arguments import as_likelihood, as_task
from lapwing.cli.inputs import attempted, check_file, named, short
from lapwing.data import TensorBatches, as_batches
from lapwing.distributed import ALONE, Ranks
from lapwing.errors import InvalidValue

READERS = {".csv": "read_csv", ".parquet": "read_parquet"}  # of pandas
INPUTS, TARGETS = ("x", "X", "inputs"), ("y", "Y", "targets", "labels")  # of arrays, where no names are said


@dataclass(frozen=True)
class Source:
    """Where data come from, and what inputs and targets are called there."""

    text: str
    inputs: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()

    @classmethod
    def of(cls, text: str, inputs: list[str] | None, targets: list[str] | None) -> Source:
        """As options give it."""
        return cls(text, tuple(inputs or ()), tuple(targets or ()))

    def labelled(self, likelihood: Any, ranks: Ranks = ALONE) -> Any:
        """Inputs and targets, as `lw.laplace` takes them; of several ranks, the share of this one. likelihood: real
        values that are whole numbers in a file are real all the same."""
        if self._is_file:
            inputs, targets = self._read()
            if targets is None:
                raise InvalidValue(f"{self.text} does not say what its targets are; name them by --target")
            real = not as_likelihood(as_task(likelihood, 2)).discrete
            return _shared((inputs, _floating(targets) if real else targets), ranks)
        return self._loaded(ranks)

    def _loaded(self, ranks: Ranks = ALONE) -> Any:
        if self.inputs or self.targets:
            raise InvalidValue(f"{self.text} returns inputs and targets; --inputs and --target name those of a file")
        loader = named(self.text, "a loader")
        if callable(loader) and len(inspect.signature(loader).parameters) == 2:
            return attempted(lambda: loader(ranks.rank, ranks.size), f"{self.text}()")
        return _shared(attempted(loader, f"{self.text}()") if callable(loader) else loader, ranks)

    def unlabelled(self) -> Any:
        """Inputs alone, as `la.predict` takes them."""
        return inputs_of(self._read() if self._is_file else self._loaded())

    @property
    def _is_file(self) -> bool:
        return ":" not in self.text or Path(self.text).exists()

    def _read(self) -> tuple[Any, Any]:
        """Inputs, and targets or None."""
        path = Path(self.text)
        check_file(path)
        if path.suffix == ".npz":
            return self._of_arrays(path)
        if path.suffix in READERS:
            return self._of_columns(path)
        known = ", ".join([".npz", *READERS])
        raise InvalidValue(f"{path} is none of {known}; give such a file, or module:loader for data of another kind")

    def _of_arrays(self, path: Path) -> tuple[Any, Any]:
        try:
            with open(path, "rb") as file, np.load(file, allow_pickle=False) as stored:
                arrays = dict(stored)
        except Exception as error:  # of zip files and of NumPy's format
            raise InvalidValue(f"cannot read {path}: {short(error)}") from error
        inputs, targets = (
            tuple(_present(names, arrays, path)) or tuple(name for name in usual if name in arrays)[:1]
            for names, usual in ((self.inputs, INPUTS), (self.targets, TARGETS))
        )
        if not inputs:
            raise InvalidValue(f"{path} holds the arrays {list(arrays)}; name the inputs among them by --inputs")
        found = tuple(arrays[name] for name in inputs)
        return found if len(found) > 1 else found[0], arrays[targets[0]] if targets else None

    def _of_columns(self, path: Path) -> tuple[Any, Any]:
        frame = _frame(path)
        targets = _present(self.targets, frame.columns, path)
        names = _present(self.inputs, frame.columns, path) or [n for n in frame.columns if n not in targets]
        one = targets[0] if len(targets) == 1 else targets
        return _floating(frame[names]), frame[one] if targets else None


def _floating(values: Any) -> Tensor:
    found = given.array(values)
    return found if found.is_floating_point() else found.double()


def _present(names: Sequence[str], there: Any, path: Path) -> list[str]:
    for name in names:
        if name not in there:
            raise InvalidValue(f"{path} has no {name!r}; it has {list(there)[:20]}{given.near(name, map(str, there))}")
    return list(names)


def _frame(path: Path) -> Any:
    try:
        import pandas
    except ImportError as error:
        raise InvalidValue(f"reading {path} needs pandas, which is not installed; pip install pandas") from error
    try:
        return getattr(pandas, READERS[path.suffix])(path)
    except Exception as error:  # of parsers, encodings and engines that are not installed
        raise InvalidValue(f"cannot read {path}: {short(error)}") from error


def _shared(data: Any, ranks: Ranks) -> Any:
    """This rank's share of data that every rank has."""
    if ranks.alone:
        return data
    own = slice(ranks.rank, None, ranks.size)
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        return Subset(data, range(len(data))[own])  # type: ignore[arg-type]
    batches = as_batches(data) if isinstance(data, tuple) else None
    if isinstance(batches, TensorBatches):
        return tree.rows_of(batches.inputs, own), tree.rows_of(batches.targets, own)
    raise InvalidValue(
        f"over {ranks.size} processes a loader returns (X, y) or a map-style Dataset, or takes (rank, world_size) and "
        f"returns its own share; got {type(data).__name__}"
    )


def inputs_of(data: Any) -> Any:
    """What `la.predict` takes of data for `lw.laplace`, without their targets."""
    if isinstance(data, tuple) and len(data) == 2:
        return data[0]
    return DataLoader(data, batch_size=None) if isinstance(data, list) else data  # type: ignore[arg-type]
