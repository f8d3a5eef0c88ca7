"""The archive of a job's code, its objects, and how the agent unpacks it."""

from __future__ import annotations

import base64
import gzip
import io
import os
import random
import tarfile
from pathlib import Path

import pytest
import yaml

from elasticjob._runtime.agent import shipped_code
from elasticjob._runtime.agent.shipped_code import CodeError, ShippedCode, unpack_archive
from elasticjob._runtime.local.manifest.job_schema import find_problems
from elasticjob.cli.shipping import archive as archives
from elasticjob.cli.shipping.archive import pack_files, pack_folder
from elasticjob.cli.shipping.errors import SubmitError
from elasticjob.cli.shipping.flag_values import parse_claims, parse_env, parse_names
from elasticjob.cli.shipping.job_request import (
    JobRequest,
    code_object,
    job_manifest,
    job_name,
)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def names(data: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return tar.getnames()


def test_the_same_files_give_the_same_bytes(tmp_path: Path) -> None:
    one = write(tmp_path / "one", {"b.py": "2", "a/x.py": "1"})
    other = write(tmp_path / "other", {"a/x.py": "1", "b.py": "2"})
    os.utime(other / "b.py", (1, 1))
    (other / "b.py").chmod(0o600)
    assert pack_folder(one).data == pack_folder(other).data
    write(other, {"b.py": "3"})
    assert pack_folder(one).digest != pack_folder(other).digest


def test_what_is_no_code_is_left_out(tmp_path: Path) -> None:
    ignored = [".git/HEAD", "a/__pycache__/x.pyc", "env/pyvenv.cfg", "env/lib.py", ".venv/x", ".env", "x.egg-info/y"]
    kept = ["train.py", "a/model.py", "config/env.yaml"]
    root = write(tmp_path, dict.fromkeys([*ignored, *kept], "x"))
    assert names(pack_folder(root).data) == sorted(kept)


@pytest.mark.parametrize(
    ("pattern", "left_out"),
    [
        ("*.csv", ["data/big.csv", "data/deep/x.csv"]),
        ("data/", ["data/big.csv", "data/deep/x.csv"]),
        ("data/*.csv", ["data/big.csv"]),
        ("/deep", []),
        ("train.py/", []),
        ("# *.py", []),
    ],
)
def test_the_ignore_file(tmp_path: Path, pattern: str, left_out: list[str]) -> None:
    files = ["data/big.csv", "data/deep/x.csv", "train.py"]
    root = write(tmp_path, {**dict.fromkeys(files, "x"), ".elasticjobignore": f"\n{pattern}\n"})
    assert names(pack_folder(root).data) == [name for name in files if name not in left_out]


@pytest.mark.parametrize("pattern", ["!keep.py", "a/**/b"])
def test_a_pattern_that_would_not_do_what_it_says_is_refused(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(SubmitError, match="not supported"):
        pack_folder(write(tmp_path, {".elasticjobignore": pattern}))


def test_an_archive_over_the_limit_names_the_biggest_files(tmp_path: Path) -> None:
    write(tmp_path, {"train.py": "x"})
    (tmp_path / "weights.bin").write_bytes(random.Random(1).randbytes(1 << 20))
    with pytest.raises(SubmitError, match=r"1\.0 MiB compressed, and at most 900 KiB .* weights\.bin \(1\.0 MiB\), tr"):
        pack_folder(tmp_path)


def test_a_folder_over_the_limit_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MAX_UNPACKED", 5)
    monkeypatch.setattr(archives, "read_file", lambda _path: pytest.fail("read"))
    with pytest.raises(SubmitError, match=r"has 9 bytes, and at most 5 bytes .* a\.py \(9 bytes\)"):
        pack_folder(write(tmp_path, {"a.py": "123456789"}))
    monkeypatch.setattr(archives, "MAX_FILES", 1)
    with pytest.raises(SubmitError, match="more than 1 files"):
        pack_folder(write(tmp_path, {"b.py": ""}))


def test_links(tmp_path: Path) -> None:
    root = write(tmp_path, {"real.py": "x", "folder/y.py": "y"})
    (root / "link.py").symlink_to("real.py")
    assert names(pack_folder(root).data) == ["folder/y.py", "link.py", "real.py"]
    (root / "linked").symlink_to("folder")
    with pytest.raises(SubmitError, match="linked is a link to a folder"):
        pack_folder(root)
    (root / "linked").unlink()
    (root / "dead").symlink_to("nowhere")
    with pytest.raises(SubmitError, match="dead is a link to nothing"):
        pack_folder(root)


def test_the_agent_unpacks_what_was_packed(tmp_path: Path) -> None:
    root = write(tmp_path / "code", {"train.py": "print(1)", "a/b/run.sh": "echo"})
    (root / "a/b/run.sh").chmod(0o755)
    packed, target = pack_folder(root), write(tmp_path / "files", {"train.py": "old", "checkpoint": "kept"})
    (target / "train.py").chmod(0o444)
    mounted = tmp_path / "code.tar.gz"
    mounted.write_bytes(packed.data)
    code = ShippedCode(mounted, target)
    code.unpack()
    assert code.digest == packed.digest
    assert (target / "train.py").read_text() == "print(1)"
    assert (target / "checkpoint").read_text() == "kept"
    assert os.access(target / "a/b/run.sh", os.X_OK)
    assert not os.access(target / "train.py", os.X_OK)


def test_without_shipped_code_nothing_is_unpacked(tmp_path: Path) -> None:
    code = ShippedCode(tmp_path / "none", tmp_path / "files")
    code.unpack()
    assert code.digest == ""
    assert not code.differs("")
    assert not (tmp_path / "files").exists()


def tar_of(name: str, kind: bytes = tarfile.REGTYPE) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = kind, "/etc/passwd"
        tar.addfile(member)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "data",
    [tar_of("../up"), tar_of("/etc/x"), tar_of("link", tarfile.SYMTYPE), b"no gzip", gzip.compress(b"no tar" * 99)],
    ids=["a folder above", "an absolute path", "a link", "no gzip", "no tar"],  # the bytes contain the time
)
def test_an_archive_that_reaches_out_of_its_folder_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(CodeError, match="the shipped code"):
        unpack_archive(data, tmp_path / "files")
    assert not (tmp_path / "files").exists()


def test_an_archive_that_is_too_large_is_refused_and_never_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = pack_files([(f"{name}.py", b"x", False) for name in "abc"], "").data
    monkeypatch.setattr(shipped_code, "MAX_TAR", 2048)  # the headers and contents of two files
    with pytest.raises(CodeError, match="more than the 2048 bytes"):
        unpack_archive(archive, tmp_path / "files")
    assert not (tmp_path / "files").exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    mounted = tmp_path / "code.tar.gz"
    mounted.write_bytes(pack_files([("a.py", b"x", False)], "").data)
    (tmp_path / "files").write_text("a file")
    with pytest.raises(CodeError, match=r"cannot be unpacked in .*files"):
        ShippedCode(mounted, tmp_path / "files").unpack()


def test_the_objects_of_a_job() -> None:
    request = JobRequest(
        "bert", "image:1", ("python3", "train.py", "--lr", "1"), pods=4, min_pods=2, gpus=8, memory="16Gi", cpu="4",
        env={"A": "b"},
    )  # fmt: skip
    packed = pack_files([("train.py", b"x", False)], "")
    job, code = job_manifest(request, packed.digest), code_object(request, packed)
    assert find_problems(job) == []
    assert job["spec"]["replicas"] == 4
    assert job["spec"]["elasticPolicy"] == {"minReplicas": 2, "maxReplicas": 4}
    assert job["spec"]["nprocPerNode"] == 8
    (trainer,) = job["spec"]["template"]["spec"]["containers"]
    assert trainer["resources"] == {
        "requests": {"cpu": "4", "memory": "16Gi"}, "limits": {"memory": "16Gi", "nvidia.com/gpu": 8},
    }  # fmt: skip
    assert trainer["env"] == [{"name": "A", "value": "b"}]
    (volume, _) = job["spec"]["template"]["spec"]["volumes"]
    assert volume["configMap"]["name"] == code["metadata"]["name"] == "bert-code"
    assert base64.b64decode(code["binaryData"]["code.tar.gz"]) == packed.data
    annotation = {"elasticjob.dev/code-sha256": packed.digest}
    assert job["metadata"]["annotations"] == code["metadata"]["annotations"] == annotation
    yaml.safe_dump_all([job, code])


def test_a_number_of_workers_is_written_where_the_default_is_another() -> None:
    found = [
        job_manifest(JobRequest("a", "i", ("x",), gpus=gpus, workers=workers), "")["spec"].get("nprocPerNode")
        for gpus, workers in ((0, None), (1, 1), (8, 1), (8, None), (0, 2))
    ]
    assert found == [None, None, 1, 8, 2]


def test_wrong_wishes() -> None:
    with pytest.raises(SubmitError, match="--pods 4 is not between --min-pods 5 and --max-pods 4"):
        job_manifest(JobRequest("a", "i", ("x",), pods=4, min_pods=5), "")
    with pytest.raises(SubmitError, match="--env A: want NAME=VALUE"):
        parse_env(["A"])
    assert parse_env(["A=b=c", "B="]) == {"A": "b=c", "B": ""}


@pytest.mark.parametrize(
    ("script", "name"),
    [("train.py", "train-x1"), ("src/My_Model.v2.py", "my-model-v2-x1"), ("7.py", "job-7-x1"), ("_.py", "job-x1"),
     ("a" * 99, "a" * 40 + "-x1")],
)  # fmt: skip
def test_the_name_of_a_job(script: str, name: str) -> None:
    assert job_name(script, "x1") == name


def test_claims_and_pull_secrets_of_the_pods() -> None:
    claims = parse_claims(["data:/data:ro", "out:/out/", "data:/more:rw"])
    request = JobRequest("a", "i", ("x",), claims=claims, image_pull_secrets=parse_names("--s", ["one", "two", "one"]))
    pod = job_manifest(request, "digest")["spec"]["template"]["spec"]
    assert pod["imagePullSecrets"] == [{"name": "one"}, {"name": "two"}]
    assert pod["containers"][0]["volumeMounts"][2:] == [
        {"name": "pvc-0", "mountPath": "/data", "readOnly": True},
        {"name": "pvc-1", "mountPath": "/out"},
        {"name": "pvc-0", "mountPath": "/more"},
    ]
    assert [v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"][2:]] == ["data", "out"]
    bare = job_manifest(JobRequest("a", "i", ("x",)), "")["spec"]["template"]["spec"]
    assert set(bare) == {"containers"}


@pytest.mark.parametrize(
    ("texts", "error"),
    [
        (["data"], "want CLAIM:/path"),
        (["data:out"], "want CLAIM:/path"),
        (["data:/data:r"], "want CLAIM:/path"),
        ([":/data"], "is no name of an object"),
        (["My_Data:/data"], "is no name of an object"),
        (["a:/data", "b:/data/"], "/data has the claim a already"),
        (["a:/elasticjob-code/files"], "mount it elsewhere"),
        (["a:/"], "mount it elsewhere"),
    ],
)
def test_claims_that_cannot_be_mounted(texts: list[str], error: str) -> None:
    with pytest.raises(SubmitError, match=error):
        parse_claims(texts)


def test_a_secret_that_is_no_name() -> None:
    with pytest.raises(SubmitError, match="--image-pull-secret a b: 'a b' is no name of an object"):
        parse_names("--image-pull-secret", ["a b"])
