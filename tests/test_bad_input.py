"""Bad input: each is a clear error of ours that says what to do, or the right answer; and the model is as it was.

Every error is a LapwingError (and a ValueError where a value is wrong), raised before anything is half done.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

import lapwing as lw
from helpers import backward_rows, close, draw

STRUCTURES = ("full", "diag", "kron", "block")
NAN, INF = math.nan, math.inf


def network(outputs: int = 2) -> nn.Module:
    """3 -> 4 -> outputs, in a state that a careless pass would disturb: modes mixed, a gradient, a frozen bias, a
    hook, dropout, batch norm."""
    model = nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, outputs)
    ).double()
    model[0].eval()
    model[0].weight.grad = draw(4, 3)
    model[4].bias.requires_grad_(False)
    model[3].register_forward_hook(lambda module, inputs, output: None)
    return model


def snapshot(model: nn.Module) -> tuple:
    return (
        {k: v.clone() for k, v in model.state_dict().items()},
        {n: (p.requires_grad, None if p.grad is None else p.grad.clone()) for n, p in model.named_parameters()},
        [(n, m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in model.named_modules()],
    )


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    tensors, params, modules = snapshot(model)
    yield
    now_tensors, now_params, now_modules = snapshot(model)
    assert tensors.keys() == now_tensors.keys()
    for name, value in tensors.items():
        torch.testing.assert_close(now_tensors[name], value, rtol=0.0, atol=0.0, equal_nan=True)
    for name, (requires_grad, grad) in params.items():
        assert now_params[name][0] == requires_grad, name
        assert (grad is None) == (now_params[name][1] is None), name
        assert grad is None or torch.equal(grad, now_params[name][1])
    assert now_modules == modules


@contextmanager
def refused(model: nn.Module, says: str, error: type[Exception] = lw.errors.InvalidValue) -> Iterator[None]:
    """An error of ours with the given words in it, and the model untouched."""
    with untouched(model), pytest.raises(lw.errors.LapwingError, match=says) as caught:
        yield
    assert isinstance(caught.value, error)
    assert len(str(caught.value)) > 20


def regression(n: int = 6, outputs: int = 2) -> tuple[Tensor, Tensor]:
    return draw(n, 3), draw(n, outputs)


@pytest.fixture(autouse=True)
def _writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    assert not list(tmp_path.iterdir())


# -- data --------------------------------------------------------------------------------------------------------


class Empty(IterableDataset):
    def __iter__(self) -> Iterator:
        return iter(())


NO_DATA: dict[str, Callable[[], object]] = {
    "pair": lambda: (draw(0, 3), draw(0, 2)),
    "list": lambda: [],
    "loader": lambda: DataLoader(TensorDataset(draw(0, 3), draw(0, 2))),
    "dataset": lambda: TensorDataset(draw(0, 3), draw(0, 2)),
    "stream": lambda: DataLoader(Empty()),
    "empty batches": lambda: [(draw(0, 3), draw(0, 2))] * 2,
}


@pytest.mark.parametrize("structure", ["auto", *STRUCTURES])
@pytest.mark.parametrize("data", NO_DATA)
def test_no_data(data: str, structure: str) -> None:
    model = network()
    with refused(model, "at least one example"):
        lw.laplace(model, NO_DATA[data](), "gaussian", structure=structure)


def test_an_empty_batch_among_others_adds_nothing() -> None:
    model, (x, y) = network(), regression()
    for structure in STRUCTURES:
        for data in ([(x[:0], y[:0]), (x, y)], [(x[:4], y[:4]), (x[:0], y[:0]), (x[4:], y[4:])]):
            la = lw.laplace(model, data, "gaussian", structure=structure)
            close(la.log_evidence(), lw.laplace(model, (x, y), "gaussian", structure=structure).log_evidence())
            assert la.state.n == 6


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (None, "got NoneType"),
        (draw(6, 3), "got Tensor"),
        ("train", "got str"),
        ({"x": draw(6, 3)}, "got dict"),
        (iter([(draw(6, 3), draw(6, 2))]), "one-pass iterator"),
        ((draw(6, 3), draw(5, 2)), "X has 6 examples and y has 5"),
        ((draw(6, 3), None), "no tensor"),
        ((draw(6, 3), ["a"] * 6), "no tensor"),
        ([(draw(6, 3), draw(6, 2), draw(6))], "length 3"),
        ([{"x": draw(6, 3)}], "'labels'"),
        ([(draw(6, 3), draw(5, 2))], "batch sizes must agree"),
        ([(draw(6, 3), ["a"] * 6)], "tensor"),
        ([(draw(6, 3), torch.tensor(1.0))], "dimension"),
    ],
)
def test_data_that_are_not_batches_of_inputs_and_targets(data: object, says: str) -> None:
    model = network()
    with refused(model, says):
        lw.laplace(model, data, "gaussian")


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_inputs_that_are_not_finite(bad: float, structure: str) -> None:
    model, (x, y) = network(), regression()
    x[5, 1] = bad
    for data in ((x, y), DataLoader(TensorDataset(x, y), batch_size=2)):  # in the first batch, and in a later one
        with refused(model, "1 NaN or infinite.*clean the data"):
            lw.laplace(model, data, "gaussian", structure=structure)
    la = lw.laplace(model, regression(), "gaussian", structure=structure)
    with refused(model, "NaN or infinite"):
        la.predict(x)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("bad", [NAN, INF])
def test_targets_that_are_not_finite(bad: float, structure: str) -> None:
    model, (x, y) = network(), regression()
    y[4, 1] = bad
    with refused(model, "targets hold NaN or infinite"):
        lw.laplace(model, DataLoader(TensorDataset(x, y), batch_size=2), "gaussian", structure=structure)
    labels = torch.randint(2, (6, 2)).double()
    labels[4, 1] = bad
    with refused(model, "0 or 1"):
        lw.laplace(model, (x, labels), "bernoulli", structure=structure)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("bad", [NAN, INF])
def test_weights_and_buffers_that_are_not_finite(bad: float, structure: str) -> None:
    model = network()
    with torch.no_grad():
        model[4].weight[1, 2] = bad
    with refused(model, r"4\.weight holds NaN or infinite"):
        lw.laplace(model, regression(), "gaussian", structure=structure)
    model = network()
    model[4].bias.data[0] = bad  # frozen, and still part of the network
    with refused(model, r"4\.bias holds NaN or infinite"):
        lw.laplace(model, regression(), "gaussian", structure=structure)
    model = network()
    model[1].running_mean[2] = NAN
    with refused(model, "outputs hold NaN or infinite"):
        lw.laplace(model, regression(), "gaussian", structure=structure)


class Kinked(nn.Module):
    """Finite outputs, with a derivative that is not: √· at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.sqrt(self.a(x).square()))


@pytest.mark.parametrize("structure", [*STRUCTURES, "dual"])
def test_derivatives_that_are_not_finite(structure: str) -> None:
    model = Kinked().double()
    with torch.no_grad():
        model.a.weight[0], model.a.bias[0] = 0.0, 0.0
    named = "" if structure in ("dual",) else r".*a derivative that is not finite, by a\.weight and 1 more"
    with refused(model, "NaN or infinite" + named, lw.errors.LapwingError):
        lw.laplace(model, regression(20), "gaussian", structure=structure_of(structure)).log_evidence()
    la = lw.laplace(model, regression(20), "gaussian", structure=structure_of(structure), subset=["b.*"])
    assert torch.isfinite(la.log_evidence())


@pytest.mark.parametrize("structure", ["kron", "diag", "ekfac", "lowrank", "matrix_free"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_overflow_is_told_from_derivatives_that_are_not_finite(structure: str, dtype: torch.dtype) -> None:
    """Inputs whose squares are beyond the dtype; their derivatives are finite."""
    size, y = torch.finfo(dtype).max ** 0.6, torch.randn(20, 2, dtype=dtype)
    model, x = nn.Linear(3, 2).to(dtype), size * torch.randn(20, 3, dtype=dtype)
    with torch.no_grad():
        model.weight /= size
    wider = "network.double" if dtype == torch.float32 else "the noise$"
    with refused(model, f"overflow {str(dtype)[6:]}, which ends at .*; scale the inputs.*{wider}"):
        lw.laplace(model, (x, y), "gaussian", structure=structure)
    if dtype == torch.float32:
        la = lw.laplace(model.double(), (x.double(), y.double()), "gaussian", structure="kron")
        assert torch.isfinite(la.log_evidence())


def test_sums_that_overflow_when_states_are_added_are_told() -> None:
    model, x = nn.Linear(3, 2), 1.2e19 * torch.ones(1, 3)
    with torch.no_grad():
        model.weight /= 1e19
    la = lw.laplace(model, (x, torch.zeros(1, 2)), "gaussian", structure="kron")
    with refused(model, "overflow float32.* or the network has a derivative"):
        lw.from_state(la.state + la.state + la.state, model, 1.0, "gaussian")


def structure_of(name: str) -> object:
    return lw.curvature.Full("dual") if name == "dual" else name


BAD_TARGETS: list[tuple[str, Callable[[], Tensor], str]] = [
    ("categorical", lambda: torch.tensor([0, 1, 2, 3, 0, 1]), r"labels run from 0 to 3, outside 0\.\.2"),
    ("categorical", lambda: torch.tensor([0, 1, 2, -1, 0, 1]), r"-1 to 2"),
    ("categorical", lambda: torch.tensor([0, 1, 2, -100, 0, 1]), r"-100"),
    ("categorical", lambda: torch.tensor([0.0, 1, 2, 1, 0, 1]), r"y\.long\(\)"),
    ("categorical", lambda: torch.tensor([True] * 6), r"integer class labels, got torch\.bool"),
    ("categorical", lambda: torch.zeros(6, 1).long(), r"\(6, 1\)"),
    ("categorical", lambda: torch.eye(3).repeat(2, 1).long(), r"\(6, 3\)"),
    ("bernoulli", lambda: torch.full((6, 3), 2), "0 or 1"),
    ("bernoulli", lambda: torch.full((6, 3), -1), "0 or 1"),
    ("bernoulli", lambda: torch.full((6, 3), 0.5), "0 or 1"),
    ("bernoulli", lambda: torch.zeros(6), "unsqueeze|shape"),
    ("bernoulli", lambda: torch.zeros(6, 2), "shape"),
    ("gaussian", lambda: torch.zeros(6, 3).long(), "categorical.*float"),
    ("gaussian", lambda: torch.zeros(6, 3).bool(), "floating point"),
    ("gaussian", lambda: torch.zeros(6), "unsqueeze|shape"),
    ("gaussian", lambda: torch.zeros(6, 2), r"\(6, 2\)"),
    ("gaussian", lambda: torch.zeros(6, 3, 1), r"\(6, 3, 1\)"),
]


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize(("likelihood", "targets", "says"), BAD_TARGETS)
def test_targets_out_of_range_or_of_the_wrong_dtype_or_shape(
    likelihood: str, targets: Callable[[], Tensor], says: str, structure: str
) -> None:
    model = network(3)
    with refused(model, says):
        lw.laplace(model, (draw(6, 3), targets()), likelihood, structure=structure)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int16])
def test_integer_labels_of_any_width_are_right(dtype: torch.dtype) -> None:
    model, x, y = network(3), draw(6, 3), torch.tensor([0, 1, 2, 1, 0, 1])
    narrow, wide = (lw.laplace(model, (x, t), "categorical") for t in (y.to(dtype), y))
    close(narrow.log_evidence(), wide.log_evidence(), 0.0)
    binary = torch.randint(2, (6, 3))
    fits = [lw.laplace(model, (x, t), "bernoulli") for t in (binary, binary.bool(), binary.double())]
    for la in fits[1:]:
        close(la.log_evidence(), fits[0].log_evidence(), 0.0)


# -- loaders that change -----------------------------------------------------------------------------------------


class Changing:
    """Another number of batches, in another order, at each pass."""

    def __init__(self, x: Tensor, y: Tensor, sizes: list[int]) -> None:
        self.x, self.y, self.sizes, self.passes = x, y, sizes, 0
        self.seen: list[int] = []

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        size = self.sizes[min(self.passes, len(self.sizes) - 1)]
        self.passes += 1
        self.seen = []
        for i in torch.randperm(len(self.x))[:size].tolist():
            self.seen.append(i)
            yield self.x[i : i + 1], self.y[i : i + 1]


@pytest.mark.parametrize("structure", [*STRUCTURES, "dual"])
def test_a_loader_that_changes_its_order_is_right(structure: str) -> None:
    model, (x, y) = network(), regression()
    chosen = structure_of(structure)
    la = lw.laplace(model, Changing(x, y, [6]), "gaussian", structure=chosen)
    whole = lw.laplace(model, (x, y), "gaussian", structure=chosen)
    assert la.state.n == 6
    close(la.log_evidence(), whole.log_evidence())
    close(la.predict(x).covariance, whole.predict(x).covariance)


@pytest.mark.parametrize("structure", [*STRUCTURES, "dual"])
@pytest.mark.parametrize("sizes", [[6, 5, 4, 3, 2, 1], [2, 3, 4, 5, 6]])
def test_a_loader_that_changes_its_length_is_refused(structure: str, sizes: list[int]) -> None:
    model, (x, y) = network(), regression()
    with refused(model, r"\d examples in one pass and \d in another.*same examples in every pass"):
        lw.laplace(model, Changing(x, y, sizes), "gaussian", structure=structure_of(structure))


def test_a_batch_sampler_of_the_users_own_is_counted_by_a_pass() -> None:
    class Halves(BatchSampler):
        """Has a sampler, and uses half of it."""

        def __iter__(self) -> Iterator[list[int]]:
            return (batch[:1] for batch in super().__iter__())

    model, (x, y) = network(), regression()
    dataset = TensorDataset(x, y)
    loader = DataLoader(dataset, batch_sampler=Halves(SequentialSampler(dataset), 2, False))
    la = lw.laplace(model, loader, "gaussian")
    assert la.state.n == 3
    close(la.log_evidence(), lw.laplace(model, (x[::2], y[::2]), "gaussian").log_evidence())


def test_a_loader_that_runs_dry_is_an_error() -> None:
    model, (x, y) = network(), regression()

    class OnePass(IterableDataset):
        def __init__(self) -> None:
            self.stream = iter(zip(x, y, strict=True))

        def __iter__(self) -> Iterator:
            return self.stream

    with refused(model, "no batch"):
        lw.laplace(model, DataLoader(OnePass(), batch_size=2), "gaussian")


def test_a_loader_that_drops_its_last_batch_is_named() -> None:
    model, (x, y) = network(), regression()
    loader = DataLoader(TensorDataset(x, y), batch_size=4, drop_last=True)
    with untouched(model), pytest.warns(lw.errors.LapwingWarning, match="2 of 6 examples.*drop_last=False"):
        la = lw.laplace(model, loader, "gaussian")
    assert la.state.n == 4


def test_two_mapping_batches_are_two_batches() -> None:
    model = nn.Bilinear(3, 2, 2).double()
    batches = [{"input1": draw(4, 3), "input2": draw(4, 2), "labels": draw(4, 2)} for _ in range(2)]
    la = lw.laplace(model, batches, "gaussian")
    assert la.state.n == 8


# -- models ------------------------------------------------------------------------------------------------------


class Returning(nn.Module):
    def __init__(self, change: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.layer, self.change = nn.Linear(3, 2), change

    def forward(self, x: Tensor) -> object:
        return self.change(self.layer(x))


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda f: f[:, 0], r"\(6,\).*unsqueeze"),
        (lambda f: f.sum(), r"\(\).*\(n, \.\.\., c\)"),
        (lambda f: (f, f), "tuple.*forward="),
        (lambda f: {"scores": f}, "dict.*forward="),
        (lambda f: f.mean(0, keepdim=True), "batch sizes must agree"),
        (lambda f: f[:4], "batch sizes must agree"),
    ],
)
def test_outputs_that_are_not_examples_by_outputs(
    change: Callable[[Tensor], object], says: str, structure: str
) -> None:
    model = Returning(change).double()
    with refused(model, says):
        lw.laplace(model, regression(), "gaussian", structure=structure)


def test_models_without_anything_to_be_bayesian_about() -> None:
    data = regression(outputs=3)
    with refused(nn.Tanh(), "no parameters"):
        lw.laplace(nn.Tanh(), data, "gaussian")
    frozen = network().requires_grad_(False)
    with refused(frozen, "no parameter requires grad"):
        lw.laplace(frozen, data, "gaussian")
    for not_a_model in (None, lambda x: x, "model"):
        with pytest.raises(lw.errors.InvalidValue, match=r"torch\.nn\.Module"):
            lw.laplace(not_a_model, data, "gaussian")
    lazy = nn.Sequential(nn.LazyLinear(2)).double()
    with pytest.raises(lw.errors.InvalidValue, match="lazy"):
        lw.laplace(lazy, data, "gaussian")


@pytest.mark.parametrize(
    ("subset", "says"),
    [
        ([], "empty"),
        (["9.*"], r"'9\.\*' matches no parameter.*0\.weight"),
        (["0.*", "nothing"], "'nothing' matches no parameter"),
        ([3], "globs"),
        ("first_layer", "'last_layer'"),
        (7, "'last_layer'"),
        (None, "'last_layer'"),
        ({}, "no element"),
        ({"0.weight": torch.zeros(4, 3, dtype=torch.bool)}, "no element"),
        ({"0.wait": torch.ones(4, 3, dtype=torch.bool)}, "'0.wait'"),
        ({"0.weight": torch.ones(3, 4, dtype=torch.bool)}, r"\(4, 3\)"),
        ({"0.weight": torch.ones(4, 3)}, "bool"),
        ({"0.weight": [True]}, "bool tensor"),
    ],
)
def test_subsets_that_select_nothing_or_cannot_be_read(subset: object, says: str) -> None:
    model = network()
    with refused(model, says):
        lw.laplace(model, regression(), "gaussian", subset=subset)


def test_a_network_without_a_last_layer_says_so() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            return h + self.last(h)

    model = Around().double()
    with refused(model, r"no last layer.*first\.weight"):
        lw.laplace(model, regression(), "gaussian", subset="last_layer")


def test_batch_norm_without_running_statistics_is_named() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2, track_running_stats=False)).double()
    with refused(model, "track_running_stats"):
        lw.laplace(model, regression(), "gaussian")


def test_a_matrix_too_large_for_the_machine_is_refused_before_it_is_made() -> None:
    model = nn.Linear(3000, 1000)
    data = torch.randn(2, 3000), torch.randn(2, 1000)
    with refused(model, "structure='kron'"):
        lw.laplace(model, data, "gaussian", structure=lw.curvature.Full("primal"))


# -- priors, likelihoods, options --------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [0.0, -1.0, NAN, INF, 0, -3])
def test_precisions_and_noises_that_are_not_positive(bad: float) -> None:
    model, data = network(), regression()
    for prior in (bad, torch.tensor(float(bad)), {"0.*": 1.0, "[14].*": bad}, torch.tensor([1.0] * 26 + [bad])):
        with refused(model, "positive and finite"):
            lw.laplace(model, data, "gaussian", prior=prior)
    with refused(model, "positive and finite"):
        lw.priors.Gaussian(bad, per="layer")
    la = lw.laplace(model, data, "gaussian")
    for use in (la.replace, la.log_evidence):
        with refused(model, "positive and finite"):
            use(prior=bad)
    for noise in (bad, torch.tensor([0.3, bad])):
        with refused(model, "noise must be positive and finite"):
            lw.likelihoods.Gaussian(noise)


@pytest.mark.parametrize(
    ("prior", "says"),
    [
        ("layer", "'layerwise'"),
        (None, "'layerwise'"),
        (True, "'layerwise'"),
        ([1.0], "'layerwise'"),
        ({}, "empty"),
        ({"0.*": 1.0}, r"1\.weight must match exactly one"),
        ({"*": 1.0, "0.*": 1.0}, r"0\.weight must match exactly one.*\['\*', '0\.\*'\]"),
        ({"*": 1.0, "9.*": 1.0}, r"'9\.\*'.*match no selected parameter"),
        (torch.ones(3), "3 prior precisions for"),
        (lw.priors.Gaussian(torch.ones(2), per="layer"), "2 prior precisions for 3 groups"),
        (lw.priors.Gaussian(mean={"0.weight": torch.zeros(4, 3)}), "expected tensors for"),
        (lw.priors.Gaussian(mean=NAN), "mean holds NaN"),
        (lw.priors.Gaussian(mean=torch.zeros(3)), "float or"),
    ],
)
def test_priors_that_cannot_be_read(prior: object, says: str) -> None:
    model = network()
    with refused(model, says):
        lw.laplace(model, regression(), "gaussian", prior=prior)


def test_a_prior_mean_of_another_shape_is_not_read_in_another_order() -> None:
    model = nn.Linear(3, 2).double()
    mean = {"weight": torch.zeros(3, 2), "bias": torch.zeros(2)}  # transposed: as many numbers, not the same ones
    with refused(model, r"weight.*\(2, 3\).*\(3, 2\)"):
        lw.laplace(model, regression(), "gaussian", prior=lw.priors.Gaussian(mean=mean))


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("likelihood", "normal", "'gaussian'.*'normal'"),
        ("likelihood", None, "'gaussian'"),
        ("likelihood", nn.MSELoss(), "'gaussian'"),
        ("structure", "fill", "'full'.*'fill'"),
        ("structure", None, "'full'"),
        ("structure", 3, "'full'"),
        ("factor", "exakt", "'exact'.*'exakt'"),
        ("factor", None, "'exact'"),
        ("factor", 8, "'exact'"),
        ("memory_budget", 0, "bytes"),
        ("memory_budget", -1, "bytes"),
        ("memory_budget", 1e9 + 0.5, "bytes"),
        ("memory_budget", float("inf"), "bytes"),
        ("memory_budget", float("nan"), "bytes"),
        ("memory_budget", True, "bytes"),
        ("memory_budget", "1GB", "bytes"),
    ],
)
def test_options_that_are_not_among_the_choices(option: str, value: object, says: str) -> None:
    model = network()
    with refused(model, says):
        lw.laplace(model, regression(), **{"likelihood": "gaussian", option: value})


BUDGETED: list[Callable[[Any], Any]] = [
    lambda b: lw.laplace(network(), regression(), "gaussian", memory_budget=b),
    lambda b: lw.laplace(network(), regression(), "gaussian", structure="matrix_free", memory_budget=b).state.structure,
    lambda b: lw.curvature.Full(memory_budget=b),
    lambda b: lw.curvature.Kronecker(b),
    lambda b: lw.curvature.EigenKronecker(b),
    lambda b: lw.curvature.Block(b),
    lambda b: lw.curvature.Diagonal(b),
    lambda b: lw.curvature.LowRank(memory_budget=b),
    lambda b: lw.curvature.MatrixFree(memory_budget=b),
]


@pytest.mark.parametrize("make", BUDGETED)
def test_bytes_may_be_typed_as_a_power_of_ten(make: Callable[[Any], Any]) -> None:
    for budget in (2e9, np.float64(2e9), np.int64(2_000_000_000), 2_000_000_000):
        made = make(budget)
        assert type(made.memory_budget) is int
        assert made.memory_budget == 2_000_000_000


@pytest.mark.parametrize("make", BUDGETED)
@pytest.mark.parametrize("budget", [0, -1.0, 1.5, float("inf"), float("nan"), True, "1GB", None, 1j])
def test_bytes_that_are_no_whole_number_are_refused(make: Callable[[Any], Any], budget: Any) -> None:
    if budget is None and make in BUDGETED[:2]:
        pytest.skip("None is the default there")
    with pytest.raises(lw.errors.InvalidValue, match="number of bytes"):
        make(budget)


def test_ella_scores_and_the_doctor_count_bytes_alike() -> None:
    model, data = network(), regression()
    whole, typed = (lw.gp.ella(model, data, "gaussian", anchors=4, rank=2, memory_budget=b) for b in (2**20, 2.0**20))
    torch.testing.assert_close(typed.predict(data[0]).f_var, whole.predict(data[0]).f_var, rtol=0, atol=0)
    assert "memory_budget=1000000000)" in lw.doctor(model, data, "gaussian", memory_budget=2e9).recommendation
    lw.scores.sketched_lanczos(model, data, "gaussian", rank=2, sketch=4, memory_budget=1e6)


@pytest.mark.parametrize("kind", [lw.curvature.Kronecker, lw.curvature.EigenKronecker])
def test_a_sharing_in_the_place_of_bytes_is_named(kind: Any) -> None:
    with pytest.raises(lw.errors.InvalidValue, match=rf"memory_budget.*'reduce'.*{kind.__name__}\(sharing='reduce'\)"):
        kind("reduce")
    assert kind(sharing="reduce").sharing == "reduce"


@pytest.mark.parametrize(
    ("use", "says"),
    [
        (lambda la, x: la.tuned("evidance"), "'mackay'"),
        (lambda la, x: la.tuned(fixed=("nois",)), r"nois.*precision.*noise"),
        (lambda la, x: la.tuned(fixed=("noise", "precision")), "nothing to tune"),
        (lambda la, x: la.tuned(data=(x, x), center="map"), "drop data="),
        (lambda la, x: la.log_evidence(center="mode"), "'map'.*'mode'"),
        (lambda la, x: la.log_evidence(likelihood="categorical"), "fit again"),
        (lambda la, x: la.replace(likelihood="categorical"), "fit again"),
        (lambda la, x: la.replace(likelihood=lw.likelihoods.Gaussian([0.1, 0.2])), "fit again"),
        (lambda la, x: la.replace(prior="layer"), "'layerwise'"),
        (lambda la, x: la.predict(x, link="logit"), "'probit'.*'logit'"),
        (lambda la, x: la.predict(x, via="weights"), "'network'.*'weights'"),
        (lambda la, x: la.predict(x, mean="map"), "'tangent'.*'map'"),
        (lambda la, x: la.predict(x, via="network", link="probit"), "'auto'"),
        (lambda la, x: la.predict(x, via="network", samples=1), "at least 2"),
        (lambda la, x: la.predict(x[:0]), "at least one"),
        (lambda la, x: la.draw(0), "at least 1"),
        (lambda la, x: lw.priors.Gaussian(per="row"), "'layer'.*'row'"),
        (lambda la, x: lw.curvature.Full("triple"), "'primal'.*'triple'"),
        (lambda la, x: lw.curvature.Factor("monte_carlo", 0), "at least 1"),
        (lambda la, x: lw.likelihoods.Gaussian(torch.ones(2, 2)), "one for each output"),
    ],
)
def test_methods_name_the_choices_that_they_have(use: Callable[[lw.Laplace, Tensor], object], says: str) -> None:
    model, (x, y) = network(), regression()
    la = lw.laplace(model, (x, y), "gaussian")
    before = la.log_evidence()
    with refused(model, says):
        use(la, x)
    close(la.log_evidence(), before, 0.0)


def test_pairs_that_have_no_rule_name_an_alternative() -> None:
    model, (x, y) = network(), regression()
    noises = lw.likelihoods.Gaussian([0.3, 0.5])
    for factor in ("empirical", "monte_carlo"):
        with refused(model, "factor='exact'", lw.errors.Unsupported):
            lw.laplace(model, (x, y), noises, factor=factor)
    for structure in ("diag", "kron", "block", lw.curvature.Full("dual")):
        with refused(model, "full|primal|exact"):
            lw.laplace(model, (x, y), "gaussian", structure=structure, factor="hessian")
    with refused(model, "noise has 3 values for 2 outputs"):
        lw.laplace(model, (x, y), lw.likelihoods.Gaussian([0.3, 0.5, 0.7]))
    gaussian, binary = (
        lw.laplace(model, data, likelihood)
        for data, likelihood in (((x, y), "gaussian"), ((x, torch.randint(2, (6, 2))), "bernoulli"))
    )
    with refused(model, "'auto'", lw.errors.Unsupported):
        _ = gaussian.predict(x, link="probit").mean
    with refused(model, "'probit' and 'monte_carlo'", lw.errors.Unsupported):
        _ = binary.predict(x, link="bridge").mean


def test_every_error_is_a_lapwing_error_and_of_the_kind_python_has_for_it() -> None:
    for ours, pythons in [
        (lw.errors.InvalidValue, ValueError),
        (lw.errors.Unsupported, TypeError),
        (lw.errors.NotPositiveDefinite, ArithmeticError),
        (lw.errors.NotConverged, RuntimeError),
    ]:
        assert issubclass(ours, lw.errors.LapwingError)
        assert issubclass(ours, pythons)


# -- odd but right -----------------------------------------------------------------------------------------------


def dense(model: nn.Module, x: Tensor, names: list[str]) -> Tensor:
    """J by plain autograd in eval mode, (n, c, p) over the named parameters."""
    twin = copy.deepcopy(model).eval().requires_grad_(True)
    named = dict(twin.named_parameters())
    return backward_rows(twin(x).flatten(1), [named[n] for n in names])


def oracle(model: nn.Module, x: Tensor, y: Tensor, names: list[str], new: Tensor) -> tuple[Tensor, Tensor]:
    """Evidence and predictive covariance with a unit prior and unit noise."""
    named = dict(model.named_parameters())
    theta = torch.cat([named[n].detach().reshape(-1) for n in names])
    J = dense(model, x, names).flatten(0, 1)
    precision = J.mT @ J + torch.eye(len(theta), dtype=torch.float64)
    f = copy.deepcopy(model).eval()(x).detach()
    fit = torch.distributions.Normal(f, 1.0).log_prob(y).sum()
    evidence = fit - 0.5 * theta.square().sum() - 0.5 * torch.linalg.slogdet(precision)[1]
    rows = dense(model, new, names)
    return evidence, rows @ torch.linalg.inv(precision) @ rows.mT


@pytest.mark.parametrize("form", ["primal", "dual"])
def test_frozen_parameters_are_constants(form: str) -> None:
    model, (x, y), new = network(), regression(), draw(3, 3)
    with untouched(model):
        la = lw.laplace(model, (x, y), "gaussian", structure=lw.curvature.Full(form))
        prediction = la.predict(new)
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    evidence, covariance = oracle(model, x, y, names, new)
    close(la.log_evidence(), evidence)
    close(prediction.covariance, covariance)
    assert la.coverage["4.bias"] == "frozen"
    assert set(la.coverage) == {n for n, _ in model.named_parameters()}
    assert "frozen" not in {la.coverage[n] for n in names}
    named = lw.laplace(model, (x, y), "gaussian", subset=["*"])  # asked for by name, a frozen one is taken
    assert named.coverage["4.bias"] != "frozen"


@pytest.mark.parametrize("form", ["primal", "dual"])
def test_a_shared_parameter_is_one_parameter(form: str) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh(self.a(torch.sin(self.a(x)))))  # tied, and used twice

    model, x, y, new = Tied().double(), draw(6, 3), draw(6, 3), draw(3, 3)
    la = lw.laplace(model, (x, y), "gaussian", structure=lw.curvature.Full(form))
    evidence, covariance = oracle(model, x, y, ["a.weight", "a.bias", "b.bias"], new)
    close(la.log_evidence(), evidence)
    close(la.predict(new).covariance, covariance)
    assert list(la.coverage) == ["a.weight", "a.bias", "b.bias"]
    diag = lw.laplace(model, (x, y), "gaussian", structure="diag")
    J = dense(model, x, ["a.weight", "a.bias", "b.bias"]).flatten(0, 1)
    close(lw.operators.linalg.diagonal(diag.posterior.precision), J.square().sum(0) + 1)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("likelihood", ["gaussian", "categorical"])
def test_half_precision_networks_are_right_within_half_precision(
    dtype: torch.dtype, likelihood: str, structure: str
) -> None:
    """Against the float64 network at the same (rounded) weights and inputs; accumulation adds no error of its own."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)
    twin = copy.deepcopy(model).double()
    x, y = draw(40, 3).to(dtype), draw(40, 2).to(dtype)
    targets = (y, y.double()) if likelihood == "gaussian" else (y.argmax(-1), y.argmax(-1))
    with untouched(model):
        half = lw.laplace(model, (x, targets[0]), likelihood, structure=structure)
        prediction = half.predict(x[:3])
    exact = lw.laplace(twin, (x.double(), targets[1]), likelihood, structure=structure)
    eps = torch.finfo(dtype).eps
    assert half.log_evidence().dtype == torch.float64
    torch.testing.assert_close(half.log_evidence(), exact.log_evidence(), rtol=4 * eps, atol=0.0)
    torch.testing.assert_close(
        prediction.covariance.double(), exact.predict(x[:3].double()).covariance, rtol=16 * eps, atol=eps
    )
    close(half.tuned(center="map").prior.precision.log(), exact.tuned(center="map").prior.precision.log(), 20 * eps)
    assert half.draw(2)["0.weight"].dtype == dtype
    assert torch.isfinite(prediction.total).all()


@pytest.mark.parametrize("structure", ["primal", "dual"])
@pytest.mark.parametrize(("n", "outputs"), [(1, 2), (1, 1), (5, 1)])
def test_one_example_and_one_output_are_right(structure: str, n: int, outputs: int) -> None:
    model, (x, y), new = network(outputs), regression(n, outputs), draw(1, 3)
    la = lw.laplace(model, (x, y), "gaussian", structure=lw.curvature.Full(structure))
    names = [k for k, p in model.named_parameters() if p.requires_grad]
    evidence, covariance = oracle(model, x, y, names, new)
    close(la.log_evidence(), evidence)
    close(la.predict(new).covariance, covariance)
    close(la.predict(new, joint=True).covariance.reshape(outputs, outputs), covariance[0])
    assert la.predict(new).mean.shape == (1, outputs)
    assert torch.isfinite(la.predict(new).log_prob(draw(1, outputs))).all()
    labels = torch.randint(2, (n, outputs))
    binary = lw.laplace(model, (x, labels), "bernoulli", structure=lw.curvature.Full(structure))
    assert torch.isfinite(binary.log_evidence())
    assert ((binary.predict(new).probs > 0) & (binary.predict(new).probs < 1)).all()


@pytest.mark.parametrize("structure", STRUCTURES)
def test_one_logit_of_a_categorical_is_refused(structure: str) -> None:
    model = network(1)
    with refused(model, "'bernoulli'"):
        lw.laplace(model, (draw(6, 3), torch.zeros(6).long()), "categorical", structure=structure)


@pytest.mark.filterwarnings("ignore:tuning stopped at a bound")
@pytest.mark.parametrize(("structure", "likelihood"), [*itertools.product(STRUCTURES, ["gaussian", "categorical"])])
def test_a_whole_workflow_leaves_the_model_as_it_was(structure: str, likelihood: str) -> None:
    model, x = network(), draw(12, 3)
    y = draw(12, 2) if likelihood == "gaussian" else torch.randint(2, (12,))
    with untouched(model):
        la = lw.laplace(model, (x, y), likelihood, structure=structure, prior="layerwise")
        la = la.updated((x, y)).tuned(fixed=("noise",) if likelihood == "gaussian" else ())
        _ = la.log_evidence(), la.predict(x).total, la.predict(x, joint=True).covariance, la.draw(2)
        _ = la.predict(x, via="network").mean, repr(la), la.coverage, la.effective_dimension()


# -- torch's own errors ------------------------------------------------------------------------------------------

EVERY = [*STRUCTURES, "ekfac", "lowrank", "matrix_free"]


def single() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def batch(n: int = 6) -> tuple[Tensor, Tensor]:
    return draw(n, 3).float(), draw(n, 2).float()


WRONG_INPUTS: dict[str, tuple[Callable[[], object], str]] = {
    "features": (lambda: torch.randn(6, 7), r"inputs of \(\d, 7\) float32.*cannot be multiplied"),
    "integers": (lambda: torch.ones(6, 3).long(), r"int64.*its weights are float32"),
    "complex": (lambda: torch.ones(6, 3, dtype=torch.complex64), "complex64"),
    "one dimension": (lambda: torch.randn(6), r"inputs of \(\d,\) float32"),
    "meta": (lambda: torch.randn(6, 3, device="meta"), "meta device, which holds no values"),
    "two tensors": (lambda: (torch.randn(6, 3), torch.randn(6, 3)), "TypeError.*forward="),
    "keywords": (lambda: {"a": torch.randn(6, 3)}, "unexpected keyword.*forward="),
}


@pytest.mark.parametrize("structure", EVERY)
@pytest.mark.parametrize("wrong", WRONG_INPUTS)
def test_inputs_that_the_network_cannot_take(wrong: str, structure: str) -> None:
    """In the first batch, in a later one, and in everything that reads data after the fit."""
    make, says = WRONG_INPUTS[wrong]
    model, (x, y) = single(), batch()
    for data in ((make(), y), [(x, y), (make(), y)]):
        with refused(model, says, lw.errors.LapwingError):
            lw.laplace(model, data, "gaussian", structure=structure)
    la = lw.laplace(model, (x, y), lw.likelihoods.Gaussian(0.5), structure=structure)
    for use in (
        lambda: la.predict(make()),
        lambda: la.function_samples(2)(make()),
        lambda: la.updated((make(), y)),
        lambda: la.tuned(method="validation", data=(make(), y)),
    ):
        with refused(model, says, lw.errors.LapwingError):
            use()


def test_the_cause_is_kept() -> None:
    model, (_, y) = single(), batch()
    with pytest.raises(lw.errors.NetworkFailed) as caught:
        lw.laplace(model, (torch.randn(6, 7), y), "gaussian")
    assert isinstance(caught.value, RuntimeError)
    assert type(caught.value.__cause__) is RuntimeError
    with pytest.raises(lw.errors.NetworkFailed, match="division by zero"):
        lw.laplace(model, batch(), "gaussian", forward=lambda model, x: 1 / 0)
    with pytest.raises(lw.errors.NetworkFailed, match=r"matrices|multiplied"):
        lw.laplace(model, (torch.randn(6, 7), y), "gaussian", subset="last_layer")


def test_a_network_without_memory_left_is_torchs_to_tell() -> None:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError):
        lw.laplace(single(), batch(), "gaussian", forward=forward)


def test_networks_that_hold_no_values_or_have_no_arithmetic() -> None:
    data = batch()
    for use in (
        lambda net: lw.laplace(net, data, "gaussian"),
        lambda net: lw.linearize(net),
        lambda net: lw.OnlineEvidence(net, data, "gaussian"),
        lambda net: lw.subsets.largest_magnitude(net, 3),
        lambda net: lw.gp.ella(net, data, "gaussian"),
    ):
        with pytest.raises(lw.errors.InvalidValue, match="meta device, which holds no values"):
            use(single().to("meta"))
    assert "meta device" in str(lw.doctor(single().to("meta"), data, "gaussian"))
    with pytest.raises(lw.errors.InvalidValue, match=r"float8_e4m3fn.*cast the network"):
        lw.laplace(nn.Linear(3, 2).to(torch.float8_e4m3fn), data, "gaussian")
    net = nn.Module()
    net.weight = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(lw.errors.InvalidValue, match="not floating point"):
        lw.laplace(net, data, "gaussian")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_takes_other_inputs_in_its_own_dtype(dtype: torch.dtype) -> None:
    model, (x, y) = single().to(dtype), batch()
    own, cast = (lw.laplace(model, (t, y), "gaussian", structure="kron") for t in (x.to(dtype), x))
    assert torch.equal(cast.log_evidence(), own.log_evidence())


def fitted() -> lw.Laplace:
    return lw.laplace(single(), batch(), lw.likelihoods.Gaussian(0.5), structure="kron")


META = torch.ones((), device="meta")
WRONG_VALUES: dict[str, tuple[Callable[[], object], str]] = {
    "draws, negative": (lambda: fitted().posterior.draw(-1), "whole number, at least 0; got int -1"),
    "draws, a word": (lambda: fitted().posterior.draw("a"), "whole number"),
    "draws, broken": (lambda: fitted().posterior.draw(2.5), "whole number"),
    "draws of what": (lambda: fitted().posterior.draw(2, "a"), r"generator must be a torch\.Generator"),
    "samples of y": (lambda: fitted().predict(batch()[0]).sample(-1), "whole number"),
    "samples of y, seed": (lambda: fitted().predict(batch()[0]).sample(2, 0), r"torch\.Generator"),
    "samples to predict": (lambda: fitted().predict(batch()[0], samples=-3), "samples.*whole number"),
    "functions": (lambda: fitted().function_samples("a"), "whole number, at least 1"),
    "quantile": (lambda: fitted().predict(batch()[0]).quantile("a"), "strictly between 0 and 1"),
    "interval": (lambda: fitted().predict(batch()[0]).interval(None), "strictly between 0 and 1"),
    "targets": (lambda: fitted().predict(batch()[0]).log_prob("ab"), "targets must be a tensor"),
    "targets, meta": (lambda: fitted().predict(batch()[0]).log_prob(batch()[1].to("meta")), "meta device"),
    "fit's targets, meta": (lambda: lw.laplace(single(), (batch()[0], batch()[1].to("meta")), "gaussian"), "meta"),
    "save": (lambda: fitted().save(None), "a path must be"),
    "load": (lambda: lw.load(3.5, single()), "a path must be"),
    "merge": (lambda: lw.merge(None), "list of fits"),
    "merge numbers": (lambda: lw.merge([1, 2], single()), "a path must be"),
    "checkpoint": (lambda: lw.laplace(single(), batch(), "gaussian", checkpoint=3.5), "a path must be"),
    "generator": (lambda: lw.laplace(single(), batch(), "gaussian", generator=0), r"torch\.Generator"),
    "structure": (lambda: lw.laplace(single(), batch(), "gaussian", structure=lw.curvature.Kronecker), "an object"),
    "accumulate": (lambda: lw.accumulate("kron", lw.linearize(single()), None, batch()), "an object"),
    "rank": (lambda: lw.curvature.LowRank(2.5), "whole number"),
    "rank, a word": (lambda: lw.curvature.LowRank("a"), "whole number"),
    "samples": (lambda: lw.curvature.MatrixFree(samples="a"), "whole number, at least 4"),
    "factor": (lambda: lw.curvature.Factor("monte_carlo", 1.5), "whole number, at least 1"),
    "ella": (lambda: lw.gp.ella(single(), batch(), "gaussian", rank="a"), "whole number"),
    "noise": (lambda: lw.likelihoods.Gaussian("a"), "real number"),
    "noise, none": (lambda: lw.likelihoods.Gaussian(None), "real number"),
    "noise, complex": (lambda: lw.likelihoods.Gaussian(1j), "real number"),
    "noise, meta": (lambda: lw.likelihoods.Gaussian(META), "meta device"),
    "covariance": (lambda: lw.likelihoods.CorrelatedGaussian("a"), "real number"),
    "covariance, meta": (lambda: lw.likelihoods.CorrelatedGaussian(META), "meta device"),
    "precision": (lambda: lw.priors.Gaussian("a"), "real number"),
    "precision, none": (lambda: lw.priors.Gaussian(None), "real number"),
    "precisions": (lambda: lw.priors.Gaussian({"*": "a"}), r"precision of \* must be a real number"),
    "patterns": (lambda: lw.priors.Gaussian({3: 1.0}), "globs over parameter names"),
    "per": (lambda: lw.priors.Gaussian(1.0, per=3), "per must be one of"),
    "precision, meta": (lambda: lw.laplace(single(), batch(), "gaussian", prior=META), "meta device"),
    "mean": (lambda: lw.laplace(single(), batch(), "gaussian", prior=lw.priors.Gaussian(1.0, mean="a")), "real"),
    "means": (
        lambda: lw.laplace(single(), batch(), "gaussian", prior=lw.priors.Gaussian(1.0, mean={"0.weight": 1.0})),
        "must be a tensor",
    ),
    "mask, meta": (
        lambda: lw.laplace(
            single(), batch(), "gaussian", subset={"0.weight": torch.ones(4, 3, dtype=torch.bool, device="meta")}
        ),
        "meta device",
    ),
    "hyperparameters": (lambda: lw.OnlineEvidence(single(), batch(), "gaussian", hyperparameters=3), "list of globs"),
    "rate": (lambda: lw.OnlineEvidence(single(), batch(), "gaussian", lr="a"), "positive and finite"),
    "loss": (lambda: lw.OnlineEvidence(single(), batch(), "gaussian").loss(batch()[1], None), "both tensors"),
    "conformal": (lambda: lw.conformal.calibrate(None, None), "takes a prediction"),
    "level": (lambda: lw.metrics.interval(fitted().predict(batch()[0]), "a"), "strictly between 0 and 1"),
    "labels": (
        lambda: lw.metrics.accuracy(torch.full((4, 2), 0.5), torch.zeros(4, dtype=torch.long, device="meta")),
        "meta device",
    ),
    "random subset": (lambda: lw.subsets.random(single(), 3, generator="a"), r"torch\.Generator"),
}


@pytest.mark.parametrize("case", WRONG_VALUES)
def test_values_of_the_wrong_type(case: str) -> None:
    use, says = WRONG_VALUES[case]
    with pytest.raises(lw.errors.InvalidValue, match=says):
        use()


def test_a_task_is_named_where_a_likelihood_is_wanted() -> None:
    net = torch.nn.Linear(2, 3)
    x, y = torch.randn(6, 2), torch.tensor([0, 1, 2, 0, 1, 2])
    with pytest.raises(lw.errors.InvalidValue, match=r"'classification' is a task of lw\.laplace"):
        lw.gp.ella(net, (x, y), "classification")
