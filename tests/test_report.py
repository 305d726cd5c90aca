"""A report's figures are those of the definitions, by loops that share no code with it; its page holds all that it
needs, says what there is not, and is written whole or not at all."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from helpers import close, integers, normal, seeded
from lapwing.metrics import Reliability
from lapwing.report import diagrams, moving, pictures, record, sweep, verdict
from lapwing.report import page as html
from lapwing.report.charts import Axis, Chart, decades, line, nice, short
from lapwing.report.facts import NETWORK, ReportFacts, gather

X, TEST, FAR = normal(30, 3), normal(21, 3, seed=1), 4 * normal(9, 3, seed=2)


def truth(x: Tensor) -> Tensor:
    return torch.stack([x[:, 0] + x[:, 1].sin(), x[:, 2]], -1)


TRAIN = truth(X) + 0.2 * normal(30, 2, seed=3)


def network(outputs: int, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


@pytest.fixture(scope="module")
def numbers() -> tuple[lw.Laplace, Tensor]:
    fit = lw.laplace(network(2), (X, TRAIN), lw.likelihoods.Gaussian(0.4), structure="full", prior=2.0)
    return fit.recentered(), truth(TEST) + 0.2 * normal(21, 2)


@pytest.fixture(scope="module")
def classes() -> tuple[lw.Laplace, Tensor]:
    fit = lw.laplace(network(4), (X, integers(4, 30)), "categorical", structure="kron", prior=3.0)
    return fit, integers(4, 21, seed=5)


def facts_of(pair: tuple[lw.Laplace, Tensor]) -> ReportFacts:
    fit, y = pair
    return gather({"it": fit}, (TEST, y))


# -- figures ---------------------------------------------------------------------------------------------------------


def test_nll_of_numbers_is_that_of_normals_and_the_network_has_its_residuals_as_noise(numbers):
    (fit, y), facts = numbers, facts_of(numbers)
    model = fit.tangent.model
    noise = (model(X) - TRAIN).square().mean().sqrt()
    by_hand = -torch.distributions.Normal(model(TEST), noise).log_prob(y).sum(-1)
    close(facts.network.nll, by_hand.detach())
    pred = fit.predict(TEST)
    whole = torch.distributions.MultivariateNormal(
        pred.mean, pred.covariance + fit.likelihood.noise.square() * torch.eye(2).double()
    )
    close(facts.fits[0].nll, -whole.log_prob(y))


def test_nll_of_classes_is_minus_the_log_of_the_labels_probability(classes):
    (fit, y), facts = classes, facts_of(classes)
    p = fit.tangent.model(TEST).detach().softmax(-1)
    close(facts.network.nll, torch.tensor([-math.log(p[i, y[i]]) for i in range(21)], dtype=torch.float64))
    probs = fit.predict(TEST).probs
    close(facts.fits[0].nll, torch.tensor([-math.log(probs[i, y[i]]) for i in range(21)], dtype=torch.float64))
    assert facts.network.scores["confidence"] == pytest.approx(float(p.max(-1).values.mean()))


@pytest.mark.parametrize("which", ["numbers", "classes"])
def test_the_gain_is_the_mean_difference_with_its_standard_error(which, request):
    facts = facts_of(request.getfixturevalue(which))
    gain = facts.gain(facts.fits[0])
    each = [float(a - b) for a, b in zip(facts.network.nll, facts.fits[0].nll, strict=True)]
    mean = sum(each) / 21
    assert gain.value == pytest.approx(mean)
    assert gain.standard_error == pytest.approx(math.sqrt(sum((v - mean) ** 2 for v in each) / 20 / 21))


@pytest.mark.parametrize("which", ["numbers", "classes"])
def test_risk_is_the_mean_loss_of_the_surest(which, request):
    one = facts_of(request.getfixturevalue(which)).fits[0]
    order = sorted(range(21), key=lambda i: float(one.uncertainty[i]))
    assert len({round(float(u), 12) for u in one.uncertainty}) == 21  # no ties
    for k in range(1, 22):
        assert float(one.risk.risk[k - 1]) == pytest.approx(sum(float(one.loss[i]) for i in order[:k]) / k)


def test_losses_are_wrong_labels_and_absolute_errors(numbers, classes):
    fit, y = classes
    wrong = [float(int(fit.predict(TEST).probs[i].argmax()) != int(y[i])) for i in range(21)]
    assert facts_of(classes).fits[0].loss.tolist() == wrong
    fit, y = numbers
    away = (fit.predict(TEST).mean - y).abs().mean(-1)
    close(facts_of(numbers).fits[0].loss, away)


def test_intervals_hold_as_often_as_a_count_of_them_says(numbers):
    (fit, y), one = numbers, facts_of(numbers).fits[0]
    pred = fit.predict(TEST)
    for level, share in diagrams.coverages(one.pit):
        low, high = pred.interval(level)
        assert share == pytest.approx(float(((low <= y) & (y <= high)).double().mean()))
    low, high = pred.interval(0.95)
    assert one.scores["coverage"] == pytest.approx(float(((low <= y) & (y <= high)).double().mean()))
    assert one.scores["sharpness"] == pytest.approx(float((high - low).mean()))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_histograms_are_numpys(seed):
    values, edges = torch.rand(200, generator=seeded(seed), dtype=torch.float64), [k / 7 for k in range(8)]
    values = torch.cat([values, torch.tensor([0.0, 1.0, 1 / 7, 3 / 7], dtype=torch.float64)])
    counts, _ = np.histogram(values.numpy(), edges)
    assert diagrams.histogram(values, edges) == pytest.approx((counts / 204).tolist())


def test_groups_are_of_equal_size_by_rising_deviation():
    std, error = torch.rand(16, generator=seeded(0)).double() + 0.1, normal(16)
    order = np.argsort(std.numpy())
    for k, (s, e) in enumerate(diagrams.grouped(std, error, groups=4)):
        rows = order[4 * k : 4 * k + 4]
        assert s == pytest.approx(float(np.sqrt((std.numpy()[rows] ** 2).mean())))
        assert e == pytest.approx(float(np.sqrt((error.numpy()[rows] ** 2).mean())))


def test_bins_of_few_predictions_are_not_drawn():
    chart = diagrams.shares("", "")
    found = Reliability(*(torch.tensor(v).double() for v in ([0.5, 0.6, 0.9], [0.4, 0.0, 0.9], [30, 9, 61])))
    curve, discs = diagrams.reliability_marks(chart, found)
    assert curve == line(chart, [(0.5, 0.4), (0.9, 0.9)])
    assert discs.count("M") == 2


# -- the prior, moved ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["numbers", "classes"])
def test_a_step_is_the_fit_under_that_prior(which, request):
    fit, y = request.getfixturevalue(which)
    found = sweep.over_priors(fit, gather({"it": fit}, (TEST, y)))
    assert found.center == fit.center
    for step in (found.steps[0], found.steps[sweep.CHOSEN], found.steps[-3]):
        moved = fit.replace(prior=fit.prior.scaled(step.factor))
        assert float(step.terms.log_evidence) == pytest.approx(float(moved.log_evidence()), rel=1e-6)
        assert step.scored.scores["nll"] == pytest.approx(lw.metrics.nll(moved.predict(TEST), y))
    chosen = found.steps[sweep.CHOSEN]
    assert chosen.factor == 1
    assert float(chosen.terms.log_evidence) == pytest.approx(float(fit.log_evidence()), rel=1e-6)


@pytest.mark.full
@pytest.mark.parametrize(("still", "held"), [(0.0, True), (1e9, False)])
def test_a_calibration_is_held_unless_it_leaves_nothing_to_the_prior(still, held, monkeypatch, tmp_path):
    monkeypatch.setattr(sweep, "STILL", still)
    fit = lw.laplace(network(4), (X, integers(4, 30)), "classification").tuned()
    y = integers(4, 21, seed=5)
    assert fit.calibration is not None
    found = sweep.over_priors(fit, gather({"it": fit}, (TEST, y)))
    close(found.own.prediction.probs, fit.predict(TEST).probs)
    for step in (found.steps[0], found.steps[sweep.CHOSEN]):
        prior = fit.prior.scaled(step.factor)
        moved = dataclasses.replace(fit, prior=prior) if held else fit.replace(prior=prior)
        close(step.scored.prediction.probs, moved.predict(TEST).probs)
    assert found.left_out == ("" if held else str(fit.calibration))
    assert ("as la.replace(prior=…) predicts" in page(fit, y, tmp_path)) is not held


def test_terms_move_as_the_evidence_does(numbers):
    fit, y = numbers
    found = moving.deltas(sweep.over_priors(fit, gather({"it": fit}, (TEST, y))))
    for k in range(len(sweep.FACTORS)):
        total = found["fit"][k] + found["quadratic"][k] + found["occam"][k]
        assert found["log_evidence"][k] == pytest.approx(total, abs=1e-8)
    assert all(each[sweep.CHOSEN] == 0 for each in found.values())


def test_larger_precisions_have_narrower_error_bars(numbers):
    fit, y = numbers
    found = sweep.over_priors(fit, gather({"it": fit}, (TEST, y)))
    widths = [step.scored.scores["sharpness"] for step in found.steps]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] > 1.01 * widths[-1]
    made = moving.moving(found)
    assert all(len(each) == len(sweep.FACTORS) for each in made.values.values())
    assert len(set(made.values["bars"])) > 5


# -- words -----------------------------------------------------------------------------------------------------------


def told(network_nll: Tensor, nll: Tensor, **scores: float) -> verdict.Verdict:
    """The verdict on two rows of NLL, of a fit without methods."""
    likelihood = SimpleNamespace(classes=True)
    pair = [
        SimpleNamespace(name=name, nll=v, scores={"nll": float(v.mean()), **scores}, prediction=likelihood)
        for name, v in ((NETWORK, network_nll), ("it", nll))
    ]
    facts = ReportFacts(None, torch.zeros(len(nll)), (pair[1],), pair[0], (), torch.zeros(1))
    return verdict.of_fit(SimpleNamespace(tuning=None), facts)


@pytest.mark.parametrize(("by", "tone", "word"), [(0.5, "good", "lower"), (-0.5, "bad", "higher"), (0.001, "even", "")])
def test_better_and_worse_are_said_beyond_chance_alone(by, tone, word):
    noise = normal(200)
    found = told(3 + by + 0.5 * noise, 3 + 0.5 * normal(200, seed=1))
    assert found.tone == tone
    assert word in found.because


def test_the_examples_needed_are_those_at_which_the_interval_reaches_zero():
    base = normal(50)
    gain = lw.metrics.paired(base - base.mean() + 0.1, torch.zeros(50).double())
    (need,) = re.findall(r"about ([\d,]+) test", verdict._more(gain))
    exact = 50 * ((gain.interval[1] - gain.value) / 0.1) ** 2
    assert exact <= int(need.replace(",", "")) <= 1.1 * exact + 1


def test_confidence_is_held_to_accuracy():
    sure = told(normal(400), normal(400, seed=1), confidence=0.99, accuracy=0.8)
    right = told(normal(400), normal(400, seed=1), confidence=0.81, accuracy=0.8)
    assert any("surer than it is right" in line for line in sure.advice)
    assert any("as sure as it is right" in line for line in right.advice)


# -- charts and pictures ---------------------------------------------------------------------------------------------


def test_a_frame_has_the_ends_of_its_axes_at_its_corners():
    chart = Chart(Axis(-2, 6), Axis(1, 100, log=True), 460, 330)
    (left, bottom), (right, top) = chart.at(-2, 1), chart.at(6, 100)
    x, y = chart.at(2, 10)
    assert (x, y) == pytest.approx(((left + right) / 2, (top + bottom) / 2))
    assert 0 < left < right < 460
    assert 0 < top < bottom < 330


def test_ticks_are_nice():
    assert nice(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    assert nice(-3, 12) == pytest.approx([0, 5, 10])
    assert decades(0.05, 300) == pytest.approx([0.1, 1, 10, 100])
    assert [short(v) for v in (0.0, -0.25, 12345.0, 2e-7, 3e9)] == ["0", "−0.25", "12,345", "2e−7", "3e9"]


@pytest.mark.parametrize("channels", [1, 3])
def test_a_png_is_read_by_others_as_it_was(channels, tmp_path):
    image = pytest.importorskip("matplotlib.image")
    pixels = torch.randint(256, (5, 7, channels), generator=seeded(0), dtype=torch.uint8)
    (tmp_path / "it.png").write_bytes(pictures.png(pixels))
    read = np.round(255 * image.imread(tmp_path / "it.png")).astype(np.uint8)
    np.testing.assert_array_equal(read.reshape(5, 7, -1)[..., :channels], pixels.numpy())


@pytest.mark.parametrize(
    ("shape", "image"),
    [
        ((5, 3, 8, 9), (5, 8, 9, 3)),
        ((5, 1, 4, 4), (5, 4, 4, 1)),
        ((5, 9, 8), (5, 9, 8, 1)),
        ((5, 64), (5, 8, 8, 1)),
        ((5, 9), None),  # three by three features are no picture
        ((5, 65), None),
        ((5, 2, 8, 8), None),
        ((5, 4, 3), None),
    ],
)
def test_images_are_inputs_that_look_like_images(shape, image):
    found = pictures.images(normal(*shape))
    assert (None if found is None else tuple(found.shape)) == image
    if found is not None:
        assert int(found.flatten(1).amin()) == 0
        assert set(found.flatten(1).amax(1).tolist()) == {255}


def test_the_most_uncertain_come_first_and_say_what_happened(classes):
    fit, y = classes
    found = pictures.most_uncertain(facts_of(classes))
    doubt = 1 - fit.predict(TEST).probs.amax(-1)
    assert [one.place for one in found] == doubt.argsort(descending=True)[: pictures.COUNT].tolist()
    labels = fit.predict(TEST).probs.argmax(-1)
    for one in found:
        assert one.happened == str(int(y[one.place]))
        assert one.wrong == (int(labels[one.place]) != int(y[one.place]))
        assert one.predicted.startswith(str(int(labels[one.place])))


# -- the page --------------------------------------------------------------------------------------------------------


def page(fit: lw.Laplace, y: Tensor, path: Path, **options: object) -> str:
    return fit.report((TEST, y), path / "it.html", **options).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def pages(numbers, classes, tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("pages")
    return {name: page(*pair, folder, ood=FAR) for name, pair in (("numbers", numbers), ("classes", classes))}


@pytest.mark.parametrize("which", ["numbers", "classes"])
def test_the_page_needs_nothing_but_itself(which, pages):
    text = pages[which]
    assert "http" not in text
    assert "url(" not in text
    assert "@import" not in text
    assert all(source.startswith("data:") for source in re.findall(r'(?:src|href)="([^"]*)"', text))
    (found,) = re.findall(r'<script type="application/json" id="sweep">(.*?)</script>', text)
    values = json.loads(found)["values"]
    used = set(re.findall(r'data-sweep="(\w+)"', text))
    assert used == used & values.keys()
    assert {"marker", "precision", "log_evidence"} <= used
    assert not re.search(r"\b(nan|NaN|inf|Infinity)\b", text)


def test_what_users_name_is_escaped(tmp_path):
    odd = type("<script>alert(1)</script>", (nn.Sequential,), {})
    fit = lw.laplace(odd(nn.Linear(3, 1).double()), (X, normal(30, 1)), "gaussian")
    text = page(fit, normal(21, 1, seed=4), tmp_path)
    path = lw.report({"<b>&": fit, "b": fit}, (TEST, normal(21, 1, seed=4)), tmp_path / "two.html")
    assert "<script>alert" not in text
    assert "<b>&" not in path.read_text()
    assert "&lt;b&gt;&amp;" in path.read_text()
    assert "&lt;script&gt;alert" in text


def test_unlike_inputs_are_told_by_their_auroc(classes, pages):
    fit, _ = classes
    known, unlike = (fit.predict(x).ood_score for x in (TEST, FAR))
    share = sum(float(u > k) for u in unlike for k in known) / (len(known) * len(unlike))
    assert f"AUROC of {share:.3f}" in pages["classes"]


def test_batches_are_read_as_a_pair_is(classes):
    fit, y = classes
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(TEST, y), batch_size=8)
    close(gather({"it": fit}, loader).fits[0].nll, facts_of(classes).fits[0].nll)


def test_a_certificate_is_made_where_asked_or_quick(classes):
    fit, _ = classes
    assert record.certificate(fit, None)[0] is not None
    assert record.certificate(fit, False)[0] is None
    exact = lw.laplace(network(4), (X, integers(4, 30)), "categorical", structure="full")
    assert "nothing to certify" in record.certificate(exact, True)[1]


def test_a_prior_or_certificate_that_fails_costs_its_section_alone(classes, tmp_path, monkeypatch):
    fit, y = classes

    def fails(*_: object, **__: object) -> None:
        raise lw.errors.NotConverged("it ran away")

    monkeypatch.setattr(lw.Laplace, "decompose", fails)
    monkeypatch.setattr(lw.Laplace, "certify", fails)
    tuned = dataclasses.replace(fit, tuning=lw.tune.Tuning("validation", "", (-2.0, -1.0), 2, True, ()))
    text = page(tuned, y, tmp_path)
    assert "held-out log-likelihood, best yet" in text
    assert "Other priors could not be shown: it ran away." in text
    assert "A certificate could not be made: it ran away." in text
    with pytest.raises(lw.errors.NotConverged):
        fit.report((TEST, y), tmp_path / "it.html", certify=True)


def test_what_there_is_not_is_said(tmp_path):
    y = integers(4, 21, seed=5)
    text = page(lw.ensembles.deep([network(4), network(4, 1)], "categorical"), y, tmp_path)
    assert "no evidence with terms" in text
    assert "no structured curvature" in text
    assert 'id="sweep"' not in text


def test_a_likelihood_that_says_only_its_density_has_its_nll_reported(tmp_path):
    class Laplacian(lw.likelihoods.Custom):
        def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
            return -(f - y).abs().sum(-1) - f.shape[-1] * math.log(2)

    fit = lw.laplace(network(2), (X, TRAIN), Laplacian())
    assert gather({"it": fit}, (TEST, truth(TEST))).network.nll.tolist() == pytest.approx(
        ((fit.tangent.model(TEST) - truth(TEST)).abs().sum(-1) + 2 * math.log(2)).tolist()
    )
    text = page(fit, truth(TEST), tmp_path)
    assert "there is the NLL alone" in text
    assert "RMSE" not in text


@pytest.mark.full
def test_a_noise_that_was_drawn_has_no_plain_network(tmp_path):
    noisy = lw.likelihoods.Gaussian(noise=lw.priors.Gamma(0.5, 1.0))
    sampled = lw.samplers.hmc(network(1), (X, normal(30, 1)), noisy, chains=2, draws=8, warmup=8)
    assert "no plain network to compare with" in page(sampled, normal(21, 1, seed=4), tmp_path)


@pytest.mark.full
def test_warnings_are_heard_once_and_stand_on_the_page(tmp_path):
    torch.manual_seed(0)
    net, y = nn.Sequential(nn.Linear(3, 30), nn.Tanh(), nn.Linear(30, 4)).double(), integers(4, 30)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    for _ in range(200):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(X), y).backward()
        optimizer.step()
    fit = lw.laplace(net, (X, y), "categorical", structure="kron", prior=1e-3)
    batches = [(TEST[:9], integers(4, 9, seed=5)), (TEST[9:], integers(4, 12, seed=5))]
    with pytest.warns(lw.errors.LapwingWarning) as heard:
        text = fit.report(batches, tmp_path / "it.html").read_text()
    assert len([w for w in heard if "predicts its own training data" in str(w.message)]) == 1
    assert "Warning: the posterior predicts its own training data" in text


def test_a_comparison_names_the_best_and_its_evidences(numbers, tmp_path):
    fit, y = numbers
    other = lw.laplace(fit.tangent.model, (X, TRAIN), fit.likelihood, structure="kron", prior=5.0)
    fits = {"first": fit, "other": other.recentered()}
    text = lw.report(fits, (TEST, y), tmp_path / "two.html").read_text()
    assert "that of the plain network" in text
    nll = {name: lw.metrics.nll(la.predict(TEST), y) for name, la in fits.items()}
    best = min(nll, key=nll.__getitem__)
    assert re.search(f"<h1>{best} (leads|predicts)", text)
    assert f"{float(fit.log_evidence()):.2f}" in text
    mixed = {"a": fit, "b": lw.ensembles.deep([network(2), network(2, 1)], lw.likelihoods.Gaussian(1.0))}
    text = lw.report(mixed, (TEST, y), tmp_path / "b.html").read_text()
    assert "compared by the test data alone" in text
    assert "of different networks" in text
    assert "plain network" not in text
    listed = lw.report([fit, mixed["b"]], (TEST, y), tmp_path / "c.html").read_text()
    assert "<h1>0 " in listed or "<h1>1 " in listed


def test_bad_input_is_told_and_writes_nothing(numbers, tmp_path):
    fit, y = numbers
    few = (TEST[:3], y[:3])
    for wrong, match in [
        (lambda p: fit.report(few, p), "at least 4 test examples"),
        (lambda p: lw.report({"a": fit}, (TEST, y), p), "two fits or more"),
        (lambda p: lw.report(network(2), (TEST, y), p), "a report is of fits"),
        (lambda p: lw.report({"a": fit, "b": fit}, (TEST, y), p, ood=FAR), "report of one fit"),
        (lambda p: fit.report((TEST, y[:5]), p), "one target for each example"),
        (lambda p: fit.report((TEST, y), p / "it.html"), "does not exist"),
        (lambda p: fit.report((TEST, y), tmp_path), "it is a folder"),
    ]:
        with pytest.raises((lw.errors.InvalidValue, lw.errors.Unsupported), match=match):
            wrong(tmp_path / "it.html")
    assert list(tmp_path.iterdir()) == []


def test_where_no_file_can_be_nothing_is_predicted(numbers, tmp_path, monkeypatch):
    fit, y = numbers
    monkeypatch.setattr(lw.Laplace, "predict", None)
    with pytest.raises(lw.errors.InvalidValue, match="does not exist"):
        fit.report((TEST, y), tmp_path / "no" / "it.html")


def test_a_page_that_fails_leaves_the_old_one(numbers, tmp_path, monkeypatch):
    fit, y = numbers
    (tmp_path / "it.html").write_text("old")
    monkeypatch.setattr("lapwing.files._put", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    monkeypatch.setattr(html, "of_fit", lambda *_: "new")
    with pytest.raises(lw.errors.InvalidValue, match="disk full"):
        page(fit, y, tmp_path)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("it.html", "old")]


def test_the_fit_and_the_network_are_left_as_they_were(numbers, tmp_path):
    fit, y = numbers
    model = fit.tangent.model
    model.train()
    before, state, evidence = [p.clone() for p in model.parameters()], torch.get_rng_state(), float(fit.log_evidence())
    page(fit, y, tmp_path)
    assert model.training
    assert torch.equal(state, torch.get_rng_state())
    assert float(fit.log_evidence()) == evidence
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    model.eval()
