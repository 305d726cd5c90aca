"""Scikit-learn's classifier and regressor over `training.py` and the default call of `lw.laplace`.

    x = (X − mean)/scale, each feature by itself; so is t of the targets y of a regression, with scales s:
    log p(y) = log p(t) − n Σ_j log s_j

Shapes: X (n, d), a matrix, a frame or a sparse matrix; y (n,), or (n, c) numbers of a regression.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, MultiOutputMixin, RegressorMixin
from sklearn.preprocessing import StandardScaler
from sklearn.utils import check_random_state, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from lapwing import given
from lapwing.errors import InvalidValue
from lapwing.integrations.sklearn.networks import networks_of
from lapwing.integrations.sklearn.training import chosen
from lapwing.predictive import Prediction

READ: dict[str, Any] = {"accept_sparse": "csr", "dtype": np.float64}


class _Network(BaseEstimator):
    """A network between scaled inputs and scaled targets, of either task."""

    def __init__(self, network: Any = "auto", *, max_iter: int = 1000, random_state: Any = None) -> None:
        self.network = network
        self.max_iter = max_iter
        self.random_state = random_state

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _fit(self, X: Any, y: np.ndarray, task: str, outputs: int) -> None:
        steps, seed = given.whole(self.max_iter, "max_iter", 1), _seed(self.random_state)
        self.x_scaler_ = StandardScaler().fit(_dense(X))
        networks = networks_of(self.network, X.shape[1], outputs, seed)
        found = chosen(networks, self._inputs(X), torch.as_tensor(y), task, steps, seed)
        self.laplace_, self.comparison_, self.n_iter_ = found.fit, found.comparison, found.steps
        self.log_evidence_ = found.log_evidence

    def _inputs(self, X: Any) -> Tensor:
        return torch.as_tensor(self.x_scaler_.transform(_dense(X)))

    def _predict(self, X: Any, joint: bool = False) -> Prediction:
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, **READ)
        return self.laplace_.predict(self._inputs(X), joint=joint)

    def _sample(self, X: Any, n_samples: int, random_state: Any) -> np.ndarray:
        """Draws at all inputs together, (n_samples, n) or (n_samples, n, c), in the units of the network."""
        prediction = self._predict(X, joint=True)
        generator = torch.Generator(prediction.f_mean.device).manual_seed(_seed(random_state))
        return prediction.sample(given.whole(n_samples, "n_samples", 1), generator).cpu().numpy()


class LaplaceClassifier(ClassifierMixin, _Network):
    """A network with class probabilities that know how sure they may be; trained and chosen without held-out examples.

    network: "auto" (a linear model or hidden layers of 50 units, by the evidence), widths of hidden layers such as
    (50, 50), a torch module, a copy of which is trained on, or a function (n_features, n_outputs) -> module, with one
    output a class. max_iter: the most steps of training. random_state: where weights start, and what a step sees.

    Fitted: `classes_`, `log_evidence_` of the labels, `comparison_` of the networks, `laplace_` the fit itself,
    `x_scaler_`, `n_iter_` the steps that the network was trained for, `n_features_in_`."""

    def fit(self, X: Any, y: Any) -> LaplaceClassifier:
        """X (n, d), labels y (n,) of any kind, two classes or more."""
        X, y = validate_data(self, X, y, **READ)
        check_classification_targets(y)
        self.classes_, labels = np.unique(column_or_1d(y, warn=True), return_inverse=True)
        if len(self.classes_) < 2:
            raise InvalidValue(f"a classifier needs labels of 2 classes or more, got 1 class: {self.classes_[0]!r}")
        self._fit(X, labels, "classification", len(self.classes_))
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """Class probabilities (n, c), in the order of `classes_`."""
        return self._predict(X).probs.cpu().numpy()

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class of each input, (n,)."""
        found = self.predict_proba(X).argmax(1)  # first: it says where nothing is fitted
        return self.classes_[found]

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> np.ndarray:
        """Labels drawn from the predictive distribution of all inputs together, (n, n_samples)."""
        drawn = self._sample(X, n_samples, random_state)
        return self.classes_[drawn].T


class LaplaceRegressor(MultiOutputMixin, RegressorMixin, _Network):
    """A network with error bars; trained and chosen without held-out examples.

    network: "auto" (a linear model or hidden layers of 50 units, by the evidence), widths of hidden layers such as
    (50, 50), a torch module, a copy of which is trained on, or a function (n_features, n_outputs) -> module.
    max_iter: the most steps of training. random_state: where weights start, and what a step sees.

    Fitted: `log_evidence_` of y, in its units; `comparison_` of the networks, and `laplace_` the fit itself, of inputs
    and targets as `x_scaler_` and `y_scaler_` give them; `n_iter_` the steps that the network was trained for,
    `n_features_in_`."""

    def fit(self, X: Any, y: Any) -> LaplaceRegressor:
        """X (n, d), y (n,) or (n, c)."""
        X, y = validate_data(self, X, y, **READ, multi_output=True, y_numeric=True, ensure_min_samples=2)
        self._y_shape = y.shape[1:]
        y = y.reshape(len(y), -1).astype(np.float64)
        self.y_scaler_ = StandardScaler().fit(y)
        self._fit(X, self.y_scaler_.transform(y), "regression", y.shape[1])
        self.log_evidence_ -= len(y) * float(np.log(self.y_scaler_.scale_).sum())
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """The mean of y, of the shape of y; with return_std its standard deviation too, noise included."""
        prediction = self._predict(X)
        mean = self._shaped(self.y_scaler_.inverse_transform(prediction.mean.cpu().numpy()))
        return (mean, self._shaped(prediction.std.cpu().numpy() * self.y_scaler_.scale_)) if return_std else mean

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> np.ndarray:
        """Draws of y at all inputs together, noise included, (n, n_samples) or (n, c, n_samples)."""
        drawn = self._sample(X, n_samples, random_state)
        return np.moveaxis(self._shaped(drawn * self.y_scaler_.scale_ + self.y_scaler_.mean_), 0, -1)

    def _shaped(self, y: np.ndarray) -> np.ndarray:
        """Targets (..., c) as those of the fit were."""
        return y.reshape(*y.shape[:-1], *self._y_shape)


def _seed(random_state: Any) -> int:
    return int(check_random_state(random_state).randint(2**31 - 1))


def _dense(X: Any) -> np.ndarray:
    """What networks take: every number, also the zeros of a sparse matrix."""
    return X if isinstance(X, np.ndarray) else X.toarray()
