"""Routes that are proved: what torch's batching and forward-mode rules give is used where it is plain autograd's, and
nowhere else. Rules that are wrong on purpose must not reach a figure; right ones must not be refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import helpers
import lapwing as lw
from helpers import normal
from lapwing.errors import LapwingWarning, Unsupported
from lapwing.operators import linalg
from lapwing.tangent import proof

SLOW = "ignore:this network"


close = partial(helpers.close, absolute=1e-9)


# -- PReLU, whose weight gradient torch batches wrongly ----------------------------------------------------------------


def prelu(outputs: int, slopes: int = 1) -> nn.Module:
    torch.manual_seed(outputs)
    return nn.Sequential(nn.Linear(2, 4), nn.PReLU(slopes), nn.Linear(4, outputs)).double()


@pytest.mark.parametrize("outputs", [1, 2, 3])
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_prelu_has_the_curvature_of_autograd(n: int, outputs: int, jacobian: Callable[..., Tensor]) -> None:
    net, x = prelu(outputs, slopes=4 if n > 3 else 1), normal(n, 2, seed=n)
    J = jacobian(net, lambda twin: twin(x))
    G, eye = torch.einsum("ncp,ncq->pq", J, J), torch.eye(J.shape[-1], dtype=torch.float64)
    for structure in ("full", "block", "diag"):
        data = (x, torch.zeros(n, outputs, dtype=torch.float64))
        la = lw.laplace(net, data, lw.likelihoods.Gaussian(1.0), structure=structure, prior=1.0)
        same = torch.block_diag(*[torch.ones(p.numel(), p.numel()) for p in net.parameters()]).double()
        for layer in (slice(0, 12), slice(len(eye) - 5 * outputs, None)):  # a weight and its bias together
            same[layer, layer] = 1
        want = {"full": G, "block": G * same, "diag": G.diagonal().diag()}[structure]
        close(linalg.to_dense(la.posterior.precision), want + eye)


@pytest.mark.parametrize("structure", ["dual", "kron", "ekfac", "lowrank", "matrix_free"])
@pytest.mark.parametrize("n", [2, 5])
def test_prelu_is_the_same_written_out(n: int, structure: str) -> None:
    class Written(nn.Module):
        def __init__(self, weight: Tensor) -> None:
            super().__init__()
            self.weight = nn.Parameter(weight.clone())

        def forward(self, x: Tensor) -> Tensor:
            return torch.where(x > 0, x, self.weight * x)

    net, x = prelu(2), normal(n, 2, seed=n)
    twin = copy.deepcopy(net)
    twin[1] = Written(net[1].weight.data)
    given: Any = {"dual": lw.curvature.Full(form="dual"), "matrix_free": lw.curvature.MatrixFree(samples=4, seed=0)}
    kind = given.get(structure, structure)
    found, want = (lw.laplace(each, (x, torch.arange(n) % 2), "categorical", structure=kind) for each in (net, twin))
    close(found.predict(x).covariance, want.predict(x).covariance)


def test_a_gradient_that_is_silent_on_the_first_batch_is_proved_nearby(jacobian: Callable[..., Tensor]) -> None:
    """A PReLU that sees nothing negative has no gradient, and a wrong rule would pass."""
    net = prelu(2)
    net[0].bias.data += 10
    tangent, loud, quiet = lw.linearize(net), normal(2, 2, seed=1) * 100, normal(2, 2)
    assert (net[0](quiet) > 0).all()
    assert (net[0](loud) < 0).any()
    for x in (quiet, loud):
        close(tangent.rows(x), jacobian(net, lambda twin, x=x: twin(x)))


def test_a_loaded_fit_proves_anew(tmp_path: Any) -> None:
    net, x = prelu(2), normal(2, 2)
    la = lw.laplace(net, (x, torch.arange(2)), "categorical", structure="diag")
    la.save(tmp_path / "fit")
    loaded = lw.load(tmp_path / "fit", prelu(2))
    assert loaded.tangent.facts.rows is None
    assert torch.equal(loaded.predict(x).covariance, la.predict(x).covariance)


# -- rules that are wrong on purpose -----------------------------------------------------------------------------------


class Times(torch.autograd.Function):
    """A product, right one at a time and wrong by a tenth under vmap."""

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return a * b

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        a, b = ctx.saved_tensors
        return g * b, g * a

    @staticmethod
    def vmap(info: Any, in_dims: Any, a: Tensor, b: Tensor) -> tuple[Tensor, int]:
        a, b = (t if d is None else t.movedim(d, 0) for t, d in zip((a, b), in_dims, strict=True))
        return 1.1 * a * b, 0


class Sine(torch.autograd.Function):
    """A sine whose derivative is made by `Times`, and whose forward mode is twice what it should be."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return Times.apply(g, x.cos())

    @staticmethod
    def jvp(ctx: Any, v: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 2 * v * x.cos()


class Waves(nn.Module):
    """2 -> 4 -> 3 outputs, with a gate that is no weight of the posterior."""

    def __init__(self, sine: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.sine, self.fc1, self.fc2 = sine, nn.Linear(2, 4), nn.Linear(4, 3)
        self.bare, self.gate = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.sine(self.gate * self.bare * self.fc1(x)))


def waves(sine: Callable[[Tensor], Tensor]) -> Waves:
    torch.manual_seed(0)
    return Waves(sine).double()


WEIGHTS = ["fc*", "bare"]


@pytest.mark.filterwarnings(SLOW)
@pytest.mark.parametrize("n", [3, 5])
def test_wrong_rules_reach_no_product(n: int) -> None:
    wrong, right = (lw.linearize(waves(sine), WEIGHTS) for sine in (Sine.apply, torch.sin))
    x, v, u, w = normal(n, 2), normal(3, right.layout.size), normal(3, n, 3), normal(n, 3, 3)
    close(wrong.pulled(x, w), right.pulled(x, w))
    close(wrong.vjps(x, u), right.vjps(x, u))
    close(wrong.jvps(x, v)[1], right.jvps(x, v)[1])
    along = right.layout.unflatten(v[0])
    close(wrong.jvp(x, along), right.jvp(x, along))
    for found, want in zip(*(t.through(x, v[0], lambda _, jv: jv) for t in (wrong, right)), strict=True):
        close(found, want)


@pytest.mark.filterwarnings(SLOW)
@pytest.mark.parametrize("structure", ["full", "kron", "block", "diag", "ekfac", "lowrank", "matrix_free"])
def test_wrong_rules_reach_no_fit(structure: str) -> None:
    x, y = normal(7, 2), torch.arange(7) % 3
    kind: Any = lw.curvature.MatrixFree(samples=4, seed=0) if structure == "matrix_free" else structure
    fits = [
        lw.laplace(waves(s), (x, y), "categorical", structure=kind, subset=WEIGHTS) for s in (Sine.apply, torch.sin)
    ]
    close(fits[0].predict(x).covariance, fits[1].predict(x).covariance)


@pytest.mark.filterwarnings(SLOW)
def test_wrong_rules_reach_no_hessian_and_no_slope() -> None:
    x, y = normal(7, 2), torch.arange(7) % 3
    options: Any = {"structure": "full", "subset": WEIGHTS, "prior": 50.0}
    fits = [lw.laplace(waves(s), (x, y), "categorical", factor="hessian", **options) for s in (Sine.apply, torch.sin)]
    close(*(linalg.to_dense(la.posterior.precision) for la in fits))
    fits = [lw.laplace(waves(s), (x, y), "categorical", **options) for s in (Sine.apply, torch.sin)]
    found, want = (lw.tune.slope(la.state, la.prior, la.likelihood, ["gate"], [(x, y)]) for la in fits)
    close(found["gate"], want["gate"])


class Distances(nn.Module):
    """Distances, whose derivative torch cannot differentiate, forwards or backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.last = nn.Linear(2, 6), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.stack([torch.pdist(one.reshape(3, 2)) for one in self.fc(x).unbind()]))


def test_what_cannot_be_differentiated_twice_is_pushed_by_rows(jacobian: Callable[..., Tensor]) -> None:
    net, x = Distances().double(), normal(4, 2)
    tangent = lw.linearize(net)
    v = normal(tangent.layout.size)
    with pytest.warns(LapwingWarning, match="neither forward mode nor two reverse passes"):
        pushed = tangent.jvp(x, tangent.layout.unflatten(v))
    close(pushed, jacobian(net, lambda twin: twin(x)) @ v)
    with pytest.raises(Unsupported, match="second derivatives"):
        lw.laplace(net, (x, torch.arange(4) % 2), "categorical", structure="full", factor="hessian")


# -- right rules are not refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.05, 1.0, 4.0])
def test_rounding_is_no_error(dtype: torch.dtype, scale: float) -> None:
    """Deep, with gradients that are 0 but for rounding: a bias before a normalization."""
    torch.manual_seed(0)
    body = [layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.LayerNorm(16), nn.Tanh())]
    net = nn.Sequential(nn.Linear(3, 16), *body, nn.Linear(16, 2)).to(dtype)
    for p in net.parameters():
        p.data.mul_(scale)
    tangent, x = lw.linearize(net), normal(9, 3).to(dtype)
    tangent.rows(x)
    tangent.vjps(x, normal(4, 9, 2).to(dtype))
    tangent.jvps(x, normal(4, tangent.layout.size).to(dtype))
    tangent.through(x, normal(tangent.layout.size).to(dtype), lambda _, jv: jv)
    assert tangent.facts.rows == "vmap"
    assert not tangent.facts.closed


def test_a_proof_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tangent, x, u = lw.linearize(prelu(2)), normal(3, 2), normal(3, 4, 2)
    tangent.pulled(x, u)
    monkeypatch.setattr(lw.tangent.TangentModel, "gradients", None)
    tangent.pulled(2 * x, u)
    with pytest.raises(TypeError):
        tangent.pulled(x[:2], u[:2])


@pytest.mark.parametrize("fails", [True, False])
def test_a_route_that_fails_or_is_wrong_is_tried_once(fails: bool) -> None:
    tangent, runs = lw.linearize(prelu(2)), []

    def run() -> int:
        runs.append(1)
        if fails:
            raise RuntimeError("no batching rule")
        return 1

    assert [proof.attempt(tangent, "own", (), run, lambda _: False) for _ in range(3)] == [None] * 3
    assert len(runs) == 1
    assert tangent.facts.closed == {"own"}
    assert proof.attempt(tangent, "another", (), lambda: 2, lambda _: True) == 2


def test_want_of_memory_closes_no_route() -> None:
    tangent = lw.linearize(prelu(2))

    def run() -> int:
        raise RuntimeError("can't allocate memory")

    with pytest.raises(RuntimeError, match="allocate"):
        proof.attempt(tangent, "own", (), run, lambda _: True)
    assert not tangent.facts.closed


def test_a_model_at_weights_nearby_knows_only_how_batches_are_cut() -> None:
    tangent = lw.linearize(prelu(2))
    tangent.rows(normal(3, 2))
    tangent.facts.closed.add("vjps")
    for at in proof.moved(tangent):
        assert at.facts.separable
        assert at.facts.rows is None
        assert not at.facts.closed | at.facts.proved
    assert tangent.facts.proved
