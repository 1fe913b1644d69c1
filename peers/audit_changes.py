"""Change in nanoGPT's training script what an audit names, one point after the other, and measure.

    git clone https://github.com/karpathy/nanoGPT && git -C nanoGPT checkout 3adf61e1
    python peers/audit_changes.py nanoGPT --data data

audit_changes.json has the commit, checksums, the run on a CPU, and the changes. The project's
folder is copied, not changed; `--data` is a folder with train.bin and val.bin of prepare.py. Each
round runs the script as it is beside each of its changes. Prints, as Markdown, the audit and a
table: what it promised at most, what our ladder brought, what came. Nothing else may run on the
machine meanwhile.
"""

import argparse
import ast
import hashlib
import json
import math
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean, median, stdev
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.audit import run, tell  # noqa: E402
from bench.common import UserError  # noqa: E402
from bench.judge.noise import TINY, Estimate  # noqa: E402
from bench.report.tables import Column, Table, markdown  # noqa: E402

FILE = Path(__file__).with_suffix(".json")
LEAST, MOST, WARM_UP = 8, 24, 3  # timed steps of a run; those before, as in bench/audit/child.py
CARDS = ["RTX 4090", "H100"]
SPARE = 0.7  # of the time that remains, what is planned; the rest is for compilation


def check(folder: Path, project: dict) -> None:
    """Whether it is the project at its commit. Raises UserError, OSError."""
    for name, digest in project["sha256"].items():
        if hashlib.sha256((folder / name).read_bytes()).hexdigest() != digest:
            raise UserError(f"{name} isn't that of {project['repository']} at"
                            f" {project['commit'][:8]}")


def copied(given: Path, project: dict, data: Path, to: Path, change: dict) -> Path:
    """The project in the folder `to`, changed. Raises UserError, OSError."""
    check(given, project)
    shutil.copytree(given, to, ignore=shutil.ignore_patterns(".git"))
    for name, pairs in change.get("replace", {}).items():
        text = (to / name).read_text(encoding="utf-8")
        for old, new in pairs:
            if text.count(old) != 1:
                raise UserError(f"{name} hasn't once {old!r}")
            text = text.replace(old, new)
        (to / name).write_text(text, encoding="utf-8")
    for name, kind in change.get("copy", {}).items():  # a class of 01
        source = (ROOT / "01_opt_single_gpu.py").read_text(encoding="utf-8")
        own = next(node for node in ast.parse(source).body if getattr(node, "name", "") == kind)
        with (to / name).open("a", encoding="utf-8") as file:
            file.write(f"\n\n{ast.get_source_segment(source, own)}\n")
    for name in change.get("replace", {}):
        ast.parse((to / name).read_text(encoding="utf-8"))
    place = to / project["data"]
    place.mkdir(parents=True)
    for name in ("train.bin", "val.bin"):
        shutil.copyfile(data / name, place / name)
    return to


def merged(changes: list[dict]) -> dict:
    """All of them in one."""
    found: dict = dict(name="all of these", together=True, techniques=[], options=[], batch=1,
                       environment={}, replace={}, copy={})
    for each in changes:
        found["options"] += each.get("options", [])
        found["techniques"] += each.get("techniques", [])
        found["environment"] |= each.get("environment", {})
        found["copy"] |= each.get("copy", {})
        found["batch"] *= each.get("batch", 1)
        for name, pairs in each.get("replace", {}).items():
            found["replace"].setdefault(name, []).extend(pairs)
    return found


def named(changes: list[dict], found: tell.Findings) -> list[dict]:
    """Those that the audit names: of what is lacking or can't be told, or is in a note."""
    numbers = {each.number for state in (tell.LACKS, tell.CANT_TELL) for each in found.of(state)}
    return [each for each in changes if numbers & {*each.get("techniques", ())}
            or "note" in each and any(each["note"] in line for line in found.notes)]


def seconds(folder: Path, command: list[str], change: dict, steps: int) -> float:
    """Of a step, with as many tokens as one of the script as it is. Raises UserError."""
    batch = change.get("batch", 1)
    order = dict(mode="time", steps=max(4, steps // batch), longest=600)
    with mock.patch.dict(os.environ, change.get("environment", {})):
        timed = run.run([*command, *change.get("options", [])], order, 10, folder)
    return median(timed["seconds"]) / batch


def tried(folder: Path, command: list[str], change: dict, steps: int) -> float | None:
    """As seconds(); None where the run fails, with a line that says why."""
    try:
        return seconds(folder, command, change, steps)
    except UserError as error:
        print(f"{change.get('name', 'as it is')}: {error}", file=sys.stderr)
        return None


def rounds(folders: list[tuple[dict, Path]], base: Path, command: list[str], pairs: int,
           until: float) -> dict[str, list[float]]:
    """Logarithms of factors by a change's name: two changes before and after the script as it is,
    by turns, for as many rounds as there is time."""
    began = time.monotonic()
    one = seconds(base, command, {}, LEAST)
    start = time.monotonic() - began - one * (LEAST + WARM_UP)
    runs = pairs * (len(folders) + math.ceil(len(folders) / 2))
    share = SPARE * (until - time.monotonic()) / runs
    steps = max(LEAST, min(MOST, int((share - start) / one) - WARM_UP))
    print(f"{one:.3g} s a step; {runs} runs of {steps} steps", file=sys.stderr)
    found: dict[str, list[float]] = {change["name"]: [] for change, _ in folders}
    longest = 0.0
    for number in range(pairs):
        began = time.monotonic()
        if began + longest > until and number > 1:
            print(f"No time for round {number + 1}", file=sys.stderr)
            break
        for place in range(0, len(folders), 2):
            these = folders[place:place + 2][::-1 if number % 2 else 1]
            asked = [these[0], ({}, base), *these[1:]]
            times = [tried(folder, command, change, steps) for change, folder in asked]
            for (change, _), each in zip(asked, times, strict=True):
                if change and each and times[1]:
                    factor = times[1] / each
                    found[change["name"]].append(math.log(factor))
                    print(f"round {number + 1}: {change['name']}: {factor:.3f}", file=sys.stderr)
        longest = max(longest, time.monotonic() - began)
    return found


def table(changes: list[dict], found: tell.Findings, factors: dict[str, list[float]]) -> str:
    known = {each.number: each for each in found.techniques}

    def product(change: dict, field: str) -> str:
        values = [getattr(known[number], field) for number in change.get("techniques", ())]
        return f"{math.prod(values):.2f}" if values and all(values) else "–"

    def came(change: dict) -> Estimate | None:
        logs = factors[change["name"]]
        if len(logs) < 2:
            return None
        error = stdev(logs) / math.sqrt(len(logs))
        return Estimate(fmean(logs), max(TINY, error), len(logs) - 1, len(logs))

    def interval(change: dict) -> str:
        found = came(change)
        return "{:.2f}–{:.2f}".format(*found.interval()) if found else ""

    return markdown(Table([
        Column("change", lambda each: each["name"], True),
        Column("techniques", lambda each: ", ".join(map(str, each.get("techniques", ())))),
        Column("× at most", lambda each: "–" if each.get("together") else product(each, "most")),
        Column("× on our ladder", lambda each: product(each, "gain")),
        Column("× measured", lambda each: f"{came(each).factor:.2f}" if came(each) else "failed"),
        Column("95 %", interval),
        Column("pairs", lambda each: str(len(factors[each["name"]])))], changes))


def main() -> int:
    sys.stdout.reconfigure(errors="replace")
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="nanoGPT's, at the commit")
    parser.add_argument("--data", type=Path, default=ROOT / "data", help="with train.bin, val.bin")
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=25, help="for all of it, roughly")
    parser.add_argument("--check", action="store_true", help="only make the changes")
    args = parser.parse_args()
    if args.pairs < 2:
        parser.error("--pairs: an interval needs 2")
    until = time.monotonic() + 60 * args.minutes
    project = json.loads(FILE.read_text(encoding="utf-8"))
    command = project["command"]
    with tempfile.TemporaryDirectory() as scratch:
        def folder(name: str, change: dict) -> Path:
            return copied(args.folder, project, args.data, Path(scratch, name), change)

        base = folder("base", {})
        if args.check:
            for number, change in enumerate([*project["changes"], merged(project["changes"])]):
                folder(str(number), change)
                print(change["name"])
            return 0
        timed, watched = run.audit(command, 10, base)
        found = tell.findings(command, timed, watched, run.machine_of(timed), ROOT / "results",
                              CARDS)
        print(f"`{' '.join(command)}` of {project['repository']} at {project['commit'][:8]}:\n\n"
              + tell.text(found), flush=True)
        changes = named(project["changes"], found)
        changes += [merged(changes)] * (len(changes) > 1)
        folders = [(change, folder(str(number), change)) for number, change in enumerate(changes)]
        if changes:
            factors = rounds(folders, base, command, args.pairs, until)
            print("The changes that the audit names, each alone and then all together, in turn with"
                  " the unchanged\nscript. *× measured*: the speedup, the geometric mean of the"
                  " pairs, with its 95 % interval.\n\n"
                  + table(changes, found, factors))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (UserError, OSError) as error:
        sys.exit(f"error: {error}")
