"""`make release` writes the same bytes each time, and what it writes installs; the version is written in one way."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib
import yaml
from packaging.requirements import Requirement

from cluster.build import NEWEST, OLDEST
from release import version as versions
from release.__main__ import empty
from release.bill_of_materials import LOCKS, pins
from release.images import with_docker, without_docker
from release.provenance import write_provenance
from release.source import REPOSITORY, ReleaseError, Source, copy_source, read_version

VERSION = read_version()
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


def release(dist: Path) -> dict[str, str]:
    """Build a release without its image; return the SHA-256 of the files by name."""
    command = [sys.executable, "-m", "release", "--dist", str(dist), "--no-image", "--allow-changes"]
    done = subprocess.run(
        command, cwd=REPOSITORY / ".ci", env={"PATH": "/usr/bin:/bin", "PYTHONPATH": "."},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in dist.iterdir()}


@pytest.mark.slow
def test_a_release_is_the_same_each_time_and_installs_without_an_index(tmp_path: Path) -> None:
    dist = tmp_path / "dist"
    first = release(dist)
    assert release(dist) == first
    wheel = f"elasticjob-{VERSION}-py3-none-any.whl"
    assert {wheel, f"elasticjob-{VERSION}.tar.gz", f"elasticjob-chart-{VERSION}.tgz", "operator.lock"} <= first.keys()

    sums = [line.split("  ") for line in (dist / "SHA256SUMS").read_text().splitlines()]
    listed = {name: digest for digest, name in sums}
    assert listed == {name: digest for name, digest in first.items() if name != "SHA256SUMS"}
    statement = json.loads((dist / f"elasticjob-{VERSION}.provenance.json").read_text())
    subjects = {subject["name"]: subject["digest"]["sha256"] for subject in statement["subject"]}
    assert subjects == {name: digest for name, digest in listed.items() if not name.endswith(".provenance.json")}
    bill = json.loads((dist / f"elasticjob-{VERSION}.cdx.json").read_text())
    locked = {pin[:2] for lock in LOCKS for pin in pins((dist / f"{lock}.lock").read_text())}
    assert {(part["name"], part["version"]) for part in bill["components"]} == locked

    source = tmp_path / "source"
    shutil.unpack_archive(dist / f"elasticjob-{VERSION}.tar.gz", source, filter="data")
    epoch = statement["predicate"]["buildDefinition"]["internalParameters"]["SOURCE_DATE_EPOCH"]
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=source / f"elasticjob-{VERSION}", env={"PATH": "/usr/bin:/bin", "SOURCE_DATE_EPOCH": str(epoch)},
        check=True, capture_output=True,
    )  # fmt: skip
    assert hashlib.sha256((tmp_path / wheel).read_bytes()).hexdigest() == first[wheel]

    uv, venv = [sys.executable, "-m", "uv"], tmp_path / "venv"
    subprocess.run([*uv, "venv", "-q", str(venv)], check=True)
    install = ["pip", "install", "-q", "--offline", "--no-index", "--python", str(venv / "bin/python")]
    subprocess.run([*uv, *install, str(dist / wheel)], check=True)
    for program in ("elasticjob", "kubectl-elasticjob"):
        said = subprocess.run([venv / "bin" / program, "version"], capture_output=True, text=True, check=True)
        assert VERSION in said.stdout
    files = [path for path in venv.rglob("elasticjob*/**/*.py") if "site-packages" in path.parts]
    assert len(files) > 500


def test_the_version_is_the_same_in_all_places(tmp_path: Path) -> None:
    found = list(versions.places())
    assert [(path, version) for path, version in found if version != VERSION] == []
    assert {glob for glob in versions.PLACES if not any(path.match(glob) for path, _ in found)} == set()
    for path, _ in found:
        copy = tmp_path / path.relative_to(REPOSITORY)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    assert len(versions.set_version("9.8.7rc1", tmp_path)) == len({path for path, _ in found})
    assert {version for _, version in versions.places(tmp_path)} == {"9.8.7rc1"}
    assert versions.chart_version("9.8.7rc1") == "9.8.7-rc1"
    with pytest.raises(ReleaseError, match="next is not a version"):
        versions.set_version("next", tmp_path)


@pytest.mark.parametrize("extra", LOCKS)
def test_a_lock_has_a_version_that_pyproject_allows_of_each_requirement(extra: str) -> None:
    locked: dict[str, list[str]] = {}
    text = (REPOSITORY / f"requirements/{extra}.lock").read_text()
    for name, version, _, hashes in pins(text):
        assert hashes, name
        locked.setdefault(name, []).append(version)
    assert sum(map(len, locked.values())) == text.count("==")
    for requirement in map(Requirement, [*PROJECT["dependencies"], *PROJECT["optional-dependencies"][extra]]):
        assert all(requirement.specifier.contains(version) for version in locked[requirement.name]), requirement


def test_nothing_is_released_over_other_files_or_from_changes(tmp_path: Path) -> None:
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist/thesis.tex").touch()
    with pytest.raises(ReleaseError, match="not those of an earlier release"):
        empty(tmp_path / "dist")
    repository = tmp_path / "repository"
    git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@example.com"]
    subprocess.run(["git", "init", "-q", str(repository)], check=True)
    (repository / "pyproject.toml").write_text('[project]\nversion = "1.2.3"\n')
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "a"], check=True)
    (repository / "untracked").touch()
    source = copy_source(tmp_path / "one", allow_changes=False, repository=repository)
    assert (source.version, source.changed) == ("1.2.3", False)
    assert [path.name for path in source.folder.iterdir()] == ["pyproject.toml"]
    (repository / "pyproject.toml").write_text('[project]\nversion = "1.2.4"\n')
    with pytest.raises(ReleaseError, match="changes that are in no commit"):
        copy_source(tmp_path / "two", allow_changes=False, repository=repository)
    assert copy_source(tmp_path / "two", allow_changes=True, repository=repository).changed


def test_the_image_is_built_for_both_architectures_or_the_release_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source(tmp_path, "1.2.3", "c", 1, changed=False)
    ran: list[list[str]] = []

    def docker(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", docker)
    monkeypatch.setenv("PYTHON_IMAGE", "python@sha256:0")
    built = with_docker(source, tmp_path)
    assert {"linux/amd64,linux/arm64", "PYTHON=python@sha256:0"} <= set(ran[0])
    assert "amd64 and arm64" in " ".join(built.notes)
    statement = json.loads(write_provenance(source, [], tmp_path).read_text())
    base = statement["predicate"]["buildDefinition"]["resolvedDependencies"][-1]
    assert base == {"uri": "oci:python", "digest": {"sha256": "0"}}
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert "not built" in " ".join(without_docker(source, tmp_path).notes)


WORKFLOWS = {path.name: yaml.safe_load(path.read_text()) for path in (REPOSITORY / ".github/workflows").glob("*.yml")}


def test_the_workflows_run_what_there_is() -> None:
    assert WORKFLOWS.keys() == {"test.yml", "release.yml"}
    targets = set(re.findall(r"^([a-z0-9-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    for name, workflow in WORKFLOWS.items():
        steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
        commands = "\n".join(step.get("run", "") for step in steps)
        assert ".ci/run" in commands, name
        assert set(re.findall(r"\bmake ([a-z0-9-]+)", commands)) <= targets
        for action in (step["uses"] for step in steps if "uses" in step):
            assert re.fullmatch(r"[\w/-]+@[\w./-]+", action)
        for job in workflow["jobs"].values():
            assert "permissions" in job, name


def test_pages_and_chart_claim_the_kubernetes_that_tests_run_on() -> None:
    oldest, newest = OLDEST.minor, NEWEST.minor
    chart = yaml.safe_load((REPOSITORY / "charts/elasticjob/Chart.yaml").read_text())
    assert chart["kubeVersion"] == f">={oldest}.0-0"
    for page in ("README.md", "docs/get-started/install.md"):
        assert f"Kubernetes {oldest} or newer" in (REPOSITORY / page).read_text()
    assert (
        f"| Kubernetes | {oldest} or newer | {newest} and {oldest}:"
        in (REPOSITORY / "docs/operate/versions.md").read_text()
    )
    assert f"e2e-oldest: export ELASTICJOB_KUBERNETES = {oldest}\n" in (REPOSITORY / "Makefile").read_text()
