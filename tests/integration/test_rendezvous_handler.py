"""Our `RendezvousHandler` with a real store and coordinator. Several nodes run in one process."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

pytestmark = pytest.mark.torch
pytest.importorskip("torch")

from torch.distributed.elastic.rendezvous import api, rendezvous_handler_registry  # noqa: E402
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousSettings, RendezvousTimeout  # noqa: E402

from elasticjob._runtime.contract.messages import Standby  # noqa: E402
from elasticjob._runtime.torchrun import create, stores  # noqa: E402
from elasticjob._runtime.torchrun import handler as module  # noqa: E402
from elasticjob._runtime.torchrun.create import create_handler  # noqa: E402
from elasticjob._runtime.torchrun.endpoint import StoreEndpoint  # noqa: E402
from elasticjob._runtime.torchrun.handler import ElasticJobRendezvousHandler  # noqa: E402
from elasticjob._runtime.torchrun.settings import read_settings  # noqa: E402

Handler = ElasticJobRendezvousHandler


def params(run_id: str = "job", nodes: tuple[int, int] = (2, 2), endpoint: str = "localhost:0", **conf: Any) -> Any:
    return api.RendezvousParameters("elasticjob", endpoint, run_id, *nodes, local_addr="127.0.0.1", **conf)


class Nodes:
    """The handlers of one rendezvous. The first one hosts the store."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(16)
        self.handlers: list[Handler] = []

    def add(self, nodes: tuple[int, int] = (2, 2), **conf: Any) -> Handler:
        endpoint, host = "localhost:0", not self.handlers
        if self.handlers:
            endpoint = f"localhost:{self.handlers[0].endpoint.port}"
        conf = {"read_timeout": 20, **conf}
        handler: Handler = create_handler(params(nodes=nodes, endpoint=endpoint, is_host=host, **conf))
        self.handlers.append(handler)
        return handler

    def join(self, *handlers: Handler) -> list[Future[Any]]:
        return [self.pool.submit(handler.next_rendezvous) for handler in handlers]

    def join_all(self, *handlers: Handler) -> list[Any]:
        """Join all handlers to one round and return the `RendezvousInfo` of each."""
        return [future.result(30) for future in self.join(*handlers)]


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    nodes = Nodes()
    yield nodes
    for handler in reversed(nodes.handlers):
        handler.settings = read_settings(params(close_timeout=1, heartbeat_timeout=1))
        handler.shutdown()
    nodes.pool.shutdown(cancel_futures=True)


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"not within 30 s: {what}"
        time.sleep(0.01)


def stays(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Check that a condition holds for some time: the coordinator ends a round 0.25 s after it has lost a node."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert condition(), f"not for {seconds:g} s: {what}"
        time.sleep(0.01)


# ---- settings and errors


def test_torch_finds_the_handler_by_its_entry_point() -> None:
    handler = rendezvous_handler_registry.create_handler(params(endpoint="localhost:1", is_host=False))
    assert isinstance(handler, Handler)
    assert (handler.get_backend(), handler.get_run_id()) == ("elasticjob", "job")
    assert (handler.settings.run_id, handler.settings.min_nodes, handler.settings.max_nodes) == ("job", 2, 2)


def test_settings_have_the_defaults_of_torch_and_can_be_given() -> None:
    default = read_settings(params())
    timeouts = [getattr(default.timeout, n).total_seconds() for n in ("join", "last_call", "close", "heartbeat")]
    assert timeouts == [600, 30, 30, 5]
    assert (default.keep_alive_interval, default.keep_alive_max_attempt) == (timedelta(seconds=1), 3)
    given = read_settings(
        params(join_timeout="9", last_call_timeout=8, keep_alive_interval=7, keep_alive_max_attempt=6)
    )
    assert (given.timeout.join, given.timeout.last_call) == (timedelta(seconds=9), timedelta(seconds=8))
    assert (given.keep_alive_interval, given.keep_alive_max_attempt) == (timedelta(seconds=7), 6)


@pytest.mark.parametrize(
    ("run_id", "low", "high", "message"),
    [
        ("", 1, 1, "The run id must be a non-empty string"),
        ("r", 0, 1, r"The minimum number of nodes \(0\) must be greater than zero"),
        ("r", 2, 1, r"The maximum number of nodes \(1\) must be greater than or equal"),
    ],
)
def test_wrong_settings_are_refused(run_id: str, low: int, high: int, message: str) -> None:
    settings = RendezvousSettings(run_id, low, high, RendezvousTimeout(), timedelta(seconds=1), 3)
    with pytest.raises(ValueError, match=message):
        Handler(settings, StoreEndpoint("localhost", 1, b"k", 1))


@pytest.mark.parametrize(
    ("conf", "message"),
    [
        ({"join_timeout": 0}, r"The join timeout .* must be positive"),
        ({"last_call_timeout": -1}, r"The last_call timeout .* must be positive"),
        ({"close_timeout": 0}, r"The close timeout .* must be positive"),
        ({"heartbeat_timeout": 0}, r"The heartbeat timeout .* must be positive"),
        ({"read_timeout": 0}, "The read timeout must be a positive integer"),
        ({"key": "no hex"}, "must be hexadecimal"),
    ],
)
def test_a_creation_that_fails_is_recorded_and_raised(
    monkeypatch: pytest.MonkeyPatch, conf: dict[str, Any], message: str
) -> None:
    events = record_events(monkeypatch)
    with pytest.raises(ValueError, match=message):
        create_handler(params(is_host=False, **conf))
    assert [e["node_state"].name for e in events] == ["FAILED"]


def record_events(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for recorder in (module, create, stores):
        monkeypatch.setattr(recorder, "construct_and_record_rdzv_event", lambda **event: events.append(event))
    return events


def test_a_node_is_identified_by_address_process_and_counter(nodes: Nodes) -> None:
    handlers = list(nodes.pool.map(lambda _: create_handler(params(is_host=False)), range(16)))
    assert len({h.node.local_id for h in handlers}) == 16
    assert {(h.node.addr, h.node.pid) for h in handlers} == {("127.0.0.1", os.getpid())}
    unnamed = Handler(read_settings(params()), StoreEndpoint("localhost", 1, b"k", 1))
    assert unnamed.node.addr == socket.getfqdn()


# ---- rounds


def test_nodes_get_ranks_and_a_store_of_their_own_round(nodes: Nodes) -> None:
    one, two = nodes.add(), nodes.add()
    infos = nodes.join_all(one, two)
    assert sorted(i.rank for i in infos) == [0, 1]
    assert {i.world_size for i in infos} == {2}
    assert len({(i.bootstrap_store_info.master_addr, i.bootstrap_store_info.master_port) for i in infos}) == 1
    infos[0].store.set("key", "value")
    assert infos[1].store.get("key") == b"value"
    info = infos[0].bootstrap_store_info
    unprefixed = stores.tcp_store(info.master_addr, info.master_port, serve=False, timeout=20)
    assert not unprefixed.check(["key"])  # the workers' store: torchrun's keys are not theirs
    again = nodes.join_all(one, two)
    assert [i.rank for i in again] == [i.rank for i in infos]
    assert not again[0].store.check(["key"])
    assert again[0].bootstrap_store_info.master_port != infos[0].bootstrap_store_info.master_port


def test_workers_do_not_share_the_agents_store_when_the_variable_disables_it(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = nodes.add(), nodes.add()
    assert one.use_agent_store
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    assert not one.use_agent_store
    infos = nodes.join_all(one, two)
    ports = {i.bootstrap_store_info.master_port for i in infos}
    assert len(ports) == 1
    assert ports.isdisjoint(one.stores.ports | two.stores.ports)


def test_a_waiting_node_ends_the_round_of_the_others(nodes: Nodes) -> None:
    one, late = nodes.add((1, 2), last_call_timeout=1), nodes.add((1, 2))
    [info] = nodes.join_all(one)
    assert (info.world_size, one.num_nodes_waiting()) == (1, 0)
    [joined] = nodes.join(late)
    until(lambda: one.num_nodes_waiting() == 1, "the joining node ends the round")
    [info] = nodes.join_all(one)
    assert (info.rank, info.world_size, joined.result(30).rank) == (0, 2, 1)
    assert one.num_nodes_waiting() == 0


def test_a_redundant_node_has_no_join_timeout_and_replaces_a_lost_node_in_one_round(nodes: Nodes) -> None:
    one, two, spare = nodes.add(), nodes.add(), nodes.add(join_timeout=2)
    first = nodes.join_all(one, two)
    [waiting] = nodes.join(spare)
    until(lambda: spare.session and spare.session.redundant, "the spare node is redundant")
    with pytest.raises(TimeoutError):
        waiting.result(2.5)
    assert one.num_nodes_waiting() == two.num_nodes_waiting() == 0
    lost = (one, two)[[i.rank for i in first].index(1)]
    stays = one if lost is two else two
    lost.end_session()
    until(lambda: stays.num_nodes_waiting() == 1, "the loss is detected")
    [info] = nodes.join_all(stays)
    assert (info.rank, info.world_size, waiting.result(30).rank) == (0, 2, 1)
    assert stays.num_nodes_waiting() == 0


def test_a_join_that_times_out_is_withdrawn(nodes: Nodes) -> None:
    impatient, one = nodes.add(join_timeout=1), nodes.add(join_timeout=60)
    with pytest.raises(api.RendezvousTimeoutError):
        impatient.next_rendezvous()
    [waiting] = nodes.join(one)
    with pytest.raises(TimeoutError):
        waiting.result(0.5)  # it is the only node
    impatient.settings = one.settings  # on a busy machine a round takes more than a second to form
    [info] = nodes.join_all(impatient)
    assert {info.rank, waiting.result(30).rank} == {0, 1}


def test_an_unreachable_store_of_a_round_ends_the_round(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = nodes.add(), nodes.add()
    real, failed = stores.tcp_store, list[int]()

    def fail_once(host: str, port: int, *, serve: bool, timeout: float) -> Any:
        if not serve and not failed:
            failed.append(port)
            raise api.RendezvousConnectionError("its node is down")
        return real(host, port, serve=serve, timeout=timeout)

    monkeypatch.setattr(stores, "tcp_store", fail_once)
    joining = nodes.join(one, two)
    until(lambda: any(h.num_nodes_waiting() for h in (one, two)), "the round ends")
    leader = one if one.num_nodes_waiting() else two
    first = joining[(one, two).index(leader)].result(30)
    [info] = nodes.join_all(leader)
    other = joining[1 - (one, two).index(leader)].result(30)
    assert {info.rank, other.rank} == {0, 1}
    assert info.bootstrap_store_info.master_port != first.bootstrap_store_info.master_port


def test_a_node_that_never_reaches_the_store_of_a_round_leaves_and_the_others_go_on(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers = [nodes.add((2, 3), last_call_timeout=1) for _ in range(3)]
    real, cut_off = stores.tcp_store, set[int]()

    def unreachable(host: str, port: int, *, serve: bool, timeout: float) -> Any:
        if not serve and threading.get_ident() in cut_off:
            raise api.RendezvousConnectionError("no route to rank 0")
        return real(host, port, serve=serve, timeout=timeout)

    def join_until_stable(handler: Handler) -> Any:
        info = handler.next_rendezvous()
        while info.world_size == 3:
            until(handler.num_nodes_waiting, "the round ends")
            info = handler.next_rendezvous()
        return info

    def join_cut_off(handler: Handler) -> Any:
        cut_off.add(threading.get_ident())
        return handler.next_rendezvous()

    monkeypatch.setattr(stores, "tcp_store", unreachable)
    stay = [nodes.pool.submit(join_until_stable, handler) for handler in handlers[:2]]
    until(lambda: all(h.session and h.session.messages_received for h in handlers[:2]), "two nodes are announced")
    with pytest.raises(api.RendezvousConnectionError, match="none of 3 rounds in a row, it leaves: no route to rank 0"):
        nodes.pool.submit(join_cut_off, handlers[2]).result(60)
    assert {future.result(30).world_size for future in stay} == {2}


# ---- the end


def test_a_closed_rendezvous_is_closed_for_every_node(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, spare, late = (nodes.add() for _ in range(4))
    nodes.join_all(one, two)
    [waiting] = nodes.join(spare)
    until(lambda: spare.session and spare.session.redundant, "the spare node is redundant")
    assert not two.is_closed()
    events = record_events(monkeypatch)
    one.set_closed()
    with pytest.raises(api.RendezvousGracefulExitError):
        waiting.result(30)
    # Each in a thread of its own: the node that closes it, and the spare one, whose call ends with an error.
    assert sorted(e["node_state"].name for e in events) == ["FAILED", "SUCCEEDED"]
    until(two.is_closed, "the other node learns of it")
    assert two.num_nodes_waiting() == 0  # the running round continues
    for node in (two, late):
        with pytest.raises(api.RendezvousClosedError):
            node.next_rendezvous()
    assert late.is_closed()


def test_shutdown_returns_true_once_the_rendezvous_is_closed(nodes: Nodes) -> None:
    one, two = nodes.add(), nodes.add()
    nodes.join_all(one, two)
    assert two.shutdown()
    until(one.is_closed, "the other node learns of it")
    assert one.shutdown()


@pytest.mark.parametrize("joined", [True, False])
def test_a_second_shutdown_of_the_host_returns_true_at_once(nodes: Nodes, joined: bool) -> None:
    """The store has ended with the first one."""
    host = nodes.add((1, 1))
    if joined:
        nodes.join_all(host)
    assert host.shutdown()
    began = time.monotonic()
    assert host.shutdown()
    host.set_closed()
    assert host.is_closed()
    with pytest.raises(api.RendezvousClosedError):
        host.next_rendezvous()
    assert time.monotonic() - began < 10.0, "it waits for a store that has ended"


@pytest.mark.parametrize("host_leaves", [True, False])
def test_a_node_that_shuts_down_leaves_the_round_of_the_others_running(nodes: Nodes, host_leaves: bool) -> None:
    """Also the node that hosts the store. The others then finish, and shut down too."""
    handlers = [nodes.add((3, 3)) for _ in range(3)]
    nodes.join_all(*handlers)
    leaves = handlers[0 if host_leaves else 1]
    others = [handler for handler in handlers if handler is not leaves]
    assert leaves.shutdown()
    stays(lambda: not any(o.num_nodes_waiting() for o in others), 1.5, "the others continue")
    assert all(other.is_closed() for other in others)
    assert [other.shutdown() for other in others] == [True, True]


@pytest.mark.parametrize("host_fails", [True, False])
@pytest.mark.parametrize("closed_before", [True, False])
def test_a_node_that_shuts_down_while_it_raises_ends_the_round(
    nodes: Nodes, host_fails: bool, closed_before: bool
) -> None:
    """torchrun shuts down while it raises the error of its workers. Their peers would wait for them."""
    handlers = [nodes.add((3, 3)) for _ in range(3)]
    nodes.join_all(*handlers)
    fails, *others = handlers if host_fails else reversed(handlers)
    if closed_before:
        others[0].set_closed()
        until(fails.is_closed, "all nodes know that the rendezvous is closed")
    try:
        raise ArithmeticError("a worker failed")
    except ArithmeticError:
        assert fails.shutdown()
    for other in others:
        until(other.num_nodes_waiting, "the round ends")
        why = "closed the rendezvous" if closed_before else r"failed \(ArithmeticError\) and closed the rendezvous"
        with pytest.raises(api.RendezvousClosedError, match=why):
            other.next_rendezvous()


def test_a_handler_that_has_not_joined_is_no_member(nodes: Nodes) -> None:
    one, visitor = nodes.add(), nodes.add()
    [waiting] = nodes.join(one)
    until(lambda: one.session and one.session.messages_received, "one node is announced")
    assert not visitor.is_closed()
    assert visitor.num_nodes_waiting() == 0
    with pytest.raises(TimeoutError):
        waiting.result(0.5)
    two = nodes.add()
    nodes.join_all(two)
    assert waiting.result(30).world_size == 2
    visitor.set_closed()
    until(lambda: one.is_closed() and two.is_closed(), "the nodes learn of it")
    assert visitor.shutdown()
    stays(lambda: not one.num_nodes_waiting() and not two.num_nodes_waiting(), 0.5, "the round runs")


@pytest.mark.parametrize("close", [Handler.set_closed, Handler.shutdown])
def test_a_handler_that_closes_before_it_has_joined_completes_no_round(
    nodes: Nodes, close: Callable[[Handler], object]
) -> None:
    one, visitor = nodes.add(), nodes.add()
    [waiting] = nodes.join(one)
    until(lambda: one.session and one.session.messages_received, "one node is announced")
    close(visitor)
    with pytest.raises(api.RendezvousClosedError):
        waiting.result(30)


def test_a_node_does_not_end_its_session_under_the_sessions_lock(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session's thread needs the lock to end: the node would wait 5 s for it."""
    one, visitor = nodes.add(), nodes.add()
    [waiting] = nodes.join(one)
    until(lambda: one.session and one.session.messages_received, "one node is announced")
    session, end_session, free = one.session, one.end_session, list[bool]()
    assert session is not None

    def acquire() -> bool:
        acquired = session.changed.acquire(timeout=1)
        if acquired:
            session.changed.release()
        return acquired

    def end() -> None:
        free.append(nodes.pool.submit(acquire).result())
        end_session()

    monkeypatch.setattr(one, "end_session", end)
    visitor.set_closed()
    with pytest.raises(api.RendezvousClosedError):
        waiting.result(30)
    assert free == [True]


def test_a_node_that_arrives_at_a_closed_full_rendezvous_gets_torchs_error(nodes: Nodes) -> None:
    """Only a node that stood by before it was closed ends gracefully."""
    one, two, late = nodes.add(), nodes.add(), nodes.add()
    nodes.join_all(one, two)
    one.set_closed()
    with pytest.raises(api.RendezvousClosedError):
        late.next_rendezvous()
    assert two.session is not None
    until(two.is_closed, "the other node learns of it")
    two.session.receive(Standby("the round is full without this node", redundant=True))
    assert not two.session.redundant


def test_a_lost_store_is_logged_and_never_raised_while_a_round_runs(nodes: Nodes) -> None:
    one, two = nodes.add((1, 2), heartbeat_timeout=1), nodes.add((1, 2), heartbeat_timeout=1)
    nodes.join_all(one, two)
    one.hosted.close()  # type: ignore[union-attr]
    until(lambda: two.session and two.session.down_since, "the loss is detected")
    assert (one.num_nodes_waiting(), two.num_nodes_waiting()) == (0, 0)
    assert two.shutdown() is False


@pytest.mark.parametrize("redundant", [True, False])
def test_a_node_that_waits_for_a_round_does_not_outwait_a_lost_store(nodes: Nodes, redundant: bool) -> None:
    """Also not one that has been in a round: its session would reconnect without limit."""
    one, last = nodes.add(), nodes.add(join_timeout=600)
    nodes.join_all(one, last)
    last.endpoint = replace(last.endpoint, read_timeout=1)
    [waiting] = nodes.join(last)
    until(lambda: last.session and last.session.start is None, "the node has left its round")
    with last.session.changed:  # type: ignore[union-attr]
        last.session.redundant = redundant  # type: ignore[union-attr]
        last.session.changed.notify_all()  # type: ignore[union-attr]
    one.hosted.close()  # type: ignore[union-attr]
    with pytest.raises(api.RendezvousConnectionError, match="has been unavailable for 1 s"):
        waiting.result(30)


def test_errors_other_than_rendezvous_errors_are_raised(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    one = nodes.add()

    def broken(_: str) -> None:
        raise OSError("no disk")

    monkeypatch.setattr(one, "close_rendezvous", broken)
    with pytest.raises(OSError, match="no disk"):
        one.shutdown()
    nodes.handlers.clear()


def test_a_dropped_handler_is_collected_and_its_session_ends(nodes: Nodes) -> None:
    one, two = nodes.add((1, 2)), nodes.add((1, 2))
    nodes.join_all(one, two)
    thread, reference = two.session.thread, weakref.ref(two)  # type: ignore[union-attr]
    nodes.handlers.remove(two)
    del two
    gc.collect()
    assert reference() is None
    thread.join(30)
    assert not thread.is_alive()
    until(lambda: one.num_nodes_waiting() == 1, "the node's loss is detected")


def test_a_store_that_does_not_answer_is_a_connection_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    handler = create_handler(params(endpoint=f"127.0.0.1:{port}", is_host=False, read_timeout=1))
    with pytest.raises(api.RendezvousConnectionError):
        handler.next_rendezvous()
    with pytest.raises(api.RendezvousConnectionError):
        handler.is_closed()
    assert handler.num_nodes_waiting() == 0


def test_a_wrong_key_is_an_error_that_names_it(nodes: Nodes) -> None:
    """After the time-out, as a refusal may come from an impostor."""
    assert not nodes.add().is_closed()  # the store serves
    for call in ("next_rendezvous", "is_closed"):
        with pytest.raises(api.RendezvousConnectionError, match="the peer has the wrong key for role node"):
            getattr(nodes.add(key="00" * 32, read_timeout=2), call)()


def test_only_an_inferred_host_accepts_another_host(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    events = record_events(monkeypatch)
    port = nodes.add().endpoint.port
    assert [e["node_state"].name for e in events] == ["INIT"]
    inferred = create_handler(params(endpoint=f"localhost:{port}"))
    assert inferred.hosted is None
    with pytest.raises(api.RendezvousConnectionError):
        create_handler(params(endpoint=f"localhost:{port}", is_host=True))


def test_a_store_outlives_the_thread_that_started_it(nodes: Nodes) -> None:
    with ThreadPoolExecutor(1) as pool:
        host = pool.submit(nodes.add).result()
    # The thread has ended.
    infos = nodes.join_all(host, nodes.add())
    assert [i.world_size for i in infos] == [2, 2]
    assert host.hosted is not None
    assert host.hosted.process.poll() is None


def test_a_store_ends_with_the_process_that_hosts_it() -> None:
    """Also if that process is killed."""
    hosts = """
from elasticjob._runtime.contract.messages import RoundSettings
from elasticjob._runtime.torchrun.stores import HostedStore
from torch.distributed.elastic.rendezvous import api
store = HostedStore(api.RendezvousParameters("elasticjob", "localhost", "job", 1, 1), 0, RoundSettings(1, 1, 1))
print("port", store.port, flush=True)
input()
"""
    parent = subprocess.Popen([sys.executable, "-c", hosts], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    port = int(parent.stdout.readline().split()[1])
    handler = create_handler(params(endpoint=f"localhost:{port}", is_host=False))
    assert not handler.is_closed()
    parent.kill()
    parent.communicate()
    until(lambda: not listens(port), "the store has ended")


def listens(port: int) -> bool:
    try:
        socket.create_connection(("localhost", port), 1.0).close()
    except OSError:
        return False
    return True


def test_events_name_the_node_and_its_rank(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    one = nodes.add((1, 1))
    events = record_events(monkeypatch)
    nodes.join_all(one)
    joined = [("RUNNING", None), ("SUCCEEDED", None), ("RUNNING", 0)]
    assert [(e["node_state"].name, e["rank"]) for e in events] == joined
    assert {(e["hostname"], e["pid"], e["local_id"]) for e in events} == {("127.0.0.1", os.getpid(), one.node.local_id)}
    one.set_closed()
    with pytest.raises(api.RendezvousClosedError):
        one.next_rendezvous()
    assert [e["node_state"].name for e in events[3:]] == ["SUCCEEDED", "RUNNING", "FAILED"]
    assert one.shutdown()
    methods = ["next_rendezvous"] * 3 + ["set_closed"] + ["next_rendezvous"] * 2 + ["shutdown"]
    assert [e["name"] for e in events] == [f"ElasticJobRendezvousHandler.{method}" for method in methods]


def test_only_rank_0_records_that_a_round_is_complete(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = nodes.add(), nodes.add()
    events = record_events(monkeypatch)
    nodes.join_all(one, two)
    assert [e["node_state"].name for e in events].count("SUCCEEDED") == 1
