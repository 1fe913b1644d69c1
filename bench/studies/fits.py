"""What `make bench` starts in place of the three scripts, so that it fits the GPU."""

import io
import os
import sys
from contextlib import redirect_stderr

from bench.catalogue import FLOAT16, STAGES
from bench.common import BUILD, relative, write_whole
from bench.measure.lengths import fast_here, fitting
from bench.studies import Study


class Fits(Study):
    """A script as it fits this machine's GPU: its name, and a batch size as an option where its own
    doesn't fit. On a GPU without units for bfloat16 01 and 02 are composed with precision-fp16, in
    build/."""

    runs_scripts = False

    def options(self, parser):
        parser.add_argument("stage", choices=list(STAGES), help="which of the three scripts")

    def answer(self, setup):
        stage, script = setup.args.stage, fast_here(setup)
        first = stage == "00"
        if first and setup.machine.get("gpu_needs"):
            print(f"missing: {setup.machine['gpu_needs']}", file=sys.stderr)
        load, cores = getattr(os, "getloadavg", lambda: [0])()[0], os.cpu_count() or 1
        if first and load > 0.75 * cores:
            print(f"Other programs run (load {load:.1f} on {cores} cores): the speeds will be lower"
                  " than this machine's, and their factors wrong", file=sys.stderr)
        with redirect_stderr(sys.stderr if first else io.StringIO()):  # what fits is told once
            batch = fitting(setup, script).get("8" if first else "32")
        words = [STAGES[stage]]
        if script == FLOAT16 and not first:
            run = setup.scripts.here(stage, setup.machine, setup.options)
            path = BUILD / f"{run.name}.py"
            write_whole(path, setup.scripts.text(run.script))
            words = [relative(path), "--data", relative(setup.data),
                     "--results-dir", relative(setup.results)]
            reason = setup.machine["dtype_reason"].partition(";")[0]
            print(f"{run.label}, as {words[0]}: {reason}", file=sys.stderr, flush=True)
        return " ".join([*words, *([f"--batch-size {batch}"] if batch else [])])
