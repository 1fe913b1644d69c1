"""What docs/explorer.html looks up, between its markers: for each GPU, model, script and batch size
whose prediction is stored, whether it fits, what it reserves, and how fast it trains."""

import json
from collections.abc import Iterable
from typing import NamedTuple

from bench.catalogue import FLOAT16, GPUS, STAGES, Run
from bench.predict import shipped
from bench.predict.forecast import speed_text
from bench.predict.prediction import BATCHES, Prediction
from gpt_speed.cards import CARDS, Card
from gpt_speed.memory import OTHERS
from patches import stack

MODELS = "gpt2", *shipped.LARGER
COMPOSED = "my.py"  # the file of a composed script


def choices() -> dict[str, Run]:
    """Returns the scripts of the page by their names: the ladder, which ends with 02, the variants
    of 01, and what stands in for 02 on a GPU without bfloat16 units. Raises UserError,
    StackError."""
    scripts = shipped.scripts()
    runs = {
        scripts.canonical(run.script): run.replace(label=f"{run.number} {run.technique}")
        for run in scripts.ladder(GPUS)
    }
    labels = {
        "00": "00, the baseline",
        "01": f"01, all {runs['01'].number} techniques",
        "02": f"02, on {GPUS} GPUs",
    }
    runs |= {name: runs[name].replace(label=label) for name, label in labels.items()}
    runs |= {run.label: run for run in shipped.variants() if run.script not in STAGES}
    run = scripts.float16(scripts.stage("02", GPUS))
    return runs | {str(run.script): run.replace(published=None)}


class Use(NamedTuple):
    """How one comes to a script on the page, and what one types there."""

    kind: str  # under which it is chosen; "": it isn't, but stands in for another
    make: list[str]  # commands that make its file
    train: str  # the file and its options; --batch-size follows
    predict: str = ""  # options of `measure.py predict`; --gpu and --batch-size follow


def use_of(name: str, run: Run) -> Use:
    """Returns how one comes to a script of choices()."""
    if name in STAGES:
        return Use("The scripts", make=[], train=STAGES[name])
    if run.number is not None:
        return use_in_ladder(run)
    if run.processes == 1:
        return use_of_variant(run)
    return Use("", make=[composing(f"{FLOAT16} --base 02")], train=COMPOSED)


def use_in_ladder(run: Run) -> Use:
    """Returns how one comes to the script after a technique."""
    file = (stack.WRITTEN / stack.file_of(str(run.script))).as_posix()
    return Use(
        "The ladder",
        make=[f"python patches/stack.py write {run.script}"],
        train=f"{file} --data data",
        predict=f" --techniques {run.number}",
    )


def use_of_variant(run: Run) -> Use:
    """Returns how one comes to a variant of 01, with its options."""
    return Use(
        "Variants of 01",
        make=[composing(str(run.script))],
        train=" ".join([COMPOSED, *run.options]),
        predict=f' --variants "{run.label}"',
    )


def composing(variants: str) -> str:
    return f"python patches/stack.py compose {variants} --out {COMPOSED}"


def script_data(name: str, run: Run, predictions: dict[str, Prediction]) -> dict:
    """Returns what the page has of a script, with its memory by model and batch size."""
    use = use_of(name, run)
    start = "python"
    if run.processes > 1:
        start = f"torchrun --nproc_per_node={run.processes}"
    return dict(
        label=run.label,
        number=run.number,
        gpus=run.processes,
        kind=use.kind,
        commands=[*use.make, f"{start} {use.train}"],
        predict=f"python measure.py predict{use.predict}",
        published=run.published,
        needs={model: memory_by_batch(prediction) for model, prediction in predictions.items()},
    )


def memory_by_batch(prediction: Prediction) -> dict[int, list[float]]:
    """Returns [GB reserved, GB that suffice] by the batch size."""
    return {
        batch: [gb(need.reserved), gb(need.minimum)]
        for batch, need in prediction.needs.items()
        if batch in BATCHES
    }


def gb(mib: int) -> float:
    return round(mib / 1024, 2)


def gpu_data(
    card: Card, runs: dict[str, Run], predictions: dict[str, dict[str, Prediction]]
) -> dict:
    """Returns what the page has of a GPU, with the speeds of each script and model that fit it."""
    speeds = {
        name: speeds_by_model(card, runs[name], by_model) for name, by_model in predictions.items()
    }
    instead = {}
    if not card.bfloat16:
        instead = {"01": FLOAT16, "02": f"02+{FLOAT16}"}
    return dict(
        gb=gb(card.mib),
        room=gb(card.mib - OTHERS),
        measured=card.is_measured,
        checked=card.is_checked,
        bfloat16=card.bfloat16,
        nvidia=not card.is_amd,
        instead=instead,
        speeds=speeds,
    )


def speeds_by_model(card: Card, run: Run, predictions: dict[str, Prediction]) -> dict[str, dict]:
    """Returns what the page has of a script's speed, by each model that fits at some batch size."""
    speeds = {model: speeds_on(card, run, prediction) for model, prediction in predictions.items()}
    return {model: by_batch for model, by_batch in speeds.items() if by_batch}


def speeds_on(card: Card, run: Run, prediction: Prediction) -> dict[int, list]:
    """Returns what the page has of a script's speed, by each batch size that fits."""
    return {
        batch: speed_at(batch, card, run.processes, prediction)
        for batch, need in prediction.needs.items()
        if batch in BATCHES and need.minimum <= card.mib - OTHERS
    }


def speed_at(batch: int, card: Card, gpus: int, prediction: Prediction) -> list:
    """Returns [tok/sec of all GPUs, its range in thousands as `predict` prints it, MFU in percent].
    Where no speed can be predicted both numbers are 0, and the text says why."""
    text = speed_text(prediction, batch, card, gpus)
    speed, mfu = prediction.tok_per_sec(batch, card), prediction.mfu(batch, card)
    if not prediction.speeds(batch, card) or not speed or not mfu:
        return [0, text, 0]
    return [round(gpus * speed), text, round(100 * mfu)]


def data_block() -> str:
    """Returns the element of the page that holds the data. Raises UserError, StackError."""
    runs = choices()
    predictions = predictions_of(runs)
    data = {
        "models": MODELS,
        "context": predictions["00"]["gpt2"].context_length,
        "others": shipped.published_others(),  # measured, with their programs
        "about": prose_by_patch(runs[name] for name in predictions if name not in STAGES),
        "scripts": {
            name: script_data(name, runs[name], by_model) for name, by_model in predictions.items()
        },
        "gpus": {name: gpu_data(card, runs, predictions) for name, card in trainable_cards()},
    }
    return f'<script type="application/json" id="data">\n{as_json(data, 2)}\n</script>'


def predictions_of(runs: dict[str, Run]) -> dict[str, dict[str, Prediction]]:
    """Returns what is stored of each script, by the model; nothing of one without any."""
    predictions: dict[str, dict[str, Prediction]] = {}
    for name, run in runs.items():
        for model in MODELS:
            prediction = shipped.kept_of(run.script, ["--model", model, *run.options])
            if prediction:
                predictions.setdefault(name, {})[model] = prediction
    return predictions


def prose_by_patch(runs: Iterable[Run]) -> dict[str, str]:
    """Returns what a reader needs of each patch that is the script of a run."""
    scripts = {run.script for run in runs}
    patches = [*stack.load(), *stack.load_variants()]
    return {patch.name: patch.prose for patch in patches if patch.name in scripts}


def trainable_cards() -> list[tuple[str, Card]]:
    """Returns the GPUs that 01 can train on, by memory and capability."""
    cards = [(name, card) for name, card in CARDS.items() if card.capability >= 7]
    return sorted(cards, key=size_of_card)


def size_of_card(named: tuple[str, Card]) -> tuple[int, float]:
    _, card = named
    return card.mib, card.capability


def as_json(value, levels: int = 0) -> str:
    """Returns JSON for a page, with a line for each entry of the outer levels."""
    if levels and isinstance(value, dict):
        entries = [f"{as_json(name)}:{as_json(part, levels - 1)}" for name, part in value.items()]
        return "{\n" + ",\n".join(entries) + "\n}"
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
