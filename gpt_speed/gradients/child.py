"""Keeps the first gradients of somebody's script, in a process of its own, before its first update.

    python gpt_speed/gradients/child.py '{"report": "FILE", ...}' SCRIPT ITS ARGUMENTS

The order says how the script runs, and what is kept:

    report       the file of the facts, as JSON
    keep         the file of the weights and gradients, for other runs to compare theirs to; or ""
    compare      such a file of another run, which the gradients are compared to; or ""
    float32      whether autocast is off
    same_masks   whether a compiled program draws random numbers as an uncompiled one does
    jitter       by how much all weights are changed, relative to them; 0: not
    switches     of the compiler, that may mend a wrong gradient: see SWITCHES
    seconds      for numeric derivatives; 0: none are made

Whether torch.compile compiles says TORCH_COMPILE_DISABLE. The facts are:

    how          "kept", or "ended", "failed" with an `error`
    torch, weights, backwards, updates, autocast, types, compiles, graphs, budget, checkpoints,
    functions, loss, batch
                 what was seen: see Keeper
    tensors      by name [the norm of the difference to the other gradient, relative to that one's;
                 the cosine; the ratio of the norms]
    weight_change, the largest of the weights' relative differences
    derivatives  by name [numeric derivative, its uncertainty, by autograd], and the `noise`

Only PyTorch and the standard library are imported, from PyTorch 2.4 and Python 3.10 on, and nothing
of this repository: the script may have the same names.
"""

import contextlib
import functools
import gc
import importlib
import json
import os
import random
import runpy
import sys
import time
import zlib
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves, tree_map

PACKAGE = Path(__file__).resolve().parents[1]
script = runpy.run_path(str(PACKAGE / "script.py"))
numeric = runpy.run_path(str(PACKAGE / "numeric.py"))
MOST_CALLS = 32  # that are evaluated again for numeric derivatives
# What may mend a wrong gradient: the module of PyTorch with a setting, its name, and its value. The
# variables and the backend are set elsewhere.
SWITCHES = {
    "allow_buffer_reuse": ("torch._inductor.config", "allow_buffer_reuse", False),
    "memory_budget": ("torch._functorch.config", "activation_memory_budget", 1.0),
}


class Call:
    """A call of a model, or of a compiled function, that can be made again: with the same random
    numbers, at other weights."""

    def __init__(self, function, args: tuple, kwargs: dict):
        self.function = function
        self.args, self.kwargs = tree_map(cut_off, (args, kwargs))
        self.random = random_state()
        self.cotangents = {}  # the loss's gradient by the call's outputs, by their places

    def watch(self, output) -> None:
        """Keeps the gradients by the outputs, once they are computed."""
        for place, tensor in differentiable(output):
            tensor.register_hook(functools.partial(self.take, place))

    def take(self, place: int, gradient) -> None:
        if gradient is not None:  # as of logits that the loss doesn't need
            self.cotangents[place] = gradient.detach().double()

    def loss(self) -> torch.Tensor:
        """Returns a sum of the outputs whose gradient by the weights is the loss's."""
        set_random_state(self.random)
        output = self.function(*self.args, **self.kwargs)
        parts = [
            (tensor.double() * self.cotangents[place]).sum()
            for place, tensor in differentiable(output)
            if place in self.cotangents
        ]
        return torch.stack(parts).sum()


class Keeper:
    """What is seen of the script."""

    def __init__(self, order: dict):
        self.order = order
        self.optimizers = []
        self.gradients = {}  # by parameter, after the last backward pass before its update
        self.backwards = 0
        self.updates = 0  # that began without gradients: their closures compute them
        self.depth = 0  # of backward passes that run now
        self.loss = None  # of the first one
        self.calls = []
        self.inside = False  # a call
        self.batch = None  # a checksum of what the first call is given
        self.is_jittered = False
        self.compiles = 0  # times that torch.compile was asked
        self.budget = 1.0  # the compiler's, for what it keeps for the backward pass
        self.checkpoints = 0  # calls of activation checkpointing, where nothing is compiled
        self.functions = set()  # the names of autograd functions that aren't PyTorch's
        self.autocast = None  # the type, where autocast was on

    # ---- Hooks

    def add_optimizer(self, optimizer, *_, **__) -> None:
        if not any(optimizer is other for other in self.optimizers):
            self.optimizers.append(optimizer)

    def begin_backward(self, *args, **kwargs):
        """A hook before torch.autograd.backward; returns one for after it."""
        tensors = args[0] if args else kwargs.get("tensors")
        first = next(iter(tree_leaves(tensors)), None)
        if self.loss is None and first is not None and first.numel() == 1:
            self.loss = first.item()
        if not self.backwards:
            self.functions |= functions_in(first)
        self.depth += 1
        return self.end_backward

    def end_backward(self) -> None:
        self.depth -= 1
        self.backwards += 1
        if not self.depth:
            self.keep()

    def keep(self) -> None:
        """Keeps the gradients as they are now: before the script clips them."""
        for parameter in self.parameters():
            if parameter.grad is not None:
                self.gradients[parameter] = parameter.grad.detach().float().cpu().clone()

    def begin_update(self, *_) -> None:
        """A hook before an optimizer's update: the script ends here."""
        if self.depth:  # an optimizer in the backward pass: others follow
            self.keep()
            return
        if self.gradients:
            finish("kept")
        self.updates += 1

    def call(self, function, *args, **kwargs):
        """Makes a call that isn't inside of another one, and keeps how to make it again."""
        if self.inside or not torch.is_grad_enabled():
            return function(*args, **kwargs)
        self.inside = True
        try:
            if self.batch is None:
                self.batch = checksum(args, kwargs)
            self.jitter()
            call = Call(function, args, kwargs)
            output = function(*args, **kwargs)
            if len(self.calls) < MOST_CALLS and any(differentiable(output)):
                call.watch(output)
                self.calls.append(call)
            return output
        finally:
            self.inside = False

    def jitter(self) -> None:
        """Changes all weights a little, once: that does to a gradient what rounding does."""
        if self.is_jittered or not self.order["jitter"]:
            return
        self.is_jittered = True
        draw = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.parameters():
                noise = torch.randn(parameter.shape, generator=draw).to(parameter.device)
                parameter.mul_(1 + self.order["jitter"] * noise)

    # ---- What was seen

    def parameters(self) -> list:
        """Returns the parameters of all optimizers, each once."""
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        return [*dict.fromkeys(parameter for group in groups for parameter in group["params"])]

    def facts(self) -> dict:
        return dict(
            torch=torch.__version__,
            weights=len(self.gradients),
            backwards=self.backwards,
            updates=self.updates,
            autocast=self.autocast,
            types=sorted({str(weight.dtype).removeprefix("torch.") for weight in self.gradients}),
            compiles=self.compiles,
            graphs=graph_count(),
            budget=self.budget,
            checkpoints=self.checkpoints,
            functions=sorted(self.functions),
            loss=self.loss,
            batch=self.batch,
        )


def cut_off(value):
    """Returns a tensor without what made it, and other values as they are."""
    if not isinstance(value, torch.Tensor) or value.grad_fn is None:
        return value
    return value.detach().requires_grad_()


def graph_count() -> int:
    """Returns how many graphs torch.compile has made."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils.counters["stats"]["unique_graphs"] if utils else 0


def random_state() -> list:
    gpu = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), gpu]


def set_random_state(state: list) -> None:
    cpu, gpu = state
    torch.set_rng_state(cpu)
    if gpu:
        torch.cuda.set_rng_state_all(gpu)


def differentiable(output) -> list[tuple[int, torch.Tensor]]:
    """Returns the tensors of an output through which gradients flow, with their places."""
    return [
        (place, leaf)
        for place, leaf in enumerate(tree_leaves(output))
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.grad_fn is not None
    ]


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


def functions_in(loss) -> set[str]:
    """Returns the names of the autograd functions behind a loss that aren't PyTorch's."""
    names, seen = set(), set()
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


def names_of(parameters: list) -> dict:
    """Returns a name for each parameter: by the outermost module that has it."""
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.nn.Module)]
    inner = {child for module in modules for child in module.children()}
    names = {}
    for module in modules:
        if module not in inner:
            for name, parameter in module.named_parameters():
                names.setdefault(parameter, without_wrappers(name))
    for number, parameter in enumerate(parameters):
        names.setdefault(parameter, f"parameter {number} {tuple(parameter.shape)}")
    return names


def without_wrappers(name: str) -> str:
    """Returns a parameter's name without what torch.compile and DDP put in front."""
    return ".".join(part for part in name.split(".") if part not in ("_orig_mod", "module"))


# ---- Comparing


def read_other() -> dict:
    """Reads what another run has kept; {} where there is nothing to compare to."""
    return torch.load(keeper.order["compare"]) if keeper.order["compare"] else {}


def names_as_in(other: dict) -> dict:
    """Returns the parameters' names: those of the other run, where torch.compile may hide them.
    Raises ValueError where that one has other parameters."""
    parameters = keeper.parameters()
    if not other:
        return names_of(parameters)
    shapes = [tuple(parameter.shape) for parameter in parameters]
    if shapes != [shape for _, shape in other["names"]]:
        raise ValueError("it has other parameters than in another run")
    return {
        parameter: name for parameter, (name, _) in zip(parameters, other["names"], strict=True)
    }


def comparison_facts(names: dict, other: dict) -> dict:
    """Returns how far this run's gradients and weights are from those of another run, and keeps
    them for further runs."""
    gradients = {names[parameter]: value for parameter, value in keeper.gradients.items()}
    weights = {names[p]: p.detach().float().cpu() for p in keeper.gradients}
    if keeper.order["keep"]:
        order = [(names[parameter], tuple(parameter.shape)) for parameter in keeper.parameters()]
        kept = dict(gradients=gradients, weights=weights, names=order)
        torch.save(kept, keeper.order["keep"])
    if not other:
        return {}
    differences = numeric["differences"]
    changes = [error for error, *_ in differences(weights, other["weights"]).values()]
    return dict(tensors=differences(gradients, other["gradients"]), weight_change=max(changes))


# ---- Numeric derivatives


def derivative_facts(names: dict, seconds: float) -> dict:
    """Returns derivatives of the loss along a random direction in each parameter, by autograd and
    by the loss at other weights, until the time is over. The calls are made again one by one, each
    weighted as the loss's gradient by its outputs says, so that its own gradient is checked."""
    end = time.monotonic() + seconds
    calls = [call for call in keeper.calls if call.cotangents]
    parameters = [weight for weight in keeper.gradients if weight.dtype == torch.float32]
    if not calls or not parameters:
        return dict(derivatives={}, noise=None)
    total = torch.stack([call.loss() for call in calls]).sum()
    gradients = torch.autograd.grad(total, parameters, allow_unused=True)
    noise = noise_of(calls, parameters)
    pairs = [*zip(parameters, gradients, strict=True)]
    random.Random(0).shuffle(pairs)
    derivatives = {}
    for parameter, gradient in pairs:
        if gradient is not None and time.monotonic() < end:
            name = names[parameter]
            derivatives[name] = derivative_of(calls, parameter, gradient.double(), name, noise)
    return dict(derivatives=derivatives, noise=noise)


def derivative_of(calls: list[Call], parameter, gradient, name: str, noise: float) -> list[float]:
    """Returns [numeric derivative, its uncertainty, by autograd] along a random direction."""
    size = parameter.detach().square().mean().sqrt().item() or 0.02  # all zeros: as GPT-2's
    direction = size * randn_like(parameter, name)
    usual = size * gradient.norm().item()  # the slope of a random direction, about

    def loss_towards(distance: float) -> float:
        return loss_at(calls, {parameter: distance * direction})

    estimate = numeric["loss_derivative"](loss_towards, usual, noise)
    return [*estimate, (gradient * direction.double()).sum().item()]


def loss_at(calls: list[Call], offsets: dict) -> float:
    """Returns the loss at other weights."""
    with moved(offsets):
        return sum(call.loss().item() for call in calls)


class moved:
    """A context in which weights have offsets."""

    def __init__(self, offsets: dict):
        self.offsets = offsets

    @torch.no_grad()
    def __enter__(self):
        self.before = {parameter: parameter.detach().clone() for parameter in self.offsets}
        for parameter, offset in self.offsets.items():
            parameter.add_(offset)

    @torch.no_grad()
    def __exit__(self, *_):
        for parameter, value in self.before.items():
            parameter.copy_(value)


def noise_of(calls: list[Call], parameters: list) -> float:
    """Returns the standard deviation of the loss by rounding alone."""
    jitter = numeric["JITTER"]
    losses = [
        loss_at(calls, {p: jitter * p.detach() * randn_like(p, str(number)) for p in parameters})
        for number in range(numeric["JITTERS"])
    ]
    return numeric["noise_of"](losses)


def randn_like(parameter, name: str) -> torch.Tensor:
    draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(parameter.shape, generator=draw).to(parameter.device)


# ---- The process


def set_seeds() -> None:
    random.seed(0)
    torch.manual_seed(0)
    with contextlib.suppress(ImportError):  # the script may not need it
        import numpy

        numpy.random.seed(0)


def note_autocast(autocast) -> None:
    """Notes the type of autocast where it is on, and switches it off where that is wanted."""
    real = autocast.__init__

    @functools.wraps(real)
    def init(self, *args, **kwargs):
        real(self, *args, **kwargs)
        if self._enabled:
            keeper.autocast = str(self.fast_dtype).removeprefix("torch.")
        if keeper.order["float32"]:
            self._enabled = False

    autocast.__init__ = init


def note_compile() -> None:
    """Lets the keeper see the calls of what torch.compile returns, and sets its switches."""
    real, real_method = torch.compile, torch.nn.Module.compile
    backend = {"backend": "aot_eager"} if "aot_eager" in keeper.order["switches"] else {}

    def compile(model=None, **options):
        if model is None:
            return lambda function: compile(function, **options)
        keeper.compiles += 1
        compiled = real(model, **options | backend)
        if isinstance(compiled, torch.nn.Module):
            return compiled
        return functools.wraps(model)(functools.partial(seen_call, compiled))

    def compile_in_place(module, *args, **options):
        keeper.compiles += 1
        real_method(module, *args, **options | backend)
        module._compiled_call_impl = functools.partial(seen_call, module._compiled_call_impl)

    torch.compile, torch.nn.Module.compile = compile, compile_in_place
    eval_frame = importlib.import_module("torch._dynamo.eval_frame")
    note_calls_of(eval_frame.OptimizedModule)


def note_calls_of(module_class) -> None:
    real = module_class.__call__

    def called(module, *args, **kwargs):
        return seen_call(functools.partial(real, module), *args, **kwargs)

    module_class.__call__ = called


def seen_call(function, *args, **kwargs):
    if torch.compiler.is_compiling():  # inside of another compiled program
        return function(*args, **kwargs)
    for switch in keeper.order["switches"]:
        set_switch(switch)
    if "torch._functorch.config" in sys.modules:
        budget = sys.modules["torch._functorch.config"].activation_memory_budget
        keeper.budget = min(keeper.budget, budget)
    return keeper.call(function, *args, **kwargs)


def set_switch(name: str) -> None:
    if name in SWITCHES:
        module, setting, value = SWITCHES[name]
        setattr(sys.modules[module], setting, value)


def note_checkpoints() -> None:
    """Counts the calls of activation checkpointing; only where nothing is compiled, since the
    compiler knows PyTorch's function by its identity."""

    def count(*_, **__):
        keeper.checkpoints += 1

    checkpoint = importlib.import_module("torch.utils.checkpoint")
    script["hook"](checkpoint, "checkpoint", count)


def prepare() -> None:
    """Sets the hooks and the seeds."""
    set_seeds()
    script["hook"](torch.optim.Optimizer, "add_param_group", keeper.add_optimizer)
    script["hook"](torch.autograd, "backward", keeper.begin_backward)
    register_optimizer_step_pre_hook(keeper.begin_update)
    note_autocast(torch.amp.autocast_mode.autocast)
    torch.set_float32_matmul_precision = lambda precision: None  # TF32 would hide what is off
    if COMPILES:
        config = importlib.import_module("torch._inductor.config")
        config.fallback_random = keeper.order["same_masks"]
        note_compile()
    else:
        note_checkpoints()
        note_calls_of(torch.nn.Module)
        script["hook"](torch, "compile", count_compiles)
        script["hook"](torch.nn.Module, "compile", count_compiles)


def count_compiles(*_, **__) -> None:
    keeper.compiles += 1


def finish(how: str, error: str = "") -> None:
    """Writes the report and ends the process, so that nothing more of the script runs."""
    facts = dict(how=how, error=error, **keeper.facts())
    if how == "kept":
        other = read_other()
        names = names_as_in(other)
        facts |= comparison_facts(names, other)
        if keeper.order["seconds"]:
            facts |= derivative_facts(names, keeper.order["seconds"])
    script["write_report"](keeper.order["report"], facts)
    script["kill"]()


def main() -> None:
    """Runs the script; always ends the process."""
    prepare()
    error = script["run_script"](sys.argv[2:])
    finish("failed" if error else "ended", error)


if __name__ == "__main__":
    COMPILES = os.environ.get("TORCH_COMPILE_DISABLE") != "1"
    keeper = Keeper(json.loads(sys.argv[1]))
    main()
