"""The variant checkpoint-resume: what is saved, and that a run goes on as if nothing had been."""

import io
import json
import os
import pickle
import signal
from dataclasses import replace
from functools import cache

import pytest
import torch
from conftest import TINY, call_main, environment, load, run_python, small, write_tokens

from patches import stack

pytest.importorskip(
    "safetensors", reason="needs safetensors: pip install -r requirements-extras.txt"
)

TWO = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
BASES = ["01", pytest.param("02", marks=pytest.mark.slow)]
# Does something on one rank, once, after the update of a step.
ONCE = """
            mark = Path({mark!r})
            if (step + 1, int(os.environ.get("RANK", 0))) == ({step}, {rank}) and not mark.exists():
                mark.touch()
                {how}
"""
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"


class Trial:
    """A small composed script, and runs of it of 2 epochs: 21 steps each of 01, 10 of 02."""

    def __init__(self, folder):
        self.folder, self.data = folder, write_tokens(folder / "data", train=700)

    def script(self, base: str = "01", *others: str, how: str = "", step: int = 0, rank: int = 0):
        """On 01 or 02, with more variants; `how`: what it does after `step` on `rank`."""
        bases = {"01": stack.LAST, "02": stack.DDP}
        text = small(stack.compose(["checkpoint-resume", *others], base=bases[base]).decode())
        number = len(list(self.folder.glob("script-*")))
        if how:
            mark = str(self.folder / f"mark-{number}")
            lines = ONCE.format(mark=mark, step=step, rank=rank, how=how)
            update = "            times.append(now(config.device))\n"
            text = text.replace(update, update + lines, 1)
        path = self.folder / f"script-{base}-{number}.py"
        path.write_text(text)
        return path

    def run(self, script, results: str, *options, saved: str | None = None, restarts=0, **how):
        """In a process of its own, or two of 02; checkpoints are made in `saved` every 4 steps."""
        launch = [*TWO, "--max-restarts", restarts] if "script-02" in script.name else []
        return run_python(*launch, script, *self.options(results, saved), *options, **how)

    def main(self, script, results: str, *options, saved: str | None = None):
        """In this process."""
        return call_main(load(script), *self.options(results, saved), *options)

    def options(self, results: str, saved: str | None) -> list:
        where = ["--checkpoint-dir", self.folder / saved, "--checkpoint-every", 4] if saved else []
        return [
            *TINY,
            "--device",
            "cpu",
            "--no-compile",
            "--dtype",
            "float32",
            "--dropout",
            "0.1",
            "--data",
            self.data,
            "--results-dir",
            self.folder / results,
            "--eval-freq",
            "1",
            "--epochs",
            "2",
            *where,
        ]

    def events(self, results: str, kind: str | None = None) -> list[dict]:
        """Of all records of a folder, in the order of their files' last change."""
        paths = sorted((self.folder / results).glob("*.jsonl"), key=os.path.getmtime)
        events = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
        return [event for event in events if kind in (None, event["event"])]

    def losses(self, results: str) -> dict:
        """By step; of a step that was made again, the later one."""
        return {
            log["step"]: (log["train_loss"], log["val_loss"]) for log in self.events(results, "log")
        }

    def saved(self, folder: str) -> list[str]:
        return sorted(path.name for path in (self.folder / folder).glob("step-*"))


@pytest.fixture
def trial(tmp_path) -> Trial:
    return Trial(tmp_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A function: the losses of a run of 01 or 02 that nothing happens to, by step."""

    @cache
    def losses(base: str) -> dict:
        trial = Trial(tmp_path_factory.mktemp("whole"))
        result = trial.run(trial.script(base), "whole")
        assert result.returncode == 0, result.stderr
        losses = trial.losses("whole")
        assert len(losses) == (42 if base == "01" else 20)
        return losses

    return losses


def test_killed_and_resumed_is_never_killed(trial, whole):
    """Right before a save, in epoch 2."""
    script = trial.script(step=24, how=KILLED)
    first = trial.run(script, "killed", "--resume", "auto", saved="saved")
    assert first.returncode != 0
    assert "No complete checkpoint in" in first.stdout and "this is a new run" in first.stdout
    second = trial.run(script, "killed", "--resume", "auto", saved="saved")
    assert second.returncode == 0, second.stderr
    assert "Resuming after step 20 from" in second.stdout
    assert trial.losses("killed") == whole("01")
    (resume,) = trial.events("killed", "resume")
    assert resume["step"] == 20 and resume["ranks"] == resume["earlier_ranks"] == 1
    # No tokens of before are in the speed.
    path = max((trial.folder / "killed").glob("*.jsonl"), key=os.path.getmtime)
    *logs, end = [
        event
        for event in map(json.loads, path.read_text().splitlines())
        if event["event"] in ("log", "end")
    ]
    seconds = [second for log in logs for second in log["seconds"]]
    assert end["avg_tok_per_sec"] == pytest.approx(21 * 2 * 16 / sum(seconds[1:]))


@pytest.mark.slow
def test_torchrun_restarts_from_the_last_checkpoint(trial, whole):
    script = trial.script("02", step=15, rank=1, how=KILLED)
    result = trial.run(
        script,
        "killed",
        "--resume",
        "auto",
        saved="saved",
        restarts=3,
        env=environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"),
    )
    assert result.returncode == 0, result.stderr
    assert [resume["step"] for resume in trial.events("killed", "resume")] == [12]
    assert trial.losses("killed") == whole("02")


@pytest.mark.parametrize("base", BASES)
def test_written_beside_the_training(trial, base):
    """What is saved is the state of its step, not of a later one."""
    script = trial.script(base)
    result = trial.run(script, "whole", "--checkpoint-async", saved="saved")
    assert result.returncode == 0, result.stderr
    before, last = ("step-40", "step-42") if base == "01" else ("step-16", "step-20")
    assert trial.saved("saved") == [before, last]
    again = trial.run(script, "again", "--resume", trial.folder / "saved" / before)
    assert again.returncode == 0, again.stderr
    whole, again = trial.losses("whole"), trial.losses("again")
    assert again and again == {step: whole[step] for step in again}


@pytest.mark.parametrize(
    ("base", "others"),
    [
        pytest.param("01", ["optimizer-muon", "step-accumulation"], id="two optimizers"),
        pytest.param(
            "02", ["parallel-sharded", "timeout-ranks"], id="sharded", marks=pytest.mark.slow
        ),
    ],
)
def test_with_other_variants(trial, base, others):
    script = trial.script(base, *others)
    result = trial.run(script, "whole", "--max-steps", 8, saved="saved")
    assert result.returncode == 0, result.stderr
    again = trial.run(
        script, "again", "--max-steps", 8, "--resume", trial.folder / "saved" / "step-4"
    )
    assert again.returncode == 0, again.stderr
    whole, again = trial.losses("whole"), trial.losses("again")
    assert again == {step: whole[step] for step in range(4, 8)}


def test_the_newest_two_are_kept_and_half_a_one_is_none(trial):
    """Also where the clock was set back."""
    script = trial.script()
    trial.run(script, "one", "--max-steps", "14", saved="saved")
    assert trial.saved("saved") == ["step-12", "step-14"]
    (trial.folder / "saved" / "step-14" / ".metadata").unlink()
    os.utime(trial.folder / "saved" / "step-12" / ".metadata", (2**32, 2**32))
    result = trial.run(script, "two", "--max-steps", "19", "--resume", "auto", saved="saved")
    assert "Resuming after step 12" in result.stdout
    assert trial.saved("saved") == ["step-16", "step-19"]
    result = trial.run(script, "three", saved="saved")
    assert result.returncode == 1
    assert "holds checkpoints of an earlier run: go on from them by --resume auto" in result.stderr


def test_what_is_refused(trial):
    """Another batch size, no steps left, other tokens, damaged files: each in one line."""
    script = trial.script()
    trial.run(script, "one", "--max-steps", "4", saved="saved")
    saved = trial.folder / "saved" / "step-4"
    says = refusal(trial, script, saved, "--batch-size", "1")
    assert "was trained with batch_size 2, and this run has 1" in says
    says = refusal(trial, script, saved, "--max-steps", "4")
    assert "is the end of the training: nothing is left to do" in says
    assert "holds no complete checkpoint" in refusal(trial, script, trial.folder / "nowhere")
    meta, about, metadata = trial.data / "meta.json", saved / "checkpoint.json", saved / ".metadata"
    values, pickled = json.loads(about.read_text()), metadata.read_bytes()
    other_tokens = json.dumps(json.loads(meta.read_text()) | {"sha256": {"train": "0"}})
    changes = dict(epoch="x"), dict(windows=None), dict(config=[]), dict(train_seconds={})
    for path, says, contents in (
        (meta, "was trained on other tokens", [other_tokens.encode()]),
        (
            about,
            "can't be read",
            [b"{", b"[]", *(json.dumps(values | change).encode() for change in changes)],
        ),
        (metadata, "can't be read", [b"", pickled[:-1], b"\x80\x04." + pickled]),
        (next(saved.glob("*.distcp")), "can't be read", [b"x" * 100]),
    ):
        whole = path.read_bytes()
        for content in contents:
            path.write_bytes(content)
            assert says in refusal(trial, script, saved), content
        path.write_bytes(whole)


def refusal(trial, script, folder, *options) -> str:
    """The one line that says why a checkpoint isn't taken."""
    result = trial.main(script, "two", "--resume", folder, *options)
    assert result.returncode == 1 and result.stderr.count("\n") == 1, result.stderr
    return result.stderr


class Program:
    """What pickle would execute."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def test_nothing_in_a_checkpoint_is_executed(trial):
    """Neither in .metadata, which PyTorch reads by pickle, nor in what is saved beside tensors."""
    script, mark = trial.script(), trial.folder / "executed"
    trial.run(script, "one", "--max-steps", "4", saved="saved")
    saved = trial.folder / "saved" / "step-4"
    metadata = saved / ".metadata"
    contents = pickle.loads(metadata.read_bytes())
    metadata.write_bytes(pickle.dumps(Program(mark)))
    assert "mkdir, which is no data" in refusal(trial, script, saved)
    metadata.write_bytes(pickle.dumps(None))  # then PyTorch would look for those of each rank
    metadata.with_name("__0.metadata").write_bytes(pickle.dumps(Program(mark)))
    assert "can't be read" in refusal(trial, script, saved)
    index, place = next(
        (index, place)
        for index, place in contents.storage_data.items()
        if index.fqn.endswith(".lr")
    )
    file, program = saved / place.relative_path, io.BytesIO()
    torch.save(Program(mark), program)
    contents.storage_data[index] = replace(
        place, offset=file.stat().st_size, length=len(program.getvalue())
    )
    file.write_bytes(file.read_bytes() + program.getvalue())
    metadata.write_bytes(pickle.dumps(contents))
    assert "can't be read" in refusal(trial, script, saved)
    assert not mark.exists()
    metadata.write_bytes(pickle.dumps(Program(mark)))
    with metadata.open("rb") as file:
        pickle.load(file)
    assert mark.exists()  # it would have been


@pytest.mark.slow
def test_another_number_of_ranks(trial):
    """From one process to two: the place in the text is kept, and so are the weights."""
    trial.run(trial.script(), "one", "--max-steps", "8", saved="saved")
    result = trial.run(
        trial.script("02"),
        "two",
        "--learning-rate",
        "5e-4",
        "--resume",
        trial.folder / "saved" / "step-8",
    )
    assert result.returncode == 0, result.stderr
    assert "on 2 rank(s), cpu, after 1, cpu, so other random numbers" in result.stdout
    (resume,) = trial.events("two", "resume")
    assert (resume["step"], resume["tokens"]) == (4, 8 * 2 * 16)
    losses = trial.losses("two")
    assert min(losses) == 4  # the first step that is made, the fifth
    at_the_end, (first, _) = trial.losses("one")[7], losses[4]
    assert abs(first - at_the_end[0]) < abs(first - trial.losses("one")[0][0])


@pytest.mark.parametrize("base", BASES)
def test_a_full_disk_costs_a_line(trial, base):
    script = trial.script(base)
    trial.run(script, "one", "--max-steps", "4", saved="saved")
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))\n"
    script.write_text(limit + script.read_text())
    result = trial.run(script, "two", "--max-steps", "14", "--resume", "auto", saved="saved")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("couldn't be written, training goes on without") == 1
    assert trial.saved("saved") == ["step-4"]
    assert trial.events("two", "end")[-1]["status"] == "complete"
    assert len(trial.events("two", "checkpoint_failed")) >= 3


@pytest.mark.parametrize("base", BASES)
def test_sigterm_saves_at_the_next_line_and_ends(trial, whole, base):
    script = trial.script(base, step=6, how="os.kill(os.getpid(), signal.SIGTERM)")
    first = trial.run(script, "ended", "--resume", "auto", saved="saved")
    assert "interrupted by signal 15" in first.stderr
    assert first.returncode == (128 + signal.SIGTERM if base == "01" else 1)
    assert trial.saved("saved") == ["step-4", "step-6"]
    second = trial.run(script, "ended", "--resume", "auto", saved="saved")
    assert second.returncode == 0, second.stderr
    assert trial.losses("ended") == whole(base)


@pytest.mark.slow
def test_nan_on_one_rank_stops_all(trial):
    """And weights that aren't finite take no good ones' place."""
    script = trial.script("02", step=11, rank=1, how="model.head.weight.data.fill_(float('nan'))")
    result = trial.run(script, "nan", "--eval-freq", "15", saved="saved")
    assert result.returncode != 0
    assert result.stderr.count("the loss is not finite") == 1  # one rank tells it
    assert "error: rank 0: the loss is not finite" in result.stderr
    assert trial.events("nan")[-1]["status"] == "diverged"
    assert "step-12 couldn't be written, training goes on without: the weights aren't finite" in (
        result.stdout
    )
    assert trial.saved("saved") == ["step-4", "step-8"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "says"),
    [
        (1, "error: rank 0: rank 1 is stuck or gone: it doesn't answer"),
        (0, "error: rank 1: a rank is stuck or gone: it is rank 0"),
    ],
)
def test_a_stuck_rank_is_named(trial, rank, says):
    """Rank 0, too, in whose place the others would else wait half an hour."""
    script = trial.script("02", "timeout-ranks", step=6, rank=rank, how="time.sleep(600)")
    result = trial.run(script, "stuck", "--rank-timeout", "5", timeout=120)
    assert result.returncode != 0
    assert says in result.stderr
    assert trial.events("stuck")[-1]["status"] == ("interrupted" if rank == 0 else "failed")


@pytest.mark.parametrize("base", BASES)
def test_weights_for_others(trial, base):
    """Text from the weights that were saved is the text at the end of the run."""
    from safetensors.torch import load_file

    result = trial.run(trial.script(base), "one", "--max-steps", "3", saved="saved")
    assert result.returncode == 0, result.stderr
    module = load(trial.script())
    weights = load_file(trial.folder / "saved" / "model.safetensors")
    config = module.Config(
        **module.MODELS["cpu-demo"]
        | dict(context_length=16, device=torch.device("cpu"), data=str(trial.data))
    )
    model = module.GPTModel(config)
    model.load_state_dict(weights)
    text = module.sample(model, module.load_data(config).tokenizer, config)
    assert text == trial.events("one", "epoch")[-1]["sample"]
