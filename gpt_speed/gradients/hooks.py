"""Hooks in PyTorch by which a keeper sees what a script does."""

import importlib
import os
import sys
from functools import partial, wraps

import torch

from gpt_speed.gradients.keeper import Keeper
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
    compiler = Compiler(keeper)

    def compile_module(module, *args, **options) -> None:  # a function: it binds as a method
        compiler.compile_module(module, *args, **options)

    torch.compile = compiler.compile
    torch.nn.Module.compile = compile_module
    optimized_module = importlib.import_module("torch._dynamo.eval_frame").OptimizedModule
    keep_calls_of(optimized_module, compiler.call)


class Compiler:
    """Stands in for torch.compile and Module.compile; the calls of what they make are kept."""

    def __init__(self, keeper: Keeper):
        self.keeper, self.mend = keeper, keeper.order.mending
        self.own_compile, self.own_compile_module = torch.compile, torch.nn.Module.compile
        self.options = {}  # of both, that mend
        if self.mend.backend:
            self.options = dict(backend=self.mend.backend)

    def compile(self, model=None, **options):
        """Stands in for torch.compile."""
        if model is None:  # it decorates
            return partial(self.compile, **options)
        self.keeper.facts.compiles += 1
        compiled = self.own_compile(model, **options | self.options)
        if isinstance(compiled, torch.nn.Module):  # whose class has other calls: see hook_compiler
            return compiled

        @wraps(model)
        def called(*args, **kwargs):  # a function, so that it also binds as a method
            return self.call(compiled, *args, **kwargs)

        return called

    def compile_module(self, module: torch.nn.Module, *args, **options) -> None:
        """Stands in for Module.compile."""
        self.keeper.facts.compiles += 1
        self.own_compile_module(module, *args, **options | self.options)
        module._compiled_call_impl = partial(self.call, module._compiled_call_impl)

    def call(self, function, *args, **kwargs):
        """Makes a call of a compiled program, and lets the keeper keep it."""
        if torch.compiler.is_compiling():  # inside of another compiled program
            return function(*args, **kwargs)
        self.set_what_mends()
        facts = self.keeper.facts
        facts.budget = min(facts.budget, memory_budget())  # the least that the compiler might keep
        return self.keeper.call(function, *args, **kwargs)

    def set_what_mends(self) -> None:
        """Sets what mends before each call, since the script may have set it meanwhile."""
        for name, value in self.mend.settings.items():
            setattr(sys.modules[self.mend.module], name, value)
