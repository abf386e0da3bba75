"""Calling the model: the transcript, the request, the reply, and what its errors mean."""
