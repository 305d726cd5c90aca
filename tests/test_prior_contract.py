"""What every prior promises: its density, its local Gaussian, its draws, its groups, and what the search asks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, distributions, nn
from torch.testing import assert_close

import lapwing as lw
from lapwing.errors import InvalidValue, Unsupported
from lapwing.operators import linalg
from lapwing.priors import Gaussian, GPrior, Prior
from lapwing.tangent import linearize
from lapwing.tree import Layout


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-8) -> None:
    assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def layout_of(model: nn.Module) -> Layout:
    return linearize(model.double()).layout


def at(prior: Prior, layout: Layout) -> dict[str, Tensor]:
    """The group of each element of each parameter."""
    assert prior.index is not None
    return layout.unflatten(prior.index)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: int) -> None:
        super().__init__()
        self.body = kind(2, 3, **options)
        self.head = nn.Linear(3, 1)


# -- groups ----------------------------------------------------------------------------------------------------------


def test_one_group_an_input_column() -> None:
    layout = layout_of(nn.Sequential(nn.Conv1d(3, 2, 2), nn.Linear(4, 5)))
    prior = Gaussian(1.0, per="input").bind(layout)
    found = at(prior, layout)
    assert prior.names[:4] == ("0.weight[:, 0]", "0.weight[:, 1]", "0.weight[:, 2]", "0.bias")
    assert len(prior.names) == 3 + 1 + 4 + 1
    assert torch.equal(found["0.weight"], torch.arange(3)[None, :, None].expand(2, 3, 2))
    assert torch.equal(found["1.weight"], 4 + torch.arange(4).expand(5, 4))
    assert found["1.bias"].tolist() == [8] * 5


@pytest.mark.parametrize(("kind", "letters"), [(nn.LSTM, "ifgo"), (nn.GRU, "rzn")])
def test_one_group_a_gate(kind: type[nn.RNNBase], letters: str) -> None:
    """A gate's rows of all four parameters of a layer share; a layer's other parameters are as per='layer'."""
    layout = layout_of(Recurrent(kind, num_layers=2))
    prior = Gaussian(1.0, per="gate").bind(layout)
    found, k = at(prior, layout), len(letters)
    assert prior.names == (*(f"body_l{n}[{g}]" for n in (0, 1) for g in letters), "head")
    for name in ("weight_ih_l1", "weight_hh_l1", "bias_ih_l1", "bias_hh_l1"):
        blocks = found[f"body.{name}"].reshape(k, 3, -1)
        assert torch.equal(blocks, (k + torch.arange(k))[:, None, None].expand(blocks.shape))
    assert found["head.weight"].unique().tolist() == [2 * k]


def test_a_projected_lstm_has_its_gates_too() -> None:
    layout = layout_of(Recurrent(nn.LSTM, proj_size=2).requires_grad_(True))
    found = at(Gaussian(1.0, per="gate").bind(layout), layout)
    assert torch.equal(found["body.weight_hh_l0"][:, 0], torch.arange(4).repeat_interleave(3))
    assert found["body.weight_hr_l0"].unique().tolist() == [4]


def test_gates_need_a_recurrent_layer() -> None:
    with pytest.raises(InvalidValue, match="per='layer'"):
        Gaussian(1.0, per="gate").bind(layout_of(nn.Linear(2, 3)))


def checkered(name: str, shape: torch.Size) -> Tensor:
    return 7 * (torch.arange(shape.numel()).reshape(shape) % 2)


def test_a_callable_numbers_the_groups() -> None:
    layout = layout_of(nn.Linear(3, 2))
    prior = Gaussian(torch.tensor([1.0, 4.0]), per=checkered).bind(layout)
    assert prior.named() == {"0": 1.0, "7": 4.0}
    assert prior.operator().dense().tolist() == [1, 4, 1, 4, 1, 4, 1, 4]


@pytest.mark.parametrize("bad", [lambda n, s: torch.zeros(s), lambda n, s: torch.zeros(1, dtype=torch.int64), len])
def test_a_callable_must_give_integers_for_each_weight(bad: object) -> None:
    with pytest.raises((InvalidValue, TypeError)):
        Gaussian(1.0, per=bad).bind(layout_of(nn.Linear(3, 2)))


def test_groups_of_a_callable_are_saved(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2).double(), torch.randn(9, 3).double()
    la = lw.laplace(model, (x, torch.randn(9, 2).double()), "gaussian", prior=Gaussian(2.0, per=checkered)).tuned()
    la.save(tmp_path / "la.safetensors")
    back = lw.load(tmp_path / "la.safetensors", model)
    assert back.prior.named() == la.prior.named()
    close(back.predict(x).f_var, la.predict(x).f_var, 1e-14)


# -- the Gaussians ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per", ["all", "layer", "unit", "input", "weight"])
def test_the_density_of_a_gaussian_under_vmap(per: str) -> None:
    layout = layout_of(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 4)))
    prior = Gaussian(2.5, per=per, mean=0.3).bind(layout)
    v = torch.randn(5, layout.size, dtype=torch.float64)
    found = torch.func.vmap(prior.log_prob)(layout.unflatten(v))
    mean, deviation = torch.tensor([0.3, 2.5**-0.5], dtype=torch.float64)
    close(found, distributions.Normal(mean, deviation).log_prob(v).sum(-1), 1e-12)


def test_the_quadratic_of_a_gaussian_is_its_hessian_everywhere() -> None:
    layout = layout_of(nn.Linear(3, 2))
    prior = Gaussian(1.0, per="unit", mean=0.2).bind(layout).replace(precision=torch.tensor([2.0, 5.0]))
    v = torch.randn(layout.size, dtype=torch.float64)
    hessian = torch.autograd.functional.hessian(lambda w: prior.log_prob(layout.unflatten(w)), v)
    a, shifted = prior.quadratic(v)
    close(linalg.to_dense(a), -hessian)
    close(shifted, -hessian @ torch.full_like(v, 0.2))


def test_draws_have_the_moments_of_the_prior() -> None:
    model, n = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)), 20_000
    draws = Gaussian(torch.tensor([4.0, 0.25]), per="layer", mean=1.0).draw(model, n)
    assert draws.keys() == dict(model.named_parameters()).keys()
    for (name, w), deviation in zip(draws.items(), (0.5, 0.5, 2.0, 2.0), strict=True):
        assert w.dtype == torch.float32
        assert w.shape == (n, *model.get_parameter(name).shape)
        assert abs(float(w.mean()) - 1) < 5 * deviation / n**0.5
        assert abs(float(w.std()) / deviation - 1) < 5 / (2 * n) ** 0.5


def test_draws_answer_to_their_generator_alone() -> None:
    model, before = nn.Linear(3, 2), torch.random.get_rng_state()
    first, again = (Gaussian(2.0).draw(model, 3, torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(first["weight"], again["weight"])
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_gprior_draws_where_it_has_seen_a_curvature() -> None:
    torch.manual_seed(1)
    model = nn.Linear(3, 2)
    with pytest.raises(InvalidValue, match="not seen a curvature"):
        GPrior().draw(model)
    la = lw.laplace(model, (torch.randn(9, 3), torch.randn(9, 2)), "gaussian", prior="gprior")
    flat = la.state.layout.flatten(la.prior.draw(la.state.layout, 20_000), batch_dims=1)
    assert_close(flat.var(0) * la.prior.operator().dense(), torch.ones(8).double(), rtol=0.06, atol=0)


@pytest.mark.parametrize("bad", ["model", None, 3])
def test_draw_takes_a_network(bad: object) -> None:
    with pytest.raises(InvalidValue, match=r"torch.nn.Module or a layout"):
        Gaussian(1.0).draw(bad)


def test_a_prior_without_a_sampler_refuses_to_draw_by_name() -> None:
    class Flat(Prior):
        pass

    with pytest.raises(Unsupported, match="Flat has no draws"):
        Flat().draw(nn.Linear(2, 1))
