"""How runs are written for people: one place for words, units and what may go to a terminal."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from urllib.parse import quote

from pydantic import JsonValue
from rich.console import Console
from rich.text import Text

from contracts.run import PendingApproval, RunResult, RunStatus, StepSummary
from contracts.usage import Budget, Usage

INDENT = 9
"""Columns before what a step did: `step 123 `."""
SHOWN_ARTIFACTS = 20
_SHOWN_ARGUMENTS = 1000
_LOCAL = ("localhost", "127.0.0.1", "[::1]", "0.0.0.0")  # noqa: S104 - compared with, never bound
_UI_PORT_OFFSET = 1000
"""`temporal server start-dev` puts its Web UI on the server's port plus 1000."""
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])")
"""Colours, cursor movements and titles (ECMA-48 CSI, OSC and two-byte sequences), which commands write in plenty."""
_CLOUD = (".tmprl.cloud", ".api.temporal.io")
_STYLES = {
    RunStatus.COMPLETED: "bold green",
    RunStatus.BUDGET_EXCEEDED: "bold yellow",
    RunStatus.CANCELLED: "bold yellow",
    RunStatus.REFUSED: "bold red",
    RunStatus.FAILED: "bold red",
}


def clean(text: str) -> str:
    """Make text from a model or a command safe for a terminal: no escape sequence, no hidden direction marks.

    A carriage return shows what a terminal would have left standing: the last thing written on that line.
    """
    text = _ESCAPE.sub("", text)
    lines = (line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    return "\n".join("".join(c if c.isprintable() or c == "\t" else "\ufffd" for c in line) for line in lines)


def one_line(text: str, limit: int = 200) -> str:
    """Return text as one clean line of at most `limit` characters."""
    line = clean(" ".join(text.split()))
    return line if len(line) <= limit else line[: limit - 1] + "…"


def duration(seconds: float) -> str:
    """Write a duration as a person would: `0.4 s`, `12 s`, `3 min 05 s`, `2 h 10 min`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def size(count: int) -> str:
    """Write a number of bytes with the unit that fits: `812 B`, `1.4 KB`, `23 MB`."""
    value, unit = float(count), "B"
    for larger in ("KB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{count} B" if unit == "B" else f"{value:.3g} {unit}"


def cost(usage: Usage) -> str:
    """Write what a run has cost; an unknown price is never shown as nothing."""
    return "cost unknown" if usage.cost_usd is None else f"${usage.cost_usd:.4f}"


def usage_line(usage: Usage, step: int, budget: Budget | None = None) -> str:
    """Say in one line what a run has used, beside the limits it has."""

    def of(used: str, limit: float | None, unit: str = "") -> str:
        return used if limit is None else f"{used} of {unit}{limit:,}"

    limits = budget or Budget(steps=None)
    tokens = f"{of(f'{usage.tokens:,}', limits.tokens)} tokens"
    if usage.cached_input_tokens:
        tokens += f" ({usage.cached_input_tokens:,} of them cached input)"
    word = "step" if step == 1 and limits.steps is None else "steps"
    parts = [f"{of(str(step), limits.steps)} {word}", tokens, of(cost(usage), limits.cost_usd, "$")]
    return " · ".join(parts)


def step_lines(step: StepSummary) -> Iterator[Text]:
    """Write one step: what the model said, then what it did, a line each."""
    facts = f"({step.tokens:,} tokens, model {duration(step.model_seconds)})"
    said = one_line(step.text, 160)
    lines = [(said, "italic")] if said else []
    lines += [(one_line(action), "") for action in step.actions]
    for number, (line, style) in enumerate(lines or [("no action", "dim")]):
        label = f"step {step.step}" if number == 0 else ""
        written = Text.assemble((f"{label:<{INDENT}}", "bold cyan"), (line, style))
        yield written.append(f"  {facts}", style="dim") if number == 0 else written


def label_line(label: str) -> Text:
    """Say prominently that what answers is no language model."""
    return Text(f"the model is {one_line(label, 100)}", style="bold black on yellow")


def approval_lines(run_id: str, approval: PendingApproval) -> Iterator[Text]:
    """Write an open approval, and the commands that answer it."""
    arguments = clean(approval.arguments)
    if len(arguments) > _SHOWN_ARGUMENTS:
        arguments = arguments[:_SHOWN_ARGUMENTS] + f"… (the whole: caisson transcript {quoted(run_id)} --step {approval.step})"
    yield Text(f"approval {approval.approval_id} is needed for {approval.tool}: {arguments}", style="bold yellow")
    if approval.reason:
        yield Text(f"  why: {clean(approval.reason)}")
    answer = f"caisson approve {quoted(run_id)} {approval.approval_id} --digest {approval.arguments_digest[:12]}"
    yield Text(f"  to allow it: {answer} --allow")
    yield Text(f'  to deny it:  {answer} --deny --reason "..."')


def quoted(run_id: str) -> str:
    """Return a run id as it is typed in a shell."""
    return shlex.quote(run_id)


def web_ui_of(address: str) -> str | None:
    """Guess where the Web UI of a Temporal server is; None when there is nothing to go by.

    Sources: `temporal server start-dev` (--ui-port: "defaults to --port + 1000"); Temporal Cloud's Web UI.
    """
    host, _, port = address.rpartition(":")
    if host in _LOCAL and port.isdigit():
        return f"http://localhost:{int(port) + _UI_PORT_OFFSET}"
    return "https://cloud.temporal.io" if host.endswith(_CLOUD) else None


def run_page(web_ui: str, namespace: str, run_id: str) -> str:
    """Return the address of a run's page in the Web UI."""
    return f"{web_ui.rstrip('/')}/namespaces/{quote(namespace, safe='')}/workflows/{quote(run_id, safe='')}"


def print_result(console: Console, run_id: str, result: RunResult, *, page: str | None = None, output: JsonValue = None) -> None:
    """Print how a run ended and what it made. `page` is its address in the Web UI; `output` the whole answer, if it was
    read from the store because the result holds only its preview."""
    _line(console, Text())
    ended = Text.assemble((result.status.value, _STYLES[result.status]), f"  run {clean(run_id)}")
    _line(console, ended.append(f"  ({clean(result.reason)})") if result.reason else ended)
    if result.model_label:
        _line(console, label_line(result.model_label))
    whole = result.output if output is None else output
    if whole is not None:
        _line(console, Text())
        _line(console, Text(clean(whole if isinstance(whole, str) else json.dumps(whole, indent=2, ensure_ascii=False))))
        if result.output_blob is not None and output is None:
            _line(console, Text(f"(the beginning and end; the whole is blob {result.output_blob.digest})", style="dim"))
    _line(console, Text())
    for text in _artifact_lines(run_id, result):
        _line(console, text)
    spent = [usage_line(result.usage, result.steps), f"{result.usage.tool_calls} tool calls", duration(result.usage.wall_seconds)]
    if result.model_label and result.usage.cost_usd:
        spent.append("the cost is the price table's, nothing was billed")
    _field(console, "used", " · ".join(spent))
    if result.model:
        _field(console, "model", clean(result.model))
    _field(console, "transcript", f"caisson transcript {quoted(run_id)}")
    if page is not None:
        _field(console, "Web UI", page)


def _artifact_lines(run_id: str, result: RunResult) -> Iterator[Text]:
    artifacts = result.artifacts
    if artifacts.count:
        yield Text(f"artifacts: {artifacts.count}, {size(artifacts.total_bytes)}")
    for artifact in artifacts.first[:SHOWN_ARTIFACTS]:
        digest = artifact.blob.digest[:12]
        yield Text.assemble(f"  {clean(artifact.path)}  ", (f"{size(artifact.blob.size)}  sha256:{digest}", "dim"))
    if artifacts.count > SHOWN_ARTIFACTS:
        yield Text(f"  … and {artifacts.count - SHOWN_ARTIFACTS} more: caisson artifacts {quoted(run_id)}", style="dim")
    if artifacts.count:
        yield Text(f"  copy them: caisson artifacts {quoted(run_id)} get DIR", style="dim")
    for skipped in artifacts.skipped:
        yield Text(f"  not an artifact: {one_line(skipped)}", style="yellow")


def _field(console: Console, name: str, value: str) -> None:
    _line(console, Text.assemble((f"{name}: ", "dim"), value))


def _line(console: Console, text: Text) -> None:
    # soft_wrap: a line that is copied, or read by a program, must not be broken at the width of a terminal.
    console.print(text, soft_wrap=True, highlight=False)
