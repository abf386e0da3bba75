"""The composition root: settings, worker processes, the dev stack and the scripted model."""
