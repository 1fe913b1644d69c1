"""Will it fit, and how fast is it? What a script would reserve on GPUs that aren't there,
the batch that fits, the tokens per second, and what a number of tokens costs."""

import re
from argparse import ArgumentParser, Namespace

from bench.catalogue import GPUS, Run
from bench.commands import Command
from bench.machine import Machine
from bench.measure.plan import Setup
from bench.options import has_option
from bench.predict import shipped
from bench.predict.code_hash import code_of
from bench.predict.forecast import Forecast, Offer, span
from bench.predict.prediction import Prediction
from bench.predict.program import program_of
from bench.predict.store import Sizes, predict, predict_all
from bench.subcommands import above_0, number_from, positive
from gpt_speed.cards import CARDS, Card, named
from gpt_speed.common import UserError
from gpt_speed.memory import OTHERS
from gpt_speed.speed import KINDS, LEAST_BATCH, UNCHECKED
from gpt_speed.tables import Table, markdown, num_col, text_col, value_col

OLDEST = 7.0  # compute capability of the cards that 01 and 02 are for
FEW = 4  # cards: of each the answer has a sentence, of more a table alone
SUFFIXES = dict(k=1e3, m=1e6, b=1e9, t=1e12)
NOTE = (
    f"All numbers are predictions; {OTHERS / 1024:.1f} GB are left for driver and display."
    " How accurate they are: docs/predictions.md. Without expandable segments, as on Windows,"
    " 01 reserved 15% more than predicted on an H100: where less than that is left, take half"
    " the batch."
)
OUTSIDE = (
    f"{UNCHECKED}: the model doesn't hold for batches below {LEAST_BATCH}, where the GPU"
    " waits for the CPU, and is untested on AMD GPUs (docs/predictions.md)."
)
ON_SEVERAL = (
    "A step on several GPUs takes at least as long as on one: communication takes no time"
    f" here. Weights and states that ranks share are traced as on {GPUS}."
)


def tokens_typed(text: str) -> float:
    """Returns the number in 10e9, 10B, 300m, 1T or 10,000,000. Raises ValueError."""
    number = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)  # before three digits, and no more
    suffix = number[-1:].lower()
    if suffix in SUFFIXES:
        return float(number[:-1]) * SUFFIXES[suffix]
    return float(number)


tokens = number_from(1, tokens_typed, below=1e18)


def prices(text: str) -> list[float]:
    """Returns the numbers in "2.7,1.7". Raises ValueError, ArgumentTypeError."""
    return [above_0(price) for price in text.split(",")]


class Predict(Command):
    """Predict memory, the largest batch and tok/sec on any GPU."""

    group = "start here"

    def options(self, parser: ArgumentParser) -> None:
        add_gpu_options(parser)
        add_script_options(parser)
        add_length_options(parser)
        add_tracing_options(parser)

    def answer(self, setup: Setup) -> str:
        if any(has_option(name, setup.options) for name in ("--batch-size", "--model")):
            raise UserError("--batch-size and --model go before --", 2)
        if setup.args.gpu.strip().lower() == "list":
            return list_of_cards()
        gpus, names = parse_gpus(setup.args.gpu)
        offers = offers_of(setup.args, names)
        room = min(offer.card.mib for offer in offers) - OTHERS  # for a script, on the smallest
        if setup.args.all:
            return predict_what_pages_show(setup, Sizes(room))
        sizes = Sizes(room, setup.args.batch_size)
        return answer_text(setup, forecasts(setup, offers, runs_asked_for(setup, gpus), sizes))


def predict_what_pages_show(setup: Setup, sizes: Sizes) -> str:
    """Predicts all that the pages show; returns how many programs are predicted. Raises OSError."""
    programs = [program_of(setup.scripts, script, options) for script, options in shipped.wanted()]
    return predict_all(programs, setup.results, sizes, setup.args.retrace)


def list_of_cards() -> str:
    """Returns a line for each card: its memory, and the names that it goes by."""
    return "\n".join(
        f"{name}, {card.mib / 1024:.0f} GB: {', '.join(card.names)}" for name, card in CARDS.items()
    )


def add_gpu_options(parser: ArgumentParser) -> None:
    """Adds on which GPUs: by their names, or one by what it can do."""
    parser.add_argument(
        "--gpu",
        default="all",
        help="names or parts of them, such as 4090 or H100,H200; 8xH100: also"
        " 02 on eight; list prints all (default: all)",
    )
    parser.add_argument(
        "--memory", metavar="GB", type=above_0, help="a GPU with this much memory instead"
    )
    parser.add_argument("--bandwidth", metavar="GB/S", type=above_0, help="its memory bandwidth")
    parser.add_argument(
        "--tflops",
        metavar="N",
        type=above_0,
        help="its dense bfloat16 matmul throughput by the datasheet, TFLOP/s",
    )


def add_script_options(parser: ArgumentParser) -> None:
    """Adds what is trained: which scripts, and at which size."""
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
        default="",
        help="variants of 01 or 02 besides, maybe with other options:"
        ' "step-accumulation --micro-batches 8"; + joins several',
    )


def add_length_options(parser: ArgumentParser) -> None:
    """Adds how long is trained, and what that costs."""
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


def add_tracing_options(parser: ArgumentParser) -> None:
    """Adds what is traced though predictions are stored."""
    parser.add_argument("--retrace", action="store_true", help="ignore stored predictions")
    parser.add_argument(
        "--all",
        action="store_true",
        help="trace into --results-dir what the pages show where it is missing"
        " or its script has changed, with --retrace all (two hours)",
    )


def offers_of(args: Namespace, names: str) -> list[Offer]:
    """Returns the cards that are asked for, by their names or by --memory, each with its price.
    Raises UserError."""
    check_own_card(args, names)
    if args.memory:
        cards = {f"{args.memory:g} GB": own_card(args)}
    elif names.lower() == "all":
        cards = {name: card for name, card in CARDS.items() if card.capability >= OLDEST}
    else:
        cards = {name: CARDS[name] for name in named(names)}
    per_card = prices_of(args, [*cards])
    return [
        Offer(name, card, price)
        for (name, card), price in zip(cards.items(), per_card, strict=True)
    ]


def prices_of(args: Namespace, cards: list[str]) -> list[float | None]:
    """Returns a price for each of the cards: one may be that of all, and there may be none. Raises
    UserError for other numbers of them, or where there are no tokens to buy."""
    if not args.price:
        return [None] * len(cards)
    if not args.tokens or len(args.price) not in (1, len(cards)):
        raise UserError(
            f"--price needs --tokens, and one price, or one for each of {len(cards)}"
            f" GPUs: {', '.join(cards)}",
            2,
        )
    if len(args.price) == 1:
        return args.price * len(cards)
    return args.price


def parse_gpus(text: str) -> tuple[int | None, str]:
    """Returns (8, "H100") for "8xH100", and (None, "H100") for "H100": 02 is asked for on eight, or
    it isn't."""
    match = re.match(r"([1-9]\d*) *[xX×]\s*", text.strip())
    if not match:
        return None, text.strip()
    return int(match[1]), text.strip()[match.end() :]


def check_own_card(args: Namespace, names: str) -> None:
    """Raises UserError where a GPU is half described, or is named as well."""
    speed = args.bandwidth, args.tflops
    if any(speed) and not (args.memory and all(speed)):
        raise UserError("--bandwidth and --tflops tell a speed together, with --memory", 2)
    if not args.memory:
        return
    if names not in ("", "all"):
        raise UserError(
            "--memory describes a GPU of its own: leave --gpu out, or give the"
            " number of GPUs, --gpu 4x",
            2,
        )
    if args.tokens and not any(speed):
        raise UserError("--tokens needs a speed: beside --memory, --bandwidth and --tflops", 2)


def own_card(args: Namespace) -> Card:
    """Returns the GPU that --memory, --bandwidth and --tflops describe."""
    rate = args.tflops or 0
    return Card(
        mib=int(1024 * args.memory),
        capability=8.0,
        bandwidth=args.bandwidth or 0,
        tf32=rate / 2,
        bfloat16=rate,
        float16=rate,
        reached=0.8 * rate,
        is_measured=False,
    )


def runs_asked_for(setup: Setup, gpus: int | None) -> list[Run]:
    """Returns the scripts and variants that are asked for, each once; those of several GPUs on this
    many. Raises UserError, StackError."""
    runs = scripts_asked_for(setup, gpus) + variants_asked_for(setup, gpus or GPUS)
    return list({run.name: run for run in runs}.values())


def scripts_asked_for(setup: Setup, gpus: int | None) -> list[Run]:
    """Returns the scripts after some techniques; without any 00 and 01, and 02 where its GPUs are
    asked for. Raises UserError, StackError."""
    scripts, techniques = setup.scripts, setup.args.techniques
    if techniques:
        return scripts.select(techniques, scripts.ladder(gpus or GPUS))
    runs = [scripts.stage("00"), scripts.stage("01")]
    if gpus:
        runs.append(scripts.stage("02", gpus))
    return runs


def variants_asked_for(setup: Setup, gpus: int) -> list[Run]:
    """Returns the runs of --variants, those of 02 on so many GPUs. Raises UserError, StackError."""
    scripts, runs = setup.scripts, []
    for variant in (setup.args.variants or "").split(","):
        if variant.strip():
            base = scripts.base_of(variant, gpus)
            runs += scripts.variants(base, Machine(gpus=gpus), [variant])
    return runs


def forecasts(setup: Setup, offers: list[Offer], runs: list[Run], sizes: Sizes) -> list[Forecast]:
    """Returns what every script does on each card, one card after the other. Raises UserError,
    StackError."""
    args, rows = setup.args, []
    predictions: dict[str, Prediction] = {}  # one for all cards
    for offer in offers:
        for run in runs_on(offer.card, runs, setup):
            if run.name not in predictions:
                predictions[run.name] = predict_run(run, setup, sizes)
            prediction = predictions[run.name]
            rows.append(Forecast(offer, run, prediction, args.batch_size, args.tokens))
    return rows


def runs_on(card: Card, runs: list[Run], setup: Setup) -> list[Run]:
    """Returns what a card trains in place of the scripts, unless the options choose the type."""
    if has_option("--dtype", setup.options):
        return runs
    return [shipped.in_place(run, card) for run in runs]


def predict_run(run: Run, setup: Setup, sizes: Sizes) -> Prediction:
    """Returns what a script takes with the options of the command line. Raises UserError,
    StackError."""
    options = ["--model", setup.args.model, *setup.options, *run.options]
    program = program_of(setup.scripts, run.script, options)
    return predict(program, setup.results, sizes, setup.args.retrace)


def answer_text(setup: Setup, rows: list[Forecast]) -> str:
    """Returns the answer in words of the last script on each of a few cards, the table, and what
    has to be known of it. Raises StackError."""
    last_of = {row.offer.name: row for row in rows}
    lines = []
    if len(last_of) <= FEW:
        lines = [*(row.sentence(setup.args.model) for row in last_of.values()), ""]
    table = forecast_table(rows, len(last_of), setup.args)
    return "\n".join([*lines, markdown(table), *notes_of(setup, rows)])


def forecast_table(rows: list[Forecast], cards: int, args: Namespace) -> Table:
    """Returns the batch size and speed of each script on each card. Of a single card it has where a
    step's time goes; with args.tokens how long these take, and what they cost."""
    columns = [
        text_col("card", "offer.name"),
        num_col("GB", "card_gb", ".0f"),
        text_col("script", "run.label"),
        value_col("batch", "batch", batch_text),
        num_col("GB reserved", "reserved_gb", ".2f"),
        num_col("tok/sec, thousands", "speed_of_one"),
        num_col("of all its GPUs", "speed_of_all"),
        num_col("MFU", "speed.mfu", ".0%"),
        value_col("hours", "hours", span),
        value_col("cost", "cost", span),
    ]
    if cards == 1:
        columns += [num_col(kind, f"speed.shares.{kind}", ".0%") for kind in KINDS]
    size = "the largest batch, a power of two"
    if args.batch_size:
        size = f"batch {args.batch_size}"
    return Table(columns, rows, f"{args.model} at {size}:")


def batch_text(batch: int) -> str:
    return str(batch or "none")


def notes_of(setup: Setup, rows: list[Forecast]) -> list[str]:
    """Returns what has to be known of the figures. Raises StackError."""
    notes = [NOTE]
    if any(row.run.processes > 1 for row in rows):
        notes.append(ON_SEVERAL)
    if any(row.speed_of_one == UNCHECKED for row in rows):
        notes.append(OUTSIDE)
    changed = changed_scripts(setup, rows)
    if changed:
        notes.append(
            f"The code of {', '.join(changed)} has changed since it was"
            " predicted. --retrace traces it."
        )
    return notes


def changed_scripts(setup: Setup, rows: list[Forecast]) -> list[str]:
    """Returns the scripts that had other code when they were traced. Raises StackError."""
    codes = {(row.run.script, row.prediction.code) for row in rows}
    return sorted(
        {str(script) for script, code in codes if code != code_of(setup.scripts.text(script))}
    )
