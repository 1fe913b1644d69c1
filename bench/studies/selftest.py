"""Are the numbers right? The clock, the memory figures and the rule of verdicts, tested here."""

import json
import math
import random
from collections.abc import Iterator
from functools import partial
from statistics import mean

from bench import processes
from bench.common import BUILD, UserError, write_whole
from bench.noise import noise_of, verdict
from bench.study import Column, Study, Table, all_studies
from bench.tables import found_in, markdown

CASES = ["nothing", "evaluation", "log line", "sample and memory", "first step", "checkpoint"]
LIMIT = {"cuda": 0.02, "cpu": 0.05}  # by which a speed may be off
MEMORY = 0.02
TABLES, ROWS, GAIN = 1000, 15, math.log(1.15)  # simulated ladders, of 14 comparisons


class Selftest(Study):
    """Trains with steps whose cost is known, and compares what the scripts report; then tells how
    often a ladder that changes nothing would hold a verdict here, and how often a gain of 15 % is
    found, by the noise that journals in results/ have recorded."""

    runs_scripts = False
    in_report = ()

    def answer(self, setup):
        processes.prepare_tokens(setup.data)
        rows = list(known_steps(setup))
        text = markdown(Table([
            Column("script", lambda row: row[0], True),
            Column("made slow", lambda row: row[1], True),
            *(Column(name, partial(error_of, name)) for name in ("average", "median", "memory"))],
            rows, "What the record says over what is true: seconds per step, and bytes:"))
        recorded = noise_in(setup.results)
        if recorded:
            text += "\n" + markdown(rule_table(recorded))
        else:
            text += "\nNo journal here has 4 rounds of 6 runs, so there is no noise to simulate.\n"
        wrong = [f"{row[0]}, {row[1]} slow: {name} off by {off(figures):+.2%}" for row in rows
                 for name, figures in row[2].items()
                 if abs(off(figures)) > (MEMORY if name == "memory" else LIMIT[setup.device])]
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
        run = setup.scripts.stage(name) if name in ("00", "01") else setup.scripts.find(
            name, setup.machine)
        write_whole(script, setup.scripts.text(run.script))
        for case in CASES:
            if (case == "checkpoint") == (name == "checkpoint-resume"):
                told = processes.ask("-m", "bench.known_step", script, case,
                                     setup.data.resolve(), setup.device)
                yield name, case, json.loads(told)


# ---- The rule of verdicts ----------------------------------------------------------------------


def noise_in(folder) -> list[list[list[float]]]:
    """What was recorded of noise: of each measurement, for each of its rounds, in the order of its
    runs, the logarithm of each run's speed over the mean of that script."""
    found = []
    for study in all_studies().values():
        for _, rows in found_in(folder, study.name) if study.runs_scripts else ():
            rows = [row for row in rows if len(row.speeds) >= 4]
            if len(rows) >= 6:
                found.append([[scaled_residual(row.speeds_by_round, number) for row in rows
                               if number in row.speeds_by_round]
                              for number in rows[0].speeds_by_round])
    return found


def scaled_residual(speeds: dict[int, float], number: int) -> float:
    """Of one round, as large as it would be over the true mean."""
    whole = mean(map(math.log, speeds.values()))
    return (math.log(speeds[number]) - whole) * math.sqrt(len(speeds) / (len(speeds) - 1))


def rule_table(recorded: list[list[list[float]]]) -> Table:
    """How often ladders made of recorded noise, each of that of one measurement, hold a false
    verdict, and find a true gain."""
    def shares(rounds: int) -> tuple[float, float]:
        draw = random.Random(rounds)
        false = found = 0
        for _ in range(TABLES):
            measurement = draw.choice(recorded)
            logs = [one_round(measurement, draw) for _ in range(rounds)]
            place = draw.randrange(1, ROWS)
            false += any(text != "no measurable change" for text in verdicts(logs))
            gained = [[each + GAIN * (k >= place) for k, each in enumerate(log)] for log in logs]
            found += verdicts(gained)[place - 1] == "faster"
        return false / TABLES, found / TABLES

    lines = [(rounds, *shares(rounds)) for rounds in (4, 6, 8)]
    return Table([
        Column("rounds", lambda line: str(line[0])),
        Column("ladders with a false verdict", lambda line: f"{line[1]:.1%}"),
        Column("gains of 15 % found", lambda line: f"{line[2]:.0%}")], lines,
        f"Of {TABLES:,} ladders each, made of the noise in {len(recorded)} measurements:")


def one_round(measurement: list[list[float]], draw: random.Random) -> list[float]:
    """The noise of ROWS runs one after the other, from pieces of its rounds."""
    noise: list[float] = []
    while len(noise) < ROWS:
        piece = draw.choice(measurement)
        noise += piece[draw.randrange(len(piece)):][:ROWS - len(noise)]
    return noise


def verdicts(logs: list[list[float]]) -> list[str]:
    """Of each row over the one before; `logs` are the logarithms of speeds by round."""
    ratios = [[log[k + 1] - log[k] for log in logs] for k in range(ROWS - 1)]
    noise = noise_of(ratios)
    return [verdict(each, noise) for each in ratios]
