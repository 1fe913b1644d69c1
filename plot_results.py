"""Draw what was measured here: the three stages' speed and memory, and what studies show.

    python plot_results.py               # pictures, and the stages' table summary.md, in results/
    python plot_results.py --format svg  # the pictures as SVG
    python plot_results.py --help        # every setting

It reads the records in results/ that 00, 01 and 02 leave, and the journals that measure.py leaves
there. Of each stage it takes the latest complete run for each group: a device, a model, a context
length and a text. The published A100 figures stand next to them. What other machines measured is in
results/reference/.

tok/sec is the median over the steps of a run, or the average of a run too short for a median. It
counts the tokens of all processes together; reserved memory is that of one process.
"""

import argparse
import os
import sys
from pathlib import Path

from bench.catalogue import published
from bench.common import REFERENCE, ROOT, UserError, relative, write_whole
from bench.report.pictures import draw_all, load_pyplot, picture_bytes
from bench.report.tables import markdown
from bench.studies import all_studies, stages
from patches.stack import StackError


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results-dir", type=Path, default=ROOT / "results", metavar="DIR",
                        help="folder of the results (default: results/ next to this script)")
    parser.add_argument("--out", type=Path, metavar="DIR",
                        help="folder for the pictures and summary.md (default: --results-dir)")
    parser.add_argument("--format", choices=("png", "svg", "pdf"), default="png",
                        help="of the pictures (default: png)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    sys.stdout = sys.stdout or open(os.devnull, "w")  # it may be closed
    sys.stdout.reconfigure(errors="replace")  # a terminal without × or – is no reason to stop
    args = parse_arguments(argv)
    out = args.out or args.results_dir
    if not args.results_dir.is_dir():
        print(f"error: {args.results_dir} is not a folder", file=sys.stderr)
        return 1
    studies = {name: study for name, study in all_studies().items() if name != "stages"}
    try:
        load_pyplot()
        scripts = stages.latest_runs(args.results_dir)
        summary = f"{markdown(stages.scripts_table(scripts))}\n{published().source}\n"
        by_study = draw_all(studies, args.results_dir, args.format)
        if scripts:  # also those that were started by hand
            by_study["stages"] = {f"stages.{args.format}": picture_bytes(
                stages.draw_scripts(scripts), args.format)}
        print(f"\n{summary}")
        drawn = {file: picture for own in by_study.values() for file, picture in own.items()}
        if not drawn:
            print(f"Nothing to draw: there is no complete run in {relative(args.results_dir)}, or"
                  " none of a study that has a picture.")
        others = ", ".join(relative(folder) for folder in sorted(REFERENCE.glob("*/")))
        print(f"Pictures of other machines: {others}")
        files: dict[str, str | bytes] = {"summary.md": summary, **drawn} if drawn else {}
        for name, content in files.items():
            write_whole(out / name, content)
            print(relative(out / name))
    except (UserError, StackError, ImportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
