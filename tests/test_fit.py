"""The batch size that fits a GPU, by prediction before a study; what to type if memory runs out
all the same."""

import os
import re
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT
from made_up import CPU, FLOAT32, MACHINE, Children, plan_of, setup_of, write_record
from test_run import Toy

from bench.catalogue import STAGES
from bench.common import relative
from bench.measure import lengths, run
from bench.measure.lengths import fitting
from bench.measure.machine import compiler_folder, missing_here
from bench.measure.run import see_build
from bench.report.pictures import place_of
from bench.report.tables import text_of
from bench.studies import doctor
from bench.studies.doctor import Doctor, has_compiler
from bench.studies.fits import Fits


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """A GPU with so much free memory; the scripts' own batch sizes are 8 and, of b, 32."""
    children = Children(monkeypatch, tmp_path / "build", MACHINE)
    children.answers |= dict(free_memory=[24_100])
    monkeypatch.setattr(lengths, "configurations", lambda runs, plan, setup: {
        each.name: dict(model="gpt2", batch_size=32 if each.name == "b" else 8,
                        context_length=256, learning_rate=1e-3, compile=False) for each in runs})
    setup = setup_of(tmp_path / "results", MACHINE)
    setup.batches = None  # not looked at yet
    setup.data = tmp_path / "data"
    setup.data.mkdir()
    (setup.data / "meta.json").write_text('{"tokens": {"train": 4096}}')
    for name in "ab":
        (tmp_path / f"{name}.py").write_text(name)

    def plan(**settings):
        made = plan_of("a", "b", **settings)
        made.runs = [each.but(script=tmp_path / f"{each.name}.py") for each in made.runs]
        return made

    def batches() -> list[tuple]:
        """Of every start so far: (name, batch size or None)."""
        found = []
        for call in children.calls:
            words = call.command
            name = words[words.index("--name") + 1]
            found.append((name, int(words[words.index("--batch-size") + 1])
                          if "--batch-size" in words else None))
        children.calls.clear()
        return found

    return SimpleNamespace(children=children, setup=setup, plan=plan, batches=batches)


@pytest.mark.parametrize(("free", "batches"), [
    ([80_000], {}), ([39_900], {}), ([24_100], {"8": 4, "32": 16}), ([15_800], {"8": 4, "32": 16}),
    ([11_900], {"8": 2, "32": 8}), ([7_700], {"8": 1, "32": 4}),
    ([24_100 - 12_200], {"8": 2, "32": 8}),  # other programs have half of it
    ([39_900, 11_900], {"8": 2, "32": 8}),  # the smaller one of two
    ([2_500], {"8": 1, "32": 1}),
])
def test_what_fits(gpu, free, batches, capsys):
    """By the committed predictions of 00 and of rung 10."""
    gpu.children.answers["free_memory"] = free
    assert fitting(gpu.setup) == batches == fitting(gpu.setup)
    told = capsys.readouterr().err
    assert told.count(" GB of the GPU's memory are free: by prediction, ") == bool(batches)
    assert ("not even that fits" in told) == (free == [2_500])


def test_one_that_is_chosen_stays(gpu, monkeypatch):
    gpu.setup.options = ["--batch-size=64"]
    assert fitting(gpu.setup) == {} and gpu.children.asked == []
    cpu = setup_of(gpu.setup.results)
    cpu.batches = None
    assert fitting(cpu) == {} and gpu.children.asked == []


def test_what_can_not_be_predicted_is_told(gpu, monkeypatch, capsys):
    def predict(*_):
        raise lengths.UserError("what it takes can't be predicted: why")

    monkeypatch.setattr(lengths, "predict", predict)
    assert fitting(gpu.setup) == {}
    assert "isn't known: what it takes can't be predicted: why" in capsys.readouterr().err


def test_a_study_fits_its_runs(gpu):
    """In tables and pictures, too; resumed with the same ones, though less is free then."""
    def study():
        return Toy(gpu.plan(rounds=1))

    _, (measured,) = run.run_study(study(), gpu.setup)
    assert gpu.batches() == [("a", 4), ("b", 16)]
    assert "batch size 4 in place of 8, batch size 16 in place of 32" in text_of(study(), measured)
    assert place_of(measured).endswith(", batch size 4 and 16")
    gpu.setup.batches, gpu.children.answers["free_memory"] = None, [7_700]
    second = Toy(gpu.plan(rounds=2))
    run.run_study(second, gpu.setup, resume=True)
    assert gpu.batches() == [("a", 4), ("b", 16)]
    run.run_study(study(), gpu.setup)
    assert gpu.batches() == [("a", 1), ("b", 4)]
    full = gpu.plan(rounds=1, until_full=True)
    run.run_study(Toy(full), gpu.setup)
    assert gpu.batches() == [("a", None), ("b", None)]


def test_published_sizes_stay_when_less_is_free(gpu):
    gpu.children.answers["free_memory"] = [80_000]
    run.run_study(Toy(gpu.plan(rounds=1)), gpu.setup)
    gpu.setup.batches, gpu.children.answers["free_memory"] = None, [7_700]
    run.run_study(Toy(gpu.plan(rounds=2)), gpu.setup, resume=True)
    assert gpu.batches() == [("a", None), ("b", None)] * 2


def test_00_is_predicted_without_options_of_the_compiler(gpu, monkeypatch):
    """It has none, and would refuse them."""
    asked, predict = [], lengths.predict

    def spy(scripts, script, options, *rest):
        asked.append(options)
        return predict(scripts, script, ["--model", "gpt2"], *rest)

    monkeypatch.setattr(lengths, "predict", spy)
    gpu.setup.options = ["--no-compile"]
    assert fitting(gpu.setup)
    assert ["--no-compile" in options for options in asked] == [False, True]


def out_of_memory(times: list, text: str = "", **record):
    """A child whose memory runs out as long as `times` aren't used up."""
    def child(command, environment):
        folder, name, seed = (command[command.index(option) + 1]
                              for option in ("--results-dir", "--name", "--seed"))
        failed = bool(times) and times.pop()
        error = dict(status="out_of_memory", error="out of memory: try --batch-size 1")
        write_record(Path(folder), name, seed=int(seed), **(error | record if failed else {}))
        return int(failed), "", text * failed

    return child


def test_out_of_memory_says_what_to_type(gpu, capsys):
    """The run has failed, the others go on; nothing starts by itself."""
    gpu.children.does["b"] = out_of_memory([True])
    _, (measured,) = run.run_study(Toy(gpu.plan(rounds=2)), gpu.setup)
    assert gpu.batches() == [("a", 4), ("b", 16), ("a", 4)] and run.failed(measured)
    assert "python measure.py toy -- --batch-size" in capsys.readouterr().out


def test_what_make_bench_asks(gpu, capsys):
    def answer(stage: str) -> str:
        gpu.setup.args = SimpleNamespace(stage=stage)
        return Fits().answer(gpu.setup)

    assert [answer(stage) for stage in ("00", "01", "02")] == [
        "00_orig.py --batch-size 4", "01_opt_single_gpu.py --batch-size 16",
        "02_opt_multi_gpu_ddp.py --batch-size 16"]
    gpu.setup.options = ["--batch-size=3"]
    gpu.setup.batches = None
    assert answer("01") == "01_opt_single_gpu.py"


@pytest.mark.parametrize(("load", "cores", "told"), [(1.4, 2, 0), (1.6, 2, 1), (1.6, 8, 0)])
def test_make_bench_says_that_other_programs_run(gpu, monkeypatch, capsys, load, cores, told):
    """Once, before the first script."""
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0), raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    for stage in ("00", "01"):
        gpu.setup.args = SimpleNamespace(stage=stage)
        Fits().answer(gpu.setup)
    assert capsys.readouterr().err.count(f"Other programs run (load {load} on {cores} co") == told


@pytest.mark.parametrize(("free", "batches"), [([15_900], (4, 16)), ([14_900], (2, 8))])
def test_make_bench_composes_float16_on_an_old_gpu(gpu, monkeypatch, tmp_path, capsys, free,
                                                   batches):
    """01 and 02 in build/, with what they would find beside them; as large as that script may be,
    by the committed prediction."""
    monkeypatch.setattr("bench.studies.fits.BUILD", tmp_path / "build")
    gpu.setup.machine = gpu.setup.machine | FLOAT32 | dict(
        capability="7.5", dtype_reason="compute capability 7.5 has none; how")
    gpu.children.answers["free_memory"] = free
    for stage, first, batch in (("00", "00_orig.py", batches[0]), ("01", "GradScaler", batches[1]),
                                ("02", "init_process_group", batches[1])):
        gpu.setup.args = SimpleNamespace(stage=stage)
        words = shlex.split(Fits().answer(gpu.setup))
        assert words[-2:] == ["--batch-size", str(batch)]
        if stage == "00":
            assert words[0] == first
            continue
        name = lengths.fast_here(gpu.setup)
        assert Path(words[0]).stem == f"{STAGES[stage][:-3]}-{name}" and name == "precision-fp16"
        assert first in Path(words[0]).read_text() and "GradScaler" in Path(words[0]).read_text()
        assert [Path(words[k]).resolve() for k in (2, 4)] == [
            gpu.setup.data.resolve(), gpu.setup.results.resolve()]
        assert f"with precision-fp16, as {words[0]}: compute capability 7.5 has none\n" in (
            capsys.readouterr().err)


def test_make_bench_starts_what_fits_answers(tmp_path):
    """Here 000.py for 00; a script that fails ends it. A stub in place of Python."""
    calls, stub = tmp_path / "calls", tmp_path / "python"
    stub.write_text(f"""#!/bin/sh
        echo "$@" >> {calls}
        case "$*" in
            "measure.py fits 02"*) exit 1 ;;
            "measure.py fits 0"*) echo 0$3.py --batch-size 4 ;;
            "0$FAILS.py"*) exit 1 ;;
        esac
        """)
    stub.chmod(0o755)
    for fails, code, started in (("", 0, ["000.py", "001.py", "02_opt_multi_gpu_ddp.py"]),
                                 ("01", 2, ["000.py", "001.py"])):
        calls.unlink(missing_ok=True)
        done = subprocess.run(["make", "bench", f"PYTHON={stub}"], cwd=ROOT, capture_output=True,
                              text=True, env=os.environ | dict(MAKEFLAGS="", FAILS=fails))
        text = calls.read_text()
        assert done.returncode == code, done.stderr
        assert [name for name in ("000.py", "001.py", "02_opt_multi_gpu_ddp.py") if
                name in text] == started
        assert ("plot_results.py" in text) is (code == 0)


@pytest.mark.parametrize(("capability", "bfloat16"), [("7.5", False), ("8.6", True)])
def test_doctor(gpu, monkeypatch, capability, bfloat16):
    """One screen: what the machine is, what it trains in, what fits."""
    gpu.setup.machine = gpu.setup.machine | dict(capability=capability) | (
        {} if bfloat16 else FLOAT32)
    monkeypatch.setattr(doctor, "has_compiler", lambda gpu: True)
    lines = Doctor().answer(gpu.setup).splitlines()
    shown = {line[:15].strip(): line[15:] for line in lines}
    assert shown["batch size"] == "4 in place of 8, 16 in place of 32"
    assert shown["free memory"] == "23.5 GB" and capability in shown["GPU"]
    assert shown["trains in"] == ("bfloat16: compute capability 8.0" if bfloat16 else
                                  "float32: this CPU has no bfloat16 units; make bench and stages"
                                  " do so by themselves")
    assert "expected" not in shown  # this card isn't known
    assert shown["tokens"].startswith("4,096 to train on") and shown["torch.compile"] == "works"
    for damaged in ("[]", "[" * 100_000, '{"tokens": {"train": 0}}'):
        (gpu.setup.data / "meta.json").write_text(damaged)
        assert "meta.json is damaged (" in Doctor().answer(gpu.setup)
    assert len(lines) < 20


def test_doctor_tries_the_compiler_where_a_look_does_not_find_one(gpu, monkeypatch):
    """PyTorch itself tells why it doesn't work, or finds one all the same."""
    asked = gpu.children.answers
    monkeypatch.setattr(doctor, "has_compiler", lambda gpu: False)
    for error, told in ((None, "works"), ("no compiler", "doesn't work")):
        asked["compile_error"] = error
        lines = Doctor().answer(gpu.setup).splitlines()
        assert f"torch.compile  {told}" in lines
        assert any("(no compiler)" in line for line in lines) is bool(error)
    monkeypatch.setattr(doctor, "has_compiler", lambda gpu: True)
    for unfit in (dict(capability="6.1"), dict(gpu_needs="kernels")):  # whatever compiler is there
        gpu.setup.machine = MACHINE | unfit
        assert "torch.compile  doesn't work" in Doctor().answer(gpu.setup).splitlines()
    monkeypatch.undo()
    source = {"CC": "no-such-compiler", "CXX": "no-such-compiler"}
    for name, value in source.items():
        monkeypatch.setenv(name, value)
    assert not has_compiler(gpu=False) and not has_compiler(gpu=True)


@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
def test_a_compiler_without_python_s_headers_is_none(monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: dict(include=str(tmp_path)))
    assert not has_compiler(gpu=False)
    (tmp_path / "Python.h").touch()
    assert has_compiler(gpu=False)


@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
@pytest.mark.parametrize(("variable", "name", "told"), [
    ("TORCHINDUCTOR_CACHE_DIR", "file/below", "which needs another folder, since {} can't be"
     " written (Not a directory): TORCHINDUCTOR_CACHE_DIR names it (why)"),
    ("TORCHINDUCTOR_CACHE_DIR", "a b", "which needs a folder without a space in its path:"
     " TORCHINDUCTOR_CACHE_DIR names {} (why)"),
    ("TMPDIR", "a b", "which needs a folder without a space in its path: TMPDIR names {} (why)")])
def test_doctor_names_a_folder_that_does_not_serve(tmp_path, monkeypatch, capsys, variable, name,
                                                   told):
    """And no compiler, of which there is one. For a GPU spaces are no fault."""
    (tmp_path / "file").touch()
    folder = tmp_path / name
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv(variable, str(folder))
    if variable == "TMPDIR":
        folder.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(folder))  # as Python finds it
        see_build()
        assert f"on a CPU with a space in the path {folder}\n" in capsys.readouterr().err
    assert not has_compiler(gpu=False)
    (line,) = (line for line in missing_here(CPU, "why") if line.startswith("torch.compile, "))
    assert line.endswith(told.format(folder if " " in name else relative(folder)))
    assert (compiler_folder(gpu=True) is None) == (" " in name)


def test_doctor_tells_what_is_expected(gpu, monkeypatch):
    """Of the batch size that fits now."""
    monkeypatch.setattr(doctor, "has_compiler", lambda gpu: True)
    gpu.setup.machine = gpu.setup.machine | dict(name="NVIDIA GeForce RTX 3090")
    (line,) = (line for line in Doctor().answer(gpu.setup).splitlines()
               if line.startswith("expected"))
    assert "01 at batch 16: " in line and re.search(r", 15 epochs in \d+\.\d minutes, by", line)
    gpu.setup.machine = gpu.setup.machine | FLOAT32 | dict(name="Tesla T4", capability="7.5")
    (line,) = (line for line in Doctor().answer(gpu.setup).splitlines()
               if line.startswith("expected"))
    assert "01 with precision-fp16 at batch 16: " in line
