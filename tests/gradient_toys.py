"""Small training scripts whose gradients are right or wrong: gradient_toys.py NAME"""

import contextlib
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

V, C, B, T = 64, 32, 8, 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(C)
        self.up, self.down = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """`call` calls a block, and `middle` is between the blocks and the head."""

    def __init__(self, call=lambda block, x: block(x), middle=None):
        super().__init__()
        self.tokens = nn.Embedding(V, C)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(C, V, bias=False)
        self.call, self.middle = call, middle

    def forward(self, ids, targets):
        x = self.tokens(ids)
        for block in self.blocks:
            x = self.call(block, x)
        if self.middle:
            x = self.middle(x)
        logits = self.head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class WrongNorm(torch.autograd.Function):
    """A root mean square norm whose gradient lacks a term."""

    @staticmethod
    def forward(context, x):
        root = (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        context.save_for_backward(root)
        return x / root

    @staticmethod
    def backward(context, gradient):
        (root,) = context.saved_tensors
        return gradient / root


class TwoBiases(nn.Module):
    """A softmax doesn't change with the second one, whose gradient is nothing but rounding."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Linear(C, C)
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return x * torch.softmax(self.weight(x) + self.shift, -1)


def batch():
    ids = torch.randint(V, (B, T + 1))
    return ids[:, :-1], ids[:, 1:]


def train(model, context=contextlib.nullcontext, optimizer=torch.optim.AdamW, batch=batch):
    """Two micro-batches in each step, and clipped gradients, as scripts have them."""
    optimizer = optimizer(model.parameters(), lr=1e-3)
    for _ in range(3):
        for _ in range(2):
            with context():
                _, loss = model(*batch())
            (loss / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def plain():
    train(Net())


def compiled():
    train(torch.compile(Net(middle=TwoBiases())))


def autocast():
    train(torch.compile(Net()), lambda: torch.autocast("cpu", torch.bfloat16))


def compiled_in_place():
    model = Net()
    model.compile()
    train(model)


def compiled_loss():
    """A function that calls the model, and one that it calls."""
    model, halve = Net(middle=lambda x: half(x)), torch.compile(lambda x: x / 2)

    def half(x):
        return halve(x)

    loss_of = torch.compile(lambda ids, targets: model(ids, targets))
    loss_of.parameters = model.parameters
    train(loss_of)


def memory_budget():
    """Wrong in PyTorch 2.13: the masks are drawn anew in the backward pass."""
    import torch._functorch.config

    torch._functorch.config.activation_memory_budget = 0.3
    train(torch.compile(Net()))


def checkpointed():
    train(Net(lambda block, x: checkpoint(block, x, use_reentrant=False)))


def checkpointed_with_other_masks():
    def call(block, x):
        return checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)

    train(Net(call))


def wrong_norm():
    train(Net(middle=WrongNorm.apply))


class Regions(nn.Module):
    """Wrong in PyTorch 2.13: what a region's backward pass needs is overwritten."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(C, C))
        self.region = torch.compiler.nested_compile_region(lambda x: x.sin())

    def forward(self, ids, targets):
        x = self.region(self.region(self.weight + 1)).exp()
        return x, (x @ self.weight).sum()


def nested_region():
    train(torch.compile(Regions()))


def drawn_from_the_clock():
    import time

    def other_batch():
        torch.manual_seed(time.perf_counter_ns() % 2**31)
        return batch()

    train(torch.compile(Net()), batch=other_batch)


def closure():
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def loss_of():
        optimizer.zero_grad()
        _, loss = model(*batch())
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(loss_of)


def by_hand():
    model = Net()
    for _ in range(2):
        model(*batch())[1].backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 1e-3 * parameter.grad


def fails():
    raise ValueError("the real reason\nand a second line")


if __name__ == "__main__":
    globals()[sys.argv[1]]()
