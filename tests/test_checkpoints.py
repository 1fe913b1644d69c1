"""The variant checkpoint-resume: what is saved, and that a run goes on as if nothing had been."""

import io
import json
import os
import pickle
import resource
import shutil
import signal
from dataclasses import replace
from random import Random

import pytest
import torch
from conftest import TINY, call_main, environment, load, run_python, small, write_tokens

from patches import stack

pytest.importorskip(
    "safetensors", reason="needs safetensors: pip install -r requirements-extras.txt")

ONE, TWO = [], ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
BASES = [pytest.param("01", ONE, id="01"), pytest.param("02", TWO, id="02", marks=pytest.mark.slow)]
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
        text = stack.compose(["checkpoint-resume", *others],
                             base={"01": stack.LAST, "02": stack.DDP}[base]).decode()
        text = small(text)
        number = len(list(self.folder.glob("script-*")))
        if how:
            mark = str(self.folder / f"mark-{number}")
            lines = ONCE.format(mark=mark, step=step, rank=rank, how=how)
            update = "            times.append(now(config.device))\n"
            text = text.replace(update, update + lines, 1)
        path = self.folder / f"script-{base}-{number}.py"
        path.write_text(text)
        return path

    def run(self, script, results: str, *options, launch=ONE, saved: str | None = None, **how):
        """`saved`: the folder of the checkpoints, made every 4 steps."""
        return run_python(*launch, script, *self.options(results, saved), *options, **how)

    def main(self, script, results: str, *options, saved: str | None = None):
        """In this process."""
        return call_main(load(script), *self.options(results, saved), *options)

    def options(self, results: str, saved: str | None) -> list:
        where = ["--checkpoint-dir", self.folder / saved, "--checkpoint-every", 4] if saved else []
        return [*TINY, "--device", "cpu", "--no-compile", "--dtype", "float32", "--dropout", "0.1",
                "--data", self.data, "--results-dir", self.folder / results, "--eval-freq", "1",
                "--epochs", "2", *where]

    def events(self, results: str, kind: str | None = None) -> list[dict]:
        """Of all records of a folder, in the order of their files' last change."""
        paths = sorted((self.folder / results).glob("*.jsonl"),
                       key=lambda path: path.stat().st_mtime_ns)
        events = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
        return [event for event in events if kind in (None, event["event"])]

    def losses(self, results: str) -> dict:
        """By step; of a step that was made again, the later one."""
        return {log["step"]: (log["train_loss"], log["val_loss"])
                for log in self.events(results, "log")}

    def saved(self, folder: str) -> list[str]:
        return sorted(path.name for path in (self.folder / folder).glob("step-*"))


@pytest.fixture
def trial(tmp_path) -> Trial:
    return Trial(tmp_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The losses of a run of 01 or 02 that nothing happens to, by step."""
    known = {}

    def losses(base: str) -> dict:
        if base not in known:
            trial = Trial(tmp_path_factory.mktemp("whole"))
            result = trial.run(trial.script(base), "whole", launch=ONE if base == "01" else TWO)
            assert result.returncode == 0, result.stderr
            known[base] = trial.losses("whole")
            assert len(known[base]) == (42 if base == "01" else 20)
        return known[base]

    return losses


@pytest.mark.parametrize(("base", "launch", "step"), [
    pytest.param("01", ONE, 6, id="01-between two saves", marks=pytest.mark.slow),
    pytest.param("01", ONE, 24, id="01-right before a save, in epoch 2", marks=pytest.mark.slow),
    pytest.param("02", TWO, 8, id="02-right before a save", marks=pytest.mark.slow),
    pytest.param("02", TWO, 15, id="02-in epoch 2", marks=pytest.mark.slow),
])
def test_killed_and_resumed_is_never_killed(trial, whole, base, launch, step):
    script = trial.script(base, step=step, rank=0 if base == "01" else 1, how=KILLED)
    first = trial.run(script, "killed", "--resume", "auto", saved="saved", launch=launch)
    assert first.returncode != 0
    assert "No complete checkpoint in" in first.stdout and "this is a new run" in first.stdout
    second = trial.run(script, "killed", "--resume", "auto", saved="saved", launch=launch)
    assert second.returncode == 0, second.stderr
    before = (step - 1) // 4 * 4
    assert f"Resuming after step {before} from" in second.stdout
    assert trial.losses("killed") == whole(base)
    (resume,) = trial.events("killed", "resume")
    assert resume["step"] == before and resume["ranks"] == resume["earlier_ranks"]
    # No tokens of before are in the speed.
    end = trial.events("killed", "end")[-1]
    tokens = resume["tokens"] // before * (len(whole(base)) - before - 1)
    path = max((trial.folder / "killed").glob("*.jsonl"), key=lambda path: path.stat().st_mtime_ns)
    seconds = [second for log in map(json.loads, path.read_text().splitlines())
               if log["event"] == "log" for second in log["seconds"]]
    assert end["avg_tok_per_sec"] == pytest.approx(tokens / sum(seconds[1:]))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(int(os.environ.get("KILLS", 1))))
def test_torchrun_restarts_from_the_last_checkpoint(trial, whole, number):
    """KILLS=20 makes it 20 times, each with a rank and a step of its own."""
    random = Random(number)
    step, rank = random.randint(5, 19), random.randint(0, 1)
    script = trial.script("02", step=step, rank=rank, how=KILLED)
    result = trial.run(script, "killed", "--resume", "auto", saved="saved",
                       launch=[*TWO, "--max-restarts=3"],
                       env=environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"))
    assert result.returncode == 0, result.stderr
    before = (step - 1) // 4 * 4
    assert [resume["step"] for resume in trial.events("killed", "resume")] == [before]
    assert trial.losses("killed") == whole("02")


@pytest.mark.parametrize(("base", "launch"), BASES)
def test_written_beside_the_training(trial, base, launch):
    """What is saved is the state of its step, not of a later one."""
    script = trial.script(base)
    result = trial.run(script, "whole", "--checkpoint-async", saved="saved", launch=launch)
    assert result.returncode == 0, result.stderr
    before, last = ("step-40", "step-42") if base == "01" else ("step-16", "step-20")
    assert trial.saved("saved") == [before, last]
    again = trial.run(script, "again", "--resume", trial.folder / "saved" / before, launch=launch)
    assert again.returncode == 0, again.stderr
    whole, again = trial.losses("whole"), trial.losses("again")
    assert again and again == {step: whole[step] for step in again}


@pytest.mark.parametrize(("base", "launch", "others"), [
    pytest.param("01", ONE, ["optimizer-muon", "step-accumulation"], id="two optimizers"),
    pytest.param("02", TWO, ["parallel-sharded", "timeout-ranks"], id="sharded",
                 marks=pytest.mark.slow),
])
def test_with_other_variants(trial, base, launch, others):
    script = trial.script(base, *others)
    result = trial.run(script, "whole", "--max-steps", 8, saved="saved", launch=launch)
    assert result.returncode == 0, result.stderr
    again = trial.run(script, "again", "--max-steps", 8, "--resume",
                      trial.folder / "saved" / "step-4", launch=launch)
    assert again.returncode == 0, again.stderr
    whole, again = trial.losses("whole"), trial.losses("again")
    assert again == {step: whole[step] for step in range(4, 8)}


def test_the_newest_two_are_kept_and_half_a_one_is_none(trial):
    script = trial.script()
    trial.run(script, "one", "--max-steps", "14", saved="saved")
    assert trial.saved("saved") == ["step-12", "step-14"]
    (trial.folder / "saved" / "step-14" / ".metadata").unlink()
    result = trial.run(script, "two", "--max-steps", "15", "--resume", "auto", saved="saved")
    assert "Resuming after step 12" in result.stdout
    assert trial.saved("saved") == ["step-12", "step-15"]
    result = trial.run(script, "three", saved="saved")
    assert result.returncode == 1
    assert "holds checkpoints of an earlier run: go on from them by --resume auto" in result.stderr


@pytest.mark.parametrize(("options", "says"), [
    (["--batch-size", "1"], "was trained with batch_size 2, and this run has 1"),
    (["--max-steps", "4"], "is the end of the training: nothing is left to do"),
])
def test_a_mismatch_is_one_line(trial, options, says):
    script = trial.script()
    trial.run(script, "one", "--max-steps", "4", saved="saved")
    result = trial.run(script, "two", "--resume", trial.folder / "saved" / "step-4", *options)
    assert result.returncode == 1
    assert says in result.stderr and "Traceback" not in result.stderr


def test_damaged_checkpoints_and_other_tokens(trial):
    script = trial.script()
    trial.run(script, "one", "--max-steps", "4", saved="saved")
    saved = trial.folder / "saved" / "step-4"

    def refused(folder) -> str:
        return refusal(trial, script, folder)

    assert "holds no complete checkpoint" in refused(trial.folder / "nowhere")
    meta = trial.data / "meta.json"
    text = meta.read_text()
    meta.write_text(json.dumps(json.loads(text) | {"sha256": {"train": "0"}}))
    assert "was trained on other tokens" in refused(saved)
    meta.write_text(text)
    about = saved / "checkpoint.json"
    text = about.read_text()
    for spoiled in (text[:100], "[]", *(json.dumps(json.loads(text) | change) for change in (
            dict(epoch="x"), dict(windows=None), dict(config=[]), dict(train_seconds={})))):
        about.write_text(spoiled)
        assert "can't be read" in refused(saved), spoiled
    about.write_text(text)
    metadata = saved / ".metadata"
    whole = metadata.read_bytes()
    for spoiled in (b"", whole[:100], whole[:-1], b"\x80\x04." + whole):
        metadata.write_bytes(spoiled)
        assert "can't be read" in refused(saved), spoiled
    metadata.write_bytes(whole)
    for path in saved.glob("*.distcp"):
        path.write_bytes(path.read_bytes()[:100])
    assert "can't be read" in refused(saved)


def refusal(trial, script, folder) -> str:
    """The one line that says why a checkpoint isn't taken."""
    shutil.rmtree(trial.folder / "two", ignore_errors=True)  # or the same second, the same name
    result = trial.main(script, "two", "--resume", folder)
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
    known = pickle.loads(metadata.read_bytes())
    metadata.write_bytes(pickle.dumps(Program(mark)))
    assert "mkdir, which is no data" in refusal(trial, script, saved)
    metadata.write_bytes(pickle.dumps(None))  # then PyTorch would look for those of each rank
    metadata.with_name("__0.metadata").write_bytes(pickle.dumps(Program(mark)))
    assert "can't be read" in refusal(trial, script, saved)
    index, place = next((index, place) for index, place in known.storage_data.items()
                        if index.fqn.endswith(".lr"))
    file, program = saved / place.relative_path, io.BytesIO()
    torch.save(Program(mark), program)
    known.storage_data[index] = replace(place, offset=file.stat().st_size,
                                        length=len(program.getvalue()))
    file.write_bytes(file.read_bytes() + program.getvalue())
    metadata.write_bytes(pickle.dumps(known))
    assert "can't be read" in refusal(trial, script, saved)
    assert not mark.exists()
    metadata.write_bytes(pickle.dumps(Program(mark)))
    with metadata.open("rb") as file:
        pickle.load(file)
    assert mark.exists()  # it would have been


def test_a_clock_set_back_costs_no_checkpoint(trial):
    script = trial.script()
    trial.run(script, "one", "--max-steps", "8", saved="saved")
    for path in (trial.folder / "saved").glob("*/.metadata"):
        os.utime(path, (2**32, 2**32))
    result = trial.main(script, "two", "--max-steps", "12", "--resume", "auto", saved="saved")
    assert result.returncode == 0, result.stderr
    assert trial.saved("saved") == ["step-12", "step-8"]


@pytest.mark.slow
def test_another_number_of_ranks(trial):
    """From one process to two: the place in the text is kept, and so are the weights."""
    trial.run(trial.script(), "one", "--max-steps", "8", saved="saved")
    result = trial.run(trial.script("02"), "two", "--learning-rate", "5e-4", "--resume",
                       trial.folder / "saved" / "step-8", launch=TWO)
    assert result.returncode == 0, result.stderr
    assert "on 2 rank(s), cpu, after 1, cpu, so other random numbers" in result.stdout
    (resume,) = trial.events("two", "resume")
    assert (resume["step"], resume["tokens"]) == (4, 8 * 2 * 16)
    losses = trial.losses("two")
    assert min(losses) == 4  # the first step that is made, the fifth
    at_the_end, (first, _) = trial.losses("one")[7], losses[4]
    assert abs(first - at_the_end[0]) < abs(first - trial.losses("one")[0][0])


@pytest.mark.parametrize(("base", "launch"), BASES)
def test_a_full_disk_costs_a_line(trial, base, launch):
    script = trial.script(base)
    trial.run(script, "one", "--max-steps", "4", saved="saved", launch=launch)

    def full():
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))

    result = trial.run(script, "two", "--max-steps", "14", "--resume", "auto", saved="saved",
                       launch=launch, preexec_fn=full)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("couldn't be written, training goes on without") == 1
    assert trial.saved("saved") == ["step-4"]
    assert trial.events("two", "end")[-1]["status"] == "complete"
    assert len(trial.events("two", "checkpoint_failed")) >= 3


@pytest.mark.parametrize(("base", "launch"), BASES)
def test_sigterm_saves_at_the_next_line_and_ends(trial, whole, base, launch):
    script = trial.script(base, step=6, how="os.kill(os.getpid(), signal.SIGTERM)")
    first = trial.run(script, "ended", "--resume", "auto", saved="saved", launch=launch)
    assert "interrupted by signal 15" in first.stderr
    assert first.returncode == (128 + signal.SIGTERM if base == "01" else 1)
    assert trial.saved("saved") == ["step-4", "step-6"]
    second = trial.run(script, "ended", "--resume", "auto", saved="saved", launch=launch)
    assert second.returncode == 0, second.stderr
    assert trial.losses("ended") == whole(base)


@pytest.mark.slow
def test_nan_on_one_rank_stops_all(trial):
    script = trial.script("02", step=3, rank=1, how="model.head.weight.data.fill_(float('nan'))")
    result = trial.run(script, "nan", launch=TWO)
    assert result.returncode != 0
    assert result.stderr.count("the loss is not finite") == 1  # one rank tells it
    assert "error: rank 0: the loss is not finite" in result.stderr
    assert trial.events("nan")[-1]["status"] == "diverged"


@pytest.mark.slow
def test_weights_that_are_not_finite_take_no_good_ones_place(trial):
    script = trial.script("02", step=11, rank=1, how="model.head.weight.data.fill_(float('nan'))")
    result = trial.run(script, "nan", "--eval-freq", "50", saved="saved", launch=TWO)
    assert result.returncode != 0
    assert "step-12 couldn't be written, training goes on without: the weights aren't finite" in (
        result.stdout)
    assert trial.saved("saved") == ["step-4", "step-8"]


@pytest.mark.slow
def test_a_stuck_rank_is_named(trial):
    script = trial.script("02", "timeout-ranks", step=6, rank=1, how="time.sleep(600)")
    result = trial.run(script, "stuck", "--rank-timeout", "5", launch=TWO, timeout=120)
    assert result.returncode != 0
    assert "error: rank 0: rank 1 is stuck or gone: it doesn't answer" in result.stderr
    assert trial.events("stuck")[-1]["status"] == "failed"


@pytest.mark.parametrize(("base", "launch"), BASES)
def test_weights_for_others(trial, base, launch):
    """Text from the weights that were saved is the text at the end of the run."""
    from safetensors.torch import load_file

    result = trial.run(trial.script(base), "one", "--max-steps", "3", saved="saved", launch=launch)
    assert result.returncode == 0, result.stderr
    module = load(trial.script())
    weights = load_file(trial.folder / "saved" / "model.safetensors")
    config = module.Config(**module.MODELS["cpu-demo"] | dict(
        context_length=16, device=torch.device("cpu"), data=str(trial.data)))
    model = module.GPTModel(config)
    model.load_state_dict(weights)
    text = module.sample(model, module.load_data(config).tokenizer, config)
    assert text == trial.events("one", "epoch")[-1]["sample"]
