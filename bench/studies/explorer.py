"""The page in which one looks a GPU up: docs/explorer.html."""

from bench.common import UserError, relative, write_whole
from bench.report.readme import EXPLORER, SHOWN, update
from bench.studies import Study


class Explorer(Study):
    """Writes docs/explorer.html, a page to open in a browser, from the predictions that are kept:
    for a GPU, or two, what fits, how fast it trains, how long it takes, what it costs."""

    runs_scripts = of_this_machine = False

    def answer(self, setup):
        if setup.options:
            raise UserError("explorer takes no options of the scripts: it shows what is kept", 2)
        text = update(EXPLORER.read_text(encoding="utf-8"), SHOWN, {})
        write_whole(EXPLORER, text)
        return f"{relative(EXPLORER)}: {len(text.encode()) / 1e6:.1f} MB, to open in a browser"
