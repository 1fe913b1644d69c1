"""Draw what was measured here: the speed and memory of 00, 01 and 02, and the studies' pictures.

    python plot_results.py  # pictures, and the table summary.md, in results/

It reads the records in results/ that 00, 01 and 02 leave, and the journals of measure.py: of each
script the latest complete run for each device, model, context length and text. The published A100
figures stand next to them. tok/sec is the median over the steps of a run, of all processes
together; reserved memory is that of one process.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

from bench.catalogue import published_source
from bench.common import ROOT, relative, write_whole
from bench.report.pictures import draw_all, load_pyplot, picture_bytes
from bench.report.scripts import (
    ScriptFigures,
    draw_scripts,
    latest_runs,
    left_out,
    script_runs,
    scripts_table,
)
from bench.studies import all_studies
from bench.terminal import exit_code_of
from gpt_speed.common import UserError, counted
from gpt_speed.tables import markdown


def main(argv: list[str] | None = None) -> int:
    return exit_code_of(partial(draw_results, argv))


def draw_results(argv: list[str] | None) -> int:
    """Draws what the command line names; returns the exit code. Raises UserError, StackError,
    OSError."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--results-dir",
        type=Path,
        default=ROOT / "results",
        metavar="DIR",
        help="folder of the results, and of the pictures (default: results/)",
    )
    results = parser.parse_args(argv).results_dir
    if not results.is_dir():
        raise UserError(f"{results} is not a folder")
    try:
        load_pyplot()
    except ImportError as error:
        raise UserError(str(error))
    draw_folder(results)
    return 0


def draw_folder(results: Path) -> None:
    """Writes the pictures of a folder of results and their summary into it, and prints that. Raises
    UserError, StackError, OSError."""
    runs = script_runs(results)
    incomplete = left_out(runs)
    if incomplete:
        print(f"{counted(incomplete, 'run')} that did not complete: left out")
    figures = latest_runs(runs)
    summary = summary_of(figures)
    print(f"\n{summary}")
    pictures = pictures_of(figures, results)
    if not pictures:
        print(f"Nothing to draw: {relative(results)} has no complete run.")
        return
    files: dict[str, str | bytes] = {"summary.md": summary, **pictures}
    for name, content in files.items():
        write_whole(results / name, content)
        print(relative(results / name))


def summary_of(figures: list[list[ScriptFigures]]) -> str:
    """Returns the table of the three scripts, and where the published figures are from. Raises
    UserError, StackError."""
    source = published_source()
    return (
        f"{markdown(scripts_table(figures))}\nPublished figures: {source['gpu']},"
        f" PyTorch {source['pytorch']}; <{source['source']}>\n"
    )


def pictures_of(figures: list[list[ScriptFigures]], results: Path) -> dict[str, bytes]:
    """Returns {file name: picture}: of the three scripts, also where they were started by hand, and
    of the other studies. Raises StackError, OSError."""
    pictures = {}
    if figures:
        pictures["stages.png"] = picture_bytes(draw_scripts(figures))
    others = {name: study for name, study in all_studies().items() if name != "stages"}
    return pictures | draw_all(others, results)


if __name__ == "__main__":
    sys.exit(main())
