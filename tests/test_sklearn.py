"""Estimators for scikit-learn: its own checks, and what they promise beyond those."""

# ruff: noqa: E402
from __future__ import annotations

import io
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from torch import nn

pytest.importorskip("sklearn", "1.6", reason="needs the extra sklearn")
scipy_optimize = pytest.importorskip("scipy.optimize")
scipy_stats = pytest.importorskip("scipy.stats")

from scipy.sparse import csr_array
from sklearn.base import clone
from sklearn.datasets import load_iris, load_linnerud
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator, estimator_checks_generator

from lapwing.integrations.sklearn import LaplaceClassifier, LaplaceRegressor

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 3)) * [1.0, 10.0, 0.1] + [0.0, 5.0, 1.0]
Y = X @ [1.0, 0.2, 5.0] + 0.3 * RNG.normal(size=40)
LABELS = np.where(np.median(Y) < Y, "high", "low")
BRIEF = {
    "check_estimators_unfitted",
    "check_fit2d_1sample",
    "check_no_attributes_set_in_init",
    "check_parameters_default_constructible",
    "check_complex_data",
    "check_estimator_cloneable",
}
QUICK: dict[str, Any] = {"network": (2,), "max_iter": 30, "random_state": 0}


@pytest.fixture(scope="module")
def regressor() -> LaplaceRegressor:
    return LaplaceRegressor(**QUICK).fit(X, Y)


@pytest.fixture(scope="module")
def classifier() -> LaplaceClassifier:
    return LaplaceClassifier(**QUICK).fit(X, LABELS)


# -- what scikit-learn asks of every estimator -------------------------------------------------------------------


def checks() -> list[Any]:
    """Every check for both estimators; but for a few, of the full tier."""
    out = []
    for kind in (LaplaceClassifier, LaplaceRegressor):
        for estimator, check in estimator_checks_generator(kind(network=(3,), max_iter=200, random_state=0)):
            name = getattr(check, "func", check).__name__
            marks = [] if name in BRIEF else [pytest.mark.full]
            out.append(pytest.param(estimator, check, id=f"{kind.__name__}-{name}", marks=marks))
    return out


@pytest.mark.filterwarnings("ignore")  # they provoke warnings, and look for those that they want
@pytest.mark.parametrize(("estimator", "check"), checks())
def test_every_check_of_scikit_learn_passes(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [LaplaceClassifier, LaplaceRegressor])
def test_every_check_of_scikit_learn_passes_as_they_come(kind: Any) -> None:
    check_estimator(kind())


# -- evidence ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("targets", [Y, np.stack([Y, 100 * X[:, 1] ** 2], 1)])
def test_the_evidence_of_a_linear_model_is_that_of_bayesian_linear_regression_in_units_of_y(targets: Any) -> None:
    model = LaplaceRegressor(network=(), max_iter=50).fit(X, targets)
    precision, noise = float(model.laplace_.prior.precision), float(model.laplace_.likelihood.noise)
    features = np.column_stack([(X - X.mean(0)) / X.std(0), np.ones(len(X))])
    cov = features @ features.T / precision + noise**2 * np.eye(len(X))
    columns = targets.reshape(len(X), -1).T
    each = [scipy_stats.multivariate_normal(np.full(len(X), t.mean()), t.var() * cov).logpdf(t) for t in columns]
    assert_allclose(model.log_evidence_, sum(each), rtol=1e-8)


def test_another_unit_of_inputs_and_targets_changes_nothing_but_the_unit(regressor: LaplaceRegressor) -> None:
    other = LaplaceRegressor(**QUICK).fit(X * [2.0, 0.5, 4.0] - 8.0, 1024 * Y)
    mean, std = regressor.predict(X, return_std=True)
    assert_allclose(other.predict(X * [2.0, 0.5, 4.0] - 8.0, return_std=True), (1024 * mean, 1024 * std), rtol=1e-6)
    assert_allclose(other.log_evidence_, regressor.log_evidence_ - len(Y) * math.log(1024), rtol=1e-6)


@pytest.mark.full
def test_the_evidence_takes_hidden_layers_where_the_data_bend() -> None:
    x = np.linspace(-3, 3, 60)[:, None]
    model = LaplaceRegressor(max_iter=200, random_state=0).fit(x, np.sin(2 * x[:, 0]) + 0.1 * RNG.normal(size=60))
    assert model.comparison_["linear"].difference < -20
    assert model.comparison_.best.parameters == model.laplace_.tangent.layout.size > 2
    assert model.score(x, np.sin(2 * x[:, 0])) > 0.7  # after 200 steps; a line has 0.2


# -- what comes out ----------------------------------------------------------------------------------------------


def test_a_network_of_ones_own_is_trained_as_a_copy_and_predicts_what_its_fit_does() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.1), nn.Linear(4, 1))  # float32
    before = {k: v.clone() for k, v in net.state_dict().items()}
    model = LaplaceRegressor(net, max_iter=30).fit(X, Y)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert net.training
    prediction = model.laplace_.predict((X - X.mean(0)) / X.std(0))
    mean, std = model.predict(X, return_std=True)
    assert_allclose(mean, prediction.mean.numpy()[:, 0] * Y.std() + Y.mean(), rtol=1e-6)
    assert_allclose(std, prediction.std.numpy()[:, 0] * Y.std(), rtol=1e-6)


@pytest.mark.full
def test_a_factory_is_told_the_numbers_of_features_and_of_outputs() -> None:
    asked = []

    def make(inputs: int, outputs: int) -> nn.Module:
        asked.append((inputs, outputs))
        return nn.Linear(inputs, outputs)

    assert LaplaceClassifier(make, max_iter=5).fit(X, LABELS).score(X, LABELS) > 0.5
    assert asked == [(3, 2)]


def test_targets_keep_their_shape(regressor: LaplaceRegressor) -> None:
    features, three = load_linnerud(return_X_y=True)
    model = LaplaceRegressor(**QUICK).fit(features, three)
    mean, std = model.predict(features[:7], return_std=True)
    assert mean.shape == std.shape == (7, 3)
    assert model.sample_y(features[:7], 5).shape == (7, 3, 5)
    assert regressor.predict(X).shape == (40,)
    assert regressor.sample_y(X, 5).shape == (40, 5)
    assert LaplaceRegressor(**QUICK).fit(X, Y[:, None]).predict(X).shape == (40, 1)


def test_draws_of_numbers_have_the_mean_and_std_of_predictions(regressor: LaplaceRegressor) -> None:
    mean, std = regressor.predict(X[:4], return_std=True)
    drawn = regressor.sample_y(X[:4], 20_000, random_state=1)
    assert (np.abs(drawn.mean(1) - mean) < 5 * std / math.sqrt(20_000)).all()
    assert_allclose(drawn.std(1), std, rtol=0.05)
    assert_array_equal(drawn, regressor.sample_y(X[:4], 20_000, random_state=1))
    assert not np.array_equal(drawn, regressor.sample_y(X[:4], 20_000, random_state=2))


def test_draws_of_labels_are_as_frequent_as_probabilities_say(classifier: LaplaceClassifier) -> None:
    probs, n = classifier.predict_proba(X[:4]), 4000
    drawn = classifier.sample_y(X[:4], n, random_state=1)
    assert set(drawn.ravel()) <= set(LABELS)
    share = (drawn == classifier.classes_[0]).mean(1)
    assert (np.abs(share - probs[:, 0]) < 5 * np.sqrt(probs[:, 0] * probs[:, 1] / n) + 0.01).all()


def test_three_classes_by_their_names() -> None:
    features, species = load_iris(return_X_y=True)
    names = np.array(["setosa", "versicolor", "virginica"], dtype=object)[species]
    model = LaplaceClassifier((4,), max_iter=60, random_state=0).fit(features, names)
    probs = model.predict_proba(features)
    assert_allclose(probs.sum(1), 1, rtol=1e-9)
    assert_array_equal(model.predict(features), model.classes_[probs.argmax(1)])
    assert model.score(features, names) > 0.9
    x = (features - features.mean(0)) / features.std(0)
    assert_allclose(model.log_evidence_, evidence_by_hand(model.laplace_.tangent.model, x, species), rtol=1e-5)


def evidence_by_hand(net: nn.Module, x: np.ndarray, labels: np.ndarray) -> float:
    """log p(y | θ*) − ½ Σ_l λ_l ‖θ_l‖² + ½ Σ_l p_l log λ_l − ½ log |G + Λ|, at its greatest in λ, one a layer."""
    inputs = torch.as_tensor(x)
    weights, buffers = dict(net.named_parameters()), dict(net.named_buffers())
    theta = torch.cat([p.detach().flatten() for p in weights.values()])
    layer = torch.cat([torch.full((p.numel(),), int(name[0]) // 2) for name, p in weights.items()])

    def outputs(flat: torch.Tensor) -> torch.Tensor:
        pieces = zip(weights.items(), flat.split([p.numel() for p in weights.values()]), strict=True)
        return torch.func.functional_call(net, {k: f.reshape(p.shape) for (k, p), f in pieces} | buffers, (inputs,))

    logits, J = outputs(theta), torch.autograd.functional.jacobian(outputs, theta)
    probs = logits.softmax(1)
    H = torch.diag_embed(probs) - probs[:, :, None] * probs[:, None]
    G = torch.einsum("ncp,ncd,ndq->pq", J, H, J)
    fit = float(logits.log_softmax(1)[range(len(labels)), labels].sum())

    def less(log_precisions: np.ndarray) -> float:
        precisions = torch.as_tensor(log_precisions).exp()[layer]
        penalty = (precisions * theta**2).sum() - precisions.log().sum() + torch.logdet(G + precisions.diag())
        return float(0.5 * penalty) - fit

    return -scipy_optimize.minimize(less, np.zeros(int(layer.max()) + 1), tol=1e-10).fun


# -- what goes in, and habits of scikit-learn ---------------------------------------------------------------------


@pytest.mark.full
def test_frames_and_sparse_matrices_are_what_arrays_are(regressor: LaplaceRegressor) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(X, columns=["a", "b", "c"])
    mean = regressor.predict(X)
    named = LaplaceRegressor(**QUICK).fit(frame, pandas.Series(Y))
    assert_allclose(named.predict(frame), mean, rtol=1e-6)  # another order in memory, other rounding
    assert_array_equal(named.feature_names_in_, ["a", "b", "c"])
    assert_allclose(LaplaceRegressor(**QUICK).fit(csr_array(X), Y).predict(csr_array(X)), mean, rtol=1e-6)


def test_the_random_state_decides_and_no_global_one_does(regressor: LaplaceRegressor) -> None:
    torch.manual_seed(5), np.random.seed(5)  # noqa: NPY002
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    again = LaplaceRegressor(**QUICK).fit(X, Y)
    assert torch.equal(before[0], torch.get_rng_state())
    assert_array_equal(before[1], np.random.get_state()[1])  # noqa: NPY002
    assert_array_equal(again.predict(X), regressor.predict(X))
    other = LaplaceRegressor(**{**QUICK, "random_state": 1}).fit(X, Y)
    assert not np.array_equal(other.predict(X), regressor.predict(X))


def test_copies_in_files_predict_the_same_bits(regressor: LaplaceRegressor, classifier: LaplaceClassifier) -> None:
    joblib = pytest.importorskip("joblib")
    assert_array_equal(pickle.loads(pickle.dumps(classifier)).predict_proba(X), classifier.predict_proba(X))
    buffer = io.BytesIO()
    joblib.dump(regressor, buffer)
    buffer.seek(0)
    assert_array_equal(joblib.load(buffer).predict(X, return_std=True), regressor.predict(X, return_std=True))


@pytest.mark.full
def test_pipelines_clones_and_searches() -> None:
    pipe = make_pipeline(StandardScaler(), LaplaceRegressor(**QUICK))
    assert cross_val_score(pipe, X, Y, cv=2).shape == (2,)
    search = GridSearchCV(pipe, {"laplaceregressor__network": [(), (2,)]}, cv=2).fit(X, Y)
    assert search.best_params_["laplaceregressor__network"] in [(), (2,)]
    net = nn.Linear(3, 1)
    copied = clone(LaplaceRegressor(net, max_iter=7))
    assert copied.get_params()["max_iter"] == 7
    assert copied.network is not net
    assert not hasattr(copied, "laplace_")


# -- errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"network": "big"}, "network must be 'auto', widths"),
        ({"network": (3, 0)}, "width of a layer"),
        ({"network": nn.Linear(3, 2)}, r"must give \(n, 1\) for inputs \(n, 3\); it gave \(2, 2\)"),
        ({"network": lambda inputs, outputs: None}, "must give a torch.nn.Module"),
        ({"network": nn.Identity()}, "no parameters"),
        ({"max_iter": 0}, "max_iter must be a whole number"),
        ({"random_state": "x"}, "seed"),
    ],
)
def test_settings_that_cannot_be_used_are_value_errors(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        LaplaceRegressor(**settings).fit(X, Y)


def test_data_that_cannot_be_used_are_scikit_learns_errors(regressor: LaplaceRegressor) -> None:
    with pytest.raises(NotFittedError):
        LaplaceClassifier().predict(X)
    with pytest.raises(ValueError, match="NaN"):
        LaplaceRegressor().fit(np.full_like(X, np.nan), Y)
    with pytest.raises(ValueError, match="2 features, but LaplaceRegressor is expecting 3"):
        regressor.predict(X[:, :2])
    with pytest.raises(ValueError, match="1 class"):
        LaplaceClassifier().fit(X, np.zeros(40))
    with pytest.raises(ValueError, match="Unknown label type"):
        LaplaceClassifier().fit(X, Y)
    with pytest.raises(ValueError, match="n_samples"):
        regressor.sample_y(X, 0)
