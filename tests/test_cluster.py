"""cluster/slurm.sh: what it starts on the nodes, with stand-ins for Slurm's own commands."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Slurm is for Linux")


@pytest.fixture
def submit(tmp_path):
    """Returns the words that srun is started with on the nodes of a job."""
    for name, does in (("srun", 'printf "%s\\n" "$@"'), ("scontrol", "echo node1; echo node2")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    job = dict(
        SLURM_CPUS_PER_TASK="16",
        SLURM_JOB_NODELIST="node[1-2]",
        SLURM_NNODES="2",
        SLURM_GPUS_ON_NODE="8",
        SLURM_JOB_ID="7",
        PYTHON=sys.executable,
    )

    def run(*words: str) -> list[str]:
        done = subprocess.run(
            ["bash", ROOT / "cluster" / "slurm.sh", *words],
            cwd=ROOT,
            text=True,
            env=os.environ | job | dict(PATH=f"{tmp_path}:{os.environ['PATH']}"),
            capture_output=True,
            check=True,
        )
        return done.stdout.splitlines()

    return run


@pytest.mark.parametrize(
    ("options", "restarts"),
    [([], 0), (["--name", "--resume-not"], 0), (["--resume", "auto"], 3), (["--resume=auto"], 3)],
)
def test_only_what_can_resume_is_restarted(submit, options, restarts):
    """Another script would begin anew, after a wrong option as well."""
    words = submit("02_opt_multi_gpu_ddp.py", "--data", "a b", *options)
    assert f"--max-restarts={restarts}" in words and "--rdzv-endpoint=node1:29400" in words
    script = words.index("02_opt_multi_gpu_ddp.py")
    assert words[script + 1 :] == ["--data", "a b", *options]
