"""The catalogue of scripts: 00, the script after each patch, 01, 02 and the variants, as runs.

The published figures have their one reader here, too.
"""

import importlib.util
import json
import re
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

from bench.common import REFERENCE, ROOT, UserError, relative, trained_in
from bench.processes import print_once
from patches import stack

PUBLISHED = REFERENCE / "published-a100.json"
EPOCHS = 15  # of the published experiment
# The three scripts: what a run's `script` and `stage` call each, and its file. The file's stem is
# what its record says, and so the run's name.
STAGES = {"00": stack.FIRST, "01": stack.LAST, "02": stack.DDP}
# Variants that are measured by their group alone: the compiler's modes, and checkpoints.
COMPILER, CHECKPOINTS = "compile-mode", "checkpoint-resume"
# The variant that trains on GPUs which multiply float16, and bfloat16 not at all.
FLOAT16 = "precision-fp16"
JOINED = r"\+|@| without "  # in the name of a script that is put together: see Scripts.build
LOSSES = ["unchanged", "rounding", "changes"]  # what a patch may do to the loss, by its header


@dataclass(frozen=True)
class Run:
    """A script with its options; each round of a study runs it once.

    Code decides by the fields; the label is for readers.
    """

    name: str  # unique in its study, and the stage's name in the record
    label: str  # in tables and pictures, such as "5 bfloat16"
    technique: str = ""
    script: str | Path = ""  # its name in the catalogue of scripts, or where it lies
    loss: str | None = None  # expected effect on the loss: unchanged, rounding or changes
    published: float | None = None  # tok/sec on as many of the published A100s
    expected: float | None = None  # about how many tok/sec such A100s would make, published or not
    processes: int = 1
    torchrun: bool = False  # whether torchrun starts it
    options: tuple[str, ...] = ()  # next to those of the plan
    number: int | None = None  # its number in the ladder
    stage: str | None = None  # "00", "01" or "02"; what a search tunes, as it was asked for
    ablated: str | None = None  # the technique or variant that was taken out of it
    batch: int | None = None  # windows, where a search tunes it
    rate: float | None = None  # the learning rate, where a search tunes it
    compared_to: str | None = None  # the name of an earlier run
    error: str | None = None  # why it can't run
    requires: str | None = None  # an earlier, smaller run: this one isn't tried unless that fits
    memory_growth: float = 1  # about how many times the memory of that one it takes
    cores: int | None = None  # of a CPU that it may use (None: all)

    def replace(self, **changes) -> "Run":
        """A copy with changes."""
        return replace(self, **changes)


@dataclass(frozen=True)
class Published:
    """The figures that were published, on A100s."""

    source: str  # a sentence
    gpu: str
    model: str
    context_length: int
    stages: dict[str, stack.Published]  # of 00, 01 and 02
    reserved_gb: dict[str, float]  # by the script's name in the catalogue


def published() -> Published:
    """Raises UserError where the file can't be read, StackError for a bad patch."""
    patches = stack.load()
    try:
        data = json.loads(PUBLISHED.read_text(encoding="utf-8"))
        plain = data["baseline"]
        first = stack.Published(float(plain["tok_per_sec"]), float(plain["reserved_gb"]), 1)
        gpu, model, context = data["gpu"], data["model"], int(data["context_length"])
        source = (f"Published figures: {gpu}, PyTorch {data['pytorch']}, {model}, context"
                  f" {context:,}, 02 DDP × {patches[-1].published.gpus}; <{data['source']}>")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{relative(PUBLISHED)} can't be read: {error!r}")
    figures = {patch.name: patch.published for patch in patches if patch.published}
    *_, last, ddp = figures.values()
    memory = {name: known.reserved_gb for name, known in figures.items()}
    return Published(source, gpu, model, context,
                     {"00": first, "01": last, "02": ddp}, {"00": first.reserved_gb} | memory)


@cache
def without_effect_on_gpus() -> set[int]:
    """The numbers of the techniques that do nothing where there is a GPU. Raises StackError."""
    return {number for number, patch in enumerate(stack.load(), 1)
            if patch.fields["Hardware"].startswith("CPUs")}


class Scripts:
    """Every script as a Run; its text is made when it is asked for."""

    def __init__(self) -> None:
        self.texts: dict[str, bytes] = {}  # those that were asked for

    @cached_property
    def stages(self) -> dict[str, bytes]:
        """The script after each patch, and each variant's."""
        return stack.rebuild_all()

    def text(self, script: str | Path) -> bytes:
        """Raises StackError where the patches don't fit together, OSError."""
        if isinstance(script, Path):
            return script.read_bytes()
        if script not in self.texts:
            self.texts[script] = self.build(script)
        return self.texts[script]

    def build(self, script: str) -> bytes:
        """The text of a stage, a rung or a variant, or put together as its name says."""
        if " without " in script:  # a script, without the technique of a rung
            base, _, technique = script.partition(" without ")
            before = [*self.stages][[*self.stages].index(technique) - 1]
            return stack.merge(self.text(technique), self.text(base), self.text(before), script)
        if "@" in script:  # a variant of 01 taken back to a rung
            variant, _, technique = script.partition("@")
            return stack.merge(self.text("01"), self.text(variant), self.text(technique), variant)
        if "+" not in script:
            return self.stages[stack.find(STAGES.get(script, script), self.stages)]
        first, *rest = names = script.split("+")
        return stack.compose(rest, STAGES[first]) if first in STAGES else stack.compose(names)

    def canonical(self, script: str | Path) -> str:
        """The one name that a script is known by: 00, 01, 02, a rung's, a variant's, variants'
        joined by +. Raises StackError."""
        if isinstance(script, Path):
            return {file: stage for stage, file in STAGES.items()}.get(script.name, script.name)
        if script in STAGES or re.search(JOINED, script):
            return script
        name, names = stack.find(script, self.stages), list(self.stages)
        ends = {names[0]: "00", names[names.index("ddp") - 1]: "01", "ddp": "02"}
        return ends.get(name, name)

    def ladder(self, gpus: int = 1) -> list[Run]:
        """00, the script after each patch, and 02 on `gpus`. Raises UserError, StackError."""
        speed = published().stages["00"].tok_per_sec
        runs = [Run(Path(stack.FIRST).stem, "0 baseline", "baseline", "00", number=0,
                    published=speed, expected=speed)]
        for number, patch in enumerate(stack.load(), 1):
            ddp, theirs = patch.name == "ddp", patch.published
            processes = gpus if ddp else 1
            words = "DDP" if ddp else re.sub("^[0-9]+-", "", patch.name).replace("-", " ")
            if theirs:  # else it is expected to be as fast as the one before
                speed = theirs.tok_per_sec / theirs.gpus
            runs.append(Run(
                Path(stack.file_of(patch.name)).stem, f"{number} {words}",
                patch.fields["Technique"], patch.name, number=number, processes=processes,
                torchrun=ddp, loss=patch.fields["Loss"].split()[0], expected=speed * processes,
                published=theirs.tok_per_sec if theirs and theirs.gpus == processes else None))
        return runs

    def select(self, text: str | None, runs: list[Run]) -> list[Run]:
        """Those of some rungs that "0,5-8" names; all for None. Raises UserError."""
        if text is None:
            return runs
        numbers: set[int] = set()
        for part in text.split(","):
            match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
            if not match:
                raise UserError(
                    f"--techniques {text}: {part!r} is neither a number nor a range like 5-8", 2)
            first, last = int(match[1]), int(match[2] or match[1])
            if first > last or last >= len(runs):
                raise UserError(f"--techniques {text}: {part!r} isn't within 0-{len(runs) - 1}", 2)
            numbers.update(range(first, last + 1))
        return [runs[number] for number in sorted(numbers)]

    def stage(self, name: str, gpus: int = 1) -> Run:
        """"00", "01", or "02" on `gpus` processes. Raises UserError, StackError."""
        first, *_, last, ddp = self.ladder(gpus)
        run = {"00": first, "01": last, "02": ddp}[name].replace(
            name=Path(STAGES[name]).stem, script=name, stage=name, number=None, label=name)
        if name == "01":  # the last published figure of a technique is that of the whole script
            return run.replace(technique="every technique", loss=None, published=run.expected)
        ranks = "1 rank" if gpus == 1 else f"{gpus} ranks"
        return run.replace(label=f"02, {ranks}") if name == "02" else run

    def float16(self, run: Run) -> Run:
        """01 or 02, composed with FLOAT16."""
        return run.replace(name=f"{run.name}-{FLOAT16}", label=f"{run.label} with {FLOAT16}",
                       script=FLOAT16 if run.stage == "01" else f"{run.stage}+{FLOAT16}")

    def for_machine(self, name: str, machine: dict, options: list[str]) -> Run:
        """As stage(), in the type that this machine has units for; 02 on all its GPUs, or on two
        ranks of a CPU. Raises UserError, StackError."""
        run = self.stage(name, machine["gpus"] or 2)
        return self.float16(run) if name != "00" and in_float16(machine, options) else run

    def variants(self, base: Run, machine: dict, group: str | None = None,
                 names: str | None = None) -> list[Run]:
        """`base` (01 or 02), and a run compared to it for each row of its measured variants: those
        of a group, those in `names` ("optimizer-muon,data-workers"), or all but the compiler's modes
        and checkpoints. A name may join several, of which each has the first of its measured
        options: "optimizer-muon+data-workers"; and options behind a name take the place of those
        that are measured: "data-workers --workers 8". Raises UserError, StackError."""
        known = {patch.name: patch for patch in stack.load_variants()
                 if patch.base == base.name and "Group" in patch.fields
                 and group in (None, patch.fields["Group"])}
        chosen = [name for name in known if group or name not in (COMPILER, CHECKPOINTS)]
        if names is not None:
            chosen = [name.strip() for name in names.split(",")]
        runs = [base.replace(published=None, loss=None)]
        for text in chosen:
            name, *own = text.split() or [""]
            for part in name.split("+"):
                if part not in known:
                    raise UserError(
                        f"no variant {part!r} of {base.label}; there are {', '.join(known)}", 2)
            patches = [known[part] for part in name.split("+")]
            option_sets = patches[0].option_sets
            if len(patches) > 1 or own:
                self.text(name)  # whether they go together is told before anything runs
                firsts = [patch.option_sets[0] for patch in patches]
                together = [option for options, _ in firsts for option in options]
                option_sets = [(own or together, ", ".join(needs for _, needs in firsts if needs))]
            for options, needs in option_sets:
                words = re.findall(r"\w[\w.-]*", " ".join(options))
                runs.append(runs[0].replace(
                    name="-".join(["variant", name, *words]), script=name,
                    label=" ".join([name, *options]), options=tuple(options),
                    technique=", ".join(patch.fields["Technique"] for patch in patches),
                    loss=max((patch.fields["Loss"].split()[0] for patch in patches),
                             key=LOSSES.index),
                    compared_to=base.name, error=lacking(needs, machine),
                    stage=None))
        return without_doubles(runs)

    def find(self, name: str, machine: dict) -> Run:
        """"00", "01", or variants of 01, with the first of their measured options. Raises
        UserError, StackError."""
        if "," in name:
            raise UserError(f"{name} is more than one script: join variants of one by +", 2)
        stage = self.stage(name if name in STAGES else "01")
        return stage if name in STAGES else self.variants(stage, machine, names=name)[1]

    def variants_of_02(self, machine: dict, group: str) -> list[Run]:
        """02 on all GPUs, or on two ranks of a CPU, and its variants of a group."""
        runs = self.variants(self.stage("02", machine["gpus"] or 2), machine, group)
        if machine["gpus"] == 1:
            runs = [run.replace(error="needs two or more GPUs") for run in runs]
        return runs


def without_doubles(runs: list[Run]) -> list[Run]:
    """Each row once: of two spellings of one row the first, and a line says so. Raises UserError
    where two rows would have one name, since in a journal the second would replace the first."""
    rows: dict[tuple, Run] = {}
    names: dict[str, Run] = {}
    for run in runs:
        # Options count as a set, with or without "=", and so do the variants of a script.
        options = re.split(r" (?=--)", " ".join(run.options))
        row = (frozenset(str(run.script).split("+")),
               frozenset(re.sub(r"^(--[\w-]+)=", r"\1 ", option) for option in options))
        if first := rows.get(row):
            print_once(f"asked for twice, and taken once: {first.label}"
                 + (f" ({run.label})" if run.label != first.label else ""))
        elif other := names.get(run.name):
            raise UserError(f"{other.label} and {run.label} would both be called {run.name}: ask"
                            " for one at a time", 2)
        else:
            rows[row] = names[run.name] = run
    return list(rows.values())


def in_float16(machine: dict, options: list[str]) -> bool:
    """Whether 01 and 02 shall be composed with FLOAT16: on a GPU that has tensor cores and none for
    bfloat16, unless `options` choose the type."""
    return (machine["gpus"] > 0 and 7 <= float(machine.get("capability") or 0) < 8
            and not any(option.split("=")[0] == "--dtype" for option in options))


def lacking(needs: str, machine: dict) -> str | None:
    """What a variant needs and this machine doesn't have, as a row tells it."""
    amd = machine["gpus"] and machine.get("cuda", "") is None  # a build of PyTorch for ROCm
    for need in needs.split(", ") if needs else []:
        kind, _, what = need.rpartition(" ")
        if kind == "package" and not importlib.util.find_spec(what):
            pinned = what in (ROOT / "requirements-extras.txt").read_text(encoding="utf-8")
            source = "-r requirements-extras.txt" if pinned else what
            return f"needs the package {what}: pip install {source}"
        if need == "an NVIDIA GPU" and (amd or not machine["gpus"]):
            return f"needs {need}"
        if need == "bfloat16 units" and trained_in(machine) == "float32":
            return f"needs {need}, which this {'GPU' if machine['gpus'] else 'CPU'} lacks"
        known = machine.get("capability")  # not of a CPU, on which a variant may emulate
        if kind == "compute capability" and known and (amd or float(known) < float(what)):
            return f"needs a GPU of {need}"
    return None
