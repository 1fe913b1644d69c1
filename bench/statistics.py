"""From records to rows: medians over the rounds, factors, losses, and verdicts."""

import math
import re
from pathlib import Path
from statistics import median

from bench.plans import Plan, Run, comparison_point, tokens_per_step
from bench.records import Record, RecordError, read_record

ROUNDS_FOR_A_VERDICT = 4


def verdict(new: list[float], old: list[float]) -> str:
    """Whether the speeds `new`, one per round, are faster than `old`: only if no two overlap."""
    if min(len(new), len(old)) < ROUNDS_FOR_A_VERDICT:
        return "no verdict"
    if min(new) > max(old):
        return "faster"
    return "slower" if max(new) < min(old) else "no measurable change"


def memory_verdict(new: list[float | None], old: list[float | None]) -> str:
    """As verdict, of memory."""
    if None in (*new, *old):
        return "no verdict"
    return {"faster": "more", "slower": "less"}.get(text := verdict(new, old), text)


def measured_record(path: Path) -> Record:
    """The record of a complete run with a speed. Raises RecordError with the reason for others."""
    try:
        record = read_record(path)
    except (RecordError, OSError) as error:
        raise RecordError(f"its record can't be read: {getattr(error, 'strerror', None) or error}")
    if record.error:
        raise RecordError(record.error)
    if not record.tok_per_sec:
        raise RecordError("too short for a speed: raise --max-tokens")
    needed = {name: record.end.get(name) for name in ("reserved_gb", "first_step_seconds")}
    needed |= {name: record.config.get(name)
               for name in ("flops_per_token", "batch_size", "context_length", "world_size")}
    for name, value in needed.items():
        if not isinstance(value, int | float) and (name, value) != ("reserved_gb", None):
            raise RecordError(f"its record can't be read: {name} is {value!r}")
    return record


def val_loss(record: Record, tokens: int | None) -> float | None:
    """The validation loss after `tokens` training tokens per process, rounded up to whole steps;
    for None the last one."""
    if tokens is None:
        return record.end["val_loss"]
    world_size = record.config["world_size"]
    per_step = tokens_per_step(record.config, world_size)
    return record.val_loss_at(comparison_point(tokens * world_size, per_step))


def lowest_val_loss(record: Record) -> float | None:
    """The lowest of all log lines."""
    return min((log["val_loss"] for log in record.logs if log["val_loss"] is not None),
               default=None)


def reached(record: Record, target: float) -> tuple[float, float] | None:
    """(tokens, seconds of training) after which the validation loss has fallen to `target`, by a
    straight line between the log lines around it; None where it never does.

    The first step counts as long as a median one: see first_step_excess for the rest of it.
    """
    before = None
    for log in record.logs:
        loss = log["val_loss"]
        here = log["tokens"], log["train_seconds"] - first_step_excess(record)
        if loss is not None and loss <= target:
            if before is None:
                return here
            loss_before, there = before
            share = (loss_before - target) / (loss_before - loss)
            return tuple(a + share * (b - a) for a, b in zip(there, here, strict=True))
        before = (loss, here) if loss is not None else before
    return None


def first_step_excess(record: Record) -> float:
    """The seconds, compilation above all, that the first step takes more than a median one."""
    per_step = tokens_per_step(record.config, record.config["world_size"])
    return record.end["first_step_seconds"] - per_step / record.tok_per_sec


def time_to(target: float, records: list[Record]) -> dict:
    """Medians over `records`, of which those that didn't reach it count as slower than all others;
    None where the median did not, or where there are no records."""
    runs = [reached(record, target) or (math.inf, math.inf) for record in records]
    never = [(math.inf, math.inf)]
    tokens, seconds = (median(figures) for figures in zip(*runs or never, strict=True))
    excess = first_step_excess(records[0]) if records else math.inf

    def known(figure: float) -> float | None:
        return None if math.isinf(figure) else figure

    return dict(
        tokens=known(tokens), seconds=known(seconds), with_first_step=known(seconds + excess),
        all_seconds=[known(seconds) for _, seconds in runs],
    )


def steps_per_epoch(record: Record) -> int | None:
    """Whole batches of the training text; None for a record that doesn't tell its tokens."""
    try:
        windows = (record.start["data"]["tokens"]["train"] - 1) // record.config["context_length"]
        return windows // (record.config["batch_size"] * record.config["world_size"])
    except (LookupError, TypeError):
        return None


def ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


def difference(a: float | None, b: float | None) -> float | None:
    return None if None in (a, b) else a - b


def does_not_fit(error: str | None) -> bool:
    """Whether a run's error tells that it is too large: for the memory, or for the text."""
    return bool(re.search("out of memory|text is too short|ended by signal 9", error or ""))


def blocked(run: Run, plan: Plan, state: dict) -> str | None:
    """Why a run isn't tried, by the results of the smaller run before it; None if it may be."""
    results = [result for result in state["results"] if result["name"] == run.after]
    (label,) = [other.label for other in plan.runs if other.name == run.after] or [None]
    if any(result["error"] for result in results):
        return f"not tried, since {label} failed"
    if not plan.memory_limit_gb or not results:
        return None
    used = [record.end["reserved_gb"]
            for record in records_of(dict(name=run.after), state, plan.path.parent)]
    if None in used:
        return f"not tried: the memory of {label} isn't known"
    if used and run.growth * max(used) > plan.memory_limit_gb:
        return (f"not tried: {run.growth:g} times the {max(used):.1f} GB of {label} would be more"
                " than half of the RAM")
    return None


def figures_of(run: Run, plan: Plan, state: dict, folder: Path) -> dict:
    """A run's row, as far as its own records tell."""
    records, losses, losses_by_round, error = [], {}, [], run.error
    results = [result for result in state["results"] if result["name"] == run.name]
    for result in sorted(results, key=lambda result: result["round"]):
        if result["error"]:
            error = error or f"failed: {result['error'].removeprefix('failed: ')}"
            continue
        try:
            record = measured_record(folder / result["record"])
        except RecordError:  # gone since; --resume runs it again
            continue
        loss = losses[result["seed"]] = val_loss(record, plan.loss_tokens)
        if result["seed"] == plan.seed_of(result["round"]):
            records.append(record)
            losses_by_round.append(loss)
    first = records[0] if records else None  # round 1's, whose first step compiles

    def middle(values) -> float | None:
        values = [value for value in values if value is not None]
        return median(values) if values else None

    speeds = [record.tok_per_sec for record in records]
    speed, precision = middle(speeds), first and first.precision
    flops = speed * first.config["flops_per_token"] / run.processes if first else None
    return dict(
        name=run.name, label=run.label, technique=run.technique, loss=run.loss,
        processes=run.processes, mbit=run.mbit, model=first and first.config.get("model"),
        error=error, rounds=len(records), speeds=speeds,
        tok_per_sec=speed, parameters=first and first.config.get("parameters"),
        speed_is_average=any(record.speed_is_average for record in records),
        losses=losses, val_loss=middle(losses_by_round),
        reserved_gb=middle(record.end["reserved_gb"] for record in records),
        all_reserved_gb=[record.end["reserved_gb"] for record in records],
        mfu=middle(record.mfu for record in records), precision=precision,
        first_step_seconds=first and first.end["first_step_seconds"],
        first_step_excess=[first_step_excess(record) for record in records],
        train_seconds=middle(record.end.get("train_seconds") for record in records),
        tokens_per_step=first and tokens_per_step(first.config, first.config["world_size"]),
        steps_per_epoch=first and steps_per_epoch(first),
        expert_shares=first and first.logs and first.logs[-1].get("expert_shares") or None,
        share_of_peak=ratio(flops, state["matmul_peak"].get(precision)),
        attention_backend=first and first.end["attention_backend"],
        uncompiled=any(record.uncompiled for record in records), published=run.published,
        options=list(run.options), lowest_val_loss=middle(map(lowest_val_loss, records)),
        time_to={name: time_to(target, records) for name, target in plan.targets.items()},
        average=middle(record.end.get("avg_tok_per_sec") for record in records),
        save_seconds=[save["seconds"] for record in records for save in record.checkpoints],
    )


def records_of(row: dict, state: dict, folder: Path) -> list[Record]:
    """Those of a row's runs that are complete and have a speed, in the order of their rounds."""
    records = []
    for result in sorted(state["results"], key=lambda result: result["round"]):
        if result["name"] == row["name"] and not result["error"]:
            try:
                records.append(measured_record(folder / result["record"]))
            except RecordError:  # gone since
                continue
    return records


def compare_times(row: dict, other: dict, suffix: str = "") -> None:
    """Adds how many times as fast as `other` the row's runs came to each target."""
    for target, time in row["time_to"].items():
        for kind in ("seconds", "with_first_step"):
            theirs = other["time_to"][target][kind]
            time[f"factor{suffix}_{kind}"] = ratio(theirs, time[kind])


def make_rows(plan: Plan, state: dict, folder: Path) -> tuple[list[dict], float | None]:
    """(a row for each run of the plan, the seed noise), from the results in `state`.

    A row's factor and loss difference are over the run that its own is compared to, or where that
    has no figures, over the one that *it* is compared to, and so on. Those called `..._baseline`
    are over the first run of the plan. Where the run is a script without a technique, the verdict
    and `factor_technique` are the technique's: of the other run over this one.
    """
    rows = {run.name: figures_of(run, plan, state, folder) for run in plan.runs}
    compared_to = {run.name: run.compared_to for run in plan.runs}
    baseline = rows[plan.runs[0].name]
    losses = baseline["losses"].values()
    noise = max(losses) - min(losses) if len(losses) > 1 and None not in losses else None
    for run in plan.runs:
        row, name = rows[run.name], run.compared_to
        if run.after and all(result["name"] != run.name for result in state["results"]):
            earlier = (rows[run.after]["error"] or "").startswith("not tried")
            row["error"] = rows[run.after]["error"] if earlier else blocked(run, plan, state)
        while name and not rows[name]["speeds"]:
            name = compared_to[name]
        others = {"": rows[name] if name else {}, "_baseline": {} if row is baseline else baseline}
        for suffix, other in others.items():
            row[f"factor{suffix}"] = ratio(row["tok_per_sec"], other.get("tok_per_sec"))
            row[f"published_factor{suffix}"] = ratio(row["published"], other.get("published"))
            row[f"loss_difference{suffix}"] = difference(row["val_loss"], other.get("val_loss"))
            if other:
                compare_times(row, other, suffix)
        change = row["loss_difference_baseline"]
        row["within_seed_noise"] = None if None in (change, noise) else abs(change) <= noise
        with_it, without = row["speeds"], others[""].get("speeds")
        if run.without_technique:
            row["factor_technique"] = ratio(1, row["factor"])
            with_it, without = without, with_it
        row["verdict"] = verdict(with_it, without) if with_it and without else None
        row["compared_to"] = others[""].get("label")
        row["memory_factor"] = ratio(row["reserved_gb"], others[""].get("reserved_gb"))
        theirs = others[""].get("all_reserved_gb")
        row["memory_verdict"] = (memory_verdict(row["all_reserved_gb"], theirs)
                                 if row["speeds"] and theirs else None)
    return list(rows.values()), noise
