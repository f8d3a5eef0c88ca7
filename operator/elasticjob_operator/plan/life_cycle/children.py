"""The objects that a job's pods need before them: the Secret with the keys, the Services, the gang object."""

from __future__ import annotations

from elasticjob_operator.actions import (
    Action,
    CreateGang,
    CreateNodesService,
    CreateSecret,
    CreateStoreService,
    ResizeGang,
    UpdateStoreService,
)
from elasticjob_operator.manifests import gang_child
from elasticjob_operator.manifests.names import key_secret, nodes_service, store_service
from elasticjob_operator.plan.context import ReconcileContext
from elasticjob_operator.plan.store_pods.stores import StorePlan


def plan_children(ctx: ReconcileContext, store: StorePlan) -> tuple[Action, ...]:
    """Return what creates or corrects the Secret, the Services and the gang object. They come before the pods."""
    name, children = ctx.job.name, ctx.observed.children
    if not children.known:
        return ()
    actions: list[Action] = []
    secret = key_secret(ctx.job)
    if children.secret != secret and ctx.may_create(f"Secret/{secret}"):
        actions.append(CreateSecret())
    if children.nodes is None and ctx.may_create(f"Service/{nodes_service(name)}"):
        actions.append(CreateNodesService())
    rendezvous = children.rendezvous
    if rendezvous is None and ctx.may_create(f"Service/{store_service(name)}"):
        actions.append(CreateStoreService(store.incarnation or 0))
    elif (
        rendezvous is not None
        and store.incarnation is not None
        and rendezvous.ours
        and rendezvous.incarnation != store.incarnation
    ):
        actions.append(UpdateStoreService(rendezvous.uid, store.incarnation))
    return (*actions, *_gang(ctx))


def _gang(ctx: ReconcileContext) -> tuple[Action, ...]:
    gang, child = ctx.observed.children.gang, gang_child(ctx.job, ctx.spec)
    if gang is None:
        return (CreateGang(),) if child and ctx.may_create(child) else ()
    if gang.ours and gang.gang_size != ctx.spec.min_replicas:
        return (ResizeGang(gang.uid, ctx.spec.min_replicas),)
    return ()
