"""Will it fit, and how fast is it? What a script would reserve on GPUs that aren't there, the batch
that fits, and the tokens per second."""

import re
from functools import partial

from bench.catalogue import EPOCHS, FLOAT16, Run
from bench.common import UserError, relative, write_whole
from bench.measure.lengths import option_of
from bench.predict.speed import CARDS, KINDS
from bench.predict.store import (
    BATCHES,
    OTHERS,
    TOKENS_OF_BOOK,
    Prediction,
    earlier,
    largest,
    predict,
    predict_all,
)
from bench.report import check
from bench.report.pictures import COLOURS, picture_bytes, rows_of_panels, thousands
from bench.report.tables import Column, Table, found_in, markdown
from bench.studies import Study


class Predict(Study):
    """What 00, 01, 02, rungs and variants reserve on an NVIDIA GPU, the largest batch that fits
    each card, and the tokens per second: predicted, without a GPU and without training."""

    runs_scripts = of_this_machine = False
    in_report = ()

    def options(self, parser):
        parser.add_argument("--gpu", metavar="NAME", default="all",
                            help="all (the default), or the name, or a part of it, of"
                                 f" {', '.join(CARDS)}")
        parser.add_argument("--memory", metavar="GB", type=float,
                            help="a card with so much memory instead")
        parser.add_argument("--model", metavar="NAME", default="gpt2",
                            help="--model of the scripts (default: %(default)s)")
        parser.add_argument("--batch-size", metavar="N", type=int,
                            help="a further batch size, per GPU")
        parser.add_argument("--rungs", metavar="0,5-8", help="rungs instead of 00, 01 and 02")
        parser.add_argument("--variants", metavar="A,B+C",
                            help="variants of 01 or 02 besides, each with its measured options or"
                                 " with others: \"step-accumulation --micro-batches 8\"; + joins"
                                 " several into one script")
        parser.add_argument("--anew", action="store_true",
                            help="trace these scripts, also where an answer is kept")
        parser.add_argument("--all", action="store_true",
                            help="trace everything that the pages tell of predictions, into"
                                 " --results-dir; print what differs from what is kept. Minutes")

    def answer(self, setup):
        args, options = setup.args, ["--model", setup.args.model, *setup.options]
        if any(option_of(name, setup.options) for name in ("--batch-size", "--model")):
            raise UserError("--batch-size and --model go before --", 2)
        if args.batch_size is not None and args.batch_size < 1:
            raise UserError(f"--batch-size: {args.batch_size} is out of range", 2)
        cards = {name: CARDS[name].mib for name in named(args.gpu)}
        if args.memory is not None:
            if not 0 < args.memory < 10_000:
                raise UserError(f"--memory: {args.memory:g} is out of range", 2)
            cards = {f"{args.memory:g} GB": int(1024 * args.memory)}
        if not cards:
            raise UserError(f"--gpu: {args.gpu!r} is none of {', '.join(CARDS)}", 2)
        if args.all:
            return predict_all(setup.scripts, check.wanted(setup.scripts), setup.results,
                               min(cards.values()) - OTHERS)
        runs = chosen(setup)
        before = [card for card in cards if card in CARDS and not CARDS[card].bfloat16]
        half = {}  # in place of 01 and 02 there
        if before and not option_of("--dtype", options):
            half = {run.name: setup.scripts.float16(run) for run in runs
                    if run.stage not in (None, "00")}
        asked = [*runs, *half.values()]
        known = {run.name: predict(
            setup.scripts, run.script, [*options, *run.options], setup.results,
            min(cards.values()) - OTHERS, args.batch_size, args.anew) for run in asked}
        old = earlier(setup.scripts, [
            (run.script, [*options, *run.options], known[run.name]) for run in asked])
        needs = {name: each.needs for name, each in known.items()}

        def there(run: Run, card: str) -> Run:
            return half.get(run.name, run) if card in before else run

        def fits(run: Run, card: str) -> str:
            prediction = known[there(run, card).name]
            batch = largest(prediction.needs, cards[card])
            if not batch:
                return "none"
            text = f"{batch} ({prediction.needs[batch].reserved / 1024:.1f} GB)"
            return text + (
                f": {prediction.speed_range(batch, CARDS[card])}" if card in CARDS else "")

        batches = [8, 32, *([args.batch_size] if args.batch_size not in (None, 8, 32) else [])]
        ours = measured(setup, options)
        text = markdown(Table([
            Column("script", lambda run: run.label, True),
            *(Column(f"batch {batch}", lambda run, batch=batch: reserved(needs[run.name], batch))
              for batch in batches),
            Column("measured here", lambda run: ours.get(run.name, "")),
        ], asked, f"Predicted reserved memory of {args.model}, GB (1024³ bytes) per GPU:"))
        text += "\n" + markdown(Table([
            Column("card", lambda card: card, True),
            Column("GB", lambda card: f"{cards[card] / 1024:.0f}"),
            *(Column(run.label, partial(fits, run)) for run in runs),
        ], list(cards), "The largest power of two that fits, what it reserves, and tok/sec per"
           " GPU in thousands" + f" (on {', '.join(before)} with {FLOAT16})" * bool(half) + ":"))
        if len(cards) == 1 and args.memory is None:
            text += "\n" + markdown(where_it_goes(
                [there(run, *cards) for run in runs], known, *cards, args.batch_size))
        picture = setup.results / "predict.png"
        try:
            write_whole(picture, picture_bytes(draw(runs, needs, args.model), "png"))
            drawn = relative(picture)
        except UserError as error:
            drawn = f"no picture: {error}"
        return text + (
            f"\nNothing was trained for this. It fits beside {OTHERS / 1024:.1f} GB for driver and"
            " display. docs/fits.md and\ndocs/predictions.md tell how far to trust it. 02 is"
            " without the time that GPUs take to send to each\nother.\n"
            + (f"{old} --anew traces them.\n" if old else "") +
            f"{drawn}")


def named(text: str) -> list[str]:
    """The cards that `text` means: "all", a name, ours or PyTorch's, or else a part of names:
    "4090". Case, spaces and hyphens don't count: "rtx4090"."""
    def plain(name: str) -> str:
        return re.sub("[^a-z0-9]", "", name.lower())

    text = plain(text)
    exact = [name for name, card in CARDS.items()
             if text in ("all", *map(plain, (name, *card.names)))]
    return exact or [name for name in CARDS if text and text in plain(name)]


def where_it_goes(runs: list, known: dict[str, Prediction], name: str,
                  batch_size: int | None) -> Table:
    """For one card: at which batch, how fast, and where the time of a step goes."""
    card, rows = CARDS[name], []
    for run in runs:
        prediction = known[run.name]
        batch = batch_size or largest(prediction.needs, card.mib)
        fits = batch and prediction.needs[batch].least <= card.mib - OTHERS
        times = prediction.seconds(batch, card) if fits else None
        if times:
            rows.append((run, prediction, batch, times))

    def minutes(row: tuple) -> str:
        run, prediction, batch, _ = row
        if batch * prediction.context_length * run.processes > TOKENS_OF_BOOK:
            return "needs a longer text"
        return f"{prediction.minutes(batch, card, run.processes):,.1f}"

    return Table([
        Column("script", lambda row: row[0].label, True), Column("batch", lambda row: str(row[2])),
        Column("tok/sec, thousands", lambda row: row[1].speed_range(row[2], card)),
        Column("MFU", lambda row: f"{row[1].mfu(row[2], card):.0%}"),
        Column(f"minutes of {EPOCHS} epochs", minutes),
        *(Column(kind, partial(share, kind)) for kind in KINDS)], rows,
        f"What fits a card of this kind, {name}: how fast, how long on the book's"
        f" {TOKENS_OF_BOOK:,} training\ntokens, and where the time of a step goes:")


def share(kind: str, row: tuple) -> str:
    """Of a step's seconds by kind, the last of `row`."""
    return f"{row[3][kind] / sum(row[3].values()):.0%}"


def chosen(setup) -> list:
    """The scripts that are asked for. Raises UserError, StackError."""
    scripts, args = setup.scripts, setup.args
    machine = dict(gpus=4)  # of any kind
    runs = [scripts.stage(name, 4) for name in ("00", "01", "02")]
    if args.rungs:
        runs = scripts.chosen(args.rungs, scripts.rungs(4))
    for text in filter(str.strip, (args.variants or "").split(",")):
        name, *options = text.split()
        try:
            found = scripts.variants(scripts.stage("01"), machine, names=name)[1:]
        except UserError as unknown:  # to 01, whose names are told if 02 doesn't know it either
            try:
                found = scripts.variants(scripts.stage("02", 4), machine, names=name)[1:]
            except UserError:
                raise unknown from None
        if options:
            label = " ".join([name, *options])
            found = [found[0].but(name=label, label=label, options=tuple(options))]
        runs += found
    return runs


def reserved(needs: dict, batch: int) -> str:
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


def draw(runs: list, needs: dict[str, dict], model: str):
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
                  color=COLOURS.get(run.stage))
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
