// Start a run from a TypeScript service with nothing but the Temporal client: node start.ts "What to do"
//
// Needs @temporalio/client and Node.js 22.18 or newer (which runs TypeScript as it is). A run is a workflow of type `AgentRun` on
// task queue `caisson`; its input and its result are JSON.
import { randomUUID } from "node:crypto";
import { Client, Connection, WorkflowFailedError } from "@temporalio/client";

interface Artifact { path: string; blob: { digest: string; size: number } }
interface RunResult { status: string; output: unknown; artifacts: { first: Artifact[] } }

const task = process.argv.slice(2).join(" ") || "Count the files in the workspace";
const connection = await Connection.connect({ address: process.env.TEMPORAL_ADDRESS ?? "localhost:7233" });
const client = new Client({ connection, namespace: process.env.TEMPORAL_NAMESPACE ?? "default" });

const run = await client.workflow.start("AgentRun", {
  taskQueue: "caisson",
  // In a real service: an id of your own, so that a repeated request starts nothing twice.
  workflowId: `service-${randomUUID()}`,
  args: [{ task, agent: "analyst", budget: { steps: 20 }, labels: { service: "start_from_typescript" } }],
});
console.log(`started ${run.workflowId}`);
const status = await run.query<{ state: string }>("status");
console.log(`state: ${status.state}`);

try {
  const result = (await run.result()) as RunResult;
  console.log(`${result.status}: ${JSON.stringify(result.output)}`);
  for (const { path, blob } of result.artifacts.first) {
    console.log(`  ${path}  ${blob.size} bytes  sha256 ${blob.digest}`);
  }
} catch (error) {
  if (!(error instanceof WorkflowFailedError)) throw error;
  console.error(`failed: ${error.cause?.message}`);
  process.exitCode = 1;
} finally {
  await connection.close();
}
