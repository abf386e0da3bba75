"""Start a run from another Python service with nothing but the Temporal client: `python start.py "What to do"`.

Needs `temporalio` only. A run is a workflow of type `AgentRun` on task queue `caisson`; its input and its result are JSON.
"""

import asyncio
import sys
import uuid

from temporalio.client import Client, WorkflowFailureError
from temporalio.envconfig import ClientConfig


async def main(task: str) -> int:
    """Start a run, talk to it, wait for its result, and return an exit code."""
    # Address, namespace, API key and TLS come from TEMPORAL_* variables or a profile, as for the `temporal` command.
    config = ClientConfig.load_client_connect_config()
    config.setdefault("target_host", "localhost:7233")
    client = await Client.connect(**config)

    run = await client.start_workflow(
        "AgentRun",
        {"task": task, "agent": "analyst", "budget": {"steps": 20}, "labels": {"service": "start_from_python"}},
        id=f"service-{uuid.uuid4()}",  # in a real service: an id of your own, so that a repeated request starts nothing twice
        task_queue="caisson",
    )
    print(f"started {run.id}")
    status = await run.query("status")
    print(f"state: {status['state']}")
    try:
        result = await run.result()
    except WorkflowFailureError as error:
        print(f"failed: {error.cause}", file=sys.stderr)
        return 1
    print(f"{result['status']}: {result['output']}")
    for artifact in result["artifacts"]["first"]:
        print(f"  {artifact['path']}  {artifact['blob']['size']} bytes  sha256 {artifact['blob']['digest']}")
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(" ".join(sys.argv[1:]) or "Count the files in the workspace")))
