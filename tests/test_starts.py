"""Where compiled code is kept, and when a start finds it: PyTorch's cache, which technique 14 has
take a custom autograd.Function, must tell edits of it apart."""

import json
import os
import platform
import re
import stat
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, STAGES, TINY, environment, small, write_tokens

SWITCH = "TORCHINDUCTOR_AUTOGRAD_CACHE_ALLOW_CUSTOM_AUTOGRAD"
FOLDER = "TORCHINDUCTOR_CACHE_DIR"

# Trains nothing: compiles the head's loss alone, which takes seconds, and compares it to eager.
PROGRAM = """
import importlib.util, json, sys
import torch

spec = importlib.util.spec_from_file_location("script", sys.argv[1])
script = importlib.util.module_from_spec(spec)
sys.modules["script"] = script
spec.loader.exec_module(script)
script.set_up_pytorch()
assert "torch._functorch.config" not in sys.modules  # which reads the switch once
from torch._dynamo.utils import counters

def gradients(compute):
    torch.manual_seed(1)
    N = int(sys.argv[2])
    x_NC, weight_VC = torch.randn(N, 16), torch.randn(64, 16)
    targets_N = torch.randint(64, (N,))
    tensors = [x_NC.requires_grad_(), weight_VC.requires_grad_()]
    loss = compute(*tensors, targets_N)
    loss.backward()
    return [loss.detach(), *(tensor.grad for tensor in tensors)]

def compute(x_NC, weight_VC, targets_N):
    return script.ChunkedLoss.apply(x_NC, weight_VC, targets_N)

pairs = zip(gradients(torch.compile(compute)), gradients(compute))
print(json.dumps(dict(
    hits=counters["aot_autograd"]["autograd_cache_hit"],
    misses=counters["aot_autograd"]["autograd_cache_miss"],
    bypasses=counters["aot_autograd"]["autograd_cache_bypass"],
    off=max(((a - b).norm() / b.norm()).item() for a, b in pairs),
)))
"""

# What each edit replaces in 01. All of them change the loss or a gradient a lot.
EDITS = {
    "forward": ("return torch.stack(losses).sum()", "return 3 * torch.stack(losses).sum()"),
    "backward": ("return gradient * x_gradient_NC,", "return 3 * gradient * x_gradient_NC,"),
    "gradient": (
        "gradient_MV = (exp_MV / sum_M1 - one_hot_MV)",
        "gradient_MV = 5 * (exp_MV / sum_M1 - one_hot_MV)",
    ),
    "constant": ("max(1024, math.ceil(len(targets_N) / 8))", "SIZE"),
    "function": (
        "logits_MV = products_MV.float()",
        "logits_MV = scaled(products_MV).float()",
    ),
}
ADDED = "SIZE = {size}\n\n\ndef scaled(x):\n    return {factor} * x\n\n\nclass ChunkedLoss("


def edited(folder: Path, name: str, *edits: str, size: int = 1024, factor: int = 1) -> Path:
    """A copy of 01 with these edits, a constant and a function that two of them use."""
    text = (ROOT / "01_opt_single_gpu.py").read_text()
    for edit in edits:
        old, new = EDITS[edit]
        assert text.count(old) == 1
        text = text.replace(old, new)
    script = folder / f"{name}.py"
    script.write_text(text.replace("class ChunkedLoss(", ADDED.format(size=size, factor=factor)))
    return script


@pytest.mark.slow
def test_no_edit_takes_what_was_compiled_of_another(tmp_path):
    """Each of them, a script with another class of the same name, is compiled anew, and computes
    what it does uncompiled; a second start of the same text compiles nothing."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    def start(script: Path, tokens: int = 40) -> dict:
        done = subprocess.run(
            [sys.executable, program, script, str(tokens)],
            capture_output=True,
            text=True,
            env=environment(**{FOLDER: str(tmp_path / "cache")}),
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def is_compiled(*arguments, tokens: int = 40, **settings) -> None:
        answer = start(edited(tmp_path, *arguments, **settings), tokens)
        assert (answer["hits"], answer["misses"], answer["bypasses"]) == (0, 1, 0), arguments
        assert answer["off"] < 1e-5, arguments

    is_compiled("first")
    is_compiled("longer", tokens=48)  # as another context length has it
    for name in ("forward", "backward", "gradient"):
        is_compiled(name, name)
    is_compiled("large-chunks", "constant", size=20)  # a constant that it reads, and that constant
    is_compiled("small-chunks", "constant", size=14)
    is_compiled("twice", "function", factor=2)  # a function that it calls, and that function
    is_compiled("thrice", "function", factor=3)
    assert (tmp_path / "cache" / "aotautograd").is_dir()  # which studies delete for a cold start
    again = start(edited(tmp_path, "again"))
    assert (again["hits"], again["misses"], again["bypasses"]) == (1, 0, 0)
    assert again["off"] < 1e-5


@pytest.mark.parametrize("stage", STAGES[1:])
@pytest.mark.parametrize(("given", "expected"), [(None, True), ("0", False)])
def test_the_switch_is_set_before_it_is_read(stage, given, expected):
    """PyTorch reads it when torch._functorch is first imported; a user's own value stays."""
    program = (
        f"import runpy, sys; script = runpy.run_path({str(ROOT / f'{stage}.py')!r})\n"
        "assert 'torch._functorch.config' not in sys.modules\n"
        "script['set_up_pytorch']()\n"
        "import torch._functorch.config as config\n"
        "print(config.autograd_cache_allow_custom_autograd_functions)\n"
    )
    env = {name: value for name, value in environment().items() if name != SWITCH}
    if given:
        env[SWITCH] = given
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env)
    assert done.stdout == f"{expected}\n", done.stderr


# ---- The folder of compiled code


@pytest.fixture(params=STAGES[1:])
def script(request, stages, monkeypatch):
    monkeypatch.delenv(FOLDER, raising=False)
    return stages[request.param]


@pytest.mark.parametrize("variable", ["XDG_CACHE_HOME", "HOME"])
def test_compiled_code_lies_in_the_users_cache(script, monkeypatch, tmp_path, variable):
    """For each machine apart, and readable for its user alone."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    caches = tmp_path if variable == "XDG_CACHE_HOME" else tmp_path / ".cache"
    for _ in range(2):  # it may be there already
        monkeypatch.delenv(FOLDER, raising=False)
        script.make_compiler_folder()
        assert os.environ[FOLDER] == str(caches / "gpt-speed" / platform.node())
    assert stat.S_IMODE((caches / "gpt-speed").stat().st_mode) == 0o700
    assert not [*(caches / "gpt-speed").iterdir()]  # its trial is gone


def test_a_folder_of_the_users_choice_stays(script, monkeypatch, tmp_path):
    home, chosen = tmp_path / "home", tmp_path / "some" / "where"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    monkeypatch.setenv(FOLDER, str(chosen))
    script.make_compiler_folder()
    assert os.environ[FOLDER] == str(chosen) and chosen.is_dir() and not home.exists()


def full_disk(*_, **__):
    raise OSError(28, "No space left on device")


def no_home():
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.parametrize("fault", ["a file in its place", "a full disk", "no home"])
def test_pytorchs_own_folder_stays_where_another_cant_be(script, monkeypatch, tmp_path, fault):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if fault == "a file in its place":
        (tmp_path / "gpt-speed").touch()
    elif fault == "a full disk":
        monkeypatch.setattr(script.tempfile, "TemporaryFile", full_disk)
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(script.Path, "home", no_home)
    script.make_compiler_folder()
    assert FOLDER not in os.environ


# ---- Short runs


@pytest.mark.parametrize(
    ("device", "steps", "is_watched", "lines"),
    [
        ("cpu", 69, True, 1),
        ("cpu", 70, True, 0),
        ("cpu", 69, False, 0),
        ("cuda", 1, True, 0),
        ("mps", 1, True, 0),
    ],
)
def test_short_runs_get_a_hint(stages, monkeypatch, capsys, device, steps, is_watched, lines):
    """Only in a terminal: children of a study have none."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_watched)
    stages["01_opt_single_gpu"].hint_at_short_run(steps, torch.device(device))
    assert capsys.readouterr().out.count("--no-compile") == lines


@pytest.mark.parametrize(
    ("stage", "option"),
    [
        ("00_orig", []),
        ("01_opt_single_gpu", ["--no-compile"]),
        pytest.param("01_opt_single_gpu", ["--compile"], marks=pytest.mark.slow),
    ],
)
def test_the_parts_of_a_start_add_up(tmp_path, stage, option):
    script = tmp_path / f"{stage}.py"
    script.write_text(small((ROOT / script.name).read_text()))
    folders = ["--data", write_tokens(tmp_path / "tokens"), "--results-dir", tmp_path / "results"]
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "starts.py", script, *TINY, *option, *folders],
        capture_output=True,
        text=True,
        env=environment(**{FOLDER: str(tmp_path / "cache")}),
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if re.fullmatch(r".{28} *-?\d+\.\d\d", line)]
    seconds = {line[:28].strip(): float(line[28:]) for line in lines}
    total = seconds.pop("all")
    assert sum(seconds.values()) == pytest.approx(total, abs=0.1)
    assert min(seconds.values()) > -0.1 and seconds["first step"] > 0
    compiled = {"Dynamo", "AOTAutograd, caches", "Inductor", "C++ or Triton"}
    assert compiled & seconds.keys() == (compiled if stage != "00_orig" else set())
    assert all((seconds[part] > 0.1) == (option == ["--compile"]) for part in compiled & {*seconds})


def test_the_pages_table_is_the_median_of_its_records():
    page = (ROOT / "docs" / "lab-notebook.md").read_text()
    section = page.split("### Where a start goes\n")[1].split("\n#")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    columns = {  # script, whether it is the earlier one, cache
        "`00`": ("00_orig", False, "warm"),
        "`01`, cold": ("01_opt_single_gpu", False, "cold"),
        "`01`, warm": ("01_opt_single_gpu", False, "warm"),
        "earlier `01`, warm": ("01_opt_single_gpu", True, "warm"),
        "`compile-blocks`, cold": ("compile-blocks", False, "cold"),
        "`compile-blocks`, warm": ("compile-blocks", False, "warm"),
    }
    assert head == ["seconds", *columns]
    starts: dict = {column: [] for column in columns.values()}
    for line in (ROOT / "docs" / "starts.jsonl").read_text().splitlines():
        start = json.loads(line)
        key = start["script"], start["commit"] == "6082aef7", start["cache"]
        if start["options"].startswith("--model gpt2 ") and key in starts:
            starts[key].append(start["seconds"])
    assert {len(same) for same in starts.values()} == {5}
    for part, *cells in rows:
        for column, cell in zip(columns.values(), cells, strict=True):
            seconds = [start.get(part) for start in starts[column]]
            assert cell == ("" if None in seconds else f"{max(0, statistics.median(seconds)):.1f}")
