"""What the ranks of torch.distributed agree on, so that all of them end after the same step."""

import contextlib
import time

import torch

LAST_STEP, ENDED = "audit/last step", "audit/ended"  # the keys by which they tell each other
PATIENCE = 60  # seconds: one of them may have failed


def store_of_ranks():
    """Returns the store by which the ranks of torch.distributed find each other; None without."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    return torch.distributed.distributed_c10d._get_default_store()


def is_last_step(count: int, is_enough: bool) -> bool:
    """Tells whether the process ends after `count` steps, which are, or aren't, enough for it. Of
    several ranks, whose clocks differ, the first one decides, and all end after its next step: none
    can be through with that before, as they wait for each other's gradients."""
    store = store_of_ranks()
    if store is None:
        return is_enough
    if is_enough and torch.distributed.get_rank() == 0 and not store.check([LAST_STEP]):
        store.set(LAST_STEP, str(count + 1))
    return store.check([LAST_STEP]) and count >= int(store.get(LAST_STEP))


def wait_for_ranks() -> None:
    """Waits until all ranks are through with their last step, which this one's end would break."""
    store = store_of_ranks()
    if store is None:
        return
    deadline = time.monotonic() + PATIENCE
    with contextlib.suppress(RuntimeError):  # the rank that holds the store has ended
        ended = store.add(ENDED, 1)
        while ended < torch.distributed.get_world_size() and time.monotonic() < deadline:
            time.sleep(0.05)
            ended = store.add(ENDED, 0)
