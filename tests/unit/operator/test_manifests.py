"""Manifests of children: changes to the template, and that added containers pass Pod Security `restricted`."""

from __future__ import annotations

import base64
import copy
import json
from typing import Any

import pytest

from elasticjob._runtime.contract import codec
from elasticjob._runtime.contract.commands.worker_count import quantity
from elasticjob._runtime.contract.messages import RoundSettings
from elasticjob._runtime.contract.names import Env
from elasticjob._runtime.store_pod.main import store_limits
from elasticjob_operator import manifests
from elasticjob_operator.model.cluster.pods import FAILED_STARTS, parse_pod
from elasticjob_operator.model.observed import DisruptionBudget, NetworkPolicy, parse_job
from support.operator.build import UID, job, raw_job, status

Raw = dict[str, Any]


def template(pod: Raw | None = None, **container: Any) -> Raw:
    main = {"name": "main", "image": "user:1", "command": ["python", "train.py"]} | container
    return {"spec": {"containers": [main]} | (pod or {})}


def worker(spec_template: Raw | None = None, avoid: tuple[str, ...] = (), **spec: Any) -> Raw:
    built = job(**({"template": spec_template} if spec_template else {}), **spec)
    assert built.spec is not None
    return manifests.worker_pod_manifest(built, built.spec, 1, 2, "agent:1", avoid)


def trainer(pod: Raw) -> Raw:
    found: Raw = pod["spec"]["containers"][0]
    return found


def env(container: Raw) -> dict[str, Any]:
    return {item["name"]: item.get("value", item.get("valueFrom")) for item in container["env"]}


@pytest.mark.parametrize(
    ("command", "args", "wrapped"),
    [
        (["python", "t.py"], None, ["python", "/elasticjob/agent.pyz", "agent", "--", "python", "t.py"]),
        (["/opt/v/bin/python3.12"], ["-m", "x"], [
            "/opt/v/bin/python3.12", "/elasticjob/agent.pyz", "agent", "--", "/opt/v/bin/python3.12", "-m", "x",
        ]),
        (["torchrun", "t.py"], None, ["python3", "/elasticjob/agent.pyz", "agent", "--", "torchrun", "t.py"]),
        (["bash", "-c"], ["x"], ["python3", "/elasticjob/agent.pyz", "agent", "--", "bash", "-c", "x"]),
        (["/bin/pythonish"], None, ["python3", "/elasticjob/agent.pyz", "agent", "--", "/bin/pythonish"]),
    ],
)  # fmt: skip
def test_the_agent_wraps_the_command(command: list[str], args: list[str] | None, wrapped: list[str]) -> None:
    container = trainer(worker(template(None, command=command, args=args)))
    assert container["command"] == wrapped
    assert "args" not in container


def test_a_worker_pod_has_its_host_name_and_a_token_only_if_the_template_asks() -> None:
    pod = worker(template({"nodeSelector": {"gpu": "yes"}, "imagePullSecrets": [{"name": "reg"}]}))
    assert pod["metadata"]["name"] == "bert-1-2"
    assert pod["metadata"]["ownerReferences"][0]["uid"] == UID
    assert pod["metadata"]["labels"]["elasticjob.dev/role"] == "worker"
    spec = pod["spec"]
    picked = {name: spec[name] for name in ("hostname", "subdomain", "restartPolicy", "nodeSelector")}
    assert picked == {
        "hostname": "bert-1", "subdomain": "bert", "restartPolicy": "Never", "nodeSelector": {"gpu": "yes"},
    }  # fmt: skip
    assert (spec["automountServiceAccountToken"], spec["enableServiceLinks"]) == (False, False)
    assert spec["imagePullSecrets"] == [{"name": "reg"}]
    assert worker(template({"automountServiceAccountToken": True}))["spec"]["automountServiceAccountToken"] is True


def test_the_agent_gets_its_settings_and_its_key_from_the_secret() -> None:
    variables = env(
        trainer(worker(template(env=[{"name": "ELASTICJOB_INDEX", "value": "9"}, {"name": "A", "value": "b"}])))
    )
    assert variables["A"] == "b"
    assert {variables[n] for n in (Env.INDEX, Env.POD_NAME, Env.INCARNATION)} == {"1", "bert-1-2", "2"}
    assert variables[Env.STORE_ENDPOINT] == "bert-rdzv.ns.svc:29400"
    assert variables[Env.NODE_KEY] == {"secretKeyRef": {"name": "bert-rdzv", "key": "node"}}
    assert variables[Env.POD_IP] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert (variables[Env.PRELOAD], variables[Env.KEEP_ALIVE]) == ("torch,torch._dynamo", "1x3")
    assert "PYTHONUNBUFFERED" not in variables, "it would override the image's and that of envFrom"
    assert Env.OPERATOR_KEY not in variables


def test_the_agent_gets_its_role_and_the_rendezvous_backend() -> None:
    variables = env(trainer(worker()))
    assert (variables[Env.ROLE], variables[Env.RENDEZVOUS_BACKEND]) == ("", "elasticjob")
    annotated = template() | {"metadata": {"annotations": {"elasticjob.dev/worker-role": "reader"}}}
    variables = env(trainer(worker(annotated, rendezvous={"backend": "c10d"})))
    assert (variables[Env.ROLE], variables[Env.RENDEZVOUS_BACKEND]) == ("reader", "c10d")


@pytest.mark.parametrize(
    ("requested", "stop_grace", "expected"), [(None, 1, 30), (3, 1, 6), (60, 1, 60), (None, 40, 45), (0, 0, 5)]
)
def test_the_kubelet_waits_longer_than_the_agent(requested: int | None, stop_grace: int, expected: int) -> None:
    pod = {} if requested is None else {"terminationGracePeriodSeconds": requested}
    assert worker(template(pod), stopGraceSeconds=stop_grace)["spec"]["terminationGracePeriodSeconds"] == expected


@pytest.mark.parametrize(
    ("policy", "requested", "graceful", "pod_grace"),
    [({}, None, 24, 25), ({}, 600, 594, 595), ({"gracefulShutdownSeconds": 120}, None, 120, 121),
     ({"gracefulShutdownSeconds": 120}, 600, 120, 595)],
)  # fmt: skip
def test_the_agent_gets_the_time_that_its_workers_have_to_end(
    policy: dict[str, int], requested: int | None, graceful: int, pod_grace: int
) -> None:
    pod = {} if requested is None else {"terminationGracePeriodSeconds": requested}
    variables = env(trainer(worker(template(pod), elasticPolicy=policy)))
    assert variables[Env.GRACEFUL_SHUTDOWN_SECONDS] == str(graceful)
    assert variables[Env.POD_GRACE_SECONDS] == str(pod_grace)


@pytest.mark.parametrize("own", [False, True])
def test_shared_memory_is_added_unless_the_template_has_its_own(own: bool) -> None:
    mounts = [{"name": "mine", "mountPath": "/dev/shm/"}] if own else []
    pod = worker(template(volumeMounts=mounts))
    assert [v["name"] for v in pod["spec"]["volumes"]] == ["elasticjob-agent", *([] if own else ["elasticjob-shm"])]
    paths = [m["mountPath"].rstrip("/") for m in trainer(pod)["volumeMounts"]]
    assert paths.count("/dev/shm") == 1


def test_the_named_trainer_is_wrapped_and_sidecars_are_left_alone() -> None:
    sidecar = {"name": "log", "image": "l", "command": ["tail"]}
    main = {"name": "trainer", "image": "u", "command": ["python", "t.py"]}
    pod = worker({"spec": {"containers": [sidecar, main]}})
    assert pod["spec"]["containers"][0] == sidecar
    assert pod["spec"]["containers"][1]["command"][1] == "/elasticjob/agent.pyz"


@pytest.mark.parametrize(
    ("pod", "policy"),
    [({}, None), ({"dnsPolicy": "ClusterFirst"}, "ClusterFirst"), ({"hostNetwork": True}, "ClusterFirstWithHostNet"),
     ({"hostNetwork": True, "dnsPolicy": "ClusterFirst"}, "ClusterFirstWithHostNet"),
     ({"hostNetwork": True, "dnsPolicy": "None"}, "None"), ({"hostNetwork": False}, None)],
)  # fmt: skip
def test_a_pod_on_the_network_of_its_machine_resolves_the_name_of_the_store(pod: Raw, policy: str | None) -> None:
    assert worker(template(pod))["spec"].get("dnsPolicy") == policy


def test_each_node_selector_term_of_the_template_excludes_avoided_nodes() -> None:
    terms = [{"matchExpressions": [{"key": "a", "operator": "Exists"}]}, {"matchFields": [{"key": "metadata.name"}]}]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    pod = worker(template({"affinity": {"nodeAffinity": required, "podAntiAffinity": {}}}), avoid=("n1", "n2"))
    affinity = pod["spec"]["affinity"]
    # A rule about the node's name may have one value only. The label kubernetes.io/hostname may differ from the name.
    excluded = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in ("n1", "n2")]
    chosen = affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert [term["matchFields"][-2:] for term in chosen] == [excluded, excluded]
    assert chosen[0]["matchExpressions"] == [{"key": "a", "operator": "Exists"}]
    assert chosen[1]["matchFields"][0] == {"key": "metadata.name"}
    assert "podAntiAffinity" in affinity
    assert pod["metadata"]["annotations"]["elasticjob.dev/avoids"] == "n1,n2"
    assert "affinity" not in worker()["spec"]


WORKERS = {"matchLabels": {"elasticjob.dev/job-uid": UID, "elasticjob.dev/role": "worker"}}


def test_placement_is_a_preference_about_machines_or_the_narrowest_place() -> None:
    spec = worker(placement="Spread")["spec"]
    rule = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
    assert (spec["topologySpreadConstraints"], "affinity" in spec) == ([{**rule, "labelSelector": WORKERS}], False)
    built = job(placement="Packed")
    assert built.spec is not None
    packed = manifests.worker_pod_manifest(built, built.spec, 0, 0, "a", ("n1",), 0, "example.com/rack")["spec"]
    term = {"topologyKey": "example.com/rack", "labelSelector": WORKERS}
    preferred = [{"weight": 100, "podAffinityTerm": term}]
    assert packed["affinity"]["podAffinity"] == {"preferredDuringSchedulingIgnoredDuringExecution": preferred}
    assert "nodeAffinity" in packed["affinity"]  # the avoided node
    # Without a rule of its own the scheduler would spread the pods of the job's Service.
    assert packed["topologySpreadConstraints"] == [{**rule, "topologyKey": "example.com/rack"}]


@pytest.mark.parametrize("placement", ["None", "Packed", "Spread"])
@pytest.mark.parametrize(
    "own",
    [
        {"topologySpreadConstraints": [{"maxSkew": 2}]},
        {"affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{}]}}},
        {"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{}]}}},
    ],
    ids=["spread", "affinity", "anti-affinity"],
)
def test_a_template_that_says_where_pods_are_is_left_alone(own: Raw, placement: str) -> None:
    spec = worker(template(own), placement=placement)["spec"]
    assert {name: spec.get(name) for name in ("affinity", "topologySpreadConstraints")} == {
        "affinity": None, "topologySpreadConstraints": None, **own,
    }  # fmt: skip


def test_without_placement_nothing_is_preferred() -> None:
    assert {"affinity", "topologySpreadConstraints"}.isdisjoint(worker()["spec"])


def test_building_a_manifest_does_not_change_the_job() -> None:
    raw = raw_job(template=template({"volumes": [{"name": "data", "emptyDir": {}}]}))
    before = copy.deepcopy(raw)
    built = parse_job(raw)
    assert built.spec is not None
    one = manifests.worker_pod_manifest(built, built.spec, 0, 0, "a", ("n1",))
    assert manifests.worker_pod_manifest(built, built.spec, 0, 0, "a", ("n1",)) == one
    assert raw == before


def restricted(container: Raw) -> bool:
    context = container["securityContext"]
    return (
        context["allowPrivilegeEscalation"] is False
        and context["capabilities"] == {"drop": ["ALL"]}
        and context["runAsNonRoot"] is True
        and context.get("runAsUser") != 0
        and context["seccompProfile"] == {"type": "RuntimeDefault"}
    )


def test_added_containers_pass_the_restricted_policy() -> None:
    built = job()
    assert built.spec is not None
    pod = manifests.store_pod_manifest(built, built.spec, 3, "agent:1")
    assert restricted(pod["spec"]["containers"][0])
    assert restricted(worker()["spec"]["initContainers"][0])
    assert pod["spec"]["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}


@pytest.mark.parametrize(
    ("context", "user"),
    [(None, None), ({"runAsUser": 1000, "runAsGroup": 5}, None), ({"runAsUser": 0}, 65532), ({"runAsUser": "0"}, None)],
)
def test_containers_that_are_added_name_a_user_only_in_a_pod_that_runs_as_root(context: Any, user: int | None) -> None:
    pod = worker(template({"securityContext": context} if context else {}))
    added = pod["spec"]["initContainers"][0]["securityContext"]
    assert (added.get("runAsUser"), added.get("runAsGroup")) == (user, user)
    assert restricted(pod["spec"]["initContainers"][0])
    built = job(template=template({"securityContext": context} if context else {}))
    assert built.spec is not None
    store = manifests.store_pod_manifest(built, built.spec, 3, "agent:1")
    assert "runAs" not in json.dumps(store).replace("runAsNonRoot", "")


def test_the_store_pod_gets_its_settings_and_both_keys() -> None:
    where = {"nodeSelector": {"cpu": "y"}, "tolerations": [{"key": "t"}], "priorityClassName": "high"}
    built = job(rendezvous={"port": 1234, "store": where}, failurePolicy={"maxRestarts": 7})
    assert built.spec is not None
    pod = manifests.store_pod_manifest(built, built.spec, 3, "agent:1")
    assert (pod["metadata"]["name"], pod["spec"]["restartPolicy"]) == ("bert-rdzv-3", "Always")
    assert {name: pod["spec"][name] for name in where} == where
    standby = manifests.store_pod_manifest(built, built.spec, 4, "agent:1", standby=True)
    assert {name: standby["spec"][name] for name in where} == where
    assert "affinity" not in pod["spec"]
    excluded = manifests.store_pod_manifest(built, built.spec, 3, "agent:1", ("n1",))
    movable = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "true"}
    assert excluded["metadata"]["annotations"] == movable | {"elasticjob.dev/avoids": "n1"}
    assert pod["metadata"]["annotations"] == movable
    assert "nodeAffinity" in excluded["spec"]["affinity"]
    variables = env(pod["spec"]["containers"][0])
    settings = codec.parse(RoundSettings, json.loads(variables[Env.SETTINGS]))
    assert (settings.min_nodes, settings.target, settings.max_restarts) == (2, 2, 7)
    assert (variables[Env.STORE_INCARNATION], variables[Env.PORT], variables[Env.RUN_ID]) == ("3", "1234", UID)
    assert variables[Env.OPERATOR_KEY] == {"secretKeyRef": {"name": "bert-rdzv", "key": "operator"}}


def test_a_standby_store_is_apart_from_the_store_that_serves_before_all_else() -> None:
    """The pods of earlier stores may still be on all the other nodes, and there are many workers."""
    built = job(status=status(rendezvous={"incarnation": 3}))
    assert built.spec is not None
    standby = manifests.store_pod_manifest(built, built.spec, 4, "agent:1", standby=True)
    terms = standby["spec"]["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]

    def weight(pod: Raw) -> int:
        labels = pod["metadata"]["labels"].items()
        selectors = {t["weight"]: t["podAffinityTerm"]["labelSelector"]["matchLabels"].items() for t in terms}
        return sum(weight for weight, selector in selectors.items() if selector <= labels)

    stores = [manifests.store_pod_manifest(built, built.spec, incarnation, "agent:1") for incarnation in (2, 3)]
    node = manifests.worker_pod_manifest(built, built.spec, 0, 0, "agent:1", ())
    assert [weight(pod) for pod in (*stores, node)] == [0, 100, 1]


@pytest.mark.parametrize(("backend", "clients"), [("elasticjob", "none"), ("c10d", "nodes")])
def test_only_torchruns_own_backend_uses_the_jobs_store_as_a_tcpstore(backend: str, clients: str) -> None:
    built = job(rendezvous={"backend": backend})
    assert built.spec is not None
    pod = manifests.store_pod_manifest(built, built.spec, 0, "agent:1")
    assert env(pod["spec"]["containers"][0])[Env.STORE_CLIENTS] == clients


@pytest.mark.parametrize(
    ("limit", "nodes", "margin"),
    [(None, 4, 2.0), (None, 1024, 2.0), (None, 4096, 1.4), ("256Mi", 4, 1.3), ("256Mi", 512, 1.3)],
)
def test_the_store_pods_memory_limit_is_well_above_what_the_store_allows(
    limit: str | None, nodes: int, margin: float
) -> None:
    """256Mi is the lowest limit that the CRD allows."""
    built = job(rendezvous={"store": {"resources": {"limits": {"memory": limit}}}} if limit else {})
    assert built.spec is not None
    pod = manifests.store_pod_manifest(built, built.spec, 0, "agent:1")
    (container,) = pod["spec"]["containers"]
    limits = store_limits(RoundSettings(1, nodes, nodes), 1 << 20)
    connection = limits.unauthenticated_bytes + 8 * 1024
    process = 70 * 1024 * 1024
    allowed = process + limits.memory + limits.total_write_buffer + limits.unauthenticated * connection
    assert quantity(container["resources"]["limits"]["memory"]) >= margin * allowed


@pytest.mark.parametrize(
    ("own", "requests", "limits"),
    [
        ({}, ("50m", "64Mi"), (None, "512Mi")),
        ({"requests": {"cpu": "1"}, "limits": {"memory": "1Gi"}}, ("1", "64Mi"), (None, "1Gi")),
        ({"requests": {"cpu": 2, "memory": "2Gi"}}, (2, "2Gi"), (None, "2Gi")),
        ({"requests": {"memory": "100Mi"}, "limits": {"cpu": "10m"}}, ("10m", "100Mi"), ("10m", "512Mi")),
        ({"limits": {"cpu": "4"}}, ("50m", "64Mi"), ("4", "512Mi")),
    ],
    ids=["none", "both", "a high request", "a low limit", "a high limit"],
)
def test_a_request_or_limit_of_the_store_replaces_the_operators_own(
    own: Raw, requests: tuple[Any, Any], limits: tuple[Any, Any]
) -> None:
    built = job(rendezvous={"store": {"resources": own}})
    assert built.spec is not None
    for standby in (False, True):
        pod = manifests.store_pod_manifest(built, built.spec, 0, "agent:1", standby=standby)
        resources = pod["spec"]["containers"][0]["resources"]
        assert (resources["requests"]["cpu"], resources["requests"]["memory"]) == requests
        assert (resources["limits"].get("cpu"), resources["limits"]["memory"]) == limits


def test_services_and_secret() -> None:
    built = job()
    nodes = manifests.nodes_service_manifest(built)
    assert (nodes["metadata"]["name"], nodes["spec"]["clusterIP"]) == ("bert", "None")
    assert nodes["spec"]["publishNotReadyAddresses"] is True
    rendezvous = manifests.store_service_manifest(built, 29400, 4)
    assert rendezvous["spec"]["selector"]["elasticjob.dev/incarnation"] == "4"
    secret = manifests.secret_manifest(built, {"node": "ab", "operator": "cd"})
    assert {k: base64.b64decode(v).decode() for k, v in secret["data"].items()} == {"node": "ab", "operator": "cd"}


def test_every_child_belongs_to_the_job_and_has_its_labels() -> None:
    built = job(replicas=2, gang={"provider": "volcano"})
    spec = built.spec
    assert spec is not None
    children = [
        manifests.worker_pod_manifest(built, spec, 1, 0, "a"),
        manifests.store_pod_manifest(built, spec, 0, "a"),
        manifests.nodes_service_manifest(built),
        manifests.store_service_manifest(built, 29400, 0),
        manifests.secret_manifest(built, {}),
        manifests.policy_manifest(built, DisruptionBudget("", 2)),
        manifests.policy_manifest(built, NetworkPolicy("", 29400, "")),
        manifests.gang_manifest(built, spec),
        manifests.workload_manifest(built, spec, "w", {}),
    ]
    names = ["bert-1-0", "bert-rdzv-0", "bert", "bert-rdzv", "bert-rdzv", "bert", "bert", "bert", "w"]
    assert [child["metadata"]["name"] for child in children] == names
    for child in children:
        meta = child["metadata"]
        (owner,) = meta["ownerReferences"]
        assert (owner["kind"], owner["uid"], owner["controller"]) == ("ElasticJob", UID, True)
        assert "finalizers" not in meta
        assert {
            "elasticjob.dev/job-name": "bert", "elasticjob.dev/job-uid": UID, "app.kubernetes.io/name": "elasticjob",
            "app.kubernetes.io/instance": "bert", "app.kubernetes.io/managed-by": "elasticjob",
        }.items() <= meta["labels"].items(), child["kind"]  # fmt: skip
    worker_labels, store_labels = (child["metadata"]["labels"] for child in children[:2])
    assert {name: worker_labels[f"elasticjob.dev/{name}"] for name in ("role", "index", "incarnation")} == {
        "role": "worker", "index": "1", "incarnation": "0",
    }  # fmt: skip
    assert (worker_labels["elasticjob.dev/execution-attempt"], store_labels["elasticjob.dev/role"]) == ("1", "store")
    kueue = {"metadata": {"labels": {"kueue.x-k8s.io/podset": "workers"}}} | template()
    assert worker(kueue)["metadata"]["labels"]["kueue.x-k8s.io/podset"] == "workers"


def test_init_containers_report_the_end_of_their_log_unless_the_template_says_otherwise() -> None:
    own = [{"name": "a", "image": "i"}, {"name": "b", "image": "i", "terminationMessagePolicy": "File"}]
    found = worker(template({"initContainers": own}))["spec"]["initContainers"]
    assert [c["terminationMessagePolicy"] for c in found] == ["FallbackToLogsOnError", "FallbackToLogsOnError", "File"]


def test_a_worker_pod_carries_the_number_of_failed_attempts_whatever_the_template_says() -> None:
    forged = {"metadata": {"annotations": {FAILED_STARTS: "9"}}} | template()
    built = job(template=forged)
    assert built.spec is not None
    for failed, expected in ((0, None), (3, "3")):
        pod = manifests.worker_pod_manifest(built, built.spec, 0, 0, "a", (), failed)
        assert pod["metadata"]["annotations"].get(FAILED_STARTS) == expected
        assert parse_pod(pod).failed_starts == failed
