"""`elasticjob convert` as a user runs it: files and standard input, exit codes, what is written where."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from support.local.run import PROGRAM

MANIFESTS = Path(__file__).parent / "manifests"
CLEAN = """\
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: NAME}
spec:
  pytorchReplicaSpecs:
    Worker:
      replicas: 2
      restartPolicy: Never
      template: {spec: {containers: [{name: pytorch, image: example/toy, command: [python, train.py]}]}}
"""


def run(*args: str, stdin: str = "", env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **(env or {})}
    return subprocess.run(
        [*PROGRAM, *args], input=stdin, text=True, capture_output=True, env=environment, timeout=60, check=False
    )


def names(output: str) -> list[str]:
    return [manifest["metadata"]["name"] for manifest in yaml.safe_load_all(output)]


def test_a_file_is_printed_and_notes_are_not_in_it() -> None:
    done = run("convert", str(MANIFESTS / "elastic_cpu.yaml"))
    assert done.returncode == 0
    assert done.stdout == (MANIFESTS / "elastic_cpu.expected.yaml").read_text()
    notes = (MANIFESTS / "elastic_cpu.notes.txt").read_text().splitlines()
    assert done.stderr.splitlines() == [f"note: {note}" for note in notes]


def test_standard_input_and_several_files_and_documents(tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    path.write_text("---\n".join(CLEAN.replace("NAME", name) for name in ("first", "second")))
    done = run("convert", str(path), "-", stdin=CLEAN.replace("NAME", "third"))
    assert (done.returncode, done.stderr) == (0, "")
    assert names(done.stdout) == ["first", "second", "third"]


def test_the_result_is_written_to_a_file(tmp_path: Path) -> None:
    output = tmp_path / "job.yaml"
    done = run("convert", "-", "--output", str(output), stdin=CLEAN.replace("NAME", "toy"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert names(output.read_text()) == ["toy"]
    assert run("convert", "-", "-o", str(tmp_path), stdin=CLEAN).returncode == 2


def test_strict_writes_nothing_if_there_is_a_note(tmp_path: Path) -> None:
    output = tmp_path / "job.yaml"
    done = run("convert", str(MANIFESTS / "elastic_cpu.yaml"), "--strict", "-o", str(output))
    assert done.returncode == 1
    assert done.stdout == ""
    assert "with --strict nothing is written" in done.stderr
    assert not output.exists()
    clean = run("convert", "-", "--strict", stdin=CLEAN.replace("NAME", "toy"))
    assert (clean.returncode, names(clean.stdout)) == (0, ["toy"])


def test_an_elasticjob_is_converted_to_another_version_and_back(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(run("convert", "-", stdin=CLEAN.replace("NAME", "toy")).stdout)
    beta = run("convert", "--to", "v1beta1", str(path))
    assert (beta.returncode, beta.stderr.count("\n")) == (0, 1)
    assert "v1beta1 is a preview that no cluster serves yet" in beta.stderr
    assert yaml.safe_load(beta.stdout)["apiVersion"] == "elasticjob.dev/v1beta1"
    back = run("convert", "-", stdin=beta.stdout)
    assert (back.returncode, back.stdout, back.stderr) == (0, path.read_text(), "")
    assert run("convert", "-", "--to", "v1beta1", stdin=CLEAN.replace("NAME", "toy")).stdout == beta.stdout
    same = run("convert", str(path))
    assert same.returncode == 2
    assert "ElasticJob toy, which is in v1alpha1 already: --to v1beta1 converts" in same.stderr
    assert run("convert", "--to", "v2", str(path)).returncode == 64


BAD: list[tuple[str, str, str]] = [
    ("not YAML", "kind: [PyTorchJob", "standard input: is not YAML: while parsing a flow sequence"),
    ("a text", "just words", "standard input: want Kubernetes objects, got 'just words'"),
    ("nothing", "", "want a PyTorchJob, TrainJob, HyperPodPyTorchJob, JobSet, found nothing"),
    ("another kind", "{kind: TFJob, metadata: {name: a}}", "HyperPodPyTorchJob, JobSet, found TFJob a"),
    ("an old version", CLEAN.replace("kubeflow.org/v1", "kubeflow.org/v1beta2"),
     "PyTorchJob toy: apiVersion: want kubeflow.org/v1, got 'kubeflow.org/v1beta2'"),
    ("no version", "{kind: TrainJob, metadata: {name: a}}",
     "TrainJob a: apiVersion: want trainer.kubeflow.org/v1alpha1, got None"),
    ("no name", CLEAN.replace("{name: NAME}", "{}"), "metadata.name: is required"),
    ("a bad name", CLEAN.replace("NAME", "Toy"), "metadata.name must start with a letter and have only a-z"),
    ("no command", CLEAN.replace(", command: [python, train.py]", ""),
     "elasticjob cannot read the ENTRYPOINT of example/toy"),
    ("a command that is a text", CLEAN.replace("[python, train.py]", "python train.py"),
     "containers[0].command: want a list of texts, got 'python train.py'"),
    ("a number that is a text", CLEAN.replace("replicas: 2", "replicas: two"),
     "pytorchReplicaSpecs.Worker.replicas: want a number, got 'two'"),
    ("another replica type", CLEAN.replace("Worker", "Server"), "a PyTorchJob has the replica types Master and Worker"),
    ("no replicas", CLEAN.replace("replicas: 2", "replicas: 0"),
     "spec.replicas in body should be greater than or equal to 1"),
    ("another restart policy", CLEAN.replace("Never", "Sometimes"), "want one of Always, OnFailure, Never, ExitCode"),
    ("an unknown field of a pod", CLEAN.replace("{containers", "{hostNetwrk: true, containers"),
     'unknown field "spec.template.spec.hostNetwrk"'),
    ("a sidecar named trainer", CLEAN.replace("[{name: pytorch", "[{name: trainer, image: a}, {name: pytorch"),
     "rename it: elasticjob takes a container named trainer for the trainer"),
    ("gpu without GPUs", CLEAN.replace("spec:\n", "spec:\n  nprocPerNode: gpu\n", 1).replace("python,", "torchrun,"),
     "nprocPerNode is gpu, and the trainer container requests no GPU"),
    ("a TrainJob without image and command",
     "{apiVersion: trainer.kubeflow.org/v1alpha1, kind: TrainJob, metadata: {name: a},"
     " spec: {runtimeRef: {name: torch}}}",
     "ClusterTrainingRuntime torch has the image and command of this job"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_bad_input_exits_2_with_a_sentence(text: str, message: str) -> None:
    done = run("convert", "-", stdin=text.replace("NAME", "toy"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("elasticjob convert: ")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_file_that_cannot_be_read_exits_2(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for path, message in (("/no/such.yaml", "No such file or directory"), (tmp_path / "binary", "is not YAML")):
        done = run("convert", str(path))
        assert (done.returncode, done.stdout) == (2, "")
        assert f"{path}: {message}" in done.stderr


def test_one_bad_job_leaves_nothing_written() -> None:
    done = run("convert", "-", stdin=f"{CLEAN.replace('NAME', 'good')}---\n{CLEAN.replace('NAME', 'Bad')}")
    assert (done.returncode, done.stdout) == (2, "")
    assert "standard input: PyTorchJob Bad: " in done.stderr


def test_wrong_flags_exit_64() -> None:
    assert run("convert").returncode == 64
    assert run("convert", "-", "--strictly").returncode == 64


@pytest.mark.parametrize(
    ("line", "words"), [("elasticjob con", {"convert"}), ("elasticjob convert --", {"--strict", "--output"})]
)
def test_the_shell_completes_the_command(line: str, words: set[str], tmp_path: Path) -> None:
    output = tmp_path / "completions"
    variables = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(output),
        "_ARGCOMPLETE_IFS": "\n",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
    }
    run(env=variables)
    assert words <= {word.strip() for word in output.read_text().splitlines()}
