"""make lint: the pages' prose by proselint, and by this project's own vocabulary: words that it
once coined, with the field's. What is generated is left out, as its words are those of records and
patches; so is code."""

import re
import sys
from pathlib import Path

from proselint.checks import __register__ as own_checks
from proselint.config import DEFAULT
from proselint.registry import CheckRegistry
from proselint.tools import LintFile

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md",
         "results/reference/*/README.md"]
FIELD = {
    "all (rungs|variants) together": "in total",
    "anew": "again",
    "beside the (baseline|published)": "next to, compared with",
    "by itself|by themselves": "automatically",
    "chunked head": "chunked cross-entropy",
    "compiled one by one": "regional compilation",
    "disturbed": "contended",
    "figures of (a|an|the) GPU": "GPU numbers",
    "is worth": "gains, improves",
    "least change": "smallest detectable difference",
    "loss in graph": "compiled loss",
    "measurabl[ey]": "significant, significantly",
    "mended": "fixed",
    "merged qkv": "fused QKV projection",
    "more than noise": "significant",
    "native layers": "built-in LayerNorm and GELU",
    "proved": "significant",
    "rate of products": "matmul throughput",
    "sooner started": "starts sooner",
    "the host's time": "CPU launch overhead",
    "the mixture(?! of)": "the mixture of experts",
    "time-outs?": "timeout",
    "training alone": "excluding evaluation",
    "verdicts?": "significance",
}
# Of proselint's own: matters of taste, and of the typography of printed books.
OFF = ["typography", "hedging", "cliches", "misc", "weasel_words"]
LEFT_OUT = re.compile(
    r"<!-- [^>]+: written by measure\.py readme -->.*?<!-- end -->|```.*?```|`[^`\n]*`"
    r"|\]\([^)]*\)|<https?:[^>]*>", re.DOTALL)


def prose(text: str) -> str:
    """Of a page, with a blank for each character that is left out, so that lines stay where they
    are."""
    return LEFT_OUT.sub(lambda part: re.sub(r"[^\n]", " ", part[0]), text)


def lint(name: str, text: str) -> list[str]:
    """A line for each word that is flagged."""
    found = [(place, f"{result.message}") for result, place in LintFile(name, prose(text)).lint(
        dict(max_errors=1000, checks=DEFAULT["checks"] | dict.fromkeys(OFF, False)))]
    for coined, better in FIELD.items():
        for match in re.finditer(rf"\b({coined})\b", prose(text), re.IGNORECASE):
            line = text.count("\n", 0, match.start()) + 1
            found.append(((line, 0), f"'{match[0]}': the field says {better}"))
    return [f"{name}:{line}: {message}" for (line, _), message in sorted(found)]


CheckRegistry().register_many(own_checks)

if __name__ == "__main__":
    pages = sorted(page for pattern in PAGES for page in ROOT.glob(pattern))
    lines = [line for page in pages
             for line in lint(str(page.relative_to(ROOT)), page.read_text(encoding="utf-8"))]
    print("\n".join(lines) or f"prose: {len(pages)} pages, nothing flagged")
    sys.exit(bool(lines))
