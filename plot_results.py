"""Draw the speed, memory and losses of the three stages, the ladder and the time to a loss.

    python plot_results.py               # pictures, and the stages' table summary.md, in results/
    python plot_results.py --format svg  # the pictures as SVG
    python plot_results.py --help        # every setting

It draws what was measured here. It reads the records in results/ and results/stages/, and takes the
latest complete run of each stage for each group: a device, a model and a context length. The
published A100 figures stand beside them. ladder.png, time-to-loss.png and so on show what
measure.py has left in the folders of these names; what other machines measured is in
results/reference/.

tok/sec is the median over the steps of a run, or the average of a run too short for a median. It
counts the tokens of all processes together; reserved memory is that of one process.
"""

import argparse
import sys
from pathlib import Path

import matplotlib

from bench import pictures, stages
from bench.files import REFERENCE, ROOT, relative, write_whole
from bench.states import finished
from patches import stack


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=ROOT / "results", metavar="DIR",
                        help="folder of the records (default: results beside this script)")
    parser.add_argument("--out", type=Path, metavar="DIR",
                        help="folder for the pictures and summary.md (default: that of --results)")
    parser.add_argument("--format", choices=("png", "svg", "pdf"), default="png",
                        help="of the pictures (default: png)")
    parser.add_argument("--show", action="store_true", help="also open the pictures in windows")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    out = args.out or args.results
    sys.stdout.reconfigure(errors="replace")  # a terminal without × or – is no reason to stop
    if not args.show:
        matplotlib.use("Agg")  # draws without a display
    if not args.results.is_dir():
        print(f"error: {args.results} is not a folder", file=sys.stderr)
        return 1
    try:
        published, source = stages.read_published(stack.load())
    except (stack.StackError, OSError, ValueError, LookupError, TypeError) as error:
        print(f"error: the published figures can't be read: {error!r}", file=sys.stderr)
        return 1

    runs = stages.read_runs(args.results)
    plans = {name: finished(name, args.results) for name in pictures.PLANS}
    summary = f"{stages.table(runs, published)}\n{source}\n"
    others = ", ".join(relative(folder) for folder in sorted(REFERENCE.glob("*/")))
    if not runs and not any(plans.values()):
        print(f"\n{summary}\nNothing to draw: there is no complete run in {relative(args.results)}."
              f" Pictures of other machines: {others}")
        return 0
    drawn = pictures.draw_all(runs, published, plans, args.format)
    print(f"\n{summary}")
    if not all(plans.values()):
        print("Not measured here, so not drawn:",
              ", ".join(name for name, plan in plans.items() if not plan))
        print(f"Pictures of other machines: {others}")

    try:
        for name, content in {"summary.md": summary, **drawn}.items():
            write_whole(out / name, content)
            print(relative(out / name))
    except OSError as error:
        print(f"error: cannot write to {out}: {error.strerror or error}", file=sys.stderr)
        return 1
    if args.show:
        matplotlib.pyplot.show()
    return 0


if __name__ == "__main__":
    sys.exit(main())
