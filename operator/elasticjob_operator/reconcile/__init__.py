"""Reconcile one job: read, plan, write the status, act, record Events."""
