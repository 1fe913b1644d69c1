"""bench/studies/search.py and time_to_loss.py: the search, targets and times, with made-up runs."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from math import inf, log2
from types import SimpleNamespace
from unittest import mock

import pytest
from made_up import (
    CPU,
    MACHINE,
    carry_out,
    cells_of,
    measured_with,
    record_events,
    rows_of_text,
    setup_of,
    shown,
    write_journal,
)

from bench.analysis.folders import newest_in
from bench.analysis.rows import Rows
from bench.analysis.tuning import DEFAULT_LOSS, EPOCH_LOSS, Setting, setting_of
from bench.measure.plan import WholeScript
from bench.report.showable import text_of
from bench.studies import search, time_to_loss
from bench.studies.search import Search, next_settings, ranked, read_search, run_at
from bench.studies.time_to_loss import TimeToLoss
from gpt_speed.common import UserError
from patches.stack import StackError

MUON = "optimizer-muon+memory-checkpoint"
DEFAULT = {"00": (4, 5e-4), "01": (8, 5e-4)}
BEST = {"00": (2, 2e-3), "01": (4, 4e-3), MUON: (2, 8e-3)}
SETTINGS = [Setting(stage, *best) for stage, best in BEST.items()]
SPEED, LOSS = {"00": 100.0, "01": 500.0, MUON: 500.0}, {"00": 8.0, "01": 7.0, MUON: 7.0}


@pytest.fixture(scope="module", autouse=True)
def defaults():
    """The published settings, without a process that asks the scripts."""

    def configurations(runs, *_):
        settings = {run.name: DEFAULT[run.stage] for run in runs}
        return {
            name: dict(batch_size=batch, learning_rate=rate)
            for name, (batch, rate) in settings.items()
        }

    with mock.patch.object(search, "configurations", configurations):
        yield


def landscape(fails=lambda batch, rate: False):
    """Runs whose loss after 4,096 tokens is by so much higher as batch size and learning rate are
    off the best; after 8,192 tokens it is lower by 1."""

    def run_of(run, number: int) -> dict:
        stage = run.facts.get("stage") or run.stage or "01"
        default_batch, default_rate = DEFAULT.get(stage, (0, 0))
        batch = run.facts.get("batch") or default_batch
        rate = run.facts.get("rate") or default_rate
        best_batch, best_rate = BEST[stage]
        off = abs(log2(batch / best_batch)) + abs(log2(rate / best_rate))
        return dict(
            name=run.name,
            round=number,
            speed=SPEED[stage],
            loss=LOSS[stage] + off / 4,
            error="diverged" if fails(batch, rate) else None,
        )

    def runs_of(plan) -> list[dict]:
        rounds = range(1, (plan.rounds or 2) + 1)
        return [run_of(run, number) for number in rounds for run in plan.runs]

    return runs_of


def measure(study, setup, **how) -> list:
    """The plans of a study that is carried out."""
    return [plan for plan, _ in carry_out(study, setup, landscape(**how))]


def names(plan) -> list[str]:
    return [run.name for run in plan.runs]


EPOCH = 80_000  # tokens


@pytest.fixture(scope="module")
def searched(tmp_path_factory) -> SimpleNamespace:
    """A search that was carried out, of 00, 01 and MUON, which is named twice: its plans, and the
    folder of its results."""
    folder = tmp_path_factory.mktemp("search")
    setup = setup_of(folder, max_tokens=EPOCH, names=f"01,00,{MUON}, {MUON}")
    with mock.patch.dict(DEFAULT, {"00": (2, 2e-3)}):  # near enough for eight settings
        return SimpleNamespace(folder=folder, plans=measure(Search(), setup))


def test_a_search_halves_the_settings_of_each_script(searched):
    """Eight for an eighth of an epoch, two for a half, and the best for a whole one."""
    tried = {
        (plan.kind, plan.length.tokens): Counter(run.facts["stage"] for run in plan.runs)
        for plan in searched.plans
    }
    assert tried == {
        ("epoch-8", EPOCH // 8): dict.fromkeys(BEST, 8),
        ("epoch-2", EPOCH // 2): dict.fromkeys(BEST, 2),
        ("epoch", EPOCH): dict.fromkeys(BEST, 1),
    }


def test_a_part_of_a_search_grows_by_new_settings(searched):
    for before, after in pairwise(searched.plans):
        if before.kind == after.kind:
            assert names(after)[: len(names(before))] == names(before) != names(after)


def test_a_search_tunes_by_whole_runs_with_seeds_of_its_own(searched):
    for plan in searched.plans:
        assert (plan.new_seeds, plan.first_seed) == (True, 1)
        assert isinstance(plan.length, WholeScript)
        assert plan.targets == {}


def test_every_setting_of_a_search_has_its_figures_in_a_table(searched):
    for rows in newest_in(searched.folder, "search"):
        lines = rows_of_text(text_of(Search(), rows))
        assert len(lines) == len(rows) and all(line[3] for line in lines)


def test_a_search_ends_with_the_options_of_the_best(searched):
    rows = newest_in(searched.folder, "search")[-1]
    text = text_of(Search(), rows)
    for stage, (batch, rate) in BEST.items():
        assert f"\n{stage}: --batch-size {batch} --learning-rate {rate:g}\n" in text


def test_times_need_a_whole_search(tmp_path):
    times = setup_of(tmp_path, max_tokens=EPOCH, epoch=True)
    for plan, _ in carry_out(Search(), setup_of(tmp_path, max_tokens=EPOCH), landscape()):
        if plan.kind != "epoch":
            with pytest.raises(UserError, match="no whole search: python measure.py search"):
                next(TimeToLoss().plans(times))
    assert next(TimeToLoss().plans(times))


def test_times_are_those_of_the_best_settings_to_the_loss_of_00(searched):
    """With other seeds than the search, each compiling anew."""
    (plan,) = measure(TimeToLoss(), setup_of(searched.folder, max_tokens=EPOCH, epoch=True))
    first, *_ = names(plan)
    assert [setting_of(run) for run in plan.runs] == SETTINGS
    assert [run.compared_to for run in plan.runs] == [None, first, first]
    assert (plan.kind, plan.targets, plan.length.tokens) == ("epoch", {EPOCH_LOSS: 7.0}, 2 * EPOCH)
    assert (plan.first_seed, plan.new_seeds, plan.cold_rounds) == (123, True, 2)


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        (dict(options=["--dropout", "0"]), "with other options"),
        (dict(machine=MACHINE), "on another machine"),
    ],
)
def test_times_need_a_search_of_the_same_kind(searched, changes, difference):
    with pytest.raises(UserError, match=f"was measured {difference}"):
        next(TimeToLoss().plans(setup_of(searched.folder, epoch=True, **changes)))


def test_settings_that_fail_come_last(tmp_path):
    measure(Search(), setup_of(tmp_path), fails=lambda _, rate: rate >= 2e-3)
    settings, _ = read_search(setup_of(tmp_path))
    assert settings == [Setting("00", 2, 1e-3), Setting("01", 4, 1e-3)]
    assert not any(Search().has_failed(rows.measured) for rows in newest_in(tmp_path, "search"))


def test_what_is_tried_next():
    """What is around the best, then around the next best, until there are enough."""
    start = Setting("00", 1, 1.0)
    around = start.around()
    assert around == [Setting("00", 2, 1.0), Setting("00", 1, 0.5), Setting("00", 1, 2.0)]
    assert next_settings([start], 10) == around
    assert next_settings([start], 3) == around[:2]
    assert next_settings([start, *around], 2) == []  # more were tried already
    assert set(next_settings([start, *around], 10)) == set(around[0].around()) - {start}


def test_the_loss_in_time(tmp_path):
    """Of two settings the one that is ahead after as many seconds as the faster one takes."""
    settings = Setting("01", 1, 1.0), Setting("01", 2, 1.0), Setting("01", 4, 1.0)
    plan = search.plan_of_part(search.Part(8, 8), settings, setup_of(tmp_path))
    slow, fast, failed = names(plan)
    rows = Rows(
        measured_with(
            plan,
            {
                slow: record_events(slow, 100.0, loss=6.0, seed=plan.first_seed),
                fast: record_events(fast, 200.0, loss=7.0, seed=plan.first_seed),
                failed: "it broke",
            },
        )
    )
    # The fast one ends after 41 s, when the slow one has trained 4,096 tokens.
    assert [*map(search.loss_in_equal_time, rows)] == [pytest.approx(6.0), 6.0, inf]
    assert ranked(rows, "01")[-1] == settings[-1]


@pytest.mark.parametrize("machine", [CPU, MACHINE])
def test_all_that_is_left_is_known_at_each_step(tmp_path, machine):
    """So that an estimate is one of the whole search."""
    setup = setup_of(tmp_path, machine, max_tokens=8192, names=MUON)
    counts, plans = [], {}
    for plan, _ in carry_out(Search(), setup, landscape()):
        plans[plan.kind] = replace(plan, rounds=1)
        later = Search().later(setup, plan)
        assert all(other.length.tokens for other in later)
        counts.append(
            sum(len(other.jobs()) for other in plans.values())
            + sum(len(other.runs) for other in later)
        )
    total = 3 * sum(part.count for part in search.HALVING[setup.device])
    assert counts == [total] * len(counts) and len(counts) > 3


@pytest.mark.parametrize(
    ("study", "args", "why"),
    [
        (Search, dict(names="no-such"), "no-such"),
        (Search, dict(names="optimizer-muon+optimizer-adafactor"), "exclude each other"),
        (Search, dict(names="head-liger"), "head-liger: needs"),
        (TimeToLoss, dict(epoch=True, names="optimizer-muon"), "--epoch .* leave --names out"),
    ],
)
def test_wrong_options_are_refused_before_anything_runs(tmp_path, study, args, why):
    with pytest.raises((UserError, StackError), match=why):
        next(study().plans(setup_of(tmp_path, **args)))


def test_times_to_two_targets(tmp_path):
    """At 00's default settings and at the best."""
    targets = {DEFAULT_LOSS: 7.75, EPOCH_LOSS: 7.25}
    first, last = TimeToLoss().runs(setup_of(tmp_path))
    plain, fast = (run_at(setting, setup_of(tmp_path)) for setting in SETTINGS[:2])
    runs = [
        first,
        last,
        plain.replace(compared_to=first.name),
        fast.replace(compared_to=plain.name),
    ]
    plan = search.whole_runs(
        runs, "", WholeScript(tokens=3 * 8192, targets=targets), cold_rounds=2, rounds=2
    )
    write_journal(tmp_path, "time-to-loss", plan, landscape()(plan))
    (rows,) = newest_in(tmp_path, "time-to-loss")
    published, best = map(cells_of, text_of(TimeToLoss(), rows).split("Target ")[1:])
    assert published["01"] == {
        "run": "01",
        "tok/sec": "500",
        "× tok/sec": "5.00",
        "tokens": "5,120",
        "seconds": "18.2",
        "range": "18.2–18.2",
        "× to the loss": "4.49",
        "95%": "",
        "first step, extra s": "8.0",
        "× not counting compiling": "8.00",
        "compared to": "00",
    }
    line = best["01, batch 4, rate 0.004"]
    assert (line["tokens"], line["× not counting compiling"], line["compared to"]) == (
        "3,840",
        "9.33",
        "00, batch 2, rate 0.002",
    )
    figure = TimeToLoss().picture(rows)
    assert {"not reached", f"{line['seconds']} s, {line['× to the loss']}×"} <= {*shown(figure)}
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [
        "00",
        "00, batch 2, learning rate 0.002",
        "01",
        "01, batch 4, learning rate 0.004",
    ]  # the slowest first


def test_without_a_search(tmp_path):
    """The target is that of 00's default run; variants are compared to 01."""
    study, setup = TimeToLoss(), setup_of(tmp_path, names="optimizer-muon,compile-switch")
    target, plan = measure(study, setup)
    (later,) = study.later(setup, target)  # for an estimate of both
    assert (names(later), later.length.tokens) == (names(plan), 3 * time_to_loss.DEMO_TOKENS)
    assert study.later(setup, plan) == []
    assert (target.kind, names(target), target.rounds, target.first_seed) == (
        "target",
        ["00_orig"],
        2,
        1,
    )
    assert (plan.kind, plan.targets, plan.length.tokens) == (
        "variants",
        {DEFAULT_LOSS: 7.75},
        3 * 8192,
    )
    assert names(plan)[:3] == ["00_orig", "01_opt_single_gpu", "variant-optimizer-muon"]
    assert [run.compared_to for run in plan.runs] == [
        None,
        "00_orig",
        *["01_opt_single_gpu"] * (len(plan.runs) - 2),
    ]
    with pytest.raises(UserError, match="there is no target, .*diverged"):
        measure(study, setup, fails=lambda *_: True)
