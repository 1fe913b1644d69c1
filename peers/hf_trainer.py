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

import math
import os
import signal
import sys
from dataclasses import dataclass, field
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

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

ROOT = Path(__file__).resolve().parent.parent
_spec = spec_from_file_location("orig", ROOT / "00_orig.py")
orig = sys.modules["orig"] = module_from_spec(_spec)
_spec.loader.exec_module(orig)

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


def parse_arguments(argv: list[str] | None = None) -> Experiment:
    """The settings; the Trainer's are its field `trainer`. Exits with 2 for a wrong one."""
    parser = HfArgumentParser(
        (Experiment, Settings), description=__doc__.splitlines()[0], allow_abbrev=False
    )
    argv = sys.argv[1:] if argv is None else argv
    if "--device cpu" in " ".join(argv).replace("=", " "):
        argv = [*argv, "--use_cpu"]  # the Trainer's name for it
    try:
        args, trainer = parser.parse_args_into_dataclasses(argv, look_for_args_file=False)
    except ValueError as error:  # of the Trainer's own checks
        parser.error(str(error).splitlines()[0])
    if wrong := what_is_wrong(args, trainer):
        parser.error(wrong)
    if torch.backends.cuda.matmul.fp32_precision == "tf32":  # by --tf32
        torch.set_float32_matmul_precision("high")  # the same, by the name that the record reads
    args.trainer = trainer
    return args


def what_is_wrong(args: Experiment, trainer: Settings) -> str | None:
    """Returns what to say of the first wrong setting."""
    choices = {
        "model": (("", *orig.MODELS), f"none of {', '.join(orig.MODELS)}"),
        "dtype": (("float32", "bfloat16"), "neither float32 nor bfloat16"),
        "device": (("", "cpu", "cuda"), "neither cpu nor cuda"),
    }
    for name, (values, says) in choices.items():
        value = getattr(args, name)
        if value not in values:
            return f"argument --{name}: {value!r} is {says}"
    if args.train_file and not args.model_name_or_path:
        return "argument --train_file: needs --model_name_or_path, whose tokenizer reads it"
    least = dict(eval_freq=args.eval_freq, num_train_epochs=trainer.num_train_epochs)
    for name, value in least.items():
        if value <= 0:
            return f"argument --{name}: {value} is out of range"
    return None


def configure(args: Experiment | list[str]) -> orig.Config:
    """The settings of the record, under the names that 00 gives them, from options or what they
    were parsed to. Raises orig.UserError."""
    if isinstance(args, list):
        args = parse_arguments(args)
    trainer = args.trainer
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = args.model or ("gpt2" if device == "cuda" else "cpu-demo")
    config = orig.configure(["--device", device, "--model", model])
    config.vocab_size = 50_304  # as in 01, a multiple of 64
    set_length(config, args)
    if args.batch_size:
        trainer.per_device_train_batch_size = args.batch_size
    config.batch_size = trainer.per_device_train_batch_size * trainer.gradient_accumulation_steps
    for name in ("context_length", "eval_windows"):
        setattr(config, name, getattr(args, name) or getattr(config, name))
    for name in ("learning_rate", "weight_decay", "seed"):
        setattr(config, name, getattr(trainer, name))
    for name in ("eval_freq", "data", "results_dir", "name"):
        setattr(config, name, getattr(args, name))
    return config


def set_length(config: orig.Config, args: Experiment) -> None:
    """Sets after how many epochs, steps and tokens training ends; cpu-demo alone has a default."""
    steps = max(args.trainer.max_steps, 0)
    is_demo = config.model == "cpu-demo" and not steps and not args.model_name_or_path
    config.epochs = math.ceil(args.trainer.num_train_epochs)
    config.max_steps = steps or None
    config.max_tokens = args.max_tokens or (DEMO_TOKENS if is_demo else None)


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


def make_model(args: Experiment, config: orig.Config) -> nn.Module:
    dtype = getattr(torch, args.dtype)
    if not args.model_name_or_path:
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
            attn_implementation=args.attn_implementation,
        )
        return GPT2LMHeadModel(shape).to(dtype)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            args.model_name_or_path, dtype=dtype, attn_implementation=args.attn_implementation
        )
    except (OSError, ValueError) as error:
        raise orig.UserError(f"--model_name_or_path: {str(error).splitlines()[0]}")
    model.config.use_cache = False
    own = model.config
    config.model = Path(args.model_name_or_path).name
    config.layers, config.heads = own.num_hidden_layers, own.num_attention_heads
    config.width, config.vocab_size = own.hidden_size, own.vocab_size
    config.dropout = getattr(own, "resid_pdrop", 0.0)
    longest = own.max_position_embeddings
    config.context_length = min(args.context_length or longest, longest)
    return model


def read_tokens(args: Experiment, config: orig.Config) -> orig.Data:
    if not args.train_file:
        return orig.load_data(config)
    try:
        tokenizer = TextTokenizer(AutoTokenizer.from_pretrained(args.model_name_or_path))
        text = Path(args.train_file).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise orig.UserError(f"{args.train_file}: {str(error).splitlines()[0]}")
    ids = np.array(tokenizer.encode(text), np.int64)
    parts = np.split(ids, [int(PART * len(ids))])
    windows = [orig.TokenWindows(part, config.context_length) for part in parts]
    for part, needed in zip(windows, (config.batch_size, 1), strict=True):
        if len(part) < needed:
            raise orig.UserError(
                f"the text is too short: {len(ids):,} tokens; use a longer one, or"
                " lower --context-length or --per_device_train_batch_size"
            )
    meta = dict(
        corpus=Path(args.train_file).name,
        tokenizer=config.model,
        vocabulary=tokenizer.n_vocab,
        tokens=dict(zip(("train", "val"), map(len, parts), strict=True)),
    )
    return orig.Data(meta, *windows, tokenizer)


# ---- Training ----------------------------------------------------------------------------------


def autocast_type(settings: Settings) -> str | None:
    if settings.bf16:
        return "bfloat16"
    return "float16" if settings.fp16 else None


class Record(orig.Run):
    """00's record, which also tells the Trainer's version and options."""

    def __init__(self, args: Experiment):
        self.args = args

    def start(self, model, data, config) -> None:
        self.model = model
        super().start(model, data, config)
        self.attention = self.args.attn_implementation

    def write(self, event: str, **figures) -> None:
        if event == "start":
            layers = [m for m in self.model.modules() if isinstance(m, nn.Linear | Conv1D)]
            config = figures["config"]
            attention = 12 * config["layers"] * config["context_length"] * config["width"]
            trainer = self.args.trainer
            config |= dict(
                flops_per_token=6 * sum(layer.weight.numel() for layer in layers) + attention,
                compile=trainer.torch_compile,
                optim=str(trainer.optim.value),
                autocast=autocast_type(trainer),
                gradient_accumulation_steps=trainer.gradient_accumulation_steps,
                gradient_checkpointing=bool(trainer.activation_checkpointing),
                huge_pages=os.environ.get("THP_MEM_ALLOC_ENABLE") == "1",
            )
            figures["environment"]["transformers"] = transformers.__version__
        super().write(event, **figures)


class Watch(TrainerCallback):
    """Times the steps as 00 does, and evaluates at its log lines."""

    def __init__(self, run, model, data, config):
        self.run, self.model, self.data, self.config = run, model, data, config
        self.steps_per_epoch = len(data.train) // config.batch_size

    def on_epoch_begin(self, args, state, control, **_):
        self.times = [orig.now(self.config.device)]

    def on_step_end(self, args, state, control, **_):
        self.times.append(orig.now(self.config.device))
        step, config, data = state.global_step, self.config, self.data
        done = step == state.max_steps
        if (step - 1) % config.eval_freq == 0 or step % self.steps_per_epoch == 0 or done:
            seconds = orig.seconds_between(self.times)
            losses = [
                orig.evaluate(self.model, windows, config) for windows in (data.train, data.val)
            ]
            self.run.log((step - 1) // self.steps_per_epoch + 1, step - 1, seconds, *losses)
            if not math.isfinite(sum(losses)):
                raise FloatingPointError("the loss is not finite: lower --learning_rate")
            self.times = [orig.now(config.device)]

    def on_epoch_end(self, args, state, control, **_):
        epoch = (state.global_step - 1) // self.steps_per_epoch + 1
        self.run.epoch(epoch, self.model, self.data.tokenizer)


def train(model, data, config, run, settings: Settings) -> Trainer:
    """Trains `model` in place and reports to `run`."""
    steps_per_epoch = len(data.train) // config.batch_size
    steps = math.ceil(settings.num_train_epochs * steps_per_epoch)
    if config.max_tokens:
        steps = min(steps, math.ceil(config.max_tokens / config.tokens_per_step))
    settings.max_steps = min(steps, config.max_steps or steps)
    settings._n_gpu = min(1, settings.n_gpu)  # with more the Trainer would use DataParallel
    watch = Watch(run, Logits(model), data, config)
    # Whole steps only: with accumulation the Trainer would make a smaller last one in each epoch.
    examples = Subset(Examples(data.train), range(steps_per_epoch * config.batch_size))
    trainer = Trainer(model, settings, train_dataset=examples, callbacks=[watch])
    trainer.train()
    return trainer


def main() -> int:
    sys.stdout.reconfigure(errors="replace")
    args = parse_arguments()
    signal.signal(signal.SIGINT, orig.interrupt)
    signal.signal(signal.SIGTERM, orig.interrupt)
    run, config, (status, message, code) = Record(args), None, ("complete", None, 0)
    try:
        config = configure(args)
        if not args.model_name_or_path:
            args.trainer.output_dir = config.results_dir  # nothing is saved there
        torch.manual_seed(config.seed)
        model = make_model(args, config).to(config.device)
        # As in 01: cuDNN's attention rounds dropout to sixteenths.
        torch.backends.cuda.enable_cudnn_sdp(not config.dropout)
        data = read_tokens(args, config)
        run.start(model, data, config)
        trainer = train(model, data, config, run, args.trainer)
        if args.model_name_or_path:
            trainer.save_model()
            if args.train_file:
                data.tokenizer.tokenizer.save_pretrained(args.trainer.output_dir)
            print(f"Model: {args.trainer.output_dir}")
    except (Exception, KeyboardInterrupt) as error:
        status, message, code = orig.explain(error)
        print(f"error: {message}", file=sys.stderr)
    if run.file is not None:  # else it ended before its start
        run.end(status, message)
    return code


if __name__ == "__main__":
    sys.exit(main())
