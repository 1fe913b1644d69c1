"""Are the numbers right? The clock, the memory figures and the rule of verdicts, tested here."""

import json
import math
import random
from collections.abc import Iterator
from functools import partial
from statistics import mean
from typing import NamedTuple

from bench import processes
from bench.common import BUILD, UserError, write_whole
from bench.judge.noise import noise_of, verdict
from bench.judge.rows import Row
from bench.report.notes import one_reference
from bench.report.tables import Column, Table, found_in, markdown
from bench.studies import Study, all_studies

CASES = ["nothing", "evaluation", "log line", "sample and memory", "first step", "checkpoint"]
LIMIT = {"cuda": 0.02, "cpu": 0.05}  # by which a speed may be off
MEMORY = 0.02
TABLES, ROUNDS, GAIN = 1000, (4, 6, 8, 12, 16), math.log(1.15)  # of the simulation
FALSE_TABLES = 0.065  # more than 1 in 20, by more than chance
SAME = "no measurable change"


class Selftest(Study):
    """Trains with steps whose cost is known, and compares what 00, 01 and checkpoints report; then
    tells how often a table in which nothing differs would hold a verdict here, and how often a gain
    by a factor of 1.15 is found, by the noise that journals in results/ have recorded."""

    runs_scripts = False
    in_report = ()

    def answer(self, setup):
        rows = list(known_steps(setup))
        text = markdown(Table([
            Column("script", lambda row: row[0], True),
            Column("made slow", lambda row: row[1], True),
            *(Column(name, partial(error_of, name)) for name in ("average", "median", "memory"))],
            rows, "What the record says over what is true: seconds per step, and bytes:"))
        wrong = [f"{row[0]}, {row[1]} slow: {name} off by {off(figures):+.2%}" for row in rows
                 for name, figures in row[2].items()
                 if abs(off(figures)) > (MEMORY if name == "memory" else LIMIT[setup.device])]
        recorded = noise_in(setup.results)
        lines = [(rounds, *shares(recorded, rounds)) for rounds in ROUNDS if recorded]
        text += "\n" + (markdown(Table([
            Column("rounds", lambda line: str(line[0])),
            Column("tables with a false verdict", lambda line: f"{line[1]:.1%}"),
            Column("gains of 15 % found", lambda line: f"{line[2]:.0%}")], lines,
            f"Of {TABLES:,} tables each, made of the noise in {len(recorded)} measurements here:"))
            if recorded else "No journal here has 4 rounds of 6 runs, so there is no noise to"
                             " simulate.\n")
        wrong += [f"{false:.0%} of the tables of {rounds} rounds hold a false verdict"
                  for rounds, false, _ in lines if false > FALSE_TABLES]
        if wrong:
            raise UserError(f"{text}\n{'; '.join(wrong)}")
        return text


def error_of(name: str, row: tuple[str, str, dict]) -> str:
    return f"{off(row[2][name]):+.2%}"


def off(figures: list[float]) -> float:
    reported, true = figures
    return reported / true - 1


def known_steps(setup) -> Iterator[tuple[str, str, dict]]:
    """(script, what was made slow, {figure: (reported, true)}) for 00, 01 and checkpoints."""
    for name in ("00", "01", "checkpoint-resume"):
        script = BUILD / "selftest" / f"{name}.py"
        run = setup.scripts.find(name, setup.machine)
        write_whole(script, setup.scripts.text(run.script))
        for case in CASES:
            if (case == "checkpoint") == (name == "checkpoint-resume"):
                told = processes.ask("-m", "bench.measure.known_step", script, case, setup.device)
                yield name, case, json.loads(told)


# ---- The rule of verdicts ----------------------------------------------------------------------


class Recorded(NamedTuple):
    """The noise of one measurement: for each of its rounds, by the order of its runs, the logarithm
    of each run's speed over the mean of that script."""

    rounds: list[list[float]]
    one_reference: bool  # whether all runs are compared to the first one, or each to the one before


def noise_in(folder) -> list[Recorded]:
    """That of every study of at least six runs in four rounds."""
    found = []
    for study in all_studies().values():
        for _, rows in found_in(folder, study.name):
            rows = [row for row in rows if row.speeds]
            numbers = set.intersection(*(set(row.by_round) for row in rows)) if rows else ()
            if len(rows) >= 6 and len(numbers) >= 4:
                residuals = [[scaled_residual(row, number) for row in rows]
                             for number in sorted(numbers)]
                found.append(Recorded(residuals, one_reference(rows)))
    return found


def scaled_residual(row: Row, number: int) -> float:
    """Of one round, as large as it would be over the true mean."""
    logs = {each: math.log(record.tok_per_sec) for each, record in row.by_round.items()}
    return (logs[number] - mean(logs.values())) * math.sqrt(len(logs) / (len(logs) - 1))


def shares(recorded: list[Recorded], rounds: int) -> tuple[float, float]:
    """(how many tables without a difference hold a verdict, how many gains of 15 % are found)."""
    draw = random.Random(rounds)
    false = found = 0
    for _ in range(TABLES):
        one = draw.choice(recorded)
        logs = noise_like(one, rounds, draw)
        place = draw.randrange(1, len(logs[0]))
        false += any(text != SAME for text in verdicts(logs, one.one_reference))
        gained = [[each + GAIN * (k == place or k > place and not one.one_reference)
                   for k, each in enumerate(log)] for log in logs]
        found += verdicts(gained, one.one_reference)[place - 1] == "faster"
    return false / TABLES, found / TABLES


def noise_like(recorded: Recorded, rounds: int, draw: random.Random) -> list[list[float]]:
    """Rounds of such noise (a wild bootstrap): recorded ones, each with a sign of its own, so that
    every run keeps its own noise, and what runs of one round have in common; from another run on,
    so that others are neighbours. Where there are too few, copies of them begin at other runs."""
    copies = []
    for _ in range(math.ceil(rounds / len(recorded.rounds))):
        turn = draw.randrange(len(recorded.rounds[0]))
        copies += [[*log[turn:], *log[:turn]] for log in recorded.rounds]
    return [[sign * each for each in log] for sign, log in zip(
        draw.choices((-1, 1), k=rounds), draw.sample(copies, rounds), strict=True)]


def verdicts(logs: list[list[float]], one_reference: bool) -> list[str]:
    """Of each run over the first one, or over the one before; `logs` are the logarithms of speeds
    by round."""
    ratios = [[log[k] - log[0 if one_reference else k - 1] for log in logs]
              for k in range(1, len(logs[0]))]
    noise = noise_of(ratios)
    return [verdict(each, noise) for each in ratios]
