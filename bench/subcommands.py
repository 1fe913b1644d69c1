"""What every subcommand of measure.py has: a name, a help text, options."""

import argparse
import importlib
import math
import pkgutil
import re
from collections.abc import Callable
from types import ModuleType
from typing import TypeVar

T = TypeVar("T")
Number = TypeVar("Number", int, float)
GROUPS = "start here", "benchmarks", "results", "maintenance"


class Subcommand:
    """A study or a command, which its docstring describes, in --help too."""

    group = ""  # one of GROUPS
    needs_machine = False  # whether its setup has to describe this machine

    @property
    def name(self) -> str:
        """The class's name in small letters: LeaveOneOut is leave-one-out."""
        return re.sub(r"\B(?=[A-Z])", "-", type(self).__name__).lower()

    def options(self, parser: argparse.ArgumentParser) -> None:
        """Adds its own command-line options."""

    def measures(self, args: argparse.Namespace) -> bool:
        """Returns whether it measures something, beside which nothing else may be measured."""
        return False


def all_in(package: ModuleType, kind: type[T]) -> list[T]:
    """Returns an instance of each subclass of `kind` that the modules of a package define, in the
    order of the modules' names."""
    instances = []
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        instances += [subclass() for subclass in subclasses_in(module, kind)]
    return instances


def subclasses_in(module: ModuleType, kind: type[T]) -> list[type[T]]:
    """Returns the subclasses of `kind` that a module defines, without those that it imports."""
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, kind)
        and value.__module__ == module.__name__
    ]


def number_from(
    least: float, parse: Callable[[str], Number], below: float = math.inf
) -> Callable[[str], Number]:
    """Returns an option's type for argparse: a number that is at least `least`, and less than
    `below`."""

    def number(text: str) -> Number:
        value = parse(text)
        if not least <= value < below:
            raise argparse.ArgumentTypeError(f"{text} is out of range")
        return value

    return number


positive = number_from(1, int)
above_0 = number_from(1e-9, float, below=1e9)
