"""What docs/explorer.html looks up, between its markers: for each GPU, model, script and batch size
that is kept, whether it fits, what it reserves, and how fast it trains. The page only divides by
these figures; how they come about stands in bench.predict alone."""

import json

from bench.cards import Card
from bench.catalogue import FLOAT16, STAGES, Run
from bench.predict.store import BATCHES, OTHERS, Prediction
from bench.report import gpus, prediction_tables
from bench.report.notes import today
from bench.report.prediction_tables import kept_of
from bench.report.tables import technique_names
from patches import stack

MODELS = "gpt2", *prediction_tables.LARGER
GPUS = 4  # of 02, as it was published
# What to ask where nothing fits.
LESS = "python measure.py predict --variants memory-checkpoint,optimizer-adamw-8bit"


def choices() -> dict[str, Run]:
    """What one can choose: the ladder, which ends with 02, and the variants of 01; then what stands
    in for 02 on a GPU without bfloat16 units. Raises UserError, StackError."""
    scripts = today()
    *rungs, last, ddp = scripts.ladder(GPUS)
    runs = {scripts.canonical(run.script): run for run in rungs}
    runs |= {"00": runs["00"].replace(label="00, the baseline"),
             "01": last.replace(label=f"01, all {last.number} techniques"),
             "02": ddp.replace(label=f"02, on {GPUS} GPUs")}
    runs |= {run.label: run for run in prediction_tables.alternatives()}
    run = scripts.float16(scripts.stage("02", GPUS))
    return runs | {str(run.script): run.replace(published=None)}


def how(name: str, run: Run) -> tuple[str, list[str], str]:
    """What one chooses it as ("": it only stands in for another), what to type to train with it,
    for --batch-size to follow, and what predicts it, for --gpu and --batch-size to follow."""
    script, predict = str(run.script), "python measure.py predict"
    start = f"torchrun --nproc_per_node={run.processes}" if run.processes > 1 else "python"
    if name in STAGES:
        return "The scripts", [f"{start} {STAGES[name]}"], predict
    if run.number is not None:
        path = (stack.WRITTEN / stack.file_of(script)).as_posix()
        commands = [f"python patches/stack.py write {script}", f"{start} {path} --data data"]
        return "The ladder", commands, f"{predict} --techniques {run.number}"
    names = script.removeprefix("02+")
    base = "" if names == script else " --base 02"
    commands = [f"python patches/stack.py compose {names}{base} --out my.py",
                " ".join([start, "my.py", *run.options])]
    if run.processes > 1:  # predict shows it in place of 02
        return "", commands, predict
    return "Options of 01", commands, f'{predict} --variants "{run.label}"'


def script(name: str, run: Run, predictions: dict[str, Prediction]) -> dict:
    """What the page has of a script."""
    (kind, commands, predict), technique = how(name, run), technique_names().get(name)
    needs = {model: {batch: [gb(need.reserved), gb(need.minimum)]
                     for batch, need in prediction.needs.items() if batch in BATCHES}
             for model, prediction in predictions.items()}
    return dict(
        label=f"{run.number} {technique}" if technique else run.label,
        number=run.number, gpus=run.processes, kind=kind,
        default=32 if run.number is None or run.number >= 10 else 8,
        commands=commands, predict=predict, published=run.published, needs=needs)


def gb(mib: int) -> float:
    """As tables of predictions round it."""
    return float(f"{mib / 1024:.2f}")


def speeds(run: Run, prediction: Prediction, card: Card) -> dict[int, list]:
    """By each batch size that fits: tok/sec of all its GPUs, their range in thousands as `predict`
    prints it, and the MFU in percent; the first and the last are 0 where the GPU lacks what the
    script needs, and the range says what."""
    return {batch: [round(run.processes * (prediction.tok_per_sec(batch, card) or 0)),
                    prediction.speed_range(batch, card, run.processes),
                    round(100 * (prediction.mfu(batch, card) or 0))]
            for batch, need in prediction.needs.items()
            if batch in BATCHES and need.minimum <= card.mib - OTHERS}


def gpu(name: str, card: Card) -> dict:
    """What the page has of a GPU but the speeds."""
    notes = {
        "We know of no measured matmul throughput of this GPU: it is scaled from the datasheet, so"
        " the range is wider.": not card.is_measured,
        "Some of its specifications haven't been checked against a datasheet yet.":
            not card.is_checked,
        "It has no units for bfloat16. 01 and 02 are composed with precision-fp16, and we know"
        " of no measured training speed to check them against.": not card.bfloat16}
    facts = dict(gb=gb(card.mib), room=gb(card.mib - OTHERS),
                 notes=[note for note, holds in notes.items() if holds])
    if not card.bfloat16:
        facts |= {"instead": {"01": FLOAT16, "02": f"02+{FLOAT16}"}, "with": f"with {FLOAT16}"}
    if name == prediction_tables.PUBLISHED_ON:
        facts["published"] = True
    return facts


def data_block() -> str:
    """The element of the page that holds it, a line for each GPU. Raises UserError, StackError."""
    runs, others = choices(), prediction_tables.published_others()
    predictions = {name: kept for name, run in runs.items() if (kept := {
        model: prediction for model in MODELS
        if (prediction := kept_of(run.script, ["--model", model, *run.options]))})}
    measured: dict[str, list] = {}  # by others on each GPU: their program, batch, tok/sec
    for row in others["rows"]:
        measured.setdefault(row["card"], []).append([row["source"], row["batch"],
                                                     row["tok_per_sec"]])
    names = {name.split()[0] for name in predictions}
    parts = {
        "models": MODELS, "less": LESS, "context": predictions["00"]["gpt2"].context_length,
        "sources": {name: source["what"] for name, source in others["sources"].items()},
        "measured": measured,
        # The first paragraph of a patch's header: what it does, and when that costs something.
        "about": {patch.name: " ".join(patch.header.decode().split("\n\n")[1].split())
                  for patch in (*stack.load(), *stack.load_variants()) if patch.name in names},
        "scripts": {name: script(name, runs[name], kept) for name, kept in predictions.items()},
    }
    lines = [f"{as_json(name)}:{as_json(value)}," for name, value in parts.items()]
    rows = []
    for name, card in gpus.by_memory():
        if card.capability < 7:  # 01 needs it
            continue
        of_scripts = {script: {model: row for model, prediction in kept.items()
                               if (row := speeds(runs[script], prediction, card))}
                      for script, kept in predictions.items()}
        rows.append(f"{as_json(name)}:{as_json(gpu(name, card) | dict(speeds=of_scripts))}")
    return "\n".join(['<script type="application/json" id="data">', "{", *lines, '"gpus":{',
                      ",\n".join(rows), "}}", "</script>"])


def as_json(value) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
