"""Checks the gradients of one script, in a process of its own; the study `gradients` starts it.

    python bench/measure/gradients.py --reference 00_orig.py 01_opt_single_gpu.py [its options]
    torchrun --nproc_per_node=2 bench/measure/gradients.py 02_opt_multi_gpu_ddp.py [its options]

The script trains by its own main() and train(), but each step is made to begin from given weights,
on the same batch, with the same random numbers. The gradients are those that its optimizer is
given. The record in --results-dir is that of the script's last run, with an event `gradients` for
each comparison that was made:

    comparison   "compiled to uncompiled", "uncompiled to reference", "compiled to reference",
                 "dropout"
    tensors      of the first three: by tensor [the norm of the difference between both gradients,
                 relative to that of the second one; the cosine between them; the ratio of norms]
    directions   of dropout: by tensor [numeric derivative, its uncertainty, by autograd] of each
    loss_noise   of dropout: the standard deviation of the loss by rounding alone
    refused      of dropout: why the script doesn't train with dropout; there is nothing else then

It imports nothing of the tools, since torchrun starts it from anywhere.
"""

import argparse
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import zlib
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import distribute_tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

RANK = int(os.environ.get("RANK") or 0)
RANKS = int(os.environ.get("WORLD_SIZE") or 1)
IDS = 256  # the batch has so many different tokens, each of them often
STEPS = 2  # of a run; the gradients are those of the last one
JITTERS, JITTER = 8, 1e-6  # weights so near each other that the loss differs by its rounding alone
CHANGE = 2e-3  # of the loss by a step of a numeric derivative, in nats, about
TINY = 1e-30  # in place of a norm of 0
LARGEST = 0.3  # of such steps, relative to the tensor's size


# By the device: a small model, whose loss takes two chunks, the second one shorter; or layers of
# GPT-2's own size, and more than 16,384 tokens, since some of a GPU's kernels are only made for
# that many. Batches can be cut into four.
MODEL = {"cpu": "cpu-demo", "cuda": "gpt2"}
SIZES = {
    "cpu": dict(layers=2, heads=2, width=32, context_length=144, vocab_size=320),
    "cuda": dict(layers=2, heads=12, width=768, context_length=1024),
}
BATCH = {"cpu": 8, "cuda": 20}
DROPOUT = 0.1
DIRECTIONS = {"cpu": 3, "cuda": 1}  # of numeric derivatives, in each tensor


class Refused(Exception):
    """The script doesn't run with these options."""


class TrainingRun:
    """One training run of a script, and its gradients at the weights that it was given."""

    def __init__(self, script, sizes: dict, given: dict[str, torch.Tensor] | None):
        self.script, self.sizes, self.given = script, sizes, given
        self.weights: dict[str, torch.Tensor] = {}
        self.gradients: dict[str, torch.Tensor] = {}
        self.error: BaseException | None = None
        self.derivatives: dict = {}  # the event of numeric ones, once they are made
        self.wants_derivatives = False
        self.micro_batches: list[slice] = []  # the rows of the batch that each of a step has had
        # Whether the ranks of the script share the batch; 00 and 01 know no ranks.
        self.rank, self.ranks = (RANK, RANKS) if hasattr(script, "join_ranks") else (0, 1)

    def train(self, options: list[str]) -> None:
        """Lets the script train with these options. Raises Refused where it doesn't, and what else
        it raises."""
        script = self.script
        own = dict(
            train=self.start(script.train),
            compute_loss=self.loss_of,
            load_data=self.load_data,
            explain=self.explain(script.explain),
            evaluate=lambda *args: 1.0,
            sample=lambda *args: "",
        )
        self.compute_loss = script.compute_loss
        torch._dynamo.reset()
        with ExitStack() as stack:
            stack.callback(register_optimizer_step_pre_hook(self.keep_gradients).remove)
            stack.enter_context(mock.patch.multiple(script, **own))
            stack.enter_context(mock.patch.dict(script.MODELS, self.sizes))
            stack.enter_context(mock.patch.object(argparse.ArgumentParser, "error", refuse))
            stack.enter_context(mock.patch.object(sys, "argv", [script.__file__, *options]))
            # In TF32 a GPU's matmuls would hide what is looked for.
            stack.enter_context(mock.patch.object(torch, "set_float32_matmul_precision"))
            if dist.is_initialized():  # one group for all runs
                stack.enter_context(mock.patch.object(dist, "init_process_group"))
            stack.enter_context(mock.patch.object(dist, "destroy_process_group"))
            code = script.main()
        if isinstance(self.error, (Refused, script.UserError)):
            raise Refused(str(self.error))
        if self.error or code:
            raise self.error or RuntimeError(f"the script ended with {code}")

    # ---- In place of the script's own functions

    def load_data(self, config):
        """Returns enough text for an epoch; its tokens don't matter."""
        draw = np.random.default_rng(0)
        windows = 10 * config.batch_size * self.ranks
        ids = draw.integers(IDS, size=windows * config.context_length + 1, dtype=np.uint16)
        both = [self.script.TokenWindows(ids, config.context_length) for _ in range(2)]
        return self.script.Data({}, *both, None)

    def start(self, train):
        def start(model, data, config, run, now):
            self.model = model
            draw = torch.Generator().manual_seed(1)
            shape = 2, self.ranks, config.batch_size, config.context_length
            batches = torch.randint(IDS, shape, generator=draw)[:, self.rank]
            self.x_BT, self.y_BT = batches.to(config.device)
            self.weights = starting_weights(model, self.given)
            config.max_steps = STEPS
            train(model, data, config, run, self.between_steps(now))

        return start

    def between_steps(self, now):
        """Returns the clock, which train() asks before and after each step."""

        def between_steps(*args):
            if self.micro_batches and self.wants_derivatives and not self.derivatives:
                self.derivatives = derivatives_of(self)
            self.micro_batches = []
            self.set_weights()
            return now(*args)

        return between_steps

    def loss_of(self, model, x_BT, y_BT):
        """Returns the loss of a part of the batch, as large as the one that the script asks for."""
        first = self.micro_batches[-1].stop if self.micro_batches else 0
        rows = slice(first, first + len(x_BT))
        if not first:
            torch.manual_seed(7 + self.rank)  # the same masks in each step
        self.micro_batches.append(rows)
        self.training_model = model
        return self.compute_loss(model, self.x_BT[rows], self.y_BT[rows])

    def keep_gradients(self, optimizer, *_) -> None:
        """Keeps what an optimizer is given: one of several may have a part of the weights."""
        scale = getattr(optimizer, "grad_scale", None)  # of a fused one, which divides by it
        its = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
        for name, parameter in self.model.named_parameters():
            if id(parameter) in its and parameter.grad is not None:
                gradient = parameter.grad.detach()
                gradient = getattr(gradient, "full_tensor", gradient.clone)().double().cpu()
                self.gradients[name] = gradient if scale is None else gradient / scale.cpu()

    def explain(self, explain):
        def keep(error, config):
            self.error = error
            return explain(error, config)

        return keep

    # ---- At other weights

    @torch.no_grad()
    def set_weights(self, offsets: dict[str, torch.Tensor] | None = None) -> None:
        """Sets the weights that it was given, plus offsets of some."""
        for name, parameter in self.model.named_parameters():
            value = self.weights[name] + (offsets or {}).get(name, 0)
            value = value.to(parameter.device, parameter.dtype)
            if hasattr(parameter, "placements"):  # the rank has a share of it
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
            parameter.copy_(value)
        for module in self.model.modules():
            if hasattr(module, "reshard"):  # what it has gathered is of other weights
                module.reshard()

    def loss_at(self, offsets: dict[str, torch.Tensor]) -> float:
        """Returns the loss of a step at other weights, with the same masks, by the same graphs:
        with gradients enabled, since torch.no_grad() would make others, which draw other masks."""
        self.set_weights(offsets)
        torch.manual_seed(7 + self.rank)
        losses = [
            self.compute_loss(self.training_model, self.x_BT[rows], self.y_BT[rows])
            for rows in self.micro_batches
        ]
        loss = torch.stack([loss.detach().double() for loss in losses]).mean()
        if self.ranks > 1:
            dist.all_reduce(loss)
        return loss.item() / self.ranks


def refuse(parser, message: str) -> None:
    raise Refused(message)


def seeded(name: str) -> torch.Generator:
    """Returns a generator that every rank and every script has alike for a tensor."""
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))


def starting_weights(model, given: dict | None) -> dict[str, torch.Tensor]:
    """Returns the given weights, or the model's own with something added, so that none is zero; all
    are numbers that bfloat16 has."""
    weights = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach().float().cpu()
        if given and name in given and given[name].shape == value.shape:
            value = given[name]
        else:
            share = 0.1 if value.dim() < 2 else 0.3 / value.shape[-1] ** 0.5
            value = value + share * torch.randn(value.shape, generator=seeded(name))
        weights[name] = value.bfloat16().float()
    return weights


def canonical(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns tensors by the names of 01, which has query, key and value in one matrix."""
    merged = {}
    for name, value in tensors.items():
        if name.endswith(".query.weight"):
            stem = name.removesuffix("query.weight")
            parts = [tensors[f"{stem}{part}.weight"] for part in ("query", "key", "value")]
            merged[f"{stem}query_key_value.weight"] = torch.cat(parts)
        elif not name.endswith((".key.weight", ".value.weight")):
            merged[name] = value
    return merged


def compared(comparison: str, own: dict, other: dict) -> dict:
    """Returns the event of a comparison of gradients. A tensor that one lacks counts as 0."""
    tensors = {}
    for name in sorted(other.keys() | own.keys()):
        zeros = torch.zeros_like(own[name] if name in own else other[name])
        a, b = own.get(name, zeros), other.get(name, zeros)
        size, expected = max(a.norm().item(), TINY), max(b.norm().item(), TINY)
        tensors[name] = [
            (a - b).norm().item() / expected,
            (a * b).sum().item() / (size * expected),
            size / expected,
        ]
    return dict(event="gradients", comparison=comparison, tensors=tensors)


def derivatives_of(run: TrainingRun) -> dict:
    """Returns the event of numeric derivatives beside autograd's."""
    noise, device = noise_of(run), run.x_BT.device.type
    directions: dict[str, list] = {}
    for name, value in run.weights.items():
        size = value.square().mean().sqrt().item()
        gradient = run.gradients.get(name, torch.zeros(value.shape, dtype=torch.float64))
        slope = size * gradient.norm().item()  # of a random direction, about
        step = min(LARGEST, CHANGE / max(slope, TINY))
        directions[name] = []
        for number in range(DIRECTIONS[device]):
            direction = size * torch.randn(value.shape, generator=seeded(f"{name} {number}"))
            by_autograd = (gradient * direction).sum().item()
            directions[name].append([*derivative(run, name, direction, step, noise), by_autograd])
    return dict(event="gradients", comparison="dropout", directions=directions, loss_noise=noise)


def noise_of(run: TrainingRun) -> float:
    """Returns the standard deviation of the loss by rounding alone; at least that of its last
    digit."""
    losses = [
        run.loss_at(
            {
                name: JITTER
                * value
                * torch.randn(value.shape, generator=seeded(f"{name} jitter {number}"))
                for name, value in run.weights.items()
            }
        )
        for number in range(JITTERS)
    ]
    return max(np.std(losses, ddof=1), np.spacing(np.float32(losses[0])) / 12**0.5).item()


def derivative(
    run: TrainingRun,
    name: str,
    direction: torch.Tensor,
    step: float,
    noise: float,
) -> tuple[float, float]:
    """Returns a derivative along a direction, extrapolated from two central differences
    (Richardson), and its uncertainty: that by the loss's rounding, and a tenth of how far the two
    are apart."""
    wide, near = (
        (run.loss_at({name: h * direction}) - run.loss_at({name: -h * direction})) / (2 * h)
        for h in (step, step / 2)
    )
    # Of the extrapolation (4 near - wide) / 3, whose four losses weigh 4/3, 4/3, 1/6 and 1/6.
    rounding = noise / step * (2 * (4 / 3) ** 2 + 2 * (1 / 6) ** 2) ** 0.5
    return (4 * near - wide) / 3, rounding + 0.1 * abs(near - wide)


def load(path: str, name: str) -> ModuleType:
    """Returns a script as a module."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


class Check:
    """The runs of one script that are compared."""

    def __init__(self, args: argparse.Namespace, folder: Path):
        self.args, self.folder = args, folder
        self.script = load(args.script, "script")
        self.device = args.options[args.options.index("--device") + 1]

    def events(self) -> list[dict]:
        """Returns the comparisons; the last run leaves its record in the folder."""
        reference = self.reference()
        given = canonical(reference.weights) if reference else None
        plain = self.run("--dropout", "0", *self.no_compile, given=given)
        events = self.against("uncompiled to reference", plain, reference)
        if self.compiles:
            compiled = self.run("--dropout", "0", given=plain.weights)
            events.append(compared("compiled to uncompiled", compiled.gradients, plain.gradients))
            events += self.against("compiled to reference", compiled, reference)
        if self.args.dropout:
            events.append(self.with_dropout(plain.weights))
        return events

    @property
    def no_compile(self) -> list[str]:
        return ["--no-compile"] if hasattr(self.script.Config, "compile") else []

    @property
    def compiles(self) -> bool:
        """Whether the script is one that compiles, with these options."""
        return bool(self.no_compile) and "--no-compile" not in self.args.options

    def reference(self) -> TrainingRun | None:
        """Returns a run of the reference, uncompiled, in float32, on the batches of all ranks."""
        if not self.args.reference:
            return None
        script = load(self.args.reference, "reference")
        options = ["--device", self.device, *self.size_options(RANKS), "--dropout", "0"]
        if hasattr(script.Config, "compile"):
            options += ["--no-compile", "--dtype", "float32"]
        run = TrainingRun(script, self.sizes, None)
        run.train([*options, "--results-dir", str(self.folder / "reference")])
        return run

    def run(self, *options: str, given: dict | None, derivatives: bool = False) -> TrainingRun:
        """Returns a run of the script; the folder then has the record of this one alone."""
        records = self.folder / "records"
        shutil.rmtree(records, ignore_errors=True)
        run = TrainingRun(self.script, self.sizes, given)
        run.wants_derivatives = derivatives
        run.train(
            [
                *self.args.options,
                *self.size_options(1),
                *options,
                "--eval-freq",
                str(10**6),
                "--results-dir",
                str(records),
            ]
        )
        return run

    @property
    def sizes(self) -> dict:
        """What the script's table of models has in the place of its own entry."""
        given = dict(layers=self.args.layers, width=self.args.width)
        sizes = SIZES[self.device] | {name: size for name, size in given.items() if size}
        return {MODEL[self.device]: sizes}

    def size_options(self, parts: int) -> list[str]:
        """Returns the options of the model, and of a batch of so many ranks' parts."""
        return [
            "--model",
            MODEL[self.device],
            "--batch-size",
            str(parts * BATCH[self.device]),
            "--context-length",
            str(SIZES[self.device]["context_length"]),
        ]

    def against(
        self, comparison: str, run: TrainingRun, reference: TrainingRun | None
    ) -> list[dict]:
        if not reference:
            return []
        return [compared(comparison, canonical(run.gradients), canonical(reference.gradients))]

    def with_dropout(self, weights: dict) -> dict:
        try:
            run = self.run("--dropout", str(DROPOUT), given=weights, derivatives=True)
        except Refused as reason:
            return dict(event="gradients", comparison="dropout", refused=str(reason))
        return run.derivatives


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Check the gradients of one script.", allow_abbrev=False
    )
    parser.add_argument(
        "--reference", metavar="FILE", help="another script that has the same gradients, in float32"
    )
    parser.add_argument(
        "--dropout",
        default=True,
        action=argparse.BooleanOptionalAction,
        help="whether derivatives with dropout are checked",
    )
    parser.add_argument("--layers", type=int, help="of the model")
    parser.add_argument("--width", type=int, help="of the model")
    parser.add_argument("script", help="the script to check")
    parser.add_argument(
        "options",
        nargs=argparse.REMAINDER,
        help="its own options; --device and --results-dir have to be there",
    )
    return parser.parse_args()


def main() -> None:
    args = parse()
    place = args.options.index("--results-dir")
    _, results = args.options[place : place + 2]
    del args.options[place : place + 2]
    with tempfile.TemporaryDirectory() as folder:
        try:
            events = Check(args, Path(folder)).events()
        except Refused as reason:
            sys.exit(f"error: {reason}")
        if RANK == 0:
            record = next((Path(folder) / "records").glob("*.jsonl"))
            Path(results).mkdir(parents=True, exist_ok=True)
            lines = "".join(json.dumps(event) + "\n" for event in events)
            (Path(results) / record.name).write_text(record.read_text() + lines)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
