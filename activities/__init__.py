"""Everything that touches the world, one folder a concern. Imports contracts, never workflows."""
