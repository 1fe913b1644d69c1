"""Will it fit? What a script reserves on GPUs that aren't there, and the batch that fits."""

import re
from functools import partial

from bench.common import REFERENCE, UserError, relative, write_whole
from bench.memory import BATCHES, CARDS, GB, MIB, OTHERS, Need, kept, largest, predict
from bench.pictures import COLOURS, picture_bytes, rows_of_panels, thousands
from bench.scripts import Scripts, published
from bench.study import Column, Study, Table
from bench.tables import cell, found_in, markdown
from patches import stack


class Predict(Study):
    """What 00, 01, 02, rungs and variants reserve on an NVIDIA GPU, and the largest batch that fits
    each card: predicted, without a GPU and without training."""

    runs_scripts = False
    in_report = ()

    def options(self, parser):
        parser.add_argument("--gpu", metavar="NAME", default="all",
                            help=f"all (the default), or one of {', '.join(CARDS)}")
        parser.add_argument("--memory", metavar="GB", type=float,
                            help="a card with so much memory instead")
        parser.add_argument("--model", metavar="NAME", default="gpt2",
                            help="--model of the scripts (default: %(default)s)")
        parser.add_argument("--batch-size", metavar="N", type=int,
                            help="a further batch size, per GPU")
        parser.add_argument("--rungs", metavar="0,5-8", help="rungs instead of 00, 01 and 02")
        parser.add_argument("--variants", metavar="A,B",
                            help="variants of 01 or 02 besides, each with its measured options or"
                                 " with others: \"step-accumulation --micro-batches 8\"")

    def fixed(self):
        return {"fits": markdown(checked()), "gpus": markdown(cards_table()),
                "hardware": markdown(hardware_table())}

    def answer(self, setup):
        args, options = setup.args, ["--model", setup.args.model, *setup.options]
        if "--batch-size" in setup.options or "--model" in setup.options:
            raise UserError("--batch-size and --model go before --", 2)
        if args.batch_size is not None and args.batch_size < 1:
            raise UserError(f"--batch-size: {args.batch_size} is out of range", 2)
        cards = {name: card.mib for name, card in CARDS.items() if args.gpu in (name, "all")}
        if args.memory is not None:
            if not 0 < args.memory < 10_000:
                raise UserError(f"--memory: {args.memory:g} is out of range", 2)
            cards = {f"{args.memory:g} GB": int(args.memory * GB / MIB)}
        if not cards:
            raise UserError(f"--gpu: {args.gpu!r} is none of {', '.join(CARDS)}", 2)
        runs = chosen(setup)
        needs = {run.name: predict(
            setup.scripts.text(run.script), [*options, *run.options], setup.results,
            min(cards.values()) - OTHERS, args.batch_size) for run in runs}

        def fits(name: str, card: str) -> str:
            batch = largest(needs[name], cards[card])
            return f"{batch} ({needs[name][batch].reserved / 1024:.1f})" if batch else "none"

        batches = [8, 32, *([args.batch_size] if args.batch_size not in (None, 8, 32) else [])]
        theirs = published().reserved_gb if options == ["--model", "gpt2"] else {}
        ours = measured(setup, options)
        text = markdown(Table([
            Column("script", lambda run: run.label, True),
            *(Column(f"batch {batch}", lambda run, batch=batch: reserved(needs[run.name], batch))
              for batch in batches),
            Column("published", lambda run: cell(theirs.get(run.script), ".2f")),
            Column("measured here", lambda run: ours.get(run.name, "")),
        ], runs, f"Predicted reserved memory of {args.model}, GB (1024³ bytes) per GPU:"))
        text += "\n" + markdown(Table([
            Column("card", lambda card: card, True),
            Column("GB", lambda card: f"{cards[card] / 1024:.0f}"),
            *(Column(run.label, partial(fits, run.name)) for run in runs),
        ], list(cards), "The largest power of two that fits, and what it reserves:"))
        write_whole(setup.results / "predict.png",
                    picture_bytes(draw(runs, needs, args.model), "png"))
        return text + (
            f"\nNothing was trained for this. It fits beside {OTHERS / 1024:.1f} GB for driver and"
            " display; docs/fits.md tells how\nfar to trust it. Published, and measured:"
            " at the script's batch size, 8 up to rung 9, then 32.\n"
            f"{relative(setup.results / 'predict.png')}")


def checked() -> Table:
    """Each rung's published memory beside the predicted one. Raises UserError, StackError."""
    scripts, theirs, rows = Scripts(), published().reserved_gb, []
    runs, ours = scripts.rungs(4), {}
    for number, run in enumerate(runs):
        batch = 8 if number < 10 else 32
        needs = kept(scripts.text(run.script), ["--model", "gpt2"], REFERENCE)
        ours[number] = needs[batch].reserved / 1024 if batch in needs else float("nan")
        if run.script in theirs and number < len(runs) - 1:
            rows.append((run.label, batch, theirs[run.script], ours[number]))
    # 02 is rung 13 with DDP, the published program rung 10 with it.
    *_, before, last = ours.values()
    rows.append(("10, with DDP", 32, theirs[runs[-1].script], ours[10] + last - before))
    return Table([
        Column("rung", lambda row: row[0], True), Column("batch", lambda row: str(row[1])),
        Column("published", lambda row: f"{row[2]:.2f}"),
        Column("predicted", lambda row: f"{row[3]:.2f}"),
        Column("error", lambda row: f"{row[3] / row[2] - 1:+.1%}")], rows)


def cards_table() -> Table:
    """What fits each card, and how to begin. Raises UserError, StackError."""
    scripts = Scripts()

    def fits(stage: str, model: str, card: str) -> int:
        text = scripts.text(scripts.stage(stage).script)
        return largest(kept(text, ["--model", model], REFERENCE), CARDS[card].mib)

    def begin(card: str) -> str:
        batch = fits("01", "gpt2", card)
        if CARDS[card].capability < 8:
            return "`python patches/stack.py compose precision-fp16 --out my.py`"
        if not batch:
            return ""
        if batch >= 32:
            return "`make bench`; `python 01_opt_single_gpu.py`"
        return (f"`make bench`; 32 windows per update: compose `step-accumulation`,"
                f" `--micro-batches {32 // batch}`")

    models = "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"
    return Table([
        Column("card", lambda card: card, True),
        Column("GB", lambda card: f"{CARDS[card].mib / 1024:.0f}"),
        Column("compute capability", lambda card: f"{CARDS[card].capability:.1f}"),
        Column("00, gpt2", lambda card: str(fits("00", "gpt2", card) or "–")),
        *(Column(f"01, {model}",
                 lambda card, model=model: str(fits("01", model, card) or "–"))
          for model in models),
        Column("begin with", begin, True)],
        sorted(CARDS, key=lambda card: (CARDS[card].mib, CARDS[card].capability)))


def hardware_table() -> Table:
    """The techniques and variants that older cards don't have, by their headers. Raises
    StackError."""
    rows = []
    for patch in (*stack.load(), *stack.load_variants()):
        needed = re.search(r"compute capability (\d+\.\d+)", patch.fields["Hardware"])
        if needed:
            rows.append((f"[{patch.fields['Technique']}](../{patch.file})", float(needed[1])))
    return Table([
        Column("technique", lambda row: row[0], True),
        Column("from compute capability", lambda row: f"{row[1]:.1f}"),
        Column("not on", lambda row: ", ".join(
            card for card in CARDS if CARDS[card].capability < row[1]) or "(none of these)", True)],
        sorted(rows, key=lambda row: row[1]))


def chosen(setup) -> list:
    """The scripts that are asked for. Raises UserError, StackError."""
    scripts, args, machine = setup.scripts, setup.args, setup.machine | dict(gpus=4)
    runs = [scripts.stage(name, 4) for name in ("00", "01", "02")]
    if args.rungs:
        runs = scripts.chosen(args.rungs, scripts.rungs(4))
    for text in filter(str.strip, (args.variants or "").split(",")):
        name, *options = text.split()
        for base in ("01", "02"):
            try:
                found = scripts.variants(scripts.stage(base, 4), machine, names=name)[1:]
                break
            except UserError:
                if base == "02":
                    raise
        if options:
            label = " ".join([name, *options])
            found = [found[0].but(name=label, label=label, options=tuple(options))]
        runs += found
    return runs


def reserved(needs: dict[int, Need], batch: int) -> str:
    return f"{needs[batch].reserved / 1024:.2f}" if batch in needs else ""


def measured(setup, options: list[str]) -> dict[str, str]:
    """What was reserved on a GPU here, by the run's name."""
    found = {}
    for study in ("stages", "ladder", "variants"):
        for each, rows in found_in(setup.results, study):
            if each.machine["device"] == "cuda" and setup.options == each.options:
                found |= {row.run.name: f"{row.reserved_gb:.2f}" for row in rows
                          if row.reserved_gb and row.record.config["model"] == options[1]}
    return found


def draw(runs: list, needs: dict[str, dict[int, Need]], model: str):
    """Memory over the batch size, with a line for each size of card."""
    figure, [(subfigure, axes)] = rows_of_panels(
        [f"Predicted memory of {model} by batch size"], [5.5], [1])
    groups = [[]]  # of cards of about one size, whose names have one line
    for name, card in sorted(CARDS.items(), key=lambda item: item[1].mib):
        size = card.mib / 1024
        if groups[-1] and size > 1.22 * groups[-1][0][0]:
            groups.append([])
        groups[-1].append((size, name))
    top = size
    for run in runs:
        points = [(batch, each.reserved / 1024) for batch, each in sorted(needs[run.name].items())
                  if batch in BATCHES and each.reserved / 1024 < 1.2 * top]
        axes.plot(*zip(*points, strict=True), "o-", label=run.label, markersize=4,
                  color=COLOURS.get(run.tags.get("stage")))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for group in groups:
        for size, _ in group:
            axes.axhline(size, color="0.6", linewidth=0.8, linestyle=":")
        low, high = round(group[0][0]), round(group[-1][0])
        text = f"{low}{f'–{high}' * (high > low)} GB: {', '.join(name for _, name in group)}"
        axes.annotate(text, (1, (group[0][0] * group[-1][0]) ** 0.5), (4, 0), va="center",
                      fontsize=8, xycoords=("axes fraction", "data"), textcoords="offset points")
    axes.set_xlabel("batch size per GPU, windows")
    axes.set_ylabel("reserved memory, GB")
    thousands(axes.xaxis)
    thousands(axes.yaxis)
    axes.set_xticks(BATCHES)
    axes.set_yticks([2**k for k in range(9)])
    subfigure.legend(loc="outside lower center", ncols=4, frameon=False)
    return figure
