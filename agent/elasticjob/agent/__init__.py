"""The agent: one per node. Joins the rendezvous, starts workers, watches them, reports. Standard library only."""
