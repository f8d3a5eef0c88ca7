"""Rendezvous: the rules that decide which nodes train together, with which ranks, and when a round ends.

Every module is pure: no I/O, no clock. `store_pod.coordinator` passes events and the time in, and sends the messages
that the rules return. Each module decides or holds one thing:

    state            what the coordinator knows, its events and its effects, as frozen data
    decision         what a rule returns: the next state, messages to nodes, and a reason for the log
    rounds           applies events and rules; which round starts when, and when it ends to change its size
    apply_event      how one event changes the state
    rank_assignment  which nodes are in a round, and their ranks
    round_end        what ends a round, its root cause, whether it is charged; the outcome of the job
    planned_end      the last step of a round whose workers all stop after the same step
    store_recovery   what a successor store does with the round that it finds
    confirmation     when a round needs the operator's confirmation that this is the only store
    stalls           which worker is to blame for a hang that ends nothing
    stragglers       which rank slows down every step; no rule depends on it
    recovery_times   how long each phase of a recovery took; no rule depends on it
    lost_time        how much time faults cost; no rule depends on it
    report           the report to the operator
    persistent_map   immutable mappings with cheap copies
"""
