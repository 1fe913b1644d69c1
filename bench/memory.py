"""Memory that a script would take on a GPU that isn't there: its own training steps are traced on
tensors without storage, and PyTorch's caching allocator is simulated.

The trace notes when each tensor's memory is made and when it is released. Three things are made as
on CUDA: dropout keeps a mask of a byte per element, attention is the flash kernel, and the
optimizer works on all tensors at once. No trace sees the workspace of cuBLAS; it is added. Scripts
are traced without torch.compile.

The allocator is that of c10/cuda/CUDACachingAllocator.cpp: sizes are rounded to 512 bytes. Up to
1 MiB they come from segments of 2 MiB, below 10 MiB from segments of 20 MiB, and else from one of
their own, rounded to 2 MiB. The smallest free block that is large enough is taken, and split if
more than 1 MiB would remain (512 bytes in a small segment). A block that is released merges with
its free neighbours. If the card is full, whole segments that are free are given back first.
"""

import contextlib
import importlib.util
import io
import json
import sys
import weakref
from bisect import bisect_left, insort
from itertools import count
from pathlib import Path
from unittest import mock

MIB, GB = 2**20, 2**30
BATCHES = [2**k for k in range(10)]
WORKSPACE = 8_519_680  # bytes that cuBLAS takes at its first product: 2 × 4,096 KiB, 8 × 16 KiB


class DoesNotFit(Exception):
    """A request that the card has no memory for."""


class Block:
    """Part of a segment; `before` and `after` are its neighbours in it."""

    __slots__ = ("size", "start", "is_free", "before", "after", "small")

    def __init__(self, size: int, start: int, small: bool, before: "Block | None" = None,
                 after: "Block | None" = None):
        self.size, self.start, self.small, self.is_free = size, start, small, False
        self.before, self.after = before, after

    @property
    def place(self) -> tuple:
        """Free blocks are sorted by it."""
        return self.size, self.start, self


class Allocator:
    """The caching allocator of a card with so many bytes (None: no limit)."""

    def __init__(self, capacity: int | None = None):
        self.capacity, self.starts = capacity, count()
        self.free = {True: [], False: []}  # blocks by whether they are small, sorted
        self.reserved = self.allocated = self.peak_allocated = self.peak_reserved = 0

    def malloc(self, size: int) -> Block:
        """Raises DoesNotFit."""
        size = max(512, -(-size // 512) * 512)
        small = size <= MIB
        free = self.free[small]
        i = bisect_left(free, (size, -1))
        block = free.pop(i)[2] if i < len(free) else self.segment(size, small)
        remaining = block.size - size
        if remaining >= 512 if small else remaining > MIB:
            rest = Block(remaining, block.start + size, small, block, block.after)
            if block.after:
                block.after.before = rest
            block.after, block.size = rest, size
            self.put(rest)
        block.is_free = False
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def segment(self, size: int, small: bool) -> Block:
        total = 2 * MIB if small else 20 * MIB
        if size >= 10 * MIB:
            total = -(-size // (2 * MIB)) * 2 * MIB
        if self.capacity is not None and self.reserved + total > self.capacity:
            for free in self.free.values():
                whole = [place for place in free if not place[2].before and not place[2].after]
                self.reserved -= sum(size for size, *_ in whole)
                free[:] = [place for place in free if place not in whole]
            if self.reserved + total > self.capacity:
                raise DoesNotFit(size)
        self.reserved += total
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return Block(total, next(self.starts) << 50, small)

    def put(self, block: Block) -> None:
        block.is_free = True
        insort(self.free[block.small], block.place)

    def take(self, block: Block) -> None:
        free = self.free[block.small]
        free.pop(bisect_left(free, (block.size, block.start)))

    def release(self, block: Block) -> None:
        self.allocated -= block.size
        before, after = block.before, block.after
        if after and after.is_free:
            self.take(after)
            block.size, block.after = block.size + after.size, after.after
            if after.after:
                after.after.before = block
        if before and before.is_free:
            self.take(before)
            before.size, before.after = before.size + block.size, block.after
            if block.after:
                block.after.before = before
            block = before
        self.put(block)


def simulate(events: list[int], capacity: int | None = None) -> Allocator:
    """The allocator after these events: a size in bytes, or -k for the release of the k-th one.
    Raises DoesNotFit."""
    allocator, blocks = Allocator(capacity), [None]
    for event in events:
        if event >= 0:
            blocks.append(allocator.malloc(event))
        else:
            allocator.release(blocks[-event])
    return allocator


# ---- The trace ---------------------------------------------------------------------------------


def trace(module, options: list[str], steps: int = 3) -> tuple[int, list[int]]:
    """(the batch size, the events) of training by a script: a step, an evaluation of both texts,
    further steps, an evaluation and a sample, as at the end of an epoch."""
    import torch
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_iter

    aten = torch.ops.aten

    def is_meta(value) -> bool:
        return isinstance(value, torch.Tensor) and value.device.type == "meta"

    class AsOnCuda(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            if func is torch.nn.functional.dropout and is_meta(args[0]):
                given = dict(zip(("x", "p", "training"), args, strict=False)) | kwargs
                p, training = given.get("p", 0.5), given.get("training", True)
                return aten.native_dropout(args[0], p, True)[0] if training and p else args[0]
            if func is torch.nn.functional.scaled_dot_product_attention:
                return aten._scaled_dot_product_flash_attention(
                    *args[:3], kwargs.get("dropout_p", 0.0), kwargs.get("is_causal", False))[0]
            if func is torch.Tensor.item and is_meta(args[0]):
                return 0.0
            if func is torch.Tensor.tolist and is_meta(args[0]):
                return [0]
            if func is torch.Tensor.cpu and is_meta(args[0]):
                return torch.zeros(args[0].shape, dtype=args[0].dtype)
            return func(*args, **kwargs)

    class Notes(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.events, self.made, self.live = [], 0, {}

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is aten._fused_adamw_.default:  # in place, and not there for such tensors
                return None
            result = func(*args, **(kwargs or {}))
            for value in tree_iter(result):
                if is_meta(value):
                    self.note(value)
            return result

        def note(self, tensor: torch.Tensor) -> None:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self.live or not storage.nbytes():
                return
            self.events.append(storage.nbytes())
            self.made += 1
            number = self.made

            def died(_):
                del self.live[key]
                self.events.append(-number)

            self.live[key] = weakref.ref(storage, died)

    class Windows:
        """As many windows as an evaluation takes."""

        def __len__(self):
            return config.eval_windows

        def __getitem__(self, i):
            return (torch.zeros(config.context_length, dtype=torch.long),) * 2

    class Tokenizer:
        n_vocab = 50_257
        encode = staticmethod(lambda text: [0] * 4)
        decode = staticmethod(str)

    eager = ["--no-compile"] if hasattr(module, "can_compile") else []
    config = module.configure(["--device", "cpu", *eager, *options])
    config.device = torch.device("meta")
    config.eval_windows = 8  # one batch of each text; further ones take the same memory
    with torch.device("meta"):
        model = module.GPTModel(config)
    with (AsOnCuda(), Notes() as notes,
          mock.patch("torch.optim.adam._device_dtype_check_for_fused", lambda *_, **__: None)):
        model = module.prepare_model(model, config)
        for tensor in [*model.parameters(), *model.buffers()]:
            notes.note(tensor)
        optimizer = module.make_optimizer(model, config)
        for group in optimizer.param_groups:
            group["foreach"] = not group.get("fused")
        notes.events.append(WORKSPACE)
        notes.made += 1
        shape = config.batch_size, config.context_length
        for step in range(steps):
            x_BT, y_BT = (torch.zeros(shape, dtype=torch.long).to("meta") for _ in range(2))
            optimizer.zero_grad()
            loss = module.compute_loss(model, x_BT, y_BT)
            module.backward_and_update(loss, optimizer)
            if step in (0, steps - 1):
                module.evaluate(model, Windows(), config)
                module.evaluate(model, Windows(), config)
        module.sample(model, Tokenizer, config)
        events = list(notes.events)  # what dies with this function doesn't count
    return config.batch_size, events


def load(script: Path):
    """A script as a module."""
    spec = importlib.util.spec_from_file_location("traced", script)
    module = importlib.util.module_from_spec(spec)
    sys.modules["traced"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def predict(
    script: Path, options: list[str], batch: int | None, capacities: dict[str, int]
) -> dict:
    """`reserved`: (the batch, bytes that it reserves without a limit); `largest`: for each card the
    largest power of two that fits its bytes, and what that reserves; (0, 0) if none does."""
    module = load(script)
    size, events = trace(module, [*options, *(["--batch-size", str(batch)] if batch else [])])
    largest = dict.fromkeys(capacities, (0, 0))
    for power in BATCHES:
        left = [card for card, (known, _) in largest.items() if known == power // 2]
        if not left:
            break
        _, own = trace(module, [*options, "--batch-size", str(power)])
        for card in left:
            try:
                largest[card] = power, simulate(own, capacities[card]).reserved
            except DoesNotFit:
                pass
    return dict(reserved=(size, simulate(events).reserved), largest=largest)


if __name__ == "__main__":
    request = json.loads(sys.argv[1])
    messages = io.StringIO()
    with contextlib.redirect_stdout(messages):  # a script may print that this is no GPU
        answer = predict(Path(request.pop("script")), **request)
    print(json.dumps(answer))
