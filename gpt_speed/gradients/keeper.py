"""What is kept of a script until its first update: facts, gradients, and the calls of its model."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.utils._pytree import tree_leaves

from gpt_speed.gradients.calls import Call, differentiable
from gpt_speed.gradients.order import Order
from gpt_speed.pytorch import graph_count, type_name

MOST_CALLS = 32  # that are made again for numeric derivatives


@dataclass
class Facts:
    """What the report says of the script."""

    loss: float | None = None  # the loss of the first backward pass
    batch: int | None = None  # a checksum of what the first call is given
    backwards: int = 0  # how many backward passes have ended
    updates: int = 0  # how many updates began without gradients, which their closures compute
    autocast: str | None = None  # the type of autocast, where it was on
    compiles: int = 0  # how often the script asked for torch.compile
    budget: float = 1.0  # the share of activations that the compiler keeps for the backward pass
    checkpoints: int = 0  # calls of activation checkpointing, where nothing is compiled
    functions: list[str] = field(default_factory=list)  # autograd functions of others, sorted


class Keeper:
    """Keeps what a script does until its first update. Hooks call its methods: see hooks.py."""

    def __init__(self, order: Order):
        self.order = order
        self.facts = Facts()
        self.optimizers = []
        self.gradients = {}  # by parameter, as the last backward pass left them
        self.calls: list[Call] = []
        self.backward_depth = 0  # how many backward passes run now, one within another
        self.keeps_calls = True  # not within a call that is kept, and until the update begins
        self.is_jittered = False

    # ---- The backward pass

    @property
    def is_in_backward(self) -> bool:
        return self.backward_depth > 0

    def begin_backward(self, tensors=None, *_, **__) -> Callable[[], None]:
        """Is called before torch.autograd.backward; returns what is called after it."""
        first = next(iter(tree_leaves(tensors)), None)
        if self.facts.loss is None and first is not None and first.numel() == 1:
            self.facts.loss = first.item()
        if not self.facts.backwards:
            self.facts.functions = sorted(functions_behind(first))
        self.backward_depth += 1
        return self.end_backward

    def end_backward(self) -> None:
        self.backward_depth -= 1
        self.facts.backwards += 1
        if not self.is_in_backward:
            self.keep_gradients()

    def keep_gradients(self) -> None:
        """Keeps the gradients as they are now: before the script clips them."""
        for parameter in self.parameters():
            if parameter.grad is not None:
                self.gradients[parameter] = parameter.grad.detach().float().cpu().clone()

    def begin_update(self) -> None:
        """Is called before an optimizer's update."""
        if self.is_in_backward:  # it updates one tensor; the other gradients follow
            self.keep_gradients()
        elif not self.gradients:  # its closure will compute them
            self.facts.updates += 1
        else:  # all is kept: the calls that follow are those that numeric derivatives make again
            self.keeps_calls = False

    @property
    def is_complete(self) -> bool:
        """Whether all gradients are kept, so that the script can end with the update."""
        return bool(self.gradients) and not self.is_in_backward

    # ---- Calls of the model

    def call(self, function, *args, **kwargs):
        """Makes a call; one that isn't inside of another one is kept, to be made again."""
        if not self.keeps_calls or not torch.is_grad_enabled():
            return function(*args, **kwargs)
        self.keeps_calls = False
        try:
            return self.kept_call(function, args, kwargs)
        finally:
            self.keeps_calls = True

    def kept_call(self, function, args: tuple, kwargs: dict):
        """Makes a call and keeps it; the first one with weights that are changed as ordered."""
        if self.facts.batch is None:
            self.facts.batch = checksum(args, kwargs)
        if self.order.jitter and not self.is_jittered:
            self.is_jittered = True
            self.jitter()
        call = Call(function, args, kwargs)
        output = function(*args, **kwargs)
        if len(self.calls) < MOST_CALLS and differentiable(output):
            call.watch(output)
            self.calls.append(call)
        return output

    @torch.no_grad()
    def jitter(self) -> None:
        """Changes all weights a little: that does to a gradient what rounding does."""
        draw = torch.Generator().manual_seed(1)
        for parameter in self.parameters():
            noise = torch.randn(parameter.shape, generator=draw).to(parameter.device)
            parameter.mul_(1 + self.order.jitter * noise)

    # ---- The parameters

    def add_optimizer(self, optimizer) -> None:
        if not any(optimizer is other for other in self.optimizers):
            self.optimizers.append(optimizer)

    def parameters(self) -> list:
        """Returns the parameters of all optimizers, each once."""
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        return [*dict.fromkeys(parameter for group in groups for parameter in group["params"])]

    def report(self) -> dict:
        """Returns the facts, and what else is known of the gradients."""
        return vars(self.facts) | dict(
            torch=torch.__version__,
            weights=len(self.gradients),
            types=sorted({type_name(weight.dtype) for weight in self.gradients}),
            graphs=graph_count(),
        )


def checksum(*values) -> int:
    """Returns a number that differs where tensors do."""
    total = 0
    for leaf in tree_leaves(values):
        if isinstance(leaf, torch.Tensor):
            numbers = leaf.detach().cpu().flatten().double()
            places = torch.arange(len(numbers)) % 1021
            facts = len(numbers), numbers.sum().item(), (numbers * places).sum().item()
            total = zlib.crc32(repr(facts).encode(), total)
    return total


def functions_behind(loss) -> set[str]:
    """Returns the names of the autograd functions behind a loss that aren't PyTorch's."""
    names = set()
    seen = set()
    nodes = [getattr(loss, "grad_fn", None)]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [parent for parent, _ in node.next_functions]
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            function = type(node)._forward_cls
            if not function.__module__.startswith("torch."):
                names.add(function.__name__)
    return names
