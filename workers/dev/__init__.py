"""The dev stack: the services of `temporal-dev.yml`, run as processes on this machine, without Docker."""
