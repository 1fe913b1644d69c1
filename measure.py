"""Benchmark speed techniques for GPT training, on this machine.

    python measure.py --help         # every command, in groups, with examples

Each run is a fresh process with the same data and seed; a round runs every script once. A study's
journal, results/NAME.jsonl, keeps all that was measured. A script is called faster than another
only if that is significant over the whole table. The exit code is 1 if a run failed.
"""

import shlex
import signal
import sys

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports: no traceback

from bench.cli import make_parser, run
from bench.studies import Study
from bench.terminal import exit_code_of
from gpt_speed import children


def main() -> int:
    return exit_code_of(run_subcommand)


def run_subcommand() -> int:
    """Runs what the command line names; returns the exit code. Raises UserError, StackError,
    OSError."""
    argv = sys.argv[1:]
    words, options = cut_at_dashes(argv)
    args = make_parser().parse_args(words)
    children.on_signals(children.interrupt)
    try:
        return run(args, options)
    except children.Interrupted as interruption:
        is_study = isinstance(args.subcommand, Study)
        if is_study and interruption.can_resume and "--resume" not in argv:
            argv.insert(1, "--resume")  # behind the study's name
        print(f"interrupted; to go on: python measure.py {shlex.join(argv)}", file=sys.stderr)
        return 128 + interruption.args[0]


def cut_at_dashes(argv: list[str]) -> tuple[list[str], list[str]]:
    """Returns the words before "--", and those behind it, which are for every script."""
    if "--" not in argv:
        return argv, []
    dashes = argv.index("--")
    return argv[:dashes], argv[dashes + 1 :]


if __name__ == "__main__":
    sys.exit(main())
