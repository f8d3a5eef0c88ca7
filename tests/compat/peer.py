"""One side of a conversation between two versions, run under the code of either (`versions`).

    protocol             print the version of the messages
    examples PROTOCOL    print messages of every kind, as this code sends them to a peer of this version
    decode               read such lines, and print each message as this code understands it
    operator IMAGE       reconcile a job: each line of the input has the job and its pods, each line of the output has
                         what the operator of this image has decided

It imports only what every version has, some of it from a module of another name.
"""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import sys
import time
import types
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Union, cast, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from elasticjob_operator.model.observed import Job
    from elasticjob_operator.plan import Plan


def _module(*paths: str) -> Any:
    """Return the first of these modules that this version has: some have moved since 0.1.0."""
    return import_module(next(path for path in paths if _has(path)))


def _has(path: str) -> bool:
    parent, _, _ = path.rpartition(".")
    return (not parent or _has(parent)) and find_spec(path) is not None


CONTRACT = "elasticjob._runtime.contract" if _has("elasticjob._runtime.contract") else "elasticjob.contract"
codec, messages = _module(f"{CONTRACT}.codec"), _module(f"{CONTRACT}.messages")
RoundId = _module(f"{CONTRACT}.names").RoundId
manifests, attempt = _module("elasticjob_operator.manifests"), _module("elasticjob_operator.manifests.names").attempt
StoreLinks = _module("elasticjob_operator.links.store_links", "elasticjob_operator.store_links").StoreLinks
parse_pod = _module("elasticjob_operator.model.cluster.pods", "elasticjob_operator.model.pods").parse_pod
JobKeys = _module("elasticjob_operator.reconcile.keys", "elasticjob_operator.keys").JobKeys
observed_model, plan = _module("elasticjob_operator.model.observed"), _module("elasticjob_operator.plan").plan
Child, Children, Observed = observed_model.Child, observed_model.Children, observed_model.Observed

KEY = ("ns", "job")
_OTHERS = {cls.__name__: cls for cls in (messages.Termination, messages.InRound, messages.RoundSettings)}
"""What else one version writes and another reads: termination messages, and the settings in a store's environment."""
_VARIANTS = 12
"""Examples of each message: no enum has more members."""


# ---- messages --------------------------------------------------------------------------------------------------


def examples(protocol: int) -> Iterator[str]:
    """Yield `Name JSON` of messages of every type with every member of their enums, all fields filled."""
    for cls in get_args(messages.Message):
        for variant in range(_VARIANTS):
            message = _example(cls, variant)
            if protocol >= messages.PROTOCOL:
                yield f"{cls.__name__} {messages.encode(message).decode()}"
            elif messages.is_known(message, protocol):
                yield f"{cls.__name__} {messages.encode(message, protocol).decode()}"
    for name, cls in _OTHERS.items():
        for variant in range(_VARIANTS):
            yield f"{name} {codec.dumps(_example(cls, variant)).decode()}"


def _example(kind: Any, variant: int) -> Any:
    if get_origin(kind) in (Union, types.UnionType):
        return _example(get_args(kind)[0], variant)
    if get_origin(kind) is tuple:
        return (_example(get_args(kind)[0], variant),)
    if kind is RoundId:
        return RoundId(1, 0, 1)
    if isinstance(kind, type) and issubclass(kind, Enum):
        members = list(kind)
        return members[variant % len(members)]
    if is_dataclass(kind):
        hints, cls = get_type_hints(kind), cast("Any", kind)
        return cls(**{field.name: _example(hints[field.name], variant) for field in fields(kind)})
    return {str: "text", int: 1, float: 1.5, bool: True}[kind]


def decoded(line: str) -> str:
    """Return the message of such a line as this code reads it, encoded again."""
    name, _, text = line.partition(" ")
    if name in _OTHERS:
        return str(codec.dumps(codec.parse(_OTHERS[name], codec.loads(text.encode()))).decode())
    return str(messages.encode(messages.decode(text.encode())).decode())


# ---- the operator ----------------------------------------------------------------------------------------------


async def operate(image: str) -> None:
    """Reconcile the job of each request, with links to its stores."""
    links, started = StoreLinks(lambda key: None, lambda: 1), time.time()
    while line := await asyncio.to_thread(sys.stdin.readline):
        request = json.loads(line)
        job = observed_model.parse_job(request["job"])
        children = request["children"]
        observed = Observed(
            job=job,
            workers=tuple(replace(parse_pod(pod), seen=started) for pod in request["workers"]),
            stores=tuple(replace(parse_pod(pod), seen=started) for pod in request["stores"]),
            children=Children(
                secret=_secret(job) if children["secret"] else Children().secret,
                nodes=Child("n", True) if children["nodes"] else None,
                rendezvous=None if children["store"] is None else Child("r", True, incarnation=children["store"]),
            ),
            link=links.view(KEY),
            standby_link=links.standby_view(KEY),
        )
        decided = plan(observed, image, time.time())
        if children["secret"]:
            key = bytes.fromhex(base64.b64decode(children["secret"]["data"]["operator"]).decode())
            links.set_address(KEY, decided.store_address, key, decided.standby_address)
        if decided.operator_view is not None:
            links.set_operator_view(KEY, decided.operator_view)
        if decided.standby_view is not None:
            links.set_standby_view(KEY, decided.standby_view)
        answer = {
            "status": decided.status,
            "actions": list(_described(job, decided, job.status.runtime_image or image)),
            "connected": [observed.link.connected, observed.standby_link.connected],
        }
        print(json.dumps(answer), flush=True)
    await links.close()


def _secret(job: Job) -> Any:
    """Return what says that the job's Secret exists: 0.1.0 reads it, later versions know its name."""
    return manifests.key_secret(job) if hasattr(job.status, "key_id") else Child("s", True)


def _described(job: Job, decided: Plan, image: str) -> Iterator[dict[str, Any]]:
    """Yield each action with its fields, and with the object that it creates."""
    assert job.spec is not None
    for action in decided.actions:
        found = {"type": type(action).__name__, **codec.dump(action)}
        match found["type"]:
            case "CreateSecret":
                keys = JobKeys(secrets.token_bytes(32)).of_job(job.uid, attempt(job))
                found["object"] = manifests.secret_manifest(job, keys)
            case "CreateStore" | "CreateStandbyStore":
                standby = found["type"] == "CreateStandbyStore"
                number = found["incarnation"]
                found["object"] = manifests.store_pod_manifest(job, job.spec, number, image, (), standby=standby)
            case "CreateWorker":
                found["object"] = manifests.worker_pod_manifest(
                    job, job.spec, found["index"], found["incarnation"], image, (), decided.failed_starts
                )
        yield found


def main() -> None:
    match sys.argv[1:]:
        case ["protocol"]:
            print(messages.PROTOCOL)
        case ["examples", protocol]:
            print("\n".join(examples(int(protocol))))
        case ["decode"]:
            for line in sys.stdin.read().splitlines():
                print(decoded(line))
        case ["operator", image]:
            asyncio.run(operate(image))


if __name__ == "__main__":
    main()
