"""peers/hf_trainer.py: the same training by Hugging Face's Trainer, with the same record."""

import pytest

INSTALL = "pip install -r requirements-extras.txt"
transformers = pytest.importorskip("transformers", reason=f"needs transformers: {INSTALL}")
pytest.importorskip("accelerate", reason=f"needs accelerate: {INSTALL}")

import torch  # noqa: E402
from conftest import ROOT, SMALL, call_main, load, read_record, write_tokens  # noqa: E402

from bench.measure.sizing import read_configurations  # noqa: E402

TINY = "--model cpu-demo --context-length 16 --per_device_train_batch_size 2 --eval-windows 2"


@pytest.fixture(scope="module")
def script():
    return load(ROOT / "peers" / "hf_trainer.py")


@pytest.fixture
def run(script, tmp_path, monkeypatch):
    """Returns a function that trains by main() on tiny data, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    for name, value in SMALL.items():
        monkeypatch.setitem(script.orig.MODELS["cpu-demo"], name, value)

    def run(*options, tiny=TINY, results="results"):
        data = write_tokens(tmp_path / "data")
        return call_main(
            script,
            *tiny.split(),
            "--device",
            "cpu",
            "--data",
            data,
            "--results-dir",
            tmp_path / results,
            *options,
            variables={},
        )

    return run


def test_it_leaves_the_same_record(run, tmp_path):
    result = run("--max-tokens", 200, "--eval-freq", 3)
    assert result.returncode == 0, result.stderr
    start, *logs, epoch, end = read_record(tmp_path / "results")
    assert (start["stage"], end["status"], epoch["event"]) == ("hf_trainer", "complete", "epoch")
    assert end["avg_tok_per_sec"] > 0
    assert [log["step"] for log in logs] == [0, 3, 6] and logs[-1]["tokens"] == 7 * 32
    assert logs[-1]["val_loss"] < logs[0]["val_loss"] < 12
    config = start["config"]
    assert (config["batch_size"], config["dtype"], config["vocab_size"]) == (2, "float32", 50_304)
    # As many products as 01, whose head isn't tied either; only biases are more.
    width, layers = config["width"], config["layers"]
    products = layers * 12 * width**2 + width * config["vocab_size"]
    assert config["flops_per_token"] == 6 * products + 12 * layers * 16 * width


def test_its_own_options(run, tmp_path):
    """Accumulation gives the same losses as the same batch at once."""
    configs, losses = [], []
    for name, options in (
        ("whole", ["--per_device_train_batch_size", 4]),
        (
            "parts",
            [
                "--gradient_accumulation_steps",
                2,
                "--dataloader_num_workers",
                0,
                "--optim",
                "adamw_torch",
                "--activation_checkpointing",
                "--attn_implementation",
                "eager",
            ],
        ),
    ):
        result = run("--max_steps", 3, "--eval-freq", 1, *options, results=name)
        assert result.returncode == 0, result.stderr
        start, *logs, _, _ = read_record(tmp_path / name)
        configs.append(start["config"])
        losses.append([log["val_loss"] for log in logs])
    assert configs[0]["batch_size"] == configs[1]["batch_size"] == 4
    assert configs[1]["gradient_checkpointing"] and configs[1]["optim"] == "adamw_torch"
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["--bf16"],
        ["--dtype", "bfloat16", "--torch_compile", "--torch_compile_backend", "aot_eager"],
    ],
)
def test_mixed_precision_and_compiler(run, tmp_path, options):
    result = run(*options, "--max_steps", 3)
    assert result.returncode == 0, result.stderr
    start, *_, end = read_record(tmp_path / "results")
    assert end["status"] == "complete"
    assert start["config"]["compile"] is ("--torch_compile" in options)
    assert start["config"]["autocast"] == ("bfloat16" if "--bf16" in options else None)
    assert not (tmp_path / "trainer_output").exists()


def test_it_fine_tunes_a_saved_model_on_a_text(run, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from tokenizers.decoders import ByteLevel

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(
        tmp_path / "small"
    )
    shape = transformers.GPT2Config(
        vocab_size=256,
        n_positions=32,
        n_embd=16,
        n_layer=1,
        n_head=2,
        bos_token_id=None,
        eos_token_id=None,
    )
    transformers.GPT2LMHeadModel(shape).save_pretrained(tmp_path / "small")
    (tmp_path / "my.txt").write_text("abc def ghi jkl\n" * 100, "utf-8-sig")
    result = run(
        "--model_name_or_path",
        tmp_path / "small",
        "--train_file",
        tmp_path / "my.txt",
        "--output_dir",
        tmp_path / "out",
        "--max_steps",
        4,
        "--eval-freq",
        3,
        tiny="--per_device_train_batch_size 2 --eval-windows 2",
    )
    assert result.returncode == 0, result.stderr
    start, first, *_, last, epoch, end = read_record(tmp_path / "results")
    assert (start["config"]["model"], start["config"]["context_length"]) == ("small", 32)
    assert sum(start["data"]["tokens"].values()) == 1600  # without the byte-order mark
    assert start["data"]["corpus"] == "my.txt" and last["train_loss"] < first["train_loss"]
    assert epoch["sample"].startswith("Every effort moves you")
    assert str(tmp_path) not in str(start)
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("abc", return_tensors="pt")
    assert torch.isfinite(saved(ids["input_ids"]).logits).all()


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (["--no_such"], 2, "not used by the HfArgumentParser: ['--no_such']"),
        (["--model", "gpt5"], 2, "'gpt5' is none of gpt2, "),
        (["--train_file", "x.txt"], 2, "needs --model_name_or_path"),
        (["--epochs", "0"], 2, "--num_train_epochs: 0.0 is out of range"),
        (["--model_name_or_path", "./nothing"], 1, "--model_name_or_path: "),
        (["--context-length", "3000"], 1, "the text is too short"),
    ],
)
def test_bad_input_is_one_line(run, tmp_path, options, code, says):
    result = run(*options)
    assert result.returncode == code, result.stderr
    (line,) = [line for line in result.stderr.splitlines() if "error: " in line]
    assert says in line and "Traceback" not in result.stderr
    assert not (tmp_path / "results").exists()


def test_the_record_has_the_type_of_the_weights(script):
    config = script.configure(script.read_options(["--device", "cpu", "--dtype", "bfloat16"]))
    assert config.dtype == "bfloat16"


@pytest.mark.parametrize("words", [["--device", "cpu"], ["--device=cpu"]])
def test_the_trainer_is_told_of_the_device(script, words):
    assert script.parse_arguments(words).trainer.use_cpu
    assert not script.parse_arguments(["--name", "--device cpu"]).trainer.use_cpu


def test_the_tools_can_ask_for_its_configuration(forked_children):
    """measure.py asks for it before it starts anything."""
    script = str(ROOT / "peers" / "hf_trainer.py")
    (config,) = read_configurations([[script, ["--device", "cpu", "--model", "cpu-demo"]]])
    assert config["context_length"] == 256 and "error" not in config
