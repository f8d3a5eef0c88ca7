"""`plan(observed, image, now) -> Plan`: what status must say and what must be done, and why. Pure.

Read it top down: `reconcile`, then `decisions` and `workers` (worker pods), `stores`, `budget` (restarts), `ending`,
`world` (the training), `conditions`, `status`, `notes` (Events).
"""

from elasticjob_operator.plan.reconcile import Plan, StoreAddress, plan

__all__ = ["Plan", "StoreAddress", "plan"]
