"""Measure what each technique for fast training brings on this machine, and what it costs.

    python measure.py stages         # the three scripts: 00, 01 and 02
    python measure.py ladder         # 00, then one more technique at a time, up to 01
    python measure.py leave-one-out  # 01 without one technique at a time
    python measure.py variants       # 01, and alternatives to what it does
    python measure.py sweep batch    # what fits, and how fast; also `sweep context`
    python measure.py --help         # every command
    python measure.py audit FILE     # your own script: which of the techniques it lacks
    python measure.py report         # all of it but the searches: one page

    python measure.py ladder --rungs 0,5-8       # some of them
    python measure.py ladder --resume            # go on after an interruption, or with more rounds
    python measure.py ladder --dry-run           # what would run, and about how long
    python measure.py ladder -- --model gpt2     # what follows -- goes to every script

Each run is a fresh process with the same data and seed. A round runs every script once, so that a
machine that drifts hits all of them alike. results/NAME.jsonl, a study's journal, keeps all that
was measured; tables and pictures are made from it. A script is called faster than another only
if that is significant over the whole table (bench/analysis/stats.py). The exit code is 1 if a run
failed; its row says why.
"""

import os
import shlex
import sys

from bench import processes
from bench.commands import make_parser
from bench.common import UserError
from bench.studies import all_studies
from patches.stack import StackError


def main() -> int:
    sys.stdout = sys.stdout or open(os.devnull, "w")  # it may be closed
    sys.stdout.reconfigure(errors="replace")  # a terminal without × or Δ is no reason to stop
    studies, argv = all_studies(), sys.argv[1:]
    cut = argv.index("--") if "--" in argv else len(argv)
    args = make_parser(studies).parse_args(argv[:cut])
    processes.on_signals(processes.interrupt)
    try:
        return args.function(args, argv[cut + 1 :], studies) or 0
    except (UserError, StackError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return getattr(error, "code", 1)
    except processes.Interrupted as error:
        again, continues = argv, args.command == "report"  # which always does
        if args.command in studies and studies[args.command].runs_scripts:
            again = [argv[0], "--resume", *(word for word in argv[1:] if word != "--resume")]
            continues = True
        print(f"interrupted: python measure.py {shlex.join(again)}"
              f" {'continues from here' if continues else 'starts again'}", file=sys.stderr)
        return 128 + error.args[0]


if __name__ == "__main__":
    sys.exit(main())
