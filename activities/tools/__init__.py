"""The tools an agent can use: what the model is told of each, and what each does."""
