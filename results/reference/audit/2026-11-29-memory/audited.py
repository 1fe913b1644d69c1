"""Prints as JSON what `gpt-speed audit --gpu` says of the memory of a script's second step; the
script isn't timed. `stored` are the bytes on a GPU of what the step has made when its last backward
pass begins.

    python audited.py "H100,RTX 3090" others.py gollem-float32
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

from gpt_speed.audit.order import Order  # noqa: E402
from gpt_speed.audit.other_gpus import memory_notes, memory_on  # noqa: E402
from gpt_speed.audit.run import run  # noqa: E402
from gpt_speed.audit.step import Step  # noqa: E402
from gpt_speed.audit.storages import StepMemory  # noqa: E402
from gpt_speed.audit.translate import translated  # noqa: E402
from gpt_speed.cards import CARDS  # noqa: E402


def stored(memory: StepMemory) -> int:
    """Returns the bytes of what was made in the step and lives when the last backward pass
    begins."""
    begin = max(index for index, op in enumerate(memory.ops) if op.name == "backward")
    return sum(
        storage.size
        for storage in (*memory.storages.values(), *memory.others)
        if storage.born is not None
        and storage.born < begin
        and (storage.died is None or storage.died > begin)
    )


def main() -> None:
    cards, *command = sys.argv[1:]
    order = Order("watch", key=0, skipped=1, steps=1)  # the first optimizer's updates end steps
    translation = translated(Step(run(command, order, minutes=60, python=sys.executable)))
    memory = {card: memory_on(CARDS[card], translation) for card in cards.split(",")}
    notes = memory_notes(translation)
    print(json.dumps(dict(stored=stored(translation.memory), memory=memory, notes=notes)))


if __name__ == "__main__":
    main()
