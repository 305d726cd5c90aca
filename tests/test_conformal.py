"""Split-conformal sets: their coverage on fresh data, whatever is wrong with the model, and their definitions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.conformal import calibrate

SPLITS, N, TEST = 20, 1_000, 1_000
ALLOWED = 0.01


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def regression(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Skewed noise that grows with |x|: nothing that a Gaussian of one noise could say."""
    g = generator(seed)
    x = 4 * torch.rand(n, 1, generator=g, dtype=torch.float64) - 2
    noise = torch.empty(n, 2, dtype=torch.float64).exponential_(generator=g) - 1
    scale = torch.tensor([0.2, 0.6], dtype=torch.float64)
    return x, torch.cat([torch.sin(2 * x), x], 1) + scale * (0.2 + x.abs()) * noise


def classification(n: int, seed: int) -> tuple[Tensor, Tensor]:
    g = generator(seed)
    x = torch.randn(n, 2, generator=g, dtype=torch.float64)
    logits = torch.stack([2 * x[:, 0], x[:, 1], -x[:, 0] * x[:, 1]], -1)
    return x, torch.multinomial(logits.softmax(-1), 1, generator=g).squeeze(-1)


def network(inputs: int, outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs)).double()


def trained(model: nn.Module, x: Tensor, y: Tensor, loss: Any) -> nn.Module:
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(100):  # not to the end: conformal sets do not ask for a good network
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    return model


def fitted(kind: str) -> lw.Laplace:
    if kind == "regression":
        data = regression(60, 1)
        return lw.laplace(trained(network(1, 2), *data, nn.MSELoss()), data, lw.likelihoods.Gaussian(0.1))
    data = classification(60, 1)
    if kind == "binary":
        data = data[0], torch.stack([data[1] == 0, data[1] == 1], -1).double()
        return lw.laplace(trained(network(2, 2), *data, nn.BCEWithLogitsLoss()), data, "bernoulli")
    return lw.laplace(trained(network(2, 3), *data, nn.CrossEntropyLoss()), data, "categorical")


def split(kind: str, n: int, seed: int) -> tuple[Tensor, Tensor]:
    if kind == "regression":
        return regression(n, seed)
    x, y = classification(n, seed)
    return (x, torch.stack([y == 0, y == 1], -1).double()) if kind == "binary" else (x, y)


@pytest.mark.parametrize("score", ["normalized", "quantile"])
@pytest.mark.parametrize("level", [0.8, 0.95])
def test_mean_coverage_of_intervals_is_within_a_percent_of_nominal(score: str, level: float) -> None:
    la, covered = fitted("regression"), []
    for seed in range(SPLITS):
        x, y = regression(N, 100 + seed)
        new, truth = regression(TEST, 200 + seed)
        low, high = calibrate(la.predict(x), y, level, score).interval(la.predict(new))
        covered.append(((low <= truth) & (truth <= high)).double().mean(0))
    assert ((torch.stack(covered).mean(0) - level).abs() < ALLOWED).all()
    plain = la.predict(new).interval(level)
    outside = ((plain[0] > truth) | (truth > plain[1])).double().mean(0)
    assert float(outside.max()) > 1 - level + 5 * ALLOWED  # without it, this model is wrong


@pytest.mark.full
@pytest.mark.parametrize("kind", ["classes", "binary"])
@pytest.mark.parametrize("score", ["probability", "cumulative"])
def test_mean_coverage_of_class_sets_is_within_a_percent_of_nominal(kind: str, score: str) -> None:
    la, covered = fitted(kind), []
    for seed in range(SPLITS):
        (x, y), (new, truth) = split(kind, N, 100 + seed), split(kind, TEST, 200 + seed)
        sets = calibrate(la.predict(x), y, 0.85, score).sets(la.predict(new))
        covered.append(sets.gather(-1, truth.long().unsqueeze(-1)).squeeze(-1).double().mean(0))
    assert ((torch.stack(covered).mean(0) - 0.85).abs() < ALLOWED).all()


def test_the_threshold_is_the_score_of_its_rank() -> None:
    la = fitted("regression")
    x, y = regression(49, 5)
    prediction = la.predict(x)
    found = calibrate(prediction, y, 0.9)
    scores = ((y - prediction.mean).abs() / prediction.std).sort(0).values
    torch.testing.assert_close(found.threshold, scores[44], rtol=1e-12, atol=0)  # the ⌈50 · 0.9⌉ = 45th
    low, high = found.interval(prediction)
    assert int(((low <= y) & (y <= high)).sum()) == 2 * 45
    assert "49 calibration examples" in repr(found)


def test_class_sets_are_those_of_their_definitions() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.5, 0.4], [0.2, 0.2, 0.6], [0.3, 0.4, 0.3]], dtype=torch.float64)
    prediction = lw.Prediction(
        lw.likelihoods.Categorical(), lw.outputs.Normal(p.log(), torch.zeros(4, 3, 3, dtype=torch.float64))
    )
    y = torch.tensor([0, 2, 2, 1])
    # 1 − p_y: 0.5, 0.6, 0.4, 0.6;  ⌈5 · 0.4⌉ = 2nd is 0.5, so classes of p ≥ 0.5
    found = calibrate(prediction, y, 0.4, "probability")
    torch.testing.assert_close(found.threshold, torch.tensor(0.5).double(), rtol=0, atol=1e-12)
    assert found.sets(prediction).sum(-1).tolist()[2:] == [1, 0]
    # more probable, and half of its own: 0.25, 0.7, 0.3, 0.2;  ⌈5 · 0.6⌉ = 3rd is 0.3: the most probable of each
    found = calibrate(prediction, y, 0.6, "cumulative")
    torch.testing.assert_close(found.threshold, torch.tensor(0.3, dtype=torch.float64), rtol=0, atol=1e-12)
    assert torch.equal(found.sets(prediction), nn.functional.one_hot(p.argmax(-1)).bool())


def test_each_position_has_its_own_threshold() -> None:
    g = generator(0)
    f = torch.randn(50, 3, 2, generator=g, dtype=torch.float64)
    scale = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)[:, None]
    y = f + scale * torch.randn(50, 3, 2, generator=g, dtype=torch.float64)
    prediction = lw.Prediction(
        lw.likelihoods.Gaussian(1.0), lw.outputs.Normal(f, torch.zeros(50, 3, 2, 2, dtype=torch.float64))
    )
    found = calibrate(prediction, y, 0.9)
    assert found.threshold.shape == (3, 2)
    for q in range(3):
        alone = lw.Prediction(prediction.likelihood, lw.outputs.Normal(f[:, q], prediction.covariance[:, q]))
        torch.testing.assert_close(found.threshold[q], calibrate(alone, y[:, q], 0.9).threshold, rtol=0, atol=0)


def test_nonsense_is_refused() -> None:
    la, classes = fitted("regression"), fitted("classes")
    (x, y), (xc, yc) = regression(20, 3), classification(20, 3)
    wanted: list[tuple[str, Any]] = [
        ("strictly between", lambda: calibrate(la.predict(x), y, 1.0)),
        ("19 calibration examples or more, got 8", lambda: calibrate(la.predict(x[:8]), y[:8], 0.95)),
        ("'normalized', 'quantile'", lambda: calibrate(la.predict(x), y, score="probability")),
        ("'probability', 'cumulative'", lambda: calibrate(classes.predict(xc), yc, score="quantile")),
        ("shape", lambda: calibrate(la.predict(x), y[:, :1])),
        ("outside 0..2", lambda: calibrate(classes.predict(xc), yc + 1)),
        ("NaN", lambda: calibrate(la.predict(x), torch.full_like(y, math.nan))),
        ("use sets", lambda: calibrate(classes.predict(xc), yc).interval(classes.predict(xc))),
        ("use interval", lambda: calibrate(la.predict(x), y).sets(la.predict(x))),
        ("calibrated for gaussian", lambda: calibrate(la.predict(x), y).interval(classes.predict(xc))),
    ]
    for message, run in wanted:
        with pytest.raises(lw.errors.LapwingError, match=message):
            run()
