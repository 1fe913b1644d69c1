"""The blocks that are generated in README, docs and the machines' pages."""

from bench.commands import Command
from bench.report.readme import write_readme
from bench.studies import all_studies


class Readme(Command):
    """Write the generated tables of README, docs and results/reference again.

    They are made from the patches and the journals in results/reference."""

    group = "maintenance"

    def answer(self, setup):
        changed = write_readme(all_studies())
        return ("README.md, docs/, results/reference/*/README.md: "
                + ("written" if changed else "nothing to change"))
