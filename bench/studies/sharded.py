"""Sharded training: ZeRO and FSDP."""

from bench.measure.plan import Plan
from bench.report.pictures import draw_alternatives
from bench.studies import Study

# How a larger model is run: 40 GB of a GPU, or a minute of two cores, are enough for it. (Compiling
# gpt2-medium takes them three minutes.)
BATCH = {"cuda": "8", "cpu": "1"}
OPTIONS = {"cuda": [], "cpu": ["--context-length", "128", "--eval-windows", "2", "--no-compile"]}
MODEL_TOKENS = {"cuda": 131_072, "cpu": 768}


class Sharded(Study):
    """02, and 02 with optimizer state, gradients or weights sharded over the ranks (ZeRO)."""

    title = "Sharded training (ZeRO, FSDP)"
    schedule = {90: None}
    in_report = "", "--model gpt2-medium"

    def options(self, parser):
        parser.add_argument("--model", metavar="NAME",
                            help="another size, such as gpt2-medium, at a smaller batch; on a CPU"
                                 " also a short context and run, not compiled (default: the"
                                 " scripts' own)")

    def plans(self, setup):
        runs = setup.scripts.variants_of_02(setup.machine, "parallel")
        length, model = self.length(setup), setup.args.model
        if not model:
            yield Plan(runs, seed_noise=True, **length)
            return
        length["tokens"] = setup.args.max_tokens or MODEL_TOKENS[setup.device]
        options = ["--model", model, "--batch-size", BATCH[setup.device], *OPTIONS[setup.device]]
        yield Plan(runs, model, options=options, **length)

    def draw(self, measured, rows):
        return draw_alternatives(measured, rows[0], rows[1:])
