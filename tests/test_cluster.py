"""cluster/: the files for SkyPilot and Slurm, by the keys and options that these know, and by what
they start, with stand-ins for their programs."""

import os
import re
import shlex
import shutil
import subprocess

import pytest
from conftest import ROOT

from bench import commands
from bench.studies import all_studies

yaml = pytest.importorskip("yaml")
BASH = shutil.which("bash") or pytest.skip("needs bash", allow_module_level=True)
SKY, SLURM = ROOT / "cluster" / "sky.yaml", ROOT / "cluster" / "slurm.sh"
# What SkyPilot 0.14.1 takes: of a task, of its resources, of their autostop.
TASK = set(
    "name workdir num_nodes resources envs secrets file_mounts volumes setup run config service"
    " event_callback inputs outputs pool".split())
RESOURCES = set(
    "infra cloud region zone accelerators accelerator_args cpus memory instance_type use_spot"
    " disk_size disk_tier local_disk network_tier max_hourly_cost image_id ports labels volumes"
    " priority priority_class autostop any_of ordered job_recovery".split())
AUTOSTOP = {"idle_minutes", "wait_for", "hook", "hook_timeout", "down"}
# The long options of sbatch, by the manual of Slurm 26.11.
SBATCH = set(
    "account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment"
    " consolidate-segments constraint container container-id contiguous core-spec cores-per-socket"
    " cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency distribution error exclude"
    " exclusive export export-file extra extra-node-info get-user-env gid gpu-bind gpu-freq gpus"
    " gpus-per-node gpus-per-socket gpus-per-task gres gres-flags help hint hold ignore-pbs input"
    " job-name kill-on-invalid-dep licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu"
    " mem-per-gpu mem-update mincpus network nice no-kill no-requeue nodefile nodelist nodes ntasks"
    " ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket oom-kill-step open-mode"
    " output overcommit oversubscribe parsable partition prefer priority profile propagate qos"
    " quiet reboot requeue reservation resources resv-ports runtime segment signal sockets-per-node"
    " spread-job spread-segments stepmgr switches test-only thread-spec threads-per-core time"
    " time-min tmp tres-bind tres-per-task uid usage use-min-nodes verbose version wait"
    " wait-all-nodes wckey wrap".split())


@pytest.fixture
def run(tmp_path):
    """Runs a script in a folder whose programs are stand-ins, each of which notes its arguments and
    then ends with the code that `codes` has for the first word that it is told, or 0."""
    programs, noted = tmp_path / "programs", tmp_path / "noted"
    place = tmp_path / "repository"
    for path in (programs, place / ".venv" / "bin"):
        path.mkdir(parents=True)
    (place / "results").mkdir()
    for name in ("measure.py", "results/report.md", "results/stages.jsonl"):
        (place / name).touch()

    def run(script: str, *arguments, says=None, codes=None, **variables):
        noted.unlink(missing_ok=True)
        for path in (*(programs / name for name in ("srun", "scontrol", "conda", "make", "sudo",
                                                    "gcc", "git", "sky", "rsync")),
                     place / ".venv" / "bin" / "python"):
            cases = "".join(f'*"{word}"*) exit {code};;' for word, code in (codes or {}).items())
            path.write_text(f"#!{BASH}\necho {path.name} \"$@\" >> {shlex.quote(str(noted))}\n"
                            f"printf '{(says or {}).get(path.name, '')}'\n"
                            f'case "$*" in {cases} *) exit 0;; esac\n')
            path.chmod(0o755)
        done = subprocess.run(
            [BASH, "-c", script, "sh", *map(str, arguments)], cwd=place, capture_output=True,
            text=True, env=dict(PATH=f"{programs}:{os.defpath}:/bin:/usr/bin") | variables)
        done.started = noted.read_text().splitlines() if noted.exists() else []
        return done

    run.place = place
    return run


def parsed(command: str):
    """Of a command of measure.py."""
    words = shlex.split(command.partition("measure.py ")[2])
    return commands.make_parser(all_studies()).parse_args(words)


# ---- SkyPilot


@pytest.fixture(scope="module")
def sky() -> dict:
    return yaml.safe_load(SKY.read_text(encoding="utf-8"))


def test_keys_of_sky(sky):
    assert sky.keys() <= TASK and sky["resources"].keys() <= RESOURCES
    autostop = sky["resources"]["autostop"]
    assert autostop.keys() <= AUTOSTOP
    assert autostop["down"] is True and autostop["idle_minutes"] >= 30  # the copy has its time
    assert re.fullmatch(r"\w[\w-]*:\d+", sky["resources"]["accelerators"])
    assert sky["workdir"] == "."


def test_sky_measures_what_pack_takes(sky, run):
    variables = {name: str(value) for name, value in sky["envs"].items()}
    done = run(sky["run"], **variables)
    assert (done.returncode, done.stderr) == (0, "")
    report, stages = done.started
    assert report == "make report MINUTES=600 PIECES="
    assert parsed(stages).rounds == 2 and parsed(stages).resume
    # What failed doesn't end it: the second round comes in any case.
    failed = run(sky["run"], **variables, codes=dict(report=2, stages=1))
    assert (failed.returncode, failed.started) == (0, done.started)
    (run.place / "results" / "report.md").unlink()
    assert run(sky["run"], **variables).returncode == 1  # nothing to copy


def test_pieces_without_the_stages(sky, run):
    """There is no second round of what had no first one."""
    (run.place / "results" / "stages.jsonl").unlink()
    done = run(sky["run"], MINUTES="60", PIECES="ladder")
    assert (done.returncode, done.started) == (0, ["make report MINUTES=60 PIECES=ladder"])
    for code in (0, 1):
        done = run(SLURM.read_text(encoding="utf-8"), **JOB, PIECES="ladder",
                   codes=dict(report=code))
        assert (done.returncode, len(done.started)) == (code, 1)


@pytest.mark.parametrize("file", ["cluster/sky.yaml", "docs/multi-gpu.md"])
@pytest.mark.parametrize("broken", ["launch", "results", None])
def test_the_machine_ends_only_when_all_is_here(run, file, broken):
    """Not where the log's connection broke in the midst of the job, nor where the copy failed."""
    text = (ROOT / file).read_text(encoding="utf-8").replace("\n#", "\n")
    line, = re.findall(r"^ *(sky launch (?:.|\n)*? sky down -y gpt-speed)$", text, re.MULTILINE)
    done = run(line, codes={broken: 1} if broken else None)
    assert [started.split()[0] for started in done.started] == {
        "launch": ["sky"], "results": ["sky", "rsync"], None: ["sky", "rsync", "sky"]}[broken]
    assert "sky logs gpt-speed" in text


def test_sky_makes_the_environment_once(sky, run):
    done = run(sky["setup"])
    assert done.returncode == 0
    assert [line.split()[0] for line in done.started] == ["conda", "conda", "make", "python",
                                                          "python"]
    assert "make .venv" in done.started and "python measure.py doctor" in done.started
    (run.place / ".venv" / "complete").touch()
    assert [line.split()[0] for line in run(sky["setup"]).started] == ["python", "python"]
    assert ".venv/complete" in (ROOT / "Makefile").read_text()


def test_sky_ends_where_there_is_no_gpu(sky, run):
    """Before anything is measured."""
    assert run(sky["setup"], codes={"import torch": 1}).returncode == 1
    assert run(sky["setup"], codes={".venv": 2}).returncode == 2


# ---- Slurm


JOB = dict(SLURM_JOB_ID="7", SLURM_JOB_NODELIST="node[1-2]", SLURM_NNODES="2",
           SLURM_GPUS_ON_NODE="8", SLURM_CPUS_PER_TASK="16")


def test_options_of_slurm():
    text = SLURM.read_text(encoding="utf-8")
    options = re.findall(r"^#SBATCH --([\w-]+)=\S+$", text, re.MULTILINE)
    assert len(options) == text.count("#SBATCH") == len(set(options)) and set(options) <= SBATCH
    # sbatch reads no further than to the first command.
    before = re.split(r"^(?!#|$)", text, maxsplit=1, flags=re.MULTILINE)[0]
    assert before.count("#SBATCH") == len(options)
    assert subprocess.run([BASH, "-n", SLURM]).returncode == 0
    page = (ROOT / "docs" / "multi-gpu.md").read_text(encoding="utf-8")
    typed = re.findall(r"(?<![\w-])--([\w-]+)", "".join(re.findall(r"sbatch (.*?)cluster/", page)))
    assert {"nodes", "gpus-per-node"} <= set(typed) <= SBATCH


def test_slurm_measures_what_pack_takes(run):
    script = SLURM.read_text(encoding="utf-8")
    done = run(script, **JOB, PIECES="stages,ladder")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    for line in done.started:
        assert line.startswith("srun --cpus-per-task=16 --nodes=1 --ntasks=1 .venv/bin/python ")
    report, stages = map(parsed, done.started)
    assert (report.command, report.pieces) == ("report", "stages,ladder")
    assert (stages.command, stages.rounds, stages.resume) == ("stages", 2, True)
    # A run that failed doesn't end it; the end of its time does.
    failed = run(script, **JOB, codes=dict(report=1))
    assert (failed.returncode, len(failed.started)) == (0, 2)
    ended = run(script, **JOB, codes=dict(report=143))
    assert (ended.returncode, len(ended.started)) == (143, 1)


def test_slurm_trains_on_all_nodes(run):
    done = run(SLURM.read_text(encoding="utf-8"), "/shared/my.py", "--data", "a folder", **JOB,
               PYTHON="python3", says=dict(scontrol="node1\\nnode2\\n"))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.started == [
        "scontrol show hostnames node[1-2]",
        "srun --cpus-per-task=16 python3 -m torch.distributed.run --nnodes=2 --nproc_per_node=8"
        " --rdzv-backend=c10d --rdzv-endpoint=node1:29400 --rdzv-id=7 --max-restarts=3"
        " /shared/my.py --data a folder"]


def test_slurm_says_what_is_missing(run):
    script = SLURM.read_text(encoding="utf-8")
    for variables, says in (
            (dict(PYTHON="nowhere"), "there is no nowhere: run make .venv, or submit it with PY"),
            ({}, f"{run.place} isn't the folder of measure.py: submit it from there")):
        if not variables:
            (run.place / "measure.py").unlink()
        done = run(script, **JOB, **variables)
        assert (done.returncode, done.stdout, done.started) == (1, "", [])
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"error: {says}")
