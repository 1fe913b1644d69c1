"""Train GPT-2 with Hugging Face's Trainer, on the same tokens and with the same record as 01.

    pip install -r requirements-extras.txt
    python peers/hf_trainer.py                         # the experiment, as the Trainer comes
    python peers/hf_trainer.py --bf16 --torch_compile  # with options of the Trainer
    python peers/hf_trainer.py --model_name_or_path gpt2 --train_file my.txt --output_dir my-gpt2
    python peers/hf_trainer.py --help                  # all of them

This is what a user would take instead of 01, to compare with. Model, loop, optimizer and mixed
precision are Hugging Face's; reading tokens, clock, evaluation and record are those of 00_orig.py,
so that both are measured in the same way. The experiment is that of 01: the shape of GPT-2 with an
untied head, AdamW at a constant learning rate, no clipping. Losses differ a little: the model's QKV
projection has biases, its initial weights are others, biases and norms have no weight decay, and
the Trainer shuffles by itself.

With --model_name_or_path it fine-tunes a saved GPT-2 instead, on a text, and saves the result.
"""

import argparse
import math
import os
import signal
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

if {"--huge_pages", "--huge-pages"} & {*sys.argv}:
    os.environ["THP_MEM_ALLOC_ENABLE"] = "1"  # PyTorch reads it at its first allocation

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import Dataset, Subset

try:
    import transformers
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        GPT2Config,
        GPT2LMHeadModel,
        HfArgumentParser,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )
    from transformers.pytorch_utils import Conv1D
except ImportError as error:
    sys.exit(f"error: {error}: pip install -r requirements-extras.txt")

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where gpt_speed is
from gpt_speed.script import load_script

ROOT = Path(__file__).resolve().parents[1]
orig = load_script(ROOT / "00_orig.py", "orig")

MODEL = {"cuda": "gpt2", "cpu": "cpu-demo"}  # by default
DEMO_TOKENS = 40_960  # after which cpu-demo ends by default, as in 00
PART = 0.9  # of a text that is trained on; the rest is for validation


def option(default, text: str):
    return field(default=default, metadata=dict(help=text))


@dataclass
class Experiment:
    """What the Trainer has no option for."""

    model: str = option(
        "",
        f"size, one of {', '.join(orig.MODELS)} (default: gpt2 with an NVIDIA"
        " GPU, cpu-demo without)",
    )
    context_length: int = option(0, "tokens per sequence (default: as long as the model takes)")
    batch_size: int = option(0, "sequences per step, instead of --per_device_train_batch_size")
    model_name_or_path: str = option("", "fine-tune this model: a folder, or a name on the hub")
    train_file: str = option("", "text to fine-tune it on (default: the tokens in --data)")
    dtype: str = option("float32", "of the weights: float32, or bfloat16 as in 01")
    attn_implementation: str = option("sdpa", "eager, sdpa or flash_attention_2")
    huge_pages: bool = option(False, "huge pages for tensors on a CPU, as in 01")
    max_tokens: int = option(
        0, f"training tokens after which it ends (default: no limit; cpu-demo: {DEMO_TOKENS:,})"
    )
    eval_freq: int = option(15, "steps from one log line to the next")
    eval_windows: int = option(
        0, "sequences of each text that losses are measured on (default: 40; cpu-demo: 16)"
    )
    device: str = option("", "cpu or cuda (default: cuda if there)")
    data: str = option(str(ROOT / "data"), "folder of the tokens (default: data/)")
    results_dir: str = option(str(ROOT / "results"), "folder of the record (default: results/)")
    name: str = option("hf_trainer", "name of the run in its record")


@dataclass
class Settings(TrainingArguments):
    """The Trainer's own, with the experiment's values as defaults."""

    num_train_epochs: float = field(
        default=15, metadata=dict(help="passes over the training text", aliases=["--epochs"])
    )
    learning_rate: float = option(5e-4, "learning rate")
    weight_decay: float = option(0.1, "AdamW's weight decay")
    lr_scheduler_type: str = option("constant", "schedule")
    max_grad_norm: float = option(0.0, "clip gradients to this norm")
    seed: int = option(123, "seed")
    save_strategy: str = option("no", "when to save checkpoints")
    logging_strategy: str = option("no", "when the Trainer logs")
    report_to: str = option("none", "where the Trainer logs")
    disable_tqdm: bool = option(True, "no progress bar")
    dataloader_drop_last: bool = option(True, "drop a short last batch")
    remove_unused_columns: bool = option(False, "drop inputs that the model's forward doesn't name")
    # Else the host waits for the GPU in each step, to look for NaN and to copy a batch.
    logging_nan_inf_filter: bool = option(False, "leave losses that aren't finite out of its logs")
    accelerator_config: str = option('{"non_blocking": true}', "settings of Accelerate")


# ---- Configuration -----------------------------------------------------------------------------


class Options(NamedTuple):
    """All options of the command line: the Trainer has a class for its own."""

    experiment: Experiment
    trainer: Settings


def parse_arguments(argv: list[str]) -> Options:
    """Exits with 2 for a wrong option."""
    parser = HfArgumentParser(
        (Experiment, Settings), description=__doc__.splitlines()[0], allow_abbrev=False
    )
    if device_named_in(argv) == "cpu":
        argv = [*argv, "--use_cpu"]  # the Trainer's name for it
    try:
        options = Options(*parser.parse_args_into_dataclasses(argv, look_for_args_file=False))
        check_options(*options)
    except ValueError as error:  # the Trainer's own checks raise it, too
        parser.error(str(error).splitlines()[0])
    return options


def device_named_in(argv: list[str]) -> str | None:
    """Returns --device, which the Trainer's own checks of its options depend on."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--device")
    options, _ = parser.parse_known_args(argv)
    return options.device


def check_options(experiment: Experiment, trainer: Settings) -> None:
    """Raises ValueError for a wrong setting."""
    choices = {
        "model": (("", *orig.MODELS), f"none of {', '.join(orig.MODELS)}"),
        "dtype": (("float32", "bfloat16"), "neither float32 nor bfloat16"),
        "device": (("", "cpu", "cuda"), "neither cpu nor cuda"),
    }
    for name, (values, problem) in choices.items():
        value = getattr(experiment, name)
        if value not in values:
            raise ValueError(f"argument --{name}: {value!r} is {problem}")
    if experiment.train_file and not experiment.model_name_or_path:
        raise ValueError(
            "argument --train_file: needs --model_name_or_path, whose tokenizer reads it"
        )
    for name, number in (
        ("eval_freq", experiment.eval_freq),
        ("num_train_epochs", trainer.num_train_epochs),
    ):
        if number <= 0:
            raise ValueError(f"argument --{name}: {number} is out of range")


def read_options(argv: list[str]) -> Options:
    """Returns the options that are given. bench/measure/sizing.py calls this one and `configure`,
    as those of 00."""
    return parse_arguments(argv)


def configure(options: Options) -> orig.Config:
    """Returns the settings of a run with these options."""
    return config_of(options)


def default_device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "cpu"


def config_of(options: Options) -> orig.Config:
    """Returns the settings of the record, under the names that 00 gives them. Raises
    orig.UserError."""
    experiment, trainer = options
    device = experiment.device or default_device()
    model = experiment.model or MODEL[device]
    config = orig.configure(dict(device=device, model=model))
    batch_size = experiment.batch_size or trainer.per_device_train_batch_size
    return replace(
        config,
        vocab_size=50_304,  # as in 01, a multiple of 64
        context_length=experiment.context_length or config.context_length,
        dtype=experiment.dtype,
        batch_size=batch_size * trainer.gradient_accumulation_steps,
        learning_rate=trainer.learning_rate,
        weight_decay=trainer.weight_decay,
        seed=trainer.seed,
        epochs=math.ceil(trainer.num_train_epochs),
        max_steps=trainer.max_steps if trainer.max_steps > 0 else None,
        max_tokens=max_tokens(model, options),
        eval_freq=experiment.eval_freq,
        eval_windows=experiment.eval_windows or config.eval_windows,
        data=experiment.data,
        results_dir=experiment.results_dir,
        name=experiment.name,
    )


def max_tokens(model: str, options: Options) -> int | None:
    """Returns after how many tokens training ends; cpu-demo alone has a default."""
    experiment, trainer = options
    if experiment.max_tokens:
        return experiment.max_tokens
    if model == "cpu-demo" and trainer.max_steps <= 0 and not experiment.model_name_or_path:
        return DEMO_TOKENS
    return None


# ---- Data and model ----------------------------------------------------------------------------


class Examples(Dataset):
    """Windows of tokens as the Trainer takes them: shift_labels are the targets of every token."""

    def __init__(self, windows: orig.TokenWindows):
        self.windows = windows

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        x_T, y_T = self.windows[i]
        return dict(input_ids=x_T, labels=y_T, shift_labels=y_T)


class TextTokenizer:
    """A Hugging Face tokenizer, with what orig.sample asks of one."""

    def __init__(self, tokenizer):
        self.tokenizer, self.n_vocab = tokenizer, len(tokenizer)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, verbose=False)["input_ids"]

    def decode(self, ids: list[int], errors: str) -> str:
        return self.tokenizer.decode(ids)  # which replaces what is no character


class Logits(nn.Module):
    """The model with the interface of 00's."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, ids_BT):
        return self.model(input_ids=ids_BT).logits


def new_model(experiment: Experiment, config: orig.Config) -> nn.Module:
    """Returns a model of the experiment's shape, as Hugging Face initializes it."""
    shape = GPT2Config(
        vocab_size=config.vocab_size,
        n_positions=config.context_length,
        n_embd=config.width,
        n_layer=config.layers,
        n_head=config.heads,
        tie_word_embeddings=False,
        use_cache=False,
        resid_pdrop=config.dropout,
        embd_pdrop=config.dropout,
        attn_pdrop=config.dropout,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation=experiment.attn_implementation,
    )
    return GPT2LMHeadModel(shape).to(getattr(torch, experiment.dtype))


def saved_model(experiment: Experiment) -> nn.Module:
    """Returns the model to fine-tune. Raises orig.UserError."""
    try:
        model = AutoModelForCausalLM.from_pretrained(
            experiment.model_name_or_path,
            dtype=getattr(torch, experiment.dtype),
            attn_implementation=experiment.attn_implementation,
        )
    except (OSError, ValueError) as error:
        raise orig.UserError(f"--model_name_or_path: {str(error).splitlines()[0]}")
    model.config.use_cache = False
    return model


def config_with_shape(config: orig.Config, shape, experiment: Experiment) -> orig.Config:
    """Returns the settings with the shape of a saved model, as its own configuration has it."""
    longest = shape.max_position_embeddings
    return replace(
        config,
        model=Path(experiment.model_name_or_path).name,
        layers=shape.num_hidden_layers,
        heads=shape.num_attention_heads,
        width=shape.hidden_size,
        vocab_size=shape.vocab_size,
        dropout=getattr(shape, "resid_pdrop", 0.0),
        context_length=min(experiment.context_length or longest, longest),
    )


def read_tokens(experiment: Experiment, config: orig.Config) -> orig.Data:
    """Returns the tokens in --data, or those of the text to fine-tune on. Raises orig.UserError."""
    if not experiment.train_file:
        orig.prepare_data(config)
        return orig.load_data(config)
    try:
        tokenizer = TextTokenizer(AutoTokenizer.from_pretrained(experiment.model_name_or_path))
        text = Path(experiment.train_file).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise orig.UserError(f"{experiment.train_file}: {str(error).splitlines()[0]}")
    ids = np.array(tokenizer.encode(text), np.int64)
    train, val = np.split(ids, [int(PART * len(ids))])
    windows = [orig.TokenWindows(part, config.context_length) for part in (train, val)]
    if len(windows[0]) < config.batch_size or not len(windows[1]):
        raise orig.UserError(
            f"the text is too short: {len(ids):,} tokens; use a longer one, or"
            " lower --context-length or --per_device_train_batch_size"
        )
    meta = dict(
        corpus=Path(experiment.train_file).name,
        tokenizer=config.model,
        vocabulary=tokenizer.n_vocab,
        tokens=dict(train=len(train), val=len(val)),
    )
    return orig.Data(meta, *windows, tokenizer)


# ---- Training ----------------------------------------------------------------------------------


def autocast_type(trainer: Settings) -> str | None:
    if trainer.bf16:
        return "bfloat16"
    if trainer.fp16:
        return "float16"
    return None


class TrainerRecord(orig.Run):
    """00's record, which also tells the Trainer's version and options."""

    def __init__(self, options: Options):
        super().__init__()
        self.options = options

    def start(self, model, data, config) -> None:
        self.model = model
        super().start(model, data, config)
        self.attention = self.options.experiment.attn_implementation

    def write(self, event: str, **figures) -> None:
        if event == "start":
            figures["config"] |= self.own_settings(figures["config"])
            figures["environment"]["transformers"] = transformers.__version__
        super().write(event, **figures)

    def own_settings(self, config: dict) -> dict:
        """Returns the settings that 00 doesn't have, or computes in another way."""
        trainer = self.options.trainer
        layers = [m for m in self.model.modules() if isinstance(m, nn.Linear | Conv1D)]
        attention = 12 * config["layers"] * config["context_length"] * config["width"]
        return dict(
            flops_per_token=6 * sum(layer.weight.numel() for layer in layers) + attention,
            compile=trainer.torch_compile,
            optim=str(trainer.optim.value),
            autocast=autocast_type(trainer),
            gradient_accumulation_steps=trainer.gradient_accumulation_steps,
            gradient_checkpointing=bool(trainer.activation_checkpointing),
            huge_pages=os.environ.get("THP_MEM_ALLOC_ENABLE") == "1",
        )


class Stopwatch(TrainerCallback):
    """Times the steps as 00 does, and evaluates at its log lines."""

    def __init__(self, run, model, data, config):
        self.run, self.model, self.data, self.config = run, model, data, config
        self.steps_per_epoch = len(data.train) // config.batch_size

    def on_epoch_begin(self, args, state, control, **_):
        self.times = [orig.now(self.config.device)]

    def on_step_end(self, args, state, control, **_):
        self.times.append(orig.now(self.config.device))
        step = state.global_step
        if self.has_log_line(step) or step == state.max_steps:
            self.log(step)
            self.times = [orig.now(self.config.device)]

    def on_epoch_end(self, args, state, control, **_):
        text = orig.sample(self.model, self.data.tokenizer, self.config)
        self.run.epoch(self.epoch_of(state.global_step), text)

    def has_log_line(self, step: int) -> bool:
        """Tells whether 00 logs after a step, counted from 1, that isn't the last one."""
        return (step - 1) % self.config.eval_freq == 0 or step % self.steps_per_epoch == 0

    def epoch_of(self, step: int) -> int:
        """Returns the number of the epoch that a step is in, both counted from 1."""
        return (step - 1) // self.steps_per_epoch + 1

    def log(self, step: int) -> None:
        """Evaluates the model after a step, and logs that with the times of the steps since the
        last line. Raises FloatingPointError."""
        seconds = orig.seconds_between(self.times)
        texts = self.data.train, self.data.val
        losses = [orig.evaluate(self.model, windows, self.config) for windows in texts]
        self.run.log(self.epoch_of(step), step - 1, seconds, *losses)
        if not math.isfinite(sum(losses)):
            raise FloatingPointError("the loss is not finite: lower --learning_rate")


def train(model, data, config, run: TrainerRecord) -> Trainer:
    """Trains `model` in place and reports to `run`."""
    settings = run.options.trainer
    steps_per_epoch = len(data.train) // config.batch_size
    settings.max_steps = step_count(settings.num_train_epochs * steps_per_epoch, config)
    watch = Stopwatch(run, Logits(model), data, config)
    # Whole steps only: with accumulation the Trainer would make a smaller last one in each epoch.
    examples = Subset(Examples(data.train), range(steps_per_epoch * config.batch_size))
    trainer = Trainer(model, settings, train_dataset=examples, callbacks=[watch])
    trainer.train()
    return trainer


def step_count(steps_of_epochs: float, config: orig.Config) -> int:
    """Returns how many steps a training has: those of its epochs, or fewer by another limit."""
    limits = [math.ceil(steps_of_epochs)]
    if config.max_tokens:
        limits.append(math.ceil(config.max_tokens / config.tokens_per_step))
    if config.max_steps:
        limits.append(config.max_steps)
    return min(limits)


def set_up_trainer(options: Options) -> None:
    """Completes the Trainer's own settings by those of the experiment."""
    experiment, trainer = options
    if experiment.batch_size:
        trainer.per_device_train_batch_size = experiment.batch_size
    if not experiment.model_name_or_path:
        trainer.output_dir = experiment.results_dir  # nothing is saved there
    trainer._n_gpu = min(1, trainer.n_gpu)  # with more it would use DataParallel: no option forbids
    if torch.backends.cuda.matmul.fp32_precision == "tf32":  # by --tf32
        torch.set_float32_matmul_precision("high")  # the same, by the name that the record reads


@dataclass
class Training:
    """A new model, trained on the tokens in --data. Only its record is kept."""

    experiment: Experiment
    config: orig.Config

    def make_model(self) -> nn.Module:
        """Returns the model; from then on the settings have its shape. Raises orig.UserError."""
        return new_model(self.experiment, self.config)

    def save(self, trainer: Trainer, tokenizer) -> None:
        """Saves what comes out of it."""


class FineTuning(Training):
    """A saved model, trained on a text or on the tokens in --data, and saved again."""

    def make_model(self) -> nn.Module:
        model = saved_model(self.experiment)
        self.config = config_with_shape(self.config, model.config, self.experiment)
        return model

    def save(self, trainer: Trainer, tokenizer) -> None:
        trainer.save_model()
        if self.experiment.train_file:  # else the tokenizer is 00's
            tokenizer.tokenizer.save_pretrained(trainer.args.output_dir)
        print(f"Model: {trainer.args.output_dir}")


def run_experiment(options: Options, config: orig.Config, run: TrainerRecord) -> None:
    """Trains a new model, or fine-tunes a saved one and saves the result. Raises orig.UserError."""
    experiment = options.experiment
    task = Training(experiment, config)
    if experiment.model_name_or_path:
        task = FineTuning(experiment, config)
    torch.manual_seed(config.seed)
    model = task.make_model().to(config.device)
    # As in 01: cuDNN's attention rounds dropout to sixteenths.
    torch.backends.cuda.enable_cudnn_sdp(not task.config.dropout)
    data = read_tokens(experiment, task.config)
    run.start(model, data, task.config)
    trainer = train(model, data, task.config, run)
    task.save(trainer, data.tokenizer)


def main() -> int:
    sys.stdout.reconfigure(errors="replace")
    options = parse_arguments(sys.argv[1:])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, orig.interrupt)
    run, config = TrainerRecord(options), None
    status, message, code = "complete", None, 0
    try:
        set_up_trainer(options)
        config = config_of(options)
        run_experiment(options, config, run)
    except (Exception, KeyboardInterrupt) as error:
        status, message, code = orig.explain(error)
        print(f"error: {message}", file=sys.stderr)
    try:
        if run.file is not None:  # else it ended before its start
            run.end(status, message)
    except OSError as error:  # such as a full disk
        if not code:  # else an error is printed already
            print(f"error: {error}", file=sys.stderr)
        code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
