"""The story of a run, deterministic. Imports contracts, its siblings and temporalio, and nothing that touches the world."""
