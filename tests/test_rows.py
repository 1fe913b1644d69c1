"""bench/judge/rows.py: medians, factors and verdicts, from made-up records."""

import random
from dataclasses import replace
from statistics import geometric_mean

import pytest
from made_up import plan_of, rounds_of, write_journal

from bench.catalogue import Run
from bench.judge.noise import AT_THE_END, LATER
from bench.judge.rows import closest, rate_to, rows_of, seed_noise
from bench.measure.journal import read_journal
from bench.report.tables import full_table, markdown


@pytest.fixture
def rows(tmp_path):
    """The rows of a plan with such runs."""
    return lambda plan, runs: rows_of(*read_journal(write_journal(tmp_path, "a", plan, runs)))


# ---- A run's own figures


def test_medians(rows):
    """Over the rounds, in their order; runs with another seed tell their speed and their loss."""
    memory = {1: 1.0, 2: None, 3: 2.0, 4: 4.0}
    runs = [dict(name="a", round=k, speed=200.0 + k, loss=8 + k / 8, reserved_gb=memory[k])
            for k in (3, 1, 4, 2)]
    runs += [dict(name="a", round=k, seed=123 + k, speed=50.0, loss=9 + k) for k in memory]
    (row,) = rows(plan_of("a"), runs)
    assert (row.rounds, sorted(row.speeds)) == (4, [50] * 4 + [201, 202, 203, 204])
    assert (row.tok_per_sec, row.reserved_gb) == (125.5, 1.25)
    assert (row.val_loss, row.lowest_val_loss) == (8.3125, 7.3125)  # after the tokens; of all
    assert row.losses_by_seed == {123: 8.5, 124: 10, 125: 11, 126: 12, 127: 13}
    assert row.record.tok_per_sec == 201  # of the first round, which compiles
    assert row.seconds_per_step == pytest.approx(1024 / 125.5)
    assert row.first_step_excess == pytest.approx(10 - (1024 / 202 + 1024 / 203) / 2)


@pytest.mark.parametrize(("config", "share"), [
    ({}, 0.1),
    (dict(matmul_precision="high"), 0.05),
    (dict(dtype="bfloat16"), 0.025),
    (dict(dtype="float16"), None),  # whose rate wasn't measured
    (dict(dtype=None), None),  # an old record
])
def test_share_of_this_machines_peak(rows, config, share):
    (row,) = rows(plan_of("a"), rounds_of("a", 100.0, gpu="NVIDIA H100 80GB HBM3", config=config))
    assert row.share_of_peak == (share and pytest.approx(share))
    assert row.mfu == pytest.approx(100e9 / 989e12)


def test_several_processes(rows):
    """tok/sec of all together, the share of all their peaks, the loss after as many tokens each."""
    plan = plan_of("a", "b")
    plan.runs[1] = plan.runs[1].but(processes=4)
    one, four = rows(plan, [dict(name="a"), dict(name="b", config=dict(world_size=4),
                                                 tokens=4 * 4096, loss=7.5)])
    assert (one.share_of_peak, four.share_of_peak) == pytest.approx((0.1, 0.025))
    assert (four.factor, one.val_loss, four.val_loss) == (1, 8.0, 7.5)


@pytest.mark.parametrize("figure", ["reserved_gb", "attention_backend"])
def test_an_end_without_a_figure_breaks_no_table(tmp_path, figure):
    path = write_journal(tmp_path, "a", plan_of("a"), rounds_of("a", 100.0))
    path.write_text(path.read_text().replace(f'"{figure}"', '"other"'))
    (row,) = rows_of(*read_journal(path))
    assert "100" in markdown(full_table([row])) or row.error


def test_errors(rows):
    """Of a run that can't run, of one that failed, of one that failed later, told once."""
    plan = plan_of(*"abcd")
    plan.runs[0] = plan.runs[0].but(error="needs the package x")
    runs = [dict(name="b", error="out of memory: lower it"), dict(name="c"),
            dict(name="c", round=2, error="it broke"), dict(name="c", round=3, error="no")]
    a, b, c, d = rows(plan, runs)
    assert [row.error for row in (a, b, c, d)] == [
        "needs the package x", "failed: out of memory: lower it", "failed: it broke", None]
    assert (c.tok_per_sec, c.rounds, c.versus) == (100, 1, None)
    for row in (a, b, d):
        assert (row.tok_per_sec, row.val_loss, row.reserved_gb, row.record) == (None,) * 4
        assert (row.verdict, row.memory_verdict, row.factor, row.share_of_peak) == (None,) * 4


# ---- Compared


def mean_ratio(speeds, others=range(100, 104)) -> float:
    """The mean over the rounds of the ratios, by their logarithms."""
    return geometric_mean(one / other for one, other in zip(speeds, others, strict=True))


def test_factors(rows):
    """Over the row before, or the nearest before that with figures; and over the first one: means
    of the rounds' ratios."""
    plan = plan_of("base", "cores", "broken", "last")
    plan.runs = [run.but(published=speed)
                 for run, speed in zip(plan.runs, (100.0, 200.0, 500.0, 800.0), strict=True)]
    runs = [*rounds_of("base", 100.0, 101.0, 102.0, 103.0),
            *rounds_of("cores", 103.0, 104.0, 105.0, 106.0, loss=8.25, reserved_gb=2.5),
            dict(name="broken", error="it broke"),
            *rounds_of("last", *[418.0] * 4, loss=7.5, reserved_gb=1.25)]
    base, cores, broken, last = rows(plan, runs)
    assert (base.versus, base.baseline, base.factor, base.factor_baseline) == (None,) * 4
    assert (base.verdict, base.memory_factor, base.loss_difference) == (None,) * 3
    assert cores.factor == cores.factor_baseline == pytest.approx(mean_ratio(range(103, 107)))
    assert (cores.verdict, cores.memory_verdict) == ("faster", "more")
    assert (broken.factor, broken.published_factor) == (None, 2.5)
    assert (last.versus, last.baseline) == (cores, base)
    assert (last.factor, last.factor_baseline) == pytest.approx(
        (mean_ratio([418] * 4, range(103, 107)), mean_ratio([418] * 4)))
    assert (last.published_factor, last.published_factor_baseline) == (4.0, 8.0)
    assert (last.loss_difference, last.loss_difference_baseline) == (-0.75, -0.5)
    assert last.memory_factor == pytest.approx(0.5)
    assert (last.memory_verdict, last.verdict) == ("less", "faster")


def test_without_a_baseline(rows):
    base, cores, last = rows(plan_of(*"abc"), [dict(name="b"), dict(name="c")])
    assert (seed_noise(base), cores.versus, cores.verdict) == (None, None, None)
    assert (last.factor, last.factor_baseline, last.verdict) == (1, None, "not tested")


def test_leave_one_out(rows):
    """Factor and verdict of the technique are those of 01 over 01 without it."""
    plan = plan_of("01", "without-a")
    plan.runs[1] = plan.runs[1].but(without="a")
    whole, without = rows(plan, [*rounds_of("01", *[800.0] * 4),
                                 *rounds_of("without-a", *[400.0] * 4)])
    assert (without.factor, without.technique_factor) == pytest.approx((0.5, 2.0))
    assert without.verdict == "faster" and without.interval() == pytest.approx((2.0, 2.0))
    assert (whole.technique_factor, whole.verdict) == (None, None)


def test_interval_and_the_least_that_is_seen(rows):
    """A factor of a row without a verdict lies below what would have had one; its interval holds
    it. Extra runs of the baseline make it narrower."""
    plan = plan_of("a", "b", "c", rounds=4)
    plan.runs = [run.but(compared_to="a" if run.name != "a" else None) for run in plan.runs]
    runs = [*rounds_of("a", 100.0, 104.0, 98.0, 101.0), *rounds_of("b", 103.0, 101.0, 104.0, 100.0),
            *rounds_of("c", 300.0, 301.0, 305.0, 296.0)]
    _, b, c = rows(plan, runs)
    assert (b.verdict, c.verdict) == ("no significant change", "faster")
    low, high = b.interval()
    assert low < 1 < b.factor < min(high, b.least())
    assert c.interval()[0] > c.least() > 1
    plan.seed_noise = 2
    runs += [dict(name="a", round=number, seed=123 + number * 2 + k, speed=100.0 + number + k)
             for number in range(1, 5) for k in (0, 1)]
    _, more, _ = rows(plan, runs)
    assert more.interval()[1] - more.interval()[0] < high - low


def test_a_look_before_the_end_is_paid_for(rows):
    """And one after more rounds than were planned."""
    plan = plan_of("a", "b", rounds=5)
    runs = [*rounds_of("a", *[100.0] * 4), *rounds_of("b", *[200.0] * 4)]
    early, _ = rows(plan, runs)
    done, _ = rows(replace(plan, rounds=4), runs)
    again, _ = rows(replace(plan, rounds=4, looks=3), runs)
    assert [row.rows.level for row in (early, done, again)] == [LATER / 2, AT_THE_END, LATER / 4]


def test_the_rows_that_have_more_rounds(tmp_path):
    """Those nearest to a verdict after the whole rounds, and what they are compared to; what came
    later doesn't change the choice."""
    names, draw = "abcdefg", random.Random(0)
    plan = plan_of(*names, rounds=6, whole_rounds=3, close=["a", "b"])
    speeds = dict(zip(names, (100, 300, 300, 309, 309, 309, 309), strict=True))
    runs = [dict(name=name, round=number, speed=speed * draw.gauss(1, 0.01))
            for number in range(1, 4) for name, speed in speeds.items()]
    later = [dict(name=name, round=4, speed=speed) for name, speed in
             dict.fromkeys(names, 1.0).items()]
    for made in (runs, [*runs, *later]):
        path = write_journal(tmp_path / str(len(made)), "a", plan, made)
        (measured,) = read_journal(path)
        assert {"c", "d"} < {*closest(measured)} and "a" not in closest(measured)


@pytest.mark.parametrize(("losses", "other", "noise", "within"), [
    ([8.0, 8.25, 7.75], 8.5, 0.5, True),
    ([8.0, 8.25, 7.75], 7.25, 0.5, False),
    ([8.0], 8.0, None, None),  # one seed has no noise
    ([8.0, None], 8.0, None, None),
])
def test_seed_noise(rows, losses, other, noise, within):
    """The range of the first row's losses."""
    runs = [dict(name="a", seed=seed, loss=loss or 0, tokens=4096 if loss else 2048)
            for seed, loss in enumerate(losses, 123)]
    first, row = rows(plan_of("a", "b"), [*runs, dict(name="b", loss=other)])
    assert (seed_noise(first), row.within_seed_noise) == (noise, within)
    assert first.within_seed_noise is None


# ---- Time to a loss


def test_times_to_a_target(rows):
    """Rounds that reach 8.5 after 3,328 tokens, after 4,096, and never; see test_records.py."""
    runs = [dict(name="a"), dict(name="a", round=2, loss=8.5, speed=200.0, steps=4),
            dict(name="a", round=3, loss=9.0, steps=4), dict(name="b", error="it broke")]
    row, broken = rows(plan_of("a", "b"), runs)
    assert [tokens for tokens, _ in row.times_to(8.5)] == [3328, 4096, float("inf")]
    assert (row.tokens_to(8.5), row.seconds_to(8.5)) == (4096, pytest.approx(33.28))
    # With the rest of the first step, in the first round.
    assert row.seconds_to(8.5, with_first_step=True) == pytest.approx(33.28 + 10 - 10.24)
    for never, target in ((row, 7.5), (broken, 8.5)):
        assert (never.tokens_to(target), never.seconds_to(target)) == (None, None)
        assert never.seconds_to(target, with_first_step=True) is None
    assert broken.times_to(8.5) == []


# ---- Runs that depend on a smaller one


def chain(names: str, **settings):
    """Each twice as large as the one before."""
    plan = plan_of(*names, **settings)
    plan.runs = [Run(name, f"size {name}", "larger", growth=2, after=before)
                 for before, name in zip([None, *names], names, strict=False)]
    return plan


@pytest.mark.parametrize(("limit", "memories", "error", "says"), [
    (None, [2.0, 99.0], None, None),
    (10.0, [2.0, 5.0], None, None),
    (9.9, [2.0, 5.0], None,
     "not tried: 2 times the 5.0 GB of size b would be more than half of the RAM"),
    (9.9, [2.0, None], None, "not tried: the memory of size b isn't known"),
    (None, [2.0, None], None, None),
    (None, [2.0], "out of memory", "not tried, since size b failed"),
])
def test_what_is_not_tried(rows, limit, memories, error, says):
    """Those behind it have the reason of the first."""
    runs = [dict(name=name, reserved_gb=gb) for name, gb in zip("ab", memories, strict=False)]
    runs += [dict(name="b", error=error)] * bool(error)
    found = rows(chain("abcde", memory_limit_gb=limit), runs)
    assert [row.error for row in found[2:]] == [says] * 3
    assert found[0].error is None


def test_the_largest_memory_of_all_rounds_decides(tmp_path):
    runs = [dict(name="a", round=number, reserved_gb=gb) for number, gb in ((1, 1.0), (2, 4.0))]
    path = write_journal(tmp_path, "a", chain("ab", memory_limit_gb=7.0), runs)
    (measured,) = read_journal(path)
    first, second = rows_of(measured)
    assert measured.why_not(first.run) is None
    assert measured.why_not(second.run).text.startswith("not tried: 2 times the 4.0 GB of size a")


@pytest.mark.parametrize(("misses", "says"), [("", "faster"), ("a", "not tested"),
                                              ("b", "not tested")])
def test_time_verdict(rows, misses, says):
    """A script that reaches the target in its good seeds alone, or is compared to one that does,
    has neither verdict, nor factor, nor interval."""
    plan = plan_of("a", "b", targets={"best": 7.5}, new_seeds=True)
    runs = [dict(name=name, round=k, speed=speed + k, loss=9.0 if (name, k) == (misses, 1) else 7.0)
            for name, speed in (("a", 100.0), ("b", 300.0)) for k in range(1, 6)]
    _, b = rows(plan, runs)
    rate = rate_to(7.5)
    assert b.verdict_on(rate) == says
    assert (b.factor_of(rate, b.versus) is None) == (b.interval(rate) is None) == bool(misses)
