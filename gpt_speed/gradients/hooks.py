"""Hooks in PyTorch by which a keeper sees what a script does."""

import importlib
import os
import sys
from functools import partial, wraps

import torch

from gpt_speed.gradients.keeper import Keeper
from gpt_speed.gradients.order import Mend
from gpt_speed.pytorch import memory_budget, type_name
from gpt_speed.script import hook


def set_hooks(keeper: Keeper) -> None:
    """Sets all hooks but that of the update."""

    def add_optimizer(optimizer, *_, **__) -> None:
        keeper.add_optimizer(optimizer)

    hook(torch.optim.Optimizer, "add_param_group", add_optimizer)
    hook(torch.autograd, "backward", keeper.begin_backward)
    hook_autocast(keeper)
    torch.set_float32_matmul_precision = ignore_precision
    if os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        hook_uncompiled(keeper)
    else:
        hook_compiler(keeper)


def ignore_precision(precision: str) -> None:
    """Replaces the function that switches TF32 on, which would hide what is off."""


def hook_autocast(keeper: Keeper) -> None:
    """Notes the type of autocast where it is on, and switches it off where that is ordered."""
    autocast = torch.amp.autocast_mode.autocast
    own_init = autocast.__init__

    @wraps(own_init)
    def init(self, *args, **kwargs):
        own_init(self, *args, **kwargs)
        if self._enabled:
            keeper.facts.autocast = type_name(self.fast_dtype)
        if keeper.order.float32:
            self._enabled = False

    autocast.__init__ = init


# ---- Where nothing is compiled


def hook_uncompiled(keeper: Keeper) -> None:
    """Keeps the calls of modules; counts those of torch.compile and of activation checkpointing.
    The compiler knows checkpoint() by its identity, so it is replaced only here."""

    def count_compile(*_, **__) -> None:
        keeper.facts.compiles += 1

    def count_checkpoint(*_, **__) -> None:
        keeper.facts.checkpoints += 1

    keep_calls_of(torch.nn.Module, keeper.call)
    hook(torch, "compile", count_compile)
    hook(torch.nn.Module, "compile", count_compile)
    hook(importlib.import_module("torch.utils.checkpoint"), "checkpoint", count_checkpoint)


def keep_calls_of(module_class: type, call) -> None:
    """Lets `call` make the calls of modules."""
    own_call = module_class.__call__

    def called(module, *args, **kwargs):
        return call(partial(own_call, module), *args, **kwargs)

    module_class.__call__ = called


# ---- The compiler


def hook_compiler(keeper: Keeper) -> None:
    """Keeps the calls of what torch.compile and Module.compile make, and sets what mends."""
    config = importlib.import_module("torch._inductor.config")
    config.fallback_random = keeper.order.same_masks
    call = partial(call_compiled, keeper)
    torch.compile = compile_in_place_of(torch.compile, keeper, call)
    torch.nn.Module.compile = method_in_place_of(torch.nn.Module.compile, keeper, call)
    keep_calls_of(importlib.import_module("torch._dynamo.eval_frame").OptimizedModule, call)


def compile_in_place_of(own_compile, keeper: Keeper, call):
    """Returns what replaces torch.compile: `call` makes the calls of functions that it compiles."""

    def compile(model=None, **options):
        if model is None:  # it decorates
            return partial(compile, **options)
        keeper.facts.compiles += 1
        compiled = own_compile(model, **options | backend_options(keeper))
        if isinstance(compiled, torch.nn.Module):  # whose class has other calls: see hook_compiler
            return compiled
        return called_by(call, model, compiled)

    return compile


def called_by(call, function, compiled):
    """Returns a function like the one that was compiled, whose calls `call` makes. It is one
    itself, so that it also binds as a method."""

    @wraps(function)
    def called(*args, **kwargs):
        return call(compiled, *args, **kwargs)

    return called


def method_in_place_of(own_method, keeper: Keeper, call):
    """Returns what replaces Module.compile: `call` makes the calls of the module."""

    def compile(module, *args, **options):
        keeper.facts.compiles += 1
        own_method(module, *args, **options | backend_options(keeper))
        module._compiled_call_impl = partial(call, module._compiled_call_impl)

    return compile


def backend_options(keeper: Keeper) -> dict[str, str]:
    """Returns the options of torch.compile that mend."""
    backend = keeper.order.mending.backend
    if not backend:
        return {}
    return dict(backend=backend)


def call_compiled(keeper: Keeper, function, *args, **kwargs):
    """Makes a call of a compiled program, and lets the keeper keep it."""
    if torch.compiler.is_compiling():  # inside of another compiled program
        return function(*args, **kwargs)
    set_what_mends(keeper.order.mending)
    keeper.facts.budget = min(keeper.facts.budget, memory_budget())  # the least that it might keep
    return keeper.call(function, *args, **kwargs)


def set_what_mends(mend: Mend) -> None:
    """Sets what mends before each call, since the script may have set it meanwhile."""
    for name, value in mend.settings.items():
        setattr(sys.modules[mend.module], name, value)
