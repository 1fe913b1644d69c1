"""What docs/explorer.html looks up, between its markers: for each GPU, model, script and batch size
whose prediction is stored, whether it fits, what it reserves, and how fast it trains."""

import json

from bench.catalogue import FLOAT16, STAGES, Run
from bench.predict import reference
from bench.predict.store import BATCHES, OTHERS, Prediction
from bench.report.technique_pages import prose_of
from gpt_speed.cards import CARDS, Card
from patches import stack

MODELS = "gpt2", *reference.LARGER


def choices() -> dict[str, Run]:
    """Returns what one can choose: the ladder, which ends with 02, and the variants of 01; then
    what stands in for 02 on a GPU without bfloat16 units. Raises UserError, StackError."""
    scripts = reference.scripts()
    runs = {
        scripts.canonical(run.script): run.replace(label=f"{run.number} {run.technique}")
        for run in scripts.ladder(reference.GPUS)
    }
    labels = {
        "00": "00, the baseline",
        "01": f"01, all {runs['01'].number} techniques",
        "02": f"02, on {reference.GPUS} GPUs",
    }
    runs |= {name: runs[name].replace(label=label) for name, label in labels.items()}
    runs |= {run.label: run for run in reference.variants() if run.script not in STAGES}
    run = scripts.float16(scripts.stage("02", reference.GPUS))
    return runs | {str(run.script): run.replace(published=None)}


def script_data(name: str, run: Run, predictions: dict[str, Prediction]) -> dict:
    """Returns what the page has of a script: among else the kind under which one chooses it ("": it
    only stands in for another), what to type to train with it, for --batch-size to follow, and what
    predicts it, for --gpu and --batch-size to follow."""
    script, compose = str(run.script), "python patches/stack.py compose"
    kind, before, train, ask = "", [f"{compose} {FLOAT16} --base 02 --out my.py"], "my.py", ""
    if name in STAGES:
        kind, before, train = "The scripts", [], STAGES[name]
    elif run.number is not None:
        kind, before = "The ladder", [f"python patches/stack.py write {script}"]
        train = f"{(stack.WRITTEN / stack.file_of(script)).as_posix()} --data data"
        ask = f" --techniques {run.number}"
    elif run.processes == 1:
        kind, before = "Variants of 01", [f"{compose} {script} --out my.py"]
        train, ask = " ".join(["my.py", *run.options]), f' --variants "{run.label}"'
    start = f"torchrun --nproc_per_node={run.processes}" if run.processes > 1 else "python"
    return dict(
        label=run.label,
        number=run.number,
        gpus=run.processes,
        kind=kind,
        commands=[*before, f"{start} {train}"],
        predict=f"python measure.py predict{ask}",
        published=run.published,
        needs={
            model: {
                batch: [gb(need.reserved), gb(need.minimum)]
                for batch, need in prediction.needs.items()
                if batch in BATCHES
            }
            for model, prediction in predictions.items()
        },
    )


def gb(mib: int) -> float:
    return round(mib / 1024, 2)


def gpu_data(
    card: Card, runs: dict[str, Run], predictions: dict[str, dict[str, Prediction]]
) -> dict:
    """Returns what the page has of a GPU, with the speeds of each script and model that fit it."""
    speeds: dict[str, dict] = {name: {} for name in predictions}
    for name, by_model in predictions.items():
        for model, prediction in by_model.items():
            if row := speeds_on(card, runs[name], prediction):
                speeds[name][model] = row
    return dict(
        gb=gb(card.mib),
        room=gb(card.mib - OTHERS),
        measured=card.is_measured,
        checked=card.is_checked,
        bfloat16=card.bfloat16,
        nvidia=not card.is_amd,
        instead={} if card.bfloat16 else {"01": FLOAT16, "02": f"02+{FLOAT16}"},
        speeds=speeds,
    )


def speeds_on(card: Card, run: Run, prediction: Prediction) -> dict[int, list]:
    """Returns by each batch size that fits: tok/sec of all its GPUs, their range in thousands as
    `predict` prints it, and the MFU in percent; the first and the last are 0 where the GPU lacks
    what the script needs, and the range says what, or where it is outside the model."""
    rows = {}
    for batch, need in prediction.needs.items():
        if batch in BATCHES and need.minimum <= card.mib - OTHERS:
            has_range = prediction.speeds(batch, card)
            speed = has_range and prediction.tok_per_sec(batch, card) or 0
            mfu = has_range and prediction.mfu(batch, card) or 0
            text = prediction.speed_range(batch, card, run.processes)
            rows[batch] = [round(run.processes * speed), text, round(100 * mfu)]
    return rows


def data_block() -> str:
    """Returns the element of the page that holds the data. Raises UserError, StackError."""
    runs, predictions = choices(), {}
    for name, run in runs.items():
        for model in MODELS:
            if prediction := reference.kept_of(run.script, ["--model", model, *run.options]):
                predictions.setdefault(name, {})[model] = prediction
    names = {name.split()[0] for name in predictions}
    data = {
        "models": MODELS,
        "context": predictions["00"]["gpt2"].context_length,
        "others": reference.published_others(),  # measured, with their programs
        "about": {
            patch.name: prose_of(patch)
            for patch in (*stack.load(), *stack.load_variants())
            if patch.name in names
        },
        "scripts": {
            name: script_data(name, runs[name], by_model) for name, by_model in predictions.items()
        },
        "gpus": {
            name: gpu_data(card, runs, predictions)
            for name, card in sorted(CARDS.items(), key=lambda item: item[1][:2])  # by memory
            if card.capability >= 7
        },  # 01 needs it
    }
    return f'<script type="application/json" id="data">\n{as_json(data, 2)}\n</script>'


def as_json(value, levels: int = 0) -> str:
    """Returns JSON for a page, with a line for each entry of the outer levels."""
    if levels and isinstance(value, dict):
        return (
            "{\n"
            + ",\n".join(
                f"{as_json(name)}:{as_json(part, levels - 1)}" for name, part in value.items()
            )
            + "\n}"
        )
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
