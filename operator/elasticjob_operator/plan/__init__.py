"""`plan(observed, image, now) -> Plan` decides the job's next status and the actions that lead to it. Pure.

Modules, in reading order:

    reconcile       `plan` itself: combines the decisions of the other modules
    context         the inputs of one reconcile, and `Actions`
    starts          attempts to start the worker pods: how many failed in a row, and when the next one is due
    indices         which indices have a pod: when a job shrinks, those that do no work go first
    pod_decisions   for each index: keep, create or replace its worker pod
    workers         from these decisions: incarnations, avoided nodes, expected pods, pods to create and to delete
    gang            which new pods become members of the gang
    stores          which store incarnation serves, and whether the operator may confirm it as the only store
    key_ids         which keys an execution has, and so which Secret its pods name
    budget          which failures are charged as restarts, and when the budget is exhausted
    failures        failures as records for status, and their one-line summaries
    world           the state of training: from the coordinator's report, or from the last status
    suspension      what is deleted while the job is suspended, and when its next execution begins
    job_end         the outcome of the job, and what is deleted at its end
    cordons         additional pods of a job at its minimum that has pods on cordoned machines
    node_warnings   machines that are about to end or to be drained: which pods leave, messages
    conditions      the four conditions of a job that has not ended
    status          the next status
    execution_defaults  `status.defaults`
    scale           which pods the scale subresource counts
    stragglers      `status.straggler` and its Event
    state_transfer  `status.stateTransfer`
    goodput         `status.goodput`
    trainer_status  `status.trainerStatus`, and when it is written
    event_records   Events about changes between the last status and the next one
    freshness       which plans need the job and its pods as they are now, not as the watches delivered them
"""

from elasticjob_operator.plan.reconcile import SHORTEST_REQUEUE, Plan, StoreAddress, plan
from elasticjob_operator.plan.staleness import needs_fresh_read

__all__ = ["SHORTEST_REQUEUE", "Plan", "StoreAddress", "needs_fresh_read", "plan"]
