"""The text that is trained on: what meta.json, beside its tokens, says of it."""

import json
from pathlib import Path
from typing import Any

from bench.common import DAMAGE, relative, shorten
from gpt_speed.common import UserError

BOOK_TOKENS = 414_009  # of the book to train on: 404 windows of 1,024


def tokens_in(folder: Path) -> dict | None:
    """Reads meta.json; None without tokens. Raises UserError where it is damaged."""
    meta = folder / "meta.json"  # written last
    if not meta.exists():
        return None
    try:
        data = json.loads(meta.read_text(encoding="utf-8"))
        if data["tokens"]["train"] < 1:
            raise ValueError("no tokens")
        return data
    except (OSError, *DAMAGE) as error:
        raise UserError(f"{relative(meta)} is damaged ({error!r}): run data/prepare.py")


def other_text(data: Any) -> str:
    """Returns the text that meta.json, or a record's copy of it, names; "" for the book
    in GPT-2's tokens, or where it isn't known."""
    if not isinstance(data, dict) or not data.get("corpus"):
        return ""
    corpus = str(data["corpus"])
    if data.get("tokenizer") == "bytes":
        return f"{shorten(corpus, 60)}, its tokens bytes"
    if corpus.lower().startswith("middlemarch"):
        return ""
    return shorten(corpus, 60)
