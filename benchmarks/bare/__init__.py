"""The baselines: plain Temporal, without anything of Caisson, on queues of the same kinds."""
