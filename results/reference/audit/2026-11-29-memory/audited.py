"""Prints as JSON what `gpt-speed audit --gpu` says of the memory of a script's second step; the
script isn't timed.

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
from gpt_speed.audit.translate import translated  # noqa: E402
from gpt_speed.cards import CARDS  # noqa: E402


def main() -> None:
    cards, *command = sys.argv[1:]
    order = Order("watch", key=0, skipped=1, steps=1)  # the first optimizer's updates end steps
    translation = translated(Step(run(command, order, minutes=60, python=sys.executable)))
    memory = {card: memory_on(CARDS[card], translation) for card in cards.split(",")}
    print(json.dumps(dict(memory=memory, notes=memory_notes(translation))))


if __name__ == "__main__":
    main()
