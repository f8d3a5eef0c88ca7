"""Rendezvous: the rules that decide which agents train together, with which ranks, and when a round ends.

Every module is pure: no I/O, no clock. `store_pod.coordinator` passes events and the time in, and sends the messages
that the rules return. Each module decides or holds one thing:

    state/               what the coordinator knows, its events and its effects, as frozen data
    decision             what a rule returns: the next state, messages to agents, and a reason for the log
    event_batch          after which events of a batch the rules need not run
    event_handlers/      how one event changes the state
        apply_event          the way in
        announcements        an agent that announces itself
        agent_messages       its messages after that
        standbys             what agents outside the round are sent
        operator_views       the operator's view
    rounds/              the rules
        rounds               the loop: applies events, then RULES, in their order
        starts/              how a round starts
            recovered_round      how recovery ends
            restart_delay        how long the next round waits after a failure
            round_start          when a round starts, and with which agents
            rank_assignment      which agents are in a round, and their ranks
            confirmation         when a round needs the operator's confirmation that this is the only store
        ends/                how a round ends
            lost_members         which members are lost
            round_end            what ends a round, and what its members are sent
            round_size           when a running round ends to change its size
            code_update          when it ends because the job has new code
            planned_end          the last step of a round whose workers all stop after the same step
            round_break          when the collectives of a round may be broken
            round_conclusion     success; the root cause of a failure, and whether it is charged
        stages               launchers of the pods' command that follow each other
        job_outcome          the outcome of the job
        release              which agents may end their pods
    store_recovery       what a successor store does with the round that it finds
    standby_store        when a standby store takes over, and when a store may end
    node_ends            when the Nodes of agents end
    observations/        what the coordinator measures and reports; only `slow_starts` and `stalls` have rules
    persistent_map       immutable mappings with cheap copies
"""
