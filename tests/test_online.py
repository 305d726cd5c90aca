"""Evidence during training: the loss is the log joint density, updates climb the evidence at the weights, the slope in
a network's own hyperparameters is that of the whole evidence, and nothing of the user's is moved."""

from __future__ import annotations

import io
import math
import sys
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw
from helpers import backward_rows, close
from lapwing.errors import InvalidValue, LapwingWarning, NotConverged, Unsupported
from lapwing.tune import surrogate


def trained(online: lw.OnlineEvidence, model: nn.Module, data: tuple[Tensor, Tensor], epochs: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(epochs):
        optimizer.zero_grad()
        online.loss(model(data[0]), data[1]).backward()
        optimizer.step()
        online.step()


def dense_evidence(rows: Tensor, hessian: Tensor, log_lik: Tensor, theta: Tensor, precision: Tensor) -> Tensor:
    """log p(D|θ) − ½θᵀAθ − ½(log|G + A| − log|A|), G = Σ JᵀΛJ from rows (n, c, p) and Λ (n, c, c)."""
    G = torch.einsum("ncp,ncd,ndq->pq", rows, hessian, rows)
    ratio = torch.logdet(G + precision.diag()) - precision.log().sum()
    return log_lik - 0.5 * (precision * theta.square()).sum() - 0.5 * ratio


# -- the loss ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prior", ["layerwise", 0.7, lw.priors.Gaussian(2.0, per="unit")])
def test_n_times_the_loss_is_the_negative_log_joint(
    mlp: nn.Module, regression: tuple[Tensor, Tensor], prior: object
) -> None:
    """Up to the constants of the prior, over the whole data as one batch."""
    x, y = regression
    likelihood = lw.likelihoods.Gaussian(0.3)
    online = lw.OnlineEvidence(mlp, regression, likelihood, prior=prior, burn_in=0)
    bound = online.prior
    flat = torch.cat([p.detach().reshape(-1) for p in mlp.parameters()])
    log_lik = torch.distributions.Normal(mlp(x), 0.3).log_prob(y).sum()
    expected = -log_lik + 0.5 * (bound.operator().dense() * flat.square()).sum()
    close(11 * online.loss(mlp(x), y), expected)


def test_batches_of_equal_size_average_to_the_loss_of_all(mlp: nn.Module) -> None:
    x, y = torch.randn(12, 5).double(), torch.randint(3, (12,))
    online = lw.OnlineEvidence(mlp, (x, y), "categorical")
    parts = [online.loss(mlp(x[i : i + 4]), y[i : i + 4]) for i in (0, 4, 8)]
    close(torch.stack(parts).mean(), online.loss(mlp(x), y))


def test_the_penalty_is_the_prior_s_at_any_granularity_and_mean(mlp: nn.Module, regression: tuple) -> None:
    precision = torch.rand(39).double() + 0.5
    mean = {n: torch.randn_like(p) for n, p in mlp.named_parameters()}
    prior = lw.priors.Gaussian(precision, per="weight", mean=mean)
    online = lw.OnlineEvidence(mlp, regression, "gaussian", structure="diag", prior=prior)
    gap = torch.cat([(p - mean[n]).reshape(-1) for n, p in mlp.named_parameters()])
    close(online.penalty(), 0.5 * (precision * gap.square()).sum() / 11)
    (slope,) = torch.autograd.grad(online.penalty(), [mlp[0].weight])
    close(slope.reshape(-1), (precision * gap)[:20] / 11)


@pytest.mark.parametrize("shared", [True, False])
def test_the_penalty_can_be_differentiated_twice(mlp: nn.Module, regression: tuple, shared: bool) -> None:
    """Its Hessian is A/N, with a mean and inside another function."""
    precision = 0.7 if shared else torch.rand(39).double() + 0.5
    mean = {n: torch.randn_like(p) for n, p in mlp.named_parameters()}
    prior = lw.priors.Gaussian(precision, per="all" if shared else "weight", mean=mean)
    online = lw.OnlineEvidence(mlp, regression, "gaussian", structure="diag", prior=prior)
    weights = list(mlp.parameters())
    slopes = torch.autograd.grad(3 * online.penalty() ** 2, weights, create_graph=True)
    v = torch.randn(39).double()
    along = (torch.cat([s.reshape(-1) for s in slopes]) * v).sum()
    found = torch.cat([g.reshape(-1) for g in torch.autograd.grad(along, weights)])
    a = online.prior.operator().dense() / 11
    gap = torch.cat([(p - mean[n]).detach().reshape(-1) for n, p in mlp.named_parameters()])
    value = 0.5 * (a * gap.square()).sum()
    close(found, 6 * (value * a * v + a * gap * (a * gap * v).sum()))


# -- updates -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "per", [pytest.param("all", marks=pytest.mark.full), "layer", pytest.param("unit", marks=pytest.mark.full)]
)
def test_an_update_climbs_to_a_stationary_point_of_the_evidence_at_the_weights(per: str) -> None:
    torch.manual_seed(3)
    mlp = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x = torch.linspace(-2, 2, 40).double()[:, None].expand(40, 2) * torch.tensor([1.0, -0.5]).double()
    y = torch.sin(2 * x[:, :1]) + 0.1 * torch.randn(40, 1).double()
    online = lw.OnlineEvidence(
        mlp,
        (x, y),
        "gaussian",
        structure="full",
        prior=lw.priors.Gaussian(1.0, per=per),
        burn_in=200,
        every=1,
        steps=1500,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LapwingWarning)
        trained(online, mlp, (x, y), 200)
    record = online.history[-1]
    la = online.laplace("current")
    precision = online.prior.precision.clone().log().requires_grad_()
    noise = online.likelihood.noise.clone().log().requires_grad_()
    value = la.log_evidence(
        prior=online.prior.replace(precision=precision.exp()), likelihood=lw.likelihoods.Gaussian(noise.exp())
    )
    slopes = torch.cat([g.reshape(-1) for g in torch.autograd.grad(value, [precision, noise])])
    close(value.detach(), torch.tensor(record.log_evidence).double(), 1e-6)
    box = lw.tune.bounds.box(la.state, online.prior, online.likelihood, ())
    inside = (precision.detach() - box.low["precision"] > 1e-3) & (box.high["precision"] - precision.detach() > 1e-3)
    assert slopes[-1].abs() < 1e-3
    assert slopes[:-1][inside.reshape(-1)].abs().max() < 1e-3
    assert int((~inside).sum()) == record.at_bound


def test_the_recorded_evidence_is_dense_linear_algebra_s(
    mlp: nn.Module, classification: tuple, jacobian: Callable[..., Tensor]
) -> None:
    x, y = classification
    online = lw.OnlineEvidence(mlp, classification, "categorical", structure="full", burn_in=1, every=1, steps=7)
    record = online.step()
    p = torch.softmax(mlp(x).detach(), -1)
    rows = jacobian(mlp, lambda net: net(x))
    theta = torch.cat([w.detach().reshape(-1) for w in mlp.parameters()])
    log_lik = torch.log(p[torch.arange(11), y]).sum()
    hessian = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    lam = torch.cat([online.prior.precision[0].expand(24), online.prior.precision[1].expand(15)])
    assert record is not None
    expected = dense_evidence(rows, hessian, log_lik, theta, lam)
    assert math.isclose(record.log_evidence, float(expected), rel_tol=1e-9)
    assert math.isclose(record.log_likelihood, float(log_lik), rel_tol=1e-9)
    G = torch.einsum("ncp,ncd,ndq->pq", rows, hessian, rows)
    gamma = torch.trace(torch.linalg.solve(G + lam.diag(), G))
    assert math.isclose(record.effective_dimension, float(gamma), rel_tol=1e-8)


@pytest.mark.parametrize(
    ("structure", "per"),
    [("full", "layer"), ("block", "layer"), ("kron", "layer"), ("diag", "layer"), ("diag", "weight")],
)
def test_the_evidence_that_is_climbed_is_the_evidence(
    mlp: nn.Module, regression: tuple, structure: str, per: str
) -> None:
    """What is made once for all steps gives the same value and slopes, for one noise and for one an output."""
    prior = lw.priors.Gaussian(1.0, per=per)
    for noise in (0.4, torch.tensor([0.4, 0.9, 1.3])):
        la = lw.laplace(mlp, regression, lw.likelihoods.Gaussian(noise), structure=structure, prior=prior)
        climbed = lw.training.climb.fixed_curvature(la.state, la.prior, la.likelihood)
        lam = torch.linspace(0.3, 2.2, la.prior.precision.numel(), dtype=torch.float64, requires_grad=True)
        sigma = (1.7 * torch.as_tensor(noise, dtype=torch.float64)).requires_grad_()
        now = la.prior.replace(precision=lam), lw.likelihoods.Gaussian(sigma)
        values = climbed(*now), lw.evidence.log_evidence(la.state, *now)
        slopes = [torch.autograd.grad(value, [lam, sigma]) for value in values]
        close(values[0], values[1], 1e-12)
        for a, b in zip(*slopes, strict=True):
            close(a, b, 1e-10)
        operator = la.posterior.precision
        assert lw.operators.linalg.is_diagonal(operator) == (structure == "diag")
        assert lw.operators.linalg.to_dense(operator).fill_diagonal_(0).any() != (structure == "diag")


def test_epochs_of_updates(mlp: nn.Module, classification: tuple) -> None:
    for burn_in, every, expected in [(3, 2, [3, 5, 7]), (0, 3, [3, 6]), (2, 5, [2, 7])]:
        online = lw.OnlineEvidence(mlp, classification, "categorical", burn_in=burn_in, every=every, steps=1)
        seen = [online.step() for _ in range(8)]
        assert [r.epoch for r in seen if r is not None] == expected == [r.epoch for r in online.history]


@pytest.mark.parametrize(
    ("structure", "factor", "prior"),
    [
        ("kron", "exact", "layerwise"),
        ("kron", "monte_carlo", lw.priors.Gaussian(1.0, per="unit")),
        ("diag", "exact", lw.priors.Gaussian(1.0, per="weight")),
        ("diag", "monte_carlo", lw.priors.Gaussian(1.0, per="weight")),
    ],
)
def test_an_update_never_lowers_the_evidence(structure: str, factor: str, prior: object, classification: tuple) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        mlp = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        online = lw.OnlineEvidence(
            mlp, classification, "categorical", structure=structure, factor=factor, prior=prior, burn_in=1, every=1
        )
        before = online.laplace("current").log_evidence()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LapwingWarning)
            record = online.step()
        assert record is not None
        assert record.log_evidence > float(before)


def test_thousands_of_precisions_stay_cheap_and_are_summarized() -> None:
    net = nn.Sequential(nn.Linear(20, 200), nn.ReLU(), nn.Linear(200, 4))
    x, y = torch.randn(64, 20), torch.randint(4, (64,))
    online = lw.OnlineEvidence(
        net, (x, y), "categorical", structure="diag", prior=lw.priors.Gaussian(1.0, per="weight"), burn_in=1, every=1
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LapwingWarning)
        record = online.step()
    assert record is not None
    assert online.prior.precision.numel() == 5004
    assert set(record.hyperparameters) == {"precision (least)", "precision (median)", "precision (most)"}
    assert online.prior.precision.unique().numel() > 1000


def test_noise_is_learnt_as_the_data_have_it() -> None:
    torch.manual_seed(1)
    x = torch.linspace(-3, 3, 300)[:, None].double()
    y = torch.sin(x) + 0.2 * torch.randn_like(x)
    net = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 1)).double()
    online = lw.OnlineEvidence(net, (x, y), "gaussian", burn_in=100, every=50)
    trained(online, net, (x, y), 400)
    assert abs(float(online.likelihood.noise) / 0.2 - 1) < 0.25  # 5 standard errors are 0.2
    held = lw.OnlineEvidence(net, (x, y), lw.likelihoods.Gaussian(0.5), burn_in=1, every=1, fixed=("noise",))
    held.step()
    assert float(held.likelihood.noise) == 0.5


# -- hyperparameters of the network -------------------------------------------------------------------------------


SIGMA = 0.4


class Gated(nn.Module):
    """3 -> 4 -> 2 with a gate on the hidden layer and a bend of its activation: 26 weights, 2 hyperparameters."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.bend = nn.Parameter(torch.tensor(0.8)), nn.Parameter(torch.tensor([1.2, 0.7, 1.0, 0.9]))
        self.fc1, self.fc2 = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.gate * torch.tanh(self.bend * self.fc1(x)))


def gated_evidence(model: Gated, x: Tensor, y: Tensor, likelihood: str, precision: Tensor, structure: str) -> Tensor:
    """The whole evidence by dense autograd, at the model's gate and bend."""
    weights = [p for n, p in model.named_parameters() if n.startswith("fc")]
    f = model(x)
    rows, f = backward_rows(f, weights), f.detach()
    if likelihood == "gaussian":
        hessian = torch.eye(2).double().expand(len(x), 2, 2) / SIGMA**2
        log_lik = torch.distributions.Normal(f, SIGMA).log_prob(y).sum()
    else:
        p = torch.softmax(f, -1)
        hessian = torch.diag_embed(p) - p[:, :, None] * p[:, None]
        log_lik = torch.log_softmax(f, -1)[torch.arange(len(x)), y].sum()
    theta = torch.cat([w.detach().reshape(-1) for w in weights])
    if structure == "full":
        return dense_evidence(rows, hessian, log_lik, theta, precision)
    diagonal = torch.einsum("ncp,ncd,ndp->p", rows, hessian, rows)
    return log_lik - 0.5 * (precision * theta.square()).sum() - 0.5 * torch.log1p(diagonal / precision).sum()


@pytest.mark.parametrize("structure", ["full", "diag"])
@pytest.mark.parametrize("likelihood", ["gaussian", "categorical"])
def test_the_slope_in_gates_is_that_of_the_whole_evidence(likelihood: str, structure: str) -> None:
    for seed in range(2):
        torch.manual_seed(seed)
        model = Gated().double()
        x = torch.randn(9, 3).double()
        y = torch.randn(9, 2).double() if likelihood == "gaussian" else torch.randint(2, (9,))
        given = lw.likelihoods.Gaussian(SIGMA) if likelihood == "gaussian" else likelihood
        batches = [(x[:4], y[:4]), (x[4:], y[4:])]
        la = lw.laplace(model, batches, given, structure=structure, subset=["fc*"], prior={"fc1*": 0.6, "fc2*": 1.7})
        found = lw.tune.slope(la.state, la.prior, la.likelihood, ["gate", "bend"], batches)
        precision = la.prior.operator().dense()

        def at(
            name: str,
            i: int,
            step: float,
            model: Gated = model,
            x: Tensor = x,
            y: Tensor = y,
            precision: Tensor = precision,
        ) -> Tensor:
            tensor = getattr(model, name).data.reshape(-1)
            tensor[i] += step
            value = gated_evidence(model, x, y, likelihood, precision, structure)
            tensor[i] -= step
            return value

        close(at("gate", 0, 0.0), la.log_evidence().detach())
        for name, i in [("gate", 0), ("bend", 0), ("bend", 3)]:
            h = 1e-4  # fourth-order differences: h⁴ and ε/h are both below 1e-8 of the value
            difference = (8 * (at(name, i, h) - at(name, i, -h)) - (at(name, i, 2 * h) - at(name, i, -2 * h))) / (
                12 * h
            )
            close(found[name].reshape(-1)[i], difference, 1e-7)


def test_draws_estimate_the_slope_without_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Gated().double()
    data = torch.randn(9, 3).double(), torch.randint(2, (9,))
    batches = lw.data.as_batches(data)
    for structure in ("full", "kron", "diag"):
        la = lw.laplace(model, data, "categorical", structure=structure, subset=["fc*"])
        exact = lw.tune.slope(la.state, la.prior, la.likelihood, ["gate"], batches)["gate"]
        with monkeypatch.context() as patch:
            patch.setattr(surrogate, "EXACT", 0)
            draws = torch.stack(
                [
                    lw.tune.slope(
                        la.state,
                        la.prior,
                        la.likelihood,
                        ["gate"],
                        batches,
                        probes=2,
                        generator=torch.Generator().manual_seed(s),
                    )["gate"]
                    for s in range(30)
                ]
            )
        assert draws.std() > 0
        assert abs(draws.mean() - exact) < 5 * draws.std() / 30**0.5


@pytest.mark.full
def test_gates_are_learnt_and_only_by_the_evidence() -> None:
    """A gate that multiplies pure noise features is worth closing: the evidence turns it down, its own part alone."""
    torch.manual_seed(0)

    class Inputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.fc = nn.Parameter(torch.ones(2)), nn.Linear(12, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x * self.gate.repeat_interleave(6))

    x = torch.randn(30, 12).double()
    y = x[:, :6] @ torch.randn(6, 1).double() + 0.1 * torch.randn(30, 1).double()
    model = Inputs().double()
    online = lw.OnlineEvidence(
        model,
        (x, y),
        lw.likelihoods.Gaussian(0.1),
        structure="full",
        prior=1.0,
        fixed=("noise",),
        burn_in=20,
        every=5,
        hyperparameters=["gate"],
        hyper_lr=0.05,
    )
    optimizer = torch.optim.Adam(model.fc.parameters(), lr=0.05)
    for _ in range(300):
        optimizer.zero_grad()
        online.loss(model(x), y).backward()
        optimizer.step()
        online.step()
    assert "gate" not in online.prior.layout.names
    gate = model.gate.detach().abs()
    assert gate[1] < 0.3 * gate[0]
    assert online.history[-1].log_evidence > online.history[0].log_evidence
    assert "gate[1]" in online.history[-1].hyperparameters


# -- checkpoints -------------------------------------------------------------------------------------------------


def test_the_best_checkpoint_comes_back_with_its_evidence(mlp: nn.Module, classification: tuple) -> None:
    online = lw.OnlineEvidence(mlp, classification, "categorical", burn_in=2, every=1)
    trained(online, mlp, classification, 6)
    best = online.best
    assert best is not None
    assert best.log_evidence == max(r.log_evidence for r in online.history)
    with torch.no_grad():
        for p in mlp.parameters():
            p.mul_(3)  # ruin it: the evidence of the checkpoint is that of its copy
    ruined = {k: v.clone() for k, v in mlp.state_dict().items()}
    prior = online.prior
    la = online.laplace()
    assert math.isclose(float(la.log_evidence()), best.log_evidence, rel_tol=1e-12)
    for k, v in mlp.state_dict().items():
        assert torch.equal(v, ruined[k])
    assert online.prior is prior
    online._set(prior.replace(precision=7 * prior.precision), online.likelihood)
    online.restore()
    assert torch.equal(online.objective.prior.precision, best.prior.precision)
    for k, v in mlp.state_dict().items():
        assert torch.equal(v, best.state_dict[k])
        assert v.data_ptr() != best.state_dict[k].data_ptr()
    assert math.isclose(float(online.laplace("current").log_evidence()), best.log_evidence, rel_tol=1e-12)
    assert torch.isfinite(la.predict(classification[0]).probs).all()


@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
def test_a_resumed_training_is_the_same_training(likelihood: str, request: pytest.FixtureRequest) -> None:
    x, y = request.getfixturevalue("regression" if likelihood == "gaussian" else "classification")

    def make() -> tuple[nn.Module, lw.OnlineEvidence]:
        torch.manual_seed(5)
        net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        return net, lw.OnlineEvidence(net, (x, y), likelihood, burn_in=1, every=2)

    def run(net: nn.Module, online: lw.OnlineEvidence, epochs: int) -> None:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.03)
        for _ in range(epochs):
            optimizer.zero_grad()
            online.loss(net(x), y).backward()
            optimizer.step()
            online.step()

    whole_net, whole = make()
    run(whole_net, whole, 8)
    net, first = make()
    run(net, first, 4)
    file = io.BytesIO()
    torch.save({"net": net.state_dict(), "online": first.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other_net, second = make()
    other_net.load_state_dict(saved["net"])
    second.load_state_dict(saved["online"])
    run(other_net, second, 4)
    assert second.history == whole.history
    assert torch.equal(second.prior.precision, whole.prior.precision)
    assert second.likelihood.hyperparameters == whole.likelihood.hyperparameters
    assert second.best is not None
    assert whole.best is not None
    assert second.best.log_evidence == whole.best.log_evidence
    assert all(torch.equal(a, b) for a, b in zip(whole_net.parameters(), other_net.parameters(), strict=True))


# -- what is the user's stays the user's ---------------------------------------------------------------------------


@pytest.mark.parametrize("factor", ["exact", "monte_carlo"])
def test_mode_gradients_hooks_and_random_state_are_left_alone(cnn: nn.Module, images: Tensor, factor: str) -> None:
    loader = DataLoader(TensorDataset(images, torch.tensor([0, 1, 1, 0])), 2, shuffle=True)
    online = lw.OnlineEvidence(cnn, loader, "categorical", factor=factor, burn_in=1, every=1)
    cnn.train()
    cnn[1].eval()
    calls: list[int] = []
    cnn[4].register_full_backward_hook(lambda *a: calls.append(1))
    online.loss(cnn(images), torch.tensor([0, 1, 1, 0])).backward()
    grads = [p.grad.clone() for p in cnn.parameters() if p.grad is not None]
    before, state = {k: v.clone() for k, v in cnn.state_dict().items()}, torch.get_rng_state()
    n = len(calls)
    online.step()
    online.laplace()
    assert len(calls) == n
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in cnn.modules()] == [True, True, False, True, True, True]
    assert all(torch.equal(v, before[k]) for k, v in cnn.state_dict().items())
    assert all(torch.equal(p.grad, g) for p, g in zip(cnn.parameters(), grads, strict=True) if p.grad is not None)
    assert all(p.requires_grad for p in cnn.parameters())


# -- history -----------------------------------------------------------------------------------------------------


def test_history_prints_and_plots_itself(
    mlp: nn.Module, classification: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    online = lw.OnlineEvidence(mlp, classification, "categorical", burn_in=1, every=1)
    assert "no update yet" in str(online.history)
    assert "no update yet" in repr(online)
    trained(online, mlp, classification, 3)
    text = str(online.history)
    assert len(text.splitlines()) == 5
    assert "precision[0]" in text
    assert text.count("*") == 2
    assert online.history.best is not None
    figure = online.history.plot()
    assert [len(axis.lines) for axis in figure.axes] == [2, 1, 2]
    assert list(figure.axes[0].lines[0].get_xdata()) == [1, 2, 3]
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(Unsupported, match=r"lapwing\[demo\]"):
        online.history.plot()


# -- bad input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"every": 0}, "every must be a whole number, at least 1"),
        ({"every": 2.5}, "every must be a whole number"),
        ({"burn_in": -1}, "burn_in must be a whole number, at least 0"),
        ({"steps": 0}, "steps must be"),
        ({"lr": 0.0}, "lr must be positive"),
        ({"hyper_lr": math.nan}, "hyper_lr must be positive"),
        ({"hyperparameters": ["gate"]}, "matches no parameter"),
        ({"hyperparameters": "0.weight"}, "list of globs"),
        ({"hyperparameters": ["*"]}, "no weight to be Bayesian"),
        ({"prior": "nonsense"}, "prior must be"),
        ({"structure": "krone"}, "structure must be"),
        ({"factor": "hessian"}, "needs structure='full'"),
        ({"fixed": ("sigma",)}, "names no hyperparameter"),
    ],
)
def test_wrong_arguments_are_named(mlp: nn.Module, classification: tuple, wrong: dict, message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        lw.OnlineEvidence(mlp, classification, "categorical", **wrong)


def test_a_g_prior_is_refused(mlp: nn.Module, classification: tuple) -> None:
    with pytest.raises(Unsupported, match="no penalty to train under"):
        lw.OnlineEvidence(mlp, classification, "categorical", prior="gprior")


def test_a_loader_of_other_data_is_an_error(mlp: nn.Module) -> None:
    with pytest.raises(InvalidValue, match="does not run on a batch"):
        lw.OnlineEvidence(mlp, (torch.randn(6, 7).double(), torch.randint(3, (6,))), "categorical")


def test_wrong_targets_are_an_error_in_the_loss(mlp: nn.Module, regression: tuple) -> None:
    online = lw.OnlineEvidence(mlp, regression, "gaussian")
    x, y = regression
    with pytest.raises(InvalidValue, match="do not match outputs"):
        online.loss(mlp(x), y[:, 0])  # would broadcast
    with pytest.raises(InvalidValue, match="batch of outputs"):
        online.loss(mlp(x)[:4], y)


def test_diverged_training_is_said(mlp: nn.Module, classification: tuple) -> None:
    online = lw.OnlineEvidence(mlp, classification, "categorical", burn_in=1, every=1)
    with pytest.raises(InvalidValue, match="no evidence was taken yet"):
        online.restore()
    online.step()
    history = online.history
    with torch.no_grad():
        mlp[0].weight[0, 0] = math.nan
    with pytest.raises(InvalidValue, match=r"0\.weight holds NaN"):
        online.step()
    online.loss(mlp(classification[0]), classification[1])
    with pytest.raises(InvalidValue, match="training diverged"):
        online.step()
    assert online.history == history
    online.restore()
    assert torch.isfinite(mlp[0].weight).all()


@pytest.mark.parametrize("where", ["history.log_evidence", "climb.fixed_curvature"])
def test_an_evidence_that_is_not_finite_changes_nothing(
    mlp: nn.Module, classification: tuple, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    online = lw.OnlineEvidence(mlp, classification, "categorical", burn_in=1, every=1)
    prior = online.prior
    nan = torch.tensor(math.nan, requires_grad=True)
    broken = (lambda *a: nan.detach()) if where.endswith("evidence") else (lambda *a: lambda *b: nan)
    monkeypatch.setattr(f"lapwing.training.{where}", broken)
    with pytest.raises(NotConverged, match="became nan"):
        online.step()
    assert online.prior is prior
    assert online.epoch == 0
    assert online.best is None
    assert not len(online.history)


def test_data_that_say_nothing_keep_precisions_inside_their_bounds(classification: tuple) -> None:
    net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    with torch.no_grad():
        for p in net[0].parameters():
            p.mul_(1e-9)  # ‖θ‖ → 0: λ runs away
    online = lw.OnlineEvidence(net, classification, "categorical", burn_in=1, every=1, lr=0.5)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(5):
            online.step()
    assert [w.category for w in said if "said once" in str(w.message)] == [LapwingWarning]
    assert online.history[-1].at_bound == 1
    bounds = lw.tune.bounds.box(online.laplace("current").state, online.prior, online.given, ())
    assert (online.prior.precision.log() <= bounds.high["precision"] + 1e-9).all()
    assert all(math.isfinite(r.log_evidence) for r in online.history)


def test_a_state_of_another_training_is_refused(mlp: nn.Module, classification: tuple, regression: tuple) -> None:
    online = lw.OnlineEvidence(mlp, classification, "categorical")
    with pytest.raises(InvalidValue, match="make it alike"):
        online.load_state_dict(lw.OnlineEvidence(mlp, regression, "gaussian").state_dict())
    with pytest.raises(InvalidValue, match="examples"):
        online.load_state_dict({**online.state_dict(), "n": 5})
    with pytest.raises(InvalidValue, match="holds"):
        online.load_state_dict({"epoch": 3})


def test_updates_leave_nothing_behind_in_the_prior() -> None:
    """What is kept of a prior's groups must not grow with each state that it meets."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    data = torch.randn(20, 3), torch.randint(2, (20,))
    online = lw.OnlineEvidence(model, data, "categorical", every=1, burn_in=1, steps=2)
    trained(online, model, data, 1)
    before = vars(online.prior.grouping).keys()
    trained(online, model, data, 4)
    assert vars(online.prior.grouping).keys() == before
