"""How long what is left of a study takes, by what is measured of it so far."""

import math
from dataclasses import replace
from statistics import median

from bench.measure import lengths
from bench.measure.journal import Measured, Result
from bench.measure.lengths import Length
from bench.measure.plan import Job, Plan, Setup


def time_left(jobs: list[Job], measured: Measured, expected: dict[str, Length], ahead: float,
              ) -> str:
    """In words: of these jobs of a plan, and of what is `ahead`, by estimate in so many seconds."""
    plan, results = measured.plan, measured.results
    seconds = (seconds_left(within_memory(jobs, results, plan), results, expected)
               + ahead * correction(results, expected))
    if plan.memory_limit_gb:  # more may fit
        return f"{in_words(seconds)} or more"
    # Runs may end at a target, or not fit.
    most = seconds and (ahead or plan.targets or plan.until_full)
    return f"at most {in_words(seconds)}" if most else in_words(seconds)


def seconds_left(jobs: list[Job], results: list[Result], expected: dict[str, Length]) -> float:
    """By the median time of each run's results; for a run without any by its length's estimate,
    corrected by how far the others' were off."""
    times, off = times_of(results), correction(results, expected)
    return sum(times[name] if name in times else off * expected[name].seconds
               for name in (job.run.name for job in jobs))


def times_of(results: list[Result]) -> dict[str, float]:
    """The median seconds of each run's results."""
    return {name: median(result.seconds for result in results if result.name == name)
            for name in {result.name for result in results}}


def correction(results: list[Result], expected: dict[str, Length]) -> float:
    """How many times as long as estimated the runs took; 1 without results."""
    return median([seconds / expected[name].seconds
                   for name, seconds in times_of(results).items() if name in expected] or [1])


def seconds_of_later(study, setup: Setup, plan: Plan, rounds: int | None, matmul_peak: dict,
                     ) -> tuple[int, float]:
    """(how many runs, about how many seconds) the study's plans take that follow `plan`. Raises
    UserError, StackError, OSError."""
    count, seconds = 0, 0.0
    for later, times in study.later(setup, plan):
        configs = lengths.configurations(later.runs, later, setup)
        expected = lengths.lengths_of(later, setup, configs, matmul_peak)
        jobs = replace(later, rounds=later.rounds or rounds or study.rounds[setup.device]).jobs()
        count += times * len(jobs)
        seconds += times * seconds_left(jobs, [], expected)
    return count, seconds


def within_memory(jobs: list[Job], results: list[Result], plan: Plan) -> list[Job]:
    """Of jobs that grow those whose memory is within the plan's limit, if each run takes as many
    times that of the one before it as it says; all where the limit or the memory isn't known."""
    memory = {result.name: result.record.end["reserved_gb"] for result in results if result.record}
    for run in plan.runs:
        memory[run.name] = memory.get(run.name) or run.growth * memory.get(run.after, 0)
    limit = plan.memory_limit_gb or math.inf
    return [job for job in jobs if memory[job.run.name] <= limit]


def in_words(seconds: float) -> str:
    if seconds >= 7200:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
