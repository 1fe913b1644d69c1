"""Will it fit? What a script reserves on GPUs that aren't there, and the batch that fits."""

import json
import tempfile
from functools import partial
from pathlib import Path

from bench import processes
from bench.common import UserError
from bench.memory import GB
from bench.study import Column, Study, Table
from bench.tables import markdown

CARDS = {  # MiB in all, as nvidia-smi tells them
    "T4": 15_360, "V100": 16_384, "RTX 3060": 12_288, "RTX 4060 Ti": 8_188, "RTX 3090": 24_576,
    "RTX 4090": 24_564, "RTX 5090": 32_607, "A10": 23_028, "L4": 23_034, "L40S": 46_068,
    "RTX A6000": 49_140, "A100 40 GB": 40_960, "A100 80 GB": 81_920, "H100": 81_559,
    "H200": 143_771, "B200": 183_359,
}
CONTEXT = int(0.6 * GB)  # the driver's own, its kernels, and a display


class Predict(Study):
    """What 00, 01 and variants would reserve on an NVIDIA GPU, and the largest batch that fits each
    card: predicted from a trace, without running anything."""

    runs_scripts = False
    in_report = ()

    def options(self, parser):
        parser.add_argument("--gpu", metavar="NAME", default="all",
                            help=f"all (the default), or one of {', '.join(CARDS)}")
        parser.add_argument("--memory", metavar="GB", type=float,
                            help="a card with so much memory instead")
        parser.add_argument("--batch-size", metavar="N", type=int,
                            help="what this batch reserves (default: that of each script)")
        parser.add_argument("--names", metavar="A,B", help="variants of 01 besides")

    def answer(self, setup):
        args, scripts = setup.args, setup.scripts
        cards = {name: mib * 2**20 for name, mib in CARDS.items() if args.gpu in (name, "all")}
        if args.memory:
            cards = {f"{args.memory:g} GB": int(args.memory * GB)}
        if not cards:
            raise UserError(f"--gpu: {args.gpu!r} is none of {', '.join(CARDS)}", 2)
        runs = [scripts.stage("00"), scripts.stage("01")]
        if args.names:
            runs += scripts.variants(runs[1], setup.machine | dict(gpus=1), names=args.names)[1:]
        found = {run.name: predict(setup, run, args.batch_size, cards) for run in runs}

        def fits(name: str, card: str) -> str:
            batch, size = found[name]["largest"][card]
            return f"{batch} ({size / GB:.1f} GB)" if batch else "none"

        text = markdown(Table([
            Column("script", lambda run: run.label, True),
            Column("batch", lambda run: str(found[run.name]["reserved"][0])),
            Column("reserved GB, predicted",
                   lambda run: f"{found[run.name]['reserved'][1] / GB:.2f}"),
        ], runs))
        text += "\n" + markdown(Table([
            Column("card", lambda card: card, True),
            Column("GB", lambda card: f"{cards[card] / GB:.0f}"),
            *(Column(run.label, partial(fits, run.name)) for run in runs),
        ], list(cards)))
        return text + (
            "\nPredictions; nothing here was measured. Each script's own steps were traced, not"
            " compiled, and their memory went through\na simulation of PyTorch's allocator. A cell"
            " has the largest power of two that fits beside"
            f" {CONTEXT / GB:.1f} GB for the driver and a\ndisplay, and what it reserves. Compiled,"
            " 01 takes less: its loss is inside the graph.")


def predict(setup, run, batch: int | None, cards: dict[str, int]) -> dict:
    """What bench.memory.predict finds. Raises UserError."""
    model = [] if "--model" in setup.options else ["--model", "gpt2"]
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, f"{run.name}.py")
        script.write_bytes(setup.scripts.text(run.script))
        request = dict(
            script=str(script), options=[*model, *setup.options, *run.options], batch=batch,
            capacities={card: size - CONTEXT for card, size in cards.items()})
        return json.loads(processes.ask("-m", "bench.memory", json.dumps(request)))
