"""The figures in README's sentences, of Claims, by the names that stand behind them where a reader
doesn't see them: `14<!--h100-speedup--> times`."""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from bench.analysis.claims import Claims, MissingRow
from bench.analysis.rows import known_values
from bench.common import REFERENCE, relative
from bench.report.readme_tables import bench_minutes
from bench.report.tables import range_text
from gpt_speed.common import UserError

FIGURE = re.compile(r"([\d.,–]*\d)?<!--([\w-]+)-->")  # the figure, its name
Value = float | None | Sequence[float | None]


class Figure(NamedTuple):
    """A figure of README's sentences: what it is of, and how it is written."""

    value: Callable[[Claims], Value]  # of several values the range is written
    form: str = ".2f"
    unit: float = 1.0


FIGURES = {
    "parameters-millions": Figure(lambda claims: claims.parameters, ".0f", unit=1e6),
    "cpu-parameters-millions": Figure(lambda claims: claims.cpu_parameters, ".0f", unit=1e6),
    "xeon-speedup": Figure(lambda claims: claims.speedups_on("intel-xeon-amx-2-cores"), ".1f"),
    "epyc-speedup": Figure(lambda claims: claims.speedups_on("amd-epyc-2-cores"), ".1f"),
    "avx2-speedup": Figure(lambda claims: claims.speedups_on("amd-epyc-avx2-2-cores"), ".1f"),
    # The H100's ladder.
    "h100-technique-8": Figure(lambda claims: claims.compiled_script.tok_per_sec, ",.0f"),
    "h100-optimized": Figure(lambda claims: claims.optimized.tok_per_sec, ",.0f"),
    "h100-mfu": Figure(lambda claims: claims.optimized.mfu, ".0f", unit=0.01),
    "h100-speedup": Figure(lambda claims: claims.speedups_by_session, ".1f"),
    "h100-at-batch-8": Figure(lambda claims: claims.speedups_at_batch_8, ".1f"),
    "h100-after-8": Figure(
        lambda claims: claims.speedup_over(claims.compiled_script).factor, ".1f"
    ),
    "h100-11-to-15": Figure(lambda claims: claims.percent_over_published, ".0f"),
    "h100-memory-over-published": Figure(lambda claims: claims.memory_over_published, ".1f"),
    # Single steps and whole scripts of another day.
    "h100-gb": Figure(lambda claims: claims.steps.script_gb["01"], ".1f"),
    # Its variants.
    "autocast": Figure(lambda claims: claims.autocast_variant.factor),
    # The H200: one epoch, and the time to its loss.
    "epoch-loss-00": Figure(lambda claims: claims.loss_of_epoch("00")),
    "epoch-loss-01": Figure(lambda claims: claims.loss_of_epoch("01")),
    "target": Figure(lambda claims: claims.target),
    "seconds-00": Figure(lambda claims: claims.seconds_to_target("00"), ".1f"),
    "seconds-01": Figure(lambda claims: claims.seconds_to_target("01"), ".1f"),
    "seconds-00-compiling": Figure(
        lambda claims: claims.seconds_to_target("00", compiling=True), ".1f"
    ),
    "seconds-01-compiling": Figure(
        lambda claims: claims.seconds_to_target("01", compiling=True), ".1f"
    ),
    # Predicted.
    "bench-minutes": Figure(lambda _: bench_minutes(), ".0f"),
}


def with_figures(text: str) -> str:
    """Returns a page with each named figure of its sentences written again. Raises UserError."""
    claims = Claims(REFERENCE)

    def write(mark: re.Match) -> str:
        figure, name = mark.groups()
        if not figure:
            raise UserError(f"no figure stands before <!--{name}-->")
        return f"{figure_text(name, claims)}<!--{name}-->"

    return FIGURE.sub(write, text)


def figure_text(name: str, claims: Claims) -> str:
    """Writes a figure of README's sentences. Raises UserError for one of an unknown name, or whose
    journal lacks it."""
    if name not in FIGURES:
        raise UserError(f"there is no figure {name} in bench/report/sentences.py")
    figure = FIGURES[name]
    try:
        value = figure.value(claims)
    except MissingRow as error:
        raise UserError(f"the figure {name}: no row {error} in {relative(claims.folder)}")
    except OSError as error:
        raise UserError(f"the figure {name}: {error}")
    values: Sequence[float | None] = value if isinstance(value, Sequence) else [value]
    numbers = known_values(values)
    if not numbers or len(numbers) < len(values):
        raise UserError(f"the figure {name} isn't known from {relative(claims.folder)}")
    return range_text([number / figure.unit for number in numbers], figure.form)
