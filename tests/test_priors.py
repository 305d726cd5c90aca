"""The Gaussian prior: its groups, how it binds to a network, and its density against torch.distributions."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, distributions, nn

import lapwing as lw
from helpers import close
from lapwing import tree
from lapwing.errors import InvalidValue
from lapwing.operators import linalg
from lapwing.priors import Gaussian
from lapwing.tangent import linearize
from lapwing.tree import Layout


class Net(nn.Module):
    """Layers of unequal sizes, a bare parameter, a scalar one, and a nested module; p = 26."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)
        self.conv = nn.Conv1d(2, 2, 2)
        self.shift = nn.Parameter(torch.randn(3))
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.body = nn.Sequential(nn.Linear(4, 1, bias=False))


@pytest.fixture
def layout() -> Layout:
    return linearize(Net().double()).layout


NAMES = ("shift", "gain", "fc.weight", "fc.bias", "conv.weight", "conv.bias", "body.0.weight")
SIZES = (3, 1, 6, 2, 8, 2, 4)


def test_the_layout_is_what_these_tests_think(layout: Layout) -> None:
    assert layout.names == NAMES
    assert tuple(layout.numel(n) for n in NAMES) == SIZES
    assert layout.size == sum(SIZES) == 26


# -- groups ----------------------------------------------------------------------------------------------------------


def test_one_precision_for_all(layout: Layout) -> None:
    prior = Gaussian(2.0).bind(layout)
    assert prior.named() == {"all": 2.0}
    assert prior.precision.shape == ()
    assert prior.operator().uniform
    assert prior.operator().dense().tolist() == [2.0] * 26


def test_one_precision_a_layer(layout: Layout) -> None:
    """Weight and bias share; the root's own parameters are a layer too."""
    prior = Gaussian(torch.tensor([1.0, 2.0, 3.0, 4.0]), per="layer").bind(layout)
    assert prior.named() == {"(root)": 1.0, "fc": 2.0, "conv": 3.0, "body.0": 4.0}
    assert prior.operator().dense().tolist() == [1.0] * 4 + [2.0] * 8 + [3.0] * 10 + [4.0] * 4


def test_one_precision_a_unit(layout: Layout) -> None:
    """A slice along the first dimension; a module's equally long parameters share it."""
    prior = Gaussian(1.0, per="unit").bind(layout)
    index = prior.index
    assert index is not None
    at = {name: index[s].reshape(layout.shapes[name]) for name, s in layout.slices().items()}
    assert len(prior.names) == len(set(prior.names)) == prior.precision.numel() == 3 + 1 + 2 + 2 + 1
    assert torch.equal(at["fc.weight"], at["fc.bias"][:, None].expand(2, 3))
    assert torch.equal(at["conv.weight"], at["conv.bias"][:, None, None].expand(2, 2, 2))
    assert len(at["shift"].unique()) == 3
    groups = [set(at[n].reshape(-1).tolist()) for n in ("shift", "gain", "fc.bias", "conv.bias", "body.0.weight")]
    assert sum(map(len, groups)) == len(set.union(*groups)) == 9  # and no two layers share one
    assert prior.names[int(at["fc.bias"][1])] == "fc[1]"
    assert prior.names[int(at["conv.weight"][0, 1, 1])] == "conv[0]"


def test_one_precision_a_weight(layout: Layout) -> None:
    values = torch.arange(1.0, 27.0)
    prior = Gaussian(values, per="weight").bind(layout)
    assert prior.operator().dense().tolist() == values.tolist()
    named = prior.named()
    assert len(named) == 26
    assert named["shift[2]"] == 3.0
    assert named["fc.weight[4]"] == 4.0 + 1 + 4
    assert prior.index is None


def test_one_precision_a_glob(layout: Layout) -> None:
    prior = Gaussian({"*.bias": 1.0, "*.weight": 2.0, "shift": 3.0, "g*": 4.0}).bind(layout)
    assert prior.named() == {"*.bias": 1.0, "*.weight": 2.0, "shift": 3.0, "g*": 4.0}
    expected = [3.0] * 3 + [4.0] + [2.0] * 6 + [1.0] * 2 + [2.0] * 8 + [1.0] * 2 + [2.0] * 4
    assert prior.operator().dense().tolist() == expected


def test_a_single_glob_is_one_precision(layout: Layout) -> None:
    prior = Gaussian({"*": 5.0}).bind(layout)
    assert prior.operator().uniform
    assert prior.named() == {"*": 5.0}


@pytest.mark.parametrize("per", ["layer", "unit", "weight"])
def test_a_scalar_is_repeated_for_each_group(layout: Layout, per: str) -> None:
    prior = Gaussian(3.0, per=per).bind(layout)
    assert prior.precision.numel() == {"layer": 4, "unit": 9, "weight": 26}[per]
    assert prior.operator().dense().tolist() == [3.0] * 26


@pytest.mark.parametrize("per", ["all", "layer", "unit", "weight"])
def test_binding_twice_is_binding_once(layout: Layout, per: str) -> None:
    once = Gaussian(3.0, per=per).bind(layout)
    twice = once.bind(layout)
    assert twice.named() == once.named()
    assert torch.equal(twice.operator().dense(), once.operator().dense())


def test_a_network_of_one_layer_has_one_group() -> None:
    layout = linearize(nn.Linear(3, 2)).layout
    prior = Gaussian(2.0, per="layer").bind(layout)
    assert prior.named() == {"(root)": 2.0}
    assert prior.operator().dense().tolist() == [2.0] * 8


def test_groups_of_a_masked_network() -> None:
    """Only units that keep a weight have a precision, and each weight that of its own unit."""
    mask = torch.tensor([[True, False, True], [False, False, False]])
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3)).double()
    layout = linearize(net, {"0.weight": mask, "1.weight": torch.ones(3, 2, dtype=torch.bool)}).layout
    prior = Gaussian(torch.tensor([1.0, 2.0, 3.0, 4.0]), per="unit").bind(layout)
    assert prior.named() == {"0[0]": 1.0, "1[0]": 2.0, "1[1]": 3.0, "1[2]": 4.0}
    assert prior.operator().dense().tolist() == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0]
    assert (
        Gaussian(torch.tensor([1.0, 2.0]), per="layer").bind(layout).operator().dense().tolist()
        == [1.0] * 2 + [2.0] * 6
    )
    every = Gaussian(torch.arange(1.0, 9.0), per="weight").bind(layout)
    assert list(every.named()) == ["0.weight[0]", "0.weight[1]", *(f"1.weight[{i}]" for i in range(6))]


def test_units_of_one_module_with_unequal_lengths_have_names_of_their_own() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(2)), nn.Parameter(torch.randn(3))

    prior = Gaussian(torch.arange(1.0, 6.0), per="unit").bind(linearize(Two()).layout)
    assert prior.named() == {"(root)[0]": 1.0, "(root)[1]": 2.0, "b[0]": 3.0, "b[1]": 4.0, "b[2]": 5.0}


# -- the density -----------------------------------------------------------------------------------------------------

PRIORS: dict[str, Any] = {
    "all": lambda: Gaussian(2.5),
    "layer": lambda: Gaussian(torch.tensor([0.5, 1.0, 2.0, 4.0]), per="layer"),
    "unit": lambda: Gaussian(torch.linspace(0.5, 3.0, 9), per="unit"),
    "weight": lambda: Gaussian(torch.linspace(0.5, 3.0, 26), per="weight"),
    "glob": lambda: Gaussian({"*.bias": 1.0, "*.weight": 2.0, "[sg]*": 0.3}),
    "mean": lambda: Gaussian(2.5, mean=0.7),
    "layer, mean": lambda: Gaussian(torch.tensor([0.5, 1.0, 2.0, 4.0]), per="layer", mean=-0.2),
}


def weights(layout: Layout, seed: int) -> dict[str, Tensor]:
    return layout.unflatten(torch.randn(layout.size, generator=torch.Generator().manual_seed(seed)).double())


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", PRIORS)
def test_log_prob_is_that_of_torch_distributions(name: str, seed: int, layout: Layout) -> None:
    prior, params = PRIORS[name]().bind(layout), weights(layout, seed)
    mean = prior.mean * torch.ones(layout.size, dtype=torch.float64)
    reference = distributions.Normal(mean, prior.operator().dense().rsqrt())
    close(prior.log_prob(params), reference.log_prob(layout.flatten(params)).sum())
    close(prior.mean_vector(), mean)


@pytest.mark.parametrize("name", PRIORS)
def test_scatter_sums_squared_distances_by_group(name: str, layout: Layout) -> None:
    """(λ * scatter).sum() is the quadratic form of the precision, and each group's part is its own."""
    prior, theta = PRIORS[name]().bind(layout), layout.flatten(weights(layout, 0))
    away = theta - prior.mean
    scatter = prior.scatter(theta)
    close((prior.precision.reshape(-1) * scatter).sum(), (away * linalg.mv(prior.operator(), away)).sum())
    labels = prior.operator().dense()  # distinct values label the groups here
    expected = torch.stack([away[labels == value].square().sum() for value in prior.precision.reshape(-1)])
    close(scatter, expected)


def test_a_mean_for_each_weight(layout: Layout) -> None:
    mean, params = weights(layout, 1), weights(layout, 0)
    prior = Gaussian(2.0, mean=dict(reversed(mean.items()))).bind(layout)
    close(prior.mean_vector(), layout.flatten(mean))
    reference = distributions.Normal(layout.flatten(mean), torch.tensor(2.0).double().rsqrt())
    close(prior.log_prob(params), reference.log_prob(layout.flatten(params)).sum())
    close(prior.scatter(layout.flatten(mean)), torch.zeros(1, dtype=torch.float64))


def test_a_mean_under_a_mask_is_for_the_selected_elements() -> None:
    net = nn.Linear(3, 2).double()
    layout = linearize(net, {"weight": torch.tensor([[True, False, True], [False, False, True]])}).layout
    prior = Gaussian(1.0, mean={"weight": torch.tensor([1.0, 2.0, 3.0]).double()}).bind(layout)
    assert prior.mean_vector().tolist() == [1.0, 2.0, 3.0]
    with pytest.raises(InvalidValue, match="weight"):
        Gaussian(1.0, mean={"weight": torch.zeros(2, 3)}).bind(layout)


@pytest.mark.parametrize("per", ["all", "layer", "unit", "weight"])
def test_log_prob_is_differentiable_in_the_precision(per: str, layout: Layout) -> None:
    """∂ log p/∂λ_g = ½ (P_g/λ_g − scatter_g)."""
    prior = Gaussian(1.5, per=per).bind(layout)
    moving = prior.precision.clone().requires_grad_()
    moved = prior.replace(precision=moving)
    params = weights(layout, 0)
    found = torch.autograd.grad(moved.log_prob(params), moving)[0].reshape(-1)
    counts = prior.operator().counts()
    close(found, 0.5 * (counts / 1.5 - prior.scatter(layout.flatten(params))))


def test_float32_weights_are_measured_in_float64(layout: Layout) -> None:
    prior, params = Gaussian(0.1).bind(layout), weights(layout, 0)
    single = {n: t.float() for n, t in params.items()}
    assert prior.log_prob(single).dtype == torch.float64
    close(prior.log_prob(single), prior.log_prob({n: t.double() for n, t in single.items()}))


# -- hyperparameters ---------------------------------------------------------------------------------------------------


def test_hyperparameters_are_float64_and_replaced_in_a_new_object(layout: Layout) -> None:
    assert float(Gaussian(0.1).precision) == 0.1  # not float32's
    old = Gaussian(torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=torch.float32), per="layer").bind(layout)
    assert old.precision.dtype == torch.float64
    new = old.replace(precision=2 * old.precision)
    assert list(new.hyperparameters) == ["precision"]
    assert new.named() == {k: 2 * v for k, v in old.named().items()}
    assert old.precision.tolist() == [0.5, 1.0, 2.0, 4.0]


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, torch.tensor([1.0, -2.0]), {"*": 0.0}])
def test_a_precision_that_is_not_positive_is_refused(value: Any) -> None:
    with pytest.raises(InvalidValue, match="positive and finite"):
        Gaussian(value)


def test_many_bad_precisions_are_not_all_printed() -> None:
    with pytest.raises(InvalidValue, match=r"1000 values, least -1\.0"):
        Gaussian(torch.full((1000,), -1.0), per="weight")


def test_a_granularity_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidValue, match=r"'unit'.*got 'channel'"):
        Gaussian(1.0, per="channel")
    with pytest.raises(InvalidValue, match="empty"):
        Gaussian({})


def test_a_number_of_precisions_that_does_not_fit_is_refused(layout: Layout) -> None:
    for value, per in [
        (torch.ones(3), "layer"),
        (torch.ones(2), "all"),
        (torch.ones(5), "weight"),
        (torch.ones(1), "unit"),
    ]:
        with pytest.raises(InvalidValue, match="prior precisions for"):
            Gaussian(value, per=per).bind(layout)


def test_every_parameter_matches_exactly_one_glob(layout: Layout) -> None:
    cases: list[tuple[dict[str, float], str]] = [
        ({"fc.*": 1.0, "conv.*": 1.0, "body*": 1.0, "shift": 1.0}, "gain must match exactly one"),
        ({"[!g]*": 1.0, "gai": 1.0}, "gain must match exactly one prior pattern, matches none"),
        ({"*": 1.0, "fc.*": 2.0}, r"fc\.weight must match exactly one prior pattern, matches \['\*', 'fc\.\*'\]"),
        ({"*": 1.0, "head.*": 2.0}, r"\['head\.\*'\] match no selected parameter"),
    ]
    for patterns, text in cases:
        with pytest.raises(InvalidValue, match=text):
            Gaussian(patterns).bind(layout)


def test_globs_see_selected_parameters_only() -> None:
    layout = linearize(Net().double(), ["fc.*"]).layout
    assert Gaussian({"fc.weight": 1.0, "fc.bias": 2.0}).bind(layout).named() == {"fc.weight": 1.0, "fc.bias": 2.0}
    with pytest.raises(InvalidValue, match="no selected parameter"):
        Gaussian({"fc.*": 1.0, "conv.*": 2.0}).bind(layout)


def test_a_mean_that_does_not_fit_is_refused(layout: Layout) -> None:
    mean = weights(layout, 0)
    cases: list[tuple[Any, str]] = [
        ({k: v for k, v in mean.items() if k != "gain"}, "expected tensors for"),
        ({**mean, "fc.weight": mean["fc.weight"].T}, r"fc\.weight.*\(3, 2\)"),
        ({**mean, "fc.bias": torch.zeros(3)}, r"fc\.bias.*\(3,\)"),
        ({**mean, "fc.bias": torch.tensor([0.0, math.nan])}, "NaN or infinite"),
        (math.nan, "NaN or infinite"),
        (torch.zeros(26), r"\(26,\)"),
    ]
    for wrong, text in cases:
        with pytest.raises(InvalidValue, match=text):
            Gaussian(1.0, mean=wrong).bind(layout)


def test_a_loose_prior_says_that_it_is_not_bound(layout: Layout) -> None:
    prior = Gaussian(1.0, per="layer")
    for use in (prior.operator, prior.named, prior.mean_vector, lambda: prior.log_prob({})):
        with pytest.raises(InvalidValue, match="not bound"):
            use()


def test_a_network_of_one_layer_has_one_precision_a_layer() -> None:
    """Its precision is one value, expanded."""
    torch.manual_seed(0)
    net, x, y = nn.Linear(4, 3).double(), torch.randn(9, 4).double(), torch.randint(3, (9,))
    layerwise = lw.laplace(net, (x, y), "categorical", prior="layerwise")
    assert layerwise.prior.precision.shape == (1,)
    close(layerwise.log_evidence(center="map"), lw.laplace(net, (x, y), "categorical").log_evidence(center="map"))
    assert tree.fingerprints({"": torch.ones(()).expand(1)}) == tree.fingerprints({"": torch.ones(1)})


@pytest.mark.parametrize("structure", ["kron", "diag", "block", "ekfac"])
def test_a_state_tells_priors_of_other_groups_and_means_apart(structure: str) -> None:
    """What a state keeps of one prior's groups must not serve another's."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    data = torch.randn(15, 3, dtype=torch.float64), torch.randint(2, (15,))
    state = lw.laplace(model, data, "categorical", structure=structure).state
    likelihood = lw.likelihoods.Categorical()
    mean = {n: torch.full_like(p, 0.3).detach() for n, p in model.named_parameters()}
    priors = [
        lw.priors.Gaussian(torch.tensor([0.5, 3.0]), per="layer"),
        lw.priors.Gaussian({"0.*": 3.0, "2.*": 0.5}),
        lw.priors.Gaussian(torch.tensor([0.5, 3.0]), per="layer", mean=mean),
        lw.priors.Gaussian(torch.tensor([0.5, 1, 2, 3, 4, 5]), per="unit"),
        lw.priors.Gaussian(2.0),
    ]
    bound = [prior.bind(state.layout) for prior in priors if structure != "ekfac" or prior.per != "unit"]
    found = [float(lw.evidence.log_evidence(state, prior, likelihood)) for prior in [*bound, *bound]]
    alone = []
    for prior in bound:
        fresh = replace(state, memo=lw.curvature.Memo())
        alone.append(float(lw.evidence.log_evidence(fresh, prior, likelihood)))
    assert found == pytest.approx([*alone, *alone], rel=1e-12)
    assert len(set(alone)) == len(alone)
