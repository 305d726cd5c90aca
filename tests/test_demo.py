"""The demo's measures of quality, against their definitions; its data keep what is hidden hidden."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("sklearn", reason="the demo needs the extra demo")
pytest.importorskip("matplotlib", reason="the demo needs the extra demo")

from lapwing.demo import data, metrics, page


@pytest.fixture(params=[0, 1, 2])
def predictions(request):
    """Probabilities over 4 classes, and labels drawn from another distribution."""
    generator = torch.Generator().manual_seed(request.param)
    p = torch.randn(57, 4, generator=generator, dtype=torch.float64).mul(2).softmax(-1)
    return p, torch.randint(4, (57,), generator=generator)


def test_nll_is_cross_entropy_and_brier_is_squared_distance(predictions):
    p, y = predictions
    got = metrics.classification(p, y)
    brier = sum((p[i, k] - int(y[i] == k)) ** 2 for i in range(len(y)) for k in range(4)) / len(y)
    assert got["NLL"] == pytest.approx(float(torch.nn.functional.nll_loss(p.log(), y)), abs=1e-12)
    assert got["Brier"] == pytest.approx(float(brier), abs=1e-12)
    assert got["accuracy"] == pytest.approx(sum(int(p[i].argmax() == y[i]) for i in range(len(y))) / len(y))


def test_ece_is_the_mean_gap_over_bins(predictions):
    p, y = predictions
    total = 0.0
    for b in range(15):
        inside = [i for i in range(len(y)) if b / 15 <= float(p[i].max()) < (b + 1) / 15]
        if inside:
            right = sum(int(p[i].argmax() == y[i]) for i in inside) / len(inside)
            total += len(inside) / len(y) * abs(right - sum(float(p[i].max()) for i in inside) / len(inside))
    assert metrics.classification(p, y)["ECE"] == pytest.approx(total, abs=1e-12)


def test_ece_of_certain_predictions_is_the_error_rate():
    p = torch.eye(3, dtype=torch.float64)[[0, 1, 2, 0]]
    bins = metrics.reliability(p, torch.tensor([0, 1, 0, 0]))
    assert bins.ece == pytest.approx(0.25)
    assert float(bins.fraction.sum()) == pytest.approx(1)


def test_nll_of_a_class_ruled_out_is_finite():
    got = metrics.classification(torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.tensor([1, 0]))
    assert 300 < got["NLL"] < 400


def test_auroc_is_the_chance_that_an_unknown_scores_higher():
    known, unknown = torch.tensor([0.1, 0.4, 0.4, 0.8]), torch.tensor([0.4, 0.9, 0.2])
    pairs = [(float(u > k) + 0.5 * float(u == k)) for k in known for u in unknown]
    assert metrics.auroc(known, unknown) == pytest.approx(sum(pairs) / len(pairs))
    assert metrics.auroc(unknown, known) == pytest.approx(1 - sum(pairs) / len(pairs))


def test_regression_scores_are_those_of_a_normal_in_the_targets_unit():
    generator = torch.Generator().manual_seed(0)
    mean, y = torch.randn(2, 41, 1, generator=generator, dtype=torch.float64)
    std = torch.rand(41, 1, generator=generator, dtype=torch.float64) + 0.2
    got = metrics.regression(mean, std, y, unit=3.0)
    normal = torch.distributions.Normal(3 * mean, 3 * std)
    assert got["NLL"] == pytest.approx(float(-normal.log_prob(3 * y).mean()), abs=1e-12)
    assert got["RMSE"] == pytest.approx(float((3 * y - 3 * mean).square().mean().sqrt()))
    inside = ((y - mean).abs() <= 1.96 * std).double().mean()
    assert got["coverage"] == pytest.approx(float(inside))


def test_moved_pixels_keep_their_values_and_blank_enters():
    images = torch.rand(3, 64, generator=torch.Generator().manual_seed(0)) + 0.1
    for right, down in [(1, 0), (-1, 0), (0, 1), (0, -1), (2, -1)]:
        moved = data.move(images, right, down).reshape(3, 8, 8)
        rows, columns = range(max(down, 0), 8 + min(down, 0)), range(max(right, 0), 8 + min(right, 0))
        source = images.reshape(3, 8, 8)
        for i in range(8):
            for j in range(8):
                want = source[:, i - down, j - right] if i in rows and j in columns else torch.zeros(3)
                torch.testing.assert_close(moved[:, i, j], want)


def test_unknown_digits_and_wines_of_the_gap_are_not_trained_on():
    digits, wines = data.digits(), data.wines()
    assert set(digits.train[1].tolist()) == set(digits.test[1].tolist()) == set(range(7))
    rows = {tuple(x.tolist()) for x in digits.train[0]}
    assert not rows & {tuple(x.tolist()) for x in digits.unknown}
    assert len(digits.train[0]) + len(digits.test[0]) + len(digits.unknown) == 1797
    low, high = data.GAP
    inside = [((x > low) & (x < high)) for x in (wines.flavanoids(part[0]) for part in (wines.train, wines.test))]
    assert not any(bool(i.any()) for i in inside)
    hidden = wines.flavanoids(wines.gap[0])
    assert bool(((hidden > low) & (hidden < high)).all())
    assert len(wines.train[0]) + len(wines.test[0]) + len(wines.gap[0]) == 178


def test_a_table_lines_up_and_marks_what_is_missing():
    lines = metrics.table({"MAP": {"a": "1.0"}, "Laplace": {"a": "22.5", "b": "x"}}, "corner")
    assert lines == [["corner", "a", "b"], ["MAP", "1.0", "–"], ["Laplace", "22.5", "x"]]
    assert len({len(line) for line in metrics.as_text(lines).splitlines()}) == 1


def test_the_page_refers_to_nothing_outside_itself(tmp_path):
    picture = tmp_path / "p.png"
    picture.write_bytes(b"\x89PNG")
    pictures = dict.fromkeys(page.CAPTIONS, picture)
    written = page.write(tmp_path / "index.html", [[["<a>", "b"], ["c", "d"]]], pictures, {"x": {"after": "<la>"}})
    text = written.read_text(encoding="utf-8")
    assert text.count('src="data:image/png;base64,') == len(pictures) == text.count("src=")
    assert "http" not in text
    assert "<th>&lt;a&gt;</th>" in text
    assert "&lt;la&gt;" in text
