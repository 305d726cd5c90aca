"""The drop-in for laplace-torch equals laplace-torch 0.3: every subset, structure, likelihood and link that both have.

Where the two differ, and why (docs/guide/migrating.md says it to users):

- the gradient of a `kron` evidence in `sigma_noise` is here that of its value; theirs lacks the log-determinant;
- `gridsearch` with a metric (their default) is here by each grid point's own loss; theirs counts on through the grid;
- predictions of "gp" over all weights with several outputs are here those of the dual form; theirs swap the outputs of
  the test and the training input in the kernel between them, and can be negative;
- reward models that fold the items of a pair into the batch have half their `kron` blocks of weights, see below;
- `lowrank` needs a package that no registry has: it is held to dense eigenpairs in tests/test_compat_structures.py.
"""

from __future__ import annotations

import copy
from collections import UserDict
from typing import Any

import laplace as peer
import pytest
import torch
from laplace.curvature import AsdlGGN, CurvlinopsEF, CurvlinopsGGN, CurvlinopsHessian
from laplace.utils import subnetmask as their_masks
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lapwing.compat import laplace_torch as ours
from lapwing.compat.laplace_torch import curvature as backends
from lapwing.compat.laplace_torch.utils import subnetmask as our_masks

pytestmark = pytest.mark.filterwarnings("ignore")  # of the peer

SUBSETS, STRUCTURES = ("all", "last_layer"), ("full", "kron", "diag")
TERMS = (
    "log_likelihood",
    "scatter",
    "log_det_prior_precision",
    "log_det_posterior_precision",
    "log_det_ratio",
    "mean",
    "prior_precision_diag",
)
INDEX = torch.tensor([0, 3, 5, 17, 40, 41, 55])


def close(mine: Any, theirs: Any, rtol: float = 1e-8) -> None:
    """Equal to rtol relative to the largest entry."""
    if isinstance(theirs, tuple):
        for a, b in zip(mine, theirs, strict=True):
            close(a, b, rtol)
        return
    theirs = theirs.detach()
    assert mine.shape == theirs.shape
    torch.testing.assert_close(mine.detach(), theirs, rtol=rtol, atol=rtol * float(theirs.abs().max()))


def both(case: Any, subset: str, structure: str, fit: bool = True, **options: Any) -> list[Any]:
    """Ours and theirs, fitted to the same network."""
    options = {"prior_precision": 0.37, "temperature": 1.3} | options
    if case.theirs == "regression":
        options = {"sigma_noise": 0.23} | options
    found = []
    for library in (ours, peer):
        la = library.Laplace(copy.deepcopy(case.model), case.theirs, subset, structure, **options)
        if fit:
            la.fit(case.loader)
        found.append(la)
    return found


def seeded(run: Any, libraries: list[Any]) -> list[Any]:
    """What both give from the same state of torch's global generator."""
    out = []
    for la in libraries:
        torch.manual_seed(5)
        out.append(run(la))
    return out


# -- the matrix ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("subset", SUBSETS)
def test_evidence_and_posterior(case: Any, subset: str, structure: str) -> None:
    mine, theirs = both(case, subset, structure)
    for name in TERMS:
        close(getattr(mine, name), getattr(theirs, name))
    close(mine.log_marginal_likelihood(), theirs.log_marginal_likelihood())
    moved = torch.tensor(2.4)
    close(mine.log_marginal_likelihood(moved), theirs.log_marginal_likelihood(moved))
    assert mine.n_params == theirs.n_params
    assert (mine.n_data, mine.n_outputs) == (theirs.n_data, theirs.n_outputs)
    if structure == "kron":
        close(mine.posterior_precision.to_matrix(), theirs.posterior_precision.to_matrix())
        close(mine.H_facs.to_matrix(), theirs.H_facs.to_matrix())
        close(mine.posterior_precision.diag(-1), theirs.posterior_precision.diag(-1))
    else:
        close(mine.H, theirs.H)
        close(mine.posterior_precision, theirs.posterior_precision)
        close(mine.posterior_scale, theirs.posterior_scale)
    if structure == "full":
        close(mine.posterior_covariance, theirs.posterior_covariance)
    if structure == "diag":
        close(mine.posterior_variance, theirs.posterior_variance)
    value = theirs.mean + 0.1
    close(mine.log_prob(value), theirs.log_prob(value))


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("subset", SUBSETS)
def test_predictions(case: Any, subset: str, structure: str) -> None:
    libraries, x = both(case, subset, structure), case.unseen
    close(*[la._glm_predictive_distribution(x) for la in libraries])
    close(*[la._glm_predictive_distribution(x, joint=True) for la in libraries])
    if case.theirs == "regression":
        for joint in (False, True):
            close(*[la(x, joint=joint) for la in libraries])
        close(*[la(x, diagonal_output=True) for la in libraries])
    else:
        for link in ("probit", "bridge", "bridge_norm"):
            close(*[la(x, link_approx=link) for la in libraries])
        for diagonal in (False, True):
            close(*seeded(lambda la, d=diagonal: la(x, link_approx="mc", diagonal_output=d), libraries))
    close(*seeded(lambda la: la(x, pred_type="nn", link_approx="mc", n_samples=7), libraries))
    for kind in ("glm", "nn"):
        if kind == "glm" or subset == "all":  # theirs writes draws of the last layer into all weights, and fails
            close(*seeded(lambda la, k=kind: la.functional_samples(x, pred_type=k, n_samples=6), libraries))
        close(*seeded(lambda la, k=kind: la.predictive_samples(x, pred_type=k, n_samples=6), libraries))
    close(*[la.sample(4, torch.Generator().manual_seed(3)) for la in libraries])


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("subset", SUBSETS)
def test_jacobians_and_their_covariances(case: Any, subset: str, structure: str) -> None:
    mine, theirs = both(case, subset, structure)
    J, f = (theirs.backend.jacobians if subset == "all" else theirs.backend.last_layer_jacobians)(case.unseen)
    close(mine.backend.jacobians(case.unseen), (J, f))
    close(mine.functional_variance(J), theirs.functional_variance(J))
    close(mine.functional_covariance(J), theirs.functional_covariance(J))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_precision_for_each_parameter_or_weight(case: Any, structure: str) -> None:
    n = len(list(case.model.parameters()))
    libraries = both(case, "all", structure, prior_precision=0.2 + torch.rand(n), prior_mean=0.1)
    close(*[la.log_marginal_likelihood() for la in libraries])
    close(*[la._glm_predictive_distribution(case.unseen) for la in libraries])
    size = libraries[0].n_params
    each = 0.2 + torch.rand(size)
    if structure == "kron":
        for la in libraries:
            with pytest.raises(ValueError, match="precision"):
                la.prior_precision = each
    else:
        close(*[la.log_marginal_likelihood(each) for la in libraries])
        close(*[la._glm_predictive_distribution(case.unseen) for la in libraries])
        close(*seeded(lambda la: la.sample(3), libraries))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_fit_that_goes_on(case: Any, structure: str) -> None:
    """override=False, at other weights: sums of both."""
    libraries = both(case, "all", structure)
    for la in libraries:
        with torch.no_grad():
            for p in la.model.parameters():
                p.mul_(1.1)
        half = list(range(len(case.inputs) // 2))
        la.fit(DataLoader(torch.utils.data.Subset(case.loader.dataset, half), batch_size=5), override=False)
    for name in TERMS:
        close(*[getattr(la, name) for la in libraries])
    close(*[la._glm_predictive_distribution(case.unseen) for la in libraries])


# -- tuning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prior", ["scalar", "layerwise", "diag"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_their_hundred_steps(case: Any, structure: str, prior: str) -> None:
    if structure == "kron" and prior == "diag":
        pytest.skip("neither has it")
    libraries = both(case, "all", structure)
    for la in libraries:
        la.optimize_prior_precision(method="marglik", prior_structure=prior)
    close(*[la.prior_precision for la in libraries], rtol=1e-6)
    close(*[la._glm_predictive_distribution(case.unseen) for la in libraries], rtol=1e-6)


def test_gridsearch_by_a_loss_of_ones_own(classification: Any) -> None:
    """A callable; with a metric theirs goes on counting from grid point to grid point."""
    libraries = both(classification, "all", "kron")
    loader = DataLoader(classification.loader.dataset, batch_size=11)
    for la in libraries:
        loss = lambda p, y: nn.functional.nll_loss(p.log(), y)  # noqa: E731
        la.optimize_prior_precision(method="gridsearch", val_loader=loader, loss=loss, grid_size=12)
    close(*[la.prior_precision for la in libraries])


def test_gridsearch_by_default_has_the_least_loss_where_theirs_has_the_least_running_mean(classification: Any) -> None:
    libraries = both(classification, "all", "kron")
    loader = DataLoader(classification.loader.dataset, batch_size=11)
    losses = []
    for value in torch.logspace(-4, 4, 12):
        libraries[0].prior_precision = value
        p = libraries[0](classification.inputs)
        losses.append(float(nn.functional.nll_loss(p.log(), classification.targets)))
    for la in libraries:
        la.optimize_prior_precision(method="gridsearch", val_loader=loader, grid_size=12)
    grid, losses = torch.logspace(-4, 4, 12), torch.tensor(losses)
    close(libraries[0].prior_precision, grid[losses.argmin()].reshape(1).double(), 1e-6)
    running = losses.cumsum(0) / torch.arange(1, 13)
    close(libraries[1].prior_precision, grid[running.argmin()].reshape(1).double(), 1e-6)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_gradients_of_the_evidence(regression: Any, structure: str) -> None:
    libraries, slopes = both(regression, "all", structure), []
    for la in libraries:
        prior, noise = (torch.tensor(v, requires_grad=True) for v in (1.9, 0.41))
        value = la.log_marginal_likelihood(prior, noise)
        slopes.append(torch.autograd.grad(value, (prior, noise)))
    close(slopes[0][0], slopes[1][0])
    if structure != "kron":
        close(slopes[0][1], slopes[1][1])
        return
    h, theirs = 1e-5, libraries[1]  # their own lacks the log-determinant; their value has it
    up, down = (float(theirs.log_marginal_likelihood(torch.tensor(1.9), torch.tensor(0.41 + d))) for d in (h, -h))
    close(slopes[0][1], torch.tensor((up - down) / (2 * h)), 1e-6)


TRAININGS: dict[str, dict[str, Any]] = {
    "kron": {"backend": AsdlGGN},
    "diag": {"backend": CurvlinopsGGN},
    "full": {"backend": CurvlinopsGGN, "prior_structure": "scalar"},
}


@pytest.mark.parametrize("structure", TRAININGS)
@pytest.mark.parametrize("kind", ["regressor", "classifier"])
def test_marglik_training(request: pytest.FixtureRequest, kind: str, structure: str) -> None:
    case = request.getfixturevalue("regression") if kind == "regressor" else None
    case = case or request.getfixturevalue("_classifier")
    options = {"n_epochs": 4, "n_hypersteps": 3, "optimizer_kwargs": {"lr": 1e-2}, "temperature": 1.2}
    if structure == "kron" and kind == "regressor":  # their gradient in the noise is another: hold it
        options |= {"fix_sigma_noise": True, "sigma_noise_init": 0.5}
    runs = []
    for library in (ours, peer):
        found = library.marglik_training(
            copy.deepcopy(case.model), case.loader, case.theirs, structure, **options, **TRAININGS[structure]
        )
        runs.append(found)
    (mine, model, margliks, losses), (theirs, their_model, their_margliks, their_losses) = runs
    close(torch.tensor(margliks), torch.tensor(their_margliks), 1e-7)
    close(torch.tensor(losses), torch.tensor(their_losses), 1e-7)
    close(mine.prior_precision, theirs.prior_precision, 1e-7)
    close(mine.sigma_noise, theirs.sigma_noise, 1e-7)
    for p, q in zip(model.parameters(), their_model.parameters(), strict=True):
        close(p, q, 1e-7)


@pytest.fixture
def _classifier(_float64: None) -> Any:
    return _made("classifier")


def _made(name: str) -> Any:
    import sys

    module = next(m for key, m in sys.modules.items() if key.endswith("conftest") and hasattr(m, "MAKERS"))
    return module.MAKERS[name](seed=8)


# -- backends ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("subset", SUBSETS)
def test_the_empirical_fisher(case: Any, subset: str, structure: str) -> None:
    if subset == "last_layer" and structure != "kron":
        pytest.skip("theirs has no gradients of the last layer alone")
    libraries = []
    for library, backend in ((ours, backends.CurvlinopsEF), (peer, CurvlinopsEF)):
        noise = {"sigma_noise": 0.6} if case.theirs == "regression" else {}
        la = library.Laplace(copy.deepcopy(case.model), case.theirs, subset, structure, backend=backend, **noise)
        la.fit(case.loader)
        libraries.append(la)
    close(*[la.log_marginal_likelihood() for la in libraries])
    close(*[la._glm_predictive_distribution(case.unseen) for la in libraries])


def test_the_true_hessian(case: Any) -> None:
    libraries = both(case, "all", "full", backend=CurvlinopsHessian, prior_precision=300.0)  # their class, by its name
    close(*[la.H for la in libraries])
    close(*[la.log_marginal_likelihood() for la in libraries])


# -- subnetworks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["full", "diag"])
def test_a_subnetwork(case: Any, structure: str) -> None:
    libraries = both(case, "subnetwork", structure, subnetwork_indices=INDEX)
    close(*[la.H for la in libraries])
    close(*[la.log_marginal_likelihood() for la in libraries])
    close(*[la.mean_subnet for la in libraries])
    close(*[la._glm_predictive_distribution(case.unseen) for la in libraries])
    close(*seeded(lambda la: la.sample(3), libraries))
    close(*seeded(lambda la: la(case.unseen, pred_type="nn", link_approx="mc", n_samples=5), libraries))


MASKS: dict[str, Any] = {
    "RandomSubnetMask": lambda model, library, case: {"n_params_subnet": 9},
    "LargestMagnitudeSubnetMask": lambda model, library, case: {"n_params_subnet": 9},
    "LargestVarianceDiagLaplaceSubnetMask": lambda model, library, case: {
        "n_params_subnet": 9,
        "diag_laplace_model": library.Laplace(model, case.theirs, "all", "diag"),
    },
    "LargestVarianceSWAGSubnetMask": lambda model, library, case: {
        "n_params_subnet": 9,
        "likelihood": case.theirs,
        "swag_n_snapshots": 4,
    },
    "ParamNameSubnetMask": lambda model, library, case: {"parameter_names": ["0.bias", "4.weight"]},
    "ModuleNameSubnetMask": lambda model, library, case: {"module_names": ["0", "4"]},
    "LastLayerSubnetMask": lambda model, library, case: {},
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(regression: Any, name: str) -> None:
    found = []
    for library, masks in ((ours, our_masks), (peer, their_masks)):
        torch.manual_seed(3)
        model = copy.deepcopy(regression.model)
        mask = getattr(masks, name)(model, **MASKS[name](model, library, regression))
        found.append(mask.select(regression.loader))
        assert torch.equal(mask.indices, found[-1])
        assert mask.n_params_subnet == len(found[-1])
    assert torch.equal(*found)


# -- processes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("independent", [False, True])
@pytest.mark.parametrize("subset", SUBSETS)
def test_processes(case: Any, subset: str, independent: bool) -> None:
    options = {"n_subset": 20, "independent_outputs": independent, "backend": CurvlinopsGGN}
    libraries = both(case, subset, "gp", **options)
    for name in ("log_likelihood", "log_det_ratio", "scatter"):
        close(*[getattr(la, name) for la in libraries], rtol=1e-7)
    close(*[la.log_marginal_likelihood(torch.tensor(0.8)) for la in libraries], rtol=1e-7)
    if subset == "all" and not independent:
        return  # theirs swap outputs of test and training inputs: tests/test_compat_structures.py has the dual form
    close(*[la(case.unseen) for la in libraries])
    if case.theirs == "regression":
        close(*[la(case.unseen, joint=True) for la in libraries])


# -- networks on other inputs --------------------------------------------------------------------------------------


class OnMapping(nn.Module):
    """A network that takes the whole batch, targets too, as Hugging Face's users write for laplace-torch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 4), nn.Linear(4, 3)

    def forward(self, batch: Any) -> Tensor:
        assert "labels" in batch
        mask = batch["attention_mask"].unsqueeze(-1)
        return self.head((torch.tanh(self.embed(batch["input_ids"])) * mask).sum(1))


@pytest.mark.parametrize("kind", [dict, UserDict])
@pytest.mark.parametrize(("subset", "structure"), [("all", "diag"), ("last_layer", "kron"), ("last_layer", "full")])
def test_batches_that_are_mappings(kind: type, subset: str, structure: str) -> None:
    torch.manual_seed(0)
    model, n = OnMapping(), 12
    ids, labels = torch.randint(11, (n, 5)), torch.randint(3, (n,))
    rows = [{"input_ids": i, "attention_mask": (i > 2).double(), "labels": y} for i, y in zip(ids, labels, strict=True)]
    collate = lambda rows: kind({k: torch.stack([r[k] for r in rows]) for k in rows[0]})  # noqa: E731
    loader = DataLoader(rows, batch_size=5, collate_fn=collate)
    libraries = []
    for library in (ours, peer):
        la = library.Laplace(copy.deepcopy(model), "classification", subset, structure)
        la.fit(loader)
        libraries.append(la)
    close(*[la.log_marginal_likelihood() for la in libraries])
    close(*[la(collate(rows[:4])) for la in libraries])


class OnPositions(nn.Module):
    """The last layer at every position; the last one's logits are the output."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.body, self.head, self.reduction = nn.Linear(3, 5), nn.Linear(5, 2), reduction

    def forward(self, x: Tensor) -> Tensor:
        f = self.head(torch.tanh(self.body(x)))  # (n, s, c)
        return {"pick_first": lambda f: f[:, 0], "pick_last": lambda f: f[:, -1], "average": lambda f: f.mean(1)}[
            self.reduction
        ](f)


@pytest.mark.parametrize("structure", ["full", "diag"])
@pytest.mark.parametrize("reduction", ["pick_first", "pick_last", "average"])
def test_feature_reduction(reduction: str, structure: str) -> None:
    torch.manual_seed(1)
    x, y, model = torch.randn(14, 4, 3), torch.randint(2, (14,)), OnPositions(reduction)
    loader, libraries = DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=6), []
    for library in (ours, peer):
        options = {"feature_reduction": reduction, "last_layer_name": "head"}
        la = library.Laplace(copy.deepcopy(model), "classification", "last_layer", structure, **options)
        la.fit(loader)
        libraries.append(la)
    close(*[la.log_marginal_likelihood() for la in libraries])
    close(*[la(x[:5]) for la in libraries])


class Reward(nn.Module):
    """One reward an item; pairs (n, 2, d) give two."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 3:
            return self.net(x.flatten(0, 1)).reshape(len(x), 2)
        return self.net(x)


def reward_models(structure: str) -> tuple[list[Any], Tensor]:
    torch.manual_seed(2)
    x, y, model = torch.randn(20, 2, 3), torch.randint(2, (20,)), Reward()
    loader, libraries = DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8), []
    for library in (ours, peer):
        la = library.Laplace(copy.deepcopy(model), "reward_modeling", "all", structure)
        la.fit(loader)
        libraries.append(la)
    return libraries, x


def test_reward_modeling() -> None:
    libraries, x = reward_models("diag")
    for la in libraries:
        la.optimize_prior_precision(n_steps=10)
    close(*[la.prior_precision for la in libraries], rtol=1e-6)
    close(*[la(torch.ones(4, 3) * torch.arange(4.0)[:, None]) for la in libraries], rtol=1e-6)
    close(*[la(x, fitting=True) for la in libraries], rtol=1e-6)


def test_reward_modeling_with_kron_has_half_their_blocks_of_weights() -> None:
    """The network folds both items of a pair into the batch. Then theirs divides Σ a aᵀ over 2N rows by N; ours, by 2N,
    as both do where the items stay a dimension of their own."""
    (mine, theirs), _ = reward_models("kron")
    for own, other in zip(mine.H_facs.kfacs, theirs.H_facs.kfacs, strict=True):
        block, peers = (torch.kron(*entry) if len(entry) == 2 else entry[0] for entry in (own, other))
        close(block * len(own), peers)


# -- gradients in inputs, files ------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("subset", SUBSETS)
def test_gradients_in_the_inputs(regression: Any, subset: str, structure: str) -> None:
    slopes = []
    for la in both(regression, subset, structure, enable_backprop=True):
        x = regression.unseen.clone().requires_grad_()
        mean, var = la(x)
        slopes.append(torch.autograd.grad(mean.sum() + var.square().sum(), x)[0])
    close(*slopes)


@pytest.mark.parametrize("direction", ["theirs to ours", "ours to ours", "ours to theirs"])
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("subset", SUBSETS)
def test_state_dicts_go_both_ways(case: Any, subset: str, structure: str, direction: str, tmp_path: Any) -> None:
    """Theirs finds an unnamed last layer on a batch that it saves; we save no data, so for theirs it is named."""
    named = subset == "last_layer" and direction == "ours to theirs"
    options = {"last_layer_name": case.last[0].rpartition(".")[0]} if named else {}
    mine, theirs = both(case, subset, structure, **options)
    source, target = {
        "theirs to ours": (theirs, ours),
        "ours to ours": (mine, ours),
        "ours to theirs": (mine, peer),
    }[direction]
    torch.save(source.state_dict(), tmp_path / "la.pt")
    fresh = target.Laplace(copy.deepcopy(case.model), case.theirs, subset, structure, **options)
    fresh.load_state_dict(torch.load(tmp_path / "la.pt", weights_only=False))
    close(fresh.log_marginal_likelihood(), theirs.log_marginal_likelihood())
    close(fresh._glm_predictive_distribution(case.unseen), theirs._glm_predictive_distribution(case.unseen))


def test_every_name_of_theirs_is_here() -> None:
    assert sorted(ours.__all__) == sorted(peer.__all__)
    for name in ("ELLA", "VaLLA"):
        with pytest.raises(TypeError, match=f"{name} .*not carried over"):
            getattr(ours, name)(nn.Linear(2, 2), "regression")
