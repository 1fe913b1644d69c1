"""Will it fit, and how fast is it? What a script would reserve on GPUs that aren't there, the batch
that fits, and the tokens per second."""

import re
from functools import partial
from pathlib import Path

from bench.catalogue import EPOCHS, FLOAT16, Run
from bench.common import UserError, relative, sha256, write_whole
from bench.measure.lengths import option_of
from bench.predict.speed import CARDS, KINDS, Card, named, read_cards
from bench.predict.store import (
    BATCHES,
    OTHERS,
    TOKENS_OF_BOOK,
    Prediction,
    earlier,
    fitting,
    largest,
    predict,
    predict_all,
)
from bench.report import check, costs
from bench.report.costs import prices, tokens
from bench.report.gpus import in_place
from bench.report.pictures import COLOURS, picture_bytes, rows_of_panels, thousands
from bench.report.tables import Column, Table, found_in, markdown, number, words
from bench.studies import Study, positive
from patches import stack

GPUS = 4  # of 02, as it was published


class Predict(Study):
    """What 00, 01, 02, rungs and variants reserve on a GPU, the largest batch that fits each card,
    and the tokens per second: predicted, without a GPU and without training."""

    runs_scripts = of_this_machine = False

    def options(self, parser):
        parser.add_argument("--gpu", metavar="NAME", default="all",
                            help="all (the default), or a name or a part of it, as in 4090, 8xH100;"
                                 f" known are {', '.join(CARDS)}")
        parser.add_argument("--gpu-file", metavar="FILE", type=Path,
                            help="GPUs of a file like bench/predict/gpus.json instead")
        parser.add_argument("--memory", metavar="GB", type=float,
                            help="a GPU with this much memory instead")
        parser.add_argument("--bandwidth", metavar="GB/S", type=float, help="its memory bandwidth")
        parser.add_argument("--tflops", metavar="N", type=float,
                            help="its dense bfloat16 matmul throughput by the datasheet, TFLOP/s")
        parser.add_argument("--model", metavar="NAME", default="gpt2",
                            help="--model of the scripts (default: %(default)s)")
        parser.add_argument("--batch-size", metavar="N", type=positive,
                            help="a further batch size, per GPU")
        parser.add_argument("--rungs", metavar="0,5-8", help="rungs instead of 00, 01 and 02")
        parser.add_argument("--variants", metavar="A,B+C",
                            help="variants of 01 or 02 besides, each with its measured options or"
                                 " with others: \"step-accumulation --micro-batches 8\"; + joins"
                                 " several into one script")
        parser.add_argument("--compare", metavar="GPU,GPU", help="these GPUs, side by side")
        parser.add_argument("--tokens", metavar="N", type=tokens,
                            help="how long it takes to train on so many: 10e9, 10B, 300M")
        parser.add_argument("--price", metavar="PER_HOUR", type=prices,
                            help="of one GPU, in any currency: what it costs; of the GPUs of"
                                 " --compare one each: 2.7,1.7")
        parser.add_argument("--anew", action="store_true",
                            help="trace these scripts, also where an answer is kept")
        parser.add_argument("--all", action="store_true",
                            help="trace what the pages say about predictions where it is missing or"
                                 " its script's training step has changed, with --anew all of it"
                                 " (up to two hours), into --results-dir; print what differs"
                                 " from what was kept")

    def answer(self, setup):
        args, options = setup.args, ["--model", setup.args.model, *setup.options]
        if any(option_of(name, setup.options) for name in ("--batch-size", "--model")):
            raise UserError("--batch-size and --model go before --", 2)
        cards, gpus = asked_for(args)
        smallest = min(card.mib for card in cards.values()) - OTHERS
        if args.all:
            return predict_all(
                setup.scripts, check.wanted(), setup.results, smallest, args.anew)
        runs = chosen(setup, gpus)

        def there(run: Run, card: str) -> Run:
            chosen = option_of("--dtype", options)
            return run if chosen else in_place(setup.scripts, run, cards[card])

        asked = list({run.name: run for run in [
            *runs, *(there(run, card) for card in cards for run in runs)]}.values())
        known = {run.name: predict(
            setup.scripts, run.script, [*options, *run.options], setup.results, smallest,
            args.batch_size, args.anew) for run in asked}
        old = earlier(setup.scripts, [
            (run.script, [*options, *run.options], known[run.name]) for run in asked])
        text = markdown(reserved_table(asked, known, args, measured(setup, options)))
        text += "\n" + markdown(fitting_table(runs, known, cards, there))
        (name, card), *others = cards.items()
        if args.tokens or args.price or args.compare:
            text += "\n" + markdown(costs.costs_table(runs, known, cards, there, args))
        if card.bandwidth and not others:
            text += "\n" + markdown(where_it_goes(
                [there(run, name) for run in runs], known, name, card, args.batch_size))
        picture = setup.results / "predict.png"
        # To draw takes longer than all the rest, so the same figures aren't drawn twice.
        about = sha256(repr([args.model, [(run.label, known[run.name].needs) for run in runs],
                             [(card.mib, card.is_measured) for card in CARDS.values()]]).encode())
        try:
            if not (picture.is_file() and about.encode() in picture.read_bytes()[:1000]):
                write_whole(picture, picture_bytes(draw(runs, known, args.model), "png", about))
            drawn = relative(picture)
        except UserError as error:
            drawn = f"no picture: {error}"
        slow = costs.why_slow(cards) if args.compare or not others else []
        return "\n".join([text, *slow, *notes(cards, gpus),
                          *([f"{old} --anew traces them."] * bool(old)), drawn])


def asked_for(args) -> tuple[dict[str, Card], int]:
    """(the cards by their names, how many of one 02 would have). Raises UserError."""
    if args.compare and (args.memory is not None or args.gpu != "all"):
        raise UserError("--compare names the GPUs: leave --gpu and --memory out", 2)
    for name in ("memory", "bandwidth", "tflops"):
        value = getattr(args, name)
        if value is not None and not 0 < value < 100_000:
            raise UserError(f"--{name}: {value:g} is out of range", 2)
    if (args.bandwidth is None) != (args.tflops is None) or args.bandwidth and not args.memory:
        raise UserError("--bandwidth and --tflops tell a speed together, with --memory", 2)
    if args.memory is not None:
        rate = args.tflops or 0
        return {f"{args.memory:g} GB": Card(
            int(1024 * args.memory), 8.0, args.bandwidth or 0, None, rate / 2, rate, rate,
            0.8 * rate, None, is_measured=False, held=1)}, GPUS
    known = read_cards(args.gpu_file) if args.gpu_file else CARDS
    if args.compare:
        return {name: known[name] for text in args.compare.split(",")
                for name in named(text, known, "--compare")}, GPUS
    gpus, name = re.fullmatch(r"(?:(\d+) *[x×] *)?(.*)", args.gpu.strip(), re.IGNORECASE).groups()
    if name.lower() == "all":  # that 01 and 02 are for
        found = [card for card, each in known.items() if args.gpu_file or each.capability >= 7]
    else:
        found = named(args.gpu if gpus and not int(gpus) else name, known)
    return {name: known[name] for name in found}, int(gpus or GPUS)


def reserved_table(runs: list[Run], known: dict[str, Prediction], args, ours: dict) -> Table:
    def reserved(batch: int, run: Run) -> str:
        need = known[run.name].needs.get(batch)
        return f"{need.reserved / 1024:.2f}" if need else ""

    batches = [8, 32, *([args.batch_size] if args.batch_size not in (None, 8, 32) else [])]
    return Table([
        Column("script", lambda run: run.label, True),
        *(Column(f"batch {batch}", partial(reserved, batch)) for batch in batches),
        Column("measured here", lambda run: ours.get(run.name, ""))],
        runs, f"Predicted reserved memory of {args.model}, GB (1024³ bytes) per GPU:")


def fitting_table(runs: list[Run], known: dict[str, Prediction], cards: dict[str, Card],
                  there) -> Table:
    """The largest batch on each card, of the script that is `there` in place of a run."""
    def fits(run: Run, name: str) -> str:
        prediction, card = known[there(run, name).name], cards[name]
        batch = largest(prediction.needs, card.mib)
        if not batch:
            return "none"
        text = f"{batch} ({prediction.needs[batch].reserved / 1024:.1f} GB)"
        return text + (f": {prediction.speed_range(batch, card)}" if card.bandwidth else "")

    others: dict[str, list[str]] = {}  # the cards that train in another way, by it
    for name, card in cards.items():
        if any(there(run, name) is not run for run in runs):
            how = f"with {FLOAT16}" if card.capability >= 7 else "in float32, not compiled"
            others.setdefault(how, []).append(name)
    told = "".join(f" (on {', '.join(names)} {how})" for how, names in others.items())
    return Table([
        Column("card", lambda name: name, True),
        Column("GB", lambda name: f"{cards[name].mib / 1024:.0f}"),
        *(Column(run.label, partial(fits, run)) for run in runs)],
        list(cards), "The largest power of two that fits, what it reserves, and tok/sec per GPU in"
        f" thousands{told}:")


def notes(cards: dict[str, Card], gpus: int) -> list[str]:
    """What to know of the tables, a line each."""
    lines = [f"Nothing was trained for this. {OTHERS / 1024:.1f} GB are left for driver and"
             " display. docs/gpus.md and\ndocs/predictions.md say how accurate it is. On an H100 01"
             " reserved 15 % more than\npredicted: where less than that is left, take half the"
             " batch. 02 is without the time for\ncommunication between GPUs."]
    scaled = [name for name, card in cards.items()
              if card.bandwidth and card.capability >= 8 and not card.is_measured]
    if scaled:
        lines.append(f"Nobody has measured the matmul throughput of these; it is scaled from the"
                     f" datasheet, so the range is wider: {', '.join(scaled)}.")
    if any(card.bandwidth and not card.float32 for card in cards.values()):
        lines.append("Without the float32 throughput, which --gpu-file may give, 00 has no speed.")
    if gpus != GPUS:
        lines.append(f"On {gpus} GPUs a step takes at least as long as on one; weights and states"
                     f" that ranks share are traced as on {GPUS}.")
    return lines


def where_it_goes(runs: list, known: dict[str, Prediction], name: str, card: Card,
                  batch_size: int | None) -> Table:
    """For one card: at which batch, how fast, and where the time of a step goes."""
    rows = []
    for run in runs:
        each, gpus = known[run.name], run.processes
        batch = fitting(each.needs, card.mib, batch_size)
        if times := batch and each.seconds(batch, card):
            fits = batch * each.context_length * gpus <= TOKENS_OF_BOOK
            rows.append(dict(
                label=run.label, batch=batch, speed=each.speed_range(batch, card),
                of_all=each.speed_range(batch, card, gpus) if gpus > 1 else None,
                mfu=each.mfu(batch, card), minutes=f"{each.minutes(batch, card, gpus):,.1f}"
                if fits else "needs a longer text",
                shares={kind: spent / sum(times.values()) for kind, spent in times.items()}))
    return Table([
        words("script", "label"), number("batch", "batch"), number("tok/sec, thousands", "speed"),
        number("of all its GPUs", "of_all"), number("MFU", "mfu", ".0%"),
        number(f"minutes of {EPOCHS} epochs", "minutes"),
        *(number(kind, f"shares.{kind}", ".0%") for kind in KINDS)], rows,
        f"What fits a GPU of this kind, {name}: how fast, how long on the book's"
        f" {TOKENS_OF_BOOK:,} training\ntokens, and where the time of a step goes:")


def chosen(setup, gpus: int) -> list[Run]:
    """The scripts that are asked for, those of several GPUs on this many. Raises UserError,
    StackError."""
    scripts, args = setup.scripts, setup.args
    runs = [scripts.stage(name, gpus) for name in ("00", "01", "02")]
    if args.rungs:
        runs = scripts.chosen(args.rungs, scripts.rungs(gpus))
    of_02 = {patch.name for patch in stack.load_variants() if patch.base == Path(stack.DDP).stem}
    for text in filter(str.strip, (args.variants or "").split(",")):
        first = re.split(r"[+\s]", text.strip())[0]
        base = scripts.stage("02" if first in of_02 else "01", gpus)
        runs += scripts.variants(base, dict(gpus=gpus), names=text)[1:]
    return runs


def measured(setup, options: list[str]) -> dict[str, str]:
    """What was reserved on a GPU here, by the run's name."""
    found = {}
    for study in ("stages", "ladder", "variants"):
        for each, rows in found_in(setup.results, study):
            if each.machine["device"] == "cuda" and setup.options == each.options:
                found |= {row.run.name: f"{row.reserved_gb:.2f}" for row in rows
                          if row.record and row.reserved_gb
                          and row.record.config["model"] == options[1]}
    return found


def draw(runs: list[Run], known: dict[str, Prediction], model: str):
    """Memory over the batch size, with a line for each size of card."""
    figure, [(subfigure, axes)] = rows_of_panels(
        [f"Predicted memory of {model} by batch size"], [5.5], [1])
    groups = [[]]  # of cards of about one size, whose names have one line
    known_well = [(card.mib / 1024, name) for name, card in CARDS.items() if card.is_measured]
    for size, name in sorted(known_well):  # all would be too many
        if groups[-1] and size > 1.22 * groups[-1][0][0]:
            groups.append([])
        groups[-1].append((size, name))
    top = size
    for run in runs:
        points = [(batch, each.reserved / 1024) for batch, each in sorted(
                      known[run.name].needs.items())
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
                      fontsize=9, xycoords=("axes fraction", "data"), textcoords="offset points")
    axes.set_xlabel("batch size per GPU, sequences")
    axes.set_ylabel("reserved memory, GB")
    thousands(axes.xaxis)
    thousands(axes.yaxis)
    axes.set_xticks(BATCHES)
    axes.set_yticks([2**k for k in range(9)])
    subfigure.legend(loc="outside lower center", ncols=4, frameon=False)
    return figure
