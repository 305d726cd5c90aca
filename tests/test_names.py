"""Names are the user's: no fit depends on what layers and parameters are called.

A network is fitted twice, once with plain names. Evidence, predictions and what a file gives back are the same, for
names that are keys, methods or words of the library, of Python and of torch, and for names with /, spaces, brackets and
letters of any alphabet.
"""

from __future__ import annotations

import ast
import functools
import itertools
import keyword
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw

SOURCE = Path(lw.__file__).parent
STRUCTURES: dict[str, Callable[[], Any]] = {
    "kron": lambda: "kron",
    "block": lambda: "block",
    "ekfac": lambda: "ekfac",
    "diag": lambda: "diag",
    "lowrank": lambda: lw.curvature.LowRank(7),
    "full": lambda: lw.curvature.Full("primal"),
    "dual": lambda: lw.curvature.Full("dual"),
    "matrix_free": lambda: lw.curvature.MatrixFree(samples=4),
}
ODD = [
    "a/B", "a/A", "a/count", "a/gram", "a/UA", "a/values", "/", "//", "a/", "/a", " ", "a b", "\t", "\n", "ä", "字",
    "*", "?", "[", "]", "[0]", "a[0]", "a*", "(root)", "0", "1", "00", "-1", "__metadata__", "None", "a,b", "a=b", "{}",
    "%s", "\\", "'", '"', "sums", "basis", "mask", "batch", "model", "hook", "self", "_", "__", "a" * 300, "🙂",
]  # fmt: skip


@functools.cache
def words() -> list[str]:
    """Every word that the source quotes and every field of its classes, so every key and slot that it uses; of Python
    and torch, their own."""
    found: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
                found.add(node.value)
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
    found |= {*keyword.kwlist, *dir(nn.Module), *ODD}
    return sorted(name for name in found if allowed(name))


def allowed(name: str) -> bool:
    """Whether torch takes a module by this name."""
    try:
        nn.Module().add_module(name, nn.Identity())
    except (KeyError, TypeError):
        return False
    return True


class Net(nn.Module):
    """3 → 4 → 4 → 2 with a scale, through layers and a bare parameter of any names."""

    def __init__(self, names: tuple[str, str, str, str]) -> None:
        super().__init__()
        for name, module in zip(names, (nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)), strict=False):
            self.add_module(name, module)
        self.register_parameter(names[3], nn.Parameter(torch.ones(2)))
        self.__dict__["the.order"] = names  # a key that no module can have

    def forward(self, x: Tensor) -> Tensor:
        first, scale, last, bare = self.__dict__["the.order"]
        hidden = self._modules[scale](torch.tanh(self._modules[first](x)))
        return self._modules[last](hidden) * self._parameters[bare]


PLAIN = ("first", "scale", "last", "bare")


def network(names: tuple[str, str, str, str] = PLAIN) -> Net:
    torch.manual_seed(0)
    net = Net(names).double()
    with torch.no_grad():
        for p in sorted(net.parameters(), key=lambda p: tuple(p.shape)):
            p += 0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()), dtype=p.dtype)
    return net


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(6, c, generator=generator, dtype=torch.float64) for c in (3, 2))  # type: ignore[return-value]


def told(net: Net, structure: str, prior: Any = "layerwise", center: str = "map") -> list[Tensor]:
    """The numbers of a fit, in the order of the network's parameters as they are used."""
    la = lw.laplace(net, data(), "gaussian", structure=STRUCTURES[structure](), prior=prior)
    evidence = [la.log_evidence(center=center).detach()]
    return [*evidence, la.predict(data()[0]).covariance]


def same(found: list[Tensor], expected: list[Tensor], what: Any) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12, msg=lambda text: f"{what}: {text}")


def quadruples(names: list[str]) -> list[tuple[str, str, str, str]]:
    """Names four at a time, each once in every place."""
    out = []
    for i in range(0, len(names), 4):
        four = [*names[i : i + 4], "plain1", "plain2", "plain3"][:4]
        out += [tuple(four[(k + shift) % 4] for k in range(4)) for shift in range(4)]
    return out  # type: ignore[return-value]


BY_PART = ("kron", "block", "ekfac")  # where names meet keys


@pytest.mark.parametrize(
    "structure", [one if one == "block" else pytest.param(one, marks=pytest.mark.full) for one in BY_PART]
)
def test_every_word_of_the_library_is_a_name(structure: str) -> None:
    """A quarter of the words in each place; half of them, others in each structure."""
    names = words()
    assert len(names) > 600
    check_words(structure, names, BY_PART.index(structure), 2 * len(BY_PART))


@pytest.mark.full
@pytest.mark.parametrize(
    "structure", [one if one == "block" else pytest.param(one, marks=pytest.mark.full) for one in BY_PART]
)
def test_every_word_is_a_name_in_every_structure(structure: str) -> None:
    check_words(structure, words(), 0, 1)


def check_words(structure: str, names: list[str], first: int, step: int) -> None:
    expected = told(network(), structure)
    for i in range(4 * first, len(names) - 3, 4 * step):
        four = tuple(names[i : i + 4])
        same(told(network(four), structure), expected, four)  # type: ignore[arg-type]


@pytest.mark.parametrize("structure", STRUCTURES)
def test_odd_names_in_every_place(structure: str) -> None:
    """Each four of them in one of the structures."""
    check_odd(structure, list(STRUCTURES).index(structure), len(STRUCTURES))


@pytest.mark.full
@pytest.mark.parametrize("structure", STRUCTURES)
def test_odd_names_in_every_place_of_every_structure(structure: str) -> None:
    check_odd(structure, 0, 11 if structure == "matrix_free" else 3)


def check_odd(structure: str, first: int, step: int) -> None:
    fixed = ["index", "scatter", "jacobian", "blocks", "companion", "streamed", "rows", "root", "span", "eigenvalues"]
    expected = told(network(), structure, center="tangent")
    for four in quadruples([*fixed, "dropped", "jitter", *ODD])[first::step]:
        same(told(network(four), structure, center="tangent"), expected, four)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize(
    "names", [("a", "a/B", "a/B/B", "a/gram"), ("index", "scatter", "jacobian", "rows"), ("*", "a[0]", "🙂", "(root)")]
)
def test_a_file_gives_them_back(names: tuple[str, str, str, str], structure: str, tmp_path: Path) -> None:
    net = network(names)
    la = lw.laplace(net, data(), "gaussian", structure=STRUCTURES[structure](), prior="layerwise")
    evidence, covariance = la.log_evidence(), la.predict(data()[0]).covariance
    la.save(tmp_path / "la.safetensors")
    back = lw.load(tmp_path / "la.safetensors", net)
    assert back.coverage == la.coverage
    for key, value in la.state.sums.items():
        assert torch.equal(back.state.sums[key], value)
    torch.testing.assert_close(back.log_evidence(), evidence, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(back.predict(data()[0]).covariance, covariance, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("structure", ["kron", "block", "ekfac", "diag"])
def test_names_that_hold_others_are_taken_out_and_added(structure: str) -> None:
    x, y = data()
    found = []
    for names in (PLAIN, ("a", "a/B", "a/values", "a/A")):
        la = lw.laplace(network(names), (x, y), "gaussian", structure=STRUCTURES[structure](), prior="layerwise")
        left = la.without((x[4:], y[4:]))
        found.append([left.log_evidence(), left.updated((x[4:], y[4:])).log_evidence()])
    same(found[1], found[0], structure)


def test_keys_of_a_module_dict() -> None:
    net = nn.Sequential(nn.ModuleDict({"a": nn.Linear(3, 4), "a/B": nn.Linear(4, 2), "index": nn.LayerNorm(4)}))
    net.double()
    layers = net[0]

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        return layers["a/B"](layers["index"](torch.tanh(layers["a"](x))))

    for structure in ("kron", "block", "ekfac", "diag"):
        la = lw.laplace(net, data(), "gaussian", structure=structure, forward=forward)
        assert set(la.coverage) == {n for n, _ in net.named_parameters()}
        assert torch.isfinite(la.log_evidence())


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
def test_a_parameter_with_the_name_of_a_step(structure: str) -> None:
    """The maps of a layer that runs in steps have names of their own, which a parameter beside them may have too."""

    class Products(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.layer, self.name = nn.Bilinear(3, 2, 2).double(), name
            self.layer.register_parameter(name, nn.Parameter(torch.ones(2, dtype=torch.float64)))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x, x[:, :2]) * self.layer._parameters[self.name]

    fits = []
    for name in ("plain", "products"):
        torch.manual_seed(0)
        la = lw.laplace(Products(name), data(), "gaussian", structure=structure)
        fits.append([la.log_evidence(), la.predict(data()[0]).covariance])
    same(fits[1], fits[0], structure)


def test_hyperparameters_of_a_network_have_a_record_of_their_own() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.precision = nn.Linear(3, 2), nn.Parameter(torch.tensor(0.7))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.precision

    net, (x, y) = Scaled().double(), data()
    online = lw.OnlineEvidence(net, (x, y), "gaussian", hyperparameters=["precision"], burn_in=0, every=1)
    online.loss(net(x), y)
    record = online.step()
    assert record is not None
    said = record.hyperparameters
    assert {"precision", "noise", "model.precision"} <= set(said)


# -- patterns ------------------------------------------------------------------------------------------------------


def test_a_pattern_that_is_a_name_means_that_parameter() -> None:
    net = nn.Module()
    for name in ("a[0]", "a0", "a*", "ab"):
        net.register_parameter(name, nn.Parameter(torch.ones(2, dtype=torch.float64)))
    assert lw.linearize(net, subset=["a[0]"]).layout.names == ("a[0]",)
    assert lw.linearize(net, subset=["a*"]).layout.names == ("a*",)
    assert set(lw.linearize(net, subset=["a?"]).layout.names) == {"a0", "a*", "ab"}
    assert set(lw.linearize(net, subset=["a[[]0]", "ab"]).layout.names) == {"a[0]", "ab"}
    with pytest.raises(lw.errors.InvalidValue, match="matches no parameter"):
        lw.linearize(net, subset=["b[0]"])


def test_a_prior_by_names_with_glob_characters() -> None:
    net = nn.Module()
    for name in ("a[0]", "a0", "a*"):
        net.register_parameter(name, nn.Parameter(torch.ones(2, dtype=torch.float64)))
    layout = lw.linearize(net).layout
    prior = lw.priors.Gaussian({"a[0]": 1.0, "a0": 2.0, "a*": 3.0}).bind(layout)
    assert prior.named() == {"a[0]": 1.0, "a0": 2.0, "a*": 3.0}
    assert prior.operator().dense().tolist() == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    with pytest.raises(lw.errors.InvalidValue, match="exactly one prior pattern"):
        lw.priors.Gaussian({"a[[]0]": 1.0, "a0": 2.0}).bind(layout)


@pytest.mark.parametrize("per", ["layer", "unit"])
def test_a_layer_called_root_is_not_the_root(per: str) -> None:
    net = nn.Module()
    net.register_parameter("bare", nn.Parameter(torch.ones(2, dtype=torch.float64)))
    net.add_module("(root)", nn.Linear(1, 2).double())
    prior = lw.priors.Gaussian(1.0, per=per).bind(lw.linearize(net).layout)
    assert len(prior.named()) == len(prior.names) == {"layer": 2, "unit": 4}[per]
    assert not set(prior.index[:2].tolist()) & set(prior.index[2:].tolist())


def test_names_are_all_different() -> None:
    """Or the sweep sweeps less than it says."""
    assert len(set(words())) == len(words())
    assert {"index", "scatter", "jacobian", "eigenvalues", "a/B"} <= set(words())
    assert len(list(itertools.chain(*quadruples(ODD)))) >= 4 * len(ODD)
