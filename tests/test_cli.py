"""The command line: what a command writes and prints is what the library's call gives; whatever goes wrong is one line
and an exit code, and leaves no half file."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.data import TensorDataset

import lapwing as lw

pytest.importorskip("typer", reason="the command line needs the extra cli")
import typer
from typer.testing import CliRunner

from lapwing import cli
from lapwing.cli.app import COMMANDS, app
from lapwing.cli.examples import Source
from lapwing.cli.output import heard, plain

NETS = """
import os, sys
import numpy, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

print("the user's module prints")
trained = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()

def make():
    print("the factory prints")
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()

def real():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()

def wide():
    return nn.Linear(3, 5).double()

def broken():
    return 1 / 0

def leaves():
    sys.exit("I leave")

def nothing():
    return None

def arrays():
    file = numpy.load("train.npz")
    return torch.tensor(file["x"]), torch.tensor(file["y"])

def loader():
    return DataLoader(TensorDataset(*arrays()), batch_size=8)

def batches():
    x, y = arrays()
    return [(x[i : i + 8], y[i : i + 8]) for i in range(0, len(x), 8)]

def share(rank, size):
    x, y = arrays()
    return [(x[rank::size], y[rank::size])]

class Stopped(TensorDataset):
    pressed = False  # Ctrl-C, once a checkpoint was written

    def __getitem__(self, i):
        if os.path.exists("fit.checkpoint") and not Stopped.pressed:
            Stopped.pressed = True
            raise KeyboardInterrupt
        return super().__getitem__(i)

def stopped():
    return DataLoader(Stopped(*arrays()), batch_size=8)
"""
NET = ("nets:make", "--weights", "net.pt")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder, which is the current one: networks, weights, data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("nets", "unsound"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    Path("nets.py").write_text(NETS)
    torch.save(model().state_dict(), "net.pt")
    x, y = data()
    np.savez("train.npz", x=x.numpy(), y=y.numpy())
    np.savez("test.npz", X=x[:20].numpy() + 0.1, Y=y[:20].numpy())
    return tmp_path


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def data() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(40, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return x, (x[:, 0] > 0).long()


def run(*words: Any, code: int = 0, env: dict[str, str] | None = None) -> Any:
    """A command's result, whose exit code must be this."""
    result = CliRunner().invoke(app, [str(word) for word in words], env=env)
    assert result.exit_code == code, result.output
    return result


def fit(out: str, *more: str, likelihood: str = "categorical", source: str = "train.npz", env: Any = None) -> Any:
    return run("fit", *NET, "--data", source, "--likelihood", likelihood, "--out", out, *more, env=env)


# -- what commands do ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("likelihood", "structure"),
    [("categorical", "full"), pytest.param("classification", "auto", marks=pytest.mark.full)],
)
def test_fit_and_tune_write_what_the_library_makes(folder: Path, likelihood: str, structure: str) -> None:
    fit("net.fit", "--structure", structure, "--prior", "2.5", likelihood=likelihood)
    result = run("tune", *NET, "--fit", "net.fit", "--data", "train.npz", "--out", "net.tuned", "--json")
    la = lw.laplace(model(), data(), likelihood, structure=structure, prior=2.5)
    mine, tuned = lw.load("net.fit", model()), lw.load("net.tuned", model())
    assert_close(mine.log_evidence(), la.log_evidence())
    assert_close(mine.prior.precision, la.prior.precision)
    expected = la.tuned()
    assert_close(tuned.predict(data()[0]).mean, expected.predict(data()[0]).mean)
    assert json.loads(result.stdout)["log_evidence"] == pytest.approx(float(expected.log_evidence()))


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:tuning stopped at a bound")
def test_tuning_on_held_out_data_is_the_librarys(folder: Path) -> None:
    fit("net.fit")
    words = ("--method", "validation", "--held-out", "test.npz", "--inputs", "X", "--target", "Y")
    np.savez("named.npz", X=data()[0].numpy(), Y=data()[1].numpy())
    run("tune", *NET, "--fit", "net.fit", "--data", "named.npz", "--out", "net.tuned", *words)
    held = (data()[0][:20] + 0.1, data()[1][:20])
    expected = lw.laplace(model(), data(), "categorical").tuned("validation", data=held)
    assert_close(lw.load("net.tuned", model()).prior.precision, expected.prior.precision)


@pytest.mark.parametrize("source", ["train.csv", "nets:arrays", "nets:loader", "nets:batches", "nets:share"])
def test_the_source_of_the_data_makes_no_difference(folder: Path, source: str) -> None:
    if source.endswith(".csv"):
        pandas = pytest.importorskip("pandas", reason="tables are read by pandas")
        pandas.DataFrame(data()[0].numpy(), columns=list("abc")).assign(label=data()[1].numpy()).to_csv(
            source, index=False
        )
    fit("net.fit", *(("--target", "label") if source.endswith(".csv") else ()), source=source)
    la = lw.laplace(model(), data(), "categorical")
    assert_close(lw.load("net.fit", model()).log_evidence(), la.log_evidence())


def test_whole_numbers_in_a_table_are_real_inputs_and_real_targets(folder: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="tables are read by pandas")
    x, y = torch.arange(24).reshape(8, 3) % 5, torch.arange(8) % 3
    pandas.DataFrame(x.numpy(), columns=list("abc")).assign(y=y.numpy()).to_csv("whole.csv", index=False)
    run("fit", "nets:real", "--data", "whole.csv", "--target", "y", "--likelihood", "gaussian", "--out", "a.fit")
    inputs, targets = Source("whole.csv", targets=("y",)).labelled("gaussian")
    assert_close(inputs, x.double())
    assert_close(targets, y.double())


def test_columns_are_those_that_are_named(folder: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="tables are read by pandas")
    pandas.DataFrame({"a": [1.0, 2.0], "b": [3.0, 4.0], "c": [5.0, 6.0]}).to_csv("t.csv", index=False)
    x, y = Source("t.csv", ("c", "a"), ("b",)).labelled("gaussian")
    assert_close(x, torch.tensor([[5.0, 1.0], [6.0, 2.0]], dtype=torch.float64))
    assert_close(y, torch.tensor([3.0, 4.0], dtype=torch.float64))


def test_evaluate_gives_the_metrics_of_the_posterior_and_of_the_network(folder: Path) -> None:
    fit("net.fit")
    found = json.loads(run("evaluate", *NET, "--fit", "net.fit", "--data", "test.npz", "--json").stdout)
    x, y = data()[0][:20] + 0.1, data()[1][:20]
    la = lw.laplace(model(), data(), "categorical")
    assert found["examples"] == 20
    assert found["posterior"] == pytest.approx(lw.metrics.summary(la.predict(x), y))
    assert found["network"] == pytest.approx(lw.metrics.summary(model()(x).softmax(-1), y))


@pytest.mark.parametrize("out", ["p.csv", "p.npz", "--json"])
def test_predict_gives_the_fields_of_the_prediction(folder: Path, out: str) -> None:
    fit("net.fit")
    words = ("--json",) if out == "--json" else ("--out", out)
    result = run("predict", *NET, "--fit", "net.fit", "--data", "test.npz", *words)
    if out == "p.csv":
        frame = pytest.importorskip("pandas", reason="tables are written by pandas").read_csv(out)
        found = {"std": np.column_stack([frame["std_0"], frame["std_1"]])}
    else:
        found = dict(np.load(out)) if out == "p.npz" else json.loads(result.stdout)
    expected = lw.laplace(model(), data(), "categorical").predict(data()[0][:20] + 0.1).to_numpy()
    np.testing.assert_allclose(np.asarray(found["std"]), expected["std"], rtol=1e-12)
    assert out == "p.csv" or found.keys() == expected.keys()


def test_predict_leaves_targets_of_a_loader_out(folder: Path) -> None:
    fit("net.fit")
    for source in ("nets:arrays", "nets:loader", "nets:batches"):
        found = json.loads(run("predict", *NET, "--fit", "net.fit", "--data", source, "--json").stdout)
        assert len(found["mean"]) == 40


def test_compare_is_the_librarys(folder: Path) -> None:
    fit("a.fit", "--prior", "1")
    fit("b.fit", "--prior", "7")
    words = ("--fit", "a.fit", "--fit", "b.fit", "--data", "test.npz", "--json")
    found = json.loads(run("compare", *NET, *words).stdout)
    fits = {f"{name}.fit": lw.laplace(model(), data(), "categorical", prior=p) for name, p in (("a", 1.0), ("b", 7.0))}
    expected = lw.compare(fits, (data()[0][:20] + 0.1, data()[1][:20])).to_dict()
    assert list(found["fits"]) == list(expected)
    for name in fits:
        for key in ("log_evidence", "nll"):
            assert found["fits"][name][key] == pytest.approx(expected[name][key])


@pytest.mark.full
def test_the_doctor_prints_its_report(folder: Path) -> None:
    result = run("doctor", *NET, "--likelihood", "categorical", "--data", "train.npz")
    assert result.stdout.startswith(
        "Lapwing doctor: Sequential, 26 parameters, 40 examples, categorical with 2 outputs"
    )
    assert "lw.laplace(model, data, 'categorical'" in result.stdout


def test_the_doctors_commands_run(folder: Path) -> None:
    words = ("--likelihood", "categorical", "--data", "train.npz", "--subset", "2.*", "--memory-budget", "1e9")
    found = json.loads(run("doctor", *NET, *words, "--json").stdout)
    for command in found["commands"]:
        assert found["options"]["structure"].strip("'") in command or " tune " in command
        run(*shlex.split(command)[1:])
    assert run("doctor", *NET, *words).stdout.endswith("".join(f"  {one}\n" for one in found["commands"]))
    assert lw.load("net.tuned", model()).tuning is not None


def test_the_doctors_finding_is_exit_code_1(folder: Path) -> None:
    words = ("doctor", *NET, "--likelihood", "categorical", "--json", "--data")
    np.savez("nan.npz", x=data()[0].numpy() * np.nan, y=data()[1].numpy())
    found = json.loads(run(*words, "nan.npz", code=1).stdout)
    assert found["ok"] is False
    assert any(one["severity"] == "error" and "NaN" in one["message"] for one in found["findings"])


@pytest.mark.skipif(not hasattr(lw.Laplace, "report"), reason="there are no reports yet")
def test_report_writes_a_page(folder: Path) -> None:
    fit("net.fit", "--structure", "kron")
    more = ("--train", "train.npz", "--ood", "train.npz")
    run("report", *NET, "--fit", "net.fit", "--data", "test.npz", "--out", "net.html", *more)
    assert "Certificate of kron against the true curvature" in Path("net.html").read_text(encoding="utf-8")


def test_the_demo_is_that_of_the_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = SimpleNamespace(run=lambda out, seed: print("tables", out, seed))  # the demo itself takes a minute
    monkeypatch.setitem(sys.modules, "lapwing.demo.run", stub)
    assert run("demo", "--out", "there", "--seed", "4").stdout == "tables there 4\n"


# -- what they say -------------------------------------------------------------------------------------------------


def test_stdout_has_the_json_and_nothing_else(folder: Path) -> None:
    result = fit("net.fit", "--json", "--progress")
    assert set(json.loads(result.stdout)) >= {"likelihood", "structure", "examples", "prior", "file"}
    assert "the user's module prints" in result.stderr
    assert "the factory prints" in result.stderr
    assert "full (primal): " in result.stderr  # the bar
    assert "full (primal): " not in fit("net.fit", "--json").stderr


def test_numbers_that_json_has_not_are_null() -> None:
    assert plain({"a": (1, float("nan")), "b": torch.tensor([0.5, -torch.inf])}) == {"a": [1, None], "b": [0.5, None]}


def test_ranks_but_the_first_say_nothing(folder: Path) -> None:
    fit("net.fit")
    assert run("predict", *NET, "--fit", "net.fit", "--data", "test.npz", env={"RANK": "1"}).output == ""
    result = fit("other.fit", "--json", env={"RANK": "1"})
    assert result.stdout == ""
    assert not Path("other.fit").exists()


def test_an_error_of_another_rank_names_it(folder: Path) -> None:
    result = run(*bad("no device"), code=2, env={"RANK": "1"})
    assert result.stderr.startswith("error: rank 1: there is no device")


def test_shares_of_ranks_are_all_examples_each_once(folder: Path) -> None:
    x, _ = data()
    for source in ("train.npz", "nets:arrays", "nets:share"):
        parts = [Source(source).labelled("categorical", SimpleNamespace(rank=r, size=3, alone=False)) for r in range(3)]
        parts = [part[0] if isinstance(part, list) else part for part in parts]
        for r, part in enumerate(parts):
            assert_close(torch.as_tensor(part[0]), x[r::3])
    sys.modules["nets"].arrays = lambda: TensorDataset(*data())
    part = Source("nets:arrays").labelled("categorical", SimpleNamespace(rank=1, size=3, alone=False))
    assert_close(torch.stack([one[0] for one in part]), x[1::3])


def test_completion_knows_the_commands() -> None:
    words = {"_LAPWING_COMPLETE": "complete_bash", "COMP_WORDS": "lapwing ev", "COMP_CWORD": "1"}
    result = CliRunner().invoke(app, [], env=words, prog_name="lapwing")
    assert result.output.split() == ["evaluate"]


def test_the_guide_shows_every_command() -> None:
    guide = (Path(__file__).parents[1] / "docs/guide/command_line.md").read_text(encoding="utf-8")
    assert [f.__name__ for f in COMMANDS if f"lapwing {f.__name__}" not in guide] == []


# -- what goes wrong -----------------------------------------------------------------------------------------------


OPTIONS = {"--data": "train.npz", "--likelihood": "categorical", "--out": "out.fit"}
BAD: dict[str, tuple[str, dict[str, str], str]] = {  # a factory, options, and what the line must say
    "no weights": ("nets:make", {"--weights": "no.pt"}, "there is no file no.pt"),
    "a folder": ("nets:make", {"--weights": "."}, "is a folder"),
    "other weights": ("nets:wide", {"--weights": "net.pt"}, "not a checkpoint of nets:wide"),
    "no checkpoint": (
        "nets:make",
        {"--weights": "nets.py"},
        "nets.py: it holds other things than tensors",
    ),
    "an empty checkpoint": ("nets:make", {"--weights": "empty.pt"}, "empty.pt: it holds other things than tensors"),
    "half a checkpoint": (
        "nets:make",
        {"--weights": "half.pt"},
        "half.pt: it holds other things than tensors",
    ),
    "a whole model": ("nets:make", {"--weights": "model.pt"}, "save model.state_dict()"),
    "more than weights": ("nets:make", {"--weights": "training.pt"}, "['model', 'epoch']"),
    "no safetensors": ("nets:make", {"--weights": "net.safetensors"}, "cannot read the checkpoint"),
    "no colon": ("nets", {}, "module:name"),
    "no module": ("notes:make", {}, "there is no module notes"),
    "a file's name": ("nets.py:make", {}, "give nets, without .py"),
    "no factory": ("nets:mak", {}, "did you mean 'make'?"),
    "a factory that raises": ("nets:broken", {}, "ZeroDivisionError: division by zero (nets.py, line "),
    "a factory that leaves": ("nets:leaves", {}, "SystemExit: I leave"),
    "no network": ("nets:nothing", {}, "nets:nothing returns NoneType"),
    "a module that raises": (
        "unsound:make",
        {},
        "importing unsound raised RuntimeError: oh no (unsound.py, line 3)",
    ),
    "a module that is none": ("unwritten:make", {}, "raised SyntaxError: '(' was never closed (unwritten.py, line 1)"),
    "no data": ("nets:make", {"--data": "no.npz"}, "there is no file no.npz"),
    "data cut short": ("nets:make", {"--data": "cut.npz"}, "cannot read cut.npz"),
    "data of another kind": ("nets:make", {"--data": "nets.py"}, "none of .npz, .csv, .parquet"),
    "no such array": ("nets:make", {"--target": "z"}, "has no 'z'"),
    "no arrays that are known": ("nets:make", {"--data": "odd.npz"}, "--inputs"),
    "a csv that is none": ("nets:make", {"--data": "bad.csv", "--target": "y"}, "cannot read bad.csv"),
    "words in a csv": ("nets:make", {"--data": "words.csv", "--target": "y"}, "column 'b'"),
    "no target": ("nets:make", {"--data": "numbers.csv"}, "--target"),
    "no such column": ("nets:make", {"--data": "words.csv", "--target": "yy"}, "did you mean 'y'?"),
    "names for a loader": ("nets:make", {"--data": "nets:arrays", "--target": "y"}, "name those of a file"),
    "a loader that raises": ("nets:make", {"--data": "nets:broken"}, "nets:broken() raised ZeroDivisionError"),
    "a likelihood": ("nets:make", {"--likelihood": "catgorical"}, "did you mean 'categorical'?"),
    "a structure": ("nets:make", {"--structure": "kro"}, "did you mean 'kron'?"),
    "no folder": ("nets:make", {"--out": "no/out.fit"}, "the folder no does not exist"),
    "no device": ("nets:make", {"--device": "abacus"}, "there is no device 'abacus'"),
    "a number": ("nets:make", {"--every": "often"}, "--every"),
    "an option": ("nets:make", {"--wieghts": "net.pt"}, "--wieghts"),
}


def bad(name: str) -> tuple[str, ...]:
    """A command for a fit that cannot be made."""
    factory, changed, _ = BAD[name]
    return ("fit", factory, *(word for pair in (OPTIONS | changed).items() for word in pair))


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_exit_code_2_and_no_file(folder: Path, name: str) -> None:
    if "csv" in name or "target" in name or "column" in name:
        pytest.importorskip("pandas", reason="tables are read by pandas")
    Path("unsound.py").write_text("def make():\n    pass\nraise RuntimeError('oh\\nno')\n")
    Path("unwritten.py").write_text("make(\n")
    Path("empty.pt").touch()
    Path("half.pt").write_bytes(Path("net.pt").read_bytes()[:900])
    Path("cut.npz").write_bytes(Path("train.npz").read_bytes()[:200])
    Path("bad.csv").write_bytes(b"\xff\xfe\x00\x81" * 50)
    Path("numbers.csv").write_text("a,b,c,y\n1,1,2,0\n3,2,4,1\n")
    Path("words.csv").write_text("a,b,c,y\n1,one,2,0\n3,two,4,1\n")
    Path("net.safetensors").write_bytes(b"none")
    np.savez("odd.npz", images=np.zeros(3), labels=np.zeros(3))
    torch.save(model(), "model.pt")
    torch.save({"model": model().state_dict(), "epoch": 3}, "training.pt")
    before = {path.name for path in folder.iterdir()}
    result = run(*bad(name), code=2)
    lines = [line for line in result.stderr.splitlines() if not line.endswith("prints")]
    assert result.stdout == ""
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert BAD[name][2] in lines[0]
    assert {path.name for path in folder.iterdir()} - {"__pycache__"} == before


def test_a_fit_of_other_weights_is_refused(folder: Path) -> None:
    fit("net.fit")
    other = run("predict", "nets:trained", "--fit", "net.fit", "--data", "test.npz", code=2)
    assert other.stderr.splitlines()[-1].startswith("error: ")


@pytest.mark.parametrize(("out", "say"), [("p.txt", ".npz, .csv, .parquet"), ("p.parquet", "needs pyarrow")])
def test_predictions_that_cannot_be_written_are_refused_before_any_work(
    folder: Path, monkeypatch: pytest.MonkeyPatch, out: str, say: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "pyarrow" else name)
    result = run("predict", "nets:broken", "--fit", "no.fit", "--data", "no.npz", "--out", out, code=2)
    assert say in result.stderr
    assert "ZeroDivisionError" not in result.stderr


@pytest.mark.parametrize("error", [lw.errors.InvalidValue("what\n  got\n  do"), ValueError("what\n  got\n  do")])
def test_an_error_of_several_lines_is_told_in_one(capsys: pytest.CaptureFixture[str], error: Exception) -> None:
    with pytest.raises(typer.Exit) as stopped, heard(debug=False):
        raise error
    assert stopped.value.exit_code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "what got do" in line


def test_debug_shows_the_traceback(folder: Path) -> None:
    result = run(*bad("a factory that raises"), "--debug", code=2)
    assert "Traceback (most recent call last)" in result.stderr
    assert "return 1 / 0" in result.stderr


def test_an_interrupted_fit_goes_on_to_the_same_bits(folder: Path) -> None:
    words = ("fit", *NET, "--data", "nets:stopped", "--likelihood", "categorical", "--structure", "kron")
    words += ("--checkpoint", "fit.checkpoint", "--every", "1", "--out", "net.fit")
    result = run(*words, code=130)
    assert result.stderr.splitlines()[-1].startswith("interrupted: fit.checkpoint keeps what was done")
    assert not Path("net.fit").exists()
    assert Path("fit.checkpoint").exists()
    run(*words)
    assert not Path("fit.checkpoint").exists()
    fit("plain.fit", "--structure", "kron", source="nets:loader")
    assert Path("net.fit").read_bytes() == Path("plain.fit").read_bytes()


def test_without_its_extra_the_command_line_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    for name in [name for name in sys.modules if name.startswith("lapwing.cli.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: lapwing's command line needs typer; pip install 'lapwing[cli]'"
    ]


def test_without_its_extra_the_demo_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    for name in [name for name in sys.modules if name.startswith(("sklearn.", "lapwing.demo"))]:
        monkeypatch.delitem(sys.modules, name)
    assert "pip install 'lapwing[demo]'" in run("demo", code=2).stderr


WAITS = """
import time
from nets import batches

class Slow:
    def __iter__(self):
        for batch in batches():
            yield batch
            open("started", "w").close()
            time.sleep(60)

def slow():
    return Slow()
"""
PROCESS = "import sys, lapwing; assert not {'typer', 'rich'} & {*sys.modules}; from lapwing.cli import main; main()"


def until(there: Callable[[], bool], process: Any) -> None:
    while not there() and process.poll() is None:
        time.sleep(0.02)


@pytest.mark.skipif(os.name != "posix", reason="signals are those of POSIX")
def test_a_process_that_is_interrupted_writes_nothing(folder: Path) -> None:
    """And neither typer nor rich is imported with the library."""
    Path("waits.py").write_text(WAITS)
    words = (*NET, "--data", "waits:slow", "--likelihood", "categorical", "--out", "net.fit")
    process = subprocess.Popen(
        [sys.executable, "-c", PROCESS, "fit", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # though a shell may ignore it
    )
    until(Path("started").exists, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130, err
    assert out == ""
    assert err.splitlines()[-1] == "interrupted: nothing was written"
    assert not [path.name for path in folder.iterdir() if "net.fit" in path.name]


@pytest.mark.full
def test_torchruns_processes_write_one_fit_which_is_that_of_one(folder: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "lapwing.cli", "fit"]
    words = (*NET, "--data", "train.npz", "--likelihood", "categorical", "--structure", "kron", "--out", "two.fit")
    done = subprocess.run([*command, *words, "--json"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["examples"] == 40
    fit("one.fit", "--structure", "kron")
    one, two = (lw.load(path, model()).log_evidence() for path in ("one.fit", "two.fit"))
    assert_close(one, two, rtol=1e-8, atol=1e-8)
