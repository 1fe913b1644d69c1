"""Names of a script's parameters."""

import torch

from gpt_speed.pytorch import living


def names_of(parameters: list) -> dict:
    """Returns a name for each parameter: by the outermost module that has it, or by its number."""
    names = {}
    for module in outermost_modules():
        for name, parameter in module.named_parameters():
            names.setdefault(parameter, without_wrappers(name))
    for number, parameter in enumerate(parameters):
        names.setdefault(parameter, f"parameter {number} {tuple(parameter.shape)}")
    return names


def outermost_modules() -> list[torch.nn.Module]:
    """Returns the modules of this process that are no part of another one."""
    modules = living(torch.nn.Module)
    inner = {child for module in modules for child in module.children()}
    return [module for module in modules if module not in inner]


def without_wrappers(name: str) -> str:
    """Returns a parameter's name without what torch.compile and DDP put in front."""
    return ".".join(part for part in name.split(".") if part not in ("_orig_mod", "module"))
