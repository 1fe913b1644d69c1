"""From this machine's results to a folder of results/reference, for others to read."""

import re
import shutil

from bench.common import DAMAGE, REFERENCE, UserError, relative
from bench.measure.journal import locked
from bench.report.look import read_look
from bench.report.page import write_page
from bench.report.tables import found_in
from bench.studies import Study, all_studies

ROUNDS = {"stages": 2, "ladder": 4}  # that a table which others quote needs
MADE_BY = r"\nMade by `(.+?)`"
KEPT = ".jsonl", ".json", ".md", ".html", ".png"


class Pack(Study):
    """Checks that results/ is complete (page, journals, rounds, a quiet machine), and copies it to
    results/reference/NAME, for a pull request."""

    runs_scripts = of_this_machine = False
    in_report = ()
    arguments = "NAME"

    def options(self, parser):
        parser.add_argument("name", metavar="NAME",
                            help="the machine, such as rtx-4090: small letters, digits and hyphens")

    def answer(self, setup):
        name, results = setup.args.name, setup.results
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name):
            raise UserError(f"{name!r} isn't a name like rtx-4090", 2)
        target = REFERENCE / name
        if target.exists():
            raise UserError(f"{relative(target)} exists: nothing is overwritten")
        with locked(results):
            try:
                missing = what_is_missing(results)
            except DAMAGE as error:
                raise UserError(f"{relative(results)} is damaged: {error!r}")
            if missing:
                raise UserError(f"{relative(results)} isn't complete: {'; '.join(missing)}")
            command = re.search(MADE_BY, page_of(results))[1]
            write_page(all_studies(), results, command, {})  # it may be older than the journals
            files = [path for path in sorted(results.iterdir())
                     if path.suffix in KEPT and path.is_file() and not path.is_symlink()
                     and not path.name.endswith(".trace.json")]
            copy = target.with_name(f".{name}.tmp")  # renamed when it is whole
            shutil.rmtree(copy, ignore_errors=True)
            copy.mkdir(parents=True)
            for path in files:
                shutil.copyfile(path, copy / path.name)
            copy.rename(target)
        return (f"{len(files)} files in {relative(target)}\n"
                "Now write its README.md (docs/submit.md says what it has to state), and run"
                " python measure.py readme")


def page_of(results) -> str:
    page = results / "report.md"
    return page.read_text(encoding="utf-8", errors="replace") if page.is_file() else ""


def what_is_missing(results) -> list[str]:
    """Of what a page needs before others may quote it, each with the command that gets it."""
    missing = []
    look, text = read_look(results), page_of(results)
    if not look or not text:
        return ["no report: make report"]
    if "\nNot finished: " in text:
        missing.append("the report isn't finished: make report goes on with it, or says why not")
    if not re.search(MADE_BY, text):
        missing.append("the page doesn't name its command: make report")
    for study, rounds in ROUNDS.items():
        found = found_in(results, study)
        command = f"python measure.py {study} --resume --rounds {rounds}"
        if not found:
            missing.append(f"no {study}: {command}")
        for measured, rows in found:
            failed = [row.label for row in rows if row.outcome and row.outcome.failed]
            few = [row.label for row in rows if not row.error and row.rounds < rounds]
            if failed:
                missing.append(f"{study}: {', '.join(failed)} failed")
            if few:
                missing.append(f"{study}: too few rounds of {', '.join(few)}: {command}")
            if any(result.record and not result.matmul_rate for result in measured.results):
                missing.append(f"{study}: runs without the machine's rate: measure anew")
            if measured.options:
                missing.append(f"{study}: measured with {' '.join(measured.options)}")
            if len(measured.disturbed) > len(measured.results) / 4:
                missing.append(f"{study}: the machine was disturbed after"
                               f" {len(measured.disturbed)} of {len(measured.results)} runs")
            if measured.machine["torch"] != look["machine"]["torch"]:
                missing.append(f"{study}: measured with another PyTorch than the page names")
    return missing
