"""Predictions that are stored in NAME, in a folder of results, and made where they are missing.

An entry has by a script's name and its options the memory at each batch size, the work of a step at
two of them, and a hash of the script's code. A prediction stays when the code changes; `predict`
then names the script. Of a script that can't be traced an entry says why, for the code with that
hash: it isn't tried again.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from bench.common import DAMAGE, REFERENCE, read_kept, relative, write_whole
from bench.predict.code_hash import code_of
from bench.predict.prediction import BATCHES, TRACED, Prediction
from bench.predict.program import Program, Untraceable, traced, traced_needs
from gpt_speed.common import UserError

NAME = "predict.json"


@dataclass(frozen=True)
class Sizes:
    """Which batch sizes a prediction has to have: those of BATCHES above TRACED, which follow from
    these two. The smaller ones have to be traced one by one: only for a card that is too small for
    TRACED."""

    card: int | None = None  # the MiB that a script may take there; None: no card is meant
    batch: int | None = None  # one more size, which was asked for

    def missing_in(self, prediction: Prediction) -> list[int]:
        """Returns the sizes that a prediction lacks, but that its script may take."""
        is_small = self.card is not None and self.card < prediction.needs[TRACED[0]].minimum
        sizes = {size for size in BATCHES if is_small or size > TRACED[0]}
        sizes -= {*prediction.refused}
        if self.batch:
            sizes.add(self.batch)
        return sorted(sizes - prediction.needs.keys())


def predict(
    program: Program, results: Path, sizes: Sizes = Sizes(), retrace: bool = False
) -> Prediction:
    """Returns what a program takes at these batch sizes, as it is stored in `results` or
    results/reference; what isn't stored is traced, and then stored in `results`. With `retrace`
    all is traced. Raises UserError."""
    stored = None
    if not retrace:
        stored = usable_prediction(program, results, sizes)
    if not stored and not retrace:
        check_traceable(program, results)
    prediction = with_sizes(stored or first_trace(program, results), program, sizes)
    if prediction != stored and results.is_dir():  # a misspelt one isn't made for this alone
        save(results, program.key, prediction)
    return prediction


def usable_prediction(program: Program, results: Path, sizes: Sizes) -> Prediction | None:
    """Returns the stored prediction of a program, maybe of older code of its script; None where
    nothing is stored. Also None where that code has changed and a size is missing, since sizes of
    two scripts don't mix."""
    stored = load_prediction(program.key, results, REFERENCE)
    if stored and sizes.missing_in(stored) and stored.code != code_of(program.text):
        return None
    return stored


def with_sizes(prediction: Prediction, program: Program, sizes: Sizes) -> Prediction:
    """Returns a prediction with the sizes that it lacks. Raises UserError."""
    missing = sizes.missing_in(prediction)
    if not missing:
        return prediction
    needs = traced_needs(program, missing, sizes.batch)
    return prediction.with_needs(needs, refused={*missing} - needs.keys())


def first_trace(program: Program, results: Path) -> Prediction:
    """Traces a program at the sizes of TRACED; where no trace can follow it, keeps why. Raises
    UserError."""
    try:
        return traced(program)
    except Untraceable as refusal:
        if results.is_dir():
            save_refusal(results, program, str(refusal))
        raise


def check_traceable(program: Program, results: Path) -> None:
    """Raises Untraceable where an earlier start found that this code can't be traced."""
    for folder in (results, REFERENCE):
        why = refusal_in(folder, program)
        if why:
            raise Untraceable(f"{why} (predict --retrace tries again)")


def predict_all(
    programs: Iterable[Program], results: Path, sizes: Sizes, retrace: bool = False
) -> str:
    """Predicts the programs of which nothing is stored or whose code has changed, or all of them.
    Returns how many are predicted. Raises OSError."""
    results.mkdir(parents=True, exist_ok=True)
    unique = {program.key: program for program in programs}
    failed = 0
    for number, (key, program) in enumerate(unique.items(), 1):
        outcome = "predicted"
        try:
            predict_anew(program, results, sizes, retrace)
        except UserError as error:
            failed, outcome = failed + 1, str(error)
        print(f"{number} of {len(unique)}: {key}: {outcome}", flush=True)
    return f"{len(unique) - failed} of {len(unique)} are predicted."


def predict_anew(program: Program, results: Path, sizes: Sizes, retrace: bool) -> None:
    """Predicts a program, traced again also where its code has changed. Raises UserError."""
    stored = load_prediction(program.key, results, REFERENCE)
    has_changed = stored is not None and stored.code != code_of(program.text)
    if has_changed and not retrace:
        check_traceable(program, results)
    predict(program, results, sizes, retrace or has_changed)


# ---- What is stored


def load_prediction(key: str, *folders: Path) -> Prediction | None:
    """Returns the prediction that the first of the folders stores by this key, maybe of other code
    of the script; None where none does."""
    for folder in folders:
        entry = read_kept(folder / NAME).get(key)
        if entry:
            with suppress(*DAMAGE):  # an older form
                return Prediction.from_json(entry)
    return None


def refusal_in(folder: Path, program: Program) -> str | None:
    """Returns why this code of a program can't be traced; None where a folder doesn't say."""
    with suppress(*DAMAGE):  # as where nothing is stored of it
        refusal = read_kept(folder / NAME)[program.key]["untraceable"]
        if refusal["code"] == code_of(program.text):
            return refusal["why"]
    return None


def save(results: Path, key: str, prediction: Prediction) -> None:
    """Stores a prediction in a folder, in place of what that has of it."""
    with changed_entries(results) as entries:
        entries[key] = prediction.as_json()


def save_refusal(results: Path, program: Program, why: str) -> None:
    """Stores in a folder why a program can't be traced, beside a prediction of its older code."""
    with changed_entries(results) as entries:
        refusal = dict(code=code_of(program.text), why=why)
        entries[program.key] = entries.get(program.key, {}) | dict(untraceable=refusal)


def entries_in(path: Path) -> dict[str, dict]:
    """Returns what a file stores, before it is written again. Raises UserError where it can't be
    read, so that nothing is lost."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except DAMAGE as error:
        raise UserError(f"{relative(path)} is damaged: mend or delete it ({error})")


@contextmanager
def changed_entries(results: Path) -> Iterator[dict[str, dict]]:
    """Gives what a folder stores, by key, and writes it at the end, a line for each; waits while
    another process does."""
    from filelock import FileLock  # PyTorch brings it along, and who only reads needs neither

    with FileLock(results / ".predict.lock"):
        entries = entries_in(results / NAME)
        yield entries
        lines = (
            f"{json.dumps(key)}: {json.dumps(entry, separators=(',', ':'))}"
            for key, entry in entries.items()
        )
        write_whole(results / NAME, "{\n" + ",\n".join(lines) + "\n}\n")
