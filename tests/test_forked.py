"""tests/forked.py: a forked program ends as one of its own process does."""

import subprocess
import sys

import forked
import pytest
from conftest import ROOT, environment, run_python

TELLS = "import os, sys; print(sys.argv[1:], os.getcwd(), os.environ.get('RANK'), __name__, 'é')"
PLACE = "import sys; print(sys.path[0], {!r} in sys.path[1:])".format(str(ROOT / "tests"))


@pytest.mark.skipif(sys.platform != "linux", reason="programs are forked on Linux only")
@pytest.mark.parametrize(("how", "lines"), [
    ("-c", [TELLS]), ("-m", [TELLS]), (".py", [TELLS]), (".py", [PLACE]), ("-m", [PLACE]),
    (".py", ["import sys", "print('told', file=sys.stderr)", "sys.exit(3)"]),
    (".py", ["import sys", "sys.exit('error: why')"]),
    (".py", ["import os, signal", "print(1, flush=True)", "os.kill(os.getpid(), signal.SIGKILL)"]),
])
def test_the_same_comes_back(tmp_path, monkeypatch, how, lines):
    asked, real = [], forked.run
    monkeypatch.setattr(forked, "run", lambda *args, **named: asked.append(1) or real(
        *args, **named))
    text = "\n".join(lines)
    (tmp_path / "program.py").write_text(text, encoding="utf-8")
    start = {"-c": ["-c", text], "-m": ["-m", "program"], ".py": [tmp_path / "program.py"]}[how]
    options = dict(cwd=tmp_path, env=environment(RANK="7"))
    one, other = (run_python(*start, "x", "--y", fork=fork, **options) for fork in (True, False))
    assert asked == [1]
    assert (one.returncode, one.stdout, one.stderr) == (
        other.returncode, other.stdout, other.stderr)


def test_an_error_and_no_end(tmp_path):
    result = run_python("-c", "raise ValueError('why')")
    assert result.returncode == 1 and result.stderr.endswith("\nValueError: why\n")
    with pytest.raises(subprocess.TimeoutExpired):
        run_python("-c", "import time; time.sleep(60)", timeout=0.5)


RANK = """
import os, sys, time
print(os.environ["RANK"], "torch" in sys.modules, __name__, sys.argv[1:], flush=True)
if sys.argv[1] == os.environ["RANK"]:
    os.kill(os.getpid(), 9)
if sys.argv[1] != "none":
    time.sleep(20)  # torchrun breaks if a rank ends while it is about to end that rank
"""


@pytest.mark.skipif(sys.platform != "linux", reason="programs are forked on Linux only")
@pytest.mark.parametrize(("killed", "code"), [("none", 0), ("1", 1)])
def test_ranks_have_pytorch_before_they_import_it(tmp_path, killed, code):
    (tmp_path / "rank.py").write_text(RANK)
    result = run_python("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
                        tmp_path / "rank.py", killed)
    assert result.returncode == code, result.stderr
    said = [line.split(" ", 1) for line in sorted(result.stdout.splitlines())]
    assert {text for _, text in said} == {f"True __main__ ['{killed}']"}
    if code:
        assert "exitcode: -9" in result.stderr
    else:
        assert [rank for rank, _ in said] == ["0", "1"]
