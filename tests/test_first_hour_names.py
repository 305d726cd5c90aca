"""Words that are nearly right: what was meant is named. Warnings point at the line of the user's that led to them."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw
from helpers import integers, normal
from lapwing import arguments, given
from lapwing.errors import InvalidValue, LapwingError, LapwingWarning


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.fc = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.body(x).tanh())


def fit(likelihood: Any = "gaussian", y: Any = None, **options: Any) -> lw.Laplace:
    return lw.laplace(Named().double(), (normal(12, 3), normal(12, 2) if y is None else y), likelihood, **options)


MEANT: dict[str, tuple[Callable[[], Any], str]] = {
    "likelihood": (lambda: fit("catgorical"), "got 'catgorical'; did you mean 'categorical'"),
    "task": (lambda: fit("classifcation"), "got 'classifcation'; did you mean 'classification'"),
    "likelihood, far": (lambda: fit("xyz"), "got 'xyz'$"),
    "loss": (lambda: fit(nn.CrossEntropyLoss()), "CrossEntropyLoss has the likelihood 'categorical', or the task"),
    "loss class": (lambda: fit(nn.MSELoss), "trained on MSELoss has the likelihood 'gaussian'"),
    "loss function": (lambda: fit(F.binary_cross_entropy_with_logits), "has the likelihood 'bernoulli'"),
    "loss in quotes": (lambda: fit("mse_loss"), "a network trained on mse_loss has the likelihood 'gaussian'"),
    "inputs and targets": (
        lambda: lw.laplace(Named().double(), normal(12, 3), normal(12, 2), "gaussian"),  # type: ignore[call-overload]
        r"takes model, data, likelihood by their places, got 4 arguments; inputs and targets are one argument",
    ),
    "targets for a likelihood": (
        lambda: lw.laplace(Named().double(), normal(12, 3), normal(12, 2)),  # type: ignore[arg-type]
        r"got an array, Tensor; inputs and targets are one argument, \(X, y\)",
    ),
    "class": (lambda: fit(lw.likelihoods.Gaussian), r"give an object of that class: Gaussian\(\)"),
    "structure": (lambda: fit(structure="kronn"), "did you mean 'kron'"),
    "factor": (lambda: fit(factor="exct"), "did you mean 'exact'"),
    "layer": (lambda: fit(subset=["fc"]), r"'fc' matches no parameter.*did you mean 'fc\.\*'"),
    "parameter": (lambda: fit(subset=["fc.wieght"]), r"did you mean 'fc\.weight'"),
    "layer, no list": (lambda: fit(subset="fc"), r"did you mean \['fc\.\*'\]"),
    "glob, no list": (lambda: fit(subset="fc.*"), r"did you mean \['fc\.\*'\]"),
    "last layer": (lambda: fit(subset="last_laye"), "did you mean 'last_layer'"),
    "keyword": (lambda: fit(hessian_structure="kron"), r"laplace\(\) takes no hessian_structure=; use structure="),
    "keyword of weights": (lambda: fit(subset_of_weights="all"), "use subset="),
    "keyword, near": (lambda: fit(structre="kron"), r"takes no structre=; did you mean 'structure'"),
    "link": (lambda: fit().predict(normal(2, 3), link="probitt"), "did you mean 'probit'"),
    "link of laplace": (lambda: fit().predict(normal(2, 3), link_approx="mc"), "takes no link_approx=; use link="),
    "mean": (lambda: fit().predict(normal(2, 3), mean="netwrk"), "did you mean 'network'"),
    "method": (lambda: fit().tuned(method="evidnce"), "did you mean 'evidence'"),
    "center": (lambda: fit().tuned(center="tangnt"), "did you mean 'tangent'"),
    "held-out": (lambda: fit().tuned(val_loader=None), "use method='validation', data="),
    "one-hot": (
        lambda: fit("categorical", F.one_hot(integers(2, 12), 2)),
        r"one-hot: give y\.argmax\(-1\), or lw\.likelihoods\.SoftLabels\(\)",
    ),
    "one-hot floats": (lambda: fit("categorical", F.one_hot(integers(2, 12), 2).double()), r"one-hot.*argmax"),
    "labels missing": (lambda: fit("categorical", torch.full((12,), torch.nan)), r"12 of them are missing \(NaN\)"),
    "labels from 1": (lambda: fit("categorical", integers(2, 12) + 1), "count from 1"),
    "real targets": (lambda: fit("categorical", normal(12)), "use likelihood='gaussian'"),
}


@pytest.mark.parametrize("case", MEANT)
def test_what_was_meant_is_named(case: str) -> None:
    use, says = MEANT[case]
    with pytest.raises(LapwingError, match=says) as caught:
        use()
    assert "use y.long()" not in str(caught.value) or "one-hot" not in str(caught.value)


def test_every_likelihood_that_has_a_name_is_found_from_near() -> None:
    """Whatever names the tables have, now or later."""
    for name in (*arguments.TASKS, *arguments.LIKELIHOODS):
        word = name[:4] + name[5:]
        with pytest.raises(InvalidValue, match=f"did you mean '{name}'"):
            arguments.as_likelihood(word)
    assert set(arguments.LOSSES.values()) <= set(arguments.LIKELIHOODS)
    assert given.near(3, ["three"]) == ""


def test_attributes_of_other_libraries_are_named_and_others_stay_plain() -> None:
    la = fit()
    for name, says in {
        "fit": r"no attribute 'fit'; lw\.laplace\(model, data, likelihood\) has fitted it already",
        "optimize_prior_precision": r"call la = la\.tuned\(\)",
        "log_marginal_likelihood": r"la\.log_evidence\(\)",
        "predictt": "did you mean 'predict'",
        "xyz": "no attribute 'xyz'$",
    }.items():
        with pytest.raises(AttributeError, match=says) as caught:
            getattr(la, name)
        assert caught.value.name == name
        assert not hasattr(la, name)
    assert getattr(la, "fit", None) is None
    assert copy.copy(la).n == la.n


def test_a_property_that_raises_is_not_taken_for_one_that_is_missing() -> None:
    class Odd(lw.Laplace):
        @property
        def captured(self) -> Any:
            return torch.nonsense  # an AttributeError of its own

    la = fit()
    odd = Odd(la.state, la.prior, la.likelihood)
    with pytest.raises(AttributeError, match="nonsense"):
        odd.captured  # noqa: B018


def test_names_of_the_loss_table_are_torchs() -> None:
    for name in arguments.LOSSES:
        assert hasattr(nn, name) or hasattr(F, name)


def warned(use: Callable[[], Any]) -> warnings.WarningMessage:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", LapwingWarning)
        use()
    return next(one for one in seen if issubclass(one.category, LapwingWarning))


def dropping() -> Any:
    return DataLoader(TensorDataset(normal(12, 3), normal(12, 2)), batch_size=5, drop_last=True)


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) + x.mean()


WARN: dict[str, Callable[[], Any]] = {
    "fit, dropped": lambda: lw.laplace(Named().double(), dropping(), "gaussian"),
    "updated, dropped": lambda: fit().updated(dropping()),
    "validation, dropped": lambda: fit().tuned(method="validation", data=dropping()),
    "predict, dropped": lambda: fit().predict(dropping()),
    "rows, slow": lambda: lw.linearize(Mixing().double()).rows(normal(6, 3)),
    "compare": lambda: lw.compare([fit(), fit().tuned(center="map")]),
}


@pytest.mark.parametrize("case", WARN)
def test_warnings_point_at_the_users_line(case: str) -> None:
    torch.manual_seed(0)
    told = warned(WARN[case])
    assert told.filename == __file__
    assert told.lineno == WARN[case].__code__.co_firstlineno


def test_every_room_warns_by_the_one_function_that_finds_the_users_line() -> None:
    house = Path(lw.__file__).parent
    found = [path.relative_to(house).as_posix() for path in house.rglob("*.py") if "warnings.warn(" in path.read_text()]
    assert found == ["errors.py"]


def test_functions_keep_their_signatures() -> None:
    import inspect

    assert "structure" in inspect.signature(lw.laplace).parameters
    assert list(inspect.signature(lw.Laplace.tuned).parameters)[:3] == ["self", "method", "fixed"]
    assert pickle.loads(pickle.dumps(lw.laplace)) is lw.laplace


def test_an_import_brings_in_nothing_heavy() -> None:
    """torch is what takes time: beside it come its own few files, safetensors and tqdm, and no extra."""
    code = (
        "import torch, sys; before = set(sys.modules); import lapwing; "
        "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before}))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    found = set(out) - set(sys.stdlib_module_names)
    assert found == {"lapwing", "safetensors", "tqdm"}
