"""bench/analysis/rows.py: medians, factors and significance, from made-up records."""

import math
from dataclasses import replace
from statistics import geometric_mean

import pytest
from made_up import CPU, MACHINE, plan_of, rounds_of, write_journal
from scipy.stats import ttest_rel

from bench.analysis.figures import Goal
from bench.analysis.gains import is_of_variant
from bench.analysis.rows import Rows, printed
from bench.measure.journal import read_journal
from bench.report.notes import rounds_note, seeds_note
from bench.report.to_loss import time_columns


@pytest.fixture
def rows(tmp_path):
    return lambda plan, runs: Rows(*read_journal(write_journal(tmp_path, "a", plan, runs)))


# ---- A run's own figures


def test_medians(rows):
    """Over the rounds, in their order; runs with another seed tell their speed and their loss."""
    memory = {1: 1.0, 2: None, 3: 2.0, 4: 4.0}
    runs = [
        dict(name="a", round=k, speed=200.0 + k, loss=8 + k / 8, reserved_gb=memory[k])
        for k in (3, 1, 4, 2)
    ]
    runs += [dict(name="a", round=k, seed=123 + k, speed=50.0, loss=9 + k) for k in memory]
    (row,) = rows(plan_of("a"), runs)
    assert (row.rounds, sorted(row.speeds)) == (4, [50] * 4 + [201, 202, 203, 204])
    assert (row.tok_per_sec, row.reserved_gb) == (125.5, 1.25)
    assert (row.val_loss, row.lowest_val_loss) == (8.3125, 7.3125)  # after the tokens; of all
    assert row.losses_by_seed == {123: 8.5, 124: 10, 125: 11, 126: 12, 127: 13}
    assert row.training.tok_per_sec == 201  # of the first round, which compiles


@pytest.mark.parametrize(
    ("config", "share"),
    [
        ({}, 0.1),
        (dict(matmul_precision="high"), 0.05),
        (dict(dtype="bfloat16"), 0.025),
        (dict(dtype="float16"), None),
        (dict(dtype=None), None),
    ],
)  # not measured; an old record
def test_share_of_this_machines_peak(rows, config, share):
    (row,) = rows(plan_of("a"), rounds_of("a", 100.0, gpu="NVIDIA H100 80GB HBM3", config=config))
    assert row.share_of_peak == (share and pytest.approx(share))
    assert row.mfu == pytest.approx(100e9 / 989e12)


@pytest.mark.parametrize(("machine", "share"), [(CPU, 0.1), (MACHINE, 0.025)])
def test_the_peak_of_several_ranks(tmp_path, machine, share):
    """Of a CPU the ranks share one peak; of GPUs each rank has its own."""
    plan = plan_of("a")
    plan.runs = [plan.runs[0].replace(processes=4)]
    path = write_journal(
        tmp_path, "a", plan, rounds_of("a", 100.0, config=dict(world_size=4)), machine
    )
    (row,) = Rows(*read_journal(path))
    assert row.share_of_peak == pytest.approx(share)


def test_errors(rows):
    """Of a run that can't run, of one that failed, of one that failed later, told once."""
    plan = plan_of(*"abcd")
    plan.runs[0] = plan.runs[0].replace(error="needs the package x")
    runs = [
        dict(name="b", error="out of memory: lower it"),
        dict(name="c"),
        dict(name="c", round=2, error="it broke"),
        dict(name="c", round=3, error="no"),
    ]
    a, b, c, d = rows(plan, runs)
    assert [row.error for row in (a, b, c, d)] == [
        "needs the package x",
        "failed: out of memory: lower it",
        "failed: it broke",
        None,
    ]
    assert (c.tok_per_sec, c.rounds, c.reference) == (100, 1, None)
    for row in (a, b, d):
        assert {
            row.tok_per_sec,
            row.val_loss,
            row.reserved_gb,
            row.record,
            row.significance,
            row.factor,
            row.share_of_peak,
        } == {None}


# ---- Compared


def mean_ratio(speeds, others=range(100, 104)) -> float:
    return geometric_mean(one / other for one, other in zip(speeds, others, strict=True))


def test_factors(rows):
    """Over the row before, or the nearest before that with figures; and over the first one: means
    of the rounds' ratios."""
    plan = plan_of("base", "cores", "broken", "last")
    plan.runs = [
        run.replace(published=speed)
        for run, speed in zip(plan.runs, (100.0, 200.0, 500.0, 800.0), strict=True)
    ]
    runs = [
        *rounds_of("base", 100.0, 101.0, 102.0, 103.0),
        *rounds_of("cores", 103.0, 104.0, 105.0, 106.0, loss=8.25, reserved_gb=2.5),
        dict(name="broken", error="it broke"),
        *rounds_of("last", *[418.0] * 4, loss=7.5, reserved_gb=1.25),
    ]
    base, cores, broken, last = rows(plan, runs)
    assert (base.reference, base.baseline, base.factor, base.factor_baseline) == (None,) * 4
    assert (base.significance, base.memory_factor, base.loss_difference) == (None,) * 3
    assert cores.factor == cores.factor_baseline == pytest.approx(mean_ratio(range(103, 107)))
    assert (cores.significance, cores.memory_factor) == ("faster", pytest.approx(2))
    assert (broken.factor, broken.published_factor) == (None, 2.5)
    assert (last.reference, last.baseline) == (cores, base)
    assert (last.factor, last.factor_baseline) == pytest.approx(
        (mean_ratio([418] * 4, range(103, 107)), mean_ratio([418] * 4))
    )
    assert (last.published_factor, last.published_factor_baseline) == (4.0, 8.0)
    assert (last.loss_difference, last.significance) == (-0.75, "faster")
    assert last.memory_factor == pytest.approx(0.5)


def noisy(*speeds: float) -> list[dict]:
    """Runs of "a", "b" and so on in four rounds, each row with about this speed and noise of its
    own."""
    return [
        run
        for name, speed, noise in zip(
            "abcd", speeds, ((0, 4, -2, 1), (3, 1, 4, 0), (0, 1, 5, -4), (2, 2, 0, 3)), strict=False
        )
        for run in rounds_of(name, *(speed * (1 + part / 300) for part in noise))
    ]


def of_one_base(*names: str, **settings):
    plan = plan_of(*names, **settings)
    plan.runs = [
        run.replace(compared_to=names[0] if run.name != names[0] else None) for run in plan.runs
    ]
    return plan


def test_leave_one_out(rows):
    """Factor and significance of the technique are those of 01 over 01 without it."""
    plan = of_one_base(*"abc")
    plan.runs[1:] = [run.replace(ablated=run.name) for run in plan.runs[1:]]
    whole, without, same = rows(plan, noisy(800, 400, 800))
    low, high = without.interval
    assert without.significance == "faster" and 1.9 < low < without.factor < high < 2.1
    assert (whole.factor, whole.significance) == (None, None)
    assert same.significance == "no significant change"


def test_interval_and_the_least_that_is_seen(rows):
    """A factor that isn't significant lies below what would be; its interval holds it. Extra runs
    of the baseline make it narrower."""
    plan, runs = of_one_base(*"abc", rounds=4), noisy(100, 101, 300)
    _, b, c = rows(plan, runs)
    assert (b.significance, c.significance) == ("no significant change", "faster")
    low, high = b.interval
    assert low < 1 < b.factor < high and c.interval[0] > 1
    plan.seed_noise = 2
    runs += [
        dict(name="a", round=number, seed=123 + number * 2 + k, speed=100.0 + k / 10)
        for number in range(1, 5)
        for k in (0, 1)
    ]
    _, more, _ = rows(plan, runs)
    assert more.interval[1] - more.interval[0] < high - low


def test_a_factor_alone(rows):
    """In a single round, without interval or significance."""
    b = rows(plan_of(*"abc"), [run for run in noisy(100, 200, 300) if run["round"] == 1])[1]
    assert b.factor == pytest.approx(2, rel=0.02)
    assert (b.interval, b.significance) == (None, "not tested")


def test_two_rows(rows):
    """By the rounds' ratios alone, which are in the interval of their mean."""
    _, b = rows(plan_of("a", "b"), noisy(100, 200))
    expected = ttest_rel(*([math.log(speed) for speed in row.speeds] for row in (b, b.reference)))
    assert b.interval == pytest.approx(tuple(map(math.exp, expected.confidence_interval())))
    assert b.significance == "faster"


def test_only_the_speedup_over_the_reference_is_tested(rows):
    """What the table says of a row over the one before isn't true of it over another one."""
    _, b, c = rows(plan_of(*"abc"), noisy(100, 200, 201))
    assert (b.significance, c.significance) == ("faster", "no significant change")
    over_the_first = c.speedup_over(c.baseline)
    assert over_the_first.interval[0] > 1.9
    with pytest.raises(AttributeError):
        over_the_first.significance  # noqa: B018 (it is a property)


def test_a_failed_run_leaves_its_row_out_of_the_test(rows):
    """Never its round; the factor is over the rounds that are there, and a note names the row."""
    plan, runs = of_one_base(*"abcd", rounds=4), noisy(100, 200, 300, 400)
    runs = [run for run in runs if (run["name"], run["round"]) != ("d", 4)]
    failed = rows(plan, [*runs, dict(name="d", round=4, error="failed: it broke")])
    three = rows(of_one_base(*"abc", rounds=4), [run for run in runs if run["name"] != "d"])
    assert vars(failed[0].table.family()) == vars(three[0].table.family())
    d = failed[3]
    assert (d.significance, d.interval, d.factor) == ("not tested", None, pytest.approx(4, 0.02))


def test_added_rounds_are_told(tmp_path):
    """Not those that follow a single one, in which nothing can be significant."""
    for planned, says in ((2, "4 rounds (2 planned, 2 added)"), (1, "4 rounds"), (4, "4 rounds")):
        folder, runs = tmp_path / str(planned), noisy(100, 200, 300)
        write_journal(
            folder,
            "a",
            plan_of(*"abc", rounds=planned),
            [run for run in runs if run["round"] <= max(2, planned)],
        )
        path = write_journal(folder, "a", plan_of(*"abc", rounds=4), runs)
        (measured,) = read_journal(path)
        assert rounds_note(Rows(measured)) == says


def test_the_rounds_that_all_rows_have_are_counted(tmp_path):
    """Not those of which only some rows have a run, nor the rows with a failed run."""
    plan, runs = plan_of(*"abcd", rounds=4), noisy(100, 200, 300, 400)
    runs = [run for run in runs if run["name"] != "b" or run["round"] <= 2]
    runs = [run for run in runs if (run["name"], run["round"]) != ("d", 1)]
    path = write_journal(tmp_path, "a", plan, [*runs, dict(name="d", error="it broke")])
    (measured,) = read_journal(path)
    assert rounds_note(Rows(measured)).startswith("2 rounds (some rows 4")


def test_a_note_tells_the_rounds_of_what_others_are_compared_to(tmp_path):
    """Where a run of that failed, factors rest on fewer rounds than the rows have."""
    plan, runs = of_one_base(*"abc", rounds=4), noisy(100, 200, 300)
    runs = [run for run in runs if run["name"] != "a" or run["round"] == 1]
    runs.append(dict(name="a", round=2, error="it broke"))
    (measured,) = read_journal(write_journal(tmp_path, "a", plan, runs))
    assert rounds_note(Rows(measured)) == ("4 rounds (1 of `a`, to which others are compared)")


def test_a_note_tells_the_seeds_that_are_there(tmp_path):
    """Without that of a damaged round."""
    plan, runs = replace(of_one_base(*"ab", rounds=3), new_seeds=True), noisy(100, 200)
    runs = [run | dict(seed=plan.seed_of(run["round"])) for run in runs]
    for rounds, says in ((1, 3), "seeds 123 and 125"), ((1, 2, 3), "seeds 123 to 125"):
        folder = tmp_path / str(len(rounds))
        own = [run for run in runs if run["round"] in rounds]
        (measured,) = read_journal(write_journal(folder, "a", plan, own))
        assert seeds_note(Rows(measured)) == says


@pytest.mark.parametrize(
    ("losses", "noise"), [([8.0, 8.25, 7.75], 0.5), ([8.0], None), ([8.0, None], None)]
)
def test_seed_noise(rows, losses, noise):
    """The range of a row's losses, of which there have to be several."""
    (row,) = rows(
        plan_of("a"),
        [
            dict(name="a", seed=seed, loss=loss or 0, tokens=4096 if loss else 2048)
            for seed, loss in enumerate(losses, 123)
        ],
    )
    assert row.seed_noise == noise


# ---- A slow run


def ladder_of(*names: str):
    """A ladder: every script has one technique more than the one before."""
    plan = plan_of(*names)
    plan.runs = [run.replace(number=number) for number, run in enumerate(plan.runs)]
    return plan


@pytest.fixture
def ladder(tmp_path):
    """The rows of a ladder in which every row is 1.5 times as fast as the one before, but for one
    run of `slow`, which takes so many times its median time."""

    def ladder(slow: str, times: float, machine=MACHINE, plan=None):
        runs = [
            run
            for k, name in enumerate("abcdef")
            for run in rounds_of(
                name, *(100 * 1.5**k * (1 + n * (n + k) % 5 / 300) for n in range(4))
            )
        ]
        late = next(run for run in runs if (run["name"], run["round"]) == (slow, 4))
        late["speed"] /= times
        path = write_journal(tmp_path, "ladder", plan or ladder_of(*"abcdef"), runs, machine)
        return Rows(*read_journal(path))

    return ladder


def test_a_row_with_a_slow_run_is_printed_with_the_next(ladder):
    """Their gain is that of both techniques, and only that is tested."""
    a, b, c, d, *_ = rows = ladder("c", 1.2)
    assert printed(rows) == [row for row in rows if row is not c]
    assert (c.joined_with, d.joined) == (d, [c])
    assert (c.reference, c.factor, c.significance) == (None, None, None)
    assert (d.reference, d.techniques) == (b, [2, 3])
    assert (d.factor, d.significance) == (pytest.approx(1.5**2, rel=0.01), "faster")
    assert d.table.family().differences.keys() == set("bdef")
    assert d.factor_baseline == pytest.approx(1.5**3, rel=0.01)


@pytest.mark.parametrize(
    ("slow", "times", "machine"),
    [
        ("c", 1.05, MACHINE),  # as noise is
        ("c", 1.5, CPU),  # where noise is wider
        ("a", 1.5, MACHINE),  # the baseline gains nothing
        ("f", 1.5, MACHINE),  # there is no next one
    ],
)
def test_other_rows_are_printed_on_their_own(ladder, slow, times, machine):
    rows = ladder(slow, times, machine)
    assert printed(rows) == [*rows]
    assert [row.techniques for row in rows] == [[], [1], [2], [3], [4], [5]]


def test_what_is_no_ladder_keeps_its_rows(ladder):
    """Whatever its runs are compared to: they aren't steps of the series."""
    rows = ladder("c", 1.5, plan=plan_of(*"abcdef"))
    assert printed(rows) == [*rows] and rows[3].reference is rows[2]


def test_a_wide_interval(rows):
    """Its upper end is more than 1.4 times its lower one."""
    runs = [*rounds_of("a", 100.0, 100.0, 101.0), *rounds_of("b", 200.0, 110.0, 205.0)]
    _, wide = rows(plan_of("a", "b"), runs)
    assert wide.interval[1] > 1.4 * wide.interval[0] and wide.speedup().is_wide
    _, narrow = rows(plan_of("a", "b"), noisy(100, 200))
    assert narrow.interval[1] < 1.4 * narrow.interval[0] and not narrow.speedup().is_wide


@pytest.mark.parametrize(
    ("kind", "script", "is_shown"),
    [
        ("", "gradient-clipping", True),
        ("", "01", False),  # without dropout, that others are compared to
        ("ddp", "ddp-options", True),
        ("compile", "compile-mode", False),
    ],
)
def test_rows_of_variants(rows, kind, script, is_shown):
    """By the script and the group, however the row is labelled."""
    plan = plan_of("a", kind=kind)
    plan.runs = [plan.runs[0].replace(script=script, label="any")]
    (row,) = rows(plan, rounds_of("a", 100.0))
    assert is_of_variant(row) is is_shown


# ---- Time to a loss


def test_times_to_a_target(rows):
    """Rounds that reach 8.5 after 3,328 tokens, after 4,096, and never."""
    runs = [
        dict(name="a"),
        dict(name="a", round=2, loss=8.5, speed=200.0, steps=4),
        dict(name="a", round=3, loss=9.0, steps=4),
        dict(name="b", error="it broke"),
    ]
    row, broken = rows(plan_of("a", "b"), runs)
    assert [arrival.tokens for arrival in row.arrivals(8.5)] == [3328, 4096, float("inf")]
    assert (row.tokens_to(8.5), row.seconds_to(8.5)) == (4096, pytest.approx(33.28))
    # With the rest of the first step, in the first round.
    assert row.seconds_to(8.5, with_first_step=True) == pytest.approx(33.28 + 10 - 10.24)
    for never, target in ((row, 7.5), (broken, 8.5)):
        assert (never.tokens_to(target), never.seconds_to(target)) == (None, None)
        assert never.seconds_to(target, with_first_step=True) is None
    assert broken.arrivals(8.5) == []


def test_a_second_start(rows):
    """Round 2 found what round 1 compiled."""
    runs = [dict(name="a", speed=400.0), dict(name="a", speed=200.0, round=2)]
    (row,) = rows(plan_of("a", cold_rounds=1), runs)
    first, again = (training.first_step_excess for training in row.trainings)
    assert row.warm_excess == again < first
    columns = {column.heading: column for column in time_columns(8.5, [row])}
    seconds = row.seconds_to(8.5) + again
    assert float(columns["again, s"].cell(row)) == pytest.approx(seconds, abs=0.1)
    (cold,) = rows(plan_of("a", cold_rounds=9), runs)
    assert cold.warm_excess is None
    assert "again, s" not in [column.heading for column in time_columns(8.5, [cold])]


@pytest.mark.parametrize(("misses", "sign"), [("", ""), ("a", "> "), ("b", "< "), ("ab", None)])
def test_speedup_to_a_target(rows, misses, sign):
    """By pairs of one seed. Where a run misses the target, the speedup is a bound, not tested."""
    plan = of_one_base(*"abc", targets={"best": 7.5}, new_seeds=True)
    runs = [
        run | dict(loss=9.0 if run["name"] in misses and run["round"] == 1 else 7.0)
        for run in noisy(100, 300, 200)
    ]
    a, b, c = rows(plan, runs)
    speedup = b.speedup(Goal(7.5))
    assert speedup.significance == ("not tested" if misses else "faster")
    assert (speedup.interval is None) == bool(misses)
    if sign is None:
        assert speedup.factor is None
    else:
        seconds = [[arrival.after(False) for arrival in row.arrivals(7.5)] for row in (a, b)]
        for row, times in zip((a, b), seconds, strict=True):
            if row.run.name in misses:
                times[0] = row.by_round[1].train_seconds
        assert (speedup.sign, speedup.factor) == (sign, pytest.approx(mean_ratio(*seconds)))
    assert a.speedup(Goal(7.5)).factor is None


def test_times_are_paired_in_any_table(rows):
    """Variances of speeds are pooled in a large one."""
    plan = of_one_base(*"abcdef", targets={"best": 7.5})
    runs = [
        run
        for k, name in enumerate("abcdef")
        for run in rounds_of(name, *(100 + k + 7 * n % 5 for n in range(k, k + 4)), loss=7.0)
    ]
    table = rows(plan, runs)[0].table
    speeds, times = table.family(), table.family(Goal(7.5, with_first_step=False))
    assert speeds.pooled and not times.pooled
    assert speeds.differences.keys() == times.differences.keys() == set("bcdef")
