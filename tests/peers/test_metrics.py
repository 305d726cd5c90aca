"""lapwing.metrics against torchmetrics, where both have a metric."""

from __future__ import annotations

import pytest
import torch
from torchmetrics import functional as tm
from torchmetrics.classification import MulticlassAccuracy, MulticlassCalibrationError

import lapwing as lw
from lapwing import metrics as m


@pytest.fixture(params=[0, 1, 2])
def generator(request) -> torch.Generator:
    return torch.Generator().manual_seed(request.param)


@pytest.mark.parametrize("bins", [4, 15])
@pytest.mark.parametrize("sharp", [0.5, 3.0])
def test_ece_is_torchmetrics_calibration_error(generator, bins, sharp):
    p = torch.softmax(sharp * torch.randn(203, 5, generator=generator, dtype=torch.float64), -1)
    y = torch.randint(5, (203,), generator=generator)
    theirs = tm.classification.multiclass_calibration_error(p, y, num_classes=5, n_bins=bins, norm="l1")
    assert m.ece(p, y, bins) == pytest.approx(float(theirs), abs=1e-6)
    assert m.accuracy(p, y) == pytest.approx(float(tm.classification.multiclass_accuracy(p, y, 5, average="micro")))


def test_predictions_feed_torchmetrics(generator):
    x, y = torch.randn(80, 4, generator=generator), torch.randint(3, (80,), generator=generator)
    pred = lw.laplace(torch.nn.Linear(4, 3), (x, y), "categorical").predict(x)
    theirs = MulticlassCalibrationError(num_classes=3, n_bins=15)(pred.probs, y)
    assert m.ece(pred, y, 15) == pytest.approx(float(theirs), abs=1e-6)
    assert m.accuracy(pred, y) == pytest.approx(
        float(MulticlassAccuracy(num_classes=3, average="micro")(pred.probs, y))
    )


@pytest.mark.parametrize("levels", [4, 10_000])
def test_auroc_is_torchmetrics(generator, levels):
    known = torch.randint(levels, (71,), generator=generator) / (2 * levels)
    unknown = torch.randint(levels, (40,), generator=generator) / (2 * levels) + 0.1
    truth = torch.cat([torch.zeros(71), torch.ones(40)]).long()
    theirs = tm.classification.binary_auroc(torch.cat([known, unknown]), truth)
    assert m.auroc(known, unknown) == pytest.approx(float(theirs), abs=1e-6)


def test_crps_of_many_draws_is_torchmetrics(generator):
    """Theirs is of the draws themselves, s² pairs; ours of what they are draws of, s(s − 1) pairs."""
    s = 50
    draws, y = torch.randn(s, 31, generator=generator).double(), torch.randn(31, generator=generator).double()
    ends = (draws - y).abs().mean(0)
    ours = ends + (m.crps(draws, y, each=True) - ends) * (s - 1) / s
    theirs = tm.regression.continuous_ranked_probability_score(draws.T, y)
    assert float(ours.mean()) == pytest.approx(float(theirs), abs=1e-6)
