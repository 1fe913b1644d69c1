"""Command-line options in a list of words."""

from collections.abc import Iterable


def parse_options(words: Iterable[str]) -> list[tuple[str, str]]:
    """Returns each option with its value, written `--name value` or `--name=value`; "" for one
    without."""
    options: list[tuple[str, str]] = []
    for word in words:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            options.append((name, value))
        elif options:
            name, value = options[-1]
            options[-1] = name, f"{value} {word}".strip()
    return options


def option_value(name: str, words: Iterable[str]) -> str:
    """Returns the value of an option, the last one if it is repeated; "" without it."""
    return dict(parse_options(words)).get(name, "")


def has_option(name: str, words: Iterable[str]) -> bool:
    return any(option == name for option, _ in parse_options(words))


def without_options(names: Iterable[str], words: Iterable[str]) -> list[str]:
    """Returns the words without the options of these names and their values."""
    kept, is_kept = [], True
    for word in words:
        if word.startswith("--"):
            is_kept = word.partition("=")[0] not in names
        if is_kept:
            kept.append(word)
    return kept
