"""Keeps the first gradients of somebody's script, in a process of its own, before its first update.

    python gpt_speed/gradients/child.py '{"report": "FILE", ...}' SCRIPT ITS ARGUMENTS

The order is an Order, as JSON. The report is JSON, too:

    how          "kept", or "ended", "failed" with an `error`
    torch, weights, types, graphs
                 PyTorch's version; how many weights have gradients, their types; compiled graphs
    loss, batch, backwards, updates, autocast, compiles, budget, checkpoints, functions
                 what the script did: see Facts
    tensors      by name [the norm of the difference to the other gradient, relative to that one's;
                 the cosine; the ratio of the norms]
    weight_change, the largest of the weights' relative differences
    derivatives  by name [numeric derivative, its uncertainty, by autograd], and the `noise`

Only PyTorch, the standard library and modules of gpt_speed are imported, from PyTorch 2.4 and
Python 3.10 on: the script may have modules of all other names.
"""

import contextlib
import json
import random
import sys
from functools import partial
from pathlib import Path

sys.path.pop(0)  # this folder, whose modules have names that others may have
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from gpt_speed import script
from gpt_speed.gradients.derivatives import derivative_facts
from gpt_speed.gradients.hooks import set_hooks
from gpt_speed.gradients.keeper import Keeper
from gpt_speed.gradients.kept import Kept, kept_by, names_as_in
from gpt_speed.gradients.names import names_of
from gpt_speed.gradients.order import Order

sys.path.pop(0)  # what is imported from now on, the script's own environment has


def main() -> None:
    """Runs the script; always ends the process."""
    keeper = Keeper(Order(**json.loads(sys.argv[1])))
    set_seeds()
    set_hooks(keeper)
    register_optimizer_step_pre_hook(partial(begin_update, keeper))
    how, error = "ended", script.run_script(sys.argv[2:])
    if error:
        how = "failed"
    finish(keeper, dict(how=how, error=error))


def set_seeds() -> None:
    random.seed(0)
    torch.manual_seed(0)
    with contextlib.suppress(ImportError):  # the script may not need it
        import numpy

        numpy.random.seed(0)


def begin_update(keeper: Keeper, *_) -> None:
    """Is called before an optimizer's update; the script ends at the first with gradients."""
    keeper.begin_update()
    if keeper.is_complete:
        finish(keeper, dict(how="kept", error="", **gradient_facts(keeper)))


def gradient_facts(keeper: Keeper) -> dict:
    """Returns for the report how far the gradients are from those of another run, and numeric
    derivatives, as ordered; keeps the gradients for further runs."""
    order, facts, other = keeper.order, {}, None
    if order.compare:
        other = Kept.load(order.compare)
    names = parameter_names(keeper, other)
    kept = kept_by(keeper, names)
    if other:
        facts |= kept.distances_from(other)
    if order.keep:
        kept.save(order.keep)
    if order.seconds:
        names_of_kept = {weight: names[weight] for weight in keeper.gradients}
        facts |= derivative_facts(keeper.calls, names_of_kept, order.seconds)
    return facts


def parameter_names(keeper: Keeper, other: Kept | None) -> dict:
    """Returns a name for each parameter: that of another run, if there is one."""
    if other:
        return names_as_in(other, keeper.parameters())
    return names_of(keeper.parameters())


def finish(keeper: Keeper, facts: dict) -> None:
    """Writes the report and ends the process, so that nothing more of the script runs."""
    script.write_report(keeper.order.report, keeper.report() | facts)
    script.kill()


if __name__ == "__main__":
    main()
