"""Ensembles: members as particles, training at once and one by one, SWAG's Gaussian, masks of dropout, weights."""

import contextlib
import itertools
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import lapwing as lw
from lapwing.errors import InvalidValue, LapwingWarning, NotConverged, Unsupported

G = torch.Generator


def network(hidden: int = 4, activation: type[nn.Module] = nn.Tanh, norm: bool = False) -> nn.Module:
    middle = [nn.BatchNorm1d(hidden)] if norm else []
    return nn.Sequential(nn.Linear(3, hidden), *middle, activation(), nn.Linear(hidden, 2)).double()


def networks(m: int, norm: bool = False) -> list[nn.Module]:
    torch.manual_seed(0)
    return [network(norm=norm) for _ in range(m)]


def points(n: int = 20) -> tuple[Tensor, Tensor]:
    g = G().manual_seed(1)
    x = torch.randn(n, 3, generator=g).double()
    return x, torch.stack([x.sum(1).sin(), x[:, 0]], 1) + 0.1 * torch.randn(n, 2, generator=g).double()


def mean_density(models: list[nn.Module], x: Tensor, y: Tensor, noise: float) -> Tensor:
    each = [torch.distributions.Normal(m.eval()(x), noise).log_prob(y).sum(-1) for m in models]
    return torch.logsumexp(torch.stack(each), 0).detach() - math.log(len(models))


# -- deep ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [False, True])
def test_an_ensemble_is_the_mean_of_its_members_densities(norm: bool) -> None:
    models, (x, y) = networks(3, norm), points()
    if norm:
        for k, m in enumerate(models):
            m.train()(x + k)  # statistics of their own
    fit = lw.ensembles.deep(models, lw.likelihoods.Gaussian(0.3))
    assert_close(fit.predict(x).log_prob(y), mean_density(models, x, y, 0.3))
    assert isinstance(fit, lw.Fitted) != norm


def test_identical_members_are_one_and_order_is_nothing() -> None:
    models, (x, y) = networks(3), points()
    one = lw.ensembles.deep(models[:1], "gaussian")
    same = lw.ensembles.deep([models[0]] * 4, "gaussian")
    assert_close(one(x).log_prob(y), same(x).log_prob(y))
    assert_close(same(x).f_var, torch.zeros(20, 2).double())
    a, b = lw.ensembles.deep(models, "gaussian"), lw.ensembles.deep(models[::-1], "gaussian")
    assert_close(a(x).log_prob(y), b(x).log_prob(y))
    assert_close(a(x).f_var, b(x).f_var)


def test_hidden_units_may_be_permuted_in_one_member() -> None:
    models, (x, y) = networks(2), points()
    before = lw.ensembles.deep(models, "gaussian")(x).log_prob(y)
    order, (first, _, last) = torch.tensor([2, 0, 3, 1]), models[1]
    with torch.no_grad():
        first.weight.copy_(first.weight[order])
        first.bias.copy_(first.bias[order])
        last.weight.copy_(last.weight[:, order])
    assert_close(lw.ensembles.deep(models, "gaussian")(x).log_prob(y), before)


def test_unlike_members_are_refused_by_name() -> None:
    for other, said in [(network(5), "0"), (network(activation=nn.ReLU), "1"), (network(norm=True), "1")]:
        with pytest.raises(InvalidValue, match=f"different architectures.*'{said}"):
            lw.ensembles.deep([network(), other], "gaussian")
    leaky = [nn.Sequential(nn.Linear(3, 2), nn.LeakyReLU(a)) for a in (0.1, 0.2)]
    with pytest.raises(InvalidValue, match=r"different architectures.*'1'"):
        lw.ensembles.deep(leaky, "gaussian")
    with pytest.raises(InvalidValue, match="at least one"):
        lw.ensembles.deep([], "gaussian")


@pytest.mark.parametrize("norm", [False, True])
def test_an_ensemble_is_drawn_saved_and_compared(norm: bool, tmp_path: Path) -> None:
    models, (x, y) = networks(3, norm), points()
    if norm:
        for k, m in enumerate(models):
            m.train()(x + k)
    fit = lw.ensembles.deep(models, "gaussian")
    fit.save(tmp_path / "e.safetensors")
    back = lw.load(tmp_path / "e.safetensors", models[0])
    assert_close(back(x).log_prob(y), fit(x).log_prob(y), rtol=0, atol=0)
    assert fit.draw(5)["0.weight"].shape == (5, 4, 3)
    table = lw.compare({"ensemble": fit, "one": lw.ensembles.deep(models[:1], "gaussian")}, (x, y))
    assert math.isclose(table["ensemble"].nll, -float(fit(x).log_prob(y).mean()))
    with pytest.raises(Unsupported, match="no evidence"):
        fit.log_evidence()


# -- train ---------------------------------------------------------------------------------------------------------


class Plain(nn.Sequential):
    """A network that vmap does not take, and that is another one's in all else."""

    def forward(self, x: Tensor) -> Tensor:
        float(self[0].weight.detach().sum())
        return super().forward(x)


@pytest.mark.parametrize("prior", [None, 3.0])
def test_training_at_once_is_training_one_by_one(prior: float | None) -> None:
    (x, y), state = points(), torch.get_rng_state()
    made = {}
    for kind in (nn.Sequential, Plain):
        make = lambda kind=kind: kind(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()  # noqa: E731
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 7, shuffle=True)
        options = {"members": 3, "steps": 40, "lr": 0.02, "prior": prior, "generator": G().manual_seed(4)}
        made[kind] = lw.ensembles.train(make, loader, lw.likelihoods.Gaussian(0.5), **options)
    together, alone = made[nn.Sequential], made[Plain]
    assert "at once" in together.made
    assert "one by one" in alone.made
    assert_close(together.posterior.weights, alone.posterior.weights, rtol=0, atol=1e-6)
    assert float((together.posterior.weights[0] - together.posterior.weights[1]).abs().max()) > 0.1
    assert (together.n, together.prior is None) == (20, prior is None)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("batch", [20, 7])
def test_training_is_adam_on_the_mean_loss(batch: int) -> None:
    """A plain loop over one network, batch by batch, with the prior's share of all examples in each step."""
    x, y = points()
    net = network()
    start = {n: p.detach().clone() for n, p in net.named_parameters()}

    def make() -> nn.Module:
        model = network()
        model.load_state_dict(start)
        return model

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch)
    fit = lw.ensembles.train(make, data, lw.likelihoods.Gaussian(0.5), members=2, steps=30, lr=0.02, prior=3.0)
    adam = torch.optim.Adam(net.parameters(), lr=0.02)
    for x_b, y_b in [*data] * (30 // len(data)):
        adam.zero_grad()
        loss = -torch.distributions.Normal(net(x_b), 0.5).log_prob(y_b).sum() / len(y_b)
        (loss + 1.5 * sum(p.square().sum() for p in net.parameters()) / 20).backward()
        adam.step()
    theta = torch.cat([p.detach().flatten() for p in net.parameters()])
    assert_close(fit.posterior.weights, theta.expand(2, -1), rtol=0, atol=1e-8)


def test_each_pass_has_an_order_of_its_own() -> None:
    x, seen = torch.arange(20.0).double().unsqueeze(1).expand(-1, 3), []

    class Watched(Plain):
        def forward(self, x: Tensor) -> Tensor:
            if self.training and len(x) == 5:
                seen.append(x[:, 0].tolist())
            return super().forward(x)

    make = lambda: Watched(nn.Linear(3, 2)).double()  # noqa: E731
    data = torch.utils.data.TensorDataset(x, torch.zeros(20, 2).double())
    loader = torch.utils.data.DataLoader(data, 5, shuffle=True)
    lw.ensembles.train(make, loader, "gaussian", members=1, steps=8)
    passes = [list(itertools.chain(*seen[-8:-4])), list(itertools.chain(*seen[-4:]))]
    assert sorted(passes[0]) == sorted(passes[1]) == x[:, 0].tolist()
    assert passes[0] != passes[1]


def test_batch_norm_is_trained_one_by_one_and_keeps_its_statistics() -> None:
    x, y = points()
    fit = lw.ensembles.train(lambda: network(norm=True), (x, y), "gaussian", members=2, steps=5)
    assert all("one by one" in one.made for one in fit.members)
    means = [one.tangent.constants["1.running_mean"] for one in fit.members]
    assert float((means[0] - means[1]).abs().max()) > 1e-3
    assert fit(x).mean.shape == (20, 2)


def test_dropout_in_training_leaves_the_random_state() -> None:
    make = lambda: nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2)).double()  # noqa: E731
    state, weights = torch.get_rng_state(), []
    for _ in range(2):
        fit = lw.ensembles.train(make, points(), "gaussian", members=2, steps=10)
        weights.append(fit.posterior.weights)
    assert_close(*weights, rtol=0, atol=0)
    assert "at once" in fit.made
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kind", [nn.Sequential, Plain])
@pytest.mark.parametrize("lr", [0.01, 1e200])
def test_training_gives_each_module_its_mode_back(kind: type[nn.Sequential], lr: float) -> None:
    """Also where it stops; networks come in eval mode but for one layer, and the other way about."""
    made: list[nn.Module] = []

    def make() -> nn.Module:
        net = kind(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)).double().train(len(made) % 2 == 0)
        net[1].train(not net.training)
        made.append(net)
        return net

    with contextlib.suppress(NotConverged):
        lw.ensembles.train(make, points(), "gaussian", members=2, steps=5, lr=lr)
    modes = [[m.training for m in net.modules()] for net in made]
    assert modes == [[True, True, False, True], [False, False, True, False]]


def test_training_refuses_what_it_cannot_do() -> None:
    data, shared = points(), network()
    with pytest.raises(InvalidValue, match="same parameters twice"):
        lw.ensembles.train(lambda: shared, data, "gaussian", members=2)
    widths = iter((4, 5))
    with pytest.raises(InvalidValue, match=r"members 0 and 1 are of different architectures.*lw\.mixture"):
        lw.ensembles.train(lambda: network(next(widths)), data, "gaussian", members=2)
    with pytest.raises(InvalidValue, match="must give a new"):
        lw.ensembles.train(lambda: 3, data, "gaussian")
    for wrong in ({"members": 0}, {"steps": 0}, {"lr": -1.0}):
        with pytest.raises(InvalidValue):
            lw.ensembles.train(network, data, "gaussian", **wrong)
    with pytest.raises(NotConverged, match="lr="):
        lw.ensembles.train(network, data, "gaussian", lr=1e200, steps=5)


# -- SWAG ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 3])
def test_swag_draws_have_its_moments(rank: int) -> None:
    (net,) = networks(1)
    source, seen, g = lw.subsets.Swag(net, rank), [], G().manual_seed(2)
    for _ in range(6):
        with torch.no_grad():
            for p in net.parameters():
                p.add_(0.1 * torch.randn(p.shape, generator=g).double())
        seen.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
        source.update()
    snapshots = torch.stack(seen)
    cov = torch.diag(snapshots.var(0, unbiased=False))
    if rank:
        away = torch.stack([snapshots[t] - snapshots[: t + 1].mean(0) for t in (3, 4, 5)])
        cov = cov / 2 + away.T @ away / 4
    weights = lw.ensembles.swag(source, "gaussian", samples=20_000).posterior.weights
    error = (cov.diagonal() / 20_000).sqrt()
    assert float(((weights.mean(0) - snapshots.mean(0)) / error).abs().max()) < 4.5
    spread = (cov.square() + torch.outer(cov.diagonal(), cov.diagonal())).div(20_000).sqrt()
    assert float(((weights.T.cov() - cov) / spread).abs().max()) < 5


def test_swag_renews_batch_norm() -> None:
    (net,), (x, y) = networks(1, norm=True), points()
    net.train()(x + 3)  # statistics that are not those of the data
    source = lw.subsets.Swag(net.eval(), 2)
    for _ in range(3):
        with torch.no_grad():
            net[0].weight.add_(0.1)
        source.update()
    with pytest.raises(InvalidValue, match="batch norm"):
        lw.ensembles.swag(source, "gaussian")
    before = {k: v.clone() for k, v in net.state_dict().items()}
    fit = lw.ensembles.swag(source, "gaussian", samples=3, data=(x, y))
    for one in fit.members:
        w = one.tangent.embed(one.tangent.layout.unflatten(one.posterior.weights[0]))
        hidden = x @ w["0.weight"].T + w["0.bias"]
        assert_close(one.tangent.constants["1.running_mean"], hidden.mean(0))
        assert_close(one.tangent.constants["1.running_var"], hidden.var(0))
        assert one.tangent.model[1].momentum == net[1].momentum
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert fit.n == 20
    assert fit(x).mean.shape == (20, 2)
    with pytest.raises(InvalidValue, match="at least 2 snapshots"):
        lw.ensembles.swag(lw.subsets.Swag(network()), "gaussian")


# -- dropout -------------------------------------------------------------------------------------------------------


def dropping(p: float = 0.3) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(p), nn.Linear(4, 2)).double().eval()


def test_dropout_is_an_average_over_masks() -> None:
    """Each draw is the network under one of the 2⁴ masks, one for all inputs, and masks come as often as p says."""
    net, (x, _) = dropping(), points()
    fit = lw.ensembles.dropout(net, "gaussian", samples=400)
    h = net[1](net[0](x))
    masks = torch.tensor(list(itertools.product([0.0, 1.0], repeat=4))).double()
    each = torch.stack([net[3](h * m / 0.7) for m in masks]).detach()  # (16, n, 2)
    values = fit.predict(x).outputs.values
    away = (values[:, None] - each).abs().amax((2, 3))  # (400, 16)
    which = away.argmin(1)
    assert float(away.amin(1).max()) < 1e-12
    assert_close(fit(x).f_mean, each[which].mean(0))
    expected = 0.7 ** masks.sum(1) * 0.3 ** (4 - masks.sum(1)) * 400
    seen = torch.bincount(which, minlength=16).double()
    assert float(((seen - expected).square() / expected).sum()) < 38  # χ² with 15 degrees, at 0.001


def test_layers_of_dropout_have_masks_of_their_own() -> None:
    """Two layers of one width keep a unit together no more often than chance: each with p, and independently."""
    net = nn.Sequential(nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.5)).double().eval()
    net.append(nn.Linear(40, 40, bias=False).double())
    with torch.no_grad():
        net[3].weight.copy_(torch.eye(40))
    f = lw.ensembles.dropout(net, "gaussian", samples=200)(torch.ones(1, 40).double()).outputs.values
    kept = (f != 0).double().mean()
    assert abs(float(kept) - 0.25) < 5 * (0.25 * 0.75 / 8000) ** 0.5


def test_all_but_dropout_runs_in_eval_mode() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 2)).double()
    x, _ = points()
    values = lw.ensembles.dropout(net.eval(), "gaussian")(x).outputs.values
    state = {k: v.clone() for k, v in net.train().state_dict().items()}
    assert_close(lw.ensembles.dropout(net, "gaussian")(x).outputs.values, values, rtol=0, atol=0)
    assert all(m.training for m in net.modules())
    assert all(torch.equal(v, state[k]) for k, v in net.state_dict().items())


def test_dropout_gives_equal_answers(tmp_path: Path) -> None:
    net, (x, y) = dropping(), points()
    fit = lw.ensembles.dropout(net, "gaussian")
    whole = fit(x).outputs.values
    assert_close(fit(x[3:5]).outputs.values, whole[:, 3:5])
    fit.save(tmp_path / "d.safetensors")
    assert_close(lw.load(tmp_path / "d.safetensors", net)(x).outputs.values, whole, rtol=0, atol=0)
    other = lw.ensembles.dropout(net, "gaussian", generator=G().manual_seed(1))
    assert float((other(x).outputs.values - whole).abs().max()) > 0.01
    assert not net.training
    assert not any(m._forward_hooks for m in net.modules())
    assert lw.compare({"dropout": fit}, (x, y)).best.nll is not None
    assert fit.predict(x[:3], joint=True).covariance.shape == (3, 2, 3, 2)


def test_dropout_of_channels_drops_whole_ones() -> None:
    net = nn.Sequential(nn.Dropout2d(0.5), nn.BatchNorm2d(6), nn.Flatten(), nn.Linear(24, 24)).double().eval()
    with torch.no_grad():
        net[3].weight.copy_(torch.eye(24))
        net[3].bias.zero_()
    f = lw.ensembles.dropout(net, "gaussian", samples=50)(torch.ones(2, 6, 2, 2).double()).outputs.values
    f = f.reshape(50, 2, 6, 4)
    assert_close(f, f[:, :1, :, :1].expand_as(f))  # one mask for all examples and places
    assert f[:, 0, :, 0].unique().numel() == 2


def test_dropout_refuses_what_has_none() -> None:
    for net, said in [(network(), "no dropout layer"), (dropping(0.0), "no dropout layer")]:
        with pytest.raises(InvalidValue, match=said):
            lw.ensembles.dropout(net, "gaussian")
    with pytest.raises(Unsupported, match="AlphaDropout"):
        lw.ensembles.dropout(nn.Sequential(nn.Linear(3, 2), nn.AlphaDropout()), "gaussian")
    with pytest.raises(Unsupported, match="masks"):
        lw.ensembles.dropout(dropping(), "gaussian").draw(2)


# -- weights of a mixture ------------------------------------------------------------------------------------------


def fits(noises: tuple[float, ...] = (0.4, 0.7)) -> list[lw.Laplace]:
    return [lw.laplace(m, points(), lw.likelihoods.Gaussian(s)) for m, s in zip(networks(2), noises, strict=True)]


def test_stacked_weights_are_the_best_of_a_grid() -> None:
    two, held = fits(), points(60)
    log_p = torch.stack([one(held[0]).log_prob(held[1]) for one in two], 1)
    for planted in (log_p, log_p[:, [1, 0]], torch.randn(50, 2, generator=G().manual_seed(0)).double()):
        w = lw.selection.stacked(planted)
        grid = torch.linspace(0, 1, 20_001).double()
        scores = torch.stack([torch.logsumexp(planted + torch.stack([a, 1 - a]).log(), 1).mean() for a in grid[::20]])
        best = torch.logsumexp(planted + w.log(), 1).mean()
        assert float(scores.max() - best) < 1e-6
        assert abs(float(grid[::20][scores.argmax()] - w[0])) < 3e-3
    both = lw.mixture(two, "stacked", held)
    assert_close(both.log_weight.exp(), lw.selection.stacked(log_p))
    three = torch.randn(40, 3, generator=G().manual_seed(1)).double()
    same = lw.selection.stacked(three[:, [0, 1, 2, 2]])
    assert_close(same[2], same[3])


def test_evidence_weights_are_the_softmax_of_evidences() -> None:
    two = fits()
    evidences = torch.stack([one.log_evidence() for one in two])
    assert_close(lw.mixture(two, "evidence").log_weight, (evidences - torch.logsumexp(evidences, 0)).detach())
    with pytest.raises(Unsupported, match="no evidence"):
        lw.mixture([lw.ensembles.deep(networks(2), lw.likelihoods.Gaussian(0.3))], "evidence")
    other = lw.laplace(network(), points(15), lw.likelihoods.Gaussian(0.4))
    with pytest.raises(InvalidValue, match="numbers of examples"):
        lw.mixture([two[0], other], "evidence")
    for weights, data in [("stacked", None), ("uniform", points()), ("loud", None)]:
        with pytest.raises(InvalidValue, match="stacked"):
            lw.mixture(two, weights, data)


def test_stacking_says_when_it_can_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidValue, match="probability 0"):
        lw.selection.stacked(torch.full((3, 2), -math.inf).double())
    monkeypatch.setattr("lapwing.selection.stacking.MOST", 20)
    with pytest.warns(LapwingWarning, match="stopped after 20 steps"):
        lw.selection.stacked(torch.tensor([[0.0, 1e-4]]).double())


# -- metrics -------------------------------------------------------------------------------------------------------


def test_agreement_and_total_variation_in_closed_cases() -> None:
    p = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3]], dtype=torch.float64)
    q = torch.tensor([[0.5, 0.4, 0.1], [0.1, 0.2, 0.7]], dtype=torch.float64)
    assert lw.metrics.agreement(p, p) == 1.0
    assert lw.metrics.total_variation(p, p) == 0.0
    assert lw.metrics.agreement(p, q) == 0.5
    assert math.isclose(lw.metrics.total_variation(p, q), (0.2 + 0.4) / 2)
    one = torch.eye(3).double()
    assert lw.metrics.total_variation(one, one[[1, 2, 0]]) == 1.0
    x = points()[0]
    fit = lw.ensembles.deep(networks(2), "categorical")
    plain = torch.stack([m(x).softmax(-1) for m in networks(2)]).mean(0)
    assert lw.metrics.total_variation(fit(x), plain) < 1e-12
    with pytest.raises(InvalidValue, match="same inputs"):
        lw.metrics.agreement(p, q[:1])
    with pytest.raises(Unsupported, match="no classes"):
        lw.metrics.agreement(lw.ensembles.deep(networks(2), "gaussian")(x), p)


@pytest.mark.full
def test_an_ensemble_is_worth_its_own_members() -> None:
    g = G().manual_seed(5)
    y = torch.randint(3, (200,), generator=g)
    logits = torch.nn.functional.one_hot(y, 3) + 1.5 * torch.randn(6, 200, 3, generator=g).double()
    members = logits.softmax(-1)
    worth = lw.metrics.ensemble_equivalent
    assert math.isclose(worth(members.mean(0), members, y), 6.0)
    assert worth(torch.full((200, 3), 1 / 3).double(), members, y) == 1.0
    assert worth(0.99 * torch.nn.functional.one_hot(y, 3) + 0.01 / 3, members, y) == math.inf
    runs = [members[[k, (k + 1) % 6, (k + 2) % 6]].mean(0) for k in range(6)]
    assert min(worth(p, members, y) for p in runs) <= 3 <= max(worth(p, members, y) for p in runs)
    # a temperature is fitted, so that an ensemble of sharper or softer probabilities is worth as much
    sharper = (3 * members.mean(0).log()).softmax(-1)
    assert abs(worth(sharper, members, y) - 6) < 1e-6
    with pytest.raises(InvalidValue, match="labels of shape"):
        worth(members[0], members[:, :100], y)
