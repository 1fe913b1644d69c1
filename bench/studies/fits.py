"""The options with which `make bench` starts the three scripts, so that they fit the GPU."""

import io
import sys
from contextlib import redirect_stderr

from bench.common import UserError
from bench.journal import loose_records
from bench.lengths import fitting
from bench.scripts import STAGES
from bench.study import Study


class Fits(Study):
    """The batch size with which a script fits this machine's GPU, as an option for it; nothing
    where the script's own fits, or without a GPU."""

    runs_scripts = False
    in_report = ()
    arguments = "00|01|02|again"

    def options(self, parser):
        parser.add_argument("stage", choices=[*STAGES, "again"],
                            help="a script; or `again`, which succeeds if the last one in the"
                                 " results ended because the memory ran out")
        parser.add_argument("--half", action="store_true", help="half of what fits")

    def answer(self, setup):
        if setup.args.stage == "again":
            last = max(loose_records(setup.results), default=None,
                       key=lambda record: (str(record.start.get("time")), record.name))
            if not last or last.status != "out_of_memory" or last.config["device"] != "cuda":
                raise UserError("the last script didn't end because a GPU's memory ran out")
            return "The memory ran out: all three scripts start again, at half the batch size."
        setup.halved, first = setup.args.half, setup.args.stage == "00"
        if first and setup.machine.get("gpu_needs"):
            print(f"missing: {setup.machine['gpu_needs']}", file=sys.stderr)
        with redirect_stderr(sys.stderr if first else io.StringIO()):  # what fits is told once
            batch = fitting(setup).get("8" if first else "32")
        return f"--batch-size {batch}" if batch else ""
