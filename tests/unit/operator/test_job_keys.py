"""Keys of the links to stores: those of the job's Secret, whatever the operator's master key is now."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from elasticjob.contract.names import Role
from elasticjob_operator.controller import Controller
from elasticjob_operator.events import Recorder
from elasticjob_operator.keys import JobKeys
from elasticjob_operator.kube import JOBS, SECRETS
from elasticjob_operator.manifests.services import NODE_KEY, OPERATOR_KEY, read_operator_key
from elasticjob_operator.model.observed import LinkView
from elasticjob_operator.plan import StoreAddress
from support.operator_build import NOW, UID, raw_job
from support.operator_world import Api, Node, World

KEY = ("ns", "bert")
FIRST, LATER = JobKeys(b"f" * 32), JobKeys(b"l" * 32)


class Links:
    """Links that only note the key of the last address."""

    key = b""

    def view(self, _: object) -> LinkView:
        return LinkView(since=NOW)

    def standby_view(self, _: object) -> LinkView:
        return LinkView()

    def set_address(self, _: object, address: StoreAddress | None, secret: bytes, standby: StoreAddress | None) -> None:
        self.key = secret if address else self.key

    def set_operator_view(self, *_: object) -> None: ...
    def set_standby_view(self, *_: object) -> None: ...
    def forget(self, _: object) -> None: ...


async def link_key(api: Api, keys: JobKeys) -> bytes:
    """Return the key of the link that an operator with this master key opens to the job's store."""
    links: Any = Links()
    controller = Controller(api, keys, links, Recorder(api, "me"), "image", clock=lambda: NOW)
    world = World(api, {"n1": Node("n1")})
    await controller.reconcile(KEY)
    for pod in api.pods(Role.STORE):
        world.schedule(pod, "n1")
        world.start(pod)
    await controller.reconcile(KEY)
    return bytes(links.key)


async def test_a_changed_master_key_does_not_change_the_key_of_a_running_job() -> None:
    api = Api(NOW)
    api.put(JOBS, raw_job())
    first = await link_key(api, FIRST)
    assert first == FIRST.derive(OPERATOR_KEY, UID, 1)
    assert await link_key(api, LATER) == first
    assert read_operator_key(api.objects[SECRETS, "bert-rdzv"]) == first


async def test_the_secret_of_another_owner_is_not_used() -> None:
    api = Api(NOW)
    api.put(JOBS, raw_job())
    await link_key(api, FIRST)
    api.objects[SECRETS, "bert-rdzv"]["metadata"]["ownerReferences"] = []
    assert await link_key(api, LATER) == LATER.derive(OPERATOR_KEY, UID, 1)


@pytest.mark.parametrize("value", ["", "?", "eHg=", base64.b64encode(b"xyz").decode(), 5, None])
def test_an_unreadable_key_is_no_key(value: object) -> None:
    assert read_operator_key({"data": {OPERATOR_KEY: value, NODE_KEY: "ignored"}}) is None
