"""Will it fit, and how fast is it? What a script would reserve on GPUs that aren't there, the batch
that fits, the tokens per second, and how long a number of tokens takes and costs."""

import re
from functools import partial
from pathlib import Path
from typing import NamedTuple

from bench.cards import CARDS, Card, named
from bench.catalogue import EPOCHS, FLOAT16, Run
from bench.common import BOOK_TOKENS, UserError, has_option
from bench.predict.speed import KINDS
from bench.predict.store import OTHERS, Prediction, code_of, fitting, predict, predict_all, span
from bench.report.prediction_tables import in_place, wanted
from bench.report.tables import Column, Table, markdown, num_col, text_col
from bench.subcommands import Command, above_0, positive
from patches import stack

GPUS = 4  # of 02, as it was published
FEW = 4  # cards: of more the answer tells how many it fits, not how fast each is
SUFFIXES = dict(k=1e3, m=1e6, b=1e9)


def tokens(text: str) -> float:
    """Reads an option: 10e9, 10B, 300m."""
    number, suffix = re.fullmatch(r"(.*?)([kmb]?)", text.strip().lower()).groups()
    return above_0(number) * SUFFIXES.get(suffix, 1)


def prices(text: str) -> list[float]:
    """Reads an option: the price of a GPU per hour, or of several."""
    return [above_0(price) for price in text.split(",")]


class Predict(Command):
    """Predict memory, the largest batch and tok/sec on any GPU."""

    group = "start here"

    def options(self, parser):
        parser.add_argument("--gpu", metavar="NAME", default="all",
                            help="names, or parts of them: 4090 or H100,H200; 8xH100 adds 02 on"
                                 " eight of them; `--gpu list` prints all (default: all)")
        parser.add_argument("--memory", metavar="GB", type=above_0,
                            help="a GPU with this much memory instead")
        parser.add_argument("--bandwidth", metavar="GB/S", type=above_0,
                            help="its memory bandwidth")
        parser.add_argument("--tflops", metavar="N", type=above_0,
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
                            help="of one GPU, in any currency: what these --tokens cost; of several"
                                 " GPUs one each: 2.7,1.7")
        parser.add_argument("--retrace", action="store_true", help="ignore stored predictions")
        parser.add_argument("--all", action="store_true",
                            help="trace what the pages show where it is missing or its script has"
                                 " changed, with --retrace all of it (up to two hours)")

    def answer(self, setup):
        args, options = setup.args, ["--model", setup.args.model, *setup.options]
        if any(has_option(name, setup.options) for name in ("--batch-size", "--model")):
            raise UserError("--batch-size and --model go before --", 2)
        if args.gpu.strip().lower() == "list":
            return "\n".join(f"{name}, {card.mib / 1024:.0f} GB: {', '.join(card.names)}"
                             for name, card in CARDS.items())
        cards, gpus = asked_for(args)
        smallest = min(card.mib for card in cards.values()) - OTHERS
        if args.all:
            return predict_all(setup.scripts, wanted(), setup.results, smallest, args.retrace)
        runs = chosen(setup, gpus)
        there = {name: runs if has_option("--dtype", options) else [
            in_place(setup.scripts, run, card) for run in runs] for name, card in cards.items()}
        every = {run.name: run for on_card in (runs, *there.values()) for run in on_card}
        predictions = {name: predict(
            setup.scripts, run.script, [*options, *run.options], setup.results, smallest,
            args.batch_size, args.retrace) for name, run in every.items()}
        edited = {setup.scripts.canonical(run.script) for name, run in every.items()
                  if predictions[name].code != code_of(setup.scripts.text(run.script))}
        fits = {name: [Fit(name, cards[name], run, predictions[run.name], args.batch_size)
                       for run in on_card] for name, on_card in there.items()}
        tables = [reserved_table([*every.values()], predictions, args), fitting_table(runs, fits)]
        if all(card.bandwidth for card in cards.values()) and (args.tokens or len(cards) <= FEW):
            tables.append(speed_table(fits, args))
        return "\n".join([
            answer_of(runs[-1], [on_card[-1] for on_card in fits.values()], args), "",
            markdown(*tables), *notes(runs, len(every) > len(runs), edited)])


class Fit(NamedTuple):
    """A script on a GPU."""

    name: str  # of the GPU
    card: Card
    run: Run
    prediction: Prediction
    asked: int | None  # the batch size that is asked for

    @property
    def batch(self) -> int:
        """The batch that is asked for, or else the largest; 0 where it doesn't fit."""
        return fitting(self.prediction.needs, self.card.mib, self.asked)

    def speed(self, gpus: int = 1) -> str:
        return self.prediction.speed_range(self.batch, self.card, gpus)


def asked_for(args) -> tuple[dict[str, Card], int]:
    """Returns (the cards by their names, how many of one 02 has, 0 where it isn't asked for).
    Raises UserError."""
    if (args.bandwidth is None) != (args.tflops is None) or args.bandwidth and not args.memory:
        raise UserError("--bandwidth and --tflops tell a speed together, with --memory", 2)
    count, names = re.fullmatch(
        r"(?:([1-9]\d*) *[xX×])?\s*(.*)", args.gpu.strip(), re.DOTALL).groups()
    if args.memory:
        if names not in ("", "all"):
            raise UserError("--memory describes a GPU of its own: leave --gpu out, or give the"
                            " number of GPUs, --gpu 4x", 2)
        rate = args.tflops or 0
        cards = {f"{args.memory:g} GB": Card(
            int(1024 * args.memory), 8.0, args.bandwidth or 0, float16=rate, reached=0.8 * rate,
            bfloat16=rate, tf32=rate / 2, is_measured=False, held=1)}
    elif names.lower() == "all":  # 01 and 02 are for 7.0 and later
        cards = {name: card for name, card in CARDS.items() if card.capability >= 7}
    else:
        cards = {name: CARDS[name] for name in named(names)}
    if args.price and (not args.tokens or len(args.price) not in (1, len(cards))):
        raise UserError(f"--price needs --tokens, and one price, or one for each of {len(cards)}"
                        f" GPUs: {', '.join(cards)}", 2)
    return cards, int(count or 0)


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
    return list({run.name: run for run in runs}.values())


def answer_of(run: Run, fits: list[Fit], args) -> str:
    """Returns what one asks first, of a script: does it fit, at which batch, how fast."""
    if len(fits) <= FEW:
        return "\n".join(sentence(fit, args.model) for fit in fits)
    at_batch = f" at batch {args.batch_size}" if args.batch_size else ""
    count = sum(fit.batch > 0 for fit in fits)
    return f"{args.model}, {run.label}: fits {count} of {len(fits)} GPUs{at_batch}."


def sentence(fit: Fit, model: str) -> str:
    size = fit.batch or fit.asked or min(fit.prediction.needs)
    text = (f"{fit.name}, {model}, {fit.run.label}: {'fits' if fit.batch else 'does not fit'} at"
            f" batch {size} (needs {fit.prediction.needs[size].minimum / 1024:.2f} of"
            f" {(fit.card.mib - OTHERS) / 1024:.2f} GB)")
    if fit.batch and fit.card.bandwidth and fit.prediction.tok_per_sec(fit.batch, fit.card):
        text += f", {fit.speed(fit.run.processes)} thousand tok/sec"
    return text + "."


def reserved_table(runs: list[Run], predictions: dict[str, Prediction], args) -> Table:
    def reserved(batch: int, run: Run) -> str:
        need = predictions[run.name].needs.get(batch)
        return f"{need.reserved / 1024:.2f}" if need else ""

    batches = [8, 32, *([args.batch_size] if args.batch_size not in (None, 8, 32) else [])]
    return Table([
        Column("script", lambda run: run.label, True),
        *(Column(f"batch {batch}", partial(reserved, batch)) for batch in batches)],
        runs, f"Predicted reserved memory of {args.model}, GB (1024³ bytes) per GPU:")


def fitting_table(runs: list[Run], fits: dict[str, list[Fit]]) -> Table:
    """Returns the largest batch on each card, a column for each script."""
    def cell(place: int, on_card: list[Fit]) -> str:
        fit = on_card[place]._replace(asked=None)
        if not fit.batch:
            return "none"
        reserved = min(fit.prediction.needs[fit.batch].reserved, fit.card.mib - OTHERS)
        text = f"{fit.batch} ({reserved / 1024:.1f} GB)"
        return f"{text}: {fit.speed()}" if fit.card.bandwidth else text

    return Table([
        Column("card", lambda on_card: on_card[0].name, True),
        Column("GB", lambda on_card: f"{on_card[0].card.mib / 1024:.0f}"),
        *(Column(run.label, partial(cell, place)) for place, run in enumerate(runs))],
        [*fits.values()],
        "Largest batch (a power of two), GB reserved, thousand tok/sec per GPU:")


def speed_table(fits: dict[str, list[Fit]], args) -> Table:
    """Returns for each card and script at which batch, how fast, where the time of a step goes, and
    if asked for how long args.tokens take and what they cost."""
    prices = (args.price or [None]) * len(fits)
    rows = [figures_of(fit, args.tokens, price)
            for on_card, price in zip(fits.values(), prices, strict=False) for fit in on_card]
    return Table([
        text_col("card", "fit.name"), text_col("script", "fit.run.label"),
        num_col("batch", "batch"), num_col("tok/sec, thousands", "speed"),
        num_col("of all its GPUs", "of_all"), num_col("MFU", "mfu", ".0%"),
        num_col(f"minutes of {EPOCHS} epochs", "minutes"),
        num_col(f"hours of {args.tokens or 0:,.0f} tokens", "hours"), num_col("cost", "cost"),
        *(num_col(kind, f"shares.{kind}", ".0%") for kind in KINDS)], rows,
        f"Speed, time for {EPOCHS} epochs of the book, {BOOK_TOKENS:,} tokens (–: one batch has"
        " more), share of step time:")


def figures_of(fit: Fit, tokens: float | None, price: float | None) -> dict:
    prediction, batch, gpus = fit.prediction, fit.batch, fit.run.processes
    if not batch:
        return dict(fit=fit, batch=fit.asked or "none", speed="doesn't fit")
    row = dict(fit=fit, batch=batch, speed=fit.speed())
    if times := prediction.seconds(batch, fit.card):
        # A batch of more tokens than the book has can't be trained on it.
        fits_book = batch * prediction.context_length * gpus <= BOOK_TOKENS
        row |= dict(
            of_all=fit.speed(gpus) if gpus > 1 else None, mfu=prediction.mfu(batch, fit.card),
            minutes=f"{prediction.minutes(batch, fit.card, gpus):,.1f}" if fits_book else "–",
            shares={kind: spent / sum(times.values()) for kind, spent in times.items()})
        if tokens:
            low, high = prediction.speeds(batch, fit.card, gpus)
            hours = tokens / high / 3600, tokens / low / 3600
            row |= dict(hours=span(*hours),
                        cost=span(*(hour * gpus * price for hour in hours)) if price else None)
    return row


def notes(runs: list[Run], has_others: bool, edited: set[str]) -> list[str]:
    """Returns what to know of the tables, a line each: whether old GPUs train others than `runs`,
    and whose code was edited since it was predicted."""
    lines = [f"All numbers are predictions; {OTHERS / 1024:.1f} GB are left for driver and display."
             " How accurate they are: docs/predictions.md. Without expandable segments, as on"
             " Windows, 01 reserved 15 % more than predicted on an H100: where less than that is"
             " left, take half the batch."]
    if any(run.processes > 1 for run in runs):
        lines.append("A step on several GPUs takes at least as long as on one: communication takes"
                     f" no time here. Weights and states that ranks share are traced as on {GPUS}.")
    if has_others:
        lines.append(f"Before compute capability 8.0 a GPU trains 01 and 02 with {FLOAT16}, before"
                     " 7.0 in float32, not compiled.")
    if edited:
        lines.append(f"The code of {', '.join(sorted(edited))} has changed since it was predicted."
                     " --retrace traces it.")
    return lines
