"""Served modules: what a traced fit gives, after torch.export and in ONNX's runtime, is la.predict's, at any number of
examples.
"""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import lapwing as lw
from helpers import close, integers, normal
from lapwing.errors import InvalidValue, Unsupported
from lapwing.integrations import export

STRUCTURES: dict[str, dict[str, Any]] = {
    "kron": {"structure": "kron"},
    "kron, last layer": {"structure": "kron", "subset": "last_layer"},
    "full, last layer": {"structure": "full", "subset": "last_layer"},
    "full": {"structure": lw.curvature.Full("primal")},
    "dual": {"structure": lw.curvature.Full("dual")},
    "block": {"structure": "block"},
    "diag": {"structure": "diag"},
    "ekfac": {"structure": "ekfac"},
    "layerwise": {"structure": "kron", "prior": {"0.weight": 0.5, "0.bias": 2.0, "2.*": 3.0}},
}
QUICK, FULL = ("kron", "full, last layer", "dual"), pytest.mark.full
ANY = ({0: torch.export.Dim("n", min=1)},)


def mlp(outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


def fitted(likelihood: str = "categorical", model: nn.Module | None = None, **options: Any) -> lw.Laplace:
    y = {"categorical": integers(3, 20), "gaussian": normal(20, 3, seed=1), "bernoulli": integers(2, 20, 3)}[likelihood]
    return lw.laplace(model or mlp(), (normal(20, 5), y), likelihood, **{"structure": "kron", **options})


def expected(la: lw.Laplace, x: Tensor, link: str = "probit") -> tuple[Tensor, Tensor]:
    pred = la.predict(x, link if la.likelihood.plain.classes else "auto", mean="network")
    return pred.mean, pred.f_var


@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=FULL) for name in STRUCTURES])
def test_a_module_is_the_prediction_at_any_number_of_examples(name: str, likelihood: str) -> None:
    la = fitted(likelihood, **STRUCTURES[name])
    served = export.module(la, normal(5, 5))  # as many examples as inputs
    for n in (1, 2, 7):
        x = normal(n, 5, seed=n)
        for found, wanted in zip(served(x), expected(la, x), strict=True):
            close(found, wanted)


@FULL
@pytest.mark.parametrize("link", ["probit_centered", "mean_field", "bridge", "bridge_norm"])
def test_links_are_those_of_predictions(link: str) -> None:
    la, x = fitted(), normal(6, 5, seed=2)
    close(export.module(la, normal(4, 5), link)(x)[0], expected(la, x, link)[0])


@FULL
def test_binary_outputs_have_the_probit_link() -> None:
    la, x = fitted("bernoulli"), normal(6, 5, seed=2)
    close(export.module(la, normal(1, 5))(x)[0], expected(la, x)[0])


@FULL
def test_noise_or_temperature_is_that_of_the_fit() -> None:
    la, x = fitted("gaussian").tuned(center="map"), normal(6, 5, seed=2)
    close(export.module(la, x)(x)[1], la.predict(x).f_var)


@FULL
def test_a_classification_is_served_with_its_calibration() -> None:
    la, x = fitted().replace(likelihood="categorical"), normal(6, 5, seed=2)
    tuned = lw.laplace(mlp(), la.data, "classification").tuned()
    if tuned.calibration is not None and tuned.calibration.features is not None:
        with pytest.raises(Unsupported, match="give mean='network'"):
            export.module(tuned, x)
    else:
        close(export.module(tuned, x)(x)[0], tuned.predict(x, "probit").mean)
    close(export.module(tuned, x, mean="network")(x)[0], tuned.predict(x, "probit", mean="network").mean)


def test_what_follows_the_last_layer_counts() -> None:
    model = nn.Sequential(mlp(), nn.Softplus())
    la, x = fitted("gaussian", model, subset="last_layer"), normal(6, 5, seed=2)
    close(export.module(la, x)(x)[1], la.predict(x).f_var)


class Pooled(nn.Module):
    """A linear layer that positions share, and their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.each, self.head = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.each(x)).mean(1))


def strided() -> nn.Module:
    body = nn.Conv2d(2, 4, 3, 2, 1, groups=2), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(8, 3))


def circular() -> nn.Module:
    body = nn.Conv2d(2, 3, 2, padding="same", padding_mode="circular"), nn.GELU(), nn.GroupNorm(3, 3)
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3))


def deep() -> nn.Module:
    body = nn.Conv2d(2, 3, 3, 2, 1), nn.Tanh(), nn.Conv2d(3, 4, 2, 2), nn.ReLU()  # its strides leave a row over
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(8, 3))


def transposed() -> nn.Module:
    body = nn.ConvTranspose1d(2, 4, 3, 2, 1, 1, groups=2, bias=False), nn.Tanh(), nn.Conv1d(4, 2, 3, dilation=2)
    return nn.Sequential(*body, nn.LayerNorm([2, 6]), nn.Flatten(), nn.Linear(12, 3))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "positions": (Pooled, (2, 5)),
    "strided": (strided, (2, 6, 8)),
    "circular": (circular, (2, 3, 4)),
    "deep": (deep, (2, 6, 7)),
    "transposed": (transposed, (2, 5)),
}


def network_fit(name: str, **options: Any) -> tuple[lw.Laplace, tuple[int, ...]]:
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    return lw.laplace(make().double().eval(), (normal(12, *shape), normal(12, 3)), "gaussian", **options), shape


@pytest.mark.parametrize("structure", ["kron", *(pytest.param(s, marks=FULL) for s in ("diag", "block", "full"))])
@pytest.mark.parametrize("name", NETWORKS)
def test_layers_that_positions_share_are_served(name: str, structure: str) -> None:
    la, shape = network_fit(name, structure=structure)
    served = export.module(la, normal(4, *shape))
    for n in (1, 5):
        x = normal(n, *shape, seed=n)
        close(served(x)[1], la.predict(x).f_var)


@pytest.mark.parametrize("name", ["strided", *(pytest.param(name, marks=FULL) for name in ("positions", "circular"))])
def test_torch_export_takes_them(name: str) -> None:
    la, shape = network_fit(name, structure="kron")
    x = normal(5, *shape, seed=2)
    program = torch.export.export(export.module(la, x[:3]), (x[:3],), dynamic_shapes=ANY)
    close(program.module()(x)[1], la.predict(x).f_var)


def test_a_network_of_any_kind_is_served_by_its_last_layer() -> None:
    la, shape = network_fit("strided", structure="full", subset="last_layer")
    x = normal(5, *shape, seed=2)
    program = torch.export.export(export.module(la, x[:3]), (x[:3],), dynamic_shapes=ANY)
    close(program.module()(x)[1], la.predict(x).f_var)


@pytest.mark.parametrize("name", ["full, last layer", pytest.param("kron", marks=FULL)])
def test_torch_export_takes_it_and_a_file_gives_it_back(name: str) -> None:
    la, x = fitted(**STRUCTURES[name]), normal(7, 5, seed=3)
    program = torch.export.export(export.module(la, normal(4, 5)), (normal(4, 5),), dynamic_shapes=ANY)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of its file format
        again = torch.export.load(file).module()
    for found, wanted in zip(again(x), expected(la, x), strict=True):
        close(found, wanted)


def by_onnx(served: nn.Module, x: Tensor, more: Tensor) -> list[Tensor]:
    """What ONNX's runtime gives at more, for a module that was exported at x."""
    runtime = pytest.importorskip("onnxruntime", reason="needs ONNX: pip install 'lapwing[onnx]'")
    pytest.importorskip("onnxscript", reason="needs ONNX: pip install 'lapwing[onnx]'")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own
        program = torch.onnx.export(served, (x,), dynamo=True, dynamic_shapes=ANY, verbose=False)
    file = io.BytesIO()
    program.save(file)
    session = runtime.InferenceSession(file.getvalue())
    return [torch.from_numpy(one) for one in session.run(None, {session.get_inputs()[0].name: more.numpy()})]


@FULL
@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("name", NETWORKS)
def test_onnx_has_layers_that_positions_share(name: str, subset: str) -> None:
    if (name, subset) == ("transposed", "all"):
        pytest.skip("torch.export takes a Bayesian LayerNorm at one number of examples alone")
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    data = normal(12, *shape).float(), integers(3, 12)
    la = lw.laplace(make().eval(), data, "categorical", structure="kron", subset=subset)
    x, more = normal(4, *shape).float(), normal(9, *shape, seed=3).float()
    for one, wanted in zip(by_onnx(export.module(la, x), x, more), expected(la, more), strict=True):
        assert_close(one, wanted, rtol=1e-4, atol=1e-6)


@FULL
def test_onnx_in_double_precision_has_constants_in_single() -> None:
    la, shape = network_fit("positions", structure="kron")
    la = lw.laplace(la.tangent.model, (normal(12, *shape), integers(3, 12)), "categorical", structure="kron")
    x, more = normal(4, *shape), normal(9, *shape, seed=3)
    (mean, var), wanted = by_onnx(export.module(la, x), x, more), expected(la, more)
    assert_close(mean, wanted[0], rtol=1e-7, atol=1e-8)  # π/8 of the link
    close(var, wanted[1])


@FULL
@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
@pytest.mark.parametrize("name", ["kron", "kron, last layer", "full, last layer"])
def test_onnx_gives_the_same_at_another_number_of_examples(name: str, likelihood: str) -> None:
    single = nn.Sequential(nn.Linear(5, 4), nn.GELU(), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    y = integers(3, 20) if likelihood == "categorical" else normal(20, 3).float()
    la = lw.laplace(single, (normal(20, 5).float(), y), likelihood, **STRUCTURES[name])
    x, more = normal(4, 5).float(), normal(9, 5, seed=3).float()
    for one, wanted in zip(by_onnx(export.module(la, x), x, more), expected(la, more), strict=True):
        assert_close(one, wanted, rtol=1e-5, atol=1e-6)


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_what_cannot_be_served_is_refused_by_name() -> None:
    x = normal(4, 5)
    with pytest.raises(Unsupported, match=r"matrix_free .* use structure='kron', or"):
        export.module(fitted("gaussian", structure="matrix_free"), x)
    with pytest.raises(Unsupported, match=r"takes what lw\.laplace gives, got Sequential"):
        export.module(mlp(), x)  # type: ignore[arg-type]
    with pytest.raises(InvalidValue, match=r"link must be one of \['probit'.*got 'probits'"):
        export.module(fitted(), x, "probits")
    poisson = lw.laplace(mlp(), (x, integers(3, 4, 3)), "poisson")
    with pytest.raises(Unsupported, match="poisson has no closed form to serve"):
        export.module(poisson, x)
    with pytest.raises(Unsupported, match=r"mean='process' .* give mean='network'"):
        export.module(fitted("gaussian"), x, mean="process")
    wide = nn.Sequential(nn.Linear(5, 70), nn.Tanh(), nn.Linear(70, 60)).double()
    la = lw.laplace(wide, (normal(20, 5), normal(20, 60)), "gaussian", structure=lw.curvature.Full("primal"))
    with pytest.raises(Unsupported, match=r"a covariance of 4,680 weights is too large to serve"):
        export.module(la, x)
    scaled = nn.Sequential(Scaled(), mlp()).double()
    with pytest.raises(Unsupported, match=r"0\.scale is not served \(Scaled has no rule for it"):
        export.module(fitted("gaussian", scaled), x)
    tokens = nn.Sequential(nn.Embedding(6, 3), nn.Flatten(), nn.Linear(6, 3)).double()
    la = lw.laplace(tokens, (integers(6, 20, 2), normal(20, 3)), "gaussian", structure="kron")
    with pytest.raises(Unsupported, match=r"0 is not served \(inputs of Embedding are numbers of rows\); use subset="):
        export.module(la, integers(6, 4, 2))
    places = nn.Sequential(nn.Linear(5, 6), nn.Unflatten(1, (2, 3))).double()
    la = lw.laplace(places, (normal(20, 5), normal(20, 2, 3)), "gaussian", structure="kron")
    with pytest.raises(Unsupported, match="pick some with forward="):
        export.module(la, x)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


class Forks(nn.Module):
    """Takes a way by the example that it is traced with."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.calls = nn.Linear(5, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).clamp(min=0.0) if torch.jit.is_tracing() or _traced(x) else self.body(x)


def _traced(x: Tensor) -> bool:
    return type(x) is not Tensor and not isinstance(x, nn.Parameter)


def test_a_module_that_tracing_changes_is_refused() -> None:
    la = fitted("gaussian", Forks().double())
    with pytest.raises(Unsupported, match=r"the served mean is not la\.predict's"):
        export.module(la, normal(8, 5))


def test_the_network_is_left_as_it_was() -> None:
    la = fitted()
    model = la.tangent.model
    before, mode = copy.deepcopy(model.state_dict()), model.training
    served = export.module(la, normal(4, 5))
    with torch.no_grad():
        model[0].weight.add_(1.0)  # training goes on; the posterior and what is served are of the weights of the fit
    close(served(normal(4, 5))[1], la.predict(normal(4, 5)).f_var)
    with torch.no_grad():
        model[0].weight.sub_(1.0)
    close(model.state_dict()["0.weight"], before["0.weight"])
    assert model.training is mode
    assert not [h for m in model.modules() for h in m._forward_hooks.values()]
    assert not any(p.requires_grad for p in served.parameters())
