"""Make journals of the folders that older versions left: NAME/NAME.json with a record for each run.

    python -m bench.convert results    # writes results/NAME.jsonl; what was there stays
"""

import json
import re
import sys
from pathlib import Path

from bench.common import UserError, relative
from bench.journal import HEADER, append, journal_of, read_journal
from bench.scripts import STAGES
from bench.study import Plan, Run

# {folder: (study, kind)} where that isn't its name; the last two lie in one that has its own.
KINDS = {"sharded-gpt2-medium": ("sharded", "gpt2-medium"), "search": ("search", ""),
         "target": ("search", "target"), "time-to-loss-variants": ("time-to-loss", "variants"),
         "time-to-loss-variants/target": ("time-to-loss", "target")}


def tags_of(row: dict, study: str) -> dict:
    """What code decides by stood in the labels and options of old rows."""
    options, tags, label = row["options"], {}, row["label"]
    for option, name, kind in (("--batch-size", "batch", int), ("--learning-rate", "rate", float),
                               ("--model", "model", str), ("--context-length", "context", int),
                               ("--checkpoint-every", "every", int)):
        if option in options:
            tags[name] = kind(options[options.index(option) + 1])
    stage = next((name for name, file in STAGES.items() if row["name"].startswith(Path(file).stem)),
                 None)
    if study == "compile-modes":
        return dict(mode=label, variant="compile-mode")
    if study == "checkpoints" and "every" in tags:
        tags["saved"] = label.rpartition(" ")[2]
    if row.get("mbit"):
        tags["mbit"] = row["mbit"]
    if row["name"].startswith("without-"):
        tags["without"] = row["name"].removeprefix("without-")
    elif row["name"].startswith("variant-"):
        tags["variant"] = label.split()[0]
    elif study == "ladder" or re.match(r"\d+ ", label):
        tags["rung"] = int(label.split()[0])
    elif stage:
        tags["stage"] = stage
    return tags


def convert(path: Path, study: str, kind: str, results: Path) -> None:
    """Adds a state file and its records to the journal of its study. Raises LookupError, TypeError,
    ValueError, OSError."""
    state = json.loads(path.read_text(encoding="utf-8"))
    old, rows, time = state["plan"], state["rows"], re.sub("[-:]", "", state["time"])
    if not rows:
        raise ValueError("it isn't finished")
    names = {row["label"]: row["name"] for row in rows}
    runs = []
    for before, row in zip([None, *rows], rows, strict=False):
        versus = names.get(row.get("compared_to"))
        if "compared_to" not in row and before:  # the oldest states
            versus = (before if study in ("ladder", "stages") else rows[0])["name"]
        failed = (row["error"] or "").startswith(("failed", "not tried"))
        row.setdefault("options", [])
        runs.append(Run(
            row["name"], row["label"], row["technique"], loss=row["loss"],
            published=row["published"], processes=row["processes"], torchrun=row["processes"] > 1,
            options=tuple(row["options"]), tags=tags_of(row, study),
            compared_to=versus,
            error=None if failed and any(result["name"] == row["name"]
                                         for result in state["results"]) else row["error"]))
    plan = Plan(
        runs, kind, rounds=old["rounds"], tokens=old["tokens"], seconds=old["seconds"] or 0,
        epochs=old["epochs"], first_seed=old.get("first_seed", 123),
        new_seeds=old.get("new_seeds", False), log_tokens=old.get("log_tokens"),
        targets=old.get("targets") or {}, seed_noise=state["seed_noise"] is not None,
        whole=old["seconds"] is None, until_full=study == "sweep")
    values = (f"{time}-{kind}".rstrip("-"), study, kind, time, old["machine"], state["matmul_peak"],
              old["data"], old["scripts"], old["options"])
    lines: list[dict | bytes] = [
        dict(event="study", **dict(zip(HEADER, values, strict=True)), plan=plan.as_json())]
    for result in state["results"]:
        lines.append(dict(event="run", id=values[0], cache=None, command=None,
                          source_sha256=old["scripts"].get(result["name"]),
                          **{name: result[name] for name in ("name", "round", "seed")}))
        record = path.with_name(result["record"]) if result["record"] else None
        if record and not record.exists() and not result["error"]:
            lines.pop()  # its record is gone: as if it had not been
            continue
        text = record.read_bytes() if record and record.exists() else b""
        lines.append(text[: text.rfind(b"\n") + 1])  # whole lines
        lines.append(dict(event="ran", seconds=result["seconds"], exit=None, error=result["error"],
                          load=None, matmul_rate=None))
    append(journal_of(results, study), *lines)


def old_states(results: Path) -> list[tuple[Path, str, str]]:
    """(the state file, its study and kind) of each that has no journal yet, the oldest first."""
    found = []
    for path in [*results.glob("*/*.json"), *results.glob("*/*/*.json")]:
        name = path.parent.relative_to(results).as_posix()
        study, kind = KINDS.get(name, (name, ""))
        if name.startswith("sweep-"):
            study, kind = "sweep", name.removeprefix("sweep-")
        if path.stem == path.parent.name and path.stem != "profile" and all(
                each.kind != kind for each in read_journal(journal_of(results, study))):
            # What another plan of its study depends on comes behind it, as text on a page does.
            found.append((kind in ("target", "model-batch"), path, study, kind))
    return [each[1:] for each in sorted(found)]


def tell_old_form(results: Path) -> None:
    """Says what a folder of an older version holds that isn't read."""
    old = sorted({study for _, study, _ in old_states(results)})
    if old:
        folder = relative(results)
        print(f"{folder} holds results of an older form ({', '.join(old)}); only the records of 00,"
              f" 01 and 02 are read from it: `python -m bench.convert {folder}` converts them")


def main() -> int:
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        print(__doc__, file=sys.stderr)
        return 2
    code, results = 0, Path(sys.argv[1])
    for path, study, kind in old_states(results):
        try:
            convert(path, study, kind, results)
            print(f"{relative(path)}: now in {relative(journal_of(results, study))}")
        except (UserError, LookupError, TypeError, ValueError, AttributeError, RecursionError,
                OSError) as error:
            print(f"{relative(path)}: not converted: {error!r}", file=sys.stderr)
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
