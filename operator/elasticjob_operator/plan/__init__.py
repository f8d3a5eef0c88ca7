"""`plan(observed, image, now) -> Plan` decides the job's next status and the actions that lead to it. Pure.

Begin with `reconcile.py`, and with the story of a reconcile in the operator's README.md. What it combines:

    training_state   which round trains: from the store's report, or from the last status
    pods             which indices have a worker pod, what is created, kept, replaced or deleted
    store_pods       which store serves, when it is replaced, the standby store
    failure_policy   which failures are charged, and when the budget of restarts is exhausted
    life_cycle       queue, suspension, the objects that pods need, the job's end
    job_status       the next status, with its conditions, and the Events about what has changed
    staleness        which plans need the job and its pods as they are now, not as the watches delivered them
    context          the inputs of one reconcile, and `Actions`
"""

from elasticjob_operator.plan.reconcile import SHORTEST_REQUEUE, Plan, StoreAddress, plan
from elasticjob_operator.plan.staleness import needs_fresh_read

__all__ = ["SHORTEST_REQUEUE", "Plan", "StoreAddress", "needs_fresh_read", "plan"]
