"""Which runs of a plan aren't tried, and why."""

import math

from bench.catalogue import Run
from bench.measure.plan import Growth, Plan
from bench.measure.records import Outcome, Result, Status


def skipped(plan: Plan, results: list[Result]) -> dict[str, Outcome]:
    """Returns why runs aren't tried, by their names: they can't run on this machine, or the results
    of smaller sizes tell that they would fail."""
    if plan.growth:
        return skipped_sizes(plan.runs, results, plan.growth)
    return {run.name: Outcome(Status.NOT_TRIED, run.error) for run in plan.runs if run.error}


def skipped_sizes(runs: list[Run], results: list[Result], growth: Growth) -> dict[str, Outcome]:
    """Returns why sizes aren't tried: one by its reason, and all larger ones by the same."""
    without_figures = {result.name for result in results if not result.outcome.complete}
    smaller, expected_gb = None, 0.0
    for place, run in enumerate(runs):
        reason = why_not(run, smaller, without_figures, expected_gb, growth)
        if reason:
            outcome = Outcome(Status.NOT_TRIED, reason)
            return {larger.name: outcome for larger in runs[place:]}
        smaller, expected_gb = run, growth.memory * memory_gb(run, results, expected_gb)
    return {}


def why_not(
    run: Run, smaller: Run | None, without_figures: set[str], expected_gb: float, growth: Growth
) -> str | None:
    """Returns why a run isn't tried whose size comes after that of `smaller`; None if it is."""
    if smaller and smaller.name in without_figures:
        return f"not tried, since {smaller.label} failed"
    if smaller and growth.limit_gb and expected_gb > growth.limit_gb:
        return (
            f"not tried: by the memory of {smaller.label} it would take more than half of the RAM"
        )
    return run.error


def memory_gb(run: Run, results: list[Result], expected: float) -> float:
    """Returns the most memory that a run took; infinite where the system hides it, `expected`
    where it hasn't run."""
    sizes = [
        result.record.end["reserved_gb"] or math.inf
        for result in results
        if result.name == run.name and result.record
    ]
    return max(sizes, default=expected)
