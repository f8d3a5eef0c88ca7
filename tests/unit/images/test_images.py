"""Image archives: the same input gives the same image, and only listed paths are left out."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import IO

import pytest

from cluster.archives import read_archive
from images import elasticjob, oci
from images.debian import DOCUMENTS, copy_without


def recipe(content: bytes, built: list[bytes] | None = None) -> oci.Recipe:
    def make(output: IO[bytes]) -> None:
        if built is not None:
            built.append(content)
        with tarfile.open(fileobj=output, mode="w|") as tar:
            oci.add_file(tar, "app/file", content)

    return oci.Recipe("test", {"content": content.decode()}, make)


def test_a_layer_is_built_once(tmp_path: Path) -> None:
    built: list[bytes] = []
    first = oci.Cache(tmp_path).layer(recipe(b"a", built))
    again = oci.Cache(tmp_path).layer(recipe(b"a", built))
    other = oci.Cache(tmp_path).layer(recipe(b"b", built))
    assert (first, built) == (again, [b"a", b"b"])
    assert other != first


def test_a_layer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def make(output: IO[bytes]) -> None:
        output.write(b"half")
        raise OSError("disk full")

    broken = oci.Recipe("test", {"content": "c"}, make)
    cache = oci.Cache(tmp_path)
    with pytest.raises(OSError, match="disk full"):
        cache.layer(broken)
    assert cache.known(broken) is None
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def image(cache: oci.Cache, *contents: bytes) -> oci.Image:
    return oci.Image("app:1", [cache.layer(recipe(content)) for content in contents], {"Cmd": ["true"]})


def test_an_archive_is_written_only_when_it_changes(tmp_path: Path) -> None:
    cache, archive = oci.Cache(tmp_path / "cache"), tmp_path / "app.tar"
    assert oci.write_archive(image(cache, b"a"), cache, archive)
    first = archive.read_bytes()
    assert not oci.write_archive(image(cache, b"a"), cache, archive)
    assert oci.write_archive(image(cache, b"a", b"b"), cache, archive)
    assert oci.write_archive(image(cache, b"a"), cache, archive)
    assert archive.read_bytes() == first


def test_the_blobs_of_an_archive_have_their_digests(tmp_path: Path) -> None:
    cache, archive = oci.Cache(tmp_path / "cache"), tmp_path / "app.tar"
    oci.write_archive(image(cache, b"a", b"b"), cache, archive)
    (named,) = read_archive(archive)
    assert named.name == "docker.io/library/app:1"
    with tarfile.open(archive) as tar:

        def blob(digest: str) -> bytes:
            file = tar.extractfile(f"blobs/{digest.replace(':', '/')}")
            assert file is not None
            content = file.read()
            assert oci.descriptor("", content)["digest"] == digest
            return content

        manifest = json.loads(blob(named.digest))
        config = json.loads(blob(manifest["config"]["digest"]))
        layers = [layer["digest"] for layer in manifest["layers"]]
        assert config["rootfs"]["diff_ids"] == layers
        with tarfile.open(fileobj=io.BytesIO(blob(layers[1]))) as layer:
            assert layer.getnames() == ["app/file"]


def root(*names: str, links: dict[str, str] | None = None) -> bytes:
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w") as tar:
        for name in names:
            oci.add_file(tar, f"./{name}", name.encode())
        for name, target in (links or {}).items():
            entry = tarfile.TarInfo(f"./{name}")
            entry.type, entry.linkname = tarfile.LNKTYPE, f"./{target}"
            tar.addfile(entry)
    return output.getvalue()


KEPT: list[tuple[str, bool]] = [
    ("usr/bin/python3", True),
    ("usr/share/doc/torch/html/index.html", False),
    ("usr/share/doc/torch/copyright", True),
    ("usr/share/locale/de/LC_MESSAGES/tar.mo", False),
    ("usr/lib/locale/C.utf8/LC_CTYPE", True),
    ("dev/console", False),
    ("usr/share/common-licenses/GPL-3", True),
]


@pytest.mark.parametrize(("name", "kept"), KEPT)
def test_files_that_containers_do_not_need_are_left_out(name: str, kept: bool) -> None:
    output = io.BytesIO()
    copy_without(io.BytesIO(root(name)), output, DOCUMENTS)
    with tarfile.open(fileobj=io.BytesIO(output.getvalue())) as tar:
        assert tar.getnames() == ([name] if kept else [])


def test_a_hard_link_to_a_dropped_file_is_dropped() -> None:
    output = io.BytesIO()
    links = {"usr/bin/other": "usr/bin/perl", "usr/bin/sh": "usr/bin/dash"}
    copy_without(io.BytesIO(root("usr/bin/perl", "usr/bin/dash", links=links)), output, ["usr/bin/perl"])
    with tarfile.open(fileobj=io.BytesIO(output.getvalue())) as tar:
        assert tar.getnames() == ["usr/bin/dash", "usr/bin/sh"]
        content = tar.extractfile("usr/bin/sh")
        assert content is not None
        assert content.read() == b"usr/bin/dash"


def test_the_agent_zip_is_reproducible_and_runs(tmp_path: Path) -> None:
    assert elasticjob.agent_zip() == elasticjob.agent_zip()
    (tmp_path / "agent.pyz").write_bytes(elasticjob.agent_zip())
    assert run(tmp_path / "agent.pyz", "version") == (0, elasticjob.version())
    assert run(tmp_path / "agent.pyz", "nonsense")[0] != 0


def run(program: Path, argument: str) -> tuple[int, str]:
    """Run with an isolated Python (-I), which does not import this checkout; return exit code and stdout."""
    done = subprocess.run([sys.executable, "-I", program, argument], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.strip()
