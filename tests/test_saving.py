"""Saving: what comes back is the same to the last bit, or nothing comes back and the error says why."""

from __future__ import annotations

import copy
import json
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import lapwing as lw
from helpers import draw
from helpers import normed as network
from lapwing import files, registry


def twin_of(model: nn.Module) -> nn.Module:
    """The same weights in another object, as after a restart: in train mode, and with a gradient of its own."""
    twin = copy.deepcopy(model).train()
    next(twin.parameters()).grad = torch.ones_like(next(twin.parameters()))
    return twin


def regression(n: int = 6) -> tuple[Tensor, Tensor]:
    return draw(n, 3), draw(n, 2)


def header_of(path: Path) -> dict:
    with safe_open(str(path), "pt") as file:
        return json.loads(file.metadata()["lapwing"][files.DIGEST :])


def assert_same(loaded: lw.Laplace, saved: lw.Laplace, new: object) -> None:
    """Every number equal, bit for bit; from a clean start, since a factorization that is there changes the route."""
    saved = replace(saved, state=replace(saved.state, memo=lw.curvature.Memo()))
    for part in ("sums", "statistics"):
        mine, theirs = getattr(saved.state, part), getattr(loaded.state, part)
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            assert value.dtype == theirs[key].dtype
            assert torch.equal(value, theirs[key]), key
    assert loaded.state.n == saved.state.n
    assert loaded.state.structure == saved.state.structure
    assert loaded.state.factor == saved.state.factor
    assert len(loaded.state.batches) == len(saved.state.batches)
    for (_, mine), (_, theirs) in zip(saved.state.batches, loaded.state.batches, strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(loaded.prior.precision, saved.prior.precision)
    assert loaded.prior.precision.shape == saved.prior.precision.shape
    assert loaded.prior.names == saved.prior.names
    assert loaded.prior.named() == saved.prior.named()
    assert torch.equal(loaded.prior.mean_vector(), saved.prior.mean_vector())
    assert type(loaded.likelihood) is type(saved.likelihood)
    for key, value in saved.likelihood.hyperparameters.items():
        assert torch.equal(loaded.likelihood.hyperparameters[key], value)
    assert loaded.tuning == saved.tuning
    assert loaded.center == saved.center
    assert loaded.coverage == saved.coverage
    assert loaded.memory_budget == saved.memory_budget
    assert repr(loaded) == repr(saved)
    assert torch.equal(loaded.log_evidence(), saved.log_evidence())
    a, b = loaded.predict(new), saved.predict(new)
    for what in ("f_mean", "covariance", "mean", "total"):
        assert torch.equal(getattr(a, what), getattr(b, what)), what
    assert torch.equal(loaded.posterior.draw(2), saved.posterior.draw(2))
    assert torch.equal(loaded.effective_dimension(), saved.effective_dimension())


# -- bit-exact ---------------------------------------------------------------------------------------------------


def some_masks(model: nn.Module) -> dict[str, Tensor]:
    masks = {n: torch.rand(p.shape) < 0.6 for n, p in model.named_parameters() if n.endswith("weight")}
    for mask in masks.values():
        mask.view(-1)[:2] = torch.tensor([True, False])  # a proper part of each
    return masks


def some_means(model: nn.Module) -> dict[str, Tensor]:
    return {n: draw(*p.shape) for n, p in model.named_parameters()}


NOISES = lw.likelihoods.Gaussian(torch.tensor([0.3, 0.7], dtype=torch.float64))
CASES: dict[str, Callable[[nn.Module], dict]] = {
    "primal": lambda m: {"structure": lw.curvature.Full("primal")},
    "dual": lambda m: {"structure": lw.curvature.Full("dual")},
    "diag": lambda m: {"structure": "diag"},
    "kron": lambda m: {"structure": "kron"},
    "block": lambda m: {"structure": "block"},
    "dual, noise per output": lambda m: {"structure": lw.curvature.Full("dual"), "likelihood": NOISES},
    "primal, noise per output": lambda m: {"structure": lw.curvature.Full("primal"), "likelihood": NOISES},
    "diag, noise per output": lambda m: {"structure": "diag", "likelihood": NOISES},
    "layerwise": lambda m: {"prior": "layerwise"},
    "globs": lambda m: {"prior": {"*.weight": 0.3, "*.bias": 7.0}},
    "unit": lambda m: {"prior": lw.priors.Gaussian(0.1, per="unit")},
    "weight": lambda m: {"prior": lw.priors.Gaussian(torch.rand(34).double() + 0.1, per="weight")},
    "mean": lambda m: {"prior": lw.priors.Gaussian(0.3, mean=0.1)},
    "means": lambda m: {"prior": lw.priors.Gaussian(0.3, mean=some_means(m))},
    "masks": lambda m: {"subset": some_masks(m), "prior": "layerwise"},
    "last layer": lambda m: {"subset": "last_layer"},
    "globs of weights": lambda m: {"subset": ["0.*", "3.bias"], "structure": "diag"},
    "empirical": lambda m: {"factor": "empirical"},
    "monte_carlo": lambda m: {"factor": lw.curvature.Factor("monte_carlo", 3), "structure": "diag"},
    "hessian": lambda m: {"factor": "hessian", "prior": 300.0},
    "small memory": lambda m: {"memory_budget": 2**16},
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_loaded_is_what_was_saved_to_the_last_bit(case: str, tmp_path: Path) -> None:
    model = network()
    options = {"likelihood": lw.likelihoods.Gaussian(0.3), **CASES[case](model)}
    la = lw.laplace(model, regression(), options.pop("likelihood"), **options)
    path = tmp_path / "net.lapwing.safetensors"
    la.save(path)
    assert os.listdir(tmp_path) == [path.name]
    assert_same(lw.load(path, twin_of(model)), la, draw(4, 3))


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli"])
@pytest.mark.parametrize("form", ["primal", "dual"])
def test_classes_come_back_to_the_last_bit(likelihood: str, form: str, tmp_path: Path) -> None:
    model, x = network(), draw(6, 3)
    y = torch.randint(2, (6,)) if likelihood == "categorical" else torch.randint(2, (6, 2))
    la = lw.laplace(model, (x, y), likelihood, structure=lw.curvature.Full(form))
    la.save(str(tmp_path / "file"))  # a string, and no suffix
    assert_same(lw.load(str(tmp_path / "file"), model), la, x)


@pytest.mark.filterwarnings("ignore:normalization layers")
@pytest.mark.parametrize("method", ["evidence", "mackay"])
@pytest.mark.parametrize("prior", [1.0, "layerwise"])
def test_a_tuned_object_comes_back_tuned(method: str, prior: object, tmp_path: Path) -> None:
    model = network()
    la = lw.laplace(model, regression(12), NOISES, prior=prior).tuned(method, fixed=("precision",), center="map")
    la.save(tmp_path / "tuned")
    loaded = lw.load(tmp_path / "tuned", twin_of(model))
    assert_same(loaded, la, draw(4, 3))
    assert loaded.tuning is not None
    assert loaded.tuning.method == method
    assert loaded.tuning.fixed == ("precision",)
    assert f"tuned by {method} at the map" in repr(loaded)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_networks_of_less_precision_come_back_to_the_last_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)
    x, y = (t.to(dtype) for t in regression())
    for structure in ("full", "diag"):
        la = lw.laplace(model, (x, y), "gaussian", structure=structure)
        la.save(tmp_path / structure)
        assert_same(lw.load(tmp_path / structure, twin_of(model)), la, x)


@pytest.mark.filterwarnings("ignore:normalization layers")
def test_a_loaded_object_goes_on_as_the_saved_one(tmp_path: Path) -> None:
    model, more = network(), regression(5)
    for form in ("primal", "dual"):
        la = lw.laplace(model, regression(), NOISES, structure=lw.curvature.Full(form))
        la.save(tmp_path / form)
        loaded = lw.load(tmp_path / form, twin_of(model))
        assert torch.equal(loaded.updated(more).log_evidence(), la.updated(more).log_evidence())
        assert torch.equal(loaded.tuned(center="map").prior.precision, la.tuned(center="map").prior.precision)
        loaded.save(tmp_path / "again")
        assert (tmp_path / "again").read_bytes() == (tmp_path / form).read_bytes()


def test_the_model_that_is_loaded_for_is_left_as_it_was(tmp_path: Path) -> None:
    model = network()
    lw.laplace(model, regression(), "gaussian").save(tmp_path / "file")
    twin = twin_of(model)
    twin[3].eval()
    lw.load(tmp_path / "file", twin).predict(draw(2, 3))
    assert [m.training for m in twin.modules()] == [True, True, True, True, False]
    grads = [p.grad for p in twin.parameters()]
    assert torch.equal(grads[0], torch.ones(4, 3))
    assert all(g is None for g in grads[1:])
    for key, value in model.state_dict().items():
        assert torch.equal(value, twin.state_dict()[key])


# -- the file ----------------------------------------------------------------------------------------------------


def test_only_the_file_of_a_dual_state_holds_data_and_its_header_says_so(tmp_path: Path) -> None:
    model, data = network(), regression(7)
    for form in ("primal", "dual"):
        la = lw.laplace(model, data, "gaussian", structure=lw.curvature.Full(form))
        la.save(tmp_path / form)
        tensors = load_file(tmp_path / form)
        assert header_of(tmp_path / form)["holds_data"] is (form == "dual")
        assert la.state.holds_data is (form == "dual")
        found = any(t.shape == data[0].shape and torch.equal(t, data[0]) for t in tensors.values())
        assert found is (form == "dual")
        assert not any(torch.equal(t, data[1]) for t in tensors.values() if t.shape == data[1].shape)


def test_the_header_says_what_the_file_is(tmp_path: Path) -> None:
    la = lw.laplace(network(), regression(7), "gaussian", prior="layerwise", structure="diag")
    la.save(tmp_path / "file")
    header = header_of(tmp_path / "file")
    assert isinstance(header["schema"], int)
    assert header["likelihood"] == "gaussian"
    assert header["n"] == 7
    assert header["parameters"]["0.weight"] == [4, 3]
    assert header["prior"]["fields"]["per"] == "layer"
    assert {"0.weight", "3.bias", "1.running_mean"} <= set(header["fingerprints"])


@pytest.mark.filterwarnings("ignore:normalization layers")
def test_no_pickle_is_used_nor_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    la = lw.laplace(model, regression(), "gaussian").tuned(fixed=("noise",), center="map")

    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("pickle was used")

    for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, never)
    monkeypatch.setattr(torch, "save", never)
    monkeypatch.setattr(torch, "load", never)
    la.save(tmp_path / "file")
    lw.load(tmp_path / "file", model)
    data = (tmp_path / "file").read_bytes()
    header = int.from_bytes(data[:8], "little")  # safetensors: a length, that much JSON, raw numbers, nothing else
    described = json.loads(data[8 : 8 + header])
    ends = [v["data_offsets"][1] for k, v in described.items() if k != "__metadata__"]
    assert len(data) == 8 + header + max(ends)


# -- whole or not at all -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("failing", ["write", "rename", "interrupt"])
def test_a_failure_halfway_leaves_the_old_file_and_no_other(
    old: bool, failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = network()
    la = lw.laplace(model, regression(), "gaussian")
    path = tmp_path / "file"
    if old:
        la.save(path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def half(file: IO[bytes], *content: object) -> None:
        file.write(b"half of a file")
        raise KeyboardInterrupt if failing == "interrupt" else OSError(28, "No space left on device")

    def refuse(*args: object) -> None:
        raise PermissionError("rename")

    if failing == "rename":
        monkeypatch.setattr(os, "replace", refuse)
    else:
        monkeypatch.setattr(files, "_put", half)
    with pytest.raises((lw.errors.InvalidValue, KeyboardInterrupt), match=r"^$|cannot save to .*(space|rename)"):
        la.replace(prior=9.0).save(path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


@pytest.mark.parametrize("failing", ["likelihood", "input", "folder", "missing folder"])
def test_what_cannot_be_saved_is_an_error_before_anything_is_written(failing: str, tmp_path: Path) -> None:
    model, path = network(), tmp_path / "file"
    likelihood: object = "gaussian"
    data: object = regression()
    forward = None
    if failing == "likelihood":

        @dataclass(frozen=True)
        class Mine(lw.likelihoods.Gaussian):
            pass

        likelihood = Mine()
    elif failing == "input":
        data = [({"x": regression()[0], "set": frozenset((1, 2))}, regression()[1])]
        forward = lambda model, batch: model(batch["x"])  # noqa: E731
    elif failing == "folder":
        path.mkdir()
    else:
        path = tmp_path / "nowhere" / "file"
    la = lw.laplace(model, data, likelihood, structure=lw.curvature.Full("dual"), forward=forward)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(lw.errors.InvalidValue):
        la.save(path)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_saved_file_has_the_users_file_mode(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    lw.laplace(network(), regression(), "gaussian").save(tmp_path / "file")
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "plain").stat().st_mode


# -- against another network -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["0.weight", "3.bias", "1.weight", "1.running_mean", "1.num_batches_tracked"])
@pytest.mark.parametrize("subset", ["all", ["0.*"]])
def test_other_weights_or_buffers_are_an_error_that_names_them(name: str, subset: object, tmp_path: Path) -> None:
    model = network()
    lw.laplace(model, regression(), "gaussian", subset=subset).save(tmp_path / "file")
    other = twin_of(model)
    tensor = other.state_dict()[name]
    with torch.no_grad():
        tensor.reshape(-1)[-1].add_(1 if not tensor.is_floating_point() else 1e-12)  # the smallest change counts
    with pytest.raises(lw.errors.InvalidValue, match=name.replace(".", r"\.")):
        lw.load(tmp_path / "file", other)


def test_another_architecture_is_an_error_that_names_the_parameter(tmp_path: Path) -> None:
    model = network()
    lw.laplace(model, regression(), "gaussian").save(tmp_path / "file")

    def changed(index: int, layer: nn.Module) -> nn.Module:
        other = twin_of(model)
        other[index] = layer
        return other.double()

    for other, named in [
        (changed(0, nn.Linear(5, 4)), r"0\.weight.*\(4, 5\).*\(4, 3\)"),
        (changed(3, nn.Linear(4, 2, bias=False)), r"no parameter 3\.bias"),
        (changed(2, nn.PReLU()), r"2\.weight"),
        (changed(1, nn.BatchNorm1d(4, affine=False)), r"1\.weight"),
        (nn.Linear(3, 2).double(), r"no parameter 0\.weight"),
        (twin_of(model).float(), r"running_mean differs"),
    ]:
        with pytest.raises(lw.errors.InvalidValue, match=named):
            lw.load(tmp_path / "file", other)


# -- files that are not ours -------------------------------------------------------------------------------------


def test_a_truncated_file_is_an_error_at_every_length(tmp_path: Path) -> None:
    model, path = network(), tmp_path / "file"
    lw.laplace(model, regression(), "gaussian").save(path)
    whole = path.read_bytes()
    for length in (0, 3, 8, 50, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(lw.errors.InvalidValue, match="not a whole safetensors file"):
            lw.load(path, model)


def test_foreign_files_are_an_error_that_says_so(tmp_path: Path) -> None:
    model = network()
    (tmp_path / "text").write_text("lapwing" * 100)
    torch.save(model.state_dict(), tmp_path / "pickle")
    save_file(model.state_dict(), tmp_path / "foreign")
    save_file({"x": torch.zeros(2)}, tmp_path / "garbled", metadata={"lapwing": "{not json"})
    save_file({"x": torch.zeros(2)}, tmp_path / "old", metadata={"lapwing": json.dumps({"schema": 1})})
    files.write(tmp_path / "bare", {"x": torch.zeros(2)}, {})
    for name, says in {
        "text": "not a whole safetensors file",
        "pickle": "not a whole safetensors file",
        "foreign": "not one that Lapwing saved",
        "garbled": "no digest, as files of older versions.*save it again",
        "old": "no digest, as files of older versions.*save it again",
        "bare": "schema None",
        "absent": "no file",
        ".": "no file",
    }.items():
        with pytest.raises(lw.errors.InvalidValue, match=says):
            lw.load(tmp_path / name, model)


@pytest.mark.parametrize("schema", [0, 99, "1"])
def test_another_schema_is_an_error_that_names_both(schema: object, tmp_path: Path) -> None:
    model, path = network(), tmp_path / "file"
    lw.laplace(model, regression(), "gaussian").save(path)
    header = header_of(path)
    mine = header["schema"]
    files.write(path, load_file(path), {**header, "schema": schema})
    with pytest.raises(lw.errors.InvalidValue, match=rf"schema {schema}.*schema {mine}"):
        lw.load(path, model)


# -- hooks and input trees ---------------------------------------------------------------------------------------


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 2), nn.Linear(2, 2, bias=False)

    def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
        return {"out": self.a(left) + self.b(right)}


def test_a_forward_hook_must_be_passed_again(tmp_path: Path) -> None:
    model = Named().double()
    inputs = {"left": draw(5, 3), "right": draw(5, 2)}
    forward = lambda model, x: model(**x)["out"]  # noqa: E731
    for form in ("primal", "dual"):
        la = lw.laplace(model, (inputs, draw(5, 2)), "gaussian", forward=forward, structure=lw.curvature.Full(form))
        la.save(tmp_path / form)
        with pytest.raises(lw.errors.InvalidValue, match="forward"):
            lw.load(tmp_path / form, model)
        assert_same(lw.load(tmp_path / form, twin_of(model), forward=forward), la, inputs)


def test_trees_of_inputs_come_back_in_their_shape(tmp_path: Path) -> None:
    class Plain(Named):
        def forward(self, left: Tensor, right: list[Tensor], scale: float = 1.0) -> Tensor:
            return self.a(left) + scale * self.b(right[0])

    model = Plain().double()
    inputs = {"left": draw(5, 3), "right": [draw(5, 2)], "scale": 0.5}
    la = lw.laplace(model, (inputs, draw(5, 2)), "gaussian", structure=lw.curvature.Full("dual"))
    la.save(tmp_path / "file")
    loaded = lw.load(tmp_path / "file", twin_of(model))
    assert_same(loaded, la, inputs)
    kept = loaded.state.batches[0][0]
    assert kept["scale"] == 0.5
    assert isinstance(kept["right"], list)
    assert torch.equal(kept["right"][0], inputs["right"][0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when its compiler is imported
def test_a_compiled_model_is_the_model_that_it_wraps(tmp_path: Path) -> None:
    model, data = network(), regression()
    la = lw.laplace(model, data, "gaussian")
    la.save(tmp_path / "file")
    wrapped = torch.compile(model)  # nothing is compiled before a call
    assert_same(lw.load(tmp_path / "file", wrapped), la, data[0])
    assert torch.equal(lw.from_state(la.state, wrapped, 1.0, "gaussian").log_evidence(), la.log_evidence())


def test_a_constant_of_another_shape_is_named_though_its_bytes_are_the_same(tmp_path: Path) -> None:
    class Shifted(nn.Module):
        def __init__(self, shape: tuple[int, ...]) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.register_buffer("shift", torch.zeros(shape))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + self.shift.sum()

    model, other = Shifted((2, 3)).double(), Shifted((3, 2)).double()
    other.layer = model.layer
    lw.laplace(model, regression(), "gaussian").save(tmp_path / "file")
    with pytest.raises(lw.errors.InvalidValue, match="shift"):
        lw.load(tmp_path / "file", other)


# -- one file, read once -----------------------------------------------------------------------------------------


def test_a_file_that_is_replaced_while_it_is_read_is_the_one_that_was_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each of the steps of a read, another fit takes its place."""
    model, path, x = network(), tmp_path / "file", draw(4, 3)
    fits = [lw.laplace(model, regression(n), "gaussian", structure="diag", prior=p) for n, p in [(6, 1.0), (9, 5.0)]]
    for step in ("_checked", "_json"):
        fits[0].save(path)
        whole = getattr(files, step)

        def replacing(*args: object, whole: Callable[..., object] = whole) -> object:
            fits[1].save(path)
            return whole(*args)

        monkeypatch.setattr(files, step, replacing)
        loaded = lw.load(path, model)
        monkeypatch.undo()
        assert_same(loaded, fits[0], x)
        assert_same(lw.load(path, model), fits[1], x)


def test_what_safetensors_itself_reads_is_what_was_saved(tmp_path: Path) -> None:
    kinds = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool]
    tensors = {f"{i}": (9 * torch.randn(i, 3)).to(kind) for i, kind in enumerate(kinds)}  # the first is empty
    tensors |= {"scalar": torch.tensor(2.5), "turned": torch.randn(2, 3).T, "one": torch.ones(()).expand(4)}
    files.write(tmp_path / "file", tensors, {"schema": 7, "name": "λ"})
    theirs, (mine, header) = load_file(tmp_path / "file"), files.read(tmp_path / "file", 7)
    assert header == {"schema": 7, "name": "λ"}
    for found in (mine, theirs):
        assert found.keys() == tensors.keys()
        assert all(v.dtype == tensors[k].dtype and torch.equal(v, tensors[k]) for k, v in found.items())


def test_a_file_that_may_not_be_read_or_written_is_an_error_of_lapwings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = network(), tmp_path / "file"
    la = lw.laplace(model, regression(), "gaussian")
    la.save(path)

    def refuse(*args: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(lw.errors.InvalidValue, match=r"cannot read .*Permission denied.*check"):
        lw.load(path, model)
    with pytest.raises(lw.errors.InvalidValue, match=r"cannot save to .*Permission denied.*another path"):
        la.save(path)
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.filterwarnings("ignore:normalization layers")
def test_a_fit_that_was_loaded_in_inference_mode_can_be_tuned_outside_of_it(tmp_path: Path) -> None:
    model, data = network(), regression(12)
    la = lw.laplace(model, data, "gaussian", structure="diag")
    la.save(tmp_path / "file")
    with torch.inference_mode():
        loaded = lw.load(tmp_path / "file", model)
    assert torch.equal(loaded.tuned(center="map").prior.precision, la.tuned(center="map").prior.precision)


def test_inputs_whose_keys_are_no_strings_cannot_be_saved(tmp_path: Path) -> None:
    """JSON would give them back as strings."""
    x, y = regression()
    options = {"structure": lw.curvature.Full("dual"), "forward": lambda model, batch: model(batch[0])}
    la = lw.laplace(network(), ({0: x}, y), "gaussian", **options)
    with pytest.raises(lw.errors.InvalidValue, match=r"batch.0.inputs is a dict.*with strings as keys"):
        la.save(tmp_path / "file")


# -- every bit counts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["kron", "diag", lw.curvature.Full("dual")])
def test_a_single_bit_that_is_another_is_an_error(structure: object, tmp_path: Path) -> None:
    model, path = network(), tmp_path / "file"
    lw.laplace(model, regression(), "gaussian", structure=structure).save(path)
    whole = path.read_bytes()
    for position in range(0, len(whole), 41):
        changed = bytearray(whole)
        changed[position] ^= 1 << position % 8
        path.write_bytes(changed)
        with pytest.raises(lw.errors.InvalidValue):
            lw.load(path, model)


FORGED: dict[str, tuple[Callable[[dict, dict], object], str]] = {
    "a sum with NaN": (lambda t, h: t["sums.0/B"].fill_(torch.nan), "NaN or infinite values in sums.0/B"),
    "no sum": (lambda t, h: t.pop("sums.0/B"), r"lacks \['sums.0/B'\]"),
    "another sum": (lambda t, h: t.update({"sums.more": torch.zeros(2)}), r"has \['sums.more'\]"),
    "another tensor": (lambda t, h: t.update({"more": torch.zeros(2)}), r"has tensors \['more'\], which nobody knows"),
    "a sum of another shape": (lambda t, h: t.update({"sums.0/B": torch.zeros(1, 2)}), r"sums.0/B of shape \(1, 2\)"),
    "a square below zero": (lambda t, h: t["sums.0/count"].neg_(), "a sum of squares"),
    "no symmetry": (lambda t, h: t["sums.0/A"][0, 0, 1].add_(9), "not symmetric"),
    "no mask": (lambda t, h: t.pop("mask.3.weight"), "no tensor 'mask.3.weight'"),
    "no word of a mask": (lambda t, h: h["masks"].remove("3.weight"), "its structure|part 3.weight"),
    "an empty mask": (lambda t, h: t["mask.3.weight"].zero_(), "selects all or nothing"),
    "no part": (lambda t, h: h["parts"].pop(0), "not each of .* once"),
    "a part twice": (lambda t, h: h["parts"].append(h["parts"][0]), "not each of .* once"),
    "a part of another kind": (lambda t, h: h["parts"][0].update(kind="dense"), "is dense, and kron makes it kron"),
    "a part that is no layer": (lambda t, h: h["parts"][0].update(transposed=True), "no layer 0 of the shape"),
    "negative examples": (lambda t, h: h.update(n=-6), "n = -6"),
    "more examples than targets": (lambda t, h: h.update(n=7), "of 6 targets, and it has 7 examples"),
    "words for a number": (lambda t, h: h.update(terms="1"), "terms = '1', which is no int"),
    "another likelihood": (lambda t, h: h.update(likelihood="poisson"), "its curvature is of poisson"),
    "no noise": (lambda t, h: t["likelihood.noise"].zero_(), "noise must be positive"),
    "no precision": (lambda t, h: t["prior.precision"].neg_(), "precision must be positive"),
    "a stranger": (lambda t, h: h.update(more=1), r"has \['more'\], which nobody knows"),
    "other words on coverage": (lambda t, h: h["coverage"].update({"0.bias": "exact"}), "says of its parameters"),
    "no temperature": (lambda t, h: h.update(temperature=0.0), "temperature = 0.0"),
    "a statistic of another shape": (lambda t, h: t.update({"statistics.sum": torch.zeros(3).double()}), "shapes"),
}  # fmt: skip


@pytest.mark.parametrize("case", FORGED)
def test_a_file_that_does_not_belong_together_is_an_error_that_says_what_is_broken(case: str, tmp_path: Path) -> None:
    """With the digest that belongs to it: a bug of a writer's, not of a disk's."""
    model, path = network(), tmp_path / "file"
    some = torch.arange(8).reshape(2, 4) % 3 > 0
    subset = {
        "0.weight": torch.ones(4, 3, dtype=torch.bool),
        "0.bias": torch.ones(4, dtype=torch.bool),
        "3.weight": some,
    }
    lw.laplace(model, regression(), "gaussian", structure="kron", subset=subset).save(path)
    tensors, header = files.read(path, header_of(path)["schema"])
    change, says = FORGED[case]
    change(tensors, header)
    files.write(path, tensors, header)
    with pytest.raises(lw.errors.InvalidValue, match=rf"file is broken: .*({says}).*; save it again"):
        lw.load(path, model)


# -- classes of one's own ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cauchy(lw.likelihoods.Custom):
    """log p = −log(1 + z²): with a field, and not concave."""

    concave = False
    width: Tensor | float = 1.0

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return -torch.log1p(((y - f) / self.width.to(f)).square()).sum(-1)

    def sample(self, f: Tensor, generator: torch.Generator) -> Tensor:
        return f + torch.randn(f.shape, generator=generator, dtype=f.dtype)

    def mean(self, f: Tensor) -> Tensor:
        return f

    def variance(self, f: Tensor) -> Tensor:
        return torch.ones_like(f)


@dataclass(frozen=True, eq=False)
class Labelled(lw.priors.Gaussian):
    label: str = ""
    table: tuple[float, ...] = ()


@dataclass(frozen=True)
class Mean(lw.curvature.Diagonal):
    """One that treats layers, and needs no decorator."""

    level: int = 0

    def __str__(self) -> str:
        return f"mean {self.level}"


class Trace:
    def __init__(self, tangent: object) -> None:
        self.forward, self.sum = tangent, torch.zeros(1, dtype=torch.float64)

    def observe(self, x: Tensor, y: Tensor, f: Tensor, u: Tensor, column: Tensor) -> None:
        self.sum += u.square().sum()

    def finish(self) -> tuple[dict[str, Tensor], tuple]:
        return {"trace": self.sum}, ()


@dataclass(frozen=True)
class Loose(lw.curvature.Structure):
    """A structure of its own, as CONTRIBUTING.md has it, that no file can name."""

    scale: float = 1.0

    def resolved(self, probe: object, factor: object) -> object:
        return self

    def start(self, tangent: object, *rest: object) -> Trace:
        return Trace(tangent)

    def operator(self, state: lw.curvature.State, weights: Tensor) -> lw.operators.Diagonal:
        return lw.operators.Diagonal((weights @ state.sums["trace"]).reshape(1) * self.scale, state.layout.size)

    def coverage(self, parts: object, tangent: lw.tangent.TangentModel) -> dict[str, str]:
        return dict.fromkeys(tangent.layout.names, "its trace")


@lw.curvature.register
@dataclass(frozen=True)
class Registered(Loose):
    n: int = 1  # a name within that of the bound, "neither"


OWN: dict[str, dict] = {
    "likelihood": {"likelihood": Cauchy(0.7), "structure": "diag"},
    "wrapped": {"likelihood": lw.likelihoods.Weighted(lw.likelihoods.Gaussian(0.3)), "structure": "diag"},
    "prior": {"prior": Labelled(0.3, per="layer", label="mine", table=(1.0, 2.5))},
    "layered": {"structure": Mean(level=3)},
    "structure": {"structure": Registered(0.5, n=3)},
}


@pytest.mark.parametrize("case", OWN)
def test_classes_of_ones_own_are_saved_by_name_and_come_back(case: str, tmp_path: Path) -> None:
    model, options = network(), {"likelihood": "gaussian", **OWN[case]}
    likelihood, (x, y) = options.pop("likelihood"), regression()
    if case == "wrapped":
        y = likelihood.pack(y, torch.rand(6).double() + 0.1)
    la = lw.laplace(model, (x, y), likelihood, **options)
    la.save(tmp_path / "file")
    back = lw.load(tmp_path / "file", twin_of(model))
    assert_same(back, la, draw(4, 3))
    assert type(back.prior) is type(la.prior)
    assert back.state.structure == la.state.structure
    if case == "prior":
        assert (back.prior.label, back.prior.table) == ("mine", (1.0, 2.5))


def test_a_class_that_is_not_there_is_an_error_that_says_which_import_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = network(), tmp_path / "file"
    lw.laplace(model, regression(), Cauchy(), structure="diag").save(path)
    tensors, header = files.read(path, header_of(path)["schema"])
    lw.testing, lw.gp, lw.samplers, lw.truth_bench, lw.variational  # noqa: B018  rooms that a file may be of
    modules = set(sys.modules)
    for module, says in [
        (
            "mypackage.likelihoods",
            r"'Cauchy' of the module mypackage.likelihoods.*; import mypackage.likelihoods first",
        ),
        ("subprocess", "import subprocess first"),
        ("__main__", "define the class again first"),
        ("lapwing", "'Cauchy', which this version of Lapwing does not know"),
    ]:
        files.write(path, tensors, {**header, "likelihood_object": {**header["likelihood_object"], "module": module}})
        with pytest.raises(lw.errors.InvalidValue, match=says):
            lw.load(path, model)
    assert set(sys.modules) == modules  # nothing was imported


def test_what_no_file_can_name_is_refused_before_it_is_written(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Inner(lw.likelihoods.Gaussian):
        pass

    @dataclass(frozen=True, eq=False)
    class Plain(lw.priors.Gaussian):
        call: object = None

    Plain.__qualname__ = "Plain"
    registry.enter("prior", Plain)
    model = network()
    for options, says in [
        ({"structure": Loose()}, "decorate its class with @lw.curvature.register"),
        ({"likelihood": Inner()}, "defined inside a function"),
        ({"prior": Plain(call=print)}, "prior.call is a builtin_function_or_method, which a file cannot hold"),
    ]:
        la = lw.laplace(model, regression(), **{"likelihood": "gaussian", **options})
        with pytest.raises(lw.errors.InvalidValue, match=says):
            la.save(tmp_path / "file")
    assert os.listdir(tmp_path) == []


def test_of_classes_of_one_name_the_latest_counts_if_its_fields_are_the_same() -> None:
    def define(*names: str) -> type:
        cls = dataclass(frozen=True)(type("Cell", (), {"__annotations__": dict.fromkeys(names, int)}))
        cls.__module__ = "notebook"
        registry.enter("structure", cls)
        return cls

    first, again = define("a"), define("a")
    assert registry.name_of("structure", first, "") == ("notebook", "Cell")  # a cell that was run again
    assert registry.find("structure", "notebook", "Cell", "file") is again
    define("a", "b")
    with pytest.raises(lw.errors.InvalidValue, match=r"defined again with the fields \['a', 'b'\].*has \['a'\]"):
        registry.name_of("structure", first, "")
