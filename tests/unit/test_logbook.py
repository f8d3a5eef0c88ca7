"""A logbook of the tests on the cluster asks for a pod's log again if the API server or the kubelet refuses it."""

from __future__ import annotations

import io
import types
from collections.abc import Iterator
from typing import cast

import pytest

from support.cluster.kube import ApiError, Kube, WaitTimeoutError
from support.cluster.logbook import LogBook

LINE = "2026-01-01T00:00:01.5Z step=7 loss=0.5 world=3"


class Refusing:
    """A cluster with one pod, whose log is refused at first. `refusals`: what each of these requests gives."""

    def __init__(self, *refusals: str | Exception) -> None:
        self._refusals = list(refusals)

    def watch(self, *_: object, **__: object) -> Iterator[tuple[str, dict[str, object]]]:
        yield "ADDED", {"metadata": {"name": "job-1-1"}, "status": {"phase": "Running"}}

    def follow(self, *_: object) -> Iterator[str]:
        answer = self._refusals.pop(0) if self._refusals else LINE
        if isinstance(answer, Exception):
            raise answer
        yield answer


@pytest.mark.parametrize(
    "refusal", [ApiError(502, "", "no route to the kubelet"), "unable to retrieve container logs for containerd://a"]
)
def test_a_log_that_is_refused_at_first_is_read(refusal: str | Exception) -> None:
    with LogBook(cast(Kube, Refusing(refusal)), "ns", "job") as book:
        step = book.wait_steps_after(0.0, world=3, incarnation=1, timeout=10)
    assert (step.pod, step.step) == ("job-1-1", 7)


def test_a_log_that_does_not_exist_any_more_ends() -> None:
    with LogBook(cast(Kube, Refusing(ApiError(404, "NotFound", "no such pod"))), "ns", "job") as book:
        book.wait(lambda: "job-1-1" in book.ended, timeout=10, what="the end of the log")
        with pytest.raises(WaitTimeoutError, match=r"the log of job-1-1 is read no more: .*404"):
            book.wait_step(1, timeout=0)
    assert not book.steps


def test_a_refused_log_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = types.SimpleNamespace(status=502, read=lambda: b"no route to the kubelet", readline=io.BytesIO().readline)
    connection = types.SimpleNamespace(getresponse=lambda: answer, close=lambda: None)
    monkeypatch.setattr(Kube, "open_log", lambda *_: connection)
    kube = object.__new__(Kube)  # without a kubeconfig
    with pytest.raises(ApiError, match="502"):
        next(kube.follow("job-1-1", "ns"))
