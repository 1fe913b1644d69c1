"""Compute the figures of docs/audit.md that have logs, from results/reference/audit.

    python docs/check_audit.py    # prints its tables

expected.md has what somebody wrote down before each audit, and NAME.txt what the audit printed.
measured.json has the memory that others measured on GPUs, in MiB; audits.json what audits of the
same steps predict, in bytes, and kitsune.json what torch-kitsune 0.7.0 does, in MiB. counted.json
has what counted.py counts in programs that nobody measured, in bytes, at two batch sizes.
rounds.jsonl has the milliseconds of each step of nanoGPT, its peak memory in GB and its last loss,
by the techniques added; as-it-is.txt the audit's table before.
"""

import csv
import json
import re
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from gpt_speed.memory import MIB  # noqa: E402
from gpt_speed.tables import Table, markdown, num_col, text_col  # noqa: E402

LOGS = ROOT / "results" / "reference" / "audit"
VERDICTS, MEMORY = LOGS / "2026-11-29", LOGS / "2026-11-29-memory"
EXAMPLE = LOGS / "2026-11-29-example"
HARDLY_DIFFER = {2, 4, 10, 12, 15}  # techniques that hardly do between programs on a CPU
OUTCOMES = "right", "arguable", "wrong", "unknown"
NAMES = {  # of the programs whose memory was measured
    "gollem-float32": "gollem, float32",
    "gollem-bfloat16": "gollem, bfloat16 by autocast",
    "gollem-flash": "gollem, FlashAttention",
    "gb10": "gpt2-medium by hand",
}
MODELS = dict(  # that nobody has measured
    lstm="LSTM language model",
    unet="U-Net",
    vit="ViT",
    t5="T5",
    mixtral="Mixtral, a mixture of experts",
)


# ---- The example


TOKENS, WARM_UP = 512, 4  # of a step; steps left out of each run


CHANGES = {  # to nanoGPT, by the numbers of the techniques
    15: "#15, two variables of glibc",
    5: "and #5, by autocast",
    12: "and #12, a variable of PyTorch",
}


class Runs(NamedTuple):
    """The runs of nanoGPT with the same techniques, in several rounds."""

    milliseconds: list[float]  # a step, the median of each run
    gb: float  # at the peak, the median of the runs
    loss: float

    @property
    def middle(self) -> float:
        return statistics.median(self.milliseconds)


def runs_with(techniques: list[int]) -> Runs:
    lines = (EXAMPLE / "rounds.jsonl").read_text(encoding="utf-8").splitlines()
    runs = [run for run in map(json.loads, lines) if run["techniques"] == techniques]
    (loss,) = {run["loss"] for run in runs}
    return Runs(
        [statistics.median(run["ms"][WARM_UP:]) for run in runs],
        statistics.median(run["gb"] for run in runs),
        loss,
    )


def audit_table() -> str:
    """Returns the table of the audit of nanoGPT as it is."""
    log = (EXAMPLE / "as-it-is.txt").read_text(encoding="utf-8")
    return log[log.index("| # |") :].partition("\n\n")[0].strip()


def expected_gains() -> dict[int, float]:
    """Returns the gains that the audit expects, in its order."""
    rows = re.findall(r"^\| (\d+) \| .* ([\d.]+)× \| ", audit_table(), re.MULTILINE)
    return {int(number): float(gain) for number, gain in rows}


def example_table() -> Table:
    """nanoGPT with one technique more in each row, what the audit expected and what was measured.
    What the techniques save adds up, since the audit counts none of it twice."""
    gains, left, techniques = expected_gains(), 1.0, []
    start = runs_with([]).middle
    rows = [row_of_runs("as it is", runs_with([]), None)]
    for number, label in CHANGES.items():
        techniques.append(number)
        left -= 1 - 1 / gains[number]
        rows.append(row_of_runs(label, runs_with(techniques), left * start))
    columns = [
        text_col("nanoGPT", "label"),
        num_col("expected, ms a step", "expected", ".0f"),
        num_col("measured", "middle", ".0f"),
        num_col("fastest to slowest run", "range"),
        num_col("tok/sec", "speed", ",.0f"),
        num_col("GB", "gb", ".2f"),
        num_col("loss", "loss", ".4f"),
    ]
    return Table(columns, rows)


def row_of_runs(label: str, runs: Runs, expected: float | None) -> dict:
    return dict(
        label=label,
        expected=expected,
        middle=runs.middle,
        range=f"{min(runs.milliseconds):.0f}–{max(runs.milliseconds):.0f}",
        speed=1000 * TOKENS / runs.middle,
        gb=runs.gb,
        loss=runs.loss,
    )


# ---- Verdicts


class Verdict(NamedTuple):
    """What an audit said of one technique in one program."""

    program: str
    number: int
    outcome: str  # one of OUTCOMES


def verdicts() -> Iterator[Verdict]:
    """Judges each state that was logged by what was expected."""
    program, states = "", {}
    for line in (VERDICTS / "expected.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            program = line[3:]
            states = states_in((VERDICTS / f"{program}.txt").read_text(encoding="utf-8"))
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0].isdecimal():
            number, (expected, others) = int(cells[0]), cells[2:4]
            yield Verdict(
                program, number, outcome_of(states[number], expected, others.split(" / "))
            )


def states_in(log: str) -> dict[int, str]:
    """Returns the state of each technique by its number: in a row of the table, or in a line such
    as "**has**: #1 causal mask made on the fly; #3 fused AdamW"."""
    states = {}
    for numbers, state in re.findall(r"^\| ([\d, ]+) \| [^|]+ \| ([^|]+) \|", log, re.MULTILINE):
        states |= dict.fromkeys(map(int, numbers.split(", ")), state)
    for state, techniques in re.findall(r"^\*\*([a-z ]+)\*\*: (#\d.*)", log, re.MULTILINE):
        states |= dict.fromkeys(map(int, re.findall(r"#(\d+) ", techniques)), state)
    return states


def outcome_of(state: str, expected: str, also_defensible: list[str]) -> str:
    if state == expected:
        return "right"
    if state in also_defensible:
        return "arguable"
    return "unknown" if state == "unknown" else "wrong"


def verdict_table() -> Table:
    judged = [*verdicts()]
    varying = [verdict for verdict in judged if verdict.number not in HARDLY_DIFFER]
    numbers = ", ".join(map(str, sorted(HARDLY_DIFFER)))
    rows = [
        dict(label=f"all {len(judged)}", counts=counts_of(judged)),
        dict(
            label="without the five techniques that hardly differ between programs on a CPU"
            f" ({numbers})",
            counts=counts_of(varying),
        ),
    ]
    columns = [num_col(outcome, f"counts.{outcome}") for outcome in OUTCOMES]
    return Table([text_col("", "label"), *columns], rows)


def counts_of(judged: list[Verdict]) -> dict[str, int]:
    counts = Counter(verdict.outcome for verdict in judged)
    return {outcome: counts[outcome] for outcome in OUTCOMES}


def written_verdicts() -> list[Verdict]:
    """Returns the verdicts as they were written down after the audits, in verdicts.csv."""
    with open(VERDICTS / "verdicts.csv", encoding="utf-8", newline="") as file:
        return [
            Verdict(
                row["program"], int(row["number"]), row["verdict"].replace("defensible", "arguable")
            )
            for row in csv.DictReader(file)
        ]


# ---- Memory


@cache
def kept(name: str):
    return json.loads((MEMORY / name).read_text(encoding="utf-8"))


def audited(name: str, batch: int, card: str) -> dict:
    """Returns what an audit predicted of a step's memory at a batch size on a card."""
    (audit,) = (audit for audit in kept("audits.json")[name] if audit["batch"] == batch)
    return audit["memory"][card]


def measured_table() -> Table:
    """The memory that others measured, beside what the audit predicts of the same step, in MiB."""
    rows = [
        memory_row(measured, kind)
        for kind in ("allocated", "reserved")
        for measured in kept("measured.json")
        if kind in measured
    ]
    columns = [
        text_col("step", "step"),
        text_col("GPU", "card"),
        text_col("MiB", "kind"),
        num_col("measured", "measured", ",.0f"),
        num_col("audit", "predicted", ",.0f"),
        num_col("error", "error", "+.1%"),
        num_col("torch-kitsune's error", "kitsune_error", "+.1%"),
    ]
    return Table(columns, rows)


def memory_row(measured: dict, kind: str) -> dict:
    """Returns the row of a figure, without models of an earlier run that still lay on the GPU."""
    memory = audited(measured["name"], measured["batch"], measured["card"])
    figure, predicted = measured[kind] - measured.get("left", 0), memory[kind] / MIB
    kitsune = kept("kitsune.json")[measured["name"]] if kind == "allocated" else None
    return dict(
        step=NAMES[measured["name"]],
        card=measured["card"],
        kind=kind,
        measured=figure,
        predicted=predicted,
        error=predicted / figure - 1,
        kitsune_error=kitsune and kitsune / figure - 1,
    )


def sample_table() -> Table:
    """The MiB that one more sample adds to what a step stores for its backward pass, and to the
    peak: as counted on a CPU without the audit, and as the audit predicts of an H100."""
    rows = []
    for name, counts in kept("counted.json").items():
        counted = slopes({int(batch): count for batch, count in counts.items()})
        audits = kept("audits.json")[name]
        predicted = slopes(
            {
                audit["batch"]: dict(
                    stored=audit["stored"], peak=audit["memory"]["H100"]["allocated"]
                )
                for audit in audits
            }
        )
        kinds = {
            kind: dict(
                counted=counted[kind],
                predicted=predicted[kind],
                error=predicted[kind] / counted[kind] - 1,
            )
            for kind in ("stored", "peak")
        }
        rows.append(dict(model=MODELS[name], bound=audits[0]["memory"]["H100"]["bound"], **kinds))
    columns = [
        text_col("model", "model"),
        num_col("stored, counted", "stored.counted", ".2f"),
        num_col("audit", "stored.predicted", ".2f"),
        num_col("error", "stored.error", "+.1%"),
        num_col("peak, counted", "peak.counted", ".2f"),
        num_col("audit", "peak.predicted", ".2f"),
        num_col("error", "peak.error", "+.1%"),
        text_col("the audit says", "bound"),
    ]
    return Table(columns, rows)


def slopes(figures: dict[int, dict[str, float]]) -> dict[str, float]:
    """Returns by how many MiB each figure grows with one more sample, from the figures in bytes at
    two batch sizes."""
    small, large = sorted(figures)
    return {
        kind: (figures[large][kind] - figure) / (large - small) / MIB
        for kind, figure in figures[small].items()
    }


def main() -> None:
    for table in (example_table(), verdict_table(), measured_table(), sample_table()):
        print(markdown(table))


if __name__ == "__main__":
    main()
