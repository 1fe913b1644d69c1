"""The command gpt-speed: what it needs, its JSON, and the gradients of other people's scripts."""

import inspect
import io
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest
import torch
from conftest import ROOT, environment, load

from gpt_speed import cli, interpreter, machine, numeric, script
from gpt_speed.audit.audit import machine_of
from gpt_speed.cards import CARDS
from gpt_speed.common import UserError, reason_of
from gpt_speed.gradients import judge, render
from gpt_speed.gradients.order import MENDS
from gpt_speed.gradients.run import Answer, coarsest, risks_of

TOYS = ROOT / "tests" / "gradient_toys.py"
SCHEMA = json.loads((ROOT / "gpt_speed" / "schema.json").read_text(encoding="utf-8"))


def gpt_speed(*words, **options) -> subprocess.CompletedProcess:
    """Runs the command in a process of its own; `options` are those of subprocess.run."""
    return subprocess.run(
        [sys.executable, "-m", "gpt_speed", *map(str, words)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=500,
        **options,
    )


# ---- The command line


def test_gpus_are_listed(capsys):
    assert cli.main(["gpus"]) == 0
    table = capsys.readouterr().out
    assert all(f"| {card} | " in table for card in CARDS)


@pytest.mark.parametrize("command", ["audit", "gradients"])
def test_it_needs_the_standard_library_alone(command):
    """It runs with -S, which leaves out site-packages, and -I, which leaves out this folder."""
    code = f"import sys; sys.path.append({str(ROOT)!r}); from gpt_speed.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, command, "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0 and "--python FILE" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["audit"], "which script?"),
        (["gradients"], "which script?"),
        (["audit", "no.py"], "no script no.py"),
        (["audit", "--gpu", "nothing", "setup.py"], "no GPU 'nothing' is known"),
        (["gradients", "{folder}/x.ipynb"], "x.ipynb is a notebook: jupyter nbconvert --to script"),
        (["gradients", "--python", "no/python", "{folder}/x.py"], "no/python can't be started"),
    ],
)
def test_what_is_refused(tmp_path, capsys, monkeypatch, words, says):
    monkeypatch.setattr("gpt_speed.children.on_signals", lambda handler: None)
    for name in ("x.py", "x.ipynb"):
        (tmp_path / name).touch()
    (tmp_path / "setup.py").touch()
    monkeypatch.chdir(tmp_path)
    assert cli.main([word.format(folder=tmp_path) for word in words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and says in err and err.count("\n") == 1


def test_ranks_are_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="without torchrun"):
        cli.gradients(["x.py"], sys.executable, 1)


@pytest.mark.parametrize(
    ("named", "activated", "has_torch", "expected"),
    [
        ("env/python", "/venv", True, "env/python"),
        ("", "/venv", True, os.path.join("/venv", "bin", "python")),
        ("", None, True, sys.executable),
        ("", None, False, "/usr/bin/python"),
    ],
)
def test_whose_python_runs_the_script(monkeypatch, named, activated, has_torch, expected):
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    if activated:
        monkeypatch.setenv("VIRTUAL_ENV", activated)
    monkeypatch.setattr(interpreter, "find_spec", lambda name: has_torch or None)
    monkeypatch.setattr(interpreter.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(interpreter, "ask_machine", lambda python, rates: {})
    assert interpreter.usable_python(named) == expected


def test_a_python_without_pytorch(tmp_path):
    """It says so itself, and the user reads one line."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    (tmp_path / "x.py").touch()
    done = gpt_speed("gradients", "--python", python, tmp_path / "x.py")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"error: {python} has no PyTorch ")


@pytest.mark.parametrize(
    "answer", ["", "a word", "gpt_speed/machine.py {}", "[1, 2]", "17", '{"torch": ']
)
def test_what_answers_is_no_python(monkeypatch, answer):
    monkeypatch.setattr("gpt_speed.children.run_child", lambda *_, **__: (0, answer, ""))
    with pytest.raises(UserError, match="^true is no Python$") as error:
        interpreter.usable_python("true")
    assert error.value.code == 2


# ---- How it ends


def test_a_closed_stdout():
    """The table is written to nowhere."""
    done = gpt_speed("gpus", preexec_fn=lambda: os.close(1))
    assert (done.returncode, done.stderr) == (0, "")


def test_a_terminal_that_lacks_characters(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr("gpt_speed.children.on_signals", lambda handler: None)
    monkeypatch.setitem(cli.COMMANDS, "gpus", cli.Command("", lambda args: print("1.3×") or 0))
    assert cli.main(["gpus"]) == 0 and out.buffer.getvalue() == b"1.3?\n"


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(28, "No space left on device"), "No space left on device"),
        (OSError("the archive is closed"), "the archive is closed"),
    ],
)
def test_why_a_file_is_not_written(error, says):
    """Some errors of Python's own have no text of the system."""
    assert reason_of(error) == says


# ---- The machine


def test_the_machine_is_described():
    facts = machine.machine_facts()
    assert facts["device"] == "cpu" and facts["name"] and facts["memory_total"] > 2**30
    script = load(ROOT / "01_opt_single_gpu.py")
    assert facts["dtype"] == script.best_dtype(machine_device())[0]


def machine_device():
    import torch

    return torch.device("cpu")


@pytest.mark.parametrize(("version", "says"), [("2.3.1", "it takes 2.4"), ("2.4.0", "")])
def test_an_old_pytorch(monkeypatch, version, says):
    monkeypatch.setattr("torch.__version__", version)
    assert says in machine.unsupported() and bool(says) == bool(machine.unsupported())


def test_an_old_python(monkeypatch):
    monkeypatch.setattr(machine.sys, "version_info", (3, 9, 1))
    assert "it takes 3.10 or newer" in machine.unsupported()


@pytest.mark.parametrize(
    ("capability", "hip", "precisions"),
    [
        ((8, 0), None, {"float32", "TF32", "bfloat16"}),
        ((7, 5), None, {"float32", "float16", "bfloat16"}),
        ((6, 1), None, {"float32", "bfloat16"}),
        ((9, 4), "6.3", {"float32", "bfloat16"}),
    ],
)
def test_rates_on_a_gpu_of_the_oldest_pytorch(monkeypatch, capability, hip, precisions):
    """The oldest PyTorch doesn't say itself whether a GPU has TF32."""
    monkeypatch.delattr(torch.cuda, "is_tf32_supported", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(machine, "product_rate", lambda precision: 1e12)
    assert machine.matmul_peak("bfloat16").keys() == precisions


@pytest.mark.parametrize(("is_known", "has_rates"), [(True, False), (False, True)])
def test_rates_are_measured_where_no_datasheet_has_them(monkeypatch, capsys, is_known, has_rates):
    """The machine itself decides, so that it is asked once."""
    monkeypatch.setattr(machine, "machine_facts", lambda: dict(name="here", dtype="float32"))
    monkeypatch.setattr(machine, "matmul_peak", lambda dtype: {dtype: 1e12})
    order = dict(rates=True, known=["here"] if is_known else [])
    monkeypatch.setattr(sys, "argv", ["machine.py", json.dumps(order)])
    machine.main()
    assert ("rates" in json.loads(capsys.readouterr().out)) is has_rates


def test_the_machine_is_asked_once_after_the_runs(monkeypatch):
    orders = []

    def run_child(command, **_):
        orders.append(json.loads(command[-1]))
        return 0, json.dumps(dict(name="Xeon", memory_total=1)), ""

    monkeypatch.setattr("gpt_speed.children.run_child", run_child)
    machine_of("python", dict(device="cpu", memory_total=None))
    assert [order["rates"] for order in orders] == [True]
    assert "NVIDIA H100 80GB HBM3" in orders[0]["known"]


# ---- Numbers


def test_derivatives():
    def cube(x: float) -> float:
        return (x + 2) ** 3

    value, uncertainty = numeric.most_certain(cube, step=0.1, noise=0, enough=1e-6)
    assert value == pytest.approx(12) and uncertainty < 1e-9
    _, uncertainty = numeric.most_certain(cube, step=0.1, noise=1e-3, enough=1e-6)
    assert 0.01 < uncertainty < 0.1


def test_noise_is_at_least_that_of_the_last_digit():
    last_digit = 2.0**-22  # of a float32 between 2 and 4
    assert numeric.rounding_noise([3.0, 3.0, 3.0]) == pytest.approx(last_digit / 12**0.5)
    assert numeric.rounding_noise([3.0, 3.5, 4.0]) == pytest.approx(0.5)


def test_distances_of_tensors():
    own = dict(same=torch.tensor([3.0, 4.0]), turned=torch.tensor([0.0, 2.0]), extra=torch.ones(2))
    other = dict(same=torch.tensor([3.0, 4.0]), turned=torch.tensor([1.0, 0.0]), lost=torch.ones(2))
    distances = numeric.distances(own, other)
    assert distances["same"] == pytest.approx([0, 1, 1])
    assert distances["turned"] == pytest.approx([5**0.5, 0, 2])
    error, cosine, size = distances["lost"]  # counts as 0
    assert (error, cosine) == pytest.approx((1, 0)) and size < 1e-20
    assert distances["extra"][0] > 1e20


@pytest.mark.parametrize("share", [1.0, 0.9])
def test_derivatives_of_a_loss(share):
    """A gradient that is 0.9 of the right one shows as that; weights of 0 are moved, too."""
    weights = dict(a=torch.tensor([0.3, -0.2, 0.5]), zeros=torch.zeros(2))

    def loss_at(offsets: dict) -> float:
        moved = [weight + offsets.get(name, 0) for name, weight in weights.items()]
        return sum((weight.double() + 1).pow(3).sum().item() for weight in moved)

    derivatives = numeric.Derivatives(loss_at, weights)
    assert 0 < derivatives.noise < 1e-4
    for name, weight in weights.items():
        gradient = share * 3 * (weight.double() + 1).square()
        by_losses, uncertainty, by_autograd = derivatives.along(name, gradient)
        assert by_autograd == pytest.approx(share * by_losses, abs=2 * uncertainty, rel=1e-3)
        assert derivatives.along(name, gradient, 1)[0] != by_losses


# ---- What hooks of PyTorch's functions leave


def quotient(dividend: float, divisor: float = 1.0) -> float:
    """Divides."""
    return dividend / divisor


def test_a_hook_ends_also_where_the_function_raises(monkeypatch):
    events = []

    def begin(*args):
        events.append(args)
        return lambda: events.append("end")

    owner = SimpleNamespace(divide=quotient)
    script.hook(owner, "divide", begin)
    assert owner.divide(1, 2) == 0.5
    with pytest.raises(ZeroDivisionError):
        owner.divide(1, 0)
    assert events == [(1, 2), "end", (1, 0), "end"]


def test_a_hooked_function_says_what_it_is(monkeypatch):
    """A script reads the function's own signature, but the compiler finds no marks of its own."""
    monkeypatch.setattr(quotient, "_torchdynamo_inline", quotient, raising=False)
    owner = SimpleNamespace(divide=quotient)
    script.hook(owner, "divide", lambda *_: None)
    assert inspect.signature(owner.divide) == inspect.signature(quotient)
    assert owner.divide.__name__ == "quotient" and owner.divide.__doc__ == "Divides."
    assert not hasattr(owner.divide, "_torchdynamo_inline")


# ---- What is judged


def judged(errors: dict, roundings: dict, type="float32") -> judge.Check:
    tensors = {name: [error, 1.0, 1.0] for name, error in errors.items()}
    rounding = {name: [error, 1.0, 1.0] for name, error in roundings.items()}
    return judge.by_other_run("x", rounding, type, dict(tensors=tensors))


@pytest.mark.parametrize(
    ("error", "rounding", "type", "is_wrong"),
    [
        (5e-7, 3e-7, "float32", False),
        (2e-4, 3e-7, "float32", True),
        (2e-3, 1e-3, "float32", False),  # it sums up what nearly cancels
        (float("nan"), 3e-7, "float32", True),
        (6e-2, 3e-2, "bfloat16", False),
        (0.5, 1e-2, "bfloat16", True),
    ],
)
def test_what_is_wrong(error, rounding, type, is_wrong):
    check = judged(dict(a=1e-8, b=error), dict(a=1e-8, b=rounding), type)
    assert (check.judged, check.of, [*check.wrong]) == (2, 2, ["b"] if is_wrong else [])


def test_a_gradient_that_is_nothing_but_rounding_is_not_judged():
    check = judged(dict(a=1e-7, b=1.3), dict(a=1e-7, b=0.9))
    assert (check.judged, check.of, check.wrong, check.worst) == (1, 2, {}, 1e-7)


@pytest.mark.parametrize(
    ("numbers", "counts", "is_wrong"),
    [
        ([1.0, 1e-3, 1.001], True, False),
        ([1.0, 1e-3, 1.1], True, True),
        ([1.0, 0.1, 1.5], False, False),  # too uncertain
        ([float("nan"), 0.1, 1.0], True, True),
        ([1e-9, 1e-8, 0.0], False, False),  # nothing but rounding
    ],
)
def test_what_numeric_derivatives_tell(numbers, counts, is_wrong):
    check = judge.by_numbers("x", dict(derivatives=dict(a=numbers), weights=3))
    assert (check.judged, check.of, bool(check.wrong)) == (int(counts), 3, is_wrong)


SAME = dict(batch=7, weight_change=1e-7, loss=2.0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, ""),
        (dict(loss=2.000001), ""),
        (dict(batch=8), "the first batch"),
        (dict(weight_change=0.3), "the initial weights"),
        (dict(loss=2.1), "the loss is 2 and 2.1"),
    ],
)
def test_whether_a_script_is_the_same_twice(change, says):
    reason = judge.unlike(SAME, SAME | change, 1e-7)
    assert reason.startswith(says) and bool(reason) == bool(says)


def test_what_is_looked_into():
    facts = dict(checkpoints=2, functions=["Norm"])
    assert len(risks_of(facts, budget=0.5)) == 3
    assert risks_of(dict(checkpoints=0, functions=[]), budget=1.0) == []
    assert coarsest(["float32", "int64", "bfloat16"]) == "bfloat16"


def answer(**changes) -> Answer:
    right = judged(dict(a=1e-7), dict(a=1e-7))
    return Answer(["x.py"], tensors=1, backwards=2, checks=[right], **changes)


def test_the_answer():
    wrong = judged({f"w{number}": 0.1 * number for number in range(1, 9)}, {})
    one = answer(mends=["allow_buffer_reuse"])
    one.checks.append(wrong)
    assert answer().verdict == "right" and one.verdict == "wrong"
    assert Answer(["x.py"]).verdict == "not compared"
    text = render.screen(one)
    assert "`w8`: off by 80%" in text and "and 3 more" in text
    assert MENDS["allow_buffer_reuse"].words in text
    broken = answer()
    broken.checks.append(judged(dict(a=float("nan")), dict(a=1e-7)))
    assert broken.verdict == "wrong"
    for each in (one, broken, answer(notes=["nothing is compiled"])):
        validate(render.as_json(each), "gradients")


def validate(content: dict, kind: str) -> None:
    """Raises an error where JSON isn't as the schema says, or the schema has unknown words."""
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(json.loads(json.dumps(content, allow_nan=False)), SCHEMA)
    jsonschema.validate(content, SCHEMA | {"oneOf": [{"$ref": f"#/$defs/{kind}"}]})


FACTS = dict(
    weights=1,
    backwards=1,
    updates=0,
    autocast=None,
    compiles=1,
    checkpoints=1,
    functions=[],
    types=["float32"],
    batch=7,
    weight_change=1e-7,
    loss=2.0,
    graphs=1,
    budget=1.0,
    derivatives=dict(w=[1.0, 1e-6, 1.0]),
)


@pytest.fixture
def made_up_runs(monkeypatch):
    """Returns a function that replaces the runs of `gpt-speed gradients`: compiled gradients are
    `off` by so much, unless another memory budget is tried; the run that `fails` names fails."""

    def replace(off: float, fails: str) -> None:
        def run(script, what, order):
            if what == fails:
                raise UserError(f"x.py failed, {what}: it broke")
            is_off = order.compiled and order.mend != "memory_budget"
            return FACTS | dict(tensors=dict(w=[off if is_off else 1e-7]))

        monkeypatch.setattr("gpt_speed.gradients.run.Script.run", run)

    monkeypatch.setattr(cli, "usable_python", lambda python: sys.executable)
    monkeypatch.setattr("gpt_speed.children.on_signals", lambda handler: None)
    return replace


@pytest.mark.parametrize("fails", ["with aot_eager", "numeric derivatives"])
def test_a_wrong_gradient_stays_wrong_where_a_further_run_fails(made_up_runs, capsys, fails):
    """The exit code is that of a wrong gradient, and a note says what failed."""
    made_up_runs(0.5, fails)
    assert cli.main(["gradients", "--json", str(TOYS)]) == 4
    content = json.loads(capsys.readouterr().out)
    validate(content, "gradients")
    assert content["verdict"] == "wrong" and content["mends"] == [MENDS["memory_budget"].words]
    assert [note for note in content["notes"] if "it broke" in note] == content["notes"]


def test_a_further_run_that_fails_is_an_error_where_nothing_is_wrong(made_up_runs, capsys):
    made_up_runs(1e-7, "numeric derivatives")
    assert cli.main(["gradients", str(TOYS)]) == 1
    assert "it broke" in capsys.readouterr().err


# ---- Whole runs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("toy", "code", "says"),
    [
        ("compiled", 0, "right"),
        ("compiled_in_place", 0, "right"),
        ("compiled_loss", 0, "right"),
        ("autocast", 0, "right"),
        ("checkpointed", 0, "right"),
        ("memory_budget", 4, "memory_budget"),
        ("nested_region", 4, "allow_buffer_reuse"),
        ("checkpointed_with_other_masks", 4, "wrong"),
        ("wrong_norm", 4, "wrong"),
        ("plain", 0, "nothing is compiled"),
        ("drawn_from_the_clock", 0, "the first batch is another one"),
        ("closure", 0, "closure"),
    ],
)
def test_gradients_of_a_script(toy, code, says):
    if toy == "nested_region" and not hasattr(torch.compiler, "nested_compile_region"):
        pytest.skip("needs a newer PyTorch")
    done = gpt_speed("gradients", "--json", TOYS, toy)
    assert done.returncode == code, done.stderr
    content = json.loads(done.stdout)
    validate(content, "gradients")
    verdict = {4: "wrong", 0: "right" if says == "right" else "not compared"}[code]
    assert content["verdict"] == verdict
    assert f"{TOYS} runs until its first update" in done.stderr.splitlines()[0]
    expected = MENDS[says].words if says in MENDS else says
    texts = [verdict, *content["mends"], *content["notes"]]
    assert any(expected in text for text in texts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("toy", "code", "says"),
    [
        ("by_hand", 3, "made no update by an optimizer of torch.optim"),
        ("fails", 1, "failed, uncompiled: ValueError: the real reason\n"),
    ],
)
def test_a_script_without_an_update(toy, code, says):
    done = gpt_speed("gradients", TOYS, toy)
    assert done.returncode == code and says in done.stderr and done.stdout == ""


@pytest.mark.slow
def test_packages_beside_gpt_speed_are_none_of_the_scripts(tmp_path):
    """It may be installed in another environment, with other versions of what PyTorch imports."""
    folder = copy_of_package(tmp_path)
    for package in ("sympy", "triton"):
        (folder / f"{package}.py").write_text("raise RuntimeError(__file__)")
    report = tmp_path / "report.json"
    order = json.dumps(dict(report=str(report), compiled=True))
    child = folder / "gpt_speed" / "gradients" / "child.py"
    command = [sys.executable, child, order, TOYS, "compiled"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert json.loads(report.read_text())["how"] == "kept", done.stderr


@pytest.mark.slow
def test_the_wheel(tmp_path):
    """It is small, needs nothing, and audits from another folder."""
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "wheel", *offline, "-w", tmp_path, copy_of_package(tmp_path)], check=True)
    (wheel,) = tmp_path.glob("gpt_speed-*.whl")
    assert wheel.stat().st_size < 300_000
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = next(name for name in names if name.endswith("METADATA"))
        needs = archive.read(metadata).decode()
    assert f"\nVersion: {newest_in_changelog()}\n" in needs
    needs = [line for line in needs.splitlines() if line.startswith("Requires-Dist")]
    assert all("; extra == " in need for need in needs)
    assert {"gpt_speed/cards.json", "gpt_speed/gains.json", "gpt_speed/schema.json"} < {*names}
    folder = tmp_path / "environment"
    subprocess.run([*pip, "install", "--no-deps", "--target", folder, wheel], check=True)
    toys = ROOT / "tests" / "audit_toys.py"
    done = subprocess.run(
        [sys.executable, "-m", "gpt_speed", "audit", "--json", toys, "fast"],
        cwd=tmp_path,
        env=environment(PYTHONPATH=str(folder)),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    validate(json.loads(done.stdout), "audit")
    assert (tmp_path / "audit-audit_toys.md").exists()


def test_one_version():
    """The package, the newest changes and the citation have the same one."""
    versions = {
        re.search(pattern, (ROOT / name).read_text(), re.MULTILINE)[1]
        for name, pattern in (
            ("pyproject.toml", '^version = "([0-9.]+)"'),
            ("CITATION.cff", "^version: ([0-9.]+)$"),
        )
    }
    assert versions == {newest_in_changelog()}


def newest_in_changelog() -> str:
    """Returns the version that the first section of CHANGELOG.md is of."""
    return re.search("^## ([0-9.]+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]


def copy_of_package(folder: Path) -> Path:
    """Returns a folder with what a wheel is made of, so that nothing is left in this one."""
    copy = folder / "source"
    shutil.copytree(ROOT / "gpt_speed", copy / "gpt_speed")
    for path in (
        ROOT / "pyproject.toml",
        ROOT / "README.md",
        ROOT / "LICENSE",
        *ROOT.glob("requirements*.txt"),
    ):
        shutil.copy(path, copy)
    return copy
