"""A whole swarm in one thread: the real protocol, a virtual clock, a bad network, and faults at every moment.

Real are `protocol.stage_machine` at each peer and `protocol.membership` at the coordinator. Simulated is what the
daemons around them do: streams, disks, the compute thread, the signed views. Everything is drawn from the seed, so a
failure repeats: `python scripts/simulate --seed 17 --trace`.

    scenario    what is drawn for a run                 host         a stage at a peer: machine, toy model, disk
    toy_model   exact arithmetic, and the plain loop    peer         its daemon: joins, reports, views
    clock       virtual time                            coordinator  membership, what it stores, what it sends
    network     delays, losses, partitions              faults       kills, freezes, flips, at a phase or a time
    checks      the rules, at every event               swarm        all of it together
"""
