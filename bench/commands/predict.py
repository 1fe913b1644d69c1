"""Will it fit, and how fast is it? What a script would reserve on GPUs that aren't there, the batch
that fits, and the tokens per second."""

import re
from functools import partial
from pathlib import Path

from bench.cards import CARDS, Card, named, read_cards
from bench.catalogue import EPOCHS, FLOAT16, Run, without_doubles
from bench.commands import costs
from bench.commands.costs import prices, tokens
from bench.common import BOOK_TOKENS, UserError, has_option
from bench.predict.speed import KINDS
from bench.predict.store import OTHERS, Prediction, changed, fitting, predict, predict_all
from bench.report import prediction_tables
from bench.report.prediction_tables import in_place
from bench.report.tables import Column, Table, found_in, markdown, num_col, text_col
from bench.subcommands import Command, positive
from patches import stack

GPUS = 4  # of 02, as it was published
FEW = 4  # cards: of more the answer tells how many it fits, not how fast each is


class Predict(Command):
    """Predict memory, the largest batch and tok/sec on any GPU."""

    group = "start here"
    def options(self, parser):
        parser.add_argument("--gpu", metavar="NAME", default="all",
                            help="names, or parts of them: 4090 or H100,H200; 8xH100 adds 02 on"
                                 " eight of them; `--gpu list` prints all (default: all)")
        parser.add_argument("--gpu-file", metavar="FILE", type=Path,
                            help="GPUs of a file like bench/cards.json instead")
        parser.add_argument("--memory", metavar="GB", type=float,
                            help="a GPU with this much memory instead")
        parser.add_argument("--bandwidth", metavar="GB/S", type=float, help="its memory bandwidth")
        parser.add_argument("--tflops", metavar="N", type=float,
                            help="its dense bfloat16 matmul throughput by the datasheet, TFLOP/s")
        parser.add_argument("--model", metavar="NAME", default="gpt2",
                            help="--model of the scripts (default: %(default)s)")
        parser.add_argument("--batch-size", metavar="N", type=positive,
                            help="also predict this batch size, per GPU")
        parser.add_argument("--techniques", metavar="0,5-8",
                            help="the scripts after these techniques, instead of 00 and 01")
        parser.add_argument("--variants", metavar="A,B+C",
                            help="variants of 01 or 02 besides, each with its measured options or"
                                 " with others: \"step-accumulation --micro-batches 8\"; + joins"
                                 " several into one script")
        parser.add_argument("--tokens", metavar="N", type=tokens,
                            help="how long it takes to train on so many: 10e9, 10B, 300M")
        parser.add_argument("--price", metavar="PER_HOUR", type=prices,
                            help="of one GPU, in any currency: what it costs; of several GPUs"
                                 " one each: 2.7,1.7")
        parser.add_argument("--why", action="store_true",
                            help="also print what made such GPUs slower elsewhere")
        parser.add_argument("--retrace", action="store_true", help="ignore stored predictions")
        parser.add_argument("--all", action="store_true",
                            help="trace what the pages say about predictions where it is missing or"
                                 " its script's training step has changed, with --retrace all of it"
                                 " (up to two hours), into --results-dir")

    def answer(self, setup):
        args, options = setup.args, ["--model", setup.args.model, *setup.options]
        if any(has_option(name, setup.options) for name in ("--batch-size", "--model")):
            raise UserError("--batch-size and --model go before --", 2)
        if args.gpu.strip().lower() == "list":
            return markdown(cards_table(cards_of(args)))
        cards, gpus = asked_for(args)
        smallest = min(card.mib for card in cards.values()) - OTHERS
        if args.all:
            return predict_all(
                setup.scripts, prediction_tables.wanted(), setup.results, smallest, args.retrace)
        runs = chosen(setup, gpus)

        def there(run: Run, card: str) -> Run:
            if has_option("--dtype", options):
                return run
            return in_place(setup.scripts, run, cards[card])

        asked = list({run.name: run for run in [
            *runs, *(there(run, card) for card in cards for run in runs)]}.values())
        known = {run.name: predict(
            setup.scripts, run.script, [*options, *run.options], setup.results, smallest,
            args.batch_size, args.retrace) for run in asked}
        other_code = changed(setup.scripts, [(run.script, known[run.name]) for run in asked])
        text = answer_of(runs[-1], known, cards, there, args) + "\n\n"
        text += markdown(reserved_table(asked, known, args, measured(setup, options)))
        text += "\n" + markdown(fitting_table(runs, known, cards, there))
        (name, card), *others = cards.items()
        if args.tokens or args.price:
            text += "\n" + markdown(costs.costs_table(runs, known, cards, there, args))
        if card.bandwidth and not others:
            text += "\n" + markdown(where_it_goes(
                [there(run, name) for run in runs], known, name, card, args.batch_size))
        slow = costs.why_slow(cards) if args.why else []
        edited = [f"{other_code} --retrace traces it."] if other_code else []
        return "\n".join([text, *slow, *notes(cards, runs), *edited])


def asked_for(args) -> tuple[dict[str, Card], int]:
    """Returns (the cards by their names, how many of one 02 has, 0 where it isn't asked for).
    Raises UserError."""
    for name in ("memory", "bandwidth", "tflops"):
        value = getattr(args, name)
        if value is not None and not 0 < value < 100_000:
            raise UserError(f"--{name}: {value:g} is out of range", 2)
    if (args.bandwidth is None) != (args.tflops is None) or args.bandwidth and not args.memory:
        raise UserError("--bandwidth and --tflops tell a speed together, with --memory", 2)
    counts, names = counted(args.gpu)
    if args.memory is not None:
        if names not in ("", "all"):
            raise UserError("--memory describes a GPU of its own: leave --gpu out, or give the"
                            " number of GPUs, --gpu 4x", 2)
        rate = args.tflops or 0
        return {f"{args.memory:g} GB": Card(
            int(1024 * args.memory), 8.0, args.bandwidth or 0, None, rate / 2, rate, rate,
            0.8 * rate, None, is_measured=False, held=1)}, counts
    known = cards_of(args)
    chosen = named(names, known) if names != "all" else [
        name for name, card in known.items() if args.gpu_file or card.capability >= 7]
    return {name: known[name] for name in chosen}, counts  # 01 and 02 are for 7.0 and later


def cards_of(args) -> dict[str, Card]:
    return read_cards(args.gpu_file) if args.gpu_file else CARDS


def counted(text: str) -> tuple[int, str]:
    """Returns (how many GPUs, their names) of "8xH100,8xH200"; 0 where it doesn't say how many.
    Raises UserError."""
    counts, names = zip(*(
        re.fullmatch(r"(?:(\d+) *[x×])?(.*)", part.strip(), re.IGNORECASE | re.DOTALL).groups()
        for part in text.split(",")), strict=True)
    if len({*counts}) > 1 or "0" in counts:
        raise UserError(f"{text}: how many GPUs? One number for all of them, from 1", 2)
    joined = ",".join(map(str.strip, names))
    return int(counts[0] or 0), "all" if joined.lower() == "all" else joined


def cards_table(cards: dict[str, Card]) -> Table:
    return Table([
        Column("GPU", lambda name: name, True),
        Column("GB", lambda name: f"{cards[name].mib / 1024:.0f}"),
        Column("also called", lambda name: ", ".join(cards[name].names), True)],
        list(cards), "GPUs that predict knows:")


def answer_of(run: Run, known: dict[str, Prediction], cards: dict[str, Card], there, args) -> str:
    """Returns what one asks first, of the last script: does it fit, at which batch, how fast."""
    if len(cards) <= FEW:
        prices = (args.price or [None]) * len(cards)
        return "\n".join(answer_on(name, card, there(run, name), known, args, price)
                         for (name, card), price in zip(cards.items(), prices, strict=False))
    fit = [name for name, card in cards.items()
           if fitting(known[there(run, name).name].needs, card.mib, args.batch_size)]
    at_batch = f" at batch {args.batch_size}" if args.batch_size else ""
    return f"{args.model}, {run.label}: fits {len(fit)} of {len(cards)} GPUs{at_batch}."


def answer_on(name: str, card: Card, run: Run, known: dict[str, Prediction], args,
              price: float | None) -> str:
    """Returns the same, on one card, in a sentence."""
    prediction = known[run.name]
    most = fitting(prediction.needs, card.mib)
    batch = fitting(prediction.needs, card.mib, args.batch_size)
    size = batch or args.batch_size or min(prediction.needs)
    text = (f"{name}, {args.model}, {run.label}: {'fits' if batch else 'does not fit'} at batch"
            f" {size} (needs {prediction.needs[size].minimum / 1024:.2f} of"
            f" {(card.mib - OTHERS) / 1024:.2f} GB"
            f"{f'; the largest that fits is {most}' if args.batch_size and most else ''})")
    if not batch or not card.bandwidth:
        return text + "."
    text += f", {prediction.speed_range(batch, card, run.processes)}"
    if speeds := prediction.speeds(batch, card, run.processes):
        figures = costs.figures_of(speeds, run.processes, args.tokens, price)
        text += " thousand tok/sec"
        if "hours" in figures:
            text += f"; {args.tokens:,.0f} tokens take {figures['hours']} hours"
        if "cost" in figures:
            text += f" and cost {figures['cost']}"
    return text + "."


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
    """Returns the largest batch on each card, of the script that is `there` in place of a run."""
    def fits(run: Run, name: str) -> str:
        prediction, card = known[there(run, name).name], cards[name]
        batch = fitting(prediction.needs, card.mib)
        if not batch:
            return "none"
        reserved = min(prediction.needs[batch].reserved, card.mib - OTHERS)
        text = f"{batch} ({reserved / 1024:.1f} GB)"
        return text + (f": {prediction.speed_range(batch, card)}" if card.bandwidth else "")

    others: dict[str, list[str]] = {}  # the cards that train in another way, by it
    for name, card in cards.items():
        if any(there(run, name) is not run for run in runs):
            how = f"with {FLOAT16}" if card.capability >= 7 else "in float32, not compiled"
            others.setdefault(how, []).append(name)
    elsewhere = "".join(f" (on {', '.join(names)} {how})" for how, names in others.items())
    return Table([
        Column("card", lambda name: name, True),
        Column("GB", lambda name: f"{cards[name].mib / 1024:.0f}"),
        *(Column(run.label, partial(fits, run)) for run in runs)],
        list(cards),
        f"Largest batch (a power of two), GB reserved, thousand tok/sec per GPU{elsewhere}:")


def notes(cards: dict[str, Card], runs: list[Run]) -> list[str]:
    """Returns what to know of the tables, a line each."""
    fast = {name: card for name, card in cards.items() if card.bandwidth}
    scaled = [name for name, card in fast.items() if card.capability >= 8 and not card.is_measured]
    lines = [f"All numbers are predictions; {OTHERS / 1024:.1f} GB are left for driver and display."
             " How accurate they are: docs/predictions.md. Without expandable segments, as on"
             " Windows, 01 reserved 15 % more than predicted on an H100: where less than that is"
             " left, take half the batch."]
    if fast and len(cards) == 1:
        lines.append(f"{EPOCHS} epochs are of the book, {BOOK_TOKENS:,} training tokens; –: one"
                     " batch has more.")
    if any(run.processes > 1 for run in runs):
        lines.append("A step on several GPUs takes at least as long as on one: communication takes"
                     f" no time here. Weights and states that ranks share are traced as on {GPUS}.")
    if scaled:
        lines.append("The matmul throughput of these is scaled from the datasheet, so the range is"
                     f" wider: {', '.join(scaled)}.")
    if not all(card.float32 for card in fast.values()):
        lines.append("Speed unknown: it needs the GPU's float32 throughput, which --gpu-file may"
                     " give.")
    return lines


def where_it_goes(runs: list, known: dict[str, Prediction], name: str, card: Card,
                  batch_size: int | None) -> Table:
    """Returns for one card at which batch, how fast, and where the time of a step goes."""
    rows = []
    for run in runs:
        prediction, gpus = known[run.name], run.processes
        batch = fitting(prediction.needs, card.mib, batch_size)
        times = prediction.seconds(batch, card) if batch else None
        row = dict(label=run.label, batch=batch or batch_size or "none",
                   speed=prediction.speed_range(batch, card) if batch else "doesn't fit")
        if times:
            # A batch of more tokens than the book has can't be trained on it.
            fits_book = batch * prediction.context_length * gpus <= BOOK_TOKENS
            row |= dict(
                of_all=prediction.speed_range(batch, card, gpus) if gpus > 1 else None,
                mfu=prediction.mfu(batch, card),
                minutes=f"{prediction.minutes(batch, card, gpus):,.1f}" if fits_book else "–",
                shares={kind: spent / sum(times.values()) for kind, spent in times.items()})
        rows.append(row)
    return Table([
        text_col("script", "label"), num_col("batch", "batch"),
        num_col("tok/sec, thousands", "speed"),
        num_col("of all its GPUs", "of_all"), num_col("MFU", "mfu", ".0%"),
        num_col(f"minutes of {EPOCHS} epochs", "minutes"),
        *(num_col(kind, f"shares.{kind}", ".0%") for kind in KINDS)], rows,
        f"{name}: speed, time for {EPOCHS} epochs, share of step time:")


def chosen(setup, gpus: int) -> list[Run]:
    """Returns the scripts that are asked for, those of several GPUs on this many. Raises
    UserError, StackError."""
    scripts, args = setup.scripts, setup.args
    runs = [scripts.stage(name, gpus or GPUS) for name in ("00", "01", "02")[:3 if gpus else 2]]
    if args.techniques:
        runs = scripts.select(args.techniques, scripts.ladder(gpus or GPUS))
    of_02 = {patch.name for patch in stack.load_variants() if patch.base == Path(stack.DDP).stem}
    for text in filter(str.strip, (args.variants or "").split(",")):
        first = re.split(r"[+\s]", text.strip())[0]
        base = scripts.stage("02" if first in of_02 else "01", gpus or GPUS)
        runs += scripts.variants(base, dict(gpus=gpus or GPUS), names=text)[1:]
    return without_doubles(runs)


def measured(setup, options: list[str]) -> dict[str, str]:
    """Returns what was reserved on a GPU here, by the run's name."""
    return {row.run.name: f"{row.reserved_gb:.2f}" for study in ("stages", "ladder", "variants")
            for one, rows in found_in(setup.results, study) for row in rows
            if one.machine["device"] == "cuda" and setup.options == one.options
            and row.reserved_gb and row.record and row.record.config["model"] == options[1]}
