"""Will it fit, and how fast is it? What a script would reserve on GPUs that aren't there,
the batch that fits, the tokens per second, and what a number of tokens costs."""

import re
from pathlib import Path

from bench.catalogue import Run
from bench.commands import Command
from bench.common import has_option
from bench.predict.store import OTHERS, Prediction, code_of, fitting, predict, predict_all, span
from bench.report import prediction_tables
from bench.subcommands import above_0, number_from, positive
from gpt_speed.cards import CARDS, Card, named
from gpt_speed.common import UserError
from gpt_speed.speed import KINDS, LEAST_BATCH, UNCHECKED
from gpt_speed.tables import Table, markdown, num_col, text_col
from patches import stack

FEW = 4  # cards: of each the answer has a sentence, of more a table alone
SUFFIXES = dict(k=1e3, m=1e6, b=1e9, t=1e12)
NOTE = (
    f"All numbers are predictions; {OTHERS / 1024:.1f} GB are left for driver and display."
    " How accurate they are: docs/predictions.md. Without expandable segments, as on Windows,"
    " 01 reserved 15 % more than predicted on an H100: where less than that is left, take half"
    " the batch."
)
OUTSIDE = (
    f"{UNCHECKED}: the model doesn't hold for batches below {LEAST_BATCH}, where the GPU"
    " waits for the CPU, and is untested on AMD GPUs (docs/predictions.md)."
)
ON_SEVERAL = (
    "A step on several GPUs takes at least as long as on one: communication takes no time"
    " here. Weights and states that ranks share are traced as on"
    f" {prediction_tables.GPUS}."
)


def count(text: str) -> float:
    """Returns the number in 10e9, 10B, 300m, 1T or 10,000,000. Raises ValueError."""
    number = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)  # before three digits, and no more
    suffix = number[-1:].lower()
    return float(number[:-1]) * SUFFIXES[suffix] if suffix in SUFFIXES else float(number)


tokens = number_from(1, count, below=1e18)


def prices(text: str) -> list[float]:
    """Returns the numbers in "2.7,1.7". Raises ValueError, ArgumentTypeError."""
    return [above_0(price) for price in text.split(",")]


class Predict(Command):
    """Predict memory, the largest batch and tok/sec on any GPU."""

    group = "start here"

    def options(self, parser):
        parser.add_argument(
            "--gpu",
            default="all",
            help="names or parts of them, such as 4090 or H100,H200; 8xH100: also"
            " 02 on eight; list prints all (default: all)",
        )
        parser.add_argument(
            "--memory", metavar="GB", type=above_0, help="a GPU with this much memory instead"
        )
        parser.add_argument(
            "--bandwidth", metavar="GB/S", type=above_0, help="its memory bandwidth"
        )
        parser.add_argument(
            "--tflops",
            metavar="N",
            type=above_0,
            help="its dense bfloat16 matmul throughput by the datasheet, TFLOP/s",
        )
        parser.add_argument(
            "--model", default="gpt2", help="--model of the scripts (default: %(default)s)"
        )
        parser.add_argument(
            "--batch-size",
            metavar="N",
            type=positive,
            help="of each GPU (default: the largest that fits)",
        )
        parser.add_argument(
            "--techniques",
            metavar="0,5-8",
            help="the scripts after these techniques, instead of 00 and 01",
        )
        parser.add_argument(
            "--variants",
            metavar="A,B+C",
            help="variants of 01 or 02 besides, maybe with other options:"
            ' "step-accumulation --micro-batches 8"; + joins several',
        )
        parser.add_argument(
            "--tokens",
            metavar="N",
            type=tokens,
            help="how long it takes to train on so many: 10e9, 10B, 300M, 1T",
        )
        parser.add_argument(
            "--price",
            metavar="PER_HOUR",
            type=prices,
            help="of one GPU, in any currency: what it costs; of several GPUs one each: 2.7,1.7",
        )
        parser.add_argument("--retrace", action="store_true", help="ignore stored predictions")
        parser.add_argument(
            "--all",
            action="store_true",
            help="trace into --results-dir what the pages show where it is missing"
            " or its script has changed, with --retrace all (two hours)",
        )

    def answer(self, setup):
        args, options = setup.args, ["--model", setup.args.model, *setup.options]
        if any(has_option(name, setup.options) for name in ("--batch-size", "--model")):
            raise UserError("--batch-size and --model go before --", 2)
        if args.gpu.strip().lower() == "list":
            return "\n".join(
                f"{name}, {card.mib / 1024:.0f} GB: {', '.join(card.names)}"
                for name, card in CARDS.items()
            )
        cards, gpus = asked_for(args)
        smallest = min(card.mib for card in cards.values()) - OTHERS
        if args.all:
            return predict_all(
                setup.scripts, prediction_tables.wanted(), setup.results, smallest, args.retrace
            )
        runs = chosen(setup, gpus)
        rows, predictions = [], {}
        for number, (name, card) in enumerate(cards.items()):
            price = args.price and args.price[number % len(args.price)]
            for run in runs:
                if not has_option("--dtype", options):
                    run = prediction_tables.in_place(setup.scripts, run, card)
                if run.name not in predictions:
                    predictions[run.name] = (
                        run,
                        predict(
                            setup.scripts,
                            run.script,
                            [*options, *run.options],
                            setup.results,
                            smallest,
                            args.batch_size,
                            args.retrace,
                        ),
                    )
                rows.append(row_of(name, card, *predictions[run.name], args, price))
        edited = {
            str(run.script)
            for run, prediction in predictions.values()
            if prediction.code != code_of(setup.scripts.text(run.script))
        }
        changes = (
            [
                f"The code of {', '.join(sorted(edited))} has changed since it was"
                " predicted. --retrace traces it."
            ]
            if edited
            else []
        )
        of_the_last = [row["answer"] for row in rows[len(runs) - 1 :: len(runs)]]
        answers = [*of_the_last, ""] if len(cards) <= FEW else []
        notes = [
            NOTE,
            *([ON_SEVERAL] if any(run.processes > 1 for run in runs) else []),
            *([OUTSIDE] if any(row.get("speed") == UNCHECKED for row in rows) else []),
        ]
        return "\n".join([*answers, markdown(table_of(rows, len(cards), args)), *notes, *changes])


def asked_for(args) -> tuple[dict[str, Card], int]:
    """Returns (the cards by their names, how many of one 02 has, 0 where it isn't asked
    for). Raises UserError."""
    if (args.bandwidth is None) != (args.tflops is None) or args.bandwidth and not args.memory:
        raise UserError("--bandwidth and --tflops tell a speed together, with --memory", 2)
    count, names = re.fullmatch(
        r"(?:([1-9]\d*) *[xX×])?\s*(.*)", args.gpu.strip(), re.DOTALL
    ).groups()
    if args.memory:
        if names not in ("", "all"):
            raise UserError(
                "--memory describes a GPU of its own: leave --gpu out, or give the"
                " number of GPUs, --gpu 4x",
                2,
            )
        if args.tokens and not args.tflops:
            raise UserError("--tokens needs a speed: beside --memory, --bandwidth and --tflops", 2)
        rate = args.tflops or 0
        cards = {
            f"{args.memory:g} GB": Card(
                mib=int(1024 * args.memory),
                capability=8.0,
                bandwidth=args.bandwidth or 0,
                tf32=rate / 2,
                bfloat16=rate,
                float16=rate,
                reached=0.8 * rate,
                is_measured=False,
            )
        }
    elif names.lower() == "all":  # 01 and 02 are for 7.0 and later
        cards = {name: card for name, card in CARDS.items() if card.capability >= 7}
    else:
        cards = {name: CARDS[name] for name in named(names)}
    if args.price and (not args.tokens or len(args.price) not in (1, len(cards))):
        raise UserError(
            f"--price needs --tokens, and one price, or one for each of {len(cards)}"
            f" GPUs: {', '.join(cards)}",
            2,
        )
    return cards, int(count or 0)


def chosen(setup, gpus: int) -> list[Run]:
    """Returns the scripts that are asked for, those of several GPUs on this many. Raises
    UserError, StackError."""
    scripts, args, names = setup.scripts, setup.args, ["00", "01", "02"] if gpus else ["00", "01"]
    gpus = gpus or prediction_tables.GPUS
    runs = [scripts.stage(name, gpus) for name in names]
    if args.techniques:
        runs = scripts.select(args.techniques, scripts.ladder(gpus))
    of_02 = {patch.name for patch in stack.load_variants() if patch.base == Path(stack.DDP).stem}
    for text in filter(str.strip, (args.variants or "").split(",")):
        first = re.split(r"[+\s]", text.strip())[0]
        base = scripts.stage("02" if first in of_02 else "01", gpus)
        runs += scripts.variants(base, dict(gpus=gpus), names=text)[1:]
    return list({run.name: run for run in runs}.values())


def row_of(
    name: str, card: Card, run: Run, prediction: Prediction, args, price: float | None
) -> dict:
    """Returns a script's row on a GPU, with the same in a sentence: does it fit, at which
    batch, how fast. A GPU costs `price` per hour."""
    batch, gpus = fitting(prediction.needs, card.mib, args.batch_size), run.processes
    size = batch or args.batch_size or min(prediction.needs)
    need, limit = prediction.needs[size], card.mib - OTHERS
    row = dict(name=name, gb=card.mib / 1024, label=run.label, batch=batch or "none")
    # The memory of technique 14 may be higher than predicted.
    has_14 = run.script != "00" and (run.number is None or run.number >= 14)
    fits = "fits" if batch else "does not fit"
    if batch and has_14 and prediction_tables.RESERVE * need.minimum > limit:
        fits = "only just fits"
    answer = (
        f"{name}, {args.model}, {run.label}: {fits} at batch {size}"
        f" (needs {need.minimum / 1024:.2f} of {limit / 1024:.2f} GB)"
    )
    if batch:
        row["reserved_gb"] = min(need.reserved, limit) / 1024
    if batch and card.bandwidth:
        row["speed"] = prediction.speed_range(batch, card)
        answer += f", {prediction.speed_range(batch, card, gpus)}"
        if speeds := prediction.speeds(batch, card, gpus):
            answer += " thousand tok/sec"
            times = prediction.seconds(batch, card)
            row["shares"] = {kind: spent / sum(times.values()) for kind, spent in times.items()}
            row["mfu"] = prediction.mfu(batch, card)
            if gpus > 1:
                row["of_all"] = prediction.speed_range(batch, card, gpus)
            if args.tokens:
                hours = [args.tokens / speed / 3600 for speed in reversed(speeds)]
                row["hours"] = span(*hours)
                row["cost"] = price and span(*(hour * gpus * price for hour in hours))
    return row | dict(answer=f"{answer}.")


def table_of(rows: list[dict], cards: int, args) -> Table:
    """Returns at which batch and how fast each script is on each card; of a single card where the
    time of a step goes; and if asked for how long args.tokens take, and what they cost."""
    size = f"batch {args.batch_size}" if args.batch_size else "the largest batch, a power of two"
    return Table(
        [
            text_col("card", "name"),
            num_col("GB", "gb", ".0f"),
            text_col("script", "label"),
            num_col("batch", "batch"),
            num_col("GB reserved", "reserved_gb", ".2f"),
            num_col("tok/sec, thousands", "speed"),
            num_col("of all its GPUs", "of_all"),
            num_col("MFU", "mfu", ".0%"),
            num_col("hours", "hours"),
            num_col("cost", "cost"),
            *(num_col(kind, f"shares.{kind}", ".0%") for kind in KINDS if cards == 1),
        ],
        rows,
        f"{args.model} at {size}:",
    )
