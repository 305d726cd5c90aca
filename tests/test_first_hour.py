"""The first hour of a new user: data as people have them, each as it would be typed, held to the tensor call's numbers.

Frames are pandas' where it is installed, and a stand-in with the same methods everywhere.
"""

from __future__ import annotations

import sys
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, Dataset, TensorDataset

import lapwing as lw
from helpers import close, integers, normal, seeded
from lapwing import given
from lapwing.errors import InvalidValue, LapwingWarning, Unsupported

N = 30


class Index(list):
    """An index that is cut as pandas' is."""

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return Index(found) if isinstance(index, slice) else found


class Column:
    """A series: what Lapwing asks of pandas', and no more."""

    def __init__(self, values: np.ndarray, index: Any = None) -> None:
        self.values, self.dtype, self.index = values, values.dtype, index

    def to_numpy(self) -> np.ndarray:
        view = self.values.view()
        view.flags.writeable = False  # as pandas 3 gives them
        return view


class Frame:
    """A frame of such columns."""

    def __init__(self, columns: dict[str, np.ndarray], index: Any = None) -> None:
        self.columns, self.index = list(columns), index
        self.held = columns
        self.dtypes = [values.dtype for values in columns.values()]

    def __getitem__(self, name: str) -> Column:
        return Column(self.held[name], self.index)

    def to_numpy(self) -> np.ndarray:
        kinds = {values.dtype.kind for values in self.held.values()}
        dtype = object if kinds - set("iuf") and len(kinds) > 1 else None  # as pandas does for bool beside float
        return np.stack([values.astype(dtype) if dtype else values for values in self.held.values()], 1)


def framed(x: Tensor, index: Any = None) -> Frame:
    return Frame({f"c{j}": column for j, column in enumerate(x.numpy().T)}, index)


def network(outputs: int = 1, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).to(dtype)


def inputs(seed: int = 0) -> Tensor:
    """float64 numbers that float32 holds, so that a cast changes none."""
    return normal(N, 3, seed=seed).float().double()


class Pairs(Dataset):
    """Rows as NumPy gives them: float64."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x.numpy(), y.numpy()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        return self.x[i], self.y[i]


class Rows:
    """What Lapwing asks of a `datasets.Dataset`, and no more: rows are lists until a format is set."""

    def __init__(self, columns: dict[str, Tensor], torch_format: bool = False) -> None:
        self.columns, self.column_names, self.torch_format = columns, list(columns), torch_format

    def with_format(self, kind: str) -> Rows:
        return Rows(self.columns, kind == "torch")

    def __len__(self) -> int:
        return len(self.columns["input"])

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {name: v[i] if self.torch_format else v[i].tolist() for name, v in self.columns.items()}


class Batches:
    """Batches of arrays, as a collate function of one's own may give them."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x.numpy(), y.numpy()

    def __iter__(self) -> Any:
        return iter([(self.x[:17], self.y[:17]), (self.x[17:], self.y[17:])])


DATA: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "float64 tensors": lambda x, y: (x, y),
    "arrays": lambda x, y: (x.numpy(), y.numpy()),
    "reversed arrays": lambda x, y: (x.flip(0).numpy()[::-1], y.flip(0).numpy()[::-1]),
    "big-endian arrays": lambda x, y: (x.numpy().astype(">f8"), y.numpy().astype(y.numpy().dtype.newbyteorder(">"))),
    "a list of two arrays": lambda x, y: [x.numpy(), y.numpy()],
    "lists": lambda x, y: (x.tolist(), y.tolist()),
    "a list of two lists": lambda x, y: [x.tolist(), y.tolist()],
    "frames": lambda x, y: (framed(x), Column(y.numpy())),
    "a frame and a list": lambda x, y: (framed(x), y.tolist()),
    "a dataset": lambda x, y: TensorDataset(x, y),
    "a dataset of arrays": Pairs,
    "a loader": lambda x, y: DataLoader(Pairs(x, y), batch_size=7),
    "batches of arrays": Batches,
    "a dataset of Hugging Face": lambda x, y: Rows({"input": x, "labels": y}),
    "a mapping": lambda x, y: {"input": x, "labels": y},
    "a mapping of arrays": lambda x, y: UserDict(input=x.numpy(), labels=y.numpy()),
    "a loader of mappings": lambda x, y: [{"input": x[:9], "labels": y[:9]}, {"input": x[9:], "labels": y[9:]}],
}


@pytest.mark.parametrize("likelihood", ["gaussian", "categorical", "bernoulli", "poisson"])
@pytest.mark.parametrize("kind", DATA)
def test_data_as_people_have_them_fit_as_tensors_do(kind: str, likelihood: str) -> None:
    """float64 numbers on a float32 network, and targets (n,) for one output (n, 1)."""
    y = {
        "gaussian": normal(N, seed=1).float().double(),
        "categorical": integers(3, N),
        "bernoulli": integers(2, N),
        "poisson": integers(5, N),
    }[likelihood]
    outputs, x = (3 if likelihood == "categorical" else 1), inputs()
    model = network(outputs)
    column = y if likelihood == "categorical" else y.unsqueeze(-1)
    expected = lw.laplace(model, (x.float(), column), likelihood)
    found = lw.laplace(model, DATA[kind](x, y), likelihood)
    assert_close(found.log_evidence(), expected.log_evidence(), rtol=1e-5, atol=0)
    assert found.targets == expected.targets
    assert found.tangent.dtype == torch.float32


NEW: dict[str, Callable[[Tensor], Any]] = {
    "float64": lambda x: x,
    "array": lambda x: x.numpy(),
    "list": lambda x: x.tolist(),
    "frame": framed,
    "mapping": lambda x: {"input": x.numpy(), "labels": None},
    "dataset": lambda x: TensorDataset(x),
    "dataset with targets": lambda x: Pairs(x, x[:, 0]),
    "dataset of Hugging Face": lambda x: Rows({"input": x}),
    "loader": lambda x: DataLoader(TensorDataset(x, x[:, 0]), batch_size=7),
    "loader of inputs": lambda x: DataLoader(x, batch_size=11),
    "loader of mappings": lambda x: DataLoader([{"input": one, "labels": 0} for one in x], batch_size=8),
}


@pytest.mark.parametrize("kind", NEW)
def test_inputs_as_people_have_them_are_predicted_as_tensors_are(kind: str) -> None:
    la, x = lw.laplace(network(2), (inputs(), normal(N, 2, seed=1)), "gaussian", structure="kron"), inputs(5)
    expected, found = la.predict(x.float()), la.predict(NEW[kind](x))
    assert_close(found.mean, expected.mean, rtol=1e-6, atol=1e-6)
    assert_close(found.covariance, expected.covariance, rtol=1e-4, atol=1e-7)
    if kind in ("array", "list", "frame"):
        assert torch.equal(la(NEW[kind](x)).std, expected.std)
        assert torch.equal(la.function_samples(2)(NEW[kind](x)), la.function_samples(2)(x.float()))


def test_integers_are_kept() -> None:
    model = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(8, 2)).double()
    tokens, y = integers(7, N, 2), integers(2, N)
    expected = lw.laplace(model, (tokens, y), "categorical")
    found = lw.laplace(model, (tokens.tolist(), y.numpy().astype(np.int32)), "categorical")
    close(found.log_evidence(), expected.log_evidence())
    close(found.predict(tokens.numpy()).probs, expected.predict(tokens).probs)
    with pytest.raises(lw.errors.NetworkFailed, match="int64"):
        lw.laplace(network(2), (integers(5, N, 3), y), "categorical")


def test_a_network_of_mixed_dtypes_and_a_forward_of_ones_own_get_inputs_as_they_are() -> None:
    seen = []

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        seen.append(x.dtype)
        return model(x.float())

    lw.laplace(network(), (inputs(), normal(N, 1)), "gaussian", forward=forward)
    assert set(seen) == {torch.float64}
    model = nn.Sequential(nn.Linear(3, 2).double(), nn.Linear(2, 1))
    with pytest.raises(lw.errors.NetworkFailed):
        lw.laplace(model, (inputs(), normal(N, 1)), "gaussian")


@pytest.mark.parametrize("structure", ["full", "kron", "ekfac", "block", "diag", "lowrank", "matrix_free"])
def test_targets_of_one_output_need_no_second_dimension_in_any_verb(structure: str) -> None:
    x, y = inputs(), normal(N, seed=1)
    column, model = y.unsqueeze(-1), network(dtype=torch.float64)
    noise = lw.likelihoods.Gaussian(0.5)
    flat, full = (lw.laplace(model, (x, t), noise, structure=structure) for t in (y, column))
    close(flat.log_evidence(), full.log_evidence())
    new, more = inputs(3)[:8], normal(8, seed=4)
    close(flat.predict(new).log_prob(more), full.predict(new).log_prob(more.unsqueeze(-1)))
    close(flat.predict(new).cdf(more.numpy()), full.predict(new).cdf(more.unsqueeze(-1)))
    if structure == "matrix_free":
        return
    close(flat.updated((new, more)).log_evidence(), full.updated((new, more.unsqueeze(-1))).log_evidence())
    close(flat.without((x[:3], y[:3])).log_evidence(), full.without((x[:3], column[:3])).log_evidence(), 1e-6)
    close(flat.recentered().log_evidence(), full.recentered().log_evidence(), 1e-6)
    assert str(flat.check()) == str(full.check())
    one, two = (lw.compare({"a": la}, data=d)["a"].nll for la, d in ((flat, (new, more)), (full, (new, more[:, None]))))
    assert one == pytest.approx(two, rel=1e-10)


def test_targets_of_one_output_in_what_stands_beside_a_fit() -> None:
    x, y, model = inputs(), normal(N, seed=1), network(dtype=torch.float64)
    flat, full = ((x.numpy(), y.numpy()), (x, y.unsqueeze(-1)))
    noise = lw.likelihoods.Gaussian(0.5)
    close(*(lw.gp.ella(model, data, noise, rank=4).log_evidence() for data in (flat, full)))
    theta = lw.log_joint(model, full, noise, 1.0).start
    close(*(lw.log_joint(model, data, noise, 1.0)(theta) for data in (flat, full)))
    close(*(lw.scores.sketched_lanczos(model, data, noise, rank=3)(x.numpy()) for data in (flat, full)))
    exact = [lw.laplace(model, data, noise, structure="full") for data in (flat, full)]
    close(*(la.leave_one_out("network").score for la in exact))
    close(*(la.tuned().likelihood.noise for la in exact))
    labels = integers(2, N)
    for make in (lw.likelihoods.Bernoulli, lw.likelihoods.Poisson):
        close(*(lw.laplace(model, (x, t), make()).log_evidence() for t in (labels, labels.unsqueeze(-1))))
    ordinal = lw.likelihoods.Ordinal([0.0])  # whose labels are (n,) for (n, 1): nothing is added
    assert lw.laplace(model, (x, labels), ordinal).n == N
    mixed = lw.mixture(exact).predict(x)
    close(mixed.log_prob(y), mixed.log_prob(y.unsqueeze(-1)))


@pytest.mark.full
def test_targets_of_one_output_in_what_takes_longer() -> None:
    x, y, model = inputs(), normal(N, seed=1), network(dtype=torch.float64)
    flat, full = ((x.numpy(), y.numpy()), (x, y.unsqueeze(-1)))
    exact = [lw.laplace(model, data, lw.likelihoods.Gaussian(0.5), structure="full") for data in (flat, full)]
    held = exact[0].tuned(method="validation", data=flat), exact[1].tuned(method="validation", data=full)
    close(*(la.likelihood.noise for la in held))
    close(*(torch.tensor(la.certify(8, inputs=x.numpy()).variance.value) for la in exact))
    assert lw.doctor(model, flat, "gaussian").ok == lw.doctor(model, full, "gaussian").ok


def test_a_frame_comes_back_as_a_frame_with_its_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """By pandas' own DataFrame where there is pandas, by a stand-in of it where there is none."""
    x, names = inputs(5), Index(f"row {i}" for i in range(N))
    la = lw.laplace(network(2), (inputs(), normal(N, 2, seed=1)), "gaussian", structure="diag")
    pred = la.predict(framed(x, names), progress=False)
    assert pred.index is names
    assert la.predict(x).index is None
    assert pred[3:5].index == ["row 3", "row 4"]
    monkeypatch.setitem(sys.modules, "pandas", ModuleType("pandas"))
    monkeypatch.setattr(sys.modules["pandas"], "DataFrame", lambda columns, index: (columns, index), raising=False)
    columns, index = pred.to_frame()
    assert index is names
    assert list(columns)[:4] == ["mean_0", "mean_1", "std_0", "std_1"]
    assert np.array_equal(columns["std_1"], pred.std[:, 1].numpy())
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(Unsupported, match="pip install pandas, or use to_numpy"):
        pred.to_frame()


def test_pandas_itself() -> None:
    pandas = pytest.importorskip("pandas")
    x, labels = inputs(), integers(2, N)
    frame = pandas.DataFrame(x.numpy(), columns=["a", "b", "c"], index=range(100, 100 + N))
    expected = lw.laplace(network(2), (x, labels), "categorical")
    la = lw.laplace(network(2), (frame, pandas.Series(labels.numpy(), index=frame.index)), "categorical")
    assert torch.equal(la.log_evidence(), expected.log_evidence())
    out = la.predict(frame.sample(frac=1.0, random_state=0)).to_frame()
    assert_close(torch.tensor(out.loc[frame.index, "mean_1"].to_numpy()), expected.predict(x).probs[:, 1])
    frame["flag"] = frame["a"] > 0  # bool beside float
    assert given.array(frame).dtype == torch.float64
    frame["name"] = "x"
    with pytest.raises(InvalidValue, match="column 'name' holds"):
        la.predict(frame)
    missing = pandas.Series(pandas.array([1, None, *[0] * (N - 2)], dtype="Int64"))
    with pytest.raises(InvalidValue, match=r"missing"):  # NaN, or an object where pandas is older
        lw.laplace(network(2), (x, missing), "categorical")


def test_hugging_face_datasets_and_polars_themselves() -> None:
    datasets, polars = pytest.importorskip("datasets"), pytest.importorskip("polars")
    x, labels, model = inputs(), integers(2, N), network(2)
    expected = lw.laplace(model, (x, labels), "categorical")
    table = datasets.Dataset.from_dict({"input": x.tolist(), "labels": labels.tolist()})
    assert_close(lw.laplace(model, table, "categorical").log_evidence(), expected.log_evidence())
    frame = polars.DataFrame({name: x[:, j].numpy() for j, name in enumerate("abc")})
    la = lw.laplace(model, (frame, polars.Series(labels.numpy())), "categorical")
    assert_close(la.log_evidence(), expected.log_evidence())
    for new in (table, frame):
        assert_close(la.predict(new).probs, expected.predict(x).probs)


def test_what_is_no_number_is_named() -> None:
    x, y = inputs(), normal(N, 1)
    bad = {
        "column 'b' holds": (Frame({"a": np.ones(N), "b": np.array(["x"] * N, dtype=object)}), y),
        "encode it as numbers": (x, np.array(["cat"] * N)),
        "equal lengths": ([[1.0, 2.0], [3.0]], y[:2]),
        "has no dtype in torch": (x.numpy().astype(np.longdouble), y),
    }
    for says, data in bad.items():
        with pytest.raises(InvalidValue, match=says):
            lw.laplace(network(), data, "gaussian")
    mixed = given.array(Frame({"a": np.array([0.5, 1.5]), "b": np.array([True, False])}))
    close(mixed, torch.tensor([[0.5, 1.0], [1.5, 0.0]], dtype=torch.float64))


# -- loaders ---------------------------------------------------------------------------------------------------------


def loaded(x: Tensor, **options: Any) -> DataLoader:
    return DataLoader(TensorDataset(x, x[:, :1]), batch_size=8, **options)


ASKED: dict[str, dict[str, Any]] = {
    "joint": {"joint": True},
    "by the network": {"via": "network", "samples": 5},
    "tangent": {"mean": "tangent"},
    "process": {"mean": "process"},
    "mixture": {"mean": "mixture"},
    "probit": {"link": "probit"},
}


@pytest.mark.parametrize("case", ASKED)
def test_a_loader_is_predicted_as_all_of_its_inputs_are(case: str) -> None:
    x, new = inputs(), inputs(5)
    likelihood, y = ("categorical", integers(3, N)) if case == "probit" else ("gaussian", normal(N, 3, seed=1))
    la = lw.laplace(network(3, torch.float64), (x, y), likelihood).recentered()
    own = [seeded(3), seeded(3)] if case == "by the network" else [None, None]
    whole, parts = (la.predict(t, **ASKED[case], generator=g) for t, g in zip((new, loaded(new)), own, strict=True))
    close(parts.mean, whole.mean)
    close(parts.covariance, whole.covariance)
    close(parts.f_sample(3), whole.f_sample(3))
    if own[0] is not None and own[1] is not None:
        assert torch.equal(own[0].get_state(), own[1].get_state())


def test_every_kind_of_posterior_predicts_loaders() -> None:
    x, y, new, model = inputs(), normal(N, 2, seed=1), inputs(5), network(2, torch.float64)
    noise = lw.likelihoods.Gaussian(0.4)
    la = lw.laplace(model, (x, y), noise)
    target = lw.log_joint(model, (x, y), noise, 1.0)
    particles = target.fitted(lw.posterior.Particles(target.tangent, la.posterior.draw(6, seeded(0))), "hand")
    streamed = lw.laplace(model, (x, y), noise, structure=lw.curvature.MatrixFree(samples=6))
    for fit in (la, particles, streamed, lw.mixture([la, particles]), lw.gp.ella(model, (x, y), noise, rank=5)):
        close(fit.predict(loaded(new)).mean, fit.predict(new).mean)
        close(fit.predict(loaded(new)).f_var, fit.predict(new.numpy()).f_var)
        close(fit.predict(new, progress=True).f_var, fit.predict(new).f_var)


def test_outputs_that_are_draws_are_put_together_about_their_mean() -> None:
    x, y, new = inputs(), normal(N, 600, seed=1), inputs(5)  # past 512 outputs a prediction is draws about f
    la = lw.laplace(nn.Linear(3, 600).double(), (x, y), "gaussian", structure="diag")
    parts, whole = la.predict(loaded(new), samples=4), la.predict(new, samples=4)
    close(parts.f_mean, whole.f_mean)
    close(parts.f_var, whole.f_var)


def test_a_loader_that_shuffles_or_drops_is_told() -> None:
    la, new = lw.laplace(network(), (inputs(), normal(N, 1)), "gaussian"), inputs(5)
    before = torch.get_rng_state()
    with pytest.warns(LapwingWarning, match="shuffle=False"):
        pred = la.predict(loaded(new, shuffle=True))
    assert torch.equal(torch.get_rng_state(), before)
    assert_close(pred.mean.sort(0).values, la.predict(new).mean.sort(0).values, rtol=1e-5, atol=1e-6)
    with pytest.warns(LapwingWarning, match="6 examples are not predicted"):
        assert len(la.predict(loaded(new, drop_last=True)).mean) == 24
    with pytest.raises(InvalidValue, match="at least one"):
        la.predict(DataLoader(TensorDataset(new[:0])))
    with pytest.raises(InvalidValue, match="length 3"):
        la.predict(DataLoader(TensorDataset(new, new, new)))


def test_progress_is_shown_when_asked_for_and_only_then(capsys: pytest.CaptureFixture[str]) -> None:
    x, y = inputs(), normal(N, 1, seed=1)
    la = lw.laplace(network(dtype=torch.float64), (x, y), "gaussian")
    runs: dict[str, Callable[[bool], Any]] = {
        "tuning": lambda p: la.tuned(progress=p),
        "predictions": lambda p: la.predict(x, progress=p),
        "products": lambda p: la.certify(4, progress=p),
        "tangent map": lambda p: la.recentered(progress=p),
        "leave one out": lambda p: la.leave_one_out(progress=p),
    }
    for label, run in runs.items():
        capsys.readouterr()
        run(False)
        assert capsys.readouterr().err == ""
        run(True)
        assert label in capsys.readouterr().err


class Bar:
    """In the place of tqdm's, which shows a step only where the last was long ago."""

    shown: ClassVar[list[str]] = []

    def __init__(self, disable: bool, **options: Any) -> None:
        self.disable, self.text = disable, ""

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def set_postfix_str(self, text: str, refresh: bool) -> None:
        self.text = text

    def update(self) -> None:
        Bar.shown += [] if self.disable else [self.text]


SLOWER = [pytest.param(name, marks=pytest.mark.full) for name in ("em", "validation", "calibrated")]


@pytest.mark.filterwarnings("ignore::lapwing.errors.LapwingWarning")
@pytest.mark.parametrize("name", ["mackay", "evidence", *SLOWER])
def test_every_search_shows_its_steps_with_what_they_come_to(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lapwing.tune.watching.tqdm", Bar)
    x, y, model = inputs(), normal(N, 1, seed=1), network(dtype=torch.float64)
    structure = lw.curvature.MatrixFree(samples=8) if name == "em" else "auto"
    options: dict[str, dict[str, Any]] = {
        "evidence": {"center": "map"},
        "em": {"center": "map"},
        "validation": {"method": "validation", "data": (x, y)},
    }
    if name == "calibrated":
        fit = lw.laplace(network(2, torch.float64), (x, integers(2, N)), "classification")
    else:
        fit = lw.laplace(model, (x, y), "gaussian", structure=structure)
    says = {"em": "distance to the fixed point", "validation": "held-out NLL"}
    Bar.shown = []
    plain = fit.tuned(**options.get(name, {}))
    assert Bar.shown == []
    watched = fit.tuned(**options.get(name, {}), progress=True)
    assert len(Bar.shown) >= watched.tuning.iterations > 0 or name in ("evidence", "calibrated")
    assert all(text.startswith(says.get(name, "log evidence")) for text in Bar.shown)
    assert Bar.shown
    close(watched.prior.hyperparameters["precision"], plain.prior.hyperparameters["precision"])


# -- what is at hand -------------------------------------------------------------------------------------------------


def test_metrics_take_arrays_lists_and_flat_targets() -> None:
    x, y = inputs(5), normal(N, seed=6)
    pred = lw.laplace(network(dtype=torch.float64), (inputs(), normal(N, 1)), "gaussian").predict(x)
    column, mean, std = y.unsqueeze(-1), pred.mean, pred.std
    m = lw.metrics
    for metric in (m.nll, m.crps, m.coverage, m.rmse):
        expected = metric(pred, column)
        given = (
            metric(pred, y),
            metric(pred, y.numpy()),
            metric(pred, y.tolist()),
            metric((mean.numpy(), std.numpy()), y.numpy()),
            metric((mean.squeeze(-1), std.squeeze(-1)), y),
            metric(predicted=pred, y=Column(y.numpy())),
        )
        assert given == pytest.approx([expected] * len(given), rel=1e-9)
    close(m.pit(pred, y.numpy()), m.pit(pred, column))
    assert m.rmse(pred, y) == pytest.approx(float((mean.squeeze(-1) - y).square().mean().sqrt()), rel=1e-12)
    assert m.rmse(mean.squeeze(-1).tolist(), y.tolist()) == pytest.approx(m.rmse(pred, y))
    draws = pred.sample(50, seeded(0))
    assert m.rmse(draws, column) == pytest.approx(float((draws.mean(0) - column).square().mean().sqrt()), rel=1e-12)
    assert m.auroc([0.1, 0.2], np.array([0.3])) == 1.0
    p, labels = torch.softmax(normal(N, 3), -1), integers(3, N)
    for metric in (m.nll, m.brier, m.accuracy, m.ece):
        assert metric(p.numpy(), labels.numpy()) == metric(p.tolist(), labels.tolist()) == metric(p, labels)
    with pytest.raises(InvalidValue, match="a tensor, an array or a list of numbers, got str"):
        m.nll(p, "labels")
    with pytest.raises(Unsupported, match="is of classes"):
        m.rmse(lw.laplace(network(2), (x, integers(2, N)), "categorical").predict(x), labels)


def test_a_summary_has_what_the_single_metrics_say() -> None:
    x, m = inputs(5), lw.metrics
    real = lw.laplace(network(dtype=torch.float64), (inputs(), normal(N, 1)), "gaussian").predict(x)
    y = normal(N, seed=6)
    wanted = {"rmse": m.rmse, "nll": m.nll, "crps": m.crps, "coverage": m.coverage}
    assert m.summary(real, y.numpy()) == {k: f(real, y) for k, f in wanted.items()} | {"sharpness": m.sharpness(real)}
    pair = real.mean, real.std
    assert m.summary(pair, y) == pytest.approx(m.summary(real, y), rel=1e-6)
    draws = real.sample(40, seeded(0))
    assert list(m.summary(draws, y)) == ["rmse", "crps", "coverage", "sharpness"]
    labels = integers(3, N)
    classes = lw.laplace(network(3), (inputs(), labels), "categorical").predict(x)
    named = {"accuracy": m.accuracy, "nll": m.nll, "brier": m.brier, "ece": m.ece}
    assert m.summary(classes, labels.tolist()) == {k: f(classes, labels) for k, f in named.items()}
    assert m.summary(classes.probs, labels)["brier"] == m.brier(classes.probs, labels)


def test_a_calibration_is_saved_and_loaded(tmp_path: Path) -> None:
    x, y = inputs(5), normal(N, seed=6)
    pred = lw.laplace(network(dtype=torch.float64), (inputs(), normal(N, 1)), "gaussian").predict(x)
    sets = lw.conformal.calibrate(pred, y.numpy(), level=0.8)
    close(sets.threshold, lw.conformal.calibrate(pred, y.unsqueeze(-1), level=0.8).threshold)
    sets.save(tmp_path / "sets.safetensors")
    again = lw.conformal.load(tmp_path / "sets.safetensors")
    assert repr(again) == repr(sets)
    close(again.interval(pred)[1], sets.interval(pred)[1], 0.0)
    with pytest.raises(InvalidValue, match=r"a calibration: read it with lw\.conformal\.load"):
        lw.load(tmp_path / "sets.safetensors", network())
    lw.laplace(network(), (x, y), "gaussian").save(tmp_path / "la.safetensors")
    with pytest.raises(InvalidValue, match=r"a saved fit: read it with lw\.load"):
        lw.conformal.load(tmp_path / "la.safetensors")
    told = {"schema": 1, "score": "normalized", "level": 1.5, "n": 3, "likelihood": "gaussian"}
    lw.files.write(tmp_path / "odd", {"threshold": torch.ones(1)}, told, lw.files.CONFORMAL)
    with pytest.raises(lw.errors.BrokenFile, match="does not hold a calibration"):
        lw.conformal.load(tmp_path / "odd")


def test_a_fit_is_a_table_in_a_notebook() -> None:
    la = lw.laplace(network(), (inputs(), normal(N, 1)), "gaussian", structure="kron")
    told = la._repr_html_()
    for words in ("<table>", "<th>curvature</th><td>kron, exact factor</td>", "<td>21</td>", "<td>not tuned</td>"):
        assert words in told
    assert "<table>" in lw.compare([la, la.replace(prior=2.0)])._repr_html_()


def test_compare_takes_a_list() -> None:
    la = lw.laplace(network(), (inputs(), normal(N, 1)), "gaussian")
    other = la.replace(prior=3.0)
    listed, named = lw.compare([la, other]), lw.compare({"0": la, "1": other})
    assert listed == named
    assert listed["1"].log_evidence == float(other.log_evidence())
    assert lw.compare((la, other)) == named


@pytest.mark.parametrize("inputs_of", [1, 2])
def test_pictures_are_drawn_in_axes_that_are_given(inputs_of: int) -> None:
    figures = pytest.importorskip("matplotlib.figure")
    x, y = normal(N, inputs_of), normal(N, 1, seed=1)
    la = lw.laplace(nn.Linear(inputs_of, 1).double(), (x, y), "gaussian")
    pred, panels = la.predict(x), 1 if inputs_of == 1 else 3
    figure = figures.Figure()
    axes = figure.subplots(1, panels)
    assert pred.plot(x.numpy(), data=(x.numpy(), y.numpy()), ax=axes) is figure
    assert all(one.has_data() for one in np.ravel(axes))
    with pytest.raises(InvalidValue, match=f"draws in {panels} matplotlib axes, and ax= gives 2"):
        pred.plot(x, ax=list(figures.Figure().subplots(1, 2)))
    labels = lw.metrics.reliability(torch.softmax(normal(N, 2), -1), integers(2, N))
    risk = lw.metrics.selective_risk(normal(N), normal(N, seed=2))
    for shown in (labels, risk, lw.compare([la, la.replace(prior=2.0)], data=(x, y))):
        single = figures.Figure()
        assert shown.plot(ax=single.subplots()) is single
        assert single.axes[0].has_data()
        assert shown.plot() is not single
    both = figures.Figure()
    labels.plot(ax=both.subplots(2, 1))
    assert all(one.has_data() for one in both.axes)


def test_one_example_is_told_to_become_a_batch() -> None:
    x = torch.randn(9, 3)
    la = lw.laplace(nn.Sequential(nn.Linear(3, 2)), (x, torch.randn(9, 2)), "gaussian")
    for one in (x[0], x[0].numpy()):
        with pytest.raises(lw.errors.NetworkFailed, match=r"make one example a batch, x\[None\]"):
            la.predict(one)
    assert la.predict(x[0][None]).mean.shape == (1, 2)
