"""The blocks that are generated in README, docs and the machines' pages."""

from bench.report.readme import write_readme
from bench.studies import all_studies
from bench.subcommands import Command


class Readme(Command):
    """Write the generated tables of README, docs and results/reference again.

    They are made from the patches and the journals in results/reference."""

    group = "maintenance"

    def answer(self, setup):
        changed = write_readme(all_studies())
        return ("README.md, docs/, results/reference/*/README.md: "
                + ("written" if changed else "nothing to change"))
