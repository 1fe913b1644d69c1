"""Audit other people's training scripts, and compare with what reading their source says.

    git clone https://github.com/karpathy/nanoGPT && git -C nanoGPT checkout 3adf61e1
    python peers/audit_others.py nanoGPT

audit_others.json names the projects, their commits and checksums, and the small runs, on a CPU; a
project's folder has the name of its repository. It is copied, not changed. The exit code is 1 where
a script lacks something else than expected.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from audit_changes import UserError, check

ROOT = Path(__file__).resolve().parent.parent
WORDS = "Every effort moves you one step further along the way that it takes. ".split(" ")


def prepare(folder: Path, run: dict) -> None:
    """Small data where the script expects some, and its settings made small."""
    rng = np.random.default_rng(0)
    for name, kind in run.get("files", {}).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "text":
            path.write_text(" ".join(rng.choice(WORDS, 30_000)), encoding="utf-8")
        else:  # ids below that
            rng.integers(0, int(kind), 50_000).astype(np.uint16).tofile(path)
    for name, pairs in run.get("replace", {}).items():
        text = (folder / name).read_text(encoding="utf-8")
        for old, new in pairs:
            if old not in text:
                raise SystemExit(f"error: {name} has no {old!r}: is it another commit?")
            text = text.replace(old, new)
        (folder / name).write_text(text, encoding="utf-8")


def audit(folder: Path, run: dict) -> dict[str, set[int]]:
    """The numbers of the techniques by their states."""
    with tempfile.TemporaryDirectory() as results:
        command = [sys.executable, ROOT / "measure.py", "audit", "--json", "--results-dir", results]
        done = subprocess.run([*command, *run["command"]], cwd=folder / run.get("folder", ""),
                              env=os.environ | {"PYTHONPATH": str(folder)}, text=True,
                              stdout=subprocess.PIPE)
    if done.returncode:
        raise SystemExit(1)
    found: dict[str, set[int]] = {}
    for each in json.loads(done.stdout)["techniques"]:
        found.setdefault(each["state"], set()).add(each["number"])
    return found


def main() -> int:
    sys.stdout.reconfigure(errors="replace")
    known = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    wrong = 0
    for given in map(Path, sys.argv[1:]):
        project = known[given.resolve().name]
        check(given, project)
        for run in project["runs"]:
            with tempfile.TemporaryDirectory() as scratch:
                folder = Path(scratch, given.resolve().name)
                shutil.copytree(given, folder, ignore=shutil.ignore_patterns(".git"))
                prepare(folder, run)
                found = audit(folder, run)
            lacks, unsure = found.get("lacks", set()), sorted(found.get("can't tell", set()))
            fine = lacks == {*run["lacks"]}
            wrong += not fine
            print(f"{given.name}, {' '.join(run['command'])[:60]}: lacks {sorted(lacks)}, "
                  + ("as expected" if fine else f"expected {run['lacks']}")
                  + f"; can't tell {unsure}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (UserError, OSError) as error:
        sys.exit(f"error: {error}")
