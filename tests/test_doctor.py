"""The doctor: every finding provoked, and silent where there is nothing to find; nothing touched, little read.

Most tests look at findings only and leave the plan's trials out; those of the plan come last.
"""

from __future__ import annotations

import copy
import itertools
import math
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

import lapwing as lw
from lapwing.doctor import Cost, Finding, Report
from lapwing.doctor.checks import model_checks
from lapwing.doctor.plan import free_memory, measure, survey
from lapwing.doctor.reading import EXAMPLES, read
from lapwing.doctor.report import seconds, significant, size
from lapwing.doctor.training import gain, slope, training_checks
from lapwing.doctor.trial import _grown, counted
from lapwing.doctor.trial import seconds as timed
from lapwing.errors import InvalidValue
from lapwing.posterior import gaussian

module = sys.modules["lapwing.doctor"]  # lw.doctor is the function


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Findings without the plan."""
    monkeypatch.setattr(module._Visit, "_plan", lambda *_: None)


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials of a few examples: what they cost is not what is tested."""
    monkeypatch.setattr(sys.modules["lapwing.doctor.trial"], "QUICK", 0.01)


def net(outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, outputs)).double().eval()


def inputs(n: int = 40) -> Tensor:
    return torch.randn(n, 5, dtype=torch.float64)


def labels(n: int = 40, classes: int = 3) -> Tensor:
    return torch.arange(n) % classes


def classes(n: int = 40) -> tuple[Tensor, Tensor]:
    return inputs(n), labels(n)


def solved(ridge: float = 0.0, n: int = 60, bias: bool = True) -> tuple[nn.Linear, Tensor, Tensor]:
    """A linear regression at the mode of its posterior with precision `ridge`."""
    x = torch.randn(n, 5, dtype=torch.float64)
    y = x @ torch.randn(5, 2, dtype=torch.float64) + 0.3 * torch.randn(n, 2, dtype=torch.float64) + 1.0
    model = nn.Linear(5, 2, bias=bias).double().eval()
    design = torch.cat([x, torch.ones(n, int(bias), dtype=torch.float64)], 1)
    gram = design.mT @ design + ridge * torch.eye(design.shape[1], dtype=torch.float64)
    weights = torch.linalg.solve(gram, design.mT @ y)
    with torch.no_grad():
        model.weight.copy_(weights[:5].mT)
        if bias:
            model.bias.copy_(weights[5])
    return model, x, y


def topics(report: Report, *severities: str) -> set[str]:
    return {f.topic for f in report.findings if f.severity in severities}


def the(report: Report, severity: str, topic: str, *fragments: str) -> Finding:
    """The one finding of this kind that says all of this."""
    found = [f for f in report.findings if (f.severity, f.topic) == (severity, topic)]
    found = [f for f in found if all(text in f.message for text in fragments)]
    assert len(found) == 1, "\n".join(map(str, report.findings))
    return found[0]


def trouble(report: Report) -> set[str]:
    return topics(report, "error", "warning")


# -- a sound problem ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick")
def test_a_sound_problem_has_no_errors_warnings_or_notes():
    model, x, y = solved()
    report = lw.doctor(model, DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True), "gaussian")
    assert topics(report, "error", "warning", "note") == set(), str(report)
    assert report.ok
    the(report, "ok", "loader", "60 examples in batches of 16", "shuffled (which is fine)")
    the(report, "ok", "augmentation", "no random augmentation")
    the(report, "ok", "likelihood", "(n, 2)", "gaussian")
    the(report, "ok", "training")


# -- parameters --------------------------------------------------------------------------------------------------


def frozen() -> nn.Module:
    model = net()
    model[0].weight.requires_grad_(False)
    return model


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 3)).double().eval()
    model[2].weight = model[0].weight
    return model


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3).double()
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


class TwoTypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 4), nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x.float()).double())


def poisoned(name: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)).double().eval()
    with torch.no_grad():
        model.state_dict()[name][0] = math.nan
    return model


def meta() -> nn.Module:
    model = net()
    model[2] = nn.Linear(4, 3, device="meta")
    return model


@pytest.mark.parametrize(
    ("build", "severity", "topic", "fragments"),
    [
        (frozen, "note", "frozen", ("0.weight", "20 elements")),
        (tied, "note", "shared", ("0.weight", "2.weight")),
        (Bare, "note", "bare", ("scale",)),
        (TwoTypes, "warning", "precision", ("float32", "float64")),
        (meta, "error", "device", ("cpu", "meta")),
        (meta, "error", "parameters", ("2.weight",)),
        (lambda: poisoned("0.bias"), "error", "weights", ("parameter 0.bias",)),
        (lambda: poisoned("1.running_mean"), "error", "weights", ("buffer 1.running_mean",)),
        (lambda: nn.Sequential(nn.LazyLinear(3)), "error", "parameters", ("lazy",)),
        (nn.Tanh, "error", "parameters", ("Tanh",)),
        (lambda: net().train(), "note", "mode", ("4 modules",)),
    ],
)
@pytest.mark.usefixtures("quick")
def test_parameters_and_modes_are_told(build, severity, topic, fragments):
    data = classes()
    the(lw.doctor(build(), data, "categorical"), severity, topic, *fragments)
    sound = lw.doctor(net(), data, "categorical")
    assert topic not in topics(sound, "error", "warning", "note")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_a_note_and_double_is_not(dtype):
    (finding,) = [f for f in model_checks(net().to(dtype)) if f.topic == "precision"]
    assert finding.severity == "note"
    assert str(dtype) in finding.message
    assert "precision" not in {f.topic for f in model_checks(net())}


class Compiled(nn.Module):
    """What torch.compile wraps a model in."""

    def __init__(self) -> None:
        super().__init__()
        self._orig_mod = net()

    def forward(self, x: Tensor) -> Tensor:
        return self._orig_mod(x)


def test_a_compiled_model_is_seen_through(quick):
    report = lw.doctor(Compiled(), classes(), "categorical")
    the(report, "note", "compile")
    assert list(report.parameters) == [n for n, _ in net().named_parameters()]


# -- normalization -----------------------------------------------------------------------------------------------


def test_batch_norm_that_was_never_updated_is_a_warning_until_it_is(quick):
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double().eval()
    x, y = classes()
    the(lw.doctor(model, (x, y), "categorical"), "warning", "batch norm", "1", "never updated")
    model.train()(x)
    report = lw.doctor(model.eval(), (x, y), "categorical")
    the(report, "ok", "batch norm", "1 layer")
    assert "batch norm" not in trouble(report)


def test_batch_norm_without_running_statistics_is_an_error(quick):
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 3)).double()
    the(lw.doctor(model, classes(), "categorical"), "error", "batch norm", "track_running_stats=False")


@pytest.mark.parametrize(
    ("layer", "named"),
    [
        (lambda: nn.BatchNorm1d(4), "1 BatchNorm1d"),
        (lambda: nn.LayerNorm(4), "1 LayerNorm"),
        (lambda: nn.GroupNorm(2, 4), "1 GroupNorm"),
        (lambda: nn.RMSNorm(4), "1 RMSNorm"),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), "1 WeightNorm"),
    ],
)
def test_normalization_layers_are_told_with_what_follows(quick, layer, named):
    model = nn.Sequential(nn.Linear(5, 4), layer(), nn.Linear(4, 3)).double().eval()
    the(lw.doctor(model, classes(), "categorical"), "note", "normalization", named, "no mode", "biased")


def test_no_normalization_no_word(quick):
    assert "normalization" not in {f.topic for f in lw.doctor(net(), classes(), "categorical").findings}


# -- loaders -----------------------------------------------------------------------------------------------------


class Augmented(Dataset):
    """Adds noise to its inputs, or to its targets, by one of the three global generators; counts what is read."""

    def __init__(self, n: int = 40, draw: Callable[[], float] | None = None, target: bool = False) -> None:
        self.x, self.y, self.draw, self.target, self.reads = inputs(n), inputs(n)[:, :2], draw, target, 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        self.reads += 1
        noise = self.draw() if self.draw else 0.0
        return (self.x[i], self.y[i] + noise) if self.target else (self.x[i] + noise, self.y[i])


def numpy_draw() -> float:
    return float(np.random.rand())  # noqa: NPY002 - the global state, which augmentations use


@pytest.mark.parametrize("draw", [lambda: float(torch.rand(())), random.random, numpy_draw])
@pytest.mark.parametrize("target", [False, True])
def test_random_augmentation_is_named(quick, draw, target):
    report = lw.doctor(net(2), DataLoader(Augmented(40, draw, target), batch_size=8), "gaussian")
    the(report, "error", "augmentation", "targets" if target else "inputs", "random augmentation is on")


def test_a_rare_augmentation_is_seen_in_a_batch(quick):
    data = Augmented(200, lambda: float(torch.rand(()) < 0.2))
    the(lw.doctor(net(2), DataLoader(data, batch_size=64), "gaussian"), "error", "augmentation")


def test_shuffling_is_no_augmentation(quick):
    loader = DataLoader(Augmented(), batch_size=8, shuffle=True)
    report = lw.doctor(net(2), loader, "gaussian")
    assert "augmentation" not in trouble(report)


class Stream(IterableDataset):
    def __init__(self, shuffled: bool) -> None:
        self.x, self.y, self.shuffled, self.reads = inputs(400), inputs(400)[:, :2], shuffled, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for i in torch.randperm(400).tolist() if self.shuffled else range(400):
            self.reads += 1
            yield self.x[i], self.y[i]


def test_a_stream_is_read_at_its_head_and_its_length_is_not_known(quick):
    stream = Stream(shuffled=False)
    report = lw.doctor(net(2), DataLoader(stream, batch_size=8), "gaussian")
    the(report, "note", "loader", "counts them by a pass")
    the(report, "ok", "augmentation")
    assert stream.reads <= 4 * 8
    the(
        lw.doctor(net(2), DataLoader(Stream(True), batch_size=8), "gaussian"),
        "note",
        "augmentation",
        "shuffling is fine",
    )


def test_dropping_the_last_batch_is_a_warning_with_its_size(quick):
    data = TensorDataset(*classes(41))
    report = lw.doctor(net(), DataLoader(data, batch_size=8, drop_last=True), "categorical")
    the(report, "warning", "loader", "1 of 41")
    even = DataLoader(TensorDataset(*classes(40)), batch_size=8, drop_last=True)
    assert "loader" not in trouble(lw.doctor(net(), even, "categorical"))


@pytest.mark.parametrize(
    "sampler",
    [lambda d: WeightedRandomSampler([1.0] * 40, 40), lambda d: RandomSampler(d, replacement=True)],
)
def test_sampling_with_replacement_is_a_warning(quick, sampler):
    data = TensorDataset(*classes())
    report = lw.doctor(net(), DataLoader(data, batch_size=8, sampler=sampler(data)), "categorical")
    the(report, "warning", "loader", "with replacement")


class Broken(Dataset):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> Any:
        raise KeyError("no such file")


@pytest.mark.parametrize(
    ("data", "fragments"),
    [
        (lambda: (inputs(0), labels(0)), ("no batch",)),
        (lambda: [], ("no batch",)),
        (lambda: DataLoader(TensorDataset(*classes(5)), batch_size=8, drop_last=True), ("drop_last", "batch_size=8")),
        (lambda: iter([classes()]), ("one-pass iterator",)),
        (lambda: (inputs(9), labels(8)), ("9", "8")),
        (lambda: [(inputs(), labels(), labels())], ("length 3",)),
        (lambda: DataLoader(Broken(), batch_size=4), ("KeyError", "no such file")),
    ],
)
def test_data_that_cannot_be_read_are_an_error_finding(quick, data, fragments):
    report = lw.doctor(net(), data(), "categorical")
    the(report, "error", "data", *fragments)
    assert not report.ok
    assert report.recommendation == ""
    assert "none until the errors" in str(report)


@pytest.mark.parametrize("where", [0, 1])
def test_values_that_are_not_finite_are_an_error(quick, where):
    model, x, y = solved()
    (x, y)[where][7, 0] = math.inf
    the(lw.doctor(model, (x, y), "gaussian"), "error", ("inputs", "targets")[where], "1 NaN or infinite value")


def test_one_example_is_a_warning(quick):
    the(lw.doctor(net(), classes(1), "categorical"), "warning", "loader", "one example")


# -- running the model -------------------------------------------------------------------------------------------


def test_inputs_of_another_dtype_are_named_with_the_conversion(quick):
    x, y = classes()
    own = {"forward": lambda model, x: model(x)}  # which gets inputs as they are; others are cast
    the(lw.doctor(net(), (x.float(), y), "categorical", **own), "error", "model", "float32", "x.to(torch.float64)")
    for given in (x, x.float()):
        assert "model" not in trouble(lw.doctor(net(), (given, y), "categorical"))


@pytest.mark.parametrize(
    ("forward", "fragments"),
    [
        (lambda model, x: (model(x), 0), ("tuple", "forward=")),
        (lambda model, x: model(x)[:, 0], ("(n, ..., c)",)),
        (lambda model, x: x @ x, ("RuntimeError",)),
    ],
)
def test_a_forward_that_fails_is_an_error_finding(quick, forward, fragments):
    the(lw.doctor(net(), classes(), "categorical", forward=forward), "error", "model", *fragments)


def test_a_subset_that_selects_nothing_is_an_error_finding(quick):
    the(lw.doctor(net(), classes(), "categorical", subset=["head.*"]), "error", "model", "head.*", "matches no")


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.layer(x), 0.5, training=True)


class Mixing(Noisy):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x - x.mean(0))


class Exploding(Noisy):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) / 0.0


class Deaf(Noisy):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.zeros_like(x))


class HalfDeaf(Noisy):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("model", "severity", "fragment"),
    [
        (Noisy, "error", "two runs on the same batch differ"),
        (Mixing, "warning", "depend on the other examples"),
        (Exploding, "error", "NaN or infinite"),
        (Deaf, "warning", "the same for every example"),
        (HalfDeaf, "note", "1 of 3 outputs"),
    ],
)
def test_outputs_that_are_not_a_function_of_each_example_are_named(quick, model, severity, fragment):
    the(lw.doctor(model(), classes(), "categorical"), severity, "outputs", fragment)
    assert "outputs" not in {f.topic for f in lw.doctor(net(), classes(), "categorical").findings}


# -- likelihoods -------------------------------------------------------------------------------------------------


def test_a_softmax_in_the_network_is_an_error_and_its_remedy_works(quick):
    data = classes()
    model = nn.Sequential(net(), nn.Softmax(-1))
    finding = the(lw.doctor(model, data, "categorical"), "error", "likelihood", "softmax twice")
    assert "forward=lambda model, x: model(x).log()" in finding.message
    remedy = lw.doctor(model, data, "categorical", forward=lambda model, x: model(x).log())
    assert "likelihood" not in trouble(remedy)


def test_a_softmax_is_an_error_whatever_rows_count_for(quick):
    weighted = lw.likelihoods.ClassWeighted(lw.likelihoods.Categorical(), torch.tensor([1.0, 2.0, 0.5]))
    the(lw.doctor(nn.Sequential(net(), nn.Softmax(-1)), classes(), weighted), "error", "likelihood", "softmax twice")
    assert "likelihood" not in trouble(lw.doctor(net(), classes(), weighted))


def test_log_probabilities_are_a_note_and_leave_the_evidence_as_it_is(quick):
    data, logits = classes(), net()
    model = nn.Sequential(logits, nn.LogSoftmax(-1))
    the(lw.doctor(model, data, "categorical"), "note", "likelihood", "log-probabilities", "probit_centered")
    a, b = (lw.laplace(m, data, "categorical", structure="full").log_evidence() for m in (model, logits))
    torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


def test_logits_are_no_probabilities(quick):
    report = lw.doctor(net(), classes(), "categorical")
    assert "likelihood" not in topics(report, "error", "warning", "note")


class Positive(Noisy):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).exp()


class Summing(Noisy):
    """Rows that sum to one and are no probabilities."""

    def forward(self, x: Tensor) -> Tensor:
        f = self.layer(x)
        return f - f.mean(-1, keepdim=True) + 1 / 3


@pytest.mark.parametrize("model", [Positive, Summing])
def test_positive_outputs_and_rows_that_sum_to_one_are_not_yet_probabilities(quick, model):
    assert "likelihood" not in topics(lw.doctor(model(), classes(), "categorical"), "error", "warning", "note")


class Squashed(Noisy):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.layer(x))


def test_a_sigmoid_in_the_network_is_named_for_bernoulli(quick):
    y = (torch.rand(40, 3) < 0.5).double()
    the(lw.doctor(nn.Sequential(net(), nn.Sigmoid()), (inputs(), y), "bernoulli"), "error", "likelihood", "sigmoid")
    the(lw.doctor(Squashed(), (inputs(), y), "bernoulli"), "error", "likelihood", "sigmoid")
    assert "likelihood" not in trouble(lw.doctor(net(), (inputs(), y), "bernoulli"))


@pytest.mark.parametrize(
    ("likelihood", "targets", "fragments"),
    [
        ("categorical", lambda: labels() + 1, ("1 to 3", "count from 1")),
        ("categorical", lambda: labels() - 1, ("-1 to 1",)),
        ("categorical", lambda: labels().double(), ("integer class labels", "y.long()")),
        ("categorical", lambda: F.one_hot(labels(), 3).double(), ("one-hot", "y.argmax(-1)")),
        ("categorical", lambda: labels()[:, None], ("y.squeeze(-1)",)),
        ("categorical", lambda: torch.randn(40), ("gaussian",)),
        ("gaussian", labels, ("floating point",)),
        ("gaussian", lambda: torch.randn(40, dtype=torch.float64), ("do not match",)),
        ("gaussian", lambda: torch.randn(40, 2, dtype=torch.float64), ("do not match",)),
        ("bernoulli", lambda: torch.full((40, 3), 2.0), ("0 or 1",)),
        ("bernoulli", lambda: torch.ones(40), ("do not match",)),
    ],
)
def test_targets_that_do_not_suit_the_likelihood_are_an_error(quick, likelihood, targets, fragments):
    the(lw.doctor(net(), (inputs(), targets()), likelihood), "error", "targets", *fragments)


@pytest.mark.parametrize(
    ("likelihood", "targets"),
    [
        ("categorical", labels),
        ("gaussian", lambda: torch.randn(40, 3, dtype=torch.float64)),
        ("bernoulli", lambda: torch.rand(40, 3) < 0.5),
    ],
)
def test_targets_that_suit_the_likelihood_are_not_named(quick, likelihood, targets):
    assert "targets" not in {f.topic for f in lw.doctor(net(), (inputs(), targets()), likelihood).findings}


def test_one_wrong_label_among_many_in_memory_is_found(quick):
    x, y = inputs(5_000), labels(5_000)
    y[3_333] = 3  # not among the examples that are run
    for data in ((x, y), DataLoader(TensorDataset(x, y), batch_size=16)):
        the(lw.doctor(net(), data, "categorical"), "error", "targets", "0 to 3")


def test_labels_that_leave_outputs_unused_and_classes_taken_for_numbers_are_notes(quick):
    the(lw.doctor(net(4), (inputs(100), labels(100)), "categorical"), "note", "targets", "4 outputs")
    x = inputs(100)
    the(lw.doctor(net(1), (x, labels(100)[:, None].double()), "gaussian"), "note", "targets", "3 whole values")


def test_sorted_data_show_all_their_classes():
    data = TensorDataset(inputs(900), labels(900).sort().values)
    sample = read(DataLoader(data, batch_size=32), torch.device("cpu"))
    assert sample.first[1].unique().tolist() == [0]
    assert sample.spread[0][1].unique().tolist() == [0, 1, 2]


# -- training ----------------------------------------------------------------------------------------------------


def sample_of(x: Tensor, y: Tensor) -> Any:
    return read(lw.data.as_batches((x, y)), torch.device("cpu"))


@pytest.mark.parametrize("ridge", [0.7, 3.0])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_balancing_prior_precision_is_that_of_a_ridge_regression(ridge, seed):
    torch.manual_seed(seed)
    model, x, y = solved(ridge)
    tangent, likelihood, sample = lw.linearize(model), lw.likelihoods.Gaussian(), sample_of(x, y)
    found = slope(tangent, likelihood, sample.spread)
    torch.testing.assert_close(len(x) * found.mean, ridge * tangent.theta, rtol=1e-8, atol=1e-8)
    (finding,) = training_checks(tangent, likelihood, found, sample)
    assert finding.severity == "ok"
    assert f"prior precision {ridge:.3g} for 60 examples" in finding.message


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_gain_of_a_step_is_the_best_on_the_line_for_a_linear_model(seed):
    torch.manual_seed(seed)
    model, x, y = solved()
    with torch.no_grad():
        model.weight.mul_(0.5)
    tangent, likelihood = lw.linearize(model), lw.likelihoods.Gaussian(0.6)
    found = slope(tangent, likelihood, sample_of(x, y).spread)
    step = tangent.layout.unflatten(found.halves[0])
    other_x, other_y = found.parts[1][0]

    def at(t: Tensor) -> Tensor:
        f = F.linear(other_x, model.weight + t * step["weight"], model.bias + t * step["bias"])
        return likelihood.log_prob(f, other_y).mean()

    zero = torch.zeros((), dtype=torch.float64)
    first, second = torch.func.grad(at)(zero), torch.func.hessian(at)(zero)  # a parabola
    best = (at(-first / second) - at(zero)).detach()
    assert best > 0.01
    torch.testing.assert_close(gain(tangent, likelihood, found, decay=0.0), float(best), rtol=1e-8, atol=1e-8)


def test_a_network_worse_than_a_constant_is_a_warning(quick):
    model, x, y = solved()
    with torch.no_grad():
        model.weight.neg_()
    the(lw.doctor(model, (x, y), "gaussian"), "warning", "training", "A constant prediction would reach")


def test_a_network_that_has_only_begun_to_learn_is_a_warning_and_a_trained_one_is_not(quick):
    model, x, y = solved()
    the(lw.doctor(model, (x, y), "gaussian"), "ok", "training")
    with torch.no_grad():
        model.weight.mul_(0.3)
    the(lw.doctor(model, (x, y), "gaussian"), "warning", "training", "One step along the gradient")


@pytest.mark.parametrize("name", ["categorical", "bernoulli"])
def test_a_classifier_is_told_trained_from_untrained(quick, name):
    x = inputs(120)
    y = x[:, :3].argmax(1) if name == "categorical" else (x[:, :3] > 0).double()
    model = nn.Linear(5, 3).double().eval()
    the(lw.doctor(model, (x, y), name), "warning", "training")
    loss = F.cross_entropy if name == "categorical" else F.binary_cross_entropy_with_logits
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=100)

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(model(x), y) + 1e-2 * sum(p.square().sum() for p in model.parameters())
        value.backward()
        return value

    optimizer.step(closure)
    the(lw.doctor(model, (x, y), name), "ok", "training")


# -- dead parameters ---------------------------------------------------------------------------------------------


class Unused(Noisy):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(5, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def test_unused_parameters_are_a_warning_and_dead_units_a_note(quick):
    the(lw.doctor(Unused(), classes(), "categorical"), "warning", "dead", "spare.weight", "spare.bias")
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)).double().eval()
    with torch.no_grad():
        model[0].bias[1] = -1e3
    the(lw.doctor(model, classes(), "categorical"), "note", "dead", "0.weight (1 of 4)")
    assert "dead" not in {f.topic for f in lw.doctor(net(), classes(), "categorical").findings}


def test_words_that_did_not_occur_are_not_dead(quick):
    model = nn.Sequential(nn.Embedding(30, 4), nn.Flatten(), nn.Linear(8, 3)).double().eval()
    report = lw.doctor(model, (torch.randint(0, 5, (40, 2)), labels()), "categorical")
    assert "dead" not in {f.topic for f in report.findings}


# -- nothing is touched, little is read --------------------------------------------------------------------------


def test_model_and_random_states_are_left_as_they_were():
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)).double().train()
    model[0].eval()
    model[3].bias.requires_grad_(False)
    model(inputs(8)).sum().backward()
    calls: list[int] = []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    mine = torch.Generator().manual_seed(3)
    data = Augmented(200, lambda: float(torch.rand(())) + random.random() + numpy_draw())
    loader = DataLoader(data, batch_size=16, shuffle=True, generator=mine)

    def look() -> dict[str, Any]:
        return {
            "tensors": {k: v.clone() for k, v in model.state_dict().items()},
            "grads": {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()},
            "flags": [(m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
            "requires_grad": [p.requires_grad for p in model.parameters()],
            "torch": torch.get_rng_state(),
            "numpy": torch.from_numpy(np.random.get_state()[1].astype(np.int64)),  # noqa: NPY002
            "python": random.getstate(),
            "loader": mine.get_state(),
        }

    before = look()
    addresses = [p.data_ptr() for p in model.parameters()]
    report = lw.doctor(model, loader, "gaussian")
    assert report.plan
    assert data.reads <= 3 * EXAMPLES  # the plan reads no more
    assert calls  # the model did run
    after = look()
    torch.testing.assert_close(after.pop("tensors"), before.pop("tensors"), rtol=0, atol=0)
    assert after.pop("python") == before.pop("python")
    for name, grad in before.pop("grads").items():
        assert (grad is None) == (after["grads"][name] is None)
        if grad is not None:
            torch.testing.assert_close(after["grads"][name], grad, rtol=0, atol=0)
    del after["grads"]
    for key in ("flags", "requires_grad"):
        assert after.pop(key) == before.pop(key)
    for key, value in before.items():
        assert torch.equal(after[key], value), key
    assert addresses == [p.data_ptr() for p in model.parameters()]


@pytest.mark.parametrize("batch", [8, 64, 1000])
def test_a_bounded_number_of_examples_is_read(quick, batch):
    data = Augmented(20_000)
    lw.doctor(net(2), DataLoader(data, batch_size=batch), "gaussian")
    assert data.reads <= 3 * EXAMPLES


def test_no_worker_process_is_started_for_data_that_can_be_indexed(quick, monkeypatch):
    monkeypatch.setattr(DataLoader, "__iter__", lambda self: pytest.fail("the loader was iterated"))
    lw.doctor(net(2), DataLoader(Augmented(), batch_size=8, num_workers=1), "gaussian")


def test_warnings_of_a_fit_are_findings_not_warnings(quick):
    lw.doctor(net(), DataLoader(TensorDataset(*classes(41)), batch_size=8, drop_last=True), "categorical")


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ({"model": lambda x: x}, "torch.nn.Module"),
        ({"data": 3}, "data must be"),
        ({"data": "mnist"}, "data must be"),
        ({"data": torch.zeros(3, 5)}, "data must be"),
        ({"likelihood": "softmax"}, "likelihood must be"),
        ({"subset": "head"}, "subset must be"),
        ({"subset": 3}, "subset must be"),
        ({"forward": 3}, "forward must be"),
        ({"memory_budget": 10}, "memory_budget"),
        ({"memory_budget": 1e9 + 0.5}, "memory_budget"),
    ],
)
def test_nonsense_is_refused(arguments, fragment):
    given = {"model": net(), "data": classes(), "likelihood": "categorical", **arguments}
    with pytest.raises(InvalidValue, match=fragment):
        lw.doctor(**given)


# -- the plan ----------------------------------------------------------------------------------------------------


def run(report: Report, **names: Any) -> lw.Laplace:
    return eval(report.recommendation, {"lw": lw, **names})


@pytest.mark.parametrize(
    ("build", "extra", "structure"),
    [
        (lambda: (*solved(), "gaussian"), {}, "full (primal)"),
        (lambda: (net(), *classes(7), "categorical"), {}, "full (dual)"),
        (lambda: (frozen(), *classes(60), "categorical"), {}, "full (primal)"),
        (lambda: (net(), *classes(60), "categorical"), {"subset": ["2.*"]}, "full (primal)"),
        (lambda: (net(), *classes(60), "categorical"), {"subset": "last_layer"}, "full (primal)"),
        (lambda: (net(), *classes(60), "categorical"), {"memory_budget": 10**9}, "full (primal)"),
        (lambda: (net(), *classes(60), "categorical"), {"forward": lambda m, x: 2 * m(x)}, "full (primal)"),
    ],
)
@pytest.mark.filterwarnings("ignore:tuning stopped at a bound")
def test_the_recommended_call_runs_and_treats_parameters_as_told(build, extra, structure):
    model, x, y, likelihood = build()
    report = lw.doctor(model, (x, y), likelihood, **extra)
    assert report.ok, str(report)
    la = run(report, model=model, data=(x, y), **{"forward": None, **extra})
    assert str(la.state.structure) == structure
    assert report.parameters == la.coverage
    assert la.tangent.custom_forward == ("forward" in extra)
    assert la.tuning is not None
    assert report.plan[structure].fits


def test_a_large_problem_is_sent_to_kron_and_its_parameters_are_told():
    model = nn.Sequential(nn.Linear(40, 100), nn.Tanh(), Bare2(), nn.Linear(100, 3)).eval()
    x, y = torch.randn(1_500, 40), labels(1_500)
    report = lw.doctor(model, (x, y), "categorical")
    la = run(report, model=model, data=(x, y))
    assert str(la.state.structure) == "kron"
    assert report.parameters == la.coverage
    assert {"full (primal)", "full (dual)", "kron", "block", "diag", "last_layer"} == set(report.plan)
    assert report.plan["kron"].memory < report.plan["full (primal)"].memory
    assert report.plan["kron"].tune < report.plan["full (primal)"].tune


class Bare2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(100))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def test_a_likelihood_object_and_masks_are_passed_by_name():
    model, x, y = solved()
    likelihood, subset = lw.likelihoods.Gaussian(0.5), {"weight": torch.rand(2, 5) < 0.7}
    report = lw.doctor(model, (x, y), likelihood, subset=subset)
    assert "likelihood, subset=subset" in report.recommendation
    la = run(report, model=model, data=(x, y), likelihood=likelihood, subset=subset)
    assert report.parameters == la.coverage
    assert report.parameters["bias"] == "frozen"


def test_shared_parameters_are_told_with_their_other_names():
    report = lw.doctor(tied(), classes(), "categorical")
    assert report.parameters["0.weight"].endswith("(also 2.weight)")
    assert "2.weight" not in report.parameters


def test_the_recommendation_follows_the_memory_budget():
    model = nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 3)).eval()
    x, y = torch.randn(1_500, 40), labels(1_500)
    choices = {}
    for budget in (10**9, 6 * 10**7, 2**16):
        report = lw.doctor(model, (x, y), "categorical", memory_budget=budget)
        choices[budget] = report.recommendation
        assert report.limit == budget
        assert all(cost.fits == (cost.memory <= budget) for cost in report.plan.values())
        assert ("memory" in topics(report, "warning")) == (budget == 2**16)
        assert f"memory_budget={max(2**16, budget // 2)}" in report.recommendation
    assert "structure='full'" in choices[10**9]
    assert "structure='kron'" in choices[6 * 10**7]


def test_unknown_length_leaves_the_dual_form_and_the_cost_of_tuning_out():
    stream = Stream(shuffled=False)
    report = lw.doctor(net(2), DataLoader(stream, batch_size=8), "gaussian")
    assert "full (dual)" not in report.plan
    assert all(math.isnan(c.tune) and math.isfinite(c.fit) for c in report.plan.values())
    assert "?" in str(report)


def test_no_last_layer_no_row_for_it():
    class Forked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 3).double(), nn.Linear(5, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + self.b(x)

    assert "last_layer" not in lw.doctor(Forked(), classes(), "categorical").plan
    assert "last_layer" in lw.doctor(net(), classes(), "categorical").plan


@pytest.mark.parametrize("name", ["kron", "block", "diag"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_counted_state_is_the_state(name, dtype):
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 5)).to(dtype)
    x, y = torch.randn(30, 2, 3, 3, dtype=dtype), torch.randn(30, 5, dtype=dtype)
    tangent = lw.linearize(model)
    structure = lw.arguments.STRUCTURES[name]()
    state = lw.accumulate(structure, tangent, lw.likelihoods.Gaussian(), (x, y))
    likelihood, sample = lw.likelihoods.Gaussian(), sample_of(x, y)
    told = structure.needs(survey(tangent, likelihood, sample, 2**30, measure(tangent, likelihood, sample))).state
    held = sum(t.numel() * t.element_size() for key, t in state.sums.items() if not key.endswith("/count"))
    assert told == held


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3).double()

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        return self.layer(edges @ nodes)


def test_a_graph_that_cannot_be_cut_is_planned_whole():
    data = [({"nodes": inputs(12), "edges": torch.rand(12, 12, dtype=torch.float64)}, labels(12))]
    model = Graph()
    report = lw.doctor(model, data, "categorical")
    assert report.ok, str(report)
    assert str(run(report, model=model, data=data).state.structure) == "full (primal)"


def test_outputs_that_are_too_many_for_a_covariance_are_planned_by_draws(monkeypatch):
    monkeypatch.setattr(gaussian, "WIDE", 2)
    report = lw.doctor(net(), classes(), "categorical")
    assert report.ok, str(report)
    assert set(report.plan) == {"full (primal)", "full (dual)", "kron", "block", "diag", "last_layer"}


@pytest.mark.filterwarnings("ignore:tuning stopped at a bound")
def test_one_example_is_enough_for_a_plan():
    model = net()
    report = lw.doctor(model, classes(1), "categorical")
    assert report.ok, str(report)
    assert run(report, model=model, data=classes(1)).state.n == 1


def test_a_structure_that_fails_its_trial_is_named_and_another_is_recommended(monkeypatch):
    def fail(*_: Any) -> Any:
        raise RuntimeError("not today")

    monkeypatch.setattr(lw.curvature.Kronecker, "needs", fail)
    report = lw.doctor(net(), classes(), "categorical")
    the(report, "warning", "plan", "kron", "not today")
    assert "kron" not in report.plan
    assert "structure='full'" in report.recommendation


def test_a_problem_with_errors_has_a_plan_but_no_call():
    report = lw.doctor(nn.Sequential(net(), nn.Softmax(-1)), classes(), "categorical")
    assert not report.ok
    assert report.plan
    assert report.recommendation == ""


def test_the_ledger_counts_what_is_alive():
    known = torch.zeros(1_000, dtype=torch.float64)

    def work() -> Tensor:
        a = known + 1  # 8,000 bytes
        b = (a * 2).sum()  # 8,000 more, at once gone; 8 stay
        c = a.reshape(10, 100)[2:]  # a view
        del a
        return c.clone() + b  # 6,400 twice, beside the 8,000 that the view holds

    peak, out = counted(work, [known])
    assert peak == 8_000 + 8 + 2 * 6_400
    assert out.shape == (8, 100)


@pytest.mark.parametrize(
    ("took", "least", "runs"), [((0.05, 0.01, 0.03, 0.02, 0.02, 0.04), 0.01, 6), ((0.9, 0.1), 0.9, 1)]
)
def test_the_clock_takes_the_least_of_a_few_runs_and_one_of_a_slow_one(monkeypatch, took, least, runs):
    ticks = iter([t for i in range(len(took)) for t in (sum(took[:i]), sum(took[: i + 1]))])
    monkeypatch.setattr(sys.modules["lapwing.doctor.trial"], "QUICK", 0.2)
    monkeypatch.setattr(sys.modules["lapwing.doctor.trial"].time, "thread_time", lambda: next(ticks))
    calls: list[int] = []
    assert timed(lambda: calls.append(1), torch.device("cpu")) == pytest.approx(least)
    assert len(calls) == runs


@pytest.mark.parametrize(("once", "each"), [(0.3, 0.02), (0.0, 0.05)])
def test_a_larger_batch_lies_on_the_line_through_two_small_ones(once, each):
    assert _grown(once + 8 * each, once + 4 * each, 8, 100) == pytest.approx(once + 100 * each)


def test_free_memory_is_a_number_of_bytes():
    assert free_memory(torch.device("cpu")) > 2**20


# -- the report --------------------------------------------------------------------------------------------------


def test_a_report_fits_one_hundred_columns_and_says_everything():
    layers = [m for _ in range(5) for m in (nn.Linear(5, 5), nn.LayerNorm(5))]
    model = nn.Sequential(*layers, nn.Linear(5, 3)).double()
    report = lw.doctor(model, classes(), "categorical")
    text = str(report)
    assert max(map(len, text.splitlines())) <= 100
    for heading in ("Lapwing doctor: Sequential", "Findings: ", "Parameters: 22 tensors", "Plan: ", "Recommended call"):
        assert heading in text
    assert "... 7 more" in text
    assert report.recommendation in " ".join(text.split())
    assert repr(report) == text
    for finding in report.findings:
        assert finding.message in " ".join(text.split())
    with pytest.raises(AttributeError):
        report.findings[0].severity = "ok"


def test_long_names_and_remarks_are_cut_to_the_width():
    names = {"block." * 20 + "weight": "exact block, generic: " + "because " * 20, "b": "exact"}
    cost = Cost(10**9, 1.0, 2.0, 3.0, True, "a remark " * 20)
    report = Report("t", (), {"kron": cost}, names, dict.fromkeys(names, (10, 20)), "lw.laplace()")
    assert max(map(len, str(report).splitlines())) <= 100
    (row,) = [line for line in str(report).splitlines() if line.startswith("  block.")]
    assert row.count("...") == 2  # the name and the treatment, and it shows


def test_a_notebook_gets_a_page_with_everything_escaped():
    report = Report(
        "<net>", (Finding("error", "a & b", "x < y"),), {}, {"w": "exact"}, {"w": (2, 3)}, "lw.laplace(a, 'b')"
    )
    page = report._repr_html_()
    assert "&lt;net&gt;" in page
    assert "x &lt; y" in page
    assert "a &amp; b" in page
    assert "2x3" in page
    assert "<net>" not in page
    assert page.count("<table>") == page.count("</table>")
    assert not report.ok


def test_errors_come_first():
    findings = [
        Finding("ok", "a", "1"),
        Finding("note", "b", "2"),
        Finding("error", "c", "3"),
        Finding("warning", "d", "4"),
    ]
    text = str(Report("t", tuple(findings), {}, {}, {}, ""))
    assert [text.index(f"  {s}") for s in ("error", "warning", "note", "ok")] == sorted(
        text.index(f"  {s}") for s in ("error", "warning", "note", "ok")
    )
    assert "1 error, 1 warning, 1 note" in text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (512, "512 B"), (3_400_000, "3.4 MB"), (231_000_000, "231 MB"), (1.2e9, "1.2 GB"), (4e12, "4.0 TB")],
)
def test_bytes_are_told_in_human_units(count, text):
    assert size(count) == text


@pytest.mark.parametrize(
    ("count", "text"), [(2e-5, "20 us"), (0.25, "250 ms"), (3.14, "3.1 s"), (600, "10 min"), (9000, "2.5 h")]
)
def test_seconds_are_told_in_human_units(count, text):
    assert seconds(count) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(math.nan, "?"), (0.0, "0"), (0.004, "< 0.01"), (0.25, "0.25"), (3.14, "3.1"), (12_345.0, "12,000")],
)
def test_costs_are_told_with_two_digits(value, text):
    assert significant(value) == text


def test_the_module_and_the_function_share_a_name():
    assert lw.doctor is module.doctor
    assert copy.copy(lw.doctor) is lw.doctor


class Shared(Stream):
    """Each worker reads its share."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        info = get_worker_info()
        yield from itertools.islice(super().__iter__(), 0 if info is None else info.id, None, info.num_workers)


def test_what_workers_and_drop_last_do_to_a_stream_is_told(quick):
    twice = lw.doctor(net(2), DataLoader(Stream(False), batch_size=8, num_workers=2), "gaussian")
    the(twice, "error", "loader", "2 workers begin with the same batch", "get_worker_info")
    shared = lw.doctor(net(2), DataLoader(Shared(False), batch_size=8, num_workers=2), "gaussian")
    assert "loader" not in topics(shared, "error", "warning")
    dropping = lw.doctor(net(2), DataLoader(Stream(False), batch_size=8, drop_last=True), "gaussian")
    the(dropping, "warning", "loader", "last examples of the stream")


def test_a_range_that_a_sigmoid_would_have_is_a_warning(quick):
    class Clamped(Squashed):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).clamp(1e-3, 1 - 1e-3)

    y = (torch.rand(40, 3) < 0.5).double()
    the(lw.doctor(Clamped(), (inputs(), y), "bernoulli"), "warning", "likelihood", "sigmoid")
