"""What docs/explorer.html looks up, between its markers: for each GPU, model, script and batch size
that is kept, whether it fits, what it reserves, and how fast it trains. The page only divides by
these figures; how they come about stands in bench.predict alone."""

import json

from bench.catalogue import FLOAT16, STAGES, Run
from bench.predict.speed import CARDS, Card
from bench.predict.store import BATCHES, OTHERS, Prediction
from bench.report import check
from bench.report.notes import today
from bench.report.tables import technique_names
from patches import stack

MODELS = "gpt2", *check.LARGER
GPUS = 4  # of 02, as it was published
# What to ask where nothing fits.
LESS = "python measure.py predict --variants memory-checkpoint,optimizer-adamw-8bit"
Known = dict[str, dict[str, Prediction]]  # by the name of a script, then of a model


def choices() -> dict[str, Run]:
    """What one can choose: the ladder, which ends with 02, and the variants of 01; then what stands
    in for 02 on a GPU without bfloat16 units. Raises UserError, StackError."""
    scripts = today()
    *rungs, last, ddp = scripts.rungs(GPUS)
    found = {scripts.canonical(run.script): run for run in rungs}
    found |= {"00": found["00"].but(label="00, the baseline"),
              "01": last.but(label=f"01, all {last.rung} techniques"),
              "02": ddp.but(label=f"02, on {GPUS} GPUs")}
    found |= {run.label: run for run in check.alternatives()}
    run = scripts.float16(scripts.stage("02", GPUS))
    return found | {str(run.script): run.but(published=None)}


def predictions(runs: dict[str, Run]) -> Known:
    """Those that are kept of each. Raises StackError."""
    found: Known = {}
    for name, run in runs.items():
        for model in MODELS:
            if known := check.kept_of(run.script, ["--model", model, *run.options]):
                found.setdefault(name, {})[model] = known
    return found


def how(name: str, run: Run) -> tuple[str, list[str], str]:
    """What one chooses it as ("": it only stands in for another), what to type to train with it,
    for --batch-size to follow, and what predicts it, for --gpu and --batch-size to follow."""
    script, predict = str(run.script), "python measure.py predict"
    start = f"torchrun --nproc_per_node={run.processes}" if run.processes > 1 else "python"
    if name in STAGES:
        return "The scripts", [f"{start} {STAGES[name]}"], predict
    if run.rung is not None:
        path = (stack.WRITTEN / stack.file_of(script)).as_posix()
        return ("The ladder", [f"python patches/stack.py write {script}",
                               f"{start} {path} --data data"], f"{predict} --rungs {run.rung}")
    names = script.removeprefix("02+")
    base = " --base 02" * (names != script)
    commands = [f"python patches/stack.py compose {names}{base} --out my.py",
                " ".join([start, "my.py", *run.options])]
    if run.processes > 1:  # of it predict tells by itself
        return "", commands, predict
    return "Options of 01", commands, f'{predict} --variants "{run.label}"'


def script(name: str, run: Run, known: dict[str, Prediction]) -> dict:
    """What the page has of a script."""
    (kind, commands, predict), technique = how(name, run), technique_names().get(name)
    needs = {model: {batch: [gb(need.reserved), gb(need.least)]
                     for batch, need in each.needs.items() if batch in BATCHES}
             for model, each in known.items()}
    return dict(
        label=f"{run.rung} {technique}" if technique else run.label,
        rung=run.rung, gpus=run.processes, kind=kind,
        default=32 if run.rung is None or run.rung >= 10 else 8,
        commands=commands, predict=predict, published=run.published, needs=needs)


def about() -> dict[str, str]:
    """By the name of each technique and variant, the first paragraph of its patch's header: what it
    does, and when that costs something. Raises StackError."""
    return {patch.name: " ".join(patch.header.decode().split("\n\n")[1].split())
            for patch in (*stack.load(), *stack.load_variants())}


def gb(mib: int) -> float:
    """As tables of predictions round it."""
    return float(f"{mib / 1024:.2f}")


def speeds(run: Run, known: Prediction, card: Card) -> dict[int, list]:
    """By each batch size that fits: tok/sec of all its GPUs, their range in thousands as `predict`
    prints it, and the MFU in percent; the first and the last are 0 where the GPU lacks what the
    script needs, and the range says what."""
    found = {}
    for batch, need in known.needs.items():
        if batch in BATCHES and need.least <= card.mib - OTHERS:
            expected = known.tok_per_sec(batch, card) or 0
            found[batch] = [round(run.processes * expected),
                            known.speed_range(batch, card, run.processes),
                            round(100 * (known.mfu(batch, card) or 0))]
    return found


def gpu(name: str, card: Card, runs: dict[str, Run], found: Known) -> dict:
    """What the page has of a GPU."""
    notes = {
        "We know of no measured matmul throughput of this GPU: it is scaled from the datasheet, so"
        " the range is wider.": not card.is_measured,
        "Some of its specifications haven't been checked against a datasheet yet.":
            not card.is_checked,
        "It has no units for bfloat16. 01 and 02 are composed with precision-fp16, and we know"
        " of no measured training speed to check them against.": not card.bfloat16}
    told = dict(gb=gb(card.mib), room=gb(card.mib - OTHERS),
                notes=[note for note, holds in notes.items() if holds])
    if not card.bfloat16:
        told |= {"instead": {"01": FLOAT16, "02": f"02+{FLOAT16}"}, "with": f"with {FLOAT16}"}
    if name == check.PUBLISHED_ON:
        told["published"] = True
    return told | dict(speeds={
        script: {model: row for model, known in of_models.items()
                 if (row := speeds(runs[script], known, card))}
        for script, of_models in found.items()})


def measured() -> dict[str, list]:
    """Returns what others have measured on each GPU, a row each: their program, batch, tok/sec."""
    rows: dict[str, list] = {}
    for row in check.published_others()["rows"]:
        rows.setdefault(row["card"], []).append([row["source"], row["batch"], row["tok_per_sec"]])
    return rows


def data_block() -> str:
    """The element of the page that holds it, a line for each GPU. Raises UserError, StackError."""
    runs = choices()
    found = predictions(runs)
    parts = {
        "models": MODELS, "less": LESS, "context": found["00"]["gpt2"].context_length,
        "sources": {name: source["what"] for name, source
                    in check.published_others()["sources"].items()},
        "measured": measured(),
        "about": {name: text for name, text in about().items()
                  if any(name == script.split()[0] for script in found)},
        "scripts": {name: script(name, runs[name], each) for name, each in found.items()},
    }
    cards = sorted((name for name, card in CARDS.items() if card.capability >= 7),  # 01 needs it
                   key=lambda name: (CARDS[name].mib, CARDS[name].capability))
    lines = [f"{as_json(name)}:{as_json(value)}," for name, value in parts.items()]
    rows = [f"{as_json(name)}:{as_json(gpu(name, CARDS[name], runs, found))}" for name in cards]
    return "\n".join(['<script type="application/json" id="data">', "{", *lines, '"gpus":{',
                      ",\n".join(rows), "}}", "</script>"])


def as_json(value) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
