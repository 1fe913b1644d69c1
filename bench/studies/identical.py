"""The same script again and again: which verdicts noise alone makes."""

from bench.measure.plan import Plan
from bench.studies import Study

RUNS = 15


class Identical(Study):
    """00 fifteen times, as if it were a ladder of 14 techniques that change nothing: every verdict
    is a false one (at most 1 such ladder in 20 may hold one)."""

    def plans(self, setup):
        runs = [setup.scripts.stage("00").but(
            name=f"same-{number:02}", label=f"00, number {number}", published=None,
            compared_to=f"same-{number - 1:02}" if number else None) for number in range(RUNS)]
        yield Plan(runs, **self.length(setup))

    def result(self, measured, rows):
        known = [row.verdict for row in rows if row.verdict not in (None, "no verdict")]
        false = sum(verdict != "no measurable change" for verdict in known)
        return f"{false} false verdicts of {len(known)}\n" if known else ""
