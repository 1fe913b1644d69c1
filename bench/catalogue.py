"""The catalogue of scripts as runs: 00, the script after each technique, 01, 02 and the
variants; and the published figures."""

import importlib.util
import json
import re
import sys
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

from bench.common import REFERENCE, has_option, trained_in
from gpt_speed.common import UserError
from patches import stack

EPOCHS = 15  # of the published experiment
# The three scripts, by the names that `Run.script` and `Run.stage` have for them. The
# stem of each file is the name of its run, and of its records.
STAGES = {"00": stack.FIRST, "01": stack.LAST, "02": stack.DDP}
# Variants that are measured only if their group is asked for.
COMPILER, CHECKPOINTS = "compile-mode", "checkpoint-resume"
# The variant for GPUs whose tensor cores multiply float16 and not bfloat16.
FLOAT16 = "precision-fp16"
LOSSES = ["unchanged", "rounding", "changes"]  # what a patch may do to the loss, by its header


@dataclass(frozen=True)
class Run:
    """A script with its options; each round of a study runs it once. Code decides by the
    fields; the label is for readers."""

    name: str  # unique in its study; the script's record has it as its stage
    label: str  # in tables and pictures, such as "5 bfloat16"
    technique: str = ""
    script: str | Path = ""  # its name in the catalogue, or its file
    loss: str | None = None  # expected effect on the loss, one of LOSSES
    published: float | None = None  # tok/sec on as many of the published A100s
    expected: float | None = None  # estimated tok/sec on such A100s, published or not
    processes: int = 1
    torchrun: bool = False  # whether torchrun starts it
    options: tuple[str, ...] = ()  # next to those of the plan
    number: int | None = None  # of the technique, in the ladder
    stage: str | None = None  # "00", "01" or "02"; in a search, the script that is tuned
    ablated: str | None = None  # the technique or variant that was taken out of it
    batch: int | None = None  # sequences, in a search
    rate: float | None = None  # the learning rate, in a search
    compared_to: str | None = None  # the name of an earlier run
    error: str | None = None  # why it can't run
    requires: str | None = None  # an earlier, smaller run, without which this one isn't tried
    memory_growth: float = 1  # how many times the memory of that one it takes, about
    cores: int | None = None  # of a CPU that it may use (None: all)

    def replace(self, **changes) -> "Run":
        """Returns a copy with changes."""
        return replace(self, **changes)


def published_source() -> dict:
    """Reads where figures are published, of what on what, and those of 00."""
    return json.loads((REFERENCE / "published-a100.json").read_text(encoding="utf-8"))


def published() -> dict[str, stack.Published]:
    """Returns the published figures of 00, of the techniques that have any, and of 01 and
    02, by the scripts' names. Raises StackError."""
    plain = published_source()["baseline"]
    first = stack.Published(float(plain["tok_per_sec"]), float(plain["reserved_gb"]), 1)
    ladder = {patch.name: patch.published for patch in stack.load() if patch.published}
    *_, last, ddp = ladder.values()
    return {"00": first, **ladder, "01": last, "02": ddp}


@cache
def without_effect_on_gpus() -> set[int]:
    """Returns the numbers of the techniques that only speed up CPUs. Raises StackError."""
    return {
        number
        for number, patch in enumerate(stack.load(), 1)
        if patch.fields["Hardware"].startswith("CPUs")
    }


@cache
def technique_names() -> dict[str, str]:
    """Returns what each technique is called today, by the name of its patch. Raises StackError."""
    return {patch.name: patch.fields["Technique"] for patch in stack.load()}


class Scripts:
    """Every script, as a run and as a text."""

    @cached_property
    def patched(self) -> dict[str, bytes]:
        """The text of 00, of the script after each patch, and of each variant."""
        return stack.rebuild_all()

    def text(self, script: str | Path) -> bytes:
        """Returns the text of a file, or of a script by its name: that of the catalogue, "X without
        TECHNIQUE", "VARIANT@TECHNIQUE", a variant of 01 taken back to that technique, or variants
        joined by +. Raises StackError where patches don't fit together, OSError."""
        if isinstance(script, Path):
            return script.read_bytes()
        names = list(self.patched)
        if " without " in script:
            base, _, technique = script.partition(" without ")
            before = names[names.index(technique) - 1]
            return stack.merge(self.text(technique), self.text(base), self.text(before), script)
        if "@" in script:
            variant, _, technique = script.partition("@")
            return stack.merge(self.text("01"), self.text(variant), self.text(technique), variant)
        if "+" not in script:
            return self.patched[stack.find(STAGES.get(script, script), names)]
        first, *rest = parts = script.split("+")
        return stack.compose(rest, STAGES[first]) if first in STAGES else stack.compose(parts)

    def canonical(self, script: str | Path) -> str:
        """Returns the name by which predictions are stored: 00, 01 and 02 have several.
        Raises StackError."""
        names = list(self.patched)
        ends = {"0": "00", names[names.index("ddp") - 1]: "01", "ddp": "02"}
        return ends.get(str(script), str(script))

    def ladder(self, gpus: int = 1) -> list[Run]:
        """Returns 00, the script after each technique, and 02 on `gpus`. Raises
        UserError, StackError."""
        speed = published()["00"].tok_per_sec
        runs = [
            Run(
                Path(stack.FIRST).stem,
                "0 baseline",
                "baseline",
                "00",
                number=0,
                published=speed,
                expected=speed,
            )
        ]
        for number, patch in enumerate(stack.load(), 1):
            ddp, theirs = patch.name == "ddp", patch.published
            processes = gpus if ddp else 1
            words = "DDP" if ddp else re.sub("^[0-9]+-", "", patch.name).replace("-", " ")
            if theirs:  # else it is expected to be as fast as the one before
                speed = theirs.tok_per_sec / theirs.gpus
            runs.append(
                Run(
                    Path(stack.file_of(patch.name)).stem,
                    f"{number} {words}",
                    patch.fields["Technique"],
                    patch.name,
                    number=number,
                    processes=processes,
                    torchrun=ddp,
                    loss=patch.fields["Loss"].split()[0],
                    expected=speed * processes,
                    published=theirs.tok_per_sec if theirs and theirs.gpus == processes else None,
                )
            )
        return runs

    def select(self, text: str | None, runs: list[Run]) -> list[Run]:
        """Returns those of the ladder's runs that "0,5-8" names; all for None. Raises UserError."""
        if text is None:
            return runs
        numbers: set[int] = set()
        for part in text.split(","):
            match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
            first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
            if not first <= last < len(runs):
                raise UserError(
                    f"--techniques {text}: {part!r} isn't within 0-{len(runs) - 1}, as"
                    " a number or a range like 5-8",
                    2,
                )
            numbers.update(range(first, last + 1))
        return [runs[number] for number in sorted(numbers)]

    def stage(self, name: str, gpus: int = 1) -> Run:
        """Returns "00", "01", or "02" on `gpus` processes. Raises UserError, StackError."""
        first, *_, last, ddp = self.ladder(gpus)
        run = {"00": first, "01": last, "02": ddp}[name].replace(
            name=Path(STAGES[name]).stem, script=name, stage=name, number=None, label=name
        )
        if name == "01":  # the last published figure of a technique is that of the whole script
            return run.replace(technique="every technique", loss=None, published=run.expected)
        ranks = "1 rank" if gpus == 1 else f"{gpus} ranks"
        return run.replace(label=f"02, {ranks}") if name == "02" else run

    def for_machine(self, name: str, machine: dict, options: list[str]) -> Run:
        """Returns one of the three scripts in the type that this machine has units for;
        02 on all its GPUs, or on two ranks of a CPU. Raises UserError, StackError."""
        run = self.stage(name, machine["gpus"] or 2)
        return self.float16(run) if name != "00" and in_float16(machine, options) else run

    def float16(self, run: Run) -> Run:
        """Returns 01 or 02, composed with FLOAT16."""
        return run.replace(
            name=f"{run.name}-{FLOAT16}",
            label=f"{run.label} with {FLOAT16}",
            script=FLOAT16 if run.stage == "01" else f"{run.stage}+{FLOAT16}",
        )

    def find(self, name: str, machine: dict) -> Run:
        """Returns "00", "01", or variants of 01 joined by +, with their first measured
        options. Raises UserError, StackError."""
        if "," in name:
            raise UserError(f"{name} is more than one script: join variants of one by +", 2)
        run = self.stage(name if name in STAGES else "01")
        if name in STAGES:
            return run
        return next(
            variant
            for variant in self.variants(run, machine, names=name)
            if variant.script != run.script
        )

    def variants(
        self, base: Run, machine: dict, group: str | None = None, names: str | None = None
    ) -> list[Run]:
        """Returns `base`, 01 or 02, and its variants with each set of measured options: those of a
        group, those in `names`, or all but the compiler's modes and checkpoints. In `names` + joins
        variants, each with its first set, and options behind a name take their place:
        "data-workers --workers 8". Before a variant without dropout comes what it is compared to,
        `base` without dropout. Raises UserError, StackError."""
        patches = {
            patch.name: patch
            for patch in stack.load_variants()
            if patch.base == base.name
            and "Group" in patch.fields
            and group in (None, patch.fields["Group"])
        }
        alone = base.torchrun and machine["gpus"] == 1
        base = base.replace(
            published=None, loss=None, error="needs two or more GPUs" if alone else None
        )
        usual = [name for name in patches if group or name not in (COMPILER, CHECKPOINTS)]
        runs = [base]
        for text in usual if names is None else names.split(","):
            name, *options = text.split() or [""]
            parts = name.split("+")
            if unknown := [part for part in parts if part not in patches]:
                raise UserError(
                    f"no variant {unknown[0]!r} of {base.label}; there are {', '.join(patches)}", 2
                )
            joined = [patches[part] for part in parts]
            option_sets = joined[0].option_sets
            if options or len(joined) > 1:
                self.text(name)  # raises where they don't go together
                firsts = [patch.option_sets[0] for patch in joined]
                option_sets = [
                    (
                        options or [option for own, _ in firsts for option in own],
                        ", ".join(needs for _, needs in firsts if needs),
                    )
                ]
            for own, needs in option_sets:
                reference = at_dropout_of(own, base)
                if reference not in runs:
                    runs.append(reference)
                runs.append(
                    base.replace(
                        name="-".join(["variant", name, *re.findall(r"\w[\w.-]*", " ".join(own))]),
                        label=" ".join([name, *own]),
                        script=name,
                        options=tuple(own),
                        technique=", ".join(patch.fields["Technique"] for patch in joined),
                        loss=max(
                            (patch.fields["Loss"].split()[0] for patch in joined), key=LOSSES.index
                        ),
                        compared_to=reference.name,
                        error=base.error or lacking(needs, machine),
                        stage=None,
                    )
                )
        return without_doubles(runs)


def at_dropout_of(options: list[str], base: Run) -> Run:
    """Returns `base`, without dropout if the options of a variant switch it off: that alone would
    make the variant faster."""
    if not re.search(r"--dropout[ =]0(\.0*)?(?!\S)", " ".join(options)):
        return base
    return base.replace(
        name=f"{base.name}-dropout-0",
        label=f"{base.label} --dropout 0",
        options=("--dropout", "0"),
        compared_to=base.name,
        stage=None,
    )


def without_doubles(runs: list[Run]) -> list[Run]:
    """Returns each row once: of two spellings the first, and a line says so. Raises UserError where
    two rows would have one name, since in a journal the second would replace the first."""
    rows: dict[tuple, Run] = {}
    names: dict[str, Run] = {}
    for run in runs:
        # Options count as a set, with or without "=", and so do the variants of a script.
        options = re.split(r" (?=--)", " ".join(run.options))
        row = (
            frozenset(str(run.script).split("+")),
            frozenset(re.sub(r"^(--[\w-]+)=", r"\1 ", option) for option in options),
        )
        if first := rows.get(row):
            print(
                f"asked for twice, and taken once: {first.label}"
                + (f" ({run.label})" if run.label != first.label else ""),
                file=sys.stderr,
            )
        elif other := names.get(run.name):
            raise UserError(
                f"{other.label} and {run.label} would both be called {run.name}: ask"
                " for one at a time",
                2,
            )
        else:
            rows[row] = names[run.name] = run
    return list(rows.values())


def in_float16(machine: dict, options: list[str]) -> bool:
    """Returns whether 01 and 02 shall be composed with FLOAT16: on a GPU whose tensor
    cores don't multiply bfloat16, unless `options` choose the type."""
    return (
        machine["gpus"] > 0
        and 7 <= float(machine.get("capability") or 0) < 8
        and not has_option("--dtype", options)
    )


def lacking(needs: str, machine: dict) -> str | None:
    """Returns the first thing that a variant needs and this machine lacks, as a row says it."""
    amd = machine["gpus"] and machine.get("cuda", "") is None  # a build of PyTorch for ROCm
    own = machine.get("capability")  # none of a CPU, on which a variant may emulate
    for need in needs.split(", "):
        kind, _, what = need.rpartition(" ")
        if (
            kind == "package"
            and not importlib.util.find_spec(what)
            or need == "an NVIDIA GPU"
            and (amd or not machine["gpus"])
            or need == "bfloat16 units"
            and trained_in(machine) == "float32"
            or kind == "compute capability"
            and own
            and (amd or float(own) < float(what))
        ):
            return f"needs {need}"
    return None
