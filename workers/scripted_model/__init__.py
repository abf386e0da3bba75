"""A scripted model: an HTTP server that speaks the OpenAI Responses API and plays a scenario file.

It is not a language model. It lets the whole product run, and be tested, without a key: the real SDK talks to it over a real
socket. `docs/scripted-model.md` describes the scenario file.
"""

from workers.scripted_model.journal import JournalEntry
from workers.scripted_model.scenario import ScenarioError, ScenarioFile, load_scenarios, parse_scenarios
from workers.scripted_model.server import ScriptedModelServer

__all__ = ["JournalEntry", "ScenarioError", "ScenarioFile", "ScriptedModelServer", "load_scenarios", "parse_scenarios"]
