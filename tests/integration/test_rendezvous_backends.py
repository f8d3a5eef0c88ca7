"""One contract for each `RendezvousBackend`: ours on our store, ours in a file, and torch's own on our store."""

from __future__ import annotations

import json
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.torch
pytest.importorskip("torch")

from torch.distributed.elastic.rendezvous import api, c10d_rendezvous_backend, dynamic_rendezvous  # noqa: E402

from elasticjob._runtime.torchrun import backend as module  # noqa: E402
from elasticjob._runtime.torchrun import stores  # noqa: E402
from elasticjob._runtime.torchrun.backend import NULL_SENTINEL, FileCell  # noqa: E402
from support.common.ports import free_port  # noqa: E402

create_backend: Any = module.create_backend

Make = Callable[[], Any]
"""Creates the backend of one more node of the same rendezvous, and the store for its process groups."""


def params(endpoint: str, run_id: str = "job", **conf: Any) -> Any:
    return api.RendezvousParameters("elasticjob", endpoint, run_id, 2, 2, local_addr="127.0.0.1", **conf)


@pytest.fixture(params=["store", "file", "torch"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    if request.param == "file":
        yield lambda: create_backend(params(str(tmp_path / "state"), store_type=" FILE "))
        return
    host, _ = create_backend(params(f"localhost:{free_port()}"))
    port = host.cell.hosted.port
    if request.param == "store":
        yield lambda: create_backend(params(f"localhost:{port}", is_host=False))
        return

    def make_torchs() -> Any:
        store = stores.tcp_store("localhost", port, serve=False, timeout=20)
        return c10d_rendezvous_backend.C10dRendezvousBackend(store, "job"), store

    yield make_torchs
    del host


def test_there_is_no_state_before_one_is_set(make: Make) -> None:
    assert make()[0].get_state() is None


def test_without_a_token_only_the_first_state_is_set(make: Make) -> None:
    (one, _), (two, _) = make(), make()
    state, token, done = one.set_state(b"first")
    assert (state, done) == (b"first", True)
    assert two.get_state() == (b"first", token)
    assert two.set_state(b"second") == (b"first", token, False)


def test_with_the_current_token_the_state_is_replaced(make: Make) -> None:
    (one, _), (two, _) = make(), make()
    _, token, _ = one.set_state(b"first, and the longer one")
    state, newer, done = two.set_state(b"second", token)
    assert (state, done) == (b"second", True)
    assert newer != token
    assert one.get_state() == (b"second", newer)


def test_with_an_older_token_the_current_state_is_returned(make: Make) -> None:
    (one, _), (two, _) = make(), make()
    _, old, _ = one.set_state(b"first")
    _, new, _ = one.set_state(b"second", old)
    assert two.set_state(b"third", old) == (b"second", new, False)
    assert two.get_state() == (b"second", new)


def test_a_token_of_another_kind_only_reads(make: Make) -> None:
    backend, _ = make()
    assert backend.set_state(b"x", 7) is None
    _, token, _ = backend.set_state(b"first")
    assert backend.set_state(b"second", 7) == (b"first", token, False)


def test_only_one_of_concurrent_writers_succeeds(make: Make) -> None:
    backends = [make()[0] for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda i: backends[i].set_state(b"by %d" % i), range(4)))
    assert [done for _, _, done in results].count(True) == 1
    assert len({(state, token) for state, token, _ in results}) == 1


def test_the_file_excludes_threads_of_one_process(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        for attempt in range(100):
            path, start = tmp_path / str(attempt), threading.Barrier(4)

            def exchange(i: int, path: Path = path, start: threading.Barrier = start) -> bytes:
                start.wait()
                return FileCell(path, "key").compare_set(b"", b"%d" % i * (i + 1))

            assert len(set(pool.map(exchange, range(4)))) == 1


def test_torchs_dynamic_rendezvous_runs_on_it(make: Make) -> None:
    """Two nodes join a round, share its store, join the next round, and then close the rendezvous."""
    timeout = dynamic_rendezvous.RendezvousTimeout(join=timedelta(seconds=60), last_call=timedelta(seconds=1))
    nodes = []
    for _ in range(2):
        backend, store = make()
        handler = dynamic_rendezvous.DynamicRendezvousHandler.from_backend("job", store, backend, 2, 2, None, timeout)
        nodes.append(handler)
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            infos = list(pool.map(lambda node: node.next_rendezvous(), nodes))
            assert sorted(info.rank for info in infos) == [0, 1]
            infos[0].store.set("key", "value")
            assert infos[1].store.get("key") == b"value"
        assert all(pool.map(lambda node: node.shutdown(), nodes))
    with pytest.raises(api.RendezvousClosedError):
        nodes[0].next_rendezvous()


# ---- our backends only


def test_nodes_with_torchs_backend_and_with_ours_meet() -> None:
    ours, store = create_backend(params(f"localhost:{free_port()}"))
    theirs = c10d_rendezvous_backend.C10dRendezvousBackend(store, "job")
    _, token, done = theirs.set_state(b"theirs")
    assert done
    assert ours.get_state() == (b"theirs", token)
    assert ours.set_state(b"ours", token)[2]
    assert theirs.get_state()[0] == b"ours"
    assert store.get("torch.rendezvous.job") == b64encode(b"ours")
    assert NULL_SENTINEL.decode() == c10d_rendezvous_backend.C10dRendezvousBackend._NULL_SENTINEL


def test_a_corrupt_state_raises_a_state_error(tmp_path: Path) -> None:
    backend, _ = create_backend(params(str(tmp_path / "state"), store_type="file"))
    (tmp_path / "state").write_text("no base64!")
    with pytest.raises(api.RendezvousStateError):
        backend.get_state()


@pytest.mark.parametrize("text", ["no base64!", "[]", '{"torch.rendezvous.job": 1}', '{"torch.rendezvous.job": "%"}'])
def test_a_corrupt_file_raises_a_state_error(tmp_path: Path, text: str) -> None:
    backend, _ = create_backend(params(str(tmp_path / "state"), store_type="file"))
    (tmp_path / "state").write_text(text)
    with pytest.raises(api.RendezvousStateError):
        backend.get_state()


def test_a_file_is_as_long_as_its_state(tmp_path: Path) -> None:
    path = tmp_path / "state"
    cell = FileCell(path, "key")
    assert cell.compare_set(b"", b"a long value") == b"a long value"
    assert cell.compare_set(b"wrong", b"x") == b"a long value"
    assert cell.compare_set(b"a long value", b"b") == cell.get() == b"b"
    length = path.stat().st_size
    for number in range(100):
        cell.compare_set(cell.get(), b"%d" % (number % 10))
    assert path.stat().st_size == length


def test_runs_that_share_a_file_have_their_own_state(tmp_path: Path) -> None:
    """As on one of torch's stores, and so a new run does not find the closed state of an older one."""
    endpoint = str(tmp_path / "state")
    one, two = (create_backend(params(endpoint, run_id, store_type="file"))[0] for run_id in ("one", "two"))
    one.set_state(b"state of one")
    assert two.get_state() is None
    assert two.set_state(b"state of two")[2]
    assert one.get_state()[0] == b"state of one"
    assert set(json.loads((tmp_path / "state").read_text())) == {"torch.rendezvous.one", "torch.rendezvous.two"}


def test_the_backend_has_torchs_name(make: Make) -> None:
    assert make()[0].name == "c10d"


@pytest.mark.parametrize("store_type", [pytest.param("tcp", marks=pytest.mark.deep), "file"])
def test_torchrun_reaches_the_backend_by_an_option(tmp_path: Path, store_type: str) -> None:
    """torch finds elasticjob's entry point, which returns torch's own handler on the backend."""
    endpoint = f"localhost:{free_port()}" if store_type == "tcp" else str(tmp_path / "state")
    handler = api.rendezvous_handler_registry.create_handler(params(endpoint, handler="dynamic", store_type=store_type))
    assert isinstance(handler, dynamic_rendezvous.DynamicRendezvousHandler)
    assert handler.get_backend() == "elasticjob"
    assert isinstance(handler._state_holder._backend, module.ElasticJobRendezvousBackend)


def test_an_unknown_handler_is_refused() -> None:
    with pytest.raises(ValueError, match="Invalid handler 'static' given"):
        api.rendezvous_handler_registry.create_handler(params("localhost:1", handler="static"))


def test_only_this_user_can_read_the_temporary_file() -> None:
    backend, store = create_backend(params("", store_type="file"))
    path = backend.cell.path
    try:
        store.set("key", "value")
        for file in (path, Path(f"{path}.keys")):
            assert file.stat().st_mode & 0o777 == 0o600
        assert backend.set_state(b"x")[2]
    finally:
        path.unlink()
        Path(f"{path}.keys").unlink(missing_ok=True)


def test_a_lost_store_is_a_connection_error() -> None:
    backend, _ = create_backend(params(f"localhost:{free_port()}", read_timeout=2))
    backend.cell.hosted.close()
    with pytest.raises(api.RendezvousConnectionError):
        backend.get_state()


@pytest.mark.parametrize(
    ("make_params", "error", "message"),
    [
        (lambda: params("localhost:1", ""), ValueError, "The run id must be a non-empty string"),
        (lambda: params("localhost:1", store_type="etcd"), ValueError, "Invalid store type 'etcd' given"),
        (lambda: params("localhost:1", read_timeout=0), ValueError, "read timeout must be a positive integer"),
        (lambda: params("localhost:x"), ValueError, "port"),
        (
            lambda: params(f"localhost:{free_port()}", is_host=False, read_timeout=1),
            api.RendezvousConnectionError,
            "the store at localhost:\\d+ is unavailable",
        ),
        (lambda: params("/no/such/folder/state", store_type="file"), api.RendezvousConnectionError, "No such file"),
    ],
)
def test_a_creation_that_fails_is_recorded_and_raised(
    make_params: Callable[[], Any], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[dict[str, Any]] = []
    monkeypatch.setattr(module, "construct_and_record_rdzv_event", lambda **event: events.append(event))
    with pytest.raises(error, match=message):
        create_backend(make_params())
    assert [e["node_state"].name for e in events] == ["FAILED"]


def test_the_port_is_torchs_unless_the_endpoint_has_one() -> None:
    assert stores.parse_endpoint(params("somewhere")) == ("somewhere", 29400)
    assert stores.parse_endpoint(params("somewhere:123")) == ("somewhere", 123)


def test_the_read_timeout_is_torchs_unless_given() -> None:
    assert stores.parse_read_timeout(params("somewhere")) == 60
    assert stores.parse_read_timeout(params("somewhere", read_timeout="5")) == 5


def test_a_temporary_file_that_cannot_be_created_is_a_rendezvous_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: Any) -> Any:
        raise OSError("no space left")

    monkeypatch.setattr("tempfile.mkstemp", fail)
    with pytest.raises(api.RendezvousError, match="cannot create a temporary file for the rendezvous: no space left"):
        create_backend(params("", store_type="file"))


def test_only_an_inferred_host_falls_back_to_client() -> None:
    port = free_port()
    host, _ = create_backend(params(f"localhost:{port}"))
    assert host.cell.hosted is not None
    client, _ = create_backend(params(f"localhost:{port}"))
    assert client.cell.hosted is None
    with pytest.raises(api.RendezvousConnectionError, match="cannot host the store"):
        create_backend(params(f"localhost:{port}", is_host=True))
