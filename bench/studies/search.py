"""Searches the batch size and learning rate with which a script comes to a loss first.

Tokens per second alone can be bought with training that learns less from each token. So,
as in AlgoPerf and MLPerf Training, whole runs are compared by the time to a target that is
fixed before they start: what 00 comes to in an epoch of the text, at its best settings.
"""

import math
from argparse import SUPPRESS, ArgumentParser
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.analysis.rows import Row, Rows
from bench.analysis.tuning import EPOCH_LOSS, Setting, setting_of
from bench.catalogue import Run
from bench.common import relative
from bench.measure.journal import journal_of, newest, read_journal
from bench.measure.measurement import Measurement
from bench.measure.plan import Plan, Setup, WholeScript
from bench.measure.sizing import configurations, tokens_per_epoch
from bench.report.notes import machine_note
from bench.report.tables import RUN, SPEED
from bench.report.to_loss import LOWEST_LOSS
from bench.studies import Plans, Study
from gpt_speed.common import UserError
from gpt_speed.tables import Column, Table

# Fields of a Plan whose runs choose settings; reported times have other seeds.
TUNING: dict = dict(first_seed=1, cold_rounds=0)
NO_SEARCH = "there is no whole search: python measure.py search, or search --resume"
LIMIT = 2  # epochs without the target, after which a run is ended
LOG_TOKENS = {"cuda": 40_960, "cpu": 16_384}  # from one log line to the next


@dataclass(frozen=True)
class Part:
    """A part of a search."""

    divisor: int  # each setting trains for 1/divisor of an epoch
    count: int  # settings of each script

    @property
    def kind(self) -> str:
        if self.divisor == 1:
            return "epoch"
        return f"epoch-{self.divisor}"


# The parts by the device, in their order.
# An eighth of the book's epoch would be 0.2 seconds on a GPU, seven steps, which tell nothing.
HALVING = {"cuda": [Part(2, 8), Part(1, 1)], "cpu": [Part(8, 8), Part(2, 2), Part(1, 1)]}


def run_at(setting: Setting, setup: Setup) -> Run:
    """Returns the run of a script with these settings. Raises UserError, StackError."""
    run = setup.scripts.find(setting.script, setup.machine)
    batch, rate = str(setting.batch), f"{setting.rate:g}"
    return run.replace(
        name=f"{run.name}-batch-{batch}-rate-{rate}",
        published=None,
        label=f"{run.label}, batch {batch}, rate {rate}",
        facts=setting.facts,
        compared_to=None,
        options=(*run.options, "--batch-size", batch, "--learning-rate", rate),
    )


def default_setting(setup: Setup) -> Setting:
    """Returns the published settings of 00, or what the options say."""
    run = setup.scripts.stage("00")
    config = configurations([run], setup)[run.name]
    size = config["batch_size"]
    return Setting("00", setup.batches.get(size, size), config["learning_rate"])


def loss_in_equal_time(row: Row) -> float:
    """Returns the loss after as many seconds as the fastest settings of the row's script took
    for all of their tokens; infinity where the run failed."""
    if row.error:
        return math.inf
    script = setting_of(row.run).script
    rows_of_script = [other for other in row.table if setting_of(other.run).script == script]
    times = [training.train_seconds for other in rows_of_script for training in other.trainings]
    return row.loss_at(min(times, default=0)) or math.inf


def equal_time_text(row: Row) -> str:
    return f"{loss_in_equal_time(row):.4f}"


def ranked(rows: Rows, script: str) -> list[Setting]:
    """Returns the settings of a script that were tried, the best first, failed ones last."""
    tried = [row for row in rows if setting_of(row.run).script == script]
    return [setting_of(row.run) for row in sorted(tried, key=loss_in_equal_time)]


def next_settings(tried: list[Setting], count: int) -> list[Setting]:
    """Returns untried neighbours of the best settings that have some, up to `count` settings in
    all; of those `tried` the best are the first."""
    left = max(0, count - len(tried))
    for setting in tried:
        untried = [neighbour for neighbour in setting.around() if neighbour not in tried]
        if untried:
            return untried[:left]
    return []


def whole_runs(runs: list[Run], kind: str, length: WholeScript, **fields) -> Plan:
    """Returns a plan of whole runs with a new seed in each round, with further fields of Plan."""
    return Plan(runs, kind, length, new_seeds=True, **fields)


def plan_of_part(part: Part, settings: list[Setting], setup: Setup) -> Plan:
    """Returns the plan of a part of a search with these settings."""
    runs = [run_at(setting, setup) for setting in settings]
    epoch = setup.args.max_tokens or tokens_per_epoch(setup.data)
    length = WholeScript(tokens=epoch // part.divisor, log_tokens=LOG_TOKENS[setup.device])
    return whole_runs(runs, part.kind, length, **TUNING)


def explore(
    setup: Setup, scripts: tuple[str, ...], part: Part
) -> Generator[Plan, Measurement, Rows]:
    """Yields plans until the part's number of settings of each script were tried. Returns the rows.
    The search begins with 00 at its default settings. The others begin at the best settings of 00,
    which are a better start than the published ones."""
    first, *others = scripts
    rows = yield from climb(setup, [default_setting(setup)], part)
    best = ranked(rows, first)[0]
    starts = [best._replace(script=script) for script in others]
    return (yield from climb(setup, starts, part, rows))


def climb(
    setup: Setup, starts: list[Setting], part: Part, before: Sequence[Row] = ()
) -> Generator[Plan, Measurement, Rows]:
    """Yields plans with more and more settings, until the part's number of each script was tried:
    first the `starts`, one for each script, then neighbours of the best ones. Each plan has the
    rows from `before`, too. Returns the rows."""
    settings, new = [setting_of(row.run) for row in before], starts
    while new:
        settings += new
        measured = yield plan_of_part(part, settings, setup)
        rows = Rows(measured)
        tried_by_script = [ranked(rows, start.script) for start in starts]
        new = [setting for tried in tried_by_script for setting in next_settings(tried, part.count)]
    return rows


def read_search(setup: Setup) -> tuple[list[Setting], WholeScript]:
    """Returns the best settings of each script, 00's first, and the length of runs to the target
    that it found. Raises UserError where there is no whole search, or one that was measured in
    another way, OSError."""
    path = journal_of(setup.results, "search")
    last = whole_search(path)
    rows = Rows(last)
    target, epoch = rows[0].lowest_val_loss, last.plan.length.tokens
    if rows[0].error or target is None or not epoch:
        raise UserError(NO_SEARCH)
    different = last.differs_from(setup)
    if different:
        raise UserError(
            f"{relative(path)} was measured {different}: search again, or use another --results-dir"
        )
    settings = [setting_of(row.run) for row in rows if not row.error]
    log_tokens = LOG_TOKENS[setup.device]
    length = WholeScript(targets={EPOCH_LOSS: target}, tokens=LIMIT * epoch, log_tokens=log_tokens)
    return settings, length


def whole_search(journal: Path) -> Measurement:
    """Returns the last part of the newest search. Raises UserError where that isn't finished,
    OSError."""
    parts = {part.kind: part for part in newest(read_journal(journal))}
    last = parts.get("epoch")
    if not last or last.jobs_left():
        raise UserError(NO_SEARCH)
    return last


class Search(Study):
    """Tune batch size and learning rate for the loss of one epoch.

    By halving: eight settings of 00, 01 and each variant train for a part of an epoch of the
    text, or of --max-tokens, and the best to its end. The lowest validation loss of 00 there is
    the target of time-to-loss --epoch. It takes hours on a CPU."""

    rounds = {"cuda": 1, "cpu": 1}
    tokens = None

    def options(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--names",
            metavar="A,B+C",
            help="variants to search for besides; + joins several into one script",
        )
        parser.add_argument("--epoch", action="store_true", help=SUPPRESS)  # of older commands

    def has_failed(self, measured: Measurement) -> bool:
        return False  # settings with which training fails are part of a search

    def scripts(self, setup: Setup) -> tuple[str, ...]:
        """Returns 00, 01 and the variants asked for. Raises UserError for wrong ones."""
        names = filter(None, map(str.strip, (setup.args.names or "").split(",")))
        scripts = tuple(dict.fromkeys(["00", "01", *names]))
        for script in scripts:
            error = setup.scripts.find(script, setup.machine).error
            if error:
                raise UserError(f"{script}: {error}")
        return scripts

    def plans(self, setup: Setup) -> Plans:
        scripts = self.scripts(setup)
        first, *others = HALVING[setup.device]
        rows = yield from explore(setup, scripts, first)
        for part in others:
            best = [setting for script in scripts for setting in ranked(rows, script)[: part.count]]
            measured = yield plan_of_part(part, best, setup)
            rows = Rows(measured)

    def later(self, setup: Setup, plan: Plan) -> list[Plan]:
        """Returns a plan of one run, at the default settings, for each that is left to try of a
        script, in this part and those after it."""
        parts = HALVING[setup.device]
        kinds = [part.kind for part in parts]
        now, *after = parts[kinds.index(plan.kind) :]
        tried = Counter(setting_of(run).script for run in plan.runs)
        plans = []
        for script in self.scripts(setup):
            default = default_setting(setup)._replace(script=script)
            left = now.count - tried[script]
            plans += [plan_of_part(now, [default], setup)] * left
            for part in after:
                plans += [plan_of_part(part, [default], setup)] * part.count
        return plans

    def tables(self, rows: Rows) -> list[Table]:
        _, _, divisor = rows.measured.kind.partition("-")
        share = "All"
        if divisor:
            share = f"1/{divisor}"
        caption = (
            f"{share} of an epoch. Loss in equal time: at the"
            " moment when the script's fastest setting had finished; the settings best"
            " in this column go on."
        )
        equal = Column("loss in equal time", equal_time_text)
        return [Table([RUN, SPEED, LOWEST_LOSS, equal], rows, caption)]

    def notes(self, rows: Rows) -> list[str]:
        notes = [machine_note(rows), "Medians over the seeds; without compile time."]
        if rows.measured.kind == "epoch":
            settings = [setting_of(row.run) for row in rows if not row.error]
            notes += [
                f"{setting.script}: --batch-size {setting.batch} --learning-rate {setting.rate:g}"
                for setting in settings
            ]
        return notes
