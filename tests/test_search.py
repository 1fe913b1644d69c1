"""bench/studies/search.py and time_to_loss.py: the search, targets and times, with made-up runs."""

from collections import Counter
from dataclasses import replace
from math import inf, log2

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
from bench.analysis.rows import rows_of
from bench.report.tables import text_of
from bench.studies import search, time_to_loss
from bench.studies.search import Point, Search, next_points, ranked, read_search
from bench.studies.time_to_loss import TimeToLoss
from gpt_speed.common import UserError
from patches.stack import StackError

MUON = "optimizer-muon+memory-checkpoint"
DEFAULT = {"00": (4, 5e-4), "01": (8, 5e-4)}
BEST = {"00": (2, 2e-3), "01": (4, 4e-3), MUON: (2, 8e-3)}
POINTS = [Point(stage, *best) for stage, best in BEST.items()]
SPEED, LOSS = {"00": 100.0, "01": 500.0, MUON: 500.0}, {"00": 8.0, "01": 7.0, MUON: 7.0}


@pytest.fixture(autouse=True)
def defaults(monkeypatch):
    monkeypatch.setattr(
        search,
        "configurations",
        lambda runs, *_: {
            run.name: dict(zip(("batch_size", "learning_rate"), DEFAULT[run.stage], strict=True))
            for run in runs
        },
    )


def landscape(fails=lambda batch, rate: False):
    """Runs whose loss after 4,096 tokens is by so much higher as batch size and learning rate are
    off the best; after 8,192 tokens it is lower by 1."""

    def runs_of(plan) -> list[dict]:
        runs = []
        for number in range(1, (plan.rounds or 2) + 1):
            for run in plan.runs:
                stage = run.facts.get("stage") or run.stage or "01"
                batch, rate = (
                    run.facts.get(name) or default
                    for name, default in zip(
                        ("batch", "rate"), DEFAULT.get(stage, (0, 0)), strict=True
                    )
                )
                off = sum(
                    abs(log2(one / best))
                    for one, best in zip((batch, rate), BEST[stage], strict=True)
                )
                runs.append(
                    dict(
                        name=run.name,
                        round=number,
                        speed=SPEED[stage],
                        loss=LOSS[stage] + off / 4,
                        error="diverged" if fails(batch, rate) else None,
                    )
                )
        return runs

    return runs_of


def measure(study, setup, **how) -> list:
    """The plans of a study that is carried out."""
    return [plan for plan, _ in carry_out(study, setup, landscape(**how))]


def names(plan) -> list[str]:
    return [run.name for run in plan.runs]


def test_search(tmp_path, monkeypatch):
    """By halving, each script with as many settings; what 00 comes to at the end is the target. The
    times to it are measured with other seeds, each compiling anew."""
    monkeypatch.setitem(DEFAULT, "00", (2, 2e-3))  # near enough for eight settings
    setup = setup_of(tmp_path, max_tokens=80_000, names=f"01,00,{MUON}, {MUON}")  # each once
    times = setup_of(tmp_path, max_tokens=80_000, epoch=True)
    plans = []
    for plan, _ in carry_out(Search(), setup, landscape()):
        plans.append(plan)
        if plan.kind != "epoch":
            with pytest.raises(UserError, match="no whole search: python measure.py search"):
                next(TimeToLoss().plans(times))
    tried = {
        (plan.kind, plan.tokens): Counter(run.facts["stage"] for run in plan.runs) for plan in plans
    }
    assert tried == {
        phase: dict.fromkeys(BEST, count)
        for phase, count in (
            (("epoch-8", 10_000), 8),
            (("epoch-2", 40_000), 2),
            (("epoch", 80_000), 1),
        )
    }
    for before, after in zip(plans, plans[1:], strict=False):
        if before.kind == after.kind:
            assert names(after)[: len(names(before))] == names(before) != names(after)
        assert (after.full_length, after.new_seeds, after.first_seed, after.targets) == (
            True,
            True,
            1,
            {},
        )
    for measured, rows in newest_in(tmp_path, "search"):
        text = text_of(Search(), measured)
        assert [bool(line[3]) for line in rows_of_text(text)] == [True] * len(rows)
    for stage, (batch, rate) in BEST.items():
        assert f"\n{stage}: --batch-size {batch} --learning-rate {rate:g}\n" in text
    (plan,) = measure(TimeToLoss(), times)
    assert [Point(**run.facts) for run in plan.runs] == POINTS
    assert [run.compared_to for run in plan.runs] == [None, *names(plan)[:1] * 2]
    assert (plan.kind, plan.targets, plan.tokens) == ("epoch", {search.TARGET: 7.0}, 160_000)
    assert (plan.first_seed, plan.new_seeds, plan.cold_rounds) == (123, True, 2)
    for changes, why in (
        (dict(options=["--dropout", "0"]), "with other options"),
        (dict(machine=MACHINE), "on another machine"),
    ):
        with pytest.raises(UserError, match=f"was measured {why}"):
            next(TimeToLoss().plans(setup_of(tmp_path, epoch=True, **changes)))


def test_settings_that_fail_come_last(tmp_path):
    measure(Search(), setup_of(tmp_path), fails=lambda _, rate: rate >= 2e-3)
    points, _ = read_search(setup_of(tmp_path))
    assert points == [Point("00", 2, 1e-3), Point("01", 4, 1e-3)]
    assert not any(Search().has_failed(measured) for measured, _ in newest_in(tmp_path, "search"))


def test_what_is_tried_next():
    """What is around the best, then around the next best, until there are enough."""
    start = Point("00", 1, 1.0)
    around = start.around()
    assert around == [Point("00", 2, 1.0), Point("00", 1, 0.5), Point("00", 1, 2.0)]
    assert next_points([start], 10) == around
    assert next_points([start], 3) == around[:2]
    assert set(next_points([start, *around], 10)) == set(around[0].around()) - {start}


def test_the_loss_in_time(tmp_path):
    """Of two settings the one that is ahead after as many seconds as the faster one takes."""
    points = Point("01", 1, 1.0), Point("01", 2, 1.0), Point("01", 4, 1.0)
    plan = search.part_of(setup_of(tmp_path), points, 8)
    slow, fast, failed = names(plan)
    rows = rows_of(
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
    assert ranked(rows, "01")[-1] == points[-1]


@pytest.mark.parametrize("machine", [CPU, MACHINE])
def test_all_that_is_left_is_known_at_each_step(tmp_path, machine):
    """So that an estimate is one of the whole search."""
    setup = setup_of(tmp_path, machine, max_tokens=8192, names=MUON)
    counts, plans = [], {}
    for plan, _ in carry_out(Search(), setup, landscape()):
        plans[plan.kind] = replace(plan, rounds=1)
        later = Search().later(setup, plan)
        assert all(other.tokens for other in later)
        counts.append(
            sum(len(other.jobs()) for other in plans.values())
            + sum(len(other.runs) for other in later)
        )
    total = 3 * sum(search.HALVING[setup.device].values())
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
    targets = {time_to_loss.TARGET: 7.75, search.TARGET: 7.25}
    first, last = TimeToLoss().runs(setup_of(tmp_path))
    plain, fast = (point.run(setup_of(tmp_path)) for point in POINTS[:2])
    runs = [
        first,
        last,
        plain.replace(compared_to=first.name),
        fast.replace(compared_to=plain.name),
    ]
    plan = search.plan_of(runs, "", tokens=3 * 8192, cold_rounds=2, rounds=2, targets=targets)
    write_journal(tmp_path, "time-to-loss", plan, landscape()(plan))
    ((measured, rows),) = newest_in(tmp_path, "time-to-loss")
    published, best = map(cells_of, text_of(TimeToLoss(), measured).split("Target ")[1:])
    assert published["01"] == {
        "run": "01",
        "tok/sec": "500",
        "× tok/sec": "5.00",
        "tokens": "5,120",
        "seconds": "18.2",
        "range": "18.2–18.2",
        "× to the loss": "4.49",
        "95 %": "",
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
    figure = TimeToLoss().picture(measured, rows)
    assert {"not reached", f"{line['seconds']} s, {line['× to the loss']}×"} <= {*shown(figure)}
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [
        "00",
        "00, batch 2, rate 0.002",
        "01",
        "01, batch 4, rate 0.004",
    ]  # the slowest first


def test_without_a_search(tmp_path):
    """The target is that of 00's default run; variants are compared to 01."""
    study, setup = TimeToLoss(), setup_of(tmp_path, names="optimizer-muon,compile-switch")
    target, plan = measure(study, setup)
    (later,) = study.later(setup, target)  # for an estimate of both
    assert (names(later), later.tokens) == (names(plan), 3 * time_to_loss.DEMO_TOKENS)
    assert study.later(setup, plan) == []
    assert (target.kind, names(target), target.rounds, target.first_seed) == (
        "target",
        ["00_orig"],
        2,
        1,
    )
    assert (plan.kind, plan.targets, plan.tokens) == (
        "variants",
        {time_to_loss.TARGET: 7.75},
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
