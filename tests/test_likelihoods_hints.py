"""What likelihoods say of targets: of those they refuse, of odd ones, and which constant outputs fit them best."""

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.errors import InvalidValue
from lapwing.likelihoods import (
    Bernoulli,
    BradleyTerry,
    Categorical,
    Gaussian,
    LabelSmoothing,
    Likelihood,
    Ordinal,
    Poisson,
    SoftLabels,
    StudentT,
    Weighted,
)


def drawn(likelihood: Likelihood, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if isinstance(likelihood, BradleyTerry):
        return torch.arange(40) % 2
    if isinstance(likelihood, SoftLabels):
        return torch.rand(40, 3, generator=generator, dtype=torch.float64).softmax(-1)
    if isinstance(likelihood, Gaussian):
        return 2 + torch.randn(40, 3, generator=generator, dtype=torch.float64)
    if isinstance(likelihood, Bernoulli):
        return (torch.rand(40, 3, generator=generator) < torch.tensor([0.2, 0.5, 0.7])).double()
    return torch.randint(3, (40,), generator=generator)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("likelihood", [Categorical(), SoftLabels(), Bernoulli(), Gaussian(0.7), BradleyTerry()])
def test_no_constant_outputs_fit_better(likelihood, seed):
    y = drawn(likelihood, seed)
    f = likelihood.constant(y)
    leaf = f.clone().requires_grad_()
    likelihood.log_prob(leaf.expand(len(y), -1), y).sum().backward()
    torch.testing.assert_close(leaf.grad, torch.zeros_like(f), rtol=0, atol=1e-9)


@pytest.mark.parametrize("likelihood", [LabelSmoothing(), Poisson(), StudentT(), Weighted(Gaussian())])
def test_a_likelihood_that_does_not_know_its_best_constant_says_so(likelihood):
    assert likelihood.constant(torch.tensor([0, 1])) is None


def test_log_probabilities_of_discrete_targets_are_never_positive():
    found = {type(one).__name__: one.discrete for one in (Categorical(), SoftLabels(), Bernoulli(), Poisson())}
    found |= {"Ordinal": Ordinal((-1.0, 1.0)).discrete, "Weighted": Weighted(Categorical()).discrete}
    assert all(found.values())
    assert not any(one.discrete for one in (Gaussian(), StudentT(), Weighted(Gaussian())))


@pytest.mark.parametrize("likelihood", [Poisson(), Bernoulli(), Ordinal((-1.0, 1.0)), Categorical()])
def test_data_that_were_not_in_the_fit_of_a_discrete_likelihood_are_seen_by_their_fit(likelihood):
    """Curvatures agree; the log-likelihood left over would be positive."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1 if isinstance(likelihood, Ordinal) else 2).double()
    x = torch.randn(20, 4, dtype=torch.float64)
    with torch.no_grad():
        mean = likelihood.mean(model(x))
    y = mean.argmax(-1) if likelihood.event == 0 else mean.round()
    wrong = y + 9 if isinstance(likelihood, Poisson) else 1 - y if not isinstance(likelihood, Ordinal) else 2 - y
    la = lw.laplace(model, (x, y), likelihood, structure="diag", factor="exact")
    assert la.without((x[:18], y[:18])).state.n == 2
    with pytest.raises(InvalidValue, match="statistic 'log_lik'"):
        la.without((x[:18], wrong[:18]))


def test_labels_in_memory_are_checked_to_the_last_whatever_the_likelihood():
    x, y = torch.randn(3_000, 4), torch.zeros(3_000, 1)
    y[1_234] = -1.0  # not among the examples that are run
    found = lw.doctor(nn.Linear(4, 1), (x, y), "poisson")
    assert [f.message for f in found.by("error") if f.topic == "targets"] == [
        "poisson targets must be counts, the numbers 0, 1, 2, ... (integer or float)"
    ]


def test_targets_that_a_collate_function_makes_are_not_held_to_what_they_were_before():
    x, y = torch.randn(200, 4), torch.arange(200).double() % 3

    def collate(items: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        return torch.stack([a for a, _ in items]), torch.stack([b for _, b in items]).long()

    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 32, collate_fn=collate)
    assert lw.doctor(nn.Linear(4, 3), loader, "categorical").ok


def test_preferences_may_all_name_the_first_item():
    assert not BradleyTerry().target_note(torch.zeros(200, dtype=torch.long), 2)
    assert "have the label 0" in Categorical().target_note(torch.zeros(200, dtype=torch.long), 2)
